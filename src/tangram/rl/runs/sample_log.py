"""The log of samples: what was put into the buffer, or lost, since a checkpoint was taken.

    SAMPLES/00000040.log    since the state of checkpoint 40 was taken, until that of the next one was

Owns the format and its writing and reading. Each frame is a length, a CRC-32 and a record in msgpack. A record is in
the file as soon as `append` returns, so it outlives the process, though not the machine: what is missing at the end of
a log is played again. Promises that a record is read whole or not at all, also after a full disk or a kill; what cannot
be read is left out, and `torn` says so. Of a group it keeps what training needs, and not what was said and when.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from tangram.errors import ManagerError
from tangram.files.atomic_directory import sync
from tangram.rl.rollout.records import Group, Trajectory, Turn

LOG_FORMAT = 1
HEADER = struct.Struct("<II")
"""Of a frame: its length and its CRC-32. Damage is what is looked for, not malice."""
FRAME_BYTES_MAX = 1 << 30
"""A greater length is damage: a million tokens take 15 MB."""
UNFINISHED = ".unfinished"


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """The first record of a file."""

    format: int = LOG_FORMAT
    step: int


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """A group that went into the buffer."""

    group: Group


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """A group that will not be trained on."""

    id: str
    cause: str
    """As it is counted."""


Entry = Put | Lost
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Opened | Put | Lost] = msgspec.msgpack.Decoder(Opened | Put | Lost)
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, AssertionError)
"""What decoding raises; records assert what holds between their fields."""


def needed(group: Group) -> Group:
    """Of a group, what training needs: without what was left out, what was said and how long it took."""
    return msgspec.structs.replace(
        group, members=tuple(_needed(each) for each in group.members), left_out=(), cause=_text(group.cause)
    )


def _needed(trajectory: Trajectory) -> Trajectory:
    return msgspec.structs.replace(
        trajectory,
        turns=tuple(_turn(each) for each in trajectory.turns),
        observation="",
        cause=_text(trajectory.cause),
        metrics={},
        spans=(),
    )


def _turn(turn: Turn) -> Turn:
    return Turn(
        observation="",
        observation_tokens=turn.observation_tokens,
        action="",
        tokens=turn.tokens,
        logprobs=turn.logprobs,
        versions=turn.versions,
        kept=turn.kept,
        cut=turn.cut,
    )


def _text(text: str) -> str:
    """Environments say anything, also what is no text."""
    return text if text.isprintable() else text.encode("utf-8", "backslashreplace").decode()


# ---- writing --------------------------------------------------------------------------------------------------


class SampleLog:
    """`with SampleLog(folder, 40) as log: log.append(group)`; `rotate(60)` when the state of a checkpoint is taken."""

    def __init__(self, folder: Path | str, step: int) -> None:
        """Goes on where the log of this step ends, if there is one. Raises ManagerError."""
        self.folder = Path(folder)
        self.torn = ""
        """What was at the end of the log that it goes on with, and could not be read; it is gone now."""
        self._file = -1
        self._open(step)

    def append(self, group: Group) -> None:
        """Raises ManagerError if it cannot be written; then it is not in the file, and all others are."""
        self._write(Put(group=needed(group)))

    def append_lost(self, group: str, cause: str) -> None:
        """Raises ManagerError likewise."""
        self._write(Lost(id=group, cause=_text(cause)))

    def rotate(self, step: int) -> None:
        """What comes from now on is after this checkpoint. To be called at the moment when the state of the buffer is
        taken for it, be the checkpoint made or not. Raises ManagerError, and then goes on as before."""
        if step != self.step:
            self._open(step)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self, step: int) -> None:
        path = self.folder / log_name(step)
        reading = Reading(path)
        torn, file = "", -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(file).st_size:
                for _ in reading:
                    pass
                torn = reading.torn
            os.ftruncate(file, reading.size)
            os.lseek(file, 0, os.SEEK_END)
            size = reading.size or _write_whole(file, _frame(Opened(step=step)))
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise ManagerError(f"{path}: the log cannot be written ({error.strerror})") from error
        self.close()
        self.path, self.step, self.torn, self._file, self._size = path, step, torn, file, size

    def _write(self, record: Entry) -> None:
        if self._file < 0:
            raise ManagerError(f"{self.path}: the log is closed", retry=False)
        try:
            self._size += _write_whole(self._file, _frame(record))
        except BaseException as error:
            self._take_back()
            if not isinstance(error, OSError):
                raise
            raise ManagerError(f"{self.path}: the log cannot be written ({error.strerror})") from error

    def _take_back(self) -> None:
        """What of a frame is written. If even that fails, the reader finds a last frame without its end."""
        try:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError:
            self.close()  # what followed could not be read


def _frame(record: Opened | Entry) -> bytes:
    content = _encoder.encode(record)
    return HEADER.pack(len(content), zlib.crc32(content)) + content


def _write_whole(file: int, frame: bytes) -> int:
    left = memoryview(frame)
    while left:
        left = left[os.write(file, left) :]
    return len(frame)


def log_name(step: int) -> str:
    return f"{step:08d}.log"


# ---- reading --------------------------------------------------------------------------------------------------


class Reading:
    """The entries of a file, in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = ""
        """Known after an iteration: what could not be read, in words."""
        self.size = 0
        """Known after an iteration: bytes that could be read."""

    def __iter__(self) -> Iterator[Entry]:
        """Raises ManagerError if it cannot be opened, or is of a format that is not known."""
        self.torn, self.size = "", 0
        try:
            with self.path.open("rb") as file:
                whole = os.fstat(file.fileno()).st_size
                while self.size < whole:
                    header = file.read(HEADER.size)
                    length, crc32 = HEADER.unpack(header) if len(header) == HEADER.size else (0, 0)
                    content = file.read(length) if 0 < length <= FRAME_BYTES_MAX else b""
                    record = _record(content, length, crc32)
                    if record is None or (self.size == 0) != isinstance(record, Opened):
                        self.torn = f"{self.path}: {whole - self.size:,} bytes at its end could not be read"
                        return
                    self.size += HEADER.size + length
                    if not isinstance(record, Opened):
                        yield record
                    elif record.format != LOG_FORMAT:
                        raise ManagerError(
                            f"{self.path}: expected a log of format {LOG_FORMAT}, got {record.format}", retry=False
                        )
        except OSError as error:
            raise ManagerError(f"{self.path}: {error.strerror}") from error


