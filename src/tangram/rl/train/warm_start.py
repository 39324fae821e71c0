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
from tangram.rl.environments.protocol import ExternalResources, reward_range
from tangram.rl.environments.registry import task_of, tasks_of
from tangram.rl.environments.shared_setup import Progress
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
    for task, task_settings in zip(tasks_of(settings), settings.tasks, strict=True):
        if task_settings.warm_until > 0.0:
            low, high = reward_range(task)
            targets[task_settings.name] = low + task_settings.warm_until * (high - low)
    return targets


def require_agents(settings: TrainSettings) -> None:
    """Raises InvalidConfig if a task with a warm start has no agent of the configured name."""
    name = settings.warm_start.agent
    for task in settings.tasks:
        if task.warm_until > 0.0 and name not in (agents := task_of(task).agents):
            expected = (
                f"an agent of task {task.name}, which has a warm start (there are: {', '.join(agents) or 'none'})"
            )
            raise InvalidConfig("warm_start.agent", name, expected)


def tokenise_episode(task: str, episode: AgentEpisode, codec: Codec) -> Demonstration:
    """Raises ValueError for a word that the vocabulary lacks."""
    tokens: list[int] = []
    is_action: list[bool] = []
    for observation, action in zip(episode.observations, episode.actions, strict=False):
        for text, is_policy in (
            (codec.encode_observation(observation, first=not tokens), False),
            (codec.encode_action(action), True),
        ):
            tokens += text
            is_action += [is_policy] * len(text)
    return Demonstration(task=task, tokens=tuple(tokens), is_action=tuple(is_action))


async def collect_demonstrations(
    settings: TrainSettings, client: Client | None, codec: Codec, progress: Progress | None
) -> dict[str, list[Demonstration]]:
    """Returns by task the episodes of its agent. Raises what an environment raises, and InvalidConfig for words that
    the vocabulary lacks."""
    targets, demonstrations_by_task = warm_start_targets(settings), {}
    count = settings.warm_start.episodes
    for task, task_settings in zip(tasks_of(settings), settings.tasks, strict=True):
        name = task_settings.name
        if name not in targets:
            continue
        seeds = random.Random(f"{settings.seed}/{name}/warm").sample(range(1 << 31), count)
        resources = ExternalResources(client=client, run=settings.run, trajectory=f"warm-{name}")
        episodes: list[AgentEpisode] = []
        for first in range(0, count, EPISODES_PER_PROGRESS):
            if progress is not None:
                progress(first / count, f"demonstrations of {name}")
            episodes += await demonstrations(
                task, settings.warm_start.agent, seeds[first : first + EPISODES_PER_PROGRESS], resources=resources,
                turns_max=task_settings.turns_max, options=task_settings.options,
            )  # fmt: skip
        try:
            demonstrations_by_task[name] = [tokenise_episode(name, episode, codec) for episode in episodes]
        except ValueError as error:
            expected = (
                f"words of the policy's vocabulary, in observations and in actions of {settings.warm_start.agent}"
            )
            raise InvalidConfig(f"task {name}", str(error), expected) from error
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
    limits, targets = settings.warm_start, warm_start_targets(settings)
    rng = random.Random(f"{settings.seed}/warm")
    shuffled: dict[str, list[Demonstration]] = {task: [] for task in demonstrations_by_task}
    task_cycle = itertools.cycle(shuffled)
    behind, losses, check = set(targets), [], None
    for step in range(1, limits.steps_max + 1):
        batch = _next_batch(limits.batch, task_cycle, shuffled, demonstrations_by_task, rng)
        losses.append(await trainer.imitate(batch))
        if step % limits.check_every and step < limits.steps_max:
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


def _next_batch(
    size: int,
    task_cycle: Iterator[str],
    shuffled: dict[str, list[Demonstration]],
    demonstrations_by_task: Mapping[str, Sequence[Demonstration]],
    rng: random.Random,
) -> list[Demonstration]:
    """Takes the same number of each task; every episode is used once before any is used again. `shuffled`: what is left
    of the current pass, by task."""
    batch = []
    for task in itertools.islice(task_cycle, size):
        if not shuffled[task]:
            shuffled[task] = rng.sample(list(demonstrations_by_task[task]), len(demonstrations_by_task[task]))
        batch.append(shuffled[task].pop())
    return batch
