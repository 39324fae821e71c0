"""A container: one sandbox, the actions that run in it, its CPU, and whether it is paused.

Owns the state of one container in the engine: pause, CPU, end. Makes no decisions: grants state the amounts. Promises
that it runs only while an action runs or a file operation needs it; that its CPU is the sum of the grants of its
running actions; and that no request repeats the current state.

An engine limits containers, not the programs in them: several actions in one container share the sum of their grants.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tangram.cancellation import run_to_completion
from tangram.core.demand import CORE
from tangram.errors import ManagerError
from tangram.managers.sandboxes.cgroups.groups import (
    PERIOD_US,
    QUOTA_MIN_US,
    WEIGHT_MAX_V1,
    WEIGHT_MIN_V1,
    WEIGHT_PER_CORE_V1,
    Cgroup,
)
from tangram.managers.sandboxes.cgroups.hierarchies import (
    CONTROLLERS_V1,
    CONTROLLERS_V2,
    find_hierarchies,
    read_cgroup_paths,
)
from tangram.managers.sandboxes.docker.engine import DockerEngine, EngineRefused
from tangram.managers.sandboxes.docker.shells import DockerSession
from tangram.managers.work import SandboxSpec
from tangram.processes.process_tree import Process, read_process


class ContainerUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage since the container was created."""

    cpu_s: float = 0.0
    throttled_s: float = 0.0
    memory_peak_bytes: int = 0
    oom_kills: int = 0
    """Processes killed for lack of memory; where that is not visible, the number of oom events of the engine."""


class UsageMeter:
    """Reads the usage of a container from its control group, if this process can access it: on the same machine, with
    the engine's processes visible. Otherwise only the reports of the scripts of output_framing.py from inside are
    available, because an engine takes up to a second to report usage. Both count the container, not its programs:

    - read from here, `cpu_s` and `throttled_s` are divided evenly among the actions that ran at the same time; reported
      from inside, each action counts all of it, a stopped action reports nothing, and throttling is unknown;
    - the memory peak is the container's: since the first running action began, where the control group is visible and
      the kernel can reset a peak (version 1), else since the container was created.
    """

    def __init__(self, group: Cgroup | None = None) -> None:
        self.group = group
        """The control group of the container; None if its processes are not visible from here."""

    def read(self, memory_events: int) -> ContainerUsage | None:
        """None if it can no longer be read."""
        if self.group is None:
            return ContainerUsage(oom_kills=memory_events)
        try:
            return ContainerUsage(
                cpu_s=self.group.cpu_s(),
                throttled_s=self.group.throttled_s(),
                memory_peak_bytes=self.group.memory_peak_bytes(),
                oom_kills=self.group.oom_kills(),
            )
        except ManagerError:
            return None  # it was removed with the container

    def reset_memory_peak(self) -> None:
        if self.group is not None:
            with contextlib.suppress(ManagerError):
                self.group.reset_memory_peak()


def visible_cgroup(pid: int, container: str) -> Cgroup | None:
    """The control group of a process that the engine names, if it is a process of this machine and in the container."""
    try:
        paths = read_cgroup_paths(f"/proc/{pid}/cgroup")
        hierarchies = find_hierarchies()
    except OSError:
        return None
    controllers = CONTROLLERS_V1 if hierarchies.version == 1 else CONTROLLERS_V2
    directories: dict[str, Path] = {}
    for name in controllers:
        path = paths.get(name if hierarchies.version == 1 else "", "")
        mount = hierarchies.by_controller.get(name)
        if mount is None or container not in path or ".." in path:
            return None
        directories[name] = mount / path.lstrip("/")
    group = Cgroup(hierarchies.version, directories)
    return group if group.exists() else None


HTTP_NOT_FOUND, HTTP_CONFLICT = 404, 409
LAG_S, LAG_PAUSE_S = 30.0, 0.01
"""Time for which an engine may lag, and pause between two attempts. An engine processes its own pauses and ends of
programs one after the other; each program whose streams are held by background processes delays it by two seconds."""

AGENT_UID = 61_999
"""The user of programs."""
HOLDER_UID = 61_998
"""The user of the program that holds the container open: programs in it cannot signal it."""


