"""Messages with descriptors over packet sockets, and replies to numbered requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from tangram.processes.packet_connection import PacketConnection, PacketTooLong
from tangram.processes.packets import (
    FDS_MAX,
    PACKET_BYTES_MAX,
    PacketTruncated,
    decode_packet,
    encode_packet,
    packet_socketpair,
    receive_packet,
    send_packet,
)
from tangram.processes.pending_replies import PendingReplies


def test_a_message_arrives_whole_with_its_descriptors() -> None:
    ours, theirs = packet_socketpair()
    with ours, theirs:
        send_packet(ours, encode_packet({"do": "one"}), [0, 1])
        send_packet(ours, encode_packet({"do": "two"}))
        data, fds = receive_packet(theirs, FDS_MAX)
        assert (decode_packet(data), len(fds)) == ({"do": "one"}, 2)
        for fd in fds:
            os.close(fd)
        assert decode_packet(receive_packet(theirs)[0]) == {"do": "two"}
        ours.close()
        assert receive_packet(theirs) == (b"", [])


def test_a_message_that_is_too_long_is_an_error() -> None:
    ours, theirs = packet_socketpair()
    with ours, theirs:
        ours.setsockopt(1, 32, 4 * PACKET_BYTES_MAX)
        send_packet(ours, bytes(PACKET_BYTES_MAX + 1))
        with pytest.raises(PacketTruncated):
            receive_packet(theirs)


def test_every_waiter_gets_its_reply_or_the_error_of_the_end() -> None:
    async def story() -> None:
        replies = PendingReplies[str]()
        first, second, third = (replies.expect(number) for number in (1, 2, 3))
        replies.resolve(2, "two")
        replies.resolve(7, "of no request")
        third.cancel()
        replies.fail_all(lambda: RuntimeError("it ended"))
        assert second.result() == "two"
        with pytest.raises(RuntimeError, match="it ended"):
            await first
        assert not replies

    asyncio.run(story())


def test_a_sender_waits_while_the_socket_is_full() -> None:
    async def main() -> None:
        ours, theirs = packet_socketpair()
        connection = PacketConnection(ours)
        with theirs, contextlib.closing(connection):
            sent = 0
            while connection.send_nowait(encode_packet({"number": sent})):
                sent += 1
            waiting = asyncio.ensure_future(connection.send(encode_packet({"number": sent})))
            await asyncio.sleep(0)
            assert not waiting.done()
            numbers = [decode_packet(receive_packet(theirs)[0])["number"] for _ in range(sent)]
            await waiting
            numbers.append(decode_packet(receive_packet(theirs)[0])["number"])
            assert numbers == list(range(sent + 1))

    asyncio.run(main())


def test_what_can_never_be_sent_is_refused() -> None:
    async def main() -> None:
        ours, theirs = packet_socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = PacketConnection(ours)
        with theirs, contextlib.closing(connection):
            for size in (PACKET_BYTES_MAX + 1, PACKET_BYTES_MAX):
                with pytest.raises(PacketTooLong):
                    await connection.send(b"x" * size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            await connection.send(b"{}")
        assert not connection.send_nowait(b"{}")

    asyncio.run(main())


def test_a_watched_connection_reports_its_messages_and_then_its_end() -> None:
    async def main() -> list[bytes]:
        ours, theirs = packet_socketpair()
        connection = PacketConnection(ours)
        messages: list[bytes] = []
        ended = asyncio.Event()
        with contextlib.closing(connection):
            connection.watch(messages.append, ended.set)
            with theirs:
                send_packet(theirs, b"one")
                send_packet(theirs, b"two")
            await ended.wait()
        return messages

    assert asyncio.run(main()) == [b"one", b"two"]


def test_nothing_comes_from_a_connection_that_was_closed_meanwhile() -> None:
    async def main() -> list[bytes]:
        ours, theirs = packet_socketpair()
        connection = PacketConnection(ours)
        messages: list[bytes] = []

        closed = asyncio.Event()

        def on_message(data: bytes) -> None:
            messages.append(data)
            connection.close()
            closed.set()

        with theirs:
            connection.watch(on_message, lambda: messages.append(b""))
            send_packet(theirs, b"one")
            send_packet(theirs, b"two")
            await closed.wait()
        return messages

    assert asyncio.run(main()) == [b"one"]
