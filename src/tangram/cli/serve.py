"""`tangram serve`: the shared service, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tangram.cli.options import EXIT_META
from tangram.errors import TangramError

if TYPE_CHECKING:
    from tangram.config import Config
    from tangram.server.serve import Up

EXIT_FAILED = 1
"""It was up, and could not go on: a start may help, since what was acknowledged is in the journal. Whoever watches over
services tries it again, which it does not after EXIT_ERROR."""
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

EXAMPLES = """[bold]Examples[/bold]

tangram serve  [dim]# on 127.0.0.1:7433, for everybody on this machine[/dim]

tangram serve --config /etc/tangram/tangram.toml

tangram serve --config tangram.toml --check  [dim]# is the config right?[/dim]
"""


class OneLine(logging.Formatter):
    """A record is one line, whatever somebody put into it: what is not printable is escaped. Lines of a traceback are
    marked as such."""

    def format(self, record: logging.LogRecord) -> str:
        first, *more = super().format(record).split("\n") if record.exc_info else [super().format(record)]
        return "\n".join([_escaped(first), *(f"    | {_escaped(line)}" for line in more)])


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def serve(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="A TOML file; see docs/reference/config.md. Default: all defaults."
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Instead of what the config says.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", metavar="", help="Check the config and its files, and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", metavar="", help="Log more than what matters.")] = False,
) -> None:
    """Serve the pools of this machine to training runs on any machine, over HTTP.

    Acknowledged actions survive a crash. SIGTERM or Ctrl-C lets running actions end within a limit; what waits is taken
    up at the next start, and so are sandboxes. A second signal waits for nothing.
    """
    import asyncio

    from tangram.config import placed

    said = _config(config, listen)
    try:
        from tangram.server.serve import require_usable
        from tangram.server.serve import serve as run
    except ImportError as error:
        said_missing = f"the service needs {error.name}, which is not here: pip install 'arl-tangram[serve]'"
        raise TangramError(said_missing) from None
    with placed(config, () if listen is None else ("service.listen",)):
        if check:
            require_usable(said)
            typer.echo(f"{config or 'the defaults'}: right; would listen on {said.service.listen}")
            return
        _log(verbose)
        _allow_open_files()
        asyncio.run(run(said, on_up=lambda up: _tell(up, ctx)))


def _config(path: Path | None, listen: str | None) -> Config:
    import msgspec

    from tangram.config import Config, load, parse

    if path is not None:
        said = load(path)
    else:
        from tangram.managers.sandboxes.bwrap.owner import state_directory

        folder = state_directory() / "service"
        said = parse(f'[service]\njournal = "{folder}/journal.db"\nevent_log = "{folder}/events.jsonl"\n', "defaults")
    assert isinstance(said, Config)
    if listen is None:
        return said
    return msgspec.structs.replace(said, service=msgspec.structs.replace(said.service, listen=listen))


def _allow_open_files() -> None:
    """As many as may be: each action that is waited for holds a connection."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log(verbose: bool) -> None:
    told = logging.StreamHandler(sys.stderr)
    told.setFormatter(OneLine(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[told])
    logging.getLogger("uvicorn").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("tangram").setLevel(logging.DEBUG if verbose else logging.INFO)


def _tell(up: Up, ctx: typer.Context) -> None:
    """On stdout, for whoever waits for it."""
    ctx.meta[EXIT_META] = EXIT_FAILED
    typer.echo(f"{up.address}  dashboard and API; Ctrl-C stops")
    sys.stdout.flush()
