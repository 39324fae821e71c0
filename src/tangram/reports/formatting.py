"""Words: how numbers are written for people, the same in tables, reports and answers."""

from __future__ import annotations

from collections.abc import Iterable

from tangram.reports.statistics import Interval

MORE_DIGITS_MAX = 7
"""Ten digits in all tell apart whatever a plan tells apart."""


def seconds(value: float | None, more: int = 0) -> str:
    """Three digits that matter, and `more`; a dash for what is not known."""
    if value is None:
        return "-"
    if value >= 99.95:
        return f"{value:,.{more}f} s"
    if value >= 9.995:
        return f"{value:.{1 + more}f} s"
    if value >= 0.9995:
        return f"{value:.{2 + more}f} s"
    if value >= 0.09995:
        return f"{value * 1000.0:.{more}f} ms"
    return f"{value * 1000.0:.{1 + more}f} ms" if value else "0 s"


def digits_apart(values: Iterable[float], target: float) -> int:
    """How many more digits `seconds` needs for every value that is not the target to look different from it."""
    others = [value for value in values if value != target]
    for more in range(MORE_DIGITS_MAX):
        if seconds(target, more) not in [seconds(value, more) for value in others]:
            return more
    return MORE_DIGITS_MAX


def times(interval: Interval | None) -> str:
    """A ratio with its interval, where there is one."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.2f}×"
    return f"{interval.mean:.2f}× [{interval.low:.2f}, {interval.high:.2f}]"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.1f} %"


def out_of(done: float, total: float) -> str:
    """`16 of 32`, and `15.5 of 32` for a mean."""
    return f"{done:,.{0 if done == int(done) else 1}f} of {total:,.0f}"


def several(count: int, singular: str, plural: str = "") -> str:
    """`1 seed`, `3 seeds`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
