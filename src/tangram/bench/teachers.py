"""Teachers: models on devices by action, against dedicated devices and against loading on demand.

A rollout batch of 1024 or 2048 trajectories ends with calls to one of 10 models on 5 nodes of 8 devices, as in the
publication. Restores take 0.2 to 0.5 s. *By action* is `adaptive` without prior information. *Static*: every model has
four dedicated devices. *On demand*: models are loaded for calls, as described in `sim.on_demand`, with the number of
calls per instance that is best at this batch.

The ratios of the mean ACT of a call equal those of the publication's total ACT of a trajectory: all sides play the same
calls of the same trajectories. Possible explanations of differences to the publication are measured as well.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import partial

import msgspec
import numpy as np

from tangram.bench import sizing
from tangram.bench.base import PRINTED, BenchRun, at_least, paired_ratio, run_jobs, run_sides, subprogress
from tangram.core.messages import Effect, Event, Resident
from tangram.reports.statistics import mean_of
from tangram.sim.baselines import PodsConfig
from tangram.sim.episode import SimEpisode, Workload
from tangram.sim.on_demand import NAME as ON_DEMAND
from tangram.sim.on_demand import OnDemandConfig
from tangram.sim.simulate import simulate
from tangram.sim.workloads import build

OURS, STATIC = "adaptive", "pods:0.5"

PUBLISHED = {"act_vs_static_1024": 3.4, "act_vs_static_2048": 18.1, "act_vs_on_demand_1024": 101.8}

LATE_S = 600.0
"""The only time limit that the publication states for a baseline: that of its API calls."""
PEAK_S = 60.0
"""Window for the peak load of one model: a hundred calls, and short compared with the minutes of the burst."""
SURPLUS = 8
"""Oversampling factor from which equally many trajectories per model are kept: the rarest model has 4.6 % of them."""

AS_GENERATED, EVEN = "", "even"
CROWDING = {"half": 0.5, "twice": 2.0}
"""Other shapes of the work, by metric suffix: factors on the time before a trajectory's calls."""

MetricRow = dict[str, float]


class TeachersSizes(msgspec.Struct, frozen=True, kw_only=True):
    batches: tuple[int, ...] = (1024, 2048)
    """Devices saved are measured at the first one."""
    services: int = 10
    devices_per_service: int = 4
    nodes: int = 5
    node_devices: int = 8
    targets: tuple[int, ...] = (1, 4, 16, 64, 256)
    """Calls per instance on demand; the best one counts. The first is that of the released system."""
    engine_start_s: float = 19.0
    """Seconds to start an engine in addition to loading, as reported for vLLM with a small model on one device."""
    router_turn_s: float = 1.0
    """Interval in which the released router hands out one call per model."""
    equal: float = 1.02
    """A mean ACT within this factor counts as the same for `devices_saved`."""
    seeds: int = 10

    @property
    def devices(self) -> int:
        return self.nodes * self.node_devices

    @property
    def sizing(self) -> sizing.SizingSizes:
        return sizing.SizingSizes(
            teachers_batch=self.batches[0],
            services=self.services,
            devices_per_service=self.devices_per_service,
            node_devices=self.node_devices,
            equal=self.equal,
            seeds=self.seeds,
        )


LABEL = "simulated"
FULL = TeachersSizes()
QUICK = TeachersSizes(seeds=3)


class TeachersSide(msgspec.Struct, frozen=True):
    """One simulation per seed: a side and its work."""

    name: str
    batch: int
    shape: str = AS_GENERATED
    on_demand: OnDemandConfig | None = None


def measure(sizes: TeachersSizes, run: BenchRun) -> None:
    jobs = [(sizes.sizing, seed) for seed in range(sizes.seeds)]
    saved = run_jobs(sizing.devices_needed, jobs, run.processes, subprogress(run.progress, 0.0, 0.4))
    sides = sides_of(sizes)
    job, progress = partial(simulate_side, sizes), subprogress(run.progress, 0.4, 1.0)
    rows = run_sides(job, sides, sizes.seeds, run.processes, progress)
    reserved = sizes.sizing.devices_reserved
    share = mean_of([1.0 - row["needed"] / reserved for row in saved])
    run.add("devices_saved", share, at_least(sizing.DEVICES_GOAL))
    run.add("devices_needed", mean_of([row["needed"] for row in saved]))
    for batch in sizes.batches:
        compare_batch(run, sizes, rows, batch)
    add_notes(run, sizes)


def sides_of(sizes: TeachersSizes) -> list[TeachersSide]:
    """All sides, the longest simulations first."""
    shapes = (AS_GENERATED, EVEN, *CROWDING)
    batches = sorted(sizes.batches, reverse=True)
    sides = [TeachersSide(name, batch, shape) for name in (OURS, STATIC) for batch in batches for shape in shapes]
    for batch in batches:
        for configs in _on_demand(sizes).values():
            sides += [
                TeachersSide(ON_DEMAND, batch, shape, config) for shape in (AS_GENERATED, EVEN) for config in configs
            ]
    return sides


