"""A fleet of engines that serves trajectories on virtual time: routing, environments, prefill apart from decoding.

Owns the event loop and the choice of an engine. The choice is the gateway's: the class that the task prefers, where
there is one; among its engines the one that holds the session's keys and values; else the least loaded. Never draws
random numbers: the trajectories bring theirs. Promises that the same fleet and trajectories give the same result, and
that every turn is served once. All of it is **simulated**.

With `split`, the prompt of every request is prefilled on one class and its answer decoded on the other. What the
decoding engine lacks of the keys and values is sent over the links of the two nodes, each of which does one transfer at
a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tangram.errors import InvalidConfig
from tangram.sim.serving_engine import Engine, Request
from tangram.sim.serving_model import Efficiency, Gpu, Model, Speed
from tangram.sim.serving_tasks import Trajectory

NODE_DEVICES = 8
ETHERNET = 200e9 / 8.0
"""Bytes per second of a node's link to nodes of another cluster: 200 Gb Ethernet at its full rate."""

PREFILL, DECODE = 0, 1


class Pool(msgspec.Struct, frozen=True):
    """Devices of one class."""

    gpu: Gpu
    devices: int


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two phases of a request run."""

    prefill: str
    decode: str
    link: float = ETHERNET


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What came out. All of it is simulated."""

    ends: tuple[float, ...]
    """When each trajectory ended, in this order."""
    tokens: tuple[int, ...]
    """Prompt and answer tokens of those, each token counted once."""
    prefilled: int
    reused: int
    """Prompt tokens that were found in a cache, history included."""
    decoded: int
    sent_bytes: float
    busy: Mapping[str, float]
    """Share of the time in which the engines of a class had something to do."""
    generation_s: float
    """Sum over all turns that were answered, from the request to its last token."""
    steps: int

    @property
    def seconds(self) -> float:
        """Until the last one ended."""
        return self.ends[-1]

    def rate(self, first: int, last: int) -> float:
        """Tokens per second of the trajectories that ended after the `first` and up to the `last`: the steady state,
        without the filling of the pipeline and without the wait for the last ones."""
        if not 0 < first < last <= len(self.ends):
            raise InvalidConfig("first, last", (first, last), f"0 < first < last <= {len(self.ends)}")
        return sum(self.tokens[first:last]) / (self.ends[last - 1] - self.ends[first - 1])


def serve(
    pools: Iterable[Pool],
    model: Model,
    devices_each: int,
    efficiency: Mapping[str, Efficiency],
    trajectories: Sequence[Trajectory],
    *,
    concurrency: int | None = None,
    prefers: Mapping[str, str] | None = None,
    split: Split | None = None,
    host: bool = False,
    stop_after: int | None = None,
) -> Served:
    """Serve the trajectories, at most `concurrency` at a time, with `devices_each` devices in an engine.

    `prefers` names the class by task. `host` keeps what is evicted in the memory of the host. After `stop_after`
    trajectories have ended, the rest is left."""
    engines = _engines(pools, model, devices_each, efficiency, host)
    fleet = _Fleet(engines, trajectories, prefers or {}, split)
    fleet.run(min(concurrency or len(trajectories), len(trajectories)), stop_after or len(trajectories))
    return fleet.served()


