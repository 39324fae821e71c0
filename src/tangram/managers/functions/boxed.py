"""The executor of functions of tenants: each call in a sandbox that belongs to one function of one run.

    Call ──▶ BoxedFunctionManager ── BoxedHost (of a function of a run) ── instance sandboxes ── held programs

Owns the sandboxes of all functions. Decides nothing: how many calls run at once is said by the pool of each function,
and cores by the grant of each call, which the manager of the sandboxes enforces. Promises that functions of two runs
never meet, equal or not, nor two functions of one run; that nothing of a tenant is unpickled here; that whatever
goes on in a sandbox, the call ends as that of its own function and the next one gets another sandbox; and that an idle
instance keeps nobody waiting, neither a call nor whoever else waits for memory.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import is_not
from types import TracebackType
from typing import Self

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant, Pool
from tangram.errors import ManagerError
from tangram.managers.base import Lease, Manager
from tangram.managers.functions.boxed_host import (
    PREFIX,
    Awaiting,
    BoxedHost,
    BoxedInstance,
    MemoryQueue,
    Nobody,
    Release,
    Reserve,
    Surroundings,
    close_sandbox,
)
from tangram.managers.functions.boxed_lease import BoxedLease
from tangram.managers.functions.manager import LOSSES_MAX
from tangram.managers.functions.work import Call
from tangram.managers.work import HOST_IMAGE, SandboxSpec, Work
from tangram.processes.streams import Output

Key = tuple[str, str, str]
"""Of a host: the owner, the run and the name of the function."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance is, for whoever looks at it."""

    sandbox: str
    function: str
    owner: str
    run: str
    spec: SandboxSpec
    calls: int
    """That it has had, or has."""
    idle_s: float | None
    """Since its last call; None: it serves one, or is being opened or removed."""


