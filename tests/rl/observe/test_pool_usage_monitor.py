"""Use of pools since the last query: of an embedded client, of real programs, and of a remote service."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tests.client.conftest import why_not
from tests.runtime.test_pool_usage import CPU_POOL, on_virtual_time
from tests.server.shared import serving, shared

from tangram.client.client import Client, connect
from tangram.client.remote_transport import RemoteTransport
from tangram.client.transport import LocalTransport
from tangram.config import DeviceConfig, ModelConfig
from tangram.core.messages import Effect, Event, cpu_node
from tangram.core.scheduler import Scheduler
from tangram.managers.quotas.manager import Quota
from tangram.rl.observe import pool_usage_monitor
from tangram.rl.observe.pool_usage_monitor import PoolUsageMonitor, use_between
from tangram.rl.runs.metrics_lines import PoolUse
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.views import PoolUsageView, PoolUseReading
from tangram.sim.baselines import Baseline, PodsConfig


def use_of(watch: PoolUsageMonitor, name: str = CPU_POOL) -> PoolUse:
    return {each.name: each for each in watch.since_last()}[name]


def orchestrator_of(client: Client) -> Orchestrator:
    assert isinstance(client.transport, LocalTransport)
    return client.transport.orchestrator


class LedgerIntegral:
    """Core seconds that the ledger of the scheduler has held since this was made."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        assert isinstance(orchestrator.decider, Scheduler)
        self._pools = orchestrator.decider.ledger.pools
        self._now = orchestrator.now
        self._sum, self._held, self._at_s = 0.0, 0.0, orchestrator.now()
        orchestrator.observe(self._observe)

    def _observe(self, now: float, event: Event, effects: list[Effect]) -> None:
        self._sum += self._held * (now - self._at_s)
        self._held, self._at_s = self._pools[CPU_POOL].held / 1000.0, now

    def held_unit_s(self) -> float:
        return self._sum + self._held * (self._now() - self._at_s)


def test_without_a_client_pool_usage_is_empty() -> None:
    assert PoolUsageMonitor(None).since_last() == ()


def test_waiting_shows_while_a_pool_is_short_and_afterwards() -> None:
    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)

        async def play(name: str) -> None:
            async with client.sandbox(trajectory=name) as box:
                await box.exec("sleep 4", cpus=1)

        playing = [asyncio.create_task(play(f"t{number}")) for number in range(3)]
        await asyncio.sleep(1.0)
        early = use_of(watch)
        assert early.waiting == 2
        await asyncio.gather(*playing)
        late = use_of(watch)
        assert late.waiting == 0
        assert late.waiting_mean_s > 0.0
        assert early.held_unit_s + late.held_unit_s == pytest.approx(12.0)

    on_virtual_time(test, cores=1.0)


@pytest.mark.parametrize("seed", range(4))
def test_many_answers_add_up_to_one_and_never_hold_more_than_is_reserved(seed: int) -> None:
    async def test(client: Client) -> None:
        often, once, ledger = (
            PoolUsageMonitor(client),
            PoolUsageMonitor(client),
            LedgerIntegral(orchestrator_of(client)),
        )
        random_ = random.Random(seed)

        async def play(name: str) -> None:
            await asyncio.sleep(random_.uniform(0.0, 5.0))
            async with client.sandbox(trajectory=name, memory="64MiB") as box:
                for _ in range(random_.randrange(1, 5)):
                    await box.exec(f"sleep {random_.uniform(0.1, 2.0)}", cpus=random_.choice([1, (1, 4), None]))
                    await asyncio.sleep(random_.uniform(0.0, 2.0))

        uses: list[PoolUse] = []
        playing = asyncio.gather(*(play(f"t{number}") for number in range(12)))
        while not playing.done():
            await asyncio.sleep(random_.uniform(0.05, 1.5))
            uses.append(use_of(often))
            assert sum(each.held_unit_s for each in uses) == pytest.approx(ledger.held_unit_s())
        await playing
        uses.append(use_of(often))
        whole = use_of(once)
        assert sum(each.actions for each in uses) == whole.actions
        for name in ("held_unit_s", "reserved_unit_s"):
            assert sum(getattr(each, name) for each in uses) == pytest.approx(getattr(whole, name)), name
        for mean in ("act_mean_s", "waiting_mean_s"):
            weighed = sum(getattr(each, mean) * each.actions for each in uses) / whole.actions
            assert weighed == pytest.approx(getattr(whole, mean)), mean
        assert all(each.held_unit_s <= each.reserved_unit_s for each in uses)
        assert whole.held_unit_s < whole.reserved_unit_s

    on_virtual_time(test)


