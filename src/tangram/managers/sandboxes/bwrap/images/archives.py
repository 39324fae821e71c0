"""Archives: container images as other programs write them.

Owns the formats: the old and the new output of `docker save`, and the OCI image layout, in a tar or in a directory.
Reads the small JSON files and locates each layer; never unpacks a layer, never writes. Raises InvalidConfig for input
that violates the formats. Verifies the digest of each JSON file for which one is given.
"""

from __future__ import annotations

import hashlib
import os
import platform
import posixpath
import re
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig
from tangram.managers.work import WORKSPACE, require_environment, require_text

DESCRIPTION_BYTES_MAX = 4 << 20
"""Size limit of one JSON file of an archive: the limit of registries."""
INDEX_DEPTH_MAX = 4
"""Levels of indexes that refer to indexes."""
ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "i686": "386",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "riscv64": "riscv64",
}
"""The architecture in images, by the name that the machine reports."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_T = TypeVar("_T")


# ---- JSON files -----------------------------------------------------------------------------------------------------


class _Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct, frozen=True):
    digest: str
    media_type: str = msgspec.field(name="mediaType", default="")
    platform: _Platform | None = None
    annotations: dict[str, str] | None = None


class _Index(msgspec.Struct, frozen=True):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct, frozen=True):
    config: _Descriptor
    layers: list[_Descriptor]


class _SavedImage(msgspec.Struct, frozen=True, rename="pascal"):
    """One image in the manifest.json of `docker save`."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class _RuntimeConfig(msgspec.Struct, frozen=True, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _Config(msgspec.Struct, frozen=True):
    rootfs: _RootFs
    architecture: str = ""
    os: str = ""
    config: _RuntimeConfig | None = None


