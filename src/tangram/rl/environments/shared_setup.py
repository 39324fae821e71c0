"""Shared set-up of tasks: what a connection needs for them, and what is set up once around all episodes.

A task may have a class method `needs(progress)`, which returns arguments for `tangram.connect`: services, devices,
quotas. And a class method `prepare(client)`, an async context manager around all episodes: servers, quotas of an
existing client. `needs_client = False` declares that a task needs no client at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tangram.client.client import Client
from tangram.errors import InvalidConfig
from tangram.rl.environments.protocol import Task

Progress = Callable[[float, str], None]
"""Called with the finished share, from 0 to 1, and a description."""


def needs_client(task: Task, *, default: bool = True) -> bool:
    """Returns what the task declares; `default` for a task that declares nothing."""
    return bool(getattr(task, "needs_client", default))


def require_backend(name: str, task: Task, backend: str | None) -> None:
    """Raises InvalidConfig for a task that declares that it needs a client."""
    if backend is None and needs_client(task, default=False):
        raise InvalidConfig("backend", backend, f"sandbox, docker or process, since {name} needs a client")


async def needs_of(tasks: Iterable[Task], progress: Progress | None = None) -> dict[str, Any]:
    """Returns what a connection needs for all tasks. Raises ManagerError."""
    merged: dict[str, Any] = {}
    for task in _distinct(tasks):
        needs = getattr(task, "needs", None)
        if needs is not None:
            for key, values in (await needs(progress)).items():
                merged[key] = [*merged.get(key, ()), *values]
    return merged


@asynccontextmanager
async def prepare_tasks(tasks: Iterable[Task], client: Client | None) -> AsyncIterator[None]:
    """Wraps all episodes of these tasks. Raises InvalidConfig if one of them needs a client and there is none."""
    async with AsyncExitStack() as stack:
        for task in _distinct(tasks):
            prepare = getattr(task, "prepare", None)
            if prepare is not None:
                try:
                    await stack.enter_async_context(prepare(client))
                except ValueError as error:
                    if client is not None:
                        raise
                    raise InvalidConfig("client", None, f"one, as tangram.connect() gives it ({error})") from None
        yield


def _distinct(tasks: Iterable[Task]) -> list[Task]:
    """Each task once, even if several settings name it."""
    return list({id(task): task for task in tasks}.values())
