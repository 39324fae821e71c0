"""Clocks: where the time comes from.

Owns every reading of time. Never sleeps, schedules nothing. Promises that no clock ever goes backwards.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from tangram.errors import InvariantError


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


def _checked_finite(time_s: float) -> float:
    # NaN compares false with everything: let in once, no later order check would ever fail.
    if not math.isfinite(time_s):
        raise InvariantError(f"virtual time must be a finite number of seconds, got {time_s!r}")
    return time_s
