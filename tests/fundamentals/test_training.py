"""Training in eight short steps. Read from top to bottom; `test_rollout.py` comes before.

A run repeats four steps: play groups of episodes, collect them in a batch, take one gradient step, publish the new
weights to the engines. The engine and the trainer of these tests are real processes with a real transformer, so small
that a gradient step takes milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from tangram.cli.training_config import load_config
from tangram.errors import InvalidConfig
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step
from tangram.rl.runs.metrics_lines import AnyMetricsLine, Evaluated, RunBegan, RunEnded, Trained
from tangram.rl.runs.metrics_log import read_metrics
from tangram.rl.train.pipeline import train

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is an extra, which is not installed")

STEPS = 3
CONFIG = f"""
[training]
steps = {STEPS}
batch = 2              # groups of one gradient step

[groups]
size = 4               # episodes of one group

[policy]               # a new model of a few thousand weights
layers = 1
width = 16
heads = 2

[[engines]]
context_max = 32

[[tasks]]
name = "polite"
environment = "{__name__}:Polite"

[objective]
zero_variance = "keep" # groups in which all rewards are equal fill a batch too

[evaluation]
every = {STEPS}
episodes = 2

[checkpoints]
every = 1
keep = 10
"""


class Polite:
    """Each `please` in an answer earns a quarter."""

    words: ClassVar[tuple[str, ...]] = ("yes", "please", "now")
    turns_max: ClassVar[int] = 1
    tokens_max: ClassVar[int] = 4
    agents: ClassVar[Mapping[str, MakeAgent]] = {}
    needs_client: ClassVar[bool] = False

    def __init__(self, resources: ExternalResources) -> None:
        pass

    async def reset(self, seed: int) -> str:
        return "now"

    async def step(self, action: str) -> Step:
        return Step(observation="yes", reward=action.split().count("please") / self.tokens_max, done=True)

    async def close(self) -> None:
        pass


def settings_of(folder: Path, *changes: str) -> TrainSettings:
    """The settings that `tangram train polite.toml --set CHANGE` loads."""
    (folder / "polite.toml").write_text(CONFIG)
    return load_config(TrainSettings, folder / "polite.toml", changes)


@pytest.fixture(scope="module", autouse=True)
def _fork_server(rl_fork_server: None) -> None:
    """All runs of this file share one import of PyTorch."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run. No test changes it."""
    folder = tmp_path_factory.mktemp("training")
    over = asyncio.run(train(settings_of(folder, "training.mode=one-off"), folder / "run"))
    assert (over.cause, over.step) == ("steps", STEPS)
    return folder / "run"


def lines_of(run: Path, kind: type[AnyMetricsLine]) -> list:
    return [line for line in read_metrics(run / "metrics.jsonl") if isinstance(line, kind)]


def test_1_settings_are_checked_before_anything_starts(tmp_path: Path) -> None:
    """An unknown key raises an error instead of being ignored. So do combinations that would train on wrong numbers:
    samples of older weights need a correction."""
    assert settings_of(tmp_path, "training.batch=8").training.batch == 8
    with pytest.raises(InvalidConfig, match="staleness"):
        settings_of(tmp_path, "training.stalenes=2")
    with pytest.raises(InvalidConfig, match="a ratio of 1"):
        settings_of(tmp_path, "objective.correction=none")
    settings_of(
        tmp_path, "objective.correction=none", "training.mode=sync"
    )  # all samples come from the current weights


def test_2_a_run_is_a_sequence_of_gradient_steps(finished: Path) -> None:
    """Step n starts from version n - 1 of the weights and produces version n. A group is in at most one batch."""
    trained = lines_of(finished, Trained)
    assert [line.step for line in trained] == [1, 2, 3]
    assert [sum(line.staleness) for line in trained] == [2 * 4] * STEPS  # two groups of four trajectories each
    groups = [number for line in trained for number in line.groups]
    assert len(groups) == len(set(groups)) == 2 * STEPS
    assert all(0.0 <= line.tasks["polite"].reward <= 1.0 for line in trained)


