"""Explain: why an action waits, in one sentence; and why no pool could ever hold it.

Owns the words. Reads the scheduler, changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangram.core.action import State
from tangram.core.demand import CORE, CPU, GPU, LEARNED, MEMORY, Need
from tangram.core.lanes import Entry
from tangram.core.ledger import PoolState
from tangram.core.messages import NodeState
from tangram.core.topology import chunk_size

if TYPE_CHECKING:
    from tangram.core.scheduler import Scheduler


Site = list[tuple[PoolState, int]]
"""Pools that an action could run from together, with what it needs of each; one for every node that could hold it."""


def explain(scheduler: Scheduler, entry: Entry) -> str:
    """One sentence."""
    name, lane = entry.id, entry.lane
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
        return f"{name} waits behind {blocker.id}, which goes first and waits {_why(scheduler, blocker)}"
    assert lane is not None, name
    first = scheduler.queue.head_of(lane, scheduler.now)
    if first is not entry:
        ahead = f"up to {_counted(lane.waiting - 1, 'action')} of run {entry.run.name}"
        return f"{name} waits behind {ahead}; the first of them waits {_why(scheduler, first)}"
    return f"{name} waits for {_lack(scheduler, entry)}"


def _why(scheduler: Scheduler, entry: Entry) -> str:
    """Of one who keeps others waiting: what it lacks, or behind whom it waits itself, to the first of them all."""
    first = entry
    # Each run has one blocker per pool, so a chain is hardly longer than there are runs.
    for _ in range(len(scheduler.queue.runs) + 1):
        ahead = _blocker(scheduler, first)
        if ahead is None or ahead is entry:
            break
        first = ahead
    if first is entry:
        return f"for {_lack(scheduler, entry)}"
    return f"behind {first.id}, which waits for {_lack(scheduler, first)}"


def _where(entry: Entry) -> str:
    return ", ".join(f"{_amount(held.pool.kind, held.units)} of {held.pool.name}" for held in entry.holdings)


def _needs(entry: Entry) -> list[Need]:
    return [*entry.needs, (MEMORY, entry.memory)] if entry.memory else [*entry.needs]


def _sites(scheduler: Scheduler, entry: Entry) -> list[Site]:
    """Where it could run if everything were free."""
    ledger, snapshot = scheduler.ledger, scheduler.snapshot
    on_node = [need for need in _needs(entry) if "" not in ledger.kinds[need[0]]]
    nodes = [entry.node]
    if on_node and not entry.node:
        up = [node for node, state in ledger.nodes.items() if state is NodeState.UP]
        nodes = snapshot.nodes_for_all(entry, on_node) or [node for node in up if ledger.node_could_hold(on_node, node)]
    return [[(snapshot.pool(kind, node), units) for kind, units in _needs(entry)] for node in nodes]


def _blocker(scheduler: Scheduler, entry: Entry) -> Entry | None:
    """Somebody who goes before it and keeps it from where it has room, or from everywhere."""
    blockers = []
    for site in _sites(scheduler, entry):
        blocker = _closed_by(scheduler, entry, site)
        if blocker is not None and not _short(entry, site):
            return blocker
        blockers.append(blocker)
    return blockers[0] if blockers and None not in blockers else None


def _closed_by(scheduler: Scheduler, entry: Entry, site: Site) -> Entry | None:
    for pool, _ in site:
        blocker = scheduler.queue.kept_by(pool, entry, scheduler.now)
        if blocker is not None:
            return blocker
    return None


def _short(entry: Entry, site: Site) -> Site:
    """The pools that have too few units for it, with what it wants. What is reserved where nobody declared CPU is as
    the policy said when it was looked at last."""
    wanted = [(pool, min(max(entry.wanted, 1), pool.total) if units == LEARNED else units) for pool, units in site]
    return [(pool, units) for pool, units in wanted if not pool.fits(units)]


def _lack(scheduler: Scheduler, entry: Entry) -> str:
    """The pools that an action lacks, with what is free in them: on the node, open to it, that lacks least."""
    sites = _sites(scheduler, entry)
    sites = [site for site in sites if _closed_by(scheduler, entry, site) is None] or sites
    best = min(sites, key=lambda site: (len(_short(entry, site)), -site[0][0].free))
    short = _short(entry, best)
    if not short:
        where = ", ".join(pool.name for pool, _ in best)
        return f"its turn: {where} would hold it, but policy {scheduler.policy.name} has not started it yet"
    parts = []
    for pool, units in short:
        free, total = _amount(pool.kind, max(0, pool.free)), _amount(pool.kind, pool.total)
        apart = ", but apart" if pool.free >= pool.counted(units) else ""
        parts.append(f"{_asked(pool.kind, units)} of {pool.name}, where {free} of {total} are free{apart}")
    return " and ".join(parts) + _together(scheduler, entry)


def _together(scheduler: Scheduler, entry: Entry) -> str:
    """Said of an action that waits for such a node, though its own needs might be met elsewhere."""
    on_node = [need for need in _needs(entry) if "" not in scheduler.ledger.kinds[need[0]]]
    if entry.place is None or not scheduler.snapshot.nodes_for_all(entry, on_node):
        return ""
    return f"; its node must be one that could hold all actions of sandbox {entry.place.id}"


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
            most = max(pools, key=lambda pool: pool.total)
            who = f"{most.name}, where its sandbox is," if entry.node and most.node else "the largest such pool"
            asked = f"at least {_asked(kind, units)} of {kind}"
            return f"{entry.id} asks for {asked}; {who} has {_amount(kind, most.total)}"
    asked = ", ".join(f"{_asked(kind, units)} of {kind}" for kind, units in _needs(entry))
    return f"{entry.id} asks for {asked} together; no node that is up has all of them"


def _asked(kind: str, units: int) -> str:
    if kind == GPU and chunk_size(units) != units:
        return f"{units} devices (a chunk of {chunk_size(units)})"
    return _amount(kind, units)


def _amount(kind: str, units: int) -> str:
    if units == LEARNED:
        return "some"
    if kind == CPU:
        return _counted(units / CORE, "core")
    if kind == MEMORY:
        return f"{units} MiB"
    return _counted(units, "device" if kind == GPU else "unit")


def _counted(number: float, noun: str) -> str:
    """`1 core`, `0.5 cores`."""
    return f"{number:.15g} {noun}" if number == 1 else f"{number:.15g} {noun}s"
