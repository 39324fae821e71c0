"""Pool use: what the actions of a run did to each pool since somebody asked last.

Owns the choice of whom to ask: the orchestrator of an embedded client, which is observed; or a service elsewhere, which
is looked at as far as it shows itself. A pool is told by its name, in the units of PoolUse. Promises that what is told
adds up to the whole however often it is asked, and that asking never waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from tangram.client.client import Client
from tangram.client.remote import RemoteTransport
from tangram.client.transport import LocalTransport
from tangram.core.action import Action, State
from tangram.core.demand import CORE, CPU, GPU, MEMORY
from tangram.core.messages import (
    Effect,
    Event,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Resize,
    Settle,
    Start,
    StartFailed,
    Submit,
)
from tangram.core.scheduler import Scheduler
from tangram.errors import TangramError
from tangram.managers.quotas.manager import REQUESTS, TOKENS
from tangram.rl.train.records import PoolUse
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.views import PoolView, Row, Timeline, View
from tangram.server.observe.history import Tally
from tangram.server.observe.shortage import short_kind
from tangram.server.observe.time_breakdown import IDLE_S

TRAJECTORIES_MAX = 20_000
"""In which nothing is under way. Beyond, the one that has been so for longest is forgotten: what comes later under its
name is another one."""
POOLS_SHOWN_MAX = 64
"""Each function that is called has a pool of its own; those that did nothing are left out anyway."""


class PoolWatch:
    """Make it inside of the client's context. `None`: there is nothing to tell."""

    def __init__(self, client: Client | None) -> None:
        transport = client.transport if client is not None else None
        self._source: PoolObserver | PoolLook | None = None
        if isinstance(transport, LocalTransport):
            self._source = PoolObserver(transport.orchestrator)
        elif isinstance(transport, RemoteTransport):
            self._source = PoolLook(transport)

    def since_last(self) -> tuple[PoolUse, ...]:
        """Since the call before, or since it was made."""
        return self._source.since_last() if self._source is not None else ()

    def close(self) -> None:
        """It sees nothing more, and tells nothing more."""
        if self._source is not None:
            self._source.close()


class Use:
    """A pool as it is shown, or all pools of one quota."""

    __slots__ = ("at_s", "held", "held_unit_s", "private", "reserved_unit_s", "tally", "total")

    def __init__(self, now: float, private: bool = False) -> None:
        self.private = private
        self.total = 0.0
        self.tally = Tally()
        self.held = 0.0
        """Units, now."""
        self.at_s = now
        self.held_unit_s = self.reserved_unit_s = 0.0

    def change(self, units: float, now: float) -> None:
        self.held_unit_s += self.held * (now - self.at_s)
        self.held += units
        self.at_s = now

    def told(self, name: str, waiting: int) -> PoolUse:
        """All since it was told last."""
        tally, self.tally = self.tally, Tally()
        act = tally.percentiles()
        held, reserved = self.held_unit_s, self.reserved_unit_s
        self.held_unit_s = self.reserved_unit_s = 0.0
        return PoolUse(
            name=name,
            total=self.total,
            actions=tally.count,
            act_mean_s=act.mean_s,
            act_p99_s=act.p99_s,
            act_cells=dict(sorted(tally.cells.items())),
            waiting_mean_s=tally.waiting_s / tally.count if tally.count else 0.0,
            held_unit_s=held,
            reserved_unit_s=max(reserved, held),  # sums of fractions are not exact
            waiting=waiting,
        )


class Kept:
    """A trajectory in one pool: what it would keep, were it reserved."""

    __slots__ = ("most", "since_s", "units", "until_s")

    def __init__(self, now: float) -> None:
        self.since_s = self.until_s = now
        """What is between is in the sum."""
        self.units = self.most = 0.0

    def change(self, units: float, now: float, use: Use) -> None:
        use.reserved_unit_s += self.most * (now - self.until_s)
        self.until_s = now
        self.units += units
        if self.units > self.most:
            use.reserved_unit_s += (self.units - self.most) * (now - self.since_s)
            self.most = self.units

    def had(self, units: float, since_s: float, until_s: float, use: Use) -> None:
        """It held them in between, which is heard of afterwards."""
        before = self.most * (self.until_s - self.since_s)
        self.most = max(self.most, units)
        self.since_s, self.until_s = min(self.since_s, since_s), max(self.until_s, until_s)
        use.reserved_unit_s += self.most * (self.until_s - self.since_s) - before


