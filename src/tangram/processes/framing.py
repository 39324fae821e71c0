"""Framing: messages in msgpack over a stream socket, between a child process and its supervisor.

A frame is the length of a message in eight bytes, little-endian, and the message. Nothing in it can be executed. A
length above the limit of the connection means that the two ends are out of step: FrameTooLong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from tangram.errors import ManagerError

HEADER_BYTES = 8
DEFAULT_FRAME_BYTES_MAX = 1 << 28
"""The default limit. The token ids that sampling kept (`keep_ids`) may be a whole vocabulary for each token; every
other message is far smaller."""

_encoder = msgspec.msgpack.Encoder()
_Message = TypeVar("_Message")


class FrameTooLong(ManagerError):
    def __init__(self, size: int, bytes_max: int) -> None:
        super().__init__(f"expected a message of at most {bytes_max} bytes, got one of {size}", retry=False)


def encode_frame(message: msgspec.Struct, bytes_max: int = DEFAULT_FRAME_BYTES_MAX) -> bytes:
    """Raises FrameTooLong."""
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    size = len(frame) - HEADER_BYTES
    if size > bytes_max:
        raise FrameTooLong(size, bytes_max)
    frame[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "little")
    return bytes(frame)


class FrameDecoder(Generic[_Message]):
    """Cuts a stream of bytes into messages."""

    def __init__(self, types: Any, bytes_max: int = DEFAULT_FRAME_BYTES_MAX) -> None:
        """`types`: a union of tagged records."""
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()
        self.bytes_max = bytes_max

    def feed(self, content: bytes) -> Iterator[_Message]:
        """Raises FrameTooLong, and msgspec.DecodeError for bytes that are no message: the two ends are out of step."""
        buffer = self._buffer
        buffer += content
        while len(buffer) >= HEADER_BYTES:
            size = int.from_bytes(buffer[:HEADER_BYTES], "little")
            if size > self.bytes_max:
                raise FrameTooLong(size, self.bytes_max)
            end = HEADER_BYTES + size
            if len(buffer) < end:
                return
            with memoryview(buffer) as view, view[HEADER_BYTES:end] as frame:
                message = self._decoder.decode(frame)
            del buffer[:end]
            yield message
