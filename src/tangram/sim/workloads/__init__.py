"""Workloads: what agents submit to the pools, built by name; one file per built-in workload.

Owns the list of built-in workloads. Each is a generator fitted to measurements of real agents. Same name, seed and
options: same episodes, under any PYTHONHASHSEED; episode k is the same for every batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tangram.sim.episode import Workload
from tangram.sim.workloads import coding, elastic, mixed, options, search, teachers

WORKLOADS = {
    "coding": "software-engineering agents: short tool calls in sandboxes, test suites as reward",
    "search": "deep search agents: parallel searches and page fetches under quotas, a judge model as reward",
    "teachers": "trajectories that end with calls to one of several teacher models on GPUs",
    "mixed": "coding, search and teachers at once, as three runs",
    "elastic": "independent elastic actions with Poisson arrivals at a given load, for comparing schedulers",
}
"""Name to one-line description."""

_BUILDERS: dict[str, Callable[..., Workload]] = {
    "coding": coding.build,
    "search": search.build,
    "teachers": teachers.build,
    "mixed": mixed.build,
    "elastic": elastic.build,
}


def build(name: str, *, batch: int | None = None, seed: int = 0, **chosen: Any) -> Workload:
    """Build the named workload with `batch` episodes (None: its own default); `chosen` are its own options."""
    options.check_choice("workload", name, WORKLOADS)
    builder = _BUILDERS[name]
    options.check_options(f"workload {name}", builder, chosen)
    options.check_integer("seed", seed, least=0)
    if batch is None:
        return builder(seed=seed, **chosen)
    options.check_integer("batch", batch)
    return builder(batch=batch, seed=seed, **chosen)
