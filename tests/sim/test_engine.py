"""The engine: virtual time, episodes that take turns, and managers that behave as real ones do. Golden small runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tangram.core.action import Action
from tangram.core.demand import CPU, GPU, Demand, cores, fixed, learned, one_of
from tangram.core.lanes import Entry
from tangram.core.limits import Limits
from tangram.core.messages import (
    Effect,
    Event,
    Evicted,
    Pool,
    Release,
    Reserve,
    Resident,
    Resize,
    Start,
    Submit,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.policies.base import ArrivalOrder, Begin
from tangram.core.scheduler import Scheduler
from tangram.core.snapshot import Snapshot
from tangram.core.speedup import PowerLaw
from tangram.errors import InvalidConfig, InvariantError
from tangram.managers.quotas.manager import Quota, Rate
from tangram.sim.engine import Simulator
from tangram.sim.episode import ServiceModel, SimEpisode, SimStep, SimTurn, Workload, api_model
from tangram.sim.faults import InjectedFault
from tangram.sim.result import SimulationResult
from tangram.sim.simulate import simulate

ONE_CORE = Demand({CPU: cores(1)})


def call(work_s: float = 10.0, demand: Demand = ONE_CORE, **fields: Any) -> SimStep:
    return SimStep(kind=fields.pop("kind", "exec"), demand=demand, work_s=work_s, **fields)


def turn(*steps: SimStep, think_s: float = 0.0) -> SimTurn:
    return SimTurn(think_s=think_s, steps=steps)


def episode(name: str, *turns: SimTurn, **fields: Any) -> SimEpisode:
    return SimEpisode(id=name, run=fields.pop("run", "r"), task="", turns=turns, **fields)


def workload(*episodes: SimEpisode, **fields: Any) -> Workload:
    return Workload(name="test", seed=3, episodes=episodes, **fields)


def times(result: SimulationResult) -> dict[str, tuple[float, float]]:
    return {row.id: (row.submitted_at, row.ended_at) for row in result.rows}


class Recorder:
    def __init__(self) -> None:
        self.messages: list[tuple[float, Event | Effect]] = []

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        self.messages.extend((now, message) for message in (event, *effects))

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.messages if isinstance(message, kind)]


# ---- episodes ---------------------------------------------------------------------------------------------------


def test_an_episode_thinks_acts_and_goes_on_after_the_last_action_of_a_turn() -> None:
    work = workload(episode("t", turn(call(2.0), call(5.0), think_s=1.0), turn(call(3.0), think_s=4.0), start_s=10.0))
    result = simulate(work, "fcfs", cpu_node("n0", 4))
    assert times(result) == {"t.0.0": (11.0, 13.0), "t.0.1": (11.0, 16.0), "t.1.0": (20.0, 23.0)}
    assert result.makespan_s == 13.0, "from the first start"
    assert result.episode_ends == [23.0]
    assert result.core_s == 10.0


def test_actions_wait_for_each_other_where_cores_are_short() -> None:
    work = workload(episode("a", turn(call(4.0))), episode("b", turn(call(4.0)), start_s=1.0))
    result = simulate(work, "fcfs", cpu_node("n0", 1))
    assert times(result) == {"a.0.0": (0.0, 4.0), "b.0.0": (1.0, 8.0)}
    assert [row.waiting_s for row in result.rows] == [0.0, 3.0]
    assert [row.act_s for row in result.rows] == [4.0, 7.0]


def test_a_sandbox_lives_as_long_as_its_episode() -> None:
    recorder = Recorder()
    work = workload(episode("a", turn(call()), turn(call()), memory=600), episode("b", turn(call()), memory=600))
    result = simulate(work, "fcfs", cpu_node("n0", 4, 1.0), observer=recorder)
    assert times(result)["b.0.0"] == (0.0, 30.0), "the memory is free when the first episode has ended"
    kinds = [type(message).__name__ for _, message in recorder.messages if isinstance(message, Reserve | Release)]
    assert kinds == ["Reserve", "Reserve", "Release", "Release"]


def test_a_sandbox_that_is_refused_ends_its_episode() -> None:
    work = workload(episode("a", turn(call()), memory=5000), episode("b", turn(call()), memory=100))
    result = simulate(work, "fcfs", cpu_node("n0", 4, 1.0))
    assert result.episodes_failed == 1
    assert [row.id for row in result.rows] == ["b.0.0"]


def test_an_action_that_is_refused_ends_its_episode() -> None:
    work = workload(episode("a", turn(call(demand=Demand({CPU: cores(9)}))), turn(call())))
    result = simulate(work, "fcfs", cpu_node("n0", 4))
    assert [(row.status, row.act_s) for row in result.rows] == [("refused", 0.0)]
    assert result.episodes_failed == 1


def test_a_timeout_is_an_observation_and_the_episode_goes_on() -> None:
    work = workload(episode("a", turn(call(50.0)), turn(call(2.0))))
    result = simulate(work, "fcfs", cpu_node("n0", 4), timeout_s=20.0)
    assert [(row.status, row.ended_at) for row in result.rows] == [("timed_out", 20.0), ("succeeded", 22.0)]
    assert result.episodes_failed == 0


class Thin(ArrivalOrder):
    """Reserves a quarter of a core for what may use a whole one."""

    name = "thin"

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        return 250

    def plan(self, snapshot: Snapshot) -> Iterator[Begin]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node, limit=1000)


@pytest.mark.parametrize(("cores_later", "ends"), [(2.0, "timed_out"), (1.0, "lost")])
def test_only_a_timeout_without_its_reserved_cpu_is_our_fault(cores_later: float, ends: str) -> None:
    """Eight that reserve two cores and want eight: slowed all of them, but short only where the node has shrunk."""
    pools = cpu_node("n0", 2)
    work = workload(*(episode(f"t{k}", turn(call(demand=Demand({CPU: learned(4)})))) for k in range(8)))
    engine = Simulator(work, Scheduler(Thin(), pools), pools, timeout_s=15.0)
    engine.call_at(1.0, engine.change_pool, cpu_node("n0", cores_later)[0])
    assert {row.status for row in engine.run().rows} == {ends}


def test_hints_give_the_scheduler_the_duration_and_learning_does_not() -> None:
    for knowledge, hint in (("hints", 10.0), ("learned", None)):
        recorder = Recorder()
        simulate(
            workload(episode("a", turn(call()))), "fcfs", cpu_node("n0", 4), knowledge=knowledge, observer=recorder
        )
        [submit] = recorder.of(Submit)
        assert submit.action.duration_s == hint
    with pytest.raises(InvalidConfig, match="one of learned, hints, perfect"):
        simulate(workload(), "fcfs", (), knowledge="none")


def test_progress_is_reported_periodically_and_at_the_end() -> None:
    progress: list[tuple[int, int]] = []
    work = workload(*[episode(f"e{n}", *[turn(call(0.1)) for _ in range(60)]) for n in range(40)])
    simulate(work, "fcfs", cpu_node("n0", 4), progress=lambda done, total: progress.append((done, total)))
    assert progress[-1] == (2400, 2400)
    assert len(progress) > 1


# ---- cores ------------------------------------------------------------------------------------------------------


def test_an_action_uses_what_it_can_and_slows_down_only_when_it_gets_less() -> None:
    idle = call(10.0, Demand({CPU: learned()}), busy=0.25)
    result = simulate(workload(episode("a", turn(*[idle] * 4))), "adaptive", cpu_node("n0", 4))
    assert [row.execution_s for row in result.rows] == [10.0] * 4
    assert result.core_s == pytest.approx(10.0)


def test_more_than_the_cores_can_do_takes_longer() -> None:
    learned_busy = [turn(call(10.0, Demand({CPU: learned()}), busy=0.1)) for _ in range(5)]
    crowd = turn(*[call(10.0, Demand({CPU: learned()}), busy=0.5, key="crowd")] * 8)
    result = simulate(workload(episode("a", *learned_busy, crowd)), "adaptive", cpu_node("n0", 2))
    crowded = [row for row in result.rows if row.key == "crowd"]
    assert sum(row.cpu_s for row in crowded) == pytest.approx(40.0)
    assert max(row.ended_at for row in crowded) >= 50.0 + 20.0


def test_a_wider_launch_is_faster_by_its_speedup() -> None:
    elastic = Demand({CPU: cores(1, 4)}, PowerLaw(0.5))
    result = simulate(
        workload(episode("a", turn(call(10.0, elastic, speedup=PowerLaw(0.5))))), "fixed:4", cpu_node("n0", 4)
    )
    assert result.rows[0].execution_s == 5.0
    assert result.rows[0].width == 4.0


def test_a_resize_changes_the_speed_of_what_is_left() -> None:
    recorder = Recorder()
    elastic = Demand({CPU: cores(1, 4)}, PowerLaw(1.0))
    work = workload(
        episode("a", turn(call(40.0, elastic, speedup=PowerLaw(1.0)))),
        episode("b", turn(call(2.0, Demand({CPU: cores(2)}))), start_s=5.0),
    )
    result = simulate(work, "adaptive", cpu_node("n0", 4), knowledge="hints", observer=recorder)
    assert recorder.of(Resize)
    ends = times(result)
    assert ends["b.0.0"][1] == pytest.approx(7.0), "it makes room at once"
    assert ends["a.0.0"][1] >= 11.0, "four cores for all but two seconds"
    assert result.core_s == pytest.approx(42.0 + 0.0, rel=0.2)


# ---- devices ----------------------------------------------------------------------------------------------------


def test_a_service_is_loaded_once_and_stays_until_its_memory_is_needed() -> None:
    recorder = Recorder()
    judge = ServiceModel(name="judge", memory_gib=60.0, restore_s=3.0)
    other = ServiceModel(name="other", memory_gib=60.0, restore_s=5.0)
    ask = {name: call(1.0, Demand({GPU: fixed(1)}), service=name) for name in ("judge", "other")}
    work = workload(
        episode("a", turn(ask["judge"]), turn(ask["judge"]), turn(ask["other"]), turn(ask["judge"])),
        services=(judge, other),
    )
    result = simulate(work, "fcfs", (Pool(kind=GPU, node="g0", total=1),), observer=recorder)
    assert [row.overhead_s for row in result.rows] == [3.0, 0.0, 5.0, 3.0]
    assert result.makespan_s == 15.0
    assert [message.service for message in recorder.of(Resident)] == ["judge", "other", "judge"]
    assert [message.service for message in recorder.of(Evicted)] == ["judge", "other"]


def test_more_devices_are_faster_by_the_speedup() -> None:
    service = ServiceModel(name="s", memory_gib=60.0, restore_s=0.0, degrees=(1, 2, 4))
    ask = call(8.0, Demand({GPU: one_of(1, 2, 4)}, PowerLaw(1.0)), service="s", speedup=PowerLaw(1.0))
    result = simulate(
        workload(episode("a", turn(ask)), services=(service,)), "fixed:4", (Pool(kind=GPU, node="g", total=4),)
    )
    assert result.makespan_s == 2.0


def test_a_service_larger_than_its_devices_is_refused() -> None:
    service = ServiceModel(name="s", memory_gib=100.0, restore_s=0.0)
    with pytest.raises(InvalidConfig, match=r"at most 80\.0 GiB for each of its devices"):
        simulate(workload(services=(service,)), "fcfs", (Pool(kind=GPU, node="g", total=4),))


# ---- APIs -------------------------------------------------------------------------------------------------------


def test_a_scheduler_with_the_right_quota_is_never_refused_by_the_api() -> None:
    quota = Quota("search", concurrent=2, requests=Rate(4, 60.0))
    ask = call(1.0, Demand(quota.demand()))
    work = workload(episode("a", turn(*[ask] * 6)), apis=(api_model(quota, phase_s=30.5),))
    result = simulate(work, "fcfs", quota.pools())
    assert [row.status for row in result.rows] == ["succeeded"] * 6
    assert sorted(row.ended_at for row in result.rows) == [1.0, 1.0, 2.0, 2.0, 62.0, 62.0]


def test_an_api_that_is_called_too_often_refuses_and_the_episode_fails() -> None:
    api = api_model(Quota("search", concurrent=1))
    ask = call(1.0, Demand({"search": fixed(1)}))
    result = simulate(workload(episode("a", turn(ask, ask)), apis=(api,)), "fcfs", (Pool(kind="search", total=2),))
    assert sorted(row.status for row in result.rows) == ["lost", "succeeded"]
    assert result.episodes_failed == 1


def test_a_program_that_calls_an_api_is_refused_as_well_and_uses_no_cores() -> None:
    quota = Quota("search", requests=Rate(1, 60.0))
    ask = call(4.0, Demand({CPU: cores(1, 2), **quota.demand()}, PowerLaw(1.0)))
    work = workload(episode("a", turn(ask, ask)), apis=(api_model(quota),))
    result = simulate(work, "fcfs", (*cpu_node("n0", 4), Pool(kind="search/requests", total=2)))
    assert sorted((row.status, row.cpu_s) for row in result.rows) == [("lost", 0.0), ("succeeded", 4.0)]


def test_what_was_on_a_node_that_went_down_is_no_longer_under_way_at_the_api() -> None:
    quota = Quota("search", concurrent=1)
    ask = call(10.0, Demand({CPU: cores(1), **quota.demand()}))
    work = workload(
        episode("a", turn(ask)), episode("b", turn(ask), start_s=20.0), apis=(api_model(quota, phase_s=1.0),)
    )
    down = InjectedFault(at=5.0, kind="node_loss", lasts_s=1.0)
    result = simulate(work, "fcfs", (*cpu_node("n0", 4), *quota.pools()), faults=(down,))
    assert [row.status for row in result.rows] == ["lost", "succeeded"]


def test_an_estimate_is_corrected_when_the_call_has_ended() -> None:
    quota = Quota("judge", tokens=Rate(1000, 60.0))
    demand = Demand(quota.demand(tokens=600))
    for really, ended in ((400, [1.0, 2.0]), (600, [1.0, 62.0]), (None, [1.0, 62.0])):
        spent = None if really is None else {"judge/tokens": really}
        work = workload(episode("a", turn(*[call(1.0, demand, spent=spent)] * 2)), apis=(api_model(quota),))
        result = simulate(work, "fcfs", quota.pools())
        assert [row.ended_at for row in result.rows] == ended


# ---- the end ----------------------------------------------------------------------------------------------------


class Deaf:
    """An orchestrator that never does anything."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        return []


