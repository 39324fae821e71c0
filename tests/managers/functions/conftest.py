"""A bench for functions on a separate orchestrator, and what they leave on the machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tangram.client.functions import FunctionCalls
from tangram.client.transport import LocalPending, Pending
from tangram.client.validation import Lifecycle
from tangram.core.action import Action
from tangram.core.limits import Limits
from tangram.core.messages import Pool, PoolChanged, cpu_node
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.functions.endpoint import EndpointManager
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call, Post
from tangram.managers.work import Work
from tangram.runtime.orchestrator import Orchestrator

DEADLINE_S = 60.0
"""Of a test: a hang is a failure."""

Test = Callable[["Bench"], Awaitable[None]]


class Direct:
    """The transport of calls to an orchestrator."""

    by_value = False

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def ensure_pool(self, pool: Pool) -> None:
        self._orchestrator.send(PoolChanged(pool=pool))

    def submit(self, action: Action, work: Work) -> Pending:
        return LocalPending(self._orchestrator, self._orchestrator.submit(action, work))


class Bench:
    """A connection with functions."""

    def __init__(self, functions: FunctionCalls, manager: FunctionManager, orchestrator: Orchestrator) -> None:
        self.functions = functions
        self.manager = manager
        self.orchestrator = orchestrator
        self.call = functions.call
        self.try_call = functions.try_call

    @property
    def free(self) -> dict[str, tuple[int, int]]:
        """Held units by pool, and the total."""
        pools = self.orchestrator.decider.ledger.pools  # type: ignore[attr-defined]
        return {name: (pool.held, pool.total) for name, pool in pools.items()}


@asynccontextmanager
async def functions(cores: float = 4.0, **limits: Any) -> AsyncIterator[Bench]:
    manager, endpoints = FunctionManager(), EndpointManager()
    scheduler = Scheduler(policy("adaptive"), cpu_node("local", cores), limits=Limits(**limits))
    orchestrator = Orchestrator(scheduler, {}, {Call: manager, Post: endpoints})
    life = Lifecycle("the connection")
    async with orchestrator:
        life.begin(asyncio.get_running_loop())
        life.mark_open()
        bench = Bench(FunctionCalls(Direct(orchestrator), life, "test"), manager, orchestrator)
        yield bench
        life.mark_closed()
    scheduler.check()
    assert all(held == 0 for held, _ in bench.free.values()), bench.free


def below(pid: int) -> set[int]:
    """Processes that descend from it and are not zombies."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if words[0] not in ("Z", "X"):
                parents[int(name)] = int(words[1])
    found, more = set[int](), {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def living(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for happens in other processes
        await asyncio.sleep(0.01)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition: Callable[[], object]) -> None:
    """Blocks the event loop."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def run() -> Iterator[Callable[..., None]]:
    """Runs `test(bench)` and checks that no process or descriptor is left."""
    before, fds = below(os.getpid()), len(os.listdir("/proc/self/fd"))

    def main(test: Test, **options: Any) -> None:
        async def inside() -> None:
            async with asyncio.timeout(DEADLINE_S), functions(**options) as bench:
                await test(bench)

        asyncio.run(inside())

    yield main
    assert below(os.getpid()) - before == set()
    assert len(os.listdir("/proc/self/fd")) == fds
