"""A container: one sandbox, who runs in it, how much CPU it has, and whether it stands still.

Owns the state of one container at the engine: paused or not, its CPU, its end. Decides nothing: grants say how much.
Promises that it runs only while an action does, or while somebody visits it to look at its files; that its CPU is the
sum of what its running actions were granted; and that the engine is not asked for what is so already.

An engine limits containers, not the programs in them. So several actions in one container share the sum of their
grants, each as it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tangram.core.demand import CORE
from tangram.errors import ManagerError
from tangram.managers.sandboxes.cgroups.groups import (
    PERIOD_US,
    QUOTA_MIN_US,
    WEIGHT_MAX_V1,
    WEIGHT_MIN_V1,
    WEIGHT_PER_CORE_V1,
    Group,
)
from tangram.managers.sandboxes.cgroups.hierarchies import CONTROLLERS_V1, CONTROLLERS_V2, find_hierarchies
from tangram.managers.sandboxes.docker.engine import Engine, EngineRefused, to_its_end
from tangram.managers.sandboxes.docker.shells import Session
from tangram.managers.work import SandboxSpec
from tangram.processes.process_tree import Process, look_up


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Since the container was made."""

    cpu_s: float = 0.0
    throttled_s: float = 0.0
    memory_peak_bytes: int = 0
    memory_kills: int = 0
    """Processes killed for want of memory; where that is not seen, how often the engine said so."""


class Meter:
    """Reads what a container has used from its control group, where this process sees it: on the same machine, with the
    engine's processes not hidden in a namespace. Elsewhere only what the scripts of output_framing.py report from
    inside is known, because an engine takes up to a second to report usage. Both count the container, not its programs:

    - read from here, `cpu_s` and `throttled_s` are divided evenly among the actions that ran at the same time; reported
      from inside, each action counts all of it, a stopped action reports nothing, and throttling is unknown;
    - the memory peak is the container's: since the first running action began, where the control group is visible and
      the kernel can reset a peak (version 1), else since the container was created.
    """

    def __init__(self, container: str, pid: int) -> None:
        self.group = visible_group(pid, container)
        """None: the processes of the container are not seen from here."""

    def read(self, memory_events: int) -> Reading | None:
        """None: it can no longer be read."""
        if self.group is None:
            return Reading(memory_kills=memory_events)
        try:
            return Reading(
                cpu_s=self.group.cpu_s(),
                throttled_s=self.group.throttled_s(),
                memory_peak_bytes=self.group.memory_peak_bytes(),
                memory_kills=self.group.memory_kills(),
            )
        except ManagerError:
            return None  # it is gone with the container

    def forget_memory_peak(self) -> None:
        if self.group is not None:
            with contextlib.suppress(ManagerError):
                self.group.forget_memory_peak()


