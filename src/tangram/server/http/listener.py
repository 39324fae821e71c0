"""Listening: a socket, and HTTP on it by uvicorn.

Owns the connections. Promises that whoever connects and says nothing, or says it slowly, or sends headers without end,
or goes on sending what nobody reads any more, or does not read its answer, is cut off; and that stopping answers those
who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tangram.errors import InvalidConfig
from tangram.runtime.error_records import Fault
from tangram.server.http.middleware import STATUS_BY_CODE, problem

HEADER_S = 20.0
"""Until a request is known by its headers."""
HEADER_BYTES_MAX = 64 << 10
HEADER_BYTES = 32
"""What each header counts besides its characters: it takes memory, however short it is."""
LINGER_S = 10.0
"""For the rest of a body after its request was answered: whoever is still sending reads the answer only then."""
READ_S = 60.0
"""For a client to take what fills the buffers between; then it is taken for gone."""
KEEP_ALIVE_S = 75.0
STOP_S = 10.0
"""For answers that are under way when the service stops."""
BACKLOG = 4096

log = logging.getLogger("tangram.http")


class Phase(enum.Enum):
    """What comes next on a connection."""

    IDLE = enum.auto()
    """A request, or none."""
    HEAD = enum.auto()
    BODY = enum.auto()


class Patience(HttpToolsProtocol):
    """HTTP on one connection, with limits on all that uvicorn would wait for without end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections_max, self.limit_concurrency = self.limit_concurrency, None
        """Kept here: the refusal of uvicorn names no limit, and comes only after a request."""
        self._phase = Phase.HEAD
        self._watched: tuple[Phase, bool] | None = None
        """What the alarm is for: the phase, and whether the last request was answered."""
        self._alarm: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        """Rings when the client does not take its answer."""
        self._header_bytes = 0
        self._idle_bytes = 0
        """Bytes that came since the last of which something came."""

    # ---- what comes in ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self._connections_max
        if most is not None and len(self.connections) > most:
            self._refuse(
                Fault(code="rate", message=f"{most} connections are open", limit="connections_max", retry=True)
            )
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        self._taken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._idle_bytes += len(data)
            if self._idle_bytes > HEADER_BYTES_MAX + len(data):
                self.transport.abort()
            self._watch()

    def on_message_begin(self) -> None:
        self._phase, self._watched = Phase.HEAD, None
        self._header_bytes = self._idle_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER_BYTES)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._phase, self._idle_bytes = Phase.BODY, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase, self._idle_bytes = Phase.IDLE, 0
        super().on_message_complete()

    # ---- how long ----

    def _watch(self) -> None:
        """Have the alarm ring if what comes next does not come in time. What we do not let in is not waited for."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._phase is Phase.IDLE and is_answered and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.timeout_keep_alive_handler)
        now = None if self.flow.read_paused else (self._phase, is_answered)
        if now == self._watched:
            return
        self._watched = now
        self._relax()
        if now is not None and self._phase is Phase.HEAD:
            self._alarm = self.loop.call_later(HEADER_S, self.transport.abort)
        elif now is not None and self._phase is Phase.BODY and is_answered:
            self._alarm = self.loop.call_later(LINGER_S, self.transport.abort)

    def _relax(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # ---- what goes out ----

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_taken()
        else:
            self._watch()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # to close it would wait until the last answer is taken

    def pause_writing(self) -> None:
        self._expect_taken()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._taken()
        if self.transport.is_closing():
            self._expect_taken()  # the rest
        super().resume_writing()

    def _expect_taken(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(READ_S, self.transport.abort)

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        log.warning("malformed request address=%r", self.client[0] if self.client else "")
        self._refuse(Fault(code="invalid_http", message="this is no HTTP that can be understood"))

    def _refuse(self, fault: Fault) -> None:
        """An answer to what is no request that the application could see."""
        status = STATUS_BY_CODE[fault.code]
        answer = problem(fault, status)
        head = [b"HTTP/1.1 %d \r\n" % status, b"connection: close\r\n"]
        head += [b"%s: %s\r\n" % (name, value) for name, value in answer.raw_headers]
        self.transport.write(b"".join([*head, b"\r\n", bytes(answer.body)]))
        self._relax()
        self._expect_taken()
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Anybody can ask for that as often as they like: it is answered as what it is besides, and not logged."""


def _is_news(record: logging.LogRecord) -> bool:
    """Of what uvicorn logs: `send_400_response` says it as well, with the address."""
    return record.msg != "Invalid HTTP request received."


class _Server(uvicorn.Server):
    """Signals are the service's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Raises InvalidConfig if nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is said, because asyncio asks for it before it turns off Nagle's algorithm on what is accepted:
    # without that, the body of every answer waits some 40 ms for the client's acknowledgement of its head.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise InvalidConfig(
            "service.listen", f"{host}:{port}", f"an address of this machine that is free ({error})"
        ) from None
    return listening


@asynccontextmanager
async def serving(
    app: Starlette, listening: socket.socket, *, connections_max: int, certificate: str = "", key: str = ""
) -> AsyncIterator[None]:
    """The app answers on that socket, until the context is left."""
    config = uvicorn.Config(
        app,
        http=Patience,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=int(STOP_S),
        limit_concurrency=connections_max,
        backlog=BACKLOG,
        ssl_certfile=certificate or None,
        ssl_keyfile=key or None,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="http")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise InvalidConfig("service", "the HTTP server", "one that starts; the log says why it did not")
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
