"""The pictures of the documentation: `python docs/pictures/make.py` draws them anew.

Every picture is a simulation that is run here, on the same scheduler and the same simulator as everything else; none
is drawn by hand. Two scenes: `trajectories`, eight agents on two cores, for what the unit of reservation changes; and
`actions`, a dozen actions on eight cores, played under every policy so that the pictures can be compared row by row.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tangram import Demand, PowerLaw, cores, cpu_node, learned
from tangram.core.demand import CORE, CPU
from tangram.core.messages import Effect, Event, Pool, Release, Reserve, Resize, Settle, Start, Submit
from tangram.reports.svg import Drawing, Linear
from tangram.sim.episode import Episode, Step, Turn, Workload
from tangram.sim.simulate import simulate
from tangram.sim.workloads.fit import lognormal, stream

HERE = Path(__file__).parent

STYLE = """
  svg { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
  .card { fill: #ffffff; stroke: #d9dbd6; } .title { font-size: 15px; font-weight: 650; fill: #1d2430; }
  .ink { fill: #1d2430; } .soft { fill: #5b6472; } .tick { fill: #6d7684; font-size: 12px; }
  .grid { stroke: #e6e7e3; } .axis { stroke: #9aa1ac; } .whole { stroke: #9aa1ac; stroke-dasharray: 4 3; }
  .elastic { fill: #0b9683; } .call { fill: #dd8a2f; } .exec { fill: #3f74a8; } .reward { fill: #0b9683; }
  .wait { fill: #cf5a55; fill-opacity: .55; } .idle { fill: #8a919e; fill-opacity: .28; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1b1f26; stroke: #2d333d; } .title, .ink { fill: #e8eaee; } .soft { fill: #a7afbc; }
    .tick { fill: #a7afbc; } .grid { stroke: #2b313b; } .axis, .whole { stroke: #7d8694; }
    .elastic, .reward { fill: #38c7b2; } .call { fill: #f0ab5c; } .exec { fill: #6ea4d8; } .wait { fill: #ec8580; }
    .idle { fill: #949cab; }
  }
"""
"""Background and ink change together, so that a picture is readable on any page."""


# ---- what happened, read from the messages ----------------------------------------------------------------------


class Bar:
    """One action: when it was submitted, which cores it held from when on, when it ended."""

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
        rng = stream("picture", k)
        thinks, works = think.draw(rng, turns + 1).tolist(), seconds.draw(rng, turns).tolist()
        steps = [Step(kind="exec", key="tool", demand=call, work_s=work, busy=0.25) for work in works]
        steps.append(Step(kind="reward", key="tests", demand=call, work_s=4.0, busy=0.4))
        parts = tuple(Turn(think_s=t, steps=(step,)) for t, step in zip(thinks, steps, strict=True))
        episodes.append(Episode(id=f"trajectory {k + 1}", run="run", task="coding", memory=256, turns=parts))
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
    across = Linear(0.0, end, left, right)
    drawing.text(24, 32, "The same eight agent trajectories on the same two cores (simulated)", "title")
    _legend(
        drawing, 24, 54, [("exec", "tool call"), ("reward", "tests"), ("idle", "reserved, idle"), ("wait", "waiting")]
    )
    for k, (title, seen) in enumerate(sides):
        top = 70 + k * panel
        drawing.text(left, top + 20, title, "ink")
        drawing.text(
            right, top + 20, f"mean ACT {seen.mean_act():.1f} s, all done after {seen.end():.0f} s", "soft", "end"
        )
        for tick in range(0, int(end) + 1, 10):
            drawing.line(across(tick), top + head - 4, across(tick), top + head + 8 * row, "grid")
        for number, episode in enumerate(workload.episodes):
            _trajectory(drawing, across, seen, episode.id, top + head + number * row, row, pods=k == 0)
    bottom = 70 + 2 * panel - 8
    for tick in range(0, int(end) + 1, 10):
        drawing.text(across(tick), bottom + 8, f"{tick} s", "tick", "middle")
    return drawing


def _trajectory(drawing: Drawing, across: Linear, seen: Seen, name: str, y: float, row: float, *, pods: bool) -> None:
    drawing.text(96, y + 11, name, "tick", "end")
    bars = [bar for bar in seen.bars.values() if bar.trajectory == name]
    if pods:
        admitted, released = bars[0].held[0][0], seen.boxes[f"box-{name}"][1]
        drawing.rect(across(admitted), y + 2, across(released) - across(admitted), row - 4, "idle")
    for bar in bars:
        start = bar.held[0][0]
        if start > bar.submitted:
            drawing.rect(across(bar.submitted), y + 6, across(start) - across(bar.submitted), row - 12, "wait")
        drawing.rect(across(start), y + 2, max(1.0, across(bar.ended) - across(start)), row - 4, bar.kind)


def _legend(drawing: Drawing, x: float, y: float, entries: list[tuple[str, str]]) -> None:
    for css, words in entries:
        drawing.rect(x, y - 9, 12, 10, css)
        drawing.text(x + 18, y, words, "tick")
        x += 34 + 6.6 * len(words)


# ---- the scene of actions ---------------------------------------------------------------------------------------

CORES = 8
ELASTIC = ((0.0, 6.0), (0.3, 40.0), (0.6, 10.0), (0.9, 20.0), (6.0, 30.0), (7.0, 4.0), (8.0, 2.0))
"""Arrival and seconds on one core of actions that run on 1 to 8 cores, with speed-up k ** 0.75."""
CALLS = ((1.5, 4.0), (2.0, 3.0), (4.0, 5.0), (9.0, 2.0), (9.4, 3.0), (9.8, 4.0))
"""Arrival and seconds of tool calls of which nobody declared CPU; they keep a quarter of a core busy."""

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
    steps = [(at, Step(kind="elastic", key="tests", demand=tests, work_s=work, speedup=law)) for at, work in ELASTIC]
    steps += [(at, Step(kind="call", key="tool", demand=call, work_s=work, busy=0.25)) for at, work in CALLS]
    steps.sort(key=lambda step: step[0])
    return Workload(
        name="picture",
        seed=0,
        episodes=tuple(
            Episode(id=f"{k:02d}", run="run", task="", start_s=at, turns=(Turn(think_s=0.0, steps=(step,)),))
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
    across = Linear(0.0, end, left, right)
    drawing.text(24, 32, POLICIES[policy], "title")
    _legend(
        drawing,
        24,
        54,
        [("elastic", "elastic action, as high as its cores"), ("call", "tool call"), ("wait", "waiting")],
    )
    drawing.text(right, 54, f"mean ACT {seen.mean_act():.1f} s, all done after {seen.end():.1f} s", "soft", "end")
    for tick in range(0, int(end) + 1, 5):
        drawing.line(across(tick), 66, across(tick), total - 30, "grid")
        drawing.text(across(tick), total - 14, f"{tick} s", "tick", "middle")
    y = 70.0
    for bar in seen.bars.values():
        floor = y + height[bar.kind] - 3
        drawing.text(left - 10, floor - 2, f"{bar.kind}, {works[bar.trajectory]:g} s", "tick", "end")
        start = bar.held[0][0]
        if start - bar.submitted > 1e-6:
            drawing.rect(across(bar.submitted), floor - 4, across(start) - across(bar.submitted), 4, "wait")
        edges = [at for at, _ in bar.held[1:]] + [bar.ended]
        for (since, held), until in zip(bar.held, edges, strict=True):
            if until <= since:
                continue
            high = max(2.0, held * CORE_PX)
            drawing.rect(across(since), floor - high, max(0.8, across(until) - across(since)), high, bar.kind)
        y += height[bar.kind]
    _held_by_all(drawing, seen, across, y + 50, left, right)
    return drawing


def _held_by_all(drawing: Drawing, seen: Seen, across: Linear, floor: float, left: float, right: float) -> None:
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
    drawing.path([*points, (across(seen.end()), floor)], "idle", close=True)
    drawing.line(left, floor - CORES * CORE_PX, right, floor - CORES * CORE_PX, "whole")
    drawing.line(left, floor, right, floor, "axis")
    drawing.text(left - 10, floor - 16, "all cores held", "tick", "end")
    drawing.text(left - 10, floor - CORES * CORE_PX + 4, f"{CORES} cores", "tick", "end")


# ---- files ------------------------------------------------------------------------------------------------------


def standalone(drawing: Drawing) -> str:
    """The picture with its own style and background."""
    card = f'<rect class="card" x="0.5" y="0.5" width="{drawing.width - 1}" height="{drawing.height - 1}" rx="8"/>'
    opening, _, rest = drawing.render().partition(">")
    size = f'xmlns="http://www.w3.org/2000/svg" width="{drawing.width:g}" height="{drawing.height:g}"'
    return f"{opening.replace('<svg', f'<svg {size}', 1)}>\n<style>{STYLE}</style>\n{card}\n{rest}\n".replace(
        "/><", "/>\n<"
    )


def main() -> None:
    pools = cpu_node("n0", CORES)
    seen = {policy: play(actions(), policy, pools) for policy in POLICIES}
    end = 5.0 * -(-max(each.end() for each in seen.values()) // 5.0)
    drawings = {f"policy-{policy.replace(':', '-')}": draw_actions(policy, each, end) for policy, each in seen.items()}
    drawings["pods-and-actions"] = draw_trajectories()
    for name, drawing in drawings.items():
        (HERE / f"{name}.svg").write_text(standalone(drawing), encoding="utf-8")
        print(f"docs/pictures/{name}.svg")
    for policy, each in seen.items():
        print(f"{policy:<20} mean ACT {each.mean_act():6.2f} s, done after {each.end():6.2f} s")


if __name__ == "__main__":
    main()
