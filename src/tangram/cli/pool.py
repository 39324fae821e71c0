"""`tangram pool`: the pools of a shared service, their sizes, and nodes that are to be left."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.cli import service_client, show
from tangram.cli.options import Json
from tangram.cli.service_client import URL, Ca, NotThere, Refused, Target, Token, TokenFile, Url, plain
from tangram.core.demand import CORE
from tangram.errors import InvalidConfig, TangramError

if TYPE_CHECKING:
    from tangram.runtime.error_records import Fault
    from tangram.runtime.views import PoolView, View

app = typer.Typer(help="Look at pools, change their size, and empty nodes (admin).", no_args_is_help=True)

MIB = 1 << 20
UNITS_MAX = 1 << 53
POOLS_MAX = 1_000_000
"""The list is cut nowhere."""

PoolName = Annotated[
    str, typer.Argument(metavar="NAME", help="Of a pool of a machine, such as cpu@local; see tangram pool list.")
]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="What stands behind the @ of its pools, such as local.")]

LIST = "[bold]Example[/bold]\n\ntangram pool list"
RESIZE = """[bold]Examples[/bold]

tangram pool resize cpu@local 12  [dim]# cores[/dim]

tangram pool resize memory@local 64GiB
"""
DRAIN = "[bold]Example[/bold]\n\ntangram pool drain local"
UNDRAIN = "[bold]Example[/bold]\n\ntangram pool undrain local"


@app.command("list", epilog=LIST)
def list_pools(
    url: Url = URL, token: Token = None, token_file: TokenFile = None, ca: Ca = None, as_json: Json = False
) -> None:
    """List the pools: how much of each is in use, and how many actions wait for it."""
    from tangram.cli.screen import pools, put

    view = service_client.view_of(service_client.target(url, token, token_file, ca))
    if as_json:
        show.as_json(view.pools)
        return
    console = show.console()
    fancy = console.encoding.lower().startswith("utf")
    put(console, pools(view.pools, fancy=fancy, most=POOLS_MAX))


@app.command("resize", epilog=RESIZE)
def resize(
    name: PoolName,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Cores, memory such as 64GiB, or a number of devices.")],
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Change how much of a machine the service gives out, up to what it had at its start.

    What is held stays held: a smaller pool is reached when enough has ended. What asks for more than a pool then has is
    lost after scheduler.stranded_s of the config. The next start has the size of the config.
    """
    from tangram.cli.screen import amount, measured
    from tangram.runtime.views import View
    from tangram.runtime.wire import PoolRequest

    target = service_client.target(url, token, token_file, ca)
    found = service_client.view_of(target)
    before = _pool(found, name)
    if not before.node:
        raise TangramError(f"{plain(name)} cannot be resized; these can: {_of_nodes(found)}")
    record = PoolRequest(total=units(size, before))
    try:
        view = service_client.asked(target, "PATCH", f"/v1/pools/{service_client.part(name)}", record, View)
    except Refused as error:
        raise InvalidConfig(f"size of {plain(name)}", size, _for_people(error.fault, before)) from None
    after = _pool(view, name)
    if as_json:
        show.as_json(after)
        return
    typer.echo(f"{plain(name)}: {measured(after.total, after)}, was {amount(before.total, before)}")
    if after.held > after.total:
        held = measured(after.held, after)
        verb = "is held and comes" if amount(after.held, after) == "1" else "are held and come"
        over = f"{held} {verb} back as actions and sandboxes end"
        typer.echo(f"{over}; until then nothing more is given out", err=True)
    if not after.total:
        lost = "actions that need it wait, and are lost after scheduler.stranded_s of the config (300 s unless it says"
        typer.echo(f"warning: {plain(name)} has nothing left to give: {lost} otherwise)", err=True)


@app.command("drain", epilog=DRAIN)
def drain(
    node: NodeName,
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Let a node run empty: it takes no new sandbox, and no action without one.

    What has its sandbox there goes on; new sandboxes wait, or are opened on other nodes.
    """
    _change(service_client.target(url, token, token_file, ca), node, "draining", as_json)


@app.command("undrain", epilog=UNDRAIN)
def undrain(
    node: NodeName,
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Take a node up again that was drained."""
    _change(service_client.target(url, token, token_file, ca), node, "up", as_json)


def _change(target: Target, node: str, state: str, as_json: bool) -> None:
    from tangram.reports.formatting import several
    from tangram.runtime.views import View
    from tangram.runtime.wire import NodeRequest

    record = NodeRequest(state=state)  # type: ignore[arg-type]
    try:
        view = service_client.asked(target, "PATCH", f"/v1/nodes/{service_client.part(node)}", record, View)
    except NotThere:
        known = sorted({pool.node for pool in service_client.view_of(target).pools if pool.node})
        raise InvalidConfig("node", node, f"one of {', '.join(map(plain, known)) or 'none'}") from None
    running = sum(action.node == node for action in view.running)
    boxes = sum(box.node == node for box in view.sandboxes)
    if as_json:
        show.as_json({"node": node, "state": state, "running": running, "sandboxes": boxes})
    elif state == "up":
        typer.echo(f"{plain(node)} is up: it takes new sandboxes and actions again")
    else:
        said = f"{plain(node)} is draining: it takes no new sandbox, and no action without one"
        verb = "runs" if running == 1 else "run"
        typer.echo(
            f"{said}; it has {several(boxes, 'sandbox', 'sandboxes')}, and {several(running, 'action')} {verb} there"
        )


# ---- reading ----------------------------------------------------------------------------------------------------


def _pool(view: View, name: str) -> PoolView:
    found = next((pool for pool in view.pools if pool.name == name), None)
    if found is None:
        raise InvalidConfig("pool", name, f"one of {_of_nodes(view)}")
    return found


def _of_nodes(view: View) -> str:
    """The names of those that are part of a machine, and have a size to change."""
    return ", ".join(plain(pool.name) for pool in view.pools if pool.node) or "none"


def units(text: str, pool: PoolView) -> int:
    """A size as people write it, in what the pool counts in."""
    from tangram.core.sizes import in_bytes

    if pool.unit == "milli-cores":
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?: ?cores?)?", text.strip())
        if found is None:
            raise InvalidConfig("size", text, "a number of cores, such as 12 or 0.5")
        return round(float(found[1]) * CORE)
    if pool.unit == "MiB":
        if re.fullmatch(r"[0-9.]*", text.strip()) and text.strip() != "0":
            raise InvalidConfig("size", text, f"a size with its unit, such as {text.strip() or '64'}GiB")
        return in_bytes("size", text, least=0, most=UNITS_MAX, error=InvalidConfig) // MIB
    if not re.fullmatch(r"[0-9]{1,15}", text.strip()):
        raise InvalidConfig("size", text, f"a whole number of {plain(pool.unit)}")
    return int(text)


def _for_people(fault: Fault, pool: PoolView) -> str:
    """What would be right, which the service says in the units of the pool, in those of people."""
    from tangram.cli.screen import measured

    most = re.fullmatch(r"at most (\d+)", fault.expected)
    if most is None:
        return plain(fault.expected or fault.message)
    return f"at most {measured(int(most[1]), pool)}"
