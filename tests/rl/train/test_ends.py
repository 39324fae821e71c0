"""Training, with fakes: what is under way when it ends, goes back or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.rl.processes import until
from tests.rl.train.fakes import FakeTrainer, TrainingProcess, settings_of, training_process

from tangram.errors import InvalidConfig, ManagerError
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.runs.metrics_lines import Evaluated, Noticed, RunEnded, Trained, WarmStartChecked
from tangram.rl.runs.sample_log import GroupLost, SampleLogs
from tangram.rl.train import evaluator
from tangram.rl.train.evaluator import Scores
from tangram.rl.train.warm_start import collect_demonstrations
from tangram.rl.trajectories.codec import WordCodec

DEADLINE_S = 60.0


@asynccontextmanager
async def leaving_no_task(
    settings: TrainSettings, folder: Path, trainer: FakeTrainer
) -> AsyncIterator[TrainingProcess]:
    """While the process still runs: the test must not remove what a run leaves. Only environments may still be
    closed by the rollout."""
    async with asyncio.timeout(DEADLINE_S), training_process(settings, folder, trainer) as made:
        before = asyncio.all_tasks()
        yield made
        await asyncio.sleep(0)
        left = {task for task in asyncio.all_tasks() - before if "random/" not in task.get_name()}
        assert not left, left


class Looking:
    """Evaluations that end when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.number = 0
        self.error: Exception | None = None
        monkeypatch.setattr(evaluator, "evaluate", self)

    async def __call__(self, *_: Any) -> Scores:
        self.number += 1
        self.begun.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return Scores(mean={"random": 0.5}, spread={"random": 0.0}, episodes={"random": 2})


