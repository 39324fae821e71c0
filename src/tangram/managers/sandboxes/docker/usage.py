"""The meter: what a container has used.

Owns the reading of its control group, where this process sees it: the same machine, and the engine's processes not
hidden in a namespace. Where it does not, what the scripts of `marks` say from inside is all that is known (an engine
itself takes up to a second to say what a container has used). Both count the container, not the programs in it:

- seen from here, `cpu_s` and `throttled_s` are divided evenly among the actions that ran at the same time; from inside,
  each counts all, nothing is known of one that was stopped, and nothing of throttling;
- the peak of memory is that of the container: since the first of the running actions began where it is seen from here
  and the kernel can forget an old peak (version 1), else since the container was made.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from tangram.errors import ManagerError
from tangram.managers.sandboxes.cgroups.groups import Group
from tangram.managers.sandboxes.cgroups.hierarchies import CONTROLLERS_V1, CONTROLLERS_V2, find_hierarchies


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Since the container was made."""

    cpu_s: float = 0.0
    throttled_s: float = 0.0
    memory_peak_bytes: int = 0
    memory_kills: int = 0
    """Processes killed for want of memory; where that is not seen, how often the engine said so."""


class Meter:
    def __init__(self, container: str, pid: int) -> None:
        self.group = visible_group(pid, container)
        """None: the processes of the container are not seen from here."""

    def read(self, memory_events: int) -> Reading | None:
        """None: it can no longer be read."""
        if self.group is None:
            return Reading(memory_kills=memory_events)
        try:
            return Reading(
                cpu_s=self.group.cpu_s(),
                throttled_s=self.group.throttled_s(),
                memory_peak_bytes=self.group.memory_peak_bytes(),
                memory_kills=self.group.memory_kills(),
            )
        except ManagerError:
            return None  # it is gone with the container

    def forget_memory_peak(self) -> None:
        if self.group is not None:
            with contextlib.suppress(ManagerError):
                self.group.forget_memory_peak()


def visible_group(pid: int, container: str) -> Group | None:
    """The control group of a process that the engine names, if it is a process of this machine and in the container."""
    try:
        paths = _group_paths(Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8"))
        hierarchies = find_hierarchies()
    except OSError:
        return None
    wanted = CONTROLLERS_V1 if hierarchies.version == 1 else CONTROLLERS_V2
    directories: dict[str, Path] = {}
    for name in wanted:
        path = paths.get(name if hierarchies.version == 1 else "", "")
        mount = hierarchies.by_controller.get(name)
        if mount is None or container not in path or ".." in path:
            return None
        directories[name] = mount / path.lstrip("/")
    group = Group(hierarchies.version, directories)
    return group if group.exists() else None


def _group_paths(text: str) -> dict[str, str]:
    """By controller; that of version 2 by the empty name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found
