"""Lives: every action that has yet to settle, as it goes from phase to phase.

Owns where each is and enters what it had in the accounts of its run, in the sums of its trajectory and in the levels of
pools. Follows the effects of the scheduler, and the scheduler itself where they do not say all: that an attempt was
lost and the action waits again.
"""

from __future__ import annotations

from tangram.core.action import Action, Outcome, State, Status
from tangram.core.demand import CPU, MEMORY
from tangram.core.messages import Event, Finished, Grant, Resize, Started, StartFailed
from tangram.core.scheduler import Scheduler
from tangram.runtime.views import Row
from tangram.server.observe.accounts import Accounts
from tangram.server.observe.buckets import Buckets
from tangram.server.observe.sandbox_stats import Box, Boxes
from tangram.server.observe.shortage import lacked, short_kind
from tangram.server.observe.stories import FAILED, GRANTED, RESIZED, STARTED, STOPPED, WAITS, Life, Past
from tangram.server.observe.time_breakdown import EXECUTING, START, STARTING, WAITING, Trajectories


class Lives:
    def __init__(self, scheduler: Scheduler, accounts: Accounts, buckets: Buckets, boxes: Boxes) -> None:
        self._scheduler = scheduler
        self._accounts = accounts
        self._buckets = buckets
        self._boxes = boxes
        self.trajectories = Trajectories()
        self.by_id: dict[str, Life] = {}
        self._freed: tuple[str, ...] = ()
        """Pools of which the present event has given units back."""

    def submitted(self, action: Action, now: float) -> Life | None:
        """None if it was refused: then it is not there, or another one that has its id is."""
        entry = self._scheduler.entries.get(action.id)
        return self._begin(action, now) if entry is not None and entry.action is action else None

    def _begin(self, action: Action, now: float) -> Life:
        account = self._accounts.of(action)
        trajectory = self.trajectories.of(action, account.run.spending, now)
        box = self._boxes.by_name.get(action.sandbox) if action.sandbox else None
        life = self.by_id[action.id] = Life(action, account, trajectory, box, now)
        life.since = trajectory.enter(WAITING)
        account.live += 1
        account.run.waiting += 1
        return life

    def waits(self, life: Life, now: float) -> None:
        """Look at what it waits for, if it does."""
        entry = self._scheduler.entries.get(life.action.id)
        if entry is not None and entry.state is State.QUEUED:
            life.short = short_kind(self._scheduler, entry)
            life.note(now, WAITS, life.short)

    def granted(self, action: Action, grant: Grant, event: Event, now: float) -> None:
        life = self.by_id.get(action.id)
        if life is None:
            life = self._begin(action, now)
        elif life.phase != WAITING:
            self._back_to_queue(life, now, "")
        trajectory, run = life.trajectory, life.account.run
        trajectory.advance(now)
        waited_s = trajectory.leave(WAITING, life.since)
        if waited_s > 0.0:
            trajectory.sums.waited(lacked(self._scheduler, action, event, self._freed, life.short), waited_s)
        life.phase, life.since = STARTING, trajectory.enter(STARTING)
        life.granted_s, life.started_s, life.attempt, life.node = now, -1.0, grant.attempt, grant.node
        run.waiting -= 1
        run.running += 1
        life.pools = tuple([share.pool for share in grant.shares])
        life.cpu = 0
        for share in grant.shares:
            if self._touch(share.pool, now) == CPU:
                life.cpu += share.reserved
        life.note(now, GRANTED, grant)
        if life.box is not None:
            self._enter(life.box, grant.node, now)

    def _enter(self, box: Box, node: str, now: float) -> None:
        settles_down = node and not box.node
        self._boxes.enter(box, node, now)
        if settles_down:
            self._touch(f"{MEMORY}@{node}", now)

    def _touch(self, name: str, now: float) -> str:
        """A pool has changed. Returns its kind; empty if it is gone."""
        pool = self._scheduler.ledger.pools.get(name)
        if pool is None:
            return ""
        self._buckets.levels.touch(pool, now)
        return pool.kind

    def touch_memory(self, node: str, now: float) -> None:
        self._touch(f"{MEMORY}@{node}", now)

    def started(self, event: Started, now: float) -> None:
        life = self.by_id.get(event.action)
        if life is None or life.phase != STARTING or event.attempt not in (0, life.attempt):
            return
        trajectory = life.trajectory
        trajectory.advance(now)
        waited_s = trajectory.leave(STARTING, life.since)
        if waited_s > 0.0:
            trajectory.sums.waited(START, waited_s)
        life.phase, life.since, life.started_s = EXECUTING, trajectory.enter(EXECUTING), now
        life.note(now, STARTED)

    def resized(self, effect: Resize, now: float) -> None:
        life = self.by_id.get(effect.action)
        if life is not None:
            if self._touch(effect.pool, now) == CPU:
                life.cpu = effect.reserved
            life.note(now, RESIZED, effect)

    def stopped(self, id: str, reason: str, now: float) -> None:
        life = self.by_id.get(id)
        if life is not None:
            life.note(now, STOPPED, reason)

    def next_event(self) -> None:
        self._freed = ()

    def attempt_over(self, event: Finished | StartFailed, now: float) -> Life | None:
        """If the action is over too, a Settle follows; else it is in the queue again or was granted anew, and returned.
        The last words of an attempt that was given up before change nothing."""
        life = self.by_id.get(event.action)
        if life is None or life.phase == WAITING or event.attempt not in (0, life.attempt):
            return None
        self._freed = life.pools
        if isinstance(event, Finished):
            return life if self._follow(life, now, event.lost) else None
        if event.sandbox and event.action in self._scheduler.entries:
            # It used up no attempt: one that was granted anew has the same number.
            self._back_to_queue(life, now, event.reason)
            return life
        return life if self._follow(life, now, event.reason) else None

    def node_down(self, node: str, now: float) -> list[Life]:
        """Returns those that are in the queue again."""
        there = [life for life in self.by_id.values() if life.node == node and life.phase != WAITING]
        return [life for life in there if self._follow(life, now, f"node {node} went down")]

    def _follow(self, life: Life, now: float, reason: str) -> bool:
        """Is it in the queue again, as the scheduler sees it?"""
        entry = self._scheduler.entries.get(life.action.id)
        if entry is None or (entry.state is not State.QUEUED and entry.attempts == life.attempt):
            return False
        self._back_to_queue(life, now, reason)
        return True

    def _back_to_queue(self, life: Life, now: float, reason: str) -> None:
        self._leave(life, now, 0.0)
        life.phase, life.since = WAITING, life.trajectory.enter(WAITING)
        life.account.run.waiting += 1
        life.note(now, FAILED, reason or "our side lost it")

    def _leave(self, life: Life, now: float, overhead_s: float) -> None:
        """What it had in its phase is entered in the sums; what it held, it holds no more."""
        trajectory, phase, run = life.trajectory, life.phase, life.account.run
        trajectory.advance(now)
        had_s = trajectory.leave(phase, life.since)
        sums = trajectory.sums
        if phase == WAITING:
            run.waiting -= 1
            if had_s > 0.0:
                sums.waited(life.short or next(iter(life.action.demand.pools)), had_s)
            return
        if phase == STARTING:
            if had_s > 0.0:
                sums.waited(START, had_s)
        else:
            elapsed_s = now - life.started_s
            ours_s = had_s * min(1.0, overhead_s / elapsed_s) if elapsed_s > 0.0 else 0.0
            sums.overhead_s += ours_s
            sums.execution_s += had_s - ours_s
        run.running -= 1
        for name in life.pools:
            self._touch(name, now)
        life.pools = ()
        if life.box is not None:
            self._boxes.leave(life.box, now)

    def settled(self, outcome: Outcome, number: int, now: float) -> Past | None:
        """What is left of it. None: nobody knew it."""
        life = self.by_id.pop(outcome.action, None)
        if life is None:
            return None
        self._leave(life, now, outcome.usage.overhead_s)
        action, account, status = life.action, life.account, outcome.status.value
        self.trajectories.left(life.trajectory, action.kind, outcome.status is Status.SUCCEEDED)
        account.live -= 1
        account.run.count(status)
        self._buckets.settled(account, outcome.waiting_s, outcome.execution_s, outcome.overhead_s)
        if life.box is not None:
            self._boxes.drop_if_gone(life.box.name, self._scheduler.places)
        granted_s = life.granted_s if life.granted_s >= 0.0 else now
        row = Row(
            number, action.id, action.run, action.trajectory, account.name, status, life.submitted_s, granted_s, now,
            outcome.waiting_s, outcome.execution_s, outcome.overhead_s, life.cpu, life.node,
        )  # fmt: skip
        asked, cpu_s = account.asked(action.demand), outcome.usage.cpu_s
        return Past(row, asked, outcome.reason, outcome.attempts, cpu_s, life.missed, tuple(life.notes))

    def concluded(self, action: Action, outcome: Outcome, number: int, now: float) -> Past:
        """One that was never here. It is counted by its status, and not among durations: nobody knows how long it
        took."""
        account, status = self._accounts.of(action), outcome.status.value
        account.run.count(status)
        row = Row(
            number, action.id, action.run, action.trajectory, account.name, status, now, now, now, 0.0, 0.0, 0.0, 0, "",
        )  # fmt: skip
        return Past(row, account.asked(action.demand), outcome.reason, outcome.attempts, 0.0, 0, ())
