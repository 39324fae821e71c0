"""The published elastic algorithm (ARL-Tangram, Algorithms 1 to 4), with its printed errors repaired.

One round: the candidates are the longest prefix of the queue that fits with every action at its minimum. They are split
by elastic pool, and a dynamic programme divides the free units of each pool among them. The tail of the candidates is
left waiting as long as that lowers the sum of completion times; actions that are not selected are estimated by a heap
of completion times. Repairs: the programme uses up to, not exactly, the free units; one pass serves all evictions; each
trial has a fresh heap; chunks split. See docs/decisions/paper-policy.md.

The order is arrival within a run. Runs take turns by fair share, and an action that lacks one pool does not block
actions that do not need it: the paper specifies neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from tangram.core.arrange import Arrangement, Counts, Durations, arrange_chunks, without_chunk
from tangram.core.arrange_units import arrange_units
from tangram.core.demand import GPU
from tangram.core.lanes import Entry
from tangram.core.ledger import PoolState
from tangram.core.policies.base import ArrivalOrder, Begin, Decision, Hold
from tangram.core.topology import level_of
from tangram.errors import InvariantError

if TYPE_CHECKING:
    from tangram.core.snapshot import Candidate, Snapshot

DEPTH = 2
"""Multiples of its minimum that the first action of the estimate tries. The value of the publication."""

ESTIMATED_MAX = 128
"""Actions beyond the candidates in the estimate. Further ones change little and cost a pass each."""

CANDIDATES_MAX = 128
"""Candidates of one round. A node starts more than this many at once only if it was empty."""

Completion = tuple[float, int]
"""Seconds from now until an action ends, and the units that it frees."""


class Paper(ArrivalOrder):
    name = "paper"

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        chunks = snapshot.free_chunks()
        candidates: list[Candidate] = []
        for candidate in snapshot.candidates():
            yield Hold(candidate.entry, candidate.node)
            candidates.append(candidate)
            if len(candidates) == CANDIDATES_MAX:
                break
        by_pool: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            pool = self._key_pool(snapshot, candidate)
            if pool is not None:
                by_pool.setdefault(pool.name, []).append(candidate)
        # What is held belongs to the candidates. The programme of each pool divides it again.
        starts = [Begin(c.entry, c.node) for c in candidates if self._key_pool(snapshot, c) is None]
        for name, group in by_pool.items():
            pool = snapshot.pools[name]
            if pool.kind == GPU:
                others = [c for key, some in by_pool.items() if key != name for c in some if c.node == pool.node]
                starts.extend(self._arrange(snapshot, pool, group, _left_by(others, chunks[name])))
            else:
                starts.extend(self._arrange(snapshot, pool, group, ()))
        # Largest chunk first: then every division that fits by count also fits by position.
        yield from sorted(starts, key=_devices, reverse=True)

    def _key_pool(self, snapshot: Snapshot, candidate: Candidate) -> PoolState | None:
        """Returns the pool whose units the programme divides for this action: its elastic one, or its devices."""
        kind = candidate.entry.elastic or (GPU if GPU in candidate.entry.action.demand.pools else "")
        return snapshot.pool(kind, candidate.node) if kind else None

    def _arrange(self, snapshot: Snapshot, pool: PoolState, group: list[Candidate], chunks: Counts) -> list[Begin]:
        """Divides one pool among its candidates and evicts the tail as long as that helps."""
        if pool.kind == GPU:
            arrangement = arrange_chunks([self._durations(snapshot, c.entry, pool) for c in group], chunks)
        else:
            free = pool.free + sum(c.entry.action.demand.pools[pool.kind].min for c in group)
            arrangement = arrange_units([self._durations(snapshot, c.entry, pool) for c in group], free)
        kept = self._evict_tail(snapshot, pool, group, arrangement)
        by_size = sorted(zip(group, arrangement.choice(kept), strict=False), key=lambda pair: -pair[1])
        return [Begin(c.entry, c.node, units if c.entry.elastic else 0) for c, units in by_size]

    def _durations(self, snapshot: Snapshot, entry: Entry, pool: PoolState) -> Durations:
        amounts = entry.action.demand.pools[pool.kind]
        estimate = snapshot.estimate(entry)
        if not estimate.observations:
            return [(amounts.min, estimate.work_s)]
        return [(units, snapshot.seconds(entry, pool, units)) for units in amounts.all(pool.total)]

    def _evict_tail(self, snapshot: Snapshot, pool: PoolState, group: list[Candidate], arrangement: Arrangement) -> int:
        """Returns how many of the group to start. At least one: an idle pool is never withheld."""
        behind = snapshot.waiting_in_order(pool, ESTIMATED_MAX)
        running = [(snapshot.remaining_s(entry), held) for entry, held in snapshot.holders(pool)]
        kept = len(group)
        while kept > 1 and arrangement.cost(kept) == float("inf"):
            kept -= 1
        objective = self._objective(snapshot, pool, group, kept, arrangement, running, behind)
        while kept > 1:
            fewer = self._objective(snapshot, pool, group, kept - 1, arrangement, running, behind)
            if fewer >= objective:
                break
            objective, kept = fewer, kept - 1
        return kept

    def _objective(
        self,
        snapshot: Snapshot,
        pool: PoolState,
        group: list[Candidate],
        kept: int,
        arrangement: Arrangement,
        running: list[Completion],
        behind: list[Entry],
    ) -> float:
        """Returns the exact cost of the candidates that start now plus the estimated cost of all others on this
        pool."""
        choice = arrangement.choice(kept)
        ends = list(running)
        for candidate, units in zip(group, choice, strict=False):
            ends.append((snapshot.seconds(candidate.entry, pool, units), pool.counted(units)))
        rest = [candidate.entry for candidate in group[kept:]] + behind
        return arrangement.cost(kept) + self._estimate(snapshot, pool, ends, rest[:ESTIMATED_MAX])

    def _estimate(self, snapshot: Snapshot, pool: PoolState, ends: list[Completion], rest: list[Entry]) -> float:
        """Returns the sum of completion times of the rest, each with its minimum as units become free. The first one
        tries 1 to DEPTH minima."""
        if not rest:
            return 0.0
        first = rest[0].action.demand.pools[pool.kind]
        best = float("inf")
        for depth in range(1, DEPTH + 1):
            units = first.min * depth
            if units > first.min and not first.admits(units):
                continue
            heap = list(ends)
            heapify(heap)
            total = self._queue_up(snapshot, pool, heap, rest[0], units)
            for entry in rest[1:]:
                total += self._queue_up(snapshot, pool, heap, entry, entry.action.demand.pools[pool.kind].min)
            best = min(best, total)
        return best

    def _queue_up(self, snapshot: Snapshot, pool: PoolState, heap: list[Completion], entry: Entry, units: int) -> float:
        """Returns when the action would end if it took the next `units` that become free."""
        taken, free, at = pool.counted(units), 0, 0.0
        while heap and free < taken:
            at, freed = heappop(heap)
            free += freed
        if free > taken:
            heappush(heap, (at, free - taken))
        end = at + snapshot.seconds(entry, pool, units)
        heappush(heap, (end, taken))
        return end


def _devices(start: Begin) -> int:
    """Returns the number of devices that it takes."""
    amounts = start.entry.action.demand.pools.get(GPU)
    if amounts is None:
        return 0
    return start.units if start.entry.elastic == GPU else amounts.min


def _left_by(candidates: list[Candidate], chunks: Counts) -> Counts:
    """Returns the free chunks that remain after these candidates, which are elastic in another pool, have their
    devices."""
    sizes = [c.entry.action.demand.pools[GPU].min for c in candidates if GPU in c.entry.action.demand.pools]
    for size in sorted(sizes, reverse=True):
        remaining = without_chunk(chunks, level_of(size))
        if remaining is None:
            raise InvariantError(f"paper holds chunks of {sizes} devices for other pools, which are not free together")
        chunks = remaining
    return chunks
