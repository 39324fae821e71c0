"""Actions over time as a Chrome trace: a process for each run, a lane for each trajectory, waiting, overhead and
execution below each action. The one form for recorded traces, the timeline of the server and simulations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tangram.core.action import Action, Outcome, Status
from tangram.core.demand import CORE, CPU, MEMORY
from tangram.core.messages import Finished, Grant, Pool, PoolChanged, Refuse, Resize, Settle, Start, StartFailed, Submit
from tangram.core.trace import Line
from tangram.reports.trace_events import Phase, TraceEvents
from tangram.runtime.trace_recorder import open_trace
from tangram.runtime.views import TimelineRow

POOLS = "pools"
"""The process of the counters of a recorded trace."""
NO_TRAJECTORY = "no trajectory"
"""The lane of actions without a trajectory. Viewers show several lanes of this name while actions overlap."""
UNSETTLED = "unsettled"
"""Status of an action that was live at the end of a recorded trace."""


def add_action(
    trace: TraceEvents,
    process: str,
    trajectory: str,
    name: str,
    *,
    submitted_s: float,
    ended_s: float,
    waiting_s: float,
    overhead_s: float,
    category: str,
    args: Mapping[str, Any],
) -> None:
    """Add one action. Of an action with several attempts, the times of all are drawn as if they were one."""
    granted_s = submitted_s + waiting_s
    started_s = granted_s + overhead_s
    trace.complete(
        trace.lane(process, trajectory or NO_TRAJECTORY),
        name,
        since_s=submitted_s,
        until_s=ended_s,
        category=category,
        args=args,
        phases=(
            Phase("waiting", submitted_s, granted_s),
            Phase("overhead", granted_s, started_s),
            Phase("executing", started_s, ended_s),
        ),
    )


def trace_of_rows(rows: Iterable[TimelineRow]) -> TraceEvents:
    """The trace of the actions that a server remembers."""
    trace = TraceEvents()
    for row in sorted(rows, key=lambda row: row.submitted_s):
        add_action(
            trace,
            row.run,
            row.trajectory,
            row.name,
            submitted_s=row.submitted_s,
            ended_s=row.ended_s,
            waiting_s=row.waiting_s,
            overhead_s=row.overhead_s,
            category=row.name.partition(" ")[0],
            args={"id": row.id, "status": row.status, "node": row.node, "cores": row.cpu / CORE},
        )
    return trace


# ---- recorded traces ------------------------------------------------------------------------------------------


def trace_of_recording(path: str | Path) -> TraceEvents:
    """The trace of a recorded file, with a counter for each pool with held units."""
    with open_trace(path) as (header, lines):
        recording = _Recording(header.pools)
        for line in lines:
            recording.add(line)
    recording.end()
    return recording.trace


class _Recording:
    """Live actions and the units that they hold, from line to line."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self.trace = TraceEvents()
        self._pools = {pool.name: pool for pool in pools}
        self._live: dict[str, tuple[Action, float]] = {}
        self._grants: dict[str, Grant] = {}
        """The grants of actions that hold units."""
        self._batches: dict[str, set[str]] = {}
        """Actions by the batch whose units they share; a single action is a batch of one."""
        self._units: dict[str, dict[str, int]] = {}
        """By batch: units by pool."""
        self._totals: dict[str, int] = {}
        self._now = 0.0

    def add(self, line: Line) -> None:
        self._now = line.t
        match line.message:
            case Submit(action=action):
                self._live[action.id] = (action, line.t)
            case Start(grant=grant):
                self._hold(grant)
            case Resize(action=action_id, pool=pool, reserved=reserved):
                self._set_units(action_id, pool, reserved)
            case StartFailed(action=action_id) | Finished(action=action_id):
                self._release(action_id)
            case Settle(outcome=outcome):
                self._settle(outcome.status.value, outcome)
            case Refuse(action=action_id, reason=reason):
                self._settle(Status.REFUSED.value, Outcome(action=action_id, status=Status.REFUSED, reason=reason))
            case PoolChanged(pool=pool):
                self._pools[pool.name] = pool

    def end(self) -> None:
        """Add the actions that never settled."""
        for id, (_, submitted_s) in list(self._live.items()):
            waiting_s = 0.0 if id in self._grants else self._now - submitted_s
            self._settle(UNSETTLED, Outcome(action=id, status=Status.LOST, waiting_s=waiting_s))

    def _settle(self, status: str, outcome: Outcome) -> None:
        self._release(outcome.action)
        action, submitted_s = self._live.pop(outcome.action, (None, 0.0))
        if action is None:
            return  # a Refuse may name a sandbox
        details = {"id": action.id, "status": status, "reason": outcome.reason, "attempts": outcome.attempts}
        add_action(
            self.trace,
            action.run,
            action.trajectory,
            f"{action.kind} {action.key}".strip(),
            submitted_s=submitted_s,
            ended_s=self._now,
            waiting_s=outcome.waiting_s,
            overhead_s=outcome.overhead_s,
            category=action.kind,
            args={**details, "sandbox": action.sandbox, "cpu_s": outcome.usage.cpu_s},
        )

    def _hold(self, grant: Grant) -> None:
        batch = grant.batch or grant.action
        self._grants[grant.action] = grant
        self._batches.setdefault(batch, set()).add(grant.action)
        for share in grant.shares:
            self._set_units(grant.action, share.pool, share.reserved)

    def _release(self, action_id: str) -> None:
        grant = self._grants.get(action_id)
        if grant is None:
            return
        batch = grant.batch or grant.action
        members = self._batches[batch]
        if members == {action_id}:
            for pool in list(self._units.get(batch, ())):
                self._set_units(action_id, pool, 0)
            self._units.pop(batch, None)
            del self._batches[batch]
        members.discard(action_id)
        del self._grants[action_id]

    def _set_units(self, action_id: str, pool_name: str, units: int) -> None:
        """Count only what actions hold until they end: spent units come back with time, and most memory belongs to
        sandboxes."""
        grant, pool = self._grants.get(action_id), self._pools.get(pool_name)
        if grant is None or pool is None or pool.window is not None or pool.kind == MEMORY:
            return
        held = self._units.setdefault(grant.batch or grant.action, {})
        self._totals[pool_name] = self._totals.get(pool_name, 0) + units - held.get(pool_name, 0)
        held[pool_name] = units
        name, scale = ("cores", CORE) if pool.kind == CPU else ("units", 1)
        value = self._totals[pool_name] / scale
        self.trace.counter(POOLS, f"{pool_name}: held by actions", at_s=self._now, values={name: value})
