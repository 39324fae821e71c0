"""The survey: what this machine offers to managers, what is missing, and how to get it.

Owns the list of components and what is said of each. Believes no version number where it can try: a control group is
made and removed, a namespace is entered, an overlay is mounted, each where nobody else sees it. Promises to leave the
machine as it was found, and that whatever goes wrong is a Finding and never an exception.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import http.client
import json
import os
import platform
import pwd
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tangram.errors import ManagerError, TangramError
from tangram.managers.sandboxes.bwrap.images.store import FORBIDDEN, FREE_BYTES_MIN, SANDBOX_UID
from tangram.managers.sandboxes.bwrap.manager import PROGRAMS
from tangram.managers.sandboxes.bwrap.owner import state_directory
from tangram.managers.sandboxes.bwrap.seccomp import filter_program
from tangram.managers.sandboxes.bwrap.spawner.lock import LOCK as SPAWNER_LOCK
from tangram.managers.sandboxes.cgroups import cgroupfs
from tangram.managers.sandboxes.cgroups.hierarchies import (
    CPUSET,
    OWN_GROUP,
    OWNER_LEAF,
    WHAT_TO_DO_V1,
    WHAT_TO_DO_V2,
    Hierarchies,
    find_hierarchies,
    place,
)
from tangram.managers.sandboxes.machine import available_memory_bytes, numa_cells
from tangram.managers.work import GIB, MIB

OK, LIMITED, MISSING = "ok", "limited", "missing"
SANDBOX, DOCKER, PROCESS = "sandbox", "docker", "process"

ATTEMPTS = Path(__file__).with_name("kernel_probes.py")
PROGRAM_S = 1.0
"""For a program to say its version. A machine with many devices takes longer, and is then not asked."""
ATTEMPTS_S = 20.0
"""Together they take a tenth of a second; on an emulated machine seconds."""
ENGINE_S = 1.0
DOCKER_SOCKET = "/var/run/docker.sock"
BUBBLEWRAP_MIN = (0, 7)
"""The first with --size, which bounds the shared memory of a sandbox."""
OPEN_FILES_ENOUGH = 4096
"""A running action takes about ten, an open sandbox a few."""

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
"""What is set in a group without processes, to see that it can be."""

USER_NAMESPACE_SETTINGS = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "15000"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}
"""Below /proc/sys, each where its kernel has it: the value that forbids them, and one that does not."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of one component."""

    component: str
    state: str
    """`ok`, `limited` (something works less well) or `missing`."""
    found: str
    to_do: str = ""
    """How to get what is missing."""
    needed_by: tuple[str, ...] = ()
    """Backends that cannot do without it."""
    package: str = ""
    """Of Debian and Ubuntu, which brings it."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    findings: tuple[Finding, ...]

    def why_not(self, backend: str) -> str:
        """What keeps a backend from being used; empty if nothing does."""
        lacking = [each for each in self.findings if each.state == MISSING and backend in each.needed_by]
        return "; ".join(f"{each.component}: {each.found}" for each in lacking)

    @property
    def install(self) -> str:
        """The command that installs all missing packages; empty if there is none."""
        wanted = dict.fromkeys(each.package for each in self.findings if each.state == MISSING and each.package)
        return f"{as_root()}apt-get install -y {' '.join(wanted)}" if wanted else ""


def as_root() -> str:
    """What stands before a command that needs root."""
    return "" if os.geteuid() == 0 else "sudo "


def survey(state: Path | None = None) -> Survey:
    """All components, in the order in which they build on each other. Takes a fraction of a second."""
    looks: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
        ("python", _python),
        ("kernel", _kernel),
        ("user", _user),
        ("cgroups", _control_groups),
        ("namespaces", _attempted),
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
    return Survey(findings=tuple([finding for look in looks for finding in _looked(*look)]))


def _looked(component: str, look: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    """A machine that does not even show what it has keeps nobody from seeing the rest."""
    try:
        found = look()
    except (OSError, ValueError, TangramError) as error:
        found = Finding(component=component, state=LIMITED, found=f"cannot be looked at: {error}")
    return found if isinstance(found, list) else [found]


def _lacking(component: str, found: str, to_do: str) -> Finding:
    """Something that sandboxes need of the machine. What it would let root do, only root can see."""
    if os.geteuid() != 0:
        return Finding(component=component, state=LIMITED, found=found, to_do="look again as root")
    return Finding(component=component, state=MISSING, found=found, to_do=to_do, needed_by=(SANDBOX,))


# ---- the ground ---------------------------------------------------------------------------------------------------


def _python() -> Finding:
    return Finding(component="python", state=OK, found=f"{platform.python_version()} ({sys.executable})")


def _kernel() -> Finding:
    names = os.uname()
    return Finding(component="kernel", state=OK, found=f"{names.sysname} {names.release} {names.machine}")


def _user() -> Finding:
    user = os.geteuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = "without a name"
    if user == 0:
        return Finding(component="user", state=OK, found="root", needed_by=(SANDBOX,))
    return Finding(
        component="user",
        state=MISSING,
        found=f"{name} ({user}), not root",
        to_do="sandboxes need root: use sudo; `--backend process` does without, and isolates nothing",
        needed_by=(SANDBOX,),
    )


# ---- control groups -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """What making groups of version 2 changes above them is undone: controllers that were enabled for their sake, and
    the step of this process into a leaf. The kernel refuses to take a controller from whoever uses it meanwhile."""
    found = find_hierarchies()
    mount = found.by_controller.get("cpu") if found.version == 2 else None
    if mount is None:
        yield
        return
    own = _group_of_this_process(mount)
    places = list(dict.fromkeys([mount, own]))
    before = {group: _enabled(group) for group in places}
    try:
        yield
    finally:
        for group in places:
            for name in _enabled(group):
                if name not in before[group]:
                    with contextlib.suppress(OSError):
                        cgroupfs.write(group / "cgroup.subtree_control", f"-{name}")
        if _group_of_this_process(mount) == own / OWNER_LEAF:
            with contextlib.suppress(OSError):
                cgroupfs.write(own / "cgroup.procs", str(os.getpid()))
                (own / OWNER_LEAF).rmdir()


def _group_of_this_process(mount: Path) -> Path:
    return mount / _own_paths().get("", "/").lstrip("/")


def _own_paths() -> dict[str, str]:
    """The group of this process by controller, as the kernel names it; version 2 under the empty name."""
    found = {}
    for line in Path(OWN_GROUP).read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        found.update(dict.fromkeys(names.split(","), path))
    return found


def _enabled(group: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return cgroupfs.read(group / "cgroup.subtree_control").split()
    return []


def _control_groups() -> list[Finding]:
    with left_as_found():
        return _all_controllers(find_hierarchies())


def _all_controllers(found: Hierarchies) -> list[Finding]:
    to_do = WHAT_TO_DO_V1 if found.version == 1 else WHAT_TO_DO_V2
    try:
        at = found.by_controller if found.version == 1 else place(found)
        reason = "" if at else "none are mounted"
    except (ManagerError, OSError) as error:
        at, reason = {}, str(error).removesuffix(to_do).rstrip(". ")
    if reason:
        return [_lacking("cgroups", reason, to_do)]
    where = os.path.commonpath([*at.values()])
    whole = Finding(component="cgroups", state=OK, found=f"version {found.version} at {where}", needed_by=(SANDBOX,))
    return [whole, *(_controller(found, name, at, to_do) for name in _settings(found))]


def _settings(found: Hierarchies) -> dict[str, tuple[str, str]]:
    return TEST_SETTINGS_V1 if found.version == 1 else TEST_SETTINGS_V2


def _controller(found: Hierarchies, name: str, at: dict[str, Path], to_do: str) -> Finding:
    component = f"cgroup {name}"
    # Version 2 has the freezer built in.
    above = at.get("cpu" if found.version == 2 and name == "freezer" else name)
    reason = "the machine does not offer it" if above is None else _tried_group(above, *_settings(found)[name])
    if not reason:
        needed_by = () if name == CPUSET else (SANDBOX,)
        return Finding(component=component, state=OK, found=f"works at {above}", needed_by=needed_by)
    if name == CPUSET and os.geteuid() == 0:
        told = "nothing: processes are given their CPUs one by one, which they can change"
        return Finding(component=component, state=LIMITED, found=reason, to_do=told)
    return _lacking(component, reason, to_do)


def _tried_group(above: Path, file: str, value: str) -> str:
    """Make a group, set something in it, remove it. Returns why not, or nothing."""
    group = above / f"tangram-doctor-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        return f"no group can be made in {above}: {error.strerror}"
    try:
        if file == "cpuset.cpus" and (group / "cpuset.mems").exists() and (group / "cgroup.clone_children").exists():
            cgroupfs.fill_cpuset(group)
        cgroupfs.write(group / file, value.format(cpu=min(os.sched_getaffinity(0))))
    except OSError as error:
        return f"{file} cannot be set: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            cgroupfs.remove(group)
    return ""


# ---- what is tried in other processes -----------------------------------------------------------------------------


def _attempted() -> list[Finding]:
    try:
        code, no_filter = filter_program().hex(), ""
    except ManagerError as error:
        code, no_filter = "", str(error)
    reasons = _attempt(code)
    reasons.setdefault("seccomp", no_filter)
    spaces = {name: why for name, why in reasons.items() if name not in ("user", "tmpfs", "overlay", "seccomp")}
    failed = {name: why for name, why in spaces.items() if why}
    container = "a container around this must be privileged"
    return [
        _thing("namespaces", ", ".join(spaces), "; ".join(f"{name}: {why}" for name, why in failed.items()), container),
        _user_namespaces(reasons["user"]),
        _thing("tmpfs", "mounted", reasons["tmpfs"], container),
        _thing("overlayfs", "mounted over tmpfs", reasons["overlay"], f"modprobe overlay; {container}"),
        _thing(
            "seccomp",
            f"a filter of {len(code) // 16} instructions was taken on",
            reasons["seccomp"],
            "a kernel with CONFIG_SECCOMP_FILTER",
        ),
    ]


def _attempt(code: str) -> dict[str, str]:
    """The reason of failure by the name of the attempt."""
    request = {"user": SANDBOX_UID, "filter": code, "folder": tempfile.gettempdir()}
    words = [sys.executable, "-I", "-S", str(ATTEMPTS)]
    reason = ""
    try:
        done = subprocess.run(words, input=json.dumps(request).encode(), capture_output=True, timeout=ATTEMPTS_S)
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=dict[str, str])
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        reason = str(error)
    return dict.fromkeys(("mount", "user", "tmpfs", "overlay", "seccomp"), f"could not be tried: {reason}")


def _thing(component: str, works: str, reason: str, to_do: str) -> Finding:
    """What every sandbox needs of the kernel."""
    if reason:
        return _lacking(component, reason, to_do)
    return Finding(component=component, state=OK, found=works, needed_by=(SANDBOX,))


def _user_namespaces(reason: str) -> Finding:
    settings = _user_namespace_settings()
    said = "".join(f", {name.replace('/', '.')} {value}" for name, value in settings.items())
    if not reason:
        return Finding(component="user namespaces", state=OK, found=f"work for unprivileged users{said}")
    commands = [
        f"{as_root()}sysctl {name.replace('/', '.')}={good}"
        for name, (bad, good) in USER_NAMESPACE_SETTINGS.items()
        if settings.get(name) == bad
    ]
    to_do = "; ".join(commands) or "a container around this must allow them"
    return Finding(
        component="user namespaces",
        state=LIMITED,
        found=f"{reason}{said}",
        to_do=f"sandboxes with user=root need them: {to_do}",
    )


def _user_namespace_settings() -> dict[str, str]:
    found = {}
    for name in USER_NAMESPACE_SETTINGS:
        with contextlib.suppress(OSError):
            found[name] = (Path("/proc/sys") / name).read_text(encoding="ascii").strip()
    return found


# ---- programs -----------------------------------------------------------------------------------------------------


def _program(name: str, package: str) -> Finding:
    path = shutil.which(name)
    # A package may have another name than its program, and people know the package.
    component = name if name in ("catatonit", "setpriv", "cp") else package
    install = f"{as_root()}apt-get install -y {package}"
    if path is None:
        return Finding(
            component=component,
            state=MISSING,
            found=f"no program {name}",
            to_do=install,
            needed_by=(SANDBOX,),
            package=package,
        )
    said = _said(path, "--version").partition("\n")[0]
    number = re.search(r"\d+(\.\d+)+", said)
    version = number[0] if number else "of unknown version"
    if name == "bwrap" and number and _numbers(number[0]) < BUBBLEWRAP_MIN:
        least = ".".join(map(str, BUBBLEWRAP_MIN))
        return Finding(
            component=component,
            state=MISSING,
            found=f"{version} ({path}) is too old",
            to_do=f"{least} or later: Debian 12, Ubuntu 24.04",
            needed_by=(SANDBOX,),
        )
    return Finding(component=component, state=OK, found=f"{version} ({path})", needed_by=(SANDBOX,))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _said(*words: str) -> str:
    """What a program prints; empty if it fails or takes too long."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROGRAM_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


