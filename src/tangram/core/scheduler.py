"""The scheduler: `handle(event, now) -> effects`.

Owns the life of every action from Submit to Settle, and is the only writer of the ledger. Never reads a clock, never
draws a random number, never waits: the live service, the simulator and the tests drive this same object. Promises that
every accepted action settles exactly once, that a plan which oversells a pool raises InvariantError with the action's
story, and that the cost of an event grows neither with the number of finished actions nor, beyond a logarithm, with
the number of waiting ones. It grows in proportion to the runs, services and shapes of demand that wait for one pool.

A waiting action is started once all that was submitted before it and holds what it needs has ended, at the latest
`ELDER_FACTOR * ageing_s` after its submission plus the time that those take: from then on nothing submitted later takes
what it lacks. With a time limit on every action, and sandboxes that are released, that is a bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappush
from typing import Any

import msgspec

from tangram.core.action import NO_USAGE, TRANSITIONS, Action, Outcome, State, Status, Usage, wrong_transition
from tangram.core.demand import CORE, CPU, GPU
from tangram.core.explain import explain, impossible
from tangram.core.grants import Grants
from tangram.core.lanes import Entry, Place
from tangram.core.ledger import Ledger, PoolState
from tangram.core.limits import Limits
from tangram.core.load import OfferedLoad
from tangram.core.messages import (
    Cancel,
    Concluded,
    Effect,
    Event,
    Evicted,
    Finished,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Release,
    Reserve,
    Resident,
    Resized,
    RunChanged,
    Settle,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    Used,
    WakeAt,
)
from tangram.core.places import Places
from tangram.core.plans import Plans
from tangram.core.policies.base import SchedulingPolicy
from tangram.core.profile import Knowledge
from tangram.core.queue import Queue
from tangram.core.residents import Residents
from tangram.core.snapshot import Snapshot
from tangram.core.stranded import Stranded
from tangram.core.timers import Timers
from tangram.core.trace import describe, mentions
from tangram.errors import InvalidConfig, InvalidInput, InvariantError

STORY_EVENTS = 1024
"""The last events kept in memory for stories; a trace on disk keeps all."""

STARVED_SHARE = 0.1
"""A timeout is our failure when the action lacked reserved CPU for more than this share of its execution, and"""
STARVED_MIN_S = 0.5
"""for more than this: less is what any busy machine does to whoever runs on it."""

REFILL_STEP_S = 1e-3
"""A quota that is about to have enough is looked at no sooner than this: rounding may put the moment into the past."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, at no cost beyond pools and runs."""

    now: float
    waiting: int
    holding: int
    sandboxes: int
    settled: dict[str, int]
    late_events: int
    """Events about what was over before, such as the last words of a lost node."""
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
        if not callable(getattr(policy, "plan", None)):
            raise InvalidConfig("policy", policy, 'a policy, such as policy("adaptive")')
        self.policy = policy
        self.limits = limits or Limits()
        self.knowledge = Knowledge() if knowledge is None else knowledge
        self.ledger = Ledger()
        self.residents = Residents()
        self.queue = Queue(self.ledger, self.limits.ageing_s)
        self.places = Places(self.ledger, self.limits.sandboxes_max)
        self.entries: dict[str, Entry] = {}
        """Every live action."""
        self.snapshot = Snapshot(self)
        self.grants = Grants(self.ledger, self.places, self.residents, self.snapshot)
        self.load = OfferedLoad()
        self.reviews: list[tuple[float, int, Entry, int]] = []
        """Running actions that the policy wants to see again: when, sequence number, entry, attempt."""
        self.effects: list[Effect] = []
        """Of the present event."""
        self._plans = Plans(self)
        self._timers = Timers()
        self._stranded = Stranded(self.ledger, self.queue)
        self.now = 0.0
        self._sequence = 0
        self._settled: dict[Status, int] = dict.fromkeys(Status, 0)
        self._late = 0
        self._events: deque[tuple[float, Event, list[Effect]]] = deque(maxlen=STORY_EVENTS)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._on_submit,
            Cancel: self._on_cancel,
            Started: self._on_started,
            StartFailed: self._on_start_failed,
            Finished: self._on_finished,
            Concluded: self._on_concluded,
            Resized: self._on_resized,
            Used: self._on_used,
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
            self.ledger.change_pool(pool, 0.0)

    # ---- the door ----

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event, return what is to be done. A clock that steps back is read as standing still."""
        handler = self._handlers.get(type(event))
        if handler is None or not now < math.inf:
            raise InvalidInput("event", (event, now), "an event of tangram.core.messages, at a finite time")
        if now < self.now:
            now = self.now
        self.now = self.snapshot.now = self.ledger.now = now
        effects: list[Effect] = []
        self.effects = effects
        self._events.append((now, event, effects))
        handler(event)
        queue = self.queue
        if queue.behind:
            queue.open_overtaken(now)
        if queue.active or queue.changed or queue.vacated or (self.reviews and self.reviews[0][0] <= now):
            for pool in self.ledger.refill_all():
                queue.wake(pool)
            self._plans.carry_out()
        wake_at = self._timers.announce()
        if wake_at is not None:
            effects.append(WakeAt(at=wake_at))
        return effects

    # ---- submission ----

    def _on_submit(self, event: Submit) -> None:
        action = event.action
        place = self.places.by_sandbox.get(action.sandbox) if action.sandbox else None
        refusal = self._refusal(action, place)
        if refusal is not None:
            self._refuse(action.id, *refusal)
            return
        self._sequence += 1
        run = self.queue.run(action.run)
        entry = Entry(action, run, place, self._sequence, self.now)
        possible = self._stranded.is_possible(entry)
        if not possible and not self.ledger.once_held(entry.needs, entry.node, entry.memory):
            self._refuse(action.id, "capacity", impossible(self, entry))
            return
        # Before anything is written: a policy that fails here leaves no action behind that is half submitted.
        entry.key = self.policy.order(entry, self.snapshot)
        try:
            comparable = entry.key <= math.inf
        except TypeError:
            comparable = False
        if not comparable:
            raise self.bug(f"policy {self.policy.name} orders {action.id} by {entry.key!r}, not by a number", entry)
        self.entries[action.id] = entry
        if action.service:
            self.residents.called(action.service, self.now)
        if place is not None:
            self.places.join(place, entry)
            if not place.node and len(place.actions) > 1:
                self._want_together(place)
        if action.deadline_s is not None:
            self._timers.set(self.now + action.deadline_s, self._deadline_passed, entry)
        if entry.elastic and entry.estimate is not None:
            self.load.add(entry.elastic, entry.estimate.work_s * action.demand.pools[entry.elastic].min, self.now)
        if possible:
            self.queue.enqueue(entry)
        else:
            # What could hold it is away, such as a node that is down: it waits for that like those who were here.
            self.enqueue_again(entry)

    def _refusal(self, action: Action, place: Place | None) -> tuple[str, str] | None:
        """The named limit that keeps the action out, with the sentence to say."""
        limits = self.limits
        run = self.queue.runs.get(action.run)
        if run is None and (full := self._full_of_runs(action.run)) is not None:
            return full
        if action.id in self.entries:
            return "id", f"an action with the id {action.id} is already live; ids must be unique"
        if self.queue.waiting >= limits.queue_max:
            return "queue_max", f"the queue holds {limits.queue_max} actions; wait until some have settled"
        if run is not None and run.waiting >= limits.run_queue_max:
            reason = f"run {run.name} has {limits.run_queue_max} waiting actions; wait until some have settled"
            return "run_queue_max", reason
        if action.sandbox and (place is None or place.released):
            return "sandbox", f"sandbox {action.sandbox} is not reserved; send Reserve first"
        return None

    def _full_of_runs(self, name: str) -> tuple[str, str] | None:
        limit, runs = self.limits.runs_max, self.queue.runs
        if name in runs or len(runs) < limit:
            return None
        return "runs_max", f"{limit} runs are known; use the name of one of them"

    def _refuse(self, subject: str, limit: str, reason: str) -> None:
        self.effects.append(Refuse(action=subject, limit=limit, reason=reason))

    # ---- what managers report ----

    def _live(self, action_id: str, attempt: int) -> Entry | None:
        """The action that an event concerns; None if that is over: settled, or another attempt is on its way."""
        entry = self.entries.get(action_id)
        if entry is not None and (not attempt or (attempt == entry.attempts and entry.state is not State.QUEUED)):
            return entry
        self._late += 1
        return None

    def _on_started(self, event: Started) -> None:
        entry = self._live(event.action, event.attempt)
        if entry is None:
            return
        stopping = entry.state is State.STOPPING and entry.started_at is None
        if not stopping:
            self.move(entry, State.RUNNING)
        entry.started_at = entry.progress_at = entry.measured_at = self.now
        entry.cpu_s, entry.use = 0.0, None
        if entry.restoring:
            self.residents.learn_restore(entry.action.service, self.now - entry.granted_at)
        if stopping:
            return
        if entry.elastic:
            entry.speed = self.grants.speed(entry)
        if entry.review_s:
            self.review(entry, entry.review_s)
        if entry.action.timeout_s is not None:
            self._timers.set(self.now + entry.action.timeout_s, self._timeout_passed, entry, entry.attempts)

    def _on_start_failed(self, event: StartFailed) -> None:
        entry = self._live(event.action, event.attempt)
        if entry is None:
            return
        if entry.state is State.STOPPING:
            self._end(entry, *self._stop_reason(entry), refund=True)
            return
        self.expect(entry, State.STARTING, "StartFailed came")
        if event.sandbox:
            self._wait_for_memory(entry, event)
        elif event.retry and entry.attempts < self.limits.attempts_max:
            self._requeue(entry, refund=True)
        else:
            reason = f"start failed {entry.attempts} times, last: {event.reason}"
            self._end(entry, Status.LOST, reason, refund=True)

    def _wait_for_memory(self, entry: Entry, event: StartFailed) -> None:
        """What it would hold meanwhile others may need before they give their memory back: it holds nothing."""
        reserve = Reserve(sandbox=event.sandbox, memory=event.memory, run=entry.action.run, yields=True)
        refusal = self.places.refusal(reserve)
        if refusal is not None:
            self._end(entry, Status.LOST, refusal[1], refund=True)
            return
        for lane in (entry.heap_lane, entry.fifo_lane):
            if lane is not None:
                lane.forget(entry)
        entry.attempts -= 1
        entry.place = self.places.reserve(reserve, entry.run)
        self.places.join(entry.place, entry)
        self._requeue(entry, refund=True)

    def _wait_without(self, entry: Entry) -> None:
        """The sandbox that it waited for is not wanted any more."""
        lane = entry.lane
        assert lane is not None, entry.id
        self.queue.dequeue(entry)
        lane.forget(entry)
        self.places.part(entry)
        self.enqueue_again(entry)

    def _on_finished(self, event: Finished) -> None:
        entry = self._live(event.action, event.attempt)
        if entry is None:
            return
        usage = event.usage
        if entry.state is State.STOPPING:
            status, reason = self._stop_reason(entry)
            if status is Status.TIMED_OUT and self._starved(entry, usage):
                status, reason = Status.LOST, f"starved: {usage.starved_s:.1f} s without its reserved CPU"
            self._end(entry, status, reason, usage)
        elif event.lost:
            self._lose(entry, event.lost, usage)
        else:
            self.expect(entry, State.RUNNING, "Finished came")
            self._learn(entry, usage)
            self._end(entry, Status.SUCCEEDED, "", usage)

    def _on_concluded(self, event: Concluded) -> None:
        """It holds nothing here, and nobody here is to be told."""
        entry = self.entries.get(event.action.id)
        if entry is not None:
            raise self.bug(f"{entry.id} is {entry.state.value}, and is said to have ended elsewhere", entry)
        if self._full_of_runs(event.action.run) is None:
            self.queue.run(event.action.run)
        self._settled[event.outcome.status] += 1

    def _on_resized(self, event: Resized) -> None:
        self._live(event.action, event.attempt)

    def _on_used(self, event: Used) -> None:
        """Kept for the policy, which sees the action again at once if it wants to see it at all."""
        entry = self._live(event.action, event.attempt)
        if entry is None or entry.state is not State.RUNNING:
            return
        elapsed = self.now - entry.measured_at
        if elapsed > 0.0:
            entry.use = max(0.0, event.cpu_s - entry.cpu_s) / elapsed
            entry.cpu_s, entry.measured_at = event.cpu_s, self.now
            if entry.review_s:
                self.review(entry, 0.0)

    def _starved(self, entry: Entry, usage: Usage) -> bool:
        started = entry.started_at if entry.started_at is not None else self.now
        return usage.starved_s > max(STARVED_SHARE * (self.now - started), STARVED_MIN_S)

    def _learn(self, entry: Entry, usage: Usage) -> None:
        assert entry.started_at is not None
        elapsed = self.now - entry.started_at
        execution_s = max(0.0, elapsed - usage.overhead_s - usage.throttled_s)
        units = None
        if entry.elastic:
            entry.account(self.now)
            unit = CORE if entry.elastic == CPU else 1
            units = (entry.unit_s / elapsed if elapsed > 0.0 else min(entry.limit, entry.width)) / unit
        cpu_s = usage.cpu_s if CPU in entry.action.demand.pools else None
        self.knowledge.observe(entry.action, execution_s=execution_s, units=units, cpu_s=cpu_s)

    def review(self, entry: Entry, after_s: float) -> None:
        """Show this attempt of a running action to the policy again."""
        entry.review_at = self.now + after_s
        heappush(self.reviews, (entry.review_at, entry.seq, entry, entry.attempts))

    # ---- the end of an action ----

    def _lose(self, entry: Entry, reason: str, usage: Usage = NO_USAGE) -> None:
        """Our side failed it. It runs again only if the caller said that it may."""
        if entry.state is State.STOPPING:
            self._end(entry, *self._stop_reason(entry), usage)
            return
        again = entry.action.idempotent and entry.attempts < self.limits.attempts_max
        if again and entry.state is not State.QUEUED and (entry.place is None or self.places.is_alive(entry.place)):
            self._requeue(entry, spent=usage.spent)
        else:
            self._end(entry, Status.LOST, reason, usage)

    def _requeue(self, entry: Entry, *, refund: bool = False, spent: dict[str, int] | None = None) -> None:
        """The attempt is over; the action takes its old turn again."""
        self._give_back(entry, refund=refund, spent=spent)
        self.move(entry, State.QUEUED)
        entry.started_at = entry.grant = None
        entry.restoring = False
        entry.width = entry.reserved = entry.limit = 0
        self.enqueue_again(entry)

    def enqueue_again(self, entry: Entry) -> None:
        self.queue.enqueue(entry)
        if self._stranded.add(entry, self.now):
            self._timers.set(self.now + self.limits.stranded_s, self._still_stranded, entry, self.now)

    def _want_together(self, place: Place) -> None:
        """An action of a sandbox without a node has come or gone. If that changes what all of them want of a node, they
        wait for another one."""
        wants = self.places.wants(place)
        if wants == place.wants:
            return
        waiting = [entry for entry in place.actions.values() if entry.lane is not None]
        for entry in waiting:
            lane = entry.lane
            self.queue.dequeue(entry)
            if lane is not None:
                lane.compact()  # it may come back there, and must not find its old slot
        place.wants = wants
        for entry in waiting:
            self.queue.enqueue(entry)

    def _end(self, entry: Entry, status: Status, reason: str, usage: Usage = NO_USAGE, *, refund: bool = False) -> None:
        """Give everything back, settle, forget."""
        if entry.state is State.QUEUED:
            self.queue.dequeue(entry)
        else:
            self._give_back(entry, refund=refund, spent=usage.spent)
        self.move(entry, _STATE_BY_STATUS.get(status, State.FAILED))
        del self.entries[entry.id]
        self._timers.drop(entry)
        if entry.stranded_at is not None:
            self._stranded.discard(entry)
        if entry.is_guest:
            self.places.vacate(self.places.part(entry))
        elif entry.place is not None:
            freed = self.places.leave(entry.place, entry)
            if freed is not None:
                self.queue.wake(freed)
            if entry.place.wants:
                self._want_together(entry.place)
        self._settled[status] += 1
        self.effects.append(Settle(outcome=self._outcome(entry, status, reason, usage)))

    def _give_back(self, entry: Entry, *, refund: bool, spent: dict[str, int] | None) -> None:
        sliding = [
            holding.pool
            for holding in entry.holdings
            if holding.pool.window is not None and holding.pool.window.sliding
        ]
        for pool in self.grants.give_back(entry, refund=refund, spent=spent):
            self.queue.wake(pool)
        for pool in sliding:  # what it used counts from now on, and so comes back sooner than was thought
            if self.snapshot.waiting(pool):
                self.wake_when_refilled(pool, max(0, pool.free) + 1)

    def _outcome(self, entry: Entry, status: Status, reason: str, usage: Usage) -> Outcome:
        """Time since submission, divided: what is neither execution nor overhead of the last attempt was waiting."""
        now = self.now
        execution_s = overhead_s = 0.0
        if entry.grant is not None:
            started = entry.started_at if entry.started_at is not None else now
            execution_s = max(0.0, now - started - usage.overhead_s)
            overhead_s = started - entry.granted_at + min(usage.overhead_s, now - started)
        return Outcome(
            action=entry.id,
            status=status,
            reason=reason,
            waiting_s=max(0.0, now - entry.submitted_at - execution_s - overhead_s),
            execution_s=execution_s,
            overhead_s=overhead_s,
            usage=usage,
            attempts=entry.attempts,
        )

    def move(self, entry: Entry, state: State) -> None:
        if state not in TRANSITIONS[entry.state]:
            raise self.bug(wrong_transition(entry.state, state, entry.id), entry)
        entry.state = state

    # ---- stopping ----

    def _on_cancel(self, event: Cancel) -> None:
        entry = self._live(event.action, 0)
        if entry is not None:
            self._stop(entry, Status.CANCELLED, event.reason)

    def _stop(self, entry: Entry, status: Status, reason: str) -> None:
        """Cancelling is a request: what is stopping still holds its units until Finished."""
        if entry.state is State.QUEUED:
            self._end(entry, status, reason)
        elif entry.state is not State.STOPPING:
            self.move(entry, State.STOPPING)
            entry.stop = (status, reason)
            self.effects.append(Stop(action=entry.id, reason=reason))

    def _stop_reason(self, entry: Entry) -> tuple[Status, str]:
        assert entry.stop is not None, entry.id
        return entry.stop

    def _deadline_passed(self, entry: Entry) -> None:
        doing = "waited" if entry.state is State.QUEUED else "ran"
        self._stop(entry, Status.TIMED_OUT, f"deadline of {entry.action.deadline_s:g} s passed while it {doing}")

    def _timeout_passed(self, entry: Entry, attempt: int) -> None:
        if entry.attempts == attempt and entry.state is State.RUNNING:
            self._stop(entry, Status.TIMED_OUT, f"timeout of {entry.action.timeout_s:g} s passed")

    def _still_stranded(self, entry: Entry, since: float) -> None:
        if entry.stranded_at == since and entry.state is State.QUEUED:
            self._end(entry, Status.LOST, f"stranded: {impossible(self, entry)}")

    def _on_tick(self, event: Tick) -> None:
        self._timers.fire(self.now)

    # ---- pools that time fills ----

    def wake_when_refilled(self, pool: PoolState, units: int) -> None:
        """Try those who lack units of a quota again when it will have that many."""
        at = pool.available_at(units)
        if at < math.inf and not pool.fits(units):
            self._timers.set_pool(max(at, self.now + REFILL_STEP_S), self._look_again, pool.name)

    def wake_later(self, pool: PoolState, after_s: float) -> None:
        self._timers.set_pool(self.now + after_s, self._look_again, pool.name)

    def _look_again(self, pool_name: str) -> None:
        pool = self.ledger.pools.get(pool_name)
        if pool is not None:
            self.ledger.refill(pool, self.now)
            self.queue.wake(pool, all_lanes=True)

    # ---- sandboxes, pools, nodes, runs, services ----

    def _on_reserve(self, event: Reserve) -> None:
        refusal = self._full_of_runs(event.run) or self.places.refusal(event)
        if refusal is not None:
            self._refuse(event.sandbox, *refusal)
            return
        self.places.reserve(event, self.queue.run(event.run))

    def _on_release(self, event: Release) -> None:
        place = self.places.by_sandbox.get(event.sandbox)
        if place is None:
            self._late += 1
            return
        place.released = True
        for entry in list(place.actions.values()):
            if entry.is_guest:
                self._wait_without(entry)
            else:
                self._stop(entry, Status.CANCELLED, f"its sandbox {place.id} was released")
        freed = self.places.vacate(place)
        if freed is not None:
            self.queue.wake(freed)

    def _on_pool_changed(self, event: PoolChanged) -> None:
        self.queue.wake(self.ledger.change_pool(event.pool, self.now), all_lanes=True)
        self._find_stranded()

    def _on_node_changed(self, event: NodeChanged) -> None:
        gone = self.ledger.change_node(event.node, event.state)
        if event.state is NodeState.DOWN:
            self._node_down(event.node)
        for pool in gone:
            self.queue.forget(pool)
            self.grants.elastic_by_pool.pop(pool.name, None)
        for pool in self.ledger.pools.values():
            if pool.node == event.node:
                self.queue.wake(pool, all_lanes=True)
        self._find_stranded()

    def _node_down(self, node: str) -> None:
        """Everything on the node is gone with its pools: its sandboxes, its loaded services, its actions."""
        self.residents.drop_node(node)
        for place in self.places.drop_node(node):
            for entry in list(place.actions.values()):
                self._lose(entry, f"node {node} went down with sandbox {place.id}")
        for entry in list(self.grants.holding.values()):
            if entry.grant is not None and entry.grant.node == node:
                self._lose(entry, f"node {node} went down")

    def _find_stranded(self) -> None:
        """Actions that no pool can hold any more wait `stranded_s` for one to come back, then are lost."""
        for entry in self._stranded.find(self.now):
            self._timers.set(self.now + self.limits.stranded_s, self._still_stranded, entry, self.now)

    def _on_run_changed(self, event: RunChanged) -> None:
        if self._full_of_runs(event.run) is not None:
            raise InvalidConfig("run", event.run, f"one of the {self.limits.runs_max} runs that are known")
        self.ledger.reweigh(self.queue.run(event.run).usage, event.weight)

    def _on_resident(self, event: Resident) -> None:
        pool = self.ledger.kinds.get(GPU, {}).get(event.node)
        if pool is None:
            self._late += 1
            return
        self.residents.add(event.service, event.node, event.devices, event.batch_max)
        self.queue.wake(pool)

    def _on_evicted(self, event: Evicted) -> None:
        self.residents.remove(event.service, event.node, event.devices)

    # ---- seeing ----

    def explain(self, action_id: str) -> str:
        """One sentence on why an action waits, or what it is doing."""
        entry = self.entries.get(action_id)
        return explain(self, entry) if entry is not None else f"{action_id} is not live: it settled or never came"

    def story(self, action_id: str) -> list[str]:
        """What happened to an action, from the last events in memory."""
        lines: list[str] = []
        for now, event, effects in self._events:
            lines.extend(describe(now, message) for message in (event, *effects) if mentions(message, action_id))
        return lines

    def statistics(self) -> Statistics:
        return Statistics(
            now=self.now,
            waiting=self.queue.waiting,
            holding=len(self.grants.holding),
            sandboxes=len(self.places.by_sandbox),
            settled={status.value: count for status, count in self._settled.items()},
            late_events=self._late,
            pools={pool.name: pool.statistics() for pool in self.ledger.pools.values()},
            runs={
                run.name: {"waiting": run.waiting, "share": run.usage.share, "weight": run.usage.weight}
                for run in self.queue.runs.values()
            },
        )

    def check(self) -> None:
        """Recompute every invariant from scratch. Raises InvariantError on the first that does not hold."""
        self.ledger.check(self.grants.all_holdings())
        self.queue.check()
        self.grants.check()
        self.places.check()
        queued = 0
        for entry in self.entries.values():
            self._check_entry(entry)
            queued += entry.state is State.QUEUED
        if queued != self.queue.waiting or len(self.entries) - queued != len(self.grants.holding):
            raise InvariantError(f"{queued} of {len(self.entries)} actions wait, {self.queue.waiting} are counted")

    def _check_entry(self, entry: Entry) -> None:
        state = entry.state
        if state.terminal:
            raise self.bug(f"{entry.id} has settled but is still live", entry)
        if state.holds_units != bool(entry.holdings) or state.holds_units != (entry.id in self.grants.holding):
            raise self.bug(f"{entry.id} is {state.value} but holds {len(entry.holdings)} pools", entry)
        if (state is State.QUEUED) != (entry.lane is not None):
            raise self.bug(f"{entry.id} is {state.value} and in lane {entry.lane}", entry)
        if (entry.stop is not None) != (state is State.STOPPING):
            raise self.bug(f"{entry.id} is {state.value}, its stop is {entry.stop}", entry)
        if entry.lane is not None and entry is self.queue.head_of(entry.lane, self.now):
            idle = ", ".join(pool.name for pool in self.snapshot.withheld(entry))
            if idle:
                raise self.bug(f"{entry.id} waits though {idle} could hold it, idle and closed by nobody ahead", entry)

    def expect(self, entry: Entry, state: State, why: str) -> None:
        if entry.state is not state:
            raise self.bug(f"{entry.id} is {entry.state.value}, not {state.value}, when {why}", entry)

    def bug(self, what: str, entry: Entry) -> InvariantError:
        return InvariantError(what, self.story(entry.id))


_STATE_BY_STATUS = {Status.SUCCEEDED: State.SUCCEEDED, Status.CANCELLED: State.CANCELLED}
