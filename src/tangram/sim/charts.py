"""Charts: the pictures of the reports, each a function from results to SVG.

Owns what each picture shows and how much of it: long curves are reduced to what a screen can tell apart. Never reads a
file, never simulates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tangram.reports.formatting import percent, seconds
from tangram.reports.svg import Drawing, Linear, Log, duration, number
from tangram.sim.result import ActionRow, Result

Floats = npt.NDArray[np.float64]

CDF_POINTS = 200
SLICES = 60
"""Columns of a chart that answer to the pointer."""
BINS = 180
"""Points of a curve over time."""
TIMELINE_ROWS = 22
WINDOW_ACTS = 20.0
"""A timeline is as long as so many mean ACTs: a bar is then neither a hair nor the whole row."""
WINDOWS_S = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 14_400.0, 86_400.0)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in a chart."""

    name: str
    css: str
    """The class of its colour."""
    result: Result


# ---- distribution ---------------------------------------------------------------------------------------------


def distribution(lines: Sequence[Line]) -> str:
    """Share of the actions that are done within a time, which runs on a logarithmic scale."""
    acts = {line.name: np.sort(line.result.acts()) for line in lines}
    low = max(1e-3, min(float(np.percentile(values, 1)) for values in acts.values()))
    across = _time_axis(acts, low)
    down = Linear(0.0, 100.0, PANEL_BOTTOM, PANEL_TOP)
    drawing = _panel("Share of actions done within a time, by policy", across, down, [0.0, 25.0, 50.0, 75.0, 100.0])
    _curves(drawing, lines, across, down, lambda name, at: _share_within(acts[name], at))
    _readings(drawing, lines, across, lambda name, at: _share_within(acts[name], at), "done within")
    return drawing.render()


def slow_tail(lines: Sequence[Line]) -> str:
    """Share of the actions that take longer than a time, both logarithmic: what the mean and the p99 are made of."""
    acts = {line.name: np.sort(line.result.acts()) for line in lines}
    across = _time_axis(acts, max(1e-3, min(float(np.percentile(values, 50)) for values in acts.values())))
    least = 100.0 / max(len(values) for values in acts.values())
    down = Log(max(least, 0.01), 100.0, PANEL_BOTTOM, PANEL_TOP)
    drawing = _panel("Share of actions that take longer than a time, by policy", across, down, down.ticks(5))
    _curves(drawing, lines, across, down, lambda name, at: 100.0 - _share_within(acts[name], at))
    _readings(drawing, lines, across, lambda name, at: 100.0 - _share_within(acts[name], at), "longer than")
    return drawing.render()


PANEL_LEFT, PANEL_RIGHT, PANEL_TOP, PANEL_BOTTOM = 46.0, 508.0, 8.0, 268.0
"""Of one of two charts side by side, in pixels."""


def _time_axis(acts: dict[str, Floats], low: float) -> Log:
    return Log(low, max(float(values[-1]) for values in acts.values()), PANEL_LEFT, PANEL_RIGHT)


def _panel(label: str, across: Log, down: Linear | Log, ticks: list[float]) -> Drawing:
    drawing = Drawing(520, 312, label)
    for tick in ticks:
        drawing.line(PANEL_LEFT, down(tick), PANEL_RIGHT, down(tick), "gridline")
        drawing.text(PANEL_LEFT - 8, down(tick) + 4, f"{number(tick)} %", "tick", "end")
    for tick in across.ticks(5):
        drawing.line(across(tick), PANEL_TOP, across(tick), PANEL_BOTTOM, "gridline")
        drawing.text(across(tick), PANEL_BOTTOM + 18, duration(tick), "tick", "middle")
    drawing.line(PANEL_LEFT, PANEL_BOTTOM, PANEL_RIGHT, PANEL_BOTTOM, "axis")
    drawing.text(PANEL_RIGHT, PANEL_BOTTOM + 36, "action completion time (ACT)", "small faint", "end")
    return drawing


