"""Models on demand: what is loaded where and when, what is evicted for it, and that every call settles once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tangram.core.action import Action, Status, Usage
from tangram.core.demand import CPU, GPU, Demand, cores, fixed, one_of
from tangram.core.messages import (
    Cancel,
    Effect,
    Event,
    Finished,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Resident,
    Settle,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    WakeAt,
)
from tangram.errors import InvalidConfig
from tangram.sim.baselines import ATTEMPTS_MAX
from tangram.sim.episode import ServiceModel, SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.faults import InjectedFault, draw_faults
from tangram.sim.on_demand import OnDemand, OnDemandConfig
from tangram.sim.simulate import simulate
from tangram.sim.workloads import build

CONFIG = OnDemandConfig(devices_per_instance=4, storage_gib_s=10.0, host_gib_s=100.0)
"""A model of 100 GiB takes 10 s from storage and 1 s from host memory."""


def services(names: str = "xyz", degrees: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[ServiceModel, ...]:
    return tuple(ServiceModel(name=name, memory_gib=100.0, restore_s=0.5, degrees=degrees) for name in names)


def nodes(*totals: int) -> tuple[Pool, ...]:
    return tuple(Pool(kind=GPU, node=f"g{number}", total=total) for number, total in enumerate(totals))


class Bed:
    """The baseline alone: passes it events and records its effects."""

    def __init__(self, *totals: int, config: OnDemandConfig = CONFIG, names: str = "xyz") -> None:
        self.baseline = OnDemand(nodes(*totals), services(names), config)
        self.started: dict[str, tuple[float, str, tuple[int, ...]]] = {}
        """When and where each call was started last."""
        self.settled: dict[str, Any] = {}
        self.wakes: list[float] = []
        self.now = 0.0

    def send(self, event: Event, now: float) -> list[Effect]:
        """Sends Ticks that are due before it."""
        while self.wakes and min(self.wakes) <= now:
            at = min(self.wakes)
            self.wakes.remove(at)
            self._handle(Tick(), at)
        return self._handle(event, now)

    def _handle(self, event: Event, now: float) -> list[Effect]:
        self.now = now
        effects = self.baseline.handle(event, now)
        for effect in effects:
            if isinstance(effect, Start):
                (share,) = effect.grant.shares
                self.started[effect.action.id] = (now, effect.grant.node, share.cells)
            elif isinstance(effect, Settle):
                assert effect.outcome.action not in self.settled, "settled twice"
                self.settled[effect.outcome.action] = effect.outcome
            elif isinstance(effect, WakeAt):
                self.wakes.append(effect.at)
        for effect in effects:
            if isinstance(effect, Start):
                self.baseline.handle(Started(action=effect.action.id), now)
        return effects

    def submit(self, action: str, service: str, now: float) -> list[Effect]:
        return self.send(Submit(action=Action(id=action, demand=Demand({GPU: one_of(1, 2, 4)}), service=service)), now)

    def finish(self, action: str, now: float) -> list[Effect]:
        return self.send(Finished(action=action), now)

    def wait(self, now: float) -> None:
        self.send(Tick(), now)

    def started_at(self, action: str) -> float:
        return self.started[action][0]


# ---- loads ------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_from_storage_once_per_node_and_then_from_host_memory() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    assert bed.started["x1"] == (10.0, "g0", (0, 1, 2, 3))
    bed.finish("x1", 11.0)
    bed.submit("y1", "y", 11.0)
    bed.wait(21.0)
    bed.finish("y1", 22.0)
    bed.submit("x2", "x", 22.0)
    bed.wait(23.0)
    assert (bed.started_at("y1"), bed.started_at("x2")) == (21.0, 23.0)


def test_a_second_instance_on_a_node_is_not_ready_before_the_checkpoint_is_read() -> None:
    bed = Bed(8)
    bed.submit("x1", "x", 0.0)
    bed.submit("x2", "x", 4.0)
    bed.wait(10.0)
    assert (bed.started_at("x1"), bed.started_at("x2")) == (10.0, 10.0)


def test_the_call_that_waits_for_a_load_has_it_as_overhead_and_the_next_one_has_none() -> None:
    bed = Bed(4, config=OnDemandConfig(storage_gib_s=10.0, start_s=2.0, target=2))
    bed.submit("x1", "x", 0.0)
    bed.submit("x2", "x", 1.0)
    bed.wait(12.0)
    bed.finish("x1", 15.0)
    bed.send(Finished(action="x2", usage=Usage(overhead_s=0.5)), 17.0)
    first, second = bed.settled["x1"], bed.settled["x2"]
    assert (first.waiting_s, first.overhead_s, first.execution_s) == (0.0, 12.0, 3.0)
    assert (second.waiting_s, second.overhead_s, second.execution_s) == (14.0, 0.5, 1.5)


def test_a_call_finds_its_model_where_an_earlier_one_left_it() -> None:
    bed = Bed(8)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    bed.finish("x1", 11.0)
    (start,) = bed.submit("x2", "x", 500.0)
    assert isinstance(start, Start) and bed.started["x2"][2] == bed.started["x1"][2]


def test_an_instance_goes_to_the_node_that_has_its_model_in_host_memory() -> None:
    bed = Bed(4, 4)
    bed.submit("y1", "y", 0.0)
    bed.wait(10.0)
    bed.finish("y1", 11.0)
    bed.submit("x1", "x", 12.0)
    bed.wait(22.0)
    bed.finish("x1", 23.0)
    bed.submit("y2", "y", 30.0)
    bed.submit("y3", "y", 30.0)  # a second instance takes the place of x
    bed.wait(40.0)
    bed.finish("y2", 41.0)
    bed.finish("y3", 42.0)
    assert [bed.started[name][1] for name in ("y1", "x1", "y2", "y3")] == ["g0", "g1", "g0", "g1"]
    bed.submit("x2", "x", 50.0)
    bed.wait(60.0)
    assert bed.started["x2"] == (51.0, "g1", (0, 1, 2, 3)), "where y was used last, but x is read already"


def test_a_model_has_as_many_devices_as_a_static_one_or_the_nearest_number() -> None:
    baseline = OnDemand(nodes(8), services("x", degrees=(1, 2)), CONFIG)
    ask = Action(id="a", demand=Demand({GPU: fixed(2)}), service="x")
    baseline.handle(Submit(action=ask), 0.0)
    (start,) = baseline.handle(Tick(), 10.0)
    assert isinstance(start, Start) and start.grant.width == 2


# ---- waiting calls ----------------------------------------------------------------------------------------------


def test_calls_of_a_model_are_served_in_order_of_arrival() -> None:
    bed = Bed(4)
    for number in range(3):
        bed.submit(f"x{number}", "x", float(number))
    bed.wait(10.0)
    for number in range(3):
        bed.finish(f"x{number}", 11.0 + number)
    assert [bed.started_at(f"x{number}") for number in range(3)] == [10.0, 11.0, 12.0]


@pytest.mark.parametrize(("target", "instances"), [(1, 3), (2, 2), (3, 1)])
def test_the_number_of_instances_of_a_model_grows_with_its_calls(target: int, instances: int) -> None:
    bed = Bed(8, 8, config=OnDemandConfig(storage_gib_s=10.0, target=target))
    for number in range(3):
        bed.submit(f"x{number}", "x", 0.0)
    bed.wait(10.0)
    assert len(bed.started) == instances


def test_a_model_gets_no_more_instances_than_are_allowed() -> None:
    bed = Bed(8, 8, config=OnDemandConfig(storage_gib_s=10.0, instances_max=2))
    for number in range(4):
        bed.submit(f"x{number}", "x", 0.0)
    bed.wait(10.0)
    assert len(bed.started) == 2


def test_what_loads_for_one_call_serves_another_if_that_has_waited_longer() -> None:
    bed = Bed(8)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    bed.submit("x2", "x", 11.0)  # an instance is loaded for it, from host memory, until 12
    bed.finish("x1", 11.5)
    assert bed.started_at("x2") == 11.5, "the other instance was free first"
    (start,) = bed.submit("x3", "x", 13.0)
    assert isinstance(start, Start) and bed.started["x3"][2] == (4, 5, 6, 7)


def test_devices_go_to_the_model_with_the_longest_waiting_call() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    bed.submit("z1", "z", 11.0)
    bed.submit("y1", "y", 12.0)
    bed.finish("x1", 13.0)
    bed.wait(23.0)
    assert list(bed.started) == ["x1", "z1"] and bed.started_at("z1") == 23.0


def test_the_released_router_hands_out_one_call_per_model_and_second() -> None:
    bed = Bed(8, 8, config=OnDemandConfig(storage_gib_s=10.0, turn_s=1.0))
    for name in ("x1", "x2", "x3", "y1"):
        bed.submit(name, name[0], 0.0)
    bed.wait(20.0)
    assert {name: bed.started_at(name) for name in bed.started} == {"x1": 10.0, "y1": 10.0, "x2": 11.0, "x3": 12.0}


# ---- eviction ---------------------------------------------------------------------------------------------------


def test_the_least_recently_used_idle_model_is_evicted() -> None:
    bed = Bed(8)
    bed.submit("x1", "x", 0.0)
    bed.submit("y1", "y", 0.0)
    bed.wait(10.0)
    bed.finish("y1", 11.0)
    bed.finish("x1", 12.0)
    bed.submit("z1", "z", 13.0)
    bed.wait(23.0)
    assert bed.started["z1"][2] == bed.started["y1"][2]
    (start,) = bed.submit("x2", "x", 24.0)
    assert isinstance(start, Start), "the other one is still there"


def test_neither_what_serves_nor_what_loads_is_evicted() -> None:
    bed = Bed(8)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    bed.submit("y1", "y", 10.0)  # loads until 20
    assert bed.submit("z1", "z", 11.0) == [], "there is no place for it"
    bed.wait(20.0)
    bed.finish("y1", 30.0)
    bed.wait(40.0)
    assert bed.started_at("y1") == 20.0
    assert bed.started["z1"] == (40.0, "g0", bed.started["y1"][2])
    assert "x1" not in bed.settled, "it was served all the time"


def test_a_loading_model_is_not_evicted_even_without_waiting_calls() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.send(Cancel(action="x1"), 1.0)
    assert bed.submit("y1", "y", 2.0) == []
    bed.wait(20.0)
    assert bed.started["y1"] == (20.0, "g0", (0, 1, 2, 3)), "its load began when the other one had ended"


def test_a_model_with_waiting_calls_is_not_evicted() -> None:
    bed = Bed(4, config=OnDemandConfig(storage_gib_s=10.0, turn_s=1.0))
    bed.submit("x1", "x", 0.0)
    bed.submit("x2", "x", 0.0)
    bed.wait(10.0)
    bed.finish("x1", 10.2)
    bed.submit("y1", "y", 10.5)
    bed.wait(11.0)
    assert bed.started_at("x2") == 11.0


def test_a_wide_instance_evicts_all_that_is_in_its_place() -> None:
    wide = ServiceModel(name="w", memory_gib=100.0, restore_s=0.5, degrees=(8,))
    baseline = OnDemand(nodes(8), (*services("xy"), wide), CONFIG)
    bed = Bed(8)
    bed.baseline = baseline
    bed.submit("x1", "x", 0.0)
    bed.submit("y1", "y", 0.0)
    bed.wait(10.0)
    bed.finish("x1", 11.0)
    bed.submit("w1", "w", 12.0)
    bed.wait(13.0)
    assert "w1" not in bed.started, "y is still in its place"
    bed.finish("y1", 14.0)
    bed.wait(24.0)
    assert bed.started["w1"] == (24.0, "g0", tuple(range(8)))


@pytest.mark.parametrize("seed", range(6))
def test_no_device_has_two_calls_or_two_models_and_every_call_settles_once(seed: int) -> None:
    work = build("teachers", batch=120, seed=seed, services=5)
    held: dict[tuple[str, int], str] = {}
    devices_of: dict[str, list[tuple[str, int]]] = {}
    settled: Counter[str] = Counter()

    def observe(now: float, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, Finished | StartFailed):
            for device in devices_of.pop(event.action, []):
                del held[device]
        if isinstance(event, NodeChanged) and event.state is NodeState.DOWN:
            for action in [name for name, devices in devices_of.items() if devices[0][0] == event.node]:
                for device in devices_of.pop(action):
                    del held[device]
        for effect in effects:
            if isinstance(effect, Settle):
                settled[effect.outcome.action] += 1
            if isinstance(effect, Start):
                (share,) = effect.grant.shares
                devices_of[effect.action.id] = devices = [(effect.grant.node, cell) for cell in share.cells]
                for device in devices:
                    assert device not in held, f"{device} has {held[device]} and {effect.action.id}"
                    held[device] = effect.action.id

    faults = draw_faults(seed, until_s=500.0, count=12, kinds=("node_loss", "crash", "start_failure", "slow_start"))
    result = simulate(work, "on-demand", nodes(8, 8), faults=faults, observer=observe)
    assert len(result.episode_ends) == len(work.episodes)
    assert set(settled.values()) == {1} and len(settled) == len(result.rows)
    for row in result.completed:
        assert row.waiting_s + row.overhead_s + row.execution_s == pytest.approx(row.act_s)
        assert min(row.waiting_s, row.overhead_s) >= -1e-9


# ---- cancelling and failing -------------------------------------------------------------------------------------


def test_a_call_that_waits_is_cancelled_at_once_and_what_loads_for_it_stays() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.send(Cancel(action="x1"), 4.0)
    assert (bed.settled["x1"].status, bed.settled["x1"].waiting_s) == (Status.CANCELLED, 4.0)
    bed.submit("x2", "x", 9.0)
    bed.wait(10.0)
    assert list(bed.started) == ["x2"] and bed.started_at("x2") == 10.0


def test_a_call_that_runs_is_stopped_and_settles_when_it_has_ended() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.submit("x2", "x", 0.0)
    bed.wait(10.0)
    (stop,) = bed.send(Cancel(action="x1"), 11.0)
    assert isinstance(stop, Stop) and bed.send(Cancel(action="x1"), 11.0) == [], "once is enough"
    assert "x2" not in bed.started, "its devices are not free before it has ended"
    bed.finish("x1", 12.0)
    assert bed.settled["x1"].status is Status.CANCELLED and bed.started_at("x2") == 12.0


def test_a_start_that_fails_is_tried_again_and_given_up_in_the_end() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.submit("x2", "x", 0.0)
    bed.wait(10.0)
    for _ in range(ATTEMPTS_MAX - 1):
        (start,) = bed.send(StartFailed(action="x1", reason="no such image"), 11.0)
        assert isinstance(start, Start) and start.action.id == "x1", "before those that came later"
    bed.send(StartFailed(action="x1", reason="no such image"), 12.0)
    assert (bed.settled["x1"].status, bed.settled["x1"].attempts) == (Status.LOST, ATTEMPTS_MAX)
    assert bed.started_at("x2") == 12.0, "its devices are free"


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_start_that_cannot_help_or_is_no_longer_wanted_is_not_tried_again(cancelled: bool) -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    if cancelled:
        bed.send(Cancel(action="x1"), 11.0)
    bed.send(StartFailed(action="x1", reason="no such image", retry=cancelled), 11.0)
    assert bed.settled["x1"].status is (Status.CANCELLED if cancelled else Status.LOST)


def test_a_call_that_is_lost_leaves_its_model_loaded() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    bed.send(Finished(action="x1", lost="its process was killed"), 11.0)
    bed.submit("x2", "x", 12.0)
    assert bed.settled["x1"].status is Status.LOST and bed.started_at("x2") == 12.0


# ---- nodes ------------------------------------------------------------------------------------------------------


def test_a_node_that_goes_down_takes_its_calls_its_models_and_its_host_copies() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.submit("x2", "x", 0.0)
    bed.wait(10.0)
    bed.send(NodeChanged(node="g0", state=NodeState.DOWN), 11.0)
    assert bed.settled["x1"].status is Status.LOST and "x2" not in bed.started
    bed.send(NodeChanged(node="g0", state=NodeState.UP), 20.0)
    bed.wait(30.0)
    assert bed.started_at("x2") == 30.0, "from storage again"


def test_what_was_loading_on_a_lost_node_is_loaded_on_another() -> None:
    bed = Bed(4, 4)
    bed.submit("x1", "x", 0.0)
    bed.send(NodeChanged(node="g0", state=NodeState.DOWN), 5.0)
    bed.wait(15.0)
    assert bed.started["x1"] == (15.0, "g1", (0, 1, 2, 3))


def test_a_draining_node_finishes_what_it_has_and_takes_no_more() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    bed.send(NodeChanged(node="g0", state=NodeState.DRAINING), 11.0)
    bed.finish("x1", 12.0)
    assert bed.settled["x1"].status is Status.SUCCEEDED
    assert bed.submit("x2", "x", 13.0) == []
    bed.send(NodeChanged(node="g0", state=NodeState.UP), 14.0)
    assert bed.started_at("x2") == 14.0


def test_devices_that_go_take_no_calls_and_devices_that_come_do() -> None:
    bed = Bed(4)
    bed.submit("x1", "x", 0.0)
    bed.wait(10.0)
    bed.finish("x1", 11.0)
    bed.send(PoolChanged(pool=Pool(kind=GPU, node="g0", total=0)), 12.0)
    assert bed.submit("x2", "x", 13.0) == []
    bed.send(PoolChanged(pool=Pool(kind=GPU, node="g0", total=4)), 14.0)
    assert bed.started_at("x2") == 14.0
    bed.send(PoolChanged(pool=Pool(kind=GPU, node="g1", total=4)), 15.0)
    bed.submit("y1", "y", 15.0)
    bed.wait(25.0)
    assert bed.started["y1"][1] == "g1"


# ---- in the engine ----------------------------------------------------------------------------------------------


def call(service: str, work_s: float) -> SimTurn:
    step = SimStep(kind="teacher", demand=Demand({GPU: one_of(1, 2, 4)}), service=service, work_s=work_s)
    return SimTurn(think_s=0.0, steps=(step,))


def test_the_engine_adds_no_restore_to_a_load() -> None:
    episodes = tuple(
        SimEpisode(id=f"{name}{number}", run="r", task="", start_s=20.0 * number, turns=(call(name, 4.0),))
        for number, name in enumerate("xyx")
    )
    work = Workload(name="test", seed=0, episodes=episodes, services=services("xy"))
    loads = []

    def observe(now: float, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, Resident):
            loads.append(event.service)

    result = simulate(work, "on-demand", nodes(4), on_demand=CONFIG, observer=observe)
    assert loads == ["x", "y", "x"], "and sees every one of them"
    assert [(row.overhead_s, row.execution_s, row.act_s) for row in result.rows] == [
        (10.0, 4.0, 14.0),
        (10.0, 4.0, 14.0),
        (1.0, 4.0, 5.0),
    ]


def test_a_lost_node_in_the_engine_loses_the_call_on_it_alone() -> None:
    episodes = tuple(SimEpisode(id=f"e{n}", run="r", task="", turns=(call("x", 8.0),)) for n in range(3))
    work = Workload(name="test", seed=0, episodes=episodes, services=services("x"))
    fault = InjectedFault(at=12.0, kind="node_loss", pick=0.0, lasts_s=6.0)
    result = simulate(work, "on-demand", nodes(4, 4), on_demand=CONFIG, faults=(fault,))
    assert {row.id: (row.status, row.ended_at) for row in result.rows} == {
        "e0.0.0": ("lost", 12.0),
        "e1.0.0": ("succeeded", 18.0),
        "e2.0.0": ("succeeded", 26.0),
    }


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action",
    [
        Action(id="a", demand=Demand({CPU: cores(1)}), sandbox="s"),
        Action(id="a", demand=Demand({"search": fixed(1)})),
        Action(id="a", demand=Demand({GPU: fixed(1)}), service="unknown"),
    ],
)
def test_anything_but_a_call_to_a_known_model_is_refused(action: Action) -> None:
    (refuse,) = Bed(4).send(Submit(action=action), 0.0)
    assert isinstance(refuse, Refuse) and refuse.action == "a"


def test_a_model_that_fits_no_node_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least 4 on one node for x"):
        OnDemand(nodes(2, 2), services("x", degrees=(4,)), CONFIG)


@pytest.mark.parametrize(
    "fields",
    [
        {"devices_per_instance": 0},
        {"target": 0},
        {"instances_max": 1.5},
        {"storage_gib_s": 0.0},
        {"host_gib_s": float("inf")},
        {"start_s": -1.0},
        {"turn_s": float("nan")},
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(fields))):
        OnDemandConfig(**fields)
