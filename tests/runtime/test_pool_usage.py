"""The use of pools by runs and trajectories, exact on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from tangram.client.client import Client
from tangram.client.transport import LocalTransport
from tangram.clock import VirtualLoop
from tangram.core.action import Action, Outcome, Status
from tangram.core.demand import CPU, GPU, Demand, cores, fixed
from tangram.core.messages import (
    Decider,
    Finished,
    Grant,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Settle,
    Share,
    Start,
    Started,
    Submit,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.fake import FakeManager
from tangram.managers.quotas.manager import Quota, QuotaManager, Rate
from tangram.managers.work import HoldGrant
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import Orchestrator
from tangram.runtime.pool_usage import PoolUsageObserver
from tangram.runtime.views import PoolUseReading

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


def readings(client: Client) -> dict[str, PoolUseReading]:
    return {pool.name: pool for pool in client.transport.pool_usage().result().pools}


def mean_act_s(use: PoolUseReading) -> float:
    return use.act_s / use.actions


def test_known_sleeps_give_their_counts_and_unit_seconds() -> None:
    async def test(client: Client) -> None:
        assert readings(client)[CPU_POOL].actions == 0, "counts from the first reading on"
        async with client.sandbox(trajectory="t1") as box:
            for _ in range(3):
                await box.exec("sleep 2", cpus=1)
                await asyncio.sleep(10.0)
        use = readings(client)[CPU_POOL]
        assert use.actions == 5, "made, three sleeps, closed"
        assert use.total == 2.0
        assert mean_act_s(use) == pytest.approx(6.0 / 5)
        assert sum(use.act_cells.values()) == 5
        assert use.waiting_s == 0.0
        assert use.held_unit_s == pytest.approx(6.0)
        assert use.reserved_unit_s == pytest.approx(36.0), "one core from making to closing"
        assert use.waiting == 0

    on_virtual_time(test)


def test_a_trajectory_reserves_its_peak_from_its_beginning() -> None:
    async def test(client: Client) -> None:
        readings(client)
        async with client.sandbox(trajectory="t1") as box:
            await box.exec("sleep 1", cpus=1)
            assert readings(client)[CPU_POOL].reserved_unit_s == pytest.approx(1.0)
            await asyncio.sleep(5.0)
            first = readings(client)[CPU_POOL]
            assert first.reserved_unit_s == pytest.approx(1.0), "its continuation is not known yet"
            await asyncio.gather(*(box.exec("sleep 1", cpus=1) for _ in range(2)))
        use = readings(client)[CPU_POOL]
        assert use.reserved_unit_s == pytest.approx(2 * 7.0)
        assert use.held_unit_s == pytest.approx(3.0)

    on_virtual_time(test)


def test_what_is_under_way_counts_up_to_now() -> None:
    async def test(client: Client) -> None:
        readings(client)
        async with client.sandbox() as box:
            doing = asyncio.create_task(box.exec("sleep 10", cpus=2))
            await asyncio.sleep(4.0)
            use = readings(client)[CPU_POOL]
            assert use.actions == 1, "it was made"
            assert use.held_unit_s == pytest.approx(8.0)
            assert use.reserved_unit_s == pytest.approx(8.0)
            await doing
        use = readings(client)[CPU_POOL]
        assert use.held_unit_s == pytest.approx(20.0)
        assert use.reserved_unit_s == pytest.approx(20.0)

    on_virtual_time(test)


def test_the_pools_of_a_quota_are_read_as_one_in_concurrent_requests() -> None:
    async def test(client: Client) -> None:
        readings(client)
        for _ in range(2):
            async with client.quota("search", trajectory="t1"):
                await asyncio.sleep(3.0)
            await asyncio.sleep(2.0)
        use = readings(client)["search"]
        assert (use.total, use.actions) == (5.0, 2)
        assert use.held_unit_s == pytest.approx(6.0)
        assert use.reserved_unit_s == pytest.approx(8.0)
        assert set(readings(client)) == {CPU_POOL, "search", "slow"}

    on_virtual_time(
        test,
        Quota(name="search", concurrent=5, requests=Rate(60, 60.0)),
        Quota(name="slow", requests=Rate(1, 60.0)),
    )


def test_a_rate_alone_counts_requests_under_way() -> None:
    async def use_quota(client: Client, name: str) -> None:
        async with client.quota(name):
            await asyncio.sleep(1.0)

    async def test(client: Client) -> None:
        readings(client)
        async with client.quota("slow"):
            await asyncio.sleep(3.0)
        waiting = asyncio.create_task(use_quota(client, "slow"))
        await asyncio.sleep(1.0)
        use = readings(client)["slow"]
        assert (use.total, use.actions, use.waiting) == (1.0, 1, 1)
        assert use.held_unit_s == pytest.approx(3.0)
        await waiting
        assert readings(client)["slow"].waiting_s > 10.0

    on_virtual_time(test, Quota(name="slow", requests=Rate(1, 60.0)))


def test_an_idle_trajectory_is_evicted_after_a_time_or_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes later under its name is another one, so the time between the two is not reserved."""
    monkeypatch.setattr("tangram.runtime.pool_usage.TRAJECTORIES_MAX", 10)

    async def test(client: Client) -> None:
        last = readings(client)["search"]

        async def reserved(*numbers: int) -> float:
            nonlocal last
            for number in numbers:
                async with client.quota("search", trajectory=f"t{number}"):
                    await asyncio.sleep(1.0)
            before, last = last, readings(client)["search"]
            assert (last.actions - before.actions, last.waiting) == (len(numbers), 0)
            return last.reserved_unit_s - before.reserved_unit_s

        assert await reserved(*range(50)) == pytest.approx(50.0)
        assert await reserved(40) == pytest.approx(10.0), "one of the last ten: the gap counts"
        assert await reserved(40, 39) == pytest.approx(2.0), "older ones were forgotten"
        await asyncio.sleep(7200.0)
        assert await reserved(49) == pytest.approx(1.0)

    on_virtual_time(test, Quota(name="search", concurrent=5))


