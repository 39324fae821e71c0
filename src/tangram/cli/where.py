"""`tangram where`: where the time of each run's trajectories went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tangram.cli import service_client, show
from tangram.cli.options import Json
from tangram.cli.service_client import URL, Ca, Token, TokenFile, Url, plain

if TYPE_CHECKING:
    from tangram.runtime.views import RunView, Spending, View

EXAMPLES = """[bold]Examples[/bold]

tangram where

tangram where --url https://tangram.example:7433 --json
"""

KINDS_SHOWN = 6
"""Columns of waiting, those that cost most; the others are one together."""
OTHERS = "others"


def where(
    url: Url = URL, token: Token = None, token_file: TokenFile = None, ca: Ca = None, as_json: Json = False
) -> None:
    """Where did the time go? Per run, the share of trajectory time spent waiting, executing and thinking.

    Of all time between the first submission of each trajectory and its last end, since the service began. What is under
    way counts when it is over.
    """
    view = service_client.view_of(service_client.target(url, token, token_file, ca))
    if as_json:
        show.as_json([_plain(run) for run in view.runs])
    else:
        _print(view)


def _plain(run: RunView) -> dict[str, Any]:
    spending = run.spending
    return {"run": run.name, "spending_s": spending, "shares": _shares(spending)}


def _shares(spending: Spending) -> dict[str, Any]:
    """Of the total, from 0 to 1; they add up to 1, or are all 0."""
    total = spending.total_s or 1.0
    return {
        "waiting": {kind: seconds / total for kind, seconds in spending.waiting_s.items()},
        "execution": spending.execution_s / total,
        "overhead": spending.overhead_s / total,
        "thinking": spending.thinking_s / total,
    }


def _print(view: View) -> None:
    from tangram.cli.screen import duration, put

    sums: dict[str, float] = {}
    for run in view.runs:
        for kind, seconds in run.spending.waiting_s.items():
            sums[kind] = sums.get(kind, 0.0) + seconds
    kinds = sorted(sums, key=lambda kind: -sums[kind])[:KINDS_SHOWN]
    others = len(sums) > len(kinds)
    table = show.table("where the time of trajectories went")
    table.add_column("run", no_wrap=True)
    waits = [f"waiting: {plain(kind)}" for kind in kinds] + ([f"waiting: {OTHERS}"] if others else [])
    for head in ("time in all", "thinking", *waits, "executing", "overhead"):
        table.add_column(head, justify="right")
    for run in sorted(view.runs, key=lambda run: -run.spending.total_s):
        spending = run.spending
        shown = [spending.waiting_s.get(kind, 0.0) for kind in kinds]
        rest = [sum(spending.waiting_s.values()) - sum(shown)] if others else []
        parts = [spending.thinking_s, *shown, *rest, spending.execution_s, spending.overhead_s]
        cells = [_percent(seconds, spending.total_s) for seconds in parts]
        table.add_row(plain(run.name), duration(spending.total_s), *cells)
    console = show.console()
    if not view.runs:
        put(console, "no run has done anything since the service began")
        return
    put(console, table)
    put(console, "waiting: start is what was granted and had yet to be started")


def _percent(seconds: float, total: float) -> str:
    if total <= 0.0 or seconds <= 0.0:
        return "-"
    return f"{seconds / total:.1%}"
