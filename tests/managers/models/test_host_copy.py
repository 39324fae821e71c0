"""Host copies: shared by all processes and read-only."""

from __future__ import annotations

import mmap
import os

import pytest

from tangram.managers.models import host_copy
from tangram.managers.models.engine import Piece, Weights


def test_weights_come_back_as_they_were_written() -> None:
    fd = host_copy.create("w")
    written = Weights(
        [Piece("a", memoryview(b"x" * 300), b"f4"), Piece("b", memoryview(b"")), Piece("c", memoryview(b"z"))], b"e"
    )
    layout = host_copy.write(written, fd)
    host_copy.seal(fd)
    read, shared = host_copy.attach(layout, fd)
    assert [(p.name, bytes(p.content), p.meta) for p in read.pieces] == [
        ("a", b"x" * 300, b"f4"),
        ("b", b"", b""),
        ("c", b"z", b""),
    ]
    assert (read.extra, read.total_bytes, layout.total_bytes) == (b"e", 768, 768)
    assert shared is not None
    os.close(fd)


def test_a_sealed_copy_cannot_be_changed() -> None:
    fd = host_copy.create("w")
    layout = host_copy.write(Weights([Piece("a", memoryview(b"x" * 300))]), fd)
    host_copy.seal(fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"y", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 300)
    weights, _ = host_copy.attach(layout, fd)
    assert weights.pieces[0].content.readonly
    os.close(fd)


def test_a_service_without_weights_of_ours_has_an_empty_copy() -> None:
    fd = host_copy.create("w")
    layout = host_copy.write(Weights([], b"note"), fd)
    host_copy.seal(fd)
    weights, shared = host_copy.attach(layout, fd)
    assert (weights.total_bytes, weights.extra, shared) == (0, b"note", None)
    os.close(fd)
