"""`tangram story`: what happened to one action of a shared service."""

from __future__ import annotations

from typing import Annotated

import typer

from tangram.cli import service_client, show
from tangram.cli.options import Json
from tangram.cli.service_client import URL, Ca, NotThere, Token, TokenFile, Url, plain

EXAMPLES = """[bold]Examples[/bold]

tangram story math/5160dd16a34e-2.10

tangram story math/5160dd16a34e-2.10 --json
"""


def story(
    action: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="As `tangram status` and the dashboard show it, or as the run of the token chose it."
        ),
    ],
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Tell all that happened to one action of a shared service, in order, and why it waits or how it ended."""
    from tangram.runtime.views import Story

    target = service_client.target(url, token, token_file, ca)
    place = "/".join(service_client.part(part) for part in action.split("/"))
    try:
        found = service_client.asked(target, "GET", f"/v1/actions/{place}/story", kind=Story)
    except NotThere:
        id = plain(action)
        said = f"there is no action {id}: it never was, its run is another than that of the token (the admin names the"
        said += f" run too: RUN/{id}), or it settled too long ago"
        raise NotThere(f"{said}; `tangram trace export` has all", retry=False) from None
    if as_json:
        show.as_json(found)
        return
    typer.echo(f"{plain(found.id)}  {plain(found.name)} of run {plain(found.run)}: {plain(found.status)}")
    if found.explanation:
        typer.echo(plain(found.explanation))
    for line in found.lines:
        typer.echo(f"{line.at_s:12.3f} s  {plain(line.text)}")
