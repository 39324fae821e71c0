"""The orchestrator: the scheduler on real time, with managers that really do what it says.

Owns every action between its submission and its end: feeds events to the scheduler, carries its effects out, tells
callers. Decides nothing. Promises that every action that was submitted settles exactly once, that its units are given
back only when its manager has said that nothing of it is left, that a sandbox whose opening did not succeed or whose
closing has settled is gone with its memory, and that leaving the context ends all actions first. With a memory, a start
is remembered before it is made, and an end before it is told.

One task group holds all tasks. A bug in the scheduler ends the group and with it whoever entered the orchestrator; what
a manager raises does not, not even a bug of its own: it becomes StartFailed or a lost Finished, and the scheduler says
what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from tangram.clock import Clock, WallClock
from tangram.core.action import ID_LENGTH_MAX, NO_USAGE, Action, Outcome, Status
from tangram.core.demand import CPU, Demand, fixed
from tangram.core.messages import (
    Cancel,
    Effect,
    Event,
    Finished,
    Grant,
    Refuse,
    Release,
    Reserve,
    Resize,
    Resized,
    Restore,
    Settle,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    Used,
    WakeAt,
)
from tangram.errors import AdmissionRefused, InvalidInput, InvariantError, ManagerError
from tangram.managers.base import Executor, Lease, Manager, Restoring, ShortOfMemory
from tangram.managers.work import MIB, Close, Ended, Executed, Open, Work
from tangram.processes.streams import Output
from tangram.runtime.error_records import Fault, fault_of

LOOK_FIRST_S = 0.25
LOOK_MAX_S = 8.0
"""Running actions whose CPU nobody declared are measured after the first, then each time after twice as long, at most
every so often."""

log = logging.getLogger("tangram.server")

NOTHING = Demand({CPU: fixed(1)})
"""Of an action that is never granted anything; a demand cannot be empty."""

Observer = Callable[[float, Event, list[Effect]], None]
"""Sees every event and its effects, in order: a recorder of traces, metrics."""


class Decider(Protocol):
    """What says who runs: the scheduler, or a baseline to compare it with."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an action, as its caller sees it."""

    outcome: Outcome
    executed: Executed | None = None
    answer: bytes = b""
    """Of a function or a service."""
    fault: Fault | None = None
    """What its manager found wrong with what was asked; its caller gets it as an exception."""


class Memory(Protocol):
    """What outlives the orchestrator: its journal. Whoever awaits it goes on when that is written. What it raises ends
    the orchestrator, since nothing more can be promised."""

    async def starting(self, ticket: Ticket) -> None: ...

    async def settled(self, ticket: Ticket, settled: Settled) -> Settled:
        """What was written, and so is told: what there was no room for is another end."""
        ...


class Ticket:
    """An action under way."""

    def __init__(self, action: Action, work: Work, output: Output | None) -> None:
        self.action = action
        self.work = work
        self.output = output
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        """Done when it runs, or has settled without."""
        self.settled: asyncio.Future[Settled] = loop.create_future()
        self.starting: asyncio.Task[Lease] | None = None
        """Given while an executor starts it."""
        self.lease: Lease | None = None
        self.stop_asked = False
        self.attempt = 0
        self.ended: Ended | None = None
        self.look: asyncio.TimerHandle | None = None
        """When what it uses is measured next."""
        self.error: InvalidInput | AdmissionRefused | None = None
        """What the manager found wrong with what was asked."""


