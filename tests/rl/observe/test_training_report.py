"""The report of a training run: its numbers are those of the lines, no name in it does anything, a browser draws it."""

from __future__ import annotations

import random
import re
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.browser import SharedBrowser
from tests.rl.recordings import HOSTILE, simple, span
from tests.rl.training_lines import (
    TASKS,
    failed_warm_start,
    resumed_lines,
    run_lines,
    trained,
    write_lines,
)

from tangram.cli.train import summary
from tangram.errors import InvalidConfig, InvalidTrace
from tangram.reports.formatting import percent
from tangram.rl.config.training_settings import TrainSettings
from tangram.rl.observe.pool_usage_monitor import use_between
from tangram.rl.observe.run_history import RunHistory, step_time_parts
from tangram.rl.observe.timeline_trace import trace_of_training
from tangram.rl.observe.training_progress import TrainingProgress
from tangram.rl.observe.training_report import report_page, write_report
from tangram.rl.runs.metrics_lines import (
    AnyMetricsLine,
    Evaluated,
    Noticed,
    PoolUse,
    RunBegan,
    RunEnded,
    TaskStep,
    Trained,
    WarmStartChecked,
)
from tangram.rl.runs.metrics_log import read_metrics
from tangram.rl.runs.trajectory_log import TrajectoryLog
from tangram.rl.trajectories.trajectory import Stage
from tangram.runtime.latency_histogram import LatencyHistogram
from tangram.runtime.views import PoolUseReading

BYTES_MAX = 1 << 20


def written(folder: Path, lines: list[AnyMetricsLine]) -> str:
    write_lines(folder, lines)
    return write_report(folder).read_text()


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="charts-data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    decoded: dict[str, Any] = msgspec.json.decode(match[1])
    return decoded


def chart(text: str, label: str) -> dict[str, Any]:
    return next(spec for spec in data_of(text)["charts"].values() if spec["label"] == label)


def series(spec: dict[str, Any], name: str) -> list[float | None]:
    return next(each["y"] for each in spec["series"] if each["name"] == name)


def cells(text: str, heading: str, first: str) -> list[str]:
    """The row of the table under a heading that begins so."""
    part = text[text.index(f"<h2>{heading}</h2>") :]
    row = next(row for row in re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL) if f">{first}</td>" in row)
    return [re.sub(r"<[^>]*>", "", cell).replace("\u00a0", " ") for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]


# ---- the numbers are those of the lines -------------------------------------------------------------------------


def test_scores_of_the_page_are_those_of_the_evaluations(tmp_path: Path) -> None:
    lines = run_lines(steps=60)
    text = written(tmp_path, lines)
    evaluations = [line for line in lines if isinstance(line, Evaluated)]
    warm = next(line for line in lines if isinstance(line, WarmStartChecked) and line.over)
    for task in TASKS:
        row = cells(text, "Learning curves", task)
        assert row[1] == f"{warm.scores[task]:.3f}", "the same as the command line says under this name"
        assert row[3] == f"{evaluations[0].scores[task]:.3f}", "before the first step"
        assert row[4] == f"{evaluations[-1].scores[task]:.3f}"
        assert row[5] == "0.040"
        assert row[6] == "64"
        assert row[7] == f"{sum(line.scores[task] for line in evaluations[-5:]) / 5:.3f}"
        assert row[8] == f"{max(line.scores[task] for line in evaluations[1:]):.3f}"
        reached = next(line for line in evaluations[1:] if line.scores[task] >= 0.95 * evaluations[-1].scores[task])
        assert row[10] == str(reached.step)
        shown = series(chart(text, f"Rewards of {task}"), "held-out")
        assert shown == pytest.approx([line.scores[task] for line in evaluations], rel=1e-4)
    assert (
        f"frozenlake {evaluations[0].scores['frozenlake']:.2f}\u00a0→\u00a0{evaluations[-1].scores['frozenlake']:.2f}"
        in text
    )


