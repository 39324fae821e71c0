"""`tangram train`: train a policy on the tasks of a config.

Owns the command line of a run, its signals and its exit code: 0 after its normal end, 1 after a failure, 2 for input
that prevents a start, 130 and 143 after Ctrl-C and SIGTERM, which save the progress.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tangram.cli import options, show
from tangram.cli.options import Json
from tangram.errors import InvalidConfig, InvalidInput, InvariantError, TangramError
from tangram.reports import terminal
from tangram.reports.formatting import duration
from tangram.reports.printable import escape_unprintable
from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    Evaluated,
    RunBegan,
    RunEnded,
    Trained,
    WarmStartChecked,
    dropped_groups,
    notice_of,
)

if TYPE_CHECKING:
    from tangram.rl.config.training_settings import TrainSettings
    from tangram.rl.inference.affinity import Binding
    from tangram.rl.observe.training_progress import TrainingProgress

RUNS_FOLDER = Path("build/runs")
EXIT_FAILED = 1

EXAMPLES = """[bold]Examples[/bold]

tangram train examples/multitask.toml

tangram train examples/multitask.toml --explain  [dim]# print the plan, start nothing[/dim]

tangram train examples/multitask.toml --set training.staleness=2 --set tasks.frozenlake.weight=2 --out build/runs/a2

tangram train examples/multitask.toml --resume  [dim]# resume after Ctrl-C or a crash[/dim]

