"""Layers: unpack untrusted tars into directories.

An isolated program (processes/isolated.py): it imports only the standard library. It gets open descriptors, confines
itself to the new directory (a mount namespace, chroot) before it reads the first byte, and runs as the user that owns
the files. So no name of a member and no link leads outside. It becomes root again only for whiteouts and the attribute
of opaque directories, which the kernel reserves for root.

Reads one request from its standard input and writes one response to its standard output, both JSON. Limits and digests
come with the request. The caller deletes what a failure leaves.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import resource
import stat
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

from tangram.processes.libc import (
    CLONE_NEWNS,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    die_with_parent,
    make_mounts_private,
    mount,
    unshare,
)

CPU_S_MAX = 3600
"""CPU time limit of the program: an archive that needs more is an attack."""
INDEX_ENTRIES_MAX = 10_000
"""Entries of the outer archive, which holds a handful of files per layer."""
NAME_BYTES_MAX = 4096
TEXT_BYTES_MAX = 1 << 20
"""Size limit of a file such as /etc/passwd that is read from an image."""
CHUNK_BYTES = 1 << 20
SPACE_CHECK_BYTES = 64 << 20
"""Bytes written between two checks of the free space of the disk."""
FREE_FILES_MIN = 20_000
"""Inodes that must stay free for other users of the disk: more than are created between two checks."""
ENTRY_BYTES = 4096
"""Disk space of an entry in addition to its content, as counted for these checks."""

WHITEOUT, WHITEOUT_META, WHITEOUT_OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"
OPAQUE_XATTR = "trusted.overlay.opaque"

FOREIGN_MAGIC = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
INSPECTED_DIRECTORIES = ("etc", "home", "var")
"""Directories into which a generated layer may put files only if they are not links in the image."""
INSPECTED_FILES = ("etc/passwd", "etc/group", "etc/hosts", "etc/resolv.conf")

Request = dict[str, Any]


class UnpackError(Exception):
    """The input cannot be unpacked. `kind`: `invalid`, the name of a limit, or `world` if the machine is at fault."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)


# ---- reading ------------------------------------------------------------------------------------------------------


class FileSection(io.RawIOBase):
    """A part of an open file."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd, self._offset, self._end = fd, offset, offset + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._fd, min(len(buffer), self._end - self._offset), self._offset)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)


class DigestingReader(io.RawIOBase):
    """A stream with its digest, which raises an error beyond its maximum size."""

    def __init__(self, source: io.RawIOBase | gzip.GzipFile, bytes_max: int) -> None:
        self._source = source
        self._bytes_left = self.bytes_max = bytes_max
        self._sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer)) or b""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise UnpackError("bytes_max", f"it contains more than its remaining limit of {self.bytes_max} bytes")
        self._sha256.update(data)
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        while self.read(CHUNK_BYTES):
            pass

    @property
    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def is_gzip(fd: int, offset: int) -> bool:
    head = os.pread(fd, 4, offset)
    for magic, name in FOREIGN_MAGIC.items():
        if head.startswith(magic):
            raise UnpackError("invalid", f"it is compressed with {name}; only gzip and plain tar can be read")
    return head.startswith(b"\x1f\x8b")


def inner_path(name: str) -> str:
    """The name of a member as an absolute path of the new root."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UnpackError("invalid", f"the member {name[:200]!r} leads out of it")
    if len(name.encode(errors="surrogateescape")) > NAME_BYTES_MAX:
        raise UnpackError("invalid", f"the member {name[:200]!r}... has a name of more than {NAME_BYTES_MAX} bytes")
    return "/" + "/".join(parts)


# ---- unpacking ----------------------------------------------------------------------------------------------------


