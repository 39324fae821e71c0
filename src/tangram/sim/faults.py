"""Faults of a simulation: what fails, when and where. Seeded: one seed, one sequence.

Owns the records and their injection into an engine. Faults may overlap: a pool that was reduced twice is whole again
when both reductions end, and a node that comes back gets the pools that it should have by then.
"""

from __future__ import annotations

import random
from typing import TypeVar

import msgspec

from tangram.core.demand import CPU, MEMORY
from tangram.core.messages import Pool
from tangram.sim.engine import Simulator

T = TypeVar("T")
KINDS = ("node_loss", "slow_start", "crash", "start_failure", "quota_cut", "shrink")

SLOWEST_START_S = 10.0

SHARE_LEFT_MIN = 0.1
"""Least share that remains of a reduced pool; an action that needs more waits until the pool is restored."""


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    kind: str
    """One of KINDS."""
    pick: float = 0.0
    """A number in [0, 1) that selects the node, action or pool."""
    lasts_s: float = 30.0
    amount: float = 1.0
    """Relative slowness of a start; the share of starts that fail; the remaining share of a pool."""


def draw_faults(
    seed: int, *, until_s: float, count: int = 6, kinds: tuple[str, ...] = KINDS
) -> tuple[InjectedFault, ...]:
    """Draw `count` faults at random times, in random order."""
    rng = random.Random(f"faults/{seed}")
    faults = [
        InjectedFault(
            at=rng.uniform(0.0, until_s),
            kind=rng.choice(kinds),
            pick=rng.random(),
            lasts_s=rng.uniform(1.0, until_s / 3.0),
            amount=rng.uniform(0.05, 0.9),
        )
        for _ in range(count)
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def inject(engine: Simulator, faults: tuple[InjectedFault, ...]) -> None:
    """Schedule every fault in the engine."""
    injector = _FaultInjector(engine)
    for fault in faults:
        engine.call_at(fault.at, _HANDLER_BY_KIND[fault.kind], injector, fault)


class _FaultInjector:
    """The faults currently in effect."""

    def __init__(self, engine: Simulator) -> None:
        self._engine = engine
        self._original_pools = dict(engine.pools)
        self._cuts: dict[str, list[float]] = {name: [] for name in engine.pools}
        """By pool, the shares that active faults leave."""

    def node_loss(self, fault: InjectedFault) -> None:
        engine = self._engine
        nodes = sorted({pool.node for pool in engine.pools.values() if pool.node and not engine.down.get(pool.node)})
        if nodes:
            node = nodes[int(fault.pick * len(nodes))]
            engine.node_down(node)
            engine.call_at(engine.now + fault.lasts_s, engine.node_up, node)

    def crash(self, fault: InjectedFault) -> None:
        self._engine.crash(fault.pick)

    # ---- starts ----

    def slow_start(self, fault: InjectedFault) -> None:
        self._add_until_end(fault, self._engine.start_faults.delays_s, SLOWEST_START_S * fault.amount)

    def start_failure(self, fault: InjectedFault) -> None:
        rng = random.Random(f"start/{fault.at}/{fault.pick}")
        self._add_until_end(fault, self._engine.start_faults.failing, (fault.amount, rng))

    def _add_until_end(self, fault: InjectedFault, active: list[T], entry: T) -> None:
        active.append(entry)
        self._engine.call_at(self._engine.now + fault.lasts_s, active.remove, entry)

    # ---- pools ----

    def quota_cut(self, fault: InjectedFault) -> None:
        self._cut(fault, [pool for pool in self._original_pools.values() if not pool.node])

    def shrink(self, fault: InjectedFault) -> None:
        self._cut(fault, [pool for pool in self._original_pools.values() if pool.kind in (CPU, MEMORY)])

    def _cut(self, fault: InjectedFault, pools: list[Pool]) -> None:
        if pools:
            pool = pools[int(fault.pick * len(pools))]
            self._cuts[pool.name].append(fault.amount)
            self._apply_cuts(pool)
            self._engine.call_at(self._engine.now + fault.lasts_s, self._end_cut, pool, fault.amount)

    def _end_cut(self, pool: Pool, share: float) -> None:
        self._cuts[pool.name].remove(share)
        self._apply_cuts(pool)

    def _apply_cuts(self, pool: Pool) -> None:
        """Apply the deepest active reduction."""
        share = max(SHARE_LEFT_MIN, min([1.0, *self._cuts[pool.name]]))
        numa = tuple(max(1, int(units * share)) for units in pool.numa)
        total = sum(numa) if numa else max(1, int(pool.total * share))
        self._engine.change_pool(msgspec.structs.replace(pool, total=total, numa=numa))


_HANDLER_BY_KIND = {
    "node_loss": _FaultInjector.node_loss,
    "slow_start": _FaultInjector.slow_start,
    "crash": _FaultInjector.crash,
    "start_failure": _FaultInjector.start_failure,
    "quota_cut": _FaultInjector.quota_cut,
    "shrink": _FaultInjector.shrink,
}
