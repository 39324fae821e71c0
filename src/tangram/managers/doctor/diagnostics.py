"""Diagnostics: what this machine supports for managers, what is missing, and how to install it.

Owns the list of components and their findings. Tries a feature rather than comparing version numbers: it creates and
removes a control group, enters a namespace, mounts an overlay, each where no other process sees it. Promises to leave
the machine as it was, and to report every failure as a Finding rather than raise it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import pwd
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tangram.errors import ManagerError, TangramError
from tangram.files.lock import is_locked
from tangram.managers.doctor import kernel_probes
from tangram.managers.http import BlockingHttpClient
from tangram.managers.sandboxes.bwrap.images.store import FREE_BYTES_MIN, MOUNT_FORBIDDEN_CHARACTERS, SANDBOX_UID
from tangram.managers.sandboxes.bwrap.manager import PROGRAMS
from tangram.managers.sandboxes.bwrap.owner import SPAWNER_LOCK, state_directory
from tangram.managers.sandboxes.bwrap.seccomp import filter_program
from tangram.managers.sandboxes.cgroups import cgroupfs
from tangram.managers.sandboxes.cgroups.hierarchies import (
    CPUSET,
    OWN_CGROUP_FILE,
    OWNER_LEAF,
    REMEDY_V1,
    REMEDY_V2,
    CgroupHierarchies,
    find_hierarchies,
    read_cgroup_paths,
    writable_directories,
)
from tangram.managers.sandboxes.machine import available_memory_bytes, meminfo_bytes, numa_cells
from tangram.managers.work import GIB, MIB
from tangram.processes.isolated import isolated_argv
from tangram.processes.run_program import run_program

OK, LIMITED, MISSING = "ok", "limited", "missing"
SANDBOX, DOCKER, PROCESS = "sandbox", "docker", "process"

PROGRAM_S = 1.0
"""Time for a program to print its version. A machine with many devices may need longer; its version is then unknown."""
KERNEL_PROBES_S_MAX = 20.0
"""Time limit for all probes. They take a tenth of a second; on an emulated machine seconds."""
ENGINE_S = 1.0
DOCKER_SOCKET = "/var/run/docker.sock"
BUBBLEWRAP_MIN = (0, 7)
"""Version of bubblewrap that introduced --size, which limits the shared memory of a sandbox."""
OPEN_FILES_ENOUGH = 4096
"""Descriptors for hundreds of sandboxes: a running action takes about ten, an open sandbox a few."""

TEST_SETTINGS_V1 = {
    "cpu": ("cpu.cfs_quota_us", "50000"),
    "cpuacct": ("cpuacct.usage", "0"),
    "memory": ("memory.limit_in_bytes", str(64 * MIB)),
    "pids": ("pids.max", "16"),
    "freezer": ("freezer.state", "FROZEN"),
    CPUSET: ("cpuset.cpus", "{cpu}"),
}
TEST_SETTINGS_V2 = {
    "cpu": ("cpu.max", "50000 100000"),
    "memory": ("memory.max", str(64 * MIB)),
    "pids": ("pids.max", "16"),
    "freezer": ("cgroup.freeze", "1"),
    CPUSET: ("cpuset.cpus", "{cpu}"),
}
"""Values that are set in a group without processes, to test that they can be set."""

USER_NAMESPACE_SETTINGS = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "15000"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}
"""Files below /proc/sys that exist only on some kernels, with the value that forbids user namespaces, and one
that allows them."""


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True):
    """The finding about one component."""

    component: str
    state: str
    """`ok`, `limited` (something works less well) or `missing`."""
    found: str
    to_do: str = ""
    """How to install what is missing."""
    needed_by: tuple[str, ...] = ()
    """Backends that require it."""
    package: str = ""
    """The package of Debian and Ubuntu that contains it."""


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: tuple[Diagnostic, ...]

    def unavailable_reason(self, backend: str) -> str:
        """What prevents the use of a backend; empty if nothing does."""
        lacking = [finding for finding in self.findings if finding.state == MISSING and backend in finding.needed_by]
        return "; ".join(f"{finding.component}: {finding.found}" for finding in lacking)

    @property
    def install_command(self) -> str:
        """The command that installs all missing packages; empty if there is none."""
        packages = dict.fromkeys(
            finding.package for finding in self.findings if finding.state == MISSING and finding.package
        )
        return f"{sudo_prefix()}apt-get install -y {' '.join(packages)}" if packages else ""


def sudo_prefix() -> str:
    """The prefix of a command that needs root."""
    return "" if os.geteuid() == 0 else "sudo "


def diagnose(state: Path | None = None) -> MachineReport:
    """Diagnoses all components, in the order in which they depend on each other. Takes a fraction of a second."""
    checks: list[tuple[str, Callable[[], Diagnostic | list[Diagnostic]]]] = [
        ("python", _python),
        ("kernel", _kernel),
        ("user", _user),
        ("cgroups", _control_groups),
        ("namespaces", _kernel_features),
        ("programs", lambda: [_program(name, package) for name, package in PROGRAMS.items()]),
        ("state directory", lambda: _state(state or state_directory())),
        ("open files", _open_files),
        ("cores", _cores),
        ("NUMA nodes", _numa),
        ("memory", _memory),
        ("swap", _swap),
        ("devices", _devices),
        ("docker engine", _docker),
    ]
    return MachineReport(findings=tuple([finding for check in checks for finding in _run_check(*check)]))


def _run_check(component: str, check: Callable[[], Diagnostic | list[Diagnostic]]) -> list[Diagnostic]:
    """Converts an exception during an examination into a finding, so that the other components are still reported."""
    try:
        diagnostic = check()
    except (OSError, ValueError, TangramError) as error:
        diagnostic = Diagnostic(component=component, state=LIMITED, found=f"cannot be examined: {error}")
    return diagnostic if isinstance(diagnostic, list) else [diagnostic]


def _missing(component: str, result: str, to_do: str) -> Diagnostic:
    """A feature that sandboxes need. Only root can test whether root may use it."""
    if os.geteuid() != 0:
        return Diagnostic(component=component, state=LIMITED, found=result, to_do="run it again as root")
    return Diagnostic(component=component, state=MISSING, found=result, to_do=to_do, needed_by=(SANDBOX,))


# ---- kernel and user ------------------------------------------------------------------------------------------------


def _python() -> Diagnostic:
    return Diagnostic(component="python", state=OK, found=f"{platform.python_version()} ({sys.executable})")


def _kernel() -> Diagnostic:
    names = os.uname()
    return Diagnostic(component="kernel", state=OK, found=f"{names.sysname} {names.release} {names.machine}")


def _user() -> Diagnostic:
    user = os.geteuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = "without a name"
    if user == 0:
        return Diagnostic(component="user", state=OK, found="root", needed_by=(SANDBOX,))
    return Diagnostic(
        component="user",
        state=MISSING,
        found=f"{name} ({user}), not root",
        to_do="sandboxes need root: use sudo; `--backend process` works without root, and isolates nothing",
        needed_by=(SANDBOX,),
    )


# ---- control groups -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def restoring_cgroups() -> Iterator[None]:
    """Undoes what creating version 2 groups changed above them: controllers that were enabled for it, and the move of
    this process into a leaf. The kernel refuses to disable a controller that is in use meanwhile."""
    hierarchies = find_hierarchies()
    mount = hierarchies.by_controller.get("cpu") if hierarchies.version == 2 else None
    if mount is None:
        yield
        return
    own = _own_cgroup(mount)
    places = list(dict.fromkeys([mount, own]))
    before = {group: _enabled_controllers(group) for group in places}
    try:
        yield
    finally:
        for group in places:
            for name in _enabled_controllers(group):
                if name not in before[group]:
                    with contextlib.suppress(OSError):
                        cgroupfs.write(group / "cgroup.subtree_control", f"-{name}")
        if _own_cgroup(mount) == own / OWNER_LEAF:
            with contextlib.suppress(OSError):
                cgroupfs.write(own / "cgroup.procs", str(os.getpid()))
                (own / OWNER_LEAF).rmdir()


def _own_cgroup(mount: Path) -> Path:
    return mount / read_cgroup_paths(OWN_CGROUP_FILE).get("", "/").lstrip("/")


def _enabled_controllers(group: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return cgroupfs.read(group / "cgroup.subtree_control").split()
    return []


def _control_groups() -> list[Diagnostic]:
    with restoring_cgroups():
        return _all_controllers(find_hierarchies())


def _all_controllers(hierarchies: CgroupHierarchies) -> list[Diagnostic]:
    to_do = REMEDY_V1 if hierarchies.version == 1 else REMEDY_V2
    try:
        at = hierarchies.by_controller if hierarchies.version == 1 else writable_directories(hierarchies)
        reason = "" if at else "none are mounted"
    except (ManagerError, OSError) as error:
        at, reason = {}, str(error).removesuffix(to_do).rstrip(". ")
    if reason:
        return [_missing("cgroups", reason, to_do)]
    where = os.path.commonpath([*at.values()])
    diagnostic = Diagnostic(
        component="cgroups", state=OK, found=f"version {hierarchies.version} at {where}", needed_by=(SANDBOX,)
    )
    return [diagnostic, *(_controller(hierarchies, name, at, to_do) for name in _test_settings(hierarchies))]


def _test_settings(hierarchies: CgroupHierarchies) -> dict[str, tuple[str, str]]:
    return TEST_SETTINGS_V1 if hierarchies.version == 1 else TEST_SETTINGS_V2


def _controller(hierarchies: CgroupHierarchies, name: str, at: dict[str, Path], to_do: str) -> Diagnostic:
    component = f"cgroup {name}"
    # Version 2 has the freezer built in.
    above = at.get("cpu" if hierarchies.version == 2 and name == "freezer" else name)
    reason = (
        "the machine does not offer it" if above is None else _try_cgroup(above, *_test_settings(hierarchies)[name])
    )
    if not reason:
        needed_by = () if name == CPUSET else (SANDBOX,)
        return Diagnostic(component=component, state=OK, found=f"works at {above}", needed_by=needed_by)
    if name == CPUSET and os.geteuid() == 0:
        to_do = "nothing: CPUs are set as the affinity of each process, which it can change"
        return Diagnostic(component=component, state=LIMITED, found=reason, to_do=to_do)
    return _missing(component, reason, to_do)


def _try_cgroup(above: Path, file: str, value: str) -> str:
    """Create a group, set a value in it, remove it. Returns the reason of a failure, or an empty string."""
    group = above / f"tangram-doctor-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        return f"no group can be created in {above}: {error.strerror}"
    try:
        if file == "cpuset.cpus" and (group / "cpuset.mems").exists() and (group / "cgroup.clone_children").exists():
            cgroupfs.inherit_cpuset(group)
        cgroupfs.write(group / file, value.format(cpu=min(os.sched_getaffinity(0))))
    except OSError as error:
        return f"{file} cannot be set: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            cgroupfs.remove(group)
    return ""


# ---- probes in child processes --------------------------------------------------------------------------------------


def _kernel_features() -> list[Diagnostic]:
    try:
        code, no_filter = filter_program().hex(), ""
    except ManagerError as error:
        code, no_filter = "", str(error)
    reasons = _run_kernel_probes(code)
    reasons.setdefault("seccomp", no_filter)
    spaces = {name: why for name, why in reasons.items() if name not in ("user", "tmpfs", "overlay", "seccomp")}
    failed = {name: why for name, why in spaces.items() if why}
    container = "if this runs in a container, it must be privileged"
    return [
        _kernel_feature(
            "namespaces", ", ".join(spaces), "; ".join(f"{name}: {why}" for name, why in failed.items()), container
        ),
        _user_namespaces(reasons["user"]),
        _kernel_feature("tmpfs", "mounted", reasons["tmpfs"], container),
        _kernel_feature("overlayfs", "mounted over tmpfs", reasons["overlay"], f"modprobe overlay; {container}"),
        _kernel_feature(
            "seccomp",
            f"a filter of {len(code) // 16} instructions was installed",
            reasons["seccomp"],
            "a kernel with CONFIG_SECCOMP_FILTER",
        ),
    ]


def _run_kernel_probes(code: str) -> dict[str, str]:
    """The reason of failure by the name of the probe."""
    request = {"user": SANDBOX_UID, "filter": code, "folder": tempfile.gettempdir()}
    argv = isolated_argv(kernel_probes.__name__)
    try:
        result = run_program(argv, request=json.dumps(request).encode(), seconds=KERNEL_PROBES_S_MAX)
        if result.code == 0:
            return msgspec.json.decode(result.stdout, type=dict[str, str])
        reason = result.failure
    except (OSError, msgspec.MsgspecError) as error:
        reason = str(error)
    return dict.fromkeys(("mount", "user", "tmpfs", "overlay", "seccomp"), f"could not be tried: {reason}")


def _kernel_feature(component: str, works: str, reason: str, to_do: str) -> Diagnostic:
    """The kernel features that every sandbox needs."""
    if reason:
        return _missing(component, reason, to_do)
    return Diagnostic(component=component, state=OK, found=works, needed_by=(SANDBOX,))


def _user_namespaces(reason: str) -> Diagnostic:
    settings = _user_namespace_settings()
    details = "".join(f", {name.replace('/', '.')} {value}" for name, value in settings.items())
    if not reason:
        return Diagnostic(component="user namespaces", state=OK, found=f"work for unprivileged users{details}")
    commands = [
        f"{sudo_prefix()}sysctl {name.replace('/', '.')}={good}"
        for name, (bad, good) in USER_NAMESPACE_SETTINGS.items()
        if settings.get(name) == bad
    ]
    to_do = "; ".join(commands) or "if this runs in a container, it must allow them"
    return Diagnostic(
        component="user namespaces",
        state=LIMITED,
        found=f"{reason}{details}",
        to_do=f"sandboxes with user=root need them: {to_do}",
    )


def _user_namespace_settings() -> dict[str, str]:
    programs = {}
    for name in USER_NAMESPACE_SETTINGS:
        with contextlib.suppress(OSError):
            programs[name] = (Path("/proc/sys") / name).read_text(encoding="ascii").strip()
    return programs


# ---- programs -----------------------------------------------------------------------------------------------------


def _program(name: str, package: str) -> Diagnostic:
    path = shutil.which(name)
    # A package may have another name than its program, and users know the package.
    component = name if name in ("catatonit", "setpriv", "cp") else package
    install = f"{sudo_prefix()}apt-get install -y {package}"
    if path is None:
        return Diagnostic(
            component=component,
            state=MISSING,
            found=f"no program {name}",
            to_do=install,
            needed_by=(SANDBOX,),
            package=package,
        )
    details = _program_output(path, "--version").partition("\n")[0]
    number = re.search(r"\d+(\.\d+)+", details)
    version = number[0] if number else "of unknown version"
    if name == "bwrap" and number and _parse_version(number[0]) < BUBBLEWRAP_MIN:
        least = ".".join(map(str, BUBBLEWRAP_MIN))
        return Diagnostic(
            component=component,
            state=MISSING,
            found=f"{version} ({path}) is too old",
            to_do=f"{least} or later: Debian 12, Ubuntu 24.04",
            needed_by=(SANDBOX,),
        )
    return Diagnostic(component=component, state=OK, found=f"{version} ({path})", needed_by=(SANDBOX,))


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _program_output(*argv: str) -> str:
    """The output of a program; empty if it fails or takes too long."""
    try:
        result = run_program(argv, seconds=PROGRAM_S)
    except OSError:
        return ""
    return result.stdout.decode(errors="replace").strip() if result.code == 0 else ""


# ---- the state directory and limits -------------------------------------------------------------------------------


def _state(state: Path) -> Diagnostic:
    component = "state directory"
    existing = next(path for path in (state, *state.absolute().parents) if os.path.exists(path))
    problem = ""
    if any(character in str(state) for character in MOUNT_FORBIDDEN_CHARACTERS):
        problem = "its path has a character that is special in mount options (':', ',' or '\\')"
    elif not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} may not be written"
    if problem:
        return _missing(component, f"{state}: {problem}", "choose another directory with TANGRAM_STATE=DIR")
    free = shutil.disk_usage(existing).free
    details = (
        f"{state}{'' if existing == state else ' (will be created)'}, {_format_size(free)} free{_leftovers(state)}"
    )
    if free < FREE_BYTES_MIN:
        to_do = f"images of other machines need {_format_size(FREE_BYTES_MIN)} free: make room, or TANGRAM_STATE=DIR"
        return Diagnostic(component=component, state=LIMITED, found=details, to_do=to_do, needed_by=(SANDBOX,))
    return Diagnostic(component=component, state=OK, found=details, needed_by=(SANDBOX,))


def _leftovers(state: Path) -> str:
    """Describes what dead owners left behind. Takes no lock that an owner needs."""
    dead = kept = living = 0
    try:
        for directory in (state / "owners").iterdir():
            if is_locked(directory / "lock"):
                living += 1
            elif is_locked(directory / SPAWNER_LOCK):
                kept += 1
            else:
                dead += 1
    except OSError:
        return ""
    details = f", {living} in use" if living else ""
    details += f", {kept} with sandboxes that the next start of their service adopts" if kept else ""
    return details + (f", {dead} left by dead owners, which the next start removes" if dead else "")


def _open_files() -> Diagnostic:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_text, hard_text = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    details = f"{soft_text}, can be raised to {hard_text}"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_ENOUGH:
        to_do = f"for hundreds of sandboxes: ulimit -n {OPEN_FILES_ENOUGH}"
        return Diagnostic(component="open files", state=LIMITED, found=details, to_do=to_do)
    return Diagnostic(component="open files", state=OK, found=details)


# ---- resources ------------------------------------------------------------------------------------------------------


def _cores() -> Diagnostic:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    details = f"{usable} of {total}"
    quota = _cpu_quota()
    if quota is not None and quota < usable:
        to_do = f"this process has a quota: connect(cores={quota:g})"
        return Diagnostic(component="cores", state=LIMITED, found=f"{details}, quota {quota:g}", to_do=to_do)
    return Diagnostic(component="cores", state=OK, found=details if quota is None else f"{details}, quota {quota:g}")


def _ancestor_cgroups(controller: str) -> list[Path]:
    """The visible groups that contain this process, from the top."""
    hierarchies = find_hierarchies()
    mount = hierarchies.by_controller.get(controller)
    if mount is None:
        return []
    path = read_cgroup_paths(OWN_CGROUP_FILE).get("" if hierarchies.version == 2 else controller, "/")
    parts = [part for part in path.split("/") if part]
    places = [mount.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    return [place for place in places if place.is_dir()]


def _cpu_quota() -> float | None:
    quotas = []
    for group in _ancestor_cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # the root group has no limit
            if (group / "cpu.max").exists():
                quota, period = cgroupfs.read(group / "cpu.max").split()
            else:
                quota, period = (cgroupfs.read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _numa() -> Diagnostic:
    cells = numa_cells(tuple(sorted(os.sched_getaffinity(0))))
    details = ", ".join(f"{len(cpus)} cores" for cpus in cells.values()) or "the kernel shows none"
    return Diagnostic(component="NUMA nodes", state=OK, found=f"{len(cells) or 1} ({details})")


def _memory() -> Diagnostic:
    total, free = meminfo_bytes("MemTotal") or 0, available_memory_bytes()
    details = f"{_format_size(free)} of {_format_size(total)} available"
    limits = []
    for group in _ancestor_cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(cgroupfs.read(group / name)))
    limit = min(limits, default=total)
    if limit < total:
        to_do = f"this process has a limit: connect(memory='{limit // MIB}MiB') or less"
        return Diagnostic(
            component="memory", state=LIMITED, found=f"{details}, limit {_format_size(limit)}", to_do=to_do
        )
    return Diagnostic(component="memory", state=OK, found=details)


def _swap() -> Diagnostic:
    total = meminfo_bytes("SwapTotal")
    if not total:
        return Diagnostic(component="swap", state=OK, found="none")
    hierarchies = find_hierarchies()
    memory = hierarchies.by_controller.get("memory")
    if hierarchies.version == 1 and memory is not None and not (memory / "memory.memsw.limit_in_bytes").exists():
        to_do = "memory limits of sandboxes do not count it: swapoff -a, or boot with swapaccount=1"
        return Diagnostic(component="swap", state=LIMITED, found=_format_size(total), to_do=to_do)
    return Diagnostic(component="swap", state=OK, found=f"{_format_size(total)}, of which sandboxes get none")


def _format_size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _devices() -> Diagnostic:
    nodes = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dri/renderD*")
    details = _program_output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader") if nodes else ""
    if details:
        lines = details.splitlines()
        return Diagnostic(component="devices", state=OK, found=f"{len(lines)}: {'; '.join(dict.fromkeys(lines))}")
    return Diagnostic(component="devices", state=OK, found=", ".join(sorted(nodes)) or "none")


# ---- Docker -------------------------------------------------------------------------------------------------------


def _docker() -> Diagnostic:
    component, needed_by = "docker engine", (DOCKER,)
    version, reason = _engine_version(DOCKER_SOCKET)
    if not version:
        start = "systemctl start docker" if shutil.which("dockerd") else "apt-get install -y docker.io"
        to_do = f"only for the backend docker: {sudo_prefix()}{start}"
        return Diagnostic(component=component, state=MISSING, found=reason, to_do=to_do, needed_by=needed_by)
    return Diagnostic(component=component, state=OK, found=f"{version} at {DOCKER_SOCKET}", needed_by=needed_by)


def _engine_version(path: str) -> tuple[str, str]:
    """The version of the engine, or the reason why it cannot be used."""
    try:
        _, content = BlockingHttpClient("http://engine", unix_socket=path).request(
            "GET", "/version", timeout_s=ENGINE_S
        )
        return str(json.loads(content)["Version"]), ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return "", f"none answers at {path}: {reason}"
