"""Rooms: how many sandboxes each caller may have, those that it has open and those of its functions together.

Owns the caps, and for each caller of functions the pool that counts the calls which may have an instance now: what its
cap leaves beside its open sandboxes. So calls wait where a sandbox is refused. Promises that calls in instances and
open sandboxes are never more than the cap; idle instances end for either, and are above it only while they end.
"""

from __future__ import annotations

from collections.abc import Callable

from tangram.core.action import State
from tangram.core.messages import Pool, PoolChanged
from tangram.core.scheduler import Scheduler
from tangram.errors import AdmissionRefused
from tangram.managers.functions import BoxedFunctionManager
from tangram.managers.functions.boxed_host import Awaiting
from tangram.server.actions.registry import Lives
from tangram.server.actions.translate import instances_pool


class Rooms:
    def __init__(
        self,
        lives: Lives,
        functions: BoxedFunctionManager,
        tell: Callable[[PoolChanged], None],
        held: Callable[[str], int],
        sandboxes_max: int,
    ) -> None:
        """`held`: how many units of a pool are held. `sandboxes_max`: of whoever has no cap of its own."""
        self._lives = lives
        self._functions = functions
        self._tell = tell
        self._held = held
        self._sandboxes_max = sandboxes_max
        self._max_by_space: dict[str, int] = {}
        self._told_by_space: dict[str, int] = {}
        """The totals of the pools that there are."""

    def cap(self, space: str, sandboxes_max: int | None) -> None:
        if sandboxes_max is None:
            self._max_by_space.pop(space, None)
        else:
            self._max_by_space[space] = sandboxes_max
        self.changed(space)

    def left(self, space: str) -> int:
        """For instances, beside its open sandboxes."""
        most = self._max_by_space.get(space, self._sandboxes_max)
        return max(0, most - self._lives.boxes_by_space[space])

    def require_box(self, space: str) -> None:
        """Room for one more sandbox: calls have what they hold, and one of them at least can go on."""
        calls = 0
        if self._lives.calls_by_space[space]:
            calls = max(1, self._held(instances_pool(space)) if space in self._told_by_space else 0)
        if self.left(space) <= calls:
            has = f"{self._lives.boxes_by_space[space]} sandboxes"
            if calls:
                has += f" and {calls} for calls of functions"
            raise AdmissionRefused("sandboxes_max", f"this run has {has}, which is the most; close one")

    def require_call(self, space: str) -> None:
        if not self.left(space):
            most = self._lives.boxes_by_space[space]
            said = f"this run has {most} sandboxes, which is the most, and a call of a function needs one; close one"
            raise AdmissionRefused("sandboxes_max", said)

    def announce(self, space: str) -> None:
        """A function of this caller is about to be called."""
        if space not in self._told_by_space:
            self._tell_left(space)

    def changed(self, space: str) -> None:
        """It has more sandboxes, or fewer, or another cap."""
        if space in self._told_by_space and self._told_by_space[space] != self.left(space):
            self._tell_left(space)
            self._functions.trim(space)

    def _tell_left(self, space: str) -> None:
        left = self._told_by_space[space] = self.left(space)
        self._tell(PoolChanged(pool=Pool(kind=instances_pool(space), total=left, private=True)))

    def forget(self, space: str) -> None:
        self._max_by_space.pop(space, None)
        if self._told_by_space.pop(space, None) is not None:
            self._tell(PoolChanged(pool=Pool(kind=instances_pool(space), total=0, private=True)))


class WhoWaits:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def first(self) -> Awaiting | None:
        """Who goes first of those that wait for memory which instances have."""
        entry = self._scheduler.snapshot.awaits_yielding()
        if entry is None:
            return None
        assert entry.place is not None, entry.id
        return Awaiting(entry.id, entry.place.id)

    def waits(self, action: str) -> bool:
        entry = self._scheduler.entries.get(action)
        return entry is not None and entry.state is State.QUEUED

    def holds(self, sandbox: str) -> bool:
        place = self._scheduler.places.by_sandbox.get(sandbox)
        return place is not None and place.node != ""
