"""The files and directories of control groups: read, write, walk and remove.

Owns no group and no limits. Every file is opened, accessed and closed; a write is one system call, which the kernel
accepts or refuses as a whole. Failures raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

BUSY_PAUSE_S = 0.002
BUSY_S_MAX = 10.0
"""Time limit for removing a group, which is busy for a moment after its last process has ended."""


def write(path: Path | str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def read_short(path: Path | str) -> str:
    """A file that is always shorter than a page, such as a number."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 12).decode("ascii")
    finally:
        os.close(fd)


def read(path: Path | str) -> str:
    return Path(path).read_text(encoding="ascii")


def read_field(path: Path | str, name: str) -> int:
    """The number in the line `name number`; 0 without such a line."""
    for line in read_short(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def enable(group: Path, controllers: list[str]) -> None:
    """Version 2: enable these controllers for the children of a group, unless they are."""
    control = group / "cgroup.subtree_control"
    enabled = read(control).split()
    lacking = [f"+{name}" for name in controllers if name not in enabled]
    if lacking:
        write(control, " ".join(lacking))


def inherit_cpuset(group: Path) -> None:
    """Version 1: a new group has no CPUs and accepts no process. It gets those of its parent; the kernel gives its
    children theirs."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        if not read(group / file).strip():
            write(group / file, read(group.parent / file).strip())
            write(group / "cgroup.clone_children", "1")


def walk(group: Path) -> Iterator[Path]:
    """A group and those below it, from the top."""
    yield group
    with contextlib.suppress(OSError):
        if group.stat().st_nlink > 2:  # a group without children has only its own entry and that of its parent
            with os.scandir(group) as entries:
                children = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
            for child in children:
                yield from walk(child)


def processes(group: Path) -> list[int]:
    """Processes of a group and of those below it; empty for a removed group. 0 is a process outside of this
    process namespace; a signal to 0 would go to this process group."""
    pids: dict[int, None] = {}
    for below in walk(group):
        with contextlib.suppress(OSError):
            pids.update(dict.fromkeys(int(word) for word in read(below / "cgroup.procs").split() if word != "0"))
    return list(pids)


def remove(group: Path) -> None:
    """Remove a group and those below it. Its processes must have ended or be exiting."""
    for below in reversed(list(walk(group))):
        _rmdir(below)


def _rmdir(group: Path) -> None:
    deadline = time.monotonic() + BUSY_S_MAX
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(BUSY_PAUSE_S)
