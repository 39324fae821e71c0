"""What a report draws of simulations: the values, colours and tooltips of its charts.

Owns which actions are drawn and how results become series, bars and rows; `reports/charts.py` draws them. Never reads
a file, never simulates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tangram.reports import charts
from tangram.reports.charts import Bar, BarPart, Floats, GanttBar, GanttRow, Sample, Strip
from tangram.reports.formatting import seconds
from tangram.sim.result import ActionRow, SimulationResult

ACT_AXIS = "action completion time (ACT)"
TIMELINE_ROWS = 22
KINDS_SHOWN = 6
"""Kinds of actions whose time is split."""
WINDOW_ACTS = 20.0
"""Length of a timeline in mean ACTs: a bar is then neither too narrow to see nor as long as the row."""
WINDOWS_S = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 14_400.0, 86_400.0)


class ChartSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in a chart."""

    name: str
    css: str
    """The class of its colour."""
    result: SimulationResult


# ---- distribution ---------------------------------------------------------------------------------------------


def distribution(lines: Sequence[ChartSeries]) -> str:
    """The share of actions done within a time."""
    return charts.distribution(_samples(lines), ACT_AXIS)


def slow_tail(lines: Sequence[ChartSeries]) -> str:
    """The share of actions that take longer than a time."""
    return charts.slow_tail(_samples(lines), ACT_AXIS)


def _samples(lines: Sequence[ChartSeries]) -> list[Sample]:
    return [Sample(name=line.name, css=line.css, values=np.sort(line.result.acts())) for line in lines]


# ---- where the time goes --------------------------------------------------------------------------------------


class TimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the actions of one kind under one policy."""

    count: int
    waiting_s: float
    overhead_s: float
    execution_s: float


def time_splits(lines: Sequence[ChartSeries]) -> dict[str, list[TimeSplit]]:
    """Splits by kind, one for each line; the kinds with the most time first."""
    kinds: dict[str, float] = {}
    for line in lines:
        for row in line.result.completed:
            kinds[row.kind] = kinds.get(row.kind, 0.0) + row.act_s
    chosen = sorted(kinds, key=lambda kind: -kinds[kind])[:KINDS_SHOWN]
    return {kind: [_time_split(line.result, kind) for line in lines] for kind in chosen}


def _time_split(result: SimulationResult, kind: str) -> TimeSplit:
    rows = [row for row in result.completed if row.kind == kind]
    count = max(1, len(rows))
    return TimeSplit(
        count=len(rows),
        waiting_s=sum(row.waiting_s for row in rows) / count,
        overhead_s=sum(row.overhead_s for row in rows) / count,
        execution_s=sum(row.execution_s for row in rows) / count,
    )


def split_bars(lines: Sequence[ChartSeries], splits: Sequence[TimeSplit]) -> str:
    """A bar for each policy: mean waiting pale, overhead half, execution full."""
    bars = []
    for line, split in zip(lines, splits, strict=True):
        times = (
            (split.waiting_s, "pale", "waiting"),
            (split.overhead_s, "half", "overhead"),
            (split.execution_s, "fill", "executing"),
        )
        parts = tuple(
            BarPart(
                value=spent_s,
                css=f"{shade} {line.css}",
                tip=f"{line.name}, {split.count:,} actions\n{what}: {seconds(spent_s)} on average",
            )
            for spent_s, shade, what in times
        )
        bars.append(Bar(name=line.name, parts=parts, label=seconds(sum(spent_s for spent_s, _, _ in times))))
    left = 18.0 + 6.4 * max(len(line.name) for line in lines)
    return charts.bar_chart(bars, "Mean waiting, overhead and execution by policy", left=left, right=272.0)


# ---- utilisation ----------------------------------------------------------------------------------------------


class PoolChart(msgspec.Struct, frozen=True, kw_only=True):
    """A pool whose use is shown: all cores, or the devices of some nodes."""

    title: str
    unit: str
    total: float
    nodes: tuple[str, ...] = ()

    def mean_usage(self, result: SimulationResult, edges: Floats) -> Floats:
        """The mean number of units in use between neighbouring edges."""
        if self.unit == "cores":
            return _mean_of_steps(result.busy, edges)
        rows = [row for row in result.rows if row.node in self.nodes and row.execution_s > 0.0]
        ends = np.array([row.ended_at for row in rows])
        begins = ends - np.array([row.execution_s for row in rows])
        widths = np.array([row.width for row in rows])
        upto = np.array([float((widths * np.clip(edge - begins, 0.0, ends - begins)).sum()) for edge in edges])
        return np.asarray(np.diff(upto) / np.diff(edges))


def _mean_of_steps(samples: Sequence[tuple[float, float]], edges: Floats) -> Floats:
    """The mean between neighbouring edges of a curve that keeps each value until the next sample."""
    times = np.array([0.0, *(at for at, _ in samples)])
    values = np.array([0.0, *(value for _, value in samples)])
    areas = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    which = np.searchsorted(times, edges, side="right") - 1
    upto = areas[which] + values[which] * (edges - times[which])
    return np.asarray(np.diff(upto) / np.diff(edges))


def utilisation(lines: Sequence[ChartSeries], pool: PoolChart) -> str:
    """How much of a pool is in use over time, a strip for each policy on the same axes."""
    since = min(row.submitted_at for line in lines for row in line.result.rows)
    until = max(row.ended_at for line in lines for row in line.result.rows)
    since = 0.0 if since < 0.1 * until else since
    edges = charts.strip_edges(since, until)
    strips = []
    for line in lines:
        used = pool.mean_usage(line.result, edges)
        unit_s = float(used.sum()) * float(edges[1] - edges[0])
        strips.append(
            Strip(
                name=line.name,
                css=line.css,
                used=used,
                total=pool.total,
                share=unit_s / max(line.result.makespan_s, 1e-9) / pool.total,
                ended_s=max(row.ended_at for row in line.result.rows),
            )
        )
    return charts.strips(strips, f"{pool.title} in use over time, by policy", pool.unit, since, until)


# ---- timeline -------------------------------------------------------------------------------------------------


class TimelineWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time and some trajectories, the same for every policy in the chart."""

    start_s: float
    end_s: float
    trajectories: tuple[str, ...]


