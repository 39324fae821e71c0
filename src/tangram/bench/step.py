"""RL steps of `codefix` with scarce cores: cores reserved per trajectory against cores held per action.

A step is a batch of groups, played to the last reward and trained on. Engine, trainer and sandboxes are real. The
engine decodes no faster than an emulated one: a policy that needs sandboxes is larger than the one here, and
trajectories think while it decodes. A reservation wastes its cores in that time.

Both sides play the same groups with the same weights: the learning rate is too small to change a weight, and noise is a
function of the group. They differ in one number, the concurrency of the task: as many open trajectories as there are
cores, from reset to last step; or all of the batch. (A reward is computed after the last step, while the next
trajectory begins: that favours the reserved side.)
"""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_least, paired_ratio_of_values, subprogress
from tangram.bench.reservation.sides import BY_ACTION, RESERVED, SIDES, client
from tangram.reports.statistics import mean_of
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    ResourceSettings,
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
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Trained
from tangram.rl.train.behaviour_cloning import clone_behaviour
from tangram.rl.train.pipeline import train
from tangram.rl.trajectories.trajectory import Group, Stage, Trajectory

OPTIONS = ("backend",)
TASK = "codefix"
SEEN_MAX = 32
"""Tokens of an observation. All observations are prefilled in one step, so prefill does not delay decoding."""
RATE = 1e-12
"""Learning rate: no float32 weight changes by it."""
FOR_EVER_S = 3600.0
"""Waiting for a core never times out."""
AGENT = "teacher"
"""The agent that the policy imitates first: it edits the right line, and mostly needs several turns."""


class StepSizes(msgspec.Struct, frozen=True, kw_only=True):
    seeds: int = 3
    steps: int = 2
    """Measured steps, after one that is not."""
    groups: int = 6
    members: int = 8
    cores: int = 2
    turns: int = 3
    decode_s_per_step: float = 0.05
    """Emulated time of a decode step, for all trajectories at once. An edit has four tokens and takes a fifth of a
    second, where agents that need sandboxes think for seconds; their tests also take longer."""
    shown: int = 192
    """Episodes of the imitated agent."""
    imitations: int = 60
    """Training steps on these."""


LABEL = "emulated"
FULL = StepSizes()
QUICK = StepSizes(seeds=1, steps=1, groups=4, shown=96, imitations=40)


class StepTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One side under one seed."""

    steps_s: list[float]
    train_s: float
    """Mean per step."""
    actions: dict[str, tuple[str, ...]]
    """What each measured trajectory did."""
    thinking_s: float
    """Mean decoding time of a trajectory."""
    acting_s: float
    """Mean environment time of a trajectory, including waiting for cores."""
    open_s: float
    """Mean time of a trajectory from admission to its last step."""


# ---- playing ------------------------------------------------------------------------------------------------------


def settings_of(sizes: StepSizes, seed: int, policy: Path | None, concurrency: int) -> TrainSettings:
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
        resources=ResourceSettings(cores=float(sizes.cores)),
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


class TrajectoryRecorder:
    """Records the trajectories of a run."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    def on_begin(self, trajectory: str, task: str) -> None: ...

    def on_stage(self, trajectory: str, stage: Stage) -> None: ...

    def on_end(self, trajectory: Trajectory) -> None:
        self.trajectories.append(trajectory)

    def on_group(self, group: Group) -> None: ...


async def _run_side(side: str, sizes: StepSizes, seed: int, policy: Path, backend: str, folder: Path) -> StepTiming:
    concurrency = sizes.cores if side == RESERVED else sizes.groups * sizes.members
    run = folder / f"{seed}-{side.replace(' ', '-')}"
    lines: list[AnyMetricsLine] = []
    watch = TrajectoryRecorder()
    async with client(BY_ACTION, cores=sizes.cores, backend=backend, state=folder / "state") as connected:
        settings = settings_of(sizes, seed, policy, concurrency)
        await train(settings, run, on_line=lines.append, client=connected, observer=watch)
    trained = [line for line in lines if isinstance(line, Trained)][1:]
    assert len(trained) == sizes.steps, f"expected {sizes.steps} measured steps, got {len(trained)}"
    played = [each for each in watch.trajectories if each.ending.is_rewarded]
    spent = [time_spent(each) for each in played]
    return StepTiming(
        steps_s=[line.step_s for line in trained],
        train_s=statistics.fmean(line.train_s for line in trained),
        actions={each.id: tuple(turn.action for turn in each.turns) for each in played},
        thinking_s=statistics.fmean(each[0] for each in spent),
        acting_s=statistics.fmean(each[1] for each in spent),
        open_s=statistics.fmean(each[2] for each in spent),
    )


