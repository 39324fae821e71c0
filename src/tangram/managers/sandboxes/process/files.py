"""The file API of the process backend, confined to a directory.

Owns every step from a path of the caller to a file. Promises that nothing outside the workspace is read, written or
deleted, even if a program creates links meanwhile: directories are walked one by one, by descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from tangram.errors import FileFailed
from tangram.managers.work import (
    WORKSPACE,
    FileEntry,
    file_entry,
    require_safe_member,
    sandbox_path,
)

LINKS_MAX = 40
"""Links followed on the way to one file: the limit of the kernel."""
ENTRIES_MAX = 100_000
"""Entries of one listing."""
DEPTH_MAX = 200
"""Levels of a tree that is packed: each takes a descriptor."""
COPY_BYTES = 1 << 20


class Workspace:
    """The files of one sandbox.

    Programs may replace directories with links at any moment, so the kernel never gets a path of several names: every
    step opens one name below an open directory, without following a link. Links are read and walked by the same rule;
    one that leads out of the workspace is refused. All methods block: call them in a thread.
    """

    def __init__(self, directory: Path, aside: Path, bytes_max: int) -> None:
        self.directory = directory
        self._staging = aside
        """Directory of incomplete files: on the same file system, and unreachable by paths of the sandbox."""
        self._bytes_max = bytes_max
        """Size limit of one file."""

    def read(self, path: str, bytes_max: int) -> bytes:
        with (
            _translate_errors(path),
            self._open_parent(path) as (parent, name),
            _open_fd(name, parent, os.O_PATH) as fd,
        ):
            size = _size_of_regular(fd)
            if size > bytes_max:
                raise FileFailed(path, f"has {size} bytes, more than the {bytes_max} that may be read")
            with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
                content = bytearray()
                while len(content) <= bytes_max and (data := file.read(COPY_BYTES)):
                    content += data
            if len(content) > bytes_max:
                raise FileFailed(path, f"grew above the {bytes_max} bytes that may be read")
            return bytes(content)

    def write(self, path: str, content: bytes, mode: int) -> None:
        with _translate_errors(path), self._open_parent(path, make=True, follow=False) as (parent, name):
            if len(content) > self._bytes_max:
                raise FileFailed(path, f"{len(content)} bytes are more than the disk of the sandbox, {self._bytes_max}")
            with self._temporary_file() as part:
                part.write(content)
                self._replace(part, mode, parent, name)

    def list_entries(self, path: str) -> list[FileEntry]:
        entries: list[FileEntry] = []
        with (
            _translate_errors(path),
            self._open_parent(path) as (parent, name),
            _open_fd(name, parent, os.O_DIRECTORY) as fd,
            os.scandir(fd) as scan,
        ):
            for entry in scan:
                if len(entries) >= ENTRIES_MAX:
                    raise FileFailed(path, f"has more than {ENTRIES_MAX} entries; list it with a program")
                with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    # A name may hold any bytes; the record travels as text.
                    name = entry.name.encode(errors="surrogateescape").decode(errors="replace")
                    entries.append(file_entry(name, status.st_mode, status.st_size))
        return sorted(entries, key=lambda entry: entry.name)

    def move_aside(self, path: str) -> Path:
        """Move a file or a tree out of the workspace atomically. Returns its new path."""
        with _translate_errors(path), self._open_parent(path, follow=False) as (parent, name):
            if name == ".":
                raise FileFailed(path, "a directory that is or contains the workspace cannot be deleted")
            away = self._staging / secrets.token_hex(8)
            os.rename(name, away, src_dir_fd=parent)
            return away

    def pack(self, path: str, into: BinaryIO, bytes_max: int) -> None:
        """Names start with that of the file or directory. Sockets, pipes and devices are left out."""
        with _translate_errors(path), self._open_parent(path, follow=False) as (parent, name):
            bounded = cast(IO[bytes], _BoundedWriter(path, into, bytes_max))  # of a stream, a tar only needs `write`
            with tarfile.open(fileobj=bounded, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                top = posixpath.basename(posixpath.normpath(sandbox_path(path))) if name == "." else name
                _pack(tar, path, parent, name, top, DEPTH_MAX)

    def unpack(self, path: str, source: BinaryIO) -> None:
        with _translate_errors(path), tarfile.open(fileobj=source, mode="r|") as tar:
            self._make_directory(path)
            for member in tar:
                require_safe_member(path, member.name)
                self._unpack_one(tar, member, path)

    def _unpack_one(self, tar: tarfile.TarFile, member: tarfile.TarInfo, base: str) -> None:
        path = f"{base}/{member.name}"
        if member.isdir():
            self._make_directory(path, member.mode)
            return
        with self._open_parent(path, make=True, follow=False) as (parent, name):
            if member.isreg():
                source = tar.extractfile(member)
                assert source is not None
                if member.size > self._bytes_max:
                    raise FileFailed(path, f"{member.size} bytes are more than the disk, {self._bytes_max}")
                with self._temporary_file() as part:
                    shutil.copyfileobj(source, part, COPY_BYTES)
                    self._replace(part, member.mode, parent, name)
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            if member.issym():
                os.symlink(member.linkname, name, dir_fd=parent)
            elif member.islnk():
                with self._open_parent(f"{base}/{member.linkname}", follow=False) as (link_parent, original):
                    os.link(original, name, src_dir_fd=link_parent, dst_dir_fd=parent, follow_symlinks=False)
            else:
                raise FileFailed(path, "is neither a file, a directory nor a link; other files are not unpacked")

    # ---- path resolution ----

    @contextlib.contextmanager
    def _open_parent(self, path: str, *, make: bool = False, follow: bool = True) -> Iterator[tuple[int, str]]:
        """The parent directory, opened, and the name in it; `.` if the path ends with a directory that was entered.
        `make` creates the directories on the way. `follow` also follows a link at the end."""
        ahead = list(reversed(_below_workspace(path)))
        open_directories = [os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
        name_in_parent, links = ".", 0
        try:
            while ahead:
                name = ahead.pop()
                if name == "..":
                    self._step_up(path, open_directories)
                elif (follow or ahead) and (target := _read_link(name, open_directories[-1])) is not None:
                    links += 1
                    if links > LINKS_MAX:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    ahead += reversed(self._follow_link(path, target, open_directories))
                elif ahead:
                    open_directories.append(_step_down(name, open_directories[-1], make))
                else:
                    name_in_parent = name
            yield open_directories[-1], name_in_parent
        finally:
            for fd in open_directories:
                os.close(fd)

    def _step_up(self, path: str, open_directories: list[int]) -> None:
        if len(open_directories) == 1:
            raise FileFailed(path, f"leads out of {WORKSPACE}; the process backend has no files outside it")
        os.close(open_directories.pop())

    def _follow_link(self, path: str, target: str, open_directories: list[int]) -> list[str]:
        """The target of a link as remaining names, last first. An absolute link starts again at the root."""
        if target.startswith("/"):
            home = f"{self.directory}/"
            if not f"{target}/".startswith(home):
                raise FileFailed(path, f"a link on the way leads out of {WORKSPACE}")
            while len(open_directories) > 1:
                os.close(open_directories.pop())
            target = target[len(home) :]
        return _split_path(target)

    def _make_directory(self, path: str, mode: int | None = None) -> None:
        with self._open_parent(path, make=True) as (parent, name):
            created = _step_down(name, parent, make=True)
            try:
                if mode is not None:
                    os.chmod(f"/proc/self/fd/{created}", (mode & 0o777) | stat.S_IRWXU)
            finally:
                os.close(created)

    @contextlib.contextmanager
    def _temporary_file(self) -> Iterator[IO[bytes]]:
        """An incomplete file, which is removed afterwards unless it was moved to its place."""
        path = self._staging / secrets.token_hex(8)
        try:
            with open(path, "xb", buffering=0) as part:
                yield part
        finally:
            path.unlink(missing_ok=True)

    def _replace(self, part: IO[bytes], mode: int, parent: int, name: str) -> None:
        if name == ".":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.fchmod(part.fileno(), mode & 0o777)
        # Not `files.atomic_file`, which resolves a path: programs may replace a directory on it by a link meanwhile.
        os.replace(part.name, name, dst_dir_fd=parent)


@contextlib.contextmanager
def _translate_errors(path: str) -> Iterator[None]:
    """Raise errors of the file system as FileFailed for this path."""
    try:
        yield
    except OSError as error:
        raise FileFailed(path, error.strerror or str(error)) from error
    except tarfile.TarError as error:
        raise FileFailed(path, f"is not a tar that can be read: {error}") from error


def _below_workspace(path: str) -> list[str]:
    absolute = sandbox_path(path)
    if not f"{absolute}/".startswith(f"{WORKSPACE}/"):
        raise FileFailed(path, f"is outside {WORKSPACE}; the process backend has no file system of its own there")
    return _split_path(absolute[len(WORKSPACE) :])


def _split_path(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _read_link(name: str, parent: int) -> str | None:
    """The target of a link; None for other files."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _step_down(name: str, parent: int, make: bool) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if make and name != ".":
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


