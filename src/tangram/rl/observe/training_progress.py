"""Progress of a training run, shown live in a terminal or as lines in a log.

The run calls `on_line` and the `on_...` methods, which never block and never raise. `reports/live.py` draws the screen
and prints lines from its own thread, so both continue if the run hangs; `training_status.py` has the state,
`training_screen.py` the formatting.

    with TrainingProgress(settings) as view:
        over = await train(settings, folder, on_line=view.on_line, observer=view, progress=view.on_startup)
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tangram.reports.live import LINE_EVERY_S, LiveView
from tangram.reports.terminal import is_unicode
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.observe.training_screen import notice_text, screen, status_line
from tangram.rl.observe.training_status import STARTING, TRAINING, WARMING, TrainingStatus
from tangram.rl.runs.metrics_lines import AnyMetricsLine, RunBegan, notice_of
from tangram.rl.trajectories.trajectory import Group, Stage, Trajectory

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class TrainingProgress(LiveView):
    def __init__(
        self,
        settings: TrainSettings,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_every_s: float = LINE_EVERY_S,
    ) -> None:
        super().__init__(quiet=quiet, console=console, clock=clock, line_every_s=line_every_s, background_lines=True)
        self.status = TrainingStatus(settings)
        self._lock = threading.RLock()
        """Held by the run and by the thread that draws or prints."""
        self._stage_by_id: dict[str, Stage | None] = {}

    # ---- events ----

    def on_startup(self, share: float, words: str) -> None:
        with self._lock:
            self.status.startup_share, self.status.startup_text = share, words

    def on_line(self, line: AnyMetricsLine) -> None:
        with self._lock:
            self.status.add_line(line)
            if isinstance(line, RunBegan):  # from here on its time is that of the run, as in its metrics
                self._began_at = self._clock() - line.at_s
        notice = notice_of(line)
        # A screen shows new notices; a log, and a screen after a resumption, get them as lines.
        if notice is not None and (self._printer is not None or (self.is_on_screen and isinstance(line, RunBegan))):
            self.print_line(f"noticed {notice_text(notice)}")

    def on_begin(self, trajectory: str, task: str) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = None

    def on_stage(self, trajectory: str, stage: Stage) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = stage

    def on_end(self, trajectory: Trajectory) -> None:
        with self._lock:
            self._stage_by_id.pop(trajectory.id, None)

    def on_group(self, group: Group) -> None:
        pass

    # ---- state ----

    def stage_counts(self) -> dict[str, int]:
        """Trajectories by stage."""
        with self._lock:
            return dict(Counter(stage.value if stage else "beginning" for stage in self._stage_by_id.values()))

    def stop_text(self) -> str:
        """A note on what a stop at this moment saves."""
        if self.status.phase == TRAINING:
            return "the current step is finished and saved"
        return "an unfinished warm start is not saved" if self.status.phase == WARMING else "it ends"

    def elapsed_s(self) -> float:
        """Seconds since the run began, resumptions included; before its begin, since the start of the process."""
        if self.status.end is not None:
            return self.status.end.at_s
        return self._clock() - self._began_at

    # ---- output -------------

    @property
    def has_last_line(self) -> bool:
        return self.status.phase != STARTING

    def line(self) -> str:
        """The progress in one line."""
        with self._lock:
            return status_line(self.status, self.stage_counts(), self.elapsed_s())

    def render(self) -> RenderableType:
        """The screen."""
        assert self.console is not None
        unicode = is_unicode(self.console)
        size = self.console.size
        with self._lock:
            return screen(self.status, self.stage_counts(), self.elapsed_s(), size.width, size.height, unicode=unicode)
