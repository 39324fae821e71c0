"""The folder in which weights are published: in memory where there is some to share, gone with its owner.

Owns who may delete it. A process that is killed cannot clean up after itself, and what it leaves is a whole model in
memory: so each folder is locked by its owner for as long as that lives, and whoever makes one deletes those that nobody
holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "tangram-weights-"
LOCK = "owner"
SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def published_folder(below: Path | None = None) -> Iterator[Path]:
    """A new folder, `below` another one or where memory is shared; with all that is in it, it goes at the end."""
    parent = below or (SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Delete what owners that were killed have left. One that is just being made has no lock yet, and stays."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one sweeps too, or it is somebody else's
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
