"""Cores: which CPUs of the machine each running action sees.

Owns the choice of CPUs, so that `nproc` says an action's width. Never limits how much CPU is used: quota and weight do.
Promises every action as many CPUs as its width asks for, on the NUMA nodes of its grant, the least loaded ones, and
after each end at most one move that relieves the most loaded CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tangram.managers.width import whole_cores

RELIEF_MIN = 100
"""Milli-cores by which a move must even out two CPUs; less is not worth the write."""


class _Placed:
    __slots__ = ("cells", "cpus", "load")

    def __init__(self, cpus: tuple[int, ...], load: float, cells: tuple[int, ...]) -> None:
        self.cpus = cpus
        self.load = load
        """Milli-cores that it has on each of them."""
        self.cells = cells


class Cores:
    def __init__(self, total: int, cpus: Sequence[int], cpus_by_cell: dict[int, tuple[int, ...]] | None = None) -> None:
        """All CPUs, and those of each NUMA node; without the latter there is one NUMA node."""
        self.total = total
        """Milli-cores that all actions may use together; the last CPU may be used in part."""
        self.all = tuple(cpus)
        self._cpus_by_cell = cpus_by_cell or {}
        self._load: dict[int, float] = dict.fromkeys(cpus, 0.0)
        self._placed: dict[str, _Placed] = {}

    def place(self, action: str, *, width: int, reserved: int, cells: Iterable[int] = ()) -> tuple[int, ...]:
        """CPUs for an action, increasing."""
        among = self._among(tuple(cells))
        count = min(whole_cores(width), len(self.all))
        if count > len(among):
            among = self.all
        chosen = among if count == len(among) else tuple(sorted(sorted(among, key=self._load.__getitem__)[:count]))
        placed = _Placed(chosen, reserved / count, tuple(cells))
        self._add(placed, +1.0)
        self._placed[action] = placed
        return chosen

    def change(self, action: str, reserved: int) -> None:
        """Another reserve; its CPUs stay."""
        placed = self._placed[action]
        self._add(placed, -1.0)
        placed.load = reserved / len(placed.cpus)
        self._add(placed, +1.0)

    def leave(self, action: str) -> tuple[str, tuple[int, ...]] | None:
        """Its CPUs are free. Returns the action that should move, and where to."""
        self._add(self._placed.pop(action), -1.0)
        return self._relief()

    def _among(self, cells: tuple[int, ...]) -> tuple[int, ...]:
        found = tuple([cpu for cell in cells for cpu in self._cpus_by_cell.get(cell, ())])
        return found or self.all

    def _add(self, placed: _Placed, sign: float) -> None:
        for cpu in placed.cpus:
            self._load[cpu] += sign * placed.load

    def _relief(self) -> tuple[str, tuple[int, ...]] | None:
        hot = max(self.all, key=self._load.__getitem__)
        cold = min(self.all, key=self._load.__getitem__)
        gap = self._load[hot] - self._load[cold]
        if gap < RELIEF_MIN:
            return None
        best: tuple[float, str] | None = None
        for action, placed in self._placed.items():
            after = abs(gap - 2.0 * placed.load)
            fits = hot in placed.cpus and cold not in placed.cpus and cold in self._among(placed.cells)
            if fits and gap - after >= RELIEF_MIN and (best is None or after < best[0]):
                best = (after, action)
        if best is None:
            return None
        placed = self._placed[best[1]]
        self._add(placed, -1.0)
        placed.cpus = tuple(sorted([cold, *(cpu for cpu in placed.cpus if cpu != hot)]))
        self._add(placed, +1.0)
        return best[1], placed.cpus
