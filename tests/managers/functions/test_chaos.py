"""Many calls of good and bad functions, some cancelled, while processes are killed at random: each result is true."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.managers.functions import rewards
from tests.managers.functions.conftest import Bench, below, until

from tangram.managers.functions import lease

CALLS = 120
KILLS = 15


@pytest.mark.parametrize("seed", [1, 2])
def test_no_call_fails_for_faults_of_other_calls(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(lease, "CALLS_MAX", 5)
    chance = random.Random(seed)
    log = str(tmp_path / "log")
    kinds = {
        rewards.add: (("value", "lost"), (1,)),
        rewards.noted: (("value", "lost"), (log,)),
        rewards.forks: (("value", "lost"), (log,)),
        rewards.leaks: (("value", "lost"), (60,)),
        rewards.raises: (("error", "lost"), ()),
        rewards.exits: (("error", "lost"), (1,)),
        rewards.dies: (("lost",), (log,)),
    }

    async def one(bench: Bench) -> None:
        called, (allowed, arguments) = chance.choice(list(kinds.items()))
        await asyncio.sleep(chance.random())
        task = asyncio.create_task(bench.try_call(called, *arguments))
        if chance.random() < 0.25:
            await asyncio.sleep(0.05 * chance.random())
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            result = await task
            assert result.kind in allowed, result

    others = below(os.getpid())  # fork servers that other tests share

    async def kill() -> None:
        for _ in range(KILLS):
            await asyncio.sleep(0.08)
            own = sorted(below(os.getpid()) - others)
            if own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(own), signal.SIGKILL)

    async def test(bench: Bench) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            for _ in range(CALLS):
                group.create_task(one(bench))
        await until(lambda: bench.manager.statistics().instances == bench.manager.statistics().idle)
        assert bench.manager.statistics().instances <= 8 * len(kinds)
        assert await bench.call(rewards.add, 1) == 2

    run(test)
