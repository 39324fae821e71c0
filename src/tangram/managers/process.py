"""Sandboxes that are directories: programs run as plain processes of this machine. It isolates NOTHING.

For machines where neither root, bubblewrap nor control groups are to be had, and for programs that are trusted. A
program sees the machine, its network and the files of the user who runs Tangram, and can do to them what that user can.
What is kept of the contract of managers, and what is not:

- a sandbox is a private directory with a workspace, which `/work` of the contract means, and which is the home of its
  programs; their temporary files are beside it. There is no other file system of its own: paths outside `/work` are
  refused. File work never leaves the workspace, whatever links a program makes meanwhile; programs themselves, which
  do not know the name `/work`, go where they like;
- what actions leave running stands still between actions, dies with the sandbox, and is found as `process_tree` says;
- sandboxes die with their manager, but not with a process that is killed: what it left runs on until the next manager
  at the same place ends it;
- the width is told, by affinity and environment, but no limit of CPU is enforced and `resize` changes nothing;
- of the sizes of a sandbox, memory and open files hold for each process alone and the disk for each file alone;
  the number of processes and the network are not limited.

The environment of this process is not handed on, because it may hold secrets: a program gets PATH, what the sandbox and
the action say, and the width. In a session the variables of an action stay, as if they had been exported by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import posixpath
import re
import resource
import secrets
import shlex
import shutil
import signal
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self, cast

from tangram.core.action import Action, Usage
from tangram.core.demand import CORE
from tangram.core.messages import Grant, Pool, cpu_node
from tangram.errors import FileFailed, ManagerError
from tangram.managers.base import STOP_GRACE_S, Lease, Output
from tangram.managers.capture import Capture
from tangram.managers.process_tree import ACTION_MARK, SANDBOX_MARK, Census, Child, Kin, Process
from tangram.managers.streams import ShellStreams, Stream, standard_input
from tangram.managers.width import filled_in, told, whole_cores
from tangram.managers.work import (
    GIB,
    STDERR,
    STDOUT,
    WORKSPACE,
    Close,
    Commit,
    Ended,
    Entry,
    Exec,
    Executed,
    Open,
    SandboxSpec,
    Work,
    inside,
)

HOST_IMAGE = "host"
"""The one image that is always there: an empty workspace."""
NOT_FOUND, NOT_EXECUTABLE, KILLED = 127, 126, 128 + signal.SIGKILL
"""Exit codes, as a shell gives them."""
CALLERS_MISTAKES = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG)
"""Why a program cannot be started that is not a failure of ours: its directory, or too long a command."""
FAILURE_BYTES_MAX = 4096
"""Kept of what our own commands (cp, rm) say when they fail."""
LINKS_MAX = 40
"""Followed on the way to one file, as the kernel has it."""
ENTRIES_MAX = 100_000
"""Of one listing."""
DEPTH_MAX = 200
"""Of a tree that is packed: each level costs a descriptor."""
COPY_BYTES = 1 << 20

HOME_PREFIX = "tangram-process-"
HOME_NAME = re.compile(HOME_PREFIX + "[0-9a-f]{16}")
LOCK = "lock"
"""A file in the directory of a manager, locked as long as its owner is alive."""

BASE_ENVIRONMENT = {"LANG": "C.UTF-8", "TERM": "dumb"}
USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _at_most_hard(kind: int, wanted: int) -> int:
    """Without privileges, no limit can be above what holds for this process."""
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


# ---- files --------------------------------------------------------------------------------------------------------


class Workspace:
    """The files of one sandbox.

    Programs may change directories into links at any moment, so no path is ever handed to the kernel as a whole: every
    step opens one name below a directory that is held open, and never follows a link there. Links are read and walked
    by the same rule; one that leads out of the workspace is refused. All of it blocks: it is called in a thread.
    """

    def __init__(self, directory: Path, aside: Path, bytes_max: int) -> None:
        self.directory = directory
        self._aside = aside
        """On the same file system, and nowhere that paths of the sandbox lead: for what is not whole yet."""
        self._bytes_max = bytes_max
        """Of one file."""

    def read(self, path: str, bytes_max: int) -> bytes:
        with _told(path), self._at(path) as (parent, name), _opened(name, parent, os.O_PATH) as fd:
            size = _size_of_regular(fd)
            if size > bytes_max:
                raise FileFailed(path, f"has {size} bytes, more than the {bytes_max} that were asked for")
            with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
                content = bytearray()
                while len(content) <= bytes_max and (data := file.read(COPY_BYTES)):
                    content += data
            if len(content) > bytes_max:
                raise FileFailed(path, f"grew above the {bytes_max} bytes that were asked for")
            return bytes(content)

    def write(self, path: str, content: bytes, mode: int) -> None:
        with _told(path), self._at(path, make=True, follow=False) as (parent, name):
            if len(content) > self._bytes_max:
                raise FileFailed(path, f"{len(content)} bytes are more than the disk of the sandbox, {self._bytes_max}")
            with self._part() as part:
                part.write(content)
                self._put(part, mode, parent, name)

    def entries(self, path: str) -> list[Entry]:
        found: list[Entry] = []
        with (
            _told(path),
            self._at(path) as (parent, name),
            _opened(name, parent, os.O_DIRECTORY) as fd,
            os.scandir(fd) as scan,
        ):
            for entry in scan:
                if len(found) >= ENTRIES_MAX:
                    raise FileFailed(path, f"has more than {ENTRIES_MAX} entries; list it with a program")
                with contextlib.suppress(FileNotFoundError):  # it vanished meanwhile
                    found.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
        return sorted(found, key=lambda entry: entry.name)

    def take_away(self, path: str) -> Path:
        """Move a file or a tree out of the workspace at one stroke. Returns where it is now."""
        with _told(path), self._at(path, follow=False) as (parent, name):
            if name == ".":
                raise FileFailed(path, "a directory that is the workspace or stands above it cannot be deleted")
            away = self._aside / secrets.token_hex(8)
            os.rename(name, away, src_dir_fd=parent)
            return away

    def pack(self, path: str, into: BinaryIO, bytes_max: int) -> None:
        """Names start with that of the file or directory. Sockets, pipes and devices are left out."""
        with _told(path), self._at(path, follow=False) as (parent, name):
            bounded = cast(IO[bytes], _Bounded(path, into, bytes_max))  # of a stream, a tar only needs `write`
            with tarfile.open(fileobj=bounded, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                top = posixpath.basename(posixpath.normpath(inside(path))) if name == "." else name
                _pack(tar, path, parent, name, top, DEPTH_MAX)

    def unpack(self, path: str, source: BinaryIO) -> None:
        with _told(path), tarfile.open(fileobj=source, mode="r|") as tar:
            self._make_directory(path)
            for member in tar:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise FileFailed(path, f"the tar has {member.name!r}, which leads out of the directory")
                self._unpack_one(tar, member, path)

    def _unpack_one(self, tar: tarfile.TarFile, member: tarfile.TarInfo, base: str) -> None:
        path = f"{base}/{member.name}"
        if member.isdir():
            self._make_directory(path, member.mode)
            return
        with self._at(path, make=True, follow=False) as (parent, name):
            if member.isreg():
                source = tar.extractfile(member)
                assert source is not None
                if member.size > self._bytes_max:
                    raise FileFailed(path, f"{member.size} bytes are more than the disk, {self._bytes_max}")
                with self._part() as part:
                    shutil.copyfileobj(source, part, COPY_BYTES)
                    self._put(part, member.mode, parent, name)
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            if member.issym():
                os.symlink(member.linkname, name, dir_fd=parent)
            elif member.islnk():
                with self._at(f"{base}/{member.linkname}", follow=False) as (there, original):
                    os.link(original, name, src_dir_fd=there, dst_dir_fd=parent, follow_symlinks=False)
            else:
                raise FileFailed(path, "is neither a file, a directory nor a link; a sandbox takes nothing else")

    # ---- steps ----

    @contextlib.contextmanager
    def _at(self, path: str, *, make: bool = False, follow: bool = True) -> Iterator[tuple[int, str]]:
        """The directory that holds it, opened, and its name there; `.` if the path ends with a directory that was
        walked into. `make`: directories on the way are made. `follow`: a link at the end is followed too."""
        ahead = list(reversed(_below_workspace(path)))
        way = [os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
        found, links = ".", 0
        try:
            while ahead:
                name = ahead.pop()
                if name == "..":
                    self._step_up(path, way)
                elif (follow or ahead) and (target := _link(name, way[-1])) is not None:
                    links += 1
                    if links > LINKS_MAX:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    ahead += reversed(self._turn_to(path, target, way))
                elif ahead:
                    way.append(_step_down(name, way[-1], make))
                else:
                    found = name
            yield way[-1], found
        finally:
            for fd in way:
                os.close(fd)

    def _step_up(self, path: str, way: list[int]) -> None:
        if len(way) == 1:
            raise FileFailed(path, f"leads out of {WORKSPACE}; the process backend has no files outside it")
        os.close(way.pop())

    def _turn_to(self, path: str, target: str, way: list[int]) -> list[str]:
        """Where a link leads: names from the end of the way, which starts anew if the link is absolute."""
        if target.startswith("/"):
            home = f"{self.directory}/"
            if not f"{target}/".startswith(home):
                raise FileFailed(path, f"a link on the way leads out of {WORKSPACE}")
            while len(way) > 1:
                os.close(way.pop())
            target = target[len(home) :]
        return _names(target)

    def _make_directory(self, path: str, mode: int | None = None) -> None:
        with self._at(path, make=True) as (parent, name):
            made = _step_down(name, parent, make=True)
            try:
                if mode is not None:
                    os.chmod(f"/proc/self/fd/{made}", (mode & 0o777) | stat.S_IRWXU)
            finally:
                os.close(made)

    @contextlib.contextmanager
    def _part(self) -> Iterator[IO[bytes]]:
        """A file that is not whole yet, and is gone afterwards unless it was put in its place."""
        path = self._aside / secrets.token_hex(8)
        try:
            with open(path, "xb", buffering=0) as part:
                yield part
        finally:
            path.unlink(missing_ok=True)

    def _put(self, part: IO[bytes], mode: int, parent: int, name: str) -> None:
        if name == ".":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.fchmod(part.fileno(), mode & 0o777)
        os.replace(part.name, name, dst_dir_fd=parent)


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    """What the file system refuses, as the failure of this path."""
    try:
        yield
    except OSError as error:
        raise FileFailed(path, error.strerror or str(error)) from error
    except tarfile.TarError as error:
        raise FileFailed(path, f"is not a tar that can be read: {error}") from error


def _below_workspace(path: str) -> list[str]:
    absolute = inside(path)
    if not f"{absolute}/".startswith(f"{WORKSPACE}/"):
        raise FileFailed(path, f"is outside {WORKSPACE}; the process backend has no file system of its own there")
    return _names(absolute[len(WORKSPACE) :])


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _link(name: str, parent: int) -> str | None:
    """Where a link leads; None if it is none."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _step_down(name: str, parent: int, make: bool) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if make and name != ".":
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


