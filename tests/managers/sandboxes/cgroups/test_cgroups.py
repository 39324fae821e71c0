"""Control groups: found wherever they are mounted, and obeyed by real processes.

The same tests run on version 1 and version 2, whichever this machine has; `make test-cgroup-v2` runs them on a kernel
with version 2.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.owner_cgroups import owner_names

from tangram.core.demand import CORE
from tangram.errors import ManagerError
from tangram.managers.sandboxes.bwrap.spawner import orphan_cleanup
from tangram.managers.sandboxes.cgroups import cgroupfs
from tangram.managers.sandboxes.cgroups import groups as cgroups
from tangram.managers.sandboxes.cgroups.groups import Cgroup, create_owner_cgroup, remove_owner_cgroup
from tangram.managers.sandboxes.cgroups.hierarchies import CgroupHierarchies, find_hierarchies, writable_directories

V1 = [
    "30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
    "31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    "32 20 0:28 / /c\\040g/freezer rw - cgroup freezer rw,freezer\n",
    "33 20 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n",
    "34 20 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n",
    "35 20 0:26 / /mnt/again rw - cgroup cgroup rw,cpu,cpuacct\n",
]


def test_controllers_are_read_from_where_they_were_mounted_first() -> None:
    hierarchies = find_hierarchies(V1)
    assert hierarchies.version == 1
    assert hierarchies.missing == []
    assert hierarchies.by_controller["cpuacct"] == Path("/sys/fs/cgroup/cpu")
    assert hierarchies.by_controller["freezer"] == Path("/c g/freezer")
    assert next(iter(find_hierarchies(V1[::-1]).by_controller)) == "cpu"


def test_version_2_is_taken_only_if_it_has_the_controllers(tmp_path: Path) -> None:
    unified = [f"40 20 0:40 / {tmp_path} rw - cgroup2 cgroup2 rw\n"]
    (tmp_path / "cgroup.controllers").write_text("")
    assert find_hierarchies([*V1, *unified]).version == 1
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids\n")
    hierarchies = find_hierarchies([*V1, *unified])
    assert (hierarchies.version, hierarchies.missing) == (2, [])
    assert set(hierarchies.by_controller.values()) == {tmp_path}
    assert "cpuset" in hierarchies.by_controller


def test_a_machine_without_a_controller_is_reported_with_its_name() -> None:
    assert find_hierarchies(V1[:2]).missing == ["freezer", "pids"]
    with pytest.raises(ManagerError, match=r"no controller freezer, pids\. Tangram needs root"):
        writable_directories(find_hierarchies(V1[:2]))


def test_a_container_without_delegation_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("pids\n")
    hierarchies = find_hierarchies([f"40 20 0:40 / {tmp_path} rw - cgroup2 cgroup2 rw\n"])
    assert (hierarchies.version, hierarchies.missing) == (2, ["cpu", "memory"])
    with pytest.raises(ManagerError, match=r"no controller cpu, memory.*systemd-run --scope -p Delegate=yes"):
        writable_directories(hierarchies)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a\n"])
def test_an_owner_cannot_be_called_like_a_path(name: str) -> None:
    with pytest.raises(AssertionError, match="invalid owner name"):
        create_owner_cgroup(name)


def test_kernels_that_count_less_are_understood(tmp_path: Path) -> None:
    group = Cgroup(1, {"memory": tmp_path, "cpu": tmp_path})
    assert group.oom_kills() == 0
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    assert group.oom_kills() == 0
    assert group.throttled_s() == 0.0
    (tmp_path / "memory.limit_in_bytes").write_text("")
    group.set_memory(1 << 20)  # without memory.memsw.limit_in_bytes
    assert (tmp_path / "memory.limit_in_bytes").read_text() == str(1 << 20)
    (tmp_path / "memory.usage_in_bytes").write_text("4096\n")
    assert group.memory_peak_bytes() == 4096


def test_a_group_that_is_gone_is_reported(tmp_path: Path) -> None:
    group = Cgroup(1, dict.fromkeys(("cpu", "cpuacct", "memory", "freezer"), tmp_path / "gone"))
    for attempt in (
        lambda: group.set_weight(1),
        lambda: group.set_memory(1 << 20),
        group.cpu_s,
        group.throttled_s,
        group.oom_kills,
        group.freeze,
    ):
        with pytest.raises(ManagerError, match="the group is gone"):
            attempt()
    assert group.processes() == []
    assert group.try_kill()


# ---- on the groups of this machine --------------------------------------------------------------------------------


def usable() -> CgroupHierarchies | None:
    hierarchies = find_hierarchies()
    if hierarchies.missing or not all(os.access(path, os.W_OK) for path in hierarchies.by_controller.values()):
        return None
    return hierarchies


HIERARCHIES = usable()
VERSION = HIERARCHIES.version if HIERARCHIES else 0
needs_groups = pytest.mark.skipif(
    HIERARCHIES is None and os.environ.get("CI") != "true", reason="needs root and writable control groups"
)
needs_v2 = pytest.mark.skipif(VERSION != 2, reason="needs control groups of version 2: make test-cgroup-v2")
SLOT_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "freezer")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.005)


class Place:
    """A group below an owner of its own, and shells that run in it and in its children."""

    def __init__(self) -> None:
        self.owner_name = f"test-{os.getpid()}"
        self.owner = create_owner_cgroup(self.owner_name)
        self.group = self.owner.child("box")
        self._shells: list[subprocess.Popen[bytes]] = []

    def start(self, group: Cgroup, script: str) -> subprocess.Popen[bytes]:
        """A shell that joins the group before it does anything."""
        joins = "".join(f"echo 0 > {path}\n" for path in group.join_files)
        shell = subprocess.Popen(["/bin/sh", "-c", joins + "echo joined\n" + script], stdout=subprocess.PIPE)
        self._shells.append(shell)
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"joined\n"
        return shell

    def close(self) -> None:
        self.owner.remove()
        for shell in self._shells:
            shell.wait(60)
            assert shell.stdout is not None
            shell.stdout.close()


@pytest.fixture
def at() -> Iterator[Place]:
    made = Place()
    try:
        yield made
    finally:
        made.close()
    assert not made.owner.exists()
    assert made.owner_name not in owner_names()


@needs_groups
def test_what_a_process_forks_is_in_its_group(at: Place) -> None:
    shell = at.start(at.group, "sleep 100 & wait")
    wait_until(lambda: len(at.group.processes()) == 2)
    assert shell.pid in at.group.processes()
    at.group.kill()
    assert at.group.processes() == []
    assert shell.wait(60) == -signal.SIGKILL


@needs_groups
def test_killing_ends_even_what_forks_all_the_time(at: Place) -> None:
    at.group.set_processes_max(200)
    at.start(at.group, "exec 2>/dev/null; f() { f & f & sleep 50 & }; f; wait; sleep 100")
    wait_until(lambda: len(at.group.processes()) > 20)
    at.group.kill()
    assert at.group.processes() == []
    assert at.group.try_kill()


@needs_groups
def test_a_spawner_that_ends_kills_what_forks_all_the_time_and_what_is_frozen(at: Place) -> None:
    at.group.set_processes_max(200)
    at.group.delegate()
    forking, frozen = at.group.child("a0"), at.group.child("a1")
    at.start(forking, "exec 2>/dev/null; f() { f & f & f & exit; }; f; sleep 100")
    at.start(frozen, "exec sleep 100")
    frozen.freeze()
    wait_until(frozen.is_frozen)
    orphan_cleanup.kill_all([os.path.dirname(path) for path in at.group.join_files])
    assert at.group.try_kill(), "no process is left"


@needs_v2
def test_killing_works_on_kernels_that_cannot_kill_a_group(at: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    write = cgroupfs.write

    def refuse_kill(path: Path | str, text: str) -> None:
        if Path(path).name == "cgroup.kill":
            raise FileNotFoundError(path)
        write(path, text)

    monkeypatch.setattr(cgroupfs, "write", refuse_kill)
    test_killing_ends_even_what_forks_all_the_time(at)


@needs_groups
def test_rounds_of_killing_end_with_nothing_left(at: Place) -> None:
    shell = at.start(at.group, "sleep 100 & wait")
    wait_until(lambda: len(at.group.processes()) == 2)
    at.group.freeze()
    wait_until(at.group.try_kill)
    assert at.group.processes() == []
    assert shell.wait(60) == -signal.SIGKILL


@needs_groups
def test_a_signal_reaches_all_groups_below(at: Place) -> None:
    at.group.delegate()
    first, second = at.group.child("a0"), at.group.child("a1")
    shells = [at.start(group, "exec sleep 100") for group in (first, second)]
    at.group.signal_all(signal.SIGTERM)
    assert [shell.wait(60) for shell in shells] == [-signal.SIGTERM] * 2


@needs_groups
def test_what_is_frozen_uses_no_cpu_and_can_be_killed(at: Place) -> None:
    shell = at.start(at.group, "while :; do :; done")
    assert not at.group.is_frozen()
    at.group.freeze()
    wait_until(at.group.is_frozen)
    readings = [at.group.cpu_s()]

    def is_idle() -> bool:
        """Between two readings. A process is counted as frozen while it still uses its last microseconds."""
        time.sleep(0.1)
        readings.append(at.group.cpu_s())
        return readings[-1] == readings[-2]

    wait_until(is_idle)
    before = readings[-1]
    at.group.thaw()
    assert not at.group.is_frozen()
    wait_until(lambda: at.group.cpu_s() > before)
    at.group.freeze()
    at.group.kill()
    assert shell.wait(60) == -signal.SIGKILL


@needs_groups
def test_a_frozen_group_inside_is_killed_with_the_whole(at: Place) -> None:
    at.group.delegate()
    background = at.group.child("background", SLOT_CONTROLLERS)
    shell = at.start(background, "sleep 100 & wait")
    background.freeze()
    at.group.remove()
    assert shell.wait(60) == -signal.SIGKILL
    assert not background.exists()
    # A group of the same name can be made again, and is not frozen.
    again = at.owner.child("box")
    assert at.start(again, "exit 3").wait(60) == 3


@needs_groups
def test_a_process_that_joined_one_hierarchy_only_is_killed_too(at: Place) -> None:
    shell = at.start(at.group.subset(("memory",)), "sleep 100 & wait")
    at.group.kill()
    assert shell.wait(60) == -signal.SIGKILL


FORKS = """
import errno, os, signal
for n in range(9):
    try:
        os.fork() or signal.pause()
    except OSError as error:
        print(n, errno.errorcode[error.errno])
        signal.pause()
