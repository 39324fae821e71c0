"""One trajectory: every way in which it can end, and that it ends once."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.rl.rollout.world import CODEC, Judge, Plan, Talker, World, run, settings, ticket

from tangram.clock import VirtualLoop
from tangram.errors import ManagerError
from tangram.rl.config.rollout_settings import GroupSettings
from tangram.rl.environments.protocol import Step
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest, RequestRefused, SamplingSeed
from tangram.rl.rollout.environment_closer import CLOSE_S_MAX
from tangram.rl.rollout.rewards import PlayedTrajectory, Score
from tangram.rl.rollout.rollout import Rollout, RolloutStatistics
from tangram.rl.trajectories.trajectory import Ending, Group, Stage, Trajectory

GO = CODEC.encode_action("go")
LOOK = CODEC.encode_observation("look", first=True)


class Played1:
    """A trajectory that was played alone, and what it left."""

    def __init__(self, record: Trajectory, world: World, talker: Talker, statistics: RolloutStatistics) -> None:
        self.record = record
        self.world = world
        self.talker = talker
        self.statistics = statistics


def play(
    plan: Callable[[str, int], Plan] | Plan | None = None,
    *,
    talker: Talker | None = None,
    reward: Any = None,
    meanwhile: Callable[[Rollout, Talker], None] | None = None,
    at_s: float = 0.0,
    context_max: int = 256,
    **task: Any,
) -> Played1:
    """`meanwhile` is called at `at_s`."""

    async def playing() -> Played1:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world, writes = World(plan), talker or Talker()
        rollout = Rollout(
            settings(context_max=context_max, **task),
            writes,
            CODEC,
            on_end=world.ended.append,
            clock=loop.clock,
            rewards={"scripted": reward} if reward else None,
        )
        async with rollout:
            if meanwhile is not None:
                loop.call_later(at_s, meanwhile, rollout, writes)
            group = await rollout.play(ticket())
        world.check(rollout)
        assert writes.inside == {}
        (record,) = group.all_trajectories()
        assert [record.id] == [each.id for each in world.ended]
        return Played1(record, world, writes, rollout.statistics())

    return run(playing())


# ---- endings ----


def test_a_finished_episode_has_the_whole_conversation_and_the_reward_of_the_environment() -> None:
    record = play(Plan(turns=2, reset_s=0.5, step_s=0.25, reward=0.75)).record
    assert (record.ending, record.reward, record.cause) == (Ending.FINISHED, 0.75, "")
    assert record.tokens == (*LOOK, *GO, *LOOK, *GO)
    assert record.action_mask == (False, False, True, True) * 2
    assert record.observation == "end"
    assert [span.stage for span in record.spans] == [
        Stage.RESET, Stage.GENERATE, Stage.STEP, Stage.GENERATE, Stage.STEP, Stage.REWARD,
    ]  # fmt: skip
    assert [round(span.ended_s - span.began_s, 3) for span in record.spans] == [0.5, 1.0, 0.25, 1.0, 0.25, 0.0]


def test_each_request_continues_the_session_with_all_tokens_so_far() -> None:
    requests = play(Plan(turns=2)).talker.asked
    assert [request.tokens for request in requests] == [LOOK, (*LOOK, *GO, *LOOK)]
    assert {request.session for request in requests} == {"scripted/0/0.0"}
    assert {request.task for request in requests} == {"scripted"}
    assert {request.noise for request in requests} == {SamplingSeed(seed=0, member=0, attempt=0)}
    assert len({request.id for request in requests}) == 2
    assert all(request.sampling.stop == CODEC.stop and request.sampling.tokens_max == 4 for request in requests)


def test_truncated_after_its_turns_and_rewarded_all_the_same() -> None:
    record = play(Plan(turns=5), turns_max=2, reward=Judge()).record
    assert (record.ending, record.reward) == (Ending.TRUNCATED, 0.5)
    assert len(record.turns) == 2 and record.observation == "look" and "2 turns" in record.cause


def test_truncated_when_the_context_is_used_up() -> None:
    """Five tokens: two read, two written, and one that is left takes no observation of two."""
    record = play(Plan(turns=5), context_max=5, reward=Judge()).record
    assert record.ending is Ending.TRUNCATED and len(record.turns) == 1 and "context of 5" in record.cause


def test_the_last_turn_is_cut_to_the_room_that_is_left() -> None:
    played = play(Plan(turns=5), context_max=7, reward=Judge())
    assert [turn.truncated for turn in played.record.turns] == [False, True]
    assert [request.sampling.tokens_max for request in played.talker.asked] == [4, 1]


class Refusing(Talker):
    """A server that does not take the first request."""

    async def generate(self, request: GenerationRequest) -> Generation:
        if not self.asked:
            self.asked.append(request)
            raise RequestRefused("server", "400: too long")
        return await super().generate(request)


def test_a_request_that_is_refused_ends_its_trajectory_alone_and_another_attempt_is_made() -> None:
    async def playing() -> Group:
        world = World()
        configured = settings(groups=GroupSettings(size=2))
        async with Rollout(configured, Refusing(), CODEC, on_end=world.ended.append) as rollout:
            group = await rollout.play(ticket())
        world.check(rollout)
        return group

    group = run(playing())
    (refused,) = group.left_out
    assert (refused.ending, refused.reward) == (Ending.CANCELLED, None)
    assert refused.cause == "engine server: 400: too long"
    assert [each.ending for each in group.members] == [Ending.FINISHED] * 2
    assert [each.attempt for each in group.members if each.member == refused.member] == [1]


def test_a_first_observation_without_room_for_an_answer_is_no_fault_of_the_agent() -> None:
    played = play(context_max=2, tokens_max=1)
    assert played.record.ending is Ending.ENV_FAILED and "no room" in played.record.cause
    assert played.world.made == {"scripted/0/0.0": 1}, "another environment would say the same"


@pytest.mark.parametrize("what", ["reset", "step"])
def test_env_failed_when_every_environment_hangs(what: str) -> None:
    played = play(Plan(hang=what), retries=2, reset_timeout_s=3.0, step_timeout_s=3.0)
    assert played.record.ending is Ending.ENV_FAILED
    assert played.record.cause == f"no answer to {what} within 3 s"
    assert played.world.made == {"scripted/0/0.0": 3}
    assert played.world.closed == 3


@pytest.mark.parametrize("what", ["reset", "step"])
def test_env_failed_when_every_environment_crashes(what: str) -> None:
    played = play(Plan(fail=what), retries=1)
    assert played.record.ending is Ending.ENV_FAILED
    assert played.record.cause == f"{what} raised ConnectionResetError: {what}: connection lost"
    assert played.world.made == {"scripted/0/0.0": 2}


def test_env_failed_when_no_environment_can_be_made() -> None:
    record = play(Plan(fail="make"), retries=1).record
    assert (record.ending, record.cause) == (Ending.ENV_FAILED, "no environment: OSError: no room")


def test_env_failed_names_the_word_that_the_policy_does_not_know() -> None:
    played = play(Plan(says="look unheard"), retries=3)
    assert played.record.ending is Ending.ENV_FAILED and "'unheard'" in played.record.cause
    assert played.world.made == {"scripted/0/0.0": 1}, "another environment would say the same"


@pytest.mark.parametrize(
    "odd",
    [
        "done",
        Step(observation=None),  # type: ignore[arg-type]
        Step(observation="look", reward=None),  # type: ignore[arg-type]
        Step(observation="look", metrics=None),  # type: ignore[arg-type]
    ],
)
def test_env_failed_when_a_step_is_none(odd: object) -> None:
    record = play(Plan(odd=odd)).record
    assert record.ending is Ending.ENV_FAILED and "step returned no valid Step" in record.cause


def test_an_environment_that_cancels_itself_failed() -> None:
    record = play(Plan(cancels_itself=True), retries=0).record
    assert (record.ending, record.cause) == (Ending.ENV_FAILED, "step cancelled itself")


def test_reward_failed_is_no_reward_of_0() -> None:
    record = play(reward=Judge(fails=lambda trajectory: True)).record
    assert (record.ending, record.reward, record.cause) == (Ending.REWARD_FAILED, None, "the judge is not there")
    assert len(record.turns) == 3


class Odd:
    """Rewards that are none."""

    def __init__(self, reward: float | None) -> None:
        self._reward = reward

    async def score(self, played: PlayedTrajectory) -> Score:
        if self._reward is None:
            raise ZeroDivisionError("division by zero")
        return Score(value=self._reward)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_reward_that_is_no_number_failed(reward: float | None) -> None:
    record = play(reward=Odd(reward)).record
    assert record.ending is Ending.REWARD_FAILED and record.cause


@pytest.mark.parametrize("ending", [Ending.STALE, Ending.CANCELLED])
@pytest.mark.parametrize("at_s", [0.25, 1.0, 1.75, 4.5])
def test_aborted_in_reset_generation_step_or_reward(ending: Ending, at_s: float) -> None:
    """The reset takes half a second, each turn one and a half, the reward one."""

    def abort(rollout: Rollout, talker: Talker) -> None:
        assert rollout.abort(lambda episode: True, ending, "not needed") == 1

    played = play(
        Plan(turns=2, reset_s=0.5, step_s=0.5), reward=Judge(2.0), meanwhile=abort, at_s=at_s
    )  # fmt: skip
    assert (played.record.ending, played.record.cause) == (ending, "not needed")
    assert played.record.spans[-1].failed == "not needed"
    assert played.record.ended_s == pytest.approx(at_s, abs=1e-3)
    assert played.talker.aborted == (["scripted/0/0.0/1"] if at_s == 1.0 else [])
    assert played.world.closed == 1


def test_aborted_by_its_id() -> None:
    def abort(rollout: Rollout, talker: Talker) -> None:
        assert rollout.abort(["scripted/1/0.0"]) == 0
        assert rollout.abort({"scripted/0/0.0"}) == 1

    assert play(meanwhile=abort, at_s=0.5).record.ending is Ending.CANCELLED


def test_a_step_that_keeps_its_cancellation_to_itself_does_not_go_on() -> None:
    def abort(rollout: Rollout, talker: Talker) -> None:
        rollout.abort(lambda episode: True, Ending.STALE)

    played = play(Plan(deaf=True, step_s=1.0), meanwhile=abort, at_s=1.5)
    assert played.record.ending is Ending.STALE and len(played.talker.asked) == 1


# ---- retries ----


@pytest.mark.parametrize("bad", [Plan(hang="step", at=1), Plan(fail="step", at=1), Plan(fail="reset")])
def test_a_restarted_episode_has_a_new_environment_and_the_same_noise(bad: Plan) -> None:
    played = play(lambda trajectory, number: bad if number == 0 else Plan(), step_timeout_s=3.0)
    record = played.record
    assert record.ending is Ending.FINISHED and len(record.turns) == 3
    assert {request.noise.attempt for request in played.talker.asked} == {0}
    assert played.talker.asked[-3].tokens == LOOK, "nothing of the first try is left"
    assert [span.attempt for span in record.spans if span.stage is Stage.RESET] == [0, 1]
    assert sum(bool(span.failed) for span in record.spans) == 1
    assert len({request.id for request in played.talker.asked}) == len(played.talker.asked)


def test_pauses_between_tries_grow() -> None:
    spans = play(Plan(fail="reset"), retries=3, backoff_s=1.0).record.spans
    pauses = [after.began_s - before.ended_s for before, after in itertools.pairwise(spans)]
    assert len(pauses) == 3
    assert all(0.5 * 2**n <= pause <= 2**n for n, pause in enumerate(pauses)), pauses


def test_a_close_that_hangs_blocks_no_episode_and_is_counted() -> None:
    played = play(Plan(hang="close", turns=1))
    assert played.record.ending is Ending.FINISHED and played.record.ended_s == pytest.approx(1.0, abs=1e-3)
    assert played.record.ended_s < CLOSE_S_MAX
    assert played.statistics.close_failed == 1


def test_a_close_that_raises_is_counted() -> None:
    played = play(Plan(fail_close=True))
    assert played.record.ending is Ending.FINISHED and played.statistics.close_failed == 1


# ---- engines and waiting ----


def test_an_engine_failure_yields_no_reward() -> None:
    ended: list[Trajectory] = []

    async def playing() -> None:
        world, talker = World(), Talker()
        async with Rollout(settings(), talker, CODEC, on_end=ended.append) as rollout:
            asyncio.get_running_loop().call_later(1.5, talker.die)
            with pytest.raises(ManagerError, match="no engine is left"):
                await rollout.play(ticket())
            with pytest.raises(ManagerError, match="no engine is left"):
                await rollout.play(ticket(1))
        world.check(rollout)

    run(playing())
    assert [(each.ending, each.cause) for each in ended] == [(Ending.CANCELLED, "no engine is left")]


def test_waiting_in_an_engine_is_reported_with_its_name() -> None:
    record = play(talker=Talker(1.0, waiting_s=0.25)).record
    spans = [span for span in record.spans if span.stage is Stage.GENERATE]
    assert {(span.waiting_s, span.waited_for) for span in spans} == {(0.25, "talker")}


def test_a_cancelled_caller_leaves_nothing_and_the_record_shows_it() -> None:
    async def playing() -> None:
        world, talker = World(), Talker()
        async with Rollout(settings(), talker, CODEC, on_end=world.ended.append) as rollout:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await rollout.play(ticket())
            assert [each.ending for each in world.ended] == [Ending.CANCELLED]
            assert talker.inside == {}
        world.check(rollout)

    run(playing())
