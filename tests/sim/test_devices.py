"""Devices in the simulator: memory as the live manager counts it, loads one after the other, batches."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.core.demand import GPU, Demand, fixed
from tangram.core.messages import Effect, Event, Evicted, Pool, Resident, Restore
from tangram.managers.models.placement import ServicePlacement
from tangram.sim.devices import SimulatedDevices
from tangram.sim.episode import ServiceModel, SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.simulate import simulate

NODE = Pool(kind=GPU, node="g0", total=2)


def service(name: str, *, memory_gib: float = 80.0, restore_s: float = 0.5, **fields: Any) -> ServiceModel:
    return ServiceModel(name=name, memory_gib=memory_gib, restore_s=restore_s, **fields)


def made(*services: ServiceModel) -> SimulatedDevices:
    return SimulatedDevices(services, (NODE,), 80.0)


def test_a_loaded_model_starts_at_once_and_evicts_nothing() -> None:
    devices = made(service("a"))
    assert devices.load("a", "g0", (0,), 0.0) == (0.5, [])
    assert devices.load("a", "g0", (0,), 1.0) == (0.0, [])


def test_a_call_that_arrives_during_a_load_waits_for_the_rest_of_it() -> None:
    devices = made(service("a"))
    devices.load("a", "g0", (0,), 0.0)
    assert devices.load("a", "g0", (0,), 0.3) == (pytest.approx(0.2), [])


def test_another_service_waits_for_the_load_that_is_under_way_and_then_for_its_own() -> None:
    devices = made(service("a"), service("b"))
    devices.load("a", "g0", (0,), 0.0)
    assert devices.load("b", "g0", (0,), 0.3) == (pytest.approx(0.7), [ServicePlacement("a", (0,))])
    assert devices.load("b", "g0", (1,), 0.3) == (pytest.approx(0.5), [])


def test_the_least_recently_used_goes_first() -> None:
    devices = made(*(service(name, memory_gib=40.0) for name in "abc"))
    devices.load("a", "g0", (0,), 0.0)
    devices.load("b", "g0", (0,), 1.0)
    devices.load("a", "g0", (0,), 2.0)
    assert devices.load("c", "g0", (0,), 3.0) == (0.5, [ServicePlacement("b", (0,))])


def test_a_load_is_news_once_and_when_it_is_done() -> None:
    devices = made(service("a"))
    devices.load("a", "g0", (0,), 0.0)
    assert [devices.take_loaded("a", "g0", (0,), now) for now in (0.4, 0.5, 0.6)] == [False, True, False]


def test_a_node_that_is_gone_has_nothing_loaded_and_one_that_grew_keeps_it() -> None:
    devices = made(service("a"))
    devices.load("a", "g0", (0,), 0.0)
    devices.grow(Pool(kind=GPU, node="g0", total=4))
    assert devices.load("a", "g0", (0,), 1.0) == (0.0, [])
    assert devices.load("a", "g0", (3,), 1.0) == (0.5, [])
    devices.clear("g0")
    assert devices.load("a", "g0", (0,), 2.0) == (0.5, [])


# ---- in a simulation --------------------------------------------------------------------------------------------


class Recorder(list[Event | Effect]):
    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        self.extend((event, *effects))

    def places(self) -> list[str]:
        """What was loaded and evicted, in order."""
        signs = {Resident: "+", Evicted: "-"}
        return [f"{signs[type(m)]}{m.service} {m.devices[0]}" for m in self if isinstance(m, Resident | Evicted)]


def calls(*names: str, think_s: float = 5.0, work_s: float = 1.0) -> SimEpisode:
    """One after the other."""
    steps = [SimStep(kind="ask", demand=Demand({GPU: fixed(1)}), service=name, work_s=work_s) for name in names]
    return SimEpisode(id="a", run="r", task="", turns=tuple(SimTurn(think_s=think_s, steps=(step,)) for step in steps))


def test_an_idle_device_gets_back_what_is_called_most_before_it_is_called() -> None:
    recorder = Recorder()
    work = Workload(
        name="test", seed=0, episodes=(calls(*"a" * 16, "b", "a", think_s=1.0),), services=(service("a"), service("b"))
    )
    result = simulate(work, "adaptive", (Pool(kind=GPU, node="g0", total=1),), observer=recorder)
    assert [row.overhead_s for row in result.rows] == [0.5, *[0.0] * 15, 0.5, 0.0]
    assert [message.service for message in recorder if isinstance(message, Restore)] == ["a"]
    assert recorder.places() == ["+a 0", "-a 0", "+b 0", "-b 0", "+a 0"]


@pytest.mark.parametrize(("growth", "makespan_s"), [(0.0, 2.5), (0.5, 3.5), (1.0, 5.5)])
def test_calls_that_share_a_batch_take_as_long_as_the_batch(growth: float, makespan_s: float) -> None:
    ask = SimStep(kind="ask", demand=Demand({GPU: fixed(1)}), service="a", work_s=1.0)
    episodes = tuple(
        SimEpisode(id=f"e{n}", run="r", task="", turns=(SimTurn(think_s=0.0, steps=(ask,)),)) for n in range(5)
    )
    batched = service("a", batch_max=4, batch_growth=growth)
    work = Workload(name="test", seed=0, episodes=episodes, services=(batched,))
    result = simulate(work, "adaptive", (Pool(kind=GPU, node="g0", total=1),))
    assert result.makespan_s == pytest.approx(makespan_s), "the restore, one alone, and four together"
    assert [row.ended_at for row in result.rows[1:]] == pytest.approx([makespan_s] * 4)
