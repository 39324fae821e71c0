"""Plans: a scheduling round, one decision after the other.

Turns the decisions of a policy into grants and effects. Applies each decision before it takes the next, so the policy
always reads the current state. A wrong decision raises InvariantError with the name of the policy and the story of its
action, before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tangram.core.action import State
from tangram.core.demand import GPU, LEARNED, MEMORY
from tangram.core.grants import Grants
from tangram.core.lanes import Entry, SandboxState
from tangram.core.ledger import Ledger
from tangram.core.messages import Effect, Grant, NodeState, Resize, Restore, Share, Start
from tangram.core.offers import Offers
from tangram.core.policies.base import Adjust, Begin, Decision, Hold, Preload, Retry, SchedulingPolicy
from tangram.core.profile import ProfileStore
from tangram.core.queue import Queue
from tangram.core.recent_events import RecentEvents
from tangram.core.residents import Residents
from tangram.core.sandbox_states import SandboxStates
from tangram.core.snapshot import ESTIMATE_FRESH_S, Round, Snapshot
from tangram.core.timers import PoolRetries, Reviews
from tangram.errors import InvariantError


class Plans:
    """Calls the policy in each scheduling round, checks its decisions and applies them."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        queue: Queue,
        grants: Grants,
        sandboxes: SandboxStates,
        residents: Residents,
        snapshot: Snapshot,
        current_round: Round,
        offers: Offers,
        policy: SchedulingPolicy,
        profiles: ProfileStore,
        reviews: Reviews,
        retries: PoolRetries,
        recent_events: RecentEvents,
        enqueue: Callable[[Entry], None],
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._grants = grants
        self._sandboxes = sandboxes
        self._residents = residents
        self._snapshot = snapshot
        self._current = current_round
        self._offers = offers
        self._policy = policy
        self._profiles = profiles
        self._reviews = reviews
        self._retries = retries
        self._recent_events = recent_events
        self._enqueue = enqueue
        """Returns a waiting action to the queue."""
        self._effects: list[Effect] = []
        """The effects of the current event."""
        self._held: dict[str, Entry] = {}
        """The candidates of the current plan whose minimum is held."""
        self._resized: dict[str, int] = {}
        """Per action that was resized for the current event, the index of that effect."""

    def execute(self, effects: list[Effect]) -> None:
        """Runs a round, and further ones while a start lets another run go first."""
        queue, now = self._queue, self._ledger.now
        self._effects = effects
        self._resized.clear()
        self._round()
        while queue.behind and queue.open_overtaken(now):
            self._round()

    def _round(self) -> None:
        """Applies each decision of the policy before it takes the next. Calls the policy again if its plan ended after
        a start while actions are waiting to be offered. Actions that it then did not look at count as passed over."""
        active = self._queue.active
        has_begun = True
        while has_begun:
            has_begun = False
            reviews, now = self._reviews, self._ledger.now
            self._current.open(self._offers.candidates, reviews.take(now) if reviews.due_at <= now else ())
            try:
                for decision in self._decisions():
                    has_begun = self._apply(decision) or has_begun
            finally:
                self._current.close()
            if self._held:
                self._grants.release_minimums()
                self._requeue_held()
            has_begun = has_begun and bool(active)
        while active:
            run = next(iter(active.values()))
            self._offers.pass_over(next(iter(run.open.values())))
        for pool in self._queue.changed.values():
            pool.free_at_last_round = pool.free
        self._queue.changed.clear()
        self._queue.vacated.clear()

    def _decisions(self) -> Iterator[Decision]:
        policy = self._policy
        plan = policy.plan(self._snapshot)
        try:
            return iter(plan)
        except TypeError:
            raise InvariantError(f"policy {policy.name} planned {plan!r}, expected an iterator of decisions") from None

    def _apply(self, decision: Decision) -> bool:
        """Applies one decision and returns whether it started an action. Raises InvariantError, with the story of the
        action, if the decision is wrong."""
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
            elif type(decision) is Retry:
                self._retry(decision)
            else:
                name, expected = self._policy.name, "Begin, Hold, Adjust, Preload or Retry"
                raise InvariantError(f"policy {name} decided {decision!r}, expected {expected}")
        except InvariantError as error:
            entry = getattr(decision, "entry", None)
            if error.story:
                raise
            name = f"policy {self._policy.name}"
            message = error.what if error.what.startswith(name) else f"{name}: {error.what}"
            story = self._recent_events.story(entry.id) if isinstance(entry, Entry) else []
            raise InvariantError(message, story) from error
        return False

    # ---- checking a decision ----

    def _require_begin(self, decision: Begin) -> Entry:
        """Checks the types and ranges of a Begin here, where the policy can be named. Returns its entry."""
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
            self._renew_reserve(rider, decision.node)
        return entry

    def _renew_estimate(self, entry: Entry) -> None:
        """Renews the estimate of an action that starts: an elastic action keeps it while it runs."""
        now = self._ledger.now
        if entry.estimate is None or now - entry.estimated_at > ESTIMATE_FRESH_S:
            entry.estimate, entry.estimated_at = self._profiles.estimate(entry.action), now

    def _renew_reserve(self, entry: Entry, node: str) -> None:
        """Renews the learned reserve of an action that was not offered in this round."""
        for kind, units in entry.needs:
            if units == LEARNED:
                self._offers.renew_reserve(entry, self._ledger.pool_on(kind, node))

    def _require_node(self, entry: Entry, node: str) -> None:
        """Raises InvariantError if the action may not run on the node."""
        sandbox = entry.sandbox
        if sandbox is None or not node or sandbox.node != node:
            self._require_open(entry, node)
        kinds = self._ledger.kinds
        for kind, _ in entry.needs:
            pools = kinds.get(kind)
            if pools is None or (node not in pools and "" not in pools):
                raise InvariantError(f"plan starts {entry.id} on {node!r}, which has no {kind}")

    def _require_open(self, entry: Entry, node: str) -> None:
        """Raises InvariantError if an action that has no place on the node may not start there. Sandboxes that are on
        the node may continue even while it drains."""
        ledger, sandbox = self._ledger, entry.sandbox
        if node == "":
            return
        if type(node) is not str or node not in ledger.nodes:
            raise InvariantError(f"plan starts {entry.id} on {node!r}, expected a known node")
        if sandbox is not None and sandbox.node:
            raise InvariantError(
                f"plan starts an action of sandbox {sandbox.id} on {node}, but the sandbox is on {sandbox.node}"
            )
        if ledger.nodes[node] is not NodeState.UP:
            raise InvariantError(f"plan starts {entry.id} on {node}, which is {ledger.nodes[node].value}")
        if entry.memory and node not in ledger.kinds.get(MEMORY, {}):
            raise InvariantError(f"plan starts {entry.id} on {node}, which has no memory for its sandbox")

    # ---- applying a decision ----

    def _begin(self, decision: Begin) -> None:
        entry, node = self._require_begin(decision), decision.node
        if entry.state is not State.QUEUED:
            entry.expect(State.QUEUED, "plan starts it", self._recent_events)
        if self._held:
            self._grants.release_minimums()
        offered = self._offers.last
        if offered is None or offered.entry is not entry or offered.node != node:
            self._require_node(entry, node)
            self._renew_reserve(entry, node)
        if not self._held or self._held.pop(entry.id, None) is None:
            self._queue.dequeue(entry)
        sandbox = entry.sandbox
        if sandbox is not None and node and not sandbox.node:
            self._assign_node(sandbox, node)
        shares = self._grants.take(entry, decision)
        self._launch(entry, node, shares, entry.id if decision.riders else "")
        entry.review_s = decision.review_s
        for rider in decision.riders:
            shares = self._grants.join_batch(rider, entry, node)
            self._queue.dequeue(rider)
            self._launch(rider, node, shares, entry.id)
        if entry.awaits_instance:
            self._sandboxes.detach(entry)

    def _assign_node(self, sandbox: SandboxState, node: str) -> None:
        """Places a sandbox on the node of its first action. Its other actions wait for that node from now on."""
        waiting = [entry for entry in sandbox.actions.values() if entry.lane is not None]
        for entry in waiting:
            self._queue.dequeue(entry)
        self._sandboxes.assign_node(sandbox, node)
        for entry in waiting:
            self._enqueue(entry)

    def _launch(self, entry: Entry, node: str, shares: tuple[Share, ...], batch: str) -> None:
        entry.attempts += 1
        entry.granted_at = entry.progress_at = self._ledger.now
        entry.done_s = entry.unit_s = entry.review_s = 0.0
        entry.speed = 1.0
        if entry.elastic:
            self._renew_estimate(entry)
        entry.grant = Grant(entry.id, node, shares, entry.width, entry.attempts, batch)
        entry.transition(State.STARTING, self._recent_events)
        self._queue.count_start(entry.run)
        self._effects.append(Start(action=entry.action, grant=entry.grant))

    def _adjust(self, decision: Adjust) -> None:
        entry = _entry(decision)
        if type(decision.reserved) is not int or type(decision.limit) is not int:
            raise InvariantError(
                f"plan resizes {entry.id} to {decision.reserved!r} (limit {decision.limit!r}), expected whole numbers"
            )
        if decision.review_s:
            _require_review(decision)
            self._reviews.set(entry, self._ledger.now + decision.review_s)
        before = entry.reserved
        if decision.reserved == before and decision.limit == entry.limit:
            return
        pool = self._grants.adjust(decision, self._ledger.now)
        if entry.reserved < before:
            self._queue.wake(pool)
        effect = Resize(action=entry.id, pool=pool.name, reserved=decision.reserved, limit=decision.limit)
        effects = self._effects
        # An action that is resized twice for one event gets a single Resize, with the final size.
        index = self._resized.setdefault(entry.id, len(effects))
        effects[index : index + 1] = [effect]

    def _hold(self, decision: Hold) -> None:
        entry = _entry(decision)
        entry.expect(State.QUEUED, "plan holds units for it", self._recent_events)
        self._require_node(entry, decision.node)
        self._renew_reserve(entry, decision.node)
        self._renew_estimate(entry)
        self._grants.hold_minimum(decision)
        self._queue.dequeue(entry)
        self._held[entry.id] = entry

    def _requeue_held(self) -> None:
        """Returns the actions that were held but not begun to their turn, and sets their lanes aside."""
        held = list(self._held.values())
        self._held = {}
        for entry in held:
            self._queue.enqueue(entry)
        for entry in held:
            if entry.lane is not None and not entry.lane.blocked_on:
                self._offers.pass_over(entry.lane)

    def _retry(self, decision: Retry) -> None:
        pool, after_s = self._ledger.pools.get(decision.pool), decision.after_s
        if pool is None:
            raise InvariantError(f"plan retries {decision.pool!r}, expected the name of a pool")
        if type(after_s) not in (float, int) or not 0.0 < after_s < math.inf:
            raise InvariantError(f"plan retries {pool.name} after {after_s!r}, expected a positive number of seconds")
        self._retries.after(pool, after_s)

    def _preload(self, decision: Preload) -> None:
        pool = self._ledger.kinds.get(GPU, {}).get(decision.node)
        if pool is None:
            raise InvariantError(f"plan preloads {decision.service} on {decision.node!r}, which has no {GPU}")
        devices = decision.devices
        if type(devices) is not tuple or not devices or devices not in pool.free_device_sets(len(devices)):
            raise InvariantError(
                f"plan preloads {decision.service} on devices {devices!r} of {decision.node}, expected a free chunk"
            )
        # Counts as loaded at once, so that a call that arrives during the restore waits for this copy.
        self._residents.add(decision.service, decision.node, devices)
        self._effects.append(Restore(service=decision.service, node=decision.node, devices=devices))


def _entry(decision: Begin | Adjust | Hold) -> Entry:
    entry = decision.entry
    if type(entry) is not Entry:
        raise InvariantError(f"plan names {entry!r} in a {type(decision).__name__}, expected an entry of the snapshot")
    return entry


def _require_review(decision: Begin | Adjust) -> None:
    after_s = decision.review_s
    if type(after_s) not in (float, int) or not 0.0 <= after_s < math.inf:
        raise InvariantError(f"plan reviews {decision.entry.id} after {after_s!r}, expected a finite number of seconds")
