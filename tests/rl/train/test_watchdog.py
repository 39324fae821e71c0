"""Stalls: noticed when nothing moves and only then, named rightly, and freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
from msgspec.structs import replace
from tests.rl.rollout.world import CODEC, Plan, Talker, World, run, settings, ticket
from tests.runtime.test_pool_usage import on_virtual_time

from tangram.client.client import Client
from tangram.clock import Clock, VirtualLoop
from tangram.managers.quotas.manager import Quota, Rate
from tangram.rl.config.rollout_settings import GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.agents import RandomAgent
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step
from tangram.rl.inference.engines.fake import FakeEngine, text_script
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.inference.router import Router
from tangram.rl.rollout.rollout import Rollout
from tangram.rl.train.watchdog import (
    LiveTrajectory,
    RunSnapshot,
    Stall,
    Watchdog,
    abort_stuck,
    describe_waits,
    snapshot_run,
    waiting_pools,
)
from tangram.rl.trajectories.trajectory import Group, Stage

STALL_S = 120.0


def live(
    number: int, stage: str = "step", stage_s: float = 130.0, what: str = "the environment", pool: str = ""
) -> LiveTrajectory:
    return LiveTrajectory(
        id=f"lake/{number}/0.0", task="lake", stage=stage, stage_s=stage_s, waiting_for=what, pool=pool
    )


# ---- when ----


def test_a_run_without_progress_is_reported_once_each_time() -> None:
    watch = Watchdog(STALL_S, 3, now=1000.0)
    assert watch.check(1119.0, RunSnapshot()) is None
    first = watch.check(1121.0, RunSnapshot())
    assert first is not None and (first.number, first.give_up) == (1, False) and "for 121 s" in first.text
    assert watch.check(1122.0, RunSnapshot()) is None
    second = watch.check(1242.0, RunSnapshot())
    assert second is not None and second.number == 2 and "for 242 s" in second.text


def test_progress_puts_a_stall_off_and_the_row_is_forgotten() -> None:
    watch = Watchdog(STALL_S, 2, now=0.0)
    assert watch.check(120.0, RunSnapshot()) is not None
    watch.on_progress(200.0)
    assert watch.check(300.0, RunSnapshot()) is None
    again = watch.check(320.0, RunSnapshot())
    assert again is not None and again.number == 1 and not again.give_up


def test_with_the_last_of_those_that_there_may_be_in_a_row_it_is_given_up() -> None:
    watch = Watchdog(STALL_S, 3, now=0.0)
    stuck = RunSnapshot(trajectories=(live(1, stage_s=1000.0),))
    notices = [watch.check(STALL_S * (number + 1), stuck) for number in range(3)]
    assert [(each.number, each.give_up, each.stuck_trajectories) for each in notices if each] == [
        (1, False, ("lake/1/0.0",)),
        (2, False, ("lake/1/0.0",)),
        (3, True, ()),
    ]


def test_any_progress_resets_the_watchdog_silently() -> None:
    for moved in (
        RunSnapshot(trajectories=(live(1), live(2, stage_s=5.0))),
        RunSnapshot(trajectories=(live(1),), tokens=7),
        RunSnapshot(trajectories=(live(1),), training=(3, 5.0)),
    ):
        watch = Watchdog(STALL_S, 3, now=0.0)
        assert watch.check(130.0, moved) is None
        assert watch.check(600.0, replace(moved, trajectories=(live(1, stage_s=600.0),), training=None)) is not None


def test_what_is_played_again_and_gets_stuck_again_does_not_begin_a_new_row() -> None:
    watch = Watchdog(STALL_S, 3, now=0.0)
    for number in range(1, 4):
        notices = watch.check(number * 130.0, RunSnapshot(trajectories=(live(number, stage_s=125.0),), tokens=0))
        assert notices is not None and notices.number == number
    notices = watch.check(520.0, RunSnapshot(trajectories=(live(5, stage_s=120.0),)))
    assert notices is not None and notices.give_up, "what was stopped is no progress"
    watch.on_progress(530.0)
    notices = watch.check(660.0, RunSnapshot())
    assert notices is not None and notices.number == 1


# ---- words ----


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            RunSnapshot(trajectories=tuple(live(number, pool="search") for number in range(17))),
            "all 17 trajectories wait for pool `search` since 130 s",
        ),
        (
            RunSnapshot(
                trajectories=tuple(live(number, "generate", what="an engine") for number in range(3)), engines={"e0": 3}
            ),
            "all 3 trajectories wait for engine e0",
        ),
        (
            RunSnapshot(
                trajectories=tuple(live(n, "generate", what="an engine") for n in range(6)), engines={"e0": 1, "e1": 3}
            ),
            "3 trajectories wait for engine e1; 2 trajectories wait for an engine that serves; "
            "1 trajectory waits for engine e0",
        ),
        (
            RunSnapshot(trajectories=(live(1),)),
            "the only trajectory waits for the environment of task lake in step since 130 s",
        ),
        (
            RunSnapshot(trajectories=(live(1), live(2, stage_s=140.0), live(3, "queue", 90.0, "concurrency of lake"))),
            "2 trajectories wait for the environment of task lake in step since 140 s; "
            "1 trajectory waits for concurrency of lake since 90 s",
        ),
        (
            RunSnapshot(trajectories=(live(1, "reward", what="the reward"),), training=(12, 300.0)),
            "the trainer has worked on step 12 for 300 s (raise training.stall_s if it should); "
            "the only trajectory waits for the reward of task lake in reward since 130 s",
        ),
        (RunSnapshot(), "no trajectory is in flight"),
    ],
)
def test_what_is_waited_for_is_named(what: RunSnapshot, words: str) -> None:
    assert describe_waits(what) == words


def test_episodes_that_wait_behind_others_are_stopped_only_as_the_last_resort() -> None:
    watch = Watchdog(STALL_S, 3, now=0.0)
    stuck = (live(1, stage_s=200.0), live(2, stage_s=300.0))
    behind = (live(3, "queue", 400.0, "concurrency of lake"), live(4, "generate", 250.0, "the slowest environment"))
    behind = (*behind, live(5, stage_s=350.0, pool="cpu"))
    first = watch.check(200.0, RunSnapshot(trajectories=(*stuck, *behind)))
    assert first is not None and first.stuck_trajectories == ("lake/2/0.0", "lake/1/0.0")
    second = watch.check(400.0, RunSnapshot(trajectories=(*stuck, *behind)))
    assert second is not None and [each.split("/")[1] for each in second.stuck_trajectories] == [
        "3",
        "5",
        "2",
        "4",
        "1",
    ]


# ---- a real rollout ----


def refilled(**task: object) -> RolloutSettings:
    return settings(groups=GroupSettings(size=2, on_loss="refill", refills_max=4), **task)


def clock() -> Clock:
    """That of the loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.clock


