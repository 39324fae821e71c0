"""The orchestrator: drives the scheduler on real time and executes its effects through managers.

Owns every action from submission to settlement. Decides nothing. Promises:

- Every submitted action settles exactly once.
- Units return to the scheduler only after the manager reports that nothing of the action is left.
- A sandbox that failed to open, or whose close has settled, is gone, and its memory is free.
- Leaving the context ends all actions first.
- With a journal, a start is journalled before the work starts, and a result before it is delivered.

One task group holds all tasks. A bug in the scheduler ends the group and raises from its `async with`. An exception of
a manager does not, even if it is a bug: it becomes StartFailed or a lost Finished, and the scheduler decides what
follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from tangram.cancellation import run_to_completion, unwrap_first
from tangram.clock import Clock, WallClock
from tangram.core.action import NO_USAGE, Action, Outcome, Status
from tangram.core.demand import CPU
from tangram.core.messages import (
    Cancel,
    Decider,
    Effect,
    Event,
    Finished,
    Grant,
    Observer,
    Refuse,
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
from tangram.managers.base import (
    Executor,
    InsufficientMemory,
    Lease,
    Manager,
    ServiceRestorer,
    close_sandbox,
    sandbox_not_found,
)
from tangram.managers.work import MIB, Close, ExecResult, LeaseResult, Open, Work
from tangram.processes.streams import Output
from tangram.runtime.error_records import ErrorRecord, error_record_of
from tangram.runtime.event_sink import EventSink

MEASURE_FIRST_S = 0.25
MEASURE_S_MAX = 8.0
"""CPU use of an action without declared CPU is first measured after MEASURE_FIRST_S, then at doubling intervals up to
MEASURE_S_MAX."""

log = logging.getLogger("tangram.runtime")


class SettledAction(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an action, as its caller sees it."""

    outcome: Outcome
    executed: ExecResult | None = None
    answer: bytes = b""
    """The result of a function or a service."""
    fault: ErrorRecord | None = None
    """Why its manager rejected the request; the caller gets it as an exception."""


class ActionJournal(Protocol):
    """Durable storage of actions. Each method returns after the write. An exception ends the orchestrator,
    because nothing could be guaranteed after it."""

    async def record_start(self, ticket: ActionTicket) -> None: ...

    async def record_settled(self, ticket: ActionTicket, settled: SettledAction) -> SettledAction:
        """Returns what was stored, which is what the caller gets: a result that is too large to store is replaced by a
        failure."""
        ...


class ActionTicket:
    """An action that has not settled: the only record of it in the runtime.

    The server extends it with its own fields, so that the two share one record.
    """

    __slots__ = (
        "action", "attempt", "ended", "error", "lease", "measure_timer", "output", "settled", "start_task", "started",
        "stop_requested", "work",
    )  # fmt: skip

    def __init__(self, action: Action, work: Work, output: Output | None) -> None:
        self.action = action
        self.work = work
        self.output = output
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        """Done when the action runs, or has settled without running."""
        self.settled: asyncio.Future[SettledAction] = loop.create_future()
        self.start_task: asyncio.Task[Lease] | None = None
        """The start in progress, for executors whose start can be cancelled."""
        self.lease: Lease | None = None
        self.stop_requested = False
        self.attempt = 0
        self.ended: LeaseResult | None = None
        self.measure_timer: asyncio.TimerHandle | None = None
        """Fires the next measurement of CPU use."""
        self.error: InvalidInput | AdmissionRefused | None = None
        """Why the manager rejected the request."""

    def resolve(self, settled: SettledAction) -> None:
        """Completes `settled`. A request that its manager rejected raises in its caller."""
        if self.error is not None:
            self.settled.set_exception(self.error)
            self.settled.exception()  # its caller may have been cancelled
        else:
            self.settled.set_result(settled)


