"""The child's side of a supervised child process: its connection to the supervisor (child.py).

Owns the child's end of the socket. Promises that the child exits when the socket closes, and ignores Ctrl-C, which the
supervisor handles. The fork server makes sure that the child dies with its supervisor even while it does not read.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Generic, NoReturn, TypeVar

import msgspec

from tangram.processes.framing import FrameDecoder, encode_frame

RECEIVE_BYTES = 1 << 16

_Command = TypeVar("_Command")


class SupervisorConnection(Generic[_Command]):
    """The socket to the supervisor. Its end ends this process."""

    def __init__(self, fd: int, decoder: FrameDecoder[_Command]) -> None:
        """`fd`: the descriptor of the socket."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the supervisor ends its children in order
        self._connection = socket.socket(fileno=fd)
        self._decoder = decoder
        self._send_lock = threading.Lock()

    def receive(self, *, wait: bool) -> list[_Command]:
        """Return all complete messages. With `wait`, block until some bytes have arrived."""
        commands: list[_Command] = []
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            while True:
                content = self._connection.recv(RECEIVE_BYTES, flags)
                if not content:
                    self.exit_process()
                commands += self._decoder.feed(content)
                if len(content) < RECEIVE_BYTES:
                    return commands
                flags = socket.MSG_DONTWAIT
        except BlockingIOError:
            return commands
        except ConnectionError:
            self.exit_process()

    def receive_first(self) -> list[_Command]:
        """Block until there is at least one message."""
        commands: list[_Command] = []
        while not commands:
            commands = self.receive(wait=True)
        return commands

    def send(self, *messages: msgspec.Struct) -> None:
        """Thread-safe. Blocks while the supervisor does not read."""
        content = b"".join(encode_frame(message, self._decoder.bytes_max) for message in messages)
        try:
            with self._send_lock:
                self._connection.sendall(content)
        except ConnectionError:
            self.exit_process()

    def exit_process(self) -> NoReturn:
        """Exit immediately, even while other threads run."""
        os._exit(0)
