"""Replay: a recording is played again, and every difference is reported."""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from tests.rl import recordings

from tangram.errors import InvalidConfig, InvalidInput
from tangram.rl.config.rollout_settings import GroupSettings, RewardSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.protocol import ExternalResources, Step
from tangram.rl.environments.registry import resolve
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest, Sampling, SamplingSeed
from tangram.rl.rollout.replay import RecordedGenerator, ReplayDifference, ReplayResult, replay, settings_of
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.rl.trajectories.codec import WordCodec
from tangram.rl.trajectories.trajectory import Ending, Trajectory


def replayed(trajectory: Trajectory, task: Any = None, **settings: Any) -> ReplayResult:
    return asyncio.run(replay(trajectory, TaskSettings(name=trajectory.task, **settings), task=task))


class Counting:
    """Says how often it was spoken to, pays a tenth each time, and is over after three."""

    words: ClassVar[tuple[str, ...]] = ()
    turns_max: ClassVar[int] = 10
    tokens_max: ClassVar[int] = 4
    agents: ClassVar[dict[str, Any]] = {}
    closed = 0
    fails_at: ClassVar[int | None] = None
    hangs_at: ClassVar[int | None] = None
    hangs: ClassVar[asyncio.Event] = asyncio.Event()
    close_fails: ClassVar[bool] = False

    def __init__(self, resources: ExternalResources, over: int = 3) -> None:
        self._over = over
        self._heard = 0

    async def reset(self, seed: int) -> str:
        return f"seed {seed}"

    async def step(self, action: str) -> Step:
        if self._heard == self.fails_at:
            raise RuntimeError(f"broken at \x1b[2J {action}")
        if self._heard == self.hangs_at:
            self.hangs.set()
            await asyncio.Event().wait()
        self._heard += 1
        return Step(observation=f"{action} {self._heard}", reward=0.1, done=self._heard == self._over)

    async def close(self) -> None:
        type(self).closed += 1
        if self.close_fails:
            raise RuntimeError("does not close")


def counted(count: int, ending: Ending = Ending.FINISHED, **changes: Any) -> Trajectory:
    """As Counting would have been recorded."""
    turns = tuple(
        msgspec.structs.replace(TURN, observation=f"a {n}" if n else "seed 7", action="a") for n in range(count)
    )
    usual: dict[str, Any] = dict(
        id="counting/0/0.0", task="counting", group="counting/0", member=0, attempt=0, seed=7, turns=turns,
        observation=f"a {count}", ending=ending, reward=sum([0.1] * count) if ending.is_rewarded else None,
    )  # fmt: skip
    return Trajectory(**{**usual, **changes})


TURN = recordings.played("chain", "random", 1).turns[0]


# ---- the same ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["frozenlake", "chain"])
@pytest.mark.parametrize("agent", ["random", "expert"])
def test_what_the_built_in_tasks_played_is_played_the_same_again(task: str, agent: str) -> None:
    for seed in range(5):
        trajectory = recordings.played(task, agent, seed)
        result = replayed(trajectory)
        assert result.is_same, result
        assert result.turns == len(trajectory.turns) > 0


def test_what_was_truncated_or_had_no_reward_is_the_same_too() -> None:
    assert replayed(counted(3), Counting).is_same
    assert replayed(counted(2, Ending.TRUNCATED), Counting).is_same
    assert replayed(counted(3, Ending.REWARD_FAILED), Counting).is_same
    assert replayed(counted(2, Ending.REWARD_FAILED), Counting).is_same


def test_an_action_that_was_never_answered_is_not_played() -> None:
    cut_off = counted(2, Ending.CANCELLED, observation="")
    assert replayed(cut_off, Counting) == ReplayResult(id=cut_off.id, task="counting", turns=1)
    never = counted(0, Ending.ENV_FAILED, observation="")
    assert replayed(never, Counting) == ReplayResult(id=never.id, task="counting", turns=0)


