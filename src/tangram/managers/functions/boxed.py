"""The executor of functions of tenants: each call in a sandbox that belongs to one function of one run.

    Call ──▶ BoxedFunctionManager ── BoxedHost (of a function of a run) ── instance sandboxes ── held programs

Owns the sandboxes of all functions. Decides nothing: how many calls run at once is said by the pool of each function,
and cores by the grant of each call, which the manager of the sandboxes enforces. Promises that functions of two runs
never meet, equal or not, nor two functions of one run; that nothing of a tenant is unpickled here; and that whatever
goes on in a sandbox, the call ends as that of its own function and the next one gets another sandbox.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from types import TracebackType
from typing import Self

from tangram.core.action import Action
from tangram.core.messages import Grant, Pool
from tangram.errors import AdmissionRefused, ManagerError
from tangram.managers.base import Lease, Manager, Output
from tangram.managers.functions.boxed_host import PREFIX, BoxedHost, Release, Reserve, Surroundings, close_sandbox
from tangram.managers.functions.boxed_lease import BoxedLease
from tangram.managers.functions.manager import LOSSES_MAX
from tangram.managers.functions.work import Call
from tangram.managers.work import HOST_IMAGE, SandboxSpec, Work

COMMON_LIMITS = ("capacity", "sandboxes_max")
"""Limits of the machine: idle instances of any run make room. Those of a run concern that run alone."""


class BoxedFunctionManager:
    def __init__(self, manager: Manager, reserve: Reserve, release: Release, *, image: str = HOST_IMAGE) -> None:
        """`manager` is entered before this one and left after it. `reserve` and `release` are told of every sandbox
        that is made there and removed."""
        self._around = Surroundings(
            manager=manager, reserve=reserve, release=release, image=image, reclaim=self._reclaim
        )
        self._hosts: dict[tuple[str, str], BoxedHost] = {}
        """By the run and the name of the function: those that have instances or calls."""
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
        await asyncio.gather(*(host.close() for host in list(self._hosts.values())))

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if not isinstance(work, Call):
            raise ManagerError(f"functions are called with Call, not {type(work).__name__}", retry=False)
        if not self._open:
            raise ManagerError("the function manager is not open", retry=False)
        self._require_attempt(action, grant, work)
        host = self._host(action.run, work)
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

    def _host(self, run: str, work: Call) -> BoxedHost:
        spec = work.function
        key = (run, spec.name)
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = BoxedHost(spec, run, self._around, lambda: self._forget(key))
        elif host.spec is not spec and host.spec != spec:
            raise ManagerError(f"another function is called {spec.name} already", retry=False)
        return host

    def _forget(self, key: tuple[str, str]) -> None:
        self._hosts.pop(key, None)

    async def _reclaim(self, refused: AdmissionRefused, run: str) -> bool:
        """The instance that was idle the longest goes: of the same run, or of any if that is what it takes."""
        idle = [(host, instance) for host in self._hosts.values() for instance in host.idle]
        own = [pair for pair in idle if pair[1].run == run]
        pairs = own or (idle if refused.limit in COMMON_LIMITS else [])
        if not pairs:
            return False
        host, instance = min(pairs, key=lambda pair: pair[1].idle_since)
        await asyncio.wait({host.discard(instance)})
        return True

    @property
    def instances(self) -> int:
        """Sandboxes that it has now, those included that are being opened or removed."""
        return sum(host.instances for host in self._hosts.values())
