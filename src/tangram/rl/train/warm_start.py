"""The warm start: behaviour cloning of scripted agents that know the format of a task but not its goal.

Owns the demonstrations and the end of the warm start: each task ends once the sampled policy reaches the share of the
highest reward that `warm_until` names. All tasks are imitated until the last one ends, so that none is forgotten. What
the policy can do beyond that, it learns by reinforcement. Never counts as training: the version stays 0.
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
from tangram.rl.environments.agents import AgentEpisode, demonstrations
from tangram.rl.environments.protocol import ExternalResources, Task
from tangram.rl.environments.registry import resolve
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.rollout.assembly import tasks_of
from tangram.rl.train.trainer import Trainer
from tangram.rl.trajectories.codec import Codec
from tangram.rl.trajectories.training_batch import Demonstration

EPISODES_PER_PROGRESS = 64
"""Episodes played between two progress reports."""


class WarmStartCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the policy after some steps."""

    step: int
    loss: float
    scores: dict[str, float]
    """By task: mean reward."""
    tasks_behind: tuple[str, ...]
    """Tasks that have not reached their target."""


def warm_start_targets(settings: TrainSettings) -> dict[str, float]:
    """Returns, for each task with a warm start, the mean reward at which it ends."""
    targets = {}
    for task, own in zip(tasks_of(settings), settings.tasks, strict=True):
        if own.warm_until > 0.0:
            low, high = reward_range(task)
            targets[own.name] = low + own.warm_until * (high - low)
    return targets


def require_agents(settings: TrainSettings) -> None:
    """Raises InvalidConfig if a task with a warm start has no agent of the configured name."""
    name = settings.warm_start.agent
    for own in settings.tasks:
        if own.warm_until > 0.0 and name not in (agents := resolve(own.environment or own.name).agents):
            expected = f"an agent of task {own.name}, which has a warm start (there are: {', '.join(agents) or 'none'})"
            raise InvalidConfig("warm_start.agent", name, expected)


def reward_range(task: Task) -> tuple[float, float]:
    low, high = getattr(task, "reward_range", (0.0, 1.0))
    return float(low), float(high)


def tokenise_episode(task: str, episode: AgentEpisode, codec: Codec) -> Demonstration:
    """Raises ValueError for a word that the vocabulary lacks."""
    tokens: list[int] = []
    is_action: list[bool] = []
    for observation, action in zip(episode.observations, episode.actions, strict=False):
        for text, is_own in (
            (codec.encode_observation(observation, first=not tokens), False),
            (codec.encode_action(action), True),
        ):
            tokens += text
            is_action += [is_own] * len(text)
    return Demonstration(task=task, tokens=tuple(tokens), is_action=tuple(is_action))


async def collect_demonstrations(
    settings: TrainSettings, client: Client | None, codec: Codec, progress: Progress | None
) -> dict[str, list[Demonstration]]:
    """Returns by task the episodes of its agent. Raises what an environment raises, and InvalidConfig for words that
    the vocabulary lacks."""
    targets, demonstrations_by_task = warm_start_targets(settings), {}
    count = settings.warm_start.episodes
    for task, own in zip(tasks_of(settings), settings.tasks, strict=True):
        if own.name not in targets:
            continue
        seeds = random.Random(f"{settings.seed}/{own.name}/warm").sample(range(1 << 31), count)
        outside = ExternalResources(client=client, run=settings.run, trajectory=f"warm-{own.name}")
        episodes: list[AgentEpisode] = []
        for first in range(0, count, EPISODES_PER_PROGRESS):
            if progress is not None:
                progress(first / count, f"demonstrations of {own.name}")
            episodes += await demonstrations(
                task, settings.warm_start.agent, seeds[first : first + EPISODES_PER_PROGRESS], outside=outside,
                turns_max=own.turns_max, options=own.options,
            )  # fmt: skip
        try:
            demonstrations_by_task[own.name] = [tokenise_episode(own.name, each, codec) for each in episodes]
        except ValueError as error:
            expected = (
                f"words of the policy's vocabulary, in observations and in actions of {settings.warm_start.agent}"
            )
            raise InvalidConfig(f"task {own.name}", str(error), expected) from error
    return demonstrations_by_task


async def warm_start(
    settings: TrainSettings,
    trainer: Trainer,
    demonstrations_by_task: Mapping[str, Sequence[Demonstration]],
    score: Callable[[], Awaitable[dict[str, float]]],
    on_check: Callable[[WarmStartCheck], None],
) -> WarmStartCheck:
    """Imitates until every task has reached its target, or for `steps_max` steps. `score` returns the current mean
    reward of each task. Returns the last check."""
    own, targets = settings.warm_start, warm_start_targets(settings)
    rng = random.Random(f"{settings.seed}/warm")
    decks: dict[str, list[Demonstration]] = {task: [] for task in demonstrations_by_task}
    turns = itertools.cycle(decks)
    behind, losses, check = set(targets), [], None
    for step in range(1, own.steps_max + 1):
        losses.append(await trainer.imitate(_deal_batch(own.batch, turns, decks, demonstrations_by_task, rng)))
        if step % own.check_every and step < own.steps_max:
            continue
        scores = await score()
        behind -= {task for task, least in targets.items() if scores.get(task, -math.inf) >= least}
        check = WarmStartCheck(
            step=step, loss=sum(losses) / len(losses), scores=scores, tasks_behind=tuple(sorted(behind))
        )
        losses = []
        on_check(check)
        if not behind:
            break
    assert check is not None
    return check


def _deal_batch(
    batch: int,
    turns: Iterator[str],
    decks: dict[str, list[Demonstration]],
    shown_by_task: Mapping[str, Sequence[Demonstration]],
    rng: random.Random,
) -> list[Demonstration]:
    """Deals the same number of each task; every episode is dealt once before any is dealt again."""
    dealt = []
    for task in itertools.islice(turns, batch):
        if not decks[task]:
            decks[task] = rng.sample(list(shown_by_task[task]), len(shown_by_task[task]))
        dealt.append(decks[task].pop())
    return dealt
