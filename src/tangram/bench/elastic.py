"""Elastic actions at stated loads: the published algorithm against ours, and ours against a lower bound.

Independent actions arrive as a Poisson process on 32 cores; all are elastic from 1 to 16 with one speed-up exponent,
and both policies know durations and speed-ups exactly. A point is one source of durations, one exponent and one load;
its number is the mean over seeds. At a load of 1 the cores just suffice if no action is ever sped up. The goals apply
to the durations of test suites; those of model requests, which vary less, are printed as well.

The second part repeats the ablation of the publication, the elastic algorithm against a fixed degree of parallelism,
on the `coding` workload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from itertools import product

import msgspec
import numpy as np

from tangram.bench.base import (
    PRINTED,
    BenchRun,
    Goal,
    Progress,
    at_least,
    at_most,
    geometric_mean,
    paired_ratio,
    paired_ratio_of_values,
    run_sides,
    subprogress,
)
from tangram.core.arrange import srpt_lower_bound
from tangram.core.messages import cpu_node
from tangram.reports.statistics import Interval
from tangram.sim.episode import Workload
from tangram.sim.simulate import simulate
from tangram.sim.workloads import build

POLICIES = ("paper", "adaptive", "adaptive:no-resize")
MAIN_SOURCE = "reward"
"""The goals apply to its durations."""
BOUND_LOAD = 0.7
GIB_PER_CORE = 9.4
PAPER_REWARD_SHARE = 0.49
"""Share of the time of all actions in the publication's baseline: x / 2.8 + (1 - x) / 9.0 = 1 / 4.3."""

LoadPoint = tuple[str, float, float]
"""Source of the durations, speed-up exponent, load."""
MetricRow = dict[str, float]


class Ablation(msgspec.Struct, frozen=True):
    """The elastic algorithm against one fixed degree."""

    metric: str
    fixed: str
    batch: int
    node_cores: int
    goal: Goal


class ElasticSizes(msgspec.Struct, frozen=True, kw_only=True):
    cores: int = 32
    cores_max: int = 16
    """Per action: none takes the whole pool."""
    sources: tuple[str, ...] = ("reward", "gpu")
    exponents: tuple[float, ...] = (0.45, 0.75)
    loads: tuple[float, ...] = (0.3, 0.5, 0.7, 0.8, 0.9)
    actions: int = 2000
    seeds: int = 10
    ablation_nodes: int = 5
    ablation_degree_max: int = 32
    ablations: tuple[Ablation, ...] = (
        Ablation("paper_vs_fixed4", "fixed:4", 256, 256, Goal("about", 2.0)),
        Ablation("paper_vs_fixed16", "fixed:16", 1280, 256, Goal("about", 3.0)),
        Ablation("paper_vs_fixed16_tight", "fixed:16", 1280, 32, PRINTED),
    )
    """At the publication's 1280 cores, where this workload hardly queues, and at one eighth of them."""


LABEL = "simulated"
FULL = ElasticSizes()
QUICK = ElasticSizes(
    loads=(0.3, 0.7, 0.9),
    actions=600,
    seeds=3,
    ablations=(FULL.ablations[0], Ablation("paper_vs_fixed16", "fixed:16", 640, 128, Goal("about", 3.0))),
)
"""The large batch is halved together with its nodes: the same number of trajectories per core."""


def measure(sizes: ElasticSizes, run: BenchRun) -> None:
    points: list[LoadPoint] = list(product(sizes.sources, sizes.exponents, sizes.loads))
    job, progress = partial(simulate_point, sizes), subprogress(run.progress, 0.0, 0.6)
    by_point = run_sides(job, points, sizes.seeds, run.processes, progress)
    _against_paper(run, by_point)
    _against_bound(run, by_point)
    _ablation(run, sizes, subprogress(run.progress, 0.6, 1.0))


# ---- at stated loads --------------------------------------------------------------------------------------------


def simulate_point(sizes: ElasticSizes, point: LoadPoint, seed: int) -> MetricRow:
    """Return mean and p99 of every policy on the same arrivals, and the bound."""
    source, exponent, load = point
    workload = build(
        "elastic",
        batch=sizes.actions,
        seed=seed,
        source=source,
        exponent=exponent,
        load=load,
        units=sizes.cores,
        cores_max=sizes.cores_max,
    )
    row = {"bound": lower_bound(workload, sizes.cores, sizes.cores_max)}
    for name in POLICIES:
        result = simulate(workload, name, cpu_node("n0", sizes.cores), knowledge="perfect")
        acts = result.acts()
        assert len(acts) == sizes.actions, f"{name} settled {len(acts)} of {sizes.actions} actions"
        row[f"{name} mean"], row[f"{name} p99"] = float(acts.mean()), float(np.percentile(acts, 99))
        row[f"{name} capacity"] = capacity_bound(workload, sizes, exponent, result.makespan_s)
    return row


