"""Draws the pictures of the documentation: `python docs/pictures/make.py`.

Every picture is a simulation on the scheduler and the simulator of this code base; none is drawn by hand. There are
two scenes: `trajectories`, eight agents on two cores, shows what the unit of reservation changes; `actions`, a dozen
actions on eight cores, is simulated under every policy so that the pictures can be compared row by row.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tangram import Demand, PowerLaw, cores, cpu_node, learned
from tangram.core.demand import CORE, CPU
from tangram.core.messages import Effect, Event, Pool, Release, Reserve, Resize, Settle, Start, Submit
from tangram.reports.svg import Drawing, LinearScale
from tangram.sim.episode import SimEpisode, SimStep, SimTurn, Workload
from tangram.sim.simulate import simulate
from tangram.sim.workloads.fit import lognormal, random_stream

HERE = Path(__file__).parent

CSS = {
    "exec": "fill k0",
    "reward": "fill p1",
    "elastic": "fill p1",
    "call": "fill k1",
    "idle": "area p0",
    "wait": "half k4",
}
"""The marks of kinds of actions, of reserved cores that are idle, and of waiting."""


# ---- what happened, read from the messages ----------------------------------------------------------------------


class Bar:
    """One action: when it was submitted, how many cores it held from which time on, when it ended."""

    def __init__(self, trajectory: str, kind: str, submitted: float) -> None:
        self.trajectory, self.kind, self.submitted = trajectory, kind, submitted
        self.held: list[tuple[float, float]] = []
        self.ended = submitted


class Seen:
    """An observer for `simulate`."""

    def __init__(self) -> None:
        self.bars: dict[str, Bar] = {}
        self.boxes: dict[str, list[float]] = {}

    def __call__(self, now: float, event: Event, effects: list[Effect]) -> None:
        for message in (event, *effects):
            if isinstance(message, Submit):
                action = message.action
                self.bars[action.id] = Bar(action.trajectory, action.kind, now)
            elif isinstance(message, Start):
                self.bars[message.action.id].held.append((now, message.grant.shares[0].reserved / CORE))
            elif isinstance(message, Resize):
                self.bars[message.action].held.append((now, message.reserved / CORE))
            elif isinstance(message, Settle):
                self.bars[message.outcome.action].ended = now
            elif isinstance(message, Reserve):
                self.boxes[message.sandbox] = [now, now]
            elif isinstance(message, Release):
                self.boxes[message.sandbox][1] = now

    def mean_act(self) -> float:
        return sum(bar.ended - bar.submitted for bar in self.bars.values()) / len(self.bars)

    def end(self) -> float:
        return max(bar.ended for bar in self.bars.values())


def play(workload: Workload, policy: str, pools: tuple[Pool, ...]) -> Seen:
    seen = Seen()
    simulate(workload, policy, pools, knowledge="perfect", observer=seen)
    return seen


# ---- the scene of trajectories ----------------------------------------------------------------------------------


def trajectories(count: int = 8, turns: int = 9) -> Workload:
    """Agents that think, call tools which mostly wait, and end with their tests."""
    call = Demand({CPU: learned(4.0)})
    think, seconds = lognormal(2.6, 0.5), lognormal(1.1, 0.8, 8.0)
    episodes = []
    for k in range(count):
        rng = random_stream("picture", k)
        thinks, works = think.draw(rng, turns + 1).tolist(), seconds.draw(rng, turns).tolist()
        steps = [SimStep(kind="exec", key="tool", demand=call, work_s=work, busy=0.25) for work in works]
        steps.append(SimStep(kind="reward", key="tests", demand=call, work_s=4.0, busy=0.4))
        parts = tuple(SimTurn(think_s=t, steps=(step,)) for t, step in zip(thinks, steps, strict=True))
        episodes.append(SimEpisode(id=f"trajectory {k + 1}", run="run", task="coding", memory=256, turns=parts))
    return Workload(name="picture", seed=0, episodes=tuple(episodes))


def draw_trajectories() -> Drawing:
    """A pod per trajectory above, actions below; the same trajectories on the same cores."""
    workload, pools = trajectories(), cpu_node("n0", 2, 8)
    sides = [
        ("A pod of half a core for each trajectory: four fit at a time", play(workload, "pods:0.5", pools)),
        ("An action holds cores only while it runs: all eight are under way", play(workload, "adaptive", pools)),
    ]
    left, right, row, head = 104.0, 846.0, 15.0, 34.0
    end = 5.0 * -(-max(seen.end() for _, seen in sides) // 5.0)
    panel = head + 8 * row + 16.0
    drawing = Drawing(
        870, 74 + 2 * panel + 24, "The same eight trajectories on two cores, reserved by pod and by action"
    )
    across = LinearScale(0.0, end, left, right)
    drawing.text(24, 32, "The same eight agent trajectories on the same two cores (simulated)", "title")
    _legend(
        drawing, 24, 54, [("exec", "tool call"), ("reward", "tests"), ("idle", "reserved, idle"), ("wait", "waiting")]
    )
    for k, (title, seen) in enumerate(sides):
        top = 70 + k * panel
        drawing.text(left, top + 20, title, "strong")
        drawing.text(
            right, top + 20, f"mean ACT {seen.mean_act():.1f} s, all done after {seen.end():.0f} s", "soft", "end"
        )
        for tick in range(0, int(end) + 1, 10):
            drawing.line(across(tick), top + head - 4, across(tick), top + head + 8 * row, "gridline")
        for number, episode in enumerate(workload.episodes):
            _trajectory(drawing, across, seen, episode.id, top + head + number * row, row, pods=k == 0)
    bottom = 70 + 2 * panel - 8
    for tick in range(0, int(end) + 1, 10):
        drawing.x_tick(across(tick), bottom - 9, f"{tick} s")
    return drawing


def _trajectory(
    drawing: Drawing, across: LinearScale, seen: Seen, name: str, y: float, row: float, *, pods: bool
) -> None:
    drawing.text(96, y + 11, name, "tick", "end")
    bars = [bar for bar in seen.bars.values() if bar.trajectory == name]
    if pods:
        admitted, released = bars[0].held[0][0], seen.boxes[f"box-{name}"][1]
        drawing.rect(across(admitted), y + 2, across(released) - across(admitted), row - 4, CSS["idle"])
    for bar in bars:
        start = bar.held[0][0]
        if start > bar.submitted:
            drawing.rect(across(bar.submitted), y + 6, across(start) - across(bar.submitted), row - 12, CSS["wait"])
        drawing.rect(across(start), y + 2, max(1.0, across(bar.ended) - across(start)), row - 4, CSS[bar.kind])


def _legend(drawing: Drawing, x: float, y: float, entries: list[tuple[str, str]]) -> None:
    for kind, words in entries:
        drawing.rect(x, y - 9, 12, 10, CSS[kind])
        drawing.text(x + 18, y, words, "tick")
        x += 34 + 6.6 * len(words)


# ---- the scene of actions ---------------------------------------------------------------------------------------

CORES = 8
ELASTIC = ((0.0, 6.0), (0.3, 40.0), (0.6, 10.0), (0.9, 20.0), (6.0, 30.0), (7.0, 4.0), (8.0, 2.0))
"""Arrival and seconds on one core of actions that run on 1 to 8 cores, with speed-up k ** 0.75."""
CALLS = ((1.5, 4.0), (2.0, 3.0), (4.0, 5.0), (9.0, 2.0), (9.4, 3.0), (9.8, 4.0))
"""Arrival and seconds of tool calls without declared CPU; they keep a quarter of a core busy."""

CORE_PX = 4.5
"""Height of one core."""

POLICIES = {
    "fcfs": "fcfs: every action at its minimum, in order of arrival",
    "fixed:4": "fixed:4: every elastic action on four cores",
    "paper": "paper: free cores divided among the waiting prefix; never changed afterwards",
    "adaptive:no-resize": "adaptive:no-resize: smallest first, widths that leave room for others",
    "adaptive": "adaptive: smallest first, shares that follow what runs and waits",
}


def actions() -> Workload:
    law = PowerLaw(0.75)
    tests = Demand({CPU: cores(1, CORES)}, speedup=law)
    call = Demand({CPU: learned(4.0)})
    steps = [(at, SimStep(kind="elastic", key="tests", demand=tests, work_s=work, speedup=law)) for at, work in ELASTIC]
    steps += [(at, SimStep(kind="call", key="tool", demand=call, work_s=work, busy=0.25)) for at, work in CALLS]
    steps.sort(key=lambda step: step[0])
    return Workload(
        name="picture",
        seed=0,
        episodes=tuple(
            SimEpisode(id=f"{k:02d}", run="run", task="", start_s=at, turns=(SimTurn(think_s=0.0, steps=(step,)),))
            for k, (at, step) in enumerate(steps)
        ),
    )


def draw_actions(policy: str, seen: Seen, end: float) -> Drawing:
    """A row per action, as high as the cores that it holds; below, the cores that all of them hold."""
    left, right = 134.0, 846.0
    works = {e.id: e.turns[0].steps[0].work_s for e in actions().episodes}
    height = {"elastic": CORES * CORE_PX + 4, "call": 16.0}
    total = 74 + sum(height[bar.kind] for bar in seen.bars.values()) + 84
    drawing = Drawing(870, total, f"Cores held by each action over time under {policy}")
    across = LinearScale(0.0, end, left, right)
    drawing.text(24, 32, POLICIES[policy], "title")
    _legend(
        drawing,
        24,
        54,
        [("elastic", "elastic action, as high as its cores"), ("call", "tool call"), ("wait", "waiting")],
    )
    drawing.text(right, 54, f"mean ACT {seen.mean_act():.1f} s, all done after {seen.end():.1f} s", "soft", "end")
    drawing.x_axis(across, range(0, int(end) + 1, 5), 66, total - 31, lambda tick: f"{tick:g} s")
    y = 70.0
    for bar in seen.bars.values():
        floor = y + height[bar.kind] - 3
        drawing.text(left - 10, floor - 2, f"{bar.kind}, {works[bar.trajectory]:g} s", "tick", "end")
        start = bar.held[0][0]
        if start - bar.submitted > 1e-6:
            drawing.rect(across(bar.submitted), floor - 4, across(start) - across(bar.submitted), 4, CSS["wait"])
        edges = [at for at, _ in bar.held[1:]] + [bar.ended]
        for (since, held), until in zip(bar.held, edges, strict=True):
            if until <= since:
                continue
            high = max(2.0, held * CORE_PX)
            drawing.rect(across(since), floor - high, max(0.8, across(until) - across(since)), high, CSS[bar.kind])
        y += height[bar.kind]
    _held_by_all(drawing, seen, across, y + 50, left, right)
    return drawing


def _held_by_all(drawing: Drawing, seen: Seen, across: LinearScale, floor: float, left: float, right: float) -> None:
    changes: list[tuple[float, float]] = []
    for bar in seen.bars.values():
        before = 0.0
        for at, held in [*bar.held, (bar.ended, 0.0)]:
            changes.append((at, held - before))
            before = held
    points, level = [(left, floor)], 0.0
    for at, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        points.append((across(at), floor - level * CORE_PX))
        level += sum(change for _, change in group)
        points.append((across(at), floor - level * CORE_PX))
    drawing.path([*points, (across(seen.end()), floor)], CSS["idle"], close=True)
    drawing.line(left, floor - CORES * CORE_PX, right, floor - CORES * CORE_PX, "limit")
    drawing.line(left, floor, right, floor, "axis")
    drawing.text(left - 10, floor - 16, "all cores held", "tick", "end")
    drawing.text(left - 10, floor - CORES * CORE_PX + 4, f"{CORES} cores", "tick", "end")


# ---- files ------------------------------------------------------------------------------------------------------


def main() -> None:
    pools = cpu_node("n0", CORES)
    seen = {policy: play(actions(), policy, pools) for policy in POLICIES}
    end = 5.0 * -(-max(each.end() for each in seen.values()) // 5.0)
    drawings = {f"policy-{policy.replace(':', '-')}": draw_actions(policy, each, end) for policy, each in seen.items()}
    drawings["pods-and-actions"] = draw_trajectories()
    for name, drawing in drawings.items():
        (HERE / f"{name}.svg").write_text(drawing.standalone(), encoding="utf-8")
        print(f"docs/pictures/{name}.svg")
    for policy, each in seen.items():
        print(f"{policy:<20} mean ACT {each.mean_act():6.2f} s, done after {each.end():6.2f} s")


if __name__ == "__main__":
    main()
