"""The folder of a run: one owner, one run, and settings that leave what is saved its meaning."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.rl.samples import group

from tangram.errors import InvalidConfig, ManagerError
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    PolicySettings,
    RewardSettings,
    SamplingSettings,
    TaskSettings,
)
from tangram.rl.config.training_settings import ObjectiveSettings, TeacherSettings, TrainingSettings, TrainSettings
from tangram.rl.runs.checkpoints import folder_name
from tangram.rl.runs.run_folder import METRICS, MODULES, SETTINGS, open_run, read_modules, read_settings

LAKE = TaskSettings(name="frozenlake", options={"size": 4}, concurrency=8)
CHAIN = TaskSettings(name="chain", turns_max=7, reward=RewardSettings(kind="function", function="scorers:one"))
USUAL = TrainSettings(seed=3, tasks=(LAKE, CHAIN), engines=(EngineSettings(slots=4), EngineSettings(name="b")))


def test_a_new_run_has_its_folder_and_its_settings(tmp_path: Path) -> None:
    with open_run(tmp_path / "runs" / "first", USUAL, resume=False) as folder:
        assert folder.metrics.parent == tmp_path / "runs" / "first" and folder.setting_changes == ()
        assert folder.latest_checkpoint() is None
        with folder.open_sample_log(None) as log:
            log.append(group(1, 0))
        assert len(list(folder.samples_after(0))) == 1
    assert read_settings(tmp_path / "runs" / "first") == USUAL
    assert not list((tmp_path / "runs" / "first").glob(".*"))


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path: Path) -> None:
    open_run(tmp_path, USUAL, resume=False).close()
    with pytest.raises(InvalidConfig, match="a new folder: this one holds a run; resume it with --resume, or choose"):
        open_run(tmp_path, USUAL, resume=False)
    with open_run(tmp_path, USUAL, resume=True) as folder:
        assert folder.setting_changes == ()


def test_folders_of_environments_are_kept_until_new_ones_are_given(tmp_path: Path) -> None:
    open_run(tmp_path, USUAL, resume=False).close()
    assert read_modules(tmp_path) == ()
    open_run(tmp_path, USUAL, resume=True, modules=("/a", "/b")).close()
    open_run(tmp_path, USUAL, resume=True).close()
    assert read_modules(tmp_path) == ("/a", "/b")
    (tmp_path / MODULES).write_text("{")
    with pytest.raises(InvalidConfig, match="expected a list of folders"):
        read_modules(tmp_path)


def test_foreign_files_in_a_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    open_run(tmp_path, USUAL, resume=False).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("made", [False, True])
def test_an_empty_folder_cannot_be_resumed(tmp_path: Path, made: bool) -> None:
    path = tmp_path / "run"
    if made:
        path.mkdir()
    with pytest.raises(InvalidConfig, match="the folder of a run, to resume it: there is none"):
        open_run(path, USUAL, resume=True)
    assert path.exists() == made and not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize("name", ["checkpoints", "samples"])
def test_foreign_folders_with_our_names_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "mine").mkdir(parents=True)
    with pytest.raises(InvalidConfig, match=rf"a folder without {name} of others: .*move them away") as refused:
        open_run(tmp_path, USUAL, resume=False)
    assert "resume" not in str(refused.value)
    with pytest.raises(InvalidConfig, match="there is none; start without it"):
        open_run(tmp_path, USUAL, resume=True)
    assert [path.name for path in tmp_path.rglob("*")] == [name, "mine"]


def test_a_path_that_is_not_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ManagerError, match="cannot be written to"):
        open_run(tmp_path / "file", USUAL, resume=False)


def test_what_was_logged_before_any_checkpoint_means_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path, USUAL, resume=False) as folder, folder.open_sample_log(None) as log:
        log.append(group(1, 0))
    with open_run(tmp_path, USUAL, resume=True) as folder, folder.open_sample_log(folder.latest_checkpoint()):
        assert list(folder.samples_after(0)) == []


# ---- its owner ----


def test_a_second_owner_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    with open_run(tmp_path, USUAL, resume=False):
        for resume in (False, True):
            with pytest.raises(InvalidConfig, match=f"no other process trains in: process {os.getpid()} does; stop it"):
                open_run(tmp_path, USUAL, resume=resume)
    open_run(tmp_path, USUAL, resume=True).close()


PROGRAM = """
import sys, time
from tangram.rl.runs.run_folder import open_run
from tangram.rl.config.training_settings import TrainSettings
with open_run(sys.argv[1], TrainSettings(), resume=False):
    print("open", flush=True)
    time.sleep(600)
