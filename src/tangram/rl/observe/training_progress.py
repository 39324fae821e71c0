"""Progress of a training run: what is known of it so far, live in a terminal, or as plain lines in a log.

Owns the counting and the thread that tells. Is told what happens by calls and asks nobody; never waits, never raises
for what it is told. A thread of its own tells it, so it goes on when the run hangs: on a terminal the screen is drawn
four times a second, elsewhere a line is written every ten seconds, and one at the end.
rl/observe/training_screen.py has the look.

    with TrainingProgress(settings) as view:
        over = await train(settings, folder, tell=view.tell, watch=view, progress=view.starting)
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.rollout.records import Group, Stage, Trajectory
from tangram.rl.train.records import AnyLine, Began, Evaluated, Noticed, Over, Trained, Warmed, noticed_in

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

DRAWS_PER_S = 4.0
LINE_EVERY_S = 10.0
STEPS_KEPT = 64
"""Of which rewards are drawn: as many as fit beside a name on a wide screen."""
PACE_STEPS = 8
"""The last steps, of which rates are told: few enough to see a change, enough to be calm."""
NOTICED_KEPT = 8
STARTING, WARMING, TRAINING, ENDED = "starting", "warm start", "training", "over"


class TaskSoFar:
    """Of one task."""

    def __init__(self) -> None:
        self.rewards: deque[float] = deque(maxlen=STEPS_KEPT)
        """Means of the last batches that had a group of it."""
        self.warm: float | None = None
        """At the last look at the warm start."""
        self.held_out_first: float | None = None
        self.held_out: float | None = None
        """The last evaluation."""
        self.spread = math.nan
        """Its standard error."""


class TrainingSoFar:
    """What is known of a run, made of its lines."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.phase = STARTING
        self.doing, self.share = "", 0.0
        """While it starts."""
        self.tasks = {task.name: TaskSoFar() for task in settings.tasks}
        self.mode: str = settings.training.mode
        self.alpha = settings.training.alpha
        self.step = self.step_first = 0
        self.warm: Warmed | None = None
        self.steps: deque[Trained] = deque(maxlen=PACE_STEPS)
        self.trajectories = 0
        """That were trained on, in this process."""
        self.aborted = 0
        """Likewise."""
        self.dropped: dict[str, int] = {}
        """Groups, by cause, since the run began."""
        self.noticed: deque[Noticed] = deque(maxlen=NOTICED_KEPT)
        self.over: Over | None = None
        self.trains_since_s = 0.0
        """From which `seconds_max` counts."""

    def take(self, line: AnyLine) -> None:
        if (notice := noticed_in(line)) is not None:
            self.noticed.append(notice)
        match line:
            case Began():
                self.trains_since_s = line.at_s
                self.mode, self.alpha = line.mode, line.alpha
                self.step = self.step_first = line.step
                self.steps.clear()
                warms_up = not line.resumed_from and any(task.warm_until > 0.0 for task in self.settings.tasks)
                self.phase, self.doing = WARMING if warms_up else TRAINING, ""
            case Warmed():
                self._warmed(line)
            case Trained():
                self._trained(line)
            case Evaluated():
                for name, score in line.scores.items():
                    task = self.tasks.setdefault(name, TaskSoFar())
                    task.held_out, task.spread = score, line.spread.get(name, math.nan)
                    task.held_out_first = score if task.held_out_first is None else task.held_out_first
            case Noticed():
                if line.step is not None:  # it went back to a checkpoint
                    self.step = line.step
                    self.steps.clear()
            case Over():
                self.phase, self.over, self.dropped = ENDED, line, line.dropped_so_far

    def _warmed(self, line: Warmed) -> None:
        self.phase = TRAINING if line.over else WARMING
        self.trains_since_s = line.at_s
        self.warm = line
        for name, score in line.scores.items():
            self.tasks.setdefault(name, TaskSoFar()).warm = score

    def _trained(self, line: Trained) -> None:
        self.phase, self.step = TRAINING, line.step
        if self.steps and line.step <= self.steps[-1].step:  # it went back to a checkpoint
            self.steps.clear()
        self.steps.append(line)
        self.trajectories += sum(line.staleness)
        self.dropped = line.dropped_so_far
        self.aborted += line.aborted
        for name, step in line.tasks.items():
            if math.isfinite(step.reward):
                self.tasks.setdefault(name, TaskSoFar()).rewards.append(step.reward)

    # ---- over the last steps ----

    @property
    def last(self) -> Trained | None:
        return self.steps[-1] if self.steps else None

    def seconds(self, *names: str) -> float:
        """Of the last steps, these parts of them together."""
        return sum(getattr(step, name) for step in self.steps for name in names)

    def per_s(self, count: Callable[[Trained], float]) -> float:
        seconds = self.seconds("step_s")
        return sum(map(count, self.steps)) / seconds if seconds > 0 else 0.0

    def staleness(self) -> list[int]:
        """Trajectories by staleness, of the last steps."""
        counts = [0] * max((len(step.staleness) for step in self.steps), default=0)
        for step in self.steps:
            for age, count in enumerate(step.staleness):
                counts[age] += count
        return counts

    def left_s(self) -> float | None:
        """At the pace of the last steps, and at most as long as it may take; None while there is none."""
        if not self.steps or self.phase != TRAINING:
            return None
        training = self.settings.training
        by_steps_s = max(0, training.steps - self.step) * self.seconds("step_s") / len(self.steps)
        if training.seconds_max is None:
            return by_steps_s
        return min(by_steps_s, max(0.0, training.seconds_max - (self.steps[-1].at_s - self.trains_since_s)))


