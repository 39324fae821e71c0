"""The whole pipeline with its real processes: five modes, what a run leaves in its folder, and what it leaves nowhere
else."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rl.played import played
from tests.rl.train.proof import assert_sound, lines_of, nothing_left, samples_of
from tests.rl.train.tiny import settings_of
from typer.testing import CliRunner

from tangram.cli import app
from tangram.errors import InvalidConfig
from tangram.rl.config.rollout_settings import GroupSettings, ResourceSettings, RewardSettings, SamplingSettings
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.observe.training_report import write_report
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Evaluated, Noticed, RunBegan, RunEnded, Trained

torch = pytest.importorskip("torch", reason="PyTorch is an extra, which is not installed")

from tangram.rl.model.learner import Learner  # noqa: E402
from tangram.rl.model.model_folder import load  # noqa: E402
from tangram.rl.model.transformer import Transformer, small_config  # noqa: E402
from tangram.rl.train.pipeline import require_trainable, train  # noqa: E402

AGE_MAX = {"sync": 0, "sync+": 0, "one-off": 1, "start-bound": None, "async": 1}
STEPS, BATCH = 3, 2
DEADLINE_S = 120.0


def trained(
    settings: TrainSettings, folder: Path, *, resume: bool = False, tell: Callable[[AnyMetricsLine], None] | None = None
) -> RunEnded:
    async def main() -> RunEnded:
        async with asyncio.timeout(DEADLINE_S):
            over = await train(settings, folder, resume=resume, on_line=tell)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return over

    with nothing_left():
        return asyncio.run(main())


def weights(checkpoint: Path) -> dict[str, Any]:
    return dict(load(checkpoint).state_dict())


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


# ---- modes ----------------------------------------------------------------------------------------------------------


def test_modes_differ_in_when_things_happen_and_in_nothing_else(tmp_path: Path) -> None:
    """Each mode trains really; the rate is so small that the policy stays what it was."""
    for mode, age_max in AGE_MAX.items():
        settings = settings_of(mode, steps=STEPS, learning_rate=1e-12, evaluations=2)
        lines: list[AnyMetricsLine] = []
        over = trained(settings, tmp_path / mode, tell=lines.append)
        assert over.cause == "steps" and over.step == STEPS
        assert lines_of(tmp_path / mode)[1:] == lines[1:], "the events are the written lines"
        assert_sound(tmp_path / mode, steps=STEPS, batch=BATCH, age_max=age_max)
        looked = [line.step for line in lines if isinstance(line, Evaluated)]
        assert looked[0] == 0 and looked[-1] == STEPS, "looked at before and after"
        newest = weights(tmp_path / mode / "checkpoints" / f"{STEPS:08d}")
        assert all(tensor.isfinite().all() for tensor in newest.values())
    assert_same_samples({mode: tmp_path / mode for mode in AGE_MAX})
    assert_readable(tmp_path / "async")


def assert_same_samples(folders: dict[str, Path]) -> None:
    samples_by_mode = {mode: samples_of(folder) for mode, folder in folders.items()}
    for some, other in itertools.pairwise(samples_by_mode):
        shared = samples_by_mode[some].keys() & samples_by_mode[other].keys()
        assert len(shared) >= STEPS * BATCH
        for number in shared:
            for a, b in zip(samples_by_mode[some][number].members, samples_by_mode[other][number].members, strict=True):
                assert (a.id, a.reward, a.ending) == (b.id, b.reward, b.ending), f"in {some} and {other}"
                assert [turn.tokens for turn in a.turns] == [turn.tokens for turn in b.turns]
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def assert_readable(folder: Path) -> None:
    """Read by every reader of the folder of a run."""
    page = write_report(folder).read_text()
    assert "async" in page and "pick" in page
    assert list((folder / "tensorboard").glob("events.*"))
    result = CliRunner().invoke(app, ["rl", "eval", str(folder), "--episodes", "2", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = msgspec.json.decode(result.stdout)
    assert document["step"] == STEPS and document["tasks"]["pick"]["mean"] > 0.0


def test_the_same_batch_makes_the_same_weights_in_every_mode() -> None:
    batch = played(5)
    made = []
    for mode in AGE_MAX:
        model = Transformer.new(small_config(23, width=16, heads=2, context_max=96), 3)
        learner = Learner(settings_of(mode), model, reward_low={}, tokens_longest=32)
        norm = learner.step(batch)["gradient_norm"]
        made.append((norm, {name: each.detach() for name, each in model.named_parameters()}))
    assert made[0][0] > 0.0
    for norm, after in made[1:]:
        assert norm == made[0][0] and same(after, made[0][1])


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["one-off", "start-bound", "async"])
def test_samples_that_are_older_are_never_trained_on_with_a_ratio_of_1(mode: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        settings_of(mode, objective={"correction": "none"})
    assert raised.value.field == "objective.correction" and "a ratio of 1" in str(raised.value)
    settings_of("sync+", objective={"correction": "none"})
    for name in ("start-bound", "async"):
        settings_of(name, alpha=0, objective={"correction": "none"})


@pytest.mark.parametrize(
    ("sampling", "field"),
    [(SamplingSettings(temperature=0.0), "temperature"), (SamplingSettings(top_k=2), "keep_ids"),
     (SamplingSettings(top_p=0.5), "keep_ids")],
)  # fmt: skip
def test_samples_that_cannot_be_trained_on_are_refused_before_anything_is_there(
    sampling: SamplingSettings, field: str, tmp_path: Path
) -> None:
    settings = msgspec.structs.replace(settings_of(), sampling=sampling)
    with pytest.raises(InvalidConfig, match=field):
        trained(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("objective", "fine"),
    [
        ({"zero_variance": "drop"}, False),
        ({"zero_variance": "keep"}, False),
        ({"zero_variance": "drop", "advantage": "mine:advantage"}, False),
        ({"zero_variance": "keep", "advantage": "mine:advantage"}, True),
    ],
)
def test_groups_of_one_from_which_nothing_can_be_learned_are_refused(objective: dict[str, str], fine: bool) -> None:
    settings = msgspec.structs.replace(settings_of(objective=objective), groups=GroupSettings(size=1))
    if fine:
        require_trainable(settings)
    else:
        with pytest.raises(
            InvalidConfig, match=r"groups.size: expected at least 2: .* of one alone nothing is learned"
        ):
            require_trainable(settings)


# ---- going on -------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_makes_the_same_steps_to_the_last_bit(tmp_path: Path) -> None:
    """4 steps at once, and 2 and 2 more."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(settings_of("sync+", steps=4), whole)
    trained(settings_of("sync+", steps=2), parts)
    with pytest.raises(InvalidConfig) as raised:
        trained(msgspec.structs.replace(settings_of("sync+", steps=4), seed=9), parts, resume=True)
    assert raised.value.field == "seed"
    assert trained(settings_of("sync+", steps=4), parts, resume=True).step == 4
    assert [line.resumed_from.rpartition("/")[2] for line in lines_of(parts, RunBegan)] == ["", "00000002"]
    ended, went_on = lines_of(parts, RunEnded)[0], lines_of(parts, RunBegan)[1]
    assert went_on.at_s >= ended.at_s, "time goes on where the run was left"
    assert_sound(parts, steps=4, batch=BATCH, age_max=0)
    for step in (1, 2, 3, 4):
        name = f"{step:08d}"
        assert same(weights(whole / "checkpoints" / name), weights(parts / "checkpoints" / name))
    first, last = (weights(whole / "checkpoints" / f"{step:08d}") for step in (0, 4))
    assert not same(first, last), "it learns"
    assert [line.groups for line in lines_of(parts, Trained)] == [line.groups for line in lines_of(whole, Trained)]


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "kept", "missed"),
    [("8k", "", [0, 1, 2, 3]), ("72k", "00000000", [1, 2, 3])],
    ids=["no room for weights", "no room for the optimiser once there is something in it"],
)
def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_continues_and_reports_it(
    size: str, kept: str, missed: list[int], tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("needs root, to mount a small disk")
        pytest.skip("needs root, to mount a small disk")
    lines: list[AnyMetricsLine] = []
    disk = tmp_path / "run" / "checkpoints"

    def tell(line: AnyMetricsLine) -> None:
        lines.append(line)
        if isinstance(line, RunBegan):
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(disk)], check=True)

    try:
        over = trained(settings_of(steps=STEPS), tmp_path / "run", tell=tell)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    newest = "the newest checkpoint is of step 0" if kept else "there is no checkpoint"
    assert (over.cause, Path(over.checkpoint).name) == (f"reached step {STEPS}, but {newest}", kept)
    notices = [line.text for line in lines if isinstance(line, Noticed)]
    assert all("No space left on device" in text for text in notices), notices
    told_of = [text.partition(":")[0] for text in notices]
    assert told_of == [f"no checkpoint of step {step}" for step in missed]
    assert_sound(tmp_path / "run", steps=STEPS, batch=BATCH, age_max=1)


def test_an_environment_that_hangs_without_end_is_named_and_the_run_continues(tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    settings = settings_of("sync+", steps=STEPS, stall_s=1.0, stalls_max=100, task={"options": {"hangs": str(hung)}})
    assert trained(settings, tmp_path / "run").cause == "steps"
    stalls = [line.text for line in lines_of(tmp_path / "run", Noticed) if line.kind == "stall"]
    assert hung.exists() and any("of task pick in step" in stall for stall in stalls), stalls
    assert_sound(tmp_path / "run", steps=STEPS, batch=BATCH, age_max=0)


def test_a_reward_that_cannot_be_had_is_never_0(tmp_path: Path) -> None:
    named = "tests.rl.train.tiny:broken_now_and_then"
    reward = RewardSettings(kind="function", function=named, retries=0)
    settings = msgspec.structs.replace(
        settings_of(steps=STEPS, task={"reward": reward}), resources=ResourceSettings(backend="process")
    )
    assert trained(settings, tmp_path / "run").cause == "steps"
    samples = samples_of(tmp_path / "run")
    attempts = [member.attempt for group in samples.values() for member in group.members]
    assert {member.reward for group in samples.values() for member in group.members} == {0.5}
    assert any(attempts), "some failed, and were played again"
