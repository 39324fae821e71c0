"""What tests of model services run on: emulated devices, and a manager that is entered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.fork_servers import Pool, pooled_for_models
from tests.managers.models.bytes_engine import BytesEngine

from tangram.core.action import Action
from tangram.core.demand import GPU, Demand, fixed
from tangram.core.messages import Event, Evicted, Grant, Resident, Share
from tangram.managers.models import Emulated, Infer, ModelManager, Service
from tangram.managers.models.batch_lease import InferLease
from tangram.managers.work import MIB, LeaseResult
from tangram.processes.process_tree import ACTION_MARK

DEADLINE_S = 120.0
"""Of one test, and of whatever it waits for: a hang is a failure."""

SIZE = 1 * MIB


def service(
    name: str, seed: int = 1, *, degrees: tuple[int, ...] = (1,), memory_bytes: int = 0, **engine: Any
) -> Service:
    engine = {"size": SIZE, **engine}
    return Service(name=name, engine=BytesEngine(seed=seed, **engine), degrees=degrees, memory_bytes=memory_bytes)


def devices(number: int, memory_bytes: int = 10 * MIB, bandwidth: float = 1e12) -> list[Emulated]:
    return [Emulated(memory_bytes=memory_bytes, bandwidth=bandwidth)] * number


class Rig:
    """A manager, and all its messages."""

    def __init__(self, services: Sequence[Service], specs: Sequence[Emulated], **options: Any) -> None:
        self.events: list[Event] = []
        self.manager = ModelManager(services, specs, self.events.append, **options)
        self._numbers = count(1)

    async def start(
        self,
        name: str,
        chunk: tuple[int, ...] = (0,),
        payload: bytes = b"",
        batch: str = "",
        *,
        again: str = "",
        attempt: int = 1,
        idempotent: bool = True,
    ) -> InferLease:
        """`again`: the id of an action that was lost, to be made again."""
        action = Action(
            id=again or f"a{next(self._numbers)}",
            demand=Demand({GPU: fixed(len(chunk))}),
            service=name,
            kind="infer",
            idempotent=idempotent,
        )
        share = Share(f"{GPU}@local", len(chunk), len(chunk), chunk)
        grant = Grant(action.id, "local", (share,), len(chunk), attempt, batch)
        lease = await self.manager.start(action, grant, Infer(payload=payload))
        assert isinstance(lease, InferLease)
        return lease

    async def call(
        self, name: str, chunk: tuple[int, ...] = (0,), payload: bytes = b"", batch: str = "", **options: Any
    ) -> LeaseResult:
        return await (await self.start(name, chunk, payload, batch, **options)).wait()

    def residency_changes(self) -> list[str]:
        """`+name 0,1` for Resident, `-name 0,1` for Evicted, in order."""
        messages = []
        for event in self.events:
            assert isinstance(event, Resident | Evicted)
            sign = "+" if isinstance(event, Resident) else "-"
            messages.append(f"{sign}{event.service} {','.join(map(str, event.devices))}")
        return messages


def own_children() -> list[int]:
    """Processes of devices that live, wherever they hang."""
    mark = f"{ACTION_MARK}=model-{os.getpid()}-".encode()
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if mark in Path(f"/proc/{name}/environ").read_bytes():
                    pids.append(int(name))
            except OSError:
                continue
    return pids


def run(rig: Rig, test: Callable[[Rig], Awaitable[None]]) -> None:
    """The test inside the manager; then nothing must be left."""
    before = len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with rig.manager:
                await test(rig)

    asyncio.run(main())
    assert own_children() == []
    assert len(os.listdir("/proc/self/fd")) <= before


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


class Flag:
    """A file that engines touch, or look for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def is_up(self) -> bool:
        return self._path.exists()

    def raise_it(self) -> None:
        self._path.touch()

    def lower(self) -> None:
        self._path.unlink()


@pytest.fixture
def flag(tmp_path: Path) -> Flag:
    return Flag(tmp_path / "flag")


@pytest.fixture(scope="module", autouse=True)
def _fork_servers(fork_server_pool: Pool) -> Iterator[None]:
    with pooled_for_models(fork_server_pool):
        yield
