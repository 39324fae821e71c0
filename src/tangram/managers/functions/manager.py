"""The function manager: calls of stateless Python functions, each in an instance that is there only when needed.

Owns the hosts of all functions. Decides nothing: how many calls run at once is said by the pool of each function, which
the client announces when it first calls it. Isolates nothing: functions are code of the user, and run as the user. What
it promises is that a function which fails, hangs, leaks or is killed harms neither this process nor another call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from types import TracebackType
from typing import Self

from tangram.core.action import Action
from tangram.core.messages import Grant, Pool
from tangram.errors import ManagerError
from tangram.managers.base import Lease
from tangram.managers.functions.host import Host, Statistics
from tangram.managers.functions.leases import CallLease
from tangram.managers.functions.work import Call
from tangram.managers.work import Work
from tangram.processes.process_tree import Census
from tangram.processes.streams import Output

LOSSES_MAX = 10_000
"""Actions of which it is remembered why they were lost, for the words that their last attempt ends with."""


class FunctionManager:
    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._census = Census()
        self._losses: OrderedDict[str, str] = OrderedDict()
        self._open = False

    def pools(self) -> tuple[Pool, ...]:
        """Of the functions that were called so far."""
        return tuple(Pool(kind=host.spec.pool, total=host.spec.max_instances) for host in self._hosts.values())

    async def __aenter__(self) -> Self:
        assert not self._open, "a manager is entered once at a time"
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        hosts, self._hosts = list(self._hosts.values()), {}
        await asyncio.gather(*(host.close() for host in hosts))

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if not isinstance(work, Call):
            raise ManagerError(f"functions are called with Call, not {type(work).__name__}", retry=False)
        if not self._open:
            raise ManagerError("the function manager is not open", retry=False)
        self._require_attempt(action, grant, work)
        lease = CallLease(self._host(work), work, output, lambda why: self._remember(action.id, why))
        await lease.begin()
        return lease

    def _require_attempt(self, action: Action, grant: Grant, work: Call) -> None:
        """The scheduler repeats what was lost as often as its limits say, the function perhaps less often."""
        if grant.attempt > work.function.retries + 1:
            why = self._losses.pop(action.id, "it was lost")
            raise ManagerError(f"{why}; it was tried {grant.attempt - 1} times", retry=False)

    def _host(self, work: Call) -> Host:
        spec = work.function
        host = self._hosts.get(spec.name)
        if host is None:
            host = self._hosts[spec.name] = Host(spec, self._census)
        elif host.spec is not spec and host.spec != spec:
            raise ManagerError(f"another function is called {spec.name} already", retry=False)
        return host

    def _remember(self, action: str, lost: str) -> None:
        self._losses[action] = lost
        if len(self._losses) > LOSSES_MAX:
            self._losses.popitem(last=False)

    def statistics(self) -> Statistics:
        """Of all functions together."""
        return sum((host.statistics() for host in self._hosts.values()), Statistics())
