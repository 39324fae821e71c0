"""codefix: a file of four functions, one of which has the wrong operator; edit it in a sandbox until its tests pass.

The name of a function says what is right. The policy reads the file and the failing case of the last test run, and
writes one edit a turn:

    L1 add + L2 max < L3 div // L4 mul * fail L2 max 4 3 want 4 got 3
    EDIT L2 >

Each edit is written into the file in a real sandbox, and its tests are run there, as one action of the trajectory. The
episode is over when they pass, or with the last turn. What the environment pays itself is whether these few tests
pass; the reward that is meant is `verdict`: the whole suite as one elastic action, on one core or two as the scheduler
sees fit, which a reward of the kind `command` calls.

An operator that is none of the known ones is written into the file as it is: that is code that nobody has read. So
nothing that runs in a sandbox is believed. The program that runs the tests comes with its command and is no file that
could be patched; it says what the functions returned and not whether that is right, and what is right is known outside
alone. Whoever writes to its output, kills it or imitates it can only name results, and has to know the right ones for
that. The verdict is given in another sandbox, where no such code of the agent has run before, and after the old one was
given back: whoever waits for memory holds none.

A file of known operators alone, one or several in a place, is all our own text, whoever chose them. Its tests are run
by a program that stands ready in the sandbox, and a sandbox in which no other code ran is as good as new: within
`prepare` it is kept for the next episode or verdict (environments/warm_test_sandboxes.py). A file that does not compile
runs nothing either. One unread line that does, and from then on each run is a process of its own, and the sandbox is
closed when it is given back.
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
from tangram.rl.environments.protocol import MakeAgent, Outside, Step
from tangram.rl.environments.warm_test_sandboxes import Bench, benches_of, kept
from tangram.rl.rollout.rewards import Verdict

LINES = ("L1", "L2", "L3", "L4")
"""Of the file, one function each. Words of their own: a policy has less to tell apart than if they were numbers."""
OPERATORS: Mapping[str, str] = {
    "+": "a + b", "-": "a - b", "*": "a * b", "//": "a // b", ">": "a if a > b else b", "<": "a if a < b else b",
}  # fmt: skip
"""As they stand in the file."""
RIGHT: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add), "sub": ("-", operator.sub), "mul": ("*", operator.mul),
    "div": ("//", operator.floordiv), "max": (">", max), "min": ("<", min),
}  # fmt: skip
"""By name: the operator, and what it has to compute."""

ARGUMENTS = range(1, 5)
"""Of the cases. None is 0, by which one cannot divide; and results are few enough to be words."""
RESULTS = range(-3, 17)
"""What the operators make of them."""
SHOWN = ((4, 3), (3, 4), (2, 2))
"""The cases of a test run; of any two operators at least one tells them apart."""
SUITE = tuple((a, b) for a in ARGUMENTS for b in ARGUMENTS)
"""The cases of the verdict."""

FILE = "solution.py"
PYTHON = "/usr/bin/python3"
"""The machine's own, which every sandbox sees."""
CANNOT_RUN = (126, 127)
"""Exit codes of a program that is not there or cannot be executed."""
MEMORY, DISK, PROCESSES = "64MiB", "1MiB", 32
"""Of a sandbox: a few bare interpreters of 10 MiB each."""
TESTS_S_MAX = 10.0
"""Of a test run, which takes a few hundredths of a second: what takes longer hangs."""
SUITE_CPUS = (0.25, 2)
"""Cores of the verdict, which is told one or two. The least is little: among many small test runs a whole core is
hardly ever free, and it is worth no waiting for what takes some milliseconds."""
VERDICT_FIRST = 1
"""Priority: whoever is done before whoever begins, for a group waits for its last verdict."""
OUTPUT_BYTES_MAX = 64 << 10
"""Of a test run, which writes a few bytes for each case: more is not its own."""
NUMBER_CHARACTERS_MAX = 4
"""Of a case or its result."""
EDIT_CHARACTERS_MAX = 200
"""Of what may stand in the place of an operator."""

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
"""Runs the cases that it reads, in as many processes as it is told, and writes the number and the result of each. What
raises, or is no small whole number, is left out. It imports next to nothing: that is what it would mostly wait for."""

Case = tuple[str, int, int]