class LayerUnpacker:
    """Unpacks one layer. The root directory of this process is that of the layer."""

    def __init__(self, bytes_max: int, entries_max: int, free_bytes_min: int) -> None:
        self.bytes_max, self.entries_max, self.free_bytes_min = bytes_max, entries_max, free_bytes_min
        self.bytes = self.entries = 0
        self._unchecked_bytes = SPACE_CHECK_BYTES
        # Done at the end: a read-only directory is filled first, and a whiteout hides only what the layers below have,
        # wherever it is in the tar.
        self._folders: dict[str, tuple[int, float]] = {}
        self._whiteouts: dict[str, None] = {}
        self._opaque: dict[str, None] = {}

    def add_member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._charge(member.size if member.isreg() else 0)
        path = inner_path(member.name)
        if path == "/":
            return
        folder, _, base = path.rpartition("/")
        self._make_folder(folder or "/")
        if base.startswith(WHITEOUT):
            self._add_whiteout(folder, base)
        elif member.isdir():
            self._add_folder(path, member)
        elif member.isreg():
            self._add_file(path, tar, member)
        elif member.issym():
            self._clear(path)
            os.symlink(member.linkname, path)
            os.utime(path, times=_times(member), follow_symlinks=False)
        elif member.islnk():
            self._add_link(path, inner_path(member.linkname))
        elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
            self._clear(path)
            self._whiteouts[path] = None
        # Other devices, sockets and pipes are skipped: programs in a sandbox cannot open devices, and the others are
        # useless without the process that created them.

    def finish(self) -> None:
        """Run as root."""
        for path in self._whiteouts:
            try:
                os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
            except FileExistsError:
                self._opaque[path] = None  # entries of this layer stay; only those below it are hidden
            except (FileNotFoundError, NotADirectoryError):
                pass  # a later member replaced its directory
            else:
                os.lchown(path, *_owner("/"))
        for path in self._opaque:
            with _opened_folder(path) as folder:
                if folder is not None:
                    os.setxattr(folder, OPAQUE_XATTR, b"y")
        for path, (mode, mtime) in self._folders.items():
            with _opened_folder(path) as folder:
                if folder is not None:
                    os.fchmod(folder, mode)
                    os.utime(folder, times=(mtime, mtime))
        os.chmod("/", 0o755)

    def _charge(self, size: int) -> None:
        if size < 0:
            raise UnpackError("invalid", "a member has a negative size")
        self.entries += 1
        self.bytes += size
        if self.entries > self.entries_max:
            raise UnpackError("entries_max", f"it contains more than its remaining limit of {self.entries_max} entries")
        if self.bytes > self.bytes_max:
            raise UnpackError("bytes_max", f"it unpacks to more than its remaining limit of {self.bytes_max} bytes")
        self._unchecked_bytes += size + ENTRY_BYTES
        if self._unchecked_bytes > SPACE_CHECK_BYTES:
            self._unchecked_bytes = 0
            require_space("/", size, self.free_bytes_min)

    def _make_folder(self, path: str) -> None:
        """Creates missing parent directories. Follows links on the way, like every unpacker: they cannot lead out of
        this root."""
        if os.path.isdir(path):
            return
        parent = ""
        for part in os.path.realpath(path).split("/")[1:]:
            parent = f"{parent}/{part}"
            if not os.path.isdir(parent):
                self._charge(0)
                os.mkdir(parent)

    def _clear(self, path: str) -> None:
        """Removes an earlier member of that name: a later one replaces it and is never written through it."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            try:
                os.rmdir(path)
            except OSError:
                raise UnpackError("invalid", f"{path[:200]!r} comes twice, and was a directory with content") from None

    def _add_whiteout(self, folder: str, base: str) -> None:
        hidden = base.removeprefix(WHITEOUT)
        if base == WHITEOUT_OPAQUE:
            self._opaque[folder or "/"] = None
        elif hidden in ("", ".", ".."):
            raise UnpackError("invalid", f"the whiteout {base!r} contains no name")
        elif not base.startswith(WHITEOUT_META):  # other names with this prefix are metadata of another file system
            self._whiteouts[f"{folder}/{hidden}"] = None

    def _add_folder(self, path: str, member: tarfile.TarInfo) -> None:
        if not stat.S_ISDIR(_mode(path)):
            self._clear(path)
            os.mkdir(path, 0o700)
        self._folders[path] = (member.mode & 0o1777, _times(member)[0])

    def _add_file(self, path: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._clear(path)
        content = tar.extractfile(member)
        assert content is not None
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = member.size
            while left:
                data = content.read(min(left, CHUNK_BYTES))
                if not data:
                    raise UnpackError("invalid", f"it ends in the middle of {member.name[:200]!r}")
                write_all(fd, data)
                left -= len(data)
            os.fchmod(fd, member.mode & 0o777)
            os.utime(fd, times=_times(member))
        finally:
            os.close(fd)

    def _add_link(self, path: str, target: str) -> None:
        if path == target:
            return
        mode = _mode(target)
        if not mode or stat.S_ISDIR(mode):
            which = "is a directory" if mode else "is not in its layer"
            raise UnpackError("invalid", f"{path[:200]!r} is a hard link to {target[:200]!r}, which {which}")
        self._clear(path)
        os.link(target, path, follow_symlinks=False)


@contextlib.contextmanager
def _opened_folder(path: str) -> Iterator[int | None]:
    """None if a later member replaced it."""
    folder = None
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
    try:
        yield folder
    finally:
        if folder is not None:
            os.close(folder)


def write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _mode(path: str) -> int:
    """0 if there is none."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _owner(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_uid, status.st_gid


