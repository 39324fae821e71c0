"""The rollout: batches, streams, slots, what goes on beside each other, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.rl.rollout.world import CODEC, FOR_EVER_S, PATH, Judge, Plan, Scripted, Talker, World, run, settings, ticket

from tangram.client.client import Client
from tangram.clock import VirtualLoop
from tangram.errors import InvalidConfig, ManagerError
from tangram.rl.config.rollout_settings import EngineSettings, GroupSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest
from tangram.rl.rollout.rollout import EMPTY_GROUPS_MAX, CollectedBatch, Rollout, tickets
from tangram.rl.trajectories.trajectory import Ending, Group, GroupTicket, Stage, Trajectory

PAIR = GroupSettings(size=2)


def group_of(trajectory: str) -> int:
    return int(trajectory.split("/")[1])


def made(world: World, configured: RolloutSettings, talker: Talker, **options: Any) -> Rollout:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return Rollout(configured, talker, CODEC, on_end=world.ended.append, clock=loop.clock, **options)


def in_rollout(
    plan: Callable[[str, int], Plan] | Plan | None, configured: RolloutSettings, **options: Any
) -> Callable[[Callable[[Rollout, World, Talker], Any]], Any]:
    """Runs what is decorated, at once."""

    def decorate(doing: Callable[[Rollout, World, Talker], Any]) -> Any:
        async def playing() -> Any:
            world, talker = World(plan), Talker()
            rollout = made(world, configured, talker, **options)
            async with rollout:
                result = await doing(rollout, world, talker)
            world.check(rollout)
            assert talker.inside == {}
            return result

        return run(playing())

    return decorate


# ---- tickets ----


def two_tasks(**weights: float) -> RolloutSettings:
    return RolloutSettings(tasks=tuple(TaskSettings(name=name, weight=weight) for name, weight in weights.items()))


def test_tickets_come_by_weight_evenly_mixed_and_always_the_same() -> None:
    configured = two_tasks(a=3.0, b=1.0)
    first = list(itertools.islice(tickets(configured, 7), 400))
    assert first == list(itertools.islice(tickets(configured, 7), 400))
    assert Counter(each.task for each in first) == {"a": 300, "b": 100}
    assert all(Counter(each.task for each in first[at : at + 4])["b"] == 1 for at in range(0, 400, 4))
    assert [each.number for each in first] == list(range(400))
    assert len({each.seed for each in first}) == 400
    assert [each.seed for each in first] != [each.seed for each in itertools.islice(tickets(configured, 8), 400)]


def test_tickets_go_on_where_another_stream_was_left() -> None:
    configured = two_tasks(a=2.0, b=1.0)
    whole = list(itertools.islice(tickets(configured), 20))
    assert list(itertools.islice(tickets(configured, first=13), 7)) == whole[13:]


def test_tickets_of_no_task_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least one task"):
        next(tickets(RolloutSettings()))


# ---- batches ----


def test_collect_keeps_the_first_complete_groups_and_cancels_the_rest() -> None:
    configured = settings(groups=GroupSettings(size=2, groups_extra=2))

    @in_rollout(lambda trajectory, number: Plan(step_s=10.0 - group_of(trajectory)), configured)
    async def collected(rollout: Rollout, world: World, talker: Talker) -> None:
        batch = await rollout.collect(tickets(configured), 3)
        assert [group.id for group in batch.groups] == ["scripted/4", "scripted/3", "scripted/2"]
        assert {group.id for group in batch.left_out} == {"scripted/0", "scripted/1"}
        assert all(group.members == () and "enough other groups" in group.cause for group in batch.left_out)
        assert {each.ending for group in batch.left_out for each in group.all_trajectories()} == {Ending.CANCELLED}
        assert {each.id for each in batch.all_trajectories()} == set(world.endings())
        assert world.open == [] or rollout.statistics().closing > 0
        assert batch.ended_s == pytest.approx(3 * 9.0, abs=1e-3)


def test_collect_plays_another_group_in_place_of_one_that_is_dropped() -> None:
    configured = settings(groups=GroupSettings(size=2, on_loss="drop"), retries=0)

    @in_rollout(lambda trajectory, number: Plan(fail="reset" if group_of(trajectory) == 0 else ""), configured)
    async def collected(rollout: Rollout, world: World, talker: Talker) -> None:
        batch = await rollout.collect(tickets(configured), 2)
        assert {group.id for group in batch.groups} == {"scripted/1", "scripted/2"}
        assert [group.id for group in batch.left_out] == ["scripted/0"]


def test_collect_plays_no_more_at_once_than_its_limit() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def collected(rollout: Rollout, world: World, talker: Talker) -> None:
        batch = await rollout.collect(tickets(configured), 4, in_flight=1)
        assert [group.id for group in batch.groups] == [f"scripted/{n}" for n in range(4)]
        assert len(world.made) == 8
        assert batch.ended_s == pytest.approx(4 * 3.0, abs=1e-3)


def test_collect_ends_with_its_tickets() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def collected(rollout: Rollout, world: World, talker: Talker) -> None:
        batch = await rollout.collect([ticket(0), ticket(1)], 5)
        assert len(batch.groups) == 2


def test_collect_gives_up_when_no_group_comes_out_whole() -> None:
    configured = settings(groups=GroupSettings(size=2, on_loss="drop"), retries=0)

    @in_rollout(Plan(fail="reset"), configured)
    async def collected(rollout: Rollout, world: World, talker: Talker) -> None:
        with pytest.raises(ManagerError, match=rf"{EMPTY_GROUPS_MAX + 1} groups in a row .*connection lost"):
            await rollout.collect(tickets(configured), 2)


# ---- streams ----


def test_a_stream_yields_groups_as_they_end_and_starts_the_next() -> None:
    """Group 0 takes as long as all others together; no group waits for it."""
    configured = settings(groups=PAIR)

    @in_rollout(lambda trajectory, number: Plan(step_s=9.0 if group_of(trajectory) == 0 else 0.0), configured)
    async def streamed(rollout: Rollout, world: World, talker: Talker) -> None:
        loop = asyncio.get_running_loop()
        stream = rollout.stream(itertools.islice(tickets(configured), 10), in_flight=2)
        ends = [(group.id, round(loop.time(), 2)) async for group in stream]
        assert ends == [*((f"scripted/{n}", 3.0 * n) for n in range(1, 10)), ("scripted/0", 30.0)]


def test_a_stream_that_is_left_stops_its_groups() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def streamed(rollout: Rollout, world: World, talker: Talker) -> None:
        stream = rollout.stream(tickets(configured), in_flight=3)
        async for group in stream:
            assert group.is_complete
            break
        await stream.aclose()
        await asyncio.sleep(0.001)
        assert world.open == [] and talker.inside == {}
        assert Counter(world.endings().values())[Ending.FINISHED] >= 2


def test_groups_that_are_not_taken_hold_up_the_stream() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def streamed(rollout: Rollout, world: World, talker: Talker) -> None:
        stream = rollout.stream(tickets(configured), in_flight=2)
        first = await anext(aiter(stream))
        assert first.is_complete
        await asyncio.sleep(100.0)
        assert len(world.ended) == 2 * (1 + 4)
        await stream.aclose()


def test_an_exception_of_an_engine_reaches_the_consumer_of_groups() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def streamed(rollout: Rollout, world: World, talker: Talker) -> None:
        asyncio.get_running_loop().call_later(4.5, talker.die)
        taken: list[Group] = []

        async def take() -> None:
            async for group in rollout.stream(tickets(configured), in_flight=2):
                taken.append(group)

        with pytest.raises(ManagerError, match="no engine is left"):
            await take()
        assert [group.is_complete for group in taken] == [True, True]
        cancelled = [each for each in world.ended if each.ending is Ending.CANCELLED]
        assert len(cancelled) == 4 and all("no engine is left" in each.cause for each in cancelled)
        with pytest.raises(ManagerError, match="no engine is left"):
            await rollout.collect(tickets(configured), 1)


# ---- beside each other ----


def test_slots_of_a_task_bound_its_open_episodes() -> None:
    configured = settings(groups=GroupSettings(size=6), concurrency=2)

    @in_rollout(Plan(turns=1), configured)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        playing = asyncio.ensure_future(rollout.play(ticket()))
        await asyncio.sleep(0.5)
        assert len(world.open) == 2
        statistics = rollout.statistics().tasks["scripted"]
        assert statistics.playing == {"generate": 2, "queue": 4}
        group = await playing
        waits = sorted(round(each.spans[0].waiting_s, 3) for each in group.members)
        assert waits == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert {each.spans[0].waited_for for each in group.members if each.spans[0].waiting_s > 0.5} == {
            "concurrency of scripted"
        }
        assert rollout.statistics().tasks["scripted"].ended == {"finished": 6}


def test_a_reset_may_begin_ahead_of_its_turn() -> None:
    """Two slots, resets of a second, one turn of a second: with two ahead, resets after the first are hidden."""
    ends = {}
    for ahead in (0, 2):
        configured = settings(groups=GroupSettings(size=6), concurrency=2, reset_ahead=ahead)

        @in_rollout(Plan(turns=1, reset_s=1.0), configured)
        async def played(rollout: Rollout, world: World, talker: Talker, ahead: int = ahead) -> None:
            group = await rollout.play(ticket())
            ends[ahead] = max(each.ended_s for each in group.members)

    assert ends == {0: pytest.approx(6.0, abs=1e-2), 2: pytest.approx(4.0, abs=1e-2)}


def test_rewards_do_not_hold_the_slots() -> None:
    configured = settings(groups=GroupSettings(size=4), concurrency=1)

    @in_rollout(Plan(turns=1), configured, rewards={"scripted": Judge(50.0)})
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        group = await rollout.play(ticket())
        spans = sorted(span.began_s for each in group.members for span in each.spans if span.stage is Stage.REWARD)
        assert spans == [pytest.approx(n, abs=1e-2) for n in (1.0, 2.0, 3.0, 4.0)]


def test_an_environment_is_open_until_its_reward_is_there() -> None:
    configured = settings()

    @in_rollout(Plan(turns=1), configured, rewards={"scripted": Judge(5.0)})
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        playing = asyncio.ensure_future(rollout.play(ticket()))
        await asyncio.sleep(4.0)
        assert len(world.open) == 1
        await playing
        await asyncio.sleep(0.001)
        assert world.open == []


def test_a_slow_environment_blocks_no_episode_except_under_a_barrier() -> None:
    """Member 0 takes 10 s for each step, the others none; a turn is written in 1 s."""
    ends = {}
    for barrier in (False, True):
        configured = settings(groups=GroupSettings(size=3))

        @in_rollout(lambda trajectory, number: Plan(step_s=10.0 * ("/0.0" in trajectory)), configured, barrier=barrier)
        async def played(rollout: Rollout, world: World, talker: Talker, barrier: bool = barrier) -> None:
            await rollout.play(ticket())
            ends[barrier] = sorted(played_until(each) for each in world.ended)

    assert ends == {False: [3.0, 3.0, 33.0], True: [23.0, 23.0, 33.0]}


def played_until(record: Trajectory) -> float:
    """The end of its last step."""
    return round(max(span.ended_s for span in record.spans if span.stage is Stage.STEP), 2)


def test_under_a_barrier_rewards_are_computed_when_all_have_been_played() -> None:
    configured = settings(groups=GroupSettings(size=3))

    @in_rollout(lambda trajectory, number: Plan(step_s=10.0 * ("/0.0" in trajectory)), configured, barrier=True)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        group = await rollout.play(ticket())
        assert {round(each.ended_s, 2) for each in world.ended} == {33.0}
        rewards = [span for each in group.members for span in each.spans if span.stage is Stage.REWARD]
        assert {round(span.waiting_s, 2): span.waited_for for span in rewards}[10.0] == "the slowest episode"


def test_a_barrier_waits_for_restarted_episodes_and_not_for_ended_ones() -> None:
    configured = settings(groups=GroupSettings(size=3), backoff_s=0.0, step_timeout_s=5.0)

    def plan(trajectory: str, number: int) -> Plan:
        if "/0.0" in trajectory:
            return Plan(turns=1)
        return Plan(turns=2, hang="step" if "/1.0" in trajectory and number == 0 else "")

    @in_rollout(plan, configured, barrier=True)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        group = await rollout.play(ticket())
        assert group.is_complete
        assert {each.member: played_until(each) for each in world.ended} == {0: 1.0, 2: 7.0, 1: 8.0}
        waited = [span for each in group.members for span in each.spans if span.waiting_s > 4.0]
        assert {span.waited_for for span in waited} >= {"the slowest environment"}


def test_an_observer_is_notified_of_every_stage() -> None:
    lines: list[str] = []

    class Watcher:
        def on_begin(self, trajectory: str, task: str) -> None:
            lines.append(f"began {trajectory} of {task}")

        def on_stage(self, trajectory: str, stage: Stage) -> None:
            lines.append(str(stage))

        def on_end(self, trajectory: Trajectory) -> None:
            lines.append(f"{trajectory.ending}")

        def on_group(self, group: Group) -> None:
            lines.append(f"group of {len(group.members)}")

    @in_rollout(Plan(turns=1), settings(), observer=Watcher())
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        await rollout.play(ticket())

    began, *stages = lines
    assert began == "began scripted/0/0.0 of scripted"
    assert [stage for stage, _ in itertools.groupby(stages)] == [
        "reset", "generate", "step", "reward", "finished", "group of 1",
    ]  # fmt: skip


# ---- what tasks share ----


class Prepared(Scripted):
    entered: list[str] = []  # noqa: RUF012 - shared on purpose

    @classmethod
    @asynccontextmanager
    async def prepare(cls, client: Client | None) -> AsyncIterator[None]:
        cls.entered.append("in")
        try:
            yield
        finally:
            cls.entered.append("out")


def test_what_the_episodes_of_a_task_share_is_prepared_once() -> None:
    path = "tests.rl.rollout.test_rollout:Prepared"
    configured = RolloutSettings(
        groups=PAIR, tasks=tuple(TaskSettings(name=name, environment=path) for name in ("one", "two"))
    )

    @in_rollout(None, configured)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        entered = _prepared()
        assert entered == ["in"]
        batch = await rollout.collect(tickets(configured), 2)
        assert {group.task for group in batch.groups} == {"one", "two"}
        assert entered == ["in"]

    assert _prepared() == ["in", "out"]


def _prepared() -> list[str]:
    """Of the module as the rollout imports it."""
    import importlib

    entered: list[str] = importlib.import_module("tests.rl.rollout.test_rollout").Prepared.entered
    return entered


def test_a_task_that_is_not_there_is_named_before_anything_is_played() -> None:
    async def entering() -> None:
        async with Rollout(RolloutSettings(tasks=(TaskSettings(name="frozenlak"),)), Talker(), CODEC):
            pass

    with pytest.raises(InvalidConfig, match="did you mean frozenlake"):
        run(entering())


def test_tickets_that_cannot_be_played_are_refused() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        with pytest.raises(InvalidConfig, match="one that the settings name: scripted"):
            await rollout.play(GroupTicket(task="other", number=0, seed=0))
        first = asyncio.ensure_future(rollout.play(ticket()))
        await asyncio.sleep(0.5)
        with pytest.raises(InvalidConfig, match="is being played"):
            await rollout.play(ticket())
        assert (await first).is_complete


def test_the_same_tickets_twice_at_once_are_refused_to_the_second_alone() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        both = await asyncio.gather(
            rollout.collect(tickets(configured), 2), rollout.collect(tickets(configured), 2), return_exceptions=True
        )
        assert isinstance(both[0], CollectedBatch) and len(both[0].groups) == 2
        assert isinstance(both[1], InvalidConfig) and "scripted/0" in str(both[1])
        world.ended.clear()
        again = await rollout.collect(tickets(configured), 2)
        assert [group.is_complete for group in again.groups] == [True, True]


def test_only_the_endings_of_what_is_stopped_can_be_given_to_abort() -> None:
    @in_rollout(None, settings(groups=PAIR))
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        with pytest.raises(InvalidConfig, match="one of stale, cancelled"):
            rollout.abort(lambda episode: True, Ending.FINISHED)


class Sized(Scripted):
    def __init__(self, resources: ExternalResources, size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"size {size} is too small")
        super().__init__(resources)


@pytest.mark.parametrize(
    ("options", "expected"), [({"nonsense": 1}, "'nonsense'"), ({"size": 0}, "size 0 is too small")]
)
def test_a_wrong_option_is_named_with_its_task_before_anything_is_played(
    options: dict[str, Any], expected: str
) -> None:
    path = f"{__name__}:Sized"

    async def entering() -> None:
        world = World()
        tasks = (
            TaskSettings(name="right", environment=path, options={"size": 3}),
            TaskSettings(name="wrong", environment=path, options=options),
        )
        with pytest.raises(InvalidConfig, match=f"options of task wrong.*{expected}"):
            async with Rollout(RolloutSettings(tasks=tasks), Talker(), CODEC):
                raise AssertionError("it is not entered")
        assert world.made == {}
        world.check()

    run(entering())


def test_what_else_a_first_environment_raises_is_left_to_be_tried_again() -> None:
    """A place that is lacking now may be there when it is played."""
    configured = RolloutSettings(
        groups=GroupSettings(size=1, size_min=1), tasks=(TaskSettings(name="late", environment=f"{__name__}:Late"),)
    )

    @in_rollout(None, configured)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        assert (await rollout.play(GroupTicket(task="late", number=0, seed=0))).is_complete


class Late(Scripted):
    def __init__(self, resources: ExternalResources) -> None:
        if resources.trajectory.endswith("/options"):
            raise OSError("not yet")
        super().__init__(resources)


def test_failed_groups_are_left_out_with_their_cause_and_replaced() -> None:
    configured = RolloutSettings(
        groups=GroupSettings(size=1, size_min=1, on_loss="drop"),
        tasks=tuple(TaskSettings(name=name, environment=PATH, retries=0) for name in ("bad", "good")),
    )
    groups: list[Group] = []

    class Watcher:
        def on_begin(self, trajectory: str, task: str) -> None: ...

        def on_stage(self, trajectory: str, stage: Stage) -> None: ...

        def on_end(self, trajectory: Trajectory) -> None: ...

        def on_group(self, group: Group) -> None:
            groups.append(group)

    @in_rollout(
        lambda trajectory, number: Plan(fail="step" if trajectory.startswith("bad") else ""),
        configured,
        observer=Watcher(),
    )
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        batch = await rollout.collect(tickets(configured), 2)
        assert {group.task for group in batch.groups} == {"good"}
        lost = [group for group in batch.left_out if "connection lost" in group.cause]
        assert lost and {group.task for group in lost} == {"bad"}
        assert all(each.ending is Ending.ENV_FAILED for group in lost for each in group.all_trajectories())
        assert {group.id for group in groups} == {group.id for group in (*batch.groups, *batch.left_out)}


# ---- generators that answer what cannot be ----


class Wrong(Talker):
    """Answers as configured."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self._fields = fields

    async def generate(self, request: GenerationRequest) -> Generation:
        return msgspec.structs.replace(await super().generate(request), **self._fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": (-1.0,)}, "expected logprobs for each of its 2 tokens, got 1"),
        ({"versions": (0, 0, 0)}, "expected versions for each of its 2 tokens, got 3"),
        ({"kept": ((1,),)}, "expected kept for each of its 2 tokens, got 1"),
        ({"tokens": (99, 1)}, "token 99 is none of the 6"),
        ({"tokens": (-1, 1)}, "token -1 is none of the 6"),
    ],
)
def test_what_a_generator_gives_that_is_no_turn_stops_the_rollout_as_its_fault(
    fields: dict[str, Any], expected: str
) -> None:
    async def playing() -> None:
        world, talker = World(), Wrong(**fields)
        rollout = made(world, settings(groups=PAIR), talker)
        async with rollout:
            with pytest.raises(ManagerError, match=rf"scripted/0/\d\.0/1: .*{expected}"):
                await rollout.play(ticket())
        world.check(rollout)
        assert {each.ending for each in world.ended} == {Ending.CANCELLED}

    run(playing())


