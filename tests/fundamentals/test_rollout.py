"""A rollout in eight short steps. Read from top to bottom; `test_server.py` comes before.

An environment is one episode in text. An engine continues tokens. A rollout connects the two: it plays groups of
episodes, each at its own pace, and returns trajectories with rewards. The engine here follows a script, so nothing is
sampled and every number is known.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tangram.clock import VirtualLoop
from tangram.rl.config.rollout_settings import GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step
from tangram.rl.inference.engines.fake import FakeEngine, text_script
from tangram.rl.inference.engines.protocol import GenerationRequest, PolicyWeights, Sampling, SamplingSeed
from tangram.rl.rollout.replay import RecordedGenerator, replay
from tangram.rl.rollout.rollout import Rollout, tickets
from tangram.rl.runs.trajectory_log import GroupClosing, TrajectoryLog, groups, read
from tangram.rl.trajectories.codec import WordCodec
from tangram.rl.trajectories.trajectory import Ending, GroupTicket

COLOURS = ("red", "blue")


class Guess:
    """The seed hides a colour. A turn that names it earns 1 and ends the episode."""

    words: ClassVar[tuple[str, ...]] = ("which", "wrong", "right", *COLOURS)
    turns_max: ClassVar[int] = 2
    tokens_max: ClassVar[int] = 2
    agents: ClassVar[Mapping[str, MakeAgent]] = {}

    def __init__(self, resources: ExternalResources, *, first: str = "which", broken: bool = False) -> None:
        self.first, self.broken = first, broken

    async def reset(self, seed: int) -> str:
        self.hidden = COLOURS[seed % 2]
        return self.first

    async def step(self, action: str) -> Step:
        if self.broken:
            raise ConnectionResetError("the game server is gone")
        right = action == self.hidden
        return Step(observation="right" if right else "wrong", reward=1.0 if right else 0.0, done=right)

    async def close(self) -> None:
        pass


class Slow(Guess):
    """An episode with an odd seed takes 100 seconds, the others take one."""

    async def reset(self, seed: int) -> str:
        await asyncio.sleep(100.0 if seed % 2 else 1.0)
        return await super().reset(seed)


CODEC = WordCodec(Guess.words)


def settings_of(
    environment: type[Guess] = Guess, *, on_loss: str = "refill", groups_extra: int = 0, **options: Any
) -> RolloutSettings:
    """One task, in groups of two."""
    path = f"{environment.__module__}:{environment.__name__}"
    task = TaskSettings(name="guess", environment=path, options=options, retries=0)
    groups = GroupSettings(size=2, on_loss=on_loss, groups_extra=groups_extra)  # type: ignore[arg-type]
    return RolloutSettings(tasks=(task,), groups=groups)


async def started_engine(version: int = 0) -> FakeEngine:
    """The first member of every group writes red, the second writes blue."""
    engine = FakeEngine(text_script(CODEC, lambda request: COLOURS[request.noise.member % 2]))
    await engine.start(PolicyWeights(version=version, folder=""))
    return engine


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in virtual time: an hour of sleep takes no time."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**fixtures))

    return run


@on_virtual_time
async def test_1_an_environment_is_one_episode_in_text() -> None:
    """`reset` makes the episode of a seed, `step` answers an action, `close` releases what the episode holds. The same
    seed makes the same episode, so members of a group and replays see the same task."""
    episode = Guess(ExternalResources())
    assert await episode.reset(seed=1) == "which"
    assert await episode.step("red") == Step(observation="wrong")
    assert await episode.step("blue") == Step(observation="right", reward=1.0, done=True)
    await episode.close()


@on_virtual_time
async def test_2_a_codec_encodes_text_and_an_engine_continues_the_tokens() -> None:
    """Engines process only tokens. A generation has a log-probability and a weight version for each token, which is all
    that training needs to correct for samples of older weights."""
    engine = await started_engine(version=7)
    prompt = CODEC.encode_observation("which", first=True)
    sampling = Sampling(tokens_max=2, stop=CODEC.stop)
    request = GenerationRequest(id="a", tokens=prompt, sampling=sampling, noise=SamplingSeed(seed=0, member=1))
    generation = await engine.generate(request)
    assert CODEC.decode_action(generation.tokens) == "blue"
    assert generation.finish == "stop"  # the last token is one that ends an action
    assert len(generation.logprobs) == len(generation.tokens) == 2
    assert generation.versions == (7, 7)


@on_virtual_time
async def test_3_members_of_a_group_play_the_same_seed_and_earn_different_rewards() -> None:
    """A ticket names a task and a seed. GRPO learns from the differences between the rewards of one group."""
    async with Rollout(settings_of(), await started_engine(), CODEC) as rollout:
        group = await rollout.play(GroupTicket(task="guess", number=0, seed=4))
    right, wrong = sorted(group.members, key=lambda member: member.member)
    assert (right.seed, wrong.seed) == (4, 4)
    assert (right.reward, right.ending) == (1.0, Ending.FINISHED)
    # A wrong answer is a result. The episode reached `turns_max`, and its reward is 0.
    assert (wrong.reward, wrong.ending, len(wrong.turns)) == (0.0, Ending.TRUNCATED, 2)


@on_virtual_time
async def test_4_a_trajectory_keeps_the_tokens_as_they_were_sampled() -> None:
    """Text is never tokenized a second time: the trainer gets the sampled tokens, and a mask that separates them from
    the tokens of observations."""
    async with Rollout(settings_of(), await started_engine(), CODEC) as rollout:
        group = await rollout.play(GroupTicket(task="guess", number=0, seed=4))
    trajectory = next(member for member in group.members if member.member == 1)
    assert [(turn.observation, turn.action) for turn in trajectory.turns] == [("which", "blue"), ("wrong", "blue")]
    assert [CODEC.words[token] for token in trajectory.tokens[:4]] == ["which", "<act>", "blue", "<end>"]
    assert trajectory.action_mask[:4] == (False, False, True, True)
    assert len(trajectory.logprobs) == len(trajectory.versions) == sum(trajectory.action_mask)


@on_virtual_time
async def test_5_an_environment_that_fails_is_never_a_reward_of_zero() -> None:
    """An exception of an environment is a failure of the infrastructure, and the trajectory has no reward at all.
    `on_loss` determines what happens to its group: play another attempt, close the group with fewer members, or drop
    it."""
    settings = settings_of(on_loss="close", broken=True)
    async with Rollout(settings, await started_engine(), CODEC) as rollout:
        group = await rollout.play(GroupTicket(task="guess", number=0, seed=4))
    assert group.members == ()
    assert [lost.ending for lost in group.left_out] == [Ending.ENV_FAILED] * 2
    assert all(lost.reward is None and "the game server is gone" in lost.cause for lost in group.left_out)


@on_virtual_time
async def test_6_no_episode_waits_for_a_slower_one() -> None:
    """`groups_extra` groups are played in addition to those that are needed. The first groups that end are kept, and
    the others are cancelled: the batch does not wait for the slowest environment."""
    slow, fast = (GroupTicket(task="guess", number=number, seed=seed) for number, seed in enumerate((1, 2)))
    async with Rollout(settings_of(Slow, groups_extra=1), await started_engine(), CODEC) as rollout:
        batch = await rollout.collect([slow, fast], groups=1)
    assert [group.id for group in batch.groups] == [fast.group]
    assert batch.ended_s < 100.0
    assert {each.ending for group in batch.left_out for each in group.all_trajectories()} == {Ending.CANCELLED}


@on_virtual_time
async def test_7_the_log_of_a_rollout_contains_every_trajectory(tmp_path: Path) -> None:
    """Every trajectory is written as one line of JSON as soon as it ends, so a crash loses at most the unfinished ones.
    A line for each group lists the members that were kept."""
    settings = settings_of()
    with TrajectoryLog(tmp_path / "rollout.jsonl", settings=settings, words=CODEC.words) as log:
        async with Rollout(settings, await started_engine(), CODEC, on_end=log.append) as rollout:
            batch = await rollout.collect(tickets(settings), groups=3)
        for group in batch.groups:
            log.append(GroupClosing.of(group))
    reading = read(tmp_path / "rollout.jsonl")
    assert reading.header.settings == settings
    logged = [(each.id, each.tokens, each.reward) for group in groups(reading) for each in group.members]
    assert logged == [(each.id, each.tokens, each.reward) for group in batch.groups for each in group.members]


@on_virtual_time
async def test_8_a_recorded_trajectory_replays_without_a_model() -> None:
    """Replay plays the recorded actions in a new environment and reports every difference. The record can also replace
    the engine: then the whole rollout repeats."""
    settings, ticket = settings_of(), GroupTicket(task="guess", number=0, seed=4)
    async with Rollout(settings, await started_engine(), CODEC) as rollout:
        recorded = await rollout.play(ticket)
    assert (await replay(recorded.members[0], settings.tasks[0])).is_same
    changed = settings_of(first="wrong").tasks[0]
    [difference] = (await replay(recorded.members[0], changed)).differences
    assert (difference.turn, difference.recorded, difference.replayed) == (0, "which", "wrong")

    async with Rollout(settings, RecordedGenerator(recorded.members), CODEC) as rollout:
        again = await rollout.play(ticket)
    assert {each.id: each.tokens for each in again.members} == {each.id: each.tokens for each in recorded.members}
