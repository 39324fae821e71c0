"""Closings: environments that nobody plays any more, on their way out.

Owns every environment from the moment that its episode is done with it. Closing goes on beside everything else, is not
cancelled with whoever asked for it, and has a time limit: an environment that hangs or raises in `close` is counted,
told, and given up. Never makes or plays an environment.
"""

from __future__ import annotations

import asyncio
import logging

from tangram.rl.environments.base import Environment

log = logging.getLogger("tangram")

CLOSE_S_MAX = 30.0
"""What closing may take: a sandbox with many processes takes a few seconds."""
GRACE_S = 1.0
"""What a `close` that was cancelled after that may take to give up."""


class Closings:
    """Use `close` any time, and `drain` at the end."""

    def __init__(self, timeout_s: float = CLOSE_S_MAX) -> None:
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = 0
        """Environments that could not be closed; what they hold may still be there."""

    def close(self, environment: Environment, trajectory: str) -> None:
        task = asyncio.create_task(self._closing(environment, trajectory), name=f"close {trajectory}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __len__(self) -> int:
        """Those that are being closed."""
        return len(self._tasks)

    async def _closing(self, environment: Environment, trajectory: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await environment.close()
        except (Exception, asyncio.CancelledError) as error:
            self.failed += 1
            what = f"not within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            log.warning("the environment of %s could not be closed: %s", trajectory, what)

    async def drain(self) -> None:
        """Until all are closed or given up. It goes on when it is cancelled, and is cancelled afterwards."""
        cancelled: asyncio.CancelledError | None = None
        ends = asyncio.get_running_loop().time() + self._timeout_s + GRACE_S
        while self._tasks and (left := ends - asyncio.get_running_loop().time()) > 0.0:
            try:
                await asyncio.wait(self._tasks, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
        for task in self._tasks:
            log.warning("an environment does not give up closing (%s); it is left behind", task.get_name())
        if cancelled is not None:
            raise cancelled
