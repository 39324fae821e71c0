"""Rewards: what the agent did badly is a number, what our side did badly is never one."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.rl.environments.outside import cancelled_at, connection

from tangram import Client, Emulated, Service, Status
from tangram.client.models import Inference
from tangram.errors import ActionLost, AdmissionRefused, InvalidConfig, ManagerError
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments.protocol import ExternalResources, Step, Verdict
from tangram.rl.rollout import rewards as reward_module
from tangram.rl.rollout.rewards import (
    CommandReward,
    EnvironmentReward,
    FunctionReward,
    ModelReward,
    PlayedTrajectory,
    RewardFailed,
    Score,
    effective_settings,
    finite_reward,
    make_reward,
)
from tangram.rl.trajectories.trajectory import Turn

TURN = Turn(
    observation="ask", observation_tokens=(1,), action="say this", tokens=(2,), logprobs=(0.0,), versions=(0,)
)  # fmt: skip


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_module, "BACKOFF_S", 0.001)


class Plain:
    """An environment that offers nothing."""

    async def reset(self, seed: int) -> str:
        return ""

    async def step(self, action: str) -> Step:
        return Step(observation="")

    async def close(self) -> None:
        pass


class Deciding(Plain):
    """Gives verdicts, one after the other; an exception is raised."""

    def __init__(self, *verdicts: Any) -> None:
        self._left = list(verdicts)
        self.asked: list[float] = []

    async def verdict(self, timeout_s: float) -> Any:
        self.asked.append(timeout_s)
        answer = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Showing(Plain):
    def __init__(self, evidence: Any) -> None:
        self._evidence = evidence

    def evidence(self) -> Any:
        return self._evidence


def played(environment: Any = None, client: Client | None = None, **options: Any) -> PlayedTrajectory:
    fields: dict[str, Any] = dict(id="t/0/0.0", task="t", seed=0, turns=(TURN,), total=0.25)
    resources = ExternalResources(client=client, run="rl", trajectory="t/0/0.0")
    return PlayedTrajectory(**fields | options, environment=environment or Plain(), resources=resources)


def connected(folder: Path, test: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with connection(folder, "process", **options) as client:
            await test(client)

    asyncio.run(main())


PASSED = Verdict(status=Status.SUCCEEDED, exit_code=0)
LOST = Verdict(status=Status.LOST, reason="the node is gone")


class Answers:
    """In the place of a client: what `infer` brings, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self._left = list(answers)
        self.calls = 0

    def require_service(self, name: str) -> None:
        """It has any."""

    async def infer(self, service: str, payload: Any, **_: Any) -> Inference:
        self.calls += 1
        answer = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, bytes):
            return Inference(service=service, status=Status.SUCCEEDED, answer=answer)
        return Inference(service=service, status=answer, reason="because")


def score(reward: Any, ended: PlayedTrajectory) -> Score:
    async def main() -> Score:
        score: Score = await reward.score(ended)
        return score

    return asyncio.run(main())


def why_failed(reward: Any, ended: PlayedTrajectory) -> str:
    with pytest.raises(RewardFailed) as raised:
        score(reward, ended)
    assert str(raised.value) == raised.value.reason
    return raised.value.reason


# ---- numbers ----


@pytest.mark.parametrize(("value", "number"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (-3, -3.0), (10**15, 1e15)])
def test_a_number_is_a_reward(value: Any, number: float) -> None:
    assert finite_reward(value, "x") == number


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1.0", b"1", [], {}, 10**400, object])
def test_what_is_no_finite_number_is_named(value: Any) -> None:
    with pytest.raises(RewardFailed) as raised:
        finite_reward(value, "the function")
    assert raised.value.reason.startswith("the function: expected a finite number as a reward, got ")
    assert repr(value)[:20] in raised.value.reason


# ---- which one ----


