"""The router: routes requests to engines.

Owns the assignment of requests to engines. Never samples, trains or starts a process. Promises that each request gets
exactly one response or an error with its reason, or is cancelled; that the death of an engine costs a trajectory only
time, because it continues elsewhere from its tokens (failover); that a poison request, which kills engines, is
abandoned; that fallback to another hardware class is reported; and that no request waits for a removed engine.

A request goes to the class that its task prefers. Session affinity: there it goes to the engine that served its session
last and still has its prefix, unless that engine is overloaded (OVERLOAD), else to the engine with the fewest
outstanding tokens.

Each engine starts, updates its weights and dies independently; see engine_supervisor.py. A hang of a serving engine is
detected by the engine itself, one during its start or an update by its supervisor. A weight update that all engines
refuse has no effect: all keep their weights. If some apply it, the others are restarted with it, so that engines do not
keep generating with different versions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.inference.affinity import (
    ANY,
    fallback_engines,
    preferred_class,
    preferred_engines,
    resolve_class,
)
from tangram.rl.inference.engine_supervisor import EngineSupervisor, SupervisorLimits, WeightUpdate
from tangram.rl.inference.engines.protocol import (
    EngineDied,
    EngineStatistics,
    Generation,
    GenerationRequest,
    InferenceEngine,
    PolicyWeights,
    RequestRefused,
    ServerOverloaded,
    ServerUnreachable,
)
from tangram.rl.inference.router_records import (
    AnyRouterEvent,
    FallbackBegan,
    FallbackEnded,
    NoEngine,
    RequestAbandoned,
    RequestDropped,
    RequestResumed,
    RouterStatistics,
)

OVERLOAD, PREFILL_COST = 2.0, 4.0
"""A session leaves the engine with its prefix if that engine has more than OVERLOAD times the load of the least loaded
one, plus PREFILL_COST times the prefix. At twice the load each step takes up to twice the time. Outstanding tokens are
mostly decoded concurrently, but a prefix that is prefilled again blocks all others of its engine, so each of its tokens
counts several times. Below this, moving costs more than it gains."""
SESSIONS_MAX = 65_536
"""LRU size: far more than there are open trajectories. The prefix of an evicted session is prefilled again."""
SUSPECT_DEATHS, ABANDON_DEATHS = 2, 3
"""A request is suspected to be a poison request after this many engines died with it inside. No two suspects are served
at once, so a further death identifies the poison request. It is abandoned, and its deaths do not count against the
engines, unless these complete no other requests either (ABANDONED_MAX of engine_supervisor.py)."""


class _SessionPlacement(NamedTuple):
    """The engine that served a session last."""

    supervisor: EngineSupervisor
    epoch: tuple[int, int]
    tokens: int
    """Tokens of the session in its KV cache."""


class _FailedAttempt(NamedTuple):
    """An attempt to serve a request during which the engine died."""

    error: EngineDied
    was_running: bool
    """The request may have killed it: the engine was alive when it arrived."""


class Router:
    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        affinity: Mapping[str, str] | None = None,
        deaths_max: int = 3,
        deaths_window_s: float = 300.0,
        start_s_max: float = 300.0,
        update_s_max: float = 120.0,
        on_event: Callable[[AnyRouterEvent], None] | None = None,
    ) -> None:
        names = [engine.name for engine in engines]
        if not engines or len(set(names)) != len(names):
            raise InvalidConfig("engines", names, "at least one engine, each with a name of its own")
        if deaths_max < 1:
            raise InvalidConfig("deaths_max", deaths_max, "at least 1")
        limits = SupervisorLimits(
            deaths_max=deaths_max, window_s=deaths_window_s, start_s_max=start_s_max, update_s_max=update_s_max
        )
        classes = list(dict.fromkeys(engine.hardware for engine in engines))
        self._affinity = {
            task: hardware and resolve_class(hardware, classes, key=f"affinity.{task}")
            for task, hardware in (affinity or {}).items()
        }
        self._supervisors = [EngineSupervisor(engine, limits, self._emit, self._notify_change) for engine in engines]
        self._on_event = on_event
        self._target: WeightUpdate | None = None
        self._sync_count = 0
        """Number of weight updates ordered so far."""
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._active_requests: set[str] = set()
        self._placement_by_session: OrderedDict[str, _SessionPlacement] = OrderedDict()
        self._suspect_lock = asyncio.Lock()
        self._fallback_by_task: dict[str, str] = {}
        """Tasks in fallback, with the class that serves them."""
        self._fallbacks: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    # ---- start, update, close ----

    async def start(self, weights: PolicyWeights) -> None:
        """Blocks until each engine serves or was removed. Raises NoEngine if none serves."""
        assert self._target is None, "a router is started once"
        self._begin_sync(weights)
        self._tasks = [
            asyncio.create_task(supervisor.run(), name=f"keep {supervisor.name}") for supervisor in self._supervisors
        ]
        try:
            while not all(supervisor.is_serving or supervisor.is_gone for supervisor in self._supervisors):
                await self._changed.wait()
            if all(supervisor.is_gone for supervisor in self._supervisors):
                raise self._no_engine(self._supervisors, "no engine started")
        except BaseException:
            await self.close()
            raise

    async def update(self, weights: PolicyWeights, *, rollback: bool = False) -> None:
        """Blocks until each serving engine has answered, or if none serves, each that may serve again. Engines that
        start later get the newest weights. Raises NoEngine; ManagerError if no engine took these weights, in which case
        all keep the previous ones; InvalidConfig for an older version without `rollback`."""
        self._require_open()
        assert self._target is not None
        current = self._target.weights.version
        if weights.version < current and not rollback:
            raise InvalidConfig(
                "version", weights.version, f"at least {current}, the current one; an older one takes rollback=True"
            )
        number = self._begin_sync(weights)
        while any(
            max(supervisor.applied_update, supervisor.refused_update) < number for supervisor in self._syncing_engines()
        ):
            await self._changed.wait()
            self._require_open()
        if all(supervisor.is_gone for supervisor in self._supervisors):
            raise self._no_engine(self._supervisors, "no engine is left to apply the weights")
        if all(supervisor.applied_update < number for supervisor in self._supervisors):
            reasons = "; ".join(
                f"{supervisor.name}: {supervisor.refusal_reason}"
                for supervisor in self._supervisors
                if supervisor.refused_update >= number
            )
            raise ManagerError(
                f"no engine applied version {weights.version}, so they continue with version "
                f"{self._target.weights.version}: {reasons}"
            )

    async def close(self) -> None:
        """Requests in flight get NoEngine. Works during the start; idempotent."""
        self._closing = True
        self._notify_change()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for supervisor in self._supervisors:
            supervisor.mark_closed()
        await asyncio.gather(*(supervisor.close_engine() for supervisor in self._supervisors))

    # ---- requests ----

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises InvalidInput, NoEngine, RequestAbandoned and RequestRefused. Cancelling it aborts the request in its
        engine."""
        self._require_open()
        if request.id in self._active_requests:
            raise InvalidInput("id", request.id, "a request that is not being served already")
        self._active_requests.add(request.id)
        try:
            generation = await self._generate_with_retries(request)
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        except BaseException as error:
            self._counts["failed"] += 1
            if isinstance(error, RequestAbandoned | RequestRefused):
                now = asyncio.get_running_loop().time()
                self._emit(RequestDropped(at_s=now, request=request.id, reason=str(error)))
            raise
        finally:
            self._active_requests.discard(request.id)
        self._counts["served"] += 1
        return generation

    async def _generate_with_retries(self, request: GenerationRequest) -> Generation:
        """Serves a request, on one engine after another if they die."""
        loop = asyncio.get_running_loop()
        generations: list[Generation] = []
        deaths: list[tuple[EngineSupervisor, int]] = []
        """Engines that died with it inside, with their incarnation."""
        waited_s = 0.0
        while True:
            began_at = loop.time()
            rest = _remaining_request(request, generations)
            async with self._suspect_lock if len(deaths) >= SUSPECT_DEATHS else contextlib.nullcontext():
                supervisor = await self._choose_engine(rest)
                incarnation = supervisor.incarnation
                waited_s += loop.time() - began_at
                try:
                    generation = await self._generate_once(supervisor, rest)
                except RequestRefused as refusal:
                    supervisor.on_refused(incarnation, str(refusal))
                    raise
                if isinstance(generation, Generation):
                    return _join_generations([*generations, generation], waited_s)
                self._on_engine_death(request, supervisor, incarnation, deaths, generation)
                if generation.error.written is not None:
                    generations.append(_valid_prefix(generation.error.written, rest))
            if _is_complete(request, generations):
                return _join_generations(generations, waited_s)
            self._counts["resumed"] += 1
            self._emit(
                RequestResumed(
                    at_s=loop.time(),
                    request=request.id,
                    session=request.session,
                    task=request.task,
                    engine=supervisor.name,
                    written=sum(len(part.tokens) for part in generations),
                )
            )

    async def _generate_once(
        self, supervisor: EngineSupervisor, request: GenerationRequest
    ) -> Generation | _FailedAttempt:
        placement, epoch = self._placement_by_session.get(request.session), supervisor.kv_cache_epoch
        cached_tokens = 0
        if placement is not None and placement.supervisor is supervisor and placement.epoch == epoch:
            cached_tokens = placement.tokens
        load = max(0, len(request.tokens) - cached_tokens) + request.sampling.tokens_max
        supervisor.load += load
        supervisor.requests += 1
        was_accepted = asyncio.Event()
        # Runs only if the engine does not report its death immediately, so it was alive when the request arrived.
        accept_callback = asyncio.get_running_loop().call_soon(was_accepted.set)
        try:
            generation = await supervisor.engine.generate(request)
        except EngineDied as died:
            return _FailedAttempt(died, was_accepted.is_set() and not isinstance(died, ServerUnreachable))
        finally:
            accept_callback.cancel()
            supervisor.load -= load
            supervisor.requests -= 1
        supervisor.on_served()
        if request.session:
            tokens = len(request.tokens) + len(generation.tokens)
            self._placement_by_session[request.session] = _SessionPlacement(supervisor, epoch, tokens)
            self._placement_by_session.move_to_end(request.session)
            if len(self._placement_by_session) > SESSIONS_MAX:
                self._placement_by_session.popitem(last=False)
        return generation

    def _on_engine_death(
        self,
        request: GenerationRequest,
        supervisor: EngineSupervisor,
        incarnation: int,
        deaths: list[tuple[EngineSupervisor, int]],
        death: _FailedAttempt,
    ) -> None:
        """Raises RequestAbandoned, and NoEngine if the router was closed."""
        last = str(death.error)
        supervisor.on_death(incarnation, last, exonerate_requests=isinstance(death.error, ServerOverloaded))
        self._require_open()
        if supervisor.closed_incarnation >= incarnation or not death.was_running:
            return  # ended by its supervisor, overloaded, or dead before the request arrived
        deaths.append((supervisor, incarnation))
        if len(deaths) < ABANDON_DEATHS:
            return
        for dead in dict.fromkeys(dead for dead, _ in deaths):
            dead.exonerate([incarnation_at_death for other, incarnation_at_death in deaths if other is dead])
        names = tuple(dead.name for dead, _ in deaths)
        raise RequestAbandoned(request.id, len(deaths), names, last)

    # ---- routing ----

    async def _choose_engine(self, request: GenerationRequest) -> EngineSupervisor:
        """Blocks while no engine serves and one will serve again."""
        while True:
            self._require_open()
            preferred = preferred_class(self._affinity, request.task)
            engines = preferred_engines(self._supervisors, preferred)
            others = fallback_engines(self._supervisors, preferred) if preferred != ANY else []
            serving = [supervisor for supervisor in engines if supervisor.is_serving]
            if serving:
                self._on_preferred_class(request.task, preferred)
                return self._by_session_affinity(request, serving)
            serving = [supervisor for supervisor in others if supervisor.is_serving]
            if serving:
                chosen = self._by_session_affinity(request, serving)
                self._on_fallback(request.task, preferred, chosen.hardware)
                return chosen
            if all(supervisor.is_gone for supervisor in (*engines, *others)):
                raise self._no_engine([*engines, *others], f"no engine is left for task {request.task}")
            self._counts["waiting"] += 1
            try:
                await self._changed.wait()
            finally:
                self._counts["waiting"] -= 1

    def _by_session_affinity(self, request: GenerationRequest, serving: list[EngineSupervisor]) -> EngineSupervisor:
        """The engine that has the prefix of the session, unless it is overloaded; else the least loaded one."""
        least = min(serving, key=lambda supervisor: supervisor.load)
        placement = self._placement_by_session.get(request.session) if request.session else None
        if placement is None or placement.supervisor not in serving:
            return least
        if placement.supervisor.kv_cache_epoch != placement.epoch:
            return least
        if placement.supervisor.load > OVERLOAD * least.load + PREFILL_COST * placement.tokens:
            self._counts["moved"] += 1
            return least
        self._counts["stayed"] += 1
        return placement.supervisor

    def _on_preferred_class(self, task: str, hardware: str) -> None:
        if self._fallback_by_task.pop(task, None) is not None:
            self._emit(FallbackEnded(at_s=asyncio.get_running_loop().time(), task=task, hardware=hardware))

    def _on_fallback(self, task: str, preferred: str, used: str) -> None:
        self._fallbacks[task] += 1
        if self._fallback_by_task.get(task) != used:
            self._fallback_by_task[task] = used
            self._emit(FallbackBegan(at_s=asyncio.get_running_loop().time(), task=task, wanted=preferred, used=used))

    # ---- statistics ----

    def statistics(self) -> RouterStatistics:
        counts = self._counts
        return RouterStatistics(
            version=self._target.weights.version if self._target is not None else 0,
            engines=tuple(supervisor.status() for supervisor in self._supervisors),
            requests=len(self._active_requests),
            waiting=counts["waiting"],
            served=counts["served"],
            cancelled=counts["cancelled"],
            failed=counts["failed"],
            resumed=counts["resumed"],
            stayed=counts["stayed"],
            moved=counts["moved"],
            fallbacks=dict(self._fallbacks),
        )

    def engine_statistics(self) -> tuple[EngineStatistics, ...]:
        """Statistics of the serving engines."""
        return tuple(supervisor.engine.statistics() for supervisor in self._supervisors if supervisor.is_serving)

    # ---- internals ----

    def _begin_sync(self, weights: PolicyWeights) -> int:
        self._sync_count += 1
        self._set_target(WeightUpdate(self._sync_count, weights))
        return self._sync_count

    def _set_target(self, update: WeightUpdate) -> None:
        self._target = update
        for supervisor in self._supervisors:
            supervisor.set_target(update)

    def _syncing_engines(self) -> list[EngineSupervisor]:
        """Engines whose answer to an update counts: those that serve, or if none does, those that may serve again."""
        serving = [supervisor for supervisor in self._supervisors if supervisor.is_serving]
        return serving or [supervisor for supervisor in self._supervisors if not supervisor.is_gone]

    def _resolve_refusals(self) -> None:
        """Restarts engines that refused the newest update while others applied it. If all refused it, the newest update
        that any engine applied becomes the target again."""
        held = [supervisor.current for supervisor in self._supervisors if supervisor.current is not None]
        newest = max(held, key=lambda update: update.number, default=None)
        if newest is None or self._target is None or self._closing:
            return
        number = self._target.number
        if newest.number == number:
            for supervisor in self._supervisors:
                if supervisor.refused_update == number != supervisor.applied_update:
                    supervisor.restart()
        elif all(supervisor.refused_update == number for supervisor in self._syncing_engines()):
            self._set_target(newest)

    def _notify_change(self) -> None:
        self._resolve_refusals()
        self._changed.set()
        self._changed = asyncio.Event()

    def _require_open(self) -> None:
        if self._closing:
            raise NoEngine("the router was closed", retry=False)
        assert self._target is not None, "the router must be started before it is used"

    def _no_engine(self, supervisors: Sequence[EngineSupervisor], what: str) -> NoEngine:
        reasons = "; ".join(
            f"{supervisor.name} ({supervisor.hardware}): {supervisor.reason}" for supervisor in supervisors
        )
        untrainable = [
            supervisor.name
            for supervisor in self._supervisors
            if not supervisor.is_gone and supervisor not in supervisors
        ]
        others = (
            f"; the output of {', '.join(untrainable)} cannot be trained on, so they do not take over"
            if untrainable
            else ""
        )
        return NoEngine(f"{what}: {reasons or 'there is none'}{others}", retry=False)

    def _emit(self, event: AnyRouterEvent) -> None:
        """An error of a listener goes to the event loop's exception handler: requests are unaffected."""
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:
            context = {"message": "a listener of the router failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


# ---- requests that continue after the death of an engine ------------------------------------------------------------


def _remaining_request(request: GenerationRequest, generations: Sequence[Generation]) -> GenerationRequest:
    """The request for the remaining tokens; positions follow from the number of tokens."""
    written = tuple(token for generation in generations for token in generation.tokens)
    if not written:
        return request
    sampling = msgspec.structs.replace(request.sampling, tokens_max=request.sampling.tokens_max - len(written))
    return msgspec.structs.replace(request, tokens=(*request.tokens, *written), sampling=sampling)


def _valid_prefix(written: Generation, request: GenerationRequest) -> Generation:
    """The prefix in which each token has a log-probability and a version, up to the end of the request."""
    count = min(len(written.tokens), len(written.logprobs), len(written.versions), request.sampling.tokens_max)
    if request.sampling.keep_ids and request.sampling.truncates_distribution:
        count = min(count, len(written.kept or ()))
    ends = [number for number in range(count) if written.tokens[number] in request.sampling.stop]
    if ends:
        count = ends[0] + 1
    return msgspec.structs.replace(
        written,
        tokens=written.tokens[:count],
        logprobs=written.logprobs[:count],
        versions=written.versions[:count],
        kept=written.kept[:count] if written.kept is not None else None,
        finish="stop" if ends else "length",
    )


def _is_complete(request: GenerationRequest, generations: Sequence[Generation]) -> bool:
    """Whether the engine died after the last token."""
    if not generations:
        return False
    return (
        generations[-1].finish == "stop"
        or sum(len(generation.tokens) for generation in generations) >= request.sampling.tokens_max
    )


def _join_generations(generations: Sequence[Generation], waited_s: float) -> Generation:
    last = generations[-1]
    with_tokens = [generation for generation in generations if generation.tokens]
    kept: tuple[tuple[int, ...], ...] | None = None
    if with_tokens and all(generation.kept is not None for generation in with_tokens):
        kept = tuple(ids for generation in with_tokens for ids in generation.kept or ())
    return Generation(
        tokens=tuple(token for generation in generations for token in generation.tokens),
        logprobs=tuple(value for generation in generations for value in generation.logprobs),
        versions=tuple(version for generation in generations for version in generation.versions),
        kept=kept,
        finish=last.finish,
        engine=last.engine,
        prefilled=sum(generation.prefilled for generation in generations),
        reused=sum(generation.reused for generation in generations),
        waiting_s=waited_s + sum(generation.waiting_s for generation in generations),
        prefill_s=sum(generation.prefill_s for generation in generations),
        decode_s=sum(generation.decode_s for generation in generations),
    )