class Orchestrator:
    def __init__(
        self,
        decider: Decider,
        managers: dict[str, Manager],
        executors: dict[type[Work], Executor] | None = None,
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.decider = decider
        self._managers = managers
        """By node."""
        self._executors = executors or {}
        """By the kind of work that they carry out, wherever it was granted. All other work is that of a manager."""
        self._clock = clock or WallClock()
        self._observers: list[Observer] = [] if observer is None else [observer]
        self._memory = memory
        self._start_s = self._clock.now()
        self._tickets: dict[str, Ticket] = {}
        """Until whoever asked has been told."""
        self._carried = 0
        """Starts that are being carried out, and ends that are being remembered."""
        self._node_by_sandbox: dict[str, str] = {}
        self._opening_by_sandbox: dict[str, Ticket] = {}
        """What opens it, until that has settled."""
        self._tasks = asyncio.TaskGroup()
        self._alarms: set[asyncio.TimerHandle] = set()
        self._all_settled = asyncio.Event()
        self._all_settled.set()
        self._all_carried = asyncio.Event()
        self._all_carried.set()
        self._closing = False
        self._paused = False
        self._broken: Exception | None = None
        self._left: Exception | None = None
        """What those hear who wait for actions that are left to the memory."""

    # ---- its life ----

    async def __aenter__(self) -> Self:
        entered: list[Executor] = []
        try:
            for executor in self._all_executors():
                await executor.__aenter__()
                entered.append(executor)
            await self._tasks.__aenter__()
        except BaseException:
            for executor in reversed(entered):
                await executor.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is under way and wait until it has ended; then the managers end what they hold. Whoever was
        paused leaves its actions to its memory instead."""
        self._closing = True
        try:
            if not self._paused:
                await undisturbed(self._drain())
            elif self._tickets and self._broken is None:
                self._left = ManagerError("the service has stopped; the action is kept, and goes on when it is back")
                self._break(self._left)
        finally:
            try:
                for alarm in self._alarms:
                    alarm.cancel()
                await self._end_tasks(error)
            finally:
                for executor in reversed(self._all_executors()):
                    await undisturbed(executor.__aexit__(kind, error, trace))

    def _all_executors(self) -> list[Executor]:
        """Each once, though it may carry out several kinds of work."""
        return list(dict.fromkeys([*self._managers.values(), *self._executors.values()]))

    async def _end_tasks(self, error: BaseException | None) -> None:
        """What the caller raised is not ours to wrap; what a task of ours raised is raised as it is."""
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        try:
            await self._tasks.__aexit__(type(cancelled) if cancelled else None, cancelled, None)
        except BaseExceptionGroup as errors:
            if errors.exceptions[0] is self._left:
                return
            raise errors.exceptions[0] from None

    async def pause(self, limit_s: float) -> int:
        """Start nothing more and wait until what runs has settled, but not longer than that. What was not started stays
        with the memory. Returns how many still run: leaving the context leaves these as they are, to be found running
        by whoever reads the memory."""
        assert self._memory is not None, "nobody would remember what was left"
        self._paused = self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._all_carried.wait()
        return self._carried

    async def _drain(self) -> None:
        for action in list(self._tickets):
            self.cancel(action)
        await self._all_settled.wait()

    def now(self) -> float:
        """Seconds since it began, as in the trace."""
        return self._clock.now() - self._start_s

    # ---- what callers ask ----

    def submit(self, action: Action, work: Work, output: Output | None = None) -> Ticket:
        if self._closing:
            raise AdmissionRefused("closing", "the connection is being closed; nothing more is taken in")
        ticket = Ticket(action, work, output)
        if action.id in self._tickets:
            raise AdmissionRefused("id", f"an action with the id {action.id} is already live; ids must be unique")
        if isinstance(work, Open):
            self.reserve(action.sandbox, -(-work.spec.memory_bytes // MIB), action.run)
            self._opening_by_sandbox[action.sandbox] = ticket
        self._tickets[action.id] = ticket
        self._all_settled.clear()
        if isinstance(work, Close) and action.sandbox in self._opening_by_sandbox:
            self._tasks.create_task(self._close_after(self._opening_by_sandbox[action.sandbox], ticket))
        else:
            self._take_in(ticket)
        return ticket

    def _take_in(self, ticket: Ticket) -> None:
        action = ticket.action
        if isinstance(ticket.work, Close) and action.sandbox not in self._node_by_sandbox:
            self._settled(
                ticket, Settled(outcome=Outcome(action=action.id, status=Status.SUCCEEDED))
            )  # nothing is there
        else:
            self._send(Submit(action=action))

    async def _close_after(self, opening: Ticket, ticket: Ticket) -> None:
        """What is being opened is closed when that has settled: before, there is nothing that could be. Whoever
        cancels the closing meanwhile changes nothing, since a closing ends its sandbox however it ends."""
        await asyncio.wait({opening.settled})
        if ticket.action.id in self._tickets:  # otherwise all was broken meanwhile
            self._take_in(ticket)

    def cancel(self, action: str, reason: str = "") -> None:
        """A request: the action settles when nothing of it is left. `reason`: why, if not because its caller wants
        it."""
        if action in self._tickets:
            self._send(Cancel(action=action, reason=reason) if reason else Cancel(action=action))

    async def settle(self, ticket: Ticket) -> Settled:
        """Until it has settled. Whoever is cancelled here cancels the action, and goes when that has settled."""
        try:
            return await asyncio.shield(ticket.settled)
        except asyncio.CancelledError:
            self.cancel(ticket.action.id)
            await undisturbed(_done(ticket.settled))
            raise

    def reserve(self, sandbox: str, memory_mib: int, run: str, node: str = "", *, yields: bool = False) -> None:
        """Memory for a sandbox to come. Raises AdmissionRefused."""
        for effect in self._send(Reserve(sandbox=sandbox, memory=memory_mib, run=run, node=node, yields=yields)):
            if isinstance(effect, Refuse) and effect.action == sandbox:
                raise AdmissionRefused(effect.limit, effect.reason)

    def adopt(self, sandbox: str, memory_mib: int, run: str, node: str) -> None:
        """A sandbox that a manager has kept from before. Raises AdmissionRefused if there is no room for it."""
        self.reserve(sandbox, memory_mib, run, node)
        self._node_by_sandbox[sandbox] = node

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` after those before it, for every event from now on. Returns a function that removes it."""
        self._observers.append(observer)

        def remove() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return remove

    def tell(self, event: Event) -> None:
        """What an executor has to say of its own accord: a pool that changed, a service that was loaded."""
        self._send(event)

    async def discard(self, sandbox: str) -> None:
        """End a sandbox at once and give its memory back: nobody is asked, and no units are granted for it."""
        node = self._node_by_sandbox.get(sandbox)
        if node is not None:  # otherwise it was never made
            await self.end_sandbox(sandbox, node)
        self.release(sandbox)

    async def end_sandbox(self, sandbox: str, node: str) -> None:
        """One that a manager has, whether or not it is known here. Raises ManagerError."""
        action = Action(id=f"discard-{sandbox}"[:ID_LENGTH_MAX], demand=NOTHING, sandbox=sandbox, kind="close")
        lease = await self._managers[node].start(action, Grant(action.id, node, (), 0), Close())
        ended = await lease.wait()
        if ended.lost:
            raise ManagerError(ended.lost)

    def release(self, sandbox: str) -> None:
        """It is gone, and its memory is free."""
        self._node_by_sandbox.pop(sandbox, None)
        self._send(Release(sandbox=sandbox))

    def manager_of(self, sandbox: str) -> Manager:
        """Where a sandbox is."""
        node = self._node_by_sandbox.get(sandbox)
        if node is None:
            raise ManagerError(f"there is no sandbox {sandbox}: it was closed, or never opened", retry=False)
        return self._managers[node]

    @property
    def any_manager(self) -> Manager:
        """For what all of them have alike."""
        return next(iter(self._managers.values()))

    # ---- events and effects ----

    def _send(self, event: Event) -> list[Effect]:
        if self._broken is not None:
            raise self._broken
        now = self.now()
        try:
            effects = self.decider.handle(event, now)
            for observer in tuple(self._observers):
                observer(now, event, effects)
            for effect in effects:
                _EFFECTS[type(effect)](self, effect)
        except Exception as error:
            self._break(error)
            raise
        return effects

    def fail(self, error: Exception) -> None:
        """Its memory has failed outside of an action: nothing more can be promised."""
        self._break(error)

    def _break(self, error: Exception) -> None:
        """A bug, or a trace that cannot be written: nothing more can be decided. Whoever waits hears of it."""
        if self._broken is None:
            self._broken = error
            for ticket in self._tickets.values():
                for future in (ticket.started, ticket.settled):
                    if not future.done():
                        future.set_exception(error)
                        future.exception()  # whoever asked may have gone
            self._tickets.clear()
            self._all_settled.set()
            with contextlib.suppress(RuntimeError):  # the group is ending already
                self._tasks.create_task(_raise(error))

    def _on_start(self, effect: Start) -> None:
        if self._paused:
            return  # it is left to the memory, as one that never started
        ticket = self._tickets[effect.action.id]
        ticket.attempt = effect.grant.attempt
        ticket.lease = None
        ticket.stop_asked = False
        if effect.action.sandbox:
            self._node_by_sandbox[effect.action.sandbox] = effect.grant.node
        self._begin_carrying(self._carry(ticket, effect.grant))

    def _on_stop(self, effect: Stop) -> None:
        ticket = self._tickets[effect.action]
        ticket.stop_asked = True
        if ticket.lease is not None:
            self._tasks.create_task(self._stop(ticket.lease))
        elif ticket.starting is not None:
            ticket.starting.cancel()

    def _on_resize(self, effect: Resize) -> None:
        ticket = self._tickets[effect.action]
        if ticket.lease is not None:
            try:
                ticket.lease.resize(reserved=effect.reserved, limit=effect.limit)
            except OSError:
                return  # it is on its way out, and its end will be told
            self._send(Resized(action=effect.action, limit=effect.limit, attempt=ticket.attempt))

    def _on_wake_at(self, effect: WakeAt) -> None:
        def ring() -> None:
            self._alarms.discard(alarm)
            self._tasks.create_task(self._tell(Tick()))

        alarm = asyncio.get_running_loop().call_later(max(0.0, effect.at - self.now()), ring)
        self._alarms.add(alarm)

    def _on_settle(self, effect: Settle) -> None:
        ticket = self._tickets[effect.outcome.action]
        ended = ticket.ended or Ended()
        fault = None if ticket.error is None else fault_of(ticket.error)
        self._settled(
            ticket, Settled(outcome=effect.outcome, executed=ended.executed, answer=ended.answer, fault=fault)
        )

    def _settled(self, ticket: Ticket, settled: Settled) -> None:
        """Tell whoever asked: at once, unless something must be seen to before."""
        if self._memory is not None or _ends_sandbox(ticket.work, settled):
            self._begin_carrying(self._conclude(ticket, settled))
        else:
            self._tell_caller(ticket, settled)

    async def _conclude(self, ticket: Ticket, settled: Settled) -> None:
        if _ends_sandbox(ticket.work, settled):
            settled = await self._wind_up(ticket, settled)
        if self._memory is not None:
            settled = await self._memory.settled(ticket, settled)
        self._tell_caller(ticket, settled)

    async def _wind_up(self, ticket: Ticket, settled: Settled) -> Settled:
        """Nothing is left of a sandbox that could not be opened, or was closed. To close it is an action like others,
        which may have got no turn: then it is ended without."""
        sandbox = ticket.action.sandbox
        try:
            if settled.outcome.status is Status.SUCCEEDED:
                self.release(sandbox)
            else:
                await self.discard(sandbox)
        except (ManagerError, OSError) as error:
            if error is self._broken:
                raise
            reason = f"sandbox {sandbox} could not be removed: {error}"
            outcome = msgspec.structs.replace(settled.outcome, status=Status.LOST, reason=reason)
            return msgspec.structs.replace(settled, outcome=outcome)
        return settled

    def _tell_caller(self, ticket: Ticket, settled: Settled) -> None:
        if self._tickets.pop(ticket.action.id, None) is None:
            return  # all was broken meanwhile, and it has been told that
        if self._opening_by_sandbox.get(ticket.action.sandbox) is ticket:
            del self._opening_by_sandbox[ticket.action.sandbox]
        if ticket.error is not None:
            ticket.settled.set_exception(ticket.error)
            ticket.settled.exception()  # whoever asked may have gone
        else:
            ticket.settled.set_result(settled)
        if not ticket.started.done():
            ticket.started.set_result(None)
        if not self._tickets:
            self._all_settled.set()

    def _on_refuse(self, effect: Refuse) -> None:
        if effect.action in self._tickets:
            outcome = Outcome(action=effect.action, status=Status.REFUSED, reason=effect.reason)
            self._on_settle(Settle(outcome=outcome))

    def _on_restore(self, effect: Restore) -> None:
        for executor in self._executors.values():
            if isinstance(executor, Restoring):
                self._tasks.create_task(self._restore(executor, effect))
                return
        raise InvariantError(f"service {effect.service} is to be restored, and no executor here has devices")

    async def _restore(self, executor: Restoring, effect: Restore) -> None:
        """Ahead of an action, which will hear of it if it cannot be loaded."""
        with contextlib.suppress(ManagerError):
            await executor.restore(effect.service, effect.devices)

    # ---- carrying out ----

    def _begin_carrying(self, doing: Coroutine[Any, Any, None]) -> None:
        self._carried += 1
        self._all_carried.clear()
        self._tasks.create_task(self._carry_out(doing))

    async def _carry_out(self, doing: Coroutine[Any, Any, None]) -> None:
        try:
            await doing
        except BaseException as error:
            # Cancelled from outside, as by a second Ctrl-C, or a bug: nothing would settle the action any more.
            self._break(error if isinstance(error, Exception) else ManagerError("the orchestrator was interrupted"))
            raise
        finally:
            self._carried -= 1
            if not self._carried:
                self._all_carried.set()

    async def _carry(self, ticket: Ticket, grant: Grant) -> None:
        action = ticket.action.id
        if self._memory is not None:
            await self._memory.starting(ticket)
        try:
            executor = self._executors.get(type(ticket.work))
            if executor is None:
                lease = await self._managers[grant.node].start(ticket.action, grant, ticket.work, ticket.output)
            else:
                lease = await self._begin(executor, ticket, grant)
        except (InvalidInput, AdmissionRefused) as error:
            ticket.error = error
            self._send(StartFailed(action=action, reason=str(error), retry=False, attempt=grant.attempt))
            return
        except ShortOfMemory as short:
            self._send(
                StartFailed(
                    action=action, reason=str(short), attempt=grant.attempt, sandbox=short.sandbox,
                    memory=short.memory_mib,
                )
            )  # fmt: skip
            return
        except (ManagerError, OSError) as error:
            retry = error.retry if isinstance(error, ManagerError) else True
            self._send(StartFailed(action=action, reason=str(error), retry=retry, attempt=grant.attempt))
            return
        except Exception as error:
            self._send(StartFailed(action=action, reason=_bug(action, error), retry=False, attempt=grant.attempt))
            return
        ticket.lease = lease
        self._send(Started(action=action, attempt=grant.attempt))
        if not ticket.started.done():
            ticket.started.set_result(None)
        if ticket.stop_asked:
            self._tasks.create_task(self._stop(lease))
        self._look_later(ticket, LOOK_FIRST_S)
        try:
            ended = await lease.wait()
        except (InvalidInput, AdmissionRefused) as error:
            ticket.error = error
            ended = Ended(lost=str(error))
        except (ManagerError, OSError) as error:
            ended = Ended(lost=f"{type(error).__name__}: {error}")
        except Exception as error:
            ended = Ended(lost=_bug(action, error))
        if ticket.look is not None:
            ticket.look.cancel()
            ticket.look = None
        ticket.ended = ended
        self._send(Finished(action=action, usage=ended.usage or NO_USAGE, lost=ended.lost, attempt=grant.attempt))

    async def _begin(self, executor: Executor, ticket: Ticket, grant: Grant) -> Lease:
        """To import a function or to load a model may take long. Who is stopped meanwhile is not kept waiting: a start
        that is cancelled leaves nothing behind."""
        start = executor.start(ticket.action, grant, ticket.work, ticket.output)
        starting = ticket.starting = asyncio.ensure_future(start)
        try:
            return await starting
        except asyncio.CancelledError:
            if not ticket.stop_asked:
                raise
            raise ManagerError("it was stopped while it started", retry=False) from None
        finally:
            ticket.starting = None

    def _look_later(self, ticket: Ticket, after_s: float) -> None:
        """Measure what an action uses whose CPU nobody declared: what it does not use is another one's."""
        cpu = ticket.action.demand.pools.get(CPU)
        if cpu is not None and not cpu.declared:
            ticket.look = asyncio.get_running_loop().call_later(after_s, self._look, ticket, after_s)

    def _look(self, ticket: Ticket, after_s: float) -> None:
        assert ticket.lease is not None
        with contextlib.suppress(ManagerError, OSError):
            cpu_s = ticket.lease.used()
            if cpu_s is not None:
                self._look_later(ticket, min(2.0 * after_s, LOOK_MAX_S))
                self._tasks.create_task(self._tell(Used(action=ticket.action.id, cpu_s=cpu_s, attempt=ticket.attempt)))

    async def _tell(self, event: Event) -> None:
        self._send(event)

    async def _stop(self, lease: Lease) -> None:
        """What goes wrong here shows in the end of the lease."""
        with contextlib.suppress(ManagerError, OSError):
            await lease.stop()


_EFFECTS: dict[type, Callable[[Orchestrator, Any], None]] = {
    Start: Orchestrator._on_start,
    Stop: Orchestrator._on_stop,
    Resize: Orchestrator._on_resize,
    Restore: Orchestrator._on_restore,
    WakeAt: Orchestrator._on_wake_at,
    Settle: Orchestrator._on_settle,
    Refuse: Orchestrator._on_refuse,
}


def _ends_sandbox(work: Work, settled: Settled) -> bool:
    if isinstance(work, Open):
        return settled.outcome.status is not Status.SUCCEEDED
    return isinstance(work, Close)


def _bug(action: str, error: Exception) -> str:
    """What somebody sent may have found it; others must not pay for that."""
    log.error("a bug in a manager action=%s", action, exc_info=error)
    return f"a bug in Tangram, which its log tells more of: {type(error).__name__}"


async def _raise(error: Exception) -> None:
    raise error


async def _done(future: asyncio.Future[Any]) -> None:
    await asyncio.wait({future})


async def undisturbed(doing: Any) -> None:
    """To its end, however often the caller is cancelled meanwhile; the first cancellation is raised afterwards."""
    task = asyncio.ensure_future(doing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.done():
                break
            cancelled = cancelled or error
    task.result()
    if cancelled is not None:
        raise cancelled