"""


@needs_groups
def test_too_many_processes_are_refused_by_the_kernel(at: Place) -> None:
    at.group.set_processes_max(3)
    shell = at.start(at.group, f"exec {sys.executable} -uc '{FORKS}'")
    assert shell.stdout is not None
    assert shell.stdout.readline() == b"2 EAGAIN\n"
    assert len(at.group.processes()) == 3


@needs_groups
def test_more_memory_than_the_limit_is_a_kill_that_is_counted(at: Place) -> None:
    at.group.set_memory(48 << 20)
    assert at.group.oom_kills() == 0
    shell = at.start(at.group, f'exec {sys.executable} -c "x = bytearray(200 << 20)"')
    assert shell.wait(60) == -signal.SIGKILL
    assert at.group.oom_kills() >= 1
    assert 40 << 20 <= at.group.memory_peak_bytes() <= 48 << 20
    assert at.group.memory_bytes() < 40 << 20


@needs_groups
def test_an_action_group_below_has_amounts_of_its_own(at: Place) -> None:
    at.group.delegate()
    action = at.group.child("a0", SLOT_CONTROLLERS)
    # The quota is shorter than a time slice of the kernel: the loop is throttled however busy the machine is.
    action.set_cpu(reserved=250, limit=CORE // 100)
    at.group.set_weight(250)
    at.start(action, "while :; do :; done")
    wait_until(lambda: action.throttled_s() > 0.0)
    action.kill()
    assert action.cpu_s() > 0.0
    action.remove()
    assert not action.exists()
    assert at.group.exists()


@needs_groups
def test_what_is_left_running_moves_to_another_group(at: Place) -> None:
    at.group.delegate()
    first, second = at.group.child("a0"), at.group.child("background")
    shell = at.start(first, "exec sleep 100")
    first.freeze()
    second.add_processes([*first.processes(), 2**22 + 1])  # the second is no process, and does not matter
    assert first.processes() == []
    assert shell.pid in second.processes()
    first.remove()
    second.kill()
    assert shell.wait(60) == -signal.SIGKILL


@needs_groups
def test_processes_run_on_the_cpus_of_their_group(at: Place) -> None:
    at.group.delegate()
    slot = at.group.child("a0", SLOT_CONTROLLERS)
    shell = at.start(slot, "exec sleep 100")
    allowed = sorted(os.sched_getaffinity(0))
    if not slot.set_cpus(allowed[:1]):
        pytest.skip("this machine has no controller cpuset")
    wait_until(lambda: os.sched_getaffinity(shell.pid) == {allowed[0]})
    assert slot.set_cpus(allowed)
    wait_until(lambda: os.sched_getaffinity(shell.pid) == set(allowed))
    with pytest.raises(ManagerError, match=r"cpuset\.cpus .* refuses '99999'"):
        slot.set_cpus([99_999])


@needs_groups
def test_a_group_without_cpuset_raises(at: Place) -> None:
    at.group.delegate()
    assert at.group.child("a0", ("cpu", "cpuacct", "freezer")).set_cpus([0]) is False


@needs_groups
def test_an_amount_is_written_once(at: Place) -> None:
    file = Path(at.group.join_files[0]).with_name("cpu.weight" if VERSION == 2 else "cpu.shares")
    at.group.set_weight(CORE)
    first = file.read_text()
    file.write_text("77")
    at.group.set_weight(CORE)
    assert file.read_text() == "77\n"
    at.group.set_weight(2 * CORE)
    assert int(file.read_text()) == 2 * int(first)


@needs_groups
def test_a_removed_owner_takes_only_its_own_along(at: Place) -> None:
    other_name = f"{at.owner_name}-other"
    other = create_owner_cgroup(other_name)
    box = other.child("box")
    shell, mine = at.start(box, "exec sleep 100"), at.start(at.group, "exec sleep 100")
    try:
        assert {at.owner_name, other_name} <= set(owner_names())
        assert create_owner_cgroup(other_name).processes() == [shell.pid]
    finally:
        remove_owner_cgroup(other_name)
    assert shell.wait(60) == -signal.SIGKILL
    assert other_name not in owner_names()
    assert at.group.processes() == [mine.pid]
    remove_owner_cgroup(other_name)  # what is gone is gone


@needs_groups
def test_what_is_not_ours_cannot_be_removed(at: Place) -> None:
    assert HIERARCHIES is not None
    top = Cgroup(VERSION, writable_directories(HIERARCHIES))
    for group in (top, top.child(cgroups.ROOT_GROUP_NAME), at.group.subset(("cpu",))):
        with pytest.raises(AssertionError, match="must not be removed by this owner"):
            group.remove()


# ---- delegation, version 2 ----------------------------------------------------------------------------------------

OWNER = """
import os, sys
from tangram.errors import ManagerError
from tangram.managers.sandboxes.cgroups.groups import create_owner_cgroup
for group in sys.argv[1:]:
    with open(group + "/cgroup.procs", "w") as file:
        file.write("0")
