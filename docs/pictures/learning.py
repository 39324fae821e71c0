"""Draws the learning curves of a run: `python docs/pictures/learning.py RUN` writes docs/pictures/learning.svg.

RUN is the folder of a run of `tangram train`; the picture in the README is of `make run`. It shows the evaluations on
held-out seeds with their standard error, over the seconds since the run began; the warm start is shaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

from make import HERE

from tangram.reports.charts import LineSeries, draw_lines
from tangram.reports.formatting import tick_seconds
from tangram.reports.svg import Drawing, LinearScale
from tangram.rl.runs.metrics_lines import Evaluated, WarmStartChecked
from tangram.rl.runs.metrics_log import read_metrics
from tangram.rl.runs.run_folder import METRICS

WIDTH, HEIGHT = 760, 300
AREA = LEFT, RIGHT, TOP, BOTTOM = 52.0, 622.0, 50.0, 258.0
COLOURS = ("k0", "p1", "k1")


def draw(run: Path) -> Drawing:
    records = read_metrics(run / METRICS)
    evaluations = [record for record in records if isinstance(record, Evaluated)]
    checks = [record for record in records if isinstance(record, WarmStartChecked)]
    warm_s = next((check.at_s for check in checks if check.over), 0.0)
    last = evaluations[-1].scores
    tasks = sorted({task for each in evaluations for task in each.scores}, key=lambda task: -last.get(task, 0.0))
    lines = []
    for task, css in zip(tasks, COLOURS, strict=False):
        scored = [each for each in evaluations if task in each.scores]
        points = tuple((each.at_s, each.scores[task]) for each in scored)
        errors = tuple(each.spread.get(task, 0.0) for each in scored)
        lines.append(LineSeries(name=task, css=css, points=points, errors=errors))
    across = LinearScale(0.0, evaluations[-1].at_s, LEFT, RIGHT)
    drawing = Drawing(WIDTH, HEIGHT, f"Held-out reward of {', '.join(tasks)} while one policy learns them")
    drawing.text(16, 28, "One policy learns three tasks at once, on two cores", "title")
    drawing.rect(across(0.0), TOP, across(warm_s) - across(0.0), BOTTOM - TOP, "area p0")
    drawing.text(across(0.0) + 4, TOP + 14, "warm start", "tick")
    draw_lines(drawing, lines, AREA, tick_seconds, x_ticks=across.ticks())
    drawing.text(RIGHT, BOTTOM + 34, "since the run began", "tick", "end")
    return drawing


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python docs/pictures/learning.py RUN, a run folder such as build/runs/multitask")
    (HERE / "learning.svg").write_text(draw(Path(sys.argv[1])).standalone(), encoding="utf-8")
    print("docs/pictures/learning.svg")


if __name__ == "__main__":
    main()
