"""The sample buffer: bounds staleness and applies backpressure between rollout and training.

Owns every group from its start until a step is done with it, and the version from which the next step starts. Pure:
time comes in as an argument. Never plays or trains.

    while buffer.may_start(): buffer.start(ticket)          # then play it
    buffer.put(group, now)  |  buffer.lose(group_id, cause)     # it ended
    batch = buffer.take(now)                                # the oldest; None, if there are too few
    buffer.trained(batch)   |  buffer.give_back(batch, now)     # the step is done, or failed

    started ──▶ in flight ──▶ waiting ◀──▶ training ──▶ trained
                    └────────────┴─────────────┴──────▶ dropped, with its cause

Promises: started - trained - dropped is at most (alpha + 1) * batch; no batch has a trajectory that is older than
alpha; each group that was started is settled once, as trained or dropped, and whoever asks is told of every one that
was dropped. Age and memory are kept within their bounds by starting less; groups are discarded only if that was not
enough. Memory may exceed its bound by what one batch and the one before it take, as nothing could go on else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from tangram.rl.buffer.number_ranges import NumberRanges, Range
from tangram.rl.buffer.records import (
    FULL,
    LOST_LINEAGE,
    STALE,
    BufferState,
    BufferStatistics,
    Dropped,
    Waiting,
    number_of,
)
from tangram.rl.rollout.records import Group, Ticket, Trajectory, Turn
from tangram.rl.train.records import Batch

__all__ = ["FULL", "LOST_LINEAGE", "STALE", "BufferState", "BufferStatistics", "Dropped", "SampleBuffer", "Waiting"]

MEAN_OVER = 64
"""Groups, over about which their mean size is taken: it changes as a policy learns to say more, or less."""


POINTER = 8
NUMBER = 32
"""A float or an int: 24 and 28 bytes, in blocks of 16."""
SMALL_MAX = 256
"""Ints up to this are there once for all."""
TUPLE = 56
TEXT = 64
"""Without its letters."""
TURN, SPAN, TRAJECTORY, GROUP = 192, 192, 512, 256
"""The record itself, with the numbers and the short texts that each has of its own."""
METRIC = 128
"""Its name, its value and its place in the dict."""


class _Kept(NamedTuple):
    """A group that is waiting or being trained on."""

    number: int
    waiting: Waiting
    bytes: int

    @property
    def group(self) -> Group:
        return self.waiting.group

    @property
    def age(self) -> tuple[int, int]:
        """Oldest first."""
        return self.waiting.version, self.number


class SampleBuffer:
    def __init__(
        self,
        *,
        batch: int,
        alpha: int,
        enforced: bool = True,
        bytes_max: int,
        batch_min: int | None = None,
        wait_s: float | None = None,
        version: int = 0,
    ) -> None:
        """`enforced`: whether age is looked at again after the start. `batch_min`: groups that are enough once one of
        them has waited `wait_s`."""
        assert batch >= 1 and alpha >= 0 and version >= 0 and (batch_min is None) == (wait_s is None)
        assert batch_min is None or 1 <= batch_min <= batch
        self.version = version
        """From which the step that is under way started, or else the next one will."""
        self._batch = batch
        self._alpha = alpha
        self._enforced = enforced
        self._bytes_max = bytes_max
        self._batch_min = batch_min
        self._wait_s = wait_s
        self._in_flight: dict[str, Ticket] = {}
        self._waiting: dict[str, _Kept] = {}
        self._training: dict[str, _Kept] = {}
        self._settled = Settled()
        self._started = 0
        self._untold: list[Dropped] = []
        """Dropped by a call that does not say so; `evict` does."""
        self._bytes = 0
        """Of what is waiting or being trained on."""
        self._bytes_mean = 0.0
        self._puts = 0

    # ---- what there is ----

    @property
    def started(self) -> int:
        return self._started

    @property
    def trained_groups(self) -> int:
        return len(self._settled.trained)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups by cause."""
        return self._settled.by_cause

    @property
    def outstanding(self) -> int:
        """started - trained - dropped"""
        return len(self._in_flight) + len(self._waiting) + len(self._training)

    @property
    def outstanding_max(self) -> int:
        return (self._alpha + 1) * self._batch

    @property
    def in_flight(self) -> tuple[Ticket, ...]:
        """In the order in which they were started; after `restore`, those to be played again."""
        return tuple(self._in_flight.values())

    @property
    def waiting(self) -> tuple[Group, ...]:
        """In the order in which they came."""
        return tuple(each.group for each in self._waiting.values())

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def oldest_wanted(self) -> int:
        """The first token of what can still be trained on is of this version or a later one. While a step is under way
        the next one starts a version later, and what is too old for that is lost already."""
        return max(0, self._next - self._alpha) if self._enforced else 0

    def knows(self, number: int) -> bool:
        """Whether a group of this number was ever started. Whoever goes on after `restore` leaves these out."""
        return (
            number in self._settled
            or any(ticket.number == number for ticket in self._in_flight.values())
            or any(each.number == number for each in (*self._waiting.values(), *self._training.values()))
        )

    def statistics(self) -> BufferStatistics:
        return BufferStatistics(
            version=self.version,
            started=self._started,
            trained=self.trained_groups,
            dropped=dict(self.dropped),
            in_flight=len(self._in_flight),
            waiting=len(self._waiting),
            training=len(self._training),
            bytes=self._bytes,
            bytes_max=self._bytes_max,
            trajectories_discarded=self._settled.trajectories_discarded,
            tokens_discarded=self._settled.tokens_discarded,
        )

    # ---- groups begin and end ----

    def may_start(self) -> bool:
        if self.outstanding >= self.outstanding_max:
            return False
        if self._training and self._alpha == 0:
            return False  # what the weights of now begin is too old for the next step
        making = len(self._in_flight) + len(self._waiting)
        expected = self._bytes + (len(self._in_flight) + 1) * self._bytes_mean
        return making < self._batch or expected <= self._bytes_max

    def start(self, ticket: Ticket) -> None:
        assert self.may_start(), f"{ticket.group} is started, although {self.outstanding} groups are outstanding"
        assert not ticket.series, f"{ticket.group} is not to be trained on"
        assert not self.knows(ticket.number), f"{ticket.group} was started before"
        self._in_flight[ticket.group] = ticket
        self._started += 1

    def lose(self, group_id: str, cause: str, group: Group | None = None) -> None:
        """It ended without members. `group`: what was played of it, to be counted."""
        ticket = self._in_flight.pop(group_id)
        self._settled.drop(ticket.number, cause)
        if group is not None:
            assert group.id == group_id and not group.members, f"{group.id} has members, so it is not lost"
            self._settled.discard(group.left_out)

    def put(self, group: Group, now: float) -> tuple[Dropped, ...]:
        """It ended with members. Which groups that drops, itself perhaps."""
        assert group.members, f"{group.id} has no members, so it is lost"
        number = self._in_flight.pop(group.id).number
        self._settled.discard(group.left_out)
        first = group.version_first
        if (group.version_last or 0) > self._next:
            return (self._drop(group, number, LOST_LINEAGE),)
        if first is not None and first < self.oldest_wanted:
            return (self._drop(group, number, STALE),)
        waiting = Waiting(group=group, version=self._next if first is None else first, since=now)
        self._wait(_Kept(number, waiting, group_bytes(group)))
        self._puts += 1
        self._bytes_mean += (self._waiting[group.id].bytes - self._bytes_mean) / min(self._puts, MEAN_OVER)
        return tuple(self._fit())

    # ---- steps ----

    def ready(self, now: float) -> bool:
        """Whether the next step has its batch; also while one is under way."""
        enough = len(self._fresh())
        if enough >= self._batch:
            return True
        wake_at = self.wake_at()
        return wake_at is not None and now >= wake_at

    def wake_at(self) -> float | None:
        """When those that wait will be enough; None if there have to be more, or there are enough."""
        fresh = self._fresh()
        if self._batch_min is None or self._wait_s is None or not self._batch_min <= len(fresh) < self._batch:
            return None
        return min(each.waiting.since for each in fresh) + self._wait_s

    def take(self, now: float) -> Batch | None:
        """The batch of the next step: the oldest. What is too old is dropped; `evict` tells of it."""
        assert not self._training, f"the step from version {self.version} is under way"
        self._untold += self._expire()
        if not self.ready(now):
            return None
        chosen = sorted(self._waiting.values(), key=lambda each: each.age)[: self._batch]
        for each in sorted(chosen, key=lambda each: each.number):
            self._training[each.group.id] = self._waiting.pop(each.group.id)
        return Batch(version=self.version, groups=tuple(each.group for each in self._training.values()))

    def evict(self) -> tuple[Dropped, ...]:
        """Drops what is too old for the next step. With what was dropped unsaid before."""
        dropped, self._untold = [*self._untold, *self._expire()], []
        return tuple(dropped)

    def trained(self, batch: Batch) -> None:
        """The step is done."""
        self._require_training(batch)
        for each in self._training.values():
            self._settled.train(each.number)
            self._bytes -= each.bytes
        self._training = {}
        self.version += 1

    def give_back(self, batch: Batch, now: float) -> None:
        """The step failed. Its groups are waiting again."""
        self._require_training(batch)
        back, self._training = self._training, {}
        for each in back.values():
            waiting = Waiting(group=each.group, version=each.waiting.version, since=min(each.waiting.since, now))
            self._waiting[each.group.id] = each._replace(waiting=waiting)
        # The weights that it might have made are not there.
        self._untold += [self._drop_kept(each, LOST_LINEAGE) for each in self._of_later_weights()]
        self._untold += self._fit()

    # ---- going back ----

    def state(self) -> BufferState:
        return BufferState(
            version=self.version,
            waiting=tuple(each.waiting for each in (*self._training.values(), *self._waiting.values())),
            in_flight=self.in_flight,
            trained=self._settled.trained.ranges,
            dropped=self._settled.dropped.ranges,
            dropped_by_cause=dict(self.dropped),
            trajectories_discarded=self._settled.trajectories_discarded,
            tokens_discarded=self._settled.tokens_discarded,
            bytes_mean=self._bytes_mean,
            puts=self._puts,
        )

    @classmethod
    def restore(
        cls,
        state: BufferState,
        *,
        now: float,
        batch: int,
        alpha: int,
        enforced: bool = True,
        bytes_max: int,
        batch_min: int | None = None,
        wait_s: float | None = None,
    ) -> Self:
        """As it was. What was in flight is not in play any more: play it again, or `lose` it. If the bounds are smaller
        now, `evict` tells what had to go."""
        self = cls(
            batch=batch,
            alpha=alpha,
            enforced=enforced,
            bytes_max=bytes_max,
            batch_min=batch_min,
            wait_s=wait_s,
            version=state.version,
        )
        self._in_flight = {ticket.group: ticket for ticket in state.in_flight}
        for each in state.waiting:
            # A clock that began anew shows less: then its waiting begins anew too.
            since = Waiting(group=each.group, version=each.version, since=min(each.since, now))
            self._wait(_Kept(number_of(each.group.id), since, group_bytes(each.group)))
        self._settled = Settled(state.trained, state.dropped, state.dropped_by_cause)
        self._settled.trajectories_discarded = state.trajectories_discarded
        self._settled.tokens_discarded = state.tokens_discarded
        self._started = len(self._settled) + self.outstanding
        self._bytes_mean, self._puts = state.bytes_mean, state.puts
        self._untold += [*self._expire(), *self._fit_in_flight(), *self._fit()]
        return self

    def rollback(self, to: BufferState, consumed: Iterable[Group], now: float) -> tuple[Dropped, ...]:
        """The trainer went back to a checkpoint, of which `to` was saved. `consumed`: groups that ended before or since
        and were trained on since, as far as somebody kept them; more do no harm. What the surviving weights were
        trained on stays trained on, and what was dropped stays dropped. All else that has no token of later weights
        waits again; the rest is dropped as of a lost lineage, and so is what was trained on since and is not here."""
        assert to.version <= self.version, f"version {to.version} is no way back from {self.version}"
        revoked = self._settled.back_to(to.trained)
        revoked |= {each.number for each in self._training.values()}
        ended = [*consumed, *(each.group for each in to.waiting), *(each.group for each in self._training.values())]
        group_by_number = {number_of(group.id): group for group in ended if group.members}
        self._bytes -= sum(each.bytes for each in self._training.values())
        self._training = {}
        self.version = to.version

        dropped = [self._drop_kept(each, LOST_LINEAGE) for each in self._of_later_weights()]
        for number, group in sorted(group_by_number.items()):
            if number in self._settled or group.id in self._waiting:
                continue
            if number in revoked:
                revoked.discard(number)
            else:  # it ended since, in a process that is no more
                self._started += self._in_flight.pop(group.id, None) is None
                self._settled.discard(group.left_out)
            if (group.version_last or 0) > self.version:
                dropped.append(self._drop(group, number, LOST_LINEAGE))
            else:
                version = group.version_first
                waiting = Waiting(group=group, version=self.version if version is None else version, since=now)
                self._wait(_Kept(number, waiting, group_bytes(group)))
        for number in sorted(revoked):
            self._settled.drop(number, LOST_LINEAGE)
        return (*dropped, *self._fit())

    # ---- inside ----

    @property
    def _next(self) -> int:
        """From which the next step starts that is not under way yet."""
        return self.version + 1 if self._training else self.version

    def _fresh(self) -> list[_Kept]:
        return [each for each in self._waiting.values() if each.waiting.version >= self.oldest_wanted]

    def _of_later_weights(self) -> list[_Kept]:
        return [each for each in self._waiting.values() if (each.group.version_last or 0) > self.version]

    def _wait(self, kept: _Kept) -> None:
        self._waiting[kept.group.id] = kept
        self._bytes += kept.bytes

    def _expire(self) -> list[Dropped]:
        old = [each for each in self._waiting.values() if each.waiting.version < self.oldest_wanted]
        return [self._drop_kept(each, STALE) for each in old]

    def _fit(self) -> list[Dropped]:
        """Drops the oldest that are too many, or too large for what is beyond one batch."""
        dropped = []
        while self._waiting and (
            self.outstanding > self.outstanding_max
            or (self._bytes > self._bytes_max and len(self._waiting) > self._batch)
        ):
            dropped.append(self._drop_kept(min(self._waiting.values(), key=lambda each: each.age), FULL))
        return dropped

    def _fit_in_flight(self) -> list[Dropped]:
        """Drops the newest that are too many. Nothing of them is played yet, so that they go before what waits."""
        newest = sorted(self._in_flight.values(), key=lambda ticket: ticket.number, reverse=True)
        spare = newest[: max(0, self.outstanding - self.outstanding_max)]
        for ticket in spare:
            self.lose(ticket.group, FULL)
        return [
            Dropped(group=Group(id=each.group, task=each.task, seed=each.seed, members=(), wanted=0), cause=FULL)
            for each in spare
        ]

    def _drop_kept(self, kept: _Kept, cause: str) -> Dropped:
        del self._waiting[kept.group.id]
        self._bytes -= kept.bytes
        return self._drop(kept.group, kept.number, cause)

    def _drop(self, group: Group, number: int, cause: str) -> Dropped:
        self._settled.drop(number, cause)
        self._settled.discard(group.members)
        return Dropped(group=group, cause=cause)

    def _require_training(self, batch: Batch) -> None:
        expected, got = tuple(self._training), tuple(group.id for group in batch.groups)
        assert expected == got and batch.version == self.version, f"in training is {expected}, not {got}"

    def check(self) -> None:
        """That all that is promised holds; from scratch."""
        self._settled.check()
        kept = (*self._waiting.values(), *self._training.values())
        numbers = [ticket.number for ticket in self._in_flight.values()] + [each.number for each in kept]
        assert not any(number in self._settled for number in numbers), "a group is settled, and is not"
        assert len(set(numbers)) == len(numbers) == self._started - len(self._settled), "each group is in one place"
        assert len(numbers) <= self.outstanding_max, f"{len(numbers)} groups are outstanding"
        assert self._bytes == sum(group_bytes(each.group) for each in kept), f"{self._bytes} bytes are not what is here"
        assert self._bytes <= self._bytes_max or len(self._waiting) <= self._batch, f"{self._bytes} bytes are too many"
        for each in self._training.values():
            first = each.group.version_first
            fresh = not self._enforced or first is None or first >= self.version - self._alpha
            assert fresh, f"{each.group.id} is trained on at {self.version}, and began at {first}"
            assert (each.group.version_last or 0) <= self.version, f"{each.group.id} is of a lost lineage"


