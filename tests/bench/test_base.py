"""The record of a result and what all benchmarks share."""

from __future__ import annotations

import math

import msgspec
import pytest

from tangram import bench
from tangram.bench.base import (
    PRINTED,
    BenchResult,
    BenchRun,
    Goal,
    at_least,
    at_most,
    geometric_mean,
    paired_ratio,
    run_jobs,
    subprogress,
)
from tangram.errors import InvalidConfig
from tangram.reports.statistics import mean_of


def test_a_goal_is_met_from_its_own_side() -> None:
    assert at_least(2.0).is_met(2.0) and not at_least(2.0).is_met(1.9)
    assert at_most(60.0).is_met(60.0) and not at_most(60.0).is_met(60.1)
    assert Goal("about", 2.0).is_met(2.3) and not Goal("about", 2.0).is_met(3.0)


def test_a_printed_number_has_nothing_to_meet() -> None:
    assert PRINTED.is_met(1.0) is None


def test_ratios_are_paired_by_seed_and_averaged_as_logarithms() -> None:
    above = [{"act": 2.0}, {"act": 30.0}, {"act": 8.0}]
    below = [{"act": 1.0}, {"act": 10.0}, {"act": 2.0}]
    ratio = paired_ratio(above, below, "act")
    logs = mean_of([math.log(2.0), math.log(3.0), math.log(4.0)])
    assert ratio.mean == pytest.approx(24.0 ** (1 / 3))
    assert logs.low is not None and logs.high is not None
    assert (ratio.low, ratio.high) == (pytest.approx(math.exp(logs.low)), pytest.approx(math.exp(logs.high)))


def test_a_gain_and_an_equal_loss_cancel_out() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert paired_ratio([{"x": 2.0}, {"x": 1.0}], [{"x": 1.0}, {"x": 2.0}], "x").mean == pytest.approx(1.0)


def test_findings_keep_value_interval_and_goal_together() -> None:
    run = BenchRun("some", label="simulated", settings={"seeds": 3})
    run.add("ratio", mean_of([1.0, 2.0, 3.0]), at_least(1.5))
    run.add("count", 4)
    result = run.result()
    assert result.metrics == {"ratio": 2.0, "count": 4.0}
    assert list(result.spread) == ["ratio"] and result.goals == {"ratio": at_least(1.5)}


def test_a_number_that_is_not_finite_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="ratio is inf"):
        BenchRun().add("ratio", math.inf)


def test_a_result_survives_json() -> None:
    run = BenchRun("some", settings={"seeds": 3})
    run.add("ratio", mean_of([1.0, 2.0, 3.0]), Goal("about", 2.0))
    result = run.result()
    assert msgspec.json.decode(msgspec.json.encode(result), type=BenchResult) == result


def _squared(base: int, exponent: int) -> int:
    return int(base**exponent)


@pytest.mark.parametrize("processes", [1, 2])
def test_jobs_answer_in_their_order_and_progress_ends_at_one(processes: int) -> None:
    progress: list[float] = []
    assert run_jobs(_squared, [(3, 2), (2, 2), (1, 2)], processes, progress.append) == [9, 4, 1]
    assert progress == sorted(progress) and progress[-1] == pytest.approx(1.0)


def test_the_progress_of_a_part_is_a_share_of_the_whole() -> None:
    progress: list[float] = []
    subprogress(progress.append, 0.5, 1.0)(0.5)
    assert progress == [0.75]


def test_an_unknown_benchmark_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidConfig, match="did you mean coding"):
        bench.run("codin")
