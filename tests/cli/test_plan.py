"""`tangram plan`, as its users call it."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL = ("--batch", 8, "--seeds", 1, "--workers", 1)


def test_the_curve_and_the_answer_are_printed(cli, tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    done = cli("plan", *SMALL, "--report", report)
    assert (done.code, done.err) == (0, "")
    assert "coding: cores for adaptive" in done.out and "simulated" in done.out
    assert "█" in done.out and "✓" in done.out and "pods:0.5 today" in done.out
    assert "adaptive reaches a mean ACT of" in done.out
    assert report.read_text().startswith("<!doctype html>")


def test_the_report_is_named_as_it_was_given(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "\nreport: plan.html\n" in cli("plan", *SMALL, "--report", "plan.html").out


def test_json_holds_the_answer_and_every_point(cli) -> None:
    document = cli("plan", *SMALL, "--target", "p95", "--json").json
    assert (document["target"], document["resource"], document["like"]) == ("p95", "cores", "pods:0.5")
    assert document["reference"]["size"] == 4
    assert document["smallest"] in [point["size"] for point in document["points"]]
    assert document["saved"] == pytest.approx(1.0 - document["smallest"] / 4)


def test_the_command_in_the_json_reproduces_it(cli) -> None:
    import shlex

    first = cli("plan", *SMALL, "--json")
    words = shlex.split(first.json["command"])
    assert cli(*words[1:], "--workers", 1, "--json").out == first.out


def test_devices_are_sized_where_the_work_uses_them(cli) -> None:
    document = cli("plan", "teachers", "--batch", 40, "--seeds", 1, "--workers", 1, "--json").json
    assert (document["resource"], document["reference"]["size"]) == ("devices", 40)


def test_today_a_service_has_fixed_devices_not_pods(cli, tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    output = cli("plan", "teachers", "--batch", 40, "--seeds", 1, "--workers", 1, "--report", report).out
    assert "fixed devices today" in output and "fewer than 40 fixed devices." in output
    assert "pods" not in output and "40 devices, fixed devices" in report.read_text()


def test_a_recorded_trace_is_sized(cli, recording: Path) -> None:
    document = cli("plan", "--trace", recording, "--like", "pods:1@6", "--workers", 1, "--json").json
    assert (document["like"], document["reference"]["size"], document["seeds"]) == ("pods:1", 6, [0])


def test_a_recording_is_compared_with_what_it_was_recorded_with(cli, recording: Path) -> None:
    done = cli("plan", "--trace", recording, "--workers", 1)
    assert done.code == 0, done.err
    assert "adaptive, as recorded" in done.out and "pods" not in done.out
    assert "than adaptive on 4 cores, as recorded." in done.out
    document = cli("plan", "--trace", recording, "--workers", 1, "--json").json
    assert (document["like"], document["reference"]["size"], document["recorded"]) == ("adaptive", 4, True)
    assert document["points"][-1]["size"] == 4 and document["smallest"] <= 4


def test_the_command_of_a_plan_for_a_recording_reproduces_it(cli, recording: Path) -> None:
    import shlex

    first = cli("plan", "--trace", recording, "--workers", 1, "--json")
    assert cli(*shlex.split(first.json["command"])[1:], "--workers", 1, "--json").out == first.out


def test_a_target_out_of_reach_is_an_answer_too(cli) -> None:
    done = cli("plan", "--batch", 3, "--seeds", 1, "--workers", 1, "--act", "0.000001")
    assert done.code == 0
    assert "adaptive does not reach a mean ACT of" in done.out
    output = " ".join(done.out.split())
    assert "more of them change nothing" in output and "another resource than cores" in output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--target", "p50"], "target: expected mean or p95 (which ACT; its seconds go to --act)"),
        (["--target", "1.78"], "target: expected mean or p95 (which ACT; its seconds go to --act), got '1.78'"),
        (["--like", ""], "like: expected NAME@SIZE"),
        (["--resource", ""], "resource: expected one of cores, devices"),
        (["--policy", ""], "policy: expected one of"),
        (["--seeds", ""], "seeds: expected whole numbers"),
        (["--report", "/dev/null"], "report: expected a file that can be written"),
        (["--act", "-1"], "act: expected"),
        (["--act", "0"], "act: expected a number above 0"),
        (["--like", "pods:0.5@"], "like: expected NAME@SIZE"),
        (["--like", "pods:0.5@-3"], "like: expected NAME@SIZE"),
        (["--like", "paper"], "like: expected a size after the name, such as paper@64"),
        (["--like", "pots:1@3"], "nearest: 'pods:R'"),
        (["--policy", "adaptve"], "nearest: 'adaptive'"),
        (["--resource", "memory"], "resource: expected one of cores, devices"),
        (["--resource", "devices"], "resource: expected cores: coding uses no devices"),
        (["search", "--resource", "cores"], "resource: expected devices: search uses no cores"),
        (["elastic"], "like: expected POLICY@CORES such as paper@32"),
        (["--trace", "none.csv"], "trace: expected a file that can be read"),
        (["--workers", "0"], "workers: expected"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(cli, words: list[str], complaint: str) -> None:
    done = cli("plan", "--batch", 4, "--workers", 1, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("tangram: ") and done.err.count("\n") == 1
    assert complaint in done.err
