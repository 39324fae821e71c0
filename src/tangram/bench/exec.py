"""What an action costs beside the program that it runs: opening a sandbox, executing in it, keeping it open.

Everything goes through the SDK, scheduler and all, on this machine. The program is `/bin/true`, so that what is left is
ours. It is compared with fork and exec of the same program by this process, one of each in turn, so that both meet the
machine in the same mood; the overhead is the difference of their medians. Idle sandboxes are all open at once and
nothing is asked of them: their memory is what the machine has less then, their CPU what their processes and ours used.

Beside them, where there are any: a task of Ray and an exec of a Docker engine that this machine has.
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
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, at_most, part
from tangram.client.client import Client, connect
from tangram.client.sandbox import Sandbox
from tangram.managers.sandboxes.machine import available_memory_bytes
from tangram.managers.work import MIB

PROGRAM = "/bin/true"
IDLE_DIGITS = 5
"""Of the cores of one idle sandbox: what is less than a hundred-thousandth is the noise of measuring."""
MEMORY = "16MiB"
"""Of each sandbox: a thousand must fit."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    opens: int = 100
    execs: int = 1000
    at_once: int = 8
    """Sandboxes that execute side by side when throughput is measured."""
    burst: int = 150
    """Actions of each of them."""
    idle: int = 1000
    idle_s: float = 5.0
    others: int = 200
    """Calls of other systems."""


FULL = Sizes()
QUICK = Sizes(opens=30, execs=200, burst=40, idle=100, idle_s=2.0, others=50)


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found = Findings()
    async with connect() as t:
        await _opening(t, sizes, found, part(progress, 0.0, 0.15))
        await _executing(t, sizes, found, part(progress, 0.15, 0.5))
        await _throughput(t, sizes, found)
        progress(0.6)
        await _idling(t, sizes, found, part(progress, 0.6, 0.9))
    await asyncio.to_thread(_others, sizes, found)
    progress(1.0)
    return found.result("exec", "measured", sizes)


async def _opening(t: Client, sizes: Sizes, found: Findings, progress: Progress) -> None:
    async with t.sandbox(memory=MEMORY):
        pass  # the first one makes the image
    times = []
    for number in range(sizes.opens):
        box = t.sandbox(memory=MEMORY)
        before = time.perf_counter()
        await box.__aenter__()
        times.append(time.perf_counter() - before)
        await box.close()
        progress(number / sizes.opens)
    found.add("open_ms_p50", _ms(times), at_most(15.0))
    found.add("open_ms_p99", _ms(times, 0.99), PRINTED)


async def _executing(t: Client, sizes: Sizes, found: Findings, progress: Progress) -> None:
    ours, bare = [], []
    async with t.sandbox(memory=MEMORY) as box:
        for number in range(sizes.execs):
            ours.append(await _timed(box))
            bare.append(_bare())
            progress(number / sizes.execs)
    found.add("overhead_ms_p50", _ms(ours) - _ms(bare), at_most(2.0))
    found.add("exec_ms_p50", _ms(ours), PRINTED)
    found.add("exec_ms_p99", _ms(ours, 0.99), PRINTED)
    found.add("bare_ms_p50", _ms(bare), PRINTED)


async def _timed(box: Sandbox) -> float:
    before = time.perf_counter()
    (await box.exec([PROGRAM])).check()
    return time.perf_counter() - before


def _bare() -> float:
    before = time.perf_counter()
    subprocess.run([PROGRAM], check=True)
    return time.perf_counter() - before


async def _throughput(t: Client, sizes: Sizes, found: Findings) -> None:
    async def work(box: Sandbox) -> None:
        for _ in range(sizes.burst):
            (await box.exec([PROGRAM])).check()

    async with contextlib.AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(t.sandbox(memory=MEMORY)) for _ in range(sizes.at_once)]
        before = time.perf_counter()
        await t.gather(*(work(box) for box in boxes))
        elapsed = time.perf_counter() - before
    found.add("actions_per_s", sizes.at_once * sizes.burst / elapsed, at_least(300.0))


async def _idling(t: Client, sizes: Sizes, found: Findings, progress: Progress) -> None:
    free_before = available_memory_bytes()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(sizes.idle):
            box = await stack.enter_async_context(t.sandbox(memory=MEMORY))
            (await box.exec([PROGRAM])).check()  # one that was never used might be smaller
            progress(0.8 * number / sizes.idle)
        await asyncio.sleep(1.0)  # for what follows the last exec
        used = free_before - available_memory_bytes()
        # Looking at thousands of processes takes CPU itself, so it is done outside of what is measured.
        below_before, own_before = _below_s(), _own_s()
        await asyncio.sleep(sizes.idle_s)
        own, below = _own_s(), _below_s()
        cpu_s = own - own_before + below - below_before
    found.add("idle_mib", used / MIB / sizes.idle, at_most(2.0))
    found.add("idle_cpu", round(cpu_s / sizes.idle_s / sizes.idle, IDLE_DIGITS), at_most(0.0))
    found.notes.append(
        f"{sizes.idle} open sandboxes and everything that serves them used {cpu_s * 1e3:.1f} ms of CPU in"
        f" {sizes.idle_s:g} s."
    )


def _own_s() -> float:
    """CPU seconds of this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def _below_s() -> float:
    """CPU seconds of everything alive below it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2]
                words = fields.split()
                parents[int(entry)] = int(words[1])
                ticks[int(entry)] = int(words[11]) + int(words[12])
    below = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return sum(ticks[pid] for pid in below if pid != os.getpid()) / os.sysconf("SC_CLK_TCK")


# ---- others -------------------------------------------------------------------------------------------------------


def _others(sizes: Sizes, found: Findings) -> None:
    for name, call in (("docker_exec_ms_p50", _docker), ("ray_task_ms_p50", _ray)):
        try:
            found.add(name, call(sizes.others), PRINTED)
        except _NotHere as reason:
            found.notes.append(f"{name} is not measured: {reason}.")


class _NotHere(Exception):
    pass


def _docker(count: int) -> float:
    """`docker exec` in a container that runs, as the command line does it."""
    if shutil.which("docker") is None:
        raise _NotHere("there is no docker command")
    shown = subprocess.run(["docker", "ps", "--quiet"], capture_output=True, text=True, check=False)
    if shown.returncode != 0 or not shown.stdout.split():
        raise _NotHere("no Docker engine with a running container is reachable (DOCKER_HOST)")
    container = shown.stdout.split()[0]
    return _ms(_calls(count, lambda: subprocess.run(["docker", "exec", container, PROGRAM], check=True)))


def _ray(count: int) -> float:
    """A task that does nothing, on a Ray of this machine."""
    if importlib.util.find_spec("ray") is None:
        raise _NotHere("Ray is not installed (pip install ray)")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        task = ray.remote(num_cpus=1)(lambda: None)
        ray.get(task.remote())
        return _ms(_calls(count, lambda: ray.get(task.remote())))
    finally:
        ray.shutdown()


def _calls(count: int, call: Callable[[], object]) -> list[float]:
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
