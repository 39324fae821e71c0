"""The process manager: its directory, its sandboxes and its images.

Owns the directory that holds all of them, which is locked while it lives. Promises what `managers.base` requires, with
the exceptions that the package docstring states.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO, Self

from tangram.core.action import Action
from tangram.core.demand import CORE
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.errors import FileFailed, ManagerError
from tangram.files.lock import lock_file
from tangram.managers.base import Lease
from tangram.managers.sandboxes.leases import DEFAULT_PATH, CompletedLease
from tangram.managers.sandboxes.process.leases import (
    AffinityAllocator,
    ProcessProgramLease,
    ProcessSandbox,
    ProcessSessionLease,
)
from tangram.managers.work import (
    GIB,
    HOST_IMAGE,
    Close,
    Commit,
    Exec,
    ExecResult,
    FileEntry,
    LeaseResult,
    Open,
    SandboxSpec,
    Work,
    require_forgettable,
)
from tangram.processes.capture import Capture
from tangram.processes.exit_codes import NOT_EXECUTABLE, NOT_FOUND
from tangram.processes.process_tree import SANDBOX_MARK, ProcessTable, ProcessTree, SpawnedChild
from tangram.processes.streams import STDERR, Output, Stream

CALLER_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG)
"""Reasons for a failed start that are the caller's: its directory, or too long a command."""
FAILURE_BYTES_MAX = 4096
"""Bytes kept of the error output of the manager's own commands (cp, rm)."""
HOME_PREFIX = "tangram-process-"
HOME_NAME = re.compile(HOME_PREFIX + "[0-9a-f]{16}")
LOCK = "lock"
"""A file in the directory of a manager, locked as long as its owner is alive."""


