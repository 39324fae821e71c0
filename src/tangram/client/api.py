"""Calls of an HTTP API that stay under its quota, for those who need no client of their own.

Owns the retries. Every try is an action of its own, so that retries never exceed the quota either.
Promises that an answer which is returned is the API's own word: what is still refused, broken or silent after the last
try is ActionLost, never a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tangram.client.quota import QuotaUse
from tangram.errors import ActionLost, InvalidAction, ManagerError
from tangram.managers.http import PASSING, Answer, Http, pause_s

TIMEOUT_S = 60.0
"""Of one try."""
RETRIES = 4
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""Before the first repetition, doubled with each, less a part by chance."""
BYTES_MAX = 64 << 20
"""Of one answer."""


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
                await asyncio.sleep(pause_s(attempt, BACKOFF_S, BACKOFF_S_MAX))
            async with self._use(tokens) as use:
                try:
                    answer = await self._http.request(
                        method, address, timeout_s=self._timeout_s, bytes_max=BYTES_MAX, **options
                    )
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
