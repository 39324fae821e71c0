"""An instance of a function, seen from its owner: a socket, two streams and the news of its end.

Owns our ends of them. Decides nothing: whoever has it says what it is to do and when it is to end. Promises that a call
brings exactly one of two: a reply, or the news that the instance is gone; and that no descriptor outlives that news.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec

from tangram.errors import ManagerError
from tangram.managers.functions.template import REPLY, REQUEST
from tangram.managers.functions.work import ANSWER_BYTES_MAX, Failure
from tangram.managers.work import KIB, MIB, Executed
from tangram.processes.capture import Capture
from tangram.processes.streams import STDERR, STDOUT, Output, Stream

CAPTURE_BYTES_MAX = 256 * KIB
"""Of each stream of a call: it is there to explain failures."""
HEAD_BYTES_MAX = 1 * MIB
"""Of what is said about a call: mostly a traceback, which the instance cuts."""
READ_BYTES = 256 * KIB


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of a call."""

    failure: Failure | None
    cpu_s: float
    peak_bytes: int
    keep: bool
    """Whether it can be called again."""
    value: bytes = b""
    """msgpack."""


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """What the template says of an instance that has ended, with all that it started."""

    gone: int
    """Its number."""
    code: int | None = None
    """Negative for a signal; None: nobody knows, and `error` says why."""
    cpu_s: float = 0.0
    peak_bytes: int = 0
    excess: int = 0
    """It was ended because it had so many processes."""
    left: list[int] = []
    """Processes that could not be killed."""
    error: str = ""


class Garbled(Exception):
    """An instance said what is no reply: the function wrote to a descriptor that is not its own."""


_decode = msgspec.msgpack.Decoder(Reply).decode


class Instance:
    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.calls = 0
        self.cpu_s = 0.0
        """Of its calls so far."""
        self.idle_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.began_s = self._loop.time()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """It can be called. Raises what kept it from that."""
        self.gone: asyncio.Future[Gone] = self._loop.create_future()
        """Nothing of it is left."""
        self._socket, self._given = socket.socketpair()
        self._socket.setblocking(False)
        self._streams = (Stream(STDOUT), Stream(STDERR))
        self._captures = (Capture(0), Capture(0))
        self._on_reply: Callable[[Reply | Garbled], None] | None = None
        self._heard = bytearray()
        self._ahead = memoryview(b"")
        self._closed = False
        self._loop.add_reader(self._socket, self._read)

    @property
    def given(self) -> list[int]:
        """The ends that it gets: of its socket and of its streams."""
        return [self._given.fileno(), self._streams[0].writer, self._streams[1].writer]

    def close_given(self) -> None:
        self._given.close()
        for stream in self._streams:
            stream.close_writer()

    @property
    def usable(self) -> bool:
        """Whether it still listens. It may have died a moment ago."""
        if self._closed or self.gone.done():
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    # ---- a call ----

    def expect(self, on_reply: Callable[[Reply | Garbled], None]) -> None:
        """Its next reply goes there."""
        assert self._on_reply is None, "an instance serves one call at a time"
        self._on_reply = on_reply

    def listen(self, output: Output | None) -> None:
        """What it writes from now on belongs to a call."""
        self._captures = (Capture(CAPTURE_BYTES_MAX), Capture(CAPTURE_BYTES_MAX))
        for stream, capture in zip(self._streams, self._captures, strict=True):
            stream.begin(capture, output)

    def call(self, arguments: bytes, on_reply: Callable[[Reply | Garbled], None]) -> None:
        self.expect(on_reply)
        self.calls += 1
        self._ahead = memoryview(REQUEST.pack(len(arguments)) + arguments)
        self._write()

    def executed(self) -> Executed:
        """What the call wrote. What comes later is discarded."""
        for stream in self._streams:
            stream.end()
        out, err = self._captures
        return Executed(
            stdout=out.content(), stderr=err.content(), stdout_bytes=out.total_bytes, stderr_bytes=err.total_bytes
        )

    def end_of_life(self, gone: Gone) -> None:
        """The template has said so."""
        if self.gone.done():
            return
        if not self.ready.done():
            self.ready.set_exception(ManagerError(gone.error or "an instance ended before it could be called"))
            self.ready.exception()  # taken note of: whoever waited may have gone
        for stream in self._streams:
            stream.end()  # to what it wrote in the end
        self.close()
        self.gone.set_result(gone)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self.close_given()
            for stream in self._streams:
                stream.close()

    # ---- its socket ----

    def _write(self) -> None:
        if self._closed:
            return
        try:
            while self._ahead:
                self._ahead = self._ahead[self._socket.send(self._ahead) :]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._ahead = memoryview(b"")  # it is gone, which its template tells
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket)  # its end is told by the template
            return
        self._heard += data
        if self._on_reply is None:
            self._heard.clear()  # nobody asked
            return
        try:
            reply = self._parsed()
        except (Garbled, msgspec.MsgspecError) as error:
            self._loop.remove_reader(self._socket)
            self._tell(error if isinstance(error, Garbled) else Garbled(str(error)))
            return
        if reply is not None:
            self._tell(reply)

    def _parsed(self) -> Reply | None:
        """None: not all of it has come."""
        if len(self._heard) < REPLY.size:
            return None
        head, value = REPLY.unpack_from(self._heard)
        if head > HEAD_BYTES_MAX or value > ANSWER_BYTES_MAX:
            raise Garbled(f"a reply of {head} and {value} bytes")
        if len(self._heard) < REPLY.size + head + value:
            return None
        said = _decode(memoryview(self._heard)[REPLY.size : REPLY.size + head])
        found = bytes(self._heard[REPLY.size + head : REPLY.size + head + value])
        self._heard = bytearray()
        return msgspec.structs.replace(said, value=found)

    def _tell(self, reply: Reply | Garbled) -> None:
        tell, self._on_reply = self._on_reply, None
        assert tell is not None
        tell(reply)
