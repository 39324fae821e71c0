"""Sandboxes of the process backend, and the leases of programs in them.

Owns the processes of each sandbox, and whether they are stopped. The life cycle of a lease is in `sandboxes/leases.py`;
the package docstring lists the limitations of this backend.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import resource
import signal
from abc import abstractmethod
from pathlib import Path
from typing import Any, Protocol

from tangram.core.action import Usage
from tangram.managers.base import STOP_GRACE_S
from tangram.managers.sandboxes.leases import (
    BASE_ENVIRONMENT,
    DEFAULT_PATH,
    ExecLease,
    ProgramExit,
    ShellSession,
    session_command,
)
from tangram.managers.sandboxes.process.files import Workspace
from tangram.managers.work import WORKSPACE, Exec, SandboxSpec, sandbox_path
from tangram.processes.exit_codes import KILLED
from tangram.processes.process_tree import ACTION_MARK, SANDBOX_MARK, Process, ProcessTable, ProcessTree, SpawnedChild
from tangram.processes.streams import STDERR, STDOUT, Output, Stream, standard_input
from tangram.processes.width import substitute_width, whole_cores, with_width


def _capped_at_hard_limit(kind: int, limit: int) -> int:
    """A limit that needs no privileges: none can exceed that of this process."""
    hard = resource.getrlimit(kind)[1]
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


class ProcessSandbox:
    """One sandbox: its directory, the processes that belong to it, and whether they are stopped."""

    def __init__(self, name: str, spec: SandboxSpec, directory: Path, mark: str, process_table: ProcessTable) -> None:
        self.name = name
        self.spec = spec
        self.directory = directory
        self.mark = mark
        self.process_table = process_table
        self.processes = ProcessTree(process_table, SANDBOX_MARK, mark)
        self.work = directory / "work"
        self.workspace = Workspace(self.work, directory / "aside", spec.disk_bytes)
        self.running: dict[ProcessLease, None] = {}
        self.sessions: dict[str, ProcessSession] = {}
        self.start_lock = asyncio.Lock()
        """Held while the files are copied, and while a program is started."""
        self.closed_reason = "it is being created"
        """The reason why no program can be started in it; empty while it is open."""
        self._discarded_streams: list[Stream] = []
        """Streams of ended actions. They are drained, so that processes which still write there do not block."""
        self._marks_issued = 0

    def create_directories(self) -> None:
        for name in ("work", "tmp", "aside"):
            (self.directory / name).mkdir(mode=0o700, parents=True)

    def next_mark(self) -> str:
        self._marks_issued += 1
        return f"{self.mark}{self._marks_issued}."

    # ---- running actions ----

    def enter(self, lease: ProcessLease) -> None:
        if not self.running:
            self.processes.thaw()
        self.running[lease] = None

    def leave(self, lease: ProcessLease) -> None:
        """Background processes are noted now, before the process id of the one that ended can be reused."""
        del self.running[lease]
        if self.running:
            self.processes.find()
        else:
            self.processes.freeze()

    def thaw_if_running(self) -> None:
        if self.running:
            self.processes.thaw()

    async def kill_all(self) -> None:
        """Kill everything in it."""
        await self.processes.kill()
        watched = [lease.result for lease in self.running] + [shell.child.exited for shell in self.sessions.values()]
        if watched:
            await asyncio.wait(watched)
        for stream in self._discarded_streams:
            stream.close()
        self._discarded_streams = []

    # ---- start of programs ----

    def environment(self, width: int, mark: str, env: dict[str, str]) -> dict[str, str]:
        own = {"PATH": os.environ.get("PATH", DEFAULT_PATH), "HOME": str(self.work), "TMPDIR": f"{self.directory}/tmp"}
        marks = {SANDBOX_MARK: self.mark, ACTION_MARK: mark}
        return with_width(width, BASE_ENVIRONMENT | own | self.spec.env | env) | marks

    def resolve_cwd(self, cwd: str) -> str:
        """Where a program starts. It sees the machine, so a path outside the workspace is one of the machine."""
        path = posixpath.normpath(sandbox_path(cwd)) if cwd else WORKSPACE
        if f"{path}/".startswith(f"{WORKSPACE}/"):
            return str(self.work) + path[len(WORKSPACE) :]
        return path

    def with_rlimits(self, argv: list[str], prlimit: str) -> list[str]:
        """The command behind `prlimit`. Limits cannot be set in this process, where they would apply to every thread,
        nor from outside on a running program, which may have forked already. A shell that sets them would drop
        variables whose names it rejects; `prlimit` passes the environment unchanged, takes half a millisecond, and
        exits with 127 or 126 if it cannot execute. The address space is not limited: programs reserve far more than
        they use."""
        return [
            prlimit,
            "--core=0",
            f"--nofile={_capped_at_hard_limit(resource.RLIMIT_NOFILE, self.spec.open_files_max)}",
            f"--data={_capped_at_hard_limit(resource.RLIMIT_DATA, self.spec.memory_bytes)}",
            f"--fsize={_capped_at_hard_limit(resource.RLIMIT_FSIZE, self.spec.disk_bytes)}",
            "--",
            *argv,
        ]

    def discard(self, streams: tuple[Stream, ...]) -> None:
        self._discarded_streams = [stream for stream in (*self._discarded_streams, *streams) if stream.is_open]


class AffinityAllocator:
    """Which cores programs see: those with the fewest programs. CpusetAllocator does not fit here: it balances
    reserves, which this backend does not enforce, and moves running actions, whose processes keep their affinity."""

    def __init__(self) -> None:
        self._programs_by_cpu = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0)

    def __len__(self) -> int:
        return len(self._programs_by_cpu)

    def allocate(self, count: int) -> tuple[int, ...]:
        chosen = sorted(self._programs_by_cpu, key=self._programs_by_cpu.__getitem__)[:count]
        for cpu in chosen:
            self._programs_by_cpu[cpu] += 1
        return tuple(chosen)

    def release(self, cpus: tuple[int, ...]) -> None:
        for cpu in cpus:
            self._programs_by_cpu[cpu] -= 1


# ---- leases ---------------------------------------------------------------------------------------------------------


class ProgramHost(Protocol):
    """The part of a manager that a lease needs."""

    cpu_allocator: AffinityAllocator
    prlimit: str
    """The path of the program that sets limits."""
    shell: str
    """The path of the shell that runs commands."""


class ProcessLease(ExecLease):
    """A separate program, or a command for the shell of a session."""

    child: SpawnedChild
    """The process whose end is the end of the action, or the shell of the session."""
    cpu_s_before = 0.0
    """CPU seconds of the child before this action."""

    def __init__(
        self, sandbox: ProcessSandbox, work: Exec, width: int, output: Output | None, host: ProgramHost
    ) -> None:
        super().__init__(work, width, output)
        self.sandbox = sandbox
        self.host = host
        self.mark = sandbox.next_mark()
        self.processes = ProcessTree(sandbox.process_table, ACTION_MARK, self.mark)
        self.cpus: tuple[int, ...] = ()

    async def _launch(self) -> None:
        """Raises OSError if it cannot be started."""
        self.sandbox.enter(self)
        self.cpus = self.host.cpu_allocator.allocate(whole_cores(self.width))
        try:
            self._start_program()
        except BaseException:
            self._release()
            raise

    @abstractmethod
    def _start_program(self) -> None: ...

    # ---- while it runs ----

    def resize(self, *, reserved: int, limit: int) -> None:
        """This backend enforces no limit."""

    def cpu_seconds(self) -> float | None:
        """CPU seconds of living processes and of children that they reaped; other ended processes are not counted."""
        if self.result.done():
            return None
        return max(0.0, sum(process.cpu_s for process in self.processes.find()) - self.cpu_s_before)

    async def _terminate(self) -> None:
        try:
            # A stopped process handles the signal only once it continues.
            self.processes.signal_all(signal.SIGTERM, signal.SIGCONT)
            await self.processes.wait_exited(STOP_GRACE_S)
            await self.processes.kill()
            await asyncio.wait({self.child.exited})
        except asyncio.CancelledError:
            self.processes.signal_all(signal.SIGKILL)
            raise

    # ---- end ----

    async def _collect_exit(self) -> ProgramExit:
        lost = self._stop_error
        try:
            self._release()
        except OSError as error:
            lost = lost or f"its remaining processes cannot be found: {error}"
        code, usage, session_ended = self._release_child()
        if not self.is_stopped and not lost:
            lost = self._lost_reason(code)
        return ProgramExit(code=code, lost=lost, usage=usage, session_ended=session_ended)

    def _lost_reason(self, code: int | None) -> str:
        if self.sandbox.closed_reason and code in (None, KILLED):
            return self.sandbox.closed_reason
        return "" if code is not None else "other code in this process has reaped it, so its exit code is unknown"

    def _release(self) -> None:
        self.host.cpu_allocator.release(self.cpus)
        self.sandbox.leave(self)

    @abstractmethod
    def _release_child(self) -> tuple[int | None, Usage, bool]:
        """Release the child. Returns its exit code, what it used, and whether a session ended with it."""


class ProcessProgramLease(ProcessLease):
    """A separate program."""

    def _start_program(self) -> None:
        sandbox, command = self.sandbox, substitute_width(self.work.command, self.width)
        argv = [self.host.shell, "-c", command] if isinstance(command, str) else list(command)
        self.child = _spawn(self, argv, self.work.stdin, self.mark, cwd=sandbox.resolve_cwd(self.work.cwd))
        self.processes.include(self.child.pid)
        sandbox.processes.include(self.child.pid)

    def _end_futures(self) -> tuple[asyncio.Future[Any], ...]:
        return (self.child.exited,)

    def _release_child(self) -> tuple[int | None, Usage, bool]:
        self.sandbox.discard(self.streams)
        return (*self.child.reap_or_abandon(), False)


def _spawn(
    lease: ProcessLease, argv: list[str], stdin: bytes, mark: str, *, cwd: str, keep: tuple[int, ...] = ()
) -> SpawnedChild:
    """Start a process whose output the lease captures."""
    streams = (Stream(STDOUT), Stream(STDERR))
    source = -1
    try:
        lease.capture_output(streams)
        source = standard_input(stdin)
        child = SpawnedChild(
            lease.sandbox.with_rlimits(argv, lease.host.prlimit),
            env=lease.sandbox.environment(lease.width, mark, lease.work.env),
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


class ProcessSessionLease(ProcessLease):
    """A command for the shell of a session, which is started if there is none."""

    def _start_program(self) -> None:
        name = self.work.session
        shell = self.sandbox.sessions.get(name)
        if shell is not None and shell.child.has_ended:
            shell.end()  # possibly before the event loop has noticed it
            shell = None
        if shell is None:
            shell = self.sandbox.sessions[name] = ProcessSession(self)
        else:
            self.capture_output(shell.streams)
            self.processes.exclude(shell.background_processes())
            os.sched_setaffinity(shell.child.pid, self.cpus)
        self._shell = shell
        self.child = shell.child
        self.processes.include(self.child.pid)
        self.cpu_s_before = self.child.cpu_s
        shell.run(self._command(shell))

    def _command(self, shell: ProcessSession) -> str:
        exports = {ACTION_MARK: self.mark} | self.work.env
        if shell.width != self.width:
            shell.width = self.width
            own = self.sandbox.spec.env.keys() - {"TANGRAM_CPUS"}
            exports = {name: value for name, value in with_width(self.width, {}).items() if name not in own} | exports
        directory = self.sandbox.resolve_cwd(self.work.cwd) if self.work.cwd else ""
        return session_command(self.work, self.width, exports, directory)

    def _end_futures(self) -> tuple[asyncio.Future[Any], ...]:
        return (self._shell.status, self.child.exited)

    def _release_child(self) -> tuple[int | None, Usage, bool]:
        self._shell.busy = False
        if self.is_stopped or not self._shell.status.done():
            code, usage = self._shell.end()
            return code, Usage(cpu_s=max(0.0, usage.cpu_s - self.cpu_s_before)), True
        used_s = max(0.0, self.child.cpu_s - self.cpu_s_before)
        if self.child.exited.done():
            self._shell.end()
        return self._shell.status.result(), Usage(cpu_s=used_s), False


class ProcessSession(ShellSession):
    """A shell that is kept between commands."""

    def __init__(self, lease: ProcessSessionLease) -> None:
        super().__init__()
        self._sandbox = lease.sandbox
        self._name = lease.work.session
        self._mark = lease.sandbox.next_mark()
        self.width = lease.width
        try:
            argv, keep = self._shell.argv(lease.host.shell), self._shell.child_fds
            self.child = _spawn(lease, argv, b"", self._mark, cwd=str(lease.sandbox.work), keep=keep)
        except BaseException:
            self.close()
            raise
        self._shell.close_child_fds()
        self.streams = lease.streams
        self._sandbox.processes.include(self.child.pid)
        self.child.exited.add_done_callback(self._on_exit)

    def background_processes(self) -> list[Process]:
        """Processes that earlier commands left running in its session."""
        tree = ProcessTree(self._sandbox.process_table, ACTION_MARK, self._mark)
        tree.include(self.child.pid)
        return [process for process in tree.find() if process.pid != self.child.pid]

    def end(self) -> tuple[int | None, Usage]:
        """Remove a session that has ended, or cannot be ended."""
        del self._sandbox.sessions[self._name]
        self.close()
        self._sandbox.discard(self.streams)
        return self.child.reap_or_abandon()

    def _on_exit(self, exited: asyncio.Future[None]) -> None:
        if not self.busy and self._sandbox.sessions.get(self._name) is self:
            self.end()
