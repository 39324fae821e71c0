"""What a function costs beside its own work, and what scaling it saves.

Everything goes through the scheduler, on this machine. A warm call of a function that does nothing is compared with
calling it directly, one of each in turn. From no process at all, eight calls are made at once of a function that waits;
the time is that until all eight run. Then they are left alone until their idle time has passed. Last, calls come in
bursts: once eight instances are there for the whole time, as a reservation would have it, once they come and go, and of
both the share of instance time that is busy is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_most
from tangram.client.functions import Function, Functions, function
from tangram.client.transport import LocalPending, Pending
from tangram.client.validation import Life
from tangram.core.action import Action
from tangram.core.messages import Pool, PoolChanged, cpu_node
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.functions import Call, FunctionManager
from tangram.managers.functions.host import Statistics
from tangram.managers.work import Work
from tangram.runtime.orchestrator import Orchestrator

INSTANCES = 8
CORES = 0.1
"""Of a call: all eight fit on one core, since they mostly sleep."""
LOOK_S = 0.001
IDLE_S = 1.0
FOR_EVER_S = 3600.0
ELASTIC_IDLE_S = 0.2
"""In bursts: short beside the pause between them, as half a minute is beside a training step."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    calls: int = 1000
    scalings: int = 5
    bursts: int = 10
    burst_calls: int = 24
    pause_s: float = 1.5
    """Between bursts."""
    call_s: float = 0.05


FULL = Sizes()
QUICK = Sizes(calls=200, scalings=3, bursts=4)


def nothing() -> None:
    pass


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def marks(folder: str) -> None:
    """Says that it runs, and waits for all others."""
    Path(folder, str(os.getpid())).touch()
    while not Path(folder, "go").exists():
        time.sleep(LOOK_S)


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found = Findings()
    await _warm(sizes, found)
    progress(0.2)
    await _scaling(sizes, found)
    progress(0.4)
    reserved = await _bursts(sizes, FOR_EVER_S)
    progress(0.7)
    elastic = await _bursts(sizes, ELASTIC_IDLE_S)
    progress(1.0)
    found.add("busy_share_reserved", reserved.busy_s / reserved.instance_s, PRINTED)
    found.add("busy_share_elastic", elastic.busy_s / elastic.instance_s, PRINTED)
    found.notes.append(
        f"The same {elastic.calls} calls took {reserved.instance_s:.1f} s of reserved and {elastic.instance_s:.1f} s of"
        f" elastic instances."
    )
    return found.result("functions", "measured", sizes)


class _Calls:
    """An orchestrator, as calls see it."""

    by_value = False

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def announce(self, pool: Pool) -> None:
        self._orchestrator.tell(PoolChanged(pool=pool))

    def submit(self, action: Action, work: Work) -> Pending:
        return LocalPending(self._orchestrator, self._orchestrator.submit(action, work))


@contextlib.asynccontextmanager
async def _functions() -> AsyncIterator[tuple[Functions, FunctionManager]]:
    manager = FunctionManager()
    pools = cpu_node("local", len(os.sched_getaffinity(0)))
    orchestrator = Orchestrator(Scheduler(policy("adaptive"), pools), {}, {Call: manager})
    life = Life("the connection")
    async with orchestrator:
        life.begin(asyncio.get_running_loop())
        life.opened()
        yield Functions(_Calls(orchestrator), life, "bench"), manager


def _declared(called: Any, idle_s: float) -> Function[..., Any]:
    declared: Function[..., Any] = function(cpus=CORES, max_instances=INSTANCES, idle_s=idle_s)(called)
    return declared


async def _warm(sizes: Sizes, found: Findings) -> None:
    ours, bare = [], []
    declared = _declared(nothing, FOR_EVER_S)
    async with _functions() as (calls, _):
        await calls.call(declared)
        for _ in range(sizes.calls):
            before = time.perf_counter()
            await calls.call(declared)
            between = time.perf_counter()
            declared()
            after = time.perf_counter()
            ours.append(between - before)
            bare.append(after - between)
    found.add("warm_overhead_ms_p50", (statistics.median(ours) - statistics.median(bare)) * 1e3, at_most(3.0))
    found.add("warm_ms_p99", sorted(ours)[int(0.99 * len(ours))] * 1e3, PRINTED)


async def _scaling(sizes: Sizes, found: Findings) -> None:
    """From no template: each time on a connection of its own."""
    times, firsts = [], []
    for number in range(sizes.scalings):
        async with _functions() as (calls, manager):
            with tempfile.TemporaryDirectory() as folder:
                declared = _declared(marks, IDLE_S)
                before = time.perf_counter()
                tasks = [asyncio.create_task(calls.call(declared, folder)) for _ in range(INSTANCES)]
                firsts.append(await _until(folder, 1) - before)
                times.append(await _until(folder, INSTANCES) - before)
                _let_go(folder)
                await asyncio.gather(*tasks)
            if number == 0:
                await asyncio.sleep(2.0 * IDLE_S)
                found.add("idle_instances", manager.statistics().instances, at_most(0.0))
    found.add("scale_0_to_8_s", statistics.median(times), at_most(1.0))
    found.add("scale_0_to_1_s", statistics.median(firsts), PRINTED)


def _let_go(folder: str) -> None:
    Path(folder, "go").touch()


async def _until(folder: str, count: int) -> float:
    while len(os.listdir(folder)) < count:  # noqa: ASYNC110 - other processes do it
        await asyncio.sleep(LOOK_S)
    return time.perf_counter()


async def _bursts(sizes: Sizes, idle_s: float) -> Statistics:
    declared = _declared(sleeps, idle_s)
    async with _functions() as (calls, manager):
        if idle_s == FOR_EVER_S:  # all are there from the beginning
            await asyncio.gather(*(calls.call(declared, 0.2) for _ in range(INSTANCES)))
        before = manager.statistics()
        for _ in range(sizes.bursts):
            await asyncio.gather(*(calls.call(declared, sizes.call_s) for _ in range(sizes.burst_calls)))
            await asyncio.sleep(sizes.pause_s)
        after = manager.statistics()
    return Statistics(
        calls=after.calls - before.calls,
        busy_s=after.busy_s - before.busy_s,
        instance_s=after.instance_s - before.instance_s,
    )
