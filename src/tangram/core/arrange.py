"""Arrange: the best division of units among candidates, a multiple-choice knapsack problem.

Plain functions of numbers for policies, without queues, pools or clocks. Candidates come in queue order, each with its
admissible amounts and the seconds that it takes with each of them. Promises optima for *every* prefix of the candidates
from one pass, because policies shorten the list only from its end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from tangram.core.topology import level_of
from tangram.errors import InvariantError

Durations = Sequence[tuple[int, float]]
"""What a candidate may get: (units, seconds), by increasing units, with finite seconds."""

Counts = tuple[int, ...]
"""The number of free chunks of each level."""

_Way = tuple[float, int, "_Way | None"]
"""(cost, units of the last candidate, chain of the candidates before): the back-tracking table as a linked list."""

EXPONENT_MAX = 0.98
"""Largest exponent: above it 1 / (1 - p) explodes, while the smallest action already gets almost everything."""

TINY = 1e-300
"""Smallest weight: keeps divisions defined where a share underflows."""


class Arrangement:
    """The optimum of every prefix of the candidates."""

    __slots__ = ("_costs", "_trace")

    def __init__(self, costs: list[float], candidates: int, trace: Callable[[int], tuple[int, ...]]) -> None:
        self._costs = costs + [math.inf] * (candidates + 1 - len(costs))
        self._trace = trace

    def cost(self, count: int) -> float:
        """Returns the least sum of seconds of the first `count` candidates if all start now. Infinite if they do not
        fit."""
        return self._costs[count]

    def choice(self, count: int) -> tuple[int, ...]:
        """Returns units for each of the first `count` candidates that achieve `cost(count)`."""
        if math.isinf(self._costs[count]):
            raise InvariantError(f"the first {count} candidates do not fit together")
        return self._trace(count)


def only_faster(choices: Durations, units_max: int) -> list[tuple[int, float]]:
    """Returns only the amounts that are faster than every smaller one. Others are never optimal."""
    kept = []
    fastest = math.inf
    for choice in choices:
        if choice[0] > units_max:
            break
        if choice[1] < fastest:
            fastest = choice[1]
            kept.append(choice)
    return kept


# ---- devices in chunks ------------------------------------------------------------------------------------------


def arrange_chunks(durations: Sequence[Durations], free_counts: Counts) -> Arrangement:
    """Divides the free chunks of one node so that the sum of seconds is least.

    Every candidate takes the smallest free chunk that is large enough, split down to the size that it needs, so what
    remains depends only on the number of free chunks of each level. That is the state. Few states are reachable.
    """
    row: dict[Counts, _Way] = {tuple(free_counts): (0.0, 0, None)}
    ends = [row[tuple(free_counts)]]
    left: dict[tuple[Counts, int], Counts | None] = {}
    for choices in durations:
        row = _extend(row, _fastest_by_level(choices, len(free_counts)), left)
        if not row:
            break
        ends.append(min(row.values(), key=_cost))

    def trace(count: int) -> tuple[int, ...]:
        units = []
        choice: _Way | None = ends[count]
        while choice is not None:
            units.append(choice[1])
            choice = choice[2]
        return tuple(reversed(units[:-1]))

    return Arrangement([choice[0] for choice in ends], len(durations), trace)


def _cost(choice: _Way) -> float:
    return choice[0]


def _extend(
    row: dict[Counts, _Way], choices: Sequence[tuple[int, int, float]], left: dict[tuple[Counts, int], Counts | None]
) -> dict[Counts, _Way]:
    """Returns the cheapest chain to every state after one more candidate. `left` caches transitions."""
    following: dict[Counts, _Way] = {}
    for counts, choice in row.items():
        for level, units, seconds in choices:
            key = (counts, level)
            if key not in left:
                left[key] = without_chunk(counts, level)
            rest = left[key]
            if rest is None:
                break  # larger chunks are even less to be had
            cost = choice[0] + seconds
            if rest not in following or cost < following[rest][0]:
                following[rest] = (cost, units, choice)
    return following


def _fastest_by_level(choices: Durations, levels: int) -> list[tuple[int, int, float]]:
    """Returns the fastest amount per chunk level as (level, units, seconds), without levels that gain nothing."""
    fastest: dict[int, tuple[int, int, float]] = {}
    for units, seconds in only_faster(choices, 1 << levels):
        fastest[level_of(units)] = (level_of(units), units, seconds)
    return list(fastest.values())


def without_chunk(counts: Counts, level: int) -> Counts | None:
    """Returns the free chunks after taking one of `level` from the smallest that is large enough. None if there is
    none."""
    for above in range(level, len(counts)):
        if counts[above]:
            # Splitting leaves one chunk of every level from the wanted one up to the one below the source.
            split = tuple(count + 1 for count in counts[level:above])
            return (*counts[:level], *split, counts[above] - 1, *counts[above + 1 :])
    return None


# ---- shares and bounds ------------------------------------------------------------------------------------------


def hesrpt_shares(
    sizes: Sequence[float],
    exponent: Sequence[float],
    units: float,
    minimum: Sequence[float],
    maximum: Sequence[float],
) -> list[float]:
    """Divides `units` by heSRPT among actions with speed-up k ** p that can be resized at any time.

    With the m actions numbered 1..m by decreasing remaining size, action i gets in proportion to
    (i/m)**a - ((i-1)/m)**a with a = 1 / (1 - p): the smallest gets most, for p -> 0 all get the same, for p -> 1 the
    smallest gets everything. Of equal sizes the earlier one counts as smaller. If exponents differ, each action uses
    its own.

    Shares are then clamped to [minimum, maximum], and the difference is divided among the others in proportion. They
    sum to `units`, or to less if all are at their maximum. The minima must fit together.
    """
    shares = [0.0] * len(sizes)
    # Reversed as a whole, so that of equal sizes the earlier comes later and gets more: queue order decides ties.
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    order.reverse()
    power_before, below = 0.0, 0.0
    for rank, i in enumerate(order, start=1):
        power = 1.0 / (1.0 - min(max(exponent[i], 0.0), EXPONENT_MAX))
        if power != power_before:
            below = ((rank - 1) / len(sizes)) ** power
        upto = (rank / len(sizes)) ** power
        shares[i] = max(upto - below, TINY)
        power_before, below = power, upto
    return _clipped(shares, units, minimum, maximum)


def _clipped(weights: list[float], units: float, minimum: Sequence[float], maximum: Sequence[float]) -> list[float]:
    """Divides `units` in proportion to `weights` within [minimum, maximum].

    Each round fixes all actions on the more violated side at their bound. They would violate it in every later round,
    so nothing is ever unfixed, and every round but the last fixes at least one action.
    """
    if sum(minimum) > units * (1.0 + 1e-9):
        raise InvariantError(f"minima of {sum(minimum)} units do not fit into {units}")
    shares = [0.0] * len(weights)
    open_ = list(range(len(weights)))
    while open_:
        scale = units / sum([weights[i] for i in open_])
        above, below = 0.0, 0.0
        for i in open_:
            share = weights[i] * scale
            shares[i] = share
            if share > maximum[i]:
                above += share - maximum[i]
            elif share < minimum[i]:
                below += minimum[i] - share
        if above == 0.0 and below == 0.0:
            break
        bound, sign = (maximum, 1.0) if above >= below else (minimum, -1.0)
        within = []
        for i in open_:
            if sign * shares[i] > sign * bound[i]:
                shares[i] = float(bound[i])
                units -= bound[i]
            else:
                within.append(i)
        open_ = within
    return shares


def srpt_lower_bound(
    arrivals: Sequence[float], works: Sequence[float], shortest: Sequence[float], units: float
) -> float:
    """Returns a lower bound on the sum of completion times of any schedule on `units` units.

    `works` are the least unit-seconds of each action, the minimum over k of k * t(k); `shortest` are the least seconds,
    the minimum of t(k). No schedule beats one machine as fast as all units together that always runs the action with
    the shortest remaining time, and no action is faster than alone.
    """
    flow, now = 0.0, -math.inf
    remaining: list[float] = []
    for arrival, work in [*sorted(zip(arrivals, works, strict=True)), (math.inf, 0.0)]:
        while remaining and now + remaining[0] <= arrival:
            flow += remaining[0] * len(remaining)
            now += heapq.heappop(remaining)
        if remaining:
            # Only the first has been served since, and a smaller first element keeps the heap property.
            flow += (arrival - now) * len(remaining)
            remaining[0] -= arrival - now
        now = arrival
        heapq.heappush(remaining, work / units)
    return max(flow, math.fsum(shortest))
