"""The log of a rollout: its trajectories and what happened meanwhile, one JSON line each.

Owns the format, its writing while a rollout goes on, and its reading. Line 1 is a header; each further line is a
trajectory that ended, the closing of a group, an event of an engine, or statistics. A record is in the file as soon as
`append` returns, so it outlives the process, though not the machine. Promises that what is read equals what was
written, to the last bit; that a line is there whole or not at all, also when the disk is full; and InvalidTrace with
file and line for whatever is malformed. A last line without its end is what a killed process leaves: it is left out,
and `torn` says so.

A name that ends in `.gz` is compressed, each record by itself, so it too can be read at any time, also by `zcat`.
"""

from __future__ import annotations

import gzip
import math
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, InvalidTrace, ManagerError
from tangram.reports.printable import plain
from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.rollout.records import Group, Trajectory

LOG_FORMAT = 1
LINE_BYTES_MAX = 256 << 20
"""A longer line is no trajectory: a million tokens with log-probabilities and versions take 40 MB."""
CHUNK_BYTES = 64 << 10
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, InvalidInput, AssertionError, RecursionError)
"""What decoding raises: of JSON, of the text inside it, or of what it says. Records assert what holds between their
fields."""
NUMBER, TEXT = "$number", "$text"
"""JSON has no nan, no infinity and no lone surrogate: `{"$number": "nan"}` and `{"$text": "<UTF-8 in hex>"}` are."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the whole rollout."""

    format: int = LOG_FORMAT
    began_at: float
    """Unix time, from which the seconds of all records count."""
    settings: RolloutSettings | None = None
    words: tuple[str, ...] = ()
    """Of a vocabulary of words, by id; none of a tokenizer."""
    modules: tuple[str, ...] = ()
    """Folders in which environments of one's own were looked for."""
    note: str = ""


