"""Compare: several policies and baselines on the same work, over several seeds, with ratios and their intervals.

Owns what a comparison is: its set-up, its rows, the ratios against a base. Every policy meets the very same episodes
under a seed, so ratios are taken seed by seed and then averaged. Promises the same numbers for the same set-up,
however many processes share the work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tangram.core.demand import GPU
from tangram.core.limits import Limits
from tangram.core.messages import Pool
from tangram.core.policies import POLICIES, policy
from tangram.errors import InvalidConfig
from tangram.files.atomic_file import partial_of
from tangram.processes.process_pool import Progress, Workers
from tangram.reports.formatting import out_of
from tangram.reports.statistics import Interval, ratio_of
from tangram.runtime.trace_recorder import recording
from tangram.sim import faults, traces
from tangram.sim.baselines import pods_config
from tangram.sim.episode import Workload
from tangram.sim.on_demand import NAME as ON_DEMAND
from tangram.sim.result import Result
from tangram.sim.simulate import BASELINES, KNOWLEDGE, simulate
from tangram.sim.size import Load, Size, load, pods_can_run, span
from tangram.sim.workloads import build, options

METRICS = {
    "act_mean_s": "mean ACT",
    "act_p50_s": "p50",
    "act_p95_s": "p95",
    "act_p99_s": "p99",
    "act_weighted_s": "time-weighted ACT",
    "step_s": "step time",
}
"""What ratios are taken of, with the words for it. Less is better in all of them."""


# ---- what is compared -----------------------------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the work comes from: a workload by name, or trace files."""

    workload: str = ""
    traces: tuple[str, ...] = ()
    batch: int | None = None
    """None: the default of the workload; of a trace, each trajectory once."""
    options: tuple[tuple[str, Any], ...] = ()

    def build(self, seed: int) -> Workload:
        if self.traces:
            return traces.load_all(self.traces, batch=self.batch, seed=seed, **dict(self.options))
        return build(self.workload, batch=self.batch, seed=seed, **dict(self.options))

    @property
    def name(self) -> str:
        return self.workload or "+".join(Path(path).name for path in self.traces)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison to make."""

    source: Source
    size: Size
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    base: str | None = None
    """What the others are measured against. None: the first policy."""
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
            options.known("base", self.base, self.policies)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise InvalidConfig("seeds", list(self.seeds), "different whole numbers, at least 0")
        options.known("knowledge", self.knowledge, KNOWLEDGE)
        options.whole("faults", self.faults, least=0)
        if self.ageing_s is not None:
            options.positive("ageing", self.ageing_s)

    @property
    def measured_against(self) -> str:
        return self.policies[0] if self.base is None else self.base


def check_policy(name: str) -> None:
    """Raises InvalidConfig with the nearest valid name."""
    family, _, option = name.partition(":")
    if family == "pods" and option:
        pods_config(name)
    elif name not in ("alone", ON_DEMAND):
        known = [*POLICIES, *BASELINES]
        if family not in {other.partition(":")[0] for other in known if other not in BASELINES}:
            options.known("policy", name, known)
        policy(name)


# ---- one simulation -------------------------------------------------------------------------------------------


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation of a comparison."""

    setup: Setup
    policy: str
    seed: int
    keep: bool = False
    """Bring the whole result back, not only its summary."""
    record: str = ""
    """File to record it in."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What one simulation brought."""

    policy: str
    seed: int
    summary: dict[str, float]
    load: Load
    result: Result | None = None


def play(task: Task, progress: Progress) -> Played:
    """Simulate one task. It runs in a worker process, or in this one."""
    setup, name = task.setup, task.policy
    workload = workload_of(setup.source, task.seed)
    pools = setup.size.pools(workload)
    limits = Limits() if setup.ageing_s is None else Limits(ageing_s=setup.ageing_s)
    if name.startswith("pods") and not pods_can_run(workload):
        raise InvalidConfig("policy", name, f"no pods: {workload.name} has CPU actions without a sandbox")
    until_s = span(workload)
    with recording(task.record, policy=name, pools=pools, limits=limits, note=_note(task)) as observer:
        result = simulate(
            workload,
            name,
            pools,
            knowledge=setup.knowledge,
            limits=limits,
            faults=faults.draw(task.seed, until_s=until_s, count=setup.faults) if setup.faults else (),
            observer=observer,
            progress=progress,
        )
    return Played(
        policy=name,
        seed=task.seed,
        summary=result.summary() | _device_use(result, pools),
        load=load(workload, setup.size),
        result=result if task.keep else None,
    )


