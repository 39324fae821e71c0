"""Agents without a model, and the episodes that they play.

Owns the loop of an episode without engines. Never trains and never makes tokens. Promises that every environment that
it gets or makes is closed: also when an agent raises, a call times out, or the task is cancelled.

    episode = await play("frozenlake", "expert", seed=7)
    episodes = await demonstrations("chain", "teacher", range(64))
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from tangram.cancellation import unwrap_first
from tangram.errors import InvalidConfig
from tangram.rl.environments.calls import cancel_call, start_call
from tangram.rl.environments.protocol import Agent, Environment, ExternalResources, Step, Task, plain_number
from tangram.rl.environments.registry import path_of, resolve
from tangram.rl.environments.shared_setup import prepare_tasks

CALL_TIMEOUT_S = 120.0
"""Time limit of one reset, step or close: a sandbox starts within seconds, so a longer call hangs."""
DEMONSTRATIONS_CONCURRENT_MAX = 16
"""Concurrent demonstrations: enough to hide the latency of an environment, few enough for small pools."""

REPR_CHARACTERS_MAX = 120
"""Longest repr of a value in a message."""
TURNS_MAX = 1000
"""Default limit for an environment that declares none."""

T = TypeVar("T")


class OutOfActions(Exception):
    """Raised by an agent that has no more actions: its episode is truncated there."""


class CloseFailed(Exception):
    """An environment could not be closed after its episode; the cause is what `close` raised."""


class ProtocolViolation(TypeError):
    """An environment returned something that the protocol does not allow."""


@runtime_checkable
class SeesEnvironment(Protocol):
    """An agent that gets its environment once, before the first observation: for experts that need more than
    observations."""

    def see(self, environment: Environment) -> None: ...


class RandomAgent:
    """Chooses `words` random words, independent of the observation."""

    def __init__(self, choices: Sequence[str], rng: random.Random, *, words: int = 1) -> None:
        self._choices = choices
        self._rng = rng
        self._words = words

    def act(self, observation: str) -> str:
        return " ".join(self._rng.choice(self._choices) for _ in range(self._words))


class ScriptedAgent:
    """Plays these actions in this order, independent of the observations."""

    def __init__(self, actions: Iterable[str]) -> None:
        self._remaining = iter(tuple(actions))

    def act(self, observation: str) -> str:
        for action in self._remaining:
            return action
        raise OutOfActions


class AgentEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A played episode."""

    task: str
    agent: str
    seed: int
    observation: str
    """The first observation; each step has the next one."""
    actions: tuple[str, ...]
    steps: tuple[Step, ...]
    """The results of the actions."""
    truncated: bool
    """The turns ran out, or the agent stopped, before the environment was done."""
    seconds: float

    @property
    def observations(self) -> tuple[str, ...]:
        """All observations; the last one has no action."""
        return (self.observation, *(step.observation for step in self.steps))

    @property
    def reward(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def done(self) -> bool:
        return bool(self.steps) and self.steps[-1].done

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for step in self.steps for name, value in step.metrics.items()}


async def play(
    what: Task | Environment | str,
    agent: Agent | str,
    seed: int,
    *,
    resources: ExternalResources | None = None,
    turns_max: int | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    options: Mapping[str, Any] | None = None,
) -> AgentEpisode:
    """Plays one episode of a task, or of an environment that was not reset yet, and closes the environment.

    The agent may be the name of one of the task's agents, whose random numbers derive from its name and the seed.
    Exceptions of the environment are raised with a note about the call; a call that takes longer than `timeout_s`
    raises TimeoutError. An exception of `close` is the cause of a CloseFailed, unless another exception came first."""
    began_at = time.monotonic()
    task = resolve(what) if isinstance(what, str) else what
    named = agent if isinstance(agent, str) else type(agent).__name__
    player = agent_of(task, agent, seed) if isinstance(agent, str) else agent
    if not is_environment(task):
        resources = resources or ExternalResources()
        async with prepare_tasks([cast(Task, task)], resources.client):
            environment = cast(Task, task)(resources, **(options or {}))
            limit = turns_max or turns_of(task, environment)
            episode = await play(environment, player, seed, turns_max=limit, timeout_s=timeout_s)
        return msgspec.structs.replace(episode, task=path_of(task), agent=named, seconds=time.monotonic() - began_at)
    environment = cast(Environment, task)
    try:
        observation = await reset(environment, seed, timeout_s)
        if isinstance(player, SeesEnvironment):
            player.see(environment)
        limit = turns_max or turns_of(environment, environment)
        actions, steps = await _play_turns(environment, player, observation, limit, timeout_s)
    except BaseException:
        with suppress(CloseFailed):
            await close(environment, timeout_s)
        raise
    await close(environment, timeout_s)
    return AgentEpisode(
        task=path_of(task), agent=named, seed=seed, observation=observation, actions=tuple(actions), steps=tuple(steps),
        truncated=not (steps and steps[-1].done), seconds=time.monotonic() - began_at,
    )  # fmt: skip


