"""Streams: what programs write, read as it comes.

Owns the reading ends of their pipes. Promises that all that a program wrote before it ended is read, that a program
which nobody reads any more can still write, and that no descriptor outlives its reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from tangram.managers.base import Output
from tangram.managers.capture import Capture
from tangram.managers.cpu.images import SANDBOX_UID

READ_BYTES = 1 << 16
"""At a time: what a pipe holds."""
LAST_BYTES_MAX = 1 << 20
"""Read after the end of a program: no pipe of ours holds more. What others still write there is not its output."""


class Stream:
    """One pipe: captured and handed on while its action lasts, discarded afterwards until its last writer has gone."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._fd, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        os.fchown(self.writer, SANDBOX_UID, SANDBOX_UID)  # a program may open it again, as /dev/stdout
        self._capture: Capture | None = None
        self._output: Output | None = None
        self._loop.add_reader(self._fd, self._on_readable)

    def close_writer(self) -> None:
        """The program has it now."""
        os.close(self.writer)
        self.writer = -1

    def begin(self, capture: Capture, output: Output | None) -> None:
        self._capture, self._output = capture, output

    def end(self) -> None:
        """Take what is there; from now on discard."""
        left = LAST_BYTES_MAX
        while left > 0 and self._fd >= 0 and (count := self._read()):
            left -= count
        self._capture = self._output = None

    @property
    def open(self) -> bool:
        return self._fd >= 0

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self.writer >= 0:
            self.close_writer()

    def _on_readable(self) -> None:
        self._read()

    def _read(self) -> int:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
        elif self._capture is not None:
            self._capture.feed(data)
            if self._output is not None:
                self._output(self._number, data)
        return len(data)


def standard_input(content: bytes) -> int:
    """A descriptor from which a program reads `content`. It is the program's own: it may seek in it."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
        stack.pop_all()
    return fd
