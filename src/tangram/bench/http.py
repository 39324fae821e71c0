"""What the shared service itself costs: actions that do nothing, over HTTP, with the journal on.

`tangram serve` runs in a process of its own, on the backend "fake", which carries out nothing, so that all that is
measured is the service's. Another process on the same machine asks for actions as the SDK does: submit an exec in an
open sandbox, wait for its end in the same request, acknowledge results in batches.

`actions_per_s` is of many clients at once, `overhead_ms_p50` of one client that asks for one at a time.
`cpu_us_per_action` is CPU time of the service while many ask, sandboxes and acknowledgements included.
`waiting_clients` is how many requests were held open at once on actions that waited, of which each got the right answer
when its action ended; one wrong answer, error or closed connection makes it 0. `embedded_actions_per_s` is the same job
inside one process: orchestrator and scheduler, no HTTP, no journal. Beside them, where they are installed: tasks of Ray
and of Dask that do nothing, as many under way at once.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, at_most, by_itself, part
from tangram.bench.callers import MEMORY_MIB, WAIT_S, Caller
from tangram.bench.noop import CORES, NotHere, dask_rate, embedded_rate, ray_rate
from tangram.bench.service_process import ServiceProcess
from tangram.core.demand import CPU, Demand, cores
from tangram.errors import ManagerError
from tangram.managers.work import Close, Exec
from tangram.reports.statistics import mean_of
from tangram.runtime.wire import Reply

SPARE_DESCRIPTORS = 200
"""Of a process, besides its connections."""
GATE_S = 600.0
"""How long the action lasts that all others wait for; it is cancelled before."""
SHOWN = 3
"""Errors that a note tells."""

NO_OP = Exec(command=("true",))


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    clients: int = 64
    round_s: float = 5.0
    rounds: int = 5
    """Repetitions, by which the spread is told."""
    singles: int = 500
    """Actions one at a time in each round."""
    waiting: int = 2000
    embedded: int = 30_000
    """Actions in each round."""
    others: int = 3000
    """Tasks of other systems."""


FULL = Sizes()
QUICK = Sizes(round_s=2.0, rounds=3, singles=200, embedded=10_000, others=1000)


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    found = Findings()
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        asyncio.run(_served(sizes, Path(folder), processes, found, part(progress, 0.0, 0.7)))
    rates = []
    for number in range(sizes.rounds):
        rates.append(by_itself(embedded_rate, (sizes.embedded, sizes.clients), processes))
        progress(0.7 + 0.2 * (number + 1) / sizes.rounds)
    found.add("embedded_actions_per_s", mean_of(rates), at_least(10_000.0))
    add_other_systems(sizes, processes, found)
    progress(1.0)
    return found.result("http", "measured", sizes)


async def _served(sizes: Sizes, folder: Path, processes: int | None, found: Findings, progress: Progress) -> None:
    tables = {"node": {"backend": "fake", "cores": CORES, "memory": f"{MEMORY_MIB * (sizes.clients + 4)}MiB"}}
    allow_descriptors(sizes.waiting)
    async with ServiceProcess(folder, tables) as service:

        async def ask(job: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.to_thread(by_itself, _run, (job, service.url, *arguments), processes)

        await ask(_many, sizes.clients, min(1.0, sizes.round_s))  # warm-up: whatever is made at first use
        rates, medians, tails, costs = [], [], [], []
        for number in range(sizes.rounds):
            before = _cpu_s(service.pid)
            done, elapsed_s = await ask(_many, sizes.clients, sizes.round_s)
            rates.append(done / elapsed_s)
            costs.append((_cpu_s(service.pid) - before) / done * 1e6)
            times = await ask(_one_by_one, sizes.singles)
            medians.append(statistics.median(times) * 1e3)
            tails.append(sorted(times)[int(0.99 * len(times))] * 1e3)
            progress(0.8 * (number + 1) / sizes.rounds)
        found.add("actions_per_s", mean_of(rates), at_least(1500.0))
        found.add("overhead_ms_p50", mean_of(medians), at_most(10.0))
        found.add("overhead_ms_p99", mean_of(tails), PRINTED)
        found.add("cpu_us_per_action", mean_of(costs), PRINTED)
        waiting, problems = await ask(clients_waiting, sizes.waiting)
        found.add("waiting_clients", float(waiting), at_least(float(FULL.waiting)))
        progress(1.0)
    if problems:
        found.notes.append(f"waiting_clients: {problems[0]}")
    found.notes.append(
        f"The service and its clients shared {os.cpu_count()} cores; what the service used alone would allow"
        f" {1e6 / statistics.fmean(costs):.0f} actions per second of one core."
    )


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def allow_descriptors(connections: int) -> None:
    """For this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and wanted > hard:
        said = f"{connections} connections need {wanted} open files, and the limit is {hard}: raise `ulimit -Hn`"
        raise ManagerError(said, retry=False)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def add_other_systems(sizes: Sizes, processes: int | None, found: Findings) -> None:
    """The rates of Ray and Dask, or why they are not measured."""
    for name, job in (("ray_tasks_per_s", ray_rate), ("dask_tasks_per_s", dask_rate)):
        try:
            found.add(name, by_itself(job, (sizes.others, sizes.clients), processes), PRINTED)
        except NotHere as reason:
            found.notes.append(f"{name} is not measured: {reason}.")


