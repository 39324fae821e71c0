"""An API that enforces its quota: excess requests get a 429 with Retry-After.

`python -m tangram.bench.quota_server UNITS SECONDS KIND LATENCY` listens on a free local port, prints it, and exits at
the end of its input. GET /call is a counted request, GET /served returns the counts.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from types import TracebackType
from typing import Self

import msgspec

from tangram.managers.http import HttpClient

STATS_S_MAX, STATS_BYTES_MAX = 60.0, 1 << 30
FIXED, BUCKET = "fixed", "bucket"


class QuotaServerStats(msgspec.Struct):
    """Counts of a server."""

    rejected: int = 0
    arrivals: list[float] = []
    """Arrival of each served request, on the server's clock."""


class RequestLimiter:
    """Counts requests; the caller passes the time."""

    def __init__(self, units: int, seconds: float, kind: str, now: float) -> None:
        self._units = units
        self._seconds = seconds
        self._kind = kind
        self._left = float(units)
        self._at = now

    def try_acquire(self, now: float) -> float:
        """Return 0 if the request is admitted, otherwise the seconds until it can be."""
        if self._kind == BUCKET:
            self._left = min(self._units, self._left + (now - self._at) * self._units / self._seconds)
            self._at = now
        elif now >= self._at + self._seconds:
            self._at += math.floor((now - self._at) / self._seconds) * self._seconds
            self._left = float(self._units)
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        if self._kind == BUCKET:
            return (1.0 - self._left) * self._seconds / self._units
        return self._at + self._seconds - now


class QuotaServerProcess:
    """A server in a separate process."""

    def __init__(self, units: int, seconds: float, *, bucket: bool, latency_s: float = 0.0) -> None:
        kind = BUCKET if bucket else FIXED
        self._arguments = ["-m", "tangram.bench.quota_server", str(units), str(seconds), kind, str(latency_s)]
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, *self._arguments, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(await self._process.stdout.readline())}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def stats(self) -> QuotaServerStats:
        http = HttpClient()
        try:
            response = await http.request("GET", f"{self.url}/served", timeout_s=STATS_S_MAX, bytes_max=STATS_BYTES_MAX)
        finally:
            await http.close()
        return msgspec.json.decode(response.content, type=QuotaServerStats)


async def _serve(units: int, seconds: float, kind: str, latency_s: float) -> None:
    from aiohttp import web

    served = QuotaServerStats()
    gate = RequestLimiter(units, seconds, kind, time.monotonic())

    async def call(_: web.Request) -> web.Response:
        now = time.monotonic()
        wait_s = gate.try_acquire(now)
        if wait_s > 0.0:
            served.rejected += 1
            return web.json_response({"error": "too many"}, status=429, headers={"Retry-After": f"{wait_s:.3f}"})
        served.arrivals.append(now)
        await asyncio.sleep(latency_s)
        return web.json_response({"found": len(served.arrivals)})

    async def report_served(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(served))

    app = web.Application()
    app.add_routes([web.get("/call", call), web.get("/served", report_served)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
