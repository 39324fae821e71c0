"""The benches of training: their arithmetic on made-up lines, and one small real run of each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tangram.bench import ladder, learning
from tangram.bench.base import BenchRun
from tangram.rl.runs.metrics_lines import Evaluated, TaskStep, Trained

pytestmark = pytest.mark.slow

TINY = ladder.LadderSizes(seeds=1, groups=2, members=2, steps=3, latency_s=0.001, epochs=1, score=0.0)


def line(step: int, step_s: float, staleness: tuple[int, ...]) -> Trained:
    task = TaskStep(groups=8, trajectories=64, reward=0.5, turns=4.0, tokens=12.0, staleness_mean=0.0, staleness_max=0)
    return Trained(
        at_s=0.0, step=step, step_s=step_s, wait_s=0.0, train_s=0.2, push_s=0.0, metrics={}, tasks={"frozenlake": task},
        staleness=staleness, tokens_discarded=10,
    )  # fmt: skip


def test_throughput_counts_the_steps_in_which_pipelines_are_full() -> None:
    lines = [line(1, 100.0, (64,)), line(2, 100.0, (64,)), line(3, 2.0, (60, 4)), line(4, 2.0, (0, 64))]
    assert ladder.throughput(lines) == 32.0


def test_modes_are_compared_seed_by_seed() -> None:
    seconds = {"sync": 8.0, "sync_plus": 4.0, "one_off": 2.0, "start_bound": 0.9, "async": 1.0}
    fixed = {
        mode: [[line(step, scale * each, (64,)) for step in range(1, 5)] for scale in (1.0, 3.0)]
        for mode, each in seconds.items()
    }
    fixed["start_bound"][0][3] = line(4, 0.9, (0, 0, 64))
    run = BenchRun()
    ladder.add_throughput(run, fixed, ladder.FULL)
    assert run.metrics["async_vs_sync"] == pytest.approx(8.0)
    assert run.metrics["async_vs_one_off"] == pytest.approx(2.0)
    assert run.metrics["async_vs_start_bound"] == pytest.approx(0.9)
    assert run.metrics["staleness_max_start_bound"] == 2.0
    assert run.goals["async_vs_one_off"].value == 1.2


def test_a_rung_of_the_ladder_is_climbed_for_real(tmp_path: Path) -> None:
    async def climbed() -> list[Trained]:
        settings = ladder.settings_of(TINY, "async", 0, None, rate=ladder.NEARLY_NOTHING, steps=TINY.steps)
        unwarmed = msgspec.structs.replace(
            settings, tasks=(msgspec.structs.replace(settings.tasks[0], warm_until=0.0),)
        )
        return await ladder.trained_steps(unwarmed, tmp_path / "run")

    lines = asyncio.run(climbed())
    assert [each.step for each in lines] == [1, 2, 3]
    assert ladder.throughput(lines) > 0.0


def test_a_run_of_learning_is_looked_at_and_drawn(tmp_path: Path) -> None:
    async def ran() -> learning.LearningRun:
        sizes = msgspec.structs.replace(learning.QUICK, batch=2, batch_dear=2, members=2, episodes=2, every=1)
        settings = learning.settings_of(sizes, ("chain",), 0, steps=2)
        unwarmed = msgspec.structs.replace(
            settings, tasks=(msgspec.structs.replace(settings.tasks[0], warm_until=0.0),)
        )
        return await learning.run_training(unwarmed, tmp_path / "run", None)

    run = asyncio.run(ran())
    assert [each.step for each in run.evaluated][-1] == 2 and run.trajectories[-1] == 8
    assert 0.0 <= run.final("chain") <= 1.0
    page = learning.report_page({"chain": [run]}, [], {0: [run]})
    assert "chain alone" in page and page.count("<figure>") == 2


def test_the_end_of_a_run_is_its_last_five_evaluations() -> None:
    lines = [Evaluated(at_s=float(n), step=n, seconds=0.1, scores={"chain": n / 10}) for n in range(10)]
    assert learning.LearningRun(evaluated=lines).final("chain") == pytest.approx(0.7)


def test_an_agent_that_plays_blindly_is_worth_little() -> None:
    assert asyncio.run(learning.random_score("frozenlake")) <= 0.25
