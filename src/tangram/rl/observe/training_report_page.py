"""The page of a training run: what was learned, how long it took, and where the time and the pools went.

Owns what the page says and in which order. Whatever a task, a pool or a cause is called, it is text. Promises the same
bytes for the same lines, and a page that says what there is, whatever is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from tangram.reports.formatting import percent, seconds, several
from tangram.reports.page import card, page, prose, section
from tangram.rl.observe import training_report_sections as sections
from tangram.rl.observe.training_report_charts import AXES, CHARTS_MAX, Charts, name_of
from tangram.rl.observe.training_report_markup import chart_figure, duration, table
from tangram.rl.observe.training_report_run import FINAL_EVALUATIONS, FINAL_SHARE, Run, Score
from tangram.rl.observe.training_report_script import SCRIPT, STYLE
from tangram.rl.observe.training_report_sections import Played

TASKS_IN_HEADLINE = 4


def report_page(run: Run, folder: Path, played: Played | None = None) -> str:
    charts = Charts(run)
    scores = [run.score(task) for task in run.tasks]
    labels = ["training", folder.name or str(folder), *([run.mode, run.alpha_words] if run.began else [])]
    body = [
        "".join(f'<span class="label">{escape(name_of(label))}</span>' for label in labels),
        f"<h1>{escape(headline(run, scores))}</h1>",
        f'<p class="lead">{prose(_lead(run))}</p>',
        _cards(run, scores),
        _axis_choice() if run.tasks else "",
        _learning(run, scores, charts),
    ]
    if run.steps:
        body += [
            sections.time_section(run, charts, played),
            sections.staleness_section(run, charts),
            sections.pools_section(run, charts),
            sections.trainer_section(charts),
            sections.discarded_section(run, charts),
        ]
    body += [sections.notices_section(run), sections.settings_section(run), sections.footer_section(folder)]
    # No text may end the element that it stands in.
    data = msgspec.json.encode(charts.content()).decode().replace("<", "\\u003c")
    body.append(f'<script type="application/json" id="report-data">{data}</script>')
    text = page(f"Tangram: {name_of(folder.name)}", f"<style>{STYLE}</style>" + "\n".join(filter(None, body)))
    return text.replace("</body>", f"<script>{SCRIPT}</script></body>")


# ---- the answer -------------------------------------------------------------------------------------------------


def headline(run: Run, scores: Sequence[Score]) -> str:
    if not run.lines:
        return "There is nothing of this run yet."
    failed = f"The run failed: {name_of(run.failed)}." if run.failed else ""
    if not run.steps:
        where = "in its warm start" if run.warm_over_s is None else "after its warm start, before its first step"
        if failed:
            return f"The run failed {where}: {name_of(run.failed)}."
        how = "ended" if run.over is not None else "is, or was stopped,"
        return f"The run {how} {where}."
    known = [score for score in scores if score.last is not None]
    told = ", ".join(f"{name_of(score.task)} {_change(score)}" for score in known[:TASKS_IN_HEADLINE])
    more = f" and {len(known) - TASKS_IN_HEADLINE} more" if len(known) > TASKS_IN_HEADLINE else ""
    kind = "Held-out scores" if any(score.held_out for score in known) else "Training rewards"
    result = f"{kind} in {duration(run.seconds)}: {told}{more}." if told else "No task has a reward."
    return f"{failed} {result}" if failed else result


def _change(score: Score) -> str:
    last = f"{score.last:.2f}"
    return f"{score.before:.2f}\u00a0→\u00a0{last}" if score.before is not None else last


def _lead(run: Run) -> str:
    told = [f"{several(len(run.tasks), 'task')} in mode {run.mode} with {run.alpha_words}:"] if run.began else []
    told.append(
        f"{several(len(run.steps), 'step')} on {several(run.trajectories_all, 'trajectory', 'trajectories')} in "
        f"{duration(run.seconds)}" + (f", of which {duration(run.warm_over_s)} warm start." if run.warm_over_s else ".")
    )
    if len(run.began) > 1:
        told.append(f"It was resumed {several(len(run.began) - 1, 'time')}; what was lost each time is not shown.")
    if run.over is None:
        told.append("It has no end yet: it goes on, or it was killed.")
    elif run.over.cause == "interrupted":
        told.append("It was interrupted.")
    return " ".join(told)


def _cards(run: Run, scores: Sequence[Score]) -> str:
    found = []
    for score in scores[:TASKS_IN_HEADLINE]:
        if score.last is None:
            continue
        kind = "held-out" if score.held_out else "training"
        error = f" ± {score.error:.2f}" if score.error is not None else ""
        when = f"there after {duration(score.reached.at_s)}" if score.reached else ""
        before = f"{score.before:.2f} before" if score.before is not None else ""
        found.append(
            card(f"{score.last:.2f}{error}", f"{name_of(score.task)}, {kind}", ", ".join(filter(None, (before, when))))
        )
    if run.steps:
        step_s = sum(line.step_s for line in run.steps) / len(run.steps)
        waits = sum(line.wait_s for line in run.steps) / max(sum(line.step_s for line in run.steps), 1e-9)
        found.append(card(seconds(step_s), "a step on average", f"{percent(waits)} of it waits for samples"))
    return f'<div class="cards">{"".join(found)}</div>' if found else ""


def _axis_choice() -> str:
    """One for all charts over time."""
    choices = "".join(
        f'<input type="radio" name="axis" id="axis-{name}" value="{name}"{" checked" if name == "step" else ""}>'
        f'<label for="axis-{name}">{escape(words)}</label>'
        for name, words in AXES.items()
    )
    return f'<fieldset class="axis-choice"><legend>Along</legend>{choices}</fieldset>'


def _learning(run: Run, scores: Sequence[Score], charts: Charts) -> str:
    if not run.tasks:
        return ""
    figures = "".join(chart_figure(charts.learning(task), name_of(task)) for task in run.tasks[:CHARTS_MAX])
    rows = [_score_row(score) for score in scores]
    heads = ("task", "warm start", "greedy", "first evaluation", "last", "± error", "episodes",
             f"mean of last {FINAL_EVALUATIONS}", "best", "reached after", "at step",
             "trajectories by then")  # fmt: skip
    held_out = any(score.held_out for score in scores)
    what = "held-out evaluations" if held_out else "smoothed training rewards, as there was no evaluation"
    told = f"Last, best and mean are of {what}; reached: at least {100 * FINAL_SHARE:.0f} % of the last."
    return section(
        "Learning curves",
        "Mean reward of each task: of the batches that were trained on, of seeds that are never trained on with their"
        " standard error, and of the warm start, which lies in the shaded part and is no reinforcement learning.",
        f'<div class="curves">{figures}</div>' + table(heads, rows) + f'<p class="say after">{prose(told)}</p>',
    )


def _score_row(score: Score) -> list[str]:
    reached = score.reached
    scores = (score.warm, score.greedy, score.first, score.last, score.error)
    return [
        name_of(score.task), *map(_score, scores),
        f"{score.episodes:,}" if score.episodes else "-", _score(score.mean_of_last), _score(score.best),
        duration(reached.at_s) if reached else "-", f"{reached.step:,}" if reached else "-",
        f"{reached.trajectories:,}" if reached else "-",
    ]  # fmt: skip


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
