"""A fixed degree of parallelism: every elastic action gets K units, or the nearest amount that it admits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tangram.core.demand import CORE, CPU
from tangram.core.policies.base import ArrivalOrder, Begin, Decision

if TYPE_CHECKING:
    from tangram.core.snapshot import Snapshot


class Fixed(ArrivalOrder):
    """The policy `fixed:K`. K counts cores or devices. An action waits until all K are free."""

    def __init__(self, units: int) -> None:
        self.name = f"fixed:{units}"
        self.units = units

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            entry = candidate.entry
            if not entry.elastic:
                yield Begin(entry, candidate.node)
                continue
            amounts = entry.action.demand.pools[entry.elastic]
            pool = snapshot.pool(entry.elastic, candidate.node)
            degree = self.units * CORE if entry.elastic == CPU else self.units
            units = amounts.floor(min(degree, pool.total))
            if pool.fits(units):
                yield Begin(entry, candidate.node, units)
