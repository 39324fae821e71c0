"""The scheduler: `handle(event, now) -> effects`.

Owns the life of every action from Submit to Settle, admission control included. Never reads a clock, draws a random
number or waits: the live service, the simulator and the tests drive this same object. Promises that every accepted
action settles exactly once, that a plan which oversells a pool raises InvariantError with the action's story, and that
the cost of an event grows neither with the number of finished actions nor, beyond a logarithm, with the number of
waiting ones. It grows in proportion to the runs, services and shapes of demand that wait for one pool.

Waits are bounded if every action has a time limit and sandboxes are released: from `ELDER_FACTOR * ageing_s` after its
submission an action has to wait only for actions that were submitted before it, because no later one may take what it
lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from tangram.core.action import NO_USAGE, Action, Outcome, State, Status, Usage
from tangram.core.demand import CORE, CPU, GPU
from tangram.core.explain import Explainer
from tangram.core.grants import Grants
from tangram.core.lanes import Entry, SandboxState
from tangram.core.ledger import Ledger
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
from tangram.core.offers import Offers
from tangram.core.plans import Plans
from tangram.core.policies.base import SchedulingPolicy
from tangram.core.profile import ProfileStore
from tangram.core.queue import Queue
from tangram.core.recent_events import RecentEvents
from tangram.core.residents import Residents
from tangram.core.sandbox_states import SandboxStates
from tangram.core.snapshot import Round, Snapshot
from tangram.core.stranded import Stranded
from tangram.core.timers import PoolRetries, Reviews, Timers
from tangram.errors import InvalidConfig, InvalidInput, InvariantError

STARVED_SHARE = 0.1
"""A timed-out action counts as starved if it lacked its reserved CPU for more than this share of its execution."""
STARVED_MIN_S = 0.5
"""It also has to lack it for more than this many seconds: less than that happens on any busy machine."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the scheduler. Cost is proportional to the number of pools and runs."""

    now: float
    waiting: int
    holding: int
    sandboxes: int
    settled: dict[str, int]
    late_events: int
    """Events about actions or attempts that had already ended, such as late messages of a lost node."""
    pools: dict[str, dict[str, int]]
    runs: dict[str, dict[str, float]]


