"""The benchmarks behind `tangram bench`: one file each, found by name.

Owns the list of their names. A benchmark is imported when it is run, not before.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path

from tangram.bench.base import BenchResult, Goal
from tangram.errors import InvalidConfig

__all__ = ["BENCHES", "BenchResult", "Goal", "run"]

BENCHES = {
    "coding": "tool calls and rewards of coding agents: a pod per trajectory against sharing cores by action",
    "elastic": "elastic actions at stated loads: the published algorithm against ours, and both against a bound",
    "sizing": "cores and devices that give the same mean action completion time as today's reservations",
    "scheduler-cost": "microseconds and bytes that the scheduler itself takes, with up to a million actions waiting",
}
"""Name to one-line description."""


def run(
    name: str,
    *,
    quick: bool = False,
    trace: Path | None = None,
    processes: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> BenchResult:
    """Run one benchmark, all its sides on the same work.

    `quick`: fewer seeds and sizes, within a minute. `trace`: a recorded trace, or the folder that holds it, to play
    beside the generated work; only `coding` has a use for one. `processes`: at most this many at once; None: one per
    core. `progress` is told the share that is done.
    """
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidConfig("bench", name, f"one of {', '.join(BENCHES)}{hint}")
    module = importlib.import_module(f"tangram.bench.{name.replace('-', '_')}")
    sizes = module.QUICK if quick else module.FULL
    result: BenchResult = module.measure(sizes, trace=trace, processes=processes, progress=progress or _silent)
    return result


def _silent(share: float) -> None:
    pass
