"""Timelines in the Chrome trace event format, as JSON that https://ui.perfetto.dev and chrome://tracing open.

Owns the encoding: complete events ("X") with begin and duration in microseconds, counters ("C"), instants ("i"), and
metadata ("M") that names processes and lanes. Promises events sorted by time, durations that are not negative, and
lanes in which one event contains another or ends before it: viewers drop events that overlap partially, so events that
do are moved to further lanes of the same name.

    trace = TraceEvents()
    lane = trace.lane("trajectories", "frozenlake/3/0.0")
    trace.complete(lane, "generate", since_s=1.0, until_s=2.5)
    trace.counter("engines", "busy", at_s=1.0, values={"engine-0": 1.0})
    trace.write(Path("timeline.json"))
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tangram.files.atomic_file import atomic_write, check_writable

OPTION = "perfetto"
"""The option that names the file, for errors."""


class LaneId(NamedTuple):
    process: int
    lane: int


class Phase(NamedTuple):
    """A part of an event, drawn below it."""

    name: str
    since_s: float
    until_s: float


class _Complete(NamedTuple):
    since: int
    until: int
    name: str
    category: str
    args: Mapping[str, Any]
    phases: tuple[tuple[str, int, int], ...]


class TraceEvents:
    """Collects the events of one trace."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._lanes: dict[tuple[int, str], LaneId] = {}
        self._complete: dict[LaneId, list[_Complete]] = {}
        self._points: list[dict[str, Any]] = []

    def lane(self, process: str, name: str) -> LaneId:
        """The lane of this name in a process; both are made when they are first named, and shown in that order."""
        pid = self._process(process)
        if (pid, name) not in self._lanes:
            self._lanes[pid, name] = lane = LaneId(pid, len(self._lanes) + 1)
            self._complete[lane] = []
        return self._lanes[pid, name]

    def complete(
        self,
        lane: LaneId,
        name: str,
        *,
        since_s: float,
        until_s: float,
        category: str = "",
        args: Mapping[str, Any] | None = None,
        phases: Sequence[Phase] = (),
    ) -> None:
        """Add an event with a begin and an end; an end before the begin counts as the begin."""
        since = _nanoseconds(since_s)
        until = max(since, _nanoseconds(until_s))
        parts = []
        begin = since
        for phase in phases:
            begin = min(until, max(begin, _nanoseconds(phase.since_s)))
            end = min(until, max(begin, _nanoseconds(phase.until_s)))
            if end > begin:
                parts.append((phase.name, begin, end))
            begin = end
        self._complete[lane].append(_Complete(since, until, name, category, args or {}, tuple(parts)))

    def counter(self, process: str, name: str, *, at_s: float, values: Mapping[str, float]) -> None:
        """Add the values of a counter from this time on; several series are stacked."""
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        event = {"name": name, "ph": "C", "ts": _nanoseconds(at_s), "pid": self._process(process), "tid": 0}
        self._points.append({**event, "args": finite})

    def instant(self, process: str, name: str, *, at_s: float) -> None:
        """Add a mark in all lanes of a process."""
        event = {"name": name, "ph": "i", "s": "p", "ts": _nanoseconds(at_s), "pid": self._process(process), "tid": 0}
        self._points.append({**event, "args": {}})

    def events(self) -> list[dict[str, Any]]:
        """All events as the format has them: metadata first, then by time, containing events before contained ones."""
        metadata = []
        for name, pid in self._processes.items():
            metadata.append(_metadata("process_name", pid, 0, {"name": name}))
            metadata.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        timed = list(self._points)
        following = len(self._lanes) + 1
        for (pid, name), lane in self._lanes.items():
            for number, events in enumerate(_without_overlap(self._complete[lane]) or [[]]):
                tid = lane.lane if not number else following
                following += bool(number)
                metadata.append(_metadata("thread_name", pid, tid, {"name": name}))
                metadata.append(_metadata("thread_sort_index", pid, tid, {"sort_index": lane.lane}))
                for complete in events:
                    timed += _complete_events(complete, pid, tid)
        timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        for event in timed:
            event["ts"] /= 1000
            if "dur" in event:
                event["dur"] /= 1000
        return metadata + timed

    def encode(self) -> bytes:
        """The JSON of the trace."""
        return msgspec.json.encode({"traceEvents": self.events(), "displayTimeUnit": "ms"})

    def write(self, path: Path) -> None:
        """Write the trace atomically. Raises InvalidConfig, naming the option, if `path` cannot be written."""
        check_writable(OPTION, path)
        with atomic_write(OPTION, path) as file:
            file.write(self.encode())

    def _process(self, name: str) -> int:
        return self._processes.setdefault(name, len(self._processes) + 1)


def _nanoseconds(value_s: float) -> int:
    return round(value_s * 1e9)


def _metadata(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _complete_events(event: _Complete, pid: int, tid: int) -> list[dict[str, Any]]:
    place = {"ph": "X", "cat": event.category, "pid": pid, "tid": tid}
    event_json = {"name": event.name, **place, "ts": event.since, "dur": event.until - event.since, "args": event.args}
    parts = [
        {"name": name, **place, "ts": since, "dur": until - since, "args": {}} for name, since, until in event.phases
    ]
    return [event_json, *parts]


def _without_overlap(events: Sequence[_Complete]) -> list[list[_Complete]]:
    """Distribute events over as few rows as possible, each in its own time within the first row that is free."""
    rows: list[list[_Complete]] = []
    free: list[int] = []
    ends: list[tuple[int, int]] = []
    for event in sorted(events, key=lambda event: (event.since, event.until)):
        while ends and ends[0][0] <= event.since:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            number = heapq.heappop(free)
        else:
            number = len(rows)
            rows.append([])
        rows[number].append(event)
        heapq.heappush(ends, (event.until, number))
    return rows
