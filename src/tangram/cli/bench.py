"""`tangram bench`: the benchmarks and their goals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import options, show
from tangram.errors import InvalidConfig

if TYPE_CHECKING:
    from tangram.bench import BenchResult

EXAMPLES = """[bold]Examples[/bold]

tangram bench coding --quick

tangram bench coding --trace traces/  [dim]# on recorded trajectories as well[/dim]

tangram bench all --json
"""


def bench(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="coding, elastic, sizing, scheduler-cost, or all. Without one: the list."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Fewer seeds and sizes; each ends within a minute.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object per benchmark and nothing else on stdout.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="Folder with recorded traces to play as well.")
    ] = None,
    workers: options.WorkerCount = None,
) -> None:
    """Run a benchmark, all its sides on the same work, and say which goals it meets."""
    from tangram.bench import BENCHES, run
    from tangram.sim.workloads.options import known

    if name is None:
        _list(BENCHES, as_json)
        return
    known("bench", name, [*BENCHES, "all"])
    processes = options.workers_of(workers)
    if trace is not None and not trace.is_dir():
        raise InvalidConfig("trace", str(trace), "a folder that exists")
    for each in BENCHES if name == "all" else [name]:
        with show.progress(f"bench {each}", unit="") as progress:
            tell = None if progress is None else lambda share, progress=progress: progress(share, 1)
            result = run(each, quick=quick, trace=trace, processes=processes, progress=tell)
        if as_json:
            import msgspec

            typer.echo(msgspec.json.encode(result).decode())
        else:
            _print(result)


def _list(benches: dict[str, str], as_json: bool) -> None:
    if as_json:
        show.as_json(benches)
        return
    for name, description in benches.items():
        typer.echo(f"{name:<16} {description}")


def _print(result: BenchResult) -> None:
    console = show.console()
    table = show.table(f"{result.name} ({result.label})")
    for head, justify in (("metric", "left"), ("value", "right"), ("95 %", "right"), ("goal", "right"), ("", "left")):
        table.add_column(head, justify=justify)  # type: ignore[arg-type]
    for name, value in result.metrics.items():
        low, high = result.spread.get(name, (None, None))
        spread = f"[{_number(low)}, {_number(high)}]" if low is not None and high is not None else ""
        table.add_row(name, _number(value), spread.replace("[", r"\["), *_goal(result.goals.get(name), value))
    console.print(table)
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    console.print(f"settings: {settings}", highlight=False, markup=False)
    for note in result.notes:
        console.print(note, highlight=False, markup=False)


def _goal(goal: Any, value: float) -> tuple[str, str]:
    if goal is None:
        return "", ""
    if goal.value is None:
        return "printed", ""
    met = goal.met(value)
    mark = "" if met is None else "[green]✓ met[/green]" if met else "[red]✗ missed[/red]"
    return f"{goal.op} {_number(goal.value)}", mark


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
