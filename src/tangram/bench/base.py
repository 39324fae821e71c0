"""The framework of all benchmarks: one run and its result, ratios over seeds, worker processes.

A benchmark module has `LABEL`, `FULL`, `QUICK` and `measure(sizes, run)`; `run_module` calls it. A comparison runs all
its sides on the same work under each seed, so ratios are paired by seed and have a 95 % interval over the seeds.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from tangram.errors import InvalidConfig
from tangram.processes.process_pool import ProcessPool
from tangram.reports.statistics import Interval, ratio_of

S = TypeVar("S")
T = TypeVar("T")
Label = Literal["measured", "emulated", "simulated"]
BACKENDS = ("sandbox", "process")


class Progress(Protocol):
    """Called with the completed share, from 0 to 1, and optionally with what is being done."""

    def __call__(self, share: float, words: str = "", /) -> None: ...


ABOUT_TOLERANCE = 0.2
"""Relative tolerance of an `about` goal."""


# ---- results ----------------------------------------------------------------------------------------------------


class Goal(msgspec.Struct, frozen=True):
    """The goal of a metric. `printed`: no goal; the metric is context for others."""

    op: Literal[">=", "<=", "about", "printed"]
    value: float | None = None

    def is_met(self, measured: float) -> bool | None:
        """Return None if there is no goal."""
        if self.value is None or self.op == "printed":
            return None
        if self.op == "about":
            return abs(measured - self.value) <= ABOUT_TOLERANCE * self.value
        return measured >= self.value if self.op == ">=" else measured <= self.value


PRINTED = Goal("printed")


def at_least(value: float) -> Goal:
    return Goal(">=", value)


def at_most(value: float) -> Goal:
    return Goal("<=", value)


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of a benchmark."""

    name: str
    label: Label
    settings: dict[str, Any]
    """Everything that the numbers depend on, including the load."""
    metrics: dict[str, float]
    spread: dict[str, tuple[float, float]]
    """95 % intervals of metrics that are means over seeds."""
    goals: dict[str, Goal]
    notes: list[str]
    """Findings and explanations, as sentences."""
    sides: dict[str, dict[str, float]] = {}
    """For comparisons: the numbers of each side, means over seeds."""


def _ignore_progress(share: float, text: str = "", /) -> None:
    pass


class BenchRun(msgspec.Struct):
    """One run of a benchmark: its options, and the fields of its result so far."""

    name: str = ""
    label: Label = "measured"
    settings: dict[str, Any] = {}
    progress: Progress = _ignore_progress
    processes: int | None = None
    """Maximum of concurrent processes; None: one per core."""
    folder: Path = Path()
    """An empty directory that is removed after the run."""
    trace: Path | None = None
    """A recorded trace, or the folder that holds it."""
    report: Path | None = None
    """The page to write."""
    perfetto: Path | None = None
    """The Chrome trace to write."""
    backend: str = ""
    """The sandbox backend."""
    metrics: dict[str, float] = {}
    spread: dict[str, tuple[float, float]] = {}
    goals: dict[str, Goal] = {}
    notes: list[str] = []
    sides: dict[str, dict[str, float]] = {}

    def add(self, name: str, measured: float | Interval, goal: Goal | None = None) -> None:
        value = measured.mean if isinstance(measured, Interval) else float(measured)
        assert math.isfinite(value), f"{name} is {value}"
        self.metrics[name] = value
        if isinstance(measured, Interval) and measured.low is not None and measured.high is not None:
            self.spread[name] = (measured.low, measured.high)
        if goal is not None:
            self.goals[name] = goal

    def result(self) -> BenchResult:
        return msgspec.convert(self, BenchResult, from_attributes=True)


