"""What the episodes of a task share: a connection that has all they need, and what is set up around them once.

A task may have a class method `needs(progress)`, which gives what a connection must be made with, as `tangram.connect`
names it: services, devices, quotas. And a class method `prepare(client)`, an async context manager around all episodes:
servers, quotas of a client that is there. `acts_outside = False` says that a task needs no client at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tangram.client.client import Client
from tangram.errors import InvalidConfig
from tangram.rl.environments.protocol import Task

Progress = Callable[[float, str], None]
"""Told how much is done, from 0 to 1, and what is being done."""


def acts_outside(task: Task, *, unless_said: bool = True) -> bool:
    """What the task says; `unless_said`: what is taken for true of one that says nothing."""
    return bool(getattr(task, "acts_outside", unless_said))


def require_backend(name: str, task: Task, backend: str | None) -> None:
    """Raises InvalidConfig for a task that says that it acts outside."""
    if backend is None and acts_outside(task, unless_said=False):
        raise InvalidConfig("backend", backend, f"sandbox, docker or process, since {name} acts outside")


async def needs_of(tasks: Iterable[Task], progress: Progress | None = None) -> dict[str, Any]:
    """What a connection must be given for all of them. Raises ManagerError."""
    found: dict[str, Any] = {}
    for task in _each(tasks):
        needs = getattr(task, "needs", None)
        if needs is not None:
            for key, values in (await needs(progress)).items():
                found[key] = [*found.get(key, ()), *values]
    return found


@asynccontextmanager
async def prepared(tasks: Iterable[Task], client: Client | None) -> AsyncIterator[None]:
    """Around all episodes of these tasks. Raises InvalidConfig, if one of them needs a client and there is none."""
    async with AsyncExitStack() as stack:
        for task in _each(tasks):
            prepare = getattr(task, "prepare", None)
            if prepare is not None:
                try:
                    await stack.enter_async_context(prepare(client))
                except ValueError as error:
                    if client is not None:
                        raise
                    raise InvalidConfig("client", None, f"one, as tangram.connect() gives it ({error})") from None
        yield


def _each(tasks: Iterable[Task]) -> list[Task]:
    """Once, however many settings name it."""
    return list({id(task): task for task in tasks}.values())
