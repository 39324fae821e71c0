"""What the parts of a training run share: its clock and metrics lines, a condition, a pause, and background tasks.

Every part gets these objects in its constructor, so that no part needs a reference to one that is made after it. Never
decides anything about samples or weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tangram.cancellation import unwrap_first
from tangram.errors import ManagerError
from tangram.rl.inference.router_records import (
    AnyRouterEvent,
    EngineLost,
    EngineRemoved,
    EngineUpdated,
    FallbackBegan,
    FallbackEnded,
    describe_event,
)
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Noticed
from tangram.rl.train.step_metrics import StepMetrics


class RunReporter:
    """Writes the metrics lines of a run, and owns its clock: seconds since the run began, all resumptions included."""

    def __init__(self, on_line: Callable[[AnyMetricsLine], None], *, at_s: float = 0.0) -> None:
        """`at_s`: what the clock shows at `start`."""
        self._on_line = on_line
        self._start_at_s = at_s
        self._zero_s: float | None = None

    def start(self) -> None:
        """Starts the clock. Notices before that are dropped: the first line of a run is RunBegan."""
        self._zero_s = time.monotonic() - self._start_at_s

    def now(self) -> float:
        return self._start_at_s if self._zero_s is None else time.monotonic() - self._zero_s

    def write(self, line: AnyMetricsLine) -> None:
        """Raises ManagerError if the log cannot be written."""
        self._on_line(line)

    def notice(self, kind: str, text: str, step: int | None = None) -> None:
        if self._zero_s is not None:
            self.write(Noticed(at_s=self.now(), kind=kind, text=text, step=step))


class ChangeCondition:
    """Wakes all tasks that wait at the moment of `notify_all`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the next notification or the timeout."""
        if timeout_s is None:
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._event.wait()
        except TimeoutError:
            pass


class DispatchPause:
    """While it is held, the dispatcher starts no groups."""

    def __init__(self, changed: ChangeCondition) -> None:
        self._changed = changed
        self._holders = 0

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._changed.notify_all()


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


class EngineEventListener:
    """Turns events of the router into step metrics and notices."""

    def __init__(self, reporter: RunReporter, metrics: StepMetrics, background: BackgroundTasks) -> None:
        self._reporter, self._metrics, self._background = reporter, metrics, background

    def on_event(self, event: AnyRouterEvent) -> None:
        """Runs inside the router, so a log that cannot be written fails the run and raises nothing here."""
        if isinstance(event, EngineUpdated):
            self._metrics.on_engine_updated(event)
        elif isinstance(event, EngineLost | EngineRemoved | FallbackBegan | FallbackEnded):
            try:
                self._reporter.notice("engine", describe_event(event))
            except ManagerError as error:
                self._background.fail(error)
