"""`tangram token`: the runs of a shared service and their tokens.

Owns no token: one is printed when it is made, alone on stdout, and never again.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tangram.cli import service_client, show
from tangram.cli.options import Json
from tangram.cli.service_client import URL, Ca, Refused, Target, Token, TokenFile, Url, plain
from tangram.errors import InvalidConfig, TangramError

if TYPE_CHECKING:
    from tangram.runtime.wire import Caps, RunReply

app = typer.Typer(help="Make, list, change and revoke the tokens of runs (admin).", no_args_is_help=True)

EXIT_DECLINED = 1
WEIGHT = 1.0

NAMES = "1 to 40 of a-z, 0-9 and '-', the first no '-'"
RunName = Annotated[str, typer.Argument(metavar="RUN", help=f"{NAMES}.")]
Weight = Annotated[
    float | None,
    typer.Option("--weight", metavar="W", help="What it gets of what several want, against 1 of the others."),
]
Sandboxes = Annotated[
    int | None,
    typer.Option("--sandboxes", metavar="N", help="Open at once, calls of functions included. 0: as the config says."),
]
Waiting = Annotated[
    int | None,
    typer.Option("--waiting", metavar="N", help="Actions under way, waiting or running. 0: as the config says."),
]
Running = Annotated[
    int | None,
    typer.Option("--running", metavar="N", help="Actions that run at once; others wait. 0: as the config says."),
]
Requests = Annotated[
    float | None, typer.Option("--requests-per-s", metavar="R", help="Over HTTP. 0: as the config says.")
]
Network = Annotated[
    bool | None,
    typer.Option(
        "--network/--no-network", metavar="", help="Whether its sandboxes may have the network of the machine."
    ),
]

CREATE = """[bold]Examples[/bold]

TOKEN=$(tangram token create math)

tangram token create math --weight 2 --sandboxes 100 --no-network
"""
RENEW = "[bold]Example[/bold]\n\nTOKEN=$(tangram token renew math)"
LIST = "[bold]Example[/bold]\n\ntangram token list"
CHANGE = """[bold]Examples[/bold]

tangram token change math --weight 3

tangram token change math --running 8 --sandboxes 0  [dim]# 0: as the config says[/dim]
"""
REVOKE = """[bold]Examples[/bold]

tangram token revoke math

tangram token revoke math --yes  [dim]# asks nothing[/dim]
"""


@app.command("create", epilog=CREATE)
def create(
    run: RunName,
    weight: Weight = None,
    sandboxes: Sandboxes = None,
    waiting: Waiting = None,
    running: Running = None,
    requests_per_s: Requests = None,
    network: Network = None,
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Make a run, and print its token: alone on stdout, and only this once.

    Only a hash of it is kept. Who has lost it gets another one with `tangram token renew`.
    """
    from tangram.runtime.wire import Caps, RunReply, RunRequest

    _check_name(run)
    target = service_client.target(url, token, token_file, ca)
    caps = _changed(Caps(), sandboxes, waiting, running, requests_per_s, network)
    record = RunRequest(weight=_weight(weight, WEIGHT), caps=caps)
    try:
        made = service_client.asked(target, "POST", f"/v1/runs/{service_client.part(run)}", record, RunReply)
    except Refused as error:
        if error.fault.limit != "run_exists":
            raise
        said = f"there is a run {run}, and its token cannot be shown again"
        raise TangramError(
            f"{said}: use `tangram token renew {run}` for another one, or `token change {run}`"
        ) from None
    if as_json:
        show.as_json(made)
        return
    typer.echo(plain(made.token))
    said = f"run {run} is made, with weight {made.weight:g}; this is its token, which nobody can show again."
    typer.echo(f"{said} Its training uses it as: export TANGRAM_TOKEN=...", err=True)


