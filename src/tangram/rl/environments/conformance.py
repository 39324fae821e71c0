"""The conformance check: whether a task keeps what the protocol of environments promises.

Owns the findings: each says what is promised and, where it is broken, what was expected, what came and what to do.
Never raises for what a task does wrong, and closes all that it opens. It is meant for one's own environments:

    report = await check("my_package.maze:Maze", outside=Outside(client=client))
    print(report.text())

A task may say more of itself than a Task must: `reward_range`, the least and the most that an episode pays, which is
(0.0, 1.0) if it is not said, and (0.0, 0.0) for a task that is rewarded from outside.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from tangram.rl.environments.agents import BadAnswer, CloseFailed
from tangram.rl.environments.conformance_checks import CLOSES, PROMISES, Broken, Checking, Skipped, told
from tangram.rl.environments.protocol import Outside, Task
from tangram.rl.environments.registry import path_of, resolve

Verdict = Literal["ok", "failed", "skipped"]

EPISODES = 20
"""Of each agent: the share of an agent that succeeds one time in ten is below a quarter then, but for one check in a
hundred."""


CALL_S_MAX = 30.0
"""Of one reset, step or close: a sandbox starts within seconds, and whoever checks an environment waits for it."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one promise is kept."""

    name: str
    promise: str
    verdict: Verdict
    expected: str = ""
    came: str = ""
    """If it was skipped, why."""
    advice: str = ""

    def text(self) -> str:
        lines = [f"{self.verdict:8} {self.name:16} {self.promise}"]
        came = "because" if self.verdict == "skipped" else "got"
        said = (("expected", self.expected), (came, self.came), ("do", self.advice))
        lines += [f"{'':25} {key}: {value}" for key, value in said if value]
        return "\n".join(lines)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found."""

    task: str
    episodes: int
    seed: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing failed. What was skipped is not known."""
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    def finding(self, name: str) -> Finding:
        """Raises KeyError."""
        return {finding.name: finding for finding in self.findings}[name]

    def text(self) -> str:
        count = {
            verdict: sum(each.verdict == verdict for each in self.findings) for verdict in ("ok", "failed", "skipped")
        }
        counted = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
        head = (
            f"{self.task}: {counted} ({self.episodes} episodes of each agent, seed {self.seed}, {self.seconds:.1f} s)"
        )
        return "\n".join([head, *(finding.text() for finding in self.findings)])


async def check(
    what: Task | str,
    *,
    outside: Outside | None = None,
    episodes: int = EPISODES,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = CALL_S_MAX,
    tell: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Plays a task in all the ways that a rollout may. `timeout_s` is the limit of one call of an environment. `tell`
    is told how many promises of how many are judged, and which is next. Raises InvalidConfig for a name that is none.
    """
    began_s = time.monotonic()
    assert episodes >= 2, "one episode says nothing of seeds"
    task = resolve(what) if isinstance(what, str) else what
    checking = Checking(task, outside or Outside(), episodes, seed, options or {}, timeout_s)
    findings: dict[str, Finding] = {}
    async with checking.stack:
        for number, (name, (_, method, needs)) in enumerate(PROMISES.items()):
            if tell is not None:
                tell(number, len(PROMISES), name)
            if name in findings:
                continue
            broken = [need for need in needs if findings[need].verdict != "ok"]
            if not broken:
                found = await _found(name, method(checking))
                findings[found.name] = found
                broken = [found.name] if found.name != name else []
            if broken:
                why = f"it can be judged once `{broken[0]}` is kept"
                findings[name] = Finding(name=name, promise=PROMISES[name][0], verdict="skipped", came=why)
    return Report(
        task=what if isinstance(what, str) else path_of(what), episodes=episodes, seed=seed,
        findings=tuple(findings[name] for name in PROMISES), seconds=time.monotonic() - began_s,
    )  # fmt: skip


async def _found(name: str, judging: Awaitable[None]) -> Finding:
    """Of this promise; of `closes`, if that kept it from being judged."""
    verdict: Verdict = "ok"
    expected = came = advice = ""
    try:
        await judging
    except Skipped as why:
        verdict, came = "skipped", str(why)
    except Broken as broken:
        verdict, (expected, came, advice) = "failed", broken.args
    except CloseFailed as error:
        name, verdict, expected, came, advice = (
            "closes",
            "failed",
            "close to work after an episode",
            told(error),
            CLOSES,
        )
    except Exception as error:
        verdict, expected, came = "failed", "an answer as the protocol knows it", told(error)
        advice = "raise only if the infrastructure failed; answer what an agent does wrong with an observation"
        if isinstance(error, BadAnswer):
            advice = "return a text from reset, and a Step of this kind from step"
        if isinstance(error, TimeoutError):
            advice = "answer within the limit, or raise the limit if it needs more"
    return Finding(name=name, promise=PROMISES[name][0], verdict=verdict, expected=expected, came=came, advice=advice)
