"""Real engines under a router that are killed at any moment, environments that hang, rewards that fail: every
trajectory ends once, with the right ending, and no process, request or environment is left."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.rl.rollout.world import CODEC, PATH, Judge, Plan, World, chance

from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.inference.engines.process import ProcessEngine
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.inference.router import Router
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.rl.trajectories.trajectory import Ending, Trajectory

pytest.importorskip("torch")

SEEDS = (1, 2)
KILLS = 2
"""The router gives up a request after three deaths of engines; on a slow machine one request could see three."""
GROUPS = 8
STEP_S_MAX = 3.0
"""A hanging environment is found out soon, and one that is only slow on a busy machine is not taken for one."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> PolicyWeights:
    from tangram.rl.model.transformer import Transformer, small_config
    from tangram.rl.model.weight_store import publish

    folder: Path = tmp_path_factory.mktemp("weights")
    config = small_config(CODEC.size, layers=1, width=32, heads=2, context_max=128)
    return publish(Transformer.new(config, 0), config, folder, 0)


def plan_of(seed: int, trajectory: str, number: int) -> Plan:
    draw = chance("chaos", seed, trajectory, number)
    bad = draw.choice(["", "", "", "", "", "", "hang", "fail", "fail"])
    return Plan(
        turns=draw.randint(2, 8),
        step_s=draw.uniform(0.0, 0.05),
        hang="step" if bad == "hang" else "",
        fail="step" if bad == "fail" else "",
        at=draw.randint(0, 1),
    )


def judge_fails(seed: int, trajectory: str) -> bool:
    return chance("judge", seed, trajectory).random() < 0.15


def expected(seed: int, trajectory: str, retries: int) -> Ending:
    if all(
        plan_of(seed, trajectory, number).hang or plan_of(seed, trajectory, number).fail
        for number in range(retries + 1)
    ):
        return Ending.ENV_FAILED
    return Ending.REWARD_FAILED if judge_fails(seed, trajectory) else Ending.FINISHED


async def killing(seed: int, engines: list[ProcessEngine], stop: asyncio.Event) -> int:
    draw = chance("kill", seed)
    kills = 0
    while kills < KILLS and not stop.is_set():
        try:
            async with asyncio.timeout(draw.uniform(0.05, 0.4)):
                await stop.wait()
        except TimeoutError:
            alive = [engine for engine in engines if engine.alive]
            if alive:
                os.kill(draw.choice(alive).pid, signal.SIGKILL)
                kills += 1
    return kills


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_killed_environments_hanging_rewards_failing(seed: int, weights: PolicyWeights) -> None:
    retries = 1
    engine = EngineSettings(count=2, slots=16, context_max=128)
    configured = RolloutSettings(
        engines=(engine,),
        groups=GroupSettings(size=4, members_extra=1, refills_max=16),
        tasks=(
            TaskSettings(name="scripted", environment=PATH, retries=retries, backoff_s=0.01, step_timeout_s=STEP_S_MAX),
        ),
    )

    async def playing() -> tuple[World, int]:
        world = World(lambda trajectory, number: plan_of(seed, trajectory, number))
        judge = Judge(0.01, lambda trajectory: judge_fails(seed, trajectory))
        engines = [ProcessEngine(engine, number) for number in range(2)]
        router = Router(engines, deaths_max=100)
        stop = asyncio.Event()
        await router.start(weights)
        try:
            async with asyncio.TaskGroup() as others:
                killer = others.create_task(killing(seed, engines, stop))
                rollout = Rollout(configured, router, CODEC, on_end=world.ended.append, rewards={"scripted": judge})
                async with rollout:
                    batch = await rollout.collect(tickets(configured, seed), GROUPS)
                stop.set()
            assert len(batch.groups) == GROUPS and all(group.is_complete for group in batch.groups)
            assert router.statistics().requests == 0
            assert judge.inside == 0
        finally:
            pids = [each.pid for each in engines if each.alive]
            await router.close()
        world.check(rollout)
        assert world.closed == sum(world.made.values())
        assert not any(_lives(pid) for pid in pids)
        return world, killer.result()

    world, kills = asyncio.run(playing())
    assert kills > 0
    for record in world.ended:
        check_record(seed, record, retries)


def check_record(seed: int, record: Trajectory, retries: int) -> None:
    if record.ending is Ending.CANCELLED:
        assert "enough" in record.cause, record.cause
    else:
        assert record.ending is expected(seed, record.id, retries), f"{record.id}: {record.cause}"
    # The tokens of a trajectory whose engine died go on where they were: no turn is lost or longer than it may be.
    for turn in record.turns:
        assert 1 <= len(turn.tokens) <= 4
        assert turn.truncated == (turn.tokens[-1] not in CODEC.stop)


def test_without_any_engine_left_the_rollout_stops_and_reports_why(weights: PolicyWeights) -> None:
    engine = EngineSettings(slots=8, context_max=128)
    configured = RolloutSettings(
        engines=(engine,), groups=GroupSettings(size=2), tasks=(TaskSettings(name="scripted", environment=PATH),)
    )

    async def playing() -> None:
        world = World(Plan(turns=8, step_s=0.05))
        only = ProcessEngine(engine)
        router = Router([only], deaths_max=1)
        await router.start(weights)
        try:
            rollout = Rollout(configured, router, CODEC, on_end=world.ended.append)
            async with rollout, asyncio.TaskGroup() as others:
                others.create_task(_kill_once_playing(rollout, only))
                with pytest.raises(ManagerError):
                    await rollout.collect(tickets(configured), 4)
        finally:
            await router.close()
        world.check(rollout)
        assert {each.ending for each in world.ended} == {Ending.CANCELLED}

    asyncio.run(playing())


async def _kill_once_playing(rollout: Rollout, engine: ProcessEngine) -> None:
    async with asyncio.timeout(60.0):
        while not rollout.statistics().tasks["scripted"].playing.get("step"):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)
    os.kill(engine.pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
