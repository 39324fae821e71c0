"""Clocks: the source of time.

Owns every reading of time. Promises that no clock goes backwards. `VirtualLoop` is an asyncio event loop on a SimClock,
for tests: an hour of waiting takes no time in it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, Protocol, TypeVarTuple

from tangram.errors import InvariantError

Ts = TypeVarTuple("Ts")


class Clock(Protocol):
    """Gives the time to everything outside `core`, which gets it as an argument."""

    def now(self) -> float:
        """Seconds since an arbitrary start. Only differences of readings of one clock have a meaning."""
        ...


class WallClock:
    """Real time. Monotonic, so that an adjustment of the system time never makes an action end before it started."""

    def now(self) -> float:
        return time.monotonic()


class SimClock:
    """Virtual time, which changes only when it is set."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = _require_finite(start_s)

    def now(self) -> float:
        return self._now_s

    def set(self, now_s: float) -> None:
        """Move to `now_s`. Setting the same time again is allowed: many events may share one moment."""
        if _require_finite(now_s) < self._now_s:
            raise InvariantError(f"virtual time cannot go back from {self._now_s!r} s to {now_s!r} s")
        self._now_s = now_s


TICK_S = 1e-6
"""The shortest wait of a VirtualLoop: longer than the resolution of asyncio's timers and rounding errors of sums."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next timer when no task is ready. Only for tasks that wait for each other and for
    time: threads, processes and sockets make progress in real time."""

    def __init__(self) -> None:
        self.clock = SimClock()
        super().__init__(_VirtualSelector(self.clock))

    def time(self) -> float:
        return self.clock.now()

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedules at least TICK_S ahead: a timer that fires early would fire again forever while the clock
        does not advance."""
        later = max(when, self.time() + TICK_S)
        return super().call_at(later, callback, *args, context=context)


class _VirtualSelector(selectors.BaseSelector):
    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready and timeout is None:
            raise InvariantError("every task waits for something that no time brings")
        if not ready and timeout is not None and timeout > 0.0:
            self._clock.set(self._clock.now() + timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


def _require_finite(time_s: float) -> float:
    # NaN compares false with everything, so no later check of the order would fail.
    if not math.isfinite(time_s):
        raise InvariantError(f"virtual time must be a finite number of seconds, got {time_s!r}")
    return time_s
