"""Latency histograms: how many actions settled, how long they took, and percentiles of that.

Completion times are counted in the cells of a fixed grid, so a histogram has bounded size and two of them can be added.
A percentile is exact to one cell, about 15 %; counts, sums and means are exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from tangram.runtime.views import Percentiles

DECADE_STEPS = (
    1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2.0, 2.2, 2.4, 2.7, 3.0, 3.3, 3.6, 3.9, 4.3, 4.7, 5.1, 5.6, 6.2, 6.8, 7.5, 8.2,
    9.1,
)  # fmt: skip
"""Steps within one decade: short numbers that grow by about a tenth, as in the E24 series of resistors."""
CELL_BOUNDS_S = (*(float(f"{step}e{decade}") for decade in range(-4, 5) for step in DECADE_STEPS), 1e5)
"""Upper bounds of the cells, from 0.1 ms to a day."""


class LatencyHistogram:
    """A histogram of the completion times of the actions that settled in some period, with sums of their parts."""

    __slots__ = ("cells", "count", "execution_s", "overhead_s", "waiting_s")

    def __init__(self) -> None:
        self.count = 0
        self.waiting_s = self.execution_s = self.overhead_s = 0.0
        self.cells: dict[int, int] = {}
        """Completion times by cell of the grid; empty cells are absent."""

    def add(self, waiting_s: float, execution_s: float, overhead_s: float) -> None:
        self.count += 1
        self.waiting_s += waiting_s
        self.execution_s += execution_s
        self.overhead_s += overhead_s
        cell = bisect_left(CELL_BOUNDS_S, waiting_s + execution_s + overhead_s)
        cells = self.cells
        cells[cell] = cells.get(cell, 0) + 1

    def merge(self, other: LatencyHistogram, sign: int = 1) -> None:
        """Adds another histogram, or subtracts it with a sign of -1."""
        self.count += sign * other.count
        self.waiting_s += sign * other.waiting_s
        self.execution_s += sign * other.execution_s
        self.overhead_s += sign * other.overhead_s
        cells = self.cells
        for cell, count in other.cells.items():
            cells[cell] = cells.get(cell, 0) + sign * count
            if not cells[cell]:
                del cells[cell]

    @property
    def total_s(self) -> float:
        return self.waiting_s + self.execution_s + self.overhead_s

    def percentiles(self) -> Percentiles:
        if not self.count:
            return NO_PERCENTILES
        p50, p95, p99 = self.quantiles((0.5, 0.95, 0.99))
        return Percentiles(count=self.count, mean_s=self.total_s / self.count, p50_s=p50, p95_s=p95, p99_s=p99)

    def quantiles(self, levels: Iterable[float]) -> list[float]:
        """Returns, for rising levels from 0 to 1, the times that this share of actions did not exceed. Values within a
        cell count as evenly spread."""
        values: list[float] = []
        cells = iter(sorted(self.cells.items()))
        cell, inside, below = 0, 0, 0
        for level in levels:
            target = level * self.count
            while below + inside < target:
                below += inside
                cell, inside = next(cells)
            low = CELL_BOUNDS_S[cell - 1] if cell else 0.0
            high = CELL_BOUNDS_S[min(cell, len(CELL_BOUNDS_S) - 1)]
            values.append(low + (high - low) * (target - below) / inside if inside else 0.0)
        return values


NO_PERCENTILES = Percentiles()
