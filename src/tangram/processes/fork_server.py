"""The fork server: a process that has imported what children need, and forks them on request.

Importing PyTorch takes two seconds of CPU time and 200 MiB of memory; a fork of a process that has imported it is ready
immediately and shares the memory. Owns that process. Promises that a child is an ordinary process, with its own process
id until `collect_exit`, and its own streams, environment and exit code; that nothing is left of the server after
`aclose`; and that `spawn` always returns a child: if importing failed or started threads, so that the server cannot
fork, the child is executed and imports for itself, which reports the error. No method blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from tangram.core.action import NO_USAGE, Usage
from tangram.processes.exit_codes import shell_exit_code
from tangram.processes.fork_server_program import REAP
from tangram.processes.packet_connection import PacketConnection, PacketTooLong
from tangram.processes.packets import PACKET_BYTES_MAX, Message, decode_packet, encode_packet, packet_socketpair
from tangram.processes.process_tree import SpawnedChild, WatchedProcess

SPAWN_S_MAX = 300.0
"""The time limit for forking a child. The import may still be in progress, possibly from a cold disk."""
REAP_S_MAX = 20.0
"""The time limit for the exit code of a child. It usually takes milliseconds. A supervising server first kills the
processes that each child has left, which takes up to `fork_server_program.KILL_S_MAX` for each child."""

CLOSE_S_MAX = 5.0
"""The time limit for a supervising server to kill its descendants."""
END_S_MAX = 5.0
"""The time limit for a killed server to end. One in an uninterruptible system call is abandoned: SIGKILL is pending."""

SINGLE_THREADED_ENV = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's linear algebra otherwise starts threads when it is imported, and a process with threads cannot be forked.
PyTorch starts its threads on first use, as many as a child requests."""


log = logging.getLogger("tangram.processes")


