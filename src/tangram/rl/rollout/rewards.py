"""Rewards: score a trajectory that was played to its end, by the source that the settings name.

Owns the retries. Never plays. Promises that a score is a finite number about the agent: what the agent does badly
(tests that fail, code that hangs or exhausts its memory) is a score; failures of the infrastructure (an action that was
lost, refused or late, a service that is gone, a function that raised) are retried and then become RewardFailed, never a
score of 0.

    kind          source of the score                                what the environment provides
    environment   the environment, by the rewards of its steps       nothing
    function      a function, as an action that scales from zero     nothing; the function gets the transcript
    command       a command in a sandbox: 1 if it exits with 0       async def verdict(timeout_s) -> Result or Verdict
    model         a model service: its `score`                       def evidence() -> payload, or None without evidence
    teacher       the environment; and a model service scores        nothing
                  each token of the policy

With `command` or `model`, a function may convert their result to the score.

The log-probabilities of a teacher are no score: the policy is distilled from them, token by token. The score beside
them is that of the environment, so that the curves of a distillation have the same scale as those of a policy trained
on rewards. The metric `teacher_kl` is the distance between policy and teacher: the mean difference of
log-probabilities, an estimate of the KL divergence that is minimised, in nats; it falls to 0.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from tangram.client.client import Client
from tangram.client.functions import Function, function
from tangram.core.action import Status
from tangram.errors import InvalidConfig, InvalidInput, ManagerError, TangramError
from tangram.managers.http import backoff_s
from tangram.managers.models.torch_engine import imported
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments.protocol import Environment, ExternalResources
from tangram.rl.trajectories.trajectory import Turn

BACKOFF_S, BACKOFF_S_MAX = 0.2, 5.0
"""Wait before the first retry, doubled before each that follows, with random jitter; its upper bound."""
SHOWN_CHARACTERS = 300
"""Length of a value or a reason in an error message."""


class RewardFailed(TangramError):
    """A reward failed for a reason that the agent did not cause."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class PlayedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that was played to its end and has no reward yet."""

    id: str
    task: str
    seed: int
    turns: tuple[Turn, ...]
    observation: str = ""
    """The last observation."""
    total: float
    """Sum of the rewards of the steps."""
    metrics: dict[str, float] = {}
    """The metrics of the environment."""
    temperature: float = 1.0
    """The temperature with which its tokens were sampled."""
    environment: Environment
    """Still open."""
    resources: ExternalResources

    def transcript(self) -> dict[str, Any]:
        """The input of a reward function: plain values, without tokens."""
        return {
            "id": self.id,
            "task": self.task,
            "seed": self.seed,
            "turns": [{"observation": turn.observation, "action": turn.action} for turn in self.turns],
            "observation": self.observation,
            "total": self.total,
            "metrics": dict(self.metrics),
        }


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a trajectory."""

    value: float
    metrics: dict[str, float] = {}
    waiting_s: float = 0.0
    """The part of its time spent in a queue."""
    waited_for: str = ""
    """What that queue was for."""
    teacher_logprobs: tuple[float, ...] | None = None
    """The teacher's log-probabilities of the policy's own tokens, in order; None without a teacher."""


class Reward(Protocol):
    async def score(self, played: PlayedTrajectory) -> Score:
        """Raises RewardFailed."""
        ...


@runtime_checkable
class HasVerdict(Protocol):
    """An environment that provides a reward of kind `command`."""

    async def verdict(self, timeout_s: float) -> Any:
        """Returns a Result or a Verdict. It is called again if it raises, or if the action was lost, refused or
        cancelled. `timeout_s` limits the command from its start: exceeding it is the agent's failure."""
        ...


@runtime_checkable
class HasEvidence(Protocol):
    """An environment that provides a reward of kind `model`."""

    def evidence(self) -> Any:
        """The payload for the service. None: there is nothing to judge, which scores 0."""
        ...


def make_reward(settings: RewardSettings, client: Client | None) -> Reward:
    """Makes the reward of settings with a kind, see `effective_settings`. Raises InvalidConfig."""
    if settings.kind == "usual":
        raise InvalidConfig("reward.kind", settings.kind, "the kind itself")
    if settings.kind == "environment":
        return EnvironmentReward()
    if client is None:
        raise InvalidConfig("reward.kind", settings.kind, "a client, as tangram.connect() gives one, or 'environment'")
    scorer = _function_of(settings) if settings.function else None
    if settings.service:
        try:
            client.require_service(settings.service)
        except InvalidInput as error:
            raise InvalidConfig("reward.service", error.value, error.expected) from error
    if settings.kind == "command":
        return CommandReward(settings, client, scorer)
    if settings.kind == "model":
        return ModelReward(settings, client, scorer)
    if settings.kind == "teacher":
        return TeacherReward(settings, client, None)
    assert scorer is not None, "the settings have a function for this kind"
    return FunctionReward(settings, client, scorer)


