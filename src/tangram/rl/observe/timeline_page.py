"""The timeline of a rollout as a page: why no engine was decoding, and every trajectory over time.

Owns the content of the page and its order: the lanes, the longest gaps, each stage, and the time breakdown of each
task. Promises that names stay text and that the same timeline gives the same bytes."""

from __future__ import annotations

from pathlib import Path

from tangram.reports.formatting import percent, pluralize
from tangram.reports.formatting import seconds as seconds_text
from tangram.reports.page import card, cards, footer, legend, opening, page, section, share_bar, table, write_page
from tangram.reports.printable import truncate
from tangram.reports.timeline_lanes import LaneBar, LaneKind, Lanes, LaneStrip, TimelineLane, lanes_figure
from tangram.rl.observe.timeline import (
    LABEL_BY_STAGE,
    Activity,
    ActivityKind,
    IdleGap,
    RolloutTimeline,
    StageTime,
    TaskTime,
    TimelineSegment,
    TrajectoryLane,
    largest_shares,
    seconds,
    time_by_label,
)
from tangram.rl.trajectories.trajectory import Stage

LANES_MAX = 2000
"""Trajectories on the page; a browser scrolls this many without delay."""
GAPS_DRAWN_MAX = 4000
MAIN_CAUSES_MAX = 20_000
"""Stretches of idle time of a stage, each with one main cause."""
GAPS_LISTED_MAX = 10
NAME_MAX = 160
"""Characters of a name or a cause."""
CAUSES_SHOWN = 4
COLOURS = {
    Stage.RESET: "k3",
    Stage.GENERATE: "k0",
    Stage.STEP: "k1",
    Stage.REWARD: "k2",
    Stage.BUFFER: "k6",
}
FAILED = "k4"
OTHER = "p0"
PALE_KINDS = (ActivityKind.WAITING, ActivityKind.BETWEEN)


def write_timeline(path: Path, timeline: RolloutTimeline, name: str, command: str) -> None:
    write_page(path, timeline_page(timeline, name, command), option="html")


def timeline_page(timeline: RolloutTimeline, name: str, command: str) -> str:
    engines = timeline.stages[Stage.GENERATE]
    parts = [
        opening(["rollout", _shorten(name)], headline(engines), _lead(timeline)),
        _cards(timeline, engines),
        _lanes_section(timeline),
        _gaps_section(timeline, engines),
        _stages_section(timeline),
        _tasks_section(timeline),
        footer(DEFINITIONS, command),
    ]
    return page(f"Tangram: {_shorten(name)}", parts, widgets=["lanes"])


DEFINITIONS = (
    ("idle", "the stage works on no trajectory"),
    ("waiting", "the first part of a stage, before work on the trajectory begins: a place in a queue"),
    ("between stages", "under way, but in no stage: the rollout loop itself"),
    ("buffer", "ended and rewarded; waits for its group, or to be trained on"),
)


def headline(engines: StageTime) -> str:
    """The answer in a sentence."""
    if not engines.total:
        return "The log covers no time."
    if not engines.idle:
        return "Some engine was decoding all the time."
    cause, length = next(iter(time_by_label(engines.idle).items()))
    idle = sum(engines.idle.values())
    mostly = f"{length / idle:.0%} of that for {_shorten(cause)}"
    return f"No engine was decoding for {idle / engines.total:.0%} of the time: {mostly}."


def _lead(timeline: RolloutTimeline) -> str:
    tasks = ", ".join(f"{each.trajectories:,} of {_shorten(each.task)}" for each in timeline.tasks)
    return f"{_count(timeline)} in {_seconds_text(timeline.total)}" + (f": {tasks}." if tasks else ".")


def _count(timeline: RolloutTimeline) -> str:
    return pluralize(len(timeline.lanes), "trajectory", "trajectories")


def _cards(timeline: RolloutTimeline, engines: StageTime) -> str:
    busy = f"at most {engines.concurrency_max:,} at once"
    result = [
        card(_seconds_text(timeline.total), "from begin to end", _count(timeline)),
        card(percent(engines.busy_share), "of it an engine was decoding", busy),
    ]
    for cause, length in list(time_by_label(engines.idle).items())[:2]:
        share = percent(length / engines.total)
        result.append(card(share, "of it no engine was decoding", f"for {_shorten(cause)}"))
    return cards(result)


# ---- every trajectory -------------------------------------------------------------------------------------------


def _lanes_section(timeline: RolloutTimeline) -> str:
    builder = _LanesBuilder()
    content = Lanes(
        total=seconds(timeline.total),
        strips=[builder.strip(timeline.stages[stage]) for stage in Stage],
        lanes=[builder.lane(each) for each in timeline.lanes[:LANES_MAX]],
        kinds=builder.kinds,
    )
    marks = [(COLOURS[stage], stage.value) for stage in Stage]
    keys = legend([*marks, (FAILED, "an attempt that failed")], "pale: waiting; grey: between stages")
    cut = len(timeline.lanes) > LANES_MAX
    more = f" Of {len(timeline.lanes):,} trajectories, the first {LANES_MAX:,} are drawn." if cut else ""
    return section(
        "Every trajectory",
        "Above: each stage, filled while it is busy; idle time has the colour of its main cause. Below: a row for each"
        " trajectory. Point at a bar for more; drag to move; hold Ctrl or Shift and turn the wheel to zoom, or use the"
        f" buttons, or the keys + - and the arrows.{more}",
        keys + lanes_figure(content, "Trajectories over time"),
    )