class ProcessManager:
    """Programs as plain processes of this machine, without isolation: see the package."""

    backend = "process"
    isolates = False

    def __init__(
        self,
        *,
        root: Path | None = None,
        cores: float | None = None,
        memory_bytes: int | None = None,
        node: str = "local",
    ) -> None:
        """`root`: where the directory of this manager is created, which holds all of its sandboxes; None: the directory
        for temporary files. Directories and processes of dead managers of the same user there are removed. `cores` and
        `memory_bytes`: the size of the pools; None: what this process may use."""
        self._given_root = root
        self._pools = cpu_node(
            node,
            len(os.sched_getaffinity(0)) if cores is None else cores,
            (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if memory_bytes is None else memory_bytes) / GIB,
        )
        self._process_table = ProcessTable()
        self._sandboxes: dict[str, ProcessSandbox] = {}
        self._images: dict[str, Path] = {}
        """The last commit of each name. Earlier ones stay until the end, because they may be being copied."""
        self._image_by_key: dict[str, str] = {}
        self._directories_made = 0
        """Number of directories so far."""
        self._mark = f"{secrets.token_hex(8)}."
        self._lock = -1
        self._home = Path()
        self._created_root = False
        self.cpu_allocator = AffinityAllocator()
        self.prlimit = ""
        self.shell = ""

    def pools(self) -> tuple[Pool, ...]:
        return self._pools

    def sandboxes(self) -> tuple[str, ...]:
        return tuple(self._sandboxes)

    # ---- enter and exit ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        assert self._lock < 0, "this manager is entered already; a manager can be entered once at a time"
        self.prlimit = shutil.which("prlimit", path=DEFAULT_PATH) or ""
        self.shell = shutil.which("bash", path=f"/bin:{DEFAULT_PATH}") or "/bin/sh"
        if not self.prlimit:
            raise ManagerError("the process backend needs prlimit: install util-linux", retry=False)
        root = self._given_root or Path(tempfile.gettempdir())
        self._created_root = not root.exists()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._sweep(root.resolve())
            self._create_home(root.resolve())
        except OSError as error:
            raise ManagerError(f"{root} cannot hold sandboxes: {error}", retry=False) from error
        return self

    def _create_home(self, root: Path) -> None:
        """It is locked before it gets the name under which others look for directories of dead owners."""
        # Not `files.atomic_directory`, which syncs to disk and has no lock: nothing here outlives this process.
        new = Path(tempfile.mkdtemp(prefix=".tangram-", dir=root))
        self._lock = lock_file(new / LOCK)
        self._home = root / f"{HOME_PREFIX}{self._mark.removesuffix('.')}"
        new.rename(self._home)

    async def _sweep(self, root: Path) -> None:
        """End processes of dead owners: they carry the mark that is the name of the owner's directory."""
        for home in _find_homes(root):
            try:
                lock = lock_file(home / LOCK, create=False)
            except (BlockingIOError, FileNotFoundError):
                continue  # its owner is alive, or another process removes it
            try:
                await ProcessTree(self._process_table, SANDBOX_MARK, f"{home.name.removeprefix(HOME_PREFIX)}.").kill()
                await _remove(home)
            finally:
                os.close(lock)

    async def __aexit__(self, *error: object) -> None:
        failures: list[ManagerError] = []
        for sandbox in list(self._sandboxes.values()):
            try:
                await self._close(sandbox, "the manager of its sandbox ended")
            except ManagerError as failure:
                failures.append(failure)
        self._images, self._image_by_key = {}, {}
        try:
            await _remove(
                self._home.rename(self._home.with_name(f".{self._home.name}"))
            )  # no longer to be removed by others
        finally:
            os.close(self._lock)
            self._lock = -1
        if self._created_root:
            with contextlib.suppress(OSError):  # other managers use it
                self._home.parent.rmdir()
        if failures:
            raise failures[0]

    # ---- work ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        name = action.sandbox
        if isinstance(work, Exec):
            return await self._execute(self._get_sandbox(name), work, grant.width, output)
        if isinstance(work, Open):
            await self._open(name, work.spec)
        elif isinstance(work, Commit):
            await self._commit(self._get_sandbox(name), work.image)
        elif isinstance(work, Close):
            if name in self._sandboxes:
                await self._close(self._sandboxes[name], f"sandbox {name} was closed while the action ran")
        else:
            raise ManagerError(
                f"the process backend does Open, Exec, Commit and Close, not {type(work).__name__}", retry=False
            )
        return CompletedLease(LeaseResult())

    def _get_sandbox(self, name: str) -> ProcessSandbox:
        sandbox = self._sandboxes.get(name)
        if sandbox is None or sandbox.closed_reason:
            why = f": {sandbox.closed_reason}" if sandbox is not None else ""
            raise ManagerError(f"sandbox {name!r} is not open on this node{why}", retry=False)
        return sandbox

    async def _open(self, name: str, spec: SandboxSpec) -> None:
        assert self._lock >= 0, "the manager is not open: use it inside `async with`"
        if name in self._sandboxes:
            raise ManagerError(f"sandbox {name!r} is open already: choose another name", retry=False)
        if spec.user != "agent":
            raise ManagerError("user='root' needs a user namespace: use the sandbox backend", retry=False)
        self._require_image(spec.image)
        sandbox = ProcessSandbox(
            name, spec, self._new_directory("box"), f"{self._mark}{self._directories_made}.", self._process_table
        )
        self._sandboxes[name] = sandbox
        try:
            await self._create_sandbox(sandbox)
        except BaseException as error:
            self._unregister(sandbox)
            await _remove(sandbox.directory)
            if isinstance(error, OSError):
                raise ManagerError(f"sandbox {name!r} cannot be created: {error}") from error
            raise

    async def _create_sandbox(self, sandbox: ProcessSandbox) -> None:
        """Create its directories and copy its image; no process runs before the first program (leases.py `_spawn`)."""
        sandbox.create_directories()
        if sandbox.spec.image != HOST_IMAGE:
            await _copy(self._images[sandbox.spec.image], sandbox.work)
        if self._sandboxes.get(sandbox.name) is not sandbox:
            raise ManagerError(f"sandbox {sandbox.name!r} was closed while it was created", retry=False)
        sandbox.closed_reason = ""

    async def _close(self, sandbox: ProcessSandbox, why: str) -> None:
        """Can be repeated after an interruption."""
        sandbox.closed_reason = why
        async with sandbox.start_lock:
            await sandbox.kill_all()
            await _remove(sandbox.directory)
            self._unregister(sandbox)

    def _unregister(self, sandbox: ProcessSandbox) -> None:
        if self._sandboxes.get(sandbox.name) is sandbox:
            del self._sandboxes[sandbox.name]

    async def _commit(self, sandbox: ProcessSandbox, image: str) -> None:
        async with sandbox.start_lock:
            self._get_sandbox(sandbox.name)
            directory = self._new_directory("image")
            sandbox.processes.freeze()
            try:
                await _copy(sandbox.work, directory)
            except BaseException:
                await _remove(directory)
                raise
            finally:
                sandbox.thaw_if_running()
            self._images[image] = directory

    def _new_directory(self, kind: str) -> Path:
        self._directories_made += 1
        return self._home / f"{kind}-{self._directories_made}"

    async def _execute(self, sandbox: ProcessSandbox, work: Exec, width: int, output: Output | None) -> Lease:
        async with sandbox.start_lock:
            self._get_sandbox(sandbox.name)
            if work.session:
                self._require_session(sandbox, work.session)
            width = min(width, len(self.cpu_allocator) * CORE)  # more would only compete for the same cores
            lease = (ProcessSessionLease if work.session else ProcessProgramLease)(sandbox, work, width, output, self)
            try:
                await lease.begin()
            except OSError as error:
                if error.errno not in CALLER_ERRNOS:
                    raise ManagerError(f"a program cannot be started: {error}") from error
                message = f"tangram: {error.filename or 'the command'}: {error.strerror}\n".encode()
                code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
                return CompletedLease(
                    LeaseResult(executed=ExecResult(exit_code=code, stderr=message, stderr_bytes=len(message)))
                )
            return lease

    def _require_session(self, sandbox: ProcessSandbox, name: str) -> None:
        if not self.shell.endswith("/bash"):
            raise ManagerError("sessions need bash on this machine: install it", retry=False)
        shell = sandbox.sessions.get(name)
        if shell is not None and shell.busy:
            raise ManagerError(f"session {name!r} of sandbox {sandbox.name!r} runs a command already", retry=False)

    # ---- images ----

    async def add_image(self, path: str) -> str:
        raise ManagerError(
            f"the process backend has no root file system to make of {path}: use the sandbox or docker backend",
            retry=False,
        )

    async def find_image(self, key: str) -> str:
        """Images of this backend end with its manager, so only its own are remembered."""
        return self._image_by_key.get(key, "")

    async def tag_image(self, key: str, name: str) -> None:
        self._require_image(name)
        self._image_by_key[key] = name

    async def forget_image(self, name: str) -> None:
        require_forgettable(name)
        self._require_image(name)
        self._image_by_key = {key: image for key, image in self._image_by_key.items() if image != name}
        await _remove(self._images.pop(name))

    def _require_image(self, name: str) -> None:
        if name != HOST_IMAGE and name not in self._images:
            known = ", ".join([HOST_IMAGE, *self._images])
            raise ManagerError(
                f"there is no image {name!r}: the process backend has {known}; others are created by Commit",
                retry=False,
            )

    # ---- files ----

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes:
        return await asyncio.to_thread(self._get_sandbox(sandbox).workspace.read, path, bytes_max)

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        await asyncio.to_thread(self._get_sandbox(sandbox).workspace.write, path, content, mode)

    async def delete(self, sandbox: str, path: str) -> None:
        away = await asyncio.to_thread(self._get_sandbox(sandbox).workspace.move_aside, path)
        try:
            await _remove(away)
        except ManagerError as error:
            raise FileFailed(path, f"is gone from the sandbox, but its space is not free yet: {error}") from error

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        await asyncio.to_thread(self._get_sandbox(sandbox).workspace.pack, path, into, bytes_max)

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        await asyncio.to_thread(self._get_sandbox(sandbox).workspace.unpack, path, tar)

    async def list(self, sandbox: str, path: str) -> list[FileEntry]:
        return await asyncio.to_thread(self._get_sandbox(sandbox).workspace.list_entries, path)


