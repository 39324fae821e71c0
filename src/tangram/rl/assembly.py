"""Assembly: all that a rollout needs, made of its settings and taken down again.

    upcoming = tickets(settings)
    async with assembled(settings) as made:
        batch = await made.rollout.collect(upcoming, groups=16)    # and again, for the next batch

Owns the order: the vocabulary that the tasks share, the model and its first published weights, the connection in which
the tasks act, the engines behind their gateway, and the rollout itself. Never plays. Promises that nothing of it is
left afterwards: no process, no sandbox, no file.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tangram.client.client import Client, connect
from tangram.errors import InvalidConfig
from tangram.rl.affinity import affinity_of
from tangram.rl.codec import Codec, Words
from tangram.rl.engines.base import Engine, Weights
from tangram.rl.environments.base import Task
from tangram.rl.environments.registry import resolve, words_of
from tangram.rl.environments.sharing import Progress, acts_outside, needs_of
from tangram.rl.gateway import Gateway
from tangram.rl.gateway_records import Event
from tangram.rl.published import published_folder
from tangram.rl.records import Trajectory
from tangram.rl.reward import settings_for
from tangram.rl.rollout import Rollout, Watches
from tangram.rl.settings import EngineSettings, OutsideSettings, RolloutSettings

if TYPE_CHECKING:
    from tangram.rl.nn.transformer import Transformer

WORDS = "words.json"
"""In the folder of a checkpoint: its vocabulary, if it is one of words."""


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    settings: RolloutSettings
    codec: Codec
    client: Client | None
    gateway: Gateway
    rollout: Rollout
    weights: Weights
    """The first version."""
    folder: Path
    """Where weights are published."""


@asynccontextmanager
async def assembled(
    settings: RolloutSettings,
    *,
    client: Client | None = None,
    on_end: Callable[[Trajectory], None] | None = None,
    watch: Watches | None = None,
    on_event: Callable[[Event], None] | None = None,
    progress: Progress | None = None,
) -> AsyncIterator[Assembled]:
    """`client`: where the tasks act, instead of one that is made here. `progress` is told what takes long before the
    first episode. Raises InvalidConfig and ManagerError."""
    tasks = tasks_of(settings)
    codec = codec_of(settings, tasks)
    async with AsyncExitStack() as stack:
        if client is None and _needs_client(settings, tasks):
            client = await stack.enter_async_context(await connection(settings.outside, tasks, progress))
        folder = stack.enter_context(published_folder())
        weights = first_weights(settings, codec, folder)
        gateway = Gateway(engines_of(settings), affinity=affinity_of(settings), on_event=on_event)
        stack.push_async_callback(gateway.close)
        await gateway.start(weights)
        rollout = await stack.enter_async_context(Rollout(settings, gateway, codec, client, on_end=on_end, watch=watch))
        yield Assembled(
            settings=settings, codec=codec, client=client, gateway=gateway, rollout=rollout, weights=weights,
            folder=folder,
        )  # fmt: skip


def _needs_client(settings: RolloutSettings, tasks: Sequence[Task]) -> bool:
    """Because of a task, or of where its reward comes from."""
    rewards = (settings_for(task, each.reward).kind for task, each in zip(tasks, settings.tasks, strict=True))
    return any(acts_outside(task) for task in tasks) or any(kind != "environment" for kind in rewards)


def tasks_of(settings: RolloutSettings) -> list[Task]:
    if not settings.tasks:
        raise InvalidConfig("tasks", settings.tasks, "at least one task to be played: [[tasks]] with a name")
    return [resolve(task.environment or task.name) for task in settings.tasks]


def codec_of(settings: RolloutSettings, tasks: Sequence[Task]) -> Codec:
    """That of the checkpoint, if there is one; else all words of the tasks."""
    if settings.policy.checkpoint:
        from tangram.rl.tokenizer import TextCodec, has_tokenizer

        folder = Path(settings.policy.checkpoint)
        if (folder / WORDS).is_file():
            return Words(msgspec.json.decode((folder / WORDS).read_bytes(), type=tuple[str, ...]))
        if has_tokenizer(folder):
            return TextCodec(folder)
        raise InvalidConfig("policy.checkpoint", settings.policy.checkpoint, f"a folder with {WORDS} or a tokenizer")
    return Words(words_of(tasks))


async def connection(outside: OutsideSettings, tasks: Sequence[Task], progress: Progress | None) -> Client:
    if outside.url:
        return connect(outside.url, token=os.environ.get("TANGRAM_TOKEN", ""))
    return connect(
        backend=outside.backend,
        cores=outside.cores,
        memory=outside.memory,
        warm=outside.warm if outside.backend == "sandbox" else 0,
        **await needs_of(tasks, progress),
    )


def engines_of(settings: RolloutSettings) -> list[Engine]:
    return [
        _engine(each, number, settings.sampling.temperature)
        for each in settings.engines
        for number in range(each.count)
    ]


def _engine(settings: EngineSettings, number: int, temperature: float) -> Engine:
    if settings.kind == "process":
        from tangram.rl.engines.process import ProcessEngine

        return ProcessEngine(settings, number)
    from tangram.rl.engines.openai import OpenAIEngine

    key = ""
    if settings.key_variable:
        key = os.environ.get(settings.key_variable, "")
        if not key:
            raise InvalidConfig("engines.key_variable", settings.key_variable, "an environment variable that is set")
    return OpenAIEngine(
        settings, number, dialect=settings.dialect, model=settings.model, key=key, temperature=temperature
    )


def first_weights(settings: RolloutSettings, codec: Codec, folder: Path) -> Weights:
    from tangram.rl.nn.weights import publish

    model = first_model(settings, codec)
    return publish(model, model.config, folder, 0)


def first_model(settings: RolloutSettings, codec: Codec) -> Transformer:
    from tangram.rl.nn.checkpoint import load
    from tangram.rl.nn.transformer import Transformer, small

    policy = settings.policy
    if policy.checkpoint:
        model = load(policy.checkpoint)
        if model.config.vocabulary < codec.size:
            raise InvalidConfig(
                "policy.checkpoint", policy.checkpoint, f"a model that knows all {codec.size} tokens of its vocabulary"
            )
        return model
    context_max = max(engine.context_max for engine in settings.engines)
    config = small(codec.size, layers=policy.layers, width=policy.width, heads=policy.heads, context_max=context_max)
    return Transformer.new(config, policy.seed)
