"""The engine supervisor: starts, updates, restarts and removes one engine.

Owns the lifecycle of the engine. Only the supervisor starts, updates or closes it, one operation after the other, so
these cannot race. Never routes and never reads a token. Promises that the engine has the newest weights before it
serves, that it is suspended only to switch weights, that a death leads to a restart or a removal, that an engine which
completes no request is removed even if its starts succeed, and that waiters are notified of every change. An engine
that refuses weights keeps serving with its old ones; the router decides how to proceed, because that depends on the
other engines. The router also retries the requests of a dead engine (`Router.generate`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import msgspec

from tangram.errors import ManagerError, TangramError
from tangram.rl.inference.engines.protocol import EngineDied, InferenceEngine, PolicyWeights
from tangram.rl.inference.router_records import (
    ENGINE_TRANSITIONS,
    AnyRouterEvent,
    EngineLost,
    EngineRemoved,
    EngineStarted,
    EngineState,
    EngineStatus,
    EngineUpdated,
)

BACKOFF_S, BACKOFF_S_MAX = 0.2, 30.0
"""Exponential backoff of restarts within the window: an engine that dies immediately must not keep a core busy, and one
that died once should be back soon."""
ABANDONED_MAX = 5
"""Consecutive requests abandoned after this engine died with them, while it completed none. From then on these deaths
count against the engine, not as caused by poison requests. Otherwise an engine that responds only to probes would never
be removed."""
REFUSED_MAX = 32
"""Consecutive refusals without a completed request, after which the engine counts as dead. More than the members of a
group with their replacements, because these are refused together."""
CLOSE_S_MAX = 30.0
"""Time limit of closing; an engine that does not end is abandoned."""
EXPECTED_ERRORS = (TangramError, OSError)
"""Errors that an engine may raise without a bug in this process. TimeoutError is an OSError."""


class SupervisorLimits(msgspec.Struct, frozen=True, kw_only=True):
    deaths_max: int
    window_s: float
    start_s_max: float
    update_s_max: float


class WeightUpdate(NamedTuple):
    """An update of all engines to these weights. Numbers are unique and increase."""

    number: int
    weights: PolicyWeights


class EngineDeath(NamedTuple):
    at: float
    incarnation: int
    """0: it did not start."""


class _UpdateTimes:
    """Measured times of one update: fetching or switching weights, and suspended."""

    pull_s = exposed_s = 0.0


class EngineSupervisor:
    def __init__(
        self,
        engine: InferenceEngine,
        limits: SupervisorLimits,
        on_event: Callable[[AnyRouterEvent], None],
        on_change: Callable[[], None],
    ):
        self.engine = engine
        self.state = EngineState.STARTING
        self.reason = ""
        self.incarnation = 0
        self.current: WeightUpdate | None = None
        """The update that it last applied; kept when it dies."""
        self.refused_update = 0
        """Number of the last update that it refused."""
        self.refusal_reason = ""
        """The reason of that refusal."""
        self.load = 0
        self.requests = 0
        self.served = 0
        self._served_at = -math.inf
        """When it last completed a request."""
        self._abandoned_in_row = self._refused_in_row = 0
        """Requests since then that were abandoned, and that it refused."""
        self.closed_incarnation = 0
        """The last incarnation that the supervisor ended, or that ended for lack of capacity: its requests did not kill
        it."""
        self._limits = limits
        self._emit = on_event
        self._on_change = on_change
        self._target: WeightUpdate | None = None
        self._wake = asyncio.Event()
        self._active_at_death = 0
        self._deaths: list[EngineDeath] = []
        self._exonerated: set[int] = set()

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def hardware(self) -> str:
        return self.engine.hardware

    @property
    def output_is_trainable(self) -> bool:
        return self.engine.output_is_trainable

    @property
    def applied_update(self) -> int:
        """Number of the update that it last applied; 0 before the first."""
        return self.current.number if self.current is not None else 0

    @property
    def _version(self) -> int:
        return self.current.weights.version if self.current is not None else 0

    @property
    def kv_cache_epoch(self) -> tuple[int, int]:
        """Its KV cache is valid as long as this stays the same."""
        return self.incarnation, self.applied_update

    @property
    def is_serving(self) -> bool:
        return self.state is EngineState.SERVING

    @property
    def is_gone(self) -> bool:
        return self.state in (EngineState.REMOVED, EngineState.CLOSED)

    def status(self) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            hardware=self.hardware,
            state=self.state,
            output_is_trainable=self.output_is_trainable,
            version=self._version,
            requests=self.requests,
            load=self.load,
            served=self.served,
            incarnations=self.incarnation,
            reason="" if self.is_serving else self.reason,
        )

    # ---- called by the router ----

    def set_target(self, update: WeightUpdate) -> None:
        self._target = update
        self._wake.set()

    def restart(self) -> None:
        """Other engines took the weights that it refused: restart it with them."""
        if self.is_serving:
            self._end_incarnation(f"did not apply its weights: {self.refusal_reason}")
            self._wake.set()

    def on_death(self, incarnation: int, reason: str, *, exonerate_requests: bool = False) -> None:
        """A request reports that the engine died. Only the first report counts. `exonerate_requests`: no request inside
        caused this death, so none of them is a poison request."""
        if self.is_serving and incarnation == self.incarnation:
            self.closed_incarnation = incarnation if exonerate_requests else self.closed_incarnation
            self._active_at_death = self.requests + 1  # it has ended, but waiters are not notified yet
            self._transition(EngineState.DOWN, reason)
            self._wake.set()

    def on_served(self) -> None:
        """Records a completed request."""
        self.served += 1
        self._served_at = asyncio.get_running_loop().time()
        self._abandoned_in_row = self._refused_in_row = 0

    def exonerate(self, incarnations: Collection[int]) -> None:
        """These deaths were caused by a poison request (one that kills each engine that serves it), so they do not
        count against the engine. If that is reported for one request after the other while none completes, they do."""
        self._abandoned_in_row += 1
        if self._abandoned_in_row < ABANDONED_MAX:
            self._exonerated.update(incarnations)
        else:
            self._exonerated.clear()

    def on_refused(self, incarnation: int, reason: str) -> None:
        """Records a refused request; the engine is alive."""
        self._refused_in_row += 1
        if self._refused_in_row >= REFUSED_MAX:
            message = f"it refused {self._refused_in_row} requests in a row and served none; the last: {reason}"
            self.on_death(incarnation, message, exonerate_requests=True)
            self._refused_in_row = 0

    def mark_closed(self) -> None:
        if self.state is not EngineState.CLOSED:
            self.closed_incarnation = self.incarnation
            self._transition(EngineState.CLOSED, "the router was closed")

    # ---- lifecycle ----

    async def run(self) -> None:
        """Runs until the engine is removed or the task is cancelled."""
        try:
            while not self.is_gone:
                if self.is_serving:
                    await self._supervise()
                else:
                    await self._start()
        except Exception as bug:  # otherwise requests would wait for an unsupervised engine
            if not self.is_gone:
                self._remove(f"its supervisor failed: {type(bug).__name__}: {bug}")
            context = {"message": f"the supervisor of engine {self.name} failed", "exception": bug}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _start(self) -> None:
        assert self._target is not None, "weights are set before it runs"
        loop, update = asyncio.get_running_loop(), self._target
        began_at = loop.time()
        if self.state is not EngineState.STARTING:
            self._transition(EngineState.STARTING, self.reason)
        try:
            async with asyncio.timeout(self._limits.start_s_max):
                await self.engine.start(update.weights)
                # before it serves, so that no request gets tokens of old weights
                while update.number != self._target.number:
                    update = self._target
                    await self.engine.update(update.weights)
        except EXPECTED_ERRORS as error:
            self.refused_update, self.refusal_reason = (
                update.number,
                _error_text(error, "did not start", self._limits.start_s_max),
            )
            await self._handle_death(0, self.refusal_reason)
            return
        self.incarnation += 1
        self.current = update
        self._transition(EngineState.SERVING, "")
        took_s = loop.time() - began_at
        self._emit(
            EngineStarted(
                at_s=loop.time(),
                engine=self.name,
                hardware=self.hardware,
                version=self._version,
                took_s=took_s,
                incarnation=self.incarnation,
            )
        )
        self._wake.set()

    async def _supervise(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        assert self._target is not None
        if self.state is EngineState.DOWN:
            await self._handle_death(self.incarnation, self.reason)
        elif self.is_serving and self._target.number not in (self.applied_update, self.refused_update):
            await self._update(self._target)

    async def _update(self, update: WeightUpdate) -> None:
        """The engine fetches weights while it decodes, and is suspended only to switch."""
        loop, incarnation = asyncio.get_running_loop(), self.incarnation
        began_at = loop.time()
        spent = _UpdateTimes()
        try:
            async with asyncio.timeout(self._limits.update_s_max):
                refusal = await self._refusal_of(self.engine.fetch(update.weights))
                spent.pull_s += loop.time() - began_at
                if refusal is None and self.is_serving and not self._is_superseded(update):
                    refusal = await self._switch(update, spent)
        except EXPECTED_ERRORS as error:
            if self.is_serving:  # no request has reported its death
                self._end_incarnation(_error_text(error, "did not take its weights", self._limits.update_s_max))
            await self._handle_death(incarnation, self.reason)
            return
        if refusal is not None:
            self.refused_update, self.refusal_reason = update.number, refusal
            self._on_change()  # if others took them, it is restarted
        if not self.is_serving:  # or a request reports its death
            await self._handle_death(incarnation, self.reason)
            return
        self._wake.set()  # there may be newer weights
        if self.current is update:
            now = loop.time()
            self._emit(
                EngineUpdated(
                    at_s=now,
                    engine=self.name,
                    version=self._version,
                    took_s=now - began_at,
                    pull_s=spent.pull_s,
                    exposed_s=spent.exposed_s,
                )
            )
            self._on_change()

    async def _switch(self, update: WeightUpdate, spent: _UpdateTimes) -> str | None:
        """Returns why the engine keeps its current weights; None if it took these. Raises EngineDied."""
        loop = asyncio.get_running_loop()
        await self.engine.suspend()
        suspended_at = loop.time()
        refusal = await self._refusal_of(self.engine.update(update.weights))
        spent.pull_s += loop.time() - suspended_at
        await self.engine.resume()
        spent.exposed_s = loop.time() - suspended_at
        if refusal is None:
            self.current = update
        return refusal

    def _is_superseded(self, update: WeightUpdate) -> bool:
        """Whether a later update, to the same or an older version, replaces this one: its output is no longer
        needed. An update is applied even if a newer version follows, because newer ones may keep coming."""
        assert self._target is not None
        return self._target.number != update.number and self._target.weights.version <= update.weights.version

    async def _refusal_of(self, call: Awaitable[None]) -> str | None:
        """Returns why the engine keeps its current weights; None if it took these. Raises EngineDied."""
        try:
            await call
        except EngineDied:
            raise
        except ManagerError as error:
            return str(error)
        return None

    def _end_incarnation(self, reason: str) -> None:
        """The supervisor ends it and starts it with the newest weights; its requests are not suspects."""
        self.closed_incarnation, self._active_at_death = self.incarnation, self.requests
        self._transition(EngineState.DOWN, reason)

    async def _handle_death(self, incarnation: int, reason: str) -> None:
        """After a death: close it, wait, and remove it if it died too often."""
        now = asyncio.get_running_loop().time()
        self._deaths.append(EngineDeath(now, incarnation))
        if self.state is not EngineState.DOWN:
            self._transition(EngineState.DOWN, reason)
        recent = self._recent_deaths(now)
        inside, self._active_at_death = self._active_at_death, 0
        self._emit(EngineLost(at_s=now, engine=self.name, reason=reason, requests=inside, deaths=max(1, recent)))
        await self.close_engine()
        await asyncio.sleep(min(BACKOFF_S * 2.0 ** max(0, recent - 1), BACKOFF_S_MAX))
        # Only now, after the requests that were inside have reported whether one of them is a poison request.
        recent = self._recent_deaths(now)
        if recent >= self._limits.deaths_max:
            within = (
                f"within {self._limits.window_s:g} s"
                if self._served_at > self._deaths[0].at
                else "and completed no request"
            )
            self._remove(f"died {recent} times {within}; the last time: {reason}")

    def _recent_deaths(self, now: float) -> int:
        """Deaths that no poison request caused, within the window or since its last completed request: an engine
        that dies of every request may take longer than the window for it."""
        window_start = min(now - self._limits.window_s, self._served_at)
        self._deaths = [death for death in self._deaths if death.at > window_start]
        return sum(death.incarnation not in self._exonerated for death in self._deaths)

    async def close_engine(self) -> None:
        """Close the engine, within the time limit."""
        with contextlib.suppress(*EXPECTED_ERRORS):
            async with asyncio.timeout(CLOSE_S_MAX):
                await self.engine.close()

    def _remove(self, reason: str) -> None:
        self._transition(EngineState.REMOVED, reason)
        self._emit(EngineRemoved(at_s=asyncio.get_running_loop().time(), engine=self.name, reason=reason))

    def _transition(self, state: EngineState, reason: str) -> None:
        assert state in ENGINE_TRANSITIONS[self.state], f"engine {self.name}: {self.state} cannot become {state}"
        self.state, self.reason = state, reason
        self._on_change()


def _error_text(error: BaseException, complaint: str, seconds_max: float) -> str:
    if isinstance(error, TimeoutError):
        return f"{complaint} within {seconds_max:g} s"
    return f"{complaint}: {error}"
