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

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tangram.core.arrange import Arrangement, Counts, Durations, arrange_chunks, only_faster, without_chunk
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

STATES_MAX = 1024
"""States of one pass of the dynamic programme over units. Beyond this number units are counted in coarser steps,
rounded up so that nothing is oversold. A node with 256 cores divided into quarters of a core is still exact."""

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
        units_taken, free, at = pool.counted(units), 0, 0.0
        while heap and free < units_taken:
            at, freed = heappop(heap)
            free += freed
        if free > units_taken:
            heappush(heap, (at, free - units_taken))
        end = at + snapshot.seconds(entry, pool, units)
        heappush(heap, (end, units_taken))
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


# ---- identical units: the published operator, vectorised --------------------------------------------------------


def arrange_units(durations: Sequence[Durations], units_max: int) -> Arrangement:
    """Divides at most `units_max` units so that the sum of seconds is least.

    Every candidate gets its minimum, so the state of the pass is what was granted beyond the minima, in steps of the
    greatest common divisor of all such amounts: a rigid candidate adds no states, for any number of milli-cores.
    Row i holds, for every state e, the least cost of the first i candidates with at most e steps beyond their minima.
    """
    useful, budgets = _within(durations, units_max)
    quantum = _quantum(useful, budgets[0])
    steps = [[-(-(units - choices[0][0]) // quantum) for units, _ in choices] for choices in useful]
    # Row i has as many states as the first i candidates leave; before each row lies infinity, where no state is.
    pad = max((step[-1] for step in steps), default=0)
    steps_max = sum(step[-1] for step in steps)
    states = [min(budget // quantum, steps_max) + 1 for budget in budgets]
    rows = np.full((len(useful) + 1, pad + states[0]), math.inf)
    rows[0, pad:] = 0.0
    picks = _fill(rows, pad, states, steps, useful)

    def trace(count: int) -> tuple[int, ...]:
        state = states[count] - 1
        units = []
        for i in reversed(range(count)):
            pick = picks[i][state]
            units.append(useful[i][pick][0])
            state -= steps[i][pick]
        return tuple(reversed(units))

    costs = [float(rows[i, pad + states[i] - 1]) for i in range(len(useful) + 1)]
    return Arrangement(costs, len(durations), trace)


def _within(durations: Sequence[Durations], units_max: int) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """Returns the useful choices of the longest prefix whose minima fit, and the units that each prefix leaves."""
    useful: list[list[tuple[int, float]]] = []
    budgets = [units_max]
    for choices in durations:
        if not choices or choices[0][0] > budgets[-1]:
            break
        budgets.append(budgets[-1] - choices[0][0])
        useful.append(only_faster(choices, units_max))
    budgets[0] = budgets[min(1, len(useful))]  # the first candidate takes its minimum: no further states are reachable
    return useful, budgets


def _quantum(useful: Sequence[Durations], budget: int) -> int:
    """Returns the largest step that distinguishes all amounts, coarser if there would be too many states."""
    exact = math.gcd(*[units - choices[0][0] for choices in useful for units, _ in choices]) or 1
    spare = min(budget, sum(choices[-1][0] - choices[0][0] for choices in useful))
    return exact * max(1, math.ceil(spare / (exact * STATES_MAX)))


def _fill(
    rows: npt.NDArray[np.float64],
    pad: int,
    states: Sequence[int],
    steps: Sequence[Sequence[int]],
    useful: Sequence[Durations],
) -> list[npt.NDArray[np.intp]]:
    """Computes the rows in order. Returns the index of the best choice for every candidate and state."""
    every = np.arange(states[0])
    sources: dict[tuple[int, ...], npt.NDArray[np.intp]] = {}
    picks = []
    for i, choices in enumerate(useful):
        key = tuple(steps[i])
        if key not in sources:  # candidates of one class share their steps
            sources[key] = every[:, None] + (pad - np.array(key))
        width = states[i + 1]
        totals = rows[i].take(sources[key][:width])
        totals += np.array([seconds for _, seconds in choices])
        pick = totals.argmin(axis=1)
        rows[i + 1, pad : pad + width] = totals[every[:width], pick]
        picks.append(pick)
    return picks
