"""`tangram token`: the runs of a shared service and their tokens. A token is printed once, alone on stdout."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tangram.cli import service_client, show
from tangram.cli.options import Json, option_group
from tangram.cli.service_client import RequestRejected, ServiceTarget, parse_target
from tangram.errors import InvalidConfig, TangramError
from tangram.reports import terminal
from tangram.reports.printable import escape_unprintable

if TYPE_CHECKING:
    from tangram.runtime.wire import Caps, RunReply, RunRequest

EXAMPLES = """[bold]Examples[/bold]

tangram token create nightly --weight 2

tangram token list
"""

app = typer.Typer(
    help="Create, renew, list, change and revoke the tokens of runs (admin).", epilog=EXAMPLES, no_args_is_help=True
)

EXIT_DECLINED = 1
WEIGHT = 1.0

NAME_RULE = "1 to 40 characters of a-z, 0-9 and '-', the first not '-'"
RunName = Annotated[str, typer.Argument(metavar="RUN", help=f"{NAME_RULE}.")]
Weight = Annotated[
    float | None,
    typer.Option("--weight", metavar="W", help="Weight in fair share, relative to 1 of the other runs."),
]
Sandboxes = Annotated[
    int | None,
    typer.Option(
        "--sandboxes", metavar="N", help="Open sandboxes, including function calls. 0: the limit of the config."
    ),
]
Waiting = Annotated[
    int | None,
    typer.Option("--waiting", metavar="N", help="Unfinished actions, waiting or running. 0: the limit of the config."),
]
Running = Annotated[
    int | None,
    typer.Option("--running", metavar="N", help="Actions that run at once; others wait. 0: the limit of the config."),
]
Requests = Annotated[
    float | None,
    typer.Option("--requests-per-s", metavar="R", help="HTTP requests per second. 0: the limit of the config."),
]
Network = Annotated[
    bool | None,
    typer.Option(
        "--network/--no-network", metavar="", help="Whether sandboxes of the run may use the network of the machine."
    ),
]

CAPS_MAX = 1e15


class RunChanges(NamedTuple):
    """What the options change of a run; None and absent fields stay as they are."""

    weight: float | None
    caps: dict[str, Any]

    def request(self, weight: float, caps: Caps) -> RunRequest:
        """The request that applies the changes to a run of this weight and these caps."""
        import msgspec

        from tangram.runtime.wire import RunRequest

        changed = msgspec.structs.replace(caps, **self.caps)
        return RunRequest(weight=weight if self.weight is None else self.weight, caps=changed)


def read_changes(
    weight: Weight = None,
    sandboxes: Sandboxes = None,
    waiting: Waiting = None,
    running: Running = None,
    requests_per_s: Requests = None,
    network: Network = None,
) -> RunChanges:
    """Read the options that `create` and `change` share; 0 removes a cap. Raises InvalidConfig."""
    if weight is not None and not 0.0 < weight < 1e9:
        raise InvalidConfig("weight", weight, "a number above 0 and below 1e9")
    options = {
        "sandboxes_max": ("sandboxes", sandboxes),
        "waiting_max": ("waiting", waiting),
        "running_max": ("running", running),
        "requests_per_s": ("requests-per-s", requests_per_s),
    }
    caps: dict[str, Any] = {}
    for field, (option, value) in options.items():
        if value is None:
            continue
        if not 0 <= value < CAPS_MAX:
            raise InvalidConfig(option, value, "a number above 0, or 0 for the value of the config")
        caps[field] = value or None
    if network is not None:
        caps["network"] = network
    return RunChanges(weight, caps)


CREATE = """[bold]Examples[/bold]

TOKEN=$(tangram token create math)

tangram token create math --weight 2 --sandboxes 100 --no-network
"""
RENEW = "[bold]Example[/bold]\n\nTOKEN=$(tangram token renew math)"
LIST = "[bold]Example[/bold]\n\ntangram token list"
CHANGE = """[bold]Examples[/bold]

tangram token change math --weight 3

tangram token change math --running 8 --sandboxes 0  [dim]# 0: the limit of the config[/dim]
"""
REVOKE = """[bold]Examples[/bold]

tangram token revoke math

tangram token revoke math --yes  [dim]# without confirmation[/dim]
"""


@app.command("create", epilog=CREATE)
@option_group(changes=read_changes, target=parse_target)
def create(
    run: RunName,
    changes: RunChanges,
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Create a run and print its token on stdout. The token cannot be shown again.

    The service stores only a hash of it. `tangram token renew` replaces a lost token.
    """
    from tangram.runtime.wire import Caps, RunReply

    _check_name(run)
    record = changes.request(WEIGHT, Caps())
    try:
        reply = service_client.request(target, "POST", f"/v1/runs/{service_client.quote_part(run)}", record, RunReply)
    except RequestRejected as error:
        if error.fault.limit != "run_exists":
            raise
        raise TangramError(
            f"there is a run {run}, and its token cannot be shown again: use `tangram token renew {run}` for another"
            f" one, or `token change {run}`"
        ) from None
    if as_json:
        show.print_json(reply)
        return
    typer.echo(escape_unprintable(reply.token))
    typer.echo(
        f"run {run} is created, with weight {reply.weight:g}; this is its token, which cannot be shown again."
        " Its training uses it as: export TANGRAM_TOKEN=...",
        err=True,
    )


