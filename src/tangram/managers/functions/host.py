"""The host of one function: its instances, from zero to the limit and back to zero.

Owns the state of each instance (idle or busy), its idle time, and the memory that is reserved for it. Promises that the
number of instances never exceeds `max_instances`, including those that are being opened or removed, or cannot be
removed; that a discarded instance is never used again; and that `close` removes all instances.

Before a host opens an instance, it ends other idle instances if it needs their memory. A call that finds too little
memory, or only memory that other actions wait for, does not start: it waits in the queue of the scheduler and holds no
resources.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant
from tangram.core.scheduler import Scheduler
from tangram.errors import AdmissionRefused, ManagerError
from tangram.managers.base import InsufficientMemory, Manager
from tangram.managers.functions.forked_instance import ForkedInstance, FunctionForkServer
from tangram.managers.functions.instance import Instance
from tangram.managers.functions.sandbox_instance import SandboxInstance
from tangram.managers.functions.work import FunctionSpec
from tangram.managers.work import MIB, PROCESSES_MAX, SandboxSpec

PREFIX = "function-"
"""The prefix of the names of instances. Names of tenants' sandboxes contain a '/', these never do."""
ALLOWANCE_BYTES = 128 * MIB
"""Memory of a sandbox beyond that of the function: for the program, and for arguments and replies in transit."""
DISK_BYTES = 256 * MIB
"""The disk of a sandbox, for files that calls write. It counts as memory."""
REMOVAL_RETRY_S = 30.0
"""The time between attempts to remove an instance."""
OWN_PROCESSES = 8
"""Processes of a sandbox beyond those of a call: the first one, the program, and those that read and write files."""

ReserveMemory = Callable[[str, int, str], None]
"""Reserves memory for an instance. Arguments: its name, MiB of memory, and the run. Raises AdmissionRefused."""
ReleaseMemory = Callable[[str], None]
"""Releases the memory of the instance of this name."""

MEMORY_SHORTAGE = "memory"
"""The limit that is reached when there is no memory now, but waiting for it will help."""
COMMON_LIMITS = (MEMORY_SHORTAGE, "capacity", "sandboxes_max")
"""Limits of the machine: idle instances of any tenant make room. Other limits concern a single tenant."""


class MemoryWaiter(msgspec.Struct, frozen=True):
    """An action that waits for memory."""

    action: str
    sandbox: str
    """The sandbox whose memory it waits for; for a call, its future instance."""


class MemoryQueue:
    """The actions of a scheduler that wait for memory; none without a scheduler."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler = scheduler

    def first_waiter(self) -> MemoryWaiter | None:
        """The first action that waits for memory which idle instances hold."""
        entry = self._scheduler.awaits_yielding() if self._scheduler is not None else None
        if entry is None:
            return None
        assert entry.sandbox is not None, entry.id
        return MemoryWaiter(entry.id, entry.sandbox.id)

    def is_waiting(self, action: str) -> bool:
        return self._scheduler is not None and self._scheduler.is_queued(action)

    def has_memory(self, sandbox: str) -> bool:
        """Whether memory is reserved under this name."""
        state = self._scheduler.sandboxes.by_id.get(sandbox) if self._scheduler is not None else None
        return state is not None and state.node != ""


class FunctionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one function, or the sums for several."""

    instances: int = 0
    """The number of instances that are open now."""
    idle: int = 0
    fork_servers: int = 0
    started: int = 0
    """The number of instances that were ever opened."""
    calls: int = 0
    busy_s: float = 0.0
    """Seconds in which instances served calls."""
    instance_s: float = 0.0
    """Seconds in which there were instances."""

    def __add__(self, other: FunctionStatistics) -> FunctionStatistics:
        return FunctionStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


class HostContext(msgspec.Struct, frozen=True, kw_only=True):
    """The parts and options that all hosts share."""

    manager: Manager | None
    """The manager of the sandboxes that serve as instances; None: instances are forked processes of this machine."""
    reserve: ReserveMemory
    release: ReleaseMemory
    queue: MemoryQueue
    image: str
    idle_s_max: float
    """The upper limit of the idle time of an instance. A function may declare a shorter one."""


class HostManager(Protocol):
    """The manager of all hosts, as one host sees it."""

    idle: dict[Instance, FunctionHost]
    """The idle instances of all hosts; the one with the longest idle time comes first."""

    def exceeds_limit(self, tenant: str) -> bool:
        """Whether this tenant exceeds its limit of instances."""

    async def reclaim(self, tenant: str, *, of_all: bool) -> bool:
        """Waits until an instance of this tenant, or of any tenant, has ended: one that is ending, or an idle one,
        which is ended for this. Returns False if there is none."""

    def forget(self, host: FunctionHost) -> None:
        """Called when a host has neither instances nor calls."""


