"""The overhead of an action on top of its program: opening a sandbox, executing in it, keeping it open.

Everything goes through the SDK and the scheduler, on this machine. The program is `/bin/true`. It alternates with fork
and exec of the same program by this process, so that both see the same state of the machine; the overhead is the
difference of their medians. Idle sandboxes are all open at once: their memory is the decrease of free memory, their CPU
that of their processes and of this one.

For comparison, where available: a task of Ray and an exec of a Docker engine on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable

import msgspec

from tangram.bench.base import PRINTED, BenchRun, Progress, at_least, at_most, subprogress
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
        box = t.sandbox(memory=MEMORY)
        before = time.perf_counter()
        await box.__aenter__()
        times.append(time.perf_counter() - before)
        await box.close()
        progress(number / sizes.opens)
    run.add("open_ms_p50", _ms(times), at_most(15.0))
    run.add("open_ms_p99", _ms(times, 0.99), PRINTED)


async def _measure_execs(t: Client, sizes: ExecSizes, run: BenchRun, progress: Progress) -> None:
    ours, bare = [], []
    async with t.sandbox(memory=MEMORY) as box:
        for number in range(sizes.execs):
            ours.append(await _timed_exec(box))
            bare.append(_bare_process_s())
            progress(number / sizes.execs)
    run.add("overhead_ms_p50", _ms(ours) - _ms(bare), at_most(2.0))
    run.add("exec_ms_p50", _ms(ours), PRINTED)
    run.add("exec_ms_p99", _ms(ours, 0.99), PRINTED)
    run.add("bare_ms_p50", _ms(bare), PRINTED)


async def _timed_exec(box: Sandbox) -> float:
    before = time.perf_counter()
    (await box.exec([PROGRAM])).check()
    return time.perf_counter() - before


def _bare_process_s() -> float:
    before = time.perf_counter()
    subprocess.run([PROGRAM], check=True)
    return time.perf_counter() - before


async def _measure_throughput(t: Client, sizes: ExecSizes, run: BenchRun) -> None:
    async def work(box: Sandbox) -> None:
        for _ in range(sizes.burst):
            (await box.exec([PROGRAM])).check()

    async with contextlib.AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(t.sandbox(memory=MEMORY)) for _ in range(sizes.at_once)]
        before = time.perf_counter()
        await t.gather(*(work(box) for box in boxes))
        elapsed = time.perf_counter() - before
    run.add("actions_per_s", sizes.at_once * sizes.burst / elapsed, at_least(300.0))


async def _measure_idle(t: Client, sizes: ExecSizes, run: BenchRun, progress: Progress) -> None:
    free_before = available_memory_bytes()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(sizes.idle):
            box = await stack.enter_async_context(t.sandbox(memory=MEMORY))
            (await box.exec([PROGRAM])).check()  # an unused one might be smaller
            progress(0.8 * number / sizes.idle)
        await asyncio.sleep(1.0)  # for work that follows the last exec
        used = free_before - available_memory_bytes()
        # Reading /proc for thousands of processes takes CPU itself, so it is outside of the measured interval.
        below_before, own_before = _descendants_cpu_s(), _own_cpu_s()
        await asyncio.sleep(sizes.idle_s)
        own, below = _own_cpu_s(), _descendants_cpu_s()
        cpu_s = own - own_before + below - below_before
    run.add("idle_mib", used / MIB / sizes.idle, at_most(2.0))
    run.add("idle_cpu", round(cpu_s / sizes.idle_s / sizes.idle, IDLE_DIGITS), at_most(0.0))
    run.notes.append(
        f"{sizes.idle} open sandboxes and everything that serves them used {cpu_s * 1e3:.1f} ms of CPU in"
        f" {sizes.idle_s:g} s."
    )


def _own_cpu_s() -> float:
    """CPU seconds of this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _descendants_cpu_s() -> float:
    """CPU seconds of all live child processes."""
    return sum(process.cpu_s for process in processes_below(os.getpid()))


# ---- others -------------------------------------------------------------------------------------------------------


def _measure_other_systems(sizes: ExecSizes, run: BenchRun) -> None:
    for name, call in (("docker_exec_ms_p50", _docker), ("ray_task_ms_p50", _ray)):
        try:
            run.add(name, call(sizes.others), PRINTED)
        except _SystemUnavailable as reason:
            run.notes.append(f"{name} is not measured: {reason}.")


class _SystemUnavailable(Exception):
    pass


def _docker(count: int) -> float:
    """`docker exec` in a running container, with the command line client."""
    if shutil.which("docker") is None:
        raise _SystemUnavailable("there is no docker command")
    shown = subprocess.run(["docker", "ps", "--quiet"], capture_output=True, text=True, check=False)
    if shown.returncode != 0 or not shown.stdout.split():
        raise _SystemUnavailable("no Docker engine with a running container is reachable (DOCKER_HOST)")
    container = shown.stdout.split()[0]
    return _ms(_time_calls(count, lambda: subprocess.run(["docker", "exec", container, PROGRAM], check=True)))


def _ray(count: int) -> float:
    """A no-op task on a local Ray."""
    if importlib.util.find_spec("ray") is None:
        raise _SystemUnavailable("Ray is not installed (pip install ray)")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        task = ray.remote(num_cpus=1)(lambda: None)
        ray.get(task.remote())
        return _ms(_time_calls(count, lambda: ray.get(task.remote())))
    finally:
        ray.shutdown()


def _time_calls(count: int, call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(count):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return times


def _ms(times: list[float], share: float = 0.5) -> float:
    if share == 0.5:
        return statistics.median(times) * 1e3
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] * 1e3
