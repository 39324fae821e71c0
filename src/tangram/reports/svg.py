"""SVG: scales, axes and marks, the small part of a plotting library that reports need.

Owns how numbers become positions and positions become SVG text. Colours are CSS classes of `reports/theme.py`.
Promises that every string from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from tangram.reports.formatting import tick_seconds
from tangram.reports.theme import theme_css

TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400, 604_800)
"""Distances between the ticks of a time axis."""

PICTURE_STYLE = """
svg { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.background { fill: var(--card); stroke: var(--rule); }
text.title { font-size: 15px; font-weight: 650; fill: var(--ink); }
"""
"""The style that a picture of its own needs in addition to the theme."""


class LinearScale:
    """A linear scale from `low`..`high` to `left`..`right` in pixels; its ticks are for times."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self.low, self.high = low, high if high > low else low + 1.0
        self.left, self.right = left, right

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.left + (self.right - self.left) * share

    def ticks(self, about: int = 6) -> list[float]:
        """Round times in seconds, about this many: steps of 15 s or 5 min, never of 200 s."""
        rough = (self.high - self.low) / max(1, about)
        step = float(next((step for step in TIME_STEPS_S if step >= rough), TIME_STEPS_S[-1]))
        if rough < TIME_STEPS_S[0]:
            step = nice_step(rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(k * step, 10) for k in range(first, last + 1)]

    def number_ticks(self) -> list[float]:
        """Round numbers, about five: steps of 1, 2 or 5 times a power of ten."""
        step = nice_step((self.high - self.low) / 5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(k * step, 10) for k in range(first, last + 1)]


class LogScale:
    """A logarithmic scale; values outside of it are placed at its ends."""

    def __init__(self, low: float, high: float, left: float, right: float) -> None:
        self.low, self.high = low, high if high > low else low * 10.0
        self.left, self.right = left, right

    def __call__(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.left + (self.right - self.left) * share

    def value_at(self, pixel: float) -> float:
        share = (pixel - self.left) / (self.right - self.left)
        return self.low * (self.high / self.low) ** share

    def ticks(self, about: int = 6) -> list[float]:
        """Powers of ten, with 2 and 5 between them where there is room."""
        decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        values = [10.0**k for k in decades]
        if len(values) < about / 2:
            wider = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [digit * 10.0**k for k in wider for digit in (1.0, 2.0, 5.0)]
        return [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]


Scale = LinearScale | LogScale


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that is at least `rough`."""
    if rough <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1.0, 2.0, 5.0, 10.0) if digit * power >= rough * (1.0 - 1e-9))


class Drawing:
    """Collects the marks of one `<svg>`; they are painted in the order in which they are added."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label = label
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self._parts.append(f'<line class="{css}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"/>')

    def rect(self, x: float, y: float, width: float, height: float, css: str, tip: str = "") -> None:
        hover = f' data-tip="{escape(tip)}"' if tip else ""
        place = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
        self._parts.append(f'<rect class="{css}" {place}{hover}/>')

    def circle(self, x: float, y: float, radius: float, css: str, tip: str = "") -> None:
        hover = f' data-tip="{escape(tip)}"' if tip else ""
        self._parts.append(f'<circle class="{css}" cx="{_px(x)}" cy="{_px(y)}" r="{_px(radius)}"{hover}/>')

    def path(self, points: Iterable[tuple[float, float]], css: str, close: bool = False) -> None:
        steps = " ".join(f"{'L' if i else 'M'}{_px(x)} {_px(y)}" for i, (x, y) in enumerate(points))
        self._parts.append(f'<path class="{css}" d="{steps}{" Z" if close else ""}"/>')

    def text(self, x: float, y: float, words: str, css: str = "tick", anchor: str = "start") -> None:
        self._parts.append(
            f'<text class="{css}" x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def hover_columns(self, edges: Sequence[float], top: float, bottom: float, tips: Sequence[str]) -> None:
        """Invisible columns between neighbouring edges; the one under the pointer shows a line and its tooltip."""
        for left, right, tip in zip(edges, edges[1:], tips, strict=False):
            middle = (left + right) / 2.0
            self._parts.append(
                f'<g class="slice"><rect x="{_px(left)}" y="{_px(top)}" width="{_px(right - left)}"'
                f' height="{_px(bottom - top)}" data-tip="{escape(tip)}"/>'
                f'<line x1="{_px(middle)}" x2="{_px(middle)}" y1="{_px(top)}" y2="{_px(bottom)}"/></g>'
            )

    # ---- axes ----

    def x_axis(
        self,
        scale: Scale,
        ticks: Iterable[float],
        top: float,
        bottom: float,
        text: Callable[[float], str] = tick_seconds,
    ) -> None:
        """Vertical grid lines from `top` to `bottom`, and the text of each tick below them."""
        for tick in ticks:
            self.line(scale(tick), top, scale(tick), bottom, "gridline")
            self.x_tick(scale(tick), bottom, text(tick))

    def x_tick(self, x: float, bottom: float, text: str) -> None:
        """The text of a tick without a grid line."""
        self.text(x, bottom + 17.0, text, "tick", "middle")

    def y_axis(
        self, scale: Scale, ticks: Iterable[float], left: float, right: float, text: Callable[[float], str]
    ) -> None:
        """Horizontal grid lines from `left` to `right`, and the text of each tick left of them."""
        for tick in ticks:
            self.line(left, scale(tick), right, scale(tick), "gridline")
            self.text(left - 8, scale(tick) + 4, text(tick), "tick", "end")

    def render(self) -> str:
        return (
            f'<svg viewBox="0 0 {_px(self.width)} {_px(self.height)}" role="img" aria-label="{escape(self._label)}">'
            f"{''.join(self._parts)}</svg>"
        )

    def standalone(self) -> str:
        """The drawing as a file of its own, with its style and background."""
        background = (
            f'<rect class="background" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"/>'
        )
        opening, _, rest = self.render().partition(">")
        size = f'xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}"'
        opening = opening.replace("<svg", f"<svg {size}", 1)
        marks = rest.replace("/><", "/>\n<")
        return f"{opening}>\n<style>{theme_css()}{PICTURE_STYLE}</style>\n{background}\n{marks}\n"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
