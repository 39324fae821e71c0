"""Results: what an action brought, and whose fault it was if it brought nothing.

Failures are values: an action that timed out, was cancelled, refused or lost is a Result as well, told apart by its
status. `check()` turns them into exceptions for those who prefer that.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from tangram.core.action import Outcome, Status, Usage
from tangram.errors import ActionCancelled, ActionLost, ActionTimedOut, AdmissionRefused, CommandFailed
from tangram.managers.work import Executed

SHOWN_CHARACTERS = 2000
"""Of the output in an error message: its end, where the reason mostly stands."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of an action went, in seconds."""

    waiting_s: float
    """Until it was granted its units."""
    execution_s: float
    overhead_s: float
    """Starting, and giving back."""

    @property
    def act_s(self) -> float:
        """Action completion time."""
        return self.waiting_s + self.execution_s + self.overhead_s


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One action that has settled."""

    action: str
    command: str
    status: Status
    reason: str
    """Why it did not succeed; empty if it did."""
    exit_code: int | None
    """None if it did not come to its end. 128 + the signal if one ended it."""
    stdout: str
    stderr: str
    """What was kept of them; a line in the middle says what was not. What is no UTF-8 is shown as �."""
    executed: Executed
    """The same as bytes, with the counts of all that was written."""
    timing: Timing
    usage: Usage
    attempts: int

    @property
    def ok(self) -> bool:
        """It ran to its end with exit code 0."""
        return self.status is Status.SUCCEEDED and self.exit_code == 0

    @property
    def cpus(self) -> int:
        """Whole cores that it was told to have: what `{cpus}` became. 0 if it did not run."""
        return self.executed.cpus

    @property
    def out_of_memory(self) -> bool:
        """The sandbox's memory was used up, and the kernel killed something in it."""
        return self.executed.out_of_memory

    @property
    def session_ended(self) -> bool:
        """The held shell is gone; the next command of its session raises SessionEnded."""
        return self.executed.session_ended

    def check(self) -> Result:
        """Itself, if it is ok; else the exception that says what it was."""
        if self.status is not Status.SUCCEEDED:
            raise_for(self.status, f"{self.command!r}: {self.reason}", self)
        if self.exit_code != 0:
            memory = " (out of memory)" if self.out_of_memory else ""
            shown = (self.stderr or self.stdout).strip()[-SHOWN_CHARACTERS:]
            raise CommandFailed(f"{self.command!r} ended with {self.exit_code}{memory}: {shown}", self)
        return self


def raise_for(status: Status, said: str, record: object) -> NoReturn:
    """The exception for an action that did not succeed; `record` is what the caller would have got instead."""
    if status is Status.TIMED_OUT:
        raise ActionTimedOut(said, record)
    if status is Status.CANCELLED:
        raise ActionCancelled(said, record)
    if status is Status.REFUSED:
        raise AdmissionRefused("refused", said)
    raise ActionLost(said, record)


def result_of(command: str, outcome: Outcome, executed: Executed | None) -> Result:
    executed = executed or Executed()
    return Result(
        action=outcome.action,
        command=command,
        status=outcome.status,
        reason=outcome.reason,
        exit_code=executed.exit_code if outcome.status is Status.SUCCEEDED else None,
        stdout=executed.stdout.decode(errors="replace"),
        stderr=executed.stderr.decode(errors="replace"),
        executed=executed,
        timing=Timing(waiting_s=outcome.waiting_s, execution_s=outcome.execution_s, overhead_s=outcome.overhead_s),
        usage=outcome.usage,
        attempts=outcome.attempts,
    )
