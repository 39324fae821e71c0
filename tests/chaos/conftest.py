"""Sandboxes that are attacked, and the proof that nothing of them is left.

Every test of this folder has a state directory of its own. When it is over, no process, control group, mount or
directory of its owners may be left, and no spawner may have broken down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.owner_cgroups import owner_names

import tangram
from tangram import Status
from tangram.managers.sandboxes.bwrap.spawner import client
from tangram.managers.sandboxes.cgroups import cgroupfs, groups
from tangram.managers.sandboxes.cgroups.hierarchies import find_hierarchies
from tangram.processes.process_tree import PF_EXITING

STORY_S_MAX = 120.0
"""A test that takes longer hangs: everything here takes seconds, also on a loaded machine."""
GONE_S_MAX = 60.0
"""Until what was killed has really ended."""
BLOCKED_S_MAX = STORY_S_MAX + GONE_S_MAX + 10.0
"""... and then not even its event loop turns."""

STILL_LOOKS = 20
"""A hundredth of a second apart: what really runs uses CPU in that time, also on a loaded machine."""

Story = Callable[[tangram.Client], Awaitable[Any]]

_present_state: Path | None = None
"""The state directory of the test that runs."""


def needed() -> str:
    """What this machine lacks for sandboxes; empty if nothing."""
    missing = [name for name in ("bwrap", "catatonit", "setpriv") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "sandboxes need root"
    if shutil.which("python3", path="/usr/local/bin:/usr/bin") is None:
        missing.append("python3 below /usr, with which programs inside are written")
    return f"missing: {', '.join(missing)}" if missing else ""


@pytest.fixture(autouse=True)
def _required() -> None:
    reason = needed()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


# ---- what is there -------------------------------------------------------------------------------------------------


def eventually(condition: Callable[[], bool], what: str, seconds: float = GONE_S_MAX) -> None:
    """Wait for a condition; for threads and tests that are not asynchronous."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not so: {what}"
        time.sleep(0.01)


async def until(condition: Callable[[], Any], what: str, seconds: float = GONE_S_MAX) -> None:
    """Wait for a condition while the event loop turns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not so: {what}"
        await asyncio.sleep(0.005)


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_proc_file(pid: int, file: str) -> str:
    """A file of /proc/PID; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def is_zombie(pid: int) -> bool:
    return read_proc_file(pid, "stat").rpartition(")")[2].split()[:1] == ["Z"]


def is_exiting(pid: int) -> bool:
    """Whether it has begun to exit, or has ended."""
    fields = read_proc_file(pid, "stat").rpartition(")")[2].split()
    return not fields or fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)


def owners_of(process: int) -> list[str]:
    """Names of the owners that a process was, of which control groups are left."""
    return [name for name in owner_names() if name.startswith(f"{process}-")]


def processes_of(state: Path, owning: set[int]) -> dict[int, str]:
    """Processes that stand in a control group of an owner, that see a mount below the state directory, or that were
    started with it. Not this one."""
    places = [f"/tangram/{process}-" for process in owning]
    children_by_pid = {}
    for pid in pids():
        if pid == os.getpid() or is_zombie(pid):
            continue
        group, words, mounts = (
            read_proc_file(pid, "cgroup"),
            read_proc_file(pid, "cmdline"),
            read_proc_file(pid, "mountinfo"),
        )
        if any(place in group for place in places) or str(state) in words or f"{state}/" in mounts:
            children_by_pid[pid] = words.replace("\0", " ")[:200] or read_proc_file(pid, "comm")
    return children_by_pid


def children() -> set[int]:
    """Children of this process, including dead ones that were not waited for."""
    pids: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            pids |= {int(word) for word in Path(f"/proc/self/task/{task}/children").read_text().split()}
    return pids


