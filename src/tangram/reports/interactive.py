"""Interactive charts: curves, stacks and histograms that a script draws along the axis that the reader selects.

Owns the data that `static/charts.js` draws. The page that contains them names the widget "charts". Names are text in
the data and text in the browser, never markup. Each chart can be read as a table.

    data = InteractiveCharts(axes={"step": "step", "seconds": "wall seconds"}, ...)
    id = data.add("reward", {"label": "Reward", "series": [series("training", "p1", values)]})
    parts = [axis_choice(data.axes), chart_figure(chart_id, "Reward"), data.render()]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from tangram.reports.page import script_data
from tangram.reports.printable import truncate

NAME_MAX = 120
"""Characters of a name."""
DIGITS = 5
"""Significant digits of a value; more cannot be seen."""


class InteractiveCharts:
    """The charts of a page and the sets of points that they share.

    Args:
        axes: the axes that the reader can select, by key, with their names.
        units: the unit of an axis; one without a unit counts whole things.
        point_sets: by name, for each axis the x of every point, and their `labels`. The first set is the one of bars
            and has `from`, where each bar begins on each axis.
        shade: a stretch to shade: its `label`, and its `span` on each axis.
        marks: events to flag: x on each axis, and `words`.
    """

    def __init__(
        self,
        *,
        axes: Mapping[str, str],
        units: Mapping[str, str],
        point_sets: Mapping[str, Any],
        shade: Mapping[str, Any] | None,
        marks: list[dict[str, Any]],
    ) -> None:
        self._shared = {"axes": axes, "units": units, "xs": point_sets, "shade": shade, "marks": marks}
        self._charts: dict[str, dict[str, Any]] = {}

    def add(self, name: str, chart: dict[str, Any]) -> str:
        """Add a chart and return its id.

        A chart has a `label` and either `series`, optionally with `kind` "stack", `format` ("percent", "seconds"),
        `high` (the least upper end of the y axis), `tall` and `shaded`; or, with `kind` "bars", `names`, `values`,
        `shares`, `heads` and a `limit`.
        """
        chart_id = f"{name}-{len(self._charts)}"
        self._charts[chart_id] = chart
        return chart_id

    def render(self) -> str:
        return script_data("charts-data", {**self._shared, "charts": self._charts})


def chart_figure(chart_id: str, heading: str) -> str:
    """The place of a chart."""
    return f'<figure class="chart" data-chart="{escape(chart_id)}"><h3>{escape(heading)}</h3></figure>'


def axis_choice(axes: Mapping[str, str]) -> str:
    """The buttons that select the axis of all charts; the first is selected."""
    choices = "".join(
        f'<input type="radio" name="axis" id="axis-{name}" value="{name}"{"" if number else " checked"}>'
        f'<label for="axis-{name}">{escape(words)}</label>'
        for number, (name, words) in enumerate(axes.items())
    )
    return f'<fieldset class="axis-choice"><legend>Along</legend>{choices}</fieldset>'


def short_name(text: str) -> str:
    return truncate(text, NAME_MAX)


def series(name: str, css: str, values: Iterable[float | None], **more: Any) -> dict[str, Any]:
    """A curve, or a layer of a stack. `more`: `set`, `points`, `line`, `error`."""
    return {"name": short_name(name), "css": css, "y": rounded(values), **more}


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Values with the digits that can be seen; None instead of NaN and infinity."""
    return [round_to_digits(value) for value in values]


def round_to_digits(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    rounded = round(value)
    if abs(value) >= 10.0**DIGITS or value == rounded:
        return rounded
    return float(f"{value:.{DIGITS}g}")
