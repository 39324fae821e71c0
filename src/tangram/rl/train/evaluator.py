"""The evaluator: scores a policy on held-out seeds, before, during and after its training.

    scores = await evaluate(rollout, held_out_tickets(settings, 64, temperature=1.0))

Owns which seeds are held out, the scores, and the number of each evaluation, which makes group names unique. Never
changes weights; the caller ensures that the engines have the intended version. Promises the same episodes at every
call, for any seed of the run, so that two scores differ only by the policy and its sampling. Episodes that failed
because of the infrastructure count in no mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import aclosing

import msgspec

from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.rollout.assembly import RolloutAssembly
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.runs.metrics_lines import Evaluated, WarmStartChecked
from tangram.rl.train.run_reporter import RunReporter
from tangram.rl.train.trainer import Trainer
from tangram.rl.train.warm_start import WarmStartCheck, collect_demonstrations, warm_start, warm_start_targets
from tangram.rl.trajectories.trajectory import Group, GroupTicket

SERIES = "eval-"
SEED_FIRST = 1 << 31
"""Tickets of training have seeds of 31 bits, see rollout.tickets."""
NUMBER_STRIDE = 1 << 20
"""Distance between the group numbers of two evaluations; larger than the episodes of one."""


class Evaluator:
    def __init__(
        self,
        settings: TrainSettings,
        assembly: RolloutAssembly,
        reporter: RunReporter,
        *,
        evaluations: int,
        last_evaluated: int,
    ) -> None:
        """`evaluations`: how many the run had before. `last_evaluated`: the version of the last; -1 if there was
        none."""
        self.evaluations = evaluations
        self.last_evaluated = last_evaluated
        self._settings, self._assembly, self._reporter = settings, assembly, reporter

    def is_due(self, version: int) -> bool:
        every = self._settings.evaluation.every
        return every > 0 and version % every == 0

    async def evaluate(self, version: int) -> None:
        """Scores the engines, which have this version."""
        evaluation, began_at = self._settings.evaluation, self._reporter.now()
        self.evaluations += 1
        self.last_evaluated = version
        upcoming = held_out_tickets(
            self._settings, evaluation.episodes, temperature=evaluation.temperature, number=self.evaluations
        )
        scores = await evaluate(self._assembly.rollout, upcoming)
        line = Evaluated(
            at_s=self._reporter.now(), step=version, seconds=self._reporter.now() - began_at, scores=scores.mean,
            spread=scores.spread, episodes=scores.episodes, temperature=evaluation.temperature,
        )  # fmt: skip
        self._reporter.write(line)

    def rollback(self, version: int) -> bool:
        """Training goes back to this version. Returns whether a later one was evaluated; that evaluation no longer
        counts."""
        is_later = self.last_evaluated > version
        if is_later:
            self.last_evaluated = -1
        return is_later

    async def run_warm_start(self, trainer: Trainer, progress: Progress | None) -> WarmStartChecked | None:
        """Runs the warm start of all tasks that have one; returns None if there are none. Raises TrainerDied and
        ManagerError."""
        if not warm_start_targets(self._settings):
            return None
        demonstrations = await collect_demonstrations(
            self._settings, self._assembly.client, self._assembly.codec, progress
        )

        async def score() -> dict[str, float]:
            await self._assembly.router.update(await trainer.publish(0))
            return await self._scores(self._settings.warm_start.check_episodes, 1.0)

        last = await warm_start(self._settings, trainer, demonstrations, score, self._on_warm_start_check)
        greedy = await self._scores(self._settings.evaluation.episodes, 0.0)
        cause = (
            f"not reached by {', '.join(last.tasks_behind)} in {last.step} steps"
            if last.tasks_behind
            else "reached by all"
        )
        warmed = WarmStartChecked(
            at_s=self._reporter.now(),
            step=last.step,
            loss=last.loss,
            scores=last.scores,
            greedy=greedy,
            over=True,
            cause=cause,
        )
        self._reporter.write(warmed)
        return warmed

    async def _scores(self, episodes: int, temperature: float) -> dict[str, float]:
        """Uses other seeds each time, so that unlucky seeds do not keep a warm start going."""
        self.evaluations += 1
        number = self.evaluations
        upcoming = held_out_tickets(
            self._settings, episodes, temperature=temperature, number=number, first=number * episodes
        )
        return (await evaluate(self._assembly.rollout, upcoming)).mean

    def _on_warm_start_check(self, check: WarmStartCheck) -> None:
        self._reporter.write(
            WarmStartChecked(at_s=self._reporter.now(), step=check.step, loss=check.loss, scores=check.scores)
        )


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores by task. A task without any reward is in `endings` alone."""

    mean: dict[str, float]
    spread: dict[str, float]
    """Standard error of the mean; nan for a single episode."""
    episodes: dict[str, int]
    """Number of episodes with a reward."""
    endings: dict[str, dict[str, int]] = {}
    """Number of episodes by ending, those without a reward included."""
    causes: dict[str, str] = {}
    """Why the first lost episode of a task was lost."""


def held_out_tickets(
    settings: RolloutSettings, episodes: int, *, temperature: float, number: int = 0, first: int = 0
) -> list[GroupTicket]:
    """Returns tickets for `episodes` episodes of each task, evenly mixed. `number`: of the evaluation within the run;
    it makes group names unique and does not change the seeds. `first`: the first held-out seed."""
    return [
        GroupTicket(
            task=task.name,
            number=number * NUMBER_STRIDE + index,
            seed=SEED_FIRST + first + index,
            series=SERIES,
            size=1,
            temperature=temperature,
        )
        for index in range(episodes)
        for task in settings.tasks
    ]


async def evaluate(rollout: Rollout, tickets: Sequence[GroupTicket]) -> Scores:
    """Plays the tickets, all at once. Raises what the generator raised."""
    groups: list[Group] = []
    if tickets:
        async with aclosing(rollout.stream(tickets, in_flight=len(tickets))) as playing:
            async for group in playing:
                groups.append(group)
    return scores_of(groups)


def scores_of(groups: Iterable[Group]) -> Scores:
    rewards: dict[str, list[float]] = {}
    endings: dict[str, dict[str, int]] = {}
    causes: dict[str, str] = {}
    # Sorted by name: the last bit of a mean depends on the order, and the order of ending on timing.
    for group in sorted(groups, key=lambda played: played.id):
        counts = endings.setdefault(group.task, {})
        for trajectory in group.all_trajectories():
            counts[trajectory.ending.value] = counts.get(trajectory.ending.value, 0) + 1
            if trajectory.reward is None:
                causes.setdefault(group.task, f"{trajectory.id} {trajectory.ending}: {trajectory.cause}")
        rewards.setdefault(group.task, []).extend(
            member.reward for member in group.members if member.reward is not None
        )
    rewarded = {task: values for task, values in sorted(rewards.items()) if values}
    return Scores(
        mean={task: statistics.fmean(values) for task, values in rewarded.items()},
        spread={task: _standard_error(values) for task, values in rewarded.items()},
        episodes={task: len(values) for task, values in rewarded.items()},
        endings=dict(sorted(endings.items())),
        causes=causes,
    )


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
