"""The trace recorder: writes what a scheduler received and decided to a file, and reads such a file back.

Owns the files; core/trace.py owns the format of a line. `TraceLog` is the observer that writes: the event log of the
server, and what `connect(record=...)` and `tangram sim --record` keep. Promises that every line in a file is complete,
and that an error of writing ends the trace and nothing else. Reading checks every line and raises InvalidTrace with
file and line for what is malformed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tangram.core.action import Outcome
from tangram.core.limits import Limits
from tangram.core.messages import Concluded, Effect, Event, Pool, Settle
from tangram.core.trace import EVENTS, Header, Line, Recorder, read
from tangram.errors import InvalidConfig, InvalidTrace, ManagerError
from tangram.files.append_log import AppendLog, LineReader
from tangram.files.atomic_file import os_error_as_invalid_config, partial_path_of, replace_file

FLUSH_BYTES = 64 << 10
FLUSH_INTERVAL_S = 1.0
"""Buffered events are written above this many bytes, or with the first event after this time. Limits what a killed
process loses."""
SECONDS_MAX = 1e10
"""Largest time in a trace, Unix time included: beyond it, a float has no precision for fractions of seconds."""
SECONDS_MIN_ROUNDED = -1e-6
"""A difference of two times may be slightly negative by rounding."""


log = logging.getLogger("tangram.trace")


class TraceLog:
    """An observer of the orchestrator that appends each event and its effects. Writes to the page cache only, so an
    action never waits for a disk."""

    def __init__(self, path: Path, header: Header, *, permissions: int = 0o644, bytes_max: int | None = None) -> None:
        """Raises OSError if the file cannot be opened."""
        self.error: ManagerError | None = None
        """Why the trace ended before the orchestrator did; its lines until then are complete."""
        self._path = path
        self._recorder = Recorder()
        self._flush_at = 0.0
        self._log = AppendLog(path, permissions=permissions, buffer_bytes=FLUSH_BYTES, bytes_max=bytes_max)
        self._append(self._recorder.header(header))
        self.flush()

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        if self.error is not None:
            return
        self._append(self._recorder.lines(now, event, effects))
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_INTERVAL_S
            self.flush()

    def _append(self, lines: bytes) -> None:
        try:
            self._log.append(lines)
        except ManagerError as error:
            self._stop(error)

    def flush(self) -> None:
        """Write the buffered events."""
        if self.error is not None:
            return
        try:
            self._log.flush()
        except ManagerError as error:
            self._stop(error)

    def _stop(self, error: ManagerError) -> None:
        self.error = error
        log.warning("the trace %s ended: %s", self._path, error)

    def open_snapshot(self) -> tuple[BinaryIO, int]:
        """A reader of all events until now, and its size. Its caller closes it."""
        self.flush()
        return self._log.open_snapshot(), self._log.size

    def close(self) -> None:
        self.flush()
        self._log.close()


@contextmanager
def record_trace(
    path: str | Path, *, policy: str, pools: tuple[Pool, ...], limits: Limits, note: str = ""
) -> Iterator[TraceLog]:
    """Yields an observer that writes every event and its effects. The trace appears under its name at the end of the
    block; until then, and if the process is killed, it is under the name of `partial_path_of`. An error in the block
    removes it. Raises InvalidConfig if the file cannot be created."""
    partial = partial_path_of(path)
    with os_error_as_invalid_config("record", path):
        partial.unlink(missing_ok=True)
        trace = TraceLog(partial, Header(policy=policy, pools=pools, limits=limits, note=note))
    try:
        try:
            yield trace
        finally:
            trace.close()
        with os_error_as_invalid_config("record", path):
            replace_file(partial, Path(path).resolve())
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def open_trace(path: str | Path) -> Iterator[tuple[Header, Iterator[Line]]]:
    """The header and the lines of a recorded trace, each checked when it is read."""
    try:
        with Path(path).open("rb") as file:
            text = LineReader(file, Path(path))
            check = _TraceChecker(str(path), text)
            header, lines = read(_all_lines(text, str(path)), str(path))
            check.check_pools(header.pools)
            yield header, check.check_lines(lines)
    except OSError as error:
        raise InvalidConfig("trace", str(path), f"a file that can be read ({error.strerror})") from error


def _all_lines(text: LineReader, name: str) -> Iterator[bytes]:
    """Also a last line without newline, which `LineReader` skips: unlike a log, a trace is complete or malformed."""
    yield from text
    if text.rest:
        text.number += 1
        yield text.rest
    elif text.torn:
        raise InvalidTrace(f"{name}:{text.number + 1}", "an incomplete end of gzip", "a trace line")


class _TraceChecker:
    """Invariants from line to line: consecutive numbers, effects after their event, times that never decrease."""

    def __init__(self, name: str, text: LineReader) -> None:
        self._name = name
        self._text = text
        self._event_seq = 0
        """The seq of the last event."""

    def check_pools(self, pools: tuple[Pool, ...]) -> None:
        names = [pool.name for pool in pools]
        for name in names:
            if names.count(name) > 1:
                raise self._error("pools", name, "every pool once")

    def check_lines(self, lines: Iterable[Line]) -> Iterator[Line]:
        since = 0.0
        for number, line in enumerate(lines, start=1):
            if not since <= line.t <= SECONDS_MAX:
                raise self._error(
                    "t", line.t, f"seconds from {since:g}, the time of the line before, to {SECONDS_MAX:g}"
                )
            since = line.t
            if line.seq != number:
                raise self._error("seq", line.seq, f"{number}: the lines are numbered 1, 2, 3 ... without a gap")
            self._check_cause(line)
            if isinstance(line.message, Settle | Concluded):
                self._check_times(line.message.outcome)
            yield line

    def _check_cause(self, line: Line) -> None:
        if isinstance(line.message, EVENTS):
            self._event_seq = line.seq
        if line.cause != self._event_seq or not self._event_seq:
            expected = (
                f"{self._event_seq}, the seq of the event that it answers"
                if self._event_seq
                else "an event before effects"
            )
            raise self._error("cause", line.cause, expected)

    def _check_times(self, outcome: Outcome) -> None:
        for record in (outcome, outcome.usage):
            for field in record.__struct_fields__:
                value = getattr(record, field)
                if field.endswith("_s") and not SECONDS_MIN_ROUNDED <= value <= SECONDS_MAX:
                    raise self._error(f"outcome {field}", value, f"seconds from 0 to {SECONDS_MAX:g}")

    def _error(self, field: str, value: object, expected: str) -> InvalidTrace:
        return InvalidTrace(f"{self._name}:{self._text.number} {field}", value, expected)
