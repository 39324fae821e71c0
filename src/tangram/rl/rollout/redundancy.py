"""The cost and the bias of redundancy.

Pure arithmetic. Of redundant members and groups, the first that end are kept and the others stopped (early
termination). That costs the work of the stopped ones, and it prefers what ends soon: short answers, few turns, fast
environments. Both are computed from records alone, for each task and in total: `waste` is the share of work without
use, and `kept` can be compared with `cancelled`. A cancelled trajectory has its length so far, which is less than its
final length would be, so `turns` and `tokens` are lower bounds on that side. So is its engine time: records do not have
the engine time of an aborted request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from tangram.rl.trajectories.trajectory import Ending, Group, Stage, Trajectory

ENVIRONMENT_STAGES = (Stage.RESET, Stage.STEP)


class TrajectoryTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over trajectories of one category."""

    trajectories: int = 0
    turns: int = 0
    tokens: int = 0
    """Recorded tokens that the policy sampled; tokens of requests aborted in an engine are not recorded."""
    environment_s: float = 0.0
    """Time in calls of environments, without waiting for a slot."""
    engine_s: float = 0.0
    """Engine time of the recorded turns, without waiting; turns that share an engine step count individually. A lower
    bound: aborted requests, and turns before a retry, are missing."""
    rewarded: int = 0
    reward_sum: float = 0.0

    @property
    def turns_mean(self) -> float | None:
        return self.turns / self.trajectories if self.trajectories else None

    @property
    def tokens_mean(self) -> float | None:
        return self.tokens / self.trajectories if self.trajectories else None

    @property
    def reward_mean(self) -> float | None:
        """The mean reward of those that have one."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    def __add__(self, other: TrajectoryTotals) -> TrajectoryTotals:
        return TrajectoryTotals(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of work, from 0 to 1, that is in no group."""

    tokens: float
    environment_s: float
    engine_s: float


class RedundancyBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    kept: TrajectoryTotals = TrajectoryTotals()
    """Members of groups."""
    surplus: TrajectoryTotals = TrajectoryTotals()
    """Rewarded too late to be kept, or in a dropped group."""
    cancelled: TrajectoryTotals = TrajectoryTotals()
    """Stopped because they were not needed."""
    failed: TrajectoryTotals = TrajectoryTotals()
    """Stale, or without a reward because the infrastructure failed."""

    @property
    def waste(self) -> Waste:
        wasted = self.surplus + self.cancelled + self.failed
        return Waste(
            tokens=_share(wasted.tokens, self.kept.tokens),
            environment_s=_share(wasted.environment_s, self.kept.environment_s),
            engine_s=_share(wasted.engine_s, self.kept.engine_s),
        )

    def __add__(self, other: RedundancyBreakdown) -> RedundancyBreakdown:
        return RedundancyBreakdown(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


class RedundancyReport(msgspec.Struct, frozen=True, kw_only=True):
    selection: Literal["first"] = "first"
    """Which ones are kept: those that end first."""
    tasks: dict[str, RedundancyBreakdown]
    all: RedundancyBreakdown

    def lines(self) -> list[str]:
        """As text."""
        lines = []
        for name, breakdown in (*self.tasks.items(), *((("all", self.all),) if len(self.tasks) > 1 else ())):
            waste = breakdown.waste
            lines.append(
                f"{name}: wasted {waste.tokens:.1%} of tokens, {waste.environment_s:.1%} of environment time,"
                f" at least {waste.engine_s:.1%} of engine time"
            )
            lines += [
                f"  {category:<9} {totals.trajectories:>6} trajectories, turns {_number(totals.turns_mean)},"
                f" tokens {_number(totals.tokens_mean)}, reward {_number(totals.reward_mean)}"
                for category in RedundancyBreakdown.__struct_fields__
                if (totals := getattr(breakdown, category)).trajectories
            ]
        return lines


def report(kept: Iterable[Group], left_out: Iterable[Group] = ()) -> RedundancyReport:
    """Reports on groups that were kept, and on those that were not."""
    by_task: dict[str, RedundancyBreakdown] = {}

    def count(group: Group, breakdown: RedundancyBreakdown) -> None:
        by_task[group.task] = by_task.get(group.task, RedundancyBreakdown()) + breakdown

    for group in kept:
        for trajectory in group.members:
            count(group, RedundancyBreakdown(kept=_totals_of(trajectory)))
        for trajectory in group.left_out:
            count(group, RedundancyBreakdown(**{_category(trajectory): _totals_of(trajectory)}))
    for group in left_out:
        for trajectory in group.all_trajectories():
            count(group, RedundancyBreakdown(**{_category(trajectory): _totals_of(trajectory)}))
    return RedundancyReport(tasks=by_task, all=sum(by_task.values(), RedundancyBreakdown()))


def _category(trajectory: Trajectory) -> str:
    if trajectory.ending.is_rewarded:
        return "surplus"
    return "cancelled" if trajectory.ending is Ending.CANCELLED else "failed"


def _totals_of(trajectory: Trajectory) -> TrajectoryTotals:
    spent = dict.fromkeys(Stage, 0.0)
    for span in trajectory.spans:
        spent[span.stage] += span.ended_s - span.began_s - span.waiting_s
    return TrajectoryTotals(
        trajectories=1,
        turns=len(trajectory.turns),
        tokens=sum(len(turn.tokens) for turn in trajectory.turns),
        environment_s=sum(spent[stage] for stage in ENVIRONMENT_STAGES),
        engine_s=sum(turn.prefill_s + turn.decode_s for turn in trajectory.turns),
        rewarded=int(trajectory.reward is not None),
        reward_sum=trajectory.reward or 0.0,
    )


def _share(wasted: float, kept: float) -> float:
    return wasted / (wasted + kept) if wasted + kept > 0.0 else 0.0


def _number(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}"
