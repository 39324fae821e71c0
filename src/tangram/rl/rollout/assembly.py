"""Assembly: creates all parts of a rollout from its settings, and closes them.

    upcoming = tickets(settings)
    async with assembled(settings) as assembly:
        batch = await assembly.rollout.collect(upcoming, groups=16)    # and again, for the next batch

Owns the order: the vocabulary of the tasks, the client that runs their actions, the model and its first published
weights, the engines behind their router, and the rollout itself. Never plays. Promises that no process, sandbox or file
remains afterwards.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tangram.client.client import Client, connect
from tangram.config.tables import GIB
from tangram.errors import InvalidConfig, ManagerError
from tangram.processes.fork_server import ForkServer
from tangram.rl.config.rollout_settings import EngineSettings, PolicySettings, ResourceSettings, RolloutSettings
from tangram.rl.environments.protocol import Task
from tangram.rl.environments.registry import tasks_of, words_of
from tangram.rl.environments.shared_setup import Progress, needs_client, needs_of
from tangram.rl.inference.affinity import affinity_of
from tangram.rl.inference.engines.protocol import InferenceEngine, PolicyWeights
from tangram.rl.inference.router import Router
from tangram.rl.inference.router_records import AnyRouterEvent, EngineState
from tangram.rl.inference.weights_folder import weights_folder
from tangram.rl.rollout.rewards import effective_settings
from tangram.rl.rollout.rollout import Rollout, RolloutObserver
from tangram.rl.rollout.teachers import (
    merge_needs,
    needs_of_teachers,
    require_teachers,
    teacher_services,
    vocabulary_of,
)
from tangram.rl.trajectories.codec import WORDS_FILE, Codec, WordCodec
from tangram.rl.trajectories.trajectory import Trajectory

if TYPE_CHECKING:
    from tangram.rl.model.transformer import Transformer

MISSING_SHOWN = 8
"""Words in the message about words that a policy lacks."""


class RolloutAssembly(msgspec.Struct, frozen=True, kw_only=True):
    settings: RolloutSettings
    codec: Codec
    client: Client | None
    router: Router
    rollout: Rollout
    weights: PolicyWeights
    """The first version."""
    folder: Path
    """Where weights are published."""


class TrainedWeights(NamedTuple):
    """Weights that are trained during the rollout."""

    folder: Path
    """Where they are published."""
    publish_first: Callable[[], Awaitable[PolicyWeights]]
    """Publishes the first version."""


@asynccontextmanager
async def assembled(
    settings: RolloutSettings,
    *,
    client: Client | None = None,
    on_end: Callable[[Trajectory], None] | None = None,
    observer: RolloutObserver | None = None,
    on_event: Callable[[AnyRouterEvent], None] | None = None,
    progress: Progress | None = None,
    trained: TrainedWeights | None = None,
    fork_server: ForkServer | None = None,
    began_at_s: float | None = None,
    barrier: bool = False,
) -> AsyncIterator[RolloutAssembly]:
    """`client`: runs the actions of the tasks; made here if None. `on_event` gets events of the router, `progress` the
    slow phases before the first episode. `trained`: weights of a trainer, instead of those of the settings; engines
    that training cannot use are refused. `fork_server`: of a caller that has other children; made here if None.
    `began_at_s` and `barrier` as in Rollout. Raises InvalidConfig and ManagerError."""
    tasks, codec = require_playable(settings)
    report = progress if progress is not None else _ignore_progress
    async with AsyncExitStack() as stack:
        if fork_server is None:
            fork_server = await stack.enter_async_context(aclosing(fork_server_of(settings)))
        if client is None and _needs_client(settings, tasks):
            needs = {} if settings.resources.url else needs_of_teachers(settings, codec)
            report(0.0, "connecting the client of the tasks")
            client = await stack.enter_async_context(
                await connect_client(settings.resources, tasks, _first_half(report), needs)
            )
        if client is not None and teacher_services(settings):
            report(0.5, f"teachers are loaded: {', '.join(teacher_services(settings))}")
            await require_teachers(client, settings, vocabulary_of(settings, codec))
        folder = trained.folder if trained is not None else stack.enter_context(weights_folder())
        report(0.6, "the first weights are made" if trained is None else "the trainer starts")
        weights = await trained.publish_first() if trained is not None else first_weights(settings, codec, folder)
        engines = engines_of(settings, codec, fork_server)
        router = Router(engines, affinity=affinity_of(settings), on_event=on_event)
        stack.push_async_callback(router.close)
        report(0.8, f"engines start: {', '.join(engine.name for engine in engines)}")
        await router.start(weights)
        if trained is not None:
            await _ensure_weights_taken(weights, router, engines)
        rollout = await stack.enter_async_context(
            Rollout(
                settings,
                router,
                codec,
                client,
                on_end=on_end,
                observer=observer,
                began_at_s=began_at_s,
                barrier=barrier,
            )
        )
        yield RolloutAssembly(
            settings=settings, codec=codec, client=client, router=router, rollout=rollout, weights=weights,
            folder=folder,
        )  # fmt: skip


async def _ensure_weights_taken(weights: PolicyWeights, router: Router, engines: Sequence[InferenceEngine]) -> None:
    """Sends these weights to all engines that accept weights; an external server may keep its own. Raises
    InvalidConfig if the tokens of an engine cannot be trained on."""
    if not all(engine.output_is_trainable for engine in engines):
        await router.update(weights)
    remaining = {engine.name for engine in router.statistics().engines if engine.state is not EngineState.REMOVED}
    require_trainable_engines([engine for engine in engines if engine.name in remaining])


def require_trainable_engines(engines: Sequence[InferenceEngine]) -> None:
    """Checks engines that have started and applied weights. Raises InvalidConfig."""
    for engine in engines:
        if not engine.output_is_trainable:
            why = getattr(engine, "shortcoming", "") or "it does not report all that training needs"
            expected = f"an engine whose tokens can be trained on, with the weights that are trained ({why})"
            raise InvalidConfig(f"engine {engine.name}", "one for evaluation", expected)


def require_servable(settings: RolloutSettings) -> None:
    """Raises InvalidConfig for a policy that our own engines cannot load or serve."""
    checkpoint = settings.policy.checkpoint
    own_engines = [at for at, engine in enumerate(settings.engines) if engine.kind == "process"]
    if not checkpoint or not own_engines:
        return
    from tangram.rl.model.model_folder import CONFIG, read_config

    try:
        context_max = read_config(Path(checkpoint) / CONFIG).context_max
    except InvalidConfig as error:
        expected = (
            f'"openai", and the url of a server that serves {checkpoint}: engines of kind "process" load Llama and '
            f"Qwen2 kinds only ({error})"
        )
        raise InvalidConfig(f"engines[{own_engines[0]}].kind", "process", expected) from error
    except ManagerError as error:
        raise InvalidConfig("policy.checkpoint", checkpoint, f"a folder with {CONFIG} ({error})") from error
    for at in own_engines:
        if settings.engines[at].context_max > context_max:
            expected = f"at most {context_max}, the context of {checkpoint}"
            raise InvalidConfig(f"engines[{at}].context_max", settings.engines[at].context_max, expected)


def _needs_client(settings: RolloutSettings, tasks: Sequence[Task]) -> bool:
    """Whether a task or its reward runs actions."""
    rewards = (
        effective_settings(task, task_settings.reward).kind
        for task, task_settings in zip(tasks, settings.tasks, strict=True)
    )
    return any(needs_client(task) for task in tasks) or any(kind != "environment" for kind in rewards)


def _ignore_progress(share: float, words: str) -> None:
    pass


def _first_half(report: Progress) -> Progress:
    """Scales the progress of the connection to the first half."""
    return lambda share, words: report(share / 2, words)


def require_playable(settings: RolloutSettings) -> tuple[list[Task], Codec]:
    """Returns the tasks and their shared vocabulary, after all checks that need no running part. The Rollout checks
    environments once it can make them. Raises InvalidConfig."""
    tasks = tasks_of(settings)
    codec = codec_of(settings, tasks)
    require_servable(settings)
    if settings.policy.checkpoint and isinstance(codec, WordCodec):
        _require_known(words_of(tasks), codec, settings.policy.checkpoint)
    return tasks, codec


def _require_known(words: Sequence[str], codec: WordCodec, checkpoint: str) -> None:
    """Raises InvalidConfig for words of tasks that are missing in the vocabulary of the policy."""
    missing = sorted(set(words) - set(codec.words))
    if missing:
        more = f" and {len(missing) - MISSING_SHOWN} more" if len(missing) > MISSING_SHOWN else ""
        expected = (
            f"a policy that knows all words of the tasks: it lacks {', '.join(missing[:MISSING_SHOWN])}{more}; play "
            "tasks whose words it knows, or begin with a new policy"
        )
        raise InvalidConfig("policy.checkpoint", checkpoint, expected)


def codec_of(settings: RolloutSettings, tasks: Sequence[Task]) -> Codec:
    """The codec of the checkpoint, or all words of the tasks."""
    if settings.policy.checkpoint:
        from tangram.rl.trajectories.tokenizer import TextCodec, has_tokenizer

        folder = Path(settings.policy.checkpoint)
        if (folder / WORDS_FILE).is_file():
            return _read_words(folder)
        if has_tokenizer(folder):
            return TextCodec(folder)
        raise InvalidConfig(
            "policy.checkpoint", settings.policy.checkpoint, f"a folder with {WORDS_FILE} or a tokenizer"
        )
    return WordCodec(words_of(tasks))


def _read_words(folder: Path) -> WordCodec:
    try:
        return WordCodec(msgspec.json.decode((folder / WORDS_FILE).read_bytes(), type=tuple[str, ...]))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, InvalidConfig) as error:
        raise InvalidConfig(
            "policy.checkpoint", str(folder), f"a folder whose {WORDS_FILE} is a list of words, as we save it ({error})"
        ) from error


def save_codec(codec: Codec, folder: Path) -> None:
    """Saves the vocabulary in a checkpoint, where `codec_of` finds it. Raises ManagerError."""
    from tangram.rl.trajectories.tokenizer import TextCodec

    try:
        if isinstance(codec, WordCodec):
            (folder / WORDS_FILE).write_bytes(msgspec.json.encode(codec.words))
        elif isinstance(codec, TextCodec):
            codec.save(folder)
    except OSError as error:
        raise ManagerError(f"the vocabulary cannot be written to {folder}: {error.strerror}") from error


async def connect_client(
    resources: ResourceSettings,
    tasks: Sequence[Task],
    progress: Progress | None,
    teachers: dict[str, Any] | None = None,
) -> Client:
    """`teachers`: services of teachers, added to those of the tasks."""
    if resources.url:
        return connect(resources.url, token=os.environ.get("TANGRAM_TOKEN", ""))
    return connect(
        backend=resources.backend,
        cores=resources.cores,
        memory=resources.memory,
        warm=resources.warm if resources.backend == "sandbox" else 0,
        **merge_needs(await needs_of(tasks, progress), teachers or {}),
    )


def fork_server_of(settings: RolloutSettings) -> ForkServer:
    """The fork server of all PyTorch processes of a run. It starts its imports concurrently with other preparations."""
    from tangram.rl.inference.engines.process import PROGRAM

    fork_server = ForkServer(*{PROGRAM for engine in settings.engines if engine.kind == "process"})
    fork_server.start_importing()
    return fork_server


def engines_of(settings: RolloutSettings, codec: Codec, fork_server: ForkServer) -> list[InferenceEngine]:
    vocabulary = _vocabulary_size(settings, codec)
    return [
        _make_engine(engine, number, settings.sampling.temperature, vocabulary, fork_server)
        for engine in settings.engines
        for number in range(engine.count)
    ]


def _vocabulary_size(settings: RolloutSettings, codec: Codec) -> int | None:
    """Returns None if the checkpoint does not contain it, possible for models that only external servers load."""
    if not settings.policy.checkpoint:
        return codec.size
    try:
        return vocabulary_of(settings, codec)
    except InvalidConfig:
        return None


def _make_engine(
    settings: EngineSettings, number: int, temperature: float, vocabulary: int | None, fork_server: ForkServer
) -> InferenceEngine:
    if settings.kind == "process":
        from tangram.rl.inference.engines.process import ProcessEngine

        return ProcessEngine(settings, number, fork_server=fork_server)
    from tangram.rl.inference.engines.openai import OpenAIEngine

    key = ""
    if settings.key_variable:
        key = os.environ.get(settings.key_variable, "")
        if not key:
            raise InvalidConfig("engines.key_variable", settings.key_variable, "an environment variable that is set")
    return OpenAIEngine(
        settings,
        number,
        server=settings.server,
        model=settings.model,
        key=key,
        temperature=temperature,
        vocabulary=vocabulary,
    )


def first_weights(settings: RolloutSettings, codec: Codec, folder: Path) -> PolicyWeights:
    if settings.policy.checkpoint and all(engine.kind == "openai" for engine in settings.engines):
        return PolicyWeights(
            version=0, folder=settings.policy.checkpoint
        )  # external servers read the checkpoint itself
    from tangram.rl.model.weight_store import publish

    model = first_model(settings, codec.size)
    return publish(model, model.config, folder, 0)


def first_model(settings: RolloutSettings, size: int) -> Transformer:
    """`size`: of the vocabulary. Raises InvalidConfig and ManagerError."""
    from tangram.rl.model.model_folder import load, require_vocabulary
    from tangram.rl.model.transformer import Transformer, small_config

    policy = settings.policy
    if policy.checkpoint:
        model = load(policy.checkpoint)
        require_vocabulary(policy.checkpoint, model.config.vocabulary, size)
        return model
    context_max = max(engine.context_max for engine in settings.engines)
    config = small_config(size, layers=policy.layers, width=policy.width, heads=policy.heads, context_max=context_max)
    _require_room(policy, Transformer.parameter_count(config))
    return Transformer.new(config, policy.seed)


def _require_room(policy: PolicySettings, parameters: int) -> None:
    """Raises InvalidConfig for a new model that exceeds the memory of this machine."""
    needed, available = 4 * parameters / GIB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    if needed > available:
        expected = (
            f"one with which the model fits into memory: {policy.layers} layers of this width are {parameters:,} "
            f"parameters, {needed:,.0f} GiB, and this machine has {available:,.0f}"
        )
        raise InvalidConfig("policy.width", policy.width, expected)
