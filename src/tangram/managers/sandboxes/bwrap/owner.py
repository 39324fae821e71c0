"""The owner of sandboxes: its state directory, its locks, and the removal of dead owners' leftovers.

Owns the layout of the state directory:

    owners.lock      held while an owner starts or dead ones are removed
    owners/NAME/     one owner: `lock`, held by its process; `boxes/`, a directory for each of its sandboxes; `images/`,
                     a file with the name of each image that is deleted with it; and for a named owner `kept/`, which
                     only root may enter: records of its sandboxes, the socket of its spawner, and `spawner.lock`, held
                     while the spawner lives
    images/          layers, shared by all owners

An unnamed owner that dies leaves empty directories and control groups; its processes and mounts end with it. The same
holds for a named owner whose spawner has died too. The next owner removes them. If the spawner of a named owner is
alive, the next process of that name takes the owner over; NAME is the given name with a random suffix, because owners
of several state directories share the control groups of the machine. Promises never to touch anything of a living
owner or spawner.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path

import msgspec

from tangram.errors import ManagerError, TangramError
from tangram.files.atomic_file import write_file
from tangram.files.lock import is_locked, lock_file, locked, read_holder
from tangram.managers.sandboxes.bwrap.images.store import StoredImage
from tangram.managers.sandboxes.bwrap.spawner.lock import LOCK_FILE
from tangram.managers.sandboxes.cgroups import groups
from tangram.managers.work import SandboxSpec

RECORD_SUFFIX = ".json"
RECORD_BYTES_MAX = 1 << 20
"""Size limit of a record. A name, a specification with its environment and the layers of an image take a tenth of
it."""
SANDBOX_ID = re.compile(r"[1-9][0-9]{0,17}")

SPAWNER_LOCK = f"kept/{LOCK_FILE}"
STATE_DEFAULT = "/var/lib/tangram"
GIVEN_OWNER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
"""Valid names of owners."""
SPAWNER_ENDED = "its spawner has ended, and all its programs with it"


def state_directory() -> Path:
    return Path(os.environ.get("TANGRAM_STATE") or STATE_DEFAULT)


class SandboxOwner:
    def __init__(self, state: Path, called: str = "") -> None:
        """Create the owner, or take over the previous one of this name. Blocks shortly while another owner starts."""
        self.state = state
        self.given_name = called
        self.orphaned_images: list[str] = []
        """Images of the owners that were removed."""
        self.missing: dict[str, str] = {}
        """Sandboxes of the previous owner of this name that ended with its spawner, and why."""
        try:
            # Sandboxes in user namespaces reach their files as an unprivileged user: directories can be entered, not
            # listed.
            for directory in (state, state / "owners"):
                directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            with locked(state / "owners.lock"):
                previous = self._find_previous() if called else None
                self._sweep()
                self.has_spawner = previous is not None
                """Whether there is a spawner to attach to."""
                self._directory, self._lock = previous or self._create()
        except OSError as error:
            raise ManagerError(f"the state directory {state} cannot be used: {error}", retry=False) from error
        self.name = self._directory.name
        self.sandboxes_directory = self._directory / "boxes"
        self._images = self._directory / "images"
        self.kept_directory = self._directory / "kept" if called else None
        self.records = SandboxRecords(self.kept_directory) if self.kept_directory else None
        try:
            self.group = groups.create_owner_cgroup(self.name)
        except BaseException:
            os.close(self._lock)
            raise

    def _create(self) -> tuple[Path, int]:
        name = (
            f"{self.given_name}.{secrets.token_hex(4)}" if self.given_name else f"{os.getpid()}-{secrets.token_hex(4)}"
        )
        directory = self.state / "owners" / name
        directory.mkdir(mode=0o711)
        (directory / "boxes").mkdir(mode=0o711)
        (directory / "images").mkdir(mode=0o700)
        if self.given_name:
            (directory / "kept").mkdir(mode=0o700)
        return directory, lock_file(directory / "lock", holder=str(os.getpid()) if self.given_name else "")

    def _find_previous(self) -> tuple[Path, int] | None:
        """The directory and the lock of the previous owner of this name, if its spawner is alive. Otherwise the owner
        is removed."""
        for directory in sorted((self.state / "owners").glob(f"{self.given_name}.*")):
            try:
                lock = lock_file(directory / "lock", create=False, holder=str(os.getpid()))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue  # it died while it started or ended
            except BlockingIOError:
                pid = read_holder(directory / "lock")
                raise ManagerError(
                    f"owner {self.given_name!r} of {self.state} is process {pid}, or a fork that it left: end it,"
                    " or take another name",
                    retry=False,
                ) from None
            if is_locked(directory / SPAWNER_LOCK):
                return directory, lock
            os.close(lock)
            records, invalid = SandboxRecords(directory / "kept").read()
            self.missing |= invalid | dict.fromkeys(records, SPAWNER_ENDED)
        return None

    def tie_image(self, image: str) -> None:
        """Delete this image when the owner ends, also after a crash."""
        write_file(_image_note(self._images, image), image.encode(), partial=self._directory / "image.part")

    def untie_image(self, image: str) -> None:
        _image_note(self._images, image).unlink(missing_ok=True)

    def tied_images(self) -> list[str]:
        """The images that are deleted with the owner."""
        return _read_image_notes(self._images)

    def remove(self) -> None:
        """Remove the owner. All its sandboxes must have been closed."""
        self.group.remove()
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)

    def release(self) -> None:
        """Keep the owner for the next process of this name."""
        os.close(self._lock)

    def _sweep(self) -> None:
        """Remove leftovers of dead owners."""
        for directory in sorted((self.state / "owners").iterdir()):
            if not directory.is_dir() or any(map(is_locked, (directory / "lock", directory / SPAWNER_LOCK))):
                continue
            self.orphaned_images += _read_image_notes(directory / "images")
            groups.remove_owner_cgroup(directory.name)
            shutil.rmtree(directory, ignore_errors=True)


def _image_note(folder: Path, image: str) -> Path:
    return folder / hashlib.sha256(image.encode()).hexdigest()


def _read_image_notes(folder: Path) -> list[str]:
    image_names = []
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            image_names.append(path.read_text(encoding="utf-8"))
    return image_names


# ---- records of sandboxes ----------------------------------------------------------------------------------------


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The caller's name."""
    box: str
    """The number of the sandbox, its name in paths and for the spawner."""
    init: int
    """Pid of the sandbox's first process."""
    spec: SandboxSpec
    image: StoredImage
    """The image when the sandbox was opened: the name may refer to another image by now."""


