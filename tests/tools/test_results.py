"""The table of results in the README: nothing is left out that one must know to read it."""

from __future__ import annotations

import msgspec
import pytest
from tools.reference.pages import ROOT
from tools.reference.results import BEGIN, END, number, table, with_results

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


def cells(found: str) -> dict[str, list[str]]:
    """The result, interval and goal of each metric."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()[2:]]
    return {row[1].strip("`"): row[2:] for row in rows}


def test_the_p99_and_the_weighted_ratio_stand_under_the_mean() -> None:
    found = cells(table([result(act_ratio_64=4.33, weighted_act_ratio_64=0.81, p99_ratio_64=9.8, load_64=0.9)]))
    assert list(found) == ["act_ratio_64", "p99_ratio_64", "weighted_act_ratio_64"]
    assert found["act_ratio_64"] == ["4.33", "4.2 to 4.4", ">= 4"]
    assert found["weighted_act_ratio_64"] == ["0.81", "", "printed"]


def test_a_missed_goal_names_the_best_possible_in_digits_that_tell_them_apart() -> None:
    found = cells(table([result(step_ratio_64=1.3962, step_ceiling_ratio_64=1.3981)]))
    assert found["step_ratio_64"] == ["1.396", "", ">= 1.4 (missed; the best possible is 1.398)"]


def test_a_missed_goal_without_a_known_best_is_missed_all_the_same() -> None:
    assert cells(table([result(us_per_action=80.8)]))["us_per_action"] == ["80.8", "", "<= 60 (missed)"]


def test_where_all_goals_are_met_nothing_is_missed() -> None:
    found = table([result(act_ratio_64=4.33, step_ratio_64=1.4, step_ceiling_ratio_64=1.41, us_per_action=59.0)])
    assert "missed" not in found and "best possible" not in found
    assert cells(found)["step_ratio_64"] == ["1.4", "", ">= 1.4"]


def test_the_recorded_results_make_a_table_whether_they_meet_their_goals_or_not() -> None:
    lines = (ROOT / "docs/reference/results.jsonl").read_bytes()
    recorded = [msgspec.json.decode(line, type=BenchResult) for line in lines.splitlines()]
    met = [
        msgspec.structs.replace(one, metrics=one.metrics | {k: g.value for k, g in one.goals.items() if g.value})
        for one in recorded
    ]
    readme = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    now = with_results(readme, lines)
    then = with_results(readme, b"\n".join(msgspec.json.encode(one) for one in met))
    assert now.count("\n| `") == then.count("\n| `") > 30
    assert "missed" not in then
    for page in (now, then):
        assert page.startswith("before\n") and page.endswith("\nafter\n") and "\nold\n" not in page


def test_a_readme_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="markers"):
        with_results("# Tangram\n", b"")


@pytest.mark.parametrize(
    ("value", "told"), [(0.9431, "0.943"), (10.04, "10"), (99.94, "99.9"), (100.4, "100"), (1823.4, "1,823")]
)
def test_three_digits_where_they_mean_something(value: float, told: str) -> None:
    assert number(value) == told