def effective_settings(task: object, settings: RewardSettings) -> RewardSettings:
    """Returns settings with a kind: the task's `usual_reward` unless the settings name one."""
    if settings.kind != "usual":
        return settings
    usual: RewardSettings = getattr(task, "usual_reward", RewardSettings(kind="environment"))
    return msgspec.structs.replace(usual, timeout_s=settings.timeout_s, retries=settings.retries)


def describe(settings: RewardSettings) -> str:
    """Describes the source of a reward, of settings with a kind."""
    parts: list[str] = [settings.kind]
    parts += [f"of service {settings.service}"] if settings.service else []
    parts += [f"by {settings.function}"] if settings.function else []
    return " ".join(parts)


def missing_for(reward: Reward, environment: Environment) -> str:
    """Returns the missing requirement of the reward; empty if the environment provides everything."""
    missing: str = getattr(reward, "missing", lambda _: "")(environment)
    return missing


# ---- kinds ----


class EnvironmentReward:
    """The sum of the rewards of the steps."""

    async def score(self, played: PlayedTrajectory) -> Score:
        return Score(value=finite_reward(played.total, "the environment"))


class _RetryableFailure(Exception):
    """An attempt failed for a reason that the agent did not cause; another may succeed."""


class _RemoteReward(ABC):
    """A reward computed by actions that may be lost."""

    def __init__(self, settings: RewardSettings, client: Client, scorer: Function[..., Any] | None) -> None:
        self._settings = settings
        self._client = client
        self._scorer = scorer

    async def score(self, played: PlayedTrajectory) -> Score:
        reason = ""
        for attempt in range(self._settings.retries + 1):
            if attempt:
                await asyncio.sleep(backoff_s(attempt, BACKOFF_S, BACKOFF_S_MAX))
            try:
                return await self._score_once(played, attempt)
            except RewardFailed:
                raise
            except InvalidInput as error:
                raise RewardFailed(f"{self._scorer_name(played)}: {error}") from error
            except Exception as error:
                # Exceptions here come from an environment or a client, never from the agent.
                reason = (
                    str(error)
                    if isinstance(error, _RetryableFailure | TangramError)
                    else f"{type(error).__name__}: {error}"
                )
        tries = f"{attempt + 1} tries" if attempt else "one try"
        raise RewardFailed(f"{self._scorer_name(played)}: no reward after {tries}: {reason[-SHOWN_CHARACTERS:]}")

    @abstractmethod
    async def _score_once(self, played: PlayedTrajectory, attempt: int) -> Score:
        """Raises RewardFailed if another try cannot help, and anything else if it may."""

    @abstractmethod
    def _scorer_name(self, played: PlayedTrajectory) -> str: ...

    async def _call_function(self, transcript: dict[str, Any], played: PlayedTrajectory, attempt: int) -> Score:
        """Has the function of the settings compute a score."""
        assert self._scorer is not None
        # The idempotency key: the same transcript is scored once, however often it is sent; but a later try must not
        # get the stored result.
        content = msgspec.msgpack.encode([transcript, attempt], enc_hook=repr)
        key = f"{played.resources.run}/{played.id}/{hashlib.sha256(content).hexdigest()[:16]}"
        result = await self._client.try_call(
            self._scorer, transcript, run=played.resources.run, trajectory=played.resources.trajectory,
            task=played.task,
            idempotency_key=key,
        )  # fmt: skip
        if not result.ok:
            raise _RetryableFailure(f"{result.kind}: {result.reason}")
        value = finite_reward(result.value, self._settings.function)
        return Score(value=value, waiting_s=result.timing.waiting_s, waited_for=f"function {self._settings.function}")

    async def _call_service(self, payload: Any, played: PlayedTrajectory) -> tuple[Any, float]:
        """Calls the service of the settings. Returns its result and the seconds spent waiting."""
        inference = await self._client.infer(
            self._settings.service, payload, run=played.resources.run, trajectory=played.resources.trajectory,
            task=played.task, timeout_s=self._settings.timeout_s,
        )  # fmt: skip
        if not inference.ok:
            raise _RetryableFailure(f"{inference.status.value}: {inference.reason}")
        try:
            return inference.json(), inference.timing.waiting_s
        except ManagerError as error:
            raise RewardFailed(str(error)) from error


class FunctionReward(_RemoteReward):
    """A score computed by a function from the transcript."""

    async def _score_once(self, played: PlayedTrajectory, attempt: int) -> Score:
        return await self._call_function(played.transcript(), played, attempt)

    def _scorer_name(self, played: PlayedTrajectory) -> str:
        return f"function {self._settings.function}"


