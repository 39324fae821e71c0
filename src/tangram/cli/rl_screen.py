"""The output of `tangram rl`: trajectories, one of them in full, a timeline in a terminal, and replays.

Owns the formatting. Text of environments, models and engines is escaped and truncated; `--json` contains all of it in
ASCII.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from tangram.errors import InvalidConfig
from tangram.reports import terminal
from tangram.reports.formatting import elapsed, number, percent, pluralize
from tangram.reports.printable import escape_unprintable, truncate, truncate_lines
from tangram.rl.observe.timeline import (
    Activity,
    ActivityKind,
    RolloutTimeline,
    StageTime,
    largest_shares,
    time_by_label,
)
from tangram.rl.observe.timeline import seconds as seconds_of
from tangram.rl.runs.trajectory_log import EngineEvent, GroupClosing, LogRecord, TrajectoryLogHeader
from tangram.rl.trajectories.trajectory import Stage, Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import Console

    from tangram.rl.rollout.replay import ReplayResult

NAME_WIDTH, CAUSE_WIDTH, LINE_WIDTH = 60, 70, 160
LINES_MAX = 40
"""Lines of one observation or action."""
TOKENS_MAX = 64
"""Tokens of one turn."""
GAPS_MAX = 8
CAUSES_MAX = 4
DIFFERENCES_MAX = 20
BINS = 96
"""Characters of a stage over time."""
LETTERS = {"environment": "e", "engine": "g", "reward": "r", "buffer": "b", "rollout": "-", "run": "."}
"""Letters of idle causes by party; a wait for something with a name is `w`."""


def print_json(value: Any) -> None:
    """Print ASCII only: text may contain lone surrogates and control characters. NaN and infinity become null."""
    typer.echo(json.dumps(_finite(msgspec.to_builtins(value)), indent=2))


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return None
        case str() if "\x7f" in value:
            return value.replace("\x7f", "\ufffd")
    return value


# ---- all trajectories -------------------------------------------------------------------------------------------


class TrajectoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in a table."""

    id: str
    task: str
    group: str
    ending: str
    cause: str
    reward: float | None
    turns: int
    tokens: int
    """Tokens that the policy wrote."""
    versions: tuple[int, int] | None
    """The first and the last version of the weights."""
    began_s: float
    ended_s: float
    time_s: float
    waiting_s: float

    @staticmethod
    def from_trajectory(trajectory: Trajectory) -> TrajectoryRow:
        versions = trajectory.versions
        return TrajectoryRow(
            id=trajectory.id,
            task=trajectory.task,
            group=trajectory.group,
            ending=trajectory.ending.value,
            cause=trajectory.cause,
            reward=trajectory.reward,
            turns=len(trajectory.turns),
            tokens=len(versions),
            versions=(min(versions), max(versions)) if versions else None,
            began_s=trajectory.began_s,
            ended_s=trajectory.ended_s,
            time_s=trajectory.ended_s - trajectory.began_s,
            waiting_s=sum(span.waiting_s for span in trajectory.spans),
        )


class TrajectoryListing:
    """Collects rows and their summary."""

    def __init__(self, *, task: str | None, ending: str | None, group: str | None) -> None:
        self._task, self._ending, self._group = task, ending, group
        self.rows: list[TrajectoryRow] = []
        self._tasks: dict[str, None] = {}
        self._groups: dict[str, None] = {}
        self.closed = self.complete = self.dropped = self.events = 0

    def add(self, record: LogRecord) -> None:
        if isinstance(record, Trajectory):
            self._tasks[record.task] = self._groups[record.group] = None
            filters = ((self._task, record.task), (self._ending, record.ending.value), (self._group, record.group))
            if all(expected is None or expected == value for expected, value in filters):
                self.rows.append(TrajectoryRow.from_trajectory(record))
        elif isinstance(record, GroupClosing):
            self.closed += 1
            self.complete += len(record.members) == record.wanted
            self.dropped += not record.members
        else:
            self.events += isinstance(record, EngineEvent)

    @property
    def tasks(self) -> list[str]:
        return list(self._tasks)

    @property
    def groups(self) -> list[str]:
        return list(self._groups)

    def summary(self) -> dict[str, Any]:
        """Summarize the rows by task."""
        tasks = {}
        for name in self._tasks:
            rows = [row for row in self.rows if row.task == name]
            rewards = [row.reward for row in rows if row.reward is not None]
            if rows:
                tasks[name] = {
                    "trajectories": len(rows),
                    "endings": dict(Counter(row.ending for row in rows)),
                    "reward": sum(rewards) / len(rewards) if rewards else None,
                    "tokens": sum(row.tokens for row in rows),
                }
        groups = {"closed": self.closed, "whole": self.complete, "dropped": self.dropped}
        return {"tasks": tasks, "groups": groups, "engine_events": self.events}


