"""How the parts of a training run wait for each other: a condition, and a pause of the dispatcher.

Every part gets these objects in its constructor, so that no part needs a reference to one that is made after it. Never
decides anything about samples or weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ChangeCondition:
    """Wakes all tasks that wait at the moment of `notify_all`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the next notification or the timeout."""
        if timeout_s is None:
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._event.wait()
        except TimeoutError:
            pass


class DispatchPause:
    """While it is held, the dispatcher starts no groups."""

    def __init__(self, changed: ChangeCondition) -> None:
        self._changed = changed
        self._holders = 0

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._changed.notify_all()
