"""The screen of a training run: what is known of it, as rows of a terminal or as one line of a log.

Owns the look. Asks nobody and keeps nothing. Promises that it fits: every row into the width, all of them into the
height, with `and 3 more` for what is left out; and that whatever a task, a pool or an engine is called, it cannot steer
the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tangram.reports.printable import plain
from tangram.rl.observe.rollout_progress import duration
from tangram.rl.observe.training_progress import ENDED, STARTING, TRAINING, WARMING, TaskSoFar, TrainingSoFar
from tangram.rl.train.records import Noticed

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

SPARKS, PLAIN_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
BAR_WIDTH = 24
NAME_WIDTH = 16
SPARK_MIN, SPARK_MAX = 8, 64
BESIDE_SPARK = 67
"""Columns of a task's row besides its sparks."""
NOTICED_SHOWN = 4
WHY = {"steps": "all are made", "seconds": "its time is over"}
"""It ended, in words."""
AGES_SHOWN = 6
"""Of the staleness; older ones are counted together."""


# ---- in one line ----------------------------------------------------------------------------------------------------


def line(run: TrainingSoFar, stages: dict[str, int], elapsed_s: float) -> str:
    parts = [f"{run.phase}: {_where(run)}"]
    rewards = [f"{plain(name)} {_number(_reward(task))}" for name, task in run.tasks.items()]
    parts += [f"reward {', '.join(rewards)}"] if rewards and run.phase != STARTING else []
    held_out = [
        f"{plain(name)} {_number(task.held_out)}" for name, task in run.tasks.items() if task.held_out is not None
    ]
    parts += [f"held out {', '.join(held_out)}"] if held_out else []
    if run.last is not None and run.phase != ENDED:
        parts += [_rates(run), _split(run), _ages(run), _groups(run)]
    if stages and run.phase != ENDED:
        parts.append(f"now in {_counts(stages)}")
    return "; ".join([*parts, _time(run, elapsed_s)])


def noticed(line: Noticed) -> str:
    return f"after {duration(line.at_s)}: {plain(line.kind)}: {plain(line.text)}"


# ---- on a terminal --------------------------------------------------------------------------------------------------


def screen(
    run: TrainingSoFar, stages: dict[str, int], elapsed_s: float, width: int, height: int, *, fancy: bool = True
) -> RenderableType:
    from rich.console import Group as Rows

    head = _head(run, stages, elapsed_s, width, fancy)[: max(1, height - 1)]
    sections = [_tasks(run, width, fancy), _pools(run), _engines(run), _noticed(run)]
    return Rows(*head, *_fitting(sections, height - 1 - len(head)))


def _fitting(sections: Sequence[list[Text]], room: int) -> list[Text]:
    """Of each section its first row, which is its head, and as many of the others as there is room for."""
    kept = [len(rows) for rows in sections]
    while sum(kept) > max(0, room) and any(kept):
        longest = max(range(len(kept)), key=lambda each: (kept[each], each))
        kept[longest] = kept[longest] - 1 if kept[longest] > 2 else 0  # a head alone says nothing
    found: list[Text] = []
    for rows, count in zip(sections, kept, strict=True):
        found += rows[:count]
        if 2 <= count < len(rows):
            found[-1] = _row(f"  and {len(rows) - count + 1:,} more", style="dim")
    return found


def _head(run: TrainingSoFar, stages: dict[str, int], elapsed_s: float, width: int, fancy: bool) -> list[Text]:
    from rich.text import Text

    bar_width = BAR_WIDTH if width >= 100 else BAR_WIDTH // 2
    full = round(bar_width * _share(run))
    mark = "━" if fancy else "-"
    # The mark of what is left is another one where there are no colours to tell them apart.
    bar = ((mark * full, "green"), ((mark if fancy else ".") * (bar_width - full), "dim"))
    title = Text.assemble((f"{run.phase} ", "bold"), *bar, f" {_where(run)}  {_time(run, elapsed_s)}")
    title.no_wrap, title.overflow = True, "ellipsis"
    rows = [title]
    if run.last is None:
        return [*rows, _row(f"{plain(run.mode)}, α {run.alpha}")]
    rows.append(_row(f"{plain(run.mode)}, α {run.alpha}   {_rates(run)}   {_split(run)}"))
    rows.append(_row(f"staleness  {_histogram(run.staleness(), fancy)}"))
    rows.append(_row(f"groups     {_groups(run)}"))
    if stages:
        rows.append(_row(f"now        {_counts(stages)}"))
    return rows


