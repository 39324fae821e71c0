"""The process of the service itself, as Linux counts it: memory, CPU time, file descriptors, start.

Owns the reading of /proc/self. Where there is none, nothing is said.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def process_samples() -> Iterator[tuple[str, tuple[str, ...], float]]:
    """By the names that all exporters use."""
    try:
        # The name of the program stands in parentheses and may hold anything, these included.
        fields = (PROC / "self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot_s = _boot_s()
        descriptors = len(os.listdir(PROC / "self/fd"))
    except OSError:
        return
    per_s, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    user, system, started, virtual, resident = (int(fields[place]) for place in (11, 12, 19, 20, 21))
    yield "process_cpu_seconds_total", (), (user + system) / per_s
    yield "process_resident_memory_bytes", (), resident * page
    yield "process_virtual_memory_bytes", (), virtual
    yield "process_open_fds", (), descriptors
    yield "process_max_fds", (), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield "process_start_time_seconds", (), boot_s + started / per_s


def _boot_s() -> float:
    for line in (PROC / "stat").read_text(encoding="utf-8").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
