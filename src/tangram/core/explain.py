"""Explain: why an action waits, or why no pool could ever hold it, in one sentence."""

from __future__ import annotations

from tangram.core.action import State
from tangram.core.demand import CORE, CPU, GPU, LEARNED, MEMORY, Need
from tangram.core.lanes import Entry
from tangram.core.ledger import Ledger, PoolState
from tangram.core.messages import NodeState
from tangram.core.offers import Offers
from tangram.core.queue import Queue
from tangram.core.topology import chunk_size

Site = list[tuple[PoolState, int]]
"""The pools of one node from which an action could run, with the units that it needs of each."""


class Explainer:
    """Writes sentences about live actions. Changes nothing."""

    def __init__(self, *, ledger: Ledger, queue: Queue, offers: Offers, policy: str) -> None:
        self._ledger = ledger
        self._queue = queue
        self._offers = offers
        self._policy = policy
        """The name of the policy."""

    def explain(self, entry: Entry) -> str:
        """Returns what the action is doing or why it waits."""
        name, lane = entry.id, entry.lane
        if entry.state is State.STARTING:
            return f"{name} is starting on {_holdings_text(entry)}"
        if entry.state is State.RUNNING:
            return f"{name} is running on {_holdings_text(entry)}"
        if entry.state is State.STOPPING:
            assert entry.stop is not None
            return f"{name} is stopping ({entry.stop[1]}) and holds its units until its manager reports Finished"
        if entry.stranded_at is not None:
            return self.impossible(entry)
        blocker = self._blocker(entry)
        if blocker is not None:
            return f"{name} waits behind {blocker.id}, which goes first and waits {self._waiting_reason(blocker)}"
        assert lane is not None, name
        first = self._queue.head_of(lane, self._ledger.now)
        if first is not entry:
            ahead = f"up to {_pluralized(lane.waiting - 1, 'action')} of run {entry.run.name}"
            return f"{name} waits behind {ahead}; the first of them waits {self._waiting_reason(first)}"
        return f"{name} waits for {self._shortage_text(entry)}"

    def _waiting_reason(self, entry: Entry) -> str:
        """Returns what an action lacks that keeps others waiting. If it is itself behind others, names the first of
        them."""
        first = entry
        # Each run has one blocker per pool, so a chain is rarely longer than the number of runs.
        for _ in range(len(self._queue.runs) + 1):
            ahead = self._blocker(first)
            if ahead is None or ahead is entry:
                break
            first = ahead
        if first is entry:
            return f"for {self._shortage_text(entry)}"
        return f"behind {first.id}, which waits for {self._shortage_text(first)}"

    def _sites(self, entry: Entry) -> list[Site]:
        """Returns the sites on which it could run if all units were free."""
        ledger = self._ledger
        on_node = [need for need in _needs(entry) if "" not in ledger.kinds[need[0]]]
        nodes = [entry.node]
        if on_node and not entry.node:
            up = [node for node, state in ledger.nodes.items() if state is NodeState.UP]
            nodes = self._offers.nodes_for_all(entry, on_node) or [
                node for node in up if ledger.node_could_hold(on_node, node)
            ]
        return [[(ledger.pool_on(kind, node), units) for kind, units in _needs(entry)] for node in nodes]

    def _blocker(self, entry: Entry) -> Entry | None:
        """Returns an action ahead that has closed a site with room for it, or that has closed all sites."""
        blockers = []
        for site in self._sites(entry):
            blocker = self._closed_by(entry, site)
            if blocker is not None and not _short(entry, site):
                return blocker
            blockers.append(blocker)
        return blockers[0] if blockers and None not in blockers else None

    def _closed_by(self, entry: Entry, site: Site) -> Entry | None:
        for pool, _ in site:
            blocker = self._queue.pool_closed_by(pool, entry, self._ledger.now)
            if blocker is not None:
                return blocker
        return None

    def _shortage_text(self, entry: Entry) -> str:
        """Returns the pools that an action lacks and their free units, on the open node that lacks least."""
        sites = self._sites(entry)
        sites = [site for site in sites if self._closed_by(entry, site) is None] or sites
        best = min(sites, key=lambda site: (len(_short(entry, site)), -site[0][0].free))
        short = _short(entry, best)
        if not short:
            where = ", ".join(pool.name for pool, _ in best)
            return f"its turn: {where} would hold it, but policy {self._policy} has not started it yet"
        parts = []
        for pool, units in short:
            free, total = amount_text(pool.kind, max(0, pool.free)), amount_text(pool.kind, pool.total)
            apart = ", but apart" if pool.free >= pool.counted(units) else ""
            parts.append(f"{_wanted(pool.kind, units)} of {pool.name}, where {free} of {total} are free{apart}")
        return " and ".join(parts) + self._shared_node_text(entry)

    def _shared_node_text(self, entry: Entry) -> str:
        """Adds why an action waits for a particular node although its own needs might be met on another one."""
        on_node = [need for need in _needs(entry) if "" not in self._ledger.kinds[need[0]]]
        if entry.sandbox is None or not self._offers.nodes_for_all(entry, on_node):
            return ""
        return f"; its node must be one that could hold all actions of sandbox {entry.sandbox.id}"

    def impossible(self, entry: Entry) -> str:
        """Returns what no pool can give, and the largest amount that one has."""
        kinds = self._ledger.kinds
        for kind, units in _needs(entry):
            pools = [pool for node, pool in kinds.get(kind, {}).items() if not entry.node or node in ("", entry.node)]
            if not pools:
                known = ", ".join(sorted(known for known, some in kinds.items() if some)) or "none"
                where = f" on node {entry.node}" if entry.node else ""
                return f"{entry.id} requests pool kind {kind}, which does not exist{where}; kinds: {known}"
            if not any(pool.could_fit(units) for pool in pools):
                most = max(pools, key=lambda pool: pool.total)
                largest = f"{most.name}, where its sandbox is," if entry.node and most.node else "the largest such pool"
                needed = f"at least {_wanted(kind, units)} of {kind}"
                return f"{entry.id} requests {needed}; {largest} has {amount_text(kind, most.total)}"
        needed = ", ".join(f"{_wanted(kind, units)} of {kind}" for kind, units in _needs(entry))
        return f"{entry.id} requests {needed} together; no node that is up has all of them"


