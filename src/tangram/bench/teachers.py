"""Teachers: models on devices by action, against devices of their own and against loading them on demand.

A rollout batch of 1024 or 2048 trajectories ends with calls to one of 10 models on 5 nodes of 8 devices, as in the
publication's test of its devices. Restores take 0.2 to 0.5 s. *By action* is `adaptive`, told nothing beforehand.
*Static*: every model has four devices of its own. *On demand*: models are loaded for calls, as `sim.on_demand` states,
with the number of calls per instance that is best at this batch.

ACT counts from submission. The ratios of the mean ACT of a call are those of the publication's total ACT of a
trajectory: all sides play the same calls of the same trajectories.

What explains a difference to the publication is measured beside: how far a model is over the capacity of its devices at
its peak; the same with all models asked for equally often, and with trajectories that end less or more crowded; what
the released on-demand system does that the one here does not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import numpy as np

from tangram.bench import sizing
from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, paired, part, play
from tangram.core.messages import Effect, Event, Resident
from tangram.reports.statistics import mean_of
from tangram.sim.baselines import PodsConfig
from tangram.sim.episode import Episode, Workload
from tangram.sim.on_demand import NAME as ON_DEMAND
from tangram.sim.on_demand import OnDemandConfig
from tangram.sim.simulate import simulate
from tangram.sim.workloads import build

OURS, STATIC = "adaptive", "pods:0.5"

PUBLISHED = {"act_vs_static_1024": 3.4, "act_vs_static_2048": 18.1, "act_vs_on_demand_1024": 101.8}

LATE_S = 600.0
"""The one time limit that the publication states for a baseline, that of its calls to APIs."""
PEAK_S = 60.0
"""Over which the most work for one model is taken: a hundred calls, and short beside the minutes that they come in."""
SURPLUS = 8
"""So many times the trajectories are drawn of which equally many per model are kept: the rarest has 4.6 % of them."""

AS_IT_IS, EVEN = "", "even"
CROWDING = {"half": 0.5, "twice": 2.0}
"""Other shapes of the work, by the end of their metrics: factors on the time before a trajectory's calls."""

Row = dict[str, float]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    batches: tuple[int, ...] = (1024, 2048)
    """The first one is that at which devices are saved."""
    services: int = 10
    devices_per_service: int = 4
    nodes: int = 5
    node_devices: int = 8
    targets: tuple[int, ...] = (1, 4, 16, 64, 256)
    """Calls per instance on demand, of which the best is taken; the first is what the released system has."""
    engine_start_s: float = 19.0
    """Seconds that an engine takes to start besides loading, as reported of vLLM for a small model on one device."""
    router_turn_s: float = 1.0
    """In which the released router hands out one call per model."""
    equal: float = 1.02
    """For devices_saved: a mean ACT within this factor counts as the same."""
    seeds: int = 10

    @property
    def devices(self) -> int:
        return self.nodes * self.node_devices

    @property
    def sizing(self) -> sizing.Sizes:
        return sizing.Sizes(
            teachers_batch=self.batches[0],
            services=self.services,
            devices_per_service=self.devices_per_service,
            node_devices=self.node_devices,
            equal=self.equal,
            seeds=self.seeds,
        )


FULL = Sizes()
QUICK = Sizes(seeds=3)


class Side(msgspec.Struct, frozen=True):
    """One simulation per seed: who plays which work."""

    name: str
    batch: int
    shape: str = AS_IT_IS
    on_demand: OnDemandConfig | None = None


def measure(sizes: Sizes, *, trace: Path | None, processes: int | None, progress: Progress) -> BenchResult:
    found = Findings()
    seeds = range(sizes.seeds)
    saved = play(sizing.devices_needed, [(sizes.sizing, seed) for seed in seeds], processes, part(progress, 0.0, 0.4))
    sides = sides_of(sizes)
    jobs = [(sizes, side, seed) for side in sides for seed in seeds]
    played = play(play_side, jobs, processes, part(progress, 0.4, 1.0))
    rows = {side: played[i * sizes.seeds : (i + 1) * sizes.seeds] for i, side in enumerate(sides)}

    reserved = sizes.sizing.devices_reserved
    share = mean_of([1.0 - row["needed"] / reserved for row in saved])
    found.add("devices_saved", share, at_least(sizing.DEVICES_GOAL))
    found.add("devices_needed", mean_of([row["needed"] for row in saved]))
    for batch in sizes.batches:
        compare_batch(found, sizes, rows, batch)
    add_notes(found, sizes)
    return found.result("teachers", "simulated", sizes)


