"""Groups: which members are kept, and what becomes of a group that loses some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.rl.rollout.world import CODEC, Judge, Plan, Talker, World, run, settings, ticket

from tangram.clock import VirtualLoop
from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.rollout.rollout import PERMANENT_FAILURES_MAX, CollectedBatch, Rollout, tickets
from tangram.rl.trajectories.trajectory import Ending, Group, Stage


def member_of(trajectory: str) -> int:
    return int(trajectory.split("/")[-1].split(".")[0])


def attempt_of(trajectory: str) -> int:
    return int(trajectory.split(".")[-1])


def play(
    groups: GroupSettings,
    plan: Callable[[str, int], Plan] | Plan | None = None,
    *,
    reward: Any = None,
    meanwhile: Callable[[Rollout], object] | None = None,
    at_s: float = 0.0,
    **task: Any,
) -> tuple[Group, World, Talker]:
    async def playing() -> tuple[Group, World, Talker]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world, talker = World(plan), Talker()
        rewards = {"scripted": reward} if reward else None
        configured = settings(groups=groups, retries=0, **task)
        rollout = Rollout(configured, talker, CODEC, on_end=world.ended.append, clock=loop.clock, rewards=rewards)
        async with rollout:
            if meanwhile is not None:
                loop.call_later(at_s, meanwhile, rollout)
            group = await rollout.play(ticket())
        world.check(rollout)
        assert talker.inside == {}
        assert sorted(each.id for each in group.all_trajectories()) == sorted(each.id for each in world.ended)
        return group, world, talker

    return run(playing())


def slow_by_member(trajectory: str, number: int) -> Plan:
    return Plan(turns=2, step_s=1.0 + member_of(trajectory))


def test_a_whole_group_has_its_members_in_order() -> None:
    group, _, _ = play(GroupSettings(size=4), lambda trajectory, number: Plan(step_s=5.0 - member_of(trajectory)))
    assert group.is_complete and group.cause == "" and group.left_out == ()
    assert [each.member for each in group.members] == [0, 1, 2, 3]
    assert {each.seed for each in group.members} == {0}


def test_members_that_wait_for_their_siblings_show_it() -> None:
    group, _, _ = play(GroupSettings(size=2), slow_by_member)
    first, last = group.members
    assert first.spans[-1].stage is Stage.BUFFER
    assert first.spans[-1].waiting_s == pytest.approx(2.0, abs=1e-3)
    assert last.spans[-1].stage is Stage.REWARD


def test_the_first_members_to_end_are_kept_and_the_rest_is_cancelled_everywhere() -> None:
    group, world, talker = play(GroupSettings(size=2, members_extra=2), slow_by_member)
    assert group.is_complete
    assert [each.member for each in group.members] == [0, 1]
    assert {(each.member, each.ending) for each in group.left_out} == {
        (2, Ending.CANCELLED),
        (3, Ending.CANCELLED),
    }
    assert all("enough others" in each.cause for each in group.left_out)
    assert world.closed == 4
    slowest = max(each.ended_s for each in group.members)
    assert all(each.ended_s == pytest.approx(slowest, abs=1e-3) for each in group.left_out)
    assert len(talker.asked) == 2 * 4


def test_surplus_is_cancelled_in_the_engine() -> None:
    """Both members end while the third is in its second generation."""
    steps = {0: 1.0, 1: 1.0, 2: 2.5}

    def plan(trajectory: str, number: int) -> Plan:
        return Plan(turns=2, step_s=steps[member_of(trajectory)])

    group, _, talker = play(GroupSettings(size=2, members_extra=1), plan)
    assert group.is_complete and talker.aborted == ["scripted/0/2.0/2"]


def test_extra_members_take_the_place_of_lost_ones() -> None:
    group, _, _ = play(
        GroupSettings(size=2, members_extra=1, on_loss="drop"),
        lambda trajectory, number: Plan(fail="step" if member_of(trajectory) == 0 else ""),
    )
    assert group.is_complete and [each.member for each in group.members] == [1, 2]
    assert [each.ending for each in group.left_out] == [Ending.ENV_FAILED]


def test_refill_plays_a_lost_member_as_a_new_attempt() -> None:
    group, _, talker = play(
        GroupSettings(size=3),
        lambda trajectory, number: Plan(fail="step" if trajectory in ("scripted/0/1.0", "scripted/0/1.1") else ""),
    )
    assert group.is_complete
    assert [(each.member, each.attempt) for each in group.members] == [(0, 0), (1, 2), (2, 0)]
    assert [each.id for each in group.left_out] == ["scripted/0/1.0", "scripted/0/1.1"]
    noises = {(request.session, request.noise.member, request.noise.attempt) for request in talker.asked}
    assert ("scripted/0/1.2", 1, 2) in noises


def test_refill_covers_rewards_and_staleness_too() -> None:
    judge = Judge(fails=lambda trajectory: trajectory == "scripted/0/0.0")

    def abort(rollout: Rollout) -> None:
        rollout.abort(["scripted/0/1.0"], Ending.STALE)

    group, _, _ = play(GroupSettings(size=2), reward=judge, meanwhile=abort, at_s=0.5)
    assert group.is_complete
    assert {each.ending for each in group.left_out} == {Ending.REWARD_FAILED, Ending.STALE}


def test_a_member_that_was_cancelled_is_not_played_again() -> None:
    def abort(rollout: Rollout) -> None:
        rollout.abort(["scripted/0/1.0"], Ending.CANCELLED)

    group, world, _ = play(GroupSettings(size=3, size_min=2), meanwhile=abort, at_s=0.5)
    assert len(group.members) == 2 and "cancelled" in group.cause
    assert len(world.made) == 3


@pytest.mark.parametrize(("size_min", "members"), [(1, 2), (2, 2), (3, 0)])
def test_after_its_refills_a_group_is_closed_or_dropped(size_min: int, members: int) -> None:
    group, world, _ = play(
        GroupSettings(size=3, refills_max=2, size_min=size_min),
        lambda trajectory, number: Plan(fail="reset" if member_of(trajectory) == 0 else ""),
    )
    assert len(group.members) == members and not group.is_complete
    assert "env_failed" in group.cause
    assert attempt_of(max(world.made)) in (0, 2) and len(world.made) == 5


def test_close_keeps_those_that_are_there() -> None:
    group, world, _ = play(
        GroupSettings(size=3, on_loss="close"),
        lambda trajectory, number: Plan(fail="step" if member_of(trajectory) == 0 else ""),
    )
    assert [each.member for each in group.members] == [1, 2] and group.wanted == 3
    assert group.cause.startswith("scripted/0/0.0: env_failed")
    assert len(world.made) == 3


def test_close_gives_up_when_too_few_can_be_had() -> None:
    group, _, _ = play(
        GroupSettings(size=3, on_loss="close", size_min=3),
        lambda trajectory, number: Plan(fail="reset" if member_of(trajectory) == 0 else "", turns=8),
    )
    assert group.members == ()
    assert {each.ending for each in group.left_out} == {Ending.ENV_FAILED, Ending.CANCELLED}


def test_drop_stops_the_whole_group_at_the_first_loss() -> None:
    def plan(trajectory: str, number: int) -> Plan:
        member = member_of(trajectory)
        return Plan(turns=1, step_s=member, fail="step" if member == 1 else "")

    group, world, _ = play(GroupSettings(size=3, on_loss="drop"), plan)
    assert group.members == () and not group.is_complete
    endings = {each.member: each.ending for each in group.left_out}
    assert endings == {0: Ending.FINISHED, 1: Ending.ENV_FAILED, 2: Ending.CANCELLED}
    assert world.closed == 3


def test_a_hung_environment_delays_only_itself() -> None:
    """Its siblings end when they would have ended without it."""
    group, world, _ = play(
        GroupSettings(size=3, on_loss="close"),
        lambda trajectory, number: Plan(hang="step" if member_of(trajectory) == 0 else ""),
        step_timeout_s=100.0,
    )
    ends = {each.member: each.ended_s for each in world.ended}
    assert ends[1] == ends[2] == pytest.approx(3.0, abs=1e-3)
    assert ends[0] == pytest.approx(101.0, abs=1e-3)
    assert len(group.members) == 2


@pytest.mark.parametrize(
    ("plan", "context_max", "expected"),
    [
        (Plan(says="look " * 300), 256, "the first observation, of 301 tokens, leaves no room.*raise context_max"),
        (Plan(says="mumble"), 256, "the policy cannot read its observation: 'mumble'"),
    ],
)
def test_what_fails_before_the_first_turn_for_a_reason_that_stays_is_given_up_early(
    plan: Plan, context_max: int, expected: str
) -> None:
    """No other attempt takes its place, and a few such groups in a row end the rollout."""

    async def playing() -> World:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(lambda trajectory, number: plan)
        configured = settings(groups=GroupSettings(size=2), context_max=context_max)
        async with Rollout(configured, Talker(), CODEC, clock=loop.clock) as rollout:
            with pytest.raises(ManagerError, match=rf"{PERMANENT_FAILURES_MAX + 1} groups in a row ended .*{expected}"):
                await rollout.collect(tickets(configured), 8, in_flight=1)
        return world

    world = run(playing())
    assert sum(world.made.values()) == 2 * (PERMANENT_FAILURES_MAX + 1)


def test_a_member_that_cannot_begin_does_not_end_a_rollout_whose_other_members_can() -> None:
    async def playing() -> CollectedBatch:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        World(lambda trajectory, number: Plan(says="look" if int(trajectory.split("/")[1]) % 3 == 2 else "mumble"))
        configured = settings(groups=GroupSettings(size=2))
        async with Rollout(configured, Talker(), CODEC, clock=loop.clock) as rollout:
            return await rollout.collect(tickets(configured), 3, in_flight=1)

    assert all(group.is_complete for group in run(playing()).groups)