# ---- the state directory and limits -------------------------------------------------------------------------------


def _state(state: Path) -> Finding:
    component = "state directory"
    there = next(path for path in (state, *state.absolute().parents) if os.path.exists(path))
    wrong = ""
    if any(character in str(state) for character in FORBIDDEN):
        wrong = "its path has a character that means something to a mount (':', ',' or '\\')"
    elif not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = f"{there} may not be written"
    if wrong:
        return _lacking(component, f"{state}: {wrong}", "name another one with TANGRAM_STATE=DIR")
    free = shutil.disk_usage(there).free
    said = f"{state}{'' if there == state else ' (will be made)'}, {_size(free)} free{_leftovers(state)}"
    if free < FREE_BYTES_MIN:
        to_do = f"images of other machines need {_size(FREE_BYTES_MIN)} free: make room, or TANGRAM_STATE=DIR"
        return Finding(component=component, state=LIMITED, found=said, to_do=to_do, needed_by=(SANDBOX,))
    return Finding(component=component, state=OK, found=said, needed_by=(SANDBOX,))


def _leftovers(state: Path) -> str:
    """Of owners that died. Looking takes no lock that an owner would miss."""
    dead = kept = living = 0
    try:
        for directory in (state / "owners").iterdir():
            if _is_held(directory / "lock"):
                living += 1
            elif _is_held(directory / "kept" / SPAWNER_LOCK):
                kept += 1
            else:
                dead += 1
    except OSError:
        return ""
    said = f", {living} in use" if living else ""
    said += f", {kept} with sandboxes that wait for their service to be started again" if kept else ""
    return said + (f", {dead} left by owners that died, which the next start sweeps" if dead else "")


