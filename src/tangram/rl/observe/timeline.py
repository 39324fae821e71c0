"""The timeline of a rollout: what each trajectory did when, which stage stood idle when, and why.

Owns the arithmetic; pure. Time is counted in whole nanoseconds, so that parts add up to their whole exactly:

    of a trajectory   each instant between its begin and its end belongs to one activity; where spans overlap, to the
                      one that began last; where there is none, to `between stages`
    of a stage        it is busy while something is done in it for at least one trajectory, and idle otherwise
    of an idle gap    each instant is divided equally among the trajectories that explain it. Those are the ones that
                      wait at the door of that very stage, if there are any: work is there, and something is short.
                      Otherwise all that are under way, each with what it does or waits for. If there are only some
                      that have ended, the buffer: the trainer has yet to take them. If there are none at all, nobody
                      gave anything to play; before the first that is the start of the run, after the last its end.

Of a request that was aborted nobody tells how long it waited in its engine: all of its time there counts as a try that
brought nothing (`failed`), and the engines as busy with it.

`lane` makes a trajectory's activities of its spans, `timeline` all the rest, and `logged` both of a log.
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
from tangram.reports.printable import plain
from tangram.rl.rollout.records import Span, Stage, Trajectory
from tangram.rl.runs.trajectory_log import GroupClosing, Reading

SECOND = 1_000_000_000
SECONDS_MAX = 1e9
"""Of a rollout, 30 years: what is beyond is no time."""
EXPLAINERS_MAX = 3
"""Trajectories that are named for a gap."""


class Doing(StrEnum):
    """What kind of time it is."""

    WORKING = "working"
    """Something is done in a stage."""
    FAILED = "failed"
    """The same, but this try brought nothing."""
    WAITING = "waiting"
    """For what is short."""
    BETWEEN = "between"
    """Under way, but in no stage: the loop itself."""
    NOTHING = "nothing"
    """No trajectory is under way: nobody gave anything to play."""
    START = "start"
    END = "end"


class Activity(msgspec.Struct, frozen=True, order=True):
    """What a trajectory does at a time; also the cause of an idle gap."""

    doing: Doing
    stage: Stage | None = None
    short: str = ""
    """Of waiting: what for."""

    @property
    def words(self) -> str:
        match self.doing:
            case Doing.WAITING:
                return f"waiting for {self.short}" if self.short else f"waiting for {UNNAMED[self.stage or Stage.STEP]}"
            case Doing.WORKING | Doing.FAILED:
                assert self.stage is not None
                return NAMES[self.stage] + (", in vain" if self.doing is Doing.FAILED else "")
        return OTHERS[self.doing]

    @property
    def party(self) -> str:
        """Whose it is: of the engine, the environment, the reward, the buffer, the rollout itself, or nobody's."""
        return PARTIES[self.stage] if self.stage is not None else PARTIES_OF_OTHERS[self.doing]

    @property
    def in_buffer(self) -> bool:
        return self.stage is Stage.BUFFER


NAMES = {
    Stage.RESET: "environment: reset",
    Stage.GENERATE: "engine: generate",
    Stage.STEP: "environment: step",
    Stage.REWARD: "reward",
    Stage.BUFFER: "buffer",
}
PARTIES = {
    Stage.RESET: "environment",
    Stage.GENERATE: "engine",
    Stage.STEP: "environment",
    Stage.REWARD: "reward",
    Stage.BUFFER: "buffer",
}
PARTIES_OF_OTHERS = {Doing.BETWEEN: "rollout", Doing.NOTHING: "buffer", Doing.START: "run", Doing.END: "run"}
UNNAMED = {
    Stage.RESET: "an environment",
    Stage.GENERATE: "an engine",
    Stage.STEP: "an environment",
    Stage.REWARD: "a reward",
    Stage.BUFFER: "the group or the trainer",
}
OTHERS = {
    Doing.BETWEEN: "between stages",
    Doing.NOTHING: "buffer: nothing to play",
    Doing.START: "start of the run",
    Doing.END: "end of the run",
}
BETWEEN, NOTHING = Activity(Doing.BETWEEN), Activity(Doing.NOTHING)
START, END = Activity(Doing.START), Activity(Doing.END)


class Piece(msgspec.Struct, frozen=True):
    """A stretch of one activity, in nanoseconds since the rollout began."""

    began: int
    ended: int
    activity: Activity
    attempt: int = 0
    why: str = ""
    """A try failed."""

    @property
    def length(self) -> int:
        return self.ended - self.began