def test_curves_of_the_page_are_those_of_the_steps(tmp_path: Path) -> None:
    lines = run_lines(steps=40)
    text = written(tmp_path, lines)
    steps = [line for line in lines if isinstance(line, Trained)]
    xs = data_of(text)["xs"]["steps"]
    assert xs["step"] == list(range(1, 41))
    assert xs["seconds"] == pytest.approx([line.at_s for line in steps], rel=1e-4)
    assert xs["trajectories"] == [126 * number for number in range(1, 41)]
    raw = series(chart(text, "Rewards of codefix"), "training, each step")
    assert raw == pytest.approx([line.tasks["codefix"].reward for line in steps], rel=1e-4)
    entropy = series(chart(text, "Entropy, nats"), "entropy")
    assert entropy == pytest.approx([line.metrics["entropy"] for line in steps], rel=1e-4)
    busy = series(chart(text, "Engines: busy share"), "engine-1")
    assert busy == pytest.approx([line.engines[1].busy_share for line in steps], rel=1e-4)
    ages = chart(text, "Trajectories by staleness")
    assert ages["values"] == [sum(line.staleness[age] for line in steps) for age in (0, 1)]
    assert ages["limit"]["after"] == 1


def test_pools_and_their_cost_are_added_up(tmp_path: Path) -> None:
    lines = run_lines(steps=20)
    text = written(tmp_path, lines)
    uses = [line.pools[0] for line in lines if isinstance(line, Trained)]
    actions = sum(use.actions for use in uses)
    act = cells(text, "Action completion time by pool", "cpu@local")
    assert act[:3] == ["cpu@local", "2", f"{actions:,}"]
    mean = sum(use.act_mean_s * use.actions for use in uses) / actions
    assert act[3] == f"{mean * 1000:.1f} ms"
    cost = cells(text, "Cost against reservation", "cpu@local")
    assert cost[1] == f"{sum(use.held_unit_s for use in uses):,.1f}"
    assert cost[2] == f"{sum(use.reserved_unit_s for use in uses):,.1f}"
    assert cost[3] == "4.0×"


def test_discarded_work_is_reported_by_cause(tmp_path: Path) -> None:
    lines = run_lines(steps=21)
    text = written(tmp_path, lines)
    assert cells(text, "Discarded work", "groups dropped: stale")[1] == "3"
    assert cells(text, "Discarded work", "trajectories aborted as stale")[1] == "15"
    steps = [line for line in lines if isinstance(line, Trained)]
    batches = sum(its.trajectories * its.tokens for line in steps for its in line.tasks.values())
    trained = sum(line.metrics["tokens"] for line in steps)
    assert batches > trained, "some groups teach nothing"
    rows = {name: cells(text, "Discarded work", name)[1:] for name in
            ("tokens decoded", "tokens in no batch", "tokens in a batch, of groups that teach nothing")}  # fmt: skip
    share = [percent(part / (batches + 420)).replace("\u00a0", " ") for part in (420, batches - trained)]
    assert list(rows.values()) == [
        [f"{batches + 420:,.0f}", ""],
        ["420", share[0]],
        [f"{batches - trained:,.0f}", share[1]],
    ]
    drawn = chart(text, "Tokens not trained on")
    batch = batches / len(steps)
    assert series(drawn, "in no batch")[6] == pytest.approx(140 / (batch + 140), rel=1e-4)
    assert series(drawn, "teach nothing")[0] == pytest.approx(1.0 - trained / batches, rel=1e-4)


def test_dropped_groups_are_reported_as_at_the_end(tmp_path: Path) -> None:
    """Steps of a lineage that was given up are not shown; what was dropped in it stays dropped."""
    lines = run_lines(steps=21)
    lines[-1] = msgspec.structs.replace(lines[-1], dropped_so_far={"stale": 3, "lost_lineage": 41})
    text = written(tmp_path, lines)
    assert cells(text, "Discarded work", "groups dropped: lost_lineage")[1] == "41"
    content = summary(lines, TrainSettings(), tmp_path)
    assert content["groups_dropped"] == {"stale": 3, "lost_lineage": 41}
    view = TrainingProgress(TrainSettings(), quiet=True)
    for line in lines:
        view.on_line(line)
    assert view.status.dropped == content["groups_dropped"]