# ---- locations ------------------------------------------------------------------------------------------------------


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an open file."""

    fd: int
    offset: int
    size: int


class ArchivedLayer(msgspec.Struct, frozen=True, kw_only=True):
    diff_id: str
    """The SHA-256 of its plain tar, hexadecimal."""
    digest: str
    """The SHA-256 of its bytes in the archive; empty if the format has none."""
    blob: Blob


class ArchivedImage(msgspec.Struct, frozen=True, kw_only=True):
    tag: str
    """The name of the image in the archive; may be empty."""
    env: dict[str, str]
    cwd: str
    layers: tuple[ArchivedLayer, ...]
    """The lowest first."""


class Archive:
    """Files by name, of an indexed tar or of a directory. Closing it closes the descriptors that it opened."""

    def __init__(self, path: Path, *, fd: int = -1, index: dict[str, tuple[int, int]] | None = None) -> None:
        """`index`: offset and size by name in the tar `fd`; None reads the directory `path`."""
        self.path = path
        self._fd = fd
        self._index = index
        self._opened_fds: list[int] = []

    def find(self, name: str) -> Blob | None:
        if self._index is not None:
            if name not in self._index:
                return None
            offset, size = self._index[name]
            return Blob(fd=self._fd, offset=offset, size=size)
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        self._opened_fds.append(fd)
        status = os.fstat(fd)
        return Blob(fd=fd, offset=0, size=status.st_size) if stat.S_ISREG(status.st_mode) else None

    def close(self) -> None:
        while self._opened_fds:
            os.close(self._opened_fds.pop())

    # ---- reading ----

    def read_image(self, *, layers_max: int) -> ArchivedImage:
        index = self.find("index.json")
        if index is not None:
            return self._read_layout(index, layers_max)
        if self._index is None:
            raise self._invalid("there is no index.json in the directory; a root directory is added as such")
        saved = self.find("manifest.json")
        if saved is not None:
            return self._read_saved(saved, layers_max)
        raise self._invalid("there is neither an index.json nor a manifest.json in it")

    def _read_layout(self, blob: Blob, layers_max: int) -> ArchivedImage:
        descriptor = self._select_manifest(self._decode("index.json", self._bytes("index.json", blob), _Index))
        manifest = self._decode_digest(descriptor.digest, _Manifest)
        if len(manifest.layers) > layers_max:
            raise too_many_layers(str(self.path), len(manifest.layers), layers_max)
        layers = []
        for layer in manifest.layers:
            hexdigest = self._hexdigest(layer.digest)
            layers.append((hexdigest, self._require_blob(f"blobs/sha256/{hexdigest}")))
        config = self._decode_digest(manifest.config.digest, _Config)
        tags = self._saved_tags() or _annotated_tags(descriptor)
        return self._build_image(config, layers, tags)

    def _read_saved(self, blob: Blob, layers_max: int) -> ArchivedImage:
        images = self._decode("manifest.json", self._bytes("manifest.json", blob), list[_SavedImage])
        if len(images) != 1:
            raise self._invalid(f"it holds {len(images)} images; save one at a time")
        saved = images[0]
        if len(saved.layers) > layers_max:
            raise too_many_layers(str(self.path), len(saved.layers), layers_max)
        content = self._bytes(saved.config, self._require_blob(saved.config))
        named = posixpath.basename(saved.config).removesuffix(".json")
        if _SHA256.fullmatch(named):
            self._verify(saved.config, content, named)
        config = self._decode(saved.config, content, _Config)
        layers = [("", self._require_blob(name)) for name in saved.layers]
        return self._build_image(config, layers, saved.repo_tags or [])

    def _saved_tags(self) -> list[str]:
        """The tags that `docker save` writes in its own file for an image that it also describes as a layout."""
        blob = self.find("manifest.json")
        if blob is None:
            return []
        images = self._decode("manifest.json", self._bytes("manifest.json", blob), list[_SavedImage])
        return (images[0].repo_tags or []) if len(images) == 1 else []

    def _select_manifest(self, index: _Index, depth: int = 0) -> _Descriptor:
        target = (ARCHITECTURES.get(platform.machine(), platform.machine()), "linux")
        fitting = [
            manifest
            for manifest in index.manifests
            if manifest.platform is None or (manifest.platform.architecture, manifest.platform.os) == target
        ]
        if len(fitting) != 1:
            platforms = ", ".join(
                f"{manifest.platform.os}/{manifest.platform.architecture}"
                if manifest.platform
                else "one of any platform"
                for manifest in index.manifests
            )
            raise self._invalid(
                f"it should hold one image for linux/{target[0]}, and holds: {platforms[:300] or 'none'}"
            )
        chosen = fitting[0]
        if not chosen.media_type.endswith(("image.index.v1+json", "manifest.list.v2+json")):
            return chosen
        if depth == INDEX_DEPTH_MAX:
            raise self._invalid(f"its indexes are nested more than {INDEX_DEPTH_MAX} deep")
        inner = self._select_manifest(self._decode_digest(chosen.digest, _Index), depth + 1)
        # The outermost index has the name, the innermost the architecture.
        annotations = {**(inner.annotations or {}), **(chosen.annotations or {})}
        return msgspec.structs.replace(inner, annotations=annotations)

    def _build_image(self, config: _Config, named_blobs: list[tuple[str, Blob]], tags: list[str]) -> ArchivedImage:
        architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
        if config.architecture not in ("", architecture) or config.os not in ("", "linux"):
            raise self._invalid(f"it is for {config.os}/{config.architecture}; this machine is linux/{architecture}")
        diff_ids = config.rootfs.diff_ids
        if len(diff_ids) != len(named_blobs) or not named_blobs:
            raise self._invalid(f"its config names {len(diff_ids)} layers and its manifest {len(named_blobs)}")
        layers = [
            ArchivedLayer(diff_id=self._hexdigest(diff_id), digest=digest, blob=blob)
            for diff_id, (digest, blob) in zip(diff_ids, named_blobs, strict=True)
        ]
        runs = config.config or _RuntimeConfig()
        env = dict(line.partition("=")[::2] for line in runs.env or [])
        try:
            require_environment("Env", env)
            require_text("WorkingDir", runs.working_dir or "")
        except InvalidAction as error:
            raise self._invalid(f"its config is not usable: {error}") from None
        cwd = posixpath.normpath(posixpath.join("/", runs.working_dir)) if runs.working_dir else WORKSPACE
        return ArchivedImage(tag=tags[0] if tags else "", env=env, cwd=cwd, layers=tuple(layers))

    # ---- reading JSON files ----

    def _require_blob(self, name: str) -> Blob:
        blob = self.find(name if self._index is None else posixpath.normpath(name))
        if blob is None:
            raise self._invalid(f"{name[:200]} is not in it")
        return blob

    def _bytes(self, name: str, blob: Blob) -> bytes:
        if blob.size > DESCRIPTION_BYTES_MAX:
            raise self._invalid(f"{name[:200]} is longer than {DESCRIPTION_BYTES_MAX} bytes")
        return os.pread(blob.fd, blob.size, blob.offset)

    def _decode(self, name: str, content: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self._invalid(f"{name[:200]} cannot be understood: {error}") from None

    def _decode_digest(self, digest: str, kind: type[_T]) -> _T:
        hexdigest = self._hexdigest(digest)
        name = f"blobs/sha256/{hexdigest}"
        content = self._bytes(name, self._require_blob(name))
        self._verify(name, content, hexdigest)
        return self._decode(name, content, kind)

    def _hexdigest(self, digest: str) -> str:
        algorithm, _, hexdigest = digest.partition(":")
        if algorithm != "sha256" or not _SHA256.fullmatch(hexdigest):
            raise self._invalid(f"{digest[:200]!r} is not a SHA-256 digest")
        return hexdigest

    def _verify(self, name: str, content: bytes, hexdigest: str) -> None:
        actual = hashlib.sha256(content).hexdigest()
        if actual != hexdigest:
            raise self._invalid(f"the digest of {name[:200]} should be sha256:{hexdigest} and is sha256:{actual}")

    def _invalid(self, reason: str) -> InvalidConfig:
        return InvalidConfig("image", str(self.path), f"an image as `docker save` or an OCI tool writes it ({reason})")


def too_many_layers(image: str, layers: int, layers_max: int) -> AdmissionRefused:
    reason = f"image {image} has {layers} layers; the kernel mounts at most {layers_max} here: squash some of them"
    return AdmissionRefused("layers_max", reason)


def _annotated_tags(descriptor: _Descriptor) -> list[str]:
    annotations = descriptor.annotations or {}
    names = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
    return [annotations[name] for name in names if annotations.get(name)]