def sides_of(sizes: Sizes) -> list[Side]:
    """The longest simulations first."""
    shapes = (AS_IT_IS, EVEN, *CROWDING)
    batches = sorted(sizes.batches, reverse=True)
    sides = [Side(name, batch, shape) for name in (OURS, STATIC) for batch in batches for shape in shapes]
    for batch in batches:
        for configs in _on_demand(sizes).values():
            sides += [Side(ON_DEMAND, batch, shape, config) for shape in (AS_IT_IS, EVEN) for config in configs]
    return sides


def _on_demand(sizes: Sizes) -> dict[str, list[OnDemandConfig]]:
    """With all numbers of calls per instance: as good as it can be, and with what the released system does besides."""
    best = [OnDemandConfig(devices_per_instance=sizes.devices_per_service, target=target) for target in sizes.targets]
    return {
        "": best,
        "_engine_start": [msgspec.structs.replace(config, start_s=sizes.engine_start_s) for config in best],
        "_router": [msgspec.structs.replace(config, turn_s=sizes.router_turn_s) for config in best],
    }


# ---- what is reported -------------------------------------------------------------------------------------------


def compare_batch(found: Findings, sizes: Sizes, rows: dict[Side, list[Row]], batch: int) -> None:
    """All metrics at one batch."""
    ours, static = rows[Side(OURS, batch)], rows[Side(STATIC, batch)]
    _ratio(found, f"act_vs_static_{batch}", static, ours)
    found.add(f"busiest_share_{batch}", mean_of([row["busiest_share"] for row in static]))
    found.add(f"peak_load_{batch}", mean_of([row["peak_load"] for row in static]))
    for shape in (EVEN, *CROWDING):
        of_shape = rows[Side(STATIC, batch, shape)]
        _ratio(found, f"act_vs_static_{batch}_{shape}", of_shape, rows[Side(OURS, batch, shape)])
        found.add(f"peak_load_{batch}_{shape}", mean_of([row["peak_load"] for row in of_shape]))
    shown = {"by action": ours, "static": static}
    for variant, configs in _on_demand(sizes).items():
        sides = [rows[Side(ON_DEMAND, batch, AS_IT_IS, config)] for config in configs]
        best = _best(sides)
        _ratio(found, f"act_vs_on_demand_{batch}{variant}", sides[best], ours)
        _ratio(found, f"act_vs_on_demand_{batch}{variant}_target_{sizes.targets[0]}", sides[0], ours)
        found.add(f"on_demand_target_{batch}{variant}", sizes.targets[best])
        found.add(f"on_demand_late_share_{batch}{variant}", mean_of([row["late_share"] for row in sides[best]]))
        shown.setdefault("on demand", sides[best])
        even = [rows[Side(ON_DEMAND, batch, EVEN, config)] for config in configs]
        _ratio(found, f"act_vs_on_demand_{batch}{variant}_even", even[_best(even)], rows[Side(OURS, batch, EVEN)])
    for name, side in shown.items():
        found.sides[f"{name} {batch}"] = {number: mean_of([row[number] for row in side]).mean for number in SHOWN}


SHOWN = ("act_mean_s", "act_p99_s", "waiting_share", "device_use", "restores_per_call")
"""Numbers of each side, in the order of the table."""


def _best(sides: list[list[Row]]) -> int:
    return min(range(len(sides)), key=lambda i: math.fsum(row["act_mean_s"] for row in sides[i]))


def _ratio(found: Findings, metric: str, other: list[Row], ours: list[Row]) -> None:
    found.add(metric, paired(other, ours, "act_mean_s"), PRINTED if metric in PUBLISHED else None)


