"""History: an hour of what has settled and of how busy the pools were, in memory that does not grow.

Owns the grid on which durations are counted, the percentiles made of it, and the two memories of it: the hour, in
slices of five minutes, for one percentile over all of it; and the series, in buckets of BUCKET_S, for a curve. Never
looks at a clock or at the scheduler. A percentile is right to within one cell of the grid, that is 15 %; counts, sums
and means are exact.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from tangram.core.ledger import PoolState
from tangram.runtime.views import BUCKET_S, BUCKETS_MAX, Bucket, Percentiles

STEPS = (
    1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2.0, 2.2, 2.4, 2.7, 3.0, 3.3, 3.6, 3.9, 4.3, 4.7, 5.1, 5.6, 6.2, 6.8, 7.5, 8.2,
    9.1,
)  # fmt: skip
"""Of one decade: numbers that are short to write and grow by a tenth or so, as the values of resistors do."""
BOUNDS = (*(float(f"{step}e{decade}") for decade in range(-4, 5) for step in STEPS), 1e5)
"""The upper ends of the cells: from a tenth of a millisecond, below which nobody waits, to a day."""

SLICE_S = 300.0
SLICES = 12
"""The hour: the slice that is being filled and eleven whole ones, so between 55 and 60 minutes."""


class Tally:
    """What settled in some stretch of time."""

    __slots__ = ("cells", "count", "execution_s", "overhead_s", "waiting_s")

    def __init__(self) -> None:
        self.count = 0
        self.waiting_s = self.execution_s = self.overhead_s = 0.0
        self.cells: dict[int, int] = {}
        """Completion times, by cell of the grid; only those that are not empty."""

    def add(self, waiting_s: float, execution_s: float, overhead_s: float) -> None:
        self.count += 1
        self.waiting_s += waiting_s
        self.execution_s += execution_s
        self.overhead_s += overhead_s
        cell = bisect_left(BOUNDS, waiting_s + execution_s + overhead_s)
        cells = self.cells
        cells[cell] = cells.get(cell, 0) + 1

    def merge(self, other: Tally, sign: int = 1) -> None:
        """Take another one in, or with a sign of -1 out again."""
        self.count += sign * other.count
        self.waiting_s += sign * other.waiting_s
        self.execution_s += sign * other.execution_s
        self.overhead_s += sign * other.overhead_s
        cells = self.cells
        for cell, count in other.cells.items():
            cells[cell] = cells.get(cell, 0) + sign * count
            if not cells[cell]:
                del cells[cell]

    @property
    def total_s(self) -> float:
        return self.waiting_s + self.execution_s + self.overhead_s

    def percentiles(self) -> Percentiles:
        if not self.count:
            return NOTHING
        p50, p95, p99 = self.quantiles((0.5, 0.95, 0.99))
        return Percentiles(count=self.count, mean_s=self.total_s / self.count, p50_s=p50, p95_s=p95, p99_s=p99)

    def quantiles(self, parts: Iterable[float]) -> list[float]:
        """For parts that rise: the times that so many did not exceed. Inside a cell all are taken to lie evenly."""
        found: list[float] = []
        cells = iter(sorted(self.cells.items()))
        cell, inside, below = 0, 0, 0
        for part in parts:
            wanted = part * self.count
            while below + inside < wanted:
                below += inside
                cell, inside = next(cells)
            low = BOUNDS[cell - 1] if cell else 0.0
            high = BOUNDS[min(cell, len(BOUNDS) - 1)]
            found.append(low + (high - low) * (wanted - below) / inside if inside else 0.0)
        return found


NOTHING = Percentiles()


class Hour:
    """The last hour of one run or class."""

    __slots__ = ("_slices", "all")

    def __init__(self) -> None:
        self.all = Tally()
        self._slices: deque[tuple[int, Tally]] = deque()

    def add(self, tally: Tally, number: int) -> None:
        """Of the slice with this number: the last one or a later one."""
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, Tally()))
        self._slices[-1][1].merge(tally)
        self.all.merge(tally)

    def forget(self, number: int) -> None:
        """In the slice with this number, what is no longer of the hour."""
        slices = self._slices
        while slices and slices[0][0] <= number - SLICES:
            self.all.merge(slices.popleft()[1], -1)
        if not slices:
            self.all = Tally()  # sums of fractions do not come back to zero by themselves


FIELDS = 9
"""Numbers that a series keeps of a bucket: all but its time and the pools."""


class Series:
    """BUCKETS_MAX buckets of one run, or of all. A bucket in which nothing was takes part as zeros."""

    __slots__ = ("_numbers", "_values")

    def __init__(self) -> None:
        self._numbers = array("q", [-1]) * BUCKETS_MAX
        self._values = array("d", [0.0]) * (BUCKETS_MAX * FIELDS)

    def put(self, number: int, tally: Tally, waiting: int, running: int) -> None:
        slot = number % BUCKETS_MAX
        self._numbers[slot] = number
        p50, p95, p99 = tally.quantiles((0.5, 0.95, 0.99)) if tally.count else (0.0, 0.0, 0.0)
        values = (
            tally.count, p50, p95, p99, tally.waiting_s, tally.execution_s, tally.overhead_s, waiting, running,
        )  # fmt: skip
        self._values[slot * FIELDS : (slot + 1) * FIELDS] = array("d", values)

    def bucket(self, number: int, busy: dict[str, float]) -> Bucket:
        slot = number % BUCKETS_MAX
        if self._numbers[slot] != number:
            return _bucket(number, ZEROS, busy)
        return _bucket(number, self._values[slot * FIELDS : (slot + 1) * FIELDS], busy)


ZEROS = array("d", [0.0]) * FIELDS


def _bucket(number: int, values: array[float], busy: dict[str, float]) -> Bucket:
    ended, p50_s, p95_s, p99_s, waiting_s, execution_s, overhead_s, waiting, running = values
    return Bucket(
        from_s=number * BUCKET_S,
        ended=int(ended),
        p50_s=p50_s,
        p95_s=p95_s,
        p99_s=p99_s,
        waiting_s=waiting_s,
        execution_s=execution_s,
        overhead_s=overhead_s,
        waiting=int(waiting),
        running=int(running),
        busy=busy,
    )


class _Level:
    """Of one pool: the part in use, since when, and what that came to before."""

    __slots__ = ("area_s", "part", "since_s", "until_s")

    def __init__(self, since_s: float) -> None:
        self.part = 0.0
        self.since_s = since_s
        self.until_s = math.inf
        """Time will have given back all of it, if nothing more is used."""
        self.area_s = 0.0

    def advance(self, now: float) -> None:
        self.area_s += self.part * max(0.0, min(now, self.until_s) - self.since_s)
        self.since_s = now


class Busy:
    """How much of each pool was in use, as a mean over time. Whoever changes a pool touches it. Units that time gives
    back one after another are seen when a bucket ends, or when all of them are back."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}

    def touch(self, pool: PoolState, now: float) -> None:
        level = self._levels.get(pool.name)
        if level is None:
            level = self._levels[pool.name] = _Level(now)
        level.advance(now)
        used = pool.held + pool.spent - pool.come_back(now)
        level.part = min(1.0, used / pool.total) if pool.total > 0 else 0.0
        level.until_s = pool.whole_at()

    def close(self, start_s: float, end_s: float) -> dict[str, float]:
        """The means from the one time to the other, and begin anew there."""
        means: dict[str, float] = {}
        for name, level in self._levels.items():
            level.advance(end_s)
            means[name] = min(1.0, max(0.0, level.area_s / (end_s - start_s)))
            level.area_s = 0.0
        return means

    def renew(self, pools: dict[str, PoolState], now: float) -> None:
        """Forget the pools that are gone, and look at those that are there."""
        for name in [name for name in self._levels if name not in pools]:
            del self._levels[name]
        for pool in pools.values():
            self.touch(pool, now)
