"""The reservation benchmark: its project, its agents, and one small run of both sides on real sandboxes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tangram.bench import reservation
from tangram.bench.base import BenchResult, at_least, at_most, default_backend, run_module
from tangram.bench.reservation import ReservationSizes, agents, measured, project
from tangram.bench.reservation.agents import Edit
from tangram.bench.reservation.neighbours import disturbance_warning
from tangram.bench.reservation.sides import BY_ACTION, RESERVED, SIDES
from tangram.core.action import Action, Outcome, Status, Usage
from tangram.core.demand import CPU, Demand, cores
from tangram.core.messages import Finished, Grant, Release, Reserve, Settle, Share, Start, Submit, cpu_node
from tangram.core.trace import Header, Recorder
from tangram.errors import InvalidConfig
from tangram.sim.compare import Setup, Source, compare
from tangram.sim.recordings import recorded_size
from tangram.sim.trace_summary import replay, summarize

pytestmark = pytest.mark.slow

SMALL = ReservationSizes(groups=1, siblings=3, think_faster=150.0, seeds=1)
"""Numbers of so small a run mean nothing; everything else about them is as it should be."""


def needs_sandboxes() -> None:
    backend, why = default_backend()
    if backend == "sandbox":
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI has everything that sandboxes need, but: {why}")
    pytest.skip(why)


# ---- the project ------------------------------------------------------------------------------------------------


def shell(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("{cpus}", "2")],
        cwd=folder,
        env=os.environ | project.ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def almanac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("almanac")
    for command in project.setup():
        shell(command, folder)
    return folder


def test_all_tests_of_the_project_pass_before_a_bug_is_planted(almanac: Path) -> None:
    good, total = project.passed(shell(project.SUITE, almanac))
    defined = sum(text.count("def test_") for path, text in project.FILES.items() if path.startswith("tests/"))
    assert good == total == defined


@pytest.mark.parametrize("bug", project.BUGS, ids=lambda bug: bug.name)
def test_a_bug_fails_its_tests_a_misguided_repair_some_and_the_right_one_none(bug: project.Bug, almanac: Path) -> None:
    healthy = (almanac / bug.path).read_text()
    shell(bug.plant, almanac)
    assert project.passed(shell(f"{project.PYTHON} -m unittest {bug.tests}", almanac))[0] < 4
    shell(project.substitute(bug.path, bug.planted, bug.misguided), almanac)
    good, total = project.passed(shell(project.SUITE, almanac))
    assert 0 < good < total
    shell(project.substitute(bug.path, bug.misguided, bug.right), almanac)
    assert (almanac / bug.path).read_text() == healthy


def test_counts_of_tests_are_read_whatever_the_order_of_the_processes() -> None:
    output = (
        "..F\nRan 4 tests in 0.1s\n..Ran 3 tests in 0.2s\n.FAILED (failures=1, errors=2)\n\nOK\nRan 1 test in 0.0s\n"
    )
    assert project.passed(output) == (5, 8)


# ---- the agents -------------------------------------------------------------------------------------------------


def test_equal_seeds_draw_equal_agents_and_other_seeds_other_agents() -> None:
    options = dict(groups=3, siblings=4, think_faster=15.0)
    assert agents.draw_scripts(3, **options) == agents.draw_scripts(3, **options) != agents.draw_scripts(4, **options)


def test_siblings_share_the_bug_and_each_goes_its_own_way() -> None:
    scripts = agents.draw_scripts(0, groups=3, siblings=4, think_faster=15.0)
    bugs = [script.bug.name for script in scripts]
    assert [bugs[k : k + 4] for k in (0, 4, 8)] == [[name] * 4 for name in dict.fromkeys(bugs)]
    assert len({script.turns for script in scripts}) == len(scripts)


def test_agents_think_as_real_ones_did_by_the_stated_factor_faster() -> None:
    scripts = agents.draw_scripts(0, groups=40, siblings=4, think_faster=15.0)
    thinks = sorted(turn.think_s for script in scripts for turn in script.turns)
    assert thinks[len(thinks) // 2] == pytest.approx(3.1 / 15.0, rel=0.1)


def test_every_agent_ends_with_the_whole_suite_as_its_reward() -> None:
    for script in agents.draw_scripts(1, groups=2, siblings=4, think_faster=15.0):
        assert [turn.reward for turn in script.turns] == [False] * (len(script.turns) - 1) + [True]
        assert script.turns[-1].does == project.SUITE
        assert script.actions == 2 + sum(not isinstance(turn.does, Edit) for turn in script.turns)


# ---- what a recording shows -------------------------------------------------------------------------------------


def test_the_core_time_of_a_step_is_divided_without_a_rest(tmp_path: Path) -> None:
    """Two trajectories with a core each of two. One runs from 0 to 2 s and is released at 6 s; the other comes at 1 s,
    waits until 3 s although a core is free, runs until 5 s, and is released then."""
    recorder, path = Recorder(), tmp_path / "t.jsonl"
    first, second = (Action(id=n, demand=Demand({CPU: cores(1)}), trajectory=n, sandbox=f"box-{n}") for n in "ab")
    lines = [
        (0.0, Reserve(sandbox="box-a", memory=1), []),
        (0.0, Submit(action=first), [_started(first)]),
        (1.0, Reserve(sandbox="box-b", memory=1), []),
        (1.0, Submit(action=second), []),
        (2.0, Finished(action="a"), [_settled("a", 0.0, 2.0, cpu_s=1.0)]),
        (3.0, Reserve(sandbox="unknown", memory=1), [_started(second)]),
        (5.0, Finished(action="b"), [_settled("b", 2.0, 2.0, cpu_s=2.0)]),
        (5.0, Release(sandbox="box-b"), []),
        (6.0, Release(sandbox="box-a"), []),
    ]
    header = recorder.header(Header(policy="pods:1", pools=cpu_node("n", 2)))
    path.write_bytes(header + b"".join(recorder.lines(*line) for line in lines))
    recording = measured.read_recording(path, "ab", name="some", keeps_cores=1.0)
    shares = recording.core_time
    assert (shares.used, shares.held) == (pytest.approx(3 / 12), pytest.approx(1 / 12))
    assert shares.thinking == pytest.approx(4 / 12), "a is kept from 2 s to 6 s"
    assert (shares.wanted, shares.unwanted) == (pytest.approx(2 / 12), pytest.approx(2 / 12))
    assert [(row.submitted_at, row.ended_at, row.waiting_s) for row in recording.result.rows] == [(0, 2, 0), (1, 5, 2)]
    assert (recording.result.makespan_s, recording.result.core_s) == (6.0, 3.0)


def _started(action: Action) -> Start:
    return Start(action=action, grant=Grant(action.id, "n", (Share("cpu@n", 1000, 1000),), 1000))


def _settled(action: str, waiting_s: float, execution_s: float, cpu_s: float) -> Settle:
    usage = Usage(cpu_s=cpu_s)
    outcome = Outcome(action=action, status=Status.SUCCEEDED, waiting_s=waiting_s, execution_s=execution_s, usage=usage)
    return Settle(outcome=outcome)


def test_a_result_warns_when_other_programs_used_much_cpu() -> None:
    assert disturbance_warning([0.02, 0.09]) == ""
    assert "up to 31.0 % of the cores" in disturbance_warning([0.02, 0.31])


# ---- both sides for real ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reservation")


@cache
def small_run(folder: Path) -> tuple[BenchResult, list[tuple[float, str]]]:
    """One run serves all tests that only read it."""
    progress: list[tuple[float, str]] = []
    result = run_module(
        reservation,
        SMALL,
        processes=1,
        progress=lambda share, words="": progress.append((share, words)),
        report=folder / "report.html",
        backend="sandbox",
    )
    return result, progress


@pytest.fixture
def run(folder: Path) -> tuple[BenchResult, list[tuple[float, str]]]:
    needs_sandboxes()
    return small_run(folder)


def test_the_goals_are_there_and_what_was_measured_is_called_so(run) -> None:
    result, _ = run
    assert result.label == "measured" and result.settings["backend"] == "sandbox"
    expected = {"act_ratio": at_least(3.0), "step_ratio": at_least(1.5), "sim_error": at_most(0.2)}
    assert expected.items() <= result.goals.items()
    assert result.metrics.keys() >= expected.keys()


def test_both_sides_earn_the_same_rewards_of_which_not_all_are_the_highest(run) -> None:
    result, _ = run
    assert result.metrics["rewards_differ"] == 0
    assert result.sides[RESERVED]["reward_mean"] == result.sides[BY_ACTION]["reward_mean"] < 1.0


def test_every_action_of_both_sides_settles(run, folder: Path) -> None:
    expected = sum(script.actions for script in agents.draw_scripts(0, groups=1, siblings=3, think_faster=150.0))
    for side in SIDES:
        summary = summarize(folder / reservation.RECORDINGS[side])
        assert summary.unsettled == 0
        assert sum(run.actions for run in summary.runs) == expected


def test_a_reserved_trajectory_has_one_core_for_all_that_it_does(run, folder: Path) -> None:
    text = (folder / reservation.RECORDINGS[RESERVED]).read_text()
    grants = re.findall(r'"reserved":(\d+),"limit":(\d+),"cells":\[\]}],"width":(\d+)', text)
    assert grants and set(grants) == {("1000", "1000", "1000")}


def test_shares_of_the_core_time_add_up(run) -> None:
    for numbers in run[0].sides.values():
        shares = [value for name, value in numbers.items() if name.endswith("_share")]
        assert len(shares) == 4 and sum(shares) + numbers["core_use"] == pytest.approx(1.0, abs=0.02)
    assert run[0].sides[BY_ACTION]["thinking_share"] == 0.0 < run[0].sides[RESERVED]["thinking_share"]


def test_progress_names_the_running_system_and_ends_at_one(run) -> None:
    messages = run[1]
    shares = [share for share, _ in messages]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    assert any("reserved: 3 of 3 trajectories" in words for _, words in messages)
    assert any("by action: 3 of 3 trajectories" in words for _, words in messages)


def test_the_report_stands_alone_and_shows_both_sides(run, folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert "src=" not in text and "href=" not in text and "@import" not in text
    assert text.count("Timeline of all trajectories") == 2
    assert f"{run[0].sides[RESERVED]['reward_mean']:.3f}" in text
    assert f"tangram sim --trace {folder}/actions.jsonl" in text


def test_the_recording_replays_and_can_be_simulated_under_other_policies(run, folder: Path) -> None:
    path = folder / reservation.RECORDINGS[BY_ACTION]
    assert replay(path).difference is None
    setup = Setup(
        source=Source(traces=(str(path),)), size=recorded_size(path), policies=("pods:1", "adaptive"), seeds=(0,)
    )
    (comparison,) = compare([setup], workers=1)
    assert comparison.completed("adaptive") == comparison.completed("pods:1") == (3, 3)


def test_nothing_is_left_of_a_run(run, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["actions.jsonl", "report.html", "reserved.jsonl"]


def test_an_interrupt_in_the_midst_of_it_leaves_nothing_behind(tmp_path: Path) -> None:
    needs_sandboxes()
    command = [sys.executable, "-c", "from tangram.cli import main; main()", "bench", "reservation", "--quick"]
    # A process that ignores the interrupt passes that on; a terminal does not.
    running = subprocess.Popen(
        [*command, "--report", str(tmp_path / "out" / "report.html")],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with running:
        deadline = time.monotonic() + 60.0
        while not list(tmp_path.glob("tangram-bench-*/state/owners/*/boxes/*")) or not _is_recording(tmp_path):
            assert running.poll() is None and time.monotonic() < deadline, "no trajectory has begun"
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=60.0)
    assert (running.returncode, output) == (130, b"")
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def _is_recording(folder: Path) -> bool:
    """The first side has been begun, and its first trajectory is under way."""
    return any(path.stat().st_size > 4096 for path in folder.glob("tangram-bench-*/0-*.jsonl.partial"))


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="one of sandbox"):
        run_module(reservation, SMALL, processes=1, backend="pod")
