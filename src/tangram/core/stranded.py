"""Stranded: waiting actions that no pool could hold, even if all units were free.

Owns that list. A stranded action closes no pool. The scheduler gives it some time for a pool to come back.
"""

from __future__ import annotations

from tangram.core.demand import Need
from tangram.core.lanes import Entry, LaneKey
from tangram.core.ledger import Ledger
from tangram.core.queue import Queue


class Stranded:
    """The stranded actions, by id."""

    def __init__(self, ledger: Ledger, queue: Queue) -> None:
        self._ledger = ledger
        self._queue = queue
        self._entries: dict[str, Entry] = {}

    def is_possible(self, entry: Entry) -> bool:
        return self._ledger.could_hold(entry.needs, entry.node, entry.memory)

    def add(self, entry: Entry, now: float) -> bool:
        """Adds a waiting action if it is stranded. Returns whether it is newly so."""
        if entry.stranded_at is not None or self.is_possible(entry):
            return False
        entry.stranded_at = now
        self._entries[entry.id] = entry
        if entry.closed:
            self._queue.reopen(entry)
        return True

    def discard(self, entry: Entry) -> None:
        entry.stranded_at = None
        del self._entries[entry.id]

    def find(self, now: float) -> list[Entry]:
        """Called when pools have changed. Removes the actions that a pool could hold again; adds and returns the newly
        stranded ones. Visits all lanes, but actions only in lanes that may have stranded ones."""
        for entry in list(self._entries.values()):
            if self.is_possible(entry):
                self.discard(entry)
        stranded: list[Entry] = []
        for run in self._queue.runs.values():
            for key, lane in run.lanes.items():
                if lane.waiting and not self._ledger.could_hold(_most(key), lane.node, 0):
                    waiting = [entry for entry in lane.fifo if entry.lane is lane]
                    stranded.extend(entry for entry in waiting if self.add(entry, now))
        return stranded


def _most(key: LaneKey) -> list[Need]:
    """Returns the largest needs that an action of the lane may have."""
    needs, exact, *_ = key
    return [(kind, units if exact or units < 2 else 2 * units - 1) for kind, units in needs if units]
