"""History: the last hour of settled actions and of pool utilization, in bounded memory.

Owns two views of the hour: one latency histogram, in slices of five minutes, for its percentiles; and a series, in
buckets of BUCKET_S, for a curve. Never reads a clock or the scheduler.
"""

from __future__ import annotations

import math
from array import array
from collections import deque

from tangram.core.ledger import PoolState
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.runtime.views import BUCKET_S, BUCKETS_MAX, HistoryBucket

SLICE_S = 300.0
SLICES = 12
"""The current slice and eleven complete ones: between 55 and 60 minutes."""


class LastHour:
    """The last hour of one run or class."""

    __slots__ = ("_slices", "total")

    def __init__(self) -> None:
        self.total = LatencyHistogram()
        self._slices: deque[tuple[int, LatencyHistogram]] = deque()

    def add(self, latencies: LatencyHistogram, number: int) -> None:
        """Adds to the slice with this number, the last or a later one."""
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, LatencyHistogram()))
        self._slices[-1][1].merge(latencies)
        self.total.merge(latencies)

    def forget(self, number: int) -> None:
        """Drops slices that are older than an hour in the slice with this number."""
        slices = self._slices
        while slices and slices[0][0] <= number - SLICES:
            self.total.merge(slices.popleft()[1], -1)
        if not slices:
            self.total = LatencyHistogram()  # sums of floats do not return to zero exactly


SERIES_FIELDS = 9
"""Numbers per bucket: all but its time and the pools."""


class Series:
    """BUCKETS_MAX buckets of one run, or of all. A bucket without activity reads as zeros."""

    __slots__ = ("_numbers", "_values")

    def __init__(self) -> None:
        self._numbers = array("q", [-1]) * BUCKETS_MAX
        self._values = array("d", [0.0]) * (BUCKETS_MAX * SERIES_FIELDS)

    def put(self, number: int, latencies: LatencyHistogram, waiting: int, running: int) -> None:
        slot = number % BUCKETS_MAX
        self._numbers[slot] = number
        p50, p95, p99 = latencies.quantiles((0.5, 0.95, 0.99)) if latencies.count else (0.0, 0.0, 0.0)
        values = (
            latencies.count, p50, p95, p99, latencies.waiting_s, latencies.execution_s, latencies.overhead_s,
            waiting, running,
        )  # fmt: skip
        self._values[slot * SERIES_FIELDS : (slot + 1) * SERIES_FIELDS] = array("d", values)

    def bucket(self, number: int, busy: dict[str, float]) -> HistoryBucket:
        slot = number % BUCKETS_MAX
        if self._numbers[slot] != number:
            return _bucket(number, ZEROS, busy)
        return _bucket(number, self._values[slot * SERIES_FIELDS : (slot + 1) * SERIES_FIELDS], busy)


ZEROS = array("d", [0.0]) * SERIES_FIELDS


def _bucket(number: int, values: array[float], busy: dict[str, float]) -> HistoryBucket:
    ended, p50_s, p95_s, p99_s, waiting_s, execution_s, overhead_s, waiting, running = values
    return HistoryBucket(
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


class _UtilizationIntegral:
    """Utilization of one pool since the last reading."""

    __slots__ = ("integral_s", "fraction", "updated_at", "refilled_at")

    def __init__(self, updated_at: float) -> None:
        self.fraction = 0.0
        self.updated_at = updated_at
        self.refilled_at = math.inf
        """When a windowed quota is full again if nothing more is used."""
        self.integral_s = 0.0

    def advance(self, now: float) -> None:
        self.integral_s += self.fraction * max(0.0, min(now, self.refilled_at) - self.updated_at)
        self.updated_at = now


class PoolUtilization:
    """Mean utilization of each pool over time. Every change of a pool calls `touch`. Units that a quota window returns
    gradually are counted when a bucket ends, or when all have returned."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels: dict[str, _UtilizationIntegral] = {}

    def touch(self, pool: PoolState, now: float) -> None:
        level = self._levels.get(pool.name)
        if level is None:
            level = self._levels[pool.name] = _UtilizationIntegral(now)
        level.advance(now)
        used = pool.held + pool.spent - pool.returned_units(now)
        level.fraction = min(1.0, used / pool.total) if pool.total > 0 else 0.0
        level.refilled_at = pool.refilled_at()

    def close(self, start_s: float, end_s: float) -> dict[str, float]:
        """Returns the means from `start_s` to `end_s`, and starts over there."""
        means: dict[str, float] = {}
        for name, level in self._levels.items():
            level.advance(end_s)
            means[name] = min(1.0, max(0.0, level.integral_s / (end_s - start_s)))
            level.integral_s = 0.0
        return means

    def reset_pools(self, pools: dict[str, PoolState], now: float) -> None:
        """Drops removed pools and touches the others."""
        for name in [name for name in self._levels if name not in pools]:
            del self._levels[name]
        for pool in pools.values():
            self.touch(pool, now)
