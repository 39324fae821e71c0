"""Sums of one pool: what was held of it, and what would have been reserved.

Owns the arithmetic of units times seconds. Never looks at a clock. Promises that what was told and what is told next
add up to the whole.
"""

from __future__ import annotations

from tangram.rl.train.records import PoolUse
from tangram.server.observe.history import Tally


class Use:
    """A pool as it is shown, or all pools of one quota."""

    __slots__ = ("at_s", "held", "held_unit_s", "private", "reserved_unit_s", "tally", "total")

    def __init__(self, now: float, private: bool = False) -> None:
        self.private = private
        self.total = 0.0
        self.tally = Tally()
        self.held = 0.0
        """Units, now."""
        self.at_s = now
        self.held_unit_s = self.reserved_unit_s = 0.0

    def change(self, units: float, now: float) -> None:
        self.held_unit_s += self.held * (now - self.at_s)
        self.held += units
        self.at_s = now

    def told(self, name: str, waiting: int) -> PoolUse:
        """All since it was told last."""
        tally, self.tally = self.tally, Tally()
        act = tally.percentiles()
        held, reserved = self.held_unit_s, self.reserved_unit_s
        self.held_unit_s = self.reserved_unit_s = 0.0
        return PoolUse(
            name=name,
            total=self.total,
            actions=tally.count,
            act_mean_s=act.mean_s,
            act_p99_s=act.p99_s,
            act_cells=dict(sorted(tally.cells.items())),
            waiting_mean_s=tally.waiting_s / tally.count if tally.count else 0.0,
            held_unit_s=held,
            reserved_unit_s=max(reserved, held),  # sums of fractions are not exact
            waiting=waiting,
        )


class Kept:
    """A trajectory in one pool: what it would keep, were it reserved."""

    __slots__ = ("most", "since_s", "units", "until_s")

    def __init__(self, now: float) -> None:
        self.since_s = self.until_s = now
        """What is between is in the sum."""
        self.units = self.most = 0.0

    def change(self, units: float, now: float, use: Use) -> None:
        use.reserved_unit_s += self.most * (now - self.until_s)
        self.until_s = now
        self.units += units
        if self.units > self.most:
            use.reserved_unit_s += (self.units - self.most) * (now - self.since_s)
            self.most = self.units

    def had(self, units: float, since_s: float, until_s: float, use: Use) -> None:
        """It held them in between, which is heard of afterwards."""
        before = self.most * (self.until_s - self.since_s)
        self.most = max(self.most, units)
        self.since_s, self.until_s = min(self.since_s, since_s), max(self.until_s, until_s)
        use.reserved_unit_s += self.most * (self.until_s - self.since_s) - before
