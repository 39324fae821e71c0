"""Measured calls of agents: the time of every call, as seen by the agent.

Owns the times of one side. ACT counts from the call to its answer. Waiting is the time before the last attempt started:
in a queue, or between retries. Overhead is preparation, such as copying a model to its device. The rest is execution.
Opening and closing a sandbox are not counted.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from tangram.client.result import Timing

RUNS = ("coding", "search", "distillation")


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One call."""

    run: str
    kind: str
    trajectory: str
    began_s: float
    """From the start of the step."""
    act_s: float
    waiting_s: float
    overhead_s: float
    lost: bool


class RunNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """One run on one side."""

    trajectories: int
    actions: int
    lost: int
    """Calls that ran out of retries."""
    act_mean_s: float
    act_p95_s: float
    waiting_share: float
    overhead_share: float
    executing_share: float
    """Share of the time of all its actions."""
    reward_mean: float


class Acts:
    """The calls of one side."""

    def __init__(self) -> None:
        self.rows: list[Act] = []
        self._began = time.monotonic()

    def begin(self) -> None:
        """Start the step."""
        self._began = time.monotonic()

    def add(self, run: str, kind: str, trajectory: str, began: float, timing: Timing, lost: bool = False) -> None:
        """Add a call that started at `began`, by the monotonic clock, and ended now."""
        act_s = time.monotonic() - began
        waiting_s = min(timing.waiting_s, act_s)
        row = Act(
            run=run,
            kind=kind,
            trajectory=trajectory,
            began_s=began - self._began,
            act_s=act_s,
            waiting_s=waiting_s,
            overhead_s=min(timing.overhead_s, act_s - waiting_s),
            lost=lost,
        )
        self.rows.append(row)

    def numbers(self, run: str, rewards: list[float]) -> RunNumbers:
        rows = [row for row in self.rows if row.run == run]
        acts = np.array([row.act_s for row in rows])
        waiting, overhead = sum(row.waiting_s for row in rows), sum(row.overhead_s for row in rows)
        total = float(acts.sum())
        return RunNumbers(
            trajectories=len(rewards),
            actions=len(rows),
            lost=sum(row.lost for row in rows),
            act_mean_s=float(acts.mean()),
            act_p95_s=float(np.percentile(acts, 95)),
            waiting_share=waiting / total,
            overhead_share=overhead / total,
            executing_share=(total - waiting - overhead) / total,
            reward_mean=sum(rewards) / len(rewards),
        )
