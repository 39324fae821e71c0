"""Explain: why an action waits, in one sentence; and why no pool could ever hold it.

Owns the words. Reads the scheduler, changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangram.core.action import State
from tangram.core.demand import CORE, CPU, GPU, LEARNED, MEMORY, Need
from tangram.core.ledger import PoolState
from tangram.core.messages import NodeState
from tangram.core.queue import Entry

if TYPE_CHECKING:
    from tangram.core.scheduler import Scheduler


def explain(scheduler: Scheduler, entry: Entry) -> str:
    """One sentence."""
    name = entry.id
    if entry.state is State.STARTING:
        return f"{name} is starting on {_where(entry)}"
    if entry.state is State.RUNNING:
        return f"{name} is running on {_where(entry)}"
    if entry.state is State.STOPPING:
        assert entry.stop is not None
        return f"{name} is stopping ({entry.stop[1]}) and holds its units until its manager says Finished"
    if entry.stranded_at is not None:
        return impossible(scheduler, entry)
    blocker = _blocker(scheduler, entry)
    if blocker is not None:
        return f"{name} waits behind {blocker.id}, which goes first and waits for {_lack(scheduler, blocker)}"
    assert entry.lane is not None
    first = entry.lane.first()[3]
    if first is not entry:
        ahead = f"up to {entry.lane.waiting - 1} actions of run {entry.run.name}"
        return f"{name} waits behind {ahead}; the first of them waits for {_lack(scheduler, first)}"
    return f"{name} waits for {_lack(scheduler, entry)}"


def _where(entry: Entry) -> str:
    return ", ".join(f"{_amount(held.pool.kind, held.units)} of {held.pool.name}" for held in entry.holdings)


def _blocker(scheduler: Scheduler, entry: Entry) -> Entry | None:
    """Somebody who goes before it and has closed one of its pools."""
    queue, now = scheduler.queue, scheduler.snapshot.now
    closed = [queue.of_pool(pool) for pool in _pools(scheduler, entry)]
    if not entry.node:
        closed.extend(queue.of_kind(kind) for kind, _ in _needs(entry))
    for waiters in closed:
        blocker = queue.closed_by(waiters, entry, now)
        if blocker is not None:
            return blocker
    return None


def _needs(entry: Entry) -> list[Need]:
    return [*entry.needs, (MEMORY, entry.memory)] if entry.memory else [*entry.needs]


def _pools(scheduler: Scheduler, entry: Entry, kind: str = "") -> list[PoolState]:
    """The pools that it may use, of one kind or of all."""
    ledger = scheduler.ledger
    found = []
    for name in [kind] if kind else [need for need, _ in _needs(entry)]:
        for node, pool in ledger.kinds.get(name, {}).items():
            if not node or node == entry.node or (not entry.node and ledger.nodes[node] is NodeState.UP):
                found.append(pool)
    return found


def _lack(scheduler: Scheduler, entry: Entry) -> str:
    """The pools that an action lacks, with what is free in them."""
    parts = []
    for kind, units in _needs(entry):
        best = max(_pools(scheduler, entry, kind), key=lambda pool: pool.free, default=None)
        if best is None:
            parts.append(f"a pool of kind {kind}")
            continue
        wanted = scheduler.snapshot.reserve(entry, best) if units == LEARNED else units
        if not best.fits(wanted):
            free, total = _amount(kind, best.free), _amount(kind, best.total)
            parts.append(f"{_amount(kind, wanted)} of {best.name}, where {free} of {total} are free")
    return " and ".join(parts) or "its turn: the policy keeps its pools for others now"


def impossible(scheduler: Scheduler, entry: Entry) -> str:
    """What no pool can give, and the most that there is."""
    kinds = scheduler.ledger.kinds
    for kind, units in _needs(entry):
        pools = [pool for node, pool in kinds.get(kind, {}).items() if not entry.node or node in ("", entry.node)]
        if not pools:
            known = ", ".join(sorted(known for known, some in kinds.items() if some)) or "none"
            where = f" on node {entry.node}" if entry.node else ""
            return f"{entry.id} asks for pool kind {kind}, of which there is none{where}; kinds: {known}"
        if not any(pool.could_fit(units) for pool in pools):
            asked, most = _amount(kind, units), _amount(kind, max(pool.total for pool in pools))
            return f"{entry.id} asks for at least {asked} of {kind}; the largest such pool has {most}"
    asked = ", ".join(f"{_amount(kind, units)} of {kind}" for kind, units in _needs(entry))
    return f"{entry.id} asks for {asked} together; no node that is up has all of them"


def _amount(pool: str, units: int) -> str:
    kind = pool.partition("@")[0]
    if units == LEARNED:
        return "some"
    if kind == CPU:
        return f"{units / CORE:g} cores"
    if kind == GPU:
        return f"{units} devices"
    if kind == MEMORY:
        return f"{units} MiB"
    return f"{units} units"
