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
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tangram.client.client import Client, connect
from tangram.config.tables import GIB
from tangram.errors import InvalidConfig, ManagerError
from tangram.processes.fork_server import Nursery
from tangram.rl.config.rollout_settings import EngineSettings, OutsideSettings, PolicySettings, RolloutSettings
from tangram.rl.environments.protocol import Task
from tangram.rl.environments.registry import resolve, words_of
from tangram.rl.environments.shared_setup import Progress, acts_outside, needs_of
from tangram.rl.inference.affinity import affinity_of
from tangram.rl.inference.engines.protocol import Engine, Weights
from tangram.rl.inference.router import Gateway
from tangram.rl.inference.router_records import Event, State
from tangram.rl.rollout.codec import Codec, Words
from tangram.rl.rollout.episode import Episode
from tangram.rl.rollout.records import Trajectory
from tangram.rl.rollout.rewards import settings_for
from tangram.rl.rollout.rollout import Rollout, Watches
from tangram.rl.rollout.teachers import asked, hear_teachers, joined, needs_of_teachers, vocabulary_of
from tangram.rl.train.weights_folder import published_folder

if TYPE_CHECKING:
    from tangram.rl.model.transformer import Transformer

WORDS = "words.json"
"""In the folder of a checkpoint: its vocabulary, if it is one of words."""
MISSING_SHOWN = 8
"""Words that a policy lacks, in a message."""


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
    nursery: Nursery | None = None,
    fresh: Callable[[Episode], bool] | None = None,
    began: float | None = None,
    barrier: bool = False,
) -> AsyncIterator[Assembled]:
    """`client`: where the tasks act, instead of one that is made here. `progress` is told what takes long before the
    first episode. `first` publishes the first weights in a folder, instead of those of the settings: whoever does so
    trains them, so that engines which cannot are refused. `nursery`: of whoever has children of its own, instead of one
    that is made here. `fresh`, `began` and `barrier`: as of a Rollout. Raises InvalidConfig and ManagerError."""
    tasks, codec = require_playable(settings)
    say = progress if progress is not None else _nothing
    async with AsyncExitStack() as stack:
        if nursery is None:
            nursery = stack.enter_context(closing(nursery_of(settings)))
        if client is None and _needs_client(settings, tasks):
            needs = {} if settings.outside.url else needs_of_teachers(settings, codec)
            say(0.0, "the outside is connected")
            client = await stack.enter_async_context(await connection(settings.outside, tasks, _part(say), needs))
        if client is not None and asked(settings):
            say(0.5, f"teachers are loaded: {', '.join(asked(settings))}")
            await hear_teachers(client, settings, vocabulary_of(settings, codec))
        folder = stack.enter_context(published_folder())
        say(0.6, "the first weights are made" if first is None else "the trainer starts")
        weights = await first(codec, folder) if first is not None else first_weights(settings, codec, folder)
        engines = engines_of(settings, codec, nursery)
        gateway = Gateway(engines, affinity=affinity_of(settings), on_event=on_event)
        stack.push_async_callback(gateway.close)
        say(0.8, f"engines start: {', '.join(engine.name for engine in engines)}")
        await gateway.start(weights)
        if first is not None:
            await _have_taken(weights, gateway, engines)
        rollout = await stack.enter_async_context(
            Rollout(
                settings, gateway, codec, client, fresh=fresh, on_end=on_end, watch=watch, began=began, barrier=barrier
            )
        )
        yield Assembled(
            settings=settings, codec=codec, client=client, gateway=gateway, rollout=rollout, weights=weights,
            folder=folder,
        )  # fmt: skip


async def _have_taken(weights: Weights, gateway: Gateway, engines: Sequence[Engine]) -> None:
    """The engines have these weights, as far as they take any: a server of others begins with its own. Raises
    InvalidConfig, if what one of them writes cannot be trained on."""
    if not all(engine.trains for engine in engines):
        await gateway.update(weights)
    left = {kept.name for kept in gateway.statistics().engines if kept.state is not State.REMOVED}
    require_trainable_engines([engine for engine in engines if engine.name in left])


