"""The action tracker: follows each live action from phase to phase.

Adds the time of each phase to the accounts of the run and to the sums of the trajectory, updates the utilization of
pools, and reports to the pool usage which units the action holds. Follows the effects of the scheduler, and reads the
scheduler where they do not suffice: that an attempt was lost and the action waits again.
"""

from __future__ import annotations

from tangram.core.action import Action, Outcome, State, Status
from tangram.core.demand import CPU, MEMORY
from tangram.core.messages import Event, Finished, Grant, Resize, Started, StartFailed
from tangram.core.scheduler import Scheduler
from tangram.runtime.pool_usage import PoolUsage
from tangram.runtime.shortage import short_kind_when_granted, short_kind_when_queued
from tangram.runtime.views import TimelineRow
from tangram.server.observe.accounts import Accounts
from tangram.server.observe.buckets import Buckets
from tangram.server.observe.sandbox_stats import SandboxStats, TrackedSandbox
from tangram.server.observe.stories import (
    FAILED_NOTE,
    GRANTED_NOTE,
    RESIZED_NOTE,
    STARTED_NOTE,
    STOPPED_NOTE,
    WAITING_NOTE,
    SettledActionRecord,
    TrackedAction,
)
from tangram.server.observe.time_breakdown import EXECUTING, START, STARTING, WAITING, TrajectoryClocks


