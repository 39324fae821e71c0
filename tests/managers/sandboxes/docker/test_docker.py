"""The docker manager, on a private engine: real containers, made of programs of this machine.

`make test-docker` runs these tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.managers.sandboxes.docker.docker_engine import (
    BARE_IMAGE,
    IMAGE,
    PrivateEngine,
    children,
    private_engine,
    read_proc,
)

from tangram.core.action import Action
from tangram.core.demand import Demand, cores
from tangram.core.messages import Grant, Share
from tangram.errors import FileFailed, InvalidConfig, ManagerError
from tangram.managers.base import Lease
from tangram.managers.sandboxes.docker import DockerManager
from tangram.managers.sandboxes.docker.engine import DockerEngine
from tangram.managers.sandboxes.docker.owners import SANDBOX_LABEL
from tangram.managers.work import KIB, MIB, Close, Commit, Exec, ExecResult, LeaseResult, Open, SandboxSpec, Work
from tangram.processes.streams import STDOUT, Output

pytestmark = pytest.mark.docker

WAIT_S = 30.0
"""For a condition that should come true at once."""
SMALL = SandboxSpec(memory_bytes=64 * MIB)


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with private_engine() as started:
        yield started


@pytest.fixture(scope="module")
def hiding_engine() -> Iterator[PrivateEngine]:
    """Its processes are not seen from here, as those of an engine in a virtual machine."""
    with private_engine(hides_processes=True) as started:
        yield started


@pytest.fixture(autouse=True)
def _quick_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs here that ignore a stop request never end."""
    monkeypatch.setattr("tangram.managers.sandboxes.docker.processes.STOP_GRACE_S", 0.3)


class Harness:
    """Starts work with a manager the way a service does."""

    def __init__(self, manager: DockerManager, engine: PrivateEngine) -> None:
        self.manager = manager
        self.engine = engine
        self._count = 0

    async def start(
        self, work: Work, box: str = "box", *, units: int = 1000, limit: int = 0, output: Output | None = None
    ) -> Lease:
        self._count += 1
        action = Action(id=f"a{self._count}", demand=Demand({"cpu": cores(1)}), sandbox=box)
        grant = Grant(action.id, "local", (Share("cpu@local", units, limit or units),), limit or units)
        return await self.manager.start(action, grant, work, output)

    async def do(self, work: Work, box: str = "box", **options: Any) -> LeaseResult:
        return await asyncio.wait_for((await self.start(work, box, **options)).wait(), WAIT_S)

    async def run(self, command: str | tuple[str, ...], box: str = "box", **fields: Any) -> ExecResult:
        ended = await self.do(Exec(command=command, **fields), box)
        assert not ended.lost and ended.executed is not None, ended
        return ended.executed

    async def text(self, command: str, box: str = "box", **fields: Any) -> str:
        """What a command prints that should succeed."""
        executed = await self.run(command, box, **fields)
        assert executed.exit_code == 0, executed
        return executed.stdout.decode()

    def inspect(self, box: str = "box") -> Any:
        filters = quote(json.dumps({"label": [f"{SANDBOX_LABEL}={box}"]}))
        [found] = json.loads(self.engine.request("GET", f"/containers/json?all=true&filters={filters}")[1])
        return json.loads(self.engine.request("GET", f"/containers/{found['Id']}/json")[1])


@contextlib.asynccontextmanager
async def opened(engine: PrivateEngine, spec: SandboxSpec | None = SMALL) -> AsyncIterator[Harness]:
    async with DockerManager(socket=engine.socket, image=IMAGE) as manager:
        harness = Harness(manager, engine)
        if spec is not None:
            await harness.do(Open(spec=spec))
        yield harness


def play(
    engine: PrivateEngine, scene: Callable[[Harness], Coroutine[Any, Any, None]], spec: SandboxSpec | None = SMALL
) -> None:
    """Run a scene with one open sandbox; afterwards nothing may be left at the engine."""

    async def whole() -> None:
        async with opened(engine, spec) as harness:
            await asyncio.wait_for(scene(harness), 3 * WAIT_S)

    asyncio.run(whole())
    assert engine.containers() == []
    assert owned_images(engine) == []


def owned_images(engine: PrivateEngine) -> list[Any]:
    return [image for image in engine.images() if "tangram.owner" in (image["Labels"] or {})]


