"""codefix: a file of four functions, one with a wrong operator; edit it in a sandbox until its tests pass.

The name of a function implies the correct operator. The policy reads the file and the failing case of the last test
run, and writes one edit a turn:

    L1 add + L2 max < L3 div // L4 mul * fail L2 max 4 3 want 4 got 3
    EDIT L2 >

Each edit is written to the file in a real sandbox, where its tests run as one action of the trajectory. The episode
ends when they pass, or with the last turn. The environment itself rewards these few tests; the intended reward is
`verdict`: the whole suite as one elastic action, on one or two cores as the scheduler decides, called by a reward of
kind `command`.

An unknown operator is written to the file unchanged, and makes it untrusted code. So no output of a sandbox is trusted:
the test program is part of its command, not a file that could be patched; it reports the returned values, not whether
they are correct, and the expected values exist only outside. Code that writes to its output, kills it or imitates it
can only report values, and would need the correct ones. The verdict uses another sandbox, in which no code of the agent
ran, after the first one is released, so that an episode that waits for memory holds none.

A file with known operators only is trusted. Its tests run in a program that waits in the sandbox, and a sandbox that
ran only such code is clean: within `prepare` it is kept for the next episode or verdict
(environments/warm_test_sandboxes.py). A file that does not compile runs nothing. After the first untrusted line that
compiles, each run is a separate process, and the sandbox is closed on release.
"""

from __future__ import annotations

import operator
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec

from tangram.client.client import Client
from tangram.client.result import Result
from tangram.client.sandbox import Sandbox
from tangram.core.action import Status
from tangram.errors import ActionLost, InvalidConfig, ManagerError
from tangram.rl.config.rollout_settings import RewardSettings
from tangram.rl.environments.protocol import ExternalResources, MakeAgent, Step, Verdict
from tangram.rl.environments.warm_test_sandboxes import WarmSandbox, keep_warm, warm_sandboxes_of

LINES = ("L1", "L2", "L3", "L4")
"""Labels of the lines, one function each. Separate words: a small policy distinguishes them more easily than
numbers."""
OPERATORS: Mapping[str, str] = {
    "+": "a + b", "-": "a - b", "*": "a * b", "//": "a // b", ">": "a if a > b else b", "<": "a if a < b else b",
}  # fmt: skip
"""Python expression of each operator."""
CORRECT: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add), "sub": ("-", operator.sub), "mul": ("*", operator.mul),
    "div": ("//", operator.floordiv), "max": (">", max), "min": ("<", min),
}  # fmt: skip
"""By function name: the correct operator, and what it computes."""

ARGUMENTS = range(1, 5)
"""Arguments of the cases. No 0, because of division; and the results are few enough to be words."""
RESULTS = range(-3, 17)
"""All values that the operators return for them."""
VISIBLE_CASES = ((4, 3), (3, 4), (2, 2))
"""Cases of a test run; for any two operators at least one case differs."""
SUITE_CASES = tuple((a, b) for a in ARGUMENTS for b in ARGUMENTS)
"""Cases of the verdict."""

FILE = "solution.py"
PYTHON = "/usr/bin/python3"
"""The interpreter of the machine, which every sandbox can see."""
CANNOT_RUN = (126, 127)
"""Exit codes for a missing program, or one that cannot be executed."""
MEMORY, DISK, PROCESSES = "64MiB", "1MiB", 32
"""Limits of a sandbox: a few bare interpreters of 10 MiB each."""
TESTS_S_MAX = 10.0
"""Time limit of a test run, which takes a few hundredths of a second."""
SUITE_CPUS = (0.25, 2)
"""Cores of the verdict, which sees one or two. The minimum is small: among many small test runs a whole core is rarely
free, and waiting for it is not worth some milliseconds."""
VERDICT_PRIORITY = 1
"""Ending trajectories go before starting ones, because a group waits for its last verdict."""
OUTPUT_BYTES_MAX = 64 << 10
"""Output limit of a test run, which writes a few bytes per case."""
NUMBER_CHARACTERS_MAX = 4
"""Maximum characters of a case or its result."""
EDIT_CHARACTERS_MAX = 200
"""Longest text that an edit may write."""

