"""What a manager and the process of a device say to each other, over a socket pair.

Owns the messages and their frames. A frame is its length in eight bytes and a message. Both ends are this program, so
nothing here is hostile; engines speak only in bytes that neither end looks into.
"""

from __future__ import annotations

import msgspec

from tangram.managers.models.devices import DeviceSpec
from tangram.managers.models.host_copy import Layout

HEADER_BYTES = 8

Chunk = tuple[int, ...]
"""Devices by their index."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A service that was prepared."""

    service: str
    engine: bytes
    copy_fd: int
    layout: Layout


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    id: int
    """0 for what is not answered."""


class Hello(Request, frozen=True, kw_only=True, tag="Hello"):
    """The first one. The answer comes when the process is ready."""

    process: int
    """The index of the device that it is the process of."""
    devices: list[DeviceSpec]
    counts_fd: int
    services: list[Known]


class Prepare(Request, frozen=True, kw_only=True, tag="Prepare"):
    engine: bytes
    copy_fd: int
    degrees: tuple[int, ...]


class Load(Request, frozen=True, kw_only=True, tag="Load"):
    service: str
    devices: Chunk


class Unload(Request, frozen=True, kw_only=True, tag="Unload"):
    """May come while a call to another service runs."""

    service: str
    devices: Chunk


class Call(Request, frozen=True, kw_only=True, tag="Call"):
    service: str
    devices: Chunk
    payloads: list[bytes]


class Interrupt(Request, frozen=True, kw_only=True, tag="Interrupt"):
    """Let the call end, if it can be."""

    call: int


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    id: int


class Begun(Reply, frozen=True, kw_only=True, tag="Begun"):
    """Of a Call, ahead of its answer: from now on it may have done something."""


class Done(Reply, frozen=True, kw_only=True, tag="Done"):
    answers: list[bytes] = []
    layout: Layout | None = None
    needs: dict[int, int] = {}
    """Prepare: bytes on each device, by degree."""
    batch_max: int = 1
    elsewhere: bool = False
    """Prepare: the weights are not in the host copy, so what the service takes has to be said."""
    seconds: float = 0.0
    """That the engine took, without the way here."""


class Failed(Reply, frozen=True, kw_only=True, tag="Failed"):
    reason: str
    whose: str = "service"
    """`service`; `payload`: the caller's; `config`: what was said of the service; `full`: a device has no room;
    `stopped`: it was interrupted."""
    field: str = ""
    expected: str = ""
    """Of a payload or a config."""
    unclean: bool = False
    """Something is left on the devices that only the end of the process frees."""


AnyRequest = Hello | Prepare | Load | Unload | Call | Interrupt
AnyReply = Done | Failed
AnyWord = Begun | Done | Failed

_encoder = msgspec.msgpack.Encoder()
requests = msgspec.msgpack.Decoder(AnyRequest)
replies = msgspec.msgpack.Decoder(AnyWord)


def framed(message: AnyRequest | AnyWord) -> bytes:
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    frame[:HEADER_BYTES] = (len(frame) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return bytes(frame)