class CodeFix:
    """One episode on one file."""

    acts_outside: ClassVar[bool] = True
    words: ClassVar[tuple[str, ...]] = (
        "EDIT", *LINES, *OPERATORS, *RIGHT, *(str(number) for number in RESULTS),
        "fail", "want", "got", "pass", "hangs", "unknown", "?",
    )  # fmt: skip
    turns_max: int = 3
    tokens_max: ClassVar[int] = 4
    """EDIT, the line, the operator, and the end."""
    agents: ClassVar[Mapping[str, MakeAgent]] = {
        "random": lambda chance: Guessing(chance),
        "teacher": lambda chance: Pointing(chance),
        "expert": lambda chance: Knowing(),
    }
    usual_reward: ClassVar[RewardSettings] = RewardSettings(kind="command")

    def __init__(self, outside: Outside, *, turns: int = turns_max, python: str = PYTHON, memory: str = MEMORY) -> None:
        """`python`: in the sandbox. Raises InvalidConfig, and ValueError without a client."""
        if type(turns) is not int or turns < 1:
            raise InvalidConfig("turns", turns, "a whole number, at least 1")
        self.turns_max = turns
        self._client: Client = outside.require_client("codefix")
        self._outside = outside
        self._python = python
        self._memory = memory
        self._bench: Bench | None = None
        self._names: tuple[str, ...] = ()
        self._operators: list[str] = []
        """Of each line, as the last edit left it."""
        self._turn = 0
        self._over = True

    # ---- the episode ----

    async def reset(self, seed: int) -> str:
        chance = random.Random(f"codefix {seed}")
        self._names = tuple(chance.sample(sorted(RIGHT), len(LINES)))
        self._operators = [RIGHT[name][0] for name in self._names]
        wrong = chance.randrange(len(LINES))
        self._operators[wrong] = chance.choice([each for each in OPERATORS if each != self._operators[wrong]])
        self._turn = 0
        self._bench = await self._take_bench()
        said, passed = await self._test()
        if passed or f"fail {LINES[wrong]} " not in said or said.endswith("?"):
            raise ManagerError(f"codefix: expected one failing test in a new file, got {said!r}")
        self._over = False
        return said

    async def step(self, action: str) -> Step:
        if self._over:
            raise ValueError("codefix: expected a reset before this step, for the episode is over or never began")
        self._turn += 1
        edit = _edit_of(action)
        if edit is not None:
            line, text = edit
            self._operators[line] = text
            said, passed = await self._test()
        else:
            said, passed = f"unknown {self._shown()}", False
        self._over = passed or self._turn == self.turns_max
        return Step(
            observation=said, reward=float(passed), done=self._over,
            metrics={"edits": float(self._turn)} if self._over else {},
        )  # fmt: skip

    async def close(self) -> None:
        self._over = True
        bench, self._bench = self._bench, None
        if bench is not None:
            await benches_of(self._client).give_back(bench)

    # ---- what all episodes share ----

    @classmethod
    @asynccontextmanager
    async def prepare(cls, client: Client | None) -> AsyncIterator[None]:
        """Around all episodes of a client: sandboxes are kept from one to the next. Raises ValueError without a
        client."""
        async with kept(Outside(client=client).require_client("codefix")):
            yield

    # ---- the file and its tests ----

    def source(self) -> str:
        """The file, as the edits left it. What code does to the file behind their back is undone by the next one."""
        lines = zip(self._names, self._operators, strict=True)
        return "".join(f"def {name}(a, b): return {OPERATORS.get(text, f'a {text} b')}\n" for name, text in lines)

    async def verdict(self, timeout_s: float) -> Verdict:
        """The whole suite. Its exit code is 0 if all of it passes. To be asked for once the episode is over: the
        sandbox that it was played in is given back."""
        await self.close()
        cases = [(name, *arguments) for name in self._names for arguments in SUITE]
        bench = await self._take_bench()
        try:
            result = await self._run(
                bench, cases, key="codefix-suite", cpus=SUITE_CPUS, timeout_s=min(timeout_s, TESTS_S_MAX),
                priority=VERDICT_FIRST,
            )  # fmt: skip
        finally:
            await benches_of(self._client).give_back(bench)
        results = _results_of(result.executed.stdout)
        passed = sum(results.get(number) == {right(case)} for number, case in enumerate(cases))
        all_passed = result.status is Status.SUCCEEDED and passed == len(cases)
        return Verdict(
            status=result.status, reason=result.reason, exit_code=0 if all_passed else 1,
            stdout=f"{passed} of {len(cases)} passed", timing=result.timing,
            metrics={"tests_passed": passed / len(cases), "tests_cpus": float(result.cpus)},
        )  # fmt: skip

    async def _test(self) -> tuple[str, bool]:
        """What the policy reads next, and whether all tests passed. Raises ActionLost if they could not be run."""
        assert self._bench is not None
        cases = [(name, *arguments) for name in self._names for arguments in SHOWN]
        result = await self._run(self._bench, cases, key="codefix-tests", cpus=None, timeout_s=TESTS_S_MAX)
        if result.status not in (Status.SUCCEEDED, Status.TIMED_OUT):
            raise ActionLost(f"the tests of codefix could not be run: {result.status.value}: {result.reason}", result)
        hangs = result.status is Status.TIMED_OUT
        results = _results_of(result.executed.stdout)
        failing = [case for number, case in enumerate(cases) if results.get(number) != {right(case)}]
        if not failing and not hangs:
            return "pass", True
        case = (failing or cases)[0]
        return f"{self._shown()} {self._failure(case, results.get(cases.index(case), set()), hangs)}", False

    async def _run(
        self, bench: Bench, cases: list[Case], *, key: str, cpus: tuple[float, float] | None, timeout_s: float,
        priority: int = 0,
    ) -> Result:  # fmt: skip
        """Raises ManagerError if the program cannot be run at all, which no code of the agent can bring about."""
        lines = [f"{name} {a} {b}" for name, a, b in cases]
        # Of our operators alone, however they stand together: numbers in, a number out, and nothing else.
        known = all(word in OPERATORS for text in self._operators for word in text.split())
        if bench.clean:
            told = await bench.run(
                FILE, self.source(), lines, key=key, cpus=cpus, timeout_s=timeout_s, priority=priority,
                capture=OUTPUT_BYTES_MAX, known=known,
            )  # fmt: skip
            if told is not None:
                return told
            bench.clean = known
        await bench.box.write(FILE, self.source())
        result = await bench.box.exec(
            (self._python, "-I", "-S", "-c", RUNNER, "{cpus}" if cpus else "1"),
            cpus=cpus, key=key, timeout_s=timeout_s, priority=priority, capture=OUTPUT_BYTES_MAX, idempotent=True,
            stdin="".join(f"{line}\n" for line in lines),
        )  # fmt: skip
        if result.exit_code in CANNOT_RUN:
            said = f"{self._python} cannot be run in the sandbox; the option `python` names another one"
            raise ManagerError(f"codefix: {said}: {result.stderr.strip()[-200:]}", retry=False)
        return result

    async def _take_bench(self) -> Bench:
        """One in which nothing ran that nobody has read."""
        outside = self._outside
        key = (outside.run, self._memory, self._python)
        return await benches_of(self._client).take(key, self._sandbox, self._python, outside.trajectory)

    def _sandbox(self) -> Sandbox:
        return self._client.sandbox(
            memory=self._memory, disk=DISK, processes=PROCESSES,
            run=self._outside.run, trajectory=self._outside.trajectory, task="codefix",
        )  # fmt: skip

    def _shown(self) -> str:
        lines = zip(LINES, self._names, self._operators, strict=True)
        return " ".join(f"{line} {name} {text if text in OPERATORS else '?'}" for line, name, text in lines)

    def _failure(self, case: Case, results: set[int], hangs: bool) -> str:
        name, a, b = case
        said = "hangs" if hangs else "?"
        if len(results) == 1 and not hangs:
            [result] = results
            said = str(result) if result in RESULTS else "?"
        return f"fail {LINES[self._names.index(name)]} {name} {a} {b} want {right(case)} got {said}"


