"""A keeper: one engine in the care of a gateway, from its first start to its removal.

Owns the life of the engine: nobody else starts, updates or closes it, and it does these one after the other, so that
updates, deaths, restarts and the end cannot race. Never routes, and never sees a token. Promises that its engine has
the newest weights whenever it begins to serve, that it stands still for new ones only to switch to them, that a death
leads to a restart or to a removal, that an engine which serves nobody is removed though it starts well each time, and
that whoever waits for it is told of every change. An engine that refuses
weights and keeps its old ones goes on serving: what becomes of it then depends on what the others did, so its gateway
decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import msgspec

from tangram.errors import ManagerError, TangramError
from tangram.rl.inference.engines.protocol import Engine, EngineDied, Weights
from tangram.rl.inference.router_records import (
    TRANSITIONS,
    EngineLost,
    EngineRemoved,
    EngineStarted,
    EngineUpdated,
    Event,
    Kept,
    State,
)

BACKOFF_S, BACKOFF_S_MAX = 0.2, 30.0
"""Before the first restart, doubled with every death within the window: an engine that dies at once should not take a
core for dying, one that died of bad luck should be back soon."""
GIVEN_UP_MAX = 5
"""Requests in a row that were given up because the engine died with them, while it served no other: from then on it is
the engine that kills, not they. One that answers a probe and fails at everything else would go on for ever."""
REFUSED_MAX = 32
"""Requests in a row that it refused while it served none, after which it counts as dead: more than the members of a
group and those that take their places usually are, as what is wrong with one is wrong with all of them."""
CLOSE_S_MAX = 30.0
"""An engine that does not even end is left to itself."""
WORLD = (TangramError, OSError)
"""What an engine may raise without being our bug; time that has run out is an OSError."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    deaths_max: int
    window_s: float
    start_s_max: float
    update_s_max: float


class Order(NamedTuple):
    """Weights that all engines should have. No two have the same number; later ones have higher ones."""

    number: int
    weights: Weights


class Death(NamedTuple):
    at_s: float
    life: int
    """0: it did not come to life."""


class _Spent:
    """On one update."""

    pull_s = exposed_s = 0.0


