"""The benchmark of the engine finds all of its numbers; what they are is for the benchmark to say."""

from __future__ import annotations

from tangram.bench import engine
from tangram.bench.base import run_module
from tangram.bench.engine import EngineSizes


def test_every_number_is_measured_and_judged() -> None:
    progress: list[float] = []
    sizes = EngineSizes(repetitions=2, width=16, heads=2, waves=1, rounds=1, tokens=24)
    result = run_module(engine, sizes, progress=lambda share, text="": progress.append(share))
    assert progress == sorted(progress) and progress[-1] == 1.0
    assert result.goals.keys() == result.metrics.keys()
    judged = {name for name, goal in result.goals.items() if goal.op != "printed"}
    assert judged == {"control_cost_steps", "prefill_gap", "throughput_share"}
    assert result.metrics["control_cost_steps"] == max(
        result.metrics["add_cost_steps"], result.metrics["abort_cost_steps"]
    )
    assert all(value > 0.0 for name, value in result.metrics.items() if not name.endswith("_cost_steps"))
