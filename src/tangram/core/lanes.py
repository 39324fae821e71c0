"""The mutable records of the scheduler: Entry (a live action), SandboxState (its sandbox), Run, and the lanes of
the queue.

Owns everything that changes about a live action, the sandbox it belongs to and its run, and the lanes in which actions
wait. Decides nothing. A lane holds the waiting actions of one run that need the same pools in about the same
minimum amounts on the same node, so that what blocks its first action blocks them all. The top of its heap and of its
fifo is always a waiting action.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from heapq import heapify, heappop, heappush

from tangram.core.action import TRANSITIONS, Action, State, Status, wrong_transition
from tangram.core.demand import LEARNED, Need
from tangram.core.ledger import Holding, PoolState, RunUsage
from tangram.core.messages import Grant
from tangram.core.profile import Estimate
from tangram.core.recent_events import RecentEvents

STALE_SPARE = 64
"""Slots of actions that have left a lane are cleared in bulk when they outnumber the others by this many."""

LANES_SPARE = 256
"""Empty lanes of a run are dropped when they outnumber the others by this many. Lanes name nodes and services, and new
names keep coming."""

NEVER = 1_000_000_000
"""Runs that were never served are numbered from minus this up, so that they precede all that were."""

LaneKey = tuple[tuple[Need, ...], bool, str, str, str, tuple[Need, ...]]
"""The needs; whether they are exact (else rounded down to powers of two); the elastic kind; the node; the service; the
other needs of a sandbox that has no node yet."""


class SandboxState:
    """A sandbox as the scheduler sees it: its memory, and the node that its first action chose."""

    __slots__ = ("actions", "id", "memory", "node", "released", "reserved", "run", "wants", "yields")

    def __init__(self, sandbox: str, memory: int, run: Run, *, yields: bool = False) -> None:
        self.id = sandbox
        self.memory = memory
        self.run = run
        self.yields = yields
        """Whether it ends when other sandboxes need its memory. See Reserve."""
        self.node = ""
        """Empty until its first action starts, unless the caller chose the node."""
        self.reserved: Holding | None = None
        self.actions: dict[str, Entry] = {}
        """Its live actions. The memory is held until the last of them has settled."""
        self.wants: tuple[Need, ...] = ()
        """Without a node and with several actions: per kind, the largest need of any of them."""
        self.released = False


class Entry:
    """A live action: everything about it that changes."""

    __slots__ = (
        "action", "attempts", "closed", "cpu_s", "done_s", "elastic", "estimate", "estimated_at", "fifo_lane",
        "grant", "granted_at", "heap_lane", "holdings", "key", "lane", "learned_reserve", "limit", "measured_at",
        "needs", "progress_at", "reserved", "restoring", "review_at", "review_s", "run", "sandbox", "seq", "speed",
        "started_at", "state", "stop", "stranded_at", "submitted_at", "target", "unit_s", "use", "width",
    )  # fmt: skip

    def __init__(self, action: Action, run: Run, sandbox: SandboxState | None, seq: int, now: float):
        self.action = action
        self.run = run
        self.sandbox = sandbox
        self.needs = action.demand.needs
        self.seq = seq
        self.state = State.QUEUED
        self.submitted_at = now
        self.elastic = action.demand.elastic
        self.attempts = 0
        self.closed: tuple[Waiters, ...] = ()
        """The pools that it closed to the actions behind it."""
        self.target = ""
        """The node whose pools it closed as an aged action without a node."""
        self.stranded_at: float | None = None
        """Since when no pool could hold it. None if one could."""
        self.estimate: Estimate | None = None
        self.estimated_at = 0.0
        self.learned_reserve = 0
        """Milli-cores that the policy reserves by that estimate while the action waits; 0 before the first look."""
        self.lane: Lane | None = None
        """The lane in which it waits. None if it does not wait."""
        self.heap_lane: Lane | None = None
        self.fifo_lane: Lane | None = None
        """The lanes that still have a slot for it, which it takes again when it is requeued."""
        self.key = 0.0
        """Its order within run and priority, from the policy. Smaller goes first."""
        self.stop: tuple[Status, str] | None = None
        """Set once it is being stopped: the status and reason of its outcome."""
        self.grant: Grant | None = None
        self.holdings: tuple[Holding, ...] = ()
        self.granted_at = 0.0
        self.started_at: float | None = None
        self.restoring = False
        """Whether its service has to be loaded on the devices that it was granted."""
        self.review_s = 0.0
        """The policy reviews it once it has run this long. 0: never."""
        self.review_at = 0.0
        """The time of its next review. Reviews that were set for another time no longer count."""
        self.cpu_s = 0.0
        self.measured_at = 0.0
        """CPU seconds of this attempt at the last measurement."""
        self.use: float | None = None
        """Cores that it kept busy between the last two measurements. None without measurements."""
        self.width = 0
        """Units of parallelism fixed at launch (milli-cores, devices)."""
        self.reserved = 0
        self.limit = 0
        """CPU quota in milli-cores."""
        self.done_s = 0.0
        """One-unit seconds of work done up to `progress_at`, by the estimated speed-up. For policies that resize."""
        self.progress_at = 0.0
        self.speed = 1.0
        self.unit_s = 0.0
        """Integral over time of the units that it could use, for learning its speed-up."""

    def __lt__(self, other: Entry) -> bool:
        return self.seq < other.seq

    def transition(self, state: State, recent_events: RecentEvents) -> None:
        """Changes the state. Raises InvariantError, with the story of the action, if the table has no such
        transition."""
        if state not in TRANSITIONS[self.state]:
            raise recent_events.error(wrong_transition(self.state, state, self.id), self.id)
        self.state = state

    def expect(self, state: State, why: str, recent_events: RecentEvents) -> None:
        """Raises InvariantError, with the story of the action, if it is in another state."""
        if self.state is not state:
            raise recent_events.error(f"{self.id} is {self.state.value}, not {state.value}, when {why}", self.id)

    @property
    def id(self) -> str:
        return self.action.id

    @property
    def node(self) -> str:
        """The node on which it must run. Empty: any."""
        return self.sandbox.node if self.sandbox is not None else ""

    @property
    def awaits_instance(self) -> bool:
        """Whether it waits for the memory of a sandbox that it does not belong to, such as a new function instance."""
        return self.sandbox is not None and self.sandbox.id != self.action.sandbox

    @property
    def memory(self) -> int:
        """MiB that its sandbox needs, if that has no node yet."""
        sandbox = self.sandbox
        return sandbox.memory if sandbox is not None and not sandbox.node else 0

    def reserve_on(self, pool: PoolState) -> int:
        """Its learned reserve, or the whole pool if that is smaller."""
        units = self.learned_reserve
        return units if units <= pool.total else max(1, pool.total)

    def done_at(self, now: float) -> float:
        """One-unit seconds of work done by `now`."""
        return self.done_s + (now - self.progress_at) * self.speed

    def account(self, now: float) -> None:
        """Brings progress up to now. Called before its speed or its units change, and at its end."""
        if self.started_at is not None:
            elapsed = now - self.progress_at
            self.done_s += elapsed * self.speed
            self.unit_s += elapsed * min(self.limit, self.width)
        self.progress_at = now


class Lane:
    """Waiting actions of one run with equal needs on one node and of one service."""

    __slots__ = (
        "aged_seq", "behind", "blocked_on", "elastic", "fifo", "floor", "heap", "kinds", "least", "node", "run",
        "service", "short_pool", "signature", "waiting",
    )  # fmt: skip

    def __init__(self, run: Run, kinds: tuple[str, ...], key: LaneKey) -> None:
        needs, exact, elastic, node, service, wants = key
        self.run = run
        known = all(units != LEARNED and (exact or units < 2) for _, units in needs)
        self.signature = (needs, node, wants) if known else None
        """Lanes of all runs and services with the same signature are short of the same pools. None if not known."""
        self.floor = needs[0][1] if len(needs) == 1 and needs[0][1] > 0 else 0
        """If it needs a single pool: no action of the lane starts with fewer free units. 0 if not known."""
        self.least = self.floor
        """The free units that its first action needs, while the lane is set aside until they are free."""
        self.short_pool: PoolState | None = None
        """The pool that has fewer than `least` free units, if nothing else blocks the first action."""
        self.service = service
        self.kinds = kinds
        self.elastic = elastic
        """The elastic pool kind of its actions, or an empty string."""
        self.node = node
        """Empty: any node."""
        self.heap: list[tuple[int, float, int, Entry]] = []
        self.fifo: deque[Entry] = deque()
        self.waiting = 0
        self.blocked_on: tuple[Waiters, ...] = ()
        """Where it is registered until something changes there. Empty if the lane is open."""
        self.behind: tuple[Entry, ...] = ()
        """The actions ahead of it that block it by what they closed."""
        self.aged_seq = 0
        """The sequence number of the aged action that was its oldest when it was last set aside."""

    def push(self, entry: Entry) -> None:
        """Adds an action. One that was here before takes its old turn."""
        entry.lane = self
        self.waiting += 1
        if entry.heap_lane is not self:
            entry.heap_lane = self
            heappush(self.heap, (-entry.action.priority, entry.key, entry.seq, entry))
            if self.heap[0][3] is entry:
                self.least = self.floor
                self.short_pool = None
        if entry.fifo_lane is not self:
            entry.fifo_lane = self
            fifo = self.fifo
            if not fifo or fifo[-1].seq < entry.seq:
                fifo.append(entry)
            else:
                fifo.insert(bisect_right(fifo, entry), entry)

    def leave(self, entry: Entry) -> None:
        """Removes an action that starts, settles or moves. Its slots below the tops are cleared later, in bulk."""
        entry.lane = self.short_pool = None
        self.waiting -= 1
        slots_max = 2 * self.waiting + STALE_SPARE
        if len(self.heap) > slots_max or len(self.fifo) > slots_max:
            self.compact()
        else:
            self._clear_tops()

    def _clear_tops(self) -> None:
        """Removes stale slots from the tops of heap and fifo."""
        heap, fifo = self.heap, self.fifo
        while heap and heap[0][3].lane is not self:
            stale = heappop(heap)[3]
            if stale.heap_lane is self:
                stale.heap_lane = None
        while fifo and fifo[0].lane is not self:
            stale = fifo.popleft()
            if stale.fifo_lane is self:
                stale.fifo_lane = None

    def forget(self, entry: Entry) -> None:
        """Clears the slots of an action that has left and will wait in another lane."""
        if self in (entry.heap_lane, entry.fifo_lane):
            self.compact()

    def compact(self) -> None:
        """Clears all stale slots."""
        for item in self.heap:
            if item[3].lane is not self and item[3].heap_lane is self:
                item[3].heap_lane = None
        for entry in self.fifo:
            if entry.lane is not self and entry.fifo_lane is self:
                entry.fifo_lane = None
        self.heap = [item for item in self.heap if item[3].lane is self]
        heapify(self.heap)
        self.fifo = deque(entry for entry in self.fifo if entry.lane is self)

    def first(self) -> Entry:
        """The first in the policy's order. Only for a lane with waiting actions."""
        return self.heap[0][3]

    def oldest(self) -> Entry:
        """The one submitted first. Only for a lane with waiting actions."""
        return self.fifo[0]


