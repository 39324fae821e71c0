"""Formats a training run for a terminal: rows of a screen, or one line of a log.

Stateless. Promises that rows fit the width and the height of the screen, with `and 3 more` for the others, and that
names are printed as text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.reports.formatting import duration, elapsed
from tangram.reports.printable import escape_unprintable
from tangram.reports.terminal import ScreenColumns, bar, progress_bar, row, sparkline
from tangram.rl.observe.training_status import (
    ENDED,
    STARTING,
    TRAINING,
    WARMING,
    TrainingStatus,
    TrainingTaskProgress,
)
from tangram.rl.runs.metrics_lines import Noticed

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BAR_WIDTH = 24
NAME_WIDTH = 16
SPARK_MIN, SPARK_MAX = 10, 64
BESIDE_SPARK = 67
"""Columns of the row of a task without its sparkline."""
NOTICED_SHOWN = 4
CAUSE_TEXT = {"steps": "all are made", "seconds": "its time is over"}
"""The cause of an end as text."""
AGES_SHOWN = 6
"""Ages of the staleness histogram; older ones are one."""


# ---- in one line ----------------------------------------------------------------------------------------------------


def status_line(run: TrainingStatus, stages: dict[str, int], elapsed_s: float) -> str:
    parts = [f"{run.phase}: {_phase_text(run)}"]
    rewards = [f"{escape_unprintable(name)} {_number(_reward(task))}" for name, task in run.tasks.items()]
    parts += [f"reward {', '.join(rewards)}"] if rewards and run.phase != STARTING else []
    held_out = [
        f"{escape_unprintable(name)} {_number(task.held_out)}"
        for name, task in run.tasks.items()
        if task.held_out is not None
    ]
    parts += [f"held out {', '.join(held_out)}"] if held_out else []
    if run.last is not None and run.phase != ENDED:
        parts += [_rates(run), _time_split(run), _ages(run), _groups(run)]
    if stages and run.phase != ENDED:
        parts.append(f"now in {_counts(stages)}")
    return "; ".join([*parts, _time(run, elapsed_s)])


def notice_text(line: Noticed) -> str:
    return f"after {duration(line.at_s)}: {escape_unprintable(line.kind)}: {escape_unprintable(line.text)}"


# ---- on a terminal --------------------------------------------------------------------------------------------------


def screen(
    run: TrainingStatus, stages: dict[str, int], elapsed_s: float, width: int, height: int, *, unicode: bool = True
) -> RenderableType:
    from rich.console import Group as Rows

    head = _head(run, stages, elapsed_s, width, unicode)[: max(1, height - 1)]
    sections = [_tasks(run, width, unicode), _pools(run), _engines(run), _noticed(run)]
    return Rows(*head, *_fit_sections(sections, height - 1 - len(head)))


def _fit_sections(sections: Sequence[list[Text]], room: int) -> list[Text]:
    """The head of each section and as many of its rows as there is room for."""
    kept = [len(rows) for rows in sections]
    while sum(kept) > max(0, room) and any(kept):
        longest = max(range(len(kept)), key=lambda each: (kept[each], each))
        kept[longest] = kept[longest] - 1 if kept[longest] > 2 else 0  # a head without rows is useless
    lines: list[Text] = []
    for rows, count in zip(sections, kept, strict=True):
        lines += rows[:count]
        if 2 <= count < len(rows):
            lines[-1] = row(f"  and {len(rows) - count + 1:,} more", style="dim")
    return lines


def _head(run: TrainingStatus, stages: dict[str, int], elapsed_s: float, width: int, unicode: bool) -> list[Text]:
    from rich.text import Text

    bar_width = BAR_WIDTH if width >= 100 else BAR_WIDTH // 2
    progress = progress_bar(_share(run), bar_width, unicode=unicode)
    title = Text.assemble((f"{run.phase} ", "bold"), *progress, f" {_phase_text(run)}  {_time(run, elapsed_s)}")
    title.no_wrap, title.overflow = True, "ellipsis"
    rows = [title]
    if run.last is None:
        return [*rows, row(f"{escape_unprintable(run.mode)}, α {run.staleness_bound}")]
    rows.append(row(f"{escape_unprintable(run.mode)}, α {run.staleness_bound}   {_rates(run)}   {_time_split(run)}"))
    rows.append(row(f"staleness  {_histogram(run.staleness(), unicode)}"))
    rows.append(row(f"groups     {_groups(run)}"))
    if stages:
        rows.append(row(f"now        {_counts(stages)}"))
    return rows


def _tasks(run: TrainingStatus, width: int, unicode: bool) -> list[Text]:
    sparks = min(SPARK_MAX, max(SPARK_MIN, width - BESIDE_SPARK))
    reward = "reward" if run.phase in (TRAINING, ENDED) else "warm"
    columns = ScreenColumns(
        ("task", NAME_WIDTH), (reward, -6), ("last steps", sparks), ("held out", 25), ("groups/s", -8)
    )
    rows = [columns.head()]
    for name, task in run.tasks.items():
        groups = run.per_s(lambda step, name=name: step.tasks[name].groups if name in step.tasks else 0)  # type: ignore[misc]
        rate = f"{groups:.2g}" if groups else "-"
        drawn = sparkline(list(task.rewards)[-sparks:], unicode)
        rows.append(columns.row(name, _number(_reward(task)), drawn, _held_out(task), rate))
    return rows if len(rows) > 1 else []


def _held_out(task: TrainingTaskProgress) -> str:
    if task.held_out is None:
        return "-"
    spread = f" ±{task.spread:.2g}" if math.isfinite(task.spread) else ""
    first = "" if task.held_out_first in (None, task.held_out) else f", first {_number(task.held_out_first)}"
    return f"{_number(task.held_out)}{spread}{first}"


def _pools(run: TrainingStatus) -> list[Text]:
    if run.last is None or not run.last.pools:
        return []
    columns = ScreenColumns(
        ("pool", NAME_WIDTH), ("ACT mean", -9), ("p99", -9), ("in use", -8), ("of", -7), ("waiting", -8)
    )
    rows = [columns.head()]
    for pool in run.last.pools:
        used = pool.held_unit_s / (pool.total * run.last.step_s) if pool.total > 0 and run.last.step_s > 0 else 0.0
        act = (elapsed(pool.act_mean_s), elapsed(pool.act_p99_s)) if pool.actions else ("-", "-")
        values = (*act, f"{used:.0%}", f"{pool.total:g}", pool.waiting or "-")
        rows.append(columns.row(pool.name, *values, style="yellow" if pool.waiting else ""))
    return rows


def _engines(run: TrainingStatus) -> list[Text]:
    if run.last is None or not run.last.engines:
        return []
    columns = ScreenColumns(("engine", NAME_WIDTH), ("version", -7), ("busy", -6), ("read", -9), ("wrote", -9))
    rows = [columns.head()]
    for engine in run.last.engines:
        tokens = (f"{engine.prefill_tokens:,}", f"{engine.decode_tokens:,}")
        stale = engine.version + run.staleness_bound < run.step
        style = "yellow" if stale else ""
        rows.append(columns.row(engine.name, engine.version, f"{engine.busy_share:.0%}", *tokens, style=style))
    return rows


def _noticed(run: TrainingStatus) -> list[Text]:
    if not run.noticed:
        return []
    last = list(run.noticed)[-NOTICED_SHOWN:]
    return [row("noticed", style="bold"), *(row(f"  {notice_text(each)}", style="yellow") for each in reversed(last))]


# ---- words ----------------------------------------------------------------------------------------------------------


def _share(run: TrainingStatus) -> float:
    steps, warm = run.settings.training.steps, run.settings.warm_start.steps_max
    if run.phase == STARTING:
        return min(1.0, max(0.0, run.startup_share))
    if run.phase == WARMING:
        return min(1.0, run.warm.step / warm) if run.warm is not None else 0.0
    return min(1.0, run.step / steps)


def _phase_text(run: TrainingStatus) -> str:
    if run.phase == STARTING:
        return escape_unprintable(run.startup_text) or "what it needs is made ready"
    if run.phase == WARMING and run.warm is None:
        return escape_unprintable(run.startup_text) or "what is to be imitated is made ready"
    if run.phase == WARMING and run.warm is not None:
        return f"step {run.warm.step:,} of at most {run.settings.warm_start.steps_max:,}, loss {_number(run.warm.loss)}"
    cause = f" ({CAUSE_TEXT.get(run.end.cause) or escape_unprintable(run.end.cause)})" if run.end is not None else ""
    return f"step {run.step:,} of {run.settings.training.steps:,}{cause}"


def _time(run: TrainingStatus, elapsed_s: float) -> str:
    left = run.remaining_s()
    about = f", about {duration(left)} left" if left else ""
    return f"{duration(max(0.0, elapsed_s))} so far{about}"


def _rates(run: TrainingStatus) -> str:
    trajectories = run.per_s(lambda step: sum(step.staleness))
    tokens = run.per_s(lambda step: step.metrics.get("tokens", 0.0))
    return f"{trajectories:,.3g} trajectories/s, {tokens:,.0f} tokens/s"


def _time_split(run: TrainingStatus) -> str:
    """The shares of waiting and training in the last steps."""
    total_s = run.seconds("step_s")
    if total_s <= 0:
        return "no time yet"
    return f"wait {run.seconds('wait_s') / total_s:.0%}, train {run.seconds('train_s') / total_s:.0%}"


def _ages(run: TrainingStatus) -> str:
    counts = run.staleness()
    total = sum(counts)
    mean = sum(age * count for age, count in enumerate(counts)) / total if total else 0.0
    oldest = max((age for age, count in enumerate(counts) if count), default=0)
    return f"staleness {mean:.2g}, at most {oldest} (α {run.staleness_bound})"


def _histogram(counts: Sequence[int], unicode: bool) -> str:
    total = sum(counts)
    if not total:
        return "-"
    shown = [*counts[:AGES_SHOWN]]
    rows = [f"{age} {_bar(count / total, unicode)}{count / total:.0%}" for age, count in enumerate(shown)]
    older = sum(counts[AGES_SHOWN:])
    return "  ".join(rows + ([f"older {older / total:.0%}"] if older else []))


def _bar(share: float, unicode: bool) -> str:
    cells = bar(round(8 * share) / 8, 8, unicode=unicode)
    return f"{cells} " if cells else ""


def _groups(run: TrainingStatus) -> str:
    last = run.last
    assert last is not None
    causes = ", ".join(
        f"{count:,} {escape_unprintable(cause)}" for cause, count in sorted(run.dropped.items()) if count
    )
    dropped = f", dropped so far: {causes}" if causes else ""
    aborted = f", {run.aborted:,} trajectories stopped as stale" if run.aborted else ""
    return f"after step {last.step:,}: {last.in_flight:,} in flight, {last.buffered:,} in the buffer{dropped}{aborted}"


def _counts(stages: dict[str, int]) -> str:
    return ", ".join(
        f"{escape_unprintable(name)} {count:,}" for name, count in sorted(stages.items(), key=lambda each: -each[1])
    )


def _reward(task: TrainingTaskProgress) -> float | None:
    return task.rewards[-1] if task.rewards else task.warm


def _number(value: float | None) -> str:
    """A number with three decimals, or four significant digits if it is large."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 100.0 else f"{value:.4g}"
