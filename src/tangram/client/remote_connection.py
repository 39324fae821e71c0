"""The connection to a shared service: HTTP requests, retried until they get a response.

Owns the retry time: while the service is down, requests are retried for RECONNECT_S. Does not interpret actions.
Promises that an error response raises the exception of the service.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from tangram.client.connection_errors import token_required, unknown_token
from tangram.errors import InvalidConfig, ManagerError
from tangram.managers.http import (
    CertificateRejected,
    HttpClient,
    HttpError,
    HttpStream,
    InvalidUrl,
    ResponseTooLarge,
    Timeouts,
    backoff_s,
)
from tangram.runtime.wire import ErrorResponse

T = TypeVar("T")

RECONNECT_S = 300.0
"""A restarted service is back within seconds, a restarted machine within minutes."""
RETRY_S, RETRY_S_MAX = 0.1, 5.0
"""Exponential backoff of requests."""
CLOSE_RETRY_S = 10.0
"""Retry time of requests that release a resource; without them the service releases it after its own timeout."""
RESPONSE_TIMEOUT_S = 60.0
"""Time limit of a response, in addition to the long poll."""
JSON = {"content-type": "application/json"}

_encode = msgspec.json.Encoder().encode


class ReconnectTimeout(ManagerError):
    """The service did not respond within the whole retry time."""


class RequestRetryable(Exception):
    """The same request may succeed later."""


class RemoteConnection:
    """Requests to one service, retried until they get a response."""

    def __init__(self, url: str, token: str, ca: str, reconnect_s: float) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._reconnect_s = reconnect_s
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = HttpClient(headers=headers, ca=ca, resend=True)  # unlimited: every long poll occupies a connection
        self._is_open = False
        self._closing_deadline: float | None = None
        """Time at which closing requests without a response stop retrying; None unless the last one got no response."""

    async def open(self) -> None:
        """Raises InvalidConfig for `ca`."""
        await self._http.open()
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        await self._http.close()

    async def call(
        self,
        method: str,
        path: str,
        record: Any = None,
        /,
        *,
        wait_s: float | None = None,
        closing: bool = False,
        **query: str,
    ) -> bytes:
        """The body of the response. Raises the error of the service, and ReconnectTimeout. `closing`: retry for a short
        time only, because the service releases the resource by itself."""
        body = None if record is None else _encode(record)
        if wait_s is not None:
            query["wait_s"] = str(wait_s)
        once = functools.partial(self.call_once, method, path, body, query, wait_s or 0.0)
        return await self.retry_until_answered(once, closing=closing)

    async def call_once(self, method: str, path: str, body: Any, query: Mapping[str, Any], wait_s: float) -> bytes:
        """Like `call`, without retries. Raises HttpError and RequestRetryable too."""
        async with await self.send(method, path, body, query, wait_s + RESPONSE_TIMEOUT_S) as response:
            content = await response.read()
        return self.check_response(response.status, content)

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | AsyncIterator[bytes] | None,
        query: Mapping[str, str],
        timeout_s: float | None,
    ) -> HttpStream:
        """Raises HttpError if there is no response, which `retry_until_answered` handles."""
        if not self._is_open:
            raise ManagerError("the connection to the service is closed", retry=False)
        return await self._http.send(
            method,
            self.url + path,
            timeouts=Timeouts(timeout_s),
            query=query,
            headers=JSON if isinstance(content, bytes) else None,
            content=content,
        )

    def check_response(self, status: int, content: bytes) -> bytes:
        """Raises the error in a response."""
        if status < 400:
            return content
        try:
            fault = msgspec.json.decode(content, type=ErrorResponse).error
        except msgspec.MsgspecError:
            if status in (502, 503, 504):  # a gateway, or too many connections
                raise RequestRetryable(f"status {status}") from None
            shown = content[:200].decode(errors="replace")
            message = f"{self.url} responded {status}, which is not a response of Tangram: {shown!r}"
            raise ManagerError(message, retry=False) from None
        if fault.code in ("draining", "journal_failed", "rate", "too_slow") and fault.limit != "wrong_tokens":
            raise RequestRetryable(fault.message)
        if fault.code == "unauthorized":
            how = "give it to connect(url, token=...), or set TANGRAM_TOKEN"
            raise ManagerError(unknown_token(self.url) if self._token else token_required(self.url, how), retry=False)
        raise fault.to_exception()

    async def retry_until_answered(self, once: Callable[[], Coroutine[Any, Any, T]], *, closing: bool = False) -> T:
        """While the service is down, all `closing` requests share the deadline of the first: together, concurrent or
        one after the other, they wait no longer than one."""
        loop = asyncio.get_running_loop()
        timeout_s = CLOSE_RETRY_S if closing else self._reconnect_s
        deadline, tries, is_down = loop.time() + timeout_s, 0, False
        try:
            while True:
                try:
                    return await once()
                except (ResponseTooLarge, CertificateRejected, InvalidUrl) as error:
                    raise self.permanent_error(error) from None
                except (RequestRetryable, HttpError) as error:
                    if closing:
                        if self._closing_deadline is None:
                            self._closing_deadline = deadline
                        deadline = min(deadline, self._closing_deadline)
                    if loop.time() >= deadline:
                        is_down = True
                        reason = error.reason if isinstance(error, HttpError) else error
                        raise ReconnectTimeout(f"{self.url} did not respond for {timeout_s:.0f} s: {reason}") from error
                    tries += 1
                    await asyncio.sleep(backoff_s(tries, RETRY_S, RETRY_S_MAX))
        finally:
            if closing and not is_down:
                self._closing_deadline = None

    def permanent_error(self, error: ResponseTooLarge | CertificateRejected | InvalidUrl) -> Exception:
        """Converts an error that retries cannot fix, for the caller."""
        match error:
            case CertificateRejected():
                expected = "a certificate that this machine trusts, or `ca`: a file with the one that signed it"
                return InvalidConfig("url", self.url, f"{expected} ({error.reason})")
            case InvalidUrl():
                return InvalidConfig("url", self.url, "an address such as https://tangram.example:7433")
        return error
