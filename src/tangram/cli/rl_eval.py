"""`tangram rl eval`: evaluate a checkpoint on held-out episodes."""

from __future__ import annotations

import asyncio
import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tangram.cli import options, show
from tangram.cli.options import Json
from tangram.errors import InvalidConfig
from tangram.reports import live, terminal

if TYPE_CHECKING:
    from tangram.rl.config.rollout_settings import RolloutSettings
    from tangram.rl.train.evaluator import Scores
    from tangram.rl.trajectories.trajectory import GroupTicket

EXAMPLES = """[bold]Examples[/bold]

tangram rl eval build/runs/multitask  [dim]# the newest checkpoint of a run[/dim]

tangram rl eval build/runs/multitask/checkpoints/00000100 --greedy --episodes 256

tangram rl eval build/runs/multitask --task frozenlake --out frozenlake.jsonl

tangram rl show frozenlake.jsonl
"""


def evaluate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run folder, for its newest checkpoint."),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The tasks and engines to use. Default: those of the run."),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            "--episodes", metavar="N", min=1, help="Episodes per task. Default: evaluation.episodes of the run."
        ),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", metavar="", help="Always take the most likely token: temperature 0.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="T", help="Sampling temperature. Default: evaluation.temperature of the run."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="The first held-out seed.")] = 0,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only this task.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write all trajectories to this file; .gz compresses it."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="Show no live view.")] = False,
    as_json: Json = False,
) -> None:
    """Play held-out episodes, which are never trained on, with the weights of a checkpoint.

    The seeds and episodes are those of the evaluations during training. A training run in progress is not
    disturbed. Exits with 1 if a task has no score.
    """
    if greedy and temperature is not None:
        raise InvalidConfig("--temperature", temperature, "either --greedy or --temperature")
    if out is not None:
        options.check_output_files(out=out)
        if out.exists() and out.stat().st_size:
            raise InvalidConfig("out", str(out), "a file that does not exist")
    with ExitStack() as stack:
        loaded = _find_checkpoint(checkpoint, config, stack)
        settings = only_task(loaded.settings, task)
        eval_options = _eval_options(loaded, episodes, 0.0 if greedy else temperature)
        from tangram.rl.train.evaluator import held_out_tickets

        for engine in settings.engines:
            if engine.kind == "openai":
                message = (
                    f"engine {engine.name} uses the weights that its server has loaded, which must be {loaded.path}"
                )
                typer.echo(f"tangram: {message}", err=True)
        tickets = held_out_tickets(settings, eval_options.episodes, temperature=eval_options.temperature, first=seed)
        began_at_s = time.monotonic()
        try:
            scores = asyncio.run(_play(loaded, settings, tickets, out, quiet=quiet or as_json))
        except InvalidConfig as error:
            raise _translate_error(loaded, error) from error
        result = _summary(loaded, eval_options, settings, scores, time.monotonic() - began_at_s)
    if as_json:
        show.print_json(result)
    else:
        _print(result, out)
    if any(row["mean"] is None for row in result["tasks"].values()):
        raise typer.Exit(1)


# ---- the checkpoint and its tasks -----------------------------------------------------------------------------------


class EvalCheckpoint(NamedTuple):
    path: Path
    """The name of the checkpoint."""
    folder: Path
    """Where its files are kept during the evaluation; its own folder if no run can delete it."""
    step: int | None
    settings: RolloutSettings
    """The settings with that folder as the policy."""
    modules: tuple[str, ...]
    """Folders from which custom environments are imported."""


class EvalOptions(NamedTuple):
    episodes: int
    temperature: float


