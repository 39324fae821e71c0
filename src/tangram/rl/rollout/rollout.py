"""The rollout: groups of episodes, each at its own pace, none waiting for another.

    upcoming = tickets(settings)    # once: whoever makes them anew plays the same groups again
    async with Rollout(settings, gateway, codec, client) as rollout:
        batch = await rollout.collect(upcoming, groups=16)     # a batch, then a training step, then the next batch
        async for group in rollout.stream(upcoming, in_flight=24): ...    # or without any barrier

Owns every episode that is in play, the slots of each task and what the tasks share. A bad episode is a record, not a
crash. What stops a rollout is a generator that cannot go on: then every episode ends as cancelled, with that cause, and
whoever waits for a group gets the error. Promises that nothing is left of it outside `async with`: no request, no
environment, no task but of an environment that does not listen; such a one is counted and told.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec

from tangram.client.client import Client
from tangram.clock import Clock, WallClock
from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.config.rollout_settings import RolloutSettings, TaskSettings
from tangram.rl.environments.calls import LEAVES
from tangram.rl.environments.protocol import Outside, Task
from tangram.rl.environments.registry import path_of, resolve
from tangram.rl.environments.shared_setup import prepared
from tangram.rl.inference.engines.protocol import Sampling
from tangram.rl.rollout.codec import Codec
from tangram.rl.rollout.contexts import Arena, Generates, House, Slots
from tangram.rl.rollout.environment_closer import Closings
from tangram.rl.rollout.episode import WAITING, Episode
from tangram.rl.rollout.group_runner import Band
from tangram.rl.rollout.in_flight_groups import Flight
from tangram.rl.rollout.records import STOPPED, Ending, Group, Stage, Ticket, Trajectory
from tangram.rl.rollout.rewards import Reward, make_reward, missing_for, settings_for
from tangram.rl.rollout.turn_barrier import TurnBarrier

STOPPED_CAUSE, INTERRUPTED_CAUSE = "the rollout was stopped", "the rollout was interrupted"
"""Of what ends with the rollout, and of what ends because whoever waited for it was cancelled, as by Ctrl-C."""
BARREN_MAX = 16
"""Groups of a task that may end without members one after another, or twice as many as are played at once: what goes
wrong then goes wrong always. Those that we stopped, or that lost members by their age, do not count."""
HOPELESS_MAX = 2
"""The same of groups all of whose members failed before their first turn for a reason that stays, such as an
observation for which there is no room: these are no bad luck."""


class Watches(Protocol):
    """Is told what happens, as a progress bar is."""

    def began(self, trajectory: str, task: str) -> None: ...

    def stage(self, trajectory: str, stage: Stage) -> None: ...

    def ended(self, trajectory: Trajectory) -> None: ...

    def group(self, group: Group) -> None: ...


class _Suspect(NamedTuple):
    """An episode that may be writing by weights that are no more."""

    turns: int
    """That it had when they were lost."""
    version_max: int
    cause: str


class TaskStatistics(msgspec.Struct, frozen=True, kw_only=True):
    playing: dict[str, int]
    """Episodes in each stage; those without a place are `waiting`."""
    ended: dict[str, int]
    """Episodes by ending."""


class RolloutStatistics(msgspec.Struct, frozen=True, kw_only=True):
    tasks: dict[str, TaskStatistics]
    closing: int
    """Environments that are being closed."""
    close_failed: int
    """Environments that could not be closed."""
    stuck: int = 0
    """Calls of environments that did not end when they were cancelled, and were left behind."""


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of groups."""

    groups: tuple[Group, ...]
    """Those to be trained on, in the order in which they ended."""
    left_out: tuple[Group, ...] = ()
    """Those that were dropped, or came too late."""
    began_s: float = 0.0
    ended_s: float = 0.0

    def all(self) -> Iterator[Trajectory]:
        for group in (*self.groups, *self.left_out):
            yield from group.all()