# ---- how it ends ----


def test_episodes_of_a_cancelled_caller_end_as_interrupted() -> None:
    configured = settings(groups=PAIR)

    @in_rollout(None, configured)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        async def stream() -> None:
            async for _ in rollout.stream(tickets(configured, first=10), in_flight=1):
                pass

        waiting = [asyncio.create_task(rollout.collect(tickets(configured), 2)), asyncio.create_task(stream())]
        await asyncio.sleep(0.5)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await asyncio.sleep(0.001)
        assert len(world.ended) == 6
        assert {each.cause for each in world.ended} == {"the rollout was interrupted"}


def test_a_rollout_that_is_left_ends_all_that_it_began() -> None:
    configured = settings(groups=PAIR)

    async def playing() -> World:
        world, talker = World(Plan(step_s=FOR_EVER_S)), Talker()
        rollout = made(world, configured, talker)
        async with rollout, asyncio.TaskGroup() as others:
            others.create_task(_refused(rollout))
            await asyncio.sleep(5.0)
            raise KeyError("of the caller")
        return world

    async def _refused(rollout: Rollout) -> None:
        with pytest.raises(asyncio.CancelledError):
            await rollout.play(ticket())
        raise asyncio.CancelledError

    with pytest.raises(BaseExceptionGroup):
        run(playing())
    assert World.current is not None
    assert World.current.open == []
    assert Counter(World.current.endings().values()) == {Ending.CANCELLED: 2}


