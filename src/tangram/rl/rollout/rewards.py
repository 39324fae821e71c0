"""Rewards: what a trajectory that was played to its end is worth, found out in the way that the settings choose.

Owns the retries. Never plays. Promises that a score is a finite number which says how well the agent did: what the
agent did badly (tests that fail, code that hangs or uses up its memory) is a score, and what our side did badly (an
action that was lost, refused or late, a service that is gone, a function that raised) is tried again and then
RewardFailed, never a score of 0.

    kind          who says it                                      what the environment offers for it
    environment   the environment, by the rewards of its steps     nothing
    function      a function, as an action that scales from zero   nothing; the function gets the transcript
    command       a command in a sandbox: 1 if it exits with 0     async def verdict(timeout_s) -> Result or Verdict
    model         a model service: its `score`                     def evidence() -> payload, or None: nothing to judge
    teacher       the environment; a model service says of each    nothing
                  token of the policy how likely it is

A function beside `command` or `model` makes the number of their answer instead.

What a teacher says is no score: it is what a policy is distilled by, token by token. The score beside it is what the
environment pays, so that the curves of a distillation are those of the task, from the same least to the same most, and
can be laid over those of a policy that learned by rewards. How far policy and teacher are apart is the metric
`teacher_kl`: the mean over the tokens of what their log-probabilities differ by, an estimate of the divergence that is
minimised, in nats; it falls to 0.
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
from tangram.client.result import Timing
from tangram.core.action import Status
from tangram.errors import InvalidConfig, InvalidInput, ManagerError, TangramError
from tangram.managers.http import pause_s
from tangram.managers.models.torch_engine import imported
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments.protocol import Environment, Outside
from tangram.rl.rollout.records import Turn

BACKOFF_S, BACKOFF_S_MAX = 0.2, 5.0
"""Before the first retry, doubled before each that follows, less a part by chance."""
SHOWN_CHARACTERS = 300
"""Of a value or a reason, in an error."""
AT_ONCE = Timing(waiting_s=0.0, execution_s=0.0, overhead_s=0.0)


class RewardFailed(TangramError):
    """No reward could be had. It says nothing of the agent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that was played to its end, and has no reward yet."""

    id: str
    task: str
    seed: int
    turns: tuple[Turn, ...]
    observation: str = ""
    """What the environment said last."""
    total: float
    """Of the rewards of the steps."""
    metrics: dict[str, float] = {}
    """Of the environment."""
    temperature: float = 1.0
    """With which its tokens were drawn."""
    environment: Environment
    """Not closed yet."""
    outside: Outside

    def transcript(self) -> dict[str, Any]:
        """What a function is given: plain values, without tokens."""
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
    """What it is worth."""

    value: float
    metrics: dict[str, float] = {}
    waiting_s: float = 0.0
    """Of the time that it took, what passed in a queue."""
    waited_for: str = ""
    """What was short meanwhile, as it is called."""
    teacher_logprobs: tuple[float, ...] | None = None
    """Of the policy's own tokens, in order, as a teacher gives them; None if none was asked."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a command found out. The `Result` of a command is as good: it has all of this but metrics."""

    status: Status
    reason: str = ""
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    timing: Timing = AT_ONCE
    metrics: dict[str, float] = {}


class Reward(Protocol):
    async def score(self, played: Played) -> Score:
        """Raises RewardFailed."""
        ...


@runtime_checkable
class Decided(Protocol):
    """An environment that a command decides about."""

    async def verdict(self, timeout_s: float) -> Any:
        """A Result or a Verdict. What it raises, and what was lost, refused or cancelled, is asked for again: so it can
        be asked for more than once. `timeout_s` is that of the command, from its start: what takes longer hangs, and
        is the agent's."""
        ...


@runtime_checkable
class Judged(Protocol):
    """An environment that a model decides about."""

    def evidence(self) -> Any:
        """What the service is asked. None: the agent gave it nothing to judge, which is worth 0."""
        ...


def make_reward(settings: RewardSettings, client: Client | None) -> Reward:
    """Raises InvalidConfig. What is usual for a task, `settings_for` knows."""
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


def settings_for(task: object, settings: RewardSettings) -> RewardSettings:
    """With a kind: that which the task calls its `usual_reward`, unless the settings name one."""
    if settings.kind != "usual":
        return settings
    usual: RewardSettings = getattr(task, "usual_reward", RewardSettings(kind="environment"))
    return msgspec.structs.replace(usual, timeout_s=settings.timeout_s, retries=settings.retries)


