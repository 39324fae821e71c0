"""`tangram rl eval`: held-out episodes, played by real engines with the weights of a real checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rl.rollout.world import CODEC, PATH, Plan, Talker, World, run

from tangram.clock import VirtualLoop
from tangram.rl.config.rollout_settings import (
    EngineSettings,
    GroupSettings,
    RewardSettings,
    RolloutSettings,
    TaskSettings,
)
from tangram.rl.config.training_settings import EvaluationSettings, TeacherSettings, TrainSettings
from tangram.rl.environments.registry import resolve, words_of
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.rl.runs.checkpoints import RunState, folder_name, seal, write_state
from tangram.rl.runs.run_folder import CHECKPOINTS, open_run
from tangram.rl.train.evaluator import SEED_FIRST, evaluate, held_out_tickets

Cli = Callable[..., Any]

if os.environ.get("CI") != "true":
    pytest.importorskip("torch")

SETTINGS = TrainSettings(
    engines=(EngineSettings(slots=8),),
    tasks=(TaskSettings(name="frozenlake"), TaskSettings(name="chain")),
    evaluation=EvaluationSettings(episodes=3),
)


def saved(folder: Path, seed: int) -> None:
    """A checkpoint of a policy that has learned nothing."""
    from tangram.rl.model.model_folder import save
    from tangram.rl.model.transformer import Transformer, small_config
    from tangram.rl.trajectories.codec import WORDS_FILE, WordCodec

    words = WordCodec(words_of([resolve("frozenlake"), resolve("chain")])).words
    save(Transformer.new(small_config(len(words), layers=1, width=16, heads=2, context_max=256), seed), folder)
    (folder / WORDS_FILE).write_bytes(msgspec.json.encode(words))


def run_state(step: int) -> RunState:
    from tangram.rl.buffer.records import BufferState

    empty = BufferState(
        version=step, waiting=(), in_flight=(), trained=(), dropped=(), dropped_by_cause={}, trajectories_discarded=0,
        tokens_discarded=0, bytes_mean=0.0, puts=0,
    )  # fmt: skip
    return RunState(version=step, step=step, ticket_next=0, buffer=empty, at_s=1.0)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    folder = tmp_path / "run"
    with open_run(folder, SETTINGS, resume=False):
        for step in (0, 20):
            path = folder / CHECKPOINTS / folder_name(step)
            saved(path, seed=step)
            write_state(path, run_state(step))
            seal(path)
    return folder


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_of_a_run_is_played_on_held_out_seeds(cli: Cli, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "played.jsonl"
    document = cli("rl", "eval", trained, "--out", out, "--json").json
    assert document["step"] == 20 and document["checkpoint"].endswith("00000020") and document["temperature"] == 1.0
    assert {name: row["episodes"] for name, row in document["tasks"].items()} == {"frozenlake": 3, "chain": 3}
    assert all(sum(row["endings"].values()) == 3 for row in document["tasks"].values())
    records = [json.loads(line)["record"] for line in out.read_text().splitlines()[1:]]
    assert {record["seed"] for record in records} == {SEED_FIRST, SEED_FIRST + 1, SEED_FIRST + 2}
    assert {record["group"].split("/")[1] for record in records} == {"eval-0", "eval-1", "eval-2"}
    assert cli("rl", "show", out, "--json").code == 0


def test_one_checkpoint_one_task_and_the_most_likely_tokens(cli: Cli, trained: Path) -> None:
    first = trained / CHECKPOINTS / folder_name(0)
    command = ("rl", "eval", first, "--task", "chain", "--episodes", 4, "--greedy", "--seed", 7)
    done = cli(*command)
    assert done.code == 0, done.err
    assert f"checkpoint {first}\ntemperature 0, " in done.out and "frozenlake" not in done.out
    document = cli(*command, "--json").json
    assert document["step"] == 0 and document["tasks"]["chain"]["episodes"] == 4
    assert f"{document['tasks']['chain']['mean']:.3f}" in done.out, "the same weights do the same"


def test_a_damaged_checkpoint_is_skipped_with_a_warning(cli: Cli, trained: Path) -> None:
    with (trained / CHECKPOINTS / folder_name(20) / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    done = cli("rl", "eval", trained, "--task", "chain", "--episodes", 1, "--json")
    assert done.json["step"] == 0 and "00000020" in done.err


def test_a_named_checkpoint_that_is_damaged_is_not_played(cli: Cli, trained: Path) -> None:
    named = trained / CHECKPOINTS / folder_name(20)
    with (named / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"xy")
    done = cli("rl", "eval", named, "--task", "chain", "--episodes", 1)
    assert done.code != 0 and f"checkpoint {named} is damaged: model.safetensors is not what was written" in done.err


def test_deleting_the_checkpoint_meanwhile_does_no_harm(
    cli: Cli, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tangram.rl.environments import registry

    def retained(settings: RolloutSettings) -> Any:
        shutil.rmtree(trained / CHECKPOINTS, ignore_errors=True)
        return tasks_of(settings)

    tasks_of, out = registry.tasks_of, tmp_path / "played.jsonl"
    monkeypatch.setattr(registry, "tasks_of", retained)
    before = set(trained.iterdir())
    document = cli("rl", "eval", trained, "--task", "chain", "--episodes", 1, "--out", out, "--json").json
    assert document["step"] == 20 and document["tasks"]["chain"]["episodes"] == 1
    assert before - set(trained.iterdir()) == {trained / CHECKPOINTS} and set(trained.iterdir()) < before
    named = json.loads(out.read_text().splitlines()[0])["settings"]["policy"]["checkpoint"]
    assert named == str(trained / CHECKPOINTS / folder_name(20)), "what it is called, not where it was held"


def test_an_error_of_a_checkpoint_names_the_checkpoint_that_was_given(cli: Cli, trained: Path) -> None:
    named = trained / CHECKPOINTS / folder_name(20)
    for name in ("words.json", "whole.json"):
        (named / name).unlink()
    seal(named)
    done = cli("rl", "eval", named)
    assert done.code == 2 and f"checkpoint: expected a folder with words.json or a tokenizer, got '{named}'" in done.err
    assert "policy.checkpoint" not in done.err and "tangram-weights" not in done.err


@pytest.mark.slow
def test_a_custom_environment_is_loaded_from_where_the_run_loaded_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importable for the run, and for a replay of its log, from any directory."""
    own, out = tmp_path / "own", tmp_path / "played.jsonl"
    own.mkdir()
    (own / "eval_own_lake.py").write_text("from tangram.rl.environments.frozenlake import FrozenLake as Lake\n")
    config = own / "mine.toml"
    config.write_text(
        "[policy]\nlayers = 1\nwidth = 16\nheads = 2\n[groups]\nsize = 2\n[training]\nsteps = 1\nbatch = 1\n"
        '[[tasks]]\nname = "lake"\nenvironment = "eval_own_lake:Lake"\n'
    )

    def called(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tangram", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    trained = called("train", config, "--out", "run", "--quiet")
    assert trained.returncode == 0, trained.stderr
    evaluation = next(line for line in trained.stdout.splitlines() if line.startswith("evaluate it: tangram "))
    words = shlex.split(evaluation.removeprefix("evaluate it: tangram "))
    played = called(*words, "--episodes", 2, "--out", out)
    assert played.returncode == 0, played.stderr
    replayed = called("rl", "replay", out)
    assert replayed.returncode == 0, replayed.stderr


def test_a_checkpoint_outside_of_a_run_needs_a_config(cli: Cli, trained: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "weights"
    alone.parent.mkdir()
    (trained / CHECKPOINTS / folder_name(0)).rename(alone)
    wrong = cli("rl", "eval", alone)
    assert wrong.code == 2 and "--config" in wrong.err
    config = tmp_path / "other.toml"
    config.write_text('[evaluation]\nepisodes = 2\ntemperature = 0.5\n[[tasks]]\nname = "chain"\n')
    document = cli("rl", "eval", alone, "--config", config, "--json").json
    assert document["step"] is None and document["temperature"] == 0.5 and document["tasks"]["chain"]["episodes"] == 2
    (alone / "model.safetensors").write_bytes(b"no weights")
    damaged = cli("rl", "eval", alone, "--config", config)
    assert damaged.code != 0 and f"checkpoint {alone} is damaged: model.safetensors is not what" in damaged.err


def test_errors_are_reported_before_anything_starts(cli: Cli, trained: Path, tmp_path: Path) -> None:
    assert "did you mean chain?" in cli("rl", "eval", trained, "--task", "chian").err
    assert cli("rl", "eval", trained, "--greedy", "--temperature", 1).code == 2
    assert "from 0 to 100" in cli("rl", "eval", trained, "--temperature", -1).err
    assert cli("rl", "eval", tmp_path / "none").code == 2
    there = tmp_path / "mine.jsonl"
    there.write_text("mine")
    assert cli("rl", "eval", trained, "--out", there).code == 2 and there.read_text() == "mine"
    with open_run(tmp_path / "empty", SETTINGS, resume=False):
        pass
    assert "has none yet" in cli("rl", "eval", tmp_path / "empty").err
    (tmp_path / "other").mkdir()
    assert "the folder of a run, with checkpoints in it" in cli("rl", "eval", tmp_path / "other").err
    missing = cli("rl", "eval", trained / CHECKPOINTS / folder_name(7))
    assert missing.code == 2 and "(there are 00000000, 00000020)" in missing.err


def test_a_server_is_reported_with_the_model_that_it_has_loaded(cli: Cli, trained: Path, tmp_path: Path) -> None:
    config = tmp_path / "served.toml"
    config.write_text('[[tasks]]\nname = "chain"\n[[engines]]\nkind = "openai"\nurl = "http://127.0.0.1:1"\n')
    result = cli("rl", "eval", trained, "--config", config, "--episodes", "1")
    assert result.code == 2, "no server listens there"
    assert f"engine engine uses the weights that its server has loaded, which must be {trained}" in result.err


def test_evaluating_one_task_of_a_run_needs_no_teachers_of_its_other_tasks(tmp_path: Path) -> None:
    from tangram.cli.rl_eval import only_task

    def asks(name: str) -> RewardSettings:
        return RewardSettings(kind="teacher", service=name)

    whole = TrainSettings(
        tasks=(TaskSettings(name="chain", reward=asks("one")), TaskSettings(name="frozenlake", reward=asks("two"))),
        teachers=tuple(TeacherSettings(name=name, checkpoint="x") for name in ("one", "two")),
    )
    alone = only_task(whole, "frozenlake")
    assert isinstance(alone, TrainSettings) and [each.name for each in alone.teachers] == ["two"]


# ---- held-out seeds and scores ----------------------------------------------------------------------------------


def test_held_out_seeds_are_never_trained_on_and_always_the_same() -> None:
    settings = RolloutSettings(tasks=(TaskSettings(name="a"), TaskSettings(name="b", weight=9.0)))
    upcoming = tickets(settings)
    assert all(next(upcoming).seed < SEED_FIRST for _ in range(1000))
    first, second = (held_out_tickets(settings, 5, temperature=0.5, number=number) for number in (0, 1))
    assert [each.seed for each in first] == [each.seed for each in second] and min(each.seed for each in first) >= 2**31
    assert not {each.group for each in first} & {each.group for each in second}
    assert {each.task for each in first[:2]} == {"a", "b"}, "evenly mixed, whatever their weights"
    assert {(each.size, each.temperature) for each in first} == {(1, 0.5)}
    other = held_out_tickets(msgspec.structs.replace(settings, seed=99), 5, temperature=0.5)
    assert other == first


@pytest.mark.parametrize("name", ["frozenlake", "chain"])
def test_built_in_tasks_take_held_out_seeds(name: str) -> None:
    from tangram.rl.environments.protocol import ExternalResources

    async def observed() -> list[str]:
        environment = resolve(name)(ExternalResources())
        try:
            return [await environment.reset(SEED_FIRST + index) for index in (0, 0, 1)]
        finally:
            await environment.close()

    once, again, other = asyncio.run(observed())
    assert once == again != other


def test_questions_are_made_of_held_out_seeds() -> None:
    from tangram.rl.environments.lookup import question_of

    assert question_of(SEED_FIRST) == question_of(SEED_FIRST)
    assert len({question_of(SEED_FIRST + index) for index in range(20)}) > 1


def scored(plan: Callable[[str, int], Plan], episodes: int, **groups: Any) -> Any:
    settings = RolloutSettings(
        engines=(EngineSettings(),),
        tasks=(TaskSettings(name="a", environment=PATH, retries=0),),
        groups=GroupSettings(size=4, members_extra=2, **groups),
    )

    async def playing() -> Any:
        world, talker = World(plan), Talker()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with Rollout(settings, talker, CODEC, on_end=world.ended.append, clock=loop.clock) as rollout:
            result = await evaluate(rollout, held_out_tickets(settings, episodes, temperature=1.0))
        world.check(rollout)
        return result

    return run(playing())


def test_scores_are_the_mean_and_its_standard_error() -> None:
    rewards = {"a/eval-0": 0.0, "a/eval-1": 1.0, "a/eval-2": 1.0, "a/eval-3": 0.0}
    scores = scored(lambda trajectory, _: Plan(reward=rewards["/".join(trajectory.split("/")[:2])]), 4)
    assert scores.mean == {"a": 0.5} and scores.episodes == {"a": 4}
    assert scores.spread["a"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert scores.endings == {"a": {"finished": 4}} and not scores.causes


def test_an_episode_that_the_infrastructure_failed_is_in_no_mean() -> None:
    def plan(trajectory: str, _: int) -> Plan:
        return Plan(fail="step") if trajectory.startswith("a/eval-1/") else Plan(reward=0.75)

    scores = scored(plan, 3, on_loss="drop")
    assert scores.mean == {"a": 0.75} and scores.episodes == {"a": 2}
    assert scores.endings["a"] == {"finished": 2, "env_failed": 1} and "connection lost" in scores.causes["a"]


def test_a_task_without_any_reward_has_no_score() -> None:
    scores = scored(lambda *_: Plan(fail="reset"), 2, on_loss="drop")
    assert scores.mean == {} and scores.episodes == {} and scores.endings["a"] == {"env_failed": 2}
