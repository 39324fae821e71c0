"""Timers: what is to happen at a time, unless its action settles before.

Owns the heap of deadlines and what was announced. Never reads a clock: `announce()` says when the next Tick is wanted,
`fire(now)` runs what is due. Promises one announcement per time, and that timers of settled actions cost nothing for
long: they are dropped in bulk.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from tangram.core.lanes import Entry

STALE_SPARE = 256
"""The heap is rebuilt when timers of settled actions outnumber the live ones by this many."""

EARLY_S = 1e-3
"""A Tick that comes this much too early is taken as the answer to its announcement, which is then made again: event
loops wake up early by the resolution of their clock."""


class Timers:
    __slots__ = ("_announced", "_count", "_heap", "_live", "_pools", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], Entry | str, tuple[Any, ...]]] = []
        self._count = 0
        self._live: dict[int, int] = {}
        """Timers in the heap per entry, by its sequence number."""
        self._pools: dict[str, float] = {}
        """The earliest wake-up set per pool."""
        self._stale = 0
        self._announced: list[float] = []
        """A heap: the announcements that no Tick has answered yet."""

    def set(self, at: float, call: Callable[..., None], entry: Entry, *arguments: Any) -> None:
        """Call `call(entry, *arguments)` at `at`, if the entry is still live then."""
        self._count += 1
        self._live[entry.seq] = self._live.get(entry.seq, 0) + 1
        heappush(self._heap, (at, self._count, call, entry, arguments))

    def set_pool(self, at: float, call: Callable[..., None], pool: str) -> None:
        """Call `call(pool)` at `at`; a later time than one already set for the pool changes nothing."""
        if self._pools.get(pool, float("inf")) > at:
            self._pools[pool] = at
            self._count += 1
            heappush(self._heap, (at, self._count, call, pool, ()))

    def drop(self, entry: Entry) -> None:
        """The entry has settled."""
        stale = self._live.pop(entry.seq, 0)
        if stale:
            self._stale += stale
            if self._stale > len(self._heap) // 2 + STALE_SPARE:
                self._heap = [timer for timer in self._heap if not self._is_stale(timer[3])]
                heapify(self._heap)
                self._stale = 0

    def _is_stale(self, subject: Entry | str) -> bool:
        return not isinstance(subject, str) and subject.seq not in self._live

    def announce(self) -> float | None:
        """The time of the next timer, if it is earlier than all that was announced before; else None."""
        heap = self._heap
        while heap and self._is_stale(heap[0][3]):
            heappop(heap)
            self._stale -= 1
        if not heap or (self._announced and heap[0][0] >= self._announced[0]):
            return None
        heappush(self._announced, heap[0][0])
        return heap[0][0]

    def fire(self, now: float) -> None:
        """Run everything that is due."""
        while self._announced and self._announced[0] <= now + EARLY_S:
            heappop(self._announced)
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, _, call, subject, arguments = heappop(heap)
            if isinstance(subject, str):
                if self._pools.get(subject, float("inf")) <= now:
                    del self._pools[subject]
                call(subject)
            elif subject.seq in self._live:
                left = self._live[subject.seq] - 1
                if left:
                    self._live[subject.seq] = left
                else:
                    del self._live[subject.seq]
                call(subject, *arguments)
            else:
                self._stale -= 1
            heap = self._heap
