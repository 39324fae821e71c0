"""The picture: what is known of the service now and of its last hour, kept while events pass by.

Owns what the scheduler forgets: rows and stories of what has settled, the history, where the time went, and what each
sandbox has had. An observer of the orchestrator: `picture(now, event, effects)` after every event. Reads the scheduler,
changes nothing in it, and never waits. Promises that an event costs the same however much was seen, and that memory
is bounded: by what is live in the scheduler, and by the limits of the modules that it is made of.

Whoever asks says for which run; None stands for the admin, who sees everything. A run sees all of itself, and of others
that they hold units. What it may not see and what does not exist are answered alike.
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
from tangram.managers.functions.boxed import Instance
from tangram.runtime.views import TIMELINE_ROWS_MAX, Row, ServiceView, Story, Timeline, View
from tangram.server.observe import view_builders
from tangram.server.observe.accounts import Accounts
from tangram.server.observe.action_tracker import Lives
from tangram.server.observe.buckets import Buckets
from tangram.server.observe.sandbox_stats import Boxes
from tangram.server.observe.stories import Past, live_lines, past_lines
from tangram.server.observe.time_breakdown import IDLE_S

Loaded = dict[tuple[str, tuple[int, ...]], None]
"""Services with their devices, the one loaded last at the end."""


class Picture:
    def __init__(
        self,
        scheduler: Scheduler,
        *,
        clock: Clock | None = None,
        calendar: Callable[[], float] = time.time,
        version: str = "",
        durability: str = "none",
        recovered: str = "",
    ) -> None:
        self.scheduler = scheduler
        self.version = version
        self.durability = durability
        self.recovered = recovered
        self.draining = False
        """Set by whoever drains the service."""
        self.instance = secrets.token_hex(8)
        self.began_at = calendar()
        self.accounts = Accounts()
        self.buckets = Buckets(self.accounts)
        self.boxes = Boxes()
        self.lives = Lives(scheduler, self.accounts, self.buckets, self.boxes)
        self.rows = Rows()
        self.instances: Callable[[], Sequence[Instance]] = tuple
        """Of functions. Set by whoever has any."""
        self.loaded: dict[str, Loaded] = {}
        """By node, as managers told it."""
        self.events: dict[type[Message], int] = dict.fromkeys(EVENTS, 0)
        self.refusals: dict[str, int] = {}
        """By the name of the limit."""
        self._clock = clock or WallClock()
        self._calendar = calendar
        self._zero_s = self._clock.now()
        """What the clock said when the time of events was 0: the moment it was made, until the first event tells."""
        self._seen = False
        self._now = 0.0
        """Of the last event."""
        self._event: Event = Tick()
        self._sandbox_by_call: dict[str, str] = {}
        """Of calls that wait for the memory of an instance: what that will be called."""
        self._on_event: dict[type, Callable[[Any, float], None]] = {
            Started: self.lives.started,
            StartFailed: self._attempt_over,
            Finished: self._attempt_over,
            Concluded: self._concluded,
            Reserve: self._reserved,
            Release: self._released,
            Resident: self._resident,
            Evicted: self._evicted,
            PoolChanged: self._pool_changed,
            NodeChanged: self._node_changed,
        }
        self._on_effect: dict[type, Callable[[Any, float], None]] = {
            Start: self._granted,
            Settle: self._settled,
            Resize: self.lives.resized,
            Stop: self._stopped,
            Refuse: self._refused,
        }

    # ---- every event ----

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        if not self._seen:
            self._seen = True
            self._zero_s = self._clock.now() - now
        if now < self._now:
            now = self._now
        if now >= self.buckets.end_s:
            self._close(now)
        self._now = now
        self._event = event
        kind = type(event)
        self.events[kind] += 1
        lives = self.lives
        lives.next_event()
        life = lives.submitted(event.action, now) if isinstance(event, Submit) else None
        on_event = self._on_event.get(kind)
        if on_event is not None:
            on_event(event, now)
        for effect in effects:
            on_effect = self._on_effect.get(type(effect))
            if on_effect is not None:
                on_effect(effect, now)
        if life is not None:
            lives.waits(life, now)

    def _close(self, now: float) -> None:
        self.buckets.close(now, self.scheduler.ledger.pools)
        self.lives.trajectories.forget_before(now - IDLE_S)

    def _attempt_over(self, event: Finished | StartFailed, now: float) -> None:
        life = self.lives.attempt_over(event, now)
        if life is not None:
            self.lives.waits(life, now)
            if isinstance(event, StartFailed) and event.sandbox:
                self._sandbox_by_call[event.action] = event.sandbox

    def _granted(self, effect: Start, now: float) -> None:
        sandbox, run = self._sandbox_by_call.pop(effect.action.id, ""), effect.action.run
        if sandbox in self.scheduler.places.by_sandbox:
            self.boxes.open(sandbox, run, self.accounts.run(run), effect.grant.node, now)
            self.lives.touch_memory(effect.grant.node, now)
        self.lives.granted(effect.action, effect.grant, self._event, now)

    def _settled(self, effect: Settle, now: float) -> None:
        self._sandbox_by_call.pop(effect.outcome.action, None)
        past = self.lives.settled(effect.outcome, self.rows.last + 1, now)
        if past is not None:
            self.rows.keep(past)

    def _concluded(self, event: Concluded, now: float) -> None:
        self.rows.keep(self.lives.concluded(event.action, event.outcome, self.rows.last + 1, now))

    def _stopped(self, effect: Stop, now: float) -> None:
        self.lives.stopped(effect.action, effect.reason, now)

    def _refused(self, effect: Refuse, now: float) -> None:
        self.refusals[effect.limit] = self.refusals.get(effect.limit, 0) + 1
        if isinstance(self._event, Submit):
            self.accounts.run(self._event.action.run).count("refused")

    # ---- sandboxes, pools, nodes, services ----

    def _reserved(self, event: Reserve, now: float) -> None:
        if event.sandbox in self.scheduler.places.by_sandbox and event.sandbox not in self.boxes.by_name:
            self.boxes.open(event.sandbox, event.run, self.accounts.run(event.run), event.node, now)
            self.lives.touch_memory(event.node, now)

    def _released(self, event: Release, now: float) -> None:
        box = self.boxes.by_name.get(event.sandbox)
        if box is not None:
            self.boxes.drop_if_gone(event.sandbox, self.scheduler.places)
            self.lives.touch_memory(box.node, now)

    def _resident(self, event: Resident, now: float) -> None:
        if event.node in self.scheduler.ledger.nodes:
            loaded = self.loaded.setdefault(event.node, {})
            loaded.pop((event.service, event.devices), None)
            loaded[event.service, event.devices] = None

    def _evicted(self, event: Evicted, now: float) -> None:
        self.loaded.get(event.node, {}).pop((event.service, event.devices), None)

    def _pool_changed(self, event: PoolChanged, now: float) -> None:
        pool = self.scheduler.ledger.pools.get(event.pool.name)
        if pool is not None:
            self.buckets.levels.touch(pool, now)

    def _node_changed(self, event: NodeChanged, now: float) -> None:
        if event.state is NodeState.DOWN:
            self.loaded.pop(event.node, None)
            self.boxes.drop_all_gone(self.scheduler.places)
            for life in self.lives.node_down(event.node, now):
                self.lives.waits(life, now)

    # ---- what is asked ----

    def now(self) -> float:
        """Seconds since the service began, as in its trace."""
        return max(self._now, self._clock.now() - self._zero_s)

    def view(self, run: str | None) -> View:
        now = self.now()
        if now >= self.buckets.end_s:
            self._close(now)
        self.buckets.fold()
        return view_builders.view(self, run, now, self._calendar())

    def service(self) -> ServiceView:
        return ServiceView(
            version=self.version,
            state="draining" if self.draining else "up",
            began_at=self.began_at,
            instance=self.instance,
            policy=self.scheduler.policy.name,
            durability=self.durability,
            recovered=self.recovered,
            draining=tuple(node for node, state in self.scheduler.ledger.nodes.items() if state is NodeState.DRAINING),
        )

    def timeline(self, after: int, limit: int, run: str | None) -> Timeline:
        """Rows after that number, at most so many."""
        return self.rows.after(max(0, after), max(0, min(limit, TIMELINE_ROWS_MAX)), run, self.instance)

    def hide(self, run: str) -> None:
        """The run has ended: whoever comes under its name sees nothing of what it did."""
        self.rows.hide(run)
        self.accounts.drop(run)

    def story(self, id: str, run: str | None) -> Story | None:
        """None: there is no such action, or not one that this run may see."""
        life = self.lives.by_id.get(id)
        entry = self.scheduler.entries.get(id)
        if life is not None and entry is not None:
            if run is not None and life.action.run != run:
                return None
            return Story(
                id=id,
                run=life.action.run,
                name=life.account.name,
                status=entry.state.value,
                explanation=view_builders.explained(self.scheduler, entry, view_builders.foreign(self.scheduler, run)),
                lines=live_lines(life),
            )
        past = self.rows.find(id, run)
        if past is None:
            return None
        row = past.row
        return Story(id=id, run=row.run, name=row.name, status=row.status, explanation=past.reason,
                     lines=past_lines(past))  # fmt: skip


class Rows:
    """The actions that settled last, of all runs, for the timeline and for stories: a ring of TIMELINE_ROWS_MAX rows.

    Finds a row by the action's id. An id that was used again stands for the latest action with that id.
    """

    def __init__(self, rows_max: int = TIMELINE_ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._ring: list[Past] = []
        """The row with the number n is at n - 1, modulo its size."""
        self._by_id: dict[str, Past] = {}
        self.last = 0
        """The number of the last row."""
        self._hidden: dict[str, int] = {}
        """Of runs that have ended, the number of the last row then: who comes under that name later sees none of
        them."""

    def keep(self, past: Past) -> None:
        """Its row has the number after the last."""
        place = self.last % self._rows_max
        self.last += 1
        if place == len(self._ring):
            self._ring.append(past)
        else:
            oldest, self._ring[place] = self._ring[place], past
            if self._by_id.get(oldest.row.id) is oldest:
                del self._by_id[oldest.row.id]
        self._by_id[past.row.id] = past

    def hide(self, run: str) -> None:
        """What it has had is no longer shown under its name."""
        oldest = self.last - len(self._ring)
        self._hidden = {name: number for name, number in self._hidden.items() if number > oldest} | {run: self.last}

    def find(self, id: str, run: str | None) -> Past | None:
        """As this run sees it; None: the admin, who sees all."""
        past = self._by_id.get(id)
        if past is None or run is None:
            return past
        return past if past.row.run == run and past.row.seq > self._hidden.get(run, 0) else None

    def after(self, number: int, limit: int, run: str | None, instance: str) -> Timeline:
        """Those after that number, of one run or of all. `last` is where the looking ended: of a run, many numbers may
        belong to others."""
        hidden = 0 if run is None else self._hidden.get(run, 0)
        first = max(number + 1, hidden + 1, self.last - len(self._ring) + 1)
        found: list[Row] = []
        at = first - 1
        while at < self.last and len(found) < limit:
            row = self._ring[at % self._rows_max].row
            at += 1
            if run is None or row.run == run:
                found.append(row)
        forgotten = min(first, self.last + 1) - number - 1
        return Timeline(instance=instance, rows=tuple(found), last=min(at, self.last), forgotten=max(0, forgotten))
