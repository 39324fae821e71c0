"""Buffer, rollout and engine together: whatever is slow, fails or is lost, no batch is older than it may be.

A small training loop on virtual time. Environments, rewards and the engine are slow and fail by chance, updates come
late, the trainer dies now and then and goes back to its last checkpoint. One seed gives one run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.rl.rollout.world import CODEC, PATH, Judge, Plan, World, chance, run

from tangram.clock import VirtualLoop
from tangram.rl.buffer.records import BufferState, DroppedGroup
from tangram.rl.buffer.sample_buffer import SampleBuffer
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.inference.engines.fake import FakeEngine, text_script
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest, PolicyWeights
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.rl.trajectories.training_batch import TrainingBatch
from tangram.rl.trajectories.trajectory import Ending, Group, GroupTicket

BATCH = 3
STEPS = 20
SEEDS = st.integers(0, 2**31)


class Remembering:
    """An engine of which it is known when each request came."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.asked_s: dict[str, float] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked_s[request.id] = asyncio.get_running_loop().time()
        return await self.engine.generate(request)


class Run:
    """A training run without a model."""

    def __init__(self, seed: int, staleness_bound: int, *, enforced: bool = True, deaths: float = 0.0) -> None:
        self.chance = chance("run", seed)
        self.staleness_bound, self.enforced, self.deaths = staleness_bound, enforced, deaths
        self.buffer = SampleBuffer(
            batch=BATCH, staleness_bound=staleness_bound, enforces_staleness=enforced, bytes_max=1 << 30
        )
        self.world = World(lambda trajectory, number: self.plan(seed, trajectory))
        self.engine = FakeEngine(text_script(CODEC, lambda request: "go"), token_s=self.chance.choice([0.1, 1.0]))
        self.remembering = Remembering(self.engine)
        self.settings = RolloutSettings(
            engines=(EngineSettings(context_max=256),),
            groups=GroupSettings(size=2, refills_max=4, on_loss=self.chance.choice(["refill", "close", "drop"])),
            tasks=tuple(TaskSettings(name=name, environment=PATH, retries=0) for name in ("a", "b")),
        )
        self.upcoming: Iterator[GroupTicket] = tickets(self.settings, seed)
        self.changed = asyncio.Event()
        self.playing: set[asyncio.Task[None]] = set()
        self.ended: Counter[str] = Counter()
        """Groups, by id."""
        self.log: list[Group] = []
        self.dropped: list[DroppedGroup] = []
        self.batches: list[TrainingBatch] = []
        """Of the lineage that survived."""
        self.staleness = 0
        """The highest."""
        self.rollbacks: list[tuple[float, int]] = []
        """When, and to which version."""
        self.over = False

    def plan(self, seed: int, trajectory: str) -> Plan:
        draw = chance(seed, trajectory)
        slow = draw.random() < 0.1
        return Plan(
            turns=draw.randint(1, 4),
            reset_s=draw.uniform(0.0, 2.0),
            step_s=draw.expovariate(1.0) * (20.0 if slow else 1.0),
            fail=draw.choice(["reset", "step"]) if draw.random() < 0.1 else "",
        )

    async def go(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await self.engine.start(PolicyWeights(version=0, folder=""))
        judge = Judge(0.5, fails=lambda trajectory: chance("judge", trajectory).random() < 0.05)
        rollout = Rollout(
            self.settings,
            self.remembering,
            CODEC,
            on_end=self.world.ended.append,
            clock=loop.clock,
            rewards={"a": judge, "b": judge},
        )
        async with rollout:
            feeding = asyncio.create_task(self.feed(rollout))
            await self.train(rollout)
            self.over = True
            self.changed.set()
            await feeding
            await asyncio.gather(*self.playing)
        self.world.check(rollout)
        self.check_at_the_end()

    # ---- playing ----

    async def feed(self, rollout: Rollout) -> None:
        while not self.over:
            while self.buffer.may_start():
                ticket = next(self.upcoming)
                self.buffer.start(ticket)
                task = asyncio.create_task(self.play(rollout, ticket))
                self.playing.add(task)
                task.add_done_callback(self.playing.discard)
            self.check()
            self.changed.clear()
            await self.changed.wait()

    async def play(self, rollout: Rollout, ticket: GroupTicket) -> None:
        group = await rollout.play(ticket)
        self.ended[group.id] += 1
        if group.members:
            self.log.append(group)
            self.dropped += self.buffer.put(group, self.now())
        else:
            self.buffer.drop(group.id, "failed", group)
        self.check()
        self.changed.set()

    # ---- training ----

    async def train(self, rollout: Rollout) -> None:
        saved, steps = self.buffer.state(), 0
        while steps < STEPS:
            steps += 1
            batch = await self.batch()
            self.expire(rollout)
            await asyncio.sleep(self.chance.uniform(0.0, 6.0))
            if self.chance.random() < self.deaths:
                await self.go_back(rollout, saved)
                continue
            self.buffer.finish_step(batch)
            self.batches.append(batch)
            self.expire(rollout)
            self.changed.set()
            await self.update(self.buffer.version)
            if self.chance.random() < 0.3:
                saved = self.buffer.state()

    async def batch(self) -> TrainingBatch:
        while (batch := self.buffer.take(self.now())) is None:
            self.changed.set()  # what it dropped made room
            await asyncio.sleep(0.25)
        self.check_batch(batch)
        return batch

    async def update(self, version: int) -> None:
        await asyncio.sleep(self.chance.choice([0.0, 0.0, 1.5]))
        await self.engine.suspend()
        await asyncio.sleep(self.chance.uniform(0.0, 0.5))
        await self.engine.update(PolicyWeights(version=version, folder=""))
        await self.engine.resume()

    def expire(self, rollout: Rollout) -> None:
        self.dropped += self.buffer.drop_stale()
        if self.enforced:
            rollout.discard_older_than(self.buffer.version_min, "it is too old")

    async def go_back(self, rollout: Rollout, saved: BufferState) -> None:
        await self.update(saved.version)
        rollout.discard_newer_than(saved.version, "its weights are lost")
        self.dropped += self.buffer.rollback(saved, self.log, self.now())
        self.rollbacks.append((self.now(), saved.version))
        self.batches = self.batches[: saved.version]
        self.expire(rollout)
        self.changed.set()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- what holds ----

    def check(self) -> None:
        self.buffer.check()
        statistics = self.buffer.statistics()
        assert (
            statistics.started - statistics.trained - sum(statistics.dropped.values())
            <= (self.staleness_bound + 1) * BATCH
        )

    def check_batch(self, batch: TrainingBatch) -> None:
        self.check()
        assert len(batch.groups) == BATCH and batch.version == len(self.batches)
        self.staleness = max(self.staleness, *batch.staleness)
        if self.enforced:
            assert self.staleness <= self.staleness_bound, f"a trajectory is {self.staleness} versions old"
        for each in (each for group in batch.groups for each in group.members):
            assert max(each.versions) <= batch.version
            for number, turn in enumerate(each.turns):
                asked_s = self.remembering.asked_s[f"{each.id}/{number + 1}"]
                for lost_s, version in self.rollbacks:
                    assert asked_s >= lost_s or max(turn.versions) <= version, f"{each.id} is of a lost lineage"

    def check_at_the_end(self) -> None:
        used = Counter(group.id for batch in self.batches for group in batch.groups)
        lost_ids = Counter(dropped.group.id for dropped in self.dropped)
        assert max(used.values(), default=0) <= 1, "a group was trained on twice"
        assert max(lost_ids.values(), default=0) <= 1 and not used.keys() & lost_ids.keys(), "a group was settled twice"
        assert set(self.ended.values()) == {1}, "a group ended twice"
        self.dropped += self.buffer.drop_stale()
        statistics = self.buffer.statistics()
        assert statistics.in_flight == 0 and statistics.started == len(self.ended)
        assert statistics.trained == len(used)
        lost = statistics.dropped.get("failed", 0)
        assert sum(statistics.dropped.values()) == lost + len({dropped.group.id for dropped in self.dropped})
        assert statistics.started == statistics.trained + sum(statistics.dropped.values()) + statistics.waiting


def play(seed: int, staleness_bound: int, *, enforced: bool = True, deaths: float = 0.0) -> Run:
    async def playing() -> Run:
        it = Run(seed, staleness_bound, enforced=enforced, deaths=deaths)
        await it.go()
        return it

    return run(playing())


@pytest.mark.parametrize("staleness_bound", [0, 1, 2])
@given(seed=SEEDS)
@examples(max_examples=5)
def test_no_batch_is_older_than_alpha(staleness_bound: int, seed: int) -> None:
    it = play(seed, staleness_bound)
    assert len(it.batches) == STEPS


@pytest.mark.parametrize("staleness_bound", [0, 1, 2])
@given(seed=SEEDS)
@examples(max_examples=5)
def test_nothing_is_trained_on_twice_and_nothing_of_lost_weights_when_trainers_die(
    staleness_bound: int, seed: int
) -> None:
    play(seed, staleness_bound, deaths=0.2)


def test_these_runs_are_hard_enough_to_be_worth_it() -> None:
    """If age is looked at at the start only, batches are older than alpha; what is too old is stopped in flight and in
    the buffer; and trainers do die."""
    assert max(play(seed, 1, enforced=False).staleness for seed in range(3)) > 1
    it = [play(seed, 1, deaths=0.2) for seed in range(3)]
    endings = Counter(each.ending for one in it for each in one.world.ended)
    assert endings[Ending.STALE] > 0 and endings[Ending.ENV_FAILED] > 0
    causes = Counter(dropped.cause for one in it for dropped in one.dropped)
    assert sum(len(one.rollbacks) for one in it) > 0 and causes["lost_lineage"] > 0
