"""Policies: each by its name, driven through the scheduler, judged by the effects that a manager would see."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.action import Action, Usage
from tangram.core.demand import CORE, CPU, GPU, Amounts, Demand, cores, fixed, learned, one_of
from tangram.core.limits import Limits
from tangram.core.messages import (
    Cancel,
    Effect,
    Event,
    Evicted,
    Finished,
    Pool,
    PoolChanged,
    Resident,
    Resize,
    Restore,
    Start,
    Started,
    Submit,
    Tick,
    Used,
    WakeAt,
    cpu_node,
)
from tangram.core.policies import POLICIES, policy
from tangram.core.policies.adaptive import GROW_AGE_S, RESERVE_MARGIN, RESERVE_MAX, RESERVE_MIN, RESIZES_MAX, REST_S
from tangram.core.policies.paper import DEPTH
from tangram.core.profile import ProfileStore
from tangram.core.scheduler import Scheduler
from tangram.core.speedup import PowerLaw, Speedup
from tangram.errors import InvalidConfig

CONCRETE = [name.replace("K", "2") for name in POLICIES]


def gpu_node(devices: int) -> tuple[Pool, ...]:
    return (Pool(kind=GPU, node="g0", total=devices),)


class Rig:
    """A scheduler whose managers answer when the test says so. It checks every invariant after every event."""

    def __init__(
        self, name: str, pools: tuple[Pool, ...], *, ageing_s: float = 600.0, profiles: ProfileStore | None = None
    ) -> None:
        self.scheduler = Scheduler(policy(name), pools, limits=Limits(ageing_s=ageing_s), profiles=profiles)
        self.now = 0.0
        self.units: dict[str, int] = {}
        """Reserved units of the first pool of everything that holds some."""
        self.starts: list[str] = []
        self.resizes: list[Resize] = []

    def handle(self, event: Event) -> list[Effect]:
        effects = self.scheduler.handle(event, self.now)
        self.scheduler.check()
        for effect in effects:
            if isinstance(effect, Start):
                self.starts.append(effect.action.id)
                self.units[effect.action.id] = effect.grant.shares[0].reserved
            elif isinstance(effect, Resize):
                self.resizes.append(effect)
                self.units[effect.action] = effect.reserved
        return effects

    def submit(
        self,
        name: str,
        amounts: Amounts,
        *,
        kind: str = CPU,
        duration_s: float | None = None,
        speedup: Speedup | None = None,
        service: str = "",
        key: str = "",
        timeout_s: float | None = None,
    ) -> list[Effect]:
        """Submit, and let what starts run at once."""
        action = Action(
            id=name,
            demand=Demand({kind: amounts}, speedup),
            duration_s=duration_s,
            service=service,
            key=key,
            timeout_s=timeout_s,
        )
        return self.run(Submit(action=action))

    def run(self, event: Event) -> list[Effect]:
        effects = self.handle(event)
        for effect in effects:
            if isinstance(effect, Start):
                self.handle(Started(action=effect.action.id))
        return effects

    def finish(self, name: str, cpu_s: float = 0.0) -> list[Effect]:
        del self.units[name]
        return self.run(Finished(action=name, usage=Usage(cpu_s=cpu_s)))

    def started(self) -> dict[str, int]:
        """What was started since the last call, with its units."""
        names, self.starts = self.starts, []
        return {name: self.units[name] for name in names}


def start_of(effects: list[Effect]) -> Start:
    (start,) = [effect for effect in effects if isinstance(effect, Start)]
    return start


# ---- by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONCRETE)
def test_every_listed_policy_can_be_made_and_has_its_name(name: str) -> None:
    assert policy(name).name == name


@pytest.mark.parametrize(
    ("name", "near"),
    [("fcf", "fcfs"), ("papr", "paper"), ("adaptiv", "adaptive"), ("fixed:four", "fixed:K"), ("fixed", "fixed:K")],
)
def test_a_name_that_is_nearly_right_is_refused_with_the_right_one(name: str, near: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        policy(name)
    assert (caught.value.field, caught.value.value) == ("policy", name)
    assert caught.value.expected == f"one of {', '.join(POLICIES)} (did you mean {near}?)"


@pytest.mark.parametrize("name", ["", "zzz", "fixed:0", "fixed:-1", "fixed:²", "fixed:2:3", "adaptive:", "fcfs:2"])
def test_a_name_that_means_nothing_is_refused_with_all_that_do(name: str) -> None:
    with pytest.raises(InvalidConfig, match="policy: expected one of fcfs, fixed:K, paper, adaptive"):
        policy(name)


@pytest.mark.parametrize("name", CONCRETE)
def test_under_every_policy_an_action_that_fits_an_idle_pool_starts_at_once(name: str) -> None:
    for amounts in (cores(1), cores(1, 4), learned(), cores(4)):
        rig = Rig(name, cpu_node("n0", 4))
        rig.submit("a", amounts)
        assert list(rig.started()) == ["a"]


@pytest.mark.parametrize("name", CONCRETE)
def test_under_every_policy_all_that_was_submitted_ends(name: str) -> None:
    rng = random.Random(7)
    rig = Rig(name, cpu_node("n0", 8))
    names = [f"a{i}" for i in range(40)]
    for action in names:
        rig.submit(action, rng.choice([cores(1), cores(3), cores(1, 8), cores(2, 4), learned()]))
    while rig.units:
        rig.now += rng.expovariate(1.0)
        rig.finish(rng.choice(list(rig.units)), cpu_s=0.1)
    assert sorted(rig.starts) == sorted(names)
    assert rig.scheduler.statistics().settled["succeeded"] == 40


# ---- first come, first served -----------------------------------------------------------------------------------


def test_fcfs_gives_every_action_its_minimum() -> None:
    rig = Rig("fcfs", cpu_node("n0", 8))
    for i, amounts in enumerate([cores(1, 8), cores(2, 4), cores(3), learned()]):
        rig.submit(f"a{i}", amounts)
    assert rig.started() == {"a0": 1000, "a1": 2000, "a2": 3000, "a3": 1000}


def test_fcfs_keeps_arrival_order_even_where_a_later_one_would_fit() -> None:
    rig = Rig("fcfs", cpu_node("n0", 4))
    rig.submit("first", cores(3), duration_s=100.0)
    rig.submit("wide", cores(2), duration_s=100.0)
    rig.submit("small", cores(1), duration_s=0.1)
    assert list(rig.started()) == ["first"]
    rig.now = 5.0
    rig.finish("first")
    assert list(rig.started()) == ["wide", "small"]


def test_fcfs_shows_which_action_is_ahead() -> None:
    rig = Rig("fcfs", cpu_node("n0", 4))
    for name, count in [("first", 3), ("wide", 2), ("small", 1)]:
        rig.submit(name, cores(count))
    explanation = rig.scheduler.explain("small")
    assert explanation.startswith("small waits behind wide, which goes first and waits for 2 cores of cpu@n0")


def test_fcfs_does_not_block_actions_that_do_not_need_the_scarce_pool() -> None:
    rig = Rig("fcfs", (*cpu_node("n0", 1), Pool(kind="search", total=1)))
    rig.submit("a", cores(1))
    rig.submit("b", cores(1))
    rig.submit("call", fixed(1), kind="search")
    assert list(rig.started()) == ["a", "call"]


# ---- a fixed degree ---------------------------------------------------------------------------------------------


def test_fixed_waits_until_all_its_units_are_free() -> None:
    rig = Rig("fixed:3", cpu_node("n0", 8))
    for i in range(3):
        rig.submit(f"a{i}", cores(1, 8))
    assert rig.started() == {"a0": 3000, "a1": 3000}
    rig.submit("rigid", cores(2))
    assert rig.started() == {}, "the third goes first, and two of its three cores are kept for it"
    rig.finish("a0")
    assert rig.started() == {"a2": 3000, "rigid": 2000}


@pytest.mark.parametrize(("amounts", "units"), [(cores(1, 2), 2000), (cores(1, 16), 4000), (cores(4, 8), 4000)])
def test_fixed_takes_the_nearest_amount_that_is_admitted_and_exists(amounts: Amounts, units: int) -> None:
    rig = Rig("fixed:8", cpu_node("n0", 4))
    rig.submit("a", amounts)
    assert rig.started() == {"a": units}


def test_fixed_counts_devices_as_well() -> None:
    rig = Rig("fixed:4", gpu_node(8))
    rig.submit("a", one_of(1, 2, 4, 8), kind=GPU)
    rig.submit("b", one_of(1, 2), kind=GPU)
    assert rig.started() == {"a": 4, "b": 2}


# ---- the published algorithm ------------------------------------------------------------------------------------


class Waiting(msgspec.Struct, frozen=True):
    """One action of a small case; all that the published objective needs to know of it."""

    name: str
    units: tuple[int, ...]
    work_s: float
    exponent: float

    def seconds(self, units: int) -> float:
        return self.work_s / float(units) ** self.exponent

    @property
    def minimum(self) -> int:
        return self.units[0]


def small_case(seed: int, degrees: Sequence[int]) -> list[Waiting]:
    rng = random.Random(seed)
    waiting = []
    for i in range(rng.randint(1, 4)):
        low = rng.choice(degrees[:3])
        high = rng.choice([units for units in degrees if units > low])
        units = tuple(count for count in degrees if low <= count <= high)
        waiting.append(Waiting(f"a{i}", units, math.exp(rng.uniform(-2.0, 4.0)), rng.uniform(0.05, 0.98)))
    return waiting


def cores_taken(units: int) -> int:
    return units


def devices_taken(units: int) -> int:
    """A chunk: the next power of two."""
    return min(size for size in (1, 2, 4, 8) if size >= units)


Taken = Callable[[int], int]


def estimated(ends: list[tuple[float, int]], rest: list[Waiting], taken: Taken) -> float:
    """The documented estimate: an action that cannot start now queues for the next units that come free, each at its
    minimum; the first may take up to DEPTH minima, whichever is best for the sum."""
    if not rest:
        return 0.0
    totals = []
    for depth in range(1, DEPTH + 1):
        first = rest[0].minimum * depth
        if first not in rest[0].units:
            continue
        heap, total = sorted(ends), 0.0
        for action, units in zip(rest, [first, *(action.minimum for action in rest[1:])], strict=True):
            free, at = 0, 0.0
            while heap and free < taken(units):
                at, freed = heapq.heappop(heap)
                free += freed
            if free > taken(units):
                heapq.heappush(heap, (at, free - taken(units)))
            heapq.heappush(heap, (at + action.seconds(units), taken(units)))
            total += at + action.seconds(units)
        totals.append(total)
    return min(totals)


def best_by_prefix(waiting: list[Waiting], total: int, taken: Taken) -> list[tuple[float, float, tuple[int, ...]]]:
    """For every prefix that fits: the least exact part of any division, the whole objective then, and the division."""
    best = []
    for kept in range(1, len(waiting) + 1):
        divisions = [
            division
            for division in itertools.product(*(action.units for action in waiting[:kept]))
            if sum(map(taken, division)) <= total
        ]
        if not divisions:
            break

        def exact(division: tuple[int, ...]) -> float:
            return sum(action.seconds(units) for action, units in zip(waiting, division, strict=False))

        division = min(divisions, key=exact)
        ends = [(action.seconds(units), taken(units)) for action, units in zip(waiting, division, strict=False)]
        best.append((exact(division), exact(division) + estimated(ends, waiting[kept:], taken), division))
    return best


def starts_of_paper(waiting: list[Waiting], total: int, kind: str) -> dict[str, int]:
    """What `paper` starts when a whole pool comes free at once and all of these wait for it."""
    unit = CORE if kind == CPU else 1
    rig = Rig("paper", (Pool(kind=kind, node="n0", total=total * unit),))
    rig.submit("before", fixed(total * unit), kind=kind)
    for action in waiting:
        low, high = action.units[0], action.units[-1]
        amounts = cores(low, high) if kind == CPU else one_of(*action.units)
        rig.submit(action.name, amounts, kind=kind, duration_s=action.work_s, speedup=PowerLaw(action.exponent))
    rig.started()
    rig.finish("before")
    return {name: units // unit for name, units in rig.started().items()}


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [(CPU, range(1, 9)), (GPU, (1, 2, 4, 8)), (GPU, (1, 2, 3, 5, 6))],
    ids=["cores", "chunks", "parts of chunks"],
)
def test_paper_makes_the_starts_that_trying_everything_finds(kind: str, degrees: Sequence[int]) -> None:
    evictions = 0
    taken = cores_taken if kind == CPU else devices_taken
    for seed in range(400):
        waiting = small_case(seed, degrees)
        best = best_by_prefix(waiting, 8, taken)
        started = starts_of_paper(waiting, 8, kind)
        kept = len(started)
        assert sorted(started) == [action.name for action in waiting[:kept]], f"seed {seed}: not a prefix"
        exact, objective, division = best[kept - 1]
        # The ledger says what was taken; more of it is always faster, so that is the most that it holds.
        starts = tuple(
            max(units for units in action.units if taken(units) == started[action.name]) for action in waiting[:kept]
        )
        cost = sum(action.seconds(units) for action, units in zip(waiting, starts, strict=False))
        assert cost == pytest.approx(exact), f"seed {seed}: {starts} is no better than {division}"
        # The tail is left waiting as long as that lowers the sum: down to here it did, one further it does not.
        objectives = [whole for _, whole, _ in best]
        for longer in range(kept, len(best)):
            assert objectives[longer - 1] < objectives[longer], f"seed {seed}: evicted though it did not help"
        if kept > 1:
            assert objectives[kept - 2] >= objective, f"seed {seed}: one more eviction would have helped"
        evictions += len(best) - kept
    assert evictions > 50, "the cases must be such that leaving some waiting matters"


def test_paper_never_starts_a_tail_that_eviction_leaves() -> None:
    """A long action that divides well, and one that needs nearly the whole pool for a moment: it is better to wait."""
    rig = Rig("paper", cpu_node("n0", 8))
    rig.submit("before", cores(8))
    rig.submit("long", cores(1, 8), duration_s=8.0, speedup=PowerLaw(0.98))
    rig.submit("tail", cores(7, 8), duration_s=0.1, speedup=PowerLaw(1.0))
    rig.started()
    rig.finish("before")
    assert rig.started() == {"long": 8000}
    rig.handle(Tick())
    assert rig.started() == {}
    rig.now = 1.1
    rig.finish("long")
    assert rig.started() == {"tail": 8000}


def test_paper_places_the_larger_first_though_its_number_is_fixed() -> None:
    """The small ones go where their services are loaded, one into each half: the large one must have taken its own."""
    rig = Rig("paper", gpu_node(4))
    rig.submit("before", fixed(4), kind=GPU)
    for service, device in (("judge", 0), ("teacher", 2)):
        rig.handle(Resident(service=service, node="g0", devices=(device,)))
        rig.submit(service, one_of(1, 2), kind=GPU, service=service)
    rig.submit("large", fixed(2), kind=GPU)
    rig.started()
    rig.handle(Cancel(action="before"))  # of which nothing is learned: all are given their minimum
    rig.finish("before")
    assert rig.started() == {"large": 2, "judge": 1, "teacher": 1}


@pytest.mark.parametrize("degree", [1, 2])
def test_paper_does_not_divide_the_devices_of_what_is_elastic_in_cpu(degree: int) -> None:
    """The call would be fastest on all devices that came free, but some of them are held for the training step."""
    rig = Rig("paper", (*cpu_node("g0", 8), *gpu_node(4)))
    rig.submit("before", fixed(4), kind=GPU)
    rig.submit("judge", one_of(1, 2, 4), kind=GPU, duration_s=10.0, speedup=PowerLaw(1.0))
    pools = {CPU: cores(1, 4), GPU: fixed(degree)}
    rig.run(Submit(action=Action(id="train", demand=Demand(pools, PowerLaw(1.0)), duration_s=10.0)))
    rig.started()
    rig.finish("before")
    assert rig.started() == {"judge": 2, "train": 4000}


def test_paper_gives_the_minimum_to_an_action_without_estimate() -> None:
    rig = Rig("paper", cpu_node("n0", 8))
    rig.submit("a", cores(2, 8))
    assert rig.started() == {"a": 2000}


def test_paper_starts_at_least_one_action_on_an_idle_pool() -> None:
    for seed in range(100):
        assert starts_of_paper(small_case(seed, range(1, 9)), 8, CPU)


# ---- adaptive: order --------------------------------------------------------------------------------------------


def test_adaptive_starts_short_actions_before_long_ones() -> None:
    rig = Rig("adaptive", cpu_node("n0", 1))
    rig.submit("before", cores(1))
    for name, seconds in [("long", 60.0), ("short", 0.5), ("middle", 5.0)]:
        rig.submit(name, cores(1), duration_s=seconds)
    order = []
    running = "before"
    for _ in range(3):
        rig.started()
        rig.now += 1.0
        rig.finish(running)
        (running,) = rig.started()
        order.append(running)
    assert order == ["short", "middle", "long"]


def test_adaptive_counts_what_an_action_takes_away_not_only_how_long() -> None:
    rig = Rig("adaptive", cpu_node("n0", 4))
    rig.submit("before", cores(4))
    rig.submit("wide", cores(4), duration_s=2.0)
    rig.submit("narrow", cores(1), duration_s=4.0)
    rig.started()
    rig.finish("before")
    assert next(iter(rig.started())) == "narrow"


def test_adaptive_lets_an_aged_action_go_first() -> None:
    rig = Rig("adaptive", cpu_node("n0", 1), ageing_s=10.0)
    rig.submit("before", cores(1))
    rig.submit("long", cores(1), duration_s=60.0)
    rig.now = 11.0
    rig.submit("short", cores(1), duration_s=0.5)
    rig.started()
    rig.finish("before")
    assert list(rig.started()) == ["long"]


# ---- adaptive: undeclared CPU -----------------------------------------------------------------------------------


def taught(seconds: float, busy: float, key: str = "tool") -> ProfileStore:
    profiles = ProfileStore()
    action = Action(id="a", demand=Demand({CPU: learned()}), key=key)
    for _ in range(20):
        profiles.observe(action, execution_s=seconds, units=None, cpu_s=seconds * busy)
    return profiles


def test_an_unknown_action_counts_as_nearly_one_core() -> None:
    rig = Rig("adaptive", cpu_node("n0", 2))
    for i in range(3):
        rig.submit(f"a{i}", learned())
    assert rig.started() == {"a0": RESERVE_MAX, "a1": RESERVE_MAX}


def test_an_unknown_action_never_counts_more_than_its_limit() -> None:
    rig = Rig("adaptive", cpu_node("n0", 2))
    rig.submit("a", learned(0.25))
    assert rig.started() == {"a": 250}


def test_an_action_of_a_known_class_reserves_what_its_class_used_and_may_use_its_limit() -> None:
    rig = Rig("adaptive", cpu_node("n0", 2), profiles=taught(seconds=1.0, busy=0.1))
    share = start_of(rig.submit("a", learned(4), key="tool")).grant.shares[0]
    assert share.reserved == pytest.approx(100 * RESERVE_MARGIN, abs=1)
    assert share.limit == 4000


def test_many_actions_that_mostly_wait_share_one_core() -> None:
    rig = Rig("adaptive", cpu_node("n0", 1), profiles=taught(seconds=1.0, busy=0.1))
    for i in range(20):
        rig.submit(f"a{i}", learned(), key="tool")
    assert len(rig.started()) == 9
    assert rig.scheduler.statistics().waiting == 11


def test_what_is_expected_to_run_long_reserves_less_but_never_below_the_least() -> None:
    reserves = []
    for seconds in (0.1, 5.0, 60.0, 10_000.0):
        rig = Rig("adaptive", cpu_node("n0", 8), profiles=taught(seconds, busy=1.0))
        rig.submit("a", learned(), key="tool")
        reserves.append(rig.units["a"])
    assert reserves[0] == 950
    assert reserves == sorted(reserves, reverse=True)
    assert reserves[1] < reserves[0]
    assert reserves[-1] == RESERVE_MIN


def test_what_uses_next_to_no_cpu_still_reserves_the_least() -> None:
    rig = Rig("adaptive", cpu_node("n0", 1), profiles=taught(seconds=1.0, busy=0.0))
    rig.submit("a", learned(), key="tool")
    assert rig.started() == {"a": RESERVE_MIN}


def test_a_running_call_that_turns_out_long_gives_up_reserve_and_keeps_its_limit() -> None:
    rig = Rig("adaptive", cpu_node("n0", 2), profiles=taught(seconds=0.3, busy=1.0))
    rig.submit("a", learned(), key="tool")
    before = rig.units["a"]
    for _ in range(6):
        rig.now += 2.0
        rig.handle(Tick())
    assert rig.resizes
    assert all(resize.limit == 4000 for resize in rig.resizes)
    assert RESERVE_MIN <= rig.units["a"] < before / 2


@pytest.mark.parametrize("timeout_s", [2.0, 20.0, 23.0])
def test_what_comes_near_its_timeout_reserves_its_full_use_again(timeout_s: float) -> None:
    rig = Rig("adaptive", cpu_node("n0", 2), profiles=taught(seconds=30.0, busy=1.0))
    rig.submit("a", learned(), key="tool", timeout_s=timeout_s)
    assert rig.units["a"] < 100
    while rig.now < 0.6 * timeout_s:
        rig.now += 0.1
        rig.handle(Tick())
    assert rig.units["a"] == 950


def test_an_undeclared_demand_reserves_a_little_less_than_a_core_at_most() -> None:
    for busy, reserve in ((0.5, 550), (0.95, 950), (1.0, 950), (1.6, 950)):
        rig = Rig("adaptive", cpu_node("n0", 4), profiles=taught(seconds=0.1, busy=busy))
        rig.submit("a", learned(), key="tool")
        assert rig.units["a"] == pytest.approx(reserve, abs=2)


def test_what_is_measured_to_wait_gives_its_reserve_up_and_gets_it_back_when_it_works() -> None:
    rig = Rig("adaptive", cpu_node("n0", 1), profiles=taught(seconds=0.1, busy=1.0))
    rig.submit("a", learned(), key="tool")
    rig.submit("b", learned(), key="tool")
    assert rig.units == {"a": 950}
    rig.now += 0.25
    rig.handle(Used(action="a", cpu_s=0.001))
    assert rig.units["a"] < 20, "it used a 250th of a core"
    assert "b" in rig.units, "what it gave up is another one's"
    rig.now += 0.5
    rig.handle(Used(action="b", cpu_s=0.0))
    rig.handle(Used(action="a", cpu_s=0.501))
    assert rig.units["a"] > 10 * RESERVE_MIN, "what its class still has to do, by now"


def test_what_uses_all_of_its_reserve_keeps_it() -> None:
    rig = Rig("adaptive", cpu_node("n0", 2), profiles=taught(seconds=0.1, busy=1.0))
    rig.submit("a", learned(), key="tool")
    rig.now += 0.25
    rig.handle(Used(action="a", cpu_s=0.24))
    assert rig.units["a"] == 950


# ---- adaptive: elastic CPU --------------------------------------------------------------------------------------

HALF = PowerLaw(0.5)


@pytest.mark.parametrize(("amounts", "units"), [(cores(1, 8), 8000), (cores(1, 4), 4000), (cores(2, 32), 8000)])
@pytest.mark.parametrize("name", ["adaptive", "adaptive:no-resize"])
def test_an_elastic_action_alone_gets_the_most_it_admits(name: str, amounts: Amounts, units: int) -> None:
    rig = Rig(name, cpu_node("n0", 8))
    rig.submit("a", amounts, duration_s=10.0, speedup=HALF)
    assert rig.started() == {"a": units}


def test_a_second_elastic_action_makes_the_first_shrink_and_both_run() -> None:
    rig = Rig("adaptive", cpu_node("n0", 8))
    rig.submit("first", cores(1, 8), duration_s=10.0, speedup=HALF)
    rig.now = 1.0
    effects = rig.submit("second", cores(1, 8), duration_s=10.0, speedup=HALF)
    kinds = [type(effect) for effect in effects if not isinstance(effect, WakeAt)]
    assert kinds == [Resize, Start], "room is made before it is given"
    assert set(rig.units) == {"first", "second"}
    assert rig.units["first"] >= 1000 and rig.units["second"] >= 1000
    assert sum(rig.units.values()) <= 8000
    assert sum(rig.units.values()) > 7000, "steps are whole cores; no more than one may be left over"
    (resize,) = rig.resizes
    assert (resize.action, resize.pool, resize.limit) == ("first", "cpu@n0", resize.reserved)


def test_when_the_second_ends_the_first_grows_again() -> None:
    rig = Rig("adaptive", cpu_node("n0", 8))
    rig.submit("first", cores(1, 8), duration_s=10.0, speedup=HALF)
    rig.submit("second", cores(1, 8), duration_s=10.0, speedup=HALF)
    assert rig.units["first"] < 8000
    rig.now = 2.0
    rig.finish("second")
    assert rig.units == {"first": 8000}


def test_an_action_grows_to_its_width_and_not_beyond() -> None:
    rig = Rig("adaptive", cpu_node("n0", 4))
    start = start_of(rig.submit("a", cores(1, 64), duration_s=10.0, speedup=HALF))
    assert rig.units["a"] == start.grant.width == 4000
    rig.run(PoolChanged(pool=cpu_node("n0", 64)[0]))
    assert rig.units["a"] <= start.grant.width


def test_the_one_with_less_left_gets_more() -> None:
    rig = Rig("adaptive", cpu_node("n0", 16))
    rig.submit("long", cores(1, 16), duration_s=100.0, speedup=PowerLaw(0.9))
    rig.submit("short", cores(1, 16), duration_s=1.0, speedup=PowerLaw(0.9))
    assert rig.units["short"] > rig.units["long"]


def test_a_crowd_is_all_at_its_minimum() -> None:
    rig = Rig("adaptive", cpu_node("n0", 8))
    for i in range(20):
        rig.submit(f"a{i}", cores(1, 8), duration_s=10.0, speedup=HALF)
    assert list(rig.units.values()) == [1000] * 8


def test_a_stopping_action_is_not_resized_any_more() -> None:
    rig = Rig("adaptive", cpu_node("n0", 8))
    rig.submit("first", cores(1, 8), duration_s=10.0, speedup=HALF)
    rig.handle(Cancel(action="first"))
    rig.submit("second", cores(1, 8), duration_s=10.0, speedup=HALF)
    assert rig.resizes == []
    rig.finish("first")
    assert rig.units == {"second": 8000}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([(1, 8), (2, 4), (3, 8), (2, 2), (0.5, 4)]), st.floats(0.1, 100)),
        st.tuples(st.just("finish"), st.integers(0, 10), st.floats(0.0, 20)),
    ),
    max_size=30,
)


def play(rig: Rig, steps: list[tuple[str, object, float]], look: Callable[[dict[str, int]], None]) -> None:
    """Submit and finish as given. `look` gets the least that each submitted action may have."""
    minima: dict[str, int] = {}
    for number, (step, what, seconds) in enumerate(steps):
        if step == "submit":
            assert isinstance(what, tuple)
            minima[f"a{number}"] = round(what[0] * CORE)
            rig.submit(f"a{number}", cores(*what), duration_s=seconds, speedup=HALF)
        elif rig.units:
            assert isinstance(what, int)
            rig.now += seconds
            rig.finish(list(rig.units)[what % len(rig.units)], cpu_s=1.0)
        look(minima)


@given(STEPS)
def test_a_declared_minimum_is_never_undercut_and_cores_are_never_oversold(
    steps: list[tuple[str, object, float]],
) -> None:
    rig = Rig("adaptive", cpu_node("n0", 8))

    def look(minima: dict[str, int]) -> None:
        assert all(units >= minima[name] for name, units in rig.units.items())
        assert sum(rig.units.values()) <= 8000

    play(rig, steps, look)
    assert all(resize.limit >= resize.reserved for resize in rig.resizes)


@given(STEPS)
def test_without_resizing_an_elastic_action_keeps_what_it_was_started_with(
    steps: list[tuple[str, object, float]],
) -> None:
    rig = Rig("adaptive:no-resize", cpu_node("n0", 8))
    play(rig, steps, lambda minima: None)
    assert rig.resizes == []


def test_a_limited_number_of_actions_grows_in_one_round() -> None:
    count = 3 * RESIZES_MAX
    rig = Rig("adaptive", cpu_node("n0", 4 * count))
    for i in range(count):
        rig.submit(f"a{i}", cores(1, 64), duration_s=50.0, speedup=HALF)
    assert len(rig.units) == count
    for rest in (64 * count, 64 * count + 1):
        rig.resizes.clear()
        before = dict(rig.units)
        rig.now += 1.0
        rig.run(PoolChanged(pool=cpu_node("n0", rest)[0]))
        grown = [name for name, units in rig.units.items() if units > before[name]]
        assert len(grown) == len(rig.resizes) == RESIZES_MAX, "the next round does more of the rest"


def test_an_action_that_has_just_started_is_not_resized_at_once() -> None:
    rig = Rig("adaptive", cpu_node("n0", 16))
    rig.submit("long", cores(1, 16), duration_s=50.0, speedup=HALF)
    rig.submit("short", cores(1, 16), duration_s=1.0, speedup=HALF)
    rig.now = GROW_AGE_S / 2
    rig.finish("short")
    before = rig.units["long"]
    assert before < 16 * CORE
    rig.now = 1.0
    rig.submit("next", cores(1, 16), duration_s=0.1, speedup=HALF)
    rig.finish("next")
    assert rig.units["long"] > before


def test_a_limited_number_of_actions_shrinks_in_one_round_and_the_rest_soon() -> None:
    count = 3 * RESIZES_MAX
    rig = Rig("adaptive", cpu_node("n0", 4 * count))
    for i in range(count):
        rig.submit(f"a{i}", cores(1, 64), duration_s=50.0, speedup=HALF)
    rig.now = 1.0
    rig.resizes.clear()
    rig.submit("whole", cores(3 * count))
    rounds = []
    while "whole" not in rig.units:
        rounds.append(len(rig.resizes))
        rig.resizes.clear()
        rig.now += REST_S
        rig.run(Tick())
    assert max(rounds) <= RESIZES_MAX
    assert len(rounds) <= 4


# ---- adaptive: devices ------------------------------------------------------------------------------------------


def devices_with_resident(restore_s: float) -> Rig:
    """A service that was seen to take `restore_s` to load, and is loaded on device 0 now."""
    rig = Rig("adaptive", gpu_node(8))
    action = Action(id="warm-up", demand=Demand({GPU: fixed(1)}), service="judge", kind="warm-up")
    rig.handle(Submit(action=action))
    rig.now += restore_s
    rig.handle(Started(action="warm-up"))
    rig.handle(Resident(service="judge", node="g0", devices=(0,)))
    rig.finish("warm-up")
    return rig


def devices_for(rig: Rig, seconds: float) -> tuple[int, ...]:
    effects = rig.submit("call", one_of(1, 2, 4), kind=GPU, duration_s=seconds, speedup=PowerLaw(1.0), service="judge")
    return start_of(effects).grant.shares[0].cells


def test_the_resident_degree_wins_when_restoring_costs_more_than_it_saves() -> None:
    assert devices_for(devices_with_resident(restore_s=20.0), seconds=8.0) == (0,)


def test_a_wider_degree_wins_when_it_saves_more_than_restoring_costs() -> None:
    assert len(devices_for(devices_with_resident(restore_s=0.5), seconds=8.0)) == 4


def test_devices_cost_more_while_other_actions_wait_for_them() -> None:
    rig = Rig("adaptive", gpu_node(8))
    rig.submit("before", fixed(8), kind=GPU)
    for i in range(8):
        rig.submit(f"a{i}", one_of(1, 2, 4, 8), kind=GPU, duration_s=8.0, speedup=HALF, service="judge")
    rig.started()
    rig.finish("before")
    crowded = rig.started()
    alone = Rig("adaptive", gpu_node(8))
    alone.submit("a", one_of(1, 2, 4, 8), kind=GPU, duration_s=8.0, speedup=HALF, service="judge")
    assert alone.started()["a"] > max(crowded.values())


def test_a_call_of_no_service_pays_for_no_restore() -> None:
    rig = Rig("adaptive", gpu_node(8))
    rig.submit("call", one_of(1, 2, 4, 8), kind=GPU, duration_s=0.05, speedup=HALF)
    assert rig.started() == {"call": 8}


def test_a_fixed_number_of_devices_is_granted() -> None:
    rig = devices_with_resident(restore_s=20.0)
    effects = rig.submit("call", fixed(2), kind=GPU, service="judge")
    assert len(start_of(effects).grant.shares[0].cells) == 2


# ---- adaptive: batches ------------------------------------------------------------------------------------------


def batching(devices: int, batch_max: int) -> Rig:
    """A service with batches of this size, loaded on device 0; all devices are busy with something else."""
    rig = Rig("adaptive", gpu_node(devices))
    rig.handle(Resident(service="judge", node="g0", devices=(0,), batch_max=batch_max))
    rig.submit("busy", fixed(devices), kind=GPU)
    return rig


def batches(effects: list[Effect]) -> dict[str, int]:
    """How many started in each batch; of an action alone its own name."""
    starts = [effect for effect in effects if isinstance(effect, Start)]
    return dict(Counter(start.grant.batch or start.action.id for start in starts))


def test_calls_that_wait_together_ride_in_one_batch_up_to_its_limit() -> None:
    rig = batching(devices=1, batch_max=4)
    for number in range(6):
        rig.submit(f"call-{number}", fixed(1), kind=GPU, service="judge")
    assert batches(rig.finish("busy")) == {"call-0": 4}
    for number in range(3):
        assert batches(rig.finish(f"call-{number}")) == {}, "the last one out frees the device"
    assert batches(rig.finish("call-3")) == {"call-4": 2}


def test_a_service_that_takes_one_call_at_a_time_has_no_riders() -> None:
    rig = batching(devices=1, batch_max=1)
    for number in range(3):
        rig.submit(f"call-{number}", fixed(1), kind=GPU, service="judge")
    assert batches(rig.finish("busy")) == {"call-0": 1}


def test_calls_are_spread_over_free_devices_before_they_share_a_batch() -> None:
    rig = batching(devices=4, batch_max=8)
    for number in range(8):
        # A call takes longer than the second that a restore is guessed to take.
        rig.submit(f"call-{number}", fixed(1), kind=GPU, service="judge", duration_s=30.0)
    assert sorted(batches(rig.finish("busy")).values()) == [2, 2, 2, 2]


def test_calls_share_a_batch_of_their_service_when_a_restore_takes_longer_than_they_do() -> None:
    rig = batching(devices=4, batch_max=8)
    for number in range(8):
        rig.submit(f"call-{number}", fixed(1), kind=GPU, service="judge", duration_s=0.01)
    assert batches(rig.finish("busy")) == {"call-0": 8}


def test_no_devices_are_spread_over_that_another_service_waits_for() -> None:
    rig = batching(devices=2, batch_max=8)
    rig.submit("other", fixed(1), kind=GPU, service="teacher", duration_s=30.0)
    for number in range(4):
        rig.submit(f"call-{number}", fixed(1), kind=GPU, service="judge", duration_s=30.0)
    assert batches(rig.finish("busy")) == {"call-0": 4, "other": 1}


def test_only_those_ride_that_admit_the_devices() -> None:
    rig = batching(devices=2, batch_max=8)
    for number in range(2):
        rig.submit(f"wide-{number}", fixed(2), kind=GPU, service="judge", duration_s=0.01)
        rig.submit(f"narrow-{number}", fixed(1), kind=GPU, service="judge", duration_s=0.01)
    assert batches(rig.finish("busy")) == {"narrow-0": 2}


def test_a_call_that_needs_more_than_devices_does_not_ride() -> None:
    rig = batching(devices=1, batch_max=8)
    rig.handle(PoolChanged(pool=Pool(kind="api", total=8)))
    rig.submit("call", fixed(1), kind=GPU, service="judge")
    for number in range(2):
        demand = Demand({GPU: fixed(1), "api": fixed(1)})
        rig.run(Submit(action=Action(id=f"more-{number}", demand=demand, service="judge")))
    assert batches(rig.finish("busy")) == {"call": 1}


# ---- adaptive: restoring ahead ----------------------------------------------------------------------------------


def restores(effects: list[Effect]) -> list[tuple[str, tuple[int, ...]]]:
    return [(effect.service, effect.devices) for effect in effects if isinstance(effect, Restore)]


def called(rig: Rig, service: str, times: int, restore_s: float = 0.5) -> list[Effect]:
    """What the last of a number of calls left behind it, one after the other. A device has room for one service."""
    effects: list[Effect] = []
    for number in range(times):
        action = Action(id=f"{service}-{number}-{rig.now}", demand=Demand({GPU: fixed(1)}), service=service)
        cells = start_of(rig.handle(Submit(action=action))).grant.shares[0].cells
        there = [name for name, devices in residents_of(rig) if devices == cells]
        if service not in there:
            for other in there:
                rig.handle(Evicted(service=other, node="g0", devices=cells))
            rig.now += restore_s
        rig.handle(Started(action=action.id))
        rig.handle(Resident(service=service, node="g0", devices=cells))
        effects = rig.finish(action.id)
        rig.now += 1.0
    return effects


def residents_of(rig: Rig) -> list[tuple[str, tuple[int, ...]]]:
    known = rig.scheduler.residents
    return [(service, devices) for service, _ in known.services() for _, devices in known.locations(service)]


def test_an_idle_device_gets_back_what_is_called_most() -> None:
    rig = Rig("adaptive", gpu_node(1))
    assert restores(called(rig, "judge", 8)) == []
    assert restores(called(rig, "teacher", 1)) == [("judge", (0,))]


def test_services_that_are_called_alike_do_not_drive_each_other_out() -> None:
    rig = Rig("adaptive", gpu_node(1))
    for _ in range(4):
        assert restores(called(rig, "judge", 1)) == []
        assert restores(called(rig, "teacher", 1)) == []


def test_nothing_is_restored_ahead_where_the_next_action_would_wait_for_it() -> None:
    rig = Rig("adaptive", gpu_node(1))
    called(rig, "judge", 12, restore_s=20.0)
    assert restores(called(rig, "teacher", 1, restore_s=20.0)) == []


def test_what_waits_for_something_else_than_devices_is_restored_ahead() -> None:
    rig = Rig("adaptive", (*gpu_node(1), Pool(kind="api", total=1)))
    rig.submit("holds", fixed(1), kind="api")
    demand = Demand({GPU: fixed(1), "api": fixed(1)})
    effects = rig.run(Submit(action=Action(id="waits", demand=demand, service="judge")))
    assert restores(effects) == [("judge", (0,))]
    assert restores(rig.handle(Resident(service="judge", node="g0", devices=(0,)))) == []
    assert start_of(rig.finish("holds")).action.id == "waits"


def test_nothing_is_restored_onto_devices_that_an_action_waits_for() -> None:
    rig = Rig("adaptive", gpu_node(2))
    called(rig, "judge", 8)
    called(rig, "teacher", 1)
    rig.submit("one", fixed(1), kind=GPU, service="teacher")
    effects = rig.submit("both", fixed(2), kind=GPU)
    assert restores(effects) == []


def test_a_call_of_a_new_service_goes_where_the_least_is_lost() -> None:
    rig = Rig("adaptive", gpu_node(2))
    called(rig, "judge", 4)
    rig.submit("holds", fixed(1), kind=GPU, service="judge")
    called(rig, "teacher", 1)
    rig.finish("holds")
    assert sorted(residents_of(rig)) == [("judge", (0,)), ("teacher", (1,))]
    effects = rig.submit("new", fixed(1), kind=GPU, service="critic")
    assert start_of(effects).grant.shares[0].cells == (1,)


# ---- adaptive: calls of APIs ------------------------------------------------------------------------------------


def test_calls_of_an_api_keep_their_order_at_any_expected_duration() -> None:
    rig = Rig("adaptive", (Pool(kind="api", total=1),))
    rig.submit("under way", fixed(1), kind="api")
    rig.submit("long", fixed(1), kind="api", duration_s=10.0)
    rig.submit("short", fixed(1), kind="api", duration_s=0.1)
    rig.finish("under way")
    rig.finish("long")
    assert rig.starts == ["under way", "long", "short"]
