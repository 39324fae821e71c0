"""Sandboxes of the shared service, from their opening to their end, whatever comes in between."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.server.http_caller import DEADLINE_S, Caller, local_service, open_caller, until
from tests.server.shared import serving

from tangram.clock import SimClock
from tangram.core.action import Action
from tangram.core.messages import Grant
from tangram.errors import ManagerError
from tangram.managers.base import Lease
from tangram.managers.fake import FakeManager
from tangram.managers.work import Open, Work
from tangram.processes.streams import Output
from tangram.server import serve

OPEN = {"type": "Open", "spec": {"memory_bytes": 1 << 30}}


class SlowOpenings:
    """Openings of the fake manager, each of which waits to be let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()
        start = FakeManager.start

        async def slowly(
            manager: FakeManager, action: Action, grant: Grant, work: Work, output: Output | None = None
        ) -> Lease:
            if isinstance(work, Open):
                self.begun += 1
                await self.go_on.wait()
            self.manager = manager
            return await start(manager, action, grant, work, output)

        monkeypatch.setattr(FakeManager, "start", slowly)


async def memory_held(caller: Caller) -> int:
    pools = (await caller.request("GET", "/v1/view")).json["pools"]
    return sum(int(pool["held"]) for pool in pools if pool["kind"] == "memory")


@pytest.mark.parametrize("how", ["deleted", "closed"])
def test_a_sandbox_that_is_ended_while_it_is_opened_leaves_nothing_and_its_name_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def main() -> None:
        slow = SlowOpenings(monkeypatch)
        async with local_service(tmp_path) as caller:
            opening = asyncio.create_task(caller.submit("o", OPEN, sandbox="box"))
            await until(lambda: slow.begun == 1)
            if how == "deleted":
                ending = asyncio.create_task(caller.request("DELETE", "/v1/sandboxes/box"))
            else:
                ending = asyncio.create_task(caller.submit("c", {"type": "Close"}, sandbox="box"))
                await caller.until("c", "queued")
            done, _ = await asyncio.wait({ending}, timeout=0.05)
            assert not done, "it has ended before what it ends was there"
            slow.go_on.set()
            assert (await ending).status in (200, 204)
            assert (await opening).json["state"] == "settled"
            assert slow.manager.sandboxes() == () and await memory_held(caller) == 0
            assert (await caller.request("GET", "/v1/sandboxes")).json == {"sandboxes": []}
            await caller.open("box")
            assert len(slow.manager.sandboxes()) == 1

    asyncio.run(main())


def test_a_sandbox_that_is_deleted_before_its_opening_has_begun_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        slow = SlowOpenings(monkeypatch)
        slow.go_on.set()
        async with local_service(tmp_path, cores=1.0) as caller:
            await caller.open()
            await caller.run("held", "sleep 1000", wait_s=0, demand={"pools": {"cpu": {"min": 1000, "max": 1000}}})
            await caller.until("held", "running")
            opening = asyncio.create_task(caller.submit("o", OPEN, sandbox="late"))
            await caller.until("o", "queued")
            assert (await caller.request("DELETE", "/v1/sandboxes/late")).status == 204
            assert (await opening).json["settled"]["outcome"]["status"] == "cancelled"
            await caller.request("POST", "/v1/actions/held/cancel")
            assert (await caller.run("after", "true")).json["state"] == "settled"
            assert slow.begun == 1 and len(slow.manager.sandboxes()) == 1

    asyncio.run(main())


# ---- work on files ------------------------------------------------------------------------------------------------


