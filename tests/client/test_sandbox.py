"""The SDK on real sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chaos.conftest import first_processes
from tests.client.conftest import orchestrator_of
from tests.passing_time import LONG_S, past_limit

from tangram.client.client import Client
from tangram.client.sync import connect_sync
from tangram.core.action import Status
from tangram.errors import (
    ActionLost,
    AdmissionRefused,
    CommandFailed,
    FileFailed,
    InvalidAction,
    SessionEnded,
    TangramError,
)

Connected = Callable[..., None]


def test_a_command_runs_and_reports_its_time_breakdown(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB", run="swe", trajectory="t17") as box:
            await box.write("fix.py", "print('fixed')")
            result = await box.exec("python3 fix.py {cpus} && nproc", cpus=(1, 2), timeout_s=60, key="tests")
            assert result.ok, result
            assert result.stdout.split() == ["fixed", result.stdout.split()[1]]
            assert result.timing.execution_s > 0.0 and result.timing.waiting_s >= 0.0
            assert result.usage.cpu_s > 0.0 and result.usage.memory_peak_bytes > 0

    connected(test)


def test_every_kind_of_end_is_distinguished(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            assert (await box.exec("exit 3")).exit_code == 3
            begun = asyncio.Event()
            task = asyncio.create_task(
                box.exec("echo begun; sleep 3600", timeout_s=LONG_S, on_output=lambda *_: begun.set())
            )
            await asyncio.wait_for(begun.wait(), 60)
            timed_out = await past_limit(orchestrator_of(t), task)
            assert (timed_out.status, timed_out.exit_code, timed_out.stdout) == (Status.TIMED_OUT, None, "begun\n")
            refused = await box.exec("true", cpus=1000)
            assert refused.status is Status.REFUSED and "1000 cores" in refused.reason
            server = await box.start("sleep 60")
            assert (await server.stop()).status is Status.CANCELLED
            with pytest.raises(CommandFailed, match="ended with 1"):
                (await box.exec("false")).check()

    connected(test)


def test_output_is_streamed_as_it_comes(connected: Connected) -> None:
    async def test(t: Client) -> None:
        output: list[tuple[str, bytes]] = []
        first = asyncio.Event()

        def on_output(stream: str, data: bytes) -> None:
            output.append((stream, data))
            first.set()

        async with t.sandbox(memory="128MiB") as box:
            await box.exec("mkfifo go")
            task = asyncio.create_task(box.exec("echo one; read line < go; echo two >&2", on_output=on_output))
            await asyncio.wait_for(first.wait(), 60)
            assert output == [("stdout", b"one\n")]
            await box.exec("echo > go")
            assert (await task).stderr == "two\n"
            assert output[1:] == [("stderr", b"two\n")]

    connected(test)


TICKING = """
import os, threading, time
file = open("ticks", "w")
def tick():
    while True:
        print(time.time(), file=file, flush=True)
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
while command := os.read(8, 65536):
    print("heard", command.rstrip(b"\\0").split()[-1].decode(), flush=True)
    os.write(9, b"3\\n")
