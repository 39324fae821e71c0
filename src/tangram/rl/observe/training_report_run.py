"""A training run as its report tells it: the lines that count, put in order and added up.

Owns every number that is made of lines: who reached what and when, where the time of steps went, sums over pools. Never
writes markup. Promises the same numbers for the same lines, whatever is missing: a run may have no evaluation, one
step, or none at all. Numbers that are not finite count as missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec

from tangram.rl.train.records import AnyLine, Began, Evaluated, Noticed, Over, PoolUse, Trained, Warmed
from tangram.server.observe.history import Tally

L = TypeVar("L")

BUCKETS_MAX = 320
"""Points of a curve: more than that cannot be told apart on a screen."""
SMOOTHED_OVER = 5.0
"""Steps over which training rewards are averaged, the newest counting most."""
FINAL_SHARE = 0.95
"""Of its final score, from which on a task has reached it."""
FINAL_EVALUATIONS = 5
"""The last ones, whose mean is the final score of a run that is compared with others."""
GOOD_ENDS = ("steps", "seconds")
"""Causes of an end that was meant."""


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """When something was so for the first time."""

    step: int
    at_s: float
    trajectories: int


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A task at the end of a run."""

    task: str
    held_out: bool
    """By evaluations; else by the rewards of training."""
    warm: float | None
    """The last look at the warm start."""
    greedy: float | None
    """Likewise, of the most likely tokens."""
    first: float | None = None
    """The first evaluation."""
    before: float | None = None
    """What the last is compared with: the evaluation before the first step, or else the warm start."""
    last: float | None
    error: float | None = None
    """Standard error of the last."""
    episodes: int = 0
    mean_of_last: float | None = None
    """Of the last few evaluations."""
    best: float | None = None
    reached: Reached | None = None
    """When FINAL_SHARE of the last score."""


