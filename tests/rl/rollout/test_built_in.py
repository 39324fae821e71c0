"""The tasks that come along, played by agents that write words in place of a policy."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.rl.rollout.world import run

from tangram.clock import VirtualLoop
from tangram.rl.config.rollout_settings import GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.registry import resolve, words_of
from tangram.rl.inference.engines.fake import FakeEngine, text_script
from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights
from tangram.rl.rollout.rollout import CollectedBatch, Rollout, tickets
from tangram.rl.trajectories.codec import WordCodec

TASKS = ("frozenlake", "chain")


def collected(agent: str) -> CollectedBatch:
    configured = RolloutSettings(
        groups=GroupSettings(size=2), tasks=tuple(TaskSettings(name=task) for task in TASKS)
    )  # fmt: skip
    codec = WordCodec(words_of(TASKS))

    def speak(request: GenerationRequest) -> str:
        """What the agent says to the last observation, which ends with the mark after which it is its turn."""
        words = codec.decode_action(request.tokens[:-1]).split()
        last = len(words) - words[::-1].index(WordCodec.ACT) if WordCodec.ACT in words else 0
        text = " ".join(words[last:])
        return resolve(request.task).agents[agent](random.Random(request.id)).act(text)

    async def playing() -> CollectedBatch:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        engine = FakeEngine(text_script(codec, speak), token_s=0.01)
        await engine.start(PolicyWeights(version=0, folder="none"))
        async with Rollout(configured, engine, codec, clock=loop.clock) as rollout:
            return await rollout.collect(tickets(configured), 8)

    return run(playing())


@pytest.mark.parametrize("agent", ["random"])
def test_built_in_tasks_are_played_to_the_end(agent: str) -> None:
    batch = collected(agent)
    assert len(batch.groups) == 8 and all(group.is_complete for group in batch.groups)
    assert {group.task for group in batch.groups} == set(TASKS)
    for group in batch.groups:
        first = {each.turns[0].observation for each in group.members}
        assert len(first) == 1, "members of a group begin alike"


def test_the_options_of_a_task_change_its_limits_and_the_settings_have_the_last_word() -> None:
    """The class says 25 tokens and 8 turns."""
    configured = RolloutSettings(
        groups=GroupSettings(size=1),
        tasks=(
            TaskSettings(name="short", environment="chain", options={"length": 3}),
            TaskSettings(name="shorter", environment="chain", options={"length": 3}, tokens_max=2),
            TaskSettings(name="long", environment="frozenlake", options={"turns": 12}),
        ),
    )
    codec = WordCodec(words_of(TASKS))
    counts: dict[str, int] = {}

    def babble(request: GenerationRequest) -> tuple[int, ...]:
        counts[request.task] = request.sampling.tokens_max
        return tuple(codec.encode_action("start"))

    async def playing() -> CollectedBatch:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        engine = FakeEngine(babble)
        await engine.start(PolicyWeights(version=0, folder="none"))
        async with Rollout(configured, engine, codec, clock=loop.clock) as rollout:
            return await rollout.collect(tickets(configured), 3)

    batch = run(playing())
    assert counts["short"] == 4 and counts["shorter"] == 2
    assert {group.task: len(group.members[0].turns) for group in batch.groups}["long"] == 12