try:
    group = create_owner_cgroup("inside")
except ManagerError as error:
    print("refused", error)
else:
    box = group.child("box")
    box.set_cpu(reserved=1000, limit=1000)
    box.set_memory(1 << 26)
    with open("/proc/self/cgroup") as file:
        print(box.join_files[0], file.read().strip())
    again = create_owner_cgroup("again")
    again.remove()
    group.remove()
"""


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A group as a container or systemd would make it, beside those of Tangram."""
    assert HIERARCHIES is not None
    root = HIERARCHIES.by_controller["cpu"]
    (root / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    made = root / f"test-delegated-{os.getpid()}"
    made.mkdir()
    yield made
    for below in sorted(made.rglob("*"), reverse=True):
        if below.is_dir():
            below.rmdir()
    made.rmdir()


def run_owner(*groups: Path, before: tuple[str, ...] = ()) -> str:
    """An owner that joins the groups first. Says where it made its own, and where it is then."""
    words = [*before, sys.executable, "-c", OWNER, *map(str, groups)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout


@needs_v2
def test_an_owner_uses_the_group_that_was_delegated_to_it(delegated: Path) -> None:
    os.setxattr(delegated, "user.delegate", b"1")
    result = run_owner(delegated)
    assert result == f"{delegated}/tangram/inside/box/cgroup.procs 0::/{delegated.name}/tangram-owner\n"


@needs_v2
def test_an_owner_moves_only_its_own_processes(delegated: Path) -> None:
    os.setxattr(delegated, "user.delegate", b"1")
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        (delegated / "cgroup.procs").write_text(str(bystander.pid))
        # Only the root is left, where this process may make groups as well.
        assert run_owner(delegated).startswith(
            f"{delegated.parent}/tangram/inside/box/cgroup.procs 0::/{delegated.name}"
        )
        assert (delegated / "cgroup.procs").read_text().split() == [str(bystander.pid)]
    finally:
        bystander.kill()
        bystander.wait(60)


IN_NAMESPACE = """
echo 0 > "$0/cgroup.procs"
inner=$1; shift
exec unshare --cgroup --mount sh -c "$inner" sh "$@"
"""
CONTAINER = 'umount /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || exit 9; {} exec "$@"'


def run_in_container(group: Path, before: str = "") -> str:
    """As in a container: the group is all that is seen, and this is its root."""
    try:
        inner = CONTAINER.format(before)
        return run_owner(before=("sh", "-c", IN_NAMESPACE, str(group), inner))
    finally:
        (group / "cgroup.kill").write_text("1")
        wait_until(lambda: "populated 0" in (group / "cgroup.events").read_text())


@needs_v2
def test_an_owner_that_is_alone_in_its_container_steps_down(delegated: Path) -> None:
    assert run_in_container(delegated) == "/sys/fs/cgroup/tangram/inside/box/cgroup.procs 0::/tangram-owner\n"


@needs_v2
def test_an_owner_that_is_not_alone_in_its_container_is_reported_with_the_remedy(delegated: Path) -> None:
    result = run_in_container(delegated, before="sleep 1000 >/dev/null &")
    assert result.startswith("refused control groups cannot be made: /sys/fs/cgroup also holds the processes ")
    assert "systemd-run --scope -p Delegate=yes" in result


MOVE_ASIDE = """
mkdir /sys/fs/cgroup/others
for pid in $(cat /sys/fs/cgroup/cgroup.procs); do echo $pid > /sys/fs/cgroup/others/cgroup.procs; done
"""


@needs_v2
def test_other_processes_of_a_container_can_be_moved_aside(delegated: Path) -> None:
    result = run_in_container(delegated, before=f"sleep 1000 >/dev/null & {MOVE_ASIDE}")
    assert result == "/sys/fs/cgroup/tangram/inside/box/cgroup.procs 0::/others\n"
