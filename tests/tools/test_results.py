"""The page of results, and the headlines of the README."""

from __future__ import annotations

import msgspec
import pytest
from tools.reference.pages import ROOT
from tools.reference.results import BEGIN, END, HEADLINES, headlines, number, results_page, with_results

from tangram.bench import BenchResult, Goal
from tangram.errors import InvalidConfig


def result(**metrics: float) -> BenchResult:
    goals = {"act_ratio_64": Goal(">=", 4.0), "step_ratio_64": Goal(">=", 1.4), "us_per_action": Goal("<=", 60.0)}
    return BenchResult(
        name="coding",
        label="simulated",
        settings={},
        metrics=metrics,
        spread={"act_ratio_64": (4.2, 4.4)},
        goals={name: goal for name, goal in goals.items() if name in metrics},
        notes=[],
    )


def cells(result: BenchResult) -> dict[str, list[str]]:
    """The result, interval and goal of each metric on the page."""
    page = results_page("", msgspec.json.encode(result))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    return {row[0].strip("`"): row[1:] for row in rows}


def recorded() -> list[BenchResult]:
    lines = (ROOT / "docs/reference/results.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=BenchResult) for line in lines]


def test_the_page_shows_every_metric_with_its_interval_and_goal() -> None:
    rows = cells(result(act_ratio_64=4.33, weighted_act_ratio_64=0.81))
    assert rows["act_ratio_64"] == ["4.33", "4.2 to 4.4", ">= 4"]
    assert rows["weighted_act_ratio_64"] == ["0.81", "", "printed"]


def test_a_missed_goal_names_the_best_possible_in_enough_digits() -> None:
    rows = cells(result(step_ratio_64=1.3962, step_ceiling_ratio_64=1.3981))
    assert rows["step_ratio_64"] == ["1.396", "", ">= 1.4 (missed; the best possible is 1.398)"]


def test_a_missed_goal_without_a_known_best_is_still_marked() -> None:
    assert cells(result(us_per_action=80.8))["us_per_action"] == ["80.8", "", "<= 60 (missed)"]


def test_a_goal_that_is_met_is_not_marked() -> None:
    assert cells(result(step_ratio_64=1.4, step_ceiling_ratio_64=1.41))["step_ratio_64"] == ["1.4", "", ">= 1.4"]


def test_headlines_show_the_recorded_numbers_with_their_command() -> None:
    table = headlines(recorded()).splitlines()
    assert 6 <= len(table) - 2 == len(HEADLINES) <= 8
    reservation = next(result for result in recorded() if result.name == "reservation")
    assert f"{number(reservation.metrics['act_ratio'], 2)}×" in table[2] and "`tangram bench reservation`" in table[2]
    assert "p99" in table[2], "a mean stands beside its p99"


def test_headlines_of_benchmarks_that_did_not_run_are_left_out() -> None:
    assert len(headlines(recorded()[:1]).splitlines()) == 4


def test_the_readme_is_changed_between_its_markers_alone() -> None:
    page = with_results(f"before\n{BEGIN}\nold\n{END}\nafter\n", b"")
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "\nold\n" not in page


def test_a_readme_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="markers"):
        with_results("# Tangram\n", b"")


@pytest.mark.parametrize(
    ("value", "expected"), [(0.9431, "0.943"), (10.04, "10"), (99.94, "99.9"), (100.4, "100"), (1823.4, "1,823")]
)
def test_three_digits_where_they_mean_something(value: float, expected: str) -> None:
    assert number(value) == expected
