"""Pool usage: what the actions of each run did to each pool, counted from the events and effects of the scheduler.

Counts settled actions with their completion times, the units that actions hold over time, and the units that they would
hold if each trajectory had reserved its maximum. All counts only rise, so the use in between is the difference of two
readings. The cost of an event does not grow with the events before it. Memory is bounded by live actions, by
TRAJECTORIES_MAX, and by the pools of each run that the scheduler knows; closed private pools are forgotten.

Units are held from the grant until the manager has finished. Actions of one batch hold its devices together and count
once, for the run that took them. CPU counts in cores. The pools of one quota appear as one, under its name: its units
are requests in flight, its total the concurrency limit, or the requests per window where only a rate is limited.

A trajectory is the one that the action names, else its sandbox, else the action itself. It ends when its last sandbox
closes, or after IDLE_TIMEOUT_S without an action: a later action under its name starts another. Memory of sandboxes is
not counted: trajectories reserve it either way. Of private pools, which are limits on calls, nothing is reserved.

`PoolUsage` counts; its caller follows the scheduler and keeps one `ActionUse` for each live action. The observer of a
server does so for all that it shows; `PoolUsageObserver` does it where nothing else follows actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tangram.core.action import Action, Outcome
from tangram.core.demand import CORE, CPU, GPU, MEMORY
from tangram.core.ledger import PoolState
from tangram.core.messages import (
    Effect,
    Event,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    PoolChanged,
    Refuse,
    Resize,
    Settle,
    Start,
    StartFailed,
    Submit,
)
from tangram.core.scheduler import Scheduler
from tangram.managers.quotas.manager import REQUESTS, TOKENS
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.runtime.shortage import waiting_by_kind
from tangram.runtime.views import PoolUseReading

IDLE_TIMEOUT_S = 3600.0
"""A trajectory without an action for this long has ended."""
TRAJECTORIES_MAX = 20_000
"""Idle trajectories that are remembered; beyond, the longest idle one is forgotten."""


class _CountedPool:
    """A pool, or all pools of one quota."""

    __slots__ = ("is_memory", "is_private", "name", "scale", "total")

    def __init__(self, name: str, kind: str, *, is_private: bool) -> None:
        self.name = name
        self.is_memory = kind == MEMORY
        self.is_private = is_private
        self.scale = 1.0 / CORE if kind == CPU else 1.0
        """What a unit of the ledger counts in readings."""
        self.total = 0.0


class _Reservation:
    """What a trajectory would hold of one pool if it always held its maximum, from its first grant to its last end.

    The time between two actions counts once the second begins; a higher maximum counts from the beginning.
    """

    __slots__ = ("peak", "since_s", "units", "until_s")

    def __init__(self, now: float) -> None:
        self.since_s = self.until_s = now
        """Counted in between; beyond, as long as the trajectory holds units."""
        self.units = self.peak = 0


class _PoolUse:
    """Use of one pool by one run, in units of the ledger."""

    __slots__ = ("held", "held_unit_s", "latencies", "pool", "reserved", "reserved_unit_s", "updated_at")

    def __init__(self, pool: _CountedPool, now: float) -> None:
        self.pool = pool
        self.latencies = LatencyHistogram()
        """Of settled actions."""
        self.held = self.reserved = 0
        """Now; of trajectories, by those that hold units."""
        self.held_unit_s = self.reserved_unit_s = 0.0
        self.updated_at = now

    def advance(self, now: float) -> None:
        elapsed_s = now - self.updated_at
        if elapsed_s > 0.0:
            self.held_unit_s += self.held * elapsed_s
            self.reserved_unit_s += self.reserved * elapsed_s
            self.updated_at = now

    def hold(self, units: int, now: float) -> None:
        self.advance(now)
        self.held += units

    def reserve(self, reservation: _Reservation, units: int, now: float) -> None:
        """The trajectory holds that many units more from now on, or fewer."""
        self.advance(now)
        if not reservation.units:
            self.reserved_unit_s += reservation.peak * (now - reservation.until_s)
            self.reserved += reservation.peak
        reservation.units += units
        higher = reservation.units - reservation.peak
        if higher > 0:
            self.reserved_unit_s += higher * (now - reservation.since_s)
            self.reserved += higher
            reservation.peak = reservation.units
        if not reservation.units:
            self.reserved -= reservation.peak
            reservation.until_s = now

    def add(self, other: _PoolUse) -> None:
        """Adds the past of another use."""
        self.latencies.merge(other.latencies)
        self.held_unit_s += other.held_unit_s
        self.reserved_unit_s += other.reserved_unit_s

    def reading(self, waiting: int) -> PoolUseReading:
        pool, latencies = self.pool, self.latencies
        return PoolUseReading(
            name=pool.name,
            total=pool.total,
            private=pool.is_private,
            actions=latencies.count,
            act_s=latencies.total_s,
            act_cells=latencies.cells,
            waiting_s=latencies.waiting_s,
            held_unit_s=self.held_unit_s * pool.scale,
            reserved_unit_s=self.reserved_unit_s * pool.scale,
            waiting=waiting,
        )


class _RunUse:
    __slots__ = ("by_name", "by_pool")

    def __init__(self) -> None:
        self.by_name: dict[str, _PoolUse] = {}
        self.by_pool: dict[str, tuple[_PoolUse, int]] = {}
        """By pool of the ledger: where it is counted, and 0 if only its actions are, not its units."""


class _Trajectory:
    __slots__ = ("idle_since_s", "key", "live_actions", "reservations", "sandboxes")

    def __init__(self, key: tuple[str, str] | None) -> None:
        self.key = key
        """Run and name; None for a single action without either."""
        self.reservations: dict[_PoolUse, _Reservation] = {}
        self.live_actions = 0
        self.sandboxes = 0
        """Opened and not closed."""
        self.idle_since_s = 0.0


class ActionUse:
    """A live action and the units that it holds. Only `PoolUsage` changes it.

    The server extends it with its own fields, so that the two share one record.
    """

    __slots__ = ("action", "attempt", "batch", "held", "node", "run_use", "trajectory_use", "uses")

    def __init__(self, action: Action, usage: PoolUsage) -> None:
        self.action = action
        self.run_use, self.trajectory_use = usage.enter(action)
        """Where its use counts, and the reservation of its trajectory."""
        self.attempt = 0
        self.node = self.batch = ""
        """Of its last grant, as `attempt` and `uses`."""
        self.held: dict[_PoolUse, int] = {}
        self.uses: Iterable[_PoolUse] = ()


class PoolUsage:
    """`begin_event` must be called before the changes of an event are reported. `now` returns the current time, on the
    clock of the events."""

    def __init__(self, scheduler: Scheduler, now: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = now
        self._now = 0.0
        """Time of the last event or reading."""
        self._runs: dict[str, _RunUse] = {}
        self._ended_runs = _RunUse()
        """Use of public pools by all runs that were dropped."""
        self._counted_by_name: dict[str, _CountedPool] = {}
        self._counted_by_pool: dict[str, tuple[_CountedPool, int]] = {}
        """As in _RunUse."""
        self._batches: dict[tuple[str, str], tuple[_PoolUse, int]] = {}
        """By batch and pool: the use for which its devices count, and the number of actions that share them."""
        self._trajectories: dict[tuple[str, str], _Trajectory] = {}
        self._idle: dict[tuple[str, str], _Trajectory] = {}
        """Trajectories without a live action, longest idle first."""

    def reading(self, run: str | None = None) -> tuple[PoolUseReading, ...]:
        """Returns the use of each pool by a run, or by all, since construction. Leaves out memory that no action waits
        for, and private pools that were not used."""
        now = self._now = max(self._now, self._clock())
        self._update_totals()
        runs = [self._ended_runs, *self._runs.values()] if run is None else [self._runs.get(run, _RunUse())]
        waiting = self._waiting_by_name(run)
        sums = {pool.name: _PoolUse(pool, now) for pool in self._counted_by_name.values()}
        for usage in runs:
            for name, use in usage.by_name.items():
                use.advance(now)
                sums[name].add(use)
        return tuple(
            [
                use.reading(waiting.get(name, 0))
                for name, use in sums.items()
                if waiting.get(name)
                or not (use.pool.is_memory or use.pool.is_private)
                or (use.pool.is_private and (use.latencies.count or use.held_unit_s))
            ]
        )

    def drop_run(self, run: str) -> None:
        """The run has ended: a later run of that name starts at zero."""
        for name, use in self._runs.pop(run, _RunUse()).by_name.items():
            use.advance(self._now)
            if not use.pool.is_private:
                self._use_by_name(self._ended_runs, name).add(use)
        for key in [key for key in self._trajectories if key[0] == run]:
            del self._trajectories[key]
            self._idle.pop(key, None)

    # ---- live actions ----

    def begin_event(self, now: float) -> None:
        self._now = max(self._now, now)

    def enter(self, action: Action) -> tuple[_RunUse, _Trajectory]:
        """Counts a new live action in its run and trajectory until `on_settled`."""
        run_use = self._runs.get(action.run)
        if run_use is None:
            run_use = self._runs[action.run] = _RunUse()
        trajectory = self._trajectory_of(action)
        trajectory.live_actions += 1
        return run_use, trajectory

    def on_granted(self, live: ActionUse, grant: Grant) -> None:
        if live.held:
            self.release(live)
        live.attempt, live.node, live.batch = grant.attempt, grant.node, grant.batch
        held: dict[_PoolUse, int] = {}
        for share in grant.shares:
            use, counts = live.run_use.by_pool.get(share.pool) or self._use_of(live.run_use, share.pool)
            held[use] = held.get(use, 0) + share.reserved * counts
        live.held = live.uses = held
        for use, units in held.items():
            self._add_units(live, use, units)

    def release(self, live: ActionUse) -> None:
        """Its attempt has ended."""
        for use, units in live.held.items():
            self._add_units(live, use, -units)
        live.held = {}

    def on_resized(self, live: ActionUse, effect: Resize) -> None:
        use, counts = self._use_of(live.run_use, effect.pool)
        if use in live.held:
            units = effect.reserved * counts
            self._add_units(live, use, units - live.held[use])
            live.held[use] = units

    def on_settled(self, live: ActionUse, outcome: Outcome) -> None:
        if live.held:
            self.release(live)
        for use in live.uses or self._uses_of_demand(live):
            use.latencies.add(outcome.waiting_s, outcome.execution_s, outcome.overhead_s)
        self._leave_trajectory(live.trajectory_use, live.action.kind)

    def _add_units(self, live: ActionUse, use: _PoolUse, units: int) -> None:
        if not units:
            return
        now = self._now
        if not use.pool.is_private:
            reservations = live.trajectory_use.reservations
            reservation = reservations.get(use)
            if reservation is None:
                reservation = reservations[use] = _Reservation(now)
            use.reserve(reservation, units, now)
        if live.batch and use.pool.name.partition("@")[0] == GPU:
            self._share_devices(live.batch, use, units, now)
        else:
            use.hold(units, now)

    def _share_devices(self, batch: str, use: _PoolUse, units: int, now: float) -> None:
        """The first action of a batch takes its devices; the last one to end returns them."""
        key = (batch, use.pool.name)
        owner, count = self._batches.get(key, (use, 0))
        if count == (0 if units > 0 else 1):
            owner.hold(units, now)
        count += 1 if units > 0 else -1
        if count:
            self._batches[key] = owner, count
        else:
            del self._batches[key]

    # ---- trajectories ----

    def _trajectory_of(self, action: Action) -> _Trajectory:
        self._forget_idle(self._now - IDLE_TIMEOUT_S)
        name = action.trajectory or action.sandbox
        if not name:
            return _Trajectory(None)
        key = (action.run, name)
        trajectory = self._trajectories.get(key)
        if trajectory is None:
            trajectory = self._trajectories[key] = _Trajectory(key)
        else:
            self._idle.pop(key, None)
        return trajectory

    def _leave_trajectory(self, trajectory: _Trajectory, kind: str) -> None:
        """An action of this kind has settled."""
        trajectory.live_actions -= 1
        if kind == "open":
            trajectory.sandboxes += 1
        elif kind == "close":
            trajectory.sandboxes -= 1
        key = trajectory.key
        if key is None or trajectory.live_actions or self._trajectories.get(key) is not trajectory:
            return
        if kind == "close" and trajectory.sandboxes <= 0:
            del self._trajectories[key]
            return
        trajectory.idle_since_s = self._now
        self._idle[key] = trajectory
        if len(self._idle) > TRAJECTORIES_MAX:
            self._drop_longest_idle()

    def _forget_idle(self, since_s: float) -> None:
        while self._idle and next(iter(self._idle.values())).idle_since_s <= since_s:
            self._drop_longest_idle()

    def _drop_longest_idle(self) -> None:
        key = next(iter(self._idle))
        del self._idle[key], self._trajectories[key]

    # ---- names of pools ----

    def on_pool_changed(self, event: PoolChanged) -> None:
        """Forgets a private pool that is closed. A tenant may open any number of them, one after the other."""
        pool = event.pool.name
        if not event.pool.private or event.pool.total:
            return
        counted, _ = self._counted_by_pool.pop(pool, (None, 0))
        if counted is None:
            return
        is_last = all(other is not counted for other, _ in self._counted_by_pool.values())
        if is_last:
            del self._counted_by_name[counted.name]
        for run in self._runs.values():
            run.by_pool.pop(pool, None)
            if is_last:
                run.by_name.pop(counted.name, None)

    def _use_of(self, run: _RunUse, pool: str) -> tuple[_PoolUse, int]:
        use = run.by_pool.get(pool)
        if use is None:
            counted, counts = self._counted_pool(pool)
            use = run.by_pool[pool] = self._use_by_name(run, counted.name), counts
        return use

    def _use_by_name(self, run: _RunUse, name: str) -> _PoolUse:
        use = run.by_name.get(name)
        if use is None:
            use = run.by_name[name] = _PoolUse(self._counted_by_name[name], self._now)
        return use

    def _uses_of_demand(self, live: ActionUse) -> list[_PoolUse]:
        """Of an action that was never granted: the first pool of each kind that it demands."""
        uses = [self._use_of(live.run_use, self._pool_of_kind(kind, ""))[0] for kind in live.action.demand.pools]
        return list(dict.fromkeys(uses))

    def _pool_of_kind(self, kind: str, node: str) -> str:
        """The pool on the node, or the first."""
        pools = self._scheduler.ledger.kinds.get(kind, {})
        pool = pools.get(node) or next(iter(pools.values()), None)
        return kind if pool is None else pool.name

    def _counted_pool(self, name: str) -> tuple[_CountedPool, int]:
        known = self._counted_by_pool.get(name)
        if known is None:
            ledger, kind = self._scheduler.ledger, name.partition("@")[0]
            shown, counts = self._name_shown(name, kind, ledger.pools.get(name))
            counted = self._counted_by_name.get(shown)
            if counted is None:
                counted = _CountedPool(shown, kind, is_private=kind in ledger.private_kinds)
                self._counted_by_name[shown] = counted
            known = self._counted_by_pool[name] = counted, counts
        return known

    def _name_shown(self, name: str, kind: str, pool: PoolState | None) -> tuple[str, int]:
        quota, _, unit = kind.rpartition("/")
        if quota and unit in (REQUESTS, TOKENS) and pool is not None and pool.window is not None:
            return quota, int(unit == REQUESTS and quota not in self._scheduler.ledger.pools)
        return name, 1

    def _update_totals(self) -> None:
        for name, pool in self._scheduler.ledger.pools.items():
            if not pool.total and name not in self._counted_by_pool:
                continue  # closed and forgotten
            counted, counts = self._counted_pool(name)
            if counts:
                counted.total = pool.total * counted.scale

    def _waiting_by_name(self, run: str | None) -> dict[str, int]:
        count_by_name: dict[str, int] = {}
        for (kind, node), count in waiting_by_kind(self._scheduler, run).items():
            name = self._counted_pool(self._pool_of_kind(kind, node))[0].name
            count_by_name[name] = count_by_name.get(name, 0) + count
        return count_by_name


class PoolUsageObserver(PoolUsage):
    """Follows all actions itself. `observe` must be called for every event."""

    def __init__(self, scheduler: Scheduler, now: Callable[[], float]) -> None:
        super().__init__(scheduler, now)
        self._live: dict[str, ActionUse] = {}

    def observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        self.begin_event(now)
        if isinstance(event, Submit):
            if not any(isinstance(effect, Refuse) and effect.action == event.action.id for effect in effects):
                self._live[event.action.id] = ActionUse(event.action, self)
        elif isinstance(event, Finished | StartFailed):
            live = self._live.get(event.action)
            if live is not None and event.attempt in (0, live.attempt):
                self.release(live)
        elif isinstance(event, NodeChanged) and event.state is NodeState.DOWN:
            for live in self._live.values():
                if live.node == event.node:
                    self.release(live)
        elif isinstance(event, PoolChanged):
            self.on_pool_changed(event)
        for effect in effects:
            if isinstance(effect, Start):
                live = self._live.get(effect.action.id)
                if live is None:
                    live = self._live[effect.action.id] = ActionUse(effect.action, self)
                self.on_granted(live, effect.grant)
            elif isinstance(effect, Settle):
                live = self._live.pop(effect.outcome.action, None)
                if live is not None:
                    self.on_settled(live, effect.outcome)
            elif isinstance(effect, Resize):
                live = self._live.get(effect.action)
                if live is not None:
                    self.on_resized(live, effect)
