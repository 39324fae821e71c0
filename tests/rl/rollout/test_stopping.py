"""Stopped at any point: after every turn of the loop that a small rollout takes, in every way.

Whatever is stopped wherever: each trajectory that was begun ends once, and nothing is left open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.rl.rollout.world import CODEC, Judge, Plan, Talker, World, settings

from tangram.clock import VirtualLoop
from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.rl.trajectories.trajectory import Ending

TURNS_OF_LOOP_MAX = 1000
"""More than the rollout takes: the way always ends before."""


class Stepping(VirtualLoop):
    """Calls `hook` before the turn `at` of the loop."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.turn = 0
        self.at = at
        self.hook: Callable[[], object] = lambda: None

    def _run_once(self) -> None:
        self.turn += 1
        if self.turn == self.at:
            self.hook()
        super()._run_once()  # type: ignore[misc]


def plan(trajectory: str, number: int) -> Plan:
    """Each stage takes its time, one environment crashes and one hangs."""
    if number == 0 and trajectory.endswith("/0.0"):
        return Plan(turns=2, fail="step", at=1)
    if number == 0 and trajectory.endswith("/1.0"):
        return Plan(turns=2, hang="reset")
    return Plan(turns=2, reset_s=0.3, step_s=0.7, close_s=0.2)


def stopped_at(at: int, how: str, barrier: bool) -> bool:
    """Whether it came to be stopped; False: it was over before."""
    loop = Stepping(at)

    async def playing() -> bool:
        world, talker, judge = World(plan), Talker(), Judge(0.4, lambda trajectory: trajectory.endswith("/2.0"))
        configured = settings(
            groups=GroupSettings(size=2, members_extra=1), concurrency=4, retries=1, reset_timeout_s=2.0
        )
        rollout = Rollout(
            configured, talker, CODEC, on_end=world.ended.append, clock=loop.clock,
            rewards={"scripted": judge}, barrier=barrier,
        )  # fmt: skip
        me = asyncio.current_task()
        assert me is not None
        stopping = False

        def stop() -> None:
            nonlocal stopping
            stopping = True
            if how == "cancel":
                me.cancel()
            elif how == "abort":
                rollout.abort(lambda episode: True, Ending.STALE)
            else:
                talker.die()

        loop.hook = stop
        finished = False
        try:
            async with rollout:
                batch = await rollout.collect(tickets(configured), 2)
                finished = True
                loop.hook = lambda: None
                assert len(batch.groups) == 2
        except asyncio.CancelledError:
            assert how == "cancel"
            me.uncancel()
        except ManagerError:
            assert how == "die"
        assert how != "abort" or finished, "what is stale is refilled"
        world.check(rollout)
        assert talker.inside == {} and judge.inside == 0
        assert world.closed == sum(world.made.values())
        return stopping

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(playing())


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("how", ["cancel", "abort", "die"])
def test_stopped_after_any_turn_of_the_loop_nothing_is_left_and_all_end_once(how: str, barrier: bool) -> None:
    stops = 0
    for at in range(1, TURNS_OF_LOOP_MAX):
        if not stopped_at(at, how, barrier):
            if stops > 5:
                break
            continue
        stops += 1
    else:
        raise AssertionError("it never comes to its end")
    assert stops > 30
