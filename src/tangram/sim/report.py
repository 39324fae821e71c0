"""The report of a comparison or a plan: one self-contained HTML file.

Owns what the report contains and in which order: the answer, the table, the charts, the command that makes it again.
Labels every number as simulated. Promises the same bytes for the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tangram.core.demand import CORE, CPU, GPU
from tangram.core.policies import DEFAULT_POLICY
from tangram.reports.charts import SizePoint, size_curve
from tangram.reports.formatting import percent, pluralize, ratio_text, seconds, sooner_text
from tangram.reports.page import (
    Markup,
    card,
    cards,
    figure,
    figures,
    footer,
    legend,
    named,
    opening,
    page,
    section,
    table,
    with_note,
    write_page,
)
from tangram.reports.statistics import Interval
from tangram.sim import charts
from tangram.sim.compare import METRICS, Comparison, build_workload
from tangram.sim.plan import TARGETS, Plan, Point

COLOURS_OTHERS = ("p2", "p3", "p4", "p5", "p6")
ACT_ENTRY = ("ACT", "action completion time: waiting, overhead and execution, from submission to the end")
KIND_COLOURS = ("k0", "k1", "k2", "k3", "k4", "k5", "k6")


def write_comparison(path: Path, comparisons: Sequence[Comparison], command: str) -> None:
    """Write all comparisons into one file; each must have kept the results of its first seed."""
    write_page(path, comparison_page(comparisons, command))


def write_plan(path: Path, plan: Plan, command: str) -> None:
    write_page(path, plan_page(plan, command))


# ---- comparison -----------------------------------------------------------------------------------------------


def comparison_page(comparisons: Sequence[Comparison], command: str) -> str:
    first = comparisons[0]
    name = first.setup.source.name
    parts = []
    for number, comparison in enumerate(comparisons):
        size = [comparison.setup.size.describe()]
        labels = ["simulated", name, *(size if len(comparisons) > 1 else [])] if not number else size
        opened = opening(labels, headline(comparison), _lead(comparison), warning=comparison.warning())
        parts += [f'<div class="size"></div>{opened}' if number else opened, _cards(comparison), _table(comparison)]
        parts += _chart_sections(comparison)
    parts.append(_footer(command, _comparison_facts(first)))
    return page(f"Tangram: {name}", parts)


def featured(comparison: Comparison) -> str:
    """The policy in the headline: the default policy, or else the last one that is not the base."""
    others = [name for name in comparison.setup.policies if name != comparison.base]
    return DEFAULT_POLICY if DEFAULT_POLICY in others else (others or [comparison.base])[-1]


def colours(comparison: Comparison) -> dict[str, str]:
    """Colour classes: grey for the base, the accent for the featured policy, another colour for each of the others."""
    main, css_by_name = featured(comparison), {}
    others = iter(COLOURS_OTHERS * len(comparison.setup.policies))
    for name in comparison.setup.policies:
        css_by_name[name] = "p1" if name == main else "p0" if name == comparison.base else next(others)
    return css_by_name


def headline(comparison: Comparison) -> str:
    name, base = featured(comparison), comparison.base
    ratio = comparison.ratio(name, "act_mean_s")
    if comparison.mean(name, "act_mean_s") is None:
        return f"No action completed with {name}."
    if name == base or ratio is None:
        return f"Actions complete in {seconds(comparison.mean(name, 'act_mean_s'))} on average with {name}."
    unclear = ratio.low is not None and ratio.high is not None and ratio.low <= 1.0 <= ratio.high
    if unclear and 0.9 <= ratio.mean <= 1.1:
        return f"Actions complete about as soon with {name} as with {base}."
    caveat = ", but these few seeds leave it open" if unclear else ""
    return f"Actions complete {sooner_text(ratio.mean)} with {name} than with {base}{caveat}."


def _lead(comparison: Comparison) -> str:
    name, base, setup = featured(comparison), comparison.base, comparison.setup
    trajectories = pluralize(round(comparison.completed(name)[1]), "trajectory", "trajectories")
    sentences = [f"The same {trajectories} on the same {setup.size.describe()}, {comparison.load.describe()}."]
    if name != base:
        sentences.append(
            f"From submission to its end an action takes {seconds(comparison.mean(name, 'act_mean_s'))} on average"
            f" instead of {seconds(comparison.mean(base, 'act_mean_s'))}; of that it waits"
            f" {seconds(comparison.mean(name, 'waiting_mean_s'))} instead of"
            f" {seconds(comparison.mean(base, 'waiting_mean_s'))}."
        )
        step_s, base_step_s = comparison.mean(name, "step_s"), comparison.mean(base, "step_s")
        if step_s is not None and base_step_s is not None:
            sentences.append(
                f"The step, which ends with its last trajectory, takes {seconds(step_s)}"
                f" instead of {seconds(base_step_s)}."
            )
    return " ".join(sentences)


def _cards(comparison: Comparison) -> str:
    name, base = featured(comparison), comparison.base
    if name == base:
        return ""
    result = []
    for metric, words in (("act_mean_s", "mean ACT"), ("act_p99_s", "p99 ACT"), ("step_s", "step time")):
        ratio = comparison.ratio(name, metric)
        if ratio is not None:
            result.append(_ratio_card(ratio, words))
    use = "core_use" if comparison.setup.size.cores else "device_use"
    if comparison.setup.size.cores or comparison.setup.size.devices:
        what = "cores" if use == "core_use" else "devices"
        result.append(
            card(
                percent(comparison.mean(name, use)),
                f"of the {what} in use",
                f"{percent(comparison.mean(base, use))} under {base}",
            )
        )
    return cards(result)


def _ratio_card(ratio: Interval, words: str) -> str:
    """A ratio as a number above 1 in both directions: 1.25 times longer is easier to read than 0.80 times shorter."""
    shorter = ratio.mean >= 1.0
    how = "the same" if abs(ratio.mean - 1.0) < 0.005 else "shorter" if shorter else "longer"
    spread = "one seed"
    if ratio.low and ratio.high:
        low, high = (ratio.low, ratio.high) if shorter else (1.0 / ratio.high, 1.0 / ratio.low)
        spread = f"95 % interval {low:.2f} to {high:.2f}"
    value = ratio.mean if shorter else 1.0 / ratio.mean
    return card(f"{value:.2f}×", f"{how} {words}", spread)


def _table(comparison: Comparison) -> str:
    setup, css = comparison.setup, colours(comparison)
    rows = [
        [named(name, css[name]), *(_cell(comparison, name, metric) for metric in METRICS)] for name in setup.policies
    ]
    over = f"; in brackets the 95 % interval over {len(setup.seeds)} seeds" if len(setup.seeds) > 1 else ""
    return section(
        "What each policy takes",
        f"Below each number: how many times less it is than under {comparison.base}{over}. Above 1 is better.",
        table(["policy", *METRICS.values()], rows, highlighted=[list(setup.policies).index(featured(comparison))]),
    )


def _cell(comparison: Comparison, name: str, metric: str) -> Markup:
    value = seconds(comparison.mean(name, metric))
    if name == comparison.base:
        return with_note(value, "base")
    ratio = comparison.ratio(name, metric)
    css = ""
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        css = "good" if ratio.low > 1.0 else "bad" if ratio.high < 1.0 else ""
    return with_note(value, ratio_text(ratio), css)


# ---- charts -------------------------------------------------------------------------------------------------


def _chart_sections(comparison: Comparison) -> list[str]:
    css = colours(comparison)
    lines = [
        charts.ChartSeries(name=name, css=css[name], result=result)
        for name in comparison.setup.policies
        if (result := comparison.kept_result(name)) is not None and result.completed
    ]
    if not lines:
        return []
    parts = [
        duration_section(lines),
        _split_section(lines),
    ]
    for pool in _pools(comparison):
        parts.append(
            section(
                f"{pool.title} in use",
                f"Of {pool.total:g} {pool.unit}, averaged over short times. Dashed: all of them; the end of the step.",
                figure(charts.utilisation(lines, pool)),
            )
        )
    parts.append(_timeline_section(comparison, lines))
    return parts


def duration_section(lines: Sequence[charts.ChartSeries]) -> str:
    return section(
        "How long actions take",
        "Left: the share of all actions done within a time. Right: the slow ones, as the share that takes longer"
        " than a time. A curve further left is better.",
        legend([(line.css, line.name) for line in lines])
        + figures([figure(charts.distribution(lines)), figure(charts.slow_tail(lines))], "pair"),
    )


def _split_section(lines: list[charts.ChartSeries]) -> str:
    panels = [figure(charts.split_bars(lines, splits), kind) for kind, splits in charts.time_splits(lines).items()]
    return section(
        "Where that time goes",
        "Mean over the actions of a kind. Pale: waiting for a pod, cores, devices or a quota. Half: overhead, such as"
        " loading a model. Full: executing.",
        figures(panels),
    )


def _pools(comparison: Comparison) -> list[charts.PoolChart]:
    setup = comparison.setup
    pools = setup.size.pools(build_workload(setup.source, setup.seeds[0]))
    result = []
    for kind, title, unit, scale in ((CPU, "Cores", "cores", CORE), (GPU, "Devices", "devices", 1)):
        of_kind = [pool for pool in pools if pool.kind == kind]
        if of_kind:
            total = sum(pool.total for pool in of_kind) / scale
            result.append(
                charts.PoolChart(title=title, unit=unit, total=total, nodes=tuple(pool.node for pool in of_kind))
            )
    return result


def _timeline_section(comparison: Comparison, lines: list[charts.ChartSeries]) -> str:
    names = list(dict.fromkeys([comparison.base, featured(comparison)]))
    shown = [line for name in names for line in lines if line.name == name] or lines[:1]
    window = charts.busiest_window(shown[0].result)
    kinds: dict[str, int] = {}
    for line in shown:
        for row in line.result.rows:
            kinds[row.kind] = kinds.get(row.kind, 0) + 1
    ordered = sorted(kinds, key=lambda kind: -kinds[kind])
    css_by_kind = {kind: KIND_COLOURS[min(i, len(KIND_COLOURS) - 1)] for i, kind in enumerate(ordered)}
    panels = [figure(charts.timeline(line, window, css_by_kind), line.name) for line in shown]
    keys = legend([(css, kind) for kind, css in css_by_kind.items()], "pale: waiting; gap: the policy model thinks")
    return section(
        "A closer look",
        f"{pluralize(len(window.trajectories), 'trajectory', 'trajectories')} from {window.start_s:g} s to"
        f" {window.end_s:g} s, where most actions wait under {comparison.base}. A row is a trajectory, a bar is an"
        " action; point at it for more.",
        keys + figures(panels, "pair"),
    )


# ---- plan -----------------------------------------------------------------------------------------------------


def plan_page(plan: Plan, command: str) -> str:
    column = TARGETS[plan.target]
    target = f"{plan.target} ACT"

    def point_of(point: Point, name: str) -> SizePoint:
        value_s = getattr(point, column)
        tip = f"{point.size} {plan.resource}\n{target} {seconds(value_s)}, p99 {seconds(point.act_p99_s)}\n"
        tip = f"{name}{tip}{percent(point.use)} in use"
        return SizePoint(size=point.size, value_s=value_s, tip=tip)

    curve = size_curve(
        [point_of(point, "") for point in plan.points],
        point_of(plan.reference, f"{plan.today} on "),
        chosen=plan.smallest,
        target_s=plan.target_s,
        reference_name=f"{plan.today} today",
        resource=plan.resource,
        label=f"{target} against {plan.resource}",
    )
    keys = legend([("p1", plan.policy), ("p0", f"{plan.today}, today's reservation")], "dashed: the target")
    parts = [
        opening(["simulated", plan.workload], _plan_headline(plan), plan.sentence()),
        section(
            f"{target} against {plan.resource}",
            f"Every simulated size, each with {pluralize(len(plan.seeds), 'seed')}; means over seeds.",
            figure(keys + curve),
        ),
        section(
            "All sizes",
            f"Bold: the smallest that reaches {seconds(plan.target_s, plan.digits)}.",
            _plan_table(plan),
        ),
        _footer(command, [("policy", plan.policy), ("seeds", ", ".join(map(str, plan.seeds)))]),
    ]
    return page(f"Tangram: {plan.resource} for {plan.workload}", parts)


def _plan_headline(plan: Plan) -> str:
    if plan.smallest is None:
        return f"No number of {plan.resource} that was tried is enough."
    return f"{plan.smallest} {plan.resource} are enough, where {plan.reference.size} are reserved today."


def _plan_table(plan: Plan) -> str:
    def row(name: str, point: Point, reached: str) -> list[str]:
        return [name, *plan.describe_point(point), percent(point.use), reached]

    rows = [
        row(f"{point.size} {plan.resource}", point, "reached" if plan.reaches(point) else "missed")
        for point in plan.points
    ]
    rows.append(row(f"{plan.reference.size} {plan.resource}, {plan.today}", plan.reference, "today"))
    smallest = [number for number, point in enumerate(plan.points) if point.size == plan.smallest]
    heads = [f"{plan.policy} on", "mean ACT", "p95", "p99", "step time", "in use", "target"]
    return table(heads, rows, highlighted=smallest)


# ---- footer ---------------------------------------------------------------------------------------------------


def _comparison_facts(comparison: Comparison) -> list[tuple[str, str]]:
    setup, load = comparison.setup, comparison.load
    facts = [
        ("seeds", f"{', '.join(map(str, setup.seeds))}; the charts show seed {setup.seeds[0]}"),
        ("knowledge", setup.knowledge),
        (
            "load",
            f"{load.core_s:,.0f} CPU seconds and {load.device_s:,.0f} device seconds of work; undisturbed, the longest"
            f" trajectory ends after {seconds(load.span_s)}",
        ),
    ]
    if setup.faults:
        facts.append(("faults", pluralize(setup.faults, "seeded fault") + " in each simulation"))
    return facts


def _footer(command: str, facts: list[tuple[str, str]]) -> str:
    entries = [
        ACT_ENTRY,
        ("time-weighted ACT", "its mean with every action counted by its seconds of execution"),
        *facts,
        ("label", "simulated: virtual time; nothing here was executed on real machines"),
    ]
    return footer(entries, command)
