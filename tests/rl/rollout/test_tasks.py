"""Cancellation: an episode that is stopped takes nothing along, and a task that is cancelled is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.rl.rollout.world import CODEC, PATH, Plan, Scripted, Talker, World, run, ticket

from tangram.clock import VirtualLoop
from tangram.rl.config.rollout_settings import GroupSettings, TaskSettings
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.inference.engines.protocol import Sampling
from tangram.rl.rollout.contexts import EpisodeSlots, RolloutContext, TaskContext
from tangram.rl.rollout.environment_closer import EnvironmentCloser
from tangram.rl.rollout.episode import Episode
from tangram.rl.rollout.group_runner import GroupRunner
from tangram.rl.rollout.rewards import EnvironmentReward
from tangram.rl.trajectories.trajectory import Ending, GroupTicket


class Stage:
    """An episode without a rollout around it, in the task of the test."""

    def __init__(self, plan: Plan | None = None, stale: Callable[[Episode], bool] | None = None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.world = World(plan)
        self.talker = Talker()
        self.closings = EnvironmentCloser()
        self.rollout_context = RolloutContext(
            generator=self.talker,
            codec=CODEC,
            context_max=256,
            clock=loop.clock,
            began_at_s=0.0,
            closer=self.closings,
            barrier=None,
            stop_if_stale=stale or (lambda episode: False),
            on_stage_change=lambda episode, before: None,
            on_end=self.world.ended.append,
        )
        self.task_context = TaskContext(
            settings=TaskSettings(name="scripted", environment=PATH, retries=0),
            task=Scripted,
            resources=ExternalResources(),
            sampling=Sampling(tokens_max=4, stop=CODEC.stop),
            reward=EnvironmentReward(),
            slots=EpisodeSlots(2, 0),
        )

    def episode(self, of: GroupTicket | None = None, member: int = 0, attempt: int = 0) -> Episode:
        return Episode(self.rollout_context, self.task_context, of or ticket(), member, attempt)

    async def over(self) -> None:
        await self.closings.drain()
        self.world.check()
        assert self.talker.inside == {}


def on_stage(doing: Callable[[], Any]) -> None:
    run(doing())


def test_a_stopped_episode_leaves_its_task_as_it_was() -> None:
    async def playing() -> None:
        stage = Stage()
        episode = stage.episode()
        asyncio.get_running_loop().call_later(1.5, episode.stop, Ending.STALE, "old")
        record = await episode.play()
        assert (record.ending, record.cause) == (Ending.STALE, "old")
        await asyncio.sleep(1.0)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await stage.over()

    on_stage(playing)


def test_a_stop_that_comes_too_late_to_be_felt_is_not_felt_later() -> None:
    """The hook stops it in the very moment in which it would have ended."""

    async def playing() -> None:
        def stop_if_stale(episode: Episode) -> bool:
            if len(episode.turns) == 3:
                episode.stop(Ending.CANCELLED, "in the last moment")
            return False

        stage = Stage(Plan(turns=3), stop_if_stale)
        record = await stage.episode().play()
        assert record.ending is Ending.CANCELLED
        await asyncio.sleep(1.0)
        await stage.over()

    on_stage(playing)


def test_a_stale_request_before_a_turn_generates_no_more_tokens() -> None:
    async def playing() -> None:
        stage = Stage(Plan(turns=5), lambda episode: len(episode.turns) >= 2)
        record = await stage.episode().play()
        assert record.ending is Ending.STALE and len(record.turns) == 2
        assert record.cause == "its first token is of version 0"
        assert len(stage.talker.asked) == 2
        await stage.over()
        assert stage.world.closed == 1

    on_stage(playing)


def test_freshness_is_counted_from_the_first_token() -> None:
    async def playing() -> None:
        entries = []

        def stop_if_stale(episode: Episode) -> bool:
            entries.append(episode.version_first)
            return False

        stage = Stage(Plan(turns=2), stop_if_stale)
        stage.talker.version = 3
        await stage.episode().play()
        assert entries[:2] == [None, None] and set(entries[2:]) == {3}
        await stage.over()

    on_stage(playing)


def test_a_check_of_freshness_may_stop_the_episode() -> None:
    async def playing() -> None:
        def stop_if_stale(episode: Episode) -> bool:
            if len(episode.turns) == 1:
                episode.stop(Ending.CANCELLED, "by its own check")
            return False

        stage = Stage(Plan(), stop_if_stale)
        record = await stage.episode().play()
        assert (record.ending, record.cause) == (Ending.CANCELLED, "by its own check")
        await stage.over()

    on_stage(playing)


def test_a_task_that_is_cancelled_while_its_episode_is_stopped_is_cancelled() -> None:
    async def playing() -> None:
        stage = Stage()
        episode = stage.episode()
        task = asyncio.create_task(episode.play())
        await asyncio.sleep(1.5)
        episode.stop(Ending.STALE, "old")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [each.ending for each in stage.world.ended] == [Ending.STALE]
        await stage.over()

    on_stage(playing)


def test_a_cancellation_that_an_environment_keeps_to_itself_is_felt_after_it() -> None:
    async def playing() -> None:
        stage = Stage(Plan(turns=5, step_s=1.0, deaf=True))
        task = asyncio.create_task(stage.episode().play())
        await asyncio.sleep(1.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(stage.talker.asked) == 1
        assert [each.ending for each in stage.world.ended] == [Ending.CANCELLED]
        await stage.over()

    on_stage(playing)


def test_an_episode_that_is_stopped_before_it_begins_opens_nothing() -> None:
    async def playing() -> None:
        stage = Stage()
        episode = stage.episode()
        episode.stop(Ending.CANCELLED, "not needed")
        record = await episode.play()
        assert (record.ending, record.spans, stage.world.made) == (Ending.CANCELLED, (), {})
        await stage.over()

    on_stage(playing)


def test_members_whose_tasks_never_started_end_as_well() -> None:
    """All fail at once, and are to be played again at the moment in which the band is cancelled."""

    async def playing() -> None:
        stage = Stage(Plan(fail="make"))
        band = GroupRunner(ticket(), GroupSettings(size=3), stage.episode, lambda: 0.0)
        task = asyncio.create_task(band.play())
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [each.ending for each in stage.world.ended] == [Ending.ENV_FAILED] * 3 + [Ending.CANCELLED] * 3
        assert {each.attempt for each in stage.world.ended[3:]} == {1}
        await stage.over()

    on_stage(playing)


def test_closing_continues_when_its_waiter_is_cancelled() -> None:
    async def playing() -> None:
        stage = Stage(Plan(close_s=2.0))
        await stage.episode().play()
        assert len(stage.closings) == 1
        waiting = asyncio.create_task(stage.closings.drain())
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(stage.closings) == 0 and stage.closings.failed == 0
        await stage.over()

    on_stage(playing)
