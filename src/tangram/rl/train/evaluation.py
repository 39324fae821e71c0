"""Evaluation: how well a policy does on seeds that it is never trained on.

    scores = await evaluate(rollout, held_out(settings, 64, temperature=1.0))

Owns which seeds are held out, and what is made of the episodes. Never changes weights. Promises the same episodes
whenever it is asked, whatever the seed of the run, so that two scores differ by the policy and by chance of its own
tokens alone; and that an episode which the infrastructure failed counts in no mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import aclosing

import msgspec

from tangram.rl.config.rollout_settings import RolloutSettings
from tangram.rl.rollout.records import Group, Ticket
from tangram.rl.rollout.rollout import Rollout

SERIES = "eval-"
SEED_FIRST = 1 << 31
"""Tickets of training have seeds of 31 bits, see rollout.tickets."""


STRIDE = 1 << 20
"""Between the numbers of two evaluations: more than either has episodes."""


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
