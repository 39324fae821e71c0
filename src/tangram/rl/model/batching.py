"""Continuous batching: which requests a step prefills and decodes, and in which KV cache slot each of them is.

Owns the slots of a KV cache, the requests in them and those that wait for one, and counts the work. A pure step
machine: it never receives, sends, loads or waits, and time comes from a callable.

A step decodes one token for every request whose context is prefilled, and prefills at most `chunk` tokens of the others
(chunked prefill), so a long prompt delays other requests only a little. If few tokens remain to prefill, they take the
place of decoded tokens instead, one per step and request. Requests get a slot in the order of their arrival. The KV
cache of a request that ended is kept for its session, in its slot or in one of the `sessions` slots that only store,
until another request needs the slot; the next request of the session prefills only its new tokens (prefix caching).
New weights invalidate the whole cache: requests in flight are prefilled again and continue; tokens decoded before keep
their version and their log-probability.

With `deterministic`, the result of a request depends, to the last bit, only on itself and the weights: every call of
the model has one of two fixed shapes, each row is sampled by itself, and no session is reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from tangram.errors import InvalidAction
from tangram.rl.inference.engines.messages import TokenDelta
from tangram.rl.inference.engines.protocol import EngineStatistics, Finish, Generation, GenerationRequest
from tangram.rl.model.kv_cache_slots import KVCacheSlots, RequestState, SlotMove
from tangram.rl.model.sampling import SampledTokens, Sampler, draw, require_valid_seed, uniforms
from tangram.rl.model.transformer import KVCache, Transformer

KEY_LENGTH_MULTIPLE = 32
"""Attention lengths are rounded up to a multiple, so that fewer buffer sizes occur."""
SPARSE_FACTOR = 2
"""A call copies the needed slots together if the highest needed slot number exceeds their count by this factor; else it
reads all slots up to that number in place."""


class BatcherStepResult(NamedTuple):
    """The result of a step."""

    done: list[tuple[str, Generation]]
    """Id and generation of requests that ended."""
    prefilled: int
    """Number of tokens."""
    decoded: int
    """Number of requests that got a token."""


class _DecodeBatch:
    """The decoding requests as model inputs; rebuilt only when a request joins or leaves."""

    def __init__(self, state_by_slot: dict[int, RequestState], slots: list[int], deterministic: bool) -> None:
        """Slots without a request get a padding row, whose output is ignored."""
        is_taken = [slot in state_by_slot for slot in slots]
        self.requests = [state_by_slot[slot] for slot in slots if slot in state_by_slot]
        starts = [state_by_slot[slot].computed_tokens if slot in state_by_slot else 0 for slot in slots]
        self.slots = torch.tensor(slots, dtype=torch.long)
        self.positions = torch.tensor(starts, dtype=torch.long)
        self.longest = max((state.computed_tokens for state in self.requests), default=0)
        self.rows = (
            None
            if all(is_taken)
            else torch.tensor([row for row, has_request in enumerate(is_taken) if has_request], dtype=torch.long)
        )
        self.counts = torch.tensor(is_taken).long() if deterministic or not all(is_taken) else None
        self.sampler = Sampler([state.request.sampling for state in self.requests])
        self._inputs = torch.zeros(len(slots), 1, dtype=torch.long)

    def inputs(self, tokens: list[int]) -> torch.Tensor:
        """One token per row, [rows, 1]."""
        token_ids = torch.tensor(tokens)
        if self.rows is None:
            return token_ids.unsqueeze(1)
        self._inputs[self.rows, 0] = token_ids
        return self._inputs

    def advance(self) -> None:
        self.longest += 1
        if self.counts is None:
            self.positions += 1
        else:
            self.positions += self.counts


class Batcher:
    """The step machine. `pace` gets how long a part of a step took and its emulated minimum, and returns how long it
    took in the end: emulated hardware waits there."""

    def __init__(
        self,
        model: Transformer,
        version: int,
        *,
        slots: int,
        sessions: int = 0,
        context_max: int,
        chunk: int,
        deterministic: bool = False,
        now: Callable[[], float],
        prefill_s_per_token: float = 0.0,
        decode_s_per_step: float = 0.0,
        pace: Callable[[float, float], float] = lambda took_s, least_s: took_s,
        name: str = "",
    ) -> None:
        """Raises InvalidConfig if `context_max` exceeds that of the model."""
        self.name, self.version = name, version
        self.suspended = False
        self._model = model
        session_slots = 0 if deterministic else sessions
        self._cache = KVCache(model.config, slots + session_slots, context_max, model.dtype)
        self._context_max, self._chunk, self._deterministic = context_max, chunk, deterministic
        self._now, self._pace = now, pace
        self._prefill_s_per_token, self._decode_s_per_step = prefill_s_per_token, decode_s_per_step
        self._emulated = prefill_s_per_token > 0.0 or decode_s_per_step > 0.0
        self._slots = KVCacheSlots(slots, session_slots, keep_sessions=not deterministic)
        self._waiting: deque[RequestState] = deque()
        self._request_by_id: dict[str, RequestState] = {}
        """All requests."""
        self._running: dict[str, RequestState] = {}
        """Those with a slot, in the order of their arrival."""
        self._batch: _DecodeBatch | None = None
        """The decoding requests; None if it has to be rebuilt."""
        self._steps = self._prefill_tokens = self._decode_tokens = 0
        self._prefill_s = self._decode_s = self._suspended_s = 0.0
        self._suspended_at = 0.0

    # ---- commands ----

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._request_by_id) and not self.suspended

    def add(self, request: GenerationRequest) -> None:
        """Raises InvalidAction."""
        self._require_valid(request)
        state = RequestState(request, self._now())
        self._request_by_id[request.id] = state
        self._waiting.append(state)

    def _require_valid(self, request: GenerationRequest) -> None:
        if request.id in self._request_by_id:
            raise InvalidAction("id", request.id, "an id that no other request has")
        count, vocabulary = len(request.tokens), self._model.config.vocabulary
        if not 1 <= count < self._context_max:
            expected = f"from 1 to {self._context_max - 1}: room must remain for one generated token"
            raise InvalidAction("tokens", f"{count} tokens", expected)
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocabulary:
            invalid = next(token for token in request.tokens if not 0 <= token < vocabulary)
            raise InvalidAction("tokens", invalid, f"ids from 0 to {vocabulary - 1}")
        require_valid_seed(request.noise)

    def abort(self, id: str) -> bool:
        """Returns whether the request existed."""
        state = self._request_by_id.pop(id, None)
        if state is None:
            return False
        if state.slot is None:
            self._waiting.remove(state)
        else:
            self._release(state)
        return True

    def suspend(self) -> None:
        if not self.suspended:
            self.suspended, self._suspended_at = True, self._now()

    def resume(self) -> None:
        if self.suspended:
            self.suspended = False
            self._suspended_s += self._now() - self._suspended_at

    def update(self, model: Transformer, version: int) -> None:
        """Switches weights from the next token on. The model has the same sizes."""
        assert model.config == self._model.config, f"{model.config} in the place of {self._model.config}"
        self._model, self.version = model, version
        self._slots.invalidate()
        for state in self._request_by_id.values():
            state.computed_tokens, state.prefill_end = 0, len(state.tokens)
        self._batch = None

    # ---- a step ----

    def step(self) -> BatcherStepResult:
        """Raises BrokenLogits, after which the machine cannot be used."""
        assert self.busy, "a step without any work"
        self._assign_slots()
        if self._batch is None:
            self._batch = self._gather_batch()
        prefill_plan = self._plan_prefill() if len(self._batch.requests) < len(self._running) else []
        prefilled, decoded = self._prefill_tokens, self._decode_tokens
        done: list[tuple[str, Generation]] = []
        with torch.inference_mode():
            if self._batch.requests:
                self._decode(self._batch, done)
            if prefill_plan:
                self._prefill(prefill_plan, done)
        self._steps += 1
        return BatcherStepResult(done, self._prefill_tokens - prefilled, self._decode_tokens - decoded)

    def take_deltas(self) -> list[TokenDelta]:
        """Returns the tokens decoded since the last call, for requests that continue."""
        return [state.take_delta() for state in self._running.values() if state.reported < len(state.logprobs)]

    def _assign_slots(self) -> None:
        """Gives free slots to waiting requests, in order."""
        free = self._slots.free if self._waiting else []
        while self._waiting and free:
            state = self._waiting.popleft()
            move = self._slots.acquire(state, free)
            if move is not None:
                self._apply_move(move)
            self._running[state.request.id] = state
            self._batch = None
            count = min(state.request.sampling.tokens_max, self._context_max - state.prompt_length)
            state.uniforms = uniforms(state.request.noise, state.prompt_length, count).tolist()

    def _apply_move(self, move: SlotMove) -> None:
        for each in (*self._cache.keys, *self._cache.values):
            back = each[move.target, :, : move.tokens_back].clone()
            each[move.target, :, : move.tokens] = each[move.source, :, : move.tokens]
            each[move.source, :, : move.tokens_back] = back

    def _plan_prefill(self) -> list[tuple[RequestState, int]]:
        """Returns how many tokens each request prefills in this step: rows of equal length, with padding at most
        `chunk` tokens."""
        plan: list[tuple[RequestState, int]] = []
        longest = 0
        for state in self._running.values():
            if state.tokens_uncomputed == 1:
                continue
            room = self._chunk // (len(plan) + 1)
            if plan and (self._deterministic or longest > room or not room):
                break
            count = min(state.tokens_uncomputed, room)
            longest = max(longest, count)
            plan.append((state, count))
        return plan

    def _decode(self, batch: _DecodeBatch, done: list[tuple[str, Generation]]) -> None:
        began_at = self._now()
        tokens = [state.tokens[state.computed_tokens] for state in batch.requests]
        logits = self._model.forward_cached(
            batch.inputs(tokens),
            batch.positions,
            batch.slots,
            self._cache,
            self._key_length(batch.longest + 1),
            batch.counts,
        )
        sampled = self._sample(logits if batch.rows is None else logits[batch.rows], batch.requests, batch.sampler)
        batch.advance()
        took_s = self._pace(self._now() - began_at, self._decode_s_per_step)
        self._decode_s += took_s
        for state in batch.requests:
            state.computed_tokens += 1
            state.prefilled += state.computed_tokens <= state.prefill_end
            if state.tokens_uncomputed:
                self._prefill_tokens += 1
                state.prefill_s += took_s
            else:
                self._decode_tokens += 1
                state.decode_s += took_s
        self._append(batch.requests, sampled, done)

    def _gather_batch(self) -> _DecodeBatch:
        """Arranges the decoding requests as rows: all slots in deterministic mode; else a gathered selection, or a
        prefix of the slots in place.

        A separate prefill call delays all decoding requests by about a step; prefilling in the decode rows, a token per
        step, delays the prefilling requests by as many steps as they have tokens. The choice that delays fewer requests
        is taken."""
        states = [state for state in self._running.values() if state.tokens_uncomputed == 1]
        pending_prefill_tokens = sum(state.tokens_uncomputed - 1 for state in self._running.values())
        if pending_prefill_tokens <= len(states) and not self._deterministic and not self._emulated:
            states = list(self._running.values())
        for state in states:
            state.mark_started(self._now())
        state_by_slot = {state.slot_number: state for state in states}
        slots = sorted(state_by_slot)
        if self._deterministic:
            slots = list(range(len(self._slots)))
        elif slots and SPARSE_FACTOR * len(slots) > slots[-1] + 1:
            slots = list(range(slots[-1] + 1))
        return _DecodeBatch(state_by_slot, slots, self._deterministic)

    def _key_length(self, needed: int) -> int:
        if self._deterministic:
            return self._context_max
        return min(self._context_max, -(-needed // KEY_LENGTH_MULTIPLE) * KEY_LENGTH_MULTIPLE)

    def _prefill(self, prefill_plan: list[tuple[RequestState, int]], done: list[tuple[str, Generation]]) -> None:
        began_at = self._now()
        counts = [count for _, count in prefill_plan]
        width = self._chunk if self._deterministic else max(counts)
        logits = self._model.forward_cached(
            torch.tensor(
                [state.tokens[state.computed_tokens :][:count] + [0] * (width - count) for state, count in prefill_plan]
            ),
            torch.tensor([state.computed_tokens for state, _ in prefill_plan]),
            torch.tensor([state.slot_number for state, _ in prefill_plan]),
            self._cache,
            self._key_length(max(state.computed_tokens + count for state, count in prefill_plan)),
            torch.tensor(counts) if self._deterministic or min(counts) < width else None,
        )
        completed_rows = [row for row, (state, count) in enumerate(prefill_plan) if state.tokens_uncomputed == count]
        states = [prefill_plan[row][0] for row in completed_rows]
        sampled = (
            self._sample(logits[completed_rows], states, Sampler([state.request.sampling for state in states]))
            if completed_rows
            else None
        )
        took_s = self._pace(self._now() - began_at, sum(counts) * self._prefill_s_per_token)
        self._prefill_s += took_s
        self._prefill_tokens += sum(counts)
        for state, count in prefill_plan:
            state.mark_started(began_at)
            state.computed_tokens += count
            state.prefill_s += took_s
            state.prefilled += count
        if any(state.tokens_uncomputed <= len(self._running) for state, _ in prefill_plan):
            self._batch = None  # they decode from now on, or prefill in decode rows
        if sampled is not None:
            self._append(states, sampled, done)

    def _sample(self, logits: torch.Tensor, states: list[RequestState], sampler: Sampler) -> SampledTokens:
        draws = [state.uniforms[len(state.logprobs)] for state in states]
        if not self._deterministic:
            return sampler.draw(logits, np.array(draws))
        # Row by row: how numpy computes a row must not depend on the number of rows.
        each = [
            draw(logits[row : row + 1], [state.request.sampling], np.array(draws[row : row + 1]))
            for row, state in enumerate(states)
        ]
        return SampledTokens(
            [one.tokens[0] for one in each], [one.logprobs[0] for one in each], [one.kept_ids[0] for one in each]
        )

    def _append(self, states: list[RequestState], sampled: SampledTokens, done: list[tuple[str, Generation]]) -> None:
        """Appends the sampled tokens. Requests that reached their token limit or a stop token finish."""
        for state, token, logprob, kept in zip(states, *sampled, strict=True):
            if state.tokens_uncomputed:
                continue  # it prefills in a decode row
            state.tokens.append(token)
            state.logprobs.append(logprob)
            state.versions.append(self.version)
            if kept is not None:
                state.kept_ids.append(kept)
            sampling = state.request.sampling
            finish: Finish
            if token in sampling.stop:
                finish = "stop"
            elif len(state.logprobs) == sampling.tokens_max or len(state.tokens) == self._context_max:
                finish = "length"
            else:
                continue
            done.append((state.request.id, state.generation(finish, self.name)))
            del self._request_by_id[state.request.id]
            self._release(state)

    def _release(self, state: RequestState) -> None:
        del self._running[state.request.id]
        self._batch = None
        self._slots.release(state)

    # ---- statistics ----

    def statistics(self) -> EngineStatistics:
        """Without idle and update times, which only the process knows."""
        now = self._now()
        return EngineStatistics(
            name=self.name,
            version=self.version,
            active=len(self._running),
            waiting=len(self._waiting),
            resident=self._slots.resident,
            steps=self._steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            suspended_s=self._suspended_s + (now - self._suspended_at if self.suspended else 0.0),
        )

    def check(self) -> None:
        """Recomputes what holds between two calls."""
        known = {state.request.id for state in (*self._running.values(), *self._waiting)}
        assert known == self._request_by_id.keys(), "a request has a slot or waits for one"
        assert all(state.slot is None for state in self._waiting), "a request that waits is in a slot"
        self._slots.check(list(self._running.values()))
        if self._batch is not None:
            starts = self._batch.positions if self._batch.rows is None else self._batch.positions[self._batch.rows]
            assert starts.tolist() == [state.computed_tokens for state in self._batch.requests], (
                "a row is at another position"
            )
        for state in self._request_by_id.values():
            assert 0 <= state.computed_tokens < len(state.tokens) < self._context_max, (
                f"{state.request.id} read {state.computed_tokens}"
            )
            assert len(state.logprobs) == len(state.versions) == len(state.tokens) - state.prompt_length