class TrainingProgress:
    def __init__(
        self,
        settings: TrainSettings,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        line_every_s: float = LINE_EVERY_S,
    ) -> None:
        self.so_far = TrainingSoFar(settings)
        self._quiet = quiet
        self.console = console
        """Where it writes; None until the first line: then that of stderr."""
        self._clock = clock
        self._line_every_s = line_every_s
        self._lock = threading.RLock()
        """Between the run and the thread that tells."""
        self._began_s = clock()
        self._stage_by_id: dict[str, Stage | None] = {}
        self._live: Live | None = None
        self._ended = threading.Event()
        self._teller: threading.Thread | None = None

    # ---- what it is told ----

    def starting(self, share: float, words: str) -> None:
        with self._lock:
            self.so_far.share, self.so_far.doing = share, words

    def tell(self, line: AnyLine) -> None:
        with self._lock:
            self.so_far.take(line)
            if isinstance(line, Began):  # from here on its time is that of the run, as in all that is written of it
                self._began_s = self._clock() - line.at_s
        notice = noticed_in(line)
        # A screen shows notices while they are new; what a run goes on with stays above it.
        if notice is not None and (self._teller is not None or (self._live is not None and isinstance(line, Began))):
            from tangram.rl.observe.training_screen import noticed

            self._put(f"noticed {noticed(notice)}")

    def began(self, trajectory: str, task: str) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = None

    def stage(self, trajectory: str, stage: Stage) -> None:
        with self._lock:
            self._stage_by_id[trajectory] = stage

    def ended(self, trajectory: Trajectory) -> None:
        with self._lock:
            self._stage_by_id.pop(trajectory.id, None)

    def group(self, group: Group) -> None:
        pass

    # ---- what it knows ----

    def in_stages(self) -> dict[str, int]:
        """How many trajectories are where now, as far as it is told."""
        with self._lock:
            return dict(Counter(stage.value if stage else "beginning" for stage in self._stage_by_id.values()))

    def stopping(self) -> str:
        """What becomes of a run that is stopped now, in words."""
        if self.so_far.phase == TRAINING:
            return "the step that is under way is finished and saved"
        return "nothing is saved of a warm start that is not over" if self.so_far.phase == WARMING else "it ends"

    def elapsed_s(self) -> float:
        """Since the run began, before it was resumed too; until it begins, since it was started."""
        if self.so_far.over is not None:
            return self.so_far.over.at_s
        return self._clock() - self._began_s

    # ---- how it is told ----

    def __enter__(self) -> TrainingProgress:
        self._began_s = self._clock()
        if self._quiet:
            return self
        from rich.console import Console
        from rich.live import Live

        self.console = self.console or Console(stderr=True)
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self.render,
                console=self.console,
                refresh_per_second=DRAWS_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        else:
            self._teller = threading.Thread(target=self._tell_lines, name="training-progress", daemon=True)
            self._teller.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._ended.set()
        if self._teller is not None:
            self._teller.join()
            self._teller = None
        if not self._quiet and self.so_far.phase != STARTING:  # else there is nothing to be said of it
            self._put(self.line())

    def _tell_lines(self) -> None:
        while not self._ended.wait(self._line_every_s):
            self._put(self.line())

    def _put(self, line: str) -> None:
        """Not while this thread has the lock: a screen that is drawn meanwhile waits for it, and has the console."""
        assert self.console is not None
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def line(self) -> str:
        """All of it in one."""
        from tangram.rl.observe.training_screen import line

        with self._lock:
            return line(self.so_far, self.in_stages(), self.elapsed_s())

    def render(self) -> RenderableType:
        """The screen."""
        from tangram.rl.observe.training_screen import screen

        assert self.console is not None
        fancy = self.console.encoding.lower().startswith("utf")
        size = self.console.size
        with self._lock:
            return screen(self.so_far, self.in_stages(), self.elapsed_s(), size.width, size.height, fancy=fancy)
