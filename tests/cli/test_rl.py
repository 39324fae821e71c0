"""`tangram rl`, as its users call it."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rl import recordings
from tests.rl.recordings import HOSTILE, simple, span
from tests.rl.trajectories.test_tokenizer import folder_of

from tangram.client.client import connect
from tangram.rl.config.rollout_settings import PolicySettings, RolloutSettings, TaskSettings
from tangram.rl.environments.agents import AgentEpisode, play
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.environments.registry import words_of
from tangram.rl.runs.trajectory_log import EngineEvent, GroupClosing, TrajectoryLog, read
from tangram.rl.trajectories.codec import WordCodec
from tangram.rl.trajectories.tokenizer import TextCodec
from tangram.rl.trajectories.trajectory import Ending, Group, Stage, Trajectory, Turn


@pytest.fixture
def rollout(tmp_path: Path) -> Path:
    """Two groups of frozenlake and one of chain, as they were really played, and one that failed."""
    words = WordCodec(words_of(["frozenlake", "chain"])).words
    settings = RolloutSettings(tasks=(TaskSettings(name="frozenlake"), TaskSettings(name="chain")))
    path = tmp_path / "run.jsonl"
    with TrajectoryLog(path, settings=settings, words=words, note="a first try") as log:
        for number, (task, agent) in enumerate(
            (("frozenlake", "random"), ("frozenlake", "expert"), ("chain", "random"))
        ):
            members = [recordings.played(task, agent, number, number=number, member=member) for member in range(2)]
            for each in members:
                log.append(each)
            group = Group(id=f"{task}/{number}", task=task, seed=number, members=tuple(members), wanted=2)
            log.append(GroupClosing.of(group, at_s=8.0))
        failed = msgspec.structs.replace(
            members[0], id="chain/2/2.0", member=2, ending=Ending.ENV_FAILED, reward=None, cause="sandbox lost",
            turns=(), observation="",
        )  # fmt: skip
        log.append(failed)
        log.append(EngineEvent(at_s=1.0, name="died", words={"engine": "engine-0"}))
    return path


def trajectories(path: Path) -> list[Trajectory]:
    return read(path).trajectories()


# ---- show -------------------------------------------------------------------------------------------------------


def test_show_lists_every_trajectory_and_what_came_of_each_task(cli, rollout: Path) -> None:
    done = cli("rl", "show", rollout)
    assert done.code == 0 and done.err == ""
    for words in (
        "run.jsonl: 7 trajectories",
        "frozenlake/1/1.0",
        "env_failed",
        "sandbox lost",
        "mean reward",
        "engine",
    ):
        assert words in done.out or words == "engine"
    assert "groups: 3 closed, 3 of them complete, 0 dropped" in done.out and "note: a first try" in done.out


def test_show_filters_sorts_and_limits(cli, rollout: Path) -> None:
    def ids(*words: object) -> list[str]:
        return [row["id"] for row in cli("rl", "show", rollout, *words, "--json").json["trajectories"]]

    assert ids("--task", "chain") == ["chain/2/0.0", "chain/2/2.0", "chain/2/1.0"]
    assert ids("--ending", "env_failed") == ["chain/2/2.0"]
    assert ids("--group", "frozenlake/1") == ["frozenlake/1/0.0", "frozenlake/1/1.0"]
    assert len(ids("--limit", 2)) == 2
    document = cli("rl", "show", rollout, "--sort", "-tokens", "--json").json["trajectories"]
    assert [row["tokens"] for row in document] == sorted((row["tokens"] for row in document), reverse=True)
    by_reward = cli("rl", "show", rollout, "--sort", "reward", "--json").json["trajectories"]
    assert by_reward[-1]["reward"] is None
    assert "2 of 7 trajectories; --limit shows more" in cli("rl", "show", rollout, "--limit", 2).out
    nothing = cli("rl", "show", rollout, "--ending", "stale")
    assert nothing.code == 0 and "no trajectory that matches" in nothing.out


def test_show_json_sums_up(cli, rollout: Path) -> None:
    summary = cli("rl", "show", rollout, "--json").json["summary"]
    assert summary["tasks"]["chain"]["endings"]["env_failed"] == 1
    assert summary["groups"] == {"closed": 3, "whole": 3, "dropped": 0} and summary["engine_events"] == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--task", "chian"), "such as chain"),
        (("--ending", "lost"), "one of finished, truncated"),
        (("--group", "chain/9"), "such as chain/2"),
        (("--sort", "size"), "one of began"),
        (("--limit", 0), "at least 1"),
        (("chain/2/0",), "such as chain/2/0.0"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    cli, rollout: Path, words: tuple[object, ...], expected: str
) -> None:
    done = cli("rl", "show", rollout, *words)
    assert done.code == 2 and expected in done.err and done.err.count("\n") == 1 and done.out == ""


def test_show_reads_tokens_with_the_tokenizer_of_the_checkpoint_as_long_as_it_is_there(cli, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "checkpoint", chats=False)
    settings = RolloutSettings(policy=PolicySettings(checkpoint=str(folder)), tasks=(TaskSettings(name="maze"),))
    path = tmp_path / "run.jsonl"
    tokens = TextCodec(folder).encode_action("go left")
    turn = Turn(
        observation="wall", observation_tokens=(8,), action="go left", tokens=tokens, logprobs=(-0.5,) * 3,
        versions=(0,) * 3,
    )  # fmt: skip
    trajectory = simple("maze/0/0.0", [span(Stage.GENERATE, 0.0, 1.0)])
    with TrajectoryLog(path, settings=settings) as log:
        log.append(msgspec.structs.replace(trajectory, turns=(turn,)))
    output = cli("rl", "show", path, trajectory.id).out
    assert "text" in output and [word in output for word in ("go", "left", "<end>")] == [True] * 3
    shutil.rmtree(folder)
    result = cli("rl", "show", path, trajectory.id)
    assert result.code == 0 and "text" not in result.out and "<end>" not in result.out
    assert all(str(token) in result.out for token in tokens)


def test_show_prints_one_trajectory_turn_by_turn(cli, rollout: Path) -> None:
    trajectory = next(each for each in trajectories(rollout) if each.id == "frozenlake/1/0.0")
    done = cli("rl", "show", rollout, trajectory.id)
    assert done.code == 0
    assert done.out.count("\nturn ") == len(trajectory.turns)
    for turn in trajectory.turns:
        assert f"  < {turn.observation}"[:100] in done.out and f"  > {turn.action}" in done.out
        assert f"{turn.logprobs[0]:.4f}" in done.out
    assert "<end>" in done.out and "spans" in done.out and "cpu@a" in done.out and "reward 1" in done.out
    document = cli("rl", "show", rollout, trajectory.id, "--json").json
    assert msgspec.convert(document, Trajectory) == trajectory


# ---- timeline ---------------------------------------------------------------------------------------------------


def test_timeline_shows_why_engines_were_idle_and_its_parts_add_up(cli, rollout: Path) -> None:
    done = cli("rl", "timeline", rollout)
    assert done.code == 0
    for words in (
        "No engine was decoding for",
        "% busy",
        "environment: step",
        "longest under way",
        "time of trajectories",
    ):
        assert words in done.out
    document = cli("rl", "timeline", rollout, "--json").json
    assert document["total_s"] == 8.0
    for stage in document["stages"].values():
        idle = sum(stage["idle_s"].values())
        assert stage["busy_s"] + idle == pytest.approx(8.0, abs=1e-9)
        assert sum(stage["idle_by_party_s"].values()) == pytest.approx(idle, abs=1e-9)
        assert sum(gap["ended_s"] - gap["began_s"] for gap in stage["gaps"]) == pytest.approx(idle, abs=1e-9)
    assert document["stages"]["generate"]["idle_by_party_s"].keys() == {
        "environment",
        "engine",
        "reward",
        "buffer",
        "run",
    } - {"run"}
    for task in document["tasks"].values():
        assert sum(task["shares"].values()) == pytest.approx(1.0)
    assert document["stages"]["buffer"]["busy_s"] > 0.0, "from the end of a trajectory to the closing of its group"


def test_impossible_times_are_reported_with_the_file_and_the_line(cli, rollout: Path) -> None:
    lines = rollout.read_text().splitlines()
    assert '"ended_s":' in lines[2]
    name = json.loads(lines[2])["record"]["id"]
    lines[2] = json.dumps(json.loads(lines[2]) | {"record": json.loads(lines[2])["record"] | {"ended_s": -3.0}})
    rollout.write_text("\n".join(lines) + "\n")
    wrong = cli("rl", "timeline", rollout)
    assert wrong.code == 2 and f"{rollout}:3 {name} ended_s: expected seconds from 0" in wrong.err


def test_timeline_writes_a_page(cli, rollout: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "t.html"
    done = cli("rl", "timeline", rollout, "--html", page)
    assert done.code == 0 and f"report: {page}" in done.out
    assert page.read_text().startswith("<!doctype html>") and "frozenlake/1/0.0" in page.read_text()
    refused = cli("rl", "timeline", rollout, "--html", tmp_path)
    assert refused.code == 2 and "html" in refused.err


def test_an_empty_log_is_no_error(cli, tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "run.jsonl"):
        pass
    assert "no trajectory yet" in cli("rl", "show", tmp_path / "run.jsonl").out
    assert "0 trajectories" in cli("rl", "timeline", tmp_path / "run.jsonl").out
    assert cli("rl", "timeline", tmp_path / "run.jsonl", "--json").json["total_s"] == 0.0
    assert "the same: 0 trajectories" in cli("rl", "replay", tmp_path / "run.jsonl").out


# ---- replay -----------------------------------------------------------------------------------------------------


def test_replay_finds_that_nothing_changed(cli, rollout: Path) -> None:
    done = cli("rl", "replay", rollout)
    assert done.code == 0 and done.out.startswith("the same: 7 trajectories with ")
    document = cli("rl", "replay", rollout, "--json").json
    assert len(document) == 7 and all(each["same"] for each in document)
    assert [each["id"] for each in cli("rl", "replay", rollout, "chain/2/1.0", "--json").json] == ["chain/2/1.0"]
    assert len(cli("rl", "replay", rollout, "--task", "chain", "--json").json) == 3


def test_replay_of_another_recording_exits_with_1_and_names_the_first_difference(cli, rollout: Path) -> None:
    first = trajectories(rollout)[0]
    turns = (msgspec.structs.replace(first.turns[0], observation="\x1b[2J[bold]</b>"), *first.turns[1:])
    path = rollout.with_name("changed.jsonl")
    with TrajectoryLog(path) as log:
        log.append(msgspec.structs.replace(first, turns=turns))
    done = cli("rl", "replay", path)
    assert done.code == 1
    assert "different: 1 of 1 trajectory" in done.out and "turn 0: different observation" in done.out
    assert "\\x1b[2J[bold]</b>" in done.out and "\x1b" not in done.out
    result = cli("rl", "replay", path, "--json")
    assert result.code == 1 and result.json[0]["differences"][0]["turn"] == 0


def test_replay_of_an_unknown_id_or_task_is_an_error(cli, rollout: Path) -> None:
    done = cli("rl", "replay", rollout, "chain/2/9.0")
    assert done.code == 2 and "such as chain/2/" in done.err
    assert "such as chain" in cli("rl", "replay", rollout, "--task", "chan").err
    path = rollout.with_name("other.jsonl")
    with TrajectoryLog(path) as log:
        log.append(simple("x/0/0.0", [span(Stage.STEP, 0, 1)], task="frozenlaek"))
    done = cli("rl", "replay", path)
    assert done.code == 2 and "did you mean frozenlake" in done.err


@pytest.fixture(scope="module")
def codefix() -> Trajectory:
    """One that was really played, in processes."""

    async def one() -> AgentEpisode:
        async with connect(backend="process") as client:
            return await play("codefix", "expert", 5, resources=ExternalResources(client=client))

    episode = asyncio.run(one())
    assert episode.done
    some = recordings.played("chain", "random", 1).turns[0]
    turns = tuple(
        msgspec.structs.replace(some, observation=observation, action=action)
        for observation, action in zip(episode.observations, episode.actions, strict=False)
    )
    first = simple("codefix/0/0.0", [span(Stage.STEP, 0, 1)], task="codefix")
    return msgspec.structs.replace(first, seed=5, turns=turns, observation=episode.observations[-1], reward=1.0)


def logged(path: Path, trajectory: Trajectory) -> Path:
    with TrajectoryLog(path) as log:
        log.append(trajectory)
    return path


def test_a_task_that_runs_commands_reports_that_it_needs_a_backend(cli, tmp_path: Path, codefix: Trajectory) -> None:
    done = cli("rl", "replay", logged(tmp_path / "run.jsonl", codefix))
    assert done.code == 2
    assert "backend: expected sandbox, docker or process, since codefix needs a client" in done.err


def test_what_runs_commands_is_replayed_with_a_backend_its_reward_too(cli, tmp_path: Path, codefix: Trajectory) -> None:
    done = cli("rl", "replay", logged(tmp_path / "run.jsonl", codefix), "--backend", "process")
    assert done.code == 0, done.out + done.err
    other = msgspec.structs.replace(codefix, reward=0.0)
    done = cli("rl", "replay", logged(tmp_path / "other.jsonl", other), "--backend", "process", "--json")
    assert done.code == 1
    (document,) = done.json
    assert document["failed"] == "" and [each["what"] for each in document["differences"]] == ["reward"]


def test_an_unknown_backend_is_an_error(cli, tmp_path: Path, codefix: Trajectory) -> None:
    done = cli("rl", "replay", logged(tmp_path / "run.jsonl", codefix), "--backend", "clouds")
    assert done.code == 2 and "clouds" in done.err


# ---- hostile and broken files -----------------------------------------------------------------------------------


def hostile(path: Path) -> list[Trajectory]:
    """Trajectories in which every text is hostile."""
    turn = recordings.played("chain", "random", 1).turns[0]
    lines = []
    with TrajectoryLog(path, words=HOSTILE[:2], note=HOSTILE[0]) as log:
        for number, text in enumerate(HOSTILE):
            its = msgspec.structs.replace(turn, observation=text, action=text, engine=text)
            spans = (msgspec.structs.replace(span(Stage.STEP, 0, 1, 0.5, text), failed=text),)
            failed = simple(f"{text}{number}", spans, task=text)
            lines.append(
                msgspec.structs.replace(
                    failed,
                    turns=(its,),
                    observation=text,
                    cause=text,
                    ending=Ending.ENV_FAILED,
                    reward=None,
                    group=text,
                    metrics={"\x1b[0m": float("nan")},
                )
            )
            log.append(lines[-1])
    return lines


def test_nothing_that_was_recorded_steers_a_terminal(cli, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    result = hostile(path)
    calls: list[tuple[object, ...]] = [
        ("show", path),
        ("timeline", path),
        ("timeline", path, "--html", tmp_path / "t.html"),
    ]
    calls += [("show", path, each.id) for each in result if "\x00" not in each.id and "\udc80" not in each.id]
    calls += [("show", path, "unknown"), ("show", path, "--task", "unknown"), ("replay", path)]
    for words in calls:
        for option in ((), ("--json",)):
            done = cli("rl", *words, *option)
            assert (done.out + done.err).replace("\n", "").isprintable(), (words, option)
            if option and done.code != 2:
                json.loads(done.out)


def test_a_torn_line_is_reported_once_and_the_rest_is_shown(cli, rollout: Path) -> None:
    rollout.write_bytes(rollout.read_bytes()[:-10])
    done = cli("rl", "show", rollout)
    assert done.code == 0 and "7 trajectories" in done.out
    assert done.err.count("skipped") == 1 and "run.jsonl:12" in done.err
    for verb in ("timeline", "replay"):
        assert "skipped" in cli("rl", verb, rollout).err


def test_a_compressed_log_is_read_by_its_name(cli, rollout: Path) -> None:
    packed = rollout.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(rollout.read_bytes()))
    assert cli("rl", "show", packed, "--json").json == cli("rl", "show", rollout, "--json").json


@pytest.mark.parametrize("verb", ["show", "timeline", "replay"])
def test_a_file_that_is_no_log_is_refused(cli: Callable[..., Any], tmp_path: Path, verb: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("hello\n")
    done = cli("rl", verb, path)
    assert done.code == 2 and "x.jsonl:1: expected the header of a rollout log" in done.err
    assert "No such file" in cli("rl", verb, tmp_path / "none").err


def test_impossible_times_are_errors(cli, tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "run.jsonl") as log:
        log.append(simple("a", [span(Stage.STEP, 3, 1)]))
    done = cli("rl", "timeline", tmp_path / "run.jsonl")
    assert done.code == 2 and "a step ended_s: expected at least began_s" in done.err


def test_help_has_examples(cli) -> None:
    for verb in ("show", "timeline", "replay"):
        assert f"tangram rl {verb} rollout.jsonl" in cli("rl", verb, "--help").out
