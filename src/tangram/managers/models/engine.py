"""Engines: the interface to prepare a model, load it on devices, call it and unload it.

Owns the contract between a service and the processes that run it, and the form of weights. Engines run in the processes
of devices, where they may block, crash or hang; never in the process of the manager.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tangram.managers.models.devices import Block, Device

Loaded = Any
"""What `Engine.load` returns, passed back to the engine at each call."""

ALIGNMENT_BYTES = 256
"""Alignment of every piece, in host memory and on devices: the largest that device kernels need."""


class Piece(NamedTuple):
    """One tensor, as bytes."""

    name: str
    content: memoryview
    meta: bytes = b""
    """Metadata of the engine, such as type and shape."""

    @property
    def size(self) -> int:
        """Bytes with padding."""
        return aligned(self.content.nbytes)


class Weights:
    """The weights of a model. In the processes of devices the pieces are in the host copy, which is read-only."""

    def __init__(self, pieces: Iterable[Piece], extra: bytes = b"") -> None:
        self.pieces = tuple(pieces)
        self.extra = extra
        """Metadata of the engine about the model, such as the modules without their tensors."""
        self.total_bytes = sum(piece.size for piece in self.pieces)

    def split(self, degree: int) -> list[tuple[Piece, ...]]:
        """Divides the pieces, in order, into one consecutive part per device, as evenly as possible."""
        parts: list[list[Piece]] = [[] for _ in range(degree)]
        before = 0
        for piece in self.pieces:
            middle = before + piece.size // 2
            parts[min(degree - 1, middle * degree // max(1, self.total_bytes))].append(piece)
            before += piece.size
        return [tuple(part) for part in parts]

    def need(self, degree: int) -> int:
        """The largest number of bytes on a device."""
        return max(sum(piece.size for piece in part) for part in self.split(degree))


@runtime_checkable
class Engine(Protocol):
    """Subclass it, or implement these methods. All may block.

    An engine with weights outside of Tangram, such as one for a server, sets `external_weights = True`; its services
    must declare the memory that they take on devices."""

    batch_max: int
    """The largest number of payloads of one `call`. 1: it cannot batch."""

    def warm(self, weights: Weights | None) -> None:
        """Called first, once in every process, for slow imports. `weights`: the weights that are loaded here; None in
        the process that prepares."""

    def prepare(self) -> Weights:
        """Called once, in a separate process: read or create the weights in host memory."""
        ...

    def load(self, weights: Weights, devices: Sequence[Device]) -> Loaded:
        """Copy the weights to these devices, for example by `place`. If it raises, the blocks that it allocated are
        freed."""
        ...

    def call(self, loaded: Loaded, payloads: list[bytes]) -> list[bytes]:
        """Returns one answer for each payload. Raises InvalidAction for an invalid payload; any other exception is a
        failure of the service. If a batch fails, each of its idempotent payloads is called again alone."""
        ...

    def unload(self, loaded: Loaded) -> None:
        """Drop every reference to memory of the devices; afterwards its blocks are freed. Weights are not written back:
        the copy in host memory is the same."""


def place(weights: Weights, devices: Sequence[Device]) -> list[tuple[Block, tuple[Piece, ...]]]:
    """Copy the weights to the devices: for each a block, and the consecutive pieces in it."""
    parts = weights.split(len(devices))
    blocks = [device.allocate(sum(p.size for p in part)) for device, part in zip(devices, parts, strict=True)]
    began_at = time.monotonic()
    for device, block, part in zip(devices, blocks, parts, strict=True):
        for offset, piece in offsets(part):
            device.copy(block, offset, piece.content)
    for device, block in zip(devices, blocks, strict=True):
        device.synchronize(block, began_at)
    return list(zip(blocks, parts, strict=True))


def offsets(pieces: Iterable[Piece]) -> Iterable[tuple[int, Piece]]:
    """The offset of each piece in the block of its device."""
    offset = 0
    for piece in pieces:
        yield offset, piece
        offset += piece.size


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
