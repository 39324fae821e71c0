"""The files and directories of control groups: read, written, walked and removed.

Owns no group and knows no limits. Every file is opened, read or written, and closed; a write is one system call, which
the kernel takes or refuses as a whole. What goes wrong is OSError.
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
"""A group is busy for a moment after its last process has ended."""


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
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 16):
            chunks.append(chunk)
        return b"".join(chunks).decode("ascii")
    finally:
        os.close(fd)


def field(path: Path | str, name: str) -> int:
    """The number in the line `name number`; 0 without such a line."""
    for line in read_short(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def enable(group: Path, controllers: list[str]) -> None:
    """Version 2: let the children of a group have these controllers, if they have not."""
    control = group / "cgroup.subtree_control"
    enabled = read(control).split()
    lacking = [f"+{name}" for name in controllers if name not in enabled]
    if lacking:
        write(control, " ".join(lacking))


def fill_cpuset(group: Path) -> None:
    """Version 1: a new group has no CPUs and takes no process. It is given those of its parent; its children get
    theirs from the kernel."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        if not read(group / file).strip():
            write(group / file, read(group.parent / file).strip())
            write(group / "cgroup.clone_children", "1")


def tree(group: Path) -> Iterator[Path]:
    """A group and those below it, from the top."""
    yield group
    with contextlib.suppress(OSError):
        if group.stat().st_nlink > 2:  # a group without children has its own two names only
            with os.scandir(group) as entries:
                children = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
            for child in children:
                yield from tree(child)


def processes(group: Path) -> list[int]:
    """Of a group and of those below it; none of a group that is gone. 0 stands for a process outside of our process
    namespace, and would mean ourselves if it were signalled."""
    found: dict[int, None] = {}
    for below in tree(group):
        with contextlib.suppress(OSError):
            found.update(dict.fromkeys(int(word) for word in read(below / "cgroup.procs").split() if word != "0"))
    return list(found)


def remove(group: Path) -> None:
    """With those below it. Whatever ran there must have ended or be about to."""
    for below in reversed(list(tree(group))):
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
