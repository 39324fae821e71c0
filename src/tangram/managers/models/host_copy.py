"""Host copies: the weights of every service, once in the memory of the machine, the same for all processes.

Owns the files in memory that hold them. Promises that a copy is invariant: once written it is sealed, and the kernel
lets nobody change it. Processes map it without a copy of their own; it is gone when the last of them has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import msgspec

from tangram.managers.models.engine import Piece, Weights

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PieceAt(msgspec.Struct, frozen=True, array_like=True):
    name: str
    offset: int
    size: int
    meta: bytes


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where the pieces of a service lie in its copy."""

    pieces: tuple[PieceAt, ...]
    extra: bytes
    total_bytes: int


def create(name: str) -> int:
    """An empty file in memory, to be written by the process that prepares the service."""
    return os.memfd_create(name[:100], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write(weights: Weights, fd: int) -> Layout:
    """Raises OSError if the machine has not so much memory."""
    pieces, offset = [], 0
    for piece in weights.pieces:
        pieces.append(PieceAt(piece.name, offset, piece.content.nbytes, piece.meta))
        offset += piece.size
    if offset:
        os.posix_fallocate(fd, 0, offset)  # else a machine that is full kills whoever touches the missing page
        with mmap.mmap(fd, offset) as shared, memoryview(shared) as target:
            for at, piece in zip(pieces, weights.pieces, strict=True):
                target[at.offset : at.offset + at.size] = piece.content.cast("B")
    return Layout(pieces=tuple(pieces), extra=weights.extra, total_bytes=offset)


def seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def attach(layout: Layout, fd: int) -> tuple[Weights, mmap.mmap | None]:
    """The weights as this process sees them, and the memory they lie in. All of it is mapped now, not when a service is
    restored."""
    if not layout.total_bytes:
        pieces = [Piece(at.name, memoryview(b""), at.meta) for at in layout.pieces]
        return Weights(pieces, layout.extra), None
    # Older kernels let a sealed file be mapped only through a descriptor that cannot write.
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        shared = mmap.mmap(reader, layout.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(reader)
    view = memoryview(shared)
    pieces = [Piece(at.name, view[at.offset : at.offset + at.size], at.meta) for at in layout.pieces]
    return Weights(pieces, layout.extra), shared
