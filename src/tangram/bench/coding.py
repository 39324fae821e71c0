"""Coding agents: a pod per trajectory, as most frameworks reserve today, against sharing one node by action.

A rollout batch of 512 trajectories starts at once on one node of 16, 32, 64 or 256 cores with 9.4 GiB per core, each
with a sandbox of 0.25 GiB. A pod requests 0.5 cores (and, in a second baseline, 1 core) and may use 4; it is admitted
when its request fits and kept until its trajectory ends. ACT counts from submission, so it includes waiting for
admission. `adaptive` gets no prior information: no durations, no CPU use, no speed-ups.

With a trace, the same comparison runs on trajectories drawn from it as well.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from tangram.bench.base import PRINTED, BenchRun, Progress, at_least, paired_ratio, run_sides, subprogress
from tangram.core.messages import cpu_node
from tangram.reports.statistics import mean_of
from tangram.sim.episode import Workload
from tangram.sim.simulate import simulate
from tangram.sim.traces import load_coding
from tangram.sim.workloads import build

PODS, PODS_LARGE, ALONE = "pods:0.5", "pods:1", "alone"
ADAPTIVE, ADAPTIVE_PERFECT = "adaptive", "adaptive with exact estimates"
TRACE_FILE = "coding_actions.csv"

ACT_GOALS = {16: at_least(6.0), 32: at_least(6.0), 64: at_least(4.0), 256: at_least(0.98)}
STEP_GOALS = {16: at_least(2.2), 32: at_least(1.8), 64: at_least(1.4)}

CodingSide = tuple[str, int]
"""Policy or baseline, and its number of cores."""
MetricRow = dict[str, float]


class CodingSizes(msgspec.Struct, frozen=True, kw_only=True):
    batch: int = 512
    cores: tuple[int, ...] = (16, 32, 64, 256)
    """Sizes from heavily overloaded to every pod admitted at once."""
    learning_cores: int = 32
    """Number of cores at which learning is compared with perfect knowledge."""
    gib_per_core: float = 9.4
    sandbox_mib: int = 256
    seeds: int = 10
    trace_cores: tuple[int, ...] = (16, 32, 64, 256)


LABEL = "simulated"
FULL = CodingSizes()
QUICK = CodingSizes(seeds=3, trace_cores=(32,))


def measure(sizes: CodingSizes, run: BenchRun) -> None:
    if run.trace is None:
        _compare(run, sizes, None, run.progress)
    else:
        path = run.trace / TRACE_FILE if run.trace.is_dir() else run.trace
        _compare(run, sizes, None, subprogress(run.progress, 0.0, 0.5))
        _compare(run, sizes, path, subprogress(run.progress, 0.5, 1.0))
    run.notes.append(
        "load: the CPU time of all actions, each on one core, divided by cores x the mean length of a trajectory whose"
        " actions neither wait nor share cores. Above 1 the cores cannot keep up with the whole batch at once."
        " ceiling_ratio: act_ratio if no action waited or shared cores, the maximum for any scheduler."
    )
    run.notes.append(
        "weighted_act_ratio weights every action by its own length, because calls of 50 ms dominate the mean;"
        " below 1, long actions take longer than in pods."
    )


def _compare(run: BenchRun, sizes: CodingSizes, path: Path | None, progress: Progress) -> None:
    """Compare all sides on the same work; every side of a seed is a separate job."""
    suffix, all_cores = ("", sizes.cores) if path is None else ("_trace", sizes.trace_cores)
    sides: list[CodingSide] = [(ALONE, max(all_cores)), (ADAPTIVE_PERFECT, sizes.learning_cores)]
    sides += [(name, cores) for name in (ADAPTIVE, PODS, PODS_LARGE) for cores in all_cores]  # longest first
    rows = run_sides(partial(simulate_side, sizes, path), sides, sizes.seeds, run.processes, progress)
    alone = rows[ALONE, max(all_cores)]
    for cores in all_cores:
        _add_metrics_at(run, rows, alone, cores, f"{cores}{suffix}", goals=not suffix)
    pods, learned, perfect = (rows[name, sizes.learning_cores] for name in (PODS, ADAPTIVE, ADAPTIVE_PERFECT))
    gains = zip(_gains(pods, learned), _gains(pods, perfect), strict=True)
    share = mean_of([gain / possible for gain, possible in gains])
    run.add(f"learned_share{suffix}", share, None if suffix else at_least(0.8))
    run.add(f"act_ratio_known_{sizes.learning_cores}{suffix}", paired_ratio(pods, perfect, "mean"))


def _gains(pods: list[MetricRow], adaptive: list[MetricRow]) -> list[float]:
    return [pod["mean"] / own["mean"] - 1.0 for pod, own in zip(pods, adaptive, strict=True)]


def _add_metrics_at(
    run: BenchRun,
    rows: dict[CodingSide, list[MetricRow]],
    alone: list[MetricRow],
    cores: int,
    suffix: str,
    *,
    goals: bool,
) -> None:
    """Add the metrics at one number of cores."""
    pods, adaptive = rows[PODS, cores], rows[ADAPTIVE, cores]
    run.add(f"act_ratio_{suffix}", paired_ratio(pods, adaptive, "mean"), ACT_GOALS.get(cores) if goals else None)
    run.add(f"ceiling_ratio_{suffix}", paired_ratio(pods, alone, "mean"), PRINTED if goals else None)
    run.add(f"step_ratio_{suffix}", paired_ratio(pods, adaptive, "step"), STEP_GOALS.get(cores) if goals else None)
    run.add(f"step_ceiling_ratio_{suffix}", paired_ratio(pods, alone, "step"))
    run.add(f"p99_ratio_{suffix}", paired_ratio(pods, adaptive, "p99"))
    run.add(f"weighted_act_ratio_{suffix}", paired_ratio(pods, adaptive, "weighted"))
    run.add(f"act_ratio_pods1_{suffix}", paired_ratio(rows[PODS_LARGE, cores], adaptive, "mean"))
    run.add(f"load_{suffix}", mean_of([row["need_s"] / (cores * row["span_s"]) for row in alone]))
    for name, side in (("pods", pods), ("adaptive", adaptive)):
        for statistic in ("mean", "p99"):
            run.add(f"act_{statistic}_s_{name}_{suffix}", mean_of([row[statistic] for row in side]))


def simulate_side(sizes: CodingSizes, path: Path | None, side: CodingSide, seed: int) -> MetricRow:
    name, cores = side
    workload = _workload(sizes, path, seed)
    knowledge = "perfect" if name == ADAPTIVE_PERFECT else "learned"
    pools = cpu_node("n0", cores, sizes.gib_per_core * cores)
    result = simulate(workload, ADAPTIVE if name == ADAPTIVE_PERFECT else name, pools, knowledge=knowledge)
    steps = {
        f"{episode.id}.{t}.{i}": step
        for episode in workload.episodes
        for t, turn in enumerate(episode.turns)
        for i, step in enumerate(turn.steps)
    }
    assert len(result.rows) == len(steps), f"{name} settled {len(result.rows)} of {len(steps)} actions"
    acts = result.acts()
    weights = np.array([steps[row.id].work_s for row in result.rows])
    return {
        "mean": float(acts.mean()),
        "p99": float(np.percentile(acts, 99)),
        "weighted": float((acts * weights).sum() / weights.sum()),
        "step": result.makespan_s,
        "span_s": math.fsum(result.episode_ends) / len(result.episode_ends),
        "need_s": math.fsum(step.work_s * step.busy for step in steps.values()),
    }


def _workload(sizes: CodingSizes, path: Path | None, seed: int) -> Workload:
    if path is None:
        return build("coding", batch=sizes.batch, seed=seed, memory=sizes.sandbox_mib)
    return load_coding(path, batch=sizes.batch, seed=seed, memory=sizes.sandbox_mib)
