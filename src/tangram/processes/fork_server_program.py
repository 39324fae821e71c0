"""The program of the fork server: imports what children need, and forks them.

Owns every child until its owner closes the child's connection: until then the process id is not reused. A child has
nothing of this process but what was imported, dies with it, and is killed when its connection closes.

With `supervise`, this process is a subreaper: what a child leaves running is killed when the child ends, and everything
below this process is killed when it ends or its owner dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import NamedTuple, NoReturn

from tangram.processes.libc import become_subreaper, die_with_parent, set_process_name
from tangram.processes.orphans import kill_children, list_children
from tangram.processes.packets import FDS_MAX, Message, decode_packet, encode_packet, receive_packet, send_packet

UMASK = 0o022
PROCESS_NAME = b"tangram-fork"
"""The name in `top`, which shows 15 characters; the command line is also that of its children."""
REAP = encode_packet({"do": "reap"})
"""The request for the exit code of a child that has ended."""
KILL_S_MAX = 3.0
"""The time limit for killed processes to end. Less than the time that the owner waits for the reply to REAP."""


def main(fd: int, owner: int, modules: list[str], supervise: bool = False) -> NoReturn:
    """Import `modules`, then fork a child for each request on the socket `fd`. Ends with the process `owner`."""
    die_with_parent(owner)
    if supervise:
        become_subreaper()
    set_process_name(PROCESS_NAME)
    for module in modules:
        importlib.import_module(module)
    _flush()  # or children would write what importing printed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the owner, which ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would discard the exit codes of children
    gc.collect()
    gc.freeze()  # a collection would write to every page that forks share
    if supervise:
        signal.signal(signal.SIGTERM, _raise_end)
        die_with_parent(owner, signal.SIGTERM)  # from here on it first kills its descendants
    ForkServerLoop(socket.socket(fileno=fd), supervise=supervise).serve()


def _raise_end(number: int, frame: object) -> NoReturn:
    raise EOFError


def run_standalone(program: str, fd: int, parent: int) -> None:
    """Run one program in a process that was executed for it and imports for itself."""
    die_with_parent(parent)
    importlib.import_module(program).main(fd)


class EndingChild(NamedTuple):
    """A child whose end is awaited. The end of a process in an uninterruptible system call may take long, even after
    SIGKILL; other children do not wait for it."""

    pid: int
    child_socket: socket.socket
    pidfd: int


class ForkServerLoop:
    def __init__(self, owner: socket.socket, *, supervise: bool) -> None:
        self._request_socket = owner
        self._supervise = supervise
        self._selector = selectors.DefaultSelector()
        self._pids: set[int] = set()
        self._can_fork = len(os.listdir("/proc/self/task")) == 1
        """False if importing started threads: a fork would copy their state in the middle of an operation."""
        self._imported_children = list_children() if supervise else []
        """Children that importing started live as long as this process."""
        self._unkilled: set[int] = set()
        """Processes that `kill_children` could not end. They have been reported and are not waited for again."""

    def serve(self) -> NoReturn:
        self._selector.register(self._request_socket, selectors.EVENT_READ, 0)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._request_socket:
                        self._on_request()
                    elif isinstance(key.data, EndingChild):
                        self._on_child_end(key.data)
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._on_child_socket(key.fileobj, key.data)
        except EOFError:
            if self._supervise:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                kill_children(spare=(), wait_s=KILL_S_MAX)
            os._exit(0)  # the kernel kills its remaining children

    def _on_request(self) -> None:
        """Raises EOFError when the owner has closed the socket."""
        try:
            data, fds = receive_packet(self._request_socket, FDS_MAX)
        except ConnectionError:
            raise EOFError from None
        if not data:
            raise EOFError
        child_socket = socket.socket(fileno=fds[0])
        pid = 0
        if self._can_fork:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                run_child(decode_packet(data), fds[1:], parent, close=[fds[0], *self._fds()], supervise=self._supervise)
        for fd in fds[1:]:
            os.close(fd)
        if pid:
            self._pids.add(pid)
            self._selector.register(child_socket, selectors.EVENT_READ, pid)
        with contextlib.suppress(ConnectionError):  # the owner has closed the connection: its end is read next
            send_packet(child_socket, encode_packet({"pid": pid}))
        if not pid:
            child_socket.close()

    def _fds(self) -> list[int]:
        """Descriptors of this process that no child has. Those that importing opened belong to the imported modules."""
        keys = self._selector.get_map().values()
        ending = [key.data.child_socket.fileno() for key in keys if isinstance(key.data, EndingChild)]
        return [self._selector.fileno(), *(key.fd for key in keys), *ending]

    def _on_child_socket(self, child_socket: socket.socket, pid: int) -> None:
        """The owner requests the exit code of the child, or has closed the connection."""
        try:
            request, _ = receive_packet(child_socket)
        except ConnectionError:
            request = b""
        self._selector.unregister(child_socket)
        if not request:
            os.kill(pid, signal.SIGKILL)
        pidfd = os.pidfd_open(pid)  # the owner may be faster than this process in noticing the end
        self._selector.register(pidfd, selectors.EVENT_READ, EndingChild(pid, child_socket, pidfd))

    def _on_child_end(self, child: EndingChild) -> None:
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        if not pid:
            return
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self._pids.discard(child.pid)
        exit_report: Message = {
            "code": os.waitstatus_to_exitcode(status),
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_bytes": used.ru_maxrss << 10,
        }
        if self._supervise:
            exit_report["unkilled"] = self._kill_remaining()
        with child.child_socket, contextlib.suppress(OSError):
            send_packet(child.child_socket, encode_packet(exit_report))

    def _kill_remaining(self) -> list[int]:
        """Kill the processes that ended children have left. Returns those that could not be killed, each one once."""
        for pid in list(self._unkilled):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._unkilled.discard(pid)
        remaining = kill_children(spare=(*self._pids, *self._imported_children, *self._unkilled), wait_s=KILL_S_MAX)
        self._unkilled.update(remaining)
        return remaining


def run_child(request: Message, fds: list[int], parent: int, close: list[int], supervise: bool) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        if supervise:
            become_subreaper()  # so that it can end the processes that it starts itself
        os.setsid()
        os.umask(UMASK)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _install_fds(fds, [0, 1, 2, *request["pass_fds"]], close)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        set_process_name(request["name"].encode())
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        importlib.import_module(request["program"]).main(request["pass_fds"][0])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _install_fds(fds: list[int], numbers: list[int], close: list[int]) -> None:
    """Give these descriptors these numbers, and close the others of the server."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds]  # so that none is overwritten
    for fd in (*fds, *close):
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
