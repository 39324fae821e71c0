"""What redundancy costs and prefers, from records alone."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.rl.rollout.world import CODEC, Plan, Talker, World, run, settings

from tangram.clock import VirtualLoop
from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.rollout.redundancy import report
from tangram.rl.rollout.rollout import CollectedBatch, Rollout, tickets
from tangram.rl.trajectories.trajectory import Ending, Group, Span, Stage, Trajectory, Turn


def record(
    member: int, ending: Ending, tokens: int, *, task: str = "t", reward: float | None = None, stage_s: float = 1.0
) -> Trajectory:
    turn = Turn(
        observation="", observation_tokens=(1,), action="", tokens=(2,) * tokens, logprobs=(0.0,) * tokens,
        versions=(0,) * tokens, prefill_s=0.5 * stage_s, decode_s=0.5 * stage_s,
    )  # fmt: skip
    spans = tuple(
        Span(stage=stage, began_s=0.0, ended_s=2.0 * stage_s, waiting_s=stage_s)
        for stage in (Stage.RESET, Stage.GENERATE, Stage.STEP, Stage.REWARD)
    )
    return Trajectory(
        id=f"{task}/0/{member}.0", task=task, group=f"{task}/0", member=member, attempt=0, seed=0, turns=(turn,),
        ending=ending, reward=reward, spans=spans,
    )  # fmt: skip


def group(*members: Trajectory, left_out: tuple[Trajectory, ...] = (), task: str = "t") -> Group:
    return Group(id=f"{task}/0", task=task, seed=0, members=members, left_out=left_out, wanted=len(members))


def test_waste_is_the_share_of_what_was_done_in_vain() -> None:
    kept = record(0, Ending.FINISHED, 6, reward=1.0)
    vain = (
        record(1, Ending.CANCELLED, 2),
        record(2, Ending.FINISHED, 1, reward=0.0),
        record(3, Ending.STALE, 1, stage_s=2.0),
    )
    breakdown = report([group(kept, left_out=vain)]).all
    assert breakdown.waste.tokens == pytest.approx(0.4)
    assert breakdown.waste.environment_s == pytest.approx(8.0 / 10.0)
    assert breakdown.waste.engine_s == pytest.approx(4.0 / 5.0)
    assert (breakdown.kept.trajectories, breakdown.cancelled.trajectories) == (1, 1)
    assert (breakdown.surplus.trajectories, breakdown.failed.trajectories) == (1, 1)


def test_the_time_that_aborted_requests_waited_is_no_engine_time() -> None:
    """Two were served for a second each; the third stood behind them for a hundred, and was aborted."""
    queued = record(2, Ending.CANCELLED, 0, stage_s=100.0)
    queued = msgspec.structs.replace(
        queued, turns=(), spans=(Span(stage=Stage.GENERATE, began_s=0.0, ended_s=100.0, failed="aborted"),)
    )
    kept = (record(0, Ending.FINISHED, 3, reward=1.0), record(1, Ending.FINISHED, 3, reward=1.0))
    summary = report([group(*kept, left_out=(queued,))])
    assert (summary.all.kept.engine_s, summary.all.waste.engine_s) == (2.0, 0.0)
    assert "at least 0.0% of engine time" in summary.lines()[0]


def test_kept_stands_beside_cancelled_for_each_task_and_for_all() -> None:
    summary = report(
        [
            group(
                record(0, Ending.FINISHED, 2, reward=1.0),
                record(1, Ending.TRUNCATED, 4, reward=0.0),
                left_out=(record(2, Ending.CANCELLED, 9),),
            ),
            group(record(0, Ending.FINISHED, 10, reward=1.0, task="u"), task="u"),
        ]
    )
    assert summary.selection == "first"
    t, u = summary.tasks["t"], summary.tasks["u"]
    assert (t.kept.tokens_mean, t.cancelled.tokens_mean) == (3.0, 9.0)
    assert (t.kept.reward_mean, t.cancelled.reward_mean) == (0.5, None)
    assert u.waste.tokens == 0.0 and u.cancelled.tokens_mean is None
    assert summary.all.kept.trajectories == 3
    lines = "\n".join(summary.lines())
    assert "t: wasted 60.0% of tokens" in lines and "cancelled      1 trajectories" in lines and "all:" in lines


def test_a_whole_group_that_came_too_late_is_surplus() -> None:
    late = group(record(0, Ending.FINISHED, 3, reward=1.0))
    summary = report([group(record(0, Ending.FINISHED, 1, reward=1.0))], [late]).all
    assert (summary.kept.tokens, summary.surplus.tokens, summary.waste.tokens) == (1, 3, 0.75)


def test_nothing_played_is_nothing_wasted() -> None:
    assert report([]).all.waste.tokens == 0.0
    assert report([]).lines() == []


def test_the_first_to_end_are_the_short_ones_and_the_report_shows_it() -> None:
    """Members differ in their turns alone: those that are kept have fewer than those that are cancelled had."""

    async def playing() -> CollectedBatch:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        World(lambda trajectory, number: Plan(turns=1 + 3 * int(trajectory.split("/")[-1].split(".")[0])))
        configured = settings(groups=GroupSettings(size=2, members_extra=2, groups_extra=1))
        async with Rollout(configured, Talker(), CODEC, clock=loop.clock) as rollout:
            return await rollout.collect(tickets(configured), 2)

    batch = run(playing())
    summary = report(batch.groups, batch.left_out).all
    assert summary.kept.trajectories == 4
    assert summary.kept.turns_mean == 2.5
    assert summary.cancelled.turns_mean is not None and summary.cancelled.turns_mean > 2.5
    assert 0.0 < summary.waste.engine_s < 1.0
