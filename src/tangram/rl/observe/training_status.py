"""The status of a training run, derived from the lines of its metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec

from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    Evaluated,
    Noticed,
    RunBegan,
    RunEnded,
    Trained,
    WarmStartChecked,
    notice_of,
)

STEPS_KEPT = 64
"""Steps whose rewards are drawn: as many as fit beside a name on a wide screen."""
PACE_STEPS = 8
"""The last steps, over which rates are averaged: few enough to show a change, enough to be steady."""
NOTICED_KEPT = 8
STARTING, WARMING, TRAINING, ENDED = "starting", "warm start", "training", "over"


class TrainingTaskProgress(msgspec.Struct):
    """The progress of one task."""

    rewards: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    """Mean rewards of the last batches with a group of the task."""
    warm: float | None = None
    """The score at the last check of the warm start."""
    held_out_first: float | None = None
    held_out: float | None = None
    """The last evaluation."""
    spread: float = math.nan
    """Its standard error."""


class TrainingStatus:
    """The state of a run, derived from its lines."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.phase = STARTING
        self.startup_text, self.startup_share = "", 0.0
        """The current phase of the start."""
        self.tasks = {task.name: TrainingTaskProgress() for task in settings.tasks}
        self.mode: str = settings.training.mode
        self.staleness_bound = settings.training.staleness_bound
        self.step = 0
        self.warm: WarmStartChecked | None = None
        self.steps: deque[Trained] = deque(maxlen=PACE_STEPS)
        self.trajectories = 0
        """Trajectories trained on in this process."""
        self.aborted = 0
        """Trajectories aborted in this process."""
        self.dropped: dict[str, int] = {}
        """Dropped groups by cause, since the run began."""
        self.noticed: deque[Noticed] = deque(maxlen=NOTICED_KEPT)
        self.end: RunEnded | None = None
        self.training_began_s = 0.0
        """The time from which `seconds_max` counts."""

    def add_line(self, line: AnyMetricsLine) -> None:
        if (notice := notice_of(line)) is not None:
            self.noticed.append(notice)
        match line:
            case RunBegan():
                self.training_began_s = line.at_s
                self.mode, self.staleness_bound = line.mode, line.alpha
                self.step = line.step
                self.steps.clear()
                warms_up = not line.resumed_from and any(task.warm_until > 0.0 for task in self.settings.tasks)
                self.phase, self.startup_text = WARMING if warms_up else TRAINING, ""
            case WarmStartChecked():
                self._on_warm_start_check(line)
            case Trained():
                self._on_trained(line)
            case Evaluated():
                for name, score in line.scores.items():
                    task = self.tasks.setdefault(name, TrainingTaskProgress())
                    task.held_out, task.spread = score, line.spread.get(name, math.nan)
                    task.held_out_first = score if task.held_out_first is None else task.held_out_first
            case Noticed():
                if line.step is not None:  # it went back to a checkpoint
                    self.step = line.step
                    self.steps.clear()
            case RunEnded():
                self.phase, self.end, self.dropped = ENDED, line, line.dropped_so_far

    def _on_warm_start_check(self, line: WarmStartChecked) -> None:
        self.phase = TRAINING if line.over else WARMING
        self.training_began_s = line.at_s
        self.warm = line
        for name, score in line.scores.items():
            self.tasks.setdefault(name, TrainingTaskProgress()).warm = score

    def _on_trained(self, line: Trained) -> None:
        self.phase, self.step = TRAINING, line.step
        if self.steps and line.step <= self.steps[-1].step:  # it went back to a checkpoint
            self.steps.clear()
        self.steps.append(line)
        self.trajectories += sum(line.staleness)
        self.dropped = line.dropped_so_far
        self.aborted += line.aborted
        for name, step in line.tasks.items():
            if math.isfinite(step.reward):
                self.tasks.setdefault(name, TrainingTaskProgress()).rewards.append(step.reward)

    # ---- over the last steps ----

    @property
    def last(self) -> Trained | None:
        return self.steps[-1] if self.steps else None

    def seconds(self, *names: str) -> float:
        """The sum of these parts over the last steps."""
        return sum(getattr(step, name) for step in self.steps for name in names)

    def per_s(self, count: Callable[[Trained], float]) -> float:
        seconds = self.seconds("step_s")
        return sum(map(count, self.steps)) / seconds if seconds > 0 else 0.0

    def staleness(self) -> list[int]:
        """Trajectories of the last steps by staleness."""
        counts = [0] * max((len(step.staleness) for step in self.steps), default=0)
        for step in self.steps:
            for age, count in enumerate(step.staleness):
                counts[age] += count
        return counts

    def remaining_s(self) -> float | None:
        """The remaining time at the pace of the last steps, limited by `seconds_max`; None before the first step."""
        if not self.steps or self.phase != TRAINING:
            return None
        training = self.settings.training
        by_steps_s = max(0, training.steps - self.step) * self.seconds("step_s") / len(self.steps)
        if training.seconds_max is None:
            return by_steps_s
        return min(by_steps_s, max(0.0, training.seconds_max - (self.steps[-1].at_s - self.training_began_s)))
