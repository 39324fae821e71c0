"""Who waits for memory, for those who have instances of functions.

Reads the scheduler, between events. Changes nothing.
"""

from __future__ import annotations

from tangram.core.action import State
from tangram.core.scheduler import Scheduler
from tangram.managers.functions.boxed_host import Awaiting


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
