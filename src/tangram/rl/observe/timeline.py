"""The timeline of a rollout: the activities of each trajectory over time, the idle times of each stage, and their
causes.

Owns the arithmetic; pure. Time is counted in whole nanoseconds, so that parts add up to their whole exactly:

    trajectory   each instant between its begin and its end belongs to one activity; where spans overlap, to the one
                 that began last; where there is none, to `between stages`
    stage        busy while it works on at least one trajectory, otherwise idle
    idle gap     each instant is divided equally among the trajectories that explain it: those that wait for the stage
                 itself, if any (it lacks a resource); otherwise all that are under way, each with its activity; if all
                 have ended, the buffer (the trainer has not taken them). Without any trajectory the cause is that there
                 is nothing to play, before the first one the start of the run, after the last one its end.

The log does not record how long an aborted request waited in its engine: all of its time counts as a failed attempt,
and the engine as busy with it.

`trajectory_lane` computes the activities of a trajectory, `build_timeline` the rest, `timeline_of_log` both for a log.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec

from tangram.errors import InvalidTrace
from tangram.reports.formatting import percent
from tangram.reports.printable import escape_unprintable, truncate
from tangram.rl.runs.trajectory_log import GroupClosing, TrajectoryLogReader
from tangram.rl.trajectories.trajectory import Span, Stage, Trajectory

SECOND = 1_000_000_000
SECONDS_MAX = 1e9
"""The longest rollout, 30 years; a larger time is invalid."""
SHARE_MIN = 0.0005
"""Shares below it would be shown as 0.0 %."""
NAME_MAX = 160
"""Characters of a cause."""
EXPLAINERS_MAX = 3
"""Trajectories that are named for a gap."""


class ActivityKind(StrEnum):
    """The kind of an activity."""

    WORKING = "working"
    """The stage works on the trajectory."""
    FAILED = "failed"
    """The same, in an attempt that failed."""
    WAITING = "waiting"
    """Waiting for a resource."""
    BETWEEN = "between"
    """In progress, but in no stage: in the rollout loop."""
    NOTHING = "nothing"
    """No trajectory is in progress: there is nothing to play."""
    START = "start"
    END = "end"


class Activity(msgspec.Struct, frozen=True, order=True):
    """The activity of a trajectory at an instant; also the cause of an idle gap."""

    kind: ActivityKind
    stage: Stage | None = None
    waiting_for: str = ""
    """The resource, if it waits and the resource is known."""

    @property
    def label(self) -> str:
        match self.kind:
            case ActivityKind.WAITING:
                return (
                    f"waiting for {self.waiting_for}"
                    if self.waiting_for
                    else f"waiting for {RESOURCE_BY_STAGE[self.stage or Stage.STEP]}"
                )
            case ActivityKind.WORKING | ActivityKind.FAILED:
                assert self.stage is not None
                return LABEL_BY_STAGE[self.stage] + (", failed" if self.kind is ActivityKind.FAILED else "")
        return LABEL_BY_KIND[self.kind]

    @property
    def component(self) -> str:
        """The component that the time belongs to: engine, environment, reward, buffer, rollout or run."""
        return COMPONENT_BY_STAGE[self.stage] if self.stage is not None else COMPONENT_BY_KIND[self.kind]

    @property
    def in_buffer(self) -> bool:
        return self.stage is Stage.BUFFER


LABEL_BY_STAGE = {
    Stage.RESET: "environment: reset",
    Stage.GENERATE: "engine: generate",
    Stage.STEP: "environment: step",
    Stage.REWARD: "reward",
    Stage.BUFFER: "buffer",
}
COMPONENT_BY_STAGE = {
    Stage.RESET: "environment",
    Stage.GENERATE: "engine",
    Stage.STEP: "environment",
    Stage.REWARD: "reward",
    Stage.BUFFER: "buffer",
}
COMPONENT_BY_KIND = {
    ActivityKind.BETWEEN: "rollout",
    ActivityKind.NOTHING: "buffer",
    ActivityKind.START: "run",
    ActivityKind.END: "run",
}
RESOURCE_BY_STAGE = {
    Stage.RESET: "an environment",
    Stage.GENERATE: "an engine",
    Stage.STEP: "an environment",
    Stage.REWARD: "a reward",
    Stage.BUFFER: "the group or the trainer",
}
LABEL_BY_KIND = {
    ActivityKind.BETWEEN: "between stages",
    ActivityKind.NOTHING: "buffer: nothing to play",
    ActivityKind.START: "start of the run",
    ActivityKind.END: "end of the run",
}
BETWEEN, NOTHING = Activity(ActivityKind.BETWEEN), Activity(ActivityKind.NOTHING)
START, END = Activity(ActivityKind.START), Activity(ActivityKind.END)


class TimelineSegment(msgspec.Struct, frozen=True):
    """A stretch of one activity, in nanoseconds since the rollout began."""

    began: int
    ended: int
    activity: Activity
    attempt: int = 0
    failure: str = ""
    """The error of a failed attempt."""

    @property
    def length(self) -> int:
        return self.ended - self.began


class TrajectoryLane(msgspec.Struct, frozen=True):
    """One trajectory: its segments follow each other without a gap."""

    trajectory: Trajectory
    segments: tuple[TimelineSegment, ...]

    @property
    def began(self) -> int:
        return self.segments[0].began if self.segments else nanoseconds(self.trajectory.began_s)

    @property
    def ended(self) -> int:
        return self.segments[-1].ended if self.segments else self.began


class IdleGap(msgspec.Struct, frozen=True):
    """A stretch in which a stage was idle."""

    began: int
    ended: int
    causes: dict[Activity, int]
    """Nanoseconds by cause, the longest first; they add up to the length."""

    @property
    def length(self) -> int:
        return self.ended - self.began


class StageTime(msgspec.Struct, frozen=True):
    """One stage over the whole rollout. busy + the idle of all causes = total."""

    stage: Stage
    total: int
    busy: int
    idle: dict[Activity, int]
    """By cause, the longest first."""
    gaps: tuple[IdleGap, ...]
    main_causes: tuple[tuple[int, int, Activity], ...]
    """All idle time in order: (since, until, main cause), a new entry wherever the main cause changes."""
    counts: tuple[tuple[int, int, int], ...]
    """(since, trajectories that it works on, trajectories that wait for it), whenever one of the counts changes."""
    working: int
    """Nanoseconds summed over trajectories."""
    waiting: int

    @property
    def busy_share(self) -> float:
        return self.busy / self.total if self.total else 0.0

    @property
    def concurrency_max(self) -> int:
        return max((working for _, working, _ in self.counts), default=0)


class TaskTime(msgspec.Struct, frozen=True):
    """The time breakdown of a task's trajectories. The parts add up to the total."""

    task: str
    trajectories: int
    total: int
    parts: dict[Activity, int]

    def shares(self) -> dict[str, float]:
        return {words: part / self.total for words, part in time_by_label(self.parts).items()} if self.total else {}


