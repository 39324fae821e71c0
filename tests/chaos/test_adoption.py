"""Owners with a name that are killed: their sandboxes stand still, and the next process of that name has them back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from tests.chaos.conftest import (
    GONE_S_MAX,
    STORY_S_MAX,
    Owners,
    awake,
    cgroup_names,
    cpu_used,
    eventually,
    group,
    inside,
    is_exiting,
    is_zombie,
    mounts_below,
    number_inside,
    owner_name,
    processes_of,
    read_proc_file,
    run,
    stands_still,
    until,
    until_runs,
    visible_pids,
)
from tests.owner_cgroups import owner_names

import tangram
from tangram.core.action import Action
from tangram.core.demand import Demand, cores
from tangram.core.messages import Grant, Share
from tangram.errors import FileFailed, InvalidConfig, ManagerError
from tangram.managers.base import Lease
from tangram.managers.sandboxes.bwrap.images.store import SANDBOX_UID
from tangram.managers.sandboxes.bwrap.manager import NO_RECORD, BwrapManager
from tangram.managers.sandboxes.bwrap.owner import SandboxRecords
from tangram.managers.sandboxes.bwrap.spawner import client, protocol
from tangram.managers.sandboxes.cgroups import groups as cgroups
from tangram.managers.work import Close, Commit, Exec, ExecResult, LeaseResult, Open, Prepare, SandboxSpec, Work
from tangram.processes.streams import SESSION_SHELL_SCRIPT

MIB = 1 << 20
SPEC = SandboxSpec(memory_bytes=64 * MIB, disk_bytes=16 * MIB, processes_max=64)
COUNTS = "(i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.005; done) > /dev/null 2>&1 &"
"""Left running: its only state is the variable of a shell."""


class Keeper:
    """A manager of an owner with a name, as the service has one."""

    def __init__(self, state: Path | str, name: str, *, cores: float = 2, **options: Any) -> None:
        self.manager = BwrapManager(state=Path(state), owner=name, cores=cores, memory_bytes=1024 * MIB, **options)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        await self.manager.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.manager.__aexit__(None, None, None)

    async def start(self, sandbox: str, work: Work, reserved: int = 500) -> Lease:
        action = Action(id=f"action-{next(self._numbers)}", demand=Demand({"cpu": cores(1)}), sandbox=sandbox)
        pool = self.manager.pools()[0]
        grant = Grant(action.id, pool.node, (Share(pool.name, reserved, reserved),), reserved)
        return await self.manager.start(action, grant, work)

    async def do(self, sandbox: str, work: Work, reserved: int = 500) -> LeaseResult:
        ended = await (await self.start(sandbox, work, reserved)).wait()
        if ended.lost:
            raise ManagerError(ended.lost)
        return ended

    async def open(self, name: str, image: str = "host") -> None:
        await self.do(name, Open(spec=msgspec.structs.replace(SPEC, image=image)))

    async def close_all(self) -> None:
        for name in self.manager.sandboxes():
            await self.do(name, Close())

    async def run(self, name: str, command: str, session: str = "", reserved: int = 500) -> ExecResult:
        executed = (await self.do(name, Exec(command=command, session=session), reserved)).executed
        assert executed is not None
        return executed

    async def says(self, name: str, command: str, session: str = "") -> str:
        executed = await self.run(name, command, session)
        assert executed.exit_code == 0, executed
        return executed.stdout.decode().removesuffix("\n")

    async def count(self, name: str) -> int:
        """How far what COUNTS left running has come, if it has begun. Reading a file lets nothing run."""
        try:
            return int(await self.manager.read(name, "count", bytes_max=100) or b"0")
        except FileFailed:
            return 0


OWNER = """
import asyncio, os, signal, sys
sys.path.insert(0, {root!r})
from tests.chaos.test_adoption import *
STATE = Path({state!r})
{before}

def ready(*words):
    print("ready", *words, flush=True)

async def main():
    async with Keeper({state!r}, {name!r}, **{options!r}) as k:
{story}

