"""What a scheduling policy reads and what it returns.

A policy is a pure decision: `plan(snapshot)` reads the live state through a Snapshot and yields decisions. The
scheduler checks and writes each decision before it asks for the next one, so the snapshot is always true and nobody
but the scheduler writes. A policy keeps no state about actions; what it needs to know, the snapshot tells.
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
    """Start this action now. `units` counts in its elastic pool, or in CPU if it has no elastic one."""

    entry: Entry
    node: str
    units: int = 0
    """0: the minimum, or the reserve of CPU that nobody declared."""
    limit: int = 0
    """CPU quota in milli-cores; 0: as much as is reserved."""
    width: int = 0
    """Parallelism shown to the program; 0: as much as `units`."""
    riders: tuple[Entry, ...] = ()
    """Waiting actions of the same service that ride in its device chunk."""
    review_s: float = 0.0
    """Offer it to the policy again in `snapshot.due()` once it has run this long; 0: never."""


class Hold(msgspec.Struct, frozen=True, gc=False):
    """Keep this action's minimum aside while the plan goes on, so that the next candidate sees what is left.

    The first Begin of the plan gives all that is held back; an action that was held and not begun waits on."""

    entry: Entry
    node: str


class Adjust(msgspec.Struct, frozen=True, gc=False):
    """Give this running CPU action another reserve and limit, in milli-cores."""

    entry: Entry
    reserved: int
    limit: int
    review_s: float = 0.0
    """Offer it again after this many seconds; 0: as set before."""


class Preload(msgspec.Struct, frozen=True, gc=False):
    """Restore this service onto these free devices, a chunk, ahead of its next action."""

    service: str
    node: str
    devices: tuple[int, ...]


Decision = Begin | Hold | Adjust | Preload


class SchedulingPolicy(Protocol):
    """Chosen by name; see `tangram.core.policies.policy`."""

    name: str
    strict: bool
    """True: an action that cannot start closes the pools that it lacks to everybody behind it in the order.
    False: only an aged one does, and others may go ahead; of a run's calls those whose service is loaded on free
    devices go first."""

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        """The place of a new action within its run and priority: smaller goes first, ties by arrival."""
        ...

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        """Milli-cores to reserve for an action of which nobody declared its CPU."""
        ...

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        """Decide for the actions that `snapshot.candidates()` offers. Passing one over leaves it waiting."""
        ...


class ArrivalOrder:
    """Shared by the policies that keep arrival order and give every undeclared action one exclusive core."""

    strict = True

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        return 0.0

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        return CORE
