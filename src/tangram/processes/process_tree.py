"""Processes of the machine: started, found again and signalled, without control groups.

Owns the start of every process of the process backend, the reading of /proc, and every signal. A process belongs to an
action or a sandbox if it carries its mark in the environment that it was executed with, or is known to belong, or
descends from one that does, or is in a session of one that does: programs start in a session of their own, and nobody
can join the session of another. Promises that no other process is ever signalled: each signal goes through a descriptor
of the process, after its start time was compared, so a number that was given to another process meanwhile harms nobody.

The limit of it: a process that dropped the mark *and* started a session of its own *and* whose parent has ended before
anybody looked is not found. Only control groups or a process namespace hold such a one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tangram.core.action import NO_USAGE, Usage
from tangram.errors import ManagerError

ACTION_MARK = "TANGRAM_ACTION"
SANDBOX_MARK = "TANGRAM_SANDBOX"
"""Variables in the environment of every program. Their values are unique and end with a dot, so that a mark is never
the beginning of another one by chance, and is that of all below it on purpose."""

MARKS = (f"{ACTION_MARK}=".encode(), f"{SANDBOX_MARK}=".encode())

ENVIRONMENT_BYTES_MAX = 1 << 21
"""Read of one process: what the kernel passes to a program at most by default."""
STILL_ROUNDS_MAX = 100
"""Of stopping processes that fork meanwhile. Each round leaves only what was forked during the one before."""
LOOK_S, LOOK_S_MAX = 0.002, 0.05
"""Between two looks at processes that should end: at first, and after some time."""
KILL_WAIT_S = 10.0
"""For a killed process to be gone. One that the kernel holds in the middle of a system call may take longer."""

PEAK_MARGIN = 1.1
"""The kernel counts memory in portions per core, so two readings of one peak differ."""
SIGNAL_EXIT_BASE = 128
UMASK = 0o022
KERNEL_THREAD = 0x00200000
"""In the flags of a process."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """What /proc said about one process."""

    pid: int
    parent: int
    session: int
    state: bytes
    threads: int
    started: int
    """In ticks since the machine came up: with `pid` it names one process for good."""
    cpu_ticks: int
    """Of itself and of the children that it waited for."""
    flags: int
    marks: tuple[bytes, ...] = ()

    @property
    def cpu_s(self) -> float:
        return self.cpu_ticks / TICKS_PER_S

    @property
    def living(self) -> bool:
        """Not a zombie. The first thread of a process may be one while the others go on."""
        return self.state not in (b"Z", b"X") or self.threads > 1


def look_up(pid: int) -> Process | None:
    """None: there is no such process."""
    try:
        text = _content(f"/proc/{pid}/stat", 1 << 12)
    except OSError:
        return None
    # The name of the program stands in brackets and may hold anything, brackets too.
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


def send(process: Process, number: int) -> None:
    """A signal to this very process; to nobody if it has ended."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        found = look_up(process.pid)
        if found is not None and found.started == process.started:
            # Not permitted: it changed its user. Whoever waits for its end will say that it is still there.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def _content(path: str, bytes_max: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, bytes_max)
    finally:
        os.close(fd)


