"""The sections of a training report behind its learning curves: time, staleness, pools, the trainer, what happened.

Owns what each says. A section of which there is nothing is an empty text.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import msgspec

from tangram.reports.formatting import percent, seconds, several
from tangram.reports.page import prose, section
from tangram.reports.printable import plain
from tangram.rl.observe import timeline_page
from tangram.rl.observe.timeline import Timeline
from tangram.rl.observe.training_report_charts import CHARTS_MAX, MAIN_METRICS, MORE_METRICS, Charts, name_of
from tangram.rl.observe.training_report_markup import Markup, chart_figure, duration, table
from tangram.rl.observe.training_report_run import PoolSum, Run, parts_of, tokens_of
from tangram.rl.rollout.records import Stage
from tangram.rl.train.records import dropped_in

NOTICES_MAX = 200
SETTINGS_CHARACTERS_MAX = 100_000


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What a log of trajectories tells."""

    log: Path
    timeline: Timeline | None = None
    why: str = ""
    """It is not told."""


# ---- time -------------------------------------------------------------------------------------------------------


def time_section(run: Run, charts: Charts, played: Played | None) -> str:
    sums: dict[str, float] = {}
    for line in run.steps:
        for name, length in parts_of(line).items():
            sums[name] = sums.get(name, 0.0) + length
    whole = sum(sums.values()) or 1.0
    rows = [[name_of(name), seconds(length), percent(length / whole), seconds(length / len(run.steps))]
            for name, length in sorted(sums.items(), key=lambda part: -part[1])]  # fmt: skip
    pull, exposed = (sum(getattr(line, name) for line in run.steps) for name in ("pull_s", "exposed_s"))
    share = f" ({percent(exposed / pull)})" if pull > 0.0 else ""
    moved = (
        f"Engines read weights for {seconds(pull)} in all, and could not write for {seconds(exposed)} of that{share}."
    )
    engines = charts.engines()
    figures = [
        chart_figure(charts.weights(), "Moving weights"),
        chart_figure(charts.groups(), "Groups in play and buffered"),
    ]
    if engines:
        figures.insert(0, chart_figure(engines, "Engines: busy share"))
    return section(
        "Where the time of steps went",
        "A bar is a step, or the mean of neighbouring ones: what it waited for before its batch was there, then what it"
        " did. Waiting has the colour of what the missing trajectories were doing meanwhile.",
        f'<div class="stack">{chart_figure(charts.stages(), "Stages of each step")}</div>'
        f'<div class="small">{"".join(figures)}</div>'
        + table(("part of a step", "in all", "share", "per step"), rows)
        + f'<p class="say after">{prose(moved)}</p>{_played(played)}',
    )  # fmt: skip


def _played(played: Played | None) -> str:
    if played is None:
        return ""
    command = f"<pre>{escape(plain(f'tangram rl timeline {played.log} --html timeline.html'))}</pre>"
    if played.timeline is None:
        return (
            f'<p class="say after">The log of trajectories is not told here: {prose(name_of(played.why))}.</p>{command}'
        )
    engines = played.timeline.stages[Stage.GENERATE]
    return f'<p class="say after">{prose(timeline_page.headline(engines))} Every trajectory over time:</p>{command}'


# ---- staleness --------------------------------------------------------------------------------------------------


def staleness_section(run: Run, charts: Charts) -> str:
    ages = charts.ages()
    if not ages:
        return ""
    total = sum(ages)
    mean = sum(age * count for age, count in enumerate(ages)) / total
    beyond = f"{several(run.older, 'trajectory', 'trajectories')} older than α" if run.older else "none older than α"
    return section(
        "Staleness",
        f"Versions between the first token of a trajectory and the step that it was used in: {mean:.2f} on average,"
        f" at most {len(ages) - 1}, with {run.alpha_words}; {beyond}.",
        f'<div class="curves">{chart_figure(charts.histogram(), "Trajectories by staleness")}'
        f"{chart_figure(charts.staleness(), 'Shares over time')}</div>",
    )


# ---- pools ------------------------------------------------------------------------------------------------------


def pools_section(run: Run, charts: Charts) -> str:
    pools = run.pools()
    if not pools:
        return ""
    busy = [pool for pool in pools if pool.actions][:CHARTS_MAX]
    figures = "".join(chart_figure(charts.pool(pool.name), name_of(pool.name)) for pool in busy)
    wall_s = sum(line.step_s for line in run.steps)
    act = [[name_of(pool.name), f"{pool.total:g}", f"{pool.actions:,}",
            *(seconds(value) if value is not None else "-"
              for value in (pool.act_mean_s, pool.act_p99_s, pool.act_p99_worst_s, pool.waiting_mean_s))]
           for pool in pools]  # fmt: skip
    cost = [_cost_row(pool, wall_s) for pool in pools]
    return section(
        "Action completion time by pool",
        "From submission to the end of an action, waiting included. Over time: mean, p99 and waiting of each step,"
        " or of neighbouring ones the mean of their means and their highest p99. In the table: of all actions.",
        f'<div class="small">{figures}</div>'
        + table(("pool", "units", "actions", "mean ACT", "p99", "worst p99 of a step", "waiting"), act),
    ) + section(
        "Cost against reservation",
        "Units times seconds: what actions held, and what trajectories would have held, had each kept the most that it"
        " ever held from its first action to its last. The bar: held, of what would have been reserved.",
        table(("pool", "held, unit s", "reserved, unit s", "reserved / held", "of all units", ""), cost),
    )  # fmt: skip


