"""The chain: the questions, and the reward of each answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import InvalidConfig
from tangram.rl.environments.agents import AgentEpisode, ScriptedAgent, play
from tangram.rl.environments.chain import DIGITS, LENGTH, STEPS, Chain, values_of
from tangram.rl.environments.conformance import check
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.trajectories.codec import WordCodec

SEEDS = st.integers(min_value=0, max_value=2**53)


def answered(answer: str, seed: int = 0, **options: Any) -> AgentEpisode:
    return asyncio.run(play(Chain, ScriptedAgent([answer]), seed, options=options))


def question_and_values(seed: int, count: int = LENGTH) -> tuple[str, list[str]]:
    question = answered("", seed).observation
    return question, values_of(question, count)


@pytest.mark.parametrize("length", [2, LENGTH, 60])
def test_it_keeps_all_that_environments_promise(length: int) -> None:
    report = asyncio.run(check(Chain, options={"length": length}))
    assert {finding.verdict for finding in report.findings} == {"ok"}, report.text()


def test_the_values_go_on_from_the_start_by_the_step() -> None:
    assert values_of("chain step +3 start 5", 5) == ["8", "1", "4", "7", "0"]
    assert values_of("chain step +9 start 0", 3) == ["9", "8", "7"]


@given(seed=SEEDS, right=st.integers(min_value=0, max_value=LENGTH), wrong=st.sampled_from([*DIGITS, "chain", "x"]))
def test_the_reward_is_the_share_of_values_before_the_first_wrong_one(seed: int, right: int, wrong: str) -> None:
    _, values = question_and_values(seed)
    if right < LENGTH and wrong == values[right]:
        return
    answer = [*values[:right], wrong, *values[right + 1 :]]
    episode = answered(" ".join(answer), seed)
    assert episode.reward == right / LENGTH
    assert episode.metrics["correct"] == right
    assert episode.done and episode.observations[1:] == ("over",)


@given(seed=SEEDS, right=st.integers(min_value=0, max_value=LENGTH))
def test_an_answer_that_stops_is_paid_for_what_there_is(seed: int, right: int) -> None:
    _, values = question_and_values(seed)
    assert answered(" ".join(values[:right]), seed).reward == right / LENGTH


def test_values_beyond_the_last_do_not_count() -> None:
    _, values = question_and_values(0, 3 * LENGTH)
    assert answered(" ".join(values)).reward == 1.0
    assert answered(" ".join(values[:LENGTH]) + " nonsense").reward == 1.0


@given(seed=SEEDS)
def test_the_expert_gets_all_and_the_teacher_the_first_few(seed: int) -> None:
    assert asyncio.run(play(Chain, "expert", seed)).reward == 1.0
    taught = asyncio.run(play(Chain, "teacher", seed))
    assert 1 / LENGTH <= taught.reward <= 8 / LENGTH
    assert taught.metrics["correct"] == taught.metrics["written"], "it is never wrong"


def test_every_step_and_start_is_sampled() -> None:
    questions = {tuple(answered("", seed).observation.split()[2::2]) for seed in range(1500)}
    assert questions == {(step, start) for step in STEPS for start in DIGITS}


def test_writing_is_what_it_costs() -> None:
    codec = WordCodec(Chain.words)
    episode = asyncio.run(play(Chain, "expert", 0))
    read, written = codec.encode_observation(episode.observation, first=True), codec.encode_action(episode.actions[0])
    assert len(written) == Chain.tokens_max >= 4 * len(read)


@pytest.mark.parametrize("length", [1, 5, 100])
def test_another_length_changes_the_prompt_the_reward_and_the_limit(length: int) -> None:
    _, values = question_and_values(7, length)
    assert answered(" ".join(values), 7, length=length).reward == 1.0
    assert answered(values[0], 7, length=length).reward == pytest.approx(1 / length)
    assert Chain(ExternalResources(), length=length).tokens_max == length + 1


@pytest.mark.parametrize("length", [0, -1, 1.5, True, 10**6, "24"])
def test_a_length_that_makes_no_sense_is_refused(length: Any) -> None:
    with pytest.raises(InvalidConfig, match="length"):
        Chain(ExternalResources(), length=length)


def test_there_is_one_answer() -> None:
    async def test() -> None:
        chain = Chain(ExternalResources())
        with pytest.raises(ValueError, match="expected a reset"):
            await chain.step("1")
        await chain.reset(0)
        await chain.step("1")
        with pytest.raises(ValueError, match="the episode is over"):
            await chain.step("1")
        assert await chain.reset(0), "a new one may begin"

    asyncio.run(test())
