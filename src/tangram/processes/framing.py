"""Frames: how messages cross the socket between a child process and its owner.

Owns the form of a frame: its length in four bytes, and a message in msgpack; nothing in it can be executed. Promises
that a frame is never longer than FRAME_BYTES_MAX: whoever reads a greater length is no longer in step, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from tangram.errors import ManagerError

HEADER_BYTES = 4
FRAME_BYTES_MAX = 1 << 28
"""Ids that sampling left (`keep_ids`) may be a whole vocabulary for each token; everything else is far smaller."""

_encoder = msgspec.msgpack.Encoder()
_Message = TypeVar("_Message")


class FrameTooLong(ManagerError):
    def __init__(self, size: int) -> None:
        super().__init__(f"expected a message of at most {FRAME_BYTES_MAX} bytes, got one of {size}", retry=False)


def framed(message: msgspec.Struct) -> bytes:
    """Raises FrameTooLong."""
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > FRAME_BYTES_MAX:
        raise FrameTooLong(size)
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "little")
    return bytes(frame)


class Frames(Generic[_Message]):
    """Bytes as they come, cut into messages."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def feed(self, content: bytes) -> Iterator[_Message]:
        """Raises FrameTooLong, and msgspec.DecodeError for what is no message: the two ends are out of step."""
        buffer = self._buffer
        buffer += content
        while len(buffer) >= HEADER_BYTES:
            size = int.from_bytes(buffer[:HEADER_BYTES], "little")
            if size > FRAME_BYTES_MAX:
                raise FrameTooLong(size)
            if len(buffer) < HEADER_BYTES + size:
                return
            frame = bytes(memoryview(buffer)[HEADER_BYTES : HEADER_BYTES + size])
            del buffer[: HEADER_BYTES + size]
            yield self._decoder.decode(frame)
