"""The view: what the service shows of itself, to the dashboard, to `tangram status` and to scripts.

Owns the records. Whoever makes them reads the scheduler and changes nothing; whoever shows them asks nothing else.
Times ending in `_s` are seconds since the service began, as in its trace, unless they are lengths; `at` is the
calendar's.

What belongs to other runs than that of the caller comes without names: who may not see a run sees that somebody holds
units, not who.
"""

from __future__ import annotations

import msgspec

WAITING_SHOWN_MAX = 200
"""Of the queue, from its front: more is not read by anybody, and each costs an explanation."""
RUNNING_SHOWN_MAX = 500
SANDBOXES_SHOWN_MAX = 500
TIMELINE_ROWS_MAX = 20_000
"""Actions that have settled and are still remembered for the timeline, over all runs."""
BUCKET_S = 5.0
BUCKETS_MAX = 720
"""An hour of history."""

HIDDEN = "another run"
"""In place of the names of what the caller may not see."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Of a pool: a NUMA node with its cores, or one device."""

    index: int
    total: int
    held: int
    service: str = ""
    """Of a device: the model that is loaded on it."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds units of a pool: an action, or of memory a sandbox."""

    id: str
    run: str
    units: int
    parts: tuple[int, ...] = ()
    """The indexes of NUMA nodes or devices."""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    node: str
    unit: str
    """What it counts in: `milli-cores`, `MiB`, `devices`, `requests`, `tokens`, or `units`."""
    total: int
    held: int
    spent: int
    """Of a quota: used up, and coming back with time."""
    free: int
    waiting: int
    """Actions in the queue that it is too short for, or that stand behind such."""
    window_s: float | None = None
    """Of a quota: the stretch of time that its total is for."""
    parts: tuple[Part, ...] = ()
    holders: tuple[Holder, ...] = ()
    """The largest first; at most 200."""


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of trajectories went. `waiting_s` + `execution_s` + `overhead_s` + `thinking_s` = `total_s`."""

    total_s: float = 0.0
    """From the first submission of each trajectory to its last end, added up."""
    waiting_s: dict[str, float] = {}
    """By the kind of pool that was short; `start` is waiting for the manager to start what was granted."""
    execution_s: float = 0.0
    overhead_s: float = 0.0
    thinking_s: float = 0.0
    """No action of the trajectory was under way: the model wrote, or nobody did."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of action completion times, in seconds."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    weight: float
    share: float
    """Of the pool of which it holds the largest part: that part, from 0 to 1."""
    waiting: int
    running: int
    sandboxes: int
    settled: dict[str, int]
    """By status, since the service began."""
    act: Percentiles
    """Of what settled within the hour."""
    spending: Spending


class ClassView(msgspec.Struct, frozen=True, kw_only=True):
    """Actions that behave alike, within the hour."""

    name: str
    """`task/kind/key`, without what is empty."""
    act: Percentiles
    waiting_s: float
    execution_s: float
    overhead_s: float
    """Means."""


class WaitingView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run: str
    trajectory: str
    name: str
    """Of its class."""
    since_s: float
    reason: str
    """Why it waits, in a sentence."""


class RunningView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run: str
    trajectory: str
    name: str
    state: str
    """`starting`, `running` or `stopping`."""
    submitted_s: float
    started_s: float
    """When its units were granted."""
    node: str
    units: dict[str, int]
    """By pool."""


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    node: str
    memory_mib: int
    opened_s: float
    active: int
    """Actions that run in it. 0: it is frozen."""
    actions: int
    """That it has had."""
    last_used_s: float
    function: str = ""
    """Given: it is an instance of this function, and its actions are calls."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """BUCKET_S of history."""

    from_s: float
    ended: int
    p50_s: float
    p95_s: float
    p99_s: float
    waiting_s: float
    execution_s: float
    overhead_s: float
    """Sums over what ended."""
    waiting: int
    running: int
    """Actions, at its end."""
    busy: dict[str, float]
    """By pool: the mean part that was held or spent, from 0 to 1."""


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    state: str
    """`up` or `draining`."""
    began_at: float
    """Seconds since 1970."""
    instance: str
    """Another one after every start: who kept numbers or rows of the one before drops them."""
    policy: str
    durability: str
    """`process`, `power`, or `none`."""
    recovered: str
    """What the last start found, in a sentence; empty: nothing."""
    draining: tuple[str, ...] = ()
    """Nodes that take no new sandbox."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    at: float
    """Seconds since 1970."""
    service: ServiceView
    pools: tuple[PoolView, ...]
    runs: tuple[RunView, ...]
    classes: tuple[ClassView, ...]
    """Those that took most time, at most 50."""
    waiting: tuple[WaitingView, ...]
    waiting_total: int
    running: tuple[RunningView, ...]
    running_total: int
    sandboxes: tuple[SandboxView, ...]
    sandboxes_total: int
    history: tuple[Bucket, ...]
    """The oldest first."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """An action that has settled, for the timeline. An array in JSON, since there are thousands."""

    seq: int
    """Rises by one with every action that settles."""
    id: str
    run: str
    trajectory: str
    name: str
    """Of its class."""
    status: str
    submitted_s: float
    granted_s: float
    """Equal to `ended_s` if it never got in."""
    ended_s: float
    waiting_s: float
    execution_s: float
    overhead_s: float
    cpu: int
    """Milli-cores that were reserved for it."""
    node: str


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    """As in ServiceView."""
    rows: tuple[Row, ...]
    """Those after what was asked for, the oldest first."""
    last: int
    """The `seq` to ask from next."""
    forgotten: int
    """Rows after what was asked for that are no longer remembered."""


class StoryLine(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    text: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run: str
    name: str
    status: str
    """A state while it is live, then how it ended."""
    explanation: str
    """Why it waits or where it runs, in a sentence; of one that has settled the reason of its end."""
    lines: tuple[StoryLine, ...]
