"""Playing an environment without a model: agents, and the episodes that they play.

Owns the loop of an episode without engines. Never trains, and never makes tokens. Promises that an environment that it
was given or made is closed, whatever happens: also when an agent raises, a call takes too long, or the play is
cancelled.

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

from tangram.errors import InvalidConfig
from tangram.rl.environments.calls import begun, ended
from tangram.rl.environments.protocol import Agent, Environment, Outside, Step, Task, number_of
from tangram.rl.environments.registry import path_of, resolve
from tangram.rl.environments.shared_setup import prepared

CALL_TIMEOUT_S = 120.0
"""Of one reset, step or close: a sandbox starts within seconds, so this is a hang."""
TOGETHER = 16
"""Demonstrations that are played at once: enough to hide the waits of an environment, few enough for small pools."""

SHOWN_MAX = 120
"""Characters of a value in a message."""
TURNS_MAX = 1000
"""Of an environment that names no limit of its own."""

T = TypeVar("T")


class OutOfActions(Exception):
    """Raised by an agent that has nothing more to say: its episode is truncated there."""


class CloseFailed(Exception):
    """An environment was played, and could not be closed; its cause is what `close` raised."""


class BadAnswer(TypeError):
    """An environment answered with something that the protocol does not know."""


@runtime_checkable
class Seeing(Protocol):
    """An agent that is shown the environment that it plays, once, before its first observation: for experts, to whom
    what the environment says is not enough."""

    def see(self, environment: Environment) -> None: ...


class RandomAgent:
    """Says `words` of the choices, each by chance, whatever it is told."""

    def __init__(self, choices: Sequence[str], chance: random.Random, *, words: int = 1) -> None:
        self._choices = choices
        self._chance = chance
        self._words = words

    def act(self, observation: str) -> str:
        return " ".join(self._chance.choice(self._choices) for _ in range(self._words))


class ScriptedAgent:
    """Says these actions in this order, whatever it is told."""

    def __init__(self, actions: Iterable[str]) -> None:
        self._left = iter(tuple(actions))

    def act(self, observation: str) -> str:
        for action in self._left:
            return action
        raise OutOfActions


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What was played."""

    task: str
    agent: str
    seed: int
    observation: str
    """The first; each step brings the next."""
    actions: tuple[str, ...]
    steps: tuple[Step, ...]
    """What was answered to each action."""
    truncated: bool
    """The turns were used up, or the agent stopped, before the environment said that it is over."""
    seconds: float

    @property
    def observations(self) -> tuple[str, ...]:
        """All of them; the last has no action."""
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
    outside: Outside | None = None,
    turns_max: int | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    options: Mapping[str, Any] | None = None,
) -> Episode:
    """One episode of a task, or of an environment that was not reset yet, which is closed at its end.

    An agent may be the name of one that the task has; its chance is made of its name and the seed. What the environment
    raises is raised, with a note of where; a call that takes longer than `timeout_s` raises TimeoutError. What it
    raises when it is closed is the cause of a CloseFailed, unless something went wrong before.
    """
    began_s = time.monotonic()
    task = resolve(what) if isinstance(what, str) else what
    named = agent if isinstance(agent, str) else type(agent).__name__
    player = agent_of(task, agent, seed) if isinstance(agent, str) else agent
    if not is_environment(task):
        outside = outside or Outside()
        async with prepared([cast(Task, task)], outside.client):
            environment = cast(Task, task)(outside, **(options or {}))
            limit = turns_max or turns_of(task, environment)
            episode = await play(environment, player, seed, turns_max=limit, timeout_s=timeout_s)
        return msgspec.structs.replace(episode, task=path_of(task), agent=named, seconds=time.monotonic() - began_s)
    environment = cast(Environment, task)
    try:
        observation = await reset(environment, seed, timeout_s)
        if isinstance(player, Seeing):
            player.see(environment)
        limit = turns_max or turns_of(environment, environment)
        actions, steps = await _turns(environment, player, observation, limit, timeout_s)
    except BaseException:
        with suppress(CloseFailed):
            await close(environment, timeout_s)
        raise
    await close(environment, timeout_s)
    return Episode(
        task=path_of(task), agent=named, seed=seed, observation=observation, actions=tuple(actions), steps=tuple(steps),
        truncated=not (steps and steps[-1].done), seconds=time.monotonic() - began_s,
    )  # fmt: skip