def _on_demand(sizes: TeachersSizes) -> dict[str, list[OnDemandConfig]]:
    """On-demand configurations for all numbers of calls per instance: ideal, and with the properties of the released
    system."""
    best = [OnDemandConfig(devices_per_instance=sizes.devices_per_service, target=target) for target in sizes.targets]
    return {
        "": best,
        "_engine_start": [msgspec.structs.replace(config, start_s=sizes.engine_start_s) for config in best],
        "_router": [msgspec.structs.replace(config, turn_s=sizes.router_turn_s) for config in best],
    }


# ---- metrics ----------------------------------------------------------------------------------------------------


def compare_batch(run: BenchRun, sizes: TeachersSizes, rows: dict[TeachersSide, list[MetricRow]], batch: int) -> None:
    """Add all metrics of one batch."""
    ours, static = rows[TeachersSide(OURS, batch)], rows[TeachersSide(STATIC, batch)]
    _ratio(run, f"act_vs_static_{batch}", static, ours)
    run.add(f"busiest_share_{batch}", mean_of([row["busiest_share"] for row in static]))
    run.add(f"peak_load_{batch}", mean_of([row["peak_load"] for row in static]))
    for shape in (EVEN, *CROWDING):
        of_shape = rows[TeachersSide(STATIC, batch, shape)]
        _ratio(run, f"act_vs_static_{batch}_{shape}", of_shape, rows[TeachersSide(OURS, batch, shape)])
        run.add(f"peak_load_{batch}_{shape}", mean_of([row["peak_load"] for row in of_shape]))
    shown = {"by action": ours, "static": static}
    for variant, configs in _on_demand(sizes).items():
        sides = [rows[TeachersSide(ON_DEMAND, batch, AS_GENERATED, config)] for config in configs]
        best = _best(sides)
        _ratio(run, f"act_vs_on_demand_{batch}{variant}", sides[best], ours)
        _ratio(run, f"act_vs_on_demand_{batch}{variant}_target_{sizes.targets[0]}", sides[0], ours)
        run.add(f"on_demand_target_{batch}{variant}", sizes.targets[best])
        run.add(f"on_demand_late_share_{batch}{variant}", mean_of([row["late_share"] for row in sides[best]]))
        shown.setdefault("on demand", sides[best])
        even = [rows[TeachersSide(ON_DEMAND, batch, EVEN, config)] for config in configs]
        _ratio(run, f"act_vs_on_demand_{batch}{variant}_even", even[_best(even)], rows[TeachersSide(OURS, batch, EVEN)])
    for name, side in shown.items():
        run.sides[f"{name} {batch}"] = {number: mean_of([row[number] for row in side]).mean for number in SHOWN}


SHOWN = ("act_mean_s", "act_p99_s", "waiting_share", "device_use", "restores_per_call")
"""Numbers of each side, in table order."""


def _best(sides: list[list[MetricRow]]) -> int:
    return min(range(len(sides)), key=lambda i: math.fsum(row["act_mean_s"] for row in sides[i]))


def _ratio(run: BenchRun, metric: str, other: list[MetricRow], ours: list[MetricRow]) -> None:
    run.add(metric, paired_ratio(other, ours, "act_mean_s"), PRINTED if metric in PUBLISHED else None)


def add_notes(run: BenchRun, sizes: TeachersSizes) -> None:
    """Describe the metrics and compare them with published ones."""
    value = run.metrics
    run.notes.append(
        f"devices_saved is of {sizes.sizing.devices_reserved} devices, {sizes.devices_per_service} for each of"
        f" {sizes.services} models, at batch {sizes.batches[0]} and the same mean ACT within {sizes.equal - 1:.0%}."
    )
    published = [
        f"{name} {value[name]:.3g}, there {published_value:g}"
        for name, published_value in PUBLISHED.items()
        if name in value
    ]
    if published:
        run.notes.append(f"Here and in the publication: {'; '.join(published)}.")
    for batch in sizes.batches:
        run.notes.append(
            f"Static at {batch}: {value[f'busiest_share_{batch}']:.0%} of the calls are for one model, and in the worst"
            f" minute of a model {value[f'peak_load_{batch}']:.2g} times as much work arrives for it as its"
            f" {sizes.devices_per_service} devices can process. With equally popular models that is"
            f" {value[f'peak_load_{batch}_even']:.2g} times, and act_vs_static is"
            f" {value[f'act_vs_static_{batch}_even']:.3g}; with calls twice as bursty it is"
            f" {value[f'act_vs_static_{batch}_half']:.3g}, half as bursty {value[f'act_vs_static_{batch}_twice']:.3g}."
        )
    run.notes.append(
        "Where bursts exceed the capacity of shared devices as well, the ratio falls again."
        " Means over seeds, of which some keep up and some do not, have wide intervals."
    )
    run.notes.append(
        "The publication states neither the popularity of the models nor the burstiness of the calls. Here the shares"
        " are those of a production mix of models, and calls are bursty because trajectories of a domain end together."
    )
    for batch in sizes.batches:
        run.notes.append(_on_demand_note(value, sizes, batch))
    run.notes.append(
        "The publication does not describe the set-up of its on-demand side, on which the ratios here depend strongly:"
        " they bound the published ratio, and a close one may be a coincidence."
    )


