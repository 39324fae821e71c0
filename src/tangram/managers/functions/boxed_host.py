"""The host of one function of one run: its instance sandboxes, from none to the limit and back to none.

Owns which instance is idle, which one ends when, and the memory that is reserved for each. Promises that there are
never more sandboxes than the function may have, those included that are being opened or removed, that one which may not
be used again never is, and that closing leaves nothing. Who is idle keeps nobody waiting: whoever is about to open an
instance has idle ones ended first, as far as it takes. A call for which there is no memory then, or only what others
wait for, is not started: it waits in the queue of the scheduler, and holds nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from tangram.core.action import Action
from tangram.core.demand import CPU, Demand, fixed
from tangram.core.messages import Grant
from tangram.errors import AdmissionRefused, FileFailed, ManagerError
from tangram.managers.base import Manager, ShortOfMemory
from tangram.managers.functions.boxed_parcel import parcel
from tangram.managers.functions.boxed_program import DIRECTORY
from tangram.managers.functions.work import FunctionSpec
from tangram.managers.work import MIB, PROCESSES_MAX, Close, Open, SandboxSpec

PREFIX = "function-"
"""Of the names of instance sandboxes. Those of tenants have a '/' in them, which these never have."""
ALLOWANCE_BYTES = 128 * MIB
"""Of memory, above what the function may use: the program that it is forked from, its arguments and its answer on their
way through."""
DISK_BYTES = 256 * MIB
"""Of what calls write to files, which counts as memory."""
OWN_PROCESSES = 8
"""Besides those of a call: the first process of a sandbox, the held program, and who reads and writes files."""

NOTHING = Demand({CPU: fixed(1)})
"""Of an action that is never granted anything; a demand cannot be empty."""

Reserve = Callable[[str, int, str], None]
"""Of a sandbox: its name, MiB of memory, and the run. Raises AdmissionRefused."""
Release = Callable[[str], None]

SHORT = "memory"
"""The limit that is reached when there is no memory now: whoever waits will have it."""
COMMON_LIMITS = (SHORT, "capacity", "sandboxes_max")
"""Limits of the machine: idle instances of any owner make room. Others concern their owner alone."""


class Awaiting(msgspec.Struct, frozen=True):
    """Somebody who waits for memory."""

    action: str
    sandbox: str
    """For which it waits: of a call, what its instance will be called."""


class MemoryQueue(Protocol):
    """The scheduler, as whoever has instances sees it."""

    def first(self) -> Awaiting | None:
        """Who goes first of those that wait for memory which instances have."""
        ...

    def waits(self, action: str) -> bool: ...

    def holds(self, sandbox: str) -> bool:
        """Whether there is memory under this name."""
        ...


class Nobody:
    """Waits for memory."""

    def first(self) -> Awaiting | None:
        return None

    def waits(self, action: str) -> bool:
        return False

    def holds(self, sandbox: str) -> bool:
        return False


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What all hosts have in common."""

    manager: Manager
    reserve: Reserve
    release: Release
    queue: MemoryQueue
    image: str
    idle_s_max: float
    """After which an instance that is not called ends, whatever its function says."""
    is_over: Callable[[str], bool]
    """Whether this owner has more instances than it may have."""
    reclaim: Callable[[str, bool], Awaitable[bool]]
    """Waits until an instance of this owner is gone, or of any owner: one that is ending, or an idle one, which ends
    for it. False: there is none."""
    idle: dict[BoxedInstance, BoxedHost]
    """Of all hosts, the one that was idle the longest first."""


