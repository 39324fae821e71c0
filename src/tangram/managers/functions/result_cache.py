"""Recall: answers that are kept for whoever asks the same again.

Owns how many bytes of them are kept. Forgets what was not asked for the longest time first.
"""

from __future__ import annotations

from collections import OrderedDict

ENTRY_BYTES = 400
"""What an entry costs beside its answer."""


class Recall:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> bytes | None:
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def keep(self, key: bytes, answer: bytes) -> None:
        self._forget(key)
        size = _size(key, answer)
        if size > self._bytes_max:
            return
        self._answers[key] = answer
        self.bytes += size
        while self.bytes > self._bytes_max:
            self._forget(next(iter(self._answers)))

    def _forget(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.bytes -= _size(key, answer)


def _size(key: bytes, answer: bytes) -> int:
    return len(key) + len(answer) + ENTRY_BYTES