def _on_demand_note(value: dict[str, float], sizes: TeachersSizes, batch: int) -> str:
    def times(variant: str) -> str:
        metric, first = f"act_vs_on_demand_{batch}{variant}", sizes.targets[0]
        target = f"{value[f'on_demand_target_{batch}{variant}']:.0f} calls per instance"
        others = f"with {first} {value[f'{metric}_target_{first}']:.3g}; all models equally often"
        return f"{value[metric]:.3g} ({target}; {others} {value[f'{metric}_even']:.3g})"

    return (
        f"On demand at {batch}, with the published load times and no other overhead, the ratio is"
        f" {times('')}. With {sizes.engine_start_s:g} s more to start an engine it is {times('_engine_start')}. With"
        f" the released router, one call per model in {sizes.router_turn_s:g} s, it is {times('_router')}, and"
        f" {value[f'on_demand_late_share_{batch}_router']:.0%} of the calls take more than {LATE_S:.0f} s."
    )


# ---- one simulation ---------------------------------------------------------------------------------------------


def simulate_side(sizes: TeachersSizes, side: TeachersSide, seed: int) -> MetricRow:
    workload = shape_workload(sizes, side.batch, side.shape, seed)
    restores = 0

    def observe(now: float, event: Event, effects: list[Effect]) -> None:
        nonlocal restores
        restores += isinstance(event, Resident)

    result = simulate(
        workload,
        side.name,
        sizing.device_nodes(sizes.devices, sizes.node_devices),
        pods=PodsConfig(devices_per_service=sizes.devices_per_service),
        on_demand=side.on_demand,
        observer=observe,
    )
    calls = sum(len(turn.steps) for episode in workload.episodes for turn in episode.turns)
    acts = result.acts()
    assert len(acts) == calls, f"{side.name} completed {len(acts)} of {calls} calls"
    return {
        "act_mean_s": float(acts.mean()),
        "act_p99_s": float(np.percentile(acts, 99)),
        "waiting_share": math.fsum(row.waiting_s for row in result.rows) / float(acts.sum()),
        "late_share": float(np.mean(acts > LATE_S)),
        "device_use": math.fsum(r.execution_s * r.width for r in result.rows) / (sizes.devices * result.makespan_s),
        "restores_per_call": restores / calls,
        **_busiest(workload, sizes.devices_per_service),
    }


def shape_workload(sizes: TeachersSizes, batch: int, shape: str, seed: int) -> Workload:
    """Return the generated work in one of the shapes."""
    if shape == EVEN:
        drawn = build("teachers", batch=SURPLUS * batch, seed=seed, services=sizes.services)
        return _even_popularity(drawn, batch)
    workload = build("teachers", batch=batch, seed=seed, services=sizes.services)
    if shape == AS_GENERATED:
        return workload
    factor = CROWDING[shape]
    return msgspec.structs.replace(
        workload, episodes=tuple(_scale_thinking(each, factor) for each in workload.episodes)
    )


def _even_popularity(drawn: Workload, batch: int) -> Workload:
    """Return the first trajectories with which all models have equally many, or one more."""
    each, more = divmod(batch, len(drawn.services))
    left = Counter({service.name: each + (number < more) for number, service in enumerate(drawn.services)})
    kept = []
    for episode in drawn.episodes:
        service = episode.turns[0].steps[0].service
        if left[service]:
            left[service] -= 1
            kept.append(episode)
    assert len(kept) == batch, f"of {len(drawn.episodes)} trajectories {len(kept)} are kept, not {batch}: {left}"
    return msgspec.structs.replace(drawn, episodes=tuple(kept))


def _scale_thinking(episode: SimEpisode, factor: float) -> SimEpisode:
    turns = (msgspec.structs.replace(turn, think_s=factor * turn.think_s) for turn in episode.turns)
    return msgspec.structs.replace(episode, turns=tuple(turns))


def _busiest(workload: Workload, devices: int) -> MetricRow:
    """Return the largest share of the calls for one model, and the maximum work for one model in PEAK_S seconds,
    relative to what a copy on `devices` devices does in that time."""
    coming: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for episode in workload.episodes:
        (turn,) = episode.turns
        for step in turn.steps:
            seconds = step.work_s / step.speedup.at(devices)
            coming[step.service].append((episode.start_s + turn.think_s, seconds))
    calls = sum(map(len, coming.values()))
    return {
        "busiest_share": max(map(len, coming.values())) / calls,
        "peak_load": max(peak_s(sorted(each)) for each in coming.values()) / PEAK_S,
    }


def peak_s(coming: list[tuple[float, float]]) -> float:
    """Return the maximum seconds of work within PEAK_S; `coming` has times and seconds, sorted by time."""
    most = within = 0.0
    oldest = 0
    for at, seconds in coming:
        within += seconds
        while coming[oldest][0] <= at - PEAK_S:
            within -= coming[oldest][1]
            oldest += 1
        most = max(most, within)
    return most
