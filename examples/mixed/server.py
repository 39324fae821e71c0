"""The search API: a separate process that answers queries from a small library and enforces a quota.

Owns the library. Requests are counted in fixed time windows, as in the benchmark `quota`; excess requests get a 429 and
do not count. Everything is drawn from a seed, so agents with scripts from the same seed have the right answers.

    python server.py UNITS SECONDS SEED     listens on a free local port, prints it, exits at the end of its input
    GET /search?q=...                       the sentence that fits best; counts against the quota
    GET /served                             served and rejected requests; does not count
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sys
import time
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from tangram.bench.quota_server import FIXED, QuotaServerStats, RequestLimiter
from tangram.errors import ManagerError

LATENCY_S = 0.02
"""Latency of an answer."""
COLOURS = ("amber", "black", "blue", "copper", "golden", "green", "grey", "ivory", "red", "silver", "violet", "white")
PLACES = (
    "bridge",
    "canal",
    "harbour",
    "hill",
    "island",
    "lake",
    "market",
    "quarry",
    "river",
    "tower",
    "tunnel",
    "wall",
)
DIGESTS = ("cedar", "dahlia", "elder", "fennel", "ginger", "hazel", "juniper", "laurel")
"""Checksums that coding agents implement; the manual of each is in the library."""


class Digest(NamedTuple):
    """`value = (value * factor + summand) % modulus`, repeated."""

    name: str
    factor: int
    summand: int
    modulus: int


class Library(NamedTuple):
    """The searchable content."""

    lengths: dict[str, int]
    """In metres, by place."""
    digests: dict[str, Digest]

    def sentences(self) -> list[str]:
        places = [f"The {place} is {metres} metres long." for place, metres in self.lengths.items()]
        manuals = [
            f"The {digest.name} digest has factor {digest.factor}, summand {digest.summand}, modulus {digest.modulus}."
            for digest in self.digests.values()
        ]
        return places + manuals


def library(seed: int) -> Library:
    draw = random.Random(f"library-{seed}")
    lengths = {f"{colour} {place}": draw.randrange(10, 5000) for colour, place in itertools.product(COLOURS, PLACES)}
    digests = {
        name: Digest(name, draw.randrange(3, 500), draw.randrange(1, 10_000), draw.randrange(10_000, 100_000))
        for name in DIGESTS
    }
    return Library(lengths, digests)


def words_of(text: str) -> frozenset[str]:
    return frozenset(text.lower().rstrip(".?").split())


def best(query: str, shelves: list[tuple[str, frozenset[str]]]) -> str:
    """Return the sentence that shares the most words with the query."""
    words = words_of(query)
    return max(shelves, key=lambda shelf: len(words & shelf[1]))[0]


# ---- seen from the command --------------------------------------------------------------------------------------


class SearchServer:
    """A server process."""

    def __init__(self, units: int, seconds: float, seed: int) -> None:
        self._words = [__file__, str(units), str(seconds), str(seed)]
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._words, stdin=pipe, stdout=pipe
        )
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
            if not line:
                raise ManagerError("the search server exited before it listened; its output is above", retry=False)
            self.port = int(line)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.shield(self._process.wait())

    async def served(self) -> QuotaServerStats:
        import aiohttp

        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/served") as response:
            return msgspec.json.decode(await response.read(), type=QuotaServerStats)


# ---- the process ------------------------------------------------------------------------------------------------


async def serve(units: int, seconds: float, seed: int) -> None:
    from aiohttp import web

    shelves = [(sentence, words_of(sentence)) for sentence in library(seed).sentences()]
    served = QuotaServerStats()
    gate = RequestLimiter(units, seconds, FIXED, time.monotonic())

    async def search(request: web.Request) -> web.Response:
        now = time.monotonic()
        wait_s = gate.try_acquire(now)
        if wait_s > 0.0:
            served.rejected += 1
            return web.Response(text="too many", status=429, headers={"Retry-After": f"{wait_s:.3f}"})
        served.arrivals.append(now)
        await asyncio.sleep(LATENCY_S)
        return web.Response(text=best(request.query.get("q", ""), shelves))

    async def tell(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(served))

    app = web.Application()
    app.add_routes([web.get("/search", search), web.get("/served", tell)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends this process
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
