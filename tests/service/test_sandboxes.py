"""Sandboxes of the shared service, from their opening to their end, whatever comes in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.service.asking import Caller, asked, until

from tangram.core.action import Action
from tangram.core.messages import Grant
from tangram.managers.base import Lease, Output
from tangram.managers.fake import FakeManager
from tangram.managers.work import Open, Work

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
    pools = (await caller.ask("GET", "/v1/view")).json["pools"]
    return sum(int(pool["held"]) for pool in pools if pool["kind"] == "memory")


@pytest.mark.parametrize("how", ["deleted", "closed"])
def test_a_sandbox_that_is_ended_while_it_is_opened_leaves_nothing_and_its_name_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def main() -> None:
        slow = SlowOpenings(monkeypatch)
        async with asked(tmp_path) as caller:
            opening = asyncio.create_task(caller.submit("o", OPEN, sandbox="box"))
            await until(lambda: slow.begun == 1)
            if how == "deleted":
                ending = asyncio.create_task(caller.ask("DELETE", "/v1/sandboxes/box"))
            else:
                ending = asyncio.create_task(caller.submit("c", {"type": "Close"}, sandbox="box"))
                await caller.until("c", "queued")
            done, _ = await asyncio.wait({ending}, timeout=0.05)
            assert not done, "it has ended before what it ends was there"
            slow.go_on.set()
            assert (await ending).status in (200, 204)
            assert (await opening).json["state"] == "settled"
            assert slow.manager._boxes == {} and await memory_held(caller) == 0
            assert (await caller.ask("GET", "/v1/sandboxes")).json == {"sandboxes": []}
            await caller.open("box")
            assert len(slow.manager._boxes) == 1

    asyncio.run(main())


def test_a_sandbox_that_is_deleted_before_its_opening_has_begun_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        slow = SlowOpenings(monkeypatch)
        slow.go_on.set()
        async with asked(tmp_path, cores=1.0) as caller:
            await caller.open()
            await caller.run("held", "sleep 1000", wait_s=0, demand={"pools": {"cpu": {"min": 1000, "max": 1000}}})
            await caller.until("held", "running")
            opening = asyncio.create_task(caller.submit("o", OPEN, sandbox="late"))
            await caller.until("o", "queued")
            assert (await caller.ask("DELETE", "/v1/sandboxes/late")).status == 204
            assert (await opening).json["settled"]["outcome"]["status"] == "cancelled"
            await caller.ask("POST", "/v1/actions/held/cancel")
            assert (await caller.run("after", "true")).json["state"] == "settled"
            assert slow.begun == 1 and len(slow.manager._boxes) == 1

    asyncio.run(main())
