"""Reports of a training run: its metrics lines with the time of the run, and the engine events among them.

Owns the time of the run. Drops notices before the start, so that the first line is RunBegan.
"""

from __future__ import annotations

from collections.abc import Callable

from tangram.clock import Clock, WallClock
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
from tangram.rl.train.background_tasks import BackgroundTasks
from tangram.rl.train.step_metrics import StepMetrics


class RunReporter:
    """Writes the metrics lines of a run, and owns its clock: seconds since the run began, all resumptions included."""

    def __init__(
        self, on_line: Callable[[AnyMetricsLine], None], *, at_s: float = 0.0, clock: Clock | None = None
    ) -> None:
        """`at_s`: the time of the run at `start`."""
        self._on_line = on_line
        self._clock = clock or WallClock()
        self._start_at_s = at_s
        self._zero_s: float | None = None

    def start(self) -> None:
        """Starts the clock. Notices before that are dropped: the first line of a run is RunBegan."""
        self._zero_s = self._clock.now() - self._start_at_s

    def now(self) -> float:
        return self._start_at_s if self._zero_s is None else self._clock.now() - self._zero_s

    def write(self, line: AnyMetricsLine) -> None:
        """Raises ManagerError if the log cannot be written."""
        self._on_line(line)

    def notice(self, kind: str, text: str, step: int | None = None) -> None:
        if self._zero_s is not None:
            self.write(Noticed(at_s=self.now(), kind=kind, text=text, step=step))


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