def test_the_p99_of_a_pool_is_that_of_all_its_actions(tmp_path: Path) -> None:
    """Of 10 steps with 100 actions of 1 s each, and one step with a single action of 60 s: it is none of the slowest
    hundredth, though it is all of its step."""

    def use(*lengths_s: float) -> PoolUse:
        latencies = LatencyHistogram()
        for length_s in lengths_s:
            latencies.add(0.0, length_s, 0.0)
        reading = PoolUseReading(
            name="cpu", total=0.0, actions=latencies.count, act_s=latencies.total_s, act_cells=latencies.cells,
            waiting_s=0.0, held_unit_s=0.0, reserved_unit_s=0.0, waiting=0,
        )  # fmt: skip
        return use_between(None, reading)

    uses = [*(use(*[0.95] * 100) for _ in range(10)), use(60.0)]
    pools = RunHistory(replaced(run_lines(steps=11), uses)).pools()
    assert pools[0].act_p99_s is not None and 0.9 < pools[0].act_p99_s <= 1.0
    assert pools[0].act_p99_worst_s > 50.0
    unknown = [msgspec.structs.replace(each, act_cells={}) for each in uses]
    assert (
        cells(written(tmp_path, replaced(run_lines(steps=11), unknown)), "Action completion time by pool", "cpu")[4]
        == "-"
    )


def replaced(lines: list[AnyMetricsLine], uses: list[PoolUse]) -> list[AnyMetricsLine]:
    """With these of a pool in its steps."""
    left = iter(uses)
    return [msgspec.structs.replace(line, pools=(next(left),)) if isinstance(line, Trained) else line for line in lines]


def test_notices_are_listed_and_marked(tmp_path: Path) -> None:
    text = written(tmp_path, run_lines(steps=30))
    assert "17 trajectories wait for pool search" in text
    marks = data_of(text)["marks"]
    assert [mark["step"] for mark in marks] == [10, 15]
    assert cells(text, "Events", "engine")[1] == "10"


@pytest.mark.parametrize("evaluation_s", [0.0, 0.2, 50.0])
def test_the_parts_of_a_step_are_the_step(evaluation_s: float) -> None:
    line = next(line for line in run_lines(steps=10) if isinstance(line, Trained))
    line = msgspec.structs.replace(line, evaluation_s=evaluation_s)
    parts = step_time_parts(line)
    assert sum(parts.values()) == pytest.approx(line.step_s)
    assert parts["wait: generate"] == pytest.approx(line.waited_for["generate"])
    assert sum(part for name, part in parts.items() if name.startswith("wait: ")) == pytest.approx(line.wait_s)


def test_the_report_contains_the_timeline_of_a_log(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "trajectories.jsonl") as log:
        log.append(simple("t/0/0.0", [span(Stage.GENERATE, 0.0, 1.0), span(Stage.STEP, 1.0, 3.0)]))
    text = written(tmp_path, run_lines(steps=3))
    assert "No engine was decoding for 67% of the time: 100% of that for environment: step." in text
    (tmp_path / "trajectories.jsonl").write_text("no log\n")
    assert "is not shown here" in write_report(tmp_path).read_text()


# ---- odd runs ---------------------------------------------------------------------------------------------------


def test_a_run_without_evaluations_reports_training_rewards(tmp_path: Path) -> None:
    text = written(tmp_path, run_lines(steps=12, evaluate_every=0))
    assert "Training rewards in" in text
    assert "as there was no evaluation" in text
    assert "held-out" not in [each["name"] for each in chart(text, "Rewards of lookup")["series"]]


