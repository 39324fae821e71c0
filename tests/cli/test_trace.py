"""`tangram trace`, as its users call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chrome_trace import check, named


def test_a_story_runs_from_submission_to_settling(cli, recording: Path) -> None:
    done = cli("trace", "story", recording, "coding/1.0.0")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line.split()[2] for line in lines] == ["Submit", "Start", "Started", "Finished", "Settle"]
    assert "succeeded" in lines[-1]
    document = cli("trace", "story", recording, "coding/1.0.0", "--json").json
    assert [line["message"]["type"] for line in document] == [line.split()[2] for line in lines]


def test_an_unknown_action_is_answered_with_near_ones(cli, recording: Path) -> None:
    done = cli("trace", "story", recording, "coding/1.0.9")
    assert done.code == 2
    assert "such as coding/1.0.0" in done.err and done.err.count("\n") == 1


def test_show_prints_the_content_of_a_trace_and_where_the_time_went(cli, recording: Path) -> None:
    done = cli("trace", "show", recording)
    assert done.code == 0
    for words in ("run.jsonl", "adaptive", "cpu@cpu-0", "Submit", "thinking", "waiting: cpu", "executing", "succeeded"):
        assert words in done.out
    document = cli("trace", "show", recording, "--json").json
    assert document["runs"][0]["run"] == "coding" and document["runs"][0]["trajectories"] == 4


def test_show_writes_the_timeline_as_a_chrome_trace(cli, recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "run.json"
    done = cli("trace", "show", recording, "--perfetto", path)
    assert done.code == 0 and "https://ui.perfetto.dev" in done.out and "where the time went" in done.out
    events = json.loads(path.read_text())["traceEvents"]
    check(events)
    summary = cli("trace", "show", recording, "--json").json
    (run,) = summary["runs"]
    actions = [event for event in events if event["ph"] == "X" and "id" in event["args"]]
    assert len(actions) == run["actions"]
    assert {event["args"]["status"] for event in actions} == set(run["statuses"])
    assert len(set(named(events, "thread_name").values())) == run["trajectories"]
    for phase, seconds in (("overhead", run["overhead_s"]), ("executing", run["execution_s"])):
        drawn_us = sum(event["dur"] for event in events if event["ph"] == "X" and event["name"] == phase)
        assert drawn_us / 1e6 == pytest.approx(seconds, abs=1e-3)
    cores = [event["args"]["cores"] for event in events if event["ph"] == "C"]
    assert 0.0 < max(cores) <= summary["pools"]["cpu@cpu-0"] / 1000 and min(cores) == cores[-1] == 0.0


def test_a_timeline_that_cannot_be_written_is_refused_before_the_trace_is_read(cli, tmp_path: Path) -> None:
    done = cli("trace", "show", tmp_path / "none.jsonl", "--perfetto", tmp_path)
    assert done.code == 2 and "perfetto" in done.err and "none.jsonl" not in done.err


def test_replay_verifies_a_trace(cli, recording: Path) -> None:
    done = cli("trace", "replay", recording)
    assert done.code == 0 and done.out.startswith("the same: ")
    assert cli("trace", "replay", recording, "--json").json["difference"] is None


def test_replay_of_a_changed_trace_ends_with_1_and_shows_the_place(cli, recording: Path) -> None:
    recording.write_text(recording.read_text().replace('"attempt":1', '"attempt":2', 1))
    done = cli("trace", "replay", recording)
    assert done.code == 1
    assert done.out.startswith("different after ") and "recorded" in done.out and "replayed" in done.out
    assert cli("trace", "replay", recording, "--json").json["difference"]["at_seq"] > 0


def test_a_file_that_is_no_trace_is_refused(cli, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("hello\n")
    for words in (("show", path), ("replay", path), ("story", path, "a")):
        done = cli("trace", *words)
        assert done.code == 2 and "x.jsonl:1: expected a trace header" in done.err
    assert "No such file" in cli("trace", "show", tmp_path / "none").err


# ---- hostile traces -------------------------------------------------------------------------------------------


def changed(recording: Path, kind: str, change: Callable[[dict], object]) -> int:
    """Change the first message of a kind; returns the number of its line."""
    lines = recording.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if f'"type":"{kind}"' in line)
    line = json.loads(lines[place])
    change(line)
    lines[place] = json.dumps(line)
    recording.write_text("\n".join(lines) + "\n")
    return place + 1


HOSTILE = {
    "negative time": ("Submit", lambda line: line.update(t=-5), " t: expected seconds from 0", "got -5.0"),
    "time that goes back": ("Release", lambda line: line.update(t=0), " t: expected seconds from ", "got 0.0"),
    "endless time": ("Submit", lambda line: line.update(t=1e300), " t: expected seconds from 0", "got 1e+300"),
    "no time": ("Submit", lambda line: line.update(t=None), ": expected a trace line", "$.t"),
    "a number twice": ("Submit", lambda line: line.update(seq=1), " seq: expected ", "without a gap, got 1"),
    "another cause": ("Start", lambda line: line.update(cause=1), " cause: expected ", "got 1"),
    "negative seconds": (
        "Settle",
        lambda line: line["message"]["outcome"].update(execution_s=-5),
        " outcome execution_s: expected seconds from 0 to 1e+10",
        "got -5.0",
    ),
    "a message of no kind": (
        "Submit",
        lambda line: line["message"].update(type="N" * 100_000),
        ": expected a trace line",
        "$.message.type",
    ),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_line_is_refused_with_its_number_field_and_value(cli, recording: Path, name: str) -> None:
    kind, change, expected, got = HOSTILE[name]
    number = changed(recording, kind, change)
    for words in (("trace", "replay", recording), ("trace", "show", recording), ("sim", "--trace", recording)):
        done = cli(*words)
        assert (done.code, done.out) == (2, "")
        assert f"{recording}:{number}{expected}" in done.err and got in done.err
        assert done.err.count("\n") == 1 and len(done.err) < 1000


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda text: b"", "expected"),
        (lambda text: text[:-30], "expected a trace line (Input data was truncated)"),
        (lambda text: bytes(range(256)) * 20, "expected"),
        (lambda text: text.split(b"\n")[0] + b"\n" + bytes(range(256)), ":2: expected a trace line"),
        (lambda text: text.replace(b'"cpu"', b'"memory"', 1), "pools: expected every pool once, got 'memory@cpu-0'"),
        (lambda text: text.replace(b'"total":4000', b'"total":"many"', 1), "expected a trace header"),
    ],
)
def test_a_broken_file_is_one_clear_line_and_exit_code_2(
    cli, recording: Path, harm: Callable[[bytes], bytes], complaint: str
) -> None:
    recording.write_bytes(harm(recording.read_bytes()))
    for words in (("trace", "replay", recording), ("trace", "show", recording), ("sim", "--trace", recording)):
        done = cli(*words)
        assert (done.code, done.out) == (2, "")
        assert str(recording) in done.err and "expected" in done.err and done.err.count("\n") == 1
    assert complaint in cli("trace", "replay", recording).err


def test_an_id_that_is_submitted_twice_makes_no_workload(cli, recording: Path) -> None:
    first = changed(recording, "Submit", lambda line: None)
    lines = recording.read_text().splitlines()
    again = json.loads(lines[first - 1])
    last = json.loads(lines[-1])
    again.update(t=last["t"], seq=last["seq"] + 1, cause=last["seq"] + 1)
    recording.write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    done = cli("sim", "--trace", recording)
    assert done.code == 2 and f"seq {again['seq']}: expected an id that is submitted once" in done.err
