"""Results of actions, and which side caused a failure.

Failures are values: an action that timed out, was cancelled, refused or lost is a Result too, distinguished by its
status. `check()` turns them into exceptions.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from tangram.core.action import Outcome, Status, Usage
from tangram.errors import ActionCancelled, ActionLost, ActionTimedOut, AdmissionRefused, CommandFailed
from tangram.managers.work import ExecResult

SHOWN_CHARACTERS = 2000
"""Length of the end of the output in an error message, which usually contains the reason."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the time of an action, in seconds."""

    waiting_s: float
    """Until it was granted."""
    execution_s: float
    overhead_s: float
    """Starting, and releasing its grant."""

    @property
    def act_s(self) -> float:
        """Action completion time (ACT)."""
        return self.waiting_s + self.execution_s + self.overhead_s


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """An action that has settled."""

    action: str
    command: str
    status: Status
    reason: str
    """The reason of a failure; empty after success."""
    exit_code: int | None
    """None if it did not run to its end; 128 + the signal if a signal ended it."""
    stdout: str
    stderr: str
    """The output that was kept; a line in the middle replaces what was cut. Invalid UTF-8 is shown as �."""
    executed: ExecResult
    """The same as bytes, with counts of everything that was written."""
    timing: Timing
    usage: Usage
    attempts: int

    @property
    def ok(self) -> bool:
        """It ran to its end with exit code 0."""
        return self.status is Status.SUCCEEDED and self.exit_code == 0

    @property
    def cpus(self) -> int:
        """Cores that it was granted, which replaced `{cpus}`; 0 if it did not run."""
        return self.executed.cpus

    @property
    def out_of_memory(self) -> bool:
        """The memory of the sandbox was exhausted, and the kernel killed a process in it."""
        return self.executed.out_of_memory

    @property
    def session_ended(self) -> bool:
        """The persistent shell is gone; the next command of its session raises SessionEnded."""
        return self.executed.session_ended

    def check(self) -> Result:
        """Returns itself if it is ok; otherwise raises the matching exception."""
        if self.status is not Status.SUCCEEDED:
            raise_for(self.status, f"{self.command!r}: {self.reason}", self)
        if self.exit_code != 0:
            memory = " (out of memory)" if self.out_of_memory else ""
            shown = (self.stderr or self.stdout).strip()[-SHOWN_CHARACTERS:]
            raise CommandFailed(f"{self.command!r} ended with {self.exit_code}{memory}: {shown}", self)
        return self


def raise_for(status: Status, message: str, record: object) -> NoReturn:
    """The exception for an action that did not succeed; `record` is the result that it carries."""
    if status is Status.TIMED_OUT:
        raise ActionTimedOut(message, record)
    if status is Status.CANCELLED:
        raise ActionCancelled(message, record)
    if status is Status.REFUSED:
        raise AdmissionRefused("refused", message)
    raise ActionLost(message, record)


def result_of(command: str, outcome: Outcome, executed: ExecResult | None) -> Result:
    executed = executed or ExecResult()
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
