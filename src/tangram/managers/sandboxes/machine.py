"""The machine: how many cores and how much memory sandboxes may have, and how its CPUs are grouped."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Self

from tangram.core.messages import Pool, cpu_node
from tangram.errors import InvalidConfig
from tangram.managers.work import GIB
from tangram.processes.run_program import run_program

MEMORY_SHARE = 0.9
"""Share of the memory that is available at start; the rest is for this process and the system."""
NUMA_NODES_DIRECTORY = Path("/sys/devices/system/node")


class Machine:
    def __init__(
        self, cores: float, memory_bytes: int, cpus: tuple[int, ...], cpus_by_numa_node: dict[int, tuple[int, ...]]
    ) -> None:
        self.cores = cores
        self.memory_bytes = memory_bytes
        self.cpus = cpus
        self.cpus_by_numa_node = cpus_by_numa_node
        """CPUs per NUMA node; empty if there is one."""

    @classmethod
    def detect(cls, *, cores: float | None = None, memory_bytes: int | None = None) -> Self:
        """The resources that this process may use, or less if the caller requests less."""
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        if cores is None:
            cores = float(len(cpus))
        if not 0.0 < cores <= len(cpus):
            raise InvalidConfig("cores", cores, f"more than 0 and at most {len(cpus)}, which this process may use")
        cpus = cpus[: math.ceil(cores)]
        available = available_memory_bytes()
        if memory_bytes is None:
            memory_bytes = int(available * MEMORY_SHARE)
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if not 1 <= memory_bytes <= most:
            raise InvalidConfig("memory_bytes", memory_bytes, f"at least 1 and at most {most}, which the machine has")
        by_cell = numa_cells(cpus)
        even = len({len(cell) for cell in by_cell.values()}) == 1 and float(cores).is_integer()
        return cls(cores, memory_bytes, cpus, by_cell if len(by_cell) > 1 and even else {})

    def pools(self, node: str) -> tuple[Pool, ...]:
        return cpu_node(node, self.cores, self.memory_bytes / GIB, numa_nodes=len(self.cpus_by_numa_node) or 1)


def available_memory_bytes() -> int:
    available = meminfo_bytes("MemAvailable")
    if available is None:
        raise InvalidConfig("/proc/meminfo", "no MemAvailable", "a line MemAvailable; give the memory in the config")
    return available


def meminfo_bytes(name: str) -> int | None:
    """A line of /proc/meminfo; None if the kernel has none of this name."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def numa_cells(cpus: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The given CPUs by NUMA node, numbered from 0 in the order of the system's nodes."""
    cells = []
    for directory in sorted(NUMA_NODES_DIRECTORY.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        node_cpus = parse_cpu_list((directory / "cpulist").read_text(encoding="ascii"))
        cell = tuple([cpu for cpu in cpus if cpu in node_cpus])
        if cell:
            cells.append(cell)
    return dict(enumerate(cells))


def parse_cpu_list(text: str) -> list[int]:
    """Parse `0-3,8`, the kernel's format."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low:
            cpus += range(int(low), int(high or low) + 1)
    return cpus


def has_user_namespaces(user: int) -> bool:
    """Whether an unprivileged user may create a user namespace here. Tested by creating one, because several settings
    forbid it."""
    argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "unshare", "--user", "true"]
    return run_program(argv).code == 0
