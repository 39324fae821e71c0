"""`tangram status`: a shared service on one screen."""

from __future__ import annotations

from tangram.cli import service_client, show
from tangram.cli.options import Json
from tangram.cli.service_client import URL, Ca, Token, TokenFile, Url

EXAMPLES = """[bold]Examples[/bold]

tangram status

tangram status --url https://tangram.example:7433 --token-file admin-token

tangram status --json
"""


def status(
    url: Url = URL, token: Token = None, token_file: TokenFile = None, ca: Ca = None, as_json: Json = False
) -> None:
    """Show what a shared service is doing: pools, queue, runs and sandboxes.

    With the token of a run that run alone; of others only what they hold.
    """
    target = service_client.target(url, token, token_file, ca)
    view = service_client.view_of(target)
    if as_json:
        show.as_json(view)
        return
    from tangram.cli.screen import put, screen

    console = show.console()
    put(console, screen(view, target.url, console))