class _Trajectory:
    __slots__ = ("boxes", "idle_s", "kept", "key", "live")

    def __init__(self, key: tuple[str, str] | None) -> None:
        self.key = key
        self.kept: dict[str, Kept] = {}
        """By the name of the pool that is shown."""
        self.live = self.boxes = 0
        """Actions that have yet to settle; sandboxes that were opened and not closed."""
        self.idle_s = 0.0


class _Life:
    """An action that has yet to settle."""

    __slots__ = ("action", "attempt", "batch", "holds", "names", "node", "trajectory")

    def __init__(self, action: Action, trajectory: _Trajectory) -> None:
        self.action = action
        self.trajectory = trajectory
        self.attempt = 0
        self.node = self.batch = ""
        self.holds: dict[str, float] = {}
        """Units by the name of the pool that is shown."""
        self.names: tuple[str, ...] = ()
        """Of the pools that it has had units of."""


class PoolObserver:
    """Pool usage of an embedded client, as an observer of its orchestrator.

    Sees every event with its effects, decides nothing and never blocks. An event costs the same however many were seen;
    memory is bounded by live actions and by TRAJECTORIES_MAX.

    held        units of a grant, from the grant until its manager has finished. Actions of one batch hold its devices
                together and count once
    reserved    what the trajectory would have held from its first grant to its last end, opening and closing sandboxes
                included, had it always held its own maximum. The time between two actions counts once the second
                begins, and a rise of the maximum counts from the beginning

    A trajectory is what the action names, else its sandbox, else the action itself. CPU counts in cores. The pools of
    one quota appear as one, under its name: its units are requests in flight, its total the concurrency limit, or the
    requests per window where only a rate is limited. Memory of sandboxes does not appear: trajectories reserve it
    either way.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._closed = False
        self._lives: dict[str, _Life] = {}
        self._trajectories: dict[tuple[str, str], _Trajectory] = {}
        self._idle: dict[tuple[str, str], _Trajectory] = {}
        """Those in which nothing is under way, since longest first."""
        self._uses: dict[str, Use] = {}
        self._shown: dict[str, tuple[str, float]] = {}
        """By the name of a pool: under which name it is shown, and what one unit of it counts there."""
        self._pools: dict[str, Pool] = {}
        """As far as managers named them. The scheduler knows better."""
        self._batches: dict[tuple[str, str], int] = {}
        """Actions that share one grant of a pool."""
        if not isinstance(orchestrator.decider, Scheduler):
            self._pools = {pool.name: pool for pool in orchestrator.any_manager.pools()}
        self._now = orchestrator.now()
        self._stop_observing = orchestrator.observe(self.observe)

    def close(self) -> None:
        """It sees nothing more."""
        self._closed = True
        self._stop_observing()

    # ---- what is asked -------------------------------------------------------------------------------------------

    def since_last(self) -> tuple[PoolUse, ...]:
        """Since the call before, or since it was made."""
        if self._closed:
            return ()
        now = self._now = max(self._now, self._orchestrator.now())
        for name in self._known():
            self._show(name)
        for each in self._trajectories.values():
            self._count_up(each, now)
        for life in self._lives.values():
            if life.trajectory.key is None:
                self._count_up(life.trajectory, now)
        waiting = self._waiting()
        found = []
        for name, use in self._uses.items():
            use.change(0.0, now)
            if self._is_told(name, use) or name in waiting:
                found.append(use.told(name, waiting.get(name, 0)))
        self._forget(now - IDLE_S)
        return tuple(found[:POOLS_SHOWN_MAX])

    def _is_told(self, name: str, use: Use) -> bool:
        if name.partition("@")[0] == MEMORY:
            return False
        return not use.private or bool(use.tally.count or use.held_unit_s)

    def _count_up(self, trajectory: _Trajectory, now: float) -> None:
        """What it holds it would hold anyway."""
        for name, kept in trajectory.kept.items():
            if kept.units > 0.0:
                kept.change(0.0, now, self._uses[name])

    def _waiting(self) -> dict[str, int]:
        """Actions by the pool that they wait for: that which is short, as the dashboard has it."""
        decider = self._orchestrator.decider
        found: dict[str, int] = {}
        for id, life in self._lives.items():
            if life.holds:
                continue
            kind = ""
            if isinstance(decider, Scheduler):
                entry = decider.entries.get(id)
                if entry is None or entry.state is not State.QUEUED:
                    continue
                kind = short_kind(decider, entry)
            wanted = life.action.demand.pools
            names = self._names_of([kind if kind in wanted else next(iter(wanted))])
            for name in names[:1]:
                found[name] = found.get(name, 0) + 1
        return found

    # ---- every event -------------------------------------------------------------------------------------------

    def observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        """Counts one event with its effects, as an Observer of the orchestrator."""
        if self._closed:
            return
        now = self._now = max(self._now, now)
        if isinstance(event, Submit):
            if not any(isinstance(effect, Refuse) and effect.action == event.action.id for effect in effects):
                self._begin(event.action)
        elif isinstance(event, Finished | StartFailed):
            life = self._lives.get(event.action)
            if life is not None and event.attempt in (0, life.attempt):
                self._release(life, now)
        elif isinstance(event, PoolChanged):
            self._pools[event.pool.name] = event.pool
        elif isinstance(event, NodeChanged) and event.state is NodeState.DOWN:
            for life in self._lives.values():
                if life.node == event.node:
                    self._release(life, now)
        for effect in effects:
            if isinstance(effect, Start):
                self._granted(effect.action, effect.grant, now)
            elif isinstance(effect, Resize):
                self._resized(effect, now)
            elif isinstance(effect, Settle):
                self._settled(effect, now)

    def _begin(self, action: Action) -> _Life:
        name = action.trajectory or action.sandbox
        if not name:
            trajectory = _Trajectory(None)
        else:
            key = (action.run, name)
            trajectory = self._trajectories.get(key) or _Trajectory(key)
            self._trajectories[key] = trajectory
            self._idle.pop(key, None)
        trajectory.live += 1
        life = self._lives[action.id] = _Life(action, trajectory)
        return life

    def _granted(self, action: Action, grant: Grant, now: float) -> None:
        life = self._lives.get(action.id) or self._begin(action)
        self._release(life, now)
        life.attempt, life.node, life.batch = grant.attempt, grant.node, grant.batch
        for share in grant.shares:
            name, scale = self._show(share.pool)
            life.holds[name] = life.holds.get(name, 0.0) + share.reserved * scale
        life.names = tuple(life.holds)
        for name, units in life.holds.items():
            self._take(life, name, units, now)

    def _take(self, life: _Life, name: str, units: float, now: float) -> None:
        """Units more, or less."""
        use = self._uses[name]
        kept = life.trajectory.kept.get(name)
        if kept is None:
            kept = life.trajectory.kept[name] = Kept(now)
        kept.change(units, now, use)
        if life.batch and name.partition("@")[0] == GPU:
            key = (life.batch, name)
            riders = self._batches.get(key, 0) + (1 if units > 0.0 else -1)
            if riders > 0:
                self._batches[key] = riders
            else:
                del self._batches[key]
            if riders != (1 if units > 0.0 else 0):
                return  # somebody else has taken them, or still has them
        use.change(units, now)

    def _release(self, life: _Life, now: float) -> None:
        for name, units in life.holds.items():
            self._take(life, name, -units, now)
        life.holds = {}

    def _resized(self, effect: Resize, now: float) -> None:
        life = self._lives.get(effect.action)
        name, scale = self._show(effect.pool)
        if life is not None and name in life.holds:
            units = effect.reserved * scale
            self._take(life, name, units - life.holds[name], now)
            life.holds[name] = units

    def _settled(self, effect: Settle, now: float) -> None:
        outcome = effect.outcome
        life = self._lives.pop(outcome.action, None)
        if life is None:
            return
        self._release(life, now)
        for name in life.names or self._names_of(life.action.demand.pools):
            self._uses[name].tally.add(outcome.waiting_s, outcome.execution_s, outcome.overhead_s)
        self._left(life.trajectory, life.action.kind, now)

    def _left(self, trajectory: _Trajectory, kind: str, now: float) -> None:
        trajectory.live -= 1
        trajectory.boxes += {"open": 1, "close": -1}.get(kind, 0)
        if trajectory.key is None or trajectory.live:
            return
        if kind == "close" and trajectory.boxes <= 0:
            del self._trajectories[trajectory.key]
            return
        trajectory.idle_s = now
        self._idle[trajectory.key] = trajectory
        if len(self._idle) > TRAJECTORIES_MAX:
            self._forget_first()

    def _forget(self, since_s: float) -> None:
        while self._idle and next(iter(self._idle.values())).idle_s <= since_s:
            self._forget_first()

    def _forget_first(self) -> None:
        key = next(iter(self._idle))
        del self._idle[key], self._trajectories[key]

    # ---- pools ---------------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, Any]:
        """Pools by name, each with `kind`, `total`, `window`."""
        decider = self._orchestrator.decider
        return decider.ledger.pools if isinstance(decider, Scheduler) else self._pools

    def _names_of(self, kinds: Iterable[str]) -> list[str]:
        """Under which those are shown from which such an action may run: the first of each kind."""
        names = []
        for kind in kinds:
            pool = next((name for name in self._known() if name.partition("@")[0] == kind), kind)
            names.append(self._show(pool)[0])
        return list(dict.fromkeys(names))

    def _show(self, pool: str) -> tuple[str, float]:
        """Under which name a pool is shown, and what one unit of it counts there."""
        known = self._known()
        its = known.get(pool)
        shown = self._shown.get(pool)
        kind = pool.partition("@")[0]
        if shown is None:
            shown = self._shown[pool] = self._naming(pool, kind, its, known)
            if shown[0] not in self._uses:
                self._uses[shown[0]] = Use(self._now, self._is_private(kind, its))
        if its is not None and shown[1]:
            self._uses[shown[0]].total = its.total * shown[1]
        return shown

    def _naming(self, pool: str, kind: str, its: Any, known: Iterable[str]) -> tuple[str, float]:
        if kind == CPU:
            return pool, 1.0 / CORE
        quota, _, what = kind.rpartition("/")
        if quota and what in (REQUESTS, TOKENS) and getattr(its, "window", None) is not None:
            return quota, 1.0 if what == REQUESTS and quota not in known else 0.0
        return pool, 1.0

    def _is_private(self, kind: str, its: Any) -> bool:
        decider = self._orchestrator.decider
        private = decider.ledger.private_kinds if isinstance(decider, Scheduler) else ()
        return kind in private or bool(getattr(its, "private", False))


ROWS = 5000
"""Asked for at once: what a service gives at most."""


class PoolLook:
    """Pool usage of a remote service, from its status routes.

    A service shows rows of settled actions, each with its reserved cores, and its pools as they are; so CPU is
    reported, and pools of quotas and devices are not: nothing shows which action used them. Rows arrive over the
    network and are never waited for, so the last second or so appears in the next report. Never raises because a
    service is unreachable.
    """

    def __init__(self, transport: RemoteTransport) -> None:
        """Wants a running loop: the first look begins at once, and finds out from where on rows count."""
        self._transport = transport
        self._after = 0
        self._instance = ""
        self._looking = False
        self._uses: dict[str, Use] = {}
        self._kept: dict[tuple[str, str, str], Kept] = {}
        """By run, trajectory and pool; the one heard of last at the end."""
        self._pools: tuple[PoolView, ...] = ()
        self._closed = False
        self._begin()

    def close(self) -> None:
        self._closed = True

    def since_last(self) -> tuple[PoolUse, ...]:
        if self._closed:
            return ()
        self._begin()
        return tuple(self._told(pool) for pool in self._pools if pool.kind == CPU)

    def _told(self, pool: PoolView) -> PoolUse:
        use = self._uses.setdefault(pool.name, Use(0.0))
        use.total = pool.total / CORE
        return use.told(pool.name, pool.waiting)

    def _begin(self) -> None:
        if not self._looking:
            self._looking = True
            self._transport.begin(self._look())

    async def _look(self) -> None:
        try:
            with contextlib.suppress(TangramError, msgspec.MsgspecError):
                await self._read()
        finally:
            self._looking = False

    async def _read(self) -> None:
        wire = self._transport.wire
        more = True
        while more and not self._closed:
            answer = await wire.ask("GET", "/v1/timeline", after=str(self._after), limit=str(ROWS))
            timeline = msgspec.json.decode(answer, type=Timeline)
            if self._instance and timeline.instance != self._instance:
                self._after, self._instance = 0, timeline.instance  # it was started anew, and counts from 0
                self._kept.clear()
                continue
            if self._instance:
                for row in timeline.rows:
                    self._take(row)
            more = timeline.last > self._after
            self._after = timeline.last
        self._instance = self._instance or timeline.instance
        self._pools = msgspec.json.decode(await wire.ask("GET", "/v1/view"), type=View).pools

    def _take(self, row: Row) -> None:
        if not row.cpu:
            return
        pool, cores = f"{CPU}@{row.node}", row.cpu / CORE
        use = self._uses.setdefault(pool, Use(0.0))
        use.tally.add(row.waiting_s, row.execution_s, row.overhead_s)
        use.held_unit_s += cores * (row.ended_s - row.granted_s)
        key = (row.run, row.trajectory or row.id, pool)
        kept = self._kept.pop(key, None) or Kept(row.granted_s)
        kept.had(cores, row.granted_s, row.ended_s, use)
        self._kept[key] = kept
        if len(self._kept) > TRAJECTORIES_MAX:
            del self._kept[next(iter(self._kept))]