def test_monitors_are_independent_and_a_closed_one_reports_nothing() -> None:
    async def test(client: Client) -> None:
        first = PoolUsageMonitor(client)
        async with client.sandbox():
            pass
        second = PoolUsageMonitor(client)
        async with client.sandbox():
            pass
        assert use_of(first).actions == 4
        assert use_of(second).actions == 2
        first.close()
        assert first.since_last() == ()
        assert use_of(second).actions == 0

    on_virtual_time(test)


def test_a_decider_of_ones_own_has_no_ledger_to_report() -> None:
    pools = cpu_node("node0", 2.0, 4.0)

    async def test(client: Client) -> None:
        assert PoolUsageMonitor(client).since_last() == ()

    on_virtual_time(test, decider=Baseline(pools, (), PodsConfig(request=1.0, limit=1.0)))


@pytest.mark.parametrize("backend", ["process", "sandbox"])
def test_real_programs_are_counted(tmp_path: Path, backend: str) -> None:
    if backend == "sandbox" and (reason := why_not()):
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)

    async def main() -> None:
        async with connect(backend=backend, state=tmp_path / "state", cores=1.0) as client:
            watch = PoolUsageMonitor(client)

            async def play(name: str) -> None:
                async with client.sandbox(trajectory=name, memory="128MiB") as box:
                    for _ in range(2):
                        assert (await box.exec("sleep 0.1", cpus=1)).exit_code == 0

            await client.gather(play("t1"), play("t2"), play("t3"))
            (uses,) = watch.since_last()
            assert uses.total == 1.0
            assert uses.actions == 12
            assert uses.held_unit_s >= 0.6
            assert uses.reserved_unit_s >= uses.held_unit_s
            assert uses.waiting_mean_s > 0.0
            assert uses.act_mean_s > uses.waiting_mean_s
            (later,) = watch.since_last()
            assert (later.actions, later.held_unit_s, later.reserved_unit_s) == (0, 0.0, 0.0)

    asyncio.run(main())


SIZE = 256 << 10


def test_a_remote_service_reports_cpu_quotas_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_usage_monitor, "POLL_S", 0.01)
    judge = ModelConfig(
        name="judge", engine="tests.managers.models.bytes_engine:BytesEngine", arguments={"seed": 1, "size": SIZE}
    )
    device = DeviceConfig(kind="emulated", memory_bytes=4 * SIZE, bandwidth=1e12)
    options: dict[str, Any] = dict(
        cores=2.0, quotas=[Quota(name="search", concurrent=5)], services=[judge], devices=[device]
    )

    async def main() -> None:
        async with shared(tmp_path, backend="fake", **options) as client, asyncio.timeout(60.0):
            async with client.sandbox(trajectory="before"):
                pass
            watch = PoolUsageMonitor(client)
            assert watch.since_last() == (), "its first reading is on its way"
            first: tuple[PoolUse, ...] = ()
            while not first:
                await asyncio.sleep(0.01)
                first = watch.since_last()
            names = {each.name.partition("@")[0]: each.name for each in first}
            assert set(names) == {"cpu", "gpu", "search"}
            assert {each.actions for each in first} == {0}, "what was before does not count"
            assert {names[kind]: total for kind, total in (("cpu", 2.0), ("gpu", 1.0), ("search", 5.0))} == {
                each.name: each.total for each in first
            }
            for name in ("t1", "t2"):
                async with client.sandbox(trajectory=name) as box:
                    for _ in range(2):
                        await box.exec("sleep 0.05", cpus=1)
                async with client.quota("search", trajectory=name):
                    await asyncio.sleep(0.05)
                await client.infer("judge", "x")
            expected = {names["cpu"]: 8, names["search"]: 2, names["gpu"]: 2}
            uses: list[PoolUse] = []
            actions: dict[str, int] = {}
            while actions != expected:
                await asyncio.sleep(0.01)
                uses += watch.since_last()
                actions = {name: sum(each.actions for each in uses if each.name == name) for name in expected}
            for name, least in ((names["cpu"], 0.2), (names["search"], 0.1), (names["gpu"], 0.0)):
                held = sum(each.held_unit_s for each in uses if each.name == name)
                assert least <= held <= sum(each.reserved_unit_s for each in uses if each.name == name)
            watch.close()
            assert watch.since_last() == ()

    asyncio.run(main())