class SlowWrites:
    """Files are written when they are let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.failure: Exception | None = None
        write = FakeManager.write

        async def slowly(manager: FakeManager, sandbox: str, path: str, content: bytes, *, mode: int) -> None:
            self.begun.set()
            self.manager = manager
            await self.go_on.wait()
            if self.failure is not None:
                raise self.failure
            await write(manager, sandbox, path, content, mode=mode)

        monkeypatch.setattr(FakeManager, "write", slowly)


def has_left(manager: FakeManager) -> bool:
    return any(call.method == "exit" for call in manager.calls)


LATE = (
    ("GET", "/v1/sandboxes/box/list?path=."),
    ("GET", "/v1/sandboxes/box/files?path=x"),
    ("PUT", "/v1/sandboxes/box/files?path=x"),
    ("DELETE", "/v1/sandboxes/box/files?path=x"),
    ("GET", "/v1/sandboxes/box/tree?path=."),
    ("PUT", "/v1/sandboxes/box/tree?path=."),
    ("DELETE", "/v1/sandboxes/box"),
    ("POST", "/v1/images"),
    ("DELETE", "/v1/images/mine"),
    ("GET", "/v1/image-keys/key"),
    ("DELETE", "/v1/runs/math"),
)


def test_a_service_that_goes_down_waits_for_work_on_files_and_has_all_else_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        slow = SlowWrites(monkeypatch)
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as service:
            up = await service.enter_async_context(serving(tmp_path))
            async with open_caller(up.address) as caller:
                assert (await caller.request("POST", "/v1/runs/math", {})).status == 201
                await caller.open()
                writing = asyncio.create_task(caller.request("PUT", "/v1/sandboxes/box/files", body=b"x", path="x"))
                await slow.begun.wait()
                leaving = asyncio.create_task(service.aclose())
                await until(lambda: up.action_service.drain_gate.is_closed)
                for method, path in LATE:
                    late = await caller.request(method, path, body=b"x" if method in ("PUT", "POST") else None)
                    assert (late.status, late.code) == (503, "draining") and late.error["retry"], (method, path, late)
                assert not has_left(slow.manager)
                slow.go_on.set()
                assert (await writing).status == 204
                await leaving
        assert has_left(slow.manager)

    asyncio.run(main())


def test_work_on_files_that_outlasts_the_service_is_to_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "DRAIN_GATE_TIMEOUT_S", 0.05)

    async def main() -> None:
        slow = SlowWrites(monkeypatch)
        slow.failure = ManagerError("the spawner cannot be reached: Broken pipe")
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as service:
            up = await service.enter_async_context(serving(tmp_path))
            async with open_caller(up.address) as caller:
                await caller.open()
                writing = asyncio.create_task(caller.request("PUT", "/v1/sandboxes/box/files", body=b"x", path="x"))
                await slow.begun.wait()
                leaving = asyncio.create_task(service.aclose())
                await until(lambda: has_left(slow.manager))
                slow.go_on.set()
                assert (await writing).code == "draining"
                await leaving

    asyncio.run(main())


def test_a_sandbox_is_in_use_during_file_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        slow, clock = SlowWrites(monkeypatch), SimClock()
        async with serving(tmp_path, clock=clock) as up, open_caller(up.address) as caller:
            await caller.open()
            writing = asyncio.create_task(caller.request("PUT", "/v1/sandboxes/box/files", body=b"x", path="x"))
            await slow.begun.wait()
            clock.set(2 * up.action_service.limits.sandbox_idle_s)
            await up.action_service.sweep()
            slow.go_on.set()
            assert (await writing).status == 204
            clock.set(4 * up.action_service.limits.sandbox_idle_s)
            await up.action_service.sweep()
            assert (await caller.request("GET", "/v1/sandboxes")).json == {"sandboxes": []}

    asyncio.run(main())


def test_messages_of_a_manager_name_a_sandbox_as_its_caller_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        slow = SlowWrites(monkeypatch)
        slow.failure = ManagerError("sandbox admin/box is gone: its first process ended with 9", retry=False)
        slow.go_on.set()
        async with local_service(tmp_path) as caller:
            await caller.open()
            failed = await caller.request("PUT", "/v1/sandboxes/box/files", body=b"x", path="x")
            assert failed.error["message"] == "sandbox box is gone: its first process ended with 9"

    asyncio.run(main())