class ActionTracker:
    def __init__(
        self,
        scheduler: Scheduler,
        accounts: Accounts,
        buckets: Buckets,
        sandboxes: SandboxStats,
        pool_usage: PoolUsage,
    ) -> None:
        self._scheduler = scheduler
        self._pool_usage = pool_usage
        self._accounts = accounts
        self._buckets = buckets
        self._sandboxes = sandboxes
        self.trajectories = TrajectoryClocks()
        self.by_id: dict[str, TrackedAction] = {}
        self._freed: tuple[str, ...] = ()
        """Pools to which the current event returned units."""

    def on_submitted(self, action: Action, now: float) -> TrackedAction | None:
        """Returns None if the action was refused: it is unknown then, or another action has its id."""
        entry = self._scheduler.entries.get(action.id)
        return self._track(action, now) if entry is not None and entry.action is action else None

    def _track(self, action: Action, now: float) -> TrackedAction:
        account = self._accounts.account_of(action)
        trajectory = self.trajectories.trajectory_of(action, account.run.time_breakdown, now)
        sandbox = self._sandboxes.by_name.get(action.sandbox) if action.sandbox else None
        tracked = TrackedAction(action, account, trajectory, sandbox, self._pool_usage, now)
        self.by_id[action.id] = tracked
        tracked.phase_start = trajectory.enter_phase(WAITING)
        account.live_actions += 1
        account.run.waiting += 1
        return tracked

    def on_waiting(self, tracked: TrackedAction, now: float) -> None:
        """Finds which kind the action waits for, if it is queued."""
        entry = self._scheduler.entries.get(tracked.action.id)
        if entry is not None and entry.state is State.QUEUED:
            tracked.short_kind = short_kind_when_queued(self._scheduler, entry)
            tracked.add_note(now, WAITING_NOTE, tracked.short_kind)

    def on_granted(self, action: Action, grant: Grant, event: Event, now: float) -> None:
        tracked = self.by_id.get(action.id)
        if tracked is None:
            tracked = self._track(action, now)
        elif tracked.phase != WAITING:
            self._requeue(tracked, now, "")
        if tracked.instance:
            self._open_instance(tracked, grant.node, now)
        trajectory, run = tracked.trajectory, tracked.account.run
        trajectory.advance(now)
        waited_s = trajectory.leave_phase(WAITING, tracked.phase_start)
        if waited_s > 0.0:
            trajectory.breakdown.add_waiting(
                short_kind_when_granted(self._scheduler, action, event, self._freed, tracked.short_kind), waited_s
            )
        tracked.phase, tracked.phase_start = STARTING, trajectory.enter_phase(STARTING)
        tracked.granted_at, tracked.started_at = now, -1.0
        self._pool_usage.on_granted(tracked, grant)
        run.waiting -= 1
        run.running += 1
        tracked.pools = tuple([share.pool for share in grant.shares])
        tracked.cpu = 0
        for share in grant.shares:
            if self._touch_pool(share.pool, now) == CPU:
                tracked.cpu += share.reserved
        tracked.add_note(now, GRANTED_NOTE, grant)
        if tracked.sandbox is not None:
            self._enter_sandbox(tracked.sandbox, grant.node, now)

    def _open_instance(self, tracked: TrackedAction, node: str, now: float) -> None:
        """The call has the memory of the instance for which it waited."""
        sandbox, tracked.instance, run = tracked.instance, "", tracked.action.run
        if self._scheduler.has_sandbox(sandbox):
            self._sandboxes.open(sandbox, run, self._accounts.run(run), node, now)
            self.touch_memory(node, now)

    def _enter_sandbox(self, sandbox: TrackedSandbox, node: str, now: float) -> None:
        settles_down = node and not sandbox.node
        self._sandboxes.on_action_granted(sandbox, node, now)
        if settles_down:
            self._touch_pool(f"{MEMORY}@{node}", now)

    def _touch_pool(self, name: str, now: float) -> str:
        """Updates the utilization of a pool that changed. Returns its kind; empty if the pool was removed."""
        pool = self._scheduler.ledger.pools.get(name)
        if pool is None:
            return ""
        self._buckets.utilization.touch(pool, now)
        return pool.kind

    def touch_memory(self, node: str, now: float) -> None:
        self._touch_pool(f"{MEMORY}@{node}", now)

    def on_started(self, event: Started, now: float) -> None:
        tracked = self.by_id.get(event.action)
        if tracked is None or tracked.phase != STARTING or event.attempt not in (0, tracked.attempt):
            return
        trajectory = tracked.trajectory
        trajectory.advance(now)
        waited_s = trajectory.leave_phase(STARTING, tracked.phase_start)
        if waited_s > 0.0:
            trajectory.breakdown.add_waiting(START, waited_s)
        tracked.phase, tracked.phase_start, tracked.started_at = EXECUTING, trajectory.enter_phase(EXECUTING), now
        tracked.add_note(now, STARTED_NOTE)

    def on_resized(self, effect: Resize, now: float) -> None:
        tracked = self.by_id.get(effect.action)
        if tracked is not None:
            if self._touch_pool(effect.pool, now) == CPU:
                tracked.cpu = effect.reserved
            self._pool_usage.on_resized(tracked, effect)
            tracked.add_note(now, RESIZED_NOTE, effect)

    def on_stopped(self, id: str, reason: str, now: float) -> None:
        tracked = self.by_id.get(id)
        if tracked is not None:
            tracked.add_note(now, STOPPED_NOTE, reason)

    def begin_event(self, now: float) -> None:
        self._pool_usage.begin_event(now)
        self._freed = ()

    def on_attempt_ended(self, event: Finished | StartFailed, now: float) -> TrackedAction | None:
        """Returns the action if it was queued or granted again; if it is over, a Settle follows. The late end of an
        abandoned attempt has no effect."""
        tracked = self.by_id.get(event.action)
        if tracked is None or tracked.phase == WAITING or event.attempt not in (0, tracked.attempt):
            return None
        self._pool_usage.release(tracked)
        self._freed = tracked.pools
        if isinstance(event, Finished):
            return tracked if self._requeue_if_queued(tracked, now, event.lost) else None
        if event.sandbox and event.action in self._scheduler.entries:
            # This used up no attempt: after a second grant the number is the same.
            self._requeue(tracked, now, event.reason)
            tracked.instance = event.sandbox
            return tracked
        return tracked if self._requeue_if_queued(tracked, now, event.reason) else None

    def on_node_down(self, node: str, now: float) -> list[TrackedAction]:
        """Returns the actions that were queued again."""
        on_node = [tracked for tracked in self.by_id.values() if tracked.node == node and tracked.phase != WAITING]
        for tracked in on_node:
            self._pool_usage.release(tracked)
        return [tracked for tracked in on_node if self._requeue_if_queued(tracked, now, f"node {node} went down")]

    def _requeue_if_queued(self, tracked: TrackedAction, now: float, reason: str) -> bool:
        """Returns whether the scheduler has queued the action again."""
        entry = self._scheduler.entries.get(tracked.action.id)
        if entry is None or (entry.state is not State.QUEUED and entry.attempts == tracked.attempt):
            return False
        self._requeue(tracked, now, reason)
        return True

    def _requeue(self, tracked: TrackedAction, now: float, reason: str) -> None:
        self._leave_phase(tracked, now, 0.0)
        tracked.phase, tracked.phase_start = WAITING, tracked.trajectory.enter_phase(WAITING)
        tracked.account.run.waiting += 1
        tracked.add_note(now, FAILED_NOTE, reason or "the infrastructure lost it")

    def _leave_phase(self, tracked: TrackedAction, now: float, overhead_s: float) -> None:
        """Adds the time of the phase to the sums, and returns the units that the action held."""
        trajectory, phase, run = tracked.trajectory, tracked.phase, tracked.account.run
        trajectory.advance(now)
        had_s = trajectory.leave_phase(phase, tracked.phase_start)
        sums = trajectory.breakdown
        if phase == WAITING:
            run.waiting -= 1
            if had_s > 0.0:
                sums.add_waiting(tracked.short_kind or next(iter(tracked.action.demand.pools)), had_s)
            return
        if phase == STARTING:
            if had_s > 0.0:
                sums.add_waiting(START, had_s)
        else:
            elapsed_s = now - tracked.started_at
            measured_s = had_s * min(1.0, overhead_s / elapsed_s) if elapsed_s > 0.0 else 0.0
            sums.overhead_s += measured_s
            sums.execution_s += had_s - measured_s
        run.running -= 1
        for name in tracked.pools:
            self._touch_pool(name, now)
        tracked.pools = ()
        if tracked.sandbox is not None:
            self._sandboxes.on_action_ended(tracked.sandbox, now)

    def on_settled(self, outcome: Outcome, number: int, now: float) -> SettledActionRecord | None:
        """Returns its record, or None for an unknown action."""
        tracked = self.by_id.pop(outcome.action, None)
        if tracked is None:
            return None
        self._leave_phase(tracked, now, outcome.usage.overhead_s)
        self._pool_usage.on_settled(tracked, outcome)
        action, account, status = tracked.action, tracked.account, outcome.status.value
        self.trajectories.on_settled(tracked.trajectory, action.kind, outcome.status is Status.SUCCEEDED)
        account.live_actions -= 1
        account.run.count(status)
        self._buckets.on_settled(account, outcome.waiting_s, outcome.execution_s, outcome.overhead_s)
        if tracked.sandbox is not None:
            self._sandboxes.drop_if_closed(tracked.sandbox.name, self._scheduler)
        granted_at = tracked.granted_at if tracked.granted_at >= 0.0 else now
        row = TimelineRow(
            number, action.id, action.run, action.trajectory, account.name, status, tracked.submitted_at, granted_at,
            now, outcome.waiting_s, outcome.execution_s, outcome.overhead_s, tracked.cpu, tracked.node,
        )  # fmt: skip
        demand_text, cpu_s = account.describe_demand(action.demand), outcome.usage.cpu_s
        return SettledActionRecord(
            row, demand_text, outcome.reason, outcome.attempts, cpu_s, tracked.dropped_notes, tuple(tracked.notes)
        )

    def on_concluded(self, action: Action, outcome: Outcome, number: int, now: float) -> SettledActionRecord:
        """Records an action that this server never ran. Counts its status but no durations, which are unknown."""
        account, status = self._accounts.account_of(action), outcome.status.value
        account.run.count(status)
        row = TimelineRow(
            number, action.id, action.run, action.trajectory, account.name, status, now, now, now, 0.0, 0.0, 0.0, 0, "",
        )  # fmt: skip
        return SettledActionRecord(
            row, account.describe_demand(action.demand), outcome.reason, outcome.attempts, 0.0, 0, ()
        )
