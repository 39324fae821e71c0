"""`tangram sim`: compare policies on a workload or a trace, on virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import show
from tangram.cli.options import (
    Batch,
    Devices,
    Json,
    KnowledgeOf,
    Memory,
    Nodes,
    Options,
    Report,
    Seeds,
    Traces,
    WorkerCount,
    WorkloadName,
    command,
    names,
    output_file,
    seeds_of,
    seeds_text,
    sizes_of,
    source_of,
    workers_of,
)
from tangram.errors import InvalidConfig

if TYPE_CHECKING:
    from tangram.sim.compare import Comparison, Setup
    from tangram.sim.episode import Workload

EXAMPLES = """[bold]Examples[/bold]

tangram sim  [dim]# coding agents: today's pods against three policies[/dim]

tangram sim coding --batch 512 --cores 16,32,64 --report report.html

tangram sim teachers --devices 16 --policies fcfs,adaptive

tangram sim elastic --option load=0.9 --option exponent=0.45 --seeds 10

tangram sim coding --policies adaptive --record run.jsonl

tangram sim --trace run.jsonl --policies fcfs,adaptive
"""


def sim(
    workload: WorkloadName = "",
    trace: Traces = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            metavar="A,B,C",
            help="fcfs, fixed:K, paper, adaptive, adaptive:no-resize; pods:R is a pod of R cores per trajectory, alone"
            " what no scheduler can beat. Default: pods:0.5,fcfs,paper,adaptive.",
        ),
    ] = "",
    batch: Batch = None,
    cores: Annotated[str, typer.Option("--cores", metavar="N,...", help="Cores in all; a table for each number.")] = "",
    nodes: Nodes = None,
    memory_per_core: Memory = None,
    devices: Devices = None,
    seeds: Seeds = "",
    knowledge: KnowledgeOf = "learned",
    faults: Annotated[int, typer.Option("--faults", metavar="N", help="Seeded faults in each simulation.")] = 0,
    ageing: Annotated[
        float | None,
        typer.Option("--ageing", metavar="S", help="Seconds after which no later action of its run overtakes one."),
    ] = None,
    option: Options = None,
    base: Annotated[
        str, typer.Option("--base", metavar="NAME", help="What ratios are taken against. Default: the first policy.")
    ] = "",
    report: Report = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="Record the last-named policy under the first seed."),
    ] = None,
    as_json: Json = False,
    workers: WorkerCount = None,
) -> None:
    """Compare scheduling policies on the same work, on virtual time.

    Prints the action completion time (ACT) under each, and how many times less it is than under the first.
    """
    from tangram.sim.compare import Setup, compare, workload_of

    source = source_of(workload, trace, batch, option)
    chosen_seeds = seeds_of(seeds, source)
    first = workload_of(source, chosen_seeds[0])
    chosen = names("policies", policies) if policies else _usual_policies(first, faults)
    setups = [
        Setup(
            source=source,
            size=size,
            policies=chosen,
            seeds=chosen_seeds,
            base=base,
            knowledge=knowledge,
            faults=faults,
            ageing_s=ageing,
        )
        for size in sizes_of(source, first, cores, nodes, memory_per_core, devices)
    ]
    for setup in setups:
        setup.size.pools(first)
    report, record = output_file("report", report), output_file("record", record)
    _check_record(record, knowledge)
    with show.progress(f"simulating {source.name}") as progress:
        comparisons = compare(
            setups, workers=workers_of(workers), keep=report is not None, record_to=record, progress=progress
        )
    if report is not None:
        from tangram.sim.report import write_comparison

        write_comparison(report, comparisons, _command(setups))
    if as_json:
        show.as_json(_plain(comparisons, _command(setups)))
        return
    _print(comparisons)
    if record is not None:
        typer.echo(f"recorded {chosen[-1]} under seed {chosen_seeds[0]} in {record}")
    if report is not None:
        typer.echo(show.where_to_look(report))


def _usual_policies(first: Workload, faults: int) -> tuple[str, ...]:
    """Today's pods first, where there is something to reserve pods or devices for."""
    from tangram.sim.size import pods_can_run

    if pods_can_run(first) and not faults:
        return ("pods:0.5", "fcfs", "paper", "adaptive")
    return ("fcfs", "fixed:4", "paper", "adaptive")


