"""A burst of calls to an API that enforces its quota: shared by action, and without any control.

Two servers in processes of their own count requests, one in fixed windows that begin whenever they began, one as a
bucket; what is too much is answered with 429. Fifty clients of four runs make all calls at once. Uncontrolled, each
call is repeated a few times with growing pauses, as clients do.

`rejected` counts the 429s of both servers; `quota_used` is what the fixed windows allow in the time that all full
windows of calls took, over what was used; `uncontrolled_failed` the share of calls that were given up.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, at_most
from tangram.bench.quota_server import Served, ServerProcess
from tangram.client.api import BYTES_MAX
from tangram.client.client import Client, connect
from tangram.errors import ManagerError
from tangram.managers.http import Http, pause_s
from tangram.managers.quotas.manager import Quota, Rate


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    calls: int = 10_000
    clients: int = 50
    runs: int = 4
    units: int = 2000
    """Requests per window."""
    window_s: float = 4.0
    latency_s: float = 0.01
    """Of the server."""


FULL = Sizes()
QUICK = Sizes(calls=2000, units=500, window_s=1.5)

TRIES = 4
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""Uncontrolled: before the second try, doubled before each that follows, less a part by chance."""


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    return asyncio.run(_measure(sizes, progress))


async def _measure(sizes: Sizes, progress: Progress) -> BenchResult:
    found = Findings()
    told = iter(range(1, 4))

    def next_part() -> None:
        progress(next(told) / 3, "")

    fixed, waits = await _controlled(sizes, bucket=False)
    next_part()
    bucket, _ = await _controlled(sizes, bucket=True)
    next_part()
    uncontrolled, failed, uncontrolled_s = await _uncontrolled(sizes)
    next_part()
    found.add("rejected", float(fixed.rejected + bucket.rejected), at_most(0.0))
    found.add("quota_used", _used(fixed.arrivals, sizes), at_least(0.95))
    found.add("quota_used_bucket", _used(bucket.arrivals, sizes), PRINTED)
    found.add("uncontrolled_failed", failed / sizes.calls, PRINTED)
    found.add("uncontrolled_rejected", float(uncontrolled.rejected), PRINTED)
    found.add("seconds", fixed.arrivals[-1] - fixed.arrivals[0], PRINTED)
    found.add("uncontrolled_seconds", uncontrolled_s, PRINTED)
    found.add("run_spread", max(waits) / min(waits), PRINTED)
    found.notes.append("run_spread: mean ACT of the run with the highest over that of the one with the lowest.")
    return found.result("quota", "measured", sizes)


def _used(arrivals: list[float], sizes: Sizes) -> float:
    """The first call of the last window could have come after all windows before it, and not sooner."""
    full = (sizes.calls - 1) // sizes.units
    return full * sizes.window_s / (arrivals[full * sizes.units] - arrivals[0])


async def _controlled(sizes: Sizes, *, bucket: bool) -> tuple[Served, list[float]]:
    """What the server saw, and the mean waiting of each run."""
    async with ServerProcess(sizes.units, sizes.window_s, bucket=bucket, latency_s=sizes.latency_s) as server:
        quota = Quota("search", concurrent=sizes.clients, requests=Rate(sizes.units, sizes.window_s))
        waits: dict[str, list[float]] = {f"run-{number}": [] for number in range(sizes.runs)}
        async with connect(backend="process", quotas=[quota]) as t:
            left = iter(range(sizes.calls))
            await t.gather(*(_calls(t, server.url, run, left, waits[run]) for run in _shared_out(sizes)))
        return await server.served(), [statistics.fmean(seconds) for seconds in waits.values()]


def _shared_out(sizes: Sizes) -> list[str]:
    """The run of each client."""
    return [f"run-{number % sizes.runs}" for number in range(sizes.clients)]


async def _calls(t: Client, url: str, run: str, left: Iterator[int], waits: list[float]) -> None:
    api = t.api("search", url, run=run, retries=0)
    for _ in left:  # shared by all clients
        began = time.monotonic()
        answer = await api.get("call")
        assert answer.ok, answer
        waits.append(time.monotonic() - began)


async def _uncontrolled(sizes: Sizes) -> tuple[Served, int, float]:
    """What the server saw, how many calls were given up, and the seconds that all took."""
    failed = 0
    http = Http()
    left = iter(range(sizes.calls))

    async def client() -> None:
        nonlocal failed
        for _ in left:
            failed += not await _insisting(http, f"{server.url}/call")

    async with ServerProcess(sizes.units, sizes.window_s, bucket=False, latency_s=sizes.latency_s) as server:
        began = time.monotonic()
        try:
            await asyncio.gather(*(client() for _ in range(sizes.clients)))
        finally:
            await http.close()
        return await server.served(), failed, time.monotonic() - began


async def _insisting(http: Http, url: str) -> bool:
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(pause_s(attempt, BACKOFF_S, BACKOFF_S_MAX))
        try:
            if (await http.request("GET", url, timeout_s=60.0, bytes_max=BYTES_MAX)).ok:
                return True
        except ManagerError:
            continue
    return False