class Settled:
    def __init__(
        self, trained: Iterable[Range] = (), dropped: Iterable[Range] = (), by_cause: Mapping[str, int] | None = None
    ) -> None:
        self.trained = NumberRanges(trained)
        self.dropped = NumberRanges(dropped)
        self.by_cause = dict(by_cause or {})
        """How many were dropped."""
        self.trajectories_discarded = self.tokens_discarded = 0

    def __contains__(self, number: int) -> bool:
        return number in self.trained or number in self.dropped

    def __len__(self) -> int:
        return len(self.trained) + len(self.dropped)

    def train(self, number: int) -> None:
        assert number not in self, f"group {number} is settled already"
        self.trained.add(number)

    def drop(self, number: int, cause: str) -> None:
        assert number not in self, f"group {number} is settled already"
        self.dropped.add(number)
        self.by_cause[cause] = self.by_cause.get(cause, 0) + 1

    def discard(self, trajectories: Iterable[Trajectory]) -> None:
        for each in trajectories:
            self.trajectories_discarded += 1
            self.tokens_discarded += sum(len(turn.tokens) for turn in each.turns)

    def back_to(self, trained: Iterable[Range]) -> set[int]:
        """Only these were trained on. The others, which are not settled any more."""
        survived = NumberRanges(trained)
        revoked = {number for number in self.trained if number not in survived}
        self.trained = survived
        return revoked

    def check(self) -> None:
        assert sum(self.by_cause.values()) == len([*self.dropped]), f"{self.by_cause} were dropped"
        both = [*self.trained, *self.dropped]
        assert len(both) == len(set(both)) == len(self), "a group is settled twice"


