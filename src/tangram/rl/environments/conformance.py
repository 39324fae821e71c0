"""The conformance check: whether a task implements the environment protocol.

Owns the findings: each names the requirement and, if it is broken, what was expected, what happened and what to do.
Never raises for an error of the task, and closes every environment that it opens. For users' own environments:

    report = await check("my_package.maze:Maze", resources=ExternalResources(client=client))
    print(report.text())

A task may declare `reward_range`, the lowest and the highest sum of an episode's rewards: (0.0, 1.0) by default, and
(0.0, 0.0) if its reward comes from outside.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from tangram.rl.environments.agents import CloseFailed, ProtocolViolation
from tangram.rl.environments.conformance_checks import (
    CHECKS,
    CLOSE_ADVICE,
    CheckFailed,
    CheckSkipped,
    ConformanceChecker,
    error_text,
)
from tangram.rl.environments.protocol import ExternalResources, Task
from tangram.rl.environments.registry import path_of, resolve

CheckVerdict = Literal["ok", "failed", "skipped"]

EPISODES = 20
"""Episodes of each agent. An agent that succeeds one time in ten then has a share below a quarter in all but one of a
hundred checks."""


CALL_S_MAX = 30.0
"""Time limit of one reset, step or close: a sandbox starts within seconds, and the check is interactive."""


class ConformanceFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one requirement."""

    name: str
    requirement: str
    verdict: CheckVerdict
    expected: str = ""
    actual: str = msgspec.field(default="", name="came")
    """The reason, if it was skipped."""
    advice: str = ""

    def text(self) -> str:
        lines = [f"{self.verdict:8} {self.name:16} {self.requirement}"]
        label = "because" if self.verdict == "skipped" else "got"
        details = (("expected", self.expected), (label, self.actual), ("do", self.advice))
        lines += [f"{'':25} {key}: {value}" for key, value in details if value]
        return "\n".join(lines)


class ConformanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check."""

    task: str
    episodes: int
    seed: int
    findings: tuple[ConformanceFinding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing failed. Skipped requirements are unknown."""
        return not self.failed

    @property
    def failed(self) -> tuple[ConformanceFinding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    def finding(self, name: str) -> ConformanceFinding:
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
    resources: ExternalResources | None = None,
    episodes: int = EPISODES,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = CALL_S_MAX,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> ConformanceReport:
    """Plays a task in all the ways that a rollout may. `timeout_s`: limit of one call of an environment. `on_progress`
    gets how many of how many requirements are checked, and the next one. Raises InvalidConfig for an unknown name."""
    began_at = time.monotonic()
    assert episodes >= 2, "one episode cannot show whether seeds differ"
    task = resolve(what) if isinstance(what, str) else what
    checking = ConformanceChecker(task, resources or ExternalResources(), episodes, seed, options or {}, timeout_s)
    findings: dict[str, ConformanceFinding] = {}
    async with checking.stack:
        for number, (name, (_, method, needs)) in enumerate(CHECKS.items()):
            if on_progress is not None:
                on_progress(number, len(CHECKS), name)
            if name in findings:
                continue
            broken = [need for need in needs if findings[need].verdict != "ok"]
            if not broken:
                finding = await _run_check(name, method(checking))
                findings[finding.name] = finding
                broken = [finding.name] if finding.name != name else []
            if broken:
                reason = f"it can be checked once `{broken[0]}` holds"
                findings[name] = ConformanceFinding(
                    name=name, requirement=CHECKS[name][0], verdict="skipped", actual=reason
                )
    return ConformanceReport(
        task=what if isinstance(what, str) else path_of(what), episodes=episodes, seed=seed,
        findings=tuple(findings[name] for name in CHECKS), seconds=time.monotonic() - began_at,
    )  # fmt: skip


async def _run_check(name: str, judging: Awaitable[None]) -> ConformanceFinding:
    """Checks a requirement. Returns a finding for it, or for `closes` if that kept it from being checked."""
    verdict: CheckVerdict = "ok"
    expected = actual = advice = ""
    try:
        await judging
    except CheckSkipped as why:
        verdict, actual = "skipped", str(why)
    except CheckFailed as broken:
        verdict, (expected, actual, advice) = "failed", broken.args
    except CloseFailed as error:
        name, verdict, expected, actual, advice = (
            "closes",
            "failed",
            "close to work after an episode",
            error_text(error),
            CLOSE_ADVICE,
        )
    except Exception as error:
        verdict, expected, actual = "failed", "an answer that the protocol allows", error_text(error)
        advice = "raise only if the infrastructure failed; respond to invalid actions with an observation"
        if isinstance(error, ProtocolViolation):
            advice = "return a string from reset, and a Step from step"
        if isinstance(error, TimeoutError):
            advice = "return within the limit, or raise the limit"
    return ConformanceFinding(
        name=name, requirement=CHECKS[name][0], verdict=verdict, expected=expected, actual=actual, advice=advice
    )