async def stalled(rollout: Rollout, look: Callable[[], RunSnapshot]) -> Stall:
    """Looks as an owner does, until there is a stall."""
    loop = asyncio.get_running_loop()
    watch = Watchdog(STALL_S, 3, now=loop.time())
    while True:
        await asyncio.sleep(5.0)
        stall = watch.check(loop.time(), look())
        if stall is not None:
            return stall


def is_whole(played: Group) -> bool:
    return played.is_complete and played.cause == ""


@pytest.mark.parametrize("stage", ["reset", "step"])
def test_an_environment_that_hangs_is_named_and_played_again(stage: str) -> None:
    async def test() -> None:
        world = World(lambda trajectory, number: Plan(hang=stage if trajectory.endswith("/1.0") else ""))
        chosen = refilled(reset_timeout_s=1e5, step_timeout_s=1e5)
        async with Rollout(chosen, Talker(), CODEC, on_end=world.ended.append, clock=clock()) as rollout:
            playing = asyncio.create_task(rollout.play(ticket()))
            stall = await stalled(rollout, lambda: snapshot_run(rollout))
            assert stall.stuck_trajectories == ("scripted/0/1.0",)
            assert f"waits for the environment of task scripted in {stage} since" in stall.text
            assert abort_stuck(rollout, stall) == 1
            played = await playing
            assert is_whole(played) and [each.id for each in played.members] == ["scripted/0/0.0", "scripted/0/1.1"]
            assert [each.cause for each in played.left_out] == [stall.text]
        world.check(rollout)

    run(test())


def test_holders_of_the_slots_of_a_task_are_stopped_and_waiters_are_not() -> None:
    async def test() -> None:
        world = World(lambda trajectory, number: Plan(hang="step" if trajectory.endswith("/0.0") else ""))
        chosen = refilled(step_timeout_s=1e5, concurrency=1)
        async with Rollout(chosen, Talker(), CODEC, clock=clock()) as rollout:
            playing = asyncio.create_task(rollout.play(ticket()))
            stall = await stalled(rollout, lambda: snapshot_run(rollout))
            assert stall.stuck_trajectories == ("scripted/0/0.0",)
            assert "1 trajectory waits for concurrency of scripted" in stall.text
            abort_stuck(rollout, stall)
            assert is_whole(await playing)
        world.check(rollout)

    run(test())


def test_behind_a_barrier_the_slowest_is_named() -> None:
    async def test() -> None:
        world = World(lambda trajectory, number: Plan(hang="step" if trajectory.endswith("/0.0") else ""))
        async with Rollout(refilled(step_timeout_s=1e5), Talker(), CODEC, barrier=True, clock=clock()) as rollout:
            playing = asyncio.create_task(rollout.play(ticket()))
            stall = await stalled(rollout, lambda: snapshot_run(rollout))
            assert stall.stuck_trajectories == ("scripted/0/0.0",)
            assert "1 trajectory waits for the slowest environment" in stall.text
            abort_stuck(rollout, stall)
            assert is_whole(await playing)
        world.check(rollout)

    run(test())