def tickets(settings: RolloutSettings, seed: int | None = None, first: int = 0) -> Iterator[Ticket]:
    """Groups without end: of each task as many as its weight says, evenly mixed; the same for the same seed. `first`:
    the number of the first, to go on where another stream was left."""
    if not settings.tasks:
        raise InvalidConfig("tasks", settings.tasks, "at least one task to be played")
    seed = settings.seed if seed is None else seed
    total = sum(task.weight for task in settings.tasks)
    owed = {task.name: 0.0 for task in settings.tasks}
    for number in count():
        for task in settings.tasks:
            owed[task.name] += task.weight / total
        name = max(owed, key=lambda each: owed[each])
        owed[name] -= 1.0
        if number >= first:
            yield Ticket(task=name, number=number, seed=random.Random(f"{seed}/{name}/{number}").getrandbits(31))


class Rollout:
    """Use it as `async with`, in one event loop."""

    def __init__(
        self,
        settings: RolloutSettings,
        generator: Generates,
        codec: Codec,
        client: Client | None = None,
        *,
        fresh: Callable[[Episode], bool] | None = None,
        on_end: Callable[[Trajectory], None] | None = None,
        watch: Watches | None = None,
        clock: Clock | None = None,
        began: float | None = None,
        rewards: Mapping[str, Reward] | None = None,
        barrier: bool = False,
    ) -> None:
        """`fresh`: whether what was begun so is still wanted, asked before each turn and after each generation.
        `on_end`: told every trajectory that ends, once. `watch`: told of that and of all else that happens. `began`: by
        the clock, from when all times are counted; from now, if it is not said.
        `rewards`: of tasks, in place of those of their settings. `barrier`: all episodes wait for each other at each
        turn, as a rollout in batches of turns does."""
        self.settings = settings
        self._client = client
        self._on_end = on_end
        self._watch = watch
        self._rewards = rewards or {}
        clock = clock or WallClock()
        self._house = House(
            generator=generator,
            codec=codec,
            context_max=min(engine.context_max for engine in settings.engines),
            clock=clock,
            began=clock.now() if began is None else began,
            closings=Closings(),
            barrier=TurnBarrier() if barrier else None,
            fresh=self._wanted,
            moved=self._moved,
            ended=self._ended,
        )
        self._arena_by_task: dict[str, Arena] = {}
        self._playing: dict[str, Episode] = {}
        self._bands: dict[str, Band] = {}
        """By group: those that have begun and not ended."""
        self._fresh = fresh
        self._version_min = 0
        self._version_min_cause = ""
        self._suspects: dict[str, _Suspect] = {}
        self._barren: dict[str, int] = {}
        """By task: groups in a row that ended without members, and of these, the last that were hopeless:"""
        self._hopeless: dict[str, int] = {}
        self._flights: set[Flight] = set()
        self._counts: dict[str, dict[str, int]] = {}
        self._endings: dict[str, dict[str, int]] = {}
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._broken: Exception | None = None

    # ---- its life ----

    async def __aenter__(self) -> Self:
        tasks = [resolve(settings.environment or settings.name) for settings in self.settings.tasks]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(prepared(tasks, self._client))
            stack.push_async_callback(self._house.closings.drain)
            for settings, task in zip(self.settings.tasks, tasks, strict=True):
                self._arena_by_task[settings.name] = self._arena(settings, task)
            self._stack = stack.pop_all()
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        self._stop(STOPPED_CAUSE)
        try:
            await tasks.__aexit__(None, None, None)
        finally:
            await self._stack.__aexit__(kind, error, trace)

    def _arena(self, settings: TaskSettings, task: Task) -> Arena:
        if settings.name in self._arena_by_task:
            raise InvalidConfig("tasks", settings.name, "a name for each task of its own")
        drawn = self.settings.sampling
        outside = Outside(client=self._client, run=self.settings.run)
        reward = self._rewards.get(settings.name) or self._reward(settings, task)
        self._try_environment(settings, task, outside, reward)
        self._counts[settings.name] = {}
        self._endings[settings.name] = {}
        return Arena(
            settings=settings,
            make=task,
            outside=outside,
            sampling=Sampling(
                temperature=drawn.temperature,
                stop=self._house.codec.stop,
                top_k=drawn.top_k,
                top_p=drawn.top_p,
                keep_ids=drawn.keep_ids,
            ),
            reward=reward,
            # Whoever is ahead under a barrier would wait for a place, and those who have it for him.
            slots=Slots(settings.concurrency, 0 if self._house.barrier is not None else settings.reset_ahead),
        )

    def _reward(self, settings: TaskSettings, task: Task) -> Reward:
        """Raises InvalidConfig."""
        try:
            return make_reward(settings_for(task, settings.reward), self._client)
        except InvalidConfig as error:
            raise InvalidConfig(f"tasks.{settings.name}.{error.field}", error.value, error.expected) from error

    def _try_environment(self, settings: TaskSettings, task: Task, outside: Outside, reward: Reward) -> None:
        """Makes an environment, as what is wrong with its options, with what its reward needs of it or with the room
        for its actions is wrong each time. Raises InvalidConfig. What else it raises may be over when it is played."""
        own = f"{settings.name}/options"
        try:
            environment = task(msgspec.structs.replace(outside, trajectory=own), **settings.options)
        except (TypeError, ValueError, InvalidInput) as error:
            expected = f"options that {path_of(task)} can be made with ({error})"
            raise InvalidConfig(f"options of task {settings.name}", settings.options, expected) from error
        except (Exception, *LEAVES):
            return
        self._house.closings.close(environment, own)
        missing = missing_for(reward, environment)
        if missing:
            kind = settings_for(task, settings.reward).kind
            expected = f"a kind that {path_of(task)} can be rewarded by: {missing}"
            raise InvalidConfig(f"tasks.{settings.name}.reward.kind", kind, expected)
        tokens_max: int = settings.tokens_max or getattr(environment, "tokens_max", None) or task.tokens_max
        if tokens_max >= self._house.context_max:
            expected = (
                f"more than tokens_max of task {settings.name}, which is {tokens_max}: an action has to fit, and what "
                "is read before it"
            )
            raise InvalidConfig("engines.context_max", self._house.context_max, expected)

    # ---- playing ----

    async def play(self, ticket: Ticket) -> Group:
        """One group. Raises what a generator raised."""
        async with self._flight((ticket,)) as flight:
            flight.begin()
            group = await flight.take()
            assert group is not None
            return group

    async def collect(
        self, tickets: Iterable[Ticket], groups: int, *, in_flight: int | None = None, extra: int | None = None
    ) -> Collected:
        """The first `groups` groups that end with members. `extra` (`groups_extra` of the settings, if it is not said)
        are played besides, and what is not needed in the end is stopped. `in_flight`: at most so many at once. Fewer
        come back if there are no more tickets. Raises what a generator raised, and ManagerError if too many groups of a
        task end without members."""
        began_s = self._now()
        wanted = groups + (self.settings.groups.groups_extra if extra is None else extra)
        kept: list[Group] = []
        left_out: list[Group] = []
        async with self._flight(tickets) as flight:
            more = True
            while len(kept) < groups:
                at_once = min(wanted - len(kept), in_flight or wanted)
                while more and flight.playing + flight.ready < at_once:
                    more = flight.begin()
                group = await flight.take()
                if group is None:
                    break
                (kept if group.members else left_out).append(group)
                self.require_fruit(group, max(BARREN_MAX, 2 * groups))
            flight.stop(Ending.CANCELLED, "enough other groups ended before it")
            left_out += await flight.land()
        return Collected(groups=tuple(kept), left_out=tuple(left_out), began_s=began_s, ended_s=self._now())

    async def stream(
        self, tickets: Iterable[Ticket], in_flight: int, *, ready_max: int | None = None
    ) -> AsyncGenerator[Group, None]:
        """Groups as they end, those without members too. When one ends another begins, as long as no more than
        `ready_max` (`in_flight`, if it is not said) wait to be taken. Raises what a generator raised, and ManagerError
        if too many groups of a task end without members."""
        flight = self._begin_flight(tickets)
        limit = in_flight + (in_flight if ready_max is None else ready_max)
        try:
            more = True

            def begin() -> None:
                nonlocal more
                while more and flight.playing < in_flight and flight.playing + flight.ready < limit:
                    more = flight.begin()

            flight.on_end = begin
            while True:
                begin()
                group = await flight.take()
                if group is None:
                    return
                self.require_fruit(group, max(BARREN_MAX, 2 * in_flight))
                yield group
        except asyncio.CancelledError:
            self._end_flight(flight, INTERRUPTED_CAUSE)
            raise
        finally:
            self._end_flight(flight, "nobody takes its group any more")

    def abort(
        self, which: Callable[[Episode], bool] | Collection[str], ending: Ending = Ending.CANCELLED, cause: str = ""
    ) -> int:
        """Stops episodes, in engine and environment: those of which `which` says so, or of these ids. How many. Raises
        InvalidConfig for an ending that only an episode itself can come to."""
        if ending not in STOPPED:
            raise InvalidConfig("ending", ending, f"one of {', '.join(STOPPED)}")
        chosen = [each for each in self._playing.values() if (which(each) if callable(which) else each.id in which)]
        for episode in chosen:
            episode.stop(ending, cause or f"aborted as {ending}")
        return len(chosen)

    def in_play(self) -> tuple[Episode, ...]:
        """All that have begun and not ended, oldest first."""
        return tuple(self._playing.values())

    def expire(self, version_min: int, cause: str) -> int:
        """From now on, a member of a group that is trained on is lost once its first token is of an older version:
        stopped as stale if it is in play, left out if it had ended, and played again as the settings say. How many are
        lost at once. Groups that have all their members stay as they are."""
        self._version_min, self._version_min_cause = version_min, cause
        return self._expire(lambda each: _older(each, version_min), cause)

    def expire_after(self, version_max: int, cause: str) -> int:
        """Weights of later versions are no more, and the engines have gone back: likewise members with any token of
        them. What they write in this moment is looked at when it is there. Nothing is too old until `expire` says it
        again."""
        self._version_min = 0
        for episode in self._playing.values():
            if episode.stage == Stage.GENERATE and self._is_trained_on(episode):
                self._suspects[episode.id] = _Suspect(len(episode.turns), version_max, cause)
        return self._expire(lambda each: _later(each, version_max), cause)

    def require_fruit(self, group: Group, row_max: int = BARREN_MAX) -> None:
        """Of a group that has ended. Raises ManagerError, once, if it ended without members and more than `row_max` of
        its task did so one after another, or more than HOPELESS_MAX by no chance."""
        if self._hopeless.get(group.task, 0) > HOPELESS_MAX:
            row_max = min(row_max, HOPELESS_MAX)
        if not group.members and self._barren.get(group.task, 0) > row_max:
            self._barren[group.task] = self._hopeless[group.task] = 0
            raise ManagerError(
                f"task {group.task}: {row_max + 1} groups in a row ended without members; the last: {group.cause}"
            )

    def statistics(self) -> RolloutStatistics:
        return RolloutStatistics(
            tasks={
                name: TaskStatistics(
                    playing={stage: number for stage, number in self._counts[name].items() if number},
                    ended=dict(self._endings[name]),
                )
                for name in self._arena_by_task
            },
            closing=len(self._house.closings),
            close_failed=self._house.closings.failed,
            stuck=self._house.closings.stuck,
        )

    # ---- what episodes tell ----

    def _moved(self, episode: Episode, before: str) -> None:
        counts = self._counts[episode.task]
        if before:
            counts[before] -= 1
        if episode.stage:
            counts[episode.stage] = counts.get(episode.stage, 0) + 1
        if self._watch is None:
            return
        if not before:
            self._watch.began(episode.id, episode.task)
        elif episode.stage not in ("", WAITING):
            self._watch.stage(episode.id, Stage(episode.stage))

    def _wanted(self, episode: Episode) -> bool:
        if self._fresh is not None and not self._fresh(episode):
            return False
        if not self._is_trained_on(episode):
            return True
        cause = self._version_min_cause if _older(episode, self._version_min) else ""
        suspect = self._suspects.get(episode.id)
        if suspect is not None and len(episode.turns) > suspect.turns:
            del self._suspects[episode.id]
            cause = cause or (suspect.cause if _later(episode, suspect.version_max) else "")
        if cause:
            episode.stop(Ending.STALE, cause)
        return not cause

    def _is_trained_on(self, episode: Episode) -> bool:
        return not self._bands[episode.group].ticket.series

    def _expire(self, stale: Callable[[Episode | Trajectory], bool], cause: str) -> int:
        return sum(band.expire(stale, cause) for band in list(self._bands.values()) if not band.ticket.series)

    def _ended(self, record: Trajectory) -> None:
        del self._playing[record.id]
        self._suspects.pop(record.id, None)
        endings = self._endings[record.task]
        endings[record.ending.value] = endings.get(record.ending.value, 0) + 1
        if self._watch is not None:
            self._watch.ended(record)
        if self._on_end is not None:
            self._on_end(record)

    def _group_ended(self, group: Group) -> None:
        band = self._bands.pop(group.id)
        if group.members:
            self._barren[group.task] = self._hopeless[group.task] = 0
        elif band.failed:
            self._barren[group.task] = self._barren.get(group.task, 0) + 1
            self._hopeless[group.task] = self._hopeless.get(group.task, 0) + 1 if band.hopeless else 0
        if self._watch is not None:
            self._watch.group(group)

    # ---- bands ----

    @asynccontextmanager
    async def _flight(self, tickets: Iterable[Ticket]) -> AsyncIterator[Flight]:
        flight = self._begin_flight(tickets)
        cause = STOPPED_CAUSE
        try:
            yield flight
        except asyncio.CancelledError:
            cause = INTERRUPTED_CAUSE
            raise
        except Exception as error:
            cause = str(error)
            raise
        finally:
            self._end_flight(flight, cause)
            await flight.land()

    def _begin_flight(self, tickets: Iterable[Ticket]) -> Flight:
        """Raises ManagerError."""
        if self._broken is not None:
            raise self._broken
        if self._tasks is None:
            raise ManagerError("the rollout is not open: use it as `async with Rollout(...) as rollout:`", retry=False)
        flight = Flight(tickets, self._tasks, self._band, self._group_ended, self._broke)
        self._flights.add(flight)
        return flight

    def _end_flight(self, flight: Flight, cause: str) -> None:
        flight.on_end = None
        flight.stop(Ending.CANCELLED, cause)
        self._flights.discard(flight)

    def _band(self, ticket: Ticket) -> Band:
        if ticket.task not in self._arena_by_task:
            known = ", ".join(self._arena_by_task)
            raise InvalidConfig("task", ticket.task, f"one that the settings name: {known}")
        if ticket.group in self._bands:
            raise InvalidConfig("ticket", ticket.group, "a number that no other group has: this one is being played")
        groups = self.settings.groups
        if ticket.size is not None:
            groups = msgspec.structs.replace(groups, size=ticket.size, members_extra=0, size_min=1)
        band = self._bands[ticket.group] = Band(ticket, groups, self._episode, self._now)
        return band

    def _episode(self, ticket: Ticket, member: int, attempt: int) -> Episode:
        episode = Episode(self._house, self._arena_by_task[ticket.task], ticket, member, attempt)
        assert episode.id not in self._playing, f"{episode.id} is being played"
        self._playing[episode.id] = episode
        return episode

    def _broke(self, error: Exception) -> None:
        """A generator cannot go on: nor can anybody here."""
        if self._broken is None:
            self._broken = error
            self._stop(str(error))

    def _stop(self, cause: str) -> None:
        for flight in list(self._flights):
            flight.stop(Ending.CANCELLED, cause)

    def _now(self) -> float:
        return self._house.clock.now() - self._house.began


def _older(played: Episode | Trajectory, version_min: int) -> bool:
    first = played.version_first
    return first is not None and first < version_min


def _later(played: Episode | Trajectory, version_max: int) -> bool:
    return any(version > version_max for turn in played.turns for version in turn.versions)