def test_a_run_of_one_step_has_a_report(tmp_path: Path) -> None:
    text = written(tmp_path, run_lines(steps=1, evaluate_every=0, notices=False))
    assert "1 step on 126 trajectories" in text.replace("\u00a0", " ")
    assert data_of(text)["xs"]["steps"]["from"]["step"] == [0]


def test_a_run_that_was_resumed_twice_shows_each_step_once(tmp_path: Path) -> None:
    lines = resumed_lines(checkpoints=(20, 40), lost=7, steps=60)
    assert [line.step for line in lines if isinstance(line, Trained)].count(25) == 2
    text = written(tmp_path, lines)
    assert data_of(text)["xs"]["steps"]["step"] == list(range(1, 61))
    assert "It was resumed 2 times" in text
    assert text.count("4 samples went back to the buffer") == 2
    seconds = data_of(text)["xs"]["steps"]["seconds"]
    assert seconds == sorted(seconds)


def test_a_failure_in_the_warm_start_is_reported(tmp_path: Path) -> None:
    text = written(tmp_path, failed_warm_start("OSError: no space left on device"))
    assert "The run failed in its warm start: OSError: no space left on device." in text
    assert [each["name"] for each in chart(text, "Rewards of codefix")["series"]] == ["warm start"]


def test_a_run_that_only_started_has_a_report(tmp_path: Path) -> None:
    assert "in its warm start" in written(tmp_path, run_lines(steps=0)[:1])
    assert "There is nothing of this run yet." in written(tmp_path / "empty", [])


def test_a_failure_after_steps_is_reported_with_the_learning_curve(tmp_path: Path) -> None:
    text = written(tmp_path, run_lines(steps=20, cause="TrainerDied: killed by signal 9"))
    assert "The run failed: TrainerDied: killed by signal 9. Held-out scores in" in text


def test_a_run_that_goes_on_has_no_end(tmp_path: Path) -> None:
    write_lines(tmp_path, run_lines(steps=5, cause=""), torn='{"type":"Trained","at')
    assert "It has not ended" in write_report(tmp_path).read_text()
    over = run_lines(steps=5, cause="interrupted")
    began = RunBegan(at_s=50.0, began_at=0.0, step=5, mode="async", alpha=1, resumed_from="x")
    assert RunHistory([*over, began]).end is None


def test_numbers_that_are_none_leave_gaps(tmp_path: Path) -> None:
    lines = run_lines(steps=3, evaluate_every=0)
    at = next(place for place, line in enumerate(lines) if isinstance(line, Trained))
    line = lines[at]
    assert isinstance(line, Trained)
    bad = {**line.metrics, "gradient_norm": float("nan"), "loss": float("inf")}
    run = RunHistory([*lines[:at], msgspec.structs.replace(line, metrics=bad), *lines[at + 1 :]])
    values = series(chart(report_page(run, tmp_path), "Gradient norm"), "gradient_norm")
    assert values[0] is None
    assert all(value is not None for value in values[1:])


def test_a_step_is_judged_by_the_alpha_that_it_was_made_with(tmp_path: Path) -> None:
    lines = run_lines(steps=4, alpha=3)
    ages = {1: (1, 0, 1), 2: (1, 1), 3: (4,), 4: (3, 1)}
    lines = [msgspec.structs.replace(line, staleness=ages[line.step]) if isinstance(line, Trained) else line
             for line in lines]  # fmt: skip
    at = next(at for at, line in enumerate(lines) if isinstance(line, Trained) and line.step == 3)
    for alpha, older in ((1, "none older than α"), (0, "1 trajectory older than α")):
        began = RunBegan(at_s=0.0, began_at=0.0, step=2, mode="async", alpha=alpha, resumed_from="x")
        text = written(tmp_path / str(alpha), [*lines[:at], began, *lines[at:]])
        assert f"at most 2, with α = 3, then {alpha}; {older}." in text
        assert f"in mode async with α = 3, then {alpha}:" in text


