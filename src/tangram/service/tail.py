"""The tail of an output: what an action writes, for whoever follows it over a wire.

Owns a bounded part of it. Never holds the program back: what nobody read in time is skipped, and that is said. Promises
that every byte is told once and in order, or counted as skipped, to any number of readers who may come late, go and
come again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from tangram.managers.work import STDOUT
from tangram.service.wire import Chunk


class Tail:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pieces: deque[tuple[int, int, bytes]] = deque()
        """The offset of each, its stream and its bytes."""
        self._kept = 0
        self._end = 0
        """The offset of what comes next."""
        self._closed = False
        self._news = asyncio.Event()

    @property
    def bytes_kept(self) -> int:
        return self._kept

    def __call__(self, stream: int, data: bytes) -> None:
        self._pieces.append((self._end, stream, data))
        self._end += len(data)
        self._kept += len(data)
        while self._kept > self._bytes_max and len(self._pieces) > 1:
            self._kept -= len(self._pieces.popleft()[2])
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
        found = []
        for offset, stream, data in self._pieces:
            if offset + len(data) <= after:
                continue
            skipped, begin = max(0, offset - after), max(0, after - offset)
            found.append(
                Chunk(
                    offset=offset + begin,
                    stream="stdout" if stream == STDOUT else "stderr",
                    data=data[begin:],
                    skipped=skipped,
                )
            )
            after = offset + len(data)
        return found
