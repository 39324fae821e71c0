"""Replay: plays recorded trajectories again, without a model.

Owns two ways. `replay` plays the environment of a trajectory with the same seed and the recorded actions, and reports
differences: the environment is not deterministic, or has changed. `RecordedGenerator` generates from records, so that a
whole rollout can be played again. Never changes a record. Promises that every environment that it makes is closed, and
that an environment that raises or hangs is reported as a failure of the replay, never as a difference.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tangram.client.client import Client
from tangram.errors import InvalidConfig, InvalidInput
from tangram.reports.printable import escape_unprintable
from tangram.rl.config.rollout_settings import RewardSettings, RolloutSettings, TaskSettings
from tangram.rl.environments.protocol import Environment, ExternalResources, Task
from tangram.rl.environments.registry import task_of
from tangram.rl.inference.engines.protocol import Generation, GenerationRequest
from tangram.rl.rollout.rewards import PlayedTrajectory, effective_settings, make_reward
from tangram.rl.trajectories.trajectory import Ending, Trajectory

RUN = "replay"
"""The run that its actions belong to."""
CLOSE_TIMEOUT_S = 60.0
"""Time limit of closing an environment, which is then abandoned and reported."""
REWARD_TOLERANCE = 1e-9
"""Relative: rewards of steps may have been added in another order."""
LAST_ACTION_PLAYED = (Ending.FINISHED, Ending.TRUNCATED, Ending.REWARD_FAILED)
"""Endings of a trajectory whose last action was played."""


class NeedsClient(ValueError):
    """The environment runs commands or calls, but there is no client."""


class _ReplayResources(ExternalResources, frozen=True, kw_only=True):
    """Resources without a client, which raise a distinct error."""

    def require_client(self, task: str) -> Client:
        if self.client is None:
            raise NeedsClient(f"{task} runs commands or calls, and needs a client for them")
        return self.client


class ReplayDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between record and replay."""

    turn: int
    """Counted from 0; the number of turns for the last observation."""
    what: Literal["observation", "reward", "ending"]
    recorded: str
    replayed: str


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one trajectory."""

    id: str
    task: str
    turns: int
    """Number of actions played."""
    differences: tuple[ReplayDifference, ...] = ()
    failed: str = ""
    """Why it could not be played to its end; empty if it could."""
    not_compared: str = ""
    """The parts that cannot be compared without a client; empty if there are none."""

    @property
    def is_same(self) -> bool:
        return not self.differences and not self.failed


def settings_of(trajectory: Trajectory, settings: RolloutSettings | None) -> TaskSettings:
    """Returns the settings of its task, or the defaults. Raises InvalidConfig."""
    if settings is not None:
        for task_settings in settings.tasks:
            if task_settings.name == trajectory.task:
                return task_settings
    return TaskSettings(name=trajectory.task)


async def replay(
    trajectory: Trajectory, settings: TaskSettings, *, task: Task | None = None, client: Client | None = None
) -> ReplayResult:
    """Plays a trajectory in the environment of the settings, or of `task`. Raises InvalidConfig if there is no such
    environment, or if it needs a client and there is none."""
    task = task or task_of(settings)
    resources = _ReplayResources(client=client, run=RUN, trajectory=f"{RUN}/{trajectory.id}")
    playing = _Replay(trajectory, settings, effective_settings(task, settings.reward), resources)
    environment: Environment | None = None
    try:
        environment = task(resources, **settings.options)
        await playing.play(environment)
    except NeedsClient as error:
        raise InvalidConfig("client", None, f"one, as tangram.connect() gives it ({error})") from None
    except Exception as error:
        playing.failed = _error_text(error)
    finally:
        if environment is not None:
            not_closed = await _close_error(environment)
            playing.failed = playing.failed or not_closed
    return playing.result()


async def _close_error(environment: Environment) -> str:
    """Closes the environment. Returns why that failed; empty if it did not. Cancellation is delayed until it is
    closed."""
    closing = asyncio.ensure_future(asyncio.wait_for(environment.close(), CLOSE_TIMEOUT_S))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing})
        if not closing.cancelled():
            closing.exception()  # retrieve the exception, which a cancelled caller does not use
        raise
    except Exception as error:
        return f"close: {_error_text(error)}"
    return ""


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Replay:
    """One trajectory during its replay."""

    def __init__(
        self, trajectory: Trajectory, settings: TaskSettings, reward: RewardSettings, resources: ExternalResources
    ) -> None:
        self._trajectory = trajectory
        self._settings = settings
        self._reward_settings = reward
        self._resources = resources
        self._differences: list[ReplayDifference] = []
        self._turns_played = 0
        self._done = False
        self._reward_sum = 0.0
        self._metrics: dict[str, float] = {}
        self._not_compared = ""
        self.failed = ""

    async def play(self, environment: Environment) -> None:
        trajectory = self._trajectory
        if not trajectory.turns and not trajectory.observation:
            return  # it ended before it had an environment
        observation = await self._with_timeout(
            "reset", environment.reset(trajectory.seed), self._settings.reset_timeout_s
        )
        for turn in trajectory.turns:
            self._compare("observation", turn.observation, observation)
            if self._done:
                self._compare("ending", "it went on", "the environment is over")
                return
            if self._turns_played == len(trajectory.turns) - 1 and not self._last_action_was_played:
                return
            step = await self._with_timeout("step", environment.step(turn.action), self._settings.step_timeout_s)
            observation, self._done = step.observation, step.done
            self._reward_sum += step.reward
            self._metrics.update(step.metrics)
            self._turns_played += 1
        self._compare("observation", trajectory.observation, observation)
        self._compare_ending()
        await self._compare_reward(environment, observation)

    @property
    def _last_action_was_played(self) -> bool:
        return self._trajectory.ending in LAST_ACTION_PLAYED or bool(self._trajectory.observation)

    async def _with_timeout(self, what: str, doing: Any, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await doing
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"{what} of turn {self._turns_played} took longer than {limit_s:g} s") from None

    def _compare(self, what: Literal["observation", "reward", "ending"], recorded: str, replayed: str) -> None:
        if recorded != replayed:
            difference = ReplayDifference(turn=self._turns_played, what=what, recorded=recorded, replayed=replayed)
            self._differences.append(difference)

    def _compare_ending(self) -> None:
        trajectory = self._trajectory
        now = "the environment is over" if self._done else "the environment goes on"
        if trajectory.ending is Ending.FINISHED:
            self._compare("ending", "the environment is over", now)
        elif trajectory.ending is not Ending.REWARD_FAILED:
            self._compare("ending", "the environment goes on", now)

    async def _compare_reward(self, environment: Environment, observation: str) -> None:
        trajectory, kind = self._trajectory, self._reward_settings.kind
        if trajectory.reward is None:
            return
        if kind != "environment" and self._resources.client is None:
            self._not_compared = f"the reward, which a {kind} gave"
            return
        played = PlayedTrajectory(
            id=trajectory.id,
            task=trajectory.task,
            seed=trajectory.seed,
            turns=trajectory.turns,
            observation=observation,
            total=self._reward_sum,
            metrics=self._metrics,
            environment=environment,
            resources=self._resources,
        )
        now = (await make_reward(self._reward_settings, self._resources.client).score(played)).value
        if not math.isclose(trajectory.reward, now, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE):
            self._compare("reward", f"{trajectory.reward!r}", f"{now!r}")

    def result(self) -> ReplayResult:
        return ReplayResult(
            id=self._trajectory.id,
            task=self._trajectory.task,
            turns=self._turns_played,
            differences=tuple(self._differences),
            failed=self.failed,
            not_compared=self._not_compared,
        )


# ---- as an engine ----


class RecordedGenerator:
    """Generates from records. A request is matched to a trajectory by its session, else by task and sampling seed;
    and to a turn by the tokens before it."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._by_session: dict[str, Trajectory] = {}
        self._by_sampling_seed: dict[tuple[str, int, int, int], Trajectory] = {}
        for trajectory in trajectories:
            self._by_session[trajectory.id] = trajectory
            self._by_sampling_seed[trajectory.task, trajectory.seed, trajectory.member, trajectory.attempt] = trajectory

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises InvalidInput for a request that was not recorded."""
        await asyncio.sleep(0)  # lets other tasks run, as an engine does
        seed = request.noise
        trajectory = self._by_session.get(request.session)
        trajectory = trajectory or self._by_sampling_seed.get((request.task, seed.seed, seed.member, seed.attempt))
        if trajectory is None:
            raise InvalidInput("session", request.session or str(seed), "one of the recorded trajectories")
        return _continue_from(trajectory, request.tokens)


def _continue_from(trajectory: Trajectory, tokens: tuple[int, ...]) -> Generation:
    """Returns the rest of the turn in which these tokens end: all of it, or less if another engine generated its
    beginning."""
    recorded = trajectory.tokens
    if tokens != recorded[: len(tokens)]:
        at = next((i for i, (a, b) in enumerate(zip(tokens, recorded, strict=False)) if a != b), len(recorded))
        expected = (
            f"the tokens that were recorded of {escape_unprintable(trajectory.id)}; they differ from position {at} on"
        )
        raise InvalidInput("tokens", tokens[max(0, at - 3) : at + 3], expected)
    before = 0
    for turn in trajectory.turns:
        begins = before + len(turn.observation_tokens)
        before = begins + len(turn.tokens)
        if len(tokens) == begins or begins < len(tokens) < before:
            kept_count = len(tokens) - begins
            return Generation(
                tokens=turn.tokens[kept_count:],
                logprobs=turn.logprobs[kept_count:],
                versions=turn.versions[kept_count:],
                kept=None if turn.candidate_token_ids is None else turn.candidate_token_ids[kept_count:],
                finish="length" if turn.truncated else "stop",
                engine=turn.engine,
                prefilled=turn.prefilled,
                prefill_s=turn.prefill_s,
                decode_s=turn.decode_s,
            )
    raise InvalidInput(
        "tokens",
        f"{len(tokens):,} tokens",
        f"a place where {escape_unprintable(trajectory.id)}, which is {trajectory.ending}, was continued",
    )