def _tasks(run: TrainingSoFar, width: int, fancy: bool) -> list[Text]:
    sparks = min(SPARK_MAX, max(SPARK_MIN, width - BESIDE_SPARK))
    reward = "reward" if run.phase in (TRAINING, ENDED) else "warm"
    head = f"{_cell('task', NAME_WIDTH)} {reward:>6}  {'last steps':<{sparks}}  {'held out':<25} groups/s"
    rows = [_row(head, style="bold")]
    for name, task in run.tasks.items():
        groups = run.per_s(lambda step, name=name: step.tasks[name].groups if name in step.tasks else 0)  # type: ignore[misc]
        rate = f"{groups:.2g}" if groups else "-"
        drawn = _cell(sparkline(list(task.rewards)[-sparks:], fancy), sparks)
        rows.append(
            _row(f"{_cell(name, NAME_WIDTH)} {_number(_reward(task)):>6}  {drawn}  {_held_out(task):<25} {rate:>8}")
        )
    return rows if len(rows) > 1 else []


def _held_out(task: TaskSoFar) -> str:
    if task.held_out is None:
        return "-"
    spread = f" ±{task.spread:.2g}" if math.isfinite(task.spread) else ""
    first = "" if task.held_out_first in (None, task.held_out) else f", first {_number(task.held_out_first)}"
    return f"{_number(task.held_out)}{spread}{first}"


def _pools(run: TrainingSoFar) -> list[Text]:
    if run.last is None or not run.last.pools:
        return []
    rows = [
        _row(
            f"{_cell('pool', NAME_WIDTH)} {'ACT mean':>9} {'p99':>9}  {'in use':>7} {'of':>7} {'waiting':>8}",
            style="bold",
        )
    ]
    for pool in run.last.pools:
        used = pool.held_unit_s / (pool.total * run.last.step_s) if pool.total > 0 and run.last.step_s > 0 else 0.0
        act = (seconds(pool.act_mean_s), seconds(pool.act_p99_s)) if pool.actions else ("-", "-")
        rows.append(
            _row(
                f"{_cell(pool.name, NAME_WIDTH)} {act[0]:>9} {act[1]:>9}  {used:>7.0%} {pool.total:>7g}"
                f" {pool.waiting or '-':>8}",
                style="yellow" if pool.waiting else "",
            )
        )
    return rows


def _engines(run: TrainingSoFar) -> list[Text]:
    if run.last is None or not run.last.engines:
        return []
    rows = [_row(f"{_cell('engine', NAME_WIDTH)} {'version':>7} {'busy':>6} {'read':>9} {'wrote':>9}", style="bold")]
    rows += [
        _row(
            f"{_cell(engine.name, NAME_WIDTH)} {engine.version:>7} {engine.busy_share:>6.0%}"
            f" {engine.prefill_tokens:>9,} {engine.decode_tokens:>9,}",
            style="yellow" if engine.version + run.alpha < run.step else "",
        )
        for engine in run.last.engines
    ]
    return rows


def _noticed(run: TrainingSoFar) -> list[Text]:
    if not run.noticed:
        return []
    last = list(run.noticed)[-NOTICED_SHOWN:]
    return [_row("noticed", style="bold"), *(_row(f"  {noticed(each)}", style="yellow") for each in reversed(last))]


# ---- words ----------------------------------------------------------------------------------------------------------


def _share(run: TrainingSoFar) -> float:
    steps, warm = run.settings.training.steps, run.settings.warm_start.steps_max
    if run.phase == STARTING:
        return min(1.0, max(0.0, run.share))
    if run.phase == WARMING:
        return min(1.0, run.warm.step / warm) if run.warm is not None else 0.0
    return min(1.0, run.step / steps)


