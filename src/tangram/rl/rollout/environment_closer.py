"""The environment closer: closes environments in the background after their episodes.

Owns every environment from the end of its episode, with a call that may still be running. Closing is not cancelled with
the episode's task, and has a time limit: calls that do not end, and environments that hang or raise in `close`, are
counted, logged and abandoned. Never makes or plays an environment.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tangram.rl.environments.calls import ENDING_S_MAX, cancel_call, start_call
from tangram.rl.environments.protocol import Environment

log = logging.getLogger("tangram")

CLOSE_S_MAX = 30.0
"""Time limit of closing: a sandbox with many processes takes a few seconds."""


class EnvironmentCloser:
    """Call `close` any time, and `drain` at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = 0
        """The number of environments that could not be closed; their resources may leak."""
        self.stuck = 0
        """The number of calls that ignored their cancellation; they may still run."""

    def close(self, environment: Environment, trajectory: str, call: asyncio.Task[Any] | None = None) -> None:
        """`call`: a pending call of the environment, which is cancelled first."""
        task = asyncio.create_task(self._close(environment, trajectory, call), name=f"close {trajectory}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __len__(self) -> int:
        """Environments that are being closed."""
        return len(self._tasks)

    async def _close(self, environment: Environment, trajectory: str, call: asyncio.Task[Any] | None) -> None:
        if call is not None:
            await self._cancel_call(call, "a call", trajectory)
        closing = start_call(environment.close)
        await asyncio.wait({closing}, timeout=CLOSE_S_MAX)
        if not closing.done():
            cause = f"not within {CLOSE_S_MAX:g} s"
        elif closing.cancelled():
            cause = "it cancelled itself"
        elif (error := closing.exception()) is not None:
            cause = repr(error)
        else:
            return
        self.failed += 1
        log.warning("the environment of %s could not be closed: %s", trajectory, cause)
        await self._cancel_call(closing, "close", trajectory)

    async def _cancel_call(self, call: asyncio.Task[Any], call_name: str, trajectory: str) -> None:
        if not await cancel_call(call):
            self.stuck += 1
            message = "%s of the environment of %s does not end, %g s after it was cancelled; it is abandoned"
            log.warning(message, call_name, trajectory, ENDING_S_MAX)

    async def drain(self) -> None:
        """Blocks until all are closed or abandoned, even when cancelled meanwhile; raises CancelledError afterwards."""
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
