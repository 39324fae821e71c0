"""codefix: in real sandboxes and plain processes; whatever code is edited in, nothing but right results is paid for."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest
from tests.rl.environments.outside import cancelled_at, connection, played, played_of, sandboxes

from tangram import Client, Status
from tangram.errors import InvalidConfig, ManagerError
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments import codefix, warm_test_sandboxes
from tangram.rl.environments.codefix import CORRECT, LINES, OPERATORS, SUITE_CASES, VISIBLE_CASES, CodeFix
from tangram.rl.environments.conformance import check
from tangram.rl.environments.protocol import ExternalResources
from tangram.rl.rollout.rewards import effective_settings, make_reward
from tangram.rl.trajectories.codec import WordCodec

SEED = 14
"""The demonstration for a file whose first line, `div`, multiplies."""

both = pytest.mark.parametrize("backend", ["sandbox", "process"])


async def score(client: Client, environment: CodeFix) -> float:
    reward = make_reward(effective_settings(CodeFix, RewardSettings()), client)
    return (await reward.score(played_of(environment, [], 0, client))).value


async def opened(client: Client, seed: int = SEED) -> CodeFix:
    environment = CodeFix(ExternalResources(client=client, run="rl", trajectory="codefix/0/0.0"))
    await environment.reset(seed)
    return environment


# ---- the episode ----


def test_the_shown_cases_distinguish_any_two_operators() -> None:
    compute = dict(CORRECT.values())
    for one, other in itertools.combinations(OPERATORS, 2):
        assert any(compute[one](*case) != compute[other](*case) for case in VISIBLE_CASES), (one, other)
    assert set(VISIBLE_CASES) <= set(SUITE_CASES)
    results = {compute[each](*case) for each in OPERATORS for case in SUITE_CASES}
    assert results <= set(codefix.RESULTS), "each result is a word"
    assert WordCodec(CodeFix.words).size <= 60


@both
def test_the_expert_repairs_the_file_and_is_paid_by_the_suite(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        async with connection(tmp_path, backend) as client:
            for seed in range(3):
                environment = CodeFix(ExternalResources(client=client))
                ended, steps = await played(environment, "expert", seed, client)
                assert [(step.observation, step.done) for step in steps] == [("pass", True)]
                score = await make_reward(CodeFix.usual_reward, client).score(ended)
                assert score.value == ended.total == 1.0
                assert score.metrics["tests_passed"] == 1.0 and score.metrics["tests_cpus"] in (1.0, 2.0)
                assert score.waited_for == "cpu"
                await environment.close()

    asyncio.run(main())


def test_what_is_read_is_the_file_and_the_failing_case(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            environment = CodeFix(ExternalResources(client=client))
            observation = await environment.reset(SEED)
            assert observation == "L1 div * L2 max > L3 min < L4 sub - fail L1 div 4 3 want 1 got 12"
            codec = WordCodec(CodeFix.words)
            codec.encode_observation(observation, first=True)
            step = await environment.step("EDIT L1 -")
            assert step.observation == "L1 div - L2 max > L3 min < L4 sub - fail L1 div 3 4 want 0 got -1"
            assert (step.reward, step.done) == (0.0, False)
            assert "def div(a, b): return a - b\n" in environment.source()
            step = await environment.step("EDIT L2 no such thing")
            assert step.observation == "L1 div - L2 max ? L3 min < L4 sub - fail L1 div 4 3 want 1 got ?"
            codec.encode_observation(step.observation, first=False)
            await environment.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "action", ["", "EDIT", "EDIT L1", "EDIT L5 +", "edit L1 +", "EDIT L1 \x00", "EDIT L1 " + "+" * 201]
)
def test_what_is_no_edit_is_answered_and_costs_its_turn(tmp_path: Path, action: str) -> None:
    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            environment = await opened(client)
            source = environment.source()
            step = await environment.step(action)
            assert step.observation == "unknown L1 div * L2 max > L3 min < L4 sub -" and not step.done
            assert environment.source() == source
            step = await environment.step("EDIT L1 //")
            assert (step.observation, step.metrics) == ("pass", {"edits": 2.0})
            with pytest.raises(ValueError, match="the episode is over"):
                await environment.step("EDIT L1 //")
            await environment.close()

    asyncio.run(main())


def test_the_last_turn_ends_it_and_tests_that_fail_are_worth_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            environment = CodeFix(ExternalResources(client=client), turns=2)
            await environment.reset(SEED)
            assert not (await environment.step("EDIT L1 +")).done
            last = await environment.step("EDIT L1 -")
            assert last.done and last.reward == 0.0
            score = await make_reward(CodeFix.usual_reward, client).score(played_of(environment, [last], 0, client))
            assert score.value == 0.0 and 0.5 < score.metrics["tests_passed"] < 1.0
            await environment.close()

    asyncio.run(main())


def test_an_invalid_option_and_a_missing_client_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="codefix runs commands or calls: it needs a client"):
        CodeFix(ExternalResources())

    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            with pytest.raises(InvalidConfig, match="turns"):
                CodeFix(ExternalResources(client=client), turns=0)
            environment = CodeFix(ExternalResources(client=client), python="/nonexistent/python3")
            with pytest.raises(ManagerError, match="the option `python` names another one"):
                await environment.reset(0)
            await environment.close()

    asyncio.run(main())


def test_it_keeps_the_protocol(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            report = await check("codefix", outside=ExternalResources(client=client), episodes=4)
            assert report.ok, report.text()
            assert not [finding.name for finding in report.findings if finding.verdict == "skipped"]

    asyncio.run(main())


# ---- what hostile code gets of it ----

RIGHT_FILE = "".join(f"def {name}(a, b): return {OPERATORS[operator]}\n" for name, (operator, _) in CORRECT.items())
OS = "__import__('os')"
HOSTILE = {
    "prints that all is well": "if print('64 of 64 passed') or print('ok') else",
    "ends its process with 0": f"if {OS}._exit(0) else",
    "exits": "if exit(0) else",
    "kills the program that runs the tests": f"if {OS}.kill({OS}.getppid(), 9) else",
    "forks": f"+ {OS}.fork() *",
    "writes results of its own": f"+ {OS}.write(3, b'0 1\\n1 0\\n2 1\\n0 12\\n') *",
    "names every result that there is": (
        f"+ {OS}.write(3, b''.join(b'%d %d\\n' % (n, v) for n in range(64) for v in range(-3, 17))) *"
    ),
    "floods the output": f"+ {OS}.write(3, b'0 1\\n' * 100000) *",
    "repairs the file behind the edits": "if open('solution.py', 'w').write(open('right.py').read()) * 0 else",
    "deletes the file": f"if {OS}.path.exists('solution.py') and {OS}.unlink('solution.py') else",
    "replaces the program's own functions": "if vars(__import__('__main__')).update(cases=[]) else",
    "uses up its memory": "if bytearray(1 << 30) else",
    "returns what is equal to everything": "if 0 else type('E', (int,), {'__eq__': lambda *a: True})() or",
    "is no Python": "( [",
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_code_is_worth_nothing(tmp_path: Path, attack: str) -> None:
    """It may write, kill and fork whatever it likes: what is right is known outside of the sandbox alone."""

    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client:
            environment = await opened(client)
            [box] = sandboxes(client)
            await client.transport.files(box).write(box, "/work/right.py", RIGHT_FILE.encode(), mode=0o644)
            step = await environment.step(f"EDIT L1 {HOSTILE[attack]}")
            assert (step.reward, step.done) == (0.0, False), step.observation
            WordCodec(CodeFix.words).encode_observation(step.observation, first=False)
            again = await environment.step("EDIT L2 >")  # what it was: the tests are run once more
            assert (again.reward, again.done) == (0.0, False), again.observation
            assert await score(client, environment) == 0.0
            await environment.close()

    asyncio.run(main())


def test_memorized_shown_results_fail_the_suite(tmp_path: Path) -> None:
    by_heart = "* 0 + {(4, 3): 1, (3, 4): 0, (2, 2): 1}.get((a, b), 9) + 0 *"

    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            environment = await opened(client)
            step = await environment.step(f"EDIT L1 {by_heart}")
            assert (step.reward, step.done) == (1.0, True)
            assert await score(client, environment) == 0.0
            await environment.close()

    asyncio.run(main())


def test_the_verdict_sees_nothing_of_what_ran_before(tmp_path: Path) -> None:
    """A program that was left behind answers in place of the functions; the sandbox of the verdict has it not."""
    is_there = f"any(iter(lambda: {OS}.path.exists('left'), True))"  # returns when it is
    waits = f"if {OS}.fork() and not {is_there} else [open('left', 'w'), __import__('time').sleep(600)] and"

    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client:
            environment = await opened(client)
            await environment.step(f"EDIT L1 {waits}")
            [box] = sandboxes(client)
            assert await client.transport.files(box).read(box, "/work/left", bytes_max=100) == b""
            step = await environment.step("EDIT L1 //")
            assert step.reward == 1.0, "what it left does not keep it from being repaired"
            before = sandboxes(client)
            verdict = await environment.verdict(30.0)
            assert (verdict.status, verdict.exit_code, verdict.stdout) == (Status.SUCCEEDED, 0, "64 of 64 passed")
            assert len(before) == 1 and sandboxes(client) == [], "both are closed"
            await environment.close()

    asyncio.run(main())


def test_code_that_hangs_is_shown_to_the_agent_and_scores_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client:
            environment = await opened(client)
            monkeypatch.setattr(codefix, "TESTS_S_MAX", 0.5)
            step = await environment.step("EDIT L1 if __import__('time').sleep(600) else")
            assert step.observation.endswith("got hangs") and not step.done
            verdict = await environment.verdict(30.0)
            assert (verdict.status, verdict.exit_code) == (Status.TIMED_OUT, 1)
            assert await score(client, environment) == 0.0
            await environment.close()

    asyncio.run(main())


# ---- what is left of it ----


@both
@pytest.mark.parametrize("what", ["reset", "step", "verdict"])
def test_cancelled_wherever_it_waits_no_sandbox_is_left(tmp_path: Path, backend: str, what: str) -> None:
    async def main() -> None:
        async with connection(tmp_path, backend) as client:
            for suspension in itertools.count(1):
                environment = CodeFix(ExternalResources(client=client))
                if what != "reset":
                    await environment.reset(0)
                doing = {
                    "reset": lambda it=environment: it.reset(0),
                    "step": lambda it=environment: it.step("EDIT L1 //"),
                    "verdict": lambda it=environment: it.verdict(30.0),
                }[what]()
                was_cancelled = await cancelled_at(doing, suspension)
                await environment.close()
                assert sandboxes(client) == [], f"cancelled at suspension {suspension}"
                if not was_cancelled:
                    assert suspension > 1
                    return

    asyncio.run(main())


def test_closing_can_be_cancelled_and_still_closes(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client:
            for suspension in itertools.count(1):
                environment = await opened(client)
                was_cancelled = await cancelled_at(environment.close(), suspension)
                assert sandboxes(client) == [], f"cancelled at suspension {suspension}"
                if not was_cancelled:
                    return

    asyncio.run(main())


def test_verdicts_wait_for_memory_without_holding_any(tmp_path: Path) -> None:
    """There is room for two sandboxes only, and two episodes want a verdict at once."""

    async def main() -> None:
        async with connection(tmp_path, "process") as client:
            environments = [CodeFix(ExternalResources(client=client), memory="512MiB") for _ in range(2)]
            await asyncio.gather(*(environment.reset(seed) for seed, environment in enumerate(environments)))
            verdicts = await asyncio.gather(*(environment.verdict(30.0) for environment in environments))
            assert [verdict.exit_code for verdict in verdicts] == [1, 1]
            for environment in environments:
                await environment.close()

    asyncio.run(main())


def test_the_agents_have_the_knowledge_that_they_declare() -> None:
    observation = "L1 div * L2 max > L3 min < L4 sub - fail L1 div 4 3 want 1 got 12"
    make = CodeFix.agents
    assert make["expert"](random.Random(0)).act(observation) == "EDIT L1 //"
    teacher, guess = make["teacher"](random.Random(0)), make["random"](random.Random(0))
    assert {teacher.act(observation) for _ in range(200)} == {f"EDIT L1 {each}" for each in OPERATORS}
    assert len({guess.act(observation) for _ in range(2000)}) == len(LINES) * len(OPERATORS)
    assert teacher.act(f"unknown {observation}").startswith("EDIT L1 ")


# ---- warm sandboxes ----


def test_within_prepare_a_sandbox_is_kept_while_all_that_ran_in_it_was_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client, CodeFix.prepare(client):
            sandbox_ids = set()
            for seed in range(3):
                environment = CodeFix(ExternalResources(client=client, run="rl", trajectory=f"codefix/{seed}/0.0"))
                ended, _ = await played(environment, "expert", seed, client)
                scored = await make_reward(CodeFix.usual_reward, client).score(ended)
                assert scored.value == 1.0
                await environment.close()
                sandbox_ids.update(sandboxes(client))
            assert len(sandbox_ids) == 1 and sandboxes(client) == list(sandbox_ids), (
                "the same one for all, and for their verdicts"
            )
            environment = await opened(client)
            await environment.step("EDIT L1 if 0 else")
            [before] = sandboxes(client)
            assert before in sandbox_ids
            assert await score(client, environment) == 0.0
            assert before not in sandboxes(client), "it is not reused"
            await environment.close()
            assert sandboxes(client) == []

    asyncio.run(main())


@pytest.mark.parametrize("text", ["found", "> //", "found found", "'" * 3, "(" * 199, "0 if " * 39])
def test_what_does_not_compile_runs_nothing_and_costs_no_sandbox(tmp_path: Path, text: str) -> None:
    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client, CodeFix.prepare(client):
            environment = await opened(client)
            [before] = sandboxes(client)
            step = await environment.step(f"EDIT L1 {text}")
            assert (step.reward, step.done) == (0.0, False) and " ? " in step.observation
            assert step.observation.endswith("got ?")
            assert await score(client, environment) == 0.0
            assert sandboxes(client) == [before]
            await environment.close()

    asyncio.run(main())


@pytest.mark.parametrize(("text", "got"), [("+ -", "3 4 want 0 got -1"), ("> -", "3 4 want 0 got 1")])
def test_several_operators_are_all_our_own_text(tmp_path: Path, text: str, got: str) -> None:
    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client, CodeFix.prepare(client):
            environment = await opened(client)
            [before] = sandboxes(client)
            step = await environment.step(f"EDIT L1 {text}")
            assert step.observation.endswith(f"fail L1 div {got}")
            await environment.close()
            assert sandboxes(client) == [before], "the next episode gets it"

    asyncio.run(main())


def test_untrusted_code_runs_in_its_own_process(tmp_path: Path) -> None:
    """The program that stands ready is for known code alone: from the first unread line on it is not used."""
    tampers = f"if {OS}.system('kill -9 $(pgrep -f heard)') else"

    async def main() -> None:
        async with connection(tmp_path, "sandbox") as client, CodeFix.prepare(client):
            environment = await opened(client)
            [before] = sandboxes(client)
            await environment.step(f"EDIT L1 {tampers}")
            step = await environment.step("EDIT L1 //")
            assert (step.observation, step.reward) == ("pass", 1.0), "known again, and still run apart"
            assert await score(client, environment) == 1.0
            assert before not in sandboxes(client), "no other episode gets it"
            await environment.close()

    asyncio.run(main())


def test_idle_warm_test_sandboxes_close_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(warm_test_sandboxes, "IDLE_S_MAX", 0.1)
        async with connection(tmp_path, "process") as client, CodeFix.prepare(client):
            environment = await opened(client)
            await environment.close()
            assert len(sandboxes(client)) == 1
            while sandboxes(client):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_cancelled_run_leaves_no_warm_test_sandbox_for_reuse(tmp_path: Path) -> None:
    async def main() -> None:
        async with connection(tmp_path, "process") as client, CodeFix.prepare(client):
            for suspension in itertools.count(1):
                environment = await opened(client)
                was_cancelled = await cancelled_at(environment.step("EDIT L1 -"), suspension)
                await environment.close()
                after = await opened(client)
                assert (await after.step("EDIT L1 //")).reward == 1.0, f"after one at suspension {suspension}"
                await after.close()
                if not was_cancelled:
                    return

    asyncio.run(main())
