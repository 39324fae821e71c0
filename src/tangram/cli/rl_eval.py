"""`tangram rl eval`: play held-out episodes with the weights of a checkpoint, and say how well they do."""

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

if TYPE_CHECKING:
    from tangram.rl.config.rollout_settings import RolloutSettings
    from tangram.rl.rollout.records import Ticket
    from tangram.rl.train.evaluator import Scores

EXAMPLES = """[bold]Examples[/bold]

tangram rl eval build/runs/multitask  [dim]# the newest checkpoint of a run[/dim]

tangram rl eval build/runs/multitask/checkpoints/00000100 --greedy --episodes 256

tangram rl eval build/runs/multitask --task frozenlake --out frozenlake.jsonl

tangram rl show frozenlake.jsonl
"""


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The folder of a run, for its newest checkpoint, or of one.")
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="The tasks and engines to use. Default: those of the run."),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option("--episodes", metavar="N", min=1, help="Of each task. Default: evaluation.episodes of the run."),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", metavar="", help="Take the most likely token always: temperature 0.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="T", help="Of sampling. Default: evaluation.temperature of the run."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Of the held-out seeds, the first that is played.")
    ] = 0,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="This task alone.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write all trajectories there; .gz compresses.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="No live view.")] = False,
    as_json: Json = False,
) -> None:
    """Play episodes of seeds that are never trained on, with the weights of a checkpoint.

    The same seeds make the same episodes as the evaluations while training. A run that is still going on is not
    disturbed. Ends with 1 if a task has no score.
    """
    if greedy and temperature is not None:
        raise InvalidConfig("--temperature", temperature, "either --greedy or --temperature")
    if out is not None:
        options.output_files(out=out)
        if out.exists() and out.stat().st_size:
            raise InvalidConfig("out", str(out), "a file that is not there yet")
    with ExitStack() as stack:
        found = _found(checkpoint, config, stack)
        settings = only_task(found.settings, task)
        asked = _asked(found, episodes, 0.0 if greedy else temperature)
        from tangram.rl.train.evaluator import held_out

        for engine in settings.engines:
            if engine.kind == "openai":
                said = f"engine {engine.name} plays what its server has loaded, which has to be {found.path}"
                typer.echo(f"tangram: {said}", err=True)
        tickets = held_out(settings, asked.episodes, temperature=asked.temperature, first=seed)
        began = time.monotonic()
        try:
            scores = asyncio.run(_play(found, settings, tickets, out, quiet=quiet or as_json))
        except InvalidConfig as error:
            raise _blamed(found, error) from error
        told = _told(found, asked, settings, scores, time.monotonic() - began)
    if as_json:
        show.as_json(told)
    else:
        _print(told, out)
    if any(row["mean"] is None for row in told["tasks"].values()):
        raise typer.Exit(1)


# ---- what is to be played -------------------------------------------------------------------------------------------


class Found(NamedTuple):
    path: Path
    """Of the checkpoint."""
    folder: Path
    """Where its files stay while it is played; the same, if nobody deletes it."""
    step: int | None
    settings: RolloutSettings
    """With that folder as the policy."""
    modules: tuple[str, ...]
    """Folders in which environments of one's own are looked for."""


class Asked(NamedTuple):
    episodes: int
    temperature: float


def _found(checkpoint: Path, config: Path | None, stack: ExitStack) -> Found:
    """The checkpoint is held until the stack ends. Raises InvalidConfig and ManagerError."""
    import msgspec

    from tangram.cli.training_config import load_with, look_beside, look_in
    from tangram.rl.config.training_settings import TrainSettings
    from tangram.rl.runs.run_folder import CHECKPOINTS, SETTINGS, read_modules, read_settings

    if not checkpoint.is_dir():
        raise InvalidConfig("checkpoint", str(checkpoint), f"a folder: of a run, or of {_known(checkpoint)}")
    within = checkpoint / CHECKPOINTS if (checkpoint / CHECKPOINTS).is_dir() else checkpoint
    all_of_run = within.resolve().name == CHECKPOINTS
    if not all_of_run and not (checkpoint / "config.json").is_file():
        expected = f"the folder of a run, with {CHECKPOINTS} in it, or of a checkpoint, with config.json"
        raise InvalidConfig("checkpoint", str(checkpoint), expected)
    run = within.resolve().parent if all_of_run else checkpoint.resolve().parent.parent
    if config is not None:
        settings = load_with(TrainSettings, config)
        modules = look_beside(config)
    elif (run / SETTINGS).is_file():
        settings = read_settings(run)
        modules = look_in(read_modules(run))
    else:
        expected = f"a checkpoint in the folder of a run, which holds {SETTINGS}; or --config"
        raise InvalidConfig("checkpoint", str(checkpoint), expected)
    path, folder = _held(within, stack, newest=all_of_run)
    policy = msgspec.structs.replace(settings.policy, checkpoint=str(folder.resolve()))
    step = int(path.name) if path.name.isdecimal() else None
    return Found(path, folder.resolve(), step, msgspec.structs.replace(settings, policy=policy), modules)