async def until(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true"
        await asyncio.sleep(0.01)


# ---- programs -------------------------------------------------------------------------------------------------------


def test_a_program_has_its_streams_apart_and_its_exit_code(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        executed = await harness.run("echo out; echo err >&2; exit 3")
        assert (executed.stdout, executed.stderr, executed.exit_code) == (b"out\n", b"err\n", 3)
        executed = await harness.run(("printf", "%s|", "a b", "$HOME", ""))
        assert executed.stdout == b"a b|$HOME||"
        assert (await harness.run(("no-such-program",))).exit_code == 127
        assert (await harness.run("kill -9 $$")).exit_code == 137
        assert (await harness.run(("cat",), stdin=b"x" * 300_000)).stdout == b"x" * 300_000

    play(engine, scene)


def test_a_program_gets_its_directory_its_user_and_its_width(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        assert (
            await harness.text("pwd; id -u; echo $HOME $MINE $OURS", env={"MINE": "1"})
            == "/work\n61999\n/home/agent 1 2\n"
        )
        assert await harness.text("mkdir -p /work/d; touch ~/f") == ""
        assert await harness.text("pwd", cwd="d") == "/work/d\n"
        result = await harness.do(Exec(command="echo {cpus} $TANGRAM_CPUS $OMP_NUM_THREADS $(nproc)"), units=1000)
        assert result.executed is not None and result.executed.stdout == b"1 1 1 1\n"
        wide = await harness.do(Exec(command="echo {cpus} $(nproc)"), units=2000)
        assert wide.executed is not None and wide.executed.stdout.split()[0] == b"2"

    play(engine, scene, SandboxSpec(memory_bytes=64 * MIB, env={"OURS": "2"}))


def test_output_is_streamed_and_kept_within_bounds(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        output: list[tuple[int, bytes]] = []
        work = Exec(command="echo first; while [ ! -e go ]; do sleep 0.01; done; seq 100000", capture_bytes_max=1000)
        lease = await harness.start(work, output=lambda *piece: output.append(piece))
        await until(lambda: (STDOUT, b"first\n") in output)
        await harness.manager.write("box", "go", b"", mode=0o644)
        executed = (await lease.wait()).executed
        assert executed is not None and executed.stdout_bytes == len("first\n") + 588_895
        assert b"not shown" in executed.stdout and len(executed.stdout) < 1200
        assert b"".join(data for _, data in output).endswith(b"\n100000\n")

    play(engine, scene)


def test_several_programs_run_in_one_sandbox_at_once(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        wait = "touch {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo {0}"
        first = await harness.start(Exec(command=wait.format("a", "b")))
        second = await harness.start(Exec(command=wait.format("b", "a")))
        for lease, word in ((first, b"a\n"), (second, b"b\n")):
            executed = (await asyncio.wait_for(lease.wait(), WAIT_S)).executed
            assert executed is not None and executed.stdout == word

    play(engine, scene)


def test_a_program_that_uses_up_its_memory_is_killed_and_reported_as_out_of_memory(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        ended = await harness.do(Exec(command="head -c 200m /dev/zero | tail | wc -c"))
        assert ended.executed is not None and ended.executed.out_of_memory
        assert ended.usage.memory_peak_bytes >= 60 * MIB
        assert not (await harness.run("true")).out_of_memory, "of the action during which it happened only"

    play(engine, scene)


async def burn(harness: Harness) -> None:
    burnt = await harness.do(Exec(command="timeout 0.5 sh -c 'while :; do :; done'"))
    slept = await harness.do(Exec(command="sleep 0.1"))
    assert 0.0 < slept.usage.cpu_s < burnt.usage.cpu_s < 5.0
    assert burnt.usage.memory_peak_bytes > 100 * KIB


def test_usage_counts_what_a_program_burnt(engine: PrivateEngine) -> None:
    play(engine, burn)


def test_usage_is_measured_from_inside_where_processes_are_not_visible(hiding_engine: PrivateEngine) -> None:
    play(hiding_engine, burn)


# ---- CPU and standing still -----------------------------------------------------------------------------------------


def test_a_container_has_the_cpu_of_its_running_actions_together(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        def cpu() -> tuple[int, float]:
            host = harness.inspect()["HostConfig"]
            return host["CpuShares"], host["CpuQuota"] / host["CpuPeriod"]

        first = await harness.start(Exec(command="sleep 1000"), units=500, limit=1000)
        assert cpu() == (512, 1.0)
        second = await harness.start(Exec(command="sleep 1000"), units=1000, limit=2000)
        assert cpu() == (1536, 3.0)
        second.resize(reserved=250, limit=500)
        await until(lambda: cpu() == (768, 1.5))
        await first.stop()
        assert cpu() == (256, 0.5)
        await second.stop()

    play(engine, scene)


def test_the_engine_gets_no_redundant_requests(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        async def updates() -> int:
            filters = '{"event":["update"]}'
            _, answer = engine.request("GET", f"/events?since={began}&until={time.time():.3f}&filters={filters}")
            return len(answer.splitlines())

        began = f"{time.time():.3f}"
        for _ in range(3):
            await harness.do(Exec(command="true"), units=500)
        assert await updates() == 1
        await harness.do(Exec(command="true"), units=700)
        assert await updates() == 2

    play(engine, scene)


def test_nothing_in_a_sandbox_runs_while_no_action_does(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        assert harness.inspect()["State"]["Paused"]
        await harness.run("while :; do echo >>ticks; sleep 0.01; done >/dev/null 2>&1 &")
        assert harness.inspect()["State"]["Paused"]
        ticks = len(await harness.manager.read("box", "ticks", bytes_max=MIB))
        assert len(await harness.manager.read("box", "ticks", bytes_max=MIB)) == ticks
        await harness.text("n=$(wc -l <ticks); while [ $(wc -l <ticks) -lt $((n + 5)) ]; do sleep 0.01; done")
        assert harness.inspect()["State"]["Paused"]
        assert len(await harness.manager.read("box", "ticks", bytes_max=MIB)) > ticks, "it ran on beside an action"

    play(engine, scene)


def test_what_is_left_running_with_the_streams_does_not_delay_the_end(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        for number in range(3):
            assert await harness.text(f"sleep 100{number} & echo left") == "left\n"
        assert await harness.text("exit 0", session="s") == ""
        await harness.run("sleep 1003 &", session="t")
        ended = await harness.run("exit 4", session="t")
        assert (ended.exit_code, ended.session_ended) == (4, True)
        assert sorted((await harness.text("ps -eo args | grep ^sleep.100")).split("\n"))[1:] == [
            f"sleep 100{number}" for number in range(4)
        ]

    play(engine, scene)


def test_without_taskset_the_container_has_the_cpus_of_its_only_action(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        await harness.do(Open(spec=SandboxSpec(image=BARE_IMAGE)), "bare")
        show = (
            "while read -r key value; do case $key in Cpus_allowed_list:) echo $value;; esac; done </proc/self/status"
        )
        ended = await harness.do(Exec(command=show), "bare", units=1000)
        assert ended.executed is not None and ended.executed.stdout.strip().isdigit(), "one CPU, not a range"
        with pytest.raises(ManagerError, match="bash"):
            await harness.run("true", "bare", session="s")

    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one CPU")
    play(engine, scene, None)


# ---- stopping -------------------------------------------------------------------------------------------------------

TREE = "trap '' TERM; (setsid sleep 2001 &); env -i sleep 2002 & (env -i setsid sleep 2003 &); sleep 2004 & sleep 2005"


def test_stop_ends_all_that_the_action_started_and_nothing_else(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        await harness.run("sleep 2000 & env -i setsid sleep 2006 &")
        lease = await harness.start(Exec(command=TREE))
        await asyncio.wait_for(lease.stop(), WAIT_S)
        executed = (await lease.wait()).executed
        assert executed is not None and executed.exit_code is None
        left = (await harness.text("ps -eo args | grep ^sleep.2 | sort")).splitlines()
        assert left == ["sleep 2000", "sleep 2006"]

    play(engine, scene)


def test_stop_does_not_touch_an_action_that_runs_beside(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        beside = await harness.start(Exec(command="sleep 2100 & while [ ! -e go ]; do sleep 0.01; done; jobs"))
        lease = await harness.start(Exec(command="sleep 2101 & setsid sleep 2102"))
        await asyncio.wait_for(lease.stop(), WAIT_S)
        await harness.manager.write("box", "go", b"", mode=0o644)
        executed = (await asyncio.wait_for(beside.wait(), WAIT_S)).executed
        assert executed is not None and executed.exit_code == 0 and b"sleep 2100" in executed.stdout
        assert await harness.text("ps -eo args | grep ^sleep.2") == "sleep 2100\n"

    play(engine, scene)


def test_stop_outruns_a_program_that_forks_all_the_time(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        lease = await harness.start(Exec(command="trap '' TERM; f() { sleep 0.01; f & f & wait; }; f"))
        await asyncio.wait_for(lease.stop(), WAIT_S)
        assert (await harness.text("ps -e | wc -l")).strip() == "7", "head line, init, holder, and this command's four"

    play(engine, scene, SandboxSpec(memory_bytes=64 * MIB, processes_max=60))


def test_stop_works_from_inside_where_processes_are_not_visible(hiding_engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        await harness.run("sleep 2200 &")
        lease = await harness.start(Exec(command="trap '' TERM; (setsid sleep 2201 &); sleep 2202 & sleep 2203"))
        await asyncio.wait_for(lease.stop(), WAIT_S)
        assert await harness.text("ps -eo args | grep ^sleep.2") == "sleep 2200\n"
        held = await harness.start(Exec(command="sleep 2204", session="s"))
        await asyncio.wait_for(held.stop(), WAIT_S)
        executed = (await held.wait()).executed
        assert executed is not None and executed.session_ended
        assert await harness.text("ps -eo args | grep -e ^sleep.2 -e ^bash.--no") == "sleep 2200\n"

    play(hiding_engine, scene)


def test_a_start_that_is_cancelled_leaves_nothing_running(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        for delay_s in (0.0, 0.01, 0.03, 0.05):
            starting = asyncio.create_task(harness.start(Exec(command="sleep 2300")))
            await asyncio.sleep(delay_s)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).stop()
        assert harness.inspect()["State"]["Paused"]
        assert (await harness.run("ps -eo args | grep ^sleep.2")).stdout == b""

    play(engine, scene)


# ---- sessions -------------------------------------------------------------------------------------------------------


def test_a_session_keeps_directory_variables_and_functions(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        assert await harness.text("pwd; cd /tmp; x=1; f() { echo f$x; }", session="s") == "/work\n"
        assert await harness.text("pwd; f; echo $MINE", session="s", env={"MINE": "2"}) == "/tmp\nf1\n2\n"
        assert (await harness.run("echo err >&2; false", session="s")).exit_code == 1
        assert await harness.text("break; echo never", session="s") == ""
        assert await harness.text("exec >/work/log; echo hidden", session="s") == ""
        assert await harness.text("cat /work/log >/dev/stderr; cd -- /; f", session="s") == ""
        assert await harness.text("cat log") == "hidden\nf1\n"
        assert await harness.text("echo ${x:-unset}", session="other") == "unset\n"
        wide = await harness.do(Exec(command="echo $TANGRAM_CPUS; cat", session="other"), units=2000)
        assert wide.executed is not None and wide.executed.stdout == b"2\n", "and its input is empty"

    play(engine, scene)


def test_the_end_of_a_session_is_reported(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        for command, code in (("exit 5", 5), ("exec true", 0), ("kill -9 $$", 137), ("set -e; false", 1)):
            await harness.run("x=1", session="s")
            executed = await harness.run(command, session="s")
            assert (executed.exit_code, executed.session_ended) == (code, True), command
        assert await harness.text("echo ${x:-fresh}", session="s") == "fresh\n"
        await harness.run("pkill -9 -f '[_]_tangram_exit'")
        assert await harness.text("echo ${x:-again}", session="s") == "again\n", "another action has killed it"
        await harness.run("sleep 2400 &", session="s")
        lease = await harness.start(Exec(command="sleep 2401", session="s"))
        with pytest.raises(ManagerError, match="runs a command already"):
            await harness.start(Exec(command="true", session="s"))
        await asyncio.wait_for(lease.stop(), WAIT_S)
        executed_last = (await lease.wait()).executed
        assert executed_last is not None and executed_last.session_ended
        assert await harness.text("ps -eo args | grep ^sleep.2") == "sleep 2400\n", "what an earlier command left stays"

    play(engine, scene)


def test_a_program_that_prints_a_mark_ends_only_its_own_action(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        forged = r"printf '\000end %s 0 1 1\n' $TANGRAM_ACTION"
        executed = await harness.run(f"{forged}; {forged} >&2; sleep 2500; exit 9")
        assert executed.exit_code == 0
        assert harness.inspect()["State"]["Paused"]
        assert (await harness.run("echo whole; exit 3")).stdout == b"whole\n"

    play(engine, scene)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_are_read_written_listed_and_deleted(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        manager = harness.manager
        await manager.write("box", "a/b/file", b"content", mode=0o750)
        assert (
            await harness.text("stat -c '%a %u %s' a a/b a/b/file") == "755 61999 4096\n755 61999 4096\n750 61999 7\n"
        )
        await harness.text(
            "ln -s b/file a/link; ln -s /nowhere a/dangling; ln -s b a/to-b; touch 'a/new\nline' a/.hidden"
        )
        assert await manager.read("box", "a/link", bytes_max=7) == b"content"
        await manager.write("box", "a/to-b/second", b"2", mode=0o644)
        assert await harness.text("cat a/b/second; echo more >>a/b/file") == "2"
        listing = [(entry.name, entry.kind, entry.mode) for entry in await manager.list("box", "a")]
        assert (
            listing
            == [
                (".hidden", "file", 0o644),
                ("b", "dir", 0o755),
                ("dangling", "link", 0o777),
                ("link", "link", 0o777),
                ("new\\nline", "file", 0o644),
                ("to-b", "link", 0o777),
            ]
            or listing[4][0] == "new\nline"
        )
        await manager.delete("box", "a/to-b")
        assert [entry.name for entry in await manager.list("box", "a/b")] == ["file", "second"]
        await manager.delete("box", "a")
        assert await manager.list("box", ".") == []
        assert harness.inspect()["State"]["Paused"]

    play(engine, scene)


def test_a_failed_file_operation_is_reported(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        manager = harness.manager
        await manager.write("box", "file", b"12345", mode=0o644)
        await harness.text("mkdir d; mkfifo pipe; ln -s loop loop")
        for reason, work in (
            ("no such file", manager.read("box", "absent", bytes_max=9)),
            ("not a directory", manager.read("box", "file/below", bytes_max=9)),
            ("5 bytes", manager.read("box", "file", bytes_max=4)),
            ("directory", manager.read("box", "d", bytes_max=9)),
            ("not a regular file", manager.read("box", "pipe", bytes_max=9)),
            ("l", manager.read("box", "loop", bytes_max=9)),
            ("directory", manager.write("box", "d", b"", mode=0o644)),
            ("not a directory", manager.write("box", "file/below", b"", mode=0o644)),
            ("no such file", manager.list("box", "absent")),
            ("not a directory", manager.list("box", "file")),
            ("no such file", manager.delete("box", "absent")),
            ("denied|permitted", manager.delete("box", "/bin/sh")),
            ("no such file", manager.pack("box", "absent", io.BytesIO(), bytes_max=9)),
            ("more than", manager.pack("box", "/bin/bash", io.BytesIO(), bytes_max=9)),
            ("not a tar", manager.unpack("box", "d", io.BytesIO(b"no tar" * 300))),
        ):
            with pytest.raises(FileFailed, match=reason):
                await work
        assert await manager.read("box", "file", bytes_max=5) == b"12345"

    play(engine, scene)


def test_a_tree_goes_out_and_in_again_as_a_tar(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        await harness.text("mkdir -p tree/sub; echo 1 >tree/one; ln -s one tree/link; chmod 4755 tree/one")
        packed = io.BytesIO()
        await harness.manager.pack("box", "tree", packed, bytes_max=MIB)
        with tarfile.open(fileobj=io.BytesIO(packed.getvalue())) as tar:
            assert sorted(tar.getnames()) == ["tree", "tree/link", "tree/one", "tree/sub"]
        await harness.manager.unpack("box", "some/place", io.BytesIO(packed.getvalue()))
        shown = await harness.text("cd some/place/tree; cat link; stat -c '%a %u' one; touch sub/mine")
        assert shown == "1\n755 61999\n", "without privileges, and its user's"

    play(engine, scene)


def test_devices_and_foreign_owners_in_a_tar_do_not_get_in(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            device = tarfile.TarInfo("disk")
            device.type, device.devmajor, device.devminor = tarfile.BLKTYPE, 254, 0
            tar.addfile(device)
            file = tarfile.TarInfo("mine")
            file.uid = file.gid = 0
            tar.addfile(file)
        await harness.manager.unpack("box", "in", io.BytesIO(content.getvalue()))
        assert await harness.text("ls in; stat -c %u in/mine") == "mine\n61999\n"
        with tarfile.open(fileobj=(escaping := io.BytesIO()), mode="w") as tar:
            tar.addfile(tarfile.TarInfo("../../../escaped"))
        with contextlib.suppress(FileFailed):
            await harness.manager.unpack("box", "in", io.BytesIO(escaping.getvalue()))

    play(engine, scene)
    assert not Path("/escaped").exists()


# ---- sandboxes ------------------------------------------------------------------------------------------------------


def test_a_sandbox_is_kept_from_the_machine(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        assert await harness.text("ls /sys/class/net") == "lo\n"
        status = await harness.text("grep -e NoNewPrivs -e CapEff -e CapBnd -e Seccomp: /proc/self/status")
        assert dict(line.split() for line in status.splitlines()) == {
            "CapEff:": "0" * 16,
            "CapBnd:": "0" * 16,
            "NoNewPrivs:": "1",
            "Seccomp:": "2",
        }
        assert await harness.text("ulimit -n") == "100\n"
        assert (await harness.run("touch /bin/mine")).exit_code == 1
        assert (await harness.run(("sh", "-c", "for i in $(seq 40); do sleep 5 & done"))).exit_code != 0, (
            "more processes than it may"
        )

    play(engine, scene, SandboxSpec(memory_bytes=64 * MIB, processes_max=20, open_files_max=100))


def test_a_program_cannot_end_its_own_sandbox(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        await harness.run("kill -9 -1; kill -9 1; pkill -9 sleep")
        assert await harness.text("echo still here") == "still here\n"

    play(engine, scene)


def test_root_is_refused_where_it_would_be_root_of_the_machine(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        with pytest.raises(ManagerError, match="userns-remap") as caught:
            await harness.do(Open(spec=SandboxSpec(user="root")))
        assert not caught.value.retry

    play(engine, scene, None)


def test_root_of_an_engine_that_maps_users_has_no_rights_outside() -> None:
    async def scene(harness: Harness) -> None:
        shown = await harness.text("id -u; echo $HOME; touch /bin/mine ~/mine; cat /proc/self/uid_map")
        assert shown.split() == ["0", "/root", "0", "200000", "65536"]
        assert (await harness.run("grep CapEff /proc/self/status")).stdout != b"CapEff:\t0000000000000000\n"
        await harness.manager.write("box", "d/file", b"1", mode=0o600)
        assert await harness.text("stat -c %u d d/file") == "0\n0\n"

    with private_engine(maps_users=True) as engine:
        play(engine, scene, SandboxSpec(memory_bytes=64 * MIB, user="root"))


def test_where_the_disk_cannot_be_limited_a_single_file_is(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        assert (await harness.run("head -c 2m /dev/zero >file")).exit_code != 0
        assert await harness.text("stat -c %s file") == f"{MIB}\n"

    play(engine, scene, SandboxSpec(memory_bytes=64 * MIB, disk_bytes=MIB))


def test_a_container_that_cannot_be_opened_is_reported_and_leaves_nothing(engine: PrivateEngine) -> None:
    engine.load("tangram-test:empty", ())

    async def scene(harness: Harness) -> None:
        for image, reason in (
            ("absent:image", "docker pull absent:image"),
            ("tangram-test:empty", "sleep"),
            ("a b", "name"),
        ):
            with pytest.raises(ManagerError, match=reason):
                await harness.do(Open(spec=SandboxSpec(image=image)))
            assert engine.containers() == []
        with pytest.raises(ManagerError, match="no sandbox"):
            await harness.run("true")
        await harness.do(Open(spec=SMALL))
        with pytest.raises(ManagerError, match="open already"):
            await harness.do(Open(spec=SMALL))
        await harness.do(Close())
        assert engine.containers() == []
        await harness.do(Close())
        with pytest.raises(ManagerError, match="no sandbox"):
            await harness.manager.read("box", "file", bytes_max=1)

    play(engine, scene, None)


def test_an_open_that_is_cancelled_leaves_no_container(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        for delay_s in (0.0, 0.005, 0.02, 0.05, 0.1, 0.2):
            opening = asyncio.create_task(harness.do(Open(spec=SMALL), f"box-{delay_s}"))
            await asyncio.sleep(delay_s)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await opening
                await harness.do(Close(), f"box-{delay_s}")
            assert engine.containers() == []

    play(engine, scene, None)


def test_a_container_that_is_killed_from_outside_is_lost(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        lease = await harness.start(Exec(command="sleep 3000"))
        held = await harness.start(Exec(command="sleep 3001", session="s"))
        engine.request("POST", f"/containers/{harness.inspect()['Id']}/kill")
        for each in (lease, held):
            ended = await asyncio.wait_for(each.wait(), WAIT_S)
            assert "ended while the action ran" in ended.lost
            assert ended.executed is not None and ended.executed.exit_code is None
        with pytest.raises(ManagerError, match="is gone") as caught:
            await harness.run("true")
        assert not caught.value.retry
        with pytest.raises(ManagerError, match="is gone"):
            await harness.manager.read("box", "file", bytes_max=1)
        await harness.do(Close())
        await harness.do(Open(spec=SMALL))
        assert await harness.text("echo again") == "again\n"

    play(engine, scene)


def test_closing_ends_what_runs_in_it(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        lease = await harness.start(Exec(command="sleep 3100"))
        await harness.do(Close())
        assert "closed" in (await asyncio.wait_for(lease.wait(), WAIT_S)).lost
        assert engine.containers() == []

    play(engine, scene)


def test_leaving_ends_everything_also_what_runs(engine: PrivateEngine) -> None:
    async def whole() -> None:
        async with opened(engine) as harness:
            lease = await harness.start(Exec(command="sleep 3200"))
            await harness.run("x=1", session="s")
            await harness.do(Commit(image="left"))
        assert "closed" in (await asyncio.wait_for(lease.wait(), WAIT_S)).lost
        with pytest.raises(ManagerError):
            await harness.run("true")

    asyncio.run(whole())
    assert engine.containers() == []
    assert owned_images(engine) == []


# ---- images ---------------------------------------------------------------------------------------------------------


def test_a_commit_can_be_opened_and_goes_with_its_owner(engine: PrivateEngine) -> None:
    async def scene(harness: Harness) -> None:
        await harness.text("echo kept >file; echo $OURS")
        await harness.run("while :; do sleep 0.01; done &")
        beside = await harness.start(Exec(command="while [ ! -e go ]; do sleep 0.01; done; echo went on"))
        await harness.do(Commit(image="first"))
        await harness.manager.write("box", "go", b"", mode=0o644)
        executed = (await asyncio.wait_for(beside.wait(), WAIT_S)).executed
        assert executed is not None and executed.stdout == b"went on\n"
        await harness.do(Open(spec=SandboxSpec(image="first")), "second")
        assert await harness.text("cat file; echo ${OURS:-not here}; ls", "second") == "kept\nnot here\nfile\n"
        await harness.text("echo more >>file", "second")
        await harness.do(Commit(image="A name of any kind"), "second")
        await harness.do(Open(spec=SandboxSpec(image="A name of any kind")), "third")
        assert await harness.text("cat file", "third") == "kept\nmore\n"

    play(engine, scene, SandboxSpec(memory_bytes=64 * MIB, env={"OURS": "secret"}))


@pytest.fixture
def delayed_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of the end of a container never arrives."""
    on_event = DockerManager._on_event  # noqa: SLF001, no engine delays its events on request

    def without_end(self: DockerManager, event: Any) -> None:
        if event["Action"] != "die":
            on_event(self, event)

    monkeypatch.setattr(DockerManager, "_on_event", without_end)


async def kill(harness: Harness) -> None:
    """Returns when the engine knows that the container has ended."""
    await asyncio.to_thread(harness.engine.request, "POST", f"/containers/{harness.inspect()['Id']}/kill")
    await until(lambda: not harness.inspect()["State"]["Running"])


async def require_no_commit(harness: Harness) -> None:
    with pytest.raises(ManagerError, match="is gone") as caught:
        await harness.do(Commit(image="none"))
    assert not caught.value.retry
    assert owned_images(harness.engine) == []
    with pytest.raises(ManagerError, match="no image"):
        await harness.do(Open(spec=SandboxSpec(image="none")), "second")


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.usefixtures("delayed_end")
def test_a_commit_fails_once_the_container_has_ended(
    engine: PrivateEngine, hiding_engine: PrivateEngine, visible: bool, busy: bool
) -> None:
    """Before the manager gets the event of its end. An engine commits containers that have ended."""

    async def scene(harness: Harness) -> None:
        if busy:
            await harness.start(Exec(command="sleep 3400"))
        await kill(harness)
        await require_no_commit(harness)
        harness.manager._containers["box"].mark_lost("the event arrives")  # noqa: SLF001, see delayed_end

    play(engine if visible else hiding_engine, scene)


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.usefixtures("delayed_end")
def test_a_commit_fails_if_the_container_ends_while_it_is_copied(
    engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    request = DockerEngine.request_json

    async def scene(harness: Harness) -> None:
        async def request_and_kill(self: DockerEngine, method: str, path: str, **options: Any) -> Any:
            reply = await request(self, method, path, **options)
            if path == "/commit":
                await kill(harness)
            return reply

        monkeypatch.setattr(DockerEngine, "request_json", request_and_kill)
        if busy:
            await harness.start(Exec(command="sleep 3401"))
        await require_no_commit(harness)
        harness.manager._containers["box"].mark_lost("the event arrives")  # noqa: SLF001, see delayed_end

    play(engine, scene)


def test_every_operation_fails_once_the_first_process_exits(engine: PrivateEngine) -> None:
    """Before the engine notices: containerd, which reports the end to it, is stopped."""

    async def scene(harness: Harness) -> None:
        manager, first = harness.manager, harness.inspect()["State"]["Pid"]
        lease = await harness.start(Exec(command="sleep 3402"))
        (containerd,) = [pid for pid in children(engine.pid) if b"containerd" in read_proc(pid, "cmdline")]
        os.kill(containerd, signal.SIGSTOP)
        try:
            os.kill(first, signal.SIGKILL)
            await until(lambda: not read_proc(first, "cmdline"))
            for operation in (
                harness.do(Commit(image="none")),
                harness.do(Exec(command="true")),
                manager.read("box", "/bin/sh", bytes_max=MIB),
                manager.write("box", "file", b"content", mode=0o644),
                manager.list("box", "/"),
                manager.delete("box", "file"),
            ):
                with pytest.raises(ManagerError, match="is gone: its first process has ended"):
                    await asyncio.wait_for(operation, WAIT_S)
        finally:
            os.kill(containerd, signal.SIGCONT)
        assert (await asyncio.wait_for(lease.wait(), WAIT_S)).lost

    play(engine, scene)


def test_a_remembered_image_outlives_its_owner_until_it_is_forgotten(engine: PrivateEngine) -> None:
    async def make() -> None:
        async with opened(engine) as harness:
            await harness.text("echo built >file")
            await harness.do(Commit(image="built"))
            assert await harness.manager.find_image("the key") == ""
            await harness.manager.tag_image("the key", "built")

    async def use(harness: Harness) -> None:
        name = await harness.manager.find_image("the key")
        await harness.do(Open(spec=SandboxSpec(image=name)), "again")
        assert await harness.text("cat file", "again") == "built\n"
        await harness.manager.forget_image(name)
        assert await harness.manager.find_image("the key") == ""
        assert await harness.text("cat file", "again") == "built\n", "what was opened from it lives on"
        await harness.do(Close(), "again")

    asyncio.run(make())

    async def whole() -> None:
        async with opened(engine, None) as harness:
            await use(harness)

    asyncio.run(whole())
    assert engine.containers() == []


def test_a_root_directory_and_a_saved_tar_become_images(engine: PrivateEngine, tmp_path: Path) -> None:
    from tests.managers.sandboxes.docker.docker_engine import BARE_PROGRAMS, packed

    with tarfile.open(fileobj=io.BytesIO(packed(BARE_PROGRAMS))) as tar:
        tar.extraction_filter = lambda member, path: member  # Python 3.12 requires a filter
        tar.extractall(tmp_path / "root")
    (tmp_path / "root" / "mark").write_text("from a directory\n")
    (tmp_path / "saved.tar").write_bytes(engine.request("GET", f"/images/{BARE_IMAGE}/get")[1])
    (tmp_path / "noise.tar").write_bytes(b"noise" * 1000)

    async def scene(harness: Harness) -> None:
        name = await harness.manager.add_image(str(tmp_path / "root"))
        await harness.do(Open(spec=SandboxSpec(image=name)))
        assert await harness.text("cat /mark") == "from a directory\n"
        assert await harness.manager.add_image(str(tmp_path / "saved.tar")) == BARE_IMAGE
        for path in ("noise.tar", "absent.tar"):
            with pytest.raises((ManagerError, InvalidConfig)):
                await harness.manager.add_image(str(tmp_path / path))

    play(engine, scene, None)


# ---- owners ---------------------------------------------------------------------------------------------------------

ORPHAN = """
import asyncio, sys
from tangram.managers.sandboxes.docker import DockerManager
from tangram.managers.work import Commit, Open, SandboxSpec
from tests.managers.sandboxes.docker.test_docker import Harness

async def main():
    async with DockerManager(socket=sys.argv[1], image=sys.argv[2]) as manager:
        harness = Harness(manager, None)
        await harness.do(Open(spec=SandboxSpec()))
        await harness.do(Commit(image="orphan"))
        print("open", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_what_a_dead_owner_left_is_swept_and_what_a_living_one_has_is_not(engine: PrivateEngine) -> None:
    async def whole() -> None:
        async with opened(engine) as living:
            words = [sys.executable, "-c", ORPHAN, engine.socket, IMAGE]
            dead = await asyncio.create_subprocess_exec(
                *words, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[4]
            )
            assert dead.stdout is not None
            assert await dead.stdout.readline() == b"open\n"
            assert len(engine.containers()) == 2
            dead.kill()
            await dead.wait()
            async with opened(engine, None):
                assert [container["Id"] for container in engine.containers()] == [living.inspect()["Id"]]
                assert owned_images(engine) == []
            assert await living.text("echo alive") == "alive\n"

    asyncio.run(whole())


# ---- the engine -----------------------------------------------------------------------------------------------------


async def until_closed(harness: Harness) -> None:
    """The manager refuses all work until it is connected to the engine again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(ManagerError):
                await harness.do(Close())
                return
            await asyncio.sleep(0.01)


def test_an_engine_that_ends_loses_what_ran_and_no_more() -> None:
    async def whole(mortal: PrivateEngine) -> None:
        async with DockerManager(socket=mortal.socket, image=IMAGE) as manager:
            harness = Harness(manager, mortal)
            await harness.do(Open(spec=SMALL))
            lease = await harness.start(Exec(command="sleep 3300"))
            await asyncio.to_thread(mortal.end)
            assert (await asyncio.wait_for(lease.wait(), WAIT_S)).lost
            with pytest.raises(ManagerError):
                await harness.run("true")
            await asyncio.to_thread(mortal.start)
            await until_closed(harness)
            await harness.do(Open(spec=SMALL))
            assert await harness.text("echo again") == "again\n"

    with private_engine() as mortal:
        asyncio.run(whole(mortal))
