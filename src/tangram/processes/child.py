"""The supervisor of a child process: start, requests, heartbeats and end. child_side.py is the child's side.

Owns the process, its socket and the reason of its end. Has no notion of what the messages mean: subclasses do. Promises
that nothing is left of the child after its end or a failed start; that a child which sends nothing for `hang_s` while
it has work is killed; and that the end of the child raises in every waiter, with the last output of the child.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tangram.core.demand import CORE
from tangram.errors import InvalidInput, ManagerError
from tangram.processes.capture import Capture
from tangram.processes.exit_codes import signal_of
from tangram.processes.fork_server import ForkServer
from tangram.processes.framing import FrameDecoder, FrameTooLong, encode_frame
from tangram.processes.pending_replies import PendingReplies
from tangram.processes.process_tree import WatchedProcess
from tangram.processes.streams import STDERR, Stream
from tangram.processes.width import with_width

START_S_MAX = 300.0
"""Time limit for a child to become ready: PyTorch is imported and weights are read, possibly from a cold disk."""
CLOSE_S_MAX = 2.0
"""Time limit for the exit of a child that was closed. It checks between two pieces of work."""
HEARTBEATS_PER_HANG = 5
"""The number of heartbeats that a child sends in `hang_s`, and of checks. Any message counts as a heartbeat."""
OUTPUT_TAIL_BYTES_MAX = 8192
"""Bytes kept of the child's output: the reason of a failure is at its end."""
OUTPUT_TAIL_SHOWN = 800
DISABLED_FORK_SERVER = ForkServer()
"""The fork server of children without one: they are executed and import for themselves."""


