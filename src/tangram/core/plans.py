"""Plans: a round of decisions, carried out one by one.

Owns the way from a policy's decision to the effects that managers see. Writes each decision before it asks for the
next, so that the policy always sees what is true. A wrong decision raises InvariantError with the story of its action.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tangram.core.action import State
from tangram.core.demand import GPU
from tangram.core.lanes import Entry, Place
from tangram.core.messages import Grant, Resize, Restore, Share, Start
from tangram.core.policies.base import Adjust, Begin, Decision, Hold, Preload
from tangram.errors import InvariantError

if TYPE_CHECKING:
    from tangram.core.scheduler import Scheduler


class Plans:
    """What a policy decides, done."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._snapshot = scheduler.snapshot
        self._grants = scheduler.grants
        self._places = scheduler.places
        self._residents = scheduler.residents
        self._aside: dict[str, Entry] = {}
        """Candidates of the present plan whose minimum is kept aside."""

    def carry_out(self) -> None:
        """A round; and another, if what it started put somebody first for whom an idle pool was not kept."""
        self._round()
        while self._queue.kept and self._snapshot.open_kept():
            self._round()

    def _round(self) -> None:
        """Ask the policy, and write each decision before asking for the next. A policy that stopped while it still
        started actions is asked again; what it does not look at counts as passed over."""
        active = self._queue.active
        begun = True
        while begun:
            begun = False
            for decision in self._decisions():
                begun = self._apply(decision) or begun
            self._grants.let_go()
            if self._aside:
                self._line_up()
            begun = begun and bool(active)
        while active:
            run = next(iter(active.values()))
            self._snapshot.pass_over(next(iter(run.open.values())))
        for pool in self._queue.changed.values():
            pool.looked_at_free = pool.free
        self._queue.changed.clear()

    def _decisions(self) -> Iterator[Decision]:
        policy = self._scheduler.policy
        plan = policy.plan(self._snapshot)
        try:
            return iter(plan)
        except TypeError:
            what = f"policy {policy.name} planned {plan!r}, expected an iterator of decisions"
            raise InvariantError(what) from None

    def _apply(self, decision: Decision) -> bool:
        """Write one decision. True if an action was started. A wrong one stops everything, with the story."""
        try:
            if type(decision) is Begin:
                self._begin(decision)
                return True
            if type(decision) is Adjust:
                self._adjust(decision)
            elif type(decision) is Hold:
                self._hold(decision)
            elif type(decision) is Preload:
                self._preload(decision)
            else:
                name, expected = self._scheduler.policy.name, "Begin, Hold, Adjust or Preload"
                raise InvariantError(f"policy {name} decided {decision!r}, expected {expected}")
        except InvariantError as error:
            entry = getattr(decision, "entry", None)
            if error.story or not isinstance(entry, Entry):
                raise
            raise self._scheduler.bug(error.what, entry) from error
        return False

    def _begin(self, decision: Begin) -> None:
        entry, node = decision.entry, decision.node
        if entry.state is not State.QUEUED:
            self._scheduler.expect(entry, State.QUEUED, "plan starts it")
        if self._aside:
            self._grants.let_go()
        if not self._aside or self._aside.pop(entry.id, None) is None:
            self._queue.dequeue(entry)
        place = entry.place
        if place is not None and place.node != node and node:
            self._settle_down(place, node)
        shares = self._grants.take(entry, decision)
        self._launch(entry, node, shares, entry.id if decision.riders else "")
        entry.review_s = decision.review_s
        for rider in decision.riders:
            shares = self._grants.ride(rider, entry, node)
            self._queue.dequeue(rider)
            self._launch(rider, node, shares, entry.id)

    def _settle_down(self, place: Place, node: str) -> None:
        """The first action of a sandbox has chosen its node; the others wait for that node from now on."""
        if place.node:
            raise InvariantError(
                f"plan starts an action of sandbox {place.id} on {node}, but it stands on {place.node}"
            )
        waiting = [entry for entry in place.actions.values() if entry.lane is not None]
        for entry in waiting:
            self._queue.dequeue(entry)
        self._places.settle_down(place, node)
        for entry in waiting:
            self._scheduler.enqueue_again(entry)

    def _launch(self, entry: Entry, node: str, shares: tuple[Share, ...], batch: str) -> None:
        entry.attempts += 1
        entry.granted_at = entry.progress_at = self._scheduler.now
        entry.done_s = entry.unit_s = entry.review_s = 0.0
        entry.speed = 1.0
        entry.grant = Grant(entry.id, node, shares, entry.width, entry.attempts, batch)
        self._scheduler.move(entry, State.STARTING)
        self._queue.serve(entry.run)
        self._scheduler.effects.append(Start(action=entry.action, grant=entry.grant))

    def _adjust(self, decision: Adjust) -> None:
        entry = decision.entry
        if decision.review_s:
            self._scheduler.review(entry, decision.review_s)
        before = entry.reserved
        if decision.reserved == before and decision.limit == entry.limit:
            return
        pool = self._grants.adjust(decision, self._scheduler.now)
        if entry.reserved < before:
            self._queue.wake(pool)
        effect = Resize(action=entry.id, pool=pool.name, reserved=decision.reserved, limit=decision.limit)
        self._scheduler.effects.append(effect)

    def _hold(self, decision: Hold) -> None:
        entry = decision.entry
        self._scheduler.expect(entry, State.QUEUED, "plan holds units for it")
        self._grants.keep_aside(decision)
        self._queue.dequeue(entry)
        self._aside[entry.id] = entry

    def _line_up(self) -> None:
        """What was held and not begun goes back to its turn, and is tried again when something changes."""
        left = list(self._aside.values())
        self._aside = {}
        for entry in left:
            self._queue.enqueue(entry)
        for entry in left:
            if entry.lane is not None and not entry.lane.blocked_on:
                self._snapshot.pass_over(entry.lane)

    def _preload(self, decision: Preload) -> None:
        pool = self._snapshot.pool(GPU, decision.node)
        devices = pool.peek_devices(decision.units, self._residents.chunks(decision.service, decision.node))
        self._scheduler.effects.append(Restore(service=decision.service, node=decision.node, devices=devices))
