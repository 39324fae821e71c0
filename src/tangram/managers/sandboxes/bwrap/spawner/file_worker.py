"""The file worker: file operations that a runner of the spawner executes instead of a program.

Standard library only, imported by the spawner before it forks. Owns nothing. Promises that it has no more rights than a
program of the sandbox, because it runs inside, as the same user, and that a failure is a reply.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]

REASON_CHARACTERS = 2000
"""Length limit of text of the sandbox in a reply."""

# User names are not looked up: files of the sandbox (nsswitch.conf) choose the code that does so.
tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]
# The default of Python before extraction filters: a tar of the caller is unpacked as it is.
tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)


def carry_out(request: Message, fds: list[int], sandbox: object) -> Message:
    """Runs with the namespaces, root and user of a program of the sandbox, so no path leads outside. Data goes through
    the descriptor that came with the request."""
    # A reader that stops early must not kill this process before it replies.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if fds:
        os.dup2(fds[0], 0)
        os.close(fds[0])
    try:
        return {"ok": _FILE_WORK[request["what"]](request)}
    except OSError as error:
        return {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}
    except RecursionError:
        return {"errno": errno.ENAMETOOLONG, "error": "is nested too deeply"}
    except (tarfile.TarError, EOFError, ValueError) as error:
        return {"errno": errno.EIO, "error": str(error)[:REASON_CHARACTERS]}


def _read(request: Message) -> int:
    """Writes a regular file to the pipe. Other files (a device, a pipe that never ends) are refused."""
    with open(os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        left = int(request["bytes_max"])
        if status.st_size > left:
            raise OSError(errno.EFBIG, f"has {status.st_size} bytes, at most {left} may be read")
        while left > 0 and (data := file.read(min(left, 1 << 20))):
            left -= len(data)
            while data:
                data = data[os.write(0, data) :]
    return int(request["bytes_max"]) - left


def _write(request: Message) -> int:
    """Reads the pipe into a file. It appears whole: it is written under another name first."""
    path = request["path"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # Not `files.atomic_file`: the spawner imports the standard library only.
    beside = os.path.join(os.path.dirname(path), request["beside"])
    written = 0
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, request["mode"]), "wb", buffering=0) as file:
            while data := os.read(0, 1 << 20):
                written += len(data)
                while data:
                    data = data[file.write(data) or 0 :]
            os.fchmod(file.fileno(), request["mode"])
        if written != request["bytes"]:
            raise OSError(errno.EPIPE, f"{written} of {request['bytes']} bytes arrived")
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    return written


def _list(request: Message) -> str:
    """Writes to the pipe: a directory may hold more names than fit into a message."""
    entries: list[Message] = []
    with os.scandir(request["path"]) as iterator:
        for entry in iterator:
            if len(entries) >= request["entries_max"]:
                raise OSError(errno.EOVERFLOW, f"has more than {request['entries_max']} entries")
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # it was deleted meanwhile
            mode = status.st_mode
            kind = (
                "link" if stat.S_ISLNK(mode) else "dir" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else ""
            )
            name = entry.name.encode(errors="surrogateescape").decode(errors="replace")
            entries.append({"name": name, "kind": kind or "other", "bytes": status.st_size, "mode": mode & 0o7777})
    entries.sort(key=lambda entry: str(entry["name"]))
    data = json.dumps(entries).encode()
    while data:
        data = data[os.write(0, data) :]
    return ""


def _delete(request: Message) -> None:
    """A file or a tree. Links are removed, never followed."""
    path = request["path"]
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    for base, dirs, files in os.walk(path, topdown=False):
        for name in files:
            os.unlink(os.path.join(base, name))
        for name in dirs:
            below = os.path.join(base, name)
            (os.unlink if os.path.islink(below) else os.rmdir)(below)
    os.rmdir(path)


def _pack(request: Message) -> None:
    """Writes a file or a tree to the pipe, as a tar. Its names start with that of the file or directory."""
    path = request["path"].rstrip("/") or "/"
    os.lstat(path)
    name = os.path.basename(path)
    if name in ("", ".", ".."):  # a directory, under its real name
        path = os.path.realpath(path)
        name = os.path.basename(path) or "root"
    with open(0, "wb", closefd=False) as pipe, tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(path, arcname=name)


def _unpack(request: Message) -> None:
    """Unpacks a tar from the pipe below a directory. Names that lead out of it are refused; links may lead anywhere in
    the sandbox."""
    os.makedirs(request["path"], exist_ok=True)
    with open(0, "rb", closefd=False) as pipe, tarfile.open(fileobj=pipe, mode="r|") as tar:
        try:
            tar.extractall(request["path"], _unlink_replaced(tar, request["path"]))
        except KeyError as error:  # a hard link to a file that does not exist
            raise OSError(errno.ENOENT, str(error.args[0])) from None


def _unlink_replaced(tar: tarfile.TarFile, path: str) -> Iterator[tarfile.TarInfo]:
    """Remove the file that a hard link replaces; tarfile does this for all other members only."""
    for member in tar:
        if member.name.startswith("/") or ".." in member.name.split("/"):  # as `require_safe_member` of the managers
            raise OSError(errno.EINVAL, f"the tar has {member.name!r}, which leads out of the directory")
        if member.islnk():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, member.name))
        yield member


_FILE_WORK: dict[str, Callable[[Message], Any]] = {
    "read": _read,
    "write": _write,
    "list": _list,
    "delete": _delete,
    "pack": _pack,
    "unpack": _unpack,
}
