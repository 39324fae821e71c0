"""Trajectories for tests: any that may be, hostile text and odd numbers included, and real ones, played without a
model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from hypothesis import strategies as st

from tangram.rl.environments.agents import play
from tangram.rl.environments.registry import resolve
from tangram.rl.inference.engines.protocol import EngineStatistics
from tangram.rl.runs.trajectory_log import EngineEvent, GroupClosing, StatisticsRecord
from tangram.rl.trajectories.codec import WordCodec
from tangram.rl.trajectories.trajectory import Ending, Group, Span, Stage, Trajectory, Turn

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m red",
    "[bold red]markup[/bold red] [link=file:///etc/passwd]",
    "</script><script>window.owned = 1</script>",
    '<img src=x onerror="window.owned = 1">',
    "\u202egnp.exe \u2066\u200b",
    "\udc80 lone \ud800",
    "line\nbreak\r\ttab\x00\x7f",
    ":smile: \\ \" ' & {x} %s $number",
    "",
)

texts = st.sampled_from(HOSTILE) | st.text(st.characters(), max_size=12)
"""Lone surrogates too: what a sandbox writes may be decoded so."""
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
floats = st.floats(width=64)
"""nan and infinities too."""
times = st.floats(0.0, 20.0)
counts = st.integers(0, 2**40)
spans = st.builds(
    lambda stage, began, length, waiting, waited_for, attempt, failed: Span(
        stage=stage,
        began_s=began,
        ended_s=began + length,
        waiting_s=waiting * length,
        waited_for=waited_for,
        attempt=attempt,
        failed=failed,
    ),
    st.sampled_from(Stage),
    times,
    st.floats(0.0, 3.0),
    st.sampled_from((0.0, 0.25, 1.0)),
    st.sampled_from(("", "engine-0", "cpu@a", "environment: step")) | texts,
    st.integers(0, 3),
    st.sampled_from(("", "", "", "lost")) | texts,
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    size = draw(st.integers(0, 4))
    many = dict(min_size=size, max_size=size)
    kept = st.lists(st.lists(counts, max_size=3).map(tuple), **many).map(tuple)
    return Turn(
        observation=draw(texts),
        observation_tokens=tuple(draw(st.lists(counts, max_size=4))),
        action=draw(texts),
        tokens=tuple(draw(st.lists(counts, **many))),
        logprobs=tuple(draw(st.lists(floats, **many))),
        versions=tuple(draw(st.lists(counts, **many))),
        candidate_token_ids=draw(st.none() | kept),
        truncated=draw(st.booleans()),
        engine=draw(texts),
        prefilled=draw(counts),
        prefill_s=draw(floats),
        decode_s=draw(floats),
    )


@st.composite
def trajectories(draw: st.DrawFn, id: str | None = None, *, bare: bool = False) -> Trajectory:
    """`bare`: without turns."""
    ending = draw(st.sampled_from(Ending))
    began_s = draw(times)
    member, attempt = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    task = draw(st.sampled_from(("frozenlake", "chain")) | texts)
    return Trajectory(
        id=id if id is not None else f"{task}/{draw(st.integers(0, 9))}/{member}.{attempt}",
        task=task,
        group=draw(texts),
        member=member,
        attempt=attempt,
        seed=draw(counts),
        turns=() if bare else tuple(draw(st.lists(turns(), max_size=3))),
        observation=draw(texts),
        ending=ending,
        cause=draw(texts),
        reward=draw(floats) if ending.is_rewarded else None,
        metrics=draw(st.dictionaries(names, floats, max_size=2)),
        spans=tuple(draw(st.lists(spans, max_size=5))),
        began_s=began_s,
        ended_s=began_s + draw(st.floats(0.0, 5.0)),
    )


@st.composite
def groups(draw: st.DrawFn, number: int = 0) -> Group:
    count = draw(st.integers(0, 4))
    # One member with turns: each takes long to draw, and what turns hold is not what groups differ in.
    played = [draw(trajectories(id=f"t/{number}/{member}.0", bare=member > 0)) for member in range(count)]
    kept = tuple(each for each in played if each.ending.is_rewarded)
    left_out = tuple(each for each in played if not each.ending.is_rewarded)
    return Group(
        id=f"t/{number}",
        task="t",
        seed=draw(counts),
        members=kept,
        left_out=left_out,
        wanted=draw(counts),
        cause=draw(texts),
    )


events = st.builds(
    EngineEvent,
    at_s=floats,
    name=texts,
    words=st.dictionaries(names, st.none() | st.booleans() | counts | floats | texts, max_size=3),
)
closings = st.builds(
    GroupClosing,
    id=texts,
    task=texts,
    seed=counts,
    members=st.lists(texts, max_size=2).map(tuple),
    left_out=st.lists(texts, max_size=2).map(tuple),
    wanted=counts,
    cause=texts,
    at_s=floats,
)
engine_statistics = st.builds(EngineStatistics, name=texts, decode_tokens=counts, idle_s=floats)
statistics = st.builds(
    StatisticsRecord,
    at_s=floats,
    engines=st.lists(engine_statistics, max_size=2).map(tuple),
    values=st.dictionaries(names, floats, max_size=2),
)
records = trajectories() | closings | events | statistics


# ---- real ones ------------------------------------------------------------------------------------------------


def played(task: str, agent: str, seed: int, *, number: int = 0, member: int = 0, turns_max: int = 30) -> Trajectory:
    """An episode of a built-in task, as a rollout would record it."""
    episode = asyncio.run(play(task, agent, seed, turns_max=turns_max))
    codec = WordCodec(resolve(task).words)
    chance = random.Random(seed)
    trajectories = []
    for place, (observation, action) in enumerate(zip(episode.observations, episode.actions, strict=False)):
        tokens = codec.encode_action(action)
        trajectories.append(
            Turn(
                observation=observation,
                observation_tokens=codec.encode_observation(observation, first=not place),
                action=action,
                tokens=tokens,
                logprobs=tuple(-chance.random() for _ in tokens),
                versions=tuple(3 + place for _ in tokens),
                engine="engine-0",
            )
        )
    began_s = 0.1 * member
    return Trajectory(
        id=f"{task}/{number}/{member}.0",
        task=task,
        group=f"{task}/{number}",
        member=member,
        attempt=0,
        seed=seed,
        turns=tuple(trajectories),
        observation=episode.observations[-1],
        ending=Ending.TRUNCATED if episode.truncated else Ending.FINISHED,
        cause=f"it used up its {turns_max} turns" if episode.truncated else "",
        reward=episode.reward,
        metrics=episode.metrics,
        spans=_spans(began_s, len(trajectories), chance),
        began_s=began_s,
        ended_s=began_s + 0.3 + 0.2 * len(trajectories),
    )


def _spans(began_s: float, count: int, chance: random.Random) -> tuple[Span, ...]:
    spans = [Span(stage=Stage.RESET, began_s=began_s, ended_s=began_s + 0.2, waiting_s=0.05, waited_for="cpu@a")]
    now = began_s + 0.2
    for _ in range(count):
        middle = now + chance.uniform(0.02, 0.1)
        spans.append(Span(stage=Stage.GENERATE, began_s=now, ended_s=middle, waiting_s=0.01, waited_for="engine-0"))
        spans.append(Span(stage=Stage.STEP, began_s=middle, ended_s=now + 0.2))
        now += 0.2
    spans.append(Span(stage=Stage.REWARD, began_s=now, ended_s=now + 0.1))
    return tuple(spans)


def span(stage: Stage, began_s: float, ended_s: float, waiting_s: float = 0.0, waited_for: str = "") -> Span:
    return Span(stage=stage, began_s=began_s, ended_s=ended_s, waiting_s=waiting_s, waited_for=waited_for)


def simple(
    id: str, spans: Sequence[Span], *, task: str = "t", began_s: float | None = None, ended_s: float | None = None
) -> Trajectory:
    """A trajectory that is nothing but its spans."""
    return Trajectory(
        id=id,
        task=task,
        group="t/0",
        member=0,
        attempt=0,
        seed=0,
        turns=(),
        ending=Ending.FINISHED,
        reward=1.0,
        spans=tuple(spans),
        began_s=spans[0].began_s if began_s is None else began_s,
        ended_s=spans[-1].ended_s if ended_s is None else ended_s,
    )
