"""One engine on virtual time: continuous batching, chunked prefill, keys and values kept between turns.

Owns the batch, the queue and the cache of one engine. Never looks at a clock and never chooses requests: they are
given to it. Promises that every token of a request is prefilled or found in the cache, and every answer token decoded,
exactly once; that the cache never holds more than fits; and that a step, once begun, is not changed by who arrives.

Steps in which nobody is prefilled differ only by one more token per sequence, so many of them are taken at once, with
their exact sum of seconds; an arrival cuts them at the end of the step that it falls into.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque

from tangram.errors import InvalidConfig, InvariantError
from tangram.sim.serving_model import Speed

CHUNK_TOKENS = 2048
"""Of one step, decoded ones included: the default of vLLM."""
RUNNING_MAX = 256
"""Requests that run at once: the default of vLLM."""


class Request:
    """One turn of one session: `context` tokens to be known, then `answer` tokens to be written."""

    __slots__ = ("answer", "brought", "context", "known", "reusable", "session")

    def __init__(
        self, session: int, context: int, answer: int, *, reusable: int | None = None, brought: bool = False
    ) -> None:
        assert context >= 1 and answer >= 1
        self.session, self.context, self.answer = session, context, answer
        # The last token of a prompt is always computed: the first token of the answer comes out of it.
        self.reusable = min(context if reusable is None else reusable, context - 1)
        """Tokens that may be taken from the cache."""
        self.brought = brought
        """Prefilled on another engine, which wrote the first token too: only decoding is left."""
        self.known = 0
        """Tokens whose keys and values are there."""


class Engine:
    """`next_at` is when it wants `advance` to be called; infinite while it is idle."""

    def __init__(
        self,
        index: int,
        speed: Speed,
        *,
        node: int = 0,
        host: bool = False,
        chunk: int = CHUNK_TOKENS,
        running_max: int = RUNNING_MAX,
    ) -> None:
        """With `host`, what is evicted stays in the memory of the host, which has room for all, and is read back."""
        if not 1 <= running_max < chunk:
            raise InvalidConfig("chunk", chunk, f"more tokens than the {running_max} requests that may run")
        self.index, self.speed, self.node = index, speed, node
        self.next_at = math.inf
        self.load = 0
        """Requests that are here, and sessions that left their keys and values here."""
        self.prefilled = self.reused = self.decoded = self.steps = 0
        self.busy_s = 0.0
        self._chunk, self._running_max = chunk, running_max
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._decoding: list[tuple[int, int, Request]] = []
        self._context = 0
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._idle_tokens = self._held_tokens = 0
        self._host: dict[int, int] | None = {} if host else None
        self._read_back_s = 0.0
        self._began = 0.0
        self._leap = 0
        self._taken: list[tuple[Request, int]] = []
        self._serial = 0

    def resident(self, session: int) -> int:
        """Tokens of an idle session that are cached here."""
        tokens = self._idle.get(session)
        if tokens is None:
            return self._host.get(session, 0) if self._host is not None else 0
        return tokens

    def add(self, request: Request, now: float) -> None:
        need = request.context + request.answer
        if need > self.speed.capacity:
            room = f"at most the {self.speed.capacity:,} tokens that fit on {self.speed.of.name}"
            raise InvalidConfig("context", need, room)
        self.load += 1
        fits = not self._waiting and self._fits(need)
        self._waiting.append(request)
        if self._leap == 0:
            self._begin(now)
        elif fits and self._leap > 1:
            self._cut(now)

    def forget(self, session: int) -> None:
        """The session has ended: its keys and values go."""
        self._leave(session)
        if self._host is not None:
            self._host.pop(session, None)

    def _leave(self, session: int) -> int:
        """Out of the cache: how many tokens it had there."""
        tokens = self._idle.pop(session, 0)
        if tokens:
            self._idle_tokens -= tokens
            self.load -= 1
        return tokens

    def advance(self, now: float) -> list[Request]:
        """The end of the steps that were under way: the requests that ended with them."""
        assert now == self.next_at and self._leap >= 1
        self.busy_s += now - self._began
        self.steps += self._leap
        self.decoded += self._leap * len(self._decoding)
        self._context += self._leap * len(self._decoding)
        ended = []
        while self._decoding and self._decoding[0][0] <= self.steps:
            request = heapq.heappop(self._decoding)[2]
            self._context -= request.context + request.answer
            ended.append(request)
        ended += self._prefill_done()
        for request in ended:
            self._keep(request)
        self._leap = 0
        self._begin(now)
        return ended

    def check(self) -> None:
        """Recompute the running counts."""
        active = [*self._prefilling, *(entry[2] for entry in self._decoding)]
        held = sum(request.context + request.answer for request in active)
        idle = sum(self._idle.values())
        if (held, idle) != (self._held_tokens, self._idle_tokens) or held + idle > self.speed.capacity:
            raise InvariantError(
                f"engine {self.index} holds {held} and keeps {idle} tokens of {self.speed.capacity}, "
                f"but counted {self._held_tokens} and {self._idle_tokens}"
            )

    # Admission and the cache.

    def _fits(self, need: int) -> bool:
        running = len(self._prefilling) + len(self._decoding)
        return running < self._running_max and self._held_tokens + need <= self.speed.capacity

    def _admit(self) -> None:
        """In order of arrival. The whole answer is reserved, so that nobody has to be thrown out later."""
        while self._waiting and self._fits(self._waiting[0].context + self._waiting[0].answer):
            request = self._waiting.popleft()
            need = request.context + request.answer
            cached = self._leave(request.session) or self._read_back(request)
            self._held_tokens += need
            while self._held_tokens + self._idle_tokens > self.speed.capacity:
                self._evict(next(iter(self._idle)))
            if request.brought:
                request.known = request.context
                self._decode(request)
                continue
            request.known = min(cached, request.reusable)
            self.reused += request.known
            self._prefilling.append(request)

    def _evict(self, session: int) -> None:
        tokens = self._leave(session)
        if self._host is not None:
            self._host[session] = tokens

    def _read_back(self, request: Request) -> int:
        """From the host, which takes the time of the next step."""
        tokens = self._host.pop(request.session, 0) if self._host is not None else 0
        self._read_back_s += min(tokens, request.reusable) * self.speed.host_s
        return tokens

    def _decode(self, request: Request) -> None:
        """Its first token is written; the next step reads the prompt and that token."""
        self._serial += 1
        heapq.heappush(self._decoding, (self.steps + request.answer - 1, self._serial, request))
        self._context += request.context + 1

    def _keep(self, request: Request) -> None:
        """What it held stays, as the youngest of what may be evicted. It counts for the load as before."""
        tokens = request.context + request.answer
        self._held_tokens -= tokens
        self._idle[request.session] = tokens
        self._idle_tokens += tokens

    # Steps.

    def _begin(self, now: float) -> None:
        self._admit()
        self._began = now
        if self._prefilling:
            self._leap = 1
            self.next_at = now + self._read_back_s + self._prefill_step_s()
            self._read_back_s = 0.0
        elif self._decoding:
            now, self._began, self._read_back_s = now + self._read_back_s, now + self._read_back_s, 0.0
            self._leap = self._decoding[0][0] - self.steps
            self.next_at = now + self._leap_s(self._leap)
        else:
            assert not self._waiting
            self.next_at = math.inf

    def _prefill_step_s(self) -> float:
        budget = self._chunk - len(self._decoding)
        tokens, attended = 0, 0.0
        for request in self._prefilling:
            take = min(request.context - request.known, budget - tokens)
            if take == 0:
                break
            self._taken.append((request, take))
            tokens += take
            attended += take * request.known + take * (take + 1) / 2.0
        return self.speed.step_s(tokens, attended, len(self._decoding), self._context)

    def _prefill_done(self) -> list[Request]:
        """Those whose prompt is known now have written their first token; the ones that wanted no more have ended."""
        ended = []
        for request, take in self._taken:
            request.known += take
            self.prefilled += take
            if request.known < request.context:
                continue
            done = self._prefilling.popleft()
            assert done is request
            self.decoded += 1
            if request.answer == 1:
                ended.append(request)
            else:
                self._decode(request)
        self._taken.clear()
        return ended

    def _leap_s(self, steps: int) -> float:
        """Of so many steps of decoding: each reads one token more per sequence than the one before."""
        count = len(self._decoding)
        read = steps * self._context + count * (steps * (steps - 1) // 2)
        return steps * self.speed.shared_s(count) + read * self.speed.kv_s

    def _cut(self, now: float) -> None:
        """Stop at the end of the step that `now` falls into."""
        low, high = 1, self._leap
        while low < high:
            middle = (low + high) // 2
            if self._began + self._leap_s(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._leap, self.next_at = low, self._began + self._leap_s(low)
