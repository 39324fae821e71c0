"""Control groups, version 1 and 2 behind one interface: limits of CPU, memory and processes; the freezer; usage.

Owns the groups below `tangram/<owner>` in every hierarchy, and removes no other. Decides nothing: amounts come from
grants. Promises that a group whose `kill` has returned holds no process, even if processes forked meanwhile, and that
`remove` leaves nothing behind.

Version 1 has a directory per controller, version 2 one for all; a Cgroup hides the difference. It keeps no file open. A
value that it has written last is not written again, so each group must be set through one Cgroup.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from tangram.core.demand import CORE
from tangram.errors import ManagerError
from tangram.managers.sandboxes.cgroups import cgroupfs
from tangram.managers.sandboxes.cgroups.hierarchies import CPUSET, find_hierarchies, writable_directories
from tangram.managers.sandboxes.machine import parse_cpu_list

ROOT_GROUP_NAME = "tangram"
"""The group whose children are owners."""
OWNER_GROUP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

PERIOD_US = 50_000
"""Period of the CPU quota. With a millisecond, a third is lost to accounting; with a tenth of a second, short commands
wait noticeably."""
QUOTA_MIN_US = 1_000
"""The smallest quota that the kernel accepts."""
WEIGHT_PER_CORE_V1, WEIGHT_MIN_V1, WEIGHT_MAX_V1 = 1024, 2, 262_144
WEIGHT_PER_CORE_V2, WEIGHT_MIN_V2, WEIGHT_MAX_V2 = 100, 1, 10_000
"""The kernel's default weight represents one reserved core; and the range that the kernel accepts."""
FREEZE_POLLS_MAX = 50
"""Polls of a group that is being frozen, which takes some microseconds; a throttled process freezes when it would
run."""
KILL_PAUSE_S = 0.002
KILL_S_MAX = 10.0
"""Time limit for killing, which is repeated until nothing is left: a process may be in a system call or exiting."""
NOT_SUPPORTED_ERRNOS = (errno.ENOENT, errno.EOPNOTSUPP)
"""Errors of the kernel for a limit that it was built or booted without."""
CREATE_ATTEMPTS_MAX = 10
"""Attempts to create a group: an owner that ends removes ROOT_GROUP_NAME if it is empty, possibly just when another one
starts."""


