"""Replay: play recorded trajectories again, without a model.

Owns two ways. `replay` plays the environment of one trajectory with the same seed and the recorded actions, and tells
where it says or gives something else than was recorded: an environment that is not deterministic, or has changed.
`as_generator` answers like an engine, out of the record, so that a whole rollout can be played again. Never changes a
record. Promises that every environment that it makes is closed, and that an environment that raises or hangs is told
as a failure of the replay, never as a difference.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tangram.client.client import Client
from tangram.errors import InvalidConfig, InvalidInput
from tangram.reports.printable import plain
from tangram.rl.config.rollout_settings import RewardSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.protocol import Environment, Outside, Task
from tangram.rl.inference.engines.protocol import Generation, Request
from tangram.rl.rollout.records import Ending, Trajectory
from tangram.rl.rollout.rewards import Played, make_reward, settings_for

RUN = "replay"
"""Whose share of the pools its actions count against."""
CLOSE_TIMEOUT_S = 60.0
"""An environment that does not close is left, and told."""
REWARD_TOLERANCE = 1e-9
"""Relative: rewards of steps may have been added in another order."""
ANSWERED = (Ending.FINISHED, Ending.TRUNCATED, Ending.REWARD_FAILED)
"""Endings of a trajectory whose last action was played."""


class NeedsClient(ValueError):
    """The environment runs commands or calls, and there is nowhere to run them."""


class _Alone(Outside, frozen=True, kw_only=True):
    """Without a client, and says so in a way that is told from other errors."""

    def require_client(self, task: str) -> Client:
        if self.client is None:
            raise NeedsClient(f"{task} runs commands or calls, and needs a client for them")
        return self.client


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something that came out another way."""

    turn: int
    """Counted from 0; the count of turns for what the environment said last."""
    what: Literal["observation", "reward", "ending"]
    recorded: str
    replayed: str


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one trajectory."""

    id: str
    task: str
    turns: int
    """Actions that were played."""
    differences: tuple[Difference, ...] = ()
    failed: str = ""
    """Why it could not be played to its end; empty if it was."""
    not_compared: str = ""
    """What could not be had again without a client; empty if all was."""

    @property
    def same(self) -> bool:
        return not self.differences and not self.failed


def settings_of(trajectory: Trajectory, settings: RolloutSettings | None) -> TaskSettings:
    """Those of its task, or the usual ones. Raises InvalidConfig."""
    if settings is not None:
        for each in settings.tasks:
            if each.name == trajectory.task:
                return each
    return TaskSettings(name=trajectory.task)


def task_of(settings: TaskSettings) -> Task:
    """Raises InvalidConfig."""
    from tangram.rl.environments.registry import resolve

    return resolve(settings.environment or settings.name)


async def replay(
    trajectory: Trajectory, settings: TaskSettings, *, task: Task | None = None, client: Client | None = None
) -> Replayed:
    """Plays it in the environment that the settings name, or that `task` makes. Raises InvalidConfig if there is no
    such environment, or if it needs a client and there is none."""
    task = task or task_of(settings)
    outside = _Alone(client=client, run=RUN, trajectory=f"{RUN}/{trajectory.id}")
    playing = _Playing(trajectory, settings, settings_for(task, settings.reward), outside)
    environment: Environment | None = None
    try:
        environment = task(outside, **settings.options)
        await playing.play(environment)
    except NeedsClient as error:
        raise InvalidConfig("client", None, f"one, as tangram.connect() gives it ({error})") from None
    except Exception as error:
        playing.failed = _words(error)
    finally:
        if environment is not None:
            not_closed = await _closed(environment)
            playing.failed = playing.failed or not_closed
    return playing.result()


async def _closed(environment: Environment) -> str:
    """Why it could not be closed. Whoever cancels waits until it is."""
    closing = asyncio.ensure_future(asyncio.wait_for(environment.close(), CLOSE_TIMEOUT_S))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing})
        if not closing.cancelled():
            closing.exception()  # taken: the one who cancelled wants none
        raise
    except Exception as error:
        return f"close: {_words(error)}"
    return ""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Playing:
    """One trajectory on its way."""

    def __init__(
        self, trajectory: Trajectory, settings: TaskSettings, reward: RewardSettings, outside: Outside
    ) -> None:
        self._trajectory = trajectory
        self._settings = settings
        self._rewarded_by = reward
        self._outside = outside
        self._differences: list[Difference] = []
        self._played = 0
        self._done = False
        self._total = 0.0
        self._metrics: dict[str, float] = {}
        self._not_compared = ""
        self.failed = ""

    async def play(self, environment: Environment) -> None:
        trajectory = self._trajectory
        if not trajectory.turns and not trajectory.observation:
            return  # it never came as far as an environment
        said = await self._timed("reset", environment.reset(trajectory.seed), self._settings.reset_timeout_s)
        for turn in trajectory.turns:
            self._compare("observation", turn.observation, said)
            if self._done:
                self._compare("ending", "it went on", "the environment is over")
                return
            if self._played == len(trajectory.turns) - 1 and not self._last_was_answered:
                return
            step = await self._timed("step", environment.step(turn.action), self._settings.step_timeout_s)
            said, self._done = step.observation, step.done
            self._total += step.reward
            self._metrics.update(step.metrics)
            self._played += 1
        self._compare("observation", trajectory.observation, said)
        self._compare_ending()
        await self._compare_reward(environment, said)

    @property
    def _last_was_answered(self) -> bool:
        return self._trajectory.ending in ANSWERED or bool(self._trajectory.observation)

    async def _timed(self, what: str, doing: Any, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await doing
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"{what} of turn {self._played} took longer than {limit_s:g} s") from None

    def _compare(self, what: Literal["observation", "reward", "ending"], recorded: str, replayed: str) -> None:
        if recorded != replayed:
            difference = Difference(turn=self._played, what=what, recorded=recorded, replayed=replayed)
            self._differences.append(difference)

    def _compare_ending(self) -> None:
        trajectory = self._trajectory
        now = "the environment is over" if self._done else "the environment goes on"
        if trajectory.ending is Ending.FINISHED:
            self._compare("ending", "the environment is over", now)
        elif trajectory.ending is not Ending.REWARD_FAILED:
            self._compare("ending", "the environment goes on", now)

    async def _compare_reward(self, environment: Environment, said: str) -> None:
        trajectory, kind = self._trajectory, self._rewarded_by.kind
        if trajectory.reward is None:
            return
        if kind != "environment" and self._outside.client is None:
            self._not_compared = f"the reward, which a {kind} gave"
            return
        played = Played(
            id=trajectory.id,
            task=trajectory.task,
            seed=trajectory.seed,
            turns=trajectory.turns,
            observation=said,
            total=self._total,
            metrics=self._metrics,
            environment=environment,
            outside=self._outside,
        )
        now = (await make_reward(self._rewarded_by, self._outside.client).score(played)).value
        if not math.isclose(trajectory.reward, now, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE):
            self._compare("reward", f"{trajectory.reward!r}", f"{now!r}")

    def result(self) -> Replayed:
        return Replayed(
            id=self._trajectory.id,
            task=self._trajectory.task,
            turns=self._played,
            differences=tuple(self._differences),
            failed=self.failed,
            not_compared=self._not_compared,
        )


# ---- as an engine -----------------------------------------------------------------------------------------------


class Recorded:
    """Generates what was generated. Which trajectory a request belongs to is told by its session, else by its task and
    noise; which of its turns, by the tokens that stand before."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._by_session: dict[str, Trajectory] = {}
        self._by_noise: dict[tuple[str, int, int, int], Trajectory] = {}
        for each in trajectories:
            self._by_session[each.id] = each
            self._by_noise[each.task, each.seed, each.member, each.attempt] = each

    async def generate(self, request: Request) -> Generation:
        """Raises InvalidInput if this was not asked when it was recorded."""
        await asyncio.sleep(0)  # others have their turn, as with an engine
        noise = request.noise
        found = self._by_session.get(request.session)
        found = found or self._by_noise.get((request.task, noise.seed, noise.member, noise.attempt))
        if found is None:
            raise InvalidInput("session", request.session or str(noise), "one of the recorded trajectories")
        return _continued(found, request.tokens)


