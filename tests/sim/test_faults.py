"""Faults: whatever fails, in any order, every action settles once and every unit comes back."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from tangram.core.action import Action, Outcome, Status
from tangram.core.demand import CPU, Demand, cores, fixed, learned
from tangram.core.limits import Limits
from tangram.core.messages import (
    Effect,
    Event,
    Finished,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Settle,
    Start,
    Started,
    StartFailed,
    Submit,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.errors import InvariantError
from tangram.sim.engine import Simulator
from tangram.sim.episode import SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.faults import KINDS, InjectedFault, draw_faults, inject
from tangram.sim.size import Size
from tangram.sim.workloads import build

POLICIES = ("fcfs", "fixed:2", "paper", "adaptive", "adaptive:no-resize")
WORKLOADS = ("mixed", "coding", "search")
THIS_TEST = "tests/sim/test_faults.py::test_with_faults_everything_settles_and_every_unit_comes_back"
CHECK_EVERY = 7
"""Events between full checks: a check of everything costs more than an event."""


class Judge:
    """Between the engine and the scheduler: demands more of actions than a workload does, and records everything.

    Knows which actions must still settle, and how often each one ran.
    """

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.actions: dict[str, Action] = {}
        self.open: dict[str, None] = {}
        self.settled: dict[str, Outcome] = {}
        self.ran: Counter[str] = Counter()
        self.lost: dict[str, None] = {}
        """Actions that died while they ran, whatever became of them."""
        self.events = 0
        self._rng = random.Random(f"asked/{seed}")

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Submit):
            event = Submit(action=self._asked(event.action))
        effects = self.scheduler.handle(event, now)
        self.see(now, event, effects)
        return effects

    def _asked(self, action: Action) -> Action:
        """Episodes do not say these things."""
        return msgspec.structs.replace(
            action,
            idempotent=self._rng.random() < 1 / 3,
            priority=self._rng.choice((0, 0, 0, -2, 5)),
            deadline_s=self._rng.choice((None, None, None, 400.0)),
        )

    def see(self, now: float, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, Submit):
            self.actions[event.action.id] = event.action
            self.open[event.action.id] = None
        elif isinstance(event, Started):
            self._count(event.action)
        for effect in effects:
            if isinstance(effect, Refuse):
                self.open.pop(effect.action, None)
            elif isinstance(effect, Settle):
                outcome = effect.outcome
                assert outcome.action in self.open, f"{outcome.action} settles again"
                del self.open[outcome.action]
                self.settled[outcome.action] = outcome
        if isinstance(event, Finished) and event.lost:
            self._after_a_loss(event.action)
        self.events += 1
        if self.events % CHECK_EVERY == 0:
            self.scheduler.check()

    def _count(self, action: str) -> None:
        self.ran[action] += 1
        if self.ran[action] > 1:
            assert self.actions[action].idempotent, f"{action} runs twice and may not"

    def _after_a_loss(self, action: str) -> None:
        """What may run again goes on, until it has used up its attempts; what may not settles at once."""
        self.lost[action] = None
        outcome = self.settled.get(action)
        if not self.actions[action].idempotent:
            assert outcome is not None, f"{action} may not run again and does not settle"
        elif outcome is not None and outcome.status is Status.LOST:
            assert outcome.attempts == self.scheduler.limits.attempts_max, f"{action} is given up too early"


def play(seed: int, name: str) -> Judge:
    workload = build(WORKLOADS[seed % len(WORKLOADS)], batch=3, seed=seed)
    pools = Size(cores=6, nodes=2, devices=8).pools(workload)
    scheduler = Scheduler(policy(name), pools, limits=Limits(ageing_s=60.0, stranded_s=100.0))
    judge = Judge(scheduler, seed)
    engine = Simulator(workload, judge, pools, name=name, timeout_s=120.0)
    inject(engine, draw_faults(seed, until_s=300.0, count=10))
    engine.run()
    return judge


@pytest.mark.parametrize("seed", range(200))
def test_with_faults_everything_settles_and_every_unit_comes_back(seed: int) -> None:
    for name in POLICIES:
        try:
            judge = play(seed, name)
            judge.scheduler.check()
        except (AssertionError, InvariantError) as error:
            command = f"python -m pytest '{THIS_TEST}[{seed}]'"
            raise AssertionError(f"seed {seed} under {name}; to play it again: {command}\n{error}") from error
        assert not judge.open, f"seed {seed} under {name}: {list(judge.open)} never settled"
        statistics = judge.scheduler.statistics()
        assert statistics.waiting == statistics.holding == statistics.sandboxes == 0
        assert all(pool["held"] == 0 for pool in statistics.pools.values())
        assert Status.SUCCEEDED in [outcome.status for outcome in judge.settled.values()]


def test_a_lost_action_that_may_run_again_does_and_another_one_does_not() -> None:
    ends: Counter[tuple[bool, Status]] = Counter()
    for seed in range(60):
        judge = play(seed, "adaptive")
        for action in judge.lost:
            idempotent, outcome = judge.actions[action].idempotent, judge.settled[action]
            ends[idempotent, outcome.status] += 1
            if outcome.status is Status.SUCCEEDED:
                assert 1 < judge.ran[action] <= outcome.attempts
            assert idempotent or judge.ran[action] == 1
    assert ends[True, Status.SUCCEEDED] >= 5, "a fault that nothing survives tests nothing"
    assert ends[False, Status.LOST] >= 5
    assert ends[False, Status.SUCCEEDED] == 0


def test_what_goes_wrong_is_drawn_from_the_seed_alone() -> None:
    assert draw_faults(3, until_s=100.0) == draw_faults(3, until_s=100.0)
    assert draw_faults(3, until_s=100.0) != draw_faults(4, until_s=100.0)
    faults = draw_faults(5, until_s=100.0, count=50)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.kind for fault in draw_faults(5, until_s=9.0, kinds=("crash",))} == {"crash"}


# ---- each fault by itself, on one trajectory that works ten seconds at a time ------------------------------------


class Log:
    """A small simulation and all that happened in it."""

    def __init__(
        self, *faults: InjectedFault, nodes: int = 1, turns: int = 3, api: bool = False, second_at: float | None = None
    ) -> None:
        demand = Demand({"api": fixed(1)}) if api else Demand({CPU: cores(2)})
        step = SimStep(kind="exec", demand=demand, work_s=10.0)
        turn = SimTurn(think_s=0.0, steps=(step,))
        memory = 0 if api else 100
        episodes = [SimEpisode(id="t", run="r", task="", memory=memory, turns=(turn,) * turns)]
        if second_at is not None:
            episodes.append(msgspec.structs.replace(episodes[0], id="u", start_s=second_at))
        workload = Workload(name="one", seed=0, episodes=tuple(episodes))
        pools: tuple[Pool, ...] = (Pool(kind="api", total=4),)
        if not api:
            pools = tuple(pool for node in range(nodes) for pool in cpu_node(f"n{node}", 4, 1.0, numa_nodes=2))
        self.scheduler = Scheduler(policy("fcfs"), pools)
        self.observed: list[tuple[float, Event | Effect]] = []
        engine = Simulator(workload, self.scheduler, pools, observer=self._see)
        inject(engine, faults)
        self.result = engine.run()

    def _see(self, now: float, event: Event, effects: list[Effect]) -> None:
        self.scheduler.check()
        self.observed.extend((now, message) for message in (event, *effects))

    def times(self, kind: type) -> list[float]:
        return [now for now, message in self.observed if isinstance(message, kind)]

    def totals(self, pool: str) -> list[tuple[float, int]]:
        return [(now, m.pool.total) for now, m in self.observed if isinstance(m, PoolChanged) and m.pool.name == pool]

    def statuses(self) -> list[str]:
        return [row.status for row in self.result.rows]


def test_without_faults_it_takes_thirty_seconds() -> None:
    log = Log()
    assert log.result.makespan_s == 30.0
    assert log.statuses() == ["succeeded"] * 3


def test_a_lost_node_loses_its_trajectory_and_comes_back_with_its_pools() -> None:
    log = Log(InjectedFault(at=15.0, kind="node_loss", lasts_s=5.0))
    assert log.statuses() == ["succeeded", "lost"]
    assert log.result.episodes_failed == 1
    states = [(now, m.state) for now, m in log.observed if isinstance(m, NodeChanged)]
    assert states == [(15.0, NodeState.DOWN)], "the simulation ends with its last trajectory"


def test_a_slow_start_delays_the_start_while_it_lasts() -> None:
    log = Log(InjectedFault(at=5.0, kind="slow_start", lasts_s=10.0, amount=0.3))
    assert log.times(Start) == [0.0, 10.0, 23.0]
    assert log.times(Started) == [0.0, 13.0, 23.0]
    assert [row.overhead_s for row in log.result.rows] == [0.0, 3.0, 0.0]


def test_of_two_slow_starts_the_slower_counts_and_each_ends_by_itself() -> None:
    log = Log(
        InjectedFault(at=1.0, kind="slow_start", lasts_s=100.0, amount=0.1),
        InjectedFault(at=2.0, kind="slow_start", lasts_s=10.0, amount=0.4),
    )
    assert log.times(Started) == [0.0, 14.0, 25.0]


def test_a_crash_loses_one_running_action() -> None:
    log = Log(InjectedFault(at=4.0, kind="crash"))
    assert log.statuses() == ["lost"]
    assert log.result.makespan_s == 4.0


def test_starts_that_fail_are_tried_again_and_given_up_in_the_end() -> None:
    log = Log(InjectedFault(at=5.0, kind="start_failure", lasts_s=10.0, amount=1.0))
    assert log.statuses() == ["succeeded", "lost"]
    assert len(log.times(StartFailed)) == 3


def test_a_shrunken_pool_keeps_its_numa_cells_and_is_whole_again_after_all_cuts() -> None:
    log = Log(
        InjectedFault(at=1.0, kind="shrink", pick=0.0, lasts_s=10.0, amount=0.5),
        InjectedFault(at=2.0, kind="shrink", pick=0.0, lasts_s=20.0, amount=0.75),
        InjectedFault(at=3.0, kind="shrink", pick=0.0, lasts_s=2.0, amount=0.01),
    )
    assert log.totals("cpu@n0") == [
        (1.0, 2000), (2.0, 2000), (3.0, 400), (5.0, 2000), (11.0, 3000), (22.0, 4000)
    ]  # fmt: skip
    cells = [m.pool.numa for _, m in log.observed if isinstance(m, PoolChanged)]
    assert cells[0] == (1000, 1000)
    assert log.statuses() == ["succeeded"] * 3


def test_a_pool_that_is_cut_while_its_node_is_down_has_its_size_when_the_node_is_back() -> None:
    log = Log(
        InjectedFault(at=1.0, kind="node_loss", pick=0.0, lasts_s=10.0),
        InjectedFault(at=2.0, kind="shrink", pick=0.0, lasts_s=20.0, amount=0.5),
        nodes=2,
        second_at=5.0,
    )
    # The first trajectory stood on n0 and is lost with it; the second works on n1 and sees n0 come back.
    assert log.statuses() == ["lost"] + ["succeeded"] * 3
    states = [(now, m.node, m.state) for now, m in log.observed if isinstance(m, NodeChanged)]
    assert states == [(1.0, "n0", NodeState.DOWN), (11.0, "n0", NodeState.UP)]
    assert log.totals("cpu@n0") == [(11.0, 2000), (22.0, 4000)]


def test_a_quota_cut_is_announced_and_reverted() -> None:
    log = Log(InjectedFault(at=1.0, kind="quota_cut", lasts_s=12.0, amount=0.3), api=True)
    assert log.totals("api") == [(1.0, 1), (13.0, 4)]
    assert log.statuses() == ["succeeded"] * 3


def test_a_fault_that_finds_nothing_to_strike_strikes_nothing() -> None:
    log = Log(*[InjectedFault(at=1.0, kind=kind) for kind in ("node_loss", "shrink")], api=True)
    assert log.statuses() == ["succeeded"] * 3
    log = Log(InjectedFault(at=1.0, kind="quota_cut"))
    assert log.statuses() == ["succeeded"] * 3


def test_learned_actions_survive_a_shrunken_node_too() -> None:
    step = SimStep(kind="exec", demand=Demand({CPU: learned()}), work_s=5.0)
    turn = SimTurn(think_s=0.0, steps=(step,) * 4)
    workload = Workload(name="four", seed=0, episodes=(SimEpisode(id="t", run="r", task="", turns=(turn,) * 3),))
    pools = cpu_node("n0", 4)
    scheduler = Scheduler(policy("adaptive"), pools)
    engine = Simulator(workload, scheduler, pools, observer=Judge(scheduler).see)
    inject(engine, (InjectedFault(at=2.0, kind="shrink", lasts_s=20.0, amount=0.1),))
    result = engine.run()
    assert [row.status for row in result.rows] == ["succeeded"] * 12
    assert result.makespan_s > 20.0
