"""The trace recorder: writes what a scheduler received and decided to a file, and reads such a file back.

Owns the files; core/trace.py owns the format of a line. A file appears under its name only when it is complete. Reading
checks every line and raises InvalidTrace with file and line for what is malformed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tangram.core.action import Outcome
from tangram.core.limits import Limits
from tangram.core.messages import Concluded, Effect, Event, Observer, Pool, Settle
from tangram.core.trace import EVENTS, Header, Line, Recorder, read
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.files.atomic_file import atomic_write

SECONDS_MAX = 1e10
"""Largest time in a trace, Unix time included: beyond it, a float has no precision for fractions of seconds."""
SECONDS_MIN_ROUNDED = -1e-6
"""A difference of two times may be slightly negative by rounding."""


@contextmanager
def record_trace(
    path: str | Path, *, policy: str, pools: tuple[Pool, ...], limits: Limits, note: str = ""
) -> Iterator[Observer]:
    """Yields an observer that writes every event and its effects to the file."""
    recorder = Recorder()
    with atomic_write("record", path) as file:
        file.write(recorder.header(Header(policy=policy, pools=pools, limits=limits, note=note)))

        def record(now: float, event: Event, effects: list[Effect]) -> None:
            file.write(recorder.lines(now, event, effects))

        yield record


@contextmanager
def open_trace(path: str | Path) -> Iterator[tuple[Header, Iterator[Line]]]:
    """The header and the lines of a recorded trace, each checked when it is read."""
    try:
        with Path(path).open("rb") as file:
            check = _TraceChecker(str(path))
            header, lines = read(check.count_lines(file), str(path))
            check.check_pools(header.pools)
            yield header, check.check_lines(lines)
    except OSError as error:
        raise InvalidConfig("trace", str(path), f"a file that can be read ({error.strerror})") from error


class _TraceChecker:
    """Invariants from line to line: consecutive numbers, effects after their event, times that never decrease."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = 0
        self._event_seq = 0
        """The seq of the last event."""

    def count_lines(self, texts: Iterable[bytes]) -> Iterator[bytes]:
        for self._line, text in enumerate(texts, start=1):
            yield text

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
        return InvalidTrace(f"{self._name}:{self._line} {field}", value, expected)
