"""How the processes of an action in a container are ended from outside. The container is played: its processes are
children of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tangram.errors import ManagerError
from tangram.managers.sandboxes.docker import processes
from tangram.managers.sandboxes.docker.container import Claim
from tangram.managers.sandboxes.docker.output_framing import TOKEN_VARIABLE


class PlayedContainer:
    """A container with one action; `forks` is how many further processes it has started whenever it is looked at."""

    def __init__(self, forks: int = 0) -> None:
        self.claim = Claim(reserved=1000, limit=1000, cpus=())
        self.tokens = {self.claim.token}
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.meter = SimpleNamespace(group=SimpleNamespace(processes=self.look))
        self.pauses = 0
        self.children: list[subprocess.Popen[bytes]] = []
        self._forks = forks

    def start(self, command: str) -> subprocess.Popen[bytes]:
        env = {"PATH": os.defpath, TOKEN_VARIABLE: self.claim.token}
        child = subprocess.Popen(["sh", "-c", command], env=env, stdout=subprocess.PIPE)
        self.children.append(child)
        return child

    def look(self) -> list[int]:
        if self._forks > 0:
            self._forks -= 1
            self.start("exec sleep 1000")
        return [child.pid for child in self.children if child.poll() is None]

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self.pauses += 1
        yield

    async def stop(self) -> None:
        container: Any = self
        await processes.stop_processes(container, container, self.claim, 0)


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "geteuid", lambda: 0)
    monkeypatch.setattr(processes, "STOP_GRACE_S", 0.3)


@contextlib.contextmanager
def ended(container: PlayedContainer) -> Iterator[None]:
    try:
        yield
    finally:
        for child in container.children:
            child.kill()
            child.communicate()


def test_a_process_that_ends_on_sigterm_is_not_killed_and_one_that_ignores_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "STOP_GRACE_S", 2.0)

    async def main() -> None:
        container = PlayedContainer()
        with ended(container):
            polite = container.start("exec sleep 1000")
            stubborn = container.start("trap '' TERM; echo ready; exec sleep 1000")
            assert stubborn.stdout is not None
            await asyncio.to_thread(stubborn.stdout.readline)
            await container.stop()
            assert (polite.wait(), stubborn.wait()) == (-signal.SIGTERM, -signal.SIGKILL)

    asyncio.run(main())


def test_a_container_whose_processes_fork_too_fast_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_GRACE_S", -1.0)

    async def main() -> None:
        container = PlayedContainer(forks=2 * processes.KILL_ROUNDS_UNPAUSED)
        with ended(container):
            await container.stop()
            assert container.pauses >= 1
            assert container.look() == []

    asyncio.run(main())


def test_a_process_that_cannot_be_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KILL_WAIT_S", 0.1)
    monkeypatch.setattr(processes, "send_signal", lambda process, number: None)

    async def main() -> None:
        container = PlayedContainer()
        with ended(container):
            child = container.start("exec sleep 1000")
            with pytest.raises(ManagerError, match=f"processes \\[{child.pid}\\] of a container could not be killed"):
                await container.stop()

    asyncio.run(main())


def test_nothing_is_signalled_in_a_container_that_is_gone() -> None:
    async def main() -> None:
        container = PlayedContainer()
        with ended(container):
            child = container.start("exec sleep 1000")
            container.gone.set_result(None)
            await container.stop()
            assert child.poll() is None

    asyncio.run(main())
