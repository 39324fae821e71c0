"""Where control groups can be created on this machine: the mounted hierarchies, and the place below them.

Version 1 has a hierarchy per controller, version 2 one for all. Owns the search for them and, for version 2, the steps
that enable controllers below a place. Never touches a foreign group, with two exceptions: it enables controllers for
the children of the place that it chooses, and it moves this process into a leaf of its own group if no other process is
there. A ManagerError lists the places that were tried, and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from tangram.errors import ManagerError
from tangram.managers.sandboxes.cgroups.cgroupfs import enable, read, write

CONTROLLERS_V1 = ("cpu", "cpuacct", "freezer", "memory", "pids")
CONTROLLERS_V2 = ("cpu", "memory", "pids")
CPUSET = "cpuset"
"""Optional: without it, CPUs are set as the affinity of each process."""

OWNER_LEAF = "tangram-owner"
"""Leaf into which an owner in a delegated group moves: in version 2 a group whose children have controllers holds no
process."""

MOUNTINFO, OWN_CGROUP_FILE = "/proc/self/mountinfo", "/proc/self/cgroup"

REMEDY_V1 = (
    "Tangram needs root and control groups that it may write; in a container these must be mounted writable, "
    "as `docker run --privileged` does"
)
REMEDY_V2 = (
    "Run Tangram under `systemd-run --scope -p Delegate=yes COMMAND`, or as root where no container is around it, "
    "or in a container with a private, writable cgroup namespace (`docker run --cgroupns=private --privileged`) as "
    "the only process of the container's own group; docs/guides/cgroup-v2.md says how to get there"
)


class CgroupHierarchies:
    """Where each controller is mounted."""

    def __init__(self, version: int, by_controller: dict[str, Path]) -> None:
        self.version = version
        # In one order everywhere: a process joins the hierarchy of `cpu` first, and is searched there.
        order = (*CONTROLLERS_V1, CPUSET)
        self.by_controller = {name: by_controller[name] for name in order if name in by_controller}

    @property
    def missing(self) -> list[str]:
        """Controllers that Tangram needs and this machine lacks."""
        required = CONTROLLERS_V1 if self.version == 1 else CONTROLLERS_V2
        return [name for name in required if name not in self.by_controller]


def find_hierarchies(mountinfo: Iterable[str] | None = None) -> CgroupHierarchies:
    """Version 2 if it has the controllers, else version 1. Read from the kernel, because paths differ by distribution.
    Of a controller that is mounted twice, the first mount is used."""
    if mountinfo is None:
        with open(MOUNTINFO, encoding="utf-8") as file:
            mountinfo = file.readlines()
    version1: dict[str, Path] = {}
    version2: dict[str, Path] = {}
    unified = False
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        where = Path(_unescape(before.split()[4]))
        if kind == "cgroup":
            _add(version1, options.split(","), (*CONTROLLERS_V1, CPUSET), where)
        elif not version2:
            unified = True
            with contextlib.suppress(OSError):
                _add(version2, read(where / "cgroup.controllers").split(), (*CONTROLLERS_V2, CPUSET), where)
    if set(CONTROLLERS_V2) <= set(version2) or (unified and not version1):
        return CgroupHierarchies(2, version2)
    return CgroupHierarchies(1, version1)


def _add(paths: dict[str, Path], offered: list[str], required: tuple[str, ...], where: Path) -> None:
    for name in required:
        if name in offered:
            paths.setdefault(name, where)


def _unescape(path: str) -> str:
    """The kernel writes blanks in paths as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def read_cgroup_paths(file: str) -> dict[str, str]:
    """The group of a process by controller, from its file `cgroup` in /proc; version 2 under the empty name. Raises
    OSError."""
    path_by_controller: dict[str, str] = {}
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        path_by_controller.update(dict.fromkeys(names.split(","), path))
    return path_by_controller


# ---- the place for Tangram's groups ---------------------------------------------------------------------------------


def writable_directories(hierarchies: CgroupHierarchies) -> dict[str, Path]:
    """The directory below which this process may create groups, by controller."""
    if hierarchies.missing:
        remedy = REMEDY_V1 if hierarchies.version == 1 else REMEDY_V2
        names = ", ".join(hierarchies.missing)
        raise ManagerError(f"control groups: this machine shows no controller {names}. {remedy}", retry=False)
    if hierarchies.version == 1:
        return _writable_directories_v1(hierarchies.by_controller)
    return _writable_directories_v2(hierarchies.by_controller["cpu"])


def _writable_directories_v1(by_controller: dict[str, Path]) -> dict[str, Path]:
    closed = [str(path) for path in dict.fromkeys(by_controller.values()) if not os.access(path, os.W_OK)]
    if closed:
        raise ManagerError(
            f"control groups cannot be made: {', '.join(closed)} may not be written. {REMEDY_V1}", retry=False
        )
    return dict(by_controller)


def _writable_directories_v2(mount: Path) -> dict[str, Path]:
    """A group that was delegated to this process, else the root of the mount, else its own group in any case."""
    own = _own_group(mount)
    candidates = [own, mount] if own is not None and _is_delegated(own) else [mount, own]
    reasons = []
    for candidate in dict.fromkeys(candidates):
        if candidate is None:
            continue
        reason = _delegate_controllers(candidate, is_own=candidate == own)
        if not reason:
            enabled = read(candidate / "cgroup.subtree_control").split()
            return {name: candidate for name in (*CONTROLLERS_V2, CPUSET) if name in enabled}
        reasons.append(reason)
    raise ManagerError(f"control groups cannot be made: {'; '.join(reasons)}. {REMEDY_V2}", retry=False)


def _own_group(mount: Path) -> Path | None:
    """The group of this process, unless it is outside of what the mount shows."""
    path = read_cgroup_paths(OWN_CGROUP_FILE).get("")
    if path is None or "/.." in path:
        return None
    own = mount / path.lstrip("/")
    own = own.parent if own.name == OWNER_LEAF else own
    return own if own.is_dir() else None


def _is_delegated(group: Path) -> bool:
    """Whether systemd has marked it as delegated."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _delegate_controllers(group: Path, *, is_own: bool) -> str:
    """Enable the controllers for the children of a group. Returns the reason of a failure, or an empty string."""
    try:
        offered = read(group / "cgroup.controllers").split()
        lacking = [name for name in CONTROLLERS_V2 if name not in offered]
        if lacking:
            return f"{group} has no controller {', '.join(lacking)}"
        if not os.access(group, os.W_OK):
            return f"{group} may not be written"
        try:
            enable(group, list(CONTROLLERS_V2))
        except OSError as error:
            if error.errno != errno.EBUSY or not is_own:
                raise
            reason = _move_into_leaf(group)
            if reason:
                return reason
            enable(group, list(CONTROLLERS_V2))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return f"{group} holds processes, so that its children cannot have controllers"
        return f"{group}: {error.strerror}"
    if CPUSET in offered:
        with contextlib.suppress(OSError):
            enable(group, [CPUSET])
    return ""


def _move_into_leaf(group: Path) -> str:
    """Move this process into a leaf of its group. Returns the reason of a failure, or an empty string."""
    others = [pid for pid in read(group / "cgroup.procs").split() if pid != str(os.getpid())]
    if others:
        return f"{group} also holds the processes {', '.join(others[:8])}, which Tangram must not move"
    leaf = group / OWNER_LEAF
    leaf.mkdir(exist_ok=True)
    write(leaf / "cgroup.procs", str(os.getpid()))
    return ""
