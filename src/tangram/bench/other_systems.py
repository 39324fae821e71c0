"""No-op calls of other systems, where they are installed: Ray, Dask, and a Docker engine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from tangram.bench.base import PRINTED, BenchRun

WORKERS = 2
"""Worker processes of Ray and Dask."""


class SystemUnavailable(Exception):
    """A system is not installed; the message says what is missing."""


def add_if_available(run: BenchRun, name: str, measure: Callable[[], float]) -> None:
    """Add a metric, or a note that says why it is not measured."""
    try:
        run.add(name, measure(), PRINTED)
    except SystemUnavailable as reason:
        run.notes.append(f"{name} is not measured: {reason}.")


def ray_rate(count: int, at_once: int) -> float:
    """Return the tasks per second of a local Ray."""
    with _ray() as ray:
        task = ray.remote(num_cpus=1)(_no_op)
        ray.get([task.remote() for _ in range(at_once)])
        began = time.perf_counter()
        under_way = [task.remote() for _ in range(at_once)]
        for _ in range(count - at_once):
            done, under_way = ray.wait(under_way)
            ray.get(done)
            under_way.append(task.remote())
        ray.get(under_way)
        return count / (time.perf_counter() - began)


def ray_call_times(count: int) -> list[float]:
    """Return the seconds of sequential tasks on a local Ray."""
    with _ray() as ray:
        task = ray.remote(num_cpus=1)(_no_op)
        ray.get(task.remote())
        return _time_calls(count, lambda: ray.get(task.remote()))


@contextlib.contextmanager
def _ray() -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        raise SystemUnavailable("Ray is not installed (pip install ray)")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def dask_rate(count: int, at_once: int) -> float:
    """Return the tasks per second of a local Dask scheduler with worker processes."""
    if importlib.util.find_spec("distributed") is None:
        raise SystemUnavailable("Dask is not installed (pip install distributed)")
    distributed = importlib.import_module("distributed")
    with (
        distributed.LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.gather([client.submit(_no_op, pure=False) for _ in range(at_once)])
        began = time.perf_counter()
        first = [client.submit(_no_op, pure=False) for _ in range(at_once)]
        under_way = distributed.as_completed(first, with_results=True)  # individual waits would cost a request each
        for number, _ in enumerate(under_way):
            if number < count - at_once:
                under_way.add(client.submit(_no_op, pure=False))
        return count / (time.perf_counter() - began)


def docker_call_times(count: int, program: str) -> list[float]:
    """Return the seconds of `docker exec` in a running container, with the command line client."""
    if shutil.which("docker") is None:
        raise SystemUnavailable("there is no docker command")
    shown = subprocess.run(["docker", "ps", "--quiet"], capture_output=True, text=True, check=False)
    if shown.returncode != 0 or not shown.stdout.split():
        raise SystemUnavailable("no Docker engine with a running container is reachable (DOCKER_HOST)")
    container = shown.stdout.split()[0]
    return _time_calls(count, lambda: subprocess.run(["docker", "exec", container, program], check=True))


def _time_calls(count: int, call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(count):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return times


def _no_op() -> None:
    pass
