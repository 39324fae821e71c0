"""Reservation: coding agents on real sandboxes, first with a core reserved for each trajectory, then by action.

A batch of scripted agents repairs planted bugs in a small Python project: they look around, run tests, edit, and are
rewarded by the whole test suite. All start at once, on 2 cores. On the reserved side a trajectory is admitted when a
core is free and keeps it to its end; by action a core is held only while something executes. The agents, the sandboxes,
the orchestrator and the cores are the same; the sides follow each other, in turning order from seed to seed. ACT counts
from submission, so waiting for admission is in it: it falls on the first action, which opens the sandbox.

Both sides are recorded. The recording of the second one is read back and simulated: `sim_error` says how far the mean
ACT of the simulation is from the measured one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from tangram.bench.base import PRINTED, BenchResult, Findings, Progress, at_least, at_most, paired
from tangram.bench.reservation import measured, sides
from tangram.bench.reservation.agents import Script, draw
from tangram.bench.reservation.measured import Measured
from tangram.bench.reservation.neighbours import Neighbours, disturbed
from tangram.bench.reservation.project import NEEDS
from tangram.bench.reservation.sides import BY_ACTION, RESERVED, SIDES
from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_file import whole_file
from tangram.managers.sandboxes.bwrap.manager import PROGRAMS
from tangram.reports.statistics import mean_of
from tangram.runtime.trace_recorder import opened
from tangram.sim.baselines import PodsConfig
from tangram.sim.recordings import load_recording
from tangram.sim.result import Result
from tangram.sim.simulate import simulate

BACKENDS = ("sandbox", "process")
OPTIONS = ("report", "backend")
"""What `measure` takes besides what all benchmarks do."""
RECORDINGS = {RESERVED: "reserved.jsonl", BY_ACTION: "actions.jsonl"}
"""Of the first seed, in the folder of the report."""
LONGER = 3.0
"""About as many times longer an action of the reserved side takes: progress is told in time."""

Row = dict[str, float]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    groups: int = 3
    siblings: int = 4
    """Trajectories of one group, which share the bug."""
    cores: int = 2
    think_faster: float = 15.0
    """The tests of the project take half a second, so the agents think that much faster than real ones did: over its
    span a trajectory then uses about as much of a core as was measured of real ones, which is 0.07 to 0.25."""
    seeds: int = 3


FULL = Sizes()
QUICK = Sizes(seeds=1)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One seed."""

    seed: int
    scripts: tuple[Script, ...]
    rewards: dict[str, dict[str, float]]
    """By side and trajectory."""
    measured: dict[str, Measured]
    """By side."""
    others: dict[str, float]
    """By side: the share of the cores that other programs took."""
    simulated: dict[str, Result]
    """By side, both simulated from the recording of the side by action."""


# ---- the measurement --------------------------------------------------------------------------------------------


def measure(
    sizes: Sizes,
    *,
    trace: Path | None,
    processes: int | None,
    progress: Progress,
    report: Path | None = None,
    backend: str = "",
) -> BenchResult:
    backend = backend or usual_backend()[0]
    if backend not in BACKENDS:
        raise InvalidConfig("backend", backend, f"one of {', '.join(BACKENDS)}")
    _require_programs()
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        played = _play(sizes, backend, Path(folder), progress)
        result = _result(sizes, backend, played)
        if report is not None:
            from tangram.bench.reservation.report import write

            for name in RECORDINGS.values():
                with whole_file("report", report.parent / name) as file:
                    file.write((Path(folder) / f"0-{name}").read_bytes())
            write(report, result, played)
    return result


def usual_backend() -> tuple[str, str]:
    """Sandboxes where they are possible, and else processes, with the reason."""
    missing = [package for name, package in PROGRAMS.items() if not shutil.which(name)]
    if os.geteuid() != 0:
        return "process", "sandboxes need root"
    if missing:
        return "process", f"sandboxes need {' and '.join(missing)} (apt-get install {' '.join(missing)})"
    return "sandbox", ""


def _require_programs() -> None:
    missing = {package for path, package in NEEDS.items() if not os.access(path, os.X_OK)}
    if missing:
        absent = ", ".join(path for path in NEEDS if not os.access(path, os.X_OK))
        raise ManagerError(f"the agents need {absent}; apt-get install {' '.join(sorted(missing))}", retry=False)


def _play(sizes: Sizes, backend: str, folder: Path, progress: Progress) -> list[Played]:
    state = folder / "state"
    state.mkdir(mode=0o711)
    batches = [
        draw(seed, groups=sizes.groups, siblings=sizes.siblings, think_faster=sizes.think_faster)
        for seed in range(sizes.seeds)
    ]
    bugs = {script.bug.name: script.bug for scripts in batches for script in scripts}
    sides.prepare(list(bugs.values()), cores=sizes.cores, backend=backend, state=state)
    told = _Progress(progress, batches)
    found = []
    for seed, scripts in enumerate(batches):
        rewards, shown, others = {}, {}, {}
        for side in SIDES if seed % 2 == 0 else reversed(SIDES):
            path = folder / f"{seed}-{RECORDINGS[side]}"
            neighbours = Neighbours(sizes.cores)
            rewards[side] = asyncio.run(
                sides.run_side(
                    side,
                    scripts,
                    cores=sizes.cores,
                    backend=backend,
                    state=state,
                    record=path,
                    told=told.side(seed, side),
                )
            )
            others[side] = neighbours.share()
            keeps = sides.REQUEST if side == RESERVED else 0.0
            shown[side] = measured.read(path, [script.name for script in scripts], name=side, keeps_cores=keeps)
        told.simulating(seed)
        simulated = _simulate(folder / f"{seed}-{RECORDINGS[BY_ACTION]}", scripts)
        found.append(
            Played(seed=seed, scripts=scripts, rewards=rewards, measured=shown, others=others, simulated=simulated)
        )
    return found


