"""Checkpoints of a run: the weights as the trainer saves them, and the state of everything else at that moment.

    CHECKPOINTS/00000040/...             what Trainer.save wrote, words.json
    CHECKPOINTS/00000040/state.msgpack   a RunState
    CHECKPOINTS/00000040/whole.json      size and CRC-32 of every file

Owns this layout. Never interprets the files of the trainer. Promises that a checkpoint is complete or absent, that a
damaged one is never used, and that an old one is deleted only after a newer one is durable.

A reader can pin a checkpoint with hard links to its files, or with copies where links are impossible, so that the run
may delete it meanwhile:

    with pin_newest_checkpoint(run / CHECKPOINTS, warn=print) as pinned:
        play(pinned.folder)     # the weights of pinned.path, which may be deleted by now
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.files.atomic_directory import remove_atomically
from tangram.rl.buffer.records import BufferState
from tangram.rl.inference.weights_folder import weights_folder
from tangram.rl.runs.metrics_lines import WarmStartChecked
from tangram.rl.trajectories.training_batch import strip_for_training

STATE, CHECKSUMS_FILE = "state.msgpack", "whole.json"
STATE_FORMAT = 1
DAMAGED_SUFFIX = ".damaged"
"""Suffix of checkpoints that were set aside."""
DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""Permanent errors, which count as damage. Others may be transient; a checkpoint is not discarded because of them."""
READ_BYTES = 1 << 20
"""Read buffer for checksums."""


VANISHED_MAX = 100
"""Limit of consecutive checkpoints that vanish before they are pinned. Links take milliseconds, so only copies to
another disk can lose against a run that saves faster than its files are copied."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run without its weights."""

    format: int = STATE_FORMAT
    version: int
    """Version of the weights."""
    step: int
    """Gradient steps done."""
    ticket_next: int
    """Number of the next ticket."""
    buffer: BufferState
    at_s: float
    """Seconds since the run began, over all its processes."""
    warm: WarmStartChecked | None = None
    """The last evaluation of the warm start."""
    evaluations: int = 0
    """Evaluations done, which is the number of the next one."""
    random: bytes = b""
    """State of other random generators, encoded by their owner."""
    note: str = ""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint."""

    path: Path
    state: RunState
    warnings: tuple[str, ...] = ()
    """Describes newer checkpoints that are damaged."""

    @property
    def step(self) -> int:
        return self.state.step


class _FileChecksum(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    crc32: int


class _StateFormat(msgspec.Struct, frozen=True):
    format: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RunState)
_files: msgspec.json.Decoder[dict[str, _FileChecksum]] = msgspec.json.Decoder(dict[str, _FileChecksum])


class DamagedCheckpoint(ManagerError):
    """A checkpoint is incomplete or damaged."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} is damaged: {reason}", retry=False)


class NoCheckpoint(ManagerError):
    """Every checkpoint is damaged, so resuming the run fails each time."""

    def __init__(self, damage: Sequence[str]) -> None:
        expected = "there is no other: start again with --fresh, or with other weights by policy.checkpoint"
        super().__init__("; ".join((*damage, expected)), retry=False)


# ---- writing ----


def write_state(path: Path, state: RunState) -> None:
    """Writes the state into an unfinished checkpoint, reduced to what training needs. Blocks on the disk: call it in a
    thread. Raises ManagerError."""
    waiting = tuple(
        msgspec.structs.replace(waiting, group=strip_for_training(waiting.group)) for waiting in state.buffer.waiting
    )
    state = msgspec.structs.replace(state, buffer=msgspec.structs.replace(state.buffer, waiting=waiting))
    try:
        (path / STATE).write_bytes(_encoder.encode(state))
    except OSError as error:
        raise ManagerError(f"{path / STATE} cannot be written: {error.strerror}") from error


def seal(unfinished: Path) -> None:
    """Writes size and checksum of every file, which makes damage detectable. Raises InvalidInput if the state is
    missing, and OSError."""
    if not (unfinished / STATE).is_file():
        raise InvalidInput("checkpoint", str(unfinished), f"that {STATE} was written into it, by write_state")
    checksums = {file.relative_to(unfinished).as_posix(): _checksum(file) for file in _files_in(unfinished)}
    (unfinished / CHECKSUMS_FILE).write_bytes(msgspec.json.encode(checksums, order="sorted"))


def prune(folder: Path, keep: int) -> int | None:
    """Deletes all but the newest checkpoints, and older ones that were set aside. Returns the step of the oldest that
    remains. Raises ManagerError."""
    steps = steps_in(folder)
    kept = steps[-keep:]
    for step in steps[:-keep]:
        remove_atomically(folder / folder_name(step))
    for path in folder.glob(f"*{DAMAGED_SUFFIX}"):
        if not kept or path.name < folder_name(kept[0]):
            remove_atomically(path)
    return kept[0] if kept else None


def set_aside(path: Path) -> Path:
    """Renames it to a name that no reader takes for a checkpoint. Raises ManagerError."""
    aside = path.with_name(path.name + DAMAGED_SUFFIX)
    if aside.exists():
        remove_atomically(aside)
    try:
        return path.rename(aside)
    except OSError as error:
        raise ManagerError(f"{path} cannot be renamed: {error.strerror}") from error


