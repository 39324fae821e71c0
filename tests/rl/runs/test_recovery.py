"""What a run goes on with: each group once, none silently lost, whatever happened before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rl.samples import group, run_state, ticket, waiting

from tangram.rl.buffer.number_ranges import NumberRanges
from tangram.rl.buffer.records import BufferState
from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.runs.checkpoints import Checkpoint, RunState
from tangram.rl.runs.recovery import recover_buffer
from tangram.rl.runs.sample_log import GroupLost, GroupPut, SampleEntry, SampleLog, SampleLogs
from tangram.rl.trajectories.training_batch import TrainingBatch, strip_for_training


def checkpoint(state: RunState, *warnings: str) -> Checkpoint:
    return Checkpoint(path=Path("checkpoints") / f"{state.step:08d}", state=state, warnings=warnings)


def ids(state: BufferState) -> list[str]:
    return [each.group.id for each in state.waiting]


# ---- one by one ----


def test_what_waited_and_what_was_put_since_waits() -> None:
    back = recover_buffer(checkpoint(run_state(40, waiting=[waiting(3, 39)])), [GroupPut(group=group(4, 39, 40))])
    assert ids(back.buffer) == ["lake/3", "lake/4"] and back.dropped == {}
    assert [each.version for each in back.buffer.waiting] == [39, 39]


def test_what_has_a_token_of_weights_that_are_lost_is_dropped_with_that_cause() -> None:
    back = recover_buffer(checkpoint(run_state(40)), [GroupPut(group=group(4, 40, 41)), GroupPut(group=group(5, 40))])
    assert ids(back.buffer) == ["lake/5"] and back.dropped == {"lake/4": "lost_lineage"}
    assert back.buffer.dropped == ((4, 4),) and back.buffer.dropped_by_cause == {"lost_lineage": 1}
    assert back.buffer.trajectories_discarded == 2 and back.buffer.tokens_discarded == 4


def test_samples_that_the_checkpoint_lists_as_trained_on_or_dropped_do_not_return() -> None:
    state = run_state(40, trained=[(0, 4)], dropped=[(6, 6)])
    entries: list[SampleEntry] = [
        GroupPut(group=group(4, 40)),
        GroupPut(group=group(6, 40)),
        GroupLost(id="lake/2", cause="failed"),
    ]
    back = recover_buffer(checkpoint(state), entries)
    assert back.buffer == state.buffer and back.dropped == {}


def test_what_was_lost_since_stays_lost() -> None:
    state = run_state(40, waiting=[waiting(3, 39)], in_flight=[5])
    entries = [
        GroupLost(id="lake/3", cause="stale"),
        GroupLost(id="lake/5", cause="failed"),
        GroupLost(id="lake/9", cause="failed"),
    ]
    back = recover_buffer(checkpoint(state), entries)
    assert ids(back.buffer) == [] and back.buffer.in_flight == ()
    assert back.buffer.dropped == ((3, 3), (5, 5), (9, 9))
    assert back.buffer.dropped_by_cause == {"stale": 1, "failed": 2} and back.dropped["lake/9"] == "failed"


def test_episodes_in_flight_are_played_again() -> None:
    back = recover_buffer(checkpoint(run_state(40, in_flight=[5, 6])), [GroupPut(group=group(6, 40))])
    assert back.buffer.in_flight == (ticket(5),) and ids(back.buffer) == ["lake/6"]


def test_an_entry_that_is_there_twice_counts_once() -> None:
    entries = [GroupPut(group=group(4, 40)), GroupLost(id="lake/5", cause="stale")] * 2
    back = recover_buffer(checkpoint(run_state(40, waiting=[waiting(4, 40)])), entries)
    assert ids(back.buffer) == ["lake/4"] and back.dropped == {"lake/5": "stale"}


def test_the_text_contains_all_of_it(tmp_path: Path) -> None:
    with SampleLog(tmp_path, 40) as log:
        for each in (group(4, 40), group(5, 41), group(6, 41)):
            log.append(each)
        log.append_lost("lake/7", "failed")
    with log.path.open("ab") as file:
        file.write(b"torn")
    state = run_state(40, waiting=[waiting(3, 39)], in_flight=[8])
    back = recover_buffer(checkpoint(state, "checkpoint 60 is damaged"), SampleLogs(tmp_path, 40))
    notes = f"checkpoint 60 is damaged; {log.path}: 4 bytes at its end could not be read"
    assert back.describe(SampleBuffer.restore(back.buffer, now=0.0, **BOUNDS).statistics()) == (
        "from step 40, version 40: 2 groups wait to be trained on, 1 in flight are played again, "
        f"1 dropped (failed), 2 dropped (lost_lineage); {notes}"
    )
    smaller = SampleBuffer.restore(back.buffer, now=0.0, batch=1, staleness_bound=0, bytes_max=1 << 30)
    assert back.describe(smaller.statistics()) == (
        "from step 40, version 40: 1 groups wait to be trained on, 0 in flight are played again, "
        f"1 dropped (failed), 1 dropped (full), 2 dropped (lost_lineage), 1 dropped (stale); {notes}"
    )


# ---- any history ----

BATCH, ALPHA = 2, 2
BOUNDS = dict(batch=BATCH, staleness_bound=ALPHA, bytes_max=1 << 30)


class World:
    """A run that is killed again and again. What survives a kill is `disk`; `lineage` is what really happened to the
    weights, and says what may be trained on."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.buffer = SampleBuffer(**BOUNDS)
        self.next = 0
        self.again: list[int] = []
        self.playing: dict[int, list[int]] = {}
        """Versions of the tokens so far, by number."""
        self.weights: dict[int, int] = {0: 0}
        """By version, which weights these are: those of a lost lineage were others."""
        self.made = 0
        self.sampled_by: dict[int, list[int]] = {}
        """By number, the weights that sampled its tokens."""
        self.trained_at: dict[int, int] = {}
        """By number, the version that was made of it."""
        self.training: TrainingBatch | None = None
        self.logs: dict[int, list[SampleEntry]] = {0: []}
        self.disk: list[RunState] = []
        self.saving: RunState | None = None
        self.save()
        self.saved()

    # ---- what the owner of a run does ----

    def start(self) -> None:
        if not self.buffer.may_start() and not self.again:
            return
        if self.again:
            number = self.again.pop()
        else:
            while self.buffer.has_started(self.next):
                self.next += 1
            number, self.next = self.next, self.next + 1
            self.buffer.start(ticket(number))
        self.playing[number], self.sampled_by[number] = [], []
        self.write(number)

    def write(self, number: int) -> None:
        version = max(self.weights)
        self.playing[number].append(version)
        self.sampled_by[number].append(self.weights[version])

    def play(self) -> None:
        if self.playing:
            self.write(self.chance.choice(sorted(self.playing)))

    def put(self) -> None:
        if self.playing:
            number = self.chance.choice(sorted(self.playing))
            ended = group(number, *self.playing.pop(number))
            self.log(GroupPut(group=strip_for_training(ended)))
            self.tell(self.buffer.put(ended, 0.0))

    def lose(self) -> None:
        if self.playing:
            number = self.chance.choice(sorted(self.playing))
            del self.playing[number]
            self.log(GroupLost(id=f"lake/{number}", cause="failed"))
            self.buffer.drop(f"lake/{number}", "failed")

    def take(self) -> None:
        if self.training is None and self.saving is None:
            self.training = self.buffer.take(0.0)
            self.tell(self.buffer.drop_stale())

    def train(self) -> None:
        if self.training is None:
            return
        version = self.training.version + 1
        for each in self.training.groups:
            number = int(each.id.split("/")[1])
            assert number not in self.trained_at, f"{number} is trained on twice"
            for sampled in self.sampled_by[number]:
                assert sampled in self.weights.values(), f"{number} was sampled by weights that are lost"
            self.trained_at[number] = version
        self.buffer.finish_step(self.training)
        self.training, self.made = None, self.made + 1
        self.weights[version] = self.made
        self.tell(self.buffer.drop_stale())

    def tell(self, dropped: Sequence[object]) -> None:
        for each in dropped:
            self.log(GroupLost(id=each.group.id, cause=each.cause))  # type: ignore[attr-defined]

    def log(self, entry: SampleEntry) -> None:
        self.logs[max(self.logs)].append(entry)

    def save(self) -> None:
        step = self.buffer.version
        if self.training is None and self.saving is None and step not in [each.step for each in self.disk]:
            state = run_state(step, ticket_next=self.next)
            self.saving = msgspec.structs.replace(state, buffer=self.buffer.state())
            self.logs.setdefault(step, [])

    def saved(self) -> None:
        if self.saving is not None:
            self.disk = [*self.disk, self.saving][-2:]
            self.saving = None
            self.logs = {step: log for step, log in self.logs.items() if step >= self.disk[0].step}

    # ---- what happens to it ----

    def fail_to_save(self) -> None:
        self.saving = None

    def kill(self) -> None:
        started = set(range(self.next))
        if self.chance.random() < 0.3:  # the end of the log did not reach the disk
            log = self.logs[max(self.logs)]
            del log[len(log) - self.chance.randrange(len(log) + 1) :]
        if len(self.disk) > 1 and self.chance.random() < 0.3:  # the newest is damaged
            self.disk.pop()
        state = self.disk[-1]
        entries = [each for step, log in sorted(self.logs.items()) if step >= state.step for each in log]
        back = recover_buffer(checkpoint(state), entries)
        self.logs = {step: log for step, log in self.logs.items() if step < state.step} | {state.step: entries}
        self.weights = {version: made for version, made in self.weights.items() if version <= state.version}
        self.trained_at = {number: at for number, at in self.trained_at.items() if at <= state.version}
        self.playing, self.training, self.saving = {}, None, None
        self.buffer = SampleBuffer.restore(back.buffer, now=0.0, **BOUNDS)
        self.tell(self.buffer.drop_stale())
        self.next = state.ticket_next
        self.again = [each.number for each in self.buffer.in_flight]
        self.require_accounted(started)

    def require_accounted(self, started: set[int]) -> None:
        """Each is trained on, waits, is in flight or dropped, and only one of these; or it is played as if it were
        new."""
        self.buffer.check()
        state = self.buffer.state()
        trained, dropped = set(NumberRanges(state.trained)), set(NumberRanges(state.dropped))
        waits = {int(each.group.id.split("/")[1]) for each in state.waiting}
        flies = {each.number for each in state.in_flight}
        places = [trained, dropped, waits, flies]
        assert sum(map(len, places)) == len(set.union(*places)), "in two places"
        assert trained == set(self.trained_at), "what the surviving weights were trained on"
        assert sum(state.dropped_by_cause.values()) == len(dropped), "dropped with a cause"
        missing = started - set.union(*places)
        assert all(number >= self.next for number in missing), f"{missing} are lost"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_in_any_history_each_group_is_trained_on_once_and_none_is_lost(seed: int) -> None:
    require_history(seed)


@pytest.mark.parametrize("seed", range(12))
def test_in_these_histories_too(seed: int) -> None:
    world = require_history(seed)
    assert world.made > 3, "it trained"


def require_history(seed: int) -> World:
    world = World(seed)
    usual = [world.start] * 6 + [world.play] * 6 + [world.put] * 5 + [world.lose, world.take, world.take]
    usual += [world.train, world.train, world.save, world.saved, world.saved, world.fail_to_save]
    for _ in range(400):
        do = world.kill if world.chance.random() < 0.02 else world.chance.choice(usual)
        do()
        world.buffer.check()
    world.kill()
    return world
