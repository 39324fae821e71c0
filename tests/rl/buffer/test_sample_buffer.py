"""The sample buffer: its bounds as properties over everything that may happen to it, and its rules by example."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram.rl.buffer.number_ranges import NumberRanges
from tangram.rl.buffer.records import FULL, LOST_LINEAGE, STALE, BufferState, DroppedGroup
from tangram.rl.buffer.sample_buffer import SampleBuffer, group_bytes
from tangram.rl.trajectories.training_batch import TrainingBatch
from tangram.rl.trajectories.trajectory import Ending, Group, GroupTicket, Span, Stage, Trajectory, Turn

MIB = 1 << 20


def ticket(number: int, task: str = "a") -> GroupTicket:
    return GroupTicket(task=task, number=number, seed=number)


def member(group: str, index: int, versions: tuple[int, ...], ending: Ending = Ending.FINISHED) -> Trajectory:
    turn = Turn(
        observation="look",
        observation_tokens=(1, 2),
        action="go",
        tokens=(3,) * len(versions),
        logprobs=(-1.0,) * len(versions),
        versions=versions,
    )
    return Trajectory(
        id=f"{group}/{index}.0",
        task=group.partition("/")[0],
        group=group,
        member=index,
        attempt=0,
        seed=0,
        turns=(turn,),
        ending=ending,
        reward=1.0 if ending.is_rewarded else None,
    )


def group(of: GroupTicket, *versions: tuple[int, ...], left_out: tuple[Trajectory, ...] = ()) -> Group:
    """A group of members with tokens of these versions."""
    members = tuple(member(of.group, index, each) for index, each in enumerate(versions))
    return Group(id=of.group, task=of.task, seed=of.seed, members=members, left_out=left_out, wanted=len(members))


def buffer(*, batch: int = 2, staleness_bound: int = 1, bytes_max: int = MIB, **more: Any) -> SampleBuffer:
    return SampleBuffer(batch=batch, staleness_bound=staleness_bound, bytes_max=bytes_max, **more)


def started(of: SampleBuffer, *numbers: int) -> None:
    for number in numbers:
        of.start(ticket(number))


def put(of: SampleBuffer, number: int, *versions: tuple[int, ...], now: float = 0.0) -> tuple[DroppedGroup, ...]:
    return of.put(group(ticket(number), *versions), now)


def taken(of: SampleBuffer, now: float = 0.0) -> TrainingBatch:
    batch = of.take(now)
    assert batch is not None
    return batch


def numbers(groups: tuple[Group, ...]) -> list[int]:
    return [each.seed for each in groups]


# ---- its rules, by example ------------------------------------------------------------------------------------------


def test_any_groups_that_are_complete_make_a_batch_in_the_order_of_their_numbers() -> None:
    it = buffer(batch=2, staleness_bound=1)
    started(it, 0, 1, 2, 3)
    put(it, 3, (0,))
    assert not it.is_ready(0.0) and it.take(0.0) is None
    put(it, 1, (0,))
    batch = taken(it)
    assert numbers(batch.groups) == [1, 3] and batch.version == 0


def test_the_oldest_are_taken_first() -> None:
    it = buffer(batch=1, staleness_bound=2, version=5)
    started(it, 0, 1, 2)
    for number, version in ((0, 5), (1, 4), (2, 4)):
        put(it, number, (version, 5))
    order = []
    for _ in range(2):
        batch = taken(it)
        order += numbers(batch.groups)
        it.finish_step(batch)
    assert order == [1, 2] and it.version == 7


def test_a_group_is_as_old_as_its_oldest_member() -> None:
    it = buffer(batch=1, staleness_bound=1, version=3)
    started(it, 0)
    (dropped,) = put(it, 0, (3, 3), (1, 3))
    assert dropped.cause == STALE and dropped.group.id == "a/0"


def test_what_starts_is_paced_until_a_step_is_done() -> None:
    it = buffer(batch=2, staleness_bound=1)
    started(it, 0, 1, 2, 3)
    assert not it.may_start()
    for number in range(4):
        put(it, number, (0,))
    batch = taken(it)
    assert not it.may_start(), "what is being trained on counts"
    it.finish_step(batch)
    assert it.may_start() and it.trained_groups == 2


def test_what_is_lost_makes_room() -> None:
    it = buffer(batch=1, staleness_bound=0)
    started(it, 0)
    assert not it.may_start()
    it.drop("a/0", "failed")
    assert it.may_start() and it.dropped == {"failed": 1}


def test_with_alpha_0_nothing_starts_during_a_step_and_what_is_left_of_the_version_is_lost() -> None:
    it = buffer(batch=2, staleness_bound=0, batch_min=1, wait_s=1.0)
    started(it, 0, 1)
    put(it, 0, (0,))
    batch = taken(it, now=1.0)
    it.drop("a/1", "failed")
    assert it.outstanding == 1 and not it.may_start()
    assert it.version_min == 1
    it.finish_step(batch)
    assert it.may_start()


def test_during_a_step_what_is_too_old_for_the_next_one_is_lost_already() -> None:
    it = buffer(batch=1, staleness_bound=1, version=1)
    started(it, 0, 1)
    assert it.version_min == 0
    put(it, 0, (0, 1))
    taken(it)
    assert it.version_min == 1
    assert [each.cause for each in put(it, 1, (0, 1))] == [STALE]


def test_eviction_drops_samples_too_old_for_the_next_step_and_reports_each_once() -> None:
    it = buffer(batch=1, staleness_bound=1)
    started(it, 0, 1)
    put(it, 0, (0,))
    put(it, 1, (0,))
    it.finish_step(taken(it))
    started(it, 2)
    put(it, 2, (0, 1))
    batch = taken(it)  # of version 1: what is left is of version 0, and the next step starts from 2
    assert numbers(batch.groups) == [1]
    assert [(each.group.seed, each.cause) for each in it.drop_stale()] == [(2, STALE)]
    assert it.drop_stale() == ()


def test_samples_dropped_by_take_are_reported_by_evict() -> None:
    it = buffer(batch=1, staleness_bound=1)
    started(it, 0, 1)
    put(it, 0, (0,))
    put(it, 1, (0,))
    it.finish_step(taken(it))
    started(it, 2)
    put(it, 2, (0, 1))
    it.finish_step(taken(it))
    assert it.take(0.0) is None
    assert [(each.group.seed, each.cause) for each in it.drop_stale()] == [(2, STALE)]


def test_if_only_the_age_at_the_start_counts_nothing_is_ever_too_old() -> None:
    it = buffer(batch=1, staleness_bound=0, enforces_staleness=False, version=9)
    started(it, 0)
    assert put(it, 0, (1, 9)) == () and it.version_min == 0 and it.drop_stale() == ()
    assert taken(it).staleness == (8,)
    assert not it.may_start()


def test_fewer_are_enough_once_one_has_waited_long_enough() -> None:
    it = buffer(batch=3, staleness_bound=0, batch_min=2, wait_s=5.0)
    started(it, 0, 1, 2)
    put(it, 0, (0,), now=1.0)
    assert it.wake_at() is None and not it.is_ready(100.0)
    put(it, 1, (0,), now=3.0)
    assert it.wake_at() == 6.0
    assert not it.is_ready(5.9) and it.take(5.9) is None
    assert it.is_ready(6.0) and numbers(taken(it, now=6.0).groups) == [0, 1]


def test_a_group_without_any_token_is_as_new_as_the_moment_it_comes() -> None:
    it = buffer(batch=1, staleness_bound=0, version=4)
    started(it, 0)
    assert put(it, 0, ()) == ()
    assert taken(it).staleness == (0,)


def test_what_was_sampled_by_weights_that_are_not_there_is_of_a_lost_lineage() -> None:
    it = buffer(batch=1, staleness_bound=1, version=2)
    started(it, 0)
    assert [each.cause for each in put(it, 0, (2, 3))] == [LOST_LINEAGE]


def test_a_settled_group_cannot_be_started_again() -> None:
    it = buffer(batch=1, staleness_bound=0)
    started(it, 0)
    it.drop("a/0", "failed")
    with pytest.raises(AssertionError, match="started before"):
        it.start(ticket(0, task="b"))


def test_tokens_that_are_not_trained_on_are_counted() -> None:
    it = buffer(batch=1, staleness_bound=1, version=1)
    started(it, 0, 1)
    cancelled = member("a/0", 5, (1, 1, 1), Ending.CANCELLED)
    it.put(group(ticket(0), (1, 1), left_out=(cancelled,)), 0.0)
    assert it.statistics().tokens_discarded == 3
    it.drop("a/1", "failed", msgspec.structs.replace(group(ticket(1)), left_out=(cancelled,)))
    assert it.statistics().tokens_discarded == 6 and it.statistics().trajectories_discarded == 2


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_when_memory_is_short_less_is_started_but_always_one_batch() -> None:
    size = group_bytes(group(ticket(0), (0,)))
    it = buffer(batch=2, staleness_bound=3, bytes_max=3 * size)
    started(it, 0, 1)
    put(it, 0, (0,))
    assert it.may_start(), "one here, one in flight, and one more has room"
    started(it, 2)
    assert not it.may_start()
    put(it, 1, (0,))
    put(it, 2, (0,))
    assert not it.may_start()
    batch = taken(it)
    assert it.may_start(), "one batch may always be in the making"
    it.finish_step(batch)
    tiny = buffer(batch=2, staleness_bound=3, bytes_max=1)
    started(tiny, 0, 1)
    assert put(tiny, 0, (0,)) == () == put(tiny, 1, (0,))
    assert len(taken(tiny).groups) == 2


def test_when_memory_is_full_the_oldest_leave() -> None:
    small, large = group(ticket(0), (0,)), group(ticket(0), *[(0,) * 50 for _ in range(8)])
    it = buffer(batch=1, staleness_bound=3, bytes_max=2 * group_bytes(small) + group_bytes(large))
    started(it, 0, 1, 2, 3)
    put(it, 0, (0,))
    put(it, 1, (0,))
    dropped = it.put(msgspec.structs.replace(large, id="a/2", seed=2), 0.0)
    assert dropped == ()
    dropped = it.put(msgspec.structs.replace(large, id="a/3", seed=3), 0.0)
    assert [(each.group.seed, each.cause) for each in dropped] == [(0, FULL), (1, FULL), (2, FULL)]
    it.check()


@pytest.mark.parametrize(
    ("turns", "tokens", "vocabulary", "version"),
    [(2, 4, 100, 3), (8, 6, 100, 3), (10, 100, 50_000, 500), (1, 500, 300, 3)],
)
def test_the_estimate_of_memory_is_what_python_takes(turns: int, tokens: int, vocabulary: int, version: int) -> None:
    chance = random.Random(7)

    def turn() -> Turn:
        return Turn(
            observation="what is there?" * 3,
            observation_tokens=tuple(chance.randrange(vocabulary) for _ in range(tokens)),
            action="x" * tokens,
            tokens=tuple(chance.randrange(vocabulary) for _ in range(tokens)),
            logprobs=tuple(-chance.random() for _ in range(tokens)),
            versions=(version,) * tokens,
            engine="first",
            decode_s=chance.random(),
        )

    def played(index: int) -> Trajectory:
        spans = tuple(
            Span(stage=Stage.STEP, began_s=chance.random(), ended_s=chance.random(), waited_for="concurrency of a")
            for _ in range(3 * turns)
        )
        plain = member("a/0", index, (version,))
        return msgspec.structs.replace(
            plain, turns=tuple(turn() for _ in range(turns)), spans=spans, metrics={"m": 0.5}
        )

    encoded = msgspec.msgpack.encode(msgspec.structs.replace(group(ticket(0)), members=tuple(map(played, range(8)))))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        decoded = msgspec.msgpack.decode(encoded, type=Group)
        took = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert took / 1.5 <= group_bytes(decoded) <= took * 1.5


# ---- going back -----------------------------------------------------------------------------------------------------


def test_after_a_rollback_what_was_consumed_since_returns_unless_it_is_of_the_lost_lineage() -> None:
    it = buffer(batch=2, staleness_bound=1)
    started(it, 0, 1, 2, 3)
    for number in range(4):
        put(it, number, (0,))
    it.finish_step(taken(it))  # 0 and 1; version 1
    saved = it.state()
    batch = taken(it)
    it.finish_step(batch)  # 2 and 3; version 2
    started(it, 4, 5, 6)
    put(it, 4, (1,))
    put(it, 5, (1, 2))
    dropped = it.rollback(saved, batch.groups, 9.0)
    assert [(each.group.seed, each.cause) for each in dropped] == [(5, LOST_LINEAGE)]
    assert it.version == 1 and it.trained_groups == 2
    assert numbers(it.waiting) == [4, 2, 3] and [each.number for each in it.in_flight] == [6]
    assert numbers(taken(it).groups) == [2, 3]
    it.check()


def test_what_was_consumed_since_and_was_not_kept_is_counted_as_lost() -> None:
    it = buffer(batch=1, staleness_bound=1)
    saved = it.state()
    started(it, 0)
    put(it, 0, (0,))
    it.finish_step(taken(it))
    assert it.rollback(saved, (), 0.0) == ()
    assert it.dropped == {LOST_LINEAGE: 1} and it.trained_groups == 0
    it.check()


def test_a_group_that_the_surviving_weights_were_trained_on_never_returns() -> None:
    it = buffer(batch=1, staleness_bound=1)
    started(it, 0)
    put(it, 0, (0,))
    batch = taken(it)
    it.finish_step(batch)
    saved = it.state()
    it.rollback(saved, batch.groups, 0.0)
    assert it.waiting == () and it.trained_groups == 1


def test_a_new_process_goes_on_with_what_the_old_one_had_written_down() -> None:
    it = buffer(batch=2, staleness_bound=1)
    started(it, 0, 1, 2)
    put(it, 0, (0,))
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(it.state()), type=BufferState)
    log = [group(ticket(1), (0,)), group(ticket(3), (0,)), group(ticket(4), (0, 1))]
    again = SampleBuffer.restore(saved, now=0.0, batch=2, staleness_bound=1, bytes_max=MIB)
    dropped = again.rollback(saved, log, 0.0)
    assert [(each.group.seed, each.cause) for each in dropped] == [(4, LOST_LINEAGE)]
    assert numbers(again.waiting) == [0, 1, 3]
    assert [each.number for each in again.in_flight] == [2], "to be played again"
    assert [number for number in range(7) if not again.has_started(number)] == [5, 6]
    again.check()


def test_every_sample_dropped_by_smaller_bounds_is_reported_with_its_cause() -> None:
    """What is too old goes, then what has yet to be played, the newest first, then the oldest of what waits."""
    it = buffer(batch=4, staleness_bound=1)
    it.version = 1
    started(it, *range(8))
    for number, version in ((0, 0), (1, 1), (2, 1), (3, 1)):
        put(it, number, (version,))

    def left(batch: int) -> tuple[SampleBuffer, list[tuple[int, str]]]:
        again = SampleBuffer.restore(it.state(), now=0.0, batch=batch, staleness_bound=0, bytes_max=MIB)
        again.check()
        dropped = [(each.group.seed, each.cause) for each in again.drop_stale()]
        assert Counter(cause for _, cause in dropped) == again.dropped
        return again, dropped

    again, again_dropped = left(4)
    assert again_dropped == [(0, STALE), (7, FULL), (6, FULL), (5, FULL)]
    assert numbers(again.waiting) == [1, 2, 3] and [each.number for each in again.in_flight] == [4]
    again, again_dropped = left(2)
    assert again_dropped == [(0, STALE), (7, FULL), (6, FULL), (5, FULL), (4, FULL), (1, FULL)]
    assert numbers(again.waiting) == [2, 3] and again.in_flight == ()


def test_what_is_settled_is_saved_in_little_room() -> None:
    it = buffer(batch=4, staleness_bound=1)
    for number in range(4000):
        started(it, number)
        put(it, number, (it.version,))
        if it.is_ready(0.0):
            it.finish_step(taken(it))
    assert it.state().trained == ((0, 3999),) and it.trained_groups == 4000


@given(st.sets(st.integers(0, 40)))
def test_ranges_are_what_a_set_is(wanted: set[int]) -> None:
    ranges = NumberRanges()
    for number in sorted(wanted, key=lambda each: (each * 17) % 41):
        ranges.add(number)
    assert list(ranges) == sorted(wanted) and len(ranges) == len(wanted)
    assert [number in ranges for number in range(42)] == [number in wanted for number in range(42)]
    assert NumberRanges(ranges.ranges).ranges == ranges.ranges
    assert all(later[0] > sooner[1] + 1 for sooner, later in zip(ranges.ranges, ranges.ranges[1:], strict=False))


# ---- whatever happens -----------------------------------------------------------------------------------------------


class Checkpoint(msgspec.Struct):
    state: bytes
    consumed: set[int]
    """By the weights of it."""
    log: list[Group] = []
    """All that ended since, and some that it was trained on."""


class Life(RuleBasedStateMachine):
    """A buffer, perhaps with a twin that was restored from it and must do the same, and engines that lag behind."""

    @initialize(
        batch=st.integers(1, 3),
        staleness_bound=st.integers(0, 2),
        enforced=st.sampled_from([True, True, False]),
        groups_max=st.sampled_from([1, 4, 1000]),
        wait_s=st.sampled_from([None, 2.0]),
    )
    def begin(self, batch: int, staleness_bound: int, enforced: bool, groups_max: int, wait_s: float | None) -> None:
        self.batch, self.staleness_bound, self.enforced = batch, staleness_bound, enforced
        self.options: dict[str, Any] = {
            "batch": batch,
            "staleness_bound": staleness_bound,
            "enforces_staleness": enforced,
            "bytes_max": groups_max * group_bytes(group(ticket(0), (0,), (0,))),
            "batch_min": 1 if wait_s is not None else None,
            "wait_s": wait_s,
        }
        self.buffers = [SampleBuffer(**self.options)]
        self.now = 0.0
        self.number = self.number_max = self.engine = 0
        self.training: TrainingBatch | None = None
        self.consumed: set[int] = set()
        self.used: list[Group] = []
        """All that were ever trained on."""
        self.gone: set[int] = set()
        """Dropped, and reported or done by us."""
        self.begun_at: dict[int, int] = {}
        """What the engines had when a group began."""
        self.saved: Checkpoint | None = None
        self.save()

    @property
    def it(self) -> SampleBuffer:
        return self.buffers[0]

    def all(self, what: str, *arguments: Any) -> Any:
        """Of each of the twins; the same."""
        results = [getattr(each, what)(*arguments) for each in self.buffers]
        assert all(result == results[0] for result in results), f"{what} gives {results}"
        return results[0]

    def told(self, dropped: tuple[DroppedGroup, ...]) -> None:
        for each in dropped:
            assert each.group.seed not in self.gone | self.consumed, f"{each.group.id} is settled twice"
            self.gone.add(each.group.seed)

    # ---- groups ----

    @rule(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        for _ in range(count):
            if not self.all("may_start"):
                return
            while self.it.has_started(self.number):
                self.number += 1
            self.all("start", ticket(self.number))
            self.begun_at[self.number] = self.engine
            self.number += 1
            self.number_max = max(self.number_max, self.number)

    @precondition(lambda self: self.it.in_flight)
    @rule(data=st.data(), members=st.integers(0, 3))
    def end(self, data: st.DataObject, members: int) -> None:
        of = data.draw(st.sampled_from(self.it.in_flight))
        if not members:
            self.all("drop", of.group, "failed")
            self.gone.add(of.number)
            return
        began = min(self.begun_at[of.number], self.engine)
        self.end_with(of, [(began, self.engine)] + [(self.engine,)] * (members - 1))

    def end_with(self, of: GroupTicket, versions: list[tuple[int, ...]]) -> None:
        ended = group(of, *versions)
        if self.saved is not None:
            self.saved.log.append(ended)
        self.told(self.all("put", ended, self.now))

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def drop_stale(self) -> None:
        self.told(self.all("drop_stale"))

    # ---- steps ----

    @precondition(lambda self: self.training is None)
    @rule()
    def take(self) -> None:
        ready = self.all("is_ready", self.now)
        batch = self.all("take", self.now)
        assert (batch is not None) == ready
        if batch is None:
            return
        assert batch.version == self.it.version
        assert 1 <= len(batch.groups) <= self.batch
        assert len(batch.groups) == self.batch or self.options["wait_s"] is not None
        assert numbers(batch.groups) == sorted(numbers(batch.groups))
        if self.enforced:
            assert max(batch.staleness) <= self.staleness_bound
        assert not (self.consumed | self.gone).intersection(numbers(batch.groups)), "a group is used twice"
        self.training = batch

    @precondition(lambda self: self.training is not None)
    @rule()
    def trained(self) -> None:
        assert self.training is not None
        self.all("finish_step", self.training)
        self.consumed.update(numbers(self.training.groups))
        self.used += self.training.groups
        self.training = None

    @rule(chance=st.randoms(use_true_random=False), rounds=st.integers(1, 8))
    def go_round(self, chance: random.Random, rounds: int) -> None:
        """Much of this at once, as single events would seldom bring it together."""
        for _ in range(rounds):
            self.start(1000)
            for of in self.it.in_flight:
                if chance.random() < 0.6:
                    self.end_with(of, [(min(self.begun_at[of.number], self.engine), self.engine)])
            if self.training is None:
                self.take()
            if self.training is not None and chance.random() < 0.8:
                self.trained()
            if chance.random() < 0.5:
                self.update(False)

    @rule(early=st.booleans())
    def update(self, early: bool) -> None:
        """Engines may have new weights before the buffer is notified that the step is done."""
        self.engine = self.it.version + (1 if early and self.training is not None else 0)

    # ---- going back ----

    @precondition(lambda self: self.training is None)
    @rule()
    def save(self) -> None:
        self.drop_stale()
        state = self.it.state()
        assert all(each.version <= state.version for each in state.waiting)
        # Samples that were trained on already may be offered again.
        log = [each for each in self.used if each.seed in self.consumed][-4:]
        self.saved = Checkpoint(state=msgspec.msgpack.encode(state), consumed=set(self.consumed), log=log)

    @precondition(lambda self: self.training is None)
    @rule()
    def twin(self) -> None:
        self.drop_stale()
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.it.state()), type=BufferState)
        self.buffers = [self.it, SampleBuffer.restore(state, now=self.now, **self.options)]

    @rule(data=st.data())
    def trainer_is_lost(self, data: st.DataObject) -> None:
        assert self.saved is not None
        self.drop_stale()
        state = msgspec.msgpack.decode(self.saved.state, type=BufferState)
        kept = [each for each in self.saved.log if data.draw(st.integers(0, 3))]
        before = self.it.statistics().dropped.get(LOST_LINEAGE, 0)
        dropped = self.all("rollback", state, kept, self.now)
        # What was trained on since and is neither here nor reported as dropped was lost.
        revoked = self.consumed - self.saved.consumed
        self.consumed = set(self.saved.consumed)
        self.training = None
        self.told(dropped)
        missing = revoked - set(numbers(self.it.waiting)) - {each.group.seed for each in dropped}
        self.gone |= missing
        lost = sum(each.cause == LOST_LINEAGE for each in dropped) + len(missing)
        assert self.it.statistics().dropped.get(LOST_LINEAGE, 0) == before + lost
        self.came_back(state)

    @rule(data=st.data())
    def process_is_lost(self, data: st.DataObject) -> None:
        assert self.saved is not None
        state = msgspec.msgpack.decode(self.saved.state, type=BufferState)
        kept = [each for each in self.saved.log if data.draw(st.integers(0, 3))]
        self.buffers = [SampleBuffer.restore(state, now=self.now, **self.options)]
        self.consumed, self.training = set(self.saved.consumed), None
        dropped = [*state.dropped]
        self.gone = {number for first, last in dropped for number in range(first, last + 1)}
        self.told(self.all("drop_stale"))
        self.told(self.all("rollback", state, kept, self.now))
        self.number = 0
        self.came_back(state)

    def came_back(self, state: BufferState) -> None:
        self.engine = state.version
        assert self.it.version == state.version
        assert not self.consumed.intersection(numbers(self.it.waiting)), "a group would be trained on twice"
        for each in self.it.waiting:
            assert all(version <= state.version for one in each.members for version in one.versions)
        for of in self.it.in_flight:  # their members that began later are played again
            self.begun_at[of.number] = min(self.begun_at[of.number], self.engine)

    # ---- what holds always ----

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "buffers"):
            return
        for each in self.buffers:
            each.check()
        statistics = self.it.statistics()
        assert all(each.statistics() == statistics for each in self.buffers)
        assert (
            statistics.started - statistics.trained - sum(statistics.dropped.values())
            <= (self.staleness_bound + 1) * self.batch
        )
        assert statistics.trained == len(self.consumed)
        assert statistics.bytes <= self.options["bytes_max"] or statistics.waiting <= self.batch
        assert len(self.gone) <= sum(statistics.dropped.values())

    def teardown(self) -> None:
        """Nothing has vanished; and as long as groups keep ending, batches keep coming."""
        if not hasattr(self, "buffers"):
            return
        self.drop_stale()
        assert sum(self.it.dropped.values()) == len(self.gone), "one was dropped without a word"
        in_training = numbers(self.training.groups) if self.training is not None else []
        here = {of.number for of in self.it.in_flight} | set(numbers(self.it.waiting)) | set(in_training)
        assert here | self.consumed | self.gone == {
            number for number in range(self.number_max + 100) if self.it.has_started(number)
        }
        for _ in range(3):
            if self.training is not None:
                self.trained()
            self.update(False)
            for _ in range(2):  # once more, if what was in flight is too old
                self.start(1000)
                for of in self.it.in_flight:
                    self.end_with(of, [(self.engine,), (self.engine,)])
            self.take()
            assert self.training is not None, "no batch comes, although groups keep ending"
            self.holds()


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestLife = Life.TestCase
