"""The overhead of the shared service: no-op actions over HTTP, with the journal on.

`tangram serve` runs in a separate process on the backend "fake", which executes nothing, so that only the service is
measured. Another process on the same machine makes the requests of the SDK: submit an exec in an open sandbox, wait for
its end in the same request, acknowledge results in batches. For comparison, the same job inside one process, and where
installed no-op tasks of Ray and of Dask.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec

from tangram.bench.base import (
    PRINTED,
    BenchRun,
    Progress,
    at_least,
    at_most,
    run_in_fresh_process,
    subprogress,
)
from tangram.bench.other_systems import add_if_available, dask_rate, ray_rate
from tangram.bench.service_process import ServiceProcess
from tangram.bench.shared_http_client import MEMORY_MIB, WAIT_S, SharedHttpClient
from tangram.core.action import Action, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.core.policies import DEFAULT_POLICY, policy
from tangram.core.scheduler import Scheduler
from tangram.errors import ManagerError
from tangram.managers.base import Lease
from tangram.managers.sandboxes.leases import CompletedLease
from tangram.managers.work import Close, Exec, LeaseResult, Work
from tangram.processes.streams import Output
from tangram.reports.statistics import mean_of
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.wire import ActionReply

CORES = 64.0
"""No action waits for a core."""
SPARE_DESCRIPTORS = 200
"""File descriptors of a process in addition to its connections."""
GATE_S = 600.0
"""Duration of the action that all others wait for; it is cancelled earlier."""
SHOWN = 3
"""Errors in a note."""

NO_OP = Exec(command=("true",))


class HttpSizes(msgspec.Struct, frozen=True, kw_only=True):
    clients: int = 64
    round_s: float = 5.0
    rounds: int = 5
    """Repetitions, which give the spread."""
    singles: int = 500
    """Sequential actions per round."""
    waiting: int = 2000
    embedded: int = 30_000
    """Actions per round."""
    others: int = 3000
    """Tasks of other systems."""


LABEL = "measured"
FULL = HttpSizes()
QUICK = HttpSizes(round_s=2.0, rounds=3, singles=200, embedded=10_000, others=1000)


def measure(sizes: HttpSizes, run: BenchRun) -> None:
    asyncio.run(_measure_service(sizes, run, subprogress(run.progress, 0.0, 0.7)))
    rates = []
    for number in range(sizes.rounds):
        rates.append(run_in_fresh_process(embedded_rate, (sizes.embedded, sizes.clients), run.processes))
        run.progress(0.7 + 0.2 * (number + 1) / sizes.rounds)
    run.add("embedded_actions_per_s", mean_of(rates), at_least(10_000.0))
    add_other_systems(sizes, run)


async def _measure_service(sizes: HttpSizes, run: BenchRun, progress: Progress) -> None:
    tables = {"node": {"backend": "fake", "cores": CORES, "memory": f"{MEMORY_MIB * (sizes.clients + 4)}MiB"}}
    allow_descriptors(sizes.waiting)
    async with ServiceProcess(run.folder, tables) as service:

        async def run_in_process(job: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.to_thread(
                run_in_fresh_process, _run_job, (job, service.url, *arguments), run.processes
            )

        await run_in_process(_run_clients, sizes.clients, min(1.0, sizes.round_s))  # warm-up
        rates, medians, tails, costs = [], [], [], []
        for number in range(sizes.rounds):
            before = service.cpu_s()
            done, elapsed_s = await run_in_process(_run_clients, sizes.clients, sizes.round_s)
            rates.append(done / elapsed_s)
            costs.append((service.cpu_s() - before) / done * 1e6)
            times = await run_in_process(_sequential_latencies, sizes.singles)
            medians.append(statistics.median(times) * 1e3)
            tails.append(sorted(times)[int(0.99 * len(times))] * 1e3)
            progress(0.8 * (number + 1) / sizes.rounds)
        run.add("actions_per_s", mean_of(rates), at_least(1500.0))
        run.add("overhead_ms_p50", mean_of(medians), at_most(10.0))
        run.add("overhead_ms_p99", mean_of(tails), PRINTED)
        run.add("cpu_us_per_action", mean_of(costs), PRINTED)
        waiting, problems = await run_in_process(clients_waiting, sizes.waiting)
        run.add("waiting_clients", float(waiting), at_least(float(FULL.waiting)))
        progress(1.0)
    if problems:
        run.notes.append(f"waiting_clients: {problems[0]}")
    run.notes.append(
        f"The service and its clients shared {os.cpu_count()} cores; the CPU time of the service alone would allow"
        f" {1e6 / statistics.fmean(costs):.0f} actions per second of one core."
    )


def allow_descriptors(connections: int) -> None:
    """Raise the limit of this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = connections + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and required > hard:
        reason = f"{connections} connections need {required} open files, and the limit is {hard}: raise `ulimit -Hn`"
        raise ManagerError(reason, retry=False)
    if soft != resource.RLIM_INFINITY and required > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))


