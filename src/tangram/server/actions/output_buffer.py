"""The tail of an output: what an action writes, for whoever follows it over a wire.

Owns a bounded part of it. Never holds the program back: what nobody read in time is skipped, and that is said. Promises
that every byte is told once and in order, or counted as skipped, to any number of readers who may come late, go and
come again; and that a program which writes byte by byte costs no more memory than another, and a reader who waits no
more than what is new.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable

from tangram.processes.streams import STDOUT
from tangram.runtime.wire import Chunk

OUTPUTS_BYTES_MAX = 256 << 20
"""Of all outputs that have ended and may still be asked for."""
OUTPUT_KEEP_S = 60.0
"""After the end of its action."""

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


class EndedTails:
    """Outputs of actions that have ended, kept for a while: whoever follows one may not even have begun."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tails: OrderedDict[str, tuple[float, Tail]] = OrderedDict()
        """With the time of their end, the oldest first."""
        self._bytes = 0

    def get(self, id: str) -> Tail | None:
        found = self._tails.get(id)
        return None if found is None else found[1]

    def keep(self, id: str, tail: Tail) -> None:
        tail.close()
        self._tails[id] = (self._now(), tail)
        self._bytes += tail.bytes_kept
        while self._bytes > OUTPUTS_BYTES_MAX:
            self.drop(next(iter(self._tails)))

    def drop(self, id: str) -> None:
        found = self._tails.pop(id, None)
        if found is not None:
            self._bytes -= found[1].bytes_kept

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        for id in [id for id in self._tails if is_meant(id)]:
            self.drop(id)

    def sweep(self) -> None:
        now = self._now()
        for id, (ended_s, _) in list(self._tails.items()):
            if now - ended_s <= OUTPUT_KEEP_S:
                break
            self.drop(id)
