"""The slots of a KV cache: the request in each slot, and the cached tokens of ended requests.

Owns the assignment of slots and the tokens reusable in each. Handles tokens only, never keys and values: it returns
which moves between slots are needed. Promises that the recorded tokens of a slot were read under the current weights.

Requests run in the first slots. The other slots store tokens of sessions whose slot another request needed. So the
slots of a step are adjacent, however many sessions there are, and a session moves at most once per turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tangram.rl.inference.engines.messages import TokenDelta
from tangram.rl.inference.engines.protocol import Finish, Generation, GenerationRequest


class CacheSlot:
    """A slot of the cache."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.occupant: RequestState | None = None
        self.session = ""
        self.tokens: list[int] = []
        """The tokens that are still cached, in a slot without a request."""
        self.release_order = 0
        """A counter at release, for LRU eviction."""

    def clear(self) -> None:
        self.session, self.tokens = "", []

    def take_over(self, other: CacheSlot) -> None:
        """Takes the cached tokens of another slot."""
        self.session, self.tokens, self.release_order = other.session, other.tokens, other.release_order


class SlotMove(NamedTuple):
    """A copy of cached tokens from one slot to another, and back if the other slot held some."""

    source: int
    target: int
    tokens: int
    """Number of leading tokens to move."""
    tokens_back: int = 0


class RequestState:
    """A request and its progress."""

    def __init__(self, request: GenerationRequest, now: float) -> None:
        self.request = request
        self.tokens = list(request.tokens)
        """The prompt, followed by the decoded tokens."""
        self.prompt_length = len(request.tokens)
        self.uniforms: list[float] = []
        """A uniform number in [0, 1) for each token that may be decoded: its sampling noise."""
        self.slot: CacheSlot | None = None
        self.computed_tokens = 0
        """How many of the tokens are in the slot."""
        self.prefill_end = self.prompt_length
        """Number of tokens before any was decoded under the current weights: reading these is prefill, even if the last
        one is read in a decode row."""
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.kept_ids: list[tuple[int, ...]] = []
        self.reported = 0
        """Number of decoded tokens that `take_delta` has returned."""
        self.arrived_at = now
        self.waiting_s: float | None = None
        """Seconds until its first work; None before."""
        self.prefilled = self.reused = 0
        self.prefill_s = self.decode_s = 0.0

    @property
    def slot_number(self) -> int:
        """Number of its slot."""
        assert self.slot is not None, f"{self.request.id} has no slot"
        return self.slot.number

    def mark_started(self, now: float) -> None:
        """Records the first work for the request."""
        if self.waiting_s is None:
            self.waiting_s = now - self.arrived_at

    @property
    def tokens_uncomputed(self) -> int:
        """Number of tokens to prefill before one can be decoded; the last one is read by decoding."""
        return len(self.tokens) - self.computed_tokens

    def generation(self, finish: Finish, engine: str) -> Generation:
        return Generation(
            tokens=tuple(self.tokens[self.prompt_length :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            kept=tuple(self.kept_ids) if self.kept_ids else None,
            finish=finish,
            engine=engine,
            prefilled=self.prefilled,
            reused=self.reused,
            waiting_s=self.waiting_s or 0.0,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
        )

    def take_delta(self) -> TokenDelta:
        begin, self.reported = self.reported, len(self.logprobs)
        return TokenDelta(
            id=self.request.id,
            tokens=tuple(self.tokens[self.prompt_length + begin :]),
            logprobs=tuple(self.logprobs[begin:]),
            versions=tuple(self.versions[begin:]),
            kept=tuple(self.kept_ids[begin:]) if self.kept_ids else None,
        )


class KVCacheSlots:
    """All slots: `count` for requests, and `session_slots` for sessions. Without `keep_sessions` nothing is reused."""

    def __init__(self, count: int, session_slots: int, *, keep_sessions: bool) -> None:
        self._serving_slots = [CacheSlot(number) for number in range(count)]
        self._session_slots = [CacheSlot(number) for number in range(count, count + session_slots)]
        self._keep_sessions = keep_sessions
        self._release_count = 0

    def __len__(self) -> int:
        """Number of slots for requests."""
        return len(self._serving_slots)

    @property
    def free(self) -> list[CacheSlot]:
        return [slot for slot in self._serving_slots if slot.occupant is None]

    @property
    def resident(self) -> int:
        """Number of tokens cached for sessions."""
        return sum(len(slot.tokens) for slot in (*self._serving_slots, *self._session_slots))

    def acquire(self, state: RequestState, free: list[CacheSlot]) -> SlotMove | None:
        """Takes a slot out of `free`: the one with the longest cached prefix of the request, else an empty one, else
        the least recently used. Returns the move that is needed before anything is read."""
        # A token has to be read to decode the next one, so the last token is always read.
        prefix = state.request.tokens[:-1]
        own = [slot for slot in (*free, *self._session_slots) if slot.session and slot.session == state.request.session]
        home = max(own, key=lambda slot: _common_prefix_length(slot.tokens, prefix), default=None)
        shared = _common_prefix_length(home.tokens, prefix) if home is not None else 0
        move = None
        if home is None or not shared:
            slot = _least_recently_used(free)
            move = self._evict_to_session_slot(slot)
        elif home in free:
            slot = home
        else:
            slot = _least_recently_used(free)
            move = SlotMove(home.number, slot.number, shared, len(slot.tokens))
            home.take_over(slot)
        free.remove(slot)
        slot.clear()
        slot.occupant, state.slot = state, slot
        state.computed_tokens = state.reused = shared
        return move

    def _evict_to_session_slot(self, slot: CacheSlot) -> SlotMove | None:
        """Moves what is cached in a slot to the least recently used session slot."""
        if not slot.tokens or not self._session_slots:
            return None
        place = _least_recently_used(self._session_slots)
        place.take_over(slot)
        return SlotMove(slot.number, place.number, len(slot.tokens))

    def release(self, state: RequestState) -> None:
        slot = state.slot
        assert slot is not None and slot.occupant is state
        slot.occupant = state.slot = None
        self._release_count += 1
        slot.release_order = self._release_count
        if self._keep_sessions and state.request.session:
            slot.tokens, slot.session = state.tokens[: state.computed_tokens], state.request.session

    def invalidate(self) -> None:
        """Drops all cached tokens: they were read under old weights."""
        for slot in (*self._serving_slots, *self._session_slots):
            slot.clear()

    def check(self, states: Sequence[RequestState]) -> None:
        """Checks that these requests occupy all occupied slots."""
        held = [slot for slot in self._serving_slots if slot.occupant is not None]
        assert len(held) == len(states), f"{len(held)} slots are held by {len(states)} requests"
        assert all(state.slot is not None and state.slot.occupant is state for state in states), (
            "a slot has one request"
        )
        for slot in held:
            assert not slot.tokens and not slot.session, "an occupied slot is cached for a session"
        assert all(slot.occupant is None for slot in self._session_slots), "a session slot is occupied"


def _least_recently_used(slots: Sequence[CacheSlot]) -> CacheSlot:
    """Returns an empty slot, else the one released first."""
    return min(slots, key=lambda slot: (slot.release_order, slot.number) if slot.tokens else (-1, slot.number))


def _common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
