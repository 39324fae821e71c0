"""Sizing: the smallest pools with the mean ACT of today's reservations.

Cores, on `coding`: a pod per trajectory with a request of 0.5 cores reserves half a core for each of 512 trajectories,
256 cores, all admitted at once. Devices, on `teachers`: 10 services on 4 dedicated devices each, 40 devices. For every
seed, a search finds the smallest number of cores and of devices with which `adaptive` without prior information has the
same mean ACT. Devices come in nodes of 8, the last one possibly smaller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial

import msgspec
import numpy as np

from tangram.bench.base import PRINTED, BenchRun, at_least, run_sides
from tangram.core.demand import GPU
from tangram.core.messages import Pool, cpu_node
from tangram.reports.statistics import mean_of
from tangram.sim.baselines import PodsConfig
from tangram.sim.result import SimulationResult
from tangram.sim.simulate import simulate
from tangram.sim.workloads import build

PODS, OURS = "pods:0.5", "adaptive"
CORES_GOAL, DEVICES_GOAL = 0.75, 0.712
"""Saved shares: for cores as measured on a real trace, for devices as published."""

MetricRow = dict[str, float]


class SizingSizes(msgspec.Struct, frozen=True, kw_only=True):
    batch: int = 512
    request_cores: float = 0.5
    """Request of a pod; every trajectory reserves this much."""
    gib_per_core: float = 9.4
    sandbox_mib: int = 256
    cores_step: int = 2
    """The search is exact to this many cores."""
    teachers_batch: int = 1024
    services: int = 10
    devices_per_service: int = 4
    node_devices: int = 8
    equal: float = 1.02
    """A mean ACT within this factor counts as the same."""
    seeds: int = 10

    @property
    def cores_reserved(self) -> int:
        return round(self.batch * self.request_cores)

    @property
    def devices_reserved(self) -> int:
        return self.services * self.devices_per_service


LABEL = "simulated"
FULL = SizingSizes()
QUICK = SizingSizes(cores_step=8, seeds=3)


def measure(sizes: SizingSizes, run: BenchRun) -> None:
    searches = [cores_needed, devices_needed]
    rows = run_sides(partial(_search, sizes), searches, sizes.seeds, run.processes, run.progress)
    cores, devices = rows[cores_needed], rows[devices_needed]
    _report(run, "cores", cores, sizes.cores_reserved, CORES_GOAL)
    _report(run, "devices", devices, sizes.devices_reserved, DEVICES_GOAL)
    saved_p99 = mean_of([1.0 - row["needed p99"] / sizes.devices_reserved for row in devices])
    run.add("devices_saved_p99", saved_p99, PRINTED)
    for name in ("swaps_per_call", "degree", "waiting_share"):
        run.add(f"devices_{name}", mean_of([row[name] for row in devices]))
    run.notes.append(
        f"Reserved are {sizes.request_cores} cores for each of {sizes.batch} trajectories ({sizes.cores_reserved}) and"
        f" {sizes.devices_per_service} devices for each of {sizes.services} services ({sizes.devices_reserved})."
        f" The same mean ACT means within {sizes.equal - 1:.0%}; for devices_saved_p99 the same applies to the p99."
    )
    run.notes.append(
        "The load is stated by *_use_reserved, the share of the reserved units that is used over the step. Static"
        " services are idle on average and still queue, because calls arrive in bursts for few services at a time:"
        " compare devices_act_mean_s_reserved with the 0.6 s that a call takes."
    )


def _report(run: BenchRun, what: str, rows: list[MetricRow], reserved: int, goal: float) -> None:
    run.add(f"{what}_saved", mean_of([1.0 - row["needed"] / reserved for row in rows]), at_least(goal))
    run.add(f"{what}_needed", mean_of([row["needed"] for row in rows]))
    run.add(f"{what}_reserved", reserved)
    run.add(f"{what}_use_reserved", mean_of([row["reserved use"] for row in rows]))
    run.add(f"{what}_use_needed", mean_of([row["use"] for row in rows]))
    for name in ("mean", "p99"):
        run.add(f"{what}_act_{name}_s_reserved", mean_of([row[f"reserved {name}"] for row in rows]))
        run.add(f"{what}_act_{name}_s_needed", mean_of([row[name] for row in rows]))


def _search(sizes: SizingSizes, search: Callable[[SizingSizes, int], MetricRow], seed: int) -> MetricRow:
    return search(sizes, seed)


def cores_needed(sizes: SizingSizes, seed: int) -> MetricRow:
    workload = build("coding", batch=sizes.batch, seed=seed, memory=sizes.sandbox_mib)

    @cache
    def simulate_on(cores: int, name: str = OURS) -> SimulationResult:
        return simulate(workload, name, cpu_node("n0", cores, sizes.gib_per_core * cores))

    reserved = simulate_on(sizes.cores_reserved, f"pods:{sizes.request_cores}")
    candidates = [*range(sizes.cores_step, sizes.cores_reserved, sizes.cores_step), sizes.cores_reserved]
    mean_max = sizes.equal * _mean_s(reserved)
    guess = round(sizes.cores_reserved * (1.0 - CORES_GOAL))
    needed = smallest(lambda cores: _mean_s(simulate_on(cores)) <= mean_max, candidates, guess)
    return {
        **_row(simulate_on(needed), reserved, needed),
        "use": simulate_on(needed).core_s / (needed * simulate_on(needed).makespan_s),
        "reserved use": reserved.core_s / (sizes.cores_reserved * reserved.makespan_s),
    }


def devices_needed(sizes: SizingSizes, seed: int) -> MetricRow:
    workload = build("teachers", batch=sizes.teachers_batch, seed=seed, services=sizes.services)

    @cache
    def simulate_on(devices: int, name: str = OURS) -> SimulationResult:
        config = PodsConfig(devices_per_service=sizes.devices_per_service)
        return simulate(workload, name, device_nodes(devices, sizes.node_devices), pods=config)

    reserved = simulate_on(sizes.devices_reserved, PODS)
    candidates = list(range(max(service.degrees[0] for service in workload.services), sizes.devices_reserved + 1))
    mean_max, p99_max = sizes.equal * _mean_s(reserved), sizes.equal * _p99_s(reserved)
    guess = round(sizes.devices_reserved * (1.0 - DEVICES_GOAL))
    needed = smallest(lambda devices: _mean_s(simulate_on(devices)) <= mean_max, candidates, guess)
    calls = simulate_on(needed).rows
    return {
        **_row(simulate_on(needed), reserved, needed),
        "needed p99": smallest(
            lambda devices: _p99_s(simulate_on(devices)) <= p99_max, candidates[needed - candidates[0] :], needed
        ),
        "use": _device_s(simulate_on(needed)) / (needed * simulate_on(needed).makespan_s),
        "reserved use": _device_s(reserved) / (sizes.devices_reserved * reserved.makespan_s),
        "swaps_per_call": float(np.mean([call.overhead_s > 0.0 for call in calls])),
        "degree": float(np.mean([call.width for call in calls])),
        "waiting_share": sum(call.waiting_s for call in calls) / sum(call.act_s for call in calls),
    }


def smallest(enough: Callable[[int], bool], candidates: list[int], guess: int) -> int:
    """Return the first of the increasing candidates that is enough, by bisection; the last one if none is.

    The guess is tried first: a good one halves the number of trials.
    """
    place = bisect_left(candidates, guess)
    if enough(candidates[place]):
        return candidates[bisect_left(candidates[:place], True, key=enough)]
    return candidates[bisect_left(candidates[:-1], True, lo=place + 1, key=enough)]


def device_nodes(devices: int, each: int) -> tuple[Pool, ...]:
    """Return nodes of `each` devices; the last one has the remainder."""
    sizes = [each] * (devices // each) + ([devices % each] if devices % each else [])
    return tuple(Pool(kind=GPU, node=f"g{i}", total=size) for i, size in enumerate(sizes))


def _row(result: SimulationResult, reserved: SimulationResult, needed: int) -> MetricRow:
    return {
        "needed": needed,
        "mean": _mean_s(result),
        "p99": _p99_s(result),
        "reserved mean": _mean_s(reserved),
        "reserved p99": _p99_s(reserved),
    }


def _mean_s(result: SimulationResult) -> float:
    return float(result.acts().mean())


def _p99_s(result: SimulationResult) -> float:
    return float(np.percentile(result.acts(), 99))


def _device_s(result: SimulationResult) -> float:
    """Return the device-seconds of executed calls, without restores."""
    return sum(row.execution_s * row.width for row in result.rows)
