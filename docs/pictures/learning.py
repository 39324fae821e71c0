"""The learning curves of a run: `python docs/pictures/learning.py RUN` draws docs/pictures/learning.svg.

RUN is the folder of a run of `tangram train`; the picture of the README is of `make run`. Drawn are the evaluations on
held-out seeds with their standard error, over the seconds since the run began; the warm start is shaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

from make import HERE, standalone

from tangram.reports.svg import Drawing, Linear, duration
from tangram.rl.runs.metrics_log import METRICS_FILE, read_metrics
from tangram.rl.train.records import Evaluated, Warmed

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 52.0, 622.0, 50.0, 258.0
COLOURS = ("exec", "elastic", "call")


def draw(run: Path) -> Drawing:
    lines = read_metrics(run / METRICS_FILE)
    looks = [line for line in lines if isinstance(line, Evaluated)]
    warm_s = next((line.at_s for line in lines if isinstance(line, Warmed) and line.over), 0.0)
    tasks = sorted({task for look in looks for task in look.scores}, key=lambda task: -looks[-1].scores.get(task, 0.0))
    across, up = Linear(0.0, looks[-1].at_s, LEFT, RIGHT), Linear(0.0, 1.0, BOTTOM, TOP)
    drawing = Drawing(WIDTH, HEIGHT, f"Held-out reward of {', '.join(tasks)} while one policy learns them")
    drawing.text(16, 28, "One policy learns three tasks at once, on two cores", "title")
    drawing.rect(across(0.0), TOP, across(warm_s) - across(0.0), BOTTOM - TOP, "idle")
    drawing.text(across(0.0) + 4, TOP + 14, "warm start", "tick")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.line(LEFT, up(share), RIGHT, up(share), "axis" if share == 0.0 else "grid")
        drawing.text(LEFT - 8, up(share) + 4, f"{share:g}", "tick", "end")
    for at in across.ticks():
        drawing.text(across(at), BOTTOM + 18, duration(at), "tick", "middle")
    drawing.text(RIGHT, BOTTOM + 34, "since the run began", "tick", "end")
    beside = _apart([up(looks[-1].scores.get(task, 0.0)) for task in tasks])
    for task, css, y in zip(tasks, COLOURS, beside, strict=False):
        seen = [
            (across(look.at_s), look.scores[task], look.spread.get(task, 0.0)) for look in looks if task in look.scores
        ]
        band = [(x, up(min(1.0, mean + error))) for x, mean, error in seen]
        band += [(x, up(max(0.0, mean - error))) for x, mean, error in reversed(seen)]
        drawing.path(band, f"{css} band", close=True)
        drawing.path([(x, up(mean)) for x, mean, _ in seen], f"{css} curve")
        drawing.text(RIGHT + 8, y + 4, f"{task} {seen[-1][1]:.2f}", f"{css} name")
    return drawing


def _apart(places: list[float], least: float = 16.0) -> list[float]:
    """From top to bottom, none over another."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + least) if found else place)
    return found


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(
            "usage: python docs/pictures/learning.py RUN, the folder of a run such as build/runs/multitask"
        )
    style = ".curve { fill: none; stroke-width: 2; } .band { fill-opacity: .15; } .name { font-weight: 600; }"
    for name, light, dark in (
        ("exec", "#3f74a8", "#6ea4d8"),
        ("elastic", "#0b9683", "#38c7b2"),
        ("call", "#c2701b", "#f0ab5c"),
    ):
        style += f" .curve.{name} {{ stroke: {light}; fill: none; }}"
        style += f" @media (prefers-color-scheme: dark) {{ .curve.{name} {{ stroke: {dark}; }} }}"
    picture = standalone(draw(Path(sys.argv[1]))).replace("</style>", f"{style}</style>", 1)
    (HERE / "learning.svg").write_text(picture, encoding="utf-8")
    print("docs/pictures/learning.svg")


if __name__ == "__main__":
    main()
