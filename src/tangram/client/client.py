"""The client: a connection to the pools, and what is opened through it.

Owns the names of sandboxes and the images that were made by set-up. `connect()` without an address starts an
orchestrator inside this process, with a manager for this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tangram.client.sandbox import OPEN_CORES, Image, Sandbox
from tangram.client.sizes import in_bytes
from tangram.client.transport import LocalTransport, Transport
from tangram.core.action import Action
from tangram.core.demand import CPU, Demand
from tangram.core.demand import cores as cores_of
from tangram.core.limits import Limits
from tangram.core.messages import Pool
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import InvalidConfig
from tangram.managers.base import Manager
from tangram.managers.work import Prepare, SandboxSpec
from tangram.service.orchestrator import Decider, Orchestrator

T = TypeVar("T")

BACKENDS = ("sandbox", "process", "docker")
PREPARE_DEMAND = Demand({CPU: cores_of(OPEN_CORES)})
SETUP_TIMEOUT_S = 1800.0
"""Of one set-up command."""


class Client:
    """An open connection. Use it as `async with tangram.connect() as t:`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._prefix = f"{os.getpid():x}{secrets.token_hex(2)}"
        self._numbers = count(1)
        self._building: dict[str, asyncio.Lock] = {}
        self._stack = ExitStack()
        self._warm = 0

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._transport.__aexit__(kind, error, trace)
        finally:
            self._stack.close()

    # ---- sandboxes ----

    def sandbox(
        self,
        *,
        image: str | Image = "host",
        memory: int | str = "1GiB",
        disk: int | str = "512MiB",
        processes: int = 512,
        open_files: int = 4096,
        network: bool = False,
        user: str = "agent",
        env: Mapping[str, str] | None = None,
        run: str = "default",
        trajectory: str = "",
        task: str = "",
    ) -> Sandbox:
        """A sandbox to be opened: `async with t.sandbox(memory="2GiB") as box:`.

        `memory` is reserved for its whole life, and the files that it writes count as memory, up to `disk`. `network`:
        that of the machine; without, none. `user="root"`: root inside, nobody outside.
        """
        spec = SandboxSpec(
            image=image.name if isinstance(image, Image) else image,
            memory_bytes=in_bytes("memory", memory),
            disk_bytes=in_bytes("disk", disk),
            processes_max=processes,
            open_files_max=open_files,
            network=network,
            user=user,
            env=dict(env or {}),
        )
        name = f"{self._prefix}-{next(self._numbers)}"
        again = self._prepare if self._warm else None
        return Sandbox(self._transport, name, spec, run=run, trajectory=trajectory, task=task, opened=again)

    def _prepare(self, spec: SandboxSpec) -> None:
        """Have another one made, as an action of its own which nobody waits for."""
        action = Action(
            id=f"{self._prefix}-warm-{next(self._numbers)}", demand=PREPARE_DEMAND, run="warm", kind="prepare"
        )
        self._transport.submit(action, Prepare(spec=spec))

    # ---- images ----

    async def image(
        self,
        source: str | Path = "",
        *,
        base: str | Image = "host",
        setup: Sequence[str] = (),
        memory: int | str = "2GiB",
        disk: int | str = "1GiB",
        network: bool = False,
        user: str = "agent",
        env: Mapping[str, str] | None = None,
        run: str = "default",
    ) -> Image:
        """An image: a root directory, or a tar as `docker save` or OCI write it, if `source` is given; then the set-up
        commands are run on it once, and what they made is kept under the hash of all this, also for other processes."""
        name = await self._transport.images.add_image(str(source)) if source else _name(base)
        if not setup:
            return Image(name)
        key = _key(name, setup, network, user, env)
        async with self._building.setdefault(key, asyncio.Lock()):
            found = await self._transport.images.recall_image(key)
            if found:
                return Image(found)
            options = dict(memory=memory, disk=disk, network=network, user=user, env=env, run=run)
            async with self.sandbox(image=name, trajectory=f"setup-{key[:12]}", **options) as box:  # type: ignore[arg-type]
                for command in setup:
                    (await box.exec(command, key="setup", timeout_s=SETUP_TIMEOUT_S)).check()
                made = await box.commit(f"setup-{key[:24]}")
            await self._transport.images.remember_image(key, made.name)
            return made

    async def forget(self, image: Image) -> None:
        """Delete an image that `commit` made. Sandboxes that were opened from it live on."""
        await self._transport.images.forget_image(image.name)

    # ---- many at once ----

    async def gather(self, *doing: Awaitable[T], label: str = "") -> list[T]:
        """All of them, side by side, in the order given; with a progress bar if there is a label and a terminal.

        When one raises, the others are cancelled, and that is raised.
        """
        with _progress(label, len(doing)) as advance:

            async def one(each: Awaitable[T]) -> T:
                found = await each
                advance()
                return found

            tasks = []
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(each)) for each in doing]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not label or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def _name(image: str | Image) -> str:
    return image.name if isinstance(image, Image) else image