def in_words(settings: RewardSettings) -> str:
    """Who says it, of settings with a kind."""
    who: list[str] = [settings.kind]
    who += [f"of service {settings.service}"] if settings.service else []
    who += [f"by {settings.function}"] if settings.function else []
    return " ".join(who)


def missing_for(reward: Reward, environment: Environment) -> str:
    """What such a reward needs of this environment and does not find; nothing, if it can be had."""
    missing: str = getattr(reward, "missing", lambda _: "")(environment)
    return missing


# ---- the kinds --------------------------------------------------------------------------------------------------


class EnvironmentReward:
    """What the steps paid."""

    async def score(self, played: Played) -> Score:
        return Score(value=number_of(played.total, "the environment"))


class _Unsettled(Exception):
    """A try that brought nothing, by no fault of the agent; another may."""


class _Asking(ABC):
    """A reward that somebody is asked for, by actions that may be lost."""

    def __init__(self, settings: RewardSettings, client: Client, scorer: Function[..., Any] | None) -> None:
        self._settings = settings
        self._client = client
        self._scorer = scorer

    async def score(self, played: Played) -> Score:
        why = ""
        for attempt in range(self._settings.retries + 1):
            if attempt:
                await asyncio.sleep(pause_s(attempt, BACKOFF_S, BACKOFF_S_MAX))
            try:
                return await self._ask(played, attempt)
            except RewardFailed:
                raise
            except InvalidInput as error:
                raise RewardFailed(f"{self._whom(played)}: {error}") from error
            except Exception as error:
                # Whatever is raised here, an environment or a client raised it: it cannot be the agent's.
                why = str(error) if isinstance(error, _Unsettled | TangramError) else f"{type(error).__name__}: {error}"
        tries = f"{attempt + 1} tries" if attempt else "one try"
        raise RewardFailed(f"{self._whom(played)}: no reward after {tries}: {why[-SHOWN_CHARACTERS:]}")

    @abstractmethod
    async def _ask(self, played: Played, attempt: int) -> Score:
        """Raises RewardFailed if another try cannot help, and anything else if it may."""

    @abstractmethod
    def _whom(self, played: Played) -> str: ...

    async def _call(self, transcript: dict[str, Any], played: Played, attempt: int) -> Score:
        """Have the function make a number of it."""
        assert self._scorer is not None
        # The same transcript is scored once, however often it is asked for. A later try wants another answer.
        content = msgspec.msgpack.encode([transcript, attempt], enc_hook=repr)
        key = f"{played.outside.run}/{played.id}/{hashlib.sha256(content).hexdigest()[:16]}"
        result = await self._client.try_call(
            self._scorer, transcript, run=played.outside.run, trajectory=played.outside.trajectory, task=played.task,
            idempotency_key=key,
        )  # fmt: skip
        if not result.ok:
            raise _Unsettled(f"{result.kind}: {result.reason}")
        value = number_of(result.value, self._settings.function)
        return Score(value=value, waiting_s=result.timing.waiting_s, waited_for=f"function {self._settings.function}")

    async def _infer(self, payload: Any, played: Played) -> tuple[Any, float]:
        """What the service of the settings answers, and how long that waited."""
        inference = await self._client.infer(
            self._settings.service, payload, run=played.outside.run, trajectory=played.outside.trajectory,
            task=played.task, timeout_s=self._settings.timeout_s,
        )  # fmt: skip
        if not inference.ok:
            raise _Unsettled(f"{inference.status.value}: {inference.reason}")
        try:
            return inference.json(), inference.timing.waiting_s
        except ManagerError as error:
            raise RewardFailed(str(error)) from error


class FunctionReward(_Asking):
    """What a function makes of the transcript."""

    async def _ask(self, played: Played, attempt: int) -> Score:
        return await self._call(played.transcript(), played, attempt)

    def _whom(self, played: Played) -> str:
        return f"function {self._settings.function}"


