"""The warm start: a policy imitates scripted agents that know the format of a task and not its goal.

Owns the demonstrations and when it is enough: once the policy, sampling, has had the share of the highest reward that a
task names in `warm_until`, for each task. All are imitated until then, so that none is forgotten. Whatever the policy
can do after that, it has learned by trying. Never counts as training: the version is 0 all the while.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from tangram.client.client import Client
from tangram.errors import InvalidConfig
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.agents import Episode, demonstrations
from tangram.rl.environments.protocol import Outside, Task
from tangram.rl.environments.registry import resolve
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.rollout.assembly import tasks_of
from tangram.rl.rollout.codec import Codec
from tangram.rl.train.records import Demonstration
from tangram.rl.train.trainer import Trainer

AT_ONCE = 64
"""Episodes that are played between two words of progress."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """How well the policy does after so many steps."""

    step: int
    loss: float
    scores: dict[str, float]
    """By task: mean reward."""
    behind: tuple[str, ...]
    """Tasks that are not there yet."""


def warmed_tasks(settings: TrainSettings) -> dict[str, float]:
    """By task that has a warm start: the reward at which it is enough."""
    wanted = {}
    for task, own in zip(tasks_of(settings), settings.tasks, strict=True):
        if own.warm_until > 0.0:
            low, high = reward_range(task)
            wanted[own.name] = low + own.warm_until * (high - low)
    return wanted


def require_agents(settings: TrainSettings) -> None:
    """Raises InvalidConfig, if a task that has a warm start has nobody of that name to be imitated."""
    name = settings.warm_start.agent
    for own in settings.tasks:
        if own.warm_until > 0.0 and name not in (agents := resolve(own.environment or own.name).agents):
            expected = f"an agent of task {own.name}, which has a warm start (there are: {', '.join(agents) or 'none'})"
            raise InvalidConfig("warm_start.agent", name, expected)


def reward_range(task: Task) -> tuple[float, float]:
    low, high = getattr(task, "reward_range", (0.0, 1.0))
    return float(low), float(high)


def tokenised(task: str, episode: Episode, codec: Codec) -> Demonstration:
    """Raises ValueError for what the policy has no word for."""
    tokens: list[int] = []
    is_action: list[bool] = []
    for observation, action in zip(episode.observations, episode.actions, strict=False):
        for text, mine in (
            (codec.observation(observation, first=not tokens), False),
            (codec.written(action), True),
        ):
            tokens += text
            is_action += [mine] * len(text)
    return Demonstration(task=task, tokens=tuple(tokens), is_action=tuple(is_action))


async def shown(
    settings: TrainSettings, client: Client | None, codec: Codec, progress: Progress | None
) -> dict[str, list[Demonstration]]:
    """By task: what its agent does. Raises what an environment raises, and InvalidConfig for words that the policy does
    not know."""
    wanted, found = warmed_tasks(settings), {}
    many = settings.warm_start.episodes
    for task, own in zip(tasks_of(settings), settings.tasks, strict=True):
        if own.name not in wanted:
            continue
        seeds = random.Random(f"{settings.seed}/{own.name}/warm").sample(range(1 << 31), many)
        outside = Outside(client=client, run=settings.run, trajectory=f"warm-{own.name}")
        episodes: list[Episode] = []
        for first in range(0, many, AT_ONCE):
            if progress is not None:
                progress(first / many, f"demonstrations of {own.name}")
            episodes += await demonstrations(
                task, settings.warm_start.agent, seeds[first : first + AT_ONCE], outside=outside,
                turns_max=own.turns_max, options=own.options,
            )  # fmt: skip
        try:
            found[own.name] = [tokenised(own.name, each, codec) for each in episodes]
        except ValueError as error:
            expected = f"words that the policy knows, in all that it says and that {settings.warm_start.agent} does"
            raise InvalidConfig(f"task {own.name}", str(error), expected) from error
    return found


async def warm_start(
    settings: TrainSettings,
    trainer: Trainer,
    shown_by_task: Mapping[str, Sequence[Demonstration]],
    score: Callable[[], Awaitable[dict[str, float]]],
    tell: Callable[[Look], None],
) -> Look:
    """Until it is enough for every task, or `steps_max`. `score`: the mean reward of each task at the moment. Returns
    the last look."""
    own, wanted = settings.warm_start, warmed_tasks(settings)
    chance = random.Random(f"{settings.seed}/warm")
    decks: dict[str, list[Demonstration]] = {task: [] for task in shown_by_task}
    turns = itertools.cycle(decks)
    behind, losses, look = set(wanted), [], None
    for step in range(1, own.steps_max + 1):
        losses.append(await trainer.imitate(_dealt(own.batch, turns, decks, shown_by_task, chance)))
        if step % own.check_every and step < own.steps_max:
            continue
        scores = await score()
        behind -= {task for task, least in wanted.items() if scores.get(task, -math.inf) >= least}
        look = Look(step=step, loss=sum(losses) / len(losses), scores=scores, behind=tuple(sorted(behind)))
        losses = []
        tell(look)
        if not behind:
            break
    assert look is not None
    return look


def _dealt(
    batch: int,
    turns: Iterator[str],
    decks: dict[str, list[Demonstration]],
    shown_by_task: Mapping[str, Sequence[Demonstration]],
    chance: random.Random,
) -> list[Demonstration]:
    """As many of each task; each episode once before any comes again."""
    dealt = []
    for task in itertools.islice(turns, batch):
        if not decks[task]:
            decks[task] = chance.sample(list(shown_by_task[task]), len(shown_by_task[task]))
        dealt.append(decks[task].pop())
    return dealt
