"""The engine of this project, in a child process.

Owns the requests inside the child; processes/child.py supervises the process. Promises that each `generate` ends
exactly once: with the result, a refusal, or EngineDied with all output that the child had sent. A child that sends
nothing for `hang_s` while it has work counts as dead. After `close` no process remains; after a death, `start` creates
a new one."""

from __future__ import annotations

import asyncio

import msgspec

from tangram.errors import InvalidAction, InvalidConfig, ManagerError
from tangram.processes.child import HEARTBEATS_PER_HANG, ChildProcess
from tangram.processes.fork_server import ForkServer
from tangram.processes.framing import FrameTooLong
from tangram.rl.config.rollout_settings import EngineSettings
from tangram.rl.inference.engines import messages
from tangram.rl.inference.engines.messages import (
    AbortRequest,
    AddRequest,
    AnyEngineReply,
    CloseEngine,
    EngineAcknowledged,
    EngineHeartbeat,
    EngineHello,
    EngineNotReady,
    EngineReady,
    Fetch,
    Fetched,
    Fetching,
    GenerationDone,
    GenerationRefused,
    Resume,
    StepRecord,
    Suspend,
    TokenDelta,
    Update,
    Updated,
    UpdateFailed,
)
from tangram.rl.inference.engines.protocol import (
    EngineDied,
    EngineStatistics,
    Generation,
    GenerationRequest,
    PolicyWeights,
)

PROGRAM = "tangram.rl.model.engine_child"
DTYPES = ("float32", "float64")
UPDATE_HANG_FACTOR = 10
"""Reading weights is one long step, which extends the hang limit by this factor."""
HEARTBEAT_S_MAX = 0.25
"""Heartbeat interval of a working child; shorter if `hang_s` is small."""


