"""The search API of lookup: its data, and a real rate-limited HTTP server on this machine.

Owns the names of all entities, the tables of episodes and the server. Never uses the question of an episode. Promises
that a response depends only on the seed of a table and on the query, and that requests above the rate get 429 with a
Retry-After, as from real APIs. It counts in sliding windows, without refused requests.

    async with SearchApi(requests_per_s=500) as api:
        GET {api.url}/search?table=7&name=bako&relation=owner     200 {"name": "dilu"}, 404, or 429
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tangram.cancellation import run_to_completion
from tangram.errors import InvalidConfig

if TYPE_CHECKING:
    from aiohttp import web

ENTITIES_COUNT, NAMES_EACH = 16, 8
"""128 names in all: a small judge learns them in seconds."""
SPELLINGS = 3
"""How many names of an entity appear in tables. Each is a word of the policy's vocabulary, so they are few."""
RELATIONS = ("owner", "rival", "guide", "maker")
WINDOW_S = 1.0
"""Length of the sliding window."""


def _names() -> tuple[tuple[str, ...], ...]:
    """Shuffled words of two syllables without meaning: names do not show which of them belong together."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    rng = random.Random("names of lookup")
    names = rng.sample([one + other for one in syllables for other in syllables], ENTITIES_COUNT * NAMES_EACH)
    return tuple(tuple(names[start : start + NAMES_EACH]) for start in range(0, len(names), NAMES_EACH))


ENTITIES: tuple[tuple[str, ...], ...] = _names()
"""The names of each entity."""
ENTITY_BY_NAME = {name: number for number, names in enumerate(ENTITIES) for name in names}


class RelationTable:
    """The relations between entities in one episode."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find(self, name: str, relation: str) -> str | None:
        """Returns a name of the entity in this relation to the named one; None for an unknown name or relation."""
        entity = ENTITY_BY_NAME.get(name)
        if entity is None or relation not in RELATIONS:
            return None
        rng = random.Random(f"lookup {self._seed} {entity} {relation}")
        return rng.choice(ENTITIES[rng.randrange(ENTITIES_COUNT)][:SPELLINGS])


class SlidingWindowLimiter:
    """A rate limiter with a sliding window; time is an argument."""

    def __init__(self, units: int, seconds: float) -> None:
        self._seconds = seconds
        self._units = units
        self._admitted_at: deque[float] = deque()

    def acquire(self, now: float) -> float:
        """Returns 0 if the request is admitted, else the seconds until one will be."""
        while self._admitted_at and self._admitted_at[0] <= now - self._seconds:
            self._admitted_at.popleft()
        if len(self._admitted_at) < self._units:
            self._admitted_at.append(now)
            return 0.0
        return self._admitted_at[0] + self._seconds - now


class SearchApi:
    """The server, as a context manager on the event loop that enters it."""

    def __init__(
        self, *, requests_per_s: int, latency_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        if type(requests_per_s) is not int or requests_per_s < 1:
            raise InvalidConfig("requests_per_s", requests_per_s, "a whole number, at least 1")
        if type(latency_s) not in (int, float) or not 0.0 <= latency_s < 3600.0:
            raise InvalidConfig("latency_s", latency_s, "seconds, from 0 to an hour")
        self._latency_s = latency_s
        self._limiter = SlidingWindowLimiter(requests_per_s, WINDOW_S)
        self._now = now
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.served = 0
        self.refused = 0
        """Number of requests since it was entered."""

    async def __aenter__(self) -> Self:
        try:
            # asyncio loses a socket whose listen call is cancelled, so that call comes later.
            await run_to_completion(self._start())
        except BaseException:
            await self._stop()
            raise
        return self

    async def _start(self) -> None:
        from aiohttp import web

        app = web.Application()
        app.add_routes([web.get("/search", self._search)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await run_to_completion(runner.cleanup())

    async def _search(self, request: web.Request) -> web.Response:
        from aiohttp import web

        wait_s = self._limiter.acquire(self._now())
        if wait_s > 0.0:
            self.refused += 1
            return web.json_response({"error": "too many"}, status=429, headers={"Retry-After": f"{wait_s:.3f}"})
        self.served += 1
        await asyncio.sleep(self._latency_s)
        query = request.query
        try:
            seed = int(query.get("table", ""))
        except ValueError:
            return web.json_response({"error": "table: expected a whole number"}, status=400)
        name_found = RelationTable(seed).find(query.get("name", ""), query.get("relation", ""))
        if name_found is None:
            return web.json_response({"error": "nothing is known of this"}, status=404)
        return web.json_response({"name": name_found})
