"""First come, first served: every action gets its minimum, in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tangram.core.policies.base import ArrivalOrder, Begin, Decision

if TYPE_CHECKING:
    from tangram.core.snapshot import Snapshot


class Fcfs(ArrivalOrder):
    name = "fcfs"

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node)
