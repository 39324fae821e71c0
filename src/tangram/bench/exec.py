"""The overhead of an action on top of its program: opening a sandbox, executing in it, keeping it open.

Everything goes through the SDK and the scheduler, on this machine. `/bin/true` alternates with fork and exec of the
same program by this process, so that both see the same state of the machine; the overhead is the difference of their
medians. Idle sandboxes are all open at once: their memory is the decrease of free memory, their CPU that of their
processes and of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import time

import msgspec

from tangram.bench.base import PRINTED, BenchRun, Progress, at_least, at_most, subprogress
from tangram.bench.other_systems import add_if_available, docker_call_times, ray_call_times
from tangram.client.client import Client, connect
from tangram.client.sandbox import Sandbox
from tangram.managers.sandboxes.machine import available_memory_bytes
from tangram.managers.work import MIB
from tangram.processes.process_tree import processes_below

PROGRAM = "/bin/true"
IDLE_DIGITS = 5
"""Rounding of the cores of one idle sandbox: less than a hundred-thousandth is measurement noise."""
MEMORY = "16MiB"
"""Per sandbox: a thousand must fit."""


class ExecSizes(msgspec.Struct, frozen=True, kw_only=True):
    opens: int = 100
    execs: int = 1000
    at_once: int = 8
    """Concurrent sandboxes when throughput is measured."""
    burst: int = 150
    """Actions of each of them."""
    idle: int = 1000
    idle_s: float = 5.0
    others: int = 200
    """Calls of other systems."""


LABEL = "measured"
FULL = ExecSizes()
QUICK = ExecSizes(opens=30, execs=200, burst=40, idle=100, idle_s=2.0, others=50)


async def measure(sizes: ExecSizes, run: BenchRun) -> None:
    async with connect() as t:
        await _measure_opens(t, sizes, run, subprogress(run.progress, 0.0, 0.15))
        await _measure_execs(t, sizes, run, subprogress(run.progress, 0.15, 0.5))
        await _measure_throughput(t, sizes, run)
        run.progress(0.6)
        await _measure_idle(t, sizes, run, subprogress(run.progress, 0.6, 0.9))
    await asyncio.to_thread(_measure_other_systems, sizes, run)


async def _measure_opens(t: Client, sizes: ExecSizes, run: BenchRun, progress: Progress) -> None:
    async with t.sandbox(memory=MEMORY):
        pass  # the first one builds the image
    times = []
    for number in range(sizes.opens):
        sandbox = t.sandbox(memory=MEMORY)
        before = time.perf_counter()
        await sandbox.__aenter__()
        times.append(time.perf_counter() - before)
        await sandbox.close()
        progress(number / sizes.opens)
    run.add("open_ms_p50", _ms(times), at_most(15.0))
    run.add("open_ms_p99", _ms(times, 0.99), PRINTED)


async def _measure_execs(t: Client, sizes: ExecSizes, run: BenchRun, progress: Progress) -> None:
    ours, bare = [], []
    async with t.sandbox(memory=MEMORY) as sandbox:
        for number in range(sizes.execs):
            ours.append(await _timed_exec(sandbox))
            bare.append(_bare_process_s())
            progress(number / sizes.execs)
    run.add("overhead_ms_p50", _ms(ours) - _ms(bare), at_most(2.0))
    run.add("exec_ms_p50", _ms(ours), PRINTED)
    run.add("exec_ms_p99", _ms(ours, 0.99), PRINTED)
    run.add("bare_ms_p50", _ms(bare), PRINTED)


async def _timed_exec(sandbox: Sandbox) -> float:
    before = time.perf_counter()
    (await sandbox.exec([PROGRAM])).check()
    return time.perf_counter() - before


def _bare_process_s() -> float:
    before = time.perf_counter()
    subprocess.run([PROGRAM], check=True)
    return time.perf_counter() - before


async def _measure_throughput(t: Client, sizes: ExecSizes, run: BenchRun) -> None:
    async def work(sandbox: Sandbox) -> None:
        for _ in range(sizes.burst):
            (await sandbox.exec([PROGRAM])).check()

    async with contextlib.AsyncExitStack() as stack:
        sandboxes = [await stack.enter_async_context(t.sandbox(memory=MEMORY)) for _ in range(sizes.at_once)]
        before = time.perf_counter()
        await t.gather(*(work(sandbox) for sandbox in sandboxes))
        elapsed = time.perf_counter() - before
    run.add("actions_per_s", sizes.at_once * sizes.burst / elapsed, at_least(300.0))


async def _measure_idle(t: Client, sizes: ExecSizes, run: BenchRun, progress: Progress) -> None:
    free_before = available_memory_bytes()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(sizes.idle):
            sandbox = await stack.enter_async_context(t.sandbox(memory=MEMORY))
            (await sandbox.exec([PROGRAM])).check()  # an unused one might be smaller
            progress(0.8 * number / sizes.idle)
        await asyncio.sleep(1.0)  # for work that follows the last exec
        used = free_before - available_memory_bytes()
        # Reading /proc for thousands of processes takes CPU itself, so it is outside of the measured interval.
        below_before, own_before = _descendants_cpu_s(), time.process_time()
        await asyncio.sleep(sizes.idle_s)
        own_cpu_s, below = time.process_time(), _descendants_cpu_s()
        cpu_s = own_cpu_s - own_before + below - below_before
    run.add("idle_mib", used / MIB / sizes.idle, at_most(2.0))
    run.add("idle_cpu", round(cpu_s / sizes.idle_s / sizes.idle, IDLE_DIGITS), at_most(0.0))
    run.notes.append(
        f"{sizes.idle} open sandboxes and everything that serves them used {cpu_s * 1e3:.1f} ms of CPU in"
        f" {sizes.idle_s:g} s."
    )


def _descendants_cpu_s() -> float:
    """CPU seconds of all live child processes."""
    return sum(process.cpu_s for process in processes_below(os.getpid()))


def _measure_other_systems(sizes: ExecSizes, run: BenchRun) -> None:
    add_if_available(run, "docker_exec_ms_p50", lambda: _ms(docker_call_times(sizes.others, PROGRAM)))
    add_if_available(run, "ray_task_ms_p50", lambda: _ms(ray_call_times(sizes.others)))


def _ms(times: list[float], share: float = 0.5) -> float:
    if share == 0.5:
        return statistics.median(times) * 1e3
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] * 1e3
