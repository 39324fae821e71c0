"""Connections, sandboxes, sessions and servers from before they are open to after they are closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.client.client import Client, connect
from tangram.client.sandbox import Sandbox
from tangram.client.sync import connect_sync
from tangram.core.action import Status
from tangram.core.messages import Effect, Event
from tangram.core.scheduler import Scheduler
from tangram.errors import AdmissionRefused, TangramError

Connected = Callable[..., None]

NOT_OPEN = "is not open: use `async with`"
USES: list[Callable[[Sandbox], Awaitable[object]]] = [
    lambda box: box.exec("true"),
    lambda box: box.start("true"),
    lambda box: box.session().exec("true"),
    lambda box: box.read("x"),
    lambda box: box.write("x", ""),
    lambda box: box.list(),
    lambda box: box.delete("x"),
    lambda box: box.upload("/etc/hostname"),
    lambda box: box.download("x", "/nosuch"),
    lambda box: box.commit(),
]


# ---- sandboxes ----------------------------------------------------------------------------------------------------


def test_using_a_sandbox_that_is_not_open_raises_at_each_method(plain: Connected) -> None:
    async def test(t: Client) -> None:
        box = t.sandbox()
        for use in USES:
            with pytest.raises(TangramError, match=f"the sandbox {NOT_OPEN}"):
                await use(box)
        async with box:
            assert (await box.exec("true")).ok
        for use in USES:
            with pytest.raises(TangramError, match="the sandbox is closed"):
                await use(box)

    plain(test)


def test_a_sandbox_is_opened_once_and_closed_as_often_as_you_like(plain: Connected) -> None:
    async def test(t: Client) -> None:
        box = t.sandbox()
        await box.close()
        async with box:
            with pytest.raises(TangramError, match="the sandbox was opened before"):
                await box.__aenter__()
            assert (await box.exec("true")).ok
            await box.close()
        await box.close()
        with pytest.raises(TangramError, match="the sandbox was opened before"):
            await box.__aenter__()

    plain(test)


def test_a_sandbox_that_outlives_its_connection_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        async with connect(backend="process", state=tmp_path / "state") as t:
            box = await t.sandbox().__aenter__()
            shell = box.session()
            server = await box.start("sleep 60")
        with pytest.raises(TangramError, match="the connection is closed"):
            await box.exec("true")
        assert (await server.wait()).status is Status.CANCELLED
        assert (await server.stop()).status is Status.CANCELLED
        await box.close()
        await shell.close()

    asyncio.run(main())


# ---- connections --------------------------------------------------------------------------------------------------


def test_using_a_connection_that_is_not_open_raises_at_each_method() -> None:
    async def main() -> None:
        t = connect(backend="process")
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: t.sandbox().__aenter__(),
            lambda: t.image(),
            lambda: t.forget("x"),
            lambda: t.__aexit__(None, None, None),
        ]
        for use in uses:
            with pytest.raises(TangramError, match=f"the connection {NOT_OPEN}"):
                await use()
        async with t:
            with pytest.raises(TangramError, match="the connection was opened before"):
                await t.__aenter__()
            async with t.sandbox() as box:
                assert (await box.exec("true")).ok
        for use in uses:
            with pytest.raises(TangramError, match="the connection is closed"):
                await use()
        with pytest.raises(TangramError, match="the connection was opened before"):
            await t.__aenter__()

    asyncio.run(main())


def test_using_a_synchronous_connection_that_is_not_open_raises_at_each_method() -> None:
    t = connect_sync(backend="process")
    box = t.sandbox()
    uses: list[Callable[[], object]] = [
        box.__enter__,
        lambda: box.exec("true"),
        lambda: box.start("true"),
        lambda: box.session().exec("true"),
        t.image,
        lambda: t.__exit__(None, None, None),
    ]
    for use in uses:
        with pytest.raises(TangramError, match=rf"the connection {NOT_OPEN}, or `with` after connect_sync\(\)"):
            use()
    with t:
        with pytest.raises(TangramError, match=f"the sandbox {NOT_OPEN}"):
            box.exec("true")
        with box:
            assert box.exec("echo hi").stdout == "hi\n"
            with pytest.raises(TangramError, match="the connection was opened before"):
                t.__enter__()
    for use in uses:
        with pytest.raises(TangramError, match="the connection is closed"):
            use()
    with pytest.raises(TangramError, match="the connection was opened before"):
        t.__enter__()


def test_using_an_object_of_another_event_loop_raises_at_once(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            server = await box.start("sleep 60")
            closing: list[Callable[[Sandbox], Awaitable[object]]] = [lambda box: box.close()]
            others: list[Callable[[Sandbox], Awaitable[object]]] = [
                lambda box: server.wait(),
                lambda box: server.stop(),
                lambda box: t.image(),
                lambda box: t.sandbox().__aenter__(),
                lambda box: t.__aexit__(None, None, None),
            ]
            for use in USES + closing + others:

                async def elsewhere(use: Any = use) -> None:
                    with pytest.raises(TangramError, match="the connection belongs to another event loop"):
                        await asyncio.wait_for(use(box), 5)

                await asyncio.to_thread(lambda doing=elsewhere: asyncio.run(doing()))
            assert (await box.exec("echo fine")).stdout == "fine\n"

    plain(test)


def test_a_synchronous_call_from_a_listener_is_refused_instead_of_deadlocking(tmp_path: Path) -> None:
    output: list[str] = []
    with connect_sync(backend="process", state=tmp_path / "state") as t, t.sandbox() as box:

        def on_output(stream: str, data: bytes) -> None:
            for use in (lambda: box.exec("true"), lambda: box.read("x"), lambda: t.__exit__(None, None, None)):
                with pytest.raises(TangramError, match="on the thread of the event loop") as caught:
                    use()
                output.append(str(caught.value))

        assert box.exec("echo hi", on_output=on_output).stdout == "hi\n"
        assert box.exec("echo still").stdout == "still\n"
    assert len(output) == 3


def test_a_bug_that_ends_the_connection_without_await_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def divide(scheduler: Scheduler, event: Event, now: float) -> list[Effect]:
        return [1 // 0]  # type: ignore[list-item]

    t = connect_sync(backend="process")
    box = t.__enter__().sandbox().__enter__()
    (thread,) = (each for each in threading.enumerate() if each.name == "tangram")
    monkeypatch.setattr(Scheduler, "handle", divide)
    with pytest.raises(ZeroDivisionError):
        box.exec("true")
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(TangramError, match="the connection is closed"):
        box.exec("true")
    with pytest.raises(ZeroDivisionError):
        t.__exit__(None, None, None)


# ---- sessions -----------------------------------------------------------------------------------------------------


def test_commands_of_one_session_run_one_at_a_time_in_one_shell(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box, box.session() as shell:
            first, second, third = await asyncio.gather(
                shell.exec("x=$$; sleep 0.3; echo $$ >> order"),
                shell.exec("test $x = $$; echo $?; echo second >> order"),
                box.exec("true"),
            )
            assert first.ok and second.stdout == "0\n" and third.ok
            assert (await shell.exec("tail -n 1 order")).stdout == "second\n"

    plain(test)


def test_cancelling_the_wait_for_a_session_leaves_it_unchanged(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box, box.session() as shell:
            await box.exec("mkfifo go")
            first = asyncio.create_task(shell.exec("x=1; read line < go; echo first"))
            waiting = asyncio.create_task(shell.exec("x=2"))
            await box.exec("true")
            waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled()
            await box.exec("echo > go")
            assert (await first).stdout == "first\n"
            assert (await shell.exec("echo $x")).stdout == "1\n"

    plain(test)


def test_a_session_ends_with_its_sandbox(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            async with box.session() as shell:
                await shell.exec("true")
                await box.close()
            with pytest.raises(TangramError, match="the sandbox is closed"):
                await shell.exec("true")

    plain(test)


# ---- servers ------------------------------------------------------------------------------------------------------


def test_a_server_that_never_started_raises_what_kept_it_from_that(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            with pytest.raises(AdmissionRefused, match="64000 cores"):
                await box.start("sleep 60", cpus=64_000)
            short = await box.start("exit 3")
            assert (await short.wait()).exit_code == 3

    plain(test)


def test_a_server_that_waits_for_its_cores_ends_with_its_sandbox(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as greedy, t.sandbox() as box:
            await greedy.start("sleep 60", cpus=1)
            starting = asyncio.create_task(box.start("sleep 60", cpus=1))
            await asyncio.sleep(0)
            await box.close()
            with pytest.raises(TangramError, match="cancelled"):
                await starting

    plain(test, cores=1.5)


def test_waiting_for_a_server_is_harmless(plain: Connected) -> None:
    async def test(t: Client) -> None:
        async with t.sandbox() as box:
            await box.exec("mkfifo go")
            server = await box.start("read line < go; echo ended by itself")
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(server.wait(), 0.05)
            await box.exec("echo > go")
            ended = await server.wait()
            assert (ended.status, ended.stdout) == (Status.SUCCEEDED, "ended by itself\n")
            left = await box.start("sleep 60")
        assert (await left.wait()).status is Status.CANCELLED

    plain(test)
