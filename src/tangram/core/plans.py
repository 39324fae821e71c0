"""Plans: a round of decisions, carried out one by one.

Owns the way from a policy's decision to the effects that managers see. Writes each decision before it asks for the
next, so that the policy always sees what is true. A wrong decision raises InvariantError with the name of the policy
and the story of its action, before it is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tangram.core.action import State
from tangram.core.demand import GPU, MEMORY
from tangram.core.lanes import Entry, Place
from tangram.core.messages import Grant, NodeState, Resize, Restore, Share, Start
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
        self._resized: dict[str, int] = {}
        """Per action that the present event resizes, where among its effects that stands."""

    def carry_out(self) -> None:
        """A round; and another, as long as what one started lets somebody else go first."""
        queue, now = self._queue, self._scheduler.now
        self._resized.clear()
        self._round()
        while queue.behind and queue.open_overtaken(now):
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
            if self._aside:
                self._grants.let_go()
                self._line_up()
            begun = begun and bool(active)
        while active:
            run = next(iter(active.values()))
            self._snapshot.pass_over(next(iter(run.open.values())))
        for pool in self._queue.changed.values():
            pool.looked_at_free = pool.free
        self._queue.changed.clear()
        self._queue.vacated.clear()

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
            if error.story:
                raise
            name = f"policy {self._scheduler.policy.name}"
            what = error.what if error.what.startswith(name) else f"{name}: {error.what}"
            story = self._scheduler.story(entry.id) if isinstance(entry, Entry) else []
            raise InvariantError(what, story) from error
        return False

    # ---- what a decision may say ----

    def _require_begin(self, decision: Begin) -> Entry:
        """Whole numbers of units and a time: anything else would be found out later, by somebody else."""
        entry = decision.entry
        if type(entry) is not Entry:
            _entry(decision)
        units, limit, width, riders = decision.units, decision.limit, decision.width, decision.riders
        if not (type(units) is type(limit) is type(width) is int and units >= 0 and limit >= 0 and width >= 0):
            raise InvariantError(
                f"plan begins {decision.entry.id} with units {units!r}, limit {limit!r} and width {width!r}, "
                "expected whole numbers, at least 0"
            )
        review_s = decision.review_s
        if type(review_s) is not float or not 0.0 <= review_s < math.inf:
            _require_review(decision)
        if not riders:
            return entry
        if type(riders) is not tuple or not all(type(rider) is Entry for rider in riders):
            raise InvariantError(f"plan begins {decision.entry.id} with riders {riders!r}, expected waiting entries")
        for rider in riders:
            self._require_node(rider, decision.node)
        return entry

    def _require_node(self, entry: Entry, node: str) -> None:
        """May the action run there?"""
        place = entry.place
        if place is None or not node or place.node != node:
            self._require_open(entry, node)
        kinds = self._scheduler.ledger.kinds
        for kind, _ in entry.needs:
            pools = kinds.get(kind)
            if pools is None or (node not in pools and "" not in pools):
                raise InvariantError(f"plan starts {entry.id} on {node!r}, which has no {kind}")

    def _require_open(self, entry: Entry, node: str) -> None:
        """May an action run there that does not stand there? Whoever does goes on, even while its node drains."""
        ledger, place = self._scheduler.ledger, entry.place
        if node == "":
            return
        if type(node) is not str or node not in ledger.nodes:
            raise InvariantError(f"plan starts {entry.id} on {node!r}, expected a node that is known")
        if place is not None and place.node:
            raise InvariantError(
                f"plan starts an action of sandbox {place.id} on {node}, but it stands on {place.node}"
            )
        if ledger.nodes[node] is not NodeState.UP:
            raise InvariantError(f"plan starts {entry.id} on {node}, which is {ledger.nodes[node].value}")
        if entry.memory and node not in ledger.kinds.get(MEMORY, {}):
            raise InvariantError(f"plan starts {entry.id} on {node}, which has no memory for its sandbox")

    # ---- doing it ----

    def _begin(self, decision: Begin) -> None:
        entry, node = self._require_begin(decision), decision.node
        if entry.state is not State.QUEUED:
            self._scheduler.expect(entry, State.QUEUED, "plan starts it")
        if self._aside:
            self._grants.let_go()
        offered = self._snapshot.last_offer
        if offered is None or offered.entry is not entry or offered.node != node:
            self._require_node(entry, node)
        if not self._aside or self._aside.pop(entry.id, None) is None:
            self._queue.dequeue(entry)
        place = entry.place
        if place is not None and node and not place.node:
            self._settle_down(place, node)
        shares = self._grants.take(entry, decision)
        self._launch(entry, node, shares, entry.id if decision.riders else "")
        entry.review_s = decision.review_s
        for rider in decision.riders:
            shares = self._grants.ride(rider, entry, node)
            self._queue.dequeue(rider)
            self._launch(rider, node, shares, entry.id)
        if entry.is_guest:
            self._places.part(entry)

    def _settle_down(self, place: Place, node: str) -> None:
        """The first action of a sandbox has chosen its node; the others wait for that node from now on."""
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
        entry = _entry(decision)
        if type(decision.reserved) is not int or type(decision.limit) is not int:
            raise InvariantError(
                f"plan resizes {entry.id} to {decision.reserved!r} (limit {decision.limit!r}), expected whole numbers"
            )
        if decision.review_s:
            _require_review(decision)
            self._scheduler.review(entry, decision.review_s)
        before = entry.reserved
        if decision.reserved == before and decision.limit == entry.limit:
            return
        pool = self._grants.adjust(decision, self._scheduler.now)
        if entry.reserved < before:
            self._queue.wake(pool)
        effect = Resize(action=entry.id, pool=pool.name, reserved=decision.reserved, limit=decision.limit)
        effects = self._scheduler.effects
        # Who makes room for somebody and gets some of it back is resized once, to where it ends up.
        place = self._resized.setdefault(entry.id, len(effects))
        effects[place : place + 1] = [effect]

    def _hold(self, decision: Hold) -> None:
        entry = _entry(decision)
        self._scheduler.expect(entry, State.QUEUED, "plan holds units for it")
        self._require_node(entry, decision.node)
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
        pool = self._scheduler.ledger.kinds.get(GPU, {}).get(decision.node)
        if pool is None:
            raise InvariantError(f"plan preloads {decision.service} on {decision.node!r}, which has no {GPU}")
        devices = decision.devices
        if type(devices) is not tuple or not devices or devices not in pool.free_places(len(devices)):
            raise InvariantError(
                f"plan preloads {decision.service} on devices {devices!r} of {decision.node}, expected a free chunk"
            )
        # From now on, so that a call that comes meanwhile waits for it there.
        self._residents.add(decision.service, decision.node, devices)
        self._scheduler.effects.append(Restore(service=decision.service, node=decision.node, devices=devices))


def _entry(decision: Begin | Adjust | Hold) -> Entry:
    entry = decision.entry
    if type(entry) is not Entry:
        raise InvariantError(f"plan names {entry!r} in a {type(decision).__name__}, expected an entry of the snapshot")
    return entry


def _require_review(decision: Begin | Adjust) -> None:
    after_s = decision.review_s
    if type(after_s) not in (float, int) or not 0.0 <= after_s < math.inf:
        raise InvariantError(f"plan reviews {decision.entry.id} after {after_s!r}, expected a finite number of seconds")