@contextlib.contextmanager
def _opened(name: str, parent: int, flags: int) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _size_of_regular(fd: int) -> int:
    """What is no regular file (a device, a pipe that never ends) is not read."""
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    return found.st_size


def _entry(name: str, found: os.stat_result) -> Entry:
    kind = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}.get(stat.S_IFMT(found.st_mode), "other")
    # A name may hold any bytes; the record travels as text.
    shown = name.encode(errors="surrogateescape").decode(errors="replace")
    return Entry(name=shown, kind=kind, bytes=found.st_size, mode=stat.S_IMODE(found.st_mode))


def _pack(tar: tarfile.TarFile, path: str, parent: int, name: str, shown: str, depth: int) -> None:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    member = tarfile.TarInfo(shown)
    member.mode, member.mtime = stat.S_IMODE(found.st_mode), found.st_mtime
    if stat.S_ISLNK(found.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=parent)
        tar.addfile(member)
    elif stat.S_ISREG(found.st_mode):
        with _opened(name, parent, 0) as fd, open(fd, "rb", closefd=False) as file:
            member.size = _size_of_regular(fd)
            tar.addfile(member, file)
    elif stat.S_ISDIR(found.st_mode):
        if not depth:
            raise FileFailed(path, f"is deeper than {DEPTH_MAX} directories; pack it with a program")
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        with _opened(name, parent, os.O_DIRECTORY) as fd:
            for below in sorted(os.listdir(fd)):
                _pack(tar, path, fd, below, f"{shown}/{below}", depth - 1)