def test_options_and_environment_are_those_of_the_settings() -> None:
    settings = RolloutSettings(tasks=(TaskSettings(name="counting", options={"over": 4}),))
    trajectory = counted(4)
    assert asyncio.run(replay(trajectory, settings_of(trajectory, settings), task=Counting)).is_same
    assert not asyncio.run(replay(trajectory, settings_of(trajectory, None), task=Counting)).is_same
    named = TaskSettings(name="counting", environment=f"{__name__}:Counting")
    assert asyncio.run(replay(counted(3), named)).is_same


# ---- another ----------------------------------------------------------------------------------------------------


def test_a_different_observation_is_reported_with_its_turn() -> None:
    trajectory = counted(3)
    turns = (*trajectory.turns[:1], msgspec.structs.replace(trajectory.turns[1], observation="b"), trajectory.turns[2])
    result = replayed(msgspec.structs.replace(trajectory, turns=turns, observation="c"), Counting)
    assert result.differences == (
        ReplayDifference(turn=1, what="observation", recorded="b", replayed="a 1"),
        ReplayDifference(turn=3, what="observation", recorded="c", replayed="a 3"),
    )


def test_a_different_reward_is_reported() -> None:
    result = replayed(counted(3, reward=1.0), Counting)
    assert [(each.turn, each.what, each.recorded) for each in result.differences] == [(3, "reward", "1.0")]
    assert replayed(counted(3, reward=0.1 * 3), Counting).is_same  # the last bit is the order of a sum


def test_a_different_ending_is_reported() -> None:
    assert [each.what for each in replayed(counted(2), Counting).differences] == ["ending"]
    assert [each.what for each in replayed(counted(3, Ending.TRUNCATED), Counting).differences] == ["ending"]
    longer = replayed(counted(5), Counting)
    assert [(each.turn, each.what) for each in longer.differences] == [(3, "ending")] and longer.turns == 3


def test_an_external_reward_is_not_compared_and_the_report_notes_it() -> None:
    result = replayed(counted(3, reward=5.0), Counting, reward=RewardSettings(kind="command"))
    assert result.is_same and result.not_compared == "the reward, which a command gave"


@given(trajectory=recordings.trajectories())
def test_any_record_is_replayed_without_harm(trajectory: Trajectory) -> None:
    before = Counting.closed
    result = asyncio.run(replay(trajectory, TaskSettings(name="counting"), task=Counting))
    assert result.failed == "" and result.id == trajectory.id
    assert Counting.closed == before + 1


# ---- what fails -------------------------------------------------------------------------------------------------


def test_an_environment_that_raises_or_hangs_fails_the_replay_and_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(Counting, "fails_at", 1)
    before = Counting.closed
    result = replayed(counted(3), Counting)
    assert not result.is_same and result.differences == () and result.turns == 1
    assert result.failed == "RuntimeError: broken at \x1b[2J a"
    monkeypatch.setattr(Counting, "fails_at", None)
    monkeypatch.setattr(Counting, "hangs_at", 2)
    hung = replayed(counted(3), Counting, step_timeout_s=0.05)
    assert hung.failed == "TimeoutError: step of turn 2 took longer than 0.05 s"
    monkeypatch.setattr(Counting, "hangs_at", None)
    monkeypatch.setattr(Counting, "close_fails", True)
    assert replayed(counted(3), Counting).failed == "close: RuntimeError: does not close"
    assert Counting.closed == before + 3


def test_an_environment_is_closed_when_a_replay_is_cancelled(monkeypatch) -> None:
    monkeypatch.setattr(Counting, "hangs_at", 0)
    monkeypatch.setattr(Counting, "hangs", asyncio.Event())
    before = Counting.closed

    async def cancelled() -> None:
        playing = asyncio.ensure_future(replay(counted(3), TaskSettings(name="counting"), task=Counting))
        await asyncio.wait_for(Counting.hangs.wait(), 30)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancelled())
    assert Counting.closed == before + 1


class Outsider(Counting):
    def __init__(self, resources: ExternalResources) -> None:
        super().__init__(resources)
        resources.require_client("outsider")


def test_an_environment_that_needs_a_client_reports_it() -> None:
    with pytest.raises(InvalidConfig, match=r"client: expected one, as tangram\.connect\(\) gives it .*outsider"):
        replayed(counted(3), Outsider)