def _curves(
    drawing: Drawing,
    lines: Sequence[Line],
    across: Log,
    down: Linear | Log,
    share: Callable[[str, float], float],
) -> None:
    """A curve per policy; one that falls to nothing ends there."""
    step = (across.right - across.left) / CDF_POINTS
    places = [across.at(across.left + step * i) for i in range(CDF_POINTS + 1)]
    for line in lines:
        shares = [(at, share(line.name, at)) for at in places]
        kept = [(across(at), down(value)) for at, value in shares if value >= down.low]
        drawing.path(kept, f"curve {line.css}")


def _readings(
    drawing: Drawing, lines: Sequence[Line], across: Log, share: Callable[[str, float], float], words: str
) -> None:
    """What the curves say in each column, for the pointer."""
    step = (across.right - across.left) / SLICES
    edges = [across.left + step * i for i in range(SLICES + 1)]
    tips = []
    for a, b in itertools.pairwise(edges):
        at = across.at((a + b) / 2.0)
        told = [f"{line.name}: {share(line.name, at):.3g} %" for line in lines]
        tips.append("\n".join([f"{words} {seconds(at)}", *told]))
    drawing.slices(edges, PANEL_TOP, PANEL_BOTTOM, tips)


def _share_within(values: Floats, at: float) -> float:
    return 100.0 * float(np.searchsorted(values, at, side="right")) / max(1, len(values))


