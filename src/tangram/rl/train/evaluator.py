"""The evaluator: scores a policy on held-out seeds, before, during and after its training.

    scores = await evaluate(rollout, held_out(settings, 64, temperature=1.0))

Owns which seeds are held out, the scores computed from their episodes, and the number of each evaluation, so that no
two have groups of the same name. Never changes weights; the caller makes sure that the engines have the intended
version. Promises the same episodes at every call, whatever the seed of the run, so that two scores differ only by the
policy and the randomness of its own tokens; episodes that the infrastructure failed count in no mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

import msgspec

from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.rollout.assembly import Assembled
from tangram.rl.rollout.records import Group, Ticket
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.train.records import AnyLine, Evaluated, Warmed
from tangram.rl.train.trainer import Trainer
from tangram.rl.train.warm_start import Look, shown, warm_start, warmed_tasks

SERIES = "eval-"
SEED_FIRST = 1 << 31
"""Tickets of training have seeds of 31 bits, see rollout.tickets."""


STRIDE = 1 << 20
"""Between the numbers of two evaluations: more than either has episodes."""


class Looks:
    def __init__(
        self,
        settings: TrainSettings,
        made: Assembled,
        *,
        count: int,
        looked: int,
        now: Callable[[], float],
        tell: Callable[[AnyLine], None],
    ) -> None:
        """`count`: how many there were already. `looked`: the version of the last; -1, if there was none."""
        self.count = count
        self.version = looked
        """The last that was evaluated."""
        self._settings, self._made, self._now, self._tell = settings, made, now, tell

    def due(self, version: int) -> bool:
        every = self._settings.evaluation.every
        return every > 0 and version % every == 0

    async def evaluate(self, version: int) -> None:
        """What the engines have is this version."""
        own, began_s = self._settings.evaluation, self._now()
        self.count += 1
        self.version = version
        upcoming = held_out(self._settings, own.episodes, temperature=own.temperature, number=self.count)
        scores = await evaluate(self._made.rollout, upcoming)
        line = Evaluated(
            at_s=self._now(), step=version, seconds=self._now() - began_s, scores=scores.mean, spread=scores.spread,
            episodes=scores.episodes, temperature=own.temperature,
        )  # fmt: skip
        self._tell(line)

    async def warm(self, trainer: Trainer, progress: Progress | None) -> Warmed | None:
        """The warm start, until it is enough; None: no task has one. Raises TrainerDied and ManagerError."""
        if not warmed_tasks(self._settings):
            return None
        demonstrations = await shown(self._settings, self._made.client, self._made.codec, progress)

        async def score() -> dict[str, float]:
            await self._made.gateway.update(await trainer.publish(0))
            return await self._scores(self._settings.warm_start.check_episodes, 1.0)

        last = await warm_start(self._settings, trainer, demonstrations, score, self._looked)
        greedy = await self._scores(self._settings.evaluation.episodes, 0.0)
        cause = f"not reached by {', '.join(last.behind)} in {last.step} steps" if last.behind else "reached by all"
        warmed = Warmed(
            at_s=self._now(), step=last.step, loss=last.loss, scores=last.scores, greedy=greedy, over=True, cause=cause
        )
        self._tell(warmed)
        return warmed

    async def _scores(self, episodes: int, temperature: float) -> dict[str, float]:
        """Each time on other seeds: a policy that was unlucky with some is not so for ever."""
        self.count += 1
        number = self.count
        upcoming = held_out(self._settings, episodes, temperature=temperature, number=number, first=number * episodes)
        return (await evaluate(self._made.rollout, upcoming)).mean

    def _looked(self, look: Look) -> None:
        self._tell(Warmed(at_s=self._now(), step=look.step, loss=look.loss, scores=look.scores))


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Each by task; a task of which no episode has a reward is in `endings` alone."""

    mean: dict[str, float]
    spread: dict[str, float]
    """Standard error of the mean; nan of a single episode."""
    episodes: dict[str, int]
    """That have a reward."""
    endings: dict[str, dict[str, int]] = {}
    """Episodes by how they ended, those that were played in vain included."""
    causes: dict[str, str] = {}
    """Why the first one of a task was lost, if any was."""


def held_out(
    settings: RolloutSettings, episodes: int, *, temperature: float, number: int = 0, first: int = 0
) -> list[Ticket]:
    """So many episodes of each task, evenly mixed. `number`: which evaluation of the run it is: its groups have names
    of their own, its seeds are those of all others. `first`: of the seeds that are held out, the one to begin with."""
    return [
        Ticket(
            task=task.name,
            number=number * STRIDE + index,
            seed=SEED_FIRST + first + index,
            series=SERIES,
            size=1,
            temperature=temperature,
        )
        for index in range(episodes)
        for task in settings.tasks
    ]


async def evaluate(rollout: Rollout, tickets: Sequence[Ticket], *, in_flight: int | None = None) -> Scores:
    """Plays them, all at once or `in_flight` at a time. Raises what a generator raised."""
    groups: list[Group] = []
    if tickets:
        async with aclosing(rollout.stream(tickets, in_flight or len(tickets))) as playing:
            async for group in playing:
                groups.append(group)
    return scores_of(groups)


def scores_of(groups: Iterable[Group]) -> Scores:
    rewards: dict[str, list[float]] = {}
    endings: dict[str, dict[str, int]] = {}
    causes: dict[str, str] = {}
    # By their names: the last bit of a mean depends on the order, and that in which they end on who was faster.
    for group in sorted(groups, key=lambda each: each.id):
        counts = endings.setdefault(group.task, {})
        for each in group.all():
            counts[each.ending.value] = counts.get(each.ending.value, 0) + 1
            if each.reward is None:
                causes.setdefault(group.task, f"{each.id} {each.ending}: {each.cause}")
        rewards.setdefault(group.task, []).extend(each.reward for each in group.members if each.reward is not None)
    found = {task: values for task, values in sorted(rewards.items()) if values}
    return Scores(
        mean={task: statistics.fmean(values) for task, values in found.items()},
        spread={task: _error(values) for task, values in found.items()},
        episodes={task: len(values) for task, values in found.items()},
        endings=dict(sorted(endings.items())),
        causes=causes,
    )


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