def test_an_error_of_the_body_passes_as_it_is() -> None:
    async def playing() -> None:
        world = World(Plan(step_s=FOR_EVER_S))
        rollout = made(world, settings(groups=PAIR), Talker())
        try:
            async with rollout:
                stream = rollout.stream(tickets(rollout.settings), in_flight=2)
                asyncio.get_running_loop().call_later(1.5, _stop, stream)
                async for _ in stream:
                    raise KeyError("mine")
        finally:
            world.check(rollout)
            assert Counter(world.endings().values()) == {Ending.CANCELLED: 4}

    caller: list[asyncio.Task[Any]] = []

    def _stop(stream: object) -> None:
        caller[0].cancel()

    async def outer() -> None:
        task = asyncio.current_task()
        assert task is not None
        caller.append(task)
        await playing()

    with pytest.raises(asyncio.CancelledError):
        run(outer())


def test_an_unclosed_stream_ends_with_the_rollout() -> None:
    async def playing() -> None:
        world, talker = World(), Talker()
        rollout = made(world, settings(groups=PAIR), talker)
        stream = rollout.stream(tickets(rollout.settings), in_flight=2)
        try:
            async with rollout:
                assert (await anext(stream)).is_complete
                raise KeyError("mine")
        finally:
            world.check(rollout)
            assert talker.inside == {}
            cancelled = [each for each in world.ended if each.ending is Ending.CANCELLED]
            assert cancelled and all(each.cause == "the rollout was stopped" for each in cancelled)
            await stream.aclose()

    with pytest.raises(KeyError, match="mine"):
        run(playing())


def test_a_rollout_is_used_inside_its_with() -> None:
    async def playing() -> None:
        rollout = Rollout(settings(), Talker(), CODEC)
        with pytest.raises(ManagerError, match="not open"):
            await rollout.play(ticket())

    run(playing())


def test_the_smallest_context_of_the_engines_bounds_a_trajectory() -> None:
    configured = RolloutSettings(
        engines=(EngineSettings(name="a", context_max=64), EngineSettings(name="b", context_max=5)),
        groups=GroupSettings(size=1, size_min=1),
        tasks=(TaskSettings(name="scripted", environment=PATH),),
    )

    @in_rollout(Plan(turns=5), configured)
    async def played(rollout: Rollout, world: World, talker: Talker) -> None:
        group = await rollout.play(ticket())
        assert group.members[0].ending is Ending.TRUNCATED
