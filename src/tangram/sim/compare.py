"""Compare: several policies and baselines on the same work, over several seeds, with ratios and their intervals.

Owns the set-up of a comparison, its rows, and the ratios against a base. Under a seed every policy gets identical
episodes, so ratios are taken per seed and then averaged. Same set-up, same numbers, for any number of worker processes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from tangram.core.demand import GPU
from tangram.core.limits import Limits
from tangram.core.messages import Pool
from tangram.core.policies import POLICIES, policy
from tangram.errors import InvalidConfig
from tangram.files.atomic_file import partial_path_of
from tangram.processes.process_pool import ProcessPool, Progress
from tangram.reports.formatting import out_of
from tangram.reports.statistics import Interval, ratio_of
from tangram.runtime.trace_recorder import record_trace
from tangram.sim import faults, traces
from tangram.sim.baselines import pods_config
from tangram.sim.episode import Workload
from tangram.sim.on_demand import NAME as ON_DEMAND
from tangram.sim.result import SimulationResult
from tangram.sim.simulate import BASELINES, KNOWLEDGE, simulate
from tangram.sim.size import LoadEstimate, Size, estimate_load, pods_can_run, span
from tangram.sim.workloads import build, options

METRICS = {
    "act_mean_s": "mean ACT",
    "act_p50_s": "p50",
    "act_p95_s": "p95",
    "act_p99_s": "p99",
    "act_weighted_s": "time-weighted ACT",
    "step_s": "step time",
}
"""Metrics with ratios, and their labels. Lower is better in all of them."""


# ---- the set-up of a comparison -------------------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the work: a workload by name, or trace files."""

    workload: str = ""
    traces: tuple[str, ...] = ()
    batch: int | None = None
    """None: the default of the workload; for a trace, each trajectory once."""
    options: tuple[tuple[str, Any], ...] = ()

    def build(self, seed: int) -> Workload:
        if self.traces:
            return traces.load_all(self.traces, batch=self.batch, seed=seed, **dict(self.options))
        return build(self.workload, batch=self.batch, seed=seed, **dict(self.options))

    @property
    def name(self) -> str:
        return self.workload or "+".join(Path(path).name for path in self.traces)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    source: Source
    size: Size
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    base: str | None = None
    """The policy that the others are compared with. None: the first one."""
    knowledge: str = "learned"
    faults: int = 0
    """Seeded faults per simulation."""
    ageing_s: float | None = None

    def __post_init__(self) -> None:
        if not self.policies:
            raise InvalidConfig("policies", "none", "at least one policy or baseline")
        for name in self.policies:
            check_policy(name)
        if self.base is not None:
            options.check_choice("base", self.base, self.policies)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise InvalidConfig("seeds", list(self.seeds), "different whole numbers, at least 0")
        options.check_choice("knowledge", self.knowledge, KNOWLEDGE)
        options.check_integer("faults", self.faults, least=0)
        if self.ageing_s is not None:
            options.check_positive("ageing", self.ageing_s)

    @property
    def base_policy(self) -> str:
        return self.policies[0] if self.base is None else self.base


def check_policy(name: str) -> None:
    """Raises InvalidConfig with the nearest valid name."""
    family, _, option = name.partition(":")
    if family == "pods" and option:
        pods_config(name)
    elif name not in ("alone", ON_DEMAND):
        known = [*POLICIES, *BASELINES]
        if family not in {other.partition(":")[0] for other in known if other not in BASELINES}:
            options.check_choice("policy", name, known)
        policy(name)


# ---- one simulation -------------------------------------------------------------------------------------------


