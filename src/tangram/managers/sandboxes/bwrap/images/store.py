"""The image store: layers of root file systems on disk.

Owns the directory of a store: the layers, the images that consist of them, and the cache of committed set-ups. A
sandbox mounts the layers of its image read-only, below a private writable one. Never mounts anything that outlives a
call, and never writes to a complete layer. Promises:

- every file of every layer here belongs to SANDBOX_UID, for any archive, and has no setuid or setgid bit;
- a layer appears under its name only when it is complete and on disk; a failure deletes what it wrote, and `sweep`
  deletes leftovers of dead processes;
- several processes and threads may share a store.

A method that runs a program or waits for a lock is `async`. `seal`, `discard`, `forget` and `sweep` block on the disk:
call them in a thread. The others access a few small files.

A directory that was added as an image stays where it is: mounts of it must be nosuid and nodev. Adding an image under
an existing name replaces the name; the old image is then called `name@` and a part of its digest. Deleting an image
removes files that running sandboxes use: their manager must check that.

    root/layers/<digest>          unpacked layers, by the SHA-256 of their tar; host-, fit- and commit- are created here
    root/layers/.part-<pid>-...   incomplete layers, locked by the process that creates them
    root/images/, root/cache/     one JSON file per image and per remembered key
    root/locks/, root/lock        files that are locked, never read
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig, ManagerError
from tangram.files.atomic_file import write_file
from tangram.files.lock import lock_directory, lock_file, locked
from tangram.files.tree_removal import remove_tree, sync_file_system
from tangram.managers.sandboxes.bwrap.images import base_layers
from tangram.managers.sandboxes.bwrap.images.archives import Archive, ArchivedImage, ArchivedLayer, too_many_layers
from tangram.managers.sandboxes.bwrap.images.layer_worker import LayerWorker, UnpackLimits
from tangram.managers.work import GIB, HOST_IMAGE, WORKSPACE, require_forgettable, require_text

SANDBOX_UID = 61999
"""User and group, outside, of every file and every process of every sandbox. No person and no package uses it."""

LAYERS_MAX = 48
LOWER_BYTES_MAX = 3072
"""Size limit of the list of layers. The options of a mount fit into one page of 4096 bytes: the paths of the layers,
separated by colons, and a quarter of it for the directories of the sandbox itself."""
BYTES_MAX = 32 * GIB
ENTRIES_MAX = 2_000_000
"""Entries of one unpacked image. The largest images in use, with CUDA and conda, take half of it."""
FREE_BYTES_MIN = 1 * GIB
"""Free bytes that unpacking leaves on the disk for its other users."""
NAME_BYTES_MAX = 512
NAMES_SHOWN_MAX = 20
"""Images named in an error."""
LOCK_POLL_S = (0.005, 0.25)
"""Pause between two attempts to take a lock that another process holds: at first, and at most."""
LAYER_NAME_CHARS = 32
"""Digits of the digest in a layer name: 128 bits are free of collisions, and take half of the room in mount options."""
MOUNT_FORBIDDEN_CHARACTERS = ":,\\"
"""Characters with a special meaning in the options of an overlay."""


class StoredImage(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    layers: tuple[str, ...]
    """Absolute directories, the topmost first, as overlayfs requires."""
    binds_usr: bool = False
    """The sandbox binds the machine's /usr, read-only. Only images based on `host` need it."""
    shell: str = "/bin/sh"
    env: dict[str, str] = {}
    cwd: str = WORKSPACE
    """The default working directory of programs."""


class _ImageRecord(msgspec.Struct, frozen=True):
    """The name of a file of images/ or cache/: a digest of the key, which may be any text."""

    key: str
    image: StoredImage