@contextlib.contextmanager
def _open_fd(name: str, parent: int, flags: int) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _size_of_regular(fd: int) -> int:
    """Only regular files are read (not a device, nor a pipe that never ends)."""
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    return status.st_size


def _pack(tar: tarfile.TarFile, path: str, parent: int, name: str, shown: str, depth: int) -> None:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    member = tarfile.TarInfo(shown)
    member.mode, member.mtime = stat.S_IMODE(status.st_mode), status.st_mtime
    if stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=parent)
        tar.addfile(member)
    elif stat.S_ISREG(status.st_mode):
        with _open_fd(name, parent, 0) as fd, open(fd, "rb", closefd=False) as file:
            member.size = _size_of_regular(fd)
            tar.addfile(member, file)
    elif stat.S_ISDIR(status.st_mode):
        if not depth:
            raise FileFailed(path, f"is deeper than {DEPTH_MAX} directories; pack it with a program")
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        with _open_fd(name, parent, os.O_DIRECTORY) as fd:
            for below in sorted(os.listdir(fd)):
                _pack(tar, path, fd, below, f"{shown}/{below}", depth - 1)


class _BoundedWriter:
    """The target of a tar, up to a number of bytes."""

    def __init__(self, path: str, into: BinaryIO, bytes_max: int) -> None:
        self._path = path
        self._into = into
        self._bytes_max = bytes_max
        self._bytes_left = bytes_max

    def write(self, data: bytes) -> int:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise FileFailed(self._path, f"is larger than {self._bytes_max} bytes as a tar")
        return self._into.write(data)
