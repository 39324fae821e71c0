"""Whole files: what a command writes appears under its name only when it is whole.

Owns how results reach the disk: next to the target first, then in its place. Promises InvalidConfig with the option,
the path and the reason, and no half-written file, whatever ends the writing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tangram.errors import InvalidConfig


def partial_of(path: str | Path) -> Path:
    """Where a file grows. A process that is killed leaves it behind; who kills it deletes it."""
    target = Path(path).resolve()
    return target.with_name(target.name + ".partial")


def check_writable(option: str, path: Path) -> None:
    """Found out by writing, as permissions alone do not tell; makes the folder, leaves nothing else behind."""
    with _told(option, path):
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        if path.exists() and not path.is_file():
            raise OSError(22, "it is a device or a pipe")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(path)
        try:
            partial.open("wb").close()
        finally:
            partial.unlink(missing_ok=True)  # whatever ends it, Ctrl-C included


@contextmanager
def whole_file(option: str, path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end of the block, unless an error ends it."""
    partial = partial_of(path)
    with _told(option, path):
        try:
            with partial.open("wb") as file:
                yield file
            os.replace(partial, Path(path).resolve())
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _told(option: str, path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(option, str(path), f"a file that can be written ({error.strerror})") from error