class SimulationTask(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation of a comparison."""

    setup: Setup
    policy: str
    seed: int
    keep: bool = False
    """Return the whole result, not only its summary."""
    record: str = ""
    """File to record it in."""


class SimulationRun(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one simulation."""

    policy: str
    seed: int
    summary: dict[str, float]
    load: LoadEstimate
    result: SimulationResult | None = None


def simulate_task(task: SimulationTask, progress: Progress) -> SimulationRun:
    """Simulate one task. It runs in a worker process, or in this one."""
    setup, name = task.setup, task.policy
    workload = build_workload(setup.source, task.seed)
    pools = setup.size.pools(workload)
    limits = Limits() if setup.ageing_s is None else Limits(ageing_s=setup.ageing_s)
    if name.startswith("pods") and not pods_can_run(workload):
        raise InvalidConfig("policy", name, f"no pods: {workload.name} has CPU actions without a sandbox")
    until_s = span(workload)
    trace = record_trace(task.record, policy=name, pools=pools, limits=limits, note=_note(task))
    with trace if task.record else nullcontext() as observer:
        result = simulate(
            workload,
            name,
            pools,
            knowledge=setup.knowledge,
            limits=limits,
            faults=faults.draw_faults(task.seed, until_s=until_s, count=setup.faults) if setup.faults else (),
            observer=observer,
            progress=progress,
        )
    if observer is not None and observer.error is not None:
        raise observer.error
    return SimulationRun(
        policy=name,
        seed=task.seed,
        summary=result.summary() | _device_use(result, pools),
        load=estimate_load(workload, setup.size),
        result=result if task.keep else None,
    )


def _device_use(result: SimulationResult, pools: tuple[Pool, ...]) -> dict[str, float]:
    """Return the device use. Devices have nodes of their own, so the node identifies the actions that used them."""
    devices = {pool.node: pool.total for pool in pools if pool.kind == GPU}
    if not devices or not result.makespan_s:
        return {}
    held_s = sum(row.width * row.execution_s for row in result.rows if row.node in devices)
    return {"device_use": held_s / (sum(devices.values()) * result.makespan_s)}


@functools.lru_cache(maxsize=1)
def build_workload(source: Source, seed: int) -> Workload:
    """Build the work under a seed. The last one is cached, because the policies of a seed follow each other."""
    return source.build(seed)


def _note(task: SimulationTask) -> str:
    return f"simulated: {task.setup.source.name}, seed {task.seed}, {task.setup.size.describe()}"


# ---- the comparison -------------------------------------------------------------------------------------------


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one set-up."""

    setup: Setup
    load: LoadEstimate
    """Mean over seeds."""
    rows: list[SimulationRun]
    """By seed, then in the order of the policies."""

    @property
    def base(self) -> str:
        return self.setup.base_policy

    def mean(self, name: str, metric: str) -> float | None:
        """Return the mean over seeds; None if it is undefined under any, such as the time of a step that lost a
        trajectory."""
        values = self.values(name, metric)
        return sum(values) / len(values) if values else None

    def values(self, name: str, metric: str) -> list[float]:
        """Return one value per seed, in order; empty if one is missing, because the rest would mislead."""
        values = [row.summary.get(metric) for row in self.rows if row.policy == name]
        known = [value for value in values if value is not None]
        return known if len(known) == len(values) else []

    def ratio(self, name: str, metric: str) -> Interval | None:
        """Return how many times less the policy needs than the base; None where one of them is zero or undefined."""
        above, below = self.values(self.base, metric), self.values(name, metric)
        return ratio_of(above, below) if above and below else None

    def completed(self, name: str) -> tuple[float, float]:
        """Return completed trajectories and all trajectories; means over seeds."""
        total = sum(self.values(name, "trajectories")) / len(self.setup.seeds)
        return total - sum(self.values(name, "failed")) / len(self.setup.seeds), total

    def warning(self) -> str:
        """Return what the numbers lack and what to do about it; empty if nothing."""
        done = {name: self.completed(name) for name in self.setup.policies}
        lost = [f"{out_of(*done[name])} under {name}" for name in done if done[name][0] < done[name][1]]
        if not lost:
            return ""
        sentences = [
            f"trajectories were lost; completed are {', '.join(lost)}.",
            "The remaining actions of lost trajectories are missing: ACT covers less work than requested, and a step"
            " that did not complete has no time.",
        ]
        if len(set(done.values())) > 1:
            sentences.append("Policies that completed different numbers did different work; their ratios say little.")
        return " ".join([*sentences, self._advice()])

    def _advice(self) -> str:
        setup = self.setup
        if not setup.faults:
            return (
                "No faults were requested: a pool or a quota is too small. A smaller --batch or larger pools lose less."
            )
        if setup.size.cores and setup.size.nodes == 1:
            return "All cores are on one node and everything goes down with it: more --nodes lose less at once."
        return "More --nodes lose less at once, fewer --faults less in all."

    def kept_result(self, name: str) -> SimulationResult | None:
        """The whole result under the first seed, if it was kept."""
        return next((row.result for row in self.rows if row.policy == name and row.result is not None), None)


def compare(
    setups: Sequence[Setup],
    *,
    workers: int | None = None,
    keep: bool = False,
    record_to: Path | None = None,
    progress: Progress | None = None,
) -> list[Comparison]:
    """Run all comparisons in shared worker processes.

    `keep`: keep the whole results of the first seed, as a report needs them. `record_to`: record the last-named policy
    of the first set-up under its first seed in that file.
    """
    tasks = [task for setup in setups for task in _tasks(setup, keep)]
    if record_to is not None:
        recorded = len(setups[0].policies) - 1
        tasks[recorded] = msgspec.structs.replace(tasks[recorded], record=str(record_to))
    try:
        with ProcessPool(workers) as pool:
            played = iter(pool.map(simulate_task, tasks, progress))
    finally:
        if record_to is not None:
            # A terminated worker could not remove it.
            partial_path_of(record_to).unlink(missing_ok=True)
    return [_collect(setup, [next(played) for _ in _tasks(setup, keep)]) for setup in setups]


def _tasks(setup: Setup, keep: bool) -> list[SimulationTask]:
    """By seed first: a worker then builds the work of a seed once."""
    return [
        SimulationTask(setup=setup, policy=name, seed=seed, keep=keep and seed == setup.seeds[0])
        for seed in setup.seeds
        for name in setup.policies
    ]


def _collect(setup: Setup, rows: list[SimulationRun]) -> Comparison:
    loads = [row.load for row in rows if row.policy == setup.policies[0]]
    fields = LoadEstimate.__struct_fields__
    means = {field: sum(getattr(each, field) for each in loads) / len(loads) for field in fields}
    return Comparison(setup=setup, load=LoadEstimate(**means), rows=rows)