asyncio.run(main())
"""
ROOT = str(Path(__file__).parents[2])


class Service:
    """The processes of one owner with a name, one after the other."""

    def __init__(self, owners: Owners) -> None:
        self.state = owners.state
        self.name = f"svc-{os.getpid()}"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, story: str, before: str = "", **options: Any) -> subprocess.Popen[str]:
        """A process in which `k` is the Keeper."""
        lines = "\n".join(f"        {line}" for line in story.strip().splitlines())
        program = OWNER.format(
            root=ROOT, state=str(self.state), name=self.name, before=before, story=lines, options=options
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def killed(self, story: str, before: str = "", **options: Any) -> list[str]:
        """Run a story until it says `ready`, then kill its process at once. Returns the rest of its output."""
        process = self.start(story + "\nawait asyncio.sleep(1000)", before, **options)
        output = read_output(process)
        process.kill()
        process.wait()
        return output

    def comes(self, **options: Any) -> Keeper:
        return Keeper(self.state, self.name, **options)

    @property
    def directory(self) -> Path:
        return self.state / "owners" / owner_name(self.state)

    @property
    def spawner(self) -> int:
        """0 if it has ended. A process that exits loses its command line first, and its locks after that: it has ended
        when it is a zombie."""
        pids = [int(path.read_text()) for path in (self.state / "owners").glob("*/kept/spawner.lock")]
        if not pids or is_zombie(pids[0]) or not os.path.exists(f"/proc/{pids[0]}"):
            return 0
        words = read_proc_file(pids[0], "cmdline")
        return pids[0] if client.PROGRAM in words or not words else 0

    def groups(self) -> list[str]:
        return [name for name in owner_names() if name.startswith(f"{self.name}.")]

    def close(self) -> None:
        for process in self.started:
            with process:
                if process.poll() is None:
                    process.kill()

    async def end(self) -> None:
        """Remove it, as an administrator would."""
        async with self.comes() as k:
            assert not (self.directory / "kept" / "spawner.log").read_text(), "the spawner broke down"
            await k.close_all()

    def end_by_force(self) -> None:
        if self.spawner:
            os.kill(self.spawner, signal.SIGKILL)
        for name in self.groups():
            cgroups.remove_owner_cgroup(name)
        shutil.rmtree(self.state / "owners", ignore_errors=True)


def read_output(process: subprocess.Popen[str]) -> list[str]:
    """Until it is ready."""
    assert process.stdout is not None
    with awake(STORY_S_MAX):
        for line in process.stdout:
            if line.startswith("ready"):
                return line.split()[1:]
    raise AssertionError(f"it ended with {process.wait()} before it was ready")


@pytest.fixture
def service(owners: Owners) -> Iterator[Service]:
    """When the test is over, its sandboxes are closed, and nothing of them may be left."""
    started = Service(owners)
    try:
        yield started
        started.close()
        run(started.end())
        assert started.groups() == [] and started.spawner == 0
    finally:
        started.close()
        started.end_by_force()


# ---- what is back --------------------------------------------------------------------------------------------------


def test_a_sandbox_of_a_killed_owner_is_back_with_its_files_and_what_ran_in_its_background(service: Service) -> None:
    service.killed(f"""
await k.open("one")
await k.manager.write("one", "kept.txt", b"kept", mode=0o640)
await k.run("one", {COUNTS!r})
while await k.count("one") < 20:
    await k.run("one", "sleep 0.05")
ready()
""")
    run(stands_still(service.state))
    before = inside(service.state)
    assert service.spawner and len(before) >= 3

    async def story() -> None:
        async with service.comes() as k:
            assert k.manager.adopted == {"one": SPEC} and k.manager.missing == {}
            assert inside(service.state) == before, "the same processes"
            assert await k.manager.read("one", "kept.txt", bytes_max=100) == b"kept"
            count = await k.count("one")
            assert count >= 20, "it counts on where it was"
            await stands_still(service.state)
            assert await k.count("one") == count, "adoption alone lets nothing run"
            while await k.count("one") < count + 20:
                await k.run("one", "sleep 0.05")
            await stands_still(service.state)
            await k.do("one", Close())
        assert service.groups() == [], "without a sandbox nothing is left behind"

    run(story())


def test_a_sandbox_passes_through_many_owners_that_go_in_order(service: Service) -> None:
    async def story() -> None:
        async with service.comes() as k:
            await k.open("one")
            await k.run("one", COUNTS)
        spawner_before, count = service.spawner, 0
        assert spawner_before
        for number in range(5):
            await stands_still(service.state)
            async with service.comes() as k:
                assert list(k.manager.adopted) == ["one"] + [f"more-{each}" for each in range(number)]
                assert await k.says("one", f"echo {number} >> visits; wc -l < visits") == str(number + 1)
                while await k.count("one") < count + 5:
                    await k.run("one", "sleep 0.02")
                count = await k.count("one")
                await k.open(f"more-{number}")
            assert service.spawner == spawner_before
        boxes = sorted(int(path.name) for path in (service.directory / "boxes").iterdir())
        assert boxes == [1, 2, 3, 4, 5, 6], "numbers go on from those that are there"

    run(story())


def test_an_image_that_was_committed_survives_its_owner_and_can_be_forked_from(service: Service) -> None:
    image = f"kept-{os.getpid()}"
    service.killed(f"""
