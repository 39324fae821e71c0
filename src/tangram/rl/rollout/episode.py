"""An episode: one trajectory, played from its first reset to its reward.

Owns the way of one trajectory and its record. Whatever happens, it ends once, with one ending, and is done with its
environment. What the environment or the reward does wrong is an ending; what the generator cannot do is nobody's
reward and is raised, after the record was told.

A retry keeps its noise. The same noise, weights and observations give the same tokens, and that is right: it was the
environment that failed, and another draw until none fails would prefer the actions on which environments do not fail.
What an environment did before it failed is gone: the record has the turns of the last try alone, and spans of all.
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
from tangram.rl.environments.calls import LEAVES, Exited, begun
from tangram.rl.environments.protocol import Environment, Step, metrics_of, number_of, step_of
from tangram.rl.inference.engines.protocol import Generation, Noise, Request, RequestRefused
from tangram.rl.inference.router_records import RequestGivenUp
from tangram.rl.rollout.contexts import Arena, House
from tangram.rl.rollout.records import STOPPED, Ending, Span, Stage, Ticket, Trajectory, Turn
from tangram.rl.rollout.rewards import Played, RewardFailed, Score

T = TypeVar("T")

BACKOFF_S_MAX = 30.0
"""Between two tries, however many there are."""
WAITING = "queue"
"""The stage of those that have no place yet."""
CAUSE_LENGTH_MAX = 500
"""Of what environments and rewards say of their failures; they may say anything."""


class EnvironmentFailed(Exception):
    """A try brought nothing."""

    def __init__(self, cause: str, *, retry: bool = True) -> None:
        self.retry = retry
        super().__init__(cause)


class _Stopped(Exception):
    """It is to end here, as was said by whoever stopped it."""


class _End(NamedTuple):
    ending: Ending
    cause: str = ""
    reward: float | None = None
    taught: tuple[float, ...] | None = None
    """What a teacher said of its tokens."""


class Waits(NamedTuple):
    """What an episode is doing, or waits for."""

    stage: str
    """Of Stage; `waiting` while it has no place, empty once it is over."""
    since_s: float
    """How long it has been in it."""
    what: str
    """Whose answer it waits for."""


ASKED = {
    "": "",
    WAITING: "its turn to begin",
    Stage.RESET.value: "the environment",
    Stage.GENERATE.value: "an engine",
    Stage.STEP.value: "the environment",
    Stage.REWARD.value: "the reward",
}
"""Whose answer a stage waits for, unless it is kept from asking."""


class _Doing:
    """A stage that is going on."""

    def __init__(self) -> None:
        self.waiting_s = 0.0
        self.waited_for = ""
        self.failed = ""
        self._longest_s = 0.0

    def waited(self, seconds: float, what: str) -> None:
        """Several waits add up; the longest gives its name."""
        self.waiting_s += seconds
        if seconds > self._longest_s:
            self._longest_s, self.waited_for = seconds, what


class Episode:
    """One attempt of one member of a group. `play` it once; `stop` it at any time."""

    def __init__(self, house: House, arena: Arena, ticket: Ticket, member: int, attempt: int) -> None:
        self.id = ticket.trajectory(member, attempt)
        self.task = ticket.task
        self.group = ticket.group
        self.member = member
        self.attempt = attempt
        self.stage = ""
        """What it is doing; `waiting` while it has no place to do it, empty once it is over."""
        self.turns: list[Turn] = []
        """So far, of this try."""
        self.given_up = False
        """It got nowhere, and it alone, as when the engines refuse to serve it: another attempt may do better."""
        self.hopeless = False
        """It failed before its first turn, and not by chance: another attempt begins with the same and fails alike."""
        self._house = house
        self._arena = arena
        self._outside = msgspec.structs.replace(arena.outside, trajectory=self.id)
        self._seed = ticket.seed
        self._sampling = arena.sampling
        if ticket.temperature is not None:
            self._sampling = msgspec.structs.replace(arena.sampling, temperature=ticket.temperature)
        self._noise = Noise(seed=ticket.seed, member=member, attempt=attempt)
        self._began_s = self._now()
        self._environment: Environment | None = None
        self._call: asyncio.Task[Any] | None = None
        """Of the environment or its reward, that is not answered yet."""
        self._held: list[asyncio.Semaphore] = []
        self._tokens: tuple[int, ...] = ()
        self._observation = ""
        self._total = 0.0
        """Of the rewards of the steps."""
        self._metrics: dict[str, float] = {}
        self._spans: list[Span] = []
        self._requests = 0
        self._try = 0
        self._heard: tuple[int, ...] = ()
        self._done = False
        self._cut = ""
        """Why it was cut off, if it was."""
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        """Cancellations of the task that were under way before it played this."""
        self._stopped: _End | None = None
        self._cancel_sent = False
        self._over = False
        self._moved_s = self._began_s
        self._kept_by = ""
        """What keeps it from asking, if something does."""
        self._move(WAITING)

    @property
    def version_first(self) -> int | None:
        """Of its first token so far, from which its staleness is counted."""
        return next((turn.versions[0] for turn in self.turns if turn.versions), None)

    def waiting(self) -> Waits:
        return Waits(self.stage, self._now() - self._moved_s, self._kept_by or ASKED[self.stage])

    def stop(self, ending: Ending, cause: str) -> None:
        """It ends with this as soon as it can be: the request is aborted, the environment closed. Once it is over or
        stopped, nothing."""
        assert ending in STOPPED, f"{self.id} cannot be stopped as {ending}"
        if self._over or self._stopped is not None:
            return
        self._stopped = _End(ending, cause)
        if self._task is not None:
            self._cancel_sent = True
            self._task.cancel()

    async def play(self) -> Trajectory:
        """Raises what the generator raised, and CancelledError if this task was cancelled rather than the episode
        stopped: both after the record was told to the house."""
        task = self._task = asyncio.current_task()
        assert task is not None and not self._over, f"{self.id} is played once, by a task"
        self._cancelling = task.cancelling()
        raised: BaseException | None = None
        try:
            end = await self._played()
        except _Stopped:
            assert self._stopped is not None
            end = self._stopped
        except (RequestGivenUp, RequestRefused) as error:
            self.given_up = True
            end = _End(Ending.CANCELLED, _words(error))
        except asyncio.CancelledError as error:
            end, raised = _End(Ending.CANCELLED, "the task that played it was cancelled"), error
        except Exception as error:
            end, raised = _End(Ending.CANCELLED, _words(error)), error
        finally:
            self._give_back()
            self._drop_environment()
            self._over = True
        if self._stopped is not None:
            end, raised = self._stopped, await self._settle(task, raised)
        record = self._record(end)
        self._move("")
        self._house.ended(record)
        if raised is not None:
            raise raised
        return record

    def never_played(self) -> None:
        """It ends here, if its task was cancelled before it could begin."""
        if self._task is None and not self._over:
            self._over = True
            record = self._record(self._stopped or _End(Ending.CANCELLED, "the task that played it was cancelled"))
            self._move("")
            self._house.ended(record)

    async def _settle(self, task: asyncio.Task[Any], raised: BaseException | None) -> BaseException | None:
        """Takes back the cancellation by which it was stopped, as nobody after it should feel it. What is left to be
        raised: a cancellation by somebody else."""
        if not self._cancel_sent:
            return raised if isinstance(raised, asyncio.CancelledError) else None
        if not isinstance(raised, asyncio.CancelledError):
            try:
                await asyncio.sleep(0)  # if it was not felt yet, it is felt here
            except asyncio.CancelledError as error:
                raised = error
        if task.uncancel() <= self._cancelling:
            return None
        return raised if isinstance(raised, asyncio.CancelledError) else asyncio.CancelledError()

    # ---- the way ----

    async def _played(self) -> _End:
        self._require_wanted()
        failure = await self._tries()
        if failure is not None:
            return failure
        # Its place is free for the next from here on: whoever computes the reward has limits of their own.
        self._give_back()
        return await self._rewarded()

    async def _tries(self) -> _End | None:
        """None once it has been played to its end."""
        settings = self._arena.settings
        while True:
            try:
                await self._one_try()
                return None
            except EnvironmentFailed as failure:
                self._drop_environment()
                if not failure.retry or self._try == settings.retries:
                    self.hopeless = not failure.retry and not self.turns
                    return _End(Ending.ENV_FAILED, str(failure))
            self._require_wanted()
            await asyncio.sleep(self._pause_s())
            self._try += 1

    def _pause_s(self) -> float:
        chance = random.Random(f"{self.id} {self._try}").uniform(0.5, 1.0)
        return min(self._arena.settings.backoff_s * 2.0**self._try, BACKOFF_S_MAX) * chance

    async def _one_try(self) -> None:
        """Raises EnvironmentFailed."""
        self.turns, self._tokens, self._total, self._metrics = [], (), 0.0, {}
        self._observation, self._done, self._cut = "", False, ""
        self._hear(await self._reset())
        while not self._done:
            room = self._house.context_max - len(self._tokens) - len(self._heard)
            if len(self.turns) >= self._limit("turns_max"):
                self._cut = f"it used up its {self._limit('turns_max')} turns"
                return
            if room < 1:
                self._cut = f"it used up its context of {self._house.context_max} tokens"
                if not self.turns:
                    said = f"the first observation, of {len(self._heard)} tokens, leaves no room"
                    raise EnvironmentFailed(f"{said}: {self._cut}; raise context_max of the engines", retry=False)
                return
            step = await self._turn(room)
            self._total += step.reward
            self._metrics.update(step.metrics)
            self._done = step.done
            if step.done:
                self._observation = step.observation
            else:
                self._hear(step.observation)

    async def _turn(self, room: int) -> Step:
        generation, action = await self._generate(room)
        self.turns.append(
            Turn(
                observation=self._observation,
                observation_tokens=self._heard,
                action=action,
                tokens=generation.tokens,
                logprobs=generation.logprobs,
                versions=generation.versions,
                kept=generation.kept,
                cut=generation.finish == "length",
                engine=generation.engine,
                prefilled=generation.prefilled,
                prefill_s=generation.prefill_s,
                decode_s=generation.decode_s,
            )
        )
        self._tokens = (*self._tokens, *self._heard, *generation.tokens)
        self._observation = ""
        self._require_wanted()
        return await self._step(action)

    def _hear(self, observation: str) -> None:
        """Encoded here, and nowhere again."""
        try:
            cut = bool(self.turns) and self.turns[-1].cut
            self._heard = self._house.codec.observation(observation, first=not self.turns, cut=cut)
        except ValueError as error:
            raise EnvironmentFailed(f"it said what the policy cannot read: {error}", retry=False) from error
        self._observation = observation

    def _require_wanted(self) -> None:
        """Raises _Stopped; CancelledError, if somebody cancelled this and it was kept from it."""
        assert self._task is not None
        if self._stopped is None and self._house.fresh is not None and not self._house.fresh(self):
            self._stopped = self._stopped or _End(Ending.STALE, f"its first token is of version {self.version_first}")
        if self._stopped is not None:
            raise _Stopped
        if self._task.cancelling() > self._cancelling:
            raise asyncio.CancelledError

    # ---- the environment ----

    async def _reset(self) -> str:
        arena, settings = self._arena, self._arena.settings
        with self._doing(Stage.RESET) as doing:
            await self._take(arena.slots.open, doing)
            if self._try == 0 and self._house.barrier is not None:
                self._house.barrier.join(self.id)
            try:
                self._environment = arena.make(self._outside, **settings.options)
            except (Exception, *LEAVES) as error:
                raise EnvironmentFailed(f"no environment: {_words(error)}") from error
            observation = await self._asked("reset", settings.reset_timeout_s, self._environment.reset, self._seed)
            if not isinstance(observation, str):
                raise EnvironmentFailed(f"reset gave {type(observation).__name__}, no text", retry=False)
            return observation

    async def _step(self, action: str) -> Step:
        assert self._environment is not None
        with self._doing(Stage.STEP) as doing:
            await self._meet(doing, "the slowest generation")
            step = await self._asked("step", self._arena.settings.step_timeout_s, self._environment.step, action)
            try:
                return step_of(step)
            except TypeError as error:
                raise EnvironmentFailed(f"step gave no Step as it should be: {error}", retry=False) from error

    async def _asked(self, what: str, timeout_s: float, ask: Callable[..., Awaitable[T]], question: object) -> T:
        """Raises EnvironmentFailed for all that an environment may do."""
        call = self._call = begun(ask, question)
        await asyncio.wait({call}, timeout=timeout_s)
        if not call.done():
            raise EnvironmentFailed(f"no answer to {what} within {timeout_s:g} s")
        self._call = None
        if call.cancelled():
            raise EnvironmentFailed(f"{what} cancelled itself")
        error = call.exception()
        if error is not None:
            raise EnvironmentFailed(f"{what} raised {_words(error)}") from error
        return call.result()

    def _limit(self, name: str) -> int:
        """What the settings say, else the environment, whose options may change what its task says."""
        said: int | None = getattr(self._arena.settings, name)
        found: int = said or getattr(self._environment, name, None) or getattr(self._arena.make, name)
        return found

    def _drop_environment(self) -> None:
        if self._environment is not None:
            self._house.closings.close(self._environment, self.id, self._call)
            self._environment = self._call = None

    # ---- the engine ----

    async def _generate(self, room: int) -> tuple[Generation, str]:
        """With its text. Raises ManagerError for what is no answer to the request."""
        arena, house = self._arena, self._house
        with self._doing(Stage.GENERATE) as doing:
            await self._take(arena.slots.turns, doing)
            await self._meet(doing, "the slowest environment")
            self._require_wanted()
            self._requests += 1
            tokens_max = min(room, self._limit("tokens_max"))
            sampling = msgspec.structs.replace(self._sampling, tokens_max=tokens_max)
            request = Request(
                id=f"{self.id}/{self._requests}",
                session=self.id,
                task=self.task,
                tokens=self._tokens + self._heard,
                sampling=sampling,
                noise=self._noise,
            )
            try:
                generation = await house.generator.generate(request)
            except asyncio.CancelledError as error:
                if self._cancelled():
                    raise
                raise ManagerError(f"{request.id}: the engines gave it up without a reason") from error
            action = self._read(request, generation)
            if generation.waiting_s > 0.0:
                doing.waited(generation.waiting_s, generation.engine or "engine")
            return generation, action

    def _read(self, request: Request, generation: Generation) -> str:
        wrong = _wrong_with(generation)
        if not wrong:
            try:
                return self._house.codec.action(generation.tokens)
            except (ValueError, TypeError, OverflowError) as error:
                wrong = _words(error)
        raise ManagerError(f"{request.id}: what the generator gave for it cannot be read: {wrong}", retry=False)

    # ---- the reward ----

    async def _rewarded(self) -> _End:
        """Its environment stays open meanwhile: a reward may run in its sandbox."""
        assert self._environment is not None
        played = Played(
            id=self.id,
            task=self.task,
            seed=self._seed,
            turns=tuple(self.turns),
            observation=self._observation,
            total=self._total,
            metrics=self._metrics,
            temperature=self._sampling.temperature,
            environment=self._environment,
            outside=self._outside,
        )
        with self._doing(Stage.REWARD) as doing:
            try:
                await self._wait_for_others(doing)
                score = await self._scored(played)
                doing.waited(score.waiting_s, score.waited_for)
            except RewardFailed as error:
                doing.failed = str(error)
                return _End(Ending.REWARD_FAILED, doing.failed)
        self._metrics = {**self._metrics, **score.metrics}
        if self._done:
            return _End(Ending.FINISHED, "", score.value, score.teacher_logprobs)
        return _End(Ending.TRUNCATED, self._cut, score.value, score.teacher_logprobs)

    async def _scored(self, played: Played) -> Score:
        """Raises RewardFailed for all that a reward may do; it may call the environment."""
        call = self._call = begun(self._arena.reward.score, played)
        await asyncio.wait({call})
        self._call = None
        if call.cancelled():
            raise RewardFailed("the reward cancelled itself")
        error = call.exception()
        if error is not None:
            raise RewardFailed(_words(error)) from error
        try:
            return _score_of(call.result(), sum(len(turn.tokens) for turn in played.turns))
        except TypeError as error:
            raise RewardFailed(f"the reward gave no Score as it should be: {error}") from error

    # ---- places, stages, the record ----

    async def _take(self, places: asyncio.Semaphore, doing: _Doing) -> None:
        """Once for all tries."""
        if places in self._held:
            return
        asked, stage, what = self._now(), self.stage, f"concurrency of {self.task}"
        if places.locked():
            self._move(WAITING)
            self._kept_by = what
        await places.acquire()
        self._held.append(places)
        self._move(stage)
        doing.waited(self._now() - asked, what)

    async def _meet(self, doing: _Doing, what: str) -> None:
        if self._house.barrier is not None:
            asked, self._kept_by = self._now(), what
            await self._house.barrier.arrive(self.id)
            self._kept_by = ""
            doing.waited(self._now() - asked, what)

    async def _wait_for_others(self, doing: _Doing) -> None:
        if self._house.barrier is not None:
            asked, self._kept_by = self._now(), "the slowest episode"
            await self._house.barrier.all_played()
            self._kept_by = ""
            doing.waited(self._now() - asked, "the slowest episode")

    def _give_back(self) -> None:
        if self._house.barrier is not None:
            self._house.barrier.leave(self.id)
        while self._held:
            self._held.pop().release()

    def _cancelled(self) -> bool:
        """Whether somebody cancelled this, rather than what it waited for cancelled itself."""
        assert self._task is not None
        return self._stopped is not None or self._task.cancelling() > self._cancelling

    @contextmanager
    def _doing(self, stage: Stage) -> Iterator[_Doing]:
        began_s, doing = self._now(), _Doing()
        self._move(stage.value)
        try:
            yield doing
        except asyncio.CancelledError:
            doing.failed = self._stopped.cause if self._stopped is not None else "cancelled"
            raise
        except Exception as error:
            doing.failed = _words(error)
            raise
        finally:
            ended_s = self._now()
            self._spans.append(
                Span(
                    stage=stage,
                    began_s=began_s,
                    ended_s=ended_s,
                    waiting_s=min(doing.waiting_s, ended_s - began_s),
                    waited_for=doing.waited_for,
                    attempt=self._try,
                    failed=doing.failed[:CAUSE_LENGTH_MAX],
                )
            )

    def _move(self, stage: str) -> None:
        before, self.stage = self.stage, stage
        self._moved_s, self._kept_by = self._now(), ""
        self._house.moved(self, before)

    def _now(self) -> float:
        return self._house.clock.now() - self._house.began

    def _record(self, end: _End) -> Trajectory:
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
            teacher_logprobs=end.taught,
            metrics=self._metrics,
            spans=tuple(self._spans),
            began_s=self._began_s,
            ended_s=self._now(),
        )


def _wrong_with(generation: object) -> str:
    """Empty, if it can be a turn."""
    if not isinstance(generation, Generation):
        return f"expected a Generation, got {type(generation).__name__}"
    count = len(generation.tokens)
    for name in ("logprobs", "versions", "kept"):
        values = getattr(generation, name)
        if values is not None and len(values) != count:
            return f"expected {name} for each of its {count} tokens, got {len(values)}"
    return ""


def _score_of(score: object, tokens: int) -> Score:
    """With plain numbers. `tokens`: that the policy wrote. Raises TypeError."""
    if not isinstance(score, Score):
        raise TypeError(f"expected a Score, got {type(score).__name__}")
    value = number_of(score.value, "value")
    if not math.isfinite(value):
        raise TypeError(f"expected a finite number as value, got {value}")
    return msgspec.structs.replace(
        score,
        value=value,
        metrics=metrics_of(score.metrics),
        waiting_s=number_of(score.waiting_s, "waiting_s"),
        teacher_logprobs=_taught_of(score.teacher_logprobs, tokens),
    )


def _taught_of(logprobs: object, tokens: int) -> tuple[float, ...] | None:
    if logprobs is None:
        return None
    if not isinstance(logprobs, tuple) or len(logprobs) != tokens:
        raise TypeError(f"expected teacher_logprobs of {tokens} tokens, got {str(logprobs)[:100]}")
    found = tuple(number_of(each, "teacher_logprobs") for each in logprobs)
    if not all(map(math.isfinite, found)):
        raise TypeError("expected finite teacher_logprobs")
    return found


def _words(error: BaseException) -> str:
    """An error as a cause. Ours speak for themselves."""
    if isinstance(error, TangramError | EnvironmentFailed | Exited):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
