"""The queue: waiting actions, their order, and what each lane waits for.

Owns the lanes in which live actions wait, and which pools are closed to which actions. Decides nothing about units.
A closed pool is a reservation, as in batch schedulers: without it later actions that need less would backfill every
unit that becomes free, and an action that needs many would never start. An action that cannot start closes only pools
that it needs: there is no head-of-line blocking across pools.
What blocks the first action of a lane blocks the whole lane, so the cost of a scheduling round grows with the number
of lanes, not of waiting actions.

`goes_before` defines the order: elders by arrival; then runs by standing (`RunUsage`), smallest first, ties to the run
served longest ago; within a run aged actions by arrival, then by priority, the policy's key and arrival. The order is
total at every moment: its first action is behind no other, so a closed pool is always closed for an action that can
get it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from tangram.core.demand import CPU, GPU, MEMORY, Need
from tangram.core.lanes import LANES_SPARE, Entry, Lane, LaneKey, Run, Waiters
from tangram.core.ledger import HELD_S, Ledger, PoolState
from tangram.errors import InvariantError

ELDER_FACTOR = 2.0
"""After this many times `ageing_s` an action is an elder: it goes before all later actions of every run. Without it a
run with a large share of another pool could starve on a pool that runs with smaller shares keep busy."""

EXACT_LANES_MAX = 64
"""Up to this many lanes of a run hold actions with exactly equal needs. In further lanes, as for arbitrary token
counts, amounts are rounded down to powers of two."""


class BlockedReason(msgspec.Struct, frozen=True, gc=False):
    """Why an action cannot start now."""

    waiters: Sequence[Waiters]
    """Where a change lets the action be tried again."""
    behind: Sequence[Entry] = ()
    """The actions ahead of it that have closed what it needs."""
    close: Sequence[Waiters] = ()
    """What it may close to the actions behind it."""
    target: str = ""
    """The node for which an action without a node waits, if there is one."""
    target_pools: Sequence[Waiters] = ()
    """The pools of that node, which the action closes once it has aged."""


class Queue:
    """All waiting actions, in lanes."""

    def __init__(self, ledger: Ledger, ageing_s: float) -> None:
        self._ledger = ledger
        self.ageing_s = ageing_s
        self.ageing_at = math.inf
        """The earliest time at which another action may have aged."""
        self.runs: dict[str, Run] = {}
        self.active: dict[str, Run] = {}
        """Runs with an open lane."""
        self.waiting = 0
        self._starts = 0
        self.elastic_waiting = 0
        """The number of waiting actions that are elastic in CPU."""
        self.closures = 0
        """The number of closed pools, counted once per action that closes one."""
        self.changed: dict[str, PoolState] = {}
        """CPU pools whose free units or elastic actions changed since the last round."""
        self.vacated: dict[str, PoolState] = {}
        """Device pools in which something changed since the last round: free devices, loaded services, waiting
        calls."""
        self.behind: dict[int, Lane] = {}
        """Lanes that were set aside because of actions ahead of them. The order changes with time and shares without
        any wake-up, so these lanes are checked after every event."""
        self._pool_waiters: dict[str, Waiters] = {}
        self._kind_waiters: dict[str, Waiters] = {}
        self._unplaced_waiters: dict[str, Waiters] = {}
        self._instance_waiters: dict[str, Waiters] = {}

    def run(self, name: str) -> Run:
        run = self.runs.get(name)
        if run is None:
            run = self.runs[name] = Run(name, len(self.runs), self._ledger.new_usage())
        return run

    def count_start(self, run: Run) -> None:
        """Records that an action of the run starts."""
        self._starts += 1
        run.served = self._starts

    # ---- enqueue and dequeue ----

    def enqueue(self, entry: Entry) -> None:
        run, node = entry.run, entry.node
        key = _lane_key(entry, node)
        lane = run.lanes.get(key)
        if lane is None:
            if len(run.lanes) >= run.lanes_max:
                run.lanes = {old: lane for old, lane in run.lanes.items() if lane.waiting}
                run.lanes_max = 2 * len(run.lanes) + LANES_SPARE
            kinds = tuple([kind for kind, _ in entry.needs])
            lane = run.lanes[key] = Lane(run, kinds, key)
        lane.push(entry)
        if not run.waiting:
            self._forfeit_idle_share(run)
        run.waiting += 1
        self.waiting += 1
        self.elastic_waiting += entry.elastic == CPU
        if not lane.blocked_on:
            self._open(lane)
        if lane.service:
            for pool in self._ledger.kinds.get(GPU, {}).values():
                if node in ("", pool.node):
                    self.vacated[pool.name] = pool
        if CPU in lane.kinds:
            pools = self._ledger.kinds[CPU]
            for pool in (pools[node],) if node in pools else pools.values():
                if node in ("", pool.node) and (entry.elastic == CPU or pool.is_tight(lane.floor)):
                    self.changed[pool.name] = pool

    def _forfeit_idle_share(self, run: Run) -> None:
        """Raises the average share of a run that was idle to the lowest of the others. Share that was not used is not
        saved up: otherwise a run that returns would get everything until it had caught up."""
        now = self._ledger.now
        if now - run.rests_since >= HELD_S:
            others = [other.usage.average(now) for other in self.runs.values() if other.waiting]
            if others:
                run.usage.raise_average(min(others), now)

    def dequeue(self, entry: Entry) -> None:
        lane, run = entry.lane, entry.run
        assert lane is not None, entry.id
        lane.leave(entry)
        run.waiting -= 1
        if not run.waiting:
            run.rests_since = self._ledger.now
        self.waiting -= 1
        self.elastic_waiting -= entry.elastic == CPU
        if not lane.waiting:
            if run.open.pop(id(lane), None) is not None and not run.open:
                del self.active[run.name]
            self._unblock(lane)
        elif lane.blocked_on:
            # The lane was blocked for its first action. The next one may fit.
            self._unblock(lane)
            self._open(lane)
        if entry.closed:
            self.reopen(entry)

    def lanes(self, pool: PoolState) -> Iterator[Lane]:
        """The lanes with waiting actions that may run from this pool."""
        for run in self.runs.values():
            if run.waiting:
                for lane in run.lanes.values():
                    if lane.waiting and pool.kind in lane.kinds and (not pool.node or lane.node in ("", pool.node)):
                        yield lane

    # ---- lanes that wait for a change ----

    def pool_waiters(self, pool: PoolState) -> Waiters:
        waiters = self._pool_waiters.get(pool.name)
        if waiters is None:
            waiters = self._pool_waiters[pool.name] = Waiters(self.kind_waiters(pool.kind))
        return waiters

    def kind_waiters(self, kind: str) -> Waiters:
        waiters = self._kind_waiters.get(kind)
        if waiters is None:
            waiters = self._kind_waiters[kind] = Waiters()
        return waiters

    def unplaced_waiters(self, pool: PoolState) -> Waiters:
        """The waiters of a pool on a node that have no place yet. Closing them keeps the pool open to
        sandboxes that are on the node."""
        waiters = self._unplaced_waiters.get(pool.name)
        if waiters is None:
            waiters = self._unplaced_waiters[pool.name] = Waiters(self.kind_waiters(pool.kind))
        return waiters

    def instance_waiters(self, pool: PoolState) -> Waiters:
        """The waiters of a node's memory that are function calls in need of a new instance."""
        waiters = self._instance_waiters.get(pool.name)
        if waiters is None:
            waiters = self._instance_waiters[pool.name] = Waiters(self.kind_waiters(pool.kind))
        return waiters

    def set_aside(self, lane: Lane, reason: BlockedReason, now: float) -> None:
        """Blocks an open lane until something changes in a pool that it lacks, or in the order."""
        lane.least = lane.floor
        lane.short_pool = None
        self._set_aside(lane, tuple(reason.waiters), now)
        if reason.behind:
            lane.behind = tuple(reason.behind)
            self.behind[id(lane)] = lane

    def open_overtaken(self, now: float) -> bool:
        """Opens the lanes that are no longer behind one of the actions that blocked them. Returns whether there are
        any."""
        opened = False
        for lane in list(self.behind.values()):
            first = self.head_of(lane, now)
            if not all(ahead.lane is not None and self.goes_before(ahead, first, now) for ahead in lane.behind):
                self._unblock(lane)
                self._open(lane)
                opened = True
        return opened

    def head_of(self, lane: Lane, now: float) -> Entry:
        """The first action of a lane with waiting actions."""
        oldest = lane.oldest()
        return oldest if self.is_aged(oldest, now) else lane.first()

    def lanes_blocked_alike(self, lane: Lane, now: float) -> list[Lane]:
        """The other open lanes that are short of the same pools. A unit that becomes free opens the lanes of all
        runs and services, but only the first gets it: the others are set aside together, in one pass."""
        if lane.signature is None:
            return []
        return [
            other
            for run in self.active.values()
            for other in run.open.values()
            if other.signature == lane.signature and other is not lane and not self.is_aged(other.oldest(), now)
        ]

    def set_aside_all(self, pool: PoolState, now: float) -> None:
        """Sets aside all open lanes that are known to lack units of this pool."""
        for run in list(self.active.values()):
            for lane in list(run.open.values()):
                if lane.short_pool is pool and pool.free < lane.least and not self.is_aged(lane.oldest(), now):
                    self._set_aside(lane, (self.pool_waiters(pool),), now)

    def set_aside_for(self, lane: Lane, pool: PoolState, least: int, now: float) -> None:
        """Sets aside an open lane until a pool has units for its first action. `least`: the units that it needs if it
        needs nothing else, or 0."""
        if least:
            lane.least, lane.short_pool = least, pool
        else:
            lane.least, lane.short_pool = lane.floor, None
        self._set_aside(lane, (self.pool_waiters(pool),), now)

    def _set_aside(self, lane: Lane, blocked_on: tuple[Waiters, ...], now: float) -> None:
        run, key = lane.run, id(lane)
        del run.open[key]
        if not run.open:
            del self.active[run.name]
        lane.blocked_on = blocked_on
        for waiters in blocked_on:
            waiters.lanes[key] = lane
        oldest = lane.oldest()
        if oldest.submitted_at + self.ageing_s <= now:
            lane.aged_seq = oldest.seq
        elif oldest.submitted_at + self.ageing_s < self.ageing_at:
            self.ageing_at = oldest.submitted_at + self.ageing_s

    def wake(self, pool: PoolState, *, all_lanes: bool = False) -> None:
        """Opens the lanes that lack this pool, if its free units may be enough for them. `all_lanes`: opens all
        of them because the pool itself changed, so that they may choose another one."""
        if pool.kind == CPU and not pool.gone and (all_lanes or self.elastic_waiting or pool.is_resize_due()):
            self.changed[pool.name] = pool
        elif pool.kind == GPU and not pool.gone:
            self.vacated[pool.name] = pool
        # Lanes that lack a quota are always opened, because their retry timer must be set again. So are lanes of an
        # idle pool: what they needed when it was larger does not count.
        free = pool.free if pool.window is None and pool.held and not all_lanes else math.inf
        waiters = self._pool_waiters.get(pool.name)
        if waiters is not None and waiters.lanes:
            self._open_all(waiters, free)
        waiters = self._kind_waiters.get(pool.kind)
        if waiters is not None and waiters.lanes:
            self._open_all(waiters, free)

    def first_short_of(self, pool: PoolState, yielding: int, now: float) -> Entry | None:
        """Returns the first of the actions without a node that need more memory than this pool has free, but no more
        than it would have if the yielding sandboxes ended."""
        waiters = self._kind_waiters.get(pool.kind)
        first: Entry | None = None
        for lane in waiters.lanes.values() if waiters is not None and yielding else ():
            head = self.head_of(lane, now)
            if pool.free < head.memory <= pool.free + yielding and (
                first is None or self.goes_before(head, first, now)
            ):
                first = head
        return first

    def forget(self, pool: PoolState) -> None:
        """Forgets a pool that has left: opens its lanes and removes its closures."""
        self.changed.pop(pool.name, None)
        self.vacated.pop(pool.name, None)
        self.wake(pool, all_lanes=True)
        for closed in (self._pool_waiters, self._unplaced_waiters, self._instance_waiters):
            waiters = closed.pop(pool.name, None)
            if waiters is not None:
                for blocker in list(waiters.blockers.values()):
                    self.reopen(blocker)

    def _open_all(self, waiters: Waiters, free: float = math.inf) -> None:
        """Opens the lanes for which `free` units may be enough."""
        for lane in list(waiters.lanes.values()):
            if lane.least <= free:
                if free == math.inf:
                    lane.short_pool = None
                self._unblock(lane)
                self._open(lane)

    def _unblock(self, lane: Lane) -> None:
        for waiters in lane.blocked_on:
            waiters.lanes.pop(id(lane), None)
        lane.blocked_on = ()
        if lane.behind:
            lane.behind = ()
            del self.behind[id(lane)]

    def _open(self, lane: Lane) -> None:
        if lane.waiting:
            run = lane.run
            run.open[id(lane)] = lane
            self.active[run.name] = run

    # ---- ageing and closed pools ----

    def is_aged(self, entry: Entry, now: float) -> bool:
        """Whether it has waited so long that no later action of its run overtakes it."""
        return entry.submitted_at <= now - self.ageing_s

    def newly_aged(self, now: float) -> list[Lane]:
        """Opens and returns the lanes whose oldest action has aged since they were set aside, oldest first.

        Time passes without a wake-up, so these lanes must be checked before anything else starts.
        """
        self.ageing_at = math.inf
        aged: list[Lane] = []
        for run in self.runs.values():
            for lane in run.lanes.values():
                if not lane.waiting:
                    continue
                oldest = lane.oldest()
                if oldest.submitted_at + self.ageing_s > now:
                    self.ageing_at = min(self.ageing_at, oldest.submitted_at + self.ageing_s)
                elif oldest.seq != lane.aged_seq:
                    aged.append(lane)
        for lane in aged:
            self._unblock(lane)
            self._open(lane)
        return sorted(aged, key=lambda lane: lane.oldest().seq)

    def goes_before(self, first: Entry, second: Entry, now: float) -> bool:
        elder_since = now - ELDER_FACTOR * self.ageing_s
        if first.submitted_at <= elder_since:
            return first.seq < second.seq
        if second.submitted_at <= elder_since:
            return False
        if first.run is not second.run:
            standing, other_standing = first.run.usage.standing(now), second.run.usage.standing(now)
            if standing != other_standing:
                return standing < other_standing
            return first.run.served < second.run.served
        aged_since = now - self.ageing_s
        return _rank(first, aged_since) < _rank(second, aged_since)

    def is_closed(self, pool: PoolState, entry: Entry, now: float) -> bool:
        """Whether an action ahead of this one has closed the pool to all actions behind itself."""
        return self._closed_by(self._pool_waiters.get(pool.name), entry, now) is not None

    def _closed_by(self, waiters: Waiters | None, entry: Entry, now: float) -> Entry | None:
        for blocker in waiters.blockers.values() if waiters is not None else ():
            if blocker is not entry and self.goes_before(blocker, entry, now):
                return blocker
        return None

    def pool_closed_by(self, pool: PoolState, entry: Entry, now: float) -> Entry | None:
        """Returns an action ahead of this one that has closed the pool to it, or None."""
        blocker = self._closed_by(self._pool_waiters.get(pool.name), entry, now)
        if blocker is None and pool.node and not entry.node:
            blocker = self._closed_by(self._unplaced_waiters.get(pool.name), entry, now)
            if blocker is None and entry.awaits_instance:
                blocker = self._closed_by(self._instance_waiters.get(pool.name), entry, now)
        return blocker

    def close(self, entry: Entry, reason: BlockedReason, now: float) -> None:
        """Reserves what an action lacks: closes it to the actions behind it, until it starts or settles."""
        to_close = reason.close
        if reason.target and self.is_aged(entry, now):
            if entry.target != reason.target:
                # It has changed its target node, so it no longer needs what it closed on the old one.
                self.reopen(entry)
                entry.target = reason.target
            to_close = (*to_close, *reason.target_pools)
        run = entry.run.name
        for waiters in to_close:
            blocker = waiters.blockers.get(run)
            if blocker is entry:
                continue
            if blocker is not None:
                if not self.goes_before(entry, blocker, now):
                    continue
                blocker.closed = tuple([other for other in blocker.closed if other is not waiters])
            if blocker is None:
                self.closures += 1
            waiters.blockers[run] = entry
            entry.closed = (*entry.closed, waiters)

    def reopen(self, entry: Entry) -> None:
        """Opens everything that the action has closed."""
        closed, entry.closed, entry.target = entry.closed, (), ""
        for waiters in closed:
            del waiters.blockers[entry.run.name]
            self.closures -= 1
            self._open_all(waiters)
            if waiters.kind_waiters is not None:
                self._open_all(waiters.kind_waiters)

    # ---- checking ----

    def check(self) -> None:
        """Recomputes every count. Raises InvariantError on the first difference."""
        waiting = 0
        for run in self.runs.values():
            if bool(run.open) != (run.name in self.active):
                raise InvariantError(f"run {run.name} has {len(run.open)} open lanes")
            if run.waiting != sum(lane.waiting for lane in run.lanes.values()):
                raise InvariantError(
                    f"run {run.name} counts {run.waiting} waiting actions, which is not the sum of its lanes"
                )
            for lane in run.lanes.values():
                _check_lane(lane)
            waiting += run.waiting
        if waiting != self.waiting:
            raise InvariantError(f"{self.waiting} actions counted as waiting, lanes hold {waiting}")
        behind = [id(lane) for run in self.runs.values() for lane in run.lanes.values() if lane.behind]
        if sorted(behind) != sorted(self.behind):
            raise InvariantError(f"{len(self.behind)} lanes counted as behind other actions, expected {len(behind)}")
        elastic = sum(lane.waiting for run in self.runs.values() for lane in run.lanes.values() if lane.elastic == CPU)
        if elastic != self.elastic_waiting:
            raise InvariantError(f"{self.elastic_waiting} elastic actions counted as waiting, lanes hold {elastic}")
        all_waiters = (*self._pool_waiters.values(), *self._unplaced_waiters.values(), *self._instance_waiters.values())
        closures = sum(len(waiters.blockers) for waiters in all_waiters)
        if closures != self.closures:
            raise InvariantError(f"{self.closures} closures counted, expected {closures}")
        for waiters in all_waiters:
            for name, blocker in waiters.blockers.items():
                if blocker.lane is None or blocker.run.name != name or waiters not in blocker.closed:
                    raise InvariantError(f"{blocker.id} closes a pool but does not wait for it")


