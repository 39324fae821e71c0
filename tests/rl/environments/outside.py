"""Connections for environments that do something outside, and ways to see that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.client.conftest import why_not

from tangram.client.client import Client, connect
from tangram.client.transport import LocalTransport
from tangram.rl.environments.agents import agent_of
from tangram.rl.environments.protocol import Environment, ExternalResources, Step
from tangram.rl.rollout.rewards import PlayedTrajectory

DEADLINE_S = 300.0
"""Of a test: a hang is a failure."""


@asynccontextmanager
async def connection(folder: Path, backend: str, **options: Any) -> AsyncIterator[Client]:
    """One that has two cores. When it is left, every sandbox is gone already, and so is every task."""
    reason = why_not() if backend == "sandbox" else ""
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    async with (
        asyncio.timeout(DEADLINE_S),
        connect(backend=backend, cores=2, memory="1GiB", state=folder / "state", **options) as client,
    ):
        before = asyncio.all_tasks()
        yield client
        assert sandboxes(client) == []
        left = [task for task in asyncio.all_tasks() - before if not task.done()]
        assert left == []


def sandboxes(client: Client) -> list[str]:
    """The names of those that live."""
    assert isinstance(client.transport, LocalTransport)
    return list(client.transport.orchestrator.any_manager.sandboxes())


async def played(
    environment: Environment, agent: str, seed: int, client: Client | None
) -> tuple[PlayedTrajectory, list[Step]]:
    """An episode to its end, not closed, as a reward gets it."""
    actor = agent_of(type(environment), agent, seed)
    observation, steps = await environment.reset(seed), []
    while not (steps and steps[-1].done):
        steps.append(await environment.step(actor.act(observation)))
        observation = steps[-1].observation
    return played_of(environment, steps, seed, client), steps


def played_of(environment: Environment, steps: list[Step], seed: int, client: Client | None) -> PlayedTrajectory:
    return PlayedTrajectory(
        id=f"{type(environment).__name__}/{seed}/0.0",
        task=type(environment).__name__.lower(),
        seed=seed,
        turns=(),
        observation=steps[-1].observation if steps else "",
        total=sum(step.reward for step in steps),
        environment=environment,
        resources=ExternalResources(client=client),
    )


async def cancelled_at(doing: Coroutine[Any, Any, Any], suspension: int) -> bool:
    """Runs it and cancels it where it waits for the so-manieth time. False: it was over before that."""

    @types.coroutine
    def drive() -> Generator[Any, Any, bool]:
        count = 0
        waited_for: Any = None
        while True:
            try:
                waited_for = doing.send(None)
            except StopIteration:
                return False
            while True:
                count += 1
                if count == suspension:
                    task = asyncio.current_task()
                    assert task is not None
                    asyncio.get_running_loop().call_soon(task.cancel)
                try:
                    yield waited_for
                except BaseException as error:
                    try:
                        waited_for = doing.throw(error)
                    except StopIteration:
                        return False
                    continue
                break

    async def run() -> bool:
        return await drive()

    task = asyncio.ensure_future(run())
    await asyncio.wait({task})
    if task.cancelled():
        return True
    return task.result()