class Scheduler:
    """A pure state machine: events in, effects out."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        pools: tuple[Pool, ...] = (),
        *,
        limits: Limits | None = None,
        profiles: ProfileStore | None = None,
    ) -> None:
        if not callable(getattr(policy, "plan", None)):
            raise InvalidConfig("policy", policy, 'a policy, such as policy("adaptive")')
        self.policy = policy
        self.limits = limits or Limits()
        self.profiles = ProfileStore() if profiles is None else profiles
        self.now = 0.0
        self.entries: dict[str, Entry] = {}
        """Every live action, by id."""
        self.ledger = Ledger()
        self.residents = Residents()
        self.queue = Queue(self.ledger, self.limits.ageing_s)
        self.sandboxes = SandboxStates(self.ledger, self.limits.sandboxes_max)
        self.grants = Grants(self.ledger, self.queue, self.sandboxes, self.residents)
        self._load = OfferedLoad()
        self._effects: list[Effect] = []
        """The effects of the current event."""
        self._recent_events = RecentEvents()
        self._timers = Timers()
        self._retries = PoolRetries(self._timers, self.ledger, self.queue)
        self._reviews = Reviews()
        self._stranded = Stranded(self.ledger, self.queue)
        current_round = Round()
        self.snapshot = Snapshot(
            ledger=self.ledger,
            queue=self.queue,
            residents=self.residents,
            grants=self.grants,
            profiles=self.profiles,
            load=self._load,
            policy=policy,
            current_round=current_round,
        )
        self._offers = Offers(
            ledger=self.ledger,
            queue=self.queue,
            sandboxes=self.sandboxes,
            snapshot=self.snapshot,
            policy=policy,
            retries=self._retries,
            recent_events=self._recent_events,
        )
        self._plans = Plans(
            ledger=self.ledger,
            queue=self.queue,
            grants=self.grants,
            sandboxes=self.sandboxes,
            residents=self.residents,
            snapshot=self.snapshot,
            current_round=current_round,
            offers=self._offers,
            policy=policy,
            profiles=self.profiles,
            reviews=self._reviews,
            retries=self._retries,
            recent_events=self._recent_events,
            enqueue=self._enqueue,
        )
        self._explainer = Explainer(ledger=self.ledger, queue=self.queue, offers=self._offers, policy=policy.name)
        self._sequence = 0
        self._settled: dict[Status, int] = dict.fromkeys(Status, 0)
        self._late_events = 0
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

    # ---- events in, effects out ----

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handles one event and returns its effects. A time before that of the last event counts as that time."""
        handler = self._handlers.get(type(event))
        if handler is None or not now < math.inf:
            raise InvalidInput("event", (event, now), "an event of tangram.core.messages, at a finite time")
        if now < self.now:
            now = self.now
        self.now = self.ledger.now = now
        effects: list[Effect] = []
        self._effects = effects
        self._recent_events.record(now, event, effects)
        handler(event)
        queue = self.queue
        if queue.behind:
            queue.open_overtaken(now)
        if queue.active or queue.changed or queue.vacated or self._reviews.due_at <= now:
            for pool in self.ledger.refill_all():
                queue.wake(pool)
            self._plans.execute(effects)
        wake_at = self._timers.announce()
        if wake_at is not None:
            effects.append(WakeAt(at=wake_at))
        return effects

    # ---- submission ----

    def _on_submit(self, event: Submit) -> None:
        action = event.action
        sandbox = self.sandboxes.by_id.get(action.sandbox) if action.sandbox else None
        refusal = self._refusal(action, sandbox)
        if refusal is not None:
            self._refuse(action.id, *refusal)
            return
        self._sequence += 1
        run = self.queue.run(action.run)
        entry = Entry(action, run, sandbox, self._sequence, self.now)
        possible = self._stranded.is_possible(entry)
        if not possible and not self.ledger.could_once_hold(entry.needs, entry.node, entry.memory):
            self._refuse(action.id, "capacity", self._explainer.impossible(entry))
            return
        # Before anything is written, so that a policy that raises leaves no half-submitted action behind.
        if not self.policy.strict:
            entry.estimate, entry.estimated_at = self.profiles.estimate(action), self.now
        entry.key = self.policy.order(entry, self.snapshot)
        try:
            comparable = entry.key <= math.inf
        except TypeError:
            comparable = False
        if not comparable:
            raise self._recent_events.error(
                f"policy {self.policy.name} orders {action.id} by {entry.key!r}, not by a number", entry.id
            )
        self.entries[action.id] = entry
        if action.service:
            self.residents.record_call(action.service, self.now)
        if sandbox is not None:
            self.sandboxes.join(sandbox, entry)
            if not sandbox.node and len(sandbox.actions) > 1:
                self._update_sandbox_needs(sandbox)
        if action.deadline_s is not None:
            self._timers.set(self.now + action.deadline_s, self._deadline_passed, entry)
        if entry.elastic and entry.estimate is not None:
            self._load.add(entry.elastic, entry.estimate.work_s * action.demand.pools[entry.elastic].min, self.now)
        if possible:
            self.queue.enqueue(entry)
        else:
            # The pools that could hold it are away, for example because their node is down. It waits for them.
            self._enqueue(entry)

    def _refusal(self, action: Action, sandbox: SandboxState | None) -> tuple[str, str] | None:
        """Admission control: returns the name of the limit that keeps the action out and the reason, if there is
        one."""
        limits = self.limits
        run = self.queue.runs.get(action.run)
        if run is None and (full := self._runs_max_refusal(action.run)) is not None:
            return full
        if action.id in self.entries:
            return "id", f"an action with the id {action.id} is already live; ids must be unique"
        if self.queue.waiting >= limits.queue_max:
            return "queue_max", f"the queue holds {limits.queue_max} actions; wait until some have settled"
        if run is not None and run.waiting >= limits.run_queue_max:
            reason = f"run {run.name} has {limits.run_queue_max} waiting actions; wait until some have settled"
            return "run_queue_max", reason
        if action.sandbox and (sandbox is None or sandbox.released):
            return "sandbox", f"sandbox {action.sandbox} is not reserved; send Reserve first"
        return None

    def _runs_max_refusal(self, name: str) -> tuple[str, str] | None:
        limit, runs = self.limits.runs_max, self.queue.runs
        if name in runs or len(runs) < limit:
            return None
        return "runs_max", f"{limit} runs are known; use the name of one of them"

    def _refuse(self, subject: str, limit: str, reason: str) -> None:
        self._effects.append(Refuse(action=subject, limit=limit, reason=reason))

    # ---- reports of managers -----

    def _live_entry(self, action_id: str, attempt: int) -> Entry | None:
        """Returns the action that an event is about. None if it has settled or another attempt has begun."""
        entry = self.entries.get(action_id)
        if entry is not None and (not attempt or (attempt == entry.attempts and entry.state is not State.QUEUED)):
            return entry
        self._late_events += 1
        return None

    def _on_started(self, event: Started) -> None:
        entry = self._live_entry(event.action, event.attempt)
        if entry is None:
            return
        stopping = entry.state is State.STOPPING and entry.started_at is None
        if not stopping:
            entry.transition(State.RUNNING, self._recent_events)
        entry.started_at = entry.progress_at = entry.measured_at = self.now
        entry.cpu_s, entry.use = 0.0, None
        if entry.restoring:
            self.residents.learn_restore(entry.action.service, self.now - entry.granted_at)
        if stopping:
            return
        if entry.elastic:
            entry.speed = self.grants.speed(entry)
        if entry.review_s:
            self._reviews.set(entry, self.now + entry.review_s)
        if entry.action.timeout_s is not None:
            self._timers.set(self.now + entry.action.timeout_s, self._timeout_passed, entry, entry.attempts)

    def _on_start_failed(self, event: StartFailed) -> None:
        entry = self._live_entry(event.action, event.attempt)
        if entry is None:
            return
        if entry.state is State.STOPPING:
            self._end(entry, *self._stop_reason(entry), refund=True)
            return
        entry.expect(State.STARTING, "StartFailed came", self._recent_events)
        if event.sandbox:
            self._wait_for_memory(entry, event)
        elif event.retry and entry.attempts < self.limits.attempts_max:
            self._requeue(entry, refund=True)
        else:
            reason = f"start failed {entry.attempts} times, last: {event.reason}"
            self._end(entry, Status.LOST, reason, refund=True)

    def _wait_for_memory(self, entry: Entry, event: StartFailed) -> None:
        """Requeues an action until a new sandbox has memory. It holds nothing meanwhile: other actions may need those
        units before they can free memory."""
        reserve = Reserve(sandbox=event.sandbox, memory=event.memory, run=entry.action.run, yields=True)
        refusal = self.sandboxes.refusal(reserve)
        if refusal is not None:
            self._end(entry, Status.LOST, refusal[1], refund=True)
            return
        for lane in (entry.heap_lane, entry.fifo_lane):
            if lane is not None:
                lane.forget(entry)
        entry.attempts -= 1
        entry.sandbox = self.sandboxes.reserve(reserve, entry.run)
        self.sandboxes.join(entry.sandbox, entry)
        self._requeue(entry, refund=True)

    def _requeue_without_sandbox(self, entry: Entry) -> None:
        """Requeues an action whose sandbox-to-be was released."""
        lane = entry.lane
        assert lane is not None, entry.id
        self.queue.dequeue(entry)
        lane.forget(entry)
        self.sandboxes.detach(entry)
        self._enqueue(entry)

    def _on_finished(self, event: Finished) -> None:
        entry = self._live_entry(event.action, event.attempt)
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
            entry.expect(State.RUNNING, "Finished came", self._recent_events)
            self._learn(entry, usage)
            self._end(entry, Status.SUCCEEDED, "", usage)

    def _on_concluded(self, event: Concluded) -> None:
        """Only counts the action: it holds nothing here and has no caller here."""
        entry = self.entries.get(event.action.id)
        if entry is not None:
            raise self._recent_events.error(
                f"{entry.id} is {entry.state.value}, but was reported as ended elsewhere", entry.id
            )
        if self._runs_max_refusal(event.action.run) is None:
            self.queue.run(event.action.run)
        self._settled[event.outcome.status] += 1

    def _on_resized(self, event: Resized) -> None:
        self._live_entry(event.action, event.attempt)

    def _on_used(self, event: Used) -> None:
        """Records the measured CPU use. An action that the policy reviews at all is reviewed immediately."""
        entry = self._live_entry(event.action, event.attempt)
        if entry is None or entry.state is not State.RUNNING:
            return
        elapsed = self.now - entry.measured_at
        if elapsed > 0.0:
            entry.use = max(0.0, event.cpu_s - entry.cpu_s) / elapsed
            entry.cpu_s, entry.measured_at = event.cpu_s, self.now
            if entry.review_s:
                self._reviews.set(entry, self.now)

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
        self.profiles.observe(entry.action, execution_s=execution_s, units=units, cpu_s=cpu_s)

    # ---- the end of an action ----

    def _lose(self, entry: Entry, reason: str, usage: Usage = NO_USAGE) -> None:
        """Handles a failure of the infrastructure. The action runs again only if it is idempotent."""
        if entry.state is State.STOPPING:
            self._end(entry, *self._stop_reason(entry), usage)
            return
        is_retried = entry.action.idempotent and entry.attempts < self.limits.attempts_max
        if (
            is_retried
            and entry.state is not State.QUEUED
            and (entry.sandbox is None or self.sandboxes.is_alive(entry.sandbox))
        ):
            self._requeue(entry, spent=usage.spent)
        else:
            self._end(entry, Status.LOST, reason, usage)

    def _requeue(self, entry: Entry, *, refund: bool = False, spent: dict[str, int] | None = None) -> None:
        """Ends the attempt and returns the action to its old turn."""
        self._give_back(entry, refund=refund, spent=spent)
        entry.transition(State.QUEUED, self._recent_events)
        entry.started_at = entry.grant = None
        entry.restoring = False
        entry.width = entry.reserved = entry.limit = 0
        self._enqueue(entry)

    def _enqueue(self, entry: Entry) -> None:
        self.queue.enqueue(entry)
        if self._stranded.add(entry, self.now):
            self._timers.set(self.now + self.limits.stranded_s, self._still_stranded, entry, self.now)

    def _update_sandbox_needs(self, sandbox: SandboxState) -> None:
        """Called when an action joins or leaves a sandbox without a node. Requeues all of them if their combined needs
        changed."""
        wants = self.sandboxes.combined_needs(sandbox)
        if wants == sandbox.wants:
            return
        waiting = [entry for entry in sandbox.actions.values() if entry.lane is not None]
        for entry in waiting:
            lane = entry.lane
            self.queue.dequeue(entry)
            if lane is not None:
                lane.compact()  # it must not find its old slot if it returns to this lane
        sandbox.wants = wants
        for entry in waiting:
            self.queue.enqueue(entry)

    def _end(self, entry: Entry, status: Status, reason: str, usage: Usage = NO_USAGE, *, refund: bool = False) -> None:
        """Frees everything, settles and forgets the action."""
        if entry.state is State.QUEUED:
            self.queue.dequeue(entry)
        else:
            self._give_back(entry, refund=refund, spent=usage.spent)
        entry.transition(_STATE_BY_STATUS.get(status, State.FAILED), self._recent_events)
        del self.entries[entry.id]
        self._timers.drop(entry)
        if entry.stranded_at is not None:
            self._stranded.discard(entry)
        if entry.awaits_instance:
            self.sandboxes.vacate(self.sandboxes.detach(entry))
        elif entry.sandbox is not None:
            freed = self.sandboxes.leave(entry.sandbox, entry)
            if freed is not None:
                self.queue.wake(freed)
            if entry.sandbox.wants:
                self._update_sandbox_needs(entry.sandbox)
        self._settled[status] += 1
        self._effects.append(Settle(outcome=self._outcome(entry, status, reason, usage)))

    def _give_back(self, entry: Entry, *, refund: bool, spent: dict[str, int] | None) -> None:
        sliding = [
            holding.pool
            for holding in entry.holdings
            if holding.pool.window is not None and holding.pool.window.sliding
        ]
        for pool in self.grants.give_back(entry, refund=refund, spent=spent):
            self.queue.wake(pool)
        for pool in sliding:  # units in use count from now on, so they may come back sooner than their timer assumed
            if self.snapshot.waiting(pool):
                self._retries.when_refilled(pool, max(0, pool.free) + 1)

    def _outcome(self, entry: Entry, status: Status, reason: str, usage: Usage) -> Outcome:
        """Divides the time since submission: what was neither execution nor overhead of the last attempt was
        waiting."""
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

    # ---- stopping ----

    def _on_cancel(self, event: Cancel) -> None:
        entry = self._live_entry(event.action, 0)
        if entry is not None:
            self._stop(entry, Status.CANCELLED, event.reason)

    def _stop(self, entry: Entry, status: Status, reason: str) -> None:
        """Cancelling is a request: a stopping action holds its units until Finished."""
        if entry.state is State.QUEUED:
            self._end(entry, status, reason)
        elif entry.state is not State.STOPPING:
            entry.transition(State.STOPPING, self._recent_events)
            entry.stop = (status, reason)
            self._effects.append(Stop(action=entry.id, reason=reason))

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
            self._end(entry, Status.LOST, f"stranded: {self._explainer.impossible(entry)}")

    def _on_tick(self, event: Tick) -> None:
        self._timers.fire(self.now)

    # ---- sandboxes, pools, nodes, runs, services ----

    def _on_reserve(self, event: Reserve) -> None:
        refusal = self._runs_max_refusal(event.run) or self.sandboxes.refusal(event)
        if refusal is not None:
            self._refuse(event.sandbox, *refusal)
            return
        self.sandboxes.reserve(event, self.queue.run(event.run))

    def _on_release(self, event: Release) -> None:
        sandbox = self.sandboxes.by_id.get(event.sandbox)
        if sandbox is None:
            self._late_events += 1
            return
        sandbox.released = True
        for entry in list(sandbox.actions.values()):
            if entry.awaits_instance:
                self._requeue_without_sandbox(entry)
            else:
                self._stop(entry, Status.CANCELLED, f"its sandbox {sandbox.id} was released")
        freed = self.sandboxes.vacate(sandbox)
        if freed is not None:
            self.queue.wake(freed)

    def _on_pool_changed(self, event: PoolChanged) -> None:
        self.queue.wake(self.ledger.change_pool(event.pool, self.now), all_lanes=True)
        self._find_stranded()

    def _on_node_changed(self, event: NodeChanged) -> None:
        removed = self.ledger.change_node(event.node, event.state)
        if event.state is NodeState.DOWN:
            self._node_down(event.node)
        for pool in removed:
            self.queue.forget(pool)
            self.grants.forget(pool)
        for pool in self.ledger.pools.values():
            if pool.node == event.node:
                self.queue.wake(pool, all_lanes=True)
        self._find_stranded()

    def _node_down(self, node: str) -> None:
        """Drops everything on a lost node: its sandboxes, loaded services and actions."""
        self.residents.drop_node(node)
        for sandbox in self.sandboxes.drop_node(node):
            for entry in list(sandbox.actions.values()):
                self._lose(entry, f"node {node} went down with sandbox {sandbox.id}")
        for entry in list(self.grants.holding.values()):
            if entry.grant is not None and entry.grant.node == node:
                self._lose(entry, f"node {node} went down")

    def _find_stranded(self) -> None:
        """Actions that no pool can hold any more are lost after `stranded_s`, unless a pool comes back."""
        for entry in self._stranded.find(self.now):
            self._timers.set(self.now + self.limits.stranded_s, self._still_stranded, entry, self.now)

    def _on_run_changed(self, event: RunChanged) -> None:
        if self._runs_max_refusal(event.run) is not None:
            raise InvalidConfig("run", event.run, f"one of the {self.limits.runs_max} known runs")
        self.ledger.set_weight(self.queue.run(event.run).usage, event.weight)

    def _on_resident(self, event: Resident) -> None:
        pool = self.ledger.kinds.get(GPU, {}).get(event.node)
        if pool is None:
            self._late_events += 1
            return
        self.residents.add(event.service, event.node, event.devices, event.batch_max)
        self.queue.wake(pool)

    def _on_evicted(self, event: Evicted) -> None:
        self.residents.remove(event.service, event.node, event.devices)

    # ---- inspection ----

    def explain(self, action_id: str) -> str:
        """Returns one sentence on why an action waits, or what it is doing."""
        entry = self.entries.get(action_id)
        return (
            self._explainer.explain(entry)
            if entry is not None
            else f"{action_id} is not live: it has settled or was never submitted"
        )

    def story(self, action_id: str) -> list[str]:
        """Returns what happened to an action, from the last events in memory."""
        return self._recent_events.story(action_id)

    def awaits_yielding(self) -> Entry | None:
        """The first of the actions that wait for memory which yielding sandboxes would free."""
        return self._offers.awaits_yielding()

    def statistics(self) -> Statistics:
        return Statistics(
            now=self.now,
            waiting=self.queue.waiting,
            holding=len(self.grants.holding),
            sandboxes=len(self.sandboxes.by_id),
            settled={status.value: count for status, count in self._settled.items()},
            late_events=self._late_events,
            pools={pool.name: pool.statistics() for pool in self.ledger.pools.values()},
            runs={
                run.name: {"waiting": run.waiting, "share": run.usage.share, "weight": run.usage.weight}
                for run in self.queue.runs.values()
            },
        )

    def check(self) -> None:
        """Recomputes every invariant. Raises InvariantError on the first that does not hold."""
        self.ledger.check(self.grants.all_holdings())
        self.queue.check()
        self.grants.check()
        self.sandboxes.check()
        queued = 0
        for entry in self.entries.values():
            self._check_entry(entry)
            queued += entry.state is State.QUEUED
        if queued != self.queue.waiting or len(self.entries) - queued != len(self.grants.holding):
            raise InvariantError(f"{queued} of {len(self.entries)} actions wait, but {self.queue.waiting} are counted")

    def _check_entry(self, entry: Entry) -> None:
        state = entry.state
        if state.terminal:
            raise self._recent_events.error(f"{entry.id} has settled but is still live", entry.id)
        if state.holds_units != bool(entry.holdings) or state.holds_units != (entry.id in self.grants.holding):
            raise self._recent_events.error(
                f"{entry.id} is {state.value} but holds {len(entry.holdings)} pools", entry.id
            )
        if (state is State.QUEUED) != (entry.lane is not None):
            raise self._recent_events.error(f"{entry.id} is {state.value} and in lane {entry.lane}", entry.id)
        if (entry.stop is not None) != (state is State.STOPPING):
            raise self._recent_events.error(f"{entry.id} is {state.value}, its stop is {entry.stop}", entry.id)
        if entry.lane is not None and entry is self.queue.head_of(entry.lane, self.now):
            idle = ", ".join(pool.name for pool in self._offers.withheld(entry))
            if idle:
                raise self._recent_events.error(
                    f"{entry.id} waits although {idle} is idle, could hold it and is not closed", entry.id
                )

    # ---- queries ----

    def has_sandbox(self, name: str) -> bool:
        """Whether memory is reserved for the sandbox."""
        return name in self.sandboxes.by_id

    def is_queued(self, action_id: str) -> bool:
        entry = self.entries.get(action_id)
        return entry is not None and entry.state is State.QUEUED

    def waiting_count(self, run: str | None) -> int:
        """The number of waiting actions of a run; None: of all runs."""
        if run is None:
            return self.queue.waiting
        known = self.queue.runs.get(run)
        return 0 if known is None else known.waiting

    def holding_entries(self, run: str | None) -> list[Entry]:
        """The actions of a run that hold units; None: of all runs."""
        return [entry for entry in self.grants.holding.values() if run is None or entry.action.run == run]


_STATE_BY_STATUS = {Status.SUCCEEDED: State.SUCCEEDED, Status.CANCELLED: State.CANCELLED}
