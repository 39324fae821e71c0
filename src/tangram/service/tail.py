"""The tail of an output: what an action writes, for whoever follows it over a wire.

Owns a bounded part of it. Never holds the program back: what nobody read in time is skipped, and that is said. Promises
that every byte is told once and in order, or counted as skipped, to any number of readers who may come late, go and
come again; and that a program which writes byte by byte costs no more memory than another, and a reader who waits no
more than what is new.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from tangram.managers.work import STDOUT
from tangram.service.wire import Chunk

PIECE_BYTES = 16 << 10
"""What is written in smaller ones is put together up to this size."""
PIECE_OVERHEAD_BYTES = 256
"""What a piece counts besides its bytes: a program that changes between its streams with every byte makes many."""


class Piece:
    """Bytes of one stream, one after the other."""

    __slots__ = ("data", "offset", "stream")

    def __init__(self, offset: int, stream: int, data: bytes) -> None:
        self.offset = offset
        self.stream = stream
        self.data = bytearray(data)

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class Tail:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pieces: deque[Piece] = deque()
        self._kept = 0
        self._end = 0
        """The offset of what comes next."""
        self._closed = False
        self._news = asyncio.Event()

    @property
    def bytes_kept(self) -> int:
        return self._kept

    def __call__(self, stream: int, data: bytes) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.stream == stream and len(last.data) + len(data) <= PIECE_BYTES:
            last.data += data
        else:
            self._pieces.append(Piece(self._end, stream, data))
            self._kept += PIECE_OVERHEAD_BYTES
        self._end += len(data)
        self._kept += len(data)
        while self._kept > self._bytes_max and len(self._pieces) > 1:
            self._kept -= len(self._pieces.popleft().data) + PIECE_OVERHEAD_BYTES
        self._tell()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self, after: int = 0) -> AsyncIterator[Chunk]:
        """From an offset on, to the end."""
        while True:
            news = self._news
            for chunk in self._since(after):
                yield chunk
                after = chunk.offset + len(chunk.data)
            if news.is_set():
                continue  # something came while the reader was busy
            if self._closed:
                yield Chunk(offset=self._end)
                return
            await news.wait()

    def _since(self, after: int) -> list[Chunk]:
        new: list[Piece] = []
        for piece in reversed(self._pieces):
            if piece.end <= after:
                break
            new.append(piece)
        found = []
        for piece in reversed(new):
            begin = max(0, after - piece.offset)
            found.append(
                Chunk(
                    offset=piece.offset + begin,
                    stream="stdout" if piece.stream == STDOUT else "stderr",
                    data=bytes(piece.data[begin:]),
                    skipped=max(0, piece.offset - after),
                )
            )
            after = piece.end
        return found
