"""The process manager: its directory, its sandboxes and its images.

Owns the directory that holds all of them, which is locked while it lives. Promises what `managers.base` asks, as far as
the package says that it can be kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from tangram.core.action import Action
from tangram.core.demand import CORE
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.errors import FileFailed, ManagerError
from tangram.managers.base import Lease
from tangram.managers.sandboxes.process.leases import (
    NOT_EXECUTABLE,
    NOT_FOUND,
    USUAL_PATH,
    Box,
    Cpus,
    PastLease,
    ProgramLease,
    SessionLease,
)
from tangram.managers.work import (
    GIB,
    HOST_IMAGE,
    Close,
    Commit,
    Ended,
    Entry,
    Exec,
    Executed,
    Open,
    SandboxSpec,
    Work,
    require_forgettable,
)
from tangram.processes.capture import Capture
from tangram.processes.process_tree import SANDBOX_MARK, Census, Child, Kin
from tangram.processes.streams import STDERR, Output, Stream

CALLERS_MISTAKES = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG)
"""Why a program cannot be started that is not a failure of ours: its directory, or too long a command."""
FAILURE_BYTES_MAX = 4096
"""Kept of what our own commands (cp, rm) say when they fail."""
HOME_PREFIX = "tangram-process-"
HOME_NAME = re.compile(HOME_PREFIX + "[0-9a-f]{16}")
LOCK = "lock"
"""A file in the directory of a manager, locked as long as its owner is alive."""


class ProcessManager:
    """Programs as plain processes of this machine. It isolates nothing: see the module."""

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
        """`root`: where the directory of this manager is made, which holds all of its sandboxes. What managers of the
        same user left there that are dead is ended and deleted. None: the directory for temporary files.
        `cores` and `memory_bytes`: what the pools say; None: what this process may use."""
        self._given_root = root
        self._pools = cpu_node(
            node,
            len(os.sched_getaffinity(0)) if cores is None else cores,
            (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if memory_bytes is None else memory_bytes) / GIB,
        )
        self._census = Census()
        self._boxes: dict[str, Box] = {}
        self._images: dict[str, Path] = {}
        """The last commit of each name. Those before it stay until the end: somebody may be copying them."""
        self._remembered: dict[str, str] = {}
        self._made = 0
        """Directories so far."""
        self._mark = f"{secrets.token_hex(8)}."
        self._lock = -1
        self._home = Path()
        self._made_root = False
        self.cpus = Cpus()
        self.prlimit = ""
        self.shell = ""

    def pools(self) -> tuple[Pool, ...]:
        return self._pools

    def sandboxes(self) -> tuple[str, ...]:
        return tuple(self._boxes)

    # ---- taking and leaving possession ----

    async def __aenter__(self) -> Self:
        assert self._lock < 0, "a manager is entered once at a time"
        self.prlimit = shutil.which("prlimit", path=USUAL_PATH) or ""
        self.shell = shutil.which("bash", path=f"/bin:{USUAL_PATH}") or "/bin/sh"
        if not self.prlimit:
            raise ManagerError("the process backend needs prlimit: install util-linux", retry=False)
        root = self._given_root or Path(tempfile.gettempdir())
        self._made_root = not root.exists()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._sweep(root.resolve())
            self._take_home(root.resolve())
        except OSError as error:
            raise ManagerError(f"{root} cannot hold sandboxes: {error}", retry=False) from error
        return self

    def _take_home(self, root: Path) -> None:
        """It is locked before it has the name under which others look for homes of dead owners."""
        new = Path(tempfile.mkdtemp(prefix=".tangram-", dir=root))
        self._lock = os.open(new / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._home = root / f"{HOME_PREFIX}{self._mark.removesuffix('.')}"
        new.rename(self._home)

    async def _sweep(self, root: Path) -> None:
        """End what dead owners left: their processes carry the mark that their directory is named after."""
        for home in _homes(root):
            try:
                lock = os.open(home / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another one sweeps it
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                await Kin(self._census, SANDBOX_MARK, f"{home.name.removeprefix(HOME_PREFIX)}.").kill()
                await _remove(home)
            except BlockingIOError:
                continue  # its owner is alive
            finally:
                os.close(lock)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures: list[ManagerError] = []
        for box in list(self._boxes.values()):
            try:
                await self._close(box, "the manager of its sandbox ended")
            except ManagerError as failure:
                failures.append(failure)
        self._images, self._remembered = {}, {}
        try:
            await _remove(self._home.rename(self._home.with_name(f".{self._home.name}")))  # no longer to be swept
        finally:
            os.close(self._lock)
            self._lock = -1
        if self._made_root:
            with contextlib.suppress(OSError):  # others have come to use it
                self._home.parent.rmdir()
        if failures:
            raise failures[0]

    # ---- work ----

    async def start(self, action: Action, grant: Grant, work: Work, output: Output | None = None) -> Lease:
        name = action.sandbox
        if isinstance(work, Exec):
            return await self._execute(self._box(name), work, grant.width, output)
        if isinstance(work, Open):
            await self._open(name, work.spec)
        elif isinstance(work, Commit):
            await self._commit(self._box(name), work.image)
        elif isinstance(work, Close):
            if name in self._boxes:
                await self._close(self._boxes[name], f"sandbox {name} was closed while the action ran")
        else:
            raise ManagerError(
                f"the process backend does Open, Exec, Commit and Close, not {type(work).__name__}", retry=False
            )
        return PastLease(Ended())

    def _box(self, name: str) -> Box:
        box = self._boxes.get(name)
        if box is None or box.shut:
            why = f": {box.shut}" if box is not None else ""
            raise ManagerError(f"sandbox {name!r} is not open on this node{why}", retry=False)
        return box

    async def _open(self, name: str, spec: SandboxSpec) -> None:
        assert self._lock >= 0, "a manager works between entering and leaving it"
        if name in self._boxes:
            raise ManagerError(f"sandbox {name!r} is open already: choose another name", retry=False)
        if spec.user != "agent":
            raise ManagerError("user='root' needs a user namespace: use the sandbox backend", retry=False)
        self._require_image(spec.image)
        box = Box(name, spec, self._new_directory("box"), f"{self._mark}{self._made}.", self._census)
        self._boxes[name] = box
        try:
            box.make()
            if spec.image != HOST_IMAGE:
                await _copy(self._images[spec.image], box.work)
            if self._boxes.get(name) is not box:
                raise ManagerError(f"sandbox {name!r} was closed while it was made", retry=False)
        except BaseException as error:
            self._forget(box)
            await _remove(box.directory)
            if isinstance(error, OSError):
                raise ManagerError(f"sandbox {name!r} cannot be made: {error}") from error
            raise
        box.shut = ""

    async def _close(self, box: Box, why: str) -> None:
        """May be done again after it was interrupted."""
        box.shut = why
        async with box.turn:
            await box.end()
            await _remove(box.directory)
            self._forget(box)

    def _forget(self, box: Box) -> None:
        if self._boxes.get(box.name) is box:
            del self._boxes[box.name]

    async def _commit(self, box: Box, image: str) -> None:
        async with box.turn:
            self._box(box.name)
            directory = self._new_directory("image")
            box.kin.stand_still()
            try:
                await _copy(box.work, directory)
            except BaseException:
                await _remove(directory)
                raise
            finally:
                box.go_on()
            self._images[image] = directory

    def _new_directory(self, kind: str) -> Path:
        self._made += 1
        return self._home / f"{kind}-{self._made}"

    async def _execute(self, box: Box, work: Exec, width: int, output: Output | None) -> Lease:
        async with box.turn:
            self._box(box.name)
            if work.session:
                self._require_session(box, work.session)
            width = min(width, len(self.cpus) * CORE)  # more than there are would only crowd them
            lease = (SessionLease if work.session else ProgramLease)(box, work, width, output, self)
            try:
                lease.begin()
            except OSError as error:
                if error.errno not in CALLERS_MISTAKES:
                    raise ManagerError(f"a program cannot be started: {error}") from error
                said = f"tangram: {error.filename or 'the command'}: {error.strerror}\n".encode()
                code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
                return PastLease(Ended(executed=Executed(exit_code=code, stderr=said, stderr_bytes=len(said))))
            return lease

    def _require_session(self, box: Box, name: str) -> None:
        if not self.shell.endswith("/bash"):
            raise ManagerError("sessions need bash on this machine: install it", retry=False)
        shell = box.shells.get(name)
        if shell is not None and shell.lease is not None:
            raise ManagerError(f"session {name!r} of sandbox {box.name!r} runs a command already", retry=False)

    # ---- images ----

    async def add_image(self, path: str) -> str:
        raise ManagerError(
            f"the process backend has no root file system to make of {path}: use the sandbox or docker backend",
            retry=False,
        )

    async def recall_image(self, key: str) -> str:
        """Images of this backend end with its manager, so only what this one was told is remembered."""
        return self._remembered.get(key, "")

    async def remember_image(self, key: str, name: str) -> None:
        self._require_image(name)
        self._remembered[key] = name

    async def forget_image(self, name: str) -> None:
        require_forgettable(name)
        self._require_image(name)
        self._remembered = {key: image for key, image in self._remembered.items() if image != name}
        await _remove(self._images.pop(name))

    def _require_image(self, name: str) -> None:
        if name != HOST_IMAGE and name not in self._images:
            known = ", ".join([HOST_IMAGE, *self._images])
            raise ManagerError(
                f"there is no image {name!r}: the process backend has {known}; others come of Commit", retry=False
            )

    # ---- files ----

    async def read(self, sandbox: str, path: str, *, bytes_max: int) -> bytes:
        return await asyncio.to_thread(self._box(sandbox).workspace.read, path, bytes_max)

    async def write(self, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
        await asyncio.to_thread(self._box(sandbox).workspace.write, path, content, mode)

    async def delete(self, sandbox: str, path: str) -> None:
        away = await asyncio.to_thread(self._box(sandbox).workspace.take_away, path)
        try:
            await _remove(away)
        except ManagerError as error:
            raise FileFailed(path, f"is gone from the sandbox, but its space is not free yet: {error}") from error

    async def pack(self, sandbox: str, path: str, into: BinaryIO, *, bytes_max: int) -> None:
        await asyncio.to_thread(self._box(sandbox).workspace.pack, path, into, bytes_max)

    async def unpack(self, sandbox: str, path: str, tar: BinaryIO) -> None:
        await asyncio.to_thread(self._box(sandbox).workspace.unpack, path, tar)

    async def list(self, sandbox: str, path: str) -> list[Entry]:
        return await asyncio.to_thread(self._box(sandbox).workspace.entries, path)


def _homes(root: Path) -> list[Path]:
    """Directories of managers of this user. The directory for temporary files may hold lures of others."""
    found = []
    for path in root.iterdir():
        if HOME_NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # its owner has just ended
                about = path.lstat()
                if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                    found.append(path)
    return found


# ---- our own commands ---------------------------------------------------------------------------------------------


async def _copy(source: Path, target: Path) -> None:
    """A whole tree with its links, modes and times; the target is made."""
    await _run("cp", "-a", "--reflink=auto", "-T", "--", str(source), str(target))


async def _remove(path: Path) -> None:
    """A file or a whole tree. `rm` manages trees of any depth. Directories that nobody may enter are opened first if it
    fails, which without privileges it does."""
    try:
        await _run("rm", "-rf", "--one-file-system", "--", str(path))
    except ManagerError:
        await _run("chmod", "-R", "u+rwX", "--", str(path))
        await _run("rm", "-rf", "--one-file-system", "--", str(path))


async def _run(*argv: str) -> None:
    """To its end, or to that of whoever waits for it."""
    errors, said = Stream(STDERR), Capture(FAILURE_BYTES_MAX)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        errors.begin(said, None)
        try:
            child = Child(argv, env={"PATH": USUAL_PATH}, cwd="/", streams=(null, null, errors.writer))
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
        raise ManagerError(f"{argv[0]} ended with {code}: {said.text().strip()}")
