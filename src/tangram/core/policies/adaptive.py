"""The default policy: size-aware, sharing, resizing.

What it does beyond the published algorithm, each for a measured reason (docs/concepts/policies.md):

- order by expected unit-seconds, smallest first, with ageing in the scheduler against starvation;
- CPU that nobody declared is reserved by learned real use, with a generous limit: tool calls wait on disk and network;
- elastic CPU actions share by heSRPT over what runs and what waits, and are resized as that changes;
- devices are chosen by time to finish including the restore, priced by how many others want devices.

With nothing learned yet an action counts as one core for one second, which is first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tangram.core.arrange import hesrpt_shares
from tangram.core.demand import CORE, CPU, GPU
from tangram.core.ledger import PoolState
from tangram.core.policies.base import Adjust, Begin, Decision
from tangram.core.queue import Entry

if TYPE_CHECKING:
    from tangram.core.snapshot import Candidate, Snapshot

RESERVE_MARGIN = 1.1
"""Reserve this much above the learned mean use: contention slows everybody, a little slack slows nobody."""
RESERVE_MIN = 20
"""Milli-cores reserved at least, so that a node never runs a thousand actions at once."""
WIDTH_HEADROOM = 4
"""An action is launched this many times wider than its first share, so that it can grow when others leave."""
RESIZE_SHARE = 0.1
"""A resize must change the limit by this share at least; smaller ones cost more than they bring."""
RESIZES_MAX = 8
"""Resizes per round beyond those that make room; each is a file write, and the next round does the rest."""
CROWD_MAX = 48
"""Waiting actions that take part in the division; with more, everybody is at its minimum anyway."""


class Adaptive:
    strict = False

    def __init__(self, *, resize: bool = True) -> None:
        self.name = "adaptive" if resize else "adaptive:no-resize"
        self.resize = resize

    # ---- order ----

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        """Expected unit-seconds at the minimum: what the action takes away from the others."""
        estimate = snapshot.estimate(entry)
        pools = entry.action.demand.pools
        cpu = pools.get(CPU)
        if cpu is None:
            return estimate.work_s
        cores = cpu.min / CORE if cpu.declared else min(estimate.busy, cpu.max / CORE)
        return estimate.work_s * cores

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        estimate = snapshot.estimate(entry)
        if not estimate.observations:
            return CORE
        limit = entry.action.demand.pools[CPU].max
        return min(limit, max(RESERVE_MIN, int(estimate.busy * RESERVE_MARGIN * CORE)))

    # ---- plan ----

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        targets: dict[str, float] = {}
        pools = [pool for pool in snapshot.changed.values() if pool.kind == CPU]
        for pool in pools:
            targets.update(self._targets(snapshot, pool))
            if self.resize:
                yield from self._shrink(snapshot, pool, targets)
        for candidate in snapshot.candidates():
            decision = self._begin(snapshot, candidate, targets)
            if decision is not None:
                yield decision
        if self.resize:
            for pool in pools:
                yield from self._grow(snapshot, pool, targets)

    def _begin(self, snapshot: Snapshot, candidate: Candidate, targets: dict[str, float]) -> Decision | None:
        entry, node = candidate.entry, candidate.node
        pools = entry.action.demand.pools
        if GPU in pools:
            return self._begin_devices(snapshot, entry, node)
        cpu = pools.get(CPU)
        if cpu is None or not (cpu.elastic or not cpu.declared):
            return Begin(entry, node)
        if not cpu.declared:
            return Begin(entry, node, self.reserve(entry, snapshot), limit=cpu.max, width=cpu.max)
        pool = snapshot.pool(CPU, node)
        units = cpu.floor(min(targets.get(entry.id, cpu.min), pool.free))
        width = cpu.floor(min(units * WIDTH_HEADROOM, pool.total)) if self.resize else units
        return Begin(entry, node, units, limit=units, width=width)

    # ---- elastic CPU ----

    def _targets(self, snapshot: Snapshot, pool: PoolState) -> dict[str, float]:
        """heSRPT over the elastic actions that run and wait on this pool: milli-cores per action."""
        running = list(snapshot.running(pool).values())
        waiting_count, waiting = snapshot.waiting_elastic(pool, CROWD_MAX)
        if not running and not waiting:
            return {}
        rigid = snapshot.waiting(pool) - waiting_count
        reserved = sum(entry.reserved for entry in running)
        floor = sum(entry.action.demand.pools[CPU].min for entry in running)
        units = max(float(floor), pool.free + reserved - rigid * CORE * 0.25)
        members = running + waiting
        sizes, exponents, minimum, maximum = [], [], [], []
        for entry in running:
            estimate = snapshot.estimate(entry)
            sizes.append(estimate.remaining_s(entry.done_at(snapshot.now) if entry.started_at is not None else 0.0))
            exponents.append(estimate.exponent)
            minimum.append(float(entry.action.demand.pools[CPU].min))
            maximum.append(float(entry.width if self.resize else entry.reserved))
        for entry in waiting:
            estimate = snapshot.estimate(entry)
            sizes.append(estimate.work_s)
            exponents.append(estimate.exponent)
            minimum.append(0.0)
            maximum.append(float(entry.action.demand.pools[CPU].max))
        shares = hesrpt_shares(sizes, exponents, units, minimum, maximum)
        return {entry.id: share for entry, share in zip(members, shares, strict=True)}

    def _shrink(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> Iterator[Decision]:
        for entry in list(snapshot.running(pool).values()):
            target = int(targets[entry.id])
            if target < entry.reserved * (1.0 - RESIZE_SHARE) and entry.stop is None:
                yield Adjust(entry, target, target)

    def _grow(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> Iterator[Decision]:
        left = RESIZES_MAX
        for entry in list(snapshot.running(pool).values()):
            target = min(int(targets.get(entry.id, 0)), entry.width, entry.reserved + pool.free)
            if target > entry.reserved * (1.0 + RESIZE_SHARE) and entry.stop is None and left:
                left -= 1
                yield Adjust(entry, target, target)

    # ---- devices ----

    def _begin_devices(self, snapshot: Snapshot, entry: Entry, node: str) -> Decision:
        """The degree that ends soonest, restore included, each device priced by how many others want one."""
        pool = snapshot.pool(GPU, node)
        amounts = entry.action.demand.pools[GPU]
        loaded = snapshot.resident_degrees(entry, node)
        price = (snapshot.waiting(pool) + len(snapshot.holders(pool))) / max(pool.total, 1)
        best, best_cost = amounts.min, float("inf")
        for units in amounts.all(pool.total):
            if pool.fits(units):
                restore = 0.0 if units in loaded else snapshot.restore_s(entry.action.service)
                cost = (restore + snapshot.seconds(entry, pool, units)) * (1.0 + price * units)
                if cost < best_cost:
                    best, best_cost = units, cost
        return Begin(entry, node, best if amounts.elastic else 0)