class SandboxRecords:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, record: SandboxRecord) -> None:
        path = self._path(record.box)
        write_file(path, msgspec.json.encode(record), partial=path.with_suffix(".part"))

    def remove(self, sandbox_id: str) -> None:
        self._path(sandbox_id).unlink(missing_ok=True)

    def read(self) -> tuple[dict[str, SandboxRecord], dict[str, str]]:
        """Returns the records by the caller's name, and the errors of invalid files by file name."""
        records: dict[str, SandboxRecord] = {}
        invalid: dict[str, str] = {}
        for path in sorted(self._directory.glob(f"*{RECORD_SUFFIX}")):
            try:
                record = _read_record(path)
                if record.name in records:
                    raise ValueError(f"two records name sandbox {record.name}")
                records[record.name] = record
            except (OSError, ValueError, TangramError, msgspec.MsgspecError, RecursionError) as error:
                invalid[path.name] = f"its record cannot be read: {error}"
        return records, invalid

    def remove_all_except(self, sandbox_ids: set[str]) -> None:
        """Remove all files except the records of these sandboxes."""
        kept = {self._path(sandbox_id) for sandbox_id in sandbox_ids}
        for path in [*self._directory.glob(f"*{RECORD_SUFFIX}"), *self._directory.glob("*.part")]:
            if path not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, sandbox_id: str) -> Path:
        assert SANDBOX_ID.fullmatch(sandbox_id), f"a sandbox cannot be numbered {sandbox_id!r}"
        return self._directory / f"{sandbox_id}{RECORD_SUFFIX}"


def _read_record(path: Path) -> SandboxRecord:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        content = file.read(RECORD_BYTES_MAX + 1)
    if content is None or len(content) > RECORD_BYTES_MAX:
        raise ValueError(f"it is not a file of at most {RECORD_BYTES_MAX} bytes")
    record = msgspec.json.decode(content, type=SandboxRecord)
    if path.name != f"{record.box}{RECORD_SUFFIX}" or not SANDBOX_ID.fullmatch(record.box):
        raise ValueError(f"it is the record of sandbox {record.box!r}, under another name")
    return record