@app.command("renew", epilog=RENEW)
def renew(
    run: RunName,
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Give a run another token, and print it: the old one is void from now on, and all that the run has stays."""
    from tangram.runtime.wire import RunReply

    _check_name(run)
    target = service_client.target(url, token, token_file, ca)
    made = service_client.asked(target, "POST", f"/v1/runs/{service_client.part(run)}/token", None, RunReply)
    if as_json:
        show.as_json(made)
        return
    typer.echo(plain(made.token))
    typer.echo(f"this is the token of run {run} from now on; the one before is void.", err=True)


@app.command("list", epilog=LIST)
def list_runs(
    url: Url = URL, token: Token = None, token_file: TokenFile = None, ca: Ca = None, as_json: Json = False
) -> None:
    """List the runs that have a token, with what each may have."""
    found = _runs(service_client.target(url, token, token_file, ca))
    if as_json:
        show.as_json(found)
        return
    console = show.console()
    if not found:
        console.print("no run has a token; make one with: tangram token create RUN", highlight=False, markup=False)
        return
    table = show.table("runs with a token; a dash: as the config says")
    table.add_column("run", no_wrap=True)
    for head in ("weight", "sandboxes", "waiting", "running", "requests per s", "network", "made"):
        table.add_column(head, justify="right" if head != "made" else "left")
    for run in found:
        caps = run.caps
        numbers = (caps.sandboxes_max, caps.waiting_max, caps.running_max, caps.requests_per_s)
        cells = ["-" if number is None else f"{number:,}" for number in numbers]
        network = {None: "-", True: "yes", False: "no"}[caps.network]
        made = f"{_day(run.made_at)}, not quite ended: revoke it again" if run.ending else _day(run.made_at)
        table.add_row(plain(run.name), f"{run.weight:g}", *cells, network, made)
    console.print(table, markup=False, highlight=False, emoji=False)


@app.command("change", epilog=CHANGE)
def change(
    run: RunName,
    weight: Weight = None,
    sandboxes: Sandboxes = None,
    waiting: Waiting = None,
    running: Running = None,
    requests_per_s: Requests = None,
    network: Network = None,
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Change the weight or the caps of a run; what is not said stays. Its token stays the same."""
    from tangram.runtime.wire import RunReply, RunRequest

    if all(value is None for value in (weight, sandboxes, waiting, running, requests_per_s, network)):
        raise InvalidConfig("change", run, "at least one thing to change, such as --weight 2")
    target = service_client.target(url, token, token_file, ca)
    before = next((each for each in _runs(target) if each.name == run), None)
    if before is None:
        raise InvalidConfig("run", run, "a run that has a token; `tangram token list` shows them")
    caps = _changed(before.caps, sandboxes, waiting, running, requests_per_s, network)
    record = RunRequest(weight=_weight(weight, before.weight), caps=caps)
    after = service_client.asked(target, "PATCH", f"/v1/runs/{service_client.part(run)}", record, RunReply)
    if as_json:
        show.as_json(after)
        return
    typer.echo(f"{run}: weight {after.weight:g}{_told(after.caps)}")


@app.command("revoke", epilog=REVOKE)
def revoke(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="Do it without asking.")] = False,
    url: Url = URL,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Revoke the token of a run, and end all that it has: its actions are cancelled, its sandboxes are deleted."""
    _check_name(run)
    target = service_client.target(url, token, token_file, ca)
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise TangramError(f"revoking {plain(run)} ends all that it has: say --yes, as nobody is here to be asked")
        if not typer.confirm(f"{_what_ends(target, run)} Revoke {plain(run)}?", err=True):
            typer.echo("nothing was changed", err=True)
            raise typer.Exit(EXIT_DECLINED)
    service_client.asked(target, "DELETE", f"/v1/runs/{service_client.part(run)}")
    if as_json:
        show.as_json({"revoked": run})
    else:
        typer.echo(f"{run}: its token is no longer taken, and all that it had has ended")


# ---- reading ----------------------------------------------------------------------------------------------------


def _check_name(run: str) -> None:
    """Before it becomes a part of an address, where another name could mean something else."""
    from tangram.runtime.wire import RUN

    if not RUN.fullmatch(run):
        raise InvalidConfig("run", run, NAMES)


def _runs(target: Target) -> list[RunReply]:
    from tangram.runtime.wire import RunsReply

    found = service_client.asked(target, "GET", "/v1/runs", kind=RunsReply)
    assert isinstance(found, RunsReply)
    return found.runs


def _what_ends(target: Target, run: str) -> str:
    from tangram.reports.formatting import several

    view = service_client.view_of(target)
    found = next((each for each in view.runs if each.name == run), None)
    if found is None or not (found.waiting or found.running or found.sandboxes):
        return "It has nothing under way."
    actions = found.waiting + found.running
    boxes = several(found.sandboxes, "sandbox", "sandboxes")
    return f"It has {several(actions, 'action')} under way and {boxes}, which end."


def _weight(said: float | None, before: float) -> float:
    if said is not None and not 0.0 < said < 1e9:
        raise InvalidConfig("weight", said, "a number above 0 and below 1e9")
    return before if said is None else said


def _changed(
    caps: Caps,
    sandboxes: int | None,
    waiting: int | None,
    running: int | None,
    requests_per_s: float | None,
    network: bool | None,
) -> Caps:
    """With what was said; 0 takes a cap away."""
    import msgspec

    said: dict[str, Any] = {
        "sandboxes_max": ("sandboxes", sandboxes),
        "waiting_max": ("waiting", waiting),
        "running_max": ("running", running),
        "requests_per_s": ("requests-per-s", requests_per_s),
    }
    new: dict[str, Any] = {}
    for field, (option, value) in said.items():
        if value is None:
            continue
        if not 0 <= value < 1e15:
            raise InvalidConfig(option, value, "a number above 0, or 0: as the config says")
        new[field] = value or None
    if network is not None:
        new["network"] = network
    return msgspec.structs.replace(caps, **new)


def _told(caps: Caps) -> str:
    import msgspec

    said = {name: value for name, value in msgspec.structs.asdict(caps).items() if value is not None}
    words = [f"{name} {'yes' if value is True else 'no' if value is False else value}" for name, value in said.items()]
    return "".join(f", {each}" for each in words)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
