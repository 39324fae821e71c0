"""The process backend: what it has beyond the contract of managers, and what it says that it has not."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.contracts.conftest import DEADLINE_S, Harness, alive, process, until

from tangram.core.demand import CORE
from tangram.errors import FileFailed, ManagerError
from tangram.managers.sandboxes import process as module
from tangram.managers.sandboxes.process import ProcessManager
from tangram.managers.sandboxes.process.files import DEPTH_MAX
from tangram.managers.work import MIB, Open, Prepare, SandboxSpec
from tangram.processes.process_tree import SANDBOX_MARK, ProcessTable, ProcessTree, read_process, send_signal

Scenario = Callable[[Harness, Path], Awaitable[None]]


def scenario(test: Scenario) -> Callable[[Path], None]:
    """A coroutine as a test, inside a process manager of its own."""

    def run(tmp_path: Path) -> None:
        harness = Harness(process, tmp_path / "root")

        async def main() -> None:
            async with asyncio.timeout(DEADLINE_S), harness:
                await test(harness, tmp_path)

        asyncio.run(main())
        assert [marker for marker in harness.markers if alive(marker)] == []

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def wait_for(condition: Callable[[], bool]) -> None:
    """Without letting the loop run."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def present(path: str) -> bool:
    return Path(path).exists()


def test_the_backend_reports_that_it_isolates_nothing() -> None:
    assert (ProcessManager.backend, ProcessManager.isolates) == ("process", False)
    assert "isolates NOTHING" in (module.__doc__ or "")


def test_the_pools_are_what_it_was_given_or_what_this_process_may_use() -> None:
    given = ProcessManager(cores=1.5, memory_bytes=512 * MIB, node="n")
    assert [(pool.name, pool.total) for pool in given.pools()] == [("cpu@n", 1500), ("memory@n", 512)]
    cpu, memory = ProcessManager().pools()
    assert cpu.total == CORE * len(os.sched_getaffinity(0))
    assert memory.total > 100


# ---- programs -----------------------------------------------------------------------------------------------------


@scenario
async def test_limits_of_each_process_are_set_but_not_that_of_the_address_space(
    harness: Harness, tmp_path: Path
) -> None:
    box = await harness.open(memory_bytes=256 * MIB, disk_bytes=8 * MIB, open_files_max=64)
    assert await box.says("ulimit -n; ulimit -c; ulimit -d; ulimit -f; ulimit -v") == (
        f"64\n0\n{256 * 1024}\n{8 * 1024}\nunlimited"
    )
    assert (await box.run("head -c 9000000 /dev/zero > large")).exit_code == 128 + signal.SIGXFSZ
    assert (await box.run(("python3", "-c", "bytearray(300 << 20)"))).exit_code == 1


