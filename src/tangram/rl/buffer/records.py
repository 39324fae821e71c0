"""Records of the sample buffer: what leaves it unused, what is saved of it, and what it tells of itself."""

from __future__ import annotations

import msgspec

from tangram.rl.buffer.number_ranges import Range
from tangram.rl.rollout.records import Group, Ticket

STALE, FULL, LOST_LINEAGE = "stale", "full", "lost_lineage"
"""Why the buffer itself drops a group: too old for the next step; no room; sampled by weights that are no more."""
LEFT_BEHIND, FAILED = "left_behind", "failed"
"""Why a group ends without members, besides being too old: its batch was enough without it; it could not be played."""


def number_of(group_id: str) -> int:
    """Of a group that is trained on."""
    return int(group_id.rpartition("/")[2])


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A group that will not be trained on."""

    group: Group
    cause: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A group that can be trained on."""

    group: Group
    version: int
    """How old it is: that of its first token; without any token, that of the step for which it came."""
    since: float
    """When it came."""


class BufferState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a buffer, to go on from. What was being trained on is waiting in it."""

    version: int
    waiting: tuple[Waiting, ...]
    in_flight: tuple[Ticket, ...]
    """To be played, or played again."""
    trained: tuple[Range, ...]
    """Numbers of the groups that the weights of this version were trained on."""
    dropped: tuple[Range, ...]
    """Numbers of those that they will never be trained on."""
    dropped_by_cause: dict[str, int]
    trajectories_discarded: int
    tokens_discarded: int
    bytes_mean: float
    puts: int

    @property
    def number_next(self) -> int:
        """From which no number has been started."""
        known = [number_of(each.group.id) + 1 for each in self.waiting]
        known += [ticket.number + 1 for ticket in self.in_flight]
        return max((*known, *(last + 1 for _, last in (*self.trained[-1:], *self.dropped[-1:]))), default=0)


class BufferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    started: int
    """Groups; likewise the next five."""
    trained: int
    dropped: dict[str, int]
    """By cause."""
    in_flight: int
    waiting: int
    training: int
    """In the step that is under way."""
    bytes: int
    bytes_max: int
    trajectories_discarded: int
    """Played and not trained on, for whatever cause."""
    tokens_discarded: int
    """Of the policy, in these."""