# ---- what the time is made of ---------------------------------------------------------------------------------


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the actions of one kind under one policy."""

    count: int
    waiting_s: float
    overhead_s: float
    execution_s: float


def splits(lines: Sequence[Line], kinds_max: int = 6) -> dict[str, list[Split]]:
    """By kind, those with the most time first, one split per line."""
    kinds: dict[str, float] = {}
    for line in lines:
        for row in line.result.completed:
            kinds[row.kind] = kinds.get(row.kind, 0.0) + row.act_s
    chosen = sorted(kinds, key=lambda kind: -kinds[kind])[:kinds_max]
    return {kind: [_split(line.result, kind) for line in lines] for kind in chosen}


def _split(result: Result, kind: str) -> Split:
    rows = [row for row in result.completed if row.kind == kind]
    count = max(1, len(rows))
    return Split(
        count=len(rows),
        waiting_s=sum(row.waiting_s for row in rows) / count,
        overhead_s=sum(row.overhead_s for row in rows) / count,
        execution_s=sum(row.execution_s for row in rows) / count,
    )


def split_bars(lines: Sequence[Line], found: Sequence[Split]) -> str:
    """One bar per policy: waiting pale, overhead half, execution full."""
    rows, left, right = 26.0, 18.0 + 6.4 * max(len(line.name) for line in lines), 272.0
    drawing = Drawing(330, rows * len(lines) + 4, "Mean waiting, overhead and execution by policy")
    longest = max((s.waiting_s + s.overhead_s + s.execution_s for s in found), default=1.0)
    across = Linear(0.0, longest or 1.0, left, right)
    for i, (line, split) in enumerate(zip(lines, found, strict=True)):
        y = rows * i + 4.0
        drawing.text(left - 8, y + 13, line.name, "small", "end")
        at = left
        for spent_s, css, what in (
            (split.waiting_s, "pale", "waiting"),
            (split.overhead_s, "half", "overhead"),
            (split.execution_s, "fill", "executing"),
        ):
            width = across(spent_s) - left
            if width >= 0.2:
                tip = f"{line.name}, {split.count:,} actions\n{what}: {seconds(spent_s)} on average"
                drawing.rect(at, y, width, 17, f"{css} {line.css}", tip)
            at += width
        drawing.text(at + 6, y + 13, seconds(split.waiting_s + split.overhead_s + split.execution_s), "small strong")
    return drawing.render()


# ---- utilisation ----------------------------------------------------------------------------------------------


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """A pool whose use is shown: all cores, or the devices of some nodes."""

    title: str
    unit: str
    total: float
    nodes: tuple[str, ...] = ()

    def over_time(self, result: Result, edges: Floats) -> Floats:
        """The mean number of units in use between each two edges."""
        if self.unit == "cores":
            return _mean_of_steps(result.busy, edges)
        rows = [row for row in result.rows if row.node in self.nodes and row.execution_s > 0.0]
        ends = np.array([row.ended_at for row in rows])
        begins = ends - np.array([row.execution_s for row in rows])
        widths = np.array([row.width for row in rows])
        upto = np.array([float((widths * np.clip(edge - begins, 0.0, ends - begins)).sum()) for edge in edges])
        return np.asarray(np.diff(upto) / np.diff(edges))


def _mean_of_steps(samples: Sequence[tuple[float, float]], edges: Floats) -> Floats:
    """The mean between each two edges of a curve that keeps every value until the next one."""
    times = np.array([0.0, *(at for at, _ in samples)])
    values = np.array([0.0, *(value for _, value in samples)])
    areas = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    which = np.searchsorted(times, edges, side="right") - 1
    upto = areas[which] + values[which] * (edges - times[which])
    return np.asarray(np.diff(upto) / np.diff(edges))


STRIP, STRIP_GAP = 78.0, 14.0
"""Height of one strip of a utilisation chart, and what lies between two of them."""


def utilisation(lines: Sequence[Line], pool: Pooled) -> str:
    """How much of a pool is in use over time, a strip for each policy on the same axes."""
    top, right = 6.0, 1030.0
    left = max(90.0, 18.0 + 7.6 * max(len(line.name) for line in lines))
    drawing = Drawing(1040, top + len(lines) * (STRIP + STRIP_GAP) + 22, f"{pool.title} in use over time, by policy")
    since = min(row.submitted_at for line in lines for row in line.result.rows)
    until = max(row.ended_at for line in lines for row in line.result.rows)
    across = Linear(0.0 if since < 0.1 * until else since, until, left, right)
    for i, line in enumerate(lines):
        _strip(drawing, line, pool, across, top + i * (STRIP + STRIP_GAP))
    for tick in across.ticks(8):
        y = top + len(lines) * (STRIP + STRIP_GAP) - STRIP_GAP + 18.0
        drawing.text(across(tick), y, duration(tick), "tick", "middle")
    return drawing.render()


def _strip(drawing: Drawing, line: Line, pool: Pooled, across: Linear, top: float) -> None:
    edges = np.linspace(across.low, across.high, BINS + 1)
    used = pool.over_time(line.result, edges)
    floor, makespan_s = top + STRIP, max(line.result.makespan_s, 1e-9)
    down = Linear(0.0, max(pool.total, float(used.max(initial=0.0))), floor, top)
    share = float(used.sum()) * float(edges[1] - edges[0]) / makespan_s / pool.total
    drawing.text(across.left - 10, top + 13, line.name, "strong", "end")
    drawing.text(across.left - 10, top + 30, f"{percent(share)} in use", "small faint", "end")
    drawing.line(across.left, floor, across.right, floor, "axis")
    drawing.line(across.left, down(pool.total), across.right, down(pool.total), "limit")
    points = [
        (across((a + b) / 2.0), down(value)) for (a, b), value in zip(itertools.pairwise(edges), used, strict=True)
    ]
    drawing.path([(across.left, floor), *points, (across.right, floor)], f"area {line.css}", close=True)
    drawing.path(points, f"curve {line.css}")
    end = across(max(row.ended_at for row in line.result.rows))
    drawing.line(end, top, end, floor, "limit")
    _strip_slices(drawing, line, pool, used, edges, across, (top, floor))


def _strip_slices(
    drawing: Drawing, line: Line, pool: Pooled, used: Floats, edges: Floats, across: Linear, at: tuple[float, float]
) -> None:
    """Coarser than the curve: a pointer cannot tell pixels apart."""
    every = max(1, BINS // SLICES)
    columns = [across(float(edge)) for edge in edges[::every]]
    tips = [
        f"{line.name} at {duration(round(float(edges[k * every])))}\n"
        f"{float(used[k * every : (k + 1) * every].mean()):.1f} of {number(pool.total)} {pool.unit} in use"
        for k in range(len(columns) - 1)
    ]
    drawing.slices(columns, at[0], at[1], tips)


# ---- timeline -------------------------------------------------------------------------------------------------


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time and some trajectories, the same for every policy that is shown."""

    start_s: float
    end_s: float
    trajectories: tuple[str, ...]


