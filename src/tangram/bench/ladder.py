"""Five ways to schedule the same training run, from strictly sequential to fully asynchronous.

A small policy plays frozen lakes with slow steps: log-normal delays, a few of them several times as long as most. One
engine and one trainer have one thread each; training a batch takes about a fifth of its asynchronous rollout. The modes
differ only in the key `training.mode`.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from pathlib import Path
from typing import Any

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_least, at_most, paired_ratio_of_values
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, PolicySettings, TaskSettings
from tangram.rl.config.training_settings import (
    CheckpointSettings,
    EvaluationSettings,
    Mode,
    ObjectiveSettings,
    TrainingSettings,
    TrainSettings,
)
from tangram.rl.environments.frozenlake import FrozenLake
from tangram.rl.environments.protocol import ExternalResources, Step
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Trained
from tangram.rl.train.pipeline import train

MODES: dict[str, Mode] = {
    "sync": "sync", "sync_plus": "sync+", "one_off": "one-off", "start_bound": "start-bound", "async": "async",
}  # fmt: skip
FILLING = 2
"""Steps that do not count: the first batches are generated before any training overlaps."""
NEARLY_NOTHING = 1e-12
"""Learning rate too small to change a float32 weight."""
WARM_UNTIL = 0.15


class LadderSizes(msgspec.Struct, frozen=True, kw_only=True):
    seeds: int = 3
    groups: int = 8
    """Per batch."""
    members: int = 8
    steps: int = 14
    """Steps with a constant policy, which measure throughput."""
    latency_s: float = 0.12
    """Mean of an environment step."""
    spread: float = 1.0
    """Standard deviation of the latency over its mean."""
    epochs: int = 4
    staleness: int = 1
    score: float = 0.6
    """Mean reward of three consecutive batches to reach by learning; 0: not measured."""
    score_steps_max: int = 80


LABEL = "measured"
FULL = LadderSizes()
QUICK = LadderSizes(seeds=1, steps=8, score=0.0)


class SlowLake(FrozenLake):
    """A lake with slow steps. The delays depend only on trajectory and turn, not on the mode."""

    def __init__(
        self, resources: ExternalResources, *, latency_s: float = 0.1, spread: float = 1.0, **options: Any
    ) -> None:
        super().__init__(resources, **options)
        self._chance = random.Random(f"latency/{resources.trajectory}")
        self._sigma = math.sqrt(math.log1p(spread * spread))
        self._mu = math.log(latency_s) - self._sigma**2 / 2.0

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._chance.lognormvariate(self._mu, self._sigma))
        return await super().step(action)


async def measure(sizes: LadderSizes, run: BenchRun) -> None:
    fixed: dict[str, list[list[Trained]]] = {mode: [] for mode in MODES}
    learned: dict[str, list[float]] = {mode: [] for mode in MODES}
    parts = sizes.seeds * len(MODES)
    for seed in range(sizes.seeds):
        warm = await _warm_checkpoint(sizes, run.folder / f"warm-{seed}", seed)
        for number, mode in enumerate(MODES):
            run.progress((seed * len(MODES) + number) / parts, f"{mode}, seed {seed}")
            settings = settings_of(sizes, mode, seed, warm, rate=NEARLY_NOTHING, steps=sizes.steps)
            fixed[mode].append(await trained_steps(settings, run.folder / f"{mode}-{seed}"))
            if sizes.score:
                settings = settings_of(sizes, mode, seed, warm, rate=7e-4, steps=sizes.score_steps_max)
                learned[mode].append(await _seconds_to(sizes.score, settings, run.folder / f"{mode}-{seed}-learns"))
    add_throughput(run, fixed, sizes)
    if sizes.score:
        for mode, seconds in learned.items():
            run.add(f"time_to_score_{mode}", mean_of(seconds), PRINTED)


def add_throughput(run: BenchRun, fixed: dict[str, list[list[Trained]]], sizes: LadderSizes) -> None:
    """Add the metrics of each mode's runs, one per seed."""
    rates = {mode: [throughput(lines) for lines in runs] for mode, runs in fixed.items()}
    for mode in MODES:
        run.add(mode, mean_of(rates[mode]), PRINTED)
    names = list(MODES)
    for lower, higher in (("sync", "sync_plus"), ("sync_plus", "one_off"), ("one_off", "async")):
        goal = at_least(1.2) if lower == "one_off" else at_least(1.0)
        run.add(f"{higher}_vs_{lower}", paired_ratio_of_values(rates[higher], rates[lower]), goal)
    run.add("async_vs_sync", paired_ratio_of_values(rates["async"], rates["sync"]), at_least(2.0))
    run.add("async_vs_start_bound", paired_ratio_of_values(rates["async"], rates["start_bound"]), at_least(0.85))
    for mode in names:
        oldest = max(len(line.staleness) - 1 for lines in fixed[mode] for line in lines)
        run.add(f"staleness_max_{mode}", float(oldest), PRINTED)
    train_s = statistics.fmean(line.train_s for lines in fixed["sync_plus"] for line in lines[FILLING:])
    rollout_s = statistics.fmean(line.step_s - line.train_s for lines in fixed["sync_plus"] for line in lines[FILLING:])
    run.add("train_share_of_rollout", train_s / rollout_s, at_most(0.3))
    discarded = {mode: _discarded_share(fixed[mode]) for mode in ("start_bound", "async")}
    run.notes.append(
        f"Of all generated tokens, {discarded['start_bound']:.1%} (start-bound) and "
        f"{discarded['async']:.1%} (async) were not trained on."
    )
    run.notes.append(
        f"{sizes.groups * sizes.members} trajectories per batch; delays of {sizes.latency_s:g} s per turn, log-normal, "
        f"standard deviation {sizes.spread:g} times the mean; alpha = {sizes.staleness}; one engine and one trainer of "
        f"one thread each; {sizes.epochs} epochs."
    )


