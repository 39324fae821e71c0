"""The endpoint manager: calls of functions behind external HTTP endpoints.

Owns the attempts of each call. The pool of each endpoint limits its concurrent calls. A response of the endpoint is a
result of the function. A call that did not reach the endpoint, or got no response, is retried and then lost; it is
never a result.

    200-299 with JSON                                 the value
    200-299 without JSON or too large, 3xx, 4xx,      a failure of the function, not retried
    500 with JSON, 501, 505
    408, 425, 429, 500 without JSON, all other 5xx,   retried with exponential backoff and jitter, or after the time
    no connection, a broken response, a timeout       of Retry-After

A function that failed responds with JSON. A 500 with a page comes from a proxy that could not reach it, and so do 502
to 504 and above: 520 to 530 of proxies, 529 of an overloaded service."""

from __future__ import annotations

import asyncio
import time
from typing import Self

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.base import Lease, UnmeteredLease
from tangram.managers.functions.work import ANSWER_BYTES_MAX, Post, encode_failure, encode_value
from tangram.managers.http import RETRYABLE_STATUSES, HttpClient, HttpResponse, ResponseTooLarge, backoff_s
from tangram.managers.quotas.adaptive_rate import parse_rate_limit
from tangram.managers.work import LeaseResult, Work
from tangram.processes.streams import Output

PAUSE_S, PAUSE_S_MAX = 0.1, 10.0
"""The first and the longest pause between attempts: it doubles each time, less a random part of up to half of it."""
RETRY_AFTER_S_MAX = 120.0
"""An endpoint that requests a longer pause counts as unavailable."""
SHOWN_CHARACTERS_MAX = 2000
"""Length of the response in a failure."""


REFUSALS = (501, 505)
"""Server errors that a retry does not change."""


class _RetryableAttempt(Exception):
    """An attempt without a result; may be repeated."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        self.after_s = after_s
        """The pause that Retry-After requests; None: no such header."""
        super().__init__(why)


class EndpointManager:
    def __init__(self) -> None:
        self._http = HttpClient()
        self._leases: set[PostLease] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for lease in list(self._leases):
            await lease.stop()
        await self._http.close()

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if not isinstance(work, Post):
            raise ManagerError(f"endpoints are called with Post, not {type(work).__name__}", retry=False)
        lease = PostLease(self._http, work)
        self._leases.add(lease)
        lease.task.add_done_callback(lambda _: self._leases.discard(lease))
        return lease


class PostLease(UnmeteredLease):
    def __init__(self, http: HttpClient, work: Post) -> None:
        self._http = http
        self._work = work
        self._spec = work.endpoint
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def wait(self) -> LeaseResult:
        await asyncio.wait({self.task})
        return LeaseResult() if self.task.cancelled() else self.task.result()

    async def stop(self) -> None:
        """Closes the connection. The endpoint may continue the call."""
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _run(self) -> LeaseResult:
        attempts = 0
        while True:
            attempts += 1
            try:
                return LeaseResult(answer=await self._attempt())
            except _RetryableAttempt as again:
                if again.after_s is not None and again.after_s > RETRY_AFTER_S_MAX:
                    return LeaseResult(lost=f"{again}, with Retry-After of {again.after_s:g} s")
                if attempts > self._spec.retries:
                    times = f"{attempts} attempts" if attempts > 1 else "one attempt"
                    return LeaseResult(lost=f"{again}, after {times}")
                await asyncio.sleep(
                    backoff_s(attempts, PAUSE_S, PAUSE_S_MAX) if again.after_s is None else again.after_s
                )

    async def _attempt(self) -> bytes:
        """Returns the answer. Raises _RetryableAttempt."""
        names = {name.lower() for name in self._spec.headers}
        defaults = {"Content-Type": "application/json", "Idempotency-Key": self._work.key}
        headers = {name: value for name, value in defaults.items() if name.lower() not in names} | self._spec.headers
        try:
            response = await self._http.request(
                "POST",
                self._spec.url,
                timeout_s=self._spec.timeout_s,
                bytes_max=ANSWER_BYTES_MAX,
                data=self._work.body,
                headers=headers,
            )
        except ResponseTooLarge as error:
            return encode_failure("answer", str(error))
        except ManagerError as error:
            raise _RetryableAttempt(str(error)) from None
        return self._judged(response)

    def _judged(self, response: HttpResponse) -> bytes:
        status = response.status
        if status in RETRYABLE_STATUSES or (status >= 500 and status not in REFUSALS and not _is_own_error(response)):
            raise _RetryableAttempt(
                f"{self._spec.url} responded with {status}",
                parse_rate_limit(status, response.headers, time.time()).wait_s,
            )
        shown = response.text[:SHOWN_CHARACTERS_MAX]
        if not response.ok:
            return encode_failure("answer", f"it responded with {status}", shown)
        try:
            return encode_value(msgspec.msgpack.encode(response.json()))
        except (ManagerError, OverflowError) as error:
            return encode_failure("answer", f"it responded with {status}, and {error}", shown)


def _is_own_error(response: HttpResponse) -> bool:
    """Whether the function itself reports a failure, by JSON."""
    if response.status != 500:
        return False
    try:
        response.json()
    except ManagerError:
        return False
    return True
