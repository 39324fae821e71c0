"""RL steps of `codefix` where cores are scarce: cores reserved for the life of a trajectory, against held by actions.

A step is a batch of groups, played to the last reward and trained on. Engine, trainer, sandboxes and all that runs in
them are real; the engine writes no faster than an emulated one would, because a policy that is worth its sandboxes is
larger than the one here, and trajectories think while it writes. That is what a reservation wastes.

Both sides play the same groups with the same weights: the learning rate is so small that nothing changes, and noise is
a function of the group. They go through the same client, scheduler and manager, and differ in one number, the
concurrency of the task:

    reserved    as many trajectories are open as there are cores: each has one from its reset to its last step, whether
                an action of it runs or it waits for its next turn to be written. (A reward is computed after that,
                while the next one begins already: that favours this side.)
    by action   all trajectories of the batch are open: an action holds its cores while it runs

`step_ratio` is the time of a step reserved over that by action, seed by seed. `acting_share` is the share of a
reservation in which the environment of the trajectory was at work.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, paired_values, part
from tangram.bench.reservation import usual_backend
from tangram.bench.reservation.sides import BY_ACTION, RESERVED, SIDES, client
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    OutsideSettings,
    PolicySettings,
    TaskSettings,
)
from tangram.rl.config.training_settings import (
    CheckpointSettings,
    EvaluationSettings,
    ObjectiveSettings,
    TrainingSettings,
    TrainSettings,
    WarmStartSettings,
)
from tangram.rl.rollout.records import Group, Stage, Trajectory
from tangram.rl.train.behaviour_cloning import imitated
from tangram.rl.train.pipeline import train
from tangram.rl.train.records import AnyLine, Trained

OPTIONS = ("backend",)
TASK = "codefix"
SEEN_MAX = 32
"""Tokens of an observation. What environments said is read in one step: reading does not hold up writing."""
RATE = 1e-12
"""Of learning: no float32 weight changes by it."""
FOR_EVER_S = 3600.0
"""Whoever waits for a core does not fail for it."""
AGENT = "teacher"
"""Whom the policy imitates before: it edits the right line, and mostly needs several turns."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    seeds: int = 3
    steps: int = 2
    """That are measured, after one that is not."""
    groups: int = 6
    members: int = 8
    cores: int = 2
    turns: int = 3
    decode_s_per_step: float = 0.05
    """Emulated: of writing one token, for all trajectories at once. An edit has four of them and takes a fifth of a
    second, where agents that are worth their sandboxes think for seconds; their tests take longer too."""
    shown: int = 192
    """Episodes that the policy imitates before ..."""
    imitations: int = 60
    """... in so many steps."""