def _lane_key(entry: Entry, node: str) -> LaneKey:
    needs = entry.needs
    wants: tuple[Need, ...] = ()
    if entry.sandbox is not None and not node:
        needs = (*needs, (MEMORY, entry.sandbox.memory))
        wants = entry.sandbox.wants
    exact = len(entry.run.lanes) < EXACT_LANES_MAX
    if not exact:
        needs = tuple([(kind, 1 << units.bit_length() - 1 if units > 1 else units) for kind, units in needs])
    return needs, exact, entry.elastic, node, entry.action.service, wants


def _rank(entry: Entry, aged_since: float) -> tuple[int, int, float, int]:
    if entry.submitted_at <= aged_since:
        return 0, 0, 0.0, entry.seq
    return 1, -entry.action.priority, entry.key, entry.seq


def _check_lane(lane: Lane) -> None:
    in_heap = sorted(item[2] for item in lane.heap if item[3].lane is lane)
    in_fifo = [entry.seq for entry in lane.fifo if entry.lane is lane]
    if len(in_heap) != lane.waiting or in_heap != in_fifo:
        raise InvariantError(f"a lane for {lane.kinds} counts {lane.waiting}, but holds {in_heap} and {in_fifo}")
    is_open = id(lane) in lane.run.open
    if bool(lane.waiting) != (is_open or bool(lane.blocked_on)) or (is_open and lane.blocked_on):
        raise InvariantError(f"a lane for {lane.kinds} with {lane.waiting} waiting is neither open nor set aside")
    for waiters in lane.blocked_on:
        if waiters.lanes.get(id(lane)) is not lane:
            raise InvariantError(f"a lane for {lane.kinds} waits for a change that will not wake it")
