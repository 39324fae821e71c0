"""The drain gate: the progress of the shutdown, and the requests to managers that it waits for.

begin_draining()    new actions are refused; views show it
close(timeout_s)    new requests to managers, and those that fail because their manager has closed, raise Draining:
                    the client should retry when the server is back
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tangram.errors import ManagerError
from tangram.runtime.error_records import Draining


class DrainGate:
    def __init__(self) -> None:
        self._in_flight = 0
        self.is_draining = False
        self.is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def begin_draining(self) -> None:
        self.is_draining = True

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Raises Draining."""
        if self.is_closed:
            raise Draining
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        except ManagerError as error:
            if self.is_closed:
                raise Draining from error  # not finished in time; the next server can do it
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def close(self, timeout_s: float) -> int:
        """Rejects new requests and waits up to `timeout_s` for those in flight. Returns the number of remaining
        ones."""
        self.is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._in_flight
