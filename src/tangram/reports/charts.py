"""Charts: distributions, bars, strips over time, Gantt charts and curves as SVG, each a function from values to markup.

Owns how a chart looks and how much of it is drawn: long curves are reduced to what a screen can distinguish. Never
decides what is shown; callers bring names, values, colours (classes of `reports/theme.py`) and tooltips.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tangram.reports.formatting import percent, seconds, tick_number, tick_seconds
from tangram.reports.svg import Drawing, LinearScale, LogScale, Scale

Floats = npt.NDArray[np.float64]

WIDTH = 1040.0
LABEL_DISTANCE = 16.0
"""Pixels between the labels of neighbouring lines."""
"""Pixels of a chart as wide as the page."""
CURVE_POINTS = 200
HOVER_COLUMNS = 60
"""Columns of a chart that have a tooltip: a pointer cannot distinguish single pixels."""
STRIP_BINS = 180
"""Points of a curve over time."""


# ---- distributions ----------------------------------------------------------------------------------------------


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Completion times of one side of a comparison."""

    name: str
    css: str
    values: Floats
    """Seconds, sorted."""

    def share_within(self, at_s: float) -> float:
        return 100.0 * float(np.searchsorted(self.values, at_s, side="right")) / max(1, len(self.values))


PANEL_LEFT, PANEL_RIGHT, PANEL_TOP, PANEL_BOTTOM = 46.0, 508.0, 8.0, 268.0
"""The plot area of one of two charts side by side, in pixels."""


def distribution(samples: Sequence[Sample], axis: str) -> str:
    """The share of values within a time, which has a logarithmic scale."""
    across = _panel_time_axis(samples, min(float(np.percentile(each.values, 1)) for each in samples))
    down = LinearScale(0.0, 100.0, PANEL_BOTTOM, PANEL_TOP)
    drawing = _panel("Share of actions done within a time", axis, across, down, [0.0, 25.0, 50.0, 75.0, 100.0])
    _share_curves(drawing, samples, across, down, Sample.share_within, "done within")
    return drawing.render()


def slow_tail(samples: Sequence[Sample], axis: str) -> str:
    """The share of values longer than a time, both logarithmic: what the mean and the p99 are made of."""
    across = _panel_time_axis(samples, min(float(np.percentile(each.values, 50)) for each in samples))
    least = 100.0 / max(len(each.values) for each in samples)
    down = LogScale(max(least, 0.01), 100.0, PANEL_BOTTOM, PANEL_TOP)
    drawing = _panel("Share of actions that take longer than a time", axis, across, down, down.ticks(5))
    _share_curves(drawing, samples, across, down, lambda each, at: 100.0 - each.share_within(at), "longer than")
    return drawing.render()


def _panel_time_axis(samples: Sequence[Sample], low: float) -> LogScale:
    return LogScale(max(1e-3, low), max(float(each.values[-1]) for each in samples), PANEL_LEFT, PANEL_RIGHT)


def _panel(label: str, axis: str, across: LogScale, down: Scale, ticks: Sequence[float]) -> Drawing:
    drawing = Drawing(520, 312, label)
    drawing.y_axis(down, ticks, PANEL_LEFT, PANEL_RIGHT, lambda tick: f"{tick_number(tick)} %")
    drawing.x_axis(across, across.ticks(5), PANEL_TOP, PANEL_BOTTOM)
    drawing.line(PANEL_LEFT, PANEL_BOTTOM, PANEL_RIGHT, PANEL_BOTTOM, "axis")
    drawing.text(PANEL_RIGHT, PANEL_BOTTOM + 36, axis, "small faint", "end")
    return drawing


def _share_curves(
    drawing: Drawing,
    samples: Sequence[Sample],
    across: LogScale,
    down: Scale,
    share: Callable[[Sample, float], float],
    words: str,
) -> None:
    """A curve for each sample, which ends where it leaves the scale, and the values of all in tooltips."""
    places = [across.value_at(x) for x in np.linspace(across.left, across.right, CURVE_POINTS + 1)]
    for each in samples:
        shares = [(at, share(each, at)) for at in places]
        drawing.path([(across(at), down(value)) for at, value in shares if value >= down.low], f"curve {each.css}")
    edges = [float(x) for x in np.linspace(across.left, across.right, HOVER_COLUMNS + 1)]
    tips = []
    for a, b in itertools.pairwise(edges):
        at = across.value_at((a + b) / 2.0)
        tips.append("\n".join([f"{words} {seconds(at)}", *(f"{e.name}: {share(e, at):.3g} %" for e in samples)]))
    drawing.hover_columns(edges, PANEL_TOP, PANEL_BOTTOM, tips)


