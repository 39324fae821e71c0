"""Children of this process, found in /proc and killed: what a subreaper does with the processes that it adopts.

Needs nothing but Python: it is also sent into sandboxes, beside the program that makes calls of functions there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

PAUSE_S = 0.001


def list_children() -> list[int]:
    """The children of this process, zombies included. Each thread has children of its own."""
    try:
        pids: list[int] = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError), open(f"/proc/self/task/{task}/children", "rb") as file:
                pids += map(int, file.read().split())
        return pids
    except FileNotFoundError:  # the kernel has no list of children, or a thread ended meanwhile
        return _scan_children()


def _scan_children() -> list[int]:
    own_pid, pids = os.getpid(), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == own_pid:
                        pids.append(int(name))
    return pids


def kill_children(*, spare: Collection[int], wait_s: float) -> list[int]:
    """Kill and reap all children but `spare`. What is below a killed child is adopted by this process and killed next.
    Returns those that are left after `wait_s`, such as one that runs as another user."""
    deadline = time.monotonic() + wait_s
    while rest := [pid for pid in list_children() if pid not in spare]:
        for pid in rest:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return rest
        time.sleep(PAUSE_S)
    return []
