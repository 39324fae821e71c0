"""A forked instance: a process of this machine, forked from one that has imported the function. It isolates nothing.

Owns the fork server of a function, and the process, the socket and the streams of each instance. Promises that the
result of a call whose instance ends states the reason; that processes which an instance leaves running are killed
before its end is reported; and that all of them end with this process.

A function whose import starts threads cannot be forked: its instances are new processes that import it themselves. If
SIGKILL ends this process, they end too, but processes that they have started may survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pickle
import re
import secrets
import signal
import socket
from collections.abc import Callable

import msgspec

from tangram.core.action import NO_USAGE, Action, Usage
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.base import STOP_GRACE_S, Lease
from tangram.managers.functions.instance import (
    SHOWN_CHARACTERS,
    AwaitLease,
    Command,
    Instance,
    InstanceLost,
    exit_message,
    signal_name,
)
from tangram.managers.functions.program import PRELOADED, PROGRAM_FAILED, SPEC_VARIABLE
from tangram.managers.functions.work import Failure, FunctionSpec, loaded_spec
from tangram.managers.work import MIB, ExecResult, LeaseResult
from tangram.processes.capture import Capture
from tangram.processes.fork_server import ForkedChild, ForkServer
from tangram.processes.process_tree import ACTION_MARK, Process, ProcessTable, ProcessTree, WatchedProcess, read_process
from tangram.processes.streams import STDERR, STDOUT, Stream, standard_input
from tangram.processes.width import with_width

PROGRAM = "tangram.managers.functions.program"
FORK_SERVER_IDLE_FACTOR = 2.0
"""A fork server without an instance ends after the idle time of instances multiplied by this."""
FD_MIN = 64
"""The lowest descriptor of the socket in an instance: imported modules have opened the lower ones."""
STATUS = re.compile(rb"\d{1,3}\n?")
STATUS_BYTES_MAX = 64
PROCESS_COUNT_INTERVAL_S = 0.2
"""The time between counts of the processes of an instance during a call. A count takes less than 0.1 ms if there is
only one process. A fork bomb exceeds its limit by a few hundred processes before it is noticed."""

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
"""Signals that a program causes itself. Others come from outside, such as SIGKILL when the kernel is out of memory."""
NEAR_LIMIT = 0.8
"""The share of the memory limit above which a crash is attributed to memory. The limit counts private memory, but only
the resident memory of a dead process is known; the two differ by mapped libraries and untouched pages."""
OUT_OF_MEMORY_TEXT = re.compile(
    r"bad_?alloc|(cannot|can't|could not|unable to|failed to) allocate|out of memory|not enough memory|MemoryError"
    r"|insufficient memory|memory allocation .{0,40}failed|ENOMEM",
    re.IGNORECASE,
)
"""Messages that libraries print when an allocation fails, before they end the process."""

log = logging.getLogger("tangram.functions")


# ---- the fork server of a function --------------------------------------------------------------------------------


class FunctionForkServer:
    """Starts the processes of all instances of one function; ends after an idle time."""

    def __init__(self, spec: FunctionSpec, on_end: Callable[[], None]) -> None:
        """`on_end` is called when a server has ended with all its instances."""
        self.spec = spec
        self._on_end = on_end
        self._table = ProcessTable()
        self._server: ForkServer | None = None
        self._mark = ""
        self._spec_fd = -1
        self._instances = 0
        self._closings: set[asyncio.Task[None]] = set()
        """Servers that are ending."""
        self._marks_issued = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._warned = False

    @property
    def is_running(self) -> bool:
        return self._server is not None or bool(self._closings)

    async def spawn(self, fd: int, streams: tuple[int, int, int]) -> tuple[WatchedProcess, ProcessTree]:
        """Start the process of an instance. Returns it, and the process tree that may remain after its end.
        Raises OSError."""
        self._instances += 1
        self._stop_timer()
        try:
            server = self._present()
            self._marks_issued += 1
            own_mark = f"{self._mark}{self._marks_issued}."
            environment = with_width(self.spec.cpu_units, dict(os.environ)) | {ACTION_MARK: own_mark}
            process = await server.spawn(PROGRAM, [fd], name="function", env=environment, streams=streams)
        except BaseException:
            self.leave()
            raise
        # Leftover processes of a forked child carry the mark of its server, which kills them, unless it was killed
        # itself.
        forked = isinstance(process, ForkedChild)
        return process, ProcessTree(self._table, ACTION_MARK, self._mark if forked else own_mark)

    def _present(self) -> ForkServer:
        if self._server is None:
            self._mark = f"function-{secrets.token_hex(8)}."
            self._spec_fd = standard_input(pickle.dumps(self._loaded_spec()))
            environment = with_width(self.spec.cpu_units, dict(os.environ))
            environment |= {ACTION_MARK: self._mark, SPEC_VARIABLE: self.spec_path}
            self._server = ForkServer(PROGRAM, PRELOADED, env=environment, supervise=True)
        return self._server

    def _loaded_spec(self) -> dict[str, object]:
        return loaded_spec(self.spec) | {"paths": list(self.spec.paths), "umask": _umask()}

    @property
    def spec_path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._spec_fd}"

    async def kill_left(self, tree: ProcessTree) -> None:
        """Kill the processes of a dead instance that its server did not kill. Raises ManagerError."""
        server = read_process(self._server.pid) if self._server is not None and self._server.pid else None
        if server is not None:
            tree.exclude([server])  # and its descendants
        await tree.kill()

    def warn_of_threads(self, process: WatchedProcess) -> None:
        cannot_fork = self._server is not None and not self._server.can_fork
        if cannot_fork and not isinstance(process, ForkedChild) and not self._warned:
            self._warned = True
            log.warning(
                "importing function %s starts threads, so its instances cannot be forked: each one imports it again."
                " Start threads when the function is called, not when its module is imported.",
                self.spec.name,
            )

    def leave(self) -> None:
        """Called when an instance has ended."""
        self._instances -= 1
        if not self._instances and self._server is not None:
            after_s = FORK_SERVER_IDLE_FACTOR * self.spec.idle_s
            self._stop_timer()
            self._idle_timer = asyncio.get_running_loop().call_later(after_s, self.close)

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def close(self) -> None:
        """Begin to end the server with all its instances. The next instance starts another one, which imports again."""
        self._stop_timer()
        if self._server is not None:
            closing = asyncio.get_running_loop().create_task(self._server.aclose())
            self._closings.add(closing)
            closing.add_done_callback(self._on_closed)
            os.close(self._spec_fd)
            self._server, self._spec_fd = None, -1

    def _on_closed(self, closing: asyncio.Task[None]) -> None:
        self._closings.discard(closing)
        self._on_end()

    async def wait_closed(self) -> None:
        """Close, and block until the processes of the server have ended."""
        self.close()
        while self._closings:
            await asyncio.wait(self._closings)


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o022)


# ---- instances ----------------------------------------------------------------------------------------------------


class InstanceExit(msgspec.Struct, frozen=True, kw_only=True):
    """How an instance and all its processes have ended."""

    code: int | None = None
    """The exit code as a shell reports it; None if unknown."""
    signal: int = 0
    """The signal that ended it; 0 if it exited, with any code."""
    usage: Usage = NO_USAGE
    excess: int = 0
    """The number of its processes, if it was killed because of it."""
    lost: str = ""
    """The reason why processes of it may remain."""


class ForkedInstance(Instance):
    is_isolated = False

    def __init__(
        self, name: str, fork_server: FunctionForkServer, on_idle_end: Callable[[ForkedInstance], None]
    ) -> None:
        """`on_idle_end` is called when the process ends between two commands."""
        super().__init__(name)
        self._on_idle_end = on_idle_end
        self.fork_server = fork_server
        self.spec = fork_server.spec
        self._title = f"an instance of function {self.spec.name}"
        self.streams = (Stream(STDOUT), Stream(STDERR))
        self.process: WatchedProcess | None = None
        self.gone: asyncio.Future[InstanceExit] = asyncio.get_running_loop().create_future()
        self.lease: ForkedLease | None = None
        """The lease of the current command."""
        self._loop = asyncio.get_running_loop()
        self._socket, self._child_socket = socket.socketpair()
        self._socket.setblocking(False)
        self._unsent = memoryview(b"")
        self._status = b""
        self._excess = 0
        self._lost = ""
        self._started: int | None = None
        """The start time of its process: together with the process id it identifies the process."""
        self._unkilled: list[Process] = []
        """Processes that could not be killed at its end."""
        self._spawning: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def open(self, action: Action, grant: Grant) -> None:
        """Does nothing: the process is started when the function is loaded."""

    async def prepare(self, action: Action, grant: Grant, await_lease: AwaitLease) -> None:
        """Does nothing."""

    async def execute(self, command: Command, action: Action, grant: Grant) -> Lease:
        assert self.lease is None, "an instance serves one command at a time"
        self.lease = ForkedLease(self, command)
        for stream in self.streams:
            stream.begin(Capture(0), command.output)
        if self.process is None and not self.gone.done():
            self._spawning = self._loop.create_task(self._spawn())
        else:
            self.send_command()
        return self.lease

    async def _spawn(self) -> None:
        fd = fcntl.fcntl(self._child_socket, fcntl.F_DUPFD_CLOEXEC, FD_MIN)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            streams = (null, self.streams[0].writer, self.streams[1].writer)
            self.process, self._tree = await self.fork_server.spawn(fd, streams)
            if (process := read_process(self.process.pid)) is not None:
                self._started = process.started
        except OSError as error:
            self._close_fds()
            self._set_gone(InstanceExit(lost=f"{self._title} cannot be started: {error}"))
            return
        finally:
            for descriptor in (fd, null):
                os.close(descriptor)
        for stream in self.streams:
            stream.close_writer()
        self._child_socket.close()
        self._loop.add_reader(self._socket, self._read)
        self.process.exited.add_done_callback(lambda _: self._begin_end())
        self.send_command()

    def send_command(self) -> None:
        if self.gone.done():
            self._finish_lease()
        elif self.lease is not None and self._ending is None:
            self._unsent = memoryview(self.lease.text(self.fork_server.spec_path))
            self._write()
            self.lease.watch_processes()

    def _write(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._unsent = memoryview(b"")  # its end completes `exited`
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(STATUS_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket)  # its end completes `exited`
            return
        self._status += data
        if self.lease is None or STATUS.fullmatch(self._status) is None:
            self.kill(lost=f"{self._title} sent {self._status[:STATUS_BYTES_MAX]!r} in place of an exit code")
        elif self._status.endswith(b"\n"):
            status, self._status = int(self._status), b""
            self._finish_lease(status)

    def kill(self, *, excess: int = 0, lost: str = "") -> None:
        self._excess = excess
        self._lost = lost
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Signal the process and its group. The group exists once the process has called setsid."""
        if self.process is None or self.process.has_ended:
            return
        self._signal_group(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self.process.signal(number)

    def _signal_group(self, number: int) -> None:
        """Signal the process group by its id: no pidfd refers to a group. Compares the start time first, because the id
        may be reused once the fork server has died and the init process has reaped its children."""
        assert self.process is not None
        process = read_process(self.process.pid)
        if process is not None and process.started == self._started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    # ---- end of the instance

    def _begin_end(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())

    async def _end(self) -> None:
        assert self.process is not None
        self._signal_group(signal.SIGKILL)
        for stream in self.streams:
            stream.end()  # up to its last output
        code, usage = await self.process.collect_exit()
        lost = self._lost
        if isinstance(self.process, ForkedChild) and code is not None:
            if self.process.unkilled:
                self._unkilled = [
                    process for pid in self.process.unkilled if (process := read_process(pid)) is not None
                ]
                lost = f"its processes {list(self.process.unkilled[:8])} could not be killed"
        else:
            try:
                await self.fork_server.kill_left(self._tree)
            except ManagerError as error:
                lost = str(error)
        self._close_fds()
        self.fork_server.leave()
        number = self.process.exit_signal
        self._set_gone(InstanceExit(code=code, signal=number, usage=usage, excess=self._excess, lost=lost))

    def _set_gone(self, exit: InstanceExit) -> None:
        self.gone.set_result(exit)
        if self.lease is None:
            self._on_idle_end(self)
        self._finish_lease()

    def _finish_lease(self, status: int | None = None) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            for stream in self.streams:
                stream.end()
            lease.finish(status)

    def _close_fds(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._child_socket.close()
        for stream in self.streams:
            stream.close()

    async def terminate(self, grace_s: float) -> None:
        """Send SIGTERM to the process and its group, and SIGKILL after `grace_s`. Blocks until all its processes have
        ended."""
        if self._spawning is not None and self.process is None:
            self._spawning.cancel()  # if the child is forked nevertheless, it is killed
            await asyncio.wait({self._spawning})
        if self.process is None:
            if not self.gone.done():
                self._close_fds()
                self._set_gone(InstanceExit(lost="it was stopped before it had started"))
            return
        if grace_s:
            self.signal(signal.SIGTERM)
            await asyncio.wait({self.gone}, timeout=grace_s)
        if not self.gone.done():
            self.signal(signal.SIGKILL)
        await asyncio.wait({self.gone})

    async def close(self) -> None:
        is_first = not self.gone.done()
        await self.terminate(0.0)
        if not self.gone.result().lost or self.process is None:
            return
        if is_first:
            raise ManagerError(self.gone.result().lost)
        self._unkilled = [process for process in self._unkilled if _is_alive(process)]
        if self._unkilled:  # SIGKILL is pending for them
            raise ManagerError(self.gone.result().lost)
        await self.fork_server.kill_left(self._tree)

    # ---- the cause of its end

    def import_failure(self, ended: LeaseResult, reason: str, stderr: str) -> Failure:
        """A module that ends its process cannot be distinguished from one that is killed: both send no reply."""
        shown = stderr.strip()[-SHOWN_CHARACTERS:] or "it wrote nothing"
        raise ManagerError(f"{self._title} ended while it imported: {shown}")

    def exit_failure(self, ended: LeaseResult, stderr: str) -> Failure:
        exited = self.gone.result() if self.gone.done() else InstanceExit()
        number = exited.signal
        if exited.excess:
            may = f"may have {self.spec.processes_max}"
            return Failure(kind="processes", message=f"it had {exited.excess} processes and threads, and {may}")
        if exited.code is None:
            raise InstanceLost(f"{self._title} has ended, with an unknown exit code")
        if exited.code == PROGRAM_FAILED:
            raise InstanceLost(f"{self._title} failed: {stderr.strip()[-SHOWN_CHARACTERS:]}")
        if not number:
            return Failure(kind="exited", message=exit_message(exited.code, 0))
        if number in CRASHES:
            message = f"{exit_message(exited.code, number)}; {self._memory(exited.usage.memory_peak_bytes, stderr)}"
            return Failure(kind="exited", message=message)
        raise InstanceLost(f"{self._title} was killed by {signal_name(number)} during the call")

    def _memory(self, peak: int, stderr: str) -> str:
        """Whether a crash was caused by lack of memory. The kernel reports a failed allocation only to the program, and
        many C libraries then end the process, so this is a guess."""
        limit = self.spec.memory_bytes
        had = f"its peak was {peak / MIB:.0f} MiB, libraries included"
        if peak >= NEAR_LIMIT * limit or OUT_OF_MEMORY_TEXT.search(stderr):
            return f"it has probably run out of its {limit / MIB:.0f} MiB ({had}); give it more memory"
        return f"it may use {limit / MIB:.0f} MiB, and {had}"


class ForkedLease:
    """The lease of one command. It ends with the status of the command, or with all processes of the instance."""

    def __init__(self, instance: ForkedInstance, command: Command) -> None:
        self._instance = instance
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[LeaseResult] = self._loop.create_future()
        self._arguments_fd = -1
        self._count_timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._cpu_s_before = 0.0

    def text(self, spec_path: str) -> bytes:
        path, arguments = spec_path, self._command.arguments
        if arguments is not None and not self._command.is_inline:
            self._arguments_fd = standard_input(arguments)
            path = f"/proc/{os.getpid()}/fd/{self._arguments_fd}"
        return f"{self._command.text(path)}\0".encode()

    def watch_processes(self) -> None:
        assert self._instance.process is not None
        self._cpu_s_before = self._instance.process.cpu_s
        self._count_timer = self._loop.call_later(PROCESS_COUNT_INTERVAL_S, self._count_processes)

    def _count_processes(self) -> None:
        instance = self._instance
        assert instance.process is not None
        count = count_tasks(instance.process.pid)
        if count > instance.spec.processes_max:
            instance.kill(excess=count)
        else:
            self._count_timer = self._loop.call_later(PROCESS_COUNT_INTERVAL_S, self._count_processes)

    def finish(self, status: int | None) -> None:
        """`status`: the status of the command, if the program continues to run."""
        if self._count_timer is not None:
            self._count_timer.cancel()
        if self._arguments_fd >= 0:
            os.close(self._arguments_fd)
        if self._result.done():
            return
        if status is not None:
            if self._command.arguments is None and not status and self._instance.process is not None:
                self._instance.fork_server.warn_of_threads(self._instance.process)
            self._result.set_result(LeaseResult(executed=ExecResult(exit_code=status)))
            return
        exited = self._instance.gone.result()
        usage = Usage(
            cpu_s=max(0.0, exited.usage.cpu_s - self._cpu_s_before), memory_peak_bytes=exited.usage.memory_peak_bytes
        )
        code = None if self._stopped or exited.lost else exited.code
        lost = "" if self._stopped and self._instance.process is None else exited.lost
        self._result.set_result(LeaseResult(usage=usage, executed=ExecResult(exit_code=code), lost=lost))

    async def wait(self) -> LeaseResult:
        return await asyncio.shield(self._result)

    def resize(self, *, reserved: int, limit: int) -> None:
        """Does nothing: the CPU of an instance is not limited. Its environment names its number of cores."""

    def cpu_seconds(self) -> float | None:
        if self._result.done() or self._instance.process is None:
            return None
        return max(0.0, self._instance.process.cpu_s - self._cpu_s_before)

    async def stop(self) -> None:
        if not self._result.done():
            self._stopped = True
            await self._instance.terminate(STOP_GRACE_S)
            await asyncio.wait({self._result})


def _is_alive(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.started == process.started and now.is_alive


def count_tasks(top: int) -> int:
    """Count the processes and threads of a process and its descendants, adopted orphans included. Counts only threads
    if the kernel does not list children."""
    count, ahead = 0, [top]
    while ahead:
        pid = ahead.pop()
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue  # it has ended
        count += len(tasks)
        for task in tasks:
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file,
            ):
                ahead += map(int, file.readall().split())
    return count
