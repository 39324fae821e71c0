"""Whether policies really learn: each built-in task alone, three of them mixed, and one of them at several ages.

A policy of two layers and 64 wide is trained by the real pipeline, with real sandboxes, a real search API with its
quota and a real judge. It begins with a short warm start on agents that know the format and not the goal, which counts
in its time; then it learns by trying. A run ends when its last five evaluations on held-out seeds, sampled at
temperature 1, are well above the goal, or when its time is over.

`final_TASK`, `mix_TASK`: the mean of the last five evaluations, as a share of the highest reward. `random_TASK`: of
an agent that plays well-formed actions blindly. `warm_TASK`: after the warm start, before anything was learned, of the
most likely tokens; `warm_sampled_TASK`: likewise, sampled; `mix_warm_*`: of the mix. `seconds_TASK`, `seconds_mix`:
what a run took. `alpha_A`: the last evaluations of frozenlake with staleness A, after the same number of trajectories.
"""

from __future__ import annotations

import asyncio
import html
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, at_most
from tangram.client.client import Client
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, PolicySettings, TaskSettings
from tangram.rl.config.training_settings import (
    CheckpointSettings,
    EvaluationSettings,
    ObjectiveSettings,
    TrainingSettings,
    TrainSettings,
)
from tangram.rl.environments.agents import demonstrations
from tangram.rl.environments.protocol import Outside
from tangram.rl.rollout.assembly import connection, tasks_of
from tangram.rl.train.evaluator import SEED_FIRST
from tangram.rl.train.pipeline import train
from tangram.rl.train.records import AnyLine, Evaluated, Trained, Warmed

OPTIONS = ("report",)
# lookup: the agent that it imitates gets a third of all answers right, and a policy that cannot copy names yet gets up
# to 0.2 by luck, from which nothing is learned.
TASKS: dict[str, TaskSettings] = {
    "frozenlake": TaskSettings(name="frozenlake", warm_until=0.12),
    "chain": TaskSettings(name="chain", warm_until=0.12),
    "codefix": TaskSettings(name="codefix", warm_until=0.25, concurrency=64),
    "lookup": TaskSettings(name="lookup", warm_until=0.28),
}
DEAR = ("codefix", "lookup")
"""Tasks whose episodes take longer than learning from them: of each episode more is learned."""
MIX = ("frozenlake", "codefix", "lookup")
LAST = 5
"""Evaluations that are averaged."""
ENOUGH = 0.87
"""Of that mean, with which a run ends before its time is over."""
RANDOM_EPISODES = 128


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    seeds: int = 3
    tasks: tuple[str, ...] = tuple(TASKS)
    mix: bool = True
    task_s: float = 180.0
    """Of a run of one task, its warm start included."""
    mix_s: float = 300.0
    batch: int = 16
    """Groups of a step ..."""
    batch_dear: int = 8
    """... and of a task whose episodes are dear."""
    members: int = 8
    epochs: int = 2
    epochs_dear: int = 4
    """Likewise, and of the mix, which has such tasks."""
    episodes: int = 64
    """Of an evaluation."""
    every: int = 160
    """Groups that are trained on between two evaluations."""
    alphas: tuple[int, ...] = (0, 1, 2, 4)
    alpha_steps: int = 40
    """Of a run at one staleness: the same number of trajectories for all."""


FULL = Sizes()
QUICK = Sizes(seeds=1, tasks=("frozenlake",), mix=False, task_s=60.0, alphas=())


class Run(msgspec.Struct, kw_only=True):
    """What was seen of one run."""

    warm_s: float = 0.0
    warm: Warmed | None = None
    evaluated: list[Evaluated] = []
    trajectories: list[int] = []
    """Trained on, at each evaluation."""
    seconds: float = 0.0

    def final(self, task: str) -> float:
        return statistics.fmean(each.scores.get(task, 0.0) for each in self.evaluated[-LAST:])


def measure(
    sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress, report: Path | None = None
) -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="tangram-learning-") as folder:
        return asyncio.run(_measure(sizes, Path(folder), progress, report))


