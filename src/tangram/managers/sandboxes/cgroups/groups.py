"""Control groups, version 1 and 2 behind one interface: who may use how much CPU, memory and how many processes.

Owns the groups below `tangram/<owner>` in every hierarchy, and removes no other. Decides nothing: amounts come from
grants. Promises that a group whose `kill` has returned holds no process, whatever forked meanwhile, and that `remove`
leaves nothing behind.

Version 1 has a directory per controller, version 2 one for all; a Group hides which. It keeps no file open. An amount
that it has written last is not written again, so the amounts of one group are set through one Group.
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
from tangram.managers.sandboxes.cgroups.hierarchies import CPUSET, find_hierarchies, place
from tangram.managers.sandboxes.machine import parse_list

TOP = "tangram"
"""The group whose children are owners."""
OWNER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

PERIOD_US = 50_000
"""Of the CPU quota. A millisecond loses a third to bookkeeping; a tenth of a second is felt by short commands."""
QUOTA_MIN_US = 1_000
"""The least that the kernel takes."""
WEIGHT_PER_CORE_V1, WEIGHT_MIN_V1, WEIGHT_MAX_V1 = 1024, 2, 262_144
WEIGHT_PER_CORE_V2, WEIGHT_MIN_V2, WEIGHT_MAX_V2 = 100, 1, 10_000
"""What the kernel gives a group of its own accord is taken as that of one reserved core; and what it takes at all."""
FREEZE_LOOKS_MAX = 50
"""Standing still takes some microseconds, which are waited for; who waits for CPU quota stops when it would run."""
KILL_PAUSE_S = 0.002
KILL_S_MAX = 10.0
"""Killing is repeated until nothing is left: a process may be in the middle of a system call or of an exit."""
ABSENT = (errno.ENOENT, errno.EOPNOTSUPP)
"""What the kernel says of a limit that it was built or started without."""
MAKE_TRIES_MAX = 10
"""An owner that leaves takes the empty TOP along, perhaps just when another comes."""


class Group:
    """One group, in all hierarchies that it needs."""

    def __init__(self, version: int, directories: dict[str, Path], depth: int | None = None) -> None:
        self.version = version
        self._at = directories
        """By controller; in version 2 all are the same."""
        self._text = {controller: str(directory) for controller, directory in directories.items()}
        """The same: making a path of two takes longer than reading what is there."""
        self._keeps_peak: bool | None = None
        self._depth = depth
        """Below `tangram/<owner>`, which is 0. None: it is not ours to remove."""
        self._written: dict[str, str] = {}

    # ---- making and removing ----

    def child(self, name: str, controllers: Iterable[str] = ()) -> Group:
        """A group below this one, which may exist; with the given controllers that this one has, or with all."""
        wanted = [controller for controller in controllers if controller in self._at] or list(self._at)
        depth = None if self._depth is None else self._depth + 1
        found = Group(self.version, {controller: self._at[controller] / name for controller in wanted}, depth)
        made: list[Path] = []
        try:
            for directory in found._directories():
                with contextlib.suppress(FileExistsError):
                    directory.mkdir()
                    made.append(directory)
            if self.version == 1 and CPUSET in found._at:
                cgroupfs.fill_cpuset(found._at[CPUSET])
        except OSError as error:
            for directory in made:
                with contextlib.suppress(OSError):
                    directory.rmdir()
            raise ManagerError(f"control group {name} cannot be made: {error}") from error
        return found

    def part(self, controllers: Iterable[str]) -> Group:
        """This group in some of its hierarchies only: for joining it there."""
        return Group(self.version, {name: self._at[name] for name in controllers if name in self._at})

    def delegate(self) -> None:
        """Version 2: let groups below have the controllers. Only a group without processes of its own can."""
        if self.version == 2:
            try:
                cgroupfs.enable(self._first(), list(self._at))
            except OSError as error:
                raise ManagerError(f"control group {self._first()} cannot have children: {error.strerror}") from error

    def remove(self) -> None:
        """With everything below it, and whatever runs there. Blocks meanwhile."""
        assert self._depth is not None, f"{self._first()} is not ours to remove"
        self.kill()
        for directory in self._directories():
            try:
                cgroupfs.remove(directory)
            except OSError as error:
                raise ManagerError(f"control group {directory} cannot be removed: {error}") from error
            if self._depth == 0:
                with contextlib.suppress(OSError):
                    directory.parent.rmdir()  # TOP, unless it has other owners

    def exists(self) -> bool:
        return any(directory.exists() for directory in self._directories())

    def children(self) -> list[str]:
        """Names of the groups directly below, in whichever hierarchy; sorted."""
        found: set[str] = set()
        for directory in self._directories():
            with contextlib.suppress(OSError):
                found.update(entry.name for entry in directory.iterdir() if entry.is_dir())
        return sorted(found)

    @property
    def join_files(self) -> list[str]:
        """A process that writes 0 to each of these, in this order, is in the group with all that it forks from then
        on. One that was interrupted is found by its first step."""
        return [str(directory / "cgroup.procs") for directory in self._directories()]

    def _directories(self) -> list[Path]:
        return list(dict.fromkeys(self._at.values()))

    def _first(self) -> Path:
        return next(iter(self._at.values()))

    # ---- amounts ----

    def set_cpu(self, *, reserved: int, limit: int) -> None:
        """Milli-cores: what it gets when others want CPU too, and the most that it ever gets."""
        self.set_weight(reserved)
        quota = max(QUOTA_MIN_US, limit * PERIOD_US // CORE)
        if self.version == 2:
            self._set("cpu", "cpu.max", f"{quota} {PERIOD_US}")
        else:
            self._set("cpu", "cpu.cfs_period_us", PERIOD_US)
            self._set("cpu", "cpu.cfs_quota_us", quota)

    def set_weight(self, reserved: int) -> None:
        """Of a sandbox: as much as its running actions have together."""
        if self.version == 2:
            weight = _within(reserved * WEIGHT_PER_CORE_V2 // CORE, WEIGHT_MIN_V2, WEIGHT_MAX_V2)
            self._set("cpu", "cpu.weight", weight)
        else:
            weight = _within(reserved * WEIGHT_PER_CORE_V1 // CORE, WEIGHT_MIN_V1, WEIGHT_MAX_V1)
            self._set("cpu", "cpu.shares", weight)

    def set_cpus(self, cpus: Iterable[int]) -> bool:
        """On which CPUs it runs, now and from now on. False: this group cannot say so; set the affinity of each
        process instead."""
        if CPUSET not in self._at:
            return False
        wanted = sorted(set(cpus))
        assert wanted, "a group without any CPU cannot run"
        self._set(CPUSET, "cpuset.cpus", ",".join(map(str, wanted)))
        return True

    def set_bounds(self, *, limit: int, cpus: Iterable[int]) -> None:
        """Of an owner: what all below it share. In version 1 no group may have more than the one above it, and those
        of an owner that was there before may: they are made to fit first. No action runs meanwhile."""
        wanted = sorted(set(cpus))
        if self.version == 1:
            for below in [*cgroupfs.tree(self._at["cpu"])][1:]:
                self._fit(below / "cpu.cfs_quota_us", "-1")
            if CPUSET in self._at:
                top, *rest = cgroupfs.tree(self._at[CPUSET])
                now = parse_list(cgroupfs.read(top / "cpuset.cpus"))
                either = ",".join(map(str, sorted({*now, *wanted})))
                only = ",".join(map(str, wanted))
                for group, text in [(each, either) for each in (top, *rest)] + [(each, only) for each in rest[::-1]]:
                    self._fit(group / "cpuset.cpus", text)
        self.set_cpu(reserved=CORE, limit=limit)
        self.set_cpus(wanted)

    def _fit(self, path: Path, text: str) -> None:
        try:
            cgroupfs.write(path, text)
        except FileNotFoundError:
            pass  # its sandbox is going
        except OSError as error:
            raise ManagerError(f"{path}: the kernel refuses {text!r}: {error.strerror}") from error

    def set_memory(self, limit_bytes: int) -> None:
        """Beyond it the kernel kills a process of the group. Swap does not count as more memory."""
        if self.version == 2:
            self._set("memory", "memory.max", limit_bytes)
            self._set("memory", "memory.swap.max", 0, optional=True)
        else:
            self._set("memory", "memory.limit_in_bytes", limit_bytes)
            self._set("memory", "memory.memsw.limit_in_bytes", limit_bytes, optional=True)

    def set_processes_max(self, count: int) -> None:
        self._set("pids", "pids.max", count)

    def _set(self, controller: str, file: str, value: int | str, *, optional: bool = False) -> None:
        """Optional is what some kernels are built without."""
        text = str(value)
        if self._written.get(file) == text:
            return
        self._written.pop(file, None)
        try:
            cgroupfs.write(f"{self._text[controller]}/{file}", text)
        except OSError as error:
            if not (optional and error.errno in ABSENT and self.exists()):
                raise self._failed(file, error, text) from error
        self._written[file] = text

    def _failed(self, file: str, error: OSError, value: str = "") -> ManagerError:
        what = f"{file} of control group {self._first()}"
        if not self.exists():
            return ManagerError(f"{what}: the group is gone")
        return ManagerError(f"{what}: the kernel refuses {value!r}: {error.strerror}" if value else f"{what}: {error}")

    # ---- what was used ----

    def cpu_s(self) -> float:
        if self.version == 2:
            return self._field("cpu", "cpu.stat", "usage_usec") / 1e6
        return self._number("cpuacct", "cpuacct.usage") / 1e9

    def throttled_s(self) -> float:
        """Seconds in which it wanted CPU beyond its limit."""
        if self.version == 2:
            return self._field("cpu", "cpu.stat", "throttled_usec") / 1e6
        return self._field("cpu", "cpu.stat", "throttled_time") / 1e9

    def memory_bytes(self) -> int:
        return self._number("memory", "memory.current" if self.version == 2 else "memory.usage_in_bytes")

    def memory_peak_bytes(self) -> int:
        """The most so far, or since `forget_memory_peak` where the kernel can forget; where it keeps none, what is
        used now."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        if self._keeps_peak is None:
            self._keeps_peak = (self._at["memory"] / name).exists()
        if not self._keeps_peak:
            return self.memory_bytes()
        return self._number("memory", name)

    def forget_memory_peak(self) -> None:
        if self.version == 1:
            self._written.pop("memory.max_usage_in_bytes", None)
            self._set("memory", "memory.max_usage_in_bytes", 0, optional=True)

    def memory_kills(self) -> int:
        """How many of its processes the kernel has killed for want of memory; 0 where it does not count them."""
        return self._field("memory", "memory.events" if self.version == 2 else "memory.oom_control", "oom_kill")

    def _number(self, controller: str, file: str) -> int:
        try:
            return int(cgroupfs.read_short(f"{self._text[controller]}/{file}"))
        except OSError as error:
            raise self._failed(file, error) from error

    def _field(self, controller: str, file: str, name: str) -> int:
        """0 where this kernel has no such line or file."""
        try:
            return cgroupfs.field(f"{self._text[controller]}/{file}", name)
        except OSError as error:
            if error.errno in ABSENT and self.exists():
                return 0
            raise self._failed(file, error) from error

    # ---- processes ----

    def processes(self) -> list[int]:
        """Of this group and of those below it. Empty for a group that is gone."""
        return cgroupfs.processes(self._first())

    def adopt(self, processes: Iterable[int]) -> None:
        """Move these processes here; those that have ended meanwhile are gone."""
        for pid in processes:
            for path in self.join_files:
                try:
                    cgroupfs.write(path, str(pid))
                except ProcessLookupError:
                    break
                except OSError as error:
                    raise self._failed("cgroup.procs", error, str(pid)) from error

    def freeze(self, *, wait: bool = True) -> None:
        """None of its processes runs until `thaw`. Who cannot stop at once stops soon; `frozen` says when."""
        self._steer(self._freezer(), frozen=True)
        for _ in range(FREEZE_LOOKS_MAX if wait else 0):
            if self.frozen():
                return

    def thaw(self) -> None:
        self._steer(self._freezer(), frozen=False)

    def frozen(self) -> bool:
        """Whether all its processes stand still."""
        if self.version == 2:
            return self._field(next(iter(self._at)), "cgroup.events", "frozen") == 1
        try:
            return cgroupfs.read(self._at["freezer"] / "freezer.state").strip() == "FROZEN"
        except OSError as error:
            raise self._failed("freezer.state", error) from error

    def _freezer(self) -> Path:
        return self._at["freezer"] if self.version == 1 else self._first()

    def _steer(self, group: Path, *, frozen: bool) -> None:
        """Never left out as already written: who kills a group thaws those below it."""
        v1, v2 = ("freezer.state", "FROZEN" if frozen else "THAWED"), ("cgroup.freeze", str(int(frozen)))
        file, value = v1 if self.version == 1 else v2
        try:
            cgroupfs.write(group / file, value)
        except OSError as error:
            raise self._failed(file, error, value) from error

    def signal_all(self, signum: int) -> None:
        """Send a signal once to every process of the group and of those below it. Who is frozen gets it when thawed."""
        for pid in self._everyone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def kill_round(self) -> bool:
        """Kill all that is there, and wait for nothing. True: nothing is left. In version 1 a group above that is
        frozen must be thawed first."""
        if not self._everyone():
            return True
        if self.version == 1 or not self._killed_by_kernel():
            self._kill_each()
        return not self._everyone()

    def _killed_by_kernel(self) -> bool:
        """Version 2 since Linux 5.14: all at once, forks included."""
        try:
            cgroupfs.write(self._first() / "cgroup.kill", "1")
        except OSError:
            return False
        return True

    def _kill_each(self) -> None:
        if self.version == 1 and "freezer" not in self._at:
            self.signal_all(signal.SIGKILL)
            return
        # Standing still, nobody forks while being counted, and nobody ends and leaves its number to another. Who is
        # frozen, by this group or by one below, dies when thawed. A group may be gone before its turn.
        with contextlib.suppress(ManagerError):
            self.freeze()
        self.signal_all(signal.SIGKILL)
        for below in cgroupfs.tree(self._freezer()):
            with contextlib.suppress(ManagerError):
                self._steer(below, frozen=False)

    def kill(self) -> None:
        """Until nothing is left. Blocks meanwhile."""
        deadline = time.monotonic() + KILL_S_MAX
        while not self.kill_round():
            if time.monotonic() > deadline:
                raise ManagerError(
                    f"processes {self._everyone()[:8]} of control group {self._first()} could not be killed in "
                    f"{KILL_S_MAX:.0f} s: they hang in the kernel, or a group above is frozen"
                )
            time.sleep(KILL_PAUSE_S)

    def _everyone(self) -> list[int]:
        """As `processes`, with those that are in some of the hierarchies only."""
        found = (cgroupfs.processes(directory) for directory in self._directories())
        return list(dict.fromkeys(pid for pids in found for pid in pids))


