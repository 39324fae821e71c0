"""Environments and rewards that do what they must not: each harms its own trajectory and no other."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.rl.rollout.world import CODEC, Plan, Talker, World, run, settings, ticket

from tangram.clock import VirtualLoop
from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.environments.calls import ENDING_S_MAX
from tangram.rl.environments.protocol import Step
from tangram.rl.rollout.environment_closer import CLOSE_S_MAX
from tangram.rl.rollout.rewards import PlayedTrajectory, Score
from tangram.rl.rollout.rollout import Rollout, RolloutStatistics, tickets
from tangram.rl.runs.trajectory_log import TrajectoryLog, read
from tangram.rl.trajectories.trajectory import Ending, Group

BAD = "scripted/0/0.0"
TIMEOUT_S = 3.0


class Outcome:
    def __init__(self, group: Group, statistics: RolloutStatistics, world: World, ended_s: float) -> None:
        self.bad = next(each for each in group.all_trajectories() if each.id == BAD)
        self.others = [each for each in group.all_trajectories() if each.id != BAD]
        self.statistics = statistics
        self.world = world
        self.ended_s = ended_s
        """When `async with` was over."""


def play(bad: Callable[[int], Plan] | Plan, *, over: bool = True, rewards: Any = None, **task: Any) -> Outcome:
    """Three members, the first of which misbehaves. `over`: what never listens is ended after the rollout."""

    def plan(trajectory: str, number: int) -> Plan:
        if trajectory != BAD:
            return Plan(turns=2)
        return bad if isinstance(bad, Plan) else bad(number)

    async def playing() -> Outcome:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(plan)
        configured = settings(
            groups=GroupSettings(size=3, size_min=1, on_loss="close"),
            reset_timeout_s=TIMEOUT_S, step_timeout_s=TIMEOUT_S, **task,
        )  # fmt: skip
        rollout = Rollout(
            configured, Talker(), CODEC, on_end=world.ended.append, clock=loop.clock,
            rewards={"scripted": rewards} if rewards else None,
        )  # fmt: skip
        async with rollout:
            group = await rollout.play(ticket())
        ended_s = loop.time()
        world.check(rollout)
        if over:
            world.over.set()
            await asyncio.sleep(0.001)
        return Outcome(group, rollout.statistics(), world, ended_s)

    return run(playing())


# ---- that do not listen ----


@pytest.mark.parametrize("what", ["reset", "step"])
def test_a_call_that_keeps_cancellations_to_itself_delays_its_own_trajectory_alone(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tangram"):
        outcome = play(Plan(never_listens=what), retries=1, backoff_s=0.0)
    assert (outcome.bad.ending, outcome.bad.cause) == (Ending.ENV_FAILED, f"no answer to {what} within {TIMEOUT_S:g} s")
    assert {each.ending for each in outcome.others} == {Ending.FINISHED}
    assert all(each.ended_s == pytest.approx(2.0, abs=1e-2) for each in outcome.others)
    assert outcome.statistics.stuck == 2 and outcome.world.closed == 4
    assert [record.getMessage() for record in caplog.records].count(
        f"a call of the environment of {BAD} does not end, {ENDING_S_MAX:g} s after it was cancelled; it is abandoned"
    ) == 2
    assert outcome.ended_s <= 2 * (TIMEOUT_S + 1.0) + ENDING_S_MAX + 1.0


def test_a_trajectory_goes_on_with_another_environment_when_one_does_not_listen() -> None:
    outcome = play(lambda number: Plan(never_listens="" if number else "step"), retries=1, backoff_s=0.0)
    assert outcome.bad.ending is Ending.FINISHED and outcome.statistics.stuck == 1


def test_a_close_that_keeps_cancellations_to_itself_ends_with_the_rollout_and_is_counted() -> None:
    outcome = play(Plan(never_listens="close", turns=2))
    assert outcome.bad.ending is Ending.FINISHED
    assert (outcome.statistics.close_failed, outcome.statistics.stuck) == (1, 1)
    assert outcome.ended_s == pytest.approx(2.0 + CLOSE_S_MAX + ENDING_S_MAX, abs=0.1)


def test_a_cancelled_rollout_ends_without_a_consumer() -> None:
    async def playing() -> None:
        world = World(Plan(never_listens="step"))
        configured = settings()
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0), Rollout(configured, Talker(), CODEC, on_end=world.ended.append) as rollout:
                await rollout.collect(tickets(configured), 2)
        assert loop.time() <= 2.0 + ENDING_S_MAX + 0.1
        assert {(each.ending, each.cause) for each in world.ended} == {
            (Ending.CANCELLED, "the rollout was interrupted")
        }
        assert rollout.statistics().stuck == 2
        world.check(rollout)
        world.over.set()
        await asyncio.sleep(0.001)

    run(playing())


def test_a_call_that_was_left_behind_does_not_keep_the_loop_from_ending() -> None:
    """What asyncio.run does at its end: it cancels all tasks that it knows, and waits for them without a limit."""
    assert play(Plan(never_listens="step"), over=False, retries=0).statistics.stuck == 1


# ---- that leave Python ----


@pytest.mark.parametrize("what", ["make", "reset", "step"])
@pytest.mark.parametrize(
    ("leaves", "expected"), [(SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)
def test_an_environment_that_exits_failed(what: str, leaves: BaseException, expected: str) -> None:
    outcome = play(Plan(exits=what, leaves=leaves), retries=0)
    assert outcome.bad.ending is Ending.ENV_FAILED and expected in outcome.bad.cause
    assert {each.ending for each in outcome.others} == {Ending.FINISHED}


def test_an_environment_that_exits_while_it_is_closed_is_counted() -> None:
    outcome = play(Plan(exits="close", turns=2))
    assert outcome.bad.ending is Ending.FINISHED and outcome.statistics.close_failed == 1


# ---- that answer with anything ----


def answered(**fields: Any) -> Plan:
    return Plan(odd=Step(**{"observation": "end", "done": True} | fields), turns=1)


@pytest.mark.parametrize("kind", [int, bool, numpy.float32, numpy.int64, numpy.bool_, Fraction, numpy.array])
def test_numbers_of_any_kind_are_taken_as_floats(kind: Callable[[int], Any], tmp_path: Path) -> None:
    bad = play(answered(reward=kind(1), metrics={"length": kind(1)})).bad
    assert (bad.ending, bad.reward, bad.metrics) == (Ending.FINISHED, 1.0, {"length": 1.0})
    assert (type(bad.reward), type(bad.metrics["length"])) == (float, float)
    with TrajectoryLog(tmp_path / "log.jsonl") as log:
        log.append(bad)
    assert read(tmp_path / "log.jsonl").trajectories() == [bad]


def test_metrics_may_be_infinite() -> None:
    assert play(answered(metrics={"ratio": math.inf})).bad.metrics == {"ratio": math.inf}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"metrics": {"a": "text"}}, "expected a number as metrics['a'], got str"),
        ({"metrics": {"a": "3"}}, "expected a number as metrics['a'], got str"),
        ({"metrics": {"a": None}}, "expected a number as metrics['a'], got NoneType"),
        ({"metrics": {"a": [1.0, 2.0]}}, "expected a number as metrics['a'], got list"),
        ({"metrics": {"a": 10**400}}, "expected a number as metrics['a'], got int"),
        ({"metrics": {7: 1.0}}, "expected printable text as the names of metrics, got 7"),
        ({"metrics": {"\ud800": 1.0}}, "expected printable text as the names of metrics, got '\\ud800'"),
        ({"metrics": [1.0]}, "expected a dict as metrics, got list"),
        ({"reward": "1"}, "expected a number as reward, got str"),
        ({"done": numpy.zeros(2)}, "expected a number as done, got ndarray"),
    ],
)
def test_what_is_no_number_is_a_failure_that_names_it(fields: dict[str, Any], expected: str) -> None:
    outcome = play(answered(**fields))
    assert outcome.bad.ending is Ending.ENV_FAILED and expected in outcome.bad.cause
    assert {each.ending for each in outcome.others} == {Ending.FINISHED}


class Scores:
    """Answers with this for the one that is bad."""

    def __init__(self, score: Any) -> None:
        self._score = score

    async def score(self, played: PlayedTrajectory) -> Any:
        if played.id != BAD:
            return Score(value=1.0)
        if isinstance(self._score, BaseException):
            raise self._score
        return self._score


def test_numbers_of_a_score_are_taken_as_floats() -> None:
    score: Any = Score(value=numpy.float32(0.5), metrics={"tests": numpy.int64(3)})  # type: ignore[arg-type, dict-item]
    bad = play(Plan(turns=2), rewards=Scores(score)).bad
    assert (bad.reward, bad.metrics) == (0.5, {"tests": 3.0})
    assert (type(bad.reward), type(bad.metrics["tests"])) == (float, float)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (Score(value=1.0, metrics={"a": "text"}), "expected a number as metrics['a'], got str"),  # type: ignore[dict-item]
        (Score(value="1"), "expected a number as value, got str"),  # type: ignore[arg-type]
        (Score(value=math.nan), "expected a finite number as value, got nan"),
        (0.5, "expected a Score, got float"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "the reward cancelled itself"),
    ],
)
def test_an_invalid_score_is_a_failed_reward(score: Any, expected: str) -> None:
    outcome = play(Plan(turns=2), rewards=Scores(score))
    assert outcome.bad.ending is Ending.REWARD_FAILED and expected in outcome.bad.cause
    assert {each.ending for each in outcome.others} == {Ending.FINISHED}
