"""`tangram top`: a shared service on one screen, live.

Owns the screen while it runs, and gives it back however it ends. A service that goes away is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.cli import service_client, show
from tangram.cli.service_client import URL, Ca, Connection, Target, Token, TokenFile, Unreachable, Url, plain
from tangram.errors import InvalidConfig

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tangram.runtime.views import View

EVERY_S_MIN, EVERY_S_MAX = 0.1, 3600.0

EXAMPLES = """[bold]Examples[/bold]

tangram top

tangram top --every 5 --url https://tangram.example:7433

tangram top --once  [dim]# one frame, as `tangram status`[/dim]
"""


def top(
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="How often to look.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="Print one frame and end, as without a terminal.")
    ] = False,
) -> None:
    """Watch a shared service: pools, queue, runs and sandboxes, each second anew.

    Ctrl-C ends it. While the service is down or restarts it says so and waits.
    """
    if not (math.isfinite(every) and EVERY_S_MIN <= every <= EVERY_S_MAX):
        raise InvalidConfig("every", every, f"seconds from {EVERY_S_MIN} to {EVERY_S_MAX:g}")
    target = service_client.target(url, token, token_file, ca)
    if once or not sys.stdout.isatty():
        from tangram.cli.screen import put, screen

        console = show.console()
        put(console, screen(service_client.view_of(target), target.url, console))
        return
    ended_by = asyncio.run(_watch(target, every))
    if ended_by == signal.SIGTERM:
        raise typer.Exit(128 + signal.SIGTERM)


async def _watch(target: Target, every: float) -> int:
    """Until a signal, which it returns."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    watching = asyncio.ensure_future(_frames(target, every))
    try:
        await asyncio.wait({watching, signalled}, return_when=asyncio.FIRST_COMPLETED)
        return signalled.result() if signalled.done() else await watching
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        for number in numbers:
            loop.remove_signal_handler(number)


async def _frames(target: Target, every: float) -> int:
    from rich.console import Console
    from rich.live import Live

    from tangram.runtime.views import View

    console = Console(markup=False, highlight=False, emoji=False)
    last: View | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(_waiting(None, target, "", console), refresh=True)
        async with Connection(target) as connection:
            while True:
                try:
                    last = await connection.ask("GET", "/v1/view", kind=View)
                except Unreachable as error:
                    frame = _waiting(last, target, str(error), console)
                else:
                    frame = _frame(last, target, console, console.height)
                live.update(frame, refresh=True)
                await asyncio.sleep(every)


def _frame(view: View, target: Target, console: Console, height: int) -> RenderableType:
    from tangram.cli.screen import screen

    return screen(view, target.url, console, height=height)


def _waiting(view: View | None, target: Target, why: str, console: Console) -> RenderableType:
    """What was there last stays to be read."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble(("waiting for the service", "bold yellow"), f" at {target.url}", no_wrap=True)
    told = Text(plain(why), style="dim", no_wrap=True, overflow="ellipsis")
    if view is None:
        return Group(head, told)
    return Group(head, told, Text("as it was:", style="dim"), _frame(view, target, console, console.height - 3))
