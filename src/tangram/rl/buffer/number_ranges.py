"""Sets of mostly consecutive numbers, stored as ranges.

Promises that adjacent ranges are merged: a million consecutive numbers take as much memory as two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]
"""First and last number, both included."""


class NumberRanges:
    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            assert first <= last and (not self._lasts or first > self._lasts[-1] + 1), f"{first}-{last} is out of order"
            self._firsts.append(first)
            self._lasts.append(last)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __len__(self) -> int:
        """Number of numbers."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def add(self, number: int) -> None:
        assert number not in self, f"{number} is there already"
        at = bisect_right(self._firsts, number)
        joins_before = at > 0 and self._lasts[at - 1] == number - 1
        joins_after = at < len(self._firsts) and self._firsts[at] == number + 1
        if joins_before and joins_after:
            self._lasts[at - 1] = self._lasts.pop(at)
            del self._firsts[at]
        elif joins_before:
            self._lasts[at - 1] = number
        elif joins_after:
            self._firsts[at] = number
        else:
            self._firsts.insert(at, number)
            self._lasts.insert(at, number)