def test_the_settings_choose_the_kind(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        named = "tests.rl.scorers:told"
        for settings, kind in (
            (RewardSettings(kind="environment"), EnvironmentReward),
            (RewardSettings(kind="function", function=named), FunctionReward),
            (RewardSettings(kind="command"), CommandReward),
            (RewardSettings(kind="command", function=named), CommandReward),
        ):
            assert type(make_reward(settings, client)) is kind

    connected(tmp_path, test)
    assert type(make_reward(RewardSettings(kind="model", service="judge"), Answers(b"1"))) is ModelReward
    with pytest.raises(InvalidConfig, match="a client, as"):
        make_reward(RewardSettings(kind="command"), None)


@pytest.mark.parametrize(
    ("named", "why"),
    [("tests.rl.nosuch:told", "there is no tests.rl.nosuch"), ("tests.rl.scorers:nosuch", "which has no nosuch"),
     ("tests.rl.scorers:NOT_A_FUNCTION", "a function, or"), ("told", "'module:name'")],
)  # fmt: skip
def test_a_missing_function_is_reported_before_anything_is_played(tmp_path: Path, named: str, why: str) -> None:
    async def test(client: Client) -> None:
        with pytest.raises(InvalidConfig, match=why):
            make_reward(RewardSettings(kind="function", function=named), client)

    connected(tmp_path, test)


def test_a_task_may_have_a_usual_reward_and_the_settings_have_the_last_word() -> None:
    class Task:
        usual_reward = RewardSettings(kind="command")

    assert effective_settings(Task, RewardSettings()).kind == "command"
    settings = RewardSettings(kind="model", service="judge")
    assert effective_settings(Task, settings) is settings
    assert effective_settings(Plain, RewardSettings()).kind == "environment"


@pytest.mark.parametrize(
    ("key", "kind", "instead"),
    [("function", "usual", "function"), ("function", "environment", "function"), ("service", "usual", "model"),
     ("service", "command", "model")],
)  # fmt: skip
def test_what_a_kind_of_reward_would_ignore_is_refused(key: str, kind: Any, instead: str) -> None:
    with pytest.raises(
        InvalidConfig, match=f'kind = "{instead}".* beside it: kind = "{kind}" does not use it'
    ) as wrong:
        RewardSettings(kind=kind, **{key: "my:reward"})
    assert wrong.value.field == key


def test_what_the_steps_paid_is_the_reward_of_the_environment() -> None:
    assert score(EnvironmentReward(), played()).value == 0.25
    assert "got nan" in why_failed(EnvironmentReward(), played(total=math.nan))


# ---- functions ----


def test_functions_plain_or_declared_get_the_transcript(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        plain = make_reward(RewardSettings(kind="function", function="tests.rl.scorers:length"), client)
        score = await plain.score(played(client=client))
        assert score.value == 2.0 and score.waited_for == "function tests.rl.scorers:length"
        declared = make_reward(RewardSettings(kind="function", function="tests.rl.scorers:told"), client)
        for said, value in (("number 0.75", 0.75), ("number -2", -2.0), ("true", 1.0)):
            assert (await declared.score(played(client=client, observation=said))).value == value

    connected(tmp_path, test)


def test_a_function_that_returns_no_number_fails_at_once_and_the_value_is_named(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        settings = RewardSettings(kind="function", function="tests.rl.scorers:told", retries=5)
        reward = make_reward(settings, client)
        for said, named in (("number nan", "nan"), ("number inf", "inf"), ("text good", "'good'"), ("nothing", "None")):
            with pytest.raises(RewardFailed, match=f"expected a finite number as a reward, got {named}"):
                await reward.score(played(client=client, observation=said))

    connected(tmp_path, test)


def test_a_function_that_raises_dies_or_hangs_is_no_reward_of_zero(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        for said, why, timeout_s in (
            ("raise", "2 tries: error: .*of no use", 60.0),
            ("die", "2 tries: error: ", 60.0),
            ("hang", "timed_out", 0.5),
        ):
            settings = RewardSettings(kind="function", function="tests.rl.scorers:told", retries=1, timeout_s=timeout_s)
            reward = make_reward(settings, client)
            with pytest.raises(RewardFailed, match=why):
                await reward.score(played(client=client, observation=said))

    connected(tmp_path, test)


def test_a_function_that_fails_once_is_called_again(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        settings = RewardSettings(kind="function", function="tests.rl.scorers:told", retries=1)
        action = f"second {tmp_path / 'was-here'}"
        assert (await make_reward(settings, client).score(played(client=client, observation=action))).value == 0.5

    connected(tmp_path, test)


def test_one_transcript_is_scored_once_and_another_of_the_same_id_again(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        reward = make_reward(RewardSettings(kind="function", function="tests.rl.scorers:told"), client)
        one, other = (f"count {tmp_path / name}" for name in ("one", "other"))
        await asyncio.gather(*(reward.score(played(client=client, observation=one)) for _ in range(5)))
        await reward.score(played(client=client, observation=other))

    connected(tmp_path, test)
    assert (tmp_path / "one").read_text() == (tmp_path / "other").read_text() == "called\n"


# ---- commands ----


@pytest.mark.parametrize(
    ("verdict", "value"),
    [(PASSED, 1.0), (Verdict(status=Status.SUCCEEDED, exit_code=1), 0.0), (Verdict(status=Status.TIMED_OUT), 0.0),
     (Verdict(status=Status.SUCCEEDED, exit_code=137), 0.0)],
)  # fmt: skip
def test_what_the_code_of_the_agent_does_is_a_reward(verdict: Verdict, value: float) -> None:
    environment = Deciding(verdict)
    reward = CommandReward(RewardSettings(kind="command", timeout_s=7.0), Answers(), None)  # type: ignore[arg-type]
    assert score(reward, played(environment)).value == value
    assert environment.asked == [7.0], "it is asked once"


@pytest.mark.parametrize(
    "passing",
    [LOST, Verdict(status=Status.REFUSED, reason="the queue is full"), Verdict(status=Status.CANCELLED),
     ManagerError("no sandbox"), ActionLost("lost", None), AdmissionRefused("queue_max", "full"), OSError("odd")],
)  # fmt: skip
def test_what_our_side_does_is_tried_again_and_then_no_reward(passing: Any) -> None:
    reward = CommandReward(RewardSettings(kind="command", retries=2), Answers(), None)  # type: ignore[arg-type]
    assert score(reward, played(Deciding(passing, passing, PASSED))).value == 1.0
    environment = Deciding(passing)
    assert why_failed(reward, played(environment)).startswith("the command of t: no reward after 3 tries: ")
    assert len(environment.asked) == 3


def test_without_retries_the_first_failure_is_the_last() -> None:
    reward = CommandReward(RewardSettings(kind="command", retries=0), Answers(), None)  # type: ignore[arg-type]
    assert why_failed(reward, played(Deciding(LOST))) == (
        "the command of t: no reward after one try: lost: the node is gone"
    )


def test_a_mistake_is_not_repeated() -> None:
    environment = Deciding(InvalidConfig("cpus", 9, "fewer"))
    reward = CommandReward(RewardSettings(kind="command", retries=5), Answers(), None)  # type: ignore[arg-type]
    assert "cpus: expected fewer" in why_failed(reward, played(environment))
    assert len(environment.asked) == 1
    assert "Plain has no `async def verdict" in why_failed(reward, played())


def test_the_result_of_a_command_is_a_verdict_and_a_function_may_read_it(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        class Running(Plain):
            async def verdict(self, timeout_s: float) -> Any:
                async with client.sandbox(memory="64MiB") as box:
                    return await box.exec("echo 0.125; exit 1", timeout_s=timeout_s)

        ended = played(Running(), client)
        assert (await make_reward(RewardSettings(kind="command"), client).score(ended)).value == 0.0
        read = make_reward(RewardSettings(kind="command", function="tests.rl.scorers:answered"), client)
        score = await read.score(ended)
        assert (score.value, score.waited_for) == (0.125, "cpu")

    connected(tmp_path, test)


# ---- models ----


def model(answers: Answers, **options: Any) -> ModelReward:
    return ModelReward(RewardSettings(kind="model", service="judge", **options), answers, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("answer", "value"), [(b"0.5", 0.5), (b'{"score": 1}', 1.0), (b'{"score": 0.0, "p": 9}', 0.0)])
def test_the_score_of_a_model_is_a_reward(answer: bytes, value: float) -> None:
    scored = score(model(Answers(answer)), played(Showing("x")))
    assert (scored.value, scored.waited_for) == (value, "service judge")


def test_an_empty_transcript_scores_zero_without_a_call() -> None:
    answers = Answers(b"1.0")
    assert score(model(answers), played(Showing(None))).value == 0.0
    assert answers.calls == 0


@pytest.mark.parametrize(
    "passing", [Status.LOST, Status.REFUSED, Status.TIMED_OUT, Status.CANCELLED, ManagerError("gone")]
)
def test_a_service_that_is_gone_is_called_again_and_then_there_is_no_reward(passing: Any) -> None:
    assert score(model(Answers(passing, passing, b"1")), played(Showing("x"))).value == 1.0
    answers = Answers(passing)
    assert why_failed(model(answers, retries=3), played(Showing("x"))).startswith(
        "service judge: no reward after 4 tries"
    )
    assert answers.calls == 4


@pytest.mark.parametrize(
    ("answer", "why"),
    [(b"NaN", "got nan"), (b'{"score": "high"}', "got 'high'"), (b'{"other": 1}', "got {'other': 1}"),
     (b"<html>", "not JSON")],
)  # fmt: skip
def test_an_answer_that_is_no_number_fails_at_once(answer: bytes, why: str) -> None:
    answers = Answers(answer)
    assert why in why_failed(model(answers, retries=5), played(Showing("x")))
    assert answers.calls == 1


def test_an_environment_without_a_transcript_and_an_invalid_service_are_errors(tmp_path: Path) -> None:
    assert "Plain has no `def evidence(self)`" in why_failed(model(Answers(b"1")), played())

    async def test(client: Client) -> None:
        with pytest.raises(InvalidConfig, match=r"reward\.service: .* this connection has none, got 'nosuch'"):
            make_reward(RewardSettings(kind="model", service="nosuch"), client)

    connected(tmp_path, test)


ENGINE = """
import json, os
from tangram.managers.models.engine import Engine, Piece, Weights, place

class Sharing(Engine):
    batch_max = 4

    def prepare(self):
        return Weights([Piece("one", memoryview(bytes(8)))])

    def load(self, weights, devices):
        [(block, [piece])] = place(weights, devices)
        return memoryview(block.memory)[: piece.content.nbytes]

    def call(self, table, payloads):
        if any(b"die" in payload for payload in payloads):
            os._exit(1)
        return [json.dumps({"share": json.loads(payload)["share"]}).encode() for payload in payloads]

    def unload(self, table):
        table.release()
"""


def test_a_real_service_is_called_and_a_function_parses_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sharing_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)

    async def test(client: Client) -> None:
        settings = RewardSettings(kind="model", service="judge", function="tests.rl.scorers:answered", retries=0)
        reward = make_reward(settings, client)
        assert (await reward.score(played(Showing({"share": 0.05}), client))).value == 0.5
        with pytest.raises(RewardFailed, match="service judge: no reward after one try: lost"):
            await reward.score(played(Showing({"share": "die"}), client))
        assert (await reward.score(played(Showing({"share": 0.1}), client))).value == 1.0, "it is there again"

    service = Service(name="judge", engine="sharing_engine:Sharing")
    connected(tmp_path, test, services=[service], devices=[Emulated(memory_bytes=4096)])


# ---- cancelling ----


def test_cancelled_wherever_it_waits_a_reward_leaves_nothing(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        class Running(Plain):
            async def verdict(self, timeout_s: float) -> Any:
                async with client.sandbox(memory="64MiB") as box:
                    return await box.exec("exit 0", timeout_s=timeout_s)

        command = make_reward(RewardSettings(kind="command"), client)
        called = make_reward(RewardSettings(kind="function", function="tests.rl.scorers:length"), client)
        for reward in (command, called):
            for suspension in itertools.count(1):
                ended = played(Running(), client, id=f"t/0/{suspension}.0")
                if not await cancelled_at(reward.score(ended), suspension):
                    assert suspension > 1
                    break

    connected(tmp_path, test)
