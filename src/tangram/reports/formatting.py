"""Numbers, durations and sizes as text, the same in tables, reports, live screens and charts."""

from __future__ import annotations

from collections.abc import Iterable

from tangram.reports.statistics import Interval

MORE_DIGITS_MAX = 7
"""`seconds` shows three digits and at most these, ten in all: enough to distinguish any two values of a plan."""


# ---- durations --------------------------------------------------------------------------------------------------


def seconds(value: float | None, more: int = 0) -> str:
    """Three significant digits, and `more`: `12.3 ms`, `1.00 s`, `1,234 s`; a dash for None."""
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


def digits_to_distinguish(values: Iterable[float], target: float) -> int:
    """How many more digits `seconds` needs so that every value other than the target looks different from it."""
    others = [value for value in values if value != target]
    for more in range(MORE_DIGITS_MAX):
        if seconds(target, more) not in [seconds(value, more) for value in others]:
            return more
    return MORE_DIGITS_MAX


def duration(value: float) -> str:
    """The two largest units, rounded down: `3 d 4 h`, `5 min 2 s`."""
    seconds_whole = int(value)
    units = (
        (seconds_whole // 86400, "d"),
        (seconds_whole // 3600 % 24, "h"),
        (seconds_whole // 60 % 60, "min"),
        (seconds_whole % 60, "s"),
    )
    first = next((place for place, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])


def elapsed(value: float) -> str:
    """Three significant digits below 100 s, from there the two largest units."""
    return duration(value) if value >= 99.95 else seconds(value)


def tick_seconds(value: float) -> str:
    """A tick of a time axis: `20 ms`, `5 s`, `10 min`."""
    if value == 0.0:
        return "0"
    if value < 1.0:
        return f"{value * 1000.0:.4g} ms"
    if value >= 7200.0 and value % 3600.0 == 0.0:
        return f"{value / 3600.0:,.0f} h"
    if value >= 60.0 and value % 60.0 == 0.0:
        return f"{value / 60.0:,.0f} min"
    return f"{tick_number(value)} s"


# ---- numbers ----------------------------------------------------------------------------------------------------


def tick_number(value: float) -> str:
    """A tick of an axis: no more digits than it needs."""
    if abs(value) >= 1000.0:
        return f"{value:,.0f}"
    return f"{value:.6g}"


def number(value: float | None, digits: int = 4) -> str:
    """This many significant digits; a dash for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.1f} %"


def ratio_text(interval: Interval | None) -> str:
    """A ratio, with its confidence interval if there is one: `2.31× [2.10, 2.54]`."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.2f}×"
    return f"{interval.mean:.2f}× [{interval.low:.2f}, {interval.high:.2f}]"


def spread_text(low: float | None, high: float | None) -> str:
    """The 95 % interval of a mean over seeds; `one seed` if there is none."""
    return "one seed" if low is None or high is None else f"95 % interval {low:.2f} to {high:.2f}"


def out_of(done: float, total: float) -> str:
    """`16 of 32`, and `15.5 of 32` for a mean."""
    return f"{done:,.{0 if done == int(done) else 1}f} of {total:,.0f}"


def pluralize(count: int, singular: str, plural: str = "") -> str:
    """`1 seed`, `3 seeds`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def sooner_text(ratio: float) -> str:
    """How a time compares with one that is `ratio` times as long: `2.3 times sooner`."""
    return f"{ratio:.1f} times sooner" if ratio >= 1.0 else f"{1.0 / ratio:.1f} times later"