def require_trainable_engines(engines: Sequence[Engine]) -> None:
    """Of engines that have started and taken weights. Raises InvalidConfig."""
    for engine in engines:
        if not engine.trains:
            why = getattr(engine, "shortcoming", "") or "it does not tell all that training needs"
            expected = f"an engine whose tokens can be trained on, with the weights that are trained ({why})"
            raise InvalidConfig(f"engine {engine.name}", "one for evaluation", expected)


def require_served(settings: RolloutSettings) -> None:
    """Raises InvalidConfig for a policy that our engines cannot load, or cannot serve as they are to."""
    checkpoint = settings.policy.checkpoint
    ours = [at for at, engine in enumerate(settings.engines) if engine.kind == "process"]
    if not checkpoint or not ours:
        return
    from tangram.rl.model.model_folder import CONFIG, read_config

    try:
        context_max = read_config(Path(checkpoint) / CONFIG).context_max
    except InvalidConfig as error:
        expected = (
            f'"openai", and the url of a server that serves {checkpoint}: engines of kind "process" load Llama and '
            f"Qwen2 kinds only ({error})"
        )
        raise InvalidConfig(f"engines[{ours[0]}].kind", "process", expected) from error
    except ManagerError as error:
        raise InvalidConfig("policy.checkpoint", checkpoint, f"a folder with {CONFIG} ({error})") from error
    for at in ours:
        if settings.engines[at].context_max > context_max:
            expected = f"at most {context_max}, the context of {checkpoint}"
            raise InvalidConfig(f"engines[{at}].context_max", settings.engines[at].context_max, expected)


def _needs_client(settings: RolloutSettings, tasks: Sequence[Task]) -> bool:
    """Because of a task, or of where its reward comes from."""
    rewards = (settings_for(task, each.reward).kind for task, each in zip(tasks, settings.tasks, strict=True))
    return any(acts_outside(task) for task in tasks) or any(kind != "environment" for kind in rewards)


def _nothing(share: float, words: str) -> None:
    pass


def _part(say: Progress) -> Progress:
    """What a connection takes, of all that is told."""
    return lambda share, words: say(share / 2, words)


def require_playable(settings: RolloutSettings) -> tuple[list[Task], Codec]:
    """All that is seen of settings before anything is started: their tasks, and the vocabulary that these share. What
    is seen of an environment once it is made, the Rollout sees before it plays. Raises InvalidConfig."""
    tasks = tasks_of(settings)
    codec = codec_of(settings, tasks)
    require_served(settings)
    if settings.policy.checkpoint and isinstance(codec, Words):
        _require_known(words_of(tasks), codec, settings.policy.checkpoint)
    return tasks, codec


def _require_known(words: Sequence[str], codec: Words, checkpoint: str) -> None:
    """Raises InvalidConfig for words of tasks that a policy has none for: it could neither read nor write them."""
    missing = sorted(set(words) - set(codec.words))
    if missing:
        more = f" and {len(missing) - MISSING_SHOWN} more" if len(missing) > MISSING_SHOWN else ""
        expected = (
            f"a policy that knows all words of the tasks: it lacks {', '.join(missing[:MISSING_SHOWN])}{more}; play "
            "tasks whose words it knows, or begin with a new policy of theirs"
        )
        raise InvalidConfig("policy.checkpoint", checkpoint, expected)


def tasks_of(settings: RolloutSettings) -> list[Task]:
    if not settings.tasks:
        raise InvalidConfig("tasks", settings.tasks, "at least one task to be played: [[tasks]] with a name")
    names = [task.name for task in settings.tasks]
    if len(set(names)) < len(names):
        raise InvalidConfig("tasks.name", names, "a name of its own for each table [[tasks]]")
    return [resolve(task.environment or task.name) for task in settings.tasks]


def codec_of(settings: RolloutSettings, tasks: Sequence[Task]) -> Codec:
    """That of the checkpoint, if there is one; else all words of the tasks."""
    if settings.policy.checkpoint:
        from tangram.rl.rollout.tokenizer import TextCodec, has_tokenizer

        folder = Path(settings.policy.checkpoint)
        if (folder / WORDS).is_file():
            return _words_in(folder)
        if has_tokenizer(folder):
            return TextCodec(folder)
        raise InvalidConfig("policy.checkpoint", settings.policy.checkpoint, f"a folder with {WORDS} or a tokenizer")
    return Words(words_of(tasks))


