"""Batch lease: the calls of one service that share a chunk of devices, from their grant to their answers.

Owns the leases of the calls: those of an action and of the actions that share its grant (`Grant.batch`). Locks its
devices from the first call to the last. Batches waiting calls up to the limit of the engine. Promises that each lease
ends once; that a payload that breaks a batch fails only its own call; that stopping one call does not affect the
others; and that a call that is not idempotent is never passed to an engine twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from tangram.clock import Clock
from tangram.core.action import Action, Usage
from tangram.errors import InvalidAction, ManagerError
from tangram.managers.base import STOP_GRACE_S, UnmeteredLease
from tangram.managers.models.circuit_breaker import CircuitBreaker
from tangram.managers.models.device_process import DeviceProcess, DeviceProcessNotReady, ProcessLost, ServiceFailed
from tangram.managers.models.messages import CallService, RequestFailed
from tangram.managers.models.placement import ServicePlacement
from tangram.managers.work import LeaseResult


class DevicesManager(Protocol):
    """The manager of the devices, as a batch lease sees it."""

    async def acquire(self, devices: tuple[int, ...]) -> None: ...

    def release(self, devices: tuple[int, ...]) -> None: ...

    async def ensure_loaded(self, placement: ServicePlacement) -> DeviceProcess: ...

    def end_use(self, placement: ServicePlacement, calls: int) -> None: ...

    async def evict(self, placement: ServicePlacement) -> None: ...

    async def kill(self, process: DeviceProcess, why: str) -> None: ...


class InferLease(UnmeteredLease):
    def __init__(self, batch: BatchLease, action: Action, payload: bytes, attempt: int) -> None:
        self._batch_lease = batch
        self.action = action
        self.payload = payload
        self.runs_alone = attempt > 1
        """It was in a failed batch, or it was lost. It is repeated alone, since it may be the cause."""
        self.was_retried = False
        """Its process ended before the call began."""
        self.is_stopped = False
        self.started_at = self.called_at = 0.0
        self.ended: asyncio.Future[LeaseResult] = asyncio.get_running_loop().create_future()

    async def wait(self) -> LeaseResult:
        return await asyncio.shield(self.ended)

    async def stop(self) -> None:
        await self._batch_lease.stop(self)

    def finish(self, result: bytes = b"", lost: str = "") -> None:
        """The time between start and call is overhead: earlier batches were called first."""
        if not self.ended.done():
            usage = Usage(overhead_s=max(0.0, self.called_at - self.started_at) if self.called_at else 0.0)
            self.ended.set_result(LeaseResult(answer=result, lost="" if self.is_stopped else lost, usage=usage))

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # retrieved here: the waiter may have gone


class BatchLease:
    def __init__(
        self,
        manager: DevicesManager,
        placement: ServicePlacement,
        batch_max: int,
        circuit: CircuitBreaker,
        clock: Clock,
    ) -> None:
        self._manager = manager
        self._placement = placement
        self._batch_max = batch_max
        self._circuit_breaker = circuit
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[InferLease, None] = {}
        self._in_flight: list[InferLease] = []
        self._process: DeviceProcess | None = None
        self._call_id = 0
        self._needs_reload = False
        """The service has to be loaded again before its next call."""
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.is_closed = False
        """Closed for further calls."""

    # ---- for callers ----

    async def join(self, action: Action, payload: bytes, attempt: int) -> InferLease:
        """Returns when the service is loaded and calls begin. Raises errors of loading. If cancelled, stops the
        call."""
        assert not self.is_closed
        lease = InferLease(self, action, payload, attempt)
        self._waiting[lease] = None
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            await self.stop(lease)
            raise
        lease.started_at = self._loop.time()
        return lease

    async def stop(self, lease: InferLease) -> None:
        lease.is_stopped = True
        if lease in self._waiting:
            del self._waiting[lease]
            lease.finish()
        if lease.ended.done():
            return
        if not all(other.is_stopped or other.ended.done() for other in self._in_flight):
            lease.finish()  # the other calls of the batch continue
            return
        process, call = self._process, self._call_id
        assert process is not None
        process.interrupt(call)
        await asyncio.wait({lease.ended}, timeout=STOP_GRACE_S)
        if not lease.ended.done() and self._call_id == call:
            await self._manager.kill(
                process, f"a call to {self._placement.service} did not end when it was interrupted"
            )
        await asyncio.wait({lease.ended})

    # ---- calls ----

    async def run(self) -> None:
        """Makes all calls. Reports errors through the leases of the calls and raises none."""
        await self._manager.acquire(self._placement.devices)
        try:
            while self._waiting:
                await self._load_and_call()
        except BaseException as error:  # a bug: report it through the leases
            for lease in (*self._waiting, *self._in_flight):
                lease.fail(error if isinstance(error, Exception) else ManagerError("the manager was interrupted"))
            self._fail_ready(error)
        finally:
            self.is_closed = True
            self._circuit_breaker.end_trial()
            if not self._ready.done():
                self._ready.set_result(None)
            self._manager.release(self._placement.devices)

    def _fail_ready(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved here: the waiter may have gone

    async def _load_and_call(self) -> None:
        """Load the service, then make the waiting calls as long as it is loaded."""
        try:
            process = self._process = await self._manager.ensure_loaded(self._placement)
        except ManagerError as error:
            if not isinstance(error, DeviceProcessNotReady):
                self._circuit_breaker.record_failure(str(error), self._clock.now(), _action_ids(self._waiting))
            for lease in self._waiting:
                lease.finish(lost=str(error))
            self._waiting.clear()
            self._fail_ready(error)
            return
        calls = 0
        try:
            if not self._ready.done():
                self._ready.set_result(None)
            while self._waiting and process.alive and not self._needs_reload:
                calls += 1
                await self._call_next_batch(process)
        finally:
            self._manager.end_use(self._placement, calls)
        if self._needs_reload:
            self._needs_reload = False
            await self._manager.evict(self._placement)

    def _next_batch(self) -> list[InferLease]:
        """The next calls in order of arrival. A call whose batch failed goes alone."""
        first, *others = self._waiting
        batch = [first] if first.runs_alone else [first, *(o for o in others if not o.runs_alone)][: self._batch_max]
        for lease in batch:
            del self._waiting[lease]
            lease.called_at = self._loop.time()
        return batch

    async def _call_next_batch(self, process: DeviceProcess) -> None:
        batch = self._in_flight = self._next_batch()
        self._call_id = process.next_number()
        payloads = [lease.payload for lease in batch]
        request = CallService(
            id=self._call_id, service=self._placement.service, devices=self._placement.devices, payloads=payloads
        )
        try:
            done = await process.call(request)
        except ServiceFailed as error:
            self._on_failure(batch, error)
        except ProcessLost as error:
            self._on_loss(batch, error)
        else:
            self._circuit_breaker.record_success(self._placement.devices)
            for lease, answer in zip(batch, done.answers, strict=True):
                lease.finish(b"" if lease.is_stopped else answer)
        finally:
            self._in_flight, self._call_id = [], 0

    def _on_loss(self, batch: list[InferLease], error: ProcessLost) -> None:
        """Repeats calls that had not begun, once: their process ended before the call, not because of it."""
        retried = [lease for lease in batch if not (error.begun or lease.was_retried or lease.is_stopped)]
        if not retried:
            self._circuit_breaker.record_failure(str(error), self._clock.now(), _action_ids(batch))
        for lease in batch:
            if lease in retried:
                lease.was_retried = True
            else:
                lease.finish(lost=f"service {self._placement.service} was lost during the call: {error}")
        self._waiting = dict.fromkeys([*retried, *self._waiting])

    def _on_failure(self, batch: list[InferLease], error: ServiceFailed) -> None:
        """An engine that failed a batch may have executed it, so only idempotent calls are repeated."""
        failed = error.failed
        for lease in batch:
            if lease.is_stopped or failed.whose == "stopped":
                lease.finish()
        live = [lease for lease in batch if not lease.ended.done()]
        if not live:
            return
        retried = [lease for lease in live if lease.action.idempotent] if len(batch) > 1 else []
        for lease in retried:
            lease.runs_alone = True
        self._waiting = dict.fromkeys([*retried, *self._waiting])
        if len(batch) == 1 and failed.whose == "payload":
            self._circuit_breaker.record_rejection()
            live[0].fail(InvalidAction(failed.field or "payload", failed.reason, failed.expected))
            return
        if not retried:
            self._record_failure(failed, live)
        with_others = f" together with {len(batch) - 1} others" if len(batch) > 1 else ""
        for lease in live:
            if lease not in retried:
                lease.finish(lost=f"service {self._placement.service} failed{with_others}: {failed.reason}")

    def _record_failure(self, failed: RequestFailed, leases: list[InferLease]) -> None:
        """Repeated calls count only if they fail again."""
        if failed.whose == "payload":
            self._circuit_breaker.record_rejection()
            return
        devices, now = self._placement.devices, self._clock.now()
        self._needs_reload |= self._circuit_breaker.record_error(failed.reason, now, devices, _action_ids(leases))


def _action_ids(leases: Iterable[InferLease]) -> list[str]:
    return [lease.action.id for lease in leases]