class Lane(msgspec.Struct, frozen=True):
    """One trajectory: its pieces follow each other without a gap."""

    trajectory: Trajectory
    pieces: tuple[Piece, ...]

    @property
    def began(self) -> int:
        return self.pieces[0].began if self.pieces else nanoseconds(self.trajectory.began_s)

    @property
    def ended(self) -> int:
        return self.pieces[-1].ended if self.pieces else self.began


class Gap(msgspec.Struct, frozen=True):
    """A stretch in which a stage stood idle."""

    began: int
    ended: int
    causes: dict[Activity, int]
    """Nanoseconds of each; together they are its length. The longest first."""

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
    gaps: tuple[Gap, ...]
    mains: tuple[tuple[int, int, Activity], ...]
    """(since, until, what explains most of it): all idle time, in order, a new one wherever that changes."""
    counts: tuple[tuple[int, int, int], ...]
    """(since, trajectories in which it works, trajectories that wait for it), whenever one of the two changes."""
    working: int
    """Nanoseconds over all trajectories; a second in which two work counts twice."""
    waiting: int

    @property
    def busy_share(self) -> float:
        return self.busy / self.total if self.total else 0.0

    @property
    def most(self) -> int:
        return max((working for _, working, _ in self.counts), default=0)


class TaskTime(msgspec.Struct, frozen=True):
    """Where the time of a task's trajectories went. The parts add up to the total."""

    task: str
    trajectories: int
    total: int
    parts: dict[Activity, int]

    def shares(self) -> dict[str, float]:
        return {words: part / self.total for words, part in in_words(self.parts).items()} if self.total else {}


def in_words(parts: Mapping[Activity, int]) -> dict[str, int]:
    """The longest first; several stages may wait for the same."""
    found: Counter[str] = Counter()
    for activity, part in parts.items():
        found[activity.words] += part
    return dict(sorted(found.items(), key=lambda part: (-part[1], part[0])))


class Timeline(msgspec.Struct, frozen=True):
    """From 0, when the rollout began, to its end."""

    total: int
    lanes: tuple[Lane, ...]
    """In the order in which they began."""
    stages: dict[Stage, StageTime]
    tasks: tuple[TaskTime, ...]

    def explainers(self, gap: Gap) -> list[tuple[str, Activity, int]]:
        """The trajectories that were longest under way in a gap, with what each mostly did."""
        found = []
        for lane in self.lanes:
            if lane.began >= gap.ended:
                break
            own: Counter[Activity] = Counter()
            for piece in lane.pieces:
                shared = min(piece.ended, gap.ended) - max(piece.began, gap.began)
                if shared > 0 and not piece.activity.in_buffer:
                    own[piece.activity] += shared
            if own:
                found.append((lane.trajectory.id, max(own, key=lambda each: (own[each], each)), own.total()))
        return heapq.nlargest(EXPLAINERS_MAX, found, key=lambda each: each[2])


def nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND)


def seconds(count: int) -> float:
    return count / SECOND


# ---- lanes ------------------------------------------------------------------------------------------------------


def lane(trajectory: Trajectory) -> Lane:
    """Raises InvalidTrace if its times cannot be."""
    called = plain(trajectory.id)
    spans = [each for span in trajectory.spans for each in _parts(span, called)]
    for name in ("began_s", "ended_s"):
        _time(getattr(trajectory, name), f"{called} {name}")
    began = min([nanoseconds(trajectory.began_s), *(each.began for each in spans)])
    ended = max([nanoseconds(trajectory.ended_s), began, *(each.ended for each in spans)])
    return Lane(trajectory, tuple(_flat(spans, began, ended)))


def _parts(span: Span, name: str) -> Iterator[Piece]:
    began = _time(span.began_s, f"{name} {span.stage} began_s")
    ended = _time(span.ended_s, f"{name} {span.stage} ended_s")
    waiting = _time(span.waiting_s, f"{name} {span.stage} waiting_s")
    if ended < began:
        raise InvalidTrace(f"{name} {span.stage} ended_s", span.ended_s, f"at least began_s, which is {span.began_s}")
    begun = min(ended, began + waiting)  # a sum of several waits may exceed its span by rounding
    if begun > began:
        yield Piece(began, begun, Activity(Doing.WAITING, span.stage, span.waited_for), span.attempt, span.failed)
    if ended > begun:
        doing = Doing.FAILED if span.failed else Doing.WORKING
        yield Piece(begun, ended, Activity(doing, span.stage), span.attempt, span.failed)


def _time(value: float, name: str) -> int:
    if not (math.isfinite(value) and 0.0 <= value <= SECONDS_MAX):
        raise InvalidTrace(name, value, f"seconds from 0 to {SECONDS_MAX:g}")
    return nanoseconds(value)


