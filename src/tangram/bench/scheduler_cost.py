"""The cost of the scheduler: microseconds per action and bytes per waiting action.

A scheduler under `adaptive` with one node of 64 cores is kept at a constant number of waiting actions: each action that
ends is replaced by a new one. The mix is that of coding agents, as two runs: 95 % tool calls, whose CPU use is learned,
and 5 % elastic rewards. Only `handle` is timed, not the construction of events. Every action is decoded from bytes as
in a service, so that none shares strings or records with another. Garbage collection has Python's defaults.

Two states of the queue are timed: before any waiting action reaches `ageing_s`, and after all have, when the queue is
served in order of arrival. With a million waiting actions the second is the usual one.
"""

from __future__ import annotations

import gc
import heapq
import os
import random
import time
from collections import deque

import msgspec

from tangram.bench.base import BenchRun, at_least, at_most, run_in_fresh_process
from tangram.core.action import Action, Usage
from tangram.core.demand import CORE, CPU
from tangram.core.limits import Limits
from tangram.core.messages import (
    Effect,
    Event,
    Finished,
    Reserve,
    Resize,
    Resized,
    Settle,
    Start,
    Started,
    Submit,
    Tick,
    WakeAt,
    cpu_node,
)
from tangram.core.policies import DEFAULT_POLICY, policy
from tangram.core.scheduler import Scheduler
from tangram.processes.process_tree import resident_bytes
from tangram.sim.episode import SimStep
from tangram.sim.simulate import simulate
from tangram.sim.workloads import build

NODE = "n0"
GIB_PER_CORE = 9.4
SANDBOX_MIB = 256
RUNS = ("one", "two")
MIX_BATCH = 256
"""Episodes of the `coding` workload from which the actions are drawn."""


class SchedulerCostSizes(msgspec.Struct, frozen=True, kw_only=True):
    cores: int = 64
    sandboxes: int = 1024
    reward_share: float = 0.05
    ageing_s: float = 600.0
    """The scheduler's default."""
    depth: int = 1_000
    depth_large: int = 1_000_000
    warm_up: int = 5_000
    """Actions that end before the timing starts, so that every class has been learned."""
    window: int = 10_000
    """Actions that end during the timing."""
    repeats: int = 12
    """The best repeat counts: slower ones were only disturbed by other programs."""
    sim_batch: int = 512
    sim_cores: int = 64
    sim_repeats: int = 8


