"""Where the time of trajectories goes: every second once, and the parts add up to the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.clock import SimClock
from tangram.core.action import Action, Usage
from tangram.core.demand import CPU, MEMORY, Amounts, Demand, cores, fixed
from tangram.core.messages import (
    Cancel,
    Effect,
    Event,
    Finished,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Release,
    Reserve,
    Settle,
    Start,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tick,
    Window,
    cpu_node,
)
from tangram.core.policies import policy
from tangram.core.scheduler import Scheduler
from tangram.runtime.pool_usage import IDLE_TIMEOUT_S, PoolUsageObserver
from tangram.runtime.views import TimeBreakdown
from tangram.server.observe import time_breakdown
from tangram.server.observe.state_observer import StateObserver
from tangram.server.observe.time_breakdown import START

NODE = cpu_node("n0", 2)
WAITING, STARTING, EXECUTING = "waiting", "starting", "executing"


class World:
    """A scheduler with a picture, driven by hand. Records on its own which action was in which phase, and when."""

    def __init__(self, *pools: Pool) -> None:
        self.scheduler = Scheduler(policy("fcfs"), pools)
        self.clock = SimClock()
        self.picture = StateObserver(self.scheduler, clock=self.clock)
        self.pool_usage = PoolUsageObserver(self.scheduler, self.clock.now)
        self.phase_by_action: dict[str, tuple[str, float]] = {}
        """Live actions."""
        self.trajectory_by_action: dict[str, str] = {}
        self.node_by_action: dict[str, str] = {}
        self.stretches: list[tuple[str, str, str, float, float, float]] = []
        """Trajectory, action, phase, from, to, and of an execution its overhead."""

    @property
    def now(self) -> float:
        return self.clock.now()

    def wait(self, seconds: float) -> None:
        self.clock.set(self.now + seconds)

    def send(self, event: Event) -> list[Effect]:
        effects = self.scheduler.handle(event, self.now)
        self.picture(self.now, event, effects)
        self.pool_usage.observe(self.now, event, effects)
        if isinstance(event, Started):
            self._move(event.action, EXECUTING)
        for effect in effects:
            if isinstance(effect, Settle):
                self._move(effect.outcome.action, None, effect.outcome.usage.overhead_s)
        for action in self._lost(event):
            if action in self.phase_by_action:
                self._move(action, WAITING)
        for effect in effects:
            if isinstance(effect, Start):
                self._move(effect.action.id, STARTING)
                self.node_by_action[effect.action.id] = effect.grant.node
        self.check()
        return effects

    def _lost(self, event: Event) -> list[str]:
        """Actions whose attempt is over by this event, and that did not settle."""
        if isinstance(event, StartFailed):
            return [event.action]
        if not isinstance(event, NodeChanged) or event.state is not NodeState.DOWN:
            return []
        held = [action for action, (phase, _) in self.phase_by_action.items() if phase != WAITING]
        return [action for action in held if self.node_by_action[action] == event.node]

    def _move(self, action: str, phase: str | None, overhead_s: float = 0.0) -> None:
        before, since = self.phase_by_action.pop(action)
        self.stretches.append((self.trajectory_by_action[action], action, before, since, self.now, overhead_s))
        if phase is not None:
            self.phase_by_action[action] = (phase, self.now)

    def submit(self, name: str, trajectory: str = "", **pools: Amounts) -> list[Effect]:
        return self.submit_action(Action(id=name, demand=Demand(pools or {CPU: cores(1)}), trajectory=trajectory))

    def submit_action(self, action: Action) -> list[Effect]:
        self.phase_by_action[action.id] = (WAITING, self.now)
        self.trajectory_by_action[action.id] = action.trajectory or action.sandbox or action.id
        return self.send(Submit(action=action))

    def started(self, name: str) -> None:
        self.send(Started(action=name))

    def finished(self, name: str, overhead_s: float = 0.0) -> None:
        self.send(Finished(action=name, usage=Usage(overhead_s=overhead_s)))

    def check(self) -> None:
        """What the picture counts is what the scheduler has."""
        accounts = self.picture.accounts.all_runs()
        assert sum(account.waiting for account in accounts) == self.scheduler.queue.waiting
        assert sum(account.running for account in accounts) == len(self.scheduler.grants.holding)
        assert sorted(self.picture.tracker.by_id) == sorted(self.scheduler.entries)
        assert self.picture.pool_usage(None).pools == self.pool_usage.reading(), "as without a server"

    def spent(self) -> TimeBreakdown:
        [view] = self.picture.view(None).runs
        return view.spending

    def divided(self) -> dict[str, float]:
        """The same from the books, second by second as the definition says it, of trajectories that have ended."""
        parts = {"waiting": 0.0, START: 0.0, "execution": 0.0, "overhead": 0.0, "thinking": 0.0, "total": 0.0}
        for trajectory in sorted(set(self.trajectory_by_action.values())):
            mine = [stretch for stretch in self.stretches if stretch[0] == trajectory]
            times = sorted({time for *_, since, until, _ in mine for time in (since, until)})
            parts["total"] += times[-1] - times[0]
            for since, until in pairwise(times):
                there = [stretch for stretch in mine if stretch[3] <= since and until <= stretch[4]]
                self._divide(parts, there, until - since)
        return parts

    @staticmethod
    def _divide(parts: dict[str, float], there: list[Any], seconds: float) -> None:
        executing = [stretch for stretch in there if stretch[2] == EXECUTING]
        if executing:
            for _, _, _, since, until, overhead_s in executing:
                ours = min(1.0, overhead_s / (until - since)) * seconds / len(executing)
                parts["overhead"] += ours
                parts["execution"] += seconds / len(executing) - ours
        elif any(stretch[2] == STARTING for stretch in there):
            parts[START] += seconds
        elif there:
            parts["waiting"] += seconds
        else:
            parts["thinking"] += seconds


def test_a_trajectory_thinks_between_its_actions_and_not_after_the_last() -> None:
    world = World(*NODE)
    for number in range(2):
        world.submit(f"a{number}", "t")
        world.wait(0.5)
        world.started(f"a{number}")
        world.wait(4.0)
        world.finished(f"a{number}", overhead_s=1.0)
        world.wait(10.0)
    world.send(Tick())
    expected = TimeBreakdown(total_s=19.0, waiting_s={START: 1.0}, execution_s=6.0, overhead_s=2.0, thinking_s=10.0)
    assert world.spent() == expected


def test_actions_at_once_are_not_counted_twice() -> None:
    """One executes for 10 s; the second waits and executes meanwhile, and then 4 s alone."""
    world = World(Pool(kind="api", total=2))
    world.submit("long", "t", api=fixed(1))
    world.submit("short", "t", api=fixed(1))
    world.started("long")
    world.started("short")
    world.wait(6.0)
    world.finished("short", overhead_s=3.0)
    world.wait(4.0)
    world.finished("long")
    # In the first 6 s each has half, and half of what the short one has is overhead.
    assert world.spent() == TimeBreakdown(total_s=10.0, waiting_s={}, execution_s=8.5, overhead_s=1.5)


def test_what_waits_while_another_action_of_its_trajectory_executes_costs_the_trajectory_nothing() -> None:
    world = World(Pool(kind="api", total=1))
    world.submit("first", "t", api=fixed(1))
    world.submit("second", "t", api=fixed(1))
    world.started("first")
    world.wait(3.0)
    world.finished("first")
    world.started("second")
    world.wait(2.0)
    world.finished("second")
    assert world.spent() == TimeBreakdown(total_s=5.0, execution_s=5.0)


def test_waiting_counts_for_the_kind_that_was_short() -> None:
    world = World(*NODE, Pool(kind="api", total=1))
    world.submit("holder", api=fixed(1))
    world.submit("both", cpu=cores(1), api=fixed(1))
    world.wait(7.0)
    world.started("holder")
    world.finished("holder")
    assert world.spent().waiting_s == {START: 7.0, "api": 7.0}


def test_a_kind_that_is_short_later_takes_all_of_the_waiting() -> None:
    """Short of the quota first; but when that came back the cores were gone."""
    world = World(*NODE, Pool(kind="api", total=1))
    world.submit("quota", api=fixed(1))
    world.submit("both", cpu=cores(2), api=fixed(1))
    world.submit("cores", cpu=cores(2))
    world.started("quota")
    world.wait(3.0)
    world.finished("quota")
    world.started("cores")
    world.wait(4.0)
    world.finished("cores")
    assert world.spent().waiting_s == {START: 3.0, CPU: 7.0}


def test_waiting_for_a_quota_that_time_fills_counts_for_the_quota() -> None:
    world = World(*NODE, Pool(kind="api", total=1, window=Window(seconds=10.0)))
    world.submit("first", cpu=cores(1), api=fixed(1))
    world.submit("second", cpu=cores(1), api=fixed(1))
    world.started("first")
    world.finished("first")
    world.wait(10.0)
    world.send(Tick())
    assert world.spent().waiting_s == {"api": 10.0}


def test_waiting_for_the_memory_of_a_sandbox_counts_for_memory() -> None:
    world = World(*cpu_node("n0", 2, memory_gib=1))
    for name in ("s1", "s2"):
        world.send(Reserve(sandbox=name, memory=1024))
    demand = Demand({CPU: cores(1)})
    world.submit_action(Action(id="one", demand=demand, sandbox="s1"))
    world.started("one")
    world.finished("one")
    world.submit_action(Action(id="two", demand=demand, sandbox="s2"))
    world.wait(5.0)
    world.send(Release(sandbox="s1"))
    assert world.spent().waiting_s == {MEMORY: 5.0}


def test_waiting_for_a_pool_that_grows_counts_for_its_kind() -> None:
    world = World(*NODE, Pool(kind="api", total=1))
    world.submit("holder", api=fixed(1))
    world.submit("both", cpu=cores(1), api=fixed(1))
    world.wait(5.0)
    world.send(PoolChanged(pool=Pool(kind="api", total=2)))
    assert world.spent().waiting_s == {"api": 5.0}


def test_an_attempt_that_fails_counts_as_start_and_the_next_one_starts_over() -> None:
    world = World(Pool(kind="api", total=1))
    world.submit("a", api=fixed(1))
    world.wait(2.0)
    world.send(StartFailed(action="a", reason="no image"))
    world.wait(3.0)
    world.started("a")
    world.wait(1.0)
    world.finished("a")
    assert world.spent() == TimeBreakdown(total_s=6.0, waiting_s={START: 5.0}, execution_s=1.0)


def test_cancelled_in_the_queue_its_waiting_counts() -> None:
    world = World(Pool(kind="api", total=1))
    world.submit("holder", api=fixed(1))
    world.started("holder")
    world.submit("waits", api=fixed(1))
    world.wait(2.0)
    world.send(Cancel(action="waits"))
    assert world.spent().waiting_s == {"api": 2.0}


def test_after_an_hour_of_nothing_a_trajectory_is_another_one() -> None:
    world = World(Pool(kind="api", total=1))
    for pause_s in (IDLE_TIMEOUT_S - 10.0, IDLE_TIMEOUT_S + 10.0):
        world.submit("a", "t", api=fixed(1))
        world.started("a")
        world.wait(1.0)
        world.finished("a")
        world.wait(pause_s)
        world.send(Tick())
    assert len(world.picture.tracker.trajectories) == 0
    world.submit("a", "t", api=fixed(1))
    assert world.spent().thinking_s == IDLE_TIMEOUT_S - 10.0


def test_a_trajectory_ends_with_its_last_sandbox_also_if_something_in_it_ends_after_that() -> None:
    world = World(*cpu_node("n0", 4, memory_gib=1.0))
    world.send(Reserve(sandbox="s", memory=64))

    def begin(name: str, kind: str) -> None:
        world.submit_action(Action(id=name, kind=kind, demand=Demand({CPU: cores(1)}), sandbox="s"))
        world.started(name)

    begin("open", "open")
    world.finished("open")
    assert len(world.picture.tracker.trajectories) == 1, "it is open"
    begin("program", "exec")
    begin("close", "close")
    world.finished("close")
    assert len(world.picture.tracker.trajectories) == 1, "the program has yet to be stopped"
    world.finished("program")
    assert len(world.picture.tracker.trajectories) == 0


def test_trajectories_in_which_nothing_is_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_breakdown, "IDLE_TRAJECTORIES_MAX", 5)
    world = World(Pool(kind="api", total=1))
    for number in range(20):
        world.submit(f"a{number}", f"t{number}", api=fixed(1))
        world.started(f"a{number}")
        world.finished(f"a{number}")
    assert len(world.picture.tracker.trajectories) == 5


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_breakdown, "KINDS_MAX", 2)
    sums = time_breakdown.TimeSums()
    for kind in ("a", "b", "c", "d", "a"):
        sums.add_waiting(kind, 1.0)
    assert sums.waiting_s == {"a": 2.0, "b": 1.0, time_breakdown.OTHER: 2.0}


STEP = st.tuples(
    st.sampled_from(
        ["submit", "submit", "submit", "started", "started", "finished", "finished", "failed", "cancel", "down"]
    ),
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    st.integers(0, 7),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_every_second_is_counted_once_whatever_happens(steps: list[tuple[str, float, int]]) -> None:
    nodes = (*cpu_node("n0", 2), *cpu_node("n1", 1))
    world = World(*nodes, Pool(kind="api", total=1))
    for number, (what, pause_s, choice) in enumerate(steps):
        world.wait(pause_s)
        _step(world, what, choice, number)
    for pool in nodes:
        world.send(PoolChanged(pool=pool))
    for _ in range(200):  # rounds, each of which ends what runs
        world.wait(0.5)
        for action, (phase, _) in list(world.phase_by_action.items()):
            if phase == STARTING:
                world.started(action)
            elif phase == EXECUTING:
                world.finished(action)
    assert not world.phase_by_action
    expected = world.divided()
    spent = world.picture.accounts.run("default").time_breakdown.view()
    assert sum(spent.waiting_s.values()) - spent.waiting_s.get(START, 0.0) == pytest.approx(expected["waiting"])
    assert spent.waiting_s.get(START, 0.0) == pytest.approx(expected[START])
    assert spent.execution_s == pytest.approx(expected["execution"])
    assert spent.overhead_s == pytest.approx(expected["overhead"])
    assert spent.thinking_s == pytest.approx(expected["thinking"])
    parts = sum(spent.waiting_s.values()) + spent.execution_s + spent.overhead_s + spent.thinking_s
    assert spent.total_s == parts == pytest.approx(expected["total"])


def _step(world: World, what: str, choice: int, number: int) -> None:
    """Something that may happen now; nothing, if what it is about is not there."""
    live = [action for action, (phase, _) in world.phase_by_action.items() if phase == PHASE_BEFORE.get(what, phase)]
    if what == "submit":
        pools: dict[str, Amounts] = {CPU: cores(1)} if choice % 2 else {CPU: cores(1, 2), "api": fixed(1)}
        trajectory = f"t{choice % 3}" if choice < 6 else ""
        action = Action(id=f"a{number}", demand=Demand(pools), trajectory=trajectory, idempotent=choice % 4 == 0)
        world.submit_action(action)
    elif what == "down":
        world.send(NodeChanged(node="n1", state=NodeState.DOWN))
        world.send(NodeChanged(node="n1", state=NodeState.UP))
        world.send(PoolChanged(pool=cpu_node("n1", 1)[0]))
    elif live:
        action_id = live[choice % len(live)]
        stopping = world.scheduler.entries[action_id].stop is not None
        if what == "started":
            world.started(action_id)
        elif what == "finished":
            world.finished(action_id, overhead_s=choice / 4)
        elif what == "failed":
            world.send(StartFailed(action=action_id, reason="no image"))
        elif what == "cancel" and not stopping:
            stops = [effect for effect in world.send(Cancel(action=action_id)) if isinstance(effect, Stop)]
            assert len(stops) <= 1


PHASE_BEFORE = {"started": STARTING, "finished": EXECUTING, "failed": STARTING}
