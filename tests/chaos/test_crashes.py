"""Processes of ours that are killed, callers that give up, connections that end: never a hang, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import (
    STORY_S_MAX,
    Owners,
    eventually,
    first_processes,
    holders,
    inside,
    is_exiting,
    is_zombie,
    owners_of,
    pids,
    processes_of,
    read_proc_file,
    run,
    spawner,
    until,
    visible_pids,
)

import tangram
from tangram import Status
from tangram.client.sandbox import Session
from tangram.errors import ActionFailed, InvalidAction, ManagerError
from tangram.managers.sandboxes.bwrap import manager
from tangram.managers.sandboxes.bwrap.manager import BwrapManager
from tangram.managers.sandboxes.bwrap.owner import SandboxOwner
from tangram.managers.sandboxes.bwrap.spawner.client import SpawnerClient

Play = Callable[..., Any]


async def running(box: tangram.Sandbox, word: str, **options: Any) -> asyncio.Task[tangram.Result]:
    """An action that runs until it is stopped; `word` is a number that nothing else has."""
    task = asyncio.create_task(box.exec(["sleep", word], cpus=0.1, **options))
    await until(lambda: visible_pids(word), "the action runs")
    return task


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# ---- processes that are killed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("list_processes", [first_processes, holders])
def test_a_sandbox_whose_first_process_is_killed_is_lost_alone(
    play: Play, list_processes: Callable[[], list[int]]
) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            victim = list_processes()[0]
            async with t.sandbox(memory="64MiB") as other:
                action, unharmed = await running(box, "9001"), await running(other, "9002")
                session = box.session()
                (await session.exec("true")).check()
                reading = asyncio.create_task(box.exec("cat", stdin=b"", cpus=0.1))
                kill(victim)
                result = await action
                assert result.status is Status.LOST and result.exit_code is None
                await reading
                for late in (await box.exec("true"), await session.exec("true")):
                    assert late.status is Status.LOST
                with pytest.raises(ManagerError):
                    await box.read("/etc/hostname")
                with pytest.raises(ActionFailed):
                    await box.commit("none")
                assert not unharmed.done()
                kill(visible_pids("9002")[0])
                assert (await unharmed).exit_code == 137
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("echo next")).stdout == "next\n"

    play(story)


async def kill_first_process() -> None:
    """Returns once it exits. The spawner may not know it yet."""
    (victim,) = first_processes()
    kill(victim)
    await until(lambda: is_exiting(victim), "the first process exits")


OPERATIONS: dict[str, Callable[[tangram.Sandbox, Session], Awaitable[Any]]] = {
    "commit": lambda box, _: box.commit("none"),
    "read": lambda box, _: box.read("/etc/hostname"),
    "write": lambda box, _: box.write("file", b"content"),
    "list": lambda box, _: box.list("/"),
    "delete": lambda box, _: box.delete("file"),
    "exec": lambda box, _: box.exec("true"),
    "session": lambda _, session: session.exec("true"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_fails_once_the_first_process_exits(
    play: Play, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notification of the spawner comes later, here after the operation. In version 1 of control groups the frozen
    shell of the session cannot die: the first process waits for it, and the holder keeps the mounts."""
    delayed = contextlib.ExitStack()

    def spawning(on_gone: Callable[[str, int], None], *rest: Any, **options: Any) -> SpawnerClient:
        def notify(box: str, code: int) -> None:
            delayed.callback(on_gone, box, code)
            if is_over:
                delayed.close()

        return SpawnerClient(notify, *rest, **options)

    monkeypatch.setattr(manager, "SpawnerClient", spawning)
    is_over = False

    async def story(t: tangram.Client) -> None:
        nonlocal is_over
        async with t.sandbox(memory="64MiB") as box:
            session = box.session()
            (await session.exec("touch file")).check()
            await kill_first_process()
            if operation in ("exec", "session"):
                result = await OPERATIONS[operation](box, session)
                assert result.status is Status.LOST and "is gone" in result.reason
            else:
                with pytest.raises((ActionFailed, ManagerError), match="is gone"):
                    await OPERATIONS[operation](box, session)
            is_over = True
            delayed.close()

    play(story)


