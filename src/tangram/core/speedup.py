"""Speed-up: how much faster an action runs on k units than on one.

Owns the three forms that a user can give. A fourth, "learned", is the absence of one: the profile of the
action's class supplies a power law then. Every form promises s(1) == 1, s non-decreasing and s(k) <= k.
Below one unit an action slows in proportion to what it gets: s(k) == k for k < 1.
"""

from __future__ import annotations

import bisect
import math

import msgspec

from tangram.errors import InvalidAction


class PowerLaw(msgspec.Struct, frozen=True, gc=False, tag="power"):
    """s(k) = k ** exponent."""

    exponent: float

    def __post_init__(self) -> None:
        if type(self.exponent) not in (float, int) or not 0.0 <= self.exponent <= 1.0:
            raise InvalidAction("speedup.exponent", self.exponent, "a number from 0 (never faster) to 1 (linear)")

    def at(self, units: float) -> float:
        return units**self.exponent if units > 1.0 else units

    def exponent_near(self, units_max: float) -> float:
        return self.exponent


class Amdahl(msgspec.Struct, frozen=True, gc=False, tag="amdahl"):
    """s(k) = 1 / ((1 - parallel) + parallel / k)."""

    parallel: float
    """Share of the one-unit duration that divides among units."""

    def __post_init__(self) -> None:
        if type(self.parallel) not in (float, int) or not 0.0 <= self.parallel <= 1.0:
            raise InvalidAction("speedup.parallel", self.parallel, "a share from 0 to 1")

    def at(self, units: float) -> float:
        return 1.0 / (1.0 - self.parallel + self.parallel / units) if units > 1.0 else units

    def exponent_near(self, units_max: float) -> float:
        return _exponent_over(self.at(units_max), units_max)


class Table(msgspec.Struct, frozen=True, gc=False, tag="table"):
    """Measured points: interpolated linearly in log-log, constant beyond the last one."""

    units: tuple[float, ...]
    speedups: tuple[float, ...]

    def __post_init__(self) -> None:
        for field, values in (("units", self.units), ("speedups", self.speedups)):
            if not isinstance(values, tuple) or not all(type(value) in (float, int) for value in values):
                raise InvalidAction(f"speedup.{field}", values, "a tuple of numbers")
        if len(self.units) != len(self.speedups) or not self.units or self.units[0] != 1 or self.speedups[0] != 1:
            raise InvalidAction(
                "speedup.units",
                (self.units, self.speedups),
                "as many speed-ups as unit counts, the first of both being 1",
            )
        for previous, units in zip(self.units, self.units[1:], strict=False):
            if not previous < units < math.inf:
                raise InvalidAction("speedup.units", self.units, "increasing unit counts")
        for i in range(1, len(self.units)):
            if not self.speedups[i - 1] <= self.speedups[i] <= self.units[i]:
                raise InvalidAction("speedup.speedups", self.speedups, "non-decreasing speed-ups, none above its units")

    def at(self, units: float) -> float:
        if units <= 1.0:
            return units
        i = bisect.bisect_right(self.units, units)
        if i == len(self.units):
            return self.speedups[-1]
        lower, upper = self.units[i - 1], self.units[i]
        slope = math.log(self.speedups[i] / self.speedups[i - 1]) / math.log(upper / lower)
        return float(self.speedups[i - 1] * (units / lower) ** slope)

    def exponent_near(self, units_max: float) -> float:
        return _exponent_over(self.at(units_max), units_max)


Speedup = PowerLaw | Amdahl | Table

RIGID = PowerLaw(0.0)


def _exponent_over(speedup: float, units_max: float) -> float:
    """Returns the exponent of the power law that equals s at `units_max`."""
    return min(1.0, math.log(speedup) / math.log(units_max)) if units_max > 1.0 else 1.0
