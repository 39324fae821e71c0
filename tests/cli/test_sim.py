"""`tangram sim`, as its users call it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tangram.errors import InvalidConfig
from tangram.sim import compare as comparing
from tangram.sim import report as reporting

SMALL = ("--batch", 6, "--seeds", 2, "--workers", 1)


def test_the_table_names_every_policy_and_the_ratios(cli) -> None:
    done = cli("sim", "coding", *SMALL, "--cores", 2)
    assert (done.code, done.err) == (0, "")
    for words in ("coding: 6 trajectories on 2 cores, 2 seeds, load", "pods:0.5", "fcfs", "paper", "adaptive"):
        assert words in done.out
    for words in ("times less than pods:0.5", "time-weighted ACT", "p99", "simulated", "95 % interval"):
        assert words in done.out


@pytest.mark.parametrize("workload", ["search", "teachers", "mixed", "elastic"])
def test_every_workload_simply_works(cli, workload: str) -> None:
    done = cli("sim", workload, *SMALL, "--json")
    assert done.code == 0
    (comparison,) = done.json["comparisons"]
    assert list(comparison["policies"])[-1] == "adaptive"
    assert comparison["load"]["cpu"] + comparison["load"]["gpu"] > 0.0


def test_json_holds_rows_ratios_load_and_the_command(cli) -> None:
    done = cli("sim", *SMALL, "--policies", "fcfs,adaptive", "--cores", "2,4", "--json")
    assert done.json["label"] == "simulated"
    first, second = done.json["comparisons"]
    assert (first["size"]["cores"], second["size"]["cores"]) == (2, 4)
    assert first["load"]["cpu"] == pytest.approx(2 * second["load"]["cpu"])
    ratio = first["policies"]["adaptive"]["ratio"]["act_mean_s"]
    assert ratio["low"] <= ratio["mean"] <= ratio["high"]
    assert list(first["policies"]["fcfs"]["by_seed"]) == ["0", "1"]


def test_the_command_in_the_json_reproduces_it(cli) -> None:
    import shlex

    first = cli("sim", *SMALL, "--policies", "fcfs,adaptive", "--nodes", 2, "--ageing", 30, "--json")
    words = shlex.split(first.json["command"])
    assert words[0] == "tangram"
    assert cli(*words[1:], "--workers", 1, "--json").out == first.out


def test_seeds_are_a_number_or_a_list(cli) -> None:
    def seeds(text: str) -> list[str]:
        done = cli("sim", "--batch", 3, "--policies", "fcfs", "--seeds", text, "--workers", 1, "--json")
        return list(done.json["comparisons"][0]["policies"]["fcfs"]["by_seed"])

    assert (seeds("2"), seeds("4,1"), seeds("7,")) == (["0", "1"], ["4", "1"], ["7"])


def test_rewards_arrive_for_as_many_cores_as_there_are(cli) -> None:
    for units in (32, 8):
        words = ("--batch", 300, "--seeds", 1, "--option", f"units={units}", "--policies", "fcfs", "--workers", 1)
        (document,) = cli("sim", "elastic", *words, "--json").json["comparisons"]
        assert document["size"]["cores"] == units
        assert document["load"]["cpu"] == pytest.approx(0.7, rel=0.3)


def test_options_reach_the_workload(cli) -> None:
    few = cli("sim", "elastic", *SMALL, "--option", "load=0.1", "--policies", "fcfs", "--json").json
    many = cli("sim", "elastic", *SMALL, "--option", "load=0.9", "--policies", "fcfs", "--json").json
    assert few["comparisons"][0]["load"]["span_s"] > many["comparisons"][0]["load"]["span_s"]
    done = cli("sim", "teachers", *SMALL, "--option", "degrees=2,4", "--option", "multi_turn=true", "--json")
    assert done.code == 0 and "degrees=2,4" in done.json["command"]


def test_a_report_and_a_recording_are_written_and_announced(cli, tmp_path: Path) -> None:
    report, record = tmp_path / "made" / "report.html", tmp_path / "run.jsonl"
    done = cli("sim", *SMALL, "--policies", "fcfs,adaptive", "--report", report, "--record", record)
    assert done.code == 0
    assert f"report: {report}" in done.out and "xdg-open" in done.out
    assert "recorded adaptive under seed 0" in done.out
    assert report.read_text().startswith("<!doctype html>")
    assert '"policy":"adaptive"' in record.read_text().splitlines()[0]


def test_a_report_that_fails_in_the_end_does_not_cost_the_table(cli, tmp_path, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise InvalidConfig("report", "report.html", "a file that can be written (No space left on device)")

    monkeypatch.setattr(reporting, "write_comparison", broken)
    done = cli("sim", *SMALL, "--policies", "fcfs", "--report", tmp_path / "report.html")
    assert done.code == 2 and "No space left" in done.err
    assert "mean ACT" in done.out


def test_an_output_that_cannot_be_written_is_reported_before_the_work(cli, tmp_path, monkeypatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(comparing, "compare", never)
    (tmp_path / "file").touch()
    for option in ("--report", "--record"):
        done = cli("sim", *SMALL, option, tmp_path / "file" / "deep" / "out")
        assert done.code == 2 and "expected a file that can be written (Not a directory)" in done.err


def test_a_recording_is_played_again_on_the_pools_that_it_was_recorded_with(cli, recording: Path) -> None:
    done = cli("sim", "--trace", recording, "--policies", "fcfs,adaptive", "--workers", 1, "--json")
    (comparison,) = done.json["comparisons"]
    assert comparison["size"]["cores"] == 4
    assert comparison["seeds"] == [0]
    assert comparison["policies"]["adaptive"]["mean"]["trajectories"] == 4.0


def test_a_csv_trace_is_played(cli, tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    header = "trajectory,seq,tool,category,think_s,duration_s,cpu_seconds,cpu_cores_max,mem_mb_max"
    path.write_text(
        f"{header}\nt1,1,Bash,ls,1,0.5,0.1,1,100\nt1,2,Bash,test,2,8,6,1,200\nt2,1,Read,,0.5,0.1,0,1,90\n".replace(
            ",,", ",x,"
        )
    )
    done = cli("sim", "--trace", path, "--workers", 1, "--json")
    assert done.code == 0
    assert done.json["comparisons"][0]["policies"]["pods:0.5"]["mean"]["actions"] == 3.0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["codng"],
            "workload: expected one of coding, search, teachers, mixed, elastic (nearest: 'coding'), got 'codng'",
        ),
        (["--policies", "adaptiv"], "nearest: 'adaptive'"),
        (["--policies", "fcfs,pod:1"], "nearest: 'pods:R'"),
        (["--policies", ","], "policies: expected names"),
        (
            ["--policies", ""],
            "policies: expected names with commas between them; without --policies: the defaults, got ''",
        ),
        ([""], "workload: expected one of coding"),
        (["--seeds", ""], "seeds: expected whole numbers"),
        (["--cores", ""], "cores: expected whole numbers"),
        (["--base", ""], "base: expected one of pods:0.5, fcfs"),
        (["--batch", "-3"], "batch: expected a whole number, at least 1, got -3"),
        (["--cores", "-4"], "cores: expected whole numbers, at least 1"),
        (["--cores", "many"], "cores: expected whole numbers, at least 1"),
        (["--nodes", "0"], "nodes: expected 1 to"),
        (["--memory-per-core", "-1"], "memory-per-core: expected GiB, at least 0"),
        (["--devices", "8"], "devices: expected no such option, as coding uses no devices"),
        (["search", "--devices", "4"], "devices: expected at least 8 on one node"),
        (["teachers", "--devices", "-8"], "devices: expected a whole number, at least 0, got -8"),
        (["--seeds", "0"], "seeds: expected whole numbers, at least 1"),
        (["--seeds", "-1,2"], "seeds: expected whole numbers, at least 0"),
        (["--knowledge", "some"], "knowledge: expected one of learned, hints, perfect"),
        (["--faults", "-1"], "faults: expected a whole number, at least 0, got -1"),
        (["--ageing", "-5"], "ageing: expected"),
        (["--base", "paper", "--policies", "fcfs"], "base: expected one of fcfs"),
        (["--option", "grup=8"], "nearest: 'group'"),
        (["--option", "group"], "option: expected KEY=VALUE, got 'group'"),
        (["--option", "group=8", "--option", "group=4"], "option: expected each key once"),
        (["--workers", "0"], "workers: expected a whole number, at least 1, got 0"),
        (
            ["--trace", "none.csv"],
            "trace: expected a file that can be read (No such file or directory), got 'none.csv'",
        ),
        (["--trace", "empty.csv"], "empty.csv:1: expected a header"),
        (["--trace", "empty.jsonl"], "empty.jsonl: expected at least one action that ran to its end"),
        (["coding", "--trace", "empty.csv"], "workload: expected either a workload or --trace"),
        (["--report", "."], "report: expected a file that can be written"),
        (["--record", "empty.csv/run.jsonl"], "record: expected a file that can be written"),
        (["--report", "/dev/null"], "report: expected a file that can be written (it is a device or a pipe)"),
        (["--report", "/proc/report.html"], "report: expected a file that can be written"),
        (["--report", "out", "--record", "./out"], "report and record: expected a file of its own for each"),
        (["--record", "run.jsonl", "--knowledge", "perfect"], "knowledge: expected learned or hints with --record"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    cli, words: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").touch()
    Path("empty.jsonl").write_text('{"policy":"fcfs"}\n')
    done = cli("sim", "--workers", 1, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("tangram: ") and done.err.count("\n") == 1
    assert complaint in done.err


# ---- what was lost --------------------------------------------------------------------------------------------

LOSING = ("sim", "--batch", 6, "--seeds", 2, "--workers", 1, "--cores", 4, "--faults", 8)


def test_faults_strike_pods_and_policies_alike(cli) -> None:
    (comparison,) = cli(*LOSING, "--json").json["comparisons"]
    assert list(comparison["policies"]) == ["pods:0.5", "fcfs", "paper", "adaptive"]
    assert all(policy["mean"]["failed"] > 0.0 for policy in comparison["policies"].values())


def test_lost_trajectories_are_counted_and_warned_of_under_the_table(cli) -> None:
    done = cli(*LOSING, "--policies", "fcfs,adaptive")
    assert (done.code, done.err) == (0, "")
    table, _, after = done.out.partition("warning: trajectories were lost")
    row = next(line for line in table.splitlines() if line.strip().startswith("adaptive"))
    assert re.search(r"[\d.]+ of 6 *$", row) and " - " in row, "the step is not claimed"
    output = " ".join(after.split())
    assert "of 6 under adaptive" in output and "more --nodes lose less at once" in output


def test_no_step_time_is_claimed_for_a_batch_that_did_not_complete(cli, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    done = cli(*LOSING, "--policies", "fcfs,adaptive", "--json", "--report", report)
    document = done.json["comparisons"][0]["policies"]["adaptive"]
    assert document["mean"].get("step_s") is None and document["ratio"]["step_s"] is None
    for summary in document["by_seed"].values():
        assert ("step_s" in summary) == (summary["failed"] == 0.0)
    assert done.err.startswith("warning: trajectories were lost")
    assert "<strong>Warning:</strong> trajectories were lost" in report.read_text()


def test_faults_that_lose_nothing_are_no_warning(cli) -> None:
    done = cli("sim", "elastic", *SMALL, "--faults", 0, "--policies", "fcfs")
    assert "warning" not in done.out and "completed" not in done.out