class Keeper:
    def __init__(self, engine: Engine, limits: Limits, tell: Callable[[Event], None], changed: Callable[[], None]):
        self.engine = engine
        self.state = State.STARTING
        self.reason = ""
        self.life = 0
        self.has: Order | None = None
        """Whose weights it has, or had when it died."""
        self.refused = 0
        """The number of the order whose weights it did not take last, and why:"""
        self.refusal = ""
        self.load = 0
        self.requests = 0
        self.served = 0
        self._served_s = -math.inf
        """When it did last. In a row since then, with none served:"""
        self._given_up = self._turned_away = 0
        self.closed_life = 0
        """The last life that we ended, or that ended for want of a place: what was inside then did not kill it."""
        self._limits = limits
        self._tell = tell
        self._changed = changed
        self._order: Order | None = None
        self._wake = asyncio.Event()
        self._inside_at_death = 0
        self._deaths: list[Death] = []
        self._forgiven: set[int] = set()

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def hardware(self) -> str:
        return self.engine.hardware

    @property
    def trains(self) -> bool:
        return self.engine.trains

    @property
    def applied(self) -> int:
        """The number of the order whose weights it has."""
        return self.has.number if self.has is not None else 0

    @property
    def _version(self) -> int:
        return self.has.weights.version if self.has is not None else 0

    @property
    def epoch(self) -> tuple[int, int]:
        """What it has read is there as long as this stays the same."""
        return self.life, self.applied

    @property
    def serves(self) -> bool:
        return self.state is State.SERVING

    @property
    def gone(self) -> bool:
        return self.state in (State.REMOVED, State.CLOSED)

    def kept(self) -> Kept:
        return Kept(
            name=self.name,
            hardware=self.hardware,
            state=self.state,
            trains=self.trains,
            version=self._version,
            requests=self.requests,
            load=self.load,
            served=self.served,
            lives=self.life,
            reason="" if self.serves else self.reason,
        )

    # ---- what a gateway says ----

    def want(self, order: Order) -> None:
        self._order = order
        self._wake.set()

    def replace(self) -> None:
        """Others took what it refused: it is ended, and starts with these weights."""
        if self.serves:
            self._end_life(f"did not take its weights: {self.refusal}")
            self._wake.set()

    def lost(self, life: int, reason: str, *, blameless: bool = False) -> None:
        """A request saw it die. The first one counts. `blameless`: nobody who is inside is to blame."""
        if self.serves and life == self.life:
            self.closed_life = life if blameless else self.closed_life
            self._inside_at_death = self.requests + 1  # it has left already; the others have not heard yet
            self._become(State.DOWN, reason)
            self._wake.set()

    def answered(self) -> None:
        """It served a request."""
        self.served += 1
        self._served_s = asyncio.get_running_loop().time()
        self._given_up = self._turned_away = 0

    def forgive(self, lives: Collection[int]) -> None:
        """It was a request that killed it in these lives, so that they do not count. But if it is said of one request
        after the other and none is served, then it was not they."""
        self._given_up += 1
        if self._given_up < GIVEN_UP_MAX:
            self._forgiven.update(lives)
        else:
            self._forgiven.clear()

    def turned_away(self, life: int, reason: str) -> None:
        """It refused a request, and lives."""
        self._turned_away += 1
        if self._turned_away >= REFUSED_MAX:
            said = f"it refused {self._turned_away} requests in a row and served none; the last: {reason}"
            self.lost(life, said, blameless=True)
            self._turned_away = 0

    def closed(self) -> None:
        if self.state is not State.CLOSED:
            self.closed_life = self.life
            self._become(State.CLOSED, "the gateway was closed")

    # ---- its life ----

    async def run(self) -> None:
        """Until it is removed or cancelled."""
        try:
            while not self.gone:
                if self.serves:
                    await self._look_after()
                else:
                    await self._bring_up()
        except Exception as bug:  # else all would wait for an engine that nobody looks after
            if not self.gone:
                self._remove(f"its keeper failed: {type(bug).__name__}: {bug}")
            context = {"message": f"the keeper of engine {self.name} failed", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _bring_up(self) -> None:
        assert self._order is not None, "weights are wanted before it runs"
        loop, order = asyncio.get_running_loop(), self._order
        began_s = loop.time()
        if self.state is not State.STARTING:
            self._become(State.STARTING, self.reason)
        try:
            async with asyncio.timeout(self._limits.start_s_max):
                await self.engine.start(order.weights)
                while order.number != self._order.number:  # before it serves, so that nobody gets old tokens
                    order = self._order
                    await self.engine.update(order.weights)
        except WORLD as error:
            self.refused, self.refusal = order.number, _words(error, "did not start", self._limits.start_s_max)
            await self._bury(0, self.refusal)
            return
        self.life += 1
        self.has = order
        self._become(State.SERVING, "")
        took_s = loop.time() - began_s
        self._tell(
            EngineStarted(
                at_s=loop.time(),
                engine=self.name,
                hardware=self.hardware,
                version=self._version,
                took_s=took_s,
                life=self.life,
            )
        )
        self._wake.set()

    async def _look_after(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        assert self._order is not None
        if self.state is State.DOWN:
            await self._bury(self.life, self.reason)
        elif self.serves and self._order.number not in (self.applied, self.refused):
            await self._update(self._order)

    async def _update(self, order: Order) -> None:
        """The engine fetches while it writes, and stands still only to switch."""
        loop, life = asyncio.get_running_loop(), self.life
        began_s = loop.time()
        spent = _Spent()
        try:
            async with asyncio.timeout(self._limits.update_s_max):
                refusal = await self._refusal(self.engine.fetch(order.weights))
                spent.pull_s += loop.time() - began_s
                if refusal is None and self.serves and not self._taken_back(order):
                    refusal = await self._switch(order, spent)
        except WORLD as error:
            if self.serves:  # nobody has seen it die
                self._end_life(_words(error, "did not take its weights", self._limits.update_s_max))
            await self._bury(life, self.reason)
            return
        if refusal is not None:
            self.refused, self.refusal = order.number, refusal
            self._changed()  # if others took them, it is replaced
        if not self.serves:  # or a request saw it die
            await self._bury(life, self.reason)
            return
        self._wake.set()  # there may be newer ones
        if self.has is order:
            now_s = loop.time()
            self._tell(
                EngineUpdated(
                    at_s=now_s,
                    engine=self.name,
                    version=self._version,
                    took_s=now_s - began_s,
                    pull_s=spent.pull_s,
                    exposed_s=spent.exposed_s,
                )
            )
            self._changed()

    async def _switch(self, order: Order, spent: _Spent) -> str | None:
        """Why the engine keeps the weights that it has; None: it has these. Raises EngineDied."""
        loop = asyncio.get_running_loop()
        await self.engine.suspend()
        suspended_s = loop.time()
        refusal = await self._refusal(self.engine.update(order.weights))
        spent.pull_s += loop.time() - suspended_s
        await self.engine.resume()
        spent.exposed_s = loop.time() - suspended_s
        if refusal is None:
            self.has = order
        return refusal

    def _taken_back(self, order: Order) -> bool:
        """Others were ordered meanwhile, which are not newer: nobody wants what is written with these any more. If they
        are newer it takes these first, since newer ones may always come."""
        assert self._order is not None
        return self._order.number != order.number and self._order.weights.version <= order.weights.version

    async def _refusal(self, call: Awaitable[None]) -> str | None:
        """Why the engine keeps the weights that it has; None: it did as it was told. Raises EngineDied."""
        try:
            await call
        except EngineDied:
            raise
        except ManagerError as error:
            return str(error)
        return None

    def _end_life(self, reason: str) -> None:
        """It is ended by us, and starts with the newest weights: what is inside did not kill it."""
        self.closed_life, self._inside_at_death = self.life, self.requests
        self._become(State.DOWN, reason)

    async def _bury(self, life: int, reason: str) -> None:
        """After a death: end what is left of it, wait a while, and remove it if it died too often."""
        now_s = asyncio.get_running_loop().time()
        self._deaths.append(Death(now_s, life))
        if self.state is not State.DOWN:
            self._become(State.DOWN, reason)
        recent = self._recent(now_s)
        inside, self._inside_at_death = self._inside_at_death, 0
        self._tell(EngineLost(at_s=now_s, engine=self.name, reason=reason, requests=inside, deaths=max(1, recent)))
        await self.end()
        await asyncio.sleep(min(BACKOFF_S * 2.0 ** max(0, recent - 1), BACKOFF_S_MAX))
        # Only now: whoever was inside has said meanwhile whether it is to blame.
        recent = self._recent(now_s)
        if recent >= self._limits.deaths_max:
            within = (
                f"within {self._limits.window_s:g} s" if self._served_s > self._deaths[0].at_s else "and served nobody"
            )
            self._remove(f"died {recent} times {within}; the last time: {reason}")

    def _recent(self, now_s: float) -> int:
        """Deaths for which nobody else is to blame, within the window or since it last served a request: one that dies
        of every request may take longer for it than the window is."""
        begin_s = min(now_s - self._limits.window_s, self._served_s)
        self._deaths = [death for death in self._deaths if death.at_s > begin_s]
        return sum(death.life not in self._forgiven for death in self._deaths)

    async def end(self) -> None:
        """Close the engine, if it lets itself be closed."""
        with contextlib.suppress(*WORLD):
            async with asyncio.timeout(CLOSE_S_MAX):
                await self.engine.close()

    def _remove(self, reason: str) -> None:
        self._become(State.REMOVED, reason)
        self._tell(EngineRemoved(at_s=asyncio.get_running_loop().time(), engine=self.name, reason=reason))

    def _become(self, state: State, reason: str) -> None:
        assert state in TRANSITIONS[self.state], f"engine {self.name}: {self.state} cannot become {state}"
        self.state, self.reason = state, reason
        self._changed()


def _words(error: BaseException, complaint: str, seconds_max: float) -> str:
    if isinstance(error, TimeoutError):
        return f"{complaint} within {seconds_max:g} s"
    return f"{complaint}: {error}"
