"""Baselines: pods that are kept for a whole trajectory, services on devices of their own, calls without control."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.core.action import Action, Status, Usage
from tangram.core.demand import CPU, GPU, Demand, cores, fixed, learned, one_of
from tangram.core.messages import (
    Cancel,
    Finished,
    Pool,
    Release,
    Reserve,
    Share,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    cpu_node,
)
from tangram.core.speedup import PowerLaw
from tangram.errors import InvalidConfig
from tangram.managers.quotas.manager import Quota
from tangram.sim.baselines import API_BACKOFF_S, API_RETRIES_MAX, ATTEMPTS_MAX, Baseline, PodsConfig
from tangram.sim.engine import Simulator, StartFaults
from tangram.sim.episode import ServiceModel, SimEpisode, SimStep, SimTurn, Workload, api_model
from tangram.sim.faults import InjectedFault, draw_faults
from tangram.sim.result import SimulationResult
from tangram.sim.simulate import simulate
from tangram.sim.size import Size
from tangram.sim.workloads import build

LEARNED = Demand({CPU: learned()})


def call(work_s: float = 10.0, demand: Demand = LEARNED, **fields: Any) -> SimStep:
    return SimStep(kind="exec", demand=demand, work_s=work_s, **fields)


def turn(*steps: SimStep, think_s: float = 0.0) -> SimTurn:
    return SimTurn(think_s=think_s, steps=steps)


def episode(name: str, *turns: SimTurn, **fields: Any) -> SimEpisode:
    return SimEpisode(id=name, run="r", task="", turns=turns, memory=fields.pop("memory", 100), **fields)


def workload(*episodes: SimEpisode, **fields: Any) -> Workload:
    return Workload(name="test", seed=0, episodes=episodes, **fields)


def spans(result: SimulationResult) -> dict[str, tuple[float, float]]:
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
    elastic = Demand({CPU: cores(1, 8)}, PowerLaw(1.0))
    result = simulate(
        workload(episode("a", turn(call(8.0, elastic, speedup=PowerLaw(1.0))))), "pods:0.5", cpu_node("n0", 8, 1.0)
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


# ---- as the decider of real executions: pods and cancelling ------------------------------------------------------


def pods_of_a_core() -> Baseline:
    baseline = Baseline(cpu_node("n0", 1, 1.0), (), PodsConfig(request=1.0, limit=1.0))
    for sandbox in "ab":
        baseline.handle(Reserve(sandbox=sandbox, memory=100), 0.0)
    return baseline


def in_pod(sandbox: str, demand: Demand = LEARNED) -> Action:
    return Action(id=f"{sandbox}.1", demand=demand, sandbox=sandbox)


@pytest.mark.parametrize("demand", [LEARNED, Demand({CPU: cores(0.2)}), Demand({CPU: cores(1, 8)})])
def test_all_that_a_pod_of_one_core_does_is_granted_that_core(demand: Demand) -> None:
    (start,) = pods_of_a_core().handle(Submit(action=in_pod("a", demand)), 1.0)
    assert isinstance(start, Start) and start.grant.width == 1000
    assert start.grant.shares == (Share("cpu@n0", 1000, 1000),)


def test_what_waits_for_admission_is_cancelled_at_once() -> None:
    baseline = pods_of_a_core()
    assert baseline.handle(Submit(action=in_pod("b")), 1.0) == []
    (settle,) = baseline.handle(Cancel(action="b.1"), 3.0)
    assert (settle.outcome.status, settle.outcome.waiting_s) == (Status.CANCELLED, 2.0)
    assert baseline.handle(Release(sandbox="a"), 4.0) == [], "nothing of it is left to be started"


def test_what_runs_is_stopped_and_settles_when_it_has_ended() -> None:
    baseline = pods_of_a_core()
    baseline.handle(Submit(action=in_pod("a")), 1.0)
    baseline.handle(Started(action="a.1"), 1.0)
    (stop,) = baseline.handle(Cancel(action="a.1"), 2.0)
    assert isinstance(stop, Stop) and baseline.handle(Cancel(action="a.1"), 2.0) == [], "once is enough"
    (settle,) = baseline.handle(Finished(action="a.1", usage=Usage(cpu_s=0.5)), 3.0)
    assert (settle.outcome.status, settle.outcome.usage.cpu_s) == (Status.CANCELLED, 0.5)


def test_a_start_that_fails_after_a_cancellation_is_not_tried_again() -> None:
    baseline = pods_of_a_core()
    baseline.handle(Submit(action=in_pod("a")), 1.0)
    baseline.handle(Cancel(action="a.1"), 2.0)
    (settle,) = baseline.handle(StartFailed(action="a.1", reason="no such image"), 3.0)
    assert settle.outcome.status is Status.CANCELLED


def test_a_cancelled_call_leaves_the_queue_of_its_service_to_the_next() -> None:
    service = ServiceModel(name="x", memory_gib=10.0, restore_s=0.0, degrees=(1,))
    baseline = Baseline((Pool(kind=GPU, node="g0", total=1),), (service,), PodsConfig())
    asks = [Action(id=f"c{k}", demand=Demand({GPU: fixed(1)}), service="x") for k in range(3)]
    for ask in asks:
        baseline.handle(Submit(action=ask), 0.0)
    (settle,) = baseline.handle(Cancel(action="c1"), 1.0)
    assert settle.outcome.status is Status.CANCELLED
    baseline.handle(Started(action="c0"), 1.0)
    started = [effect.action.id for effect in baseline.handle(Finished(action="c0"), 2.0) if isinstance(effect, Start)]
    assert started == ["c2"]


def test_what_the_manager_needed_for_itself_is_overhead() -> None:
    baseline = pods_of_a_core()
    baseline.handle(Submit(action=in_pod("a")), 1.0)
    baseline.handle(Started(action="a.1"), 1.5)
    (settle,) = baseline.handle(Finished(action="a.1", usage=Usage(overhead_s=0.25)), 3.0)
    assert (settle.outcome.overhead_s, settle.outcome.execution_s, settle.outcome.waiting_s) == (0.75, 1.25, 0.0)


def test_a_sandbox_that_is_released_twice_is_released_once() -> None:
    baseline = pods_of_a_core()
    assert baseline.handle(Release(sandbox="b"), 1.0) == baseline.handle(Release(sandbox="b"), 2.0) == []


# ---- services on devices of their own ---------------------------------------------------------------------------


def test_a_service_serves_one_call_at_a_time_per_replica_in_order_of_arrival() -> None:
    services = tuple(ServiceModel(name=name, memory_gib=10.0, restore_s=0.0, degrees=(1, 2, 4)) for name in "xy")
    ask = call(8.0, Demand({GPU: one_of(1, 2, 4)}, PowerLaw(1.0)), service="x", speedup=PowerLaw(1.0))
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
    api = api_model(Quota("search", concurrent=1))
    ask = call(5.0, Demand({"search": fixed(1)}))
    work = workload(episode("a", turn(ask, ask), memory=0), apis=(api,))
    result = simulate(work, "pods:0.5", (Pool(kind="search", total=1),))
    assert [row.status for row in result.rows] == ["succeeded", "succeeded"]
    # Refused at 0, at about 2 and let in at about 6, each refusal taking 0.05 s.
    assert result.rows[1].ended_at == pytest.approx(0.05 + API_BACKOFF_S + 0.05 + 2 * API_BACKOFF_S + 5.0)


def test_a_call_that_is_refused_too_often_is_lost_with_its_trajectory() -> None:
    api = api_model(Quota("search", concurrent=1))
    ask = call(1000.0, Demand({"search": fixed(1)}))
    work = workload(episode("a", turn(ask, ask), memory=0), apis=(api,))
    result = simulate(work, "pods:0.5", (Pool(kind="search", total=1),))
    assert [row.status for row in result.rows] == ["lost", "succeeded"]
    assert result.episodes_failed == 1
    pauses = sum(API_BACKOFF_S * 2.0**attempt for attempt in range(API_RETRIES_MAX))
    assert result.rows[0].ended_at == pytest.approx(pauses + 0.05 * (API_RETRIES_MAX + 1))


# ---- faults -----------------------------------------------------------------------------------------------------

TWO_NODES = (*cpu_node("n0", 1, 1.0), *cpu_node("n1", 1, 1.0))


def statuses(result: SimulationResult) -> dict[str, str]:
    return {row.id: row.status for row in result.rows}


def test_a_lost_node_loses_only_the_pods_on_it() -> None:
    work = workload(episode("a", turn(call())), episode("b", turn(call())))
    result = simulate(work, "pods:1", TWO_NODES, faults=(InjectedFault(at=4.0, kind="node_loss", pick=0.0),))
    assert statuses(result) == {"a.0.0": "lost", "b.0.0": "succeeded"}
    assert spans(result)["a.0.0"] == (0.0, 4.0)
    assert result.episodes_failed == 1


def test_a_pod_that_is_lost_while_its_trajectory_thinks_fails_the_next_action() -> None:
    work = workload(episode("a", turn(call(1.0)), turn(call(1.0), think_s=20.0)))
    result = simulate(
        work, "pods:1", cpu_node("n0", 1, 1.0), faults=(InjectedFault(at=5.0, kind="node_loss", lasts_s=1.0),)
    )
    assert statuses(result) == {"a.0.0": "succeeded", "a.1.0": "lost"}


def test_pods_that_wait_are_admitted_when_the_node_is_back() -> None:
    work = workload(episode("a", turn(call())), episode("b", turn(call())))
    result = simulate(
        work, "pods:1", cpu_node("n0", 1, 1.0), faults=(InjectedFault(at=4.0, kind="node_loss", lasts_s=50.0),)
    )
    assert statuses(result) == {"a.0.0": "lost", "b.0.0": "succeeded"}
    assert spans(result)["b.0.0"] == (0.0, 64.0)


def test_a_failed_start_is_tried_again_in_its_pod_and_given_up_in_the_end() -> None:
    class FirstAttemptsFail(StartFaults):
        def __init__(self, failures: int) -> None:
            super().__init__()
            self.failures = failures

        def failure(self, attempt: int) -> str:
            return "no such image" if attempt <= self.failures else ""

    def play(failures: int) -> SimulationResult:
        pools = cpu_node("n0", 1, 1.0)
        baseline = Baseline(pools, (), PodsConfig(request=1.0))
        work = workload(episode("a", turn(call())))
        return Simulator(work, baseline, pools, start_faults=FirstAttemptsFail(failures)).run()

    assert statuses(play(ATTEMPTS_MAX - 1)) == {"a.0.0": "succeeded"}
    assert statuses(play(ATTEMPTS_MAX)) == {"a.0.0": "lost"}


def test_a_node_that_shrinks_takes_no_new_pods_until_there_is_room() -> None:
    work = workload(episode("a", turn(call(30.0))), episode("b", turn(call()), start_s=5.0))
    shrink = InjectedFault(at=1.0, kind="shrink", pick=0.0, lasts_s=9.0, amount=0.5)
    result = simulate(work, "pods:1", cpu_node("n0", 2, 1.0), faults=(shrink,))
    assert spans(result)["b.0.0"] == (5.0, 20.0)
    assert set(statuses(result).values()) == {"succeeded"}


def test_the_replicas_of_a_lost_node_lose_their_calls_and_come_back_with_it() -> None:
    service = ServiceModel(name="x", memory_gib=10.0, restore_s=0.0, degrees=(4,))
    ask = call(8.0, Demand({GPU: fixed(4)}), service="x")
    work = workload(*[episode(f"e{n}", turn(ask), memory=0) for n in range(4)], services=(service,))
    pools = tuple(Pool(kind=GPU, node=f"g{n}", total=4) for n in range(2))
    result = simulate(work, "pods:0.5", pools, faults=(InjectedFault(at=4.0, kind="node_loss", pick=0.0, lasts_s=6.0),))
    assert sorted(statuses(result).values()) == ["lost", "succeeded", "succeeded", "succeeded"]
    assert sorted(row.ended_at for row in result.rows) == [4.0, 8.0, 16.0, 18.0]


@pytest.mark.parametrize("name", ["coding", "search", "teachers", "mixed"])
def test_whatever_fails_every_trajectory_ends(name: str) -> None:
    for seed in range(10):
        work = build(name, batch=4, seed=seed)
        pools = Size(cores=6, nodes=2, devices=48).pools(work)
        result = simulate(work, "pods:0.5", pools, faults=draw_faults(seed, until_s=300.0, count=10))
        assert len(result.episode_ends) == len(work.episodes)
