"""The listener: a socket, and HTTP on it by uvicorn.

Owns the connections. Disconnects clients that send nothing, send slowly, send endless headers, keep sending after their
response, or do not read their response. A stop responds to requests in flight first.
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
from tangram.runtime.error_records import ErrorRecord
from tangram.server.http.responses import STATUS_BY_CODE, problem_response

HEADER_TIMEOUT_S = 20.0
"""Time until the headers of a request are complete."""
HEADER_BYTES_MAX = 64 << 10
HEADER_OVERHEAD_BYTES = 32
"""Memory of each header beside its characters."""
LINGER_TIMEOUT_S = 10.0
"""Time for the rest of a body after its response: a client that still sends reads the response only then."""
SEND_TIMEOUT_S = 60.0
"""Time for a client to read full socket buffers; then the connection is closed."""
KEEP_ALIVE_S = 75.0
GRACEFUL_SHUTDOWN_S = 10.0
"""Time for responses in flight when the server stops."""
BACKLOG = 4096

log = logging.getLogger("tangram.http")


class ConnectionPhase(enum.Enum):
    """The next thing expected on a connection."""

    IDLE = enum.auto()
    """A request, or nothing."""
    HEAD = enum.auto()
    BODY = enum.auto()


class TimeoutHttpProtocol(HttpToolsProtocol):
    """HTTP on one connection, with timeouts where uvicorn would wait forever."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections_max, self.limit_concurrency = self.limit_concurrency, None
        """Counted here: uvicorn's own limit has no name and applies only after a request."""
        self._phase = ConnectionPhase.HEAD
        self._armed_for: tuple[ConnectionPhase, bool] | None = None
        """Phase that the timer watches, and whether the last request was answered."""
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        """Fires when the client does not read its response."""
        self._header_bytes = 0
        self._idle_bytes = 0
        """Bytes received when the last progress was seen."""

    # ---- input ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self._connections_max
        if most is not None and len(self.connections) > most:
            self._reject(
                ErrorRecord(
                    code="rate",
                    message=f"{most} connections are open, the maximum",
                    limit="connections_max",
                    retry=True,
                )
            )
        else:
            self._arm_receive_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_receive_timer()
        self._cancel_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._idle_bytes += len(data)
            if self._idle_bytes > HEADER_BYTES_MAX + len(data):
                self.transport.abort()
            self._arm_receive_timer()

    def on_message_begin(self) -> None:
        self._phase, self._armed_for = ConnectionPhase.HEAD, None
        self._header_bytes = self._idle_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        super().on_header(name, value)

    def _count_header_bytes(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._phase, self._idle_bytes = ConnectionPhase.BODY, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase, self._idle_bytes = ConnectionPhase.IDLE, 0
        super().on_message_complete()

    # ---- timer ----

    def _arm_receive_timer(self) -> None:
        """Sets the timer for the next phase. A request that is not admitted has none."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._phase is ConnectionPhase.IDLE and is_answered and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_S, self.timeout_keep_alive_handler)
        now = None if self.flow.read_paused else (self._phase, is_answered)
        if now == self._armed_for:
            return
        self._armed_for = now
        self._cancel_receive_timer()
        if now is not None and self._phase is ConnectionPhase.HEAD:
            self._receive_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)
        elif now is not None and self._phase is ConnectionPhase.BODY and is_answered:
            self._receive_timer = self.loop.call_later(LINGER_TIMEOUT_S, self.transport.abort)

    def _cancel_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    # ---- output ----

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm_send_timer()
        else:
            self._arm_receive_timer()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # close() would wait until the client has read the last response

    def pause_writing(self) -> None:
        self._arm_send_timer()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._cancel_send_timer()
        if self.transport.is_closing():
            self._arm_send_timer()  # the rest
        super().resume_writing()

    def _arm_send_timer(self) -> None:
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(SEND_TIMEOUT_S, self.transport.abort)

    def _cancel_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def send_400_response(self, msg: str) -> None:
        log.warning("malformed request address=%r", self.client[0] if self.client else "")
        self._reject(ErrorRecord(code="invalid_http", message="malformed HTTP"))

    def _reject(self, error_record: ErrorRecord) -> None:
        """Responds to bytes that are not a request; the application does not receive them."""
        status = STATUS_BY_CODE[error_record.code]
        response = problem_response(error_record, status)
        head = [b"HTTP/1.1 %d \r\n" % status, b"connection: close\r\n"]
        head += [b"%s: %s\r\n" % (name, value) for name, value in response.raw_headers]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self._cancel_receive_timer()
        self._arm_send_timer()
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignores upgrades and does not log them: any client can send them at any rate."""


def _is_not_duplicate(record: logging.LogRecord) -> bool:
    """Drops a log line of uvicorn: `send_400_response` logs the same with the address."""
    return record.msg != "Invalid HTTP request received."


class _UvicornServer(uvicorn.Server):
    """The server handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Raises InvalidConfig if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is explicit because asyncio checks it before it turns off Nagle's algorithm on accepted sockets.
    # Without that, the body of every response waits about 40 ms for the client's acknowledgement of the headers.
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
    """Serves the app on the socket until the context is left."""
    config = uvicorn.Config(
        app,
        http=TimeoutHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=int(GRACEFUL_SHUTDOWN_S),
        limit_concurrency=connections_max,
        backlog=BACKLOG,
        ssl_certfile=certificate or None,
        ssl_keyfile=key or None,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_not_duplicate)
    server = _UvicornServer(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="http")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise InvalidConfig("service", "the HTTP server", "a server that starts; see the log")
            await asyncio.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
