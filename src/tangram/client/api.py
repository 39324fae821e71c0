"""Requests to an HTTP API within its quota, with retries and exponential backoff.

Owns the retries. Every try is a separate action, so retries never exceed the quota. Promises that a returned
response is the API's own: a request that is still refused, broken or unanswered after the last try raises ActionLost. A
request that may have been executed is repeated only if it is idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from json import dumps
from typing import Any

import msgspec

from tangram.client.quota_use import QuotaUse
from tangram.client.validation import Content, Params, bytes_of, method_of, params_of, seconds_of, sendable_headers
from tangram.errors import ActionLost, ActionTimedOut, InvalidAction, ManagerError
from tangram.managers.http import (
    NOT_EXECUTED_STATUSES,
    RETRYABLE_STATUSES,
    HttpClient,
    HttpResponse,
    ResponseTooLarge,
    backoff_s,
)

TIMEOUT_S = 60.0
"""Time limit of one try."""
RETRIES = 4
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""Exponential backoff between tries."""
BYTES_MAX = 64 << 20
"""Limit of one response."""
IDEMPOTENT_METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")
"""Methods that HTTP defines as idempotent."""
SHOWN_CHARACTERS = 200
"""Characters of a response in an error message."""


class Api:
    """`t.api("search")`: requests that wait for their quota."""

    def __init__(
        self,
        http: HttpClient,
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
        self._use_quota = use
        self._base_url = base_url.rstrip("/")
        self._headers = sendable_headers(headers)
        self._timeout_s = seconds_of("timeout_s", timeout_s)
        self._retries = retries

    async def get(
        self, url: str, *, params: Params | None = None, tokens: int = 0, deadline_s: float | None = None
    ) -> HttpResponse:
        return await self.request("GET", url, params=params, tokens=tokens, deadline_s=deadline_s)

    async def post(
        self,
        url: str,
        *,
        json: Any = None,
        content: Content | None = None,
        tokens: int = 0,
        used: Callable[[HttpResponse], int] | None = None,
        idempotent: bool = False,
        deadline_s: float | None = None,
    ) -> HttpResponse:
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
        used: Callable[[HttpResponse], int] | None = None,
        idempotent: bool | None = None,
        deadline_s: float | None = None,
    ) -> HttpResponse:
        """Sends a request; repeats it while it is refused, fails or does not arrive.

        `tokens`: an estimate, if the quota counts them; `used` computes from the response how many it took.
        `idempotent`: whether it may be repeated after it may have been executed; None: as HTTP defines for the method.
        `deadline_s` limits everything, waiting and retries included.
        """
        method, sent = method_of(method), {**self._headers, **sendable_headers(headers)}
        options = {"headers": sent, "params": params_of(params), **_encode_body(json, content, sent)}
        is_retryable = method in IDEMPOTENT_METHODS if idempotent is None else idempotent
        address = self._address(url)
        if deadline_s is not None:
            seconds_of("deadline_s", deadline_s)
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await self._request_with_retries(method, address, options, tokens, used, is_retryable)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ActionTimedOut(f"{method} {address}: not answered within {deadline_s:g} s", None) from None

    def _address(self, url: str) -> str:
        if not isinstance(url, str):
            raise InvalidAction("url", url, "a path below the base_url, or a whole address")
        return url if "://" in url else f"{self._base_url}/{url.lstrip('/')}"

    async def _request_with_retries(
        self,
        method: str,
        address: str,
        options: dict[str, Any],
        tokens: int,
        used: Callable[[HttpResponse], int] | None,
        is_retryable: bool,
    ) -> HttpResponse:
        why = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, BACKOFF_S, BACKOFF_S_MAX))
            async with self._use_quota(tokens) as use:
                try:
                    response = await self._http.request(
                        method, address, timeout_s=self._timeout_s, bytes_max=BYTES_MAX, **options
                    )
                except ManagerError as error:
                    why = str(error)
                    if isinstance(error, ResponseTooLarge) or not (error.retry or is_retryable):
                        break
                    continue
                use.report_response(response.status, response.headers)
                if used is not None and response.ok:
                    use.spent(tokens=used(response))
            if response.status not in RETRYABLE_STATUSES and response.status < 500:
                return response
            why = f"{address} answered {response.status} {response.text[:SHOWN_CHARACTERS]!r}"
            if not (is_retryable or response.status in NOT_EXECUTED_STATUSES):
                break
        times = f"{attempt + 1} tries" if attempt else "one try"
        raise ActionLost(f"{method} {address}: failed after {times}: {why}", None)


def _encode_body(json: Any, content: Content | None, headers: dict[str, str]) -> dict[str, bytes]:
    if json is not None and content is not None:
        raise InvalidAction("content", type(content).__name__, "either body or json: a request has one body")
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
        raise InvalidAction("json", type(json).__name__, f"a value that JSON can represent ({error})") from None
