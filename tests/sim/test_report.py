"""Reports: one HTML file that stands alone, says what was found, and lets nothing from outside become markup."""

from __future__ import annotations

import html.parser
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tangram.errors import InvalidConfig
from tangram.reports.formatting import seconds, tick_seconds
from tangram.reports.svg import LinearScale, LogScale, nice_step
from tangram.sim import charts, report
from tangram.sim.compare import Comparison, Setup, Source, compare
from tangram.sim.plan import Plan, PlanRequest, plan
from tangram.sim.result import ActionRow, SimulationResult
from tangram.sim.size import Size, default_size

COMMAND = "tangram sim coding --batch 12 --cores 2"


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    source = Source(workload="coding", batch=12)
    setup = Setup(source=source, size=Size(cores=2), policies=("pods:0.5", "fcfs", "adaptive"), seeds=(0, 1, 2))
    return compare([setup], workers=1, keep=True)[0]


@pytest.fixture(scope="module")
def text(comparison: Comparison) -> str:
    return report.comparison_page([comparison], COMMAND)


@pytest.fixture(scope="module")
def answer() -> Plan:
    source = Source(workload="coding", batch=8)
    return plan(PlanRequest(source=source, size=default_size(source.build(0)), seeds=(0,)), workers=1)


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and gathers what the tests ask for."""

    VOID = ("meta", "line", "rect", "path", "circle")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tips: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.tips += [value or "" for name, value in attrs if name == "data-tip"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.tips += [value or "" for name, value in attrs if name == "data-tip"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


# ---- the whole file -------------------------------------------------------------------------------------------


def test_the_file_is_well_formed_and_loads_nothing(text: str) -> None:
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in page.attributes}
    assert "http" not in text and "@import" not in text and "url(" not in text
    for drawing in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(drawing)


def test_the_report_contains_the_results(comparison: Comparison, text: str) -> None:
    words = " ".join(Page(text).words).replace("\u00a0", " ")
    ratio = comparison.ratio("adaptive", "act_mean_s")
    assert f"{ratio.mean:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]" in words
    assert f"{ratio.mean:.1f} times sooner with adaptive than with pods:0.5" in words
    assert "simulated" in words
    assert COMMAND in words
    for heading in ("How long actions take", "Where that time goes", "Cores in use", "A closer look"):
        assert heading in words


def test_light_and_dark_are_both_styled(text: str) -> None:
    assert "prefers-color-scheme: dark" in text
    light, dark = text.split("prefers-color-scheme: dark")[:2]
    for name in ("--paper", "--ink", "--p0", "--p6", "--k0", "--k6"):
        assert f"{name}:" in light and f"{name}:" in dark


def test_the_same_results_give_the_same_bytes(comparison: Comparison, text: str) -> None:
    assert report.comparison_page([comparison], COMMAND) == text


def test_every_size_has_its_table(comparison: Comparison) -> None:
    text = report.comparison_page([comparison, comparison], COMMAND)
    assert text.count("What each policy takes") == 2
    Page(text)


def test_markup_in_names_stays_text(comparison: Comparison) -> None:
    evil = '<script>alert("x")</script>'
    setup = msgspec.structs.replace(
        comparison.setup, source=Source(workload="coding", batch=12, options=(("run", evil),))
    )
    rows = [
        msgspec.structs.replace(
            played,
            result=played.result
            and msgspec.structs.replace(
                played.result,
                rows=[
                    msgspec.structs.replace(row, kind=evil, key=evil, id=f"{evil}.0.0") for row in played.result.rows
                ],
            ),
        )
        for played in comparison.rows
    ]
    hostile = msgspec.structs.replace(comparison, setup=setup, rows=rows)
    text = report.comparison_page([hostile], f"tangram sim --trace '{evil}'")
    assert Page(text).tags.count("script") == 1
    assert any(evil in tip for tip in Page(text).tips)


def test_one_policy_alone_makes_a_report(comparison: Comparison) -> None:
    setup = msgspec.structs.replace(comparison.setup, policies=("adaptive",), seeds=(0,))
    alone = msgspec.structs.replace(comparison, setup=setup, rows=[comparison.rows[2]])
    words = " ".join(Page(report.comparison_page([alone], COMMAND)).words)
    assert "on average with adaptive" in words


@pytest.mark.parametrize("workload", ["search", "teachers", "elastic"])
def test_workloads_without_sandboxes_make_a_report(workload: str) -> None:
    source = Source(workload=workload, batch=12)
    setup = Setup(source=source, size=default_size(source.build(0)), policies=("fcfs", "adaptive"), seeds=(0,))
    text = report.comparison_page(compare([setup], workers=1, keep=True), COMMAND)
    Page(text)
    assert ("Cores in use" in text) == (workload == "elastic")
    assert ("Devices in use" in text) == (workload != "elastic")


def test_a_file_that_cannot_be_written_is_refused(comparison: Comparison, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="can be written"):
        report.write_comparison(tmp_path, [comparison], COMMAND)


# ---- the headline ---------------------------------------------------------------------------------------------


def with_act(comparison: Comparison, name: str, values: list[float]) -> Comparison:
    """The same comparison with other mean ACTs for one policy."""
    left = iter(values)
    rows = [
        msgspec.structs.replace(row, summary=row.summary | {"act_mean_s": next(left)}) if row.policy == name else row
        for row in comparison.rows
    ]
    return msgspec.structs.replace(comparison, rows=rows)


def test_the_headline_distinguishes_gain_loss_and_doubt(comparison: Comparison) -> None:
    base = comparison.values("pods:0.5", "act_mean_s")
    values_by_policy = {
        "half": [value / 2.0 for value in base],
        "double": [value * 2.0 for value in base],
        "same": [value * factor for value, factor in zip(base, (0.97, 1.0, 1.03), strict=True)],
        "noisy": [value * factor for value, factor in zip(base, (0.1, 1.0, 1.2), strict=True)],
    }
    lines = {key: report.headline(with_act(comparison, "adaptive", values)) for key, values in values_by_policy.items()}
    assert lines["half"] == "Actions complete 2.0 times sooner with adaptive than with pods:0.5."
    assert lines["double"] == "Actions complete 2.0 times later with adaptive than with pods:0.5."
    assert lines["same"] == "Actions complete about as soon with adaptive as with pods:0.5."
    assert lines["noisy"].endswith("but these few seeds leave it open.")


# ---- the pictures ---------------------------------------------------------------------------------------------


def row(number: int, submitted: float, waiting: float, execution: float, **changes) -> ActionRow:
    fields = {
        "id": f"t/{number}.0.0",
        "run": "r",
        "kind": "exec",
        "key": "ls",
        "status": "succeeded",
        "submitted_at": submitted,
        "ended_at": submitted + waiting + execution,
        "waiting_s": waiting,
        "execution_s": execution,
        "overhead_s": 0.0,
        "node": "gpu-0",
        "width": 2.0,
        "cpu_s": 0.0,
    }
    return ActionRow(**(fields | changes))


def result(rows: list[ActionRow], busy: list[tuple[float, float]] | None = None) -> SimulationResult:
    ends = [row.ended_at for row in rows]
    return SimulationResult(
        name="fcfs",
        workload="w",
        seed=0,
        rows=rows,
        episode_ends=ends,
        episodes_failed=0,
        makespan_s=max(ends),
        cores=4.0,
        core_s=0.0,
        busy=busy or [],
    )


def test_devices_in_use_are_averaged_exactly() -> None:
    pool = charts.PoolChart(title="Devices", unit="devices", total=8.0, nodes=("gpu-0",))
    simulated = result([row(1, 0.0, 1.0, 2.0), row(2, 2.0, 0.0, 2.0), row(3, 0.0, 0.0, 4.0, node="cpu-0")])
    assert pool.mean_usage(simulated, np.array([0.0, 1.0, 2.0, 3.0, 4.0])).tolist() == [0.0, 2.0, 4.0, 2.0]


def test_cores_in_use_keep_their_value_until_the_next_sample() -> None:
    pool = charts.PoolChart(title="Cores", unit="cores", total=4.0)
    simulated = result([row(1, 0.0, 0.0, 4.0)], busy=[(1.0, 2.0), (1.5, 4.0), (3.0, 0.0)])
    assert pool.mean_usage(simulated, np.array([0.0, 1.0, 2.0, 3.0, 4.0])).tolist() == [0.0, 3.0, 4.0, 0.0]


def test_the_window_lies_where_most_is_waiting() -> None:
    rows = [row(k, 10.0 * k, 0.0, 1.0) for k in range(100)] + [row(200 + k, 600.0, 15.0, 1.0) for k in range(30)]
    window = charts.busiest_window(result(rows))
    assert window.start_s <= 600.0 < window.end_s
    assert len(window.trajectories) == charts.TIMELINE_ROWS


def test_actions_of_one_turn_share_their_row() -> None:
    rows = [row(1, 0.0, 0.0, 2.0), row(1, 0.0, 0.0, 3.0), row(1, 5.0, 0.0, 1.0)]
    placed = list(charts.side_by_side(rows))
    assert [(place, share) for _, place, share in placed] == [(0.0, 0.5), (0.5, 0.5), (0.0, 1.0)]


def test_splits_add_up_to_the_completion_time(comparison: Comparison) -> None:
    line = charts.ChartSeries(name="fcfs", css="p0", result=comparison.kept_result("fcfs"))
    for kind, (found,) in charts.time_splits([line]).items():
        acts = line.result.acts(kind)
        assert found.waiting_s + found.overhead_s + found.execution_s == pytest.approx(float(acts.mean()), rel=1e-6)


def test_scales_have_round_ticks() -> None:
    assert LinearScale(0.0, 1180.0, 0.0, 100.0).ticks(8) == [0.0, 300.0, 600.0, 900.0]
    assert LinearScale(0.0, 120.0, 0.0, 100.0).ticks(5) == [0.0, 30.0, 60.0, 90.0, 120.0]
    assert LogScale(0.02, 300.0, 0.0, 100.0).ticks(6) == [0.1, 1.0, 10.0, 100.0]
    assert [nice_step(rough) for rough in (0.03, 1.0, 1.5, 7.0)] == [0.05, 1.0, 2.0, 10.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (0.02, "20 ms"), (5.0, "5 s"), (90.0, "90 s"), (200.0, "200 s"), (300.0, "5 min"), (7200.0, "2 h")],
)
def test_times_on_an_axis_are_short(value: float, words: str) -> None:
    assert tick_seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 s"), (0.0123, "12.3 ms"), (0.9996, "1.00 s"), (9.999, "10.0 s"), (99.96, "100 s"), (1234.5, "1,234 s")],
)
def test_times_in_words_have_three_digits(value: float, words: str) -> None:
    assert seconds(value) == words


# ---- the plan -------------------------------------------------------------------------------------------------


def test_the_report_of_a_plan_shows_the_curve_and_the_answer(answer: Plan) -> None:
    text = report.plan_page(answer, "tangram plan coding")
    page = Page(text)
    words = " ".join(page.words).replace("\u00a0", " ")
    assert f"{answer.smallest} cores are enough, where 4 are reserved today." in words
    assert "tangram plan coding" in words and "simulated" in words
    assert page.tags.count("circle") == len(answer.points) + 1


def test_the_report_of_a_plan_without_an_answer_states_so(answer: Plan) -> None:
    words = " ".join(Page(report.plan_page(msgspec.structs.replace(answer, smallest=None), "x")).words)
    assert "No number of cores that was tried is enough." in words
