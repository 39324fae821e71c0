"""Pool usage: what actions did to each pool, counted from the events and effects of an orchestrator.

An observer of the orchestrator. Counts for each pool the units that actions hold over time, the actions that settled,
and those that wait for it now. Needs no scheduler: a baseline is counted too. The cost of an event does not grow with
the events before it; memory is bounded by live actions and pools.

Units are held from the grant until the manager has finished. Actions of one batch hold its devices together and count
once. CPU counts in cores. The pools of one quota appear as one, under its name: its units are requests in flight, its
total the concurrency limit, or the requests per window where only a rate is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

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
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.shortage import short_kind_when_queued


class PoolUsage:
    """Usage of one pool, or of all pools of one quota."""

    __slots__ = ("held", "held_unit_s", "is_private", "name", "latencies", "total", "updated_at")

    def __init__(self, name: str, now: float, *, is_private: bool = False) -> None:
        self.name = name
        self.is_private = is_private
        self.total = 0.0
        self.latencies = LatencyHistogram()
        """Actions that settled since `reset`."""
        self.held = 0.0
        self.held_unit_s = 0.0
        """Units times seconds since `reset`."""
        self.updated_at = now

    def change(self, units: float, now: float) -> None:
        """Adds units from now on; 0 brings `held_unit_s` up to date."""
        self.held_unit_s += self.held * (now - self.updated_at)
        self.held += units
        self.updated_at = now

    def reset(self) -> None:
        self.latencies = LatencyHistogram()
        self.held_unit_s = 0.0


class UsageListener(Protocol):
    """Gets what each action does, for sums other than those of pools."""

    def on_submitted(self, action: Action) -> None: ...

    def on_units(self, action: Action, pool: str, units: float, now: float) -> None:
        """The action holds that many units more from now on, or fewer."""
        ...

    def on_settled(self, action: Action, now: float) -> None: ...


class _ActionUsage:
    """The units that a live action holds."""

    __slots__ = ("action", "attempt", "batch", "node", "pool_names", "units_by_pool")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.attempt = 0
        self.node = self.batch = ""
        self.units_by_pool: dict[str, float] = {}
        self.pool_names: tuple[str, ...] = ()
        """Pools of its last grant."""


class PoolUsageObserver:
    def __init__(self, orchestrator: Orchestrator, listener: UsageListener) -> None:
        self._orchestrator = orchestrator
        self._listener = listener
        self._live: dict[str, _ActionUsage] = {}
        self._usage_by_name: dict[str, PoolUsage] = {}
        self._display_by_pool: dict[str, tuple[str, float]] = {}
        """By pool: the name under which it is counted, and what one of its units counts there."""
        self._reported_pools: dict[str, Pool] = {}
        """Pools as managers reported them, for a decider without a ledger."""
        self._batch_counts: dict[tuple[str, str], int] = {}
        """By batch and pool: the number of actions that share one grant."""
        if not isinstance(orchestrator.decider, Scheduler):
            self._reported_pools = {pool.name: pool for pool in orchestrator.any_manager.pools()}
        self._now = orchestrator.now()
        self._stop_observing = orchestrator.observe(self.observe)

    def close(self) -> None:
        self._stop_observing()

    def advance(self) -> float:
        """Brings all sums up to now, which it returns."""
        now = self._now = max(self._now, self._orchestrator.now())
        for name in self._pools():
            self._display_of(name)
        for usage in self._usage_by_name.values():
            usage.change(0.0, now)
        return now

    def usages(self) -> Iterator[tuple[PoolUsage, int]]:
        """Each pool with the number of actions that wait for it. Skips memory, and private pools that nothing used."""
        waiting_by_pool = self._waiting_by_pool()
        for name, usage in self._usage_by_name.items():
            waiting = waiting_by_pool.get(name, 0)
            is_used = not usage.is_private or usage.latencies.count or usage.held_unit_s or waiting
            if is_used and (name.partition("@")[0] != MEMORY or waiting):
                yield usage, waiting

    def _waiting_by_pool(self) -> dict[str, int]:
        decider = self._orchestrator.decider
        count_by_name: dict[str, int] = {}
        for id, live in self._live.items():
            if live.units_by_pool:
                continue
            kind = ""
            if isinstance(decider, Scheduler):
                entry = decider.entries.get(id)
                if entry is None or entry.state is not State.QUEUED:
                    continue
                kind = short_kind_when_queued(decider, entry)
            demand = live.action.demand.pools
            for name in self._names_of([kind if kind in demand else next(iter(demand))])[:1]:
                count_by_name[name] = count_by_name.get(name, 0) + 1
        return count_by_name

    # ---- events and effects ----

    def observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        now = self._now = max(self._now, now)
        if isinstance(event, Submit):
            if not any(isinstance(effect, Refuse) and effect.action == event.action.id for effect in effects):
                self._track(event.action)
        elif isinstance(event, Finished | StartFailed):
            live = self._live.get(event.action)
            if live is not None and event.attempt in (0, live.attempt):
                self._release(live, now)
        elif isinstance(event, PoolChanged):
            self._reported_pools[event.pool.name] = event.pool
        elif isinstance(event, NodeChanged) and event.state is NodeState.DOWN:
            for live in self._live.values():
                if live.node == event.node:
                    self._release(live, now)
        for effect in effects:
            if isinstance(effect, Start):
                self._on_grant(effect.action, effect.grant, now)
            elif isinstance(effect, Resize):
                self._on_resize(effect, now)
            elif isinstance(effect, Settle):
                self._on_settle(effect, now)

    def _track(self, action: Action) -> _ActionUsage:
        live = self._live[action.id] = _ActionUsage(action)
        self._listener.on_submitted(action)
        return live

    def _on_grant(self, action: Action, grant: Grant, now: float) -> None:
        live = self._live.get(action.id) or self._track(action)
        self._release(live, now)
        live.attempt, live.node, live.batch = grant.attempt, grant.node, grant.batch
        for share in grant.shares:
            name, scale = self._display_of(share.pool)
            live.units_by_pool[name] = live.units_by_pool.get(name, 0.0) + share.reserved * scale
        live.pool_names = tuple(live.units_by_pool)
        for name, units in live.units_by_pool.items():
            self._add_units(live, name, units, now)

    def _add_units(self, live: _ActionUsage, name: str, units: float, now: float) -> None:
        self._listener.on_units(live.action, name, units, now)
        if live.batch and name.partition("@")[0] == GPU:
            key = (live.batch, name)
            count = self._batch_counts.get(key, 0) + (1 if units > 0.0 else -1)
            if count > 0:
                self._batch_counts[key] = count
            else:
                del self._batch_counts[key]
            if count != (1 if units > 0.0 else 0):
                return  # another action of the batch took the devices, or still holds them
        self._usage_by_name[name].change(units, now)

    def _release(self, live: _ActionUsage, now: float) -> None:
        for name, units in live.units_by_pool.items():
            self._add_units(live, name, -units, now)
        live.units_by_pool = {}

    def _on_resize(self, effect: Resize, now: float) -> None:
        live = self._live.get(effect.action)
        name, scale = self._display_of(effect.pool)
        if live is not None and name in live.units_by_pool:
            units = effect.reserved * scale
            self._add_units(live, name, units - live.units_by_pool[name], now)
            live.units_by_pool[name] = units

    def _on_settle(self, effect: Settle, now: float) -> None:
        outcome = effect.outcome
        live = self._live.pop(outcome.action, None)
        if live is None:
            return
        self._release(live, now)
        for name in live.pool_names or self._names_of(live.action.demand.pools):
            self._usage_by_name[name].latencies.add(outcome.waiting_s, outcome.execution_s, outcome.overhead_s)
        self._listener.on_settled(live.action, now)

    # ---- names of pools ----

    def _pools(self) -> dict[str, Any]:
        """By name: records with `kind`, `total` and `window`."""
        decider = self._orchestrator.decider
        return decider.ledger.pools if isinstance(decider, Scheduler) else self._reported_pools

    def _names_of(self, kinds: Iterable[str]) -> list[str]:
        """The names under which the first pool of each kind is counted."""
        names = []
        for kind in kinds:
            pool = next((name for name in self._pools() if name.partition("@")[0] == kind), kind)
            names.append(self._display_of(pool)[0])
        return list(dict.fromkeys(names))

    def _display_of(self, name: str) -> tuple[str, float]:
        pools = self._pools()
        pool = pools.get(name)
        display = self._display_by_pool.get(name)
        kind = name.partition("@")[0]
        if display is None:
            display = self._display_by_pool[name] = self._choose_display(name, kind, pool, pools)
            if display[0] not in self._usage_by_name:
                usage = PoolUsage(display[0], self._now, is_private=self._is_private(kind, pool))
                self._usage_by_name[display[0]] = usage
        if pool is not None and display[1]:
            self._usage_by_name[display[0]].total = pool.total * display[1]
        return display

    def _choose_display(self, name: str, kind: str, pool: Any, pools: Iterable[str]) -> tuple[str, float]:
        if kind == CPU:
            return name, 1.0 / CORE
        quota, _, unit = kind.rpartition("/")
        if quota and unit in (REQUESTS, TOKENS) and getattr(pool, "window", None) is not None:
            return quota, 1.0 if unit == REQUESTS and quota not in pools else 0.0
        return name, 1.0

    def _is_private(self, kind: str, pool: Any) -> bool:
        decider = self._orchestrator.decider
        private = decider.ledger.private_kinds if isinstance(decider, Scheduler) else ()
        return kind in private or bool(getattr(pool, "private", False))
