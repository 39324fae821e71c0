"""The command `tangram`: one file per command.

Owns the app and the rules for every command: a Tangram error is one line on stderr and exit code 2, Ctrl-C ends with
130 and SIGTERM with 143 after cleaning up, and slow imports happen only in the commands that need them.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tangram.cli import (
    bench,
    doctor,
    plan,
    pool,
    rl,
    rl_eval,
    rl_rollout,
    rl_tasks,
    run,
    serve,
    sim,
    status,
    story,
    token,
    top,
    trace,
    train,
    where,
)
from tangram.cli.options import EXIT_META
from tangram.errors import InvariantError, TangramError

EXIT_ERROR = 2
"""The exit code of a usage error, also for invalid input. A command that has started its work sets another one in
`ctx.meta[EXIT_META]`."""
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""The exit codes of a shell for SIGINT and SIGTERM."""


MESSAGE_MAX = 800
"""Maximum characters of an error message: a value from a broken file may be as long as the file."""


def _one_line(message: str) -> str:
    words = " ".join(message.split())
    return words if len(words) <= MESSAGE_MAX else f"{words[: MESSAGE_MAX - 200]} ... {words[-200:]}"


class _CommandGroup(TyperGroup):
    """Prints errors as one line and converts them to exit codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _show_help_as_a_flag(self)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # the buffered output may not fit on the disk
            return result
        except InvariantError as error:
            typer.echo(f"tangram: this is a bug in Tangram, please report it: {error}", err=True)
            raise typer.Exit(ctx.meta.get(EXIT_META, EXIT_ERROR)) from None
        except TangramError as error:
            typer.echo(f"tangram: {_one_line(str(error))}", err=True)
            raise typer.Exit(ctx.meta.get(EXIT_META, EXIT_ERROR)) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # Typer exits quietly: the reader of the pipe has closed it.
            typer.echo(f"tangram: {error}", err=True)
            _discard_output()
            raise typer.Exit(ctx.meta.get(EXIT_META, EXIT_ERROR)) from None


def _show_help_as_a_flag(command: Any) -> None:
    """Hide the value type of `--help`, which Typer adds; our own flags have `metavar=""`."""
    command.get_help_option(command.context_class(command)).metavar = ""
    for each in getattr(command, "commands", {}).values():
        _show_help_as_a_flag(each)


def _discard_output() -> None:
    """Redirect stdout if it cannot be flushed: Python flushes it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


EXAMPLES = """[bold]Examples[/bold]

tangram train examples/multitask.toml  [dim]# train a policy, and see it learn[/dim]

tangram sim  [dim]# compare the policies on coding agents[/dim]

tangram plan  [dim]# the fewest cores that are enough[/dim]

tangram sim coding --policies adaptive --record run.jsonl

tangram trace show run.jsonl

tangram bench  [dim]# list the benchmarks[/dim]

tangram serve  [dim]# share this machine with several training runs[/dim]

tangram status  [dim]# the state of the service[/dim]

Every command has examples: tangram sim --help
"""

app = typer.Typer(
    name="tangram",
    cls=_CommandGroup,
    help="Action-level scheduling of the external resources that agentic reinforcement learning uses.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("sim", epilog=sim.EXAMPLES)(sim.sim)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.add_typer(trace.app, name="trace")
app.add_typer(rl.app, name="rl")
rl.app.command("rollout", epilog=rl_rollout.EXAMPLES)(rl_rollout.rollout)
rl.app.command("eval", epilog=rl_eval.EXAMPLES)(rl_eval.evaluate)
rl.app.command("check", epilog=rl_tasks.CHECK)(rl_tasks.check)
rl.app.command("profile", epilog=rl_tasks.PROFILE)(rl_tasks.profile)
rl.app.command("hardware", epilog=rl_tasks.HARDWARE)(rl_tasks.hardware)
app.command("run", epilog=run.EXAMPLES, context_settings=run.CONTEXT)(run.run)
app.command("serve", epilog=serve.EXAMPLES)(serve.serve)
app.command("status", epilog=status.EXAMPLES)(status.status)
app.command("top", epilog=top.EXAMPLES)(top.top)
app.command("where", epilog=where.EXAMPLES)(where.where)
app.command("story", epilog=story.EXAMPLES)(story.story)
app.add_typer(token.app, name="token")
app.add_typer(pool.app, name="pool")
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"tangram {version('arl-tangram')}")
        raise typer.Exit()


@app.callback()
def _every_verb(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", help="Print the version and exit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


class _TerminationHandler:
    """Treats SIGTERM like Ctrl-C: calls the SIGINT handler, which cancels a main task or interrupts code."""

    def __init__(self) -> None:
        self.was_called = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_called = True
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):  # otherwise a command has received a signal and is ending
            interrupt(signal.SIGINT, frame)


def main() -> None:
    """The entry point of the command. Verbs that handle signals install their own handlers."""
    # A shell starts background commands of a script with SIGINT ignored, and asyncio would not change that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminated = _TerminationHandler()
    signal.signal(signal.SIGTERM, terminated)
    try:
        app(prog_name="tangram")
    except SystemExit as ended:
        if terminated.was_called and ended.code == EXIT_INTERRUPTED:
            sys.exit(EXIT_TERMINATED)
        raise