def add_notes(found: Findings, sizes: Sizes) -> None:
    """What the metrics mean, and how they compare with published ones."""
    value = found.metrics
    found.notes.append(
        f"devices_saved is of {sizes.sizing.devices_reserved} devices, {sizes.devices_per_service} for each of"
        f" {sizes.services} models, at batch {sizes.batches[0]} and the same mean ACT within {sizes.equal - 1:.0%}."
    )
    published = [f"{name} {value[name]:.3g}, there {there:g}" for name, there in PUBLISHED.items() if name in value]
    if published:
        found.notes.append(f"Here and in the publication: {'; '.join(published)}.")
    for batch in sizes.batches:
        found.notes.append(
            f"Static at {batch}: {value[f'busiest_share_{batch}']:.0%} of the calls are for one model, and in the worst"
            f" minute of a model {value[f'peak_load_{batch}']:.2g} times as much work comes for it as its"
            f" {sizes.devices_per_service} devices do. With all models asked for equally often that is"
            f" {value[f'peak_load_{batch}_even']:.2g} times, and act_vs_static is"
            f" {value[f'act_vs_static_{batch}_even']:.3g}; with calls twice as crowded it is"
            f" {value[f'act_vs_static_{batch}_half']:.3g}, half as crowded {value[f'act_vs_static_{batch}_twice']:.3g}."
        )
    found.notes.append(
        "Where calls crowd so much that devices which are shared are over capacity as well, the ratio falls again."
        " Means over seeds of which some keep up and some do not have wide intervals."
    )
    found.notes.append(
        "The publication says neither how often each model is asked for nor how crowded its calls are. Here the shares"
        " are those of a production mix of models, and calls crowd because trajectories of a domain end together."
    )
    for batch in sizes.batches:
        found.notes.append(_on_demand_note(value, sizes, batch))
    found.notes.append(
        "The publication does not say how its on-demand side was set up, and the ratios here range widely with that:"
        " they bound what it may have met, and one that comes close may do so by chance."
    )


def _on_demand_note(value: dict[str, float], sizes: Sizes, batch: int) -> str:
    def times(variant: str) -> str:
        metric, first = f"act_vs_on_demand_{batch}{variant}", sizes.targets[0]
        target = f"{value[f'on_demand_target_{batch}{variant}']:.0f} calls per instance"
        others = f"with {first} {value[f'{metric}_target_{first}']:.3g}; all models equally often"
        return f"{value[metric]:.3g} ({target}; {others} {value[f'{metric}_even']:.3g})"

    return (
        f"On demand at {batch}, where loads take what its loader publishes and nothing else takes time, the ratio is"
        f" {times('')}. With {sizes.engine_start_s:g} s to start an engine besides it is {times('_engine_start')}. With"
        f" the released router, one call per model in {sizes.router_turn_s:g} s, it is {times('_router')}, and"
        f" {value[f'on_demand_late_share_{batch}_router']:.0%} of the calls take more than {LATE_S:.0f} s."
    )


# ---- one simulation ---------------------------------------------------------------------------------------------


def play_side(sizes: Sizes, side: Side, seed: int) -> Row:
    workload = shaped(sizes, side.batch, side.shape, seed)
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


def shaped(sizes: Sizes, batch: int, shape: str, seed: int) -> Workload:
    """The generated work, or what became of it."""
    if shape == EVEN:
        drawn = build("teachers", batch=SURPLUS * batch, seed=seed, services=sizes.services)
        return _even(drawn, batch)
    workload = build("teachers", batch=batch, seed=seed, services=sizes.services)
    if shape == AS_IT_IS:
        return workload
    factor = CROWDING[shape]
    return msgspec.structs.replace(workload, episodes=tuple(_later(each, factor) for each in workload.episodes))


def _even(drawn: Workload, batch: int) -> Workload:
    """The first of them of which all models have equally many, or one more."""
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


def _later(episode: Episode, factor: float) -> Episode:
    turns = (msgspec.structs.replace(turn, think_s=factor * turn.think_s) for turn in episode.turns)
    return msgspec.structs.replace(episode, turns=tuple(turns))


def _busiest(workload: Workload, devices: int) -> Row:
    """The largest share of the calls that are for one model, and the most work that comes for one in PEAK_S seconds,
    over what a copy on `devices` devices does in that time."""
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
    """The most seconds of work that come within PEAK_S; `coming` are times and seconds, by time."""
    most = within = 0.0
    oldest = 0
    for at, seconds in coming:
        within += seconds
        while coming[oldest][0] <= at - PEAK_S:
            within -= coming[oldest][1]
            oldest += 1
        most = max(most, within)
    return most