def right(case: Case) -> int:
    name, a, b = case
    return RIGHT[name][1](a, b)


def _edit_of(action: str) -> tuple[int, str] | None:
    """The line, counted from 0, and what is to stand there. None if it is no edit."""
    words = action.split()
    if len(words) < 3 or words[0] != "EDIT" or words[1] not in LINES:
        return None
    text = " ".join(words[2:])
    if len(text) > EDIT_CHARACTERS_MAX or not text.isprintable():
        return None
    return LINES.index(words[1]), text


def _results_of(output: bytes) -> dict[int, set[int]]:
    """By the number of the case: all that was written for it, of which a right one is alone. Lines that are no two
    small numbers are not of our program, and left out."""
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


class Guessing:
    """Any line, any operator."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def act(self, observation: str) -> str:
        return f"EDIT {self._chance.choice(LINES)} {self._chance.choice(tuple(OPERATORS))}"


class Pointing:
    """The right line, any operator: it knows the format and what is wrong, and not what would be right."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def act(self, observation: str) -> str:
        line, _ = _wrong(observation)
        return f"EDIT {line} {self._chance.choice(tuple(OPERATORS))}"


class Knowing:
    def act(self, observation: str) -> str:
        line, name = _wrong(observation)
        return f"EDIT {line} {RIGHT[name][0]}"


class _Line(msgspec.Struct, frozen=True):
    number: str
    name: str
    text: str


def _wrong(observation: str) -> tuple[str, str]:
    """The number and the name of the line whose operator does not fit its name; the first, if all fit."""
    words = observation.removeprefix("unknown ").split()
    lines = [_Line(*words[at : at + 3]) for at in range(0, 3 * len(LINES), 3)]
    found = next((line for line in lines if RIGHT[line.name][0] != line.text), lines[0])
    return found.number, found.name
