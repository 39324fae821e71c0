"""Reservation: coding agents on real sandboxes, with a core reserved per trajectory and with cores scheduled by action.

A batch of scripted agents repairs planted bugs in a small Python project: they look around, run tests, edit, and are
rewarded by the whole test suite. All start at once, on 2 cores. On the reserved side a trajectory is admitted when a
core is free and keeps it to its end; by action a core is held only while something executes. The agents, the sandboxes,
the orchestrator and the cores are the same; the order of the sides alternates from seed to seed. ACT counts from
submission, so it includes waiting for admission, in the first action, which opens the sandbox.

Both sides are recorded. The recording of the second one is replayed in the simulator: `sim_error` is the relative error
of the simulated mean ACT.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchRun, Progress, at_least, at_most, paired_ratio
from tangram.bench.reservation import measured, sides
from tangram.bench.reservation.agents import AgentScript, draw_scripts
from tangram.bench.reservation.measured import SideMeasurement
from tangram.bench.reservation.neighbours import NeighbourLoad, disturbance_warning
from tangram.bench.reservation.project import NEEDS
from tangram.bench.reservation.sides import BY_ACTION, RESERVED, SIDES
from tangram.errors import ManagerError
from tangram.files.atomic_file import atomic_write
from tangram.reports.statistics import mean_of
from tangram.runtime.trace_recorder import open_trace
from tangram.sim.baselines import PodsConfig
from tangram.sim.recordings import load_recording
from tangram.sim.result import SimulationResult
from tangram.sim.simulate import simulate

OPTIONS = ("report", "perfetto", "backend")
RECORDINGS = {RESERVED: "reserved.jsonl", BY_ACTION: "actions.jsonl"}
"""File names of the first seed's recordings, in the folder of the report."""
LONGER = 3.0
"""Approximate ratio of action times on the reserved side to those by action, for progress in proportion to time."""

MetricRow = dict[str, float]


class ReservationSizes(msgspec.Struct, frozen=True, kw_only=True):
    groups: int = 3
    siblings: int = 4
    """Trajectories of one group, which share the bug."""
    cores: int = 2
    think_faster: float = 15.0
    """Divisor of think times. The tests of the project take half a second; with this factor a trajectory uses about the
    share of a core that was measured for real agents, 0.07 to 0.25."""
    seeds: int = 3


