"""Atomic files: a file appears under its name only when it is complete.

Owns writing beside the target and renaming over it. Promises that a reader finds the old content or the new one,
however the writer ends, and with `durable` also after a power failure. A writer that is killed leaves at most the file
of `partial_path_of`, which the next writer overwrites.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tangram.errors import InvalidConfig


def partial_path_of(path: str | Path) -> Path:
    """Where a file is written before it is renamed to `path`."""
    target = Path(path).resolve()
    return target.with_name(target.name + ".partial")


@contextmanager
def atomic_file(path: Path, *, durable: bool = False, partial: Path | None = None) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` at the end of the block; an error in the block removes it. Raises OSError.

    durable: fsync the file before and the directory after the rename.
    partial: where to write instead of `partial_path_of(path)`, for writers that may run at the same time.
    """
    partial = partial or partial_path_of(path)
    try:
        with partial.open("wb") as file:
            yield file
        replace_file(partial, path, durable=durable)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Path, content: bytes, *, durable: bool = False, partial: Path | None = None) -> None:
    """`atomic_file` for content that is in memory. Raises OSError."""
    with atomic_file(path, durable=durable, partial=partial) as file:
        file.write(content)


def replace_file(partial: Path, path: Path, *, durable: bool = False) -> None:
    """Renames a complete file to `path`. Raises OSError."""
    if durable:
        fsync_path(partial)
    os.replace(partial, path)
    if durable:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flushes a file or directory to its disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- files that an option names -------------------------------------------------------------------------------


@contextmanager
def atomic_write(option: str, path: str | Path) -> Iterator[BinaryIO]:
    """`atomic_file` for the path of an option. Raises InvalidConfig with the option, the path and the reason."""
    with os_error_as_invalid_config(option, path), atomic_file(Path(path).resolve()) as file:
        yield file


def check_writable(option: str, path: Path) -> None:
    """Raises InvalidConfig unless a file can be written at `path`. Creates the directory and tries it, because
    permissions alone do not decide."""
    with os_error_as_invalid_config(option, path):
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        if path.exists() and not path.is_file():
            raise OSError(22, "it is a device or a pipe")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path_of(path)
        try:
            partial.open("wb").close()
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def os_error_as_invalid_config(option: str, path: str | Path) -> Iterator[None]:
    """Raises InvalidConfig with the option, the path and the reason for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise InvalidConfig(option, str(path), f"a file that can be written ({error.strerror})") from error
