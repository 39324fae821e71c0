"""Streams: pipes to and from programs, and the protocol with the shell of a session.

Owns the parent's ends of all these pipes. Promises that output written before the end of a program is read, that a
program can write when its output is not needed any more, that no method blocks, and that no descriptor outlives its
stream.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import termios
from collections.abc import Callable

from tangram.processes.capture import Capture

STDOUT, STDERR = 1, 2

Output = Callable[[int, bytes], None]
"""Called with output as it comes: STDOUT or STDERR, and the bytes."""


class GuardedOutput:
    """An output callback that is not called again after it has failed: the program and its result do not depend on
    it."""

    def __init__(self, output: Output | None) -> None:
        self._output = output

    def __call__(self, stream: int, data: bytes) -> None:
        if self._output is None:
            return
        try:
            self._output(stream, data)
        except Exception as error:
            self._output = None
            context = {"message": "the output callback of an action failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def mark_overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of the data may be the beginning of the mark."""
    for size in range(min(len(mark) - 1, len(data)), 0, -1):
        if mark.startswith(data[-size:]):
            return size
    return 0


READ_BYTES = 1 << 16
"""Bytes per read: the default capacity of a pipe."""
LISTEN_DELAY_S = 0.002
"""Delay before a stream is watched. A shorter program is read once, at its end."""


class Stream:
    """One pipe: captured and forwarded while its action lasts, drained afterwards until its last writer has closed
    it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._capture: Capture | None = None
        self._output = GuardedOutput(None)
        self._fd, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._listening = False
        self._listen_timer = self._loop.call_later(LISTEN_DELAY_S, self._listen)

    def _listen(self) -> None:
        self._listening = True
        self._loop.add_reader(self._fd, self._read)

    def close_writer(self) -> None:
        """Called once the program has inherited it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def begin(self, capture: Capture, output: Output | None) -> None:
        """Assign output to an action from now on."""
        self._capture, self._output = capture, GuardedOutput(output)

    def end(self) -> None:
        """Read the output so far; discard later output. Background processes may write without a pause, so exactly the
        bytes in the pipe at this moment are read, and one read more, which closes a stream without writers."""
        left = self._readable_bytes()
        while self.is_open and left >= 0 and (count := self._read()):
            left -= count
        self._capture = None

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def fileno(self) -> int:
        """The reading end, to pass it to another process."""
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            self._listen_timer.cancel()
            if self._listening:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self.close_writer()

    def _readable_bytes(self) -> int:
        if self._fd < 0:
            return 0
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]

    def _read(self) -> int:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
        elif self._capture is not None:
            self._capture.feed(data)
            self._output(self._number, data)
        return len(data)


def standard_input(content: bytes) -> int:
    """A descriptor from which a program reads `content`: a file in memory, because a pipe would have to be fed for as
    long as the program runs."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


# ---- the shell of a session -----------------------------------------------------------------------------------------

COMMANDS_FD, STATUSES_FD = 8, 9
"""Descriptors of the shell: where it reads commands, each ended by NUL, and where it writes their exit codes."""
SESSION_SHELL_SCRIPT = f"""\
exec {COMMANDS_FD}<&$1 {STATUSES_FD}>&$2
eval "exec $1<&- $2>&-"
set --
while :; do
    while printf '%d\\n' "$?" >&{STATUSES_FD}; IFS= read -r -d '' -u {COMMANDS_FD} __tangram || exit 0; do
        eval "$__tangram" {COMMANDS_FD}<&- {STATUSES_FD}>&-
    done
done
"""
"""Run by bash, with the descriptors of its ends as arguments. `eval` in the shell itself, so that its directory,
variables and functions stay. An exit code is written where the next command is read, so that a `break` or `continue` in
a command, which affects these loops, reaches it too. The first exit code is a greeting."""

COMMAND_VARIABLE = "__tangram"
"""The variable that holds the running command, only in such a shell."""

STATUS_BYTES_MAX = 4096
"""Bytes kept of an incomplete line of exit codes."""
EXIT_CODE_MASK = 0xFF


class ShellStreams:
    """Sends commands and receives exit codes. An exit code affects only the command of this shell: one that forges it
    deceives only its own caller."""

    def __init__(self, on_status: Callable[[int], None]) -> None:
        """`on_status` is called with the exit code of each command."""
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self.child_fds: tuple[int, ...] = ()
        """The ends that the shell inherits."""
        self._unsent = memoryview(b"")
        """The part of the command that does not fit into the pipe yet."""
        self._partial_line = b""
        self._is_ready = False
        commands, self._commands = _pipe()
        self._statuses, statuses = _pipe()
        self.child_fds = (commands, statuses)
        os.set_blocking(self._commands, False)
        os.set_blocking(self._statuses, False)
        self._loop.add_reader(self._statuses, self._read)

    def argv(self, bash: str) -> list[str]:
        return [bash, "-c", SESSION_SHELL_SCRIPT, "bash", *map(str, self.child_fds)]

    def close_child_fds(self) -> None:
        """Called once the shell has inherited them."""
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = ()

    def send(self, command: str) -> None:
        self._unsent = memoryview(command.encode() + b"\0")
        self._loop.add_writer(self._commands, self._write)

    def close(self) -> None:
        self._loop.remove_reader(self._statuses)
        self._loop.remove_writer(self._commands)
        os.close(self._statuses)
        os.close(self._commands)
        self.close_child_fds()

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._commands, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = memoryview(b"")  # it has ended, which the lease notices elsewhere
        if not self._unsent:
            self._loop.remove_writer(self._commands)

    def _read(self) -> None:
        try:
            data = os.read(self._statuses, STATUS_BYTES_MAX)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._statuses)
        *lines, self._partial_line = (self._partial_line + data)[-STATUS_BYTES_MAX:].split(b"\n")
        for line in lines:
            if not self._is_ready:
                self._is_ready = True
            elif not self._unsent and line.isdigit():
                self._on_status(int(line) & EXIT_CODE_MASK)


def _pipe() -> tuple[int, int]:
    """Numbers that do not collide with the descriptors of the shell."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        first = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, STATUSES_FD + 1)
        try:
            return first, fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, STATUSES_FD + 1)
        except OSError:
            os.close(first)
            raise
    finally:
        for end in ends:
            os.close(end)
