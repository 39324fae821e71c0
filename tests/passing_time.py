"""Time limits that pass when the test says so, not when the machine was fast enough."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from tangram.clock import Clock
from tangram.core.messages import Tick
from tangram.runtime.orchestrator import Orchestrator

LONG_S = 1000.0
"""A time limit of an action that only `past_limit` exceeds."""
STEP_S = 0.05

T = TypeVar("T")


class _AheadClock:
    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock = clock
        self._ahead_s = ahead_s

    def now(self) -> float:
        return self._clock.now() + self._ahead_s


async def past_limit(orchestrator: Orchestrator, task: asyncio.Task[T]) -> T:
    """The result of an action that has begun, after the clock of its scheduler has moved past its time limit. It moves
    more than once: the time limit counts from when the scheduler learns that the action runs, which may be later."""
    while not task.done():
        orchestrator._clock = _AheadClock(orchestrator._clock, LONG_S)  # noqa: SLF001 - connect() takes no clock
        orchestrator.send(Tick())
        await asyncio.wait({task}, timeout=STEP_S)
    return await task
