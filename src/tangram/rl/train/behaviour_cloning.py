"""Policies by imitation: a new model that does what a scripted agent does, as a checkpoint.

    await imitated(settings, Path("build/teacher"), agent="expert", steps=200)

Owns the folder that it makes: weights, config and the words of the vocabulary, which the policy that the folder is read
as, or that is taught by it, has to share. Never plays with the model. What warm_start.py does within a run, and only
until a policy knows the format, this does before one and as well as it goes: teachers, and policies to measure with.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec

from tangram.client.client import Client
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.agents import demonstrations
from tangram.rl.environments.protocol import Outside
from tangram.rl.environments.shared_setup import Progress
from tangram.rl.rollout.assembly import WORDS, codec_of, first_model, tasks_of
from tangram.rl.rollout.codec import Words
from tangram.rl.train.records import Demonstration
from tangram.rl.train.warm_start import tokenised


async def shown_by(
    settings: TrainSettings, agent: str, episodes: int, client: Client | None = None, tasks: tuple[str, ...] = ()
) -> list[Demonstration]:
    """What an agent does in so many episodes of each of the tasks; of all, if none is named."""
    made, found = tasks_of(settings), []
    codec = codec_of(settings, made)
    for task, own in zip(made, settings.tasks, strict=True):
        if tasks and own.name not in tasks:
            continue
        seeds = random.Random(f"{settings.seed}/{own.name}/{agent}").sample(range(1 << 31), episodes)
        outside = Outside(client=client, run=settings.run, trajectory=f"shown-{own.name}")
        played = await demonstrations(task, agent, seeds, outside=outside, turns_max=own.turns_max, options=own.options)
        found += [tokenised(own.name, each, codec) for each in played]
    return found


async def imitated(
    settings: TrainSettings,
    folder: Path,
    *,
    agent: str = "expert",
    episodes: int = 512,
    steps: int = 200,
    tasks: tuple[str, ...] = (),
    client: Client | None = None,
    progress: Progress | None = None,
) -> float:
    """A policy as `[policy]` describes it, after so many steps of `[warm_start]`: its batch, its learning rate. The
    vocabulary is that of all tasks of the settings, also where it learns a few of them. Returns the last loss, in nats
    for each token. The same settings make the same policy, on one thread. Raises InvalidConfig and ManagerError."""
    from tangram.rl.model.learner import Learner
    from tangram.rl.model.model_folder import save

    codec = codec_of(settings, tasks_of(settings))
    model = first_model(settings, codec.size)
    learner = Learner(settings, model, reward_low={}, tokens_longest=1)
    shown = await shown_by(settings, agent, episodes, client, tasks)
    chance, loss = random.Random(f"{settings.seed}/imitated"), 0.0
    deck: list[Demonstration] = []
    for step in range(steps):
        if len(deck) < settings.warm_start.batch:
            deck += chance.sample(shown, len(shown))
        batch, deck = deck[: settings.warm_start.batch], deck[settings.warm_start.batch :]
        loss = await asyncio.to_thread(learner.imitate, tuple(batch))
        if progress is not None:
            progress((step + 1) / steps, f"imitating {agent}: loss {loss:.3f}")
    save(model, folder)
    if isinstance(codec, Words):
        (folder / WORDS).write_bytes(msgspec.json.encode(codec.words))
    return loss
