"""File locks: one process at a time holds the lock of a file, until it closes the descriptor or ends.

Owns flock. The kernel releases a lock with the last copy of its descriptor: a forked child holds it as well, a program
that is executed does not. Never removes a lock file. Promises that a lock is that of the file which has the name: one
that was removed or renamed before it was locked raises FileNotFoundError.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLDER_BYTES_MAX = 32


def lock_file(path: Path, *, create: bool = True, mode: int = 0o600, holder: str = "") -> int:
    """Returns a descriptor that holds the lock. Raises BlockingIOError if another one holds it, and other OSErrors.

    holder: replaces the content of the file, for `read_holder` of others.
    """
    fd = _lock(path, os.O_RDWR | (os.O_CREAT if create else 0), fcntl.LOCK_EX | fcntl.LOCK_NB, mode)
    try:
        if holder:
            os.ftruncate(fd, os.pwrite(fd, holder.encode(), 0))
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_directory(path: Path) -> int:
    """`lock_file` for an existing directory."""
    return _lock(path, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Blocks until the lock of a file is free, and holds it in the block. Raises OSError."""
    fd = _lock(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a descriptor holds the lock; False also if there is no file. Raises OSError."""
    try:
        os.close(_lock(path, os.O_RDONLY, fcntl.LOCK_SH | fcntl.LOCK_NB))  # shared: others do not take it for a holder
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def read_holder(path: Path) -> str:
    """What the holder wrote: empty if it has not written it yet. Raises OSError."""
    with path.open("rb") as file:
        return file.read(HOLDER_BYTES_MAX).decode("ascii", "replace").strip()


def _lock(path: Path, flags: int, operation: int, mode: int = 0o600) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(fd, operation)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(f"{path} was replaced meanwhile")
    except BaseException:
        os.close(fd)
        raise
    return fd
