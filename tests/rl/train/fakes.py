"""A training run of which the engine and the trainer are fakes: everything between them is real.

The environment takes random times and fails at random. The trainer trains nothing: it counts versions, remembers which
groups the surviving weights were trained on, and dies on command.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.config.rollout_settings import GroupSettings, TaskSettings
from tangram.rl.config.training_settings import (
    CheckpointSettings,
    EvaluationSettings,
    TrainingSettings,
    TrainSettings,
    WarmStartSettings,
)
from tangram.rl.environments.protocol import ExternalResources, Step
from tangram.rl.inference.engines.fake import FakeEngine
from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights
from tangram.rl.inference.router import Router
from tangram.rl.rollout.assembly import RolloutAssembly
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.runs.metrics_lines import AnyMetricsLine
from tangram.rl.runs.recovery import recover_buffer
from tangram.rl.runs.run_folder import open_run
from tangram.rl.train.background_tasks import BackgroundTasks
from tangram.rl.train.coordination import ChangeCondition
from tangram.rl.train.loop import TrainingLoop
from tangram.rl.train.pipeline import buffer_options, remaining_tickets
from tangram.rl.train.run_reporter import EngineEventListener, RunReporter
from tangram.rl.train.step_metrics import StepMetrics
from tangram.rl.train.trainer import TrainerDied, TrainStepResult
from tangram.rl.trajectories.codec import WordCodec
from tangram.rl.trajectories.training_batch import Demonstration, TrainingBatch

WORDS = WordCodec(("go", "look"))
STEP_S = 0.004
"""Of an environment, mean."""


class Random:
    """An environment of random length, that takes its time and fails now and then."""

    needs_client: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = ("go", "look")
    turns_max: ClassVar[int] = 5
    tokens_max: ClassVar[int] = 3
    agents: ClassVar[dict[str, Any]] = {"teacher": lambda chance: Goes()}

    def __init__(self, resources: ExternalResources, *, fails: float = 0.0, step_s: float = STEP_S) -> None:
        self._fails, self._step_s = fails, step_s
        self._chance = random.Random(resources.trajectory)
        self._turns = self._chance.randint(1, self.turns_max)

    async def reset(self, seed: int) -> str:
        await asyncio.sleep(self._chance.expovariate(1.0 / self._step_s))
        return "look"

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._chance.expovariate(1.0 / self._step_s))
        if self._chance.random() < self._fails:
            raise OSError("the environment is gone")
        self._turns -= 1
        return Step(observation="look", reward=self._chance.random(), done=self._turns <= 0)

    async def close(self) -> None:
        pass


class Sometimes(Random):
    """Of which one group of three never ends by itself."""

    def __init__(self, resources: ExternalResources) -> None:
        super().__init__(resources, step_s=0.001)
        self._never = int(resources.trajectory.split("/")[1]) % 3 == 0 if resources.trajectory.count("/") > 1 else False

    async def step(self, action: str) -> Step:
        if self._never:
            await asyncio.Event().wait()
        return await super().step(action)


class Goes:
    def act(self, observation: str) -> str:
        return "go"


class FakeTrainer:
    """Counts. `dies(version)` says whether the step from this version kills it."""

    def __init__(self, dies: Callable[[int], bool] = lambda version: False, step_s: float = 0.01) -> None:
        self.dies = dies
        self.batches: list[TrainingBatch] = []
        """Those of the lineage that survives, in order."""
        self.starts = 0
        self.deaths_at_start = 0
        """Of the next starts after the first, how many it dies of."""
        self.imitations = 0
        self.deaths_by_imitation = 0
        self._step_s = step_s
        self._version = -1
        self._stepped = asyncio.Event()

    async def reached(self, batches: int) -> None:
        """Wait until it has trained on the given number."""
        while len(self.batches) < batches:
            self._stepped.clear()
            await self._stepped.wait()

    @property
    def trained(self) -> list[str]:
        return [group.id for batch in self.batches for group in batch.groups]

    async def start(self, checkpoint: Path | None = None) -> PolicyWeights:
        self.starts += 1
        if self.starts > 1 and self.deaths_at_start:
            self.deaths_at_start -= 1
            raise TrainerDied("killed by a test while it started")
        self._version = int((checkpoint / "trainer").read_text()) if checkpoint is not None else 0
        self.batches = self.batches[: self._version]
        return PolicyWeights(version=self._version, folder="")

    async def imitate(self, episodes: Sequence[Demonstration]) -> float:
        self.imitations += 1
        if self.deaths_by_imitation:
            self.deaths_by_imitation -= 1
            raise TrainerDied("killed by a test while it imitated")
        return 0.0

    async def publish(self, version: int) -> PolicyWeights:
        return PolicyWeights(version=version, folder="")

    async def step(self, batch: TrainingBatch) -> TrainStepResult:
        assert batch.version == self._version, f"a batch for {batch.version}, and the trainer has {self._version}"
        await asyncio.sleep(self._step_s)
        if self.dies(self._version):
            self._version = -1
            raise TrainerDied("killed by a test")
        self.batches.append(batch)
        self._version += 1
        self._stepped.set()
        return TrainStepResult(
            weights=PolicyWeights(version=self._version, folder=""),
            metrics={"loss": 0.0},
            train_s=self._step_s,
            push_s=0.0,
        )

    async def save(self, folder: Path) -> None:
        (folder / "trainer").write_text(str(self._version))

    async def close(self) -> None:
        pass


def settings_of(
    mode: str = "async",
    *,
    alpha: int = 1,
    steps: int = 12,
    batch: int = 3,
    fails: float = 0.0,
    seed: int = 0,
    every: int = 3,
    step_s: float = STEP_S,
    evaluations: int = 4,
    warm_until: float = 0.0,
    **schedule: Any,
) -> TrainSettings:
    return TrainSettings(
        seed=seed,
        groups=GroupSettings(size=2),
        tasks=(
            TaskSettings(
                name="random",
                environment=f"{__name__}:Random",
                options={"fails": fails, "step_s": step_s},
                retries=0,
                backoff_s=0.0,
                warm_until=warm_until,
            ),
        ),
        training=TrainingSettings(mode=mode, staleness=alpha, steps=steps, batch=batch, **schedule),  # type: ignore[arg-type]
        warm_start=WarmStartSettings(episodes=4, batch=2, steps_max=4, check_every=2, check_episodes=2),
        evaluation=EvaluationSettings(every=evaluations, episodes=2),
        checkpoints=CheckpointSettings(every=every, keep=2),
    )


def answer(request: GenerationRequest) -> Sequence[int]:
    return (*WORDS.encode_action("go"),)


class TrainingProcess:
    """One life of the process that trains."""

    def __init__(
        self, training: TrainingLoop, engine: FakeEngine, trainer: FakeTrainer, lines: list[AnyMetricsLine]
    ) -> None:
        self.training, self.engine, self.trainer, self.lines = training, engine, trainer, lines

    def of(self, kind: type) -> list[Any]:
        return [line for line in self.lines if isinstance(line, kind)]


@asynccontextmanager
async def training_process(
    settings: TrainSettings, folder: Path, trainer: FakeTrainer, *, resume: bool = False, looked: int = -1
) -> AsyncIterator[TrainingProcess]:
    lines: list[AnyMetricsLine] = []
    engine = FakeEngine(answer, token_s=0.001)
    with open_run(folder, settings, resume=resume) as run:
        checkpoint = run.latest_checkpoint() if resume else None
        back = recover_buffer(checkpoint, run.samples_after(checkpoint.step)) if checkpoint is not None else None
        weights = await trainer.start(checkpoint.path if checkpoint is not None else None)
        reporter = RunReporter(lines.append, at_s=checkpoint.state.at_s if checkpoint is not None else 0.0)
        metrics, changed = StepMetrics(), ChangeCondition()
        background = BackgroundTasks(changed)
        router = Router([engine], on_event=EngineEventListener(reporter, metrics, background).on_event)
        await router.start(weights)
        try:
            bounds = buffer_options(settings)
            buffer = SampleBuffer(**bounds) if back is None else SampleBuffer.restore(back.buffer, now=0.0, **bounds)
            rollout = Rollout(settings.with_trainable_groups(), router, WORDS, barrier=settings.training.mode == "sync")
            async with rollout:
                made = RolloutAssembly(
                    settings=settings, codec=WORDS, client=None, router=router, rollout=rollout, weights=weights,
                    folder=folder,
                )  # fmt: skip
                reporter.start()
                training = TrainingLoop(
                    settings, run, run.open_sample_log(checkpoint), made, trainer, buffer,
                    remaining_tickets(settings, buffer), reporter, metrics, changed, background,
                    state=checkpoint.state if checkpoint is not None else None, last_evaluated=looked,
                    dropped=tuple(back.dropped.values()) if back is not None else (), progress=None,
                )  # fmt: skip
                try:
                    yield TrainingProcess(training, engine, trainer, lines)
                finally:
                    training.close()
        finally:
            await router.close()
