"""Messages: everything that goes into the scheduler (events) and comes out of it (effects).

No other way leads in or out. All messages are frozen, serialisable and name a node where it matters, so the same
messages drive the simulator, the live service and, over a wire, managers on other machines.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from tangram.core.action import NO_USAGE, Action, Outcome, Usage
from tangram.core.demand import CORE, CPU, GPU, MEMORY
from tangram.errors import InvalidAction, InvalidConfig, InvalidInput


class Message(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="type", tag=False, omit_defaults=True):
    """Base of all messages. Each message names its own tag, the value of `type` on disk and on the wire."""


# ---- pools and nodes ----------------------------------------------------------------------------------------


class Window(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How spent units come back with time."""

    seconds: float
    bucket: bool = False
    """A token bucket: units come back steadily. With neither this nor `sliding`, a fixed window: all come back at its
    end."""
    sliding: bool = False
    """A sliding window: each unit comes back `seconds` after it was used, so that no interval of that length sees more
    than the total."""
    arrival_s: float = 0.0
    """Sliding window: a unit counts as used this long after the start of its action, or when that has finished. By then
    the request has reached the API that counts it."""

    def __post_init__(self) -> None:
        if type(self.bucket) is not bool or type(self.sliding) is not bool or (self.bucket and self.sliding):
            raise InvalidConfig("window", (self.bucket, self.sliding), "at most one of bucket and sliding")
        if type(self.arrival_s) not in (float, int) or not 0.0 <= self.arrival_s < math.inf:
            raise InvalidConfig("window.arrival_s", self.arrival_s, "a finite number of seconds, at least 0")
        if type(self.seconds) not in (float, int) or not 0.0 < self.seconds < math.inf:
            raise InvalidConfig("window.seconds", self.seconds, "a positive, finite number of seconds")


class Pool(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A named, counted capacity. Its units are held until Finished, or spent and come back with time."""

    kind: str
    """What demands name: `cpu`, `core` (exclusive cores), `gpu`, `memory`, or the name of a quota."""
    total: int
    node: str = ""
    """Empty for a pool that belongs to no node, such as a quota."""
    window: Window | None = None
    """Units are spent if given, held if None."""
    numa: tuple[int, ...] = ()
    """For `cpu` and `core`: units per NUMA node. Empty: one NUMA node."""
    private: bool = False
    """The pool belongs to one run, such as a cap on its running actions. What is held of it does not count in the share
    of the run, because no other run lacks it."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not self.kind or "@" in self.kind:
            raise InvalidConfig("pool.kind", self.kind, "a name without '@'")
        if not isinstance(self.node, str):
            raise InvalidConfig(f"pool {self.kind} node", self.node, "the name of a node; empty: it belongs to none")
        if type(self.total) is not int or self.total < 0:
            raise InvalidConfig(f"pool {self.name} total", self.total, "a whole number of units, at least 0")
        if self.window is not None and not isinstance(self.window, Window):
            raise InvalidConfig(f"pool {self.name} window", self.window, "a Window; None: the units are held")
        if not isinstance(self.numa, tuple) or not all(type(units) is int for units in self.numa):
            raise InvalidConfig(f"pool {self.name} numa", self.numa, "whole numbers of units")
        if self.numa and (sum(self.numa) != self.total or min(self.numa) < 0):
            raise InvalidConfig(f"pool {self.name} numa", self.numa, f"units that add up to the total, {self.total}")
        if type(self.private) is not bool:
            raise InvalidConfig(f"pool {self.name} private", self.private, "True or False")
        if self.window and self.node:
            raise InvalidConfig(f"pool {self.name} window", self.window, "no window: the units of a node are held")
        if self.kind in (CPU, GPU, MEMORY) and not self.node:
            raise InvalidConfig(f"pool {self.kind} node", self.node, f"the node whose {self.kind} it is")

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.node}" if self.node else self.kind


def cpu_node(node: str, cores: float, memory_gib: float = 0.0, numa_nodes: int = 1) -> tuple[Pool, ...]:
    """Returns the pools of a machine for sandboxes: its cores and, unless `memory_gib` is 0, its memory in MiB."""
    if not isinstance(node, str) or not node:
        raise InvalidConfig("node", node, "a name of at least one character")
    if type(cores) not in (float, int) or not math.isfinite(cores):
        raise InvalidConfig(f"cores of node {node}", cores, "a finite number of cores")
    if type(memory_gib) not in (float, int) or not math.isfinite(memory_gib):
        raise InvalidConfig(f"memory of node {node}", memory_gib, "a finite number of GiB")
    if type(numa_nodes) is not int or numa_nodes < 1:
        raise InvalidConfig(f"NUMA nodes of node {node}", numa_nodes, "at least one NUMA node")
    total = round(cores * CORE)
    share = total // numa_nodes
    numa = (*([share] * (numa_nodes - 1)), total - share * (numa_nodes - 1)) if numa_nodes > 1 else ()
    pools = (Pool(kind=CPU, node=node, total=total, numa=numa),)
    return (*pools, Pool(kind=MEMORY, node=node, total=round(memory_gib * 1024))) if memory_gib else pools


