"""`tangram top`: a shared service on one screen, refreshed until Ctrl-C; it outlives restarts of the service."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.cli import service_client
from tangram.cli.options import option_group
from tangram.cli.service_client import ServiceConnection, ServiceTarget, ServiceUnreachable, parse_target
from tangram.errors import InvalidConfig
from tangram.reports import live, terminal
from tangram.reports.printable import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tangram.runtime.views import View

EVERY_S_MIN, EVERY_S_MAX = 0.1, 3600.0

EXAMPLES = """[bold]Examples[/bold]

tangram top

tangram top --every 5 --url https://tangram.example:7433

tangram top --once  [dim]# one frame, as `tangram status`[/dim]
"""


@option_group(target=parse_target)
def top(
    target: ServiceTarget,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="Print the state once and exit. Default without a terminal.")
    ] = False,
) -> None:
    """Watch a shared service: pools, queue, runs and sandboxes, refreshed every second.

    Ctrl-C ends it. While the service is down or restarts, the screen shows the last state and the error.
    """
    if not (math.isfinite(every) and EVERY_S_MIN <= every <= EVERY_S_MAX):
        raise InvalidConfig("every", every, f"seconds from {EVERY_S_MIN} to {EVERY_S_MAX:g}")
    if once or not sys.stdout.isatty():
        from tangram.cli.screen import screen

        console = terminal.stdout_console()
        terminal.print_plain(console, screen(service_client.fetch_view(target), target.url, console))
        return
    ended_by = asyncio.run(live.run_until_signal(_frames(target, every)))
    if ended_by == signal.SIGTERM:
        raise typer.Exit(128 + signal.SIGTERM)


async def _frames(target: ServiceTarget, every: float) -> None:
    from rich.console import Console

    from tangram.runtime.views import View

    console = Console(markup=False, highlight=False, emoji=False)
    last: View | None = None
    with live.full_screen(console) as show_frame:
        show_frame(_waiting(None, target, "", console))
        async with ServiceConnection(target) as connection:
            while True:
                try:
                    last = await connection.request("GET", "/v1/view", kind=View)
                except ServiceUnreachable as error:
                    show_frame(_waiting(last, target, str(error), console))
                else:
                    show_frame(_frame(last, target, console, console.height))
                await asyncio.sleep(every)


def _frame(view: View, target: ServiceTarget, console: Console, height: int) -> RenderableType:
    from tangram.cli.screen import screen

    return screen(view, target.url, console, height=height)


def _waiting(view: View | None, target: ServiceTarget, why: str, console: Console) -> RenderableType:
    """The last state, below the reason why there is no newer one."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble(("waiting for the service", "bold yellow"), f" at {target.url}", no_wrap=True)
    reason = Text(escape_unprintable(why), style="dim", no_wrap=True, overflow="ellipsis")
    if view is None:
        return Group(head, reason)
    return Group(head, reason, Text("last state:", style="dim"), _frame(view, target, console, console.height - 3))
