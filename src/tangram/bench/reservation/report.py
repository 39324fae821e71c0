"""The report of the benchmark: both sides on one time axis, and what the difference comes to.

Owns what the page contains and in which order: the answer, the two runs, the numbers, where the core time went, how
close the simulator came, what to do next. Never measures anything. Labels every number as measured or simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.bench.base import BenchResult
from tangram.bench.reservation.neighbours import disturbance_warning
from tangram.bench.reservation.sides import BY_ACTION, REQUEST, RESERVED, SIDES
from tangram.reports.charts import Bar, BarPart, GanttBar, GanttRow, bar_chart, gantt
from tangram.reports.formatting import percent, pluralize, seconds, sooner_text, spread_text
from tangram.reports.page import (
    Markup,
    card,
    cards,
    command_block,
    figure,
    figures,
    footer,
    legend,
    named,
    opening,
    page,
    section,
    table,
    with_note,
    write_page,
)
from tangram.sim import charts
from tangram.sim.report import ACT_ENTRY, duration_section
from tangram.sim.result import ActionRow, SimulationResult

if TYPE_CHECKING:
    from tangram.bench.reservation import SeedResult

COLOURS = {RESERVED: "p0", BY_ACTION: "p1"}
TITLES = {RESERVED: "A core reserved for each trajectory", BY_ACTION: "Scheduled by action"}
THINKING, WAITING, EXECUTING = "pale p0", "half k1", "fill p1"
"""The marks of the three activities of a trajectory."""
CORE_TIME = {
    "core_use": ("fill p1", "used by actions"),
    "held_share": ("half p1", "held by an action, unused"),
    "thinking_share": ("half p0", "reserved while the agent was thinking"),
    "wanted_share": ("half k1", "free while an action waited"),
    "unwanted_share": ("pale p0", "free, no action waiting"),
}
"""Parts of the core time by the name of their share: the mark and the text of each."""

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

GROUP_GAP = 8.0
"""Pixels between the groups of a timeline."""


def write(path: Path, result: BenchResult, seeds: Sequence[SeedResult]) -> None:
    write_page(path, _page(result, seeds, path))


def _page(result: BenchResult, seeds: Sequence[SeedResult], path: Path) -> str:
    first = seeds[0]
    lines = [charts.ChartSeries(name=side, css=COLOURS[side], result=first.measured[side].result) for side in SIDES]
    cores = result.settings["cores"]
    pool = charts.PoolChart(title="Cores", unit="cores", total=float(cores))
    labels = ("measured", "coding agents", pluralize(cores, "core"), pluralize(len(seeds), "seed"))
    warning = disturbance_warning([each.others[side] for each in seeds for side in SIDES])
    parts = [
        opening(labels, _headline(result), _lead(result, first), warning=warning),
        _cards(result),
        _timelines(first),
        _table(result, len(seeds)),
        _core_time(result),
        section(
            "Cores in use",
            f"Of {pluralize(cores, 'core')}, averaged over short times. Dashed: all of them; the end of the step.",
            figure(charts.utilisation(lines, pool)),
        ),
        duration_section(lines),
        _simulator(result, seeds),
        _next(path, cores),
        _footer(result, path),
    ]
    return page("Tangram: the same agents, reserved and by action", parts)


# ---- the answer -------------------------------------------------------------------------------------------------


def _headline(result: BenchResult) -> str:
    ratio = result.metrics["act_ratio"]
    low, high = result.spread.get("act_ratio", (ratio, ratio))
    caveat = ", but these few seeds leave it open" if low <= 1.0 <= high else ""
    how = sooner_text(ratio)
    return f"The same agents on the same cores: actions complete {how} when cores are shared by action{caveat}."


def _lead(result: BenchResult, first: SeedResult) -> str:
    before, after = (result.sides[side] for side in SIDES)
    return (
        f"{pluralize(len(first.scripts), 'coding agent')} repaired bugs in real sandboxes, all started at once. With a"
        f" core reserved for each trajectory an action took {seconds(before['act_mean_s'])} on average, of which it"
        f" waited {seconds(before['waiting_mean_s'])}, mostly to be admitted. Scheduled by action it took"
        f" {seconds(after['act_mean_s'])}. The step took {seconds(after['step_s'])} instead of"
        f" {seconds(before['step_s'])}, and the agents earned the same rewards."
    )


def _cards(result: BenchResult) -> str:
    ratios = [
        card(f"{result.metrics[name]:.2f}×", words, spread_text(*result.spread.get(name, (None, None))))
        for name, words in (
            ("act_ratio", "shorter mean ACT"),
            ("p99_ratio", "shorter p99 ACT"),
            ("step_ratio", "shorter step"),
        )
    ]
    before, after = (result.sides[side]["core_use"] for side in SIDES)
    return cards([*ratios, card(percent(after), "of the cores in use", f"{percent(before)} reserved")])


# ---- the two runs -----------------------------------------------------------------------------------------------


def _timelines(first: SeedResult) -> str:
    until = max(first.measured[side].result.makespan_s for side in SIDES)
    kinds = [(EXECUTING, "executing"), (WAITING, "waiting"), (THINKING, "thinking")]
    keys = legend(kinds, "the number at the end of a row: its reward")
    panels = [
        figure(_timeline(first, side, until), f"{TITLES[side]}: {seconds(first.measured[side].result.makespan_s)}")
        for side in SIDES
    ]
    return section(
        "Both runs on one time axis",
        f"Seed {first.seed}. A row is a trajectory, siblings of a group together; point at a bar for more.",
        keys + figures(panels, "stack"),
    )


def _timeline(first: SeedResult, side: str, until: float) -> str:
    """A row per trajectory from 0 to `until`, which is the same for both sides."""
    actions: dict[str, list[ActionRow]] = {script.name: [] for script in first.scripts}
    for row in first.measured[side].result.rows:
        if row.trajectory in actions:
            actions[row.trajectory].append(row)
    rows, group = [], None
    for script in first.scripts:
        begins = script.bug.name != group
        gap = GROUP_GAP if begins and group is not None else 0.0
        group = script.bug.name
        rows.append(
            GanttRow(
                name=group if begins else "",
                bars=tuple(_trajectory_bars(sorted(actions[script.name], key=lambda row: row.submitted_at))),
                note=f"{first.rewards[side][script.name]:.2f}",
                gap_before=gap,
            )
        )
    return gantt(rows, f"Timeline of all trajectories, {side}", 0.0, until, left=108.0)


def _trajectory_bars(rows: list[ActionRow]) -> Iterator[GanttBar]:
    """Thinking is the background, from the first grant to the end; waiting and execution are on top of it."""
    begin, end = rows[0].submitted_at + rows[0].waiting_s, max(row.ended_at for row in rows)
    yield GanttBar(since=begin, until=end, css=THINKING)
    for row in rows:
        granted = row.submitted_at + row.waiting_s
        tip = (
            f"{row.trajectory}: {row.key or row.kind}, submitted at {row.submitted_at:.2f} s\n"
            f"waiting {seconds(row.waiting_s)}, executing {seconds(row.execution_s + row.overhead_s)}"
            f" on {pluralize(round(row.width), 'core')}\n{seconds(row.cpu_s)} of CPU"
        )
        yield GanttBar(since=row.submitted_at, until=granted, css=WAITING, tip=tip, skip_if_tiny=True)
        yield GanttBar(since=granted, until=row.ended_at, css=EXECUTING, tip=tip)


# ---- the numbers ------------------------------------------------------------------------------------------------


def _table(result: BenchResult, seeds: int) -> str:
    rows = [[named(side, COLOURS[side]), *(_cell(result, side, name) for name in TABLE)] for side in SIDES]
    over = f"; in brackets the 95 % interval over {seeds} seeds" if seeds > 1 else ""
    return section(
        "What each side takes",
        f"Means over seeds. Below: how many times less it is than reserved{over}. Above 1 is better.",
        table(["side", *TABLE.values()], rows, highlighted=[list(SIDES).index(BY_ACTION)]),
    )


def _cell(result: BenchResult, side: str, name: str) -> str:
    value = result.sides[side][name]
    text = seconds(value) if name.endswith("_s") else percent(value) if name == "core_use" else f"{value:.3f}"
    ratio = RATIOS.get(name)
    if ratio is None or side == RESERVED:
        return text
    low, high = result.spread.get(ratio, (0.0, 0.0))
    css = "good" if low > 1.0 else "bad" if 0.0 < high < 1.0 else ""
    spread = f" [{low:.2f}, {high:.2f}]" if high else ""
    return with_note(text, f"{result.metrics[ratio]:.2f}×{spread}", css)


def _core_time(result: BenchResult) -> str:
    bars = []
    for side in SIDES:
        parts = []
        for name, (css, words) in CORE_TIME.items():
            share = result.sides[side][name]
            tip = f"{side}\n{words}: {percent(share)}"
            parts.append(BarPart(value=share, css=css, tip=tip, label=percent(share)))
        bars.append(Bar(name=side, parts=tuple(parts)))
    label = "What the cores did, as shares of the core time of the step"
    drawn = bar_chart(bars, label, width=1040.0, left=90.0, right=1030.0, row=38.0, high=26.0, name_css="strong")
    return section(
        "What the cores did",
        "Shares of the core time, which is the cores times the step, from the recorded grants and CPU seconds.",
        legend(list(CORE_TIME.values())) + figure(drawn),
    )


# ---- the simulator ----------------------------------------------------------------------------------------------


def _simulator(result: BenchResult, seeds: Sequence[SeedResult]) -> str:
    names = {"act_mean_s": "mean ACT", "act_p50_s": "p50", "act_p99_s": "p99", "step_s": "step"}
    rows: list[list[str]] = []
    for side in reversed(SIDES):
        real = _means([each.measured[side].result for each in seeds], list(names))
        virtual = _means([each.simulated[side] for each in seeds], list(names))
        rows.append([f"{side}, measured", *map(seconds, real)])
        errors: list[Markup] = [
            with_note(seconds(value), f"{100.0 * (value / other - 1.0):+.0f} %")
            for value, other in zip(virtual, real, strict=True)
        ]
        rows.append([f"{side}, simulated", *errors])
    return section(
        "How close the simulator comes",
        "The recording of the side by action was played on virtual time, by action and as if each trajectory had"
        f" reserved a core. The mean ACT is off by {percent(result.metrics['sim_error'])} by action and by"
        f" {percent(result.metrics['sim_error_reserved'])} reserved, on average over seeds.",
        table(["", *names.values()], rows),
    )


def _means(results: list[SimulationResult], names: list[str]) -> list[float]:
    summaries = [result.summary() for result in results]
    return [sum(each[name] for each in summaries) / len(summaries) for name in names]


# ---- further commands -------------------------------------------------------------------------------------------


def _next(path: Path, cores: int) -> str:
    recorded = path.parent / "actions.jsonl"
    steps = (
        ("What would other policies have done with this recording?", f"tangram sim --trace {recorded}"),
        (
            "How few cores would do as well as the reservation did?",
            f"tangram plan --trace {recorded} --like pods:{REQUEST:g}@{cores}",
        ),
        ("Where did the time of each run go?", f"tangram trace show {recorded}"),
        ("The same on your own agents: record them, then look into the recording.", SDK),
    )
    blocks = "".join(command_block(words, command) for words, command in steps)
    return section("What to do next", "Each of these commands reads what was just recorded.", blocks)


SDK = """\
import tangram

async with tangram.connect(record="mine.jsonl") as t:
    async with t.sandbox(memory="1GiB") as box:
        result = await box.exec("make test -j{cpus}", cpus=(1, 4), key="tests")"""


def _footer(result: BenchResult, path: Path) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    entries = [
        ACT_ENTRY,
        ("step", "from the first trajectory's request to the end of the last"),
        ("settings", settings),
        *((f"note {number}", note) for number, note in enumerate(result.notes, start=1)),
        ("label", "measured: real programs in real time; the section on the simulator alone is on virtual time"),
    ]
    return footer(entries, f"tangram bench reservation --report {path}")
