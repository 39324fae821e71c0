"""Statistics over seeds: means and ratios of paired numbers, with confidence intervals.

Both sides of a comparison run the same work under a seed, so ratios are taken seed by seed and averaged as
logarithms: 2x and 0.5x cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788)
"""Two-sided 95 % quantiles of Student's t for 1 to 12 degrees of freedom."""
Z95 = 1.959964
"""The same quantile of the normal distribution."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over seeds and its 95 % confidence interval, which needs at least two."""

    mean: float
    low: float | None = None
    high: float | None = None


def student_t95(degrees: int) -> float:
    """The quantile to four digits: from the table, beyond it by an expansion in 1 / degrees."""
    if degrees <= len(T95):
        return T95[degrees - 1]
    z = Z95
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / degrees + second / degrees**2 + third / degrees**3


def mean_of(values: Sequence[float]) -> Interval:
    """The arithmetic mean of one value per seed."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Interval(mean=mean)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    half = student_t95(count - 1) * error
    return Interval(mean=mean, low=mean - half, high=mean + half)


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """The geometric mean of above / below, paired by seed; None if a value is 0."""
    if min(above) <= 0.0 or min(below) <= 0.0:
        return None
    logs = mean_of([math.log(a / b) for a, b in zip(above, below, strict=True)])
    if logs.low is None or logs.high is None:
        return Interval(mean=math.exp(logs.mean))
    return Interval(mean=math.exp(logs.mean), low=math.exp(logs.low), high=math.exp(logs.high))
