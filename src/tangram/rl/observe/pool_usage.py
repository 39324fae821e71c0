"""Pool usage of a training run: of each pool, what actions held, and what a reservation per trajectory would have held.

`PoolUsageMonitor` chooses the source: the orchestrator of an embedded client, whose pools `runtime/pool_usage.py`
counts, or the status routes of a remote service. This module adds the reservations of trajectories. Reports are deltas:
however often one is taken, they add up to the whole. Taking one never blocks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict

import msgspec

from tangram.client.client import Client
from tangram.client.remote_transport import RemoteTransport
from tangram.client.transport import LocalTransport
from tangram.core.action import Action
from tangram.core.demand import CORE, CPU
from tangram.errors import TangramError
from tangram.rl.runs.metrics_lines import PoolUse
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.pool_usage import PoolUsage, PoolUsageObserver
from tangram.runtime.views import PoolView, TimelineRow, TimelineView, View
from tangram.server.observe.time_breakdown import IDLE_TIMEOUT_S

TRAJECTORIES_MAX = 20_000
"""Idle trajectories that are remembered. An older one is forgotten: a later action under its name starts another."""
POOLS_SHOWN_MAX = 64
"""Each function that is called has its own pool; unused ones are left out."""


class PoolUsageMonitor:
    """Reports nothing without a client. Construct it inside the client's context."""

    def __init__(self, client: Client | None) -> None:
        transport = client.transport if client is not None else None
        self._source: LocalPoolUsage | RemotePoolUsage | None = None
        if isinstance(transport, LocalTransport):
            self._source = LocalPoolUsage(transport.orchestrator)
        elif isinstance(transport, RemoteTransport):
            self._source = RemotePoolUsage(transport)

    def since_last(self) -> tuple[PoolUse, ...]:
        """Returns the usage since the last call, or since construction."""
        return self._source.since_last() if self._source is not None else ()

    def close(self) -> None:
        """Ends observation; later reports are empty."""
        if self._source is not None:
            self._source.close()


def take_report(usage: PoolUsage, reserved_unit_s: float, waiting: int) -> PoolUse:
    """Returns the usage since the last report, and resets it."""
    latencies, held_unit_s = usage.latencies, usage.held_unit_s
    usage.reset()
    act = latencies.percentiles()
    return PoolUse(
        name=usage.name,
        total=usage.total,
        actions=latencies.count,
        act_mean_s=act.mean_s,
        act_p99_s=act.p99_s,
        act_cells=dict(sorted(latencies.cells.items())),
        waiting_mean_s=latencies.waiting_s / latencies.count if latencies.count else 0.0,
        held_unit_s=held_unit_s,
        reserved_unit_s=max(reserved_unit_s, held_unit_s),  # sums of fractions are not exact
        waiting=waiting,
    )


class TrajectoryReservation:
    """What a trajectory would hold of one pool if it always held its maximum, from its first grant to its last end.

    The time between two actions counts once the second begins; a higher maximum counts from the beginning. Each method
    returns the unit-seconds that it adds to the reservation.
    """

    __slots__ = ("peak", "since_s", "units", "until_s")

    def __init__(self, now: float) -> None:
        self.since_s = self.until_s = now
        """The time in between is counted."""
        self.units = self.peak = 0.0

    def change(self, units: float, now: float) -> float:
        added = self.peak * (now - self.until_s)
        self.until_s = now
        self.units += units
        if self.units > self.peak:
            added += (self.units - self.peak) * (now - self.since_s)
            self.peak = self.units
        return added

    def add_past_hold(self, units: float, since_s: float, until_s: float) -> float:
        """Counts units that were held from `since_s` to `until_s`."""
        before = self.peak * (self.until_s - self.since_s)
        self.peak = max(self.peak, units)
        self.since_s, self.until_s = min(self.since_s, since_s), max(self.until_s, until_s)
        return self.peak * (self.until_s - self.since_s) - before


class _Trajectory(msgspec.Struct, eq=False):
    key: tuple[str, str] | None
    """Run and name; None for a single action without either."""
    reservations: dict[str, TrajectoryReservation] = {}
    """Reservations by pool."""
    live_actions: int = 0
    sandboxes: int = 0
    """Opened and not closed."""
    idle_s: float = 0.0
    """When its last action settled."""


