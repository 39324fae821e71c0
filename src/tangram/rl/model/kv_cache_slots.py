"""The slots of a cache: who works in which, and what those who left have left there.

Owns which slot a request gets and what is still to be had in it. Knows tokens only, never keys and values: what has to
be moved from one slot to another it says. Promises that what a slot is said to hold has been read there under the
present weights.

Requests are served in the first slots. The others keep what was read for sessions whose own slot somebody else needed:
so the slots that a step works in lie side by side, however many sessions there are, and a move costs once per turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tangram.rl.inference.engines.messages import Written
from tangram.rl.inference.engines.protocol import Finish, Generation, Request


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

    def empty(self) -> None:
        self.session, self.tokens = "", []

    def take_over(self, other: Slot) -> None:
        """What was left in another one."""
        self.session, self.tokens, self.left = other.session, other.tokens, other.left


class Move(NamedTuple):
    """What a slot holds, to be moved to another one, and what that one holds to be moved back."""

    source: int
    target: int
    tokens: int
    """So many, from the first on, and so many back:"""
    tokens_back: int = 0


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
    """All of them: `count` to be served in, and `kept` for sessions. Without `keep`, nothing is left to a session."""

    def __init__(self, count: int, kept: int, *, keep: bool) -> None:
        self._served = [Slot(number) for number in range(count)]
        self._kept = [Slot(number) for number in range(count, count + kept)]
        self._keep = keep
        self._leaves = 0

    def __len__(self) -> int:
        """Those to be served in."""
        return len(self._served)

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self._served if slot.work is None]

    @property
    def resident(self) -> int:
        """Tokens that are left for sessions."""
        return sum(len(slot.tokens) for slot in (*self._served, *self._kept))

    def enter(self, work: Work, free: list[Slot]) -> Move | None:
        """A slot of those that are free, which is taken out of the list: the one that has most of what the request
        begins with, else an empty one, else the one that was left first. Returns what has to be moved before anything
        is read."""
        # Nothing can be written without reading a token, so the last one is read in any case.
        wanted = work.request.tokens[:-1]
        mine = [slot for slot in (*free, *self._kept) if slot.session and slot.session == work.request.session]
        home = max(mine, key=lambda slot: _shared(slot.tokens, wanted), default=None)
        shared = _shared(home.tokens, wanted) if home is not None else 0
        move = None
        if home is None or not shared:
            slot = _first_left(free)
            move = self._put_by(slot)
        elif home in free:
            slot = home
        else:
            slot = _first_left(free)
            move = Move(home.number, slot.number, shared, len(slot.tokens))
            home.take_over(slot)
        free.remove(slot)
        slot.empty()
        slot.work, work.slot = work, slot
        work.read = work.reused = shared
        return move

    def _put_by(self, slot: Slot) -> Move | None:
        """What was left in a slot goes to one that keeps, in the place of what was left there first."""
        if not slot.tokens or not self._kept:
            return None
        place = _first_left(self._kept)
        place.take_over(slot)
        return Move(slot.number, place.number, len(slot.tokens))

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
        for slot in (*self._served, *self._kept):
            slot.empty()

    def check(self, works: Sequence[Work]) -> None:
        """These are all that work in them."""
        held = [slot for slot in self._served if slot.work is not None]
        assert len(held) == len(works), f"{len(held)} slots are held by {len(works)} requests"
        assert all(work.slot is not None and work.slot.work is work for work in works), "a slot has one request"
        for slot in held:
            assert not slot.tokens and not slot.session, "a slot is left to a session while somebody works in it"
        assert all(slot.work is None for slot in self._kept), "somebody works in a slot that keeps"


def _first_left(slots: Sequence[Slot]) -> Slot:
    """An empty one, else the one that was left first."""
    return min(slots, key=lambda slot: (slot.left, slot.number) if slot.tokens else (-1, slot.number))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
