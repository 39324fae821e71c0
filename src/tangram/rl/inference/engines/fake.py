"""The fake engine: writes what a script says. For tests, and to try an environment or a gateway without PyTorch.

It keeps the contract of engines on whatever loop it is used, on virtual time too, since all that it does with time is
to ask the loop for a call later. Owns nothing outside itself. Remembers what it was asked, the last ASKED_MAX requests.

    engine = FakeEngine(lambda request: (5, 6, END), token_s=0.02)

An answer is what follows the tokens of a request. A request that comes again after the death of an engine has among
them what was written before, so a script has to go on from there: it does so by itself if it chooses each token by what
stands before it, and `spoken` does so for whole texts.

It can be told to misbehave: `die` ends it with all that is inside, `hang` stops it without a word, `refuse` makes its
next updates or starts fail.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence

from tangram.errors import ManagerError
from tangram.rl.inference.engines.protocol import EngineDied, EngineStatistics, Finish, Generation, Request, Weights
from tangram.rl.rollout.codec import Codec

Answer = Callable[[Request], Sequence[int]]

ASKED_MAX = 10_000
"""More than a test asks for; whoever runs for days on it must not remember all."""
LOGPROB = -1.0
"""Of every token: it was not drawn."""


class FakeEngine:
    """Keeps the contract of engines without a model."""

    def __init__(
        self,
        answer: Answer,
        *,
        name: str = "fake",
        hardware: str = "default",
        trains: bool = True,
        prefill_s_per_token: float = 0.0,
        token_s: float = 0.0,
        start_s: float = 0.0,
        fetch_s: float = 0.0,
        update_s: float = 0.0,
    ) -> None:
        self.name = name
        self.hardware = hardware
        self.trains = trains
        self.asked: collections.deque[Request] = collections.deque(maxlen=ASKED_MAX)
        self.fetched: list[int] = []
        """Versions, also those that it could not have."""
        self.alive = False
        self.suspended = False
        self.hanging = False
        self.version = 0
        self.answered = 0
        self.aborted = 0
        self._answer = answer
        self._prefill_s_per_token = prefill_s_per_token
        self._token_s = token_s
        self._start_s = start_s
        self.fetch_s = fetch_s
        """Seconds that reading weights takes."""
        self._update_s = update_s
        self._inside: dict[str, _Served] = {}
        self._resident: dict[str, int] = {}
        """Tokens that were read of a session."""
        self._stuck: list[asyncio.Future[None]] = []
        """Calls that hang."""
        self._refusals = {"fetch": 0, "update": 0, "start": 0}
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._suspended_at = 0.0

    @property
    def inside(self) -> tuple[str, ...]:
        """The requests that it serves."""
        return tuple(self._inside)

    # ---- the contract ----

    async def start(self, weights: Weights) -> None:
        assert not self.alive, f"{self.name} is started twice"
        await self._take(self._start_s)
        self._refuse_if_told("start")
        self.version = weights.version
        self.alive, self.suspended = True, False

    async def generate(self, request: Request) -> Generation:
        self._require_alive()
        assert request.id not in self._inside, f"{self.name} has {request.id} already"
        self.asked.append(request)
        served = self._inside[request.id] = _Served(self, request, self._answer(request))
        reused = min(self._resident.get(request.session, 0), len(request.tokens)) if request.session else 0
        served.begin(reused)
        try:
            generation = await served.future
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            served.leave()
            self._inside.pop(request.id, None)
        self.answered += 1
        if request.session:
            self._resident[request.session] = len(request.tokens) + len(generation.tokens)
        return generation

    async def fetch(self, weights: Weights) -> None:
        self.fetched.append(weights.version)
        await self._take(self.fetch_s)
        self._require_alive()
        self._refuse_if_told("fetch")
        self._seconds["update"] += self.fetch_s

    async def suspend(self) -> None:
        await self._take(0.0)
        self._require_alive()
        self.suspended = True
        self._suspended_at = asyncio.get_running_loop().time()
        for served in self._inside.values():
            served.stop()

    async def update(self, weights: Weights) -> None:
        await self._take(self._update_s)
        self._require_alive()
        self._refuse_if_told("update")
        self.version = weights.version
        self._resident.clear()
        self._seconds["update"] += self._update_s
        for served in self._inside.values():
            served.read_again()

    async def resume(self) -> None:
        await self._take(0.0)
        self._require_alive()
        if self.suspended:
            self._seconds["suspended"] += asyncio.get_running_loop().time() - self._suspended_at
        self.suspended = False
        for served in list(self._inside.values()):
            served.go_on()

    async def close(self) -> None:
        """Also if it hangs, as a process that is killed."""
        self._end("was closed")

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            name=self.name,
            version=self.version,
            active=len(self._inside),
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

    def die(self, reason: str = "the script says so") -> None:
        """With all that is inside. It can be started again."""
        self._end(reason)

    def hang(self, notice_s: float | None = None) -> None:
        """Nothing is written or answered any more, and no call returns. After `notice_s` that is noticed, as an engine
        does that watches over its process, and it dies; without it, it hangs until it is closed."""
        if not self.alive:
            return
        self.hanging = True
        for served in self._inside.values():
            served.stop()
        if notice_s is not None:
            asyncio.get_running_loop().call_later(notice_s, self._notice)

    def refuse(self, *, fetches: int = 0, updates: int = 0, starts: int = 0) -> None:
        """The next calls fail."""
        self._refusals = {"fetch": fetches, "update": updates, "start": starts}

    # ---- inside ----

    def _notice(self) -> None:
        if self.hanging:
            self._end("did not answer any more")

    def _end(self, reason: str) -> None:
        self.alive = self.hanging = self.suspended = False
        self._resident.clear()
        inside, self._inside = self._inside, {}
        for served in inside.values():
            served.fail(reason)
        for stuck in self._stuck:
            if not stuck.done():
                stuck.set_exception(EngineDied(self.name, reason, None))
        self._stuck = []

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineDied(self.name, "is not running", None)

    def _refuse_if_told(self, what: str) -> None:
        if self._refusals[what]:
            self._refusals[what] -= 1
            raise ManagerError(f"engine {self.name}: no {what}, as the script says")

    async def _take(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)
        if self.hanging:
            stuck = asyncio.get_running_loop().create_future()
            self._stuck.append(stuck)
            await stuck


class _Served:
    """A request inside a FakeEngine. Each token is a call of the loop; nothing waits for it in between."""

    def __init__(self, engine: FakeEngine, request: Request, answer: Sequence[int]) -> None:
        limit = request.sampling.tokens_max
        self._engine = engine
        self._request = request
        self._script = tuple(answer[:limit])
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
        self.go_on()

    def read_again(self) -> None:
        self._unread = len(self._request.tokens) + len(self._tokens)

    def go_on(self) -> None:
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

    def leave(self) -> None:
        self.stop()
        if self.future.done() and not self.future.cancelled():
            self.future.exception()  # else asyncio complains, if whoever awaited it was cancelled meanwhile

    def fail(self, reason: str) -> None:
        self.stop()
        if not self.future.done():
            self.future.set_exception(EngineDied(self._engine.name, reason, self._written("length")))

    def _write(self) -> None:
        engine = self._engine
        self._timer = None
        if len(self._tokens) < len(self._script):
            self._tokens.append(self._script[len(self._tokens)])
            self._versions.append(engine.version)
            engine._counts["decode"] += 1
            engine._seconds["decode"] += engine._token_s
        if len(self._tokens) < len(self._script):
            self.go_on()
        elif not self.future.done():
            stopped = bool(self._tokens) and self._tokens[-1] in self._request.sampling.stop
            self.future.set_result(self._written("stop" if stopped else "length"))

    def _written(self, finish: Finish) -> Generation:
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


def spoken(codec: Codec, speak: Callable[[Request], str]) -> Answer:
    """Whole texts as answers. One that is given to several engines goes on where another engine died: a request that
    comes again under its id gets the rest of what was said to it at first."""
    said: collections.OrderedDict[str, tuple[int, tuple[int, ...]]] = collections.OrderedDict()

    def answer(request: Request) -> Sequence[int]:
        if request.id not in said:
            said[request.id] = (len(request.tokens), codec.written(speak(request)))
            while len(said) > ASKED_MAX:
                said.popitem(last=False)
        began, tokens = said[request.id]
        return tokens[len(request.tokens) - began :]

    return answer
