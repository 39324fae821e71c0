"""The owner: who a sandbox belongs to, and what is done about those whose owner has died.

Owns the layout of the state directory:

    owners.lock      held while an owner comes or dead ones are swept
    owners/NAME/     one owner: `lock`, held while it lives; `boxes/`, a directory for each of its sandboxes; `images/`,
                     a file for each image that is to go with it, which holds the name; and for an owner that was given
                     a name also `kept/`, which only root may enter: records of its sandboxes, the socket of its
                     spawner, and `spawner.lock`, held while that lives
    images/          layers, shared by all owners

An owner without a name that dies leaves empty directories and control groups behind; its processes and mounts end with
it. So does one with a name whose spawner has died too. Whoever comes next removes them. An owner with a name whose
spawner lives is taken over by the next process that comes under that name; NAME is the given one with a random part,
since owners of several state directories share the control groups of the machine. Promises never to touch what belongs
to an owner or a spawner that lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.records import Records
from tangram.managers.sandboxes.cgroups import groups

STATE_DEFAULT = "/var/lib/tangram"
CALLED = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
"""The name that an owner may be given."""
NO_LOCK = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
SPAWNER_ENDED = "the spawner that held it has ended, and with it all that ran in it"


def state_directory() -> Path:
    return Path(os.environ.get("TANGRAM_STATE") or STATE_DEFAULT)


class Owner:
    def __init__(self, state: Path, called: str = "") -> None:
        """Come into being, or come back under the name that was given. Blocks while another owner does; that is
        short."""
        self.state = state
        self.called = called
        self.orphans: list[str] = []
        """Images of owners that were swept."""
        self.missing: dict[str, str] = {}
        """Sandboxes of the last owner of this name that ended with its spawner, and why."""
        try:
            # In a user namespace their files are reached by an unprivileged user: the way is open, the list is not.
            for directory in (state, state / "owners"):
                directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            with self._coming():
                found = self._left_behind() if called else None
                self.swept = self._sweep()
                self.returns = found is not None
                """Whether there is a spawner to be attached to."""
                self._directory, self._lock = found or self._make()
        except OSError as error:
            raise ManagerError(f"the state directory {state} cannot be used: {error}", retry=False) from error
        self.name = self._directory.name
        self.boxes = self._directory / "boxes"
        self._images = self._directory / "images"
        self.kept = self._directory / "kept" if called else None
        self.records = Records(self.kept) if self.kept else None
        try:
            self.group = groups.owner_root(self.name)
        except BaseException:
            os.close(self._lock)
            raise

    def _make(self) -> tuple[Path, int]:
        name = f"{self.called}.{secrets.token_hex(4)}" if self.called else f"{os.getpid()}-{secrets.token_hex(4)}"
        directory = self.state / "owners" / name
        directory.mkdir(mode=0o711)
        (directory / "boxes").mkdir(mode=0o711)
        (directory / "images").mkdir(mode=0o700)
        if self.called:
            (directory / "kept").mkdir(mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if self.called:
            _sign(lock)
        return directory, lock

    def _left_behind(self) -> tuple[Path, int] | None:
        """The directory of the last owner of this name, and its lock, if its spawner lives. Otherwise it is swept."""
        for directory in sorted((self.state / "owners").glob(f"{self.called}.*")):
            try:
                lock = _taken(directory / "lock")
            except NO_LOCK:
                continue  # it died while it came or went
            if lock is None:
                who = (directory / "lock").read_bytes().decode("ascii", "replace")
                raise ManagerError(
                    f"owner {self.called!r} of {self.state} is process {who}, or a fork that it left: end it, or take "
                    "another name",
                    retry=False,
                )
            if _is_held(directory / "kept" / "spawner.lock"):
                _sign(lock)
                return directory, lock
            os.close(lock)
            records, wrong = Records(directory / "kept").read()
            self.missing |= wrong | dict.fromkeys(records, SPAWNER_ENDED)
        return None

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

    def let_go(self) -> None:
        """For the next process of this name."""
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
            if not directory.is_dir() or _is_held(directory / "lock") or _is_held(directory / "kept" / "spawner.lock"):
                continue
            found.append(directory.name)
            self.orphans += _noted(directory / "images")
            groups.remove_owner(directory.name)
            shutil.rmtree(directory, ignore_errors=True)
        return found


def _note(folder: Path, image: str) -> Path:
    return folder / hashlib.sha256(image.encode()).hexdigest()


def _noted(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append(path.read_text(encoding="utf-8"))
    return found


def _sign(lock: int) -> None:
    """Whose lock it is, for those who find it held."""
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(lock)
        raise


def _taken(path: Path) -> int | None:
    """A descriptor that holds the lock; None: another one holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(f"{path} was removed meanwhile")
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_held(path: Path) -> bool:
    """Not: there is none, since its owner died while it came, or never had one."""
    try:
        fd = _taken(path)
    except NO_LOCK:
        return False
    if fd is None:
        return True
    os.close(fd)
    return False
