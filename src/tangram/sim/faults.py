"""Faults: what goes wrong in a simulation, when, and where. Seeded: one seed, one sequence.

Owns the records and their injection into an engine.
"""

from __future__ import annotations

import random

import msgspec

from tangram.core.demand import CPU, GPU, MEMORY
from tangram.core.messages import Pool
from tangram.sim.engine import Engine

KINDS = ("node_loss", "slow_start", "crash", "start_failure", "quota_cut", "shrink")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    kind: str
    """One of KINDS."""
    pick: float = 0.0
    """In [0, 1): which node, action or pool it strikes."""
    lasts_s: float = 30.0
    amount: float = 1.0
    """Seconds of a slow start, share of starts that fail, or share of a quota that is left."""


def draw(seed: int, *, until_s: float, count: int = 6, kinds: tuple[str, ...] = KINDS) -> tuple[Fault, ...]:
    """`count` faults at random moments, in random order."""
    rng = random.Random(f"faults/{seed}")
    faults = [
        Fault(
            at=rng.uniform(0.0, until_s),
            kind=rng.choice(kinds),
            pick=rng.random(),
            lasts_s=rng.uniform(1.0, until_s / 3.0),
            amount=rng.uniform(0.05, 0.9),
        )
        for _ in range(count)
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def inject(engine: Engine, faults: tuple[Fault, ...]) -> None:
    """Schedule every fault in the engine."""
    for fault in faults:
        engine.at(fault.at, _STRIKE[fault.kind], engine, fault)


def _nodes(engine: Engine) -> list[str]:
    return sorted({pool.node for pool in engine.pools.values() if pool.node})


def _node_loss(engine: Engine, fault: Fault) -> None:
    nodes = [node for node in _nodes(engine) if not engine.down.get(node)]
    if nodes:
        node = nodes[int(fault.pick * len(nodes))]
        engine.node_down(node)
        engine.at(engine.now + fault.lasts_s, engine.node_up, node)


def _slow_start(engine: Engine, fault: Fault) -> None:
    engine.slow_start_s = lambda action: 10.0 * fault.amount
    engine.at(engine.now + fault.lasts_s, _end_slow_start, engine)


def _end_slow_start(engine: Engine) -> None:
    engine.slow_start_s = None


def _crash(engine: Engine, fault: Fault) -> None:
    engine.crash(fault.pick)


def _start_failure(engine: Engine, fault: Fault) -> None:
    rng = random.Random(f"start/{fault.at}/{fault.pick}")
    engine.fail_start = lambda action, attempt: "no such image" if rng.random() < fault.amount else ""
    engine.at(engine.now + fault.lasts_s, _end_start_failure, engine)


def _end_start_failure(engine: Engine) -> None:
    engine.fail_start = None


def _quota_cut(engine: Engine, fault: Fault) -> None:
    _scale(engine, fault, [pool for pool in engine.pools.values() if not pool.node])


def _shrink(engine: Engine, fault: Fault) -> None:
    _scale(engine, fault, [pool for pool in engine.pools.values() if pool.kind in (CPU, MEMORY)])


def _scale(engine: Engine, fault: Fault, pools: list[Pool]) -> None:
    """Cut one pool to a share of its units, and give them back later."""
    pools = [pool for pool in pools if not engine.down.get(pool.node) and pool.kind != GPU]
    if not pools:
        return
    pool = pools[int(fault.pick * len(pools))]
    total = max(1, int(pool.total * max(fault.amount, 0.1)))
    engine.change_pool(Pool(kind=pool.kind, node=pool.node, total=total, window=pool.window))
    engine.at(engine.now + fault.lasts_s, _restore_pool, engine, pool)


def _restore_pool(engine: Engine, pool: Pool) -> None:
    if not engine.down.get(pool.node):
        engine.change_pool(pool)


_STRIKE = {
    "node_loss": _node_loss,
    "slow_start": _slow_start,
    "crash": _crash,
    "start_failure": _start_failure,
    "quota_cut": _quota_cut,
    "shrink": _shrink,
}
