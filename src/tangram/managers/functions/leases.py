"""The lease of one call: from an instance to an answer.

Owns the way of a call and the judgement whose fault it is when it brings no value. Promises what `managers.base` asks
of a lease: it ends once, and when it has ended after `stop` or with an instance that is not used again, nothing is left
of that.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable

from tangram.core.action import NO_USAGE, Usage
from tangram.errors import InvalidInput, ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.functions.host import CALLS_MAX, Host
from tangram.managers.functions.instance import Garbled, Gone, Instance, Reply
from tangram.managers.functions.template import OUR_EXIT
from tangram.managers.functions.templates import FunctionBroken
from tangram.managers.functions.work import Call, failed, returned
from tangram.managers.work import MIB, Ended, Executed
from tangram.processes.process_tree import look_up
from tangram.processes.streams import Output

PATIENCE_S = 10.0
"""For a new instance before a call counts as started: its time limit does not count what importing takes, up to this.
Until then it cannot be stopped, so this must not be long."""

SHOWN_CHARACTERS = 1000
"""Of what an instance wrote, in a reason: the end of it."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
"""Signals that a program brings on itself. Others come from somebody else, such as a kernel without memory."""

NEAR = 0.8
"""Of its limit: from there on it is assumed that a process which crashed was at it. What counts towards the limit is
private memory, and what is known of a dead process its resident memory; the two differ by the libraries it has mapped
and by what it asked for and did not touch."""
WITHOUT_MEMORY = re.compile(
    r"bad_?alloc|(cannot|can't|could not|unable to|failed to) allocate|out of memory|not enough memory|MemoryError"
    r"|insufficient memory|memory allocation .{0,40}failed|ENOMEM",
    re.IGNORECASE,
)
"""What libraries write when they get no memory, before they end the process."""


