"""The lake: always a way, rules that hold in every encoding, and agents as the protocol wants them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import InvalidConfig
from tangram.rl.environments.agents import AgentEpisode, ScriptedAgent, play
from tangram.rl.environments.conformance import check
from tangram.rl.environments.frozenlake import MOVES, SIZE_MAX, FrozenLake, Lake
from tangram.rl.environments.protocol import ExternalResources, Step
from tangram.rl.trajectories.codec import WordCodec

ENCODINGS = ("direction", "position", "grid")
SEEDS = st.integers(min_value=0, max_value=2**53)
sizes = st.integers(min_value=2, max_value=SIZE_MAX)
shares = st.floats(min_value=0.0, max_value=1.0)


def played(actions: list[str], seed: int = 0, **options: Any) -> AgentEpisode:
    return asyncio.run(play(FrozenLake, ScriptedAgent(actions), seed, options=options))


def lake_where(wanted: Any) -> tuple[int, Lake]:
    """The first seed whose lake is such a one."""
    return next((seed, lake) for seed in range(10_000) if wanted(lake := Lake(seed, 4, 0.1, 8)))


def beside(lake: Lake, what: str) -> str | None:
    """The move from the start to such a cell."""
    row, column = lake.start
    return next((move for move, (down, right) in MOVES.items() if lake.at((row + down, column + right)) == what), None)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_keeps_all_that_environments_promise(encoding: str) -> None:
    report = asyncio.run(check(FrozenLake, options={"encoding": encoding}))
    assert {finding.verdict for finding in report.findings} == {"ok"}, report.text()


@given(seed=SEEDS, size=sizes, holes=shares, more=st.integers(min_value=0, max_value=20))
def test_every_lake_has_a_way_that_fits_into_its_turns(seed: int, size: int, holes: float, more: int) -> None:
    turns = max(2, size - 1) + more
    lake = Lake(seed, size, holes, turns)
    assert max(2, size - 1) <= lake.moves_left(lake.start) <= turns
    assert lake.start not in lake.holes and lake.at(lake.goal) == "goal"


@given(seed=SEEDS, size=sizes, slippery=st.sampled_from([0.0, 0.3]), encoding=st.sampled_from(ENCODINGS))
def test_the_expert_reaches_the_goal_without_a_detour(seed: int, size: int, slippery: float, encoding: str) -> None:
    options = {"size": size, "turns": 4 * size, "slippery": slippery, "encoding": encoding}
    episode = asyncio.run(play(FrozenLake, "expert", seed, options=options))
    assert episode.done and episode.reward == 1.0 and episode.observations[-1] == "reached"
    if not slippery:
        assert len(episode.actions) == Lake(seed, size, 0.1, 4 * size).moves_left(Lake(seed, size, 0.1, 4 * size).start)


@given(seed=SEEDS, size=sizes, holes=shares, encoding=st.sampled_from(ENCODINGS))
def test_the_teacher_never_falls_in_any_encoding(seed: int, size: int, holes: float, encoding: str) -> None:
    options = {"size": size, "turns": 2 * size, "holes": holes, "encoding": encoding}
    episode = asyncio.run(play(FrozenLake, "teacher", seed, options=options))
    assert episode.metrics["fell"] == 0.0


@given(
    seed=SEEDS,
    actions=st.lists(st.sampled_from([*MOVES, "jump", "", "up up"]), max_size=8),
    options=st.fixed_dictionaries(
        {"size": st.just(SIZE_MAX), "slippery": shares, "holes": shares, "encoding": st.sampled_from(ENCODINGS)}
    ),
)
def test_all_observations_are_in_the_vocabulary(seed: int, actions: list[str], options: dict[str, Any]) -> None:
    codec = WordCodec(FrozenLake.words)
    for text in played(actions, seed, **options).observations:
        assert codec.encode_observation(text, first=False)


def test_most_lakes_have_about_the_configured_number_of_holes() -> None:
    holes = [len(Lake(seed, 4, 0.1, 8).holes) for seed in range(500)]
    assert 0.07 < sum(holes) / len(holes) / 16 < 0.11


def test_the_observation_shows_the_goal_and_the_surroundings() -> None:
    seed, lake = lake_where(lambda lake: lake.start == (0, 0) and lake.at((1, 0)) == "hole" and lake.goal == (2, 3))
    around = "up:edge right:ice down:hole left:edge"
    assert lake.moves_left(lake.start) >= 5
    assert played([], seed).observation == f"towards southeast {around}"
    assert played([], seed, encoding="position").observation == f"at 0 0 goal 2 3 {around}"
    grid = played([], seed, encoding="grid").observation
    rows = [row.split() for row in grid.split("row")[1:]]
    assert (rows[0][0], rows[1][0], rows[2][3]) == ("you", "hole", "goal")
    assert [len(row) for row in rows] == [4, 4, 4, 4]


def test_reading_is_what_it_costs() -> None:
    codec = WordCodec(FrozenLake.words)
    episode = asyncio.run(play(FrozenLake, "teacher", 0))
    read = sum(len(codec.encode_observation(text, first=False)) for text in episode.observations[:-1])
    written = sum(len(codec.encode_action(text)) for text in episode.actions)
    assert read >= 3 * written


def test_a_hole_ends_the_episode_without_a_reward() -> None:
    seed, lake = lake_where(lambda lake: beside(lake, "hole"))
    move = beside(lake, "hole")
    assert move is not None
    (step,) = played([move, "up"], seed).steps
    assert step == Step(observation="fell", reward=0.0, done=True, metrics={"moves": 1.0, "fell": 1.0})


def test_a_move_against_the_edge_stays_where_it_is_and_costs_a_turn() -> None:
    seed, lake = lake_where(lambda lake: beside(lake, "edge"))
    move = beside(lake, "edge")
    assert move is not None
    episode = played([move] * 20, seed)
    assert len(episode.steps) == 8 and episode.done and episode.reward == 0.0
    assert set(episode.observations[:-1]) == {episode.observation} and episode.observations[-1] == "over"


@pytest.mark.parametrize("action", ["", "north", "up up", "UP", "up\x00", "x" * 10_000])
def test_what_is_no_move_is_answered_and_costs_a_turn(action: str) -> None:
    episode = played([action] * 20, 3)
    assert len(episode.steps) == 8 and episode.done and episode.reward == 0.0
    assert set(episode.observations[1:-1]) == {f"unknown {episode.observation}"}


def test_blanks_around_a_move_do_not_matter() -> None:
    assert played([" up\n"]).observations == played(["up"]).observations


def test_the_ice_is_as_slippery_as_configured_and_deterministic() -> None:
    def went(slippery: float, seed: int) -> bool:
        """Whether the first move led where it should."""
        lake = FrozenLake(ExternalResources(), slippery=slippery, holes=0.0)
        asyncio.run(lake.reset(seed))
        move = random.Random(seed).choice(list(MOVES))
        row, column = lake.position
        cell = (row + MOVES[move][0], column + MOVES[move][1])
        return lake.destination(move) == (cell if all(0 <= each < 4 for each in cell) else (row, column))

    straight = [went(0.4, seed) for seed in range(400)]
    assert straight == [went(0.4, seed) for seed in range(400)]
    assert 0.5 < sum(straight) / len(straight) < 0.75
    assert all(went(0.0, seed) for seed in range(50))


def test_it_may_be_reset_again() -> None:
    async def test() -> None:
        lake = FrozenLake(ExternalResources())
        first = await lake.reset(5)
        await lake.step("up")
        assert await lake.reset(5) == first

    asyncio.run(test())


def test_a_step_before_the_reset_or_after_the_end_is_refused() -> None:
    async def test() -> None:
        lake = FrozenLake(ExternalResources())
        with pytest.raises(ValueError, match="expected a reset"):
            await lake.step("up")
        await lake.reset(0)
        for _ in range(8):
            await lake.step("nothing")
        with pytest.raises(ValueError, match="the episode is over"):
            await lake.step("up")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("size", 1), ("size", SIZE_MAX + 1), ("size", 4.0), ("size", True), ("turns", 2), ("turns", "8"),
        ("holes", -0.1), ("holes", 1.5), ("holes", "few"), ("slippery", 2), ("encoding", "picture"),
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidConfig) as caught:
        FrozenLake(ExternalResources(), **{option: value})  # type: ignore[arg-type]
    assert caught.value.field == option
