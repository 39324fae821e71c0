"""Offered load: how much work arrives per second, per pool kind.

Owns a fading sum. A policy that cannot take units back uses it to leave room for actions that will arrive.
"""

from __future__ import annotations

import math

MEMORY_S = 300.0
"""The weight of work falls to 1/e in this time: long enough to smooth bursts, short compared with a training step."""


class OfferedLoad:
    """Unit-seconds that arrive per second, if every action ran at its minimum."""

    __slots__ = ("_at", "_since", "_sums")

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._at: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def add(self, kind: str, unit_s: float, now: float) -> None:
        faded = self._sums.get(kind, 0.0) * math.exp((self._at.get(kind, now) - now) / MEMORY_S)
        self._sums[kind] = faded + unit_s
        self._at[kind] = now
        self._since.setdefault(kind, now)

    def units(self, kind: str, now: float) -> float:
        """Returns the units that the arriving work keeps busy on average. 0 before the first arrival."""
        if kind not in self._sums:
            return 0.0
        faded = self._sums[kind] * math.exp((self._at[kind] - now) / MEMORY_S)
        # A short past fills only a part of the memory. One second at least, or the first arrival would count double.
        filled = 1.0 - math.exp(-max(now - self._since[kind], 1.0) / MEMORY_S)
        return faded / (MEMORY_S * filled)