def test_samples_older_than_alpha_are_reported(tmp_path: Path) -> None:
    lines = run_lines(steps=4, alpha=2, mode="start-bound")
    began = lines[0]
    assert isinstance(began, RunBegan)
    text = written(tmp_path, [msgspec.structs.replace(began, alpha=1), *lines[1:]])
    assert "older than α" in text
    assert "none older than α" not in text


def test_a_long_run_stays_small_and_keeps_its_sums(tmp_path: Path) -> None:
    lines = run_lines(steps=2000, evaluate_every=2)
    text = written(tmp_path, lines)
    assert len(text.encode()) < BYTES_MAX
    xs = data_of(text)["xs"]["steps"]
    assert len(xs["step"]) <= 320
    assert xs["step"][-1] == 2000
    assert xs["from"]["step"][1:] == xs["step"][:-1]
    raw = series(chart(text, "Rewards of codefix"), "training, each step")
    first = [line.tasks["codefix"].reward for line in lines if isinstance(line, Trained)][: xs["step"][0]]
    assert raw[0] == pytest.approx(sum(first) / len(first), rel=1e-4)


def test_a_folder_without_a_run_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InvalidTrace, match=r"metrics\.jsonl:1"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_report_is_reproducible_and_written_to_the_given_path(tmp_path: Path) -> None:
    write_lines(tmp_path, run_lines(steps=5))
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path, tmp_path / "other.html").read_bytes() == first
    assert read_metrics(tmp_path / "metrics.jsonl")


# ---- text that others chose --------------------------------------------------------------------------------------


def hostile_lines() -> list[AnyMetricsLine]:
    names = [name for name in HOSTILE if name.isprintable() and name] + ["</script><b>bold</b>", 'a" onload="x']
    base = next(line for line in run_lines(steps=1) if isinstance(line, Trained))
    its = TaskStep(groups=1, trajectories=8, reward=0.5, turns=1.0, tokens=1.0, staleness_mean=0.0, staleness_max=0)
    line = msgspec.structs.replace(
        base,
        tasks=dict.fromkeys(names, its),
        waited_for=dict.fromkeys(names, 0.01),
        dropped=dict.fromkeys(names, 1),
        pools=tuple(msgspec.structs.replace(base.pools[0], name=name) for name in names),
        engines=tuple(msgspec.structs.replace(base.engines[0], name=name) for name in names),
        metrics={**base.metrics, **dict.fromkeys(names, 1.0)},
    )
    scores = dict.fromkeys(names, 0.5)
    return [
        RunBegan(at_s=0.0, began_at=0.0, mode=names[0], alpha=1, settings={name: name for name in names}),
        WarmStartChecked(at_s=1.0, step=1, loss=1.0, scores=scores, over=True, cause=names[0]),
        line,
        Evaluated(at_s=line.at_s, step=1, seconds=1.0, scores=scores),
        *(Noticed(at_s=line.at_s, kind=name, text=name) for name in names),
        RunEnded(at_s=line.at_s, step=1, cause=names[-2]),
    ]


def test_names_are_text(tmp_path: Path) -> None:
    text = written(tmp_path, hostile_lines())
    assert "<b>bold" not in text
    assert "<img" not in text
    assert escape("</script><b>bold</b>") in text
    assert text.count("</script>") == text.count("<script"), "no name has ended a script"


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    text = written(tmp_path, run_lines(steps=3))
    assert re.findall(r'(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg")', text) == []


# ---- in a browser -----------------------------------------------------------------------------------------------


