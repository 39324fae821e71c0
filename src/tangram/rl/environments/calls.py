"""Calls of environments, each in a separate task.

An environment is user code: it may swallow a cancellation, or exit Python. Owns how such a call ends. Promises that
cancelling a call takes at most ENDING_S_MAX, and that SystemExit and KeyboardInterrupt of a call are ordinary errors:
Ctrl-C reaches the event loop, not a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

ENDING_S_MAX = 5.0
"""Time that a cancelled call has to end: it may have to stop a command."""


EXIT_EXCEPTIONS = (SystemExit, KeyboardInterrupt)
"""Exceptions that would end the event loop if they left a task."""


class CallExited(Exception):
    """The call used sys.exit, or raised SystemExit or KeyboardInterrupt."""


def start_call(function: Callable[..., Awaitable[T]], *arguments: Any) -> asyncio.Task[T]:
    return asyncio.create_task(_run_call(function, *arguments))


async def _run_call(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    try:
        return await function(*arguments)
    except EXIT_EXCEPTIONS as error:
        raise CallExited(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


async def cancel_call(call: asyncio.Task[Any], within_s: float | None = None) -> bool:
    """Cancels a call that still runs. Returns False if it did not end within ENDING_S_MAX, or `within_s`, and was
    abandoned."""
    call.add_done_callback(_consume_exception)
    call.cancel()
    await asyncio.wait({call}, timeout=ENDING_S_MAX if within_s is None else within_s)
    if call.done():
        return True
    call.cancel()  # in case it handles a later one
    asyncio._unregister_task(call)  # asyncio.run would wait for it forever
    call._log_destroy_pending = False  # type: ignore[attr-defined]  # the caller reports the abandoned call
    return False


def _consume_exception(call: asyncio.Task[Any]) -> None:
    """Retrieves the exception of an abandoned call, so that asyncio does not log it."""
    if not call.cancelled():
        call.exception()
