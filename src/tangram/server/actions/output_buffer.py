"""Output buffer: the most recent output of an action, for clients that follow it.

Bounded; never blocks the program: bytes that were not read in time are dropped and reported as skipped. Promises that
each byte is delivered once and in order, or counted as skipped, to any number of readers, which may start late or
reconnect. Memory does not depend on the size of the program's writes. The cost of a waiting reader is proportional to
the new output.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable

from tangram.processes.streams import STDOUT
from tangram.runtime.wire import OutputChunk

ENDED_OUTPUTS_BYTES_MAX = 256 << 20
"""Size of all outputs of settled actions."""
OUTPUT_RETENTION_S = 60.0
"""Time for which an output is kept after the action has ended."""

SEGMENT_BYTES_MAX = 16 << 10
"""Smaller writes are joined up to this size."""
SEGMENT_OVERHEAD_BYTES = 256
"""Overhead counted per segment beside its bytes: a program that alternates between its streams makes many segments."""


class OutputSegment:
    """Consecutive bytes of one stream."""

    __slots__ = ("data", "offset", "stream")

    def __init__(self, offset: int, stream: int, data: bytes) -> None:
        self.offset = offset
        self.stream = stream
        self.data = bytearray(data)

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class OutputBuffer:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._segments: deque[OutputSegment] = deque()
        self._buffered_bytes = 0
        self._end_offset = 0
        """The offset of the next byte."""
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def buffered_bytes(self) -> int:
        return self._buffered_bytes

    def __call__(self, stream: int, data: bytes) -> None:
        last = self._segments[-1] if self._segments else None
        if last is not None and last.stream == stream and len(last.data) + len(data) <= SEGMENT_BYTES_MAX:
            last.data += data
        else:
            self._segments.append(OutputSegment(self._end_offset, stream, data))
            self._buffered_bytes += SEGMENT_OVERHEAD_BYTES
        self._end_offset += len(data)
        self._buffered_bytes += len(data)
        while self._buffered_bytes > self._bytes_max and len(self._segments) > 1:
            self._buffered_bytes -= len(self._segments.popleft().data) + SEGMENT_OVERHEAD_BYTES
        self._notify()

    def close(self) -> None:
        """Ends the output."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int = 0) -> AsyncIterator[OutputChunk]:
        """Yields chunks from an offset to the end."""
        while True:
            changed = self._changed
            for chunk in self._chunks_since(after):
                yield chunk
                after = chunk.offset + len(chunk.data)
            if changed.is_set():
                continue  # new output arrived while the reader was busy
            if self._is_closed:
                yield OutputChunk(offset=self._end_offset)
                return
            await changed.wait()

    def _chunks_since(self, after: int) -> list[OutputChunk]:
        new: list[OutputSegment] = []
        for segment in reversed(self._segments):
            if segment.end <= after:
                break
            new.append(segment)
        chunks = []
        for segment in reversed(new):
            begin = max(0, after - segment.offset)
            chunks.append(
                OutputChunk(
                    offset=segment.offset + begin,
                    stream="stdout" if segment.stream == STDOUT else "stderr",
                    data=bytes(segment.data[begin:]),
                    skipped=max(0, segment.offset - after),
                )
            )
            after = segment.end
        return chunks


class EndedOutputs:
    """Outputs of settled actions, kept for a while: a client may start to follow late."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._outputs: OrderedDict[str, tuple[float, OutputBuffer]] = OrderedDict()
        """End times and outputs, oldest first."""
        self._bytes = 0

    def get(self, id: str) -> OutputBuffer | None:
        entry = self._outputs.get(id)
        return None if entry is None else entry[1]

    def add(self, id: str, output: OutputBuffer) -> None:
        output.close()
        self._outputs[id] = (self._now(), output)
        self._bytes += output.buffered_bytes
        while self._bytes > ENDED_OUTPUTS_BYTES_MAX:
            self.drop(next(iter(self._outputs)))

    def drop(self, id: str) -> None:
        entry = self._outputs.pop(id, None)
        if entry is not None:
            self._bytes -= entry[1].buffered_bytes

    def drop_matching(self, matches: Callable[[str], bool]) -> None:
        for id in [id for id in self._outputs if matches(id)]:
            self.drop(id)

    def sweep(self) -> None:
        now = self._now()
        for id, (ended_at, _) in list(self._outputs.items()):
            if now - ended_at <= OUTPUT_RETENTION_S:
                break
            self.drop(id)
