"""Baselines: pods that are kept for a whole trajectory, services on devices of their own, calls without control."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.core.demand import CPU, GPU, Demand, cores, fixed, learned, one_of
from tangram.core.messages import Pool, cpu_node
from tangram.core.speedup import LINEAR
from tangram.errors import InvalidConfig
from tangram.sim.baselines import API_BACKOFF_S, API_RETRIES_MAX, PodsConfig
from tangram.sim.episode import ApiModel, Episode, ServiceModel, Step, Turn, Workload
from tangram.sim.result import Result
from tangram.sim.simulate import simulate

LEARNED = Demand({CPU: learned()})


def call(work_s: float = 10.0, demand: Demand = LEARNED, **fields: Any) -> Step:
    return Step(kind="exec", demand=demand, work_s=work_s, **fields)


def turn(*steps: Step, think_s: float = 0.0) -> Turn:
    return Turn(think_s=think_s, steps=steps)


def episode(name: str, *turns: Turn, **fields: Any) -> Episode:
    return Episode(id=name, run="r", task="", turns=turns, memory=fields.pop("memory", 100), **fields)


def workload(*episodes: Episode, **fields: Any) -> Workload:
    return Workload(name="test", seed=0, episodes=episodes, **fields)


def spans(result: Result) -> dict[str, tuple[float, float]]:
    return {row.id: (row.submitted_at, row.ended_at) for row in result.rows}


# ---- pods -------------------------------------------------------------------------------------------------------


def test_a_pod_keeps_its_cores_while_the_trajectory_thinks() -> None:
    work = workload(
        episode("a", turn(call()), turn(call(), think_s=100.0)),
        episode("b", turn(call())),
    )
    result = simulate(work, "pods:1", cpu_node("n0", 1, 1.0))
    assert spans(result) == {"a.0.0": (0.0, 10.0), "a.1.0": (110.0, 120.0), "b.0.0": (0.0, 130.0)}
    scheduled = simulate(work, "adaptive", cpu_node("n0", 1, 1.0))
    assert spans(scheduled)["b.0.0"][1] <= 20.0, "by action the second runs while the first one thinks"


def test_waiting_for_admission_counts_as_waiting_and_pods_come_in_order_of_arrival() -> None:
    work = workload(*[episode(f"e{number}", turn(call()), start_s=float(number)) for number in range(3)])
    result = simulate(work, "pods:1", cpu_node("n0", 1, 1.0))
    assert [row.id for row in result.rows] == ["e0.0.0", "e1.0.0", "e2.0.0"]
    assert [row.waiting_s for row in result.rows] == [0.0, 9.0, 18.0]


def test_pods_with_half_a_core_each_share_the_cores_of_their_node() -> None:
    work = workload(*[episode(f"e{number}", turn(call())) for number in range(4)])
    result = simulate(work, "pods:0.5", cpu_node("n0", 2, 1.0))
    assert [row.ended_at for row in result.rows] == pytest.approx([20.0] * 4), "four on two cores"
    alone = simulate(workload(episode("e", turn(call()))), "pods:0.5", cpu_node("n0", 2, 1.0))
    assert alone.rows[0].ended_at == 10.0, "a request is no limit"


def test_inside_its_pod_an_action_may_be_as_wide_as_the_limit() -> None:
    elastic = Demand({CPU: cores(1, 8)}, LINEAR)
    result = simulate(
        workload(episode("a", turn(call(8.0, elastic, speedup=LINEAR)))), "pods:0.5", cpu_node("n0", 8, 1.0)
    )
    assert (result.rows[0].width, result.rows[0].ended_at) == (4.0, 2.0)


def test_a_pod_goes_to_the_node_with_the_most_free_cores_that_has_the_memory() -> None:
    work = workload(episode("a", turn(call()), memory=600), episode("b", turn(call()), memory=100))
    result = simulate(work, "pods:1", (*cpu_node("n0", 2, 0.5), *cpu_node("n1", 1, 1.0)))
    assert [row.node for row in result.rows] == ["n1", "n0"]


def test_a_pod_that_does_not_fit_holds_up_those_behind_it() -> None:
    work = workload(
        episode("a", turn(call()), memory=600),
        episode("b", turn(call()), memory=600),
        episode("c", turn(call()), memory=100),
    )
    result = simulate(work, "pods:0.5", cpu_node("n0", 4, 1.0))
    assert spans(result)["c.0.0"] == (0.0, 20.0)


def test_cpu_without_a_sandbox_has_no_pod_to_run_in() -> None:
    result = simulate(workload(episode("a", turn(call()), memory=0)), "pods:0.5", cpu_node("n0", 4, 1.0))
    assert [row.status for row in result.rows] == ["refused"]


def test_a_request_above_the_limit_or_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"cores above 0, at most the limit of 4"):
        PodsConfig(request=5.0)
    for name in ("pods:many", "pods:0", "nothing"):
        with pytest.raises(InvalidConfig):
            simulate(workload(), name, cpu_node("n0", 4, 1.0))


# ---- services on devices of their own ---------------------------------------------------------------------------


def test_a_service_serves_one_call_at_a_time_per_replica_in_order_of_arrival() -> None:
    services = tuple(ServiceModel(name=name, memory_gib=10.0, restore_s=0.0, degrees=(1, 2, 4)) for name in "xy")
    ask = call(8.0, Demand({GPU: one_of(1, 2, 4)}, LINEAR), service="x", speedup=LINEAR)
    work = workload(*[episode(f"e{number}", turn(ask), memory=0) for number in range(3)], services=services)
    result = simulate(work, "pods:0.5", (Pool(kind=GPU, node="g0", total=8),))
    assert [row.ended_at for row in result.rows] == [2.0, 4.0, 6.0], "the devices of y stay idle"
    pooled = simulate(work, "fixed:4", (Pool(kind=GPU, node="g0", total=8),))
    assert [row.ended_at for row in pooled.rows] == [2.0, 2.0, 4.0]


def test_devices_are_dealt_out_to_the_services_in_turn() -> None:
    services = tuple(ServiceModel(name=name, memory_gib=10.0, restore_s=0.0, degrees=(2,)) for name in "xy")
    ask = call(8.0, Demand({GPU: fixed(2)}), service="x")
    work = workload(*[episode(f"e{number}", turn(ask), memory=0) for number in range(3)], services=services)
    result = simulate(work, "pods:0.5", (Pool(kind=GPU, node="g0", total=8),))
    assert [row.ended_at for row in result.rows] == [8.0, 8.0, 16.0], "two replicas each"


def test_too_few_devices_for_all_services_are_refused() -> None:
    services = tuple(ServiceModel(name=name, memory_gib=10.0, restore_s=0.0, degrees=(4,)) for name in "xyz")
    with pytest.raises(InvalidConfig, match="at least 12 for 3 services"):
        simulate(workload(services=services), "pods:0.5", (Pool(kind=GPU, node="g0", total=8),))


# ---- calls without control --------------------------------------------------------------------------------------


def test_a_refused_call_is_tried_again_after_growing_pauses() -> None:
    api = ApiModel(name="search", concurrency=1)
    ask = call(5.0, Demand({"search": fixed(1)}))
    work = workload(episode("a", turn(ask, ask), memory=0), apis=(api,))
    result = simulate(work, "pods:0.5", (Pool(kind="search", total=1),))
    assert [row.status for row in result.rows] == ["succeeded", "succeeded"]
    # Refused at 0, at about 2 and let in at about 6, each refusal taking 0.05 s.
    assert result.rows[1].ended_at == pytest.approx(0.05 + API_BACKOFF_S + 0.05 + 2 * API_BACKOFF_S + 5.0)


def test_a_call_that_is_refused_too_often_is_lost_with_its_trajectory() -> None:
    api = ApiModel(name="search", concurrency=1)
    ask = call(1000.0, Demand({"search": fixed(1)}))
    work = workload(episode("a", turn(ask, ask), memory=0), apis=(api,))
    result = simulate(work, "pods:0.5", (Pool(kind="search", total=1),))
    assert [row.status for row in result.rows] == ["lost", "succeeded"]
    assert result.episodes_failed == 1
    pauses = sum(API_BACKOFF_S * 2.0**attempt for attempt in range(API_RETRIES_MAX))
    assert result.rows[0].ended_at == pytest.approx(pauses + 0.05 * (API_RETRIES_MAX + 1))
