"""An episode: one trajectory, played from its first reset to its reward.

Owns the run of one trajectory and its record. Promises that every episode ends exactly once, with one ending, and
closes its environment. A failure of the environment or of the reward is an ending; a failure of the generator is
raised, after the record was delivered, and never becomes a reward.

A retry uses the same sampling noise, so the same weights and observations give the same tokens. With new noise, a retry
could sample other actions, and samples would be biased towards actions on which the environment does not fail. The
record has the turns of the last try only, and the spans of all tries.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from tangram.errors import ManagerError, TangramError
from tangram.rl.environments.calls import EXIT_EXCEPTIONS, CallExited, start_call
from tangram.rl.environments.protocol import Environment, Step, metrics_of, plain_number, step_of
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest, RequestRefused, SamplingSeed
from tangram.rl.inference.router_records import RequestAbandoned
from tangram.rl.rollout.contexts import RolloutContext, TaskContext
from tangram.rl.rollout.rewards import PlayedTrajectory, RewardFailed, Score
from tangram.rl.trajectories.trajectory import STOP_ENDINGS, Ending, GroupTicket, Span, Stage, Trajectory, Turn

T = TypeVar("T")

BACKOFF_S_MAX = 30.0
"""Upper bound of the exponential backoff between two tries."""
WAITING = "queue"
"""The stage of episodes that wait for a slot."""
CAUSE_LENGTH_MAX = 500
"""Longest failure text of an environment or a reward that a record keeps."""


class EnvironmentFailed(Exception):
    """An attempt failed because of the environment."""

    def __init__(self, cause: str, *, retry: bool = True) -> None:
        self.retry = retry
        super().__init__(cause)


class _Stopped(Exception):
    """The episode was stopped and ends with the ending in `_stopped`."""


class _EpisodeEnd(NamedTuple):
    ending: Ending
    cause: str = ""
    reward: float | None = None
    teacher_logprobs: tuple[float, ...] | None = None
    """The teacher's log-probabilities of the policy's tokens, if the reward has a teacher."""


class EpisodeWait(NamedTuple):
    """The activity of an episode, or what it waits for."""

    stage: str
    """A Stage; `queue` while it waits for a slot, empty once it has ended."""
    since_s: float
    """Seconds in this stage."""
    waiting_for: str
    """What has to respond before it continues."""


WAITED_FOR_BY_STAGE = {
    "": "",
    WAITING: "a free slot",
    Stage.RESET.value: "the environment",
    Stage.GENERATE.value: "an engine",
    Stage.STEP.value: "the environment",
    Stage.REWARD.value: "the reward",
}
"""What each stage waits for, unless something delays its request."""


class _StageTimer:
    """A stage that is running."""

    def __init__(self) -> None:
        self.waiting_s = 0.0
        self.waited_for = ""
        self.failed = ""
        self._longest_s = 0.0

    def add_wait(self, seconds: float, what: str) -> None:
        """Several waits add up; the longest one gives its name."""
        self.waiting_s += seconds
        if seconds > self._longest_s:
            self._longest_s, self.waited_for = seconds, what


class Episode:
    """One attempt of one member of a group. Call `play` once; `stop` works at any time."""

    def __init__(
        self, rollout_context: RolloutContext, task_context: TaskContext, ticket: GroupTicket, member: int, attempt: int
    ) -> None:
        self.id = ticket.trajectory_id(member, attempt)
        self.task = ticket.task
        self.group = ticket.group
        self.member = member
        self.attempt = attempt
        self.stage = ""
        """The current stage; `queue` while it waits for a slot, empty once it has ended."""
        self.turns: list[Turn] = []
        """The turns of the current try."""
        self.was_abandoned = False
        """Only this episode failed, for example because the engines refused its request: another attempt may
        succeed."""
        self.failed_permanently = False
        """It failed before its first turn for a permanent reason: every other attempt would fail in the same way."""
        self._rollout_context = rollout_context
        self._task_context = task_context
        self._resources = msgspec.structs.replace(task_context.resources, trajectory=self.id)
        self._seed = ticket.seed
        self._sampling = task_context.sampling
        if ticket.temperature is not None:
            self._sampling = msgspec.structs.replace(task_context.sampling, temperature=ticket.temperature)
        self._sampling_seed = SamplingSeed(seed=ticket.seed, member=member, attempt=attempt)
        self._began_at = self._now()
        self._environment: Environment | None = None
        self._call: asyncio.Task[Any] | None = None
        """Pending call of the environment or the reward."""
        self._held_slots: list[asyncio.Semaphore] = []
        self._tokens: tuple[int, ...] = ()
        self._observation = ""
        self._reward_sum = 0.0
        """Sum of the rewards of the steps."""
        self._metrics: dict[str, float] = {}
        self._spans: list[Span] = []
        self._requests = 0
        self._try_number = 0
        self._observation_tokens: tuple[int, ...] = ()
        self._done = False
        self._truncation_cause = ""
        """Empty unless the episode was cut off."""
        self._task: asyncio.Task[Any] | None = None
        self._cancellations_before = 0
        """Cancellations of the task that were pending before it played this episode."""
        self._stopped: _EpisodeEnd | None = None
        self._cancel_sent = False
        self._is_over = False
        self._stage_began_at = self._began_at
        self._blocked_by = ""
        """The resource that it lacks for its request, if any."""
        self._enter_stage(WAITING)

    @property
    def version_first(self) -> int | None:
        """The version of its first token so far, from which staleness is counted."""
        return next((turn.versions[0] for turn in self.turns if turn.versions), None)

    def current_wait(self) -> EpisodeWait:
        return EpisodeWait(
            self.stage, self._now() - self._stage_began_at, self._blocked_by or WAITED_FOR_BY_STAGE[self.stage]
        )

    def stop(self, ending: Ending, cause: str) -> None:
        """Ends the episode as soon as possible: aborts the request and closes the environment. No effect once it has
        ended or was stopped."""
        assert ending in STOP_ENDINGS, f"{self.id} cannot be stopped as {ending}"
        if self._is_over or self._stopped is not None:
            return
        self._stopped = _EpisodeEnd(ending, cause)
        if self._task is not None:
            self._cancel_sent = True
            self._task.cancel()

    async def play(self) -> Trajectory:
        """Raises exceptions of the generator, and CancelledError if this task was cancelled, not only the episode
        stopped. Calls `on_end` with the record first."""
        task = self._task = asyncio.current_task()
        assert task is not None and not self._is_over, f"{self.id} is played once, by a task"
        self._cancellations_before = task.cancelling()
        raised: BaseException | None = None
        try:
            end = await self._play_and_reward()
        except _Stopped:
            assert self._stopped is not None
            end = self._stopped
        except (RequestAbandoned, RequestRefused) as error:
            self.was_abandoned = True
            end = _EpisodeEnd(Ending.CANCELLED, _error_text(error))
        except asyncio.CancelledError as error:
            end, raised = _EpisodeEnd(Ending.CANCELLED, "the task that played it was cancelled"), error
        except Exception as error:
            end, raised = _EpisodeEnd(Ending.CANCELLED, _error_text(error)), error
        finally:
            self._release_slots()
            self._close_environment()
            self._is_over = True
        if self._stopped is not None:
            end, raised = self._stopped, await self._absorb_cancellation(task, raised)
        record = self._record(end)
        self._enter_stage("")
        self._rollout_context.on_end(record)
        if raised is not None:
            raise raised
        return record

    def end_unplayed(self) -> None:
        """Ends an episode whose task was cancelled before it started."""
        if self._task is None and not self._is_over:
            self._is_over = True
            record = self._record(
                self._stopped or _EpisodeEnd(Ending.CANCELLED, "the task that played it was cancelled")
            )
            self._enter_stage("")
            self._rollout_context.on_end(record)

    async def _absorb_cancellation(self, task: asyncio.Task[Any], raised: BaseException | None) -> BaseException | None:
        """Consumes the cancellation that `stop` sent, so that later awaits of the task do not raise it. Returns the
        exception that must still be raised: a cancellation from outside."""
        if not self._cancel_sent:
            return raised if isinstance(raised, asyncio.CancelledError) else None
        if not isinstance(raised, asyncio.CancelledError):
            try:
                await asyncio.sleep(0)  # deliver a pending cancellation here
            except asyncio.CancelledError as error:
                raised = error
        if task.uncancel() <= self._cancellations_before:
            return None
        return raised if isinstance(raised, asyncio.CancelledError) else asyncio.CancelledError()

    # ---- tries ----

    async def _play_and_reward(self) -> _EpisodeEnd:
        self._raise_if_stopped()
        failure = await self._play_with_retries()
        if failure is not None:
            return failure
        # Its slot is free for the next episode from here on: rewards have limits of their own.
        self._release_slots()
        return await self._compute_reward()

    async def _play_with_retries(self) -> _EpisodeEnd | None:
        """Returns None once the episode was played to its end."""
        settings = self._task_context.settings
        while True:
            try:
                await self._play_once()
                return None
            except EnvironmentFailed as failure:
                self._close_environment()
                if not failure.retry or self._try_number == settings.retries:
                    self.failed_permanently = not failure.retry and not self.turns
                    return _EpisodeEnd(Ending.ENV_FAILED, str(failure))
            self._raise_if_stopped()
            await asyncio.sleep(self._backoff_s())
            self._try_number += 1

    def _backoff_s(self) -> float:
        jitter = random.Random(f"{self.id} {self._try_number}").uniform(0.5, 1.0)
        return min(self._task_context.settings.backoff_s * 2.0**self._try_number, BACKOFF_S_MAX) * jitter

    async def _play_once(self) -> None:
        """Raises EnvironmentFailed."""
        self.turns, self._tokens, self._reward_sum, self._metrics = [], (), 0.0, {}
        self._observation, self._done, self._truncation_cause = "", False, ""
        self._encode_observation(await self._reset())
        while not self._done:
            room = self._rollout_context.context_max - len(self._tokens) - len(self._observation_tokens)
            if len(self.turns) >= self._limit("turns_max"):
                self._truncation_cause = f"it used up its {self._limit('turns_max')} turns"
                return
            if room < 1:
                self._truncation_cause = f"it used up its context of {self._rollout_context.context_max} tokens"
                if not self.turns:
                    problem = f"the first observation, of {len(self._observation_tokens)} tokens, leaves no room"
                    raise EnvironmentFailed(
                        f"{problem}: {self._truncation_cause}; raise context_max of the engines", retry=False
                    )
                return
            step = await self._play_turn(room)
            self._reward_sum += step.reward
            self._metrics.update(step.metrics)
            self._done = step.done
            if step.done:
                self._observation = step.observation
            else:
                self._encode_observation(step.observation)

    async def _play_turn(self, room: int) -> Step:
        generation, action = await self._generate(room)
        self.turns.append(
            Turn(
                observation=self._observation,
                observation_tokens=self._observation_tokens,
                action=action,
                tokens=generation.tokens,
                logprobs=generation.logprobs,
                versions=generation.versions,
                candidate_token_ids=generation.kept,
                truncated=generation.finish == "length",
                engine=generation.engine,
                prefilled=generation.prefilled,
                prefill_s=generation.prefill_s,
                decode_s=generation.decode_s,
            )
        )
        self._tokens = (*self._tokens, *self._observation_tokens, *generation.tokens)
        self._observation = ""
        self._raise_if_stopped()
        return await self._step(action)

    def _encode_observation(self, observation: str) -> None:
        """The only place where an observation is encoded."""
        try:
            cut = bool(self.turns) and self.turns[-1].truncated
            self._observation_tokens = self._rollout_context.codec.encode_observation(
                observation, first=not self.turns, cut=cut
            )
        except ValueError as error:
            raise EnvironmentFailed(f"the policy cannot read its observation: {error}", retry=False) from error
        self._observation = observation

    def _raise_if_stopped(self) -> None:
        """Raises _Stopped if the episode is stale or stopped; CancelledError if the environment swallowed a
        cancellation."""
        assert self._task is not None
        if self._stopped is None and self._rollout_context.stop_if_stale(self):
            self._stopped = self._stopped or _EpisodeEnd(
                Ending.STALE, f"its first token is of version {self.version_first}"
            )
        if self._stopped is not None:
            raise _Stopped
        if self._task.cancelling() > self._cancellations_before:
            raise asyncio.CancelledError

    # ---- the environment ----

    async def _reset(self) -> str:
        task_context, settings = self._task_context, self._task_context.settings
        with self._time_stage(Stage.RESET) as timer:
            await self._acquire_slot(task_context.slots.reset_slots, timer)
            if self._try_number == 0 and self._rollout_context.barrier is not None:
                self._rollout_context.barrier.join(self.id)
            try:
                self._environment = task_context.task(self._resources, **settings.options)
            except (Exception, *EXIT_EXCEPTIONS) as error:
                raise EnvironmentFailed(f"no environment: {_error_text(error)}") from error
            observation = await self._call_environment(
                "reset", settings.reset_timeout_s, self._environment.reset, self._seed
            )
            if not isinstance(observation, str):
                raise EnvironmentFailed(f"reset returned {type(observation).__name__}, expected str", retry=False)
            return observation

    async def _step(self, action: str) -> Step:
        assert self._environment is not None
        with self._time_stage(Stage.STEP) as timer:
            await self._arrive_at_barrier(timer, "the slowest generation")
            step = await self._call_environment(
                "step", self._task_context.settings.step_timeout_s, self._environment.step, action
            )
            try:
                return step_of(step)
            except TypeError as error:
                raise EnvironmentFailed(f"step returned no valid Step: {error}", retry=False) from error

    async def _call_environment(
        self, what: str, timeout_s: float, method: Callable[..., Awaitable[T]], argument: object
    ) -> T:
        """Raises EnvironmentFailed for every failure of the call."""
        call = self._call = start_call(method, argument)
        await asyncio.wait({call}, timeout=timeout_s)
        if not call.done():
            raise EnvironmentFailed(f"no answer to {what} within {timeout_s:g} s")
        self._call = None
        if call.cancelled():
            raise EnvironmentFailed(f"{what} cancelled itself")
        error = call.exception()
        if error is not None:
            raise EnvironmentFailed(f"{what} raised {_error_text(error)}") from error
        return call.result()

    def _limit(self, name: str) -> int:
        """The value of the settings, or of the environment, whose options may differ from its task."""
        configured: int | None = getattr(self._task_context.settings, name)
        limit: int = configured or getattr(self._environment, name, None) or getattr(self._task_context.task, name)
        return limit

    def _close_environment(self) -> None:
        if self._environment is not None:
            self._rollout_context.closer.close(self._environment, self.id, self._call)
            self._environment = self._call = None

    # ---- the engine ----

    async def _generate(self, room: int) -> tuple[Generation, str]:
        """Returns the generation and its text. Raises ManagerError if it does not fit the request."""
        task_context, context = self._task_context, self._rollout_context
        with self._time_stage(Stage.GENERATE) as timer:
            await self._acquire_slot(task_context.slots.play_slots, timer)
            await self._arrive_at_barrier(timer, "the slowest environment")
            self._raise_if_stopped()
            self._requests += 1
            tokens_max = min(room, self._limit("tokens_max"))
            sampling = msgspec.structs.replace(self._sampling, tokens_max=tokens_max)
            request = GenerationRequest(
                id=f"{self.id}/{self._requests}",
                session=self.id,
                task=self.task,
                tokens=self._tokens + self._observation_tokens,
                sampling=sampling,
                noise=self._sampling_seed,
            )
            try:
                generation = await context.generator.generate(request)
            except asyncio.CancelledError as error:
                if self._was_cancelled():
                    raise
                raise ManagerError(f"{request.id}: the engines dropped it without a reason") from error
            action = self._decode_action(request, generation)
            if generation.waiting_s > 0.0:
                timer.add_wait(generation.waiting_s, generation.engine or "engine")
            return generation, action

    def _decode_action(self, request: GenerationRequest, generation: Generation) -> str:
        failure = _generation_error(generation)
        if not failure:
            try:
                return self._rollout_context.codec.decode_action(generation.tokens)
            except (ValueError, TypeError, OverflowError) as error:
                failure = _error_text(error)
        raise ManagerError(f"{request.id}: the response of the generator cannot be read: {failure}", retry=False)

    # ---- the reward ----

    async def _compute_reward(self) -> _EpisodeEnd:
        """The environment stays open meanwhile: a reward may run in its sandbox."""
        assert self._environment is not None
        played = PlayedTrajectory(
            id=self.id,
            task=self.task,
            seed=self._seed,
            turns=tuple(self.turns),
            observation=self._observation,
            total=self._reward_sum,
            metrics=self._metrics,
            temperature=self._sampling.temperature,
            environment=self._environment,
            resources=self._resources,
        )
        with self._time_stage(Stage.REWARD) as timer:
            try:
                await self._wait_until_all_played(timer)
                score = await self._call_reward(played)
                timer.add_wait(score.waiting_s, score.waited_for)
            except RewardFailed as error:
                timer.failed = str(error)
                return _EpisodeEnd(Ending.REWARD_FAILED, timer.failed)
        self._metrics = {**self._metrics, **score.metrics}
        if self._done:
            return _EpisodeEnd(Ending.FINISHED, "", score.value, score.teacher_logprobs)
        return _EpisodeEnd(Ending.TRUNCATED, self._truncation_cause, score.value, score.teacher_logprobs)

    async def _call_reward(self, played: PlayedTrajectory) -> Score:
        """Raises RewardFailed for every failure of the reward, which may call the environment."""
        call = self._call = start_call(self._task_context.reward.score, played)
        await asyncio.wait({call})
        self._call = None
        if call.cancelled():
            raise RewardFailed("the reward cancelled itself")
        error = call.exception()
        if error is not None:
            raise RewardFailed(_error_text(error)) from error
        try:
            return _checked_score(call.result(), sum(len(turn.tokens) for turn in played.turns))
        except TypeError as error:
            raise RewardFailed(f"the reward returned no valid Score: {error}") from error

    # ---- slots, stages, the record ----

    async def _acquire_slot(self, slots: asyncio.Semaphore, timer: _StageTimer) -> None:
        """Acquires a slot once for all tries."""
        if slots in self._held_slots:
            return
        began_at, stage, what = self._now(), self.stage, f"concurrency of {self.task}"
        if slots.locked():
            self._enter_stage(WAITING)
            self._blocked_by = what
        await slots.acquire()
        self._held_slots.append(slots)
        self._enter_stage(stage)
        timer.add_wait(self._now() - began_at, what)

    async def _arrive_at_barrier(self, timer: _StageTimer, what: str) -> None:
        if self._rollout_context.barrier is not None:
            began_at, self._blocked_by = self._now(), what
            await self._rollout_context.barrier.arrive(self.id)
            self._blocked_by = ""
            timer.add_wait(self._now() - began_at, what)

    async def _wait_until_all_played(self, timer: _StageTimer) -> None:
        if self._rollout_context.barrier is not None:
            began_at, self._blocked_by = self._now(), "the slowest episode"
            await self._rollout_context.barrier.wait_until_empty()
            self._blocked_by = ""
            timer.add_wait(self._now() - began_at, "the slowest episode")

    def _release_slots(self) -> None:
        if self._rollout_context.barrier is not None:
            self._rollout_context.barrier.leave(self.id)
        while self._held_slots:
            self._held_slots.pop().release()

    def _was_cancelled(self) -> bool:
        """Whether this task was cancelled, rather than the awaited call having cancelled itself."""
        assert self._task is not None
        return self._stopped is not None or self._task.cancelling() > self._cancellations_before

    @contextmanager
    def _time_stage(self, stage: Stage) -> Iterator[_StageTimer]:
        began_at, timer = self._now(), _StageTimer()
        self._enter_stage(stage.value)
        try:
            yield timer
        except asyncio.CancelledError:
            timer.failed = self._stopped.cause if self._stopped is not None else "cancelled"
            raise
        except Exception as error:
            timer.failed = _error_text(error)
            raise
        finally:
            ended_at = self._now()
            self._spans.append(
                Span(
                    stage=stage,
                    began_s=began_at,
                    ended_s=ended_at,
                    waiting_s=min(timer.waiting_s, ended_at - began_at),
                    waited_for=timer.waited_for,
                    attempt=self._try_number,
                    failed=timer.failed[:CAUSE_LENGTH_MAX],
                )
            )

    def _enter_stage(self, stage: str) -> None:
        before, self.stage = self.stage, stage
        self._stage_began_at, self._blocked_by = self._now(), ""
        self._rollout_context.on_stage_change(self, before)

    def _now(self) -> float:
        return self._rollout_context.clock.now() - self._rollout_context.began_at_s

    def _record(self, end: _EpisodeEnd) -> Trajectory:
        return Trajectory(
            id=self.id,
            task=self.task,
            group=self.group,
            member=self.member,
            attempt=self.attempt,
            seed=self._seed,
            turns=tuple(self.turns),
            observation=self._observation,
            ending=end.ending,
            cause=end.cause[:CAUSE_LENGTH_MAX],
            reward=end.reward,
            teacher_logprobs=end.teacher_logprobs,
            metrics=self._metrics,
            spans=tuple(self._spans),
            began_s=self._began_at,
            ended_s=self._now(),
        )


def _generation_error(generation: object) -> str:
    """Returns why this cannot become a turn; empty if it can."""
    if not isinstance(generation, Generation):
        return f"expected a Generation, got {type(generation).__name__}"
    count = len(generation.tokens)
    for name in ("logprobs", "versions", "kept"):
        values = getattr(generation, name)
        if values is not None and len(values) != count:
            return f"expected {name} for each of its {count} tokens, got {len(values)}"
    return ""


def _checked_score(score: object, tokens: int) -> Score:
    """Returns the score with plain numbers. `tokens`: number of tokens that the policy wrote. Raises TypeError."""
    if not isinstance(score, Score):
        raise TypeError(f"expected a Score, got {type(score).__name__}")
    value = plain_number(score.value, "value")
    if not math.isfinite(value):
        raise TypeError(f"expected a finite number as value, got {value}")
    return msgspec.structs.replace(
        score,
        value=value,
        metrics=metrics_of(score.metrics),
        waiting_s=plain_number(score.waiting_s, "waiting_s"),
        teacher_logprobs=_checked_teacher_logprobs(score.teacher_logprobs, tokens),
    )


def _checked_teacher_logprobs(logprobs: object, tokens: int) -> tuple[float, ...] | None:
    if logprobs is None:
        return None
    if not isinstance(logprobs, tuple) or len(logprobs) != tokens:
        raise TypeError(f"expected teacher_logprobs of {tokens} tokens, got {str(logprobs)[:100]}")
    values = tuple(plain_number(logprob, "teacher_logprobs") for logprob in logprobs)
    if not all(map(math.isfinite, values)):
        raise TypeError("expected finite teacher_logprobs")
    return values


def _error_text(error: BaseException) -> str:
    """Returns an error as a cause. Our own errors need no class name."""
    if isinstance(error, TangramError | EnvironmentFailed | CallExited):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
