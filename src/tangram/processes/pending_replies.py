"""Pending replies: numbered requests, and the futures that wait for their replies.

The part of a request/reply client that does not depend on the transport. Promises that each expected reply arrives or
fails: when the process at the other end has ended, `fail_all` raises in every waiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

_Reply = TypeVar("_Reply")


class PendingReplies(Generic[_Reply]):
    """Belongs to the event loop that runs when it is created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[_Reply]] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    def expect(self, number: int) -> asyncio.Future[_Reply]:
        future: asyncio.Future[_Reply] = self._loop.create_future()
        self._futures[number] = future
        return future

    def resolve(self, number: int, reply: _Reply) -> None:
        """Deliver a reply. One that no waiter expects any more is dropped."""
        future = self._futures.pop(number, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def discard(self, number: int) -> None:
        self._futures.pop(number, None)

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """Raise an error in every waiter, one instance for each."""
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(error())
                future.exception()  # a waiter that was cancelled does not retrieve it
