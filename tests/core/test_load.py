"""Offered load: what arrives per second, remembered for minutes and forgotten afterwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.load import MEMORY_S, OfferedLoad


def test_nothing_was_offered_before_anything_came() -> None:
    assert OfferedLoad().units("cpu", 100.0) == 0.0


@pytest.mark.parametrize("seconds", [20, 300, 3000])
def test_steady_arrivals_are_measured_by_what_they_keep_busy_at_any_duration(seconds: int) -> None:
    load = OfferedLoad()
    for second in range(seconds):
        load.add("cpu", 3.0, float(second))
    assert load.units("cpu", float(seconds)) == pytest.approx(3.0, rel=0.01)


def test_the_first_arrival_counts_over_one_second_at_least() -> None:
    load = OfferedLoad()
    load.add("cpu", 5.0, 10.0)
    assert load.units("cpu", 10.0) == pytest.approx(5.0, rel=0.01)
    assert load.units("cpu", 11.0) == pytest.approx(5.0, rel=0.01)
    assert load.units("cpu", 20.0) == pytest.approx(0.5, rel=0.05)


def test_what_arrived_long_ago_is_forgotten() -> None:
    load = OfferedLoad()
    for second in range(1000):
        load.add("cpu", 4.0, float(second))
    now = load.units("cpu", 1000.0)
    assert load.units("cpu", 1000.0 + MEMORY_S) == pytest.approx(now / 2.718, rel=0.05)
    assert load.units("cpu", 1000.0 + 20 * MEMORY_S) < 0.001


def test_a_change_of_the_rate_is_followed() -> None:
    load = OfferedLoad()
    for second in range(3000):
        load.add("cpu", 1.0 if second < 1500 else 10.0, float(second))
    assert load.units("cpu", 3000.0) == pytest.approx(10.0, rel=0.1)


def test_kinds_are_counted_apart() -> None:
    load = OfferedLoad()
    load.add("cpu", 2.0, 0.0)
    load.add("gpu", 7.0, 0.0)
    assert load.units("gpu", 1.0) == pytest.approx(3.5 * load.units("cpu", 1.0))
    assert load.units("search", 1.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 100.0)), min_size=1, max_size=30), st.floats(0, 1e6))
def test_the_load_is_never_negative_and_asking_changes_nothing(
    arrivals: list[tuple[float, float]], later: float
) -> None:
    load, now = OfferedLoad(), 0.0
    for gap, unit_s in arrivals:
        now += gap
        load.add("cpu", unit_s, now)
    first = load.units("cpu", now)
    assert 0.0 <= load.units("cpu", now + later) <= first * (1.0 + 1e-9)
    assert load.units("cpu", now) == first
    assert first <= 1.01 * sum(unit_s for _, unit_s in arrivals)
