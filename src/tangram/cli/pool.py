"""`tangram pool`: list and resize the pools of a shared service, drain and undrain its nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.cli import service_client, show
from tangram.cli.options import Json, option_group
from tangram.cli.service_client import RequestRejected, ResourceNotFound, ServiceTarget, parse_target
from tangram.core.demand import CORE
from tangram.errors import InvalidConfig, TangramError
from tangram.reports import terminal
from tangram.reports.printable import escape_unprintable

if TYPE_CHECKING:
    from tangram.runtime.error_records import ErrorRecord
    from tangram.runtime.views import PoolView, View

EXAMPLES = """[bold]Examples[/bold]

tangram pool list

tangram pool resize cpu@local 12  [dim]# cores[/dim]
"""

app = typer.Typer(help="List and resize pools, drain and undrain nodes (admin).", epilog=EXAMPLES, no_args_is_help=True)

MIB = 1 << 20
UNITS_MAX = 1 << 53
POOLS_MAX = 1_000_000
"""`list` shows all pools."""

PoolName = Annotated[
    str, typer.Argument(metavar="NAME", help="A pool of a machine, such as cpu@local; see tangram pool list.")
]
NodeName = Annotated[
    str,
    typer.Argument(metavar="NODE", help="The name of the node, after the @ in the names of its pools, such as local."),
]

LIST = "[bold]Example[/bold]\n\ntangram pool list"
RESIZE = """[bold]Examples[/bold]

tangram pool resize cpu@local 12  [dim]# cores[/dim]

tangram pool resize memory@local 64GiB
"""
DRAIN = "[bold]Example[/bold]\n\ntangram pool drain local"
UNDRAIN = "[bold]Example[/bold]\n\ntangram pool undrain local"


@app.command("list", epilog=LIST)
@option_group(target=parse_target)
def list_pools(target: ServiceTarget, as_json: Json = False) -> None:
    """List the pools: use, size, and the number of waiting actions."""
    from tangram.cli.screen import pools

    view = service_client.fetch_view(target)
    if as_json:
        show.print_json(view.pools)
        return
    console = terminal.stdout_console()
    unicode = terminal.is_unicode(console)
    terminal.print_plain(console, pools(view.pools, unicode=unicode, most=POOLS_MAX))


@app.command("resize", epilog=RESIZE)
@option_group(target=parse_target)
def resize(
    name: PoolName,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Cores, memory such as 64GiB, or a number of devices.")],
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Change the size of a pool, up to its size at the start of the service.

    Running actions and open sandboxes keep their units, so a pool shrinks as they end. Actions that need more than the
    new size are lost after scheduler.stranded_s of the config. A restart restores the size of the config.
    """
    from tangram.cli.screen import amount, amount_with_unit
    from tangram.runtime.views import View
    from tangram.runtime.wire import PoolRequest

    current = service_client.fetch_view(target)
    before = _pool(current, name)
    if not before.node:
        raise TangramError(f"{escape_unprintable(name)} cannot be resized; these can: {_node_pool_names(current)}")
    record = PoolRequest(total=parse_units(size, before))
    try:
        view = service_client.request(target, "PATCH", f"/v1/pools/{service_client.quote_part(name)}", record, View)
    except RequestRejected as error:
        raise InvalidConfig(f"size of {escape_unprintable(name)}", size, _readable_limit(error.fault, before)) from None
    after = _pool(view, name)
    if as_json:
        show.print_json(after)
        return
    typer.echo(
        f"{escape_unprintable(name)}: {amount_with_unit(after.total, after)}, was {amount(before.total, before)}"
    )
    if after.held > after.total:
        held = amount_with_unit(after.held, after)
        verb = "is held and comes" if amount(after.held, after) == "1" else "are held and come"
        over = f"{held} {verb} back as actions and sandboxes end"
        typer.echo(f"{over}; until then no more units are granted", err=True)
    if not after.total:
        lost = "actions that need it wait, and are lost after scheduler.stranded_s of the config (300 s unless it says"
        typer.echo(f"warning: {escape_unprintable(name)} has no units left to grant: {lost} otherwise)", err=True)


