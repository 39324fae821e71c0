"""Programs that eat all they can, and programs that do not want to end. They may ruin their sandbox, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import inside, spawner, stands_still, timed_out, until
from tests.passing_time import LONG_S, past_limit

import tangram
from tangram import Status
from tangram.client.transport import LocalTransport
from tangram.errors import FileFailed, SessionEnded
from tangram.runtime.orchestrator import Orchestrator

Play = Callable[..., Any]
MIB = 1 << 20

FORK_BOMB = "bomb() { bomb | bomb & }; bomb; while :; do bomb; done"
FORKING_CHILDREN = """
import os, time
if os.fork() == 0:
    while True:
        try:
            os.fork()
        except OSError:
            pass
while sum(name.isdigit() for name in os.listdir("/proc")) < 58:
    time.sleep(0.01)
"""
"""Ends when there are almost as many processes as the sandbox may have, which is 60."""


def orchestrator_of(t: tangram.Client) -> Orchestrator:
    assert isinstance(t.transport, LocalTransport)
    return t.transport.orchestrator


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs that SIGTERM does not end anyway."""
    monkeypatch.setattr("tangram.managers.sandboxes.bwrap.leases.STOP_GRACE_S", 0.1)


# ---- processes -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_short_grace")
def test_a_fork_bomb_is_limited_and_a_timeout_ends_all_of_it(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="256MiB", processes=50) as box, t.sandbox(memory="64MiB") as other:
            before = inside(state)
            bomb = asyncio.create_task(box.exec(FORK_BOMB, timeout_s=LONG_S, cpus=1))
            counts = [0]

            async def count() -> None:
                while not bomb.done():
                    counts.append(len(inside(state)))
                    await asyncio.sleep(0.02)

            counting = asyncio.create_task(count())
            await until(lambda: bomb.done() or max(counts) >= 45, "the bomb has gone off")
            assert (await other.exec("echo unharmed", cpus=1)).stdout == "unharmed\n"
            result = await past_limit(orchestrator_of(t), bomb)
            await counting
            assert timed_out(result)
            assert 45 <= max(counts) <= 52, "programs that join may exceed the limit, forks may not"
            await until(lambda: inside(state) == before, "nothing of the bomb is left")
            assert (await box.exec("echo alive")).stdout == "alive\n"

    play(story)


def test_what_a_fork_bomb_leaves_running_does_not_run_between_actions(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="256MiB", processes=60) as box:
            assert (await box.exec(["python3", "-c", FORKING_CHILDREN])).exit_code == 0
            for _ in range(3):
                await stands_still(state)
                assert (await box.exec(["sleep", "0.1"])).exit_code == 0
            assert len(inside(state)) >= 55
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("echo next")).stdout == "next\n"

    play(story)


REFUSE_TO_END = {
    "ignores SIGTERM": "trap '' TERM; while :; do sleep 1000; done",
    "stops itself": "kill -STOP $$; sleep 1000",
    "daemonises": "python3 -c 'import os,time\nif os.fork(): time.sleep(1000)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    'os.chdir("/"); time.sleep(1000)\'',
    "closes its streams": "exec 0<&- 1>&- 2>&-; sleep 1000",
    "goes to a session of its own": "setsid sh -c 'setsid sleep 1000 & sleep 1000' & setsid sleep 1000 & wait",
    "waits for a child that it forked by vfork": 'python3 -c \'import subprocess; subprocess.run(["sleep", "1000"])\'',
    "traces its child": "python3 -c 'import ctypes,os,time\npid = os.fork()\nif not pid: time.sleep(1000)\n"
    "ctypes.CDLL(None).ptrace(16, pid, 0, 0); time.sleep(1000)'",
}


@pytest.mark.usefixtures("_short_grace")
def test_a_timeout_ends_programs_that_do_not_want_to_end(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async def refuse(how: str) -> None:
            async with t.sandbox(memory="128MiB") as box:
                result = await box.exec(REFUSE_TO_END[how], timeout_s=1, cpus=0.1)
                assert timed_out(result) and result.exit_code is None, how
                left = await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
                assert "1000" not in left.stdout, f"{how}: a timeout leaves nothing of its action: {left.stdout}"

        await t.gather(*map(refuse, REFUSE_TO_END))

    play(story)


def test_what_an_action_leaves_running_runs_only_while_another_does(play: Play, state: Path) -> None:
    beats = "(setsid sh -c 'while :; do echo beat >> /work/beats; done' >/dev/null 2>&1 &)"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB", disk="64MiB") as box:
            (await box.exec(beats)).check()
            await stands_still(state)
            still = len(await box.read("beats")) if any(e.name == "beats" for e in await box.list()) else 0
            (await box.exec(f"while [ ! -s beats ] || [ $(wc -c < beats) -le {still} ]; do sleep 0.01; done")).check()
            await stands_still(state)
            left = inside(state)
            assert len(left) > 2
        await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), "all have ended with the sandbox")

    play(story)


