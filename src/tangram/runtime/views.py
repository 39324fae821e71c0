"""Views: the state of the service for the dashboard, `tangram status` and scripts.

Records only. Times ending in `_s` are seconds since the service started, as in its trace, unless they are durations;
`at` is Unix time. Names that belong to other runs than the caller's are hidden: a run sees that units are held, not by
which run.
"""

from __future__ import annotations

import msgspec

WAITING_SHOWN_MAX = 200
"""Waiting actions shown, from the front of the queue: each costs an explanation."""
RUNNING_SHOWN_MAX = 500
SANDBOXES_SHOWN_MAX = 500
TIMELINE_ROWS_MAX = 20_000
"""Settled actions kept for the timeline, over all runs."""
BUCKET_S = 5.0
BUCKETS_MAX = 720
"""An hour of history."""

HIDDEN_NAME = "another run"
"""Replaces names that the caller may not see."""


class PoolPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a pool: a NUMA node with its cores, or one device."""

    index: int
    total: int
    held: int
    service: str = ""
    """The model that is loaded on the device."""


class PoolHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A holder of units: an action; of memory, a sandbox."""

    id: str
    run: str
    units: int
    parts: tuple[int, ...] = ()
    """Indexes of NUMA nodes or devices."""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    node: str
    unit: str
    """`milli-cores`, `MiB`, `devices`, `requests`, `tokens`, or `units`."""
    total: int
    held: int
    spent: int
    """Units of a quota that were used and return with time."""
    free: int
    waiting: int
    """Queued actions that wait for this pool."""
    window_s: float | None = None
    """Length of the window of a quota, in which `total` units may be used."""
    parts: tuple[PoolPart, ...] = ()
    holders: tuple[PoolHolder, ...] = ()
    """The largest holders, at most 200, in descending order."""


class TimeBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of trajectories went. `waiting_s` + `execution_s` + `overhead_s` + `thinking_s` = `total_s`."""

    total_s: float = 0.0
    """Sum over trajectories, from the first submission to the end of the last action."""
    waiting_s: dict[str, float] = {}
    """By kind of pool that lacked units; `start` is the wait for a manager to start a granted action."""
    execution_s: float = 0.0
    overhead_s: float = 0.0
    thinking_s: float = 0.0
    """Time without an action of the trajectory, mostly while the model was generating."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Action completion times in seconds."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    weight: float
    share: float
    """Its largest share of any kind of pool, from 0 to 1."""
    waiting: int
    running: int
    sandboxes: int
    settled: dict[str, int]
    """Number of settled actions by status, since the service started."""
    act: Percentiles
    """Over actions that settled within the hour."""
    time_breakdown: TimeBreakdown


class ClassView(msgspec.Struct, frozen=True, kw_only=True):
    """Actions of one class that settled within the hour."""

    name: str
    """`task/kind/key`, without empty parts."""
    act: Percentiles
    waiting_s: float
    execution_s: float
    overhead_s: float
    """Mean waiting, execution and overhead time."""


class WaitingView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run: str
    trajectory: str
    name: str
    """Name of its class."""
    since_s: float
    reason: str
    """A sentence: why it waits."""


class RunningView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run: str
    trajectory: str
    name: str
    state: str
    """`starting`, `running` or `stopping`."""
    submitted_s: float
    started_s: float
    """Time at which its units were granted."""
    node: str
    units: dict[str, int]
    """Granted units by pool."""


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    run: str
    node: str
    memory_mib: int
    opened_s: float
    active: int
    """Number of actions that run in it; 0: the sandbox is frozen."""
    actions: int
    """Number of its actions so far."""
    last_used_s: float
    function: str = ""
    """The function, if the sandbox is one of its instances; its actions are calls."""


class HistoryBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of `BUCKET_S` seconds."""

    from_s: float
    ended: int
    p50_s: float
    p95_s: float
    p99_s: float
    waiting_s: float
    execution_s: float
    overhead_s: float
    """Waiting, execution and overhead time, each summed over settled actions."""
    waiting: int
    running: int
    """Waiting and running actions at the end of the bucket."""
    busy: dict[str, float]
    """Mean held or spent fraction of each pool, from 0 to 1."""


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    state: str
    """`up` or `draining`."""
    began_at: float
    """Unix time."""
    instance: str
    """Changes with every start, which invalidates the numbers and rows of an earlier instance."""
    policy: str
    durability: str
    """`process`, `power`, or `none`."""
    recovered: str
    """A sentence about what the last start recovered; empty: nothing."""
    draining: tuple[str, ...] = ()
    """Nodes that accept no new sandboxes."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    at: float
    """Unix time."""
    service: ServiceView
    pools: tuple[PoolView, ...]
    runs: tuple[RunView, ...]
    classes: tuple[ClassView, ...]
    """The classes that took the most time, at most 50."""
    waiting: tuple[WaitingView, ...]
    waiting_total: int
    running: tuple[RunningView, ...]
    running_total: int
    sandboxes: tuple[SandboxView, ...]
    sandboxes_total: int
    history: tuple[HistoryBucket, ...]
    """Oldest first."""


class TimelineRow(msgspec.Struct, frozen=True, array_like=True):
    """A settled action, for the timeline. Encoded as an array, because there are thousands."""

    seq: int
    """Increases by one with every settled action."""
    id: str
    run: str
    trajectory: str
    name: str
    """Name of its class."""
    status: str
    submitted_s: float
    granted_s: float
    """Equal to `ended_s` if it was never granted."""
    ended_s: float
    waiting_s: float
    execution_s: float
    overhead_s: float
    cpu: int
    """Milli-cores that were reserved for it."""
    node: str


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    """`instance` of ServiceView."""
    rows: tuple[TimelineRow, ...]
    """Rows after the requested number, oldest first."""
    last: int
    """The `seq` to request from next."""
    forgotten: int
    """Number of rows after the requested number that the service has dropped."""


class PoolUseReading(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one pool, or of all pools of one quota. Counts only rise, so the use in between is the difference of two
    readings."""

    name: str
    total: float
    """Units now: cores, devices, requests at once."""
    private: bool = False
    """It belongs to one run, such as the pool of a function."""
    actions: int
    """The number of settled actions. The sums of times below are theirs."""
    act_s: float
    """Sum of their completion times."""
    act_cells: dict[int, int]
    """Completion times, counted by cell of the grid of `tangram.runtime.latency_histogram`."""
    waiting_s: float
    held_unit_s: float
    """Units times seconds held by actions."""
    reserved_unit_s: float
    """Unit-seconds held if each trajectory had reserved its largest amount from its first action to its last."""
    waiting: int
    """Actions that wait for the pool now."""


class PoolUsageView(msgspec.Struct, frozen=True, kw_only=True):
    """Use of pools since the service started, by one run or by all."""

    instance: str
    """As in ServiceView: counts of another instance began at 0."""
    pools: tuple[PoolUseReading, ...]


class StoryLine(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    text: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    run: str
    name: str
    status: str
    """The state of a live action, or the status of a settled one."""
    explanation: str
    """A sentence: why it waits, where it runs, or why it settled."""
    lines: tuple[StoryLine, ...]