class PoolSum(msgspec.Struct, frozen=True, kw_only=True):
    """A pool over the whole run."""

    name: str
    total: float
    actions: int
    act_mean_s: float
    act_p99_s: float | None
    """Of all actions; None, if the steps do not tell how many took how long."""
    act_p99_worst_s: float
    """Of one step."""
    waiting_mean_s: float
    held_unit_s: float
    reserved_unit_s: float

    @property
    def saved(self) -> float | None:
        """How many times more a reservation would have held."""
        return self.reserved_unit_s / self.held_unit_s if self.held_unit_s > 0.0 else None


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring steps that are drawn as one point."""

    steps: tuple[Trained, ...]
    begin_s: float
    trajectories: int
    """Trained on by its end; likewise `before`, by its begin."""
    before: int
    smoothed: dict[str, float]
    """By task: the training reward, at its end."""

    @property
    def words(self) -> str:
        first, last = self.steps[0].step, self.steps[-1].step
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def mean(self, value: Callable[[Trained], float | None]) -> float | None:
        found = [each for each in map(value, self.steps) if each is not None and math.isfinite(each)]
        return sum(found) / len(found) if found else None

    def most(self, value: Callable[[Trained], float | None]) -> float | None:
        return max((each for each in map(value, self.steps) if each is not None and math.isfinite(each)), default=None)


class Run:
    """The lines of a run that count, in their order."""

    def __init__(self, lines: Iterable[AnyLine]) -> None:
        self.lines = tuple(lines)
        self.began = _of(Began, self.lines)
        self.warm = _of(Warmed, self.lines)
        self.steps = sorted(_of(Trained, self.lines), key=lambda line: line.step)
        self.evaluations = sorted(_of(Evaluated, self.lines), key=lambda line: line.step)
        self.notices = _of(Noticed, self.lines)
        over = _of(Over, self.lines)
        resumed_last = bool(over) and any(isinstance(line, Began) for line in self.lines[self.lines.index(over[-1]) :])
        self.over = over[-1] if over and not resumed_last else None
        """None: it goes on, or was killed."""
        self.tasks = tuple(
            dict.fromkeys(
                [task for line in self.steps[-1:] for task in line.tasks]
                + [task for line in self.warm for task in line.scores]
                + [task for line in self.evaluations for task in line.scores]
                + [task for line in self.steps for task in line.tasks]
            )
        )
        self._alpha_by_step = _alphas(self.lines)
        self.trajectories = list(accumulate(_trajectories(line) for line in self.steps))
        """Trained on, by the end of each step."""
        self.seconds = max((line.at_s for line in self.lines if math.isfinite(line.at_s)), default=0.0)

    @property
    def mode(self) -> str:
        return self.began[-1].mode if self.began else ""

    @property
    def alpha(self) -> int:
        """The largest that a step was made with: a resumption may have changed it."""
        return max(self._alphas)

    @property
    def alpha_words(self) -> str:
        """All that steps were made with, in their order."""
        return f"α = {', then '.join(map(str, self._alphas))}"

    @property
    def older(self) -> int:
        """Trajectories that were older than the α of their step."""
        return sum(sum(line.staleness[self._alpha_by_step[line.step] + 1 :]) for line in self.steps)

    @property
    def _alphas(self) -> list[int]:
        made = [self._alpha_by_step[line.step] for line in self.steps]
        made = made or [line.alpha for line in self.began[-1:]] or [0]
        return [alpha for alpha, before in zip(made, [None, *made], strict=False) if alpha != before]

    @property
    def settings(self) -> dict[str, object]:
        return self.began[-1].settings if self.began else {}

    @property
    def warm_over_s(self) -> float | None:
        """When the warm start was over."""
        return next((line.at_s for line in reversed(self.warm) if line.over), None)

    @property
    def failed(self) -> str:
        """What went wrong in the end; empty: nothing did, or nobody knows."""
        return self.over.cause if self.over is not None and self.over.cause not in (*GOOD_ENDS, "interrupted") else ""

    def trajectories_at(self, step: int) -> int:
        """Trained on when that step was done."""
        return next((count for line, count in self._counted() if line.step >= step), self.trajectories_all)

    def trajectories_by(self, at_s: float) -> int:
        return max((count for line, count in self._counted() if line.at_s <= at_s), default=0)

    def step_by(self, at_s: float) -> int:
        """The last that was done by then."""
        return max((line.step for line in self.steps if line.at_s <= at_s), default=0)

    def _counted(self) -> Iterable[tuple[Trained, int]]:
        return zip(self.steps, self.trajectories, strict=True)

    @property
    def trajectories_all(self) -> int:
        return self.trajectories[-1] if self.trajectories else 0

    # ---- scores --------------------------------------------------------------------------------------------------

    def score(self, task: str) -> Score:
        warm = next((line.scores[task] for line in reversed(self.warm) if task in line.scores), None)
        greedy = next((line.greedy[task] for line in reversed(self.warm) if task in line.greedy), None)
        found = [line for line in self.evaluations if finite(line.scores.get(task)) is not None]
        before = next((line.scores[task] for line in found if line.step == 0), finite(warm))
        later = [line for line in found if line.step > 0]
        if not later:
            trained = self._trained_score(task, warm, greedy)
            return msgspec.structs.replace(trained, first=found[0].scores[task] if found else None, before=before)
        scores = [line.scores[task] for line in later]
        last = later[-1]
        return Score(
            task=task,
            held_out=True,
            warm=finite(warm),
            greedy=finite(greedy),
            first=found[0].scores[task],
            before=before,
            last=scores[-1],
            error=finite(last.spread.get(task)),
            episodes=last.episodes.get(task, 0),
            mean_of_last=sum(scores[-FINAL_EVALUATIONS:]) / len(scores[-FINAL_EVALUATIONS:]),
            best=max(scores),
            reached=self._reached([(line.step, line.at_s, line.scores[task]) for line in later]),
        )

    def _trained_score(self, task: str, warm: float | None, greedy: float | None) -> Score:
        smooth = [(line, values[task]) for line, values in zip(self.steps, self.smoothed(), strict=True)
                  if task in values]  # fmt: skip
        return Score(
            task=task,
            held_out=False,
            warm=finite(warm),
            greedy=finite(greedy),
            last=smooth[-1][1] if smooth else None,
            best=max((value for _, value in smooth), default=None),
            reached=self._reached([(line.step, line.at_s, value) for line, value in smooth]),
        )

    def _reached(self, found: Sequence[tuple[int, float, float]]) -> Reached | None:
        if not found or found[-1][2] <= 0.0:
            return None
        step, at_s, _ = next(each for each in found if each[2] >= FINAL_SHARE * found[-1][2])
        return Reached(step=step, at_s=at_s, trajectories=self.trajectories_at(step) if step else 0)

    def smoothed(self) -> list[dict[str, float]]:
        """By step and task: the training rewards up to there, each weighing less than the one after it."""
        decay = 1.0 - 1.0 / SMOOTHED_OVER
        sums: dict[str, tuple[float, float]] = {}
        found = []
        for line in self.steps:
            for task, its in line.tasks.items():
                if its.trajectories and math.isfinite(its.reward):
                    top, bottom = sums.get(task, (0.0, 0.0))
                    sums[task] = (decay * top + its.reward, decay * bottom + 1.0)
            found.append({task: top / bottom for task, (top, bottom) in sums.items()})
        return found

    # ---- over time -----------------------------------------------------------------------------------------------

    def buckets(self, most: int = BUCKETS_MAX) -> list[Bucket]:
        size = max(1, -(-len(self.steps) // most))
        smoothed = self.smoothed()
        found = []
        for start in range(0, len(self.steps), size):
            steps = tuple(self.steps[start : start + size])
            end = start + len(steps) - 1
            found.append(
                Bucket(
                    steps=steps,
                    begin_s=steps[0].at_s - steps[0].step_s,
                    trajectories=self.trajectories[end],
                    before=self.trajectories[start - 1] if start else 0,
                    smoothed=smoothed[end],
                )
            )
        return found

    def pools(self) -> list[PoolSum]:
        names = dict.fromkeys(pool.name for line in self.steps for pool in line.pools)
        by_name: dict[str, list[PoolUse]] = {name: [] for name in names}
        for line in self.steps:
            for pool in line.pools:
                by_name[pool.name].append(pool)
        return [_summed(name, uses) for name, uses in by_name.items()]


def _alphas(lines: Iterable[AnyLine]) -> dict[int, int]:
    """By step, the bound on age that it was made under."""
    found, alpha = {}, 0
    for line in lines:
        if isinstance(line, Began):
            alpha = line.alpha
        elif isinstance(line, Trained):
            found[line.step] = alpha
    return found


def parts_of(line: Trained) -> dict[str, float]:
    """Where the time of a step went, as far as it is known; together they are the step. `wait NAME`: for what."""
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


class Tokens(NamedTuple):
    """That the policy wrote, of some steps."""

    written: float
    in_no_batch: float
    """Of groups that were dropped and of trajectories that were left out."""
    idle: float
    """In a batch, and not trained on: of groups that teach nothing."""


def tokens_of(lines: Iterable[Trained]) -> Tokens:
    batches = lost = idle = 0.0
    for line in lines:
        batch = sum(its.trajectories * its.tokens for its in line.tasks.values())
        trained = finite(line.metrics.get("tokens"))
        batches, lost = batches + batch, lost + line.tokens_discarded
        idle += max(0.0, batch - trained) if trained is not None else 0.0
    return Tokens(batches + lost, lost, idle)


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _trajectories(line: Trained) -> int:
    return sum(its.trajectories for its in line.tasks.values()) or sum(line.staleness)


def _summed(name: str, uses: Sequence[PoolUse]) -> PoolSum:
    actions = sum(use.actions for use in uses)

    def mean(value: Callable[[PoolUse], float]) -> float:
        return sum(value(use) * use.actions for use in uses) / actions if actions else 0.0

    return PoolSum(
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
    """Of all actions of these steps together: a mean of percentiles is none."""
    whole = Tally()
    for use in uses:
        whole.count += sum(use.act_cells.values())
        for cell, count in use.act_cells.items():
            whole.cells[cell] = whole.cells.get(cell, 0) + count
    return whole.quantiles((0.99,))[0] if whole.count else None


def _of(kind: type[L], lines: Iterable[object]) -> list[L]:
    return [line for line in lines if isinstance(line, kind)]