def as_generator(trajectories: Iterable[Trajectory]) -> Recorded:
    return Recorded(trajectories)


def _continued(trajectory: Trajectory, tokens: tuple[int, ...]) -> Generation:
    """The rest of the turn in which these tokens end: all of it, or less if another engine wrote its beginning."""
    recorded = trajectory.tokens
    if tokens != recorded[: len(tokens)]:
        at = next((i for i, (a, b) in enumerate(zip(tokens, recorded, strict=False)) if a != b), len(recorded))
        expected = f"the tokens that were recorded of {plain(trajectory.id)}; they differ from position {at} on"
        raise InvalidInput("tokens", tokens[max(0, at - 3) : at + 3], expected)
    before = 0
    for turn in trajectory.turns:
        begins = before + len(turn.observation_tokens)
        before = begins + len(turn.tokens)
        if len(tokens) == begins or begins < len(tokens) < before:
            given = len(tokens) - begins
            return Generation(
                tokens=turn.tokens[given:],
                logprobs=turn.logprobs[given:],
                versions=turn.versions[given:],
                kept=None if turn.kept is None else turn.kept[given:],
                finish="length" if turn.cut else "stop",
                engine=turn.engine,
                prefilled=turn.prefilled,
                prefill_s=turn.prefill_s,
                decode_s=turn.decode_s,
            )
    raise InvalidInput(
        "tokens",
        f"{len(tokens):,} tokens",
        f"a place where {plain(trajectory.id)}, which is {trajectory.ending}, was continued",
    )