@app.command("drain", epilog=DRAIN)
@option_group(target=parse_target)
def drain(
    node: NodeName,
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Drain a node: it accepts no new sandboxes and no actions without a sandbox.

    Actions in its open sandboxes continue. New sandboxes wait or open on other nodes.
    """
    _set_node_state(target, node, "draining", as_json)


@app.command("undrain", epilog=UNDRAIN)
@option_group(target=parse_target)
def undrain(
    node: NodeName,
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Let a drained node accept sandboxes and actions again."""
    _set_node_state(target, node, "up", as_json)


def _set_node_state(target: ServiceTarget, node: str, state: str, as_json: bool) -> None:
    from tangram.reports.formatting import pluralize
    from tangram.runtime.views import View
    from tangram.runtime.wire import NodeRequest

    record = NodeRequest(state=state)  # type: ignore[arg-type]
    try:
        view = service_client.request(target, "PATCH", f"/v1/nodes/{service_client.quote_part(node)}", record, View)
    except ResourceNotFound:
        known = sorted({pool.node for pool in service_client.fetch_view(target).pools if pool.node})
        raise InvalidConfig("node", node, f"one of {', '.join(map(escape_unprintable, known)) or 'none'}") from None
    running = sum(action.node == node for action in view.running)
    sandboxes = sum(sandbox.node == node for sandbox in view.sandboxes)
    if as_json:
        show.print_json({"node": node, "state": state, "running": running, "sandboxes": sandboxes})
    elif state == "up":
        typer.echo(f"{escape_unprintable(node)} is up: it accepts new sandboxes and actions again")
    else:
        state_text = f"{escape_unprintable(node)} is draining: it accepts no new sandboxes and no actions without one"
        verb = "runs" if running == 1 else "run"
        typer.echo(
            f"{state_text}; it has {pluralize(sandboxes, 'sandbox', 'sandboxes')},"
            f" and {pluralize(running, 'action')} {verb} there"
        )


# ---- reading ----------------------------------------------------------------------------------------------------


def _pool(view: View, name: str) -> PoolView:
    pool_view = next((pool for pool in view.pools if pool.name == name), None)
    if pool_view is None:
        raise InvalidConfig("pool", name, f"one of {_node_pool_names(view)}")
    return pool_view


def _node_pool_names(view: View) -> str:
    """The names of the pools that belong to a machine and can be resized."""
    return ", ".join(escape_unprintable(pool.name) for pool in view.pools if pool.node) or "none"


def parse_units(text: str, pool: PoolView) -> int:
    """Parse a size into units of the pool. Raises InvalidConfig."""
    from tangram.core.sizes import parse_size

    if pool.unit == "milli-cores":
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?: ?cores?)?", text.strip())
        if match is None:
            raise InvalidConfig("size", text, "a number of cores, such as 12 or 0.5")
        return round(float(match[1]) * CORE)
    if pool.unit == "MiB":
        if re.fullmatch(r"[0-9.]*", text.strip()) and text.strip() != "0":
            raise InvalidConfig("size", text, f"a size with its unit, such as {text.strip() or '64'}GiB")
        return parse_size("size", text, least=0, most=UNITS_MAX, error=InvalidConfig) // MIB
    if not re.fullmatch(r"[0-9]{1,15}", text.strip()):
        raise InvalidConfig("size", text, f"a whole number of {escape_unprintable(pool.unit)}")
    return int(text)


def _readable_limit(fault: ErrorRecord, pool: PoolView) -> str:
    """The limit from an error of the service, converted from units of the pool to cores or GiB."""
    from tangram.cli.screen import amount_with_unit

    most = re.fullmatch(r"at most (\d+)", fault.expected)
    if most is None:
        return escape_unprintable(fault.expected or fault.message)
    return f"at most {amount_with_unit(int(most[1]), pool)}"
