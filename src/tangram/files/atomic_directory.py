"""Atomic directories: a directory appears under its name only when it is complete and durable.

Owns creation beside the target, fsync, rename and removal. Never looks at the content. Promises that a directory with
its final name is complete, also after a kill or a power failure; `remove_unfinished` deletes what a killed writer left.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tangram.errors import ManagerError
from tangram.files.atomic_file import fsync_path

UNFINISHED_PREFIX = ".unfinished-"
"""Begins the names of directories that are being written or removed."""


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new directory that is renamed to `path` at the end of the block; an error in the block removes it.

    replace: `path` may exist with content. Both renames are not one atomic step: for a moment `path` does not exist.
    Raises ManagerError if the directory cannot be written, or if `path` has content and `replace` is false.
    """
    unfinished = _unfinished_name(path)
    try:
        if not replace and path.exists() and any(path.iterdir()):
            raise ManagerError(f"{path} exists already", retry=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        yield unfinished
        for each in (*sorted(unfinished.rglob("*")), unfinished):
            fsync_path(each)
        if replace and path.exists():
            _swap(unfinished, path)
        else:
            unfinished.rename(path)
        fsync_path(path.parent)
    except OSError as error:
        raise ManagerError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_atomically(path: Path) -> None:
    """Renames a directory to an unfinished one, then deletes it: readers never find a part of it. Raises
    ManagerError."""
    hidden = _unfinished_name(path)
    try:
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise ManagerError(f"{path} cannot be removed: {error.strerror}") from error


def remove_unfinished(folder: Path) -> None:
    """Deletes what killed writers left in a directory. It must have no other writer now."""
    for path in folder.glob(f"{UNFINISHED_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _unfinished_name(path: Path) -> Path:
    return path.parent / f"{UNFINISHED_PREFIX}{uuid.uuid4().hex}"


def _swap(new: Path, path: Path) -> None:
    old = _unfinished_name(path)
    path.rename(old)
    try:
        new.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
