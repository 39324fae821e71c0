"""The process of a device, seen from the manager: started, asked, and ended with all that it started itself.

Owns the child, its socket and what is known of its end. Promises that whoever asked is answered: if the process ends
first, by ProcessLost. Nothing of it is left after `end`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from tangram.core.demand import CORE
from tangram.errors import ManagerError
from tangram.managers.models.messages import (
    HEADER_BYTES,
    AnyReply,
    AnyRequest,
    Begun,
    Done,
    Failed,
    Interrupt,
    framed,
    replies,
)
from tangram.processes.capture import Capture
from tangram.processes.fork_server import Nursery
from tangram.processes.process_tree import ACTION_MARK, SIGNAL_EXIT_BASE, Census, Kin, Watched
from tangram.processes.streams import STDERR, Stream
from tangram.processes.width import told

PROGRAM = f"{__package__}.device_server"
LAST_WORDS_BYTES_MAX = 8192
"""Kept of what engines write: a reason is at its end."""
LAST_WORDS_SHOWN = 800
START_S_MAX = 300.0
"""To be ready: PyTorch and models are imported, from a cold disk perhaps."""


def search_path() -> str:
    """What a program says first to import what this process can, and what lies where it was started."""
    return f"import sys; sys.path[:] = {[*sys.path, os.getcwd()]!r}"


def environment() -> dict[str, str]:
    """One thread: devices are many and cores are few. Who wants more says so in the environment."""
    return told(CORE, dict(os.environ))


class ProcessLost(ManagerError):
    """The process has ended, and what was asked of it with it."""

    begun = False
    """Whether it had begun to call an engine."""


class NotReady(ManagerError):
    """The process could not be started: the fault of its machine or its device, of no single service."""


class ServiceFailed(ManagerError):
    """The engine failed, and the process lives on."""

    def __init__(self, failed: Failed) -> None:
        self.failed = failed
        super().__init__(failed.reason)


class DeviceProcess(asyncio.Protocol):
    """One process. `on_end` is told once, when it has ended without being asked to."""

    def __init__(self, name: str, census: Census, on_end: Callable[[DeviceProcess], None], nursery: Nursery) -> None:
        self.name = name
        self._on_end = on_end
        self._nursery = nursery
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[AnyReply]] = {}
        self._begun: set[int] = set()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._mark = f"model-{os.getpid()}-{secrets.token_hex(8)}."
        self._kin = Kin(census, ACTION_MARK, self._mark)
        self._said = Capture(LAST_WORDS_BYTES_MAX)
        self._child: Watched | None = None
        self._stream: Stream | None = None
        self._why = ""
        self._ending: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._child is not None and self._ending is None

    @property
    def has_ended(self) -> bool:
        """Perhaps before the loop heard of it."""
        return self._child is None or self._ending is not None or self._child.has_ended

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    # ---- start ----

    async def start(self, hello: AnyRequest | None, descriptors: Sequence[int]) -> None:
        """Raises NotReady, and has left nothing."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._spawn([theirs.fileno(), *descriptors])
            await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        except BaseException as error:
            ours.close()
            await self.end("it could not be started")
            if isinstance(error, OSError):
                raise NotReady(f"{self.name} cannot be started: {error}") from error
            raise
        if self._ending is not None:
            self._abort()
            raise NotReady(self._why or f"{self.name} ended while it was started")
        if hello is None:
            return
        try:
            async with asyncio.timeout(START_S_MAX):
                await self.ask(hello)
        except BaseException as error:
            await self.end("it did not get ready")
            if isinstance(error, TimeoutError):
                raise NotReady(f"{self.name} was not ready after {START_S_MAX:.0f} s{self._last_words()}") from None
            if isinstance(error, ManagerError):
                raise NotReady(f"{self.name} did not get ready: {error}") from error
            raise

    async def _spawn(self, descriptors: Sequence[int]) -> None:
        stream = self._stream = Stream(STDERR)
        stream.begin(self._said, None)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._child = await self._nursery.bear(
                PROGRAM,
                descriptors,
                name="model_device",
                env=environment() | {ACTION_MARK: self._mark},
                streams=(null, stream.writer, stream.writer),
            )
        finally:
            os.close(null)
            stream.close_writer()
        self._kin.include(self._child.pid)
        self._child.exited.add_done_callback(self._on_exit)

    # ---- asking ----

    def next_id(self) -> int:
        return next(self._ids)

    async def ask(self, request: AnyRequest) -> Done:
        """Raises ProcessLost, or ServiceFailed."""
        if not self.alive or self._transport is None:
            raise ProcessLost(self._why or f"{self.name} does not run")
        answered: asyncio.Future[AnyReply] = asyncio.get_running_loop().create_future()
        self._asked[request.id] = answered
        try:
            self._transport.write(framed(request))
            reply = await answered
        except ProcessLost as error:
            error.begun = request.id in self._begun
            raise
        finally:
            self._asked.pop(request.id, None)
            self._begun.discard(request.id)
        if isinstance(reply, Failed):
            raise ServiceFailed(reply)
        return reply

    def interrupt(self, call: int) -> None:
        if self.alive and self._transport is not None:
            self._transport.write(framed(Interrupt(id=0, call=call)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(buffer[:HEADER_BYTES], "little")
            if len(buffer) < end:
                return
            reply = replies.decode(memoryview(buffer)[HEADER_BYTES:end])
            del buffer[:end]
            if isinstance(reply, Begun):
                self._begun.add(reply.id)
                continue
            answered = self._asked.get(reply.id)
            if answered is not None and not answered.done():
                answered.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        """It closed its end, which it does only by ending."""
        if self.alive:
            assert self._child is not None
            self._child.signal(signal.SIGKILL)

    # ---- end ----

    def _on_exit(self, exited: asyncio.Future[None]) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(""))
            self._on_end(self)

    async def end(self, why: str) -> None:
        """Kill it, and all that it started. Returns when nothing is left, whoever began it."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end(why))
        await asyncio.shield(self._ending)

    async def _end(self, why: str) -> None:
        if self._child is not None:
            await self._kin.kill()
            await asyncio.wait({self._child.exited})
            code, _ = self._child.reap()
            why = why or f"it ended with {_in_words(code)}"
        if self._stream is not None:
            self._stream.end()
            self._stream.close()
        self._abort()
        await asyncio.sleep(0)  # the transport closes its socket in the next turn of the loop
        self._why = f"{self.name}: {why}{self._last_words()}"
        for answered in self._asked.values():
            if not answered.done():
                answered.set_exception(ProcessLost(self._why))

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _last_words(self) -> str:
        said = self._said.text().strip()
        return f"; it said last: …{said[-LAST_WORDS_SHOWN:]}" if said else ""


def _in_words(code: int | None) -> str:
    if code is None:
        return "an unknown code"
    if code > SIGNAL_EXIT_BASE:
        return f"signal {code - SIGNAL_EXIT_BASE}"
    return f"code {code}"
