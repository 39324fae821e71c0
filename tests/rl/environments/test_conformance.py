"""The conformance check, tried on tasks that break one promise each."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from fractions import Fraction
from typing import Any, ClassVar

import msgspec
import pytest

from tangram.errors import InvalidConfig
from tangram.rl.environments import calls, conformance_checks
from tangram.rl.environments.agents import RandomAgent
from tangram.rl.environments.conformance import ConformanceFinding, ConformanceReport, check
from tangram.rl.environments.conformance_checks import CHECKS
from tangram.rl.environments.protocol import ExternalResources, Step

DIGITS = tuple("0123456789")
TIMEOUT_S = 0.2
"""Of a call that hangs. Every other call of these tasks is over at once."""


class Parrot:
    """Shows three digits one by one, each of which must be repeated. It keeps every contract."""

    words: ClassVar[Any] = ("say", "wrong", "over", *DIGITS)
    turns_max: ClassVar[Any] = 3
    tokens_max: ClassVar[Any] = 2
    agents: ClassVar[Any] = {
        "random": lambda chance: RandomAgent(DIGITS, chance),
        "teacher": lambda chance: Echo(limit=1),
        "expert": lambda chance: Echo(limit=3),
    }

    def __init__(self, resources: ExternalResources, **options: Any) -> None:
        self.resources = resources
        self.options = options
        self.digits: list[str] = []

    async def reset(self, seed: int) -> str:
        chance = random.Random(f"parrot {seed}")
        self.digits = [chance.choice(DIGITS) for _ in range(3)]
        return f"say {self.digits[0]}"

    async def step(self, action: str) -> Step:
        if not self.digits:
            raise ValueError("the episode is over")
        right = action.strip() == self.digits.pop(0)
        if right and self.digits:
            return Step(observation=f"say {self.digits[0]}")
        self.digits = []
        return Step(observation="over" if right else "wrong", reward=float(right), done=True)

    async def close(self) -> None:
        self.digits = []


class Echo:
    """Answers correctly the given number of times."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def act(self, observation: str) -> str:
        self._left -= 1
        return observation.split()[-1] if self._left >= 0 else "say"


# ---- one broken promise each --------------------------------------------------------------------------------------


class WithoutTurns(Parrot):
    turns_max = None


class Upside(Parrot):
    reward_range = (1.0, 0.0)


class Raises(Parrot):
    async def step(self, action: str) -> Step:
        raise KeyError("page 7")


class AnswersATuple(Parrot):
    async def step(self, action: str) -> Step:
        return ("over", 1.0, True, {})  # type: ignore[return-value]


class ResetsToNothing(Parrot):
    async def reset(self, seed: int) -> str:
        return None  # type: ignore[return-value]


class Hangs(Parrot):
    async def step(self, action: str) -> Step:
        await asyncio.Event().wait()
        raise AssertionError


class CannotBeMade(Parrot):
    def __init__(self, resources: ExternalResources, **options: Any) -> None:
        raise InvalidConfig("size", 0, "more")


class ResetsByChance(Parrot):
    async def reset(self, seed: int) -> str:
        return await super().reset(int.from_bytes(os.urandom(6), "big"))


class StepsByChance(Parrot):
    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return Step(observation=step.observation, reward=random.SystemRandom().random(), done=step.done)


class RemembersTheLastEpisode(Parrot):
    number = itertools.count()

    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return Step(observation=str(next(self.number) % 10), reward=step.reward, done=step.done)


class SameForAll(Parrot):
    async def reset(self, seed: int) -> str:
        return await super().reset(0)


class SharesItsState(Parrot):
    shared: ClassVar[list[str]] = []

    async def reset(self, seed: int) -> str:
        first = await super().reset(seed)
        type(self).shared[:] = self.digits
        self.digits = type(self).shared
        return first

    async def close(self) -> None: ...


class SharesTheGlobalChance(Parrot):
    async def reset(self, seed: int) -> str:
        random.seed(seed)
        self.digits = ["", "", ""]
        return self._next()

    def _next(self) -> str:
        self.digits[0] = random.choice(DIGITS)
        return f"say {self.digits[0]}"

    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return step if step.done else Step(observation=self._next())


