"""What a scheduling policy reads and what it returns.

A policy only decides: `plan(snapshot)` reads the live state through a Snapshot and yields decisions. The scheduler
checks and applies each decision before it takes the next one, so the snapshot is always up to date and only the
scheduler writes. A policy keeps no state about actions. The default policy is `Adaptive`, in adaptive.py.

    decision    effect      reply of the manager
    Begin       Start       Started, or StartFailed
    Adjust      Resize      Resized
    Preload     Restore     Resident, or Evicted
    Hold        none: units are held aside until the first Begin of the plan
    Retry       WakeAt      Tick
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec

from tangram.core.demand import CORE
from tangram.core.lanes import Entry

if TYPE_CHECKING:
    from tangram.core.snapshot import Snapshot


class Begin(msgspec.Struct, frozen=True, gc=False):
    """Start this action now. `units` counts in its elastic pool, or in CPU if it has none."""

    entry: Entry
    node: str
    units: int = 0
    """0: the minimum, or the learned reserve of undeclared CPU."""
    limit: int = 0
    """CPU quota in milli-cores. 0: equal to the reserve."""
    width: int = 0
    """Parallelism shown to the program. 0: equal to `units`."""
    riders: tuple[Entry, ...] = ()
    """Waiting actions of the same service that share its device chunk."""
    review_s: float = 0.0
    """Add it to `snapshot.due_reviews` once it has run this long. 0: never."""


class Hold(msgspec.Struct, frozen=True, gc=False):
    """Hold the minimum of this action while the plan continues, so that the next candidate sees what remains.

    The first Begin of the plan frees everything that is held. An action that was held but not begun keeps waiting."""

    entry: Entry
    node: str


class Adjust(msgspec.Struct, frozen=True, gc=False):
    """Give this running CPU action another reserve and limit, in milli-cores."""

    entry: Entry
    reserved: int
    limit: int
    review_s: float = 0.0
    """Add it to `snapshot.due_reviews` after this many seconds. 0: as set before."""


class Preload(msgspec.Struct, frozen=True, gc=False):
    """Restore this service onto these free devices, a chunk, ahead of its next action."""

    service: str
    node: str
    devices: tuple[int, ...]


class Retry(msgspec.Struct, frozen=True, gc=False):
    """Offer the waiting actions of this pool again after a while, even if nothing else happens."""

    pool: str
    after_s: float


Decision = Begin | Hold | Adjust | Preload | Retry


class SchedulingPolicy(Protocol):
    """A policy. `tangram.core.policies.policy` returns one by name."""

    name: str
    strict: bool
    """True: an action that cannot start closes the pools that it lacks to all actions behind it. False: only an aged
    action does, others may be overtaken (backfill), and calls whose service is loaded on free devices go first within
    their run."""

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        """Returns the order of a new action within its run and priority: smaller goes first, ties by arrival."""
        ...

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        """Returns the milli-cores to reserve for an action with undeclared CPU."""
        ...

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        """Yields decisions about the actions that `snapshot.candidates()` offers. An action that is not begun keeps
        waiting."""
        ...


class ArrivalOrder:
    """Base of the policies that keep arrival order and give every undeclared action one exclusive core."""

    strict = True

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        return 0.0

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        return CORE