def test_3_a_sample_can_be_older_than_the_weights_that_it_trains(finished: Path) -> None:
    """In mode `one-off` the engine plays the next batch while the trainer computes. The staleness of a sample is the
    number of versions in between: 0 for the first batch, exactly 1 for all others."""
    first, second, third = (line.staleness for line in lines_of(finished, Trained))
    assert first == (8,)  # eight trajectories of staleness 0
    assert second == third == (0, 8)  # none of staleness 0, eight of staleness 1


def test_4_alpha_bounds_the_staleness(tmp_path: Path) -> None:
    """The mode determines what runs concurrently, and so α, the largest staleness. In the default mode, in which
    trajectories continue across updates of the weights, `training.staleness` sets α."""
    modes = {mode: settings_of(tmp_path, f"training.mode={mode}").training for mode in ("sync", "sync+", "one-off")}
    assert {mode: training.staleness_bound for mode, training in modes.items()} == {"sync": 0, "sync+": 0, "one-off": 1}
    default = settings_of(tmp_path, "training.staleness=2").training
    assert (default.staleness_bound, default.enforces_staleness) == (2, True)


def test_5_metrics_are_the_one_record_of_a_run(finished: Path) -> None:
    """`metrics.jsonl` has one line for the beginning, each step, each evaluation and the end, in order of time. The
    live view, the report and TensorBoard contain nothing else."""
    lines = read_metrics(finished / "metrics.jsonl")
    assert isinstance(lines[0], RunBegan)
    assert isinstance(lines[-1], RunEnded)
    assert all(earlier.at_s <= later.at_s for earlier, later in itertools.pairwise(lines))
    assert {"loss", "entropy", "gradient_norm", "tokens"} <= lines_of(finished, Trained)[0].metrics.keys()
    # Evaluations use seeds that are never trained on, before the first step and after the last.
    assert [line.step for line in lines_of(finished, Evaluated)] == [0, STEPS]


def test_6_a_checkpoint_is_a_policy_that_can_be_loaded(finished: Path, tmp_path: Path) -> None:
    """A checkpoint is complete or absent: weights, optimizer, vocabulary and the samples that were not trained on.
    Another run can start from its weights."""
    checkpoints = sorted((finished / "checkpoints").iterdir())
    assert [each.name for each in checkpoints] == ["00000000", "00000001", "00000002", "00000003"]
    first, *_, last = [(each / "model.safetensors").read_bytes() for each in checkpoints]
    assert first != last  # the policy has changed
    assert set(Polite.words) <= set(json.loads((checkpoints[-1] / "words.json").read_text()))
    changed = settings_of(tmp_path, f"policy.checkpoint={checkpoints[-1]}")
    assert changed.policy.checkpoint == str(checkpoints[-1])


def test_7_a_folder_with_a_run_is_never_overwritten(finished: Path, tmp_path: Path) -> None:
    """A second start needs `resume`, and `resume` accepts only settings under which the saved samples stay valid: more
    steps are accepted, another seed is not."""
    with pytest.raises(InvalidConfig, match="holds a run"):
        asyncio.run(train(settings_of(tmp_path), finished))
    with pytest.raises(InvalidConfig, match="seed"):
        asyncio.run(train(settings_of(tmp_path, "seed=9"), finished, resume=True))


def test_8_a_resumed_run_continues_from_its_last_checkpoint(finished: Path, tmp_path: Path) -> None:
    """Steps and group numbers continue: no step is missing, and no sample is trained on twice. The mode may change:
    here the run continues in the asynchronous default mode, which keeps its bound."""
    run = shutil.copytree(finished, tmp_path / "run")
    over = asyncio.run(train(settings_of(tmp_path, "training.steps=5"), run, resume=True))
    assert over.step == 5
    before, after = lines_of(run, RunBegan)
    assert (before.resumed_from, Path(after.resumed_from).name) == ("", "00000003")
    trained = lines_of(run, Trained)
    assert [line.step for line in trained] == [1, 2, 3, 4, 5]
    assert all(len(line.staleness) <= after.alpha + 1 for line in trained)
    groups = [number for line in trained for number in line.groups]
    assert len(groups) == len(set(groups)) == 2 * 5