# ---- owners -------------------------------------------------------------------------------------------------------


def owner_root(name: str) -> Group:
    """The group `tangram/<name>`, which may exist, in the place of this machine where groups may be made; groups below
    it can have all controllers."""
    for attempt in range(MAKE_TRIES_MAX):
        group = _owner(name)
        try:
            top = Group(group.version, {key: path.parent.parent for key, path in group._at.items()}).child(TOP)
            top.delegate()
            top.child(name)
            group.delegate()
            return group
        except ManagerError:
            if attempt == MAKE_TRIES_MAX - 1:
                raise
    raise AssertionError("unreachable")


def remove_owner(name: str) -> None:
    """Remove `tangram/<name>` with all that is below it and runs there, if it exists. It must be dead."""
    _owner(name).remove()


def owners() -> list[str]:
    """The names for which `tangram/<name>` exists, dead or alive; sorted."""
    found: set[str] = set()
    for directory in place(find_hierarchies()).values():
        with contextlib.suppress(FileNotFoundError):
            found.update(entry.name for entry in (directory / TOP).iterdir() if entry.is_dir())
    return sorted(found)


def _owner(name: str) -> Group:
    assert OWNER_NAME.fullmatch(name), f"an owner cannot be called {name!r}"
    found = find_hierarchies()
    return Group(found.version, {key: path / TOP / name for key, path in place(found).items()}, depth=0)


def _within(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)
