"""Concurrent tasks: work that a cancellation must not interrupt, and the error of a group of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger("tangram")


async def run_to_completion(work: Awaitable[T]) -> T:
    """Completes `work` even if the caller is cancelled meanwhile, however often; the cancellation is raised
    afterwards. If `work` fails then, its error is logged, because the cancellation is raised in place of it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("an operation failed after its caller was cancelled: %s", error, exc_info=error)
        raise


def unwrap_first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error of a task group, which caused the cancellation of its other tasks. Notes of it name the
    other errors."""
    first, *others = group.exceptions
    for other in others:
        first.add_note(f"Another task failed too: {type(other).__name__}: {other}")
    return first