def mounts_below(state: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {state}/" in line]


@contextlib.contextmanager
def nothing_left(state: Path, owning: set[int]) -> Iterator[None]:
    """Asserts at the end that the owners which used the state directory have left nothing: `owning` are the processes
    that they were."""
    before = children()
    yield
    eventually(lambda: not processes_of(state, owning), f"no process is left: {processes_of(state, owning)}")
    eventually(lambda: children() <= before, "no child of this process is left")
    assert [name for process in owning for name in owners_of(process)] == [], "control groups are left"
    assert mounts_below(state) == [], "mounts are left"
    owners = state / "owners"
    assert not owners.exists() or list(owners.iterdir()) == [], "directories of owners are left"


# ---- playing -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def awake(seconds: float = BLOCKED_S_MAX) -> Iterator[None]:
    """Breaks in once when the event loop itself is blocked."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"the test has not ended after {seconds:g} s: its event loop stands still")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run(doing: Coroutine[Any, Any, Any]) -> Any:
    """Like asyncio.run, and what hangs fails. Then all sandboxes are killed, so that what waits for them goes on."""

    async def limited() -> Any:
        task = asyncio.ensure_future(doing)
        await asyncio.wait({task}, timeout=STORY_S_MAX)
        if task.done():
            return task.result()
        where = "\n".join(str(each) for each in asyncio.all_tasks())
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        task.cancel()
        await asyncio.wait({task}, timeout=GONE_S_MAX)
        raise TimeoutError(f"the test has not ended after {STORY_S_MAX:g} s; what it waits for:\n{where}")

    with awake():
        return asyncio.run(limited())


class Owners:
    """The processes that own sandboxes below one state directory: this one, and those that the test starts."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.pids = {os.getpid()}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, story: str, before: str = "") -> subprocess.Popen[str]:
        """Another owner: a Python program, in which `t` is its connection. What it prints can be read."""
        lines = "\n".join(f"        {line}" for line in story.strip().splitlines())
        program = OWNER.format(state=str(self.state), before=before, story=lines)
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        self._started.append(process)
        self.pids.add(process.pid)
        return process

    def close(self) -> None:
        for process in self._started:
            with process:
                if process.poll() is None:
                    process.kill()


OWNER = """
import asyncio, contextlib, os, resource, signal, sys, tangram
{before}

async def main():
    async with tangram.connect(state={state!r}, cores=2, memory="1GiB") as t:
{story}

asyncio.run(main())
"""


@pytest.fixture(scope="session")
def _images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image `host` is made once for all tests."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def owners(tmp_path: Path, _images: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Owners]:
    global _present_state
    _present_state = state = tmp_path / "state"
    state.mkdir(mode=0o711)
    (state / "images").symlink_to(_images)
    all_owners = Owners(state)
    try:
        with nothing_left(state, all_owners.pids):
            try:
                yield all_owners
            finally:
                all_owners.close()
    finally:  # a test that has failed leaves nothing either
        for name in [name for process in all_owners.pids for name in owners_of(process)]:
            groups.remove_owner_cgroup(name)
    output = capfd.readouterr().err
    assert "spawner.py" not in output, f"the spawner broke down: {output}"


@pytest.fixture
def state(owners: Owners) -> Path:
    """A state directory of which nothing may be left when the test is over."""
    return owners.state


@pytest.fixture
def play(state: Path) -> Callable[..., Any]:
    """Runs `story(client)` on a connection of its own."""

    def played(story: Story, **options: Any) -> Any:
        async def main() -> Any:
            options.setdefault("cores", 2)
            options.setdefault("memory", "4GiB")
            async with tangram.connect(state=state, **options) as t:
                return await story(t)

        return run(main())

    return played


def timed_out(result: tangram.Result) -> bool:
    """Its time limit ended it. On a machine too busy to give it its CPU, the result is LOST."""
    starved = result.status is Status.LOST and result.reason.startswith("starved")
    return result.status is Status.TIMED_OUT or starved


# ---- processes -----------------------------------------------------------------------------------------------------


def spawner() -> int:
    """The process that starts the programs of the one connection of this process."""
    pids = [pid for pid in children() if client.PROGRAM in read_proc_file(pid, "cmdline")]
    assert len(pids) == 1, f"one spawner was expected, these are there: {pids}"
    return pids[0]


def parent(pid: int) -> int:
    """0 when the process is gone."""
    return int((read_proc_file(pid, "stat").rpartition(")")[2].split() or ["", "0"])[1])


def number_inside(pid: int) -> int:
    """The id that a process has in the innermost process namespace."""
    for line in read_proc_file(pid, "status").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return 0


def first_processes() -> list[int]:
    """Of the open sandboxes of this process, as this machine numbers them."""
    root = spawner()
    return sorted(pid for pid in pids() if number_inside(pid) == 1 and parent(parent(pid)) == root)


def holders() -> list[int]:
    """The processes of bubblewrap that hold the open sandboxes of this process."""
    return [parent(pid) for pid in first_processes()]


def owner_name(state: Path) -> str:
    """The one owner that uses the state directory."""
    (names,) = [path.name for path in (state / "owners").iterdir()]
    return names


def group(state: Path, controller: str, box: int = 1) -> Path:
    """The control group of a sandbox, the first of which is 1."""
    return find_hierarchies().by_controller[controller] / "tangram" / owner_name(state) / str(box)


def inside(state: Path, box: int = 1) -> set[int]:
    """All processes of a sandbox but a runner that waits for its order, as this machine numbers them."""
    return set(cgroupfs.processes(group(state, "memory", box)))


def cpu_used(state: Path, box: int = 1) -> float:
    """CPU seconds of a whole sandbox so far."""
    version = find_hierarchies().version
    place = group(state, "cpu" if version == 2 else "cpuacct", box)
    if version == 2:
        return cgroupfs.read_field(place / "cpu.stat", "usage_usec") / 1e6
    return int(cgroupfs.read(place / "cpuacct.usage")) / 1e9


async def stands_still(state: Path, box: int = 1) -> None:
    """Nothing in the sandbox uses CPU, perhaps after a moment: a runnable process freezes only then."""
    deadline = time.monotonic() + GONE_S_MAX
    before, unchanged = -1.0, 0
    while unchanged < STILL_LOOKS:
        used = cpu_used(state, box)
        unchanged = unchanged + 1 if used == before else 0
        before = used
        assert time.monotonic() < deadline, f"the sandbox still runs: {sorted(inside(state, box))}"
        await asyncio.sleep(0.01)


def visible_pids(word: str, state: Path | None = None) -> list[int]:
    """Processes with this word in their command line inside sandboxes of one state directory, by default that of the
    present test, as this machine numbers them. Tests that run at the same time use the same words."""
    state = state or _present_state
    assert state is not None, "outside of a test with the fixture `owners`, name the state directory"
    matches = []
    for pid in pids():
        numbers = [line.split()[1:] for line in read_proc_file(pid, "status").splitlines() if line.startswith("NSpid:")]
        is_inside = numbers and len(numbers[0]) > 1 and word in read_proc_file(pid, "cmdline").split("\0")
        if is_inside and f"{state}/" in read_proc_file(pid, "mountinfo"):
            matches.append(pid)
    return matches


def until_runs(word: str) -> str:
    """A command that waits for a program which was just left running, and has this word in its command line: until it
    executes that program it is a copy of its shell, and would stand still as one."""
    return f"until grep -qsz '^{word}$' /proc/[0-9]*/cmdline; do sleep 0.01; done"


def cgroup_names(state: Path) -> list[str]:
    """Groups of sandboxes below those of the owners that use the state directory."""
    names = []
    for owner in (state / "owners").iterdir():
        for place in dict.fromkeys(find_hierarchies().by_controller.values()):
            with contextlib.suppress(FileNotFoundError):
                names += [path.name for path in (place / "tangram" / owner.name).iterdir() if path.is_dir()]
    return names