RUNNER = f"""\
import os, sys
width, cases = int(sys.argv[1]), [line.split() for line in sys.stdin]
out, null = os.dup(1), os.open("/dev/null", os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
def play(part):
    space = {{"__name__": "solution"}}
    with open("{FILE}") as file:
        exec(compile(file.read(), "{FILE}", "exec"), space)
    for number in range(part, len(cases), width):
        name, a, b = cases[number]
        try:
            value = space[name](int(a), int(b))
        except Exception:
            continue
        if type(value) is int and abs(value) < 1000:
            os.write(out, b"%d %d\\n" % (number, value))
children = []
for part in range(width):
    child = os.fork()
    if child == 0:
        try:
            play(part)
        finally:
            os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""
"""Runs the cases from stdin in as many processes as requested, and writes the number and the result of each. Cases that
raise, or return no small integer, are left out. It imports almost nothing, because imports would dominate its time."""

Case = tuple[str, int, int]


class CodeFix:
    """One episode on one file."""

    needs_client: ClassVar[bool] = True
    words: ClassVar[tuple[str, ...]] = (
        "EDIT", *LINES, *OPERATORS, *CORRECT, *(str(number) for number in RESULTS),
        "fail", "want", "got", "pass", "hangs", "unknown", "?",
    )  # fmt: skip
    turns_max: int = 3
    tokens_max: ClassVar[int] = 4
    """EDIT, the line, the operator, and the stop token."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda rng: CodeFixRandomAgent(rng),
        "teacher": lambda rng: CodeFixTeacher(rng),
        "expert": lambda rng: CodeFixExpert(),
    }
    usual_reward: ClassVar[RewardSettings] = RewardSettings(kind="command")

    def __init__(
        self, resources: ExternalResources, *, turns: int = turns_max, python: str = PYTHON, memory: str = MEMORY
    ) -> None:
        """`python`: path in the sandbox. Raises InvalidConfig, and ValueError without a client."""
        if type(turns) is not int or turns < 1:
            raise InvalidConfig("turns", turns, "a whole number, at least 1")
        self.turns_max = turns
        self._client: Client = resources.require_client("codefix")
        self._resources = resources
        self._python = python
        self._memory = memory
        self._warm_sandbox: WarmSandbox | None = None
        self._names: tuple[str, ...] = ()
        self._operators: list[str] = []
        """Current operator of each line."""
        self._turn = 0
        self._done = True

    # ---- the episode ----

    async def reset(self, seed: int) -> str:
        rng = random.Random(f"codefix {seed}")
        self._names = tuple(rng.sample(sorted(CORRECT), len(LINES)))
        self._operators = [CORRECT[name][0] for name in self._names]
        wrong_index = rng.randrange(len(LINES))
        self._operators[wrong_index] = rng.choice([each for each in OPERATORS if each != self._operators[wrong_index]])
        self._turn = 0
        self._warm_sandbox = await self._take_warm_sandbox()
        text, passed = await self._run_visible_tests()
        if passed or f"fail {LINES[wrong_index]} " not in text or text.endswith("?"):
            raise ManagerError(f"codefix: expected one failing test in a new file, got {text!r}")
        self._done = False
        return text

    async def step(self, action: str) -> Step:
        if self._done:
            raise ValueError("codefix: expected a reset before this step, for the episode is over or never began")
        self._turn += 1
        edit = _edit_of(action)
        if edit is not None:
            line, text = edit
            self._operators[line] = text
            text, passed = await self._run_visible_tests()
        else:
            text, passed = f"unknown {self._render_lines()}", False
        self._done = passed or self._turn == self.turns_max
        return Step(
            observation=text, reward=float(passed), done=self._done,
            metrics={"edits": float(self._turn)} if self._done else {},
        )  # fmt: skip

    async def close(self) -> None:
        self._done = True
        sandbox, self._warm_sandbox = self._warm_sandbox, None
        if sandbox is not None:
            await warm_sandboxes_of(self._client).release(sandbox)

    # ---- shared resources -----------

    @classmethod
    @asynccontextmanager
    async def prepare(cls, client: Client | None) -> AsyncIterator[None]:
        """Wraps all episodes of a client, and keeps sandboxes between them. Raises ValueError without a client."""
        async with keep_warm(ExternalResources(client=client).require_client("codefix")):
            yield

    # ---- the file and its tests ----

    def source(self) -> str:
        """The file after the last edit. Other changes by code in the sandbox are overwritten by the next edit."""
        lines = zip(self._names, self._operators, strict=True)
        return "".join(f"def {name}(a, b): return {OPERATORS.get(text, f'a {text} b')}\n" for name, text in lines)

    async def verdict(self, timeout_s: float) -> Verdict:
        """Runs the whole suite. The exit code is 0 if all of it passes. Call it after the end of the episode: it
        releases the episode's sandbox."""
        await self.close()
        cases = [(name, *arguments) for name in self._names for arguments in SUITE_CASES]
        sandbox = await self._take_warm_sandbox()
        try:
            result = await self._run_cases(
                sandbox, cases, key="codefix-suite", cpus=SUITE_CPUS, timeout_s=min(timeout_s, TESTS_S_MAX),
                priority=VERDICT_PRIORITY,
            )  # fmt: skip
        finally:
            await warm_sandboxes_of(self._client).release(sandbox)
        results = _results_of(result.executed.stdout)
        passed = sum(results.get(number) == {expected_result(case)} for number, case in enumerate(cases))
        all_passed = result.status is Status.SUCCEEDED and passed == len(cases)
        return Verdict(
            status=result.status, reason=result.reason, exit_code=0 if all_passed else 1,
            stdout=f"{passed} of {len(cases)} passed", timing=result.timing,
            metrics={"tests_passed": passed / len(cases), "tests_cpus": float(result.cpus)},
        )  # fmt: skip

    async def _run_visible_tests(self) -> tuple[str, bool]:
        """Returns the next observation, and whether all tests passed. Raises ActionLost if they could not be run."""
        assert self._warm_sandbox is not None
        cases = [(name, *arguments) for name in self._names for arguments in VISIBLE_CASES]
        result = await self._run_cases(self._warm_sandbox, cases, key="codefix-tests", cpus=None, timeout_s=TESTS_S_MAX)
        if result.status not in (Status.SUCCEEDED, Status.TIMED_OUT):
            raise ActionLost(f"the tests of codefix could not be run: {result.status.value}: {result.reason}", result)
        hangs = result.status is Status.TIMED_OUT
        results = _results_of(result.executed.stdout)
        failing = [case for number, case in enumerate(cases) if results.get(number) != {expected_result(case)}]
        if not failing and not hangs:
            return "pass", True
        case = (failing or cases)[0]
        return (
            f"{self._render_lines()} {self._render_failure(case, results.get(cases.index(case), set()), hangs)}",
            False,
        )

    async def _run_cases(
        self, sandbox: WarmSandbox, cases: list[Case], *, key: str, cpus: tuple[float, float] | None, timeout_s: float,
        priority: int = 0,
    ) -> Result:  # fmt: skip
        """Raises ManagerError if the test program cannot run at all, which no code of the agent can cause."""
        lines = [f"{name} {a} {b}" for name, a, b in cases]
        # Trusted: with known operators only, in any combination, a function maps numbers to a number.
        known = all(word in OPERATORS for text in self._operators for word in text.split())
        if sandbox.is_clean:
            result = await sandbox.run(
                FILE, self.source(), lines, key=key, cpus=cpus, timeout_s=timeout_s, priority=priority,
                capture=OUTPUT_BYTES_MAX, trusted=known,
            )  # fmt: skip
            if result is not None:
                return result
            sandbox.is_clean = known
        await sandbox.sandbox.write(FILE, self.source())
        result = await sandbox.sandbox.exec(
            (self._python, "-I", "-S", "-c", RUNNER, "{cpus}" if cpus else "1"),
            cpus=cpus, key=key, timeout_s=timeout_s, priority=priority, capture=OUTPUT_BYTES_MAX, idempotent=True,
            stdin="".join(f"{line}\n" for line in lines),
        )  # fmt: skip
        if result.exit_code in CANNOT_RUN:
            text = f"{self._python} cannot be run in the sandbox; the option `python` names another one"
            raise ManagerError(f"codefix: {text}: {result.stderr.strip()[-200:]}", retry=False)
        return result

    async def _take_warm_sandbox(self) -> WarmSandbox:
        """Returns a sandbox in which no untrusted code ran."""
        resources = self._resources
        key = (resources.run, self._memory, self._python)
        return await warm_sandboxes_of(self._client).acquire(
            key, self._make_sandbox, self._python, resources.trajectory
        )

    def _make_sandbox(self) -> Sandbox:
        return self._client.sandbox(
            memory=self._memory, disk=DISK, processes=PROCESSES,
            run=self._resources.run, trajectory=self._resources.trajectory, task="codefix",
        )  # fmt: skip

    def _render_lines(self) -> str:
        lines = zip(LINES, self._names, self._operators, strict=True)
        return " ".join(f"{line} {name} {text if text in OPERATORS else '?'}" for line, name, text in lines)

    def _render_failure(self, case: Case, results: set[int], hangs: bool) -> str:
        name, a, b = case
        text = "hangs" if hangs else "?"
        if len(results) == 1 and not hangs:
            [result] = results
            text = str(result) if result in RESULTS else "?"
        return f"fail {LINES[self._names.index(name)]} {name} {a} {b} want {expected_result(case)} got {text}"


