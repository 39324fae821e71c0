"""The report of a training run: what is in its folder, as one self-contained HTML file.

Owns the reading of the folder and the writing of the file. What the page says is in training_report_page. Promises a
page for every run of which there are lines, however it ended, and that a log of trajectories that is missing, too long
or damaged costs that section alone.
"""

from __future__ import annotations

from pathlib import Path

from tangram.errors import InvalidInput
from tangram.files.atomic_file import check_writable, whole_file
from tangram.rl.observe.timeline import logged
from tangram.rl.observe.training_report_page import report_page
from tangram.rl.observe.training_report_run import Run
from tangram.rl.observe.training_report_sections import Played
from tangram.rl.runs.metrics_log import METRICS_FILE, read_metrics
from tangram.rl.runs.trajectory_log import read

REPORT_FILE = "report.html"
TRAJECTORIES = "trajectories.jsonl*"
"""In the folder of a run."""
LOG_BYTES_MAX = 64 << 20
"""Of the logs of trajectories together: more would take longer to read than the report is worth waiting for, and
`tangram rl timeline` does it."""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Into `report.html` of the folder, unless told otherwise; returns where it is. Raises InvalidConfig if there is no
    run or the file cannot be written, InvalidTrace for malformed lines."""
    folder = Path(folder)
    path = Path(out) if out is not None else folder / REPORT_FILE
    run = Run(read_metrics(folder / METRICS_FILE))
    text = report_page(run, folder, played(folder))
    check_writable("report", path)
    with whole_file("report", path) as file:
        file.write(text.encode())
    return path


def played(folder: Path) -> Played | None:
    """What the logs of trajectories tell; None: there is none."""
    logs = sorted(each for each in folder.glob(TRAJECTORIES) if each.is_file() and not each.name.endswith(".partial"))
    if not logs:
        return None
    length = sum(each.stat().st_size for each in logs)
    if length > LOG_BYTES_MAX:
        return Played(log=logs[-1], why=f"they take {length >> 20:,} MiB, which is more than the report reads")
    try:
        return Played(log=logs[-1], timeline=logged(read(logs[-1])))
    except InvalidInput as error:
        return Played(log=logs[-1], why=str(error))
