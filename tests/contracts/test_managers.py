"""The contract of managers: programs, their width, their end, and what they leave running."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from tests.contracts.conftest import TICK, Harness, alive, until

from tangram.errors import ManagerError
from tangram.managers.work import Close, Commit, Exec, Open, SandboxSpec
from tangram.processes.streams import STDERR, STDOUT

needs_programs = pytest.mark.needs_programs

# ---- programs -----------------------------------------------------------------------------------------------------


async def test_a_program_runs_in_an_open_sandbox_until_it_ends(harness: Harness) -> None:
    box = await harness.open()
    done = await box.run("echo hello")
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"hello\n", b"")
    assert (done.stdout_bytes, done.stderr_bytes) == (6, 0)
    assert not done.session_ended
    assert not done.out_of_memory
    assert done.cpus == 1
    await box.close()


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 3", 3), ("false", 1), ("echo a && exit 255", 255)])
async def test_the_exit_code_is_a_result(harness: Harness, command: str, code: int) -> None:
    box = await harness.open()
    assert (await box.run(command)).exit_code == code


@needs_programs
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_the_exit_code_after_a_signal_is_that_of_a_shell(harness: Harness, number: int) -> None:
    box = await harness.open()
    assert (await box.run(f"kill -{int(number)} $$")).exit_code == 128 + number


@pytest.mark.parametrize("command", ["no-such-program", ("no-such-program", "x")])
async def test_a_program_that_is_not_there_is_the_result_127(harness: Harness, command: str | tuple[str, ...]) -> None:
    box = await harness.open()
    done = await box.run(command)
    assert done.exit_code == 127
    assert b"no-such-program" in done.stderr


@needs_programs
async def test_a_file_that_cannot_be_executed_is_the_result_126(harness: Harness) -> None:
    box = await harness.open()
    await box.write("plain", b"text")
    done = await box.run(("./plain",))
    assert done.exit_code == 126
    assert b"plain" in done.stderr


async def test_a_list_of_words_runs_without_a_shell_and_a_string_through_one(harness: Harness) -> None:
    box = await harness.open()
    assert await box.says(("echo", "a  b; exit 4", "> file")) == "a  b; exit 4 > file"
    assert await box.says("echo 'a  b'; echo c") == "a  b\nc"


@pytest.mark.parametrize("size", [0, 5, 1 << 20])
async def test_standard_input_comes_as_it_was_given(harness: Harness, size: int) -> None:
    box = await harness.open()
    content = (b"\0\xff0123456789\n" * (size // 13 + 1))[:size]
    done = await box.run("cat", stdin=content, capture_bytes_max=2 << 20)
    assert (done.exit_code, done.stdout) == (0, content)


@needs_programs
async def test_a_program_that_does_not_read_its_input_ends_all_the_same(harness: Harness) -> None:
    box = await harness.open()
    assert await box.says("echo done", stdin=b"x" * (1 << 20)) == "done"


async def test_variables_of_the_action_go_before_those_of_the_sandbox(harness: Harness) -> None:
    box = await harness.open(env={"PLACE": "box", "BOTH": "box"})
    output = await box.says("printenv PLACE; printenv BOTH; printenv OWN", env={"BOTH": "action", "OWN": "a b\"'$x"})
    assert output == "box\naction\na b\"'$x"


async def test_the_environment_of_this_process_stays_outside(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_OURS", "key")
    box = await harness.open()
    assert (await box.run("printenv A_SECRET_OF_OURS")).stdout == b""


@pytest.mark.parametrize("cwd", ["sub", "./sub/", "/work/sub", "sub/deep/.."])
async def test_a_program_starts_in_its_directory_below_the_workspace(harness: Harness, cwd: str) -> None:
    box = await harness.open()
    await box.write("note", b"above")
    await box.write("sub/note", b"below")
    await box.write("sub/deep/note", b"deep")
    assert await box.says("cat note") == "above"
    assert await box.says("cat note", cwd=cwd) == "below"
    assert (await box.says("pwd", cwd=cwd)).endswith("/sub")


async def test_a_directory_that_is_not_there_is_a_result_and_not_a_loss(harness: Harness) -> None:
    box = await harness.open()
    done = await box.run("echo never", cwd="nowhere")
    assert done.exit_code in (126, 127)
    assert (done.stdout, b"nowhere" in done.stderr) == (b"", True)


async def test_files_stay_between_programs(harness: Harness) -> None:
    box = await harness.open()
    await box.run("echo kept > note")
    assert await box.says("cat note") == "kept"
    assert await box.read("/work/note") == b"kept\n"


async def test_a_manager_names_its_sandboxes_until_they_are_closed(harness: Harness) -> None:
    one, other = await harness.open(), await harness.open()
    assert harness.manager.sandboxes() == (one.name, other.name)
    await one.close()
    assert harness.manager.sandboxes() == (other.name,)


async def test_sandboxes_do_not_share_their_workspaces(harness: Harness) -> None:
    one, other = await harness.open(), await harness.open()
    await one.run("echo mine > note")
    assert await other.names() == []


async def test_several_programs_run_at_once_in_one_sandbox(harness: Harness) -> None:
    box = await harness.open()
    long = await box.start("sleep 1000")
    assert [await box.says(f"echo {number}") for number in range(3)] == ["0", "1", "2"]
    await long.stop()
    assert (await long.wait()).lost == ""


@needs_programs
async def test_programs_of_one_sandbox_see_each_other_come_and_go(harness: Harness) -> None:
    box = await harness.open()
    meet = "echo > {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo met {1}"
    outputs = await asyncio.gather(box.says(meet.format("a", "b")), box.says(meet.format("b", "a")))
    assert outputs == ["met b", "met a"]


@needs_programs
async def test_usage_is_reported(harness: Harness) -> None:
    box = await harness.open()
    ended = await box.end("i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done")
    assert ended.usage.cpu_s > 0.0


@needs_programs
async def test_usage_of_a_running_action_is_reported_or_unknown(harness: Harness) -> None:
    box = await harness.open()
    lease = await box.start("while :; do :; done")
    if lease.cpu_seconds() is not None:
        await until(lambda: (lease.cpu_seconds() or 0.0) > 0.0)
    await lease.stop()
    assert (await lease.wait()).usage.cpu_s >= 0.0
    assert lease.cpu_seconds() is None or lease.cpu_seconds() >= 0.0


@needs_programs
async def test_a_resize_after_the_end_changes_nothing(harness: Harness) -> None:
    """The scheduler may resize an action whose end is on its way to it."""
    box = await harness.open()
    ended = await box.start("true")
    await ended.wait()
    other = await box.start("sleep 60")
    ended.resize(reserved=100, limit=100)
    assert ended.cpu_seconds() is None or ended.cpu_seconds() >= 0.0
    await other.stop()
    await other.wait()


# ---- what they write ----------------------------------------------------------------------------------------------


async def test_the_two_streams_are_kept_apart(harness: Harness) -> None:
    box = await harness.open()
    done = await box.run("echo out; echo err >&2; exit 5")
    assert (done.exit_code, done.stdout, done.stderr) == (5, b"out\n", b"err\n")


async def test_a_listener_gets_every_byte(harness: Harness) -> None:
    received = {STDOUT: b"", STDERR: b""}

    def listen(stream: int, data: bytes) -> None:
        received[stream] += data

    box = await harness.open()
    text = "x" * 100_000
    await box.write("text", text.encode())
    await box.run("cat text; echo err >&2; cat text", capture_bytes_max=10, output=listen)
    assert received == {STDOUT: (text * 2).encode(), STDERR: b"err\n"}


@needs_programs
async def test_a_listener_gets_output_while_the_program_runs(harness: Harness) -> None:
    received = asyncio.Event()
    box = await harness.open()
    lease = await box.start(
        "echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 7", output=lambda stream, data: received.set()
    )
    await received.wait()
    await box.write("go", b"")
    ended = await lease.wait()
    assert ended.executed is not None
    assert (ended.executed.exit_code, ended.executed.stdout) == (7, b"ready\n")


async def test_a_listener_that_fails_does_no_harm_to_the_action(harness: Harness) -> None:
    def fail(stream: int, data: bytes) -> None:
        raise RuntimeError("the listener is broken")

    lines: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: lines.append(context["message"]))
    box = await harness.open()
    done = await box.run("echo said", output=fail)
    assert (done.exit_code, done.stdout) == (0, b"said\n")
    assert len(lines) == 1


async def test_the_beginning_and_the_end_are_kept_of_much_output(harness: Harness) -> None:
    box = await harness.open()
    await box.write("long", b"b" * 5000 + b"m" * 50_000 + b"e" * 5000)
    done = await box.run("cat long; cat long >&2", capture_bytes_max=1000)
    mark = b"\n[... 59000 bytes of 60000 are not shown ...]\n"
    assert done.stdout == done.stderr == b"b" * 500 + mark + b"e" * 500
    assert done.stdout_bytes == done.stderr_bytes == 60_000


async def test_output_that_is_no_text_is_kept_as_it_is(harness: Harness) -> None:
    box = await harness.open()
    content = bytes(range(256)) + b"\xff\xfe\xc3("
    await box.write("bytes", content)
    assert (await box.run("cat bytes")).stdout == content


@needs_programs
async def test_output_that_never_ends_does_not_end_the_manager(harness: Harness) -> None:
    box = await harness.open()
    received = 0

    def listen(stream: int, data: bytes) -> None:
        nonlocal received
        received += len(data)

    lease = await box.start("yes", capture_bytes_max=100, output=listen)
    await until(lambda: received > 1 << 20)
    await lease.stop()
    executed = (await lease.wait()).executed
    assert executed is not None
    assert executed.exit_code is None
    assert executed.stdout_bytes > 1 << 20
    assert len(executed.stdout) < 300


# ---- width --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "cpus"), [(1000, "1"), (400, "1"), (1500, "2"), (2000, "2")])
async def test_a_program_gets_its_width(harness: Harness, width: int, cpus: str) -> None:
    if int(cpus) > len(os.sched_getaffinity(0)):
        pytest.skip(f"needs {cpus} cores")
    box = await harness.open()
    output = await box.says(
        "printenv TANGRAM_CPUS; printenv OMP_NUM_THREADS; printenv MAKEFLAGS; echo {cpus}", width=width
    )
    assert output == f"{cpus}\n{cpus}\n-j{cpus}\n{cpus}"
    assert await box.says(("echo", "-n{cpus}"), width=width) == f"-n{cpus}"


@needs_programs
@pytest.mark.parametrize("width", [1000, 2000])
async def test_a_program_sees_as_many_cores_as_its_width(harness: Harness, width: int) -> None:
    if width > 1000 * len(os.sched_getaffinity(0)):
        pytest.skip(f"needs {width // 1000} cores")
    box = await harness.open()
    cores = str(width // 1000)
    assert await box.says("nproc; unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc", width=width) == f"{cores}\n{cores}"


async def test_a_width_variable_of_the_caller_is_kept(harness: Harness) -> None:
    box = await harness.open(env={"MAKEFLAGS": "-k"})
    output = await box.says("printenv MAKEFLAGS; printenv OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "7"})
    assert output == "-k\n7"


async def test_a_running_action_can_be_resized_and_one_that_ended_too(harness: Harness) -> None:
    box = await harness.open()
    lease = await box.start("sleep 1000", reserved=1000, limit=2000)
    lease.resize(reserved=500, limit=500)
    lease.resize(reserved=1000, limit=2000)
    await lease.stop()
    assert (await lease.wait()).lost == ""


# ---- stopping -----------------------------------------------------------------------------------------------------


async def test_what_is_stopped_has_no_exit_code_and_is_not_lost(harness: Harness) -> None:
    box = await harness.open()
    lease = await box.start("sleep 1000")
    await lease.stop()
    ended = await lease.wait()
    assert ended.lost == ""
    assert ended.executed is not None
    assert ended.executed.exit_code is None


async def test_stopping_twice_or_after_the_end_is_fine(harness: Harness) -> None:
    box = await harness.open()
    lease = await box.start("sleep 1000")
    await asyncio.gather(lease.stop(), lease.stop())
    first = await lease.wait()
    await lease.stop()
    assert first.executed is not None
    done = await box.start("exit 4")
    ended = await done.wait()
    await done.stop()
    assert ended.executed is not None
    assert ended.executed.exit_code == 4


async def test_cancelling_a_wait_does_not_cancel_the_work(harness: Harness) -> None:
    spec = SandboxSpec(image="host")
    opening = await harness.start("box", Open(spec=spec))
    waiting = asyncio.create_task(opening.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert [(await opening.wait()).lost for _ in range(2)] == ["", ""]
    assert harness.manager.sandboxes() == ("box",)
    closing = await harness.start("box", Close())
    await closing.stop()  # without a waiter
    assert (await closing.wait()).lost == ""
    assert harness.manager.sandboxes() == ()


@needs_programs
async def test_what_a_program_wrote_before_it_was_stopped_is_kept(harness: Harness) -> None:
    received = asyncio.Event()
    box = await harness.open()
    lease = await box.start("echo begun; sleep 1000", output=lambda stream, data: received.set())
    await received.wait()
    await lease.stop()
    executed = (await lease.wait()).executed
    assert executed is not None
    assert executed.stdout == b"begun\n"


@needs_programs
async def test_a_program_may_clean_up_after_a_stop_request(harness: Harness) -> None:
    box = await harness.open()
    ready = asyncio.Event()
    lease = await box.start(
        "trap 'echo tidy > tidied; exit 0' TERM; echo ready; while :; do sleep 0.05; done",
        output=lambda stream, data: ready.set(),
    )
    await ready.wait()
    await lease.stop()
    ended = await lease.wait()
    assert ended.executed is not None
    assert ended.executed.exit_code is None
    assert await box.read("tidied") == b"tidy\n"


@needs_programs
async def test_stopping_ends_all_that_the_action_started_and_nothing_else(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bwrap.leases", "process.leases", "docker.processes"):  # one of the processes ignores SIGTERM
        monkeypatch.setattr(f"tangram.managers.sandboxes.{module}.STOP_GRACE_S", 0.1)
    box = await harness.open()
    child, bare, session, daemon, deaf, own = mine = [harness.marker() for _ in range(6)]
    bystander, leftover = harness.marker(), harness.marker()
    await box.run(f"sleep {leftover} > /dev/null 2>&1 &")
    other = await box.start(f"sleep {bystander}")
    lease = await box.start(
        f"""
        sleep {child} &
        (env -i sleep {bare} &)
        setsid sleep {session} &
        (setsid sh -c 'sleep {daemon}' > /dev/null 2>&1 < /dev/null &)
        sh -c 'trap "" TERM; while :; do sleep 0.1; done' {deaf} &
        sleep {own}
        """
    )
    await until(lambda: all(map(alive, (*mine, bystander, leftover))))
    await lease.stop()
    await lease.wait()
    assert [marker for marker in mine if alive(marker)] == []
    assert alive(bystander)
    assert alive(leftover)
    await other.stop()
    await other.wait()
    assert not alive(bystander)
    assert alive(leftover)


# ---- what is left running -----------------------------------------------------------------------------------------


@needs_programs
async def test_what_is_left_running_stands_still_while_no_action_runs(harness: Harness) -> None:
    box = await harness.open()
    marker = harness.marker()
    await box.run(f"sh -c '{TICK}' {marker} > /dev/null 2>&1 & while [ ! -s ticks ]; do sleep 0.01; done")
    stopped_at = time.time()
    await asyncio.sleep(0.3)  # in which it would tick many times
    started_at = time.time()
    await box.run("n=$(wc -l < ticks); while [ $(wc -l < ticks) -le $((n + 1)) ]; do sleep 0.01; done")
    ticks = [float(line) for line in (await box.read("ticks")).split()]
    assert [tick for tick in ticks if stopped_at < tick < started_at] == []
    assert max(ticks) > started_at
    assert alive(marker)
    await box.close()
    assert not alive(marker)


@needs_programs
async def test_an_action_ends_although_what_it_left_running_holds_its_streams(harness: Harness) -> None:
    box = await harness.open()
    marker = harness.marker()
    done = await box.run(f"sleep {marker} & echo done")
    assert (done.exit_code, done.stdout) == (0, b"done\n")
    async with box.awake():
        await until(lambda: alive(marker))


@needs_programs
async def test_a_leftover_process_may_go_on_writing_to_unread_streams(harness: Harness) -> None:
    box = await harness.open()
    # Far more than a pipe holds: a program with unread output blocks in a write, or dies of it.
    await box.run("(while [ ! -e go ]; do sleep 0.01; done; head -c 1000000 /dev/zero && echo > written) & echo begun")
    await box.run("echo > go; while [ ! -e written ]; do sleep 0.01; done")


@needs_programs
async def test_what_is_left_running_does_not_outlive_its_sandbox_in_any_disguise(harness: Harness) -> None:
    box = await harness.open()
    plain, bare, session, daemon, deaf = all_of_them = [harness.marker() for _ in range(5)]
    await box.run(
        f"""
        sleep {plain} > /dev/null 2>&1 &
        env -i sleep {bare} > /dev/null 2>&1 &
        setsid sleep {session} > /dev/null 2>&1 &
        (setsid sh -c 'cd / && exec sleep {daemon}' > /dev/null 2>&1 < /dev/null &)
        sh -c 'trap "" TERM HUP INT; while :; do sleep 0.1; done' {deaf} > /dev/null 2>&1 &
        """
    )
    async with box.awake():
        await until(lambda: all(map(alive, all_of_them)))
    await box.close()
    assert not any(map(alive, all_of_them))


# ---- beginning and end --------------------------------------------------------------------------------------------


async def test_a_sandbox_that_is_not_open_does_nothing(harness: Harness) -> None:
    closed = await harness.open()
    await closed.close()
    for name in (closed.name, "never-opened", ""):
        for work in (Exec(command="echo"), Exec(command="echo", session="s"), Commit(image="made")):
            with pytest.raises(ManagerError) as caught:
                await harness.do(name, work)
            assert not caught.value.retry
        with pytest.raises(ManagerError):
            await harness.manager.read(name, "file", bytes_max=1)


async def test_closing_twice_is_fine_and_the_name_is_free_again(harness: Harness) -> None:
    box = await harness.open()
    await box.write("old", b"")
    await box.close()
    await box.close()
    await harness.do("never-opened", Close())
    await harness.do(box.name, Open(spec=SandboxSpec()))
    assert await box.names() == []


@pytest.mark.parametrize("turns", [1, 40])
async def test_a_sandbox_that_is_closed_while_it_opens_is_gone(harness: Harness, turns: int) -> None:
    """However far its opening has come."""
    box = await harness.open()
    await box.write("note", b"x")
    await box.commit("of-the-box")
    work = Open(spec=SandboxSpec(image="of-the-box"))
    opening = asyncio.create_task(harness.do("late", work))
    for _ in range(turns):
        await asyncio.sleep(0)
    closing = asyncio.create_task(harness.do("late", Close()))
    await asyncio.wait({opening, closing})
    closing.result()
    opening.exception()  # it may have been opened, or not
    with pytest.raises(ManagerError):
        await harness.start("late", Exec(command="true"))
    await harness.do("late", work)
    assert await harness.manager.read("late", "note", bytes_max=10) == b"x"


async def test_a_name_is_opened_once(harness: Harness) -> None:
    box = await harness.open()
    await box.write("note", b"kept")
    with pytest.raises(ManagerError):
        await harness.do(box.name, Open(spec=SandboxSpec()))
    assert await box.read("note") == b"kept"


async def test_an_action_whose_sandbox_is_closed_is_lost_without_a_crash_count(harness: Harness) -> None:
    box = await harness.open()
    lease = await box.start("sleep 1000")
    waiting = asyncio.ensure_future(lease.wait())
    await box.close()
    ended = await waiting
    assert ended.lost
    assert ended.executed is None or ended.executed.exit_code is None


async def test_leaving_the_manager_ends_everything(harness: Harness) -> None:
    box, session = await harness.open(), await harness.open()
    await box.write("keepsake", b"")
    await session.run("true", session="idle")
    lease = await box.start("sleep 1000")
    command = await session.start("sleep 1000", session="busy")
    waiting = [asyncio.ensure_future(each.wait()) for each in (lease, command)]
    await harness.leave()
    assert [bool(ended.lost) for ended in await asyncio.gather(*waiting)] == [True, True]
    assert list(harness.root.rglob("keepsake")) == []


@needs_programs
async def test_leaving_the_manager_ends_what_was_left_running_and_what_runs(harness: Harness) -> None:
    left, idle, running = await harness.open(), await harness.open(), await harness.open()
    markers = [harness.marker() for _ in range(4)]
    await left.run(f"sleep {markers[0]} > /dev/null 2>&1 &")
    await idle.run(f"setsid sleep {markers[1]} > /dev/null 2>&1 &", session="s")
    lease = await running.start(f"trap '' TERM; setsid sleep {markers[2]} & sleep {markers[3]}")
    async with left.awake(), idle.awake():
        await until(lambda: all(map(alive, markers)))
    waiting = asyncio.ensure_future(lease.wait())
    await harness.leave()
    assert not any(map(alive, markers))
    assert (await waiting).lost


async def test_the_pools_are_those_of_one_node(harness: Harness) -> None:
    pools = harness.manager.pools()
    assert [pool.kind for pool in pools] == ["cpu", "memory"]
    assert len({pool.node for pool in pools}) == 1
    assert all(pool.total > 0 for pool in pools)
