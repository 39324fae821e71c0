"""The rollout: plays groups of episodes, each at its own pace.

    upcoming = tickets(settings)    # once: a second iterator plays the same groups again
    async with Rollout(settings, router, codec, client) as rollout:
        batch = await rollout.collect(upcoming, groups=16)     # a batch, then a training step, then the next batch
        async for group in rollout.stream(upcoming, in_flight=24): ...    # or without any barrier

Owns every episode in flight, the slots of each task and what the tasks share. A bad episode is a record, not a crash.
Only a generator that cannot continue stops a rollout: every episode ends as cancelled with that cause, and every caller
that waits for a group gets the error. Promises that no request, environment or task remains after `async with`, except
tasks of environments that ignore cancellation, which are counted and logged.
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
from tangram.rl.environments.calls import EXIT_EXCEPTIONS
from tangram.rl.environments.protocol import ExternalResources, Task
from tangram.rl.environments.registry import path_of, tasks_of
from tangram.rl.environments.shared_setup import prepare_tasks
from tangram.rl.inference.engines.protocol import Sampling
from tangram.rl.rollout.contexts import EpisodeSlots, RolloutContext, TaskContext, TokenGenerator
from tangram.rl.rollout.environment_closer import EnvironmentCloser
from tangram.rl.rollout.episode import WAITING, Episode
from tangram.rl.rollout.group_runner import GroupRunner
from tangram.rl.rollout.in_flight_groups import InFlightGroups
from tangram.rl.rollout.rewards import Reward, effective_settings, make_reward, missing_for
from tangram.rl.rollout.turn_barrier import TurnBarrier
from tangram.rl.trajectories.codec import Codec
from tangram.rl.trajectories.trajectory import STOP_ENDINGS, Ending, Group, GroupTicket, Stage, Trajectory

STOPPED_CAUSE, INTERRUPTED_CAUSE = "the rollout was stopped", "the rollout was interrupted"
"""Causes of endings when the rollout ends, and when a caller is cancelled, for example by Ctrl-C."""
EMPTY_GROUPS_MAX = 16
"""Groups of a task that may end without members in a row, or twice as many as are played at once: a failure that
repeats more often is permanent. Groups that were stopped, or lost members by staleness, do not count."""
PERMANENT_FAILURES_MAX = 2
"""The same limit for groups all of whose members failed before their first turn for a permanent reason, such as an
observation that exceeds the context."""


class RolloutObserver(Protocol):
    """Receives events of a rollout; a progress bar is one."""

    def on_begin(self, trajectory: str, task: str) -> None: ...

    def on_stage(self, trajectory: str, stage: Stage) -> None: ...

    def on_end(self, trajectory: Trajectory) -> None: ...

    def on_group(self, group: Group) -> None: ...


class _RollbackCheck(NamedTuple):
    """A check to be made when a generation ends that was in flight when the engines were rolled back."""

    turns: int
    """Turns that the episode had at that moment."""
    version_max: int
    cause: str


class TaskStatistics(msgspec.Struct, frozen=True, kw_only=True):
    playing: dict[str, int]
    """Episodes in each stage; those without a slot are `queue`."""
    ended: dict[str, int]
    """Episodes by ending."""


class RolloutStatistics(msgspec.Struct, frozen=True, kw_only=True):
    tasks: dict[str, TaskStatistics]
    closing: int
    """Environments that are being closed."""
    close_failed: int
    """Environments that could not be closed."""
    stuck: int = 0
    """Calls of environments that ignored their cancellation and were abandoned."""


class CollectedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of groups."""

    groups: tuple[Group, ...]
    """Groups with members, in the order in which they ended."""
    left_out: tuple[Group, ...] = ()
    """Groups that were dropped, or ended too late."""
    began_s: float = 0.0
    ended_s: float = 0.0

    def all_trajectories(self) -> Iterator[Trajectory]:
        for group in (*self.groups, *self.left_out):
            yield from group.all_trajectories()