class Waiters:
    """The lanes to try again when a pool changes, or any pool of a kind, and the actions that closed it."""

    __slots__ = ("blockers", "kind_waiters", "lanes")

    def __init__(self, kind_waiters: Waiters | None = None) -> None:
        self.kind_waiters = kind_waiters
        """The waiters of the pool's kind. None if these are themselves of a kind."""
        self.lanes: dict[int, Lane] = {}
        self.blockers: dict[str, Entry] = {}
        """Per run, the action that closed the pool. No action behind it in the order takes from the pool."""


class Run:
    """A run. Fair share divides pools among runs."""

    __slots__ = ("lanes", "lanes_max", "name", "open", "rests_since", "served", "usage", "waiting")

    def __init__(self, name: str, number: int, usage: RunUsage) -> None:
        self.name = name
        self.usage = usage
        self.served = number - NEVER
        """The number of its last start among all starts. Of runs with equal shares the one served longest ago goes
        first: where an action takes a whole pool, all shares are equal whenever that is free."""
        self.lanes: dict[LaneKey, Lane] = {}
        self.lanes_max = LANES_SPARE
        """Empty lanes are dropped when there are this many lanes."""
        self.open: dict[int, Lane] = {}
        """Lanes with waiting actions that are not known to be blocked."""
        self.waiting = 0
        self.rests_since = -math.inf
        """Since when no action of it waits, while that is so."""