def _find_checkpoint(checkpoint: Path, config: Path | None, stack: ExitStack) -> EvalCheckpoint:
    """Find the checkpoint and hold it until the stack ends. Raises InvalidConfig and ManagerError."""
    import msgspec

    from tangram.cli.training_config import add_config_folders, add_import_folders, load_config
    from tangram.rl.config.training_settings import TrainSettings
    from tangram.rl.runs.run_folder import CHECKPOINTS, SETTINGS, read_modules, read_settings

    if not checkpoint.is_dir():
        raise InvalidConfig(
            "checkpoint", str(checkpoint), f"a folder: of a run, or of {_known_checkpoints(checkpoint)}"
        )
    within = checkpoint / CHECKPOINTS if (checkpoint / CHECKPOINTS).is_dir() else checkpoint
    all_of_run = within.resolve().name == CHECKPOINTS
    if not all_of_run and not (checkpoint / "config.json").is_file():
        expected = f"the folder of a run, with {CHECKPOINTS} in it, or of a checkpoint, with config.json"
        raise InvalidConfig("checkpoint", str(checkpoint), expected)
    run = within.resolve().parent if all_of_run else checkpoint.resolve().parent.parent
    if config is not None:
        settings = load_config(TrainSettings, config)
        modules = add_config_folders(config)
    elif (run / SETTINGS).is_file():
        settings = read_settings(run)
        modules = add_import_folders(read_modules(run))
    else:
        expected = f"a checkpoint in the folder of a run, which holds {SETTINGS}; or --config"
        raise InvalidConfig("checkpoint", str(checkpoint), expected)
    path, folder = _hold_checkpoint(within, stack, newest=all_of_run)
    policy = msgspec.structs.replace(settings.policy, checkpoint=str(folder.resolve()))
    step = int(path.name) if path.name.isdecimal() else None
    return EvalCheckpoint(path, folder.resolve(), step, msgspec.structs.replace(settings, policy=policy), modules)


def _hold_checkpoint(path: Path, stack: ExitStack, *, newest: bool) -> tuple[Path, Path]:
    """Verify the checkpoint, if it has checksums, and protect it from deletion by its run. Returns its name and its
    folder. A checkpoint outside a run needs no protection."""
    from tangram.rl.runs.checkpoints import CHECKSUMS_FILE, pin_checkpoint, pin_newest_checkpoint, read_checkpoint
    from tangram.rl.runs.run_folder import CHECKPOINTS

    if newest:
        return stack.enter_context(pin_newest_checkpoint(path, lambda words: typer.echo(f"tangram: {words}", err=True)))
    if (path / CHECKSUMS_FILE).is_file():
        if path.resolve().parent.name == CHECKPOINTS:
            return stack.enter_context(pin_checkpoint(path))
        read_checkpoint(path)
    return path, path


def _translate_error(loaded: EvalCheckpoint, error: InvalidConfig) -> InvalidConfig:
    """Rewrite an error so that it names the given checkpoint, not the copy that is held, nor a key of the config."""
    named, held = str(loaded.path), str(loaded.folder)
    field = "checkpoint" if error.field == "policy.checkpoint" else error.field
    value = named if error.value == held else error.value
    return InvalidConfig(field, value, error.expected.replace(held, named))


def _known_checkpoints(checkpoint: Path) -> str:
    """The existing checkpoints, for an error about a missing one."""
    from tangram.rl.runs.checkpoints import folder_name, steps_in
    from tangram.rl.runs.run_folder import CHECKPOINTS

    folder = checkpoint.parent
    steps = steps_in(folder) if folder.name == CHECKPOINTS and folder.is_dir() else []
    known = f" (there are {', '.join(map(folder_name, steps))})" if steps else ""
    return f"one of its checkpoints{known}"