FULL = Sizes()
QUICK = Sizes(seeds=1, steps=1, groups=4, shown=96, imitations=40)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side under one seed."""

    steps_s: list[float]
    train_s: float
    """Mean of a step."""
    actions: dict[str, tuple[str, ...]]
    """Of each trajectory that was measured: what it did."""
    thinking_s: float
    """Of a trajectory: writing, mean."""
    acting_s: float
    """Of a trajectory: what its environment took, with what it waited for cores, mean."""
    open_s: float
    """Of a trajectory: from its place to its last step, mean."""


# ---- playing ------------------------------------------------------------------------------------------------------


def settings_of(sizes: Sizes, seed: int, policy: Path | None, concurrency: int) -> TrainSettings:
    trajectories = sizes.groups * sizes.members
    return TrainSettings(
        seed=seed,
        policy=PolicySettings(checkpoint=str(policy) if policy else "", seed=seed),
        engines=(
            EngineSettings(
                slots=trajectories, chunk=trajectories * SEEN_MAX, decode_s_per_step=sizes.decode_s_per_step
            ),
        ),
        groups=GroupSettings(size=sizes.members),
        outside=OutsideSettings(cores=float(sizes.cores)),
        tasks=(
            TaskSettings(
                name=TASK, concurrency=concurrency, turns_max=sizes.turns, options={"turns": sizes.turns},
                reset_timeout_s=FOR_EVER_S, step_timeout_s=FOR_EVER_S,
            ),
        ),
        training=TrainingSettings(mode="sync+", steps=sizes.steps + 1, batch=sizes.groups, stall_s=FOR_EVER_S),
        objective=ObjectiveSettings(learning_rate=RATE, zero_variance="keep"),
        warm_start=WarmStartSettings(agent=AGENT),
        evaluation=EvaluationSettings(every=0),
        checkpoints=CheckpointSettings(every=sizes.steps + 1),
    )  # fmt: skip


class Watch:
    """Remembers the trajectories of a run."""

    def __init__(self) -> None:
        self.ended_: list[Trajectory] = []

    def began(self, trajectory: str, task: str) -> None: ...

    def stage(self, trajectory: str, stage: Stage) -> None: ...

    def ended(self, trajectory: Trajectory) -> None:
        self.ended_.append(trajectory)

    def group(self, group: Group) -> None: ...


async def _side(side: str, sizes: Sizes, seed: int, policy: Path, backend: str, folder: Path) -> Side:
    concurrency = sizes.cores if side == RESERVED else sizes.groups * sizes.members
    run = folder / f"{seed}-{side.replace(' ', '-')}"
    lines: list[AnyLine] = []
    watch = Watch()
    async with client(BY_ACTION, cores=sizes.cores, backend=backend, state=folder / "state") as connected:
        settings = settings_of(sizes, seed, policy, concurrency)
        await train(settings, run, tell=lines.append, client=connected, watch=watch)
    trained = [line for line in lines if isinstance(line, Trained)][1:]
    assert len(trained) == sizes.steps, f"expected {sizes.steps} measured steps, got {len(trained)}"
    played = [each for each in watch.ended_ if each.ending.rewarded]
    spent = [time_spent(each) for each in played]
    return Side(
        steps_s=[line.step_s for line in trained],
        train_s=statistics.fmean(line.train_s for line in trained),
        actions={each.id: tuple(turn.action for turn in each.turns) for each in played},
        thinking_s=statistics.fmean(each[0] for each in spent),
        acting_s=statistics.fmean(each[1] for each in spent),
        open_s=statistics.fmean(each[2] for each in spent),
    )


def time_spent(trajectory: Trajectory) -> tuple[float, float, float]:
    """Seconds of writing, of its environment, and between its place and its last step."""
    spans = [span for span in trajectory.spans if span.stage in (Stage.RESET, Stage.GENERATE, Stage.STEP)]
    placed_s = spans[0].began_s + spans[0].waiting_s
    writing_s = sum(span.ended_s - span.began_s for span in spans if span.stage is Stage.GENERATE)
    open_s = spans[-1].ended_s - placed_s
    return writing_s, open_s - writing_s, open_s


# ---- the benchmark ------------------------------------------------------------------------------------------------


def measure(
    sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress, backend: str = ""
) -> BenchResult:
    usual, why = usual_backend()
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        result = asyncio.run(_measure(sizes, Path(folder), backend or usual, progress))
    if not backend and why:
        result.notes.append(f"Commands ran as plain processes: {why}.")
    return result


async def _measure(sizes: Sizes, folder: Path, backend: str, progress: Progress) -> BenchResult:
    (folder / "state").mkdir(mode=0o711)
    found: dict[str, list[Side]] = {side: [] for side in SIDES}
    for seed in range(sizes.seeds):
        told = part(progress, seed / sizes.seeds, (seed + 1) / sizes.seeds)
        policy = folder / f"{seed}-policy"
        async with client(BY_ACTION, cores=sizes.cores, backend=backend, state=folder / "state") as connected:
            await imitated(
                settings_of(sizes, seed, None, sizes.cores), policy, agent=AGENT, episodes=sizes.shown,
                steps=sizes.imitations, client=connected,
            )  # fmt: skip
        for number, side in enumerate(SIDES if seed % 2 == 0 else reversed(SIDES)):
            told((number + 1) / 3, f"seed {seed}: {side}")
            found[side].append(await _side(side, sizes, seed, policy, backend, folder))
        told(1.0, f"seed {seed}")
    return _result(sizes, found, backend)


def _result(sizes: Sizes, found: dict[str, list[Side]], backend: str) -> BenchResult:
    told, reserved, ours = Findings(), found[RESERVED], found[BY_ACTION]
    ratio = paired_values(
        [statistics.fmean(each.steps_s) for each in reserved], [statistics.fmean(each.steps_s) for each in ours]
    )
    told.add("step_ratio", ratio, at_least(1.5))
    for side, name in ((reserved, "reserved"), (ours, "by_action")):
        told.add(f"step_s_{name}", mean_of([statistics.fmean(each.steps_s) for each in side]), PRINTED)
        told.add(f"train_s_{name}", mean_of([each.train_s for each in side]), PRINTED)
        told.add(f"thinking_s_{name}", mean_of([each.thinking_s for each in side]), PRINTED)
        told.add(f"acting_s_{name}", mean_of([each.acting_s for each in side]), PRINTED)
    told.add("acting_share", mean_of([each.acting_s / each.open_s for each in reserved]), PRINTED)
    told.add("same_actions_share", _same(reserved, ours), PRINTED)
    told.notes += [
        f"A step: {sizes.groups} groups of {sizes.members}, played as mode sync+ does, and trained on; {sizes.cores}"
        f" cores; backend {backend}. Writing a token takes {sizes.decode_s_per_step:g} s: emulated.",
        "thinking_s, acting_s: of a trajectory, what the writing of its turns and its environment took; by action, with"
        " what it waited for cores.",
        "same_actions_share: trajectories that did the same on both sides, to the letter.",
    ]
    return told.result("step", "emulated", sizes)


def _same(one: list[Side], other: list[Side]) -> float:
    pairs = [
        (each.actions.get(name), actions)
        for each, beside in zip(one, other, strict=True)
        for name, actions in beside.actions.items()
    ]
    return sum(left == right for left, right in pairs) / len(pairs)
