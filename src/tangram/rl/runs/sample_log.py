"""The sample log: an append-only log of the groups that entered the buffer, or were lost, since a checkpoint.

    SAMPLES/00000040.log    from the moment when the state of checkpoint 40 was taken to that of the next one

Owns the format: frames with a checksum, each a record in msgpack. Keeps what training needs of a group, without text
and timings. Reading stops at the first damaged frame, and `torn` describes it; the groups that are missing after it are
played again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from tangram.errors import ManagerError
from tangram.files.append_log import AppendLog, encode_frame, read_frame
from tangram.files.atomic_file import atomic_file
from tangram.rl.trajectories.training_batch import escape_surrogates, strip_for_training
from tangram.rl.trajectories.trajectory import Group

LOG_FORMAT = 1


class LogOpened(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """The first record of a file."""

    format: int = LOG_FORMAT
    step: int


class GroupPut(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """A group that entered the buffer."""

    group: Group


class GroupLost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """A group that will not be trained on."""

    id: str
    cause: str
    """A key of the counters of dropped groups."""


SampleEntry = GroupPut | GroupLost
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LogOpened | GroupPut | GroupLost] = msgspec.msgpack.Decoder(
    LogOpened | GroupPut | GroupLost
)
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, AssertionError)
"""Errors of decoding; records assert what holds between their fields."""


# ---- writing --------------------------------------------------------------------------------------------------


class SampleLog:
    """The writer: `with SampleLog(folder, 40) as log: log.append(group)`; `rotate(60)` when the state of checkpoint 60
    is taken."""

    def __init__(self, folder: Path | str, step: int) -> None:
        """Continues the log of this step, if it exists. Raises ManagerError."""
        self.folder = Path(folder)
        self.torn = ""
        """Describes what was cut off the end of the existing log; empty if nothing was."""
        self._log = self._open(step)

    def append(self, group: Group) -> None:
        """Raises ManagerError if the group cannot be written; all records before it are complete."""
        self._log.append(_frame(GroupPut(group=strip_for_training(group))))

    def append_lost(self, group: str, cause: str) -> None:
        """Raises ManagerError like `append`."""
        self._log.append(_frame(GroupLost(id=group, cause=escape_surrogates(cause))))

    def rotate(self, step: int) -> None:
        """Start the log of the next checkpoint. Call it at the moment when the state of the buffer is taken, whether
        the checkpoint then succeeds or not. Raises ManagerError; the current log stays in use then."""
        if step != self.step:
            before, self._log = self._log, self._open(step)
            before.close()

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self, step: int) -> AppendLog:
        path = self.folder / log_name(step)
        reader = SampleLogReader(path)
        try:
            log = AppendLog(path, recover=reader.scan)
        except OSError as error:
            raise ManagerError(f"{path}: the log cannot be written ({error.strerror})") from error
        try:
            if not log.size:
                log.append(_frame(LogOpened(step=step)))
        except BaseException:
            log.close()
            raise
        self.step, self.path, self.torn = step, path, reader.torn
        return log


def _frame(record: LogOpened | SampleEntry) -> bytes:
    return encode_frame(_encoder.encode(record))


def log_name(step: int) -> str:
    return f"{step:08d}.log"


# ---- reading --------------------------------------------------------------------------------------------------


class SampleLogReader:
    """Iterates over the entries of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = ""
        """Describes what could not be read; set after an iteration."""
        self.size = 0
        """Bytes that could be read; set after an iteration."""

    def __iter__(self) -> Iterator[SampleEntry]:
        """Raises ManagerError if the file cannot be opened or has an unknown format."""
        try:
            with self.path.open("rb") as file:
                yield from self._entries(file)
        except OSError as error:
            raise ManagerError(f"{self.path}: {error.strerror}") from error

    def scan(self, file: BinaryIO) -> int:
        """How many bytes of the log can be read. Raises ManagerError if it has an unknown format."""
        for _ in self._entries(file):
            pass
        return self.size

    def _entries(self, file: BinaryIO) -> Iterator[SampleEntry]:
        self.torn, self.size = "", 0
        total = os.fstat(file.fileno()).st_size
        while self.size < total:
            record = _decode(read_frame(file))
            if record is None or (self.size == 0) != isinstance(record, LogOpened):
                self.torn = f"{self.path}: {total - self.size:,} bytes at its end could not be read"
                return
            self.size = file.tell()
            if not isinstance(record, LogOpened):
                yield record
            elif record.format != LOG_FORMAT:
                raise ManagerError(
                    f"{self.path}: expected a log of format {LOG_FORMAT}, got {record.format}", retry=False
                )


def _decode(content: bytes | None) -> LogOpened | SampleEntry | None:
    try:
        return None if content is None else _decoder.decode(content)
    except DECODE_ERRORS:
        return None


class SampleLogs:
    """All entries since the state of a checkpoint was taken, in their order."""

    def __init__(self, folder: Path | str, step: int) -> None:
        self.paths = [each for number, each in log_files(folder) if number >= step]
        self.torn: list[str] = []
        """Descriptions of what could not be read; set after an iteration."""

    def __iter__(self) -> Iterator[SampleEntry]:
        self.torn = []
        for path in self.paths:
            reading = SampleLogReader(path)
            yield from reading
            if reading.torn:
                self.torn.append(reading.torn)


def log_files(folder: Path | str) -> list[tuple[int, Path]]:
    """The logs with their steps, oldest first."""
    return sorted((int(path.stem), path) for path in Path(folder).glob("*.log") if path.stem.isdecimal())


def merge_after(folder: Path | str, step: int) -> None:
    """Merges all logs since a checkpoint into one, under its step, so that a resumed run can use the names of later
    steps. If it is killed, the same entries remain, some of them twice. Raises ManagerError."""
    folder = Path(folder)
    logs = SampleLogs(folder, step)
    own = folder / log_name(step)
    if all(path == own for path in logs.paths):
        return
    try:
        with atomic_file(own, durable=True) as file:
            file.write(_frame(LogOpened(step=step)))
            for entry in logs:
                file.write(_frame(entry))
        for path in logs.paths:
            if path != own:
                path.unlink()
    except OSError as error:
        raise ManagerError(f"{own}: the log cannot be written ({error.strerror})") from error


def prune_logs(folder: Path | str, step: int | None = None) -> None:
    """Removes the logs before a step, or all of them. Raises ManagerError."""
    for number, path in log_files(folder):
        if step is None or number < step:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ManagerError(f"{path} cannot be removed: {error.strerror}") from error
