"""Calls of an HTTP API that stay under its quota, for those who need no client of their own.

Owns the retries. Every try is an action of its own, so that retries never exceed the quota either.
Promises that an answer which is returned is the API's own word: what is still refused, broken or silent after the last
try is ActionLost, never a result. What may have been carried out is never asked for twice, unless it may be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from json import dumps
from typing import Any

import msgspec

from tangram.client.quota import QuotaUse
from tangram.client.validation import Content, Params, bytes_of, method_of, params_of, seconds_of, sendable_headers
from tangram.errors import ActionLost, ActionTimedOut, InvalidAction, ManagerError
from tangram.managers.http import NOT_DONE, PASSING, Answer, Http, TooLarge, pause_s

TIMEOUT_S = 60.0
"""Of one try."""
RETRIES = 4
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""Before the first repetition, doubled with each, less a part by chance."""
BYTES_MAX = 64 << 20
"""Of one answer."""
REPEATABLE = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")
"""Methods of which twice is as good as once, as HTTP says."""
SHOWN_CHARACTERS = 200
"""Of an answer, in an error."""


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
        if not isinstance(base_url, str):
            raise InvalidAction("base_url", base_url, "an address such as https://api.example.com, or none")
        self._http = http
        self._use = use
        self._base_url = base_url.rstrip("/")
        self._headers = sendable_headers(headers)
        self._timeout_s = seconds_of("timeout_s", timeout_s)
        self._retries = retries

    async def get(
        self, url: str, *, params: Params | None = None, tokens: int = 0, deadline_s: float | None = None
    ) -> Answer:
        return await self.request("GET", url, params=params, tokens=tokens, deadline_s=deadline_s)

    async def post(
        self,
        url: str,
        *,
        json: Any = None,
        content: Content | None = None,
        tokens: int = 0,
        used: Callable[[Answer], int] | None = None,
        idempotent: bool = False,
        deadline_s: float | None = None,
    ) -> Answer:
        return await self.request(
            "POST", url, json=json, content=content, tokens=tokens, used=used, idempotent=idempotent,
            deadline_s=deadline_s,
        )  # fmt: skip

    async def request(
        self,
        method: str,
        url: str,
        *,
        params: Params | None = None,
        json: Any = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        tokens: int = 0,
        used: Callable[[Answer], int] | None = None,
        idempotent: bool | None = None,
        deadline_s: float | None = None,
    ) -> Answer:
        """One request, repeated while it is refused, fails or does not arrive.

        `tokens`: an estimate, where the quota counts them; `used` reads from the answer how many it took. `idempotent`:
        it may be repeated also where the API may have carried it out; None: as HTTP says of the method. `deadline_s`:
        of all of it, with waiting and repetitions.
        """
        method, sent = method_of(method), {**self._headers, **sendable_headers(headers)}
        options = {"headers": sent, "params": params_of(params), **_body(json, content, sent)}
        again = method in REPEATABLE if idempotent is None else idempotent
        address = self._address(url)
        if deadline_s is not None:
            seconds_of("deadline_s", deadline_s)
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await self._try(method, address, options, tokens, used, again)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ActionTimedOut(f"{method} {address}: not answered within {deadline_s:g} s", None) from None

    def _address(self, url: str) -> str:
        if not isinstance(url, str):
            raise InvalidAction("url", url, "a path below the base_url, or a whole address")
        return url if "://" in url else f"{self._base_url}/{url.lstrip('/')}"

    async def _try(
        self,
        method: str,
        address: str,
        options: dict[str, Any],
        tokens: int,
        used: Callable[[Answer], int] | None,
        again: bool,
    ) -> Answer:
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
                    if isinstance(error, TooLarge) or not (error.retry or again):
                        break
                    continue
                use.heard(answer.status, answer.headers)
                if used is not None and answer.ok:
                    use.spent(tokens=used(answer))
            if answer.status not in PASSING and answer.status < 500:
                return answer
            why = f"{address} answered {answer.status} {answer.text[:SHOWN_CHARACTERS]!r}"
            if not (again or answer.status in NOT_DONE):
                break
        times = f"{attempt + 1} tries" if attempt else "one try"
        raise ActionLost(f"{method} {address}: given up after {times}: {why}", None)


def _body(json: Any, content: Content | None, headers: dict[str, str]) -> dict[str, bytes]:
    if json is not None and content is not None:
        raise InvalidAction("content", type(content).__name__, "none beside json: a request has one body")
    if content is not None:
        return {"data": bytes_of("content", content)}
    if json is None:
        return {}
    if not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = "application/json"
    try:
        plain = msgspec.to_builtins(json, str_keys=True)
        return {"data": dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()}
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidAction("json", type(json).__name__, f"what JSON can say ({error})") from None
