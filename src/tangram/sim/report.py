"""Report: a comparison or a plan as one self-contained HTML file.

Owns what a report says and in which order: the answer first, then the table, then the pictures, then how to get the
same again. Says "simulated" wherever numbers stand. Promises the same bytes for the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tangram.core.demand import CORE, CPU, GPU
from tangram.files.atomic_file import whole_file
from tangram.reports.formatting import percent, seconds, several, times
from tangram.reports.page import card, figure, legend, page, prose, section
from tangram.reports.statistics import Interval
from tangram.sim import charts
from tangram.sim.compare import METRICS, Comparison, workload_of
from tangram.sim.plan import TARGETS, Plan, Point

COLOURS_OTHERS = ("p2", "p3", "p4", "p5", "p6")
KIND_COLOURS = ("k0", "k1", "k2", "k3", "k4", "k5", "k6")


def write_comparison(path: Path, comparisons: Sequence[Comparison], command: str) -> None:
    """All comparisons in one file; the results of the first seed must have been kept."""
    _write(path, comparison_page(comparisons, command))


def write_plan(path: Path, answer: Plan, command: str) -> None:
    _write(path, plan_page(answer, command))


def _write(path: Path, text: str) -> None:
    with whole_file("report", path) as file:
        file.write(text.encode())


# ---- comparison -----------------------------------------------------------------------------------------------


def comparison_page(comparisons: Sequence[Comparison], command: str) -> str:
    first = comparisons[0]
    name = first.setup.source.name
    labels = ["simulated", name, *([first.setup.size.describe()] if len(comparisons) > 1 else [])]
    parts = ["".join(f'<span class="label">{escape(label)}</span>' for label in labels), _opening(first)]
    for number, comparison in enumerate(comparisons):
        if number:
            size = escape(comparison.setup.size.describe())
            parts.append(f'<div class="size"><span class="label">{size}</span></div>{_opening(comparison)}')
        parts.append(_table(comparison))
        parts.extend(_pictures(comparison))
    parts.append(_footer(command, _comparison_facts(first)))
    return page(f"Tangram: {name}", "\n".join(parts))


def featured(comparison: Comparison) -> str:
    """The policy that the headline is about: ours, else the last one that is not the base."""
    others = [name for name in comparison.setup.policies if name != comparison.base]
    return "adaptive" if "adaptive" in others else (others or [comparison.base])[-1]


def colours(comparison: Comparison) -> dict[str, str]:
    """Grey for the base, the accent for what is featured, a colour of its own for each of the others."""
    main, found = featured(comparison), {}
    others = iter(COLOURS_OTHERS * len(comparison.setup.policies))
    for name in comparison.setup.policies:
        found[name] = "p1" if name == main else "p0" if name == comparison.base else next(others)
    return found


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
    how = f"{ratio.mean:.1f} times sooner" if ratio.mean >= 1.0 else f"{1.0 / ratio.mean:.1f} times later"
    doubt = ", but these few seeds leave it open" if unclear else ""
    return f"Actions complete {how} with {name} than with {base}{doubt}."


def _lead(comparison: Comparison) -> str:
    """What the headline rests on, in sentences."""
    name, base, setup = featured(comparison), comparison.base, comparison.setup
    trajectories = several(round(comparison.completed(name)[1]), "trajectory", "trajectories")
    told = [f"The same {trajectories} on the same {setup.size.describe()}, {comparison.load.describe()}."]
    if name != base:
        told.append(
            f"From submission to its end an action takes {seconds(comparison.mean(name, 'act_mean_s'))} on average"
            f" instead of {seconds(comparison.mean(base, 'act_mean_s'))}; of that it waits"
            f" {seconds(comparison.mean(name, 'waiting_mean_s'))} instead of"
            f" {seconds(comparison.mean(base, 'waiting_mean_s'))}."
        )
        step_s, base_step_s = comparison.mean(name, "step_s"), comparison.mean(base, "step_s")
        if step_s is not None and base_step_s is not None:
            told.append(
                f"The step, which ends with its last trajectory, takes {seconds(step_s)}"
                f" instead of {seconds(base_step_s)}."
            )
    return " ".join(told)


def _opening(comparison: Comparison) -> str:
    warning = comparison.warning()
    told = f'<p class="lead"><strong>Warning:</strong> {prose(warning)}</p>' if warning else ""
    lead = f'<p class="lead">{prose(_lead(comparison))}</p>'
    return f"<h1>{escape(headline(comparison))}</h1>{told}{lead}{_cards(comparison)}"


def _cards(comparison: Comparison) -> str:
    name, base = featured(comparison), comparison.base
    if name == base:
        return ""
    found = []
    for metric, words in (("act_mean_s", "mean ACT"), ("act_p99_s", "p99 ACT"), ("step_s", "step time")):
        ratio = comparison.ratio(name, metric)
        if ratio is not None:
            found.append(_ratio_card(ratio, words))
    use = "core_use" if comparison.setup.size.cores else "device_use"
    if comparison.setup.size.cores or comparison.setup.size.devices:
        what = "cores" if use == "core_use" else "devices"
        found.append(
            card(
                percent(comparison.mean(name, use)),
                f"of the {what} in use",
                f"{percent(comparison.mean(base, use))} under {base}",
            )
        )
    return f'<div class="cards">{"".join(found)}</div>'


def _ratio_card(ratio: Interval, words: str) -> str:
    """Both ways round above 1: people read 1.25 times longer more easily than 0.80 times less."""
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
    heads = "".join(f"<th>{escape(words)}</th>" for words in METRICS.values())
    rows = []
    for name in setup.policies:
        cells = "".join(f"<td>{_cell(comparison, name, metric)}</td>" for metric in METRICS)
        here = ' class="here"' if name == featured(comparison) else ""
        rows.append(f'<tr{here}><td><span class="dot {css[name]}"></span>{escape(name)}</td>{cells}</tr>')
    over = f"; in brackets the 95 % interval over {len(setup.seeds)} seeds" if len(setup.seeds) > 1 else ""
    return section(
        "What each policy takes",
        f"Below each number: how many times less it is than under {comparison.base}{over}. Above 1 is better.",
        f'<div class="wide"><table><thead><tr><th>policy</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    )


def _cell(comparison: Comparison, name: str, metric: str) -> str:
    told = escape(seconds(comparison.mean(name, metric)))
    if name == comparison.base:
        return f"{told}<small>base</small>"
    ratio = comparison.ratio(name, metric)
    css = ""
    if ratio is not None and ratio.low is not None and ratio.high is not None:
        css = "good" if ratio.low > 1.0 else "bad" if ratio.high < 1.0 else ""
    return f'{told}<small class="{css}">{escape(times(ratio))}</small>'


# ---- pictures -------------------------------------------------------------------------------------------------


def _pictures(comparison: Comparison) -> list[str]:
    css = colours(comparison)
    lines = [
        charts.Line(name=name, css=css[name], result=result)
        for name in comparison.setup.policies
        if (result := comparison.kept(name)) is not None and result.completed
    ]
    if not lines:
        return []
    keys = legend([(line.css, line.name) for line in lines])
    parts = [
        section(
            "How long actions take",
            "Left: the share of all actions that are done within a time. Right: the slow ones, as the share that takes"
            " longer than a time. A curve further left is better.",
            f'{keys}<div class="pair">{figure(charts.distribution(lines))}{figure(charts.slow_tail(lines))}</div>',
        ),
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


def _split_section(lines: list[charts.Line]) -> str:
    panels = "".join(figure(charts.split_bars(lines, found), f"{kind}") for kind, found in charts.splits(lines).items())
    return section(
        "What that time is made of",
        "Mean over the actions of a kind. Pale: waiting, be it for a pod, cores, devices or a quota. Half: overhead,"
        " such as loading a model. Full: executing.",
        f'<div class="grid">{panels}</div>',
    )


def _pools(comparison: Comparison) -> list[charts.Pooled]:
    setup = comparison.setup
    pools = setup.size.pools(workload_of(setup.source, setup.seeds[0]))
    found = []
    for kind, title, unit, scale in ((CPU, "Cores", "cores", CORE), (GPU, "Devices", "devices", 1)):
        own = [pool for pool in pools if pool.kind == kind]
        if own:
            total = sum(pool.total for pool in own) / scale
            found.append(charts.Pooled(title=title, unit=unit, total=total, nodes=tuple(pool.node for pool in own)))
    return found


def _timeline_section(comparison: Comparison, lines: list[charts.Line]) -> str:
    names = list(dict.fromkeys([comparison.base, featured(comparison)]))
    shown = [line for name in names for line in lines if line.name == name] or lines[:1]
    window = charts.window(shown[0].result)
    kinds: dict[str, int] = {}
    for line in shown:
        for row in line.result.rows:
            kinds[row.kind] = kinds.get(row.kind, 0) + 1
    ordered = sorted(kinds, key=lambda kind: -kinds[kind])
    css_by_kind = {kind: KIND_COLOURS[min(i, len(KIND_COLOURS) - 1)] for i, kind in enumerate(ordered)}
    panels = "".join(figure(charts.timeline(line, window, css_by_kind), line.name) for line in shown)
    keys = legend([(css, kind) for kind, css in css_by_kind.items()], "pale: waiting; gap: the policy model thinks")
    return section(
        "A closer look",
        f"{several(len(window.trajectories), 'trajectory', 'trajectories')} from {window.start_s:g} s to"
        f" {window.end_s:g} s, where most is waiting under {comparison.base}. A row is a trajectory, a bar one action;"
        " point at it for more.",
        f'{keys}<div class="pair">{panels}</div>',
    )


# ---- plan -----------------------------------------------------------------------------------------------------


def plan_page(answer: Plan, command: str) -> str:
    column = TARGETS[answer.target]
    aimed = f"{answer.target} ACT"
    points = [(point.size, getattr(point, column), point.act_p99_s, point.use) for point in answer.points]
    curve = charts.size_curve(
        points,
        chosen=answer.smallest,
        target_s=answer.target_s,
        reference=(answer.reference.size, getattr(answer.reference, column), answer.today),
        words=(answer.resource, aimed),
    )
    keys = legend([("p1", answer.policy), ("p0", f"{answer.today}, today's reservation")], "dashed: the target")
    body = [
        f'<span class="label">simulated</span><span class="label">{escape(answer.workload)}</span>',
        f"<h1>{escape(_plan_headline(answer))}</h1>",
        f'<p class="lead">{prose(answer.sentence())}</p>',
        section(
            f"{aimed} against {answer.resource}",
            f"Every size that was simulated, each under {several(len(answer.seeds), 'seed')}; means over seeds.",
            figure(keys + curve),
        ),
        section(
            "All sizes",
            f"Bold: the smallest that reaches {seconds(answer.target_s, answer.digits)}.",
            _plan_table(answer),
        ),
        _footer(command, [("policy", answer.policy), ("seeds", ", ".join(map(str, answer.seeds)))]),
    ]
    return page(f"Tangram: {answer.resource} for {answer.workload}", "\n".join(body))


def _plan_headline(answer: Plan) -> str:
    if answer.smallest is None:
        return f"No number of {answer.resource} that was tried is enough."
    return f"{answer.smallest} {answer.resource} are enough, where {answer.reference.size} are reserved today."


def _plan_table(answer: Plan) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("mean ACT", "p95", "p99", "step time", "in use", "target"))

    def row(name: str, point: Point, reached: str, css: str) -> str:
        cells = "".join(f"<td>{escape(told)}</td>" for told in answer.told(point))
        return f"<tr{css}><td>{escape(name)}</td>{cells}<td>{percent(point.use)}</td><td>{reached}</td></tr>"

    rows = [
        row(
            f"{point.size} {answer.resource}",
            point,
            "reached" if answer.reaches(point) else "missed",
            ' class="here"' if point.size == answer.smallest else "",
        )
        for point in answer.points
    ]
    rows.append(row(f"{answer.reference.size} {answer.resource}, {answer.today}", answer.reference, "today", ""))
    return (
        f'<div class="wide"><table><thead><tr><th>{escape(answer.policy)} on</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


# ---- footer ---------------------------------------------------------------------------------------------------


def _comparison_facts(comparison: Comparison) -> list[tuple[str, str]]:
    setup, load = comparison.setup, comparison.load
    facts = [
        ("seeds", f"{', '.join(map(str, setup.seeds))}; the pictures show seed {setup.seeds[0]}"),
        ("knowledge", setup.knowledge),
        (
            "load",
            f"{load.core_s:,.0f} CPU seconds and {load.device_s:,.0f} device seconds of work; undisturbed, the longest"
            f" trajectory ends after {seconds(load.span_s)}",
        ),
    ]
    if setup.faults:
        facts.append(("faults", several(setup.faults, "seeded fault") + " in each simulation"))
    return facts


def _footer(command: str, facts: list[tuple[str, str]]) -> str:
    known = [
        ("ACT", "action completion time: waiting, overhead and execution, from submission to the end"),
        ("time-weighted ACT", "its mean with every action counted by its seconds of execution"),
        *facts,
        ("label", "simulated: virtual time; nothing here was executed on real machines"),
    ]
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in known)
    return f"<footer><p>The same again:</p><pre>{escape(command)}</pre><dl>{entries}</dl></footer>"
