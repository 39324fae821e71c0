"""The connections of an engine to an external server, from its start to its close.

Owns connections, not the protocol on them. Never retries. Promises that closing fails all waiting calls immediately
(HttpSessionClosed), that a server that sends nothing for `silent_s_max` raises TimeoutError unless it is suspended, and
that a response that is not read to its end is aborted at the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from tangram.managers.http import HttpClient, HttpStream, Timeouts
from tangram.rl.inference.engines.server_adapters import SHOWN_CHARACTERS

RESPONSE_BYTES_MAX = 64 << 20
"""Limit of a response, or of one line of a stream: far more than the ids and log-probabilities of a long context."""
EVENT, DONE = b"data:", b"[DONE]"
"""Prefix of a data line of a server-sent event stream, and the content of the last one."""


class HttpSessionClosed(Exception):
    """The session was closed by this process."""


class HttpSession:
    """Create it in a running event loop, and close it once."""

    def __init__(
        self, url: str, headers: Mapping[str, str], *, silent_s_max: float, is_response_due: Callable[[], bool]
    ) -> None:
        """`is_response_due`: whether the server should have sent something during a silence of the limit."""
        self._url = url
        self._silent_s_max = silent_s_max
        self._is_response_due = is_response_due
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._http = HttpClient(headers=headers)

    async def close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        await self._http.close()

    def require_open(self) -> None:
        """Raises HttpSessionClosed."""
        if self._closed.done():
            raise HttpSessionClosed(f"the session with {self._url} was closed")

    async def pause(self, seconds: float) -> None:
        """Sleeps. Raises HttpSessionClosed as soon as the session is closed."""
        await asyncio.wait({self._closed}, timeout=seconds)
        self.require_open()

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[HttpStream]:
        """Sends a request. At the end of the block the connection is closed, not reused: an unfinished response is
        aborted."""
        self.require_open()
        waiting = asyncio.ensure_future(self._http.send("POST", self._url + path, timeouts=Timeouts(), json=body))
        try:
            response = await self._wait_for_response(waiting)
        except BaseException:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                (await waiting).close()
            raise
        try:
            yield response
        finally:
            response.close()

    async def response_parts(self, response: HttpStream, *, streams: bool) -> AsyncIterator[Any]:
        """The chunks of a response, each decoded. Raises ValueError for malformed content."""
        rest = b""
        async for content in self._content_chunks(response):
            rest += content
            if len(rest) > RESPONSE_BYTES_MAX:
                raise ValueError(f"more than {RESPONSE_BYTES_MAX} bytes without an end")
            if not streams:
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                data = _event_data(line)
                if data == DONE:
                    return
                if data:
                    yield msgspec.json.decode(data)
        if not streams:
            yield msgspec.json.decode(rest)
        elif _event_data(rest) != DONE and rest.strip():
            raise ValueError(f"an incomplete line: {rest[:SHOWN_CHARACTERS]!r}")

    async def _wait_for_response(self, waiting: asyncio.Future[Any]) -> Any:
        """Raises TimeoutError after a silence that is the server's fault, and HttpSessionClosed."""
        while not waiting.done():
            await asyncio.wait({waiting, self._closed}, timeout=self._silent_s_max, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                break
            self.require_open()
            if self._is_response_due():
                raise TimeoutError
        try:
            return waiting.result()
        except Exception as error:
            self.require_open()  # otherwise the error is a consequence of closing the session
            if isinstance(error, RuntimeError):
                raise ConnectionAbortedError(str(error)) from error
            raise

    async def _content_chunks(self, response: HttpStream) -> AsyncIterator[bytes]:
        while True:
            waiting = asyncio.ensure_future(response.chunk())
            try:
                content = await self._wait_for_response(waiting)
            finally:
                if not waiting.done():
                    waiting.cancel()
            if not content:
                return
            yield content


def _event_data(line: bytes) -> bytes:
    """The data of a line; empty for a comment, an event name or an empty line."""
    word = line.strip()
    return word.removeprefix(EVENT).strip() if word.startswith(EVENT) else b""
