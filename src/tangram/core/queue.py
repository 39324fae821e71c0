"""The queue: who waits, in which order, and what each one waits for.

Owns the lanes in which live actions wait, and which pools are closed to whom. Decides nothing about units. What stops
the first action of a lane stops them all, so the cost of a scheduling round grows with the lanes, not with the actions
that wait in them.

The order of all that wait, from which `goes_before` follows: elders by arrival; then the runs, from the smallest
standing up (`RunUsage`), of equal ones the one served longest ago; within a run the aged by arrival, then by priority,
the policy's key and arrival. It is total at every moment, so the first of it is behind nobody, and a pool that is
closed is closed for somebody who can get it.
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
"""Past this many times `ageing_s` an action goes before everything submitted later, of whatever run. Without it a run
with a large share elsewhere could wait for ever on a pool that poorer runs keep busy."""

EXACT_LANES_MAX = 64
"""Lanes of a run for equal needs. Beyond, as with arbitrary token counts, amounts of one power of two share a lane."""


class Lack(msgspec.Struct, frozen=True, gc=False):
    """Why an action cannot start now."""

    waiters: Sequence[Waiters]
    """Where a change would let it be tried again."""
    behind: Sequence[Entry] = ()
    """Those who go before it and have closed what it needs."""
    close: Sequence[Waiters] = ()
    """What it may close to those behind it."""
    target: str = ""
    """The node that an action without a place waits for, if it does ..."""
    target_pools: Sequence[Waiters] = ()
    """... and the pools there, which it closes once it has aged."""


class Queue:
    """All that waits."""

    def __init__(self, ledger: Ledger, ageing_s: float) -> None:
        self._ledger = ledger
        self.ageing_s = ageing_s
        self.ageing_at = math.inf
        """Up to this time no action that is not known to have aged has done so."""
        self.runs: dict[str, Run] = {}
        self.active: dict[str, Run] = {}
        """Runs with an open lane."""
        self.waiting = 0
        self._starts = 0
        self.elastic_waiting = 0
        """Of those, how many are elastic in CPU."""
        self.closures = 0
        """How many times a pool or kind is closed by somebody."""
        self.changed: dict[str, PoolState] = {}
        """CPU pools whose free units or elastic actions changed since the last round."""
        self.vacated: dict[str, PoolState] = {}
        """Device pools in which something changed since the last round: what came free, what is loaded, who waits."""
        self.behind: dict[int, Lane] = {}
        """Lanes set aside behind others. The order changes with time and shares and wakes nobody, so they are looked at
        after every event."""
        self._of_pool: dict[str, Waiters] = {}
        self._of_kind: dict[str, Waiters] = {}
        self._of_newcomers: dict[str, Waiters] = {}
        self._of_guests: dict[str, Waiters] = {}

    def run(self, name: str) -> Run:
        run = self.runs.get(name)
        if run is None:
            run = self.runs[name] = Run(name, len(self.runs), self._ledger.new_usage())
        return run

    def serve(self, run: Run) -> None:
        """One of its actions starts."""
        self._starts += 1
        run.served = self._starts

    # ---- coming and going ----

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
            self._come_back(run)
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

    def _come_back(self, run: Run) -> None:
        """Nobody saves up while resting: what a run did not want then, others had by right. Without this it would have
        everything until it had had as much as they."""
        now = self._ledger.now
        if now - run.rests_since >= HELD_S:
            others = [other.usage.average(now) for other in self.runs.values() if other.waiting]
            if others:
                run.usage.forgo(min(others), now)

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
            # What kept the first action waiting need not keep the next one.
            self._unblock(lane)
            self._open(lane)
        if entry.closed:
            self.reopen(entry)

    def lanes(self, pool: PoolState) -> Iterator[Lane]:
        """Those in which somebody waits who may run from this pool."""
        for run in self.runs.values():
            if run.waiting:
                for lane in run.lanes.values():
                    if lane.waiting and pool.kind in lane.kinds and (not pool.node or lane.node in ("", pool.node)):
                        yield lane

    # ---- lanes that wait for a change ----

    def of_pool(self, pool: PoolState) -> Waiters:
        waiters = self._of_pool.get(pool.name)
        if waiters is None:
            waiters = self._of_pool[pool.name] = Waiters(self.of_kind(pool.kind))
        return waiters

    def of_kind(self, kind: str) -> Waiters:
        waiters = self._of_kind.get(kind)
        if waiters is None:
            waiters = self._of_kind[kind] = Waiters()
        return waiters

    def of_newcomers(self, pool: PoolState) -> Waiters:
        """Of a pool on a node, for closing it only to actions that have no place yet."""
        waiters = self._of_newcomers.get(pool.name)
        if waiters is None:
            waiters = self._of_newcomers[pool.name] = Waiters(self.of_kind(pool.kind))
        return waiters

    def of_guests(self, pool: PoolState) -> Waiters:
        """Of the memory of a node, for closing it only to calls that wait for an instance."""
        waiters = self._of_guests.get(pool.name)
        if waiters is None:
            waiters = self._of_guests[pool.name] = Waiters(self.of_kind(pool.kind))
        return waiters

    def set_aside(self, lane: Lane, lack: Lack, now: float) -> None:
        """Close an open lane until something changes where it lacks, or the order."""
        lane.least = lane.floor
        lane.lacks = None
        self._set_aside(lane, tuple(lack.waiters), now)
        if lack.behind:
            lane.behind = tuple(lack.behind)
            self.behind[id(lane)] = lane

    def open_overtaken(self, now: float) -> bool:
        """Open the lanes of which one that was ahead is so no more. True if there are any."""
        opened = False
        for lane in list(self.behind.values()):
            first = self.head_of(lane, now)
            if not all(ahead.lane is not None and self.goes_before(ahead, first, now) for ahead in lane.behind):
                self._unblock(lane)
                self._open(lane)
                opened = True
        return opened

    def head_of(self, lane: Lane, now: float) -> Entry:
        """Whoever goes first of a lane in which somebody waits."""
        oldest = lane.oldest()
        return oldest if self.is_aged(oldest, now) else lane.first()[3]

    def like(self, lane: Lane, now: float) -> list[Lane]:
        """The other open lanes that are stopped by what stops this one. A unit that comes free opens the lanes of all
        runs and services, and only the first of them gets it: the others are set aside with it, in one pass."""
        if lane.signature is None:
            return []
        return [
            other
            for run in self.active.values()
            for other in run.open.values()
            if other.signature == lane.signature and other is not lane and not self.is_aged(other.oldest(), now)
        ]

    def set_aside_all(self, pool: PoolState, now: float) -> None:
        """Close all open lanes that are known to lack units of this pool."""
        for run in list(self.active.values()):
            for lane in list(run.open.values()):
                if lane.lacks is pool and pool.free < lane.least and not self.is_aged(lane.oldest(), now):
                    self._set_aside(lane, (self.of_pool(pool),), now)

    def set_aside_for(self, lane: Lane, pool: PoolState, least: int, now: float) -> None:
        """Close an open lane until a pool has units for its first action, which nobody keeps from it: `least` of them,
        if it asks for nothing else, or 0."""
        if least:
            lane.least, lane.lacks = least, pool
        else:
            lane.least, lane.lacks = lane.floor, None
        self._set_aside(lane, (self.of_pool(pool),), now)

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
        """Something changed in a pool: the lanes that lacked it are open again, as far as its free units could be
        enough for them. `all_lanes`: the pool itself is another, and who waits for it may want to wait elsewhere."""
        if pool.kind == CPU and not pool.gone and (all_lanes or self.elastic_waiting or pool.has_moved()):
            self.changed[pool.name] = pool
        elif pool.kind == GPU and not pool.gone:
            self.vacated[pool.name] = pool
        # What lacks a quota says anew how long, so that it is looked at again in time.
        # Nor is an idle pool ever withheld, whatever was needed when it was larger.
        free = pool.free if pool.window is None and pool.held and not all_lanes else math.inf
        waiters = self._of_pool.get(pool.name)
        if waiters is not None and waiters.lanes:
            self._open_all(waiters, free)
        waiters = self._of_kind.get(pool.kind)
        if waiters is not None and waiters.lanes:
            self._open_all(waiters, free)

    def first_short_of(self, pool: PoolState, yielding: int, now: float) -> Entry | None:
        """Of those who have no place yet and wait for more memory than is free in this pool, but not for more than
        there would be with what sandboxes yield, the one that goes first."""
        waiters = self._of_kind.get(pool.kind)
        first: Entry | None = None
        for lane in waiters.lanes.values() if waiters is not None and yielding else ():
            head = self.head_of(lane, now)
            if pool.free < head.memory <= pool.free + yielding and (
                first is None or self.goes_before(head, first, now)
            ):
                first = head
        return first

    def forget(self, pool: PoolState) -> None:
        """The pool is gone: nobody waits for it or closes it any more."""
        self.changed.pop(pool.name, None)
        self.vacated.pop(pool.name, None)
        self.wake(pool, all_lanes=True)
        for closed in (self._of_pool, self._of_newcomers, self._of_guests):
            waiters = closed.pop(pool.name, None)
            if waiters is not None:
                for blocker in list(waiters.blockers.values()):
                    self.reopen(blocker)

    def _open_all(self, waiters: Waiters, free: float = math.inf) -> None:
        """Those that `free` units could be enough for."""
        for lane in list(waiters.lanes.values()):
            if lane.least <= free:
                if free == math.inf:
                    lane.lacks = None
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

    # ---- pools that are closed to those behind ----

    def is_aged(self, entry: Entry, now: float) -> bool:
        """Has it waited so long that nothing later of its run overtakes it?"""
        return entry.submitted_at <= now - self.ageing_s

    def newly_aged(self, now: float) -> list[Lane]:
        """Lanes, open again, whose oldest action has aged since they were looked at last; by its arrival. None are
        before `ageing_at`.

        Ageing comes with time, which wakes nobody. These are to be looked at before anything else starts.
        """
        self.ageing_at = math.inf
        found: list[Lane] = []
        for run in self.runs.values():
            for lane in run.lanes.values():
                if not lane.waiting:
                    continue
                oldest = lane.oldest()
                if oldest.submitted_at + self.ageing_s > now:
                    self.ageing_at = min(self.ageing_at, oldest.submitted_at + self.ageing_s)
                elif oldest.seq != lane.aged_seq:
                    found.append(lane)
        for lane in found:
            self._unblock(lane)
            self._open(lane)
        return sorted(found, key=lambda lane: lane.oldest().seq)

    def goes_before(self, first: Entry, second: Entry, now: float) -> bool:
        elder_since = now - ELDER_FACTOR * self.ageing_s
        if first.submitted_at <= elder_since:
            return first.seq < second.seq
        if second.submitted_at <= elder_since:
            return False
        if first.run is not second.run:
            mine, theirs = first.run.usage.standing(now), second.run.usage.standing(now)
            return mine < theirs or (mine == theirs and first.run.served < second.run.served)
        aged_since = now - self.ageing_s
        return _rank(first, aged_since) < _rank(second, aged_since)

    def closed_by(self, waiters: Waiters, entry: Entry, now: float) -> Entry | None:
        """Somebody who goes before it and has closed this, if there is anybody."""
        for blocker in waiters.blockers.values():
            if blocker is not entry and self.goes_before(blocker, entry, now):
                return blocker
        return None

    def kept_by(self, pool: PoolState, entry: Entry, now: float) -> Entry | None:
        """Somebody who goes before it and has closed this pool to it, if there is anybody."""
        found = self.closed_by(self.of_pool(pool), entry, now)
        if found is None and pool.node and not entry.node:
            found = self.closed_by(self.of_newcomers(pool), entry, now)
            if found is None and entry.is_guest:
                found = self.closed_by(self.of_guests(pool), entry, now)
        return found

    def close(self, entry: Entry, lack: Lack, now: float) -> None:
        """The first action that cannot start closes what it lacks to those behind it, until it starts or settles."""
        wanted = lack.close
        if lack.target and self.is_aged(entry, now):
            if entry.target != lack.target:
                # What it closed on another node it will not use.
                self.reopen(entry)
                entry.target = lack.target
            wanted = (*wanted, *lack.target_pools)
        run = entry.run.name
        for waiters in wanted:
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
        """What it closed is open to those behind it."""
        closed, entry.closed, entry.target = entry.closed, (), ""
        for waiters in closed:
            del waiters.blockers[entry.run.name]
            self.closures -= 1
            self._open_all(waiters)
            if waiters.of_kind is not None:
                self._open_all(waiters.of_kind)

    # ---- the counts again, from scratch ----

    def check(self) -> None:
        """Recompute every count. Raises InvariantError on the first that is wrong."""
        waiting = 0
        for run in self.runs.values():
            if bool(run.open) != (run.name in self.active):
                raise InvariantError(f"run {run.name} has {len(run.open)} open lanes")
            if run.waiting != sum(lane.waiting for lane in run.lanes.values()):
                raise InvariantError(f"run {run.name} counts {run.waiting} waiting actions, its lanes others")
            for lane in run.lanes.values():
                _check_lane(lane)
            waiting += run.waiting
        if waiting != self.waiting:
            raise InvariantError(f"{self.waiting} actions counted as waiting, lanes hold {waiting}")
        behind = [id(lane) for run in self.runs.values() for lane in run.lanes.values() if lane.behind]
        if sorted(behind) != sorted(self.behind):
            raise InvariantError(f"{len(self.behind)} lanes counted as behind others, there are {len(behind)}")
        elastic = sum(lane.waiting for run in self.runs.values() for lane in run.lanes.values() if lane.elastic == CPU)
        if elastic != self.elastic_waiting:
            raise InvariantError(f"{self.elastic_waiting} elastic actions counted as waiting, lanes hold {elastic}")
        places = (*self._of_pool.values(), *self._of_newcomers.values(), *self._of_guests.values())
        closures = sum(len(waiters.blockers) for waiters in places)
        if closures != self.closures:
            raise InvariantError(f"{self.closures} closures counted, there are {closures}")
        for waiters in places:
            for name, blocker in waiters.blockers.items():
                if blocker.lane is None or blocker.run.name != name or waiters not in blocker.closed:
                    raise InvariantError(f"{blocker.id} closes a pool but does not wait for it")


def _lane_key(entry: Entry, node: str) -> LaneKey:
    needs = entry.needs
    wants: tuple[Need, ...] = ()
    if entry.place is not None and not node:
        needs = (*needs, (MEMORY, entry.place.memory))
        wants = entry.place.wants
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