def test_a_commit_fails_if_the_sandbox_dies_while_it_is_copied(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    request = SpawnerClient.request

    async def request_and_kill(self: SpawnerClient, do: str, **fields: Any) -> Any:
        reply = await request(self, do, **fields)
        if do == "copy":
            await kill_first_process()
        return reply

    monkeypatch.setattr(SpawnerClient, "request", request_and_kill)

    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            (await box.exec("sleep 9041 &")).check()
            with pytest.raises(ActionFailed, match="is gone"):
                await box.commit("none")
        with pytest.raises(InvalidAction):
            async with t.sandbox(image="none"):
                pass

    play(story)


def test_the_spawner_takes_its_sandboxes_along_and_new_ones_get_a_new_one(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box, t.sandbox(memory="64MiB") as other:
            actions = [await running(box, "9003"), await running(other, "9004")]
            session = other.session()
            (await session.exec("true")).check()
            server = await other.start("sleep 9005", cpus=0.1)
            first = spawner()
            kill(first)
            for action in actions:
                assert (await action).status is Status.LOST
            assert (await server.wait()).status is Status.LOST
            assert (await session.exec("true")).status is Status.LOST
            with pytest.raises(ManagerError):
                await box.write("a", b"")
            async with t.sandbox(memory="64MiB") as new:
                assert (await new.exec("echo new")).stdout == "new\n"
                assert spawner() != first
        assert visible_pids("9003") == visible_pids("9004") == visible_pids("9005") == []

    play(story)


def test_the_main_process_of_an_action_may_be_killed_like_any_program(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            for signum, code in ((signal.SIGKILL, 137), (signal.SIGTERM, 143), (signal.SIGSEGV, 139)):
                action = await running(box, "9006")
                os.kill(visible_pids("9006")[0], signum)
                result = await action
                assert (result.status, result.exit_code) == (Status.SUCCEEDED, code)
            assert (await box.exec("echo usable")).stdout == "usable\n"

    play(story)


def waiting_runners() -> list[int]:
    """Forks of the spawner inside sandboxes that have no order yet."""
    root = spawner()
    return [pid for pid in visible_pids("-S") if f"\nPPid:\t{root}\n" in read_proc_file(pid, "status")]


def test_a_waiting_runner_that_is_killed_is_replaced(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            for _ in range(5):
                await until(waiting_runners, "a runner waits")
                killed = waiting_runners()
                for pid in killed:
                    kill(pid)
                result = await box.exec("echo fine")  # it may be the one that got the order
                assert (result.stdout, result.exit_code) in (("fine\n", 0), ("", 137))
                await until(lambda gone=set(killed): set(waiting_runners()) - gone, "another one waits")
                assert (await box.exec("echo fine")).stdout == "fine\n"

    play(story)


def test_killing_the_spawner_while_sandboxes_open_blocks_no_caller(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async def visit() -> str:
            try:
                async with t.sandbox(memory="16MiB") as box:
                    return (await box.exec("echo there")).stdout
            except ActionFailed as error:
                return type(error).__name__

        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
            visits = asyncio.gather(*(visit() for _ in range(6)))
            await asyncio.sleep(delay_s)
            kill(spawner())
            assert set(await visits) <= {"there\n", "", "ActionLost"}
        assert await visit() == "there\n"

    play(story)


def test_killing_a_sandbox_during_file_work_and_commit_blocks_no_caller(play: Play, tmp_path: Path) -> None:
    async def story(t: tangram.Client) -> None:
        for number in range(4):
            async with t.sandbox(memory="256MiB") as box:
                (await box.exec("head -c 50000000 /dev/zero > large; truncate -s 10G holes")).check()
                download = asyncio.create_task(box.download("holes", tmp_path / "t", bytes_max="10GiB"))
                commit = asyncio.create_task(box.commit(f"c{number}"))
                await asyncio.sleep(0.01 * number)
                kill(first_processes()[0])
                with pytest.raises(tangram.TangramError):
                    await download
                with contextlib.suppress(ActionFailed):
                    await t.forget(await commit)

    play(story)


# ---- owners that are killed ----------------------------------------------------------------------------------------

BUSY = """
async def work(number):
    async with t.sandbox(memory="64MiB") as box:
        await box.exec("(setsid sleep 1000 >/dev/null 2>&1 &)")
        async with box.session() as session:
            await session.exec("sleep 1001 &")
            server = await box.start("sleep 1002", cpus=0.1)
            print("ready", flush=True)
            await box.exec("trap '' TERM INT; sleep 1003", cpus=0.1)

async with t.sandbox(memory="64MiB") as idle, idle.session() as held:
    await held.exec("sleep 1004 & (setsid sleep 1005 >/dev/null 2>&1 &)")  # what is left running stands still
    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(work(number))
"""


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def test_all_processes_of_an_owner_end_with_it_and_the_next_owner_sweeps_under_load(owners: Owners, play: Play) -> None:
    live, dies = owners.start(BUSY), owners.start(BUSY)
    assert lines(live, 2) == lines(dies, 2) == ["ready"] * 2
    assert len(processes_of(owners.state, {dies.pid})) > 10
    dies.kill()
    dies.wait()
    eventually(
        lambda: not any(f"/tangram/{dies.pid}-" in read_proc_file(pid, "cgroup") for pid in pids()),
        "all processes of the dead owner end by themselves",
    )
    left = owners_of(dies.pid)
    assert len(left) == 1 and (owners.state / "owners" / left[0]).exists(), "until the next sweep"
    mine = owners_of(live.pid)
    before = {
        pid
        for pid in processes_of(owners.state, {live.pid})
        if f"/tangram/{live.pid}-" in read_proc_file(pid, "cgroup")
    }

    async def story(t: tangram.Client) -> None:
        assert owners_of(dies.pid) == [] and not (owners.state / "owners" / left[0]).exists()
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("echo next")).stdout == "next\n"

    play(story)
    assert owners_of(live.pid) == mine and before and all(os.path.exists(f"/proc/{pid}") for pid in before)
    live.send_signal(signal.SIGINT)
    assert live.wait(60) != 0
    assert owners_of(live.pid) == [], "an interrupted owner leaves nothing to sweep"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_that_dies_while_its_sandboxes_open_leaves_no_process(owners: Owners, signum: int) -> None:
    opening = """
async def visit():
    while True:
        async with t.sandbox(memory="16MiB") as box:
            print("open", flush=True)

await asyncio.gather(*(visit() for _ in range(4)))
"""
    for count in (1, 2, 5):
        process = owners.start(opening)
        lines(process, count)
        process.send_signal(signum)
        process.wait()
    eventually(lambda: not processes_of(owners.state, owners.pids), "all processes end by themselves")
    sweep(owners.state)


def test_an_interrupt_cleans_everything_up(owners: Owners) -> None:
    process = owners.start(BUSY)
    assert lines(process, 2) == ["ready"] * 2
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert owners_of(process.pid) == [] and list((owners.state / "owners").iterdir()) == []


def test_a_start_that_is_cancelled_while_its_owner_is_created_leaves_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = threading.Event(), threading.Event()

    def create_slowly(*arguments: Any) -> SandboxOwner:
        entered.set()
        assert released.wait(STORY_S_MAX)
        return SandboxOwner(*arguments)

    async def main() -> None:
        monkeypatch.setattr(manager, "SandboxOwner", create_slowly)
        starting = asyncio.create_task(BwrapManager(state=state).__aenter__())
        await asyncio.to_thread(entered.wait)
        starting.cancel()
        await asyncio.sleep(0)
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    assert list((state / "owners").iterdir()) == [] and owners_of(os.getpid()) == []


def test_two_interrupts_are_enough_to_end_a_program(owners: Owners) -> None:
    """The first interrupt cancels the main task, the second one all tasks at once."""
    process = owners.start(BUSY)
    assert lines(process, 2) == ["ready"] * 2
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)  # the two would count as one
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    eventually(lambda: not processes_of(owners.state, owners.pids), "all its processes have ended")
    sweep(owners.state)


def test_a_fork_of_the_owner_does_not_keep_its_sandboxes_running(owners: Owners) -> None:
    """As a loader of data forks: the fork has all descriptors of the owner."""
    process = owners.start(
        """
async with t.sandbox(memory="64MiB") as box:
    child = os.fork()
    if child == 0:
        os.close(1)
        signal.pause()
    print(child, flush=True)
    await box.exec(["sleep", "9009"])
"""
    )
    child = int(lines(process, 1)[0])

    def sandboxed() -> list[int]:
        return [pid for pid in pids() if f"/tangram/{process.pid}-" in read_proc_file(pid, "cgroup")]

    try:
        eventually(lambda: set(visible_pids("9009")) & set(sandboxed()), "it runs")
        process.kill()
        process.wait()
        eventually(lambda: not sandboxed(), "all processes have ended")
    finally:
        kill(child)
    ended = "the fork, which has the lock of the owner too, has ended"
    eventually(lambda: is_zombie(child) or not os.path.exists(f"/proc/{child}"), ended)
    sweep(owners.state)


def sweep(state: Path) -> None:
    """Sweep, as the next owner does."""

    async def come_and_go() -> None:
        async with tangram.connect(state=state):
            pass

    run(come_and_go())


def test_a_sandbox_is_closed_at_once_whatever_runs_rests_or_ends_in_it(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process cannot die: nothing may be frozen once the first process is asked to end."""
    monkeypatch.setattr(manager, "CLOSE_S_MAX", 10 * STORY_S_MAX)

    async def story(t: tangram.Client) -> None:
        for number in range(12):
            box = await t.sandbox(memory="64MiB").__aenter__()
            await box.exec("(setsid sleep 9030 >/dev/null 2>&1 &)")
            session = box.session()
            await session.exec("sleep 9031 &")
            servers = [await box.start("sleep 9032", cpus=0.1), await box.start(f"sleep 0.0{number}", cpus=0.1)]
            await asyncio.sleep(0.01)
            await box.close()
            for server in servers:
                assert (await server.wait()).status in (Status.SUCCEEDED, Status.LOST, Status.CANCELLED)
        assert visible_pids("9030") == visible_pids("9031") == visible_pids("9032") == []

    play(story)


# ---- callers that give up ------------------------------------------------------------------------------------------


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_action_can_be_given_up_at_every_stage(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            before = inside(state)
            action = await running(box, "9010")
            queued = asyncio.create_task(box.exec("sleep 9011", cpus=1))
            await asyncio.sleep(0.05)
            await cancelled(queued)
            assert visible_pids("9011") == []
            await cancelled(action)
            assert inside(state) == before
            for number in range(30):
                starting = asyncio.create_task(box.exec("sleep 9012", cpus=1))
                for _ in range(number):
                    await asyncio.sleep(0)
                await cancelled(starting)
                assert inside(state) == before
            for number in range(15):
                starting = asyncio.create_task(box.exec("sleep 9012", cpus=1))
                await asyncio.sleep(number / 2000)
                await cancelled(starting)
                assert inside(state) == before
            assert (await box.exec("echo usable", cpus=1)).stdout == "usable\n"

    play(story, cores=1)


def test_opening_can_be_given_up_at_every_moment(play: Play) -> None:
    """There is memory for one sandbox: if one stayed, the next would never open."""

    async def story(t: tangram.Client) -> None:
        for number in range(40):
            box = t.sandbox(memory="60MiB")
            opening = asyncio.create_task(box.__aenter__())
            await asyncio.sleep(number * 0.001)
            opening.cancel()
            try:
                await opening
                await box.close()
            except asyncio.CancelledError:
                pass
            assert first_processes() == []
        async with t.sandbox(memory="60MiB") as box:
            assert (await box.exec("echo usable")).stdout == "usable\n"

    play(story, memory="64MiB")


def test_opening_can_be_given_up_while_it_waits_for_memory(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="60MiB"):
            waiting = [asyncio.create_task(t.sandbox(memory="60MiB").__aenter__()) for _ in range(3)]
            await asyncio.sleep(0.05)
            for task in waiting:
                task.cancel()
            for task in waiting:
                await cancelled(task)
            assert len(first_processes()) == 1
        async with t.sandbox(memory="60MiB") as box:
            assert (await box.exec("echo usable")).stdout == "usable\n"

    play(story, memory="64MiB")


def test_a_cancelled_close_still_closes(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="30MiB") as other:
            for number in range(10):
                box = await t.sandbox(memory="30MiB").__aenter__()
                closing = asyncio.create_task(box.close())
                await asyncio.sleep(number * 0.001)
                closing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await closing
                assert len(first_processes()) == 1
            box = await t.sandbox(memory="30MiB").__aenter__()
            busy = asyncio.create_task(other.exec("sleep 9013", cpus=1))
            await until(lambda: visible_pids("9013"), "all cores are held, so closing must wait")
            closing = asyncio.create_task(box.close())
            await asyncio.sleep(0.05)
            closing.cancel()
            await asyncio.sleep(0.05)
            closing.cancel()
            await asyncio.sleep(0.05)
            await cancelled(busy)
            with contextlib.suppress(asyncio.CancelledError):
                await closing
            assert len(first_processes()) == 1, "the sandbox is closed when its memory is given back"

    play(story, cores=1, memory="64MiB")


def test_a_copy_that_is_given_up_leaves_nothing_half_made(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="256MiB") as box:
            (await box.exec("head -c 30000000 /dev/zero > large")).check()
            for number in range(8):
                committing = asyncio.create_task(box.commit(f"given-up-{number}"))
                await asyncio.sleep(number * 0.005)
                committing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await committing
                assert (await box.exec("echo goes on")).stdout == "goes on\n"
            for number in range(8):
                with contextlib.suppress(tangram.TangramError):
                    await t.forget(tangram.Image(f"given-up-{number}"))
        assert [path.name for path in (state / "images" / "layers").iterdir() if path.name.startswith(".part")] == []

    play(story)


def test_when_one_of_many_raises_the_rest_is_ended(play: Play, state: Path) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box:
            before = inside(state)

            async def fail() -> None:
                await until(lambda: len(visible_pids("9014")) == 3, "the others run")
                raise KeyError("mine")

            with pytest.raises(KeyError, match="mine"):
                await t.gather(*(box.exec(["sleep", "9014"], cpus=0.1) for _ in range(3)), fail())
            assert inside(state) == before
            gathered = t.gather(*(box.exec(["sleep", "9015"], cpus=0.1) for _ in range(3)))
            many = asyncio.create_task(gathered)
            await until(lambda: len(visible_pids("9015")) == 3, "they run")
            await cancelled(many)
            assert inside(state) == before

    play(story)


def test_a_connection_that_is_closed_ends_what_is_under_way(state: Path) -> None:
    tasks: list[asyncio.Task[Any]] = []
    boxes: list[tangram.Sandbox] = []

    async def story(t: tangram.Client) -> None:
        box = await t.sandbox(memory="64MiB").__aenter__()
        boxes.append(box)
        tasks.append(await running(box, "9016"))
        tasks.append(asyncio.create_task(box.exec("sleep 9017", cpus=2)))
        tasks.append(asyncio.create_task(t.sandbox(memory="64MiB").__aenter__()))
        tasks.append(asyncio.create_task(box.read("/etc/hostname")))
        server = await box.start("sleep 9018", cpus=0.1)
        tasks.append(asyncio.create_task(server.wait()))

    async def main() -> None:
        async with tangram.connect(state=state, cores=2, memory="1GiB") as t:
            await story(t)
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert [done[number].status for number in (0, 1, 4)] == [Status.CANCELLED] * 3
        with pytest.raises(tangram.TangramError):
            await boxes[0].exec("true")
        with pytest.raises(tangram.TangramError):
            await boxes[0].read("/etc/hostname")
        with pytest.raises(tangram.TangramError):
            await boxes[0].upload(__file__)

    run(main())


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3), ExceptionGroup("mine", [ValueError()])]
)
def test_what_is_raised_inside_comes_out_as_it_is(play: Play, error: BaseException) -> None:
    async def story(t: tangram.Client) -> None:
        async with t.sandbox(memory="64MiB") as box, box.session() as session:
            await session.exec("true")
            task = await running(box, "9019")
            try:
                raise error
            finally:
                task.cancel()

    with pytest.raises(type(error)) as raised:
        play(story)
    assert raised.value is error or isinstance(error, (KeyboardInterrupt, SystemExit))


def test_a_caller_that_is_cancelled_again_and_again_still_leaves_nothing(play: Play) -> None:
    async def story(t: tangram.Client) -> None:
        async def visit() -> None:
            async with t.sandbox(memory="64MiB") as box:
                await box.exec(["sh", "-c", "trap '' TERM; sleep 9020; sleep 9021"], cpus=0.5)

        visiting = asyncio.create_task(visit())
        await until(lambda: visible_pids("9020"), "it runs")
        while not visiting.done():
            visiting.cancel()
            await asyncio.sleep(0.02)
        assert visiting.cancelled()
        await until(lambda: first_processes() == [], "its sandbox is closed")
        async with t.sandbox(memory="64MiB") as box:
            assert (await box.exec("echo usable")).stdout == "usable\n"

    play(story)