class ImageStore:
    def __init__(
        self,
        root: Path,
        *,
        bytes_max: int = BYTES_MAX,
        entries_max: int = ENTRIES_MAX,
        free_bytes_min: int = FREE_BYTES_MIN,
    ) -> None:
        self.root = Path(os.path.realpath(root))
        _require_mountable("images.root", self.root)
        self._new_limits = functools.partial(UnpackLimits, bytes_max, entries_max, free_bytes_min)
        self._worker = LayerWorker(SANDBOX_UID)
        self._layers, self._locks = self.root / "layers", self.root / "locks"
        self._images, self._cache = self.root / "images", self.root / "cache"
        self._lock_by_part: dict[Path, int] = {}
        self._host: StoredImage | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Other users of the machine must not read layers.
            os.chmod(self.root, 0o700)
            for folder in (self._layers, self._locks, self._images, self._cache):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ManagerError(f"images cannot be kept at {self.root}: {error}", retry=False) from error

    # ---- images by name ----

    def get(self, name: str) -> StoredImage:
        """The image of that name. The first call makes `host`: some hundred small files."""
        if name == HOST_IMAGE:
            return self._get_host()
        record = _read(_record_path(self._images, name))
        if record is None:
            raise self._unknown_image(name)
        missing = _missing_layer(record.image)
        if missing:
            raise ManagerError(f"image {name!r} is based on {missing}, which was deleted; add it again", retry=False)
        return record.image

    def names(self) -> list[str]:
        return [HOST_IMAGE, *sorted(record.key for record in _records(self._images))]

    def forget(self, name: str) -> None:
        """Delete an image and those of its layers that no other image has. Not a directory that was added, and not the
        layers of `host`."""
        path = _record_path(self._images, name)
        parts = []
        with self._store_lock():
            image = self.forgettable(name)
            path.unlink()
            used = {layer for record in _records(self._images) for layer in record.image.layers}
            for layer in map(Path, image.layers):
                own = layer.parent == self._layers and not layer.name.startswith("host-")
                if own and str(layer) not in used and layer.is_dir():
                    part = self._layers / _part_name()
                    os.rename(layer, part)
                    self._lock_by_part[part] = lock_directory(part)
                    parts.append(part)
        for part in parts:
            self.discard(part)

    def forgettable(self, name: str) -> StoredImage:
        require_forgettable(name)
        record = _read(_record_path(self._images, name))
        if record is None:
            raise self._unknown_image(name)
        return record.image

    def replaced_name(self, name: str) -> str:
        """Returns the new name for the current image of this name when another one replaces it; empty if there is
        none."""
        old = _read(_record_path(self._images, name))
        if old is None:
            return ""
        return f"{name}@{hashlib.sha256(msgspec.json.encode(old.image)).hexdigest()[:12]}"

    def _unknown_image(self, name: str) -> InvalidAction:
        names = self.names()
        near = difflib.get_close_matches(name, names, n=3)
        known = ", ".join(repr(image) for image in names[:NAMES_SHOWN_MAX])
        more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
        hint = f"; did you mean {' or '.join(repr(image) for image in near)}?" if near else ""
        return InvalidAction("sandbox.image", name, f"one of {known}{more}{hint}")

    def _get_host(self) -> StoredImage:
        if self._host is None:
            layer = self._make_layer("host", base_layers.host_base_layer(SANDBOX_UID))
            shell = "/bin/bash" if os.path.exists("/usr/bin/bash") else "/bin/sh"
            self._host = StoredImage(name=HOST_IMAGE, layers=(layer,), binds_usr=True, shell=shell)
        return self._host

    def register(self, image: StoredImage) -> StoredImage:
        """Store this image under its name. The previous image of that name gets another name."""
        _require_layers(image)
        with self._store_lock():
            self._register_locked(image)
        return image

    def _register_locked(self, image: StoredImage) -> None:
        """Requires `_store_lock`."""
        missing = _missing_layer(image)
        if missing:
            raise ManagerError(f"the layer {missing} of image {image.name!r} was deleted meanwhile")
        path = _record_path(self._images, image.name)
        old = _read(path)
        if old is not None and old.image != image:
            aside = self.replaced_name(image.name)
            record = _ImageRecord(aside, msgspec.structs.replace(old.image, name=aside))
            self._write(_record_path(self._images, aside), record)
        if old is None or old.image != image:
            self._write(path, _ImageRecord(image.name, image))

    # ---- directories and archives ----

    async def add_directory(self, path: Path) -> StoredImage:
        """Add a root directory as it is, under its real path. A small layer on top supplies what a sandbox needs."""
        real = _resolve_existing(path)
        _require_mountable("image", real)
        if real == self.root or real in self.root.parents or self.root in real.parents:
            raise InvalidConfig("image", str(path), f"a directory that does not overlap with the store at {self.root}")
        if not os.path.isdir(real):  # noqa: ASYNC240 - one look at a local disk
            raise InvalidConfig("image", str(path), "a directory")
        return self.register(await self._add_base_layer(StoredImage(name=str(real), layers=(str(real),))))

    async def add_tar(self, path: Path, *, name: str = "") -> StoredImage:
        """Add an image that `docker save` or an OCI tool wrote: a tar, also gzipped, or a directory with an OCI layout.
        Named as requested, else by its own tag, else by its real path."""
        real = _resolve_existing(path)
        if name:
            _require_name(name)
        key = f"archive {name} {_identity(real)}"
        async with self.lock(key):
            image = self.find_by_key(key)
            if image is None:
                image = await self._add_archive(real, name)
                self.tag(key, image)
            return self.register(image)

    async def _add_archive(self, path: Path, name: str) -> StoredImage:
        async with self._temporary_layer() as part:
            source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            spool = os.open(part / "spool", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                archive = await self._open_archive(path, source, spool, part)
                with contextlib.closing(archive):
                    # One less: _fit puts another on top.
                    read = functools.partial(archive.read_image, layers_max=LAYERS_MAX - 1)
                    archived = await asyncio.to_thread(read)
                    layers = await self._unpack_all(path, archived)
            finally:
                os.close(source)
                os.close(spool)
        name = name or archived.tag or str(path)
        _require_name(name, may_be_path=name == str(path))
        return await self._add_base_layer(StoredImage(name=name, layers=layers, env=archived.env, cwd=archived.cwd))

    async def _open_archive(self, path: Path, source: int, spool: int, part: Path) -> Archive:
        if os.path.isdir(path):  # noqa: ASYNC240 - one look at a local disk
            return Archive(path)
        plain, at = await self._worker.index(str(path), source, spool, part, self._new_limits())
        return Archive(path, fd=plain, index=at)

    async def _unpack_all(self, path: Path, archived: ArchivedImage) -> tuple[str, ...]:
        allowed = self._new_limits()
        layers = [await self._unpack(path, layer, allowed) for layer in archived.layers]
        # An overlay refuses the same layer twice. The upper one hides all of the lower one.
        return tuple(dict.fromkeys(reversed(layers)))

    async def _unpack(self, path: Path, layer: ArchivedLayer, allowed: UnpackLimits) -> str:
        target = self._layers / layer.diff_id[:LAYER_NAME_CHARS]
        async with self.lock(f"layer {layer.diff_id}"):
            if not target.is_dir():
                async with self._temporary_layer() as part:
                    await self._worker.unpack(str(path), layer, part, allowed)
                    await asyncio.to_thread(sync_file_system, part)
                    self._move_into_place(part, target)
        return str(target)

    async def _add_base_layer(self, image: StoredImage) -> StoredImage:
        """Puts a layer on top that has what a sandbox needs and the image may lack."""
        async with self._temporary_layer() as part:
            contents = await self._worker.inspect(image.name, image.layers, part, base_layers.path_prefixes(image.cwd))
        nodes = base_layers.image_base_layer(contents, SANDBOX_UID, image.cwd)
        layer = await asyncio.to_thread(self._make_layer, "fit", nodes)
        shell = "/bin/bash" if contents.has_bash else "/bin/sh"
        return msgspec.structs.replace(image, layers=(layer, *image.layers), shell=shell)

    def _make_layer(self, prefix: str, nodes: list[base_layers.Node]) -> str:
        target = self._layers / f"{prefix}-{base_layers.digest(nodes)[:LAYER_NAME_CHARS]}"
        if not target.is_dir():
            part = self.new_layer()
            try:
                base_layers.write(nodes, part, SANDBOX_UID)
                self._move_into_place(part, target)
            finally:
                self.discard(part)
        return str(target)

    # ---- incomplete layers ----
    # Not `files.atomic_directory`: other processes write layers over many calls, layers get their name in one step with
    # the record of the image, and `sweep` distinguishes them from those of dead processes by their lock.

    def new_layer(self) -> Path:
        """An empty directory for the files of a commit. The caller seals or discards it."""
        with self._store_lock():
            part = self._layers / _part_name()
            part.mkdir()
            self._lock_by_part[part] = lock_directory(part)
        os.chmod(part, 0o755)
        os.chown(part, SANDBOX_UID, SANDBOX_UID)
        return part

    def require_sealable(self, name: str, base: StoredImage) -> None:
        """Raises InvalidAction or AdmissionRefused before anything is copied, rather than in `seal`."""
        _require_name(name)
        layer = str(self._layers / f"commit-{'0' * LAYER_NAME_CHARS}")
        _require_layers(msgspec.structs.replace(base, name=name, layers=(layer, *base.layers)))

    def seal(self, part: Path, *, name: str, base: StoredImage) -> StoredImage:
        """Make a complete layer the image `name` on top of `base`. A failure leaves the unsealed layer."""
        assert part in self._lock_by_part, f"{part} is not an unsealed layer of this store"
        _require_name(name)
        target = self._layers / f"commit-{secrets.token_hex(LAYER_NAME_CHARS // 2)}"
        image = msgspec.structs.replace(base, name=name, layers=(str(target), *base.layers))
        _require_layers(image)
        sync_file_system(part)
        with self._store_lock():
            os.rename(part, target)
            try:
                self._register_locked(image)
            except BaseException:
                os.rename(target, part)
                raise
        os.close(self._lock_by_part.pop(part))
        return image

    def discard(self, part: Path) -> None:
        """Delete an unsealed layer; does nothing if it was sealed."""
        lock = self._lock_by_part.pop(part, None)
        if lock is None:
            return
        try:
            remove_tree(part)
        finally:
            os.close(lock)

    def sweep(self) -> int:
        """Delete the unsealed layers of dead processes. Returns their number."""
        parts = []
        with self._store_lock():
            for folder in (self._images, self._cache):
                for path in folder.glob(".part-*"):  # written only under `_store_lock`, which is held here
                    path.unlink()
            for path in self._layers.glob(".part-*"):
                with contextlib.suppress(BlockingIOError, FileNotFoundError):  # its owner is alive, or has finished it
                    self._lock_by_part[path] = lock_directory(path)
                    parts.append(path)
        for part in parts:
            self.discard(part)
        return len(parts)

    def _move_into_place(self, part: Path, target: Path) -> None:
        """Rename a layer to its final name, unless another process was faster."""
        try:
            os.rename(part, target)
        except OSError:
            if not target.is_dir():
                raise
            return
        os.close(self._lock_by_part.pop(part))

    @contextlib.asynccontextmanager
    async def _temporary_layer(self) -> AsyncIterator[Path]:
        part = self.new_layer()
        try:
            yield part
        finally:
            await asyncio.to_thread(self.discard, part)

    # ---- the cache of committed set-ups -----------------------------------------------------------------------------

    def tag(self, key: str, image: StoredImage) -> None:
        """Tags an image with a key, for `find_by_key`, also of other processes and after a restart."""
        with self._store_lock():
            self._write(_record_path(self._cache, key), _ImageRecord(key, image))

    def find_by_key(self, key: str) -> StoredImage | None:
        """The image with this tag, if all of it still exists."""
        path = _record_path(self._cache, key)
        record = _read(path)
        if record is not None and _missing_layer(record.image):
            path.unlink(missing_ok=True)
            return None
        return None if record is None else record.image

    @contextlib.asynccontextmanager
    async def lock(self, key: str) -> AsyncIterator[None]:
        """A lock among all processes that share the store. Not reentrant."""
        pause_s, pause_s_max = LOCK_POLL_S
        while True:
            try:
                fd = lock_file(_record_path(self._locks, key))
                break
            except BlockingIOError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, pause_s_max)
        try:
            yield
        finally:
            os.close(fd)

    def _write(self, path: Path, record: _ImageRecord) -> None:
        """Written atomically. Requires `_store_lock`."""
        write_file(path, msgspec.json.encode(record), durable=True, partial=path.with_name(_part_name()))

    def _store_lock(self) -> contextlib.AbstractContextManager[None]:
        """The lock for setting and removing names. Held only briefly."""
        return locked(self.root / "lock")