def _cost_row(pool: PoolSum, wall_s: float) -> list[str]:
    share = pool.held_unit_s / pool.reserved_unit_s if pool.reserved_unit_s > 0.0 else 0.0
    bar = f'<span class="held"><i style="width:{100.0 * min(1.0, share):.2f}%"></i></span>'
    use = pool.held_unit_s / (pool.total * wall_s) if pool.total > 0.0 and wall_s > 0.0 else None
    saved = f"{pool.saved:.1f}×" if pool.saved is not None else "-"
    return [name_of(pool.name), f"{pool.held_unit_s:,.1f}", f"{pool.reserved_unit_s:,.1f}", saved, percent(use),
            Markup(bar)]  # fmt: skip


# ---- the trainer, and what was thrown away ----------------------------------------------------------------------


def trainer_section(charts: Charts) -> str:
    def all_of(metrics: dict[str, tuple[str, str]]) -> str:
        found = [(charts.metric(name, words, format), words) for name, (words, format) in metrics.items()]
        return "".join(chart_figure(id, words) for id, words in found if id)

    main, more = all_of(MAIN_METRICS), all_of(MORE_METRICS)
    if not main and not more:
        return ""
    folded = f'<details><summary>More of the trainer</summary><div class="small">{more}</div></details>' if more else ""
    return section("What the trainer tells", "Of each step.", f'<div class="small">{main}</div>{folded}')


def discarded_section(run: Run, charts: Charts) -> str:
    dropped = dropped_in(run.lines)
    started = run.steps[-1].started_so_far
    tokens = tokens_of(run.steps)

    def of_written(count: float) -> str:
        return percent(count / tokens.written) if tokens.written else "-"

    rows = [
        ["groups started", f"{started:,}", ""],
        ["groups trained on", f"{sum(its.groups for line in run.steps for its in line.tasks.values()):,}", ""],
        ["groups trained on that lack members", f"{sum(line.short for line in run.steps):,}", ""],
        *([f"groups dropped: {name_of(cause)}", f"{count:,}", percent(count / started) if started else "-"]
          for cause, count in sorted(dropped.items())),
        ["trajectories aborted as stale", f"{sum(line.aborted for line in run.steps):,}", ""],
        ["tokens written", f"{tokens.written:,.0f}", ""],
        ["tokens in no batch", f"{tokens.in_no_batch:,.0f}", of_written(tokens.in_no_batch)],
        ["tokens in a batch, of groups that teach nothing", f"{tokens.idle:,.0f}", of_written(tokens.idle)],
    ]  # fmt: skip
    figures = "".join(
        chart_figure(id, words)
        for id, words in (
            (charts.dropped(), "Groups dropped, by cause"),
            (charts.aborted(), "Trajectories aborted"),
            (charts.tokens_discarded(), "Tokens not trained on"),
        )
    )
    return section(
        "Discarded work",
        "What was played and not trained on, per step. The share of groups is of those started, that of tokens of all"
        " that were written. Groups that were started and dropped count in lineages that were given up too.",
        f'<div class="small">{figures}</div>' + table(("", "in all", "share"), rows),
    )


# ---- the rest ---------------------------------------------------------------------------------------------------


def notices_section(run: Run) -> str:
    found = [(line.at_s, line.kind, line.text) for line in run.notices]
    found += [
        (line.at_s, "resumed", " ".join(filter(None, (f"from step {line.step} ({line.resumed_from}).", line.left))))
        for line in run.began[1:]
    ]
    if run.over is not None:
        found.append((run.over.at_s, "over", run.over.cause))
    rows = [[duration(at_s), f"{run.step_by(at_s):,}", name_of(kind), plain(text)[:1000]]
            for at_s, kind, text in sorted(found)[:NOTICES_MAX]]  # fmt: skip
    more = f" The first {NOTICES_MAX} of {len(found):,}." if len(found) > NOTICES_MAX else ""
    listed = table(("after", "step", "what", "words"), rows, left=(2, 3)) if rows else "<p>Nothing happened.</p>"
    return section("What happened", f"Marked in the curves by a small flag, except the end of the run.{more}", listed)


def settings_section(run: Run) -> str:
    if not run.settings:
        return ""
    text = msgspec.json.format(msgspec.json.encode(run.settings), indent=2).decode()[:SETTINGS_CHARACTERS_MAX]
    folded = f"<details><summary>Of this run</summary><pre>{escape(text)}</pre></details>"
    return f"<section><h2>Settings</h2>{folded}</section>"


def footer_section(folder: Path) -> str:
    known = [
        ("staleness", "version from which a step starts less the version of a trajectory's first token; at most α"),
        ("ACT", "action completion time: waiting, execution and overhead, from submission to the end"),
        ("exposed pull", "reading of weights during which an engine could not write"),
        ("label", "measured: real programs in real time"),
        ("folder", plain(str(folder))),
    ]
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in known)
    return f"<footer><dl>{entries}</dl></footer>"
