"""The benchmarks behind `tangram bench`: one file each, found by name.

Owns the list of their names. A benchmark is imported when it is run, not before.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

from tangram.bench.base import BenchResult, Goal, Progress
from tangram.errors import InvalidConfig

__all__ = ["BENCHES", "BenchResult", "Goal", "options_of", "run"]

BENCHES = {
    "reservation": "coding agents on real sandboxes: a core per trajectory against sharing the same cores by action",
    "coding": "tool calls and rewards of coding agents: a pod per trajectory against sharing cores by action",
    "elastic": "elastic actions at stated loads: the published algorithm against ours, and both against a bound",
    "sizing": "cores and devices that give the same mean action completion time as today's reservations",
    "teachers": "models on devices by action, against devices of their own and against loading them on demand",
    "exec": "what an action costs beside its program: opening, executing, keeping a sandbox open",
    "functions": "what a call of a function costs, how fast it scales from nothing, and what scaling saves",
    "cpu": "whether an action gets the CPU that it was granted, no less and no more",
    "services": "six model services on two emulated devices against a device for each",
    "quota": "a burst of calls to an API that enforces its quota: shared by action, and uncontrolled",
    "http": "what the shared service itself costs: actions that do nothing, over HTTP and with the journal on",
    "durability": "what is left of acknowledged actions when the shared service is killed again and again",
    "soak": "whether memory and all that the shared service could leave behind stay the same under constant load",
    "dashboard": "how fast the dashboard answers in a browser, with ten thousand actions in view",
    "rollout": "trajectories each at its own pace against all waiting for each other at every turn, on one engine",
    "affinity": "two tasks on the hardware that suits each, against either class alone at equal cost",
    "redundancy": "what playing more than is needed saves and wastes",
    "serverless": "rewards on workers of their own against functions that scale from zero",
    "engine": "what a command, a prompt and continuous batching cost those who are being served",
    "learning": "whether policies really learn: each built-in task alone, three mixed, and one at several ages",
    "ladder": "five ways to schedule the same training run, from one thing after the other to everything at once",
    "weights": "what engines take to read a new version, and how long they stand still for it",
    "step": "RL steps of codefix where cores are scarce: cores reserved for a trajectory against held by actions",
    "scheduler-cost": "microseconds and bytes that the scheduler itself takes, with up to a million actions waiting",
}
"""Name to one-line description."""


def run(
    name: str,
    *,
    quick: bool = False,
    trace: Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    **options: object,
) -> BenchResult:
    """Run one benchmark, all its sides on the same work.

    `quick`: fewer seeds and sizes, within a minute. `trace`: a recorded trace, or the folder that holds it, to play
    beside the generated work; only `coding` has a use for one. `processes`: at most this many at once; None: one per
    core. `progress` is told the share that is done. `options`: those of `options_of`, which only some have.
    """
    module = _module(name)
    for option, value in options.items():
        if option not in options_of(name):
            raise InvalidConfig(option, str(value), f"no such option, as {name} has no use for it")
    sizes = module.QUICK if quick else module.FULL
    result: BenchResult = module.measure(
        sizes, trace=trace, processes=processes, progress=progress or _silent, **options
    )
    return result


def options_of(name: str) -> tuple[str, ...]:
    """What this benchmark takes besides what all do: `report`, a file for a page; `backend`, of its sandboxes."""
    options: tuple[str, ...] = getattr(_module(name), "OPTIONS", ())
    return options


def _module(name: str) -> Any:
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidConfig("bench", name, f"one of {', '.join(BENCHES)}{hint}")
    return importlib.import_module(f"tangram.bench.{name.replace('-', '_')}")


def _silent(share: float, words: str = "", /) -> None:
    pass
