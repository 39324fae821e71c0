"""What verbs print: tables and JSON on stdout, progress on stderr.

Owns the look. Promises that with --json nothing but JSON reaches stdout, and that a progress bar shows only on a
terminal and leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_MIN = 120
"""Columns of a table that goes to a file or a pipe, where no terminal says how wide it is."""


def console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=max(WIDTH_MIN, int(os.environ.get("COLUMNS", 0) or 0)))


def table(title: str) -> Table:
    """An empty table in the one style that all have."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def as_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


class Tell(Protocol):
    """Is told how much of the whole is done, and by some what is being done."""

    def __call__(self, done: float, total: int, doing: str = "", /) -> None: ...


@contextmanager
def progress(what: str, unit: str = "simulations") -> Iterator[Tell | None]:
    """A callback for the work done and the whole of it, which draws a bar; None if nobody would see one."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=40),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, done="")

        def tell(done: float, total: int, doing: str = "", /) -> None:
            words = f"{int(done)} of {total} {unit}" if unit else doing or f"{100.0 * done / total:.0f} %"
            bar.update(task, completed=done, total=total, done=words)

        yield tell


def where_to_look(report: Path) -> None:
    typer.echo(f"report: {report}\nopen it in a browser, for example with: xdg-open {report}")


def seeds(numbers: tuple[int, ...]) -> str:
    """`5 seeds`, or which one."""
    return f"{len(numbers)} seeds" if len(numbers) > 1 else f"seed {numbers[0]}"
