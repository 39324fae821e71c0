"""The trajectory log: an append-only log of a rollout, one JSON line for each record.

Owns the format, its writing during a rollout, and its reading. Line 1 is a header; each further line is a finished
trajectory, a closed group, an event of an engine, or statistics. Promises that a record is read back bit for bit, and
that malformed content raises InvalidTrace with file and line. The incomplete last line of a killed process is skipped
and described by `torn`.

If the name ends in `.gz`, each record is a gzip member, so the file is readable at any time, also by zcat.
"""

from __future__ import annotations

import gzip
import math
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, InvalidTrace
from tangram.files.append_log import AppendLog, LineReader, check_line_length, preview
from tangram.reports.printable import escape_unprintable
from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.runs.json_values import from_json_values, to_json_values
from tangram.rl.trajectories.trajectory import Group, Trajectory

LOG_FORMAT = 1
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, InvalidInput, AssertionError, RecursionError)
"""Errors of decoding: of JSON, of its text, and of values. Records assert what holds between their fields."""


class TrajectoryLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What applies to the whole rollout."""

    format: int = LOG_FORMAT
    began_at: float
    """Unix time; the seconds of all records count from it."""
    settings: RolloutSettings | None = None
    words: tuple[str, ...] = ()
    """A vocabulary of words, by token id; empty if the policy has a tokenizer."""
    modules: tuple[str, ...] = ()
    """Folders that environments were imported from."""
    note: str = ""


class GroupClosing(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is complete or was dropped. Its trajectories precede it, each in a line of its own."""

    id: str
    task: str
    seed: int
    members: tuple[str, ...]
    """Ids of the trajectories that the group keeps."""
    left_out: tuple[str, ...] = ()
    wanted: int
    cause: str = ""
    at_s: float = 0.0

    @staticmethod
    def of(group: Group, at_s: float = 0.0) -> GroupClosing:
        return GroupClosing(
            id=group.id,
            task=group.task,
            seed=group.seed,
            members=tuple(each.id for each in group.members),
            left_out=tuple(each.id for each in group.left_out),
            wanted=group.wanted,
            cause=group.cause,
            at_s=at_s,
        )


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of an engine, such as a start, a death, a removal or a weight update."""

    at_s: float
    name: str
    """The kind of event, such as `died`."""
    words: dict[str, str | int | float | bool | None] = {}
    """Its details, such as the engine and the reason."""


def engine_event(event: msgspec.Struct, since: float = 0.0) -> EngineEvent:
    """Converts an event of the router, named by its tag. `since` is the start of the rollout on the clock of the
    event's `at_s`."""
    fields = msgspec.to_builtins(event)
    words = {key: value for key, value in fields.items() if key not in ("at_s", "type")}
    return EngineEvent(at_s=fields["at_s"] - since, name=fields["type"], words=words)


class StatisticsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers at one point in time."""

    at_s: float
    engines: tuple[EngineStatistics, ...] = ()
    values: dict[str, float] = {}


LogRecord = Trajectory | GroupClosing | EngineEvent | StatisticsRecord


class _TrajectoryLine(msgspec.Struct, frozen=True, tag_field="kind", tag="trajectory"):
    record: Trajectory


class _GroupLine(msgspec.Struct, frozen=True, tag_field="kind", tag="group"):
    record: GroupClosing


class _EventLine(msgspec.Struct, frozen=True, tag_field="kind", tag="engine"):
    record: EngineEvent


class _StatisticsLine(msgspec.Struct, frozen=True, tag_field="kind", tag="statistics"):
    record: StatisticsRecord


class _HeaderFormat(msgspec.Struct, frozen=True):
    """The field of a header that is decoded first: another format may have other fields."""

    format: int


_AnyLogLine = _TrajectoryLine | _GroupLine | _EventLine | _StatisticsLine
_LINES: dict[type, Any] = {
    Trajectory: _TrajectoryLine,
    GroupClosing: _GroupLine,
    EngineEvent: _EventLine,
    StatisticsRecord: _StatisticsLine,
}
_encoder = msgspec.json.Encoder()
_line_decoder: msgspec.json.Decoder[_AnyLogLine] = msgspec.json.Decoder(_AnyLogLine)


# ---- writing --------------------------------------------------------------------------------------------------


class TrajectoryLog:
    """Appends records to a new file: `with TrajectoryLog("run.jsonl") as log: log.append(trajectory)`."""

    def __init__(
        self,
        path: str | Path,
        *,
        settings: RolloutSettings | None = None,
        words: tuple[str, ...] = (),
        modules: tuple[str, ...] = (),
        note: str = "",
        began_at: float | None = None,
    ) -> None:
        """Raises InvalidConfig if the file cannot be created or is not empty."""
        self.path = Path(path)
        self.records = 0
        self._compressed = self.path.suffix == ".gz"
        self._log = _create(self.path)
        header = TrajectoryLogHeader(
            began_at=time.time() if began_at is None else began_at,
            settings=settings,
            words=words,
            modules=modules,
            note=note,
        )
        try:
            self._write(_encode(header))
        except BaseException:
            self.close()
            raise

    def append(self, record: LogRecord) -> None:
        """Raises ManagerError if the record cannot be written; all records before it are complete."""
        self._write(_encode(_LINES[type(record)](record)))
        self.records += 1

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> TrajectoryLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        check_line_length(line)
        self._log.append(gzip.compress(line, mtime=0) if self._compressed else line)


def _create(path: Path) -> AppendLog:
    try:
        log = AppendLog(path)
    except OSError as error:
        raise InvalidConfig("log", str(path), f"a file that can be written ({error.strerror})") from error
    if log.size:
        log.close()
        raise InvalidConfig("log", str(path), "a new file: this one is not empty; delete it or choose another name")
    return log


def _encode(value: Any) -> bytes:
    try:
        if _is_finite(value):
            return _encoder.encode(value) + b"\n"
    except UnicodeEncodeError:
        pass
    try:
        return _encoder.encode(to_json_values(msgspec.to_builtins(value))) + b"\n"
    except UnicodeEncodeError as error:
        raise InvalidInput("record", error.object[:80], "names that are text, without lone surrogates") from None


def _is_finite(value: Any) -> bool:
    """Tests the sum, which is finite only if all numbers are. If the sum overflows, the slower encoding is correct
    too."""
    match value:
        case _TrajectoryLine(record=trajectory):
            times = (getattr(span, name) for span in trajectory.spans for name in ("began_s", "ended_s", "waiting_s"))
            totals = (trajectory.reward or 0.0, trajectory.began_s, trajectory.ended_s)
            engine_times = (seconds for turn in trajectory.turns for seconds in (turn.prefill_s, turn.decode_s))
            return math.isfinite(
                sum(chain(totals, trajectory.logprobs, trajectory.metrics.values(), times, engine_times))
            )
        case _GroupLine(record=closing):
            return math.isfinite(closing.at_s)
        case TrajectoryLogHeader():
            return True  # settings are validated
    return False  # events and statistics are small


# ---- reading --------------------------------------------------------------------------------------------------


def read(path: str | Path) -> TrajectoryLogReader:
    """A reader of a log, which may still be growing. Raises InvalidConfig if it cannot be opened, InvalidTrace if it is
    not a log."""
    return TrajectoryLogReader(path)


class TrajectoryLogReader:
    """Iterates over the records of a log; each iteration starts at the beginning."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn = ""
        """Describes an incomplete record at the end, or is empty; set after an iteration."""
        self.line = 0
        """Line of the last record that was returned."""
        with self._open() as file:
            self.header = self._read_header(LineReader(file, self.path))

    def __iter__(self) -> Iterator[LogRecord]:
        with self._open() as file:
            lines = LineReader(file, self.path)
            self._read_header(lines)
            for text in lines:
                if text.strip():
                    self.line = lines.number
                    yield self._decode_record(self.line, text)
            self.torn = lines.torn

    def trajectories(self) -> list[Trajectory]:
        return [record for record in self if isinstance(record, Trajectory)]

    def groups(self) -> Iterator[Group]:
        """The closed groups. Raises InvalidTrace if a closing names a trajectory that does not precede it."""
        return groups(self, str(self.path))

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise InvalidConfig("log", str(self.path), f"a file that can be read ({error.strerror})") from error

    def _read_header(self, lines: LineReader) -> TrajectoryLogHeader:
        text = next(iter(lines), b"")
        try:
            format = msgspec.json.decode(text, type=_HeaderFormat).format
            if format != LOG_FORMAT:
                raise InvalidTrace(f"{self.path}:1 format", format, f"rollout log format {LOG_FORMAT}")
            return msgspec.json.decode(text, type=TrajectoryLogHeader)
        except InvalidTrace:
            raise
        except DECODE_ERRORS as error:
            expected = f"the header of a rollout log ({_reason(error)})"
            raise InvalidTrace(f"{self.path}:1", preview(text or lines.rest), expected) from None

    def _decode_record(self, number: int, text: bytes) -> LogRecord:
        try:
            return _decode(text).record
        except DECODE_ERRORS as error:
            expected = f"a line of a rollout log ({_reason(error)})"
            raise InvalidTrace(f"{self.path}:{number}", preview(text), expected) from None


def groups(records: Iterable[LogRecord], name: str = "log") -> Iterator[Group]:
    """The closed groups, each with its trajectories."""
    by_id: dict[str, Trajectory] = {}
    for record in records:
        if isinstance(record, Trajectory):
            by_id[record.id] = record
        elif isinstance(record, GroupClosing):
            yield _build_group(record, by_id, name)


def _build_group(closing: GroupClosing, by_id: dict[str, Trajectory], name: str) -> Group:
    for each in (*closing.members, *closing.left_out):
        if each not in by_id:
            raise InvalidTrace(
                f"{name} group {escape_unprintable(closing.id)}", each, "the id of a trajectory that precedes it"
            )
    try:
        return Group(
            id=closing.id,
            task=closing.task,
            seed=closing.seed,
            members=tuple(by_id[each] for each in closing.members),
            left_out=tuple(by_id[each] for each in closing.left_out),
            wanted=closing.wanted,
            cause=closing.cause,
        )
    except AssertionError as error:
        raise InvalidTrace(
            f"{name} group {escape_unprintable(closing.id)}",
            closing.members,
            f"members with a reward ({_reason(error)})",
        ) from None


def _decode(text: bytes) -> _AnyLogLine:
    try:
        return _line_decoder.decode(text)
    except msgspec.MsgspecError:
        if b'{"$' not in text:
            raise
    return msgspec.convert(from_json_values(msgspec.json.decode(text)), type=_AnyLogLine)


def _reason(error: BaseException) -> str:
    return escape_unprintable(str(error)) or type(error).__name__