def print_listing(
    file: Path, header: TrajectoryLogHeader, listing: TrajectoryListing, rows: Sequence[TrajectoryRow]
) -> None:
    console = terminal.stdout_console()
    if not listing.rows:
        terminal.print_plain(
            console, f"{escape_unprintable(file.name)}: no trajectory" + (" that matches" if listing.tasks else " yet")
        )
        return
    table = terminal.table(f"{escape_unprintable(file.name)}: {_count_text(len(rows), len(listing.rows))}")
    # Ids are for copying: they are never truncated.
    table.add_column("trajectory", no_wrap=True, min_width=max(len(escape_unprintable(row.id)) for row in listing.rows))
    table.add_column("ending", no_wrap=True)
    for head in ("reward", "turns", "tokens", "versions", "began", "time", "waiting"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("cause", overflow="ellipsis", no_wrap=True)
    for row in rows:
        numbers = (number(row.reward), f"{row.turns:,}", f"{row.tokens:,}", _versions(row.versions))
        times = (elapsed(row.began_s), elapsed(row.time_s), elapsed(row.waiting_s))
        table.add_row(truncate(row.id, NAME_WIDTH), row.ending, *numbers, *times, truncate(row.cause, CAUSE_WIDTH))
    terminal.print_plain(console, table)
    for name, summary in listing.summary()["tasks"].items():
        endings = ", ".join(f"{count:,} {ending}" for ending, count in summary["endings"].items())
        mean = number(summary["reward"])
        terminal.print_plain(
            console,
            f"{truncate(name, NAME_WIDTH)}: {endings}; mean reward {mean};"
            f" {pluralize(summary['tokens'], 'token')} decoded",
        )
    if listing.closed:
        terminal.print_plain(
            console,
            f"groups: {listing.closed:,} closed, {listing.complete:,} of them complete, {listing.dropped:,} dropped",
        )
    if header.note:
        terminal.print_plain(console, f"note: {truncate(header.note, LINE_WIDTH)}")


def _count_text(shown: int, count: int) -> str:
    counted = pluralize(count, "trajectory", "trajectories")
    return counted if shown == count else f"{shown:,} of {counted}; --limit shows more"


def _versions(counts: tuple[int, int] | None) -> str:
    if counts is None:
        return "-"
    return str(counts[0]) if counts[0] == counts[1] else f"{counts[0]} to {counts[1]}"


# ---- one trajectory ---------------------------------------------------------------------------------------------


TextOf = Callable[[int], str]
"""Returns the text of a token."""


def token_decoder(header: TrajectoryLogHeader) -> TextOf | None:
    """A function from token to text: the vocabulary of the log or the tokenizer of its checkpoint; None if unknown."""
    words, settings = header.words, header.settings
    if words:
        return lambda token: words[token] if 0 <= token < len(words) else ""
    folder = Path(settings.policy.checkpoint) if settings is not None and settings.policy.checkpoint else None
    if folder is None:
        return None
    from tangram.rl.trajectories.tokenizer import TextCodec, has_tokenizer

    try:
        return TextCodec(folder).decode_token if has_tokenizer(folder) else None
    except InvalidConfig:
        return None


def print_trajectory(trajectory: Trajectory, text_of: TextOf | None) -> None:
    """Print a trajectory; without `text_of`, tokens are shown by id."""
    console = terminal.stdout_console()
    row = TrajectoryRow.from_trajectory(trajectory)
    cause = f": {truncate(trajectory.cause, LINE_WIDTH)}" if trajectory.cause else ""
    terminal.print_plain(console, f"{escape_unprintable(trajectory.id)}  {trajectory.ending}{cause}")
    terminal.print_plain(
        console,
        f"reward {number(trajectory.reward)}, {pluralize(row.turns, 'turn')}, {pluralize(row.tokens, 'token')} decoded,"
        f" versions {_versions(row.versions)}, seed {trajectory.seed}, from {trajectory.began_s:.3f} s to"
        f" {trajectory.ended_s:.3f} s",
    )
    if trajectory.metrics:
        named = (f"{truncate(name, NAME_WIDTH)} {number(value)}" for name, value in trajectory.metrics.items())
        terminal.print_plain(console, f"metrics: {', '.join(named)}")
    for place, turn in enumerate(trajectory.turns):
        _print_turn(console, place, turn, text_of)
    if trajectory.observation:
        terminal.print_plain(console, "\nlast observation")
        _print_text(console, trajectory.observation, "  < ")
    _print_spans(console, trajectory)


def _print_turn(console: Console, place: int, turn: Turn, text_of: TextOf | None) -> None:
    engine = f" by {truncate(turn.engine, NAME_WIDTH)}" if turn.engine else ""
    observed = pluralize(len(turn.observation_tokens), "token")
    read = f"{observed} read ({turn.prefilled:,} by the engine, {elapsed(turn.prefill_s)})"
    decoded = f"{len(turn.tokens):,} decoded{engine} ({elapsed(turn.decode_s)})"
    terminal.print_plain(
        console, f"\nturn {place}: {read}, {decoded}" + (", cut at its limit" if turn.truncated else "")
    )
    _print_text(console, turn.observation, "  < ")
    _print_text(console, turn.action, "  > ")
    shown = turn.tokens[:TOKENS_MAX]
    if not shown:
        return
    from rich.padding import Padding

    table = terminal.table("")
    table.title = None
    text_head = ["text"] if text_of is not None else []
    candidates = turn.candidate_token_ids
    for head in ("token", *text_head, "log-prob", "prob", "version", *(["among"] if candidates is not None else [])):
        table.add_column(head, justify="left" if head == "text" else "right", no_wrap=True)
    for at, token in enumerate(shown):
        logprob = turn.logprobs[at]
        kept = [f"{len(candidates[at]):,}"] if candidates is not None else []
        probability = f"{math.exp(min(0.0, logprob)):.3f}"
        version = str(turn.versions[at])
        text = [truncate(text_of(token), NAME_WIDTH)] if text_of is not None else []
        table.add_row(str(token), *text, f"{logprob:.4f}", probability, version, *kept)
    terminal.print_plain(console, Padding(table, (0, 0, 0, 4)))
    if len(turn.tokens) > len(shown):
        terminal.print_plain(
            console, f"    and {pluralize(len(turn.tokens) - len(shown), 'token')} more; --json prints all"
        )


def _print_text(console: Console, text: str, mark: str) -> None:
    for line in truncate_lines(text, LINES_MAX, LINE_WIDTH):
        terminal.print_plain(console, f"{mark}{line}")


def _print_spans(console: Console, trajectory: Trajectory) -> None:
    if not trajectory.spans:
        return
    heads = ("stage", "began", "took", "waiting", "waited for", "try", "failed")
    table = terminal.table("spans", *heads, right=("began", "took", "waiting", "try"))
    for span in trajectory.spans:
        times = (f"{span.began_s:.3f} s", elapsed(span.ended_s - span.began_s), elapsed(span.waiting_s))
        waited = truncate(span.waited_for, NAME_WIDTH) if span.waiting_s else ""
        table.add_row(span.stage.value, *times, waited, str(span.attempt + 1), truncate(span.failed, CAUSE_WIDTH))
    terminal.print_plain(console, table)


# ---- the timeline -----------------------------------------------------------------------------------------------


def timeline_as_dict(timeline: RolloutTimeline) -> dict[str, Any]:
    return {
        "total_s": seconds_of(timeline.total),
        "trajectories": len(timeline.lanes),
        "stages": {stage.value: _stage_as_dict(each) for stage, each in timeline.stages.items()},
        "tasks": {
            each.task: {
                "trajectories": each.trajectories,
                "total_s": seconds_of(each.total),
                "parts_s": _parts_as_dict(each.parts),
                "shares": each.shares(),
            }
            for each in timeline.tasks
        },
    }


def _stage_as_dict(each: StageTime) -> dict[str, Any]:
    return {
        "busy_s": seconds_of(each.busy),
        "busy_share": each.busy_share,
        "working_s": seconds_of(each.working),
        "waiting_s": seconds_of(each.waiting),
        "idle_s": _parts_as_dict(each.idle),
        "idle_by_party_s": _parties_as_dict(each.idle),
        "gaps": [
            {"began_s": seconds_of(gap.began), "ended_s": seconds_of(gap.ended), "causes_s": _parts_as_dict(gap.causes)}
            for gap in each.gaps
        ],
    }


def _parts_as_dict(parts: Mapping[Activity, int]) -> dict[str, float]:
    return {words: seconds_of(part) for words, part in time_by_label(parts).items()}


def _parties_as_dict(parts: Mapping[Activity, int]) -> dict[str, float]:
    causes: Counter[str] = Counter()
    for activity, part in parts.items():
        causes[activity.component] += part
    return {party: seconds_of(part) for party, part in causes.items()}


def print_timeline(file: Path, timeline: RolloutTimeline) -> None:
    from tangram.rl.observe.timeline_page import headline

    console = terminal.stdout_console()
    terminal.print_plain(
        console,
        f"{escape_unprintable(file.name)}: {_count_text(len(timeline.lanes), len(timeline.lanes))}"
        f" in {elapsed(seconds_of(timeline.total))}",
    )
    if not timeline.total:
        return
    terminal.print_plain(console, headline(timeline.stages[Stage.GENERATE]))
    _print_stages(console, timeline)
    _print_gaps(console, timeline)
    table = terminal.table("where the time of trajectories went")
    table.add_column("task", no_wrap=True)
    table.add_column("trajectories", justify="right")
    table.add_column("time in all", justify="right")
    table.add_column("shares")
    for each in timeline.tasks:
        time = elapsed(seconds_of(each.total))
        table.add_row(
            truncate(each.task, NAME_WIDTH), f"{each.trajectories:,}", time, largest_shares(each.parts, each.total, 12)
        )
    terminal.print_plain(console, table)


def _print_stages(console: Console, timeline: RolloutTimeline) -> None:
    unicode = terminal.is_unicode(console)
    wide = max(20, min(BINS, console.width - 24))
    rows = {stage: _busy_shares(each, wide) for stage, each in timeline.stages.items()}
    terminal.print_plain(console, f"\n{'':10}0 s{elapsed(seconds_of(timeline.total)):>{wide - 3}}")
    for stage, each in timeline.stages.items():
        levels = terminal.level_row(rows[stage], unicode=unicode)
        terminal.print_plain(console, f"{stage.value:<10}{levels}  {each.busy_share:4.0%} busy")
    causes = _cause_letters(timeline.stages[Stage.GENERATE], wide)
    terminal.print_plain(console, f"{'':10}{causes}")
    letters = "e environment, g engine, r reward, b buffer, w waiting, - between stages, . start or end"
    terminal.print_plain(console, f"the last row shows why no engine was decoding: {letters}")
    title = "why each stage was idle, as shares of the total time"
    table = terminal.table(title, "stage", "busy", "idle", "causes", right=("busy", "idle"))
    for stage, each in timeline.stages.items():
        idle = 1.0 - each.busy_share
        table.add_row(
            stage.value, percent(each.busy_share), percent(idle), largest_shares(each.idle, each.total, CAUSES_MAX)
        )
    terminal.print_plain(console, table)


def _print_gaps(console: Console, timeline: RolloutTimeline) -> None:
    gaps = timeline.stages[Stage.GENERATE].gaps
    if not gaps:
        return
    title = f"the longest of {len(gaps):,} gaps in which no engine was decoding"
    table = terminal.table(title, "since", "length", "causes", "longest under way", right=("since", "length"))
    for gap in sorted(gaps, key=lambda gap: (-gap.length, gap.began))[:GAPS_MAX]:
        explainers = ", ".join(truncate(name, NAME_WIDTH) for name, _, _ in timeline.explainers(gap))
        times = (f"{seconds_of(gap.began):.3f} s", elapsed(seconds_of(gap.length)))
        table.add_row(*times, largest_shares(gap.causes, gap.length, CAUSES_MAX), explainers or "-")
    terminal.print_plain(console, table)


def _busy_shares(stage: StageTime, wide: int) -> list[float]:
    """The busy share of each of `wide` equal stretches."""
    idle, total = [0] * wide, [0] * wide
    for place, part in _spread(0, stage.total, stage.total, wide):
        total[place] = part
    for gap in stage.gaps:
        for place, part in _spread(gap.began, gap.ended, stage.total, wide):
            idle[place] += part
    return [1.0 - part / of if of else 0.0 for part, of in zip(idle, total, strict=True)]


def _cause_letters(stage: StageTime, wide: int) -> str:
    """For each stretch that is mostly idle, the letter of its main cause."""
    letters: list[Counter[str]] = [Counter() for _ in range(wide)]
    for since, until, main in stage.main_causes:
        for place, part in _spread(since, until, stage.total, wide):
            letters[place][_letter(main)] += part
    half = stage.total / wide / 2
    return "".join(max(each, key=lambda letter: each[letter]) if each.total() > half else " " for each in letters)


def _letter(activity: Activity) -> str:
    return "w" if activity.kind is ActivityKind.WAITING else LETTERS[activity.component]


def _spread(began: int, ended: int, total: int, wide: int) -> Iterable[tuple[int, int]]:
    """Yields (number, length): how much of a stretch is in each of `wide` equal ones."""
    for place in range(began * wide // total, min(wide, -(-ended * wide // total))):
        low, high = place * total // wide, (place + 1) * total // wide
        yield place, max(0, min(ended, high) - max(began, low))


# ---- replays ----------------------------------------------------------------------------------------------------


def print_replays(results: Sequence[ReplayResult]) -> None:
    console = terminal.stdout_console()
    turns = sum(each.turns for each in results)
    same = sum(each.is_same for each in results)
    if same == len(results):
        terminal.print_plain(console, f"the same: {_count_text(same, same)} with {pluralize(turns, 'action')}")
    else:
        terminal.print_plain(
            console, f"different: {len(results) - same:,} of {_count_text(len(results), len(results))}"
        )
    shown = 0
    for each in results:
        for difference in each.differences:
            if (shown := shown + 1) > DIFFERENCES_MAX:
                continue
            terminal.print_plain(
                console, f"{truncate(each.id, NAME_WIDTH)}, turn {difference.turn}: different {difference.what}"
            )
            terminal.print_plain(console, f"  recorded  {truncate(difference.recorded, LINE_WIDTH) or 'nothing'}")
            terminal.print_plain(console, f"  replayed  {truncate(difference.replayed, LINE_WIDTH) or 'nothing'}")
        if each.failed:
            terminal.print_plain(
                console, f"{truncate(each.id, NAME_WIDTH)}: could not be played: {truncate(each.failed, LINE_WIDTH)}"
            )
    if shown > DIFFERENCES_MAX:
        terminal.print_plain(console, f"and {shown - DIFFERENCES_MAX:,} more differences; --json prints all")
    for words, count in Counter(each.not_compared for each in results if each.not_compared).items():
        terminal.print_plain(console, f"not compared in {_count_text(count, count)}: {words}")