class ForkServer:
    """Belongs to no event loop: several may use it, one after the other. The kernel ends the server with the *thread*
    that started it (see `libc.die_with_parent`), so each of these loops may have to start another one."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None, supervise: bool = False) -> None:
        """`modules`: imported by `start_importing` or with the first child: modules that have `main(fd)`, and others
        that children need. Without any, children are always executed. `env`: added to the environment of this
        process while the modules are imported. `supervise`: what a child leaves running is killed when it ends, and
        everything below the server when that ends, or this process dies."""
        self._modules = modules
        self._supervise = supervise
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: PacketConnection | None = None
        self._can_fork = bool(modules)
        self._has_forked = False
        self._warned = False

    @property
    def pid(self) -> int:
        """0 if there is no process."""
        return self._process.pid if self._process is not None else 0

    def start_importing(self) -> None:
        """Starts the server, which imports the modules, so that the first child waits less. Raises OSError."""
        if not self._can_fork or (self._process is not None and self._process.poll() is None):
            return
        self._detach()  # the previous server has ended
        owner_end, server_end = packet_socketpair()
        arguments = f"{server_end.fileno()}, {os.getpid()}, {list(self._modules)!r}, {self._supervise}"
        try:
            with server_end:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-c",
                        f"from {__package__}.fork_server_program import main; main({arguments})",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_with_import_path(os.environ) | SINGLE_THREADED_ENV | dict(self._env),
                    start_new_session=True,
                    pass_fds=(server_end.fileno(),),
                )
        except BaseException:
            owner_end.close()
            raise
        self._connection = PacketConnection(owner_end)

    @property
    def can_fork(self) -> bool:
        """False once it is known that children have to be executed."""
        return self._can_fork

    async def spawn(
        self, program: str, pass_fds: Sequence[int], *, name: str, env: Mapping[str, str], streams: tuple[int, int, int]
    ) -> WatchedProcess:
        """Start a process that runs `main(fd)` of a module, and dies with its parent. `pass_fds`: its
        descriptors in addition to its streams, under the same numbers; the first is its `fd`. `name`: as `top` shows
        it. Raises OSError."""
        request = {
            "program": program,
            "pass_fds": pass_fds,
            "name": name,
            "env": dict(env),
            "cwd": os.getcwd(),
            "path": _import_path(),
        }
        if self._can_fork and (child := await self._fork(request, (*streams, *pass_fds))) is not None:
            return child
        arguments = f"{program!r}, {pass_fds[0]}, {os.getpid()}"
        argv = [
            sys.executable,
            "-P",
            "-c",
            f"from {__package__}.fork_server_program import run_standalone; run_standalone({arguments})",
        ]
        return SpawnedChild(argv, env=_with_import_path(env), cwd=os.getcwd(), streams=streams, keep=pass_fds)

    async def _fork(self, request: Message, fds: Sequence[int]) -> ForkedChild | None:
        """None if it cannot be forked."""
        packet = encode_packet(request)
        if len(packet) > PACKET_BYTES_MAX:
            self._warn_of_length(len(packet))
            return None
        self.start_importing()
        assert self._connection is not None
        owner_end, server_end = packet_socketpair()
        connection = PacketConnection(owner_end)
        try:
            async with asyncio.timeout(SPAWN_S_MAX):
                with server_end, contextlib.suppress(OSError):  # the server has ended: the next read reports it
                    await self._connection.send(packet, [server_end.fileno(), *fds])
                reply = await connection.receive()
            if pid := decode_packet(reply)["pid"] if reply else 0:
                self._has_forked = True
                return ForkedChild(pid, connection)
        except PacketTooLong:  # the send buffer of the socket is smaller than a packet
            connection.close()
            self._warn_of_length(len(packet))
            return None
        except BaseException:
            connection.close()  # the server kills its child
            raise
        connection.close()
        if reply or not self._has_forked:
            self._can_fork = False  # it never can
            await self.aclose()
        return None

    def _warn_of_length(self, length: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "a child is executed instead of forked, and imports for itself: its environment and import path take"
                " %d bytes, more than a request to the fork server may have",
                length,
            )

    async def aclose(self) -> None:
        """Stop the server; the kernel kills its remaining children (PR_SET_PDEATHSIG). The server is killed immediately
        if this is cancelled."""
        process, end_s = self._detach()
        if process is None or process.poll() is not None:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        fd = os.pidfd_open(process.pid)  # it is not reaped, so this is not another process
        try:
            loop.add_reader(fd, ended.set)
            await _wait(ended, end_s)
            process.kill()
            await _wait(ended, END_S_MAX)
        finally:
            loop.remove_reader(fd)
            os.close(fd)
            process.kill()
            if process.poll() is None:  # it was killed a moment ago, because this is cancelled, or it cannot end
                threading.Thread(target=process.wait, name="tangram-reap", daemon=True).start()

    def _detach(self) -> tuple[subprocess.Popen[bytes] | None, float]:
        """The process of the server, which is not used any more, and how long it may take to end by itself."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        return process, CLOSE_S_MAX if self._supervise and self._has_forked else 0.0


class ForkedChild(WatchedProcess):
    def __init__(self, pid: int, connection: PacketConnection) -> None:
        """`connection`: to the server, about this child; closing it kills the child."""
        super().__init__(pid)
        self._connection = connection

    unkilled: tuple[int, ...] = ()
    """Set by `collect_exit`: processes below a supervised child that could not be killed."""

    async def collect_exit(self) -> tuple[int | None, Usage]:
        self._close()
        reply = b""
        with contextlib.closing(self._connection), contextlib.suppress(OSError):
            # The server has ended, or it is late (TimeoutError).
            async with asyncio.timeout(REAP_S_MAX):
                await self._connection.send(REAP)
                reply = await self._connection.receive()
        if not reply:
            return None, NO_USAGE
        exit_report = decode_packet(reply)
        self.unkilled = tuple(exit_report.get("unkilled", ()))
        self.exit_signal = max(0, -exit_report["code"])
        usage = Usage(cpu_s=exit_report["cpu_s"], memory_peak_bytes=exit_report["peak_bytes"])
        return shell_exit_code(exit_report["code"]), usage


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _import_path() -> list[str]:
    """The module search path of this process, and its working directory."""
    return [*(folder or os.getcwd() for folder in sys.path), os.getcwd()]


def _with_import_path(env: Mapping[str, str]) -> dict[str, str]:
    return dict(env) | {"PYTHONPATH": os.pathsep.join(_import_path())}
