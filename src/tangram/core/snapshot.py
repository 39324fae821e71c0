"""The snapshot: a read-only live view of queue, pools and knowledge, as a policy sees it.

Owns the order in which waiting actions are offered: fair share over runs first, then ageing, then the policy's own
order, skipping what cannot start. Never writes the ledger. Its `candidates()` promises that every action it yields
fits, at its minimum, at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heappop
from typing import TYPE_CHECKING

import msgspec

from tangram.core.action import State
from tangram.core.demand import CORE, CPU, GPU, LEARNED, MEMORY, Need
from tangram.core.lanes import Entry, Lane, Run, Waiters
from tangram.core.ledger import PoolState
from tangram.core.messages import NodeState
from tangram.core.profile import Estimate
from tangram.core.queue import Lack
from tangram.errors import InvariantError

if TYPE_CHECKING:
    from tangram.core.scheduler import Scheduler

ESTIMATE_FRESH_S = 2.0
"""An estimate made at submission serves this long; later ones may have learned more."""


PEAK_MEMORY_S = 60.0
"""How long the most that inelastic actions held is remembered."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A waiting action that fits at its minimum on this node."""

    entry: Entry
    node: str


class Snapshot:
    """Live: it changes with every decision that the scheduler applies."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ledger = scheduler.ledger
        self._queue = scheduler.queue
        self._residents = scheduler.residents
        self.now = 0.0
        self.changed = scheduler.queue.changed
        """CPU pools whose free units or elastic actions changed since the last round."""
        self.vacated = scheduler.queue.vacated
        """Device pools in which something changed since the last round."""
        self.last_offer: Candidate | None = None
        """The last candidate that was offered."""
        self._short: PoolState | None = None
        """A pool, of units that are held, which had too few for the action that `fit` looked at last ..."""
        self._short_of = 0
        """... and how many it would have needed."""

    # ---- reading ----

    def pool(self, kind: str, node: str) -> PoolState:
        """The pool of that kind on the node, or the one that belongs to no node."""
        try:
            pools = self._ledger.kinds[kind]
            return pools[node] if node in pools else pools[""]
        except KeyError:
            raise InvariantError(f"there is no pool of kind {kind} on node {node!r}") from None

    def estimate(self, entry: Entry) -> Estimate:
        """What is believed of the action now."""
        estimate = entry.estimate
        if estimate is None or (entry.lane is not None and self.now - entry.estimated_at > ESTIMATE_FRESH_S):
            estimate = entry.estimate = self._scheduler.knowledge.estimate(entry.action)
            entry.estimated_at = self.now
            entry.wanted = 0
        return estimate

    def running(self, pool: PoolState) -> dict[str, Entry]:
        """The elastic actions that hold units of a CPU pool, in order of their start."""
        return self._scheduler.grants.elastic_by_pool.get(pool.name, {})

    def due(self, most: int) -> Iterator[Entry]:
        """Up to `most` running actions whose review is due."""
        reviews = self._scheduler.reviews
        while reviews and reviews[0][0] <= self.now and most:
            when, _, entry, attempt = heappop(reviews)
            if entry.state is State.RUNNING and entry.attempts == attempt and entry.review_at == when:
                most -= 1
                yield entry

    def ages_in_s(self, entry: Entry) -> float:
        """Seconds until it will have been submitted `ageing_s` ago."""
        return entry.submitted_at + self._scheduler.limits.ageing_s - self.now

    def aged(self, entry: Entry) -> bool:
        """It was submitted longer than `ageing_s` ago."""
        return self._queue.is_aged(entry, self.now)

    def look_again(self, pool: PoolState, after_s: float) -> None:
        """Offer what waits for this pool again after a while, even if nothing else happens."""
        self._scheduler.wake_later(pool, after_s)

    def offered(self, kind: str) -> float:
        """Units of this kind that arriving elastic work keeps busy at its minimum, on average."""
        return self._scheduler.load.units(kind, self.now)

    def headroom(self, pool: PoolState) -> float:
        """Milli-cores to leave for inelastic actions: the most that they held lately, at most half of the pool."""
        now = self.now
        inelastic = pool.held - pool.elastic_held
        pool.peak = max(float(inelastic), pool.peak * math.exp((pool.peak_at - now) / PEAK_MEMORY_S))
        pool.peak_at = now
        return max(0.0, min(pool.peak, pool.total / 2) - inelastic)

    def holders(self, pool: PoolState) -> list[tuple[Entry, int]]:
        """Every action that holds units of a pool, with how many. A pass over all actions that hold something."""
        return [
            (entry, holding.units)
            for entry in self._scheduler.grants.holding.values()
            for holding in entry.holdings
            if holding.pool is pool
        ]

    @property
    def pools(self) -> dict[str, PoolState]:
        return self._ledger.pools

    def free_chunks(self) -> dict[str, tuple[int, ...]]:
        """Per device pool, how many chunks of each size are free to be granted."""
        return {pool.name: pool.free_chunks() for pool in self._ledger.kinds.get(GPU, {}).values()}

    def reserve(self, entry: Entry, pool: PoolState) -> int:
        """Milli-cores to reserve on this pool for an action of which nobody declared its CPU."""
        wanted = entry.wanted
        if not wanted or self.now - entry.estimated_at > ESTIMATE_FRESH_S:
            wanted = self._scheduler.policy.reserve(entry, self)
            if type(wanted) is not int or wanted < 1:
                what = f"policy {self._scheduler.policy.name} reserves {wanted!r} for {entry.id}"
                raise self._scheduler.bug(f"{what}, expected milli-cores as a whole number, at least 1", entry)
            wanted = entry.wanted = min(wanted, entry.action.demand.pools[CPU].max)
        return wanted if wanted <= pool.total else max(1, pool.total)

    def seconds(self, entry: Entry, pool: PoolState, units: int) -> float:
        """Believed duration of the action on that many units of the pool."""
        count = units / CORE if pool.kind == CPU else units
        estimate = self.estimate(entry)
        if entry.elastic != pool.kind:
            return estimate.work_s
        speedup = entry.action.demand.speedup
        if speedup is not None:
            return estimate.work_s / speedup.at(count)
        return estimate.work_s / (count**estimate.exponent if count > 1.0 else count)

    def remaining_s(self, entry: Entry) -> float:
        """Believed seconds until a running action ends at its present speed."""
        done_s = entry.done_at(self.now) if entry.started_at is not None else 0.0
        return self.estimate(entry).remaining_s(done_s) / max(entry.speed, 1e-9)

    def waiting(self, pool: PoolState) -> int:
        """How many actions wait that may run from this pool."""
        count = 0
        for lane in self._queue.lanes(pool):
            count += lane.waiting
        return count

    def waiting_counts(self, pool: PoolState) -> tuple[int, int]:
        """How many actions wait for this pool that are elastic in it, and how many others for lack of its units."""
        elastic = rigid = 0
        for lane in self._queue.lanes(pool):
            if lane.elastic == pool.kind:
                elastic += lane.waiting
                continue
            first = lane.first()[3]
            # Those without a place may wait for memory instead; only the first of them is sure to want units now.
            asking = 1 if first.memory else lane.waiting
            for kind, units in first.needs:
                if (
                    kind == pool.kind
                    and asking * (self.reserve(first, pool) if units == LEARNED else units) > pool.free
                ):
                    rigid += lane.waiting
        return elastic, rigid

    def waiting_elastic(self, pool: PoolState, most: int) -> list[Entry]:
        """Up to `most` of the waiting actions that are elastic in this pool: the top of each lane's heap."""
        found: list[Entry] = []
        for lane in self._queue.lanes(pool):
            if lane.elastic == pool.kind:
                found.extend(item[3] for item in lane.heap[:most] if item[3].lane is lane)
        return found[:most]

    def waiting_in_order(self, pool: PoolState, most: int) -> list[Entry]:
        """Up to `most` waiting actions whose elastic pool this is, or that need its devices, by arrival."""
        found: list[Entry] = []
        for lane in self._queue.lanes(pool):
            if lane.elastic == pool.kind or (pool.kind == GPU and not lane.elastic):
                waiting = (entry for entry in lane.fifo if entry.lane is lane)
                found.extend(entry for _, entry in zip(range(most), waiting, strict=False))
        return sorted(found)[:most]

    def resident_free(self, entry: Entry, node: str) -> tuple[int, ...]:
        """The devices of the widest admissible copy of the action's service that is loaded and free on the node."""
        amounts = entry.action.demand.pools.get(GPU)
        pool = self._ledger.kinds.get(GPU, {}).get(node)
        best: tuple[int, ...] = ()
        if amounts is None or pool is None:
            return best
        for devices in self._residents.devices(entry.action.service, node):
            if len(devices) > len(best) and amounts.admits(len(devices)) and pool.devices_free(devices):
                best = devices
        return best

    def is_loaded(self, entry: Entry) -> bool:
        """Is the action's service loaded on free devices that it could run on?"""
        pools, amounts = self._ledger.kinds.get(GPU, {}), entry.action.demand.pools.get(GPU)
        if amounts is None:
            return False
        return any(
            entry.node in ("", node) and amounts.admits(len(devices)) and pools[node].devices_free(devices)
            for node, devices in self._residents.places(entry.action.service)
            if node in pools
        )

    def resident_degrees(self, entry: Entry, node: str) -> list[int]:
        """The degrees at which the action's service is loaded on free devices of the node."""
        pool = self._ledger.kinds[GPU][node]
        loaded = self._residents.devices(entry.action.service, node)
        return [len(devices) for devices in loaded if pool.devices_free(devices)]

    def restore_s(self, service: str) -> float:
        """Seconds that loading the service took lately; a guess until it was seen."""
        return self._residents.restore_s(service)

    def batch_max(self, service: str) -> int:
        """How many calls the service takes at once."""
        return self._residents.batch_max(service)

    def waiting_lanes(self, pool: PoolState) -> Iterator[Lane]:
        """Those in which somebody waits who may run from this pool."""
        return self._queue.lanes(pool)

    def called_services(self) -> Iterable[tuple[str, int]]:
        """The services that were called, with the devices that the last call of each had."""
        return self._residents.services()

    def has_free_copy(self, service: str) -> bool:
        """Is it loaded, or about to be, on devices that are free?"""
        pools = self._ledger.kinds.get(GPU, {})
        return any(
            node in pools and pools[node].devices_free(devices) for node, devices in self._residents.places(service)
        )

    def is_anywhere(self, service: str) -> bool:
        """Is it loaded, or about to be, on any devices?"""
        return bool(self._residents.places(service))

    def calls_per_s(self, service: str) -> float:
        """How often it was called lately."""
        return self._residents.calls_per_s(service, self.now)

    def sure_worth(self, service: str) -> float:
        """Seconds of restoring per second that it saves the callers of this service, at least, that it is loaded."""
        return self._residents.sure_worth(service, self.now)

    def least_worth(self, pool: PoolState, units: int, *, smallest: bool = False) -> tuple[tuple[int, ...], float]:
        """Of the free device sets of that size the one whose services are worth least, and their worth. There must be
        one. `smallest`: of those that split no larger chunk than necessary."""
        best: tuple[int, ...] = ()
        least = math.inf
        for devices in pool.free_places(units, smallest=smallest):
            worth = self._residents.worth_on(pool.node, devices, self.now)
            if worth < least:
                best, least = devices, worth
        assert best, (pool.name, units)
        return best, least

    # ---- offering ----

    def candidates(self) -> Iterator[Candidate]:
        """Waiting actions that fit at their minimum, in fair order. One that is passed over waits on."""
        queue, strict = self._queue, self._scheduler.policy.strict
        if self.now >= queue.ageing_at:
            for lane in queue.newly_aged(self.now):
                if self.fit(lane.oldest()) is None:
                    self._leave_waiting(lane, lane.oldest(), None)
        active = queue.active
        while active:
            lane, entry, aged = self._head(self._poorest(active))
            if lane.lacks is not None and lane.lacks.free < lane.least and not aged:
                if len(active) == 1 and len(lane.run.open) == 1:
                    queue.set_aside_for(lane, lane.lacks, lane.least, self.now)
                else:
                    queue.set_aside_all(lane.lacks, self.now)
                continue
            node = self.fit(entry)
            if node is not None:
                self.last_offer = Candidate(entry, node)
                yield self.last_offer
                if entry.lane is lane and not entry.node and (idle := self.withheld(entry)):
                    # Where most is left it is not wanted; but a smaller node may be idle.
                    node = next((pool.node for pool in idle if pool.node), "")
                    self.last_offer = Candidate(entry, node)
                    yield self.last_offer
                if entry.lane is not lane:
                    continue
            elif self._short is not None and not aged and not strict:
                # The usual case, made short: units are in use, and nobody is kept from them.
                least = self._short_of if len(entry.needs) == 1 else 0
                queue.set_aside_for(lane, self._short, least, self.now)
                if lane.signature is not None:
                    for other in queue.like(lane, self.now):
                        queue.set_aside_for(other, self._short, least, self.now)
                continue
            lack = self._leave_waiting(lane, entry, node)
            if node is None and not aged:
                behind = (*lack.behind, entry) if entry.closed else lack.behind
                for other in queue.like(lane, self.now):
                    queue.set_aside(other, Lack(lack.waiters, behind), self.now)

    def _poorest(self, active: dict[str, Run]) -> Run:
        """The run with the smallest standing, see `RunUsage`; ties go to the one served longest ago."""
        runs = iter(active.values())
        best = next(runs)
        if len(active) == 1:
            return best
        least = best.usage.standing(self.now)
        for run in runs:
            standing = run.usage.standing(self.now)
            if standing < least or (standing == least and run.served < best.served):
                best, least = run, standing
        return best

    def _head(self, run: Run) -> tuple[Lane, Entry, bool]:
        """The run's first action: its oldest aged one, else the first in the policy's order, where calls of services
        that are loaded on free devices go first unless order counts: every change of service costs a restore."""
        aged_since, strict = self.now - self._queue.ageing_s, self._scheduler.policy.strict
        best: tuple[int, float, int, Entry] | None = None
        aged: Entry | None = None
        for lane in run.open.values():
            oldest = lane.fifo[0]
            if oldest.lane is not lane:
                oldest = lane.oldest()
            if oldest.submitted_at <= aged_since and (aged is None or oldest.seq < aged.seq):
                aged = oldest
            first = lane.heap[0]
            if first[3].lane is not lane:
                first = lane.first()
            if lane.service and not strict and self.is_loaded(first[3]):
                first = (first[0], -math.inf, first[2], first[3])
            if best is None or first < best:
                best = first
        assert best is not None
        entry = best[3] if aged is None else aged
        assert entry.lane is not None
        return entry.lane, entry, aged is not None

    def pass_over(self, lane: Lane) -> None:
        """The policy left an open lane waiting."""
        entry = self._queue.head_of(lane, self.now)
        self._leave_waiting(lane, entry, self.fit(entry))

    def _leave_waiting(self, lane: Lane, entry: Entry, node: str | None) -> Lack:
        """Set the lane aside until something changes for its first action. Where order counts, that action closes what
        it waits for to those behind it; not, though, while no pool could hold it anyway."""
        lack = self._lack(entry) if node is None else self._passed_over(entry, node)
        in_order = self._scheduler.policy.strict or self._queue.is_aged(entry, self.now)
        if in_order and self._ledger.could_hold(entry.needs, entry.node, entry.memory):
            self._queue.close(entry, lack, self.now)
        elif entry.closed:
            self._queue.reopen(entry)
        coming = self._coming(entry)
        if coming:
            self._queue.close(entry, Lack((), (), coming), self.now)
        self._queue.set_aside(lane, lack, self.now)
        return lack

    def _coming(self, entry: Entry) -> list[Waiters]:
        """Memory that will be enough for a sandbox once others have yielded theirs, as instances of functions do. Calls
        behind it in the order may not take it for new ones, or it would never come together."""
        if not entry.memory or entry.is_guest:
            return []
        yielding = self._scheduler.places.yielding
        pools = [pool for node, pool in self._ledger.kinds.get(MEMORY, {}).items() if yielding.get(node)]
        return [
            self._queue.of_guests(pool) for pool in pools if pool.free < entry.memory <= pool.free + yielding[pool.node]
        ]

    def awaits_yielding(self) -> Entry | None:
        """Who goes first of those that wait for memory which sandboxes that yield would be enough for."""
        yielding, queue = self._scheduler.places.yielding, self._queue
        pools = self._ledger.kinds.get(MEMORY, {}).values()
        found = [queue.first_short_of(pool, yielding.get(pool.node, 0), self.now) for pool in pools]
        waiting = [entry for entry in found if entry is not None]
        first = waiting[0] if waiting else None
        for entry in waiting[1:]:
            if first is not None and queue.goes_before(entry, first, self.now):
                first = entry
        return first

    def _passed_over(self, entry: Entry, node: str) -> Lack:
        """Where an action that the policy left waiting is tried again. An idle pool is never withheld."""
        pools = [self.pool(kind, node) for kind, _ in entry.needs]
        waiters = [self._queue.of_pool(pool) for pool in pools if pool.held or pool.spent]
        for pool in pools:
            self._scheduler.wake_when_refilled(pool, pool.free + 1)
        if not waiters:
            names = ", ".join(pool.name for pool in pools)
            raise InvariantError(
                f"policy {self._scheduler.policy.name} passed over {entry.id} though nobody uses {names}",
                self._scheduler.story(entry.id),
            )
        if node and not entry.node:
            # Another node may become idle, or have the memory for its sandbox.
            kinds = [pool.kind for pool in pools if pool.node] + [MEMORY] * bool(entry.memory)
            waiters.extend(self._queue.of_kind(kind) for kind in kinds)
        queue = self._queue
        wanted = [pool for pool in pools if entry.elastic in ("", pool.kind)]
        if entry.node or not node:
            return Lack(waiters, (), [queue.of_pool(pool) for pool in wanted])
        on_node = [pool for pool in wanted if pool.node]
        close = [queue.of_pool(pool) for pool in wanted if not pool.node]
        for other in self._possible(entry, [need for need in entry.needs if self.pool(need[0], node).node]):
            close.extend(queue.of_newcomers(self.pool(pool.kind, other)) for pool in on_node)
        return Lack(waiters, (), close, node, [queue.of_pool(pool) for pool in on_node])

    # ---- fitting ----

    def fit(self, entry: Entry) -> str | None:
        """The node where it fits now, empty if it needs none; None: it fits nowhere."""
        self._short = None
        kinds, node, needs = self._ledger.kinds, entry.node, entry.needs
        if node and len(needs) == 1:
            kind, units = needs[0]
            pool = kinds[kind].get(node)
            if pool is not None:
                return node if self._has(pool, units, entry) else None
        anywhere: list[Need] = []
        placed = False
        for need in needs:
            pools = kinds[need[0]]
            pool = pools.get(node)
            if pool is None:
                pool = pools.get("")
                if pool is None:
                    if node:
                        return None
                    anywhere.append(need)
                    continue
            elif node:
                placed = True
            if not self._has(pool, need[1], entry):
                return None
        if anywhere:
            return self._best_node(entry, anywhere)
        return node if placed else ""

    def _has(self, pool: PoolState, units: int, entry: Entry) -> bool:
        """Does the pool have these units for the action, and is it open to it?"""
        if pool.window is not None and self._ledger.refill(pool, self.now):
            self._queue.wake(pool)
        if units == LEARNED:
            units = self.reserve(entry, pool)
        if not pool.fits(units):
            if pool.window is None:
                self._short, self._short_of = pool, units
            return False
        queue = self._queue
        return not queue.closures or queue.closed_by(queue.of_pool(pool), entry, self.now) is None

    def _best_node(self, entry: Entry, needs: list[Need]) -> str | None:
        """Where it fits now and leaves most of the scarcest of its resources; a loaded service wins."""
        kinds, states, queue = self._ledger.kinds, self._ledger.nodes, self._queue
        if entry.memory:
            needs = [*needs, (MEMORY, entry.memory)]
        if any(kind not in kinds for kind, _ in needs):
            return None
        best, best_score = None, -1.0
        for node in self.nodes_for_all(entry, needs) or kinds[needs[0][0]]:
            if states[node] is not NodeState.UP:
                continue
            score = 1.0
            for kind, units in needs:
                pool = kinds[kind].get(node)
                if pool is None or not self._has(pool, units, entry):
                    break
                if queue.closures and queue.kept_by(pool, entry, self.now) is not None:
                    break
                score = min(score, (pool.free - max(units, 0)) / pool.total)
            else:
                if entry.action.service and self.resident_free(entry, node):
                    score += 1.0
                if score > best_score:
                    best, best_score = node, score
        self._short = None  # where it fits on no node, no single pool is what it lacks
        return best

    def nodes_for_all(self, entry: Entry, needs: list[Need]) -> list[str]:
        """The nodes that could hold these needs and, one by one, all that waits for the same sandbox. Empty: there is
        none, or it is alone; its own needs decide then."""
        wants = entry.place.wants if entry.place is not None else ()
        if not wants:
            return []
        ledger = self._ledger
        together = [*needs, *[want for want in wants if "" not in ledger.kinds.get(want[0], ())]]
        up = [node for node, state in ledger.nodes.items() if state is NodeState.UP]
        return [node for node in up if ledger.node_could_hold(together, node)]

    def _lack(self, entry: Entry) -> Lack:
        """Why it fits nowhere."""
        kinds, queue, node = self._ledger.kinds, self._queue, entry.node
        missing: list[Waiters] = []
        short: list[PoolState] = []
        on_node: list[Need] = []
        for kind, units in entry.needs:
            pool = kinds[kind].get("") or kinds[kind].get(node)
            if pool is None:
                on_node.append((kind, units))
            elif not self._has(pool, units, entry):
                missing.append(queue.of_pool(pool))
                short.append(pool)
                self._scheduler.wake_when_refilled(pool, units)
        if missing or node:
            # On a node that has lost a pool it waits for one of that kind to join.
            missing.extend(queue.of_kind(kind) for kind, _ in on_node if node)
            return Lack(missing, self._behind(entry, short), missing)
        return self._lack_of_node(entry, on_node)

    def _behind(self, entry: Entry, pools: list[PoolState]) -> list[Entry]:
        """Those who go before it and have closed one of these to it."""
        if not self._queue.closures:
            return []
        blockers = [self._queue.kept_by(pool, entry, self.now) for pool in pools]
        return list({blocker.seq: blocker for blocker in blockers if blocker is not None}.values())

    def _possible(self, entry: Entry, needs: list[Need]) -> list[str]:
        """The nodes that could hold these needs of an action without a place, if they were free."""
        ledger = self._ledger
        return self.nodes_for_all(entry, needs) or [
            node
            for node, state in ledger.nodes.items()
            if state is NodeState.UP and ledger.node_could_hold(needs, node)
        ]

    def _lack_of_node(self, entry: Entry, needs: list[Need]) -> Lack:
        """It fits on no node. If one has the memory for its sandbox, it lacks the rest there; else it lacks memory.

        Memory comes back only when sandboxes end, and these need their other units for that: an action without a
        place must not close those.
        """
        kinds, queue, memory = self._ledger.kinds, self._queue, entry.memory
        if memory:
            needs = [*needs, (MEMORY, memory)]
        everywhere = [queue.of_kind(kind) for kind, _ in needs]
        possible = self._possible(entry, needs)
        behind = self._behind(entry, [kinds[kind][node] for node in possible for kind, _ in needs])
        with_memory = [node for node in possible if not memory or kinds[MEMORY][node].free >= memory]
        wants = entry.place.wants if entry.place is not None else ()
        everywhere.extend(queue.of_kind(kind) for kind, _ in wants if queue.of_kind(kind) not in everywhere)
        if not with_memory:
            return Lack(everywhere, behind, [queue.of_newcomers(kinds[MEMORY][node]) for node in possible])
        target = entry.target
        if target not in with_memory:
            first = kinds[needs[0][0]]
            target = max(with_memory, key=lambda node: first[node].free)
        there = [kinds[kind][target] for kind, _ in needs]
        short = [
            queue.of_newcomers(pool)
            for node in with_memory
            for pool, units in [(kinds[kind][node], units) for kind, units in needs]
            if not pool.fits(self.reserve(entry, pool) if units == LEARNED else units)
        ]
        return Lack(everywhere, behind, short, target, [queue.of_pool(pool) for pool in there])

    # ---- an idle pool is never withheld ----

    def withheld(self, entry: Entry) -> list[PoolState]:
        """Idle pools on which a waiting action could start and that nobody ahead of it has closed. None after an event,
        for whoever is first in its lane. Changes nothing."""
        queue, now = self._queue, self.now
        for pools in self._idle(entry):
            if all(queue.kept_by(pool, entry, now) is None for pool in pools):
                return pools
        return []

    def _idle(self, entry: Entry) -> Iterator[list[PoolState]]:
        """Per node, the pools that could hold the action and of which nobody has anything, so that it fits; the memory
        for its sandbox, last, need only be enough."""
        kinds = self._ledger.kinds
        on_node = [need for need in entry.needs if "" not in kinds[need[0]]]
        nodes = [entry.node]
        if on_node and not entry.node:
            if entry.memory:
                on_node.append((MEMORY, entry.memory))
            up = [node for node, state in self._ledger.nodes.items() if state is NodeState.UP]
            nodes = self.nodes_for_all(entry, on_node) or up
        for node in nodes:
            if self._ledger.node_could_hold(on_node, node):
                pools = [self.pool(kind, node) for kind, _ in entry.needs]
                if any(pool.held or pool.spent for pool in pools):
                    continue
                if not all(pool.could_fit(units) for pool, (_, units) in zip(pools, entry.needs, strict=True)):
                    continue
                memory = [self.pool(MEMORY, node)] if entry.memory and on_node else []
                if all(pool.fits(entry.memory) for pool in memory):
                    yield pools + memory