def only_task(settings: RolloutSettings, task: str | None) -> RolloutSettings:
    """The settings with this task alone, and the teacher of its reward; unchanged for None. Raises InvalidConfig."""
    import difflib

    import msgspec

    from tangram.rl.config.training_settings import TrainSettings

    if task is None:
        return settings
    names = [each.name for each in settings.tasks]
    if task not in names:
        near = difflib.get_close_matches(task, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise InvalidConfig("--task", task, f"a task of the run ({hint})")
    alone = settings.task(task)
    if isinstance(settings, TrainSettings):  # only the teacher of this task
        teachers = tuple(each for each in settings.teachers if each.name == alone.reward.service)
        return msgspec.structs.replace(settings, tasks=(alone,), teachers=teachers)
    return msgspec.structs.replace(settings, tasks=(alone,))


def _eval_options(loaded: EvalCheckpoint, episodes: int | None, temperature: float | None) -> EvalOptions:
    from tangram.config.tables import validated
    from tangram.rl.config.rollout_settings import TEMPERATURE
    from tangram.rl.config.training_settings import TrainSettings

    assert isinstance(loaded.settings, TrainSettings)
    usual = loaded.settings.evaluation
    if temperature is not None:
        temperature = validated("--temperature", temperature, TEMPERATURE)
    return EvalOptions(
        usual.episodes if episodes is None else episodes, usual.temperature if temperature is None else temperature
    )


# ---- playing --------------------------------------------------------------------------------------------------------


async def _play(
    loaded: EvalCheckpoint, settings: RolloutSettings, tickets: list[GroupTicket], out: Path | None, *, quiet: bool
) -> Scores:
    from contextlib import AsyncExitStack

    import msgspec

    from tangram.rl.environments.registry import tasks_of
    from tangram.rl.observe.rollout_progress import RolloutProgress
    from tangram.rl.rollout.assembly import assembled, codec_of
    from tangram.rl.runs.trajectory_log import TrajectoryLog
    from tangram.rl.train.evaluator import evaluate
    from tangram.rl.trajectories.codec import WordCodec

    async with AsyncExitStack() as stack:
        log = None
        if out is not None:
            codec = codec_of(settings, tasks_of(settings))
            words = codec.words if isinstance(codec, WordCodec) else ()
            policy = msgspec.structs.replace(settings.policy, checkpoint=str(loaded.path.resolve()))
            named = msgspec.structs.replace(settings, policy=policy)
            log = stack.enter_context(TrajectoryLog(out, settings=named, words=words, modules=loaded.modules))
        progress = RolloutProgress(len(tickets), quiet=quiet)
        with live.progress("starting", "steps") as starting:
            assembly = await stack.enter_async_context(
                assembled(
                    settings,
                    on_end=log.append if log is not None else None,
                    observer=progress,
                    progress=lambda share, words: (
                        starting(round(100 * share), 100, words) if starting is not None else None
                    ),
                )
            )
        with progress:
            return await evaluate(assembly.rollout, tickets)


# ---- printing -------------------------------------------------------------------------------------------------------


def _summary(
    loaded: EvalCheckpoint, options: EvalOptions, settings: RolloutSettings, scores: Scores, seconds: float
) -> dict[str, Any]:
    return {
        "checkpoint": str(loaded.path),
        "step": loaded.step,
        "temperature": options.temperature,
        "seconds": seconds,
        "tasks": {
            task.name: {
                "mean": scores.mean.get(task.name),
                "standard_error": scores.spread.get(task.name),
                "episodes": scores.episodes.get(task.name, 0),
                "endings": scores.endings.get(task.name, {}),
                "cause": scores.causes.get(task.name, ""),
            }
            for task in settings.tasks
        },
    }


def _print(result: dict[str, Any], out: Path | None) -> None:
    from tangram.reports.printable import escape_unprintable

    typer.echo(f"checkpoint {result['checkpoint']}")
    numbers = ("mean", "standard error", "episodes")
    title = f"temperature {result['temperature']:g}, {result['seconds']:.1f} s"
    table = terminal.table(title, "task", *numbers, "endings", right=numbers)
    for name, row in result["tasks"].items():
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(row["endings"].items()))
        mean, error = ("" if value is None else f"{value:.3f}" for value in (row["mean"], row["standard_error"]))
        table.add_row(escape_unprintable(name), mean, error, str(row["episodes"]), endings)
    terminal.stdout_console().print(table, markup=False, highlight=False, emoji=False)
    for row in result["tasks"].values():
        if row["cause"]:
            typer.echo(f"first lost episode: {escape_unprintable(row['cause'])}")
    if out is not None:
        typer.echo(f"wrote {out}; look at it with: tangram rl show {shlex.quote(str(out))}")