class _Bounded:
    """Where a tar goes, up to a number of bytes."""

    def __init__(self, path: str, into: BinaryIO, bytes_max: int) -> None:
        self._path = path
        self._into = into
        self._bytes_max = bytes_max
        self._left = bytes_max

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise FileFailed(self._path, f"is larger than {self._bytes_max} bytes as a tar")
        return self._into.write(data)


# ---- sandboxes ----------------------------------------------------------------------------------------------------


class Box:
    """One sandbox: its directory, the processes that belong to it, and whether they stand still."""

    def __init__(self, name: str, spec: SandboxSpec, directory: Path, mark: str, census: Census) -> None:
        self.name = name
        self.spec = spec
        self.directory = directory
        self.mark = mark
        self.census = census
        self.kin = Kin(census, SANDBOX_MARK, mark)
        self.work = directory / "work"
        self.workspace = Workspace(self.work, directory / "aside", spec.disk_bytes)
        self.running: dict[ExecLease, None] = {}
        self.shells: dict[str, HeldShell] = {}
        self.turn = asyncio.Lock()
        """Programs are not started while the files are copied."""
        self.shut = "it is being made"
        """Why nothing can be started in it; empty when it is open."""
        self._unheard: list[Stream] = []
        """Streams of actions that have ended. They are read on, so that whoever still writes there can."""
        self._counted = 0

    def make(self) -> None:
        for name in ("work", "tmp", "aside"):
            (self.directory / name).mkdir(mode=0o700, parents=True)

    def next_mark(self) -> str:
        self._counted += 1
        return f"{self.mark}{self._counted}."

    # ---- who runs ----

    def enter(self, lease: ExecLease) -> None:
        if not self.running:
            self.kin.go_on()
        self.running[lease] = None

    def leave(self, lease: ExecLease) -> None:
        """Who was left running is noted now, as long as the number of the one that ended is still its own."""
        del self.running[lease]
        if self.running:
            self.kin.find()
        else:
            self.kin.stand_still()

    def go_on(self) -> None:
        if self.running:
            self.kin.go_on()

    async def end(self) -> None:
        """Everything in it."""
        await self.kin.kill()
        watched = [lease.ended for lease in self.running] + [shell.child.exited for shell in self.shells.values()]
        if watched:
            await asyncio.wait(watched)
        for stream in self._unheard:
            stream.close()
        self._unheard = []

    # ---- how programs are started ----

    def environment(self, width: int, mark: str, env: dict[str, str]) -> dict[str, str]:
        own = {"PATH": os.environ.get("PATH", USUAL_PATH), "HOME": str(self.work), "TMPDIR": f"{self.directory}/tmp"}
        marks = {SANDBOX_MARK: self.mark, ACTION_MARK: mark}
        return told(width, BASE_ENVIRONMENT | own | self.spec.env | env) | marks

    def place(self, cwd: str) -> str:
        """Where a program starts. It sees the machine, so a place outside the workspace is one of the machine."""
        path = posixpath.normpath(inside(cwd)) if cwd else WORKSPACE
        if f"{path}/".startswith(f"{WORKSPACE}/"):
            return str(self.work) + path[len(WORKSPACE) :]
        return path

    def limited(self, argv: list[str], prlimit: str) -> list[str]:
        """The command behind `prlimit`. Limits cannot be set here, where they would hold for every thread, nor from
        outside on a program that runs already and may have forked. A shell that sets them would drop variables whose
        names it does not take; `prlimit` executes the command with its environment as it is, in half a millisecond,
        and says 127 or 126 if it cannot. The address space is not limited: programs reserve far more than they use."""
        return [
            prlimit,
            "--core=0",
            f"--nofile={_at_most_hard(resource.RLIMIT_NOFILE, self.spec.open_files_max)}",
            f"--data={_at_most_hard(resource.RLIMIT_DATA, self.spec.memory_bytes)}",
            f"--fsize={_at_most_hard(resource.RLIMIT_FSIZE, self.spec.disk_bytes)}",
            "--",
            *argv,
        ]

    def let_go(self, streams: tuple[Stream, ...]) -> None:
        self._unheard = [stream for stream in (*self._unheard, *streams) if stream.open]


