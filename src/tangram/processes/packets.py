"""Packets: JSON messages with file descriptors over Unix sockets of type SOCK_SEQPACKET.

The protocol of processes that start other processes (the fork server, the spawner of sandboxes): the kernel keeps the
boundaries of messages and passes descriptors along with them. Standard library only: isolated
programs import it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

PACKET_BYTES_MAX = 1 << 18
"""The largest message. A sender must refuse a longer one; a receiver raises PacketTruncated."""
FDS_MAX = 253
"""Descriptors in one message: the limit of the kernel (SCM_MAX_FD)."""
SO_SNDBUFFORCE = 32


class PacketTruncated(Exception):
    """A message was longer than PACKET_BYTES_MAX: the sender violated the protocol."""

    def __init__(self) -> None:
        super().__init__(f"received a message longer than {PACKET_BYTES_MAX} bytes; the sender must refuse it")


def packet_socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def packet_socket() -> socket.socket:
    """A socket that can listen or connect."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def reserve_send_buffer(connection: socket.socket, messages: int) -> None:
    """Let this many of the largest messages fit into the socket. Needs CAP_NET_ADMIN."""
    connection.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, messages * PACKET_BYTES_MAX)


def encode_packet(message: Message) -> bytes:
    """Text is sent as UTF-8, not as escapes, so that the limit counts the bytes of the text itself."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode_packet(data: bytes) -> Message:
    message: Message = json.loads(data)
    return message


def send_packet(connection: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one encoded message. Raises OSError; BlockingIOError if a non-blocking socket is full."""
    if fds:
        socket.send_fds(connection, [data], fds)
    else:
        connection.send(data)


def receive_packet(connection: socket.socket, fds_max: int = 0) -> tuple[bytes, list[int]]:
    """Receive one encoded message and its descriptors; no bytes at the end of the connection. Raises OSError,
    PacketTruncated."""
    data, fds, flags, _ = socket.recv_fds(connection, PACKET_BYTES_MAX, fds_max)
    if flags & socket.MSG_TRUNC:
        raise PacketTruncated
    return data, fds