async def demonstrations(
    task: Task | str,
    agent: str,
    seeds: Iterable[int],
    *,
    resources: ExternalResources | None = None,
    turns_max: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[AgentEpisode]:
    """Plays an agent of the task, one episode per seed, in the order of the seeds. Raises the first failure, after
    closing the other environments."""
    task = resolve(task) if isinstance(task, str) else task
    resources = resources or ExternalResources()
    slots = asyncio.Semaphore(DEMONSTRATIONS_CONCURRENT_MAX)

    async def play_seed(seed: int) -> AgentEpisode:
        own_resources = msgspec.structs.replace(resources, trajectory=f"{resources.trajectory}-{agent}-{seed}")
        player = agent_of(task, agent, seed)
        async with slots:
            environment = task(own_resources, **(options or {}))
            limit = turns_max or turns_of(task, environment)
            episode = await play(environment, player, seed, turns_max=limit)
        return msgspec.structs.replace(episode, task=path_of(task), agent=agent)

    try:
        async with prepare_tasks([task], resources.client), asyncio.TaskGroup() as group:
            played = [group.create_task(play_seed(seed)) for seed in seeds]
    except BaseExceptionGroup as errors:
        raise unwrap_first(errors) from None
    return [each.result() for each in played]


def agent_of(task: object, name: str, seed: int) -> Agent:
    """Returns one of the task's agents. Raises InvalidConfig."""
    agents = getattr(task, "agents", {})
    if name not in agents:
        names = ", ".join(agents) or "none"
        raise InvalidConfig("agent", name, f"an agent that {path_of(task)} has (there are: {names})")
    agent: Agent = agents[name](random.Random(f"{name} {seed}"))
    return agent


def turns_of(task: object, environment: Environment) -> int:
    """The turn limit of the environment, whose options may change it, or else of its task."""
    turns: int = getattr(environment, "turns_max", getattr(task, "turns_max", TURNS_MAX))
    return turns


def is_environment(what: object) -> bool:
    """Whether it is an environment rather than a task: a class of environments has the same methods."""
    return not isinstance(what, type) and isinstance(what, Environment)


async def _play_turns(
    environment: Environment, agent: Agent, observation: str, turns_max: int, timeout_s: float
) -> tuple[list[str], list[Step]]:
    actions: list[str] = []
    steps: list[Step] = []
    while len(steps) < turns_max:
        try:
            action = agent.act(observation)
        except OutOfActions:
            break
        result = await step(environment, action, timeout_s)
        actions.append(action)
        steps.append(result)
        observation = result.observation
        if result.done:
            break
    return actions, steps


# ---- one call with a time limit ----


async def reset(environment: Environment, seed: int, timeout_s: float) -> str:
    """Returns the first observation. Raises ProtocolViolation, TimeoutError and what the environment raises."""
    observation = await _call_with_timeout(timeout_s, f"reset({seed})", environment.reset, seed)
    if not isinstance(observation, str):
        raise ProtocolViolation(
            f"reset({seed}): expected the first observation as one text, got {short_repr(observation)}"
        )
    return observation


async def step(environment: Environment, action: str, timeout_s: float) -> Step:
    """Plays one action. Raises ProtocolViolation, TimeoutError and what the environment raises."""
    what = f"step({short_repr(action)})"
    result = await _call_with_timeout(timeout_s, what, environment.step, action)
    if not isinstance(result, Step):
        raise ProtocolViolation(f"{what}: expected a Step, got {short_repr(result)}")
    for name, kind in (("observation", str), ("done", bool), ("metrics", dict)):
        value = getattr(result, name)
        if not isinstance(value, kind):
            raise ProtocolViolation(
                f"{what}: expected a Step whose {name} is of type {kind.__name__}, got {short_repr(value)}"
            )
    try:
        return msgspec.structs.replace(result, reward=plain_number(result.reward, "reward"))
    except TypeError:
        raise ProtocolViolation(
            f"{what}: expected a Step whose reward is a number, got {short_repr(result.reward)}"
        ) from None


async def close(environment: Environment, timeout_s: float) -> None:
    """Raises CloseFailed."""
    try:
        await _call_with_timeout(timeout_s, "close()", environment.close)
    except Exception as error:
        raise CloseFailed(f"{type(error).__name__}: {error}") from error


async def _call_with_timeout(timeout_s: float, what: str, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Awaits a call; its exceptions get a note about the call."""
    call = start_call(function, *arguments)
    try:
        await asyncio.wait({call}, timeout=timeout_s)
        answered = call.done()
    finally:
        await cancel_call(call)
    if not answered:
        raise TimeoutError(f"{what}: expected an answer within {timeout_s:g} s, got none")
    if call.cancelled():
        raise ProtocolViolation(f"{what}: expected an answer, got a call that cancelled itself")
    try:
        return call.result()
    except Exception as error:
        error.add_note(f"in {what}")
        raise


def short_repr(value: object) -> str:
    """The repr of a value, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= REPR_CHARACTERS_MAX else f"{text[:REPR_CHARACTERS_MAX]}... ({len(text)} characters)"