def _words_in(folder: Path) -> Words:
    try:
        return Words(msgspec.json.decode((folder / WORDS).read_bytes(), type=tuple[str, ...]))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, InvalidConfig) as error:
        raise InvalidConfig(
            "policy.checkpoint", str(folder), f"a folder whose {WORDS} is a list of words, as we save it ({error})"
        ) from error


def save_codec(codec: Codec, folder: Path) -> None:
    """Into a checkpoint, so that `codec_of` finds it there. Raises ManagerError."""
    from tangram.rl.rollout.tokenizer import TextCodec

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


def nursery_of(settings: RolloutSettings) -> Nursery:
    """For all processes of a run that use PyTorch. It begins to import at once, beside what else is made ready."""
    from tangram.rl.inference.engines.process import PROGRAM

    nursery = Nursery(*{PROGRAM for engine in settings.engines if engine.kind == "process"})
    nursery.warm()
    return nursery


def engines_of(settings: RolloutSettings, codec: Codec, nursery: Nursery) -> list[Engine]:
    vocabulary = _vocabulary(settings, codec)
    return [
        _engine(each, number, settings.sampling.temperature, vocabulary, nursery)
        for each in settings.engines
        for number in range(each.count)
    ]


def _vocabulary(settings: RolloutSettings, codec: Codec) -> int | None:
    """None: the checkpoint does not say it, as those of kinds that only servers load may not."""
    if not settings.policy.checkpoint:
        return codec.size
    try:
        return vocabulary_of(settings, codec)
    except InvalidConfig:
        return None


def _engine(
    settings: EngineSettings, number: int, temperature: float, vocabulary: int | None, nursery: Nursery
) -> Engine:
    if settings.kind == "process":
        from tangram.rl.inference.engines.process import ProcessEngine

        return ProcessEngine(settings, number, nursery=nursery)
    from tangram.rl.inference.engines.openai import OpenAIEngine

    key = ""
    if settings.key_variable:
        key = os.environ.get(settings.key_variable, "")
        if not key:
            raise InvalidConfig("engines.key_variable", settings.key_variable, "an environment variable that is set")
    return OpenAIEngine(
        settings,
        number,
        dialect=settings.dialect,
        model=settings.model,
        key=key,
        temperature=temperature,
        vocabulary=vocabulary,
    )


def first_weights(settings: RolloutSettings, codec: Codec, folder: Path) -> Weights:
    if settings.policy.checkpoint and all(engine.kind == "openai" for engine in settings.engines):
        return Weights(version=0, folder=settings.policy.checkpoint)  # which servers read as it is
    from tangram.rl.model.weight_store import publish

    model = first_model(settings, codec.size)
    return publish(model, model.config, folder, 0)


def first_model(settings: RolloutSettings, size: int) -> Transformer:
    """`size`: of the vocabulary. Raises InvalidConfig and ManagerError."""
    from tangram.rl.model.model_folder import load
    from tangram.rl.model.transformer import Transformer, small

    policy = settings.policy
    if policy.checkpoint:
        model = load(policy.checkpoint)
        if model.config.vocabulary < size:
            raise InvalidConfig(
                "policy.checkpoint", policy.checkpoint, f"a model that knows all {size} tokens of its vocabulary"
            )
        return model
    context_max = max(engine.context_max for engine in settings.engines)
    config = small(size, layers=policy.layers, width=policy.width, heads=policy.heads, context_max=context_max)
    _require_room(policy, Transformer.size(config))
    return Transformer.new(config, policy.seed)


def _require_room(policy: PolicySettings, parameters: int) -> None:
    """Raises InvalidConfig for a new model that does not fit into the memory of this machine."""
    needed, there = 4 * parameters / GIB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    if needed > there:
        expected = (
            f"one with which the model fits into memory: {policy.layers} layers of this width are {parameters:,} "
            f"parameters, {needed:,.0f} GiB, and this machine has {there:,.0f}"
        )
        raise InvalidConfig("policy.width", policy.width, expected)
