"""The owner: who a sandbox belongs to, and what is done about those whose owner has died.

Owns the layout of the state directory:

    owners.lock      held while an owner comes or dead ones are swept
    owners/NAME/     one owner: `lock`, held while it lives; `boxes/`, a directory for each of its sandboxes; `images/`,
                     a file for each image that is to go with it, which holds the name
    images/          layers, shared by all owners

An owner that dies leaves empty directories and control groups behind; its processes and mounts end with it. Whoever
comes next removes them. Promises never to touch what belongs to an owner that lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tangram.errors import ManagerError
from tangram.managers.cpu import cgroups

STATE_DEFAULT = "/var/lib/tangram"


def state_directory() -> Path:
    return Path(os.environ.get("TANGRAM_STATE") or STATE_DEFAULT)


class Owner:
    def __init__(self, state: Path) -> None:
        """Come into being. Blocks while another owner does; that is short."""
        self.state = state
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._directory = state / "owners" / self.name
        self.boxes = self._directory / "boxes"
        self._images = self._directory / "images"
        self.orphans: list[str] = []
        """Images of owners that were swept."""
        try:
            # In a user namespace their files are reached by an unprivileged user: the way is open, the list is not.
            for directory in (state, state / "owners"):
                directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            with self._coming():
                self.swept = self._sweep()
                self._directory.mkdir(mode=0o711)
                self.boxes.mkdir(mode=0o711)
                self._images.mkdir(mode=0o700)
                self._lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ManagerError(f"the state directory {state} cannot be used: {error}", retry=False) from error
        self.group = cgroups.owner_root(self.name)

    def keep_with(self, image: str) -> None:
        """This image goes when the owner does, however that comes about."""
        _note(self._images, image).write_text(image, encoding="utf-8")

    def let_stay(self, image: str) -> None:
        _note(self._images, image).unlink(missing_ok=True)

    def images(self) -> list[str]:
        """Those that go with it."""
        return _noted(self._images)

    def leave(self) -> None:
        """All its sandboxes have been closed."""
        self.group.remove()
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)

    @contextlib.contextmanager
    def _coming(self) -> Iterator[None]:
        fd = os.open(self.state / "owners.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _sweep(self) -> list[str]:
        """Remove what dead owners left. Returns their names."""
        found = []
        for directory in sorted((self.state / "owners").iterdir()):
            if not _is_dead(directory):
                continue
            found.append(directory.name)
            self.orphans += _noted(directory / "images")
            cgroups.remove_owner(directory.name)
            shutil.rmtree(directory, ignore_errors=True)
        return found


def _note(folder: Path, image: str) -> Path:
    return folder / hashlib.sha256(image.encode()).hexdigest()


def _noted(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())]


def _is_dead(directory: Path) -> bool:
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # it died while it came
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