def reading(**changes: Any) -> PoolUseReading:
    fields: dict[str, Any] = dict(
        name="cpu", total=2.0, actions=0, act_s=0.0, act_cells={}, waiting_s=0.0, held_unit_s=0.0,
        reserved_unit_s=0.0, waiting=0,
    )  # fmt: skip
    return PoolUseReading(**fields | changes)


class Recorded:
    """A client whose transport returns these readings."""

    def __init__(self, *views: PoolUsageView) -> None:
        self._views = list(views)

    @property
    def transport(self) -> Recorded:
        return self

    def pool_usage(self) -> asyncio.Future[PoolUsageView]:
        reading: asyncio.Future[PoolUsageView] = asyncio.get_running_loop().create_future()
        reading.set_result(self._views.pop(0))
        return reading


def reports(*views: PoolUsageView) -> list[tuple[PoolUse, ...]]:
    """A report for each reading after the first."""

    async def main() -> list[tuple[PoolUse, ...]]:
        watch = PoolUsageMonitor(Recorded(*views))  # type: ignore[arg-type]
        return [watch.since_last() for _ in views[1:]]

    return asyncio.run(main())


def test_the_counts_of_a_restarted_service_begin_at_zero() -> None:
    made = reports(
        PoolUsageView(instance="one", pools=(reading(actions=5, held_unit_s=5.0, act_cells={3: 5}),)),
        PoolUsageView(instance="one", pools=(reading(actions=6, held_unit_s=6.0, act_cells={3: 5, 4: 1}),)),
        PoolUsageView(instance="two", pools=(reading(actions=9, held_unit_s=2.0, act_cells={3: 9}),)),
    )
    uses = [(use.actions, use.held_unit_s, use.act_cells) for (use,) in made]
    assert uses == [(1, 1.0, {4: 1}), (9, 2.0, {3: 9})]


def test_a_private_pool_appears_in_the_reports_in_which_it_was_used() -> None:
    def view(*pools: PoolUseReading) -> PoolUsageView:
        return PoolUsageView(instance="one", pools=(reading(), *pools))

    used = reading(name="function/f", private=True, held_unit_s=1.0)
    waiting = reading(name="function/f", private=True, held_unit_s=1.0, waiting=1)
    made = reports(view(), view(used), view(used), view(waiting))
    assert [len(uses) for uses in made] == [2, 1, 2]


def test_a_run_that_was_dropped_in_between_is_not_subtracted() -> None:
    before = reading(actions=5, held_unit_s=9.0, act_cells={3: 5})
    use = use_between(before, reading(actions=2, held_unit_s=3.0, act_cells={3: 2}))
    assert (use.actions, use.held_unit_s) == (2, 3.0)


def test_a_service_that_stopped_answering_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_usage_monitor, "POLL_S", 0.01)

    async def main() -> None:
        async with serving(tmp_path, backend="fake") as up:
            client = connect(up.address, reconnect_s=0.5)
            async with client:
                watch = PoolUsageMonitor(client)
                assert isinstance(client.transport, RemoteTransport)
                wire = client.transport.connection
                address, count = wire.url, 0
                wire.url = "http://127.0.0.1:9"
                for _ in range(3):
                    assert watch.since_last() == ()
                    await asyncio.sleep(0.01)
                wire.url = address
                async with asyncio.timeout(60.0):
                    while not count:  # it has looked again, and sees what is done from then on
                        await asyncio.sleep(0.01)
                        count = len(watch.since_last())
                    async with client.sandbox():
                        pass
                    while count < 3:
                        await asyncio.sleep(0.01)
                        count += sum(each.actions for each in watch.since_last())

    asyncio.run(main())
