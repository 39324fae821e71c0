"""Host copies: the weights of each service, stored once in the memory of the machine and shared by all processes.

Owns their memory files (memfd). A complete copy is sealed: the kernel then rejects every change. Processes map it
without copying; its memory is freed when the last of them has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import msgspec

from tangram.managers.models.engine import Piece, Weights

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PieceLayout(msgspec.Struct, frozen=True, array_like=True):
    name: str
    offset: int
    size: int
    meta: bytes


class HostCopyLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The offsets of the pieces of a service in its copy."""

    pieces: tuple[PieceLayout, ...]
    extra: bytes
    total_bytes: int


def create(name: str) -> int:
    """An empty memory file, written by the process that prepares the service."""
    return os.memfd_create(name[:100], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write(weights: Weights, fd: int) -> HostCopyLayout:
    """Raises OSError if the machine does not have enough memory."""
    pieces, offset = [], 0
    for piece in weights.pieces:
        pieces.append(PieceLayout(piece.name, offset, piece.content.nbytes, piece.meta))
        offset += piece.size
    if offset:
        os.posix_fallocate(fd, 0, offset)  # otherwise touching a missing page of a full machine kills the process
        with mmap.mmap(fd, offset) as shared, memoryview(shared) as target:
            for at, piece in zip(pieces, weights.pieces, strict=True):
                target[at.offset : at.offset + at.size] = piece.content.cast("B")
    return HostCopyLayout(pieces=tuple(pieces), extra=weights.extra, total_bytes=offset)


def seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def attach(layout: HostCopyLayout, fd: int) -> tuple[Weights, mmap.mmap | None]:
    """Returns the weights in the address space of this process, and their mapping. Maps all pages now, not when a
    service is restored."""
    if not layout.total_bytes:
        pieces = [Piece(at.name, memoryview(b""), at.meta) for at in layout.pieces]
        return Weights(pieces, layout.extra), None
    # Older kernels map a sealed file only through a read-only descriptor.
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        shared = mmap.mmap(reader, layout.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(reader)
    view = memoryview(shared)
    pieces = [Piece(at.name, view[at.offset : at.offset + at.size], at.meta) for at in layout.pieces]
    return Weights(pieces, layout.extra), shared
