"""Listening: a socket, and HTTP on it by uvicorn.

Owns the connections. Promises that whoever connects and says nothing, or says it slowly, or sends headers without end,
is cut off; and that stopping answers those who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tangram.errors import InvalidConfig

HEADER_S = 20.0
"""Until a request is known by its headers."""
HEADER_BYTES_MAX = 64 << 10
KEEP_ALIVE_S = 75.0
STOP_S = 10.0
"""For answers that are under way when the service stops."""
BACKLOG = 4096


class Patience(HttpToolsProtocol):
    """HTTP on one connection, with limits on what comes before a body."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._alarm: asyncio.TimerHandle | None = None
        self._header_bytes = 0

    def _expect(self) -> None:
        if self._alarm is None:
            self._alarm = self.loop.call_later(HEADER_S, self._give_up)

    def _give_up(self) -> None:
        self._alarm = None
        self.transport.abort()

    def _relax(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._expect()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._relax()
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """Signals are the service's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Raises InvalidConfig if nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
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
        date_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=int(STOP_S),
        limit_concurrency=connections_max,
        backlog=BACKLOG,
        ssl_certfile=certificate or None,
        ssl_keyfile=key or None,
    )
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
