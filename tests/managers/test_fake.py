"""The fake manager: the outcomes of actions are scripted, and all calls are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tangram.clock import VirtualLoop
from tangram.core.action import Action, Usage
from tangram.core.demand import CORE, Demand, cores
from tangram.core.messages import Grant, Share
from tangram.errors import ManagerError
from tangram.managers.base import Lease
from tangram.managers.fake import FakeManager, FakeScript
from tangram.managers.work import Close, Exec, ExecResult, LeaseResult, Open, SandboxSpec, Work


def on_virtual_time(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario)


async def start(
    manager: FakeManager, work: Work, *, id: str = "a", key: str = "", sandbox: str = "box", width: int = CORE
) -> Lease:
    action = Action(id=id, demand=Demand({"cpu": cores(1)}), sandbox=sandbox, key=key)
    return await manager.start(action, Grant(id, "fake", (Share("cpu@fake", width, width),), width), work)


async def opened(scripts: dict[str, FakeScript]) -> FakeManager:
    manager = await FakeManager(scripts).__aenter__()
    await (await start(manager, Open(spec=SandboxSpec()), id="open")).wait()
    return manager


def now() -> float:
    return asyncio.get_running_loop().time()


def test_the_duration_of_an_action_comes_from_its_script_and_its_grant() -> None:
    async def scenario() -> None:
        manager = await opened({"tests": FakeScript(duration_s=lambda action, grant: 8.0 * CORE / grant.width)})
        for width, seconds in ((CORE, 8.0), (4 * CORE, 2.0)):
            began = now()
            await (await start(manager, Exec(command="true"), key="tests", width=width)).wait()
            assert now() - began == pytest.approx(seconds)

    on_virtual_time(scenario())


def test_without_a_script_a_command_takes_as_long_as_it_sleeps_and_prints_what_it_echoes() -> None:
    async def scenario() -> None:
        manager = await opened({})
        began = now()
        ended = await (await start(manager, Exec(command="sleep 30; echo done > f && sleep 0.5\ncat f; exit 2"))).wait()
        assert now() - began == pytest.approx(30.5)
        assert ended.executed == ExecResult(exit_code=2, stdout=b"done\n", stdout_bytes=5, cpus=1)
        assert await manager.read("box", "f", bytes_max=10) == b"done\n"

    on_virtual_time(scenario())


def test_a_scripted_result_is_returned_as_it_is() -> None:
    async def scenario() -> None:
        script = FakeScript(
            duration_s=1.0, executed=ExecResult(exit_code=1, stdout=b"2 failed"), usage=Usage(cpu_s=4.0)
        )
        manager = await opened({"tests": script, "": FakeScript(executed=ExecResult(exit_code=9))})
        lease = await start(manager, Exec(command="pytest"), key="tests")
        await asyncio.sleep(0.25)
        assert lease.cpu_seconds() == pytest.approx(1.0)
        assert await lease.wait() == LeaseResult(usage=script.usage, executed=script.executed)
        assert lease.cpu_seconds() is None
        other = await (await start(manager, Exec(command="pytest"), key="unknown")).wait()
        assert other.executed == ExecResult(exit_code=9)

    on_virtual_time(scenario())


def test_a_start_fails_as_often_as_the_script_sets() -> None:
    async def scenario() -> None:
        manager = await opened({"flaky": FakeScript(start_failures=2)})
        for _ in range(2):
            with pytest.raises(ManagerError, match="fails as scripted") as caught:
                await start(manager, Exec(command="true"), key="flaky")
            assert caught.value.retry
        ended = await (await start(manager, Exec(command="true"), key="flaky")).wait()
        assert ended.executed is not None
        with pytest.raises(ManagerError):
            await start(manager, Exec(command="true"), id="another", key="flaky")

    on_virtual_time(scenario())


def test_an_action_is_lost_after_the_time_in_the_script() -> None:
    async def scenario() -> None:
        manager = await opened({"bad": FakeScript(duration_s=10.0, lost_after_s=3.0)})
        began = now()
        ended = await (await start(manager, Exec(command="true"), key="bad")).wait()
        assert (ended.lost, ended.executed) == ("lost as scripted", None)
        assert now() - began == pytest.approx(3.0)

    on_virtual_time(scenario())


def test_an_action_that_never_ends_is_stopped_in_the_time_in_the_script() -> None:
    async def scenario() -> None:
        manager = await opened({"server": FakeScript(ends=False, stop_s=1.5)})
        lease = await start(manager, Exec(command="true"), key="server")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lease.wait(), 1e6)
        began = now()
        await asyncio.gather(lease.stop(), lease.stop())
        assert now() - began == pytest.approx(1.5)
        assert await lease.wait() == LeaseResult(executed=ExecResult())

    on_virtual_time(scenario())


def test_all_calls_are_recorded_in_order_with_their_time() -> None:
    async def scenario() -> None:
        manager = await opened({"slow": FakeScript(duration_s=5.0)})
        work = Exec(command="true")
        lease = await start(manager, work, id="x", key="slow")
        lease.resize(reserved=500, limit=2000)
        ended = await lease.wait()
        await manager.write("box", "f", b"", mode=0o644)
        await manager.__aexit__(None, None, None)
        assert [(call.method, call.subject) for call in manager.calls] == [
            ("enter", ""), ("start", "open"), ("ended", "open"), ("start", "x"), ("resize", "x"), ("ended", "x"),
            ("write", "box"), ("exit", ""),
        ]  # fmt: skip
        resize, end = manager.calls[4], manager.calls[5]
        assert (resize.detail, end.detail) == ((500, 2000), ended)
        assert manager.calls[3].detail == work
        assert end.at_s - resize.at_s == pytest.approx(5.0)

    on_virtual_time(scenario())


def test_what_a_stopped_command_would_have_done_has_not_happened() -> None:
    async def scenario() -> None:
        manager = await opened({})
        lease = await start(manager, Exec(command="echo x > f; sleep 10"))
        await lease.stop()
        assert await manager.list("box", ".") == []
        await (await start(manager, Close(), id="close")).wait()

    on_virtual_time(scenario())


@pytest.mark.parametrize("command", ["echo 'unclosed", "echo \\"])
def test_a_command_that_it_cannot_read_is_refused(command: str) -> None:
    async def scenario() -> None:
        manager = await opened({})
        with pytest.raises(ManagerError, match="cannot read"):
            await start(manager, Exec(command=command))

    on_virtual_time(scenario())
