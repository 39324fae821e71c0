"""`tangram story`: the events of one action of a shared service."""

from __future__ import annotations

from typing import Annotated

import typer

from tangram.cli import service_client, show
from tangram.cli.options import Json, option_group
from tangram.cli.service_client import ResourceNotFound, ServiceTarget, parse_target
from tangram.reports.printable import escape_unprintable

EXAMPLES = """[bold]Examples[/bold]

tangram story math/5160dd16a34e-2.10

tangram story math/5160dd16a34e-2.10 --json
"""


@option_group(target=parse_target)
def story(
    action: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The id in `tangram status` and the dashboard, or the id that the run chose.",
        ),
    ],
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Show the events of one action of a shared service, and why it waits or how it ended."""
    from tangram.runtime.views import Story

    place = "/".join(service_client.quote_part(part) for part in action.split("/"))
    try:
        reply = service_client.request(target, "GET", f"/v1/actions/{place}/story", kind=Story)
    except ResourceNotFound:
        name = escape_unprintable(action)
        message = (
            f"there is no action {name}: it never was, its run is not that of the token (the admin names the run too:"
        )
        message += f" RUN/{name}), or it settled too long ago"
        raise ResourceNotFound(f"{message}; `tangram trace export` has all", retry=False) from None
    if as_json:
        show.print_json(reply)
        return
    typer.echo(
        f"{escape_unprintable(reply.id)}  {escape_unprintable(reply.name)} of run {escape_unprintable(reply.run)}:"
        f" {escape_unprintable(reply.status)}"
    )
    if reply.explanation:
        typer.echo(escape_unprintable(reply.explanation))
    for line in reply.lines:
        typer.echo(f"{line.at_s:12.3f} s  {escape_unprintable(line.text)}")
