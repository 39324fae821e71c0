"""Recovery: computes the buffer of a resumed run from the state of a checkpoint and the sample log since.

Pure. The weights go back to the checkpoint, so a group that was trained on after it waits again, unless one of its
tokens was sampled by weights that no longer exist. Promises that no group returns that was trained on or dropped before
the checkpoint, that every group is in exactly one place, and that `describe` counts them as restored. A missing log
entry does no harm: its group is played again.

    recovered = recover_buffer(checkpoint, folder.samples_after(checkpoint.step))
    buffer = SampleBuffer.restore(recovered.buffer, now=now, ...)   # groups in flight are to be played again
    text = recovered.describe(buffer.statistics())
    upcoming = (each for each in tickets(settings) if not buffer.has_started(each.number))
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from tangram.rl.buffer.number_ranges import NumberRanges
from tangram.rl.buffer.records import LOST_LINEAGE, BufferState, BufferStatistics, WaitingGroup, group_number
from tangram.rl.runs.checkpoints import Checkpoint
from tangram.rl.runs.sample_log import GroupPut, SampleEntry, SampleLogs
from tangram.rl.trajectories.trajectory import Group


class RecoveredBuffer(msgspec.Struct, frozen=True, kw_only=True):
    buffer: BufferState
    """For `SampleBuffer.restore`. The groups in flight in it are to be played again."""
    dropped: dict[str, str]
    """Groups that will not be trained on and were not settled at the checkpoint: id to the cause as it is counted."""
    step: int
    """Step of the checkpoint."""
    dropped_by_cause: dict[str, int]
    notes: tuple[str, ...]
    """Describes damaged checkpoints and log entries that could not be read."""

    def describe(self, restored: BufferStatistics) -> str:
        """Summarizes what became of all groups. `restored`: statistics of the restored buffer."""
        since = Counter(restored.dropped) - Counter(self.dropped_by_cause)
        dropped = ", ".join(f"{number} dropped ({cause})" for cause, number in sorted(since.items()))
        summary = (
            f"from step {self.step}, version {restored.version}: {restored.waiting} groups wait to be trained on, "
            f"{restored.in_flight} in flight are played again, {dropped or 'none dropped'}"
        )
        return "; ".join((summary, *self.notes))


def recover_buffer(checkpoint: Checkpoint, entries: Iterable[SampleEntry]) -> RecoveredBuffer:
    """`entries`: all since the state was taken, in order, as of RunFolder.samples_after; duplicates are fine."""
    state, buffer = checkpoint.state, checkpoint.state.buffer
    trained, dropped_before = NumberRanges(buffer.trained), NumberRanges(buffer.dropped)
    put = {waiting.group.id: waiting for waiting in buffer.waiting}
    lost: dict[str, str] = {}
    for entry in entries:
        id = entry.group.id if isinstance(entry, GroupPut) else entry.id
        if group_number(id) in trained or group_number(id) in dropped_before:
            continue
        if isinstance(entry, GroupPut):
            put.setdefault(id, _waiting_group(entry.group, state.version))
        else:
            lost.setdefault(id, entry.cause)
    newer = {id: waiting.group for id, waiting in put.items() if (waiting.group.version_last or 0) > state.version}
    dropped = {**dict.fromkeys(newer, LOST_LINEAGE), **lost}
    waiting = tuple(group for id, group in put.items() if id not in dropped)
    replayed = tuple(ticket for ticket in buffer.in_flight if ticket.group not in put and ticket.group not in dropped)
    for id in dropped:
        dropped_before.add(group_number(id))
    discarded = [each for id in dropped if id in newer and id not in lost for each in newer[id].members]
    unread = entries.torn if isinstance(entries, SampleLogs) else ()
    return RecoveredBuffer(
        buffer=msgspec.structs.replace(
            buffer,
            waiting=waiting,
            in_flight=replayed,
            dropped=dropped_before.ranges,
            dropped_by_cause=dict(Counter(buffer.dropped_by_cause) + Counter(dropped.values())),
            trajectories_discarded=buffer.trajectories_discarded + len(discarded),
            tokens_discarded=buffer.tokens_discarded + sum(len(each.logprobs) for each in discarded),
        ),
        dropped=dropped,
        step=state.step,
        dropped_by_cause=buffer.dropped_by_cause,
        notes=(*checkpoint.warnings, *unread),
    )


def _waiting_group(group: Group, version: int) -> WaitingGroup:
    first = group.version_first
    # The restored buffer measures the wait from its own start: clocks of two processes are not comparable.
    return WaitingGroup(group=group, version=version if first is None else first, since_s=math.inf)
