"""Stories: what happened to one action, in lines that a person reads.

Owns the notes that are kept of an action and the words that are made of them when somebody asks. A note is three
things, so that keeping one costs a tuple: nothing is written out before it is read.
"""

from __future__ import annotations

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant, Resize
from tangram.runtime.views import Row, StoryLine
from tangram.server.observe.accounts import ClassAccount
from tangram.server.observe.amounts import asked_for, share
from tangram.server.observe.sandbox_stats import Box
from tangram.server.observe.time_breakdown import WAITING, Trajectory

NOTES_MAX = 40
"""Of one action. An elastic one may be resized thousands of times; what comes beyond is counted, not kept."""

WAITS, GRANTED, STARTED, RESIZED, STOPPED, FAILED = "waits", "granted", "started", "resized", "stopped", "failed"

Note = tuple[float, str, str | Grant | Resize | None]
"""When, what, and what to say of it."""


class Life:
    """An action that has yet to settle."""

    __slots__ = (
        "account", "action", "attempt", "box", "cpu", "granted_s", "missed", "node", "notes", "phase", "pools", "short",
        "since", "started_s", "submitted_s", "trajectory",
    )  # fmt: skip

    def __init__(self, action: Action, account: ClassAccount, trajectory: Trajectory, box: Box | None, now: float):
        self.action = action
        self.account = account
        self.trajectory = trajectory
        self.box = box
        self.submitted_s = now
        self.granted_s = -1.0
        """Negative: never."""
        self.started_s = -1.0
        """Of the present attempt; negative: not yet."""
        self.attempt = 0
        self.phase = WAITING
        self.since = 0.0
        """What its trajectory answered when it came into this phase."""
        self.short = ""
        """The kind of pool that was found short last."""
        self.pools: tuple[str, ...] = ()
        """Of which it holds units."""
        self.node = ""
        self.cpu = 0
        """Milli-cores that are reserved for it, or were."""
        self.notes: list[Note] = []
        self.missed = 0
        """Notes that found no room."""

    def note(self, now: float, what: str, of: str | Grant | Resize | None = None) -> None:
        if len(self.notes) < NOTES_MAX:
            self.notes.append((now, what, of))
        else:
            self.missed += 1


class Past(msgspec.Struct, frozen=True, gc=False):
    """An action that has settled: as a row, and what its story needs besides."""

    row: Row
    asked: str
    reason: str
    attempts: int
    cpu_s: float
    missed: int
    notes: tuple[Note, ...]


def live_lines(life: Life) -> tuple[StoryLine, ...]:
    first = StoryLine(at_s=life.submitted_s, text=_submitted(life.action.run, asked_for(life.action.demand)))
    return (first, *_lines(life.notes, life.missed))


def past_lines(past: Past) -> tuple[StoryLine, ...]:
    row = past.row
    first = StoryLine(at_s=row.submitted_s, text=_submitted(row.run, past.asked))
    return (first, *_lines(past.notes, past.missed), StoryLine(at_s=row.ended_s, text=_settled(past)))


def _submitted(run: str, asked: str) -> str:
    return f"submitted by run {run}: asks for {asked}"


def _settled(past: Past) -> str:
    row = past.row
    used = f", used {past.cpu_s:.3f} CPU seconds" if past.cpu_s else ""
    again = f" in {past.attempts} attempts" if past.attempts > 1 else ""
    times = f"; waited {row.waiting_s:.3f} s, ran {row.execution_s:.3f} s, overhead {row.overhead_s:.3f} s{used}"
    reason = f": {past.reason}" if past.reason else ""
    # Of one that was never here nothing was noted, and its times are not known.
    return f"{row.status.replace('_', ' ')}{again}{reason}{times if past.notes else ''}"


def _lines(notes: list[Note] | tuple[Note, ...], missed: int) -> list[StoryLine]:
    lines = [StoryLine(at_s=at, text=_text(what, of)) for at, what, of in notes]
    if missed:
        lines.append(StoryLine(at_s=lines[-1].at_s, text=f"{missed} more things happened, which are not kept"))
    return lines


def _text(what: str, of: str | Grant | Resize | None) -> str:
    if isinstance(of, Grant):
        return _granted(of)
    if isinstance(of, Resize):
        return f"resized: {share(of.pool, of.reserved, of.limit)}"
    if what == STARTED:
        return "started"
    if what == WAITS:
        return f"waits for {of}"
    if what == STOPPED:
        return f"asked to stop: {of}"
    return f"the attempt failed: {of}; it takes its old turn again"


def _granted(grant: Grant) -> str:
    shares = " and ".join(share(each.pool, each.reserved, each.limit) for each in grant.shares)
    attempt = f"attempt {grant.attempt}: " if grant.attempt > 1 else ""
    # Whose batch it is may be a name of another run.
    with_others = ", in the batch of another action" if grant.batch and grant.batch != grant.action else ""
    return f"{attempt}granted {shares or 'a place'}{with_others}"