def time_spent(trajectory: Trajectory) -> tuple[float, float, float]:
    """Return the seconds of decoding, of the environment, and between admission and the last step."""
    spans = [span for span in trajectory.spans if span.stage in (Stage.RESET, Stage.GENERATE, Stage.STEP)]
    placed_s = spans[0].began_s + spans[0].waiting_s
    writing_s = sum(span.ended_s - span.began_s for span in spans if span.stage is Stage.GENERATE)
    open_s = spans[-1].ended_s - placed_s
    return writing_s, open_s - writing_s, open_s


# ---- the benchmark ------------------------------------------------------------------------------------------------


async def measure(sizes: StepSizes, run: BenchRun) -> None:
    (run.folder / "state").mkdir(mode=0o711)
    timings: dict[str, list[StepTiming]] = {side: [] for side in SIDES}
    for seed in range(sizes.seeds):
        progress = subprogress(run.progress, seed / sizes.seeds, (seed + 1) / sizes.seeds)
        policy = run.folder / f"{seed}-policy"
        async with client(BY_ACTION, cores=sizes.cores, backend=run.backend, state=run.folder / "state") as connected:
            await clone_behaviour(
                settings_of(sizes, seed, None, sizes.cores), policy, agent=AGENT, episodes=sizes.shown,
                steps=sizes.imitations, client=connected,
            )  # fmt: skip
        for number, side in enumerate(SIDES if seed % 2 == 0 else reversed(SIDES)):
            progress((number + 1) / 3, f"seed {seed}: {side}")
            timings[side].append(await _run_side(side, sizes, seed, policy, run.backend, run.folder))
        progress(1.0, f"seed {seed}")
    _add_metrics(sizes, timings, run)


def _add_metrics(sizes: StepSizes, timings: dict[str, list[StepTiming]], run: BenchRun) -> None:
    reserved, ours = timings[RESERVED], timings[BY_ACTION]
    ratio = paired_ratio_of_values(
        [statistics.fmean(each.steps_s) for each in reserved], [statistics.fmean(each.steps_s) for each in ours]
    )
    run.add("step_ratio", ratio, at_least(1.5))
    for side, name in ((reserved, "reserved"), (ours, "by_action")):
        run.add(f"step_s_{name}", mean_of([statistics.fmean(each.steps_s) for each in side]), PRINTED)
        run.add(f"train_s_{name}", mean_of([each.train_s for each in side]), PRINTED)
        run.add(f"thinking_s_{name}", mean_of([each.thinking_s for each in side]), PRINTED)
        run.add(f"acting_s_{name}", mean_of([each.acting_s for each in side]), PRINTED)
    run.add("acting_share", mean_of([each.acting_s / each.open_s for each in reserved]), PRINTED)
    run.add("same_actions_share", _same_actions_share(reserved, ours), PRINTED)
    run.notes += [
        f"A step: {sizes.groups} groups of {sizes.members}, played in mode sync+, and trained on; {sizes.cores}"
        f" cores; backend {run.backend}. Decoding a token takes {sizes.decode_s_per_step:g} s: emulated.",
        "thinking_s, acting_s: time of a trajectory in decoding and in its environment; by action, acting_s includes"
        " waiting for cores.",
        "same_actions_share: trajectories with identical actions on both sides.",
    ]


def _same_actions_share(one: list[StepTiming], other: list[StepTiming]) -> float:
    pairs = [
        (each.actions.get(name), actions)
        for each, counterpart in zip(one, other, strict=True)
        for name, actions in counterpart.actions.items()
    ]
    return sum(left == right for left, right in pairs) / len(pairs)