# ---- clients -----------------------------------------------------------------------------------------------------


def _run(job: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.run(job(*arguments))


async def _many(url: str, clients: int, seconds: float) -> tuple[int, float]:
    """Actions of so many clients, each in a sandbox of its own, and the seconds that they took."""
    done = 0

    async def client(caller: Caller, box: str) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await caller.do(NO_OP, box)
            done += 1

    async with Caller(url) as caller:
        boxes = await asyncio.gather(*(caller.opened() for _ in range(clients)))
        began = time.perf_counter()
        end = began + seconds
        await asyncio.gather(*(client(caller, box) for box in boxes))
        elapsed = time.perf_counter() - began
        await asyncio.gather(*(caller.do(Close(), box) for box in boxes))
    return done, elapsed


async def _one_by_one(url: str, count: int) -> list[float]:
    times = []
    async with Caller(url) as caller:
        box = await caller.opened()
        for _ in range(count):
            began = time.perf_counter()
            await caller.do(NO_OP, box)
            times.append(time.perf_counter() - began)
        await caller.do(Close(), box)
    return times


async def clients_waiting(url: str, clients: int) -> tuple[int, list[str]]:
    """How many waited at once and got the right answer, or 0 and what went wrong."""
    whole = Demand({CPU: cores(CORES)})
    async with Caller(url) as caller:
        box = await caller.opened()
        gate = caller.name()
        held = asyncio.create_task(caller.do(Exec(command=f"sleep {GATE_S:g}"), box, id=gate, demand=whole))
        await _until(caller, "tangram_actions_running", 1)
        asked = [asyncio.create_task(caller.do(NO_OP, box, demand=whole)) for _ in range(clients)]
        try:
            await _until(caller, "tangram_actions_waiting", clients, asked)
            answered = sum(task.done() for task in asked)
            await caller.ask("POST", f"/v1/actions/{gate}/cancel")
            answers = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            for task in (held, *asked):
                task.cancel()
            await asyncio.gather(held, *asked, return_exceptions=True)
        await caller.do(Close(), box)
    wrong = [str(answer) or type(answer).__name__ for answer in answers if isinstance(answer, BaseException)]
    if answered:
        wrong.append(f"{answered} were answered before their actions could have ended")
    return (0, [f"{len(wrong)} of {clients} went wrong: {'; '.join(wrong[:SHOWN])}"]) if wrong else (clients, [])


async def _until(caller: Caller, metric: str, value: int, asked: list[asyncio.Task[Reply]] | None = None) -> None:
    """As the service itself counts."""
    deadline = time.monotonic() + WAIT_S
    while True:
        text = (await caller.ask("GET", "/metrics")).decode()
        if sum(float(number) for number in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)) == value:
            return
        failed = [task.exception() for task in asked or () if task.done() and not task.cancelled()]
        if any(failed) or time.monotonic() > deadline:
            raise ManagerError(f"expected {metric} to become {value}: {next(filter(None, failed), 'it did not')}")
        await asyncio.sleep(0.05)