async def demonstrations(
    task: Task | str,
    agent: str,
    seeds: Iterable[int],
    *,
    outside: Outside | None = None,
    turns_max: int | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    options: Mapping[str, Any] | None = None,
) -> list[Episode]:
    """What an agent of the task plays, an episode for each seed, in their order. Raises what the first raises that
    fails; the others are closed then."""
    task = resolve(task) if isinstance(task, str) else task
    outside = outside or Outside()
    turn = asyncio.Semaphore(TOGETHER)

    async def one(seed: int) -> Episode:
        own = msgspec.structs.replace(outside, trajectory=f"{outside.trajectory}-{agent}-{seed}")
        player = agent_of(task, agent, seed)
        async with turn:
            environment = task(own, **(options or {}))
            limit = turns_max or turns_of(task, environment)
            episode = await play(environment, player, seed, turns_max=limit, timeout_s=timeout_s)
        return msgspec.structs.replace(episode, task=path_of(task), agent=agent)

    try:
        async with prepared([task], outside.client), asyncio.TaskGroup() as group:
            played = [group.create_task(one(seed)) for seed in seeds]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [each.result() for each in played]


def agent_of(task: object, name: str, seed: int) -> Agent:
    """One of those that the task has. Raises InvalidConfig."""
    agents = getattr(task, "agents", {})
    if name not in agents:
        there = ", ".join(agents) or "none"
        raise InvalidConfig("agent", name, f"an agent that {path_of(task)} has (there are: {there})")
    agent: Agent = agents[name](random.Random(f"{name} {seed}"))
    return agent


def turns_of(task: object, environment: Environment) -> int:
    """The limit of an episode: what its environment says, whose options may differ from the usual, or else its task."""
    turns: int = getattr(environment, "turns_max", getattr(task, "turns_max", TURNS_MAX))
    return turns


def is_environment(what: object) -> bool:
    """Whether it is an environment and no task: a class of environments has their methods too."""
    return not isinstance(what, type) and isinstance(what, Environment)


async def _turns(
    environment: Environment, agent: Agent, observation: str, turns_max: int, timeout_s: float
) -> tuple[list[str], list[Step]]:
    actions: list[str] = []
    steps: list[Step] = []
    while len(steps) < turns_max:
        try:
            action = agent.act(observation)
        except OutOfActions:
            break
        answer = await step(environment, action, timeout_s)
        actions.append(action)
        steps.append(answer)
        observation = answer.observation
        if answer.done:
            break
    return actions, steps


# ---- one call, within a time limit --------------------------------------------------------------------------------


async def reset(environment: Environment, seed: int, timeout_s: float) -> str:
    """The first observation. Raises BadAnswer, TimeoutError and what the environment raises."""
    said = await _within(timeout_s, f"reset({seed})", environment.reset, seed)
    if not isinstance(said, str):
        raise BadAnswer(f"reset({seed}): expected the first observation as one text, got {shown(said)}")
    return said


async def step(environment: Environment, action: str, timeout_s: float) -> Step:
    """What is answered to an action. Raises BadAnswer, TimeoutError and what the environment raises."""
    what = f"step({shown(action)})"
    answer = await _within(timeout_s, what, environment.step, action)
    if not isinstance(answer, Step):
        raise BadAnswer(f"{what}: expected a Step, got {shown(answer)}")
    for name, kind in (("observation", str), ("done", bool), ("metrics", dict)):
        value = getattr(answer, name)
        if not isinstance(value, kind):
            raise BadAnswer(f"{what}: expected a Step whose {name} is of type {kind.__name__}, got {shown(value)}")
    try:
        return msgspec.structs.replace(answer, reward=number_of(answer.reward, "reward"))
    except TypeError:
        raise BadAnswer(f"{what}: expected a Step whose reward is a number, got {shown(answer.reward)}") from None


async def close(environment: Environment, timeout_s: float) -> None:
    """Raises CloseFailed."""
    try:
        await _within(timeout_s, "close()", environment.close)
    except Exception as error:
        raise CloseFailed(f"{type(error).__name__}: {error}") from error


async def _within(timeout_s: float, what: str, ask: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """The answer of a call; what it raises says which call it was."""
    call = begun(ask, *arguments)
    try:
        await asyncio.wait({call}, timeout=timeout_s)
        answered = call.done()
    finally:
        await ended(call)
    if not answered:
        raise TimeoutError(f"{what}: expected an answer within {timeout_s:g} s, got none")
    if call.cancelled():
        raise BadAnswer(f"{what}: expected an answer, got a call that cancelled itself")
    try:
        return call.result()
    except Exception as error:
        error.add_note(f"in {what}")
        raise


def shown(value: object) -> str:
    """A value in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}... ({len(text)} characters)"
