"""Everything fails at random: engines die, environments hang and crash, rewards do not come.

Over many seeds, on virtual time, through a real router: every trajectory ends once, with the right ending, and nothing
is left open.

A seed that fails is replayed by `pytest tests/rl/rollout/test_failures.py -k "[SEED]"`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter

import pytest
from tests.rl.rollout.world import CODEC, Judge, Plan, World, chance, run, settings

from tangram.clock import VirtualLoop
from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.inference.engines.fake import FakeEngine, text_script
from tangram.rl.inference.engines.protocol import PolicyWeights
from tangram.rl.inference.router import Router
from tangram.rl.inference.router_records import NoEngine
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.rl.trajectories.trajectory import Ending, Stage, Trajectory

SEEDS = 60
RETRIES = 1
GROUPS = 6
RESET_S_MAX, STEP_S_MAX = 4.0, 3.0


def plan_of(seed: int, trajectory: str, number: int) -> Plan:
    """Half of the environments are in order."""
    draw = chance("plan", seed, trajectory, number)
    good = dict(
        turns=draw.randint(1, 5),
        reset_s=draw.uniform(0.0, 1.0),
        step_s=draw.uniform(0.0, 1.0),
        close_s=draw.choice([0.0, 0.5]),
    )
    bad = draw.choice(["", "", "", "", "reset", "step", "hang reset", "hang step", "close", "make", "word"])
    if bad.startswith("hang"):
        good |= dict(hang=bad.removeprefix("hang "))
    elif bad == "close":
        good |= dict(hang="close") if draw.random() < 0.5 else dict(fail_close=True)
    elif bad == "word":
        good |= dict(says="unheard")
    elif bad:
        good |= dict(fail=bad)
    return Plan(**good)  # type: ignore[arg-type]


def should_fail(plan: Plan) -> bool:
    return bool(plan.fail) or plan.hang in ("reset", "step") or plan.says == "unheard"


def judge_fails(seed: int, trajectory: str) -> bool:
    return chance("judge", seed, trajectory).random() < 0.1


def ending_if_left_alone(seed: int, trajectory: str) -> Ending:
    """The expected ending, unless it is stopped."""
    for number in range(RETRIES + 1):
        plan = plan_of(seed, trajectory, number)
        if not should_fail(plan):
            return Ending.REWARD_FAILED if judge_fails(seed, trajectory) else Ending.FINISHED
        if plan.says == "unheard" and not plan.fail and not plan.hang:
            return Ending.ENV_FAILED
    return Ending.ENV_FAILED


def check_record(seed: int, record: Trajectory) -> None:
    if record.ending in (Ending.CANCELLED, Ending.STALE):
        assert record.cause
    else:
        assert record.ending is ending_if_left_alone(seed, record.id), f"{record.id}: {record.cause}"
    assert (record.reward == 0.5) == record.ending.is_rewarded
    resets = [span for span in record.spans if span.stage is Stage.RESET]
    assert len(resets) <= RETRIES + 1
    ends = [(span.began_s, span.ended_s) for span in record.spans]
    assert all(began <= ended for began, ended in ends)
    assert all(after[0] >= before[1] - 1e-9 for before, after in itertools.pairwise(ends)), "one stage at a time"
    assert record.began_s <= record.ended_s


async def killing(seed: int, engines: list[FakeEngine]) -> None:
    draw = chance("engines", seed)
    for _ in range(draw.randint(0, 4)):
        await asyncio.sleep(draw.expovariate(0.5))
        engine = draw.choice(engines)
        if draw.random() < 0.7:
            engine.die()
        else:
            engine.hang(notice_s=1.0)


async def aborting(seed: int, rollout: Rollout) -> None:
    draw = chance("abort", seed)
    for _ in range(draw.randint(0, 3)):
        await asyncio.sleep(draw.expovariate(0.5))
        rollout.abort(lambda episode: draw.random() < 0.2, draw.choice([Ending.STALE, Ending.CANCELLED]))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_trajectory_ends_once_and_rightly_whatever_fails(seed: int) -> None:
    draw = chance("settings", seed)
    groups = GroupSettings(
        size=3,
        size_min=draw.choice([1, 2, 3]),
        members_extra=draw.choice([0, 1, 2]),
        groups_extra=draw.choice([0, 2]),
        on_loss=draw.choice(["refill", "close", "drop"]),
        refills_max=4,
    )
    configured = settings(
        groups=groups, retries=RETRIES, reset_timeout_s=RESET_S_MAX, step_timeout_s=STEP_S_MAX,
        concurrency=draw.choice([3, 8, 1024]), reset_ahead=draw.choice([0, 2]),
    )  # fmt: skip

    async def playing() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(lambda trajectory, number: plan_of(seed, trajectory, number))
        judge = Judge(0.5, lambda trajectory: judge_fails(seed, trajectory))
        answer = text_script(CODEC, lambda request: "go go go")
        engines = [FakeEngine(answer, name=name, token_s=0.1, start_s=0.3) for name in "ab"]
        router = Router(engines, deaths_max=draw.choice([2, 9]))
        await router.start(PolicyWeights(version=1, folder="none"))
        rollout = Rollout(
            configured, router, CODEC, on_end=world.ended.append, clock=loop.clock,
            rewards={"scripted": judge}, barrier=draw.random() < 0.2,
        )  # fmt: skip
        try:
            async with asyncio.TaskGroup() as others, rollout:
                others.create_task(killing(seed, engines))
                others.create_task(aborting(seed, rollout))
                await collecting(rollout)
        finally:
            await router.close()
        assert [engine.active_requests for engine in engines] == [(), ()]
        assert judge.inside == 0
        assert router.statistics().requests == 0
        world.check(rollout)
        failed_to_make = sum(
            plan_of(seed, trajectory, number).fail == "make"
            for trajectory, count in world.made.items()
            for number in range(count)
        )
        assert world.closed == sum(world.made.values()) - failed_to_make
        for record in world.ended:
            check_record(seed, record)

    async def collecting(rollout: Rollout) -> None:
        try:
            batch = await rollout.collect(tickets(configured), GROUPS)
        except NoEngine:
            return
        except ManagerError as error:
            if "in a row ended without members" not in str(error):
                raise
            return
        assert len(batch.groups) == GROUPS
        for group in batch.groups:
            assert groups.size_min <= len(group.members) <= groups.size
            assert group.is_complete or group.cause
            if groups.on_loss == "drop":
                assert group.is_complete
            attempts = Counter(each.member for each in group.all_trajectories())
            assert max(attempts.values()) <= groups.refills_max + 1
        assert math.isfinite(batch.ended_s)

    run(playing())
