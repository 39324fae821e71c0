"""A sandbox and its runners, as the spawner keeps them: process ids, pidfds, sessions, commands and replies.

Standard library only, like the spawner. Makes no decisions. Treats the reply of a runner as hostile: it ran inside a
sandbox.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import OrderedDict

from tangram.processes.packets import Message, decode_packet, send_packet

REPLY_BYTES_MAX = 1 << 17
"""Size limit of the reply of a runner, such as a listing."""
RUNNER_GONE_ERRORS = (ProcessLookupError, BrokenPipeError, ConnectionResetError)
"""Errors that mean that a runner has ended before it could get its command."""


class Runner:
    """A process inside a sandbox that waits for its command."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self.sandbox: SpawnedSandbox | None = None
        """The sandbox in which it executes a command."""
        self.number = 0
        """The number of the request that it executes; 0 for a spare."""
        self.executes = False
        """Whether its command is to execute a program."""
        self.commanded_s = 0.0
        """When it got its command."""
        self.reply: bytes | None = None
        """Output of the runner on the channel, once that has ended."""
        self.code: int | None = None


class SpawnedSandbox:
    """One sandbox: its first process, whose namespaces the others join, and the process that holds it."""

    def __init__(self, name: str, holder: int, init: int, request: Message) -> None:
        self.name = name
        self.init = init
        self.has_user_namespace = _namespace(init, "user") != _namespace(os.getpid(), "user")
        self.init_fd = os.pidfd_open(init)
        try:
            self.holder_fd = os.pidfd_open(holder)
        except OSError:
            os.close(self.init_fd)
            raise
        self.uid: int = request["uid"]
        self.rlimits: dict[str, int] = request["rlimits"]
        self.spare: Runner | None = None
        self.closing = False
        """It is being ended. Then nothing in it may be frozen, because a frozen process cannot die."""
        self.sessions: dict[str, list[int]] = {}
        """Sessions, by the caller's name, whose shell was started and whose end the owner has not confirmed: so the end
        of a shell that coincides with that of its owner is reported by the next one. With each, the other ends of the
        shell's streams: what it leaves running can write there after the owner has ended."""
        self.drained: OrderedDict[int, None] = OrderedDict()
        self._join_fds: dict[str, int] = {}

    def kill(self) -> None:
        """The kernel kills everything in a process namespace whose first process ends."""
        self.closing = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)

    def join(self, pid: int, groups: list[str]) -> None:
        """Move a process into control groups, through files that stay open because a sandbox uses the same few
        again."""
        for path in groups:
            fd = self._join_fds.get(path)
            if fd is None:
                fd = self._join_fds[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, b"%d" % pid)

    def close_join_files(self) -> None:
        for fd in self._join_fds.values():
            os.close(fd)
        self._join_fds = {}

    def end_session(self, name: str) -> None:
        for fd in self.sessions.pop(name, ()):
            os.close(fd)

    def close(self) -> None:
        self.close_join_files()
        for name in list(self.sessions):
            self.end_session(name)
        os.close(self.init_fd)
        os.close(self.holder_fd)


def _namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def send_command(runner: Runner, sandbox: SpawnedSandbox, groups: list[str], command: bytes, fds: list[int]) -> None:
    sandbox.join(runner.pid, groups)
    send_packet(runner.channel, command, fds)


def discard_runner(runner: Runner) -> None:
    """Kill a runner that has no command. Its exit is watched, so its process id is not reused before."""
    runner.channel.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(runner.pid, signal.SIGKILL)


def read_reply(channel: socket.socket) -> bytes:
    channel.setblocking(False)
    try:
        return channel.recv(REPLY_BYTES_MAX)
    except OSError:
        return b""


def parse_reply(text: bytes) -> Message:
    """The reply of a runner. It ran inside a sandbox, so only the expected fields are taken from it."""
    if not text:
        return {"error": "it was killed"}
    try:
        reply = decode_packet(text)
        if "ok" in reply:
            return {"ok": reply["ok"]}
        number = {"errno": int(reply["errno"])} if "errno" in reply else {}
        return {"error": str(reply["error"]), **number}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {"error": "its reply is malformed"}
