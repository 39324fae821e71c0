"""The benchmark of functions, too small for its numbers to mean anything: it reports every metric."""

from __future__ import annotations

from tangram.bench import functions
from tangram.bench.base import PRINTED, at_most, run_module


def test_it_measures_every_metric_against_its_goal() -> None:
    shares: list[float] = []
    sizes = functions.FunctionsSizes(calls=5, scalings=1, bursts=1, burst_calls=8, pause_s=0.5, call_s=0.01)
    result = run_module(functions, sizes, progress=lambda share, _="": shares.append(share))
    assert result.goals == {
        "warm_overhead_ms_p50": at_most(3.0),
        "warm_ms_p99": PRINTED,
        "idle_instances": at_most(0.0),
        "scale_0_to_8_s": at_most(1.0),
        "scale_0_to_1_s": PRINTED,
        "busy_share_reserved": PRINTED,
        "busy_share_elastic": PRINTED,
    }
    assert result.metrics.keys() == result.goals.keys() and result.label == "measured"
    assert result.metrics["idle_instances"] == 0
    assert 0.0 < result.metrics["busy_share_reserved"] <= 1.0 and 0.0 < result.metrics["busy_share_elastic"] <= 1.0
    assert shares[-1] == 1.0