LABEL = "measured"
FULL = ReservationSizes()
QUICK = ReservationSizes(seeds=1)


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one seed."""

    seed: int
    scripts: tuple[AgentScript, ...]
    rewards: dict[str, dict[str, float]]
    """By side and trajectory."""
    measured: dict[str, SideMeasurement]
    """By side."""
    others: dict[str, float]
    """By side: the share of the cores used by other programs."""
    simulated: dict[str, SimulationResult]
    """By side, both simulated from the recording of the side by action."""


# ---- the measurement --------------------------------------------------------------------------------------------


def measure(sizes: ReservationSizes, run: BenchRun) -> None:
    _require_programs()
    played = _run_seeds(sizes, run)
    _add_metrics(sizes, run, played)
    if run.report is not None:
        from tangram.bench.reservation.report import write

        for name in RECORDINGS.values():
            with atomic_write("report", run.report.parent / name) as file:
                file.write((run.folder / f"0-{name}").read_bytes())
        write(run.report, run.result(), played)
    if run.perfetto is not None:
        from tangram.sim.trace_events import trace_of_results

        trace_of_results({side: played[0].measured[side].result for side in SIDES}).write(run.perfetto)


def _require_programs() -> None:
    missing = {package for path, package in NEEDS.items() if not os.access(path, os.X_OK)}
    if missing:
        absent = ", ".join(path for path in NEEDS if not os.access(path, os.X_OK))
        raise ManagerError(f"the agents need {absent}; apt-get install {' '.join(sorted(missing))}", retry=False)


def _run_seeds(sizes: ReservationSizes, run: BenchRun) -> list[SeedResult]:
    state = run.folder / "state"
    state.mkdir(mode=0o711)
    batches = [
        draw_scripts(seed, groups=sizes.groups, siblings=sizes.siblings, think_faster=sizes.think_faster)
        for seed in range(sizes.seeds)
    ]
    bugs = {script.bug.name: script.bug for scripts in batches for script in scripts}
    sides.prepare(list(bugs.values()), cores=sizes.cores, backend=run.backend, state=state)
    progress = _ReservationProgress(run.progress, batches)
    results = []
    for seed, scripts in enumerate(batches):
        rewards, shown, others = {}, {}, {}
        for side in SIDES if seed % 2 == 0 else reversed(SIDES):
            path = run.folder / f"{seed}-{RECORDINGS[side]}"
            neighbours = NeighbourLoad(sizes.cores)
            rewards[side] = asyncio.run(
                sides.run_side(
                    side,
                    scripts,
                    cores=sizes.cores,
                    backend=run.backend,
                    state=state,
                    record=path,
                    on_action=progress.side(seed, side),
                )
            )
            others[side] = neighbours.share()
            keeps = sides.REQUEST if side == RESERVED else 0.0
            shown[side] = measured.read_recording(
                path, [script.name for script in scripts], name=side, keeps_cores=keeps
            )
        progress.simulating(seed)
        simulated = _simulate(run.folder / f"{seed}-{RECORDINGS[BY_ACTION]}", scripts)
        results.append(
            SeedResult(seed=seed, scripts=scripts, rewards=rewards, measured=shown, others=others, simulated=simulated)
        )
    return results


def _simulate(recorded: Path, scripts: tuple[AgentScript, ...]) -> dict[str, SimulationResult]:
    """Simulate both sides from the recording of the side by action."""
    with open_trace(recorded) as (header, _):
        pools = header.pools
    names = {script.name for script in scripts}
    workload = load_recording(recorded)
    workload = msgspec.structs.replace(
        workload, episodes=tuple(episode for episode in workload.episodes if episode.id in names)
    )
    pods = PodsConfig(request=sides.REQUEST, limit=sides.REQUEST)
    return {
        RESERVED: simulate(workload, f"pods:{sides.REQUEST:g}", pools, pods=pods),
        BY_ACTION: simulate(workload, sides.POLICY, pools),
    }


class _ReservationProgress:
    """The completed share of all actions, weighted for the reserved side, and the trajectories in progress."""

    def __init__(self, progress: Progress, batches: list[tuple[AgentScript, ...]]) -> None:
        self._progress = progress
        self._batches = batches
        self._done = 0.0
        self._total = sum(script.actions for scripts in batches for script in scripts) * (1.0 + LONGER)

    def side(self, seed: int, side: str) -> Callable[[str], None]:
        scripts = self._batches[seed]
        left = {script.name: script.actions for script in scripts}
        of = f"seed {seed + 1} of {len(self._batches)}, {side}"

        def report_action(trajectory: str) -> None:
            left[trajectory] -= 1
            self._done += LONGER if side == RESERVED else 1.0
            ended = sum(count == 0 for count in left.values())
            acted = sum(script.actions for script in scripts) - sum(left.values())
            words = f"{of}: {ended} of {len(left)} trajectories, {acted} actions"
            self._progress(self._done / self._total, words)

        return report_action

    def simulating(self, seed: int) -> None:
        self._progress(self._done / self._total, f"seed {seed + 1} of {len(self._batches)}: simulating the recording")


# ---- results ----------------------------------------------------------------------------------------------------


def row_of(result: SimulationResult) -> MetricRow:
    """Return the numbers of one side under one seed."""
    summary = result.summary()
    assert summary["actions_lost"] == 0.0, "lost actions end the benchmark earlier"
    return {name: summary[name] for name in ("act_mean_s", "act_p50_s", "act_p99_s", "waiting_mean_s", "step_s")}


def _side_means(played: list[SeedResult], side: str) -> MetricRow:
    """Return means over seeds, in table order."""
    rows = []
    for each in played:
        result, core_time, rewards = each.measured[side].result, each.measured[side].core_time, each.rewards[side]
        use = result.core_s / (result.cores * result.makespan_s)
        shares = {f"{name}_share": value for name, value in msgspec.structs.asdict(core_time).items() if name != "used"}
        more = {"others_use": each.others[side], "reward_mean": sum(rewards.values()) / len(rewards)}
        rows.append(row_of(result) | {"core_use": use} | shares | more)
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _add_metrics(sizes: ReservationSizes, run: BenchRun, played: list[SeedResult]) -> None:
    rows = {side: [row_of(each.measured[side].result) for each in played] for side in SIDES}
    run.add("act_ratio", paired_ratio(rows[RESERVED], rows[BY_ACTION], "act_mean_s"), at_least(3.0))
    run.add("p50_ratio", paired_ratio(rows[RESERVED], rows[BY_ACTION], "act_p50_s"), PRINTED)
    run.add("p99_ratio", paired_ratio(rows[RESERVED], rows[BY_ACTION], "act_p99_s"), PRINTED)
    run.add("step_ratio", paired_ratio(rows[RESERVED], rows[BY_ACTION], "step_s"), at_least(1.5))
    for side, name, goal in ((BY_ACTION, "sim_error", at_most(0.2)), (RESERVED, "sim_error_reserved", PRINTED)):
        run.add(name, mean_of([_error(each, side) for each in played]), goal)
    differ = [
        name
        for each in played
        for name, reward in each.rewards[RESERVED].items()
        if each.rewards[BY_ACTION][name] != reward
    ]
    run.add("rewards_differ", len(differ), at_most(0.0))
    run.add("load", mean_of([_load(each) for each in played]), PRINTED)
    for side in SIDES:
        run.sides[side] = _side_means(played, side)
    run.notes += _notes(sizes, run.backend, played)
    run.settings |= {"backend": run.backend, "policy": sides.POLICY, "request": sides.REQUEST}


def _error(each: SeedResult, side: str) -> float:
    simulated, real = row_of(each.simulated[side]), row_of(each.measured[side].result)
    return abs(simulated["act_mean_s"] / real["act_mean_s"] - 1.0)


def _load(each: SeedResult) -> float:
    """Return the CPU seconds of all actions over the cores times the mean time of an admitted trajectory."""
    result = each.measured[RESERVED].result
    spans: dict[str, list[float]] = {}
    for row in result.rows:
        spans.setdefault(row.trajectory, []).extend((row.submitted_at + row.waiting_s, row.ended_at))
    span_s = sum(max(times) - min(times) for times in spans.values()) / len(spans)
    return result.core_s / (result.cores * span_s)


def _notes(sizes: ReservationSizes, backend: str, played: list[SeedResult]) -> list[str]:
    actions = sum(script.actions for script in played[0].scripts)
    notes = [
        f"{len(played[0].scripts)} trajectories per seed, {actions} actions under seed 0, opening and closing included;"
        f" think times are drawn from the fit to real agents, divided by {sizes.think_faster:g}. ACT counts from"
        " submission, waiting for admission included.",
        "core use: CPU seconds of actions / (cores x step). The rest of the core time was held by an action, unused;"
        " reserved while the agent was thinking; free while an action waited; or free with no action waiting.",
        "sim_error: |mean ACT of the recording simulated / measured - 1|; sim_error_reserved: the same for the reserved"
        " side, simulated from the recording of the other side.",
    ]
    disturbance = disturbance_warning([each.others[side] for each in played for side in SIDES])
    if disturbance:
        notes.append(disturbance)
    if backend == "process":
        notes.append("The programs ran as plain processes: without isolation and without CPU limits.")
    return notes
