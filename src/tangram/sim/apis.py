"""Outside APIs in the simulator: they count for themselves and answer excess with a 429.

Owns the truth of every quota, independent of what the scheduler believes. Never asks the scheduler anything: what a
request counts as is what its Step says. Promises that a request which is refused by one limit counts in none.
"""

from __future__ import annotations

import math
from collections import deque

from tangram.core.messages import Pool
from tangram.sim.episode import ApiLimit, ApiModel, Counting, Step

REFUSAL_S = 0.05
"""How fast an API says no."""

ROUNDING = 1e-9
"""Of a window or a unit: sums of seconds may come out this much too small."""


class Apis:
    """All APIs of a workload."""

    def __init__(self, models: tuple[ApiModel, ...]) -> None:
        self._counts = {limit.pool.kind: _count(limit) for model in models for limit in model.limits}
        self._inside: dict[str, list[tuple[_Count, int]]] = {}

    def enter(self, action: str, step: Step, now: float) -> bool:
        """A request arrives. False: it gets a 429."""
        asked = self._asked(step)
        if any(count.used(now) + units > count.units + ROUNDING for count, units in asked):
            return False
        for count, units in asked:
            count.add(units, now)
        if asked:
            self._inside[action] = asked
        return True

    def _asked(self, step: Step) -> list[tuple[_Count, int]]:
        really = step.spent or {}
        return [
            (self._counts[kind], really.get(kind, amounts.min))
            for kind, amounts in step.demand.pools.items()
            if kind in self._counts
        ]

    def leave(self, action: str) -> None:
        """The request is answered, or its caller is gone. Nothing if it never got in."""
        for count, units in self._inside.pop(action, ()):
            count.remove(units)

    def change(self, pool: Pool, now: float) -> None:
        """The API itself has another quota from now on."""
        if pool.kind in self._counts:
            self._counts[pool.kind].change(pool.total, now)


class _Count:
    """One limit: how much of it is used."""

    def __init__(self, limit: ApiLimit) -> None:
        self.units = limit.pool.total
        """What it allows."""

    def used(self, now: float) -> float:
        raise NotImplementedError

    def add(self, units: int, now: float) -> None:
        """Right after `used` at the same time."""
        raise NotImplementedError

    def remove(self, units: int) -> None:
        """The request has ended. What counts in a window stays."""

    def change(self, units: int, now: float) -> None:
        self.units = units


class _UnderWay(_Count):
    """Requests from their arrival to their end."""

    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        self._inside = 0

    def used(self, now: float) -> float:
        return self._inside

    def add(self, units: int, now: float) -> None:
        self._inside += units

    def remove(self, units: int) -> None:
        self._inside -= units


class _Windowed(_Count):
    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        assert limit.pool.window is not None, limit
        self.seconds = limit.pool.window.seconds


class _Fixed(_Windowed):
    """Since the current window began."""

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


class _Sliding(_Windowed):
    """In so many seconds up to now."""

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


class _Bucket(_Windowed):
    """What is missing in a bucket that fills steadily."""

    def __init__(self, limit: ApiLimit) -> None:
        super().__init__(limit)
        self._missing = 0.0
        self._since = 0.0

    def used(self, now: float) -> float:
        self._missing = max(0.0, self._missing - (now - self._since) * self.units / self.seconds)
        self._since = now
        return self._missing

    def add(self, units: int, now: float) -> None:
        self._missing += units

    def change(self, units: int, now: float) -> None:
        """A smaller bucket lacks the same share, so that it is full again as soon as the larger one would have been."""
        missing = self.used(now)
        if units < self.units:
            missing *= units / self.units
        self._missing = missing
        super().change(units, now)


_COUNTS: dict[Counting, type[_Windowed]] = {
    Counting.FIXED: _Fixed,
    Counting.SLIDING: _Sliding,
    Counting.BUCKET: _Bucket,
}


def _count(limit: ApiLimit) -> _Count:
    return _UnderWay(limit) if limit.pool.window is None else _COUNTS[limit.counting](limit)
