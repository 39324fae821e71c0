"""What all benchmarks share: the record of a result, ratios over seeds, the processes that play them.

A comparison plays all its sides on the same work under each seed, so its ratio is taken seed by seed, and a 95 %
interval over the seeds stands beside it.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from tangram.processes.process_pool import Workers
from tangram.reports.statistics import Interval, ratio_of

T = TypeVar("T")


class Progress(Protocol):
    """Is told the share that is done, from 0 to 1, and by some what is being done."""

    def __call__(self, share: float, words: str = "", /) -> None: ...


ABOUT = 0.2
"""A number that should be about another one is met within this share of it."""


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
    sides: dict[str, dict[str, float]] = {}
    """Of a comparison that shows them: the numbers of each side, means over seeds."""


class Findings:
    """A result in the making."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.spread: dict[str, tuple[float, float]] = {}
        self.goals: dict[str, Goal] = {}
        self.notes: list[str] = []
        self.sides: dict[str, dict[str, float]] = {}

    def add(self, name: str, found: float | Interval, goal: Goal | None = None) -> None:
        value = found.mean if isinstance(found, Interval) else float(found)
        assert math.isfinite(value), f"{name} is {value}"
        self.metrics[name] = value
        if isinstance(found, Interval) and found.low is not None and found.high is not None:
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
            sides=self.sides,
        )


# ---- statistics and processes -----------------------------------------------------------------------------------


def paired(above: Sequence[dict[str, float]], below: Sequence[dict[str, float]], name: str) -> Interval:
    """The geometric mean of above / below of one number, paired by seed."""
    return paired_values([row[name] for row in above], [row[name] for row in below])


def paired_values(above: Sequence[float], below: Sequence[float]) -> Interval:
    ratio = ratio_of(above, below)
    assert ratio is not None, f"no ratio of numbers that are zero or less: {above} / {below}"
    return ratio


def geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def play(
    job: Callable[..., T], arguments: Sequence[tuple[Any, ...]], processes: int | None, progress: Progress
) -> list[T]:
    """`job(*arguments)` for each of them, side by side; the results in the order of the arguments."""
    with Workers(processes) as workers:
        return workers.map(_call, [(job, each) for each in arguments], lambda done, total: progress(done / total))


def _call(task: tuple[Callable[..., T], tuple[Any, ...]], report: object) -> T:
    job, arguments = task
    return job(*arguments)


def by_itself(job: Callable[..., T], arguments: tuple[Any, ...], processes: int | None) -> T:
    """`job(*arguments)` in a process that has done nothing else; in this one if `processes` is 1."""
    if processes == 1:
        return job(*arguments)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job, *arguments).result()


def part(progress: Progress, begin: float, end: float) -> Progress:
    """The progress of one part of a benchmark, as a share of the whole."""

    def tell(share: float, words: str = "", /) -> None:
        whole = begin + share * (end - begin)
        progress(whole, words) if words else progress(whole)

    return tell
