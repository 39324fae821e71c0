"""The scheduler: `handle(event, now) -> effects`.

Owns the life of every action from Submit to Settle, and is the only writer of the ledger. Never reads a clock, never
draws a random number, never waits: the live service, the simulator and the tests drive this same object. Promises that
every accepted action settles exactly once, that a plan which oversells a pool raises InvariantError with the action's
story, and that the cost of an event grows neither with the number of finished actions nor, beyond a logarithm, with
the number of waiting ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from tangram.core.action import Action, Outcome, State, Status, Usage, checked_transition
from tangram.core.demand import CORE, CPU, GPU, MEMORY
from tangram.core.explain import explain, possible
from tangram.core.ledger import Holding, Ledger, PoolState
from tangram.core.messages import (
    Cancel,
    Effect,
    Event,
    Evicted,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Release,
    Reserve,
    Resident,
    Resize,
    Resized,
    Restore,
    RunChanged,
    Settle,
    Share,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    WakeAt,
)
from tangram.core.policies.base import Adjust, Begin, Hold, Preload, SchedulingPolicy
from tangram.core.profile import Knowledge
from tangram.core.queue import LEARNED, Entry, Lane, Need, Place, Run, Waiters, lane_key
from tangram.core.residents import Residents
from tangram.core.snapshot import Fit, Snapshot
from tangram.core.timers import Timers
from tangram.core.trace import describe, mentions
from tangram.errors import InvariantError

STORY_EVENTS = 4096
"""The last events kept in memory for stories; a trace on disk keeps all."""

STARVED_SHARE = 0.1
"""A timeout is our failure when the action lacked reserved CPU for more than this share of its execution."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """A name for every limit of the scheduler."""

    queue_max: int = 2_000_000
    """Actions that wait, over all runs."""
    run_queue_max: int = 2_000_000
    """Actions of one run that wait."""
    sandboxes_max: int = 1_000_000
    """Sandboxes that hold or wait for memory."""
    ageing_s: float = 600.0
    """Past this wait no later action of its run overtakes an action."""
    attempts_max: int = 3
    """Starts of one action before a failing start is given up."""
    stranded_s: float = 300.0
    """How long an action waits for a pool that can no longer hold it, before it is lost."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, at no cost beyond pools and runs."""

    now: float
    waiting: int
    holding: int
    sandboxes: int
    settled: dict[str, int]
    late_events: int
    """Events about actions that had settled before, such as the last words of a lost node."""
    pools: dict[str, dict[str, int]]
    runs: dict[str, dict[str, float]]