class Orchestrator:
    def __init__(
        self,
        decider: Decider,
        managers: dict[str, Manager],
        executors: dict[type[Work], Executor] | None = None,
        *,
        clock: Clock | None = None,
        observers: Iterable[Observer] = (),
        journal: ActionJournal | None = None,
        sink: EventSink | None = None,
    ) -> None:
        """`sink` is the one that the managers were given; they report events through it."""
        self.decider = decider
        self._managers = managers
        """By node."""
        self._executors = executors or {}
        """By type of work, on any node. A manager does all other work."""
        self._clock = clock or WallClock()
        self._observers: list[Observer] = list(observers)
        self._sink = sink or EventSink()
        self._sink.connect(self.send)
        self._journal = journal
        self._started_at = self._clock.now()
        self._tickets: dict[str, ActionTicket] = {}
        """Actions whose caller does not have the result yet."""
        self._tracked_count = 0
        """Actions that are starting, running, or being written to the journal."""
        self._node_by_sandbox: dict[str, str] = {}
        self._opening_by_sandbox: dict[str, ActionTicket] = {}
        """By sandbox: the action that opens it, until it settles."""
        self._tasks = asyncio.TaskGroup()
        self._timers: set[asyncio.TimerHandle] = set()
        self._all_settled = asyncio.Event()
        self._all_settled.set()
        self._all_tracked_done = asyncio.Event()
        self._all_tracked_done.set()
        self._closing = False
        self._draining = False
        self._failure: Exception | None = None
        self._stop_error: Exception | None = None
        """Raised in callers whose actions stay in the journal."""

    # ---- opening and closing ----

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
        """Cancels live actions, waits for their end, and closes the managers. After `drain`, actions stay in the
        journal instead."""
        self._closing = True
        try:
            if not self._draining:
                await run_to_completion(self._cancel_all())
            elif self._tickets and self._failure is None:
                self._stop_error = ManagerError("the service has stopped; the action continues when it is back")
                self.fail(self._stop_error)
        finally:
            try:
                for timer in self._timers:
                    timer.cancel()
                await self._end_tasks(error)
            finally:
                for executor in reversed(self._all_executors()):
                    await run_to_completion(executor.__aexit__(kind, error, trace))

    def _all_executors(self) -> list[Executor]:
        """Each once, though one may execute several kinds of work."""
        return list(dict.fromkeys([*self._managers.values(), *self._executors.values()]))

    async def _end_tasks(self, error: BaseException | None) -> None:
        """Raises the first error of a task as it is; an error of the caller is not wrapped."""
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        try:
            await self._tasks.__aexit__(type(cancelled) if cancelled else None, cancelled, None)
        except BaseExceptionGroup as errors:
            if errors.exceptions[0] is self._stop_error:
                return
            raise unwrap_first(errors) from None

    async def drain(self, limit_s: float) -> int:
        """Starts nothing more and waits up to `limit_s` until running actions have settled. Actions that were not
        started stay in the journal. Returns how many still run; they are left running, for the next owner of the
        journal to find."""
        assert self._journal is not None, "draining needs a journal"
        self._draining = self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._all_tracked_done.wait()
        return self._tracked_count

    async def _cancel_all(self) -> None:
        for action in list(self._tickets):
            self.cancel(action)
        await self._all_settled.wait()

    def now(self) -> float:
        """Seconds since construction, as in the trace."""
        return self._clock.now() - self._started_at

    # ---- calls ----

    def submit(self, action: Action, work: Work, output: Output | None = None) -> ActionTicket:
        """Raises AdmissionRefused."""
        ticket = ActionTicket(action, work, output)
        self.submit_ticket(ticket)
        return ticket

    def submit_ticket(self, ticket: ActionTicket) -> None:
        """Submits a ticket that the caller created. Raises AdmissionRefused."""
        action, work = ticket.action, ticket.work
        if self._closing:
            raise AdmissionRefused("closing", "the connection is closing; it accepts no more actions")
        if action.id in self._tickets:
            raise AdmissionRefused("id", f"an action with the id {action.id} is already live; ids must be unique")
        if isinstance(work, Open):
            self._sink.reserve(action.sandbox, -(-work.spec.memory_bytes // MIB), action.run)
            self._opening_by_sandbox[action.sandbox] = ticket
        self._tickets[action.id] = ticket
        self._all_settled.clear()
        if isinstance(work, Close) and action.sandbox in self._opening_by_sandbox:
            self._tasks.create_task(self._close_after(self._opening_by_sandbox[action.sandbox], ticket))
        else:
            self._admit(ticket)

    def _admit(self, ticket: ActionTicket) -> None:
        action = ticket.action
        if isinstance(ticket.work, Close) and action.sandbox not in self._node_by_sandbox:
            self._settle_ticket(
                ticket, SettledAction(outcome=Outcome(action=action.id, status=Status.SUCCEEDED))
            )  # there is no such sandbox
        else:
            self.send(Submit(action=action))

    async def _close_after(self, opening: ActionTicket, ticket: ActionTicket) -> None:
        """Delays a close until the opening of its sandbox has settled. Cancelling it meanwhile has no effect: a close
        ends its sandbox in any case."""
        await asyncio.wait({opening.settled})
        if ticket.action.id in self._tickets:  # otherwise the orchestrator failed meanwhile
            self._admit(ticket)

    def cancel(self, action: str, reason: str = "") -> None:
        """Requests cancellation: the action settles when nothing of it is left. `reason` is empty if its caller
        cancelled."""
        if action in self._tickets:
            self.send(Cancel(action=action, reason=reason) if reason else Cancel(action=action))

    async def wait_settled(self, ticket: ActionTicket) -> SettledAction:
        """Waits for the end of an action. If the waiting task is cancelled, cancels the action and raises once it has
        settled."""
        try:
            return await asyncio.shield(ticket.settled)
        except asyncio.CancelledError:
            self.cancel(ticket.action.id)
            await run_to_completion(asyncio.wait({ticket.settled}))
            raise

    def adopt(self, sandbox: str, memory_mib: int, run: str, node: str) -> None:
        """Registers a sandbox that a manager kept from before. Raises AdmissionRefused if there is no memory for it."""
        self._sink.reserve(sandbox, memory_mib, run, node=node)
        self._node_by_sandbox[sandbox] = node

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` after the current observers, for every event from now on. Returns a function that removes
        it."""
        self._observers.append(observer)

        def remove() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return remove

    async def remove_sandbox(self, sandbox: str) -> None:
        """Ends a sandbox immediately and frees its memory, without an action or a grant."""
        node = self._node_by_sandbox.get(sandbox)
        if node is not None:  # otherwise it was never made
            await self.close_on_node(sandbox, node)
        self.release_memory(sandbox)

    async def close_on_node(self, sandbox: str, node: str) -> None:
        """Ends a sandbox of a manager, even if it is unknown here. Raises ManagerError."""
        await close_sandbox(self._managers[node], sandbox)

    def release_memory(self, sandbox: str) -> None:
        """Frees the memory of a sandbox that is gone."""
        self._node_by_sandbox.pop(sandbox, None)
        self._sink.release(sandbox)

    def manager_of(self, sandbox: str) -> Manager:
        """The manager of the sandbox's node. Raises ManagerError."""
        node = self._node_by_sandbox.get(sandbox)
        if node is None:
            raise sandbox_not_found(sandbox)
        return self._managers[node]

    @property
    def any_manager(self) -> Manager:
        """A manager, for what is the same on every node."""
        return next(iter(self._managers.values()))

    # ---- events and effects ----

    def send(self, event: Event) -> list[Effect]:
        """Passes an event to the scheduler, executes its effects and returns them."""
        if self._failure is not None:
            raise self._failure
        now = self.now()
        try:
            effects = self.decider.handle(event, now)
            for observer in tuple(self._observers):
                observer(now, event, effects)
            for effect in effects:
                _EFFECT_HANDLERS[type(effect)](self, effect)
        except Exception as error:
            self.fail(error)
            raise
        return effects

    def fail(self, error: Exception) -> None:
        """Ends all work after a bug or a failed journal: makes no further decision and raises `error` in every waiting
        caller."""
        if self._failure is None:
            self._failure = error
            for ticket in self._tickets.values():
                for future in (ticket.started, ticket.settled):
                    if not future.done():
                        future.set_exception(error)
                        future.exception()  # marks it as retrieved; its caller may be gone
            self._tickets.clear()
            self._all_settled.set()
            with contextlib.suppress(RuntimeError):  # the group is ending already
                self._tasks.create_task(_raise(error))

    def _on_start(self, effect: Start) -> None:
        if self._draining:
            return  # it stays in the journal as not started
        ticket = self._tickets[effect.action.id]
        ticket.attempt = effect.grant.attempt
        ticket.lease = None
        ticket.stop_requested = False
        if effect.action.sandbox:
            self._node_by_sandbox[effect.action.sandbox] = effect.grant.node
        self._create_tracked_task(self._run_action(ticket, effect.grant))

    def _on_stop(self, effect: Stop) -> None:
        ticket = self._tickets[effect.action]
        ticket.stop_requested = True
        if ticket.lease is not None:
            self._tasks.create_task(self._stop(ticket.lease))
        elif ticket.start_task is not None:
            ticket.start_task.cancel()

    def _on_resize(self, effect: Resize) -> None:
        ticket = self._tickets[effect.action]
        if ticket.lease is not None:
            try:
                ticket.lease.resize(reserved=effect.reserved, limit=effect.limit)
            except OSError:
                return  # it is ending; Finished follows
            self.send(Resized(action=effect.action, limit=effect.limit, attempt=ticket.attempt))

    def _on_wake_at(self, effect: WakeAt) -> None:
        def fire() -> None:
            self._timers.discard(timer)
            self._tasks.create_task(self._send_async(Tick()))

        timer = asyncio.get_running_loop().call_later(max(0.0, effect.at - self.now()), fire)
        self._timers.add(timer)

    def _on_settle(self, effect: Settle) -> None:
        ticket = self._tickets[effect.outcome.action]
        ended = ticket.ended or LeaseResult()
        error_record = None if ticket.error is None else error_record_of(ticket.error)
        settled = SettledAction(
            outcome=effect.outcome, executed=ended.executed, answer=ended.answer, fault=error_record
        )
        self._settle_ticket(ticket, settled)

    def _settle_ticket(self, ticket: ActionTicket, settled: SettledAction) -> None:
        """Delivers the result: immediately, unless the journal must store it or a sandbox must be removed before."""
        if self._journal is not None or _ends_sandbox(ticket.work, settled):
            self._create_tracked_task(self._finish_settling(ticket, settled))
        else:
            self._resolve(ticket, settled)

    async def _finish_settling(self, ticket: ActionTicket, settled: SettledAction) -> None:
        if _ends_sandbox(ticket.work, settled):
            settled = await self._remove_settled_sandbox(ticket, settled)
        if self._journal is not None:
            settled = await self._journal.record_settled(ticket, settled)
        self._resolve(ticket, settled)

    async def _remove_settled_sandbox(self, ticket: ActionTicket, settled: SettledAction) -> SettledAction:
        """Removes a sandbox that failed to open or was closed. A close is an action like others, so it may end without
        having run; the sandbox is then ended directly."""
        sandbox = ticket.action.sandbox
        try:
            if settled.outcome.status is Status.SUCCEEDED:
                self.release_memory(sandbox)
            else:
                await self.remove_sandbox(sandbox)
        except (ManagerError, OSError) as error:
            if error is self._failure:
                raise
            reason = f"sandbox {sandbox} could not be removed: {error}"
            outcome = msgspec.structs.replace(settled.outcome, status=Status.LOST, reason=reason)
            return msgspec.structs.replace(settled, outcome=outcome)
        return settled

    def _resolve(self, ticket: ActionTicket, settled: SettledAction) -> None:
        if self._tickets.pop(ticket.action.id, None) is None:
            return  # the orchestrator failed meanwhile, and its future is done
        if self._opening_by_sandbox.get(ticket.action.sandbox) is ticket:
            del self._opening_by_sandbox[ticket.action.sandbox]
        ticket.resolve(settled)
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
            if isinstance(executor, ServiceRestorer):
                self._tasks.create_task(self._restore(executor, effect))
                return
        raise InvariantError(f"service {effect.service} must be restored, but no executor has devices")

    async def _restore(self, executor: ServiceRestorer, effect: Restore) -> None:
        """Loads a service ahead of its next action, whose start reports the error if loading fails."""
        with contextlib.suppress(ManagerError):
            await executor.restore(effect.service, effect.devices)

    # ---- execution ----

    def _create_tracked_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as a task that `drain` waits for."""

        async def run() -> None:
            try:
                await work
            except BaseException as error:
                # Cancelled from outside, as by a second Ctrl-C, or a bug: the action could not settle any more.
                failure = error if isinstance(error, Exception) else ManagerError("the orchestrator was interrupted")
                self.fail(failure)
                raise
            finally:
                self._tracked_count -= 1
                if not self._tracked_count:
                    self._all_tracked_done.set()

        self._tracked_count += 1
        self._all_tracked_done.clear()
        self._tasks.create_task(run())

    async def _run_action(self, ticket: ActionTicket, grant: Grant) -> None:
        """One attempt: starts the lease, waits for its end, and reports both to the scheduler."""
        action = ticket.action.id
        if self._journal is not None:
            await self._journal.record_start(ticket)
        try:
            executor = self._executors.get(type(ticket.work))
            if executor is None:
                lease = await self._managers[grant.node].start(ticket.action, grant, ticket.work, ticket.output)
            else:
                lease = await self._start_cancellable(executor, ticket, grant)
        except Exception as error:
            self.send(_start_failure(ticket, grant, error))
            return
        ticket.lease = lease
        self.send(Started(action=action, attempt=grant.attempt))
        if not ticket.started.done():
            ticket.started.set_result(None)
        if ticket.stop_requested:
            self._tasks.create_task(self._stop(lease))
        self._measure_later(ticket, MEASURE_FIRST_S)
        try:
            ended = await lease.wait()
        except Exception as error:
            ended = _lost_result(ticket, error)
        if ticket.measure_timer is not None:
            ticket.measure_timer.cancel()
            ticket.measure_timer = None
        ticket.ended = ended
        self.send(Finished(action=action, usage=ended.usage or NO_USAGE, lost=ended.lost, attempt=grant.attempt))

    async def _start_cancellable(self, executor: Executor, ticket: ActionTicket, grant: Grant) -> Lease:
        """Starts work that may take long, such as an import or a model load, so that `_on_stop` can cancel it. A
        cancelled start leaves nothing behind."""
        start = executor.start(ticket.action, grant, ticket.work, ticket.output)
        starting = ticket.start_task = asyncio.ensure_future(start)
        try:
            return await starting
        except asyncio.CancelledError:
            if not ticket.stop_requested:
                raise
            raise ManagerError("the action was stopped during its start", retry=False) from None
        finally:
            ticket.start_task = None

    def _measure_later(self, ticket: ActionTicket, after_s: float) -> None:
        """Schedules a measurement of CPU use unless it was declared: unused CPU is free for others."""
        cpu = ticket.action.demand.pools.get(CPU)
        if cpu is not None and not cpu.declared:
            ticket.measure_timer = asyncio.get_running_loop().call_later(after_s, self._measure, ticket, after_s)

    def _measure(self, ticket: ActionTicket, after_s: float) -> None:
        assert ticket.lease is not None
        with contextlib.suppress(ManagerError, OSError):
            cpu_s = ticket.lease.cpu_seconds()
            if cpu_s is not None:
                self._measure_later(ticket, min(2.0 * after_s, MEASURE_S_MAX))
                self._tasks.create_task(
                    self._send_async(Used(action=ticket.action.id, cpu_s=cpu_s, attempt=ticket.attempt))
                )

    async def _send_async(self, event: Event) -> None:
        """Sends the event of a timer from a task: an error in a task ends the task group."""
        self.send(event)

    async def _stop(self, lease: Lease) -> None:
        """Stops a lease. Errors are ignored here: the end of the lease reports them."""
        with contextlib.suppress(ManagerError, OSError):
            await lease.stop()


_EFFECT_HANDLERS: dict[type, Callable[[Orchestrator, Any], None]] = {
    Start: Orchestrator._on_start,
    Stop: Orchestrator._on_stop,
    Resize: Orchestrator._on_resize,
    Restore: Orchestrator._on_restore,
    WakeAt: Orchestrator._on_wake_at,
    Settle: Orchestrator._on_settle,
    Refuse: Orchestrator._on_refuse,
}


def _ends_sandbox(work: Work, settled: SettledAction) -> bool:
    if isinstance(work, Open):
        return settled.outcome.status is not Status.SUCCEEDED
    return isinstance(work, Close)


def _start_failure(ticket: ActionTicket, grant: Grant, error: Exception) -> StartFailed:
    """Converts an exception of `start` to an event."""
    reason, retry, sandbox, memory_mib = str(error), False, "", 0
    if isinstance(error, InvalidInput | AdmissionRefused):
        ticket.error = error
    elif isinstance(error, InsufficientMemory):
        retry, sandbox, memory_mib = True, error.sandbox, error.memory_mib
    elif isinstance(error, ManagerError):
        retry = error.retry
    elif isinstance(error, OSError):
        retry = True
    else:
        reason = _log_bug(ticket.action.id, error)
    return StartFailed(
        action=ticket.action.id, reason=reason, retry=retry, attempt=grant.attempt, sandbox=sandbox, memory=memory_mib
    )


def _lost_result(ticket: ActionTicket, error: Exception) -> LeaseResult:
    """Converts an exception of `wait` to a result."""
    if isinstance(error, InvalidInput | AdmissionRefused):
        ticket.error = error
        return LeaseResult(lost=str(error))
    if isinstance(error, ManagerError | OSError):
        return LeaseResult(lost=f"{type(error).__name__}: {error}")
    return LeaseResult(lost=_log_bug(ticket.action.id, error))


def _log_bug(action: str, error: Exception) -> str:
    """Logs the bug and returns a reason. A request may trigger a bug; other requests must not fail because of it."""
    log.error("a bug in a manager action=%s", action, exc_info=error)
    return f"a bug in Tangram, see its log: {type(error).__name__}"


async def _raise(error: Exception) -> None:
    raise error