class BoxedFunctionManager:
    def __init__(
        self, manager: Manager, reserve: Reserve, release: Release, *, image: str = HOST_IMAGE,
        idle_s_max: float = math.inf, owner_of: Callable[[Action], str] = lambda action: action.run,
        instances_max: Callable[[str], int] = lambda owner: sys.maxsize, queue: MemoryQueue | None = None,
    ) -> None:  # fmt: skip
        """`manager` is entered before this one and left after it. `reserve` and `release` are told of every sandbox
        that is made there and removed. `owner_of` says whose the instances are that a call makes, `instances_max` how
        many such an owner may have, `queue` who waits for memory."""
        self._owner_of = owner_of
        self._instances_max = instances_max
        self._queue = queue or Nobody()
        self._idle: dict[BoxedInstance, BoxedHost] = {}
        self._around = Surroundings(
            manager=manager, reserve=reserve, release=release, queue=self._queue, image=image, idle_s_max=idle_s_max,
            is_over=self._is_over, reclaim=self._reclaim, idle=self._idle,
        )  # fmt: skip
        self._hosts: dict[Key, BoxedHost] = {}
        """Those that have instances or calls."""
        self._yielding: asyncio.Task[None] | None = None
        """Given while idle instances end for those who wait."""
        self._leases: set[BoxedLease] = set()
        self._losses: OrderedDict[str, str] = OrderedDict()
        self._open = False

    def pools(self) -> tuple[Pool, ...]:
        """Of the functions that have instances."""
        specs = {host.spec.pool: host.spec for host in self._hosts.values()}
        return tuple(Pool(kind=kind, total=spec.max_instances) for kind, spec in specs.items())

    async def __aenter__(self) -> Self:
        assert not self._open, "a manager is entered once at a time"
        await self._sweep()
        self._open = True
        return self

    async def _sweep(self) -> None:
        """A manager may have kept sandboxes beyond the process that made them. Instances are of no more use: whoever
        spoke with the programs in them is gone."""
        kept: dict[str, SandboxSpec] = getattr(self._around.manager, "adopted", {})
        for name in [name for name in kept if name.startswith(PREFIX)]:
            await close_sandbox(self._around.manager, name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        await asyncio.gather(*(lease.stop() for lease in list(self._leases)))
        if self._yielding is not None:
            await asyncio.wait({self._yielding})
        await asyncio.gather(*(host.close() for host in list(self._hosts.values())))

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if not isinstance(work, Call):
            raise ManagerError(f"functions are called with Call, not {type(work).__name__}", retry=False)
        if not self._open:
            raise ManagerError("the function manager is not open", retry=False)
        self._require_attempt(action, grant, work)
        host = self._host(action, work)
        lease = BoxedLease(host, action, grant, work, output, lambda why: self._remember(action.id, why))
        self._leases.add(lease)
        lease.task.add_done_callback(lambda _: self._leases.discard(lease))
        await lease.begin()
        return lease

    def _require_attempt(self, action: Action, grant: Grant, work: Call) -> None:
        """The scheduler repeats what was lost as often as its limits say, the function perhaps less often."""
        if grant.attempt > work.function.retries + 1:
            why = self._losses.pop(action.id, "it was lost")
            raise ManagerError(f"{why}; it was tried {grant.attempt - 1} times", retry=False)

    def _remember(self, action: str, lost: str) -> None:
        self._losses[action] = lost
        if len(self._losses) > LOSSES_MAX:
            self._losses.popitem(last=False)

    def _host(self, action: Action, work: Call) -> BoxedHost:
        spec, owner = work.function, self._owner_of(action)
        key = (owner, action.run, spec.name)
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = BoxedHost(spec, action.run, owner, self._around, lambda: self._forget(key))
        elif host.spec is not spec and host.spec != spec:
            raise ManagerError(f"another function is called {spec.name} already", retry=False)
        return host

    def _forget(self, key: Key) -> None:
        self._hosts.pop(key, None)

    # ---- who gives way ----

    def _of(self, owner: str) -> list[BoxedHost]:
        return [host for host in self._hosts.values() if host.owner == owner]

    def _is_over(self, owner: str) -> bool:
        return sum(len(host.instances) for host in self._of(owner)) > self._instances_max(owner)

    async def _reclaim(self, owner: str, of_all: bool) -> bool:
        """The instances of the same owner come first. What is ending is waited for before another one ends."""
        removal = self._removal(lambda host: host.owner == owner)
        if removal is None and of_all:
            removal = self._removal(_any)
        if removal is None:
            return False
        await asyncio.wait({removal})
        return True

    def _removal(self, concerns: Callable[[BoxedHost], bool]) -> asyncio.Future[bool] | None:
        """Of an instance that is ending, or else of the one that was idle the longest."""
        for host in self._hosts.values():
            if host.endings and concerns(host):
                return host.endings[0]
        found = next((pair for pair in self._idle.items() if concerns(pair[1])), None)
        return None if found is None else found[1].discard(found[0])

    def look(self) -> None:
        """Something has changed: if anybody waits for memory, idle instances end, one after the other, until nobody
        does. A call of their own function gets one as it is."""
        if self._open and self._yielding is None and self._idle and self._queue.first() is not None:
            self._yielding = asyncio.get_running_loop().create_task(self._yield())

    async def _yield(self) -> None:
        try:
            while (awaiting := self._queue.first()) is not None:
                own = self._own(awaiting)
                if own is not None and own.promise(awaiting):
                    continue
                removal = self._removal(_any if own is None else partial(is_not, own))
                if removal is None:
                    return
                await asyncio.wait({removal})
        finally:
            self._yielding = None

    def _own(self, awaiting: Awaiting) -> BoxedHost | None:
        """The host that has idle instances for somebody who waits."""
        return next((host for host in self._hosts.values() if host.idle and host.is_wanted_by(awaiting)), None)

    def trim(self, owner: str) -> None:
        """Idle instances of an owner end, the one that was idle the longest first, as far as it has more than it may
        have."""
        staying = sum(len(host.instances) - len(host.endings) for host in self._of(owner))
        idle = [(instance, host) for instance, host in self._idle.items() if host.owner == owner]
        for instance, host in idle[: max(0, staying - self._instances_max(owner))]:
            host.discard(instance)

    async def end(self, owner: str, sandbox: str = "") -> bool:
        """This instance of an owner, once it is open, or all that it has. Returns when they are gone: True if there
        were any. Whoever ends all sees to it that none of its calls is under way. Raises ManagerError for one that is
        left behind."""
        removals = [
            host.discard(instance)
            for host in self._of(owner)
            for instance in host.instances
            if not sandbox or (instance.name == sandbox and instance.is_open)
        ]
        if removals:
            await asyncio.wait(removals)  # they go on if whoever waits here is cancelled
        left = [removal for removal in removals if not removal.result()]
        if left:
            raise ManagerError(f"{len(left)} sandboxes of functions could not be removed; see the log")
        return bool(removals)

    # ---- seeing ----

    @property
    def instances(self) -> int:
        """Sandboxes that it has now, those included that are being opened or removed."""
        return sum(len(host.instances) for host in self._hosts.values())

    def seen(self) -> list[Instance]:
        """All of them, as they are now."""
        now = asyncio.get_running_loop().time()
        return [
            Instance(
                sandbox=instance.name,
                function=host.spec.name,
                owner=host.owner,
                run=host.run,
                spec=host.sandbox_spec(),
                calls=instance.calls,
                idle_s=max(0.0, now - instance.idle_since) if instance in self._idle else None,
            )
            for host in self._hosts.values()
            for instance in sorted(host.instances, key=lambda instance: instance.name)
        ]


def _any(host: BoxedHost) -> bool:
    return True
