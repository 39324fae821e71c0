"""What tests of child processes share: waiting for conditions, and looking for what is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

DEADLINE_S = 300.0
"""Of a test: a hang is a failure. It may start several processes that import PyTorch, on a busy machine."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_pending(pid: int, number: int) -> bool:
    """Whether a signal was sent to it that has not reached it yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    words = [line.split() for line in status.splitlines()]
    return any(int(word[1], 16) >> (number - 1) & 1 for word in words if word[0] in ("SigPnd:", "ShdPnd:"))


def children() -> list[str]:
    return [pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]


def leaving_nothing(test: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]]) -> None:
    """Runs a test, whatever happens closes what it used, and finds no process, no descriptor and no task left."""

    async def main() -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test()
        finally:
            await close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = sorted(os.listdir("/proc/self/fd")), children()
    asyncio.run(main())
    assert (sorted(os.listdir("/proc/self/fd")), children()) == before