class LocalPoolUsage:
    """Pool usage of an embedded client.

    A trajectory is the one that the action names, else its sandbox, else the action itself. Memory of sandboxes does
    not appear: trajectories reserve it either way. Memory is bounded by live actions and TRAJECTORIES_MAX.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._is_closed = False
        self._trajectory_by_action: dict[str, _Trajectory] = {}
        """The trajectory of each live action."""
        self._by_key: dict[tuple[str, str], _Trajectory] = {}
        self._idle: dict[tuple[str, str], _Trajectory] = {}
        """Trajectories without a live action, longest idle first."""
        self._reserved_unit_s: defaultdict[str, float] = defaultdict(float)
        """Unit-seconds by pool."""
        self.observer = PoolUsageObserver(orchestrator, self)

    def close(self) -> None:
        self._is_closed = True
        self.observer.close()

    def since_last(self) -> tuple[PoolUse, ...]:
        if self._is_closed:
            return ()
        now = self.observer.advance()
        for trajectory in dict.fromkeys(self._trajectory_by_action.values()):
            for name, reservation in trajectory.reservations.items():
                if reservation.units > 0.0:
                    self._reserved_unit_s[name] += reservation.change(0.0, now)
        reports = [
            take_report(usage, self._reserved_unit_s.pop(usage.name, 0.0), waiting)
            for usage, waiting in self.observer.usages()
        ]
        self._expire_idle(now - IDLE_TIMEOUT_S)
        return tuple(reports[:POOLS_SHOWN_MAX])

    # ---- called by the observer ----

    def on_submitted(self, action: Action) -> None:
        name = action.trajectory or action.sandbox
        if name:
            key = (action.run, name)
            trajectory = self._by_key.get(key) or _Trajectory(key)
            self._by_key[key] = trajectory
            self._idle.pop(key, None)
        else:
            trajectory = _Trajectory(None)
        trajectory.live_actions += 1
        self._trajectory_by_action[action.id] = trajectory

    def on_units(self, action: Action, pool: str, units: float, now: float) -> None:
        reservations = self._trajectory_by_action[action.id].reservations
        reservation = reservations.get(pool)
        if reservation is None:
            reservation = reservations[pool] = TrajectoryReservation(now)
        self._reserved_unit_s[pool] += reservation.change(units, now)

    def on_settled(self, action: Action, now: float) -> None:
        trajectory = self._trajectory_by_action.pop(action.id)
        trajectory.live_actions -= 1
        trajectory.sandboxes += {"open": 1, "close": -1}.get(action.kind, 0)
        if trajectory.key is None or trajectory.live_actions:
            return
        if action.kind == "close" and trajectory.sandboxes <= 0:
            del self._by_key[trajectory.key]
            return
        trajectory.idle_s = now
        self._idle[trajectory.key] = trajectory
        if len(self._idle) > TRAJECTORIES_MAX:
            self._drop_oldest_idle()

    def _expire_idle(self, since_s: float) -> None:
        while self._idle and next(iter(self._idle.values())).idle_s <= since_s:
            self._drop_oldest_idle()

    def _drop_oldest_idle(self) -> None:
        key = next(iter(self._idle))
        del self._idle[key], self._by_key[key]


ROWS_MAX = 5000
"""Rows of one request: the most that a service returns."""


class RemotePoolUsage:
    """Pool usage of a remote service, from its status routes.

    The timeline has settled actions with their reserved cores, so CPU is reported. Pools of quotas and devices are not:
    no route shows which action used them. Rows are fetched in the background, so the last second or so appears in the
    next report. Never raises because a service is unreachable.
    """

    def __init__(self, transport: RemoteTransport) -> None:
        """Needs a running loop: starts the first poll, which finds the row to count from."""
        self._transport = transport
        self._after = 0
        self._instance = ""
        self._polling = False
        self._usage_by_name: dict[str, PoolUsage] = {}
        self._reserved_unit_s: defaultdict[str, float] = defaultdict(float)
        self._reservations: dict[tuple[str, str, str], TrajectoryReservation] = {}
        """By run, trajectory and pool; the latest row's at the end."""
        self._pools: tuple[PoolView, ...] = ()
        self._is_closed = False
        self._start_poll()

    def close(self) -> None:
        self._is_closed = True

    def since_last(self) -> tuple[PoolUse, ...]:
        if self._is_closed:
            return ()
        self._start_poll()
        return tuple(self._report(pool) for pool in self._pools if pool.kind == CPU)

    def _report(self, pool: PoolView) -> PoolUse:
        usage = self._usage_of(pool.name)
        usage.total = pool.total / CORE
        return take_report(usage, self._reserved_unit_s.pop(pool.name, 0.0), pool.waiting)

    def _usage_of(self, pool: str) -> PoolUsage:
        return self._usage_by_name.setdefault(pool, PoolUsage(pool, 0.0))

    def _start_poll(self) -> None:
        if not self._polling:
            self._polling = True
            self._transport.start_task(self._poll())

    async def _poll(self) -> None:
        try:
            with contextlib.suppress(TangramError, msgspec.MsgspecError):
                await self._fetch()
        finally:
            self._polling = False

    async def _fetch(self) -> None:
        connection = self._transport.connection
        more = True
        while more and not self._is_closed:
            body = await connection.call("GET", "/v1/timeline", after=str(self._after), limit=str(ROWS_MAX))
            timeline = msgspec.json.decode(body, type=TimelineView)
            if self._instance and timeline.instance != self._instance:
                self._after, self._instance = 0, timeline.instance  # it was restarted, and counts from 0
                self._reservations.clear()
                continue
            if self._instance:
                for row in timeline.rows:
                    self._add_row(row)
            more = timeline.last > self._after
            self._after = timeline.last
        self._instance = self._instance or timeline.instance
        self._pools = msgspec.json.decode(await connection.call("GET", "/v1/view"), type=View).pools

    def _add_row(self, row: TimelineRow) -> None:
        if not row.cpu:
            return
        pool, cores = f"{CPU}@{row.node}", row.cpu / CORE
        usage = self._usage_of(pool)
        usage.latencies.add(row.waiting_s, row.execution_s, row.overhead_s)
        usage.held_unit_s += cores * (row.ended_s - row.granted_s)
        key = (row.run, row.trajectory or row.id, pool)
        reservation = self._reservations.pop(key, None) or TrajectoryReservation(row.granted_s)
        self._reserved_unit_s[pool] += reservation.add_past_hold(cores, row.granted_s, row.ended_s)
        self._reservations[key] = reservation
        if len(self._reservations) > TRAJECTORIES_MAX:
            del self._reservations[next(iter(self._reservations))]
