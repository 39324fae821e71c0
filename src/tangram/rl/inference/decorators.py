"""Decorators in the style of the paper's interface, thin over the settings.

They own nothing: each only leaves a record on what it decorates, and `declared` puts these records into the settings,
which gateway and rewards follow. So there is one way underneath, and what stands in a config is said in the same words.

    @hw_mapping(hw_affinity={"frozenlake": "H800", "default": "H20"})
    class Policy: ...

    @register_serverless(tasks=["chain"], timeout_s=10.0)
    def right_or_wrong(trajectory): ...

    settings = declared(settings, Policy, right_or_wrong)

What is decorated stays what it is: a function can be called, a class instantiated, as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import msgspec

from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import RewardSettings, RolloutSettings, TaskSettings
from tangram.rl.inference.affinity import DEFAULT, resolved

T = TypeVar("T")

AFFINITY_MARK = "__tangram_affinity__"
SERVERLESS_MARK = "__tangram_serverless__"


class Serverless(msgspec.Struct, frozen=True, kw_only=True):
    """A reward that runs as a function, scaled from zero."""

    tasks: tuple[str, ...]
    """That it rewards; empty: all that name no other reward."""
    reward: RewardSettings


def hw_mapping(*, hw_affinity: Mapping[str, str]) -> Callable[[T], T]:
    """Which class of hardware writes the tokens of which task: classes or devices by task; `default` for the rest."""
    if not hw_affinity or not all(task and hardware for task, hardware in hw_affinity.items()):
        raise InvalidConfig("hw_affinity", dict(hw_affinity), "a class of hardware for each task that is named")
    return _leaving(AFFINITY_MARK, dict(hw_affinity))


def register_serverless(
    *, tasks: Sequence[str] = (), timeout_s: float = 60.0, retries: int = 2
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function rewards these tasks as a serverless function: called as an action, scaled from zero."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(function, FunctionType) or "<locals>" in function.__qualname__:
            name = getattr(function, "__qualname__", function)
            raise InvalidConfig("function", name, "a function of a module, which another process can import")
        reward = RewardSettings(
            kind="function",
            function=f"{function.__module__}:{function.__qualname__}",
            timeout_s=timeout_s,
            retries=retries,
        )
        return _leaving(SERVERLESS_MARK, Serverless(tasks=tuple(tasks), reward=reward))(function)

    return decorate


def declared(settings: RolloutSettings, *things: object) -> RolloutSettings:
    """The settings, with what the things declare. What the settings say themselves stays: a config overrides code.
    Raises InvalidConfig for a task that is not there, or a thing that declares nothing."""
    tasks = {task.name: task for task in settings.tasks}
    for thing in things:
        affinity: Mapping[str, str] | None = getattr(thing, AFFINITY_MARK, None)
        serverless: Serverless | None = getattr(thing, SERVERLESS_MARK, None)
        if affinity is None and serverless is None:
            raise InvalidConfig("decorators", thing, "something decorated by @hw_mapping or @register_serverless")
        if affinity is not None:
            tasks = _mapped(tasks, affinity, [engine.hardware for engine in settings.engines])
        if serverless is not None:
            tasks = _rewarded(tasks, serverless)
    return msgspec.structs.replace(settings, tasks=tuple(tasks.values()))


def _mapped(
    tasks: Mapping[str, TaskSettings], affinity: Mapping[str, str], classes: Sequence[str]
) -> dict[str, TaskSettings]:
    _require_known(tasks, [task for task in affinity if task != DEFAULT], "hw_affinity")
    found = dict(tasks)
    for name, task in tasks.items():
        hardware = affinity.get(name, affinity.get(DEFAULT, ""))
        if hardware and not task.affinity:
            known = resolved(hardware, classes, key=f"hw_affinity.{name}")
            found[name] = msgspec.structs.replace(task, affinity=known)
    return found


def _rewarded(tasks: Mapping[str, TaskSettings], serverless: Serverless) -> dict[str, TaskSettings]:
    _require_known(tasks, serverless.tasks, "tasks")
    found = dict(tasks)
    for name in serverless.tasks or tasks:
        if tasks[name].reward == RewardSettings():
            found[name] = msgspec.structs.replace(tasks[name], reward=serverless.reward)
    return found


def _require_known(tasks: Mapping[str, TaskSettings], names: Sequence[str], key: str) -> None:
    for name in names:
        if name not in tasks:
            raise InvalidConfig(key, name, f"a task of the settings, which are {', '.join(tasks) or 'none'}")


def _leaving(mark: str, record: object) -> Callable[[T], T]:
    def decorate(thing: T) -> T:
        setattr(thing, mark, record)
        return thing

    return decorate