class CommandReward(_RemoteReward):
    """1 if the command of the environment exits with 0, else 0; or a score computed by a function from the result."""

    async def _score_once(self, played: PlayedTrajectory, attempt: int) -> Score:
        environment = played.environment
        if not isinstance(environment, HasVerdict):
            raise RewardFailed(self.missing(environment))
        verdict = await environment.verdict(self._settings.timeout_s)
        status = verdict.status
        if status not in (Status.SUCCEEDED, Status.TIMED_OUT):
            raise _RetryableFailure(f"{status.value}: {verdict.reason}")
        metrics: dict[str, float] = dict(getattr(verdict, "metrics", {}))
        waiting_s, waited_for = verdict.timing.waiting_s, "cpu"
        if self._scorer is None:
            passed = status is Status.SUCCEEDED and verdict.exit_code == 0
            return Score(value=float(passed), metrics=metrics, waiting_s=waiting_s, waited_for=waited_for)
        result = {"status": status.value, "exit_code": verdict.exit_code}
        result |= {"stdout": verdict.stdout, "stderr": verdict.stderr}
        score = await self._call_function(played.transcript() | {"answer": result}, played, attempt)
        return Score(value=score.value, metrics=metrics, waiting_s=waiting_s + score.waiting_s, waited_for=waited_for)

    def missing(self, environment: Environment) -> str:
        if isinstance(environment, HasVerdict):
            return ""
        problem = f"{type(environment).__name__} has no `async def verdict(self, timeout_s)`"
        return f"kind = 'command' needs an environment that runs one: {problem}"

    def _scorer_name(self, played: PlayedTrajectory) -> str:
        return f"the command of {played.task}"


class ModelReward(_RemoteReward):
    """A number from a model service, or the number under its key `score`; or a score computed by a function from the
    result."""

    async def _score_once(self, played: PlayedTrajectory, attempt: int) -> Score:
        environment, settings = played.environment, self._settings
        if not isinstance(environment, HasEvidence):
            raise RewardFailed(self.missing(environment))
        payload = environment.evidence()
        if payload is None:
            return Score(value=0.0)
        (result, waiting_s), waited_for = await self._call_service(payload, played), f"service {settings.service}"
        if self._scorer is None:
            scored = result["score"] if isinstance(result, Mapping) and "score" in result else result
            return Score(value=finite_reward(scored, waited_for), waiting_s=waiting_s, waited_for=waited_for)
        score = await self._call_function(played.transcript() | {"answer": result}, played, attempt)
        return Score(value=score.value, waiting_s=waiting_s + score.waiting_s, waited_for=waited_for)

    def missing(self, environment: Environment) -> str:
        if isinstance(environment, HasEvidence):
            return ""
        problem = f"{type(environment).__name__} has no `def evidence(self)`"
        return f"kind = 'model' needs an environment with evidence for it: {problem}"

    def _scorer_name(self, played: PlayedTrajectory) -> str:
        return f"service {self._settings.service}"


class TeacherReward(_RemoteReward):
    """The environment's reward, and a teacher's score of each token."""

    async def _score_once(self, played: PlayedTrajectory, attempt: int) -> Score:
        value, source = finite_reward(played.total, "the environment"), self._scorer_name(played)
        tokens: list[int] = []
        at: list[int] = []
        for turn in played.turns:
            tokens += turn.observation_tokens
            at += range(len(tokens), len(tokens) + len(turn.tokens))
            tokens += turn.tokens
        if not at:
            return Score(value=value, teacher_logprobs=())
        result, waiting_s = await self._call_service(
            {"tokens": tokens, "at": at, "temperature": played.temperature}, played
        )
        values = result.get("logprobs") if isinstance(result, Mapping) else None
        if not isinstance(values, list) or len(values) != len(at):
            shown = repr(result)[:SHOWN_CHARACTERS]
            raise RewardFailed(f"{source}: expected `logprobs` of {len(at)} tokens, got {shown}")
        logprobs = tuple(finite_reward(value, source) for value in values)
        behaviour = math.fsum(logprob for turn in played.turns for logprob in turn.logprobs)
        # KL divergence of the sampling policy from the teacher, over this trajectory (k1). The metric `kl_teacher` of a
        # step is that of the trained policy, over the batch.
        kl_per_token = (behaviour - math.fsum(logprobs)) / len(at)
        return Score(
            value=value,
            metrics={"teacher_kl": kl_per_token},
            waiting_s=waiting_s,
            waited_for=source,
            teacher_logprobs=logprobs,
        )

    def _scorer_name(self, played: PlayedTrajectory) -> str:
        return f"service {self._settings.service}"


# ---- numbers and functions ----


def finite_reward(value: Any, source: str) -> float:
    """Raises RewardFailed for anything but a finite number, with its value."""
    try:
        number = float(value) if not isinstance(value, str | bytes | bytearray) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        shown = repr(value)[:SHOWN_CHARACTERS]
        raise RewardFailed(f"{source}: expected a finite number as a reward, got {shown}")
    return number


def _function_of(settings: RewardSettings) -> Function[..., Any]:
    """Returns the named function, with the timeout of the settings if that is shorter. Raises InvalidConfig."""
    named = imported(settings.function, "reward.function")
    if not isinstance(named, Function):
        if not callable(named):
            raise InvalidConfig("reward.function", settings.function, "a function, or what @tangram.function() made")
        return function(timeout_s=settings.timeout_s)(named)
    limited = copy.copy(named)
    limited.timeout_s = settings.timeout_s if named.timeout_s is None else min(named.timeout_s, settings.timeout_s)
    return limited
