"""The published elastic algorithm (ARL-Tangram, Algorithms 1 to 4), with its printed errors repaired.

One round: the longest prefix of the queue that fits with every action at its minimum are the candidates; they are
split by elastic pool; a dynamic programme divides the free units of each pool among them; the tail of the candidates
is left waiting as long as that lowers the sum of completion times, where the actions that are not selected are
estimated by a heap of completion times. Repaired are: units up to, not exactly, what is free; one pass of the
programme for all evictions; one fresh heap per trial; chunks that split. See docs/decisions/paper-policy.md.

The order is arrival within a run; runs take turns by fair share, and an action that lacks one pool does not stop
those that do not need it: the paper leaves both open.
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
"""Units, as multiples of its minimum, that the first action of the estimate tries; the publication's value."""

ESTIMATED_MAX = 128
"""Actions beyond the candidates that the estimate looks at; those further back change little and cost a pass each."""

CANDIDATES_MAX = 128
"""Candidates of one round; a node starts more than this many at once only when it was empty."""

Completion = tuple[float, int]
"""Seconds from now at which an action ends, and the units that it frees."""


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
        # What is still held belongs to the candidates; each pool's programme divides it anew.
        starts = [Begin(c.entry, c.node) for c in candidates if self._key_pool(snapshot, c) is None]
        for name, group in by_pool.items():
            pool = snapshot.pools[name]
            if pool.kind == GPU:
                besides = [c for key, others in by_pool.items() if key != name for c in others if c.node == pool.node]
                starts.extend(self._arrange(snapshot, pool, group, _left_by(besides, chunks[name])))
            else:
                starts.extend(self._arrange(snapshot, pool, group, ()))
        # Largest chunk first: then any division that fits by count fits by place, whatever chunk is preferred.
        yield from sorted(starts, key=_devices, reverse=True)

    def _key_pool(self, snapshot: Snapshot, candidate: Candidate) -> PoolState | None:
        """The pool whose units the programme divides for this action: its elastic one, or its devices."""
        kind = candidate.entry.elastic or (GPU if GPU in candidate.entry.action.demand.pools else "")
        return snapshot.pool(kind, candidate.node) if kind else None

    def _arrange(self, snapshot: Snapshot, pool: PoolState, group: list[Candidate], chunks: Counts) -> list[Begin]:
        """Units for the candidates of one pool, the tail evicted as long as that helps."""
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
        """How many of the group to start. At least one: an idle pool is never withheld."""
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
        """Exact part: the candidates that start now. Estimated part: everybody else on this pool, in order."""
        choice = arrangement.choice(kept)
        ends = list(running)
        for candidate, units in zip(group, choice, strict=False):
            ends.append((snapshot.seconds(candidate.entry, pool, units), pool.counted(units)))
        rest = [candidate.entry for candidate in group[kept:]] + behind
        return arrangement.cost(kept) + self._estimate(snapshot, pool, ends, rest[:ESTIMATED_MAX])

    def _estimate(self, snapshot: Snapshot, pool: PoolState, ends: list[Completion], rest: list[Entry]) -> float:
        """Completion times of the rest, each with its minimum as units come free; the first tries 1 to DEPTH minima."""
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
        """When the action would end if it took the next `units` that come free."""
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
    """How many devices it takes."""
    amounts = start.entry.action.demand.pools.get(GPU)
    if amounts is None:
        return 0
    return start.units if start.entry.elastic == GPU else amounts.min


def _left_by(candidates: list[Candidate], chunks: Counts) -> Counts:
    """The free chunks that are left to divide when these candidates, elastic in another pool, have their devices."""
    sizes = [c.entry.action.demand.pools[GPU].min for c in candidates if GPU in c.entry.action.demand.pools]
    for size in sorted(sizes, reverse=True):
        left = without_chunk(chunks, level_of(size))
        if left is None:
            raise InvariantError(f"paper holds {sizes} devices besides those it divides, which are not free together")
        chunks = left
    return chunks
