"""The folder in which weights are published: in shared memory where possible, deleted with its owner.

A killed process cannot delete its folder, which holds a whole model in memory. So the owner locks its folder until it
ends, and each process that creates a folder deletes those without a lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tangram.files.lock import lock_file, locked

PREFIX = "tangram-weights-"
LOCK = "owner"
SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def weights_folder(below: Path | None = None) -> Iterator[Path]:
    """Creates a folder in `below`, or in shared memory; deletes it with its contents at the end."""
    parent = below or (SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
    _remove_orphans(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with locked(folder / LOCK):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_orphans(parent: Path) -> None:
    """Deletes folders of killed owners. One that is just being created has no lock file yet and stays."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # its owner is alive, or another process or user owns it
            lock = lock_file(folder / LOCK, create=False)
            try:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
