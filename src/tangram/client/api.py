"""Calls of an HTTP API that stay under its quota, for those who need no client of their own.

Owns the connections and the retries. Every try is an action of its own, so that retries never exceed the quota either.
Promises that an answer which is returned is the API's own word: what is still refused, broken or silent after the last
try is ActionLost, never a result.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tangram.client.checks import Life
from tangram.client.quota import QuotaUse
from tangram.errors import ActionLost, InvalidAction, ManagerError
from tangram.managers.pace import TOO_MANY

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S = 60.0
"""Of one try."""
RETRIES = 4
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""Before the first repetition, doubled with each; a random part of it is waited."""
BYTES_MAX = 64 << 20
"""Of one answer."""
PASSING = (TOO_MANY, 408, 425, 502, 503, 504)
"""What an API answers when the same request may well succeed later."""


class Answer(msgspec.Struct, frozen=True):
    """What an API answered."""

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
        except msgspec.DecodeError as error:
            raise ManagerError(f"the answer is no JSON ({error}): {self.text[:200]!r}", retry=False) from None


class Http:
    """The connections of one client, made when they are first needed."""

    def __init__(self, connection: Life) -> None:
        self._connection = connection
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, *, timeout_s: float, **options: Any) -> Answer:
        """Raises ManagerError with what kept it from being answered; `retry` is False if it may have been received."""
        import aiohttp

        self._connection.require()
        if self._session is None:
            # How many requests there are at once is for the quota to say.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            # It would repeat a request behind our back, which the quota knows nothing of.
            self._session._retry_connection = False
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, url, timeout=limit, allow_redirects=False, **options) as response:
                content = await response.content.read(BYTES_MAX + 1)
                while len(content) <= BYTES_MAX and (more := await response.content.read(BYTES_MAX + 1 - len(content))):
                    content += more
                if len(content) > BYTES_MAX:
                    raise ManagerError(f"{url} answered with more than {BYTES_MAX} bytes", retry=False)
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, headers, content)
        except aiohttp.InvalidURL as error:
            raise InvalidAction("url", url, "an address such as https://api.example.com/search") from error
        except aiohttp.ClientConnectorError as error:
            raise ManagerError(f"{url} cannot be reached: {error}", retry=True) from error
        except TimeoutError as error:
            raise ManagerError(f"{url} did not answer within {timeout_s:g} s", retry=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ManagerError(f"{url}: {type(error).__name__}: {error}", retry=False) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class Api:
    """`t.api("search")`: requests that wait for their turn."""

    def __init__(
        self,
        http: Http,
        use: Callable[[int], QuotaUse],
        *,
        base_url: str,
        headers: Mapping[str, str] | None,
        timeout_s: float,
        retries: int,
    ) -> None:
        if type(retries) is not int or retries < 0:
            raise InvalidAction("retries", retries, "a whole number, at least 0")
        self._http = http
        self._use = use
        self._base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeout_s = timeout_s
        self._retries = retries

    async def get(self, url: str, *, params: Mapping[str, str] | None = None, tokens: int = 0) -> Answer:
        return await self.request("GET", url, params=params, tokens=tokens, idempotent=True)

    async def post(
        self,
        url: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        tokens: int = 0,
        used: Callable[[Answer], int] | None = None,
        idempotent: bool = False,
    ) -> Answer:
        return await self.request(
            "POST", url, json=json, content=content, tokens=tokens, used=used, idempotent=idempotent
        )

    async def request(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        tokens: int = 0,
        used: Callable[[Answer], int] | None = None,
        idempotent: bool = False,
    ) -> Answer:
        """One request, repeated while it is refused or does not arrive.

        `tokens`: an estimate, where the quota counts them; `used` reads from the answer how many it took. `idempotent`:
        it may be repeated also where nobody knows whether the API has received it.
        """
        options: dict[str, Any] = {"params": params, "headers": {**self._headers, **(headers or {})}}
        if json is not None:
            options["data"] = msgspec.json.encode(json)
            options["headers"].setdefault("Content-Type", "application/json")
        elif content is not None:
            options["data"] = content
        address = url if "://" in url else f"{self._base_url}/{url.lstrip('/')}"
        why = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(BACKOFF_S * 2.0 ** (attempt - 1), BACKOFF_S_MAX))
            async with self._use(tokens) as use:
                try:
                    answer = await self._http.request(method, address, timeout_s=self._timeout_s, **options)
                except ManagerError as error:
                    why = str(error)
                    if not (error.retry or idempotent):
                        break
                    continue
                use.heard(answer.status, answer.headers)
                if used is not None and answer.ok:
                    use.spent(tokens=used(answer))
            if answer.status not in PASSING:
                return answer
            why = f"{address} answered {answer.status} {answer.text[:200]!r}"
        raise ActionLost(f"{method} {address}: given up after {attempt + 1} tries: {why}", None)
