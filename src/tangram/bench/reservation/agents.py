"""The agents: scripted trajectories, played on real sandboxes.

Owns the behaviour and think times of every agent, drawn from a seed alone: a script is independent of the scheduling,
so both sides of a comparison get the same work. Think times follow the distribution that the `coding` workload is
fitted to, divided by a factor from the caller.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable

import msgspec
import numpy as np

from tangram.bench.reservation.project import BUGS, ENVIRONMENT, PYTHON, SUITE, Bug, passed, substitute
from tangram.client.client import Client
from tangram.client.sandbox import Image, Sandbox
from tangram.core.action import Status
from tangram.errors import ManagerError
from tangram.sim.workloads.coding import THINK_S
from tangram.sim.workloads.fit import random_stream

REWARD_CPUS = (1.0, 2.0)
LOOKS = (2, 5)
LOOKS_AGAIN = (1, 3)
"""How often an agent looks around before it has seen the tests fail, and afterwards: minimum and maximum."""
SCRIPT_SHARE = 0.6
"""Share of agents that write a short program to inspect the code."""
OUTCOMES = ("right", "right", "wrong", "second try")
"""Outcomes of the repair, in turn for the siblings of a group."""
MEMORY = "128MiB"
"""Per sandbox: two Python processes and the files."""

OUTLINE = (
    "import ast, pathlib, sys\n"
    "for path in sorted(pathlib.Path('almanac').glob('*.py')):\n"
    "    for node in ast.walk(ast.parse(path.read_text())):\n"
    "        if isinstance(node, ast.FunctionDef):\n"
    "            print(path, node.lineno, node.name, ast.get_docstring(node) or '')\n"
)
"""A program that an agent writes to inspect the code."""
PATCH = (
    "import pathlib, sys\n"
    "path, before, after = sys.argv[1:]\n"
    "file = pathlib.Path(path)\n"
    "text = file.read_text()\n"
    "assert text.count(before) == 1, text\n"
    "file.write_text(text.replace(before, after))\n"
)
"""A program that edits one line."""


class Edit(msgspec.Struct, frozen=True):
    """A change of one line through the file API of the sandbox; not an action."""

    path: str
    before: str
    after: str


class AgentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Think time, then one operation."""

    think_s: float
    key: str
    does: str | Edit
    """A command, or an edit."""
    reward: bool = False


class AgentScript(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    name: str
    bug: Bug
    turns: tuple[AgentTurn, ...]

    @property
    def actions(self) -> int:
        """Number of actions, with opening and closing the sandbox."""
        return 2 + sum(isinstance(turn.does, str) for turn in self.turns)


# ---- behaviour --------------------------------------------------------------------------------------------------


def draw_scripts(seed: int, *, groups: int, siblings: int, think_faster: float) -> tuple[AgentScript, ...]:
    """Draw the trajectories of a batch: siblings share the bug, and differ in their steps."""
    scripts = []
    for number in range(groups * siblings):
        group, sibling = divmod(number, siblings)
        rng = random_stream("reservation", seed, "agent", number)
        bug = BUGS[(seed + group) % len(BUGS)]
        does = [*_draw_turns(rng, bug, OUTCOMES[sibling % len(OUTCOMES)]), ("reward", SUITE)]
        thinking_s = (THINK_S.draw(rng, len(does)) / think_faster).tolist()
        turns = [
            AgentTurn(think_s=think_s, key=key, does=what, reward=key == "reward")
            for think_s, (key, what) in zip(thinking_s, does, strict=True)
        ]
        scripts.append(AgentScript(name=f"agent/{number}", bug=bug, turns=tuple(turns)))
    return tuple(scripts)


def _draw_turns(rng: np.random.Generator, bug: Bug, outcome: str) -> list[tuple[str, str | Edit]]:
    """Draw all turns of an agent: explore, see the test fail, repair, see it pass, look at the diff."""
    tests: tuple[str, str] = ("tests", f"{PYTHON} -m unittest {bug.tests} 2>&1")
    steps: list[tuple[str, str | Edit]] = [*_looks(rng, bug, LOOKS), tests, *_looks(rng, bug, LOOKS_AGAIN)]
    if rng.random() < SCRIPT_SHARE:
        steps.append(("python", f"{PYTHON} -c {shlex.quote(OUTLINE)}"))
    if outcome == "right":
        steps += [_edit(rng, bug.path, bug.planted, bug.right), tests]
    else:
        steps += [_edit(rng, bug.path, bug.planted, bug.misguided), tests]
    if outcome == "second try":
        steps += [_edit(rng, bug.path, bug.misguided, bug.right), tests]
    return [*steps, ("diff", "diff -r .before/almanac almanac")]


def _looks(rng: np.random.Generator, bug: Bug, bounds: tuple[int, int]) -> list[tuple[str, str | Edit]]:
    commands: list[tuple[str, str | Edit]] = [
        ("ls", "ls -lR almanac tests"),
        ("find", "find . -name '*.py' -size +0 | sort"),
        ("cat", f"cat README.md {bug.path}"),
        ("grep", f"grep -rn {bug.module} almanac tests"),
        ("grep", "grep -rnE 'def |class ' almanac tests"),
        ("sed", f"sed -n '1,20p' {bug.path}"),
        ("sed", f"sed -n '1,40p' {bug.tests}"),
    ]
    count = int(rng.integers(bounds[0], bounds[1], endpoint=True))
    return [commands[choice] for choice in rng.permutation(len(commands))[:count].tolist()]


def _edit(rng: np.random.Generator, path: str, before: str, after: str) -> tuple[str, str | Edit]:
    """An edit by sed, by a program, or through the file API."""
    edits: list[tuple[str, str | Edit]] = [
        ("edit", substitute(path, before, after)),
        ("edit", shlex.join([PYTHON, "-c", PATCH, path, before, after])),
        ("files", Edit(path, before, after)),
    ]
    return edits[int(rng.integers(len(edits)))]


# ---- playing ----------------------------------------------------------------------------------------------------


async def play_script(t: Client, script: AgentScript, image: Image, on_action: Callable[[], None]) -> float:
    """Play the whole trajectory in a new sandbox and return the reward: the share of passed tests.

    `on_action` is called after each action. An infrastructure failure raises and never becomes a reward of 0.
    """
    reward = 0.0
    async with t.sandbox(
        image=image, memory=MEMORY, env=ENVIRONMENT, run="reservation", trajectory=script.name, task=script.bug.name
    ) as sandbox:
        on_action()
        for turn in script.turns:
            await asyncio.sleep(turn.think_s)
            if isinstance(turn.does, Edit):
                await _apply_edit(sandbox, turn.does)
                continue
            result = await sandbox.exec(turn.does, key=turn.key, cpus=REWARD_CPUS if turn.reward else None)
            if result.status is not Status.SUCCEEDED:
                result.check()
            if turn.reward:
                good, total = passed(result.stdout)
                if not total:
                    raise ManagerError(f"the tests of {script.name} did not run: {result.stdout[-500:]}", retry=False)
                reward = good / total
            on_action()
    on_action()
    return reward


async def _apply_edit(sandbox: Sandbox, edit: Edit) -> None:
    text = await sandbox.read_text(edit.path)
    assert text.count(edit.before) == 1, f"{edit.before!r} is {text.count(edit.before)} times in {edit.path}"
    await sandbox.write(edit.path, text.replace(edit.before, edit.after))
