"""`tangram plan`: the smallest pool that reaches a target, against today's reservation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import options, show
from tangram.errors import InvalidConfig
from tangram.reports import live, terminal

if TYPE_CHECKING:
    from tangram.sim.compare import Source
    from tangram.sim.plan import Plan, PlanRequest, Point

EXAMPLES = """[bold]Examples[/bold]

tangram plan  [dim]# cores for the mean ACT that pods of half a core have today[/dim]

tangram plan coding --batch 512 --target p95 --report plan.html

tangram plan coding --act 4  [dim]# cores for a mean ACT of 4 s[/dim]

tangram plan teachers --resource devices

tangram plan --trace run.jsonl  [dim]# would fewer cores be enough?[/dim]

tangram plan --trace run.jsonl --like pods:1@64
"""

BAR_WIDTH_MAX = 40
COLUMNS_BESIDE = 58
"""Columns that the numbers of the table take."""


def plan(
    workload: options.WorkloadName = None,
    trace: options.Traces = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="mean|p95",
            help="The statistic of the ACT that must be at most --act: the mean or the 95th percentile.",
        ),
    ] = "mean",
    act: Annotated[
        float | None,
        typer.Option("--act", metavar="SECONDS", help="The ACT to reach. Default: the ACT of --like."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="NAME@SIZE",
            help="The baseline and its size, such as pods:1@256. Default: for a recording, its policy and pools;"
            " otherwise pods:0.5 with a pod for every trajectory, and fixed devices for every service.",
        ),
    ] = None,
    resource: Annotated[
        str | None,
        typer.Option(
            "--resource", metavar="cores|devices", help="The pool to size. Default: cores if the workload uses any."
        ),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", metavar="NAME", help="The policy to plan for.")] = "adaptive",
    batch: options.Batch = None,
    cores: Annotated[
        int | None,
        typer.Option("--cores", metavar="N", help="Cores, if devices are sized. Default: as in tangram sim."),
    ] = None,
    nodes: options.Nodes = None,
    memory_per_core: options.Memory = None,
    devices: options.Devices = None,
    seeds: options.Seeds = None,
    knowledge: options.KnowledgeOf = "learned",
    option: options.Options = None,
    report: options.Report = None,
    as_json: options.Json = False,
    workers: options.WorkerCount = None,
) -> None:
    """Find the fewest cores (or devices) with which a policy reaches a mean or p95 ACT.

    Simulates the baseline, then searches for the smallest size that performs as well, and prints the curve.
    """
    from tangram.sim import plan as planning
    from tangram.sim.compare import check_policy
    from tangram.sim.report import write_plan

    total = None if cores is None else str(cores)
    work = options.workload_request(workload, trace, batch, option, seeds, total, nodes, memory_per_core, devices)
    resource = ("cores" if work.sizes[0].cores else "devices") if resource is None else resource
    recorded = like is None and _recorded(work.source, resource)
    name, size = recorded or _parse_like(like)
    check_policy(policy)
    check_policy(name)
    request = planning.PlanRequest(
        source=work.source,
        size=work.sizes[0],
        resource=resource,
        policy=policy,
        target=target,
        act_s=act,
        like=name,
        like_size=size,
        recorded=bool(recorded),
        seeds=work.seeds,
        knowledge=knowledge,
    )
    options.check_output_files(report=report)
    with live.progress(f"sizing {request.resource} for {work.source.name}") as progress:
        plan = planning.plan(request, workers=options.check_workers(workers), progress=progress)
    reproduce = _command(request, plan)
    try:
        if report is not None:
            write_plan(report, plan, reproduce)
    finally:
        # The answer is printed even if the report cannot be written.
        if as_json:
            show.print_json(_as_dict(plan, reproduce))
        else:
            _print(plan)
    if report is not None and not as_json:
        show.print_report_path(report)


def _recorded(source: Source, resource: str) -> tuple[str, int] | None:
    """Returns the policy and the size of a recording; None if it does not contain them."""
    from tangram.sim.recordings import recorded_policy, recorded_size

    recording = options.recording_of(source)
    size = recorded_size(recording) if recording else None
    amount = 0 if size is None else size.devices if resource == "devices" else size.cores
    return (recorded_policy(recording), amount) if amount else None


def _parse_like(text: str | None) -> tuple[str, int]:
    """`pods:0.5@64` is that baseline on 64 units; without a size, on today's reservation."""
    from tangram.sim.plan import REFERENCE_POLICY

    if text is None:
        return REFERENCE_POLICY, 0
    name, at, size = text.partition("@")
    if not name or (at and (not size.isdigit() or int(size) < 1)):
        raise InvalidConfig("like", text, "NAME@SIZE with a whole number above 0, such as pods:0.5@64")
    return name, int(size) if at else 0


def _command(request: PlanRequest, plan: Plan) -> str:
    size = request.size
    return options.reproduce_command(
        "plan",
        request.source,
        size,
        request.seeds,
        {
            "target": request.target,
            "act": request.act_s,
            "like": None if request.recorded else f"{request.like}@{plan.reference.size}",
            "resource": request.resource,
            "policy": request.policy,
            "cores": size.cores if request.resource == "devices" else None,
            "devices": size.devices if request.resource == "cores" else None,
            "knowledge": request.knowledge,
        },
    )


# ---- printing -------------------------------------------------------------------------------------------------


def _print(plan: Plan) -> None:
    from tangram.sim.plan import NUMBERS, TARGETS

    console = terminal.stdout_console()
    column = TARGETS[plan.target]
    reached = [getattr(point, column) for point in plan.points]
    longest = max(value for value in [*reached, plan.target_s] if value < math.inf)
    width = max(8, min(BAR_WIDTH_MAX, console.width - COLUMNS_BESIDE))
    table = terminal.table(
        f"{plan.workload}: {plan.resource} for {plan.policy}, {show.seeds_text(plan.seeds)} (simulated)"
    )
    for head in (plan.resource, *NUMBERS.values(), "in use"):
        table.add_column(head, justify="right")
    table.add_column("")
    table.add_column(f"{plan.target} ACT")
    for point, value in zip(plan.points, reached, strict=True):
        mark = "[green]✓[/green]" if plan.reaches(point) else "[red]✗[/red]"
        style = "bold" if point.size == plan.smallest else ""
        bar = terminal.marked_bar(min(value, longest) / longest, plan.target_s / longest, width, "cyan")
        table.add_row(*_cells(plan, point), mark, bar, style=style)
    table.add_section()
    table.add_row(
        *_cells(plan, plan.reference),
        "",
        f"{plan.today}, as recorded" if plan.recorded else f"{plan.today} today",
    )
    console.print(table)
    console.print(plan.sentence(), highlight=False, markup=False)


def _cells(plan: Plan, point: Point) -> list[str]:
    from tangram.reports.formatting import percent

    return [str(point.size), *plan.describe_point(point), percent(point.use)]


def _as_dict(plan: Plan, reproduce: str) -> dict[str, Any]:
    import msgspec

    return {
        "label": "simulated",
        "command": reproduce,
        **msgspec.structs.asdict(plan),
        "saved": plan.saved,
    }
