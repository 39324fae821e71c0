"""Demand: the amounts of pools that an action can run with.

Owns the admissible amounts. Units are integers: milli-cores for `cpu`, whole devices for `gpu`, requests or
tokens for a quota. All pools of a demand are granted together or none (gang allocation). At most one of them is
elastic, that is, admits more than one amount.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from tangram.core.speedup import Amdahl, PowerLaw, Speedup, Table
from tangram.errors import InvalidAction

CORE = 1000
"""Milli-cores of one core: the unit of every `cpu` pool."""

CPU = "cpu"
EXCLUSIVE_CORE = "core"
"""Exclusive cores: a static partition of a node into whole cores, by id."""
GPU = "gpu"
MEMORY = "memory"

LEARNED = -1
"""In place of the minimum of undeclared CPU: the policy decides the reserve."""

Need = tuple[str, int]
"""A pool kind and the minimum of it, or LEARNED."""


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """The admissible amounts of one pool: a fixed number, a range with a step, or a discrete set."""

    min: int
    max: int
    step: int = 1
    choices: tuple[int, ...] = ()
    """If given, the only admissible amounts, increasing. `min` and `max` are the first and the last."""
    declared: bool = True
    """False for CPU without a declared need: the reserve is learned."""

    def __post_init__(self) -> None:
        if type(self.min) is not int or self.min < (1 if self.declared else 0):
            raise InvalidAction("demand.min", self.min, "a positive whole number of units")
        if type(self.max) is not int or self.max < max(self.min, 1):
            raise InvalidAction("demand.max", self.max, f"a whole number of units, at least {max(self.min, 1)}")
        if type(self.step) is not int or self.step < 1:
            raise InvalidAction("demand.step", self.step, "a positive whole number of units")
        if not self.choices:
            return
        if type(self.choices) is not tuple or not all(type(choice) is int for choice in self.choices):
            raise InvalidAction("demand.choices", self.choices, "whole numbers of units")
        if (
            list(self.choices) != sorted(set(self.choices))
            or self.choices[0] != self.min
            or self.choices[-1] != self.max
        ):
            raise InvalidAction("demand.choices", self.choices, "increasing amounts from the minimum to the maximum")

    @property
    def elastic(self) -> bool:
        return self.declared and self.max > self.min

    def floor(self, units: float) -> int:
        """Returns the largest admissible amount that is at most `units`, but at least the minimum."""
        if units >= self.max:
            return self.max
        if units <= self.min:
            return self.min
        if self.choices:
            return max(choice for choice in self.choices if choice <= units)
        return self.min + int((units - self.min) // self.step) * self.step

    def admits(self, units: int) -> bool:
        if self.choices:
            return units in self.choices
        return self.min <= units <= self.max and (units == self.max or (units - self.min) % self.step == 0)

    def all(self, units_max: int) -> Iterator[int]:
        """Yields every admissible amount up to `units_max`, increasing."""
        if self.choices:
            yield from (choice for choice in self.choices if choice <= units_max)
            return
        yield from range(self.min, min(self.max, units_max) + 1, self.step)
        if self.max <= units_max and (self.max - self.min) % self.step:
            yield self.max


def fixed(units: int) -> Amounts:
    return Amounts(units, units)


def between(units_min: int, units_max: int, step: int = 1) -> Amounts:
    return Amounts(units_min, units_max, step)


def one_of(*choices: int) -> Amounts:
    """Any of these amounts, given in any order."""
    if not choices:
        raise InvalidAction("demand.choices", choices, "at least one amount")
    if not all(type(choice) is int for choice in choices):
        raise InvalidAction("demand.choices", choices, "whole numbers of units")
    return Amounts(min(choices), max(choices), choices=tuple(sorted(choices)))


def cores(cores_min: float, cores_max: float | None = None) -> Amounts:
    """CPU in cores: `cores(2)` is fixed, `cores(1, 8)` elastic in steps of a whole core."""
    low = _milli_cores(cores_min)
    high = low if cores_max is None else _milli_cores(cores_max)
    return Amounts(low, high, step=CORE)


def learned(limit_cores: float = 4.0) -> Amounts:
    """CPU without a declared need: the reserve is learned, the limit is `limit_cores`."""
    return Amounts(0, _milli_cores(limit_cores), declared=False)


def _milli_cores(count: float) -> int:
    if type(count) not in (float, int) or not math.isfinite(count):
        raise InvalidAction("demand.cpu", count, "a finite number of cores")
    return round(count * CORE)


class Demand(msgspec.Struct, frozen=True, gc=False):
    """The admissible amounts per kind of pool. Either all pools are granted or none."""

    pools: dict[str, Amounts]
    speedup: Speedup | None = None
    """Speed-up over the units of the elastic pool. None: learned from the actions of the same class."""

    def __post_init__(self) -> None:
        if not isinstance(self.pools, dict) or not self.pools:
            raise InvalidAction("demand.pools", self.pools, "at least one pool kind with its amounts")
        for kind, amounts in self.pools.items():
            if not isinstance(kind, str) or not kind or "@" in kind:
                raise InvalidAction("demand.pools", kind, "a pool kind such as 'cpu', 'gpu' or the name of a quota")
            if not isinstance(amounts, Amounts):
                raise InvalidAction(f"demand.pools[{kind!r}]", amounts, "Amounts, such as fixed(1) or cores(1, 8)")
        elastic = [kind for kind, amounts in self.pools.items() if amounts.elastic]
        if len(elastic) > 1:
            raise InvalidAction("demand.pools", elastic, "at most one elastic pool; give the others a fixed amount")
        for kind, amounts in self.pools.items():
            if kind == MEMORY:
                raise InvalidAction("demand.pools", kind, "no memory: it is reserved for a sandbox's life by Reserve")
            if not amounts.declared and kind != CPU:
                raise InvalidAction("demand.pools", kind, "a declared amount; only CPU use is learned")
        if self.speedup is not None and not isinstance(self.speedup, PowerLaw | Amdahl | Table):
            raise InvalidAction("demand.speedup", self.speedup, "a PowerLaw, Amdahl or Table; None: it is learned")

    @property
    def needs(self) -> tuple[Need, ...]:
        """The minimum of every pool: the units that must be free before the action can start."""
        return tuple([(kind, amounts.min if amounts.declared else LEARNED) for kind, amounts in self.pools.items()])

    @property
    def elastic(self) -> str:
        """The kind of the elastic pool, or an empty string."""
        for kind, amounts in self.pools.items():
            if amounts.elastic:
                return kind
        return ""