# ---- by hand --------------------------------------------------------------------------------------------------------


class World:
    """A scheduler that is driven by hand, with its usage."""

    def __init__(self, *pools: Pool) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(policy("fcfs"), pools)
        self.usage = PoolUsageObserver(self.scheduler, lambda: self.now)

    def send(self, event) -> None:  # type: ignore[no-untyped-def]
        effects = self.scheduler.handle(event, self.now)
        self.scheduler.check()
        self.usage.observe(self.now, event, effects)

    def submit(self, id: str, run: str, units: int = 1, trajectory: str = "") -> None:
        self.send(Submit(action=Action(id=id, demand=Demand({CPU: cores(units)}), run=run, trajectory=trajectory)))

    def finish(self, id: str) -> None:
        self.send(Started(action=id))
        self.send(Finished(action=id))

    def use(self, run: str | None, name: str = "cpu@n0") -> PoolUseReading:
        return {pool.name: pool for pool in self.usage.reading(run)}[name]


def test_calls_that_share_a_batch_hold_its_devices_once() -> None:
    world = World(Pool(kind=GPU, node="node0", total=2))
    observe = world.usage.observe
    actions = [
        Action(id=f"a{number}", demand=Demand({GPU: fixed(2)}), run=f"r{number}", trajectory=f"t{number}")
        for number in range(3)
    ]
    share = (Share("gpu@node0", 2, 2, (0, 1)),)
    for each in actions:
        observe(0.0, Submit(action=each), [])
    grants = [Start(action=each, grant=Grant(each.id, "node0", share, 2, 1, "a0")) for each in actions]
    observe(0.0, Submit(action=Action(id="b", demand=Demand({GPU: fixed(2)}))), list(grants))
    for seconds, each in zip((1.0, 2.0, 4.0), actions, strict=True):
        outcome = Outcome(action=each.id, status=Status.SUCCEEDED, execution_s=seconds, attempts=1)
        observe(seconds, Finished(action=each.id), [Settle(outcome=outcome)])
    use = world.use(None, "gpu@node0")
    assert use.actions == 3
    assert use.held_unit_s == pytest.approx(8.0), "the last one out frees them"
    assert use.reserved_unit_s == pytest.approx(14.0), "each trajectory would have had its own"
    assert [world.use(run, "gpu@node0").held_unit_s for run in ("r0", "r1", "r2")] == [8.0, 0.0, 0.0], "r0 took them"


def test_each_run_has_its_own_use_and_all_runs_their_sum() -> None:
    world = World(*cpu_node("n0", 2.0))
    world.submit("a", "r1")
    world.submit("b", "r2")
    world.submit("c", "r2", units=2)
    world.now = 3.0
    assert [world.use(run).held_unit_s for run in ("r1", "r2", None)] == [3.0, 3.0, 6.0]
    assert [world.use(run).waiting for run in ("r1", "r2", None)] == [0, 1, 1]
    assert world.use("unknown").held_unit_s == 0.0
    world.finish("a")
    world.now = 5.0
    assert [(world.use(run).actions, world.use(run).held_unit_s) for run in ("r1", "r2", None)] == [
        (1, 3.0),
        (0, 5.0),
        (1, 8.0),
    ]


