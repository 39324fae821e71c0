"""Process trees: start, find and signal processes of the machine without control groups.

Owns the start of every process of the process backend, the reading of /proc, and every signal. A process belongs to an
action or a sandbox if it was executed with its mark in the environment, was included, descends from one that belongs,
or is in a session of one that does: programs start in a session of their own, and a process cannot join another
session. Promises that no other process is signalled: each signal goes through a pidfd, after the start time was
compared, so a reused process id does no harm.

Limitation: a process is not found if it dropped the mark, started a session of its own, and its parent ended before the
next scan. Only control groups or a process namespace contain such a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tangram.core.action import NO_USAGE, Usage
from tangram.errors import ManagerError
from tangram.processes.exit_codes import shell_exit_code

T = TypeVar("T")

ACTION_MARK = "TANGRAM_ACTION"
SANDBOX_MARK = "TANGRAM_SANDBOX"
"""Variables in the environment of every program. Their values are unique and end with a dot, so that a mark is a prefix
of another one only if it is meant to include it."""

MARKS = (f"{ACTION_MARK}=".encode(), f"{SANDBOX_MARK}=".encode())

ENVIRONMENT_BYTES_MAX = 1 << 21
"""Bytes read of one process: the kernel's default limit for a program's environment."""
FREEZE_ROUNDS_MAX = 100
"""Rounds of stopping processes that fork meanwhile. Each round leaves only what was forked during the one before."""
POLL_S, POLL_S_MAX = 0.002, 0.05
"""Pause between two polls of processes that should end: at first, and at most."""
KILL_WAIT_S = 10.0
"""Time limit for the end of a killed process. One in an uninterruptible system call may take longer."""

PEAK_MARGIN = 1.1
"""Factor by which a peak is clearly above another one: the kernel counts memory in batches per core, so two readings of
one peak differ."""
UMASK = 0o022
KERNEL_THREAD, PF_EXITING = 0x00200000, 0x4
"""Bits in the flags of a process: it is a thread of the kernel; it is exiting."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """The state of one process, from /proc."""

    pid: int
    parent: int
    session: int
    state: bytes
    threads: int
    started: int
    """Start time in ticks since boot: together with `pid` it identifies a process."""
    cpu_ticks: int
    """CPU ticks of the process and of the children that it reaped."""
    flags: int
    marks: tuple[bytes, ...] = ()

    @property
    def cpu_s(self) -> float:
        return self.cpu_ticks / TICKS_PER_S

    @property
    def is_alive(self) -> bool:
        """Not a zombie. The first thread of a process may be one while others run on."""
        return self.state not in (b"Z", b"X") or self.threads > 1

    @property
    def is_exiting(self) -> bool:
        return bool(self.flags & PF_EXITING)


def read_process(pid: int) -> Process | None:
    """None if there is no such process."""
    try:
        text = _read_file(f"/proc/{pid}/stat", 1 << 12)
    except OSError:
        return None
    # The name of the program is in brackets and may contain anything, brackets too.
    fields = text.rpartition(b")")[2].split()
    return Process(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        flags=int(fields[6]),
        cpu_ticks=sum(map(int, fields[11:15])),
        threads=int(fields[17]),
        started=int(fields[19]),
    )


def send_signal(process: Process, number: int) -> None:
    """Send a signal to this very process; does nothing if it has ended."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        current = read_process(process.pid)
        if current is not None and current.started == process.started:
            # Not permitted: it changed its user. The wait for its end reports it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def _read_file(path: str, bytes_max: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, bytes_max)
    finally:
        os.close(fd)