class CallLease:
    def __init__(self, host: Host, work: Call, output: Output | None, on_lost: Callable[[str], None]) -> None:
        self._host = host
        self._work = work
        self._output = output
        self._on_lost = on_lost
        """Told why our side failed."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ended] = self._loop.create_future()
        self._taking: asyncio.Task[Instance] | None = None
        self._instance: Instance | None = None
        self._reply: Reply | None = None
        self._garbled = ""
        self._stopped = False

    # ---- its beginning ----

    async def begin(self) -> None:
        """Raises ManagerError if there is no instance to be had."""
        instance = self._host.take_idle()
        if instance is not None:
            self._call(instance)
            return
        self._taking = self._loop.create_task(self._host.take())
        try:
            await asyncio.wait({self._taking}, timeout=PATIENCE_S)
        except BaseException:
            self._taking.add_done_callback(self._give_up)
            self._taking.cancel()
            raise
        if self._taking.done():
            self._begin_with(self._taking)
        else:
            self._taking.add_done_callback(self._begin_late)

    def _give_up(self, taking: asyncio.Task[Instance]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self._host.give_back(taking.result())

    def _begin_late(self, taking: asyncio.Task[Instance]) -> None:
        if self._stopped:
            self._give_up(taking)
            return
        try:
            self._begin_with(taking)
        except ManagerError as error:
            self._end(Ended(lost=str(error)))

    def _begin_with(self, taking: asyncio.Task[Instance]) -> None:
        self._taking = None
        try:
            self._call(taking.result())
        except FunctionBroken as broken:
            failure = broken.failure
            self._end(
                Ended(
                    answer=failed(failure.kind, failure.message, failure.traceback),
                    executed=Executed(
                        stdout=broken.stdout,
                        stderr=broken.stderr,
                        stdout_bytes=len(broken.stdout),
                        stderr_bytes=len(broken.stderr),
                    ),
                )
            )

    def _call(self, instance: Instance) -> None:
        self._instance = instance
        instance.listen(self._output)
        instance.gone.add_done_callback(self._on_gone)
        instance.call(self._work.arguments, self._on_reply)

    # ---- while it runs ----

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    def resize(self, *, reserved: int, limit: int) -> None:
        """Nothing holds an instance to a limit of CPU; it is told its width."""

    def used(self) -> float | None:
        if self._ended.done() or self._instance is None:
            return None
        process = look_up(self._instance.pid)
        return None if process is None else max(0.0, process.cpu_s - self._instance.cpu_s)

    async def stop(self) -> None:
        self._stopped = True
        if self._ended.done():
            return
        if self._instance is None:
            self._end(Ended())  # what it waits for will serve another call
            return
        await self._host.end(self._instance, STOP_GRACE_S)
        await asyncio.wait({self._ended})

    # ---- its end ----

    def _on_reply(self, reply: Reply | Garbled) -> None:
        assert self._instance is not None
        if isinstance(reply, Garbled):
            self._garbled = f"its instance said what is no answer: {reply}"
            self._host.end_now(self._instance)
            return
        self._instance.cpu_s += reply.cpu_s
        self._reply = reply
        if self._stopped:
            return  # it ends with its instance
        if reply.keep and self._instance.calls < CALLS_MAX:
            self._instance.gone.remove_done_callback(self._on_gone)
            executed = self._instance.executed()
            self._host.give_back(self._instance)
            self._end(self._answered(reply, executed))
        else:
            self._host.end_now(self._instance)

    def _on_gone(self, future: asyncio.Future[Gone]) -> None:
        gone = future.result()
        assert self._instance is not None
        executed = self._instance.executed()
        lost = f"processes {gone.left[:8]} of it could not be killed" if gone.left else ""
        if self._reply is not None and not self._stopped and not lost:
            self._end(self._answered(self._reply, executed))
            return
        used_s = max(0.0, gone.cpu_s - self._instance.cpu_s) + (self._reply.cpu_s if self._reply else 0.0)
        usage = Usage(cpu_s=used_s, memory_peak_bytes=gone.peak_bytes)
        answer = b""
        if not self._stopped and not lost:
            lost, answer = self._judged(gone)
        self._end(Ended(usage=usage, executed=executed, answer=answer, lost=lost))

    def _answered(self, reply: Reply, executed: Executed) -> Ended:
        failure = reply.failure
        answer = returned(reply.value) if failure is None else failed(failure.kind, failure.message, failure.traceback)
        try:
            usage = Usage(cpu_s=reply.cpu_s, memory_peak_bytes=reply.peak_bytes)
        except InvalidInput:
            usage = NO_USAGE
        return Ended(usage=usage, executed=executed, answer=answer)

    def _judged(self, gone: Gone) -> tuple[str, bytes]:
        """Of an instance that ended in the middle of a call: why it is our failure, or the function's."""
        if self._garbled:
            return self._garbled, b""
        if gone.code is None:
            return gone.error or "its instance is gone", b""
        if gone.code == OUR_EXIT:
            return f"its instance failed: {self._stderr()}", b""
        if gone.code >= 0:
            return "", failed("exited", f"it ended its own process with exit code {gone.code} instead of returning")
        if gone.excess:
            most = self._work.function.processes_max
            return "", failed("processes", f"it had {gone.excess} processes and threads, and may have {most}")
        number = -gone.code
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        if number in CRASHES:
            return "", failed("exited", f"it crashed: its process was ended by {name}; {self._memory(gone)}")
        return f"its instance was killed by {name} in the middle of the call", b""

    def _memory(self, gone: Gone) -> str:
        """Of a crash, whether it was for want of memory. The kernel tells a program that it gets no more, and nobody
        else; many a library of C then ends its process. So this is what can be seen of it from here."""
        limit, peak = self._work.function.memory_bytes, gone.peak_bytes
        had = f"its peak was {peak / MIB:.0f} MiB, libraries included"
        if peak >= NEAR * limit or WITHOUT_MEMORY.search(self._stderr()):
            return f"it has probably run out of its {limit / MIB:.0f} MiB ({had}); give it more memory"
        return f"it may use {limit / MIB:.0f} MiB, and {had}"

    def _stderr(self) -> str:
        assert self._instance is not None
        return self._instance.executed().stderr.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]

    def _end(self, ended: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)
            if ended.lost:
                self._on_lost(ended.lost)