class Cpus:
    """Which cores programs see: the ones with the fewest programs on them."""

    def __init__(self) -> None:
        self._programs_by_cpu = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0)

    def __len__(self) -> int:
        return len(self._programs_by_cpu)

    def take(self, count: int) -> tuple[int, ...]:
        chosen = sorted(self._programs_by_cpu, key=self._programs_by_cpu.__getitem__)[:count]
        for cpu in chosen:
            self._programs_by_cpu[cpu] += 1
        return tuple(chosen)

    def give_back(self, cpus: tuple[int, ...]) -> None:
        for cpu in cpus:
            self._programs_by_cpu[cpu] -= 1


# ---- leases -------------------------------------------------------------------------------------------------------


class PastLease:
    """Of work that was over when `start` returned."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    async def wait(self) -> Ended:
        return self._ended

    def resize(self, *, reserved: int, limit: int) -> None:
        pass

    def used(self) -> float | None:
        return None

    async def stop(self) -> None:
        pass


class ExecLease:
    """What a program of its own and a command for a held shell have in common."""

    child: Child
    """The process whose end is the end of the action, unless it is a shell that is held."""
    streams: tuple[Stream, ...] = ()
    """Of its output and its errors."""
    cpu_s_before = 0.0
    """What the child had used before."""

    def __init__(self, box: Box, work: Exec, width: int, output: Output | None, manager: ProcessManager) -> None:
        self.box = box
        self.work = work
        self.width = width
        self.manager = manager
        self.mark = box.next_mark()
        self.kin = Kin(box.census, ACTION_MARK, self.mark)
        self.cpus: tuple[int, ...] = ()
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._output = output
        self._captures = (Capture(work.capture_bytes_max), Capture(work.capture_bytes_max))
        self._stopped = False
        self._stopping = False
        self._one_stop = asyncio.Lock()

    def begin(self) -> None:
        """Raises OSError if it cannot be started, and has left nothing behind then."""
        self.box.enter(self)
        self.cpus = self.manager.cpus.take(whole_cores(self.width))
        try:
            self._launch()
        except BaseException:
            self._leave()
            raise

    def _launch(self) -> None:
        raise NotImplementedError

    def listen(self, streams: tuple[Stream, ...]) -> None:
        self.streams = streams
        for stream, capture in zip(streams, self._captures, strict=True):
            stream.begin(capture, self._output)

    # ---- while it runs ----

    def resize(self, *, reserved: int, limit: int) -> None:
        """Nothing holds a program of this backend to a limit."""

    def used(self) -> float | None:
        """Of those that live now and of whom they waited for; who was never waited for is not counted."""
        if self.ended.done():
            return None
        return max(0.0, sum(process.cpu_s for process in self.kin.find()) - self.cpu_s_before)

    async def stop(self) -> None:
        async with self._one_stop:
            if self.ended.done():
                return
            self._stopped = self._stopping = True
            lost = ""
            try:
                # Whoever stands still takes the signal only when it goes on.
                self.kin.signal_all(signal.SIGTERM, signal.SIGCONT)
                await self.kin.wait_gone(STOP_GRACE_S)
                await self.kin.kill()
                await asyncio.wait({self.child.exited})
            except ManagerError as error:
                lost = str(error)
            except BaseException:
                self.kin.signal_all(signal.SIGKILL)
                raise
            finally:
                self._stopping = False
                if lost or self.child.exited.done():
                    self.finish(lost=lost)

    # ---- its end ----

    async def wait(self) -> Ended:
        return await asyncio.shield(self.ended)

    def on_exit(self) -> None:
        """The child has ended. What is being stopped ends when all that belongs to it has."""
        if not self._stopping:
            self.finish()

    def finish(self, *, status: int | None = None, lost: str = "") -> None:
        """`status`: what a held shell said, which lives on."""
        if self.ended.done():
            return
        for stream in self.streams:
            stream.end()
        try:
            self._leave()
        except OSError as error:
            lost = lost or f"what it left running cannot be found: {error}"
        code, usage, session_ended = self._part(status)
        if not self._stopped and not lost:
            lost = self._why_lost(code)
        out, err = self._captures
        executed = Executed(
            exit_code=None if self._stopped or lost else code,
            stdout=out.content(),
            stderr=err.content(),
            stdout_bytes=out.total_bytes,
            stderr_bytes=err.total_bytes,
            session_ended=session_ended,
        )
        self.ended.set_result(Ended(usage=usage, executed=executed, lost=lost))

    def _why_lost(self, code: int | None) -> str:
        if self.box.shut and code in (None, KILLED):
            return self.box.shut
        return "" if code is not None else "other code of this process took its exit code"

    def _leave(self) -> None:
        self.manager.cpus.give_back(self.cpus)
        self.box.leave(self)

    def _part(self, status: int | None) -> tuple[int | None, Usage, bool]:
        """Part with the child: its exit code, what it used, and whether a session ended with it."""
        raise NotImplementedError


class ProgramLease(ExecLease):
    """A program of its own."""

    def _launch(self) -> None:
        box, command = self.box, filled_in(self.work.command, self.width)
        argv = [self.manager.shell, "-c", command] if isinstance(command, str) else list(command)
        self.child = _start(self, argv, self.work.stdin, self.mark, cwd=box.place(self.work.cwd))
        self.kin.include(self.child.pid)
        box.kin.include(self.child.pid)
        self.child.exited.add_done_callback(lambda _: self.on_exit())

    def _part(self, status: int | None) -> tuple[int | None, Usage, bool]:
        self.box.let_go(self.streams)
        return (*self.child.part(), False)


def _start(
    lease: ExecLease, argv: list[str], stdin: bytes, mark: str, *, cwd: str, keep: tuple[int, ...] = ()
) -> Child:
    """A process that the lease listens to."""
    streams = (Stream(STDOUT), Stream(STDERR))
    source = -1
    try:
        lease.listen(streams)
        source = standard_input(stdin)
        child = Child(
            lease.box.limited(argv, lease.manager.prlimit),
            env=lease.box.environment(lease.width, mark, lease.work.env),
            cwd=cwd,
            streams=(source, streams[0].writer, streams[1].writer),
            keep=keep,
            cpus=lease.cpus,
        )
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    finally:
        if source >= 0:
            os.close(source)
    for stream in streams:
        stream.close_writer()
    return child


class SessionLease(ExecLease):
    """A command for a held shell, which is started if there is none."""

    def _launch(self) -> None:
        name = self.work.session
        shell = self.box.shells.get(name)
        if shell is not None and shell.child.has_ended:
            shell.end()  # before the loop heard of it
            shell = None
        if shell is None:
            shell = self.box.shells[name] = HeldShell(self)
        else:
            self.listen(shell.streams)
            self.kin.exclude(shell.background())
            os.sched_setaffinity(shell.child.pid, self.cpus)
        self._shell = shell
        self.child = shell.child
        self.kin.include(self.child.pid)
        self.cpu_s_before = self.child.cpu_s
        shell.run(self, self._text(shell))

    def _text(self, shell: HeldShell) -> str:
        exports = {ACTION_MARK: self.mark} | self.work.env
        if shell.width != self.width:
            shell.width = self.width
            own = self.box.spec.env.keys() - {"TANGRAM_CPUS"}
            exports = {name: value for name, value in told(self.width, {}).items() if name not in own} | exports
        command = filled_in(self.work.command, self.width)
        assert isinstance(command, str)
        run = f"eval {shlex.quote(command)}"
        if self.work.cwd:
            run = f"cd -- {shlex.quote(self.box.place(self.work.cwd))} && {run}"
        return "\n".join([*(f"export {name}={shlex.quote(value)}" for name, value in exports.items()), run])

    def on_status(self, status: int) -> None:
        if not self._stopping:
            self.finish(status=status)

    def _part(self, status: int | None) -> tuple[int | None, Usage, bool]:
        if status is None:
            code, usage = self._shell.end()
            return code, Usage(cpu_s=max(0.0, usage.cpu_s - self.cpu_s_before)), True
        self._shell.lease = None
        return status, Usage(cpu_s=max(0.0, self.child.cpu_s - self.cpu_s_before)), False


class HeldShell:
    """A shell that is held between commands."""

    def __init__(self, lease: SessionLease) -> None:
        self._box = lease.box
        self._name = lease.work.session
        self._mark = lease.box.next_mark()
        self.lease: SessionLease | None = None
        """Whose command it runs."""
        self.width = lease.width
        """Of which its variables speak."""
        self._talk = ShellStreams(self._on_status)
        try:
            argv, keep = self._talk.argv(lease.manager.shell), self._talk.given
            self.child = _start(lease, argv, b"", self._mark, cwd=str(lease.box.work), keep=keep)
        except BaseException:
            self._talk.close()
            raise
        self._talk.close_given()
        self.streams = lease.streams
        self._box.kin.include(self.child.pid)
        self.child.exited.add_done_callback(lambda _: self._on_exit())

    def run(self, lease: SessionLease, command: str) -> None:
        self.lease = lease
        self._talk.send(command)

    def background(self) -> list[Process]:
        """What earlier commands left running in its session."""
        kin = Kin(self._box.census, ACTION_MARK, self._mark)
        kin.include(self.child.pid)
        return [process for process in kin.find() if process.pid != self.child.pid]

    def end(self) -> tuple[int | None, Usage]:
        """It has ended, or cannot be ended."""
        del self._box.shells[self._name]
        self._talk.close()
        self._box.let_go(self.streams)
        return self.child.part()

    def _on_status(self, status: int) -> None:
        if self.lease is not None:
            self.lease.on_status(status)

    def _on_exit(self) -> None:
        if self.lease is not None:
            self.lease.on_exit()
        elif self._box.shells.get(self._name) is self:
            self.end()


# ---- the manager --------------------------------------------------------------------------------------------------


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
            if image == HOST_IMAGE:
                raise ManagerError(f"{HOST_IMAGE!r} is the empty workspace: choose another name", retry=False)
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
        self._require_image(name)
        self._remembered = {key: image for key, image in self._remembered.items() if image != name}
        if name != HOST_IMAGE:
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