def read_processes(kernel_threads: set[int] | None = None) -> Iterator[Process]:
    """All processes of the machine, without threads of the kernel, whose ids are kept in `kernel_threads`: a kernel has
    hundreds. Such an id is not read again while its session is 0; programs start in sessions of their own."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    known = set() if kernel_threads is None else kernel_threads
    known &= pids
    for pid in sorted(pids):
        if (pid in known and _has_session_0(pid)) or (process := read_process(pid)) is None:
            continue
        if process.flags & KERNEL_THREAD:
            known.add(pid)
        else:
            known.discard(pid)
            yield process


def _has_session_0(pid: int) -> bool:
    try:
        return os.getsid(pid) == 0
    except OSError:
        return False


def processes_below(pid: int) -> list[Process]:
    """The descendants of a process, zombies included."""
    table = {process.pid: process for process in read_processes()}
    members = {pid}
    _add_descendants(members, table)
    return [table[each] for each in sorted(members - {pid})]


def read_environment(pid: int) -> list[bytes]:
    """The variables that a process was executed with, as `NAME=value`; one empty value for a zombie, and while exec
    replaces the program. Raises OSError."""
    return _read_file(f"/proc/{pid}/environ", ENVIRONMENT_BYTES_MAX).split(b"\0")


def resident_bytes(pid: int) -> int:
    """The memory of a process, shared pages included. Raises OSError."""
    return int(_read_file(f"/proc/{pid}/statm", 1 << 12).split()[1]) * resource.getpagesize()


class ProcessTable:
    """Scans all processes. The environment of a process without a mark is not read again: a mark cannot be added
    later."""

    def __init__(self) -> None:
        self._kernel_threads: set[int] = set()
        self._marks: dict[int, tuple[int, tuple[bytes, ...]]] = {}
        """The start of each process and every mark that it ever carried, by process id."""

    def scan(self) -> dict[int, Process]:
        processes: dict[int, Process] = {}
        for process in read_processes(self._kernel_threads):
            processes[process.pid] = process._replace(marks=self._marks_of(process))
        self._marks = {pid: known for pid, known in self._marks.items() if pid in processes}
        return processes

    def _marks_of(self, process: Process) -> tuple[bytes, ...]:
        started, marks = self._marks.get(process.pid, (-1, ()))
        if started != process.started:
            marks = ()
        elif not marks:
            return ()
        try:
            environment = read_environment(process.pid)
        except OSError:
            return marks
        if environment == [b""]:
            return marks  # a zombie, or within exec: its environment may still come
        carried = [variable for variable in environment if variable.startswith(MARKS)]
        marks = tuple(dict.fromkeys([*marks, *carried]))
        self._marks[process.pid] = (process.started, marks)
        return marks


class ProcessTree:
    """Processes that belong together: all of one action, or all of one sandbox."""

    def __init__(self, process_table: ProcessTable, variable: str, value: str) -> None:
        assert value.endswith(".")
        self._table = process_table
        self._mark = f"{variable}={value}".encode()
        self._members: dict[int, int] = {}
        """Start times of the processes that the last scan found, by process id."""
        self._excluded: dict[int, int] = {}
        self._stopped: list[Process] = []

    def include(self, pid: int) -> None:
        """Add a child of this process that has not been reaped, so its process id is not reused."""
        process = read_process(pid)
        assert process is not None
        self._members[pid] = process.started

    def exclude(self, others: Iterable[Process]) -> None:
        """Exclude these processes and their descendants although they share a session with some that belong."""
        self._excluded.update({process.pid: process.started for process in others})

    def find(self) -> list[Process]:
        """Returns the living processes of this tree."""
        table = self._table.scan()
        others = _still_present(self._excluded, table)
        _add_descendants(others, table)
        members = _still_present(self._members, table)
        members |= {pid for pid, process in table.items() if any(mark.startswith(self._mark) for mark in process.marks)}
        members -= others
        _add_descendants(members, table, others, sessions=True)
        members.discard(os.getpid())
        self._members = {pid: table[pid].started for pid in members}
        return [table[pid] for pid in sorted(members) if table[pid].is_alive]

    # ---- signals ----

    def signal_all(self, *numbers: int) -> None:
        for process in self.find():
            for number in numbers:
                send_signal(process, number)

    def freeze(self) -> None:
        """Stop all of them until `thaw`. A stopped process does not fork, so once a look finds no new process, all are
        stopped. Processes that a program has stopped itself are left as they are."""
        started_at_by_pid: dict[int, int] = {}
        for _ in range(FREEZE_ROUNDS_MAX):
            new = [process for process in self.find() if started_at_by_pid.get(process.pid) != process.started]
            if not new:
                return
            for process in new:
                started_at_by_pid[process.pid] = process.started
                if process.state not in (b"T", b"t"):
                    send_signal(process, signal.SIGSTOP)
                    self._stopped.append(process)

    def thaw(self) -> None:
        for process in self._stopped:
            send_signal(process, signal.SIGCONT)
        self._stopped = []

    async def kill(self) -> None:
        """Kill until nothing is left, also processes that are forked meanwhile. Stopped processes die as well."""

        async def find_and_kill() -> list[Process]:
            processes = self.find()
            for process in processes:
                send_signal(process, signal.SIGKILL)
            return processes

        if left := await poll_until_none(find_and_kill, KILL_WAIT_S):
            raise ManagerError(f"processes {[process.pid for process in left[:8]]} could not be killed")
        self._stopped = []

    async def wait_exited(self, seconds: float) -> None:
        """Blocks until nothing is left, or the time is over."""

        async def find() -> list[Process]:
            return self.find()

        await poll_until_none(find, seconds)


async def poll_until_none(find: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Calls `find` with growing pauses until it finds nothing or the time is over. Returns what it found last."""
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + seconds, POLL_S
    while (left := await find()) and loop.time() <= deadline:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S_MAX)
    return left