@pytest.mark.parametrize("kind", ["suspended", "hanging"])
def test_an_engine_that_generates_nothing_is_named_and_its_requests_move_to_others(kind: str) -> None:
    async def test() -> None:
        world = World()
        talk = text_script(CODEC, lambda request: "go")
        engines = [FakeEngine(talk, name=name, token_s=1.0) for name in ("e0", "e1")]
        router = Router(engines)
        await router.start(PolicyWeights(version=0, folder="/weights/0"))
        async with Rollout(refilled(), router, CODEC, clock=clock()) as rollout:
            if kind == "suspended":
                await engines[0].suspend()
            else:
                engines[0].hang()
            playing = asyncio.create_task(rollout.play(ticket()))
            stall = await stalled(rollout, lambda: snapshot_run(rollout, router))
            assert "waits for engine e0" in stall.text and "e1" not in stall.text
            (aborted,) = stall.stuck_trajectories
            abort_stuck(rollout, stall)
            if kind == "suspended":
                await engines[0].resume()
            else:
                engines[0].die("its death was detected")
            played = await playing
            assert is_whole(played) and [each.id for each in played.left_out] == [aborted]
        assert engines[0].statistics().active == 0
        await router.close()
        world.check(rollout)

    run(test())


def test_a_slow_engine_is_no_stall() -> None:
    async def test() -> None:
        world = World(Plan(turns=2))
        engine = FakeEngine(lambda request: (1,) * 40, token_s=100.0)
        router = Router([engine])
        await router.start(PolicyWeights(version=0, folder="/weights/0"))
        async with Rollout(replace(refilled(), tasks=(long_actions(),)), router, CODEC, clock=clock()) as rollout:
            watch = Watchdog(STALL_S, 3, now=asyncio.get_running_loop().time())
            playing = asyncio.create_task(rollout.play(ticket()))
            while not playing.done():
                await asyncio.sleep(5.0)
                assert watch.check(asyncio.get_running_loop().time(), snapshot_run(rollout, router)) is None
            assert is_whole(await playing)
        await router.close()
        world.check(rollout)

    run(test())


def long_actions() -> TaskSettings:
    return replace(refilled().tasks[0], tokens_max=64)


class Searching:
    """Asks for a part of a quota in its steps."""

    words: ClassVar[tuple[str, ...]] = ("look", "go", "end")
    turns_max: ClassVar[int] = 4
    tokens_max: ClassVar[int] = 4
    agents: ClassVar[Mapping[str, MakeAgent]] = {"random": lambda chance: RandomAgent(chance, ("go",))}

    def __init__(self, resources: ExternalResources) -> None:
        self._resources = resources

    async def reset(self, seed: int) -> str:
        return "look"

    async def step(self, action: str) -> Step:
        assert self._resources.client is not None
        async with self._resources.client.quota("search", trajectory=self._resources.trajectory):
            return Step(observation="end", reward=1.0, done=True)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("quota", [Quota("search", concurrent=1), Quota("search", requests=Rate(1, 1e6))])
def test_a_pool_held_by_another_run_is_named_and_no_longer_waited_for(quota: Quota) -> None:
    async def test(client: Client) -> None:
        task = TaskSettings(name="search", environment="tests.rl.train.test_watchdog:Searching", step_timeout_s=1e7)
        chosen = replace(refilled(), tasks=(task,))
        async with Rollout(chosen, Talker(), CODEC, client, clock=clock()) as rollout:
            holder = client.quota("search")
            await holder.__aenter__()
            playing = asyncio.create_task(rollout.play(replace(ticket(), task="search")))
            stall = await stalled(rollout, lambda: snapshot_run(rollout, None, client))
            assert "all 2 trajectories wait for pool `search` since" in stall.text
            assert sorted(stall.stuck_trajectories) == ["search/0/0.0", "search/0/1.0"]
            assert abort_stuck(rollout, stall) == 2
            await asyncio.sleep(10.0)
            assert sorted(waiting_pools(client)) == ["search/0/0.1", "search/0/1.1"], "they are played again"
            await holder.__aexit__(None, None, None)
            if quota.concurrent:
                assert is_whole(await playing)
            else:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
        assert waiting_pools(client) == {}

    on_virtual_time(test, quota)


def test_without_a_client_pools_are_unknown() -> None:
    assert waiting_pools(None) == {}


def test_an_episode_shows_what_it_waits_for() -> None:
    async def test() -> None:
        world = World(Plan(reset_s=10.0, step_s=20.0, turns=1))
        notices = []
        async with Rollout(settings(), Talker(30.0), CODEC, clock=clock()) as rollout:
            playing = asyncio.create_task(rollout.play(ticket()))
            for _ in range(3):
                await asyncio.sleep(19.0)
                (episode,) = rollout.in_flight()
                notices.append(episode.current_wait())
            await playing
            assert rollout.in_flight() == () and episode.current_wait().stage == ""
        assert [(each.stage, each.since_s, each.waiting_for) for each in notices] == [
            (Stage.GENERATE, 9.0, "an engine"),
            (Stage.GENERATE, 28.0, "an engine"),
            (Stage.STEP, 17.0, "the environment"),
        ]
        world.check(rollout)

    run(test())
