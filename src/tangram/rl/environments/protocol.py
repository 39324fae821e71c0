"""The environment protocol, and the external resources of an environment.

One trajectory plays an environment: it is created, reset once, stepped until it is done, and closed. Its interface is
text; the caller converts text to tokens. It uses external resources through Tangram: `resources.client` runs commands,
calls functions, APIs and models as scheduled actions. An exception means that the infrastructure failed, never the
agent: an invalid action gets an observation that explains it, or ends the episode.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from tangram.client.client import Client
from tangram.client.result import Timing
from tangram.core.action import Status

ZERO_TIMING = Timing(waiting_s=0.0, execution_s=0.0, overhead_s=0.0)


class ExternalResources(msgspec.Struct, frozen=True, kw_only=True):
    """The external resources that an environment may use."""

    client: Client | None = None
    """Runs its actions; None where a task needs none."""
    run: str = "default"
    """The run whose share of the pools its actions use."""
    trajectory: str = "local"
    """The trajectory that owns its actions and sandboxes."""

    def require_client(self, task: str) -> Client:
        """Raises ValueError."""
        if self.client is None:
            raise ValueError(f"{task} runs commands or calls: it needs a client, as tangram.connect() gives one")
        return self.client


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The response of an environment to an action."""

    observation: str
    """The next input of the policy; after the end, the last message."""
    reward: float = 0.0
    """For this step. A task whose reward comes from outside leaves it at 0."""
    done: bool = False
    """The episode is over: the agent reached the goal, failed, or stopped."""
    metrics: dict[str, float] = {}
    """Numbers to be reported, such as the length of the path. The last value of a name counts."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command. A `Result` also works: it has the same fields, except metrics."""

    status: Status
    reason: str = ""
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    timing: Timing = ZERO_TIMING
    metrics: dict[str, float] = {}


def plain_number(value: object, what: str) -> float:
    """Returns a number of any kind, also of numpy, as a plain float. Raises TypeError, which names `what`."""
    if type(value) is float:
        return value
    if not isinstance(value, str | bytes | bytearray):
        try:
            return float(value)  # type: ignore[arg-type]
        except Exception:  # user code
            pass
    raise TypeError(f"expected a number as {what}, got {type(value).__name__}")


def metrics_of(metrics: object) -> dict[str, float]:
    """Returns metrics as plain numbers. Raises TypeError."""
    if not isinstance(metrics, dict):
        raise TypeError(f"expected a dict as metrics, got {type(metrics).__name__}")
    for key in metrics:
        if not isinstance(key, str) or not key.isprintable():
            raise TypeError(f"expected printable text as the names of metrics, got {key!r}")
    return {key: plain_number(value, f"metrics[{key!r}]") for key, value in metrics.items()}


def step_of(result: object) -> Step:
    """Returns the response of an environment with plain numbers. Raises TypeError if it is no Step."""
    if not isinstance(result, Step):
        raise TypeError(f"expected a Step, got {type(result).__name__}")
    if not isinstance(result.observation, str):
        raise TypeError(f"expected a text as observation, got {type(result.observation).__name__}")
    return Step(
        observation=result.observation,
        reward=plain_number(result.reward, "reward"),
        done=bool(plain_number(result.done, "done")),
        metrics=metrics_of(result.metrics),
    )


@runtime_checkable
class Environment(Protocol):
    """One episode. Its methods are called one at a time, each in a separate task, and may be cancelled at any time; a
    call that does not end then is abandoned. `close` is always called once, also after a failed or cancelled reset."""

    async def reset(self, seed: int) -> str:
        """Returns the first observation. The same seed makes the same episode, anywhere and at any time."""
        ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None:
        """Releases all resources of the episode."""
        ...


class Agent(Protocol):
    """Plays without a model, to test an environment or to demonstrate a format. If it has `see(environment)`, it gets
    the environment after its reset, and may use more than the observations."""

    def act(self, observation: str) -> str: ...


MakeAgent = Callable[[random.Random], Agent]


class Task(Protocol):
    """A task, which is registered by name: creates environments and declares their common properties.

    The usual Task is a class whose instances are Environments: `def __init__(self, resources, **options)`. An
    environment whose limits depend on its options declares them itself, under the same names. Optional attributes of a
    task:

        reward_range   (lowest, highest) sum of the rewards of an episode; default (0.0, 1.0)
        usual_reward   RewardSettings: the source of its reward, unless the settings of the rollout name one
        needs_client   False: it needs no client
        needs          async class method: what a client must be made with (environments/shared_setup.py)
        prepare        class method: an async context manager around all episodes (environments/shared_setup.py)
    """

    words: ClassVar[tuple[str, ...]]
    """Every word of its observations and actions, for a vocabulary of words. Empty if it needs a tokenizer of text."""
    turns_max: ClassVar[int]
    tokens_max: ClassVar[int]
    """Limit of one action."""
    agents: ClassVar[Mapping[str, MakeAgent]]
    """Agents of the task by name: `random` plays random well-formed actions, `teacher` knows the format but not the
    goal, `expert` always reaches it."""

    def __call__(self, resources: ExternalResources, **options: Any) -> Environment: ...


def reward_range(task: Task) -> tuple[float, float]:
    """The lowest and the highest sum of the rewards of an episode."""
    low, high = getattr(task, "reward_range", (0.0, 1.0))
    return float(low), float(high)
