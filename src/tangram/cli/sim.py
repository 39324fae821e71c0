"""`tangram sim`: compare policies on a workload or a trace, on virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import options, show
from tangram.errors import InvalidConfig
from tangram.reports import live, terminal

if TYPE_CHECKING:
    from tangram.sim.compare import Comparison, Setup
    from tangram.sim.episode import Workload

EXAMPLES = """[bold]Examples[/bold]

tangram sim  [dim]# coding agents: today's pods against three policies[/dim]

tangram sim coding --batch 512 --cores 16,32,64 --report report.html

tangram sim coding --perfetto sim.json  [dim]# every action over time, for ui.perfetto.dev[/dim]

tangram sim teachers --devices 16 --policies fcfs,adaptive

tangram sim elastic --option load=0.9 --option exponent=0.45 --seeds 10

tangram sim coding --policies adaptive --record run.jsonl

tangram sim --trace run.jsonl --policies fcfs,adaptive
"""


def sim(
    workload: options.WorkloadName = None,
    trace: options.Traces = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies",
            metavar="A,B,C",
            help="fcfs, fixed:K, paper, adaptive, adaptive:no-resize. Baselines: pods:R, R cores per trajectory;"
            " on-demand, which loads a model when it is called; alone, the bound for any scheduler."
            " Default: pods:0.5,fcfs,paper,adaptive; for a workload without sandboxes fcfs,fixed:4,paper,adaptive.",
        ),
    ] = None,
    batch: options.Batch = None,
    cores: Annotated[
        str | None,
        typer.Option(
            "--cores",
            metavar="N,...",
            help="Total cores; one table per number. Default: one core per eight sandboxes, at least 4;"
            f" {options.UNITS} for independent rewards; for a recording, its own.",
        ),
    ] = None,
    nodes: options.Nodes = None,
    memory_per_core: options.Memory = None,
    devices: options.Devices = None,
    seeds: options.Seeds = None,
    knowledge: options.KnowledgeOf = "learned",
    faults: Annotated[
        int,
        typer.Option(
            "--faults",
            metavar="N",
            help="Number of faults in each simulation, drawn from its seed. A lost node loses its trajectories: use"
            " several --nodes.",
        ),
    ] = 0,
    ageing: Annotated[
        float | None,
        typer.Option(
            "--ageing",
            metavar="SECONDS",
            help="Wait after which later actions of the same run no longer overtake an action. Default: 600.",
        ),
    ] = None,
    option: options.Options = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="NAME", help="The policy that the others are compared with. Default: the first."
        ),
    ] = None,
    report: options.Report = None,
    perfetto: options.Perfetto = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help="Record a trace of the last policy in --policies, with the first seed and the first number of"
            " cores. Creates its folder.",
        ),
    ] = None,
    as_json: options.Json = False,
    workers: options.WorkerCount = None,
) -> None:
    """Compare scheduling policies on the same work, on virtual time.

    Prints the action completion time (ACT) of each policy, and how many times shorter it is than that of --base.
    """
    from tangram.sim.compare import Setup, compare
    from tangram.sim.report import write_comparison

    work = options.workload_request(workload, trace, batch, option, seeds, cores, nodes, memory_per_core, devices)
    chosen = _usual_policies(work.first) if policies is None else options.parse_names("policies", policies)
    setups = [
        Setup(
            source=work.source,
            size=size,
            policies=chosen,
            seeds=work.seeds,
            base=base,
            knowledge=knowledge,
            faults=faults,
            ageing_s=ageing,
        )
        for size in work.sizes
    ]
    for setup in setups:
        setup.size.pools(work.first)
    _check_record(record, knowledge)
    options.check_output_files(report=report, perfetto=perfetto, record=record)
    processes = options.check_workers(workers)
    keep = report is not None or perfetto is not None
    with live.progress(f"simulating {work.source.name}") as progress:
        comparisons = compare(setups, workers=processes, keep=keep, record_to=record, progress=progress)
    reproduce = _command(setups)
    try:
        if report is not None:
            write_comparison(report, comparisons, reproduce)
        if perfetto is not None:
            _write_trace(perfetto, comparisons)
    finally:
        # The numbers are printed even if the report cannot be written.
        if as_json:
            _print_json(comparisons, reproduce)
        else:
            _print(comparisons)
    if record is not None and not as_json:
        typer.echo(f"recorded {chosen[-1]} under seed {work.seeds[0]} in {record}")
    if report is not None and not as_json:
        show.print_report_path(report)
    if perfetto is not None and not as_json:
        show.print_trace_path(perfetto)


def _write_trace(path: Path, comparisons: list[Comparison]) -> None:
    """The first seed of each policy, for each size."""
    from tangram.sim.trace_events import trace_of_results

    results = {}
    for comparison in comparisons:
        size = f" on {comparison.setup.size.describe()}" if len(comparisons) > 1 else ""
        for name in comparison.setup.policies:
            if (result := comparison.kept_result(name)) is not None:
                results[f"{name}{size}"] = result
    trace_of_results(results).write(path)


def _usual_policies(first: Workload) -> tuple[str, ...]:
    """The default policies, with today's pods first if the work has something to reserve."""
    from tangram.sim.size import pods_can_run

    if pods_can_run(first):
        return ("pods:0.5", "fcfs", "paper", "adaptive")
    return ("fcfs", "fixed:4", "paper", "adaptive")


