"""Images: what the root directories of sandboxes are made of.

Owns the directory of a store: the layers, which images stand on them, and what was remembered of earlier set-ups. A
sandbox mounts the layers of its image read-only, one over the other, below a private one of its own. Never mounts
anything that outlives a call, and never writes to a layer that is in place. Promises:

- every file of every layer here belongs to SANDBOX_UID, whatever an archive said, and has no setuid or setgid bit;
- a layer appears under its name only when it is whole and on disk; what a failure leaves is deleted, what a dead
  process left is deleted by `sweep`;
- several processes and threads may share a store.

What runs a program or waits for a lock is `async`. `seal`, `discard`, `forget` and `sweep` wait for the disk: call them
in a thread. The rest touches a few small files.

A directory that was added as an image stays as it is: whoever mounts it must say nosuid and nodev. A name that is
given again means the new image; the old one is then called `name@` and a part of its digest. Deleting an image pulls
the floor from under the sandboxes that stand on it: only their manager knows them.

    root/layers/<digest>          unpacked layers, by the SHA-256 of their tar; host-, fit- and commit- are made here
    root/layers/.part-<pid>-...   layers in the making, locked by who makes them
    root/images/, root/cache/     one JSON file per image and per remembered key
    root/locks/, root/lock        files that are locked, never read
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import fcntl
import functools
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from tangram.errors import AdmissionRefused, InvalidAction, InvalidConfig, ManagerError
from tangram.files.tree_removal import remove_tree, sync_file_system
from tangram.managers.sandboxes.bwrap.images import base_layers
from tangram.managers.sandboxes.bwrap.images.archives import Archive, ArchivedImage, ArchivedLayer, too_many_layers
from tangram.managers.sandboxes.bwrap.images.layer_worker import Allowance, Unpacker
from tangram.managers.work import GIB, HOST_IMAGE, WORKSPACE, require_forgettable, require_text

SANDBOX_UID = 61999
"""User and group, outside, of every file and every process of every sandbox. Neither people nor packages get it."""

LAYERS_MAX = 48
LOWER_BYTES_MAX = 3072
"""The options of a mount fit into one page of 4096 bytes: the paths of the layers with a colon between them, and a
quarter of it for the directories of the sandbox itself."""
BYTES_MAX = 32 * GIB
ENTRIES_MAX = 2_000_000
"""Of one image, unpacked. The largest images in use, with CUDA and conda, have half of it."""
FREE_BYTES_MIN = 1 * GIB
"""What unpacking leaves free on the disk, for all others that write to it."""
NAME_BYTES_MAX = 512
NAMES_SHOWN_MAX = 20
"""Of the images that an error names."""
LOCK_POLL_S = (0.005, 0.25)
"""Between two tries of a lock that another process holds: at first, and at most."""
LAYER_NAME_CHARS = 32
"""Of its digest: 128 bits, which nobody finds twice, and half of the room that the whole would take of a mount."""
FORBIDDEN = ":,\\"
"""Characters with a meaning of their own in the options of an overlay."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    layers: tuple[str, ...]
    """Absolute directories, the topmost first, as an overlay wants them."""
    binds_usr: bool = False
    """The sandbox binds the machine's /usr, read-only. Only what stands on `host` needs it."""
    shell: str = "/bin/sh"
    env: dict[str, str] = {}
    cwd: str = WORKSPACE
    """Where programs start, unless they are told otherwise."""


