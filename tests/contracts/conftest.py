"""What the contract suite runs on: every manager of the registry, one after the other.

A manager joins with one line in MANAGERS. One that says on entering that it will never run on this machine is skipped,
except under CI=true. Tests are coroutines with a `harness`: they run inside the manager, under a deadline, and what
they leave open is closed behind them. Tests marked `needs_programs` are not for a manager that runs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.managers.sandboxes.docker.docker_engine import docker_manager

from tangram.core.action import Action
from tangram.core.demand import CORE, Demand, cores
from tangram.core.messages import Grant, Share
from tangram.errors import ManagerError
from tangram.managers.base import Lease, Manager
from tangram.managers.fake import FakeManager
from tangram.managers.sandboxes.bwrap.manager import PROGRAMS, BwrapManager
from tangram.managers.sandboxes.process import ProcessManager
from tangram.managers.work import Close, Commit, Exec, ExecResult, LeaseResult, Open, SandboxSpec, Work
from tangram.processes.streams import Output

DEADLINE_S = 60.0
"""Of one test, and of whatever it waits for: a hang is a failure."""
LOOK_S = 0.01

TICK = "while :; do date +%s.%N >> ticks; sleep 0.01; done"
"""A program that writes down when it runs."""

Factory = Callable[[Path], Awaitable[Manager]]
"""Makes a manager, not yet entered, that keeps what it needs below the given directory."""


class Kind(NamedTuple):
    factory: Factory
    runs_programs: bool = True
    marks: tuple[pytest.MarkDecorator, ...] = ()


async def fake(root: Path) -> Manager:
    return FakeManager()


async def process(root: Path) -> Manager:
    return ProcessManager(root=root)


async def sandbox(root: Path) -> Manager:
    reason = why_no_sandboxes()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return BwrapManager(state=root)


def why_no_sandboxes() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "sandboxes need root"
    return f"missing: {', '.join(missing)}" if missing else ""


MANAGERS: dict[str, Kind] = {
    "fake": Kind(fake, runs_programs=False),
    "process": Kind(process),
    "sandbox": Kind(sandbox),
    "docker": Kind(docker_manager, marks=(pytest.mark.docker,)),
}


# ---- running coroutines as tests ----------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_programs: not for managers that run no real programs")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), arguments["harness"]:
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "harness" in metafunc.fixturenames:
        real = any(metafunc.definition.iter_markers("needs_programs"))
        names = [
            pytest.param(name, marks=kind.marks) for name, kind in MANAGERS.items() if kind.runs_programs or not real
        ]
        metafunc.parametrize("harness", names, indirect=True)


@pytest.fixture
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(MANAGERS[request.param].factory, tmp_path / "root")
    yield harness
    left = [marker for marker in harness.markers if alive(marker)]
    assert not left, f"processes are left after the end of the manager: {left}"


# ---- short words for what tests ask -------------------------------------------------------------------------------


class Harness:
    """A manager under test."""

    manager: Manager

    def __init__(self, factory: Factory, root: Path) -> None:
        self._factory = factory
        self.root = root
        self._numbers = count(1)
        self._entered = False
        self.markers: list[str] = []

    async def __aenter__(self) -> Harness:
        manager = await self._factory(self.root)
        try:
            self.manager = await manager.__aenter__()
        except ManagerError as error:
            if error.retry or os.environ.get("CI") == "true":
                raise
            pytest.skip(f"this machine cannot hold it: {error}")
        self._entered = True
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._entered:
            self._entered = False
            await self.manager.__aexit__(None, None, None)

    async def leave(self) -> None:
        """End the manager before the test ends."""
        await self.__aexit__()

    def marker(self) -> str:
        """A number of seconds that no other process sleeps: a process that has it on its command line can be found from
        outside of every sandbox."""
        self.markers.append(f"{3000 + next(self._numbers)}.{secrets.randbelow(10**9):09}")
        return self.markers[-1]

    async def start(
        self, sandbox: str, work: Work, *, reserved: int = CORE, limit: int = 0, width: int = 0,
        output: Output | None = None,
    ) -> Lease:  # fmt: skip
        """With a grant of these milli-cores; limit and width are what is reserved unless given."""
        pool = self.manager.pools()[0]
        action = Action(id=f"action-{next(self._numbers)}", demand=Demand({"cpu": cores(1)}), sandbox=sandbox)
        share = Share(pool.name, reserved, limit or reserved)
        return await self.manager.start(action, Grant(action.id, pool.node, (share,), width or reserved), work, output)

    async def do(self, sandbox: str, work: Work) -> LeaseResult:
        """To its end, which must be a good one."""
        ended = await (await self.start(sandbox, work)).wait()
        if ended.lost:
            raise ManagerError(ended.lost)
        return ended

    async def open(self, image: str = "host", **fields: Any) -> Box:
        box = Box(self, f"box-{next(self._numbers)}")
        await self.do(box.name, Open(spec=SandboxSpec(image=image, **fields)))
        return box


class Box:
    """An open sandbox."""

    def __init__(self, harness: Harness, name: str) -> None:
        self._bench = harness
        self.name = name

    async def start(
        self, command: str | tuple[str, ...], *, reserved: int = CORE, limit: int = 0, width: int = 0,
        output: Output | None = None, **fields: Any,
    ) -> Lease:  # fmt: skip
        work = Exec(command=command, **fields)
        return await self._bench.start(self.name, work, reserved=reserved, limit=limit, width=width, output=output)

    async def end(self, command: str | tuple[str, ...], **fields: Any) -> LeaseResult:
        return await (await self.start(command, **fields)).wait()

    async def run(self, command: str | tuple[str, ...], **fields: Any) -> ExecResult:
        """What a program left behind, of which our side lost nothing."""
        ended = await self.end(command, **fields)
        assert ended.lost == ""
        assert ended.executed is not None
        return ended.executed

    async def says(self, command: str | tuple[str, ...], **fields: Any) -> str:
        """What a program that must succeed wrote."""
        done = await self.run(command, **fields)
        assert (done.exit_code, done.stderr) == (0, b""), done
        return done.stdout.decode().removesuffix("\n")

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Something runs in it meanwhile, so that what was left running goes on."""
        lease = await self.start("sleep 1000")
        yield
        await lease.stop()
        await lease.wait()

    async def close(self) -> None:
        await self._bench.do(self.name, Close())

    async def commit(self, image: str) -> None:
        await self._bench.do(self.name, Commit(image=image))

    async def read(self, path: str, bytes_max: int = 1 << 20) -> bytes:
        return await self._bench.manager.read(self.name, path, bytes_max=bytes_max)

    async def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        await self._bench.manager.write(self.name, path, content, mode=mode)

    async def names(self, path: str = ".") -> list[str]:
        return [entry.name for entry in await self._bench.manager.list(self.name, path)]


# ---- seeing from outside ------------------------------------------------------------------------------------------


def alive(marker: str) -> bool:
    """Whether any process of the machine has it on its command line. A zombie has none."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in (directory / "cmdline").read_bytes():
                    return True
    return False


async def until(condition: Callable[[], bool]) -> None:
    """Polls a condition without an event; the deadline of the test is the deadline."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
