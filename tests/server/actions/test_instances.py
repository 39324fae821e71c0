"""Instances of functions at a shared service: they release what they hold when another run needs it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.client.conftest import why_not
from tests.managers.functions.conftest import until
from tests.server.http_caller import DEADLINE_S, Caller, Tenants, tenants

import tangram
from tangram.cli.screen import screen
from tangram.client.client import Client, connect
from tangram.config import RunLimits
from tangram.managers.functions.host import ALLOWANCE_BYTES
from tangram.managers.work import GIB, MIB
from tangram.runtime.views import View

EACH_MIB = 128 + ALLOWANCE_BYTES // MIB
"""Of memory, for an instance of the functions here."""
FOR_EVER: dict[str, Any] = dict(cpus=0.1, memory="128MiB", idle_s=1e9)


@tangram.function(**FOR_EVER)
def one() -> int:
    return 1


@tangram.function(**FOR_EVER)
def two() -> int:
    return 2


@tangram.function(**FOR_EVER)
def three() -> int:
    return 3


@tangram.function(**FOR_EVER)
def naps(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@tangram.function(cpus=2, memory="256MiB", idle_s=1e9)
def needy() -> int:
    return 4


class Harness:
    def __init__(self, tenants: Tenants, a: Client, b: Client) -> None:
        self.admin, self.caller_a, self.caller_b = tenants.admin, tenants.a, tenants.b
        self.a, self.b = a, b
        self.scheduler: Any = tenants.up.action_service.orchestrator.decider

    async def functions(self, caller: Caller | None = None) -> list[str]:
        """Functions with instances, as a caller sees them, or the admin."""
        answer = await (caller or self.admin).request("GET", "/v1/sandboxes")
        names = [box["function"] for box in answer.json["sandboxes"] if box["function"]]
        return sorted(name.rpartition(".")[2].partition("-")[0] for name in names)

    async def until_functions(self, *names: str) -> None:
        while True:
            if await self.functions() == sorted(names):
                return
            await asyncio.sleep(0.01)

    async def until_called(self, calls: int) -> None:
        """Wait until the given number of instances serve a call."""
        while True:
            view = (await self.admin.request("GET", "/v1/view")).json
            if sum(box["active"] for box in view["sandboxes"] if box["function"] and box["actions"]) == calls:
                return
            await asyncio.sleep(0.01)

    @property
    def held_mib(self) -> int:
        return int(self.scheduler.ledger.pools["memory@local"].held)


@asynccontextmanager
async def running_harness(
    folder: Path, caps: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[Harness]:
    settings: dict[str, Any] = dict(backend="sandbox", cores=2, memory=GIB) | options
    async with (
        tenants(folder, caps, **settings) as run_tenants,
        connect(run_tenants.up.address, token=run_tenants.a.token) as a,
        connect(run_tenants.up.address, token=run_tenants.b.token) as b,
    ):
        harness = Harness(run_tenants, a, b)
        yield harness
        harness.scheduler.check()


def play(folder: Path, test: Callable[[Harness], Awaitable[None]], **options: Any) -> None:
    reason = why_not()
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)

    async def inside() -> None:
        async with asyncio.timeout(DEADLINE_S), running_harness(folder, **options) as harness:
            await test(harness)

    asyncio.run(inside())
    assert list((folder / "state" / "owners").iterdir()) == []


# ---- waiting for memory ----


def test_idle_instances_end_for_a_sandbox_of_another_run_the_longest_idle_first(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        for function, value in ((one, 1), (two, 2), (three, 3), (one, 1)):
            assert await harness.a.call(function) == value
        assert harness.held_mib == 3 * EACH_MIB
        async with harness.b.sandbox(memory="500MiB"):
            await harness.until_functions("one", "three")
            async with harness.b.sandbox(memory="500MiB"):
                await harness.until_functions()
        assert await harness.a.call(two) == 2, "there is memory for functions again"

    play(tmp_path, test)


def test_an_instance_that_is_called_ends_for_a_waiting_sandbox_when_the_call_is_over(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        nap = asyncio.create_task(harness.a.call(naps, 1.0))
        await harness.until_called(1)
        async with harness.b.sandbox(memory="1000MiB"):
            assert await nap == 1.0, "it was not ended while it was called"
            assert await harness.functions() == []

    play(tmp_path, test)


def test_an_idle_instance_stays_while_a_sandbox_waits_for_cores_alone(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert await harness.a.call(one) == 1
        async with harness.b.sandbox(memory="100MiB") as box:
            busy = asyncio.create_task(box.exec("sleep 1000", cpus=2))
            holding = harness.scheduler.grants.holding
            await until(lambda: any(entry.action.kind == "exec" for entry in holding.values()))
            opening = asyncio.create_task(harness.caller_b.open("late", memory_bytes=100 * MIB))
            await until(lambda: harness.scheduler.queue.waiting == 1)
            assert await harness.functions() == ["one"]
            busy.cancel()
            await asyncio.wait({busy})
            await opening
        assert await harness.functions() == ["one"]

    play(tmp_path, test)


def test_a_call_waits_for_an_instance_that_is_ending_and_is_not_refused(tmp_path: Path) -> None:
    """Three functions of two runs, one after the other and at once, where there is memory for one instance."""

    async def test(harness: Harness) -> None:
        for client in (harness.a, harness.b, harness.a):
            for function, value in ((one, 1), (two, 2)):
                assert await client.call(function) == value
        assert harness.held_mib == EACH_MIB

    play(tmp_path, test, memory=(EACH_MIB + 1) * MIB)


def test_calls_without_memory_wait_for_the_instances_of_other_calls(tmp_path: Path) -> None:
    """Twelve calls where there is memory for three instances, and cores for all."""

    async def test(harness: Harness) -> None:
        assert await asyncio.gather(*(harness.a.call(naps, 0.1) for _ in range(12))) == [0.1] * 12
        assert harness.held_mib == 3 * EACH_MIB
        view = (await harness.admin.request("GET", "/v1/view")).json
        assert [box["function"] != "" for box in view["sandboxes"]] == [True] * 3
        assert sum(box["actions"] for box in view["sandboxes"]) == 12, "no instance ended for another call"

    play(tmp_path, test, memory=(3 * EACH_MIB + 1) * MIB)


def test_calls_wait_while_sandboxes_of_another_run_have_all_memory(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        async with harness.b.sandbox(memory="800MiB") as box:
            calls = [asyncio.create_task(harness.a.call(needy)) for _ in range(4)]
            await until(lambda: harness.scheduler.queue.waiting == 4)
            result = await box.exec("echo done", cpus=2)
            assert result.stdout == "done\n", "what waits for memory holds no cores"
            hasty = await harness.a.try_call(needy, deadline_s=0.1)
            assert hasty.kind == "timed_out", hasty
            assert harness.scheduler.queue.waiting == 4
        assert await asyncio.gather(*calls) == [4] * 4
        (sandboxes,) = (await harness.admin.request("GET", "/v1/view")).json["sandboxes"]
        assert sandboxes["function"] and sandboxes["actions"] == 4 and sandboxes["memory_mib"] == harness.held_mib

    play(tmp_path, test)


def test_a_call_that_no_memory_could_hold_is_refused(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        refused = await harness.a.try_call(needy)
        assert refused.kind == "refused" and "requests 384 MiB; the largest node has 300" in refused.reason, refused

    play(tmp_path, test, memory=300 * MIB)


def test_a_stream_of_calls_does_not_keep_a_sandbox_waiting(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        calls = 0
        opened = asyncio.Event()

        async def stream() -> None:
            nonlocal calls
            while not opened.is_set():
                assert await harness.a.call(naps, 0.02) == 0.02
                calls += 1

        async with asyncio.TaskGroup() as streams:
            for _ in range(6):
                streams.create_task(stream())
            await until(lambda: calls >= 12)
            async with harness.b.sandbox(memory="1000MiB"):
                opened.set()
                assert harness.held_mib == 1000
        assert calls > 12, "the others were made when the memory was free again"

    play(tmp_path, test)


def test_functions_take_turns_where_there_is_memory_for_one_instance(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        calls = [client.call(function) for client in (harness.a, harness.b) for function in (one, two)]
        assert await asyncio.gather(*calls) == [1, 2] * 2

    play(tmp_path, test, memory=(EACH_MIB + 1) * MIB)


# ---- how long ----


def test_an_instance_idles_no_longer_than_a_sandbox_may(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert await harness.a.call(one) == 1
        await harness.until_functions()
        assert harness.held_mib == 0

    play(tmp_path, test, limits=RunLimits(sandbox_idle_s=0.2))


def test_revoking_a_run_ends_its_instances_and_frees_their_memory(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert (await harness.a.call(one), await harness.a.call(two), await harness.b.call(one)) == (1, 2, 1)
        nap = asyncio.create_task(harness.a.try_call(naps, 1000.0))
        await harness.until_called(1)
        assert (await harness.admin.request("DELETE", "/v1/runs/alphaville")).status == 204
        assert harness.held_mib == EACH_MIB
        assert await harness.functions() == ["one"] == await harness.functions(harness.caller_b)
        with contextlib.suppress(tangram.TangramError):
            await nap

    play(tmp_path, test)


# ---- caps ----


@asynccontextmanager
async def most_sandboxes(harness: Harness) -> AsyncIterator[list[int]]:
    """How many there were at once."""
    counts = [0]

    async def look() -> None:
        while True:
            counts[0] = max(counts[0], len(harness.scheduler.sandboxes.by_id))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    try:
        yield counts
    finally:
        looking.cancel()


def test_calls_of_a_run_wait_for_one_another_where_its_cap_on_sandboxes_is_reached(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        async with most_sandboxes(harness) as most:
            calls = [harness.a.call(function) for function in (one, two, three) for _ in range(4)]
            assert await asyncio.gather(*calls) == [1] * 4 + [2] * 4 + [3] * 4
        assert most == [2]

    play(tmp_path, test, caps={"sandboxes_max": 2})


def test_an_idle_instance_ends_for_a_sandbox_of_its_run_that_its_cap_has_no_other_room_for(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert (await harness.a.call(one), await harness.a.call(two)) == (1, 2)
        async with harness.a.sandbox(memory="64MiB"):
            await harness.until_functions("two")
            assert await harness.a.call(one) == 1
            assert await harness.functions() == ["one"]
            async with harness.a.sandbox(memory="64MiB"):
                await harness.until_functions()
                refused = await harness.a.try_call(one)
                assert refused.kind == "refused" and "this run has 2 sandboxes" in refused.reason, refused
                assert await harness.b.call(one) == 1, "the cap is that of one run"
            assert await harness.a.call(one) == 1

    play(tmp_path, test, caps={"sandboxes_max": 2})


def test_a_call_under_way_counts_as_a_sandbox_of_its_run(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        nap = asyncio.create_task(harness.a.try_call(naps, 1000.0))
        await harness.until_called(1)
        async with harness.a.sandbox(memory="64MiB"):
            response = await harness.caller_a.submit("late", {"type": "Open", "spec": {}}, sandbox="late")
            assert (
                response.error["limit"] == "sandboxes_max" and "1 for calls of functions" in response.error["message"]
            ), response
            nap.cancel()
            await asyncio.wait({nap})
            await harness.caller_a.open("late", memory_bytes=64 * MIB)

    play(tmp_path, test, caps={"sandboxes_max": 2})


def test_a_cap_that_is_lowered_holds_for_instances_at_once(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert (await harness.a.call(one), await harness.a.call(two)) == (1, 2)
        changed = await harness.admin.request("PATCH", "/v1/runs/alphaville", {"caps": {"sandboxes_max": 1}})
        assert changed.status == 200
        await harness.until_functions("two")
        assert await harness.a.call(one) == 1
        assert await harness.functions() == ["one"]

    play(tmp_path, test)


# ---- seeing and removing them ----


def test_instances_are_listed_to_their_run_and_the_admin_with_their_details(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert [await harness.a.call(one) for _ in range(3)] == [1, 1, 1]
        for caller in (harness.admin, harness.caller_a):
            (box,) = (await caller.request("GET", "/v1/sandboxes")).json["sandboxes"]
            assert box["run"] == "alphaville" and box["spec"]["memory_bytes"] == EACH_MIB * MIB
            (sandboxes,) = (await caller.request("GET", "/v1/view")).json["sandboxes"]
            assert (sandboxes["name"], sandboxes["function"]) == (box["name"], box["function"])
            assert (sandboxes["active"], sandboxes["actions"], sandboxes["memory_mib"]) == (0, 3, EACH_MIB)
        view = msgspec.json.decode((await harness.admin.request("GET", "/v1/view")).content, type=View)
        console = Console(file=io.StringIO(), width=200, record=True)
        console.print(screen(view, harness.admin.address, console))
        assert "sandboxes: 1 open, 0 with a running action, 1 instance of functions" in console.export_text()
        assert await harness.functions(harness.caller_b) == []
        assert (await harness.caller_b.request("GET", "/v1/view")).json["sandboxes"] == []

    play(tmp_path, test)


def test_the_admin_can_end_an_instance_and_another_run_cannot(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        assert await harness.a.call(one) == 1
        (box,) = (await harness.admin.request("GET", "/v1/sandboxes")).json["sandboxes"]
        path = f"/v1/sandboxes/{box['name']}"
        assert (await harness.caller_b.request("DELETE", path)).status == 404
        assert await harness.functions() == ["one"]
        assert (await harness.admin.request("DELETE", path, run="alphaville")).status == 204
        assert harness.held_mib == 0 and await harness.functions() == []
        assert await harness.a.call(one) == 1

    play(tmp_path, test)


def test_a_call_whose_instance_is_ended_is_repeated_in_another(tmp_path: Path) -> None:
    async def test(harness: Harness) -> None:
        nap = asyncio.create_task(harness.a.try_call(naps, 1.0))
        await harness.until_called(1)
        (box,) = (await harness.admin.request("GET", "/v1/sandboxes")).json["sandboxes"]
        await harness.admin.request("DELETE", f"/v1/sandboxes/{box['name']}", run="alphaville")
        assert (await nap).check() == 1.0

    play(tmp_path, test)
