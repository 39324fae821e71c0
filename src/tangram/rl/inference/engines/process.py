"""Our own engine, in a process of its own, seen from the process that uses it.

Owns what is in the child; child.py owns its process. Promises that whoever awaits `generate` hears of the end of his
request exactly once: what was written, a refusal, or EngineDied with all that the child had told until then. A child
that says nothing for `hang_s` while it has work counts as dead. Nothing of it is left after `close`; after a death,
`start` begins anew.
"""

from __future__ import annotations

import asyncio
import itertools

import msgspec

from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.processes.child import BEATS_PER_HANG, ChildLife
from tangram.processes.fork_server import Nursery
from tangram.processes.framing import FrameTooLong
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines import messages
from tangram.rl.inference.engines.messages import (
    Abort,
    Acknowledged,
    Add,
    AnyAnswer,
    Beat,
    Close,
    Done,
    Fetch,
    Fetched,
    Fetching,
    Hello,
    NotReady,
    Ready,
    Refused,
    Resume,
    StepRecord,
    Suspend,
    Update,
    Updated,
    UpdateFailed,
    Written,
)
from tangram.rl.inference.engines.protocol import EngineDied, EngineStatistics, Generation, Request, Weights

PROGRAM = "tangram.rl.model.engine_child"
DTYPES = ("float32", "float64")
UPDATE_HANGS = 10
"""Reading weights is one long step: so many times longer than others it may say nothing."""
BEAT_S_MAX = 0.25
"""Between two words of a child that works; less if `hang_s` is small."""


