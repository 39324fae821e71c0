"""An instance of a function: the interface for the host and for the lease of a call.

An instance runs the program of `program.py`: in a sandbox (`sandbox_instance`) or as a process that was forked from one
that has imported the function (`forked_instance`). It executes one command at a time, each for an action and its grant.
"""

from __future__ import annotations

import asyncio
import base64
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

import msgspec

from tangram.core.action import Action
from tangram.core.messages import Grant
from tangram.managers.base import Lease
from tangram.managers.functions.work import Failure
from tangram.managers.work import KIB, LeaseResult
from tangram.processes.streams import Output

SHOWN_CHARACTERS = 1000
"""Length of the end of an instance's output in a reason."""
INLINE_BYTES_MAX = 64 * KIB
"""The largest arguments that are sent with the command; longer ones are passed as a file. The kernel limits one word of
a command line to 128 KiB."""


class FunctionLoadFailed(Exception):
    """The function cannot be imported or called: an error of the function."""

    def __init__(self, failure: Failure, stdout: bytes = b"", stderr: bytes = b"") -> None:
        self.failure = failure
        self.stdout = stdout
        self.stderr = stderr
        super().__init__(failure.message)


class InstanceLost(Exception):
    """The instance ended during a call, not because of the function."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    """Marks the reply; see `program`."""
    arguments: bytes | None
    """The pickled arguments of a call; None: load the function."""
    output: Output

    @property
    def is_inline(self) -> bool:
        return self.arguments is not None and len(self.arguments) <= INLINE_BYTES_MAX

    def text(self, path: str) -> str:
        """Encodes it for the program. `path`: the file of the function or of the arguments; not used if they are
        inline."""
        verb = "load" if self.arguments is None else "call"
        if self.arguments is not None and self.is_inline:
            form, content = "inline", self.arguments
        else:
            form, content = "file", path.encode()
        return f"tangram:{verb}:{self.token}:{form}:{base64.b64encode(content).decode()}"


AwaitLease = Callable[[Awaitable[Lease]], Awaitable[LeaseResult]]
"""Waits for the start and the end of a lease that a call needs."""


class Instance(ABC):
    is_isolated = True
    """Only the function can have ended its process."""
    loads_once = True
    """The function is loaded before the first call; otherwise with each call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = False
        """It is ready for calls."""
        self.calls = 0
        self.opened_s = asyncio.get_running_loop().time()
        self.busy_since: float | None = None
        self.idle_since = 0.0
        self.idle_timer: asyncio.TimerHandle | None = None
        self.removal_timer: asyncio.TimerHandle | None = None
        """Set after a failed removal, which is retried."""

    @abstractmethod
    async def open(self, action: Action, grant: Grant) -> None:
        """Create the instance. Raises InvalidAction, ManagerError."""

    @abstractmethod
    async def prepare(self, action: Action, grant: Grant, await_lease: AwaitLease) -> None:
        """Prepare loading the function. Raises FunctionLoadFailed, ManagerError."""

    @abstractmethod
    async def execute(self, command: Command, action: Action, grant: Grant) -> Lease:
        """Start a command. Its lease ends when the program has executed it, or has ended."""

    @abstractmethod
    async def close(self) -> None:
        """Remove the instance. Blocks until all its processes have ended. Raises ManagerError; may be called again."""

    @abstractmethod
    def import_failure(self, ended: LeaseResult, reason: str, stderr: str) -> Failure:
        """Returns why loading ended without a reply. Raises ManagerError if the function did not cause it."""

    @abstractmethod
    def exit_failure(self, ended: LeaseResult, stderr: str) -> Failure:
        """Returns why a call ended without a reply. Raises InstanceLost if the function did not cause it."""


def exit_message(code: int | None, number: int) -> str:
    """`number`: the signal that ended it, or 0."""
    if not number:
        return f"it ended its own process with exit code {code} instead of returning"
    return f"it crashed: its process was ended by {signal_name(number)}"


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
