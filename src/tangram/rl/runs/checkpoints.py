"""Checkpoints of a run: the weights as a trainer saves them, and the state of everything else at that moment.

    CHECKPOINTS/00000040/...             what Trainer.save wrote, words.json
    CHECKPOINTS/00000040/state.msgpack   a RunState
    CHECKPOINTS/00000040/whole.json      size and CRC-32 of every file

Owns this layout. Never knows what is in the files of a trainer. Promises that a checkpoint is there whole or not at
all, that one whose files are damaged is never taken for whole, and that an old one goes only once a newer is durable.

A reader can hold a checkpoint, by links to its files or by copies where links are impossible: it stays while it is
held, though its run deletes it meanwhile.

    with held_newest(run / CHECKPOINTS, warn=print) as held:
        play(held.folder)       # with the weights of held.path, which may be gone by now
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
from tangram.files.atomic_directory import remove_whole
from tangram.rl.buffer.records import BufferState
from tangram.rl.runs.sample_log import needed
from tangram.rl.train.records import Warmed
from tangram.rl.train.weights_folder import published_folder

STATE, WHOLE = "state.msgpack", "whole.json"
STATE_FORMAT = 1
DAMAGED = ".damaged"
"""Ends the names of checkpoints that were set aside."""
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
"""Errors that stay; all others may be over at the next try, and then nothing would be lost."""
READ_BYTES = 1 << 20
"""At once, while a file is looked through."""


VANISHED_MAX = 100
"""Checkpoints in a row that are deleted before they are held. Links take milliseconds; whoever meets this copies to
another disk from a run that saves faster than it can be read."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is, besides its weights."""

    format: int = STATE_FORMAT
    version: int
    """Of the weights."""
    step: int
    """Gradient steps that are done."""
    ticket_next: int
    """Number of the next ticket."""
    buffer: BufferState
    at_s: float
    """How long the run has gone on."""
    warm: Warmed | None = None
    """The last look at the warm start."""
    evaluations: int = 0
    """That are done: the number of the next."""
    random: bytes = b""
    """State of whatever draws by chance besides, as its owner writes it."""
    note: str = ""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One that is whole."""

    path: Path
    state: RunState
    warnings: tuple[str, ...] = ()
    """What is wrong with newer ones, in words."""

    @property
    def step(self) -> int:
        return self.state.step


class _File(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    crc32: int


class _Format(msgspec.Struct, frozen=True):
    format: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RunState)
_files: msgspec.json.Decoder[dict[str, _File]] = msgspec.json.Decoder(dict[str, _File])


class DamagedCheckpoint(ManagerError):
    """A checkpoint that cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} is damaged: {reason}", retry=False)


class NoCheckpoint(ManagerError):
    """There are checkpoints, and none of them can be used: to resume the run fails each time."""

    def __init__(self, damage: Sequence[str]) -> None:
        expected = "there is no other: begin anew with --fresh, or with other weights by policy.checkpoint"
        super().__init__("; ".join((*damage, expected)), retry=False)


# ---- writing ----


def write_state(path: Path, state: RunState) -> None:
    """Into a checkpoint that is being written, with what training needs of the groups in it. It may take a while: call
    it in a thread. Raises ManagerError."""
    waiting = tuple(msgspec.structs.replace(each, group=needed(each.group)) for each in state.buffer.waiting)
    state = msgspec.structs.replace(state, buffer=msgspec.structs.replace(state.buffer, waiting=waiting))
    try:
        (path / STATE).write_bytes(_encoder.encode(state))
    except OSError as error:
        raise ManagerError(f"{path / STATE} cannot be written: {error.strerror}") from error


def seal(unfinished: Path) -> None:
    """Writes down what is in it, so that damage is seen. Raises InvalidInput if the state is not, OSError."""
    if not (unfinished / STATE).is_file():
        raise InvalidInput("checkpoint", str(unfinished), f"that {STATE} was written into it, by write_state")
    found = {each.relative_to(unfinished).as_posix(): _look(each) for each in _files_in(unfinished)}
    (unfinished / WHOLE).write_bytes(msgspec.json.encode(found, order="sorted"))


def prune(folder: Path, keep: int) -> int | None:
    """Removes all but the newest, and what was set aside before them; the step of the oldest that is left. Raises
    ManagerError."""
    steps = steps_in(folder)
    kept = steps[-keep:]
    for step in steps[:-keep]:
        remove_whole(folder / folder_name(step))
    for path in folder.glob(f"*{DAMAGED}"):
        if not kept or path.name < folder_name(kept[0]):
            remove_whole(path)
    return kept[0] if kept else None