class TakesNumbersOnly(Parrot):
    async def step(self, action: str) -> Step:
        return await super().step(str(int(action) if action != "say" else 0))


class BreaksAfterGarbage(Parrot):
    async def step(self, action: str) -> Step:
        if action.strip() in self.words:
            return await super().step(action)
        self.digits = []
        return Step(observation="wrong")


class HangsOnMuch(Parrot):
    async def step(self, action: str) -> Step:
        await asyncio.sleep(len(action))
        return await super().step(action)


class RepeatsWhatItHeard(Parrot):
    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return step if step.observation != "wrong" else Step(observation=f"wrong {action}", done=True)


class SaysMore(Parrot):
    async def reset(self, seed: int) -> str:
        return f"please {await super().reset(seed)}"


class AgentSaysMore(Parrot):
    agents: ClassVar = {**Parrot.agents, "clown": lambda chance: RandomAgent(("honk",), chance)}


class HasNoRoom(Parrot):
    tokens_max = 1


class PaysNan(Parrot):
    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return Step(observation=step.observation, reward=float("nan") if step.done else 0.0, done=step.done)


class PaysTooMuch(Parrot):
    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return Step(observation=step.observation, reward=0.5 + step.reward, done=step.done)


class PaysNanForGarbage(Parrot):
    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return step if action.strip() else Step(observation="wrong", reward=float("inf"), done=True)


class MeasuresInWords(Parrot):
    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return msgspec.structs.replace(step, metrics={"mood": "fine"})  # type: ignore[dict-item]


class MeasuresGarbageInWords(Parrot):
    async def step(self, action: str) -> Step:
        step = await super().step(action)
        return step if action.strip() else msgspec.structs.replace(step, metrics={7: 1.0})  # type: ignore[dict-item]


class NeverEnds(Parrot):
    async def step(self, action: str) -> Step:
        return Step(observation="wrong")


class PaysAgain(Parrot):
    async def step(self, action: str) -> Step:
        return await super().step(action) if self.digits else Step(observation="over", reward=1.0, done=True)


class GoesOn(Parrot):
    async def step(self, action: str) -> Step:
        return await super().step(action) if self.digits else Step(observation="say 1")


class Stumbles(Parrot):
    async def step(self, action: str) -> Step:
        if not self.digits:
            self.digits.pop()
        return await super().step(action)


class ClosesOnce(Parrot):
    async def close(self) -> None:
        del self.digits


class ClosesWhatWasReset(Parrot):
    file: Any = None

    async def reset(self, seed: int) -> str:
        self.file = 3
        return await super().reset(seed)

    async def close(self) -> None:
        assert self.file is not None
        await super().close()


class NeedsItsClientToClose(Parrot):
    async def reset(self, seed: int) -> str:
        if self.resources.client is not None:
            self.resources.client.sandbox()
        return await super().reset(seed)

    async def close(self) -> None:
        if self.resources.client is not None:
            self.resources.client.sandbox()


class LeavesATask(Parrot):
    async def reset(self, seed: int) -> str:
        self.beat = asyncio.create_task(heartbeat())
        await asyncio.sleep(0)
        observation = await super().reset(seed)
        self.beat.cancel()
        return observation


class LeavesATaskOfItsStep(Parrot):
    async def step(self, action: str) -> Step:
        beat = asyncio.create_task(heartbeat())
        await asyncio.sleep(0)
        beat.cancel()
        return await super().step(action)


async def heartbeat() -> None:
    await asyncio.Event().wait()


class SwallowsCancel(Parrot):
    async def step(self, action: str) -> Step:
        try:
            for _ in range(10):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            pass
        return await super().step(action)


class CallsCancelAFailure(Parrot):
    async def reset(self, seed: int) -> str:
        try:
            for _ in range(10):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise OSError("reset was interrupted") from None
        return await super().reset(seed)


