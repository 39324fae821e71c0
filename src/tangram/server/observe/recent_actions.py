"""Rows: the actions that settled last, for the timeline and for stories.

Owns a ring of TIMELINE_ROWS_MAX of them, over all runs, and finds one by its id. An id that was used again stands for
the action that had it last.
"""

from __future__ import annotations

from tangram.runtime.views import TIMELINE_ROWS_MAX, Row, Timeline
from tangram.server.observe.stories import Past


class Rows:
    def __init__(self, rows_max: int = TIMELINE_ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._ring: list[Past] = []
        """The row with the number n is at n - 1, modulo its size."""
        self._by_id: dict[str, Past] = {}
        self.last = 0
        """The number of the last row."""
        self._hidden: dict[str, int] = {}
        """Of runs that have ended, the number of the last row then: who comes under that name later sees none of
        them."""

    def keep(self, past: Past) -> None:
        """Its row has the number after the last."""
        place = self.last % self._rows_max
        self.last += 1
        if place == len(self._ring):
            self._ring.append(past)
        else:
            oldest, self._ring[place] = self._ring[place], past
            if self._by_id.get(oldest.row.id) is oldest:
                del self._by_id[oldest.row.id]
        self._by_id[past.row.id] = past

    def hide(self, run: str) -> None:
        """What it has had is no longer shown under its name."""
        oldest = self.last - len(self._ring)
        self._hidden = {name: number for name, number in self._hidden.items() if number > oldest} | {run: self.last}

    def find(self, id: str, run: str | None) -> Past | None:
        """As this run sees it; None: the admin, who sees all."""
        past = self._by_id.get(id)
        if past is None or run is None:
            return past
        return past if past.row.run == run and past.row.seq > self._hidden.get(run, 0) else None

    def after(self, number: int, limit: int, run: str | None, instance: str) -> Timeline:
        """Those after that number, of one run or of all. `last` is where the looking ended: of a run, many numbers may
        belong to others."""
        hidden = 0 if run is None else self._hidden.get(run, 0)
        first = max(number + 1, hidden + 1, self.last - len(self._ring) + 1)
        found: list[Row] = []
        at = first - 1
        while at < self.last and len(found) < limit:
            row = self._ring[at % self._rows_max].row
            at += 1
            if run is None or row.run == run:
                found.append(row)
        forgotten = min(first, self.last + 1) - number - 1
        return Timeline(instance=instance, rows=tuple(found), last=min(at, self.last), forgotten=max(0, forgotten))