def run_module(
    module: Any, sizes: Any, *, progress: Progress | None = None, backend: str = "", **options: Any
) -> BenchResult:
    """Run `module.measure(sizes, run)`, which may be async, in a temporary folder, and return its result.

    `options` are fields of BenchRun.
    """
    reason = ""
    if "backend" in options_of_module(module):
        usual, reason = default_backend()
        backend, reason = (backend, "") if backend else (usual, reason)
        if backend not in BACKENDS:
            raise InvalidConfig("backend", backend, f"one of {', '.join(BACKENDS)}")
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        Path(folder).chmod(0o711)  # programs in sandboxes run as another user; secret files have modes of their own
        run = BenchRun(
            name=module.__name__.rpartition(".")[2].replace("_", "-"),
            label=module.LABEL,
            settings=msgspec.to_builtins(sizes),
            progress=progress or _ignore_progress,
            folder=Path(folder),
            backend=backend,
            **options,
        )
        if inspect.iscoroutinefunction(module.measure):
            asyncio.run(module.measure(sizes, run))
        else:
            module.measure(sizes, run)
    if reason:
        run.notes.append(f"Programs ran as plain processes: {reason}.")
    run.progress(1.0)
    return run.result()


def options_of_module(module: Any) -> tuple[str, ...]:
    options: tuple[str, ...] = getattr(module, "OPTIONS", ())
    return options


def default_backend() -> tuple[str, str]:
    """Return `sandbox` if sandboxes work here; otherwise `process` and the reason."""
    from tangram.managers.sandboxes.bwrap.manager import PROGRAMS

    missing = [package for name, package in PROGRAMS.items() if not shutil.which(name)]
    if os.geteuid() != 0:
        return "process", "sandboxes need root"
    if missing:
        return "process", f"sandboxes need {' and '.join(missing)} (apt-get install {' '.join(missing)})"
    return "sandbox", ""


# ---- statistics and processes -----------------------------------------------------------------------------------


def paired_ratio(above: Sequence[dict[str, float]], below: Sequence[dict[str, float]], name: str) -> Interval:
    """Return the geometric mean of above / below of one number, paired by seed."""
    return paired_ratio_of_values([row[name] for row in above], [row[name] for row in below])


def paired_ratio_of_values(above: Sequence[float], below: Sequence[float]) -> Interval:
    ratio = ratio_of(above, below)
    assert ratio is not None, f"no ratio of numbers that are zero or less: {above} / {below}"
    return ratio


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def run_jobs(
    job: Callable[..., T], arguments: Sequence[tuple[Any, ...]], processes: int | None, progress: Progress
) -> list[T]:
    """Run `job(*arguments)` for each of `arguments` in worker processes; results are in the same order."""
    with ProcessPool(processes) as workers:
        return workers.map(_run_job, [(job, each) for each in arguments], lambda done, total: progress(done / total))


def _run_job(task: tuple[Callable[..., T], tuple[Any, ...]], report: object) -> T:
    job, arguments = task
    return job(*arguments)


def run_sides(
    job: Callable[[S, int], T], sides: Sequence[S], seeds: int, processes: int | None, progress: Progress
) -> dict[S, list[T]]:
    """Run `job(side, seed)` for each side and seed in worker processes, and return the results of each side, by
    seed."""
    results = run_jobs(job, [(side, seed) for side in sides for seed in range(seeds)], processes, progress)
    return {side: results[number * seeds : (number + 1) * seeds] for number, side in enumerate(sides)}


def run_in_fresh_process(job: Callable[..., T], arguments: tuple[Any, ...], processes: int | None) -> T:
    """Run `job(*arguments)` in a new process, or in this one if `processes` is 1."""
    if processes == 1:
        return job(*arguments)
    with ProcessPool(1) as worker:
        result: T = worker.run(_run_job, (job, arguments))
    return result


def subprogress(progress: Progress, begin: float, end: float) -> Progress:
    """Return the progress callback of one part of a benchmark, which covers the given share of the whole."""

    def report(share: float, words: str = "", /) -> None:
        total_share = begin + share * (end - begin)
        progress(total_share, words) if words else progress(total_share)

    return report


def step_counter(progress: Progress, total: int) -> Callable[[str], None]:
    """Return a function that reports one more of `total` steps as completed, and what was done."""
    numbers = itertools.count(1)
    return lambda words: progress(next(numbers) / total, words)
