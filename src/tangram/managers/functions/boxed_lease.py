"""The lease of one call in a sandbox: from an instance to an answer.

Owns the way of a call and the judgement whose fault it is when it brings no value: what a sandbox does or says is the
doing of the function in it, what the manager around it does is ours. Each step in a sandbox is carried out by its
manager as a program of the action, with the grant of the action. Promises what `managers.base` asks of a lease: it ends
once, and when it has ended after `stop`, the sandbox that it used is gone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import signal
from collections.abc import Callable

from tangram.core.action import NO_USAGE, Action, Usage
from tangram.core.messages import Grant
from tangram.errors import FileFailed, InvalidInput, ManagerError
from tangram.managers.base import Lease
from tangram.managers.functions.boxed_answer import Garbled, Listener, answer_of
from tangram.managers.functions.boxed_host import BoxedHost, BoxedInstance, inside
from tangram.managers.functions.boxed_program import (
    ANSWERED,
    DIRECTORY,
    STARTER,
    TOKEN_BYTES,
    arguments_file,
)
from tangram.managers.functions.host import CALLS_MAX
from tangram.managers.functions.leases import PATIENCE_S, SHOWN_CHARACTERS
from tangram.managers.functions.templates import IMPORT_S_MAX, FunctionBroken
from tangram.managers.functions.work import Call, Failure, failed
from tangram.managers.work import KIB, MIB, Ended, Exec, Executed
from tangram.processes.streams import COMMANDS, STATUSES, Output

SESSION = "function"
"""The held shell whose place the program takes."""
HOLDING_BACKENDS = ("sandbox", "process")
"""Whose held shells read commands and tell statuses as `processes.streams` says. Elsewhere each call is a program."""
INLINE_BYTES_MAX = 64 * KIB
"""Of arguments that go with the command, of which the kernel takes 128 KiB as one word; longer ones go by a file."""
NOT_FOUND, SIGNALLED = 127, 128
"""Exit codes as a shell gives them: of a program that is not there, and with a signal added of one that it ended."""


class Stopped(Exception):
    """The call was stopped before it was made."""


class BoxedLease:
    def __init__(
        self, host: BoxedHost, action: Action, grant: Grant, work: Call, output: Output | None,
        on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._host = host
        self._manager = host.around.manager
        self._spec = host.spec
        self._action = action
        self._grant = grant
        self._work = work
        self._output = output
        self._on_lost = on_lost
        """Told why our side failed."""
        self._stopped = False
        self._inner: Lease | None = None
        """Of the program that runs in the sandbox now."""
        self._turn: asyncio.Future[None] | None = None
        """What it waits for before it has an instance."""
        self._held = host.around.queue.holds(host.name_for(action, grant))
        """Memory for a new instance, for which it has waited."""
        self._size: tuple[int, int] | None = None
        """As it was resized."""
        self._begun = asyncio.Event()
        """The call itself is under way."""
        self._usage = NO_USAGE
        """Of all that it has run so far, loading included."""
        self._late: asyncio.Task[None] | None = None
        """Given: loading took too long, and is stopped."""
        host.users += 1
        self.task = asyncio.get_running_loop().create_task(self._run())
        self.task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Ended]) -> None:
        self._host.leave()
        if not task.cancelled():
            task.exception()  # taken note of: whoever waited may have gone

    # ---- what its owner asks ----

    async def begin(self) -> None:
        """Raises what keeps it from an instance, if that is known soon."""
        begun = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait({begun, self.task}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            stopping = asyncio.ensure_future(self.stop())
            while not stopping.done():
                try:
                    await asyncio.shield(stopping)
                except asyncio.CancelledError:
                    continue
            raise
        finally:
            begun.cancel()
        if self.task.done() and not self._begun.is_set():
            self.task.result()

    async def wait(self) -> Ended:
        ended = await asyncio.shield(self.task)
        if ended.lost:
            self._on_lost(ended.lost)
        return ended

    def resize(self, *, reserved: int, limit: int) -> None:
        self._size = (reserved, limit)
        if self._inner is not None:
            self._inner.resize(reserved=reserved, limit=limit)

    def used(self) -> float | None:
        now = None if self._inner is None else self._inner.used()
        return None if now is None else self._usage.cpu_s + now

    async def stop(self) -> None:
        self._stopped = True
        if self._turn is not None:
            self._turn.cancel()
        if self._inner is not None:
            await _stop(self._inner)
        await asyncio.wait({self.task})

    # ---- its way ----

    async def _run(self) -> Ended:
        try:
            try:
                return await self._with_instance()
            finally:
                if self._held:  # it was stopped before, or found an instance
                    self._host.around.release(self._host.name_for(self._action, self._grant))
        except Stopped:
            return Ended(usage=self._usage)
        except FunctionBroken as broken:
            failure = broken.failure
            executed = Executed(
                stdout=broken.stdout,
                stderr=broken.stderr,
                stdout_bytes=len(broken.stdout),
                stderr_bytes=len(broken.stderr),
            )
            answer = failed(failure.kind, failure.message, failure.traceback)
            return Ended(usage=self._usage, executed=executed, answer=answer)

    async def _with_instance(self) -> Ended:
        """One that was idle may have died since, by what an earlier call has left in it. That is no matter of this
        call, which gets another one."""
        while True:
            instance, is_new = await self._take()
            keep = False
            try:
                ended, keep = await self._call(instance)
            except (ManagerError, FileFailed) as error:
                if is_new:
                    raise ManagerError(str(error)) from error
                continue
            finally:
                await self._part_with(instance, keep)
            if ended is not None:
                return ended
            if is_new:
                return Ended(usage=self._usage, lost="its instance did not take the call")

    async def _part_with(self, instance: BoxedInstance, keep: bool) -> None:
        if keep and not self._stopped and instance.calls < CALLS_MAX:
            self._host.give_back(instance)
            return
        removal = self._host.discard(instance)
        if self._stopped:
            await asyncio.wait({removal})

    async def _take(self) -> tuple[BoxedInstance, bool]:
        """An instance that has loaded the function, and whether it is a new one."""
        host = self._host
        while True:
            if self._stopped:
                host.next_turn()  # it may have been ours
                raise Stopped
            instance = host.take_idle()
            if instance is not None:
                return instance, False
            if host.has_room:
                break
            self._turn = host.turn()
            await asyncio.wait({self._turn})
            self._turn = None
        held, self._held = self._held, False
        instance = await host.open(self._action, self._grant, held=held)
        try:
            await self._load(instance)
        except BaseException as error:
            await self._part_with(instance, keep=False)
            if self._stopped:
                raise Stopped from None
            if isinstance(error, ManagerError):
                raise ManagerError(str(error)) from error  # a retry opens another sandbox
            raise
        return instance, True

    async def _load(self, instance: BoxedInstance) -> None:
        """Raises FunctionBroken if the function cannot be called at all."""
        instance.holds = await self._hold(instance)
        if not instance.holds:
            return
        token = secrets.token_hex(TOKEN_BYTES // 2)
        listener = Listener(token, None)
        late = asyncio.get_running_loop().call_later(IMPORT_S_MAX, self._give_up_loading)
        try:
            ended = await self._execute(
                instance, Exec(command=f"tangram:load:{token}:here:", session=SESSION, capture_bytes_max=0), listener
            )
        finally:
            late.cancel()
            if self._late is not None:
                await asyncio.wait({self._late})
        if self._stopped:
            raise Stopped
        if ended.lost:
            raise ManagerError(ended.lost)
        self._require_loaded(listener, ended)

    def _require_loaded(self, listener: Listener, ended: Ended) -> None:
        failure = self._why_not_loaded(listener, ended)
        if failure is not None:
            executed = listener.executed(ended.executed)
            raise FunctionBroken(failure, executed.stdout, executed.stderr)

    def _give_up_loading(self) -> None:
        if self._inner is not None:
            self._late = asyncio.get_running_loop().create_task(_stop(self._inner))

    def _why_not_loaded(self, listener: Listener, ended: Ended) -> Failure | None:
        name = self._spec.name
        if self._late is not None:
            return Failure(kind="import", message=f"{name} was not imported within {IMPORT_S_MAX:g} s")
        try:
            return listener.reply().failure
        except Garbled as error:
            garbled = str(error)
        if ended.executed is not None and ended.executed.out_of_memory:
            return Failure(kind="memory", message=self._out_of_memory(f"when {name} was imported"))
        image = self._host.around.image
        shown = listener.stderr.strip()[-SHOWN_CHARACTERS:]
        if ended.executed is not None and ended.executed.exit_code == NOT_FOUND:
            return self._no_python(shown)
        said = f"{name} cannot be imported in image {image}: {garbled}"
        return Failure(kind="import", message=said, traceback=shown)

    def _no_python(self, shown: str) -> Failure:
        said = f"image {self._host.around.image} has no python3, which functions need; use an image that has it"
        return Failure(kind="import", message=said, traceback=shown)

    async def _hold(self, instance: BoxedInstance) -> bool:
        """Put the program into the place of a held shell. False: there are none of the kind that it can replace, and
        each call is a program of its own."""
        if self._manager.backend not in HOLDING_BACKENDS:
            return False
        # The shell asks for its next command by `read`, where its descriptors are those that it is held by.
        program = f"exec python3 -c {_quoted(STARTER)} hold {COMMANDS} {STATUSES}"
        # Asked for first: a shell that cannot become its program ends, sooner or later than the next command comes.
        command = f"type -P python3 >/dev/null && read() {{ {program}; }}"
        work = Exec(command=command, cwd=DIRECTORY, session=SESSION, capture_bytes_max=0)
        try:
            ended = await self._execute(instance, work, None)
        except InvalidInput:
            return False  # the image has no bash
        if self._stopped:
            raise Stopped
        if ended.lost or ended.executed is None or ended.executed.exit_code is None:
            raise ManagerError(ended.lost or f"the shell of {instance.name} cannot be replaced")
        if ended.executed.exit_code != 0:
            raise FunctionBroken(self._no_python(""), b"", b"")
        return True

    # ---- the call ----

    async def _call(self, instance: BoxedInstance) -> tuple[Ended | None, bool]:
        """What came of it, and whether the instance can be used again. None: the instance did not take the call."""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        listener = Listener(token, self._output)
        instance.calls += 1
        work = await self._request(instance, token)
        ended = await self._execute(instance, work, listener, begun=True)
        listener.end()
        executed = listener.executed(ended.executed)
        if self._stopped or ended.lost:
            return Ended(usage=self._usage, executed=executed, lost=ended.lost), False
        if not listener.begun and not executed.out_of_memory:
            if not instance.holds:
                self._require_loaded(listener, ended)
            return None, False
        answer, keep = self._judged(listener, ended.executed or executed)
        return Ended(usage=self._usage, executed=executed, answer=answer), keep

    async def _request(self, instance: BoxedInstance, token: str) -> Exec:
        arguments = self._work.arguments
        if not instance.holds:
            words = ("python3", "-c", STARTER, "once", token)
            return Exec(command=words, cwd=DIRECTORY, stdin=arguments, capture_bytes_max=0)
        if len(arguments) <= INLINE_BYTES_MAX:
            given = f"here:{base64.b64encode(arguments).decode()}"
        else:
            await self._manager.write(instance.name, arguments_file(token), arguments, mode=0o600)
            given = "file:"
        return Exec(command=f"tangram:call:{token}:{given}", session=SESSION, capture_bytes_max=0)

    def _judged(self, listener: Listener, executed: Executed) -> tuple[bytes, bool]:
        """The answer, and whether the instance can be used again."""
        code = executed.exit_code
        try:
            reply = listener.reply()
        except Garbled as garbled:
            if executed.out_of_memory:
                return failed("memory", self._out_of_memory("")), False
            if listener.answered:
                return failed("answer", f"what it said is no answer: {garbled}"), False
            return failed("exited", _ended_with(code)), False
        return answer_of(reply), reply.keep and code in (0, ANSWERED) and not executed.out_of_memory

    def _out_of_memory(self, when: str) -> str:
        limit = self._spec.memory_bytes // MIB
        return f"out of memory{when and ' '}{when}: it may use {limit} MiB, which it and its files have used up"

    async def _execute(
        self, instance: BoxedInstance, work: Exec, listener: Listener | None, *, begun: bool = False
    ) -> Ended:
        if self._stopped:
            raise Stopped
        output = None if listener is None else listener.feed
        inner = await self._manager.start(inside(self._action, instance), self._grant, work, output)
        self._inner = inner
        if begun:
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


def _ended_with(code: int | None) -> str:
    if code is None or not SIGNALLED < code <= SIGNALLED + signal.NSIG:
        return f"it ended its own process with exit code {code} instead of returning"
    number = code - SIGNALLED
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return f"it crashed: its process was ended by {name}"


async def _stop(lease: Lease) -> None:
    """What goes wrong here shows in the end of the lease."""
    with contextlib.suppress(ManagerError, OSError):
        await lease.stop()


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        cpu_s=one.cpu_s + other.cpu_s,
        throttled_s=one.throttled_s + other.throttled_s,
        starved_s=one.starved_s + other.starved_s,
        memory_peak_bytes=max(one.memory_peak_bytes, other.memory_peak_bytes),
        overhead_s=other.overhead_s,
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
