"""Every exception of Tangram, and whose fault each one is.

TangramError
├── InvalidInput          the caller: a field is wrong; names the field, the value and what would be valid
│   ├── InvalidAction     ... in an action or its demand
│   ├── InvalidConfig     ... in a config, a pool or a command-line option
│   └── InvalidTrace      ... in a trace file; names the line
├── AdmissionRefused      a limit: names it, its value and what to do
├── ManagerError          the infrastructure: a machine, a process, a network
├── FileFailed            a file inside a sandbox: it is missing, not allowed, too large, or the disk is full
├── SessionEnded          the caller: the shell of a session has ended; names the command that ended it
├── ActionFailed          an action, raised by `Result.check()` only; carries the Result
│   ├── CommandFailed     ... the agent: its exit code was not 0
│   ├── FunctionFailed    ... the function: it raised, ended its process or used up its memory
│   ├── ActionTimedOut    ... the agent: it took longer than its time limit
│   ├── ActionCancelled   ... the caller: it was cancelled
│   └── ActionLost        ... the infrastructure failed; never the agent's fault
└── InvariantError        a bug in Tangram; carries the events that led to it
"""

from __future__ import annotations


class TangramError(Exception):
    """Root of the tree: `except TangramError` catches everything that Tangram raises deliberately."""


class InvalidInput(TangramError):
    """An argument of the caller is invalid. Nothing was changed."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{field}: expected {expected}, got {value!r}")


class InvalidAction(InvalidInput):
    """An action or its demand is malformed."""


class InvalidConfig(InvalidInput):
    """A config, a pool or an option is malformed."""


class InvalidTrace(InvalidInput):
    """A trace file is malformed; `field` names the file and line."""


class AdmissionRefused(TangramError):
    """A named limit refuses the action."""

    def __init__(self, limit: str, reason: str) -> None:
        self.limit = limit
        self.reason = reason
        super().__init__(reason)


class ManagerError(TangramError):
    """A process, a machine or a network failed."""

    def __init__(self, reason: str, *, retry: bool = True) -> None:
        self.retry = retry
        """False if a second try cannot help."""
        super().__init__(reason)


class FileFailed(TangramError):
    """A file inside a sandbox cannot be read or written as requested."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class SessionEnded(TangramError):
    """The shell of a session is gone: a command timed out, was cancelled, or ended it."""


class ActionFailed(TangramError):
    """An action did not succeed."""

    def __init__(self, message: str, result: object) -> None:
        self.result = result
        super().__init__(message)


class CommandFailed(ActionFailed):
    """The command ended with an exit code other than 0."""


class FunctionFailed(ActionFailed):
    """The function raised, ended its process, or used up its memory."""


class ActionTimedOut(ActionFailed):
    """The time limit was reached."""


class ActionCancelled(ActionFailed):
    """The caller cancelled the action."""


class ActionLost(ActionFailed):
    """A machine, a sandbox or a start failed; never the agent's fault."""


class InvariantError(TangramError):
    """A bug in Tangram. The message ends with the story of the action it concerns."""

    def __init__(self, what: str, story: list[str] | None = None) -> None:
        self.what = what
        self.story = story or []
        lines = [what, *(f"    {line}" for line in self.story)]
        super().__init__("\n".join(lines))