class _PendingRequest:
    """A request in the child."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.deltas: list[TokenDelta] = []

    def partial(self, engine: str) -> Generation | None:
        if not self.deltas:
            return None
        kept = [delta.kept for delta in self.deltas]
        return Generation(
            tokens=tuple(token for delta in self.deltas for token in delta.tokens),
            logprobs=tuple(logprob for delta in self.deltas for logprob in delta.logprobs),
            versions=tuple(version for delta in self.deltas for version in delta.versions),
            kept=tuple(ids for each in kept for ids in each or ()) if None not in kept else None,
            finish="length",
            engine=engine,
        )


class ProcessEngine:
    """One engine; see InferenceEngine. It belongs to the event loop in which it was started."""

    output_is_trainable = True

    def __init__(
        self,
        settings: EngineSettings,
        number: int = 0,
        *,
        dtype: str = "float32",
        hang_s: float = 30.0,
        record_steps: bool = False,
        fork_server: ForkServer | None = None,
    ) -> None:
        if settings.kind != "process":
            raise InvalidConfig("kind", settings.kind, "process: others are not ours to start")
        if dtype not in DTYPES:
            raise InvalidConfig("dtype", dtype, " or ".join(DTYPES))
        self.name = settings.engine_name(number)
        self.hardware = settings.hardware
        self.steps: list[StepRecord] = []
        """With `record_steps`: all steps, by the clock of the child."""
        self._settings, self._dtype, self._hang_s, self._record_steps = settings, dtype, hang_s, record_steps
        self._fork_server = fork_server
        self._child: _EngineChild | None = None

    @property
    def pid(self) -> int:
        """The process id of the running child."""
        assert self._child is not None, f"{self.name} does not run"
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def start(self, weights: PolicyWeights) -> None:
        if self.alive:
            raise ManagerError(f"engine {self.name} runs already", retry=False)
        if self._child is not None:
            await self._child.end("")
        child = self._child = _EngineChild(self.name, self._hang_s, self.steps)
        hello = EngineHello(
            name=self.name,
            settings=self._settings,
            dtype=self._dtype,
            weights=weights,
            beat_s=min(HEARTBEAT_S_MAX, self._hang_s / HEARTBEATS_PER_HANG),
            record_steps=self._record_steps,
        )
        await child.start(PROGRAM, self._settings.threads, hello, self._fork_server)

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._require_child().generate(request)

    async def fetch(self, weights: PolicyWeights) -> None:
        await self._require_child().fetch(weights)

    async def suspend(self) -> None:
        await self._require_child().suspend()

    async def update(self, weights: PolicyWeights) -> None:
        await self._require_child().update(weights)

    async def resume(self) -> None:
        await self._require_child().resume()

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close(CloseEngine())

    def statistics(self) -> EngineStatistics:
        return self._child.statistics() if self._child is not None else EngineStatistics(name=self.name)

    def _require_child(self) -> _EngineChild:
        if self._child is None:
            raise EngineDied(self.name, "it was not started", None)
        return self._child


class _EngineChild(ChildProcess):
    """One incarnation of an engine."""

    def __init__(self, name: str, hang_s: float, steps: list[StepRecord]) -> None:
        super().__init__(f"engine {name}", messages.reply_frames(), hang_s)
        self.name = name
        self._steps = steps
        self._pending_by_id: dict[str, _PendingRequest] = {}
        """By the id that the request has in the child."""
        self._updating = 0
        self._suspended = False
        self._statistics = EngineStatistics(name=name)
        self._statistics_s = 0.0

    # ---- requests ----

    async def generate(self, request: GenerationRequest) -> Generation:
        self.require_ready()
        pending = _PendingRequest(request)
        id = f"{request.id}#{self.next_number()}"
        try:
            self.send(AddRequest(request=msgspec.structs.replace(request, id=id)))
        except FrameTooLong as error:
            raise InvalidAction("tokens", f"{len(request.tokens)} tokens", str(error)) from error
        self._pending_by_id[id] = pending
        try:
            return await pending.future
        except asyncio.CancelledError:
            self.send(AbortRequest(id=id))
            raise
        finally:
            del self._pending_by_id[id]

    async def suspend(self) -> None:
        self.require_ready()
        request_id = self.next_number()
        self._suspended = True
        await self.request(request_id, Suspend(request_id=request_id))

    async def resume(self) -> None:
        self.require_ready()
        request_id = self.next_number()
        self.reset_hang_timer()
        self._suspended = False
        await self.request(request_id, Resume(request_id=request_id))

    async def fetch(self, weights: PolicyWeights) -> None:
        request_id = self.next_number()
        self._require_accepted(weights, await self.request(request_id, Fetch(request_id=request_id, weights=weights)))

    async def update(self, weights: PolicyWeights) -> None:
        request_id = self.next_number()
        self._updating += 1
        try:
            self._require_accepted(
                weights, await self.request(request_id, Update(request_id=request_id, weights=weights))
            )
        finally:
            self._updating -= 1

    def _require_accepted(self, weights: PolicyWeights, reply: AnyEngineReply) -> None:
        if isinstance(reply, UpdateFailed):
            raise ManagerError(f"engine {self.name} keeps its weights: version {weights.version}: {reply.reason}")

    # ---- replies ----

    def on_message(self, reply: AnyEngineReply) -> None:
        match reply:
            case GenerationDone(id=id, generation=generation):
                pending = self._pending_by_id.get(id)
                if pending is not None and not pending.future.done():
                    pending.future.set_result(generation)
            case TokenDelta(id=id):
                pending = self._pending_by_id.get(id)
                if pending is not None:
                    pending.deltas.append(reply)
            case GenerationRefused(id=id):
                pending = self._pending_by_id.get(id)
                if pending is not None and not pending.future.done():
                    pending.future.set_exception(InvalidAction(reply.field, reply.value, reply.expected))
            case (
                EngineAcknowledged(request_id=request_id)
                | Fetched(request_id=request_id)
                | Updated(request_id=request_id)
                | UpdateFailed(request_id=request_id)
            ):
                self.resolve(request_id, reply)
            case EngineHeartbeat(statistics=statistics, steps=steps):
                self._statistics, self._statistics_s = statistics, self._loop.time()
                self._steps += steps
            case Fetching():
                pass  # receiving it is enough
            case EngineReady():
                self.mark_ready()
            case EngineNotReady(reason=reason):
                self.fail_start(ManagerError(reason, retry=False))

    # ---- hang and death ----

    @property
    def has_work(self) -> bool:
        return super().has_work or (bool(self._pending_by_id) and not self._suspended)

    @property
    def silence_s_max(self) -> float:
        return super().silence_s_max * (UPDATE_HANG_FACTOR if self._updating else 1)

    def death_error(self, reason: str) -> EngineDied:
        return EngineDied(self.name, reason, None)

    def on_end(self, reason: str) -> None:
        for pending in self._pending_by_id.values():
            if not pending.future.done():
                pending.future.set_exception(EngineDied(self.name, reason, pending.partial(self.name)))

    # ---- statistics ----

    def statistics(self) -> EngineStatistics:
        """The last statistics of the child, with the number of requests as this process counts them."""
        statistics, in_child = self._statistics, len(self._pending_by_id)
        active = min(statistics.active, in_child)
        idle_s = statistics.idle_s
        if self.alive and not statistics.active and not statistics.waiting and not in_child and not self._suspended:
            idle_s += self._loop.time() - self._statistics_s
        return msgspec.structs.replace(statistics, active=active, waiting=in_child - active, idle_s=idle_s)