def _find_homes(root: Path) -> list[Path]:
    """Directories of managers of this user. The directory for temporary files may contain decoys of other users."""
    homes = []
    for path in root.iterdir():
        if HOME_NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # its owner has just ended
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    homes.append(path)
    return homes


# ---- commands of the manager itself ---------------------------------------------------------------------------------


async def _copy(source: Path, target: Path) -> None:
    """A whole tree with its links, modes and times; the target is created."""
    await _run("cp", "-a", "--reflink=auto", "-T", "--", str(source), str(target))


async def _remove(path: Path) -> None:
    """A file or a whole tree of any depth. If it fails, which without privileges it does for directories without
    permissions, they are made accessible first."""
    try:
        await _run("rm", "-rf", "--one-file-system", "--", str(path))
    except ManagerError:
        await _run("chmod", "-R", "u+rwX", "--", str(path))
        await _run("rm", "-rf", "--one-file-system", "--", str(path))


async def _run(*argv: str) -> None:
    """Run a command to its end; killed if the caller is cancelled."""
    errors, capture = Stream(STDERR), Capture(FAILURE_BYTES_MAX)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        errors.begin(capture, None)
        try:
            child = SpawnedChild(argv, env={"PATH": DEFAULT_PATH}, cwd="/", streams=(null, null, errors.writer))
        except OSError as error:
            raise ManagerError(f"{argv[0]} cannot be started: {error}") from error
        errors.close_writer()
        try:
            await asyncio.wait({child.exited})
        except BaseException:
            child.signal(signal.SIGKILL)
            raise
        finally:
            code, _ = child.reap()
        errors.end()
    finally:
        os.close(null)
        errors.close()
    if code != 0:
        raise ManagerError(f"{argv[0]} ended with {code}: {capture.text().strip()}")