class Scheduler:
    """Pure: events in, effects out."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        pools: tuple[Pool, ...] = (),
        *,
        limits: Limits | None = None,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits or Limits()
        self.knowledge = Knowledge() if knowledge is None else knowledge
        self.ledger = Ledger()
        self.residents = Residents()
        self.runs: dict[str, Run] = {}
        self.active: dict[str, Run] = {}
        """Runs with an open lane."""
        self.entries: dict[str, Entry] = {}
        self.holding: dict[str, Entry] = {}
        """Actions that hold units."""
        self.places: dict[str, Place] = {}
        self.elastic_by_pool: dict[str, dict[str, Entry]] = {}
        self._pool_waiters: dict[str, Waiters] = {}
        self._kind_waiters: dict[str, Waiters] = {}
        self._timers = Timers()
        self._now = 0.0
        self._sequence = 0
        self._waiting = 0
        self._settled: dict[Status, int] = dict.fromkeys(Status, 0)
        self._late = 0
        self._events: deque[tuple[float, Event, list[Effect]]] = deque(maxlen=STORY_EVENTS)
        self._effects: list[Effect] = []
        self._held: list[Holding] = []
        """Units kept aside for candidates of the present plan, with the actions and places they are for."""
        self._aside: dict[str, Entry] = {}
        self._placed: list[Place] = []
        self._snapshot = Snapshot(self)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._on_submit,
            Cancel: self._on_cancel,
            Started: self._on_started,
            StartFailed: self._on_start_failed,
            Finished: self._on_finished,
            Resized: self._on_resized,
            Reserve: self._on_reserve,
            Release: self._on_release,
            Resident: self._on_resident,
            Evicted: self._on_evicted,
            PoolChanged: self._on_pool_changed,
            NodeChanged: self._on_node_changed,
            RunChanged: self._on_run_changed,
            Tick: self._on_tick,
        }
        for pool in pools:
            self.ledger.change_pool(pool, 0.0, [])

    # ---- the door ----

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event, return what is to be done. A clock that steps back is read as standing still."""
        if now < self._now:
            now = self._now
        self._now = self._snapshot.now = now
        effects: list[Effect] = []
        self._effects = effects
        self._events.append((now, event, effects))
        self._handlers[type(event)](event)
        if self.active or self._snapshot.changed:
            self._round()
        wake_at = self._timers.announce()
        if wake_at is not None:
            effects.append(WakeAt(at=wake_at))
        return effects

    def _round(self) -> None:
        """Ask the policy, and write each decision before asking for the next."""
        for decision in self.policy.plan(self._snapshot):
            if type(decision) is Begin:
                if self._held:
                    self._let_go()
                self._begin(decision)
            elif type(decision) is Adjust:
                self._adjust(decision)
            elif type(decision) is Hold:
                self._hold(decision)
            elif type(decision) is Preload:
                self._preload(decision)
        if self._held:
            self._let_go()
        if self._aside:
            self._line_up()
        self._snapshot.changed.clear()

    def _hold(self, decision: Hold) -> None:
        """Keep the minimum of a candidate aside until the plan has looked at all of them."""
        entry, node = decision.entry, decision.node
        self._expect(entry, State.QUEUED)
        held: list[Holding] = []
        place = entry.place
        if place is not None and not place.node and node:
            if place.memory:
                held.append(self.ledger.hold(self.ledger.kinds[MEMORY][node], place.memory, place.run.usage))
            place.node = node
            self._placed.append(place)
        for kind, minimum in entry.needs:
            units = minimum if minimum != LEARNED else self.policy.reserve(entry, self._snapshot)
            held.append(self.ledger.hold(self._snapshot.pool(kind, node), units, entry.run.usage))
        self._held.extend(held)
        self._dequeue(entry)
        self._aside[entry.id] = entry

    def _let_go(self) -> None:
        for holding in self._held:
            self.ledger.give_back(holding, refund=True)
        for place in self._placed:
            place.node = ""
        self._held, self._placed = [], []

    def _line_up(self) -> None:
        """What was held and not begun goes back to its turn, and is tried again when something changes."""
        left = list(self._aside.values())
        self._aside = {}
        for entry in reversed(left):
            self._enqueue(entry, again=True)
            lane = entry.lane
            if lane is not None and not lane.blocked_on:
                self._snapshot.pass_over(lane)

    # ---- submission ----

    def _on_submit(self, event: Submit) -> None:
        action = event.action
        run = self.runs.get(action.run) or self._new_run(action.run)
        place = self.places.get(action.sandbox) if action.sandbox else None
        refusal = self._refusal(action, run, place)
        if refusal is not None:
            self._effects.append(Refuse(action=action.id, limit=refusal[0], reason=refusal[1]))
            return
        needs: tuple[Need, ...] = tuple(
            (kind, amounts.min if amounts.declared else LEARNED) for kind, amounts in action.demand.pools.items()
        )
        self._sequence += 1
        entry = Entry(action, run, place, needs, self._sequence, self._now)
        if not possible(self.ledger, entry):
            reason = explain(self, entry)
            self._effects.append(Refuse(action=action.id, limit="capacity", reason=reason))
            return
        self.entries[action.id] = entry
        if place is not None:
            place.actions[action.id] = entry
        if action.deadline_s is not None:
            self._timers.set(self._now + action.deadline_s, self._deadline_passed, entry)
        entry.key = self.policy.order(entry, self._snapshot)
        self._enqueue(entry)

    def _refusal(self, action: Action, run: Run, place: Place | None) -> tuple[str, str] | None:
        """The named limit that keeps the action out, with the sentence to say."""
        limits = self.limits
        if action.id in self.entries:
            return "id", f"an action with the id {action.id} is already live; ids must be unique"
        if self._waiting >= limits.queue_max:
            return "queue_max", f"the queue holds {limits.queue_max} actions; wait until some have settled"
        if run.waiting >= limits.run_queue_max:
            return (
                "run_queue_max",
                f"run {run.name} has {limits.run_queue_max} waiting actions; wait for some to settle",
            )
        if action.sandbox and (place is None or place.released):
            return "sandbox", f"sandbox {action.sandbox} is not reserved; send Reserve first"
        return None

    def _new_run(self, name: str) -> Run:
        run = self.runs[name] = Run(name)
        return run

    def _enqueue(self, entry: Entry, *, again: bool = False) -> None:
        run, node = entry.run, entry.node
        key = lane_key(entry.needs, entry.elastic, node)
        lane = run.lanes.get(key)
        if lane is None:
            kinds = tuple(kind for kind, _ in entry.needs)
            lane = run.lanes[key] = Lane(run, kinds, entry.elastic, node)
        if again:
            lane.push_again(entry)
        else:
            lane.push(entry)
        run.waiting += 1
        self._waiting += 1
        if not lane.blocked_on:
            self._open(lane)
        if entry.elastic == CPU:
            for pool in self.ledger.kinds[CPU].values():
                if node in ("", pool.node):
                    self._snapshot.changed[pool.name] = pool

    def _dequeue(self, entry: Entry) -> None:
        lane = entry.lane
        assert lane is not None, entry.id
        lane.leave(entry)
        run = entry.run
        run.waiting -= 1
        self._waiting -= 1
        if not lane.waiting:
            if run.open.pop(id(lane), None) is not None and not run.open:
                del self.active[run.name]
            self._unblock(lane)
        if entry.closed or entry.aged:
            self._reopen(entry)

    # ---- lanes that wait for a change ----

    def pool_waiters(self, pool: PoolState) -> Waiters:
        waiters = self._pool_waiters.get(pool.name)
        if waiters is None:
            waiters = self._pool_waiters[pool.name] = Waiters()
        return waiters

    def kind_waiters(self, kind: str) -> Waiters:
        """Those that wait for any pool of a kind; a blocker here closes it only to actions without a place."""
        waiters = self._kind_waiters.get(kind)
        if waiters is None:
            waiters = self._kind_waiters[kind] = Waiters()
        return waiters

    def wake(self, pool: PoolState) -> None:
        """Something changed in a pool: the lanes that lacked it are open again."""
        if pool.kind == CPU:
            self._snapshot.changed[pool.name] = pool
        for waiters in (self._pool_waiters.get(pool.name), self._kind_waiters.get(pool.kind)):
            if waiters is not None and waiters.lanes:
                self._open_all(waiters)

    def _open_all(self, waiters: Waiters) -> None:
        for lane in list(waiters.lanes.values()):
            self._unblock(lane)
            self._open(lane)

    def _unblock(self, lane: Lane) -> None:
        for waiters in lane.blocked_on:
            waiters.lanes.pop(id(lane), None)
        lane.blocked_on = ()

    def _open(self, lane: Lane) -> None:
        if lane.waiting:
            run = lane.run
            run.open[id(lane)] = lane
            self.active[run.name] = run

    def close(self, entry: Entry, fit: Fit, aged: bool) -> None:
        """The first action that cannot start closes what it lacks to those behind it, until it starts or settles."""
        for waiters in (*fit.close, *(fit.target if aged else ())):
            blocker = waiters.blocker
            if blocker is None or (aged and (not blocker.aged or entry.seq < blocker.seq)):
                if blocker is not None:
                    blocker.closed.remove(waiters)
                waiters.blocker = entry
                entry.closed.append(waiters)
        if aged:
            entry.aged = True
            for kind in fit.short:
                blocker = entry.run.blockers.get(kind)
                if blocker is None or entry.seq < blocker.seq:
                    entry.run.blockers[kind] = entry

    def _reopen(self, entry: Entry) -> None:
        for waiters in entry.closed:
            waiters.blocker = None
            self._open_all(waiters)
        entry.closed = []
        blockers = entry.run.blockers
        for kind in [kind for kind, blocker in blockers.items() if blocker is entry]:
            del blockers[kind]
            self._open_all(self.kind_waiters(kind))
        entry.aged = False

    def wake_when_refilled(self, pool: PoolState, units: int) -> None:
        at = pool.available_at(units, self._now)
        if at > self._now and pool.pool.window is not None and units <= pool.total:
            self._timers.set_pool(at, self._refilled, pool.name)

    def _refilled(self, pool_name: str) -> None:
        pool = self.ledger.pools.get(pool_name)
        if pool is not None:
            self.ledger.refill(pool, self._now)
            self.wake(pool)

    # ---- decisions ----

    def _begin(self, decision: Begin) -> None:
        entry = decision.entry
        if entry.state is not State.QUEUED:
            raise self._bug(f"plan starts {entry.id}, which is {entry.state.value}", entry)
        node = decision.node
        if self._aside.pop(entry.id, None) is None:
            self._dequeue(entry)
        if entry.place is not None and not entry.place.node and node:
            self._settle_down(entry.place, node, entry)
        shares = self._take(entry, decision)
        self._launch(entry, node, shares, entry.id if decision.riders else "")
        for rider in decision.riders:
            self._ride(rider, entry, node)

    def _settle_down(self, place: Place, node: str, entry: Entry) -> None:
        """The first action of a sandbox has chosen its node: memory for its whole life is held there from now on."""
        place.node = node
        if place.memory:
            pool = self.ledger.kinds[MEMORY][node]
            try:
                place.reserved = self.ledger.hold(pool, place.memory, place.run.usage)
            except InvariantError as error:
                raise self._bug(str(error), entry) from error
        for other in list(place.actions.values()):
            if other.lane is None:
                continue
            self._dequeue(other)
            self._enqueue(other, again=True)

    def _take(self, entry: Entry, decision: Begin) -> tuple[Share, ...]:
        """Hold every pool of the demand, or raise: a plan that oversells is a bug of the policy."""
        node, action = decision.node, entry.action
        key_pool = entry.elastic or (CPU if CPU in action.demand.pools else "")
        holdings: list[Holding] = []
        shares: list[Share] = []
        for kind, amounts in action.demand.pools.items():
            if kind == key_pool and decision.units:
                units = decision.units
            else:
                units = amounts.min if amounts.declared else self.policy.reserve(entry, self._snapshot)
            if amounts.declared and not amounts.admits(units):
                raise self._bug(
                    f"plan gives {entry.id} {units} units of {kind}, which its demand does not admit", entry
                )
            pool = self._snapshot.pool(kind, node)
            try:
                holding = self.ledger.hold(pool, units, entry.run.usage, self._preferred(action, kind, node))
            except InvariantError as error:
                raise self._bug(str(error), entry) from error
            holdings.append(holding)
            limit = holding.units
            if kind == CPU:
                limit = max(units, decision.limit)
                entry.reserved, entry.limit = units, limit
                if entry.elastic == CPU:
                    self.elastic_by_pool.setdefault(pool.name, {})[entry.id] = entry
                    self._snapshot.changed[pool.name] = pool
            shares.append(Share(pool.name, holding.units, limit, holding.cells))
            if kind == key_pool:
                entry.width = decision.width or holding.units
        entry.holdings = tuple(holdings)
        if entry.elastic != CPU:
            entry.limit = max(entry.limit, entry.width)
        return tuple(shares)

    def _preferred(self, action: Action, kind: str, node: str) -> list[tuple[int, int]]:
        if kind != GPU or not action.service:
            return []
        return self.residents.chunks(action.service, node)

    def _launch(self, entry: Entry, node: str, shares: tuple[Share, ...], batch: str) -> None:
        entry.attempts += 1
        entry.granted_at = entry.progress_at = self._now
        entry.done_s = entry.unit_s = 0.0
        entry.grant = Grant(entry.id, node, shares, entry.width, entry.attempts, batch)
        self._move(entry, State.STARTING)
        self.holding[entry.id] = entry
        self._effects.append(Start(action=entry.action, grant=entry.grant))

    def _ride(self, rider: Entry, leader: Entry, node: str) -> None:
        """A waiting call of the same service shares the leader's device chunk; the last one out frees it."""
        if rider.state is not State.QUEUED or rider.action.service != leader.action.service:
            raise self._bug(f"plan lets {rider.id} ride with {leader.id}, which calls another service", rider)
        holdings, shares = [], []
        assert leader.grant is not None
        for kind, amounts in rider.action.demand.pools.items():
            pool = self._snapshot.pool(kind, node)
            if kind == GPU:
                holding = next(held for held in leader.holdings if held.pool is pool)
                holding.riders += 1
                share = next(share for share in leader.grant.shares if share.pool == pool.name)
            else:
                holding = self.ledger.hold(pool, amounts.min, rider.run.usage)
                share = Share(pool.name, holding.units, holding.units, holding.cells)
            holdings.append(holding)
            shares.append(share)
        self._dequeue(rider)
        rider.holdings = tuple(holdings)
        rider.width = rider.limit = leader.width
        self._launch(rider, node, tuple(shares), leader.id)

    def _adjust(self, decision: Adjust) -> None:
        entry = decision.entry
        if entry.state not in (State.STARTING, State.RUNNING) or entry.elastic != CPU:
            raise self._bug(f"plan resizes {entry.id}, which is {entry.state.value}", entry)
        amounts = entry.action.demand.pools[CPU]
        if decision.reserved < amounts.min or decision.limit < decision.reserved:
            raise self._bug(f"plan resizes {entry.id} below its minimum of {amounts.min}", entry)
        holding = next(held for held in entry.holdings if held.pool.kind == CPU)
        entry.account(self._now)
        try:
            self.ledger.resize(holding, decision.reserved)
        except InvariantError as error:
            raise self._bug(str(error), entry) from error
        entry.reserved, entry.limit = decision.reserved, decision.limit
        entry.speed = self.speed(entry)
        if holding.pool.free > 0:
            self.wake(holding.pool)
        self._effects.append(
            Resize(action=entry.id, pool=holding.pool.name, reserved=decision.reserved, limit=decision.limit)
        )

    def _preload(self, decision: Preload) -> None:
        pool = self._snapshot.pool(GPU, decision.node)
        chunk = pool.peek_devices(decision.units, self.residents.chunks(decision.service, decision.node))
        self._effects.append(Restore(service=decision.service, node=decision.node, devices=chunk))

    def speed(self, entry: Entry) -> float:
        """Believed speed of an elastic action at its present limit, in one-unit seconds per second."""
        units = min(entry.limit, entry.width) / (CORE if entry.elastic == CPU else 1)
        speedup = entry.action.demand.speedup
        if speedup is not None:
            return speedup.at(units)
        return float(units ** self._snapshot.estimate(entry).exponent) if units > 1.0 else units

    # ---- the life of an action ----

    def _move(self, entry: Entry, state: State) -> None:
        try:
            entry.state = checked_transition(entry.state, state, entry.id)
        except InvariantError as error:
            raise self._bug(str(error), entry) from error

    def _on_started(self, event: Started) -> None:
        entry = self._live(event.action)
        if entry is None or entry.state is State.STOPPING:
            return
        self._move(entry, State.RUNNING)
        entry.started_at = entry.progress_at = self._now
        if entry.elastic:
            entry.speed = self.speed(entry)
        if entry.action.timeout_s is not None:
            self._timers.set(self._now + entry.action.timeout_s, self._timeout_passed, entry, entry.attempts)

    def _on_start_failed(self, event: StartFailed) -> None:
        entry = self._live(event.action)
        if entry is None:
            return
        if entry.state is State.STOPPING:
            self._end(entry, *self._stop_reason(entry), refund=True)
        elif event.retry and entry.attempts < self.limits.attempts_max:
            self._expect(entry, State.STARTING)
            self._requeue(entry, refund=True)
        else:
            self._expect(entry, State.STARTING)
            reason = f"start failed {entry.attempts} times, last: {event.reason}"
            self._end(entry, Status.LOST, reason, refund=True)

    def _on_finished(self, event: Finished) -> None:
        entry = self._live(event.action)
        if entry is None:
            return
        if entry.state is State.STOPPING:
            status, reason = self._stop_reason(entry)
            if status is Status.TIMED_OUT and self._starved(entry, event.usage):
                status, reason = Status.LOST, f"starved: {event.usage.starved_s:.1f} s without its reserved CPU"
            self._end(entry, status, reason, event.usage)
        elif event.lost:
            self._lose(entry, event.lost, event.usage)
        else:
            self._expect(entry, State.RUNNING)
            self._learn(entry, event.usage)
            self._end(entry, Status.SUCCEEDED, "", event.usage)

    def _stop_reason(self, entry: Entry) -> tuple[Status, str]:
        assert entry.stop is not None, entry.id
        return entry.stop

    def _starved(self, entry: Entry, usage: Usage) -> bool:
        started = entry.started_at if entry.started_at is not None else self._now
        return usage.starved_s > STARVED_SHARE * max(self._now - started, 1e-9)

    def _expect(self, entry: Entry, state: State) -> None:
        if entry.state is not state:
            raise self._bug(f"{entry.id} is {entry.state.value}, this event needs it {state.value}", entry)

    def _learn(self, entry: Entry, usage: Usage) -> None:
        assert entry.started_at is not None
        elapsed = self._now - entry.started_at
        execution_s = max(0.0, elapsed - usage.overhead_s - usage.throttled_s)
        units = 1.0
        if entry.elastic:
            entry.account(self._now)
            unit = CORE if entry.elastic == CPU else 1
            units = (entry.unit_s / elapsed if elapsed > 0.0 else min(entry.limit, entry.width)) / unit
        has_cpu = CPU in entry.action.demand.pools
        cpu_s = usage.cpu_s if has_cpu else None
        self.knowledge.observe(entry.action, execution_s=execution_s, units=units, cpu_s=cpu_s)

    def _lose(self, entry: Entry, reason: str, usage: Usage = Usage()) -> None:
        """Our side failed it. It runs again only if the caller said that it may."""
        again = entry.action.idempotent and entry.attempts < self.limits.attempts_max
        if again and (entry.place is None or entry.place.id in self.places):
            self._requeue(entry)
        else:
            self._end(entry, Status.LOST, reason, usage)

    def _requeue(self, entry: Entry, *, refund: bool = False) -> None:
        self._give_back(entry, refund=refund)
        self._move(entry, State.QUEUED)
        entry.started_at = None
        entry.grant = None
        entry.width = entry.reserved = entry.limit = 0
        self._enqueue(entry, again=True)

    def _end(
        self, entry: Entry, status: Status, reason: str, usage: Usage | None = None, *, refund: bool = False
    ) -> None:
        """Give everything back, settle, forget."""
        usage = usage or Usage()
        if entry.state is State.QUEUED:
            self._dequeue(entry)
        else:
            self._give_back(entry, refund=refund, spent=usage.spent)
        state = {Status.SUCCEEDED: State.SUCCEEDED, Status.CANCELLED: State.CANCELLED}.get(status, State.FAILED)
        self._move(entry, state)
        self._forget(entry)
        self._settled[status] += 1
        self._effects.append(Settle(outcome=self._outcome(entry, status, reason, usage)))

    def _outcome(self, entry: Entry, status: Status, reason: str, usage: Usage) -> Outcome:
        total = self._now - entry.submitted_at
        execution_s = overhead_s = 0.0
        if entry.attempts:
            started = entry.started_at if entry.started_at is not None else self._now
            overhead_s = started - entry.granted_at + min(usage.overhead_s, self._now - started)
            execution_s = max(0.0, self._now - started - usage.overhead_s)
        return Outcome(
            action=entry.id,
            status=status,
            reason=reason,
            waiting_s=max(0.0, total - execution_s - overhead_s),
            execution_s=execution_s,
            overhead_s=overhead_s,
            usage=usage,
            attempts=entry.attempts,
        )

    def _give_back(self, entry: Entry, *, refund: bool = False, spent: dict[str, int] | None = None) -> None:
        for holding in entry.holdings:
            pool = holding.pool
            freed = False
            if spent and pool.kind in spent:
                freed = self.ledger.correct(holding, spent[pool.kind])
            if self.ledger.give_back(holding, refund=refund) or freed:
                self.wake(pool)
            if entry.elastic == CPU:
                self.elastic_by_pool.get(pool.name, {}).pop(entry.id, None)
        entry.holdings = ()
        self.holding.pop(entry.id, None)

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.id]
        self._timers.drop(entry)
        place = entry.place
        if place is not None:
            del place.actions[entry.id]
            place.finished += 1
            if place.released and not place.actions:
                self._vacate(place)

    def _live(self, action_id: str) -> Entry | None:
        entry = self.entries.get(action_id)
        if entry is None:
            self._late += 1
        return entry

    # ---- stopping ----

    def _on_cancel(self, event: Cancel) -> None:
        entry = self._live(event.action)
        if entry is not None:
            self._stop(entry, Status.CANCELLED, "cancelled by the caller")

    def _stop(self, entry: Entry, status: Status, reason: str) -> None:
        """Cancelling is a request: what is stopping still holds its units until Finished."""
        if entry.state is State.QUEUED:
            self._end(entry, status, reason)
        elif entry.state is not State.STOPPING:
            self._move(entry, State.STOPPING)
            entry.stop = (status, reason)
            self._effects.append(Stop(action=entry.id, reason=reason))

    def _deadline_passed(self, entry: Entry) -> None:
        waited = "while it waited" if entry.state is State.QUEUED else "while it ran"
        self._stop(entry, Status.TIMED_OUT, f"deadline of {entry.action.deadline_s} s passed {waited}")

    def _timeout_passed(self, entry: Entry, attempt: int) -> None:
        if entry.attempts == attempt and entry.state is State.RUNNING:
            self._stop(entry, Status.TIMED_OUT, f"timeout of {entry.action.timeout_s} s passed")

    def _on_tick(self, event: Tick) -> None:
        self._timers.fire(self._now)

    def _on_resized(self, event: Resized) -> None:
        self._live(event.action)

    # ---- sandboxes ----

    def _on_reserve(self, event: Reserve) -> None:
        run = self.runs.get(event.run) or self._new_run(event.run)
        limit, reason = "", ""
        if event.sandbox in self.places:
            limit, reason = "id", f"sandbox {event.sandbox} is already reserved"
        elif len(self.places) >= self.limits.sandboxes_max:
            limit, reason = "sandboxes_max", f"{self.limits.sandboxes_max} sandboxes are open; release some first"
        elif event.memory:
            totals = [pool.total for pool in self.ledger.kinds.get(MEMORY, {}).values()]
            if event.memory > max(totals, default=0):
                limit = "capacity"
                reason = f"sandbox {event.sandbox} asks for {event.memory} MiB; the largest node has {max(totals, default=0)}"
        place = Place(event.sandbox, event.memory, run)
        if event.node and not limit:
            limit, reason = self._adopt(place, event.node)
        if limit:
            self._effects.append(Refuse(action=event.sandbox, limit=limit, reason=reason))
            return
        self.places[event.sandbox] = place

    def _adopt(self, place: Place, node: str) -> tuple[str, str]:
        """A sandbox that already stands on a node holds its memory there at once."""
        if self.ledger.nodes.get(node) is not NodeState.UP:
            return "node", f"node {node} is not up"
        pool = self.ledger.kinds.get(MEMORY, {}).get(node)
        if place.memory and (pool is None or not pool.fits(place.memory)):
            return "capacity", f"node {node} has not {place.memory} MiB of memory free"
        place.node = node
        if place.memory and pool is not None:
            place.reserved = self.ledger.hold(pool, place.memory, place.run.usage)
        return "", ""

    def _on_release(self, event: Release) -> None:
        place = self.places.get(event.sandbox)
        if place is None:
            self._late += 1
            return
        place.released = True
        for entry in list(place.actions.values()):
            self._stop(entry, Status.CANCELLED, f"its sandbox {place.id} was released")
        if not place.actions and place.id in self.places:
            self._vacate(place)

    def _vacate(self, place: Place) -> None:
        del self.places[place.id]
        if place.reserved is not None:
            if self.ledger.give_back(place.reserved):
                self.wake(place.reserved.pool)
            place.reserved = None

    # ---- pools, nodes, runs, residents ----

    def _on_pool_changed(self, event: PoolChanged) -> None:
        name = event.pool.name
        holdings = [held for held in self._all_holdings() if held.pool.name == name]
        pool = self.ledger.change_pool(event.pool, self._now, holdings)
        self.wake(pool)
        self._find_stranded()

    def _all_holdings(self) -> list[Holding]:
        held = [holding for entry in self.holding.values() for holding in entry.holdings]
        held.extend(place.reserved for place in self.places.values() if place.reserved is not None)
        return list({id(holding): holding for holding in held}.values())

    def _on_node_changed(self, event: NodeChanged) -> None:
        if event.node not in self.ledger.nodes:
            self.ledger.nodes[event.node] = event.state
            return
        self.ledger.nodes[event.node] = event.state
        if event.state is NodeState.DOWN:
            self._node_down(event.node)
        for pool in list(self.ledger.pools.values()):
            if pool.node == event.node:
                self.wake(pool)
        self._find_stranded()

    def _node_down(self, node: str) -> None:
        """Everything on the node is gone: its units, its sandboxes, its loaded services."""
        self.ledger.drop_node(node)
        self.residents.drop_node(node)
        dead = [place for place in self.places.values() if place.node == node]
        for place in dead:
            del self.places[place.id]
        for place in dead:
            for entry in list(place.actions.values()):
                self._lose(entry, f"node {node} went down with sandbox {place.id}")
            if place.reserved is not None:
                self.ledger.give_back(place.reserved)
                place.reserved = None
        for entry in list(self.holding.values()):
            if entry.grant is not None and entry.grant.node == node:
                self._lose_with_node(entry, node)

    def _lose_with_node(self, entry: Entry, node: str) -> None:
        if entry.state is State.STOPPING:
            self._end(entry, *self._stop_reason(entry))
        else:
            self._lose(entry, f"node {node} went down")

    def _find_stranded(self) -> None:
        """Actions that no pool can hold any more wait `stranded_s` for one to come back, then are lost."""
        for entry in self.entries.values():
            if entry.state is State.QUEUED and not possible(self.ledger, entry):
                self._timers.set(self._now + self.limits.stranded_s, self._still_stranded, entry)

    def _still_stranded(self, entry: Entry) -> None:
        if entry.state is State.QUEUED and not possible(self.ledger, entry):
            self._end(entry, Status.LOST, f"stranded: {explain(self, entry)}")

    def _on_run_changed(self, event: RunChanged) -> None:
        run = self.runs.get(event.run) or self._new_run(event.run)
        self.ledger.reweigh(run.usage, event.weight)

    def _on_resident(self, event: Resident) -> None:
        self.residents.add(event.service, event.node, event.devices)

    def _on_evicted(self, event: Evicted) -> None:
        self.residents.remove(event.service, event.node, event.devices)

    # ---- seeing ----

    def explain(self, action_id: str) -> str:
        """One sentence on why an action waits, or what it is doing."""
        entry = self.entries.get(action_id)
        return explain(self, entry) if entry is not None else f"{action_id} is not live: it settled or never came"

    def story(self, action_id: str) -> list[str]:
        """What happened to an action, from the last events in memory."""
        lines = []
        for now, event, effects in self._events:
            lines.extend(describe(now, message) for message in (event, *effects) if mentions(message, action_id))
        return lines

    def statistics(self) -> Statistics:
        return Statistics(
            now=self._now,
            waiting=self._waiting,
            holding=len(self.holding),
            sandboxes=len(self.places),
            settled={status.value: count for status, count in self._settled.items()},
            late_events=self._late,
            pools={pool.name: pool.statistics() for pool in self.ledger.pools.values()},
            runs={
                run.name: {"waiting": run.waiting, "share": run.usage.share, "weight": run.usage.weight}
                for run in self.runs.values()
            },
        )

    def check(self) -> None:
        """Recompute every invariant from scratch. Raises InvariantError on the first that does not hold."""
        self.ledger.check(self._all_holdings())
        waiting = 0
        for run in self.runs.values():
            for lane in run.lanes.values():
                queued = [item[3] for item in lane.heap if item[3].lane is lane]
                if len(queued) != lane.waiting or {id(e) for e in queued} != {
                    id(e) for e in lane.fifo if e.lane is lane
                }:
                    raise InvariantError(
                        f"lane {lane.kinds} of run {run.name} counts {lane.waiting}, holds {len(queued)}"
                    )
                if lane.waiting and bool(lane.blocked_on) == (id(lane) in run.open):
                    raise InvariantError(
                        f"lane {lane.kinds} of run {run.name} is neither open nor waiting for a change"
                    )
                waiting += lane.waiting
        if waiting != self._waiting or waiting != sum(run.waiting for run in self.runs.values()):
            raise InvariantError(f"{self._waiting} actions counted as waiting, lanes hold {waiting}")
        for entry in self.entries.values():
            self._check_entry(entry)

    def _check_entry(self, entry: Entry) -> None:
        if entry.state.terminal:
            raise self._bug(f"{entry.id} has settled but is still live", entry)
        if entry.state.holds_units != bool(entry.holdings) or entry.state.holds_units != (entry.id in self.holding):
            raise self._bug(f"{entry.id} is {entry.state.value} but holds {len(entry.holdings)} pools", entry)
        if (entry.state is State.QUEUED) != (entry.lane is not None):
            raise self._bug(f"{entry.id} is {entry.state.value} and in lane {entry.lane}", entry)

    def _bug(self, what: str, entry: Entry) -> InvariantError:
        return InvariantError(what, self.story(entry.id))