def _check_record(record: Path | None, knowledge: str) -> None:
    if record is not None and knowledge == "perfect":
        raise InvalidConfig(
            "knowledge", knowledge, "learned or hints with --record: what is known must be in the trace"
        )


def _command(setups: list[Setup]) -> str:
    setup = setups[0]
    return options.reproduce_command(
        "sim",
        setup.source,
        setup.size,
        setup.seeds,
        {
            "policies": ",".join(setup.policies),
            "cores": ",".join(str(each.size.cores) for each in setups if each.size.cores),
            "devices": setup.size.devices,
            "knowledge": setup.knowledge,
            "faults": setup.faults,
            "ageing": setup.ageing_s,
            "base": setup.base,
        },
    )


# ---- printing -------------------------------------------------------------------------------------------------


def _print(comparisons: list[Comparison]) -> None:
    console = terminal.stdout_console()
    for comparison in comparisons:
        console.print(_seconds_table(comparison))
        if len(comparison.setup.policies) > 1:
            console.print(_ratio_table(comparison))
        if warning := comparison.warning():
            console.print(f"warning: {warning}\n", style="yellow", highlight=False, markup=False)
    console.print(_legend(comparisons[0]), highlight=False, markup=False)


def _seconds_table(comparison: Comparison) -> Any:
    from tangram.reports.formatting import out_of, percent, pluralize, seconds

    setup = comparison.setup
    trajectories = pluralize(round(comparison.completed(setup.policies[0])[1]), "trajectory", "trajectories")
    on = f"{trajectories} on {setup.size.describe()}"
    table = terminal.table(
        f"{setup.source.name}: {on}, {show.seeds_text(setup.seeds)}, {comparison.load.describe()} (simulated)"
    )
    table.add_column("policy", no_wrap=True)
    heads = ["mean ACT", "waiting", "p50", "p95", "p99", "step"]
    use = "core_use" if setup.size.cores else "device_use" if setup.size.devices else ""
    counted = bool(setup.faults or comparison.warning())
    for head in [*heads, *(["in use"] if use else []), *(["completed"] if counted else [])]:
        table.add_column(head, justify="right")
    metrics = ("act_mean_s", "waiting_mean_s", "act_p50_s", "act_p95_s", "act_p99_s", "step_s")
    for name in setup.policies:
        cells = [name, *(seconds(comparison.mean(name, metric)) for metric in metrics)]
        cells += [percent(comparison.mean(name, use))] if use else []
        cells += [out_of(*comparison.completed(name))] if counted else []
        table.add_row(*cells)
    return table


def _ratio_table(comparison: Comparison) -> Any:
    from tangram.reports.formatting import ratio_text
    from tangram.sim.compare import METRICS

    table = terminal.table(f"times less than {comparison.base}")
    table.add_column("", no_wrap=True)
    others = [name for name in comparison.setup.policies if name != comparison.base]
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for metric, words in METRICS.items():
        table.add_row(words, *(ratio_text(comparison.ratio(name, metric)).replace("[", r"\[") for name in others))
    return table


def _legend(comparison: Comparison) -> str:
    lines = [
        "ACT: seconds from the submission of an action to its end. step: until the last trajectory ends.",
        "load: what the work needs / what the pools give while it runs undisturbed.",
    ]
    if len(comparison.setup.policies) > 1:
        lines.append(
            "×: above 1 is better." + (" [95 % interval over seeds]" if len(comparison.setup.seeds) > 1 else "")
        )
    if comparison.setup.faults or comparison.warning():
        lines.append("completed: trajectories that reached their end, mean over seeds.")
    return "\n".join(lines)


def _print_json(comparisons: list[Comparison], reproduce: str) -> None:
    plain = [_as_dict(comparison) for comparison in comparisons]
    show.print_json({"label": "simulated", "command": reproduce, "comparisons": plain})
    for comparison in comparisons:
        if warning := comparison.warning():
            typer.echo(f"warning: {warning}", err=True)


def _as_dict(comparison: Comparison) -> dict[str, Any]:
    from tangram.sim.compare import METRICS

    setup = comparison.setup
    known = dict.fromkeys(metric for row in comparison.rows for metric in row.summary)
    return {
        "workload": setup.source.name,
        "size": setup.size,
        "seeds": setup.seeds,
        "knowledge": setup.knowledge,
        "load": comparison.load,
        "base": comparison.base,
        "policies": {
            name: {
                "mean": {metric: comparison.mean(name, metric) for metric in known},
                "ratio": {metric: comparison.ratio(name, metric) for metric in METRICS},
                "by_seed": {str(row.seed): row.summary for row in comparison.rows if row.policy == name},
            }
            for name in setup.policies
        },
    }