# ---- bars -------------------------------------------------------------------------------------------------------


class BarPart(msgspec.Struct, frozen=True, kw_only=True):
    value: float
    css: str
    tip: str = ""
    label: str = ""
    """Text inside the part, shown if there is room."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a bar chart: parts one after the other."""

    name: str
    parts: tuple[BarPart, ...]
    label: str = ""
    """Text after the bar."""
    mark: float | None = None
    """A value that gets a line across the bar."""


LABEL_ROOM = 52.0
"""Pixels that a label inside a part needs."""


def bar_chart(
    bars: Sequence[Bar],
    label: str,
    *,
    width: float = 330.0,
    left: float = 66.0,
    right: float = 250.0,
    row: float = 26.0,
    high: float = 17.0,
    name_css: str = "small",
) -> str:
    """Horizontal bars on one scale, which begins at 0."""
    drawing = Drawing(width, row * len(bars) + 4, label)
    longest = max((max(sum(part.value for part in bar.parts), bar.mark or 0.0) for bar in bars), default=1.0)
    across = LinearScale(0.0, longest or 1.0, left, right)
    for i, bar in enumerate(bars):
        top, at, middle = row * i + 4.0, left, row * i + 4.0 + high / 2.0 + 4.0
        drawing.text(left - 8, middle, bar.name, name_css, "end")
        for part in bar.parts:
            wide = across(part.value) - left
            if wide >= 0.2:
                drawing.rect(at, top, wide, high, part.css, part.tip)
            if part.label and wide > LABEL_ROOM:
                drawing.text(at + wide / 2.0, middle, part.label, "small strong", "middle")
            at += wide
        if bar.mark is not None:
            drawing.line(across(bar.mark), top - 2.0, across(bar.mark), top + high + 2.0, "axis")
        if bar.label:
            drawing.text(max(at + 6, right + 8 if bar.mark is not None else 0.0), middle, bar.label, "small strong")
    return drawing.render()


# ---- strips over time -------------------------------------------------------------------------------------------