class GroupClosing(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is complete, or was given up. Its trajectories stand before it, each in a line of its own."""

    id: str
    task: str
    seed: int
    members: tuple[str, ...]
    """Ids of those that are kept."""
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
    """Something that happened to an engine: it started, died, was removed, took weights."""

    at_s: float
    name: str
    """What happened, such as `died`."""
    words: dict[str, str | int | float | bool | None] = {}
    """The rest of it, such as which engine, and why."""


def engine_event(event: msgspec.Struct, since: float = 0.0) -> EngineEvent:
    """An event of a gateway as a record, named by its tag. `since`: from when the times of the rollout are
    counted, as its `began`, by the clock that the event has its `at_s` of."""
    fields = msgspec.to_builtins(event)
    words = {key: value for key, value in fields.items() if key not in ("at_s", "type")}
    return EngineEvent(at_s=fields["at_s"] - since, name=fields["type"], words=words)


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers at one time."""

    at_s: float
    engines: tuple[EngineStatistics, ...] = ()
    values: dict[str, float] = {}


Record = Trajectory | GroupClosing | EngineEvent | Statistics


class _TrajectoryLine(msgspec.Struct, frozen=True, tag_field="kind", tag="trajectory"):
    record: Trajectory


class _GroupLine(msgspec.Struct, frozen=True, tag_field="kind", tag="group"):
    record: GroupClosing


class _EventLine(msgspec.Struct, frozen=True, tag_field="kind", tag="engine"):
    record: EngineEvent


class _StatisticsLine(msgspec.Struct, frozen=True, tag_field="kind", tag="statistics"):
    record: Statistics


class _Format(msgspec.Struct, frozen=True):
    """Of a header, what is read before the rest: another format may have other fields."""

    format: int


_Line = _TrajectoryLine | _GroupLine | _EventLine | _StatisticsLine
_LINES: dict[type, Any] = {
    Trajectory: _TrajectoryLine,
    GroupClosing: _GroupLine,
    EngineEvent: _EventLine,
    Statistics: _StatisticsLine,
}
_encoder = msgspec.json.Encoder()
_line_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


# ---- writing --------------------------------------------------------------------------------------------------


class TrajectoryLog:
    """Appends records to a new file. `with TrajectoryLog("run.jsonl") as log: log.append(trajectory)`"""

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
        """Raises InvalidConfig if the file cannot be made or holds something already."""
        self.path = Path(path)
        self.records = 0
        self._compressed = self.path.suffix == ".gz"
        self._size = 0
        self._file = _new_file(self.path)
        header = Header(
            began_at=time.time() if began_at is None else began_at,
            settings=settings,
            words=words,
            modules=modules,
            note=note,
        )
        try:
            self._write(_encoded(header))
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Raises ManagerError if it cannot be written; then it is not in the file, and all others are."""
        self._write(_encoded(_LINES[type(record)](record)))
        self.records += 1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TrajectoryLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        if self._file < 0:
            raise ManagerError(f"{self.path}: the log is closed", retry=False)
        if len(line) > LINE_BYTES_MAX:
            raise InvalidInput("record", f"{len(line):,} bytes", f"at most {LINE_BYTES_MAX:,} bytes")
        left = memoryview(gzip.compress(line, mtime=0) if self._compressed else line)
        size = len(left)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except BaseException as error:
            self._take_back()
            if not isinstance(error, OSError):
                raise
            kept = f"the {self.records:,} records before are whole in it"
            raise ManagerError(f"{self.path}: the log cannot be written ({error.strerror}); {kept}") from error
        self._size += size

    def _take_back(self) -> None:
        """What of a line is written. If even that fails, the reader finds a last line without its end."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self.close()  # what followed would be part of that line


def _new_file(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidConfig("log", str(path), f"a file that can be written ({error.strerror})") from error
    if os.fstat(file).st_size:
        os.close(file)
        raise InvalidConfig("log", str(path), "a new file: this one holds something; delete it or choose another name")
    return file


def _encoded(value: Any) -> bytes:
    try:
        if _finite(value):
            return _encoder.encode(value) + b"\n"
    except UnicodeEncodeError:
        pass
    try:
        return _encoder.encode(_marked(msgspec.to_builtins(value))) + b"\n"
    except UnicodeEncodeError as error:
        raise InvalidInput("record", error.object[:80], "names that are text, without lone surrogates") from None


def _finite(value: Any) -> bool:
    """Told by the sum, which is finite only if all are; if it overflows, the slow way is right too."""
    match value:
        case _TrajectoryLine(record=trajectory):
            times = (getattr(span, name) for span in trajectory.spans for name in ("began_s", "ended_s", "waiting_s"))
            own = (trajectory.reward or 0.0, trajectory.began_s, trajectory.ended_s)
            engine = (seconds for turn in trajectory.turns for seconds in (turn.prefill_s, turn.decode_s))
            return math.isfinite(sum(chain(own, trajectory.logprobs, trajectory.metrics.values(), times, engine)))
        case _GroupLine(record=closing):
            return math.isfinite(closing.at_s)
        case Header():
            return True  # settings are checked
    return False  # events and statistics are small


def _marked(value: Any) -> Any:
    match value:
        case dict():
            return {key: _marked(each) for key, each in value.items()}
        case list() | tuple():
            return [_marked(each) for each in value]
        case float() if not math.isfinite(value):
            return {NUMBER: repr(value)}
        case str() if not _is_text(value):
            return {TEXT: value.encode("utf-8", "surrogatepass").hex()}
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unmarked(value: Any) -> Any:
    match value:
        case {"$number": str(number)} if len(value) == 1 and number in ("nan", "inf", "-inf"):
            return float(number)
        case {"$text": str(text)} if len(value) == 1:
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
        case dict():
            return {key: _unmarked(each) for key, each in value.items()}
        case list():
            return [_unmarked(each) for each in value]
    return value


# ---- reading --------------------------------------------------------------------------------------------------


def read(path: str | Path) -> Reading:
    """The records of a log, in their order; it may still be growing. Raises InvalidConfig if it cannot be opened,
    InvalidTrace if it is no log."""
    return Reading(path)


class Reading:
    """A log as it is read. Each iteration begins anew."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn = ""
        """Known after an iteration: what there is of a line without its end, in words; empty if there is none."""
        self.line = 0
        """Of the record that an iteration gave last."""
        with self._opened() as file:
            self.header = self._header(_Lines(file, self.path))

    def __iter__(self) -> Iterator[Record]:
        with self._opened() as file:
            lines = _Lines(file, self.path)
            self._header(lines)
            for text in lines:
                if text.strip():
                    self.line = lines.number
                    yield self._record(self.line, text)
            self.torn = lines.torn

    def trajectories(self) -> list[Trajectory]:
        return [record for record in self if isinstance(record, Trajectory)]

    def groups(self) -> Iterator[Group]:
        """As they were closed. Raises InvalidTrace if a closing names a trajectory that does not stand before it."""
        return groups(self, str(self.path))

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise InvalidConfig("log", str(self.path), f"a file that can be read ({error.strerror})") from error

    def _header(self, lines: _Lines) -> Header:
        text = next(iter(lines), b"")
        try:
            found = msgspec.json.decode(text, type=_Format).format
            if found != LOG_FORMAT:
                raise InvalidTrace(f"{self.path}:1 format", found, f"rollout log format {LOG_FORMAT}")
            return msgspec.json.decode(text, type=Header)
        except InvalidTrace:
            raise
        except MALFORMED as error:
            expected = f"the header of a rollout log ({_reason(error)})"
            raise InvalidTrace(f"{self.path}:1", _shown(text or lines.rest), expected) from None

    def _record(self, number: int, text: bytes) -> Record:
        try:
            return _decoded(text).record
        except MALFORMED as error:
            expected = f"a line of a rollout log ({_reason(error)})"
            raise InvalidTrace(f"{self.path}:{number}", _shown(text), expected) from None


def groups(records: Iterable[Record], name: str = "log") -> Iterator[Group]:
    """The groups that were closed, each with its trajectories."""
    by_id: dict[str, Trajectory] = {}
    for record in records:
        if isinstance(record, Trajectory):
            by_id[record.id] = record
        elif isinstance(record, GroupClosing):
            yield _group(record, by_id, name)


def _group(closing: GroupClosing, by_id: dict[str, Trajectory], name: str) -> Group:
    for each in (*closing.members, *closing.left_out):
        if each not in by_id:
            raise InvalidTrace(
                f"{name} group {plain(closing.id)}", each, "the id of a trajectory that stands before it"
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
            f"{name} group {plain(closing.id)}", closing.members, f"members with a reward ({_reason(error)})"
        ) from None


def _decoded(text: bytes) -> _Line:
    try:
        return _line_decoder.decode(text)
    except msgspec.MsgspecError:
        if b'{"$' not in text:
            raise
    try:
        return msgspec.convert(_unmarked(msgspec.json.decode(text)), type=_Line)
    except UnicodeDecodeError:
        raise
    except ValueError as error:  # of what is marked as hex and is none
        raise msgspec.ValidationError(str(error)) from None


class _Lines:
    """The whole lines of a file, counted; what is left at its end without one is `rest`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.number = 0
        self.rest = b""
        self._cut = False
        """Whether what is compressed ends before its end."""
        self._pieces = self._unpacked() if path.suffix == ".gz" else iter(lambda: file.read(CHUNK_BYTES), b"")
        self._lines = self._split()

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    @property
    def torn(self) -> str:
        if self.rest:
            return f"{self._path}:{self.number + 1}: {len(self.rest):,} bytes of a line without its end are left out"
        return f"{self._path}: a record after line {self.number} that was cut is left out" if self._cut else ""

    def _split(self) -> Iterator[bytes]:
        held: list[bytes] = []
        size = 0
        for piece in self._pieces:
            *lines, last = piece.split(b"\n")
            for line in lines:
                self.number += 1
                yield b"".join((*held, line))
                held, size = [], 0
            held.append(last)
            size += len(last)
            if size > LINE_BYTES_MAX:
                where = f"{self._path}:{self.number + 1}"
                raise InvalidTrace(where, _shown(held[0]), f"a line of at most {LINE_BYTES_MAX:,} bytes")
        self.rest = b"".join(held)

    def _unpacked(self) -> Iterator[bytes]:
        packed = self._file.read(CHUNK_BYTES)
        while packed:
            member = zlib.decompressobj(wbits=31)
            while packed and not member.eof:
                try:
                    yield member.decompress(packed, CHUNK_BYTES)
                except zlib.error as error:
                    where = f"{self._path}:{self.number + 1}"
                    raise InvalidTrace(where, _shown(packed), f"what gzip writes ({error})") from None
                packed = member.unused_data if member.eof else member.unconsumed_tail or self._file.read(CHUNK_BYTES)
            self._cut = not member.eof
            packed = packed or self._file.read(CHUNK_BYTES)


def _shown(text: bytes) -> str:
    return text[:80].decode("utf-8", "replace")


def _reason(error: BaseException) -> str:
    return plain(str(error)) or type(error).__name__
