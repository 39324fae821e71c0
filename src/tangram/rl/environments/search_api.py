"""The search API of lookup: what can be found, and a real server on this machine that finds it, at a limited rate.

Owns the names of all entities, the tables of episodes and the server. Never knows which question is asked, or why.
Promises that an answer depends on the seed of a table and on what is asked, and on nothing else; and that what exceeds
the rate is refused with 429 and a Retry-After, as real APIs do it. It counts in windows that slide: a request that was
refused does not count.

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

from tangram.errors import InvalidConfig
from tangram.runtime.orchestrator import undisturbed

if TYPE_CHECKING:
    from aiohttp import web

ENTITIES_COUNT, NAMES_EACH = 16, 8
"""128 names in all: what a small judge learns in seconds."""
SPELLINGS = 3
"""Of the names of an entity, how many tables write. Each is a word of the policy's vocabulary, so they are few."""
RELATIONS = ("owner", "rival", "guide", "maker")
WINDOW_S = 1.0
"""In which requests are counted."""


def _names() -> tuple[tuple[str, ...], ...]:
    """Words of two syllables that mean nothing, shuffled: what belongs together cannot be told by looking."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    chance = random.Random("names of lookup")
    found = chance.sample([one + other for one in syllables for other in syllables], ENTITIES_COUNT * NAMES_EACH)
    return tuple(tuple(found[start : start + NAMES_EACH]) for start in range(0, len(found), NAMES_EACH))


ENTITIES: tuple[tuple[str, ...], ...] = _names()
"""The names of each."""
ENTITY_BY_NAME = {name: number for number, names in enumerate(ENTITIES) for name in names}


class Table:
    """Which entity is in which relation to which, in one episode."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find(self, name: str, relation: str) -> str | None:
        """A name of the entity that is in this relation to the one of that name, which may be any of its names. None:
        there is no such name or relation."""
        entity = ENTITY_BY_NAME.get(name)
        if entity is None or relation not in RELATIONS:
            return None
        chance = random.Random(f"lookup {self._seed} {entity} {relation}")
        return chance.choice(ENTITIES[chance.randrange(ENTITIES_COUNT)][:SPELLINGS])


class Gate:
    """Counts requests, by time that comes in as an argument."""

    def __init__(self, units: int, seconds: float) -> None:
        self._seconds = seconds
        self._units = units
        self._let_in: deque[float] = deque()

    def enter(self, now: float) -> float:
        """0 if there is room, else the seconds after which there will be."""
        while self._let_in and self._let_in[0] <= now - self._seconds:
            self._let_in.popleft()
        if len(self._let_in) < self._units:
            self._let_in.append(now)
            return 0.0
        return self._let_in[0] + self._seconds - now


class SearchApi:
    """The server, from start to end. It lives on the event loop of whoever enters it, and ends with its context."""

    def __init__(
        self, *, requests_per_s: int, latency_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        if type(requests_per_s) is not int or requests_per_s < 1:
            raise InvalidConfig("requests_per_s", requests_per_s, "a whole number, at least 1")
        if type(latency_s) not in (int, float) or not 0.0 <= latency_s < 3600.0:
            raise InvalidConfig("latency_s", latency_s, "seconds, from 0 to an hour")
        self._latency_s = latency_s
        self._gate = Gate(requests_per_s, WINDOW_S)
        self._now = now
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.served = 0
        self.refused = 0
        """Requests, since it was entered."""

    async def __aenter__(self) -> Self:
        try:
            # asyncio forgets a socket whose listening is cancelled, so that comes after it.
            await undisturbed(self._start())
        except BaseException:
            await self._end()
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
        await self._end()

    async def _end(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await undisturbed(runner.cleanup())

    async def _search(self, request: web.Request) -> web.Response:
        from aiohttp import web

        wait_s = self._gate.enter(self._now())
        if wait_s > 0.0:
            self.refused += 1
            return web.json_response({"error": "too many"}, status=429, headers={"Retry-After": f"{wait_s:.3f}"})
        self.served += 1
        await asyncio.sleep(self._latency_s)
        asked = request.query
        try:
            seed = int(asked.get("table", ""))
        except ValueError:
            return web.json_response({"error": "table: expected a whole number"}, status=400)
        found = Table(seed).find(asked.get("name", ""), asked.get("relation", ""))
        if found is None:
            return web.json_response({"error": "nothing is known of this"}, status=404)
        return web.json_response({"name": found})