def _times(member: tarfile.TarInfo) -> tuple[float, float]:
    """Access and modification time. It is kept, because caches of compiled programs compare it. A time that no file
    system can hold, NaN included, becomes 0."""
    mtime = float(member.mtime) if 0 <= member.mtime < 1 << 33 else 0.0
    return mtime, mtime


def require_space(path: str | int, size: int, free_bytes_min: int) -> None:
    space = os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    if free < size + free_bytes_min:
        raise UnpackError("world", f"the disk has {free} free bytes, and {free_bytes_min} must stay free")
    if space.f_files and space.f_favail < FREE_FILES_MIN:
        raise UnpackError("world", f"the disk has {space.f_favail} free inodes, which must stay free")


# ---- the program --------------------------------------------------------------------------------------------------


def enter_chroot(folder: int, user: int, *, overlay: tuple[str, str] | None = None, permanent: bool = True) -> None:
    """Make a directory the root of this process, and the owner of its files its user. `overlay`: the layers to mount
    first, and where; the mount vanishes with the process."""
    unshare(CLONE_NEWNS)
    make_mounts_private()
    if overlay is None:
        os.fchdir(folder)
    else:
        lower, target = overlay
        mount("overlay", target, "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, f"lowerdir={lower}")
        os.chdir(target)
    os.chroot(".")
    os.chdir("/")
    os.umask(0o022)
    os.setgroups([])
    if permanent:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    else:
        os.setegid(user)
        os.seteuid(user)


def do_index(request: Request) -> object:
    """What the outer archive contains: offset and size by name. A compressed one is first decompressed into the
    descriptor `spool`, because its parts are read in another order."""
    source, spool = request["source"], request["spool"]
    enter_chroot(request["folder"], request["user"])
    size = os.fstat(source).st_size
    spooled = is_gzip(source, 0)
    if spooled:
        _spool(FileSection(source, 0, size), spool, request)
        source = spool
        size = os.fstat(source).st_size
    at: dict[str, tuple[int, int]] = {}
    links: dict[str, str] = {}
    entries = 0
    os.lseek(source, 0, os.SEEK_SET)
    with open(source, "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]
            entries += 1
            if entries > INDEX_ENTRIES_MAX:
                raise UnpackError(
                    "invalid", f"it holds more than {INDEX_ENTRIES_MAX} files, which no image archive does"
                )
            name = inner_path(member.name)[1:]
            if member.isreg() and not member.issparse():
                if member.size < 0 or member.offset_data + member.size > size:
                    raise UnpackError("invalid", f"it ends in the middle of {member.name[:200]!r}")
                at[name] = (member.offset_data, member.size)
            elif member.issym():
                links[name] = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname[:NAME_BYTES_MAX]))
            elif member.islnk():
                links[name] = inner_path(member.linkname)[1:]
    # Equal layers are stored once; the others link to them.
    for name, target in links.items():
        if target in at:
            at.setdefault(name, at[target])
    return {"spooled": spooled, "at": at}


