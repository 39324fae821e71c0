"""Transports: how a client reaches an orchestrator.

A transport carries actions with their work to an orchestrator and their results back, and gives access to files and
images of the managers. LocalTransport is an orchestrator in this process; `remote_transport.py` has the other one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol, Self

from tangram.core.action import Action
from tangram.core.messages import Observer, Pool, PoolChanged, RunChanged
from tangram.core.scheduler import Scheduler
from tangram.errors import InvalidAction
from tangram.managers.base import Files, Images
from tangram.managers.models import ModelManager, Service
from tangram.managers.quotas.adaptive_rate import parse_rate_limit
from tangram.managers.quotas.manager import Quota, QuotaManager
from tangram.managers.work import Work
from tangram.processes.streams import Output
from tangram.runtime.orchestrator import ActionTicket, Orchestrator, SettledAction
from tangram.runtime.pool_usage import PoolUsageObserver
from tangram.runtime.views import PoolUsageView


class Pending(Protocol):
    """An action in flight."""

    async def started(self) -> bool:
        """Waits until it runs. Returns False if it has settled without running."""
        ...

    async def settled(self) -> SettledAction:
        """Waits until it has settled. A cancelled caller cancels the action and returns when that has settled."""
        ...

    async def settled_shielded(self) -> SettledAction:
        """Waits until it has settled. A cancelled caller returns immediately, and the action continues."""
        ...

    def cancel(self) -> None: ...

    def add_done_callback(self, callback: Callable[[], object]) -> None: ...


class CallableService(Protocol):
    """A model service, as its callers see it."""

    @property
    def name(self) -> str: ...

    @property
    def degrees(self) -> tuple[int, ...]: ...

    @property
    def call_s_max(self) -> float: ...


class Transport(Protocol):
    def submit(self, action: Action, work: Work, output: Output | None = None) -> Pending: ...

    by_value: bool
    """Whether functions are sent by value: the orchestrator cannot import modules of this process."""

    def ensure_pool(self, pool: Pool) -> None:
        """Creates the pool of a function before its first call."""
        ...

    async def set_weight(self, run: str, weight: float) -> None: ...

    async def add_quota(self, quota: Quota) -> None: ...

    def quota(self, name: str) -> Quota:
        """Raises InvalidAction if there is none."""
        ...

    def service(self, name: str) -> CallableService:
        """Raises InvalidAction if there is none."""
        ...

    def release_quota(self, action: str, spent: dict[str, int] | None) -> None:
        """Releases what the action holds."""
        ...

    def report_upstream_response(self, quota: str, status: int, headers: Mapping[str, str], action: str) -> None:
        """Reports the response of an API to the quota that the action holds."""
        ...

    def pool_usage(self) -> asyncio.Future[PoolUsageView]:
        """Reads the use of pools by all actions that this client may see. The future is already done if the
        orchestrator is in this process."""
        ...

    def files(self, sandbox: str) -> Files: ...

    @property
    def images(self) -> Images: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalPending:
    def __init__(self, orchestrator: Orchestrator, ticket: ActionTicket) -> None:
        self._orchestrator = orchestrator
        self._ticket = ticket

    async def started(self) -> bool:
        await asyncio.shield(self._ticket.started)
        return self._ticket.lease is not None

    async def settled(self) -> SettledAction:
        return await self._orchestrator.wait_settled(self._ticket)

    async def settled_shielded(self) -> SettledAction:
        return await asyncio.shield(self._ticket.settled)

    def cancel(self) -> None:
        self._orchestrator.cancel(self._ticket.action.id)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        self._ticket.settled.add_done_callback(lambda _: callback())


class LocalTransport:
    by_value = False

    def __init__(
        self,
        orchestrator: Orchestrator,
        quotas: QuotaManager,
        models: ModelManager | None = None,
        recorder: AbstractContextManager[Observer | None] | None = None,
    ) -> None:
        """`recorder`: a context that yields an observer of the orchestrator."""
        self.orchestrator = orchestrator
        self._quotas = quotas
        self.models = models
        """The manager of `connect(services=...)`; None without services."""
        self._recorder = recorder
        self._stack = ExitStack()
        """Ends the recording."""
        self._pool_usage: PoolUsageObserver | None = None
        """Counts from the first reading on."""

    def submit(self, action: Action, work: Work, output: Output | None = None) -> Pending:
        return LocalPending(self.orchestrator, self.orchestrator.submit(action, work, output))

    def ensure_pool(self, pool: Pool) -> None:
        self.orchestrator.send(PoolChanged(pool=pool))

    async def set_weight(self, run: str, weight: float) -> None:
        self.orchestrator.send(RunChanged(run=run, weight=weight))

    async def add_quota(self, quota: Quota) -> None:
        self._quotas.add(quota)

    def quota(self, name: str) -> Quota:
        return self._quotas.get(name)

    def service(self, name: str) -> Service:
        if self.models is None:
            raise InvalidAction("service", name, "a service of connect(services=...); this connection has none")
        return self.models.service(name)

    def release_quota(self, action: str, spent: dict[str, int] | None) -> None:
        self._quotas.release(action, spent)

    def report_upstream_response(self, quota: str, status: int, headers: Mapping[str, str], action: str) -> None:
        self._quotas.advise(quota, parse_rate_limit(status, headers, time.time()), self._quotas.granted_at(action))

    def pool_usage(self) -> asyncio.Future[PoolUsageView]:
        """Has no pools if the decider is not a Scheduler."""
        decider = self.orchestrator.decider
        if self._pool_usage is None and isinstance(decider, Scheduler):
            self._pool_usage = PoolUsageObserver(decider, self.orchestrator.now)
            self.orchestrator.observe(self._pool_usage.observe)
        pools = self._pool_usage.reading() if self._pool_usage is not None else ()
        reading: asyncio.Future[PoolUsageView] = asyncio.get_running_loop().create_future()
        reading.set_result(PoolUsageView(instance="", pools=pools))
        return reading

    def files(self, sandbox: str) -> Files:
        return self.orchestrator.manager_of(sandbox)

    @property
    def images(self) -> Images:
        return self.orchestrator.any_manager

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            observer = stack.enter_context(self._recorder) if self._recorder is not None else None
            if observer is not None:
                self.orchestrator.observe(observer)
            await self.orchestrator.__aenter__()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._quotas.close()
            await self.orchestrator.__aexit__(kind, error, trace)
        finally:
            self._stack.close()
