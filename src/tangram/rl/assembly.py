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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tangram.client.client import Client, connect
from tangram.errors import InvalidConfig, ManagerError
from tangram.rl.affinity import affinity_of
from tangram.rl.codec import Codec, Words
from tangram.rl.engines.base import Engine, Weights
from tangram.rl.environments.base import Task
from tangram.rl.environments.registry import resolve, words_of
from tangram.rl.environments.sharing import Progress, acts_outside, needs_of
from tangram.rl.episode import Episode
from tangram.rl.gateway import Gateway
from tangram.rl.gateway_records import Event
from tangram.rl.published import published_folder
from tangram.rl.records import Trajectory
from tangram.rl.reward import settings_for
from tangram.rl.rollout import Rollout, Watches
from tangram.rl.settings import EngineSettings, OutsideSettings, RolloutSettings
from tangram.rl.teachers import hear_teachers, joined, needs_of_teachers, vocabulary_of

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
    first: Callable[[Codec, Path], Awaitable[Weights]] | None = None,
    fresh: Callable[[Episode], bool] | None = None,
    barrier: bool = False,
) -> AsyncIterator[Assembled]:
    """`client`: where the tasks act, instead of one that is made here. `progress` is told what takes long before the
    first episode. `first` publishes the first weights in a folder, instead of those of the settings. `fresh` and
    `barrier`: as of a Rollout. Raises InvalidConfig and ManagerError."""
    tasks = tasks_of(settings)
    codec = codec_of(settings, tasks)
    async with AsyncExitStack() as stack:
        if client is None and _needs_client(settings, tasks):
            needs = {} if settings.outside.url else needs_of_teachers(settings, codec)
            client = await stack.enter_async_context(await connection(settings.outside, tasks, progress, needs))
        if client is not None:
            await hear_teachers(client, settings, vocabulary_of(settings, codec))
        folder = stack.enter_context(published_folder())
        weights = await first(codec, folder) if first is not None else first_weights(settings, codec, folder)
        gateway = Gateway(engines_of(settings), affinity=affinity_of(settings), on_event=on_event)
        stack.push_async_callback(gateway.close)
        await gateway.start(weights)
        rollout = await stack.enter_async_context(
            Rollout(settings, gateway, codec, client, fresh=fresh, on_end=on_end, watch=watch, barrier=barrier)
        )
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


def save_codec(codec: Codec, folder: Path) -> None:
    """Into a checkpoint, so that `codec_of` finds it there. Raises ManagerError."""
    from tangram.rl.tokenizer import TextCodec

    try:
        if isinstance(codec, Words):
            (folder / WORDS).write_bytes(msgspec.json.encode(codec.words))
        elif isinstance(codec, TextCodec):
            codec.save(folder)
    except OSError as error:
        raise ManagerError(f"the vocabulary cannot be written to {folder}: {error.strerror}") from error


async def connection(
    outside: OutsideSettings, tasks: Sequence[Task], progress: Progress | None, teachers: dict[str, Any] | None = None
) -> Client:
    """`teachers`: what they need, besides what the tasks do."""
    if outside.url:
        return connect(outside.url, token=os.environ.get("TANGRAM_TOKEN", ""))
    return connect(
        backend=outside.backend,
        cores=outside.cores,
        memory=outside.memory,
        warm=outside.warm if outside.backend == "sandbox" else 0,
        **joined(await needs_of(tasks, progress), teachers or {}),
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
