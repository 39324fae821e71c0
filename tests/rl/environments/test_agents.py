"""Playing without a model: what is recorded, and that every environment is closed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, ClassVar

import pytest

from tangram.errors import InvalidConfig
from tangram.rl.environments.agents import (
    DEMONSTRATIONS_CONCURRENT_MAX,
    OutOfActions,
    ProtocolViolation,
    RandomAgent,
    ScriptedAgent,
    demonstrations,
    play,
)
from tangram.rl.environments.protocol import ExternalResources, Step


class Room:
    """Pays 0.25 for each `in`, is over with `out`, and remembers what was done with it."""

    words: ClassVar = ("in", "out", "here")
    turns_max: ClassVar = 4
    tokens_max: ClassVar = 2
    agents: ClassVar[dict[str, Any]] = {"random": lambda chance: RandomAgent(("in", "out"), chance)}
    made: ClassVar[list[Room]] = []

    def __init__(self, resources: ExternalResources, *, fails: str = "", answer: object = None) -> None:
        self.resources, self.fails, self.answer = resources, fails, answer
        self.closed = 0
        self.waits = asyncio.Event()
        Room.made.append(self)

    async def reset(self, seed: int) -> str:
        await self._maybe("reset")
        return f"here {seed}"

    async def step(self, action: str) -> Step:
        await self._maybe("step")
        if self.answer is not None:
            return self.answer  # type: ignore[return-value]
        metrics = {"moves": 1.0} if action == "in" else {"out": 1.0}
        return Step(observation="here", reward=0.25 * (action == "in"), done=action == "out", metrics=metrics)

    async def close(self) -> None:
        self.closed += 1

    async def _maybe(self, call: str) -> None:
        if self.fails == call:
            raise OSError("the floor is gone")
        if self.fails == f"{call} hangs":
            self.waits.set()
            await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _own_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "made", [])


def test_an_episode_contains_the_whole_conversation() -> None:
    episode = asyncio.run(play(Room, ScriptedAgent(["in", "in", "out"]), 7))
    assert episode.observations == ("here 7", "here", "here", "here")
    assert episode.actions == ("in", "in", "out")
    assert [step.reward for step in episode.steps] == [0.25, 0.25, 0.0]
    assert (episode.reward, episode.done, episode.truncated) == (0.5, True, False)
    assert episode.metrics == {"moves": 1.0, "out": 1.0}
    assert (episode.seed, episode.agent) == (7, "ScriptedAgent") and episode.task.endswith(":Room")
    assert Room.made[0].closed == 1


@pytest.mark.parametrize(("turns_max", "played"), [(None, 4), (2, 2), (6, 6)])
def test_the_turn_limit_is_that_of_the_task_unless_given(turns_max: int | None, played: int) -> None:
    episode = asyncio.run(play(Room, ScriptedAgent(["in"] * 9), 0, turns_max=turns_max))
    assert len(episode.actions) == played
    assert episode.truncated and not episode.done


def test_the_turns_of_an_environment_go_before_those_of_its_task() -> None:
    class Factory:
        words, turns_max, tokens_max, agents = Room.words, 2, 2, Room.agents

        def __call__(self, resources: ExternalResources, **options: Any) -> Any:
            return Bare(Room(resources))

    class Bare:
        def __init__(self, room: Room) -> None:
            self.reset, self.step, self.close = room.reset, room.step, room.close

    class Long(Room):
        def __init__(self, resources: ExternalResources) -> None:
            super().__init__(resources)
            self.turns_max = 7  # type: ignore[misc]

    def turns(task: Any) -> int:
        return len(asyncio.run(play(task, ScriptedAgent(["in"] * 9), 0)).actions)

    assert turns(Factory()) == 2
    assert turns(Long) == 7


def test_a_script_that_ends_too_soon_truncates_its_episode() -> None:
    episode = asyncio.run(play(Room, ScriptedAgent(["in"]), 0))
    assert episode.truncated and episode.actions == ("in",)
    nothing = asyncio.run(play(Room, ScriptedAgent([]), 0))
    assert nothing.truncated and not nothing.done and nothing.reward == 0.0
    with pytest.raises(OutOfActions):
        ScriptedAgent([]).act("here")


def test_an_environment_is_played_as_it_is() -> None:
    async def test() -> None:
        room = Room(ExternalResources())
        assert (await play(room, ScriptedAgent(["out"]), 1)).done
        assert room.closed == 1 and Room.made == [room]

    asyncio.run(test())


def test_a_task_is_played_by_its_name_and_with_its_options() -> None:
    episode = asyncio.run(play("chain", "expert", 3, options={"length": 2}))
    assert episode.done and episode.reward == 1.0 and episode.agent == "expert"


def test_the_same_seed_and_agent_play_the_same_episode() -> None:
    def actions(seed: int) -> tuple[str, ...]:
        return asyncio.run(play(Room, "random", seed)).actions

    assert [actions(seed) for seed in range(20)] == [actions(seed) for seed in range(20)]
    assert len({actions(seed) for seed in range(20)}) > 1


def test_an_agent_that_a_task_does_not_have_is_named_with_those_it_has() -> None:
    with pytest.raises(InvalidConfig, match=r"there are: random.*got 'wizard'"):
        asyncio.run(play(Room, "wizard", 0))
    assert Room.made == [], "nothing was made that would have to be closed"


@pytest.mark.parametrize("call", ["reset", "step"])
def test_what_an_environment_raises_is_raised_with_where_and_it_is_closed(call: str) -> None:
    with pytest.raises(OSError, match="the floor is gone") as caught:
        asyncio.run(play(Room, ScriptedAgent(["in"]), 5, options={"fails": call}))
    assert caught.value.__notes__ == [{"reset": "in reset(5)", "step": "in step('in')"}[call]]
    assert Room.made[0].closed == 1


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_call_that_hangs_is_given_up_and_the_environment_closed(call: str) -> None:
    with pytest.raises(TimeoutError, match=rf"{call}\(.*: expected an answer within 0.01 s, got none"):
        asyncio.run(play(Room, ScriptedAgent(["in"]), 0, timeout_s=0.01, options={"fails": f"{call} hangs"}))
    assert Room.made[0].closed == 1


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_play_that_is_cancelled_closes_its_environment(call: str) -> None:
    async def test() -> None:
        room = Room(ExternalResources(), fails=f"{call} hangs")
        playing = asyncio.create_task(play(room, ScriptedAgent(["in"]), 0))
        await room.waits.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert room.closed == 1

    asyncio.run(test())


def test_an_agent_that_raises_closes_the_environment() -> None:
    class Confused:
        def act(self, observation: str) -> str:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(play(Room, Confused(), 0))
    assert Room.made[0].closed == 1


@pytest.mark.parametrize(
    "answer",
    [
        ("here", 0.0, True, {}),
        Step(observation=None),  # type: ignore[arg-type]
        Step(observation="", reward="1"),  # type: ignore[arg-type]
        Step(observation="", done=1),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_action_is_reported_as_invalid(answer: object) -> None:
    with pytest.raises(ProtocolViolation, match=r"step\('in'\): expected a Step"):
        asyncio.run(play(Room, ScriptedAgent(["in"]), 0, options={"answer": answer}))
    assert Room.made[0].closed == 1


def test_an_agent_that_wants_to_see_is_shown_the_environment_after_reset() -> None:
    class Spy:
        seen: object = None

        def see(self, environment: object) -> None:
            self.seen = environment

        def act(self, observation: str) -> str:
            assert self.seen is Room.made[0]
            return "out"

    assert asyncio.run(play(Room, Spy(), 0)).done


def test_demonstrations_come_in_the_order_of_their_seeds_each_as_its_own_trajectory() -> None:
    seeds = list(range(2 * DEMONSTRATIONS_CONCURRENT_MAX, 0, -1))
    episodes = asyncio.run(demonstrations(Room, "random", seeds, resources=ExternalResources(trajectory="warm")))
    assert [episode.seed for episode in episodes] == seeds
    assert [episode.actions for episode in episodes] == [asyncio.run(play(Room, "random", x)).actions for x in seeds]
    assert len({room.resources.trajectory for room in Room.made[: len(seeds)]}) == len(seeds)


class Hall(Room):
    """Rooms that need the light on."""

    lights: ClassVar[list[str]] = []

    @classmethod
    @asynccontextmanager
    async def prepare(cls, client: object) -> AsyncIterator[None]:
        cls.lights.append("on")
        try:
            yield
        finally:
            cls.lights.append("off")

    async def reset(self, seed: int) -> str:
        assert self.lights == ["on"]
        return await super().reset(seed)


@pytest.mark.parametrize("fails", ["", "step"])
def test_shared_setup_exists_once_around_all_episodes(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for playing in (
        lambda: play(Hall, "random", 0, options={"fails": fails}),
        lambda: demonstrations(Hall, "random", range(5), options={"fails": fails}),
    ):
        monkeypatch.setattr(Hall, "lights", [])
        with pytest.raises(OSError, match="floor") if fails else nullcontext():
            asyncio.run(playing())
        assert Hall.lights == ["on", "off"]


def test_demonstrations_that_fail_report_why_and_close_all() -> None:
    with pytest.raises(OSError, match="the floor is gone"):
        asyncio.run(demonstrations(Room, "random", range(5), options={"fails": "step"}))
    assert Room.made and all(room.closed == 1 for room in Room.made)


def test_a_random_agent_produces_the_given_number_of_words_and_all_choices() -> None:
    agent = RandomAgent(("a", "b"), random.Random(0), words=3)
    actions = [agent.act("whatever") for _ in range(50)]
    assert all(len(text.split()) == 3 for text in actions)
    assert {word for text in actions for word in text.split()} == {"a", "b"}
