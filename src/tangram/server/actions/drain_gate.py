"""The gate: what is done with managers at the request of callers passes it, until the service goes down.

Owns the count of what is under way. Promises that nothing passes once it is closed: whoever comes then, or fails since
its manager has left, is told to try again when the service is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tangram.errors import ManagerError
from tangram.runtime.error_records import Draining


class Gate:
    def __init__(self) -> None:
        self._inside = 0
        self.is_closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Raises Draining."""
        if self.is_closed:
            raise Draining
        self._inside += 1
        self._empty.clear()
        try:
            yield
        except ManagerError as error:
            if self.is_closed:
                raise Draining from error  # it was not done in time, and the next service can do it
            raise
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def close(self, limit_s: float) -> int:
        """Let nobody in any more, and wait for those inside, but not longer than that. Returns how many are left."""
        self.is_closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        return self._inside
