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
    from tangram.server.serve import RunningServer

EXIT_FAILED = 1
"""The service failed while it ran. A restart may help, since acknowledged actions are in the journal: a supervisor
restarts it after this code, not after EXIT_ERROR."""
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

EXAMPLES = """[bold]Examples[/bold]

tangram serve  [dim]# on 127.0.0.1:7433, for all users of this machine[/dim]

tangram serve --config /etc/tangram/tangram.toml

tangram serve --config tangram.toml --check  [dim]# check the config[/dim]
"""


class OneLineFormatter(logging.Formatter):
    """Formats a record as one line: escapes what is not printable, and marks the lines of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        first, *more = super().format(record).split("\n") if record.exc_info else [super().format(record)]
        return "\n".join([_escape(first), *(f"    | {_escape(line)}" for line in more)])


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def serve(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A TOML file; see docs/reference/config.md. Without it, every key has its default.",
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Override service.listen of the config.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", metavar="", help="Check the config and its files, and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", metavar="", help="Log debug messages.")] = False,
) -> None:
    """Serve the pools of this machine to training runs on any machine, over HTTP.

    Acknowledged actions survive a crash. SIGTERM or Ctrl-C lets running actions end within a limit; the next start
    resumes waiting actions and adopts the sandboxes. A second signal exits immediately.
    """
    import asyncio

    from tangram.config import add_error_location

    settings = _config(config, listen)
    try:
        from tangram.server.serve import require_usable
        from tangram.server.serve import serve as run
    except ImportError as error:
        message = f"the service needs {error.name}, which is not installed: pip install 'arl-tangram[serve]'"
        raise TangramError(message) from None
    with add_error_location(config, () if listen is None else ("service.listen",)):
        if check:
            require_usable(settings)
            typer.echo(f"{config or 'the defaults'}: valid; would listen on {settings.service.listen}")
            return
        _configure_logging(verbose)
        _allow_open_files()
        asyncio.run(run(settings, on_started=lambda up: _print_address(up, ctx)))


def _config(path: Path | None, listen: str | None) -> Config:
    import msgspec

    from tangram.config import Config, load, parse

    if path is not None:
        config = load(path)
    else:
        from tangram.managers.sandboxes.bwrap.owner import state_directory

        folder = state_directory() / "service"
        config = parse(f'[service]\njournal = "{folder}/journal.db"\nevent_log = "{folder}/events.jsonl"\n', "defaults")
    assert isinstance(config, Config)
    if listen is None:
        return config
    return msgspec.structs.replace(config, service=msgspec.structs.replace(config.service, listen=listen))


def _allow_open_files() -> None:
    """Raise the limit of open files to its maximum: each client that waits for an action holds a connection."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _configure_logging(verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("tangram").setLevel(logging.DEBUG if verbose else logging.INFO)


def _print_address(up: RunningServer, ctx: typer.Context) -> None:
    """Print the address on stdout, for scripts that wait for it."""
    ctx.meta[EXIT_META] = EXIT_FAILED
    typer.echo(f"{up.address}  dashboard and API; Ctrl-C stops")
    sys.stdout.flush()
