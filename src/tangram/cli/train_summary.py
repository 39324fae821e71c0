"""What `tangram train` says at the end of a run, made of its metrics; those before a resumption count too."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tangram.cli import show
from tangram.reports.printable import plain
from tangram.rl.observe.rollout_progress import duration
from tangram.rl.train.records import AnyLine, Began, Evaluated, Over, Trained, Warmed, dropped_in, noticed_in

if TYPE_CHECKING:
    from tangram.rl.config.training_settings import TrainSettings

NORMAL = ("steps", "seconds")
"""Causes of an end that was meant."""


def summary(lines: Sequence[AnyLine], settings: TrainSettings, folder: Path) -> dict[str, Any]:
    began = next((line for line in reversed(lines) if isinstance(line, Began)), None)
    steps = [line for line in lines if isinstance(line, Trained)]
    # Of an Over that a later resumption left behind nothing is said.
    over = lines[-1] if lines and isinstance(lines[-1], Over) else None
    last = max((line.step for line in lines if isinstance(line, Trained | Over)), default=0)
    return {
        "mode": began.mode if began is not None else settings.training.mode,
        "alpha": began.alpha if began is not None else settings.training.alpha,
        "steps": last,
        "cause": over.cause if over is not None else "",
        "seconds": lines[-1].at_s if lines else 0.0,
        "samples": sum(sum(line.staleness) for line in steps),
        "staleness_max": max((age for line in steps for age, count in enumerate(line.staleness) if count), default=0),
        "groups_dropped": dropped_in(lines),
        "tasks": {task.name: _task(task.name, lines) for task in settings.tasks},
        "noticed": [f"{each.kind}: {each.text}" for line in lines if (each := noticed_in(line)) is not None],
        "checkpoint": _from(folder, over.checkpoint) if over is not None else "",
        "folder": str(folder),
    }


def _from(folder: Path, path: str) -> str:
    """As the folder is called."""
    inside = Path(path).is_relative_to(folder.absolute()) if path else False
    return str(folder / Path(path).relative_to(folder.absolute())) if inside else path


def _task(name: str, lines: Sequence[AnyLine]) -> dict[str, Any]:
    warmed = [line for line in lines if isinstance(line, Warmed) and name in line.scores]
    looks = [line for line in lines if isinstance(line, Evaluated) and name in line.scores]
    steps = [line.tasks[name] for line in lines if isinstance(line, Trained) and name in line.tasks]
    return {
        "warm": warmed[-1].scores[name] if warmed else None,
        "warm_greedy": warmed[-1].greedy.get(name) if warmed else None,
        "first_evaluation": looks[0].scores[name] if looks else None,
        "last_evaluation": looks[-1].scores[name] if looks else None,
        "last_evaluation_spread": looks[-1].spread.get(name) if looks else None,
        "reward": steps[-1].reward if steps else None,
        "samples": sum(step.trajectories for step in steps),
    }


def print_summary(found: dict[str, Any]) -> None:
    title = f"{found['mode']}, α {found['alpha']}: {_counted(found['steps'], 'step')} in {duration(found['seconds'])}"
    table = show.table(title)
    for column in ("task", "warm start", "first evaluation", "last evaluation", "last batch", "samples"):
        table.add_column(column, justify="left" if column == "task" else "right", no_wrap=True)
    for name, row in found["tasks"].items():
        scores = (row["warm"], row["first_evaluation"], row["last_evaluation"], row["reward"])
        table.add_row(plain(name), *map(_score, scores), f"{row['samples']:,}")
    show.console().print(table, markup=False, highlight=False, emoji=False)
    dropped = ", ".join(
        f"{count:,} {plain(cause)}" for cause, count in sorted(found["groups_dropped"].items()) if count
    )
    kept = f"; groups that were dropped: {dropped}" if dropped else ""
    age = _counted(found["staleness_max"], "version")
    typer.echo(f"{_counted(found['samples'], 'sample')}, at most {age} old{kept}")
    for words in dict.fromkeys(found["noticed"][-5:]):
        typer.echo(f"noticed: {plain(words)}")


def print_places(found: dict[str, Any], tensorboard: Path | None, report: Path | None) -> None:
    """Where everything is, and how to look further."""
    folder = Path(found["folder"])
    if report is not None:
        typer.echo(f"report:      {report}")
    if tensorboard is not None:
        typer.echo(f"TensorBoard: tensorboard --logdir {shlex.quote(str(tensorboard))}")
    if found["checkpoint"]:
        typer.echo(f"checkpoint:  {found['checkpoint']}")
        typer.echo(f"evaluate it: tangram rl eval {shlex.quote(str(folder))}")


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