def test_a_run_that_has_ended_leaves_its_use_to_the_sum_and_no_trace_to_its_successor() -> None:
    world = World(*cpu_node("n0", 2.0))
    for _ in range(2):
        world.submit("a", "r1", trajectory="t")
        world.now += 2.0
        world.finish("a")
        assert (world.use("r1").actions, world.use("r1").reserved_unit_s) == (1, 2.0)
        world.usage.drop_run("r1")
        assert world.use("r1").actions == 0
        world.now += 10.0
    assert (world.use(None).actions, world.use(None).held_unit_s) == (2, 4.0)


def test_private_pools_appear_once_they_are_used_and_only_to_their_run() -> None:
    private = Pool(kind="running/r1", total=1, private=True)
    world = World(*cpu_node("n0", 2.0), private)
    assert [pool.name for pool in world.usage.reading()] == ["cpu@n0"]
    world.send(Submit(action=Action(id="a", demand=Demand({CPU: cores(1), "running/r1": fixed(1)}), run="r1")))
    world.now = 1.0
    assert {pool.name for pool in world.usage.reading("r1") if pool.private} == {"running/r1"}
    assert {pool.name for pool in world.usage.reading("r2")} == {"cpu@n0"}


def test_closed_private_pools_are_forgotten() -> None:
    world = World(*cpu_node("n0", 2.0))
    for number in range(50):
        kind = f"function/{number}"
        world.send(PoolChanged(pool=Pool(kind=kind, total=1, private=True)))
        world.send(Submit(action=Action(id=f"a{number}", demand=Demand({kind: fixed(1)}), run="r1", trajectory="t")))
        world.now += 1.0
        world.finish(f"a{number}")
        assert world.use("r1", kind).actions == 1
        world.send(PoolChanged(pool=Pool(kind=kind, total=0, private=True)))
        for run in ("r1", None):
            assert [pool.name for pool in world.usage.reading(run)] == ["cpu@n0"]


def test_what_a_lost_node_held_is_returned() -> None:
    world = World(*cpu_node("n0", 2.0), *cpu_node("n1", 2.0))
    demand = Demand({CPU: cores(2)})
    world.send(Submit(action=Action(id="a", demand=demand, run="r1", idempotent=True)))
    world.now = 1.0
    (node,) = (name for name in ("n0", "n1") if world.use("r1", f"cpu@{name}").held_unit_s)
    world.send(NodeChanged(node=node, state=NodeState.DOWN))
    world.now = 5.0
    assert world.use("r1", f"cpu@{node}").held_unit_s == 2.0
    other = "n1" if node == "n0" else "n0"
    assert world.use("r1", f"cpu@{other}").held_unit_s == 8.0, "it was granted again"


@pytest.mark.parametrize("seed", range(3))
def test_use_agrees_with_the_ledger(seed: int) -> None:
    """The units of the ledger, integrated, and the actions of the queue."""
    random_ = random.Random(seed)
    world = World(*cpu_node("n0", 4.0))
    pool = world.scheduler.ledger.pools["cpu@n0"]
    integral = 0.0
    for number in range(300):
        elapsed_s = random_.uniform(0.0, 2.0)
        integral += pool.held / 1000.0 * elapsed_s
        world.now += elapsed_s
        running = [entry.id for entry in world.scheduler.holding_entries(None)]
        if random_.random() < 0.5 and running:
            world.finish(random_.choice(running))
        elif random_.random() < 0.1:
            world.send(PoolChanged(pool=Pool(kind=CPU, node="n0", total=random_.choice([2000, 4000]))))
        else:
            world.submit(f"a{number}", f"r{number % 3}", random_.choice([1, 2]), f"t{number % 7}")
        use = world.use(None)
        assert use.held_unit_s == pytest.approx(integral)
        assert use.waiting == world.scheduler.waiting_count(None)
        runs = [world.use(f"r{each}") for each in range(3)]
        assert sum(each.waiting for each in runs) == use.waiting
        assert all(each.held_unit_s <= each.reserved_unit_s + 1e-9 for each in runs)
