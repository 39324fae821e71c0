"""Speed-ups: every form promises s(1) == 1, more is never slower, and k units are never worth more than k."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tangram.core.speedup import RIGID, Amdahl, PowerLaw, Speedup, Table
from tangram.errors import InvalidAction

SHARES = st.floats(0.0, 1.0)
UNITS = st.floats(0.01, 512.0)
ROUNDING = 1e-9


@st.composite
def tables(draw: st.DrawFn) -> Table:
    units = [1.0, *sorted(draw(st.sets(st.integers(2, 256), max_size=5)))]
    speedups = [1.0]
    for i in range(1, len(units)):
        speedups.append(min(units[i], speedups[-1] * (1.0 + draw(SHARES) * (units[i] / units[i - 1] - 1.0))))
    return Table(tuple(units), tuple(speedups))


SPEEDUPS = st.one_of(SHARES.map(PowerLaw), SHARES.map(Amdahl), tables())


@given(SPEEDUPS)
def test_one_unit_is_the_measure(speedup: Speedup) -> None:
    assert speedup.at(1.0) == 1.0


@given(SPEEDUPS, UNITS, UNITS)
def test_more_units_are_never_slower(speedup: Speedup, some: float, others: float) -> None:
    fewer, more = sorted((some, others))
    assert speedup.at(fewer) <= speedup.at(more) * (1.0 + ROUNDING)


@given(SPEEDUPS, UNITS)
def test_k_units_are_worth_at_most_k(speedup: Speedup, units: float) -> None:
    assert 0.0 < speedup.at(units) <= units * (1.0 + ROUNDING)


@given(SPEEDUPS, st.floats(0.01, 1.0))
def test_below_one_unit_an_action_slows_in_proportion(speedup: Speedup, units: float) -> None:
    assert speedup.at(units) == units


@given(SPEEDUPS, st.floats(1.5, 512.0))
def test_the_exponent_near_a_width_is_the_power_law_through_it(speedup: Speedup, units: float) -> None:
    exponent = speedup.exponent_near(units)
    assert 0.0 <= exponent <= 1.0
    assert PowerLaw(exponent).at(units) == pytest.approx(speedup.at(units))


@given(SPEEDUPS)
def test_every_form_survives_a_wire_as_itself(speedup: Speedup) -> None:
    assert msgspec.json.decode(msgspec.json.encode(speedup), type=Speedup) == speedup


def test_linear_and_rigid_are_the_ends() -> None:
    assert [PowerLaw(1.0).at(units) for units in (1, 2, 8)] == [1, 2, 8]
    assert [RIGID.at(units) for units in (1, 2, 8)] == [1, 1, 1]


def test_amdahl_approaches_the_serial_share_and_never_passes_it() -> None:
    speedup = Amdahl(0.9)
    assert speedup.at(2) == pytest.approx(1 / 0.55)
    assert speedup.at(1e9) == pytest.approx(10.0)
    assert all(speedup.at(2.0**power) < 10.0 for power in range(30))


@given(tables())
def test_a_table_returns_exactly_its_measurements(table: Table) -> None:
    for units, speedup in zip(table.units, table.speedups, strict=True):
        assert table.at(units) == pytest.approx(speedup)


@given(tables(), st.floats(1.0, 4.0))
def test_beyond_its_last_point_a_table_is_flat(table: Table, factor: float) -> None:
    assert table.at(table.units[-1] * factor) == pytest.approx(table.speedups[-1])


@given(SHARES, st.integers(2, 64), SHARES)
def test_between_two_points_a_table_is_the_power_law_through_them(exponent: float, last: int, part: float) -> None:
    table = Table((1.0, float(last)), (1.0, last**exponent))
    units = last**part
    assume(units > 1.0)
    assert table.at(units) == pytest.approx(units**exponent)


def test_a_table_interpolates_piecewise() -> None:
    table = Table((1, 4, 16), (1, 2, 8))
    assert table.at(2) == pytest.approx(math.sqrt(2))
    assert table.at(8) == pytest.approx(4.0)
    assert table.at(64) == 8


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, math.inf])
def test_exponents_and_shares_outside_0_to_1_are_refused(wrong: float) -> None:
    with pytest.raises(InvalidAction, match=r"speedup\.exponent: expected a number from 0 .* to 1 \(linear\), got"):
        PowerLaw(wrong)
    with pytest.raises(InvalidAction, match=r"speedup\.parallel: expected a share from 0 to 1, got"):
        Amdahl(wrong)


@pytest.mark.parametrize("wrong", ["x", None, True, [0.5]])
def test_exponents_and_shares_that_are_no_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidAction, match=r"speedup\.exponent: expected a number"):
        PowerLaw(wrong)
    with pytest.raises(InvalidAction, match=r"speedup\.parallel: expected a share"):
        Amdahl(wrong)


@pytest.mark.parametrize("wrong", [4, "14", (1, "4"), (1, None), (1, True), [1, 4]])
def test_the_points_of_a_table_are_numbers(wrong: Any) -> None:
    with pytest.raises(InvalidAction, match=r"speedup\.units: expected a tuple of numbers"):
        Table(wrong, (1, 2))
    with pytest.raises(InvalidAction, match=r"speedup\.speedups: expected a tuple of numbers"):
        Table((1, 4), wrong)


@pytest.mark.parametrize(
    ("units", "speedups", "expected"),
    [
        ((), (), "as many speed-ups as unit counts, the first of both being 1"),
        ((1, 2), (1,), "as many speed-ups as unit counts, the first of both being 1"),
        ((2, 4), (1, 2), "as many speed-ups as unit counts, the first of both being 1"),
        ((1, 2), (1.5, 2), "as many speed-ups as unit counts, the first of both being 1"),
        ((1, 4, 2), (1, 1, 1), "increasing unit counts"),
        ((1, 2, 2), (1, 1, 1), "increasing unit counts"),
        ((1, 2, 4), (1, 2, 1.5), "non-decreasing speed-ups, none above its units"),
        ((1, 2), (1, 2.5), "non-decreasing speed-ups, none above its units"),
        ((1, 2), (1, math.nan), "non-decreasing speed-ups, none above its units"),
        ((1, math.nan), (1, 1), "increasing unit counts"),
        ((1, math.inf), (1, math.inf), "increasing unit counts"),
    ],
)
def test_a_table_that_no_machine_measured_is_refused(
    units: tuple[float, ...], speedups: tuple[float, ...], expected: str
) -> None:
    with pytest.raises(InvalidAction) as caught:
        Table(units, speedups)
    assert caught.value.field in ("speedup.units", "speedup.speedups")
    assert caught.value.expected == expected


@given(st.floats(0.0, 1.0))
def test_near_one_unit_every_form_counts_as_linear_or_as_itself(share: float) -> None:
    assert PowerLaw(share).exponent_near(1.0) == share
    assert Amdahl(share).exponent_near(1.0) == 1.0