# The memory of a sample: an estimate that depends on its contents alone. It is within a factor of 1.5 of what CPython
# uses for a group that was decoded or drawn token by token; where records share numbers or texts, it is too high.


def group_bytes(group: Group) -> int:
    return GROUP + sum(POINTER + trajectory_bytes(each) for each in group.all())


def trajectory_bytes(trajectory: Trajectory) -> int:
    taught = trajectory.teacher_logprobs
    return (
        TRAJECTORY
        + sum(POINTER + turn_bytes(turn) for turn in trajectory.turns)
        + sum(POINTER + SPAN + _text(span.failed) + _text(span.waited_for) for span in trajectory.spans)
        + METRIC * len(trajectory.metrics)
        + (_floats(len(taught)) if taught is not None else 0)
        + _text(trajectory.observation)
        + _text(trajectory.cause)
    )


def turn_bytes(turn: Turn) -> int:
    return (
        TURN
        + _text(turn.observation)
        + _text(turn.action)
        + _ints(turn.observation_tokens)
        + _ints(turn.tokens)
        + _ints(turn.versions)
        + _floats(len(turn.logprobs))
        + (TUPLE + sum(POINTER + _ints(ids) for ids in turn.kept) if turn.kept is not None else 0)
    )


def _floats(count: int) -> int:
    return TUPLE + (POINTER + NUMBER) * count


def _ints(numbers: Sequence[int]) -> int:
    # SMALL_MAX < number, for each; a comparison without a frame of its own, as there are many.
    return TUPLE + POINTER * len(numbers) + NUMBER * sum(map(SMALL_MAX.__lt__, numbers))


def _text(text: str) -> int:
    if not text:
        return 0
    return TEXT + len(text) * (1 if text.isascii() else 2 if ord(max(text)) < 0x10000 else 4)
