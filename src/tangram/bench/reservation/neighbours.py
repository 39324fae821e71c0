"""Neighbours: the share of the cores that other programs used during a measurement.

Owns the two readings and their difference: the busy time of the cores, as counted by the kernel, minus that of this
process and its children. A side that leaves few cores idle is slowed by other programs, so a result reports their
share.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from tangram.reports.formatting import percent

BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Fields of a line of /proc/stat: user, nice, system, interrupts, soft interrupts, steal."""
SHARE_MAX = 0.1
"""Share of the cores used by other programs above which a result has a warning: the kernel's own threads use some."""


class NeighbourLoad:
    """Reads at construction and in `share`. Child processes count once they have been waited for."""

    def __init__(self, cores: int) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))[:cores]
        self._began_at = time.monotonic()
        self._busy_s, self._own_s = self._busy(), _own_cpu_s()

    def share(self) -> float:
        """Share of the cores since construction."""
        others_s = self._busy() - self._busy_s - (_own_cpu_s() - self._own_s)
        return max(0.0, others_s) / (len(self._cpus) * max(time.monotonic() - self._began_at, 1e-9))

    def _busy(self) -> float:
        names = {f"cpu{cpu}" for cpu in self._cpus}
        ticks = 0
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name in names:
                ticks += sum(int(fields[field]) for field in BUSY_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")


def disturbance_warning(shares: Sequence[float]) -> str:
    """Return a warning about the shares of other programs; empty if they were small."""
    if max(shares) <= SHARE_MAX:
        return ""
    return (
        f"The machine was not quiet: other programs took up to {percent(max(shares))} of the cores. That slows the side"
        " by action more, since it leaves fewer of them idle; repeat the benchmark without them."
    )


def _own_cpu_s() -> float:
    used = [resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