class Strip(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a pool one side of a comparison used over time."""

    name: str
    css: str
    used: Floats
    """Means of equal stretches of the time axis."""
    total: float
    share: float
    """The mean use until the end."""
    ended_s: float


STRIP_HIGH, STRIP_GAP = 78.0, 14.0


def strip_edges(since: float, until: float) -> Floats:
    """The edges of the stretches of a strip."""
    return np.linspace(since, until, STRIP_BINS + 1)


def strips(items: Sequence[Strip], label: str, unit: str, since: float, until: float) -> str:
    """A strip for each side on the same axes; dashed lines mark all of the pool and the end of the side."""
    top, right, height = 6.0, 1030.0, STRIP_HIGH + STRIP_GAP
    left = max(90.0, 18.0 + 7.6 * max(len(strip.name) for strip in items))
    drawing = Drawing(WIDTH, top + len(items) * height + 22, label)
    across = LinearScale(since, until, left, right)
    for i, strip in enumerate(items):
        _strip(drawing, strip, unit, across, top + i * height)
    bottom = top + len(items) * height - STRIP_GAP
    for tick in across.ticks(8):
        drawing.x_tick(across(tick), bottom, tick_seconds(tick))
    return drawing.render()


def _strip(drawing: Drawing, strip: Strip, unit: str, across: LinearScale, top: float) -> None:
    edges = strip_edges(across.low, across.high)
    floor = top + STRIP_HIGH
    down = LinearScale(0.0, max(strip.total, float(strip.used.max(initial=0.0))), floor, top)
    drawing.text(across.left - 10, top + 13, strip.name, "strong", "end")
    drawing.text(across.left - 10, top + 30, f"{percent(strip.share)} in use", "small faint", "end")
    drawing.line(across.left, floor, across.right, floor, "axis")
    drawing.line(across.left, down(strip.total), across.right, down(strip.total), "limit")
    middles = (edges[:-1] + edges[1:]) / 2.0
    points = [(across(float(at)), down(float(value))) for at, value in zip(middles, strip.used, strict=True)]
    drawing.path([(across.left, floor), *points, (across.right, floor)], f"area {strip.css}", close=True)
    drawing.path(points, f"curve {strip.css}")
    drawing.line(across(strip.ended_s), top, across(strip.ended_s), floor, "limit")
    every = max(1, STRIP_BINS // HOVER_COLUMNS)
    starts = [float(edge) for edge in edges[::every]]
    tips = [
        f"{strip.name} at {tick_seconds(round(start))}\n"
        f"{float(strip.used[k * every : (k + 1) * every].mean()):.1f} of {tick_number(strip.total)} {unit} in use"
        for k, start in enumerate(starts[:-1])
    ]
    drawing.hover_columns([across(start) for start in starts], top, floor, tips)


# ---- Gantt charts -----------------------------------------------------------------------------------------------


class GanttBar(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in a row."""

    since: float
    until: float
    css: str
    tip: str = ""
    place: float = 0.0
    """Where in the height of the row it begins, from 0 to 1."""
    share: float = 1.0
    """Its share of the height: bars of the same time share their row."""
    skip_if_tiny: bool = False
    """Not drawn below a third of a pixel; other bars are drawn at least one pixel wide."""


class GanttRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    bars: tuple[GanttBar, ...]
    note: str = ""
    """Text after the last bar."""
    gap_before: float = 0.0
    """Pixels."""


def gantt(
    rows: Sequence[GanttRow],
    label: str,
    since: float,
    until: float,
    *,
    width: float = WIDTH,
    left: float = 90.0,
    right: float = 1000.0,
    row: float = 17.0,
    ticks: int = 10,
    guides: bool = False,
    ended_s: float | None = None,
) -> str:
    """A row for each name, bars over time. `guides` draws a line through each row, `ended_s` one across all."""
    top, margin = 4.0, max(1.5, row / 10.0)
    bottom = top + sum(each.gap_before + row for each in rows)
    drawing = Drawing(width, bottom + 24.0, label)
    across = LinearScale(since, until, left, right)
    drawing.x_axis(across, across.ticks(ticks), top, bottom)
    y = top
    for each in rows:
        y += each.gap_before
        if guides:
            drawing.line(left, y + row / 2.0, right, y + row / 2.0, "life")
        drawing.text(left - 8.0, y + row / 2.0 + 4.0, each.name, "small faint", "end")
        for bar in each.bars:
            _gantt_bar(drawing, bar, across, y + margin, row - 2.0 * margin)
        if each.note:
            end = max((bar.until for bar in each.bars), default=since)
            drawing.text(across(end) + 5.0, y + row / 2.0 + 4.0, each.note, "small faint")
        y += row
    if ended_s is not None:
        drawing.line(across(ended_s), top, across(ended_s), bottom, "limit")
    return drawing.render()


def _gantt_bar(drawing: Drawing, bar: GanttBar, across: LinearScale, top: float, high: float) -> None:
    since, until = max(bar.since, across.low), min(bar.until, across.high)
    wide = across(until) - across(since)
    if until > since and (wide >= 0.3 or not bar.skip_if_tiny):
        drawing.rect(across(since), top + high * bar.place, max(1.0, wide), high * bar.share, bar.css, bar.tip)


# ---- curves -----------------------------------------------------------------------------------------------------


class LineSeries(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    css: str
    points: tuple[tuple[float, float], ...]
    errors: tuple[float, ...] = ()
    """Half the width of the band around each point; empty: no band."""


def line_chart(lines: Sequence[LineSeries], label: str) -> str:
    """Values from 0 to 1 over x, such as rewards; the name of each line is at its end."""
    drawing = Drawing(520, 268, label)
    draw_lines(drawing, lines, (44.0, 400.0, 14.0, 232.0))
    return drawing.render()


def draw_lines(
    drawing: Drawing,
    lines: Sequence[LineSeries],
    area: tuple[float, float, float, float],
    x_text: Callable[[float], str] = tick_number,
    *,
    x_ticks: Sequence[float] = (),
) -> None:
    """Draw `lines` into an area (left, right, top, bottom) of a drawing."""
    left, right, top, bottom = area
    most = max((x for line in lines for x, _ in line.points), default=1.0) or 1.0
    across, up = LinearScale(0.0, most, left, right), LinearScale(0.0, 1.0, bottom, top)
    drawing.y_axis(up, (0.0, 0.25, 0.5, 0.75, 1.0), left, right, lambda tick: f"{tick:g}")
    for tick in x_ticks or across.number_ticks():
        drawing.x_tick(across(tick), bottom, x_text(tick))
    drawing.line(left, bottom, right, bottom, "axis")
    ordered = sorted((line for line in lines if line.points), key=lambda line: -line.points[-1][1])
    ends = spread_apart([up(line.points[-1][1]) for line in ordered])
    for line, end in zip(ordered, ends, strict=True):
        if line.errors:
            around = list(zip(line.points, line.errors, strict=True))
            band = [(across(x), up(min(1.0, y + error))) for (x, y), error in around]
            band += [(across(x), up(max(0.0, y - error))) for (x, y), error in reversed(around)]
            drawing.path(band, f"band {line.css}", close=True)
        drawing.path([(across(x), up(y)) for x, y in line.points], f"curve {line.css}")
        drawing.text(right + 8.0, end + 4.0, f"{line.name} {line.points[-1][1]:.2f}", f"name {line.css}")


def spread_apart(places: Sequence[float]) -> list[float]:
    """Move ascending positions down until each is at least LABEL_DISTANCE from the one before."""
    result: list[float] = []
    for place in places:
        result.append(max(place, result[-1] + LABEL_DISTANCE) if result else place)
    return result


class SizePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A size that was tried, and what came of it."""

    size: int
    value_s: float
    tip: str


def size_curve(
    points: Sequence[SizePoint],
    reference: SizePoint,
    *,
    chosen: int | None,
    target_s: float,
    reference_name: str,
    resource: str,
    label: str,
) -> str:
    """A time against the size of a pool, both logarithmic; the chosen size is marked, the target is a dashed line."""
    drawing = Drawing(WIDTH, 380, label)
    left, right, top, bottom = 62.0, 1020.0, 18.0, 326.0
    sizes = [point.size for point in (*points, reference)]
    values = [*(point.value_s for point in (*points, reference)), target_s]
    across = LogScale(min(sizes) * 0.9, max(sizes) * 1.1, left, right)
    down = LogScale(min(values) * 0.85, max(values) * 1.2, bottom, top)
    drawing.y_axis(down, down.ticks(6), left, right, tick_seconds)
    drawing.line(left, bottom, right, bottom, "axis")
    for size in dict.fromkeys(sizes):
        drawing.line(across(size), bottom, across(size), bottom + 4, "axis")
    for size in _non_overlapping(sorted(set(sizes)), across, 26.0):
        drawing.x_tick(across(size), bottom, tick_number(size))
    drawing.text(right, bottom + 40, f"{resource}, logarithmic", "faint", "end")
    drawing.line(left, down(target_s), right, down(target_s), "target")
    drawing.text(left + 6, down(target_s) - 7, f"target {seconds(target_s)}", "small")
    drawing.path([(across(point.size), down(point.value_s)) for point in points], "curve p1")
    for point in points:
        x, y = across(point.size), down(point.value_s)
        drawing.circle(x, y, 7 if point.size == chosen else 4, "fill p1", point.tip)
        if point.size == chosen:
            drawing.text(x, y + 24, f"{point.size} {resource}", "strong", "middle")
    x, y = across(reference.size), down(reference.value_s)
    drawing.circle(x, y, 6, "fill p0", reference.tip)
    drawing.text(x, y - 12, reference_name, "tick", "end")
    return drawing.render()


def _non_overlapping(values: Sequence[int], across: LogScale, pixels: float) -> list[int]:
    """The values whose labels do not touch."""
    result: list[int] = []
    for value in values:
        if not result or across(value) - across(result[-1]) >= pixels:
            result.append(value)
    return result