# ---- files ----------------------------------------------------------------------------------------------------------


def _resolve_existing(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    if not real.exists():
        raise InvalidConfig("image", str(path), "a path that exists")
    return real


def _identity(path: Path) -> str:
    """Changes whenever the content of an archive does."""
    index = path / "index.json"
    status = (index if index.is_file() else path).stat()
    return f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _record_path(folder: Path, key: str) -> Path:
    require_text("image", key)
    return folder / hashlib.sha256(key.encode()).hexdigest()


def _part_name() -> str:
    return f".part-{os.getpid()}-{secrets.token_hex(8)}"


def _read(path: Path) -> _ImageRecord | None:
    """Returns None if it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_ImageRecord)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _records(folder: Path) -> Iterator[_ImageRecord]:
    for path in folder.iterdir():
        record = None if path.name.startswith(".") else _read(path)
        if record is not None:
            yield record


def _missing_layer(image: StoredImage) -> str:
    """A layer that does not exist; empty if all exist."""
    return next((layer for layer in image.layers if not os.path.isdir(layer)), "")


# ---- limits ---------------------------------------------------------------------------------------------------------


def _require_mountable(field: str, path: Path) -> None:
    require_text(field, str(path))
    if any(character in str(path) for character in MOUNT_FORBIDDEN_CHARACTERS):
        raise InvalidConfig(field, str(path), "a path without ':', ',' and '\\', which are special in mount options")


def _require_name(name: str, *, may_be_path: bool = False) -> None:
    require_text("image", name)
    if (
        not name
        or len(name.encode()) > NAME_BYTES_MAX
        or name == HOST_IMAGE
        or (name.startswith("/") and not may_be_path)
    ):
        expected = f"a name of 1 to {NAME_BYTES_MAX} bytes that is not 'host' and does not start with '/'"
        raise InvalidAction("image", name, expected)


def _require_layers(image: StoredImage) -> None:
    if len(image.layers) > LAYERS_MAX:
        raise too_many_layers(image.name, len(image.layers), LAYERS_MAX)
    length = len(os.fsencode(":".join(image.layers)))
    if length > LOWER_BYTES_MAX:
        raise AdmissionRefused(
            "layers_max",
            f"image {image.name} has {len(image.layers)} layers whose paths take {length} bytes, and a mount has room "
            f"for {LOWER_BYTES_MAX}: squash some of them, or give the store a shorter path",
        )