def _record(content: bytes, length: int, crc32: int) -> Opened | Entry | None:
    if not content or len(content) != length or zlib.crc32(content) != crc32:
        return None
    try:
        return _decoder.decode(content)
    except MALFORMED:
        return None


class Logs:
    """All entries since the state of a checkpoint was taken, in their order."""

    def __init__(self, folder: Path | str, step: int) -> None:
        self.paths = [each for number, each in log_files(folder) if number >= step]
        self.torn: list[str] = []
        """Known after an iteration: what could not be read, in words."""

    def __iter__(self) -> Iterator[Entry]:
        self.torn = []
        for path in self.paths:
            reading = Reading(path)
            yield from reading
            if reading.torn:
                self.torn.append(reading.torn)


def read_after(folder: Path | str, step: int) -> Logs:
    """To be iterated."""
    return Logs(folder, step)


def log_files(folder: Path | str) -> list[tuple[int, Path]]:
    """The logs with their steps, oldest first."""
    return sorted((int(path.stem), path) for path in Path(folder).glob("*.log") if path.stem.isdecimal())


def join_after(folder: Path | str, step: int) -> None:
    """Makes one log of all since a checkpoint, under its step, so that those of its lineage that are written from now
    on have their names for themselves. Killed at any time, it leaves the same entries, some of them twice. Raises
    ManagerError."""
    folder = Path(folder)
    logs = read_after(folder, step)
    own = folder / log_name(step)
    if all(path == own for path in logs.paths):
        return
    unfinished = own.with_suffix(UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            file.write(_frame(Opened(step=step)))
            for entry in logs:
                file.write(_frame(entry))
        sync(unfinished)
        unfinished.rename(own)
        sync(folder)
        for path in logs.paths:
            if path != own:
                path.unlink()
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ManagerError(f"{own}: the log cannot be written ({error.strerror})") from error


def prune_logs(folder: Path | str, step: int | None = None) -> None:
    """Removes the logs before a step, or all. Raises ManagerError."""
    for number, path in log_files(folder):
        if step is None or number < step:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ManagerError(f"{path} cannot be removed: {error.strerror}") from error
