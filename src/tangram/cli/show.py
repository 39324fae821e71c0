"""Output that is not a table: JSON and the paths of files. With --json, stdout contains only JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_report_path(report: Path) -> None:
    typer.echo(f"report: {report}\nopen it in a browser, for example with: xdg-open {report}")


def print_trace_path(trace: Path) -> None:
    typer.echo(f"timeline: {trace}\nopen it in https://ui.perfetto.dev or chrome://tracing")


def seeds_text(numbers: tuple[int, ...]) -> str:
    """`5 seeds`, or `seed 3`."""
    return f"{len(numbers)} seeds" if len(numbers) > 1 else f"seed {numbers[0]}"
