"""Members that grow too old, or were written by weights that are no more: stopped or left out, and played again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from tests.rl.rollout.world import CODEC, PATH, Judge, Plan, World, run, settings, ticket

from tangram.clock import VirtualLoop
from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.inference.engines.fake import FakeEngine, text_script
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.rollout.rollout import EMPTY_GROUPS_MAX, Rollout, tickets
from tangram.rl.trajectories.trajectory import Ending, Group, GroupTicket

TURN_S = 2.0
"""Two tokens, a second each."""

Meanwhile = Callable[[Rollout, FakeEngine], Any]


def weights(version: int) -> PolicyWeights:
    return PolicyWeights(version=version, folder="")


def play(
    groups: GroupSettings,
    plan: Callable[[str, int], Plan] | Plan | None = None,
    *meanwhile: tuple[float, Meanwhile],
    of: GroupTicket | None = None,
    reward: Judge | None = None,
    **options: Any,
) -> tuple[Group, World, FakeEngine]:
    """A group, while `meanwhile` happens at these moments."""

    async def playing() -> tuple[Group, World, FakeEngine]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world, engine = World(plan), FakeEngine(text_script(CODEC, lambda request: "go"), token_s=TURN_S / 2)
        await engine.start(weights(0))
        rollout = Rollout(
            settings(groups=groups, retries=0),
            engine,
            CODEC,
            on_end=world.ended.append,
            clock=loop.clock,
            rewards={"scripted": reward} if reward is not None else None,
            **options,
        )
        async with rollout:
            for at_s, do in meanwhile:
                loop.call_later(at_s, do, rollout, engine)
            group = await rollout.play(of or ticket())
        world.check(rollout)
        assert engine.active_requests == ()
        assert sorted(each.id for each in group.all_trajectories()) == sorted(each.id for each in world.ended)
        return group, world, engine

    return run(playing())


def update(version: int) -> Meanwhile:
    def become(rollout: Rollout, engine: FakeEngine) -> None:
        engine.version = version

    return become


def discard_older_than(version_min: int, lost: list[int] | None = None) -> Meanwhile:
    def do(rollout: Rollout, engine: FakeEngine) -> None:
        count = rollout.discard_older_than(version_min, f"older than {version_min}")
        if lost is not None:
            lost.append(count)

    return do


def discard_newer_than(version_max: int, lost: list[int] | None = None) -> Meanwhile:
    def do(rollout: Rollout, engine: FakeEngine) -> None:
        engine.version = version_max
        count = rollout.discard_newer_than(version_max, f"newer than {version_max}")
        if lost is not None:
            lost.append(count)

    return do


def slow_second(trajectory: str, number: int) -> Plan:
    """Member 0 ends with its first turn, member 1 takes its time."""
    return Plan(turns=1) if "/0." in trajectory else Plan(turns=2, step_s=10.0)


PAIR = GroupSettings(size=2)


# ---- too old --------------------------------------------------------------------------------------------------------


def test_members_in_play_that_are_too_old_are_stopped_and_played_again() -> None:
    lost: list[int] = []
    group, _, _ = play(PAIR, Plan(turns=2, step_s=5.0), (3.0, update(1)), (3.5, discard_older_than(1, lost)))
    assert lost == [2] and group.is_complete and group.version_first == 1
    assert [each.id for each in group.members] == ["scripted/0/0.1", "scripted/0/1.1"]
    assert {each.id: (each.ending, each.cause) for each in group.left_out} == {
        f"scripted/0/{member}.0": (Ending.STALE, "older than 1") for member in (0, 1)
    }


def test_members_that_had_ended_and_are_too_old_are_left_out_and_played_again() -> None:
    lost: list[int] = []
    group, world, _ = play(PAIR, slow_second, (5.0, update(1)), (6.0, discard_older_than(1, lost)))
    assert lost == [2] and group.version_first == 1
    assert world.endings()["scripted/0/0.0"] is Ending.FINISHED, "its record was reported, and stays"
    assert sorted(each.id for each in group.left_out) == ["scripted/0/0.0", "scripted/0/1.0"]
    assert sorted(each.id for each in group.members) == ["scripted/0/0.1", "scripted/0/1.1"]


def test_members_that_are_young_enough_stay() -> None:
    lost: list[int] = []
    group, _, _ = play(PAIR, slow_second, (1.5, update(1)), (6.0, update(2)), (7.0, discard_older_than(0, lost)))
    assert lost == [0] and group.left_out == ()
    assert [each.versions for each in group.members] == [(0, 1), (0, 1, 2, 2)]


def test_what_is_being_written_is_looked_at_when_it_is_there() -> None:
    """At the moment of the expiry the first turn is not written yet, so its age is unknown."""
    lost: list[int] = []
    group, _, engine = play(GroupSettings(size=1), Plan(turns=2), (1.2, update(1)), (1.5, discard_older_than(1, lost)))
    assert lost == [0]
    assert [(each.id, each.ending, each.versions) for each in group.left_out] == [
        ("scripted/0/0.0", Ending.STALE, (0, 1))
    ]
    assert group.version_first == 1 and len(engine.requests) == 1 + 2, "no second turn of it was asked for"


def test_a_member_is_stopped_while_its_reward_is_computed() -> None:
    group, _, _ = play(
        GroupSettings(size=1), Plan(turns=1), (2.5, update(1)), (3.0, discard_older_than(1)), reward=Judge(seconds=5.0)
    )
    assert [each.ending for each in group.left_out] == [Ending.STALE]
    assert group.members[0].attempt == 1


def test_redundant_members_replace_those_that_are_too_old() -> None:
    """Member 2 resets so late that it begins with the new weights."""

    def plan(trajectory: str, number: int) -> Plan:
        return Plan(turns=1, reset_s=10.0) if "/2." in trajectory or "/1." in trajectory else slow_second("/1.", 0)

    group, _, _ = play(GroupSettings(size=2, members_extra=1), plan, (5.0, update(1)), (5.0, discard_older_than(1)))
    assert [each.id for each in group.members] == ["scripted/0/1.0", "scripted/0/2.0"]
    assert [each.id for each in group.left_out] == ["scripted/0/0.0"], "and it was not played again"


def test_a_group_is_dropped_or_closed_incomplete_by_its_settings() -> None:
    old = (5.0, update(1)), (6.0, discard_older_than(1))
    dropped, _, _ = play(GroupSettings(size=2, on_loss="drop"), slow_second, *old)
    assert dropped.members == () and "older than 1" in dropped.cause
    # Member 1 begins late and is young enough; member 0 had ended and is not.
    late = GroupSettings(size=2, on_loss="close")
    closed, _, _ = play(late, lambda of, _: Plan(turns=1, reset_s=10.0 if "/1." in of else 0.0), *old)
    assert [each.id for each in closed.members] == ["scripted/0/1.0"]
    assert closed.cause == "scripted/0/0.0: stale, older than 1"
    assert [(each.id, each.ending) for each in closed.left_out] == [("scripted/0/0.0", Ending.FINISHED)]


def test_refills_of_members_that_are_too_old_are_counted() -> None:
    groups = GroupSettings(size=1, refills_max=2)
    times = [(3.0 * n, do) for n in range(1, 9) for do in (update(n), discard_older_than(n))]
    group, world, _ = play(groups, Plan(turns=2, step_s=20.0), *times)
    assert group.members == () and len(world.ended) == 3
    assert set(world.endings().values()) == {Ending.STALE}


def test_a_group_of_another_series_is_never_too_old() -> None:
    lost: list[int] = []
    evaluated = GroupTicket(task="scripted", number=0, seed=0, series="eval", size=2)
    times = (3.0, update(1)), (3.5, discard_older_than(1, lost)), (3.6, discard_newer_than(0, lost))
    group, _, _ = play(PAIR, Plan(turns=2, step_s=5.0), *times, of=evaluated)
    assert lost == [0, 0] and group.is_complete and group.left_out == ()


@pytest.mark.parametrize("rounds", range(8))
def test_a_group_that_grows_too_old_while_it_ends_begins_nothing_any_more(rounds: int) -> None:
    """The last of its members is cancelled. Some rounds of the loop later the one that it has kept grows too old:
    before the other has ended, in the moment between the two ends, or when there is nothing of it any more."""
    lost: list[int] = []

    def both(rollout: Rollout, engine: FakeEngine) -> None:
        loop = asyncio.get_running_loop()
        rollout.abort(lambda episode: True, Ending.CANCELLED, "not needed")

        def later(left: int) -> None:
            if left:
                loop.call_soon(later, left - 1)
            else:
                lost.append(rollout.discard_older_than(1, "older than 1"))

        later(rounds)

    group, _, _ = play(PAIR, slow_second, (5.0, update(1)), (6.0, both))
    assert len(lost) == 1
    if lost == [0]:
        assert [each.id for each in group.members] == ["scripted/0/0.0"]
    else:
        assert "scripted/0/0.0" in [each.id for each in group.left_out]
        assert all(each.version_first == 1 for each in group.members)


# ---- of a lineage that is lost --------------------------------------------------------------------------------------


def test_members_with_any_token_of_lost_weights_are_played_again() -> None:
    """Both began with version 0; the second turn of one is of version 1, which is no more."""
    lost: list[int] = []

    def plan(trajectory: str, number: int) -> Plan:
        return Plan(turns=3, step_s=1.0) if "/0." in trajectory else Plan(turns=2, step_s=20.0)

    group, _, _ = play(PAIR, plan, (2.5, update(1)), (5.5, discard_newer_than(0, lost)))
    assert lost == [1]
    assert [(each.id, each.ending) for each in group.left_out] == [("scripted/0/0.0", Ending.STALE)]
    assert [each.id for each in group.members] == ["scripted/0/0.1", "scripted/0/1.0"]
    assert all(version == 0 for each in group.members for version in each.versions)


def test_members_that_had_ended_with_tokens_of_lost_weights_are_played_again() -> None:
    group, _, _ = play(PAIR, slow_second, (0.5, update(3)), (2.5, update(2)), (6.0, discard_newer_than(2)))
    assert sorted(each.id for each in group.members) == ["scripted/0/0.1", "scripted/0/1.1"]
    assert all(version == 2 for each in group.members for version in each.versions)


def test_what_lost_weights_have_begun_to_write_is_not_kept() -> None:
    """The engine goes back in the middle of a turn: half of it is of weights that are no more."""
    lost: list[int] = []
    group, _, _ = play(GroupSettings(size=1), Plan(turns=1), (0.5, update(1)), (1.5, discard_newer_than(0, lost)))
    assert lost == [0]
    assert [(each.ending, each.versions) for each in group.left_out] == [(Ending.STALE, (1, 0))]
    assert group.members[0].versions == (0, 0)


def test_what_goes_on_after_weights_were_lost_is_kept() -> None:
    """It was writing then, by weights that survived; later turns may be of later weights again."""
    group, _, _ = play(GroupSettings(size=1), Plan(turns=2), (1.5, discard_newer_than(0)), (2.5, update(1)))
    assert group.left_out == () and group.members[0].versions == (0, 0, 1, 1)


def test_after_a_loss_of_weights_nothing_is_too_old_until_the_next_version() -> None:
    group, _, _ = play(GroupSettings(size=1), Plan(turns=2), (0.1, discard_older_than(5)), (0.2, discard_newer_than(0)))
    assert group.left_out == () and group.is_complete


# ---- tasks that bring nothing ---------------------------------------------------------------------------------------


def mixed(*names: str) -> RolloutSettings:
    return RolloutSettings(
        engines=(EngineSettings(context_max=256),),
        groups=GroupSettings(size=1, on_loss="close"),
        tasks=tuple(TaskSettings(name=name, environment=PATH, retries=0) for name in names),
    )


def broken(name: str) -> Callable[[str, int], Plan]:
    return lambda trajectory, number: Plan(turns=1, fail="reset" if trajectory.startswith(f"{name}/") else "")


def in_mix(doing: Callable[[Rollout, RolloutSettings], Any], plan: Callable[[str, int], Plan]) -> None:
    async def playing() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world, engine = World(plan), FakeEngine(text_script(CODEC, lambda request: "go"), token_s=1.0)
        await engine.start(weights(0))
        configured = mixed("good", "bad")
        async with Rollout(configured, engine, CODEC, on_end=world.ended.append, clock=loop.clock) as rollout:
            await doing(rollout, configured)
        world.check(rollout)

    run(playing())


def test_collect_names_a_task_of_a_mix_that_brings_nothing() -> None:
    async def collected(rollout: Rollout, configured: RolloutSettings) -> None:
        """Of the groups that it plays for one batch, as many are of the bad task as of the good one."""
        upcoming = tickets(configured)
        assert len((await rollout.collect(upcoming, 20, in_flight=4)).groups) == 20
        assert len((await rollout.collect(upcoming, 19, in_flight=4)).groups) == 19
        with pytest.raises(ManagerError, match=r"task bad: 41 groups in a row ended .*connection lost"):
            await rollout.collect(upcoming, 20, in_flight=4)

    in_mix(collected, broken("bad"))


def test_a_stream_names_a_task_of_a_mix_that_brings_nothing() -> None:
    async def streamed(rollout: Rollout, configured: RolloutSettings) -> None:
        taken: list[Group] = []

        async def take() -> None:
            async for group in rollout.stream(islice(tickets(configured), 400), in_flight=4):
                taken.append(group)

        with pytest.raises(
            ManagerError, match=rf"task bad: {EMPTY_GROUPS_MAX + 1} groups in a row ended .*connection lost"
        ):
            await take()
        assert any(group.members for group in taken) and len(taken) < 100

    in_mix(streamed, broken("bad"))


def test_a_task_that_brings_something_now_and_then_goes_on() -> None:
    def plan(trajectory: str, number: int) -> Plan:
        group = int(trajectory.split("/")[1])
        return Plan(turns=1, fail="reset" if trajectory.startswith("bad/") and group % 10 != 1 else "")

    async def streamed(rollout: Rollout, configured: RolloutSettings) -> None:
        taken = [group async for group in rollout.stream(islice(tickets(configured), 200), in_flight=4)]
        assert len(taken) == 200

    in_mix(streamed, plan)


@pytest.mark.parametrize("ending", [Ending.STALE, Ending.CANCELLED])
def test_groups_that_we_stopped_are_no_sign_of_a_bad_task(ending: Ending) -> None:
    async def streamed(rollout: Rollout, configured: RolloutSettings) -> None:
        async def stop() -> None:
            while True:
                await asyncio.sleep(0.3)
                rollout.abort(lambda episode: episode.task == "bad", ending, "we do not want it")

        stopping = asyncio.create_task(stop())
        stream = rollout.stream(islice(tickets(configured), 200), in_flight=4)
        taken = [group async for group in stream]
        stopping.cancel()
        await asyncio.wait([stopping])
        assert sum(not group.members for group in taken) == 100

    in_mix(streamed, lambda trajectory, number: Plan(turns=1))