class _Asked:
    """A request in the child."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answered: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.written: list[Written] = []

    def so_far(self, engine: str) -> Generation | None:
        if not self.written:
            return None
        kept = [each.kept for each in self.written]
        return Generation(
            tokens=tuple(token for each in self.written for token in each.tokens),
            logprobs=tuple(logprob for each in self.written for logprob in each.logprobs),
            versions=tuple(version for each in self.written for version in each.versions),
            kept=tuple(ids for each in kept for ids in each or ()) if None not in kept else None,
            finish="length",
            engine=engine,
        )


class ProcessEngine:
    """One engine; see Engine. It belongs to the event loop in which it was started."""

    trains = True

    def __init__(
        self,
        settings: EngineSettings,
        number: int = 0,
        *,
        dtype: str = "float32",
        hang_s: float = 30.0,
        record_steps: bool = False,
        nursery: Nursery | None = None,
    ) -> None:
        if settings.kind != "process":
            raise InvalidConfig("kind", settings.kind, "process: others are not ours to start")
        if dtype not in DTYPES:
            raise InvalidConfig("dtype", dtype, " or ".join(DTYPES))
        self.name = settings.name if settings.count == 1 else f"{settings.name}-{number}"
        self.hardware = settings.hardware
        self.steps: list[StepRecord] = []
        """With `record_steps`: all of them, by the clock of the child."""
        self._settings, self._dtype, self._hang_s, self._record_steps = settings, dtype, hang_s, record_steps
        self._nursery = nursery
        self._child: _Child | None = None

    @property
    def pid(self) -> int:
        """Of the child that runs."""
        assert self._child is not None, f"{self.name} does not run"
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def start(self, weights: Weights) -> None:
        if self.alive:
            raise ManagerError(f"engine {self.name} runs already", retry=False)
        if self._child is not None:
            await self._child.end("")
        child = self._child = _Child(self.name, self._hang_s, self.steps)
        hello = Hello(
            name=self.name,
            settings=self._settings,
            dtype=self._dtype,
            weights=weights,
            beat_s=min(BEAT_S_MAX, self._hang_s / BEATS_PER_HANG),
            record_steps=self._record_steps,
        )
        await child.start(PROGRAM, self._settings.threads, hello, self._nursery)

    async def generate(self, request: Request) -> Generation:
        return await self._running().generate(request)

    async def fetch(self, weights: Weights) -> None:
        await self._running().fetch(weights)

    async def suspend(self) -> None:
        await self._running().suspend()

    async def update(self, weights: Weights) -> None:
        await self._running().update(weights)

    async def resume(self) -> None:
        await self._running().resume()

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close(Close())

    def statistics(self) -> EngineStatistics:
        return self._child.statistics() if self._child is not None else EngineStatistics(name=self.name)

    def _running(self) -> _Child:
        if self._child is None:
            raise EngineDied(self.name, "it was not started", None)
        return self._child


class _Child(ChildLife):
    """One life of an engine."""

    def __init__(self, name: str, hang_s: float, steps: list[StepRecord]) -> None:
        super().__init__(f"engine {name}", messages.answers(), hang_s)
        self.name = name
        self._steps = steps
        self._numbers = itertools.count(1)
        self._asked_by_id: dict[str, _Asked] = {}
        """By the id that the request has in the child."""
        self._updating = 0
        self._suspended = False
        self._statistics = EngineStatistics(name=name)
        self._statistics_s = 0.0

    # ---- requests ----

    async def generate(self, request: Request) -> Generation:
        self.require_ready()
        asked = _Asked(request)
        id = f"{request.id}#{next(self._numbers)}"
        try:
            self.send(Add(request=msgspec.structs.replace(request, id=id)))
        except FrameTooLong as error:
            raise InvalidAction("tokens", f"{len(request.tokens)} tokens", str(error)) from error
        self._asked_by_id[id] = asked
        try:
            return await asked.answered
        except asyncio.CancelledError:
            self.send(Abort(id=id))
            raise
        finally:
            del self._asked_by_id[id]

    async def suspend(self) -> None:
        self.require_ready()
        ask = next(self._numbers)
        self._suspended = True
        await self.ask(ask, Suspend(ask=ask))

    async def resume(self) -> None:
        self.require_ready()
        ask = next(self._numbers)
        self.heard_now()
        self._suspended = False
        await self.ask(ask, Resume(ask=ask))

    async def fetch(self, weights: Weights) -> None:
        ask = next(self._numbers)
        self._require_taken(weights, await self.ask(ask, Fetch(ask=ask, weights=weights)))

    async def update(self, weights: Weights) -> None:
        ask = next(self._numbers)
        self._updating += 1
        try:
            self._require_taken(weights, await self.ask(ask, Update(ask=ask, weights=weights)))
        finally:
            self._updating -= 1

    def _require_taken(self, weights: Weights, answer: AnyAnswer) -> None:
        if isinstance(answer, UpdateFailed):
            raise ManagerError(f"engine {self.name} keeps its weights: version {weights.version}: {answer.reason}")

    # ---- answers ----

    def take(self, answer: AnyAnswer) -> None:
        match answer:
            case Done(id=id, generation=generation):
                asked = self._asked_by_id.get(id)
                if asked is not None and not asked.answered.done():
                    asked.answered.set_result(generation)
            case Written(id=id):
                asked = self._asked_by_id.get(id)
                if asked is not None:
                    asked.written.append(answer)
            case Refused(id=id):
                asked = self._asked_by_id.get(id)
                if asked is not None and not asked.answered.done():
                    asked.answered.set_exception(InvalidAction(answer.field, answer.value, answer.expected))
            case Acknowledged(ask=ask) | Fetched(ask=ask) | Updated(ask=ask) | UpdateFailed(ask=ask):
                self.answered(ask, answer)
            case Beat(statistics=statistics, steps=steps):
                self._statistics, self._statistics_s = statistics, self._loop.time()
                self._steps += steps
            case Fetching():
                pass  # to have been heard is all
            case Ready():
                self.now_ready()
            case NotReady(reason=reason):
                self.refused(ManagerError(reason, retry=False))

    # ---- silence and end ----

    @property
    def has_work(self) -> bool:
        return super().has_work or (bool(self._asked_by_id) and not self._suspended)

    @property
    def silence_s_max(self) -> float:
        return self._hang_s * (UPDATE_HANGS if self._updating else 1)

    def died(self, reason: str) -> EngineDied:
        return EngineDied(self.name, reason, None)

    def on_end(self, reason: str) -> None:
        for asked in self._asked_by_id.values():
            if not asked.answered.done():
                asked.answered.set_exception(EngineDied(self.name, reason, asked.so_far(self.name)))

    # ---- what is known of it ----

    def statistics(self) -> EngineStatistics:
        """What the child said last, and how many requests are in it as seen from here."""
        known, asked = self._statistics, len(self._asked_by_id)
        active = min(known.active, asked)
        idle_s = known.idle_s
        if self.alive and not known.active and not known.waiting and not asked and not self._suspended:
            idle_s += self._loop.time() - self._statistics_s
        return msgspec.structs.replace(known, active=active, waiting=asked - active, idle_s=idle_s)
