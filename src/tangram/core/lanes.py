"""Lanes: the records of the queue. Who is there, and who waits behind whom.

Owns what changes about a live action (Entry), the sandbox it belongs to (Place), and the lanes in which actions wait.
Decides nothing. A lane holds the waiting actions of one run that ask for the same pools in about the same minimum
amounts on the same node, so that what stops its first action stops them all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from heapq import heapify, heappop, heappush

from tangram.core.action import Action, State, Status
from tangram.core.demand import LEARNED, Need
from tangram.core.ledger import Holding, PoolState, RunUsage
from tangram.core.messages import Grant
from tangram.core.profile import Estimate

STALE_SPARE = 64
"""Slots of those that left a lane are cleared in bulk when they outnumber the others by this many."""

LANES_SPARE = 256
"""Lanes of a run in which nobody waits are dropped when they outnumber the others by this many: they name nodes and
services, of which new ones come for ever."""

NEVER = 1_000_000_000
"""Runs that were never served are numbered from minus this up: all of them before all that were."""

LaneKey = tuple[tuple[Need, ...], bool, str, str, str, tuple[Need, ...]]
"""Needs and whether they are exact, else rounded down to powers of two; the elastic kind, the node, the service, and
what else its sandbox wants on the node that it has yet to choose."""


class Place:
    """A sandbox in the eyes of the scheduler: memory for its life, and the node that its first action chose."""

    __slots__ = ("actions", "id", "memory", "node", "released", "reserved", "run", "wants", "yields")

    def __init__(self, sandbox: str, memory: int, run: Run, *, yields: bool = False) -> None:
        self.id = sandbox
        self.memory = memory
        self.run = run
        self.yields = yields
        """As in Reserve."""
        self.node = ""
        """Empty until an action of it starts, unless the caller chose."""
        self.reserved: Holding | None = None
        self.actions: dict[str, Entry] = {}
        """Its live actions; the memory stays until the last of them is gone."""
        self.wants: tuple[Need, ...] = ()
        """While it has no node and several actions: per kind, the most that one of them needs."""
        self.released = False


class Entry:
    """One live action: everything that changes about it."""

    __slots__ = (
        "action", "attempts", "closed", "cpu_s", "done_s", "elastic", "estimate", "estimated_at", "fifo_lane",
        "grant", "granted_at", "heap_lane", "holdings", "key", "lane", "limit", "measured_at", "needs", "place",
        "progress_at", "reserved", "restoring", "review_at", "review_s", "run", "seq", "speed", "started_at",
        "state", "stop", "stranded_at", "submitted_at", "target", "unit_s", "use", "wanted", "width",
    )  # fmt: skip

    def __init__(self, action: Action, run: Run, place: Place | None, seq: int, now: float):
        self.action = action
        self.run = run
        self.place = place
        self.needs = action.demand.needs
        self.seq = seq
        self.state = State.QUEUED
        self.submitted_at = now
        self.elastic = action.demand.elastic
        self.attempts = 0
        self.closed: tuple[Waiters, ...] = ()
        """The pools that it closed to those behind it, until it starts or settles."""
        self.target = ""
        """The node whose pools an aged action without a place closed."""
        self.stranded_at: float | None = None
        """Since when no pool could hold it."""
        self.estimate: Estimate | None = None
        self.estimated_at = 0.0
        self.wanted = 0
        """Milli-cores that the policy would reserve by that estimate, while it waits; 0: not asked yet."""
        self.lane: Lane | None = None
        """Where it waits."""
        self.heap_lane: Lane | None = None
        self.fifo_lane: Lane | None = None
        """The lanes that still have a slot of it, which it takes again if it comes back."""
        self.key = 0.0
        """Its order within run and priority, as the policy wants it; smaller goes first."""
        self.stop: tuple[Status, str] | None = None
        """Why it was asked to stop; the outcome is decided from then on."""
        self.grant: Grant | None = None
        self.holdings: tuple[Holding, ...] = ()
        self.granted_at = 0.0
        self.started_at: float | None = None
        self.restoring = False
        """Its service was not loaded on the devices that it was granted."""
        self.review_s = 0.0
        """The policy wants to see it again when it has run this long; 0: never."""
        self.review_at = 0.0
        """When it is seen again; an earlier date that was set before no longer counts."""
        self.cpu_s = 0.0
        self.measured_at = 0.0
        """CPU seconds that this attempt had used when its manager last said so."""
        self.use: float | None = None
        """Cores that it kept busy between the last two measurements; None: nobody measured."""
        self.width = 0
        """Units of parallelism fixed at launch (milli-cores, devices)."""
        self.reserved = 0
        self.limit = 0
        """CPU quota in milli-cores."""
        self.done_s = 0.0
        """One-unit seconds of work done up to `progress_at`, by the believed speed-up; for policies that resize."""
        self.progress_at = 0.0
        self.speed = 1.0
        self.unit_s = 0.0
        """Integral of the units it could use, for learning its speed-up."""

    def __lt__(self, other: Entry) -> bool:
        return self.seq < other.seq

    @property
    def id(self) -> str:
        return self.action.id

    @property
    def node(self) -> str:
        """The node that it must run on; empty: any."""
        return self.place.node if self.place is not None else ""

    @property
    def is_guest(self) -> bool:
        """Whether it waits for the memory of a sandbox that it did not name, and that is not its own once it runs."""
        return self.place is not None and self.place.id != self.action.sandbox

    @property
    def memory(self) -> int:
        """What its sandbox needs on the node that it has yet to choose."""
        place = self.place
        return place.memory if place is not None and not place.node else 0

    def done_at(self, now: float) -> float:
        """One-unit seconds of work done by `now`."""
        return self.done_s + (now - self.progress_at) * self.speed

    def account(self, now: float) -> None:
        """Bring progress up to now. Called before its speed or its units change, and at its end."""
        if self.started_at is not None:
            elapsed = now - self.progress_at
            self.done_s += elapsed * self.speed
            self.unit_s += elapsed * min(self.limit, self.width)
        self.progress_at = now


class Lane:
    """Waiting actions of one run with equal needs on one node, of one service."""

    __slots__ = (
        "aged_seq", "behind", "blocked_on", "elastic", "fifo", "floor", "heap", "kinds", "lacks", "least", "node",
        "run", "service", "signature", "waiting",
    )  # fmt: skip

    def __init__(self, run: Run, kinds: tuple[str, ...], key: LaneKey) -> None:
        needs, exact, elastic, node, service, wants = key
        self.run = run
        known = all(units != LEARNED and (exact or units < 2) for _, units in needs)
        self.signature = (needs, node, wants) if known else None
        """Lanes of which this is equal, of whatever run and service, are stopped by the same; None: not known."""
        self.floor = needs[0][1] if len(needs) == 1 and needs[0][1] > 0 else 0
        """Of the only pool it asks for, no action of the lane starts with fewer units free; 0: not known."""
        self.least = self.floor
        """Units that must be free for its first action, while it is set aside for lack of them."""
        self.lacks: PoolState | None = None
        """The pool that has fewer than `least` units free, if that is all that keeps its first action waiting."""
        self.service = service
        self.kinds = kinds
        self.elastic = elastic
        """The kind of the elastic pool of its actions, or an empty string."""
        self.node = node
        """Empty: its first action that starts may choose."""
        self.heap: list[tuple[int, float, int, Entry]] = []
        self.fifo: deque[Entry] = deque()
        self.waiting = 0
        self.blocked_on: tuple[Waiters, ...] = ()
        """Where it is registered until something changes there; empty: it is open."""
        self.behind: tuple[Entry, ...] = ()
        """Those who go before it, if it was set aside because of them and not only because units are in use."""
        self.aged_seq = 0
        """The aged action that was its oldest when it was set aside last, which has closed what it lacks."""

    def push(self, entry: Entry) -> None:
        """It waits here, or does so again in its old turn."""
        entry.lane = self
        self.waiting += 1
        if entry.heap_lane is not self:
            entry.heap_lane = self
            heappush(self.heap, (-entry.action.priority, entry.key, entry.seq, entry))
            if self.heap[0][3] is entry:
                self.least = self.floor
                self.lacks = None
        if entry.fifo_lane is not self:
            entry.fifo_lane = self
            fifo = self.fifo
            if not fifo or fifo[-1].seq < entry.seq:
                fifo.append(entry)
            else:
                fifo.insert(bisect_right(fifo, entry), entry)

    def leave(self, entry: Entry) -> None:
        """It starts, settles or moves; its slots in heap and fifo are cleared when they come to the top."""
        entry.lane = self.lacks = None
        self.waiting -= 1
        slots_max = 2 * self.waiting + STALE_SPARE
        if len(self.heap) > slots_max or len(self.fifo) > slots_max:
            self.compact()

    def forget(self, entry: Entry) -> None:
        """One that has left will wait elsewhere: none of its slots stays. They are mostly at the top."""
        heap, fifo = self.heap, self.fifo
        while heap and heap[0][3].lane is not self:
            left = heappop(heap)[3]
            if left.heap_lane is self:
                left.heap_lane = None
        while fifo and fifo[0].lane is not self:
            left = fifo.popleft()
            if left.fifo_lane is self:
                left.fifo_lane = None
        if self in (entry.heap_lane, entry.fifo_lane):
            self.compact()

    def compact(self) -> None:
        """Clear all slots of those that have left."""
        for item in self.heap:
            if item[3].lane is not self and item[3].heap_lane is self:
                item[3].heap_lane = None
        for entry in self.fifo:
            if entry.lane is not self and entry.fifo_lane is self:
                entry.fifo_lane = None
        self.heap = [item for item in self.heap if item[3].lane is self]
        heapify(self.heap)
        self.fifo = deque(entry for entry in self.fifo if entry.lane is self)

    def first(self) -> tuple[int, float, int, Entry]:
        """The first in the policy's order. Only for a lane in which somebody waits."""
        heap = self.heap
        while heap[0][3].lane is not self:
            left = heappop(heap)[3]
            if left.heap_lane is self:
                left.heap_lane = None
        return heap[0]

    def oldest(self) -> Entry:
        """The one submitted first. Only for a lane in which somebody waits."""
        fifo = self.fifo
        while fifo[0].lane is not self:
            left = fifo.popleft()
            if left.fifo_lane is self:
                left.fifo_lane = None
        return fifo[0]