def set_aside(path: Path) -> Path:
    """Under a name that is never taken for a checkpoint. Raises ManagerError."""
    aside = path.with_name(path.name + DAMAGED)
    if aside.exists():
        remove_whole(aside)
    try:
        return path.rename(aside)
    except OSError as error:
        raise ManagerError(f"{path} cannot be renamed: {error.strerror}") from error


# ---- reading ----


def folder_name(step: int) -> str:
    return f"{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Of all that bear the name of a checkpoint, oldest first."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises DamagedCheckpoint; ManagerError for a format that is not known."""
    try:
        told = _files.decode((path / WHOLE).read_bytes())
        for name, file in told.items():
            found = _look(path / name)
            if found != file:
                raise DamagedCheckpoint(path, f"{name} is not what was written: {_apart(file, found)}")
        content = (path / STATE).read_bytes()
        if STATE not in told:
            raise DamagedCheckpoint(path, f"{WHOLE} does not name {STATE}")
        found_format = msgspec.msgpack.decode(content, type=_Format).format
        if found_format != STATE_FORMAT:
            raise ManagerError(
                f"{path / STATE}: expected a state of format {STATE_FORMAT}, got {found_format}; resume it with the "
                "release that wrote it",
                retry=False,
            )
        return Checkpoint(path=path, state=_decoder.decode(content))
    except OSError as error:
        if error.errno in DAMAGE:
            raise DamagedCheckpoint(path, f"{error.filename or path}: {error.strerror}") from error
        raise ManagerError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, AssertionError) as error:
        raise DamagedCheckpoint(path, str(error)) from error


def _look(path: Path) -> _File:
    crc32 = size = 0
    with path.open("rb") as file:
        while content := file.read(READ_BYTES):
            crc32 = zlib.crc32(content, crc32)
            size += len(content)
    return _File(size=size, crc32=crc32)


def _apart(written: _File, found: _File) -> str:
    if found.size != written.size:
        return f"it has {found.size:,} bytes instead of {written.size:,}"
    return f"its {found.size:,} bytes are others (CRC-32 {found.crc32:08x} instead of {written.crc32:08x})"


def _files_in(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


class Held(NamedTuple):
    path: Path
    """What it is called."""
    folder: Path
    """Where its files are."""


class Vanished(Exception):
    """It was deleted before it was held."""


@contextmanager
def held(path: Path) -> Iterator[Held]:
    """This one. Raises DamagedCheckpoint, InvalidConfig if it is gone, and ManagerError."""
    with _place(path.parent) as place:
        try:
            found = _hold(path, place)
        except Vanished:
            raise InvalidConfig("checkpoint", str(path), "one that is there: its run has just deleted it") from None
        yield found


@contextmanager
def held_newest(checkpoints: Path, warn: Callable[[str], None]) -> Iterator[Held]:
    """The newest in this folder that is whole; `warn` is told of those that are not. Raises InvalidConfig if there is
    none, and ManagerError."""
    with _place(checkpoints) as place:
        yield _newest(checkpoints, place, warn)


def _newest(checkpoints: Path, place: Path, warn: Callable[[str], None]) -> Held:
    damaged: set[int] = set()
    vanished = 0
    while vanished < VANISHED_MAX:
        left = [step for step in steps_in(checkpoints) if step not in damaged]
        if not left:
            break
        try:
            return _hold(checkpoints / folder_name(left[-1]), place)
        except Vanished:
            vanished += 1
        except DamagedCheckpoint as error:
            warn(str(error))
            damaged.add(left[-1])
    if vanished:
        raise ManagerError(f"{checkpoints}: {vanished} checkpoints in a row were deleted before they could be held")
    if damaged:
        raise ManagerError(f"{checkpoints}: no checkpoint in it is whole", retry=False)
    raise InvalidConfig("checkpoint", str(checkpoints), "a run that has a checkpoint: this one has none yet")


@contextmanager
def _place(checkpoints: Path) -> Iterator[Path]:
    """In the folder of the run, where there can be links; or else where everybody may write."""
    run = checkpoints.resolve().parent
    below = run if os.access(run, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        try:
            place = stack.enter_context(published_folder(below))
        except OSError as error:
            raise ManagerError(f"no checkpoint can be held in {below}: {error.strerror}") from error
        yield place


def _hold(path: Path, place: Path) -> Held:
    """Raises Vanished, DamagedCheckpoint and ManagerError."""
    folder = place / path.name
    try:
        for each in path.rglob("*"):
            if each.is_file():
                _link(each, folder / each.relative_to(path))
        read_checkpoint(folder)
        return Held(path, folder)
    except (OSError, ManagerError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not path.is_dir():
            raise Vanished from None
        if isinstance(error, OSError):
            raise ManagerError(f"checkpoint {path} cannot be held: {error.strerror}") from error
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
    except OSError:  # on another disk, or somebody else's
        shutil.copyfile(file, to)
