"""Continuous batching: which requests a step reads and writes for, and where in the cache each of them lies.

Owns the slots of a cache, the requests in them and those that wait for one, and counts what was done. A pure step
machine: nothing is received, sent, loaded or waited for here, and the time comes from a callable.

A step writes one token for every request that has read all but its last token, and reads at most `chunk` tokens for
those that have not; so a long prompt is read by and by and holds up nobody. A few tokens are read along with those who
write, one in each step. Requests get a slot in the order of their arrival. A request that ends leaves its slot to its
session: what was read stays there or in one of the `sessions` slots that only keep, until others need the place, and
the next request of the session reads only what is new. New weights make everything that was read void: what is in
flight is read again and goes on, and tokens that were written before keep their version and their log-probability.

With `deterministic`, what a request gets does not depend, to the last bit, on anything but itself and the weights:
every call of the model has one of two fixed shapes, each row is sampled by itself, and nothing is taken from a session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from tangram.errors import InvalidAction
from tangram.rl.inference.engines.messages import Written
from tangram.rl.inference.engines.protocol import EngineStatistics, Finish, Generation, Request
from tangram.rl.model.kv_cache_slots import Move, Slots, Work
from tangram.rl.model.sampling import Drawn, Sampler, draw, require_noise, uniforms
from tangram.rl.model.transformer import Cache, Transformer

KEYS_ROUNDED_TO = 32
"""Of the keys that a call looks at: fewer sizes, fewer kinds of buffers."""
SPARSE = 2
"""Slots are copied together for a call if fewer than one of so many is needed: else they are read where they lie."""


class Happened(NamedTuple):
    """What a step did."""

    done: list[tuple[str, Generation]]
    """By request."""
    prefilled: int
    """Tokens that were read."""
    decoded: int
    """Requests for which one token was written after another."""


class _Batch:
    """Those who write, as the model is given them: made anew only when somebody joins or leaves."""

    def __init__(self, work_by_slot: dict[int, Work], slots: list[int], deterministic: bool) -> None:
        """Slots that are nobody's have a row for the shape alone, of which no token is read."""
        taken = [slot in work_by_slot for slot in slots]
        self.works = [work_by_slot[slot] for slot in slots if slot in work_by_slot]
        starts = [work_by_slot[slot].read if slot in work_by_slot else 0 for slot in slots]
        self.slots = torch.tensor(slots, dtype=torch.long)
        self.start = torch.tensor(starts, dtype=torch.long)
        self.longest = max((work.read for work in self.works), default=0)
        self.rows = (
            None if all(taken) else torch.tensor([row for row, mine in enumerate(taken) if mine], dtype=torch.long)
        )
        self.counts = torch.tensor(taken).long() if deterministic or not all(taken) else None
        self.sampler = Sampler([work.request.sampling for work in self.works])
        self._inputs = torch.zeros(len(slots), 1, dtype=torch.long)

    def inputs(self, tokens: list[int]) -> torch.Tensor:
        """One token of each, [rows, 1]."""
        given = torch.tensor(tokens)
        if self.rows is None:
            return given.unsqueeze(1)
        self._inputs[self.rows, 0] = given
        return self._inputs

    def advance(self) -> None:
        self.longest += 1
        if self.counts is None:
            self.start += 1
        else:
            self.start += self.counts


