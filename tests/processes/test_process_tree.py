"""Processes of the machine without control groups: watched, signalled and reaped."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tangram.processes.process_tree import SpawnedChild


def test_an_abandoned_child_is_reaped_when_it_ends() -> None:
    async def main() -> int:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        child = SpawnedChild(["sleep", "1000"], env={"PATH": os.defpath}, cwd="/", streams=(null, null, null))
        os.close(null)
        assert child.reap_or_abandon()[0] is None
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await child.exited
        await asyncio.sleep(0)
        return child.pid

    pid = asyncio.run(main())
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
