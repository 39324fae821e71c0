"""Folders that are there whole or not at all: they are written beside their place, made durable and renamed.

Owns how a folder comes into being and how it goes. Never looks at what is in it. Promises that what bears its name was
finished, also after a kill or a loss of power at any time; what was not is swept by `sweep`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tangram.errors import ManagerError

UNFINISHED = ".unfinished-"
"""Begins the names of folders that are being written or removed."""


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder beside this one, which becomes it at the end. Whatever is raised before removes it. Raises ManagerError
    if it cannot be written, such as to a full disk, or if this one is there and not empty."""
    unfinished = path.parent / f"{UNFINISHED}{uuid.uuid4().hex}"
    try:
        if path.exists() and any(path.iterdir()):
            raise ManagerError(f"{path} is there already", retry=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        yield unfinished
        for each in (*sorted(unfinished.rglob("*")), unfinished):
            sync(each)
        unfinished.rename(path)
        sync(path.parent)
    except OSError as error:
        raise ManagerError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_whole(path: Path) -> None:
    """Gone at once for all who look; what is in it goes after. Raises ManagerError."""
    hidden = path.parent / f"{UNFINISHED}{uuid.uuid4().hex}"
    try:
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise ManagerError(f"{path} cannot be removed: {error.strerror}") from error


def sweep(folder: Path) -> None:
    """What a process left unfinished that was killed. Only while nobody else writes into this folder."""
    for left in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """To the disk, if it is on one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
