"""Weights are fetched while an engine writes: what a router makes of it, on scripted engines in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.rl.inference.conftest import Rig, a_request, at_gateway, fake, until, weights

from tangram.errors import ManagerError
from tangram.rl.inference.router_records import EngineLost, EngineUpdated


def test_an_engine_writes_while_it_fetches_and_stands_still_only_to_switch() -> None:
    async def test(rig: Rig) -> None:
        going = asyncio.create_task(rig.router.generate(a_request(tokens_max=100)))
        await asyncio.sleep(1.0)
        await rig.router.update(weights(2))
        got = await going
        # Ten tokens a second: one second before, four of fetching, and none while it switched.
        assert got.versions.count(1) == pytest.approx(50, abs=1)
        [updated] = rig.events_of(EngineUpdated)
        assert (updated.pull_s, updated.exposed_s, updated.took_s) == pytest.approx((4.5, 0.5, 4.5))

    at_gateway(test, fake("a", fetch_s=4.0, update_s=0.5))


def test_a_failed_fetch_keeps_the_old_weights_and_suspends_no_engine() -> None:
    async def test(rig: Rig) -> None:
        rig.engines["a"].refuse(fetches=1)
        with pytest.raises(ManagerError, match=r"no engine applied version 2.*no fetch"):
            await rig.router.update(weights(2))
        assert rig.engines["a"].version == 1
        assert rig.engines["a"].statistics().suspended_s == 0.0
        assert not rig.events_of(EngineUpdated) and not rig.events_of(EngineLost)
        await rig.router.update(weights(3))
        assert rig.engines["a"].version == 3

    at_gateway(test, fake("a", fetch_s=4.0))


def test_an_engine_that_cannot_fetch_accepted_weights_is_restarted_with_them() -> None:
    async def test(rig: Rig) -> None:
        rig.engines["a"].refuse(fetches=1)
        await rig.router.update(weights(2))
        await until(lambda: all(kept.version == 2 for kept in rig.router.statistics().engines))
        assert [lost.engine for lost in rig.events_of(EngineLost)] == ["a"]

    at_gateway(test, fake("a"), fake("b", fetch_s=3.0))


def test_versions_that_come_while_one_is_fetched_are_skipped_but_the_newest() -> None:
    async def test(rig: Rig) -> None:
        updates = []
        for version in (2, 3, 4):
            updates.append(asyncio.create_task(rig.router.update(weights(version))))
            await asyncio.sleep(1.0)
        await asyncio.gather(*updates)
        assert rig.engines["a"].fetched == [2, 4]
        assert [updated.version for updated in rig.events_of(EngineUpdated)] == [2, 4]

    at_gateway(test, fake("a", fetch_s=10.0))


def test_what_is_taken_back_while_it_is_fetched_is_never_written_with() -> None:
    async def test(rig: Rig) -> None:
        going = asyncio.create_task(rig.router.generate(a_request(tokens_max=300)))
        lost = asyncio.create_task(rig.router.update(weights(6)))
        await asyncio.sleep(1.0)
        await rig.router.update(weights(4), rollback=True)
        await lost
        assert set((await going).versions) == {5, 4}
        assert [updated.version for updated in rig.events_of(EngineUpdated)] == [4]

    at_gateway(test, fake("a", fetch_s=10.0), first_version=5)


def test_an_engine_that_joins_late_has_the_newest_weights_when_it_serves() -> None:
    async def test(rig: Rig) -> None:
        rig.engines["late"].die()
        going = asyncio.create_task(rig.router.generate(a_request()))  # a request detects its death
        other = asyncio.create_task(rig.router.generate(a_request()))
        await asyncio.sleep(5.0)
        await rig.router.update(weights(2))
        assert rig.engines["late"].fetched == []
        await until(lambda: all(kept.version == 2 for kept in rig.router.statistics().engines))
        assert rig.engines["late"].version == 2
        await asyncio.gather(going, other)

    at_gateway(test, fake("a"), fake("late", start_s=30.0))


def test_an_engine_that_dies_while_it_fetches_starts_with_these_weights() -> None:
    async def test(rig: Rig) -> None:
        update = asyncio.create_task(rig.router.update(weights(2)))
        await asyncio.sleep(1.0)
        rig.engines["a"].die("half-way")
        await update
        assert rig.engines["a"].version == 2
        assert "did not take its weights" in rig.events_of(EngineLost)[0].reason

    at_gateway(test, fake("a", fetch_s=10.0))


def test_an_engine_that_hangs_while_it_fetches_is_restarted_with_these_weights() -> None:
    async def test(rig: Rig) -> None:
        update = asyncio.create_task(rig.router.update(weights(2)))
        await asyncio.sleep(1.0)
        rig.engines["a"].hang()
        await update
        assert rig.engines["a"].version == 2
        assert "within 20 s" in rig.events_of(EngineLost)[0].reason

    at_gateway(test, fake("a", fetch_s=10.0), update_s_max=20.0)
