"""Explain: why an action waits, in one sentence; and whether any pool could ever hold it.

Owns the words. Reads the scheduler, changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangram.core.action import State
from tangram.core.demand import CORE, CPU, GPU, MEMORY
from tangram.core.ledger import Ledger, PoolState
from tangram.core.messages import NodeState
from tangram.core.queue import LEARNED, Entry, Need

if TYPE_CHECKING:
    from tangram.core.scheduler import Scheduler


def possible(ledger: Ledger, entry: Entry) -> bool:
    """Could the pools hold the action at its minimum if they were all free?"""
    kinds = ledger.kinds
    on_node: list[Need] = []
    for kind, units in entry.needs:
        pools = kinds.get(kind)
        if not pools:
            return False
        if "" in pools:
            if not _holds(pools[""], units):
                return False
        else:
            on_node.append((kind, units))
    if not on_node:
        return True
    place = entry.place
    if place is not None and place.node:
        return all(place.node in kinds[kind] and _holds(kinds[kind][place.node], units) for kind, units in on_node)
    if place is not None and place.memory:
        on_node.append((MEMORY, place.memory))
    for node in kinds[on_node[0][0]]:
        if ledger.nodes[node] is NodeState.UP and all(
            node in kinds.get(kind, {}) and _holds(kinds[kind][node], units) for kind, units in on_node
        ):
            return True
    return False


def _holds(pool: PoolState, units: int) -> bool:
    if units == LEARNED:
        return pool.total > 0
    if pool.kind == GPU:
        return 0 < pool.rounded(units) <= 1 << (pool.total.bit_length() - 1) if pool.total else False
    return units <= pool.total


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
    if not possible(scheduler.ledger, entry):
        return _impossible(scheduler, entry)
    lane = entry.lane
    if lane is not None:
        first = lane.first()[3]
        blocker = next((w.blocker for w in lane.blocked_on if w.blocker not in (None, entry)), None)
        if blocker is not None:
            return f"{name} waits behind {blocker.id}, which goes first and waits for {_lack(scheduler, blocker)}"
        if first is not entry:
            ahead = lane.waiting - 1
            return f"{name} waits behind up to {ahead} actions of run {entry.run.name}; the first of them waits for {_lack(scheduler, first)}"
    return f"{name} waits for {_lack(scheduler, entry)}"


def _where(entry: Entry) -> str:
    assert entry.grant is not None
    return ", ".join(f"{_amount(share.pool, share.reserved)} of {share.pool}" for share in entry.grant.shares)


def _lack(scheduler: Scheduler, entry: Entry) -> str:
    """The pools that an action lacks, with what is free in them."""
    ledger = scheduler.ledger
    needs = [*entry.needs]
    if entry.place is not None and not entry.place.node and entry.place.memory:
        needs.append((MEMORY, entry.place.memory))
    parts = []
    for kind, units in needs:
        wanted = scheduler.policy.reserve(entry, scheduler._snapshot) if units == LEARNED else units
        pools = [p for p in ledger.kinds.get(kind, {}).values() if entry.node in ("", p.node) or not p.node]
        best = max(pools, key=lambda pool: pool.free, default=None)
        if best is None or best.fits(wanted):
            continue
        parts.append(
            f"{_amount(kind, wanted)} of {best.name}, where {_amount(kind, best.free)} of {_amount(kind, best.total)} are free"
        )
    return " and ".join(parts) or "its turn: its pools are kept for those before it"


def _impossible(scheduler: Scheduler, entry: Entry) -> str:
    """What no pool can give, and the most that there is."""
    needs = [*entry.needs]
    if entry.place is not None and not entry.place.node and entry.place.memory:
        needs.append((MEMORY, entry.place.memory))
    for kind, units in needs:
        pools = scheduler.ledger.kinds.get(kind)
        if not pools:
            known = ", ".join(sorted(scheduler.ledger.kinds)) or "none"
            return f"{entry.id} asks for pool kind {kind}, of which there is none; kinds: {known}"
        usable = [pool for node, pool in pools.items() if not entry.node or node in ("", entry.node)]
        if not any(_holds(pool, units) for pool in usable):
            most = max((pool.total for pool in usable), default=0)
            return f"{entry.id} asks for at least {_amount(kind, units)} of {kind}; the largest such pool has {_amount(kind, most)}"
    kinds = ", ".join(f"{_amount(kind, units)} of {kind}" for kind, units in needs)
    return f"{entry.id} asks for {kinds} together; no node that is up has all of them"


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
