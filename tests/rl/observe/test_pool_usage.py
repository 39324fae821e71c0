"""Use of pools since the last query: exact on virtual time, and of real programs."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.client.conftest import why_not
from tests.server.shared import serving, shared

from tangram.client.client import Client, connect
from tangram.client.remote_transport import RemoteTransport
from tangram.client.transport import LocalTransport
from tangram.clock import VirtualLoop
from tangram.core.action import Action, Outcome, Status
from tangram.core.demand import GPU, Demand, fixed
from tangram.core.messages import Decider, Effect, Event, Finished, Grant, Pool, Settle, Share, Start, Submit, cpu_node
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.fake import FakeManager
from tangram.managers.quotas.manager import Quota, QuotaManager, Rate
from tangram.managers.work import HoldGrant
from tangram.rl.observe.pool_usage import LocalPoolUsage, PoolUsageMonitor
from tangram.rl.runs.metrics_lines import PoolUse
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import Orchestrator
from tangram.sim.baselines import Baseline, PodsConfig

CPU_POOL = "cpu@node0"


def on_virtual_time(
    test: Callable[[Client], Awaitable[None]], *quotas: Quota, cores: float = 2.0, decider: Decider | None = None
) -> None:
    """A client with a fake manager, on which sleeps take exactly as long as they say."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        manager = FakeManager(node="node0", cores=cores)
        sink = EventSink()
        held = QuotaManager(quotas, sink.send)
        scheduler = decider or Scheduler(policy("adaptive"), (*manager.pools(), *held.pools()))
        orchestrator = Orchestrator(scheduler, {"node0": manager}, {HoldGrant: held}, clock=loop.clock, sink=sink)
        async with Client(LocalTransport(orchestrator, held)) as client:
            await test(client)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


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


def test_known_sleeps_give_their_counts_and_unit_seconds() -> None:
    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)
        async with client.sandbox(trajectory="t1") as box:
            for _ in range(3):
                await box.exec("sleep 2", cpus=1)
                await asyncio.sleep(10.0)
        use = use_of(watch)
        assert use.actions == 5, "made, three sleeps, closed"
        assert use.total == 2.0
        assert use.act_mean_s == pytest.approx(6.0 / 5)
        assert use.act_p99_s == pytest.approx(2.0, rel=0.15)
        assert use.waiting_mean_s == 0.0
        assert use.held_unit_s == pytest.approx(6.0)
        assert use.reserved_unit_s == pytest.approx(36.0), "one core from making to closing"
        assert use.waiting == 0

    on_virtual_time(test)


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


def test_a_trajectory_reserves_its_peak_from_its_beginning() -> None:
    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)
        async with client.sandbox(trajectory="t1") as box:
            await box.exec("sleep 1", cpus=1)
            first = use_of(watch)
            assert first.reserved_unit_s == pytest.approx(1.0)
            await asyncio.sleep(5.0)
            assert use_of(watch).reserved_unit_s == 0.0, "its continuation is not known yet"
            await asyncio.gather(*(box.exec("sleep 1", cpus=1) for _ in range(2)))
        rest = use_of(watch)
        assert first.reserved_unit_s + rest.reserved_unit_s == pytest.approx(2 * 7.0)
        assert first.held_unit_s + rest.held_unit_s == pytest.approx(3.0)

    on_virtual_time(test)


def test_what_is_under_way_counts_up_to_now() -> None:
    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)
        async with client.sandbox() as box:
            doing = asyncio.create_task(box.exec("sleep 10", cpus=2))
            await asyncio.sleep(4.0)
            early = use_of(watch)
            assert early.actions == 1, "it was made"
            assert early.held_unit_s == pytest.approx(8.0)
            assert early.reserved_unit_s == pytest.approx(8.0)
            await doing
        late = use_of(watch)
        assert late.held_unit_s == pytest.approx(12.0)
        assert late.reserved_unit_s == pytest.approx(12.0)

    on_virtual_time(test)


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


def test_the_pools_of_a_quota_are_reported_as_one_in_concurrent_requests() -> None:
    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)
        for _ in range(2):
            async with client.quota("search", trajectory="t1"):
                await asyncio.sleep(3.0)
            await asyncio.sleep(2.0)
        use = use_of(watch, "search")
        assert (use.total, use.actions) == (5.0, 2)
        assert use.held_unit_s == pytest.approx(6.0)
        assert use.reserved_unit_s == pytest.approx(8.0)
        assert {each.name for each in watch.since_last()} == {CPU_POOL, "search", "slow"}

    on_virtual_time(
        test,
        Quota(name="search", concurrent=5, requests=Rate(60, 60.0)),
        Quota(name="slow", requests=Rate(1, 60.0)),
    )


def test_a_rate_alone_counts_requests_under_way() -> None:
    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)
        async with client.quota("slow"):
            await asyncio.sleep(3.0)
        waiting = asyncio.create_task(_use_quota(client, "slow"))
        await asyncio.sleep(1.0)
        use = use_of(watch, "slow")
        assert (use.total, use.actions, use.waiting) == (1.0, 1, 1)
        assert use.held_unit_s == pytest.approx(3.0)
        await waiting
        assert use_of(watch, "slow").waiting_mean_s > 10.0

    on_virtual_time(test, Quota(name="slow", requests=Rate(1, 60.0)))


