"""The history of a training run for its report: the lines of the surviving lineage, in order, and their sums.

Owns every number that is derived from lines: when a task reached its score, the time breakdown of steps, sums over
pools. Promises the same numbers for the same lines, and works on incomplete runs: a run may have no evaluation and no
steps. Numbers that are not finite count as missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec

from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    Evaluated,
    Noticed,
    PoolUse,
    RunBegan,
    RunEnded,
    Trained,
    WarmStartChecked,
)
from tangram.runtime.latency_histogram import LatencyHistogram

L = TypeVar("L")

BUCKETS_MAX = 320
"""Points of a curve; more cannot be distinguished on a screen."""
SMOOTHED_OVER = 5.0
"""The time constant of smoothed training rewards, in steps."""
FINAL_SHARE = 0.95
"""A task has reached its final score at this share of it."""
FINAL_EVALUATIONS = 5
"""The mean of this many last evaluations is the score with which runs are compared."""
INTENDED_CAUSES = ("steps", "seconds")
"""Causes of an intended end."""


class ScoreReached(msgspec.Struct, frozen=True, kw_only=True):
    """When a score was reached first."""

    step: int
    at_s: float
    trajectories: int


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """A task at the end of a run."""

    task: str
    held_out: bool
    """Whether the score is of evaluations; otherwise of training rewards."""
    warm: float | None
    """The score at the last check of the warm start."""
    greedy: float | None
    """The same with the most likely tokens."""
    first: float | None = None
    """The first evaluation."""
    before: float | None = None
    """The baseline of the last score: the evaluation before the first step, or else the warm start."""
    last: float | None
    error: float | None = None
    """Standard error of the last."""
    episodes: int = 0
    mean_of_last: float | None = None
    """The mean of the last FINAL_EVALUATIONS."""
    best: float | None = None
    reached: ScoreReached | None = None
    """When FINAL_SHARE of the last score was reached."""


class PoolTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A pool over the whole run."""

    name: str
    total: float
    actions: int
    act_mean_s: float
    act_p99_s: float | None
    """Over all actions; None if the steps have no counts by duration."""
    act_p99_worst_s: float
    """The highest p99 of a step."""
    waiting_mean_s: float
    held_unit_s: float
    reserved_unit_s: float

    @property
    def reservation_ratio(self) -> float | None:
        """The unit seconds of a reservation divided by those held."""
        return self.reserved_unit_s / self.held_unit_s if self.held_unit_s > 0.0 else None


class StepBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring steps that are drawn as one point."""

    steps: tuple[Trained, ...]
    begin_s: float
    trajectories: int
    """Trajectories trained on by its end; `before`: by its begin."""
    before: int
    smoothed: dict[str, float]
    """Smoothed training rewards by task, at its end."""

    @property
    def label(self) -> str:
        first, last = self.steps[0].step, self.steps[-1].step
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def mean(self, value: Callable[[Trained], float | None]) -> float | None:
        values = [each for each in map(value, self.steps) if each is not None and math.isfinite(each)]
        return sum(values) / len(values) if values else None

    def maximum(self, value: Callable[[Trained], float | None]) -> float | None:
        return max((each for each in map(value, self.steps) if each is not None and math.isfinite(each)), default=None)


class RunHistory:
    """The lines of a run that count, in their order."""

    def __init__(self, lines: Iterable[AnyMetricsLine]) -> None:
        self.lines = tuple(lines)
        self.began = _lines_of_type(RunBegan, self.lines)
        self.warm = _lines_of_type(WarmStartChecked, self.lines)
        self.steps = sorted(_lines_of_type(Trained, self.lines), key=lambda line: line.step)
        self.evaluations = sorted(_lines_of_type(Evaluated, self.lines), key=lambda line: line.step)
        self.notices = _lines_of_type(Noticed, self.lines)
        ends = _lines_of_type(RunEnded, self.lines)
        resumed_last = bool(ends) and any(
            isinstance(line, RunBegan) for line in self.lines[self.lines.index(ends[-1]) :]
        )
        self.end = ends[-1] if ends and not resumed_last else None
        """None if the run is in progress or was killed."""
        self.tasks = tuple(
            dict.fromkeys(
                [task for line in self.steps[-1:] for task in line.tasks]
                + [task for line in self.warm for task in line.scores]
                + [task for line in self.evaluations for task in line.scores]
                + [task for line in self.steps for task in line.tasks]
            )
        )
        self._bound_by_step = _bound_of_steps(self.lines)
        self.trajectories = list(accumulate(_trajectories(line) for line in self.steps))
        """Trained on, by the end of each step."""
        self.seconds = max((line.at_s for line in self.lines if math.isfinite(line.at_s)), default=0.0)

    @property
    def mode(self) -> str:
        return self.began[-1].mode if self.began else ""

    @property
    def staleness_bound(self) -> int:
        """The largest α that a step was made with: a resumption may have changed it."""
        return max(self._bounds)

    @property
    def staleness_bound_text(self) -> str:
        """All values of α that steps were made with, in their order."""
        return f"α = {', then '.join(map(str, self._bounds))}"

    @property
    def staleness_violations(self) -> int:
        """Trajectories that were older than the α of their step."""
        return sum(sum(line.staleness[self._bound_by_step[line.step] + 1 :]) for line in self.steps)

    @property
    def _bounds(self) -> list[int]:
        bounds = [self._bound_by_step[line.step] for line in self.steps]
        bounds = bounds or [line.alpha for line in self.began[-1:]] or [0]
        return [bound for bound, before in zip(bounds, [None, *bounds], strict=False) if bound != before]

    @property
    def settings(self) -> dict[str, object]:
        return self.began[-1].settings if self.began else {}

    @property
    def warm_start_end_s(self) -> float | None:
        """The time at which the warm start ended."""
        return next((line.at_s for line in reversed(self.warm) if line.over), None)

    @property
    def failure(self) -> str:
        """The cause of a failed end; empty if there is none or it is unknown."""
        return (
            self.end.cause if self.end is not None and self.end.cause not in (*INTENDED_CAUSES, "interrupted") else ""
        )

    def trajectories_at(self, step: int) -> int:
        """Trained on when that step was done."""
        return next((count for line, count in self._steps_with_totals() if line.step >= step), self.trajectories_total)

    def trajectories_by(self, at_s: float) -> int:
        return max((count for line, count in self._steps_with_totals() if line.at_s <= at_s), default=0)

    def step_by(self, at_s: float) -> int:
        """The last step that was done by then."""
        return max((line.step for line in self.steps if line.at_s <= at_s), default=0)

    def _steps_with_totals(self) -> Iterable[tuple[Trained, int]]:
        return zip(self.steps, self.trajectories, strict=True)

    @property
    def trajectories_total(self) -> int:
        return self.trajectories[-1] if self.trajectories else 0

    # ---- scores --------------------------------------------------------------------------------------------------

    def score(self, task: str) -> TaskScore:
        warm = next((line.scores[task] for line in reversed(self.warm) if task in line.scores), None)
        greedy = next((line.greedy[task] for line in reversed(self.warm) if task in line.greedy), None)
        lines = [line for line in self.evaluations if finite_or_none(line.scores.get(task)) is not None]
        before = next((line.scores[task] for line in lines if line.step == 0), finite_or_none(warm))
        later = [line for line in lines if line.step > 0]
        if not later:
            trained = self._trained_score(task, warm, greedy)
            return msgspec.structs.replace(trained, first=lines[0].scores[task] if lines else None, before=before)
        scores = [line.scores[task] for line in later]
        last = later[-1]
        return TaskScore(
            task=task,
            held_out=True,
            warm=finite_or_none(warm),
            greedy=finite_or_none(greedy),
            first=lines[0].scores[task],
            before=before,
            last=scores[-1],
            error=finite_or_none(last.spread.get(task)),
            episodes=last.episodes.get(task, 0),
            mean_of_last=sum(scores[-FINAL_EVALUATIONS:]) / len(scores[-FINAL_EVALUATIONS:]),
            best=max(scores),
            reached=self._reached([(line.step, line.at_s, line.scores[task]) for line in later]),
        )

    def _trained_score(self, task: str, warm: float | None, greedy: float | None) -> TaskScore:
        smooth = [(line, values[task]) for line, values in zip(self.steps, self.smoothed(), strict=True)
                  if task in values]  # fmt: skip
        return TaskScore(
            task=task,
            held_out=False,
            warm=finite_or_none(warm),
            greedy=finite_or_none(greedy),
            last=smooth[-1][1] if smooth else None,
            best=max((value for _, value in smooth), default=None),
            reached=self._reached([(line.step, line.at_s, value) for line, value in smooth]),
        )

    def _reached(self, points: Sequence[tuple[int, float, float]]) -> ScoreReached | None:
        if not points or points[-1][2] <= 0.0:
            return None
        step, at_s, _ = next(each for each in points if each[2] >= FINAL_SHARE * points[-1][2])
        return ScoreReached(step=step, at_s=at_s, trajectories=self.trajectories_at(step) if step else 0)

    def smoothed(self) -> list[dict[str, float]]:
        """By step and task: the exponential moving average of training rewards."""
        decay = 1.0 - 1.0 / SMOOTHED_OVER
        sums: dict[str, tuple[float, float]] = {}
        points = []
        for line in self.steps:
            for task, totals in line.tasks.items():
                if totals.trajectories and math.isfinite(totals.reward):
                    top, bottom = sums.get(task, (0.0, 0.0))
                    sums[task] = (decay * top + totals.reward, decay * bottom + 1.0)
            points.append({task: top / bottom for task, (top, bottom) in sums.items()})
        return points

    # ---- over time -----------------------------------------------------------------------------------------------

    def buckets(self) -> list[StepBucket]:
        size = max(1, -(-len(self.steps) // BUCKETS_MAX))
        smoothed = self.smoothed()
        points = []
        for start in range(0, len(self.steps), size):
            steps = tuple(self.steps[start : start + size])
            end = start + len(steps) - 1
            points.append(
                StepBucket(
                    steps=steps,
                    begin_s=steps[0].at_s - steps[0].step_s,
                    trajectories=self.trajectories[end],
                    before=self.trajectories[start - 1] if start else 0,
                    smoothed=smoothed[end],
                )
            )
        return points

    def pools(self) -> list[PoolTotals]:
        names = dict.fromkeys(pool.name for line in self.steps for pool in line.pools)
        by_name: dict[str, list[PoolUse]] = {name: [] for name in names}
        for line in self.steps:
            for pool in line.pools:
                by_name[pool.name].append(pool)
        return [_pool_totals(name, uses) for name, uses in by_name.items()]


def _bound_of_steps(lines: Iterable[AnyMetricsLine]) -> dict[int, int]:
    """By step, the α that it was made with."""
    bound_by_step, bound = {}, 0
    for line in lines:
        if isinstance(line, RunBegan):
            bound = line.alpha
        elif isinstance(line, Trained):
            bound_by_step[line.step] = bound
    return bound_by_step


def step_time_parts(line: Trained) -> dict[str, float]:
    """The parts of the time of a step, which add up to the step. `wait NAME`: the stage that it waited for."""
    known = sum(line.waited_for.values())
    scale = line.wait_s / known if known > line.wait_s > 0.0 else 1.0
    parts = {f"wait: {name}": seconds * scale for name, seconds in line.waited_for.items() if seconds > 0.0}
    parts["wait: not known"] = max(0.0, line.wait_s - known * scale)
    parts["train"] = line.train_s
    rest = line.step_s - line.wait_s - line.train_s
    for name, seconds in (("push", line.push_s), ("evaluation", line.evaluation_s)):
        parts[name] = max(0.0, min(seconds, rest))
        rest -= parts[name]
    parts["other"] = max(0.0, rest)
    return {name: seconds for name, seconds in parts.items() if seconds > 0.0 and math.isfinite(seconds)}


class TokenTotals(NamedTuple):
    """Tokens that the policy generated in some steps."""

    written: float
    in_no_batch: float
    """Tokens of dropped groups and of trajectories that were left out."""
    idle: float
    """Tokens in a batch that were not trained on: of groups without an advantage."""


def token_totals(lines: Iterable[Trained]) -> TokenTotals:
    batches = lost = idle = 0.0
    for line in lines:
        batch = sum(totals.trajectories * totals.tokens for totals in line.tasks.values())
        trained = finite_or_none(line.metrics.get("tokens"))
        batches, lost = batches + batch, lost + line.tokens_discarded
        idle += max(0.0, batch - trained) if trained is not None else 0.0
    return TokenTotals(batches + lost, lost, idle)


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _trajectories(line: Trained) -> int:
    return sum(totals.trajectories for totals in line.tasks.values()) or sum(line.staleness)


def _pool_totals(name: str, uses: Sequence[PoolUse]) -> PoolTotals:
    actions = sum(use.actions for use in uses)

    def mean(value: Callable[[PoolUse], float]) -> float:
        return sum(value(use) * use.actions for use in uses) / actions if actions else 0.0

    return PoolTotals(
        name=name,
        total=uses[-1].total,
        actions=actions,
        act_mean_s=mean(lambda use: use.act_mean_s),
        act_p99_s=_p99(uses),
        act_p99_worst_s=max((use.act_p99_s for use in uses), default=0.0),
        waiting_mean_s=mean(lambda use: use.waiting_mean_s),
        held_unit_s=sum(use.held_unit_s for use in uses),
        reserved_unit_s=sum(use.reserved_unit_s for use in uses),
    )


def _p99(uses: Sequence[PoolUse]) -> float | None:
    """The p99 of all actions of these steps together; the mean of their percentiles would not be a percentile."""
    histogram = LatencyHistogram()
    for use in uses:
        histogram.count += sum(use.act_cells.values())
        for cell, count in use.act_cells.items():
            histogram.cells[cell] = histogram.cells.get(cell, 0) + count
    return histogram.quantiles((0.99,))[0] if histogram.count else None


def _lines_of_type(kind: type[L], lines: Iterable[object]) -> list[L]:
    return [line for line in lines if isinstance(line, kind)]
