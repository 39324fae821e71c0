"""Records of the sample buffer: dropped groups, its saved state, its statistics."""

from __future__ import annotations

import msgspec

from tangram.rl.buffer.number_ranges import Range
from tangram.rl.trajectories.trajectory import Group, GroupTicket

STALE, FULL, LOST_LINEAGE = "stale", "full", "lost_lineage"
"""Causes for which the buffer drops a group: too stale for the next step; no room; sampled by weights that were
rolled back."""
LEFT_BEHIND, FAILED = "left_behind", "failed"
"""Further causes for groups without members: the batch was complete without it; it could not be played."""


def group_number(group_id: str) -> int:
    """The number of a group that is trained on."""
    return int(group_id.rpartition("/")[2])


class DroppedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that will not be trained on."""

    group: Group
    cause: str


class WaitingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that can be trained on."""

    group: Group
    version: int
    """Version of its first token; without any token, of the step for which it arrived."""
    since_s: float = msgspec.field(name="since")
    """When it was put into the buffer."""


class BufferState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state of a buffer. The batch in training counts as waiting."""

    version: int
    waiting: tuple[WaitingGroup, ...]
    in_flight: tuple[GroupTicket, ...]
    """Groups to be played, or played again."""
    trained: tuple[Range, ...]
    """Numbers of the groups that the weights of this version were trained on."""
    dropped: tuple[Range, ...]
    """Numbers of the groups that are never trained on."""
    dropped_by_cause: dict[str, int]
    trajectories_discarded: int
    tokens_discarded: int
    bytes_mean: float
    puts: int


class BufferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    started: int
    """Number of groups that were started."""
    trained: int
    """Number of groups that were trained on."""
    dropped: dict[str, int]
    """Number of dropped groups by cause."""
    in_flight: int
    """Number of groups that are being played."""
    waiting: int
    """Number of groups waiting for a step."""
    training: int
    """Number of groups in the current step."""
    bytes: int
    """Estimated memory of the groups that wait or are being trained on."""
    bytes_max: int
    trajectories_discarded: int
    """Trajectories that were played but not trained on, for any cause."""
    tokens_discarded: int
    """Tokens of the policy in these."""