# ---- reading ----


def folder_name(step: int) -> str:
    return f"{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps of all folders with the name of a checkpoint, oldest first."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises DamagedCheckpoint, and ManagerError for an unknown format."""
    try:
        written = _files.decode((path / CHECKSUMS_FILE).read_bytes())
        for name, file in written.items():
            checksum = _checksum(path / name)
            if checksum != file:
                raise DamagedCheckpoint(path, f"{name} is not what was written: {_mismatch(file, checksum)}")
        content = (path / STATE).read_bytes()
        if STATE not in written:
            raise DamagedCheckpoint(path, f"{CHECKSUMS_FILE} does not name {STATE}")
        found_format = msgspec.msgpack.decode(content, type=_StateFormat).format
        if found_format != STATE_FORMAT:
            raise ManagerError(
                f"{path / STATE}: expected a state of format {STATE_FORMAT}, got {found_format}; resume it with the "
                "release that wrote it",
                retry=False,
            )
        return Checkpoint(path=path, state=_decoder.decode(content))
    except OSError as error:
        if error.errno in DAMAGE_ERRNOS:
            raise DamagedCheckpoint(path, f"{error.filename or path}: {error.strerror}") from error
        raise ManagerError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, AssertionError) as error:
        raise DamagedCheckpoint(path, str(error)) from error


def _checksum(path: Path) -> _FileChecksum:
    crc32 = size = 0
    with path.open("rb") as file:
        while content := file.read(READ_BYTES):
            crc32 = zlib.crc32(content, crc32)
            size += len(content)
    return _FileChecksum(size=size, crc32=crc32)


def _mismatch(written: _FileChecksum, actual: _FileChecksum) -> str:
    if actual.size != written.size:
        return f"it has {actual.size:,} bytes instead of {written.size:,}"
    return f"its {actual.size:,} bytes differ (CRC-32 {actual.crc32:08x} instead of {written.crc32:08x})"


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


class PinnedCheckpoint(NamedTuple):
    path: Path
    """The original folder."""
    folder: Path
    """The folder with links or copies."""


class CheckpointVanished(Exception):
    """The checkpoint was deleted before it was pinned."""


@contextmanager
def pin_checkpoint(path: Path) -> Iterator[PinnedCheckpoint]:
    """Pins this checkpoint. Raises DamagedCheckpoint, InvalidConfig if it was deleted, and ManagerError."""
    with _pin_folder(path.parent) as place:
        try:
            pinned = _pin(path, place)
        except CheckpointVanished:
            raise InvalidConfig("checkpoint", str(path), "one that is there: its run has just deleted it") from None
        yield pinned


@contextmanager
def pin_newest_checkpoint(checkpoints: Path, warn: Callable[[str], None]) -> Iterator[PinnedCheckpoint]:
    """Pins the newest complete checkpoint and calls `warn` for each damaged one. Raises InvalidConfig if there is none,
    and ManagerError."""
    with _pin_folder(checkpoints) as place:
        yield _pin_newest(checkpoints, place, warn)


def _pin_newest(checkpoints: Path, place: Path, warn: Callable[[str], None]) -> PinnedCheckpoint:
    damaged: set[int] = set()
    vanished = 0
    while vanished < VANISHED_MAX:
        steps = [step for step in steps_in(checkpoints) if step not in damaged]
        if not steps:
            break
        try:
            return _pin(checkpoints / folder_name(steps[-1]), place)
        except CheckpointVanished:
            vanished += 1
        except DamagedCheckpoint as error:
            warn(str(error))
            damaged.add(steps[-1])
    if vanished:
        raise ManagerError(f"{checkpoints}: {vanished} checkpoints in a row were deleted before they could be pinned")
    if damaged:
        raise ManagerError(f"{checkpoints}: every checkpoint in it is damaged", retry=False)
    raise InvalidConfig("checkpoint", str(checkpoints), "a run that has a checkpoint: this one has none yet")


@contextmanager
def _pin_folder(checkpoints: Path) -> Iterator[Path]:
    """In the folder of the run, where hard links work, or in the temporary directory if that is not writable."""
    run = checkpoints.resolve().parent
    below = run if os.access(run, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        try:
            place = stack.enter_context(weights_folder(below))
        except OSError as error:
            raise ManagerError(f"no checkpoint can be pinned in {below}: {error.strerror}") from error
        yield place


def _pin(path: Path, place: Path) -> PinnedCheckpoint:
    """Raises CheckpointVanished, DamagedCheckpoint and ManagerError."""
    folder = place / path.name
    try:
        for entry in path.rglob("*"):
            if entry.is_file():
                _link(entry, folder / entry.relative_to(path))
        read_checkpoint(folder)
        return PinnedCheckpoint(path, folder)
    except (OSError, ManagerError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not path.is_dir():
            raise CheckpointVanished from None
        if isinstance(error, OSError):
            raise ManagerError(f"checkpoint {path} cannot be pinned: {error.strerror}") from error
        if isinstance(error, DamagedCheckpoint):
            error.args = (str(error).replace(str(folder), str(path)),)
        raise


def _link(file: Path, to: Path) -> None:
    """Raises OSError."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        to.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or a file of another user
        shutil.copyfile(file, to)