def _flat(pieces: Sequence[Piece], began: int, ended: int) -> Iterator[Piece]:
    """Without overlaps and gaps: at each instant the piece that began last, of two such the later in the list."""
    cuts = sorted({began, ended, *(cut for piece in pieces for cut in (piece.began, piece.ended))})
    starting = sorted(range(len(pieces)), key=lambda index: pieces[index].began)
    open_: list[tuple[int, int]] = []
    """A heap: (minus its begin, minus its place)."""
    following = 0
    last: Piece | None = None
    for since, until in pairwise(cuts):
        while following < len(starting) and pieces[starting[following]].began <= since:
            index = starting[following]
            heapq.heappush(open_, (-pieces[index].began, -index))
            following += 1
        while open_ and pieces[-open_[0][1]].ended <= since:
            heapq.heappop(open_)
        its = pieces[-open_[0][1]] if open_ else Piece(since, until, BETWEEN)
        now = Piece(since, until, its.activity, its.attempt, its.why)
        if last is not None and (last.activity, last.attempt, last.why) == (now.activity, now.attempt, now.why):
            last = Piece(last.began, until, last.activity, last.attempt, last.why)
            continue
        if last is not None:
            yield last
        last = now
    if last is not None:
        yield last


def buffered(trajectory: Trajectory, until_s: float) -> Trajectory:
    """With the time from its end until its group was closed, unless it knows better."""
    if until_s <= trajectory.ended_s or any(span.stage is Stage.BUFFER for span in trajectory.spans):
        return trajectory
    span = Span(stage=Stage.BUFFER, began_s=trajectory.ended_s, ended_s=until_s)
    return msgspec.structs.replace(trajectory, spans=(*trajectory.spans, span))


# ---- all of it --------------------------------------------------------------------------------------------------


def logged(reading: Reading) -> Timeline:
    """Of a log. Raises InvalidTrace, which names the file and the line."""
    trajectories: dict[str, Trajectory] = {}
    ended_s = 0.0
    for record in reading:
        if isinstance(record, Trajectory):
            trajectories[record.id] = record
        elif isinstance(record, GroupClosing):
            ended_s = max(ended_s, record.at_s)
            for each in record.members:
                if each in trajectories:
                    trajectories[each] = buffered(trajectories[each], record.at_s)
    try:
        return timeline(trajectories.values(), ended_s)
    except InvalidTrace as error:
        raise _placed(error, reading) from error


def _placed(error: InvalidTrace, reading: Reading) -> InvalidTrace:
    """Where in the log it is: it is read once more, which nobody minds who has to mend it."""
    for record in reading:
        try:
            if isinstance(record, Trajectory):
                lane(record)
            elif isinstance(record, GroupClosing):
                _time(record.at_s, f"{plain(record.id)} at_s")
        except InvalidTrace as here:
            return InvalidTrace(f"{reading.path}:{reading.line} {here.field}", here.value, here.expected)
    return InvalidTrace(f"{reading.path} {error.field}", error.value, error.expected)


def timeline(trajectories: Iterable[Trajectory], ended_s: float = 0.0) -> Timeline:
    """`ended_s`: when the rollout ended, if that was after its last trajectory. Raises InvalidTrace."""
    lanes = sorted((lane(each) for each in trajectories), key=lambda each: (each.began, each.trajectory.id))
    total = max([_time(ended_s, "ended_s"), *(each.ended for each in lanes)])
    over = max((each.ended for each in lanes if each.pieces), default=0)
    known = sorted({START, NOTHING, END, *(piece.activity for each in lanes for piece in each.pieces)})
    number = {activity: place for place, activity in enumerate(known)}
    stages = [_Stage(stage, known) for stage in Stage]
    for since, until, active, seen in _sweep(lanes, total, number):
        nobody = number[(END if since >= over else NOTHING) if seen else START]
        for stage in stages:
            stage.take(since, until, active, nobody)
    found = {each.stage: each.time(total) for each in stages}
    return Timeline(total, tuple(lanes), found, tuple(_tasks(lanes)))


def _sweep(
    lanes: Sequence[Lane], total: int, number: Mapping[Activity, int]
) -> Iterator[tuple[int, int, dict[int, int], bool]]:
    """(since, until, how many do what by its number, whether one was ever under way); from 0 to the end without a
    gap."""
    changes: list[tuple[int, int, int]] = []
    for each in lanes:
        for piece in each.pieces:
            doing = number[piece.activity]
            changes += [(piece.began, doing, 1), (piece.ended, doing, -1)]
    changes.sort()
    active: dict[int, int] = {}
    since, seen = 0, False
    for at, doing, change in changes:
        if at > since:
            yield since, at, active, seen
            since = at
        count = active.get(doing, 0) + change
        if count:
            active[doing] = count
        else:
            del active[doing]
        seen = True
    if total > since:
        yield since, total, active, seen