def time_by_label(parts: Mapping[Activity, int]) -> dict[str, int]:
    """Times by label, the longest first; several stages may wait for the same resource."""
    counts: Counter[str] = Counter()
    for activity, part in parts.items():
        counts[activity.label] += part
    return dict(sorted(counts.items(), key=lambda part: (-part[1], part[0])))


def largest_shares(parts: Mapping[Activity, int], total: int, most: int) -> str:
    """The largest shares of `total` as text, and the rest together: `engine: generate 61.0 %, others 4.2 %`."""
    if not total:
        return "-"
    shown = [(cause, part) for cause, part in list(time_by_label(parts).items())[:most] if part / total >= SHARE_MIN]
    rest = sum(parts.values()) - sum(part for _, part in shown)
    words = [f"{truncate(cause, NAME_MAX)} {percent(part / total)}" for cause, part in shown]
    return ", ".join([*words, *([f"others {percent(rest / total)}"] if rest / total >= SHARE_MIN else [])]) or "-"


class RolloutTimeline(msgspec.Struct, frozen=True):
    """A rollout from its begin, at 0, to its end."""

    total: int
    lanes: tuple[TrajectoryLane, ...]
    """In the order in which they began."""
    stages: dict[Stage, StageTime]
    tasks: tuple[TaskTime, ...]

    def explainers(self, gap: IdleGap) -> list[tuple[str, Activity, int]]:
        """The trajectories that were in progress longest in a gap, with their main activity and that time."""
        gaps = []
        for lane in self.lanes:
            if lane.began >= gap.ended:
                break
            own: Counter[Activity] = Counter()
            for segment in lane.segments:
                shared = min(segment.ended, gap.ended) - max(segment.began, gap.began)
                if shared > 0 and not segment.activity.in_buffer:
                    own[segment.activity] += shared
            if own:
                gaps.append((lane.trajectory.id, max(own, key=lambda each: (own[each], each)), own.total()))
        return heapq.nlargest(EXPLAINERS_MAX, gaps, key=lambda each: each[2])


def nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND)


def seconds(count: int) -> float:
    return count / SECOND


# ---- lanes ------------------------------------------------------------------------------------------------------


def trajectory_lane(trajectory: Trajectory) -> TrajectoryLane:
    """The lane of a trajectory. Raises InvalidTrace for impossible times."""
    called = escape_unprintable(trajectory.id)
    spans = [each for span in trajectory.spans for each in _segments(span, called)]
    for name in ("began_s", "ended_s"):
        _time(getattr(trajectory, name), f"{called} {name}")
    began = min([nanoseconds(trajectory.began_s), *(each.began for each in spans)])
    ended = max([nanoseconds(trajectory.ended_s), began, *(each.ended for each in spans)])
    return TrajectoryLane(trajectory, tuple(_flatten(spans, began, ended)))


def _segments(span: Span, name: str) -> Iterator[TimelineSegment]:
    began = _time(span.began_s, f"{name} {span.stage} began_s")
    ended = _time(span.ended_s, f"{name} {span.stage} ended_s")
    waiting = _time(span.waiting_s, f"{name} {span.stage} waiting_s")
    if ended < began:
        raise InvalidTrace(f"{name} {span.stage} ended_s", span.ended_s, f"at least began_s, which is {span.began_s}")
    waiting_end = min(ended, began + waiting)  # a sum of several waits may exceed its span by rounding
    if waiting_end > began:
        yield TimelineSegment(
            began, waiting_end, Activity(ActivityKind.WAITING, span.stage, span.waited_for), span.attempt, span.failed
        )
    if ended > waiting_end:
        doing = ActivityKind.FAILED if span.failed else ActivityKind.WORKING
        yield TimelineSegment(waiting_end, ended, Activity(doing, span.stage), span.attempt, span.failed)


def _time(value: float, name: str) -> int:
    if not (math.isfinite(value) and 0.0 <= value <= SECONDS_MAX):
        raise InvalidTrace(name, value, f"seconds from 0 to {SECONDS_MAX:g}")
    return nanoseconds(value)


def _flatten(segments: Sequence[TimelineSegment], began: int, ended: int) -> Iterator[TimelineSegment]:
    """Segments without overlaps and gaps: at each instant the one that began last, of two the later in the list."""
    cuts = sorted({began, ended, *(cut for segment in segments for cut in (segment.began, segment.ended))})
    starting = sorted(range(len(segments)), key=lambda index: segments[index].began)
    open_: list[tuple[int, int]] = []
    """A heap: (minus its begin, minus its place)."""
    following = 0
    last: TimelineSegment | None = None
    for since, until in pairwise(cuts):
        while following < len(starting) and segments[starting[following]].began <= since:
            index = starting[following]
            heapq.heappush(open_, (-segments[index].began, -index))
            following += 1
        while open_ and segments[-open_[0][1]].ended <= since:
            heapq.heappop(open_)
        newest = segments[-open_[0][1]] if open_ else TimelineSegment(since, until, BETWEEN)
        now = TimelineSegment(since, until, newest.activity, newest.attempt, newest.failure)
        if last is not None and (last.activity, last.attempt, last.failure) == (now.activity, now.attempt, now.failure):
            last = TimelineSegment(last.began, until, last.activity, last.attempt, last.failure)
            continue
        if last is not None:
            yield last
        last = now
    if last is not None:
        yield last