class FunctionHost:
    def __init__(
        self, spec: FunctionSpec, run: str, tenant: str, context: HostContext, host_manager: HostManager
    ) -> None:
        self.spec = spec
        self.run = run
        self.tenant = tenant
        self.context = context
        self._host_manager = host_manager
        self._loop = asyncio.get_running_loop()
        self._instances: set[Instance] = set()
        """All instances that exist, or may exist."""
        self.idle: list[Instance] = []
        """A stack: the most recently used instance is used next, so that the others reach their idle time."""
        self._removals: dict[Instance, asyncio.Task[bool]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.active_calls = 0
        """The number of calls in progress."""
        self._tag = _digest(tenant, run, spec.name)
        self.promised: list[str] = []
        """Calls that waited for memory and will take an idle instance instead."""
        self._past = FunctionStatistics()
        self._is_closing = False
        self._fork_server: FunctionForkServer | None = None
        if context.manager is None:
            self._fork_server = FunctionForkServer(spec, self._check_empty)

    # ---- calls that wait for memory ----

    def name_for(self, action: Action, grant: Grant) -> str:
        """Returns the name of the instance whose memory this attempt of a call waits for. A retry has the same name."""
        return f"{PREFIX}{self._tag}{_digest(action.id, str(grant.attempt))}"

    def is_awaited_by(self, waiter: MemoryWaiter) -> bool:
        """Whether the waiting action is a call of this function."""
        return waiter.sandbox.startswith(f"{PREFIX}{self._tag}")

    def promise(self, waiter: MemoryWaiter) -> bool:
        """Let a call take an idle instance instead of waiting for the memory of a new one. False: all idle instances
        are promised to others.

        A promise only limits how many calls stop waiting. It does not reserve an instance: another call, which holds
        its cores already, may take it first. If that call waited instead, for a call that is still queued for cores,
        the two could block each other. The promised call then takes the next idle instance, or waits for memory again.
        """
        self.promised = [action for action in self.promised if self.context.queue.is_waiting(action)]
        if len(self.promised) >= len(self.idle):
            return False
        self.promised.append(waiter.action)
        self.context.release(waiter.sandbox)
        return True

    @property
    def instances(self) -> frozenset[Instance]:
        """Includes instances that are being opened or removed."""
        return frozenset(self._instances)

    @property
    def endings(self) -> list[asyncio.Task[bool]]:
        """One future for each instance that is being removed; done when it is removed."""
        return list(self._removals.values())

    def sandbox_spec(self) -> SandboxSpec:
        spec = self.spec
        return SandboxSpec(
            image=self.context.image,
            memory_bytes=spec.memory_bytes + ALLOWANCE_BYTES,
            disk_bytes=DISK_BYTES,
            processes_max=min(spec.processes_max + OWN_PROCESSES, PROCESSES_MAX),
            network=False,
            user="agent",
        )

    # ---- instances for calls ----

    def take_idle(self) -> Instance | None:
        if not self.idle:
            return None
        instance = self.idle[-1]
        self._end_idling(instance)
        instance.busy_since = self._loop.time()
        return instance

    @property
    def has_room(self) -> bool:
        return len(self._instances) < self.spec.max_instances

    def wait_turn(self) -> asyncio.Future[None]:
        """Returns a future that is done when there may be an instance, or room for one."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def wake_next(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._check_empty()

    async def open(self, action: Action, grant: Grant, *, held: bool) -> Instance:
        """Open a new instance. `held`: its memory is reserved under the name for this call. Raises AdmissionRefused,
        InvalidAction, ManagerError."""
        assert self.has_room, "check for room before opening an instance"
        awaited = self.name_for(action, grant)
        instance = self._new_instance(awaited if held else f"{PREFIX}{secrets.token_hex(8)}")
        self._instances.add(instance)
        try:
            await self._require_cap()
            if not held:
                await self._reserve(instance, awaited)
        except BaseException:
            self._forget(instance)
            if held:
                self.context.release(instance.name)
            raise
        try:
            await instance.open(action, grant)
        except BaseException:
            self.discard(instance)
            raise
        instance.is_open = True
        instance.busy_since = self._loop.time()
        return instance

    def _new_instance(self, name: str) -> Instance:
        if self._fork_server is not None:
            return ForkedInstance(name, self._fork_server, self._on_idle_end)
        assert self.context.manager is not None
        return SandboxInstance(name, self.context.manager, self.spec, self.sandbox_spec())

    def _on_idle_end(self, instance: Instance) -> None:
        """Called when an instance has ended between two commands. Unless it is idle, its call discards it."""
        if instance in self._host_manager.idle:
            self.discard(instance)

    async def _require_cap(self) -> None:
        while self._host_manager.exceeds_limit(self.tenant):
            if not await self._host_manager.reclaim(self.tenant, of_all=False):
                raise ManagerError(f"run {self.run} may have fewer sandboxes than when this call was admitted")

    async def _reserve(self, instance: Instance, awaited: str) -> None:
        """Reserves memory; idle instances make room. Memory that others already wait for is not taken: the call waits
        behind them, as if there were no memory, under the name `awaited`."""
        context, memory_mib = self.context, -(-self.sandbox_spec().memory_bytes // MIB)
        while context.queue.first_waiter() is None:
            try:
                context.reserve(instance.name, memory_mib, self.run)
                return
            except AdmissionRefused as refused:
                if await self._host_manager.reclaim(self.tenant, of_all=refused.limit in COMMON_LIMITS):
                    continue
                if refused.limit != MEMORY_SHORTAGE:
                    raise
                break
        raise InsufficientMemory(awaited, memory_mib)

    def release(self, instance: Instance) -> None:
        """Make an instance available to other calls."""
        self._note_busy(instance)
        instance.idle_since = self._loop.time()
        self.idle.append(instance)
        self._host_manager.idle[instance] = self
        idle_s = min(self.spec.idle_s, self.context.idle_s_max)
        instance.idle_timer = self._loop.call_later(idle_s, self.discard, instance)
        self.wake_next()

    def _note_busy(self, instance: Instance) -> None:
        since, instance.busy_since = instance.busy_since, None
        if since is not None:
            self._past += FunctionStatistics(busy_s=self._loop.time() - since)

    def on_load_failed(self) -> None:
        """Discards the import: the next instance imports the function again, since a missing module may exist by
        then."""
        if self._fork_server is not None:
            self._fork_server.close()

    # ---- removing instances

    def discard(self, instance: Instance) -> asyncio.Future[bool]:
        """Remove an instance. The result of the future is False if it could not be removed."""
        self._end_idling(instance)
        if instance not in self._instances:  # it was removed before
            closed: asyncio.Future[bool] = self._loop.create_future()
            closed.set_result(True)
            return closed
        removal = self._removals.get(instance)
        if removal is None:
            self._note_busy(instance)
            if instance.removal_timer is not None:
                instance.removal_timer.cancel()
            removal = self._removals[instance] = self._loop.create_task(self._remove(instance))
        return removal

    async def _remove(self, instance: Instance) -> bool:
        """An instance that cannot be removed still uses its memory, so it keeps its reservation and counts towards
        `max_instances` until a later attempt succeeds or the host is closed."""
        is_removed = False
        try:
            await instance.close()
            self.context.release(instance.name)
            is_removed = True
            return True
        except (ManagerError, OSError) as error:
            message = f"instance {instance.name} of function {self.spec.name} cannot be removed"
            context: dict[str, Any] = {"message": message, "exception": error}
            self._loop.call_exception_handler(context)
            return False
        finally:
            del self._removals[instance]
            if is_removed or self._is_closing:
                if instance.is_open:
                    lived_s = self._loop.time() - instance.opened_s
                    self._past += FunctionStatistics(started=1, calls=instance.calls, instance_s=lived_s)
                self._forget(instance)
            else:
                instance.removal_timer = self._loop.call_later(REMOVAL_RETRY_S, self.discard, instance)

    def _forget(self, instance: Instance) -> None:
        self._instances.discard(instance)
        self.wake_next()

    def _end_idling(self, instance: Instance) -> None:
        if self._host_manager.idle.pop(instance, None) is not None:
            self.idle.remove(instance)
        if instance.idle_timer is not None:
            instance.idle_timer.cancel()
            instance.idle_timer = None

    def leave(self) -> None:
        """A call is over."""
        self.active_calls -= 1
        self._check_empty()

    def _check_empty(self) -> None:
        if not self._instances and not self.active_calls and not (self._fork_server and self._fork_server.is_running):
            self._host_manager.forget(self)

    async def close(self) -> None:
        self._is_closing = True
        for instance in list(self._instances):
            self.discard(instance)
        while self._removals:
            await asyncio.wait(self._removals.values())
        if self._fork_server is not None:
            await self._fork_server.wait_closed()

    # ---- statistics ----

    def statistics(self) -> FunctionStatistics:
        now = self._loop.time()
        opened = [instance for instance in self._instances if instance.is_open]
        return self._past + FunctionStatistics(
            instances=len(opened),
            idle=len(self.idle),
            fork_servers=self._fork_server is not None and self._fork_server.is_running,
            started=len(opened),
            calls=sum(instance.calls for instance in opened),
            busy_s=sum(now - instance.busy_since for instance in opened if instance.busy_since is not None),
            instance_s=sum(now - instance.opened_s for instance in opened),
        )


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