def window(base: Result) -> Window:
    """Where most is waiting under the base, and some of the trajectories that do anything then."""
    rows = base.rows
    until = max(row.ended_at for row in rows)
    wanted = WINDOW_ACTS * sum(row.act_s for row in rows) / len(rows)
    length = min(WINDOWS_S, key=lambda each: abs(math.log(each / max(wanted, 1e-3))))
    start = _busiest(rows, length, until)
    names = dict.fromkeys(row.trajectory for row in rows if row.ended_at > start and row.submitted_at < start + length)
    chosen = _spread(sorted(names, key=_in_order), TIMELINE_ROWS)
    return Window(start_s=start, end_s=start + length, trajectories=tuple(chosen))


def _busiest(rows: Sequence[ActionRow], length: float, until: float) -> float:
    """The start of the window with the most waiting, and, where nothing waits, with the most executing."""
    count = int(min(2000.0, max(1.0, 2.0 * until / length)))
    starts = np.linspace(0.0, max(0.0, until - length), count)
    begins = np.array([row.submitted_at for row in rows])
    for ends in (
        np.array([row.submitted_at + row.waiting_s for row in rows]),
        np.array([row.ended_at for row in rows]),
    ):
        upto = _upto(begins, ends, np.concatenate([starts, starts + length]))
        inside = upto[count:] - upto[:count]
        if inside.max(initial=0.0) > 0.0:
            step = min(length / 2.0, 10.0)
            return float(np.floor(starts[int(np.argmax(inside))] / step) * step)
    return 0.0


def _upto(begins: Floats, ends: Floats, at: Floats) -> Floats:
    """Seconds of all intervals before each time: sums over the begun minus sums over the ended."""
    begins, ends = np.sort(begins), np.sort(ends)
    total_begins = np.concatenate([[0.0], np.cumsum(begins)])
    total_ends = np.concatenate([[0.0], np.cumsum(ends)])
    begun, ended = np.searchsorted(begins, at, "right"), np.searchsorted(ends, at, "right")
    result: Floats = (begun * at - total_begins[begun]) - (ended * at - total_ends[ended])
    return result


def _in_order(name: str) -> tuple[str, int]:
    """`coding/9` before `coding/10`."""
    head, _, tail = name.rpartition("/")
    return (head, int(tail)) if tail.isdigit() else (name, 0)


