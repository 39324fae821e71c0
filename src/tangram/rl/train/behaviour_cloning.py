"""Behaviour cloning: trains a new model to imitate a scripted agent, and saves it as a checkpoint.

    await clone_behaviour(settings, Path("build/teacher"), agent="expert", steps=200)

Owns the folder that it writes: weights, config and vocabulary. A policy that starts from it, or is taught by it, has to
share the vocabulary. Never plays with the model. A warm start does the same within a run, until the policy knows the
format; this makes teachers, and policies to measure with, before a run.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tangram.client.client import Client
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.agents import demonstrations
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.environments.registry import tasks_of
from tangram.rl.rollout.assembly import codec_of, first_model, save_codec
from tangram.rl.train.warm_start import tokenise_episode
from tangram.rl.trajectories.training_batch import Demonstration


async def demonstrate(
    settings: TrainSettings, agent: str, episodes: int, client: Client | None = None, tasks: tuple[str, ...] = ()
) -> list[Demonstration]:
    """Returns episodes of an agent for each of the tasks, or for all."""
    all_tasks, tokenised = tasks_of(settings), []
    codec = codec_of(settings, all_tasks)
    for task, task_settings in zip(all_tasks, settings.tasks, strict=True):
        name = task_settings.name
        if tasks and name not in tasks:
            continue
        seeds = random.Random(f"{settings.seed}/{name}/{agent}").sample(range(1 << 31), episodes)
        resources = ExternalResources(client=client, run=settings.run, trajectory=f"shown-{name}")
        played = await demonstrations(
            task, agent, seeds, resources=resources, turns_max=task_settings.turns_max, options=task_settings.options
        )
        tokenised += [tokenise_episode(name, episode, codec) for episode in played]
    return tokenised


async def clone_behaviour(
    settings: TrainSettings,
    folder: Path,
    *,
    agent: str = "expert",
    episodes: int = 512,
    steps: int = 200,
    tasks: tuple[str, ...] = (),
    client: Client | None = None,
) -> float:
    """Trains a policy as described by `[policy]`, with batch and learning rate of `[warm_start]`. The vocabulary is
    that of all tasks of the settings, even if it learns only some. Returns the last loss, in nats per token. The same
    settings make the same policy, on one thread. Raises InvalidConfig and ManagerError."""
    from tangram.rl.model.learner import Learner
    from tangram.rl.model.model_folder import save

    codec = codec_of(settings, tasks_of(settings))
    model = first_model(settings, codec.size)
    learner = Learner(settings, model, reward_low={}, tokens_longest=1)
    examples = await demonstrate(settings, agent, episodes, client, tasks)
    rng, loss = random.Random(f"{settings.seed}/imitated"), 0.0
    size, shuffled = settings.warm_start.batch, list[Demonstration]()
    for _ in range(steps):
        if len(shuffled) < size:
            shuffled += rng.sample(examples, len(examples))
        batch, shuffled = shuffled[:size], shuffled[size:]
        loss = await asyncio.to_thread(learner.imitate, tuple(batch))
    save(model, folder)
    save_codec(codec, folder)
    return loss
