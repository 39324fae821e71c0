"""The trace recorder: writes what a scheduler received and decided to a file, and reads such a file back.

Owns the files; core/trace.py owns the format of a line. A file appears under its name only when it is complete. Reading
checks every line and raises InvalidTrace with file and line for what is malformed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tangram.core.action import Outcome
from tangram.core.limits import Limits
from tangram.core.messages import Concluded, Effect, Event, Pool, Settle
from tangram.core.trace import EVENTS, Header, Line, Recorder, read
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.files.atomic_file import whole_file

Observer = Callable[[float, Event, list[Effect]], None]

SECONDS_MAX = 1e10
"""Of any time in a trace, Unix time included: far beyond, seconds and their fractions no longer fit one number."""
SECONDS_MIN_ROUNDED = -1e-6
"""A difference of two times may come out below zero by rounding."""


@contextmanager
def recording(
    path: str | Path, *, policy: str, pools: tuple[Pool, ...], limits: Limits, note: str = ""
) -> Iterator[Observer | None]:
    """Gives an observer that writes every event and its effects to the file, or None if there is no path."""
    if not path:
        yield None
        return
    recorder = Recorder()
    with whole_file("record", path) as file:
        file.write(recorder.header(Header(policy=policy, pools=pools, limits=limits, note=note)))
        yield lambda now, event, effects: (file.write(recorder.lines(now, event, effects)), None)[1]


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[Header, Iterator[Line]]]:
    """The header and the lines of a recorded trace, each checked when it is read."""
    try:
        with Path(path).open("rb") as file:
            check = _Check(str(path))
            header, lines = read(check.counted(file), str(path))
            check.pools(header.pools)
            yield header, check.lines(lines)
    except OSError as error:
        raise InvalidConfig("trace", str(path), f"a file that can be read ({error.strerror})") from error


class _Check:
    """What must hold from line to line: numbers without a gap, effects after their event, time that never goes back."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = 0
        self._event = 0
        """The seq of the last event."""

    def counted(self, texts: Iterable[bytes]) -> Iterator[bytes]:
        for self._line, text in enumerate(texts, start=1):
            yield text

    def pools(self, pools: tuple[Pool, ...]) -> None:
        names = [pool.name for pool in pools]
        for name in names:
            if names.count(name) > 1:
                raise self._wrong("pools", name, "every pool once")

    def lines(self, lines: Iterable[Line]) -> Iterator[Line]:
        since = 0.0
        for number, line in enumerate(lines, start=1):
            if not since <= line.t <= SECONDS_MAX:
                raise self._wrong(
                    "t", line.t, f"seconds from {since:g}, the time of the line before, to {SECONDS_MAX:g}"
                )
            since = line.t
            if line.seq != number:
                raise self._wrong("seq", line.seq, f"{number}: the lines are numbered 1, 2, 3 ... without a gap")
            self._cause(line)
            if isinstance(line.message, Settle | Concluded):
                self._times(line.message.outcome)
            yield line

    def _cause(self, line: Line) -> None:
        if isinstance(line.message, EVENTS):
            self._event = line.seq
        if line.cause != self._event or not self._event:
            told = f"{self._event}, the seq of the event that it answers" if self._event else "an event before effects"
            raise self._wrong("cause", line.cause, told)

    def _times(self, outcome: Outcome) -> None:
        for record in (outcome, outcome.usage):
            for field in record.__struct_fields__:
                value = getattr(record, field)
                if field.endswith("_s") and not SECONDS_MIN_ROUNDED <= value <= SECONDS_MAX:
                    raise self._wrong(f"outcome {field}", value, f"seconds from 0 to {SECONDS_MAX:g}")

    def _wrong(self, field: str, value: object, expected: str) -> InvalidTrace:
        return InvalidTrace(f"{self._name}:{self._line} {field}", value, expected)