def test_an_unknown_task_is_reported() -> None:
    with pytest.raises(InvalidConfig, match="did you mean chain"):
        replayed(counted(3, task="chian"))


# ---- as an engine -----------------------------------------------------------------------------------------------


def request(trajectory: Trajectory, tokens: tuple[int, ...], **changes: Any) -> GenerationRequest:
    noise = SamplingSeed(seed=trajectory.seed, member=trajectory.member, attempt=trajectory.attempt)
    usual: dict[str, Any] = dict(id="r", session=trajectory.id, task=trajectory.task, tokens=tokens, noise=noise)
    return GenerationRequest(sampling=Sampling(), **{**usual, **changes})


def test_the_record_answers_each_turn_by_session_or_by_noise() -> None:
    trajectory = recordings.played("frozenlake", "random", 2)
    assert len(trajectory.turns) > 1
    other = recordings.played("frozenlake", "random", 3, number=1)
    generator = RecordedGenerator([trajectory, other])
    before: tuple[int, ...] = ()
    for turn in trajectory.turns:
        before += turn.observation_tokens
        for session in (trajectory.id, ""):
            generation = asyncio.run(generator.generate(request(trajectory, before, session=session)))
            assert (generation.tokens, generation.logprobs, generation.versions) == (
                turn.tokens,
                turn.logprobs,
                turn.versions,
            )
            assert generation.finish == ("length" if turn.truncated else "stop")
        rest = asyncio.run(generator.generate(request(trajectory, before + turn.tokens[:1])))
        assert rest.tokens == turn.tokens[1:] and rest.logprobs == turn.logprobs[1:]
        before += turn.tokens


def test_a_prompt_that_the_recording_lacks_is_refused() -> None:
    trajectory = recordings.played("chain", "random", 2)
    generator = RecordedGenerator([trajectory])
    first = trajectory.turns[0].observation_tokens
    for tokens, words in (
        ((*first[:-1], 999), "differ from position"),
        (trajectory.tokens, "was continued"),
        (first[:-1], "was continued"),
        ((*trajectory.tokens, 1, 2), "differ from position"),
    ):
        with pytest.raises(InvalidInput, match=words):
            asyncio.run(generator.generate(request(trajectory, tokens)))
    with pytest.raises(InvalidInput, match="one of the recorded trajectories"):
        asyncio.run(generator.generate(request(trajectory, first, session="", task="other")))


class Guessing:
    """Writes well-formed actions by chance, as the noise says."""

    def __init__(self, codec: WordCodec, task: str) -> None:
        self._codec = codec
        self._make = resolve(task).agents["random"]

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(0)
        chance = random.Random(f"{request.noise} {len(request.tokens)}")
        tokens = self._codec.encode_action(self._make(chance).act(""))[: request.sampling.tokens_max]
        ended = tokens[-1] in request.sampling.stop
        logprobs = tuple(-chance.random() for _ in tokens)
        return Generation(
            tokens=tokens, logprobs=logprobs, versions=(1,) * len(tokens), finish="stop" if ended else "length"
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_rollout_is_played_again_out_of_its_record(seed: int) -> None:
    codec = WordCodec(resolve("frozenlake").words)
    settings = RolloutSettings(
        seed=seed, groups=GroupSettings(size=3), tasks=(TaskSettings(name="frozenlake", turns_max=6),)
    )

    async def rollout(generator: Any) -> list[Trajectory]:
        async with Rollout(settings, generator, codec) as one:
            return sorted((await one.collect(tickets(settings), 2)).all_trajectories(), key=lambda each: each.id)

    def untimed(trajectory: Trajectory) -> Trajectory:
        return msgspec.structs.replace(trajectory, spans=(), began_s=0.0, ended_s=0.0)

    first = asyncio.run(rollout(Guessing(codec, "frozenlake")))
    second = asyncio.run(rollout(RecordedGenerator(first)))
    assert len(first) == 6
    assert [untimed(each) for each in second] == [untimed(each) for each in first]
    assert all(replayed(each, turns_max=6).is_same for each in first)