def throughput(lines: list[Trained]) -> float:
    """Trajectories per second, over the steps with full pipelines."""
    counted = lines[FILLING:]
    return sum(sum(line.staleness) for line in counted) / sum(line.step_s for line in counted)


def _discarded_share(runs: list[list[Trained]]) -> float:
    lost = sum(line.tokens_discarded for lines in runs for line in lines)
    used = sum(task.tokens * task.trajectories for lines in runs for line in lines for task in line.tasks.values())
    return lost / (lost + used)


# ---- runs ---------------------------------------------------------------------------------------------------------


def settings_of(
    sizes: LadderSizes, mode: str, seed: int, warm: Path | None, *, rate: float, steps: int
) -> TrainSettings:
    return TrainSettings(
        seed=seed,
        policy=PolicySettings(checkpoint=str(warm) if warm is not None else "", seed=seed),
        engines=(EngineSettings(slots=64, sessions=256, context_max=192, threads=1),),
        groups=GroupSettings(size=sizes.members),
        tasks=(
            TaskSettings(
                name="frozenlake",
                environment=f"{__name__}:SlowLake",
                options={"latency_s": sizes.latency_s if warm is not None else 1e-4, "spread": sizes.spread},
                warm_until=0.0 if warm is not None else WARM_UNTIL,
            ),
        ),
        training=TrainingSettings(
            mode=MODES[mode], staleness=sizes.staleness, steps=steps, batch=sizes.groups, threads=1
        ),
        objective=ObjectiveSettings(learning_rate=rate, epochs=sizes.epochs),
        evaluation=EvaluationSettings(every=0),
        checkpoints=CheckpointSettings(every=1_000_000),
    )


async def _warm_checkpoint(sizes: LadderSizes, folder: Path, seed: int) -> Path:
    """Return the checkpoint of a policy that knows the format, from which all modes start."""
    await train(settings_of(sizes, "sync_plus", seed, None, rate=NEARLY_NOTHING, steps=1), folder)
    return folder / "checkpoints" / f"{0:08d}"


async def trained_steps(settings: TrainSettings, folder: Path) -> list[Trained]:
    """Train, and return one line per step."""
    lines: list[Trained] = []

    def on_line(line: AnyMetricsLine) -> None:
        if isinstance(line, Trained):
            lines.append(line)

    await train(settings, folder, on_line=on_line)
    return lines


async def _seconds_to(score: float, settings: TrainSettings, folder: Path) -> float:
    """Return the seconds from the start of the first batch. A run that does not reach the score counts with its whole
    time."""
    reached = asyncio.get_running_loop().create_future()
    rewards: list[float] = []

    def on_line(line: AnyMetricsLine) -> None:
        if not isinstance(line, Trained):
            return
        rewards.append(line.tasks["frozenlake"].reward)
        if len(rewards) >= 3 and statistics.fmean(rewards[-3:]) >= score and not reached.done():
            reached.set_result(line.at_s)

    running = asyncio.create_task(train(settings, folder, on_line=on_line))
    await asyncio.wait({running, reached}, return_when=asyncio.FIRST_COMPLETED)
    if reached.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return float(reached.result())
    return (await running).at_s
