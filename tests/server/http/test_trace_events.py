"""The timeline as a Chrome trace: the same actions as `/v1/timeline`, each run its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.chrome_trace import check, named
from tests.server.http_caller import Caller, tenants


async def ids_in_trace(caller: Caller) -> set[str]:
    events = (await caller.request("GET", "/v1/timeline/trace-events")).json["traceEvents"]
    check(events)
    assert set(named(events, "process_name").values()) <= {"alphaville", "bogota"}
    return {event["args"]["id"] for event in events if event["ph"] == "X" and "id" in event["args"]}


def test_a_run_gets_its_own_actions_and_the_admin_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, b):
            assert await ids_in_trace(admin) == set()
            for caller in (a, b):
                await caller.open("box")
                await caller.run("it", "true", trajectory="t")
            of_a, of_b = await ids_in_trace(a), await ids_in_trace(b)
            rows = (await a.request("GET", "/v1/timeline")).json["rows"]
            assert of_a == {row[1] for row in rows} and len(of_a) == 2
            assert len(of_b) == 2 and not of_a & of_b
            assert await ids_in_trace(admin) == of_a | of_b

    asyncio.run(main())
