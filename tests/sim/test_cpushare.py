"""The division of a node's cores: exact against a naive fluid model, fair, conserving and reproducible."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.core.speedup import RIGID, Amdahl, PowerLaw, Speedup
from tangram.errors import InvariantError
from tangram.sim import cpushare
from tangram.sim.cpushare import CpuShare, CpuUsage, core_seconds, full_speed, shape

CLOSE = 1e-6
NEAR = 1e-4


@dataclass
class Flow:
    """One action of the naive model."""

    work: float
    demand: float
    weight: float
    used: float = 0.0
    slowed: float = 0.0
    starved: float = 0.0
    """Seconds in which it surely had less than its weight and its demand ..."""
    borderline: float = 0.0
    """... and those in which rounding decides."""


@dataclass
class Fluid:
    """The naive model: rates by water-filling over all actions, every action integrated at every event."""

    capacity: float
    now: float = 0.0
    used: float = 0.0
    flows: dict[str, Flow] = field(default_factory=dict)

    def rates(self) -> dict[str, float]:
        """Give every action the fair share of what is left; one that needs less leaves the rest."""
        rates: dict[str, float] = {}
        room, open_flows = self.capacity, dict(self.flows)
        while open_flows:
            share = room / sum(flow.weight for flow in open_flows.values())
            settled = {key: flow.demand for key, flow in open_flows.items() if flow.demand <= share * flow.weight}
            if not settled:
                return rates | {key: share * flow.weight for key, flow in open_flows.items()}
            rates |= settled
            room = max(0.0, room - sum(settled.values()))
            open_flows = {key: flow for key, flow in open_flows.items() if key not in settled}
        return rates

    def advance(self, now: float) -> None:
        contended = sum(flow.demand for flow in self.flows.values()) > self.capacity
        for key, rate in self.rates().items():
            flow, elapsed = self.flows[key], now - self.now
            flow.work -= rate * elapsed
            flow.used += rate * elapsed
            flow.slowed += (1.0 - rate / flow.demand) * elapsed
            due = min(flow.weight, flow.demand)
            if rate < due * (1.0 - NEAR):
                flow.starved += elapsed
            elif rate < due * (1.0 + NEAR) and contended:
                flow.borderline += elapsed
        self.used += min(self.capacity, sum(flow.demand for flow in self.flows.values())) * (now - self.now)
        self.now = now

    def completions(self) -> dict[str, float]:
        """When each action would complete if nothing changed; at no speed, only what has no work left does."""
        due: dict[str, float] = {}
        for key, rate in self.rates().items():
            work = max(0.0, self.flows[key].work)
            due[key] = self.now + work / rate if rate else math.inf if work > CLOSE else self.now
        return due


def close(value: float, scale: float = 1.0) -> Any:
    return pytest.approx(value, rel=CLOSE, abs=CLOSE * max(1.0, abs(scale)))


class Pair:
    """The share and the naive model side by side; every step compares them."""

    def __init__(self, capacity: float) -> None:
        self.share = CpuShare(capacity)
        self.fluid = Fluid(capacity)
        self.log: list[tuple[float, str]] = []
        self.added = 0

    def add(self, work: float, demand: float, weight: float) -> None:
        key = f"a{self.added}"
        self.added += 1
        self.share.add(key, work, demand, weight, self.fluid.now)
        self.fluid.flows[key] = Flow(work, demand, weight)
        self.compare()

    def pick(self, index: int) -> str | None:
        keys = list(self.fluid.flows)
        return keys[index % len(keys)] if keys else None

    def remove(self, index: int) -> None:
        key = self.pick(index)
        if key is not None:
            self.settle(key)
            self.compare()

    def reconfigure(self, index: int, demand: float, weight: float, scale: float) -> None:
        key = self.pick(index)
        if key is not None:
            self.share.reconfigure(key, self.fluid.now, demand=demand, weight=weight, scale=scale)
            flow = self.fluid.flows[key]
            flow.work, flow.demand, flow.weight = flow.work * scale, demand, weight
            self.compare()

    def resize(self, capacity: float) -> None:
        self.share.set_capacity(capacity, self.fluid.now)
        self.fluid.capacity = capacity
        self.compare()

    def wait(self, elapsed: float) -> None:
        """Let time pass; what completes on the way is removed when it does."""
        until = self.fluid.now + elapsed
        while (due := self.share.next_completion()) is not None and due[0] <= until:
            self.complete(*due)
        self.advance(until)

    def drain(self) -> None:
        while (due := self.share.next_completion()) is not None:
            self.complete(*due)

    def complete(self, at: float, key: str) -> None:
        expected = self.fluid.completions()
        assert at == close(min(expected.values()), at)
        assert at == close(expected[key], at), "an action that completes later was named first"
        self.advance(at)
        self.log.append((at, key))
        assert self.settle(key).remaining_core_s == 0.0
        self.compare()

    def settle(self, key: str) -> CpuUsage:
        usage, flow = self.share.remove(key, self.fluid.now), self.fluid.flows.pop(key)
        assert usage.remaining_core_s == close(flow.work, flow.used)
        assert usage.used_core_s == close(flow.used)
        assert usage.slowed_s == close(flow.slowed, self.fluid.now)
        self.compare_starved(usage.starved_s, flow)
        return usage

    def compare_starved(self, starved_s: float, flow: Flow) -> None:
        tolerance = CLOSE * max(1.0, self.fluid.now)
        assert flow.starved - tolerance <= starved_s <= flow.starved + flow.borderline + tolerance

    def advance(self, now: float) -> None:
        self.fluid.advance(now)
        self.compare()

    def compare(self) -> None:
        now = self.fluid.now
        self.share.check(now)
        assert self.share.busy == close(sum(self.fluid.rates().values()))
        assert self.share.used_total(now) == close(self.fluid.used)
        for key, flow in self.fluid.flows.items():
            assert self.share.used(key, now) == close(flow.used)
            assert self.share.slowed_s(key, now) == close(flow.slowed, now)
            self.compare_starved(self.share.starved_s(key, now), flow)


# Round values make ties and shared ratios, the others make neither.
cores = st.one_of(st.sampled_from([0.1, 0.25, 0.5, 1.0, 2.0, 4.0]), st.floats(0.01, 16.0))
works = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.floats(0.0, 30.0))
capacities = st.one_of(st.sampled_from([0.0, 1.0, 4.0]), st.floats(0.05, 32.0))
indexes = st.integers(0, 50)
steps = st.one_of(
    st.tuples(st.just("add"), works, cores, cores),
    st.tuples(st.just("add"), works, cores, cores),
    st.tuples(st.just("remove"), indexes),
    st.tuples(st.just("reconfigure"), indexes, cores, cores, st.sampled_from([0.0, 0.5, 1.0, 1.7])),
    st.tuples(st.just("resize"), capacities),
    st.tuples(st.just("wait"), st.one_of(st.just(1.0), st.floats(0.0, 5.0))),
)


def play(capacity: float, script: list[tuple[object, ...]]) -> list[tuple[float, str]]:
    pair = Pair(capacity)
    for verb, *arguments in script:
        getattr(pair, str(verb))(*arguments)
    pair.drain()
    return pair.log


@settings(deadline=None, max_examples=300)
@given(capacities, st.lists(steps, max_size=40))
def test_every_completion_and_every_use_is_that_of_the_naive_fluid_model(
    capacity: float, script: list[tuple[object, ...]]
) -> None:
    play(capacity, script)


@settings(deadline=None, max_examples=50)
@given(capacities, st.lists(steps, max_size=30))
def test_the_same_calls_give_the_same_completions_to_the_last_bit(
    capacity: float, script: list[tuple[object, ...]]
) -> None:
    assert play(capacity, script) == play(capacity, script)


@settings(deadline=None, max_examples=100)
@given(st.floats(0.5, 16.0), st.lists(st.tuples(cores, cores), min_size=1, max_size=20))
def test_cores_are_work_conserving_and_no_action_gets_more_than_its_demand(
    capacity: float, shares: list[tuple[float, float]]
) -> None:
    share = CpuShare(capacity)
    for i, (demand, weight) in enumerate(shares):
        share.add(f"a{i}", 1e6, demand, weight, 0.0)
    assert share.busy == close(min(capacity, sum(demand for demand, _ in shares)))
    used = [share.used(f"a{i}", 1.0) for i in range(len(shares))]
    assert share.used_total(1.0) == close(share.busy)
    assert sum(used) == close(share.busy)
    for core_s, (demand, _) in zip(used, shares, strict=True):
        assert core_s <= demand * (1.0 + CLOSE)


@settings(deadline=None, max_examples=100)
@given(st.floats(0.5, 16.0), st.lists(st.tuples(cores, cores), min_size=1, max_size=20), st.floats(0.05, 0.99))
def test_an_action_that_wants_less_than_its_fair_share_is_never_slowed(
    capacity: float, others: list[tuple[float, float]], modesty: float
) -> None:
    share = CpuShare(capacity)
    fair = capacity * 1.0 / (1.0 + sum(weight for _, weight in others))
    share.add("modest", 1e6, fair * modesty, 1.0, 0.0)
    for i, (demand, weight) in enumerate(others):
        share.add(f"a{i}", 1e6, demand, weight, float(i))
    end = len(others) + 10.0
    assert share.slowed_s("modest", end) == close(0.0)
    assert share.used("modest", end) == close(fair * modesty * end)


def test_a_thousand_actions_and_ten_thousand_changes_stay_exact() -> None:
    """Long enough for the running sums to be recomputed and the heaps to be rebuilt several times."""
    rng = random.Random(7)
    share = CpuShare(300.0)
    names: list[str] = []
    now, most, contended = 0.0, 0, 0
    for i in range(4 * cpushare.RESUM_EVERY):
        while (due := share.next_completion()) is not None and due[0] <= now:
            share.remove(due[1], now)
            names.remove(due[1])
        demand = rng.choice([0.1, 0.7, 1.0, rng.uniform(0.05, 4.0)])
        if len(names) < 1000 * abs(math.sin(i / 2000)):
            share.add(f"a{i}", rng.expovariate(0.05), demand, rng.choice([0.1, 0.5, 1.0]), now)
            names.append(f"a{i}")
        elif names and rng.random() < 0.5:
            share.reconfigure(rng.choice(names), now, demand=demand, weight=0.3)
        elif names:
            share.remove(names.pop(rng.randrange(len(names))), now)
        most, contended = max(most, len(names)), contended + (share.busy == 300.0)
        due = share.next_completion()
        now = min(now + rng.expovariate(50.0), due[0] if due else math.inf)
        if i % 500 == 0:
            share.check(now)
    share.check(now)
    assert most > 900
    assert 1000 < contended < 4 * cpushare.RESUM_EVERY - 1000


def test_the_rounding_left_by_large_demands_vanishes_after_enough_changes() -> None:
    share = CpuShare(1e12)
    share.add("a", 1e6, 0.1, 1.0, 0.0)
    share.add("large", 1e6, 1e9, 1.0, 0.0)
    share.remove("large", 0.0)
    assert share.busy != 0.1
    for _ in range(cpushare.RESUM_EVERY):
        share.set_capacity(1e12, 0.0)
    assert share.busy == 0.1


def test_heaps_stay_as_small_as_what_runs() -> None:
    share = CpuShare(4.0)
    share.add("stays", 1e9, 1.0, 1.0, 0.0)
    for i in range(5000):
        share.add(f"a{i}", 1e6, 1.0, 1.0, float(i))
        share.add(f"b{i}", 1e6, 2.0 + i, 1.0, float(i))
        share.remove(f"a{i}", float(i))
        share.remove(f"b{i}", float(i))
    # An entry of a heap is more than 10 bytes; without clearing there would be 20,000 of them.
    assert len(pickle.dumps(share)) < 10 * 10 * cpushare.HEAP_SLACK


def test_alone_an_action_takes_exactly_its_work_over_its_demand() -> None:
    share = CpuShare(4.0)
    share.add("a", 0.3, 0.1, 0.7, 5.0)
    assert share.next_completion() == (5.0 + 0.3 / 0.1, "a")
    assert share.remove("a", 5.0 + 0.3 / 0.1) == CpuUsage(0.0, close(0.3), 0.0, 0.0)
    assert share.next_completion() is None
    assert share.busy == 0.0


def test_two_that_want_more_than_there_is_share_by_weight() -> None:
    share = CpuShare(3.0)
    share.add("light", 10.0, 3.0, 1.0, 0.0)
    share.add("heavy", 10.0, 3.0, 2.0, 0.0)
    assert share.next_completion() == (5.0, "heavy")
    assert share.used("light", 5.0) == close(5.0)
    assert share.slowed_s("light", 5.0) == close(5.0 * 2 / 3)
    assert share.remove("heavy", 5.0) == CpuUsage(0.0, close(10.0), close(5.0 / 3), 0.0)
    # The light one has the node to itself now: 5 core-seconds left on 3 cores.
    at, key = share.next_completion() or (0.0, "")
    assert (at, key) == (close(5.0 + 5.0 / 3), "light")


def test_what_a_modest_action_leaves_goes_to_the_rest_by_weight() -> None:
    share = CpuShare(10.0)
    share.add("modest", 100.0, 1.0, 5.0, 0.0)
    share.add("one", 100.0, 10.0, 1.0, 0.0)
    share.add("two", 100.0, 10.0, 2.0, 0.0)
    assert [share.used(key, 1.0) for key in ("modest", "one", "two")] == [close(1.0), close(3.0), close(6.0)]
    assert share.slowed_s("modest", 1.0) == 0.0


def test_of_those_that_complete_at_once_the_one_added_first_is_named_first() -> None:
    share = CpuShare(2.0)
    for key in ("c", "a", "b", "d"):
        share.add(key, 1.0, 1.0, 1.0, 0.0)
    order = []
    while (due := share.next_completion()) is not None:
        share.remove(due[1], due[0])
        order.append(due[1])
    assert order == ["c", "a", "b", "d"]


def test_a_change_of_configuration_converts_only_the_work_that_is_left() -> None:
    share = CpuShare(8.0)
    share.add("a", 10.0, 1.0, 1.0, 0.0)
    share.reconfigure("a", 4.0, demand=2.0, weight=1.0, scale=1.5)
    assert share.next_completion() == (4.0 + 6.0 * 1.5 / 2.0, "a")
    assert share.used("a", 8.5) == 4.0 + 9.0


def test_demands_that_fill_the_node_but_for_rounding_are_not_contention() -> None:
    share = CpuShare(64.0)
    for i in range(640):
        share.add(f"a{i}", 1.0, 0.1, 0.1, 0.0)
    assert share.slowed_s("a0", 5.0) == 0.0


def test_only_actions_below_their_weight_and_their_demand_starve() -> None:
    share = CpuShare(3.0)
    share.add("modest", 100.0, 0.2, 1.0, 0.0)
    share.add("greedy", 100.0, 4.0, 1.0, 0.0)
    share.add("wide", 100.0, 4.0, 1.0, 0.0)
    names = ("modest", "greedy", "wide")
    assert share.slowed_s("greedy", 10.0) > 5.0
    assert [share.starved_s(key, 10.0) for key in names] == [0.0, 0.0, 0.0], "slowed above what they reserved"
    share.set_capacity(1.0, 10.0)
    assert [share.starved_s(key, 14.0) for key in names] == [0.0, 4.0, 4.0], "0.4 cores each of one reserved"
    share.reconfigure("greedy", 14.0, demand=0.1, weight=1.0)
    assert [share.starved_s(key, 15.0) for key in names] == [0.0, 4.0, 5.0], "it could not use more"
    share.set_capacity(3.0, 15.0)
    assert share.remove("wide", 20.0).starved_s == 5.0


def test_reserves_that_fill_the_node_but_for_rounding_starve_no_action() -> None:
    share = CpuShare(6.4)
    for i in range(64):
        share.add(f"a{i}", 100.0, 1.0, 0.1, 0.0)
    assert share.slowed_s("a0", 5.0) > 4.0
    assert share.starved_s("a0", 5.0) == 0.0


def test_without_capacity_nothing_progresses_and_nothing_is_forgotten() -> None:
    share = CpuShare(1.0)
    share.add("a", 2.0, 1.0, 1.0, 0.0)
    share.set_capacity(0.0, 1.0)
    assert share.next_completion() is None
    share.set_capacity(1.0, 11.0)
    assert share.next_completion() == (close(12.0), "a")
    assert share.slowed_s("a", 12.0) == close(10.0)


def test_an_action_without_work_completes_at_once() -> None:
    share = CpuShare(1.0)
    share.add("a", 0.0, 1.0, 1.0, 3.0)
    assert share.next_completion() == (3.0, "a")


@pytest.mark.parametrize("capacity", [4.0, 1.0])
def test_time_that_goes_back_or_past_a_completion_is_a_bug(capacity: float) -> None:
    share = CpuShare(capacity)
    share.add("a", 1.0, 1.0, 1.0, 1.0)
    share.add("b", 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(InvariantError, match="time never goes back"):
        share.used_total(0.5)
    with pytest.raises(InvariantError, match="past its completion"):
        share.remove("a", 10.0)


def test_unknown_and_doubled_actions_and_impossible_numbers_are_bugs() -> None:
    share = CpuShare(1.0)
    share.add("a", 1.0, 1.0, 1.0, 0.0)
    with pytest.raises(InvariantError, match="already runs"):
        share.add("a", 1.0, 1.0, 1.0, 0.0)
    with pytest.raises(InvariantError, match="no action 'b'"):
        share.remove("b", 0.0)
    with pytest.raises(InvariantError, match="demand > 0"):
        share.add("b", 1.0, 0.0, 1.0, 0.0)
    with pytest.raises(InvariantError, match="demand > 0"):
        share.reconfigure("a", 0.0, demand=1.0, weight=math.nan)
    with pytest.raises(InvariantError, match="capacity"):
        share.set_capacity(-1.0, 0.0)
    share.check(0.0)


def test_check_finds_a_sum_that_went_wrong() -> None:
    share = CpuShare(1.0)
    share.add("a", 1.0, 0.5, 1.0, 0.0)
    share._demand += 0.1  # noqa: SLF001 - no public call makes it inconsistent
    with pytest.raises(InvariantError, match="demand"):
        share.check(0.0)


@pytest.mark.parametrize("speedup", [PowerLaw(1.0), RIGID, PowerLaw(0.7), Amdahl(0.9)])
@pytest.mark.parametrize("busy", [0.05, 0.8, 1.0])
@pytest.mark.parametrize(("width", "limit"), [(4.0, 8.0), (4.0, 4.0), (8.0, 3.0), (8.0, 1.5)])
def test_alone_an_elastic_action_runs_at_the_speed_of_the_narrower_of_width_and_limit(
    speedup: Speedup, busy: float, width: float, limit: float
) -> None:
    core_s, demand = shape(60.0, busy, speedup, width, limit)
    assert core_s / demand == close(60.0 / speedup.at(min(limit, width)))
    assert demand == close(busy * min(limit, width))


@pytest.mark.parametrize("busy", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0, 8.0])
def test_an_action_that_is_not_elastic_slows_when_its_limit_is_below_what_it_keeps_busy(
    busy: float, limit: float
) -> None:
    core_s, demand = shape(60.0, busy, RIGID, 1.0, limit)
    assert core_s == close(60.0 * busy), "its CPU work does not depend on the limit"
    assert demand == min(limit, busy)
    assert core_s / demand == close(60.0 * max(1.0, busy / limit))


def test_a_limit_below_one_core_slows_only_actions_that_need_more() -> None:
    assert shape(60.0, 1.0, PowerLaw(1.0), 4.0, 0.5) == (60.0, 0.5)
    assert shape(60.0, 0.1, PowerLaw(1.0), 4.0, 0.5) == (close(6.0), 0.1)


@settings(deadline=None)
@given(works, cores, cores, cores)
def test_a_shape_is_made_of_its_speed_and_its_demand(work_s: float, busy: float, width: float, limit: float) -> None:
    core_s, demand = shape(work_s, busy, PowerLaw(0.8), width, limit)
    speed = full_speed(width, limit, PowerLaw(0.8))
    assert demand == min(limit, busy * max(1.0, min(limit, width)))
    assert core_s == core_seconds(work_s, speed, busy * max(1.0, min(limit, width)))
    assert core_s / demand >= work_s / speed * (1.0 - CLOSE)


def test_a_resize_half_way_leaves_half_of_the_work_at_the_new_speed() -> None:
    speedup = Amdahl(0.9)
    narrow, narrow_demand = shape(60.0, 1.0, speedup, 8.0, 2.0)
    wide, wide_demand = shape(60.0, 1.0, speedup, 8.0, 8.0)
    share = CpuShare(16.0)
    share.add("a", narrow, narrow_demand, 2.0, 0.0)
    half = 30.0 / speedup.at(2.0)
    share.reconfigure("a", half, demand=wide_demand, weight=2.0, scale=wide / narrow)
    assert share.next_completion() == (close(half + 30.0 / speedup.at(8.0)), "a")
