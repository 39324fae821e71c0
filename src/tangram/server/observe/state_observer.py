"""The state observer: the state of the server and its last hour, updated by every event.

Owns the data that the scheduler does not keep: rows and stories of settled actions, the history, time breakdowns,
sandbox statistics.
Observes the orchestrator; reads the scheduler and never changes it. Promises that the cost of an event does not grow
with the events before it, and that memory is bounded by live actions and by the limits of its parts.

Queries name a run; None is the admin, with access to everything. A run sees all of its own objects, and of other runs
only the units that they hold. The response for a hidden object equals that for a missing one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from tangram.clock import Clock, WallClock
from tangram.core.messages import (
    Concluded,
    Effect,
    Event,
    Evicted,
    Finished,
    Message,
    NodeChanged,
    NodeState,
    PoolChanged,
    Refuse,
    Release,
    Reserve,
    Resident,
    Resize,
    Settle,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
)
from tangram.core.scheduler import Scheduler
from tangram.core.trace import EVENTS
from tangram.managers.functions.manager import FunctionInstanceView
from tangram.runtime.pool_usage import IDLE_TIMEOUT_S, PoolUsage
from tangram.runtime.views import (
    TIMELINE_ROWS_MAX,
    PoolUsageView,
    ServiceView,
    Story,
    TimelineRow,
    TimelineView,
    View,
)
from tangram.server.drain_gate import DrainGate
from tangram.server.observe import view_builders
from tangram.server.observe.accounts import Accounts
from tangram.server.observe.action_tracker import ActionTracker
from tangram.server.observe.buckets import Buckets
from tangram.server.observe.pool_views import LoadedServices
from tangram.server.observe.sandbox_stats import SandboxStats
from tangram.server.observe.stories import SettledActionRecord, live_lines, settled_lines


class StateObserver:
    def __init__(
        self,
        scheduler: Scheduler,
        *,
        instances: Callable[[], Sequence[FunctionInstanceView]] = tuple,
        clock: Clock | None = None,
        calendar: Callable[[], float] = time.time,
        version: str = "",
        durability: str = "none",
        drain_gate: DrainGate | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.version = version
        self.durability = durability
        self._recovered = ""
        """What this start recovered, in a sentence."""
        self._drain_gate = drain_gate or DrainGate()
        self.instance = secrets.token_hex(8)
        self.began_at = calendar()
        self.accounts = Accounts()
        self.buckets = Buckets(self.accounts)
        self.sandboxes = SandboxStats()
        self._pool_usage = PoolUsage(scheduler, self.now)
        self.tracker = ActionTracker(scheduler, self.accounts, self.buckets, self.sandboxes, self._pool_usage)
        self.settled_actions = SettledActionLog()
        self.instances = instances
        """Returns the instances of functions."""
        self.loaded: dict[str, LoadedServices] = {}
        """By node, as managers report it."""
        self.events: dict[type[Message], int] = dict.fromkeys(EVENTS, 0)
        self.refusals: dict[str, int] = {}
        """By name of the limit."""
        self._clock = clock or WallClock()
        self._calendar = calendar
        self._started_at = self._clock.now()
        """Clock reading at event time 0: construction, until the first event corrects it."""
        self._has_seen_event = False
        self._now = 0.0
        """Time of the last event."""
        self._event: Event = Tick()
        self._event_handlers: dict[type, Callable[[Any, float], None]] = {
            Started: self.tracker.on_started,
            StartFailed: self._on_attempt_ended,
            Finished: self._on_attempt_ended,
            Concluded: self._on_concluded,
            Reserve: self._on_reserved,
            Release: self._on_released,
            Resident: self._on_resident,
            Evicted: self._on_evicted,
            PoolChanged: self._on_pool_changed,
            NodeChanged: self._on_node_changed,
        }
        self._effect_handlers: dict[type, Callable[[Any, float], None]] = {
            Start: self._on_granted,
            Settle: self._on_settled,
            Resize: self.tracker.on_resized,
            Stop: self._on_stopped,
            Refuse: self._on_refused,
        }

    def on_recovered(self, report: str) -> None:
        """Called after recovery, which this object observes."""
        self._recovered = report

    # ---- every event ----

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        if not self._has_seen_event:
            self._has_seen_event = True
            self._started_at = self._clock.now() - now
        if now < self._now:
            now = self._now
        if now >= self.buckets.end_s:
            self._close_buckets(now)
        self._now = now
        self._event = event
        kind = type(event)
        self.events[kind] += 1
        tracker = self.tracker
        tracker.begin_event(now)
        tracked = tracker.on_submitted(event.action, now) if isinstance(event, Submit) else None
        on_event = self._event_handlers.get(kind)
        if on_event is not None:
            on_event(event, now)
        for effect in effects:
            on_effect = self._effect_handlers.get(type(effect))
            if on_effect is not None:
                on_effect(effect, now)
        if tracked is not None:
            tracker.on_waiting(tracked, now)

    def _close_buckets(self, now: float) -> None:
        self.buckets.close(now, self.scheduler.ledger.pools)
        self.tracker.trajectories.forget_before(now - IDLE_TIMEOUT_S)

    def _on_attempt_ended(self, event: Finished | StartFailed, now: float) -> None:
        tracked = self.tracker.on_attempt_ended(event, now)
        if tracked is not None:
            self.tracker.on_waiting(tracked, now)

    def _on_granted(self, effect: Start, now: float) -> None:
        self.tracker.on_granted(effect.action, effect.grant, self._event, now)

    def _on_settled(self, effect: Settle, now: float) -> None:
        record = self.tracker.on_settled(effect.outcome, self.settled_actions.last_number + 1, now)
        if record is not None:
            self.settled_actions.append(record)

    def _on_concluded(self, event: Concluded, now: float) -> None:
        self.settled_actions.append(
            self.tracker.on_concluded(event.action, event.outcome, self.settled_actions.last_number + 1, now)
        )

    def _on_stopped(self, effect: Stop, now: float) -> None:
        self.tracker.on_stopped(effect.action, effect.reason, now)

    def _on_refused(self, effect: Refuse, now: float) -> None:
        self.refusals[effect.limit] = self.refusals.get(effect.limit, 0) + 1
        if isinstance(self._event, Submit):
            self.accounts.run(self._event.action.run).count("refused")

    # ---- sandboxes, pools, nodes, services ----

    def _on_reserved(self, event: Reserve, now: float) -> None:
        if self.scheduler.has_sandbox(event.sandbox) and event.sandbox not in self.sandboxes.by_name:
            self.sandboxes.open(event.sandbox, event.run, self.accounts.run(event.run), event.node, now)
            self.tracker.touch_memory(event.node, now)

    def _on_released(self, event: Release, now: float) -> None:
        sandbox = self.sandboxes.by_name.get(event.sandbox)
        if sandbox is not None:
            self.sandboxes.drop_if_closed(event.sandbox, self.scheduler)
            self.tracker.touch_memory(sandbox.node, now)

    def _on_resident(self, event: Resident, now: float) -> None:
        if event.node in self.scheduler.ledger.nodes:
            loaded = self.loaded.setdefault(event.node, {})
            loaded.pop((event.service, event.devices), None)
            loaded[event.service, event.devices] = None

    def _on_evicted(self, event: Evicted, now: float) -> None:
        self.loaded.get(event.node, {}).pop((event.service, event.devices), None)

    def _on_pool_changed(self, event: PoolChanged, now: float) -> None:
        self._pool_usage.on_pool_changed(event)
        pool = self.scheduler.ledger.pools.get(event.pool.name)
        if pool is not None:
            self.buckets.utilization.touch(pool, now)

    def _on_node_changed(self, event: NodeChanged, now: float) -> None:
        if event.state is NodeState.DOWN:
            self.loaded.pop(event.node, None)
            self.sandboxes.drop_all_closed(self.scheduler)
            for tracked in self.tracker.on_node_down(event.node, now):
                self.tracker.on_waiting(tracked, now)

    # ---- queries ----

    def now(self) -> float:
        """Seconds since the server started, as in its trace."""
        return max(self._now, self._clock.now() - self._started_at)

    def view(self, run: str | None) -> View:
        now = self.now()
        if now >= self.buckets.end_s:
            self._close_buckets(now)
        self.buckets.fold()
        return view_builders.build_view(self, run, now, self._calendar())

    def service(self) -> ServiceView:
        return ServiceView(
            version=self.version,
            state="draining" if self._drain_gate.is_draining else "up",
            began_at=self.began_at,
            instance=self.instance,
            policy=self.scheduler.policy.name,
            durability=self.durability,
            recovered=self._recovered,
            draining=tuple(node for node, state in self.scheduler.ledger.nodes.items() if state is NodeState.DRAINING),
        )

    def timeline(self, after: int, limit: int, run: str | None) -> TimelineView:
        """Returns up to `limit` rows after that number."""
        return self.settled_actions.after(max(0, after), max(0, min(limit, TIMELINE_ROWS_MAX)), run, self.instance)

    def pool_usage(self, run: str | None) -> PoolUsageView:
        return PoolUsageView(instance=self.instance, pools=self._pool_usage.reading(run))

    def hide_run(self, run: str) -> None:
        """Hides the past of a run that has ended from a later run of that name."""
        self.settled_actions.hide_run(run)
        self.accounts.drop_run(run)
        self._pool_usage.drop_run(run)

    def story(self, id: str, run: str | None) -> Story | None:
        """None if there is no such action, or the run may not see it."""
        tracked = self.tracker.by_id.get(id)
        entry = self.scheduler.entries.get(id)
        if tracked is not None and entry is not None:
            if run is not None and tracked.action.run != run:
                return None
            return Story(
                id=id,
                run=tracked.action.run,
                name=tracked.account.name,
                status=entry.state.value,
                explanation=view_builders.explain_for(
                    self.scheduler, entry, view_builders.foreign_ids(self.scheduler, run)
                ),
                lines=live_lines(tracked),
            )
        record = self.settled_actions.find(id, run)
        if record is None:
            return None
        row = record.row
        return Story(id=id, run=row.run, name=row.name, status=row.status, explanation=record.reason,
                     lines=settled_lines(record))  # fmt: skip


class SettledActionLog:
    """The actions that settled last, over all runs, for the timeline and for stories: a ring of TIMELINE_ROWS_MAX rows.
    Finds a row by the action's id; after a reuse of the id, the latest action has it."""

    def __init__(self, rows_max: int = TIMELINE_ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._ring: list[SettledActionRecord] = []
        """Row n is at index n - 1, modulo the size."""
        self._by_id: dict[str, SettledActionRecord] = {}
        self.last_number = 0
        self._hidden_until_by_run: dict[str, int] = {}
        """By ended run: the number of the last row then. A later run of that name sees only later rows."""

    def append(self, record: SettledActionRecord) -> None:
        """The row must have the number after the last."""
        slot = self.last_number % self._rows_max
        self.last_number += 1
        if slot == len(self._ring):
            self._ring.append(record)
        else:
            oldest, self._ring[slot] = self._ring[slot], record
            if self._by_id.get(oldest.row.id) is oldest:
                del self._by_id[oldest.row.id]
        self._by_id[record.row.id] = record

    def hide_run(self, run: str) -> None:
        """Hides all current rows of a run from a later run of that name."""
        oldest = self.last_number - len(self._ring)
        self._hidden_until_by_run = {
            name: number for name, number in self._hidden_until_by_run.items() if number > oldest
        } | {run: self.last_number}

    def find(self, id: str, run: str | None) -> SettledActionRecord | None:
        """Finds an action that the run may see; None is the admin, with access to all."""
        record = self._by_id.get(id)
        if record is None or run is None:
            return record
        return record if record.row.run == run and record.row.seq > self._hidden_until_by_run.get(run, 0) else None

    def after(self, number: int, limit: int, run: str | None, instance: str) -> TimelineView:
        """Returns rows after that number, of one run or all. `last` is the number of the last row examined, which may
        belong to another run."""
        hidden = 0 if run is None else self._hidden_until_by_run.get(run, 0)
        first = max(number + 1, hidden + 1, self.last_number - len(self._ring) + 1)
        rows: list[TimelineRow] = []
        at = first - 1
        while at < self.last_number and len(rows) < limit:
            row = self._ring[at % self._rows_max].row
            at += 1
            if run is None or row.run == run:
                rows.append(row)
        forgotten = min(first, self.last_number + 1) - number - 1
        return TimelineView(
            instance=instance, rows=tuple(rows), last=min(at, self.last_number), forgotten=max(0, forgotten)
        )