class ChildProcess(asyncio.Protocol, ABC):
    """Belongs to the event loop in which it was created."""

    def __init__(self, title: str, decoder: FrameDecoder[Any], hang_s: float | None) -> None:
        """`title` starts its error messages. `hang_s`: None for a child that sends no heartbeats."""
        self._title, self._decoder, self._hang_s = title, decoder, hang_s
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._replies = PendingReplies[Any]()
        self._start_error: ManagerError | InvalidInput | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._disconnected: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._process: WatchedProcess | None = None
        self._stream: Stream | None = None
        self._output = Capture(OUTPUT_TAIL_BYTES_MAX)
        self._hang_timer: asyncio.TimerHandle | None = None
        self._last_message_s = 0.0
        self._end_reason = ""
        self._ending: asyncio.Task[None] | None = None

    # ---- hooks of subclasses ----------------------------------------------------------------------------------------

    @abstractmethod
    def on_message(self, message: Any) -> None:
        """Called with each message of the child."""

    @abstractmethod
    def death_error(self, reason: str) -> ManagerError:
        """The error of requests to a child that has ended, or ends before it replies."""

    async def greet(self, hello: Any) -> None:
        """Send the first message, and block until the child is ready."""
        self.send(hello)
        await asyncio.shield(self._ready)

    def start_failure(self, error: Exception) -> ManagerError:
        """The error of a child that cannot be started, or does not get ready."""
        reason = f"cannot be started: {error}{self._output_tail()}"
        if isinstance(self._start_error, ManagerError) and error is self._start_error:
            return ManagerError(f"{self._title} {reason}", retry=self._start_error.retry)
        return self.death_error(f"it {reason}")

    def on_spawned(self) -> None:
        """Called when its process has been started."""

    def on_unexpected_exit(self) -> None:
        """Called when its process has exited and nothing ended it."""

    def on_end(self, reason: str) -> None:
        """Called when it has ended and all pending requests have failed."""

    @property
    def has_work(self) -> bool:
        """Whether heartbeats are expected."""
        return bool(self._replies)

    @property
    def silence_s_max(self) -> float:
        """The longest silence while it has work."""
        assert self._hang_s is not None
        return self._hang_s

    def hang_reason(self, silent_s: float) -> str:
        """Why it counts as hung; empty if it does not."""
        if self.has_work and silent_s > self.silence_s_max:
            return f"it sent nothing for {silent_s:.1f} s while it had work"
        return ""

    # ---- start ----

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._ending is None

    async def start(
        self, program: str, threads: int, hello: msgspec.Struct | None, fork_server: ForkServer | None
    ) -> None:
        """Run the module `program`, forked by the fork server if there is one, and block until it is ready. Raises
        ManagerError, and InvalidInput if the child rejects its settings; then nothing is left of it."""
        await self.launch(
            program,
            hello,
            name=program.rpartition(".")[2],
            env=dict(os.environ) | with_width(threads * CORE, {}),
            fork_server=fork_server or DISABLED_FORK_SERVER,
        )

    async def launch(
        self,
        program: str,
        hello: msgspec.Struct | None,
        *,
        name: str,
        env: Mapping[str, str],
        fork_server: ForkServer,
        keep: Sequence[int] = (),
    ) -> None:
        """Like `start`. `keep`: further descriptors of the process, under the same numbers."""
        try:
            await self._connect(program, keep, name, env, fork_server)
            async with asyncio.timeout(START_S_MAX):
                await self.greet(hello)
        except BaseException as error:
            await self.end("it did not get ready")
            if isinstance(error, TimeoutError):
                error = ManagerError(f"it was not ready after {START_S_MAX:.0f} s")
            if isinstance(error, ManagerError | OSError):
                raise self.start_failure(error) from error
            raise
        self._last_message_s = self._loop.time()
        self._check_heartbeat()

    async def _connect(
        self, program: str, keep: Sequence[int], name: str, env: Mapping[str, str], fork_server: ForkServer
    ) -> None:
        """Start the process and connect to it. The caller ends it if this raises. Raises OSError."""
        parent_end, child_end = socket.socketpair()
        try:
            with child_end:
                await self._spawn(program, [child_end.fileno(), *keep], name, env, fork_server)
            await self._loop.create_connection(lambda: self, sock=parent_end)
        except BaseException:
            if self._transport is None:
                parent_end.close()
                set_done(self._disconnected)
            raise

    async def _spawn(
        self, program: str, keep: Sequence[int], name: str, env: Mapping[str, str], fork_server: ForkServer
    ) -> None:
        stream = self._stream = Stream(STDERR)
        stream.begin(self._output, None)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._process = await fork_server.spawn(
                program, keep, name=name, env=env, streams=(null, stream.writer, stream.writer)
            )
        finally:
            os.close(null)
            stream.close_writer()
        self._process.exited.add_done_callback(self._on_exit)
        self.on_spawned()

    def mark_ready(self) -> None:
        set_done(self._ready)

    def fail_start(self, error: ManagerError | InvalidInput) -> None:
        """The child reports that it cannot become ready."""
        self._start_error = error
        self._fail_ready(error)

    def _fail_ready(self, error: ManagerError | InvalidInput) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # there may be no waiter any more

    # ---- requests ----

    def require_ready(self) -> None:
        if not self.alive:
            raise self.death_error(self._end_reason or "it does not run")
        if not self._ready.done():
            raise self.death_error("it is being started")

    def send(self, command: msgspec.Struct) -> None:
        """Raises FrameTooLong."""
        frame = encode_frame(command, self._decoder.bytes_max)
        if not self.alive:
            return  # waiters get the reason of the end
        assert self._transport is not None
        if not self.has_work:
            self._last_message_s = self._loop.time()  # silence counts from the first piece of work
        self._transport.write(frame)

    def next_number(self) -> int:
        return next(self._numbers)

    async def request(self, number: int, command: msgspec.Struct) -> Any:
        """Send a request and return the reply that `resolve` gets with this number."""
        if self._ending is not None:
            await asyncio.shield(self._ending)  # so that the reason of the end is known
        self.require_ready()
        self.send(command)
        reply = self._replies.expect(number)
        try:
            return await reply
        finally:
            self._replies.discard(number)

    def resolve(self, number: int, reply: Any) -> None:
        self._replies.resolve(number, reply)

    # ---- messages of the child ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, content: bytes) -> None:
        self._last_message_s = self._loop.time()
        try:
            for message in self._decoder.feed(content):
                self.on_message(message)
        except (FrameTooLong, msgspec.DecodeError) as error:
            self._begin_end(f"it sent an invalid message: {error}")

    def reset_hang_timer(self) -> None:
        """Start to measure the silence again."""
        self._last_message_s = self._loop.time()

    def _check_heartbeat(self) -> None:
        """Called periodically: end a child that has been silent for too long."""
        if self._hang_s is None:
            return
        if reason := self.hang_reason(self._loop.time() - self._last_message_s):
            self._begin_end(reason)
        elif self._ending is None:
            self._hang_timer = self._loop.call_later(self._hang_s / HEARTBEATS_PER_HANG, self._check_heartbeat)

    # ---- end ----

    def connection_lost(self, error: Exception | None) -> None:
        """It closed its end, which it does only by exiting."""
        set_done(self._disconnected)
        self._begin_end("")

    def _on_exit(self, exited: asyncio.Future[None]) -> None:
        unexpected = self.alive
        self._begin_end("")
        if unexpected:
            self.on_unexpected_exit()

    async def close(self, message: msgspec.Struct) -> None:
        if self.alive:
            self._end_reason = "it was closed"
            self.send(message)
            assert self._process is not None
            await asyncio.wait({self._process.exited}, timeout=CLOSE_S_MAX)
        await self.end("it was closed")

    async def end(self, why: str) -> None:
        """End the child; returns when nothing is left, also if another caller began it."""
        self._begin_end(why)
        assert self._ending is not None
        await asyncio.shield(self._ending)

    def _begin_end(self, why: str) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(why or self._end_reason))

    async def _end(self, why: str) -> None:
        if self._hang_timer is not None:
            self._hang_timer.cancel()
        if self._process is not None:
            if not why:  # it exits by itself, and its exit code is the reason
                await asyncio.wait({self._process.exited}, timeout=CLOSE_S_MAX)
            await self.kill_remaining()
            await asyncio.wait({self._process.exited})
            # The end of the stream follows all messages.
            await asyncio.wait({self._disconnected}, timeout=CLOSE_S_MAX)
            code, _ = await self._process.collect_exit()
            why = why or f"it ended with {_describe_exit_code(code)}"
        if self._stream is not None:
            self._stream.end()
            self._stream.close()
        if self._transport is not None:
            self._transport.abort()
        await asyncio.sleep(0)  # the transport closes its socket in the next iteration of the loop
        self._end_reason = f"{why}{self._output_tail()}"
        self._fail_ready(ManagerError(why))
        self._replies.fail_all(lambda: self.death_error(self._end_reason))
        self.on_end(self._end_reason)

    async def kill_remaining(self) -> None:
        """Kill what still runs of it."""
        if self._process is not None and not self._process.exited.done():
            self._process.signal(signal.SIGKILL)

    def _output_tail(self) -> str:
        tail = self._output.text().strip()
        return f"; its last output: …{tail[-OUTPUT_TAIL_SHOWN:]}" if tail else ""


def set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _describe_exit_code(code: int | None) -> str:
    if code is None:
        return "an unknown code"
    return f"signal {number}" if (number := signal_of(code)) else f"code {code}"
