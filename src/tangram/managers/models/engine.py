"""Engines: how a model is prepared, put on devices, called and taken off them again.

Owns the contract between a service and the processes that run it, and the form of weights. Engines run in the processes
of devices, never in the process of the manager: there they may block, crash or hang.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tangram.managers.models.devices import Block, Device

Loaded = Any
"""What an engine makes of weights on devices, and is handed back at each call."""

ALIGNMENT_BYTES = 256
"""Of every piece, in host memory and on devices: what any kernel on any device wants at most."""


class Piece(NamedTuple):
    """One tensor, as bytes."""

    name: str
    content: memoryview
    meta: bytes = b""
    """The engine's own note of it, such as type and shape."""

    @property
    def size(self) -> int:
        """With the gap behind it."""
        return aligned(self.content.nbytes)


class Weights:
    """What a model is made of. In the processes of devices its pieces lie in the host copy, which cannot be written."""

    def __init__(self, pieces: Iterable[Piece], extra: bytes = b"") -> None:
        self.pieces = tuple(pieces)
        self.extra = extra
        """The engine's own note of the whole, such as the modules without their tensors."""
        self.total_bytes = sum(piece.size for piece in self.pieces)

    def split(self, degree: int) -> list[tuple[Piece, ...]]:
        """Whole pieces in their order, one run of them for each device, as even as they go."""
        parts: list[list[Piece]] = [[] for _ in range(degree)]
        before = 0
        for piece in self.pieces:
            middle = before + piece.size // 2
            parts[min(degree - 1, middle * degree // max(1, self.total_bytes))].append(piece)
            before += piece.size
        return [tuple(part) for part in parts]

    def need(self, degree: int) -> int:
        """Bytes on the device with the most."""
        return max(sum(piece.size for piece in part) for part in self.split(degree))


@runtime_checkable
class Engine(Protocol):
    """Subclass it, or have these. All may block.

    One whose weights are not those that it prepares, as those of a server, says `elsewhere = True`: then what a service
    takes of devices has to be said."""

    batch_max: int
    """Payloads that one `call` takes at most. 1: it cannot batch."""

    def warm(self, weights: Weights | None) -> None:
        """Once in every process, before anything else: import what takes long to import. `weights` are those to be
        loaded here; None in the process that prepares."""

    def prepare(self) -> Weights:
        """Once, in a process of its own: read or make the weights in host memory."""
        ...

    def load(self, weights: Weights, devices: Sequence[Device]) -> Loaded:
        """Put the weights on these devices; `place` does. What fails here leaves nothing: blocks that were allocated
        meanwhile are freed."""
        ...

    def call(self, loaded: Loaded, payloads: list[bytes]) -> list[bytes]:
        """One answer for each payload. InvalidAction says that a payload is wrong; anything else that the service
        failed. If several payloads fail together, each is called again alone, if it may be called twice."""
        ...

    def unload(self, loaded: Loaded) -> None:
        """Let go of everything that lies on the devices; afterwards its blocks are freed. Weights are not saved: the
        copy in host memory is the same."""


def place(weights: Weights, devices: Sequence[Device]) -> list[tuple[Block, tuple[Piece, ...]]]:
    """A copy of the weights on the devices: for each a block, and the pieces that lie in it one behind the other."""
    parts = weights.split(len(devices))
    blocks = [device.allocate(sum(p.size for p in part)) for device, part in zip(devices, parts, strict=True)]
    begun_s = time.monotonic()
    for device, block, part in zip(devices, blocks, parts, strict=True):
        for offset, piece in offsets(part):
            device.copy(block, offset, piece.content)
    for device, block in zip(devices, blocks, strict=True):
        device.settle(block, begun_s)
    return list(zip(blocks, parts, strict=True))


def offsets(pieces: Iterable[Piece]) -> Iterable[tuple[int, Piece]]:
    """Where each piece lies in the block of its device."""
    offset = 0
    for piece in pieces:
        yield offset, piece
        offset += piece.size


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
