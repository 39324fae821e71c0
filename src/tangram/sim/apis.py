"""External APIs in the simulator: they enforce their quotas and answer excess with a 429.

Owns the true state of every quota, independent of what the scheduler assumes; a request counts as its SimStep declares.
A request that one limit rejects counts in no other limit.
"""

from __future__ import annotations

import math
from collections import deque

from tangram.core.messages import Pool
from tangram.sim.episode import ApiLimit, ApiModel, Counting, SimStep

REFUSAL_S = 0.05
"""Latency of a rejection."""

ROUNDING = 1e-9
"""Tolerance, as a share of a window or a unit, for rounding in sums of seconds."""


class SimulatedApis:
    """All APIs of a workload."""

    def __init__(self, models: tuple[ApiModel, ...]) -> None:
        self._counters = {limit.pool.kind: _make_counter(limit) for model in models for limit in model.limits}
        self._in_flight: dict[str, list[tuple[_UsageCounter, int]]] = {}

    def admit(self, action: str, step: SimStep, now: float) -> bool:
        """Process the arrival of a request. Return False for a 429."""
        charges = self._charges(step)
        if any(count.used(now) + units > count.units + ROUNDING for count, units in charges):
            return False
        for count, units in charges:
            count.add(units, now)
        if charges:
            self._in_flight[action] = charges
        return True

    def _charges(self, step: SimStep) -> list[tuple[_UsageCounter, int]]:
        really = step.spent or {}
        return [
            (self._counters[kind], really.get(kind, amounts.min))
            for kind, amounts in step.demand.pools.items()
            if kind in self._counters
        ]

    def release(self, action: str) -> None:
        """End a request, whether answered or abandoned. No effect if it was rejected."""
        for count, units in self._in_flight.pop(action, ()):
            count.remove(units)

    def set_quota(self, pool: Pool, now: float) -> None:
        """Change the quota that the API enforces."""
        if pool.kind in self._counters:
            self._counters[pool.kind].set_limit(pool.total, now)


class _UsageCounter:
    """One limit and its current use."""

    def __init__(self, limit: ApiLimit) -> None:
        self.units = limit.pool.total
        """The limit."""

    def used(self, now: float) -> float:
        raise NotImplementedError

    def add(self, units: int, now: float) -> None:
        """Add units; called right after `used` with the same time."""
        raise NotImplementedError

    def remove(self, units: int) -> None:
        """End a request. Units counted in a window stay."""

    def set_limit(self, units: int, now: float) -> None:
        self.units = units


class _ConcurrencyCounter(_UsageCounter):
    """Counts requests from arrival to end."""

    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        self._in_flight = 0

    def used(self, now: float) -> float:
        return self._in_flight

    def add(self, units: int, now: float) -> None:
        self._in_flight += units

    def remove(self, units: int) -> None:
        self._in_flight -= units


class _WindowCounter(_UsageCounter):
    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        assert limit.pool.window is not None, limit
        self.seconds = limit.pool.window.seconds


class _FixedWindowCounter(_WindowCounter):
    """Counts since the current window began."""

    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        self._phase_s = limit.phase_s
        self._window = -1
        self._spent = 0

    def used(self, now: float) -> float:
        window = math.floor((now - self._phase_s) / self.seconds + ROUNDING)
        if window != self._window:
            self._window, self._spent = window, 0
        return self._spent

    def add(self, units: int, now: float) -> None:
        self._spent += units


class _SlidingWindowCounter(_WindowCounter):
    """Counts over the preceding window."""

    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        self._arrivals: deque[tuple[float, int]] = deque()
        self._spent = 0

    def used(self, now: float) -> float:
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] + self.seconds <= now:
            self._spent -= arrivals.popleft()[1]
        return self._spent

    def add(self, units: int, now: float) -> None:
        self._arrivals.append((now, units))
        self._spent += units


class _TokenBucketCounter(_WindowCounter):
    """Counts the missing tokens of a bucket that refills steadily."""

    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        self._deficit = 0.0
        self._since = 0.0

    def used(self, now: float) -> float:
        self._deficit = max(0.0, self._deficit - (now - self._since) * self.units / self.seconds)
        self._since = now
        return self._deficit

    def add(self, units: int, now: float) -> None:
        self._deficit += units

    def set_limit(self, units: int, now: float) -> None:
        """Change the size; the bucket keeps its share of missing tokens, so it is full again after the same time."""
        missing = self.used(now)
        if units < self.units:
            missing *= units / self.units
        self._deficit = missing
        super().set_limit(units, now)


_COUNTER_BY_COUNTING: dict[Counting, type[_WindowCounter]] = {
    Counting.FIXED: _FixedWindowCounter,
    Counting.SLIDING: _SlidingWindowCounter,
    Counting.BUCKET: _TokenBucketCounter,
}


def _make_counter(limit: ApiLimit) -> _UsageCounter:
    return _ConcurrencyCounter(limit) if limit.pool.window is None else _COUNTER_BY_COUNTING[limit.counting](limit)
