"""The result cache: answers of calls by key, least recently used evicted first (LRU).

Owns how many bytes are kept.
"""

from __future__ import annotations

from collections import OrderedDict

ENTRY_BYTES = 400
"""Overhead of an entry in addition to its key and answer."""


class ResultCache:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> bytes | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: bytes) -> None:
        self._evict(key)
        size = _size(key, answer)
        if size > self._bytes_max:
            return
        self._answers[key] = answer
        self.size_bytes += size
        while self.size_bytes > self._bytes_max:
            self._evict(next(iter(self._answers)))

    def _evict(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.size_bytes -= _size(key, answer)


def _size(key: bytes, answer: bytes) -> int:
    return len(key) + len(answer) + ENTRY_BYTES
