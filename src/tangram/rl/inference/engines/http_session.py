"""A line: the connections of an engine to a server of others, from a start of the engine to its close.

Owns connections, and nothing of what is said on them. Never asks twice. Promises that whoever waits on a line that is
closed hears of it at once (LineClosed), that nobody waits for a server that says nothing for `silent_s_max`
(TimeoutError), unless it was told to stand still, and that a request that is left half read is aborted there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tangram.rl.inference.engines.server_adapters import SHOWN

if TYPE_CHECKING:
    import aiohttp

CONNECT_S_MAX = 10.0
ANSWER_BYTES_MAX = 64 << 20
"""Of one answer, or one line of it: far more than ids and log-probabilities of a long context take."""
EVENT, DONE = b"data:", b"[DONE]"
"""How a line of a stream begins that says something, and what the last one says."""


class LineClosed(Exception):
    """We hung up."""


class Line:
    """Made in a running loop, closed once."""

    def __init__(
        self, url: str, headers: Mapping[str, str], *, silent_s_max: float, may_speak: Callable[[], bool]
    ) -> None:
        """`may_speak`: whether a silence that has just ended was the server's own."""
        import aiohttp

        self._url = url
        self._silent_s_max = silent_s_max
        self._may_speak = may_speak
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=limits, headers=dict(headers)
        )
        self._session._retry_connection = False  # it would write twice behind our back

    async def close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        await self._session.close()

    def require_open(self) -> None:
        """Raises LineClosed."""
        if self._closed.done():
            raise LineClosed(f"the line to {self._url} was closed")

    async def pause(self, seconds: float) -> None:
        """Raises LineClosed, as soon as it is."""
        await asyncio.wait({self._closed}, timeout=seconds)
        self.require_open()

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Whatever happens, the connection is closed, not given back: a request that is left half read is aborted."""
        self.require_open()
        waiting = asyncio.ensure_future(self._session.post(self._url + path, json=body, allow_redirects=False))
        try:
            response = await self._patiently(waiting)
        except BaseException:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                (await waiting).close()
            raise
        try:
            yield response
        finally:
            response.close()

    async def answers(self, response: aiohttp.ClientResponse, *, streams: bool) -> AsyncIterator[Any]:
        """The pieces of an answer, each decoded. Raises ValueError for what is none."""
        rest = b""
        async for content in self._contents(response):
            rest += content
            if len(rest) > ANSWER_BYTES_MAX:
                raise ValueError(f"more than {ANSWER_BYTES_MAX} bytes without an end")
            if not streams:
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                said = _said(line)
                if said == DONE:
                    return
                if said:
                    yield msgspec.json.decode(said)
        if not streams:
            yield msgspec.json.decode(rest)
        elif _said(rest) != DONE and rest.strip():
            raise ValueError(f"half a line: {rest[:SHOWN]!r}")

    async def _patiently(self, waiting: asyncio.Future[Any]) -> Any:
        """Raises TimeoutError after a silence that is not ours, and LineClosed."""
        while not waiting.done():
            await asyncio.wait({waiting, self._closed}, timeout=self._silent_s_max, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                break
            self.require_open()
            if self._may_speak():
                raise TimeoutError
        try:
            return waiting.result()
        except Exception as error:
            self.require_open()  # else it is whatever aiohttp says of a session that is closed meanwhile
            if isinstance(error, RuntimeError):
                raise ConnectionAbortedError(str(error)) from error
            raise

    async def _contents(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        while True:
            waiting = asyncio.ensure_future(response.content.readany())
            try:
                content = await self._patiently(waiting)
            finally:
                if not waiting.done():
                    waiting.cancel()
            if not content:
                return
            yield content


def _said(line: bytes) -> bytes:
    """What a line of a stream says; nothing, if it is a comment, the name of an event or empty."""
    word = line.strip()
    return word.removeprefix(EVENT).strip() if word.startswith(EVENT) else b""
