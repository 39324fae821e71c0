"""The benchmarks behind `tangram bench`: one module each, found by name.

Owns the list of their names. A benchmark is imported when it is run, not before.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

from tangram.bench.base import BenchResult, Goal, Progress, options_of_module, run_module
from tangram.errors import InvalidConfig

__all__ = ["BENCHES", "BenchResult", "Goal", "options_of", "run"]

BENCHES = {
    "reservation": "coding agents on real sandboxes: a core per trajectory against sharing the same cores by action",
    "coding": "tool calls and rewards of coding agents: a pod per trajectory against sharing cores by action",
    "elastic": "elastic actions at stated loads: the published algorithm against ours, and both against a bound",
    "sizing": "cores and devices that give the same mean action completion time as today's reservations",
    "teachers": "models on devices by action, against devices of their own and against loading them on demand",
    "exec": "the overhead of an action on top of its program: opening, executing, keeping a sandbox open",
    "functions": "the overhead of a function call, the time to scale from zero, and what scaling saves",
    "cpu": "whether an action gets the CPU that it was granted, no less and no more",
    "services": "six model services on two emulated devices against a device for each",
    "quota": "a burst of calls to an API that enforces its quota: shared by action, and uncontrolled",
    "http": "the overhead of the shared service: no-op actions over HTTP, with the journal on",
    "durability": "whether acknowledged actions survive when the shared service is killed again and again",
    "soak": "whether the shared service leaks memory or other resources under constant load",
    "dashboard": "the latency of the dashboard in a browser, with ten thousand actions in view",
    "rollout": "trajectory-level rollout against turn-batched rollout, on one engine",
    "affinity": "two tasks on the hardware that suits each, against either class alone at equal cost",
    "redundancy": "what redundant groups and members save and waste",
    "serverless": "rewards on workers of their own against functions that scale from zero",
    "engine": "what a command and a prompt cost running requests, and throughput of continuous batching",
    "learning": "whether policies learn: each built-in task alone, three mixed, and one at several staleness limits",
    "ladder": "five ways to schedule the same training run, from strictly sequential to fully asynchronous",
    "weights": "the time for engines to load a new version, and how long they are suspended for it",
    "step": "RL steps of codefix where cores are scarce: cores reserved for a trajectory against held by actions",
    "scheduler-cost": "microseconds and bytes of the scheduler itself, with up to a million waiting actions",
}
"""Name to one-line description."""


def run(
    name: str,
    *,
    quick: bool = False,
    trace: Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> BenchResult:
    """Run one benchmark, all its sides on the same work.

    `quick`: fewer seeds and sizes, within a minute. `trace`: a recorded trace, or the folder that holds it, to replay
    in addition to the generated work; only `coding` uses it. `processes`: maximum of concurrent processes; None: one
    per core. `progress` is called with the completed share. `options`: those of `options_of`.
    """
    module = _module(name)
    for option, value in options.items():
        if option not in options_of(name):
            raise InvalidConfig(option, str(value), f"no such option: {name} does not use it")
    sizes = module.QUICK if quick else module.FULL
    return run_module(module, sizes, trace=trace, processes=processes, progress=progress, **options)


def options_of(name: str) -> tuple[str, ...]:
    """Return the additional options: `report`, a page; `perfetto`, a Chrome trace; `backend`, of its sandboxes."""
    return options_of_module(_module(name))


def _module(name: str) -> Any:
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidConfig("bench", name, f"one of {', '.join(BENCHES)}{hint}")
    return importlib.import_module(f"tangram.bench.{name.replace('-', '_')}")
