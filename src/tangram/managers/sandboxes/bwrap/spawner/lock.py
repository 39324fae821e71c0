"""Keeping: how the spawner of an owner with a name is found, spoken to and ended by the next process of that name.

Owns two files in the directory `kept` of the owner: `spawner.lock`, which a spawner holds from before it is started
until it has ended, and which says who it is; and the socket on which it waits while it has no owner. Only root can
enter the directory, and no sandbox sees it. Promises that there is never more than one spawner of an owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.spawner.spawner import SOCKET

LOCK = "spawner.lock"
LOOK_S = 0.005
"""How often a lock or a socket is tried."""
END_S_MAX = 15.0
"""Until a spawner that was killed has ended: the kernel ends its children first."""


class Apart:
    """A process that is not our child."""

    returncode = None
    """Nobody is told."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise ManagerError(f"the spawner {pid} has ended: {error.strerror}") from error

    def wait(self, timeout: float | None = None) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("spawner", timeout or 0.0)
        with contextlib.suppress(ChildProcessError):  # an owner that is process 1 is the parent of who has no other
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._fd)


class Keeping:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = directory / LOCK

    def lock(self) -> int:
        """A descriptor that holds the lock, for a spawner that is about to be started."""
        fd = self._taken()
        if fd is None:
            raise ManagerError(f"the spawner {self._pid()} in {self.directory} has not ended")
        os.ftruncate(fd, 0)
        return fd

    def _taken(self) -> int | None:
        """None: a spawner holds it."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def _is_free(self) -> bool:
        fd = self._taken()
        if fd is not None:
            os.close(fd)
        return fd is not None

    def _pid(self) -> int:
        """0: it has not said so yet."""
        said = self._lock.read_bytes()
        return int(said) if said.isdigit() else 0

    async def connect(self) -> tuple[socket.socket, Apart]:
        """To the spawner that waits for an owner. Who holds the lock is about to listen or to end."""
        there = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            while not self._is_free():
                try:
                    # The path of a socket may have 107 bytes, and that of a directory many more.
                    connection.connect(f"/proc/self/fd/{there}/{SOCKET}")
                    return connection, Apart(self._pid())
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    await asyncio.sleep(LOOK_S)
            raise ManagerError("the spawner that held it has ended")
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(there)

    async def end(self) -> None:
        """Kill the spawner, if there is one, and wait for its end: its sandboxes die with it."""
        deadline = time.monotonic() + END_S_MAX
        while not self._is_free():
            pid = self._pid()
            if pid:
                with contextlib.suppress(ManagerError):
                    spawner = Apart(pid)
                    try:
                        if not self._is_free():  # who holds it now held it before: it is who we mean
                            spawner.kill()
                    finally:
                        spawner.close()
            if time.monotonic() > deadline:
                raise ManagerError(f"the spawner {pid} in {self.directory} does not end", retry=False)
            await asyncio.sleep(LOOK_S)