def _spool(source: FileSection, spool: int, request: Request) -> None:
    plain = DigestingReader(gzip.GzipFile(fileobj=io.BufferedReader(source)), request["bytes_max"])
    unlooked_bytes = SPACE_CHECK_BYTES
    while data := plain.read(CHUNK_BYTES):
        unlooked_bytes += len(data)
        if unlooked_bytes > SPACE_CHECK_BYTES:
            unlooked_bytes = 0
            require_space(spool, SPACE_CHECK_BYTES, request["free_bytes_min"])
        write_all(spool, data)


def do_unpack(request: Request) -> object:
    """Unpack a layer into the directory `folder`. Its digests are those of the bytes in the archive and of the plain
    tar."""
    source, offset, size = request["source"], request["offset"], request["size"]
    enter_chroot(request["folder"], request["user"], permanent=False)
    packed = DigestingReader(FileSection(source, offset, size), size)
    if is_gzip(source, offset):
        plain = DigestingReader(gzip.GzipFile(fileobj=io.BufferedReader(packed)), request["bytes_max"])
    else:
        plain = DigestingReader(packed, request["bytes_max"])
    unpacking = LayerUnpacker(request["bytes_max"], request["entries_max"], request["free_bytes_min"])
    with tarfile.open(fileobj=io.BufferedReader(plain, CHUNK_BYTES), mode="r|", bufsize=CHUNK_BYTES) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it would keep every member that it ever saw
            unpacking.add_member(tar, member)
    plain.drain()
    packed.drain()
    for subject, expected, actual in (
        ("its bytes", request["digest"], packed.hexdigest),
        ("its tar", request["diff_id"], plain.hexdigest),
    ):
        if expected and expected != actual:
            raise UnpackError("invalid", f"the digest of {subject} should be sha256:{expected} and is sha256:{actual}")
    os.seteuid(0)
    unpacking.finish()
    return {"bytes": unpacking.bytes, "entries": unpacking.entries}


def do_inspect(request: Request) -> object:
    """What an image contains, seen from inside and as the user of a sandbox."""
    layers = request["layers"]
    overlay = (":".join(layers), request["target"]) if len(layers) > 1 else None
    enter_chroot(request["folder"], request["user"], overlay=overlay)
    return {
        "has_bash": os.access("/bin/bash", os.X_OK),
        "kinds": {name: _kind(_mode(f"/{name}")) for name in (*INSPECTED_DIRECTORIES, *request["paths"])},
        "texts": {name: _text(f"/{name}") for name in INSPECTED_FILES},
    }


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "folder"
    return "other" if mode else ""


def _text(path: str) -> str | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            content = file.read(TEXT_BYTES_MAX + 1)
    except OSError:
        return None
    return content.decode(errors="surrogateescape") if len(content) <= TEXT_BYTES_MAX else None


_HANDLERS = {"index": do_index, "unpack": do_unpack, "look": do_inspect}
_MACHINE_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EPERM, errno.EOPNOTSUPP),
    *(errno.EMFILE, errno.ENFILE, errno.ENODEV),
)


def handle_request(request: Request) -> Request:
    try:
        return {"ok": _HANDLERS[request["do"]](request)}
    except UnpackError as error:
        return {"kind": error.kind, "error": str(error)}
    except MemoryError:
        return {"kind": "invalid", "error": f"reading it takes more than {request['memory_bytes_max']} bytes of memory"}
    except OSError as error:
        kind = "world" if error.errno in _MACHINE_ERRNOS else "invalid"
        return {"kind": kind, "error": str(error)[:1000]}
    except Exception as error:  # any exception that a hostile archive causes in the parsers
        return {"kind": "invalid", "error": f"{type(error).__name__}: {error}"[:1000]}


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    request: Request = json.load(sys.stdin)
    for limit, value in (
        (resource.RLIMIT_AS, request["memory_bytes_max"]),
        (resource.RLIMIT_CPU, CPU_S_MAX),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    json.dump(handle_request(request), sys.stdout)
    sys.stdout.flush()
