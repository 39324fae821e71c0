"""The step benchmark: a tiny one for real, both sides on the same work."""

from __future__ import annotations

import os

import msgspec
import pytest

from tangram.bench import step
from tangram.bench.base import run_module
from tangram.rl.trajectories.trajectory import Ending, Span, Stage, Trajectory

pytestmark = pytest.mark.slow

if os.environ.get("CI") != "true":
    pytest.importorskip("torch")

TINY = msgspec.structs.replace(step.QUICK, groups=1, members=3, turns=2, shown=2, imitations=1)


def test_both_sides_do_the_same_and_are_compared() -> None:
    shares: list[float] = []
    result = run_module(step, TINY, progress=lambda share, text="": shares.append(share), backend="process")
    assert (result.name, result.label) == ("step", "emulated")
    assert result.metrics["step_ratio"] == pytest.approx(
        result.metrics["step_s_reserved"] / result.metrics["step_s_by_action"]
    )
    assert result.metrics["same_actions_share"] == 1.0
    assert 0.0 < result.metrics["acting_share"] < 1.0
    assert result.goals["step_ratio"].value == 1.5
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_the_sides_differ_in_how_many_trajectories_are_open_and_in_nothing_else() -> None:
    one, other = (step.settings_of(TINY, 0, None, concurrency) for concurrency in (2, 3))
    [task], [wide] = one.tasks, other.tasks
    assert (task.concurrency, wide.concurrency) == (2, 3)
    assert msgspec.structs.replace(one, tasks=(wide,)) == other


def test_a_trajectory_is_open_from_its_place_to_its_last_step() -> None:
    spans = (
        Span(stage=Stage.RESET, began_s=0.0, ended_s=5.0, waiting_s=4.0),
        Span(stage=Stage.GENERATE, began_s=5.0, ended_s=8.0),
        Span(stage=Stage.STEP, began_s=8.0, ended_s=8.5),
        Span(stage=Stage.REWARD, began_s=8.5, ended_s=20.0),
    )
    ended = Trajectory(
        id="a/0/0.0", task="a", group="a/0", member=0, attempt=0, seed=0, turns=(), ending=Ending.FINISHED, reward=1.0,
        spans=spans,
    )  # fmt: skip
    assert step.time_spent(ended) == (3.0, 1.5, 4.5)
