"""The page: what the devices did on both sides, what the actions of each run took, and all numbers.

Owns what the page says and how it looks. Never measures anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from acts import RUNS, RunNumbers
from devices import Call, Timeline
from sides import SHARED, TODAY
from teachers import DOMAINS

from tangram.files.atomic_file import whole_file
from tangram.reports.formatting import percent, seconds, several
from tangram.reports.page import card, figure, legend, page, prose, section
from tangram.reports.svg import Drawing, Linear, duration

if TYPE_CHECKING:
    from mixed import Outcome, Played

COLOURS = {SHARED: "p1", TODAY: "p0"}
TITLES = {SHARED: "Shared: all teachers on {}", TODAY: "As today: a device for each teacher, {}"}
ROW, LEFT, RIGHT, WIDTH = 30.0, 84.0, 1020.0, 1040.0


def write(path: Path, outcome: Outcome, played: Mapping[str, Played]) -> None:
    with whole_file("report", path) as file:
        file.write(_page(outcome, played, path).encode())


def _page(outcome: Outcome, played: Mapping[str, Played], path: Path) -> str:
    labels = ("measured", "devices emulated", f"seed {outcome.seed}", "one run of each side")
    parts = [
        "".join(f'<span class="label">{escape(label)}</span>' for label in labels),
        f"<h1>{escape(_headline(outcome))}</h1>",
        f'<p class="lead">{prose(_lead(outcome))}</p>',
        _cards(outcome),
        _timelines(outcome, played),
        _bars(outcome),
        _table(outcome),
        _footer(outcome, path),
    ]
    return page("Tangram: three runs on shared pools", "\n".join(parts))


# ---- the answer -------------------------------------------------------------------------------------------------


def _lost(outcome: Outcome, side: str) -> int:
    return sum(run.lost for run in outcome.sides[side].runs.values())


def _headline(outcome: Outcome) -> str:
    ours, theirs = outcome.sides[SHARED], outcome.sides[TODAY]
    return (
        f"Three runs on {several(ours.devices, 'device')} instead of {theirs.devices}: "
        f"{several(ours.rejected, 'refusal')} by the API instead of {theirs.rejected}, "
        f"{several(_lost(outcome, SHARED), 'lost call')} instead of {_lost(outcome, TODAY)}."
    )


def _lead(outcome: Outcome) -> str:
    sizes, ours, theirs = outcome.sizes, outcome.sides[SHARED], outcome.sides[TODAY]
    answers, wrong = ours.answers + theirs.answers, ours.answers_wrong + theirs.answers_wrong
    return (
        f"{several(sizes.coding, 'coding agent')}, {several(sizes.searching, 'search agent')} and"
        f" {several(sizes.distilling, 'student')} worked at once, with the same scripts on both sides. The API allowed"
        f" {several(sizes.units, 'request')} in {sizes.window_s:g} s. The step took {seconds(ours.step_s)} on shared"
        f" pools and {seconds(theirs.step_s)} as today; mean ACT was {_acts(outcome)}. All {answers} answers of"
        f" teachers were compared with a reference; {wrong} differed."
    )


def _acts(outcome: Outcome) -> str:
    """Of each run, on both sides."""
    ours, theirs = outcome.sides[SHARED].runs, outcome.sides[TODAY].runs
    told = [f"{seconds(ours[run].act_mean_s)} against {seconds(theirs[run].act_mean_s)} for {run}" for run in RUNS]
    return f"{', '.join(told[:-1])} and {told[-1]}"


def _cards(outcome: Outcome) -> str:
    ours, theirs = outcome.sides[SHARED], outcome.sides[TODAY]
    found = [
        card(f"{ours.devices} / {theirs.devices}", "devices, shared / as today", f"in use {percent(ours.device_use)}"
             f" / {percent(theirs.device_use)} of the time"),
        card(f"{ours.rejected} / {theirs.rejected}", "429s of the search API", f"{ours.served} / {theirs.served}"
             " requests were served"),
        card(f"{_lost(outcome, SHARED)} / {_lost(outcome, TODAY)}", "calls lost", "given up after three more tries"),
        card(f"{seconds(ours.step_s)} / {seconds(theirs.step_s)}", "step", "until the last trajectory has ended"),
    ]  # fmt: skip
    return f'<div class="cards">{"".join(found)}</div>'


# ---- pictures ---------------------------------------------------------------------------------------------------


def _colour(teacher: str) -> str:
    return f"k{DOMAINS.index(teacher)}"


def _timelines(outcome: Outcome, played: Mapping[str, Played]) -> str:
    teachers = DOMAINS[: outcome.sizes.teachers]
    keys = legend([(_colour(name), name) for name in teachers], "pale: lies there; half: is copied there; full: called")
    until = max(each.numbers.step_s for each in played.values())
    panels = "".join(
        figure(_timeline(each.timeline, side, until, each.numbers.step_s),
               TITLES[side].format(several(each.numbers.devices, "device")))
        for side, each in played.items()
    )  # fmt: skip
    return section(
        "What the devices did",
        "A row is a device, a colour a teacher. Each device has room for one. Point at a bar for more.",
        f'{keys}<div class="stack">{panels}</div>',
    )


def _timeline(timeline: Timeline, side: str, until: float, step_s: float) -> str:
    bottom = ROW * timeline.devices + 2.0
    drawing = Drawing(WIDTH, bottom + 24.0, f"What lay on the devices and was called there, {side}")
    across = Linear(0.0, until, LEFT, RIGHT)
    for tick in across.ticks(10):
        drawing.line(across(tick), 0.0, across(tick), bottom, "gridline")
        drawing.text(across(tick), bottom + 17.0, duration(tick), "tick", "middle")
    for device in range(timeline.devices):
        drawing.text(LEFT - 10.0, ROW * device + 18.0, f"device {device}", "small", "end")
    for stay in timeline.stays:
        since, end = max(0.0, stay.since_s), min(stay.until_s, step_s)
        tip = f"{stay.teacher} lies on device {stay.device}\nfrom {since:.2f} s to {end:.2f} s"
        wide = across(end) - across(since)
        drawing.rect(across(since), ROW * stay.device + 3.0, wide, ROW - 6.0, f"pale {_colour(stay.teacher)}", tip)
    for call in timeline.calls:
        _call(drawing, call, across)
    drawing.line(across(step_s), 0.0, across(step_s), bottom, "limit")
    return drawing.render()


def _call(drawing: Drawing, call: Call, across: Linear) -> None:
    called = min(call.since_s + call.restore_s, call.until_s)
    tip = (
        f"{call.teacher} for {call.run} on device {call.device}, granted at {call.since_s:.2f} s\n"
        f"copying {seconds(call.restore_s)}, executing {seconds(call.until_s - called)}"
    )
    top, colour = ROW * call.device + 3.0, _colour(call.teacher)
    if across(called) - across(call.since_s) >= 0.3:
        drawing.rect(across(call.since_s), top, across(called) - across(call.since_s), ROW - 6.0, f"half {colour}", tip)
    drawing.rect(across(called), top, max(1.0, across(call.until_s) - across(called)), ROW - 6.0, f"fill {colour}", tip)


def _bars(outcome: Outcome) -> str:
    panels = "".join(
        figure(_act_bars({side: numbers.runs[run] for side, numbers in outcome.sides.items()}, run), run)
        for run in RUNS
    )
    return section(
        "What an action took",
        "Mean ACT of each run: waiting pale, overhead half, execution full. The line marks the p95. Each run has its"
        " own scale. Coding goes through the same scheduler on both sides, so it shows what its neighbours cost it.",
        f'<div class="grid">{panels}</div>',
    )


def _act_bars(numbers: Mapping[str, RunNumbers], run: str) -> str:
    left, right, row = 66.0, 250.0, 30.0
    drawing = Drawing(330, row * len(numbers) + 4.0, f"Mean ACT of {run} on both sides")
    across = Linear(0.0, max(max(found.act_p95_s, found.act_mean_s) for found in numbers.values()), left, right)
    for number, (side, found) in enumerate(numbers.items()):
        top, at = row * number + 4.0, 0.0
        drawing.text(left - 8.0, top + 14.0, side, "small", "end")
        parts = ((found.waiting_share, "pale", "waiting"), (found.overhead_share, "half", "overhead"),
                 (found.executing_share, "fill", "executing"))  # fmt: skip
        for share, shade, what in parts:
            spent_s = share * found.act_mean_s
            tip = f"{run}, {side}, {several(found.actions, 'action')}\n{what}: {seconds(spent_s)} on average"
            wide = across(at + spent_s) - across(at)
            if wide >= 0.2:
                drawing.rect(across(at), top, wide, 19.0, f"{shade} {COLOURS[side]}", tip)
            at += spent_s
        drawing.line(across(found.act_p95_s), top - 2.0, across(found.act_p95_s), top + 21.0, "axis")
        drawing.text(right + 8.0, top + 14.0, seconds(found.act_mean_s), "small strong")
    return drawing.render()


# ---- the numbers ------------------------------------------------------------------------------------------------


def _table(outcome: Outcome) -> str:
    heads = ("actions", "mean ACT", "p95", "waiting", "overhead", "executing", "lost", "reward")
    rows = []
    for run in RUNS:
        for side, numbers in outcome.sides.items():
            found = numbers.runs[run]
            cells = (
                str(found.actions), seconds(found.act_mean_s), seconds(found.act_p95_s), percent(found.waiting_share),
                percent(found.overhead_share), percent(found.executing_share), str(found.lost),
                f"{found.reward_mean:.3f}",
            )  # fmt: skip
            told = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            here = ' class="here"' if side == SHARED else ""
            rows.append(
                f'<tr{here}><td><span class="dot {COLOURS[side]}"></span>{escape(f"{run}, {side}")}</td>{told}</tr>'
            )
    head = "".join(f"<th>{escape(words)}</th>" for words in ("", *heads))
    return section(
        "All numbers",
        "Of one step on each side. Shares are of the time of all actions of the run.",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>',
    )


def _footer(outcome: Outcome, path: Path) -> str:
    known = (
        ("ACT", "action completion time: waiting, overhead and execution, from the call of the agent to its answer"),
        ("waiting", "for cores, a device or the quota; as today also the pauses after a refusal"),
        ("overhead", "copying a teacher to its device, starting a program"),
        ("lost", "a call that the API refused four times; the trajectory went on without it"),
        ("real", "sandboxes, programs, HTTP, the quota and its refusals, weights, copies, forward passes"),
        ("emulated", "devices: their memory is the machine's, and their forward passes run on its cores"),
        ("scripted", "the agents, drawn from the seed; they sleep while a policy model would think"),
        ("settings", ", ".join(f"{name} {getattr(outcome.sizes, name)}" for name in outcome.sizes.__struct_fields__)),
    )
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in known)
    quick = " --quick" if outcome.quick else ""
    command = f".venv/bin/python examples/mixed/mixed.py{quick} --seed {outcome.seed} --report {path}"
    return f"<footer><p>The same again:</p><pre>{escape(command)}</pre><dl>{entries}</dl></footer>"