async def _use_quota(client: Client, name: str) -> None:
    async with client.quota(name):
        await asyncio.sleep(1.0)


def test_calls_that_share_a_batch_hold_its_devices_once() -> None:
    async def test(client: Client) -> None:
        usage = LocalPoolUsage(orchestrator_of(client))
        actions = [
            Action(id=f"a{number}", demand=Demand({GPU: fixed(2)}), trajectory=f"t{number}") for number in range(3)
        ]
        share = (Share("gpu@node0", 2, 2, (0, 1)),)
        start = orchestrator_of(client).now()
        for each in actions:
            usage.observer.observe(start, Submit(action=each), [])
        grants = [Start(action=each, grant=Grant(each.id, "node0", share, 2, 1, "a0")) for each in actions]
        usage.observer.observe(start, Submit(action=Action(id="b", demand=Demand({GPU: fixed(2)}))), list(grants))
        for seconds, each in zip((1.0, 2.0, 4.0), actions, strict=True):
            outcome = Outcome(action=each.id, status=Status.SUCCEEDED, execution_s=seconds, attempts=1)
            usage.observer.observe(start + seconds, Finished(action=each.id), [Settle(outcome=outcome)])
        (uses,) = (each for each in usage.since_last() if each.name == "gpu@node0")
        assert uses.actions == 3
        assert uses.held_unit_s == pytest.approx(8.0), "the last one out frees them"
        assert uses.reserved_unit_s == pytest.approx(14.0), "each trajectory would have had its own"

    on_virtual_time(test)


def test_other_observers_go_on_and_a_closed_watch_sees_nothing() -> None:
    async def test(client: Client) -> None:
        values: list[float] = []
        first = PoolUsageMonitor(client)
        orchestrator_of(client).observe(lambda now, event, effects: values.append(now))
        second = PoolUsageMonitor(client)
        async with client.sandbox():
            pass
        count = len(values)
        assert count
        first.close()
        async with client.sandbox():
            pass
        assert len(values) == 2 * count
        assert first.since_last() == ()
        assert use_of(second).actions == 4
        second.close()

    on_virtual_time(test)


def test_a_baseline_is_watched_as_well() -> None:
    pools: tuple[Pool, ...] = cpu_node("node0", 2.0, 4.0)

    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)
        async with client.sandbox(trajectory="t1") as box:
            await box.exec("sleep 2", cpus=1)
        use = use_of(watch)
        assert (use.total, use.actions) == (2.0, 3)
        assert use.held_unit_s <= use.reserved_unit_s

    on_virtual_time(test, decider=Baseline(pools, (), PodsConfig(request=1.0, limit=1.0)))


def test_an_idle_trajectory_is_evicted_after_a_time_or_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later under its name is another one, so the time between the two is not reserved."""
    monkeypatch.setattr("tangram.rl.observe.pool_usage.TRAJECTORIES_MAX", 10)

    async def test(client: Client) -> None:
        watch = PoolUsageMonitor(client)

        async def reserved(*numbers: int) -> float:
            for number in numbers:
                async with client.quota("search", trajectory=f"t{number}"):
                    await asyncio.sleep(1.0)
            use = use_of(watch, "search")
            assert (use.actions, use.waiting) == (len(numbers), 0)
            return use.reserved_unit_s

        assert await reserved(*range(50)) == pytest.approx(50.0)
        assert await reserved(40) == pytest.approx(10.0), "one of the last ten: the gap counts"
        assert await reserved(40, 39) == pytest.approx(2.0), "older ones were forgotten"
        await asyncio.sleep(7200.0)
        assert use_of(watch, "search").actions == 0
        assert await reserved(49) == pytest.approx(1.0)

    on_virtual_time(test, Quota(name="search", concurrent=5))


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


def test_an_external_service_reports_its_cpu(tmp_path: Path) -> None:
    async def main() -> None:
        async with shared(tmp_path, backend="fake", cores=2.0) as client, asyncio.timeout(60.0):
            async with client.sandbox(trajectory="before"):
                pass
            watch = PoolUsageMonitor(client)
            uses: list[PoolUse] = []
            while not uses:  # until it has looked for the first time
                await asyncio.sleep(0.01)
                uses += watch.since_last()
            assert [(each.actions, each.total) for each in uses] == [(0, 2.0)], "what was before does not count"
            for name in ("t1", "t2"):
                async with client.sandbox(trajectory=name) as box:
                    for _ in range(2):
                        await box.exec("sleep 0.05", cpus=1)
            while sum(each.actions for each in uses) < 8:
                await asyncio.sleep(0.01)
                uses += watch.since_last()
            assert sum(each.actions for each in uses) == 8
            held, reserved = sum(each.held_unit_s for each in uses), sum(each.reserved_unit_s for each in uses)
            assert 0.2 <= held <= reserved
            watch.close()
            assert watch.since_last() == ()

    asyncio.run(main())


def test_a_service_that_stopped_answering_breaks_nothing(tmp_path: Path) -> None:
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
