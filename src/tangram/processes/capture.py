"""Capture: the output of a program, bounded in memory.

Keeps the beginning and the end of a stream, because error messages are in one of them, with a line between that states
how much is missing. Decoding never fails: bytes that are not UTF-8 become the replacement character.
"""

from __future__ import annotations

from collections import deque

BLOCK_BYTES = 1 << 12


class Capture:
    """Fed chunk by chunk; holds at most `bytes_max` bytes and one chunk or block more."""

    def __init__(self, bytes_max: int) -> None:
        self._head_max = bytes_max - bytes_max // 2
        self._tail_max = bytes_max // 2
        self._head = bytearray()
        self._tail: deque[bytes | bytearray] = deque()
        """Blocks: small chunks are joined, because an object of its own for each would cost more than its bytes."""
        self._tail_bytes = 0
        self.total_bytes = 0
        """Bytes fed."""

    def feed(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_max - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data or not self._tail_max:
            return
        data = data[-self._tail_max :]
        self._tail_bytes += len(data)
        if self._tail and len(self._tail[-1]) + len(data) <= BLOCK_BYTES:
            self._tail[-1] += data
        else:
            self._tail.append(data if len(data) >= BLOCK_BYTES else bytearray(data))
        while self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def missing_bytes(self) -> int:
        """Bytes dropped."""
        return self.total_bytes - len(self._head) - min(self._tail_bytes, self._tail_max)

    def content(self) -> bytes:
        """The kept bytes; if some are missing, a line between the two parts states how many."""
        tail = b"".join(self._tail)[-self._tail_max :] if self._tail else b""
        if not self.missing_bytes:
            return bytes(self._head) + tail
        mark = f"\n[... {self.missing_bytes} bytes of {self.total_bytes} are not shown ...]\n"
        return bytes(self._head) + mark.encode() + tail

    def text(self) -> str:
        return self.content().decode("utf-8", errors="replace")
