"""The benchmark of the weight store finds all of its numbers; what they are is for the benchmark to say."""

from __future__ import annotations

from tangram.bench import weights
from tangram.bench.base import run_module
from tangram.bench.weights import WeightsSizes


def test_every_metric_is_measured_and_compared_with_its_goal() -> None:
    progress: list[float] = []
    sizes = WeightsSizes(versions=2, engines=2, layers=2, width=32, heads=2, quiet_steps=4, tokens=12)
    result = run_module(weights, sizes, progress=lambda share, text="": progress.append(share))
    assert progress == sorted(progress) and progress[-1] == 1.0
    assert result.goals.keys() == result.metrics.keys()
    assert [name for name, goal in result.goals.items() if goal.op != "printed"] == ["exposed_share"]
    assert {"push_s", "pull_s", "exposed_s", "reread_s", "step_ms"} < result.metrics.keys()
    assert result.metrics["exposed_s"] > 0.0 and result.metrics["pull_s"] > 0.0
    assert "exposed_share" in result.spread
