"""`tangram trace`, as its users call it."""

from __future__ import annotations

from pathlib import Path


def test_a_story_runs_from_submission_to_settling(cli, recording: Path) -> None:
    done = cli("trace", "story", recording, "coding/1.0.0")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line.split()[2] for line in lines] == ["Submit", "Start", "Started", "Finished", "Settle"]
    assert "succeeded" in lines[-1]
    told = cli("trace", "story", recording, "coding/1.0.0", "--json").json
    assert [line["message"]["type"] for line in told] == [line.split()[2] for line in lines]


def test_an_unknown_action_is_answered_with_near_ones(cli, recording: Path) -> None:
    done = cli("trace", "story", recording, "coding/1.0.9")
    assert done.code == 2
    assert "such as coding/1.0.0" in done.err and done.err.count("\n") == 1


def test_show_says_what_is_in_a_trace_and_where_the_time_went(cli, recording: Path) -> None:
    done = cli("trace", "show", recording)
    assert done.code == 0
    for words in ("run.jsonl", "adaptive", "cpu@cpu-0", "Submit", "thinking", "waiting: cpu", "executing", "succeeded"):
        assert words in done.out
    found = cli("trace", "show", recording, "--json").json
    assert found["runs"][0]["run"] == "coding" and found["runs"][0]["trajectories"] == 4


def test_replay_verifies_a_trace(cli, recording: Path) -> None:
    done = cli("trace", "replay", recording)
    assert done.code == 0 and done.out.startswith("the same: ")
    assert cli("trace", "replay", recording, "--json").json["difference"] is None


def test_replay_of_a_changed_trace_ends_with_1_and_shows_the_place(cli, recording: Path) -> None:
    text = recording.read_text()
    recording.write_text(
        text.replace('"attempt":1', '"attempt":2', 1) if '"attempt":1' in text else _without_a_start(text)
    )
    done = cli("trace", "replay", recording)
    assert done.code == 1
    assert done.out.startswith("different after ") and "recorded" in done.out and "replayed" in done.out
    assert cli("trace", "replay", recording, "--json").json["difference"]["at_seq"] > 0


def _without_a_start(text: str) -> str:
    lines = text.splitlines(keepends=True)
    del lines[next(i for i, line in enumerate(lines) if '"type":"Start"' in line)]
    return "".join(lines)


def test_a_file_that_is_no_trace_is_refused(cli, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("hello\n")
    for words in (("show", path), ("replay", path), ("story", path, "a")):
        done = cli("trace", *words)
        assert done.code == 2 and "x.jsonl:1: expected a trace header" in done.err
    assert "No such file" in cli("trace", "show", tmp_path / "none").err
