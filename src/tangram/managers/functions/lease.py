"""The lease of one call: from an instance to a reply.

Owns the steps of a call and classifies its failures. Promises what `managers.base` requires of a lease: it ends once,
and when it has ended after `stop`, the instance that it used is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from tangram.core.action import NO_USAGE, Action, Usage
from tangram.core.messages import Grant
from tangram.errors import FileFailed, InvalidInput, ManagerError
from tangram.managers.base import Lease
from tangram.managers.functions.host import FunctionHost
from tangram.managers.functions.instance import Command, FunctionLoadFailed, Instance, InstanceLost
from tangram.managers.functions.program import ANSWERED, TOKEN_BYTES
from tangram.managers.functions.reply import InstanceReply, MalformedReply, ReplyParser
from tangram.managers.functions.work import Call, Failure, encode_failure
from tangram.managers.work import MIB, ExecResult, LeaseResult
from tangram.processes.streams import Output

CALLS_MAX = 1000
"""An instance ends after this number of calls, so that memory which the function leaks is freed."""
START_WAIT_S = 10.0
"""Time that the start of a call waits for its instance. Does not count towards the time limit of the call. Must be
short: a call cannot be stopped while it starts."""
IMPORT_S_MAX = 300.0
"""The time limit of an import. A cold disk takes long; an import that hangs never ends."""


class CallStopped(Exception):
    """The call was stopped before it started."""


class CallLease:
    def __init__(
        self, host: FunctionHost, action: Action, grant: Grant, work: Call, output: Output | None,
        on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._host = host
        self._spec = host.spec
        self._action = action
        self._grant = grant
        self._work = work
        self._output = output
        self._on_lost = on_lost
        """Called with the reason if the call is lost."""
        self._stopped = False
        self._aborted = ""
        """The reason of an end that its owner did not request."""
        self._inner: Lease | None = None
        """The lease of the command that the instance executes now."""
        self._turn: asyncio.Future[None] | None = None
        """Done when it may look for an instance again."""
        self._held = host.context.queue.has_memory(host.name_for(action, grant))
        """Whether memory for a new instance is reserved, for which the call has waited."""
        self._size: tuple[int, int] | None = None
        """The CPU reservation and limit of the last `resize`."""
        self._begun = asyncio.Event()
        """Set when the instance executes the call itself."""
        self._usage = NO_USAGE
        """The usage of all commands so far, loading included."""
        self._load_timeout_task: asyncio.Task[None] | None = None
        """Stops loading; set when it exceeded its time limit."""
        host.active_calls += 1
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[LeaseResult]) -> None:
        self._host.leave()
        if not task.cancelled():
            task.exception()  # retrieved here: there may be no waiter any more

    # ---- the interface of a lease ----

    async def begin(self) -> None:
        """Raises the error that prevents an instance, if it is known soon."""
        begun_task = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait({begun_task, self.task}, timeout=START_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            stopping = asyncio.ensure_future(self.stop())
            while not stopping.done():
                try:
                    await asyncio.shield(stopping)
                except asyncio.CancelledError:
                    continue
            raise
        finally:
            begun_task.cancel()
        if self.task.done() and not self._begun.is_set():
            self.task.result()

    async def wait(self) -> LeaseResult:
        ended = await asyncio.shield(self.task)
        if ended.lost:
            self._on_lost(ended.lost)
        return ended

    def resize(self, *, reserved: int, limit: int) -> None:
        self._size = (reserved, limit)
        if self._inner is not None:
            self._inner.resize(reserved=reserved, limit=limit)

    def cpu_seconds(self) -> float | None:
        now = None if self._inner is None else self._inner.cpu_seconds()
        return None if now is None else self._usage.cpu_s + now

    async def stop(self) -> None:
        self._stopped = True
        if self._turn is not None:
            self._turn.cancel()
        if self._inner is not None:
            await _stop(self._inner)
        await asyncio.wait({self.task})

    async def abort(self, reason: str) -> None:
        """Stop it as lost, with this reason."""
        self._aborted = "" if self._stopped else reason
        await self.stop()

    # ---- steps --------

    async def _run(self) -> LeaseResult:
        result = await self._run_call()
        return msgspec.structs.replace(result, lost=self._aborted) if self._aborted and not result.answer else result

    async def _run_call(self) -> LeaseResult:
        try:
            try:
                return await self._call_until_taken()
            finally:
                if self._held:  # it was stopped before, or found an instance
                    self._host.context.release(self._host.name_for(self._action, self._grant))
        except CallStopped:
            return LeaseResult(usage=self._usage)
        except FunctionLoadFailed as failed:
            self._host.on_load_failed()
            failure = failed.failure
            executed = ExecResult(
                stdout=failed.stdout,
                stderr=failed.stderr,
                stdout_bytes=len(failed.stdout),
                stderr_bytes=len(failed.stderr),
            )
            reply = encode_failure(failure.kind, failure.message, failure.traceback)
            return LeaseResult(usage=self._usage, executed=executed, answer=reply)

    async def _call_until_taken(self) -> LeaseResult:
        """Repeats until an instance accepts the call. An idle one may have died since its last call."""
        while True:
            instance, is_new = await self._acquire_instance()
            keep = False
            try:
                ended, keep = await self._call(instance)
            except (ManagerError, FileFailed) as error:
                if is_new:
                    raise ManagerError(str(error)) from error
                continue
            finally:
                await self._release_instance(instance, keep)
            if ended is not None:
                return ended
            if is_new:
                return LeaseResult(
                    usage=self._usage, lost=f"an instance of function {self._spec.name} did not accept the call"
                )

    async def _release_instance(self, instance: Instance, keep: bool) -> None:
        if keep and not self._stopped and instance.calls < CALLS_MAX:
            self._host.release(instance)
            return
        removal = self._host.discard(instance)
        if self._stopped:
            await asyncio.wait({removal})

    async def _acquire_instance(self) -> tuple[Instance, bool]:
        """An instance that has loaded the function, and whether it is a new one."""
        host = self._host
        while True:
            if self._stopped:
                host.wake_next()  # an instance may have been assigned to this call
                raise CallStopped
            instance = host.take_idle()
            if instance is not None:
                return instance, False
            if host.has_room:
                break
            self._turn = host.wait_turn()
            await asyncio.wait({self._turn})
            self._turn = None
        held, self._held = self._held, False
        instance = await host.open(self._action, self._grant, held=held)
        try:
            await self._load(instance)
        except BaseException as error:
            await self._release_instance(instance, keep=False)
            if self._stopped:
                raise CallStopped from None
            if isinstance(error, ManagerError):
                raise ManagerError(str(error)) from error  # a retry opens another instance
            raise
        return instance, True

    async def _load(self, instance: Instance) -> None:
        """Raises FunctionLoadFailed if the function cannot be called at all."""
        await instance.prepare(self._action, self._grant, self._execute)
        if not instance.loads_once:
            return
        parser, command = self._command(None, None)
        load_timer = asyncio.get_running_loop().call_later(IMPORT_S_MAX, self._stop_loading)
        try:
            ended = await self._execute(instance.execute(command, self._action, self._grant))
        finally:
            load_timer.cancel()
            if self._load_timeout_task is not None:
                await asyncio.wait({self._load_timeout_task})
        if self._stopped:
            raise CallStopped
        if ended.lost and self._load_timeout_task is None:
            raise ManagerError(ended.lost)
        self._require_loaded(instance, parser, ended)

    def _require_loaded(self, instance: Instance, parser: ReplyParser, ended: LeaseResult) -> None:
        failure = self._load_failure(instance, parser, ended)
        if failure is not None:
            executed = parser.to_exec_result(ended.executed)
            raise FunctionLoadFailed(failure, executed.stdout, executed.stderr)

    def _stop_loading(self) -> None:
        if self._inner is not None:
            self._load_timeout_task = asyncio.get_running_loop().create_task(_stop(self._inner))

    def _load_failure(self, instance: Instance, parser: ReplyParser, ended: LeaseResult) -> Failure | None:
        name = self._spec.name
        if self._load_timeout_task is not None:
            return Failure(kind="import", message=f"{name} was not imported within {IMPORT_S_MAX:g} s")
        try:
            return parser.reply().failure
        except MalformedReply as error:
            if ended.executed is not None and ended.executed.out_of_memory:
                return Failure(kind="memory", message=self._out_of_memory(f" when {name} was imported"))
            return instance.import_failure(ended, str(error), parser.stderr)

    # ---- the call ----

    async def _call(self, instance: Instance) -> tuple[LeaseResult | None, bool]:
        """Returns the result, and whether the instance can be used again. None: the instance did not accept the
        call."""
        parser, command = self._command(self._work.arguments, self._output)
        instance.calls += 1
        ended = await self._execute(instance.execute(command, self._action, self._grant), has_begun=True)
        parser.end()
        executed = parser.to_exec_result(ended.executed)
        if self._stopped or ended.lost:
            return LeaseResult(usage=self._usage, executed=executed, lost=ended.lost), False
        if not parser.begun and not executed.out_of_memory:
            if not instance.loads_once:
                self._require_loaded(instance, parser, ended)
            return None, False
        try:
            reply = parser.reply()
        except MalformedReply as error:
            return self._failed(instance, parser, ended, executed, str(error)), False
        if not instance.is_isolated:  # measured by the manager, so code in the sandbox cannot change it
            self._usage = _usage_of(reply)
        code = None if ended.executed is None else ended.executed.exit_code
        keep = reply.keep and code in (0, ANSWERED) and not executed.out_of_memory
        return LeaseResult(usage=self._usage, executed=executed, answer=reply.answer), keep

    def _failed(
        self, instance: Instance, parser: ReplyParser, ended: LeaseResult, executed: ExecResult, malformed: str
    ) -> LeaseResult:
        """Classifies a call without a reply."""
        try:
            if executed.out_of_memory:
                failure = Failure(kind="memory", message=self._out_of_memory(""))
            elif parser.answered and instance.is_isolated:
                failure = Failure(kind="answer", message=f"the reply of {self._spec.name} is malformed: {malformed}")
            else:
                failure = instance.exit_failure(ended, parser.stderr)
        except InstanceLost as lost:
            return LeaseResult(usage=self._usage, executed=executed, lost=str(lost))
        reply = encode_failure(failure.kind, failure.message, failure.traceback)
        return LeaseResult(usage=self._usage, executed=executed, answer=reply)

    def _out_of_memory(self, phase: str) -> str:
        limit = self._spec.memory_bytes // MIB
        return f"out of memory{phase}: it and its files have used up their limit of {limit} MiB"

    def _command(self, arguments: bytes | None, output: Output | None) -> tuple[ReplyParser, Command]:
        token = secrets.token_hex(TOKEN_BYTES // 2)
        parser = ReplyParser(token, output)
        return parser, Command(token=token, arguments=arguments, output=parser.feed)

    async def _execute(self, starting: Awaitable[Lease], *, has_begun: bool = False) -> LeaseResult:
        if self._stopped:
            if asyncio.iscoroutine(starting):
                starting.close()
            raise CallStopped
        inner = await starting
        self._inner = inner
        if has_begun:
            self._begun.set()
        if self._size is not None:
            inner.resize(reserved=self._size[0], limit=self._size[1])
        stopping = asyncio.get_running_loop().create_task(_stop(inner)) if self._stopped else None
        try:
            ended = await inner.wait()
            self._usage = _sum(self._usage, ended.usage)
            return ended
        finally:
            self._inner = None
            if stopping is not None:
                await asyncio.wait({stopping})


async def _stop(lease: Lease) -> None:
    """Errors here are reported by the end of the lease."""
    with contextlib.suppress(ManagerError, OSError):
        await lease.stop()


def _usage_of(reply: InstanceReply) -> Usage:
    try:
        return Usage(cpu_s=reply.cpu_s, memory_peak_bytes=reply.peak_bytes)
    except InvalidInput:
        return NO_USAGE


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        cpu_s=one.cpu_s + other.cpu_s,
        throttled_s=one.throttled_s + other.throttled_s,
        starved_s=one.starved_s + other.starved_s,
        memory_peak_bytes=max(one.memory_peak_bytes, other.memory_peak_bytes),
        overhead_s=other.overhead_s,
    )
