"""`tangram plan`: the smallest pool that reaches a target, against today's reservation."""

from __future__ import annotations

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
    output_file,
    seeds_of,
    seeds_text,
    sizes_of,
    source_of,
    workers_of,
)
from tangram.errors import InvalidConfig

if TYPE_CHECKING:
    from tangram.sim.plan import Plan, Point, Question

EXAMPLES = """[bold]Examples[/bold]

tangram plan  [dim]# cores for the mean ACT that pods of half a core have today[/dim]

tangram plan coding --batch 512 --target p95 --report plan.html

tangram plan coding --act 4  [dim]# cores for a mean ACT of 4 s[/dim]

tangram plan teachers --resource devices

tangram plan --trace run.jsonl --like pods:1@64
"""

BAR_WIDTH_MAX = 40
COLUMNS_BESIDE = 58
"""What the numbers of the table take."""


def plan(
    workload: WorkloadName = "",
    trace: Traces = None,
    target: Annotated[str, typer.Option("--target", metavar="mean|p95", help="Which ACT is to be reached.")] = "mean",
    act: Annotated[
        float | None, typer.Option("--act", metavar="SECONDS", help="The ACT to reach. Default: that of --like.")
    ] = None,
    like: Annotated[
        str,
        typer.Option(
            "--like",
            metavar="NAME@SIZE",
            help="Today's reservation, such as pods:1@256. Default: pods:0.5 with its request for every trajectory.",
        ),
    ] = "",
    resource: Annotated[
        str, typer.Option("--resource", metavar="cores|devices", help="The pool to size. Default: what the work uses.")
    ] = "",
    policy: Annotated[str, typer.Option("--policy", metavar="NAME", help="The policy to plan for.")] = "adaptive",
    batch: Batch = None,
    cores: Annotated[int | None, typer.Option("--cores", metavar="N", help="Cores, while devices are sized.")] = None,
    nodes: Nodes = None,
    memory_per_core: Memory = None,
    devices: Devices = None,
    seeds: Seeds = "",
    knowledge: KnowledgeOf = "learned",
    option: Options = None,
    report: Report = None,
    as_json: Json = False,
    workers: WorkerCount = None,
) -> None:
    """Find the fewest cores (or devices) with which a policy reaches a mean or p95 ACT.

    Simulates today's reservation, then closes in on the smallest size that does as well. Prints the curve.
    """
    from tangram.sim import plan as planning
    from tangram.sim.compare import check_policy, workload_of

    source = source_of(workload, trace, batch, option)
    chosen_seeds = seeds_of(seeds, source)
    first = workload_of(source, chosen_seeds[0])
    sizes = sizes_of(source, first, "" if cores is None else str(cores), nodes, memory_per_core, devices)
    name, size = _like(like)
    check_policy(policy)
    check_policy(name)
    question = planning.Question(
        source=source,
        size=sizes[0],
        resource=resource or ("cores" if sizes[0].cores else "devices"),
        policy=policy,
        target=target,
        act_s=act,
        like=name,
        like_size=size,
        seeds=chosen_seeds,
        knowledge=knowledge,
    )
    report = output_file("report", report)
    with show.progress(f"sizing {question.resource} for {source.name}") as progress:
        answer = planning.plan(question, workers=workers_of(workers), progress=progress)
    reproduce = _command(question, answer)
    if report is not None:
        from tangram.sim.report import write_plan

        write_plan(report, answer, reproduce)
    if as_json:
        show.as_json(_plain(answer, reproduce))
        return
    _print(answer)
    if report is not None:
        typer.echo(show.where_to_look(report))


def _like(text: str) -> tuple[str, int]:
    """`pods:0.5@64` is that baseline on 64; without a size, what it takes today."""
    from tangram.sim.plan import TODAY

    name, at, size = text.partition("@")
    if at and (not size.isdigit() or int(size) < 1):
        raise InvalidConfig("like", text, "NAME@SIZE with a whole number above 0, such as pods:0.5@64")
    return name or TODAY, int(size) if at else 0


def _command(question: Question, answer: Plan) -> str:
    size, seeds = question.size, question.seeds
    return command(
        "plan",
        question.source,
        {
            "target": question.target,
            "act": question.act_s,
            "like": f"{question.like}@{answer.reference.size}",
            "resource": question.resource,
            "policy": question.policy,
            "cores": size.cores if question.resource == "devices" else None,
            "nodes": size.nodes if size.nodes > 1 else None,
            "memory-per-core": size.memory_per_core_gib if size.cores else None,
            "devices": size.devices if question.resource == "cores" else None,
            "seeds": seeds_text(seeds),
            "knowledge": question.knowledge,
        },
    )


# ---- printing -------------------------------------------------------------------------------------------------


def _print(answer: Plan) -> None:
    console = show.console()
    column = "act_mean_s" if answer.target == "mean" else "act_p95_s"
    longest = max([getattr(point, column) for point in answer.points] + [answer.target_s])
    seeds = f"{len(answer.seeds)} seeds" if len(answer.seeds) > 1 else f"seed {answer.seeds[0]}"
    width = max(8, min(BAR_WIDTH_MAX, console.width - COLUMNS_BESIDE))
    table = show.table(f"{answer.workload}: {answer.resource} for {answer.policy}, {seeds} (simulated)")
    for head in (answer.resource, "mean ACT", "p95", "p99", "step", "in use"):
        table.add_column(head, justify="right")
    table.add_column("")
    table.add_column(f"{answer.target} ACT")
    for point in answer.points:
        mark = "[green]✓[/green]" if answer.reaches(point) else "[red]✗[/red]"
        style = "bold" if point.size == answer.smallest else ""
        table.add_row(*_cells(point), mark, _bar(getattr(point, column), longest, answer.target_s, width), style=style)
    table.add_section()
    reference = answer.reference
    table.add_row(*_cells(reference), "", f"{answer.like} today")
    console.print(table)
    console.print(answer.sentence(), highlight=False)


def _cells(point: Point) -> list[str]:
    from tangram.sim.words import percent, seconds

    values = (point.act_mean_s, point.act_p95_s, point.act_p99_s, point.step_s)
    return [str(point.size), *map(seconds, values), percent(point.use)]


def _bar(value: float, longest: float, target: float, width: int) -> str:
    """A bar in eighths of a character, with the target marked."""
    eighths = round(8 * width * value / longest)
    bar = "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
    place = min(width, round(width * target / longest))
    if place >= len(bar):
        return f"[cyan]{bar}[/cyan]{' ' * (place - len(bar))}[dim]│[/dim]"
    return f"[cyan]{bar[:place]}[/cyan][dim]│[/dim][cyan]{bar[place + 1 :]}[/cyan]"


def _plain(answer: Plan, reproduce: str) -> dict[str, Any]:
    import msgspec

    return {
        "label": "simulated",
        "command": reproduce,
        **msgspec.structs.asdict(answer),
        "saved": answer.saved,
    }