def with_buffer_wait(trajectory: Trajectory, until_s: float) -> Trajectory:
    """Add the time from its end until its group was closed, unless it has a buffer span already."""
    if until_s <= trajectory.ended_s or any(span.stage is Stage.BUFFER for span in trajectory.spans):
        return trajectory
    span = Span(stage=Stage.BUFFER, began_s=trajectory.ended_s, ended_s=until_s)
    return msgspec.structs.replace(trajectory, spans=(*trajectory.spans, span))


# ---- building a timeline ----------------------------------------------------------------------------------------


def timeline_of_log(reading: TrajectoryLogReader) -> RolloutTimeline:
    """The timeline of a trajectory log. Raises InvalidTrace, which names the file and the line."""
    trajectories: dict[str, Trajectory] = {}
    ended_s = 0.0
    for record in reading:
        if isinstance(record, Trajectory):
            trajectories[record.id] = record
        elif isinstance(record, GroupClosing):
            ended_s = max(ended_s, record.at_s)
            for each in record.members:
                if each in trajectories:
                    trajectories[each] = with_buffer_wait(trajectories[each], record.at_s)
    try:
        return build_timeline(trajectories.values(), ended_s)
    except InvalidTrace as error:
        raise _with_location(error, reading) from error


def _with_location(error: InvalidTrace, reading: TrajectoryLogReader) -> InvalidTrace:
    """The error with its file and line, which are found by reading the log again."""
    for record in reading:
        try:
            if isinstance(record, Trajectory):
                trajectory_lane(record)
            elif isinstance(record, GroupClosing):
                _time(record.at_s, f"{escape_unprintable(record.id)} at_s")
        except InvalidTrace as here:
            return InvalidTrace(f"{reading.path}:{reading.line} {here.field}", here.value, here.expected)
    return InvalidTrace(f"{reading.path} {error.field}", error.value, error.expected)


def build_timeline(trajectories: Iterable[Trajectory], ended_s: float = 0.0) -> RolloutTimeline:
    """`ended_s`: when the rollout ended, if that was after its last trajectory. Raises InvalidTrace."""
    lanes = sorted((trajectory_lane(each) for each in trajectories), key=lambda each: (each.began, each.trajectory.id))
    total = max([_time(ended_s, "ended_s"), *(each.ended for each in lanes)])
    over = max((each.ended for each in lanes if each.segments), default=0)
    known = sorted({START, NOTHING, END, *(segment.activity for each in lanes for segment in each.segments)})
    number = {activity: place for place, activity in enumerate(known)}
    stages = [_StageAccumulator(stage, known) for stage in Stage]
    for since, until, active, has_started in _sweep(lanes, total, number):
        fallback = number[(END if since >= over else NOTHING) if has_started else START]
        for stage in stages:
            stage.add(since, until, active, fallback)
    result_by_stage = {each.stage: each.result(total) for each in stages}
    return RolloutTimeline(total, tuple(lanes), result_by_stage, tuple(_task_times(lanes)))


def _sweep(
    lanes: Sequence[TrajectoryLane], total: int, number: Mapping[Activity, int]
) -> Iterator[tuple[int, int, dict[int, int], bool]]:
    """Stretches from 0 to the end: (since, until, trajectories by activity, whether one was ever under way)."""
    changes: list[tuple[int, int, int]] = []
    for each in lanes:
        for segment in each.segments:
            doing = number[segment.activity]
            changes += [(segment.began, doing, 1), (segment.ended, doing, -1)]
    changes.sort()
    active: dict[int, int] = {}
    since, has_started = 0, False
    for at, doing, change in changes:
        if at > since:
            yield since, at, active, has_started
            since = at
        count = active.get(doing, 0) + change
        if count:
            active[doing] = count
        else:
            del active[doing]
        has_started = True
    if total > since:
        yield since, total, active, has_started