def busiest_window(base: SimulationResult) -> TimelineWindow:
    """The time in which most actions wait under the base, and some of the trajectories active in it."""
    rows = base.rows
    until = max(row.ended_at for row in rows)
    target_s = WINDOW_ACTS * sum(row.act_s for row in rows) / len(rows)
    length = min(WINDOWS_S, key=lambda each: abs(math.log(each / max(target_s, 1e-3))))
    start = _busiest_start(rows, length, until)
    names = dict.fromkeys(row.trajectory for row in rows if row.ended_at > start and row.submitted_at < start + length)
    chosen = _sample_evenly(sorted(names, key=_natural_sort_key), TIMELINE_ROWS)
    return TimelineWindow(start_s=start, end_s=start + length, trajectories=tuple(chosen))


def _busiest_start(rows: Sequence[ActionRow], length: float, until: float) -> float:
    """The start of the window with the most waiting; if nothing waits, with the most execution."""
    count = int(min(2000.0, max(1.0, 2.0 * until / length)))
    starts = np.linspace(0.0, max(0.0, until - length), count)
    begins = np.array([row.submitted_at for row in rows])
    for ends in (
        np.array([row.submitted_at + row.waiting_s for row in rows]),
        np.array([row.ended_at for row in rows]),
    ):
        upto = _seconds_before(begins, ends, np.concatenate([starts, starts + length]))
        inside = upto[count:] - upto[:count]
        if inside.max(initial=0.0) > 0.0:
            step = min(length / 2.0, 10.0)
            return float(np.floor(starts[int(np.argmax(inside))] / step) * step)
    return 0.0


def _seconds_before(begins: Floats, ends: Floats, at: Floats) -> Floats:
    """Seconds of all intervals before each time: sums over the started minus sums over the ended."""
    begins, ends = np.sort(begins), np.sort(ends)
    total_begins = np.concatenate([[0.0], np.cumsum(begins)])
    total_ends = np.concatenate([[0.0], np.cumsum(ends)])
    begin_count, ended = np.searchsorted(begins, at, "right"), np.searchsorted(ends, at, "right")
    result: Floats = (begin_count * at - total_begins[begin_count]) - (ended * at - total_ends[ended])
    return result


def _natural_sort_key(name: str) -> tuple[str, int]:
    """`coding/9` before `coding/10`."""
    head, _, tail = name.rpartition("/")
    return (head, int(tail)) if tail.isdigit() else (name, 0)


def _sample_evenly(names: list[str], count: int) -> list[str]:
    """At most `count` names, at equal distances in the list."""
    if len(names) <= count:
        return names
    return [names[i * len(names) // count] for i in range(count)]


def timeline(line: ChartSeries, window: TimelineWindow, css_by_kind: dict[str, str]) -> str:
    """A row per trajectory, a bar per action: waiting pale, then overhead, then execution in full colour."""
    inside: dict[str, list[ActionRow]] = {name: [] for name in window.trajectories}
    for row in line.result.rows:
        if row.trajectory in inside and row.ended_at > window.start_s and row.submitted_at < window.end_s:
            inside[row.trajectory].append(row)
    rows = [
        GanttRow(
            name=name if len(name) <= 12 else "…" + name[-11:],
            bars=tuple(
                bar
                for row, place, share in side_by_side(actions)
                for bar in _action_bars(row, place, share, css_by_kind.get(row.kind, "k6"))
            ),
        )
        for name, actions in inside.items()
    ]
    label = f"Timeline of some trajectories under {line.name}"
    return charts.gantt(
        rows, label, window.start_s, window.end_s, width=520.0, left=74.0, right=512.0, ticks=5, guides=True
    )


def side_by_side(rows: list[ActionRow]) -> Iterator[tuple[ActionRow, float, float]]:
    """Each action with its place and its share in the height of the row: actions of one turn share the row."""
    concurrent: list[ActionRow] = []
    end = 0.0
    for row in [*sorted(rows, key=lambda row: row.submitted_at), None]:
        if row is None or (concurrent and row.submitted_at >= end):
            yield from ((each, i / len(concurrent), 1.0 / len(concurrent)) for i, each in enumerate(concurrent))
            concurrent, end = [], 0.0
        if row is not None:
            concurrent.append(row)
            end = max(end, row.ended_at)


def _action_bars(row: ActionRow, place: float, share: float, css: str) -> Iterator[GanttBar]:
    begin = row.ended_at - row.execution_s
    granted = begin - row.overhead_s
    tip = (
        f"{row.kind} {row.key}\n{row.trajectory}, submitted at {row.submitted_at:.1f} s\n"
        f"waiting {seconds(row.waiting_s)}, executing {seconds(row.execution_s)}"
        + (f", overhead {seconds(row.overhead_s)}" if row.overhead_s >= 0.0005 else "")
        + (f"\nwidth {row.width:g}" if row.width > 1.0 else "")
        + (f"\n{row.status}" if row.status != "succeeded" else "")
    )
    for since, until, shade in (
        (row.submitted_at, granted, "pale"),
        (granted, begin, "half"),
        (begin, row.ended_at, "fill"),
    ):
        yield GanttBar(
            since=since,
            until=until,
            css=f"{shade} {css}",
            tip=tip,
            place=place,
            share=share,
            skip_if_tiny=shade != "fill",
        )
