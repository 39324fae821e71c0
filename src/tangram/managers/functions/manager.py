"""The function manager: calls of stateless Python functions, in instances that scale from zero.

    Call ──▶ FunctionManager ── FunctionHost (one per function and run) ── instances ── the program with the function

An instance is a sandbox of a manager (functions of tenants), or a process that is forked from one that has imported the
function (functions of the user of this process, which are not isolated). Owns the hosts of all functions. The pool of
each function limits its concurrent calls, and the grant of a call sets its cores; the manager of the sandboxes enforces
them. Two functions never share a sandbox; nothing of a tenant is unpickled here; a function that fails, hangs, leaks or
is killed does not affect other calls; and an idle instance releases its memory when another action waits for it.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import is_not
from typing import Self

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.base import AdoptingManager, Lease, Manager, close_sandbox
from tangram.managers.functions.host import (
    PREFIX,
    FunctionHost,
    FunctionStatistics,
    HostContext,
    MemoryQueue,
    MemoryWaiter,
    ReleaseMemory,
    ReserveMemory,
)
from tangram.managers.functions.instance import Instance
from tangram.managers.functions.lease import CallLease
from tangram.managers.functions.work import Call
from tangram.managers.work import HOST_IMAGE, SandboxSpec, Work
from tangram.processes.streams import Output

LOSSES_MAX = 10_000
"""Maximum actions whose last loss is remembered, for the error of their last attempt."""

Key = tuple[str, str, str]
"""The key of a host: the tenant, the run and the name of the function."""


class FunctionInstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, for reports."""

    sandbox: str
    function: str
    tenant: str
    run: str
    spec: SandboxSpec
    calls: int
    """So far, the current one included."""
    idle_s: float | None
    """Seconds since its last call; None: it serves one, or is being opened or removed."""


def _reserve_nothing(instance: str, memory_mib: int, run: str) -> None:
    pass


def _release_nothing(instance: str) -> None:
    pass


