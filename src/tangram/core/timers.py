"""Timers: calls at a later time, retries of pools and reviews of running actions.

Never reads a clock: `announce()` returns the time of the next Tick that is needed, `fire(now)` makes the calls that are
due. Promises one announcement per time, and drops the timers of settled actions in bulk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from tangram.core.action import State
from tangram.core.lanes import Entry
from tangram.core.ledger import Ledger, PoolState
from tangram.core.queue import Queue

STALE_SPARE = 256
"""The heap is rebuilt when timers of settled actions outnumber the live ones by this many."""

EARLY_S = 1e-3
"""A Tick that comes up to this much too early answers its announcement, which is then repeated: event loops may wake up
early by the resolution of their clock."""


REFILL_STEP_S = 1e-3
"""The shortest wait for a quota that is about to have enough units: rounding may put the moment into the past."""

REVIEWS_MAX = 16
"""Reviews per round. The others follow with the next event."""


class Timers:
    __slots__ = ("_announced", "_count", "_heap", "_live", "_pools", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], Entry | str, tuple[Any, ...]]] = []
        self._count = 0
        self._live: dict[int, int] = {}
        """Timers in the heap per entry, by its sequence number."""
        self._pools: dict[str, float] = {}
        """The earliest timer of each pool."""
        self._stale = 0
        self._announced: list[float] = []
        """A heap of the announcements that no Tick has answered yet."""

    def set(self, at: float, call: Callable[..., None], entry: Entry, *arguments: Any) -> None:
        """Calls `call(entry, *arguments)` at `at` if the action is still live then."""
        self._count += 1
        self._live[entry.seq] = self._live.get(entry.seq, 0) + 1
        heappush(self._heap, (at, self._count, call, entry, arguments))

    def set_pool(self, at: float, call: Callable[..., None], pool: str) -> None:
        """Calls `call(pool)` at `at`. Does nothing if an earlier call is already set for the pool."""
        if self._pools.get(pool, float("inf")) > at:
            self._pools[pool] = at
            self._count += 1
            heappush(self._heap, (at, self._count, call, pool, ()))

    def drop(self, entry: Entry) -> None:
        """Drops the timers of an action that has settled."""
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
        """Returns the time of the next timer if it is earlier than every pending announcement, else None."""
        heap = self._heap
        while heap and self._is_stale(heap[0][3]):
            heappop(heap)
            self._stale -= 1
        if not heap or (self._announced and heap[0][0] >= self._announced[0]):
            return None
        heappush(self._announced, heap[0][0])
        return heap[0][0]

    def fire(self, now: float) -> None:
        """Makes all calls that are due."""
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
                remaining = self._live[subject.seq] - 1
                if remaining:
                    self._live[subject.seq] = remaining
                else:
                    del self._live[subject.seq]
                call(subject, *arguments)
            else:
                self._stale -= 1
            heap = self._heap


class PoolRetries:
    """Timers that offer the waiting actions of a pool again when nothing else would."""

    __slots__ = ("_ledger", "_queue", "_timers")

    def __init__(self, timers: Timers, ledger: Ledger, queue: Queue) -> None:
        self._timers = timers
        self._ledger = ledger
        self._queue = queue

    def when_refilled(self, pool: PoolState, units: int) -> None:
        """Retries when a quota has this many units. Does nothing if it has them now, or for a pool of held units."""
        at = pool.available_at(units)
        if at < math.inf and not pool.fits(units):
            self._timers.set_pool(max(at, self._ledger.now + REFILL_STEP_S), self._retry, pool.name)

    def after(self, pool: PoolState, seconds: float) -> None:
        self._timers.set_pool(self._ledger.now + seconds, self._retry, pool.name)

    def _retry(self, pool_name: str) -> None:
        pool = self._ledger.pools.get(pool_name)
        if pool is not None:
            self._ledger.refill(pool, self._ledger.now)
            self._queue.wake(pool, all_lanes=True)


class Reviews:
    """The running actions that the policy reviews, by time."""

    __slots__ = ("_heap", "due_at")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry, int]] = []
        """When, sequence number, entry, attempt."""
        self.due_at = math.inf
        """The time of the first review."""

    def set(self, entry: Entry, at: float) -> None:
        """Sets the review of the current attempt to `at`. Replaces an earlier one."""
        entry.review_at = at
        heappush(self._heap, (at, entry.seq, entry, entry.attempts))
        self.due_at = self._heap[0][0]

    def take(self, now: float) -> tuple[Entry, ...]:
        """Removes and returns up to REVIEWS_MAX running actions that are due."""
        heap = self._heap
        due: dict[int, Entry] = {}
        while heap and heap[0][0] <= now and len(due) < REVIEWS_MAX:
            due_at, _, entry, attempt = heappop(heap)
            if entry.state is State.RUNNING and entry.attempts == attempt and entry.review_at == due_at:
                due[entry.seq] = entry
        self.due_at = heap[0][0] if heap else math.inf
        return tuple(due.values())
