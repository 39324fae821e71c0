"""The queue: who waits, in which order, and what each one waits for.

Owns the entries of live actions, the lanes in which they wait, the runs and the sandboxes' places. Decides nothing.
A lane holds the waiting actions of one run that ask for the same pools in the same minimum amounts on the same node,
so that what stops its first action stops them all; the cost of a scheduling round grows with the lanes, not with the
actions that wait in them.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from tangram.core.action import Action, State, Status
from tangram.core.ledger import Holding, RunUsage
from tangram.core.messages import Grant
from tangram.core.profile import Estimate

STALE_SPARE = 64
"""Entries that left a lane are removed lazily; the heap is rebuilt when they outnumber the others by this many."""

Need = tuple[str, int]
"""A pool kind and the minimum of it; -1 for CPU that is learned."""

LEARNED = -1

LaneKey = tuple[tuple[Need, ...], str, str]
"""Needs in coarse amounts, the elastic kind, and the node."""


def lane_key(needs: tuple[Need, ...], elastic: str, node: str) -> LaneKey:
    """Amounts are coarsened to powers of two, so that arbitrary token counts do not make a lane each."""
    return tuple((kind, units.bit_length() if units >= 0 else units) for kind, units in needs), elastic, node


class Place:
    """A sandbox in the eyes of the scheduler: memory reserved for its life, and the node that its first action chose."""

    __slots__ = ("actions", "finished", "id", "memory", "node", "released", "reserved", "run")

    def __init__(self, sandbox: str, memory: int, run: Run) -> None:
        self.id = sandbox
        self.memory = memory
        self.run = run
        self.node = ""
        """Empty until an action of it starts, unless the caller chose."""
        self.reserved: Holding | None = None
        self.actions: dict[str, Entry] = {}
        """Its live actions; the memory stays until the last of them is gone."""
        self.finished = 0
        self.released = False


class Entry:
    """One live action: everything that changes about it."""

    __slots__ = (
        "action", "aged", "attempts", "closed", "done_s", "elastic", "estimate", "estimated_at", "grant", "granted_at",
        "holdings", "key", "lane", "limit", "needs", "place", "progress_at", "reserved", "run", "seq", "speed",
        "started_at", "state", "stop", "submitted_at", "unit_s", "width",
    )  # fmt: skip

    def __init__(self, action: Action, run: Run, place: Place | None, needs: tuple[Need, ...], seq: int, now: float):
        self.action = action
        self.run = run
        self.place = place
        self.needs = needs
        self.seq = seq
        self.state = State.QUEUED
        self.submitted_at = now
        self.elastic = action.demand.elastic
        self.attempts = 0
        self.aged = False
        """It waited past `ageing_s` and could not start: nothing later of its run overtakes it."""
        self.closed: list[Waiters] = []
        """The pools that it closed to those behind it, until it starts or settles."""
        self.estimate: Estimate | None = None
        self.estimated_at = 0.0
        self.lane: Lane | None = None
        self.key = 0.0
        """Its order within run and priority, as the policy wants it; smaller goes first."""
        self.stop: tuple[Status, str] | None = None
        """Why it was asked to stop; the outcome is decided from then on."""
        self.grant: Grant | None = None
        self.holdings: tuple[Holding, ...] = ()
        self.granted_at = 0.0
        self.started_at: float | None = None
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

    def done_at(self, now: float) -> float:
        """One-unit seconds of work done by `now`."""
        return self.done_s + (now - self.progress_at) * self.speed

    @property
    def node(self) -> str:
        """The node that it must run on; empty: any."""
        return self.place.node if self.place is not None else ""

    def account(self, now: float) -> None:
        """Bring progress up to now. Called before its speed or its units change, and at its end."""
        if self.started_at is not None:
            elapsed = now - self.progress_at
            self.done_s += elapsed * self.speed
            self.unit_s += elapsed * min(self.limit, self.width)
        self.progress_at = now


class Lane:
    """Waiting actions of one run with equal needs on one node."""

    __slots__ = ("blocked_on", "elastic", "fifo", "heap", "kinds", "node", "run", "waiting")

    def __init__(self, run: Run, kinds: tuple[str, ...], elastic: str, node: str) -> None:
        self.run = run
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

    def push(self, entry: Entry) -> None:
        entry.lane = self
        heappush(self.heap, (-entry.action.priority, entry.key, entry.seq, entry))
        self.fifo.append(entry)
        self.waiting += 1

    def push_again(self, entry: Entry) -> None:
        """An attempt was lost: the action takes its old turn again."""
        entry.lane = self
        heappush(self.heap, (-entry.action.priority, entry.key, entry.seq, entry))
        if self.fifo and self.fifo[-1].seq > entry.seq:
            waiting = [other for other in self.fifo if other.lane is self and other is not entry]
            self.fifo = deque(sorted([*waiting, entry]))
        else:
            self.fifo.append(entry)
        self.waiting += 1

    def leave(self, entry: Entry) -> None:
        """The action starts or settles; its slots in heap and fifo go stale."""
        entry.lane = None
        self.waiting -= 1
        if len(self.heap) > 2 * self.waiting + STALE_SPARE:
            self.heap = [item for item in self.heap if item[3].lane is self]
            heapify(self.heap)
        if len(self.fifo) > 2 * self.waiting + STALE_SPARE:
            self.fifo = deque(entry for entry in self.fifo if entry.lane is self)

    def first(self) -> tuple[int, float, int, Entry]:
        """The first in the policy's order. Only for a lane in which somebody waits."""
        heap = self.heap
        while heap[0][3].lane is not self:
            heappop(heap)
        return heap[0]

    def oldest(self) -> Entry:
        """The one submitted first. Only for a lane in which somebody waits."""
        fifo = self.fifo
        while fifo[0].lane is not self:
            fifo.popleft()
        return fifo[0]


class Waiters:
    """Lanes to try again when something changes here: a pool, or all pools of one kind."""

    __slots__ = ("blocker", "lanes")

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.blocker: Entry | None = None
        """The action that closed this pool: nobody behind it in the order takes from it."""


class Run:
    """One tenant of fair share."""

    __slots__ = ("blockers", "lanes", "name", "open", "usage", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.usage = RunUsage()
        self.lanes: dict[LaneKey, Lane] = {}
        self.open: dict[int, Lane] = {}
        """Lanes in which somebody waits and that nothing is known to block."""
        self.waiting = 0
        self.blockers: dict[str, Entry] = {}
        """Per pool kind, an aged action that no later action of the run may overtake."""
