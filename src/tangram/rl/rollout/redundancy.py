"""What redundancy costs, and what it prefers.

Owns the arithmetic; pure. Of members and groups that are played besides, the first that end are kept and the others
stopped. That costs what was done in vain, and it prefers what ends soon: short answers, few turns, fast environments.
Both are reported from the records alone, for each task and for all: `waste` is the share of all that was done in vain,
and `kept` stands beside `cancelled`. A trajectory that was cancelled tells its length so far, which is less than it
would have become; that is said by `turns` and `tokens` being lower bounds on that side. So is its engine time: how long
a request that was aborted had waited in its engine is not told, so that only answers count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from tangram.rl.rollout.records import Ending, Group, Stage, Trajectory

ENVIRONMENT = (Stage.RESET, Stage.STEP)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories that met the same fate, summed up."""

    trajectories: int = 0
    turns: int = 0
    tokens: int = 0
    """That the policy wrote, as far as they came back: what is aborted in an engine is not told."""
    environment_s: float = 0.0
    """In which environments were asked, waiting for a place left out."""
    engine_s: float = 0.0
    """Of the turns that there are, as engines told it, waiting left out; each counts for itself, as several share a
    step. At least that much: what was aborted, and the turns before a retry, are not in it."""
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
        """Of those that have one."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    def __add__(self, other: Side) -> Side:
        return Side(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of what was done, from 0 to 1, that no group was made of."""

    tokens: float
    environment_s: float
    engine_s: float


class Fates(msgspec.Struct, frozen=True, kw_only=True):
    kept: Side = Side()
    """Members of groups."""
    surplus: Side = Side()
    """Had their reward too late to be kept, or in a group that was not."""
    cancelled: Side = Side()
    """Stopped, as they were not needed any more."""
    failed: Side = Side()
    """Stale, or without a reward by a failure of the infrastructure."""

    @property
    def waste(self) -> Waste:
        vain = self.surplus + self.cancelled + self.failed
        return Waste(
            tokens=_share(vain.tokens, self.kept.tokens),
            environment_s=_share(vain.environment_s, self.kept.environment_s),
            engine_s=_share(vain.engine_s, self.kept.engine_s),
        )

    def __add__(self, other: Fates) -> Fates:
        return Fates(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class RedundancyReport(msgspec.Struct, frozen=True, kw_only=True):
    selection: Literal["first"] = "first"
    """Which are kept: those that end first."""
    tasks: dict[str, Fates]
    all: Fates

    def lines(self) -> list[str]:
        """To be printed."""
        said = []
        for name, fates in (*self.tasks.items(), *((("all", self.all),) if len(self.tasks) > 1 else ())):
            waste = fates.waste
            said.append(
                f"{name}: in vain {waste.tokens:.1%} of tokens, {waste.environment_s:.1%} of environment time,"
                f" at least {waste.engine_s:.1%} of engine time"
            )
            said += [
                f"  {fate:<9} {side.trajectories:>6} trajectories, turns {_number(side.turns_mean)},"
                f" tokens {_number(side.tokens_mean)}, reward {_number(side.reward_mean)}"
                for fate in Fates.__struct_fields__
                if (side := getattr(fates, fate)).trajectories
            ]
        return said


def report(kept: Iterable[Group], left_out: Iterable[Group] = ()) -> RedundancyReport:
    """Of groups that were kept, and of those that were not, be they whole or not."""
    by_task: dict[str, Fates] = {}

    def count(group: Group, fates: Fates) -> None:
        by_task[group.task] = by_task.get(group.task, Fates()) + fates

    for group in kept:
        for trajectory in group.members:
            count(group, Fates(kept=_side(trajectory)))
        for trajectory in group.left_out:
            count(group, Fates(**{_fate(trajectory): _side(trajectory)}))
    for group in left_out:
        for trajectory in group.all():
            count(group, Fates(**{_fate(trajectory): _side(trajectory)}))
    return RedundancyReport(tasks=by_task, all=sum(by_task.values(), Fates()))


def _fate(trajectory: Trajectory) -> str:
    if trajectory.ending.rewarded:
        return "surplus"
    return "cancelled" if trajectory.ending is Ending.CANCELLED else "failed"


def _side(trajectory: Trajectory) -> Side:
    spent = dict.fromkeys(Stage, 0.0)
    for span in trajectory.spans:
        spent[span.stage] += span.ended_s - span.began_s - span.waiting_s
    return Side(
        trajectories=1,
        turns=len(trajectory.turns),
        tokens=sum(len(turn.tokens) for turn in trajectory.turns),
        environment_s=sum(spent[stage] for stage in ENVIRONMENT),
        engine_s=sum(turn.prefill_s + turn.decode_s for turn in trajectory.turns),
        rewarded=int(trajectory.reward is not None),
        reward_sum=trajectory.reward or 0.0,
    )


def _share(vain: float, kept: float) -> float:
    return vain / (vain + kept) if vain + kept > 0.0 else 0.0


def _number(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}"