def expected_result(case: Case) -> int:
    name, a, b = case
    return CORRECT[name][1](a, b)


def _edit_of(action: str) -> tuple[int, str] | None:
    """Returns the line, counted from 0, and its new text; None if the action is no edit."""
    words = action.split()
    if len(words) < 3 or words[0] != "EDIT" or words[1] not in LINES:
        return None
    text = " ".join(words[2:])
    if len(text) > EDIT_CHARACTERS_MAX or not text.isprintable():
        return None
    return LINES.index(words[1]), text


def _results_of(output: bytes) -> dict[int, set[int]]:
    """Returns all results written for each case number; a correct case has exactly one. Lines that are not two small
    integers do not come from the test program, and are ignored."""
    results: dict[int, set[int]] = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) != 2 or max(map(len, words)) > NUMBER_CHARACTERS_MAX:
            continue
        try:
            number, value = map(int, words)
        except ValueError:
            continue
        results.setdefault(number, set()).add(value)
    return results


# ---- agents -----------------------------------------------------------------------------------------------------


class CodeFixRandomAgent:
    """A random operator in a random line."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def act(self, observation: str) -> str:
        return f"EDIT {self._rng.choice(LINES)} {self._rng.choice(tuple(OPERATORS))}"


class CodeFixTeacher:
    """The wrong line with a random operator: knows the format and the fault, but not the fix."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def act(self, observation: str) -> str:
        line, _ = _wrong_line(observation)
        return f"EDIT {line} {self._rng.choice(tuple(OPERATORS))}"


class CodeFixExpert:
    def act(self, observation: str) -> str:
        line, name = _wrong_line(observation)
        return f"EDIT {line} {CORRECT[name][0]}"


class _CodeLine(msgspec.Struct, frozen=True):
    number: str
    name: str
    text: str


def _wrong_line(observation: str) -> tuple[str, str]:
    """Returns label and name of the line whose operator does not match its name; the first line if all match."""
    words = observation.removeprefix("unknown ").split()
    lines = [_CodeLine(*words[at : at + 3]) for at in range(0, 3 * len(LINES), 3)]
    wrong_line = next((line for line in lines if CORRECT[line.name][0] != line.text), lines[0])
    return wrong_line.number, wrong_line.name