MODES = ("sync+", "one-off", "async")


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_does_not_wait_for_an_evaluation(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whole() -> None:
        looking = Looking(monkeypatch)
        async with leaving_no_task(settings_of(mode, evaluations=1), tmp_path, FakeTrainer()) as made:
            running = asyncio.create_task(made.training.run())
            await looking.begun.wait()
            made.training.stop("interrupted")
            over = await running
            assert over.cause == "interrupted" and over.checkpoint.endswith(f"{over.step:08d}")
            assert not made.of(Evaluated)

    asyncio.run(whole())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("every", [1, 12])
def test_an_evaluation_that_fails_ends_the_run_with_what_was_reached(
    mode: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle, and after the last step."""

    async def whole() -> None:
        looking = Looking(monkeypatch)
        looking.go_on.set()
        async with leaving_no_task(settings_of(mode, evaluations=every), tmp_path, FakeTrainer()) as made:
            running = asyncio.create_task(made.training.run())
            await looking.begun.wait()
            looking.error = ManagerError("no engine is left")
            with pytest.raises(ManagerError, match="no engine is left"):
                await running
            (over,) = made.of(RunEnded)
            assert over.cause == "no engine is left" and made.lines[-1] is over
            assert over.checkpoint.endswith(f"{over.step:08d}")

    asyncio.run(whole())


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_cancelled_leaves_no_task(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def whole() -> None:
        looking = Looking(monkeypatch)
        async with leaving_no_task(settings_of(mode, evaluations=1), tmp_path, FakeTrainer()) as made:
            running = asyncio.create_task(made.training.run())
            await looking.begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(whole())


def test_losing_all_engines_during_an_evaluation_ends_the_run(tmp_path: Path) -> None:
    async def whole() -> None:
        settings = settings_of("sync+", evaluations=1, step_s=0.05)
        async with leaving_no_task(settings, tmp_path, FakeTrainer()) as made:
            running = asyncio.create_task(made.training.run())
            made.engine.refuse(starts=100)
            made.engine.die()
            with pytest.raises(ManagerError, match="engine"):
                await running
            assert "engine" in made.of(RunEnded)[0].cause

    asyncio.run(whole())


# ---- going back -----------------------------------------------------------------------------------------------------


def killed_at(*versions: int) -> Callable[[int], bool]:
    left = list(versions)

    def dies(version: int) -> bool:
        if left and version == left[0]:
            left.pop(0)
            return True
        return False

    return dies


def test_an_evaluation_of_lost_weights_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def whole() -> None:
        looking = Looking(monkeypatch)
        trainer = FakeTrainer(killed_at(5))
        async with leaving_no_task(settings_of(evaluations=5, every=3, steps=6), tmp_path, trainer) as made:
            looking.go_on.set()
            running = asyncio.create_task(made.training.run())
            await until(lambda: bool(made.of(Trained)))  # the look at version 0 is over
            looking.go_on.clear()
            await until(lambda: any(line.kind == "rollback" for line in made.of(Noticed)))
            went_back = len(made.lines)
            looking.go_on.set()
            await running
            steps = [line.step for line in made.lines[went_back:] if isinstance(line, Trained)]
            looked = [at for at, line in enumerate(made.lines) if isinstance(line, Evaluated) and line.step > 3]
            assert steps == [4, 5, 6]
            assert all(at > made.lines.index(made.of(Trained)[-3]) for at in looked)

    asyncio.run(whole())


def test_a_trainer_may_die_while_it_restarts(tmp_path: Path) -> None:
    async def whole() -> None:
        trainer = FakeTrainer(killed_at(4))
        trainer.deaths_at_start = 2
        async with leaving_no_task(settings_of(), tmp_path, trainer) as made:
            assert (await made.training.run()).cause == "steps"
            assert trainer.starts == 4 and len(set(trainer.trained)) == 36

    asyncio.run(whole())


def test_a_trainer_that_never_restarts_ends_the_run(tmp_path: Path) -> None:
    async def whole() -> None:
        trainer = FakeTrainer(killed_at(4))
        trainer.deaths_at_start = 100
        async with leaving_no_task(settings_of(), tmp_path, trainer) as made:
            with pytest.raises(ManagerError, match="died 4 times and got no further: trainer: killed by a test while"):
                await made.training.run()

    asyncio.run(whole())


def test_without_a_checkpoint_there_is_no_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def whole() -> None:
        trainer = FakeTrainer(killed_at(2))

        async def no_room(folder: Path) -> None:
            raise ManagerError("No space left on device")

        monkeypatch.setattr(trainer, "save", no_room)
        async with leaving_no_task(settings_of(), tmp_path, trainer) as made:
            with pytest.raises(ManagerError, match="there is no checkpoint to go back to"):
                await made.training.run()
            assert "no checkpoint of step 0: No space left" in made.of(Noticed)[0].text

    asyncio.run(whole())


# ---- a disk that is full --------------------------------------------------------------------------------------------


class FullDisk:
    """A disk with room for the given number of checkpoints."""

    def __init__(self, checkpoints: Path, trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.checkpoints, self.room, self.save = checkpoints, room, trainer.save
        monkeypatch.setattr(trainer, "save", self)
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=self.largest_bytes()))

    def largest_bytes(self) -> int:
        """Of a checkpoint: with as much, and what older ones take, there is room for another."""
        return max(sum(file.stat().st_size for file in path.iterdir()) for path in self.checkpoints.iterdir())

    async def __call__(self, folder: Path) -> None:
        if len([path for path in self.checkpoints.iterdir() if path.name.isdecimal()]) >= self.room:
            raise ManagerError("No space left on device")
        await self.save(folder)


@pytest.mark.parametrize(("room", "newest"), [(0, None), (1, 0)])
def test_a_run_whose_last_step_is_not_saved_reports_which_one_is(
    room: int, newest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whole() -> None:
        trainer = FakeTrainer()
        FullDisk(tmp_path / "checkpoints", trainer, monkeypatch, room)
        async with leaving_no_task(settings_of(steps=6, every=3), tmp_path, trainer) as made:
            over = await made.training.run()
            there = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest}"
            assert (over.step, over.cause) == (6, f"reached step 6, but {there}")
            assert over.checkpoint == ("" if newest is None else str(tmp_path / "checkpoints" / f"{newest:08d}"))
            missed = [line.text.partition(":")[0] for line in made.of(Noticed)]
            assert missed == [f"no checkpoint of step {step}" for step in (0, 3, 6)[room:]], "each once"

    asyncio.run(whole())


def test_the_last_checkpoint_takes_the_room_of_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it goes on both stay: the newest is never risked for one that may come later."""

    async def whole() -> None:
        trainer = FakeTrainer()
        FullDisk(tmp_path / "checkpoints", trainer, monkeypatch, 2)
        async with leaving_no_task(settings_of(steps=8, every=3), tmp_path, trainer) as made:
            over = await made.training.run()
            assert (over.cause, Path(over.checkpoint).name) == ("steps", "00000008")
            assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["00000003", "00000008"]
            assert [line.text for line in made.of(Noticed)] == [
                "no checkpoint of step 6: No space left on device",
                "the disk is full: older checkpoints were deleted for that of step 8",
            ]

    asyncio.run(whole())


def test_weights_that_the_buffer_does_not_know_are_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that cannot publish its weights has a version that was not announced."""

    async def whole() -> None:
        trainer = FakeTrainer()
        step, start = trainer.step, trainer.start

        async def unpublished(batch: Any) -> Any:
            made = await step(batch)
            if batch.version >= 4:
                raise ManagerError("trainer: /dev/shm is full")
            return made

        async def never_again(checkpoint: Path | None = None) -> PolicyWeights:
            if checkpoint is not None:
                raise ManagerError("trainer: /dev/shm is full")
            return await start(checkpoint)

        monkeypatch.setattr(trainer, "step", unpublished)
        monkeypatch.setattr(trainer, "start", never_again)
        async with leaving_no_task(settings_of(every=100), tmp_path, trainer) as made:
            with pytest.raises(ManagerError, match="full"):
                await made.training.run()
            assert made.of(RunEnded)[0].checkpoint.endswith("00000000")

    asyncio.run(whole())


def test_weights_that_are_deleted_before_an_engine_has_read_them_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer keeps a few versions only: an engine that is slow finds its own deleted, and takes the newest."""

    async def whole() -> None:
        trainer = FakeTrainer(step_s=0.0)
        settings = settings_of(alpha=6, steps=20, evaluations=0)
        async with leaving_no_task(settings, tmp_path, trainer) as made:
            fetch = made.engine.fetch

            async def slow(weights: PolicyWeights) -> None:
                before = len(trainer.batches)
                for _ in range(50):
                    await asyncio.sleep(0.001)
                    if len(trainer.batches) > before:
                        made.engine.refuse(fetches=1)
                        break
                await fetch(weights)

            monkeypatch.setattr(made.engine, "fetch", slow)
            assert (await made.training.run()).cause == "steps"

    asyncio.run(whole())


def test_what_is_too_old_is_not_played_again_by_weights_that_are_as_old(tmp_path: Path) -> None:
    """Engines that take long to read weights write by old ones meanwhile."""
    trainer = FakeTrainer(step_s=0.0)

    async def whole() -> None:
        async with leaving_no_task(settings_of(steps=10, evaluations=0, step_s=0.0005), tmp_path, trainer) as made:
            made.engine.fetch_s = 0.1
            await made.training.run()
            attempts = [int(request.session.rpartition(".")[2]) for request in made.engine.requests]
            assert max(attempts) <= 3, "one for each update, and not one after the other"
            assert max(max(batch.staleness) for batch in trainer.batches) <= 1

    asyncio.run(whole())


# ---- the warm start -------------------------------------------------------------------------------------------------


def test_a_warm_start_whose_trainer_dies_starts_over(tmp_path: Path) -> None:
    async def whole() -> None:
        trainer = FakeTrainer()
        trainer.deaths_by_imitation = 1
        async with leaving_no_task(settings_of(warm_until=1.0, steps=2), tmp_path, trainer) as made:
            assert (await made.training.run()).cause == "steps"
            assert trainer.starts == 2 and trainer.imitations > 2
            assert [line.over for line in made.of(WarmStartChecked)][-2:] == [False, True]
            assert "killed by a test while it imitated; the warm start begins again" in made.of(Noticed)[0].text

    asyncio.run(whole())


def test_a_word_of_an_agent_outside_the_vocabulary_is_reported_with_its_task() -> None:
    with pytest.raises(InvalidConfig, match=r"task random: expected words of the policy's vocabulary.*'go' is none of"):
        asyncio.run(collect_demonstrations(settings_of(warm_until=1.0), None, WordCodec(("look",)), None))


def test_nothing_is_saved_of_a_warm_start_that_failed(tmp_path: Path) -> None:
    async def whole() -> None:
        trainer = FakeTrainer()
        trainer.deaths_by_imitation = 100
        async with leaving_no_task(settings_of(warm_until=1.0), tmp_path, trainer) as made:
            with pytest.raises(ManagerError, match="died 4 times"):
                await made.training.run()
            (over,) = made.of(RunEnded)
            assert over.checkpoint == "" and not list((tmp_path / "checkpoints").iterdir())

    asyncio.run(whole())


# ---- batches --------------------------------------------------------------------------------------------------------


def play(
    settings: TrainSettings, folder: Path, trainer: FakeTrainer, check: Callable[[TrainingProcess], Awaitable[None]]
) -> None:
    async def whole() -> None:
        async with leaving_no_task(settings, folder, trainer) as made:
            await made.training.run()
            made.training.buffer.check()
            await check(made)

    asyncio.run(whole())


@pytest.mark.parametrize("mode", ["sync+", "start-bound", "async"])
def test_what_a_step_did_not_wait_for_does_not_hold_up_the_next_batch(mode: str, tmp_path: Path) -> None:
    """One member of each batch never ends: a step for which the others are enough begins, and it is stopped."""
    settings = settings_of(
        mode, alpha=0, batch=3, batch_min=2, batch_wait_s=0.01, steps=6, evaluations=0, step_s=0.001,
        stall_s=1000.0,
    )  # fmt: skip
    settings = _slow_one_of_three(settings)
    trainer = FakeTrainer(step_s=0.001)

    async def check(made: TrainingProcess) -> None:
        assert len(trainer.trained) == len(set(trainer.trained))
        assert {len(batch.groups) for batch in trainer.batches} <= {2, 3}
        assert max(max(batch.staleness) for batch in trainer.batches) == 0
        lost = [each for each in SampleLogs(tmp_path / "samples", 0) if isinstance(each, GroupLost)]
        assert {each.cause for each in lost} == {"left_behind"}, "as it is counted, for the next resumption"
        assert made.of(RunEnded)[0].dropped_so_far == made.training.buffer.dropped
        assert set(made.training.buffer.dropped) == {"left_behind"}

    play(settings, tmp_path, trainer, check)


def _slow_one_of_three(settings: TrainSettings) -> TrainSettings:
    task = msgspec.structs.replace(
        settings.tasks[0], environment="tests.rl.train.fakes:Sometimes", options={}, step_timeout_s=1000.0
    )
    return msgspec.structs.replace(settings, tasks=(task,))


@pytest.mark.parametrize("mode", ["start-bound", "async"])
def test_alpha_0_alternates_rollout_and_training_at_any_pull(mode: str, tmp_path: Path) -> None:
    trainer = FakeTrainer()

    async def check(made: TrainingProcess) -> None:
        assert max(max(batch.staleness) for batch in trainer.batches) == 0
        assert all(line.dropped == {} and line.tokens_discarded == 0 for line in made.of(Trained))

    play(settings_of(mode, alpha=0, pull="after_batch"), tmp_path, trainer, check)
