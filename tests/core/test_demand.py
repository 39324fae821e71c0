"""Demands: which amounts are admissible, in three forms that must agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.demand import (
    CORE,
    LEARNED,
    Amounts,
    Demand,
    between,
    cores,
    fixed,
    learned,
    one_of,
)
from tangram.core.speedup import PowerLaw
from tangram.errors import InvalidAction


@st.composite
def ranges(draw: st.DrawFn) -> Amounts:
    low = draw(st.integers(1, 40))
    return between(low, low + draw(st.integers(0, 60)), draw(st.integers(1, 9)))


AMOUNTS = st.one_of(
    st.integers(1, 40).map(fixed),
    ranges(),
    st.sets(st.integers(1, 100), min_size=1, max_size=6).map(lambda choices: one_of(*sorted(choices))),
)


# ---- floor, admits and all agree --------------------------------------------------------------------------------


@given(AMOUNTS)
def test_what_is_listed_is_what_is_admitted(amounts: Amounts) -> None:
    assert list(amounts.all(200)) == [units for units in range(201) if amounts.admits(units)]


@given(AMOUNTS, st.integers(0, 120))
def test_a_list_up_to_a_bound_is_the_start_of_the_whole_list(amounts: Amounts, bound: int) -> None:
    assert list(amounts.all(bound)) == [units for units in amounts.all(200) if units <= bound]


@given(AMOUNTS, st.floats(0.0, 150.0))
def test_floor_is_the_largest_admissible_amount_within_the_bound(amounts: Amounts, bound: float) -> None:
    floor = amounts.floor(bound)
    assert amounts.admits(floor)
    within = [units for units in amounts.all(200) if units <= bound]
    assert floor == (within[-1] if within else amounts.min)


@given(AMOUNTS)
def test_the_ends_are_always_admitted(amounts: Amounts) -> None:
    assert amounts.admits(amounts.min) and amounts.admits(amounts.max)
    assert amounts.floor(0.0) == amounts.min
    assert amounts.floor(math.inf) == amounts.max
    assert not amounts.admits(amounts.min - 1)
    assert not amounts.admits(amounts.max + 1)


@given(AMOUNTS)
def test_elastic_is_what_admits_more_than_one_amount(amounts: Amounts) -> None:
    assert amounts.elastic == (len(list(amounts.all(200))) > 1)


# ---- how amounts are written ------------------------------------------------------------------------------------


def test_a_fixed_amount_admits_itself_only() -> None:
    assert list(fixed(3).all(10)) == [3]
    assert not fixed(3).elastic


def test_a_range_with_a_step_ends_at_its_maximum_even_off_the_step() -> None:
    assert list(between(2, 9, 3).all(100)) == [2, 5, 8, 9]


def test_a_choice_admits_nothing_in_between() -> None:
    degrees = one_of(1, 2, 4, 8)
    assert [units for units in range(10) if degrees.admits(units)] == [1, 2, 4, 8]
    assert [degrees.floor(units) for units in (3, 4, 7.9, 100)] == [2, 4, 4, 8]


def test_a_choice_may_be_written_in_any_order() -> None:
    assert one_of(2, 1) == one_of(1, 2)
    assert list(one_of(8, 1, 4).all(10)) == [1, 4, 8]


def test_cores_count_in_thousandths_and_grow_by_whole_cores() -> None:
    assert cores(2) == Amounts(2000, 2000, step=CORE)
    assert list(cores(1, 4).all(8 * CORE)) == [1000, 2000, 3000, 4000]
    assert list(cores(0.5, 2).all(8 * CORE)) == [500, 1500, 2000]


def test_learned_cpu_is_neither_elastic_nor_has_a_minimum() -> None:
    amounts = learned(2.5)
    assert (amounts.max, amounts.declared, amounts.elastic) == (2500, False, False)
    assert Demand({"cpu": amounts}).needs == (("cpu", LEARNED),)


# ---- the vector -------------------------------------------------------------------------------------------------


def test_the_needs_of_a_demand_are_its_minima() -> None:
    demand = Demand({"cpu": cores(1, 8), "search": fixed(1), "tokens": fixed(4000)})
    assert demand.needs == (("cpu", 1000), ("search", 1), ("tokens", 4000))
    assert demand.elastic == "cpu"


def test_a_demand_without_a_range_is_elastic_in_nothing() -> None:
    assert Demand({"cpu": cores(1), "gpu": fixed(2)}).elastic == ""


def test_two_elastic_pools_are_refused_by_name() -> None:
    with pytest.raises(InvalidAction) as caught:
        Demand({"cpu": cores(1, 4), "gpu": one_of(1, 2), "search": fixed(1)})
    assert caught.value.field == "demand.pools"
    assert caught.value.value == ["cpu", "gpu"]
    assert "at most one elastic pool; give the others a fixed amount" in str(caught.value)


def test_learned_cpu_goes_along_with_an_elastic_pool() -> None:
    assert Demand({"cpu": learned(), "gpu": one_of(1, 2)}, PowerLaw(0.5)).elastic == "gpu"


def demand_error(pools: dict[str, Amounts]) -> InvalidAction:
    with pytest.raises(InvalidAction) as caught:
        Demand(pools)
    assert caught.value.field == "demand.pools"
    return caught.value


def test_a_demand_for_nothing_is_refused() -> None:
    assert demand_error({}).expected == "at least one pool kind with its amounts"


def test_a_pool_without_a_name_is_refused() -> None:
    assert "a pool kind such as 'cpu'" in demand_error({"": fixed(1)}).expected


@pytest.mark.parametrize("kind", [3, None, ("cpu",), "cpu@n0", "@"])
def test_a_pool_kind_is_a_name_and_no_node(kind: Any) -> None:
    error = demand_error({kind: fixed(1)})
    assert error.value == kind
    assert "a pool kind such as 'cpu'" in error.expected


@pytest.mark.parametrize("speedup", ["linear", 0.5, PowerLaw, {"exponent": 0.5}])
def test_an_invalid_speedup_is_refused(speedup: Any) -> None:
    with pytest.raises(InvalidAction, match=r"demand\.speedup: expected a PowerLaw, Amdahl or Table") as caught:
        Demand({"cpu": cores(1, 4)}, speedup)
    assert caught.value.value == speedup


def test_memory_is_not_a_demand_of_an_action() -> None:
    assert "reserved for a sandbox's life by Reserve" in demand_error({"memory": fixed(512)}).expected


def test_only_cpu_can_be_left_to_learning() -> None:
    assert "only CPU use is learned" in demand_error({"gpu": learned()}).expected


@pytest.mark.parametrize(
    ("make", "field", "value", "expected"),
    [
        (lambda: fixed(0), "demand.min", 0, "a positive whole number of units"),
        (lambda: fixed(-2), "demand.min", -2, "a positive whole number of units"),
        (lambda: fixed(1.5), "demand.min", 1.5, "a positive whole number of units"),
        (lambda: between(4, 2), "demand.max", 2, "a whole number of units, at least 4"),
        (lambda: between(1, 2.5), "demand.max", 2.5, "a whole number of units, at least 1"),
        (lambda: between(1, 4, 0), "demand.step", 0, "a positive whole number of units"),
        (lambda: between(1, 4, 0.5), "demand.step", 0.5, "a positive whole number of units"),
        (lambda: one_of(), "demand.choices", (), "at least one amount"),
        (
            lambda: Amounts(1, 4, choices=(4, 1)),
            "demand.choices",
            (4, 1),
            "increasing amounts from the minimum to the maximum",
        ),
        (lambda: Amounts(1, 2, choices=[1, 2]), "demand.choices", [1, 2], "whole numbers of units"),
        (lambda: one_of("a", 1), "demand.choices", ("a", 1), "whole numbers of units"),
        (lambda: one_of(True, 2), "demand.choices", (True, 2), "whole numbers of units"),
        (lambda: fixed(True), "demand.min", True, "a positive whole number of units"),
        (lambda: between(1, True), "demand.max", True, "a whole number of units, at least 1"),
        (lambda: between(1, 4, True), "demand.step", True, "a positive whole number of units"),
        (lambda: one_of(1, 1, 2), "demand.choices", (1, 1, 2), "increasing amounts from the minimum to the maximum"),
        (lambda: one_of(1, 2.5, 4), "demand.choices", (1, 2.5, 4), "whole numbers of units"),
        (lambda: one_of(0, 2), "demand.min", 0, "a positive whole number of units"),
        (lambda: cores(0), "demand.min", 0, "a positive whole number of units"),
        (lambda: cores(4, 2), "demand.max", 2000, "a whole number of units, at least 4000"),
        (lambda: learned(0), "demand.max", 0, "a whole number of units, at least 1"),
    ],
)
def test_an_amount_that_cannot_be_meant_is_refused(make, field: str, value: object, expected: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidAction) as caught:
        make()
    assert (caught.value.field, caught.value.value, caught.value.expected) == (field, value, expected)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_cores_that_are_no_number_are_refused(wrong: float) -> None:
    for make in (lambda: cores(wrong), lambda: cores(1, wrong), lambda: learned(wrong)):
        with pytest.raises(InvalidAction, match="a finite number of cores"):
            make()
