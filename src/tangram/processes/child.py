"""A child process, from its supervisor's side: its start, its heartbeats and its end.

Owns the process, its socket and what is known of its end. Never knows what the messages mean: whoever makes a child of
it does. Promises that nothing is left of it after its end, nor after a start that failed; that a child which says
nothing for `hang_s` while it has work counts as dead and is killed; and that whoever waits for an answer of it is told
of its end, with what it said last.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from abc import abstractmethod
from typing import Any

import msgspec

from tangram.core.demand import CORE
from tangram.errors import InvalidInput, ManagerError
from tangram.processes.capture import Capture
from tangram.processes.fork_server import Nursery
from tangram.processes.framing import Frames, FrameTooLong, framed
from tangram.processes.process_tree import SIGNAL_EXIT_BASE, Watched
from tangram.processes.streams import STDERR, Stream
from tangram.processes.width import told

START_S_MAX = 300.0
"""To be ready: PyTorch is imported and weights are read, from a cold disk perhaps."""
CLOSE_S_MAX = 2.0
"""To end by itself when it was asked to. It looks between two pieces of work."""
BEATS_PER_HANG = 5
LAST_WORDS_BYTES_MAX = 8192
"""Kept of what the child writes: a reason is at its end."""
LAST_WORDS_SHOWN = 800
EXECUTED = Nursery()
"""Of children for whom there is none: they import for themselves."""


class ChildLife(asyncio.Protocol):
    """It belongs to the event loop in which it was made."""

    def __init__(self, title: str, frames: Frames[Any], hang_s: float) -> None:
        """`title` stands before what is said of it."""
        self._title, self._frames, self._hang_s = title, frames, hang_s
        self._loop = asyncio.get_running_loop()
        self._answer_by_ask: dict[int, asyncio.Future[Any]] = {}
        """Of questions that are not answered yet, by their number."""
        self._refusal: ManagerError | InvalidInput | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._disconnected: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._process: Watched | None = None
        self._stream: Stream | None = None
        self._said = Capture(LAST_WORDS_BYTES_MAX)
        self._watch: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._why = ""
        self._ending: asyncio.Task[None] | None = None

    # ---- what is different from one kind of child to the other ----

    @abstractmethod
    def take(self, answer: Any) -> None:
        """Something that it said."""

    @abstractmethod
    def died(self, reason: str) -> ManagerError:
        """What is raised for whoever asked something of a child that is dead or dies before it answers."""

    def on_end(self, reason: str) -> None:
        """It has ended; whoever waits for an answer by number has been told."""

    @property
    def has_work(self) -> bool:
        """Whether it should say something now and then."""
        return bool(self._answer_by_ask)

    @property
    def silence_s_max(self) -> float:
        """While it has work."""
        return self._hang_s

    def complaint(self, silent_s: float) -> str:
        """Why it counts as dead; nothing, if it does not."""
        if self.has_work and silent_s > self.silence_s_max:
            return f"it said nothing for {silent_s:.1f} s while it had work"
        return ""

    # ---- start ----

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._ending is None

    async def start(self, program: str, threads: int, hello: msgspec.Struct, nursery: Nursery | None) -> None:
        """The module `program` runs, born by the nursery if there is one, was greeted and is ready. Raises
        ManagerError, and InvalidInput if that is what it was refused for; and has left nothing."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._spawn(program, theirs.fileno(), threads, nursery or EXECUTED)
            await self._loop.create_connection(lambda: self, sock=ours)
            self.send(hello)
            async with asyncio.timeout(START_S_MAX):
                await asyncio.shield(self._ready)
        except BaseException as error:
            if self._transport is None:
                ours.close()
                _settle(self._disconnected)
            await self.end("it did not get ready")
            if isinstance(error, TimeoutError):
                error = ManagerError(f"it was not ready after {START_S_MAX:.0f} s")
            if isinstance(self._refusal, ManagerError) and error is self._refusal:
                reason = f"{self._title} cannot be started: {error}{self._last_words()}"
                raise ManagerError(reason, retry=self._refusal.retry) from error
            if isinstance(error, ManagerError | OSError):
                raise self.died(f"it cannot be started: {error}{self._last_words()}") from error
            raise
        self._heard_s = self._loop.time()
        self._look()

    async def _spawn(self, program: str, fd: int, threads: int, nursery: Nursery) -> None:
        stream = self._stream = Stream(STDERR)
        stream.begin(self._said, None)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._process = await nursery.bear(
                program,
                [fd],
                name=program.rpartition(".")[2],
                env=dict(os.environ) | told(threads * CORE, {}),
                streams=(null, stream.writer, stream.writer),
            )
        finally:
            os.close(null)
            stream.close_writer()
        self._process.exited.add_done_callback(self._on_exit)

    def now_ready(self) -> None:
        _settle(self._ready)

    def refused(self, error: ManagerError | InvalidInput) -> None:
        """It says itself that it cannot get ready."""
        self._refusal = error
        self._never_ready(error)

    def _never_ready(self, error: ManagerError | InvalidInput) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps nobody waits for it any more

    # ---- what is said to it ----

    def require_ready(self) -> None:
        if not self.alive:
            raise self.died(self._why or "it does not run")
        if not self._ready.done():
            raise self.died("it is being started")

    def send(self, command: msgspec.Struct) -> None:
        """Raises FrameTooLong."""
        frame = framed(command)
        if not self.alive:
            return  # whoever asked is told of the end
        assert self._transport is not None
        if not self.has_work:
            self._heard_s = self._loop.time()  # silence counts from when there was something to say
        self._transport.write(frame)

    async def ask(self, number: int, command: msgspec.Struct) -> Any:
        """What is said by `answered` with this number."""
        if self._ending is not None:
            await asyncio.shield(self._ending)  # so that it can be said what it died of
        self.require_ready()
        answer = self._loop.create_future()
        self.send(command)
        self._answer_by_ask[number] = answer
        try:
            return await answer
        finally:
            del self._answer_by_ask[number]

    def answered(self, number: int, answer: Any) -> None:
        waits = self._answer_by_ask.get(number)
        if waits is not None and not waits.done():
            waits.set_result(answer)

    # ---- what it says ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, content: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            for answer in self._frames.feed(content):
                self.take(answer)
        except (FrameTooLong, msgspec.DecodeError) as error:
            self._begin_end(f"it said what is no message: {error}")

    def heard_now(self) -> None:
        """Silence counts from here."""
        self._heard_s = self._loop.time()

    def _look(self) -> None:
        """Every now and then: does it still say something?"""
        if complaint := self.complaint(self._loop.time() - self._heard_s):
            self._begin_end(complaint)
        elif self._ending is None:
            self._watch = self._loop.call_later(self._hang_s / BEATS_PER_HANG, self._look)

    # ---- end ----

    def connection_lost(self, error: Exception | None) -> None:
        """It closed its end, which it does only by ending."""
        _settle(self._disconnected)
        self._begin_end("")

    def _on_exit(self, exited: asyncio.Future[None]) -> None:
        self._begin_end("")

    async def close(self, farewell: msgspec.Struct) -> None:
        if self.alive:
            self._why = "it was closed"
            self.send(farewell)
            assert self._process is not None
            await asyncio.wait({self._process.exited}, timeout=CLOSE_S_MAX)
        await self.end("it was closed")

    async def end(self, why: str) -> None:
        """Returns when nothing is left, whoever began it and whoever does not wait for it any more."""
        self._begin_end(why)
        assert self._ending is not None
        await asyncio.shield(self._ending)

    def _begin_end(self, why: str) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(why or self._why))

    async def _end(self, why: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None:
            if not why:  # it ends by itself, and its exit code says how
                await asyncio.wait({self._process.exited}, timeout=CLOSE_S_MAX)
            if not self._process.exited.done():
                self._process.signal(signal.SIGKILL)
            await asyncio.wait({self._process.exited})
            # All that it had said has been read when the end of the stream is.
            await asyncio.wait({self._disconnected}, timeout=CLOSE_S_MAX)
            code, _ = self._process.reap()
            why = why or f"it ended with {_in_words(code)}"
        if self._stream is not None:
            self._stream.end()
            self._stream.close()
        if self._transport is not None:
            self._transport.abort()
        await asyncio.sleep(0)  # the transport closes its socket in the next turn of the loop
        self._why = f"{why}{self._last_words()}"
        self._never_ready(ManagerError(why))
        for waits in self._answer_by_ask.values():
            if not waits.done():
                waits.set_exception(self.died(self._why))
        self.on_end(self._why)

    def _last_words(self) -> str:
        said = self._said.text().strip()
        return f"; it said last: …{said[-LAST_WORDS_SHOWN:]}" if said else ""


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _in_words(code: int | None) -> str:
    if code is None:
        return "an unknown code"
    return f"signal {code - SIGNAL_EXIT_BASE}" if code > SIGNAL_EXIT_BASE else f"code {code}"
