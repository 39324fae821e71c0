"""Tasks beside the training loop, and the evaluation among them.

Promises that a failed task ends the run and that at most one evaluation runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tangram.cancellation import unwrap_first
from tangram.rl.train.coordination import ChangeCondition


class BackgroundTasks:
    """Tasks beside the training loop. The first failure of one of them is kept in `failure`, and ends the run."""

    def __init__(self, changed: ChangeCondition) -> None:
        self.failure: Exception | None = None
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled_on_failure: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[Any, Any, None], name: str, *, cancel_on_failure: bool = False
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        if cancel_on_failure:
            self._cancelled_on_failure.add(task)
        task.add_done_callback(self._on_end)
        return task

    @asynccontextmanager
    async def running(self, work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
        """Runs a task until the end of the block."""
        task = self.start(work, name)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def fail(self, error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            error = unwrap_first(error)
        if not isinstance(error, Exception):
            raise error
        self.failure = self.failure or error
        for task in self._cancelled_on_failure:
            task.cancel()
        self._changed.notify_all()

    async def cancel(self) -> None:
        """Cancels all tasks and blocks until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._cancelled_on_failure.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


class BackgroundEvaluation:
    """The evaluation that runs beside training, at most one at a time."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        assert not self.is_running, "an evaluation is running"
        self._task = self._tasks.start(work, "evaluation", cancel_on_failure=True)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def wait(self) -> None:
        """Blocks until no evaluation runs."""
        if self._task is not None:
            await asyncio.wait({self._task})
