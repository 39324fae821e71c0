"""The overhead of a function call, and the savings of scaling.

Everything goes through the scheduler, on this machine. A warm call of a no-op function alternates with calling it
directly. Scaling from zero processes: eight concurrent calls of a function that waits, until all eight run. Last, calls
come in bursts, once with eight instances for the whole time, as with a reservation, and once with elastic instances.
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

from tangram.bench.base import PRINTED, BenchRun, at_most
from tangram.client.client import Client
from tangram.client.functions import Function, function
from tangram.client.transport import LocalTransport
from tangram.core.messages import cpu_node
from tangram.core.policies import DEFAULT_POLICY, policy
from tangram.core.scheduler import Scheduler
from tangram.managers.functions.host import FunctionStatistics
from tangram.managers.functions.manager import FunctionManager
from tangram.managers.functions.work import Call
from tangram.managers.quotas.manager import QuotaManager
from tangram.managers.work import HoldGrant
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import Orchestrator

INSTANCES = 8
CORES = 0.1
"""Per call: all eight fit on one core, since they mostly sleep."""
POLL_S = 0.001
IDLE_S = 1.0
FOR_EVER_S = 3600.0
ELASTIC_IDLE_S = 0.2
"""Idle time of instances between bursts: short compared with the pause between them, as half a minute is compared with
a training step."""


class FunctionsSizes(msgspec.Struct, frozen=True, kw_only=True):
    calls: int = 1000
    scalings: int = 5
    bursts: int = 10
    burst_calls: int = 24
    pause_s: float = 1.5
    """Pause between bursts."""
    call_s: float = 0.05


LABEL = "measured"
FULL = FunctionsSizes()
QUICK = FunctionsSizes(calls=200, scalings=3, bursts=4)


def no_op() -> None:
    pass


def sleep_for(seconds: float) -> None:
    time.sleep(seconds)


def mark_and_wait(folder: str) -> None:
    """Mark this call as running, and wait for all others."""
    Path(folder, str(os.getpid())).touch()
    while not Path(folder, "go").exists():
        time.sleep(POLL_S)


async def measure(sizes: FunctionsSizes, run: BenchRun) -> None:
    await _measure_warm(sizes, run)
    run.progress(0.2)
    await _measure_scaling(sizes, run)
    run.progress(0.4)
    reserved = await _bursts(sizes, FOR_EVER_S)
    run.progress(0.7)
    elastic = await _bursts(sizes, ELASTIC_IDLE_S)
    run.add("busy_share_reserved", reserved.busy_s / reserved.instance_s, PRINTED)
    run.add("busy_share_elastic", elastic.busy_s / elastic.instance_s, PRINTED)
    run.notes.append(
        f"The same {elastic.calls} calls took {reserved.instance_s:.1f} s of reserved and {elastic.instance_s:.1f} s of"
        f" elastic instances."
    )


@contextlib.asynccontextmanager
async def connect_functions() -> AsyncIterator[tuple[Client, FunctionManager]]:
    """Return a client whose function manager is accessible."""
    functions = FunctionManager()
    sink = EventSink()
    quotas = QuotaManager((), sink.send)
    pools = cpu_node("local", len(os.sched_getaffinity(0)))
    scheduler = Scheduler(policy(DEFAULT_POLICY), pools)
    orchestrator = Orchestrator(scheduler, {}, {HoldGrant: quotas, Call: functions}, sink=sink)
    async with Client(LocalTransport(orchestrator, quotas)) as client:
        yield client, functions


def declare(called: Any, idle_s: float, instances: int = INSTANCES) -> Function[..., Any]:
    declared: Function[..., Any] = function(cpus=CORES, max_instances=instances, idle_s=idle_s)(called)
    return declared


def statistics_between(before: FunctionStatistics, after: FunctionStatistics) -> FunctionStatistics:
    return FunctionStatistics(
        calls=after.calls - before.calls,
        busy_s=after.busy_s - before.busy_s,
        instance_s=after.instance_s - before.instance_s,
        started=after.started - before.started,
    )


async def _measure_warm(sizes: FunctionsSizes, run: BenchRun) -> None:
    ours, bare = [], []
    declared = declare(no_op, FOR_EVER_S)
    async with connect_functions() as (client, _):
        await client.call(declared)
        for _ in range(sizes.calls):
            before = time.perf_counter()
            await client.call(declared)
            between = time.perf_counter()
            declared()
            after = time.perf_counter()
            ours.append(between - before)
            bare.append(after - between)
    run.add("warm_overhead_ms_p50", (statistics.median(ours) - statistics.median(bare)) * 1e3, at_most(3.0))
    run.add("warm_ms_p99", sorted(ours)[int(0.99 * len(ours))] * 1e3, PRINTED)


async def _measure_scaling(sizes: FunctionsSizes, run: BenchRun) -> None:
    """Measure from zero processes: each time on a new connection."""
    times, firsts = [], []
    for number in range(sizes.scalings):
        async with connect_functions() as (client, manager):
            with tempfile.TemporaryDirectory() as folder:
                declared = declare(mark_and_wait, IDLE_S)
                before = time.perf_counter()
                tasks = [asyncio.create_task(client.call(declared, folder)) for _ in range(INSTANCES)]
                firsts.append(await _wait_for_marks(folder, 1) - before)
                times.append(await _wait_for_marks(folder, INSTANCES) - before)
                _release_all(folder)
                await asyncio.gather(*tasks)
            if number == 0:
                await asyncio.sleep(2.0 * IDLE_S)
                run.add("idle_instances", manager.statistics().instances, at_most(0.0))
    run.add("scale_0_to_8_s", statistics.median(times), at_most(1.0))
    run.add("scale_0_to_1_s", statistics.median(firsts), PRINTED)


def _release_all(folder: str) -> None:
    Path(folder, "go").touch()


async def _wait_for_marks(folder: str, count: int) -> float:
    while len(os.listdir(folder)) < count:  # noqa: ASYNC110 - other processes do it
        await asyncio.sleep(POLL_S)
    return time.perf_counter()


async def _bursts(sizes: FunctionsSizes, idle_s: float) -> FunctionStatistics:
    declared = declare(sleep_for, idle_s)
    async with connect_functions() as (client, manager):
        if idle_s == FOR_EVER_S:  # all run from the beginning
            await asyncio.gather(*(client.call(declared, 0.2) for _ in range(INSTANCES)))
        before = manager.statistics()
        for _ in range(sizes.bursts):
            await asyncio.gather(*(client.call(declared, sizes.call_s) for _ in range(sizes.burst_calls)))
            await asyncio.sleep(sizes.pause_s)
        after = manager.statistics()
    return statistics_between(before, after)