def _spread(names: list[str], count: int) -> list[str]:
    """At most `count`, evenly over all."""
    if len(names) <= count:
        return names
    return [names[i * len(names) // count] for i in range(count)]


def timeline(line: Line, shown: Window, css_by_kind: dict[str, str]) -> str:
    """A row per trajectory, a bar per action: waiting pale, then overhead, then execution in full colour."""
    height, left, right, top = 17.0, 74.0, 512.0, 4.0
    bottom = top + height * len(shown.trajectories)
    drawing = Drawing(520, bottom + 24, f"Timeline of some trajectories under {line.name}")
    across = Linear(shown.start_s, shown.end_s, left, right)
    for tick in across.ticks(5):
        drawing.line(across(tick), top, across(tick), bottom, "gridline")
        drawing.text(across(tick), bottom + 17, duration(tick), "tick", "middle")
    row_by_name = {name: i for i, name in enumerate(shown.trajectories)}
    for name, i in row_by_name.items():
        y = top + height * i + height / 2.0
        drawing.line(left, y, right, y, "life")
        drawing.text(left - 8, y + 4, name if len(name) <= 12 else "…" + name[-11:], "small faint", "end")
    inside: dict[str, list[ActionRow]] = {name: [] for name in shown.trajectories}
    for row in line.result.rows:
        if row.trajectory in inside and row.ended_at > shown.start_s and row.submitted_at < shown.end_s:
            inside[row.trajectory].append(row)
    for name, rows in inside.items():
        for row, place, share in side_by_side(rows):
            y = top + height * row_by_name[name] + 2.0
            _bar(drawing, row, across, (y + 13.0 * place, 13.0 * share), css_by_kind.get(row.kind, "k6"))
    return drawing.render()


def side_by_side(rows: list[ActionRow]) -> Iterator[tuple[ActionRow, float, float]]:
    """Each action with where in the row it lies and how much of it it takes: actions of one turn share the row."""
    together: list[ActionRow] = []
    end = 0.0
    for row in [*sorted(rows, key=lambda row: row.submitted_at), None]:
        if row is None or (together and row.submitted_at >= end):
            yield from ((each, i / len(together), 1.0 / len(together)) for i, each in enumerate(together))
            together, end = [], 0.0
        if row is not None:
            together.append(row)
            end = max(end, row.ended_at)


def _bar(drawing: Drawing, row: ActionRow, across: Linear, at: tuple[float, float], css: str) -> None:
    begin = row.ended_at - row.execution_s
    granted = begin - row.overhead_s
    tip = (
        f"{row.kind} {row.key}\n{row.trajectory}, submitted at {row.submitted_at:.1f} s\n"
        f"waiting {seconds(row.waiting_s)}, executing {seconds(row.execution_s)}"
        + (f", overhead {seconds(row.overhead_s)}" if row.overhead_s >= 0.0005 else "")
        + (f"\nwidth {row.width:g}" if row.width > 1.0 else "")
        + (f"\n{row.status}" if row.status != "succeeded" else "")
    )
    parts = ((row.submitted_at, granted, "pale"), (granted, begin, "half"), (begin, row.ended_at, "fill"))
    for since, until, shade in parts:
        since, until = max(since, across.low), min(until, across.high)
        wide = across(until) - across(since)
        if until > since and (wide >= 0.3 or shade == "fill"):
            drawing.rect(across(since), at[0], max(1.0, wide), at[1], f"{shade} {css}", tip)


# ---- the curve of a plan --------------------------------------------------------------------------------------


def size_curve(
    points: Sequence[tuple[int, float, float, float]],
    *,
    chosen: int | None,
    target_s: float,
    reference: tuple[int, float, str],
    words: tuple[str, str],
) -> str:
    """ACT against size. `points`: size, the ACT aimed at, p99, use. `words`: the resource, the name of the ACT."""
    resource, aimed = words
    drawing = Drawing(1040, 380, f"{aimed} against {resource}")
    left, right, top, bottom = 62.0, 1020.0, 18.0, 326.0
    sizes = [size for size, _, _, _ in points] + [reference[0]]
    values = [value for _, value, _, _ in points] + [reference[1], target_s]
    across = Log(min(sizes) * 0.9, max(sizes) * 1.1, left, right)
    down = Log(min(values) * 0.85, max(values) * 1.2, bottom, top)
    for tick in down.ticks(6):
        drawing.line(left, down(tick), right, down(tick), "gridline")
        drawing.text(left - 8, down(tick) + 4, duration(tick), "tick", "end")
    drawing.line(left, bottom, right, bottom, "axis")
    for tick in dict.fromkeys(sizes):
        drawing.line(across(tick), bottom, across(tick), bottom + 4, "axis")
    for tick in _apart(sorted(set(sizes)), across, 26.0):
        drawing.text(across(tick), bottom + 18, number(tick), "tick", "middle")
    drawing.text(right, bottom + 40, f"{resource}, logarithmic", "faint", "end")
    drawing.line(left, down(target_s), right, down(target_s), "target")
    drawing.text(left + 6, down(target_s) - 7, f"target {seconds(target_s)}", "small")
    drawing.path([(across(size), down(value)) for size, value, _, _ in points], "curve p1")
    for size, value, p99, use in points:
        tip = f"{size} {resource}\n{aimed} {seconds(value)}, p99 {seconds(p99)}\n{percent(use)} in use"
        drawing.circle(across(size), down(value), 7 if size == chosen else 4, "fill p1", tip)
        if size == chosen:
            drawing.text(across(size), down(value) + 24, f"{size} {resource}", "strong", "middle")
    size, value, name = reference
    drawing.circle(across(size), down(value), 6, "fill p0", f"{name} on {size} {resource}\n{aimed} {seconds(value)}")
    drawing.text(across(size), down(value) - 12, f"{name} today", "tick", "end")
    return drawing.render()


def _apart(values: list[int], across: Log, pixels: float) -> list[int]:
    """Those whose labels do not touch."""
    found: list[int] = []
    for value in values:
        if not found or across(value) - across(found[-1]) >= pixels:
            found.append(value)
    return found
