"""The page of the benchmark: both sides on one time axis, and what the difference comes to.

Owns what the page says and in which order: the answer, the two runs, the numbers, where the core time went, how close
the simulator came, what to do next. Never measures anything. Says "measured" or "simulated" where numbers stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.bench.base import BenchResult
from tangram.bench.reservation.neighbours import disturbed
from tangram.bench.reservation.sides import BY_ACTION, REQUEST, RESERVED, SIDES
from tangram.files.atomic_file import whole_file
from tangram.reports.formatting import percent, seconds, several
from tangram.reports.page import card, figure, legend, page, prose, section
from tangram.reports.svg import Drawing, Linear, duration
from tangram.sim import charts
from tangram.sim.result import ActionRow, Result

if TYPE_CHECKING:
    from tangram.bench.reservation import Played

COLOURS = {RESERVED: "p0", BY_ACTION: "p1"}
TITLES = {RESERVED: "A core reserved for each trajectory", BY_ACTION: "Scheduled by action"}
THINKING, WAITING, EXECUTING = "pale p0", "half k1", "fill p1"
"""How the three things that a trajectory does are painted."""
CORE_TIME = {
    "core_use": ("fill p1", "used by actions"),
    "held_share": ("half p1", "held by an action that did not use it"),
    "thinking_share": ("half p0", "kept for an agent that was thinking"),
    "wanted_share": ("half k1", "free while an action waited"),
    "unwanted_share": ("pale p0", "free, and nobody waited"),
}
"""Parts of the core time, by the name of their share: how each is painted, and its words."""

TABLE = {
    "act_mean_s": "mean ACT",
    "act_p50_s": "p50",
    "act_p99_s": "p99",
    "waiting_mean_s": "waiting",
    "step_s": "step",
    "core_use": "core use",
    "reward_mean": "reward",
}
RATIOS = {"act_mean_s": "act_ratio", "act_p50_s": "p50_ratio", "act_p99_s": "p99_ratio", "step_s": "step_ratio"}

ROW, GROUP_GAP = 17.0, 8.0
"""Height of a trajectory in the timeline, and what lies between groups."""
LEFT, RIGHT, WIDTH = 108.0, 1000.0, 1040.0


def write(path: Path, result: BenchResult, played: Sequence[Played]) -> None:
    with whole_file("report", path) as file:
        file.write(_page(result, played, path).encode())


def _page(result: BenchResult, played: Sequence[Played], path: Path) -> str:
    first = played[0]
    lines = [charts.Line(name=side, css=COLOURS[side], result=first.measured[side].result) for side in SIDES]
    keys = legend([(COLOURS[side], side) for side in SIDES])
    cores = result.settings["cores"]
    pool = charts.Pooled(title="Cores", unit="cores", total=float(cores))
    labels = ("measured", "coding agents", several(cores, "core"), several(len(played), "seed"))
    parts = [
        "".join(f'<span class="label">{escape(label)}</span>' for label in labels),
        f"<h1>{escape(_headline(result))}</h1>",
        _warning(played),
        f'<p class="lead">{prose(_lead(result, first))}</p>',
        _cards(result),
        _timelines(first),
        _table(result, len(played)),
        _core_time(result),
        section(
            "Cores in use",
            f"Of {several(cores, 'core')}, averaged over short times. Dashed: all of them; the end of the step.",
            figure(charts.utilisation(lines, pool)),
        ),
        section(
            "How long actions take",
            "Left: the share of all actions that are done within a time. Right: the slow ones, as the share that takes"
            " longer than a time. A curve further left is better.",
            f'{keys}<div class="pair">{figure(charts.distribution(lines))}{figure(charts.slow_tail(lines))}</div>',
        ),
        _simulator(result, played),
        _next(path, cores),
        _footer(result, path),
    ]
    return page("Tangram: the same agents, reserved and by action", "\n".join(parts))


# ---- the answer -------------------------------------------------------------------------------------------------


def _headline(result: BenchResult) -> str:
    ratio = result.metrics["act_ratio"]
    how = f"{ratio:.1f} times sooner" if ratio >= 1.0 else f"{1.0 / ratio:.1f} times later"
    low, high = result.spread.get("act_ratio", (ratio, ratio))
    doubt = ", but these few seeds leave it open" if low <= 1.0 <= high else ""
    return f"The same agents on the same cores: actions complete {how} when cores are shared by action{doubt}."


def _warning(played: Sequence[Played]) -> str:
    told = disturbed([each.others[side] for each in played for side in SIDES])
    return f'<p class="lead"><strong>Warning:</strong> {prose(told)}</p>' if told else ""


def _lead(result: BenchResult, first: Played) -> str:
    before, after = (result.sides[side] for side in SIDES)
    return (
        f"{several(len(first.scripts), 'coding agent')} repaired bugs in real sandboxes, all started at once. With a"
        f" core reserved for each trajectory an action took {seconds(before['act_mean_s'])} on average, of which it"
        f" waited {seconds(before['waiting_mean_s'])}, mostly to be admitted. Scheduled by action it took"
        f" {seconds(after['act_mean_s'])}. The step took {seconds(after['step_s'])} instead of"
        f" {seconds(before['step_s'])}, and the agents earned the same rewards."
    )


def _cards(result: BenchResult) -> str:
    found = [
        card(f"{result.metrics[name]:.2f}×", words, _interval(result, name))
        for name, words in (
            ("act_ratio", "shorter mean ACT"),
            ("p99_ratio", "shorter p99 ACT"),
            ("step_ratio", "shorter step"),
        )
    ]
    before, after = (result.sides[side]["core_use"] for side in SIDES)
    found.append(card(percent(after), "of the cores in use", f"{percent(before)} reserved"))
    return f'<div class="cards">{"".join(found)}</div>'


def _interval(result: BenchResult, name: str) -> str:
    if name not in result.spread:
        return "one seed"
    low, high = result.spread[name]
    return f"95 % interval {low:.2f} to {high:.2f}"


# ---- the two runs -----------------------------------------------------------------------------------------------


def _timelines(first: Played) -> str:
    until = max(first.measured[side].result.makespan_s for side in SIDES)
    kinds = [(EXECUTING, "executing"), (WAITING, "waiting"), (THINKING, "thinking")]
    keys = legend(kinds, "the number at the end of a row: its reward")
    panels = "".join(
        figure(_timeline(first, side, until), f"{TITLES[side]}: {seconds(first.measured[side].result.makespan_s)}")
        for side in SIDES
    )
    return section(
        "Both runs on one time axis",
        f"Seed {first.seed}. A row is a trajectory, siblings of a group together; point at a bar for more.",
        f'{keys}<div class="stack">{panels}</div>',
    )


def _timeline(first: Played, side: str, until: float) -> str:
    """A row per trajectory from 0 to `until`, which is the same for both sides."""
    result, rewards = first.measured[side].result, first.rewards[side]
    tops = dict(_tops(first))
    bottom = max(tops.values()) + ROW + 4.0
    drawing = Drawing(WIDTH, bottom + 22.0, f"Timeline of all trajectories, {side}")
    across = Linear(0.0, until, LEFT, RIGHT)
    for tick in across.ticks(10):
        drawing.line(across(tick), 0.0, across(tick), bottom, "gridline")
        drawing.text(across(tick), bottom + 16.0, duration(tick), "tick", "middle")
    group = ""
    for script in first.scripts:
        if script.bug.name != group:
            group = script.bug.name
            drawing.text(LEFT - 10.0, tops[script.name] + 12.5, group, "small faint", "end")
        rows = [row for row in result.rows if row.trajectory == script.name]
        _trajectory(drawing, sorted(rows, key=lambda row: row.submitted_at), across, tops[script.name])
        end = max(row.ended_at for row in rows)
        drawing.text(across(end) + 5.0, tops[script.name] + 12.5, f"{rewards[script.name]:.2f}", "small faint")
    return drawing.render()


def _tops(first: Played) -> Iterator[tuple[str, float]]:
    at, group = 0.0, ""
    for script in first.scripts:
        if group and script.bug.name != group:
            at += GROUP_GAP
        group = script.bug.name
        yield script.name, at
        at += ROW


def _trajectory(drawing: Drawing, rows: list[ActionRow], across: Linear, top: float) -> None:
    """Thinking lies behind, from the first grant to the end; what is waited for and executed lies on it."""
    begin, end = rows[0].submitted_at + rows[0].waiting_s, max(row.ended_at for row in rows)
    drawing.rect(across(begin), top + 1.0, across(end) - across(begin), ROW - 3.0, THINKING)
    for row in rows:
        granted = row.submitted_at + row.waiting_s
        tip = (
            f"{row.trajectory}: {row.key or row.kind}, submitted at {row.submitted_at:.2f} s\n"
            f"waiting {seconds(row.waiting_s)}, executing {seconds(row.execution_s + row.overhead_s)}"
            f" on {several(round(row.width), 'core')}\n{seconds(row.cpu_s)} of CPU"
        )
        if across(granted) - across(row.submitted_at) >= 0.3:
            wide = across(granted) - across(row.submitted_at)
            drawing.rect(across(row.submitted_at), top + 1.0, wide, ROW - 3.0, WAITING, tip)
        wide = max(1.0, across(row.ended_at) - across(granted))
        drawing.rect(across(granted), top + 1.0, wide, ROW - 3.0, EXECUTING, tip)


# ---- the numbers ------------------------------------------------------------------------------------------------


def _table(result: BenchResult, seeds: int) -> str:
    heads = "".join(f"<th>{escape(words)}</th>" for words in TABLE.values())
    rows = []
    for side in SIDES:
        cells = "".join(f"<td>{_cell(result, side, name)}</td>" for name in TABLE)
        here = ' class="here"' if side == BY_ACTION else ""
        rows.append(f'<tr{here}><td><span class="dot {COLOURS[side]}"></span>{escape(side)}</td>{cells}</tr>')
    over = f"; in brackets the 95 % interval over {seeds} seeds" if seeds > 1 else ""
    return section(
        "What each side takes",
        f"Means over seeds. Below: how many times less it is than reserved{over}. Above 1 is better.",
        _wide("<th>side</th>" + heads, "".join(rows)),
    )


def _wide(heads: str, rows: str) -> str:
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(result: BenchResult, side: str, name: str) -> str:
    value = result.sides[side][name]
    told = seconds(value) if name.endswith("_s") else percent(value) if name == "core_use" else f"{value:.3f}"
    ratio = RATIOS.get(name)
    if ratio is None or side == RESERVED:
        return escape(told)
    low, high = result.spread.get(ratio, (0.0, 0.0))
    css = "good" if low > 1.0 else "bad" if 0.0 < high < 1.0 else ""
    spread = f" [{low:.2f}, {high:.2f}]" if high else ""
    return f'{escape(told)}<small class="{css}">{result.metrics[ratio]:.2f}×{spread}</small>'


def _core_time(result: BenchResult) -> str:
    bar, gap, left = 26.0, 12.0, 90.0
    drawing = Drawing(WIDTH, 2 * (bar + gap), "What the cores did, as shares of the core time of the step")
    across = Linear(0.0, 1.0, left, WIDTH - 10.0)
    for i, side in enumerate(SIDES):
        top, at = i * (bar + gap) + 2.0, 0.0
        drawing.text(left - 10.0, top + 17.0, side, "strong", "end")
        for name, (css, words) in CORE_TIME.items():
            share = result.sides[side][name]
            wide = across(at + share) - across(at)
            if wide > 0.2:
                drawing.rect(across(at), top, wide, bar, css, f"{side}\n{words}: {percent(share)}")
            if wide > 52.0:
                drawing.text(across(at) + wide / 2.0, top + 17.0, percent(share), "small strong", "middle")
            at += share
    return section(
        "What the cores did",
        "Shares of the core time, which is the cores times the step, from the recorded grants and CPU seconds.",
        legend(list(CORE_TIME.values())) + figure(drawing.render()),
    )


# ---- the simulator ----------------------------------------------------------------------------------------------


def _simulator(result: BenchResult, played: Sequence[Played]) -> str:
    names = {"act_mean_s": "mean ACT", "act_p50_s": "p50", "act_p99_s": "p99", "step_s": "step"}
    heads = "".join(f"<th>{words}</th>" for words in names.values())
    rows = []
    for side in reversed(SIDES):
        real = _means([each.measured[side].result for each in played], list(names))
        virtual = _means([each.simulated[side] for each in played], list(names))
        rows.append(f"<tr><td>{side}, measured</td>{''.join(f'<td>{seconds(value)}</td>' for value in real)}</tr>")
        cells = "".join(
            f"<td>{seconds(value)}<small>{100.0 * (value / other - 1.0):+.0f} %</small></td>"
            for value, other in zip(virtual, real, strict=True)
        )
        rows.append(f"<tr><td>{side}, simulated</td>{cells}</tr>")
    return section(
        "How close the simulator comes",
        "The recording of the side by action was read back and played on virtual time, by action and as if each"
        f" trajectory had reserved a core. The mean ACT is off by {percent(result.metrics['sim_error'])} by action and"
        f" by {percent(result.metrics['sim_error_reserved'])} reserved, on average over seeds.",
        _wide(f"<th></th>{heads}", "".join(rows)),
    )


def _means(results: list[Result], names: list[str]) -> list[float]:
    found = [result.summary() for result in results]
    return [sum(each[name] for each in found) / len(found) for name in names]


# ---- what to do next --------------------------------------------------------------------------------------------


def _next(path: Path, cores: int) -> str:
    recorded = path.parent / "actions.jsonl"
    steps = (
        ("What would other policies have done with this recording?", f"tangram sim --trace {recorded}"),
        (
            "How few cores would do as well as the reservation did?",
            f"tangram plan --trace {recorded} --like pods:{REQUEST:g}@{cores}",
        ),
        ("Where did the time of each run go?", f"tangram trace show {recorded}"),
        ("The same on your own agents: record them, then look at what the recording says.", SDK),
    )
    told = "".join(f"<p>{escape(words)}</p><pre>{escape(command)}</pre>" for words, command in steps)
    return section("What to do next", "Each of these works on what was just recorded.", told)


SDK = """\
import tangram

async with tangram.connect(record="mine.jsonl") as t:
    async with t.sandbox(memory="1GiB") as box:
        result = await box.exec("make test -j{cpus}", cpus=(1, 4), key="tests")"""


def _footer(result: BenchResult, path: Path) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    known = [
        ("ACT", "action completion time: waiting, overhead and execution, from submission to the end"),
        ("step", "from the first trajectory's request to the end of the last"),
        ("settings", settings),
        *((f"note {number}", note) for number, note in enumerate(result.notes, start=1)),
        ("label", "measured: real programs in real time; the section on the simulator alone is on virtual time"),
    ]
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in known)
    return (
        "<footer><p>The same again:</p>"
        f"<pre>tangram bench reservation --report {escape(str(path))}</pre><dl>{entries}</dl></footer>"
    )
