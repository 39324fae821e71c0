"""The fake engine: generates scripted tokens. For tests, and to try an environment or a router without PyTorch.

Implements the contract of engines on any event loop, also in virtual time, because it uses only timers of the loop.
Owns nothing outside itself. Records the last REQUESTS_MAX requests.

    engine = FakeEngine(lambda request: (5, 6, END), token_s=0.02)

A script returns the continuation of the tokens of a request. After the death of an engine these include the tokens
generated so far, so a script must continue from there: choose each token by its context, or use `text_script` for whole
texts.

It can fail on purpose: `die` ends it with all its requests, `hang` stops it silently, `refuse` makes its next updates
or starts fail.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence

from tangram.errors import ManagerError
from tangram.rl.inference.engines.protocol import (
    EngineDied,
    EngineStatistics,
    Finish,
    Generation,
    GenerationRequest,
    PolicyWeights,
)
from tangram.rl.trajectories.codec import Codec

TokenScript = Callable[[GenerationRequest], Sequence[int]]

REQUESTS_MAX = 10_000
"""More than a test checks; bounds the memory of long runs."""
LOGPROB = -1.0
"""Log-probability of every token: it was not sampled."""


class FakeEngine:
    """Implements the contract of engines without a model."""

    def __init__(
        self,
        script: TokenScript,
        *,
        name: str = "fake",
        hardware: str = "default",
        output_is_trainable: bool = True,
        prefill_s_per_token: float = 0.0,
        token_s: float = 0.0,
        start_s: float = 0.0,
        fetch_s: float = 0.0,
        update_s: float = 0.0,
    ) -> None:
        self.name = name
        self.hardware = hardware
        self.output_is_trainable = output_is_trainable
        self.requests: collections.deque[GenerationRequest] = collections.deque(maxlen=REQUESTS_MAX)
        self.fetched: list[int] = []
        """Versions, also those that it refused."""
        self.alive = False
        self.suspended = False
        self.hanging = False
        self.version = 0
        self.completed = 0
        self.aborted = 0
        self._token_script = script
        self._prefill_s_per_token = prefill_s_per_token
        self._token_s = token_s
        self._start_s = start_s
        self.fetch_s = fetch_s
        """Seconds of reading weights."""
        self._update_s = update_s
        self._active: dict[str, _FakeRequest] = {}
        self._resident: dict[str, int] = {}
        """Cached tokens of a session."""
        self._hung_calls: list[asyncio.Future[None]] = []
        """Calls that hang."""
        self._refusals = {"fetch": 0, "update": 0, "start": 0}
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._suspended_at = 0.0

    @property
    def active_requests(self) -> tuple[str, ...]:
        """Requests in service."""
        return tuple(self._active)

    # ---- the contract ----

    async def start(self, weights: PolicyWeights) -> None:
        assert not self.alive, f"{self.name} is started twice"
        await self._sleep_or_hang(self._start_s)
        self._refuse_if_scripted("start")
        self.version = weights.version
        self.alive, self.suspended = True, False

    async def generate(self, request: GenerationRequest) -> Generation:
        self._require_alive()
        assert request.id not in self._active, f"{self.name} has {request.id} already"
        self.requests.append(request)
        served = self._active[request.id] = _FakeRequest(self, request, self._token_script(request))
        reused = min(self._resident.get(request.session, 0), len(request.tokens)) if request.session else 0
        served.begin(reused)
        try:
            generation = await served.future
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            served.detach()
            self._active.pop(request.id, None)
        self.completed += 1
        if request.session:
            self._resident[request.session] = len(request.tokens) + len(generation.tokens)
        return generation

    async def fetch(self, weights: PolicyWeights) -> None:
        self.fetched.append(weights.version)
        await self._sleep_or_hang(self.fetch_s)
        self._require_alive()
        self._refuse_if_scripted("fetch")
        self._seconds["update"] += self.fetch_s

    async def suspend(self) -> None:
        await self._sleep_or_hang(0.0)
        self._require_alive()
        self.suspended = True
        self._suspended_at = asyncio.get_running_loop().time()
        for served in self._active.values():
            served.stop()

    async def update(self, weights: PolicyWeights) -> None:
        await self._sleep_or_hang(self._update_s)
        self._require_alive()
        self._refuse_if_scripted("update")
        self.version = weights.version
        self._resident.clear()
        self._seconds["update"] += self._update_s
        for served in self._active.values():
            served.reset_prefill()

    async def resume(self) -> None:
        await self._sleep_or_hang(0.0)
        self._require_alive()
        if self.suspended:
            self._seconds["suspended"] += asyncio.get_running_loop().time() - self._suspended_at
        self.suspended = False
        for served in list(self._active.values()):
            served.resume()

    async def close(self) -> None:
        """Also works while it hangs, like killing a process."""
        self._end("was closed")

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            name=self.name,
            version=self.version,
            active=len(self._active),
            resident=sum(self._resident.values()),
            steps=self._counts["decode"],
            prefill_tokens=self._counts["prefill"],
            decode_tokens=self._counts["decode"],
            prefill_s=self._seconds["prefill"],
            decode_s=self._seconds["decode"],
            suspended_s=self._seconds["suspended"],
            update_s=self._seconds["update"],
        )

    # ---- misbehaviour ----

    def die(self, reason: str = "killed as scripted") -> None:
        """Ends it with all its requests. It can be started again."""
        self._end(reason)

    def hang(self, notice_s: float | None = None) -> None:
        """Generates nothing and returns from no call. After `notice_s` the hang is detected, as by an engine that
        supervises its process, and it dies; without it, it hangs until it is closed."""
        if not self.alive:
            return
        self.hanging = True
        for served in self._active.values():
            served.stop()
        if notice_s is not None:
            asyncio.get_running_loop().call_later(notice_s, self._on_hang_noticed)

    def refuse(self, *, fetches: int = 0, updates: int = 0, starts: int = 0) -> None:
        """Makes the next calls fail."""
        self._refusals = {"fetch": fetches, "update": updates, "start": starts}

    # ---- internals ----

    def _on_hang_noticed(self) -> None:
        if self.hanging:
            self._end("stopped responding")

    def _end(self, reason: str) -> None:
        self.alive = self.hanging = self.suspended = False
        self._resident.clear()
        inside, self._active = self._active, {}
        for served in inside.values():
            served.fail(reason)
        for stuck in self._hung_calls:
            if not stuck.done():
                stuck.set_exception(EngineDied(self.name, reason, None))
        self._hung_calls = []

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineDied(self.name, "is not running", None)

    def _refuse_if_scripted(self, what: str) -> None:
        if self._refusals[what]:
            self._refusals[what] -= 1
            raise ManagerError(f"engine {self.name}: no {what}, as scripted")

    async def _sleep_or_hang(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)
        if self.hanging:
            stuck = asyncio.get_running_loop().create_future()
            self._hung_calls.append(stuck)
            await stuck


class _FakeRequest:
    """A request inside a FakeEngine. Each token is a timer of the loop; no task runs in between."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, tokens: Sequence[int]) -> None:
        limit = request.sampling.tokens_max
        self._engine = engine
        self._request = request
        self._script = tuple(tokens[:limit])
        self._tokens: list[int] = []
        self._versions: list[int] = []
        self._prefilled = self._reused = 0
        self._prefill_s = 0.0
        self._unread = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.future: asyncio.Future[Generation] = self._loop.create_future()

    def begin(self, reused: int) -> None:
        self._reused = reused
        self._unread = len(self._request.tokens) - reused
        self.resume()

    def reset_prefill(self) -> None:
        self._unread = len(self._request.tokens) + len(self._tokens)

    def resume(self) -> None:
        engine = self._engine
        if engine.suspended or engine.hanging or not engine.alive or self._timer is not None or self.future.done():
            return
        wait_s = engine._token_s
        if self._unread:
            read_s = self._unread * engine._prefill_s_per_token
            wait_s += read_s
            self._prefill_s += read_s
            self._prefilled += self._unread
            engine._counts["prefill"] += self._unread
            engine._seconds["prefill"] += read_s
            self._unread = 0
        self._timer = self._loop.call_later(wait_s, self._write)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def detach(self) -> None:
        self.stop()
        if self.future.done() and not self.future.cancelled():
            # otherwise asyncio reports an exception that was never retrieved, if the caller was cancelled
            self.future.exception()

    def fail(self, reason: str) -> None:
        self.stop()
        if not self.future.done():
            self.future.set_exception(EngineDied(self._engine.name, reason, self._generation("length")))

    def _write(self) -> None:
        engine = self._engine
        self._timer = None
        if len(self._tokens) < len(self._script):
            self._tokens.append(self._script[len(self._tokens)])
            self._versions.append(engine.version)
            engine._counts["decode"] += 1
            engine._seconds["decode"] += engine._token_s
        if len(self._tokens) < len(self._script):
            self.resume()
        elif not self.future.done():
            stopped = bool(self._tokens) and self._tokens[-1] in self._request.sampling.stop
            self.future.set_result(self._generation("stop" if stopped else "length"))

    def _generation(self, finish: Finish) -> Generation:
        return Generation(
            tokens=tuple(self._tokens),
            logprobs=(LOGPROB,) * len(self._tokens),
            versions=tuple(self._versions),
            finish=finish,
            engine=self._engine.name,
            prefilled=self._prefilled,
            reused=self._reused,
            prefill_s=self._prefill_s,
            decode_s=len(self._tokens) * self._engine._token_s,
        )


def text_script(codec: Codec, write: Callable[[GenerationRequest], str]) -> TokenScript:
    """Whole texts as responses. If several engines share it, a request that returns with the same id after a death gets
    the rest of its first text."""
    started: collections.OrderedDict[str, tuple[int, tuple[int, ...]]] = collections.OrderedDict()

    def answer(request: GenerationRequest) -> Sequence[int]:
        if request.id not in started:
            started[request.id] = (len(request.tokens), codec.encode_action(write(request)))
            while len(started) > REQUESTS_MAX:
                started.popitem(last=False)
        began, tokens = started[request.id]
        return tokens[len(request.tokens) - began :]

    return answer
