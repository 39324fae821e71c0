"""A burst of calls to an API that enforces its quota: scheduled by action, and uncontrolled.

Two servers in separate processes count requests, one in fixed windows with an unknown start, one as a token bucket;
excess requests get a 429. Fifty clients of four runs make all calls at once. Uncontrolled, each call is retried a few
times with exponential backoff, as clients do.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

import msgspec

from tangram.bench.base import PRINTED, BenchRun, at_least, at_most, step_counter
from tangram.bench.quota_server import QuotaServerProcess, QuotaServerStats
from tangram.client.api import BYTES_MAX
from tangram.client.client import Client, connect
from tangram.errors import ManagerError
from tangram.managers.http import HttpClient, backoff_s
from tangram.managers.quotas.manager import Quota, Rate


class QuotaSizes(msgspec.Struct, frozen=True, kw_only=True):
    calls: int = 10_000
    clients: int = 50
    runs: int = 4
    units: int = 2000
    """Requests per window."""
    window_s: float = 4.0
    latency_s: float = 0.01
    """Latency of the server."""


LABEL = "measured"
FULL = QuotaSizes()
QUICK = QuotaSizes(calls=2000, units=500, window_s=1.5)

TRIES = 4
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
"""Uncontrolled: before the first retry, doubled for each that follows, with random jitter."""


async def measure(sizes: QuotaSizes, run: BenchRun) -> None:
    advance = step_counter(run.progress, 3)
    fixed, waits = await _run_controlled(sizes, bucket=False)
    advance("")
    bucket, _ = await _run_controlled(sizes, bucket=True)
    advance("")
    uncontrolled, failed, uncontrolled_s = await _run_uncontrolled(sizes)
    advance("")
    run.add("rejected", float(fixed.rejected + bucket.rejected), at_most(0.0))
    run.add("quota_used", _quota_used(fixed.arrivals, sizes), at_least(0.95))
    run.add("quota_used_bucket", _quota_used(bucket.arrivals, sizes), PRINTED)
    run.add("uncontrolled_failed", failed / sizes.calls, PRINTED)
    run.add("uncontrolled_rejected", float(uncontrolled.rejected), PRINTED)
    run.add("seconds", fixed.arrivals[-1] - fixed.arrivals[0], PRINTED)
    run.add("uncontrolled_seconds", uncontrolled_s, PRINTED)
    run.add("run_spread", max(waits) / min(waits), PRINTED)
    run.notes.append("run_spread: the highest mean ACT of a run divided by the lowest.")


def _quota_used(arrivals: list[float], sizes: QuotaSizes) -> float:
    """Return the share used. The earliest possible time of the first call in the last window is after all windows
    before it."""
    full = (sizes.calls - 1) // sizes.units
    return full * sizes.window_s / (arrivals[full * sizes.units] - arrivals[0])


async def _run_controlled(sizes: QuotaSizes, *, bucket: bool) -> tuple[QuotaServerStats, list[float]]:
    """Return the server's counts, and the mean waiting time of each run."""
    async with QuotaServerProcess(sizes.units, sizes.window_s, bucket=bucket, latency_s=sizes.latency_s) as server:
        quota = Quota("search", concurrent=sizes.clients, requests=Rate(sizes.units, sizes.window_s))
        waits: dict[str, list[float]] = {f"run-{number}": [] for number in range(sizes.runs)}
        async with connect(backend="process", quotas=[quota]) as t:
            left = iter(range(sizes.calls))
            await t.gather(*(_calls(t, server.url, run, left, waits[run]) for run in _run_by_client(sizes)))
        return await server.stats(), [statistics.fmean(seconds) for seconds in waits.values()]


def _run_by_client(sizes: QuotaSizes) -> list[str]:
    """Return the run of each client."""
    return [f"run-{number % sizes.runs}" for number in range(sizes.clients)]


async def _calls(t: Client, url: str, run: str, left: Iterator[int], waits: list[float]) -> None:
    api = t.api("search", url, run=run, retries=0)
    for _ in left:  # shared by all clients
        began_at_s = time.monotonic()
        response = await api.get("call")
        assert response.ok, response
        waits.append(time.monotonic() - began_at_s)


async def _run_uncontrolled(sizes: QuotaSizes) -> tuple[QuotaServerStats, int, float]:
    """Return the server's counts, the calls that ran out of retries, and the total seconds."""
    failed = 0
    http = HttpClient()
    left = iter(range(sizes.calls))

    async def client() -> None:
        nonlocal failed
        for _ in left:
            failed += not await _call_with_retries(http, f"{server.url}/call")

    async with QuotaServerProcess(sizes.units, sizes.window_s, bucket=False, latency_s=sizes.latency_s) as server:
        began_at_s = time.monotonic()
        try:
            await asyncio.gather(*(client() for _ in range(sizes.clients)))
        finally:
            await http.close()
        return await server.stats(), failed, time.monotonic() - began_at_s


async def _call_with_retries(http: HttpClient, url: str) -> bool:
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(backoff_s(attempt, BACKOFF_S, BACKOFF_S_MAX))
        try:
            if (await http.request("GET", url, timeout_s=60.0, bytes_max=BYTES_MAX)).ok:
                return True
        except ManagerError:
            continue
    return False