def _holdings_text(entry: Entry) -> str:
    return ", ".join(f"{amount_text(held.pool.kind, held.units)} of {held.pool.name}" for held in entry.holdings)


def _needs(entry: Entry) -> list[Need]:
    return [*entry.needs, (MEMORY, entry.memory)] if entry.memory else [*entry.needs]


def _short(entry: Entry, site: Site) -> Site:
    """Returns the pools of a site that have too few units for the action, with its needs. For undeclared CPU that is
    the last reserve that the policy chose."""
    needed = [
        (pool, min(max(entry.learned_reserve, 1), pool.total) if units == LEARNED else units) for pool, units in site
    ]
    return [(pool, units) for pool, units in needed if not pool.fits(units)]


def _wanted(kind: str, units: int) -> str:
    if kind == GPU and chunk_size(units) != units:
        return f"{units} devices (a chunk of {chunk_size(units)})"
    return amount_text(kind, units)


def amount_text(kind: str, units: int) -> str:
    """`0.5 cores`, `512 MiB`, `1 device`, `3 units`."""
    if units == LEARNED:
        return "some"
    if kind == CPU:
        return _pluralized(units / CORE, "core")
    if kind == MEMORY:
        return f"{units} MiB"
    return _pluralized(units, "device" if kind == GPU else "unit")


def _pluralized(number: float, noun: str) -> str:
    """`1 core`, `0.5 cores`."""
    return f"{number:.15g} {noun}" if number == 1 else f"{number:.15g} {noun}s"
