"""Svg: scales, ticks and marks; the small part of a plotting library that the reports need.

Owns how numbers become positions and positions become SVG text. Colours are classes that the page's style sheet
defines, for light and dark. Promises that every string from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400, 604_800)
"""Between the ticks of a time axis."""


class Linear:
    """A straight scale from `low`..`high` to `left`..`right` in pixels; its ticks are for times."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self.low, self.high = low, high if high > low else low + 1.0
        self.left, self.right = left, right

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.left + (self.right - self.left) * share

    def ticks(self, about: int = 6) -> list[float]:
        """Round times in seconds, about that many: steps of 15 s or 5 min, never of 200 s."""
        rough = (self.high - self.low) / max(1, about)
        step = float(next((step for step in TIME_STEPS_S if step >= rough), TIME_STEPS_S[-1]))
        if rough < TIME_STEPS_S[0]:
            step = nice_step(rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(k * step, 10) for k in range(first, last + 1)]


class Log:
    """A logarithmic scale; values outside are drawn at its ends."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self.low, self.high = low, high if high > low else low * 10.0
        self.left, self.right = left, right

    def __call__(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.left + (self.right - self.left) * share

    def at(self, pixel: float) -> float:
        share = (pixel - self.left) / (self.right - self.left)
        return self.low * (self.high / self.low) ** share

    def ticks(self, about: int = 6) -> list[float]:
        """Powers of ten; with 2 and 5 between them where there is room."""
        decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        found = [10.0**k for k in decades]
        if len(found) < about / 2:
            wider = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**k for k in wider for digit in (1.0, 2.0, 5.0)]
        return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]


def nice_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, ... at or above `rough`."""
    if rough <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1.0, 2.0, 5.0, 10.0) if digit * power >= rough * (1.0 - 1e-9))


def number(value: float) -> str:
    """For an axis: no more digits than it needs."""
    if abs(value) >= 1000.0:
        return f"{value:,.0f}"
    return f"{value:.6g}"


def duration(seconds: float) -> str:
    """For an axis of times: 20 ms, 5 s, 10 min."""
    if seconds == 0.0:
        return "0"
    if seconds < 1.0:
        return f"{seconds * 1000.0:.4g} ms"
    if seconds >= 7200.0 and seconds % 3600.0 == 0.0:
        return f"{seconds / 3600.0:,.0f} h"
    if seconds >= 60.0 and seconds % 60.0 == 0.0:
        return f"{seconds / 60.0:,.0f} min"
    return f"{number(seconds)} s"


class Drawing:
    """One `<svg>` in the making."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label = label
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self._parts.append(f'<line class="{css}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"/>')

    def rect(self, x: float, y: float, width: float, height: float, css: str, tip: str = "") -> None:
        told = f' data-tip="{escape(tip)}"' if tip else ""
        place = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
        self._parts.append(f'<rect class="{css}" {place}{told}/>')

    def circle(self, x: float, y: float, radius: float, css: str, tip: str = "") -> None:
        told = f' data-tip="{escape(tip)}"' if tip else ""
        self._parts.append(f'<circle class="{css}" cx="{_px(x)}" cy="{_px(y)}" r="{_px(radius)}"{told}/>')

    def path(self, points: Iterable[tuple[float, float]], css: str, close: bool = False) -> None:
        steps = " ".join(f"{'L' if i else 'M'}{_px(x)} {_px(y)}" for i, (x, y) in enumerate(points))
        self._parts.append(f'<path class="{css}" d="{steps}{" Z" if close else ""}"/>')

    def text(self, x: float, y: float, words: str, css: str = "tick", anchor: str = "start") -> None:
        self._parts.append(
            f'<text class="{css}" x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def slices(self, edges: Sequence[float], top: float, bottom: float, tips: Sequence[str]) -> None:
        """Invisible columns that say what is drawn in them, and show a line, when the pointer is over one."""
        for left, right, tip in zip(edges, edges[1:], tips, strict=False):
            middle = (left + right) / 2.0
            self._parts.append(
                f'<g class="slice"><rect x="{_px(left)}" y="{_px(top)}" width="{_px(right - left)}"'
                f' height="{_px(bottom - top)}" data-tip="{escape(tip)}"/>'
                f'<line x1="{_px(middle)}" x2="{_px(middle)}" y1="{_px(top)}" y2="{_px(bottom)}"/></g>'
            )

    def render(self) -> str:
        return (
            f'<svg viewBox="0 0 {_px(self.width)} {_px(self.height)}" role="img" aria-label="{escape(self._label)}">'
            f"{''.join(self._parts)}</svg>"
        )


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