def _device_use(result: Result, pools: tuple[Pool, ...]) -> dict[str, float]:
    """Devices run on nodes of their own, so the node tells which actions used them."""
    devices = {pool.node: pool.total for pool in pools if pool.kind == GPU}
    if not devices or not result.makespan_s:
        return {}
    held_s = sum(row.width * row.execution_s for row in result.rows if row.node in devices)
    return {"device_use": held_s / (sum(devices.values()) * result.makespan_s)}


@functools.lru_cache(maxsize=1)
def workload_of(source: Source, seed: int) -> Workload:
    """The work under a seed. The last one is kept, because the policies of a seed come one after the other."""
    return source.build(seed)


def _note(task: Task) -> str:
    return f"simulated: {task.setup.source.name}, seed {task.seed}, {task.setup.size.describe()}"


# ---- the comparison -------------------------------------------------------------------------------------------


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of one set-up."""

    setup: Setup
    load: Load
    """Mean over seeds."""
    rows: list[Played]
    """By seed, then in the order of the policies."""

    @property
    def base(self) -> str:
        return self.setup.measured_against

    def mean(self, name: str, metric: str) -> float | None:
        """Over seeds; None where it is not known under each of them, as the time of a step that lost a trajectory."""
        values = self.values(name, metric)
        return sum(values) / len(values) if values else None

    def values(self, name: str, metric: str) -> list[float]:
        """One per seed, in the order of the seeds; none at all where one is missing: the rest would mislead."""
        found = [row.summary.get(metric) for row in self.rows if row.policy == name]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else []

    def ratio(self, name: str, metric: str) -> Interval | None:
        """How many times less the policy needs than the base; None where one of them is zero or not known."""
        above, below = self.values(self.base, metric), self.values(name, metric)
        return ratio_of(above, below) if above and below else None

    def completed(self, name: str) -> tuple[float, float]:
        """Trajectories that reached their end, and all of them; means over seeds."""
        total = sum(self.values(name, "trajectories")) / len(self.setup.seeds)
        return total - sum(self.values(name, "failed")) / len(self.setup.seeds), total

    def warning(self) -> str:
        """What is missing from the numbers, and what to do about it; empty if nothing is."""
        done = {name: self.completed(name) for name in self.setup.policies}
        lost = [f"{out_of(*done[name])} under {name}" for name in done if done[name][0] < done[name][1]]
        if not lost:
            return ""
        told = [
            f"trajectories were lost; completed are {', '.join(lost)}.",
            "What the others would still have done is missing: ACT is that of less work than was asked for, and a step"
            " that did not complete has no time.",
        ]
        if len(set(done.values())) > 1:
            told.append("Policies that completed different numbers did different work; their ratios say little.")
        return " ".join([*told, self._advice()])

    def _advice(self) -> str:
        setup = self.setup
        if not setup.faults:
            return (
                "No fault was asked for: a pool or a quota is too small. A smaller --batch or larger pools lose less."
            )
        if setup.size.cores and setup.size.nodes == 1:
            return "All cores are on one node and everything goes down with it: more --nodes lose less at once."
        return "More --nodes lose less at once, fewer --faults less in all."

    def kept(self, name: str) -> Result | None:
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
    """Make all comparisons, sharing the processes.

    `keep`: keep the whole results of the first seed, as a report needs them. `record_to`: record the last-named
    policy of the first set-up under its first seed in that file.
    """
    tasks = [task for setup in setups for task in _tasks(setup, keep)]
    if record_to is not None:
        recorded = len(setups[0].policies) - 1
        tasks[recorded] = msgspec.structs.replace(tasks[recorded], record=str(record_to))
    try:
        with Workers(workers) as pool:
            played = iter(pool.map(play, tasks, progress))
    finally:
        if record_to is not None:
            # A worker that was ended could not do it.
            partial_of(record_to).unlink(missing_ok=True)
    return [_gathered(setup, [next(played) for _ in _tasks(setup, keep)]) for setup in setups]


def _tasks(setup: Setup, keep: bool) -> list[Task]:
    """By seed first: a worker then builds the work of a seed once."""
    return [
        Task(setup=setup, policy=name, seed=seed, keep=keep and seed == setup.seeds[0])
        for seed in setup.seeds
        for name in setup.policies
    ]


def _gathered(setup: Setup, rows: list[Played]) -> Comparison:
    loads = [row.load for row in rows if row.policy == setup.policies[0]]
    fields = Load.__struct_fields__
    means = {field: sum(getattr(each, field) for each in loads) / len(loads) for field in fields}
    return Comparison(setup=setup, load=Load(**means), rows=rows)
