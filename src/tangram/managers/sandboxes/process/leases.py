"""Sandboxes of the process backend and what runs in them.

Owns the way of one program from its grant to its end, and whether what was left running stands still. Promises what
`managers.base` asks of a lease, as far as the package says that it can be kept.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import resource
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.core.action import Usage
from tangram.errors import ManagerError
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.sandboxes.process.files import Workspace
from tangram.managers.work import WORKSPACE, Ended, Exec, Executed, SandboxSpec, inside
from tangram.processes.capture import Capture
from tangram.processes.process_tree import ACTION_MARK, SANDBOX_MARK, Census, Child, Kin, Process
from tangram.processes.streams import STDERR, STDOUT, Output, ShellStreams, Stream, standard_input
from tangram.processes.width import filled_in, told, whole_cores

if TYPE_CHECKING:
    from tangram.managers.sandboxes.process.manager import ProcessManager

NOT_FOUND, NOT_EXECUTABLE, KILLED = 127, 126, 128 + signal.SIGKILL
"""Exit codes, as a shell gives them."""
BASE_ENVIRONMENT = {"LANG": "C.UTF-8", "TERM": "dumb"}
USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _at_most_hard(kind: int, wanted: int) -> int:
    """Without privileges, no limit can be above what holds for this process."""
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


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
            cpus=whole_cores(self.width),
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
