"""`tangram where`: where the time of each run's trajectories went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tangram.cli import service_client, show
from tangram.cli.options import Json, option_group
from tangram.cli.service_client import ServiceTarget, parse_target
from tangram.reports import terminal
from tangram.reports.printable import escape_unprintable

if TYPE_CHECKING:
    from tangram.runtime.views import RunView, TimeBreakdown, View

EXAMPLES = """[bold]Examples[/bold]

tangram where

tangram where --url https://tangram.example:7433 --json
"""

KINDS_SHOWN = 6
"""Kinds of waiting with a column; the smaller ones share one."""
OTHERS = "others"


@option_group(target=parse_target)
def where(target: ServiceTarget, as_json: Json = False) -> None:
    """Show where the time of trajectories went: per run, the shares of waiting, execution and thinking.

    The total is the time from the first submission of each trajectory to the end of its last action, since the start
    of the service. Only actions that have ended count.
    """
    view = service_client.fetch_view(target)
    if as_json:
        show.print_json([_as_dict(run) for run in view.runs])
    else:
        _print(view)


def _as_dict(run: RunView) -> dict[str, Any]:
    breakdown = run.time_breakdown
    return {"run": run.name, "time_breakdown": breakdown, "shares": _shares(breakdown)}


def _shares(breakdown: TimeBreakdown) -> dict[str, Any]:
    """Shares of the total time; they add up to 1, or are all 0."""
    total = breakdown.total_s or 1.0
    return {
        "waiting": {kind: seconds / total for kind, seconds in breakdown.waiting_s.items()},
        "execution": breakdown.execution_s / total,
        "overhead": breakdown.overhead_s / total,
        "thinking": breakdown.thinking_s / total,
    }


def _print(view: View) -> None:
    from tangram.reports.formatting import duration, percent

    sums: dict[str, float] = {}
    for run in view.runs:
        for kind, seconds in run.time_breakdown.waiting_s.items():
            sums[kind] = sums.get(kind, 0.0) + seconds
    kinds = sorted(sums, key=lambda kind: -sums[kind])[:KINDS_SHOWN]
    others = len(sums) > len(kinds)
    table = terminal.table("where the time of trajectories went")
    table.add_column("run", no_wrap=True)
    waits = [f"waiting: {escape_unprintable(kind)}" for kind in kinds] + ([f"waiting: {OTHERS}"] if others else [])
    for head in ("time in all", "thinking", *waits, "executing", "overhead"):
        table.add_column(head, justify="right")
    for run in sorted(view.runs, key=lambda run: -run.time_breakdown.total_s):
        breakdown = run.time_breakdown
        shown = [breakdown.waiting_s.get(kind, 0.0) for kind in kinds]
        rest = [sum(breakdown.waiting_s.values()) - sum(shown)] if others else []
        parts = [breakdown.thinking_s, *shown, *rest, breakdown.execution_s, breakdown.overhead_s]
        total_s = breakdown.total_s
        cells = [percent(each / total_s if min(each, total_s) > 0.0 else None) for each in parts]
        table.add_row(escape_unprintable(run.name), duration(breakdown.total_s), *cells)
    console = terminal.stdout_console()
    if not view.runs:
        terminal.print_plain(console, "no run has been active since the service started")
        return
    terminal.print_plain(console, table)
    terminal.print_plain(console, "waiting: start is the time from the grant of an action to its start")
