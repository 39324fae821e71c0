"""Stories: the history of one action, as readable lines.

Owns notes on actions and their text. A note is a tuple; its text is written when a story is read.
"""

from __future__ import annotations

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant, Resize
from tangram.runtime.pool_usage import ActionUse, PoolUsage
from tangram.runtime.views import StoryLine, TimelineRow
from tangram.server.observe.accounts import ClassAccount
from tangram.server.observe.amounts import describe_demand, describe_share
from tangram.server.observe.sandbox_stats import TrackedSandbox
from tangram.server.observe.time_breakdown import WAITING, TrajectoryClock

NOTES_MAX = 40
"""Notes per action; further ones are counted only. An elastic action may be resized thousands of times."""

WAITING_NOTE, GRANTED_NOTE, STARTED_NOTE, RESIZED_NOTE, STOPPED_NOTE, FAILED_NOTE = (
    "waits",
    "granted",
    "started",
    "resized",
    "stopped",
    "failed",
)

StoryNote = tuple[float, str, str | Grant | Resize | None]
"""Time, kind, and detail."""


class TrackedAction(ActionUse):
    """The observer's record of a live action: the units that it holds, its phases, and its notes."""

    __slots__ = (
        "account", "sandbox", "cpu", "granted_at", "dropped_notes", "instance", "notes", "phase", "pools", "short_kind",
        "phase_start", "started_at", "submitted_at", "trajectory",
    )  # fmt: skip

    def __init__(
        self,
        action: Action,
        account: ClassAccount,
        trajectory: TrajectoryClock,
        sandbox: TrackedSandbox | None,
        pool_usage: PoolUsage,
        now: float,
    ):
        super().__init__(action, pool_usage)
        self.account = account
        self.trajectory = trajectory
        self.sandbox = sandbox
        self.submitted_at = now
        self.granted_at = -1.0
        """Negative: never."""
        self.started_at = -1.0
        """Start of the current attempt; negative: not yet."""
        self.phase = WAITING
        self.phase_start = 0.0
        """The result of `enter_phase` for the current phase."""
        self.short_kind = ""
        """The kind of pool that lacked units at the last check."""
        self.pools: tuple[str, ...] = ()
        """Pools with units that it holds."""
        self.instance = ""
        """The sandbox name of the instance whose memory a call waits for."""
        self.cpu = 0
        """Milli-cores of its last grant."""
        self.notes: list[StoryNote] = []
        self.dropped_notes = 0
        """Notes beyond NOTES_MAX."""

    def add_note(self, now: float, kind: str, detail: str | Grant | Resize | None = None) -> None:
        if len(self.notes) < NOTES_MAX:
            self.notes.append((now, kind, detail))
        else:
            self.dropped_notes += 1


class SettledActionRecord(msgspec.Struct, frozen=True, gc=False):
    """A settled action: its row, and the rest of its story."""

    row: TimelineRow
    demand_text: str
    reason: str
    attempts: int
    cpu_s: float
    dropped_notes: int
    notes: tuple[StoryNote, ...]


def live_lines(tracked: TrackedAction) -> tuple[StoryLine, ...]:
    first = StoryLine(
        at_s=tracked.submitted_at, text=_submitted_text(tracked.action.run, describe_demand(tracked.action.demand))
    )
    return (first, *_lines(tracked.notes, tracked.dropped_notes))


def settled_lines(record: SettledActionRecord) -> tuple[StoryLine, ...]:
    row = record.row
    first = StoryLine(at_s=row.submitted_s, text=_submitted_text(row.run, record.demand_text))
    return (first, *_lines(record.notes, record.dropped_notes), StoryLine(at_s=row.ended_s, text=_settled_text(record)))


def _submitted_text(run: str, demand_text: str) -> str:
    return f"submitted by run {run}: requests {demand_text}"


def _settled_text(record: SettledActionRecord) -> str:
    row = record.row
    used = f", used {record.cpu_s:.3f} CPU seconds" if record.cpu_s else ""
    attempts_text = f" in {record.attempts} attempts" if record.attempts > 1 else ""
    times = f"; waited {row.waiting_s:.3f} s, ran {row.execution_s:.3f} s, overhead {row.overhead_s:.3f} s{used}"
    reason = f": {record.reason}" if record.reason else ""
    # An action that never ran here has no notes and no known times.
    return f"{row.status.replace('_', ' ')}{attempts_text}{reason}{times if record.notes else ''}"


def _lines(notes: list[StoryNote] | tuple[StoryNote, ...], dropped: int) -> list[StoryLine]:
    lines = [StoryLine(at_s=at, text=_note_text(kind, detail)) for at, kind, detail in notes]
    if dropped:
        lines.append(StoryLine(at_s=lines[-1].at_s, text=f"{dropped} more events are not kept"))
    return lines


def _note_text(kind: str, detail: str | Grant | Resize | None) -> str:
    if isinstance(detail, Grant):
        return _granted_text(detail)
    if isinstance(detail, Resize):
        return f"resized: {describe_share(detail.pool, detail.reserved, detail.limit)}"
    if kind == STARTED_NOTE:
        return "started"
    if kind == WAITING_NOTE:
        return f"waits for {detail}"
    if kind == STOPPED_NOTE:
        return f"stopping: {detail}"
    return f"the attempt failed: {detail}; queued again in its old position"


def _granted_text(grant: Grant) -> str:
    shares = " and ".join(describe_share(share.pool, share.reserved, share.limit) for share in grant.shares)
    attempt = f"attempt {grant.attempt}: " if grant.attempt > 1 else ""
    # The name of the batch may belong to another run.
    with_others = ", in the batch of another action" if grant.batch and grant.batch != grant.action else ""
    return f"{attempt}granted {shares or 'a place'}{with_others}"