def _still_present(known: Mapping[int, int], table: Mapping[int, Process]) -> set[int]:
    """The processes that still exist: the same id and the same start time."""
    return {pid for pid, started in known.items() if pid in table and table[pid].started == started}


def _add_descendants(
    members: set[int], table: Mapping[int, Process], others: Collection[int] = (), *, sessions: bool = False
) -> None:
    """Adds the descendants; with `sessions`, also processes of the same session. Session 0 means a session that is not
    visible."""
    foreign = {0, os.getsid(0)}
    while members:
        shared = {table[pid].session for pid in members} - foreign if sessions else set()
        new = {
            pid
            for pid, process in table.items()
            if pid not in members and pid not in others and (process.parent in members or process.session in shared)
        }
        if not new:
            return
        members |= new


class WatchedProcess(ABC):
    """A process whose end this one can await. Its process id is not reused until `reap`."""

    def __init__(self, pid: int) -> None:
        """Raises OSError."""
        self.pid = pid
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        """Done when it has ended."""
        self._fd = os.pidfd_open(pid)
        self._loop.add_reader(self._fd, self._on_exit)

    def _on_exit(self) -> None:
        self._close()
        self.exited.set_result(None)

    def _close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    @property
    def cpu_s(self) -> float:
        """CPU seconds used so far by it and by the children that it reaped."""
        process = read_process(self.pid)
        return process.cpu_s if process is not None else 0.0

    def signal(self, number: int) -> None:
        """Send a signal through its pidfd: a reused process id is never signalled."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, possibly before the event loop has noticed it."""
        process = read_process(self.pid)
        return process is None or not process.is_alive

    exit_signal = 0
    """Set by `collect_exit`: the signal that ended it. An exit code alone does not tell: a program may exit with
    137."""

    @abstractmethod
    async def collect_exit(self) -> tuple[int | None, Usage]:
        """Reap it after its end. Returns its exit code, as a shell reports it, and its usage, if known.
        None if the code is unknown here."""


class SpawnedChild(WatchedProcess):
    """A process that this one has started, in a session of its own, watched until it has ended."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        streams: tuple[int, int | None, int | None],
        keep: Sequence[int] = (),
        cpus: Collection[int] = (),
    ) -> None:
        """Raises OSError if it cannot be started. `streams`: None inherits the stream of this process. `keep`:
        descriptors that it inherits in addition to its streams.

        A child inherits the affinity of the thread that starts it, so this thread's affinity is set for that moment and
        then restored: the child never sees other cores than its own, and neither a launcher nor code between fork and
        exec is needed. Affinity belongs to a thread, so other threads keep theirs.
        """
        own_cpus = os.sched_getaffinity(0)
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
            stdin, stdout, stderr = streams
            self._process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                cwd=cwd,
                start_new_session=True,
                pass_fds=keep,
                umask=UMASK,
            )
        finally:
            if cpus:
                os.sched_setaffinity(0, own_cpus)
        self._own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            super().__init__(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    async def collect_exit(self) -> tuple[int | None, Usage]:
        return self.reap()

    def reap_or_abandon(self) -> tuple[int | None, Usage]:
        """`reap`; a child that still runs is reaped when it ends, while the event loop runs."""
        if self.has_ended:
            return self.reap()
        self._mark_reaped()
        self.exited.add_done_callback(lambda _: self.reap())
        return None, NO_USAGE

    def reap(self) -> tuple[int | None, Usage]:
        """`collect_exit`, without waiting for the event loop. None if other code in this process took the exit code.

        The memory peak of a process starts with that of its parent, which is this one. A peak that is not clearly above
        it is unknown, and reported as 0.
        """
        self._close()
        self._mark_reaped()
        try:
            _, status, used = os.wait4(self.pid, 0)
        except ChildProcessError:
            return None, NO_USAGE
        peak = used.ru_maxrss if used.ru_maxrss > PEAK_MARGIN * self._own_peak else 0
        usage = Usage(cpu_s=used.ru_utime + used.ru_stime, memory_peak_bytes=peak << 10)
        code = os.waitstatus_to_exitcode(status)
        self.exit_signal = max(0, -code)
        return shell_exit_code(code), usage

    def _mark_reaped(self) -> None:
        """Keep the `Popen` object from reaping the child, or from warning that it runs."""
        self._process.returncode = -signal.SIGKILL