def lower_bound(workload: Workload, units: int, units_max: int) -> float:
    """Return a lower bound of the mean ACT of any schedule on this many units, where one action takes at most
    `units_max`."""
    steps = [(episode.start_s, episode.turns[0].steps[0]) for episode in workload.episodes]
    times = [[step.work_s / step.speedup.at(k) for k in range(1, units_max + 1)] for _, step in steps]
    works = [min(k * seconds for k, seconds in enumerate(row, start=1)) for row in times]
    total = srpt_lower_bound([start for start, _ in steps], works, [min(row) for row in times], units)
    return total / len(steps)


def capacity_bound(workload: Workload, sizes: ElasticSizes, exponent: float, until_s: float) -> float:
    """Return a lower bound of the mean ACT of any schedule that ends within `until_s`, for the speed-up k ** exponent.

    An action of w seconds that completes within f seconds takes at least w ** (1/p) * f ** (-(1-p)/p) unit-seconds
    (Hoelder's inequality on its units over time), and all actions share cores * until_s of them. The least sum of f
    under that constraint has every f in proportion to its w.
    """
    works = [episode.turns[0].steps[0].work_s for episode in workload.episodes]
    load = min(1.0, math.fsum(works) / (sizes.cores * until_s))
    slowest = max(load ** (exponent / (1.0 - exponent)), sizes.cores_max**-exponent)
    return math.fsum(works) / len(works) * slowest


def _against_paper(run: BenchRun, by_point: dict[LoadPoint, list[MetricRow]]) -> None:
    """Set goals for the main source; others are printed under their name, as is every point."""
    act = {point: _ratio(rows, "paper mean", "adaptive mean") for point, rows in by_point.items()}
    tail = {point: _ratio(rows, "paper p99", "adaptive p99") for point, rows in by_point.items()}
    sources = dict.fromkeys(point[0] for point in by_point)
    for source in sorted(sources, key=lambda source: source != MAIN_SOURCE):
        points = {point: rows for point, rows in by_point.items() if point[0] == source}
        main, name = source == MAIN_SOURCE, "" if source == MAIN_SOURCE else f"_{source}"
        worst, worst_tail = _smallest(act, points), _smallest(tail, points)
        mean = _over_points(points, "paper mean", "adaptive mean")
        no_resize = _over_points(points, "paper mean", "adaptive:no-resize mean")
        run.add(f"act_vs_paper_min{name}", act[worst], at_least(1.2) if main else None)
        run.add(f"act_vs_paper_mean{name}", mean, at_least(1.4) if main else None)
        run.add(f"act_vs_paper_mean_no_resize{name}", no_resize, at_least(1.1) if main else None)
        run.add(f"p99_vs_paper_min{name}", tail[worst_tail], at_least(1.0) if main else None)
        run.add(f"p99_vs_paper_mean{name}", _over_points(points, "paper p99", "adaptive p99"))
        run.notes.append(_limits(source, points, worst, worst_tail))
    for point in by_point:
        run.add(f"act_vs_paper_{_suffix(point)}", act[point])
        run.add(f"p99_vs_paper_{_suffix(point)}", tail[point])


def _limits(source: str, points: dict[LoadPoint, list[MetricRow]], worst: LoadPoint, worst_tail: LoadPoint) -> str:
    most = {point: _ratio(rows, "paper mean", "adaptive capacity") for point, rows in points.items()}
    least, mean = _smallest(most, points), _over_points(points, "paper mean", "adaptive capacity").mean
    return (
        f"With {source} durations act_vs_paper is smallest at {_named(worst)}, p99_vs_paper at {_named(worst_tail)}."
        f" A policy that ends as early reaches at most {mean:.2f} on average (see capacity_ratio_07), and at most"
        f" {most[least].mean:.2f} at {_named(least)}, where this limit is smallest."
    )


def _against_bound(run: BenchRun, by_point: dict[LoadPoint, list[MetricRow]]) -> None:
    at_load = {point: rows for point, rows in by_point.items() if point[2] == BOUND_LOAD}
    if not at_load:
        return
    main = {point: rows for point, rows in at_load.items() if point[0] == MAIN_SOURCE}
    run.add("bound_ratio_07", _over_points(main, "adaptive mean", "bound"), at_most(2.8))
    run.add("capacity_ratio_07", _over_points(main, "adaptive mean", "adaptive capacity"), PRINTED)
    for (source, exponent, _), rows in at_load.items():
        run.add(f"bound_ratio_07_{_short(source, exponent)}", _ratio(rows, "adaptive mean", "bound"))
        capacity = _ratio(rows, "adaptive mean", "adaptive capacity")
        run.add(f"capacity_ratio_07_{_short(source, exponent)}", capacity)
    least = _over_points(main, "adaptive capacity", "bound")
    run.add("bound_least_07", least)
    run.notes.append(
        "bound_ratio_07 compares with one machine that is as fast as all cores together and serves every action at"
        " full efficiency. capacity_ratio_07 compares with a second bound, which includes the cost of sub-linear"
        f" speed-up: bound_ratio_07 of a schedule that ends as early is at least bound_least_07, {least.mean:.2f}."
    )