class ReportPage:
    """A report in a browser, and all that went wrong in it."""

    def __init__(self, browser: SharedBrowser, path: Path, scheme: str = "light", width: int = 1280) -> None:
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def fine(self, path: Path) -> None:
        assert self.page.evaluate("document.body.dataset.drawn") == "true"
        assert self.page.evaluate("window.owned") is None
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
        assert self.requests == [path.as_uri()]
        assert self.wrong == []
        self.context.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_every_chart_is_drawn_along_each_axis(browser: SharedBrowser, tmp_path: Path, scheme: str, width: int) -> None:
    write_lines(tmp_path, run_lines(steps=30))
    path = write_report(tmp_path)
    screen = ReportPage(browser, path, scheme, width)
    shown = "[...document.querySelectorAll('figure[data-chart]')].filter((figure) => figure.checkVisibility())"
    last = {}
    for axis in ("seconds", "trajectories", "step"):
        screen.page.click(f"label[for=axis-{axis}]")
        drawn = screen.page.evaluate(f"{shown}.map((figure) => figure.querySelector('svg').dataset.axis)")
        assert set(drawn) == {axis, ""}
        assert len(drawn) > 15
        last[axis] = screen.page.locator("figure[data-chart] svg >> nth=0").inner_html()
    assert len(set(last.values())) == 3
    broken = screen.page.evaluate("[...document.querySelectorAll('svg *')].map((one) => one.outerHTML).join('')")
    assert "NaN" not in broken
    screen.fine(path)


def test_hovering_shows_values_and_a_table_shows_all(browser: SharedBrowser, tmp_path: Path) -> None:
    lines = run_lines(steps=30)
    write_lines(tmp_path, lines)
    path = write_report(tmp_path)
    screen = ReportPage(browser, path)
    stages = screen.page.locator("figure[data-chart^=stages]")
    stages.scroll_into_view_if_needed()
    box = stages.locator("rect.all").bounding_box()
    screen.page.mouse.move(box["x"] + 2, box["y"] + 40)
    tip = screen.page.locator("#tip").text_content()
    first = next(line for line in lines if isinstance(line, Trained))
    assert tip.startswith("step 1\n")
    assert f"train: {first.train_s * 1000:.0f} ms" in tip
    stages.locator("button").click()
    assert stages.locator("tbody tr").count() == 30
    assert stages.locator("button").get_attribute("aria-expanded") == "true"
    stages.locator("button").click()
    assert stages.locator("table").count() == 0
    screen.page.locator("summary", has_text="More metrics").click()
    assert screen.page.locator("figure[data-chart] h3", has_text="Learning rate").is_visible()
    # Browsers dispatch `toggle` after the click returned.
    screen.page.locator("details[open] figure svg").first.wait_for()
    screen.fine(path)


@pytest.mark.parametrize("what", ["hostile", "one", "resumed", "failed", "began", "empty", "sparse"])
def test_odd_runs_are_drawn_without_complaint(browser: SharedBrowser, tmp_path: Path, what: str) -> None:
    runs: dict[str, list[AnyMetricsLine]] = {
        "hostile": hostile_lines(),
        "one": run_lines(steps=1, evaluate_every=0, notices=False),
        "resumed": resumed_lines(),
        "failed": failed_warm_start(),
        "began": run_lines(steps=0)[:1],
        "empty": [],
        "sparse": [trained(1, 0.0, ("only",), 0, 0, random.Random(0))],
    }
    write_lines(tmp_path, runs[what])
    path = write_report(tmp_path)
    screen = ReportPage(browser, path)
    if what not in ("began", "empty"):
        screen.page.click("label[for=axis-seconds]")
        for button in screen.page.locator("button.plain").all():
            if button.is_visible():
                button.click()
    assert "NaN" not in screen.page.evaluate(
        "[...document.querySelectorAll('svg *')].map((one) => one.outerHTML).join('')"
    )
    screen.fine(path)


# ---- the Chrome trace -------------------------------------------------------------------------------------------


def test_the_trace_has_every_step_with_its_parts_and_the_counters() -> None:
    run = RunHistory(run_lines())
    events = trace_of_training(run).events()
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == [f"step {line.step}" for line in run.steps]
    assert [event["dur"] for event in steps] == [pytest.approx(1e6 * line.step_s, abs=1) for line in run.steps]
    assert {"wait", "train", "push"} <= {event["name"] for event in events if event["ph"] == "X"}
    assert {"reward", "groups", "held-out reward"} <= {event["name"] for event in events if event["ph"] == "C"}
    assert sum(event["ph"] == "i" for event in events) == len(run.notices)
