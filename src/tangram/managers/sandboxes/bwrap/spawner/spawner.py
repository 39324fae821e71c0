"""The spawner: a small privileged process that starts programs and file workers inside sandboxes.

An isolated program (processes/isolated.py): imports only the standard library, so forking it costs a fraction of
forking its owner. Everything that its forks need is imported before the first fork, because a later import would read
files of the sandbox. Single-threaded. Owns the processes of all sandboxes; child.py has the steps of its forks. Makes
no decisions: it executes the requests on its socket, with one reply each, and reports the end of programs. Promises
that its children end with it, that it ends with its owner (the end of the socket kills every sandbox), and that no
program in a sandbox can crash it.

The spawner of a named owner outlives it, if that owner requests it. Without an owner it kills the processes of actions,
freezes all others, and listens on a socket in the directory of the owner for the next one. Without a sandbox it exits.

A program starts as a *runner*: a fork that has entered the namespaces of its sandbox, closed all descriptors, dropped
every privilege and installed the filter of system calls, and then waits for one command. The spawner forks the next
runner of a sandbox as soon as the previous one has its command, so that the next command need not wait for a fork; at
most SPARES_MAX sandboxes have a spare runner. A runner joins the control groups of its action before it gets its
command, and shares nothing with the spawner but the streams that come with the command.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tangram.managers.sandboxes.bwrap.spawner import child, file_worker, orphan_cleanup
from tangram.managers.sandboxes.bwrap.spawner.protocol import FDS_MAX, PROTOCOL, SOCKET_NAME
from tangram.managers.sandboxes.bwrap.spawner.spawned_sandbox import (
    REPLY_BYTES_MAX,
    RUNNER_GONE_ERRORS,
    Runner,
    SpawnedSandbox,
    discard_runner,
    parse_reply,
    read_reply,
    send_command,
)
from tangram.processes.libc import CLONE_NEWPID, SeccompFilter, setns
from tangram.processes.packets import (
    PACKET_BYTES_MAX,
    Message,
    decode_packet,
    encode_packet,
    packet_socket,
    packet_socketpair,
    receive_packet,
    reserve_send_buffer,
    send_packet,
)

SPARES_MAX = 64
"""Maximum spare runners. Each takes about half a megabyte; those of the most recently used sandboxes are kept."""
POLL_S = 0.0003
"""Pause between two polls of the first process of a sandbox that is being created."""
RESUME_S = 0.2
"""Pause between SIGCONTs to a runner that has its command: a program in its sandbox may stop it."""
ACCEPT_RETRY_S = 0.01
"""Pause after a connection that could not be accepted; the listener stays readable."""
EXECUTE_S_MAX = 120.0
"""Time limit for a runner to execute its program. Then it is killed: a program in its sandbox keeps stopping it."""

DRAINED_MAX = 64
"""Drained streams of one sandbox. The oldest are closed."""
DRAIN_BYTES = 1 << 16


class Spawner:
    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener
        """Accepts the next owner; None if there is none after the first."""
        self._outlives = False
        """Whether sandboxes are left to the next owner, or end with the current one."""
        self._owner: socket.socket | None = None
        self._owner_pidfd = -1
        self._departing_owner: socket.socket | None = None
        """The socket of an owner that has ended: closed when everything is frozen."""
        self._freeze_deadline_s = 0.0
        self._number = 0
        """The number of the last request. The next owner continues from there, so that no old reply matches its
        requests."""
        self._workers: dict[int, Runner | None] = {}
        """Processes that work for the owner: runners with a command and the programs that they became, else None."""
        self._sandboxes: dict[str, SpawnedSandbox] = {}
        self._selector = selectors.DefaultSelector()
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._groups: list[str] = []
        """The control groups of the owner: every process in them ends with the spawner."""
        self._filter: SeccompFilter | None = None
        self._spares_wanted: OrderedDict[str, None] = OrderedDict()
        """Sandboxes whose next runner is forked when there is nothing else to do."""
        self._spares: OrderedDict[str, None] = OrderedDict()
        """Sandboxes that have a spare runner, the longest unused first."""
        self._starting_inits: dict[int, Callable[[], None]] = {}
        """First processes that bubblewrap is still setting up, and what to do when they are ready."""
        self._pending_runners: dict[int, Runner] = {}
        """Runners that have a command and have neither executed its program nor replied, by the number of the
        request."""
        self._resumed_s = 0.0

    def serve(self, owner: socket.socket) -> None:
        try:
            self._accept_owner(owner)
            while True:
                idle = RESUME_S if self._pending_runners else None
                timeout = 0.0 if self._spares_wanted else POLL_S if self._starting_inits else idle
                if self._departing_owner is not None:
                    timeout = orphan_cleanup.END_PAUSE_S
                ready = self._selector.select(timeout)
                for key, _ in ready:
                    key.data(key.fileobj)
                if self._starting_inits:
                    self._check_starting()
                elif not ready and self._spares_wanted:
                    self._fork_spare(self._spares_wanted.popitem()[0])
                if self._pending_runners:
                    self._resume_runners()
                if self._owner is None:
                    self._await_next_owner()
        except EOFError:
            pass
        finally:
            for sandbox in self._sandboxes.values():
                sandbox.kill()
            orphan_cleanup.kill_all(self._groups)

    # ---- owners ----

    def _accept_owner(self, owner: socket.socket) -> None:
        """Take commands from this owner until its connection or its process ends: a fork of it may hold the connection
        too."""
        try:
            pid, user, _ = struct.unpack("3i", owner.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.geteuid():
                raise ProcessLookupError(errno.ESRCH, "the peer is another user")
            self._owner_pidfd = os.pidfd_open(pid)
        except OSError:
            owner.close()
            return
        self._owner = owner
        self._selector.register(owner, selectors.EVENT_READ, self._on_request)
        self._selector.register(self._owner_pidfd, selectors.EVENT_READ, self._on_owner_death)

    def _on_owner_death(self, _: object) -> None:
        if self._owner is not None:
            self._lose_owner()

    def _lose_owner(self) -> None:
        if self._listener is None or not self._outlives:
            raise EOFError
        assert self._owner is not None and self._departing_owner is None
        self._selector.unregister(self._owner)
        self._selector.unregister(self._owner_pidfd)
        os.close(self._owner_pidfd)
        self._owner, self._departing_owner = None, self._owner
        self._spares_wanted.clear()
        self._freeze_deadline_s = time.monotonic() + orphan_cleanup.END_S_MAX
        for sandbox in self._sandboxes.values():
            for name, held in sandbox.sessions.items():  # their shells are killed, if they have not ended
                self._discard_output(sandbox, held)
                sandbox.sessions[name] = []

    def _await_next_owner(self) -> None:
        """Called without an owner: wait until everything is frozen, then for the next owner."""
        if self._departing_owner is not None:
            if not self._freeze_round():
                return
            self._departing_owner.close()
            self._departing_owner = None
            if self._sandboxes and self._listener is not None:
                self._selector.register(self._listener, selectors.EVENT_READ, self._on_next_owner)
        if not self._sandboxes:
            raise EOFError

    def _freeze_round(self) -> bool:
        """One round of killing processes that work for the ended owner. If that fails in time, the whole sandbox is
        killed: nothing may run without an owner. The wait for a killed process that hangs in the kernel is limited,
        because the other sandboxes must be adopted."""
        for pid, runner in self._workers.items():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if runner is not None and runner.sandbox is not None:
                orphan_cleanup.thaw_killed(pid, self._groups, runner.sandbox.name)
        busy = orphan_cleanup.freeze_orphans(
            self._groups, {name for name, sandbox in self._sandboxes.items() if not sandbox.closing}
        )
        late_s = time.monotonic() - self._freeze_deadline_s
        if late_s > 0.0:
            working = {
                runner.sandbox.name for runner in self._workers.values() if runner is not None and runner.sandbox
            }
            for name in (busy | working) & set(self._sandboxes):
                self._sandboxes[name].kill()
        return not (busy or self._workers) or late_s > orphan_cleanup.END_S_MAX

    def _on_next_owner(self, _: object) -> None:
        """Accept the next owner. The greeting to it lists the sandboxes, which it compares with its records."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer has disconnected, or there is no free descriptor
            time.sleep(ACCEPT_RETRY_S)
            return
        self._accept_owner(connection)
        if self._owner is not None:
            self._selector.unregister(self._listener)
            with contextlib.suppress(OSError):  # then its default size
                reserve_send_buffer(self._owner, 4)
            sandboxes = {
                name: {"init": sandbox.init, "sessions": sorted(sandbox.sessions)}
                for name, sandbox in self._sandboxes.items()
            }
            self._send({"protocol": PROTOCOL, "number": self._number, "boxes": sandboxes})

    # ---- messages ----

    def _on_request(self, _: object) -> None:
        if self._owner is None:
            return  # its process ended at the same moment
        try:
            data, fds = receive_packet(self._owner, FDS_MAX)
        except ConnectionResetError:  # it died with replies unread
            data, fds = b"", []
        if not data:
            self._lose_owner()
            return
        head, _, command = data.partition(b"\n")
        request = decode_packet(head)
        self._number = request["id"]
        try:
            if command:
                self._run_command(request, command, fds)
            else:
                _REQUESTS[request["do"]](self, request, fds)
        except OSError as error:
            self._send({"exit" if command else "id": request["id"], "error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def _reply(self, number: int, **fields: Any) -> None:
        self._send({"id": number, **fields})

    def _send(self, message: Message) -> None:
        if self._owner is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next read reports the end
                send_packet(self._owner, encode_packet(message))

    def _collect(self, fd: int, then: Callable[[bytes], None], into: bytearray | None = None) -> None:
        """Read a pipe of a child to its end without blocking."""
        chunks = bytearray() if into is None else into

        def more(_: object) -> None:
            try:
                data = os.read(fd, PACKET_BYTES_MAX)
            except ConnectionResetError:
                return  # it ended with its command unread; its output before that comes with the next read
            if data:
                if len(chunks) < REPLY_BYTES_MAX:
                    chunks.extend(data)
                return
            self._selector.unregister(fd)
            os.close(fd)
            then(bytes(chunks))

        self._selector.register(fd, selectors.EVENT_READ, more)

    def _watch(self, pid: int, fd: int, then: Callable[[int], None]) -> None:
        """Call `then(exit code)` when a child has ended; a signal is a negative code. `fd`: its pidfd, which is closed
        then."""

        def ended(_: object) -> None:
            self._selector.unregister(fd)
            os.close(fd)
            _, status = os.waitpid(pid, 0)
            self._workers.pop(pid, None)
            then(os.waitstatus_to_exitcode(status))

        self._selector.register(fd, selectors.EVENT_READ, ended)

    def _begin(self, request: Message, fds: list[int]) -> None:
        """Set the filter of all programs from now on: instructions of classic BPF, hexadecimal."""
        self._groups = request["groups"]
        self._outlives = request["outlives"]
        self._filter = SeccompFilter(bytes.fromhex(request["filter"]))
        self._reply(request["id"], pid=os.getpid())

    # ---- sandboxes ----

    def _open(self, request: Message, fds: list[int]) -> None:
        """Mount the files of the sandbox in a private mount namespace, which ends with it, and start its first process
        there. It is open when that process has executed the given program."""
        assert self._filter is not None, "the filter comes before the first sandbox"
        spawner = os.getpid()
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as writers:
            status_read, status = _pipe(on_error, writers)
            info_read, info = _pipe(on_error, writers)
            pid = os.fork()
            if pid == 0:
                child.become_holder(request, self._filter.code, status, info, spawner)
            pidfd = _open_pidfd(pid)
            on_error.pop_all()
        self._workers[pid] = None
        output = bytearray()
        name, number = request["box"], request["id"]

        report = bytearray()

        def has_begun(_: object) -> None:
            """The report comes in pieces, and other processes hold the pipe too: the closing brace is its end."""
            data = os.read(info_read, 4096)
            report.extend(data)
            if data and not report.endswith(b"}\n"):
                return
            self._selector.unregister(info_read)
            os.close(info_read)
            if data:
                init = int(json.loads(report)["child-pid"])
                self._starting_inits[init] = lambda: is_ready(init)

        def is_ready(init: int) -> None:
            try:
                self._sandboxes[name] = SpawnedSandbox(name, pid, init, request)
            except OSError as error:  # it has ended, or there is no free descriptor: `ended` replies
                output.extend(str(error).encode())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(init, signal.SIGKILL)
                return
            self._workers.pop(pid, None)
            self._want_spare(name)
            self._reply(number, init=init)

        def ended(code: int) -> None:
            sandbox = self._sandboxes.pop(name, None)
            if sandbox is not None:
                self._close_drained(sandbox, 0)
                sandbox.close()
                self._spares_wanted.pop(name, None)
                self._send({"gone": name, "code": code})
            else:
                why = output.decode(errors="replace").strip()
                self._reply(number, error=why or f"its first process ended with {code} before it was ready")

        self._selector.register(info_read, selectors.EVENT_READ, has_begun)
        # First its output, then its end: no other process holds that pipe once it has ended.
        self._collect(status_read, lambda text: self._watch(pid, pidfd, ended), into=output)

    def _check_starting(self) -> None:
        """bubblewrap reports the process id before the sandbox is ready; the program of the process shows when it
        is."""
        for init, then in list(self._starting_inits.items()):
            try:
                path = os.readlink(f"/proc/{init}/exe")
            except OSError:
                del self._starting_inits[init]  # it has ended; so has its holder, which is watched
                continue
            if os.path.basename(path) != "bwrap":
                del self._starting_inits[init]
                then()

    def _close(self, request: Message, fds: list[int]) -> None:
        sandbox = self._sandboxes.get(request["box"])
        if sandbox is not None:
            sandbox.kill()
        self._reply(request["id"])

    def _copy(self, request: Message, fds: list[int]) -> None:
        """Copy a directory that only the holder of a sandbox sees to one that all processes see."""
        sandbox = self._get_sandbox(request["box"])
        spawner = os.getpid()
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as writers:
            status_read, status = _pipe(on_error, writers)
            pid = os.fork()
            if pid == 0:
                child.become_copy(sandbox.holder_fd, request["source"], request["target"], status, spawner)
            pidfd = _open_pidfd(pid)
            on_error.pop_all()
        self._workers[pid] = None
        output = bytearray()

        def ended(code: int) -> None:
            why = {} if code == 0 else {"error": output.decode(errors="replace").strip() or f"cp ended with {code}"}
            self._reply(request["id"], **why)

        self._collect(status_read, lambda text: self._watch(pid, pidfd, ended), into=output)

    def _get_sandbox(self, name: str) -> SpawnedSandbox:
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            raise ProcessLookupError(errno.ESRCH, f"sandbox {name} is gone")
        return sandbox

    def _drain(self, request: Message, fds: list[int]) -> None:
        """Drain streams of ended actions, which the owner has closed."""
        sandbox = self._sandboxes.get(request["box"])
        if sandbox is not None:
            self._discard_output(sandbox, _duplicate(fds))

    def _discard_output(self, sandbox: SpawnedSandbox, fds: list[int]) -> None:
        """Read and discard, so that processes which still write there neither block nor die."""

        def more(fd: int) -> None:
            try:
                data = os.read(fd, DRAIN_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                del sandbox.drained[fd]
                self._selector.unregister(fd)
                os.close(fd)

        for fd in fds:
            sandbox.drained[fd] = None
            self._selector.register(fd, selectors.EVENT_READ, more)
        self._close_drained(sandbox, DRAINED_MAX)

    def _close_drained(self, sandbox: SpawnedSandbox, most: int) -> None:
        while len(sandbox.drained) > most:
            fd, _ = sandbox.drained.popitem(last=False)
            self._selector.unregister(fd)
            os.close(fd)

    def _end_session(self, request: Message, fds: list[int]) -> None:
        """The caller has been notified of the end of this session's shell."""
        sandbox = self._sandboxes.get(request["box"])
        if sandbox is not None:
            sandbox.end_session(request["session"])

    # ---- runners ----

    def _run_command(self, request: Message, command: bytes, fds: list[int]) -> None:
        """Pass a command to a runner unchanged. `exit` reports its result; with `reports_pid`, the process id of the
        runner is reported first."""
        sandbox = self._get_sandbox(request["box"])
        groups = request["groups"]
        held = fds[len(fds) - request.get("held", 0) :]
        fds = fds[: len(fds) - len(held)]
        session_fds = _duplicate(held)
        try:
            runner = self._send_command(sandbox, groups, command, fds)
        except BaseException:
            _close_all(session_fds)
            raise
        runner.number = request["id"]
        runner.executes = request["do"] == "exec"
        runner.commanded_s = time.monotonic()
        runner.sandbox = sandbox
        if held:
            sandbox.end_session(request["session"])
            sandbox.sessions[request["session"]] = session_fds
        self._pending_runners[runner.number] = runner
        self._workers[runner.pid] = runner
        os.kill(runner.pid, signal.SIGCONT)
        if request["reports_pid"]:
            self._reply(runner.number, pid=runner.pid)
        self._want_spare(sandbox.name)
        self._collect(runner.channel.detach(), functools.partial(self._on_reply, runner))

    def _send_command(self, sandbox: SpawnedSandbox, groups: list[str], command: bytes, fds: list[int]) -> Runner:
        """Returns the runner that got the command."""
        runner = self._take_runner(sandbox)
        try:
            send_command(runner, sandbox, groups, command, fds)
            return runner
        except RUNNER_GONE_ERRORS:
            # The spare was killed, as any process in the sandbox may be. Try once with another.
            discard_runner(runner)
        except OSError:
            discard_runner(runner)
            raise
        runner = self._fork_runner(sandbox)
        try:
            send_command(runner, sandbox, groups, command, fds)
            return runner
        except RUNNER_GONE_ERRORS:
            reason = parse_reply(read_reply(runner.channel))["error"]
            discard_runner(runner)
            raise ChildProcessError(reason) from None
        except OSError:
            discard_runner(runner)
            raise

    def _resume_runners(self) -> None:
        now = time.monotonic()
        if now - self._resumed_s < RESUME_S:
            return
        self._resumed_s = now
        for runner in self._pending_runners.values():
            late = runner.executes and now - runner.commanded_s > EXECUTE_S_MAX
            with contextlib.suppress(ProcessLookupError):  # its end is about to be noticed
                os.kill(runner.pid, signal.SIGKILL if late else signal.SIGCONT)

    def _abandon(self, request: Message, fds: list[int]) -> None:
        """Kill a runner whose caller no longer waits."""
        runner = self._pending_runners.get(request["request"])
        if runner is not None:
            os.kill(runner.pid, signal.SIGKILL)
        self._reply(request["id"])

    def _on_reply(self, runner: Runner, text: bytes) -> None:
        """Called with all output of a runner on its channel. For a program, none means success: exec has closed the
        channel."""
        self._pending_runners.pop(runner.number, None)
        runner.reply = text
        self._report_exit(runner)

    def _on_runner_exit(self, sandbox: SpawnedSandbox, runner: Runner, code: int) -> None:
        if sandbox.spare is runner:
            sandbox.spare = None
            self._spares.pop(sandbox.name, None)
            runner.channel.close()
        elif runner.number:
            runner.code = code
            self._report_exit(runner)

    def _report_exit(self, runner: Runner) -> None:
        """Report the exit of a runner once its output and its end are known, in either order."""
        if runner.reply is None or runner.code is None:
            return
        if runner.executes and not runner.reply:
            self._send({"exit": runner.number, "code": runner.code})
        else:
            self._send({"exit": runner.number, **parse_reply(runner.reply)})

    def _want_spare(self, name: str) -> None:
        self._spares_wanted[name] = None
        while len(self._spares_wanted) > SPARES_MAX:
            self._spares_wanted.popitem(last=False)

    def _fork_spare(self, name: str) -> None:
        sandbox = self._sandboxes.get(name)
        if sandbox is None or sandbox.spare is not None:
            return
        try:
            sandbox.spare = self._fork_runner(sandbox)
        except OSError:
            return  # the next command tries again, and reports the error
        self._spares[name] = None
        if len(self._spares) > SPARES_MAX:
            oldest = self._sandboxes[self._spares.popitem(last=False)[0]]
            assert oldest.spare is not None
            oldest.close_join_files()
            oldest.spare.channel.close()  # it sees the end of the channel and exits
            oldest.spare = None

    def _take_runner(self, sandbox: SpawnedSandbox) -> Runner:
        runner, sandbox.spare = sandbox.spare, None
        if runner is None:
            return self._fork_runner(sandbox)
        del self._spares[sandbox.name]
        return runner

    def _fork_runner(self, sandbox: SpawnedSandbox) -> Runner:
        """Fork a child into the process namespace of a sandbox. The spawner itself stays in its own."""
        assert self._filter is not None, "the filter comes before the first sandbox"
        spawner_end, runner_end = packet_socketpair()
        pid = -1
        try:
            reserve_send_buffer(spawner_end, 2)
            setns("joining the processes", sandbox.init_fd, CLONE_NEWPID)
            try:
                pid = os.fork()
            finally:
                if pid != 0:
                    setns("leaving the processes", self._own_pid_namespace, CLONE_NEWPID)
            pidfd = _open_pidfd(pid) if pid != 0 else -1
        except BaseException:
            spawner_end.close()
            raise
        finally:
            if pid != 0:
                runner_end.close()
        if pid == 0:
            child.become_runner(runner_end.detach(), sandbox, self._filter, COMMANDS, FDS_MAX)
        runner = Runner(pid, spawner_end)
        self._watch(pid, pidfd, lambda code: self._on_runner_exit(sandbox, runner, code))
        return runner


def _pipe(readers: contextlib.ExitStack, writers: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends these stacks close."""
    reader, writer = os.pipe()
    readers.callback(os.close, reader)
    writers.callback(os.close, writer)
    return reader, writer


def _open_pidfd(pid: int) -> int:
    """A pidfd of a child. Kills and reaps the child if there is no free descriptor."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _duplicate(fds: list[int]) -> list[int]:
    """Duplicate all descriptors, or none."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        _close_all(copies)
        raise
    return copies


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


COMMANDS: child.Commands = {"exec": child.execute, "file": file_worker.carry_out}
"""The commands of a runner."""

_REQUESTS: dict[str, Callable[[Spawner, Message, list[int]], None]] = {
    "begin": Spawner._begin,
    "open": Spawner._open,
    "close": Spawner._close,
    "copy": Spawner._copy,
    "abandon": Spawner._abandon,
    "drain": Spawner._drain,
    "end_session": Spawner._end_session,
}


def main() -> None:
    """Arguments: `FD [LOCK DIRECTORY]`: the descriptor of a SOCK_SEQPACKET socket to the owner. For a
    named owner also the descriptor of a locked file, which is held for the life of the spawner, and the directory where
    the next owner finds it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the owner
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, child.DESCRIPTORS_MAX), most))
    owner, *lock = [_move_fd_up(int(word)) for word in sys.argv[1:3]]
    for low in range(3, child.LOW_FDS):  # taken, so that no descriptor of the spawner has a number that children use
        with contextlib.suppress(OSError):
            os.fstat(low)
            continue
        os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    listener = _daemonize(lock[0], sys.argv[3]) if lock else None
    gc.freeze()  # a collection would write to every page that forks share
    Spawner(listener).serve(socket.socket(fileno=owner))


def _move_fd_up(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, child.LOW_FDS)
    os.close(fd)
    return moved


def _daemonize(lock: int, directory: str) -> socket.socket:
    """Become a daemon that can be found: `lock` gets its process id, and the socket listens for the next owner."""
    if os.fork() != 0:
        os._exit(0)
    os.ftruncate(lock, 0)
    os.write(lock, b"%d" % os.getpid())
    os.chdir(directory)  # the path of a socket is limited to 107 bytes, that of a directory is not
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME)
    listener = packet_socket()
    listener.bind(SOCKET_NAME)
    listener.listen()
    os.chdir("/")
    return listener
