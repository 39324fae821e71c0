"""Neighbours: how much of the cores other programs of the machine took while something was measured.

Owns the two readings and their difference. What the kernel counts as busy on the cores, less what this process and its
children used, is what others had. A side that leaves few cores idle is slowed by them, so a result says how many.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from tangram.reports.formatting import percent

BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Of a line of /proc/stat: user, nice, system, interrupts, soft interrupts, and what a host took away."""
SHARE_MAX = 0.1
"""Of the cores that others may take before a result says that it was disturbed: the kernel's own threads take some."""


class Neighbours:
    """Reads when it is made, and when it is asked. Children count once they have been waited for."""

    def __init__(self, cores: int) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))[:cores]
        self._began_at = time.monotonic()
        self._busy_s, self._own_s = self._busy(), _own()

    def share(self) -> float:
        """Of the cores since then."""
        others_s = self._busy() - self._busy_s - (_own() - self._own_s)
        return max(0.0, others_s) / (len(self._cpus) * max(time.monotonic() - self._began_at, 1e-9))

    def _busy(self) -> float:
        names = {f"cpu{cpu}" for cpu in self._cpus}
        ticks = 0
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name in names:
                ticks += sum(int(fields[field]) for field in BUSY_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")


def disturbed(shares: Sequence[float]) -> str:
    """What to say of the shares that others had; empty if they were small."""
    if max(shares) <= SHARE_MAX:
        return ""
    return (
        f"The machine was not quiet: other programs took up to {percent(max(shares))} of the cores. That slows the side"
        " by action more, since it leaves fewer of them idle, so repeat it when they are gone."
    )


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