class NodeState(enum.Enum):
    UP = "up"
    DRAINING = "draining"
    """Takes no new sandbox and no action without one. Actions of sandboxes on the node continue."""
    DOWN = "down"
    """Lost, with everything on it."""


# ---- grants ---------------------------------------------------------------------------------------------------


class Share(msgspec.Struct, frozen=True, gc=False):
    """The part of a grant that comes from one pool."""

    pool: str
    reserved: int
    """The units that the ledger counts. For CPU also the weight under contention."""
    limit: int
    """CPU: the quota, which may exceed `reserved`. Other kinds: equal to `reserved`."""
    cells: tuple[int, ...] = ()
    """Where in the node the units are: the numbers of NUMA nodes for `cpu`, ids of cores for `core`, ids of devices for
    `gpu`. Empty for a pool without positions."""


class Grant(msgspec.Struct, frozen=True, gc=False):
    """The scheduler's decision: this action, these units, placed here. All or nothing."""

    action: str
    node: str
    """Empty if no pool of the grant belongs to a node."""
    shares: tuple[Share, ...]
    width: int
    """Units of parallelism that the program sees (cores, devices), fixed at launch."""
    attempt: int = 1
    batch: str = ""
    """The action whose device chunk it shares. Empty for an action with its own units."""


# ---- events ---------------------------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True, tag="Submit"):
    action: Action


class Cancel(Message, frozen=True, kw_only=True, tag="Cancel"):
    action: str
    reason: str = "cancelled by the caller"
    """Becomes the reason of the outcome."""


class Started(Message, frozen=True, kw_only=True, tag="Started"):
    action: str
    attempt: int = 0
    """The attempt that the Grant named. Managers on other nodes, whose messages may arrive late, give it, so that a
    message about an earlier attempt is ignored. 0: the current attempt."""


class StartFailed(Message, frozen=True, kw_only=True, tag="StartFailed"):
    action: str
    reason: str
    retry: bool = True
    """False: a second try cannot help."""
    attempt: int = 0
    sandbox: str = ""
    """If given, the start did not fail, and no attempt is counted: the action needs a new sandbox of this name first.
    It waits in its old turn until memory for that is held on the node where it starts, or the name is released."""
    memory: int = 0
    """MiB for that sandbox."""


class Finished(Message, frozen=True, kw_only=True, tag="Finished"):
    """The manager has finished the action: its units are free."""

    action: str
    usage: Usage = NO_USAGE
    lost: str = ""
    """Why the infrastructure failed. Empty if the action ran to its end or was stopped."""
    attempt: int = 0


class Concluded(Message, frozen=True, kw_only=True, tag="Concluded"):
    """An action has ended that was not submitted to this scheduler: an earlier process of the service had started it,
    or its sandbox is gone. It is counted like the others, but its times are unknown."""

    action: Action
    outcome: Outcome

    def __post_init__(self) -> None:
        if self.outcome.action != self.action.id:
            raise InvalidInput("concluded.outcome", self.outcome.action, f"the outcome of action {self.action.id}")


class Resized(Message, frozen=True, kw_only=True, tag="Resized"):
    """The manager has set the new limit."""

    action: str
    limit: int
    attempt: int = 0


class Used(Message, frozen=True, kw_only=True, tag="Used"):
    """What a running action has used so far, as its manager measured it. Optional."""

    action: str
    cpu_s: float
    attempt: int = 0

    def __post_init__(self) -> None:
        if type(self.cpu_s) not in (float, int) or not 0.0 <= self.cpu_s < math.inf:
            raise InvalidInput("used.cpu_s", self.cpu_s, "a finite number of seconds, at least 0")


