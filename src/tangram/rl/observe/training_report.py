"""The report of a training run as a page: scores, duration, the time breakdown and the use of pools.

Owns the sections of the page, their text and their order. Promises a page for every run that has lines, however it
ended, and the same bytes for the same lines. If the trajectory log is missing, too long or damaged, only its section is
missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from tangram.errors import InvalidInput
from tangram.reports.formatting import elapsed, percent, pluralize, seconds
from tangram.reports.interactive import axis_choice, chart_figure, short_name
from tangram.reports.page import (
    card,
    cards,
    figures,
    folded,
    footer,
    opening,
    page,
    remark,
    section,
    share_bar,
    table,
    write_page,
)
from tangram.reports.printable import escape_unprintable
from tangram.rl.observe.run_history import (
    FINAL_EVALUATIONS,
    FINAL_SHARE,
    PoolTotals,
    RunHistory,
    TaskScore,
    step_time_parts,
    token_totals,
)
from tangram.rl.observe.timeline import RolloutTimeline, timeline_of_log
from tangram.rl.observe.timeline_page import headline as timeline_headline
from tangram.rl.observe.training_charts import AXES, CHARTS_MAX, MAIN_METRICS, MORE_METRICS, Charts
from tangram.rl.runs.metrics_lines import dropped_groups
from tangram.rl.runs.metrics_log import read_metrics
from tangram.rl.runs.run_folder import METRICS, REPORT
from tangram.rl.runs.trajectory_log import read
from tangram.rl.trajectories.trajectory import Stage

TRAJECTORIES = "trajectories.jsonl*"
"""The trajectory logs in the folder of a run."""
LOG_BYTES_MAX = 64 << 20
"""Longer trajectory logs are not read: it would delay the report too much. `tangram rl timeline` reads them."""
TASKS_IN_HEADLINE = 4
NOTICES_MAX = 200
SETTINGS_CHARACTERS_MAX = 100_000


class TrajectoryLogSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of a trajectory log, or the reason of its absence."""

    log: Path
    timeline: RolloutTimeline | None = None
    skip_reason: str = ""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of the run in `folder`, by default to its `report.html`, and return the path.

    Raises InvalidConfig if there is no run or the file cannot be written, InvalidTrace for malformed lines.
    """
    folder = Path(folder)
    path = Path(out) if out is not None else folder / REPORT
    run = RunHistory(read_metrics(folder / METRICS))
    write_page(path, report_page(run, folder, summarise_trajectory_logs(folder)))
    return path


def summarise_trajectory_logs(folder: Path) -> TrajectoryLogSummary | None:
    """Read the newest trajectory log of a run; None if there is none."""
    logs = sorted(each for each in folder.glob(TRAJECTORIES) if each.is_file() and not each.name.endswith(".partial"))
    if not logs:
        return None
    length = sum(each.stat().st_size for each in logs)
    if length > LOG_BYTES_MAX:
        return TrajectoryLogSummary(
            log=logs[-1], skip_reason=f"the logs have {length >> 20:,} MiB, more than the report reads"
        )
    try:
        return TrajectoryLogSummary(log=logs[-1], timeline=timeline_of_log(read(logs[-1])))
    except InvalidInput as error:
        return TrajectoryLogSummary(log=logs[-1], skip_reason=str(error))


def report_page(run: RunHistory, folder: Path, trajectories: TrajectoryLogSummary | None = None) -> str:
    charts = Charts(run)
    scores = [run.score(task) for task in run.tasks]
    labels = ["training", folder.name or str(folder), *([run.mode, run.staleness_bound_text] if run.began else [])]
    parts = [
        opening([short_name(label) for label in labels], headline(run, scores), _lead(run)),
        _cards(run, scores),
        axis_choice(AXES) if run.tasks else "",
        _learning(run, scores, charts),
    ]
    if run.steps:
        parts += [
            _time_section(run, charts, trajectories),
            _staleness_section(run, charts),
            _pools_section(run, charts),
            _trainer_section(charts),
            _discarded_section(run, charts),
        ]
    parts += [_notices_section(run), _settings_section(run), footer(_definitions(folder))]
    parts.append(charts.page.render())
    return page(f"Tangram: {short_name(folder.name)}", parts, widgets=["charts"])


# ---- the answer -------------------------------------------------------------------------------------------------


def headline(run: RunHistory, scores: Sequence[TaskScore]) -> str:
    if not run.lines:
        return "There is nothing of this run yet."
    failed = f"The run failed: {short_name(run.failure)}." if run.failure else ""
    if not run.steps:
        where = "in its warm start" if run.warm_start_end_s is None else "after its warm start, before its first step"
        if failed:
            return f"The run failed {where}: {short_name(run.failure)}."
        how = "ended" if run.end is not None else "is, or was stopped,"
        return f"The run {how} {where}."
    known = [score for score in scores if score.last is not None]
    parts = ", ".join(f"{short_name(score.task)} {_change(score)}" for score in known[:TASKS_IN_HEADLINE])
    more = f" and {len(known) - TASKS_IN_HEADLINE} more" if len(known) > TASKS_IN_HEADLINE else ""
    kind = "Held-out scores" if any(score.held_out for score in known) else "Training rewards"
    result = f"{kind} in {elapsed(run.seconds)}: {parts}{more}." if parts else "No task has a reward."
    return f"{failed} {result}" if failed else result


def _change(score: TaskScore) -> str:
    last = f"{score.last:.2f}"
    return f"{score.before:.2f}\u00a0→\u00a0{last}" if score.before is not None else last


def _lead(run: RunHistory) -> str:
    parts = (
        [f"{pluralize(len(run.tasks), 'task')} in mode {run.mode} with {run.staleness_bound_text}:"]
        if run.began
        else []
    )
    parts.append(
        f"{pluralize(len(run.steps), 'step')} on {pluralize(run.trajectories_total, 'trajectory', 'trajectories')} in "
        f"{elapsed(run.seconds)}"
        + (f", of which {elapsed(run.warm_start_end_s)} warm start." if run.warm_start_end_s else ".")
    )
    if len(run.began) > 1:
        parts.append(f"It was resumed {pluralize(len(run.began) - 1, 'time')}; what was lost each time is not shown.")
    if run.end is None:
        parts.append("It has not ended: it is running, or it was killed.")
    elif run.end.cause == "interrupted":
        parts.append("It was interrupted.")
    return " ".join(parts)


def _cards(run: RunHistory, scores: Sequence[TaskScore]) -> str:
    result = []
    for score in scores[:TASKS_IN_HEADLINE]:
        if score.last is None:
            continue
        kind = "held-out" if score.held_out else "training"
        error = f" ± {score.error:.2f}" if score.error is not None else ""
        reached_text = f"there after {elapsed(score.reached.at_s)}" if score.reached else ""
        before = f"{score.before:.2f} before" if score.before is not None else ""
        result.append(
            card(
                f"{score.last:.2f}{error}",
                f"{short_name(score.task)}, {kind}",
                ", ".join(filter(None, (before, reached_text))),
            )
        )
    if run.steps:
        step_s = sum(line.step_s for line in run.steps) / len(run.steps)
        waits = sum(line.wait_s for line in run.steps) / max(sum(line.step_s for line in run.steps), 1e-9)
        result.append(card(seconds(step_s), "a step on average", f"{percent(waits)} of it waits for samples"))
    return cards(result)


def _learning(run: RunHistory, scores: Sequence[TaskScore], charts: Charts) -> str:
    if not run.tasks:
        return ""
    panels = [chart_figure(charts.learning(task), short_name(task)) for task in run.tasks[:CHARTS_MAX]]
    rows = [_score_row(score) for score in scores]
    heads = ("task", "warm start", "greedy", "first evaluation", "last", "± error", "episodes",
             f"mean of last {FINAL_EVALUATIONS}", "best", "reached after", "at step",
             "trajectories by then")  # fmt: skip
    held_out = any(score.held_out for score in scores)
    source = "held-out evaluations" if held_out else "smoothed training rewards, as there was no evaluation"
    note = f"Last, best and mean are of {source}; reached: at least {100 * FINAL_SHARE:.0f} % of the last."
    return section(
        "Learning curves",
        "Mean reward of each task: of the batches that were trained on, of seeds that are never trained on with their"
        " standard error, and of the warm start, which is shaded and is no reinforcement learning.",
        figures(panels, "charts-wide") + table(heads, rows, wrap=True) + remark(note),
    )


def _score_row(score: TaskScore) -> list[str]:
    reached = score.reached
    scores = (score.warm, score.greedy, score.first, score.last, score.error)
    return [
        short_name(score.task), *map(_score, scores),
        f"{score.episodes:,}" if score.episodes else "-", _score(score.mean_of_last), _score(score.best),
        elapsed(reached.at_s) if reached else "-", f"{reached.step:,}" if reached else "-",
        f"{reached.trajectories:,}" if reached else "-",
    ]  # fmt: skip


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---- time -------------------------------------------------------------------------------------------------------


def _time_section(run: RunHistory, charts: Charts, trajectories: TrajectoryLogSummary | None) -> str:
    sums: dict[str, float] = {}
    for line in run.steps:
        for name, length in step_time_parts(line).items():
            sums[name] = sums.get(name, 0.0) + length
    total_s = sum(sums.values()) or 1.0
    rows = [[short_name(name), seconds(length), percent(length / total_s), seconds(length / len(run.steps))]
            for name, length in sorted(sums.items(), key=lambda part: -part[1])]  # fmt: skip
    pull, exposed = (sum(getattr(line, name) for line in run.steps) for name in ("pull_s", "exposed_s"))
    share = f" ({percent(exposed / pull)})" if pull > 0.0 else ""
    moved = (
        f"Engines read weights for {seconds(pull)} in all, and could not decode for {seconds(exposed)} of that{share}."
    )
    engines = charts.engines()
    panels = [
        chart_figure(charts.weights(), "Moving weights"),
        chart_figure(charts.groups(), "Groups in flight and buffered"),
    ]
    if engines:
        panels.insert(0, chart_figure(engines, "Engines: busy share"))
    return section(
        "Where the time of steps went",
        "A bar is a step, or the mean of neighbouring ones: first waiting for its batch, then its work. Waiting has the"
        " colour of what the missing trajectories were doing meanwhile.",
        figures([chart_figure(charts.stages(), "Stages of each step")], "stack")
        + figures(panels, "charts")
        + table(("part of a step", "in all", "share", "per step"), rows, wrap=True)
        + remark(moved)
        + _timeline_summary(trajectories),
    )  # fmt: skip


def _timeline_summary(trajectories: TrajectoryLogSummary | None) -> str:
    if trajectories is None:
        return ""
    command = f"tangram rl timeline {trajectories.log} --html timeline.html"
    block = f"<pre>{escape(escape_unprintable(command))}</pre>"
    if trajectories.timeline is None:
        return remark(f"The trajectory log is not shown here: {short_name(trajectories.skip_reason)}.") + block
    engines = trajectories.timeline.stages[Stage.GENERATE]
    return remark(f"{timeline_headline(engines)} Every trajectory over time:") + block


# ---- staleness --------------------------------------------------------------------------------------------------


def _staleness_section(run: RunHistory, charts: Charts) -> str:
    ages = charts.ages()
    if not ages:
        return ""
    total = sum(ages)
    mean = sum(age * count for age, count in enumerate(ages)) / total
    beyond = (
        f"{pluralize(run.staleness_violations, 'trajectory', 'trajectories')} older than α"
        if run.staleness_violations
        else "none older than α"
    )
    return section(
        "Staleness",
        f"Versions between the first token of a trajectory and the step that it was used in: {mean:.2f} on average,"
        f" at most {len(ages) - 1}, with {run.staleness_bound_text}; {beyond}.",
        figures(
            [
                chart_figure(charts.histogram(), "Trajectories by staleness"),
                chart_figure(charts.staleness(), "Shares over time"),
            ],
            "charts-wide",
        ),
    )


# ---- pools ------------------------------------------------------------------------------------------------------


def _pools_section(run: RunHistory, charts: Charts) -> str:
    pools = run.pools()
    if not pools:
        return ""
    busy = [pool for pool in pools if pool.actions][:CHARTS_MAX]
    panels = [chart_figure(charts.pool(pool.name), short_name(pool.name)) for pool in busy]
    wall_s = sum(line.step_s for line in run.steps)
    act = [[short_name(pool.name), f"{pool.total:g}", f"{pool.actions:,}",
            *(seconds(value) if value is not None else "-"
              for value in (pool.act_mean_s, pool.act_p99_s, pool.act_p99_worst_s, pool.waiting_mean_s))]
           for pool in pools]  # fmt: skip
    cost = [_cost_row(pool, wall_s) for pool in pools]
    return section(
        "Action completion time by pool",
        "From submission to the end of an action, waiting included. Over time: mean, p99 and waiting of each step;"
        " for neighbouring steps the mean of their means and their highest p99. In the table: of all actions.",
        figures(panels, "charts")
        + table(("pool", "units", "actions", "mean ACT", "p99", "worst p99 of a step", "waiting"), act, wrap=True),
    ) + section(
        "Cost against reservation",
        "Units times seconds: what actions held, and what trajectories would have held if each had reserved its"
        " maximum from its first action to its last. The bar: the held share of that reservation.",
        table(("pool", "held, unit s", "reserved, unit s", "reserved / held", "of all units", ""), cost, wrap=True),
    )  # fmt: skip


def _cost_row(pool: PoolTotals, wall_s: float) -> list[str]:
    share = pool.held_unit_s / pool.reserved_unit_s if pool.reserved_unit_s > 0.0 else 0.0
    bar = share_bar([("p1", min(1.0, share), f"{percent(share)} of the reservation was held")], track=True)
    use = pool.held_unit_s / (pool.total * wall_s) if pool.total > 0.0 and wall_s > 0.0 else None
    saved = f"{pool.reservation_ratio:.1f}×" if pool.reservation_ratio is not None else "-"
    return [short_name(pool.name), f"{pool.held_unit_s:,.1f}", f"{pool.reserved_unit_s:,.1f}", saved, percent(use),
            bar]  # fmt: skip


# ---- the trainer, and discarded work ----------------------------------------------------------------------------


def _trainer_section(charts: Charts) -> str:
    def panels_of(metrics: dict[str, tuple[str, str]]) -> list[str]:
        ids = {words: charts.metric(name, words, format) for name, (words, format) in metrics.items()}
        return [chart_figure(id, words) for words, id in ids.items() if id]

    main, more = panels_of(MAIN_METRICS), panels_of(MORE_METRICS)
    if not main and not more:
        return ""
    others = folded("More metrics", figures(more, "charts")) if more else ""
    return section("Metrics of the trainer", "One value for each step.", figures(main, "charts") + others)


def _discarded_section(run: RunHistory, charts: Charts) -> str:
    dropped = dropped_groups(run.lines)
    started = run.steps[-1].started_so_far
    tokens = token_totals(run.steps)

    def share_of_decoded(count: float) -> str:
        return percent(count / tokens.written) if tokens.written else "-"

    rows = [
        ["groups started", f"{started:,}", ""],
        ["groups trained on", f"{sum(totals.groups for line in run.steps for totals in line.tasks.values()):,}", ""],
        ["groups trained on that lack members", f"{sum(line.short for line in run.steps):,}", ""],
        *([f"groups dropped: {short_name(cause)}", f"{count:,}", percent(count / started) if started else "-"]
          for cause, count in sorted(dropped.items())),
        ["trajectories aborted as stale", f"{sum(line.aborted for line in run.steps):,}", ""],
        ["tokens decoded", f"{tokens.written:,.0f}", ""],
        ["tokens in no batch", f"{tokens.in_no_batch:,.0f}", share_of_decoded(tokens.in_no_batch)],
        ["tokens in a batch, of groups that teach nothing", f"{tokens.idle:,.0f}", share_of_decoded(tokens.idle)],
    ]  # fmt: skip
    panels = [
        chart_figure(charts.dropped(), "Groups dropped, by cause"),
        chart_figure(charts.aborted(), "Trajectories aborted"),
        chart_figure(charts.tokens_discarded(), "Tokens not trained on"),
    ]
    return section(
        "Discarded work",
        "Work that was not trained on, per step. The share of groups is of those started, the share of tokens is of all"
        " decoded tokens. Groups of abandoned lineages count as started and dropped too.",
        figures(panels, "charts") + table(("", "in all", "share"), rows, wrap=True),
    )


# ---- notices and settings ---------------------------------------------------------------------------------------


def _notices_section(run: RunHistory) -> str:
    events = [(line.at_s, line.kind, line.text) for line in run.notices]
    events += [
        (line.at_s, "resumed", " ".join(filter(None, (f"from step {line.step} ({line.resumed_from}).", line.left))))
        for line in run.began[1:]
    ]
    if run.end is not None:
        events.append((run.end.at_s, "ended", run.end.cause))
    rows = [[elapsed(at_s), f"{run.step_by(at_s):,}", short_name(kind), escape_unprintable(text)[:1000]]
            for at_s, kind, text in sorted(events)[:NOTICES_MAX]]  # fmt: skip
    more = f" The first {NOTICES_MAX} of {len(events):,}." if len(events) > NOTICES_MAX else ""
    listed = table(("after", "step", "event", "details"), rows, left=(2, 3), wrap=True) if rows else "<p>None.</p>"
    return section("Events", f"Marked in the curves by a small flag, except the end of the run.{more}", listed)


def _settings_section(run: RunHistory) -> str:
    if not run.settings:
        return ""
    text = msgspec.json.format(msgspec.json.encode(run.settings), indent=2).decode()[:SETTINGS_CHARACTERS_MAX]
    return f"<section><h2>Settings</h2>{folded('Settings of this run', f'<pre>{escape(text)}</pre>')}</section>"


def _definitions(folder: Path) -> list[tuple[str, str]]:
    return [
        ("staleness", "version from which a step starts less the version of a trajectory's first token; at most α"),
        ("ACT", "action completion time: waiting, execution and overhead, from submission to the end"),
        ("exposed pull", "time in which an engine could not decode because it read weights"),
        ("label", "measured: real programs in real time"),
        ("folder", escape_unprintable(str(folder))),
    ]
