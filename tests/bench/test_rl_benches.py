"""The benchmarks of rollouts, run for real with sizes so small that their numbers mean nothing: each plays to its end
and delivers what it promises."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tangram.bench import BenchResult, affinity, redundancy, rollout, serverless
from tangram.bench.base import run_module
from tangram.rl.inference.affinity import BANDWIDTH, COMPUTE
from tangram.sim.serving_model import QWEN3_8B

pytestmark = pytest.mark.slow

ROLLOUT = rollout.RolloutSizes(
    environments=4, turns=3, latency_s=0.01, spreads=(0.5,), seeds=1, heavy_seeds=1, failures=0.5, layers=1, width=16
)
REDUNDANCY = redundancy.RedundancySizes(groups=2, members=2, extra=(0, 1), turns=3, latency_s=0.005, seeds=2)
SERVERLESS = serverless.ServerlessSizes(rollouts=2, groups=3, members=2, turns=2, latency_s=0.01, pause_s=0.05)
AFFINITY = affinity.AffinitySizes(
    seeds=1, sessions=2, turns=2, observation=6, writers=2, answer=3, slots=4, chunk=16, prefill_s_per_token=0.0001,
    decode_s_per_step=0.002, simulated=(QWEN3_8B.name,), simulated_ended=48,
)  # fmt: skip
FLEETS = {COMPUTE: {COMPUTE: 1}, BANDWIDTH: {BANDWIDTH: 2}, affinity.MIX: {COMPUTE: 1, BANDWIDTH: 1}}
"""Fewer engines than are measured: each is a process that imports PyTorch."""


def measured(module: Any, sizes: Any) -> BenchResult:
    """A complete result: every metric is a number, every goal has a metric, and its end was reported."""
    reported: list[float] = []

    def progress(share: float, words: str = "", /) -> None:
        reported.append(share)

    result: BenchResult = run_module(module, sizes, processes=1, progress=progress)
    assert result.settings == msgspec.to_builtins(sizes) and result.metrics
    assert [name for name, number in result.metrics.items() if not math.isfinite(number)] == []
    assert set(result.goals) <= set(result.metrics) and set(result.spread) <= set(result.metrics)
    assert reported == sorted(reported) and reported[-1] == pytest.approx(1.0)
    return result


def test_a_rollout_is_played_with_and_without_a_barrier() -> None:
    metrics = measured(rollout, ROLLOUT).metrics
    assert metrics["speedup_s05"] > 0.0 and metrics["ideal_s05"] >= 1.0 and metrics["speedup_heavy"] > 0.0
    assert metrics["share_of_ideal_min"] == metrics["share_of_ideal_s05"]
    assert (
        1 <= metrics["tokens_per_turn"] <= rollout.TOKENS_MAX
        and metrics["prefilled_per_turn"] >= rollout.OBSERVED_WORDS
    )


def test_redundant_groups_and_members_are_played_and_counted_as_waste() -> None:
    metrics = measured(redundancy, REDUNDANCY).metrics
    cells = [f"g{groups}_m{members}" for groups in (0, 1) for members in (0, 1)]
    assert {f"{what}_{cell}" for what in ("speedup", "waste", "bias_turns") for cell in cells} <= set(metrics)
    assert metrics["speedup_g0_m0"] == pytest.approx(1.0) and metrics["waste_g0_m0"] == 0.0
    assert metrics["waste_g1_m1"] > 0.0 and metrics["bias_turns_g0_m0"] == pytest.approx(1.0)


def test_the_same_rewards_are_computed_by_reserved_and_by_elastic_instances() -> None:
    result = measured(serverless, SERVERLESS)
    shares = [result.metrics[f"busy_share_{side}"] for side in ("reserved", "elastic")]
    assert all(0.0 < share <= 1.0 for share in shares)
    calls = SERVERLESS.rollouts * SERVERLESS.groups * SERVERLESS.members
    assert f"The same {calls} rewards" in result.notes[0]


def test_trajectories_are_routed_by_affinity_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "FLEETS", FLEETS)
    result = measured(affinity, AFFINITY)
    assert result.metrics["slower_than_emulated"] > 0.0
    assert {"gain_vs_compute", "gain_vs_bandwidth", "emulated_gain_min"} <= set(result.metrics)
    assert any(name.startswith("simulated") and name.endswith("_low") for name in result.metrics), sorted(
        result.metrics
    )
    assert all(side["seconds"] > 0.0 for side in result.sides.values()), result.sides
