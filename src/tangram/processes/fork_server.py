"""The fork server: a process that has imported what children need, and forks them on request.

Importing PyTorch takes two seconds of CPU time and 200 MiB of memory; a fork of a process that has imported it is ready
at once and shares them. Owns that process. Promises that a child is a process like any other, with its own number until
`reap`, its own streams, environment and end; that nothing is left of the nursery after `close`; and that whoever asks
for a child gets one: where none can be forked, because importing started threads or failed, it is executed anew, and
says itself what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tangram.core.action import NO_USAGE, Usage
from tangram.processes.fork_server_program import REAP
from tangram.processes.process_tree import Child, Watched, as_shells_say

ANSWER_BYTES_MAX = 1 << 10
BEAR_S_MAX = 300.0
"""Until a child has been forked. Modules may still be being imported, from a cold disk perhaps."""
REAP_S_MAX = 5.0
"""To be told how a child has ended. The nursery is about to fork, or waits: milliseconds."""

SINGLE = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's linear algebra otherwise starts threads when it is imported, and what has threads cannot be forked. PyTorch
starts its own when they are first used, as many as a child says."""


class Nursery:
    """It belongs to no event loop: several may ask, one after the other."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        """What is imported, when the first child is asked for or by `warm`: modules that have `main(fd)`, and others
        that children need. Without any, children are always executed anew. `env`: what libraries find in the
        environment when they are imported, besides what is in that of this process."""
        self._modules = modules
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._forks = bool(modules)
        self._has_borne = False

    @property
    def pid(self) -> int:
        """0: there is no process now."""
        return self._process.pid if self._process is not None else 0

    def warm(self) -> None:
        """Begin to import, so that the first child need not wait for all of it. Raises OSError."""
        if not self._forks or (self._process is not None and self._process.poll() is None):
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        words = f"{theirs.fileno()}, {os.getpid()}, {list(self._modules)!r}"
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", f"from {__package__}.fork_server_program import main; main({words})"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_with_path(os.environ) | dict(self._env) | SINGLE,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            ours.close()
            raise
        self._socket = ours

    async def bear(
        self, program: str, keep: Sequence[int], *, name: str, env: Mapping[str, str], streams: tuple[int, int, int]
    ) -> Watched:
        """A process that runs `main(fd)` of a module, and dies with its parent. `keep`: descriptors that it has besides
        its streams, under the same numbers; the first is its `fd`. `name`: as `top` shows it. Raises OSError."""
        request = {
            "program": program,
            "keep": keep,
            "name": name,
            "env": dict(env),
            "cwd": os.getcwd(),
            "path": _path(),
        }
        if self._forks and (born := await self._fork(request, (*streams, *keep))) is not None:
            return born
        words = f"{program!r}, {keep[0]}, {os.getpid()}"
        argv = [sys.executable, "-P", "-c", f"from {__package__}.fork_server_program import alone; alone({words})"]
        return Child(argv, env=_with_path(env), cwd=os.getcwd(), streams=streams, keep=keep)

    async def _fork(self, request: Mapping[str, object], fds: Sequence[int]) -> Born | None:
        """None: it cannot be forked."""
        self.warm()
        assert self._socket is not None
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.setblocking(False)
            # What cannot be sent leaves the line without another end, which is read next.
            with theirs, contextlib.suppress(OSError):
                socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs.fileno(), *fds])
            async with asyncio.timeout(BEAR_S_MAX):
                answer = await asyncio.get_running_loop().sock_recv(line, ANSWER_BYTES_MAX)
            if pid := json.loads(answer or b"0"):
                self._has_borne = True
                return Born(pid, line)
        except BaseException:
            line.close()  # whom it bears is killed
            raise
        line.close()
        if answer or not self._has_borne:
            self._forks = False  # not now, and not later
            self.close()
        return None

    def close(self) -> None:
        """Whoever is left of its children dies with it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Born(Watched):
    """A child of a nursery."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        """`line`: whose end is the end of the child."""
        super().__init__(pid)
        self._line = line

    def signal(self, number: int) -> None:
        """Through its descriptor: if the nursery is killed, the child's number is not kept for it."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def reap(self) -> tuple[int | None, Usage]:
        self._close()
        with self._line:
            self._line.settimeout(REAP_S_MAX)
            try:
                self._line.send(REAP)
                answer = self._line.recv(ANSWER_BYTES_MAX)
            except OSError:
                answer = b""
        return (as_shells_say(json.loads(answer)) if answer else None), NO_USAGE


def _path() -> list[str]:
    """Where a child finds what this process can import, and what lies where it was started."""
    return [*(folder or os.getcwd() for folder in sys.path), os.getcwd()]


def _with_path(env: Mapping[str, str]) -> dict[str, str]:
    return dict(env) | {"PYTHONPATH": os.pathsep.join(_path())}