class Cgroup:
    """One group, in all hierarchies that it needs."""

    def __init__(self, version: int, directories: dict[str, Path], depth: int | None = None) -> None:
        self.version = version
        self._directory_by_controller = directories
        """Directories by controller; in version 2 all are the same."""
        self._path_by_controller = {controller: str(directory) for controller, directory in directories.items()}
        """The same as strings: joining paths takes longer than reading the files."""
        self._has_memory_peak: bool | None = None
        self._depth = depth
        """Levels below `tangram/<owner>`, which is 0. None: this owner must not remove it."""
        self._written: dict[str, str] = {}

    # ---- create and remove ----

    def child(self, name: str, controllers: Iterable[str] = ()) -> Cgroup:
        """A group below this one, which may exist; with the given controllers, or with all of this group."""
        chosen = [controller for controller in controllers if controller in self._directory_by_controller] or list(
            self._directory_by_controller
        )
        depth = None if self._depth is None else self._depth + 1
        group = Cgroup(
            self.version, {controller: self._directory_by_controller[controller] / name for controller in chosen}, depth
        )
        created: list[Path] = []
        try:
            for directory in group._directories():
                with contextlib.suppress(FileExistsError):
                    directory.mkdir()
                    created.append(directory)
            if self.version == 1 and CPUSET in group._directory_by_controller:
                cgroupfs.inherit_cpuset(group._directory_by_controller[CPUSET])
        except OSError as error:
            for directory in created:
                with contextlib.suppress(OSError):
                    directory.rmdir()
            raise ManagerError(f"control group {name} cannot be made: {error}") from error
        return group

    def subset(self, controllers: Iterable[str]) -> Cgroup:
        """This group in some of its hierarchies only: for joining it there."""
        return Cgroup(
            self.version,
            {
                name: self._directory_by_controller[name]
                for name in controllers
                if name in self._directory_by_controller
            },
        )

    def delegate(self) -> None:
        """Version 2: let groups below have the controllers. Only a group without processes of its own can."""
        if self.version == 2:
            try:
                cgroupfs.enable(self._first(), list(self._directory_by_controller))
            except OSError as error:
                raise ManagerError(f"control group {self._first()} cannot have children: {error.strerror}") from error

    def remove(self) -> None:
        """Remove it with everything below it, killing what runs there. Blocks."""
        assert self._depth is not None, f"{self._first()} must not be removed by this owner"
        self.kill()
        for directory in self._directories():
            try:
                cgroupfs.remove(directory)
            except OSError as error:
                raise ManagerError(f"control group {directory} cannot be removed: {error}") from error
            if self._depth == 0:
                with contextlib.suppress(OSError):
                    directory.parent.rmdir()  # ROOT_GROUP_NAME, unless it has other owners

    def exists(self) -> bool:
        return any(directory.exists() for directory in self._directories())

    def children(self) -> list[str]:
        """Names of the groups directly below, in any hierarchy; sorted."""
        names: set[str] = set()
        for directory in self._directories():
            with contextlib.suppress(OSError):
                names.update(entry.name for entry in directory.iterdir() if entry.is_dir())
        return sorted(names)

    @property
    def join_files(self) -> list[str]:
        """A process that writes 0 to each of these, in this order, is in the group with all its later forks. An
        interrupted one is found through the first file."""
        return [str(directory / "cgroup.procs") for directory in self._directories()]

    def _directories(self) -> list[Path]:
        return list(dict.fromkeys(self._directory_by_controller.values()))

    def _first(self) -> Path:
        return next(iter(self._directory_by_controller.values()))

    # ---- limits ----

    def set_cpu(self, *, reserved: int, limit: int) -> None:
        """Milli-cores: the share under contention, and the quota."""
        self.set_weight(reserved)
        quota = max(QUOTA_MIN_US, limit * PERIOD_US // CORE)
        if self.version == 2:
            self._set("cpu", "cpu.max", f"{quota} {PERIOD_US}")
        else:
            self._set("cpu", "cpu.cfs_period_us", PERIOD_US)
            self._set("cpu", "cpu.cfs_quota_us", quota)

    def set_weight(self, reserved: int) -> None:
        """The weight of a sandbox: the sum of its running actions."""
        if self.version == 2:
            weight = _clamp(reserved * WEIGHT_PER_CORE_V2 // CORE, WEIGHT_MIN_V2, WEIGHT_MAX_V2)
            self._set("cpu", "cpu.weight", weight)
        else:
            weight = _clamp(reserved * WEIGHT_PER_CORE_V1 // CORE, WEIGHT_MIN_V1, WEIGHT_MAX_V1)
            self._set("cpu", "cpu.shares", weight)

    def set_cpus(self, cpus: Iterable[int]) -> bool:
        """Set the CPUs on which it runs, now and from now on. Returns False without a cpuset controller; then set the
        affinity of each process."""
        if CPUSET not in self._directory_by_controller:
            return False
        ordered = sorted(set(cpus))
        assert ordered, "a group without any CPU cannot run"
        self._set(CPUSET, "cpuset.cpus", ",".join(map(str, ordered)))
        return True

    def set_owner_limits(self, *, limit: int, cpus: Iterable[int]) -> None:
        """The limits of an owner, which all below it share. In version 1 no group may exceed its parent, and those of a
        previous owner may: they are adjusted first. No action runs meanwhile."""
        ordered = sorted(set(cpus))
        if self.version == 1:
            for below in [*cgroupfs.walk(self._directory_by_controller["cpu"])][1:]:
                self._write_limit(below / "cpu.cfs_quota_us", "-1")
            if CPUSET in self._directory_by_controller:
                top, *rest = cgroupfs.walk(self._directory_by_controller[CPUSET])
                now = parse_cpu_list(cgroupfs.read(top / "cpuset.cpus"))
                either = ",".join(map(str, sorted({*now, *ordered})))
                only = ",".join(map(str, ordered))
                for group, text in [(member, either) for member in (top, *rest)] + [
                    (member, only) for member in rest[::-1]
                ]:
                    self._write_limit(group / "cpuset.cpus", text)
        self.set_cpu(reserved=CORE, limit=limit)
        self.set_cpus(ordered)

    def _write_limit(self, path: Path, text: str) -> None:
        try:
            cgroupfs.write(path, text)
        except FileNotFoundError:
            pass  # its sandbox is ending
        except OSError as error:
            raise ManagerError(f"{path}: the kernel refuses {text!r}: {error.strerror}") from error

    def set_memory(self, limit_bytes: int) -> None:
        """Beyond it the kernel kills a process of the group. Swap is included."""
        if self.version == 2:
            self._set("memory", "memory.max", limit_bytes)
            self._set("memory", "memory.swap.max", 0, optional=True)
        else:
            self._set("memory", "memory.limit_in_bytes", limit_bytes)
            self._set("memory", "memory.memsw.limit_in_bytes", limit_bytes, optional=True)

    def set_processes_max(self, count: int) -> None:
        self._set("pids", "pids.max", count)

    def _set(self, controller: str, file: str, value: int | str, *, optional: bool = False) -> None:
        """Set a value. `optional`: some kernels are built without it."""
        text = str(value)
        if self._written.get(file) == text:
            return
        self._written.pop(file, None)
        try:
            cgroupfs.write(f"{self._path_by_controller[controller]}/{file}", text)
        except OSError as error:
            if not (optional and error.errno in NOT_SUPPORTED_ERRNOS and self.exists()):
                raise self._error(file, error, text) from error
        self._written[file] = text

    def _error(self, file: str, error: OSError, value: str = "") -> ManagerError:
        what = f"{file} of control group {self._first()}"
        if not self.exists():
            return ManagerError(f"{what}: the group is gone")
        return ManagerError(f"{what}: the kernel refuses {value!r}: {error.strerror}" if value else f"{what}: {error}")

    # ---- usage ----

    def cpu_s(self) -> float:
        if self.version == 2:
            return self._read_field("cpu", "cpu.stat", "usage_usec") / 1e6
        return self._read_number("cpuacct", "cpuacct.usage") / 1e9

    def throttled_s(self) -> float:
        """Seconds for which it was throttled by its quota."""
        if self.version == 2:
            return self._read_field("cpu", "cpu.stat", "throttled_usec") / 1e6
        return self._read_field("cpu", "cpu.stat", "throttled_time") / 1e9

    def memory_bytes(self) -> int:
        return self._read_number("memory", "memory.current" if self.version == 2 else "memory.usage_in_bytes")

    def memory_peak_bytes(self) -> int:
        """The peak so far, or since `reset_memory_peak` where the kernel can reset it; where it keeps none, the current
        use."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        if self._has_memory_peak is None:
            self._has_memory_peak = (self._directory_by_controller["memory"] / name).exists()
        if not self._has_memory_peak:
            return self.memory_bytes()
        return self._read_number("memory", name)

    def reset_memory_peak(self) -> None:
        if self.version == 1:
            self._written.pop("memory.max_usage_in_bytes", None)
            self._set("memory", "memory.max_usage_in_bytes", 0, optional=True)

    def oom_kills(self) -> int:
        """Processes that the kernel has killed for lack of memory; 0 where it does not count them."""
        return self._read_field("memory", "memory.events" if self.version == 2 else "memory.oom_control", "oom_kill")

    def _read_number(self, controller: str, file: str) -> int:
        try:
            return int(cgroupfs.read_short(f"{self._path_by_controller[controller]}/{file}"))
        except OSError as error:
            raise self._error(file, error) from error

    def _read_field(self, controller: str, file: str, name: str) -> int:
        """0 where this kernel has no such line or file."""
        try:
            return cgroupfs.read_field(f"{self._path_by_controller[controller]}/{file}", name)
        except OSError as error:
            if error.errno in NOT_SUPPORTED_ERRNOS and self.exists():
                return 0
            raise self._error(file, error) from error

    # ---- processes ----

    def processes(self) -> list[int]:
        """Pids in this group and in those below it. Empty for a removed group."""
        return cgroupfs.processes(self._first())

    def add_processes(self, processes: Iterable[int]) -> None:
        """Move these processes here; those that have ended meanwhile are skipped."""
        for pid in processes:
            for path in self.join_files:
                try:
                    cgroupfs.write(path, str(pid))
                except ProcessLookupError:
                    break
                except OSError as error:
                    raise self._error("cgroup.procs", error, str(pid)) from error

    def freeze(self, *, wait: bool = True) -> None:
        """Freeze its processes until `thaw`. A process that cannot freeze immediately freezes soon; see `is_frozen`."""
        self._set_frozen(self._freezer(), frozen=True)
        for _ in range(FREEZE_POLLS_MAX if wait else 0):
            if self.is_frozen():
                return

    def thaw(self) -> None:
        self._set_frozen(self._freezer(), frozen=False)

    def is_frozen(self) -> bool:
        """Whether all its processes are frozen."""
        if self.version == 2:
            return self._read_field(next(iter(self._directory_by_controller)), "cgroup.events", "frozen") == 1
        try:
            return cgroupfs.read(self._directory_by_controller["freezer"] / "freezer.state").strip() == "FROZEN"
        except OSError as error:
            raise self._error("freezer.state", error) from error

    def _freezer(self) -> Path:
        return self._directory_by_controller["freezer"] if self.version == 1 else self._first()

    def _set_frozen(self, group: Path, *, frozen: bool) -> None:
        """Written even if unchanged: `kill` of a group above thaws those below it."""
        v1, v2 = ("freezer.state", "FROZEN" if frozen else "THAWED"), ("cgroup.freeze", str(int(frozen)))
        file, value = v1 if self.version == 1 else v2
        try:
            cgroupfs.write(group / file, value)
        except OSError as error:
            raise self._error(file, error, value) from error

    def signal_all(self, signum: int) -> None:
        """Send a signal once to every process of the group and of those below it. A frozen one gets it when thawed."""
        for pid in self._all_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def try_kill(self) -> bool:
        """Kill all processes without waiting. Returns True if none is left. In version 1 a frozen group above must be
        thawed first."""
        if not self._all_processes():
            return True
        if self.version == 1 or not self._kill_by_kernel():
            self._kill_each()
        return not self._all_processes()

    def _kill_by_kernel(self) -> bool:
        """Version 2 since Linux 5.14: all at once, forks included."""
        try:
            cgroupfs.write(self._first() / "cgroup.kill", "1")
        except OSError:
            return False
        return True

    def _kill_each(self) -> None:
        if self.version == 1 and "freezer" not in self._directory_by_controller:
            self.signal_all(signal.SIGKILL)
            return
        # Frozen processes neither fork nor exit while they are signalled, so no process id is reused. One that is
        # frozen, by this group or by one below, dies when thawed. A group may have been removed meanwhile.
        with contextlib.suppress(ManagerError):
            self.freeze()
        self.signal_all(signal.SIGKILL)
        for below in cgroupfs.walk(self._freezer()):
            with contextlib.suppress(ManagerError):
                self._set_frozen(below, frozen=False)

    def kill(self) -> None:
        """Kill until nothing is left. Blocks."""
        deadline = time.monotonic() + KILL_S_MAX
        while not self.try_kill():
            if time.monotonic() > deadline:
                raise ManagerError(
                    f"processes {self._all_processes()[:8]} of control group {self._first()} could not be killed in "
                    f"{KILL_S_MAX:.0f} s: they hang in the kernel, or a group above is frozen"
                )
            time.sleep(KILL_PAUSE_S)

    def _all_processes(self) -> list[int]:
        """Like `processes`, with those that are in some of the hierarchies only."""
        pids_by_directory = (cgroupfs.processes(directory) for directory in self._directories())
        return list(dict.fromkeys(pid for pids in pids_by_directory for pid in pids))


# ---- owners -------------------------------------------------------------------------------------------------------


def create_owner_cgroup(name: str) -> Cgroup:
    """The group `tangram/<name>`, which may exist, at the place of this machine where groups may be created; groups
    below it can have all controllers."""
    for attempt in range(CREATE_ATTEMPTS_MAX):
        group = _owner_cgroup(name)
        try:
            top = Cgroup(
                group.version, {key: path.parent.parent for key, path in group._directory_by_controller.items()}
            ).child(ROOT_GROUP_NAME)
            top.delegate()
            top.child(name)
            group.delegate()
            return group
        except ManagerError:
            if attempt == CREATE_ATTEMPTS_MAX - 1:
                raise
    raise AssertionError("unreachable")


def remove_owner_cgroup(name: str) -> None:
    """Remove `tangram/<name>` with all groups and processes below it, if it exists. Its owner must be dead."""
    _owner_cgroup(name).remove()


def _owner_cgroup(name: str) -> Cgroup:
    assert OWNER_GROUP_NAME.fullmatch(name), f"invalid owner name: {name!r}"
    hierarchies = find_hierarchies()
    return Cgroup(
        hierarchies.version,
        {key: path / ROOT_GROUP_NAME / name for key, path in writable_directories(hierarchies).items()},
        depth=0,
    )


def _clamp(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)