def _key(base: str, setup: Sequence[str], network: bool, user: str, env: Mapping[str, str] | None) -> str:
    said = json.dumps([base, list(setup), network, user, sorted((env or {}).items())])
    return hashlib.sha256(said.encode()).hexdigest()


def connect(
    url: str = "",
    *,
    backend: str = "sandbox",
    cores: float | None = None,
    memory: int | str | None = None,
    policy_name: str = "adaptive",
    limits: Limits | None = None,
    record: str | Path = "",
    state: str | Path = "",
    warm: int = 0,
    decider: Decider | None = None,
) -> Client:
    """A connection, to be entered: `async with tangram.connect() as t:`.

    Without an address an orchestrator starts inside this process: it owns the sandboxes, and they end with it.
    `backend`: "sandbox" (real isolation, needs root), "docker" (through an engine), or "process", which isolates
    nothing. `cores` and `memory`: what all sandboxes may use together; all of this machine if not given. `record`: a
    file for the trace, which `tangram sim` and `tangram trace` read. `warm`: sandboxes that are made ahead, each like
    the last one that was opened. `decider`: another one than the scheduler.
    """
    if url:
        raise InvalidConfig("url", url, "nothing: a service on another machine comes with `tangram serve`")
    memory_bytes = None if memory is None else in_bytes("memory", memory)
    manager = _manager(backend, cores, memory_bytes, Path(state) if state else None, warm)
    pools = manager.pools()
    limits = limits or Limits()
    stack = ExitStack()
    observer = None
    if record:
        from tangram.sim.record import recording  # brings numpy along

        observer = stack.enter_context(recording(record, policy=policy_name, pools=pools, limits=limits, note=backend))
    chosen = decider or Scheduler(policy(policy_name), pools, limits=limits)
    client = Client(LocalTransport(Orchestrator(chosen, {_node(pools): manager}, observer=observer)))
    client._stack = stack
    client._warm = warm
    return client


def _node(pools: tuple[Pool, ...]) -> str:
    return pools[0].node


def _manager(backend: str, cores: float | None, memory_bytes: int | None, state: Path | None, warm: int) -> Manager:
    if type(warm) is not int or warm < 0 or (warm and backend != "sandbox"):
        raise InvalidConfig("warm", warm, "a number of sandboxes, at least 0; only the sandbox backend has warm ones")
    if backend == "sandbox":
        from tangram.managers.cpu.manager import SandboxManager

        return SandboxManager(state=state, cores=cores, memory_bytes=memory_bytes, warm=warm)
    if backend == "process":
        from tangram.managers.process import ProcessManager

        return ProcessManager(root=state, cores=cores, memory_bytes=memory_bytes)
    if backend == "docker":
        from tangram.managers.docker import DockerManager

        return DockerManager(cores=cores, memory_bytes=memory_bytes)
    raise InvalidConfig("backend", backend, f"one of {', '.join(BACKENDS)}")
