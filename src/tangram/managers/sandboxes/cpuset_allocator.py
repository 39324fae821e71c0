"""Cores: which CPUs of the machine each running action sees.

Owns the choice of CPUs, so that `nproc` says an action's width. Never limits how much CPU is used: quota and weight do.
Promises every action as many CPUs as its width asks for, on the NUMA nodes of its grant, the least loaded ones; for up
to REPACK_MAX actions also that a CPU is asked for more than it has only if placing all anew would not avoid it.

An action that may use one and a half CPUs needs all of one and half of another. So it weighs on them: what it shares
with others is the half, and by that it is weighed against them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tangram.core.demand import CORE
from tangram.processes.width import whole_cores

RELIEF_MIN = 100
"""Milli-cores by which moving must relieve the most loaded CPU; less is not worth the writes."""
REPACK_MAX = 32
"""Actions up to which all of them are placed anew if that helps. With more, CPUs are evened out by the many."""

Moves = dict[str, tuple[int, ...]]
"""Actions that are to run on other CPUs from now on."""


class _Placed:
    __slots__ = ("cells", "count", "loads", "reserved")

    def __init__(self, count: int, reserved: int, cells: tuple[int, ...]) -> None:
        self.count = count
        self.reserved = reserved
        self.cells = cells
        self.loads: dict[int, float] = {}
        """Milli-cores on each of its CPUs."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(self.loads))


class Cores:
    def __init__(self, total: int, cpus: Sequence[int], cpus_by_cell: dict[int, tuple[int, ...]] | None = None) -> None:
        """All CPUs, and those of each NUMA node; without the latter there is one NUMA node."""
        self.total = total
        """Milli-cores that all actions may use together; the last CPU may be used in part."""
        self.all = tuple(cpus)
        self._cpus_by_cell = cpus_by_cell or {}
        self._load: dict[int, float] = dict.fromkeys(cpus, 0.0)
        self._placed: dict[str, _Placed] = {}

    def load_by_cpu(self) -> dict[int, float]:
        """Milli-cores that the actions on each CPU ask of it."""
        return dict(self._load)

    def place(
        self, action: str, *, width: int, reserved: int, cells: Iterable[int] = ()
    ) -> tuple[tuple[int, ...], Moves]:
        """CPUs for an action, increasing, and who else moves for it."""
        placed = _Placed(min(whole_cores(width), len(self.all)), reserved, tuple(cells))
        self._placed[action] = placed
        self._settle(placed)
        moves = self._repacked() if max(self._load.values()) > CORE else {}
        moves.pop(action, None)
        return placed.cpus, moves

    def change(self, action: str, reserved: int) -> None:
        """Another reserve; its CPUs stay."""
        placed = self._placed[action]
        cpus = placed.cpus
        self._lift(placed)
        placed.reserved = reserved
        self._put(placed, cpus)

    def leave(self, action: str) -> Moves:
        """Its CPUs are free. Returns who should move there."""
        self._lift(self._placed.pop(action))
        hot, cold = max(self._load.values()), min(self._load.values())
        return self._repacked() if hot - cold >= RELIEF_MIN else {}

    def weight(self, action: str) -> int:
        """Milli-cores by which it is weighed against others."""
        placed = self._placed[action]
        shared = placed.reserved - (placed.count - 1) * CORE
        return shared * placed.count if shared > 0 else placed.reserved

    # ---- placing ----

    def _settle(self, placed: _Placed) -> None:
        """On the least loaded CPUs that it may have."""
        among = self._among(placed)
        chosen = among if placed.count == len(among) else sorted(among, key=self._load.__getitem__)[: placed.count]
        self._put(placed, chosen)

    def _put(self, placed: _Placed, cpus: Iterable[int]) -> None:
        """All of its CPUs but one are its own as far as it needs them; the most loaded is the one it shares."""
        by_load = sorted(cpus, key=self._load.__getitem__)
        shared = placed.reserved - (placed.count - 1) * CORE
        even = placed.reserved / placed.count
        for cpu in by_load:
            placed.loads[cpu] = even if shared <= 0 else float(CORE)
        if shared > 0:
            placed.loads[by_load[-1]] = float(shared)
        for cpu, load in placed.loads.items():
            self._load[cpu] += load

    def _lift(self, placed: _Placed) -> None:
        for cpu, load in placed.loads.items():
            self._load[cpu] -= load
        placed.loads = {}

    def _among(self, placed: _Placed) -> tuple[int, ...]:
        found = tuple([cpu for cell in placed.cells for cpu in self._cpus_by_cell.get(cell, ())])
        return found if len(found) >= placed.count else self.all

    def _repacked(self) -> Moves:
        """Place all anew, the heaviest first, if that relieves the most loaded CPU by enough."""
        if len(self._placed) > REPACK_MAX:
            return {}
        before = {action: dict(placed.loads) for action, placed in self._placed.items()}
        hot = max(self._load.values())
        for placed in self._placed.values():
            self._lift(placed)
        for placed in sorted(self._placed.values(), key=lambda placed: -placed.reserved / placed.count):
            self._settle(placed)
        if hot - max(self._load.values()) < RELIEF_MIN:
            for action, placed in self._placed.items():
                self._lift(placed)
                placed.loads = before[action]
                for cpu, load in placed.loads.items():
                    self._load[cpu] += load
            return {}
        return {
            action: placed.cpus
            for action, placed in self._placed.items()
            if placed.cpus != tuple(sorted(before[action]))
        }
