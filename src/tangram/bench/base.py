"""What all benchmarks share: the record of a result, the statistics over seeds, the processes that play them.

A comparison plays all its sides on the same work with the same seed, so its ratio is taken per seed and averaged over
seeds as a logarithm: 2x and 0.5x cancel out. Promises a 95 % interval by Student's t beside every such mean.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")

Progress = Callable[[float], None]
"""Is told the share that is done, from 0 to 1."""

ABOUT = 0.2
"""A number that should be about another one is met within this share of it."""

STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1, 2, ... 30 degrees of freedom."""
NORMAL = 1.960


# ---- results ----------------------------------------------------------------------------------------------------


class Goal(msgspec.Struct, frozen=True):
    """What a metric should be. `printed`: nothing; it is there to judge others by."""

    op: Literal[">=", "<=", "about", "printed"]
    value: float | None = None

    def met(self, measured: float) -> bool | None:
        """None where there is nothing to meet."""
        if self.value is None or self.op == "printed":
            return None
        if self.op == "about":
            return abs(measured - self.value) <= ABOUT * self.value
        return measured >= self.value if self.op == ">=" else measured <= self.value


PRINTED = Goal("printed")


def at_least(value: float) -> Goal:
    return Goal(">=", value)


def at_most(value: float) -> Goal:
    return Goal("<=", value)


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark, run once."""

    name: str
    label: Literal["measured", "emulated", "simulated"]
    settings: dict[str, Any]
    """Everything that the numbers depend on, the load included."""
    metrics: dict[str, float]
    spread: dict[str, tuple[float, float]]
    """Of metrics that are means over seeds: their 95 % interval."""
    goals: dict[str, Goal]
    notes: list[str]
    """Sentences on what was found and why."""


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds and its 95 % interval."""

    mean: float
    low: float
    high: float


class Findings:
    """A result in the making."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.spread: dict[str, tuple[float, float]] = {}
        self.goals: dict[str, Goal] = {}
        self.notes: list[str] = []

    def add(self, name: str, found: float | Interval, goal: Goal | None = None) -> None:
        value = found.mean if isinstance(found, Interval) else float(found)
        assert math.isfinite(value), f"{name} is {value}"
        self.metrics[name] = value
        if isinstance(found, Interval):
            self.spread[name] = (found.low, found.high)
        if goal is not None:
            self.goals[name] = goal

    def result(self, name: str, label: Literal["measured", "emulated", "simulated"], sizes: Any) -> BenchResult:
        return BenchResult(
            name=name,
            label=label,
            settings=msgspec.to_builtins(sizes),
            metrics=self.metrics,
            spread=self.spread,
            goals=self.goals,
            notes=self.notes,
        )


# ---- statistics -------------------------------------------------------------------------------------------------


def student_t(freedom: int) -> float:
    """The 97.5 % quantile; beyond the table by the first terms of its expansion around the normal one."""
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    return NORMAL + (NORMAL**3 + NORMAL) / (4.0 * freedom)


def mean_of(values: Sequence[float]) -> Interval:
    """The arithmetic mean of one value per seed."""
    count = len(values)
    assert count > 1, f"one seed is not evidence: an interval needs at least 2 values, got {count}"
    mean = math.fsum(values) / count
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    half = student_t(count - 1) * error
    return Interval(mean, mean - half, mean + half)


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The geometric mean of above / below, paired by seed."""
    logs = mean_of([math.log(a / b) for a, b in zip(above, below, strict=True)])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


# ---- running ----------------------------------------------------------------------------------------------------


def play(
    job: Callable[..., T], arguments: Sequence[tuple[Any, ...]], processes: int | None, progress: Progress
) -> list[T]:
    """`job(*arguments)` for each of them, side by side; the results in the order of the arguments."""
    processes = min(_usable_cores() if processes is None else processes, len(arguments))
    if processes == 1:
        results = []
        for done, each in enumerate(arguments, start=1):
            results.append(job(*each))
            progress(done / len(arguments))
        return results
    with _pool(processes) as pool:
        futures = [pool.submit(job, *each) for each in arguments]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            progress(done / len(futures))
        return [future.result() for future in futures]


def by_itself(job: Callable[..., T], arguments: tuple[Any, ...], processes: int | None) -> T:
    """`job(*arguments)` in a process that has done nothing else; in this one if `processes` is 1."""
    if processes == 1:
        return job(*arguments)
    with _pool(1) as pool:
        return pool.submit(job, *arguments).result()


def part(progress: Progress, begin: float, end: float) -> Progress:
    """The progress of one part of a benchmark, as a share of the whole."""
    return lambda share: progress(begin + share * (end - begin))


def _pool(processes: int) -> ProcessPoolExecutor:
    """Of fresh processes, not forked ones: the caller may have threads, such as that of a progress bar."""
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
