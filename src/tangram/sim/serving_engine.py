"""One LLM serving engine on virtual time: continuous batching, chunked prefill, prefix caching between turns.

Owns the batch, the queue and the KV cache of one engine. It reads no clock and does not choose requests. Every prompt
token is prefilled or found in the cache, and every answer token decoded, exactly once. The cache never exceeds its
capacity. A step that has begun is not changed by arrivals.

Steps without prefill differ only by one more token per sequence, so sequences of them are computed together, with their
exact total time; an arrival cuts them at the end of the current step."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque

from tangram.errors import InvalidConfig, InvariantError
from tangram.sim.serving_model import Speed

CHUNK_TOKENS = 2048
"""Tokens per step, decoded ones included: the default of vLLM."""
RUNNING_MAX = 256
"""Concurrently running requests: the default of vLLM."""


class ServingRequest:
    """One turn of a session: `context` prompt tokens, then `answer` tokens to decode."""

    __slots__ = ("answer", "brought", "context", "known", "reusable", "session")

    def __init__(
        self, session: int, context: int, answer: int, *, reusable: int | None = None, brought: bool = False
    ) -> None:
        assert context >= 1 and answer >= 1
        self.session, self.context, self.answer = session, context, answer
        # The last token of a prompt is always computed, because it produces the first token of the answer.
        self.reusable = min(context if reusable is None else reusable, context - 1)
        """Tokens that may be taken from the cache."""
        self.brought = brought
        """Prefilled on another engine, which also decoded the first token: only decoding remains."""
        self.known = 0
        """Tokens in the KV cache."""


class ServingEngine:
    """One engine. `next_at` is when to call `advance`; infinite while idle."""

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
        """With `host`, evicted KV caches are kept in host memory, which is unlimited, and are read back."""
        if not 1 <= running_max < chunk:
            raise InvalidConfig("chunk", chunk, f"more tokens than the {running_max} requests that may run")
        self.index, self.speed, self.node = index, speed, node
        self.next_at = math.inf
        self.load = 0
        """Requests here, and idle sessions with a KV cache here."""
        self.prefilled = self.reused = self.decoded = self.steps = 0
        self._chunk, self._running_max = chunk, running_max
        self._waiting: deque[ServingRequest] = deque()
        self._prefilling: deque[ServingRequest] = deque()
        self._decoding: list[tuple[int, int, ServingRequest]] = []
        self._context = 0
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._idle_tokens = self._held_tokens = 0
        self._host: dict[int, int] | None = {} if host else None
        self._read_back_s = 0.0
        self._began = 0.0
        self._steps_ahead = 0
        self._prefill_chunks: list[tuple[ServingRequest, int]] = []
        self._serial = 0

    def resident(self, session: int) -> int:
        """Return the cached tokens of an idle session."""
        tokens = self._idle.get(session)
        if tokens is None:
            return self._host.get(session, 0) if self._host is not None else 0
        return tokens

    def add(self, request: ServingRequest, now: float) -> None:
        need = request.context + request.answer
        if need > self.speed.capacity:
            room = f"at most the {self.speed.capacity:,} tokens that fit on {self.speed.of.name}"
            raise InvalidConfig("context", need, room)
        self.load += 1
        fits = not self._waiting and self._fits(need)
        self._waiting.append(request)
        if self._steps_ahead == 0:
            self._begin_steps(now)
        elif fits and self._steps_ahead > 1:
            self._truncate_steps(now)

    def drop_session(self, session: int) -> None:
        """Drop the KV cache of a session that has ended."""
        self._remove_from_cache(session)
        if self._host is not None:
            self._host.pop(session, None)

    def _remove_from_cache(self, session: int) -> int:
        """Remove a session from the cache and return its cached tokens."""
        tokens = self._idle.pop(session, 0)
        if tokens:
            self._idle_tokens -= tokens
            self.load -= 1
        return tokens

    def advance(self, now: float) -> list[ServingRequest]:
        """Complete the current steps and return the requests that ended with them."""
        assert now == self.next_at and self._steps_ahead >= 1
        self.steps += self._steps_ahead
        self.decoded += self._steps_ahead * len(self._decoding)
        self._context += self._steps_ahead * len(self._decoding)
        ended = []
        while self._decoding and self._decoding[0][0] <= self.steps:
            request = heapq.heappop(self._decoding)[2]
            self._context -= request.context + request.answer
            ended.append(request)
        ended += self._on_prefill_done()
        for request in ended:
            self._retain_cache(request)
        self._steps_ahead = 0
        self._begin_steps(now)
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
        """Admit in order of arrival. The whole answer is reserved, so no running request is ever preempted."""
        while self._waiting and self._fits(self._waiting[0].context + self._waiting[0].answer):
            request = self._waiting.popleft()
            need = request.context + request.answer
            cached = self._remove_from_cache(request.session) or self._read_back(request)
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
        tokens = self._remove_from_cache(session)
        if self._host is not None:
            self._host[session] = tokens

    def _read_back(self, request: ServingRequest) -> int:
        """Read back from host memory, which adds to the next step."""
        tokens = self._host.pop(request.session, 0) if self._host is not None else 0
        self._read_back_s += min(tokens, request.reusable) * self.speed.host_s
        return tokens

    def _decode(self, request: ServingRequest) -> None:
        """Start decoding. The first token exists; the next step reads the prompt and that token."""
        self._serial += 1
        heapq.heappush(self._decoding, (self.steps + request.answer - 1, self._serial, request))
        self._context += request.context + 1

    def _retain_cache(self, request: ServingRequest) -> None:
        """Keep the KV cache of a finished request as the most recently used one. It still counts for the load."""
        tokens = request.context + request.answer
        self._held_tokens -= tokens
        self._idle[request.session] = tokens
        self._idle_tokens += tokens

    # Steps.

    def _begin_steps(self, now: float) -> None:
        self._admit()
        self._began = now
        if self._prefilling:
            self._steps_ahead = 1
            self.next_at = now + self._read_back_s + self._prefill_step_s()
            self._read_back_s = 0.0
        elif self._decoding:
            now, self._began, self._read_back_s = now + self._read_back_s, now + self._read_back_s, 0.0
            self._steps_ahead = self._decoding[0][0] - self.steps
            self.next_at = now + self._decode_steps_s(self._steps_ahead)
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
            self._prefill_chunks.append((request, take))
            tokens += take
            attended += take * request.known + take * (take + 1) / 2.0
        return self.speed.step_s(tokens, attended, len(self._decoding), self._context)

    def _on_prefill_done(self) -> list[ServingRequest]:
        """Requests whose prompt is complete have their first token. Return those that needed no more."""
        ended = []
        for request, take in self._prefill_chunks:
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
        self._prefill_chunks.clear()
        return ended

    def _decode_steps_s(self, steps: int) -> float:
        """Return the time of consecutive decoding steps; each reads one more token per sequence than the one before."""
        count = len(self._decoding)
        read = steps * self._context + count * (steps * (steps - 1) // 2)
        return steps * self.speed.shared_s(count) + read * self.speed.kv_s

    def _truncate_steps(self, now: float) -> None:
        """Stop at the end of the step that contains `now`."""
        low, high = 1, self._steps_ahead
        while low < high:
            middle = (low + high) // 2
            if self._began + self._decode_steps_s(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._steps_ahead, self.next_at = low, self._began + self._decode_steps_s(low)
