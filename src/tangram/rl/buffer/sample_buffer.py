"""The sample buffer: bounds staleness and applies backpressure between rollout and training.

Owns every group from its start until a gradient step has used it, and the version from which the next step starts.
Pure: time is an argument. Never plays or trains.

    while buffer.may_start(): buffer.start(ticket)              # then play it
    buffer.put(group, now)  |  buffer.drop(group_id, cause)     # it ended, with or without members
    batch = buffer.take(now)                                    # the oldest groups; None if there are too few
    buffer.finish_step(batch)                                   # the step is done
    buffer.rollback(state, groups, now)                         # the trainer restarts from a checkpoint

    started ──▶ in flight ──▶ waiting ◀──▶ training ──▶ trained
                    └────────────┴─────────────┴──────▶ dropped, with its cause

Promises: started - trained - dropped is at most (α + 1) * batch, with α = `staleness_bound`; no batch has a trajectory
with a staleness above α; each started group is settled once, as trained or as dropped, and every dropped group is
reported once. Staleness and memory are bounded by starting fewer groups; groups are discarded only if that is not
enough. Memory may exceed its bound by the batch in training and one that waits: without them training could not
continue.

Staleness is enforced in four places: here (`version_min`, the oldest version that may still be trained on), before each
turn and after each generation of an episode (`Rollout._stop_if_stale`), when engines take new weights
(`WeightSync.discard_stale`), and before a gradient step (`Learner._require_trainable_batch`).
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
    DroppedGroup,
    WaitingGroup,
    group_number,
)
from tangram.rl.trajectories.training_batch import TrainingBatch
from tangram.rl.trajectories.trajectory import Group, GroupTicket, Trajectory, Turn

MEAN_OVER = 64
"""Window, in groups, of the moving average of their size, which changes as the policy writes longer or shorter."""


class _BufferedGroup(NamedTuple):
    """A group that waits or is being trained on."""

    number: int
    stored: WaitingGroup
    bytes: int

    @property
    def group(self) -> Group:
        return self.stored.group

    @property
    def order_key(self) -> tuple[int, int]:
        """Sort key: oldest first."""
        return self.stored.version, self.number


class SampleBuffer:
    def __init__(
        self,
        *,
        batch: int,
        staleness_bound: int,
        enforces_staleness: bool = True,
        bytes_max: int,
        batch_min: int | None = None,
        wait_s: float | None = None,
        version: int = 0,
    ) -> None:
        """`enforces_staleness`: whether staleness is checked again after the start. `batch_min`: groups that suffice
        once one of them has waited `wait_s`."""
        assert batch >= 1 and staleness_bound >= 0 and version >= 0 and (batch_min is None) == (wait_s is None)
        assert batch_min is None or 1 <= batch_min <= batch
        self.version = version
        """The version from which the current step started; between steps, from which the next one will start."""
        self._batch = batch
        self._staleness_bound = staleness_bound
        self._enforces_staleness = enforces_staleness
        self._bytes_max = bytes_max
        self._batch_min = batch_min
        self._wait_s = wait_s
        self._in_flight: dict[str, GroupTicket] = {}
        self._waiting: dict[str, _BufferedGroup] = {}
        self._training: dict[str, _BufferedGroup] = {}
        self._settled = SettledGroups()
        self._started = 0
        self._unreported: list[DroppedGroup] = []
        """Groups dropped by a call that does not return them; `drop_stale` does."""
        self._bytes = 0
        """Memory of the groups that wait or are being trained on."""
        self._bytes_mean = 0.0
        self._puts = 0

    # ---- properties ----

    @property
    def started(self) -> int:
        return self._started

    @property
    def trained_groups(self) -> int:
        return len(self._settled.trained)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of groups by cause."""
        return self._settled.by_cause

    @property
    def outstanding(self) -> int:
        """started - trained - dropped"""
        return len(self._in_flight) + len(self._waiting) + len(self._training)

    @property
    def outstanding_max(self) -> int:
        return (self._staleness_bound + 1) * self._batch

    @property
    def in_flight(self) -> tuple[GroupTicket, ...]:
        """Tickets in the order in which they were started; after `restore`, those to be played again."""
        return tuple(self._in_flight.values())

    @property
    def waiting(self) -> tuple[Group, ...]:
        """Groups in the order in which they were put."""
        return tuple(waiting.group for waiting in self._waiting.values())

    @property
    def version_min(self) -> int:
        """The lowest version of a first token that can still be trained on. While a step runs, the next one starts a
        version later, so samples too stale for that step can no longer be used."""
        return max(0, self._next_version - self._staleness_bound) if self._enforces_staleness else 0

    def has_started(self, number: int) -> bool:
        """Whether a group of this number was ever started. After `restore`, such tickets are skipped."""
        return (
            number in self._settled
            or any(ticket.number == number for ticket in self._in_flight.values())
            or any(buffered.number == number for buffered in (*self._waiting.values(), *self._training.values()))
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

    # ---- groups start and end ----

    def may_start(self) -> bool:
        """Backpressure: whether another group may start."""
        if self.outstanding >= self.outstanding_max:
            return False
        if self._training and self._staleness_bound == 0:
            return False  # a sample of the current weights is too stale for the next step
        pending = len(self._in_flight) + len(self._waiting)
        expected = self._bytes + (len(self._in_flight) + 1) * self._bytes_mean
        return pending < self._batch or expected <= self._bytes_max

    def start(self, ticket: GroupTicket) -> None:
        assert self.may_start(), f"{ticket.group} is started, although {self.outstanding} groups are outstanding"
        assert ticket.is_trained_on, f"{ticket.group} is not to be trained on"
        assert not self.has_started(ticket.number), f"{ticket.group} was started before"
        self._in_flight[ticket.group] = ticket
        self._started += 1

    def drop(self, group_id: str, cause: str, group: Group | None = None) -> None:
        """Settles a group that ended without members. `group`: its trajectories, for the counts."""
        ticket = self._in_flight.pop(group_id)
        self._settled.mark_dropped(ticket.number, cause)
        if group is not None:
            assert group.id == group_id and not group.members, f"{group.id} has members, so it is not lost"
            self._settled.count_discarded(group.left_out)

    def put(self, group: Group, now: float) -> tuple[DroppedGroup, ...]:
        """Adds a group that ended with members. Returns the groups dropped for it, possibly itself."""
        assert group.members, f"{group.id} has no members, so it is lost"
        number = self._in_flight.pop(group.id).number
        self._settled.count_discarded(group.left_out)
        first = group.version_first
        if (group.version_last or 0) > self._next_version:
            return (self._drop(group, number, LOST_LINEAGE),)
        if first is not None and first < self.version_min:
            return (self._drop(group, number, STALE),)
        waiting = WaitingGroup(group=group, version=self._next_version if first is None else first, since_s=now)
        self._add_waiting(_BufferedGroup(number, waiting, group_bytes(group)))
        self._puts += 1
        self._bytes_mean += (self._waiting[group.id].bytes - self._bytes_mean) / min(self._puts, MEAN_OVER)
        return tuple(self._fit())

    # ---- steps ----

    def is_ready(self, now: float) -> bool:
        """Whether the next step has its batch; also while a step runs."""
        enough = len(self._fresh())
        if enough >= self._batch:
            return True
        wake_at = self.wake_at()
        return wake_at is not None and now >= wake_at

    def wake_at(self) -> float | None:
        """When the waiting groups become enough by `wait_s`; None if they are enough now, or too few even then."""
        fresh = self._fresh()
        if self._batch_min is None or self._wait_s is None or not self._batch_min <= len(fresh) < self._batch:
            return None
        return min(waiting.stored.since_s for waiting in fresh) + self._wait_s

    def take(self, now: float) -> TrainingBatch | None:
        """Returns the batch of the next step: the oldest groups. Drops groups that are too stale, which
        `drop_stale` reports."""
        assert not self._training, f"the step from version {self.version} is under way"
        self._unreported += self._drop_stale_waiting()
        if not self.is_ready(now):
            return None
        chosen = sorted(self._waiting.values(), key=lambda waiting: waiting.order_key)[: self._batch]
        for buffered in sorted(chosen, key=lambda waiting: waiting.number):
            self._training[buffered.group.id] = self._waiting.pop(buffered.group.id)
        return TrainingBatch(version=self.version, groups=tuple(buffered.group for buffered in self._training.values()))

    def drop_stale(self) -> tuple[DroppedGroup, ...]:
        """Drops groups that are too stale for the next step. Returns them with all drops that were not reported yet."""
        dropped, self._unreported = [*self._unreported, *self._drop_stale_waiting()], []
        return tuple(dropped)

    def finish_step(self, batch: TrainingBatch) -> None:
        """Settles a batch as trained."""
        self._require_training(batch)
        for buffered in self._training.values():
            self._settled.mark_trained(buffered.number)
            self._bytes -= buffered.bytes
        self._training = {}
        self.version += 1

    # ---- save, restore, roll back ----

    def state(self) -> BufferState:
        return BufferState(
            version=self.version,
            waiting=tuple(buffered.stored for buffered in (*self._training.values(), *self._waiting.values())),
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
        staleness_bound: int,
        enforces_staleness: bool = True,
        bytes_max: int,
        batch_min: int | None = None,
        wait_s: float | None = None,
    ) -> Self:
        """Restores a saved buffer. Groups that were in flight must be played again, or dropped by `drop`. If the bounds
        are smaller now, `drop_stale` reports the dropped groups."""
        self = cls(
            batch=batch,
            staleness_bound=staleness_bound,
            enforces_staleness=enforces_staleness,
            bytes_max=bytes_max,
            batch_min=batch_min,
            wait_s=wait_s,
            version=state.version,
        )
        self._in_flight = {ticket.group: ticket for ticket in state.in_flight}
        for stored in state.waiting:
            # After a restart of the clock, the wait restarts too.
            restored = WaitingGroup(group=stored.group, version=stored.version, since_s=min(stored.since_s, now))
            self._add_waiting(_BufferedGroup(group_number(stored.group.id), restored, group_bytes(stored.group)))
        self._settled = SettledGroups(state.trained, state.dropped, state.dropped_by_cause)
        self._settled.trajectories_discarded = state.trajectories_discarded
        self._settled.tokens_discarded = state.tokens_discarded
        self._started = len(self._settled) + self.outstanding
        self._bytes_mean, self._puts = state.bytes_mean, state.puts
        self._unreported += [*self._drop_stale_waiting(), *self._fit_in_flight(), *self._fit()]
        return self

    def rollback(self, to: BufferState, consumed: Iterable[Group], now: float) -> tuple[DroppedGroup, ...]:
        """Goes back to `to`, the state saved with the checkpoint that the trainer restarts from.

        `consumed`: the logged groups that were trained on since then; further groups have no effect. Groups that the
        surviving weights were trained on stay trained, and dropped groups stay dropped. All other groups without tokens
        of later weights wait again. The rest is dropped with cause `lost_lineage`, and so are groups that were trained
        on since and were not logged."""
        assert to.version <= self.version, f"cannot go back from version {self.version} to {to.version}"
        revoked = self._settled.rollback_to(to.trained)
        revoked |= {buffered.number for buffered in self._training.values()}
        ended = [
            *consumed,
            *(stored.group for stored in to.waiting),
            *(buffered.group for buffered in self._training.values()),
        ]
        group_by_number = {group_number(group.id): group for group in ended if group.members}
        self._bytes -= sum(buffered.bytes for buffered in self._training.values())
        self._training = {}
        self.version = to.version

        dropped = [self._drop_waiting(waiting, LOST_LINEAGE) for waiting in self._from_later_weights()]
        for number, group in sorted(group_by_number.items()):
            if number in self._settled or group.id in self._waiting:
                continue
            if number in revoked:
                revoked.discard(number)
            else:  # it ended since, in a process that died
                self._started += self._in_flight.pop(group.id, None) is None
                self._settled.count_discarded(group.left_out)
            if (group.version_last or 0) > self.version:
                dropped.append(self._drop(group, number, LOST_LINEAGE))
            else:
                version = group.version_first
                waiting = WaitingGroup(group=group, version=self.version if version is None else version, since_s=now)
                self._add_waiting(_BufferedGroup(number, waiting, group_bytes(group)))
        for number in sorted(revoked):
            self._settled.mark_dropped(number, LOST_LINEAGE)
        return (*dropped, *self._fit())

    # ---- internal ----

    @property
    def _next_version(self) -> int:
        """The version from which the next step will start."""
        return self.version + 1 if self._training else self.version

    def _fresh(self) -> list[_BufferedGroup]:
        return [waiting for waiting in self._waiting.values() if waiting.stored.version >= self.version_min]

    def _from_later_weights(self) -> list[_BufferedGroup]:
        return [waiting for waiting in self._waiting.values() if (waiting.group.version_last or 0) > self.version]

    def _add_waiting(self, buffered: _BufferedGroup) -> None:
        self._waiting[buffered.group.id] = buffered
        self._bytes += buffered.bytes

    def _drop_stale_waiting(self) -> list[DroppedGroup]:
        old = [waiting for waiting in self._waiting.values() if waiting.stored.version < self.version_min]
        return [self._drop_waiting(waiting, STALE) for waiting in old]

    def _fit(self) -> list[DroppedGroup]:
        """Drops the oldest groups until counts and memory fit; one batch may always stay."""
        dropped = []
        while self._waiting and (
            self.outstanding > self.outstanding_max
            or (self._bytes > self._bytes_max and len(self._waiting) > self._batch)
        ):
            dropped.append(self._drop_waiting(min(self._waiting.values(), key=lambda waiting: waiting.order_key), FULL))
        return dropped

    def _fit_in_flight(self) -> list[DroppedGroup]:
        """Drops the newest tickets in flight until the count fits. They cost nothing yet, so they go before waiting
        groups."""
        newest = sorted(self._in_flight.values(), key=lambda ticket: ticket.number, reverse=True)
        spare = newest[: max(0, self.outstanding - self.outstanding_max)]
        for ticket in spare:
            self.drop(ticket.group, FULL)
        return [
            DroppedGroup(
                group=Group(id=ticket.group, task=ticket.task, seed=ticket.seed, members=(), wanted=0), cause=FULL
            )
            for ticket in spare
        ]

    def _drop_waiting(self, buffered: _BufferedGroup, cause: str) -> DroppedGroup:
        del self._waiting[buffered.group.id]
        self._bytes -= buffered.bytes
        return self._drop(buffered.group, buffered.number, cause)

    def _drop(self, group: Group, number: int, cause: str) -> DroppedGroup:
        self._settled.mark_dropped(number, cause)
        self._settled.count_discarded(group.members)
        return DroppedGroup(group=group, cause=cause)

    def _require_training(self, batch: TrainingBatch) -> None:
        expected, group_ids = tuple(self._training), tuple(group.id for group in batch.groups)
        assert expected == group_ids and batch.version == self.version, f"in training is {expected}, not {group_ids}"

    def check(self) -> None:
        """Recomputes every invariant from scratch."""
        self._settled.check()
        buffered = (*self._waiting.values(), *self._training.values())
        numbers = [ticket.number for ticket in self._in_flight.values()] + [held.number for held in buffered]
        assert not any(number in self._settled for number in numbers), "a settled group is still outstanding"
        assert len(set(numbers)) == len(numbers) == self._started - len(self._settled), "each group is in one place"
        assert len(numbers) <= self.outstanding_max, f"{len(numbers)} groups are outstanding"
        assert self._bytes == sum(group_bytes(held.group) for held in buffered), (
            f"{self._bytes} bytes are not what is here"
        )
        assert self._bytes <= self._bytes_max or len(self._waiting) <= self._batch, f"{self._bytes} bytes are too many"
        for training in self._training.values():
            first = training.group.version_first
            fresh = not self._enforces_staleness or first is None or first >= self.version - self._staleness_bound
            assert fresh, f"{training.group.id} is trained on at {self.version}, and began at {first}"
            assert (training.group.version_last or 0) <= self.version, (
                f"{training.group.id} has tokens of weights that were rolled back"
            )


class SettledGroups:
    def __init__(
        self, trained: Iterable[Range] = (), dropped: Iterable[Range] = (), by_cause: Mapping[str, int] | None = None
    ) -> None:
        self.trained = NumberRanges(trained)
        self.dropped = NumberRanges(dropped)
        self.by_cause = dict(by_cause or {})
        """Number of dropped groups by cause."""
        self.trajectories_discarded = self.tokens_discarded = 0

    def __contains__(self, number: int) -> bool:
        return number in self.trained or number in self.dropped

    def __len__(self) -> int:
        return len(self.trained) + len(self.dropped)

    def mark_trained(self, number: int) -> None:
        assert number not in self, f"group {number} is settled already"
        self.trained.add(number)

    def mark_dropped(self, number: int, cause: str) -> None:
        assert number not in self, f"group {number} is settled already"
        self.dropped.add(number)
        self.by_cause[cause] = self.by_cause.get(cause, 0) + 1

    def count_discarded(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self.trajectories_discarded += 1
            self.tokens_discarded += sum(len(turn.tokens) for turn in trajectory.turns)

    def rollback_to(self, trained: Iterable[Range]) -> set[int]:
        """Keeps only these as trained. Returns the numbers that are no longer settled."""
        survived = NumberRanges(trained)
        revoked = {number for number in self.trained if number not in survived}
        self.trained = survived
        return revoked

    def check(self) -> None:
        assert sum(self.by_cause.values()) == len([*self.dropped]), f"{self.by_cause} were dropped"
        both = [*self.trained, *self.dropped]
        assert len(both) == len(set(both)) == len(self), "a group is settled twice"


# ---- memory of a group ------------------------------------------------------------------------------------------


POINTER_BYTES = 8
NUMBER_BYTES = 32
"""A float or an int: 24 and 28 bytes, in blocks of 16."""
SMALL_INT_MAX = 256
"""CPython caches integers up to this."""
TUPLE_BYTES = 56
TEXT_BYTES = 64
"""An empty string."""
TURN_BYTES, SPAN_BYTES, TRAJECTORY_BYTES, GROUP_BYTES = 192, 192, 512, 256
"""The record itself, with its own numbers and short strings."""
METRIC_BYTES = 128
"""Its name, its value and its slot in the dict."""


def group_bytes(group: Group) -> int:
    """Estimates the memory of a group from its contents alone. For a group that was decoded, or sampled token by token,
    the estimate is within a factor of 1.5 of what CPython uses; it is too high where records share numbers or
    strings."""
    return GROUP_BYTES + sum(POINTER_BYTES + _trajectory_bytes(trajectory) for trajectory in group.all_trajectories())


def _trajectory_bytes(trajectory: Trajectory) -> int:
    teacher_logprobs = trajectory.teacher_logprobs
    return (
        TRAJECTORY_BYTES
        + sum(POINTER_BYTES + _turn_bytes(turn) for turn in trajectory.turns)
        + sum(POINTER_BYTES + SPAN_BYTES + _text(span.failed) + _text(span.waited_for) for span in trajectory.spans)
        + METRIC_BYTES * len(trajectory.metrics)
        + (_floats(len(teacher_logprobs)) if teacher_logprobs is not None else 0)
        + _text(trajectory.observation)
        + _text(trajectory.cause)
    )


def _turn_bytes(turn: Turn) -> int:
    candidates = turn.candidate_token_ids
    return (
        TURN_BYTES
        + _text(turn.observation)
        + _text(turn.action)
        + _ints(turn.observation_tokens)
        + _ints(turn.tokens)
        + _ints(turn.versions)
        + _floats(len(turn.logprobs))
        + (TUPLE_BYTES + sum(POINTER_BYTES + _ints(ids) for ids in candidates) if candidates is not None else 0)
    )


def _floats(count: int) -> int:
    return TUPLE_BYTES + (POINTER_BYTES + NUMBER_BYTES) * count


def _ints(numbers: Sequence[int]) -> int:
    # SMALL_INT_MAX < number, for each; written without a Python frame per number because there are many.
    return TUPLE_BYTES + POINTER_BYTES * len(numbers) + NUMBER_BYTES * sum(map(SMALL_INT_MAX.__lt__, numbers))


def _text(text: str) -> int:
    if not text:
        return 0
    return TEXT_BYTES + len(text) * (1 if text.isascii() else 2 if ord(max(text)) < 0x10000 else 4)
