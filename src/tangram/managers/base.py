"""The contract of managers.

An executor executes one kind of work; a manager is the executor of sandboxes on one node, with their files and images.
It makes no decisions: it starts the work of a Grant, with the units of the Grant, and reports its end. The rules for
all of them, which one contract suite checks:

- `start` returns when the work runs, or raises ManagerError and leaves nothing behind; in an executor that is not a
  manager it may be cancelled, which leaves nothing behind either;
- a lease ends exactly once: `wait` returns in any case, also if the program, the sandbox or the machine fails;
- when `wait` has returned after `stop`, no process of the action is left, and nothing else was touched;
- processes that a completed action leaves running stay in its sandbox and are frozen while no action runs;
- a sandbox that is closed while it is being opened is removed when that `Close` has ended, and one that could not be
  removed can be closed again;
- `resize` takes effect immediately and never blocks.
"""

from __future__ import annotations

from types import TracebackType
from typing import BinaryIO, Protocol, Self, runtime_checkable

from tangram.core.action import Action
from tangram.core.demand import CPU, Demand, fixed
from tangram.core.messages import Grant, Pool
from tangram.errors import ManagerError
from tangram.managers.work import Close, FileEntry, LeaseResult, SandboxSpec, Work
from tangram.processes.streams import Output

STOP_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL to the processes of an action that is stopped."""


class Lease(Protocol):
    """A manager's live handle for a grant."""

    async def wait(self) -> LeaseResult:
        """Blocks until the work has ended."""
        ...

    def resize(self, *, reserved: int, limit: int) -> None:
        """Set the milli-cores from now on."""
        ...

    def cpu_seconds(self) -> float | None:
        """CPU seconds so far; None if unknown while it runs."""
        ...

    async def stop(self) -> None:
        """End it: SIGTERM first, SIGKILL after STOP_GRACE_S. Returns when `wait` will return without delay."""
        ...


class UnmeteredLease:
    """The default methods of a lease whose work uses no CPU of the node: it has no size and no usage."""

    def resize(self, *, reserved: int, limit: int) -> None: ...

    def cpu_seconds(self) -> float | None:
        return None


class Files(Protocol):
    """Files of sandboxes. All paths are resolved inside; a failure there raises FileFailed."""

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes: ...

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        """The file appears whole or not at all; directories above it are created."""
        ...

    async def list(self, sandbox: str, path: str) -> list[FileEntry]:
        """Sorted by name."""
        ...

    async def delete(self, sandbox: str, path: str) -> None:
        """A file or a whole tree; links are not followed."""
        ...

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        """A file or a tree as a tar. Its content comes from the sandbox: do not trust it when unpacking."""
        ...

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        """Unpack a tar below a directory, which is created."""
        ...


class FilesMixin:
    """The file methods of a manager that delegates them to another object."""

    _files: Files

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes:
        return await self._files.read(sandbox, path, bytes_max=bytes_max)

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        await self._files.write(sandbox, path, content, mode=mode)

    async def list(self, sandbox: str, path: str) -> list[FileEntry]:
        return await self._files.list(sandbox, path)

    async def delete(self, sandbox: str, path: str) -> None:
        await self._files.delete(sandbox, path)

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        await self._files.pack(sandbox, path, into, bytes_max=bytes_max)

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        await self._files.unpack(sandbox, path, tar)


class Images(Protocol):
    """Images that sandboxes can be opened from, in addition to those that Commit creates."""

    async def add_image(self, path: str) -> str:
        """A root directory, or a tar as `docker save` or OCI tools write it. Returns the name of the image."""
        ...

    async def find_image(self, key: str) -> str:
        """The image that was tagged with this key, or an empty string."""
        ...

    async def tag_image(self, key: str, name: str) -> None:
        """Tag a committed image with a key; it outlives this process."""
        ...

    async def forget_image(self, name: str) -> None:
        """Delete a committed image; sandboxes that were opened from it continue to work."""
        ...


class Executor(Protocol):
    """Executes one kind of work, and owns the resources for it."""

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease: ...

    async def __aenter__(self) -> Self:
        """Acquire the resources, and remove those that a dead owner left behind."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything and leave nothing behind."""
        ...


@runtime_checkable
class ServiceRestorer(Protocol):
    """An executor that can load a service ahead of its next action."""

    async def restore(self, service: str, devices: tuple[int, ...]) -> None:
        """Does not touch devices that are in use by now. Raises ManagerError."""
        ...


class InsufficientMemory(ManagerError):
    """An executor needs memory for a sandbox before it can start an action, and none is available. Not a failure: the
    action waits for memory, and is started again with that memory reserved under this name."""

    def __init__(self, sandbox: str, memory_mib: int) -> None:
        self.sandbox = sandbox
        self.memory_mib = memory_mib
        super().__init__(f"it waits for {memory_mib} MiB of memory for a sandbox")


class Manager(Executor, Files, Images, Protocol):
    """The resources of one node."""

    backend: str
    isolates: bool
    """Whether programs in a sandbox are isolated from the machine and from other sandboxes."""

    def pools(self) -> tuple[Pool, ...]:
        """The resources of the node."""
        ...

    def sandboxes(self) -> tuple[str, ...]:
        """Names of its sandboxes, oldest first."""
        ...


@runtime_checkable
class AdoptingManager(Protocol):
    """A manager whose sandboxes outlive it."""

    adopted: dict[str, SandboxSpec]
    """Sandboxes that were recovered, by name."""
    missing: dict[str, str]
    """Sandboxes that were not recovered, with the reason."""


def sandbox_not_found(sandbox: str) -> ManagerError:
    return ManagerError(f"there is no sandbox {sandbox}: it was closed, or never opened", retry=False)


CLOSE_DEMAND = Demand({CPU: fixed(1)})
"""Never granted; a demand cannot be empty."""


async def close_sandbox(manager: Manager, sandbox: str) -> None:
    """Ends a sandbox without a grant. Raises ManagerError."""
    action = Action(id=sandbox, demand=CLOSE_DEMAND, sandbox=sandbox, kind="close")
    lease = await manager.start(action, Grant(action.id, "", (), 0), Close())
    ended = await lease.wait()
    if ended.lost:
        raise ManagerError(ended.lost)
