"""Clean-up that a cancellation must not interrupt."""

from __future__ import annotations

import asyncio
from typing import Any


async def shielded(doing: Any) -> None:
    """Completes even if the caller is cancelled meanwhile; the first cancellation is raised afterwards."""
    task = asyncio.ensure_future(doing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled():  # otherwise `task.result()` raises it
                cancelled = cancelled or error
    task.result()
    if cancelled is not None:
        raise cancelled
