"""Calls: what environments are asked, each in a task of its own.

An environment is anybody's code: it may keep a cancellation to itself, or leave Python. Owns how such a call is ended.
Promises that ending one takes no longer than ENDING_S_MAX, whatever it does, and that SystemExit and KeyboardInterrupt
of a call are errors like any other: whoever presses Ctrl-C is heard by the loop, not by a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

ENDING_S_MAX = 5.0
"""What a call that was cancelled may take to end: it may have a command to stop."""


LEAVES = (SystemExit, KeyboardInterrupt)
"""What a task would end the whole loop with."""


class Exited(Exception):
    """It called sys.exit, or raised SystemExit or KeyboardInterrupt."""


def begun(ask: Callable[..., Awaitable[T]], *arguments: Any) -> asyncio.Task[T]:
    return asyncio.create_task(_answer(ask, *arguments))


async def _answer(ask: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    try:
        return await ask(*arguments)
    except LEAVES as error:
        raise Exited(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


async def ended(call: asyncio.Task[Any], within_s: float | None = None) -> bool:
    """Cancels it, if it is not over. False: it did not end within ENDING_S_MAX, or this time, and was given up."""
    call.add_done_callback(_seen)
    call.cancel()
    await asyncio.wait({call}, timeout=ENDING_S_MAX if within_s is None else within_s)
    if call.done():
        return True
    call.cancel()  # once more, if it ever listens
    asyncio._unregister_task(call)  # asyncio.run would wait for it for ever
    call._log_destroy_pending = False  # type: ignore[attr-defined]  # that it was left behind is for the caller to tell
    return False


def _seen(call: asyncio.Task[Any]) -> None:
    """What it raised is nobody's any more, and asyncio need not tell it."""
    if not call.cancelled():
        call.exception()