async def _measure(sizes: Sizes, folder: Path, progress: Progress, report: Path | None) -> BenchResult:
    found = Findings()
    parts = sizes.seeds * (len(sizes.tasks) + 2 * sizes.mix + 0.3 * len(sizes.alphas))
    done = 0.0
    alone: dict[str, list[Run]] = {task: [] for task in sizes.tasks}
    mixed: list[Run] = []
    aged: dict[int, list[Run]] = {alpha: [] for alpha in sizes.alphas}
    for seed in range(sizes.seeds):
        for task in sizes.tasks:
            progress(done / parts, f"{task}, seed {seed}")
            settings = settings_of(sizes, (task,), seed)
            alone[task].append(await run_training(settings, folder / f"{task}-{seed}", sizes.task_s))
            done += 1.0
        if sizes.mix:
            progress(done / parts, f"mix, seed {seed}")
            mixed.append(await run_training(settings_of(sizes, MIX, seed), folder / f"mix-{seed}", sizes.mix_s))
            done += 2.0
        for alpha in sizes.alphas:
            progress(done / parts, f"alpha {alpha}, seed {seed}")
            settings = settings_of(sizes, ("frozenlake",), seed, alpha=alpha, steps=sizes.alpha_steps)
            aged[alpha].append(await run_training(settings, folder / f"alpha-{alpha}-{seed}", None))
            done += 0.3
    for task, runs in alone.items():
        found.add(f"final_{task}", mean_of([run.final(task) for run in runs]), at_least(0.8))
        found.add(f"random_{task}", await random_score(task), at_most(0.25))
        _add_warm(found, task, runs)
        found.add(f"seconds_{task}", mean_of([run.seconds for run in runs]), at_most(sizes.task_s))
    if mixed:
        for task in MIX:
            found.add(f"mix_{task}", mean_of([run.final(task) for run in mixed]), at_least(0.8))
            _add_warm(found, task, mixed, "mix_")
        found.add("seconds_mix", mean_of([run.seconds for run in mixed]), at_most(sizes.mix_s))
    for alpha, runs in aged.items():
        found.add(f"alpha_{alpha}", mean_of([run.final("frozenlake") for run in runs]), PRINTED)
        found.notes.append(f"alpha {alpha}: {_curve(runs)}")
    if report is not None:
        await asyncio.to_thread(report.write_text, page_of(alone, mixed, aged))
        found.notes.append(f"The curves are in {report}.")
    return found.result("learning", "measured", sizes)


def _add_warm(found: Findings, task: str, runs: list[Run], before: str = "") -> None:
    greedy = [run.warm.greedy[task] for run in runs if run.warm is not None and task in run.warm.greedy]
    sampled = [run.warm.scores[task] for run in runs if run.warm is not None and task in run.warm.scores]
    if greedy:
        found.add(f"{before}warm_{task}", mean_of(greedy), at_most(0.5))
    if sampled:
        found.add(f"{before}warm_sampled_{task}", mean_of(sampled), at_most(0.5))


# ---- runs ---------------------------------------------------------------------------------------------------------


