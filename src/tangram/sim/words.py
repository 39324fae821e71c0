"""Words: how numbers are written for people, the same in tables, reports and answers."""

from __future__ import annotations

from tangram.sim.statistics import Interval


def seconds(value: float) -> str:
    """Three digits that matter."""
    if value >= 99.95:
        return f"{value:,.0f} s"
    if value >= 9.995:
        return f"{value:.1f} s"
    if value >= 0.9995:
        return f"{value:.2f} s"
    if value >= 0.09995:
        return f"{value * 1000.0:.0f} ms"
    return f"{value * 1000.0:.1f} ms" if value else "0 s"


def times(interval: Interval | None) -> str:
    """A ratio with its interval, where there is one."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.2f}×"
    return f"{interval.mean:.2f}× [{interval.low:.2f}, {interval.high:.2f}]"


def percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def several(count: int, singular: str, plural: str = "") -> str:
    """`1 seed`, `3 seeds`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