class BoxedInstance:
    """One sandbox."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = False
        """Its sandbox is there, with everything that a call needs."""
        self.holds = True
        """A held program serves its calls; without, each is a program of its own."""
        self.calls = 0
        self.idle_since = 0.0
        self.idle_timer: asyncio.TimerHandle | None = None


class BoxedHost:
    def __init__(
        self, spec: FunctionSpec, run: str, owner: str, around: Surroundings, on_empty: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.run = run
        self.owner = owner
        self.around = around
        self._on_empty = on_empty
        self._loop = asyncio.get_running_loop()
        self._instances: set[BoxedInstance] = set()
        """All whose sandboxes exist, or may exist."""
        self.idle: list[BoxedInstance] = []
        """The one that was used last is used next, so that the others become superfluous."""
        self._removals: dict[BoxedInstance, asyncio.Task[bool]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.users = 0
        """Calls that are under way."""
        self._tag = _digest(owner, run, spec.name)
        self.promised: list[str] = []
        """Calls that waited for memory, and were told to come for an idle instance."""

    # ---- calls that wait for memory ----

    def name_for(self, action: Action, grant: Grant) -> str:
        """Of the instance for whose memory this attempt of a call waits: the same when it comes again."""
        return f"{PREFIX}{self._tag}{_digest(action.id, str(grant.attempt))}"

    def is_wanted_by(self, awaiting: Awaiting) -> bool:
        """Whether it is a call of this function that waits."""
        return awaiting.sandbox.startswith(f"{PREFIX}{self._tag}")

    def promise(self, awaiting: Awaiting) -> bool:
        """Have a call come for an idle instance instead of the memory for a new one. False: there is none that another
        does not come for."""
        self.promised = [action for action in self.promised if self.around.queue.waits(action)]
        if len(self.promised) >= len(self.idle):
            return False
        self.promised.append(awaiting.action)
        self.around.release(awaiting.sandbox)
        return True

    @property
    def instances(self) -> frozenset[BoxedInstance]:
        """Those included that are being opened or removed."""
        return frozenset(self._instances)

    @property
    def endings(self) -> list[asyncio.Task[bool]]:
        """One for each instance that is being removed: done when it is gone."""
        return list(self._removals.values())

    def sandbox_spec(self) -> SandboxSpec:
        spec = self.spec
        return SandboxSpec(
            image=self.around.image,
            memory_bytes=spec.memory_bytes + ALLOWANCE_BYTES,
            disk_bytes=DISK_BYTES,
            processes_max=min(spec.processes_max + OWN_PROCESSES, PROCESSES_MAX),
            network=False,
            user="agent",
        )

    # ---- instances for calls ----

    def take_idle(self) -> BoxedInstance | None:
        if not self.idle:
            return None
        instance = self.idle[-1]
        self._end_idling(instance)
        return instance

    @property
    def has_room(self) -> bool:
        return len(self._instances) < self.spec.max_instances

    def turn(self) -> asyncio.Future[None]:
        """Done when there may be an instance, or room for one."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def next_turn(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        if not self._instances and not self.users:
            self._on_empty()

    async def open(self, action: Action, grant: Grant, *, held: bool) -> BoxedInstance:
        """A new one, with everything in it that a call needs. `held`: its memory is, under the name for this call.
        Raises AdmissionRefused, InvalidAction, ManagerError."""
        assert self.has_room, "whoever opens an instance has seen that there is room"
        awaited = self.name_for(action, grant)
        instance = BoxedInstance(awaited if held else f"{PREFIX}{secrets.token_hex(8)}")
        self._instances.add(instance)
        try:
            await self._require_cap()
            if not held:
                await self._reserve(instance, awaited)
        except BaseException:
            self._forget(instance)
            if held:
                self.around.release(instance.name)
            raise
        try:
            await self._open(instance, action, grant)
        except BaseException as error:
            self.discard(instance)
            if isinstance(error, FileFailed):
                raise ManagerError(f"function {self.spec.name} does not fit into its sandbox: {error}") from error
            raise
        instance.is_open = True
        return instance

    async def _require_cap(self) -> None:
        while self.around.is_over(self.owner):
            if not await self.around.reclaim(self.owner, False):
                raise ManagerError(f"run {self.run} may have fewer sandboxes than it had when this call was let in")

    async def _reserve(self, instance: BoxedInstance, awaited: str) -> None:
        """Who is idle makes room for who is not. What others wait for already is not taken: the call waits with them,
        as it does where there is no memory, for that of a sandbox called `awaited`."""
        around, memory_mib = self.around, -(-self.sandbox_spec().memory_bytes // MIB)
        while around.queue.first() is None:
            try:
                around.reserve(instance.name, memory_mib, self.run)
                return
            except AdmissionRefused as refused:
                if await around.reclaim(self.owner, refused.limit in COMMON_LIMITS):
                    continue
                if refused.limit != SHORT:
                    raise
                break
        raise ShortOfMemory(awaited, memory_mib)

    async def _open(self, instance: BoxedInstance, action: Action, grant: Grant) -> None:
        manager, spec = self.around.manager, self.sandbox_spec()
        lease = await manager.start(inside(action, instance), grant, Open(spec=spec))
        ended = await lease.wait()
        if ended.lost:
            raise ManagerError(ended.lost)
        tar: io.BytesIO = parcel(self.spec, image=spec.image, disk_bytes=spec.disk_bytes)
        try:
            await manager.unpack(instance.name, DIRECTORY, tar)
        except ManagerError as error:
            raise ManagerError(str(error)) from error  # a retry opens another sandbox

    def give_back(self, instance: BoxedInstance) -> None:
        """It can be used again."""
        instance.idle_since = self._loop.time()
        self.idle.append(instance)
        self.around.idle[instance] = self
        idle_s = min(self.spec.idle_s, self.around.idle_s_max)
        instance.idle_timer = self._loop.call_later(idle_s, self.discard, instance)
        self.next_turn()

    # ---- their end ----

    def discard(self, instance: BoxedInstance) -> asyncio.Future[bool]:
        """It is used no more. The future is done when its sandbox is gone, or, False, could not be removed."""
        self._end_idling(instance)
        if instance not in self._instances:  # somebody else was first
            gone: asyncio.Future[bool] = self._loop.create_future()
            gone.set_result(True)
            return gone
        removal = self._removals.get(instance)
        if removal is None:
            removal = self._removals[instance] = self._loop.create_task(self._remove(instance))
        return removal

    async def _remove(self, instance: BoxedInstance) -> bool:
        """One that cannot be removed keeps its memory, which is still in use."""
        try:
            await close_sandbox(self.around.manager, instance.name)
            self.around.release(instance.name)
            return True
        except (ManagerError, OSError) as error:
            said = f"sandbox {instance.name} of function {self.spec.name} is left behind"
            context: dict[str, Any] = {"message": said, "exception": error}
            self._loop.call_exception_handler(context)
            return False
        finally:
            del self._removals[instance]
            self._forget(instance)

    def _forget(self, instance: BoxedInstance) -> None:
        self._instances.discard(instance)
        self.next_turn()

    def _end_idling(self, instance: BoxedInstance) -> None:
        if self.around.idle.pop(instance, None) is not None:
            self.idle.remove(instance)
        if instance.idle_timer is not None:
            instance.idle_timer.cancel()
            instance.idle_timer = None

    def leave(self) -> None:
        """A call is over."""
        self.users -= 1
        if not self._instances and not self.users:
            self._on_empty()

    async def close(self) -> None:
        for instance in list(self._instances):
            self.discard(instance)
        while self._removals:
            await asyncio.wait(self._removals.values())


async def close_sandbox(manager: Manager, name: str) -> None:
    """Raises ManagerError."""
    action = Action(id=name, demand=NOTHING, sandbox=name, kind="close")
    lease = await manager.start(action, Grant(action.id, "", (), 0), Close())
    ended = await lease.wait()
    if ended.lost:
        raise ManagerError(ended.lost)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def inside(action: Action, instance: BoxedInstance) -> Action:
    """The action in the sandbox of the instance."""
    return msgspec.structs.replace(action, sandbox=instance.name)
