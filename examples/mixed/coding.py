"""The coding run: agents write a checksum, see its tests fail, look up its manual, repair it, and are rewarded.

Owns the behaviour of each agent, drawn from a seed, and the programs that run in its sandbox. A program inside the
sandbox looks up the manual: an action that needs cores and a part of the search quota at once. The reward is the whole
test suite, on one core or two, as the scheduler decides.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any
from urllib.parse import quote

import msgspec
from server import Digest, Library
from sides import BACKOFF_S, START_S, TRIES, Side

RUN = "coding"
PYTHON = ("/usr/bin/python3", "-I", "-S")
"""The interpreter of the machine, which every sandbox sees, without site packages."""
ROUNDS = 20_000
"""Iterations of a checksum: about one and a half milliseconds of a core."""
CASES, CASES_TRIED = 240, 40
"""Cases of the whole suite, and of an agent's own test run."""
THINK_S = (0.1, 0.5)
TIMEOUT_S = 60.0
ACTIONS = 5
"""Actions of a trajectory: look, tests, lookup, tests, reward."""
EXIT_REFUSED = 3
"""Exit code of the lookup when the API rejects all attempts."""

CHECK = """\
import json, os, sys
width, cases = int(sys.argv[1]), json.load(open("cases.json"))[: int(sys.argv[2])]
solution = {}
exec(open("solution.py").read(), solution)
read, write = os.pipe()
for number in range(width):
    if os.fork() == 0:
        passed = sum(solution["digest"](value) == expected for value, expected in cases[number::width])
        os.write(write, b"%d " % passed)
        os._exit(0)
for number in range(width):
    os.wait()
os.close(write)
print(sum(map(int, os.read(read, 4096).split())), "of", len(cases))
"""
"""The test suite: runs its cases in the given number of processes."""

LOOKUP = f"""\
import http.client, sys, time
port, path, tries, pause = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
for attempt in range(tries):
    if attempt:
        time.sleep(pause * 2 ** (attempt - 1))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    if answer.status == 200:
        sys.exit(print(answer.read().decode()))
    connection.close()
sys.exit({EXIT_REFUSED})
"""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    name: str
    start_s: float
    digest: Digest
    thinks_s: tuple[float, ...]
    """Think time before each action."""

    @property
    def actions(self) -> int:
        return len(self.thinks_s)


def draw(number: int, seed: int, library: Library) -> Script:
    rng = random.Random(f"{RUN}-{seed}-{number}")
    return Script(
        name=f"{RUN}/{number}",
        start_s=rng.uniform(0.0, START_S),
        digest=rng.choice(list(library.digests.values())),
        thinks_s=tuple(rng.uniform(*THINK_S) for _ in range(ACTIONS)),
    )


def solution(factor: int, summand: int, modulus: int) -> str:
    return (
        f"def digest(value):\n    for _ in range({ROUNDS}):\n"
        f"        value = (value * {factor} + {summand}) % {modulus}\n    return value\n"
    )


def expected(digest: Digest, value: int) -> int:
    """Compute the same without iteration: a step done twice is again a step, so doubling suffices."""
    factor, summand = 1, 0
    step_factor, step_summand = digest.factor, digest.summand
    for bit in range(ROUNDS.bit_length()):
        if ROUNDS >> bit & 1:
            factor, summand = factor * step_factor, summand * step_factor + step_summand
        step_factor, step_summand = step_factor**2 % digest.modulus, (step_factor + 1) * step_summand % digest.modulus
    return (value * factor + summand) % digest.modulus


async def play(side: Side, script: Script) -> float:
    """Play the trajectory and return the reward: the share of passed tests."""
    digest = script.digest
    think = iter(script.thinks_s)
    await asyncio.sleep(script.start_s)
    async with side.client.sandbox(
        memory="64MiB", disk="8MiB", network=True, run=RUN, trajectory=script.name
    ) as sandbox:
        cases = [(value, expected(digest, value)) for value in range(1, CASES + 1)]
        await sandbox.write(
            "task.md", f"Write digest(value) in solution.py: the {digest.name} digest, {ROUNDS} rounds.\n"
        )
        await sandbox.write("cases.json", json.dumps(cases))
        await sandbox.write("check.py", CHECK)
        await sandbox.write("lookup.py", LOOKUP)
        tests = (*PYTHON, "check.py", "{cpus}", str(CASES_TRIED))

        async def act(command: tuple[str, ...], key: str, **options: Any) -> str:
            await asyncio.sleep(next(think))
            return await side.execute(sandbox, command, RUN, script.name, key=key, timeout_s=TIMEOUT_S, **options)

        await act(("/bin/cat", "task.md", "check.py"), "look", cpus=0.5)
        await sandbox.write("solution.py", solution(digest.factor, 0, digest.modulus))  # a guess that omits a term
        await act(tests, "tests", cpus=1)

        path = f"/search?q={quote(f'the {digest.name} digest')}"
        tries = 1 if side.quotas else TRIES  # with a quota one granted request suffices
        lookup = (*PYTHON, "lookup.py", str(side.server.port), path, str(tries), str(BACKOFF_S))
        manual = await act(lookup, "lookup", cpus=0.5, quotas=side.quotas, lost_code=EXIT_REFUSED)
        if manual:
            factor, summand, modulus = (int(number) for number in re.findall(r"\d+", manual))
            await sandbox.write("solution.py", solution(factor, summand, modulus))
        await act(tests, "tests", cpus=1)
        passed = await act((*PYTHON, "check.py", "{cpus}", str(CASES)), "reward", cpus=(1, 2))
    return int(passed.split()[0]) / CASES