def _check_record(record: Path | None, knowledge: str) -> None:
    if record is not None and knowledge == "perfect":
        raise InvalidConfig(
            "knowledge", knowledge, "learned or hints with --record: what is known must be in the trace"
        )


def _command(setups: list[Setup]) -> str:
    setup = setups[0]
    seeds, size = setup.seeds, setup.size
    return command(
        "sim",
        setup.source,
        {
            "policies": ",".join(setup.policies),
            "cores": ",".join(str(each.size.cores) for each in setups if each.size.cores),
            "nodes": size.nodes if size.cores and size.nodes > 1 else None,
            "memory-per-core": size.memory_per_core_gib if size.cores else None,
            "devices": size.devices,
            "seeds": seeds_text(seeds),
            "knowledge": setup.knowledge,
            "faults": setup.faults,
            "ageing": setup.ageing_s,
            "base": setup.base,
        },
    )


# ---- printing -------------------------------------------------------------------------------------------------


def _print(comparisons: list[Comparison]) -> None:
    console = show.console()
    for comparison in comparisons:
        console.print(_seconds_table(comparison))
        if len(comparison.setup.policies) > 1:
            console.print(_ratio_table(comparison))
    console.print(_legend(comparisons[0]), highlight=False, markup=False)


def _seconds_table(comparison: Comparison) -> Any:
    from tangram.sim.words import percent, seconds, several

    setup = comparison.setup
    trajectories = several(round(comparison.mean(setup.policies[0], "trajectories")), "trajectory", "trajectories")
    seeds = several(len(setup.seeds), "seed") if len(setup.seeds) > 1 else f"seed {setup.seeds[0]}"
    on = f"{trajectories} on {setup.size.describe()}"
    table = show.table(f"{setup.source.name}: {on}, {seeds}, {comparison.load.describe()} (simulated)")
    table.add_column("policy", no_wrap=True)
    heads = ["mean ACT", "waiting", "p50", "p95", "p99", "step"]
    use = "core_use" if setup.size.cores else "device_use" if setup.size.devices else ""
    failed = any(comparison.mean(name, "failed") for name in setup.policies)
    for head in [*heads, *(["in use"] if use else []), *(["failed"] if failed else [])]:
        table.add_column(head, justify="right")
    metrics = ("act_mean_s", "waiting_mean_s", "act_p50_s", "act_p95_s", "act_p99_s", "step_s")
    for name in setup.policies:
        cells = [name, *(seconds(comparison.mean(name, metric)) for metric in metrics)]
        cells += [percent(comparison.mean(name, use))] if use else []
        cells += [f"{comparison.mean(name, 'failed'):.1f}"] if failed else []
        table.add_row(*cells)
    return table


def _ratio_table(comparison: Comparison) -> Any:
    from tangram.sim.compare import METRICS
    from tangram.sim.words import times

    table = show.table(f"times less than {comparison.base}")
    table.add_column("", no_wrap=True)
    others = [name for name in comparison.setup.policies if name != comparison.base]
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for metric, words in METRICS.items():
        table.add_row(words, *(times(comparison.ratio(name, metric)).replace("[", r"\[") for name in others))
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
    if any(comparison.mean(name, "failed") for name in comparison.setup.policies):
        lines.append(
            "failed: trajectories that ended early because an action was refused or lost; their rest is missing."
        )
    return "\n".join(lines)


def _plain(comparisons: list[Comparison], reproduce: str) -> dict[str, Any]:
    return {"label": "simulated", "command": reproduce, "comparisons": [_plain_one(each) for each in comparisons]}


def _plain_one(comparison: Comparison) -> dict[str, Any]:
    from tangram.sim.compare import METRICS

    setup = comparison.setup
    return {
        "workload": setup.source.name,
        "size": setup.size,
        "seeds": setup.seeds,
        "knowledge": setup.knowledge,
        "load": comparison.load,
        "base": comparison.base,
        "policies": {
            name: {
                "mean": {metric: comparison.mean(name, metric) for metric in comparison.rows[0].summary},
                "ratio": {metric: comparison.ratio(name, metric) for metric in METRICS},
                "by_seed": {str(row.seed): row.summary for row in comparison.rows if row.policy == name},
            }
            for name in setup.policies
        },
    }