class Reserve(Message, frozen=True, kw_only=True, tag="Reserve"):
    """Reserve memory for the whole life of a new sandbox. Its first action picks the node."""

    sandbox: str
    memory: int
    """Units of the memory pools (MiB)."""
    run: str = "default"
    node: str = ""
    """Empty: the scheduler chooses."""
    yields: bool = False
    """Its manager ends it when an action that goes first waits for its memory. Function instances do."""

    def __post_init__(self) -> None:
        if not isinstance(self.sandbox, str) or not self.sandbox:
            raise InvalidAction("sandbox", self.sandbox, "an id of at least one character")
        if not isinstance(self.run, str) or not self.run:
            raise InvalidAction(f"run of sandbox {self.sandbox}", self.run, "a name of at least one character")
        if type(self.memory) is not int or self.memory < 0:
            raise InvalidAction(f"memory of sandbox {self.sandbox}", self.memory, "a whole number of MiB, at least 0")


class Release(Message, frozen=True, kw_only=True, tag="Release"):
    """The sandbox has ended. Its memory is free."""

    sandbox: str


class Resident(Message, frozen=True, kw_only=True, tag="Resident"):
    """A service is loaded on these devices."""

    service: str
    node: str
    devices: tuple[int, ...]
    """The chunk that a Grant or a Restore named."""
    batch_max: int = 1
    """The number of calls that it takes at once."""

    def __post_init__(self) -> None:
        if type(self.batch_max) is not int or self.batch_max < 1:
            raise InvalidConfig(f"batch_max of service {self.service}", self.batch_max, "a whole number, at least 1")
        count = len(self.devices)
        start = self.devices[0] if count else 0
        if not count or count & (count - 1) or start % count or self.devices != tuple(range(start, start + count)):
            raise InvalidConfig(
                f"devices of service {self.service}",
                self.devices,
                "a chunk: 2**k neighbouring devices, the first of them a multiple of 2**k",
            )


class Evicted(Message, frozen=True, kw_only=True, tag="Evicted"):
    """The service is no longer loaded on these devices, or a Restore onto them failed."""

    service: str
    node: str
    devices: tuple[int, ...]


class PoolChanged(Message, frozen=True, kw_only=True, tag="PoolChanged"):
    """A pool joins or has a new total. A total of 0 closes it. Held units stay held, even above the total."""

    pool: Pool


class NodeChanged(Message, frozen=True, kw_only=True, tag="NodeChanged"):
    """A node has a new state. A node that goes down loses its pools: when it returns, PoolChanged adds them again."""

    node: str
    state: NodeState


class RunChanged(Message, frozen=True, kw_only=True, tag="RunChanged"):
    """The weight of a run in fair share."""

    run: str
    weight: float

    def __post_init__(self) -> None:
        if not isinstance(self.run, str) or not self.run:
            raise InvalidConfig("run", self.run, "a name of at least one character")
        if type(self.weight) not in (float, int) or not 0.0 < self.weight < math.inf:
            raise InvalidConfig(f"weight of run {self.run}", self.weight, "a positive, finite number")


class Tick(Message, frozen=True, kw_only=True, tag="Tick"):
    """Time has passed: answers a WakeAt."""


Event = (
    Submit
    | Cancel
    | Started
    | StartFailed
    | Finished
    | Concluded
    | Resized
    | Used
    | Reserve
    | Release
    | Resident
    | Evicted
    | PoolChanged
    | NodeChanged
    | RunChanged
    | Tick
)


# ---- effects --------------------------------------------------------------------------------------------------


class Start(Message, frozen=True, kw_only=True, tag="Start"):
    action: Action
    grant: Grant


class Resize(Message, frozen=True, kw_only=True, tag="Resize"):
    """Give the running action another CPU limit."""

    action: str
    pool: str
    reserved: int
    limit: int


class Stop(Message, frozen=True, kw_only=True, tag="Stop"):
    """End the action's processes; answer with Finished."""

    action: str
    reason: str


class Restore(Message, frozen=True, kw_only=True, tag="Restore"):
    """Load a service ahead of its next action onto these free devices; answer with Resident or Evicted."""

    service: str
    node: str
    devices: tuple[int, ...]


class WakeAt(Message, frozen=True, kw_only=True, tag="WakeAt"):
    """Send a Tick at this time."""

    at: float


class Settle(Message, frozen=True, kw_only=True, tag="Settle"):
    outcome: Outcome


class Refuse(Message, frozen=True, kw_only=True, tag="Refuse"):
    """A Submit or Reserve was refused. `action` is the id of the action or of the sandbox."""

    action: str
    limit: str
    """The name of the limit."""
    reason: str


Effect = Start | Resize | Stop | Restore | WakeAt | Settle | Refuse


class Decider(Protocol):
    """Decides what runs: the scheduler, or a baseline to compare it with."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...


Observer = Callable[[float, Event, list[Effect]], None]
"""Called with the time of every event, the event and its effects, in order. It must not raise: it would miss events
from then on, so its exception ends the orchestrator as one of the scheduler does."""