def settings_of(
    sizes: Sizes, tasks: tuple[str, ...], seed: int, *, alpha: int = 1, steps: int = 100_000
) -> TrainSettings:
    dear = any(task in DEAR for task in tasks)
    batch = sizes.batch_dear if dear and len(tasks) == 1 else sizes.batch
    return TrainSettings(
        seed=seed,
        policy=PolicySettings(seed=seed),
        engines=(EngineSettings(slots=64, sessions=256, context_max=192),),
        groups=GroupSettings(size=sizes.members),
        tasks=tuple(TASKS[task] for task in tasks),
        training=TrainingSettings(mode="rollart", staleness=alpha, steps=steps, batch=batch),
        objective=ObjectiveSettings(epochs=sizes.epochs_dear if dear else sizes.epochs),
        evaluation=EvaluationSettings(every=max(1, sizes.every // batch), episodes=sizes.episodes),
        checkpoints=CheckpointSettings(every=1_000_000),
    )


async def run_training(settings: TrainSettings, folder: Path, seconds_max: float | None) -> Run:
    """Until it is well above the goal, or the time is over; without a limit, to its last step."""
    seen, trajectories = Run(evaluated=[], trajectories=[]), 0
    enough = asyncio.Event()
    tasks = [task.name for task in settings.tasks]

    def tell(line: AnyLine) -> None:
        nonlocal trajectories
        seen.seconds = line.at_s
        if isinstance(line, Warmed) and line.over:
            seen.warm, seen.warm_s = line, line.at_s
        elif isinstance(line, Trained):
            trajectories += sum(line.staleness)
        elif isinstance(line, Evaluated):
            seen.evaluated.append(line)
            seen.trajectories.append(trajectories)
            if seconds_max is not None and len(seen.evaluated) > LAST and min(map(seen.final, tasks)) >= ENOUGH:
                enough.set()

    training = asyncio.create_task(train(settings, folder, tell=tell))
    waiting = asyncio.create_task(enough.wait())
    try:
        await asyncio.wait({training, waiting}, timeout=seconds_max, return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            await training
    finally:
        for task in (training, waiting):
            task.cancel()
        await asyncio.gather(training, waiting, return_exceptions=True)
    assert seen.evaluated, f"{folder.name} was not evaluated once within {seconds_max} s"
    return seen


async def random_score(task: str) -> float:
    """Of the agent that plays well-formed actions blindly."""
    settings = TrainSettings(tasks=(TASKS[task],))
    made = tasks_of(settings)
    client: Client = await connection(settings.outside, made, None)
    async with client:
        episodes = await demonstrations(
            made[0], "random", range(SEED_FIRST, SEED_FIRST + RANDOM_EPISODES), outside=Outside(client=client)
        )
    return statistics.fmean(each.reward for each in episodes)


# ---- curves -------------------------------------------------------------------------------------------------------


def _curve(runs: list[Run]) -> str:
    """Held-out scores by trajectories, means over seeds."""
    points = zip(*(zip(run.trajectories, run.evaluated, strict=True) for run in runs), strict=False)
    return ", ".join(
        f"{statistics.fmean(count for count, _ in point):.0f}: "
        f"{statistics.fmean(line.scores.get('frozenlake', 0.0) for _, line in point):.2f}"
        for point in points
    )


def page_of(alone: dict[str, list[Run]], mixed: list[Run], aged: dict[int, list[Run]]) -> str:
    charts: list[tuple[str, dict[str, list[tuple[float, float]]]]] = []
    for task, runs in alone.items():
        charts.append((f"{task} alone", {f"seed {n}": _points(run, task) for n, run in enumerate(runs)}))
    for task in MIX if mixed else ():
        charts.append((f"{task} in the mix", {f"seed {n}": _points(run, task) for n, run in enumerate(mixed)}))
    if aged:
        lines = {f"α = {alpha}": _points(runs[0], "frozenlake") for alpha, runs in aged.items()}
        charts.append(("frozenlake by staleness, seed 0", lines))
    drawn = "\n".join(_chart(title, lines) for title, lines in charts)
    return (
        "<!doctype html><meta charset=utf-8><title>Learning</title>"
        "<style>body{font:14px sans-serif;margin:2em;color-scheme:light dark}svg{max-width:480px;margin:8px}</style>"
        f"<h1>Held-out reward by trajectories trained on</h1>{drawn}"
    )


def _points(run: Run, task: str) -> list[tuple[float, float]]:
    return [
        (count, line.scores[task])
        for count, line in zip(run.trajectories, run.evaluated, strict=True)
        if task in line.scores
    ]


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


def _chart(title: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    most = max((x for points in lines.values() for x, _ in points), default=1.0) or 1.0
    drawn: list[Any] = []
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{40 + 420 * x / most:.1f},{180 - 160 * y:.1f}" for x, y in points)
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        drawn.append(f'<text x="{46 + 90 * number}" y="214" fill="{colour}" font-size="12">{html.escape(name)}</text>')
    grid = "".join(
        f'<line x1="40" x2="460" y1="{180 - 160 * y:.0f}" y2="{180 - 160 * y:.0f}" stroke="#8884"/>'
        f'<text x="8" y="{184 - 160 * y:.0f}" font-size="11" fill="currentColor">{y:g}</text>'
        for y in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    )
    end = f'<text x="400" y="196" font-size="11" fill="currentColor">{most:.0f}</text>'
    name = html.escape(title)
    return (
        f'<svg viewBox="0 0 470 224" role="img"><title>{name}</title>'
        f'<text x="40" y="12" font-size="13" fill="currentColor">{name}</text>{grid}{"".join(drawn)}{end}</svg>'
    )