class _Record(msgspec.Struct, frozen=True):
    """A file of images/ or cache/. It is called by a digest of the key, which may be any text."""

    key: str
    image: Image


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
        self._allow = functools.partial(Allowance, bytes_max, entries_max, free_bytes_min)
        self._unpacker = Unpacker(SANDBOX_UID)
        self._layers, self._locks = self.root / "layers", self.root / "locks"
        self._images, self._cache = self.root / "images", self.root / "cache"
        self._lock_by_part: dict[Path, int] = {}
        self._host: Image | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # What is in layers is no business of other users of the machine.
            os.chmod(self.root, 0o700)
            for folder in (self._layers, self._locks, self._images, self._cache):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ManagerError(f"images cannot be kept at {self.root}: {error}", retry=False) from error

    # ---- images by name ----

    def get(self, name: str) -> Image:
        """The image of that name. The first time, `host` is made: some hundred small files."""
        if name == HOST_IMAGE:
            return self._get_host()
        record = _read(_file(self._images, name))
        if record is None:
            raise self._unknown(name)
        gone = _gone(record.image)
        if gone:
            raise ManagerError(f"image {name!r} stands on {gone}, which is gone; add it again", retry=False)
        return record.image

    def names(self) -> list[str]:
        return [HOST_IMAGE, *sorted(record.key for record in _records(self._images))]

    def forget(self, name: str) -> None:
        """Delete an image and those of its layers that no other image has. Not a directory that was added, and not
        what `host` is made of."""
        path = _file(self._images, name)
        parts = []
        with self._guard():
            image = self.forgettable(name)
            path.unlink()
            used = {layer for each in _records(self._images) for layer in each.image.layers}
            for layer in map(Path, image.layers):
                own = layer.parent == self._layers and not layer.name.startswith("host-")
                if own and str(layer) not in used and layer.is_dir():
                    part = self._layers / _part_name()
                    os.rename(layer, part)
                    self._lock_by_part[part] = _locked(part)
                    parts.append(part)
        for part in parts:
            self.discard(part)

    def forgettable(self, name: str) -> Image:
        require_forgettable(name)
        record = _read(_file(self._images, name))
        if record is None:
            raise self._unknown(name)
        return record.image

    def aside(self, name: str) -> str:
        """What the image that has this name now is called once another one gets the name; empty: none has it."""
        old = _read(_file(self._images, name))
        if old is None:
            return ""
        return f"{name}@{hashlib.sha256(msgspec.json.encode(old.image)).hexdigest()[:12]}"

    def _unknown(self, name: str) -> InvalidAction:
        names = self.names()
        near = difflib.get_close_matches(name, names, n=3)
        known = ", ".join(repr(each) for each in names[:NAMES_SHOWN_MAX])
        more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
        hint = f"; did you mean {' or '.join(repr(each) for each in near)}?" if near else ""
        return InvalidAction("sandbox.image", name, f"one of {known}{more}{hint}")

    def _get_host(self) -> Image:
        if self._host is None:
            layer = self._make_layer("host", base_layers.host_skeleton(SANDBOX_UID))
            shell = "/bin/bash" if os.path.exists("/usr/bin/bash") else "/bin/sh"
            self._host = Image(name=HOST_IMAGE, layers=(layer,), binds_usr=True, shell=shell)
        return self._host

    def register(self, image: Image) -> Image:
        """From now on its name means this image. The one that had the name stays, under another."""
        _require_layers(image)
        with self._guard():
            self._enter(image)
        return image

    def _enter(self, image: Image) -> None:
        """Under the guard."""
        gone = _gone(image)
        if gone:
            raise ManagerError(f"the layer {gone} of image {image.name!r} was deleted meanwhile")
        path = _file(self._images, image.name)
        old = _read(path)
        if old is not None and old.image != image:
            aside = self.aside(image.name)
            record = _Record(aside, msgspec.structs.replace(old.image, name=aside))
            self._write(_file(self._images, aside), record)
        if old is None or old.image != image:
            self._write(path, _Record(image.name, image))

    # ---- directories and archives ----

    async def add_directory(self, path: Path) -> Image:
        """A root directory as it is, under its real path. A small layer on top supplies what a sandbox needs."""
        real = _real(path)
        _require_mountable("image", real)
        if real == self.root or real in self.root.parents or self.root in real.parents:
            raise InvalidConfig("image", str(path), f"a directory apart from the store at {self.root}")
        if not os.path.isdir(real):  # noqa: ASYNC240 - one look at a local disk
            raise InvalidConfig("image", str(path), "a directory")
        return self.register(await self._fit(Image(name=str(real), layers=(str(real),))))

    async def add_tar(self, path: Path, *, name: str = "") -> Image:
        """An image that `docker save` or an OCI tool wrote: a tar, also gzipped, or a directory with an OCI layout.
        Named as asked, else by its own tag, else by its real path."""
        real = _real(path)
        if name:
            _require_name(name)
        key = f"archive {name} {_identity(real)}"
        async with self.lock(key):
            image = self.recall(key)
            if image is None:
                image = await self._add_archive(real, name)
                self.remember(key, image)
            return self.register(image)

    async def _add_archive(self, path: Path, name: str) -> Image:
        async with self._part() as part:
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
        return await self._fit(Image(name=name, layers=layers, env=archived.env, cwd=archived.cwd))

    async def _open_archive(self, path: Path, source: int, spool: int, part: Path) -> Archive:
        if os.path.isdir(path):  # noqa: ASYNC240 - one look at a local disk
            return Archive(path)
        plain, at = await self._unpacker.index(str(path), source, spool, part, self._allow())
        return Archive(path, fd=plain, at=at)

    async def _unpack_all(self, path: Path, archived: ArchivedImage) -> tuple[str, ...]:
        allowed = self._allow()
        layers = [await self._unpack(path, layer, allowed) for layer in archived.layers]
        # An overlay refuses to have a layer twice. What its upper place has hides all that its lower one had.
        return tuple(dict.fromkeys(reversed(layers)))

    async def _unpack(self, path: Path, layer: ArchivedLayer, allowed: Allowance) -> str:
        target = self._layers / layer.diff_id[:LAYER_NAME_CHARS]
        async with self.lock(f"layer {layer.diff_id}"):
            if not target.is_dir():
                async with self._part() as part:
                    await self._unpacker.unpack(str(path), layer, part, allowed)
                    await asyncio.to_thread(sync_file_system, part)
                    self._settle(part, target)
        return str(target)

    async def _fit(self, image: Image) -> Image:
        """With a layer on top that has what a sandbox needs and the image may lack."""
        async with self._part() as part:
            seen = await self._unpacker.look(image.name, image.layers, part, base_layers.leading_to(image.cwd))
        nodes = base_layers.fitting(seen, SANDBOX_UID, image.cwd)
        layer = await asyncio.to_thread(self._make_layer, "fit", nodes)
        shell = "/bin/bash" if seen.has_bash else "/bin/sh"
        return msgspec.structs.replace(image, layers=(layer, *image.layers), shell=shell)

    def _make_layer(self, prefix: str, nodes: list[base_layers.Node]) -> str:
        target = self._layers / f"{prefix}-{base_layers.digest(nodes)[:LAYER_NAME_CHARS]}"
        if not target.is_dir():
            part = self.new_layer()
            try:
                base_layers.write(nodes, part, SANDBOX_UID)
                self._settle(part, target)
            finally:
                self.discard(part)
        return str(target)

    # ---- layers in the making ----

    def new_layer(self) -> Path:
        """An empty directory for the files of a commit. Who takes it seals or discards it."""
        with self._guard():
            part = self._layers / _part_name()
            part.mkdir()
            self._lock_by_part[part] = _locked(part)
        os.chmod(part, 0o755)
        os.chown(part, SANDBOX_UID, SANDBOX_UID)
        return part

    def require_sealable(self, name: str, base: Image) -> None:
        """Raises InvalidAction or AdmissionRefused before anything is copied, rather than when it is sealed."""
        _require_name(name)
        layer = str(self._layers / f"commit-{'0' * LAYER_NAME_CHARS}")
        _require_layers(msgspec.structs.replace(base, name=name, layers=(layer, *base.layers)))

    def seal(self, part: Path, *, name: str, base: Image) -> Image:
        """A layer that is whole now, as the image `name` on top of `base`. If it fails, the part is still there."""
        assert part in self._lock_by_part, f"{part} is no layer in the making of this store"
        _require_name(name)
        target = self._layers / f"commit-{secrets.token_hex(LAYER_NAME_CHARS // 2)}"
        image = msgspec.structs.replace(base, name=name, layers=(str(target), *base.layers))
        _require_layers(image)
        sync_file_system(part)
        with self._guard():
            os.rename(part, target)
            try:
                self._enter(image)
            except BaseException:
                os.rename(target, part)
                raise
        os.close(self._lock_by_part.pop(part))
        return image

    def discard(self, part: Path) -> None:
        """Delete a layer in the making; nothing if it was sealed."""
        lock = self._lock_by_part.pop(part, None)
        if lock is None:
            return
        try:
            remove_tree(part)
        finally:
            os.close(lock)

    def sweep(self) -> int:
        """Delete the layers that dead processes left half made. Returns how many there were."""
        parts = []
        with self._guard():
            for folder in (self._images, self._cache):
                for path in folder.glob(".part-*"):  # written only under the guard, which is held here
                    path.unlink()
            for path in self._layers.glob(".part-*"):
                with contextlib.suppress(BlockingIOError, FileNotFoundError):  # its owner lives, or is done with it
                    self._lock_by_part[path] = _locked(path)
                    parts.append(path)
        for part in parts:
            self.discard(part)
        return len(parts)

    def _settle(self, part: Path, target: Path) -> None:
        """Give a layer its name, unless another process was faster."""
        try:
            os.rename(part, target)
        except OSError:
            if not target.is_dir():
                raise
            return
        os.close(self._lock_by_part.pop(part))

    @contextlib.asynccontextmanager
    async def _part(self) -> AsyncIterator[Path]:
        part = self.new_layer()
        try:
            yield part
        finally:
            await asyncio.to_thread(self.discard, part)

    # ---- what was made before ----

    def remember(self, key: str, image: Image) -> None:
        """For `recall`, also by other processes and after a restart."""
        with self._guard():
            self._write(_file(self._cache, key), _Record(key, image))

    def recall(self, key: str) -> Image | None:
        """What was remembered, if all of it still exists."""
        path = _file(self._cache, key)
        record = _read(path)
        if record is not None and _gone(record.image):
            path.unlink(missing_ok=True)
            return None
        return None if record is None else record.image

    @contextlib.asynccontextmanager
    async def lock(self, key: str) -> AsyncIterator[None]:
        """One holder at a time among all processes that share the store. Not for a second time by its holder."""
        fd = os.open(_file(self._locks, key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            pause_s, pause_s_max = LOCK_POLL_S
            while not _try_lock(fd):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, pause_s_max)
            yield
        finally:
            os.close(fd)

    def _write(self, path: Path, record: _Record) -> None:
        """Whole or not at all. Under the guard."""
        part = path.with_name(_part_name())
        with open(part, "xb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """For the short moments in which names are given and taken. Nothing long may happen in it."""
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


# ---- files ----------------------------------------------------------------------------------------------------------


def _real(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    if not real.exists():
        raise InvalidConfig("image", str(path), "a path that exists")
    return real


def _identity(path: Path) -> str:
    """Changes whenever the content of an archive does."""
    index = path / "index.json"
    found = (index if index.is_file() else path).stat()
    return f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _file(folder: Path, key: str) -> Path:
    require_text("image", key)
    return folder / hashlib.sha256(key.encode()).hexdigest()


def _part_name() -> str:
    return f".part-{os.getpid()}-{secrets.token_hex(8)}"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked(part: Path) -> int:
    """A descriptor that holds the lock of a layer in the making. BlockingIOError: another holds it."""
    fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.lstat(part)  # its owner may have given it its name before it let go
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read(path: Path) -> _Record | None:
    """None: there is none, or it is damaged, which is the same."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Record)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _records(folder: Path) -> Iterator[_Record]:
    for path in folder.iterdir():
        record = None if path.name.startswith(".") else _read(path)
        if record is not None:
            yield record


def _gone(image: Image) -> str:
    """A layer that is not there; empty if all are."""
    return next((layer for layer in image.layers if not os.path.isdir(layer)), "")


# ---- what is refused ------------------------------------------------------------------------------------------------


def _require_mountable(field: str, path: Path) -> None:
    require_text(field, str(path))
    if any(character in str(path) for character in FORBIDDEN):
        raise InvalidConfig(field, str(path), "a path without ':', ',' and '\\', which mean something to a mount")


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


def _require_layers(image: Image) -> None:
    if len(image.layers) > LAYERS_MAX:
        raise too_many_layers(image.name, len(image.layers), LAYERS_MAX)
    length = len(os.fsencode(":".join(image.layers)))
    if length > LOWER_BYTES_MAX:
        raise AdmissionRefused(
            "layers_max",
            f"image {image.name} has {len(image.layers)} layers whose paths take {length} bytes, and a mount has room "
            f"for {LOWER_BYTES_MAX}: squash some of them, or give the store a shorter path",
        )