await k.open("one")
await k.run("one", "echo committed > note")
await k.do("one", Commit(image={image!r}))
await k.open("two", {image!r})
await k.run("two", "echo more >> note")
ready()
""")

    async def story() -> None:
        async with service.comes() as k:
            assert k.manager.adopted["two"].image == image
            assert await k.says("two", "cat note") == "committed\nmore"
            await k.do("two", Commit(image=f"{image}-2"))
            await k.open("three", f"{image}-2")
            assert await k.says("three", "cat note") == "committed\nmore"
            await k.close_all()
        assert service.groups() == []
        async with service.comes() as k:
            await k.open("four", image)
            assert await k.says("four", "cat note") == "committed"
            await k.manager.forget_image(image)
            assert image in k.manager.images.names(), "a sandbox stands on it"
        async with service.comes() as k:
            assert image in k.manager.images.names()
            await k.do("four", Close())
            assert image not in k.manager.images.names(), "that it was to be forgotten outlived the owner too"
            await k.manager.forget_image(f"{image}-2")

    run(story())


def test_what_was_left_running_can_still_write_to_the_streams_of_its_action(service: Service) -> None:
    """As a server does that logs to its standard output: the owner that read it is gone."""
    chatty = "while :; do echo said; echo said >&2; echo x >> {0}; sleep 0.005; done & until [ -s {0} ]; do :; done"
    service.killed(f"""
await k.open("one")
await k.run("one", {chatty.format("first")!r})
await k.run("one", {chatty.format("second")!r}, session="held")
ready()
""")

    async def story() -> None:
        for _ in range(2):
            async with service.comes() as k:
                for name in ("first", "second"):
                    size = int(await k.says("one", f"wc -l < {name}"))
                    while int(await k.says("one", f"sleep 0.05; wc -l < {name}")) < size + 20:
                        pass
        # No writer blocks either: more than a pipe holds.
        async with service.comes() as k:
            await k.run("one", "(head -c 1000000 /dev/zero; echo written > third) &")
            while not await k.says("one", "sleep 0.02; cat third 2> /dev/null || true"):
                pass

    run(story())


def test_a_session_that_ended_with_its_owner_reports_its_end_once(service: Service) -> None:
    service.killed("""
await k.open("one")
await k.run("one", "x=1; (setsid sleep 9201 > /dev/null 2>&1 &); " + until_runs("9201"), session="held")
ready()
""")
    eventually(lambda: not set(visible_pids("/bin/bash")) & inside(service.state), "the shell is killed")
    assert len(set(visible_pids("9201")) & inside(service.state)) == 1, "what it left running is not"

    async def story() -> None:
        async with service.comes() as k:
            lost = await k.run("one", "echo $x", session="held")
            assert lost.session_ended and lost.exit_code == 126 and b"its state is lost" in lost.stderr
            assert await k.says("one", "echo new", session="other") == "new"
            again = await k.run("one", "echo again$x", session="held")
            assert (again.stdout, again.session_ended) == (b"again\n", False)

    run(story())


def test_a_session_reports_its_end_when_its_shell_exits_before_its_owner(service: Service) -> None:
    """A shell that is awake, because another action runs, ends by itself when its owner dies, and which of the two is
    noticed first is luck. Here the owner stands still meanwhile, and never hears of the shell."""
    chatty = f"setsid sh -c 'while :; do echo said; echo x >> beats; sleep 0.005; done' 9208 & {until_runs('9208')}"
    chatty += "; until [ -s beats ]; do sleep 0.01; done"
    process = service.start(f"""
await k.open("one")
await k.run("one", {f"x=1; {chatty}"!r}, session="held")
await k.start("one", Exec(command="sleep 9204"))
ready()
await asyncio.sleep(1000)
""")
    read_output(process)
    os.kill(process.pid, signal.SIGSTOP)
    (shell,) = set(visible_pids(SESSION_SHELL_SCRIPT)) & inside(service.state)
    os.kill(shell, signal.SIGKILL)
    eventually(lambda: not os.path.exists(f"/proc/{shell}"), "the spawner has noticed its end")
    process.kill()
    process.wait()

    async def story() -> None:
        async with service.comes() as k:
            lost = await k.run("one", "echo $x", session="held")
            assert lost.session_ended and lost.exit_code == 126 and b"its state is lost" in lost.stderr
            size = int(await k.says("one", "wc -l < beats"))
            while int(await k.says("one", "sleep 0.05; wc -l < beats")) < size + 20:
                pass  # what it left running can still write to its streams
        async with service.comes() as k:
            again = await k.run("one", "echo again$x", session="held")
            assert (again.stdout, again.session_ended) == (b"again\n", False), "it is reported once"

    run(story())


def test_a_session_whose_end_was_returned_is_not_reported_again(service: Service) -> None:
    service.killed("""
