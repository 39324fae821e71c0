"""`tangram status`: a shared service on one screen."""

from __future__ import annotations

from tangram.cli import service_client, show
from tangram.cli.options import Json, option_group
from tangram.cli.service_client import ServiceTarget, parse_target
from tangram.reports import terminal

EXAMPLES = """[bold]Examples[/bold]

tangram status

tangram status --url https://tangram.example:7433 --token-file admin-token

tangram status --json
"""


@option_group(target=parse_target)
def status(target: ServiceTarget, as_json: Json = False) -> None:
    """Show the state of a shared service: pools, queue, runs and sandboxes.

    The token of a run shows all of that run, and of other runs only the units that they hold.
    """
    view = service_client.fetch_view(target)
    if as_json:
        show.print_json(view)
        return
    from tangram.cli.screen import screen

    console = terminal.stdout_console()
    terminal.print_plain(console, screen(view, target.url, console))