def _is_held(lock: Path) -> bool:
    """Whoever has it holds it as long as it lives."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_said, hard_said = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard))
    said = f"{soft_said}, can be raised to {hard_said}"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_ENOUGH:
        to_do = f"for hundreds of sandboxes: ulimit -n {OPEN_FILES_ENOUGH}"
        return Finding(component="open files", state=LIMITED, found=said, to_do=to_do)
    return Finding(component="open files", state=OK, found=said)


# ---- what there is to share ---------------------------------------------------------------------------------------


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    said = f"{usable} of {present}"
    quota = _cpu_quota()
    if quota is not None and quota < usable:
        to_do = f"this process has a quota: connect(cores={quota:g})"
        return Finding(component="cores", state=LIMITED, found=f"{said}, quota {quota:g}", to_do=to_do)
    return Finding(component="cores", state=OK, found=said if quota is None else f"{said}, quota {quota:g}")


def _groups_above(controller: str) -> list[Path]:
    """Groups that this process is in, from the top, as far as they are shown."""
    found = find_hierarchies()
    mount = found.by_controller.get(controller)
    if mount is None:
        return []
    path = _own_paths().get("" if found.version == 2 else controller, "/")
    parts = [part for part in path.split("/") if part]
    places = [mount.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    return [each for each in places if each.is_dir()]


def _cpu_quota() -> float | None:
    quotas = []
    for group in _groups_above("cpu"):
        with contextlib.suppress(OSError, ValueError):  # the topmost has none
            if (group / "cpu.max").exists():
                quota, period = cgroupfs.read(group / "cpu.max").split()
            else:
                quota, period = (cgroupfs.read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            if int(quota) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _numa() -> Finding:
    cells = numa_cells(tuple(sorted(os.sched_getaffinity(0))))
    said = ", ".join(f"{len(cpus)} cores" for cpus in cells.values()) or "the kernel shows none"
    return Finding(component="NUMA nodes", state=OK, found=f"{len(cells) or 1} ({said})")


def _memory() -> Finding:
    total, free = _meminfo("MemTotal"), available_memory_bytes()
    said = f"{_size(free)} of {_size(total)} available"
    limits = []
    for group in _groups_above("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int(cgroupfs.read(group / name)))
    limit = min(limits, default=total)
    if limit < total:
        to_do = f"this process has a limit: connect(memory='{limit // MIB}MiB') or less"
        return Finding(component="memory", state=LIMITED, found=f"{said}, limit {_size(limit)}", to_do=to_do)
    return Finding(component="memory", state=OK, found=said)


def _swap() -> Finding:
    total = _meminfo("SwapTotal")
    if not total:
        return Finding(component="swap", state=OK, found="none")
    found = find_hierarchies()
    memory = found.by_controller.get("memory")
    if found.version == 1 and memory is not None and not (memory / "memory.memsw.limit_in_bytes").exists():
        to_do = "memory limits of sandboxes do not count it: swapoff -a, or boot with swapaccount=1"
        return Finding(component="swap", state=LIMITED, found=_size(total), to_do=to_do)
    return Finding(component="swap", state=OK, found=f"{_size(total)}, of which sandboxes get none")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _devices() -> Finding:
    nodes = glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dri/renderD*")
    said = _said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader") if nodes else ""
    if said:
        lines = said.splitlines()
        return Finding(component="devices", state=OK, found=f"{len(lines)}: {'; '.join(dict.fromkeys(lines))}")
    return Finding(component="devices", state=OK, found=", ".join(sorted(nodes)) or "none")


# ---- Docker -------------------------------------------------------------------------------------------------------


def _docker() -> Finding:
    component, needed_by = "docker engine", (DOCKER,)
    version, reason = _engine_version(DOCKER_SOCKET)
    if not version:
        start = "systemctl start docker" if shutil.which("dockerd") else "apt-get install -y docker.io"
        to_do = f"only for the backend docker: {as_root()}{start}"
        return Finding(component=component, state=MISSING, found=reason, to_do=to_do, needed_by=needed_by)
    return Finding(component=component, state=OK, found=f"{version} at {DOCKER_SOCKET}", needed_by=needed_by)


def _engine_version(path: str) -> tuple[str, str]:
    """Its version, or why there is none."""
    connection = http.client.HTTPConnection("engine", timeout=ENGINE_S)
    with socket.socket(socket.AF_UNIX) as unix, contextlib.closing(connection):
        unix.settimeout(ENGINE_S)
        try:
            unix.connect(path)
            connection.sock = unix
            connection.request("GET", "/version")
            return str(json.loads(connection.getresponse().read())["Version"]), ""
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return "", f"none answers at {path}: {said}"
