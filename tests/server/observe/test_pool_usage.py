"""GET /v1/pool-usage: a run reads its own use, the admin that of all or of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from tests.server.http_caller import Caller, make_run, tenants

from tangram.runtime.views import PoolUsageView, PoolUseReading


async def cpu_of(caller: Caller, **query: str) -> PoolUseReading:
    answer = await caller.request("GET", "/v1/pool-usage", **query)
    assert answer.status == 200
    view = msgspec.json.decode(answer.content, type=PoolUsageView)
    assert view.instance == (await caller.request("GET", "/v1/about")).json["instance"]
    return next(pool for pool in view.pools if pool.name.startswith("cpu@"))


def test_a_run_reads_its_own_use_and_the_admin_that_of_all_or_of_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, b):
            await a.open("box")
            await a.run("first", "sleep 0.05", sandbox="box", trajectory="t")
            await b.open("box")
            assert ((await cpu_of(a)).actions, (await cpu_of(b)).actions) == (2, 1)
            own = await cpu_of(a, run="alphaville")
            assert own.actions == 2
            assert 0.0 < own.held_unit_s <= own.reserved_unit_s + 1e-9
            assert sum(own.act_cells.values()) == 2
            assert (await cpu_of(admin)).actions == 3
            assert (await cpu_of(admin, run="bogota")).actions == 1
            assert (await cpu_of(b, run="alphaville")).actions == 1, "as elsewhere, its token decides"

    asyncio.run(main())


def test_the_use_of_a_revoked_run_is_hidden_from_its_successor_and_stays_in_the_sum(tmp_path: Path) -> None:
    async def main() -> None:
        async with tenants(tmp_path) as (_, admin, a, _b):
            await a.open("box")
            assert (await admin.request("DELETE", "/v1/runs/alphaville")).status == 204
            successor = await make_run(admin, "alphaville")
            assert (await cpu_of(successor)).actions == 0
            assert (await cpu_of(admin)).actions >= 1

    asyncio.run(main())
