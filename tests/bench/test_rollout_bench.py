"""The arithmetic of the rollout benchmark: its waits, and the model that it is compared with."""

from __future__ import annotations

import statistics

import pytest

from tangram.bench.redundancy import turns_of
from tangram.bench.rollout import LatencyModel, ideal

pytestmark = pytest.mark.slow


def test_waits_depend_on_the_seed_and_have_the_given_mean_and_spread() -> None:
    waits = LatencyModel(latency_s=0.4, spread=0.3, turns=200)
    drawn = [wait for environment in range(50) for wait in waits.latencies(1, environment, 0)]
    assert drawn == [wait for environment in range(50) for wait in waits.latencies(1, environment, 0)]
    assert waits.latencies(1, 0, 0) != waits.latencies(2, 0, 0) != waits.latencies(2, 1, 0) != waits.latencies(2, 1, 1)
    assert statistics.fmean(drawn) == pytest.approx(0.4, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx(0.12, rel=0.05)
    assert min(drawn) >= 0.0


def test_heavy_waits_have_the_same_mean_and_a_tail() -> None:
    waits = LatencyModel(latency_s=0.4, spread=1.0, turns=2000, heavy=True)
    drawn = [wait for environment in range(50) for wait in waits.latencies(1, environment, 0)]
    assert statistics.fmean(drawn) == pytest.approx(0.4, rel=0.05)
    assert max(drawn) > 4.0


def test_the_given_number_of_environments_crashes_once() -> None:
    waits = LatencyModel(latency_s=0.4, spread=0.5, turns=20, failures=0.05)
    crashes = [waits.crash_turn(seed, environment, 0) for seed in range(40) for environment in range(128)]
    assert sum(turn is not None for turn in crashes) / len(crashes) == pytest.approx(0.05, abs=0.01)
    assert all(waits.crash_turn(seed, environment, 1) is None for seed in range(5) for environment in range(128))


def test_the_barrier_model_of_waits_that_are_all_equal_gains_nothing() -> None:
    waits = LatencyModel(latency_s=0.4, spread=0.0, turns=20)
    assert ideal(waits, 0, 16, together_s=0.05, single_s=0.05) == pytest.approx(1.0)


def test_the_barrier_model_reproduces_the_published_result_of_128_environments_and_20_turns() -> None:
    """Known from a simulation of the same setting."""
    for spread, known in ((0.1, 1.25), (0.3, 1.55), (0.5, 1.80), (0.7, 2.00), (1.0, 2.22)):
        waits = LatencyModel(latency_s=1.0, spread=spread, turns=20)
        mean = statistics.fmean(ideal(waits, seed, 128, together_s=0.1, single_s=0.03) for seed in range(10))
        assert mean == pytest.approx(known, rel=0.05)


def test_turns_are_within_their_limits_and_differ() -> None:
    turns = [turns_of(seed, member, 12) for seed in range(20) for member in range(8)]
    assert (min(turns), max(turns)) == (4, 12)
