"""The endpoint manager: calls of functions that somebody else runs, over HTTP.

Owns the attempts of each call. Decides nothing: how many calls are under way at once is
said by the pool of each endpoint. Promises that what the endpoint said is told apart from what never reached it or
never came back: the first is a result of the function, the second is lost after `retries`, and never a result.

    200-299 with JSON                                 the value
    200-299 without JSON or too large, 3xx, 4xx,      a failure of the function, not tried again
    500 with JSON, 501, 505
    408, 425, 429, 500 without JSON, all other 5xx,   tried again after a pause that doubles, with jitter, or as long
    no connection, a broken answer, a timeout         as Retry-After says

A function that failed says so in its own words, which are JSON. A 500 with a page is what a server in front of it says
that could not reach it, and so are 502 to 504 and what lies above: 520 to 530 of proxies, 529 of an overloaded service.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant, Pool
from tangram.errors import ManagerError
from tangram.managers.base import Lease
from tangram.managers.functions.work import ANSWER_BYTES_MAX, EndpointSpec, Post, failed, returned
from tangram.managers.http import PASSING, Answer, Http, TooLarge, pause_s
from tangram.managers.quotas.adaptive_rate import advice_of
from tangram.managers.work import Ended, Work
from tangram.processes.streams import Output

PAUSE_S, PAUSE_S_MAX = 0.1, 10.0
"""Before the second attempt, and before any: each pause is twice the one before, less up to half of it by chance."""
RETRY_AFTER_S_MAX = 120.0
"""An endpoint that asks for a longer pause is not there for now."""
SHOWN_CHARACTERS_MAX = 2000
"""Of what an endpoint says in a failure."""


REFUSALS = (501, 505)
"""Of all that an endpoint may say about itself, what will be no other the next time."""


class _Again(Exception):
    """An attempt that brought nothing, and may be repeated."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        self.after_s = after_s
        """As the endpoint asked; None: it did not."""
        super().__init__(why)


class EndpointManager:
    def __init__(self) -> None:
        self._http = Http()
        self._endpoints: dict[str, EndpointSpec] = {}
        self._leases: set[PostLease] = set()

    def pools(self) -> tuple[Pool, ...]:
        """Of the endpoints that were called so far."""
        return tuple(Pool(kind=spec.pool, total=spec.max_concurrency) for spec in self._endpoints.values())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lease in list(self._leases):
            await lease.stop()
        await self._http.close()

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        if not isinstance(work, Post):
            raise ManagerError(f"endpoints are called with Post, not {type(work).__name__}", retry=False)
        self._endpoints[work.endpoint.name] = work.endpoint
        lease = PostLease(self._http, work)
        self._leases.add(lease)
        lease.task.add_done_callback(lambda _: self._leases.discard(lease))
        return lease


class PostLease:
    def __init__(self, http: Http, work: Post) -> None:
        self._http = http
        self._work = work
        self._spec = work.endpoint
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def wait(self) -> Ended:
        await asyncio.wait({self.task})
        return Ended() if self.task.cancelled() else self.task.result()

    def resize(self, *, reserved: int, limit: int) -> None:
        """It has no CPU here."""

    def used(self) -> float | None:
        return None

    async def stop(self) -> None:
        """The connection is closed; what the endpoint makes of that is its own matter."""
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _run(self) -> Ended:
        tried = 0
        while True:
            tried += 1
            try:
                return Ended(answer=await self._attempt())
            except _Again as again:
                if again.after_s is not None and again.after_s > RETRY_AFTER_S_MAX:
                    return Ended(lost=f"{again}, and asks to come back in {again.after_s:g} s")
                if tried > self._spec.retries:
                    times = f"{tried} attempts" if tried > 1 else "one attempt"
                    return Ended(lost=f"{again}, after {times}")
                await asyncio.sleep(pause_s(tried, PAUSE_S, PAUSE_S_MAX) if again.after_s is None else again.after_s)

    async def _attempt(self) -> bytes:
        """The answer. Raises _Again."""
        given = {name.lower() for name in self._spec.headers}
        ours = {"Content-Type": "application/json", "Idempotency-Key": self._work.key}
        headers = {name: value for name, value in ours.items() if name.lower() not in given} | self._spec.headers
        try:
            answer = await self._http.request(
                "POST",
                self._spec.url,
                timeout_s=self._spec.timeout_s,
                bytes_max=ANSWER_BYTES_MAX,
                data=self._work.body,
                headers=headers,
            )
        except TooLarge as error:
            return failed("answer", str(error))
        except ManagerError as error:
            raise _Again(str(error)) from None
        return self._judged(answer)

    def _judged(self, answer: Answer) -> bytes:
        status = answer.status
        if status in PASSING or (status >= 500 and status not in REFUSALS and not _is_own_error(answer)):
            raise _Again(f"{self._spec.url} said {status}", advice_of(status, answer.headers, time.time()).wait_s)
        shown = answer.text[:SHOWN_CHARACTERS_MAX]
        if not answer.ok:
            return failed("answer", f"it said {status}", shown)
        try:
            return returned(msgspec.msgpack.encode(answer.json()))
        except (ManagerError, OverflowError) as error:
            return failed("answer", f"it said {status}, and {error}", shown)


def _is_own_error(answer: Answer) -> bool:
    """Whether the function itself says that it failed."""
    if answer.status != 500:
        return False
    try:
        answer.json()
    except ManagerError:
        return False
    return True