def _simulate(recorded: Path, scripts: tuple[Script, ...]) -> dict[str, Result]:
    """Both sides on virtual time, from the recording of the side by action alone."""
    with opened(recorded) as (header, _):
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


class _Progress:
    """The share of all actions that are done, those of the reserved side counted as longer, and who is at work."""

    def __init__(self, progress: Progress, batches: list[tuple[Script, ...]]) -> None:
        self._progress = progress
        self._batches = batches
        self._done = 0.0
        self._total = sum(script.actions for scripts in batches for script in scripts) * (1.0 + LONGER)

    def side(self, seed: int, side: str) -> Callable[[str], None]:
        scripts = self._batches[seed]
        left = {script.name: script.actions for script in scripts}
        of = f"seed {seed + 1} of {len(self._batches)}, {side}"

        def told(trajectory: str) -> None:
            left[trajectory] -= 1
            self._done += LONGER if side == RESERVED else 1.0
            ended = sum(count == 0 for count in left.values())
            acted = sum(script.actions for script in scripts) - sum(left.values())
            words = f"{of}: {ended} of {len(left)} trajectories, {acted} actions"
            self._progress(self._done / self._total, words)

        return told

    def simulating(self, seed: int) -> None:
        self._progress(self._done / self._total, f"seed {seed + 1} of {len(self._batches)}: simulating the recording")


# ---- what is made of it -----------------------------------------------------------------------------------------


def row_of(result: Result) -> Row:
    """The numbers of one side under one seed."""
    found = result.summary()
    assert found["actions_lost"] == 0.0, "what our side loses ends the benchmark before"
    return {name: found[name] for name in ("act_mean_s", "act_p50_s", "act_p99_s", "waiting_mean_s", "step_s")}


def _side(played: list[Played], side: str) -> Row:
    """Means over seeds, in the order of the table."""
    rows = []
    for each in played:
        result, core_time, rewards = each.measured[side].result, each.measured[side].core_time, each.rewards[side]
        use = result.core_s / (result.cores * result.makespan_s)
        shares = {f"{name}_share": value for name, value in msgspec.structs.asdict(core_time).items() if name != "used"}
        more = {"others_use": each.others[side], "reward_mean": sum(rewards.values()) / len(rewards)}
        rows.append(row_of(result) | {"core_use": use} | shares | more)
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _result(sizes: Sizes, backend: str, played: list[Played]) -> BenchResult:
    found = Findings()
    rows = {side: [row_of(each.measured[side].result) for each in played] for side in SIDES}
    found.add("act_ratio", paired(rows[RESERVED], rows[BY_ACTION], "act_mean_s"), at_least(3.0))
    found.add("p50_ratio", paired(rows[RESERVED], rows[BY_ACTION], "act_p50_s"), PRINTED)
    found.add("p99_ratio", paired(rows[RESERVED], rows[BY_ACTION], "act_p99_s"), PRINTED)
    found.add("step_ratio", paired(rows[RESERVED], rows[BY_ACTION], "step_s"), at_least(1.5))
    for side, name, goal in ((BY_ACTION, "sim_error", at_most(0.2)), (RESERVED, "sim_error_reserved", PRINTED)):
        found.add(name, mean_of([_error(each, side) for each in played]), goal)
    differ = [
        name
        for each in played
        for name, reward in each.rewards[RESERVED].items()
        if each.rewards[BY_ACTION][name] != reward
    ]
    found.add("rewards_differ", len(differ), at_most(0.0))
    found.add("load", mean_of([_load(each) for each in played]), PRINTED)
    for side in SIDES:
        found.sides[side] = _side(played, side)
    found.notes += _notes(sizes, backend, played)
    settings = msgspec.to_builtins(sizes) | {"backend": backend, "policy": sides.POLICY, "request": sides.REQUEST}
    return found.result("reservation", "measured", settings)


def _error(each: Played, side: str) -> float:
    simulated, real = row_of(each.simulated[side]), row_of(each.measured[side].result)
    return abs(simulated["act_mean_s"] / real["act_mean_s"] - 1.0)


def _load(each: Played) -> float:
    """CPU seconds of all actions over the cores times the mean time that a trajectory takes once it is admitted."""
    result = each.measured[RESERVED].result
    spans: dict[str, list[float]] = {}
    for row in result.rows:
        spans.setdefault(row.trajectory, []).extend((row.submitted_at + row.waiting_s, row.ended_at))
    span_s = sum(max(times) - min(times) for times in spans.values()) / len(spans)
    return result.core_s / (result.cores * span_s)


def _notes(sizes: Sizes, backend: str, played: list[Played]) -> list[str]:
    actions = sum(script.actions for script in played[0].scripts)
    notes = [
        f"{len(played[0].scripts)} trajectories a seed, {actions} actions under seed 0, opening and closing included;"
        f" thinking is drawn from the fit to real agents and {sizes.think_faster:g} times shorter. ACT counts from"
        " submission, waiting for admission included.",
        "core use: CPU seconds of actions / (cores x step). The rest of the core time was held by an action that did"
        " not use it, kept for an agent that was thinking, free while some action waited, or free while none did.",
        "sim_error: |mean ACT of the recording simulated / measured - 1|; sim_error_reserved: the same for the reserved"
        " side, simulated from the recording of the other side.",
    ]
    disturbance = disturbed([each.others[side] for each in played for side in SIDES])
    if disturbance:
        notes.append(disturbance)
    if backend == "process":
        notes.append("The programs ran as plain processes: nothing was isolated, and no limit of CPU held.")
    return notes