class _Stage:
    """Gathers what becomes a StageTime. Knows activities by their number, which has their order."""

    def __init__(self, stage: Stage, known: Sequence[Activity]) -> None:
        self.stage = stage
        self._known = known
        own = [(place, each) for place, each in enumerate(known) if each.stage is stage]
        self._door = frozenset(place for place, each in own if each.doing is Doing.WAITING)
        self._work = frozenset(place for place, each in own if each.doing is not Doing.WAITING)
        self._buffer = frozenset(place for place, each in enumerate(known) if each.in_buffer)
        self._busy = self._working = self._waiting = 0
        self._idle: Counter[int] = Counter()
        self._gaps: list[Gap] = []
        self._gap: tuple[int, int, Counter[int]] | None = None
        self._mains: list[tuple[int, int, int]] = []
        self._counts: list[tuple[int, int, int]] = []

    def take(self, since: int, until: int, active: Mapping[int, int], nobody: int) -> None:
        length = until - since
        working = sum(active[each] for each in self._work if each in active)
        waiting = sum(active[each] for each in self._door if each in active)
        if not self._counts or self._counts[-1][1:] != (working, waiting):
            self._counts.append((since, working, waiting))
        self._working += working * length
        self._waiting += waiting * length
        if working:
            self._busy += length
            self._close()
            return
        parts = divided(length, self._explaining(active, nobody))
        began, causes = (self._gap[0], self._gap[2]) if self._gap else (since, Counter())
        for each, part in parts.items():
            causes[each] += part
        self._gap = (began, until, causes)
        self._extend_mains(since, until, min(parts, key=lambda each: (-parts[each], each)))

    def _explaining(self, active: Mapping[int, int], nobody: int) -> Mapping[int, int]:
        door = {each: active[each] for each in self._door if each in active}
        if door:
            return door
        playing = {each: count for each, count in active.items() if each not in self._buffer}
        return playing or active or {nobody: 1}

    def _extend_mains(self, since: int, until: int, main: int) -> None:
        if self._mains and self._mains[-1][1:] == (since, main):
            since = self._mains.pop()[0]
        self._mains.append((since, until, main))

    def _close(self) -> None:
        if self._gap is not None:
            began, ended, causes = self._gap
            self._gaps.append(Gap(began, ended, self._named(causes)))
            self._idle.update(causes)
            self._gap = None

    def _named(self, parts: Counter[int]) -> dict[Activity, int]:
        return _longest_first({self._known[each]: part for each, part in parts.items()})

    def time(self, total: int) -> StageTime:
        self._close()
        assert self._busy + self._idle.total() == total, f"{self.stage}: {self._busy} + {self._idle} is not {total}"
        return StageTime(
            stage=self.stage,
            total=total,
            busy=self._busy,
            idle=self._named(self._idle),
            gaps=tuple(self._gaps),
            mains=tuple((since, until, self._known[main]) for since, until, main in self._mains),
            counts=tuple(self._counts),
            working=self._working,
            waiting=self._waiting,
        )


def divided(length: int, counts: Mapping[int, int]) -> dict[int, int]:
    """In proportion, in whole nanoseconds that add up to the length; what is left over goes to the first in order."""
    if len(counts) == 1:
        return dict.fromkeys(counts, length)
    whole = sum(counts.values())
    parts = {each: length * count // whole for each, count in counts.items()}
    for each in sorted(parts)[: length - sum(parts.values())]:
        parts[each] += 1
    return {each: part for each, part in parts.items() if part}


def _tasks(lanes: Sequence[Lane]) -> Iterator[TaskTime]:
    parts: dict[str, Counter[Activity]] = {}
    count: Counter[str] = Counter()
    for each in lanes:
        own = parts.setdefault(each.trajectory.task, Counter())
        count[each.trajectory.task] += 1
        for piece in each.pieces:
            own[piece.activity] += piece.length
    for task in sorted(parts):
        yield TaskTime(task, count[task], parts[task].total(), _longest_first(parts[task]))


def _longest_first(parts: Mapping[Activity, int]) -> dict[Activity, int]:
    return dict(sorted(parts.items(), key=lambda part: (-part[1], part[0])))
