"""The trainer in its process: what it answers, and every way in which it can end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tests.rl.learners import HALF, STATE
from tests.rl.processes import gone, is_pending, leaving_nothing, until
from tests.rl.trainers import EPISODE, SETTINGS, SIZE, batch, group, trainer_in

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.config.training_settings import ObjectiveSettings
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.model.weight_store import pull, versions
from tangram.rl.train.trainer import TrainerDied
from tangram.rl.train.trainer_process import ProcessTrainer, strip_batch


def run(trainer: ProcessTrainer, test: Callable[[], Awaitable[None]]) -> None:
    leaving_nothing(test, trainer.close)


def content(weights: PolicyWeights) -> list[torch.Tensor]:
    return [each.detach().clone() for each in pull(weights).state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def names(tmp_path: Path) -> list[str]:
    """In the folder of published weights, whatever it is."""
    return sorted(os.listdir(tmp_path / "published"))


# ---- what it does ----


def test_it_imitates_steps_and_publishes_each_version_once(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, keep=2)

    async def test() -> None:
        first = await trainer.start()
        assert first == PolicyWeights(version=0, folder=str(tmp_path / "published" / "00000000"))
        before = content(first)
        assert await trainer.imitate([EPISODE, EPISODE]) == 6.0
        assert same(content(first), before), "nothing is published"
        assert await trainer.publish(0) == first
        assert not same(content(first), before), "a version that is there is replaced"
        assert names(tmp_path) == ["00000000"]

        for version in range(3):
            known = content(versions(tmp_path / "published")[-1])
            done = await trainer.step(batch(version))
            assert done.weights.version == version + 1
            assert not same(content(done.weights), known)
            assert done.metrics == {
                "low_chain": 0.0, "low_frozenlake": 0.0, "longest": 2000.0, "loss": 1.0, "threads": 1.0,
            }  # fmt: skip
            assert done.train_s > 0.0 and done.push_s > 0.0
        assert names(tmp_path) == ["00000002", "00000003"], "the last two stay, for engines that are slow"

    run(trainer, test)


def test_a_refused_request_changes_nothing_and_an_abandoned_one_finishes_before_the_next(
    tmp_path: Path,
) -> None:
    trainer = trainer_in(tmp_path)

    async def test() -> None:
        await trainer.start()
        with pytest.raises(InvalidInput, match="groups: expected what can be trained on"):
            await trainer.step(batch(0, group("wrong")))
        with pytest.raises(InvalidInput, match="batch: expected groups that can be trained on, got 'the loss is nan'"):
            await trainer.step(batch(0, group("not finite")))
        with pytest.raises(InvalidInput, match="version: expected 0"):
            await trainer.step(batch(3))
        assert names(tmp_path) == ["00000000"]
        assert (await trainer.step(batch(0))).weights.version == 1

        given_up = asyncio.create_task(trainer.step(batch(1)))
        await asyncio.sleep(0)
        given_up.cancel()
        assert (await trainer.step(batch(2))).weights.version == 3

    run(trainer, test)


def test_the_learner_of_a_run_makes_the_same_version_of_the_same_checkpoint_and_batch(tmp_path: Path) -> None:
    trainer = ProcessTrainer(SETTINGS, SIZE, tmp_path / "published")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()

    async def test() -> None:
        await trainer.start()
        assert await trainer.imitate([EPISODE]) > 0.0
        before = content(await trainer.publish(0))
        await trainer.save(checkpoint)
        done = await trainer.step(batch(0))
        assert done.metrics["trajectories"] == 2.0
        made = content(done.weights)
        assert not same(made, before)
        assert same(content(await trainer.start(checkpoint)), before)
        assert same(content((await trainer.step(batch(0))).weights), made)

    run(trainer, test)


def test_only_what_is_trained_on_is_sent() -> None:
    sent = strip_batch(batch(4))
    assert sent.version == 4 and sent.staleness == batch(4).staleness
    [only] = sent.groups
    assert only.left_out == () and len(only.members) == 2
    for member in only.members:
        assert (member.spans, member.observation) == ((), "")
        assert [(turn.observation, turn.action) for turn in member.turns] == [("", "")]
        assert (member.tokens, member.logprobs, member.versions) == ((1, 2, 3), (-0.5,), (0,))
    assert [member.reward for member in only.members] == [0.0, 1.0]


# ---- checkpoints ----


def test_from_a_checkpoint_the_next_step_is_the_same_and_later_versions_are_gone(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()

    async def test() -> None:
        await trainer.start()
        await trainer.step(batch(0))
        await trainer.save(checkpoint)
        second = content((await trainer.step(batch(1))).weights)
        await trainer.step(batch(2))
        assert names(tmp_path) == ["00000001", "00000002", "00000003"]

        # It runs still: the owner goes back, first to what is not there.
        with pytest.raises(ManagerError, match="No such file") as failed:
            await trainer.start(tmp_path / "nowhere")
        assert not isinstance(failed.value, TrainerDied) and not failed.value.retry
        with pytest.raises(TrainerDied):
            await trainer.step(batch(3))
        assert names(tmp_path) == ["00000001", "00000002", "00000003"]
        back = await trainer.start(checkpoint)
        assert back.version == 1
        assert names(tmp_path) == ["00000001"]
        assert same(content((await trainer.step(batch(1))).weights), second)

    run(trainer, test)


# ---- it is killed ----


def test_a_trainer_killed_at_any_point_reports_it_leaves_nothing_incomplete_and_restarts(tmp_path: Path) -> None:
    """One trainer, that dies while it has nothing to do, steps, publishes and saves."""
    trainer = trainer_in(tmp_path)
    stepping, publishing, good, bad = (tmp_path / name for name in ("stepping", "publishing", "good", "bad"))
    for each in (good, bad):
        each.mkdir()
    (bad / "slow").touch()

    async def test() -> None:
        await trainer.start()
        os.kill(trainer.pid, signal.SIGKILL)
        await until(lambda: not trainer.alive)
        with pytest.raises(TrainerDied, match="signal 9"):
            await trainer.publish(0)

        await trainer.start()
        step = asyncio.create_task(trainer.step(batch(0, group("wait", cause=str(stepping)))))
        await until(stepping.exists)
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainerDied, match="trainer: it ended with signal 9"):
            await step
        assert not trainer.alive
        with pytest.raises(TrainerDied, match="signal 9"):
            await trainer.imitate([EPISODE])
        assert names(tmp_path) == ["00000000"]

        await trainer.start()
        assert (await trainer.step(batch(0))).weights.version == 1
        step = asyncio.create_task(trainer.step(batch(1, group("slow publishing", cause=str(publishing)))))
        await until(publishing.exists)
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainerDied, match="signal 9"):
            await step
        assert [each.version for each in versions(tmp_path / "published")] == [0, 1]

        await trainer.start()
        assert names(tmp_path) == ["00000000"], "what was left unfinished is swept, what is later is gone"
        await trainer.step(batch(0))
        await trainer.save(good)
        saving = asyncio.create_task(trainer.save(bad))
        await until((bad / HALF).exists)
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainerDied, match="signal 9"):
            await saving
        assert (await trainer.start(good)).version == 1

    run(trainer, test)


def test_killed_while_it_starts_it_has_died(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)

    async def test() -> None:
        starting = asyncio.create_task(trainer.start())
        await until(lambda: trainer.alive)
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainerDied, match="signal 9"):
            await starting

    run(trainer, test)


# ---- it breaks down ----


def test_what_a_learner_raises_is_quoted_and_so_is_that_there_is_no_memory(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)

    async def test() -> None:
        await trainer.start()
        with pytest.raises(TrainerDied, match=r"(?s)code 1; its last output.*ZeroDivisionError: a loss of one's own"):
            await trainer.step(batch(0, group("broken")))
        await trainer.start()
        with pytest.raises(TrainerDied, match="can't allocate memory"):
            await trainer.step(batch(0, group("memory")))

    run(trainer, test)


def test_a_learner_that_is_not_there_is_named(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, learner="tests.rl.learners:Missing")

    async def test() -> None:
        with pytest.raises(TrainerDied, match="no attribute 'Missing'"):
            await trainer.start()

    run(trainer, test)


def test_settings_that_make_no_trainer_are_reported_as_such(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(SETTINGS, objective=ObjectiveSettings(loss="json:nothing"))
    trainer = ProcessTrainer(wrong, SIZE, tmp_path / "published")

    async def test() -> None:
        with pytest.raises(
            InvalidConfig, match=r"objective.loss: expected `module:name` of a function .*'json:nothing'"
        ):
            await trainer.start()

    run(trainer, test)


def test_on_a_full_disk_nothing_half_is_published_or_saved_and_the_step_is_not_lost(tmp_path: Path) -> None:
    trainer, folder = trainer_in(tmp_path), tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "other").touch()

    async def test() -> None:
        await trainer.start()
        with pytest.raises(ManagerError, match="00000001 cannot be written: File too large") as failed:
            await trainer.step(batch(0, group("full")))
        assert not isinstance(failed.value, TrainerDied)
        assert names(tmp_path) == ["00000000"]
        with pytest.raises(ManagerError, match="File too large"):
            await trainer.publish(1)
        with pytest.raises(ManagerError, match="cannot be written") as failed:
            await trainer.save(folder)
        assert not isinstance(failed.value, TrainerDied)
        assert os.listdir(folder) == ["other"]
        with pytest.raises(ManagerError, match="File too large"):
            await trainer.step(batch(1, group("chain")))
        assert names(tmp_path) == ["00000000"]
        assert (await trainer.step(batch(2, group("room")))).weights.version == 3
        await trainer.save(folder)
        assert sorted(os.listdir(folder)) == [HALF, "other", STATE]

    run(trainer, test)


# ---- it hangs ----


def test_one_that_stands_still_counts_as_dead(tmp_path: Path) -> None:
    trainer, here = trainer_in(tmp_path, hang_s=2.0), tmp_path / "here"

    async def test() -> None:
        await trainer.start()
        with pytest.raises(TrainerDied, match="sent nothing for"):
            await trainer.step(batch(0, group("wait", cause=str(here))))
        await trainer.start()
        pid = trainer.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TrainerDied, match="sent nothing for"):
            await trainer.imitate([EPISODE])
        assert gone(pid)

    run(trainer, test)


def test_a_computing_trainer_may_take_long_up_to_a_limit(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, hang_s=2.0, work_s_max=8.0)

    async def test() -> None:
        await trainer.start()
        assert (await trainer.step(batch(0, group("compute", cause="3.0")))).train_s > 3.0
        with pytest.raises(TrainerDied, match="worked at one request for"):
            await trainer.step(batch(1, group("compute", cause="600.0")))

    run(trainer, test)


# ---- it ends ----


def test_closing_ends_what_it_is_doing(tmp_path: Path) -> None:
    trainer, here = trainer_in(tmp_path), tmp_path / "here"

    async def test() -> None:
        await trainer.start()
        pid = trainer.pid
        step = asyncio.create_task(trainer.step(batch(0, group("wait", cause=str(here)))))
        await until(here.exists)
        await trainer.close()
        with pytest.raises(TrainerDied, match="it was closed"):
            await step
        assert gone(pid)
        await trainer.close()
        with pytest.raises(TrainerDied):
            await trainer.publish(0)

    run(trainer, test)


def test_a_trainer_that_was_not_started_reports_it(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)

    async def test() -> None:
        with pytest.raises(TrainerDied, match="not started"):
            await trainer.step(batch(0))

    run(trainer, test)


OWNER = """
import asyncio
from pathlib import Path
from tests.rl.trainers import batch, group, trainer_in

async def main():
    trainer = trainer_in(Path({folder!r}))
    await trainer.start()
    print(trainer.pid, flush=True)
    await trainer.step(batch(0, group("wait", cause={here!r})))

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_owner_whatever_it_is_doing(tmp_path: Path, number: signal.Signals) -> None:
    here = tmp_path / "here"
    program = OWNER.format(folder=str(tmp_path), here=str(here))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            asyncio.run(until(here.exists))
            os.kill(pid, signal.SIGINT)  # Ctrl-C reaches all; a trainer leaves it to its owner
            asyncio.run(until(lambda: not is_pending(pid, signal.SIGINT)))
            assert not gone(pid)
            owner.send_signal(number)
            asyncio.run(until(lambda: gone(pid)))
        finally:
            owner.kill()
