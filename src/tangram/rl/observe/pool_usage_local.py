"""An observer of pools: what actions hold of each, and what their trajectories would have reserved.

Owns the counts. Observes the orchestrator of an embedded client, beside whoever observes it already: it sees every
event with its effects, decides nothing and never waits. Promises that an event costs the same however much was seen,
and that memory is bounded by what is live and by TRAJECTORIES_MAX.

    held        units of a grant, from the grant until its manager is done with it. Those who ride in one batch hold its
                devices together: they count once
    reserved    what the trajectory would have held all the time from its first grant to its last end, sandboxes made
                and closed included, had it always held the most that it ever held at once. That it goes on is seen at
                its next action, so the time between two actions is counted then; and that it needed more all along is
                seen when it holds more

A trajectory is what actions say it is, else their sandbox, else the action itself. CPU counts in cores. The pools of
one quota are shown as one, by its name: its units are requests under way, its total those that may be under way at
once, or where nothing but a rate is limited the requests of one window. Memory of sandboxes is not shown: it is
reserved by trajectory either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from tangram.managers.quotas.manager import REQUESTS, TOKENS
from tangram.rl.observe.pool_usage_sums import Kept, Use
from tangram.rl.train.records import PoolUse
from tangram.runtime.orchestrator import Orchestrator
from tangram.server.observe.shortage import short_kind
from tangram.server.observe.time_breakdown import IDLE_S

TRAJECTORIES_MAX = 20_000
"""In which nothing is under way. Beyond, the one that has been so for longest is forgotten: what comes later under its
name is another one."""
POOLS_SHOWN_MAX = 64
"""Each function that is called has a pool of its own; those that did nothing are left out anyway."""


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
        self._before = orchestrator._observer
        self._own = self._observe  # the same object each time
        orchestrator._observer = self._own

    def close(self) -> None:
        """It sees nothing more."""
        self._closed = True
        if self._orchestrator._observer is self._own:
            self._orchestrator._observer = self._before

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

    def _observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        if self._before is not None:
            self._before(now, event, effects)
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
