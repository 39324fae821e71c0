"""An API that enforces its quota: what is too much is answered with 429 and when to come back.

`python -m tangram.bench.quota_server UNITS SECONDS KIND LATENCY` listens on a free port of this machine, prints it, and
ends with its input. GET /call is a request that counts, GET /served tells what was counted.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from types import TracebackType
from typing import Self

import msgspec

FIXED, BUCKET = "fixed", "bucket"


class Served(msgspec.Struct):
    """What a server has seen."""

    rejected: int = 0
    arrivals: list[float] = []
    """When each request came that was served, in its own seconds."""


class Gate:
    """Counts requests, by time that comes in as an argument."""

    def __init__(self, units: int, seconds: float, kind: str, now: float) -> None:
        self._units = units
        self._seconds = seconds
        self._kind = kind
        self._left = float(units)
        self._at = now

    def enter(self, now: float) -> float:
        """0 if there is room, else the seconds after which there will be."""
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


class ServerProcess:
    """A server in a process of its own, from start to end."""

    def __init__(self, units: int, seconds: float, *, bucket: bool, latency_s: float = 0.0) -> None:
        kind = BUCKET if bucket else FIXED
        self._words = ["-m", "tangram.bench.quota_server", str(units), str(seconds), kind, str(latency_s)]
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, *self._words, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(await self._process.stdout.readline())}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def served(self) -> Served:
        import aiohttp

        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/served") as response:
            return msgspec.json.decode(await response.read(), type=Served)


async def _serve(units: int, seconds: float, kind: str, latency_s: float) -> None:
    from aiohttp import web

    served = Served()
    gate = Gate(units, seconds, kind, time.monotonic())

    async def call(_: web.Request) -> web.Response:
        now = time.monotonic()
        wait_s = gate.enter(now)
        if wait_s > 0.0:
            served.rejected += 1
            return web.json_response({"error": "too many"}, status=429, headers={"Retry-After": f"{wait_s:.3f}"})
        served.arrivals.append(now)
        await asyncio.sleep(latency_s)
        return web.json_response({"found": len(served.arrivals)})

    async def tell(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(served))

    app = web.Application()
    app.add_routes([web.get("/call", call), web.get("/served", tell)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
