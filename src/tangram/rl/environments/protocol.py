"""Environments: the protocol, and what an environment may use of the outside.

An environment is played by one trajectory: made, reset once, stepped until it is over, closed. It speaks text; whoever
plays it turns text into tokens. What it does outside, it does through Tangram: `outside.client` runs commands, calls
functions, APIs and models as scheduled actions. What it raises is a failure of the infrastructure, never of the agent:
an action that makes no sense is answered by an observation that says so, or ends the episode.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from tangram.client.client import Client


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment is given."""

    client: Client | None = None
    """Where its actions run; None where a task needs none."""
    run: str = "default"
    """Whose share of the pools its actions count against."""
    trajectory: str = "local"
    """Which trajectory its actions and sandboxes belong to."""

    def require_client(self, task: str) -> Client:
        """Raises ValueError."""
        if self.client is None:
            raise ValueError(f"{task} runs commands or calls: it needs a client, as tangram.connect() gives one")
        return self.client


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment answers to an action."""

    observation: str
    """What the policy reads next; if it is over, what there is left to say."""
    reward: float = 0.0
    """For this step. A task that is rewarded from outside leaves it at 0."""
    done: bool = False
    """It is over: the agent reached the goal, failed, or gave up."""
    metrics: dict[str, float] = {}
    """Numbers to be reported, such as the length of the way. The last of a name counts."""


def number_of(value: object, what: str) -> float:
    """A number of any kind, one of numpy too, as a plain float. Raises TypeError, which says `what` it is of."""
    if type(value) is float:
        return value
    if not isinstance(value, str | bytes | bytearray):
        try:
            return float(value)  # type: ignore[arg-type]
        except Exception:  # it is anybody's
            pass
    raise TypeError(f"expected a number as {what}, got {type(value).__name__}")


def metrics_of(metrics: object) -> dict[str, float]:
    """As plain numbers. Raises TypeError."""
    if not isinstance(metrics, dict):
        raise TypeError(f"expected a dict as metrics, got {type(metrics).__name__}")
    for key in metrics:
        if not isinstance(key, str) or not key.isprintable():
            raise TypeError(f"expected printable text as the names of metrics, got {key!r}")
    return {key: number_of(value, f"metrics[{key!r}]") for key, value in metrics.items()}


def step_of(answer: object) -> Step:
    """What an environment answered, with plain numbers. Raises TypeError for what is no Step."""
    if not isinstance(answer, Step):
        raise TypeError(f"expected a Step, got {type(answer).__name__}")
    if not isinstance(answer.observation, str):
        raise TypeError(f"expected a text as observation, got {type(answer.observation).__name__}")
    return Step(
        observation=answer.observation,
        reward=number_of(answer.reward, "reward"),
        done=bool(number_of(answer.done, "done")),
        metrics=metrics_of(answer.metrics),
    )


@runtime_checkable
class Environment(Protocol):
    """One episode. Its methods are called one at a time, each in a task of its own, and may be cancelled at any time;
    one that does not end then is given up. `close` is called always, also after a failed or cancelled reset, and
    once."""

    async def reset(self, seed: int) -> str:
        """The first observation. The same seed makes the same episode, whenever and wherever."""
        ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None:
        """Gives back all that it holds."""
        ...


class Agent(Protocol):
    """Plays without a model, to try an environment or to teach a format. One that has `see(environment)` is shown the
    environment after its reset, and may know more than the policy is told."""

    def act(self, observation: str) -> str: ...


MakeAgent = Callable[[random.Random], Agent]


class Task(Protocol):
    """What is registered by name: makes environments, and says what is true of all of them.

    The usual Task is a class whose instances are Environments: `def __init__(self, outside, **options)`. An environment
    whose limits depend on its options says them itself, under the same names. What a task may have besides:

        reward_range   (lowest, highest) sum of the rewards of an episode; (0.0, 1.0) if it is not said
        usual_reward   RewardSettings: where its reward comes from, unless the settings of the rollout say it
        acts_outside   False: it needs no client
        needs          async, a class method: what a client must be made with (environments/shared_setup.py)
        prepare        a class method: an async context manager around all episodes (environments/shared_setup.py)
    """

    words: ClassVar[tuple[str, ...]]
    """Every word that it says or understands, for a vocabulary of words. Empty if a tokenizer of text is needed."""
    turns_max: ClassVar[int]
    tokens_max: ClassVar[int]
    """Of one action."""
    agents: ClassVar[Mapping[str, MakeAgent]]
    """Those that know the task, by name: `random` plays well-formed actions blindly, `teacher` knows the format but not
    the goal, `expert` always reaches it."""

    def __call__(self, outside: Outside, **options: Any) -> Environment: ...
