"""Deletes directory trees of unknown content, and flushes file systems to disk.

Owns nothing. Promises that nothing outside a tree is touched, for any links, depths and permissions in it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def remove_tree(path: str | Path) -> None:
    """Deletes a directory with its content, however deep: subdirectories are moved up before they are emptied, so two
    descriptors and no recursion suffice. Links are deleted, never followed."""
    root_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        token = f".lifted-{secrets.token_hex(8)}"
        moved_count = 0
        has_entries = True
        while has_entries:
            has_entries = False
            with os.scandir(root_fd) as entries:
                for entry in entries:
                    has_entries = True
                    if entry.is_dir(follow_symlinks=False):
                        moved_count = _remove_subdirectory(root_fd, entry.name, token, moved_count)
                    else:
                        os.unlink(entry.name, dir_fd=root_fd)
    finally:
        os.close(root_fd)
    os.rmdir(path)


def _remove_subdirectory(root_fd: int, name: str, token: str, moved_count: int) -> int:
    directory_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        with os.scandir(directory_fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    moved_count += 1
                    os.rename(entry.name, f"{token}-{moved_count}", src_dir_fd=directory_fd, dst_dir_fd=root_fd)
                else:
                    os.unlink(entry.name, dir_fd=directory_fd)
    finally:
        os.close(directory_fd)
    try:
        os.rmdir(name, dir_fd=root_fd)
    except OSError as error:
        # A directory that shrinks while it is read may hide an entry; the next round finds it.
        if error.errno != errno.ENOTEMPTY:
            raise
    return moved_count


def sync_file_system(path: str | Path) -> None:
    """Blocks until everything written to the file system of `path` is on its disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)
