"""Shares: how much of the pools runs have, as it is shown.

What runs are said to have. What time has given back of quotas since the scheduler looked is no longer theirs; it is
worked out once, whatever the number of runs that are asked for. Changes nothing in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable

from tangram.core.ledger import Ledger, RunUsage


class Shares:
    def __init__(self, ledger: Ledger, now: float) -> None:
        self._totals = ledger.total_by_kind
        self._back: dict[tuple[int, str], int] = {}
        """Units that have come back, by the account of the run that spent them and the kind of the pool."""
        for pool in ledger.pools.values():
            units = pool.come_back(now)
            for charge in pool.charges:
                if units <= 0:
                    break
                part = min(units, charge.spent)
                units -= part
                key = id(charge.run), pool.kind
                self._back[key] = self._back.get(key, 0) + part

    def of(self, usages: Iterable[RunUsage]) -> float:
        """Of the kind of pool of which they have the largest part together: that part."""
        units_by_kind: dict[str, int] = {}
        for usage in usages:
            for kind, units in usage.units_by_kind.items():
                units_by_kind[kind] = units_by_kind.get(kind, 0) + units - self._back.get((id(usage), kind), 0)
        totals = self._totals
        parts = [units / totals[kind] if totals[kind] > 0 else 1.0 for kind, units in units_by_kind.items() if units]
        return min(1.0, max(parts, default=0.0))
