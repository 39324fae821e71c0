"""The manager's side of the process of a device: starts it, sends calls, and ends it with all its descendants.

Owns the child process. Promises that every request gets a reply, or ProcessLost if the process ends first, and that
after `end` no descendant of the process is left.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence

from tangram.core.demand import CORE
from tangram.errors import ManagerError
from tangram.managers.models.messages import (
    FRAME_BYTES_MAX,
    AnyDeviceReply,
    AnyDeviceRequest,
    AnyFinalReply,
    CallStarted,
    DeviceHello,
    InterruptCall,
    RequestDone,
    RequestFailed,
)
from tangram.processes.child import ChildProcess, set_done
from tangram.processes.fork_server import ForkServer
from tangram.processes.framing import FrameDecoder
from tangram.processes.process_tree import ACTION_MARK, ProcessTable, ProcessTree
from tangram.processes.width import with_width

PROGRAM = f"{__package__}.device_server"


def search_path_code() -> str:
    """Code that gives a program the import path of this process, and its working directory."""
    return f"import sys; sys.path[:] = {[*sys.path, os.getcwd()]!r}"


def child_environment() -> dict[str, str]:
    """One thread unless the environment sets another number: there are more devices than free cores."""
    return with_width(CORE, dict(os.environ))


class ProcessLost(ManagerError):
    """The process has ended before it replied."""

    begun = False
    """Whether an engine had started the call."""


class DeviceProcessNotReady(ManagerError):
    """The process could not be started: a fault of the machine or the device, not of a service."""


class ServiceFailed(ManagerError):
    """The engine failed, and the process still runs."""

    def __init__(self, failed: RequestFailed) -> None:
        self.failed = failed
        super().__init__(failed.reason)


class DeviceProcess(ChildProcess):
    """One process. `on_unexpected_end` is called once if it ends without `end`."""

    def __init__(
        self,
        name: str,
        process_table: ProcessTable,
        on_unexpected_end: Callable[[DeviceProcess], None],
        fork_server: ForkServer,
    ) -> None:
        super().__init__(name, FrameDecoder(AnyDeviceReply, FRAME_BYTES_MAX), hang_s=None)
        self.name = name
        self._on_unexpected_end = on_unexpected_end
        self._fork_server = fork_server
        self._started_calls: set[int] = set()
        self._mark = f"model-{os.getpid()}-{secrets.token_hex(8)}."
        self._tree = ProcessTree(process_table, ACTION_MARK, self._mark)

    @property
    def has_ended(self) -> bool:
        """True as soon as the process has exited, possibly before the event loop has noticed it."""
        return not self.alive or (self._process is not None and self._process.has_ended)

    async def open(self, hello: DeviceHello | None, descriptors: Sequence[int]) -> None:
        """Raises DeviceProcessNotReady, and leaves nothing behind then. `hello`: None for a process without devices."""
        await self.launch(
            PROGRAM,
            hello,
            name="model_device",
            env=child_environment() | {ACTION_MARK: self._mark},
            fork_server=self._fork_server,
            keep=descriptors,
        )

    async def greet(self, hello: DeviceHello | None) -> None:
        self.mark_ready()
        if hello is not None:
            await self.request(hello.id, hello)

    def start_failure(self, error: Exception) -> DeviceProcessNotReady:
        tail = "" if isinstance(error, ProcessLost) else self._output_tail()
        return DeviceProcessNotReady(f"{self.name} did not get ready: {error}{tail}")

    def on_spawned(self) -> None:
        self._tree.include(self.pid)

    # ---- requests ----

    async def call(self, request: AnyDeviceRequest) -> RequestDone:
        """Raises ProcessLost, or ServiceFailed."""
        try:
            reply: AnyFinalReply = await self.request(request.id, request)
        except ProcessLost as error:
            error.begun = request.id in self._started_calls
            raise
        finally:
            self._started_calls.discard(request.id)
        if isinstance(reply, RequestFailed):
            raise ServiceFailed(reply)
        return reply

    def interrupt(self, call: int) -> None:
        self.send(InterruptCall(id=0, call=call))

    def on_message(self, reply: AnyDeviceReply) -> None:
        if isinstance(reply, CallStarted):
            self._started_calls.add(reply.id)
        else:
            self.resolve(reply.id, reply)

    # ---- end ----

    def death_error(self, reason: str) -> ProcessLost:
        return ProcessLost(f"{self.name}: {reason}")

    def connection_lost(self, error: Exception | None) -> None:
        """The process closes its socket only by ending."""
        set_done(self._disconnected)
        if self.alive:
            assert self._process is not None
            self._process.signal(signal.SIGKILL)

    def on_unexpected_exit(self) -> None:
        self._on_unexpected_end(self)

    async def kill_remaining(self) -> None:
        """Also kills processes that engines have started."""
        await self._tree.kill()
