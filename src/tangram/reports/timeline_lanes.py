"""Lanes: a figure with a row for each of thousands of names, bars over time, to zoom into; strips above summarise them.

Owns the data that `static/lanes.js` draws. The page that contains it names the widget "lanes". Text goes to a canvas or
a tooltip, never into markup.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tangram.reports.page import script_data


class LaneKind(msgspec.Struct, frozen=True):
    """What a bar means."""

    label: str
    colour: str
    """A name of the palette."""
    pale: bool = False


class LaneBar(NamedTuple):
    since_s: float
    until_s: float
    kind: int
    """The number of its `LaneKind`."""
    note: str = ""


class TimelineLane(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    details: str
    failed: bool = False
    bars: list[LaneBar]


class LaneStrip(msgspec.Struct, frozen=True, kw_only=True):
    """A row above all lanes, filled except in its gaps."""

    name: str
    colour: str
    gaps: list[tuple[float, float, list[tuple[int, float]]]]
    """(since, until, shares of the kinds that explain the gap)."""
    causes: list[tuple[float, float, int]]
    """(since, until, the kind that explains most), which colours the gaps."""


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    total: float
    """Seconds."""
    strips: list[LaneStrip]
    lanes: list[TimelineLane]
    kinds: list[LaneKind]


def lanes_figure(content: Lanes, label: str) -> str:
    """The figure, its buttons and its data. A page can have one."""
    return (
        f'<figure id="lanes" tabindex="0" aria-label="{label}">'
        '<div class="tools"><button data-zoom="2">+</button><button data-zoom="0.5">−</button>'
        '<button data-zoom="0">all</button><span id="lanes-range"></span></div>'
        '<div id="scroller"><div id="tall"><canvas></canvas></div></div></figure>' + script_data("lanes-data", content)
    )
