"""Orphan cleanup: kills and freezes processes in control groups when the owner has ended.

Standard library only, imported by the spawner. Owns nothing: the owner named the groups, with the layout of sandbox.py.
`kill_all` returns after END_S_MAX at most: a process in an uninterruptible system call may outlast it, and the next
owner removes it. A sandbox that `freeze_orphans` no longer returns uses no CPU, and keeps its background processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Container

END_S_MAX, END_PAUSE_S = 4.0, 0.005
"""Time limit for the end of all processes, and pause between two rounds."""
BACKGROUND = "background"


def kill_all(groups: list[str]) -> None:
    """Kill all processes in these control groups, one directory per hierarchy: a frozen process of version 1 does not
    die by itself, and a first process whose holder died too early has no parent-death signal."""
    deadline = time.monotonic() + END_S_MAX
    while _kill_below(groups) and time.monotonic() < deadline:
        # A process namespace does not end before its processes are reaped.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(END_PAUSE_S)


def freeze_orphans(groups: list[str], sandbox_ids: Container[str]) -> set[str]:
    """One round over the groups of an owner, one directory per hierarchy. Kills the processes in slots of actions, and
    freezes background processes. Ends sandboxes that are not in `sandbox_ids`, which were being opened or closed.
    Returns the sandboxes in which a process had to be killed."""
    not_empty = set()
    for sandbox_id in _children(groups):
        sandbox_dirs = [f"{group}/{sandbox_id}" for group in groups]
        if sandbox_id not in sandbox_ids:
            if _kill_below(sandbox_dirs):
                not_empty.add(sandbox_id)
            continue
        for name in _children(sandbox_dirs):
            slot_dirs = [f"{directory}/{name}" for directory in sandbox_dirs]
            if name == BACKGROUND:
                _set_frozen(slot_dirs, frozen=True)
            elif _is_slot(name) and _kill_below(slot_dirs):
                not_empty.add(sandbox_id)
    return not_empty


def thaw_killed(pid: int, groups: list[str], sandbox_id: str) -> None:
    """Make a killed, frozen process end. In version 1 it is moved to the group of its sandbox, which is never frozen;
    in version 2 a frozen process ends immediately."""
    for group in groups:
        if os.path.exists(f"{group}/{sandbox_id}/freezer.state"):
            _write(f"{group}/{sandbox_id}/cgroup.procs", str(pid))


def _is_slot(name: str) -> bool:
    return name[:1] == "a" and name[1:].isdigit()


def _kill_below(directories: list[str]) -> bool:
    """One round for a group, given by its directory in each hierarchy, and the groups below it. Returns whether there
    was a process. Freezes first, because a frozen process does not fork; thaws afterwards, because a frozen process of
    version 1 does not die."""
    if not _processes_below(directories):
        return False
    for directory in directories:
        _write(f"{directory}/cgroup.kill", "1")  # version 2 since Linux 5.14: all at once
    _set_frozen(directories, frozen=True)
    _kill(_processes_below(directories))
    for directory in directories:
        _set_frozen([path for path, _, _ in os.walk(directory)], frozen=False)
    return True


def _processes_below(directories: list[str]) -> set[int]:
    return {pid for directory in directories for path, _, _ in os.walk(directory) for pid in _processes(path)}


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(group: str) -> list[int]:
    """0 is a process outside of this process namespace; a signal to 0 would go to this process group."""
    try:
        with open(f"{group}/cgroup.procs", encoding="ascii") as file:
            return [int(word) for word in file.read().split() if word != "0"]
    except OSError:
        return []  # it was removed meanwhile


def _set_frozen(directories: list[str], *, frozen: bool) -> None:
    for directory in directories:
        _write(f"{directory}/freezer.state", "FROZEN" if frozen else "THAWED")
        _write(f"{directory}/cgroup.freeze", "1" if frozen else "0")


def _write(path: str, text: str) -> None:
    """Each hierarchy has some of these files; a group or a process may have ended."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _children(groups: list[str]) -> list[str]:
    """Names of the groups directly below these."""
    names: set[str] = set()
    for group in groups:
        with contextlib.suppress(OSError), os.scandir(group) as entries:
            names.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return sorted(names)
