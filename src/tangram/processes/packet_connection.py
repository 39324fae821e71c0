"""A packet connection: the socket to a process that starts other processes, in the event loop of its owner.

Owns the socket. Promises that nothing blocks the event loop, and that a message arrives whole or raises in its sender.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

from tangram.processes.packets import PACKET_BYTES_MAX, receive_packet, send_packet

SEND_RETRY_S = 0.001
"""Pause between attempts to send while the socket is full."""


class PacketTooLong(Exception):
    """The message is longer than PACKET_BYTES_MAX, or than the send buffer of the socket."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a message of {size} bytes; at most {PACKET_BYTES_MAX} can be sent")
        self.size = size


class PacketConnection:
    """Belongs to no event loop until `watch`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that watches it."""

    async def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message; wait while the socket is full. Raises PacketTooLong, and OSError at the end of the
        connection."""
        if len(data) > PACKET_BYTES_MAX:
            raise PacketTooLong(len(data))
        while True:
            try:
                return send_packet(self._socket, data, fds)
            except BlockingIOError:
                await asyncio.sleep(SEND_RETRY_S)
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    raise PacketTooLong(len(data)) from error
                raise

    def send_nowait(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Whether the message was sent: not if the socket is full, or at the end of the connection."""
        try:
            send_packet(self._socket, data, fds)
        except OSError:
            return False
        return True

    async def receive(self) -> bytes:
        """The next message; empty at the end of the connection. Raises OSError."""
        return await asyncio.get_running_loop().sock_recv(self._socket, PACKET_BYTES_MAX)

    def watch(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Call `on_message` with each message from now on, and `on_end` once at the end of the connection."""

        def on_readable() -> None:
            while self._loop is not None:  # until the connection is closed
                try:
                    data, _ = receive_packet(self._socket)
                except BlockingIOError:
                    return
                except OSError:
                    data = b""
                if not data:
                    self.unwatch()
                    on_end()
                    return
                on_message(data)

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, on_readable)

    def unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop = None

    async def finish(self) -> None:
        """Send nothing more, and wait until the other end has closed the connection. Discards what it still sends.
        Raises OSError."""
        self.unwatch()
        self._socket.shutdown(socket.SHUT_WR)
        while await self.receive():
            pass

    def close(self) -> None:
        self.unwatch()
        self._socket.close()
