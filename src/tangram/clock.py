"""Clocks: where the time comes from.

Owns every reading of time. Promises that no clock ever goes backwards. `VirtualLoop` is an asyncio loop on a SimClock,
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
    """What everything outside `core` asks for the time; `core` gets it as an argument."""

    def now(self) -> float:
        """Seconds since some start. Only the difference of two readings of one clock means anything."""
        ...


class WallClock:
    """Real time. Monotonic, so that an adjusted system time never makes an action end before it started."""

    def now(self) -> float:
        return time.monotonic()


class SimClock:
    """Virtual time: stands still until it is set."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = _checked_finite(start_s)

    def now(self) -> float:
        return self._now_s

    def set(self, now_s: float) -> None:
        """Move to `now_s`. The same time again is fine: many events may share one moment."""
        if _checked_finite(now_s) < self._now_s:
            raise InvariantError(f"virtual time cannot go back from {self._now_s!r} s to {now_s!r} s")
        self._now_s = now_s


TICK_S = 1e-6
"""The shortest wait of a VirtualLoop: more than asyncio is early, and than sums of seconds are rounded by."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where nothing is ready, time jumps to the next timer. For tasks that wait for each other and for time alone: a
    thread, a process or a socket would be too slow for it."""

    def __init__(self) -> None:
        self.clock = SimClock()
        super().__init__(_Jumping(self.clock))

    def time(self) -> float:
        return self.clock.now()

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Never at the same moment: where time stands still, what rings too early would ring again for ever."""
        later = max(when, self.time() + TICK_S)
        return super().call_at(later, callback, *args, context=context)


class _Jumping(selectors.BaseSelector):
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


def _checked_finite(time_s: float) -> float:
    # NaN compares false with everything: let in once, no later order check would ever fail.
    if not math.isfinite(time_s):
        raise InvariantError(f"virtual time must be a finite number of seconds, got {time_s!r}")
    return time_s
