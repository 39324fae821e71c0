"""A fleet of serving engines on virtual time: routing, environments, disaggregated prefill and decoding.

Owns the event loop and the routing, which follows the router: the class that the task prefers, if present; in it, the
engine with the session's KV cache; otherwise the least loaded one. Randomness is in the trajectories only, so the same
fleet and trajectories give the same result. Every turn is served once. All results are **simulated**.

With `split`, the prompt of a request is prefilled on one class and its answer decoded on the other. The part of the KV
cache that the decoding engine lacks is sent over the links of the two nodes, one transfer at a time per link.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tangram.errors import InvalidConfig
from tangram.sim.serving_engine import ServingEngine, ServingRequest
from tangram.sim.serving_model import Efficiency, Gpu, Model, Speed
from tangram.sim.serving_tasks import ServingTrajectory

NODE_DEVICES = 8
ETHERNET = 200e9 / 8.0
"""Bytes per second of a node's link to another cluster: 200 Gb Ethernet at its full rate."""

PREFILL, DECODE = 0, 1


class DevicePool(msgspec.Struct, frozen=True):
    """Devices of one class."""

    gpu: Gpu
    devices: int


class Disaggregation(msgspec.Struct, frozen=True, kw_only=True):
    """The device classes of the two phases of a request."""

    prefill: str
    decode: str
    link: float = ETHERNET


class ServingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a simulation."""

    ends: tuple[float, ...]
    """End of each trajectory, in the order of ends."""
    tokens: tuple[int, ...]
    """Prompt and answer tokens of these trajectories, each token counted once."""
    prefilled: int
    reused: int
    """Prompt tokens, history included, found in a cache."""
    decoded: int
    sent_bytes: float

    @property
    def seconds(self) -> float:
        """The end of the last trajectory."""
        return self.ends[-1]

    def rate(self, first: int, last: int) -> float:
        """Return the tokens per second of the trajectories from `first` (exclusive) to `last` (inclusive) in order of
        ends: the steady state without ramp-up and tail."""
        if not 0 < first < last <= len(self.ends):
            raise InvalidConfig("first, last", (first, last), f"0 < first < last <= {len(self.ends)}")
        return sum(self.tokens[first:last]) / (self.ends[last - 1] - self.ends[first - 1])


def serve(
    pools: Iterable[DevicePool],
    model: Model,
    devices_each: int,
    efficiency: Mapping[str, Efficiency],
    trajectories: Sequence[ServingTrajectory],
    *,
    concurrency: int | None = None,
    prefers: Mapping[str, str] | None = None,
    split: Disaggregation | None = None,
    host: bool = False,
    stop_after: int | None = None,
) -> ServingResult:
    """Serve the trajectories, at most `concurrency` at a time, with `devices_each` devices per engine.

    `prefers` names the class by task. `host` keeps evicted KV caches in host memory. The simulation stops after
    `stop_after` trajectories have ended.
    """
    engines = _engines(pools, model, devices_each, efficiency, host)
    fleet = _Fleet(engines, trajectories, prefers or {}, split)
    fleet.run(min(concurrency or len(trajectories), len(trajectories)), stop_after or len(trajectories))
    return fleet.result()


def _engines(
    pools: Iterable[DevicePool], model: Model, devices_each: int, efficiency: Mapping[str, Efficiency], host: bool
) -> list[ServingEngine]:
    engines: list[ServingEngine] = []
    node = 0
    for pool in pools:
        if pool.devices % devices_each:
            raise InvalidConfig("devices", pool.devices, f"a multiple of the {devices_each} of an engine")
        speed = Speed(model, pool.gpu, devices_each, efficiency[pool.gpu.name])
        for first in range(0, pool.devices, devices_each):
            engines.append(ServingEngine(len(engines), speed, node=node + first // NODE_DEVICES, host=host))
        node = engines[-1].node + 1
    return engines


def _engine_load(engine: ServingEngine) -> int:
    """Key for `min`, which returns the first of equals."""
    return engine.load


class _Session(msgspec.Struct, eq=False):
    """One active trajectory."""

    index: int
    trajectory: ServingTrajectory
    turn: int = 0
    context: int = 0
    homes: list[ServingEngine | None] = msgspec.field(default_factory=lambda: [None, None])
    """The engine of the last turn, and with `split` that of the last decoding."""


class _Fleet:
    def __init__(
        self,
        engines: Sequence[ServingEngine],
        trajectories: Sequence[ServingTrajectory],
        prefers: Mapping[str, str],
        split: Disaggregation | None,
    ) -> None:
        self._engines = engines
        self._by_class: dict[str, list[ServingEngine]] = {}
        for engine in engines:
            self._by_class.setdefault(engine.speed.of.name, []).append(engine)
        for name in (split.prefill, split.decode) if split else ():
            if name not in self._by_class:
                raise InvalidConfig("split", name, f"one of {', '.join(self._by_class)}")
        self._trajectories, self._prefers, self._split = trajectories, prefers, split
        self._sessions: dict[int, _Session] = {}
        self._events: list[tuple[float, int, ServingEngine | None, Callable[[float], None] | None]] = []
        self._serial = self._started = 0
        self._link_free_at: dict[int, float] = {}
        self._ends: list[float] = []
        self._tokens: list[int] = []
        self._sent_bytes = 0.0

    def run(self, concurrency: int, stop_after: int) -> None:
        for _ in range(concurrency):
            self._start_next(0.0)
        while len(self._ends) < stop_after:
            now, _, engine, action = heapq.heappop(self._events)
            if action is not None:
                action(now)
            elif engine is not None and engine.next_at == now:
                ended = engine.advance(now)
                self._schedule_engine(engine)
                for request in ended:
                    self._on_request_end(engine, request, now)
            # Otherwise an arrival cut the steps, which now end at another time.

    def result(self) -> ServingResult:
        for engine in self._engines:
            engine.check()
        return ServingResult(
            ends=tuple(self._ends),
            tokens=tuple(self._tokens),
            prefilled=sum(engine.prefilled for engine in self._engines),
            reused=sum(engine.reused for engine in self._engines),
            decoded=sum(engine.decoded for engine in self._engines),
            sent_bytes=self._sent_bytes,
        )

    # Trajectories.

    def _start_next(self, now: float) -> None:
        if self._started == len(self._trajectories):
            return
        session = _Session(self._started, self._trajectories[self._started])
        self._started += 1
        self._sessions[session.index] = session
        self._call_at(now + session.trajectory.reset_s, lambda at: self._submit_turn(session, at))

    def _submit_turn(self, session: _Session, now: float) -> None:
        turn = session.trajectory.turns[session.turn]
        session.context += turn.observation_tokens
        if self._split is None:
            engines, answer_tokens = self._preferred(session.trajectory.task), turn.answer_tokens
        else:
            engines, answer_tokens = self._by_class[self._split.prefill], 1
        reusable = session.trajectory.reusable(session.context)
        request = ServingRequest(session.index, session.context, answer_tokens, reusable=reusable)
        self._dispatch(self._choose(session, PREFILL, engines), request, now)

    def _on_request_end(self, engine: ServingEngine, request: ServingRequest, now: float) -> None:
        session = self._sessions[request.session]
        turn = session.trajectory.turns[session.turn]
        if request.answer < turn.answer_tokens and not request.brought:
            self._transfer_kv(engine, session, now)
            return
        session.context += turn.answer_tokens
        session.turn += 1
        if session.turn < len(session.trajectory.turns):
            self._call_at(now + turn.environment_s, lambda at: self._submit_turn(session, at))
        else:
            self._call_at(now + turn.environment_s, lambda at: self._finish_session(session, at))

    def _finish_session(self, session: _Session, now: float) -> None:
        for home in session.homes:
            if home is not None:
                home.drop_session(session.index)
        del self._sessions[session.index]
        self._ends.append(now)
        self._tokens.append(session.trajectory.prompt_tokens + session.trajectory.answer_tokens)
        self._start_next(now)

    # Engines.

    def _preferred(self, task: str) -> Sequence[ServingEngine]:
        """Return the engines of the preferred class, or all engines if there are none."""
        return self._by_class.get(self._prefers.get(task, ""), self._engines)

    def _choose(self, session: _Session, phase: int, engines: Sequence[ServingEngine]) -> ServingEngine:
        """Choose by KV cache, then by load. An engine that evicted the session is no longer its home."""
        home = session.homes[phase]
        if home is None or not home.resident(session.index):
            home = session.homes[phase] = min(engines, key=_engine_load)
        return home

    def _dispatch(self, engine: ServingEngine, request: ServingRequest, now: float) -> None:
        engine.add(request, now)
        self._schedule_engine(engine)

    def _transfer_kv(self, source: ServingEngine, session: _Session, now: float) -> None:
        """Send the part of the KV cache that the decoding engine lacks."""
        assert self._split is not None
        target = self._choose(session, DECODE, self._by_class[self._split.decode])
        reusable = min(target.resident(session.index), session.trajectory.reusable(session.context))
        lacking = (session.context - reusable) * source.speed.model.kv_bytes
        free_at = max(now, self._link_free_at.get(source.node, 0.0), self._link_free_at.get(target.node, 0.0))
        done_at = free_at + lacking / self._split.link
        self._link_free_at[source.node] = self._link_free_at[target.node] = done_at
        self._sent_bytes += lacking
        answer_tokens = session.trajectory.turns[session.turn].answer_tokens
        self._call_at(
            done_at,
            lambda at: self._dispatch(
                target, ServingRequest(session.index, session.context, answer_tokens, brought=True), at
            ),
        )

    # Events.

    def _call_at(self, time: float, action: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, None, action))

    def _schedule_engine(self, engine: ServingEngine) -> None:
        if engine.next_at != float("inf"):
            self._serial += 1
            heapq.heappush(self._events, (engine.next_at, self._serial, engine, None))