class FunctionManager:
    def __init__(
        self, manager: Manager | None = None, reserve: ReserveMemory = _reserve_nothing,
        release: ReleaseMemory = _release_nothing, *, image: str = HOST_IMAGE, idle_s_max: float = math.inf,
        tenant_of: Callable[[Action], str] = lambda action: action.run,
        instances_max: Callable[[str], int] = lambda tenant: sys.maxsize, queue: MemoryQueue | None = None,
    ) -> None:  # fmt: skip
        """`manager`: the manager of the sandboxes that serve as instances; it is entered before this one and left after
        it. None: instances are processes of this machine, which all runs share. `reserve` and `release` are called for
        each instance that is created and removed. `tenant_of`: the tenant of the instances of a call; `instances_max`:
        the limit of a tenant; `queue`: the actions that wait for memory."""
        self._manager = manager
        self._tenant_of = tenant_of
        self._instances_max = instances_max
        self._queue = queue or MemoryQueue(None)
        self.idle: dict[Instance, FunctionHost] = {}
        """The idle instances of all hosts; the one with the longest idle time comes first."""
        self._context = HostContext(
            manager=manager, reserve=reserve, release=release, queue=self._queue, image=image, idle_s_max=idle_s_max,
        )  # fmt: skip
        self._hosts: dict[Key, FunctionHost] = {}
        """Hosts that have instances or calls."""
        self._reclaiming: asyncio.Task[None] | None = None
        """Set while idle instances are ended for actions that wait for memory."""
        self._leases: set[CallLease] = set()
        self._losses: OrderedDict[str, str] = OrderedDict()
        self._past = FunctionStatistics()
        """The statistics of hosts that have been closed."""
        self._open = False

    async def __aenter__(self) -> Self:
        assert not self._open, "this manager is entered already; a manager can be entered once at a time"
        await self._sweep()
        self._open = True
        return self

    async def _sweep(self) -> None:
        """Close instances that the manager kept from an earlier process: their programs lost their owner."""
        manager = self._manager
        adopted: dict[str, SandboxSpec] = manager.adopted if isinstance(manager, AdoptingManager) else {}
        for name in [name for name in adopted if name.startswith(PREFIX)]:
            assert manager is not None
            await close_sandbox(manager, name)

    async def __aexit__(self, *error: object) -> None:
        self._open = False
        await asyncio.gather(*(lease.abort("functions are being closed") for lease in list(self._leases)))
        if self._reclaiming is not None:
            await asyncio.wait({self._reclaiming})
        await asyncio.gather(*(host.close() for host in list(self._hosts.values())))

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if not isinstance(work, Call):
            raise ManagerError(f"functions are called with Call, not {type(work).__name__}", retry=False)
        if not self._open:
            raise ManagerError("the function manager is not open", retry=False)
        self._require_attempt(action, grant, work)
        host = self._host(action, work)
        lease = CallLease(host, action, grant, work, output, lambda why: self._remember(action.id, why))
        self._leases.add(lease)
        lease.task.add_done_callback(lambda _: self._leases.discard(lease))
        await lease.begin()
        return lease

    def _require_attempt(self, action: Action, grant: Grant, work: Call) -> None:
        """The scheduler retries a lost action up to its own limit; the function may allow fewer retries."""
        if grant.attempt > work.function.retries + 1:
            why = self._losses.pop(action.id, "it was lost")
            raise ManagerError(f"{why}; it was tried {grant.attempt - 1} times", retry=False)

    def _remember(self, action: str, lost: str) -> None:
        self._losses[action] = lost
        if len(self._losses) > LOSSES_MAX:
            self._losses.popitem(last=False)

    def _host(self, action: Action, work: Call) -> FunctionHost:
        spec, tenant, run = work.function, self._tenant_of(action), action.run
        if self._manager is None:
            tenant = run = ""  # nothing is isolated, and all runs share instances
        key = (tenant, run, spec.name)
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = FunctionHost(spec, run, tenant, self._context, self)
        elif host.spec is not spec and host.spec != spec:
            raise ManagerError(f"another function already has the name {spec.name}", retry=False)
        return host

    def forget(self, host: FunctionHost) -> None:
        """Called when a host has neither instances nor calls."""
        key = (host.tenant, host.run, host.spec.name)
        if self._hosts.get(key) is host:
            del self._hosts[key]
            self._past += host.statistics()

    # ---- ending instances for waiting actions

    def _hosts_of(self, tenant: str) -> list[FunctionHost]:
        return [host for host in self._hosts.values() if host.tenant == tenant]

    def exceeds_limit(self, tenant: str) -> bool:
        """Whether this tenant has more instances than it may have."""
        return sum(len(host.instances) for host in self._hosts_of(tenant)) > self._instances_max(tenant)

    async def reclaim(self, tenant: str, *, of_all: bool) -> bool:
        """Waits until an instance of this tenant, or else of any tenant, has ended: one that is ending, or an idle one,
        which is ended for this. Returns False if there is none."""
        removal = self._removal(lambda host: host.tenant == tenant)
        if removal is None and of_all:
            removal = self._removal(_any)
        if removal is None:
            return False
        await asyncio.wait({removal})
        return True

    def _removal(self, concerns: Callable[[FunctionHost], bool]) -> asyncio.Future[bool] | None:
        """The removal of an instance that is ending, or else of the one with the longest idle time."""
        for host in self._hosts.values():
            if host.endings and concerns(host):
                return host.endings[0]
        pair = next((pair for pair in self.idle.items() if concerns(pair[1])), None)
        return None if pair is None else pair[1].discard(pair[0])

    def reclaim_idle(self) -> None:
        """Called when the state of the scheduler has changed. While actions wait for memory, ends idle instances one
        after the other; a waiting call of the same function takes the idle instance instead."""
        if self._open and self._reclaiming is None and self.idle and self._queue.first_waiter() is not None:
            self._reclaiming = asyncio.get_running_loop().create_task(self._reclaim_all())

    async def _reclaim_all(self) -> None:
        try:
            while (waiter := self._queue.first_waiter()) is not None:
                own = self._host_for(waiter)
                if own is not None and own.promise(waiter):
                    continue
                removal = self._removal(_any if own is None else partial(is_not, own))
                if removal is None:
                    return
                await asyncio.wait({removal})
        finally:
            self._reclaiming = None

    def _host_for(self, waiter: MemoryWaiter) -> FunctionHost | None:
        """Returns the host that has idle instances for a waiting call."""
        return next((host for host in self._hosts.values() if host.idle and host.is_awaited_by(waiter)), None)

    def trim(self, tenant: str) -> None:
        """Ends idle instances of a tenant that exceeds its limit, the one with the longest idle time first."""
        staying = sum(len(host.instances) - len(host.endings) for host in self._hosts_of(tenant))
        idle = [(instance, host) for instance, host in self.idle.items() if host.tenant == tenant]
        for instance, host in idle[: max(0, staying - self._instances_max(tenant))]:
            host.discard(instance)

    async def end(self, tenant: str, sandbox: str = "") -> bool:
        """Ends this instance of a tenant, once it is open, or all of its instances. Returns when they are removed: True
        if there were any. Before ending all, the caller stops the calls of the tenant. Raises ManagerError for
        instances that could not be removed."""
        removals = [
            host.discard(instance)
            for host in self._hosts_of(tenant)
            for instance in host.instances
            if not sandbox or (instance.name == sandbox and instance.is_open)
        ]
        if removals:
            await asyncio.wait(removals)  # removals continue if this is cancelled
        left = [removal for removal in removals if not removal.result()]
        if left:
            raise ManagerError(f"{len(left)} sandboxes of functions could not be removed; see the log")
        return bool(removals)

    # ---- reports ----

    def instance_views(self) -> list[FunctionInstanceView]:
        """All instances, including those that are being opened or removed."""
        now = asyncio.get_running_loop().time()
        return [
            FunctionInstanceView(
                sandbox=instance.name,
                function=host.spec.name,
                tenant=host.tenant,
                run=host.run,
                spec=host.sandbox_spec(),
                calls=instance.calls,
                idle_s=max(0.0, now - instance.idle_since) if instance in self.idle else None,
            )
            for host in self._hosts.values()
            for instance in sorted(host.instances, key=lambda instance: instance.name)
        ]

    def statistics(self) -> FunctionStatistics:
        return sum((host.statistics() for host in self._hosts.values()), self._past)


def _any(host: FunctionHost) -> bool:
    return True
