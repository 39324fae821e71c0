"""Offers: which waiting action the policy may start next, and what each one that cannot start waits for.

Offers waiting actions in the order of the queue (queue.py). Sets aside the lanes whose first action cannot start,
closes pools to the actions behind an aged one, and renews learned reserves. Never writes the ledger. Promises that
every candidate fits, at its minimum, when it is offered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tangram.core.demand import CPU, LEARNED, MEMORY, Need
from tangram.core.lanes import Entry, Lane, Run, Waiters
from tangram.core.ledger import Ledger, PoolState
from tangram.core.messages import NodeState
from tangram.core.policies.base import SchedulingPolicy
from tangram.core.queue import BlockedReason, Queue
from tangram.core.recent_events import RecentEvents
from tangram.core.sandbox_states import SandboxStates
from tangram.core.snapshot import ESTIMATE_FRESH_S, Candidate, Snapshot
from tangram.core.timers import PoolRetries


class Offers:
    """Offers candidates to the policy and sets all other lanes aside."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        queue: Queue,
        sandboxes: SandboxStates,
        snapshot: Snapshot,
        policy: SchedulingPolicy,
        retries: PoolRetries,
        recent_events: RecentEvents,
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._sandboxes = sandboxes
        self._snapshot = snapshot
        self._policy = policy
        self._retries = retries
        self._recent_events = recent_events
        self.last: Candidate | None = None
        self._short: PoolState | None = None
        """A pool of held units that has too few for the action that `fit` checked last."""
        self._short_of = 0
        """The units that the action needs of that pool."""

    def candidates(self) -> Iterator[Candidate]:
        """Yields waiting actions that fit at their minimum, in fair order. An action that is passed over keeps
        waiting."""
        queue, strict = self._queue, self._policy.strict
        if self._ledger.now >= queue.ageing_at:
            for lane in queue.newly_aged(self._ledger.now):
                if self.fit(lane.oldest()) is None:
                    self._leave_waiting(lane, lane.oldest(), None)
        active = queue.active
        while active:
            lane, entry, aged = self._head(self._poorest(active))
            if lane.short_pool is not None and lane.short_pool.free < lane.least and not aged:
                if len(active) == 1 and len(lane.run.open) == 1:
                    queue.set_aside_for(lane, lane.short_pool, lane.least, self._ledger.now)
                else:
                    queue.set_aside_all(lane.short_pool, self._ledger.now)
                continue
            node = self.fit(entry)
            if node is not None:
                self.last = Candidate(entry, node)
                yield self.last
                if entry.lane is lane and not entry.node and (idle := self.withheld(entry)):
                    # The policy declined the node with the most free units, but a smaller node is idle.
                    node = next((pool.node for pool in idle if pool.node), "")
                    self.last = Candidate(entry, node)
                    yield self.last
                if entry.lane is not lane:
                    continue
            elif self._short is not None and not aged and not strict:
                # Fast path for the usual case: the units are in use and no pool is closed.
                least = self._short_of if len(entry.needs) == 1 else 0
                queue.set_aside_for(lane, self._short, least, self._ledger.now)
                if lane.signature is not None:
                    for other in queue.lanes_blocked_alike(lane, self._ledger.now):
                        queue.set_aside_for(other, self._short, least, self._ledger.now)
                continue
            reason = self._leave_waiting(lane, entry, node)
            if node is None and not aged:
                behind = (*reason.behind, entry) if entry.closed else reason.behind
                for other in queue.lanes_blocked_alike(lane, self._ledger.now):
                    queue.set_aside(other, BlockedReason(reason.waiters, behind), self._ledger.now)

    def _poorest(self, active: dict[str, Run]) -> Run:
        """The run with the smallest standing, see `RunUsage`; ties go to the one served longest ago."""
        runs = iter(active.values())
        best = next(runs)
        if len(active) == 1:
            return best
        least = best.usage.standing(self._ledger.now)
        for run in runs:
            standing = run.usage.standing(self._ledger.now)
            if standing < least or (standing == least and run.served < best.served):
                best, least = run, standing
        return best

    def _head(self, run: Run) -> tuple[Lane, Entry, bool]:
        """Returns the first action of a run, with its lane and whether it has aged. The oldest aged action goes first,
        then the policy's order. A policy that is not strict takes calls of services that are loaded on free devices
        first, because every change of service costs a restore."""
        aged_since, strict = self._ledger.now - self._queue.ageing_s, self._policy.strict
        best: tuple[int, float, int, Entry] | None = None
        aged: Entry | None = None
        for lane in run.open.values():
            oldest = lane.fifo[0]
            if oldest.submitted_at <= aged_since and (aged is None or oldest.seq < aged.seq):
                aged = oldest
            first = lane.heap[0]
            if lane.service and not strict and self._snapshot.is_loaded(first[3]):
                first = (first[0], -math.inf, first[2], first[3])
            if best is None or first < best:
                best = first
        assert best is not None
        entry = best[3] if aged is None else aged
        assert entry.lane is not None
        return entry.lane, entry, aged is not None

    def pass_over(self, lane: Lane) -> None:
        """Sets aside an open lane that the policy did not look at."""
        entry = self._queue.head_of(lane, self._ledger.now)
        self._leave_waiting(lane, entry, self.fit(entry))

    def _leave_waiting(self, lane: Lane, entry: Entry, node: str | None) -> BlockedReason:
        """Sets the lane aside until something changes for its first action. If that action has aged or the policy is
        strict, it closes the pools that it lacks to all actions behind it, unless no pool could ever hold it."""
        reason = self._blocked_reason(entry) if node is None else self._passed_over(entry, node)
        in_order = self._policy.strict or self._queue.is_aged(entry, self._ledger.now)
        if in_order and self._ledger.could_hold(entry.needs, entry.node, entry.memory):
            self._queue.close(entry, reason, self._ledger.now)
        elif entry.closed:
            self._queue.reopen(entry)
        coming = self._yielding_memory_waiters(entry)
        if coming:
            self._queue.close(entry, BlockedReason((), (), coming), self._ledger.now)
        self._queue.set_aside(lane, reason, self._ledger.now)
        return reason

    def _yielding_memory_waiters(self, entry: Entry) -> list[Waiters]:
        """Returns the memory pools that will have room for a sandbox once yielding sandboxes, such as idle function
        instances, have ended. They are closed to new instances for calls behind the sandbox: otherwise enough memory
        would never be free at once."""
        if not entry.memory or entry.awaits_instance:
            return []
        yielding = self._sandboxes.yielding
        pools = [pool for node, pool in self._ledger.kinds.get(MEMORY, {}).items() if yielding.get(node)]
        return [
            self._queue.instance_waiters(pool)
            for pool in pools
            if pool.free < entry.memory <= pool.free + yielding[pool.node]
        ]

    def awaits_yielding(self) -> Entry | None:
        """Returns the first of the actions that wait for memory which yielding sandboxes would free."""
        yielding, queue = self._sandboxes.yielding, self._queue
        pools = self._ledger.kinds.get(MEMORY, {}).values()
        heads = [queue.first_short_of(pool, yielding.get(pool.node, 0), self._ledger.now) for pool in pools]
        waiting = [entry for entry in heads if entry is not None]
        first = waiting[0] if waiting else None
        for entry in waiting[1:]:
            if first is not None and queue.goes_before(entry, first, self._ledger.now):
                first = entry
        return first

    def _passed_over(self, entry: Entry, node: str) -> BlockedReason:
        """Returns the pools at which an action that the policy passed over is tried again. Raises InvariantError if
        none of its pools is in use: nothing would ever wake it."""
        pools = [self._ledger.pool_on(kind, node) for kind, _ in entry.needs]
        waiters = [self._queue.pool_waiters(pool) for pool in pools if pool.held or pool.spent]
        for pool in pools:
            self._retries.when_refilled(pool, pool.free + 1)
        if not waiters:
            names = ", ".join(pool.name for pool in pools)
            raise self._recent_events.error(
                f"policy {self._policy.name} passed over {entry.id} although {names} is unused", entry.id
            )
        if node and not entry.node:
            # Another node may become idle, or get room for its sandbox.
            kinds = [pool.kind for pool in pools if pool.node] + [MEMORY] * bool(entry.memory)
            waiters.extend(self._queue.kind_waiters(kind) for kind in kinds)
        queue = self._queue
        elastic_pools = [pool for pool in pools if entry.elastic in ("", pool.kind)]
        if entry.node or not node:
            return BlockedReason(waiters, (), [queue.pool_waiters(pool) for pool in elastic_pools])
        on_node = [pool for pool in elastic_pools if pool.node]
        close = [queue.pool_waiters(pool) for pool in elastic_pools if not pool.node]
        for other in self._possible_nodes(
            entry, [need for need in entry.needs if self._ledger.pool_on(need[0], node).node]
        ):
            close.extend(queue.unplaced_waiters(self._ledger.pool_on(pool.kind, other)) for pool in on_node)
        return BlockedReason(waiters, (), close, node, [queue.pool_waiters(pool) for pool in on_node])

    # ---- fitting ----

    def fit(self, entry: Entry) -> str | None:
        """Returns the node on which the action fits now, an empty string if it needs none, None if it fits nowhere."""
        self._short = None
        kinds, node, needs = self._ledger.kinds, entry.node, entry.needs
        if node and len(needs) == 1:
            kind, units = needs[0]
            pool = kinds[kind].get(node)
            if pool is not None:
                return node if self._has_units(pool, units, entry) else None
        unplaced_needs: list[Need] = []
        placed = False
        for need in needs:
            pools = kinds[need[0]]
            pool = pools.get(node)
            if pool is None:
                pool = pools.get("")
                if pool is None:
                    if node:
                        return None
                    unplaced_needs.append(need)
                    continue
            elif node:
                placed = True
            if not self._has_units(pool, need[1], entry):
                return None
        if unplaced_needs:
            return self._best_node(entry, unplaced_needs)
        return node if placed else ""

    def _has_units(self, pool: PoolState, units: int, entry: Entry) -> bool:
        """Returns whether the pool has these units free and is not closed to the action."""
        if pool.window is not None and self._ledger.refill(pool, self._ledger.now):
            self._queue.wake(pool)
        if units == LEARNED:
            units = self.renew_reserve(entry, pool)
        if not pool.fits(units):
            if pool.window is None:
                self._short, self._short_of = pool, units
            return False
        queue = self._queue
        return not queue.closures or not queue.is_closed(pool, entry, self._ledger.now)

    def renew_reserve(self, entry: Entry, pool: PoolState) -> int:
        """The milli-cores to reserve on this pool for an action that declares no CPU. Asks the policy again if the
        estimate behind the last answer is older than ESTIMATE_FRESH_S."""
        now = self._ledger.now
        stale = now - entry.estimated_at > ESTIMATE_FRESH_S
        if stale or not entry.learned_reserve:
            if stale and not self._policy.strict:
                entry.estimate, entry.estimated_at = self._snapshot.estimate(entry), now
            reserve = self._policy.reserve(entry, self._snapshot)
            if type(reserve) is not int or reserve < 1:
                raise self._recent_events.error(
                    f"policy {self._policy.name} reserves {reserve!r} for {entry.id}, expected milli-cores as a whole "
                    "number, at least 1",
                    entry.id,
                )
            entry.learned_reserve = min(reserve, entry.action.demand.pools[CPU].max)
        return entry.reserve_on(pool)

    def _best_node(self, entry: Entry, needs: list[Need]) -> str | None:
        """Returns the node on which it fits and leaves the largest part of its scarcest resource free. A node on which
        its service is loaded wins."""
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
                if pool is None or not self._has_units(pool, units, entry):
                    break
                if queue.closures and queue.pool_closed_by(pool, entry, self._ledger.now) is not None:
                    break
                score = min(score, (pool.free - max(units, 0)) / pool.total)
            else:
                if entry.action.service and self._snapshot.resident_free(entry, node):
                    score += 1.0
                if score > best_score:
                    best, best_score = node, score
        self._short = None  # an action that fits on no node does not lack one particular pool
        return best

    def nodes_for_all(self, entry: Entry, needs: list[Need]) -> list[str]:
        """Returns the nodes that could hold these needs and, one at a time, every other waiting action of the same
        sandbox. Empty if there is no such node or no other action: then its own needs decide."""
        wants = entry.sandbox.wants if entry.sandbox is not None else ()
        if not wants:
            return []
        ledger = self._ledger
        combined = [*needs, *[want for want in wants if "" not in ledger.kinds.get(want[0], ())]]
        up = [node for node, state in ledger.nodes.items() if state is NodeState.UP]
        return [node for node in up if ledger.node_could_hold(combined, node)]

    def _blocked_reason(self, entry: Entry) -> BlockedReason:
        """Returns why an action fits nowhere."""
        kinds, queue, node = self._ledger.kinds, self._queue, entry.node
        missing: list[Waiters] = []
        short: list[PoolState] = []
        on_node: list[Need] = []
        for kind, units in entry.needs:
            pool = kinds[kind].get("") or kinds[kind].get(node)
            if pool is None:
                on_node.append((kind, units))
            elif not self._has_units(pool, units, entry):
                missing.append(queue.pool_waiters(pool))
                short.append(pool)
                self._retries.when_refilled(pool, units)
        if missing or node:
            # If its node has lost a pool, it waits for a pool of that kind to join.
            missing.extend(queue.kind_waiters(kind) for kind, _ in on_node if node)
            return BlockedReason(missing, self._behind(entry, short), missing)
        return self._blocked_reason_without_node(entry, on_node)

    def _behind(self, entry: Entry, pools: list[PoolState]) -> list[Entry]:
        """Returns the actions ahead of it that have closed one of these pools."""
        if not self._queue.closures:
            return []
        blockers = [self._queue.pool_closed_by(pool, entry, self._ledger.now) for pool in pools]
        return list({blocker.seq: blocker for blocker in blockers if blocker is not None}.values())

    def _possible_nodes(self, entry: Entry, needs: list[Need]) -> list[str]:
        """Returns the nodes that could hold these needs if all their units were free."""
        ledger = self._ledger
        return self.nodes_for_all(entry, needs) or [
            node
            for node, state in ledger.nodes.items()
            if state is NodeState.UP and ledger.node_could_hold(needs, node)
        ]

    def _blocked_reason_without_node(self, entry: Entry, needs: list[Need]) -> BlockedReason:
        """Returns why an action without a node fits on no node. It lacks memory unless a node has enough for its
        sandbox; then it lacks the other units there.

        Memory is freed only when sandboxes end, and their actions need other units for that: an action that lacks
        memory closes nothing else.
        """
        kinds, queue, memory = self._ledger.kinds, self._queue, entry.memory
        if memory:
            needs = [*needs, (MEMORY, memory)]
        waiters = [queue.kind_waiters(kind) for kind, _ in needs]
        possible = self._possible_nodes(entry, needs)
        behind = self._behind(entry, [kinds[kind][node] for node in possible for kind, _ in needs])
        with_memory = [node for node in possible if not memory or kinds[MEMORY][node].free >= memory]
        wants = entry.sandbox.wants if entry.sandbox is not None else ()
        waiters.extend(queue.kind_waiters(kind) for kind, _ in wants if queue.kind_waiters(kind) not in waiters)
        if not with_memory:
            return BlockedReason(waiters, behind, [queue.unplaced_waiters(kinds[MEMORY][node]) for node in possible])
        target = entry.target
        if target not in with_memory:
            first = kinds[needs[0][0]]
            target = max(with_memory, key=lambda node: first[node].free)
        target_pools = [kinds[kind][target] for kind, _ in needs]
        short = [
            queue.unplaced_waiters(pool)
            for node in with_memory
            for pool, units in [(kinds[kind][node], units) for kind, units in needs]
            if not pool.fits(self.renew_reserve(entry, pool) if units == LEARNED else units)
        ]
        return BlockedReason(waiters, behind, short, target, [queue.pool_waiters(pool) for pool in target_pools])

    # ---- an idle pool is never withheld ----

    def withheld(self, entry: Entry) -> list[PoolState]:
        """Checks that the scheduler is work-conserving. Returns idle pools on which a waiting action could start and
        that no action ahead of it has closed. After an event there are none for the first action of a lane. Changes
        nothing."""
        queue, now = self._queue, self._ledger.now
        for pools in self._idle_pools(entry):
            if all(queue.pool_closed_by(pool, entry, now) is None for pool in pools):
                return pools
        return []

    def _idle_pools(self, entry: Entry) -> Iterator[list[PoolState]]:
        """Yields, per node, the pools of the action's demand if all of them are unused and could hold it, followed by
        the memory pool if that has room for its sandbox."""
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
                pools = [self._ledger.pool_on(kind, node) for kind, _ in entry.needs]
                if any(pool.held or pool.spent for pool in pools):
                    continue
                if not all(pool.could_fit(units) for pool, (_, units) in zip(pools, entry.needs, strict=True)):
                    continue
                memory = [self._ledger.pool_on(MEMORY, node)] if entry.memory and on_node else []
                if all(pool.fits(entry.memory) for pool in memory):
                    yield pools + memory