tangram rl eval build/runs/multitask  [dim]# play held-out episodes with the newest checkpoint[/dim]
"""


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file with engines, tasks and training.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help=f"The folder of the run. Default: {RUNS_FOLDER}/NAME for NAME.toml."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Resume the run in the folder from its last checkpoint.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", metavar="", help="Delete the run in the folder and start a new one.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of the config, such as training.staleness=2, tasks.NAME.weight=2 or engines.0.count=2;"
            " several may be given.",
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", metavar="", help="Print the plan and start nothing.")] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="Override training.steps of the config.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Override the seed of the config.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="Show no live view.")] = False,
    as_json: Json = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Where to write the report. Default: report.html in the run folder."
        ),
    ] = None,
    perfetto: options.Perfetto = None,
) -> None:
    """Train a policy on the tasks of a config by reinforcement learning.

    While it runs, a live view shows rewards, held-out scores, throughput and staleness. Ctrl-C finishes and saves the
    current step and prints how to resume; a second Ctrl-C exits without finishing it.
    """
    from tangram.cli.training_config import add_config_folders

    if resume and fresh:
        raise InvalidConfig("--fresh", True, "either --resume or --fresh")
    settings = _settings(config, changes or [], steps, seed)
    folder = out if out is not None else RUNS_FOLDER / config.stem
    modules = add_config_folders(config)
    binding = _binding(config, settings)
    if explain:
        _explain(binding, settings, folder, as_json=as_json)
        return
    command = _command(config, out, changes or [], steps, seed)
    options.check_output_files(report=report, perfetto=perfetto)
    _require_folder(folder, command, resume=resume, fresh=fresh)
    try:
        ended = asyncio.run(_run(settings, folder, modules, resume=resume, quiet=quiet or as_json))
    except InvalidInput:
        if not resume:
            _delete_unstarted(folder)
        raise
    _print_end(ended, settings, folder, report, command, as_json=as_json)
    if perfetto is not None:
        _write_trace(folder, perfetto, as_json=as_json)
    if ended.code:
        raise typer.Exit(ended.code)


def _settings(config: Path, changes: list[str], steps: int | None, seed: int | None) -> TrainSettings:
    import msgspec

    from tangram.cli.training_config import load_config
    from tangram.rl.config.training_settings import TrainSettings

    settings = load_config(TrainSettings, config, changes)
    if steps is not None:
        settings = msgspec.structs.replace(settings, training=msgspec.structs.replace(settings.training, steps=steps))
    return settings if seed is None else msgspec.structs.replace(settings, seed=seed)


def _binding(config: Path, settings: TrainSettings) -> Binding:
    """Bind engines to tasks. Raises InvalidConfig for every error that is found before anything is started."""
    from tangram.rl.inference.affinity import explain
    from tangram.rl.rollout.assembly import require_playable
    from tangram.rl.train.pipeline import require_trainable

    with options.config_errors_in(config):
        require_playable(settings)
        require_trainable(settings)
        _require_functions(settings)
        return explain(settings)


def _require_functions(settings: TrainSettings) -> None:
    """Raises InvalidConfig for a custom loss or advantage that cannot be imported."""
    objective = settings.objective
    if ":" in objective.loss or ":" in objective.advantage:
        from tangram.rl.model.objective import advantage_named, loss_named

        advantage_named(objective.advantage)
        loss_named(objective.loss)


def _explain(binding: Binding, settings: TrainSettings, folder: Path, *, as_json: bool) -> None:
    import msgspec

    from tangram.cli.train_plan import build_plan, plan_lines

    plan = build_plan(settings, folder)
    if as_json:
        show.print_json({**plan, "binding": msgspec.to_builtins(binding)})
    else:
        typer.echo("\n".join([*plan_lines(plan), "", *binding.lines()]))


def _command(config: Path, out: Path | None, changes: list[str], steps: int | None, seed: int | None) -> str:
    """The command that resumes this run."""
    words = ["tangram", "train", str(config), *(["--out", str(out)] if out is not None else [])]
    words += [word for change in changes for word in ("--set", change)]
    words += ["--steps", str(steps)] if steps is not None else []
    words += ["--seed", str(seed)] if seed is not None else []
    return shlex.join([*words, "--resume"])


# ---- the folder -----------------------------------------------------------------------------------------------------


def _require_folder(folder: Path, command: str, *, resume: bool, fresh: bool) -> None:
    """Raises InvalidConfig if there is a run and none is expected, or the reverse."""
    from tangram.rl.runs.run_folder import METRICS, SETTINGS

    _require_writable(folder, make=not resume)
    exists = any((folder / name).exists() for name in (SETTINGS, METRICS))
    if resume and not exists:
        raise InvalidConfig(
            "--resume", str(folder), "the folder of a run; it contains none, start one without --resume"
        )
    if not resume and exists:
        if not fresh:
            expected = f"a folder without a run. Resume its run: {command}; start another with --out RUN;"
            raise InvalidConfig("--out", str(folder), f"{expected} or delete it and start again with --fresh")
        _delete(folder)


def _require_writable(folder: Path, *, make: bool) -> None:
    """Raises InvalidConfig if the folder cannot be written."""
    import tempfile

    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        if make or folder.is_dir():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise InvalidConfig("--out", str(folder), f"a folder that can be written ({why})") from None


def _delete(folder: Path) -> None:
    """Delete the run in a folder, and no other files. Raises InvalidConfig if another process trains in it."""
    from tangram.rl.runs.run_folder import (
        CHECKPOINTS,
        METRICS,
        MODULES,
        OWNER,
        REPORT,
        SAMPLES,
        SETTINGS,
        TENSORBOARD,
        open_run,
        read_settings,
    )

    with ExitStack() as stack:
        try:
            stack.enter_context(open_run(folder, read_settings(folder), resume=True))
        except InvalidConfig as error:
            if error.field == "folder" and (folder / SETTINGS).is_file():
                raise  # another process has it open; any other defect is deleted with the run
        for name in (CHECKPOINTS, SAMPLES, TENSORBOARD):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (METRICS, MODULES, REPORT, OWNER, SETTINGS):
            (folder / name).unlink(missing_ok=True)


def _delete_unstarted(folder: Path) -> None:
    """Delete the folder of a run that could not start, so that the repaired config can."""
    from tangram.rl.runs.metrics_lines import PROGRESS_LINES
    from tangram.rl.runs.metrics_log import read_metrics
    from tangram.rl.runs.run_folder import METRICS

    path = folder / METRICS
    with suppress(InvalidInput, OSError):
        if path.exists():
            if any(isinstance(line, PROGRESS_LINES) for line in read_metrics(path)):
                return  # the run of another process
            _delete(folder)
        folder.rmdir()


# ---- running --------------------------------------------------------------------------------------------------------


class TrainingExit(NamedTuple):
    code: int
    cause: str
    """`steps`, `seconds`, `interrupted`, or the error."""
    is_resumable: bool = True
    """Whether the same command can resume it; false if the config or all checkpoints are invalid."""


async def _run(
    settings: TrainSettings, folder: Path, modules: tuple[str, ...], *, resume: bool, quiet: bool
) -> TrainingExit:
    """Run until the end or a signal. Raises InvalidInput for input that prevents a start, and InvariantError."""
    from tangram.rl.observe.training_progress import TrainingProgress
    from tangram.rl.runs.checkpoints import NoCheckpoint
    from tangram.rl.runs.metrics_lines import PROGRESS_LINES
    from tangram.rl.train.pipeline import train

    view = TrainingProgress(settings, quiet=quiet)
    has_begun = False

    def on_line(line: AnyMetricsLine) -> None:
        nonlocal has_begun
        has_begun = has_begun or resume or isinstance(line, PROGRESS_LINES)
        view.on_line(line)

    with view:
        running = asyncio.ensure_future(
            train(
                settings,
                folder,
                resume=resume,
                modules=modules,
                on_line=on_line,
                progress=view.on_startup,
                observer=view,
            )
        )
        stopped = _StopSignals(running, view)
        with stopped:
            try:
                over = await running
            except asyncio.CancelledError:
                if stopped.signal_number is None:
                    raise
                return TrainingExit(128 + stopped.signal_number, "interrupted")
            except InvariantError:
                raise
            except TangramError as error:
                if isinstance(error, InvalidInput) and not has_begun:
                    raise
                return TrainingExit(
                    EXIT_FAILED, str(error), is_resumable=not isinstance(error, InvalidConfig | NoCheckpoint)
                )
    if stopped.signal_number is not None:
        return TrainingExit(128 + stopped.signal_number, "interrupted")
    return TrainingExit(0 if over.cause in NORMAL_CAUSES else EXIT_FAILED, over.cause)


class _StopSignals:
    """Cancels the run on Ctrl-C and SIGTERM, again for each further signal."""

    def __init__(self, running: asyncio.Future[Any], view: TrainingProgress) -> None:
        self.signal_number: int | None = None
        self._running, self._view = running, view

    def __enter__(self) -> _StopSignals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        from tangram.rl.runs.metrics_lines import Noticed

        if self.signal_number is None:
            self.signal_number = number
            text = f"{self._view.stop_text()}; a second signal stops it at once"
            self._view.on_line(Noticed(at_s=self._view.elapsed_s(), kind=signal.Signals(number).name, text=text))
        self._running.cancel()


# ---- the end --------------------------------------------------------------------------------------------------------


def _print_end(
    ended: TrainingExit, settings: TrainSettings, folder: Path, report: Path | None, command: str, *, as_json: bool
) -> None:
    from tangram.rl.runs.metrics_log import read_metrics
    from tangram.rl.runs.run_folder import METRICS, TENSORBOARD

    path = folder / METRICS
    try:
        lines = read_metrics(path) if path.exists() else []
        result = {**summary(lines, settings, folder), "exit_code": ended.code}
        result["cause"] = ended.cause or result["cause"]
    except InvalidInput as error:  # a broken summary does not change the result of the run
        typer.echo(f"tangram: no summary: {error}", err=True)
        lines, result = [], {"folder": str(folder), "cause": ended.cause, "exit_code": ended.code}
    tensorboard = folder / TENSORBOARD
    written = _report(folder, report) if lines else None
    result["report"] = str(written) if written is not None else ""
    if as_json:
        show.print_json(result)
    elif lines:
        print_summary(result)
        print_locations(result, tensorboard if tensorboard.is_dir() else None, written)
        if not tensorboard.is_dir():
            typer.echo("no TensorBoard log: pip install 'arl-tangram[rl]' installs its writer", err=True)
    if ended.code == EXIT_FAILED:
        typer.echo(f"tangram: the run failed: {ended.cause}", err=True)
    if ended.code and ended.is_resumable and folder.joinpath(METRICS).exists():
        typer.echo(f"resume it: {command}", err=True)


def _write_trace(folder: Path, perfetto: Path, *, as_json: bool) -> None:
    """Write the timeline of the run; a failure is printed and does not change the exit code of the run."""
    from tangram.rl.observe.run_history import RunHistory
    from tangram.rl.observe.timeline_trace import trace_of_training
    from tangram.rl.runs.metrics_log import read_metrics
    from tangram.rl.runs.run_folder import METRICS

    try:
        trace_of_training(RunHistory(read_metrics(folder / METRICS))).write(perfetto)
    except (TangramError, OSError) as error:
        typer.echo(f"tangram: no timeline: {error}", err=True)
        return
    if not as_json:
        show.print_trace_path(perfetto)


def _report(folder: Path, report: Path | None) -> Path | None:
    """Write the report of the folder; a failure is printed and does not change the exit code of the run."""
    try:
        from tangram.rl.observe.training_report import write_report
    except ImportError:
        return None
    target = report if report is not None else folder / "report.html"
    try:
        write_report(folder, target)
    except (TangramError, OSError) as error:
        typer.echo(f"tangram: no report: {error}", err=True)
        return None
    return target


NORMAL_CAUSES = ("steps", "seconds")
"""Causes of an intended end."""


def summary(lines: Sequence[AnyMetricsLine], settings: TrainSettings, folder: Path) -> dict[str, Any]:
    began = next((line for line in reversed(lines) if isinstance(line, RunBegan)), None)
    steps = [line for line in lines if isinstance(line, Trained)]
    # An end before a later resumption is not reported.
    over = lines[-1] if lines and isinstance(lines[-1], RunEnded) else None
    last = max((line.step for line in lines if isinstance(line, Trained | RunEnded)), default=0)
    return {
        "mode": began.mode if began is not None else settings.training.mode,
        "alpha": began.alpha if began is not None else settings.training.staleness_bound,
        "steps": last,
        "cause": over.cause if over is not None else "",
        "seconds": lines[-1].at_s if lines else 0.0,
        "samples": sum(sum(line.staleness) for line in steps),
        "staleness_max": max((age for line in steps for age, count in enumerate(line.staleness) if count), default=0),
        "groups_dropped": dropped_groups(lines),
        "tasks": {task.name: _task(task.name, lines) for task in settings.tasks},
        "noticed": [f"{each.kind}: {each.text}" for line in lines if (each := notice_of(line)) is not None],
        "checkpoint": _relative_to_folder(folder, over.checkpoint) if over is not None else "",
        "folder": str(folder),
    }


def _relative_to_folder(folder: Path, path: str) -> str:
    """Returns the path with the folder as given on the command line; unchanged outside of the folder."""
    inside = Path(path).is_relative_to(folder.absolute()) if path else False
    return str(folder / Path(path).relative_to(folder.absolute())) if inside else path


def _task(name: str, lines: Sequence[AnyMetricsLine]) -> dict[str, Any]:
    warmed = [line for line in lines if isinstance(line, WarmStartChecked) and name in line.scores]
    evaluations = [line for line in lines if isinstance(line, Evaluated) and name in line.scores]
    steps = [line.tasks[name] for line in lines if isinstance(line, Trained) and name in line.tasks]
    return {
        "warm": warmed[-1].scores[name] if warmed else None,
        "warm_greedy": warmed[-1].greedy.get(name) if warmed else None,
        "first_evaluation": evaluations[0].scores[name] if evaluations else None,
        "last_evaluation": evaluations[-1].scores[name] if evaluations else None,
        "last_evaluation_spread": evaluations[-1].spread.get(name) if evaluations else None,
        "reward": steps[-1].reward if steps else None,
        "samples": sum(step.trajectories for step in steps),
    }


def print_summary(result: dict[str, Any]) -> None:
    steps = _count_text(result["steps"], "step")
    title = f"{result['mode']}, α {result['alpha']}: {steps} in {duration(result['seconds'])}"
    numbers = ("warm start", "first evaluation", "last evaluation", "last batch", "samples")
    table = terminal.table(title, "task", *numbers, right=numbers, no_wrap=True)
    for name, row in result["tasks"].items():
        scores = (row["warm"], row["first_evaluation"], row["last_evaluation"], row["reward"])
        table.add_row(escape_unprintable(name), *map(_score, scores), f"{row['samples']:,}")
    terminal.stdout_console().print(table, markup=False, highlight=False, emoji=False)
    dropped = ", ".join(
        f"{count:,} {escape_unprintable(cause)}" for cause, count in sorted(result["groups_dropped"].items()) if count
    )
    kept = f"; groups that were dropped: {dropped}" if dropped else ""
    age = _count_text(result["staleness_max"], "version")
    typer.echo(f"{_count_text(result['samples'], 'sample')}, at most {age} old{kept}")
    for words in dict.fromkeys(result["noticed"][-5:]):
        typer.echo(f"noticed: {escape_unprintable(words)}")


def print_locations(result: dict[str, Any], tensorboard: Path | None, report: Path | None) -> None:
    """Print where the files of the run are, and the commands that read them."""
    folder = Path(result["folder"])
    if report is not None:
        typer.echo(f"report:      {report}")
    if tensorboard is not None:
        typer.echo(f"TensorBoard: tensorboard --logdir {shlex.quote(str(tensorboard))}")
    if result["checkpoint"]:
        typer.echo(f"checkpoint:  {result['checkpoint']}")
        typer.echo(f"evaluate it: tangram rl eval {shlex.quote(str(folder))}")


def _count_text(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
