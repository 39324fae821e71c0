"""Host copies: the same for all, and nobody can change them."""

from __future__ import annotations

import mmap
import os

import pytest

from tangram.managers.models import hostcopy
from tangram.managers.models.engine import Piece, Weights


def test_weights_come_back_as_they_were_written() -> None:
    fd = hostcopy.create("w")
    written = Weights(
        [Piece("a", memoryview(b"x" * 300), b"f4"), Piece("b", memoryview(b"")), Piece("c", memoryview(b"z"))], b"e"
    )
    layout = hostcopy.write(written, fd)
    hostcopy.seal(fd)
    read, shared = hostcopy.attach(layout, fd)
    assert [(p.name, bytes(p.content), p.meta) for p in read.pieces] == [
        ("a", b"x" * 300, b"f4"),
        ("b", b"", b""),
        ("c", b"z", b""),
    ]
    assert (read.extra, read.total_bytes, layout.total_bytes) == (b"e", 768, 768)
    assert shared is not None
    os.close(fd)


def test_a_sealed_copy_cannot_be_changed_by_anybody() -> None:
    fd = hostcopy.create("w")
    layout = hostcopy.write(Weights([Piece("a", memoryview(b"x" * 300))]), fd)
    hostcopy.seal(fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"y", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 300)
    weights, _ = hostcopy.attach(layout, fd)
    assert weights.pieces[0].content.readonly
    os.close(fd)


def test_a_service_without_weights_of_ours_has_an_empty_copy() -> None:
    fd = hostcopy.create("w")
    layout = hostcopy.write(Weights([], b"note"), fd)
    hostcopy.seal(fd)
    weights, shared = hostcopy.attach(layout, fd)
    assert (weights.total_bytes, weights.extra, shared) == (0, b"note", None)
    os.close(fd)
