"""`tangram bench`: the benchmarks and their goals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import options, show
from tangram.errors import InvalidConfig
from tangram.reports import live, terminal

if TYPE_CHECKING:
    from tangram.bench import BenchResult
    from tangram.bench.base import Progress

EXAMPLES = """[bold]Examples[/bold]

tangram bench reservation --report report.html  [dim]# real sandboxes, needs root[/dim]

tangram bench reservation --perfetto reservation.json  [dim]# both sides over time, for ui.perfetto.dev[/dim]

tangram bench coding --quick

tangram bench coding --trace traces/  [dim]# on recorded trajectories as well[/dim]

tangram bench all --json
"""


def bench(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="reservation, coding, elastic and others, or all. Without it: list all benchmarks."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Fewer seeds and sizes; each benchmark ends within a minute.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object per benchmark and nothing else on stdout.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="Folder with recorded traces to play as well.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="For reservation and learning: write an HTML page; reservation also writes its recordings to the"
            " same folder. Creates the folder. With all: one page per benchmark, with its name in the file name.",
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            "--perfetto",
            metavar="FILE",
            help="For reservation: write the timeline of both sides as a Chrome trace (JSON) to open in"
            " https://ui.perfetto.dev. Creates its folder.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="For reservation, durability, soak and step: sandbox, or process, which isolates nothing. Default:"
            " sandbox; without root, process.",
        ),
    ] = None,
    workers: options.WorkerCount = None,
) -> None:
    """Run all sides of a benchmark on the same work and print which goals it meets."""
    from tangram.bench import BENCHES, options_of, run
    from tangram.sim.workloads.options import check_choice

    if name is None:
        _list(BENCHES, as_json)
        return
    check_choice("bench", name, [*BENCHES, "all"])
    processes = options.check_workers(workers)
    if trace is not None and not trace.is_dir():
        raise InvalidConfig("trace", str(trace), "a folder that exists")
    options.check_output_files(report=report, perfetto=perfetto)
    options_given = {"report": report, "perfetto": perfetto, "backend": backend}
    set_options = {option: value for option, value in options_given.items() if value is not None}
    for each in BENCHES if name == "all" else [name]:
        bench_options = {
            option: value for option, value in set_options.items() if name != "all" or option in options_of(each)
        }
        if "report" in bench_options and report is not None and name == "all":  # each has a page of its own
            bench_options["report"] = report.with_name(f"{report.stem}-{each}{report.suffix}")
        if "backend" in options_of(each):
            bench_options["backend"] = backend or _usual_backend()
        with live.progress(f"bench {each}", unit="") as progress:
            share_progress = None if progress is None else _share_callback(progress)
            result = run(each, quick=quick, trace=trace, processes=processes, progress=share_progress, **bench_options)
        if as_json:
            import msgspec

            typer.echo(msgspec.json.encode(result).decode())
        else:
            _print(result)
            if isinstance(page := bench_options.get("report"), Path):
                show.print_report_path(page)
            if isinstance(timeline := bench_options.get("perfetto"), Path):
                show.print_trace_path(timeline)


def _share_callback(progress: live.ProgressCallback) -> Progress:
    return lambda share, words="": progress(share, 1, words)


def _usual_backend() -> str:
    from tangram.bench.base import default_backend

    backend, why = default_backend()
    if why:
        typer.echo(f"{why}: the programs run as plain processes instead, which isolates nothing", err=True)
    return backend


def _list(benches: dict[str, str], as_json: bool) -> None:
    if as_json:
        show.print_json(benches)
        return
    for line in terminal.text_table(list(benches.items())):
        typer.echo(line)


def _print(result: BenchResult) -> None:
    console = terminal.stdout_console()
    if result.sides:
        console.print(_sides(result))
    numbers = ("value", "95 %", "goal")
    table = terminal.table(f"{result.name} ({result.label})", "metric", *numbers, "", right=numbers)
    for name, value in result.metrics.items():
        low, high = result.spread.get(name, (None, None))
        spread = f"[{_number(low)}, {_number(high)}]" if low is not None and high is not None else ""
        table.add_row(name, _number(value), spread.replace("[", r"\["), *_goal(result.goals.get(name), value))
    console.print(table)
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    console.print(f"settings: {settings}", highlight=False, markup=False)
    for note in result.notes:
        console.print(note, highlight=False, markup=False)


SIDE_LABELS = {
    "act_mean_s": "mean ACT",
    "act_p50_s": "p50",
    "act_p99_s": "p99",
    "waiting_mean_s": "waiting, in the mean",
    "step_s": "step",
    "core_use": "core use",
    "held_share": "held by an action, unused",
    "thinking_share": "reserved while the agent thinks",
    "wanted_share": "free while an action waits",
    "unwanted_share": "free, no action waiting",
    "others_use": "used by other programs",
    "reward_mean": "reward",
    "waiting_share": "waiting, share of the mean",
    "device_use": "device use",
    "restores_per_call": "restores per call",
}
"""The labels of the numbers of a side."""


def _sides(result: BenchResult) -> Any:
    """A table with a column for each side."""
    from tangram.reports.formatting import percent, seconds

    table = terminal.table(f"{result.name} ({result.label}), means over seeds", "", *result.sides, right=result.sides)
    for name in next(iter(result.sides.values())):
        format_value = seconds if name.endswith("_s") else percent if name.endswith(("_use", "_share")) else _number
        table.add_row(SIDE_LABELS.get(name, name), *(format_value(numbers[name]) for numbers in result.sides.values()))
    return table


def _goal(goal: Any, value: float) -> tuple[str, str]:
    if goal is None:
        return "", ""
    if goal.value is None:
        return "printed", ""
    met = goal.is_met(value)
    mark = "" if met is None else "[green]✓ met[/green]" if met else "[red]✗ missed[/red]"
    return f"{goal.op} {_number(goal.value)}", mark


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