class Census:
    """Looks at all processes. Who carried no mark once never will: its environment is not read again."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[int, tuple[bytes, ...]]] = {}
        """By process id: its start, and every mark that it ever carried."""

    def take(self) -> dict[int, Process]:
        found: dict[int, Process] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (process := look_up(int(name))) is not None and not process.flags & KERNEL_THREAD:
                found[process.pid] = process._replace(marks=self._marks_of(process))
        self._marks = {pid: known for pid, known in self._marks.items() if pid in found}
        return found

    def _marks_of(self, process: Process) -> tuple[bytes, ...]:
        started, marks = self._marks.get(process.pid, (-1, ()))
        if started != process.started:
            marks = ()
        elif not marks:
            return ()
        try:
            environment = _content(f"/proc/{process.pid}/environ", ENVIRONMENT_BYTES_MAX)
        except OSError:
            return marks
        if not environment:
            return marks  # a zombie, or in the middle of being executed: its environment may still come
        carried = [variable for variable in environment.split(b"\0") if variable.startswith(MARKS)]
        marks = tuple(dict.fromkeys([*marks, *carried]))
        self._marks[process.pid] = (process.started, marks)
        return marks


class Kin:
    """Processes that belong together: all of one action, or all of one sandbox."""

    def __init__(self, census: Census, variable: str, value: str) -> None:
        assert value.endswith(".")
        self._census = census
        self._mark = f"{variable}={value}".encode()
        self._known: dict[int, int] = {}
        """Start by process id, of those seen at the last look."""
        self._others: dict[int, int] = {}
        self._stopped: list[Process] = []

    def include(self, pid: int) -> None:
        """A child of this process that has not been waited for: its number is nobody else's."""
        process = look_up(pid)
        assert process is not None
        self._known[pid] = process.started

    def exclude(self, others: Iterable[Process]) -> None:
        """These, and what descends from them, do not belong although they are in a session with some that do."""
        self._others.update({process.pid: process.started for process in others})

    def find(self) -> list[Process]:
        """All that live now."""
        table = self._census.take()
        others = _same(self._others, table)
        _add_descendants(others, table)
        members = _same(self._known, table)
        members |= {pid for pid, process in table.items() if any(mark.startswith(self._mark) for mark in process.marks)}
        members -= others
        _add_descendants(members, table, others, sessions=True)
        members.discard(os.getpid())
        self._known = {pid: table[pid].started for pid in members}
        return [table[pid] for pid in sorted(members) if table[pid].living]

    # ---- signals ----

    def signal_all(self, *numbers: int) -> None:
        for process in self.find():
            for number in numbers:
                send(process, number)

    def stand_still(self) -> None:
        """None of them runs until `go_on`. A process that has this signal forks no more, so once a look finds nobody
        new, all of them have it. Those that stand still by the will of a program are left as they are."""
        seen: dict[int, int] = {}
        for _ in range(STILL_ROUNDS_MAX):
            new = [process for process in self.find() if seen.get(process.pid) != process.started]
            if not new:
                return
            for process in new:
                seen[process.pid] = process.started
                if process.state not in (b"T", b"t"):
                    send(process, signal.SIGSTOP)
                    self._stopped.append(process)

    def go_on(self) -> None:
        for process in self._stopped:
            send(process, signal.SIGCONT)
        self._stopped = []

    async def kill(self) -> None:
        """Until nothing is left, whatever forks meanwhile. What stands still dies as well."""
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + KILL_WAIT_S, LOOK_S
        while left := self.find():
            for process in left:
                send(process, signal.SIGKILL)
            if loop.time() > deadline:
                raise ManagerError(f"processes {[process.pid for process in left[:8]]} could not be killed")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        self._stopped = []

    async def wait_gone(self, seconds: float) -> None:
        """Until nothing is left, but no longer than that."""
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + seconds, LOOK_S
        while loop.time() < deadline and self.find():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)


def _same(known: Mapping[int, int], table: Mapping[int, Process]) -> set[int]:
    """Those of whom the table speaks: the same number, and the same start."""
    return {pid for pid, started in known.items() if pid in table and table[pid].started == started}


def _add_descendants(
    members: set[int], table: Mapping[int, Process], others: Collection[int] = (), *, sessions: bool = False
) -> None:
    """With `sessions`, those of the same session too. Session 0 is that of processes whose session cannot be seen."""
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


class Watched:
    """A process of which this one knows when it ends. Its number stays its own until `reap`."""

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
        """Used so far by it and by the children that it waited for."""
        process = look_up(self.pid)
        return process.cpu_s if process is not None else 0.0

    def signal(self, number: int) -> None:
        """Before `reap`."""
        os.kill(self.pid, number)

    @property
    def has_ended(self) -> bool:
        """Perhaps before the loop heard of it."""
        process = look_up(self.pid)
        return process is None or not process.living

    @abstractmethod
    def reap(self) -> tuple[int | None, Usage]:
        """Its exit code, as a shell says it, and what it used, as far as that is known. None: nobody here knows it."""


class Child(Watched):
    """A process that this one has started, in a session of its own, watched until it has ended."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        streams: tuple[int, int, int],
        keep: Sequence[int] = (),
        cpus: Collection[int] = (),
    ) -> None:
        """Raises OSError if it cannot be started. `keep`: descriptors that it inherits besides its streams.

        The affinity of a thread is inherited by what it starts, so it is set for that moment and then restored: the
        child never sees other cores than its own, and neither a launcher nor code between fork and exec is needed. The
        rest of this process keeps its cores, because affinity belongs to a thread.
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

    def part(self) -> tuple[int | None, Usage]:
        """`reap`, or give it up if it does not end."""
        if self.has_ended:
            return self.reap()
        self.abandon()
        return None, NO_USAGE

    def reap(self) -> tuple[int | None, Usage]:
        """None: somebody else in this process took the code.

        A process starts with the peak of the memory of the one that started it, which is this one. A peak that is not
        well above that says nothing and is given as 0.
        """
        self.abandon()
        try:
            _, status, used = os.wait4(self.pid, 0)
        except ChildProcessError:
            return None, NO_USAGE
        peak = used.ru_maxrss if used.ru_maxrss > PEAK_MARGIN * self._own_peak else 0
        usage = Usage(cpu_s=used.ru_utime + used.ru_stime, memory_peak_bytes=peak << 10)
        return as_shells_say(os.waitstatus_to_exitcode(status)), usage

    def abandon(self) -> None:
        """Watch it no longer. The object of the standard library is told of some end, so that it looks for none."""
        self._close()
        self._process.returncode = -signal.SIGKILL


def as_shells_say(code: int) -> int:
    """An exit code of which Python says a signal as its negative number."""
    return code if code >= 0 else SIGNAL_EXIT_BASE - code
