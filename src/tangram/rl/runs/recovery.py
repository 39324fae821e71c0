"""What a run goes on with: made of the state of a checkpoint and of what was logged since.

Pure. The weights go back to the checkpoint, so a group that was trained on after it counts as never trained on, and
waits again; unless a token of it was sampled by weights that are lost, for then it is no sample of any weights that
there are. Promises that nothing returns which the checkpoint says was trained on or dropped, that every group is in
exactly one place afterwards, and that the text says how many are where once they are restored, whatever bounds are
smaller then. An entry that is missing from the log does no
harm: its group is played again.

    back = recovered(checkpoint, folder.samples_after(checkpoint.step))
    buffer = SampleBuffer.restore(back.buffer, now=now, ...)        # back.buffer.in_flight is to be played anew
    left = back.text(buffer.statistics())
    upcoming = (each for each in tickets(settings) if not buffer.knows(each.number))
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from tangram.rl.buffer.number_ranges import NumberRanges
from tangram.rl.buffer.records import LOST_LINEAGE, BufferState, BufferStatistics, Waiting, number_of
from tangram.rl.rollout.records import Group
from tangram.rl.runs.checkpoints import Checkpoint
from tangram.rl.runs.sample_log import Entry, Logs, Put


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    buffer: BufferState
    """To be restored. What is in flight in it is to be played anew."""
    dropped: dict[str, str]
    """By id, the cause as it is counted: groups that will not be trained on, and were not settled at the checkpoint."""
    step: int
    """Of the checkpoint; likewise the next one."""
    dropped_by_cause: dict[str, int]
    notes: tuple[str, ...]
    """What could not be read, in words."""

    def text(self, restored: BufferStatistics) -> str:
        """What became of all groups, in words. `restored`: the buffer, when it was."""
        since = Counter(restored.dropped) - Counter(self.dropped_by_cause)
        dropped = ", ".join(f"{number} dropped ({cause})" for cause, number in sorted(since.items()))
        told = (
            f"from step {self.step}, version {restored.version}: {restored.waiting} groups wait to be trained on, "
            f"{restored.in_flight} that were in play are played anew, {dropped or 'none dropped'}"
        )
        return "; ".join((told, *self.notes))


def recovered(checkpoint: Checkpoint, entries: Iterable[Entry]) -> Recovered:
    """`entries`: all since the state was taken, in their order; some may be there twice. RunFolder.samples_after has
    them."""
    state, buffer = checkpoint.state, checkpoint.state.buffer
    trained, dropped_before = NumberRanges(buffer.trained), NumberRanges(buffer.dropped)
    put = {each.group.id: each for each in buffer.waiting}
    lost: dict[str, str] = {}
    for entry in entries:
        id = entry.group.id if isinstance(entry, Put) else entry.id
        if number_of(id) in trained or number_of(id) in dropped_before:
            continue
        if isinstance(entry, Put):
            put.setdefault(id, _waiting(entry.group, state.version))
        else:
            lost.setdefault(id, entry.cause)
    newer = {id: each.group for id, each in put.items() if (each.group.version_last or 0) > state.version}
    dropped = {**dict.fromkeys(newer, LOST_LINEAGE), **lost}
    waiting = tuple(each for id, each in put.items() if id not in dropped)
    again = tuple(each for each in buffer.in_flight if each.group not in put and each.group not in dropped)
    for id in dropped:
        dropped_before.add(number_of(id))
    discarded = [each for id in dropped if id in newer and id not in lost for each in newer[id].members]
    unread = entries.torn if isinstance(entries, Logs) else ()
    return Recovered(
        buffer=msgspec.structs.replace(
            buffer,
            waiting=waiting,
            in_flight=again,
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


def _waiting(group: Group, version: int) -> Waiting:
    first = group.version_first
    # Whoever restores it counts its waiting from then: the clocks of two processes have nothing to do with each other.
    return Waiting(group=group, version=version if first is None else first, since=math.inf)