LABEL = "measured"
FULL = SchedulerCostSizes()
QUICK = SchedulerCostSizes(window=4_000, repeats=3, sim_repeats=2)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Results at one depth of the queue; all times in microseconds."""

    fresh: float
    """Time per action before ageing: the best of the repeats."""
    worst: float
    aged: float
    by_event: dict[str, float]
    """Time per event in the best repeat."""
    resizes: float
    """Resizes per action."""
    running: float
    """Concurrently running actions."""
    bytes: float


def measure(sizes: SchedulerCostSizes, run: BenchRun) -> None:
    """Run each part in a fresh process, one after the other: other work disturbs times, earlier work disturbs
    memory."""
    shallow = run_in_fresh_process(cost_at, (sizes, sizes.depth), run.processes)
    run.progress(0.2)
    deep = run_in_fresh_process(cost_at, (sizes, sizes.depth_large), run.processes)
    run.progress(0.8)
    small, large = depth_name(sizes.depth), depth_name(sizes.depth_large)
    run.add(f"us_per_action_{small}", shallow.fresh, at_most(60.0))
    growth, growth_aged = deep.fresh / shallow.fresh, deep.aged / shallow.aged
    run.add(f"growth_{large}", max(growth, growth_aged), at_most(3.0))
    run.add("bytes_per_waiting", deep.bytes, at_most(2048.0))
    run.add("sim_actions_per_s", run_in_fresh_process(sim_speed, (sizes,), run.processes), at_least(10_000.0))
    for depth, cost in ((small, shallow), (large, deep)):
        run.add(f"us_per_action_{depth}", cost.fresh)
        run.add(f"us_per_action_worst_{depth}", cost.worst)
        run.add(f"us_per_action_aged_{depth}", cost.aged)
        for event, us in cost.by_event.items():
            run.add(f"us_per_{event}_{depth}", us)
        run.add(f"resizes_per_action_{depth}", cost.resizes)
        run.add(f"running_{depth}", cost.running)
    run.notes.extend(_notes(sizes, growth, growth_aged))


def _notes(sizes: SchedulerCostSizes, growth: float, growth_aged: float) -> list[str]:
    large = depth_name(sizes.depth_large)
    notes = [
        "The node is saturated: the stated number of actions waits at every moment.",
        f"growth_{large} is the larger of {growth:.2f} (no action aged) and {growth_aged:.2f} (all actions aged).",
        "us_per_action is the time in handle for Submit, Started, Finished, and of Resized and Tick where they occur:"
        " the best of the repeats, us_per_action_worst the worst, both with garbage collection on.",
        "bytes_per_waiting is the growth of resident memory while the queue was filled, the actions included.",
    ]
    if sizes.depth_large != FULL.depth_large:
        notes.append(
            f"To end in time, the deepest queue held {sizes.depth_large:,} waiting actions, not {FULL.depth_large:,}."
        )
    return notes


def depth_name(depth: int) -> str:
    """Return 1e6 for a million: metrics are named after the depth of the queue."""
    return f"{depth:.0e}".replace("e+0", "e")


def cost_at(sizes: SchedulerCostSizes, depth: int) -> Cost:
    bed = SchedulerTestbed(sizes)
    bed.warm_up(min(depth, sizes.depth))
    before, waiting = _resident_bytes(), bed.waiting
    bed.fill(depth)
    grown = _resident_bytes() - before
    added = bed.waiting - waiting
    timings: list[SchedulerTiming] = []
    for _ in range(sizes.repeats):
        if timings and depth <= sizes.depth:
            # A short queue changes while it turns over, and only the same work can be timed twice.
            bed = SchedulerTestbed(sizes)
            bed.warm_up(depth)
        timings.append(bed.time_actions(sizes.window))
    best = min(timings, key=lambda timing: timing.us_per_action)
    return Cost(
        fresh=best.us_per_action,
        worst=max(timing.us_per_action for timing in timings),
        aged=min(_aged_us_per_action(bed, sizes) for _ in range(sizes.repeats)),
        by_event=best.us_by_event,
        resizes=best.resizes,
        running=best.running,
        bytes=grown / added if added else 0.0,
    )


def _aged_us_per_action(bed: SchedulerTestbed, sizes: SchedulerCostSizes) -> float:
    """Age the whole queue, then serve a part of it: first the backlog of ends, then timed."""
    bed.now += sizes.ageing_s
    bed.turn_over(sizes.depth // 4)
    return bed.time_actions(sizes.depth // 4).us_per_action


def sim_speed(sizes: SchedulerCostSizes) -> float:
    """Actions per second of the simulator on `coding`, without building the workload."""
    pools = cpu_node(NODE, sizes.sim_cores, GIB_PER_CORE * sizes.sim_cores)
    workload = build("coding", batch=sizes.sim_batch, seed=0)
    best = 0.0
    for _ in range(sizes.sim_repeats):
        begin = time.perf_counter_ns()
        actions = len(simulate(workload, DEFAULT_POLICY, pools).rows)
        best = max(best, actions / (time.perf_counter_ns() - begin) * 1e9)
    return best


def _resident_bytes() -> int:
    gc.collect()
    return resident_bytes(os.getpid())


# ---- the bed ----------------------------------------------------------------------------------------------------


class SchedulerTiming(msgspec.Struct, frozen=True):
    us_per_action: float
    us_by_event: dict[str, float]
    resizes: float
    running: int


class _RunningAction:
    """A started action and its progress. Times are on the `progress` clock of the testbed."""

    __slots__ = ("cores", "left_s", "since", "speed", "started_at", "started_now", "step", "version", "width")

    def __init__(self, step: SimStep, width: float, limit: float, progress_s: float, now: float) -> None:
        self.step = step
        self.width = width if step.demand.elastic else 1.0
        self.left_s = step.work_s
        self.started_at = self.since = progress_s
        self.started_now = now
        self.version = 0
        """Number of resizes: an end expected before the last one is void."""
        self._set(limit)

    def _set(self, limit: float) -> None:
        units = min(self.width, limit) if self.step.demand.elastic else 1.0
        self.speed = self.step.speedup.at(units)
        self.cores = self.step.busy * units

    def resize(self, limit: float, progress_s: float) -> None:
        self.left_s = max(0.0, self.left_s - (progress_s - self.since) * self.speed)
        self.since = progress_s
        self.version += 1
        self._set(limit)

    @property
    def ends_at(self) -> float:
        return self.since + self.left_s / self.speed


class SchedulerTestbed:
    """A scheduler, its clock, and stand-ins for managers.

    When the running actions can use more cores than there are, all of them slow down equally: the clock `_progress_s`,
    which measures their progress, then runs slower than `now`.
    """

    def __init__(self, sizes: SchedulerCostSizes) -> None:
        pools = cpu_node(NODE, sizes.cores, GIB_PER_CORE * sizes.cores)
        self.scheduler = Scheduler(policy(DEFAULT_POLICY), pools, limits=Limits(ageing_s=sizes.ageing_s))
        self.now = 0.0
        self.ended = 0
        self.waiting = 0
        self._depth = 0
        self._random = random.Random(0)
        self._sizes = sizes
        self._number = 0
        self._tools, self._rewards = _templates()
        self._running: dict[str, _RunningAction] = {}
        self._cores_wanted = 0.0
        self._progress_s = 0.0
        self._ends: list[tuple[float, int, str]] = []
        """Time on the progress clock, version and action of each expected end."""
        self._wakes: list[float] = []
        self._pending: deque[Event] = deque()
        self._spent_ns: dict[str, int] = {}
        self._events: dict[str, int] = {}
        for number in range(sizes.sandboxes):
            run = RUNS[number % len(RUNS)]
            self._send(Reserve(sandbox=f"box-{number}", memory=SANDBOX_MIB, run=run, node=NODE))

    def fill(self, depth: int) -> None:
        """Submit until `depth` actions wait, and keep the number constant."""
        self._depth = depth
        while self.waiting < depth:
            self._submit()

    def warm_up(self, depth: int) -> None:
        self.fill(depth)
        self.turn_over(self._sizes.warm_up)

    def time_actions(self, actions: int) -> SchedulerTiming:
        """Turn over this many actions and return the timing."""
        self._spent_ns, self._events = {}, {}
        self.turn_over(actions)
        return SchedulerTiming(
            us_per_action=sum(self._spent_ns.values()) / actions / 1e3,
            us_by_event={name: ns / self._events[name] / 1e3 for name, ns in self._spent_ns.items()},
            resizes=self._events.get("resized", 0) / actions,
            running=len(self._running),
        )

    def turn_over(self, actions: int) -> None:
        """Run until this many actions have ended, replacing each."""
        target = self.ended + actions
        while self.ended < target:
            progress_s, version, action = self._ends[0]
            pace = min(1.0, self._sizes.cores / max(self._cores_wanted, 1e-9))
            ends_at = self.now + (progress_s - self._progress_s) / pace
            if self._wakes and self._wakes[0] <= ends_at:
                wakes_at = max(self.now, heapq.heappop(self._wakes))
                self._progress_s += (wakes_at - self.now) * pace
                self.now = wakes_at
                self._send(Tick())
                continue
            heapq.heappop(self._ends)
            if action in self._running and self._running[action].version == version:
                self.now, self._progress_s = ends_at, progress_s
                self._finish(action)

    def _submit(self) -> None:
        """Submit an action. Its id contains its template, so nothing is stored here for a waiting action."""
        self._number += 1
        reward = self._random.random() < self._sizes.reward_share
        templates = self._rewards if reward else self._tools
        pick = self._random.randrange(len(templates))
        sandbox = self._number % self._sizes.sandboxes
        wire = (
            templates[pick][0]
            .replace(b"@run", RUNS[sandbox % len(RUNS)].encode())
            .replace(b"@box", b"box-%d" % sandbox)
        )
        wire = wire.replace(b"@id", b"%s.%d.%d" % (b"reward" if reward else b"tool", pick, self._number))
        self.waiting += 1
        self._send(Submit(action=msgspec.json.decode(wire, type=Action)))

    def _finish(self, action: str) -> None:
        running = self._running.pop(action)
        self._cores_wanted -= running.cores
        own_s = max(0.0, self._progress_s - running.started_at)
        slowed_s = max(0.0, self.now - running.started_now - own_s)
        usage = Usage(cpu_s=running.step.busy * running.width * own_s, throttled_s=slowed_s)
        self.ended += 1
        self._send(Finished(action=action, usage=usage))
        self.fill(self._depth)

    def _send(self, event: Event) -> None:
        """Handle one event, and all events that follow from its effects."""
        self._pending.append(event)
        while self._pending:
            event = self._pending.popleft()
            begin = time.perf_counter_ns()
            effects = self.scheduler.handle(event, self.now)
            spent = time.perf_counter_ns() - begin
            name = type(event).__name__.lower()
            self._spent_ns[name] = self._spent_ns.get(name, 0) + spent
            self._events[name] = self._events.get(name, 0) + 1
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Start):
            self._start(effect)
        elif isinstance(effect, Resize):
            running = self._running[effect.action]
            self._cores_wanted -= running.cores
            running.resize(effect.limit / CORE, self._progress_s)
            self._cores_wanted += running.cores
            heapq.heappush(self._ends, (running.ends_at, running.version, effect.action))
            self._pending.append(Resized(action=effect.action, limit=effect.limit))
        elif isinstance(effect, WakeAt):
            heapq.heappush(self._wakes, effect.at)
        else:
            assert isinstance(effect, Settle), effect

    def _start(self, effect: Start) -> None:
        action, grant = effect.action.id, effect.grant
        kind, pick, _ = action.split(".")
        step = (self._rewards if kind == "reward" else self._tools)[int(pick)][1]
        limit = next(share.limit for share in grant.shares if share.pool.startswith(CPU))
        running = _RunningAction(step, grant.width / CORE, limit / CORE, self._progress_s, self.now)
        self._running[action] = running
        self._cores_wanted += running.cores
        heapq.heappush(self._ends, (running.ends_at, 0, action))
        self.waiting -= 1
        self._pending.append(Started(action=action))


def _templates() -> tuple[list[tuple[bytes, SimStep]], list[tuple[bytes, SimStep]]]:
    """Encoded actions with their ground truth: tool calls and rewards."""
    tools: list[tuple[bytes, SimStep]] = []
    rewards: list[tuple[bytes, SimStep]] = []
    for episode in build("coding", batch=MIX_BATCH, seed=0).episodes:
        for step in (step for turn in episode.turns for step in turn.steps):
            action = Action(
                id="@id",
                demand=step.demand,
                run="@run",
                task=step.task or episode.task,
                trajectory="@box",
                sandbox="@box",
                kind=step.kind,
                key=step.key,
            )
            (rewards if step.kind == "reward" else tools).append((msgspec.json.encode(action), step))
    return tools, rewards