@scenario
async def test_variables_with_names_that_no_shell_takes_reach_a_program(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open(env={"a.b": "1"})
    assert await box.says(("printenv", "a.b", "c-d"), env={"c-d": "2"}) == "1\n2"


@scenario
async def test_home_and_temporary_files_are_in_the_sandbox_and_vanish_with_it(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    home, temporary, here = (await box.says('echo "$HOME"; dirname $(mktemp); pwd')).split("\n")
    assert home == here
    assert present(temporary)
    assert home.startswith(f"{harness.root}/")
    assert temporary.startswith(f"{harness.root}/")
    assert await box.names() == []
    await box.close()
    assert not present(home)
    assert not present(temporary)


@scenario
async def test_a_command_that_is_too_long_for_the_kernel_is_a_result(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    done = await box.run(("true", *["x" * 100_000] * 100))
    assert (done.exit_code, done.stdout) == (126, b"")
    assert b"too long" in done.stderr


@scenario
async def test_a_word_that_looks_like_an_option_is_still_a_program(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    done = await box.run(("--version",))
    assert (done.exit_code, done.stdout) == (127, b"")


@scenario
async def test_programs_are_spread_over_the_cores(harness: Harness, tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    box = await harness.open()
    before = os.sched_getaffinity(0)
    output: list[bytes] = []
    ask = "exec python3 -c 'import os; print(*os.sched_getaffinity(0), flush=True); import time; time.sleep(1000)'"
    leases = [await box.start(ask, width=CORE, output=lambda stream, data: output.append(data)) for _ in range(cpus)]
    await until(lambda: len(output) == cpus)
    assert {int(text) for text in output} == before
    assert os.sched_getaffinity(0) == before
    for lease in leases:
        await lease.stop()


@scenario
async def test_no_program_gets_a_width_above_the_number_of_cores(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    available = len(os.sched_getaffinity(0))
    assert await box.says("echo $TANGRAM_CPUS {cpus}", width=1000 * CORE) == f"{available} {available}"


@scenario
async def test_the_use_of_cpu_and_memory_is_reported(harness: Harness, tmp_path: Path) -> None:
    # Well above the peak of this process, with which the other one starts.
    size = 2 * max(200 << 20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    box = await harness.open(memory_bytes=2 * size)
    usage = (await box.end(f"python3 -c 'x = bytearray({size}); sum(range(3000000))'; true")).usage
    assert usage.cpu_s > 0.02
    assert usage.memory_peak_bytes > size


@scenario
async def test_a_memory_peak_of_this_process_is_not_reported(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    ballast = b"x" * (200 << 20)
    assert (await box.end(("true",))).usage.memory_peak_bytes == 0
    del ballast


@scenario
async def test_an_exit_code_that_other_code_took_is_our_loss(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    lease = await box.start("exit 3")
    os.waitpid(lease.child.pid, 0)  # type: ignore[attr-defined]  # noqa: ASYNC222
    ended = await lease.wait()
    assert "exit code" in ended.lost
    assert ended.executed is not None
    assert ended.executed.exit_code is None


# ---- ends ---------------------------------------------------------------------------------------------------------


@scenario
async def test_cancelling_a_waiter_does_not_end_the_action(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    lease = await box.start("while [ ! -e go ]; do sleep 0.01; done; exit 6")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lease.wait(), 0.01)
    await box.write("go", b"")
    executed = (await lease.wait()).executed
    assert executed is not None
    assert executed.exit_code == 6


@scenario
async def test_a_stop_that_is_interrupted_still_ends_the_action(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    received = asyncio.Event()
    lease = await box.start("trap '' TERM; echo deaf; while :; do sleep 0.05; done", output=lambda *_: received.set())
    await received.wait()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lease.stop(), 0.05)
    ended = await lease.wait()
    assert ended.executed is not None
    assert (ended.executed.exit_code, ended.lost) == (None, "")


@scenario
async def test_a_process_whose_first_thread_has_ended_is_ended_too(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    marker = harness.marker()
    await box.write(
        "threads.py",
        b"import ctypes, platform, sys, threading, time\n"
        b"threading.Thread(target=time.sleep, args=(float(sys.argv[1]),)).start()\n"
        b"print('ready', flush=True)\n"
        b"ctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)\n",
    )
    output: list[bytes] = []
    lease = await box.start(("python3", "threads.py", marker), output=lambda stream, data: output.append(data))
    pid = lease.child.pid  # type: ignore[attr-defined]
    await until(lambda: (process := read_process(pid)) is not None and process.state == b"Z")
    await until(lambda: output == [b"ready\n"])
    process = read_process(pid)
    assert process is not None
    assert process.is_alive
    await lease.stop()
    assert (await lease.wait()).lost == ""
    assert read_process(pid) is None


@scenario
async def test_what_a_program_itself_stopped_stays_stopped(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    stopped = "until grep -q 'State:.T' /proc/$!/status; do :; done"
    pid = int(await box.says(f"sleep 1000 > /dev/null 2>&1 & kill -STOP $!; {stopped}; echo $!"))
    await box.says("echo next")
    async with box.awake():
        process = read_process(pid)
        assert process is not None
        assert process.state == b"T"
    await box.close()
    assert (process := read_process(pid)) is None or not process.is_alive


@scenario
async def test_all_processes_are_frozen_although_they_fork_all_the_time(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    fork = "/bin/true; : > forks-$i; while :; do /bin/true; done"
    all_fork = "until [ -e forks-1 -a -e forks-2 -a -e forks-3 -a -e forks-4 ]; do sleep 0.01; done"
    mark = await box.says(f"echo ${SANDBOX_MARK}")
    await box.run(f"(for i in 1 2 3 4; do ({fork}) & done; wait) > /dev/null 2>&1 & {all_fork}")

    def members() -> dict[int, bytes]:
        return {one.pid: one.state for one in ProcessTree(ProcessTable(), SANDBOX_MARK, mark).find()}

    await until(lambda: set(members().values()) == {b"T"})
    there = members()
    assert len(there) >= 5
    for _ in range(20):  # in which they would fork many times
        await asyncio.sleep(0.01)
        assert members() == there, "the same ones, and all of them stand still"


@scenario
async def test_no_descriptor_is_left_when_sandboxes_are_closed(harness: Harness, tmp_path: Path) -> None:
    async def work() -> None:
        box = await harness.open()
        await box.run("sleep 1000 & echo x", stdin=b"in")
        await box.run("sleep 1000 & x=1", session="s")
        lease = await box.start("sleep 1000", session="t")
        await lease.stop()
        await box.run("exit 1", session="s")
        await box.write("a/b", b"")
        await harness.manager.pack(box.name, "a", io.BytesIO(), bytes_max=MIB)
        await box.close()

    await work()
    before = sorted(os.listdir("/proc/self/fd"))
    await work()
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---- sessions -----------------------------------------------------------------------------------------------------


@scenario
async def test_a_shell_that_died_between_commands_is_replaced(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    pid = int(await box.says("x=1; echo $$", session="s"))
    os.kill(pid, signal.SIGKILL)
    wait_for(
        lambda: (found := read_process(pid)) is not None and not found.is_alive
    )  # the loop has not been notified yet
    assert await box.says('echo "[$x]"', session="s") == "[]"


@scenario
async def test_a_new_width_does_not_override_the_variables_of_the_sandbox(harness: Harness, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs 2 cores")
    box = await harness.open(env={"MAKEFLAGS": "-k"})
    ask = "echo $MAKEFLAGS $TANGRAM_CPUS $GOMAXPROCS"
    assert await box.says(ask, session="s", width=CORE) == "-k 1 1"
    assert await box.says(ask, session="s", width=2 * CORE) == "-k 2 2"


@scenario
async def test_a_session_runs_one_command_at_a_time(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    lease = await box.start("sleep 1000", session="s")
    with pytest.raises(ManagerError, match="runs a command already") as caught:
        await box.start("echo", session="s")
    assert not caught.value.retry
    await lease.stop()


@scenario
async def test_a_command_that_replaces_its_shell_ends_the_session(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    done = await box.run("exec sh -c 'echo replaced; exit 9'", session="s")
    assert (done.exit_code, done.stdout, done.session_ended) == (9, b"replaced\n", True)


# ---- what it refuses ----------------------------------------------------------------------------------------------


@scenario
async def test_what_needs_a_file_system_or_a_user_of_its_own_is_refused(harness: Harness, tmp_path: Path) -> None:
    with pytest.raises(ManagerError, match="user namespace"):
        await harness.open(user="root")
    with pytest.raises(ManagerError, match="has host;"):
        await harness.open(image="debian")
    with pytest.raises(ManagerError, match="sandbox or docker"):
        await harness.manager.add_image("/some/root")
    with pytest.raises(ManagerError, match="not Prepare"):
        await harness.do("", Prepare(spec=SandboxSpec()))
    box = await harness.open(network=True)
    with pytest.raises(ManagerError, match="open already"):
        await harness.do(box.name, Open(spec=SandboxSpec()))


@scenario
async def test_paths_outside_the_workspace_are_refused_with_the_reason(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    for path in ("/etc/hostname", "/workshop/file", "../file", "/work/../file"):
        with pytest.raises(FileFailed, match="process backend has no file"):
            await box.read(path)
    await box.run("ln -s /etc etc")
    with pytest.raises(FileFailed, match="leads out of /work"):
        await box.read("etc/hostname")
    with pytest.raises(FileFailed, match="cannot be deleted"):
        await harness.manager.delete(box.name, ".")


# ---- files --------------------------------------------------------------------------------------------------------


@scenario
async def test_no_race_with_a_program_leads_out_of_the_workspace(harness: Harness, tmp_path: Path) -> None:
    """A program swaps a directory for a link to the outside as fast as it can, while files below it are worked on."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("secret")
    box = await harness.open()
    await box.write(
        "swap.py",
        b"import os, sys\n"
        b"os.makedirs('real'); open('real/file', 'w').write('inside')\n"
        b"os.rename('real', 'd'); os.symlink(sys.argv[1], 'link')\n"
        b"print('ready', flush=True)\n"
        b"while True:\n"
        b"    os.rename('d', 'real'); os.rename('link', 'd'); os.rename('d', 'link'); os.rename('real', 'd')\n",
    )
    ready = asyncio.Event()
    lease = await box.start(("python3", "swap.py", str(outside)), output=lambda *_: ready.set())
    await ready.wait()
    succeeded = 0
    for number in range(300):
        try:
            match number % 4:
                case 0:
                    assert await box.read("d/file") in (b"inside", b"written")
                case 1:
                    await box.write("d/file", b"written")
                case 2:
                    assert set(await box.names("d")) <= {"file"}
                case 3:
                    await harness.manager.pack(box.name, "d", into := io.BytesIO(), bytes_max=MIB)
                    assert b"secret" not in into.getvalue()
            succeeded += 1
        except FileFailed:
            pass
    await lease.stop()
    assert succeeded > 0
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "secret"


@scenario
async def test_a_tree_of_any_depth_is_deleted_and_one_too_deep_is_not_packed(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open()
    for name in ("one", "two"):
        deep = f"import os\nfor name in ['{name}'] + ['d'] * 1200:\n    os.mkdir(name)\n    os.chdir(name)"
        await box.says(("python3", "-c", deep))
    with pytest.raises(FileFailed, match=f"deeper than {DEPTH_MAX}"):
        await harness.manager.pack(box.name, "one", io.BytesIO(), bytes_max=MIB)
    await harness.manager.delete(box.name, "one")
    assert await box.names() == ["two"]
    await box.close()


@scenario
async def test_links_and_modes_survive_packing_and_a_commit(harness: Harness, tmp_path: Path) -> None:
    box, other = await harness.open(), await harness.open()
    await box.run("mkdir -m 750 t; echo x > t/f; ln -s f t/soft; ln -s /etc t/out; ln t/f t/hard; mkfifo t/pipe")
    packed = io.BytesIO()
    await harness.manager.pack(box.name, "t", packed, bytes_max=MIB)
    packed.seek(0)
    await harness.manager.unpack(other.name, ".", packed)
    ask = "stat -c '%n %a %F' t t/*; readlink t/soft t/out; cat t/soft"
    expected = "t 750 directory\nt/f 644 regular file\nt/hard 644 regular file\nt/out 777 symbolic link\n"
    assert await other.says(ask) == f"{expected}t/soft 777 symbolic link\nf\n/etc\nx"
    await box.commit("made")
    assert await (await harness.open(image="made")).says("stat -c '%n %h %F' t/hard t/pipe") == (
        "t/hard 2 regular file\nt/pipe 1 fifo"
    )


@scenario
async def test_more_than_the_disk_of_a_sandbox_is_not_written(harness: Harness, tmp_path: Path) -> None:
    box = await harness.open(disk_bytes=MIB)
    with pytest.raises(FileFailed, match="disk"):
        await box.write("large", b"x" * (MIB + 1))
    assert await box.names() == []


# ---- owners -------------------------------------------------------------------------------------------------------

OWNER = """
import asyncio, sys
from pathlib import Path
from tests.contracts.conftest import Harness, process

async def main():
    harness = Harness(process, Path(sys.argv[1]))
    async with harness:
        box = await harness.open()
        await box.run(f"setsid sleep {sys.argv[2]} > /dev/null 2>&1 &")
        await box.start(f"sleep {sys.argv[3]}")
        print("ready", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def owner_of(root: Path, *markers: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", OWNER, str(root), *markers], stdout=subprocess.PIPE)


def test_what_a_killed_owner_left_is_ended_by_the_next_one_in_its_place(tmp_path: Path) -> None:
    root = tmp_path / "root"
    stranger = root / "box-1" / "tangram-process-of-mine"
    stranger.mkdir(parents=True)

    async def main() -> None:
        harness = Harness(process, root)
        markers = [harness.marker(), harness.marker()]
        living = Harness(process, root)
        async with asyncio.timeout(DEADLINE_S), living:
            box = await living.open()
            with owner_of(root, *markers) as owner:
                assert owner.stdout is not None
                assert owner.stdout.readline() == b"ready\n"
                await until(lambda: all(map(alive, markers)))
                owner.send_signal(signal.SIGKILL)
            assert all(map(alive, markers))
            async with harness:
                assert not any(map(alive, markers))
                assert len(list(root.glob("tangram-process-*"))) == 2
            assert await box.says("echo alive") == "alive"

    asyncio.run(main())
    assert [path.name for path in root.iterdir()] == ["box-1"]
    assert stranger.is_dir()


def test_nothing_is_left_of_a_directory_that_it_made(tmp_path: Path) -> None:
    async def main() -> None:
        harness = Harness(process, tmp_path / "new" / "root")
        async with harness:
            box = await harness.open()
            await box.commit("made")
            await box.run("mkdir -p shut/deep; chmod 000 shut; sleep 1000 > /dev/null 2>&1 &")

    asyncio.run(main())
    assert not (tmp_path / "new" / "root").exists()


def test_an_unusable_root_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def main() -> None:
        with pytest.raises(ManagerError, match="cannot hold sandboxes"):
            await ProcessManager(root=tmp_path / "file").__aenter__()

    asyncio.run(main())


# ---- finding processes --------------------------------------------------------------------------------------------


def test_a_process_is_read_whatever_its_name_is(tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 (x"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as started:
        wait_for(lambda: (process := read_process(started.pid)) is not None and process.state == b"S")
        process = read_process(started.pid)
        assert process is not None
        assert (process.parent, process.is_alive, process.threads) == (os.getpid(), True, 1)
        started.kill()
    assert read_process(started.pid) is None


def test_a_signal_does_not_reach_another_process_that_got_the_number() -> None:
    with subprocess.Popen(["sleep", "60"]) as newcomer:
        process = read_process(newcomer.pid)
        assert process is not None
        send_signal(process._replace(started=process.started - 1), signal.SIGKILL)
        send_signal(process, signal.SIGSTOP)
        wait_for(lambda: (now := read_process(newcomer.pid)) is not None and now.state == b"T")
        send_signal(process, signal.SIGKILL)
        assert newcomer.wait() == -signal.SIGKILL
    send_signal(process, signal.SIGKILL)


def test_only_processes_with_the_mark_and_their_descendants_belong() -> None:
    mark = f"{os.urandom(8).hex()}.1."
    script = "sleep 1000 & env -i sleep 1000 & setsid env -i sleep 1000 & wait"
    environment = {"PATH": os.environ["PATH"]}
    with (
        subprocess.Popen(
            ["/bin/sh", "-c", script], env=environment | {SANDBOX_MARK: mark}, start_new_session=True
        ) as own,
        subprocess.Popen(["sleep", "60"], env=environment | {SANDBOX_MARK: f"{mark[:-1]}1."}) as neighbour,
        subprocess.Popen(["sleep", "60"], env=environment) as stranger,
    ):
        kin = ProcessTree(ProcessTable(), SANDBOX_MARK, mark)
        wait_for(lambda: len(kin.find()) == 4)
        own.kill()  # its children have no parent any more that belongs
        own.wait()
        assert len(kin.find()) == 3
        asyncio.run(kin.kill())
        assert kin.find() == []
        assert (neighbour.poll(), stranger.poll()) == (None, None)
        neighbour.kill()
        stranger.kill()