class _StageAccumulator:
    """Accumulates a StageTime. Activities are numbered in their order."""

    def __init__(self, stage: Stage, known: Sequence[Activity]) -> None:
        self.stage = stage
        self._activities = known
        own = [(place, each) for place, each in enumerate(known) if each.stage is stage]
        self._waiting_activities = frozenset(place for place, each in own if each.kind is ActivityKind.WAITING)
        self._working_activities = frozenset(place for place, each in own if each.kind is not ActivityKind.WAITING)
        self._buffer_activities = frozenset(place for place, each in enumerate(known) if each.in_buffer)
        self._busy = self._working = self._waiting = 0
        self._idle: Counter[int] = Counter()
        self._gaps: list[IdleGap] = []
        self._gap: tuple[int, int, Counter[int]] | None = None
        self._main_causes: list[tuple[int, int, int]] = []
        self._counts: list[tuple[int, int, int]] = []

    def add(self, since: int, until: int, active: Mapping[int, int], fallback: int) -> None:
        length = until - since
        working = sum(active[each] for each in self._working_activities if each in active)
        waiting = sum(active[each] for each in self._waiting_activities if each in active)
        if not self._counts or self._counts[-1][1:] != (working, waiting):
            self._counts.append((since, working, waiting))
        self._working += working * length
        self._waiting += waiting * length
        if working:
            self._busy += length
            self._close_gap()
            return
        parts = divide_proportionally(length, self._idle_causes(active, fallback))
        began, causes = (self._gap[0], self._gap[2]) if self._gap else (since, Counter())
        for each, part in parts.items():
            causes[each] += part
        self._gap = (began, until, causes)
        self._extend_main_causes(since, until, min(parts, key=lambda each: (-parts[each], each)))

    def _idle_causes(self, active: Mapping[int, int], fallback: int) -> Mapping[int, int]:
        door = {each: active[each] for each in self._waiting_activities if each in active}
        if door:
            return door
        playing = {each: count for each, count in active.items() if each not in self._buffer_activities}
        return playing or active or {fallback: 1}

    def _extend_main_causes(self, since: int, until: int, main: int) -> None:
        if self._main_causes and self._main_causes[-1][1:] == (since, main):
            since = self._main_causes.pop()[0]
        self._main_causes.append((since, until, main))

    def _close_gap(self) -> None:
        if self._gap is not None:
            began, ended, causes = self._gap
            self._gaps.append(IdleGap(began, ended, self._by_activity(causes)))
            self._idle.update(causes)
            self._gap = None

    def _by_activity(self, parts: Counter[int]) -> dict[Activity, int]:
        return _longest_first({self._activities[each]: part for each, part in parts.items()})

    def result(self, total: int) -> StageTime:
        self._close_gap()
        assert self._busy + self._idle.total() == total, f"{self.stage}: {self._busy} + {self._idle} is not {total}"
        return StageTime(
            stage=self.stage,
            total=total,
            busy=self._busy,
            idle=self._by_activity(self._idle),
            gaps=tuple(self._gaps),
            main_causes=tuple((since, until, self._activities[main]) for since, until, main in self._main_causes),
            counts=tuple(self._counts),
            working=self._working,
            waiting=self._waiting,
        )


def divide_proportionally(length: int, counts: Mapping[int, int]) -> dict[int, int]:
    """Divide a length in proportion, in whole nanoseconds that add up; the remainder goes to the first keys."""
    if len(counts) == 1:
        return dict.fromkeys(counts, length)
    total = sum(counts.values())
    parts = {each: length * count // total for each, count in counts.items()}
    for each in sorted(parts)[: length - sum(parts.values())]:
        parts[each] += 1
    return {each: part for each, part in parts.items() if part}


def _task_times(lanes: Sequence[TrajectoryLane]) -> Iterator[TaskTime]:
    parts: dict[str, Counter[Activity]] = {}
    count: Counter[str] = Counter()
    for each in lanes:
        own = parts.setdefault(each.trajectory.task, Counter())
        count[each.trajectory.task] += 1
        for segment in each.segments:
            own[segment.activity] += segment.length
    for task in sorted(parts):
        yield TaskTime(task, count[task], parts[task].total(), _longest_first(parts[task]))


def _longest_first(parts: Mapping[Activity, int]) -> dict[Activity, int]:
    return dict(sorted(parts.items(), key=lambda part: (-part[1], part[0])))