def test_a_simulation_in_which_actions_never_settle_reports_it_with_its_seed() -> None:
    work = workload(episode("a", turn(call())))
    with pytest.raises(
        InvariantError, match=r"simulation deaf of test seed 3 is stuck at 0\.000 s: 1 actions never settle"
    ):
        Simulator(work, Deaf(), cpu_node("n0", 1), name="deaf").run()


def test_a_workload_without_episodes_is_over_at_once() -> None:
    result = simulate(workload(), "fcfs", cpu_node("n0", 1))
    assert (result.makespan_s, result.rows) == (0.0, [])
    assert "act_mean_s" not in result.summary() and "step_s" not in result.summary()


# ---- golden small runs: three trajectories on two cores, worked out by hand --------------------------------------


def three() -> Workload:
    """a: 4 s, then 2 s. b: an elastic 8 s. c comes at 1 s: 3 s, thinks 1 s, 1 s."""
    elastic = Demand({CPU: cores(1, 2)}, PowerLaw(1.0))
    return workload(
        episode("a", turn(call(4.0)), turn(call(2.0))),
        episode("b", turn(call(8.0, elastic, speedup=PowerLaw(1.0)))),
        episode("c", turn(call(3.0)), turn(call(1.0), think_s=1.0), start_s=1.0),
    )


