"""Theme: the colours of every page and picture, for light and dark.

A mark names its colour by a CSS class: `p0` to `p6` for compared sides (policies, runs), `k0` to `k6` for kinds
(actions, stages, models). `fill`, `half` and `pale` are the shades of an area, `curve` is a line.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

PALETTE = {
    "paper": ("#fbfbf9", "#14171c"),
    "card": ("#ffffff", "#1b1f26"),
    "ink": ("#1d2430", "#e8eaee"),
    "soft": ("#5b6472", "#a7afbc"),
    "faint": ("#8b93a1", "#7d8694"),
    "rule": ("#e4e5e1", "#2d333d"),
    "grid": ("#ecede9", "#262b34"),
    "good": ("#0b7a67", "#4fd0b8"),
    "bad": ("#b3412f", "#f0897a"),
    "band": ("#f3f4f0", "#20252d"),
    "p0": ("#8a919e", "#949cab"),
    "p1": ("#0b9683", "#38c7b2"),
    "p2": ("#c7852a", "#e5ac57"),
    "p3": ("#6366cf", "#9496f2"),
    "p4": ("#c9496a", "#ef7f9b"),
    "p5": ("#3d8fd1", "#6fb6ee"),
    "p6": ("#7a8f2e", "#a9c255"),
    "k0": ("#3f74a8", "#6ea4d8"),
    "k1": ("#dd8a2f", "#f0ab5c"),
    "k2": ("#4f9e63", "#78c48a"),
    "k3": ("#9a6cab", "#c39ad2"),
    "k4": ("#cf5a55", "#ec8580"),
    "k5": ("#3aa3a0", "#62cbc8"),
    "k6": ("#8d7b5b", "#b9a684"),
}
"""Light and dark of each colour. Paper and ink change together, so that text is readable on both."""

SERIES = tuple(name for name in PALETTE if name[0] in "pk" and name[1:].isdigit())


@cache
def static(name: str) -> str:
    """The text of a file of `reports/static`."""
    return (files("tangram.reports") / "static" / name).read_text(encoding="utf-8")


@cache
def theme_css() -> str:
    """The palette as CSS variables, and the classes of colours and marks."""

    def variables(side: int) -> str:
        return " ".join(f"--{name}: {shades[side]};" for name, shades in PALETTE.items())

    colours = " ".join(f".{name} {{ --colour: var(--{name}); }}" for name in SERIES)
    return (
        f":root {{ color-scheme: light dark; {variables(0)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(1)} }} }}\n"
        f"{colours}\n{static('marks.css')}"
    )