def tickets(settings: RolloutSettings, seed: int | None = None, first: int = 0) -> Iterator[GroupTicket]:
    """Yields group tickets without end: tasks are mixed evenly by weight, and the same seed gives the same tickets.
    `first`: number of the first ticket, to continue another stream."""
    if not settings.tasks:
        raise InvalidConfig("tasks", settings.tasks, "at least one task to be played")
    seed = settings.seed if seed is None else seed
    total = sum(task.weight for task in settings.tasks)
    credit_by_task = {task.name: 0.0 for task in settings.tasks}
    for number in count():
        for task in settings.tasks:
            credit_by_task[task.name] += task.weight / total
        name = max(credit_by_task, key=lambda task: credit_by_task[task])
        credit_by_task[name] -= 1.0
        if number >= first:
            yield GroupTicket(task=name, number=number, seed=random.Random(f"{seed}/{name}/{number}").getrandbits(31))


class Rollout:
    """Use it as `async with`, in one event loop."""

    def __init__(
        self,
        settings: RolloutSettings,
        generator: TokenGenerator,
        codec: Codec,
        client: Client | None = None,
        *,
        on_end: Callable[[Trajectory], None] | None = None,
        observer: RolloutObserver | None = None,
        clock: Clock | None = None,
        began_at_s: float | None = None,
        rewards: Mapping[str, Reward] | None = None,
        barrier: bool = False,
    ) -> None:
        """`on_end` gets every trajectory that ends, once; `observer` gets all events. `began_at_s`: zero of all times,
        on the clock; now if None. `rewards`: by task, instead of those of the settings. `barrier`: all episodes wait
        for each other at each turn, as in a rollout in batches of turns."""
        self.settings = settings
        self._client = client
        self._on_end = on_end
        self._observer = observer
        self._rewards = rewards or {}
        clock = clock or WallClock()
        self._context = RolloutContext(
            generator=generator,
            codec=codec,
            context_max=min(engine.context_max for engine in settings.engines),
            clock=clock,
            began_at_s=clock.now() if began_at_s is None else began_at_s,
            closer=EnvironmentCloser(),
            barrier=TurnBarrier() if barrier else None,
            stop_if_stale=self._stop_if_stale,
            on_stage_change=self._on_stage_change,
            on_end=self._on_trajectory_end,
        )
        self._context_by_task: dict[str, TaskContext] = {}
        self._playing: dict[str, Episode] = {}
        self._runner_by_group: dict[str, GroupRunner] = {}
        """Groups in flight."""
        self._version_min = 0
        self._version_min_cause = ""
        self._rollback_checks: dict[str, _RollbackCheck] = {}
        self._empty_in_row: dict[str, int] = {}
        """By task: groups that ended without members since the last one with members."""
        self._permanent_failures_in_row: dict[str, int] = {}
        """By task: the part of these, at their end, that failed for a permanent reason."""
        self._open_sets: set[InFlightGroups] = set()
        self._counts: dict[str, dict[str, int]] = {}
        self._endings: dict[str, dict[str, int]] = {}
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._error: Exception | None = None

    # ---- start and end ----

    async def __aenter__(self) -> Self:
        tasks = tasks_of(self.settings)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(prepare_tasks(tasks, self._client))
            stack.push_async_callback(self._context.closer.drain)
            for settings, task in zip(self.settings.tasks, tasks, strict=True):
                self._context_by_task[settings.name] = self._make_task_context(settings, task)
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

    def _make_task_context(self, settings: TaskSettings, task: Task) -> TaskContext:
        sampling = self.settings.sampling
        resources = ExternalResources(client=self._client, run=self.settings.run)
        reward = self._rewards.get(settings.name) or self._make_reward(settings, task)
        self._try_environment(settings, task, resources, reward)
        self._counts[settings.name] = {}
        self._endings[settings.name] = {}
        return TaskContext(
            settings=settings,
            task=task,
            resources=resources,
            sampling=Sampling(
                temperature=sampling.temperature,
                stop=self._context.codec.stop,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                keep_ids=sampling.keep_ids,
            ),
            reward=reward,
            # No reset ahead under a barrier: episodes with slots would wait there for one that waits for a slot.
            slots=EpisodeSlots(settings.concurrency, 0 if self._context.barrier is not None else settings.reset_ahead),
        )

    def _make_reward(self, settings: TaskSettings, task: Task) -> Reward:
        """Raises InvalidConfig."""
        try:
            return make_reward(effective_settings(task, settings.reward), self._client)
        except InvalidConfig as error:
            raise InvalidConfig(f"tasks.{settings.name}.{error.field}", error.value, error.expected) from error

    def _try_environment(
        self, settings: TaskSettings, task: Task, resources: ExternalResources, reward: Reward
    ) -> None:
        """Makes an environment once, to check its options, the needs of its reward and the context size before playing.
        Raises InvalidConfig. Other errors are ignored here: they may be gone when the environment is played."""
        trajectory = f"{settings.name}/options"
        try:
            environment = task(msgspec.structs.replace(resources, trajectory=trajectory), **settings.options)
        except (TypeError, ValueError, InvalidInput) as error:
            expected = f"options that {path_of(task)} can be made with ({error})"
            raise InvalidConfig(f"options of task {settings.name}", settings.options, expected) from error
        except (Exception, *EXIT_EXCEPTIONS):
            return
        self._context.closer.close(environment, trajectory)
        missing = missing_for(reward, environment)
        if missing:
            kind = effective_settings(task, settings.reward).kind
            expected = f"a kind that {path_of(task)} can be rewarded by: {missing}"
            raise InvalidConfig(f"tasks.{settings.name}.reward.kind", kind, expected)
        tokens_max: int = settings.tokens_max or getattr(environment, "tokens_max", None) or task.tokens_max
        if tokens_max >= self._context.context_max:
            expected = (
                f"more than tokens_max of task {settings.name}, which is {tokens_max}: an action has to fit, and what "
                "is read before it"
            )
            raise InvalidConfig("engines.context_max", self._context.context_max, expected)

    # ---- playing ----

    async def play(self, ticket: GroupTicket) -> Group:
        """Plays one group. Raises what the generator raised."""
        async with self._in_flight_set((ticket,)) as groups_in_flight:
            groups_in_flight.begin()
            group = await groups_in_flight.take()
            assert group is not None
            return group

    async def collect(
        self,
        tickets: Iterable[GroupTicket],
        groups: int,
        *,
        in_flight: int | None = None,
    ) -> CollectedBatch:
        """Returns the first `groups` groups that end with members. `groups_extra` of the settings more groups are
        played, and stopped once they are not needed. `in_flight` bounds the groups played at once. Returns fewer groups
        if the tickets run out. Raises what the generator raised, and ManagerError if too many groups of a task end
        without members."""
        began_at = self._now()
        needed = groups + self.settings.groups.groups_extra
        kept: list[Group] = []
        left_out: list[Group] = []
        async with self._in_flight_set(tickets) as groups_in_flight:
            more = True
            while len(kept) < groups:
                at_once = min(needed - len(kept), in_flight or needed)
                while more and groups_in_flight.playing + groups_in_flight.ready < at_once:
                    more = groups_in_flight.begin()
                group = await groups_in_flight.take()
                if group is None:
                    break
                (kept if group.members else left_out).append(group)
                self.require_progress(group, max(EMPTY_GROUPS_MAX, 2 * groups))
            groups_in_flight.stop(Ending.CANCELLED, "enough other groups ended before it")
            left_out += await groups_in_flight.drain()
        return CollectedBatch(groups=tuple(kept), left_out=tuple(left_out), began_s=began_at, ended_s=self._now())

    async def stream(self, tickets: Iterable[GroupTicket], in_flight: int) -> AsyncGenerator[Group, None]:
        """Yields groups as they end, also those without members. Each is replaced as long as at most `in_flight` groups
        wait to be taken. Raises what the generator raised, and ManagerError if too many groups of a task end without
        members."""
        groups_in_flight = self._begin_in_flight(tickets, in_flight, 2 * in_flight)
        try:
            while True:
                groups_in_flight.refill()
                group = await groups_in_flight.take()
                if group is None:
                    return
                self.require_progress(group, max(EMPTY_GROUPS_MAX, 2 * in_flight))
                yield group
        except asyncio.CancelledError:
            self._end_in_flight(groups_in_flight, INTERRUPTED_CAUSE)
            raise
        finally:
            self._end_in_flight(groups_in_flight, "its group is not taken: the stream was closed")

    def abort(
        self,
        which: Callable[[Episode], bool] | Collection[str],
        ending: Ending = Ending.CANCELLED,
        cause: str = "",
        *,
        replay: bool = False,
    ) -> int:
        """Stops episodes, in engine and environment, by predicate or by id. `replay`: their groups play them again, as
        the settings say. Returns how many. Raises InvalidConfig for an ending that only the episode itself can
        reach."""
        if ending not in STOP_ENDINGS:
            raise InvalidConfig("ending", ending, f"one of {', '.join(STOP_ENDINGS)}")
        chosen = [
            episode
            for episode in self._playing.values()
            if (which(episode) if callable(which) else episode.id in which)
        ]
        for episode in chosen:
            episode.was_abandoned |= replay
            episode.stop(ending, cause or f"aborted as {ending}")
        return len(chosen)

    def in_flight(self) -> tuple[Episode, ...]:
        """Returns all episodes that have begun and not ended, oldest first."""
        return tuple(self._playing.values())

    def discard_older_than(self, version_min: int, cause: str) -> int:
        """Discards members of groups that are trained on whose first token is of a version below `version_min`, now and
        from now on. A member in flight is stopped, one that has ended is left out of its group; the settings decide
        whether it is replaced. Complete groups stay as they are. Returns how many members were discarded now."""
        self._version_min, self._version_min_cause = version_min, cause
        return self._discard(lambda episode: _is_older(episode, version_min), cause)

    def discard_newer_than(self, version_max: int, cause: str) -> int:
        """Discards members with any token of a version above `version_max`, because the weights were rolled back to it.
        Generations in flight are checked when they end. Resets the bound of `discard_older_than`. Returns how many
        members were discarded now."""
        self._version_min = 0
        for episode in self._playing.values():
            if episode.stage == Stage.GENERATE and self._is_trained_on(episode):
                self._rollback_checks[episode.id] = _RollbackCheck(len(episode.turns), version_max, cause)
        return self._discard(lambda episode: _has_newer(episode, version_max), cause)

    def require_progress(self, group: Group, empty_max: int = EMPTY_GROUPS_MAX) -> None:
        """Raises ManagerError, once, if this ended group is one too many in a row without members for its task."""
        if self._permanent_failures_in_row.get(group.task, 0) > PERMANENT_FAILURES_MAX:
            empty_max = min(empty_max, PERMANENT_FAILURES_MAX)
        if not group.members and self._empty_in_row.get(group.task, 0) > empty_max:
            self._empty_in_row[group.task] = self._permanent_failures_in_row[group.task] = 0
            raise ManagerError(
                f"task {group.task}: {empty_max + 1} groups in a row ended without members; the last: {group.cause}"
            )

    def statistics(self) -> RolloutStatistics:
        return RolloutStatistics(
            tasks={
                name: TaskStatistics(
                    playing={stage: number for stage, number in self._counts[name].items() if number},
                    ended=dict(self._endings[name]),
                )
                for name in self._context_by_task
            },
            closing=len(self._context.closer),
            close_failed=self._context.closer.failed,
            stuck=self._context.closer.stuck,
        )

    # ---- events of episodes ----

    def _on_stage_change(self, episode: Episode, before: str) -> None:
        counts = self._counts[episode.task]
        if before:
            counts[before] -= 1
        if episode.stage:
            counts[episode.stage] = counts.get(episode.stage, 0) + 1
        if self._observer is None:
            return
        if not before:
            self._observer.on_begin(episode.id, episode.task)
        elif episode.stage not in ("", WAITING):
            self._observer.on_stage(episode.id, Stage(episode.stage))

    def _stop_if_stale(self, episode: Episode) -> bool:
        """Enforces the staleness bound on an episode: stops it if it is too stale, or has tokens of weights that were
        rolled back. Returns whether."""
        if not self._is_trained_on(episode):
            return False
        cause = self._version_min_cause if _is_older(episode, self._version_min) else ""
        check = self._rollback_checks.get(episode.id)
        if check is not None and len(episode.turns) > check.turns:
            del self._rollback_checks[episode.id]
            cause = cause or (check.cause if _has_newer(episode, check.version_max) else "")
        if cause:
            episode.stop(Ending.STALE, cause)
        return bool(cause)

    def _is_trained_on(self, episode: Episode) -> bool:
        return self._runner_by_group[episode.group].ticket.is_trained_on

    def _discard(self, stale: Callable[[Episode | Trajectory], bool], cause: str) -> int:
        return sum(
            runner.discard(stale, cause)
            for runner in list(self._runner_by_group.values())
            if runner.ticket.is_trained_on
        )

    def _on_trajectory_end(self, record: Trajectory) -> None:
        del self._playing[record.id]
        self._rollback_checks.pop(record.id, None)
        endings = self._endings[record.task]
        endings[record.ending.value] = endings.get(record.ending.value, 0) + 1
        if self._observer is not None:
            self._observer.on_end(record)
        if self._on_end is not None:
            self._on_end(record)

    def _on_group_end(self, group: Group) -> None:
        runner = self._runner_by_group.pop(group.id)
        if group.members:
            self._empty_in_row[group.task] = self._permanent_failures_in_row[group.task] = 0
        elif runner.failed:
            self._empty_in_row[group.task] = self._empty_in_row.get(group.task, 0) + 1
            self._permanent_failures_in_row[group.task] = (
                self._permanent_failures_in_row.get(group.task, 0) + 1 if runner.failed_permanently else 0
            )
        if self._observer is not None:
            self._observer.on_group(group)

    # ---- groups in flight ----

    @asynccontextmanager
    async def _in_flight_set(self, tickets: Iterable[GroupTicket]) -> AsyncIterator[InFlightGroups]:
        groups_in_flight = self._begin_in_flight(tickets)
        cause = STOPPED_CAUSE
        try:
            yield groups_in_flight
        except asyncio.CancelledError:
            cause = INTERRUPTED_CAUSE
            raise
        except Exception as error:
            cause = str(error)
            raise
        finally:
            self._end_in_flight(groups_in_flight, cause)
            await groups_in_flight.drain()

    def _begin_in_flight(
        self, tickets: Iterable[GroupTicket], playing_max: int = 0, outstanding_max: int = 0
    ) -> InFlightGroups:
        """Raises ManagerError."""
        if self._error is not None:
            raise self._error
        if self._tasks is None:
            raise ManagerError("the rollout is not open: use it as `async with Rollout(...) as rollout:`", retry=False)
        groups_in_flight = InFlightGroups(
            tickets,
            self._tasks,
            self._make_runner,
            on_group_end=self._on_group_end,
            on_error=self._on_generator_error,
            playing_max=playing_max,
            outstanding_max=outstanding_max,
        )
        self._open_sets.add(groups_in_flight)
        return groups_in_flight

    def _end_in_flight(self, groups_in_flight: InFlightGroups, cause: str) -> None:
        groups_in_flight.stop(Ending.CANCELLED, cause)
        self._open_sets.discard(groups_in_flight)

    def _make_runner(self, ticket: GroupTicket) -> GroupRunner:
        if ticket.task not in self._context_by_task:
            known = ", ".join(self._context_by_task)
            raise InvalidConfig("task", ticket.task, f"one that the settings name: {known}")
        if ticket.group in self._runner_by_group:
            raise InvalidConfig("ticket", ticket.group, "a number of no other group: this one is being played")
        groups = self.settings.groups
        if ticket.size is not None:
            groups = msgspec.structs.replace(groups, size=ticket.size, members_extra=0, size_min=1)
        runner = self._runner_by_group[ticket.group] = GroupRunner(ticket, groups, self._make_episode, self._now)
        return runner

    def _make_episode(self, ticket: GroupTicket, member: int, attempt: int) -> Episode:
        episode = Episode(self._context, self._context_by_task[ticket.task], ticket, member, attempt)
        assert episode.id not in self._playing, f"{episode.id} is being played"
        self._playing[episode.id] = episode
        return episode

    def _on_generator_error(self, error: Exception) -> None:
        """Stops everything: without a generator no episode can continue."""
        if self._error is None:
            self._error = error
            self._stop(str(error))

    def _stop(self, cause: str) -> None:
        for groups_in_flight in list(self._open_sets):
            groups_in_flight.stop(Ending.CANCELLED, cause)

    def _now(self) -> float:
        return self._context.clock.now() - self._context.began_at_s


def _is_older(episode: Episode | Trajectory, version_min: int) -> bool:
    first = episode.version_first
    return first is not None and first < version_min


def _has_newer(episode: Episode | Trajectory, version_max: int) -> bool:
    return any(version > version_max for turn in episode.turns for version in turn.versions)
