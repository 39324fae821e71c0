"""The cpuset allocator: which CPUs of the machine each running action sees.

Owns the choice of CPUs, so that `nproc` prints an action's width. Never limits CPU use: quota and weight do. Promises
every action as many CPUs as its width requires, on the NUMA nodes of its grant, the least loaded ones; and with up to
REPACK_MAX actions, that a CPU is overcommitted only if placing all actions again would not avoid it.

An action with a width of one and a half CPUs needs one of its own and half of another. Its load on a shared CPU is that
half.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tangram.core.demand import CORE
from tangram.processes.width import whole_cores

RELIEF_MIN = 100
"""Milli-cores by which a move must relieve the most loaded CPU; less is not worth the writes."""
REPACK_MAX = 32
"""Actions up to which all of them are placed again if that helps. With more, the load evens out."""

Moves = dict[str, tuple[int, ...]]
"""Actions that move, with their new CPUs."""


class _Allocation:
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


class CpusetAllocator:
    def __init__(
        self, total: int, cpus: Sequence[int], cpus_by_numa_node: dict[int, tuple[int, ...]] | None = None
    ) -> None:
        """`cpus`: all CPUs. `cpus_by_numa_node`: those of each NUMA node; without it there is one node."""
        self.total = total
        """Milli-cores that all actions may use together; the last CPU may be used in part."""
        self.cpus = tuple(cpus)
        self._cpus_by_numa_node = cpus_by_numa_node or {}
        self._load: dict[int, float] = dict.fromkeys(cpus, 0.0)
        self._allocations: dict[str, _Allocation] = {}

    def place(
        self, action: str, *, width: int, reserved: int, cells: Iterable[int] = ()
    ) -> tuple[tuple[int, ...], Moves]:
        """Choose CPUs for an action, in ascending order, and the other actions that move for it."""
        placed = _Allocation(min(whole_cores(width), len(self.cpus)), reserved, tuple(cells))
        self._allocations[action] = placed
        self._assign_least_loaded(placed)
        moves = self._repack() if max(self._load.values()) > CORE else {}
        moves.pop(action, None)
        return placed.cpus, moves

    def resize(self, action: str, reserved: int) -> None:
        """Change its reserve; its CPUs stay."""
        placed = self._allocations[action]
        cpus = placed.cpus
        self._remove_load(placed)
        placed.reserved = reserved
        self._add_load(placed, cpus)

    def release(self, action: str) -> Moves:
        """Free its CPUs. Returns the actions that move to them."""
        self._remove_load(self._allocations.pop(action))
        hot, cold = max(self._load.values()), min(self._load.values())
        return self._repack() if hot - cold >= RELIEF_MIN else {}

    def weight(self, action: str) -> int:
        """The weight of its group, in milli-cores. The kernel splits the weight of a group over its CPUs. Only the part
        on the shared CPU competes with other actions, so every CPU gets that part."""
        placed = self._allocations[action]
        shared = placed.reserved - (placed.count - 1) * CORE
        return shared * placed.count if shared > 0 else placed.reserved

    # ---- placement ----

    def _assign_least_loaded(self, placed: _Allocation) -> None:
        """Place an action on the least loaded CPUs that it may have."""
        among = self._candidate_cpus(placed)
        chosen = among if placed.count == len(among) else sorted(among, key=self._load.__getitem__)[: placed.count]
        self._add_load(placed, chosen)

    def _add_load(self, placed: _Allocation, cpus: Iterable[int]) -> None:
        """Add the load of an action: one CPU for each whole core that it needs; the rest goes to the most loaded of its
        CPUs."""
        by_load = sorted(cpus, key=self._load.__getitem__)
        shared = placed.reserved - (placed.count - 1) * CORE
        even = placed.reserved / placed.count
        for cpu in by_load:
            placed.loads[cpu] = even if shared <= 0 else float(CORE)
        if shared > 0:
            placed.loads[by_load[-1]] = float(shared)
        for cpu, load in placed.loads.items():
            self._load[cpu] += load

    def _remove_load(self, placed: _Allocation) -> None:
        for cpu, load in placed.loads.items():
            self._load[cpu] -= load
        placed.loads = {}

    def _candidate_cpus(self, placed: _Allocation) -> tuple[int, ...]:
        cpus = tuple([cpu for node in placed.cells for cpu in self._cpus_by_numa_node.get(node, ())])
        return cpus if len(cpus) >= placed.count else self.cpus

    def _repack(self) -> Moves:
        """Place all actions again, the heaviest first, if that relieves the most loaded CPU by enough."""
        if len(self._allocations) > REPACK_MAX:
            return {}
        before = {action: dict(placed.loads) for action, placed in self._allocations.items()}
        hot = max(self._load.values())
        for placed in self._allocations.values():
            self._remove_load(placed)
        for placed in sorted(self._allocations.values(), key=lambda placed: -placed.reserved / placed.count):
            self._assign_least_loaded(placed)
        if hot - max(self._load.values()) < RELIEF_MIN:
            for action, placed in self._allocations.items():
                self._remove_load(placed)
                placed.loads = before[action]
                for cpu, load in placed.loads.items():
                    self._load[cpu] += load
            return {}
        return {
            action: placed.cpus
            for action, placed in self._allocations.items()
            if placed.cpus != tuple(sorted(before[action]))
        }