def _engines(
    pools: Iterable[Pool], model: Model, devices_each: int, efficiency: Mapping[str, Efficiency], host: bool
) -> list[Engine]:
    engines: list[Engine] = []
    node = 0
    for pool in pools:
        if pool.devices % devices_each:
            raise InvalidConfig("devices", pool.devices, f"a multiple of the {devices_each} of an engine")
        speed = Speed(model, pool.gpu, devices_each, efficiency[pool.gpu.name])
        for first in range(0, pool.devices, devices_each):
            engines.append(Engine(len(engines), speed, node=node + first // NODE_DEVICES, host=host))
        node = engines[-1].node + 1
    return engines


def _load(engine: Engine) -> int:
    """Of equals, `min` takes the first."""
    return engine.load


class _Session:
    """One trajectory under way."""

    __slots__ = ("asked_at", "context", "homes", "index", "trajectory", "turn")

    def __init__(self, index: int, trajectory: Trajectory) -> None:
        self.index, self.trajectory = index, trajectory
        self.turn = self.context = 0
        self.asked_at = 0.0
        self.homes: list[Engine | None] = [None, None]
        """The engine of the last turn; and, where decoding is apart, that of the last decoding."""


class _Fleet:
    def __init__(
        self,
        engines: Sequence[Engine],
        trajectories: Sequence[Trajectory],
        prefers: Mapping[str, str],
        split: Split | None,
    ) -> None:
        self._engines = engines
        self._by_class: dict[str, list[Engine]] = {}
        for engine in engines:
            self._by_class.setdefault(engine.speed.of.name, []).append(engine)
        for name in (split.prefill, split.decode) if split else ():
            if name not in self._by_class:
                raise InvalidConfig("split", name, f"one of {', '.join(self._by_class)}")
        self._trajectories, self._prefers, self._split = trajectories, prefers, split
        self._sessions: dict[int, _Session] = {}
        self._events: list[tuple[float, int, Engine | None, Callable[[float], None] | None]] = []
        self._serial = self._begun = 0
        self._link_free_at: dict[int, float] = {}
        self._ends: list[float] = []
        self._tokens: list[int] = []
        self._sent_bytes = self._generation_s = self._now = 0.0

    def run(self, concurrency: int, stop_after: int) -> None:
        for _ in range(concurrency):
            self._start_next(0.0)
        while len(self._ends) < stop_after:
            self._now, _, engine, action = heapq.heappop(self._events)
            if action is not None:
                action(self._now)
            elif engine is not None and engine.next_at == self._now:
                ended = engine.advance(self._now)
                self._watch(engine)
                for request in ended:
                    self._ended(engine, request, self._now)
            # Else the steps were cut by an arrival, and end at another moment.

    def served(self) -> Served:
        for engine in self._engines:
            engine.check()
        return Served(
            ends=tuple(self._ends),
            tokens=tuple(self._tokens),
            prefilled=sum(engine.prefilled for engine in self._engines),
            reused=sum(engine.reused for engine in self._engines),
            decoded=sum(engine.decoded for engine in self._engines),
            sent_bytes=self._sent_bytes,
            busy={
                name: sum(engine.busy_s for engine in engines) / len(engines) / self._now
                for name, engines in self._by_class.items()
            },
            generation_s=self._generation_s,
            steps=sum(engine.steps for engine in self._engines),
        )

    # Trajectories.

    def _start_next(self, now: float) -> None:
        if self._begun == len(self._trajectories):
            return
        session = _Session(self._begun, self._trajectories[self._begun])
        self._begun += 1
        self._sessions[session.index] = session
        self._at(now + session.trajectory.reset_s, lambda at: self._ask(session, at))

    def _ask(self, session: _Session, now: float) -> None:
        turn = session.trajectory.turns[session.turn]
        session.context += turn.observation_tokens
        session.asked_at = now
        if self._split is None:
            engines, answer = self._preferred(session.trajectory.task), turn.answer_tokens
        else:
            engines, answer = self._by_class[self._split.prefill], 1
        reusable = session.trajectory.reusable(session.context)
        request = Request(session.index, session.context, answer, reusable=reusable)
        self._give(self._choose(session, PREFILL, engines), request, now)

    def _ended(self, engine: Engine, request: Request, now: float) -> None:
        session = self._sessions[request.session]
        turn = session.trajectory.turns[session.turn]
        if request.answer < turn.answer_tokens and not request.brought:
            self._send(engine, session, now)
            return
        self._generation_s += now - session.asked_at
        session.context += turn.answer_tokens
        session.turn += 1
        if session.turn < len(session.trajectory.turns):
            self._at(now + turn.environment_s, lambda at: self._ask(session, at))
        else:
            self._at(now + turn.environment_s, lambda at: self._finish(session, at))

    def _finish(self, session: _Session, now: float) -> None:
        for home in session.homes:
            if home is not None:
                home.forget(session.index)
        del self._sessions[session.index]
        self._ends.append(now)
        self._tokens.append(session.trajectory.prompt_tokens + session.trajectory.answer_tokens)
        self._start_next(now)

    # Engines.

    def _preferred(self, task: str) -> Sequence[Engine]:
        """Those of the class that the task prefers; all, if it prefers none or there is none of it."""
        return self._by_class.get(self._prefers.get(task, ""), self._engines)

    def _choose(self, session: _Session, phase: int, engines: Sequence[Engine]) -> Engine:
        """By residency, then by load. Whoever evicted the session is no home of it any more."""
        home = session.homes[phase]
        if home is None or not home.resident(session.index):
            home = session.homes[phase] = min(engines, key=_load)
        return home

    def _give(self, engine: Engine, request: Request, now: float) -> None:
        engine.add(request, now)
        self._watch(engine)

    def _send(self, source: Engine, session: _Session, now: float) -> None:
        """The keys and values of a prompt go to the engine that decodes, as far as they are not there."""
        assert self._split is not None
        target = self._choose(session, DECODE, self._by_class[self._split.decode])
        reusable = min(target.resident(session.index), session.trajectory.reusable(session.context))
        lacking = (session.context - reusable) * source.speed.model.kv_bytes
        free_at = max(now, self._link_free_at.get(source.node, 0.0), self._link_free_at.get(target.node, 0.0))
        done_at = free_at + lacking / self._split.link
        self._link_free_at[source.node] = self._link_free_at[target.node] = done_at
        self._sent_bytes += lacking
        answer = session.trajectory.turns[session.turn].answer_tokens
        self._at(
            done_at, lambda at: self._give(target, Request(session.index, session.context, answer, brought=True), at)
        )

    # Events.

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, None, action))

    def _watch(self, engine: Engine) -> None:
        if engine.next_at != float("inf"):
            self._serial += 1
            heapq.heappush(self._events, (engine.next_at, self._serial, engine, None))
