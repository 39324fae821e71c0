"""APIs that count for themselves: what a quota allows is used and never exceeded, however they count."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import msgspec
import pytest

from tangram.clock import VirtualLoop
from tangram.core.action import Action
from tangram.core.demand import Demand
from tangram.core.messages import Effect, Event, Finished, Pool, Start, Started
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.managers.quotas.manager import ARRIVAL_S, Quota, QuotaManager, Rate
from tangram.managers.work import HoldGrant
from tangram.runtime.event_sink import EventSink
from tangram.runtime.orchestrator import Orchestrator
from tangram.sim.apis import SimulatedApis
from tangram.sim.episode import ApiModel, Counting, SimEpisode, SimStep, SimTurn, Workload, api_model
from tangram.sim.faults import InjectedFault, draw_faults
from tangram.sim.simulate import simulate
from tangram.sim.size import Size
from tangram.sim.workloads import build

POLICIES = ("adaptive", "paper", "fcfs")
WAYS = [(counting, counting) for counting in Counting] + [(Counting.FIXED, Counting.BUCKET)]
"""To count requests and tokens."""


# ---- how an API counts ------------------------------------------------------------------------------------------


class Harness:
    """One API, called by hand."""

    def __init__(self, quota: Quota, **ways: object) -> None:
        self.apis = SimulatedApis((api_model(quota, **ways),))  # type: ignore[arg-type]
        self._quota = quota
        self._number = 0

    def request(self, now: float, count: int = 1, *, tokens: int = 0, really: int | None = None) -> int:
        """How many of the requests are admitted."""
        spent = None if really is None else {f"{self._quota.name}/tokens": really}
        step = SimStep(kind="ask", demand=Demand(self._quota.demand(tokens=tokens)), work_s=1.0, spent=spent)
        got = 0
        for _ in range(count):
            self._number += 1
            got += self.apis.admit(f"a{self._number}", step, now)
        return got


def test_requests_in_flight_count_until_they_leave() -> None:
    harness = Harness(Quota("search", concurrent=2))
    assert harness.request(0.0, 3) == 2
    assert harness.request(1e6) == 0
    harness.apis.release("a1")
    harness.apis.release("a3")
    assert harness.request(1e6, 2) == 1, "the third never got in"


def test_fixed_windows_begin_at_an_offset_of_their_own() -> None:
    harness = Harness(Quota("search", requests=Rate(4, 10.0)), phase_s=3.0)
    assert harness.request(2.9, 5) == 4
    assert harness.request(3.0, 5) == 4, "a new window"
    assert harness.request(12.9) == 0
    assert harness.request(13.0, 5) == 4
    assert harness.request(1003.0, 5) == 4


def test_a_sliding_window_looks_back_from_every_request() -> None:
    harness = Harness(Quota("search", requests=Rate(4, 10.0)), requests=Counting.SLIDING)
    assert harness.request(0.0, 3) == 3
    assert harness.request(6.0, 3) == 1
    assert harness.request(9.9) == 0
    assert harness.request(10.0, 5) == 3
    assert harness.request(16.0, 5) == 1


def test_a_bucket_fills_steadily_up_to_its_size() -> None:
    harness = Harness(Quota("search", requests=Rate(4, 10.0)), requests=Counting.BUCKET)
    assert harness.request(0.0, 5) == 4
    assert harness.request(2.4) == 0
    assert harness.request(2.5, 2) == 1
    assert harness.request(100.0, 9) == 4


def test_tokens_count_as_many_as_a_request_really_uses() -> None:
    harness = Harness(Quota("judge", tokens=Rate(1000, 60.0)))
    assert harness.request(0.0, 9, tokens=300, really=100) == 9
    assert harness.request(1.0, 9, tokens=100) == 1
    assert harness.request(61.0, 9, tokens=300) == 3


def test_what_one_limit_refuses_counts_in_no_other() -> None:
    harness = Harness(Quota("judge", concurrent=5, requests=Rate(9, 60.0), tokens=Rate(1000, 60.0)))
    assert harness.request(0.0, 4, tokens=600) == 1
    assert harness.request(0.0, 9, tokens=10) == 4, "five under way"
    for number in range(1, 14):
        harness.apis.release(f"a{number}")
    assert harness.request(0.0, 9, tokens=10) == 4, "nine in all"


@pytest.mark.parametrize("counting", Counting)
def test_a_quota_that_is_cut_allows_less_at_once_and_more_when_it_is_whole_again(counting: Counting) -> None:
    quota = Quota("search", requests=Rate(10, 10.0))
    harness = Harness(quota, requests=counting)
    assert harness.request(0.0, 6) == 6
    harness.apis.set_quota(quota.pools(0.5)[0], 0.0)
    assert harness.request(0.0, 9) == (2 if counting is Counting.BUCKET else 0)
    assert harness.request(50.0, 9) == 5
    harness.apis.set_quota(quota.pools()[0], 50.0)
    assert harness.request(50.0, 9) == 5
    harness.apis.set_quota(Pool(kind="other", total=1), 50.0)


# ---- what a scheduler makes of it -------------------------------------------------------------------------------


class Calls:
    """An observer of a simulation."""

    def __init__(self) -> None:
        self.refused = 0
        self.arrivals: list[tuple[float, str]] = []

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, Started):
            self.arrivals.append((now, event.action))
        elif isinstance(event, Finished) and event.lost.startswith("429"):
            self.refused += 1


QUOTA = Quota("judge", concurrent=40, requests=Rate(60, 20.0), tokens=Rate(9000, 20.0))


TOKENS_BY_SCARCE = {"requests": (50, 100), "tokens": (200, 300, 400)}
"""What calls ask for, so that the one or the other rate of QUOTA is short."""


def saturating(seed: int, quota: Quota, tokens: tuple[int, ...], *, windows: int = 5) -> Workload:
    """Calls that are all due at once, for some windows. Each takes a while to reach the API, and some use
    fewer tokens than they ask for."""
    rng = random.Random(f"calls/{seed}")
    assert quota.requests is not None
    episodes = []
    for k in range(windows * quota.requests.units):
        amount = rng.choice(tokens)
        step = SimStep(
            kind="judge",
            demand=Demand(quota.demand(tokens=amount)),
            work_s=rng.choice((0.01, 0.3, 3.0)) * rng.uniform(0.5, 1.5),
            overhead_s=rng.uniform(0.0, 0.99 * ARRIVAL_S),
            spent={f"{quota.name}/tokens": rng.randint(1, amount)} if rng.random() < 0.3 else None,
        )
        turn = SimTurn(think_s=0.0, steps=(step,))
        episodes.append(SimEpisode(id=f"e{k}", run=f"r{k % 3}", task="", start_s=rng.uniform(0.0, 2.0), turns=(turn,)))
    return Workload(name="saturating", seed=seed, episodes=tuple(episodes))


def at_once(work: Workload) -> Workload:
    """The same calls, which reach the API when they are granted."""
    episodes = []
    for episode in work.episodes:
        (step,) = episode.turns[0].steps
        turn = SimTurn(think_s=0.0, steps=(msgspec.structs.replace(step, overhead_s=0.0),))
        episodes.append(msgspec.structs.replace(episode, turns=(turn,)))
    return msgspec.structs.replace(work, episodes=tuple(episodes))


def used(calls: Calls, work: Workload, quota: Quota, scarce: str) -> float:
    """The seconds that all full windows of units need at least, over those that they took."""
    steps = {f"{episode.id}.0.0": episode.turns[0].steps[0] for episode in work.episodes}
    pool, rate = f"{quota.name}/{scarce}", quota.rates()[scarce]
    units = [
        (steps[action].spent or {}).get(pool, steps[action].demand.pools[pool].min) for _, action in calls.arrivals
    ]
    full = (sum(units) - 1) // rate.units
    assert full >= 3, "otherwise it says little"
    behind, number = 0, 0
    while behind <= full * rate.units:
        behind += units[number]
        number += 1
    return full * rate.seconds / (calls.arrivals[number - 1][0] - calls.arrivals[0][0])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("requests", "tokens"), WAYS, ids=lambda way: way.value)
@pytest.mark.parametrize("scarce", TOKENS_BY_SCARCE)
def test_a_scheduler_never_meets_a_429_and_leaves_hardly_anything_unused(
    name: str, requests: Counting, tokens: Counting, scarce: str
) -> None:
    # Each case of the grid has its own work and its own phase.
    chance = random.Random(f"{name}/{requests.value}/{tokens.value}/{scarce}")
    api = api_model(QUOTA, requests=requests, tokens=tokens, phase_s=chance.uniform(0.0, 20.0))
    work = saturating(chance.randrange(1 << 16), QUOTA, TOKENS_BY_SCARCE[scarce])
    work = msgspec.structs.replace(work, apis=(api,))
    calls = Calls()
    result = simulate(work, name, Size().pools(work), observer=calls)
    assert calls.refused == 0
    assert {row.status for row in result.rows} == {"succeeded"}
    assert used(calls, work, QUOTA, scarce) >= 0.9


@pytest.mark.parametrize(("requests", "tokens"), WAYS, ids=lambda way: way.value)
@pytest.mark.parametrize("seed", range(3))
def test_calls_without_control_meet_429s_and_trajectories_are_lost(
    requests: Counting, tokens: Counting, seed: int
) -> None:
    api = api_model(QUOTA, requests=requests, tokens=tokens, phase_s=7.0 * seed)
    work = msgspec.structs.replace(saturating(seed, QUOTA, TOKENS_BY_SCARCE["tokens"]), apis=(api,))
    calls = Calls()
    result = simulate(work, "pods:0.5", Size().pools(work), observer=calls)
    assert calls.refused > 100
    assert result.episodes_failed > 0


@pytest.mark.parametrize("counting", Counting)
@pytest.mark.parametrize("name", POLICIES)
def test_an_api_that_cuts_its_quota_refuses_only_requests_in_flight(name: str, counting: Counting) -> None:
    for seed in range(4):
        api = api_model(QUOTA, requests=counting, tokens=counting, phase_s=5.0 * seed)
        work = at_once(saturating(seed, QUOTA, TOKENS_BY_SCARCE["requests"], windows=3))
        work = msgspec.structs.replace(work, apis=(api,))
        calls = Calls()
        cuts = draw_faults(seed, until_s=60.0, count=5, kinds=("quota_cut",))
        simulate(work, name, Size().pools(work), observer=calls, faults=cuts)
        assert calls.refused == 0, f"seed {seed}"


def test_an_api_that_cuts_its_quota_refuses_what_it_allowed_before() -> None:
    quota = Quota("search", concurrent=10)
    ask = SimStep(kind="search", demand=Demand(quota.demand()), work_s=5.0)
    turn = SimTurn(think_s=10.0, steps=(ask,) * 8)
    work = Workload(
        name="burst", seed=0, episodes=(SimEpisode(id="e", run="r", task="", turns=(turn,)),), apis=(api_model(quota),)
    )
    cut = InjectedFault(at=5.0, kind="quota_cut", lasts_s=100.0, amount=0.5)
    whole, less = Calls(), Calls()
    simulate(work, "pods:0.5", quota.pools(), observer=whole)
    simulate(work, "pods:0.5", quota.pools(), observer=less, faults=(cut,))
    assert whole.refused == 0
    assert less.refused >= 3


@pytest.mark.parametrize("counting", Counting)
@pytest.mark.parametrize("options", [{}, {"search_tokens_per_minute": 30_000}], ids=["plain", "tokens"])
def test_the_search_workload_is_refused_under_no_policy_and_without_control(counting: Counting, options: dict) -> None:
    for seed in range(2):
        work = build("search", batch=12, seed=seed, search_per_minute=45, **options)
        apis = tuple(_counted(api, counting) for api in work.apis)
        work = msgspec.structs.replace(work, apis=apis)
        refused = defaultdict(int)
        for name in (*POLICIES, "pods:0.5"):
            calls = Calls()
            simulate(work, name, Size(devices=8).pools(work), observer=calls)
            refused[name] = calls.refused
        assert [refused[name] for name in POLICIES] == [0, 0, 0]
        assert refused["pods:0.5"] > 0


def _counted(api: ApiModel, counting: Counting) -> ApiModel:
    limits = tuple(msgspec.structs.replace(limit, counting=counting) for limit in api.limits)
    return msgspec.structs.replace(api, limits=limits)


def test_a_scheduler_that_counts_in_fixed_windows_is_refused_at_the_edges_of_those_of_the_api() -> None:
    """Why the pools of a quota slide."""
    quota = Quota("search", requests=Rate(20, 20.0))
    ask = SimStep(kind="search", demand=Demand(quota.demand()), work_s=0.1)
    turns = tuple(SimTurn(think_s=think_s, steps=(ask,) * 20) for think_s in (15.0, 10.0))
    work = Workload(
        name="edges",
        seed=0,
        episodes=(SimEpisode(id="e", run="r", task="", turns=turns),),
        apis=(api_model(quota, phase_s=10.0),),
    )
    (pool,) = quota.pools()
    assert pool.window is not None
    fixed_window = msgspec.structs.replace(pool, window=msgspec.structs.replace(pool.window, sliding=False))
    sliding, aligned = Calls(), Calls()
    simulate(work, "fcfs", (pool,), observer=sliding)
    simulate(work, "fcfs", (fixed_window,), observer=aligned)
    assert sliding.refused == 0
    assert aligned.refused > 0


# ---- live and simulated -----------------------------------------------------------------------------------------


def simulated_starts(work: Workload, name: str, quota: Quota) -> list[tuple[str, float]]:
    starts: list[tuple[str, float]] = []

    def observe(now: float, event: Event, effects: list[Effect]) -> None:
        starts.extend((effect.action.id, now) for effect in effects if isinstance(effect, Start))

    simulate(work, name, quota.pools(), observer=observe)
    return starts


def live_starts(work: Workload, name: str, quota: Quota) -> list[tuple[str, float]]:
    """The same calls, held by the manager of quotas on virtual time."""
    starts: list[tuple[str, float]] = []

    def observe(now: float, event: Event, effects: list[Effect]) -> None:
        starts.extend((effect.action.id, now) for effect in effects if isinstance(effect, Start))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        sink = EventSink()
        quotas = QuotaManager([quota], sink.send)
        scheduler = Scheduler(policy(name), quotas.pools())
        orchestrator = Orchestrator(
            scheduler, {}, {HoldGrant: quotas}, clock=loop.clock, observers=[observe], sink=sink
        )

        async def one(episode: SimEpisode) -> None:
            step = episode.turns[0].steps[0]
            await asyncio.sleep(episode.start_s)
            action = Action(
                id=f"{episode.id}.0.0",
                demand=step.demand,
                run=episode.run,
                task=episode.task,
                trajectory=episode.id,
                kind=step.kind,
            )
            ticket = orchestrator.submit(action, HoldGrant())
            await ticket.started
            await asyncio.sleep(step.work_s)
            quotas.release(action.id, step.spent)
            await orchestrator.wait_settled(ticket)

        async with orchestrator:
            await asyncio.gather(*(one(episode) for episode in work.episodes))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    return starts


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_and_a_live_scheduler_start_the_same_calls_at_the_same_times(name: str, seed: int) -> None:
    quota = Quota("judge", concurrent=4, requests=Rate(12, 10.0), tokens=Rate(1500, 10.0))
    work = at_once(saturating(seed, quota, (50, 200)))
    simulated, live = simulated_starts(work, name, quota), live_starts(work, name, quota)
    assert len(simulated) == 60
    assert [action for action, _ in live] == [action for action, _ in simulated]
    # The virtual loop waits a microsecond longer than requested, for each of the waits that led to a start.
    assert [at for _, at in live] == pytest.approx([at for _, at in simulated], abs=1e-3)
