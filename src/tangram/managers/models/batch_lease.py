"""Turns: the calls of one service that share a chunk, from their grant to their answers.

Owns the leases. A turn holds its devices from the first to the last of its calls: an action, and those that ride with
it (`Grant.batch`). What waits is called together as far as the engine can batch. Promises that each lease ends once,
that a payload which breaks a batch breaks only its own call, that a rider which is stopped leaves the others alone, and
that what must not be repeated is never handed to an engine twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from tangram.clock import Clock
from tangram.core.action import Action, Usage
from tangram.errors import InvalidAction, ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.models.circuit_breaker import Circuit
from tangram.managers.models.device_process import DeviceProcess, NotReady, ProcessLost, ServiceFailed
from tangram.managers.models.messages import Call, Failed
from tangram.managers.models.placement import Place
from tangram.managers.work import Ended


class Host(Protocol):
    """What a turn asks of its manager."""

    async def hold(self, devices: tuple[int, ...]) -> None: ...

    def let_go(self, devices: tuple[int, ...]) -> None: ...

    async def have(self, place: Place) -> DeviceProcess:
        """Have the service there, in use. Raises ManagerError."""
        ...

    def used(self, place: Place, calls: int, seconds: float) -> None:
        """It is no longer in use."""
        ...

    async def unload(self, place: Place) -> None:
        """Have it off its devices, which are held."""
        ...

    async def kill(self, process: DeviceProcess, why: str) -> None: ...


class InferLease:
    """One call."""

    def __init__(self, turn: Turn, action: Action, payload: bytes, attempt: int) -> None:
        self._turn = turn
        self.action = action
        self.payload = payload
        self.alone = attempt > 1
        """It was in a batch that failed, or it was lost: perhaps because of itself, and others need not be lost too."""
        self.again = False
        """Its process ended before it had begun."""
        self.stopped = False
        self.started_s = self.begun_s = 0.0
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Ended:
        return await asyncio.shield(self.ended)

    def resize(self, *, reserved: int, limit: int) -> None:
        """Devices are not resized."""

    def used(self) -> float | None:
        return None

    async def stop(self) -> None:
        await self._turn.stop(self)

    def finish(self, answer: bytes = b"", lost: str = "") -> None:
        """What is between its start and its call is ours: others of its batch went first."""
        if not self.ended.done():
            usage = Usage(overhead_s=max(0.0, self.begun_s - self.started_s) if self.begun_s else 0.0)
            self.ended.set_result(Ended(answer=answer, lost="" if self.stopped else lost, usage=usage))

    def refuse(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # whoever asked may have gone


class Turn:
    def __init__(self, host: Host, place: Place, batch_max: int, circuit: Circuit, clock: Clock) -> None:
        self._host = host
        self._place = place
        self._batch_max = batch_max
        self._circuit = circuit
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[InferLease, None] = {}
        self._calling: list[InferLease] = []
        self._process: DeviceProcess | None = None
        self._call = 0
        self._afresh = False
        """The service has to be loaded again before its next call."""
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.over = False
        """Nobody can join any more."""

    # ---- what callers see ----

    async def join(self, action: Action, payload: bytes, attempt: int) -> InferLease:
        """Until the service is there and the call begins, or has failed to. Whoever is cancelled here leaves."""
        assert not self.over
        lease = InferLease(self, action, payload, attempt)
        self._waiting[lease] = None
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            await self.stop(lease)
            raise
        lease.started_s = self._loop.time()
        return lease

    async def stop(self, lease: InferLease) -> None:
        lease.stopped = True
        if lease in self._waiting:
            del self._waiting[lease]
            lease.finish()
        if lease.ended.done():
            return
        if not all(other.stopped or other.ended.done() for other in self._calling):
            lease.finish()  # the others go on
            return
        process, call = self._process, self._call
        assert process is not None
        process.interrupt(call)
        await asyncio.wait({lease.ended}, timeout=STOP_GRACE_S)
        if not lease.ended.done() and self._call == call:
            await self._host.kill(process, f"a call to {self._place.service} did not end when it was asked to")
        await asyncio.wait({lease.ended})

    # ---- carrying out ----

    async def run(self) -> None:
        """To the last of its calls. What goes wrong is told to whoever waits, and nobody else."""
        await self._host.hold(self._place.devices)
        try:
            while self._waiting:
                await self._serve()
        except BaseException as error:  # a bug: nobody else would hear of it
            for lease in (*self._waiting, *self._calling):
                lease.refuse(error if isinstance(error, Exception) else ManagerError("the manager was interrupted"))
            self._not_ready(error)
        finally:
            self.over = True
            self._circuit.undecided()
            if not self._ready.done():
                self._ready.set_result(None)
            self._host.let_go(self._place.devices)

    def _not_ready(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whoever asked may have gone

    async def _serve(self) -> None:
        """Have the service, then call it for all that wait, as long as it is there."""
        try:
            process = self._process = await self._host.have(self._place)
        except ManagerError as error:
            if not isinstance(error, NotReady):
                self._circuit.failed(str(error), self._clock.now(), _actions(self._waiting))
            for lease in self._waiting:
                lease.finish(lost=str(error))
            self._waiting.clear()
            self._not_ready(error)
            return
        calls, begun_s = 0, self._loop.time()
        try:
            if not self._ready.done():
                self._ready.set_result(None)
            while self._waiting and process.alive and not self._afresh:
                calls += 1
                await self._call_next(process)
        finally:
            self._host.used(self._place, calls, self._loop.time() - begun_s)
        if self._afresh:
            self._afresh = False
            await self._host.unload(self._place)

    def _next_batch(self) -> list[InferLease]:
        """In the order in which they came. One that broke a batch, or was in one that broke, goes alone."""
        first, *others = self._waiting
        batch = [first] if first.alone else [first, *(o for o in others if not o.alone)][: self._batch_max]
        for lease in batch:
            del self._waiting[lease]
            lease.begun_s = self._loop.time()
        return batch

    async def _call_next(self, process: DeviceProcess) -> None:
        batch = self._calling = self._next_batch()
        self._call = process.next_id()
        payloads = [lease.payload for lease in batch]
        request = Call(id=self._call, service=self._place.service, devices=self._place.devices, payloads=payloads)
        try:
            done = await process.ask(request)
        except ServiceFailed as error:
            self._on_failure(batch, error)
        except ProcessLost as error:
            self._on_loss(batch, error)
        else:
            self._circuit.succeeded(self._place.devices)
            for lease, answer in zip(batch, done.answers, strict=True):
                lease.finish(b"" if lease.stopped else answer)
        finally:
            self._calling, self._call = [], 0

    def _on_loss(self, batch: list[InferLease], error: ProcessLost) -> None:
        """A call that had not begun has done nothing, and is made again, once: its process was killed before it
        came, and not by the service."""
        again = [lease for lease in batch if not (error.begun or lease.again or lease.stopped)]
        if not again:
            self._circuit.failed(str(error), self._clock.now(), _actions(batch))
        for lease in batch:
            if lease in again:
                lease.again = True
            else:
                lease.finish(lost=f"service {self._place.service} was lost during the call: {error}")
        self._waiting = dict.fromkeys([*again, *self._waiting])

    def _on_failure(self, batch: list[InferLease], error: ServiceFailed) -> None:
        """An engine that failed a batch has perhaps carried it out: only what may be repeated is called again."""
        failed = error.failed
        for lease in batch:
            if lease.stopped or failed.whose == "stopped":
                lease.finish()
        live = [lease for lease in batch if not lease.ended.done()]
        if not live:
            return
        again = [lease for lease in live if lease.action.idempotent] if len(batch) > 1 else []
        for lease in again:
            lease.alone = True
        self._waiting = dict.fromkeys([*again, *self._waiting])
        if len(batch) == 1 and failed.whose == "payload":
            self._circuit.declined()
            live[0].refuse(InvalidAction(failed.field or "payload", failed.reason, failed.expected))
            return
        if not again:
            self._count(failed, live)
        together = f" together with {len(batch) - 1} others" if len(batch) > 1 else ""
        for lease in live:
            if lease not in again:
                lease.finish(lost=f"service {self._place.service} failed{together}: {failed.reason}")

    def _count(self, failed: Failed, leases: list[InferLease]) -> None:
        """Those that are called again are counted when they fail again."""
        if failed.whose == "payload":
            self._circuit.declined()
            return
        devices, now = self._place.devices, self._clock.now()
        self._afresh |= self._circuit.raised(failed.reason, now, devices, _actions(leases))


def _actions(leases: Iterable[InferLease]) -> list[str]:
    return [lease.action.id for lease in leases]