def _held(path: Path, stack: ExitStack, *, newest: bool) -> tuple[Path, Path]:
    """What it is called, and where it stays. It is verified, if it has checksums; one that lies elsewhere than in a
    run is deleted by nobody, and stays where it is."""
    from tangram.rl.runs.checkpoints import WHOLE, held, held_newest, read_checkpoint
    from tangram.rl.runs.run_folder import CHECKPOINTS

    if newest:
        return stack.enter_context(held_newest(path, lambda words: typer.echo(f"tangram: {words}", err=True)))
    if (path / WHOLE).is_file():
        if path.resolve().parent.name == CHECKPOINTS:
            return stack.enter_context(held(path))
        read_checkpoint(path)
    return path, path


def _blamed(found: Found, error: InvalidConfig) -> InvalidConfig:
    """Said of the checkpoint that was named, not of where it is held, nor of a key that nobody set."""
    named, held = str(found.path), str(found.folder)
    field = "checkpoint" if error.field == "policy.checkpoint" else error.field
    value = named if error.value == held else error.value
    return InvalidConfig(field, value, error.expected.replace(held, named))


def _known(checkpoint: Path) -> str:
    """Which checkpoints there are, where one was meant that is not there."""
    from tangram.rl.runs.checkpoints import folder_name, steps_in
    from tangram.rl.runs.run_folder import CHECKPOINTS

    folder = checkpoint.parent
    steps = steps_in(folder) if folder.name == CHECKPOINTS and folder.is_dir() else []
    there = f" (there are {', '.join(map(folder_name, steps))})" if steps else ""
    return f"one of its checkpoints{there}"


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
    if isinstance(settings, TrainSettings):  # with the teacher that it asks, and no other
        teachers = tuple(each for each in settings.teachers if each.name == alone.reward.service)
        return msgspec.structs.replace(settings, tasks=(alone,), teachers=teachers)
    return msgspec.structs.replace(settings, tasks=(alone,))


def _asked(found: Found, episodes: int | None, temperature: float | None) -> Asked:
    from tangram.config.tables import checked
    from tangram.rl.config.rollout_settings import TEMPERATURE
    from tangram.rl.config.training_settings import TrainSettings

    assert isinstance(found.settings, TrainSettings)
    usual = found.settings.evaluation
    if temperature is not None:
        temperature = checked("--temperature", temperature, TEMPERATURE)
    return Asked(
        usual.episodes if episodes is None else episodes, usual.temperature if temperature is None else temperature
    )


# ---- playing --------------------------------------------------------------------------------------------------------


async def _play(
    found: Found, settings: RolloutSettings, tickets: list[Ticket], out: Path | None, *, quiet: bool
) -> Scores:
    from contextlib import AsyncExitStack

    import msgspec

    from tangram.rl.observe.rollout_progress import RolloutProgress
    from tangram.rl.rollout.assembly import assembled, codec_of, tasks_of
    from tangram.rl.rollout.codec import Words
    from tangram.rl.runs.trajectory_log import TrajectoryLog
    from tangram.rl.train.evaluator import evaluate

    async with AsyncExitStack() as stack:
        log = None
        if out is not None:
            codec = codec_of(settings, tasks_of(settings))
            words = codec.words if isinstance(codec, Words) else ()
            policy = msgspec.structs.replace(settings.policy, checkpoint=str(found.path.resolve()))
            named = msgspec.structs.replace(settings, policy=policy)
            log = stack.enter_context(TrajectoryLog(out, settings=named, words=words, modules=found.modules))
        progress = RolloutProgress(len(tickets), quiet=quiet)
        with show.progress("starting", "steps") as tell:
            made = await stack.enter_async_context(
                assembled(
                    settings,
                    on_end=log.append if log is not None else None,
                    watch=progress,
                    progress=lambda share, words: tell(round(100 * share), 100, words) if tell is not None else None,
                )
            )
        with progress:
            return await evaluate(made.rollout, tickets)


# ---- what is said ---------------------------------------------------------------------------------------------------


def _told(found: Found, asked: Asked, settings: RolloutSettings, scores: Scores, seconds: float) -> dict[str, Any]:
    return {
        "checkpoint": str(found.path),
        "step": found.step,
        "temperature": asked.temperature,
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


def _print(told: dict[str, Any], out: Path | None) -> None:
    from tangram.reports.printable import plain

    typer.echo(f"checkpoint {told['checkpoint']}")
    table = show.table(f"temperature {told['temperature']:g}, {told['seconds']:.1f} s")
    for column in ("task", "mean", "standard error", "episodes", "endings"):
        table.add_column(column, justify="left" if column in ("task", "endings") else "right")
    for name, row in told["tasks"].items():
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(row["endings"].items()))
        mean, error = ("" if value is None else f"{value:.3f}" for value in (row["mean"], row["standard_error"]))
        table.add_row(plain(name), mean, error, str(row["episodes"]), endings)
    show.console().print(table, markup=False, highlight=False, emoji=False)
    for row in told["tasks"].values():
        if row["cause"]:
            typer.echo(f"lost, first of all: {plain(row['cause'])}")
    if out is not None:
        typer.echo(f"wrote {out}; look at it with: tangram rl show {shlex.quote(str(out))}")
