"""The slots of a cache: who works in which, and what those who left have left there.

Owns which slot a request gets and what is still to be had in it. Knows tokens only, never keys and values. Promises
that what a slot is said to hold has been read there under the present weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from tangram.rl.engines.base import Finish, Generation, Request
from tangram.rl.engines.messages import Written


class Slot:
    """A place in the cache."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.work: Work | None = None
        self.session = ""
        self.tokens: list[int] = []
        """While nobody works in it: what was read and is still there."""
        self.left = 0
        """When it was left, as a count: the smallest was left first."""


class Work:
    """A request and how far it has come."""

    def __init__(self, request: Request, now_s: float) -> None:
        self.request = request
        self.tokens = list(request.tokens)
        """The prompt, and what was written after it."""
        self.prompt = len(request.tokens)
        self.noise: list[float] = []
        """Of each token that may be written."""
        self.slot: Slot | None = None
        self.read = 0
        """How many of the tokens are in the slot."""
        self.given = self.prompt
        """How many were there before anything was written under these weights: to read them is prefill, also if the
        last one is read by writing."""
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.kept: list[tuple[int, ...]] = []
        self.told = 0
        """How many of the written tokens `written_since` has told."""
        self.arrived_s = now_s
        self.waiting_s: float | None = None
        """Until something was done for it."""
        self.prefilled = self.reused = 0
        self.prefill_s = self.decode_s = 0.0

    @property
    def number(self) -> int:
        """Of its slot."""
        assert self.slot is not None, f"{self.request.id} has no slot"
        return self.slot.number

    def begin(self, now_s: float) -> None:
        """Something is done for it; what counts is the first time."""
        if self.waiting_s is None:
            self.waiting_s = now_s - self.arrived_s

    @property
    def left(self) -> int:
        """Tokens to be read before one can be written; the last one is read by writing."""
        return len(self.tokens) - self.read

    def generation(self, finish: Finish, engine: str) -> Generation:
        return Generation(
            tokens=tuple(self.tokens[self.prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            kept=tuple(self.kept) if self.kept else None,
            finish=finish,
            engine=engine,
            prefilled=self.prefilled,
            reused=self.reused,
            waiting_s=self.waiting_s or 0.0,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
        )

    def written_since(self) -> Written:
        begin, self.told = self.told, len(self.logprobs)
        return Written(
            id=self.request.id,
            tokens=tuple(self.tokens[self.prompt + begin :]),
            logprobs=tuple(self.logprobs[begin:]),
            versions=tuple(self.versions[begin:]),
            kept=tuple(self.kept[begin:]) if self.kept else None,
        )


class Slots:
    """All of them. With `keep`, those who leave leave what they have read to their session."""

    def __init__(self, count: int, *, keep: bool) -> None:
        self._slots = [Slot(number) for number in range(count)]
        self._keep = keep
        self._leaves = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.work is None]

    @property
    def resident(self) -> int:
        """Tokens that are left for sessions."""
        return sum(len(slot.tokens) for slot in self._slots)

    def enter(self, work: Work, free: list[Slot]) -> None:
        """The slot, of those that are free, that has most of what the request begins with; else an empty one, else the
        one that was left first. It is taken out of the list."""
        # Nothing can be written without reading a token, so the last one is read in any case.
        wanted = work.request.tokens[:-1]
        mine = [slot for slot in free if slot.session and slot.session == work.request.session]
        slot = max(mine, key=lambda slot: _shared(slot.tokens, wanted), default=None)
        shared = _shared(slot.tokens, wanted) if slot is not None else 0
        if slot is None or not shared:
            slot = min(free, key=lambda slot: (slot.left, slot.number) if slot.tokens else (-1, slot.number))
        free.remove(slot)
        slot.work, work.slot = work, slot
        slot.tokens, slot.session = [], ""
        work.read = work.reused = shared

    def leave(self, work: Work) -> None:
        slot = work.slot
        assert slot is not None and slot.work is work
        slot.work = work.slot = None
        self._leaves += 1
        slot.left = self._leaves
        if self._keep and work.request.session:
            slot.tokens, slot.session = work.tokens[: work.read], work.request.session

    def forget(self) -> None:
        """What was left there: it was read under weights that are no longer used."""
        for slot in self._slots:
            slot.tokens, slot.session = [], ""

    def check(self, works: Sequence[Work]) -> None:
        """These are all that work in them."""
        held = [slot for slot in self._slots if slot.work is not None]
        assert len(held) == len(works), f"{len(held)} slots are held by {len(works)} requests"
        assert all(work.slot is not None and work.slot.work is work for work in works), "a slot has one request"
        for slot in held:
            assert not slot.tokens and not slot.session, "a slot is left to a session while somebody works in it"


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
