"""Every benchmark that needs no sandbox, with sizes so small that its numbers mean nothing: it must promise and deliver
the same."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from tangram.bench import BENCHES, BenchResult, Goal, coding, elastic, scheduler_cost, sizing, teachers
from tangram.bench.base import PRINTED, BenchRun, at_least, at_most, run_module
from tangram.core.messages import cpu_node
from tangram.sim.simulate import simulate
from tangram.sim.workloads import build

pytestmark = pytest.mark.slow

CODING = coding.CodingSizes(batch=36, cores=(16, 64), trace_cores=(16,), learning_cores=16, seeds=2)
ELASTIC = elastic.ElasticSizes(
    loads=(0.7, 0.9),
    actions=60,
    seeds=2,
    ablation_nodes=1,
    ablations=(
        elastic.Ablation("paper_vs_fixed4", "fixed:4", 4, 32, Goal("about", 2.0)),
        elastic.Ablation("paper_vs_fixed16", "fixed:16", 8, 32, Goal("about", 3.0)),
    ),
)
SIZING = sizing.SizingSizes(batch=16, cores_step=1, teachers_batch=48, seeds=2)
TEACHERS = teachers.TeachersSizes(batches=(48, 96), services=3, nodes=2, targets=(1, 8), seeds=2)
COST = scheduler_cost.SchedulerCostSizes(
    cores=8,
    sandboxes=16,
    depth=40,
    depth_large=400,
    warm_up=100,
    window=100,
    repeats=2,
    sim_batch=4,
    sim_cores=4,
    sim_repeats=1,
)

GOALS = {
    "coding": {
        "act_ratio_16": at_least(6.0),
        "act_ratio_64": at_least(4.0),
        "ceiling_ratio_16": PRINTED,
        "ceiling_ratio_64": PRINTED,
        "step_ratio_16": at_least(2.2),
        "step_ratio_64": at_least(1.4),
        "learned_share": at_least(0.8),
    },
    "elastic": {
        "act_vs_paper_min": at_least(1.2),
        "act_vs_paper_mean": at_least(1.4),
        "act_vs_paper_mean_no_resize": at_least(1.1),
        "p99_vs_paper_min": at_least(1.0),
        "paper_vs_fixed4": Goal("about", 2.0),
        "paper_vs_fixed16": Goal("about", 3.0),
        "bound_ratio_07": at_most(2.8),
    },
    "sizing": {"cores_saved": at_least(0.75), "devices_saved": at_least(0.712)},
    "teachers": {"devices_saved": at_least(0.712)},
    "scheduler-cost": {
        "us_per_action_4e1": at_most(60.0),
        "growth_4e2": at_most(3.0),
        "bytes_per_waiting": at_most(2048.0),
        "sim_actions_per_s": at_least(10_000.0),
    },
}


def _silent(share: float) -> None:
    pass


@cache
def small(name: str) -> BenchResult:
    """One run of each serves all tests that only read it."""
    module, sizes = {
        "coding": (coding, CODING),
        "elastic": (elastic, ELASTIC),
        "sizing": (sizing, SIZING),
        "teachers": (teachers, TEACHERS),
        "scheduler-cost": (scheduler_cost, COST),
    }[name]
    return run_module(module, sizes, processes=1)


@pytest.fixture(scope="module", params=GOALS)
def result(request: pytest.FixtureRequest) -> BenchResult:
    """A fixture of the module, so that the tests of one benchmark are neighbours, and usually in one worker."""
    return small(request.param)


def test_every_promised_metric_is_there_with_its_goal(result: BenchResult) -> None:
    for metric, goal in GOALS[result.name].items():
        assert result.goals[metric] == goal
        assert metric in result.metrics


def test_every_number_is_finite_and_within_its_interval(result: BenchResult) -> None:
    assert all(math.isfinite(value) for value in result.metrics.values())
    for metric, (low, high) in result.spread.items():
        assert low <= result.metrics[metric] <= high


def test_a_result_names_its_benchmark_and_its_parameters(result: BenchResult, request: pytest.FixtureRequest) -> None:
    assert result.name == request.node.callspec.params["result"]
    assert result.label == ("measured" if result.name == "scheduler-cost" else "simulated")
    assert result.settings and result.notes


@pytest.mark.parametrize("module", [coding, elastic, sizing, teachers])
def test_ten_seeds_and_three_with_quick(module: object) -> None:
    assert module.FULL.seeds >= 10 and module.QUICK.seeds == 3  # type: ignore[attr-defined]


def test_all_core_counts_of_the_goals_are_played() -> None:
    assert tuple(coding.ACT_GOALS) == coding.FULL.cores
    assert set(coding.STEP_GOALS) < set(coding.FULL.cores)
    assert coding.QUICK.cores == coding.FULL.cores


def test_the_same_seeds_give_the_same_result_in_any_number_of_processes() -> None:
    assert run_module(elastic, ELASTIC, processes=2) == small("elastic")


# ---- coding ---------------------------------------------------------------------------------------------------


def test_a_trace_is_played_beside_the_generated_work(tmp_path: Path) -> None:
    lines = ["trajectory,seq,tool,category,think_s,duration_s,cpu_seconds,cpu_cores_max,mem_mb_max"]
    lines += [f"t{t},{seq},Bash,test,1.0,{2 + t},{1 + t},2,200" for t in range(3) for seq in range(4)]
    (tmp_path / coding.TRACE_FILE).write_text("\n".join(lines))
    sizes = coding.CodingSizes(batch=36, cores=(16,), trace_cores=(16,), learning_cores=16, seeds=2)
    result = run_module(coding, sizes, trace=tmp_path, processes=1)
    generated = [name for name in result.metrics if "_trace" not in name]
    assert {f"{name}_trace" for name in generated} == result.metrics.keys() - set(generated)
    assert all(result.metrics[name] == small("coding").metrics[name] for name in generated)


def test_nothing_is_faster_than_alone() -> None:
    metrics = small("coding").metrics
    for cores in CODING.cores:
        assert metrics[f"act_ratio_{cores}"] <= metrics[f"ceiling_ratio_{cores}"] * 1.001


# ---- elastic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.45, 0.75])
@pytest.mark.parametrize("name", ["fcfs", "paper", "adaptive"])
def test_no_policy_beats_the_bounds(name: str, exponent: float) -> None:
    sizes = elastic.ElasticSizes(cores=8, cores_max=4)
    workload = build("elastic", batch=100, seed=3, exponent=exponent, load=0.7, units=8, cores_max=4)
    result = simulate(workload, name, cpu_node("n0", 8), knowledge="perfect")
    mean_s = result.acts().mean()
    assert mean_s >= elastic.lower_bound(workload, 8, 4)
    assert mean_s >= elastic.capacity_bound(workload, sizes, exponent, result.makespan_s)


def test_an_action_alone_on_all_that_it_can_use_meets_both_bounds() -> None:
    sizes = elastic.ElasticSizes(cores=32, cores_max=16)
    workload = build("elastic", batch=1, seed=0, exponent=0.5, units=32, cores_max=16)
    seconds = workload.episodes[0].turns[0].steps[0].work_s / 4.0
    assert elastic.lower_bound(workload, 32, 16) == pytest.approx(seconds)
    assert elastic.capacity_bound(workload, sizes, 0.5, 1e9) == pytest.approx(seconds)


# ---- sizing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", [2, 7, 11, 40])
@pytest.mark.parametrize("needed", [2, 3, 11, 39, 40])
def test_the_search_finds_the_smallest_size_whatever_the_guess(needed: int, guess: int) -> None:
    assert sizing.smallest(lambda size: size >= needed, list(range(2, 41)), guess) == needed


def test_nothing_is_saved_if_no_size_is_enough() -> None:
    assert sizing.smallest(lambda size: False, [8, 16, 24], 8) == 24


def test_devices_come_in_nodes_of_which_the_last_may_be_smaller() -> None:
    assert [pool.total for pool in sizing.device_nodes(19, 8)] == [8, 8, 3]
    assert [pool.total for pool in sizing.device_nodes(8, 8)] == [8]


# ---- teachers -------------------------------------------------------------------------------------------------


def test_all_published_ratios_are_printed_and_the_benchmark_is_listed() -> None:
    assert "teachers" in BENCHES
    ratios = {f"act_vs_{side}_{batch}" for side in ("static", "on_demand") for batch in teachers.FULL.batches}
    assert teachers.PUBLISHED.keys() < ratios
    assert teachers.QUICK.batches == teachers.FULL.batches
    assert {f"act_vs_{side}_{batch}" for side in ("static", "on_demand") for batch in (48, 96)} < small(
        "teachers"
    ).metrics.keys()


def test_a_published_ratio_has_no_goal_but_is_compared_in_a_note() -> None:
    sizes = teachers.TeachersSizes(batches=(1024,), services=10, targets=(8,), seeds=1)
    seed = [dict.fromkeys((*teachers.SHOWN, "late_share", "busiest_share", "peak_load"), 2.0)]
    run = BenchRun()
    teachers.compare_batch(run, sizes, dict.fromkeys(teachers.sides_of(sizes), seed), 1024)
    teachers.add_notes(run, sizes)
    assert run.goals == {"act_vs_static_1024": PRINTED, "act_vs_on_demand_1024": PRINTED}
    assert any("act_vs_on_demand_1024 1, there 101.8" in note for note in run.notes)


def test_on_demand_is_compared_with_its_best_setting() -> None:
    metrics = small("teachers").metrics
    for batch in TEACHERS.batches:
        for variant in ("", "_engine_start", "_router"):
            best = metrics[f"act_vs_on_demand_{batch}{variant}"]
            assert best <= metrics[f"act_vs_on_demand_{batch}{variant}_target_1"] * 1.001
            assert metrics[f"on_demand_target_{batch}{variant}"] in TEACHERS.targets


def test_further_work_of_the_released_system_makes_it_slower() -> None:
    metrics = small("teachers").metrics
    for batch in TEACHERS.batches:
        for variant in ("_engine_start", "_router"):
            assert metrics[f"act_vs_on_demand_{batch}{variant}"] > metrics[f"act_vs_on_demand_{batch}"]


def test_every_side_of_teachers_shows_the_same_numbers() -> None:
    sides = small("teachers").sides
    assert list(sides) == [f"{name} {batch}" for batch in (48, 96) for name in ("by action", "static", "on demand")]
    for name, numbers in sides.items():
        assert tuple(numbers) == teachers.SHOWN
        assert 0.0 < numbers["device_use"] <= 1.0 and 0.0 <= numbers["waiting_share"] <= 1.0
        assert numbers["restores_per_call"] > 0.0, f"{name} has loaded every model at least once"


def test_all_systems_get_the_same_calls_and_each_call_shape_has_its_properties() -> None:
    plain, even, half = (teachers.shape_workload(TEACHERS, 96, shape, 1) for shape in ("", "even", "half"))
    assert plain == teachers.shape_workload(TEACHERS, 96, "", 1)
    counts = [sum(each.task == f"domain-{k}" for each in even.episodes) for k in range(3)]
    assert counts == [32, 32, 32]
    for before, after in zip(plain.episodes, half.episodes, strict=True):
        assert after.turns[0].think_s == before.turns[0].think_s / 2.0
        assert after.turns[0].steps == before.turns[0].steps


def test_the_peak_is_the_most_work_that_comes_within_a_minute() -> None:
    assert teachers.peak_s([(0.0, 5.0), (30.0, 7.0), (59.0, 1.0), (61.0, 4.0), (300.0, 12.0)]) == 13.0
    assert teachers.peak_s([(0.0, 5.0), (60.0, 6.0)]) == 6.0, "the first one is a minute ago"


# ---- scheduler-cost -------------------------------------------------------------------------------------------


def test_metrics_are_named_after_the_depth_at_which_they_were_measured() -> None:
    named = scheduler_cost.depth_name
    assert (named(scheduler_cost.FULL.depth), named(scheduler_cost.FULL.depth_large)) == ("1e3", "1e6")
    assert named(scheduler_cost.QUICK.depth_large) == "1e6"
    assert small("scheduler-cost").settings["depth_large"] == 400
    assert any("held 400 waiting actions, not 1,000,000" in note for note in small("scheduler-cost").notes)


def test_the_queue_keeps_its_depth_while_it_turns_over() -> None:
    bed = scheduler_cost.SchedulerTestbed(COST)
    bed.warm_up(40)
    bed.turn_over(200)
    assert bed.waiting == bed.scheduler.statistics().waiting == 40
    bed.scheduler.check()


def test_the_same_work_is_repeated() -> None:
    def turned_over() -> tuple[float, dict[str, int]]:
        bed = scheduler_cost.SchedulerTestbed(COST)
        bed.warm_up(40)
        return bed.now, bed.scheduler.statistics().settled

    assert turned_over() == turned_over()
