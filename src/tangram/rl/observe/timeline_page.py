"""The timeline of a rollout as one self-contained HTML file: nothing is loaded from elsewhere.

Owns what the page says and in which order: why no engine was writing, every trajectory over time, the longest gaps,
every stage, and where the time of each task went. Whatever a trajectory is called, it is text. Promises the same bytes
for the same timeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from tangram.files.atomic_file import whole_file
from tangram.reports.formatting import percent, several
from tangram.reports.formatting import seconds as told
from tangram.reports.page import card, legend, page, prose, section
from tangram.reports.printable import cut, plain
from tangram.rl.observe.timeline import (
    NAMES,
    Activity,
    Doing,
    Gap,
    Lane,
    Piece,
    StageTime,
    TaskTime,
    Timeline,
    in_words,
    seconds,
)
from tangram.rl.observe.timeline_script import SCRIPT, STYLE
from tangram.rl.rollout.records import Stage

LANES_MAX = 2000
"""Trajectories that are drawn; a browser scrolls these easily."""
GAPS_DRAWN_MAX = 4000
MAINS_MAX = 20_000
"""Of a stage: stretches of idle time with one main cause."""
GAPS_LISTED_MAX = 10
WORDS_MAX = 160
"""Characters of a name or a cause."""
CAUSES_SHOWN = 4
SHARE_MIN = 0.0005
"""What would be shown as 0.0 % is not."""
COLOURS = {
    Stage.RESET: "k3",
    Stage.GENERATE: "k0",
    Stage.STEP: "k1",
    Stage.REWARD: "k2",
    Stage.BUFFER: "k6",
}
FAILED = "k4"
OTHER = "p0"


def write_timeline(path: Path, timeline: Timeline, name: str, command: str) -> None:
    with whole_file("html", path) as file:
        file.write(timeline_page(timeline, name, command).encode())


def timeline_page(timeline: Timeline, name: str, command: str) -> str:
    engines = timeline.stages[Stage.GENERATE]
    body = [
        f'<span class="label">rollout</span><span class="label">{escape(_cut(name))}</span>',
        f"<h1>{escape(headline(engines))}</h1>",
        f'<p class="lead">{prose(_lead(timeline))}</p>',
        _cards(timeline, engines),
        _lanes_section(timeline),
        _gaps_section(timeline, engines),
        _stages_section(timeline),
        _tasks_section(timeline),
        _footer(command),
    ]
    return page(f"Tangram: {_cut(name)}", "\n".join(body))


def headline(engines: StageTime) -> str:
    """The answer, in a sentence."""
    if not engines.total:
        return "The log holds no time at all."
    if not engines.idle:
        return "Some engine was writing all the time."
    cause, length = next(iter(in_words(engines.idle).items()))
    idle = sum(engines.idle.values())
    mostly = f"{length / idle:.0%} of that for {_cut(cause)}"
    return f"No engine was writing for {idle / engines.total:.0%} of the time: {mostly}."


def _lead(timeline: Timeline) -> str:
    tasks = ", ".join(f"{each.trajectories:,} of {_cut(each.task)}" for each in timeline.tasks)
    count = several(len(timeline.lanes), "trajectory", "trajectories")
    return f"{count} in {told(seconds(timeline.total))}" + (f": {tasks}." if tasks else ".")


def _cards(timeline: Timeline, engines: StageTime) -> str:
    count = several(len(timeline.lanes), "trajectory", "trajectories")
    found = [
        card(told(seconds(timeline.total)), "from begin to end", count),
        card(percent(engines.busy_share), "of it an engine was writing", f"at most {engines.most:,} at once"),
    ]
    for cause, length in list(in_words(engines.idle).items())[:2]:
        share = length / engines.total
        found.append(card(percent(share), "of it no engine was writing", f"for {_cut(cause)}"))
    return f'<div class="cards">{"".join(found)}</div>'


# ---- every trajectory -------------------------------------------------------------------------------------------


def _lanes_section(timeline: Timeline) -> str:
    shown = timeline.lanes[:LANES_MAX]
    data = _Data()
    content = {
        "total": seconds(timeline.total),
        "stages": [data.stage(timeline.stages[stage]) for stage in Stage],
        "lanes": [data.lane(each) for each in shown],
        "activities": data.activities,
    }
    # No text may end the element that it stands in.
    text = msgspec.json.encode(content).decode().replace("<", "\\u003c")
    marks = [(COLOURS[stage], stage.value) for stage in Stage]
    keys = legend([*marks, (FAILED, "a try that failed")], "pale: waiting; grey: between stages")
    all_of_them = len(shown) == len(timeline.lanes)
    more = "" if all_of_them else f" Of {len(timeline.lanes):,} trajectories, the first {len(shown):,} are drawn."
    return section(
        "Every trajectory",
        "Above: each stage, filled while something is done in it; idle time has the colour of what explains most of it."
        " Below: a row for each trajectory. Point at a bar for more; drag to move; hold Ctrl or Shift and turn the"
        f" wheel to zoom, or use the buttons, or the keys + - and the arrows.{more}",
        f"{keys}<style>{STYLE}</style>"
        '<figure id="lanes" tabindex="0" aria-label="Trajectories over time">'
        '<div class="tools"><button data-zoom="2">+</button><button data-zoom="0.5">−</button>'
        '<button data-zoom="0">all</button><span id="seen"></span></div>'
        '<div id="scroller"><div id="tall"><canvas></canvas></div></div></figure>'
        f'<script type="application/json" id="lanes-data">{text}</script><script>{SCRIPT}</script>',
    )  # fmt: skip


class _Data:
    """What the script draws, as plain values; activities by number."""

    def __init__(self) -> None:
        self._numbers: dict[Activity, int] = {}
        self.activities: list[dict[str, Any]] = []

    def stage(self, stage: StageTime) -> dict[str, Any]:
        longest = sorted(stage.gaps, key=lambda gap: -gap.length)[:GAPS_DRAWN_MAX]
        return {
            "name": stage.stage.value,
            "colour": COLOURS[stage.stage],
            "gaps": [
                [*_times(gap), [[self._number(cause), part / gap.length] for cause, part in _first(gap.causes)]]
                for gap in sorted(longest, key=lambda gap: gap.began)
            ],
            "mains": [
                [seconds(since), seconds(until), self._number(main)] for since, until, main in stage.mains[:MAINS_MAX]
            ],
        }

    def lane(self, lane: Lane) -> dict[str, Any]:
        trajectory = lane.trajectory
        reward = f", reward {trajectory.reward:g}" if trajectory.reward is not None else ""
        cause = f"\n{_cut(trajectory.cause)}" if trajectory.cause else ""
        return {
            "id": _cut(trajectory.id),
            "says": f"{trajectory.ending}{reward}, {several(len(trajectory.turns), 'turn')}{cause}",
            "bad": not trajectory.ending.rewarded,
            "pieces": [self._piece(piece) for piece in lane.pieces],
        }

    def _piece(self, piece: Piece) -> list[Any]:
        plainly = [*_times(piece), self._number(piece.activity)]
        tried = f"try {piece.attempt + 1}" if piece.attempt else ""
        why = "; ".join(filter(None, (tried, _cut(piece.why))))
        return [*plainly, why] if why else plainly

    def _number(self, activity: Activity) -> int:
        if activity not in self._numbers:
            self._numbers[activity] = len(self.activities)
            self.activities.append(
                {
                    "words": _cut(activity.words),
                    "colour": colour(activity),
                    "pale": activity.doing in (Doing.WAITING, Doing.BETWEEN),
                }
            )
        return self._numbers[activity]


def colour(activity: Activity) -> str:
    if activity.doing is Doing.FAILED:
        return FAILED
    return COLOURS[activity.stage] if activity.stage is not None else OTHER


def _times(stretch: Gap | Piece) -> tuple[float, float]:
    return seconds(stretch.began), seconds(stretch.ended)


# ---- tables -----------------------------------------------------------------------------------------------------


def _gaps_section(timeline: Timeline, engines: StageTime) -> str:
    listed = sorted(engines.gaps, key=lambda gap: (-gap.length, gap.began))[:GAPS_LISTED_MAX]
    rows = []
    for gap in listed:
        who = ", ".join(f"{_cut(name)} ({_cut(activity.words)})" for name, activity, _ in timeline.explainers(gap))
        rows.append([told(seconds(gap.began)), told(seconds(gap.length)), _causes(gap.causes, gap.length), who or "-"])
    count = several(len(engines.gaps), "gap")
    return section(
        "When no engine was writing, and why",
        f"The longest of {count}. Each instant is divided among the trajectories under way, by what they did.",
        _table(("since", "length", "because of", "longest under way"), rows) if rows else "<p>There were none.</p>",
    )


def _stages_section(timeline: Timeline) -> str:
    rows = []
    for stage, each in timeline.stages.items():
        idle = sum(each.idle.values())
        causes = _causes(each.idle, each.total)
        waiting = told(seconds(each.waiting))
        rows.append([NAMES[stage], percent(each.busy_share), f"{each.most:,}", told(seconds(each.working)), waiting,
                     told(seconds(idle)), causes])  # fmt: skip
    heads = ("stage", "busy", "most at once", "trajectory time in it", "waiting for it", "idle", "idle because of")
    return section(
        "Every stage",
        "Busy: the share of the whole time in which something was done in it. Shares of causes are of the whole time;"
        " busy and all causes are 100 %.",
        _table(heads, rows),
    )


def _tasks_section(timeline: Timeline) -> str:
    rows = []
    for each in timeline.tasks:
        shares = _causes(each.parts, each.total)
        rows.append([_cut(each.task), f"{each.trajectories:,}", told(seconds(each.total)), _Markup(_bar(each)), shares])
    return section(
        "Where the time of trajectories went",
        "Of all time between the begin and the end of each trajectory; the shares add up to 100 %.",
        _table(("task", "trajectories", "time in all", "", "shares"), rows),
    )


class _Markup(str):
    """Is markup already."""


def _bar(task: TaskTime) -> str:
    parts = "".join(
        f'<i class="{colour(activity)}{" pale" if activity.doing in (Doing.WAITING, Doing.BETWEEN) else ""}"'
        f' style="width:{100.0 * part / task.total:.3f}%"'
        f' data-tip="{escape(f"{_cut(activity.words)}: {part / task.total:.1%}")}"></i>'
        for activity, part in task.parts.items()
    )
    return f'<span class="bar">{parts}</span>'


def _causes(parts: dict[Activity, int], whole: int) -> str:
    """The largest shares in words; the rest together."""
    if not whole:
        return "-"
    named = [(cause, part) for cause, part in list(in_words(parts).items())[:CAUSES_SHOWN] if part / whole >= SHARE_MIN]
    rest = sum(parts.values()) - sum(part for _, part in named)
    told_of = [f"{_cut(cause)} {percent(part / whole)}" for cause, part in named]
    return ", ".join([*told_of, *([f"others {percent(rest / whole)}"] if rest / whole >= SHARE_MIN else [])]) or "-"


def _first(parts: dict[Activity, int]) -> list[tuple[Activity, int]]:
    return list(parts.items())[:CAUSES_SHOWN]


def _table(heads: Iterable[str], rows: Iterable[list[str]]) -> str:
    head = "".join(f"<th>{escape(words)}</th>" for words in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{cell if isinstance(cell, _Markup) else prose(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f'<div class="wide told"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _footer(command: str) -> str:
    known = [
        ("idle", "nothing is done in a stage for any trajectory"),
        ("waiting", "the first part of a stage, before anything was done for it: a place in a queue"),
        ("between stages", "under way, but in no stage: the rollout loop itself"),
        ("buffer", "ended and rewarded: waits for its group, or to be trained on"),
    ]
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in known)
    return f"<footer><p>The same again:</p><pre>{escape(plain(command))}</pre><dl>{entries}</dl></footer>"


def _cut(text: str) -> str:
    return cut(text, WORDS_MAX)
