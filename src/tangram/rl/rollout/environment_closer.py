"""Closings: environments that nobody plays any more, on their way out.

Owns every environment from the moment that its episode is done with it, with the call that it may not have answered
yet. Closing goes on beside everything else, is not cancelled with whoever asked for it, and has a time limit: a call
that does not end and an environment that hangs or raises in `close` are counted, told, and given up. Never makes or
plays an environment.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tangram.rl.environments.calls import ENDING_S_MAX, begun, ended
from tangram.rl.environments.protocol import Environment

log = logging.getLogger("tangram")

CLOSE_S_MAX = 30.0
"""What closing may take: a sandbox with many processes takes a few seconds."""


class Closings:
    """Use `close` any time, and `drain` at the end."""

    def __init__(self, timeout_s: float = CLOSE_S_MAX) -> None:
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = 0
        """Environments that could not be closed; what they hold may still be there."""
        self.stuck = 0
        """Calls that did not end when they were cancelled; they may still go on."""

    def close(self, environment: Environment, trajectory: str, call: asyncio.Task[Any] | None = None) -> None:
        """`call`: the last one, if nobody waits for its answer any more; it is ended first."""
        task = asyncio.create_task(self._closing(environment, trajectory, call), name=f"close {trajectory}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __len__(self) -> int:
        """Those that are being closed."""
        return len(self._tasks)

    async def _closing(self, environment: Environment, trajectory: str, call: asyncio.Task[Any] | None) -> None:
        if call is not None:
            await self._end(call, "a call", trajectory)
        closing = begun(environment.close)
        await asyncio.wait({closing}, timeout=self._timeout_s)
        if not closing.done():
            what = f"not within {self._timeout_s:g} s"
        elif closing.cancelled():
            what = "it cancelled itself"
        elif (error := closing.exception()) is not None:
            what = repr(error)
        else:
            return
        self.failed += 1
        log.warning("the environment of %s could not be closed: %s", trajectory, what)
        await self._end(closing, "close", trajectory)

    async def _end(self, call: asyncio.Task[Any], what: str, trajectory: str) -> None:
        if not await ended(call):
            self.stuck += 1
            said = "%s of the environment of %s does not end, %g s after it was cancelled; it is left behind"
            log.warning(said, what, trajectory, ENDING_S_MAX)

    async def drain(self) -> None:
        """Until all are closed or given up. It goes on when it is cancelled, and is cancelled afterwards."""
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
