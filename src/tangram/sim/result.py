"""The result of one simulation, and its metrics: ACT, waiting, step time, use of cores.

Times cover completed work only: an action that was lost or refused has no ACT, and a step that lost a trajectory has no
time.
"""

from __future__ import annotations

import msgspec
import numpy as np

from tangram.core.action import Status

SAMPLES_MAX = 4000
"""Points kept of a curve; beyond that, every second one is dropped and the spacing doubles."""
COMPLETED = (Status.SUCCEEDED.value, Status.TIMED_OUT.value)
"""Statuses of actions that ran to their end; a timeout is an answer to the agent."""


class ActionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One settled action."""

    id: str
    run: str
    kind: str
    key: str
    status: str
    submitted_at: float
    ended_at: float
    waiting_s: float
    execution_s: float
    overhead_s: float
    node: str
    width: float
    cpu_s: float

    @property
    def act_s(self) -> float:
        return self.ended_at - self.submitted_at

    @property
    def trajectory(self) -> str:
        """The engine names an action `trajectory.turn.number`."""
        return self.id.rsplit(".", 2)[0]


class SampledCurve:
    """A curve over time in bounded memory."""

    __slots__ = ("_rows", "_spacing")

    def __init__(self) -> None:
        self._rows: list[tuple[float, float]] = []
        self._spacing = 0.0

    def add(self, now: float, value: float) -> None:
        rows = self._rows
        if rows and now - rows[-1][0] < self._spacing:
            return
        rows.append((now, value))
        if len(rows) > SAMPLES_MAX:
            self._rows = rows[::2]
            self._spacing = max(self._spacing * 2.0, (rows[-1][0] - rows[0][0]) / SAMPLES_MAX)

    def rows(self) -> list[tuple[float, float]]:
        return self._rows


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One workload under one scheduler."""

    name: str
    workload: str
    seed: int
    rows: list[ActionRow]
    episode_ends: list[float]
    episodes_failed: int
    makespan_s: float
    """Seconds from the first start to the end of the slowest trajectory, lost ones included."""
    cores: float
    core_s: float
    """CPU seconds used."""
    busy: list[tuple[float, float]]
    """Cores in use over time."""

    @property
    def completed(self) -> list[ActionRow]:
        return [row for row in self.rows if row.status in COMPLETED]

    def acts(self, kind: str = "") -> np.ndarray:
        return np.array([row.act_s for row in self.completed if not kind or row.kind == kind])

    def summary(self) -> dict[str, float]:
        """Return the metrics of a table row. Undefined ones are left out: times without a completed action, and
        `step_s` of a step that lost a trajectory."""
        counts = {
            "actions": float(len(self.completed)),
            "actions_lost": float(len(self.rows) - len(self.completed)),
            "trajectories": float(len(self.episode_ends)),
            "failed": float(self.episodes_failed),
            "core_use": self.core_s / (self.cores * self.makespan_s) if self.cores and self.makespan_s else 0.0,
        }
        step = {"step_s": self.makespan_s} if self.completed and not self.episodes_failed else {}
        return counts | self._times() | step

    def _times(self) -> dict[str, float]:
        rows = self.completed
        if not rows:
            return {}
        acts = self.acts()
        executions = np.array([row.execution_s for row in rows])
        return {
            "act_mean_s": float(acts.mean()),
            "act_p50_s": float(np.percentile(acts, 50)),
            "act_p95_s": float(np.percentile(acts, 95)),
            "act_p99_s": float(np.percentile(acts, 99)),
            "act_weighted_s": float((acts * executions).sum() / max(executions.sum(), 1e-12)),
            "waiting_mean_s": float(np.mean([row.waiting_s for row in rows])),
            "execution_mean_s": float(executions.mean()),
            "overhead_mean_s": float(np.mean([row.overhead_s for row in rows])),
        }
