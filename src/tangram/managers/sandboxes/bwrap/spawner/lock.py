"""The spawner lock: how the next process of a named owner finds, reaches and ends its spawner.

Owns two files in the directory `kept` of the owner: `spawner.lock`, which a spawner holds from before its start until
its end, and which contains its process id; and the socket on which it listens without an owner. Only root can enter the
directory, and no sandbox sees it. Promises that an owner never has more than one spawner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from tangram.core.action import NO_USAGE, Usage
from tangram.errors import ManagerError
from tangram.files.lock import is_locked, lock_file, read_holder
from tangram.managers.sandboxes.bwrap.spawner.protocol import SOCKET_NAME
from tangram.processes.packets import packet_socket
from tangram.processes.process_tree import WatchedProcess

LOCK_FILE = "spawner.lock"
POLL_S = 0.005
"""Pause between attempts to take a lock or to connect."""
END_S_MAX = 15.0
"""Time limit for the end of a killed spawner: the kernel ends its children first."""


class DetachedProcess(WatchedProcess):
    """A process that is not a child of this one."""

    def __init__(self, pid: int) -> None:
        try:
            super().__init__(pid)
        except OSError as error:
            raise ManagerError(f"the spawner {pid} has ended: {error.strerror}") from error

    def _on_exit(self) -> None:
        with contextlib.suppress(ChildProcessError):  # an owner that is process 1 is the parent of orphans
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
        super()._on_exit()

    async def collect_exit(self) -> tuple[int | None, Usage]:
        return self.reap()

    def reap(self) -> tuple[int | None, Usage]:
        """Stop watching. Only a parent gets the exit code."""
        self._close()
        return None, NO_USAGE


class SpawnerLock:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / LOCK_FILE

    def acquire(self) -> int:
        """A descriptor that holds the lock, for a spawner that is about to be started."""
        try:
            fd = lock_file(self._path)
        except BlockingIOError:
            raise ManagerError(f"the spawner {self._pid()} in {self.directory} has not ended") from None
        os.ftruncate(fd, 0)
        return fd

    def _pid(self) -> int:
        """0 if it has not been written yet."""
        holder = read_holder(self._path)
        return int(holder) if holder.isdecimal() else 0

    async def connect(self) -> tuple[socket.socket, DetachedProcess]:
        """Connect to the spawner that waits for an owner. The holder of the lock is about to listen or to end."""
        directory_fd = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        connection = packet_socket()
        try:
            connection.setblocking(False)
            while is_locked(self._path):
                try:
                    # The path of a socket is limited to 107 bytes, that of a directory is not.
                    connection.connect(f"/proc/self/fd/{directory_fd}/{SOCKET_NAME}")
                    return connection, DetachedProcess(self._pid())
                except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                    await asyncio.sleep(POLL_S)
            raise ManagerError("its spawner has ended")
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(directory_fd)

    async def kill_spawner(self) -> None:
        """Kill the spawner, if there is one, and wait for its end: its sandboxes die with it."""
        deadline = time.monotonic() + END_S_MAX
        while is_locked(self._path):
            pid = self._pid()
            if pid:
                with contextlib.suppress(ManagerError):
                    spawner = DetachedProcess(pid)
                    try:
                        if is_locked(self._path):  # still held, so the pidfd is that of the holder
                            spawner.signal(signal.SIGKILL)
                    finally:
                        spawner.reap()
            if time.monotonic() > deadline:
                raise ManagerError(f"the spawner {pid} in {self.directory} does not end", retry=False)
            await asyncio.sleep(POLL_S)