class CommandReward(_Asking):
    """1 if the command of the environment exits with 0, and 0 if not; or what a function makes of it."""

    async def _ask(self, played: Played, attempt: int) -> Score:
        environment = played.environment
        if not isinstance(environment, Decided):
            raise RewardFailed(self.missing(environment))
        verdict = await environment.verdict(self._settings.timeout_s)
        status = verdict.status
        if status not in (Status.SUCCEEDED, Status.TIMED_OUT):
            raise _Unsettled(f"{status.value}: {verdict.reason}")
        metrics: dict[str, float] = dict(getattr(verdict, "metrics", {}))
        waiting_s, waited_for = verdict.timing.waiting_s, "cpu"
        if self._scorer is None:
            passed = status is Status.SUCCEEDED and verdict.exit_code == 0
            return Score(value=float(passed), metrics=metrics, waiting_s=waiting_s, waited_for=waited_for)
        answer = {"status": status.value, "exit_code": verdict.exit_code}
        answer |= {"stdout": verdict.stdout, "stderr": verdict.stderr}
        made = await self._call(played.transcript() | {"answer": answer}, played, attempt)
        return Score(value=made.value, metrics=metrics, waiting_s=waiting_s + made.waiting_s, waited_for=waited_for)

    def missing(self, environment: Environment) -> str:
        if isinstance(environment, Decided):
            return ""
        said = f"{type(environment).__name__} has no `async def verdict(self, timeout_s)`"
        return f"kind = 'command' needs an environment that runs one: {said}"

    def _whom(self, played: Played) -> str:
        return f"the command of {played.task}"


class ModelReward(_Asking):
    """What a model service says: a number, or one that it calls `score`; or what a function makes of it."""

    async def _ask(self, played: Played, attempt: int) -> Score:
        environment, settings = played.environment, self._settings
        if not isinstance(environment, Judged):
            raise RewardFailed(self.missing(environment))
        payload = environment.evidence()
        if payload is None:
            return Score(value=0.0)
        (answer, waiting_s), waited_for = await self._infer(payload, played), f"service {settings.service}"
        if self._scorer is None:
            scored = answer["score"] if isinstance(answer, Mapping) and "score" in answer else answer
            return Score(value=number_of(scored, waited_for), waiting_s=waiting_s, waited_for=waited_for)
        made = await self._call(played.transcript() | {"answer": answer}, played, attempt)
        return Score(value=made.value, waiting_s=waiting_s + made.waiting_s, waited_for=waited_for)

    def missing(self, environment: Environment) -> str:
        if isinstance(environment, Judged):
            return ""
        said = f"{type(environment).__name__} has no `def evidence(self)`"
        return f"kind = 'model' needs an environment that says what to ask it: {said}"

    def _whom(self, played: Played) -> str:
        return f"service {self._settings.service}"


class TeacherReward(_Asking):
    """What the environment paid, and what a teacher says of each token."""

    async def _ask(self, played: Played, attempt: int) -> Score:
        value, whom = number_of(played.total, "the environment"), self._whom(played)
        tokens: list[int] = []
        at: list[int] = []
        for turn in played.turns:
            tokens += turn.observation_tokens
            at += range(len(tokens), len(tokens) + len(turn.tokens))
            tokens += turn.tokens
        if not at:
            return Score(value=value, teacher_logprobs=())
        answer, waiting_s = await self._infer({"tokens": tokens, "at": at, "temperature": played.temperature}, played)
        said = answer.get("logprobs") if isinstance(answer, Mapping) else None
        if not isinstance(said, list) or len(said) != len(at):
            shown = repr(answer)[:SHOWN_CHARACTERS]
            raise RewardFailed(f"{whom}: expected `logprobs` of {len(at)} tokens, got {shown}")
        logprobs = tuple(number_of(each, whom) for each in said)
        behaviour = math.fsum(each for turn in played.turns for each in turn.logprobs)
        apart = (behaviour - math.fsum(logprobs)) / len(at)
        return Score(
            value=value, metrics={"teacher_kl": apart}, waiting_s=waiting_s, waited_for=whom, teacher_logprobs=logprobs
        )

    def _whom(self, played: Played) -> str:
        return f"service {self._settings.service}"


# ---- numbers and functions --------------------------------------------------------------------------------------


def number_of(value: Any, who: str) -> float:
    """Raises RewardFailed for what is no finite number, with the value."""
    try:
        number = float(value) if not isinstance(value, str | bytes | bytearray) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        shown = repr(value)[:SHOWN_CHARACTERS]
        raise RewardFailed(f"{who}: expected a finite number as a reward, got {shown}")
    return number


def _function_of(settings: RewardSettings) -> Function[..., Any]:
    """What is named, with the time limit of the settings where that is shorter. Raises InvalidConfig."""
    named = imported(settings.function, "reward.function")
    if not isinstance(named, Function):
        if not callable(named):
            raise InvalidConfig("reward.function", settings.function, "a function, or what @tangram.function() made")
        return function(timeout_s=settings.timeout_s)(named)
    limited = copy.copy(named)
    limited.timeout_s = settings.timeout_s if named.timeout_s is None else min(named.timeout_s, settings.timeout_s)
    return limited
