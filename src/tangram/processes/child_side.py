"""The owner of a child process, as the child sees him.

Owns the child's end of the socket. Promises that the child ends when the socket closes, and that Ctrl-C, which reaches
both, is left to the owner. That it dies with its owner even while it cannot look at the socket, the nursery sees to.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Generic, NoReturn, TypeVar

import msgspec

from tangram.processes.framing import Frames, framed

RECEIVE_BYTES = 1 << 16

_Command = TypeVar("_Command")


class Owner(Generic[_Command]):
    """The other end of the socket. Its end is the end of this process."""

    def __init__(self, fd: int, frames: Frames[_Command]) -> None:
        """The descriptor of the socket."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who ends this one in his own way
        self._connection = socket.socket(fileno=fd)
        self._frames = frames
        self._speaking = threading.Lock()

    def commands(self, *, wait: bool) -> list[_Command]:
        """All that are there; with `wait`, at least a part of one has come."""
        found: list[_Command] = []
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            while True:
                content = self._connection.recv(RECEIVE_BYTES, flags)
                if not content:
                    self.leave()
                found += self._frames.feed(content)
                if len(content) < RECEIVE_BYTES:
                    return found
                flags = socket.MSG_DONTWAIT
        except BlockingIOError:
            return found
        except ConnectionError:
            self.leave()

    def first(self) -> list[_Command]:
        """Waits for whole commands."""
        found: list[_Command] = []
        while not found:
            found = self.commands(wait=True)
        return found

    def tell(self, *answers: msgspec.Struct) -> None:
        """From any thread. Waits while the owner does not read: nobody else would want what is written meanwhile."""
        content = b"".join(framed(answer) for answer in answers)
        try:
            with self._speaking:
                self._connection.sendall(content)
        except ConnectionError:
            self.leave()

    def leave(self) -> NoReturn:
        """This process ends at once, whatever its other threads are in the middle of."""
        os._exit(0)
