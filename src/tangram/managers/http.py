"""HTTP requests, each of them once: whoever wants a repetition makes it, and knows of it.

Owns connections. Never follows a redirect, never repeats anything, never takes more of an answer than it was told to.
Promises ManagerError for what was not answered; its `retry` says whether the request cannot have been received.
"""

from __future__ import annotations

import asyncio
import importlib
import random
from typing import TYPE_CHECKING, Any

import msgspec

from tangram.errors import InvalidAction, ManagerError
from tangram.managers.quotas.adaptive_rate import OVERLOADED, TOO_MANY, UNAVAILABLE

if TYPE_CHECKING:
    import aiohttp

CONNECT_S_MAX = 10.0
NOT_DONE = (TOO_MANY, UNAVAILABLE, OVERLOADED, 425)
"""What a server answers that has not carried out what was asked."""
PASSING = (*NOT_DONE, 408, 502, 504)
"""What a server answers when the same request may well succeed later. It may have been carried out."""


class TooLarge(ManagerError):
    """The answer has more bytes than were asked for."""


class Answer(msgspec.Struct, frozen=True):
    """What a server answered."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    content: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        try:
            return msgspec.json.decode(self.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ManagerError(f"the answer is no JSON ({error}): {self.text[:200]!r}", retry=False) from None


class Http:
    """Connections to any number of servers, made when they are first needed."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, *, timeout_s: float, bytes_max: int, **options: Any) -> Answer:
        session = await self._opened()
        import aiohttp
        import yarl

        try:
            address = yarl.URL(url)
            known = address.scheme in ("http", "https") and address.host
        except (TypeError, ValueError):
            known = None
        if not known:
            raise InvalidAction("url", url, "an address such as https://api.example.com/search")
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S_MAX))
        try:
            async with session.request(method, address, timeout=limit, allow_redirects=False, **options) as response:
                content = await _read(response, bytes_max)
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, headers, content)
        except aiohttp.InvalidURL as error:
            raise InvalidAction("url", url, "an address such as https://api.example.com/search") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ManagerError(f"{url} cannot be reached: {error}", retry=True) from error
        except TimeoutError as error:
            raise ManagerError(f"{url} did not answer within {timeout_s:g} s", retry=False) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ManagerError(f"{url}: {type(error).__name__}: {error}", retry=False) from error

    async def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # It takes a moment to import, in which others go on.
            await asyncio.to_thread(importlib.import_module, "aiohttp")
        if self._session is None:
            import aiohttp

            # How many requests there are at once is for pools to say.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            # It would repeat a request behind our back, which no quota knows of.
            self._session._retry_connection = False
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > bytes_max:
            response.close()
            raise TooLarge(f"{response.url} answered {response.status} with more than {bytes_max} bytes", retry=False)
    return bytes(content)


def pause_s(tried: int, first_s: float, most_s: float) -> float:
    """Before the next try: twice as long as before the last, less up to half of it by chance."""
    return min(first_s * 2.0 ** (tried - 1), most_s) * random.uniform(0.5, 1.0)