def visible_group(pid: int, container: str) -> Group | None:
    """The control group of a process that the engine names, if it is a process of this machine and in the container."""
    try:
        paths = _group_paths(Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8"))
        hierarchies = find_hierarchies()
    except OSError:
        return None
    wanted = CONTROLLERS_V1 if hierarchies.version == 1 else CONTROLLERS_V2
    directories: dict[str, Path] = {}
    for name in wanted:
        path = paths.get(name if hierarchies.version == 1 else "", "")
        mount = hierarchies.by_controller.get(name)
        if mount is None or container not in path or ".." in path:
            return None
        directories[name] = mount / path.lstrip("/")
    group = Group(hierarchies.version, directories)
    return group if group.exists() else None


def _group_paths(text: str) -> dict[str, str]:
    """By controller; that of version 2 by the empty name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found


NOT_FOUND, CONFLICT = 404, 409
LAG_S, LAG_PAUSE_S = 30.0, 0.01
"""How long an engine may lag behind itself, and between two tries. It hears of its own pauses and of the end of
programs one after the other; and for each program whose streams are held by what it left running, it waits two seconds
before it hears more."""

AGENT = 61_999
"""The user that programs run as."""
HOLDER = 61_998
"""The user of the program that holds the container: what runs in it cannot signal it."""
PF_EXITING = 0x4
"""In the flags of a process that exits."""


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """As the engine counts."""

    shares: int
    quota: int
    cpuset: str
    """The CPUs that all of it may use."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What an image is like."""

    id: str
    env: dict[str, str]
    directory: str
    """Where commands start, if the image says so."""
    programs: frozenset[str] | None = None
    """Which of those that make a difference are in it. None: nobody has looked yet."""

    def has(self, program: str) -> bool:
        return self.programs is not None and program in self.programs


UNKNOWN = Traits(id="", env={}, directory="")


class Claim:
    """One running action, from before its start to its end."""

    def __init__(self, *, reserved: int, limit: int, cpus: tuple[int, ...]) -> None:
        self.token = secrets.token_hex(16)
        self.reserved = reserved
        self.limit = limit
        self.cpus = cpus
        self.alone = True
        """Nothing else was started in the container meanwhile."""
        self.cpu_s = 0.0
        self.throttled_s = 0.0
        self.memory_kills = 0
        self.memory_peak_bytes = 0


class Container:
    """One sandbox. Made by the manager, which fills in what comes to be known; runs from `started` on."""

    def __init__(self, engine: Engine, *, name: str, sandbox: str, spec: SandboxSpec) -> None:
        self.name = name
        self.id = ""
        self.sandbox = sandbox
        self.spec = spec
        self.image = UNKNOWN
        self.ready = False
        """Programs can be started in it."""
        self.tokens: set[str] = set()
        """Of all that was ever started in it."""
        self.sessions: dict[str, Session] = {}
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it is no more."""
        self.opened = asyncio.Event()
        """Nothing more is made of it: it is ready, or could not be opened."""
        self.memory_events = 0
        """How often the engine said that its memory was used up."""
        self._engine = engine
        self._claims: list[Claim] = []
        self._visitors = 0
        self._launches = 0
        self._no_launch = asyncio.Event()
        self._no_launch.set()
        self._paused = False
        self._lock = asyncio.Lock()
        self._last = Reading()
        self._first_pid = 0
        self._first_process: Process | None = None
        """None: it has not started, or its processes are not visible from here."""

    def started(self, pid: int, cpu: Cpu) -> None:
        self.meter = Meter(self.id, pid)
        self._first_pid = pid
        self._first_process = look_up(pid) if self.meter.group is not None else None
        self._cpu = cpu
        """What the engine was told last."""
        self._all_cpus = cpu.cpuset

    async def close(self) -> None:
        """Let go of the shells in it."""
        for session in self.sessions.values():
            if session.shell is not None:
                await session.shell.close()
        self.sessions.clear()

    @property
    def user(self) -> int:
        return 0 if self.spec.user == "root" else AGENT

    def require(self) -> None:
        """Raises ManagerError once the end of the container is known, or its first process exits. The event of the
        engine follows later, by seconds if the engine lags."""
        if self.gone.done() or self._exits():
            reason = self.gone.result() if self.gone.done() else "its first process has ended"
            raise ManagerError(f"sandbox {self.sandbox} is gone: {reason}", retry=False)

    def _exits(self) -> bool:
        """False where the processes of the container are not visible."""
        first = self._first_process
        if first is None:
            return False
        now = look_up(first.pid)
        return now is None or now.started != first.started or not now.living or bool(now.flags & PF_EXITING)

    async def require_running(self) -> None:
        """Raises ManagerError like `require`, and also if the engine reports that the container has ended, or runs
        again after an end."""
        self.require()
        try:
            description = await self._engine.json("GET", f"/containers/{self.id}/json", what="describe a container")
        except EngineRefused as error:
            if error.status != NOT_FOUND:
                raise
            self.lose("its container was removed")
        else:
            state = description["State"]
            if not state["Running"] or state["Pid"] != self._first_pid:
                self.lose(f"its container ended with exit code {state['ExitCode']}")
        self.require()

    def lose(self, why: str) -> None:
        if not self.gone.done():
            self.gone.set_result(why)

    async def kill(self) -> None:
        """All that runs in it."""
        with contextlib.suppress(ManagerError):
            await self._change("kill", "kill a container")

    # ---- who runs ----

    async def enter(self, claim: Claim) -> None:
        """The container runs, with the CPU of the action added. To be undone with `leave`, also if this fails."""
        self.tokens.add(claim.token)
        async with self._lock:
            self._count()
            claim.alone = not self._claims and not self._visitors
            self._disturb()
            if not self._claims:
                self.meter.forget_memory_peak()
            self._claims.append(claim)
            await self._settle()

    async def leave(self, claim: Claim) -> None:
        """Its CPU is given back; without any action the container stands still."""
        async with self._lock:
            if claim not in self._claims:
                return
            self._count()
            self._claims.remove(claim)
            try:
                await self._settle()
            except ManagerError as error:
                # It would run on without an action that holds units for it.
                self.lose(f"it could not be made to stand still: {error}")
                await self.kill()

    async def settle(self) -> None:
        """After the grant of a running action has changed."""
        async with self._lock:
            await self._settle()

    @contextlib.asynccontextmanager
    async def visit(self) -> AsyncIterator[None]:
        """The container runs meanwhile, with the CPU that it had last. What actions left running runs as well."""
        async with self._lock:
            self._visitors += 1
            self._disturb()
            try:
                await self._settle()
            except BaseException:
                self._visitors -= 1
                raise
        try:
            yield
        finally:
            await to_its_end(self._end_visit())

    async def _end_visit(self) -> None:
        async with self._lock:
            self._visitors -= 1
            with contextlib.suppress(ManagerError):  # whoever comes next will see it
                await self._settle()

    def _disturb(self) -> None:
        for claim in self._claims:
            claim.alone = False

    @contextlib.asynccontextmanager
    async def launching(self) -> AsyncIterator[None]:
        """For whoever has entered or visits: it does not stand still while a program is being started. The engine
        would wait for ever for a program that stands still half-way, and the container with it."""
        async with self._lock:
            self.require()
            self._launches += 1
            self._no_launch.clear()
        try:
            yield
        finally:
            self._launches -= 1
            if not self._launches:
                self._no_launch.set()

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Nothing in it runs meanwhile, actions included, and nobody enters or leaves."""
        async with self._lock:
            self.require()
            try:
                await to_its_end(self._pause())
                yield
            finally:
                await to_its_end(self._settle())

    # ---- what the engine is told ----

    async def _settle(self) -> None:
        if self.gone.done():
            return
        await to_its_end(self._tell())

    async def _tell(self) -> None:
        """First the CPU, then let it run: what was left running gets no more than it should for a moment."""
        if not self._claims and not self._visitors:
            await self._pause()
            return
        if self._claims:
            wanted = self._wanted()
            if wanted != self._cpu:
                await self._update(wanted)
        if self._paused:
            await self._change("unpause", "let a container run")
            self._paused = False

    async def _pause(self) -> None:
        if not self._paused:
            await self._no_launch.wait()
            await self._change("pause", "let a container stand still")
            self._paused = True

    def _wanted(self) -> Cpu:
        cpuset = self._all_cpus
        if len(self._claims) == 1 and not self.image.has("taskset"):
            cpuset = ",".join(map(str, self._claims[0].cpus))
        return cpu_of(
            reserved=sum(claim.reserved for claim in self._claims),
            limit=sum(claim.limit for claim in self._claims),
            cpuset=cpuset,
        )

    async def _update(self, cpu: Cpu) -> None:
        await self._engine.json(
            "POST", f"/containers/{self.id}/update", what="change the CPU of a container", body=cpu_fields(cpu)
        )
        self._cpu = cpu

    async def _change(self, verb: str, what: str) -> None:
        """Of an engine that lags behind itself, and refuses because it believes that an earlier change was undone. What
        it says for too long is so: somebody else did it."""
        give_up = time.monotonic() + LAG_S
        while True:
            try:
                await self._engine.json("POST", f"/containers/{self.id}/{verb}", what=what)
                return
            except EngineRefused as error:
                if not any(words in error.answer for words in ("is already paused", "is not paused")):
                    raise
                if time.monotonic() > give_up or self.gone.done() or self._exits():
                    return
            await asyncio.sleep(LAG_PAUSE_S)

    # ---- what was used ----

    def _count(self) -> None:
        """What was used since the last time is divided among those who ran."""
        reading = self.meter.read(self.memory_events)
        if reading is None:
            return
        count = len(self._claims)
        for claim in self._claims:
            claim.cpu_s += max(0.0, reading.cpu_s - self._last.cpu_s) / count
            claim.throttled_s += max(0.0, reading.throttled_s - self._last.throttled_s) / count
            claim.memory_kills += reading.memory_kills - self._last.memory_kills
            claim.memory_peak_bytes = reading.memory_peak_bytes
        self._last = reading

    def used(self, claim: Claim) -> float | None:
        """CPU seconds of a running action so far; None if that is not seen from here."""
        reading = self.meter.read(0)
        if self.meter.group is None or reading is None:
            return None
        since = max(0.0, reading.cpu_s - self._last.cpu_s) / len(self._claims) if claim in self._claims else 0.0
        return claim.cpu_s + since


def cpu_of(*, reserved: int, limit: int, cpuset: str) -> Cpu:
    """Milli-cores as weight and quota."""
    return Cpu(
        shares=min(max(reserved * WEIGHT_PER_CORE_V1 // CORE, WEIGHT_MIN_V1), WEIGHT_MAX_V1),
        quota=max(QUOTA_MIN_US, limit * PERIOD_US // CORE),
        cpuset=cpuset,
    )


def cpu_fields(cpu: Cpu) -> dict[str, int | str]:
    """As the engine names them."""
    return {"CpuShares": cpu.shares, "CpuPeriod": PERIOD_US, "CpuQuota": cpu.quota, "CpusetCpus": cpu.cpuset}