class IgnoresCancel(Parrot):
    async def step(self, action: str) -> Step:
        for _ in range(3):
            try:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                await asyncio.sleep(2 * TIMEOUT_S)
        return await super().step(action)


class Free(Parrot):
    async def step(self, action: str) -> Step:
        await super().step(action)
        self.digits = []
        return Step(observation="over", reward=1.0, done=True)


class TaughtTooWell(Parrot):
    agents: ClassVar = {**Parrot.agents, "teacher": Parrot.agents["expert"], "expert": Parrot.agents["teacher"]}


class Unsolved(Parrot):
    agents: ClassVar = {**Parrot.agents, "expert": Parrot.agents["random"]}


BROKEN: list[tuple[type[Parrot], str, str]] = [
    (WithoutTurns, "declared", "turns_max: a whole number, at least 1"),
    (Upside, "declared", "(1.0, 0.0)"),
    (Raises, "plays", "KeyError: 'page 7'; in step("),
    (AnswersATuple, "plays", "expected a Step, got ('over', 1.0, True, {})"),
    (ResetsToNothing, "plays", "expected the first observation as one text, got None"),
    (Hangs, "plays", "expected an answer within 0.2 s, got none"),
    (CannotBeMade, "plays", "size: expected more, got 0"),
    (ResetsByChance, "reset_repeats", "and then 'say"),
    (StepsByChance, "steps_repeat", "turn 0"),
    (RemembersTheLastEpisode, "steps_repeat", "turn 0"),
    (SameForAll, "seeds_differ", "20 seeds with the same first observation 'say"),
    (SharesItsState, "instances_apart", "turn 0"),
    (SharesTheGlobalChance, "instances_apart", "turn"),
    (TakesNumbersOnly, "garbage", "ValueError: invalid literal for int()"),
    (BreaksAfterGarbage, "garbage", "the episode is over"),
    (RepeatsWhatItHeard, "words", "'zxqj-unknown' in the observation after an unknown word"),
    (SaysMore, "words", "'please' in an observation: 'please say"),
    (AgentSaysMore, "words", "'honk' in agent clown"),
    (HasNoRoom, "tokens_fit", "2 tokens, the end included, of agent random"),
    (PaysNan, "rewards", "nan in turn"),
    (PaysTooMuch, "rewards", "for seed"),
    (PaysNanForGarbage, "rewards", "inf after nothing"),
    (MeasuresInWords, "metrics", "expected a number as metrics['mood'], got str, in turn 0 of seed"),
    (MeasuresGarbageInWords, "metrics", "got 7, in the answer to nothing"),
    (NeverEnds, "ends", "none of which was done"),
    (PaysAgain, "after_done", "done = True, reward 1"),
    (GoesOn, "after_done", "done = False, reward 0"),
    (Stumbles, "after_done", "IndexError: pop from empty list"),
    (ClosesOnce, "closes", "AttributeError"),
    (ClosesWhatWasReset, "closes", "AssertionError"),
    (NeedsItsClientToClose, "closes", "the service is lost"),
    (LeavesATask, "cancels", "heartbeat, 0.05 s after close"),
    (LeavesATaskOfItsStep, "cancels", "heartbeat, 0.05 s after close"),
    (SwallowsCancel, "cancels", "it went on to its end"),
    (CallsCancelAFailure, "cancels", "reset was interrupted"),
    (IgnoresCancel, "cancels", "it runs on after 0.2 s"),
    (Free, "random", "1.00"),
    (TaughtTooWell, "teacher", "1.00"),
    (Unsolved, "expert", "0.0"),
]
"""The tasks that break each contract, and the reported difference."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(conformance_checks, "TASK_END_S", 0.05)
    chance = random.getstate()
    yield
    random.setstate(chance)


def checked(task: Any, **options: Any) -> ConformanceReport:
    async def test() -> ConformanceReport:
        report = await check(task, timeout_s=TIMEOUT_S, **options)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "the check cleans up after what it checks"
        return report

    return asyncio.run(test())


def test_a_task_that_keeps_its_contract_passes() -> None:
    report = checked(Parrot)
    assert report.ok and not report.failed
    assert [finding.verdict for finding in report.findings] == ["ok"] * len(CHECKS), report.text()


@pytest.mark.parametrize(("task", "requirement", "actual"), BROKEN, ids=[task.__name__ for task, _, _ in BROKEN])
def test_a_broken_contract_is_detected_and_reported(task: type[Parrot], requirement: str, actual: str) -> None:
    report = checked(task)
    finding = report.finding(requirement)
    assert finding.verdict == "failed", report.text()
    assert actual in finding.actual
    assert finding.expected and finding.advice, "what was expected, what came and what to do"
    assert not report.ok and finding in report.failed


def test_every_promise_is_broken_by_some_task_above() -> None:
    assert {requirement for _, requirement, _ in BROKEN} == set(CHECKS)


@pytest.mark.parametrize(
    "task",
    [
        SaysMore,
        AgentSaysMore,
        HasNoRoom,
        SameForAll,
        PaysAgain,
        GoesOn,
        Stumbles,
        ClosesOnce,
        LeavesATask,
        SwallowsCancel,
    ],
)
def test_one_broken_promise_is_one_finding(task: type[Parrot]) -> None:
    assert len(checked(task).failed) == 1


def test_a_task_that_cannot_be_played_is_not_judged_further() -> None:
    report = checked(Raises)
    assert [finding.name for finding in report.failed] == ["plays"]
    assert {finding.verdict for finding in report.findings[2:]} == {"skipped"}
    assert report.finding("words").actual == "it can be checked once `plays` holds"


@pytest.mark.parametrize("hangs", [False, True])
def test_errors_of_close_are_reported_as_errors_of_close(hangs: bool) -> None:
    class Unclosed(Parrot):
        async def close(self) -> None:
            if hangs:
                await asyncio.sleep(3600.0)
            raise RuntimeError("the lock is gone")

    report = checked(Unclosed)
    (finding,) = report.failed
    assert finding.name == "closes" and finding.advice.startswith("release in close everything acquired")
    assert ("within 0.2 s" if hangs else "RuntimeError: the lock is gone") in finding.actual
    assert report.finding("plays").actual == "it can be checked once `closes` holds"


def test_a_check_reports_what_it_examined() -> None:
    findings: list[str] = []
    checked(Parrot, on_progress=lambda done, total, requirement: findings.append(f"{done} of {total}: {requirement}"))
    assert findings[:2] == [f"0 of {len(CHECKS)}: declared", f"1 of {len(CHECKS)}: plays"]
    assert len(findings) == len(CHECKS)


def test_an_action_that_takes_too_long_is_reported() -> None:
    class Slow(HangsOnMuch):
        async def step(self, action: str) -> Step:
            return await (super().step(action) if len(action) > 100 else Parrot.step(self, action))

    finding = checked(Slow).finding("garbage")
    assert finding.verdict == "failed" and "expected an answer within 0.2 s" in finding.actual


def test_a_step_that_ignores_cancellation_is_reported_and_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ENDING_S_MAX", 0.05)
    over = asyncio.Event()

    class Deaf(Parrot):
        async def step(self, action: str) -> Step:
            while not over.is_set():
                with suppress(asyncio.CancelledError):
                    await over.wait()
            return await super().step(action)

    async def test() -> ConformanceReport:
        report = await check(Deaf, timeout_s=0.05)
        over.set()
        return report

    finding = asyncio.run(test()).finding("plays")
    assert finding.verdict == "failed" and "expected an answer within 0.05 s" in finding.actual


def test_numbers_of_any_kind_are_rewards_and_metrics() -> None:
    class Measures(Parrot):
        async def step(self, action: str) -> Step:
            step = await super().step(action)
            return msgspec.structs.replace(step, reward=Fraction(step.reward), metrics={"left": len(self.digits)})

    assert checked(Measures).ok


def test_what_a_task_does_not_have_is_skipped_and_not_held_against_it() -> None:
    class Bare(Parrot):
        words = ()
        agents: ClassVar = {}

    report = checked(Bare)
    assert report.ok
    skipped = {finding.name: finding.actual for finding in report.findings if finding.verdict == "skipped"}
    assert set(skipped) == {"words", "tokens_fit", "random", "teacher", "expert"}
    assert skipped["expert"] == "it has no agent `expert`"


def test_a_task_with_an_external_reward_is_reported_as_such() -> None:
    class Judged(Parrot):
        reward_range = (0.0, 0.0)

        async def step(self, action: str) -> Step:
            step = await super().step(action)
            return Step(observation=step.observation, done=step.done)

    report = checked(Judged)
    assert report.ok and report.finding("expert").verdict == "skipped"
    assert checked(type("Silent", (Judged,), {"reward_range": (0.0, 1.0)})).finding("expert").verdict == "failed"


def test_a_declared_range_is_what_is_paid_and_what_shares_are_of() -> None:
    class Debt(Parrot):
        reward_range = (-2.0, 0.0)

        async def step(self, action: str) -> Step:
            step = await super().step(action)
            paid = 2.0 * (step.reward - 1.0) if step.done else 0.0
            return Step(observation=step.observation, reward=paid, done=step.done)

    assert checked(Debt).ok
    assert checked(type("Unsaid", (Debt,), {"reward_range": (0.0, 1.0)})).finding("rewards").verdict == "failed"


def test_options_reach_the_environment_and_each_environment_is_a_trajectory_of_its_own() -> None:
    made: list[Parrot] = []

    class Noted(Parrot):
        def __init__(self, resources: ExternalResources, **options: Any) -> None:
            super().__init__(resources, **options)
            made.append(self)

    assert checked(Noted, options={"size": 3}, resources=ExternalResources(run="mine", trajectory="t"), episodes=5).ok
    assert all(each.options == {"size": 3} and each.resources.run == "mine" for each in made)
    assert len({each.resources.trajectory for each in made}) == len(made)


def test_what_all_episodes_share_is_there_while_it_is_checked() -> None:
    lights = []

    class Hall(Parrot):
        @staticmethod
        @asynccontextmanager
        async def prepare(client: object) -> AsyncIterator[None]:
            lights.append("on")
            yield
            lights.append("off")

        async def reset(self, seed: int) -> str:
            assert lights == ["on"]
            return await super().reset(seed)

    assert checked(Hall).ok
    assert lights == ["on", "off"]


def test_a_failed_preparation_is_reported() -> None:
    class Dark(Parrot):
        @staticmethod
        @asynccontextmanager
        async def prepare(client: object) -> AsyncIterator[None]:
            raise OSError("no light")
            yield

    finding = checked(Dark).finding("plays")
    assert finding.verdict == "failed" and finding.actual == "OSError: no light"


def test_the_same_check_finds_the_same() -> None:
    def found(seed: int) -> list[ConformanceFinding]:
        return list(checked(Unsolved, seed=seed).findings)

    assert found(3) == found(3)


def test_all_that_was_opened_is_closed() -> None:
    opened: list[object] = []

    class Counted(RepeatsWhatItHeard):
        def __init__(self, resources: ExternalResources, **options: Any) -> None:
            super().__init__(resources, **options)
            opened.append(self)

        async def close(self) -> None:
            if self in opened:
                opened.remove(self)
            await super().close()

    assert not checked(Counted).ok
    assert opened == []


def test_an_invalid_name_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="did you mean chain"):
        checked("chian")


def test_the_text_names_what_is_broken_and_the_remedy() -> None:
    text = checked(SaysMore).text()
    assert ":SaysMore: 17 ok, 1 failed (20 episodes of each agent, seed 0" in text.split("\n")[0]
    lines = [line.strip() for line in text.split("\n")]
    at = next(number for number, line in enumerate(lines) if line.startswith("failed"))
    assert lines[at].split() == ["failed", "words", *CHECKS["words"][0].split()]
    assert lines[at + 1] == "expected: words of its vocabulary"
    assert lines[at + 2].startswith("got: 'please' in an observation")
    assert lines[at + 3].startswith("do: add it to `words`")
