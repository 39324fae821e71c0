"""The program of the fork server: imports what children need, and forks them.

Owns every child until its owner lets go of its line, a socket of its own: the child's number stays its own until then.
Decides nothing. Promises that a child has nothing of this process but what was imported, that it dies with it, and that
it is killed when its line ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
REQUEST_BYTES_MAX = 1 << 18
FDS_MAX = 253
"""Of a request, which the kernel takes no more of: the line of the child, its three streams, and what it keeps."""
DESCRIPTORS_MAX = 1 << 16
UMASK = 0o022
NAME = b"tangram-nursery"
"""As `top` shows it, which shows 15 letters; its command line is also that of its children."""
REAP = b"r"
"""Said on a line: the child has ended, and how?"""

_libc = ctypes.CDLL(None)


def main(fd: int, owner: int, modules: list[str]) -> NoReturn:
    """The socket on which children are asked for, the process without which there is no use for this one, and what is
    imported once for all."""
    _die_with(owner)
    _libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who ends this one in his own way
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to every page that forks share
    Nursery(socket.socket(fileno=fd)).serve()


def _die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def alone(program: str, fd: int, parent: int) -> None:
    """In a process that was executed for one program: it imports for itself."""
    _die_with(parent)
    importlib.import_module(program).main(fd)


class Nursery:
    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._selector = selectors.DefaultSelector()
        self._forks = len(os.listdir("/proc/self/task")) == 1
        """Whether importing started no threads: a fork would copy a process in the middle of what they do."""

    def serve(self) -> NoReturn:
        self._selector.register(self._owner, selectors.EVENT_READ, 0)
        while True:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._owner:
                    self._on_request()
                else:
                    self._on_line(key.fileobj, key.data)

    def _on_request(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._owner, REQUEST_BYTES_MAX, FDS_MAX)
        if not data:
            os._exit(0)  # and what is left of its children dies with it
        line = socket.socket(fileno=fds[0])
        pid = 0
        if self._forks:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                become(json.loads(data), fds[1:], parent)
        for fd in fds[1:]:
            os.close(fd)
        if pid:
            self._selector.register(line, selectors.EVENT_READ, pid)
        with contextlib.suppress(ConnectionError):  # nobody waits any more: the end of the line is read next
            line.send(b"%d" % pid)
        if not pid:
            line.close()

    def _on_line(self, line: socket.socket, pid: int) -> None:
        """Its owner asks how the child has ended, or has let go of it."""
        try:
            asked = line.recv(len(REAP))
        except ConnectionError:
            asked = b""
        if not asked:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ConnectionError):
            line.send(b"%d" % os.waitstatus_to_exitcode(status))
        self._selector.unregister(line)
        line.close()


def become(request: dict[str, Any], fds: list[int], parent: int) -> NoReturn:
    """The child that was asked for."""
    code = 1
    try:
        _die_with(parent)
        os.setsid()
        os.umask(UMASK)
        _take_on(fds, [0, 1, 2, *request["keep"]])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _libc.prctl(PR_SET_NAME, request["name"].encode(), 0, 0, 0)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        importlib.import_module(request["program"]).main(request["keep"][0])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_on(fds: list[int], numbers: list[int]) -> None:
    """These descriptors under these numbers, and no other."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds]  # none is in the way of another one
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
    below = sorted(numbers)
    for last, number in zip(below, (*below[1:], DESCRIPTORS_MAX), strict=True):
        os.closerange(last + 1, number)