"""
"""Writes the time for as long as it runs, and says which commands it is given."""


def test_a_program_takes_the_place_of_a_shell_and_stands_still_between_commands(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB", trajectory="t1") as box:
            shell = box.session()
            assert await shell.become(["python3", "-c", TICKING])
            answer = await shell.exec("first")
            assert (answer.stdout, answer.exit_code) == ("heard first\n", 3)
            while len(await box.read("ticks")) != len(await box.read("ticks")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # what was being written when it was stopped
            ticks, stood_from = (await box.read_text("ticks")).split(), time.time()
            await asyncio.sleep(0.3)  # in which it would tick many times
            assert (await box.read_text("ticks")).split() == ticks
            stood_until = time.time()
            box.trajectory = "t2"
            assert (await shell.exec("second", cpus=1)).stdout == "heard second\n"
            later: list[float] = []
            while not later or later[-1] < stood_until:  # it goes on, though perhaps not within one short command
                await shell.exec("again", cpus=1)
                later = [float(tick) for tick in (await box.read_text("ticks")).split()[len(ticks) :]]
            assert [tick for tick in later if stood_from < tick < stood_until] == [], "one from before may be told late"
            with pytest.raises(InvalidAction, match="a list of words"):
                await shell.become("python3")
            assert (await box.session().exec("echo beside")).stdout == "beside\n"

    connected(test)


def test_an_idle_shell_is_reused_beside_further_shells_and_sealed_with_its_sandbox(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            shells = [box.session() for _ in range(3)]
            for number, shell in enumerate(shells):
                assert (await shell.exec(f"x={number}; cd /tmp")).ok
            await asyncio.gather(*(shell.exec("sleep 0.05 & y=$x") for shell in shells[:2]), box.exec("sleep 0.05"))
            image = await box.commit()
            for number, shell in enumerate(shells):
                assert (await shell.exec("echo $x; pwd")).stdout == f"{number}\n/tmp\n"
            async with t.sandbox(memory="128MiB", image=image) as copy:
                assert (await copy.session().exec("true")).ok

    connected(test)


def test_a_session_keeps_its_shell_until_a_timeout_ends_it(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            async with box.session() as shell:
                await shell.exec("cd /tmp; answer=42; double() { echo $(($1 * 2)); }")
                assert (await shell.exec("pwd; double $answer")).stdout == "/tmp\n84\n"
                assert (await shell.exec("false")).exit_code == 1
                ended = await shell.exec("sleep 60", timeout_s=0.3)
                assert ended.status is Status.TIMED_OUT and ended.session_ended
                with pytest.raises(SessionEnded, match="sleep 60"):
                    await shell.exec("true")
            async with box.session() as other:
                assert (await other.exec("echo ${answer:-unset}")).stdout == "unset\n"
                assert (
                    await other.exec("pwd; echo $answer", cwd=Path("/tmp"), env={"answer": "1"})
                ).stdout == "/tmp\n1\n"
                assert (await other.exec("pwd; echo $answer")).stdout == "/tmp\n1\n"
                left = await other.exec("exit 7")
                assert left.exit_code == 7 and left.session_ended

    connected(test)


def test_a_server_stays_up_between_commands(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            await box.write("ticks", "")
            async with await box.start("while :; do echo tick >> ticks; sleep 0.02; done", cpus=0.5):
                while len(await box.read("ticks")) < 10:
                    await box.exec("true")
            after = await box.read("ticks")
            await box.exec("sleep 0.1")
            assert await box.read("ticks") == after

    connected(test)


def test_a_group_of_siblings_opens_from_what_one_has_prepared(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            await box.exec("mkdir -p repo && echo base > repo/a && rm -rf /home/agent")
            image = await box.commit()
        async with t.sandbox(image=image, memory="128MiB") as one, t.sandbox(image=image, memory="128MiB") as two:
            await one.exec("echo changed > repo/a")
            assert (await two.exec("cat repo/a; ls -d /home/agent")).stdout == "base\n"
        await t.forget(image)
        with pytest.raises(InvalidAction, match=image.name):
            async with t.sandbox(image=image):
                pass

    connected(test)


def test_set_up_is_run_once_and_kept_for_other_processes(connected: Connected) -> None:
    names = []

    async def test(t: Client) -> None:
        setup = ["date +%N > stamp", "echo done"]
        made = await t.gather(*(t.image(setup=setup, memory="128MiB") for _ in range(3)))
        assert len({image.name for image in made}) == 1
        async with t.sandbox(image=made[0], memory="128MiB") as box:
            names.append((await box.read_text("stamp")).strip())
        with pytest.raises(CommandFailed, match="ended with 9"):
            await t.image(setup=["exit 9"], memory="128MiB")

    connected(test)
    connected(test)
    assert len(set(names)) == 1


def test_an_image_without_set_up_is_looked_for(connected: Connected) -> None:
    async def test(t: Client) -> None:
        assert (await t.image()).name == (await t.image(base="host")).name == "host"
        with pytest.raises(InvalidAction, match=r"image: expected one of 'host'.*got 'hots'"):
            await t.image(base="hots")
        with pytest.raises(InvalidAction, match="base: expected either a source or a base"):
            await t.image("/usr", base="host")

    connected(test)


def test_the_place_where_commands_start_is_not_deleted(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            await box.write("kept", "text")
            for place in (".", "/", "/work/", "sub/.."):
                with pytest.raises(FileFailed, match="where commands start"):
                    await box.delete(place)
            assert await box.read_text("kept") == "text"

    connected(test)


def test_files_go_up_and_down(connected: Connected, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "a.txt").write_text("hello")

    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            await box.upload(source)
            assert (await box.exec("cat src/a.txt; echo more > src/b.txt")).stdout == "hello"
            place = await box.download("src", tmp_path / "back")
            assert sorted(path.name for path in place.iterdir()) == ["a.txt", "b.txt"]
            await box.delete("src")
            with pytest.raises(FileFailed, match="No such file"):
                await box.read("src/a.txt")
            await box.write("four", b"1234")
            with pytest.raises(FileFailed, match="at most 3"):
                await box.read("four", bytes_max=3)

    connected(test)


def test_a_sandbox_that_is_too_large_is_refused_with_the_limit(connected: Connected) -> None:
    async def test(t: Client) -> None:
        with pytest.raises(AdmissionRefused, match="requests 67108864 MiB"):
            async with t.sandbox(memory="64TiB"):
                pass
        with pytest.raises(InvalidAction, match="image"):
            async with t.sandbox(image="nosuch"):
                pass

    connected(test)


def test_an_exception_of_the_caller_comes_out_as_it_is(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            await box.start("sleep 60")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        connected(test)


def test_gather_raises_the_first_exception_and_cancels_the_rest(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:

            async def fails() -> None:
                await box.exec("true")
                raise ValueError("no")

            with pytest.raises(ValueError, match="no"):
                await t.gather(fails(), box.exec("sleep 60"))
            assert (await box.exec("pgrep sleep")).exit_code == 1

    connected(test)


def test_warm_sandboxes_are_made_ahead_as_actions(connected: Connected, tmp_path: Path) -> None:
    async def test(t: Client) -> None:
        for _ in range(3):
            async with t.sandbox(memory="128MiB") as box:
                assert (await box.exec("ls -A /work | wc -l; touch seen")).stdout == "0\n"

    connected(test, warm=1, record=tmp_path / "trace.jsonl")
    submitted = [
        line["message"]["action"]["kind"]
        for line in map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines()[1:])
        if line["message"]["type"] == "Submit"
    ]
    assert submitted.count("prepare") == 3 and submitted.count("open") == 3 and submitted.count("close") == 3


def test_root_inside_is_unprivileged_outside(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB", user="root") as box:
            shown = (
                await box.exec("id -u; touch /etc/mine && stat -c %u /etc/mine; cat /proc/self/uid_map")
            ).stdout.split()
            assert shown[:2] == ["0", "0"]
            assert shown[2:4] != ["0", "0"]

    connected(test)


@pytest.mark.parametrize("transport", ["embedded"], indirect=True)  # the spawner of a service is not our child
def test_a_sandbox_whose_first_process_is_killed_is_lost_and_the_rest_lives(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as box:
            [first] = first_processes()
            async with t.sandbox(memory="128MiB") as other:
                running = asyncio.create_task(box.exec("touch begun; sleep 60"))
                while "begun" not in [entry.name for entry in await box.list(".")]:
                    pass
                os.kill(first, signal.SIGKILL)
                assert (await running).status is Status.LOST
                later = await box.exec("true")
                assert later.status is Status.LOST and "gone" in later.reason
                with pytest.raises(ActionLost):
                    later.check()
                assert (await other.exec("echo alive")).stdout == "alive\n"

    connected(test)


def test_the_same_without_await(tmp_path: Path, connected: Connected) -> None:
    with connect_sync(state=tmp_path / "state") as t, t.sandbox(memory="128MiB") as box:
        box.write("a", "1")
        assert box.exec("cat a").stdout == "1"
        with box.session() as shell:
            shell.exec("x=2")
            assert shell.exec("echo $x").stdout == "2\n"
        assert box.start("sleep 60").stop().status is Status.CANCELLED
        assert [entry.name for entry in box.list(".")] == ["a"]


def test_closing_ends_running_commands_and_does_not_wait_for_cores(connected: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as other:
            async with t.sandbox(memory="128MiB") as box:
                mine = await box.start("sleep 60", cpus=0.5)
                await other.start("sleep 60", cpus=1.5)
            assert (await mine.wait()).status is Status.CANCELLED
            with pytest.raises(TangramError, match="the sandbox is closed"):
                await box.exec("true")

    connected(test, cores=2)


def test_a_sandbox_is_closed_even_if_nothing_is_granted_any_more(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.client.sandbox.CLOSE_WAIT_S", 0.2)

    async def test(t: Client) -> None:
        async with t.sandbox(memory="128MiB") as greedy:
            async with t.sandbox(memory="128MiB"):
                server = await greedy.start("sleep 60", cpus=2)
            assert len(await greedy.list("/work")) == 0
            await server.stop()

    connected(test, cores=2)