def _ratio(rows: list[MetricRow], above: str, below: str) -> Interval:
    return paired_ratio_of_values([row[above] for row in rows], [row[below] for row in rows])


def _over_points(by_point: dict[LoadPoint, list[MetricRow]], above: str, below: str) -> Interval:
    """Return the geometric mean over all points, with the seeds as the sample: points of one seed share their
    randomness."""
    seeds = range(len(next(iter(by_point.values()))))
    means = [geometric_mean(rows[seed][above] / rows[seed][below] for rows in by_point.values()) for seed in seeds]
    return paired_ratio_of_values(means, [1.0] * len(means))


def _smallest(ratios: dict[LoadPoint, Interval], points: Iterable[LoadPoint]) -> LoadPoint:
    return min(points, key=lambda point: ratios[point].mean)


def _suffix(point: LoadPoint) -> str:
    source, exponent, load = point
    return f"{_short(source, exponent)}_load{round(load * 100):02d}"


def _short(source: str, exponent: float) -> str:
    """Name of a point; the main source is omitted."""
    return f"p{round(exponent * 100)}" if source == MAIN_SOURCE else f"{source}_p{round(exponent * 100)}"


def _named(point: LoadPoint) -> str:
    return f"exponent {point[1]} and load {point[2]}"


# ---- the publication's ablation ---------------------------------------------------------------------------------


def simulate_ablation(sizes: ElasticSizes, side: tuple[Ablation, str], seed: int) -> MetricRow:
    """Simulate one policy on one batch: mean ACT of rewards and of all actions, and the width of rewards."""
    ablation, name = side
    workload = build("coding", batch=ablation.batch, seed=seed, reward_cores_max=sizes.ablation_degree_max)
    nodes = [
        cpu_node(f"n{i}", ablation.node_cores, GIB_PER_CORE * ablation.node_cores) for i in range(sizes.ablation_nodes)
    ]
    result = simulate(workload, name, tuple(pool for node in nodes for pool in node), knowledge="perfect")
    steps = [step for episode in workload.episodes for turn in episode.turns for step in turn.steps]
    rewards = [row for row in result.rows if row.kind == "reward"]
    return {
        "all": float(result.acts().mean()),
        "reward": float(result.acts("reward").mean()),
        "width": math.fsum(row.width for row in rewards) / len(rewards),
        "share": math.fsum(row.act_s for row in rewards) / float(result.acts().sum()),
        "exponent": math.fsum(s.speedup.exponent_near(8.0) for s in steps if s.kind == "reward") / len(rewards),
    }


def _ablation(run: BenchRun, sizes: ElasticSizes, progress: Progress) -> None:
    sides = [(ablation, name) for ablation in sizes.ablations for name in (ablation.fixed, "paper")]
    rows = run_sides(partial(simulate_ablation, sizes), sides, sizes.seeds, run.processes, progress)
    for ablation in sizes.ablations:
        fixed, paper = rows[ablation, ablation.fixed], rows[ablation, "paper"]
        rewards = paired_ratio(fixed, paper, "reward")
        all_ratio = paired_ratio(fixed, paper, "all")
        run.add(ablation.metric, rewards, ablation.goal)
        run.add(f"{ablation.metric}_all", all_ratio)
        run.notes.append(_explanation(sizes, ablation, fixed, paper, rewards.mean, all_ratio.mean))


def _explanation(
    sizes: ElasticSizes,
    ablation: Ablation,
    fixed: list[MetricRow],
    paper: list[MetricRow],
    rewards: float,
    all_ratio: float,
) -> str:
    """Explain the ratio."""
    share = geometric_mean(row["share"] for row in fixed)
    width = geometric_mean(row["width"] for row in paper)
    exponent = geometric_mean(row["exponent"] for row in paper)
    degree = int(ablation.fixed.partition(":")[2])
    mixed = 1.0 / (1.0 - PAPER_REWARD_SHARE + PAPER_REWARD_SHARE / rewards)
    why = (
        f"on an idle cluster the gain is ({width:.0f}/{degree})^{exponent:.2f}, with a mean exponent of {exponent:.2f}"
    )
    if width < degree:
        why = "narrow rewards leave cores for tool calls"
    return (
        f"{ablation.metric}: rewards, the only scalable actions, on {sizes.ablation_nodes} x {ablation.node_cores}"
        f" cores, batch {ablation.batch}; over all actions {all_ratio:.2f}. The elastic side gave rewards {width:.0f}"
        f" cores on average: {why}. Rewards are {share:.0%} of the time of all actions here and about"
        f" {PAPER_REWARD_SHARE:.0%} in the publication (derived from its gains of 9.0x for tools, 2.8x for rewards and"
        f" 4.3x together); with that share the ratio over all actions would be {mixed:.2f}."
    )
