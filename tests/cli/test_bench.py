"""`tangram bench`, as its users call it. The benchmarks themselves are replaced by a short one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tangram.bench
from tangram.bench import BENCHES, BenchResult, Goal

SIDE = {"act_mean_s": 1.24, "core_use": 0.116, "reward_mean": 0.9841}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The arguments that the verb passed to the benchmarks."""
    calls: list[dict] = []

    def run(name: str, **options) -> BenchResult:
        calls.append({"name": name} | options)
        return BenchResult(
            name=name,
            label="simulated",
            settings={"batch": 512},
            metrics={"act_ratio_16": 6.5, "us_per_action": 75.0, "ceiling": 7.0},
            spread={"act_ratio_16": (6.1, 6.9)},
            goals={"act_ratio_16": Goal(">=", 6.0), "us_per_action": Goal("<=", 60.0), "ceiling": Goal("printed")},
            notes=["at a load of 0.9"],
            sides={"reserved": SIDE, "by action": SIDE | {"act_mean_s": 0.202, "core_use": 0.409}},
        )

    monkeypatch.setattr(tangram.bench, "run", run)
    return calls


def test_the_table_shows_goals_and_whether_they_are_met(cli, calls: list[dict]) -> None:
    done = cli("bench", "coding", "--quick")
    assert done.code == 0
    assert calls[0]["name"] == "coding" and calls[0]["quick"] is True
    by_metric = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "[6.1, 6.9]" in by_metric["act_ratio_16"] and ">= 6 " in by_metric["act_ratio_16"]
    assert "✓ met" in by_metric["act_ratio_16"]
    assert "✗ missed" in by_metric["us_per_action"]
    assert "printed" in by_metric["ceiling"]
    assert "batch 512" in done.out and "at a load of 0.9" in done.out


def test_json_is_one_object_per_benchmark(cli, calls: list[dict]) -> None:
    done = cli("bench", "all", "--json")
    results = [json.loads(line) for line in done.out.splitlines()]
    assert [each["name"] for each in results] == list(BENCHES)
    assert all({"name", "label", "settings", "metrics", "spread"} <= set(each) for each in results)


def test_a_trace_folder_is_handed_on(cli, calls: list[dict], tmp_path: Path) -> None:
    assert cli("bench", "coding", "--trace", tmp_path).code == 0
    assert calls[0]["trace"] == tmp_path


def test_without_a_name_the_benchmarks_are_listed(cli, calls: list[dict]) -> None:
    done = cli("bench")
    assert done.code == 0 and calls == []
    assert all(name in done.out for name in BENCHES)
    assert cli("bench", "--json").json == BENCHES


def test_only_a_benchmark_with_a_report_takes_a_report_path(cli, calls: list[dict], tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.html"
    done = cli("bench", "all", "--report", report, "--backend", "process")
    pages = {name: report.with_name(f"report-{name}.html") for name in ("reservation", "learning")}
    assert done.code == 0 and all(f"report: {page}" in done.out for page in pages.values())
    assert {call["name"]: call.get("report") for call in calls} == dict.fromkeys(BENCHES) | pages
    backends = {call["name"]: call["backend"] for call in calls if "backend" in call}
    assert backends == dict.fromkeys(("reservation", "durability", "soak", "step"), "process")


def test_without_root_one_line_warns_that_nothing_is_isolated(
    cli, calls: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    done = cli("bench", "reservation")
    assert (done.code, calls[0]["backend"]) == (0, "process")
    assert done.err == "sandboxes need root: the programs run as plain processes instead, which isolates nothing\n"


def test_the_sides_of_a_comparison_stand_beside_each_other(cli, calls: list[dict]) -> None:
    lines = cli("bench", "reservation", "--backend", "process").out.splitlines()
    by_word = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert by_word["mean ACT"][2:] == ["1.24", "s", "202", "ms"]
    assert by_word["core use"][2:] == ["11.6", "%", "40.9", "%"]
    assert by_word["reward"][1:] == ["0.9841", "0.9841"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["codng"], "nearest: 'coding'"),
        (["coding", "--trace", "/none"], "a folder that exists"),
        (["reservation", "--report", "/proc/no/report.html"], "a file that can be written"),
        (["reservation", "--backend", "podman"], "one of sandbox, process"),
        (["coding", "--report", "/tmp/none.html"], "no such option: coding does not use it"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(cli, words: list[str], complaint: str) -> None:
    done = cli("bench", *words)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err and done.err.count("\n") == 1
