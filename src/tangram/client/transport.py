"""Transports: how a client reaches an orchestrator. One client, several transports.

A transport carries actions with their work there and what came of them back, and gives access to the files and images
of the managers. LocalTransport is an orchestrator inside this process; the other one is in `remote`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self

from tangram.core.action import Action
from tangram.core.messages import Pool, PoolChanged, RunChanged
from tangram.errors import InvalidAction
from tangram.managers.base import Files, Images
from tangram.managers.models import ModelManager, Service
from tangram.managers.quotas.adaptive_rate import advice_of
from tangram.managers.quotas.manager import Quota, QuotaManager
from tangram.managers.work import Work
from tangram.processes.streams import Output
from tangram.runtime.orchestrator import Orchestrator, Settled, Ticket


class Pending(Protocol):
    """An action under way."""

    async def started(self) -> bool:
        """Until it runs, or has settled without: then False."""
        ...

    async def settled(self) -> Settled:
        """Until it has settled. Whoever is cancelled here cancels the action, and goes when that has settled."""
        ...

    async def watched(self) -> Settled:
        """Until it has settled. Whoever is cancelled here goes at once, and the action goes on."""
        ...

    def cancel(self) -> None: ...

    def when_settled(self, tell: Callable[[], object]) -> None: ...


class Transport(Protocol):
    def submit(self, action: Action, work: Work, output: Output | None = None) -> Pending: ...

    by_value: bool
    """Whether functions go there by value: what can be imported here cannot be imported there."""

    def announce(self, pool: Pool) -> None:
        """The pool of a function, before it is called for the first time."""
        ...

    async def weigh(self, run: str, weight: float) -> None: ...

    async def add_quota(self, quota: Quota) -> None: ...

    def quota(self, name: str) -> Quota:
        """Raises InvalidAction if there is none."""
        ...

    def service(self, name: str) -> Service:
        """Raises InvalidAction if there is none."""
        ...

    def let_go(self, action: str, spent: dict[str, int] | None) -> None:
        """The caller is done with what it holds."""
        ...

    def heard(self, quota: str, status: int, headers: Mapping[str, str], action: str) -> None:
        """What an API answered to whoever holds its quota."""
        ...

    def files(self, sandbox: str) -> Files: ...

    @property
    def images(self) -> Images: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalPending:
    def __init__(self, orchestrator: Orchestrator, ticket: Ticket) -> None:
        self._orchestrator = orchestrator
        self._ticket = ticket

    async def started(self) -> bool:
        await asyncio.shield(self._ticket.started)
        return self._ticket.lease is not None

    async def settled(self) -> Settled:
        return await self._orchestrator.settle(self._ticket)

    async def watched(self) -> Settled:
        return await asyncio.shield(self._ticket.settled)

    def cancel(self) -> None:
        self._orchestrator.cancel(self._ticket.action.id)

    def when_settled(self, tell: Callable[[], object]) -> None:
        self._ticket.settled.add_done_callback(lambda _: tell())


class LocalTransport:
    by_value = False

    def __init__(self, orchestrator: Orchestrator, quotas: QuotaManager, models: ModelManager | None = None) -> None:
        self.orchestrator = orchestrator
        self._quotas = quotas
        self.models = models
        """Of the services of `connect(services=...)`; None without any."""

    def submit(self, action: Action, work: Work, output: Output | None = None) -> Pending:
        return LocalPending(self.orchestrator, self.orchestrator.submit(action, work, output))

    def announce(self, pool: Pool) -> None:
        self.orchestrator.tell(PoolChanged(pool=pool))

    async def weigh(self, run: str, weight: float) -> None:
        self.orchestrator.tell(RunChanged(run=run, weight=weight))

    async def add_quota(self, quota: Quota) -> None:
        self._quotas.add(quota)

    def quota(self, name: str) -> Quota:
        return self._quotas.get(name)

    def service(self, name: str) -> Service:
        if self.models is None:
            raise InvalidAction("service", name, "one of connect(services=...), and this connection was given none")
        return self.models.service(name)

    def let_go(self, action: str, spent: dict[str, int] | None) -> None:
        self._quotas.let_go(action, spent)

    def heard(self, quota: str, status: int, headers: Mapping[str, str], action: str) -> None:
        self._quotas.advise(quota, advice_of(status, headers, time.time()), self._quotas.granted_at(action))

    def files(self, sandbox: str) -> Files:
        return self.orchestrator.manager_of(sandbox)

    @property
    def images(self) -> Images:
        return self.orchestrator.any_manager

    async def __aenter__(self) -> Self:
        await self.orchestrator.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quotas.close()
        await self.orchestrator.__aexit__(kind, error, trace)