def _where(run: TrainingSoFar) -> str:
    if run.phase == STARTING:
        return plain(run.doing) or "what it needs is made ready"
    if run.phase == WARMING and run.warm is None:
        return plain(run.doing) or "what is to be imitated is made ready"
    if run.phase == WARMING and run.warm is not None:
        return f"step {run.warm.step:,} of at most {run.settings.warm_start.steps_max:,}, loss {_number(run.warm.loss)}"
    cause = f" ({WHY.get(run.over.cause) or plain(run.over.cause)})" if run.over is not None else ""
    return f"step {run.step:,} of {run.settings.training.steps:,}{cause}"


def _time(run: TrainingSoFar, elapsed_s: float) -> str:
    left = run.left_s()
    about = f", about {duration(left)} left" if left else ""
    return f"{duration(max(0.0, elapsed_s))} so far{about}"


def _rates(run: TrainingSoFar) -> str:
    trajectories = run.per_s(lambda step: sum(step.staleness))
    tokens = run.per_s(lambda step: step.metrics.get("tokens", 0.0))
    return f"{trajectories:,.3g} trajectories/s, {tokens:,.0f} tokens/s"


def _split(run: TrainingSoFar) -> str:
    """Where the time of the last steps went."""
    whole = run.seconds("step_s")
    if whole <= 0:
        return "no time yet"
    return f"wait {run.seconds('wait_s') / whole:.0%}, train {run.seconds('train_s') / whole:.0%}"


def _ages(run: TrainingSoFar) -> str:
    counts = run.staleness()
    total = sum(counts)
    mean = sum(age * count for age, count in enumerate(counts)) / total if total else 0.0
    oldest = max((age for age, count in enumerate(counts) if count), default=0)
    return f"staleness {mean:.2g}, at most {oldest} (α {run.alpha})"


def _histogram(counts: Sequence[int], fancy: bool) -> str:
    total = sum(counts)
    if not total:
        return "-"
    shown = [*counts[:AGES_SHOWN]]
    rows = [f"{age} {_bar(count / total, fancy)}{count / total:.0%}" for age, count in enumerate(shown)]
    older = sum(counts[AGES_SHOWN:])
    return "  ".join(rows + ([f"older {older / total:.0%}"] if older else []))


def _bar(share: float, fancy: bool) -> str:
    cells = ("█" if fancy else "#") * round(8 * share)
    return f"{cells} " if cells else ""


def _groups(run: TrainingSoFar) -> str:
    last = run.last
    assert last is not None
    causes = ", ".join(f"{count:,} {plain(cause)}" for cause, count in sorted(run.dropped.items()) if count)
    dropped = f", dropped so far: {causes}" if causes else ""
    aborted = f", {run.aborted:,} trajectories stopped as stale" if run.aborted else ""
    return f"after step {last.step:,}: {last.in_flight:,} in play, {last.buffered:,} in the buffer{dropped}{aborted}"


def _counts(stages: dict[str, int]) -> str:
    return ", ".join(f"{plain(name)} {count:,}" for name, count in sorted(stages.items(), key=lambda each: -each[1]))


def _reward(task: TaskSoFar) -> float | None:
    return task.rewards[-1] if task.rewards else task.warm


def sparkline(values: Sequence[float], fancy: bool = True) -> str:
    """From the lowest of them to the highest, at least from 0 to 1 as most rewards go."""
    if not values:
        return ""
    marks = SPARKS if fancy else PLAIN_SPARKS
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(marks[min(len(marks) - 1, int((value - low) / (high - low) * len(marks)))] for value in values)


def seconds(value: float) -> str:
    """Three digits that matter."""
    if value >= 99.95:
        return duration(value)
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1000.0:.3g} ms"


def _number(value: float | None) -> str:
    """Of the same width, as far as it can be."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 100.0 else f"{value:.4g}"


def _cell(text: str, width: int) -> str:
    """Filled up or cut to so many columns of a terminal."""
    from rich.cells import cell_len, set_cell_size

    shown = plain(text)
    return set_cell_size(shown, width) if cell_len(shown) <= width else set_cell_size(shown, width - 1) + "…"


def _row(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
