"""Comparisons: the same work for all, ratios paired by seed, the same numbers however they are computed."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import msgspec
import pytest

from tangram.errors import InvalidConfig
from tangram.reports.statistics import mean_of, ratio_of, student_t95
from tangram.sim.compare import METRICS, Comparison, Setup, Source, check_policy, compare
from tangram.sim.size import Size, default_size, estimate_load, pods_can_run, span

CODING = Source(workload="coding", batch=12)


def setup(**changes) -> Setup:
    fields = {"source": CODING, "size": Size(cores=4), "policies": ("pods:0.5", "fcfs", "adaptive"), "seeds": (0, 1)}
    return Setup(**(fields | changes))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare([setup()], workers=1, keep=True)[0]


# ---- what comes out -------------------------------------------------------------------------------------------


def test_every_policy_is_played_under_every_seed_in_order(comparison: Comparison) -> None:
    assert [(row.seed, row.policy) for row in comparison.rows] == [
        (seed, name) for seed in (0, 1) for name in ("pods:0.5", "fcfs", "adaptive")
    ]


def test_all_policies_meet_the_same_work(comparison: Comparison) -> None:
    for seed in (0, 1):
        counts = {row.summary["actions"] for row in comparison.rows if row.seed == seed}
        assert len(counts) == 1


def test_whole_results_are_kept_for_the_first_seed_alone(comparison: Comparison) -> None:
    assert [row.result is not None for row in comparison.rows] == [True] * 3 + [False] * 3
    assert comparison.kept_result("fcfs") is comparison.rows[1].result


def test_ratios_show_how_many_times_less_than_the_base(comparison: Comparison) -> None:
    ratio = comparison.ratio("adaptive", "act_mean_s")
    assert ratio is not None
    pairs = zip(comparison.values("pods:0.5", "act_mean_s"), comparison.values("adaptive", "act_mean_s"), strict=True)
    assert ratio.mean == pytest.approx(statistics.geometric_mean(base / other for base, other in pairs))
    assert ratio.low < ratio.mean < ratio.high
    assert all(comparison.ratio("pods:0.5", metric).mean == 1.0 for metric in METRICS)


def test_another_base_turns_the_ratio_round(comparison: Comparison) -> None:
    turned = msgspec.structs.replace(comparison, setup=setup(base="adaptive"))
    there, back = comparison.ratio("adaptive", "step_s"), turned.ratio("pods:0.5", "step_s")
    assert there.mean * back.mean == pytest.approx(1.0)


def test_the_same_numbers_with_one_process_and_with_several(comparison: Comparison) -> None:
    again = compare([setup()], workers=2)[0]
    assert [row.summary for row in again.rows] == [row.summary for row in comparison.rows]
    assert again.load == comparison.load


def test_one_seed_has_no_interval() -> None:
    once = compare([setup(seeds=(3,), policies=("fcfs", "adaptive"))], workers=1)[0]
    ratio = once.ratio("adaptive", "act_mean_s")
    assert ratio.low is None and ratio.high is None


def test_several_sizes_are_compared_at_once() -> None:
    small, large = compare(
        [setup(size=Size(cores=cores), policies=("fcfs",), seeds=(0,)) for cores in (2, 16)], workers=1
    )
    assert small.mean("fcfs", "act_mean_s") > large.mean("fcfs", "act_mean_s")
    assert small.load.cpu == pytest.approx(8 * large.load.cpu)


def test_progress_reaches_the_number_of_simulations() -> None:
    progress: list[tuple[float, int]] = []
    compare([setup(seeds=(0,))], workers=1, progress=lambda done, total: progress.append((done, total)))
    assert progress[-1] == (3, 3)
    assert progress == sorted(progress)


def test_device_use_is_counted_on_the_nodes_of_the_devices() -> None:
    source = Source(workload="teachers", batch=40)
    comparison = compare([Setup(source=source, size=Size(devices=40), policies=("fcfs",), seeds=(0,))], workers=1)[0]
    assert 0.0 < comparison.mean("fcfs", "device_use") < 1.0


def test_faults_strike_the_same_way_each_time() -> None:
    broken = setup(faults=4, policies=("fcfs", "adaptive"), seeds=(5,), size=Size(cores=4, nodes=2))
    first, second = (compare([broken], workers=1)[0] for _ in range(2))
    assert [row.summary for row in first.rows] == [row.summary for row in second.rows]


# ---- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": ()}, "at least one"),
        ({"policies": ("adaptve",)}, "nearest: 'adaptive'"),
        ({"policies": ("pod:0.5",)}, "nearest: 'pods:R'"),
        ({"policies": ("pods",)}, "nearest: 'pods:R'"),
        ({"policies": ("pods:half",)}, "pods:R with R cores"),
        ({"policies": ("pods:5",)}, "at most the limit"),
        ({"policies": ("fixed",)}, "fixed:K"),
        ({"policies": ("fixed:0",)}, "fixed:K"),
        ({"base": "paper"}, "one of pods:0.5, fcfs, adaptive"),
        ({"seeds": ()}, "different whole numbers"),
        ({"seeds": (1, 1)}, "different whole numbers"),
        ({"seeds": (-1,)}, "at least 0"),
        ({"knowledge": "all"}, "learned, hints, perfect"),
        ({"faults": -1}, "at least 0"),
        ({"ageing_s": 0.0}, "above 0"),
    ],
)
def test_a_setup_that_cannot_be_meant_is_refused(changes: dict, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        setup(**changes)


@pytest.mark.parametrize(
    "name", ["fcfs", "fixed:4", "paper", "adaptive", "adaptive:no-resize", "pods:1", "on-demand", "alone"]
)
def test_every_policy_in_the_help_is_known(name: str) -> None:
    check_policy(name)


def test_pods_need_sandboxes() -> None:
    elastic = setup(source=Source(workload="elastic", batch=5), size=Size(cores=32), policies=("pods:0.5",), seeds=(0,))
    with pytest.raises(InvalidConfig, match="without a sandbox"):
        compare([elastic], workers=1)


# ---- sizes ----------------------------------------------------------------------------------------------------


def test_pools_cover_the_demand_of_the_workload() -> None:
    search = Source(workload="search", batch=4).build(0)
    pools = {pool.name: pool for pool in Size(devices=16).pools(search)}
    assert list(pools) == ["gpu@gpu-0", "gpu@gpu-1", "search", "search/requests", "fetch"]
    assert pools["search/requests"].window.seconds == 60.0


def test_cores_and_memory_are_spread_over_the_nodes() -> None:
    pools = Size(cores=7, nodes=3, memory_per_core_gib=2.0).pools(CODING.build(0))
    assert [pool.total for pool in pools if pool.kind == "cpu"] == [3000, 2000, 2000]
    assert [pool.total for pool in pools if pool.kind == "memory"] == [6 * 1024, 4 * 1024, 4 * 1024]


@pytest.mark.parametrize(
    ("workload", "size", "words"),
    [
        ("coding", {}, "cores: expected at least 1 on one node: create container of coding"),
        ("coding", {"cores": 1, "memory_per_core_gib": 0.1}, "256 MiB of one sandbox"),
        ("search", {"devices": 7}, "devices: expected at least 8 on one node: judge judge of search"),
        ("teachers", {}, "devices: expected at least"),
    ],
)
def test_pools_that_can_never_serve_the_work_are_refused(workload: str, size: dict, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Size(**size).pools(Source(workload=workload, batch=8).build(0))


@pytest.mark.parametrize("wrong", [{"cores": -1}, {"devices": -8}, {"cores": 2, "nodes": 3}, {"nodes": 0}])
def test_a_size_that_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(InvalidConfig):
        Size(**wrong)


@pytest.mark.parametrize("workload", ["coding", "search", "teachers", "mixed", "elastic"])
def test_the_default_size_serves_its_workload(workload: str) -> None:
    work = Source(workload=workload, batch=9).build(0)
    size = default_size(work)
    assert size.pools(work)
    assert bool(size.cores) == (workload in ("coding", "mixed", "elastic"))
    assert bool(size.devices) == (workload in ("search", "teachers", "mixed"))
    assert pods_can_run(work) == (workload != "elastic")


def test_load_is_work_over_what_the_pools_give() -> None:
    work = Source(workload="elastic", batch=400, options=(("load", 0.5), ("units", 16))).build(0)
    load = estimate_load(work, Size(cores=16))
    assert load.cpu == pytest.approx(0.5, rel=0.35)
    assert load.core_s == pytest.approx(load.cpu * 16 * span(work))


# ---- statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (12, 2.1788), (13, 2.1604), (20, 2.0860), (30, 2.0423), (1000, 1.9623)],
)
def test_student_t_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_t95(degrees) == pytest.approx(quantile, abs=2e-4)


def test_the_interval_covers_the_truth_at_its_nominal_rate() -> None:
    rng = random.Random(7)
    hits = 0
    for _ in range(2000):
        interval = mean_of([rng.gauss(3.0, 1.0) for _ in range(5)])
        hits += interval.low <= 3.0 <= interval.high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_ratios_are_paired_and_averaged_as_logarithms() -> None:
    ratio = ratio_of([2.0, 8.0], [1.0, 16.0])
    assert ratio.mean == pytest.approx(1.0)
    half = student_t95(1) * math.log(2.0)
    assert ratio.high == pytest.approx(math.exp(half)) and ratio.low == pytest.approx(math.exp(-half))


def test_a_ratio_with_a_zero_is_none() -> None:
    assert ratio_of([0.0, 1.0], [1.0, 1.0]) is None


def test_an_unreadable_trace_is_reported_in_the_words_of_the_loader(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        Source(traces=(str(tmp_path / "none.csv"),)).build(0)