await k.open("one")
assert (await k.run("one", "exit 3", session="left")).session_ended
await k.run("one", "true", session="held")
ready()
""")

    async def story() -> None:
        async with service.comes() as k:
            assert await k.says("one", "echo new", session="left") == "new"
            assert (await k.run("one", "true", session="held")).session_ended

    run(story())


# ---- what may not run ----------------------------------------------------------------------------------------------


def test_processes_of_actions_die_with_the_owner_and_leftover_processes_are_frozen(service: Service) -> None:
    service.killed("""
await k.open("one")
await k.open("two")
await k.run("one", "(setsid sh -c 'while :; do :; done' 9202 > /dev/null 2>&1 &); " + until_runs("9202"))
for name in ("one", "two"):
    await k.start(name, Exec(command="trap '' TERM INT HUP; (setsid sleep 9203 &); while :; do :; done"))
await until(lambda: len(visible_pids("9203", STATE)) >= 2, "they run")
await k.start("two", Exec(command="f() { f | f & }; while :; do f; sleep 0.01; done"))
await until(lambda: len(inside(STATE, 2)) > 20, "it forks")
ready()
""")

    def left() -> set[int]:
        return set(inside(service.state, 1)) | set(inside(service.state, 2))

    eventually(lambda: len(left()) == 5, "two first processes, their holders, and one more")
    assert len(set(visible_pids("9202")) & left()) == 1

    async def story() -> None:
        await stands_still(service.state, 1)
        await stands_still(service.state, 2)
        async with service.comes() as k:
            for name in ("one", "two"):
                assert await k.says(name, "echo usable") == "usable"
            used = cpu_used(service.state, 1)
            await k.run("one", "sleep 0.3")
            assert cpu_used(service.state, 1) > used
            await stands_still(service.state, 1)

    run(story())


def test_a_fork_of_the_owner_neither_keeps_its_actions_running_nor_lets_another_one_in(service: Service) -> None:
    process = service.start(
        """
await k.open("one")
await k.start("one", Exec(command=("sleep", "9206")))
child = os.fork()
if child == 0:
    os.close(1)
    signal.pause()
while not visible_pids("9206", STATE):
    await asyncio.sleep(0.01)
ready(child)
await asyncio.sleep(1000)
"""
    )
    (child,) = map(int, read_output(process))
    try:
        process.kill()
        process.wait()
        eventually(lambda: not visible_pids("9206"), "its action is killed")
        with pytest.raises(ManagerError, match=f"is process {process.pid}, or a fork that it left"):
            run(service.end())
    finally:
        os.kill(child, signal.SIGKILL)
    eventually(lambda: is_zombie(child) or not os.path.exists(f"/proc/{child}"), "the fork has ended")

    async def story() -> None:
        async with service.comes() as k:
            assert list(k.manager.adopted) == ["one"]

    run(story())


# ---- moments -------------------------------------------------------------------------------------------------------

ALL_AT_ONCE = """
async def live(number):
    for turn in itertools.count():
        name = f"{os.getpid()}-{number}-{turn}"
        await k.open(name)
        ready()
        await k.run(name, "echo made > file; (setsid sleep 9207 > /dev/null 2>&1 &)")
        await k.run(name, "cat file", session="held")
        await k.manager.write(name, "large", bytes(3000000), mode=0o600)
        await k.manager.read(name, "large", bytes_max=1 << 24)
        if number == 0:
            await k.do(name, Commit(image=IMAGE))
            await k.manager.forget_image(IMAGE)
        if turn % 2 or number:
            await k.do(name, Close())

