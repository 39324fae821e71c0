"""Halting: what the spawner does to control groups when its owner is gone.

Loaded by the spawner at its start, by path: standard library only. Owns nothing: the groups are named by the owner,
and laid out as `sandbox` says. Promises that after `end_all` nobody is left in them, and that a sandbox of which `halt`
does not speak any more uses no CPU and keeps what its actions had left running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Container

END_S_MAX, END_PAUSE_S = 4.0, 0.005
"""When the owner is gone: until everybody has ended, and between two looks."""
BACKGROUND = "background"


def end_all(groups: list[str]) -> None:
    """Kill whoever is in these control groups, also those that stand still: a process of version 1 that is frozen does
    not die, and a first process whose holder died too early does not know of it."""
    deadline = time.monotonic() + END_S_MAX
    anybody = True
    while anybody and time.monotonic() < deadline:
        anybody = False
        for group in groups:
            anybody = _end_below(group) or anybody
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):  # a sandbox has not ended while one of it is to be waited for
                pass
        time.sleep(END_PAUSE_S if anybody else 0.0)


def halt(groups: list[str], boxes: Container[str]) -> set[str]:
    """One round over the groups of an owner, one directory per hierarchy. Who is in the slot of an action is killed,
    and what actions had left running stands still; a sandbox that is not one of `boxes` was half made or half closed,
    and is ended. Returns the sandboxes in which somebody had to be killed."""
    busy = set()
    for box in _children(groups):
        at = [f"{group}/{box}" for group in groups]
        if box not in boxes:
            for folder in at:
                if _end_below(folder):
                    busy.add(box)
            continue
        for name in _children(at):
            parts = [f"{folder}/{name}" for folder in at]
            if name == BACKGROUND:
                _steer(parts, still=True)
            elif _is_slot(name) and _empty(parts):
                busy.add(box)
    return busy


def let_die(pid: int, groups: list[str], box: str) -> None:
    """Whoever was killed while it stands still dies when it does no more. In version 1 it is moved to the group of its
    sandbox, which never does; in version 2 it dies as it stands."""
    for group in groups:
        if os.path.exists(f"{group}/{box}/freezer.state"):
            _write(f"{group}/{box}/cgroup.procs", str(pid))


def _is_slot(name: str) -> bool:
    return name[:1] == "a" and name[1:].isdigit()


def _empty(parts: list[str]) -> bool:
    """One round for one group in all its hierarchies: whether anybody was there. Standing still, nobody forks while
    being counted; and it may have stood still when its owner died."""
    found: set[int] = set()
    for part in parts:
        found.update(_processes(part))
    if found:
        _steer(parts, still=True)
        for part in parts:
            found.update(_processes(part))
    _kill(found)
    _steer(parts, still=False)
    return bool(found)


def _end_below(group: str) -> bool:
    """One round for a group of one hierarchy with those below it: whether anybody was there."""
    anybody = False
    for folder, _, _ in os.walk(group):
        found = _processes(folder)
        _kill(found)
        if found:
            _steer([folder], still=False)
            anybody = True
    return anybody


def _kill(found: list[int] | set[int]) -> None:
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(group: str) -> list[int]:
    """0 stands for who is outside of our process namespace, and would mean ourselves."""
    try:
        with open(f"{group}/cgroup.procs", encoding="ascii") as file:
            return [int(word) for word in file.read().split() if word != "0"]
    except OSError:
        return []  # it was removed meanwhile


def _steer(parts: list[str], *, still: bool) -> None:
    for part in parts:
        _write(f"{part}/freezer.state", "FROZEN" if still else "THAWED")
        _write(f"{part}/cgroup.freeze", "1" if still else "0")


def _write(path: str, text: str) -> None:
    """Each hierarchy has some of these files; a group or a process may be gone."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _children(groups: list[str]) -> list[str]:
    """Names of the groups directly below these."""
    found: set[str] = set()
    for group in groups:
        with contextlib.suppress(OSError), os.scandir(group) as entries:
            found.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return sorted(found)
