"""Options that several verbs share: a group reads its options, and the verb gets what the reader returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from tests.chrome_trace import check
from tests.rl.recordings import simple, span
from typer.testing import CliRunner

from tangram.cli import app
from tangram.cli.options import option_group
from tangram.rl.runs.trajectory_log import TrajectoryLog
from tangram.rl.trajectories.trajectory import Stage


def read_size(
    width: Annotated[int, typer.Option("--width", help="Columns.")] = 2,
    height: Annotated[int, typer.Option("--height", help="Rows.")] = 3,
) -> tuple[int, int]:
    return width, height


def test_a_verb_has_the_options_of_its_groups_and_gets_their_values() -> None:
    grouped = typer.Typer()

    @grouped.command()
    @option_group(size=read_size)
    def area(
        name: Annotated[str, typer.Argument()],
        size: tuple[int, int],
        loud: Annotated[bool, typer.Option("--loud")] = False,
    ) -> None:
        """Print an area."""
        text = f"{name} {size[0] * size[1]}"
        typer.echo(text.upper() if loud else text)

    runner = CliRunner()
    assert runner.invoke(grouped, ["a"]).output == "a 6\n"
    assert runner.invoke(grouped, ["a", "--width", "5", "--loud"]).output == "A 15\n"
    shown = runner.invoke(grouped, ["--help"]).output
    assert "Print an area." in shown and "--width" in shown and "--height" in shown and "--size" not in shown


def test_timelines_are_written_as_chrome_traces(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "rollout.jsonl") as log:
        log.append(simple("chain/0/0.0", [span(Stage.GENERATE, 0, 2), span(Stage.STEP, 2, 3)]))
    runs = (
        ["rl", "timeline", str(tmp_path / "rollout.jsonl")],
        ["sim", "elastic", "--batch", "4", "--seeds", "1", "--workers", "1"],
    )
    for words in runs:
        path = tmp_path / f"{words[0]}.json"
        result = CliRunner().invoke(app, [*words, "--perfetto", str(path)])
        assert result.exit_code == 0, result.output
        assert "https://ui.perfetto.dev" in result.output
        events = json.loads(path.read_text())["traceEvents"]
        check(events)
        assert {"X", "M", "C"} <= {event["ph"] for event in events}
