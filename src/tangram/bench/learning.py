"""Whether policies learn: each built-in task alone, three of them mixed, and one at several staleness limits.

A policy of two layers, 64 wide, is trained by the real pipeline, with real sandboxes, a real search API with its quota
and a real judge. It starts with a short warm start that imitates agents which know the format but not the goal; this
counts in its time. A run ends when its last five evaluations on held-out seeds, sampled at temperature 1, are well
above the goal, or when its time is over.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_least, at_most
from tangram.client.client import Client
from tangram.reports.charts import LineSeries, line_chart
from tangram.reports.page import figure, figures, opening, page, write_page
from tangram.reports.statistics import mean_of
from tangram.reports.theme import SERIES
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, PolicySettings, TaskSettings
from tangram.rl.config.training_settings import (
    CheckpointSettings,
    EvaluationSettings,
    ObjectiveSettings,
    TrainingSettings,
    TrainSettings,
)
from tangram.rl.environments.agents import demonstrations
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.environments.registry import tasks_of
from tangram.rl.rollout.assembly import connect_client
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Evaluated, Trained, WarmStartChecked
from tangram.rl.train.evaluator import SEED_FIRST
from tangram.rl.train.pipeline import train

OPTIONS = ("report",)
# lookup: the agent that it imitates gets a third of all answers right, and a policy that cannot copy names yet gets up
# to 0.2 by luck, from which nothing is learned.
TASKS: dict[str, TaskSettings] = {
    "frozenlake": TaskSettings(name="frozenlake", warm_until=0.12),
    "chain": TaskSettings(name="chain", warm_until=0.12),
    "codefix": TaskSettings(name="codefix", warm_until=0.25, concurrency=64),
    "lookup": TaskSettings(name="lookup", warm_until=0.28),
}
EXPENSIVE_TASKS = ("codefix", "lookup")
"""Tasks whose episodes take longer than learning from them: of each episode more is learned."""
MIX = ("frozenlake", "codefix", "lookup")
LAST = 5
"""Evaluations that are averaged."""
ENOUGH = 0.87
"""A run whose mean exceeds this ends before its time is over."""
RANDOM_EPISODES = 128


class LearningSizes(msgspec.Struct, frozen=True, kw_only=True):
    seeds: int = 3
    tasks: tuple[str, ...] = tuple(TASKS)
    mix: bool = True
    task_s: float = 180.0
    """Time limit of a run of one task, warm start included."""
    mix_s: float = 300.0
    batch: int = 16
    """Groups per step."""
    batch_dear: int = 8
    """Groups per step of a task with expensive episodes."""
    members: int = 8
    epochs: int = 2
    epochs_dear: int = 4
    """Epochs of a task with expensive episodes, and of the mix, which contains such tasks."""
    episodes: int = 64
    """Episodes per evaluation."""
    every: int = 160
    """Groups trained on between two evaluations."""
    alphas: tuple[int, ...] = (0, 1, 2, 4)
    alpha_steps: int = 40
    """Steps of a run at one staleness: all get the same number of trajectories."""


LABEL = "measured"
FULL = LearningSizes()
QUICK = LearningSizes(seeds=1, tasks=("frozenlake",), mix=False, task_s=60.0, alphas=())


class LearningRun(msgspec.Struct, kw_only=True):
    """The evaluations of one run."""

    warm: WarmStartChecked | None = None
    evaluated: list[Evaluated] = []
    trajectories: list[int] = []
    """Trajectories trained on, at each evaluation."""
    seconds: float = 0.0

    def final(self, task: str) -> float:
        return statistics.fmean(each.scores.get(task, 0.0) for each in self.evaluated[-LAST:])


async def measure(sizes: LearningSizes, run: BenchRun) -> None:
    parts = sizes.seeds * (len(sizes.tasks) + 2 * sizes.mix + 0.3 * len(sizes.alphas))
    done = 0.0
    alone: dict[str, list[LearningRun]] = {task: [] for task in sizes.tasks}
    mixed: list[LearningRun] = []
    aged: dict[int, list[LearningRun]] = {alpha: [] for alpha in sizes.alphas}
    for seed in range(sizes.seeds):
        for task in sizes.tasks:
            run.progress(done / parts, f"{task}, seed {seed}")
            settings = settings_of(sizes, (task,), seed)
            alone[task].append(await run_training(settings, run.folder / f"{task}-{seed}", sizes.task_s))
            done += 1.0
        if sizes.mix:
            run.progress(done / parts, f"mix, seed {seed}")
            mixed.append(await run_training(settings_of(sizes, MIX, seed), run.folder / f"mix-{seed}", sizes.mix_s))
            done += 2.0
        for alpha in sizes.alphas:
            run.progress(done / parts, f"alpha {alpha}, seed {seed}")
            settings = settings_of(sizes, ("frozenlake",), seed, alpha=alpha, steps=sizes.alpha_steps)
            aged[alpha].append(await run_training(settings, run.folder / f"alpha-{alpha}-{seed}", None))
            done += 0.3
    for task, runs in alone.items():
        run.add(f"final_{task}", mean_of([each.final(task) for each in runs]), at_least(0.8))
        run.add(f"random_{task}", await random_score(task), at_most(0.25))
        _add_warm(run, task, runs)
        run.add(f"seconds_{task}", mean_of([each.seconds for each in runs]), at_most(sizes.task_s))
    if mixed:
        for task in MIX:
            run.add(f"mix_{task}", mean_of([each.final(task) for each in mixed]), at_least(0.8))
            _add_warm(run, task, mixed, "mix_")
        run.add("seconds_mix", mean_of([each.seconds for each in mixed]), at_most(sizes.mix_s))
    for alpha, runs in aged.items():
        run.add(f"alpha_{alpha}", mean_of([each.final("frozenlake") for each in runs]), PRINTED)
        run.notes.append(f"alpha {alpha}: {_curve(runs)}")
    if run.report is not None:
        await asyncio.to_thread(write_page, run.report, report_page(alone, mixed, aged))
        run.notes.append(f"The curves are in {run.report}.")


def _add_warm(run: BenchRun, task: str, runs: list[LearningRun], before: str = "") -> None:
    greedy = [run.warm.greedy[task] for run in runs if run.warm is not None and task in run.warm.greedy]
    sampled = [run.warm.scores[task] for run in runs if run.warm is not None and task in run.warm.scores]
    if greedy:
        run.add(f"{before}warm_{task}", mean_of(greedy), at_most(0.5))
    if sampled:
        run.add(f"{before}warm_sampled_{task}", mean_of(sampled), at_most(0.5))


# ---- runs ---------------------------------------------------------------------------------------------------------


def settings_of(
    sizes: LearningSizes, tasks: tuple[str, ...], seed: int, *, alpha: int = 1, steps: int = 100_000
) -> TrainSettings:
    dear = any(task in EXPENSIVE_TASKS for task in tasks)
    batch = sizes.batch_dear if dear and len(tasks) == 1 else sizes.batch
    return TrainSettings(
        seed=seed,
        policy=PolicySettings(seed=seed),
        engines=(EngineSettings(slots=64, sessions=256, context_max=192),),
        groups=GroupSettings(size=sizes.members),
        tasks=tuple(TASKS[task] for task in tasks),
        training=TrainingSettings(mode="async", staleness=alpha, steps=steps, batch=batch),
        objective=ObjectiveSettings(epochs=sizes.epochs_dear if dear else sizes.epochs),
        evaluation=EvaluationSettings(every=max(1, sizes.every // batch), episodes=sizes.episodes),
        checkpoints=CheckpointSettings(every=1_000_000),
    )


async def run_training(settings: TrainSettings, folder: Path, seconds_max: float | None) -> LearningRun:
    """Train until the score is well above the goal or the time is over; without a limit, to the last step."""
    run, trajectories = LearningRun(evaluated=[], trajectories=[]), 0
    enough = asyncio.Event()
    tasks = [task.name for task in settings.tasks]

    def on_line(line: AnyMetricsLine) -> None:
        nonlocal trajectories
        run.seconds = line.at_s
        if isinstance(line, WarmStartChecked) and line.over:
            run.warm = line
        elif isinstance(line, Trained):
            trajectories += sum(line.staleness)
        elif isinstance(line, Evaluated):
            run.evaluated.append(line)
            run.trajectories.append(trajectories)
            if seconds_max is not None and len(run.evaluated) > LAST and min(map(run.final, tasks)) >= ENOUGH:
                enough.set()

    training = asyncio.create_task(train(settings, folder, on_line=on_line))
    waiting = asyncio.create_task(enough.wait())
    try:
        await asyncio.wait({training, waiting}, timeout=seconds_max, return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            await training
    finally:
        for task in (training, waiting):
            task.cancel()
        await asyncio.gather(training, waiting, return_exceptions=True)
    assert run.evaluated, f"{folder.name} was not evaluated once within {seconds_max} s"
    return run


async def random_score(task: str) -> float:
    """Score the agent that plays random well-formed actions."""
    settings = TrainSettings(tasks=(TASKS[task],))
    tasks = tasks_of(settings)
    client: Client = await connect_client(settings.resources, tasks, None)
    async with client:
        episodes = await demonstrations(
            tasks[0],
            "random",
            range(SEED_FIRST, SEED_FIRST + RANDOM_EPISODES),
            resources=ExternalResources(client=client),
        )
    return statistics.fmean(each.reward for each in episodes)


# ---- curves -------------------------------------------------------------------------------------------------------


def _curve(runs: list[LearningRun]) -> str:
    """Format held-out scores by trajectories, means over seeds."""
    points = zip(*(zip(run.trajectories, run.evaluated, strict=True) for run in runs), strict=False)
    return ", ".join(
        f"{statistics.fmean(count for count, _ in point):.0f}: "
        f"{statistics.fmean(line.scores.get('frozenlake', 0.0) for _, line in point):.2f}"
        for point in points
    )


def report_page(
    alone: dict[str, list[LearningRun]], mixed: list[LearningRun], aged: dict[int, list[LearningRun]]
) -> str:
    charts: list[tuple[str, dict[str, list[tuple[float, float]]]]] = []
    for task, runs in alone.items():
        charts.append((f"{task} alone", {f"seed {n}": _points(run, task) for n, run in enumerate(runs)}))
    for task in MIX if mixed else ():
        charts.append((f"{task} in the mix", {f"seed {n}": _points(run, task) for n, run in enumerate(mixed)}))
    if aged:
        curves = {f"α = {alpha}": _points(runs[0], "frozenlake") for alpha, runs in aged.items()}
        charts.append(("frozenlake by staleness, seed 0", curves))
    panels = [figure(line_chart(_lines(curves), title), title) for title, curves in charts]
    lead = "Held-out reward by trajectories trained on, from 0 to the highest reward."
    parts = [opening(["measured"], "Held-out reward by trajectories trained on", lead), figures(panels, "pair")]
    return page("Tangram: learning", parts)


def _points(run: LearningRun, task: str) -> list[tuple[float, float]]:
    return [
        (count, line.scores[task])
        for count, line in zip(run.trajectories, run.evaluated, strict=True)
        if task in line.scores
    ]


def _lines(curves: dict[str, list[tuple[float, float]]]) -> list[LineSeries]:
    return [
        LineSeries(name=name, css=SERIES[number % len(SERIES)], points=tuple(points))
        for number, (name, points) in enumerate(curves.items())
    ]