class _LanesBuilder:
    """Converts stages and trajectories for the figure; numbers the activities."""

    def __init__(self) -> None:
        self._numbers: dict[Activity, int] = {}
        self.kinds: list[LaneKind] = []

    def strip(self, stage: StageTime) -> LaneStrip:
        longest = sorted(stage.gaps, key=lambda gap: -gap.length)[:GAPS_DRAWN_MAX]
        return LaneStrip(
            name=stage.stage.value,
            colour=COLOURS[stage.stage],
            gaps=[(*_times(gap), self._causes(gap)) for gap in sorted(longest, key=lambda gap: gap.began)],
            causes=[
                (seconds(since), seconds(until), self._number(main))
                for since, until, main in stage.main_causes[:MAIN_CAUSES_MAX]
            ],
        )

    def _causes(self, gap: IdleGap) -> list[tuple[int, float]]:
        return [(self._number(cause), part / gap.length) for cause, part in list(gap.causes.items())[:CAUSES_SHOWN]]

    def lane(self, lane: TrajectoryLane) -> TimelineLane:
        trajectory = lane.trajectory
        reward = f", reward {trajectory.reward:g}" if trajectory.reward is not None else ""
        cause = f"\n{_shorten(trajectory.cause)}" if trajectory.cause else ""
        return TimelineLane(
            name=_shorten(trajectory.id),
            details=f"{trajectory.ending}{reward}, {pluralize(len(trajectory.turns), 'turn')}{cause}",
            failed=not trajectory.ending.is_rewarded,
            bars=[self._bar(segment) for segment in lane.segments],
        )

    def _bar(self, segment: TimelineSegment) -> LaneBar:
        attempt = f"attempt {segment.attempt + 1}" if segment.attempt else ""
        note = "; ".join(filter(None, (attempt, _shorten(segment.failure))))
        return LaneBar(*_times(segment), self._number(segment.activity), note)

    def _number(self, activity: Activity) -> int:
        if activity not in self._numbers:
            self._numbers[activity] = len(self.kinds)
            self.kinds.append(LaneKind(_shorten(activity.label), colour(activity), activity.kind in PALE_KINDS))
        return self._numbers[activity]


def colour(activity: Activity) -> str:
    if activity.kind is ActivityKind.FAILED:
        return FAILED
    return COLOURS[activity.stage] if activity.stage is not None else OTHER


def _times(stretch: IdleGap | TimelineSegment) -> tuple[float, float]:
    return seconds(stretch.began), seconds(stretch.ended)


# ---- tables -----------------------------------------------------------------------------------------------------


def _gaps_section(timeline: RolloutTimeline, engines: StageTime) -> str:
    rows = []
    for gap in sorted(engines.gaps, key=lambda gap: (-gap.length, gap.began))[:GAPS_LISTED_MAX]:
        longest = ", ".join(
            f"{_shorten(name)} ({_shorten(activity.label)})" for name, activity, _ in timeline.explainers(gap)
        )
        causes = largest_shares(gap.causes, gap.length, CAUSES_SHOWN)
        rows.append([_seconds_text(gap.began), _seconds_text(gap.length), causes, longest or "-"])
    heads = ("since", "length", "causes", "longest under way")
    return section(
        "When no engine was decoding, and why",
        f"The longest of {pluralize(len(engines.gaps), 'gap')}. Each instant is divided among the trajectories under"
        " way, by what they did.",
        table(heads, rows, left=range(len(heads)), wrap=True) if rows else "<p>There were none.</p>",
    )


def _stages_section(timeline: RolloutTimeline) -> str:
    rows = []
    for stage, each in timeline.stages.items():
        rows.append([
            LABEL_BY_STAGE[stage], percent(each.busy_share), f"{each.concurrency_max:,}", _seconds_text(each.working),
            _seconds_text(each.waiting), _seconds_text(sum(each.idle.values())),
            largest_shares(each.idle, each.total, CAUSES_SHOWN),
        ])  # fmt: skip
    heads = ("stage", "busy", "most at once", "trajectory time in it", "waiting for it", "idle", "causes of idle time")
    return section(
        "Every stage",
        "Busy: the share of the whole time in which the stage worked on something. Shares of causes are of the whole"
        " time; busy and all causes are 100 %.",
        table(heads, rows, left=range(len(heads)), wrap=True),
    )


def _tasks_section(timeline: RolloutTimeline) -> str:
    rows = []
    for each in timeline.tasks:
        shares = largest_shares(each.parts, each.total, CAUSES_SHOWN)
        rows.append([_shorten(each.task), f"{each.trajectories:,}", _seconds_text(each.total), _task_bar(each), shares])
    heads = ("task", "trajectories", "time in all", "", "shares")
    return section(
        "Where the time of trajectories went",
        "All time between the begin and the end of each trajectory; the shares add up to 100 %.",
        table(heads, rows, left=range(len(heads)), wrap=True),
    )


def _task_bar(task: TaskTime) -> str:
    return share_bar(
        (
            f"{colour(activity)}{' pale' if activity.kind in PALE_KINDS else ''}",
            part / task.total,
            f"{_shorten(activity.label)}: {part / task.total:.1%}",
        )
        for activity, part in task.parts.items()
    )


def _seconds_text(count: int) -> str:
    return seconds_text(seconds(count))


def _shorten(text: str) -> str:
    return truncate(text, NAME_MAX)