CpuSettings = dict[str, int | str]
"""CPU limits, in the terms of the engine."""


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The known properties of an image."""

    id: str
    env: dict[str, str]
    directory: str
    """Where commands start, if the image states it."""
    programs: frozenset[str] | None = None
    """Which of the relevant programs it has. None if unknown."""

    def has(self, program: str) -> bool:
        return self.programs is not None and program in self.programs


UNKNOWN_IMAGE = ImageInfo(id="", env={}, directory="")


class Claim:
    """One running action, from before its start to its end."""

    def __init__(self, *, reserved: int, limit: int, cpus: tuple[int, ...]) -> None:
        self.token = secrets.token_hex(16)
        self.reserved = reserved
        self.limit = limit
        self.cpus = cpus
        self.is_alone = True
        """Whether no other program was started in the container meanwhile."""
        self.cpu_s = 0.0
        self.throttled_s = 0.0
        self.oom_kills = 0
        self.memory_peak_bytes = 0


class Container:
    """One sandbox. The manager creates it and sets its fields; it runs from `on_started` on."""

    def __init__(self, engine: DockerEngine, *, name: str, sandbox: str, spec: SandboxSpec) -> None:
        self.name = name
        self.id = ""
        self.sandbox = sandbox
        self.spec = spec
        self.image = UNKNOWN_IMAGE
        self.ready = False
        """Programs can be started in it."""
        self.tokens: set[str] = set()
        """The tokens of all programs that were ever started in it."""
        self.sessions: dict[str, DockerSession] = {}
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The reason of its end."""
        self.opened = asyncio.Event()
        """Opening has finished: it is ready, or could not be opened."""
        self.oom_events = 0
        """How often the engine has reported that its memory is exhausted."""
        self._engine = engine
        self._claims: list[Claim] = []
        self._unpaused_count = 0
        self._launches = 0
        self._no_launch = asyncio.Event()
        self._no_launch.set()
        self._paused = False
        self._lock = asyncio.Lock()
        self.meter = UsageMeter()
        self._last_usage = ContainerUsage()
        self._cpu: CpuSettings = {}
        """The values that the engine has."""
        self._all_cpus = ""
        self._first_pid = 0
        self._first_process: Process | None = None
        """None before its start, or if its processes are not visible from here."""

    def on_started(self, pid: int, cpu: CpuSettings) -> None:
        self.meter = UsageMeter(visible_cgroup(pid, self.id))
        self._first_pid = pid
        self._first_process = read_process(pid) if self.meter.group is not None else None
        self._cpu = cpu
        self._all_cpus = str(cpu["CpusetCpus"])

    async def close(self) -> None:
        for session in self.sessions.values():
            if session.shell is not None:
                await session.shell.close()
        self.sessions.clear()

    @property
    def user(self) -> int:
        return 0 if self.spec.user == "root" else AGENT_UID

    def require_alive(self) -> None:
        """Raises ManagerError after the end of the container, or once its first process exits. The event of the engine
        follows later, by seconds if the engine lags."""
        if self.gone.done() or self._is_exiting():
            reason = self.gone.result() if self.gone.done() else "its first process has ended"
            raise ManagerError(f"sandbox {self.sandbox} is gone: {reason}", retry=False)

    def _is_exiting(self) -> bool:
        """False where the processes of the container are not visible."""
        first = self._first_process
        if first is None:
            return False
        now = read_process(first.pid)
        return now is None or now.started != first.started or not now.is_alive or now.is_exiting

    async def require_running(self) -> None:
        """Raises ManagerError like `require_alive`, and also if the engine reports that the container has ended, or was
        restarted."""
        self.require_alive()
        try:
            description = await self._engine.request_json(
                "GET", f"/containers/{self.id}/json", purpose="describe a container"
            )
        except EngineRefused as error:
            if error.status != HTTP_NOT_FOUND:
                raise
            self.mark_lost("its container was removed")
        else:
            state = description["State"]
            if not state["Running"] or state["Pid"] != self._first_pid:
                self.mark_lost(f"its container ended with exit code {state['ExitCode']}")
        self.require_alive()

    def mark_lost(self, why: str) -> None:
        if not self.gone.done():
            self.gone.set_result(why)

    async def kill(self) -> None:
        with contextlib.suppress(ManagerError):
            await self._change_state("kill", "kill a container")

    # ---- actions ----

    async def enter(self, claim: Claim) -> None:
        """Run the container, with the CPU of the action added. To be undone with `leave`, also if this fails."""
        self.tokens.add(claim.token)
        async with self._lock:
            self._account_usage()
            claim.is_alone = not self._claims and not self._unpaused_count
            self._mark_not_alone()
            if not self._claims:
                self.meter.reset_memory_peak()
            self._claims.append(claim)
            await self._apply_grants()

    async def leave(self, claim: Claim) -> None:
        """Remove the CPU of an action; pause the container if it was the last one."""
        async with self._lock:
            if claim not in self._claims:
                return
            self._account_usage()
            self._claims.remove(claim)
            try:
                await self._apply_grants()
            except ManagerError as error:
                # Otherwise it would continue to run without an action that holds units for it.
                self.mark_lost(f"it could not be paused: {error}")
                await self.kill()

    async def apply_grants(self) -> None:
        """Apply a changed grant of a running action."""
        async with self._lock:
            await self._apply_grants()

    @contextlib.asynccontextmanager
    async def unpaused(self) -> AsyncIterator[None]:
        """Run the container for the duration of the block, with its last CPU. Background processes run as well."""
        async with self._lock:
            self._unpaused_count += 1
            self._mark_not_alone()
            try:
                await self._apply_grants()
            except BaseException:
                self._unpaused_count -= 1
                raise
        try:
            yield
        finally:
            await run_to_completion(self._end_unpaused())

    async def _end_unpaused(self) -> None:
        async with self._lock:
            self._unpaused_count -= 1
            with contextlib.suppress(ManagerError):  # the next use will detect it
                await self._apply_grants()

    def _mark_not_alone(self) -> None:
        for claim in self._claims:
            claim.is_alone = False

    @contextlib.asynccontextmanager
    async def launching(self) -> AsyncIterator[None]:
        """Keep the container from being paused while a program is being started, by a caller that has entered or
        unpaused it. Otherwise the engine would wait for the paused program without end, and the container with it."""
        async with self._lock:
            self.require_alive()
            self._launches += 1
            self._no_launch.clear()
        try:
            yield
        finally:
            self._launches -= 1
            if not self._launches:
                self._no_launch.set()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause the container for the duration of the block, running actions included; enter and leave wait."""
        async with self._lock:
            self.require_alive()
            try:
                await run_to_completion(self._pause())
                yield
            finally:
                await run_to_completion(self._apply_grants())

    # ---- requests to the engine ----

    async def _apply_grants(self) -> None:
        if self.gone.done():
            return
        await run_to_completion(self._apply_state())

    async def _apply_state(self) -> None:
        """First the CPU, then unpause: background processes never get more than they should."""
        if not self._claims and not self._unpaused_count:
            await self._pause()
            return
        if self._claims:
            desired = self._desired_cpu()
            if desired != self._cpu:
                await self._update(desired)
        if self._paused:
            await self._change_state("unpause", "unpause a container")
            self._paused = False

    async def _pause(self) -> None:
        if not self._paused:
            await self._no_launch.wait()
            await self._change_state("pause", "pause a container")
            self._paused = True

    def _desired_cpu(self) -> CpuSettings:
        cpuset = self._all_cpus
        if len(self._claims) == 1 and not self.image.has("taskset"):
            cpuset = ",".join(map(str, self._claims[0].cpus))
        return cpu_settings(
            reserved=sum(claim.reserved for claim in self._claims),
            limit=sum(claim.limit for claim in self._claims),
            cpuset=cpuset,
        )

    async def _update(self, cpu: CpuSettings) -> None:
        await self._engine.request_json(
            "POST", f"/containers/{self.id}/update", purpose="change the CPU of a container", body=cpu
        )
        self._cpu = cpu

    async def _change_state(self, verb: str, purpose: str) -> None:
        """Pause or unpause. An engine that lags may refuse because it has not processed an earlier change. If it
        still refuses after that, another program has changed the state."""
        give_up = time.monotonic() + LAG_S
        while True:
            try:
                await self._engine.request_json("POST", f"/containers/{self.id}/{verb}", purpose=purpose)
                return
            except EngineRefused as error:
                if not any(words in error.reason for words in ("is already paused", "is not paused")):
                    raise
                if time.monotonic() > give_up or self.gone.done() or self._is_exiting():
                    return
            await asyncio.sleep(LAG_PAUSE_S)

    # ---- usage ----

    def _account_usage(self) -> None:
        """Divide the usage since the last call among the running actions."""
        reading = self.meter.read(self.oom_events)
        if reading is None:
            return
        count = len(self._claims)
        for claim in self._claims:
            claim.cpu_s += max(0.0, reading.cpu_s - self._last_usage.cpu_s) / count
            claim.throttled_s += max(0.0, reading.throttled_s - self._last_usage.throttled_s) / count
            claim.oom_kills += reading.oom_kills - self._last_usage.oom_kills
            claim.memory_peak_bytes = reading.memory_peak_bytes
        self._last_usage = reading

    def used(self, claim: Claim) -> float | None:
        """CPU seconds of a running action so far; None if they are not visible from here."""
        reading = self.meter.read(0)
        if self.meter.group is None or reading is None:
            return None
        since = max(0.0, reading.cpu_s - self._last_usage.cpu_s) / len(self._claims) if claim in self._claims else 0.0
        return claim.cpu_s + since


def cpu_settings(*, reserved: int, limit: int, cpuset: str) -> CpuSettings:
    """Milli-cores as weight and quota. `cpuset`: the CPUs that all programs together may use."""
    return {
        "CpuShares": min(max(reserved * WEIGHT_PER_CORE_V1 // CORE, WEIGHT_MIN_V1), WEIGHT_MAX_V1),
        "CpuPeriod": PERIOD_US,
        "CpuQuota": max(QUOTA_MIN_US, limit * PERIOD_US // CORE),
        "CpusetCpus": cpuset,
    }