await asyncio.gather(*(live(number) for number in range(3)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_an_owner_may_be_killed_at_any_moment(service: Service, seed: int) -> None:
    """While sandboxes open, run, are copied and close. What is back is whole, and nothing else is there."""
    image = f"any-{os.getpid()}-{seed}"

    async def look() -> None:
        async with service.comes() as k:
            assert k.manager.missing == {}, "a sandbox is back or was never the caller's"
            count = len(k.manager.adopted)
            directory = service.directory
            assert len(list((directory / "boxes").iterdir())) == count
            assert len(list((directory / "kept").glob("*.json"))) == count
            assert not list((directory / "kept").glob("*.part"))
            assert len(list(group(service.state, "memory", 1).parent.glob("[0-9]*"))) == count
            assert mounts_below(service.state) == []
            for name in k.manager.adopted:
                assert await k.says(name, "echo usable; rm -f large") == "usable"
            layers = service.state / "images" / "layers"
            assert [path for path in layers.iterdir() if path.name.startswith(".part")] == []
            while len(k.manager.adopted) > 2:
                name, _ = k.manager.adopted.popitem()
                await k.do(name, Close())
            if image in k.manager.images.names():
                await k.manager.forget_image(image)

    for turn in range(8):
        process = service.start(ALL_AT_ONCE, before=f"IMAGE = {image!r}")
        for _ in range(1 + turn % 3):
            read_output(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait((turn * 7 + seed * 3) % 40 / 1000)
        process.kill()
        process.wait()
        run(look())


@pytest.mark.parametrize("method", ["write", "remove"])
def test_a_sandbox_that_was_half_made_or_half_closed_is_neither_back_nor_left(service: Service, method: str) -> None:
    process = service.start(
        """
await k.open("whole")
SandboxRecords.{method} = die
ready()
await k.open("half")
await k.do("half", Close())
""".replace("{method}", method),
        before="""
remove = SandboxRecords.remove
def die(self, it):
    if isinstance(it, str):
        remove(self, it)
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    read_output(process)
    assert process.wait() == -signal.SIGKILL

    async def story() -> None:
        async with service.comes(expected=["whole", "half"]) as k:
            assert list(k.manager.adopted) == ["whole"]
            assert k.manager.missing == {"half": NO_RECORD}
            assert [path.name for path in (service.directory / "boxes").iterdir()] == ["1"]
            assert [path.name for path in group(service.state, "cpu").parent.glob("[0-9]*")] == ["1"]
            await k.open("half")

    run(story())


def test_a_sandbox_of_which_no_record_can_be_written_is_lost_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def story() -> None:
        async with service.comes() as k:
            with monkeypatch.context() as patch:
                patch.setattr(SandboxRecords, "write", full)
                with pytest.raises(ManagerError, match=r"its record cannot be written: .* No space left on device"):
                    await k.open("one")
            assert list((service.directory / "boxes").iterdir()) == []
            await k.open("one")

    run(story())


def test_an_owner_that_dies_while_it_starts_harms_nothing(service: Service) -> None:
    service.killed('await k.open("one")\nready()')
    for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08):
        process = service.start("pass", before='print("ready", flush=True)')
        read_output(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.kill()
        process.wait()

    async def story() -> None:
        async with service.comes() as k:
            assert list(k.manager.adopted) == ["one"]
            assert await k.says("one", "echo usable") == "usable"

    run(story())


# ---- ownership -----------------------------------------------------------------------------------------------------


def test_a_second_owner_of_the_name_is_refused_with_the_id_of_the_first(service: Service) -> None:
    process = service.start('await k.open("one")\nready()\nawait asyncio.sleep(1000)')
    read_output(process)
    for _ in range(2):
        with pytest.raises(ManagerError, match=f"is process {process.pid}, ") as raised:
            run(service.end())
        assert not raised.value.retry
    assert process.poll() is None and service.spawner

    async def other() -> None:
        async with Keeper(service.state, f"{service.name}-2") as k:
            assert k.manager.adopted == {}

    run(other())


def test_the_sweep_of_another_owner_spares_live_owners_and_owners_with_live_spawners(service: Service) -> None:
    async def come_and_go() -> None:
        async with tangram.connect(state=service.state, cores=2, memory="64MiB") as t, t.sandbox(memory="16MiB") as box:
            (await box.exec("true")).check()

    process = service.start('await k.open("one")\nready()\nawait asyncio.sleep(1000)')
    read_output(process)
    run(come_and_go())
    process.kill()
    process.wait()
    run(come_and_go())
    run(stands_still(service.state))

    async def story() -> None:
        async with service.comes() as k:
            assert list(k.manager.adopted) == ["one"]
            assert await k.says("one", "echo usable") == "usable"
        os.kill(service.spawner, signal.SIGKILL)
        await until(lambda: not service.spawner, "it is dead")
        await come_and_go()
        assert list((service.state / "owners").iterdir()) == [] and service.groups() == [], "neither lives: swept"
        async with service.comes(expected=["one"]) as k:
            assert k.manager.missing == {"one": NO_RECORD}

    run(story())


def test_a_name_must_be_one(tmp_path: Path) -> None:
    for name in ("A", "-a", "a.b", "a/b", "..", "a" * 42, "ä"):
        with pytest.raises(InvalidConfig, match="owner"):
            BwrapManager(state=tmp_path, owner=name)


def test_warm_sandboxes_are_not_left_behind(service: Service) -> None:
    async def story() -> None:
        async with service.comes(warm=2) as k:
            for _ in range(2):
                await k.do("", Prepare(spec=SPEC))
        assert service.groups() == [] and service.spawner == 0
        async with service.comes(warm=2) as k:
            await k.do("", Prepare(spec=SPEC))
            await k.do("", Prepare(spec=SPEC))
            await k.open("one")
        assert [path.name for path in group(service.state, "cpu").parent.glob("[0-9]*")] == ["1"]

    run(story())
    service.killed('await k.do("", Prepare(spec=SPEC))\nready()', warm=2)

    async def again() -> None:
        async with service.comes() as k:
            assert list(k.manager.adopted) == ["one"]
            assert [path.name for path in (service.directory / "boxes").iterdir()] == ["1"]
            await k.close_all()
            with pytest.raises(ManagerError, match="there is no sandbox one"):
                await k.run("one", "true")

    run(again())


# ---- an owner that keeps nothing -----------------------------------------------------------------------------------


def test_an_owner_that_keeps_nothing_adopts_what_is_there_and_ends_it_when_it_goes(service: Service) -> None:
    service.killed(f'await k.open("one")\nawait k.run("one", {COUNTS!r})\nready()')

    async def story() -> None:
        async with service.comes(keeps=False, warm=1) as k:
            assert list(k.manager.adopted) == ["one"]
            await k.open("two")
            await k.do("", Prepare(spec=SPEC))
            assert await k.says("one", "echo usable") == "usable"
        assert list((service.state / "owners").iterdir()) == [] and service.groups() == []
        assert processes_of(service.state, set()) == {} and mounts_below(service.state) == []
        async with service.comes(expected=["one"]) as k:
            assert (k.manager.adopted, k.manager.missing) == ({}, {"one": NO_RECORD})

    run(story())


def test_what_an_owner_that_keeps_nothing_has_dies_with_it_also_when_it_is_killed(service: Service) -> None:
    service.killed(f'await k.open("one")\nawait k.run("one", {COUNTS!r})\nready()')
    service.killed(f'await k.open("two")\nawait k.run("two", {COUNTS!r})\nready()', keeps=False)
    eventually(lambda: not service.spawner, "it is dead")
    assert not inside(service.state, 1) and not inside(service.state, 2)

    async def story() -> None:
        async with service.comes() as k:
            assert (k.manager.adopted, list(k.manager.missing)) == ({}, ["one", "two"])

    run(story())


# ---- what is missing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["owner", "spawner"])
def test_sandboxes_die_with_their_spawner_and_are_missing(service: Service, first: str) -> None:
    process = service.start(f"""
for name in ("one", "two"):
    await k.open(name)
    await k.run(name, {COUNTS!r})
ready()
await asyncio.sleep(1000)
""")
    read_output(process)
    victims = [lambda: os.kill(service.spawner, signal.SIGKILL), process.kill]
    for kill in victims if first == "spawner" else reversed(victims):
        kill()
    process.wait()
    eventually(lambda: not service.spawner, "it is dead")

    async def story() -> None:
        async with service.comes(expected=["one", "three"]) as k:
            assert k.manager.adopted == {}
            assert list(k.manager.missing) == ["one", "two", "three"]
            assert "spawner" in k.manager.missing["one"] and "no record" in k.manager.missing["three"]
            assert list((service.directory / "boxes").iterdir()) == []
            assert cgroup_names(service.state) == []
            await k.open("one")
            assert await k.says("one", "ls") == ""

    run(story())


async def until_gone(keeper: Keeper, sandbox: str) -> None:
    """Until the manager has noticed that its spawner ended."""
    async with asyncio.timeout(GONE_S_MAX):
        while True:
            try:
                await keeper.manager.list(sandbox, "/")
            except ManagerError as error:
                if "is gone" in str(error) and "its first process has ended" not in str(error):
                    return
            await asyncio.sleep(0.005)


def test_a_spawner_that_dies_under_its_owner_is_replaced_and_the_new_one_is_kept(service: Service) -> None:
    async def story() -> None:
        async with service.comes() as k:
            await k.open("one")
            first = service.spawner
            os.kill(first, signal.SIGKILL)
            await until_gone(k, "one")
            await asyncio.gather(*(k.open(f"new-{number}") for number in range(3)))
            assert service.spawner not in (0, first)
        async with service.comes() as k:
            assert sorted(k.manager.adopted) == ["new-0", "new-1", "new-2"]
            assert k.manager.missing == {"one": "its first process has ended, and all its programs with it"}

    run(story())


def test_a_sandbox_that_ended_meanwhile_is_missing_alone(service: Service) -> None:
    service.killed('await k.open("one")\nawait k.open("two")\nready()')
    firsts = [pid for pid in inside(service.state, 1) if number_inside(pid) == 1]
    assert len(firsts) == 1
    os.kill(firsts[0], signal.SIGKILL)
    eventually(lambda: not inside(service.state, 1), "it is gone")

    async def story() -> None:
        async with service.comes() as k:
            assert list(k.manager.adopted) == ["two"] and list(k.manager.missing) == ["one"]
            assert [path.name for path in (service.directory / "boxes").iterdir()] == ["2"]

    run(story())


def test_a_sandbox_whose_first_process_exits_is_not_adopted(service: Service) -> None:
    """In version 1 of control groups what is frozen cannot die: the spawner still has the sandbox."""
    service.killed(f'await k.open("one")\nawait k.run("one", {COUNTS!r})\nawait k.open("two")\nready()')
    run(stands_still(service.state))
    (first,) = [pid for pid in inside(service.state, 1) if number_inside(pid) == 1]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: is_exiting(first), "the first process exits")

    async def story() -> None:
        async with service.comes() as k:
            assert list(k.manager.adopted) == ["two"] and list(k.manager.missing) == ["one"]
            assert [path.name for path in (service.directory / "boxes").iterdir()] == ["2"]
            await k.open("one")

    run(story())


def test_when_all_sandboxes_have_ended_the_spawner_ends_too(service: Service) -> None:
    service.killed('await k.open("one")\nready()')
    for pid in inside(service.state, 1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not service.spawner, "nothing is left to wait with")

    async def story() -> None:
        async with service.comes() as k:
            assert list(k.manager.missing) == ["one"]

    run(story())


def test_after_a_restart_of_the_machine_all_is_missing_and_nothing_is_in_the_way(service: Service) -> None:
    service.killed(f'await k.open("one")\nawait k.run("one", {COUNTS!r})\nawait k.open("two")\nready()')
    os.kill(service.spawner, signal.SIGKILL)
    eventually(lambda: not service.spawner, "it is dead")
    for name in service.groups():
        cgroups.remove_owner_cgroup(name)
    assert len(list((service.directory / "kept").glob("*.json"))) == 2, "what is on disk stays"

    async def story() -> None:
        async with service.comes() as k:
            assert (k.manager.adopted, list(k.manager.missing)) == ({}, ["one", "two"])
            await k.open("one")
            assert await k.says("one", "ls") == ""

    run(story())


# ---- what is found -------------------------------------------------------------------------------------------------


def test_files_that_are_not_records_are_logged_and_deleted(service: Service) -> None:
    service.killed("""
for number in range(1, 7):
    await k.open(f"sandbox-{number}")
ready()
""")
    kept = service.directory / "kept"
    whole = (kept / "1.json").read_bytes()
    (kept / "2.json").write_bytes(whole[: len(whole) // 2])
    (kept / "3.json").write_bytes(os.urandom(1000))
    (kept / "4.json").write_bytes(whole)
    fifth = msgspec.json.decode((kept / "5.json").read_bytes())
    (kept / "5.json").write_bytes(msgspec.json.encode(fifth | {"init": 1}))
    (kept / "6.json").unlink()
    (kept / "6.json").symlink_to("/etc/passwd")
    os.mkfifo(kept / "7.json")
    (kept / "8.json").write_bytes(b"[" * 100_000)
    (kept / "9.json").write_bytes(msgspec.json.encode(fifth | {"box": "9", "name": "ninth"}))
    (kept / "10.json").write_bytes(msgspec.json.encode(fifth | {"box": "10", "spec": {"memory_bytes": -1}}))
    (kept / "x.part").write_bytes(b"x")
    (kept / "nonsense").write_bytes(b"x")
    (service.directory / "images" / "nonsense").write_bytes(os.urandom(100))

    async def story() -> None:
        expected = [f"sandbox-{number}" for number in range(1, 7)]
        async with service.comes(expected=expected) as k:
            assert list(k.manager.adopted) == ["sandbox-1"]
            assert set(k.manager.missing) == {
                *(f"sandbox-{number}" for number in range(2, 7)), "ninth", "10.json", "2.json", "3.json", "4.json",
                "6.json", "7.json", "8.json",
            }  # fmt: skip
            assert "cannot be read" in k.manager.missing["3.json"]
            assert "another sandbox" in k.manager.missing["sandbox-5"]
            assert k.manager.missing["sandbox-3"] == NO_RECORD
            assert [path.name for path in kept.glob("*.json")] == ["1.json"]
            assert [path.name for path in (service.directory / "boxes").iterdir()] == ["1"]
            await k.open("sandbox-2")
            assert (kept / "10.json").exists()

    run(story())


def test_a_foreign_file_among_the_owners_is_left_alone(service: Service) -> None:
    (service.state / "owners").mkdir(mode=0o711, exist_ok=True)
    foreign = service.state / "owners" / f"{service.name}.file"
    foreign.write_bytes(b"x")

    async def story() -> None:
        async with service.comes() as k:
            await k.open("one")
            await k.close_all()

    run(story())
    assert foreign.read_bytes() == b"x"
    foreign.unlink()


def test_a_spawner_of_another_version_is_ended_without_a_request(service: Service, tmp_path: Path) -> None:
    source = Path(protocol.__file__).parents[4]
    older = tmp_path / "older" / "managers" / "sandboxes" / "bwrap" / "spawner"
    shutil.copytree(Path(protocol.__file__).parent, older)
    shutil.copytree(source / "processes", tmp_path / "older" / "processes")
    text = (older / "protocol.py").read_text()
    (older / "protocol.py").write_text(text.replace(f"\nPROTOCOL = {protocol.PROTOCOL}\n", "\nPROTOCOL = 0\n"))
    service.killed(
        f'await k.open("one")\nawait k.run("one", {COUNTS!r})\nready()',
        before="from tangram.processes import isolated; "
        f"isolated.__file__ = {str(tmp_path / 'older' / 'processes' / 'isolated.py')!r}",
    )
    old = service.spawner

    async def story() -> None:
        async with service.comes() as k:
            reason = f"its spawner belongs to another version of Tangram: protocol 0, not {protocol.PROTOCOL}"
            assert (k.manager.adopted, k.manager.missing) == ({}, {"one": reason})
            assert service.spawner not in (0, old) and not read_proc_file(old, "cmdline")
            await k.open("one")
            assert await k.says("one", "ls") == ""

    run(story())


def test_a_spawner_that_does_not_answer_is_ended(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTACH_S_MAX", 0.2)
    service.killed('await k.open("one")\nready()')
    run(stands_still(service.state))
    os.kill(service.spawner, signal.SIGSTOP)

    async def story() -> None:
        async with service.comes() as k:
            assert k.manager.missing == {"one": "its spawner does not respond: it hangs"}
            await k.open("one")

    run(story())


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 0.5), (0.5, 1.5)])
def test_the_next_owner_may_have_more_cores_or_fewer(service: Service, before: float, after: float) -> None:
    service.killed(
        f"""
await k.open("one")
assert await k.says("one", "nproc")
await k.run("one", {COUNTS!r})
await k.run("one", "true", reserved={int(before * 1000)})
ready()
""",
        cores=before,
    )

    async def story() -> None:
        async with service.comes(cores=after) as k:
            executed = await k.run("one", "nproc; sleep 0.1", reserved=int(after * 1000))
            assert int(executed.stdout) == -(-after // 1)
            await k.open("two")
            assert await k.says("two", "nproc") == "1"

    run(story())


# ---- leaks ---------------------------------------------------------------------------------------------------------


def descriptors(pid: int) -> list[str]:
    pids = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            pids.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(name.partition(":")[0] for name in pids)


def test_owners_that_come_and_go_leave_nothing_open(service: Service) -> None:
    async def visit() -> None:
        async with service.comes() as k:
            await k.run("one", "sleep 0.01 & echo said")
            await k.run("one", "x=1", session="held")
            await k.start("one", Exec(command="sleep 9209"))
            await k.open("two")
            await k.do("two", Close())

    async def first() -> None:
        async with service.comes() as k:
            await k.open("one")

    run(first())
    for _ in range(2):
        run(visit())
    gc.collect()
    run(stands_still(service.state))
    mine, its = descriptors(os.getpid()), descriptors(service.spawner)
    for _ in range(6):
        run(visit())
    gc.collect()
    assert descriptors(os.getpid()) == mine
    # A spare runner has two, its channel and its pidfd; the spawner may lose its owner before it forks one.
    limit = len(its) + 2
    eventually(lambda: len(descriptors(service.spawner)) <= limit, f"{descriptors(service.spawner)}, before {its}")
    assert visible_pids("9209") == []


def test_the_socket_of_the_spawner_is_out_of_reach(service: Service) -> None:
    service.killed('await k.open("one")\nready()')
    kept = service.directory / "kept"
    assert kept.stat().st_mode & 0o777 == 0o700 and kept.stat().st_uid == 0
    words = ["setpriv", f"--reuid={SANDBOX_UID}", f"--regid={SANDBOX_UID}", "--clear-groups", "ls", str(kept)]
    assert subprocess.run(words, capture_output=True, check=False).returncode != 0

    async def story() -> None:
        async with service.comes() as k:
            assert (await k.run("one", f"ls {kept}")).exit_code != 0
            assert (await k.run("one", "ls /proc/1/root" + str(kept))).exit_code != 0

    run(story())
