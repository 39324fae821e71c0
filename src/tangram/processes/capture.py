"""Capture: the output of a program, bounded.

Owns what is kept of a stream. A program may write for ever; what is kept is its beginning and its end, because errors
stand in one of them, with a line between that says how much is missing. Decoding never fails: what is no UTF-8 is shown
as the replacement character.
"""

from __future__ import annotations

from collections import deque

CAPTURE_BYTES_MAX = 1 << 20
"""Of each stream, unless the caller says otherwise."""


class Capture:
    """Fed chunk by chunk; costs at most `bytes_max` of memory and a chunk."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        self._head_max = bytes_max - bytes_max // 2
        self._tail_max = bytes_max // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.total_bytes = 0
        """Of all that came."""

    def feed(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._head_max - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data or not self._tail_max:
            return
        self._tail.append(data[-self._tail_max :])
        self._tail_bytes += len(self._tail[-1])
        while self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def missing_bytes(self) -> int:
        """How many of them are not kept."""
        return self.total_bytes - len(self._head) - min(self._tail_bytes, self._tail_max)

    def content(self) -> bytes:
        """What is kept; between its two parts a line that says what is not."""
        tail = b"".join(self._tail)[-self._tail_max :] if self._tail else b""
        if not self.missing_bytes:
            return bytes(self._head) + tail
        mark = f"\n[... {self.missing_bytes} bytes of {self.total_bytes} are not shown ...]\n"
        return bytes(self._head) + mark.encode() + tail

    def text(self) -> str:
        return self.content().decode("utf-8", errors="replace")
