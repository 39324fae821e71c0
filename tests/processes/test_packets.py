"""Messages with descriptors over packet sockets, and replies to numbered requests."""

from __future__ import annotations

import asyncio
import os

import pytest

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