GOLDEN: dict[str, dict[str, tuple[float, float]]] = {
    # One core each. c waits for a; a's second call comes as c starts and waits for it; c's second waits for b.
    "fcfs": {
        "a.0.0": (0.0, 4.0), "c.0.0": (1.0, 7.0), "b.0.0": (0.0, 8.0), "a.1.0": (4.0, 9.0), "c.1.0": (8.0, 9.0),
    },
    # b wants both cores and keeps what is free for itself until a has ended.
    "fixed:2": {
        "a.0.0": (0.0, 4.0), "b.0.0": (0.0, 8.0), "c.0.0": (1.0, 11.0), "a.1.0": (4.0, 10.0), "c.1.0": (12.0, 13.0),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_a_small_run_comes_out_as_worked_out_by_hand(name: str) -> None:
    result = simulate(three(), name, cpu_node("n0", 2))
    assert times(result) == GOLDEN[name]


def test_the_paper_divides_free_cores_for_the_least_sum_of_durations() -> None:
    """Four cores come free at 1. x has 8 s of work, y 4 s, both divide evenly: 2 and 2 cores make 4 + 2 s, less than
    3 and 1 or 1 and 3; leaving y to wait for the four cores of x would make 2 + 4 s, which is not less."""
    elastic = Demand({CPU: cores(1, 4)}, PowerLaw(1.0))
    work = workload(
        episode("all", turn(call(1.0, Demand({CPU: cores(4)})))),
        episode("x", turn(call(8.0, elastic, speedup=PowerLaw(1.0)))),
        episode("y", turn(call(4.0, elastic, speedup=PowerLaw(1.0)))),
    )
    result = simulate(work, "paper", cpu_node("n0", 4), knowledge="hints")
    assert times(result) == {"all.0.0": (0.0, 1.0), "x.0.0": (0.0, 5.0), "y.0.0": (0.0, 3.0)}


def test_actions_that_run_alone_never_wait_or_share() -> None:
    result = simulate(three(), "alone", cpu_node("n0", 2))
    assert all(row.waiting_s == 0.0 for row in result.rows)
    assert times(result)["c.1.0"] == (5.0, 6.0)


def test_the_engine_carries_out_what_an_observer_may_see() -> None:
    recorder = Recorder()
    scheduler = Scheduler(policy("fcfs"), cpu_node("n0", 2), limits=Limits())
    Simulator(three(), scheduler, cpu_node("n0", 2), observer=recorder).run()
    starts = [message.action for message in recorder.of(Start)]
    assert len(starts) == 5
    assert all(isinstance(action, Action) for action in starts)