class Waiters:
    """Lanes to try again when something changes here: in a pool, or in any pool of a kind."""

    __slots__ = ("blockers", "lanes", "of_kind")

    def __init__(self, of_kind: Waiters | None = None) -> None:
        self.of_kind = of_kind
        """Those of the pool's kind; None if these are they."""
        self.lanes: dict[int, Lane] = {}
        self.blockers: dict[str, Entry] = {}
        """Per run, the action that closed the pool: nobody behind it in the order takes from it."""


class Run:
    """One tenant of fair share."""

    __slots__ = ("lanes", "lanes_max", "name", "open", "rests_since", "served", "usage", "waiting")

    def __init__(self, name: str, number: int, usage: RunUsage) -> None:
        self.name = name
        self.usage = usage
        self.served = number - NEVER
        """Which of all starts was the last of one of its actions. Of runs with equal shares the one served longest ago
        goes first: where an action takes a whole pool, all shares are equal whenever it is free."""
        self.lanes: dict[LaneKey, Lane] = {}
        self.lanes_max = LANES_SPARE
        """With so many of them those in which nobody waits are dropped."""
        self.open: dict[int, Lane] = {}
        """Lanes in which somebody waits and that nothing is known to block."""
        self.waiting = 0
        self.rests_since = -math.inf
        """While nobody waits: since when that is so."""
