"""The job of `bench http` elsewhere: inside one process, with Ray and with Dask.

Each runs no-op actions or tasks with a given concurrency, and returns the rate per second.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import time
from types import TracebackType
from typing import Self

from tangram.core.action import Action, Status
from tangram.core.demand import CPU, Demand, cores
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.base import Lease
from tangram.managers.sandboxes.leases import CompletedLease
from tangram.managers.work import LeaseResult, Work
from tangram.processes.streams import Output
from tangram.runtime.orchestrator import Orchestrator

CORES = 64.0
"""No action waits for a core."""
CPUS = 2
"""Worker processes of Ray and Dask."""

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
    return asyncio.run(_embedded(count, clients))


async def _embedded(count: int, clients: int) -> float:
    """Return the actions per second of orchestrator and scheduler alone."""
    scheduler = Scheduler(policy("adaptive"), cpu_node("local", CORES))
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


# ---- others -------------------------------------------------------------------------------------------------------


class SystemUnavailable(Exception):
    """A system is not installed; the message says what is missing."""


def ray_rate(count: int, at_once: int) -> float:
    """Return the tasks per second of a local Ray."""
    if importlib.util.find_spec("ray") is None:
        raise SystemUnavailable("Ray is not installed (pip install ray)")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        task = ray.remote(num_cpus=1)(no_op)
        ray.get([task.remote() for _ in range(at_once)])
        began = time.perf_counter()
        under_way = [task.remote() for _ in range(at_once)]
        for _ in range(count - at_once):
            done, under_way = ray.wait(under_way)
            ray.get(done)
            under_way.append(task.remote())
        ray.get(under_way)
        return count / (time.perf_counter() - began)
    finally:
        ray.shutdown()


def dask_rate(count: int, at_once: int) -> float:
    """Return the tasks per second of a local Dask scheduler with worker processes."""
    if importlib.util.find_spec("distributed") is None:
        raise SystemUnavailable("Dask is not installed (pip install distributed)")
    distributed = importlib.import_module("distributed")
    with (
        distributed.LocalCluster(
            n_workers=CPUS, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.gather([client.submit(no_op, pure=False) for _ in range(at_once)])
        began = time.perf_counter()
        first = [client.submit(no_op, pure=False) for _ in range(at_once)]
        under_way = distributed.as_completed(first, with_results=True)  # individual waits would cost a request each
        for number, _ in enumerate(under_way):
            if number < count - at_once:
                under_way.add(client.submit(no_op, pure=False))
        return count / (time.perf_counter() - began)


def no_op() -> None:
    pass
