"""The command `tangram`: one file per verb.

Owns the app and what holds for every verb: an error of ours is one line on stderr and exit code 2, Ctrl-C ends with
130 and SIGTERM with 143 after cleaning up, and nothing that takes time to import is imported before a verb needs it.
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
"""The same as for a misspelt option: the caller has to change something. A verb that has come further says another one
by `ctx.meta[EXIT_META]`."""
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""As a shell says it."""


MESSAGE_MAX = 800
"""Characters of an error: a value from a broken file may be as long as the file."""


def _one_line(message: str) -> str:
    words = " ".join(message.split())
    return words if len(words) <= MESSAGE_MAX else f"{words[: MESSAGE_MAX - 200]} ... {words[-200:]}"


class _Verbs(TyperGroup):
    """Turns errors into messages, for the command and for tests alike."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _show_help_as_a_flag(self)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # what is still held back may not fit on the disk either
            return result
        except InvariantError as error:
            typer.echo(f"tangram: this is a bug in Tangram, please report it: {error}", err=True)
            raise typer.Exit(ctx.meta.get(EXIT_META, EXIT_ERROR)) from None
        except TangramError as error:
            typer.echo(f"tangram: {_one_line(str(error))}", err=True)
            raise typer.Exit(ctx.meta.get(EXIT_META, EXIT_ERROR)) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # Typer ends quietly: whoever read the output wants no more of it.
            typer.echo(f"tangram: {error}", err=True)
            _discard_output()
            raise typer.Exit(ctx.meta.get(EXIT_META, EXIT_ERROR)) from None


def _show_help_as_a_flag(command: Any) -> None:
    """Without the type of its value, as our own flags say by `metavar=""`: Typer makes this one."""
    command.get_help_option(command.context_class(command)).metavar = ""
    for each in getattr(command, "commands", {}).values():
        _show_help_as_a_flag(each)


def _discard_output() -> None:
    """Python writes what is held back once more when it ends; if that cannot be written, it has to go elsewhere."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


EXAMPLES = """[bold]Examples[/bold]

tangram train examples/multitask.toml  [dim]# train a policy, and see it learn[/dim]

tangram sim  [dim]# compare the policies on coding agents[/dim]

tangram plan  [dim]# how few cores would do[/dim]

tangram sim coding --policies adaptive --record run.jsonl

tangram trace show run.jsonl

tangram bench  [dim]# the list of benchmarks[/dim]

tangram serve  [dim]# share this machine with several training runs[/dim]

tangram status  [dim]# what the service does[/dim]

Every verb has examples of its own: tangram sim --help
"""

app = typer.Typer(
    name="tangram",
    cls=_Verbs,
    help="Action-level scheduling of the outside resources that agentic reinforcement learning uses.",
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


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tangram {version('arl-tangram')}")
        raise typer.Exit()


@app.callback()
def _every_verb(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version and end.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


class _Terminated:
    """SIGTERM, by which clusters end jobs, is Ctrl-C by another name: whoever is to be interrupted now is interrupted,
    be it a loop, whose main task is cancelled, or plain code."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):  # else a verb has had one already, and is on its way out
            interrupt(signal.SIGINT, frame)


def main() -> None:
    """The entry point of the command. A verb that has something better to do with a signal says so itself."""
    # A shell starts what follows `&` in a script with Ctrl-C ignored, and asyncio would leave it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminated = _Terminated()
    signal.signal(signal.SIGTERM, terminated)
    try:
        app(prog_name="tangram")
    except SystemExit as ended:
        if terminated.came and ended.code == EXIT_INTERRUPTED:
            sys.exit(EXIT_TERMINATED)
        raise