def add_other_systems(sizes: HttpSizes, run: BenchRun) -> None:
    for name, job in (("ray_tasks_per_s", ray_rate), ("dask_tasks_per_s", dask_rate)):
        rate = partial(run_in_fresh_process, job, (sizes.others, sizes.clients), run.processes)
        add_if_available(run, name, rate)


# ---- clients -----------------------------------------------------------------------------------------------------


def _run_job(job: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.run(job(*arguments))


async def _run_clients(url: str, clients: int, seconds: float) -> tuple[int, float]:
    """Return the number of actions of concurrent clients, each with its own sandbox, and the seconds that they took."""
    done = 0

    async def client(caller: SharedHttpClient, sandbox: str) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await caller.run_action(NO_OP, sandbox)
            done += 1

    async with SharedHttpClient(url) as caller:
        sandboxes = await asyncio.gather(*(caller.open_sandbox() for _ in range(clients)))
        began = time.perf_counter()
        end = began + seconds
        await asyncio.gather(*(client(caller, sandbox) for sandbox in sandboxes))
        elapsed = time.perf_counter() - began
        await asyncio.gather(*(caller.run_action(Close(), sandbox) for sandbox in sandboxes))
    return done, elapsed


async def _sequential_latencies(url: str, count: int) -> list[float]:
    times = []
    async with SharedHttpClient(url) as caller:
        sandbox = await caller.open_sandbox()
        for _ in range(count):
            began = time.perf_counter()
            await caller.run_action(NO_OP, sandbox)
            times.append(time.perf_counter() - began)
        await caller.run_action(Close(), sandbox)
    return times


async def clients_waiting(url: str, clients: int) -> tuple[int, list[str]]:
    """Return how many clients waited at once and got the right answer, or 0 and the errors."""
    demand = Demand({CPU: cores(CORES)})
    async with SharedHttpClient(url) as caller:
        sandbox = await caller.open_sandbox()
        gate = caller.new_id()
        held = asyncio.create_task(
            caller.run_action(Exec(command=f"sleep {GATE_S:g}"), sandbox, id=gate, demand=demand)
        )
        await _wait_for_metric(caller, "tangram_actions_running", 1)
        pending = [asyncio.create_task(caller.run_action(NO_OP, sandbox, demand=demand)) for _ in range(clients)]
        try:
            await _wait_for_metric(caller, "tangram_actions_waiting", clients, pending)
            answered = sum(task.done() for task in pending)
            await caller.request("POST", f"/v1/actions/{gate}/cancel")
            results = await asyncio.gather(*pending, return_exceptions=True)
        finally:
            for task in (held, *pending):
                task.cancel()
            await asyncio.gather(held, *pending, return_exceptions=True)
        await caller.run_action(Close(), sandbox)
    errors = [str(result) or type(result).__name__ for result in results if isinstance(result, BaseException)]
    if answered:
        errors.append(f"{answered} were answered before their actions could have ended")
    return (0, [f"{len(errors)} of {clients} went wrong: {'; '.join(errors[:SHOWN])}"]) if errors else (clients, [])


async def _wait_for_metric(
    caller: SharedHttpClient, metric: str, value: int, pending: list[asyncio.Task[ActionReply]] | None = None
) -> None:
    """Wait until a metric of the service has this value."""
    deadline = time.monotonic() + WAIT_S
    while True:
        text = (await caller.request("GET", "/metrics")).decode()
        if sum(float(number) for number in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)) == value:
            return
        failed = [task.exception() for task in pending or () if task.done() and not task.cancelled()]
        if any(failed) or time.monotonic() > deadline:
            raise ManagerError(f"expected {metric} to become {value}: {next(filter(None, failed), 'it did not')}")
        await asyncio.sleep(0.05)


# ---- inside one process -------------------------------------------------------------------------------------------


class NoOpWork(Work, frozen=True, tag="Nothing"):
    """Work that does nothing."""


class NoOpManager:
    """Executes nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def pools(self) -> tuple[Pool, ...]:
        return ()

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        return CompletedLease(LeaseResult())


def embedded_rate(count: int, clients: int) -> float:
    return asyncio.run(_embedded_rate(count, clients))


async def _embedded_rate(count: int, clients: int) -> float:
    """Return the actions per second of orchestrator and scheduler alone."""
    scheduler = Scheduler(policy(DEFAULT_POLICY), cpu_node("local", CORES))
    left = iter(range(count))
    demand = Demand({CPU: cores(1.0)})

    async def client(orchestrator: Orchestrator) -> None:
        for number in left:  # shared by all clients
            ticket = orchestrator.submit(Action(id=f"a{number}", demand=demand, kind="exec"), NoOpWork())
            settled = await ticket.settled
            assert settled.outcome.status is Status.SUCCEEDED, settled

    async with Orchestrator(scheduler, {}, {NoOpWork: NoOpManager()}) as orchestrator:
        began = time.perf_counter()
        await asyncio.gather(*(client(orchestrator) for _ in range(clients)))
        return count / (time.perf_counter() - began)
