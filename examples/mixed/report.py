"""The page: devices on both sides, actions of each run, and all numbers.

Owns the content and layout of the page. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from acts import RUNS, RunNumbers
from devices import Call, Timeline
from sides import SHARED, TODAY
from teachers import DOMAINS

from tangram.reports.charts import Bar, BarPart, GanttBar, GanttRow, bar_chart, gantt
from tangram.reports.formatting import percent, pluralize, seconds
from tangram.reports.page import (
    card,
    cards,
    figure,
    figures,
    footer,
    legend,
    named,
    opening,
    page,
    section,
    table,
    write_page,
)

if TYPE_CHECKING:
    from mixed import Outcome, Played

COLOURS = {SHARED: "p1", TODAY: "p0"}
TITLES = {SHARED: "Shared: all teachers on {}", TODAY: "As today: a device for each teacher, {}"}


def write(path: Path, outcome: Outcome, played: Mapping[str, Played]) -> None:
    write_page(path, _page(outcome, played, path))


def _page(outcome: Outcome, played: Mapping[str, Played], path: Path) -> str:
    labels = ("measured", "devices emulated", f"seed {outcome.seed}", "one run of each side")
    parts = [
        opening(labels, _headline(outcome), _lead(outcome)),
        _cards(outcome),
        _timelines(outcome, played),
        _bars(outcome),
        _table(outcome),
        _footer(outcome, path),
    ]
    return page("Tangram: three runs on shared pools", parts)


# ---- the answer -------------------------------------------------------------------------------------------------


def _lost(outcome: Outcome, side: str) -> int:
    return sum(run.lost for run in outcome.sides[side].runs.values())


def _headline(outcome: Outcome) -> str:
    ours, theirs = outcome.sides[SHARED], outcome.sides[TODAY]
    return (
        f"Three runs on {pluralize(ours.devices, 'device')} instead of {theirs.devices}: "
        f"{pluralize(ours.rejected, 'refusal')} by the API instead of {theirs.rejected}, "
        f"{pluralize(_lost(outcome, SHARED), 'lost call')} instead of {_lost(outcome, TODAY)}."
    )


def _lead(outcome: Outcome) -> str:
    sizes, ours, theirs = outcome.sizes, outcome.sides[SHARED], outcome.sides[TODAY]
    answers, wrong = ours.answers + theirs.answers, ours.answers_wrong + theirs.answers_wrong
    return (
        f"{pluralize(sizes.coding, 'coding agent')}, {pluralize(sizes.searching, 'search agent')} and"
        f" {pluralize(sizes.distilling, 'student')} worked at once, with the same scripts on both sides. The API"
        f" allowed {pluralize(sizes.units, 'request')} in {sizes.window_s:g} s. The step took {seconds(ours.step_s)} on"
        f" shared pools and {seconds(theirs.step_s)} as today; mean ACT was {_acts(outcome)}. All {answers} answers of"
        f" teachers were compared with a reference; {wrong} differed."
    )


def _acts(outcome: Outcome) -> str:
    """Draw the actions of each run on both sides."""
    ours, theirs = outcome.sides[SHARED].runs, outcome.sides[TODAY].runs
    pairs = [f"{seconds(ours[run].act_mean_s)} against {seconds(theirs[run].act_mean_s)} for {run}" for run in RUNS]
    return f"{', '.join(pairs[:-1])} and {pairs[-1]}"


def _cards(outcome: Outcome) -> str:
    ours, theirs = outcome.sides[SHARED], outcome.sides[TODAY]
    return cards([
        card(f"{ours.devices} / {theirs.devices}", "devices, shared / as today", f"in use {percent(ours.device_use)}"
             f" / {percent(theirs.device_use)} of the time"),
        card(f"{ours.rejected} / {theirs.rejected}", "429s of the search API", f"{ours.served} / {theirs.served}"
             " requests were served"),
        card(f"{_lost(outcome, SHARED)} / {_lost(outcome, TODAY)}", "calls lost", "refused four times"),
        card(f"{seconds(ours.step_s)} / {seconds(theirs.step_s)}", "step", "until the last trajectory has ended"),
    ])  # fmt: skip


# ---- pictures ---------------------------------------------------------------------------------------------------


def _colour(teacher: str) -> str:
    return f"k{DOMAINS.index(teacher)}"


def _timelines(outcome: Outcome, played: Mapping[str, Played]) -> str:
    teachers = DOMAINS[: outcome.sizes.teachers]
    keys = legend([(_colour(name), name) for name in teachers], "pale: resident; half: copied there; full: called")
    until = max(each.numbers.step_s for each in played.values())
    panels = [
        figure(
            _timeline(each.timeline, side, until, each.numbers.step_s),
            TITLES[side].format(pluralize(each.numbers.devices, "device")),
        )
        for side, each in played.items()
    ]
    return section(
        "What the devices did",
        "A row is a device, a colour a teacher. Each device has room for one. Point at a bar for more.",
        keys + figures(panels, "stack"),
    )


def _timeline(timeline: Timeline, side: str, until: float, step_s: float) -> str:
    bars: list[list[GanttBar]] = [[] for _ in range(timeline.devices)]
    for stay in timeline.stays:
        since, end = max(0.0, stay.since_s), min(stay.until_s, step_s)
        tip = f"{stay.teacher} is resident on device {stay.device}\nfrom {since:.2f} s to {end:.2f} s"
        bars[stay.device].append(GanttBar(since=since, until=end, css=f"pale {_colour(stay.teacher)}", tip=tip))
    for call in timeline.calls:
        bars[call.device] += _call(call)
    rows = [GanttRow(name=f"device {device}", bars=tuple(own)) for device, own in enumerate(bars)]
    label = f"Models resident on the devices and calls to them, {side}"
    return gantt(rows, label, 0.0, until, right=1020.0, row=30.0, ended_s=step_s)


def _call(call: Call) -> list[GanttBar]:
    called = min(call.since_s + call.restore_s, call.until_s)
    tip = (
        f"{call.teacher} for {call.run} on device {call.device}, granted at {call.since_s:.2f} s\n"
        f"copying {seconds(call.restore_s)}, executing {seconds(call.until_s - called)}"
    )
    colour = _colour(call.teacher)
    copying = GanttBar(since=call.since_s, until=called, css=f"half {colour}", tip=tip, skip_if_tiny=True)
    return [copying, GanttBar(since=called, until=call.until_s, css=f"fill {colour}", tip=tip)]


def _bars(outcome: Outcome) -> str:
    panels = [
        figure(_act_bars({side: numbers.runs[run] for side, numbers in outcome.sides.items()}, run), run)
        for run in RUNS
    ]
    return section(
        "What an action took",
        "Mean ACT of each run: waiting pale, overhead half, execution full. The line marks the p95. Each run has its"
        " own scale. Coding goes through the same scheduler on both sides, so it shows what its neighbours cost it.",
        figures(panels),
    )


def _act_bars(numbers: Mapping[str, RunNumbers], run: str) -> str:
    bars = []
    for side, run_numbers in numbers.items():
        shares = (
            (run_numbers.waiting_share, "pale", "waiting"),
            (run_numbers.overhead_share, "half", "overhead"),
            (run_numbers.executing_share, "fill", "executing"),
        )
        parts = []
        for share, shade, what in shares:
            spent_s = share * run_numbers.act_mean_s
            tip = f"{run}, {side}, {pluralize(run_numbers.actions, 'action')}\n{what}: {seconds(spent_s)} on average"
            parts.append(BarPart(value=spent_s, css=f"{shade} {COLOURS[side]}", tip=tip))
        mean = seconds(run_numbers.act_mean_s)
        bars.append(Bar(name=side, parts=tuple(parts), label=mean, mark=run_numbers.act_p95_s))
    return bar_chart(bars, f"Mean ACT of {run} on both sides", row=30.0, high=19.0)


# ---- the numbers ------------------------------------------------------------------------------------------------


def _table(outcome: Outcome) -> str:
    heads = ("actions", "mean ACT", "p95", "waiting", "overhead", "executing", "lost", "reward")
    rows: list[list[str]] = []
    shared: list[int] = []
    for run in RUNS:
        for side, numbers in outcome.sides.items():
            run_numbers = numbers.runs[run]
            shared += [len(rows)] if side == SHARED else []
            rows.append([
                named(f"{run}, {side}", COLOURS[side]), str(run_numbers.actions), seconds(run_numbers.act_mean_s),
                seconds(run_numbers.act_p95_s), percent(run_numbers.waiting_share),
                percent(run_numbers.overhead_share), percent(run_numbers.executing_share), str(run_numbers.lost),
                f"{run_numbers.reward_mean:.3f}",
            ])  # fmt: skip
    return section(
        "All numbers",
        "One step on each side. Shares are of the time of all actions of the run.",
        table(["", *heads], rows, highlighted=shared),
    )


def _footer(outcome: Outcome, path: Path) -> str:
    entries = (
        ("ACT", "action completion time: waiting, overhead and execution, from the call of the agent to its answer"),
        ("waiting", "for cores, a device or the quota; as today also the pauses after a refusal"),
        ("overhead", "copying a teacher to its device, starting a program"),
        ("lost", "a call that the API refused four times; the trajectory went on without it"),
        ("real", "sandboxes, programs, HTTP, the quota and its refusals, weights, copies, forward passes"),
        ("emulated", "devices: their memory is the machine's, and their forward passes run on its cores"),
        ("scripted", "the agents, drawn from the seed; they sleep while a policy model would think"),
        ("settings", ", ".join(f"{name} {getattr(outcome.sizes, name)}" for name in outcome.sizes.__struct_fields__)),
    )
    quick = " --quick" if outcome.quick else ""
    command = f".venv/bin/python examples/mixed/mixed.py{quick} --seed {outcome.seed} --report {path}"
    return footer(entries, command)
