"""The snapshot: a read-only live view of queue, pools and knowledge, as a policy sees it.

Owns the order in which waiting actions are offered: fair share over runs first, then ageing, then the policy's own
order, skipping what cannot start. Never writes the ledger. Its `candidates()` promises that every action it yields
fits, at its minimum, at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from tangram.core.demand import CORE, CPU, GPU, MEMORY
from tangram.core.ledger import PoolState
from tangram.core.messages import NodeState
from tangram.core.profile import Estimate
from tangram.core.queue import LEARNED, Entry, Lane, Need, Run, Waiters
from tangram.core.topology import Chunks
from tangram.errors import InvariantError

if TYPE_CHECKING:
    from tangram.core.scheduler import Scheduler

ESTIMATE_FRESH_S = 2.0
"""An estimate made at submission serves this long; later ones may have learned more."""

ELDER_FACTOR = 2.0
"""Past this many times `ageing_s` an action goes before everything submitted later, of whatever run. Without it a run
with a large share elsewhere could wait for ever on a pool that poorer runs keep busy."""


class Candidate(msgspec.Struct, frozen=True):
    """A waiting action that fits at its minimum on this node."""

    entry: Entry
    node: str
    aged: bool
    """It has waited past `ageing_s`: nothing later of its run may start before it."""


class Fit(msgspec.Struct, frozen=True):
    """Whether and where an action fits at its minimum."""

    node: str | None
    """None: nowhere now. Empty: it needs no node."""
    lacking: list[Waiters] = []
    """Where a change would let it be tried again."""
    short: list[str] = []
    """The pool kinds that it lacks."""
    close: list[Waiters] = []
    """What it may close to those behind it."""
    target: list[Waiters] = []
    """The pools of the node that an aged action without a place waits for."""


class Snapshot:
    """Live: it changes with every decision that the scheduler applies."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ledger = scheduler.ledger
        self.now = 0.0
        self.changed: dict[str, PoolState] = {}
        """CPU pools whose free units or elastic actions changed since the last round."""

    # ---- reading ----

    def pool(self, kind: str, node: str) -> PoolState:
        """The pool of that kind on the node, or the one that belongs to no node."""
        pools = self._ledger.kinds[kind]
        return pools[node] if node in pools else pools[""]

    def estimate(self, entry: Entry) -> Estimate:
        """What is believed of the action now."""
        estimate = entry.estimate
        if estimate is None or (entry.lane is not None and self.now - entry.estimated_at > ESTIMATE_FRESH_S):
            estimate = entry.estimate = self._scheduler.knowledge.estimate(entry.action)
            entry.estimated_at = self.now
        return estimate

    def running(self, pool: PoolState) -> dict[str, Entry]:
        """The elastic actions that hold units of a CPU pool, in order of their start."""
        return self._scheduler.elastic_by_pool.get(pool.name, {})

    def holders(self, pool: PoolState) -> list[tuple[Entry, int]]:
        """Every action that holds units of a pool, with how many. A pass over all actions that hold something."""
        return [
            (entry, holding.units)
            for entry in self._scheduler.holding.values()
            for holding in entry.holdings
            if holding.pool is pool
        ]

    @property
    def pools(self) -> dict[str, PoolState]:
        return self._ledger.pools

    def free_chunks(self) -> dict[str, tuple[int, ...]]:
        """Per device pool, how many chunks of each size are free."""
        return {
            pool.name: pool.place.free_counts()
            for pool in self._ledger.kinds.get(GPU, {}).values()
            if isinstance(pool.place, Chunks)
        }

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
        for lane in self._lanes(pool):
            count += lane.waiting
        return count

    def waiting_elastic(self, pool: PoolState, most: int) -> tuple[int, list[Entry]]:
        """How many actions wait that are elastic in this pool, and `most` of them: the top of each lane's heap."""
        count, found = 0, []
        for lane in self._lanes(pool):
            if lane.elastic == pool.kind:
                count += lane.waiting
                found.extend(item[3] for item in lane.heap[:most] if item[3].lane is lane)
        return count, found[:most]

    def waiting_in_order(self, pool: PoolState, most: int) -> list[Entry]:
        """Up to `most` waiting actions whose elastic pool this is, by arrival."""
        found: list[Entry] = []
        for lane in self._lanes(pool):
            if lane.elastic == pool.kind:
                waiting = (entry for entry in lane.fifo if entry.lane is lane)
                found.extend(entry for _, entry in zip(range(most), waiting, strict=False))
        return sorted(found)[:most]

    def _lanes(self, pool: PoolState) -> Iterator[Lane]:
        for run in self._scheduler.runs.values():
            if run.waiting:
                for lane in run.lanes.values():
                    if lane.waiting and pool.kind in lane.kinds and lane.node in ("", pool.node):
                        yield lane

    def resident_free(self, entry: Entry, node: str) -> tuple[int, ...]:
        """The devices of the widest admissible copy of the action's service that is loaded and free on the node."""
        amounts = entry.action.demand.pools.get(GPU)
        pool = self._ledger.kinds.get(GPU, {}).get(node)
        best: tuple[int, ...] = ()
        if amounts is None or pool is None:
            return best
        for devices in self._scheduler.residents.devices(entry.action.service, node):
            if len(devices) > len(best) and amounts.admits(len(devices)) and pool.devices_free(devices):
                best = devices
        return best

    def resident_degrees(self, entry: Entry, node: str) -> list[int]:
        """The degrees at which the action's service is loaded on free devices of the node."""
        pool = self._ledger.kinds[GPU][node]
        loaded = self._scheduler.residents.devices(entry.action.service, node)
        return [len(devices) for devices in loaded if pool.devices_free(devices)]

    def restore_s(self, service: str) -> float:
        """Seconds that loading the service took lately; a guess until it was seen."""
        return self._scheduler.residents.restore_s(service)

    def waiting_for_service(self, lane: Lane, service: str, most: int) -> list[Entry]:
        """Waiting actions of one lane that call the same service, by arrival, for riding in one batch."""
        found: list[Entry] = []
        for entry in lane.fifo:
            if len(found) == most:
                break
            if entry.lane is lane and entry.action.service == service:
                found.append(entry)
        return found

    # ---- offering ----

    def candidates(self) -> Iterator[Candidate]:
        """Waiting actions that fit at their minimum, in fair order. One that is passed over waits on."""
        scheduler = self._scheduler
        active, strict = scheduler.active, scheduler.policy.strict
        while active:
            run = self._poorest(active)
            lane, entry, aged = self._head(run)
            if run.blockers and self._overtakes(entry):
                self._set_aside(lane, [scheduler.kind_waiters(kind) for kind in lane.kinds])
                continue
            fit = self.fit(entry)
            if fit.node is None:
                if aged or strict:
                    scheduler.close(entry, fit, aged)
                self._set_aside(lane, fit.lacking)
                continue
            yield Candidate(entry, fit.node, aged)
            if entry.lane is lane:
                self._set_aside(lane, self._passed_over(entry, fit.node))

    def _poorest(self, active: dict[str, Run]) -> Run:
        """The run with the smallest weighted dominant share; ties go to the one that became active first."""
        best: Run | None = None
        for run in active.values():
            if best is None or run.usage.share < best.usage.share:
                best = run
        assert best is not None
        return best

    def _head(self, run: Run) -> tuple[Lane, Entry, bool]:
        """The run's first action: its oldest aged one, else the first in the policy's order."""
        aged_before = self.now - self._scheduler.limits.ageing_s
        best: Lane | None = None
        aged: Entry | None = None
        for lane in run.open.values():
            oldest = lane.oldest()
            if oldest.submitted_at <= aged_before and (aged is None or oldest.seq < aged.seq):
                aged = oldest
            if best is None or lane.first() < best.first():
                best = lane
        if aged is not None and aged.lane is not None:
            return aged.lane, aged, True
        assert best is not None
        return best, best.first()[3], False

    def _overtakes(self, entry: Entry) -> bool:
        """Would starting it pass an aged action of its own run that lacks one of the same kinds?"""
        blockers = entry.run.blockers
        kinds = [kind for kind, _ in entry.needs]
        if entry.place is not None and not entry.place.node:
            kinds.append(MEMORY)
        return any(kind in blockers and blockers[kind].seq < entry.seq for kind in kinds)

    # ---- fitting ----

    def fit(self, entry: Entry) -> Fit:
        """A node where it fits now; or none, what it lacks and where a change would help."""
        lacking: list[Waiters] = []
        short: list[str] = []
        on_node: list[Need] = []
        kinds = self._ledger.kinds
        for kind, minimum in entry.needs:
            units = minimum if minimum != LEARNED else self._scheduler.policy.reserve(entry, self)
            pools = kinds.get(kind)
            if pools and "" in pools:
                if not self._fits_quota(pools[""], units, entry):
                    lacking.append(self._scheduler.pool_waiters(pools[""]))
                    short.append(kind)
            else:
                on_node.append((kind, units))
        node = entry.node
        if not on_node or node:
            self._lacking_on(node, on_node, entry, lacking, short)
            return Fit(None, lacking, short, lacking) if lacking else Fit(node)
        if entry.place is not None and entry.place.memory:
            on_node.append((MEMORY, entry.place.memory))
        if lacking:
            return Fit(None, lacking, short, lacking)
        node = self._best_node(entry, on_node)
        return self._nowhere(on_node) if node is None else Fit(node)

    def _fits_quota(self, pool: PoolState, units: int, entry: Entry) -> bool:
        if pool.pool.window is not None and self._ledger.refill(pool, self.now):
            self._scheduler.wake(pool)
        if pool.fits(units) and not self._closed(self._scheduler.pool_waiters(pool), entry):
            return True
        self._scheduler.wake_when_refilled(pool, units)
        return False

    def _lacking_on(self, node: str, needs: list[Need], entry: Entry, lacking: list[Waiters], short: list[str]) -> None:
        for kind, units in needs:
            pool = self._ledger.kinds.get(kind, {}).get(node)
            waiters = self._scheduler.pool_waiters(pool) if pool else self._scheduler.kind_waiters(kind)
            if pool is None or not pool.fits(units) or self._closed(waiters, entry):
                lacking.append(waiters)
                short.append(kind)

    def _best_node(self, entry: Entry, needs: list[Need]) -> str | None:
        """Where it fits now and the scarcest of its resources is least used; a loaded service wins."""
        scheduler, kinds, states = self._scheduler, self._ledger.kinds, self._ledger.nodes
        for kind, _ in needs:
            if kind not in kinds or self._closed(scheduler.kind_waiters(kind), entry):
                return None
        best, best_score = None, -1.0
        first_units = needs[0][1]
        for node, first in kinds[needs[0][0]].items():
            if first.free < first_units or states[node] is not NodeState.UP:
                continue
            score = 1.0
            for kind, units in needs:
                pool = kinds[kind].get(node)
                if pool is None or not pool.fits(units) or self._closed(scheduler.pool_waiters(pool), entry):
                    break
                score = min(score, pool.free / pool.total)
            else:
                if entry.action.service and self.resident_free(entry, node):
                    score += 1.0
                if score > best_score:
                    best, best_score = node, score
        return best

    def _nowhere(self, needs: list[Need]) -> Fit:
        """It fits on no node. If one has the memory for its sandbox, it lacks the rest there; else it lacks memory.

        Memory comes back only when sandboxes end, and these need their other units for that: an action without a
        place must not close those.
        """
        scheduler, kinds = self._scheduler, self._ledger.kinds
        everywhere = [scheduler.kind_waiters(kind) for kind, _ in needs]
        possible = [
            node
            for node, state in self._ledger.nodes.items()
            if state is NodeState.UP
            and all(node in kinds.get(kind, {}) and kinds[kind][node].total >= units for kind, units in needs)
        ]
        if not possible:
            return Fit(None, everywhere)
        with_memory = [
            node for node in possible if all(kind != MEMORY or kinds[kind][node].free >= units for kind, units in needs)
        ]
        if not with_memory:
            return Fit(None, everywhere, [MEMORY], [scheduler.kind_waiters(MEMORY)])
        first = needs[0][0]
        target = max(with_memory, key=lambda node: kinds[first][node].free)
        short = [kind for kind, units in needs if not kinds[kind][target].fits(units)]
        pools = [scheduler.pool_waiters(kinds[kind][target]) for kind, _ in needs]
        return Fit(None, everywhere, short, [scheduler.kind_waiters(kind) for kind in short], pools)

    def _closed(self, waiters: Waiters, entry: Entry) -> bool:
        """Did somebody who goes before it close this pool?"""
        blocker = waiters.blocker
        if blocker is None or blocker is entry:
            return False
        if blocker.aged and self.now - blocker.submitted_at > ELDER_FACTOR * self._scheduler.limits.ageing_s:
            return entry.seq > blocker.seq
        if blocker.run is not entry.run:
            return entry.run.usage.share >= blocker.run.usage.share
        if blocker.aged:
            return entry.seq > blocker.seq
        before = (-entry.action.priority, entry.key, entry.seq)
        return before > (-blocker.action.priority, blocker.key, blocker.seq)

    def pass_over(self, lane: Lane) -> None:
        """The policy left the first action of an open lane waiting."""
        entry = lane.first()[3]
        fit = self.fit(entry)
        self._set_aside(lane, fit.lacking or self._passed_over(entry, fit.node or ""))

    def _passed_over(self, entry: Entry, node: str) -> list[Waiters]:
        """Where an action that the policy left waiting is tried again. An idle pool is never withheld."""
        pools = [self.pool(kind, node) for kind, _ in entry.needs]
        waiters = [self._scheduler.pool_waiters(pool) for pool in pools if pool.held or pool.spent]
        if not waiters:
            names = ", ".join(pool.name for pool in pools)
            raise InvariantError(
                f"policy {self._scheduler.policy.name} passed over {entry.id} though nobody uses {names}",
                self._scheduler.story(entry.id),
            )
        return waiters

    def _set_aside(self, lane: Lane, lacking: list[Waiters]) -> None:
        """Close the lane until something changes where it lacks."""
        run = lane.run
        del run.open[id(lane)]
        if not run.open:
            del self._scheduler.active[run.name]
        lane.blocked_on = tuple(lacking)
        for waiters in lacking:
            waiters.lanes[id(lane)] = lane
