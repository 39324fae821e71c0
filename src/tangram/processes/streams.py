"""Streams: what programs write, what they read, and the talk with a held shell.

Owns our ends of all these pipes. Promises that what a program wrote before it ended is read, that one which nobody
listens to any more can still write, that nothing here ever waits, and that no descriptor outlives its stream.
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
"""Called with what a program writes as it comes: STDOUT or STDERR, and the bytes."""

READ_BYTES = 1 << 16
"""At a time: what a pipe holds unless somebody enlarged it."""
LISTEN_S = 0.002
"""After which a stream is listened to. A program that is shorter is read once, at its end."""


class Stream:
    """One pipe: captured and handed on while its action lasts, discarded afterwards until its last writer has gone."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._capture: Capture | None = None
        self._output: Output | None = None
        self._fd, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._listening = False
        self._listen_later = self._loop.call_later(LISTEN_S, self._listen)

    def _listen(self) -> None:
        self._listening = True
        self._loop.add_reader(self._fd, self._read)

    def close_writer(self) -> None:
        """The program has it now."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def begin(self, capture: Capture, output: Output | None) -> None:
        """What comes from now on belongs to an action."""
        self._capture, self._output = capture, output

    def end(self) -> None:
        """Take what is there now; discard what comes later. Others may write there without a pause, so what was in the
        pipe at this moment is taken and one read more, which closes a stream that all writers have left."""
        left = self._waiting_bytes()
        while self.open and left >= 0 and (count := self._read()):
            left -= count
        self._capture = self._output = None

    @property
    def open(self) -> bool:
        return self._fd >= 0

    def close(self) -> None:
        if self._fd >= 0:
            self._listen_later.cancel()
            if self._listening:
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self.close_writer()

    def _waiting_bytes(self) -> int:
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
            self._hand_on(data)
        return len(data)

    def _hand_on(self, data: bytes) -> None:
        """A listener that fails is told no more: the program and its result have nothing to do with that."""
        if self._output is None:
            return
        try:
            self._output(self._number, data)
        except Exception as error:
            self._output = None
            context = {"message": "the output callback of an action failed", "exception": error}
            self._loop.call_exception_handler(context)


def standard_input(content: bytes) -> int:
    """A descriptor from which a program reads `content`: a file in memory, because a pipe would need somebody who feeds
    it for as long as the program likes."""
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


# ---- the talk with a held shell -----------------------------------------------------------------------------------

COMMANDS, STATUSES = 8, 9
"""Descriptors of a held shell: where commands come in, each ended by NUL, and where their exit codes go out."""
HELD_SHELL = f"""\
exec {COMMANDS}<&$1 {STATUSES}>&$2
eval "exec $1<&- $2>&-"
set --
while :; do
    while printf '%d\\n' "$?" >&{STATUSES}; IFS= read -r -d '' -u {COMMANDS} __tangram || exit 0; do
        eval "$__tangram" {COMMANDS}<&- {STATUSES}>&-
    done
done
"""
"""What bash runs, given the descriptors of its ends. `eval` in the shell itself, so that its directory, variables and
functions stay. An exit code is said where the next command is asked for: a command that says `break` or `continue`
means these loops, and gets there all the same. The first one is a greeting."""

HELD_BY = "__tangram"
"""The variable of such a shell, and of no other, that holds the command which it runs."""

STATUS_BYTES_MAX = 4096
"""Kept of what the shell says before a line has come to its end."""
EXIT_CODE_MASK = 0xFF


class ShellStreams:
    """Commands go in, exit codes come out. What a shell says is believed of its own commands only: one that forges an
    exit code deceives nobody but whoever reads its result."""

    def __init__(self, on_status: Callable[[int], None]) -> None:
        """`on_status` is told the exit code of each command that was sent."""
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self.given: tuple[int, ...] = ()
        """The ends that the shell inherits."""
        self._ahead = memoryview(b"")
        """What it has not read yet of its command."""
        self._heard = b""
        self._greeted = False
        commands, self._commands = _pipe()
        self._statuses, statuses = _pipe()
        self.given = (commands, statuses)
        os.set_blocking(self._commands, False)
        os.set_blocking(self._statuses, False)
        self._loop.add_reader(self._statuses, self._read)

    def argv(self, bash: str) -> list[str]:
        return [bash, "-c", HELD_SHELL, "bash", *map(str, self.given)]

    def close_given(self) -> None:
        """The shell has them now."""
        for fd in self.given:
            os.close(fd)
        self.given = ()

    def send(self, command: str) -> None:
        self._ahead = memoryview(command.encode() + b"\0")
        self._loop.add_writer(self._commands, self._write)

    def close(self) -> None:
        self._loop.remove_reader(self._statuses)
        self._loop.remove_writer(self._commands)
        os.close(self._statuses)
        os.close(self._commands)
        self.close_given()

    def _write(self) -> None:
        try:
            self._ahead = self._ahead[os.write(self._commands, self._ahead) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._ahead = memoryview(b"")  # it has gone, which its owner is told elsewhere
        if not self._ahead:
            self._loop.remove_writer(self._commands)

    def _read(self) -> None:
        try:
            said = os.read(self._statuses, STATUS_BYTES_MAX)
        except BlockingIOError:
            return
        if not said:
            self._loop.remove_reader(self._statuses)
        *lines, self._heard = (self._heard + said)[-STATUS_BYTES_MAX:].split(b"\n")
        for line in lines:
            if not self._greeted:
                self._greeted = True
            elif not self._ahead and line.isdigit():
                self._on_status(int(line) & EXIT_CODE_MASK)


def _pipe() -> tuple[int, int]:
    """Out of the way of the descriptors that a held shell knows."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        first = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, STATUSES + 1)
        try:
            return first, fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, STATUSES + 1)
        except OSError:
            os.close(first)
            raise
    finally:
        for end in ends:
            os.close(end)