"""


def test_an_owner_that_is_killed_owns_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        with pytest.raises(InvalidConfig, match=f"process {child.pid} does"):
            open_run(path, TrainSettings(), resume=True)
        os.kill(child.pid, signal.SIGKILL)
    open_run(path, TrainSettings(), resume=True).close()


def test_a_refused_run_leaves_no_descriptor(tmp_path: Path) -> None:
    begun(tmp_path, USUAL)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(InvalidConfig):
            open_run(tmp_path, USUAL, resume=False)
        with pytest.raises(InvalidConfig):
            open_run(tmp_path, replace(USUAL, seed=4), resume=True)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- other settings ----

REFUSED = {
    "seed": replace(USUAL, seed=4),
    "policy.width": replace(USUAL, policy=PolicySettings(width=128)),
    "policy.checkpoint": replace(USUAL, policy=PolicySettings(checkpoint="elsewhere")),
    "groups.size": replace(USUAL, groups=GroupSettings(size=4)),
    "sampling.temperature": replace(USUAL, sampling=SamplingSettings(temperature=0.7)),
    "objective.kl": replace(USUAL, objective=ObjectiveSettings(kl=0.1)),
    "engines.context_max": replace(USUAL, engines=(EngineSettings(context_max=512),)),
    "tasks": replace(USUAL, tasks=(LAKE,)),
    "tasks[frozenlake].options": replace(USUAL, tasks=(replace(LAKE, options={"size": 8}), CHAIN)),
    "tasks[chain].environment": replace(USUAL, tasks=(LAKE, replace(CHAIN, environment="lookup"))),
    "tasks[chain].reward.function": replace(
        USUAL, tasks=(LAKE, replace(CHAIN, reward=RewardSettings(kind="function", function="scorers:other")))
    ),
}


def begun(path: Path, settings: TrainSettings) -> None:
    """A run of which something is saved."""
    with open_run(path, settings, resume=False) as folder:
        (folder.checkpoints / folder_name(0)).mkdir()


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_define_samples_and_weights_cannot_change(tmp_path: Path, key: str) -> None:
    begun(tmp_path, USUAL)
    with pytest.raises(InvalidConfig, match=r"as before, because .*; or a new run") as refused:
        open_run(tmp_path, REFUSED[key], resume=True)
    assert refused.value.field == key
    assert read_settings(tmp_path) == USUAL


@pytest.mark.parametrize("key", REFUSED)
def test_before_the_first_save_every_setting_may_change_and_is_listed(tmp_path: Path, key: str) -> None:
    open_run(tmp_path, USUAL, resume=False).close()
    with open_run(tmp_path, REFUSED[key], resume=True) as folder:
        assert folder.setting_changes
    assert read_settings(tmp_path) == REFUSED[key]


def test_samples_that_a_teacher_scored_are_not_trained_on_by_their_rewards(tmp_path: Path) -> None:
    taught = RewardSettings(kind="teacher", service="wise")
    distilled = replace(
        USUAL,
        tasks=(replace(LAKE, reward=taught), replace(CHAIN, reward=taught)),
        teachers=(TeacherSettings(name="wise", checkpoint="wise"),),
        objective=ObjectiveSettings(kind="distill"),
    )
    begun(tmp_path, distilled)
    with pytest.raises(InvalidConfig, match=r"objective.kind: expected 'distill' as before"):
        open_run(tmp_path, replace(distilled, objective=ObjectiveSettings()), resume=True)
    other = (TeacherSettings(name="wise", checkpoint="foolish"),)
    with pytest.raises(InvalidConfig, match=r"teachers\[wise\].checkpoint: expected 'wise' as before, .* scored by it"):
        open_run(tmp_path, replace(distilled, teachers=other), resume=True)


def test_all_other_settings_may_change_and_are_listed(tmp_path: Path) -> None:
    begun(tmp_path, USUAL)
    other = replace(
        USUAL,
        training=TrainingSettings(steps=500, mode="sync+", batch=8),
        objective=ObjectiveSettings(learning_rate=1e-4),
        engines=(EngineSettings(slots=8),),
        tasks=(replace(LAKE, weight=2.0), CHAIN),
        policy=PolicySettings(seed=9),
    )
    with open_run(tmp_path, other, resume=True) as folder:
        assert set(folder.setting_changes) == {
            "training.steps: 200 became 500",
            "training.mode: 'async' became 'sync+'",
            "training.batch: 16 became 8",
            "objective.learning_rate: 0.0007 became 0.0001",
            "engines: ['engine', 'b'] became ['engine']",
            "engines[engine].slots: 4 became 8",
            "tasks[frozenlake].weight: 1.0 became 2.0",
            "policy.seed: 0 became 9",
        }
    assert read_settings(tmp_path) == other
    with open_run(tmp_path, other, resume=True) as folder:
        assert folder.setting_changes == ()


def test_unreadable_settings_are_reported_with_their_file(tmp_path: Path) -> None:
    open_run(tmp_path, USUAL, resume=False).close()
    content = msgspec.json.decode((tmp_path / SETTINGS).read_bytes())
    content["training"]["steps"] = 0
    (tmp_path / SETTINGS).write_bytes(msgspec.json.encode(content))
    with pytest.raises(InvalidConfig, match=r"settings.json: expected the settings of a run \(steps: expected"):
        open_run(tmp_path, USUAL, resume=True)
    (tmp_path / SETTINGS).unlink()
    (tmp_path / METRICS).touch()
    with pytest.raises(InvalidConfig, match=r"with settings.json \(No such file"):
        open_run(tmp_path, USUAL, resume=True)
