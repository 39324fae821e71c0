"""`tangram trace`: download the trace of a shared service, and inspect traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from tangram.cli import options, show
from tangram.cli.options import Json, option_group
from tangram.cli.service_client import ServiceConnection, ServiceTarget, parse_target
from tangram.errors import InvalidConfig
from tangram.reports import live, terminal

if TYPE_CHECKING:
    from tangram.sim.trace_summary import RunTime, TraceSummary

EXAMPLES = """[bold]Examples[/bold]

tangram trace export live.jsonl  [dim]# download the trace of the service[/dim]

tangram trace show live.jsonl
"""

app = typer.Typer(
    help="Download the trace of a shared service; show and replay traces.", epilog=EXAMPLES, no_args_is_help=True
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace that --record or `trace export` wrote.")]

EXPORT = """[bold]Examples[/bold]

tangram trace export live.jsonl

tangram trace export live.jsonl --url https://tangram.example:7433 --token-file admin-token
"""


@app.command("export", epilog=EXPORT)
@option_group(target=parse_target)
def export(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The file to write, replaced atomically at the end. Creates its folder.",
        ),
    ],
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Download the trace of a running service, from its start until now (admin).

    `tangram sim` and `tangram plan` simulate it, for example to see whether fewer cores are enough.
    """
    import asyncio
    import shlex

    options.check_output_files(file=file)
    size, lines = asyncio.run(_download(target, file))
    if as_json:
        show.print_json({"file": str(file), "bytes": size, "lines": lines})
        return
    name = shlex.quote(str(file))
    typer.echo(f"{file}: {lines:,} lines, {size / (1 << 20):,.1f} MiB\ncommands for it:")
    for line in terminal.text_table([(f"tangram {verb} {name}", f"# {what}") for verb, what in NEXT_COMMANDS.items()]):
        typer.echo(f"  {line}")


NEXT_COMMANDS = {
    "sim --trace": "other policies on the same work",
    "plan --trace": "the fewest cores that are enough",
    "trace show": "its contents, and where the time went",
}


async def _download(target: ServiceTarget, path: Path) -> tuple[int, int]:
    """Download the trace; return its bytes and lines."""
    from tangram.files.atomic_file import atomic_write

    with live.progress("downloading the trace", unit="") as progress, atomic_write("file", path) as file:

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(done, total, f"{done / (1 << 20):,.1f} of {total / (1 << 20):,.1f} MiB")

        async with ServiceConnection(target) as connection:
            counted = _LineCounter(file)
            size = await connection.download("/v1/trace", counted.write, report)
    return size, counted.count


class _LineCounter:
    """Counts lines while they are written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self.count += piece.count(b"\n")


@app.command(
    "story",
    epilog="[bold]Example[/bold]\n\ntangram trace story run.jsonl coding/7.12.0",
)
def story(
    file: File,
    action: Annotated[
        str, typer.Argument(metavar="ID", help="The id of an action: TRAJECTORY.TURN.NUMBER, such as coding/7.12.0.")
    ],
    as_json: Json = False,
) -> None:
    """Show the events of one action, in order."""
    from tangram.core.messages import Submit
    from tangram.core.trace import describe, mentions
    from tangram.runtime.trace_recorder import open_trace

    values: list[Any] = []
    ids: list[str] = []
    with open_trace(file) as (_, lines):
        for line in lines:
            if mentions(line.message, action):
                values.append(line)
            elif not values and isinstance(line.message, Submit):
                ids.append(line.message.action.id)
    if not values:
        raise InvalidConfig("action", action, f"the id of an action in {file}{_nearest(action, ids)}")
    if as_json:
        show.print_json(values)
        return
    for line in values:
        typer.echo(describe(line.t, line.message))


def _nearest(action: str, ids: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(action, ids, n=3, cutoff=0.0)
    return f", such as {', '.join(near)}" if near else ", which holds none"


SHOW = """[bold]Examples[/bold]

tangram trace show run.jsonl

tangram trace show run.jsonl --perfetto run.json  [dim]# every action over time, for ui.perfetto.dev[/dim]
"""


@app.command("show", epilog=SHOW)
def show_trace(file: File, perfetto: options.Perfetto = None, as_json: Json = False) -> None:
    """Show the contents of a trace, and where the time of each run went."""
    from tangram.runtime.action_timeline import trace_of_recording
    from tangram.sim.trace_summary import summarize

    options.check_output_files(perfetto=perfetto)
    summary = summarize(file)
    if perfetto is not None:
        trace_of_recording(file).write(perfetto)
    if as_json:
        show.print_json(summary)
        return
    _print(file, summary)
    if perfetto is not None:
        show.print_trace_path(perfetto)


def _print(file: Path, summary: TraceSummary) -> None:
    console = terminal.stdout_console()
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(summary.messages.items()))
    pools = ", ".join(f"{name} {total:,}" for name, total in summary.pools.items())
    lines = [
        f"{file.name}: {sum(summary.messages.values()):,} lines from {summary.first_s:.1f} s to {summary.last_s:.1f} s",
        f"policy   {summary.policy}" + (f"  ({summary.note})" if summary.note else ""),
        f"pools    {pools or 'none'}",
        f"lines    {counts or 'none'}",
        f"actions  {sum(run.actions for run in summary.runs):,}, of which {summary.unsettled:,} never settled",
    ]
    console.print("\n".join(lines), highlight=False, markup=False)
    kinds = list(dict.fromkeys(kind for run in summary.runs for kind in run.waiting_s))
    numbers = ["trajectories", "actions", "thinking", *(f"waiting: {kind}" for kind in kinds), "executing", "overhead"]
    title = "where the time went, in seconds over all trajectories"
    table = terminal.table(title, "run", *numbers, "ended", right=numbers)
    for run in summary.runs:
        table.add_row(*_cells(run, kinds))
    console.print(table)


def _cells(run: RunTime, kinds: list[str]) -> list[str]:
    total_s = run.thinking_s + sum(run.waiting_s.values()) + run.execution_s + run.overhead_s

    def cell(seconds: float) -> str:
        return f"{seconds:,.0f} ({seconds / total_s:.0%})" if total_s else "0"

    waits = [cell(run.waiting_s[kind]) if kind in run.waiting_s else "-" for kind in kinds]
    ended = ", ".join(f"{count:,} {status}" for status, count in run.statuses.items())
    times = [cell(run.thinking_s), *waits, cell(run.execution_s), cell(run.overhead_s)]
    return [run.run, f"{run.trajectories:,}", f"{run.actions:,}", *times, ended]


@app.command("replay", epilog="[bold]Example[/bold]\n\ntangram trace replay run.jsonl")
def replay_trace(file: File, as_json: Json = False) -> None:
    """Feed the events to the scheduler again and check that it returns the same effects.

    Exits with 1 if it does not, and prints the first difference.
    """
    from tangram.sim.trace_summary import replay

    result = replay(file)
    if as_json:
        show.print_json(result)
    elif result.difference is None:
        typer.echo(
            f"the same: {result.events:,} events bring the same {result.effects:,} effects under {result.policy}"
        )
    else:
        difference = result.difference
        typer.echo(f"different after {result.events:,} events, at seq {difference.at_seq}:")
        typer.echo(f"  event     {difference.event}")
        for label, effects in (("recorded", difference.recorded), ("replayed", difference.replayed)):
            for effect in effects or ["nothing"]:
                typer.echo(f"  {label}  {effect}")
    if result.difference is not None:
        raise typer.Exit(1)