class Batcher:
    """The step machine. `pace` is told how long a part of a step took and how long it has to take at least, and
    returns how long it took in the end: emulated hardware waits there."""

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
        """Raises InvalidConfig, if the model has no room for `context_max`."""
        self.name, self.version = name, version
        self.suspended = False
        self._model = model
        kept = 0 if deterministic else sessions
        self._cache = Cache(model.config, slots + kept, context_max, model.dtype)
        self._context_max, self._chunk, self._deterministic = context_max, chunk, deterministic
        self._now, self._pace = now, pace
        self._prefill_s_per_token, self._decode_s_per_step = prefill_s_per_token, decode_s_per_step
        self._emulated = prefill_s_per_token > 0.0 or decode_s_per_step > 0.0
        self._slots = Slots(slots, kept, keep=not deterministic)
        self._waiting: deque[Work] = deque()
        self._work_by_id: dict[str, Work] = {}
        """All requests."""
        self._running: dict[str, Work] = {}
        """Those that have a slot, in the order of their arrival."""
        self._batch: _Batch | None = None
        """Those that write; None: to be gathered anew."""
        self._steps = self._prefill_tokens = self._decode_tokens = 0
        self._prefill_s = self._decode_s = self._suspended_s = 0.0
        self._suspended_at_s = 0.0

    # ---- commands ----

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._work_by_id) and not self.suspended

    def add(self, request: Request) -> None:
        """Raises InvalidAction."""
        self._require(request)
        work = Work(request, self._now())
        self._work_by_id[request.id] = work
        self._waiting.append(work)

    def _require(self, request: Request) -> None:
        if request.id in self._work_by_id:
            raise InvalidAction("id", request.id, "an id that no other request has")
        count, vocabulary = len(request.tokens), self._model.config.vocabulary
        if not 1 <= count < self._context_max:
            raise InvalidAction(
                "tokens", f"{count} tokens", f"from 1 to {self._context_max - 1}: one has room to be written"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocabulary:
            wrong = next(token for token in request.tokens if not 0 <= token < vocabulary)
            raise InvalidAction("tokens", wrong, f"ids from 0 to {vocabulary - 1}")
        require_noise(request.noise)

    def abort(self, id: str) -> bool:
        """Whether it was there."""
        work = self._work_by_id.pop(id, None)
        if work is None:
            return False
        if work.slot is None:
            self._waiting.remove(work)
        else:
            self._leave(work)
        return True

    def suspend(self) -> None:
        if not self.suspended:
            self.suspended, self._suspended_at_s = True, self._now()

    def resume(self) -> None:
        if self.suspended:
            self.suspended = False
            self._suspended_s += self._now() - self._suspended_at_s

    def update(self, model: Transformer, version: int) -> None:
        """From the next token on. The sizes of the model are those of the one before."""
        assert model.config == self._model.config, f"{model.config} in the place of {self._model.config}"
        self._model, self.version = model, version
        self._slots.forget()
        for work in self._work_by_id.values():
            work.read, work.given = 0, len(work.tokens)
        self._batch = None

    # ---- a step ----

    def step(self) -> Happened:
        """Raises BrokenLogits, after which the machine is of no use."""
        assert self.busy, "a step without anything to do"
        self._give_slots()
        if self._batch is None:
            self._batch = self._gathered()
        reading = self._to_read() if len(self._batch.works) < len(self._running) else []
        prefilled, decoded = self._prefill_tokens, self._decode_tokens
        done: list[tuple[str, Generation]] = []
        with torch.inference_mode():
            if self._batch.works:
                self._write(self._batch, done)
            if reading:
                self._read(reading, done)
        self._steps += 1
        return Happened(done, self._prefill_tokens - prefilled, self._decode_tokens - decoded)

    def take_written(self) -> list[Written]:
        """What was written since this was asked last, for requests that go on."""
        return [work.written_since() for work in self._running.values() if work.told < len(work.logprobs)]

    def _give_slots(self) -> None:
        """To those who wait, in their order, while there are any."""
        free = self._slots.free if self._waiting else []
        while self._waiting and free:
            work = self._waiting.popleft()
            move = self._slots.enter(work, free)
            if move is not None:
                self._move(move)
            self._running[work.request.id] = work
            self._batch = None
            count = min(work.request.sampling.tokens_max, self._context_max - work.prompt)
            work.noise = uniforms(work.request.noise, work.prompt, count).tolist()

    def _move(self, move: Move) -> None:
        for each in (*self._cache.keys, *self._cache.values):
            back = each[move.target, :, : move.tokens_back].clone()
            each[move.target, :, : move.tokens] = each[move.source, :, : move.tokens]
            each[move.source, :, : move.tokens_back] = back

    def _to_read(self) -> list[tuple[Work, int]]:
        """Who reads how many tokens in this step: rows of one length, padding included, of at most `chunk` tokens."""
        found: list[tuple[Work, int]] = []
        longest = 0
        for work in self._running.values():
            if work.left == 1:
                continue
            room = self._chunk // (len(found) + 1)
            if found and (self._deterministic or longest > room or not room):
                break
            count = min(work.left, room)
            longest = max(longest, count)
            found.append((work, count))
        return found

    def _write(self, batch: _Batch, done: list[tuple[str, Generation]]) -> None:
        began_s = self._now()
        tokens = [work.tokens[work.read] for work in batch.works]
        logits = self._model.read(
            batch.inputs(tokens), batch.start, batch.slots, self._cache, self._keys(batch.longest + 1), batch.counts
        )
        drawn = self._draw(logits if batch.rows is None else logits[batch.rows], batch.works, batch.sampler)
        batch.advance()
        took_s = self._pace(self._now() - began_s, self._decode_s_per_step)
        self._decode_s += took_s
        for work in batch.works:
            work.read += 1
            work.prefilled += work.read <= work.given
            if work.left:
                self._prefill_tokens += 1
                work.prefill_s += took_s
            else:
                self._decode_tokens += 1
                work.decode_s += took_s
        self._append(batch.works, drawn, done)

    def _gathered(self) -> _Batch:
        """Those who write, in rows: all slots, if they must not notice each other; else those that are theirs, or all
        up to the last of theirs, which need not be copied.

        A call only for reading delays all who write by about a step; reading along with them, a token in each step,
        delays those who read by as many steps as they have tokens. What delays fewer is done.
        """
        works = [work for work in self._running.values() if work.left == 1]
        ahead = sum(work.left - 1 for work in self._running.values())
        if ahead <= len(works) and not self._deterministic and not self._emulated:
            works = list(self._running.values())
        for work in works:
            work.begin(self._now())
        work_by_slot = {work.number: work for work in works}
        slots = sorted(work_by_slot)
        if self._deterministic:
            slots = list(range(len(self._slots)))
        elif slots and SPARSE * len(slots) > slots[-1] + 1:
            slots = list(range(slots[-1] + 1))
        return _Batch(work_by_slot, slots, self._deterministic)

    def _keys(self, needed: int) -> int:
        if self._deterministic:
            return self._context_max
        return min(self._context_max, -(-needed // KEYS_ROUNDED_TO) * KEYS_ROUNDED_TO)

    def _read(self, reading: list[tuple[Work, int]], done: list[tuple[str, Generation]]) -> None:
        began_s = self._now()
        counts = [count for _, count in reading]
        width = self._chunk if self._deterministic else max(counts)
        logits = self._model.read(
            torch.tensor([work.tokens[work.read :][:count] + [0] * (width - count) for work, count in reading]),
            torch.tensor([work.read for work, _ in reading]),
            torch.tensor([work.number for work, _ in reading]),
            self._cache,
            self._keys(max(work.read + count for work, count in reading)),
            torch.tensor(counts) if self._deterministic or min(counts) < width else None,
        )
        whole = [row for row, (work, count) in enumerate(reading) if work.left == count]
        works = [reading[row][0] for row in whole]
        drawn = self._draw(logits[whole], works, Sampler([work.request.sampling for work in works])) if whole else None
        took_s = self._pace(self._now() - began_s, sum(counts) * self._prefill_s_per_token)
        self._prefill_s += took_s
        self._prefill_tokens += sum(counts)
        for work, count in reading:
            work.begin(began_s)
            work.read += count
            work.prefill_s += took_s
            work.prefilled += count
        if any(work.left <= len(self._running) for work, _ in reading):
            self._batch = None  # they may write from now on, or read along
        if drawn is not None:
            self._append(works, drawn, done)

    def _draw(self, logits: torch.Tensor, works: list[Work], sampler: Sampler) -> Drawn:
        noise = [work.noise[len(work.logprobs)] for work in works]
        if not self._deterministic:
            return sampler.draw(logits, np.array(noise))
        # Each by itself: how numpy computes a row must not depend on how many there are.
        each = [
            draw(logits[row : row + 1], [work.request.sampling], np.array(noise[row : row + 1]))
            for row, work in enumerate(works)
        ]
        return Drawn([one.tokens[0] for one in each], [one.logprobs[0] for one in each], [one.kept[0] for one in each])

    def _append(self, works: list[Work], drawn: Drawn, done: list[tuple[str, Generation]]) -> None:
        """The tokens that were drawn. Whoever has all of his is done."""
        for work, token, logprob, kept in zip(works, *drawn, strict=True):
            if work.left:
                continue  # it reads its prompt along with those who write
            work.tokens.append(token)
            work.logprobs.append(logprob)
            work.versions.append(self.version)
            if kept is not None:
                work.kept.append(kept)
            sampling = work.request.sampling
            finish: Finish
            if token in sampling.stop:
                finish = "stop"
            elif len(work.logprobs) == sampling.tokens_max or len(work.tokens) == self._context_max:
                finish = "length"
            else:
                continue
            done.append((work.request.id, work.generation(finish, self.name)))
            del self._work_by_id[work.request.id]
            self._leave(work)

    def _leave(self, work: Work) -> None:
        del self._running[work.request.id]
        self._batch = None
        self._slots.leave(work)

    # ---- what is known of it ----

    def statistics(self) -> EngineStatistics:
        """Without what only its process knows: idle and update times."""
        now_s = self._now()
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
            suspended_s=self._suspended_s + (now_s - self._suspended_at_s if self.suspended else 0.0),
        )

    def check(self) -> None:
        """Recomputes what has to hold between two calls."""
        known = {work.request.id for work in (*self._running.values(), *self._waiting)}
        assert known == self._work_by_id.keys(), "a request has a slot or waits for one"
        assert all(work.slot is None for work in self._waiting), "a request that waits is in a slot"
        self._slots.check(list(self._running.values()))
        if self._batch is not None:
            starts = self._batch.start if self._batch.rows is None else self._batch.start[self._batch.rows]
            assert starts.tolist() == [work.read for work in self._batch.works], "a row is at another position"
        for work in self._work_by_id.values():
            assert 0 <= work.read < len(work.tokens) < self._context_max, f"{work.request.id} read {work.read}"
            assert len(work.logprobs) == len(work.versions) == len(work.tokens) - work.prompt