@app.command("renew", epilog=RENEW)
@option_group(target=parse_target)
def renew(
    run: RunName,
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Replace the token of a run and print the new one. The old one is invalid immediately; sandboxes and actions
    continue."""
    from tangram.runtime.wire import RunReply

    _check_name(run)
    reply = service_client.request(target, "POST", f"/v1/runs/{service_client.quote_part(run)}/token", None, RunReply)
    if as_json:
        show.print_json(reply)
        return
    typer.echo(escape_unprintable(reply.token))
    typer.echo(f"this is the new token of run {run}; the old one is void.", err=True)


@app.command("list", epilog=LIST)
@option_group(target=parse_target)
def list_runs(target: ServiceTarget, as_json: Json = False) -> None:
    """List the runs that have a token, with their weights and caps."""
    reply = _runs(target)
    if as_json:
        show.print_json(reply)
        return
    console = terminal.stdout_console()
    if not reply:
        console.print("no run has a token; create one with: tangram token create RUN", highlight=False, markup=False)
        return
    table = terminal.table("runs with a token; a dash: as in the config")
    table.add_column("run", no_wrap=True)
    for head in ("weight", "sandboxes", "waiting", "running", "requests per s", "network", "made"):
        table.add_column(head, justify="right" if head != "made" else "left")
    for run in reply:
        caps = run.caps
        numbers = (caps.sandboxes_max, caps.waiting_max, caps.running_max, caps.requests_per_s)
        cells = ["-" if number is None else f"{number:,}" for number in numbers]
        network = {None: "-", True: "yes", False: "no"}[caps.network]
        created = (
            f"{_format_time(run.made_at)}, still ending: revoke it again" if run.ending else _format_time(run.made_at)
        )
        table.add_row(escape_unprintable(run.name), f"{run.weight:g}", *cells, network, created)
    console.print(table, markup=False, highlight=False, emoji=False)


@app.command("change", epilog=CHANGE)
@option_group(changes=read_changes, target=parse_target)
def change(
    run: RunName,
    changes: RunChanges,
    target: ServiceTarget,
    as_json: Json = False,
) -> None:
    """Change the weight or caps of a run. Its token and everything else stay the same."""
    from tangram.runtime.wire import RunReply

    if changes.weight is None and not changes.caps:
        raise InvalidConfig("change", run, "at least one change, such as --weight 2")
    before = next((each for each in _runs(target) if each.name == run), None)
    if before is None:
        raise InvalidConfig("run", run, "a run that has a token; `tangram token list` shows them")
    record = changes.request(before.weight, before.caps)
    after = service_client.request(target, "PATCH", f"/v1/runs/{service_client.quote_part(run)}", record, RunReply)
    if as_json:
        show.print_json(after)
        return
    typer.echo(f"{run}: weight {after.weight:g}{_caps_text(after.caps)}")


@app.command("revoke", epilog=REVOKE)
@option_group(target=parse_target)
def revoke(
    run: RunName,
    target: ServiceTarget,
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="Skip the confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Revoke the token of a run, cancel its actions and delete its sandboxes."""
    _check_name(run)
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise TangramError(
                f"revoking {escape_unprintable(run)} ends its actions and sandboxes: confirm it with --yes, as there is"
                " no terminal"
            )
        if not typer.confirm(f"{_revocation_effects(target, run)} Revoke {escape_unprintable(run)}?", err=True):
            typer.echo("nothing was changed", err=True)
            raise typer.Exit(EXIT_DECLINED)
    service_client.request(target, "DELETE", f"/v1/runs/{service_client.quote_part(run)}")
    if as_json:
        show.print_json({"revoked": run})
    else:
        typer.echo(f"{run}: its token is void, its actions and sandboxes have ended")


# ---- reading ----------------------------------------------------------------------------------------------------


def _check_name(run: str) -> None:
    """Raise InvalidConfig for a name that would change the meaning of the URL path."""
    from tangram.runtime.wire import RUN

    if not RUN.fullmatch(run):
        raise InvalidConfig("run", run, NAME_RULE)


def _runs(target: ServiceTarget) -> list[RunReply]:
    from tangram.runtime.wire import RunsReply

    reply = service_client.request(target, "GET", "/v1/runs", kind=RunsReply)
    assert isinstance(reply, RunsReply)
    return reply.runs


def _revocation_effects(target: ServiceTarget, run: str) -> str:
    from tangram.reports.formatting import pluralize

    view = service_client.fetch_view(target)
    run_view = next((each for each in view.runs if each.name == run), None)
    if run_view is None or not (run_view.waiting or run_view.running or run_view.sandboxes):
        return "It has no actions or sandboxes."
    actions = run_view.waiting + run_view.running
    sandboxes = pluralize(run_view.sandboxes, "sandbox", "sandboxes")
    return f"It has {pluralize(actions, 'action')} under way and {sandboxes}, which end."


def _caps_text(caps: Caps) -> str:
    import msgspec

    caps_set = {name: value for name, value in msgspec.structs.asdict(caps).items() if value is not None}
    if caps.network is not None:
        caps_set["network"] = "yes" if caps.network else "no"
    return "".join(f", {name} {value}" for name, value in caps_set.items())


def _format_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