def test_the_end_of_a_program_does_not_wait_for_processes_that_hold_its_streams(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            result = await box.exec("echo said; sleep 1000 & echo by >&2", timeout_s=30)
            assert (result.status, result.exit_code) == (Status.SUCCEEDED, 0)
            assert (result.stdout, result.stderr) == ("said\n", "by\n")

    play(story)


def test_a_program_that_stops_all_processes_does_not_keep_the_next_from_starting(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            # The runner that waits for the next order is one of those that it stops.
            for _ in range(3):
                await box.exec("sleep 0.1; kill -STOP -1")
                assert (await box.exec("echo next", timeout_s=20)).stdout == "next\n"
                await box.exec("sleep 0.1; kill -STOP -1")
                assert await box.read("/etc/hostname") == b"sandbox\n"

    play(story)


def test_a_program_that_kills_all_processes_ends_only_its_own_sandbox(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB") as box, t.sandbox(memory="64MiB") as other:
            first = spawner()
            killing = "(setsid sh -c 'trap \"\" TERM; while :; do kill -KILL -1; done' >/dev/null 2>&1 &)"
            await box.exec(killing)
            for _ in range(20):
                result = await box.exec("echo hit", timeout_s=20)
                assert result.status in (Status.SUCCEEDED, Status.LOST)
                with contextlib.suppress(tangram.TangramError):
                    await box.write("a", b"x")
            assert (await other.exec("echo unharmed")).stdout == "unharmed\n"
            assert spawner() == first

    play(story)


def test_a_runner_that_is_stopped_and_then_killed_takes_no_other_sandbox_along(play: Play) -> None:
    stop, kill = "sleep 0.1; kill -STOP -1", "while :; do kill -STOP -1; kill -KILL -1; done"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB") as box, t.sandbox(memory="64MiB") as other:
            first = spawner()
            for _ in range(3):
                await box.exec(stop)
                both = [box.exec(kill, timeout_s=0.4, cpus=0.5), *(box.exec("true", cpus=0.5) for _ in range(5))]
                for result in await t.gather(*both):
                    assert result.status in (Status.SUCCEEDED, Status.TIMED_OUT, Status.LOST)
            assert (await other.exec("echo unharmed")).stdout == "unharmed\n"
            assert spawner() == first

    play(story)


def test_limits_that_a_program_sets_for_the_waiting_runner_harm_its_own_sandbox_at_most(play: Play) -> None:
    code = """
import os, resource, time
deadline = time.monotonic() + 20
others = []
while not others and time.monotonic() < deadline:
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
for pid in others:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        try:
            resource.prlimit(pid, kind, (0, 0))
        except OSError:
            pass
"""

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="128MiB") as box, t.sandbox(memory="64MiB") as other:
            first = spawner()
            for _ in range(3):
                await box.exec(["python3", "-c", code])
                result = await box.exec("echo perhaps", timeout_s=20)
                assert result.status in (Status.SUCCEEDED, Status.LOST)
                await box.exec(["python3", "-c", code])
                with contextlib.suppress(tangram.TangramError):
                    await box.write("a", b"x")
            assert (await other.exec("echo unharmed")).stdout == "unharmed\n"
            assert spawner() == first

    play(story)


# ---- memory and files ----------------------------------------------------------------------------------------------


def test_a_memory_bomb_is_killed_and_reported_as_out_of_memory(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box, t.sandbox(memory="64MiB") as other:
            result = await box.exec(["python3", "-c", "x = bytearray(1 << 30)"])
            assert (result.status, result.exit_code, result.out_of_memory) == (Status.SUCCEEDED, 137, True)
            result = await box.exec("echo usable")
            assert (result.stdout, result.out_of_memory) == ("usable\n", False)
            assert not (await other.exec("true")).out_of_memory

    play(story)


def test_a_shell_outlives_the_child_that_used_up_the_memory(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            result = await box.exec("python3 -c 'x = bytearray(1 << 30)'; echo then $?")
            assert result.stdout == "then 137\n" and result.out_of_memory and result.exit_code == 0

    play(story)


def test_many_processes_that_share_the_memory_do_not_kill_the_sandbox(play: Play) -> None:
    eat = "import os\nfor _ in range(4): os.fork()\nx = []\nwhile True: x.append(bytearray(1 << 20))"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", processes=40) as box:
            result = await box.exec(["python3", "-c", eat], timeout_s=6)
            assert (result.status is Status.SUCCEEDED or timed_out(result)) and result.out_of_memory
            output = ""
            for _ in range(
                40
            ):  # if only the first of them was killed, the rest continues, and a later process may be next
                output = output or (await box.exec("echo usable")).stdout
            assert output == "usable\n"

    play(story)


def test_a_full_disk_is_an_error_of_the_program_and_of_no_other_sandbox(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        options = dict(memory="128MiB", disk="16MiB")
        async with t.sandbox(**options) as box, t.sandbox(**options) as other:
            result = await box.exec("head -c 100000000 /dev/zero > big")
            assert result.exit_code == 1 and "No space left on device" in result.stderr
            with pytest.raises(FileFailed, match="No space left"):
                await box.write("more", bytes(MIB))
            with pytest.raises(FileFailed, match="No space left"):
                await box.upload(__file__, "below")
            (await other.exec("head -c 10000000 /dev/zero > fits")).check()
            await box.delete("big")
            await box.write("more", bytes(MIB))
            assert (await box.exec("stat -c %s more")).stdout == f"{MIB}\n"

    play(story)


def test_files_that_use_up_the_memory_can_be_deleted(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB", disk="1GiB") as box:
            result = await box.exec("head -c 500000000 /dev/zero > big")
            assert result.out_of_memory and result.exit_code == 137
            await box.delete("big")
            output = ""
            for _ in range(20):  # the kernel frees the memory of a file some moments after its deletion
                output = output or (await box.exec("echo usable")).stdout
            assert output == "usable\n"

    play(story)


def test_many_empty_files_reach_a_limit_as_well(play: Play) -> None:
    code = "import itertools\nfor n in itertools.count(): open(f'many/{n}', 'x').close()"

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="256MiB", disk="8MiB") as box:
            result = await box.exec(["sh", "-c", 'mkdir many; exec python3 -c "$0"', code], timeout_s=60)
            assert result.exit_code == 1 and "No space left on device" in result.stderr
            await box.delete("many")
            (await box.exec("mkdir many && touch many/one")).check()

    play(story)


def test_shared_memory_is_limited_with_the_memory(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            result = await box.exec("head -c 60000000 /dev/zero > /dev/shm/big")
            assert result.exit_code == 1 and "No space left on device" in result.stderr
            (await box.exec("rm /dev/shm/big")).check()

    play(story)


# ---- output --------------------------------------------------------------------------------------------------------


def test_a_gigabyte_of_output_costs_a_bounded_amount_of_memory(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            (await box.exec("true")).check()
            before = forget_peak()
            result = await box.exec("echo begin; head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo end")
            assert result.executed.stdout_bytes == 1_000_000_000 + len("begin\n\nend\n")
            assert len(result.executed.stdout) < MIB + 200
            assert result.stdout.startswith("begin\nxxx") and result.stdout.endswith("xxx\nend\n")
            assert f"\n[... {1_000_000_011 - MIB} bytes of 1000000011 are not shown ...]\n" in result.stdout
            assert resident("VmHWM") - before < 64 * MIB

    play(story)


def forget_peak() -> int:
    """The most memory so far is forgotten; returns what is used now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def test_endless_output_ends_with_the_timeout_and_what_was_kept_comes_back(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            seen_bytes = 0

            def on_output(_: str, data: bytes) -> None:
                nonlocal seen_bytes
                seen_bytes += len(data)

            command = "yes 1; yes 2 >&2"
            endless = asyncio.create_task(box.exec(command, timeout_s=LONG_S, capture="64KiB", on_output=on_output))
            await until(lambda: endless.done() or seen_bytes > MIB, "it writes more than is kept")
            result = await past_limit(orchestrator_of(t), endless)
            assert timed_out(result)
            assert result.stdout.startswith("1\n1\n") and "are not shown" in result.stdout
            assert result.executed.stdout_bytes > 64 << 10 and len(result.executed.stdout) < 65 << 10

    play(story)


def test_a_leftover_process_may_write_without_end(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            result = await box.exec("yes & yes >&2 & echo done")
            assert result.exit_code == 0
            for _ in range(3):
                result = await box.exec("echo own; sleep 0.05")
                assert (result.stdout, result.stderr) == ("own\n", "")
            await stands_still(state)

    play(story)


def test_output_that_is_no_text_is_kept_as_it_is(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            result = await box.exec(r"printf 'a\377\376b\0c\303'; printf '\355\240\200' >&2")
            assert result.executed.stdout == b"a\xff\xfeb\0c\xc3" and result.executed.stderr == b"\xed\xa0\x80"
            assert result.stdout == "a\ufffd\ufffdb\0c\ufffd"

    play(story)


def test_one_huge_line_is_cut_in_the_middle(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            result = await box.exec("printf A; head -c 20000000 /dev/zero | tr '\\0' é; printf Z", capture=1000)
            assert result.stdout[0] == "A" and result.stdout[-1] == "Z"
            assert result.executed.stdout_bytes > 20_000_000 and len(result.executed.stdout) < 1100

    play(story)


def test_a_caller_that_breaks_on_output_does_not_break_the_action(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: None)

        def broken(stream: str, data: bytes) -> None:
            raise RuntimeError("the caller's")

        async with t.sandbox(memory="64MiB") as box:
            result = await box.exec("echo one; echo two >&2", on_output=broken)
            assert (result.stdout, result.stderr, result.exit_code) == ("one\n", "two\n", 0)

    play(story)


# ---- sessions ------------------------------------------------------------------------------------------------------


def test_a_session_that_forges_its_results_deceives_itself_alone(play: Play) -> None:
    """The held shell keeps the descriptor for exit codes somewhere; a command finds it, and says what it likes."""
    forge = (
        "for n in 9 10 11 12 13 14 15; do { while sleep 0.01; do echo 0; done >&$n & } 2>/dev/null; done; sleep 1000"
    )

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box, t.sandbox(memory="64MiB") as other:
            session = box.session()
            await session.exec(forge, timeout_s=3)
            for _ in range(8):
                try:
                    await session.exec(f"true {'x' * 100_000}", timeout_s=1)
                except tangram.TangramError:
                    break
            assert (await other.exec("echo unharmed", timeout_s=30)).stdout == "unharmed\n"
            assert (await box.exec("echo usable", timeout_s=30)).stdout == "usable\n"

    play(story)


@pytest.mark.usefixtures("_short_grace")
def test_a_session_ends_with_a_timeout_however_it_fights_that(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            before = inside(state)
            async with box.session() as session:
                (await session.exec("x=1; sleep 1000 &")).check()
                result = await session.exec("trap '' TERM; setsid sleep 1000 & while :; do :; done", timeout_s=0.3)
                assert timed_out(result) and result.session_ended
                with pytest.raises(tangram.TangramError, match="session ended"):
                    await session.exec("echo $x")
            # What an earlier command left running is in the background, and is not that of the timeout.
            left = inside(state) - before
            assert len(left) <= 1
            async with box.session() as session:
                assert (await session.exec("echo new:$x")).stdout == "new:\n"

    play(story)


@pytest.mark.parametrize("command", ["exit 3", "kill -9 $$", "exec true", "exec 1>&- 2>&-", "ulimit -u 0; ulimit -n 3"])
def test_a_session_with_a_ruined_shell_reports_it_and_the_next_one_works(play: Play, command: str) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            session = box.session()
            result = await session.exec(command, timeout_s=20)
            assert result.status is Status.SUCCEEDED
            if result.session_ended:
                with pytest.raises(SessionEnded):
                    await session.exec("true")
            else:
                await session.exec("true", timeout_s=20)
                await session.close()
            async with box.session() as session:
                assert (await session.exec("echo new")).stdout == "new\n"

    play(story)


def test_signals_to_the_process_group_stay_in_the_sandbox(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        mine = os.getpgrp()
        async with t.sandbox(memory="64MiB") as box:
            for word in ("0", "-1", f"-{mine}", str(os.getpid()), str(spawner())):
                await box.exec(f"kill -TERM {word}; kill -KILL {word}")
            assert (await box.exec("echo alive")).stdout == "alive\n"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the test process would have been ended"

    play(story)
