"""Training: the bound on age, what is admitted, and that nothing is trained on twice or lost after any death."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.rl.train.fakes import FakeTrainer, TrainingProcess, settings_of, training_process

from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.runs.checkpoints import folder_name, read_checkpoint, steps_in
from tangram.rl.runs.metrics_lines import Evaluated, Noticed, RunEnded, Trained
from tangram.rl.trajectories.training_batch import TrainingBatch

MODES = ("sync", "sync+", "one-off", "start-bound", "async")


def run_whole(settings: TrainSettings, folder: Path, trainer: FakeTrainer) -> TrainingProcess:
    async def whole() -> TrainingProcess:
        async with training_process(settings, folder, trainer) as made:
            await made.training.run()
            made.training.buffer.check()
            return made

    return asyncio.run(whole())


def staleness_max(batches: list[TrainingBatch]) -> int:
    return max(max(batch.staleness) for batch in batches)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_the_configured_number_of_steps(mode: str, tmp_path: Path) -> None:
    trainer = FakeTrainer()
    made = run_whole(settings_of(mode), tmp_path, trainer)
    assert [line.step for line in made.of(Trained)] == list(range(1, 13))
    assert made.of(RunEnded)[0].cause == "steps"
    assert len(trainer.trained) == len(set(trainer.trained)) == 12 * 3
    assert made.engine.active_requests == ()


@pytest.mark.parametrize(("mode", "most"), [("sync", 0), ("sync+", 0), ("one-off", 1)])
def test_modes_without_a_stream_keep_their_staleness(mode: str, most: int, tmp_path: Path) -> None:
    trainer = FakeTrainer()
    run_whole(settings_of(mode), tmp_path, trainer)
    assert staleness_max(trainer.batches) == most
    for batch in trainer.batches:
        for group in batch.groups:
            assert len({version for each in group.members for version in each.versions}) == 1, "played by one version"


@pytest.mark.parametrize("mode", MODES)
def test_with_alpha_0_no_mode_trains_on_anything_older_though_batches_are_small(mode: str, tmp_path: Path) -> None:
    settings = settings_of(mode, alpha=0, batch=4, batch_min=1, batch_wait_s=0.001, steps=20)
    trainer = FakeTrainer(step_s=0.0)
    run_whole(settings, tmp_path, trainer)
    assert staleness_max(trainer.batches) <= settings.training.staleness_bound
    assert len(trainer.trained) == len(set(trainer.trained))


@pytest.mark.parametrize("seed", range(6))
def test_nothing_older_than_alpha_is_trained_on(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    alpha = chance.choice((0, 1, 2, 3))
    settings = settings_of(
        alpha=alpha, seed=seed, fails=chance.choice((0.0, 0.05, 0.2)), batch=chance.choice((1, 2, 4)), steps=20,
        step_s=chance.choice((0.001, 0.01)), pull=chance.choice(("at_once", "after_batch")),
    )  # fmt: skip
    trainer = FakeTrainer(step_s=chance.choice((0.0, 0.005, 0.02)))
    made = run_whole(settings, tmp_path, trainer)
    assert staleness_max(trainer.batches) <= alpha
    assert len(trainer.trained) == len(set(trainer.trained)) == 20 * settings.training.batch
    for line in made.of(Trained):
        assert line.in_flight + line.buffered <= (alpha + 1) * settings.training.batch


def test_the_order_that_was_published_first_makes_samples_older(tmp_path: Path) -> None:
    ages = {}
    for pull in ("at_once", "after_batch"):
        trainer = FakeTrainer(step_s=0.0)
        run_whole(settings_of(alpha=2, pull=pull, steps=20, step_s=0.01), tmp_path / pull, trainer)
        ages[pull] = sum(sum(batch.staleness) for batch in trainer.batches)
    assert ages["after_batch"] > ages["at_once"]


def test_a_run_is_looked_at_while_it_goes_on(tmp_path: Path) -> None:
    made = run_whole(settings_of("sync+"), tmp_path, FakeTrainer())
    assert [line.step for line in made.of(Evaluated)] == [0, 4, 8, 12]
    assert made.of(Evaluated)[0].episodes == {"random": 2}


def test_a_batch_may_be_small_once_it_has_waited(tmp_path: Path) -> None:
    settings = settings_of(batch=4, batch_min=1, batch_wait_s=0.001, steps=10)
    trainer = FakeTrainer(step_s=0.0)
    run_whole(settings, tmp_path, trainer)
    assert min(len(batch.groups) for batch in trainer.batches) < 4


def test_a_run_ends_after_its_seconds(tmp_path: Path) -> None:
    made = run_whole(settings_of(steps=100_000, seconds_max=0.3), tmp_path, FakeTrainer())
    assert made.of(RunEnded)[0].cause == "seconds"


# ---- deaths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_dies_goes_on_from_the_last_checkpoint(mode: str, tmp_path: Path) -> None:
    left = [4, 7, 7, 11]

    def dies(version: int) -> bool:
        if left and version == left[0]:
            left.pop(0)
            return True
        return False

    trainer = FakeTrainer(dies)
    made = run_whole(settings_of(mode, every=3, steps=12), tmp_path, trainer)
    assert not left and trainer.starts == 5
    assert [batch.version for batch in trainer.batches] == list(range(12))
    assert len(trainer.trained) == len(set(trainer.trained)) == 36
    assert [line.kind for line in made.of(Noticed)] == ["rollback"] * 4
    dropped = made.of(RunEnded)[0].dropped_so_far
    assert dropped == made.training.buffer.dropped, "also of what was given up"
    counts = [sum(line.dropped_so_far.values()) for line in made.of(Trained)]
    assert counts == sorted(counts) and counts[-1] <= sum(dropped.values()), "what was dropped stays dropped"
    if mode == "async":
        assert staleness_max(trainer.batches) <= 1
    assert_lineage(trainer.batches)


def assert_lineage(batches: list[TrainingBatch]) -> None:
    """No token is of weights that the step did not come from."""
    for batch in batches:
        for group in batch.groups:
            for member in group.members:
                assert max(member.versions) <= batch.version


def test_a_trainer_that_always_dies_ends_the_run(tmp_path: Path) -> None:
    async def whole() -> None:
        async with training_process(settings_of(), tmp_path, FakeTrainer(lambda version: version == 2)) as made:
            with pytest.raises(ManagerError, match="the trainer died 4 times and got no further: trainer: killed"):
                await made.training.run()
            assert made.of(RunEnded)[0].cause.startswith("the trainer died")

    asyncio.run(whole())


@pytest.mark.parametrize("seed", range(8))
def test_no_sample_is_trained_on_twice_whenever_the_run_is_killed(seed: int, tmp_path: Path) -> None:
    """The process is killed at random moments and resumed; the trainer dies as well."""
    chance = random.Random(seed)
    mode, alpha = chance.choice((("async", 1), ("async", 2), ("one-off", 1), ("start-bound", 1), ("sync+", 0)))
    settings = settings_of(mode, alpha=alpha, seed=seed, fails=0.05, every=chance.choice((1, 2, 5)), steps=30)
    trainer = FakeTrainer(lambda version: chance.random() < 0.05)

    async def life(resume: bool, seconds: float) -> bool:
        """Whether it came to its end."""
        async with training_process(settings, tmp_path, trainer, resume=resume) as made:
            running = asyncio.create_task(made.training.run())
            await asyncio.wait({running}, timeout=seconds)
            ended = running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            made.training.buffer.check()
            return ended

    lives = 0
    while not asyncio.run(life(lives > 0, chance.uniform(0.02, 0.4) * (1 + lives / 10))):  # longer on a slow machine
        lives += 1
    assert [batch.version for batch in trainer.batches] == list(range(30))
    assert len(trainer.trained) == len(set(trainer.trained)) == 90
    assert_lineage(trainer.batches)
    if mode == "async":
        assert staleness_max(trainer.batches) <= alpha


def test_what_a_resumption_with_smaller_bounds_drops_is_in_the_counts_of_a_step(tmp_path: Path) -> None:
    trainer = FakeTrainer()

    async def killed() -> None:
        async with training_process(settings_of(alpha=4, steps=100, step_s=0.02), tmp_path, trainer) as made:
            running = asyncio.create_task(made.training.run())
            await trainer.reached(8)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def gone_on() -> TrainingProcess:
        settings = settings_of(alpha=0, batch=2, steps=len(trainer.batches) + 2, step_s=0.02)
        async with training_process(settings, tmp_path, trainer, resume=True) as made:
            await made.training.run()
            return made

    asyncio.run(killed())
    folder = tmp_path / "checkpoints"
    counted = Counter(read_checkpoint(folder / folder_name(steps_in(folder)[-1])).state.buffer.dropped_by_cause)
    made = asyncio.run(gone_on())
    for line in made.of(Trained):
        counted.update(line.dropped)
        assert counted == line.dropped_so_far
    assert counted["full"] + counted["stale"] + counted["lost_lineage"] > 0, "there were 15 groups, and are 2"


def test_an_engine_that_dies_costs_no_sample(tmp_path: Path) -> None:
    async def whole() -> TrainingProcess:
        async with training_process(settings_of(steps=30), tmp_path, FakeTrainer()) as made:
            running = asyncio.create_task(made.training.run())
            for _ in range(2):
                await asyncio.sleep(0.05)
                made.engine.die()
            await running
            return made

    made = asyncio.run(whole())
    assert len(set(made.trainer.trained)) == 90
    assert any(line.kind == "engine" and "was lost" in line.text for line in made.of(Noticed))


def test_a_task_that_never_brings_anything_is_named(tmp_path: Path) -> None:
    async def whole() -> None:
        async with training_process(settings_of(fails=1.0), tmp_path, FakeTrainer()) as made:
            with pytest.raises(ManagerError, match="task random: 17 groups in a row ended without members"):
                await made.training.run()

    asyncio.run(whole())


def test_a_group_that_lost_all_members_but_one_is_no_sample_and_one_that_lacks_some_is_counted(tmp_path: Path) -> None:
    """Nothing is played again, and half of all episodes fail."""
    trainer, settings = FakeTrainer(), settings_of(steps=6, fails=0.3, evaluations=0)
    groups = GroupSettings(size=3, refills_max=0)
    made = run_whole(msgspec.structs.replace(settings, groups=groups), tmp_path, trainer)
    sizes = [[len(group.members) for group in batch.groups] for batch in trainer.batches]
    assert {size for batch in sizes for size in batch} == {2, 3}
    assert [line.short for line in made.of(Trained)] == [batch.count(2) for batch in sizes]


def test_a_stopped_run_can_be_resumed(tmp_path: Path) -> None:
    trainer, settings = FakeTrainer(), settings_of(steps=40)

    async def stopped() -> None:
        async with training_process(settings, tmp_path, trainer) as made:
            running = asyncio.create_task(made.training.run())
            await trainer.reached(5)
            made.training.stop("interrupted")
            assert (await running).cause == "interrupted"

    async def gone_on() -> TrainingProcess:
        async with training_process(settings, tmp_path, trainer, resume=True) as made:
            await made.training.run()
            return made

    asyncio.run(stopped())
    done = len(trainer.batches)
    made = asyncio.run(gone_on())
    assert made.of(Trained)[0].step == done + 1, "no step is lost"
    assert len(set(trainer.trained)) == 120


def test_a_run_that_was_over_is_over_again_and_may_have_more_steps(tmp_path: Path) -> None:
    trainer = FakeTrainer()

    async def life(steps: int, looked: int = -1) -> TrainingProcess:
        resume = bool(trainer.starts)
        async with training_process(settings_of(steps=steps), tmp_path, trainer, resume=resume, looked=looked) as made:
            assert (await made.training.run()).cause == "steps"
            return made

    asyncio.run(life(4))
    assert asyncio.run(life(4)).of(Trained) == []
    assert [line.step for line in asyncio.run(life(4)).of(Evaluated)] == [4]
    assert asyncio.run(life(4, looked=4)).of(Evaluated) == [], "it has been looked at"
    assert [line.step for line in asyncio.run(life(7)).of(Trained)] == [5, 6, 7]
    assert len(trainer.trained) == len(set(trainer.trained)) == 7 * 3
