"""Arranging units: the one pass agrees with trying everything, for every prefix and both kinds of units."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.core.arrange import Arrangement, arrange_chunks, hesrpt_shares, srpt_lower_bound
from tangram.core.policies.paper import STATES_MAX, arrange_units
from tangram.core.topology import Chunks, level_of
from tangram.errors import InvariantError

Choices = list[tuple[int, float]]


def brute_force_units(durations: list[Choices], units_max: int) -> float:
    fitting = [
        sum(seconds for _, seconds in pick)
        for pick in itertools.product(*durations)
        if sum(units for units, _ in pick) <= units_max
    ]
    return min(fitting, default=math.inf)


def brute_force_chunks(durations: list[Choices], free: frozenset[int]) -> float:
    """Every choice at every aligned place whose devices are all free: no rule about which chunk to take."""
    if not durations:
        return 0.0
    best = math.inf
    for units, seconds in durations[0]:
        size = 1 << level_of(units)
        for start in range(0, 16, size):
            devices = frozenset(range(start, start + size))
            if devices <= free:
                best = min(best, seconds + brute_force_chunks(durations[1:], free - devices))
    return best


def cost_of(choice: tuple[int, ...], durations: list[Choices]) -> float:
    return sum(dict(durations[i])[units] for i, units in enumerate(choice))


def power_law(seconds: float, choices: tuple[int, ...], exponent: float) -> Choices:
    return [(units, seconds / units**exponent) for units in choices]


@st.composite
def candidates(draw: st.DrawFn, amounts: list[int], count_max: int = 4) -> list[Choices]:
    def one() -> Choices:
        units = sorted(draw(st.sets(st.sampled_from(amounts), min_size=1, max_size=4)))
        seconds = [draw(st.floats(0.01, 100.0)) for _ in units]
        if draw(st.integers(0, 3)):  # mostly more units are faster; otherwise there is little to decide
            seconds.sort(reverse=True)
        return list(zip(units, seconds, strict=True))

    return [one() for _ in range(draw(st.integers(0, count_max)))]


# ---- units that are all alike -----------------------------------------------------------------------------------


def assert_optimal_for_units(arrangement: Arrangement, durations: list[Choices], units_max: int) -> None:
    for count in range(len(durations) + 1):
        prefix = durations[:count]
        assert arrangement.cost(count) == pytest.approx(brute_force_units(prefix, units_max))
        if math.isfinite(arrangement.cost(count)):
            choice = arrangement.choice(count)
            assert len(choice) == count
            assert sum(choice) <= units_max
            assert cost_of(choice, prefix) == pytest.approx(arrangement.cost(count))
        else:
            with pytest.raises(InvariantError, match="do not fit"):
                arrangement.choice(count)


@given(candidates(list(range(1, 9)), count_max=5), st.integers(0, 20))
def test_units_are_divided_best_for_every_prefix(durations: list[Choices], units_max: int) -> None:
    assert_optimal_for_units(arrange_units(durations, units_max), durations, units_max)


@given(candidates([250, 500, 1000, 1500, 2000, 4000]), st.integers(0, 9000))
def test_milli_cores_are_divided_best_for_every_prefix(durations: list[Choices], units_max: int) -> None:
    assert_optimal_for_units(arrange_units(durations, units_max), durations, units_max)


def test_one_action_with_1_2_4_8_and_3_free_units_gets_2() -> None:
    arrangement = arrange_units([power_law(8.0, (1, 2, 4, 8), 1.0)], 3)
    assert arrangement.choice(1) == (2,)
    assert arrangement.cost(1) == 4.0


def test_units_that_help_no_action_stay_free() -> None:
    arrangement = arrange_units([[(1, 5.0), (2, 5.0), (4, 6.0)], [(1, 3.0)]], 64)
    assert arrangement.choice(2) == (1, 1)


def test_the_first_candidate_alone_gets_what_the_second_would_take_from_it() -> None:
    arrangement = arrange_units([power_law(10.0, (1, 2, 3, 4), 1.0), power_law(10.0, (1, 2, 3, 4), 1.0)], 4)
    assert arrangement.choice(1) == (4,)
    assert arrangement.choice(2) == (2, 2)


def test_no_candidates_cost_nothing() -> None:
    arrangement = arrange_units([], 8)
    assert arrangement.cost(0) == 0.0
    assert arrangement.choice(0) == ()


def test_a_candidate_whose_minimum_does_not_fit_ends_the_feasible_prefixes() -> None:
    arrangement = arrange_units([[(2, 1.0)], [(3, 1.0)], [(1, 1.0)]], 4)
    assert [arrangement.cost(count) for count in range(4)] == [0.0, 1.0, math.inf, math.inf]
    assert arrangement.choice(1) == (2,)
    with pytest.raises(InvariantError, match="the first 2 candidates do not fit"):
        arrangement.choice(2)


def test_a_candidate_without_any_amount_never_fits() -> None:
    assert arrange_units([[]], 4).cost(1) == math.inf
    assert arrange_chunks([[]], (4,)).cost(1) == math.inf


def test_rigid_candidates_with_odd_amounts_keep_the_division_of_the_rest_exact() -> None:
    elastic = power_law(10.0, (1000, 2000, 3000), 0.8)
    arrangement = arrange_units([[(137, 1.0)], elastic, [(1, 1.0)], elastic, [(911, 2.0)]], 6_049)
    assert sorted(arrangement.choice(5)) == [1, 137, 911, 2000, 3000]


@given(st.lists(st.sets(st.integers(1, 40_000), min_size=1, max_size=6), min_size=1, max_size=6))
@settings(max_examples=50)
def test_too_many_states_are_counted_coarsely_but_never_oversold(amounts: list[set[int]]) -> None:
    durations = [power_law(10.0, tuple(sorted(units)), 0.5) for units in amounts]
    minima = sum(choices[0][0] for choices in durations)
    arrangement = arrange_units(durations, minima + 20_011)
    for count in range(1, len(durations) + 1):
        choice = arrangement.choice(count)
        assert sum(choice) <= minima + 20_011
        assert cost_of(choice, durations) == pytest.approx(arrangement.cost(count))
        assert arrangement.cost(count) <= sum(choices[0][1] for choices in durations[:count]) + 1e-9


def test_coarse_counting_still_reaches_the_maximum_where_units_abound() -> None:
    units_max = 64_000
    choices = power_law(10.0, tuple(range(1, 40_000, 997)), 0.9)
    best = max(units for units, _ in choices)
    assert best > STATES_MAX
    assert arrange_units([choices], units_max).choice(1) == (best,)


# ---- devices in chunks ------------------------------------------------------------------------------------------


@st.composite
def free_devices(draw: st.DrawFn) -> tuple[frozenset[int], tuple[int, ...]]:
    """Which devices are free, and how many free chunks of each level they make."""
    count = draw(st.sampled_from([4, 6, 8]))
    chunks = Chunks(count)
    singles = [chunks.take(1) for _ in range(count)]
    busy = draw(st.lists(st.integers(0, count - 1), max_size=count // 2))
    free = frozenset(i for i in range(count) if i not in busy)
    for single in singles:
        if single.start in free:
            chunks.give(single)
    return free, chunks.free_counts()


@given(candidates([1, 2, 3, 4, 8]), free_devices())
@settings(max_examples=200)
def test_chunks_are_divided_best_for_every_prefix(
    durations: list[Choices], devices: tuple[frozenset[int], tuple[int, ...]]
) -> None:
    free, counts = devices
    arrangement = arrange_chunks(durations, counts)
    for count in range(len(durations) + 1):
        prefix = durations[:count]
        assert arrangement.cost(count) == pytest.approx(brute_force_chunks(prefix, free))
        if math.isfinite(arrangement.cost(count)):
            choice = arrangement.choice(count)
            assert len(choice) == count
            assert cost_of(choice, prefix) == pytest.approx(arrangement.cost(count))
        else:
            with pytest.raises(InvariantError, match="do not fit"):
                arrangement.choice(count)


@given(candidates([1, 2, 3, 4, 8], count_max=8), st.sampled_from([4, 6, 8, 16]))
def test_an_arrangement_of_chunks_can_be_placed_in_queue_order(durations: list[Choices], count: int) -> None:
    chunks = Chunks(count)
    arrangement = arrange_chunks(durations, chunks.free_counts())
    feasible = max(i for i in range(len(durations) + 1) if math.isfinite(arrangement.cost(i)))
    for units in arrangement.choice(feasible):
        chunks.take(units)
    chunks.check()


def test_one_free_8_chunk_is_split_for_4_devices() -> None:
    arrangement = arrange_chunks([[(4, 1.0)], [(4, 1.0)], [(1, 1.0)]], (0, 0, 0, 1))
    assert arrangement.cost(1) == 1.0
    assert arrangement.choice(2) == (4, 4)
    assert arrangement.cost(3) == math.inf


def test_four_scattered_1_chunks_do_not_hold_4_devices() -> None:
    assert arrange_chunks([[(4, 1.0)]], (4, 0, 0, 0)).cost(1) == math.inf
    assert arrange_chunks([[(1, 4.0), (4, 1.0)]], (4, 0, 0, 0)).choice(1) == (1,)


def test_one_action_with_1_2_4_8_and_3_free_devices_gets_2() -> None:
    assert arrange_chunks([power_law(8.0, (1, 2, 4, 8), 1.0)], (1, 1, 0, 0)).choice(1) == (2,)


def test_three_devices_cost_a_chunk_of_four() -> None:
    arrangement = arrange_chunks([[(3, 1.0)], [(1, 1.0)]], (0, 0, 1))
    assert arrangement.cost(1) == 1.0
    assert arrangement.cost(2) == math.inf


def test_of_amounts_that_need_the_same_chunk_the_fastest_is_chosen() -> None:
    assert arrange_chunks([[(3, 3.0), (4, 2.0)]], (0, 0, 1)).choice(1) == (4,)
    assert arrange_chunks([[(3, 2.0), (4, 2.0)]], (0, 0, 1)).choice(1) == (3,)


def test_the_larger_chunk_goes_to_the_action_that_gains_more_in_either_order() -> None:
    much, little = [(1, 10.0), (2, 1.0)], [(1, 10.0), (2, 9.0)]
    assert arrange_chunks([much, little], (1, 1)).choice(2) == (2, 1)
    assert arrange_chunks([little, much], (1, 1)).choice(2) == (1, 2)


def test_a_wide_first_candidate_leaves_the_second_its_chunk() -> None:
    choices = power_law(8.0, (1, 2, 4, 8), 0.9)
    assert arrange_chunks([choices, choices], (0, 0, 0, 1)).choice(1) == (8,)
    assert arrange_chunks([choices, choices], (0, 0, 0, 1)).choice(2) == (4, 4)


def test_a_node_without_devices_holds_no_action() -> None:
    arrangement = arrange_chunks([[(1, 1.0)]], ())
    assert arrangement.cost(0) == 0.0
    assert arrangement.cost(1) == math.inf


# ---- heSRPT -----------------------------------------------------------------------------------------------------


def unbounded_shares(sizes: list[float], exponent: float, units: float) -> list[float]:
    return hesrpt_shares(sizes, [exponent] * len(sizes), units, [0.0] * len(sizes), [math.inf] * len(sizes))


def test_shares_follow_the_published_formula() -> None:
    # p = 0.5: squares of ranks. The largest of three gets 1/9, the middle one 3/9, the smallest 5/9.
    assert unbounded_shares([5.0, 1.0, 3.0], 0.5, 9.0) == pytest.approx([1.0, 5.0, 3.0])


def test_without_any_speed_up_all_get_the_same() -> None:
    assert unbounded_shares([5.0, 1.0, 3.0, 2.0], 0.0, 8.0) == pytest.approx([2.0] * 4)


def test_with_linear_speed_up_the_smallest_gets_nearly_everything() -> None:
    assert unbounded_shares([5.0, 1.0, 3.0], 1.0, 8.0)[1] == pytest.approx(8.0, rel=1e-6)


def test_of_equal_sizes_the_earlier_gets_more() -> None:
    assert unbounded_shares([2.0, 2.0, 2.0], 0.5, 9.0) == pytest.approx([5.0, 3.0, 1.0])


def test_what_a_maximum_cuts_off_is_divided_among_the_rest_in_proportion() -> None:
    shares = hesrpt_shares([5.0, 1.0, 3.0], [0.5] * 3, 9.0, [0.0] * 3, [9.0, 1.0, 9.0])
    assert shares == pytest.approx([2.0, 1.0, 6.0])


def test_what_a_minimum_adds_is_taken_from_the_rest_in_proportion() -> None:
    shares = hesrpt_shares([5.0, 1.0, 3.0], [0.5] * 3, 9.0, [5.0, 0.0, 0.0], [9.0] * 3)
    assert shares == pytest.approx([5.0, 2.5, 1.5])


def test_unusable_units_stay_free() -> None:
    assert hesrpt_shares([1.0, 2.0], [0.5, 0.5], 100.0, [1.0, 1.0], [4.0, 8.0]) == [4.0, 8.0]


def test_minima_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(InvariantError, match="minima of 5"):
        hesrpt_shares([1.0, 2.0], [0.5, 0.5], 4.0, [2.5, 2.5], [4.0, 4.0])


def test_no_actions_share_nothing() -> None:
    assert hesrpt_shares([], [], 8.0, [], []) == []


@given(
    st.lists(
        st.tuples(st.floats(0.001, 1e6), st.floats(0.0, 1.0), st.floats(0.0, 2.0), st.floats(0.0, 32.0)),
        min_size=1,
        max_size=40,
    ),
    st.floats(0.0, 128.0),
)
def test_shares_stay_within_bounds_use_all_units_and_keep_proportion(
    actions: list[tuple[float, float, float, float]], spare: float
) -> None:
    sizes, exponents, minimum, extra = (list(column) for column in zip(*actions, strict=True))
    maximum = [low + more for low, more in zip(minimum, extra, strict=True)]
    units = sum(minimum) + spare
    shares = hesrpt_shares(sizes, exponents, units, minimum, maximum)
    for share, low, high in zip(shares, minimum, maximum, strict=True):
        assert low - 1e-9 <= share <= high + 1e-9
    assert sum(shares) == pytest.approx(min(units, sum(maximum)), abs=1e-6)
    weights = hesrpt_shares(sizes, exponents, 1.0, [0.0] * len(sizes), [math.inf] * len(sizes))
    inside = [
        share / weight
        for share, weight, low, high in zip(shares, weights, minimum, maximum, strict=True)
        if low + 1e-6 < share < high - 1e-6 and weight > 1e-12
    ]
    assert inside == pytest.approx([inside[0]] * len(inside) if inside else [], rel=1e-6)


# ---- the lower bound --------------------------------------------------------------------------------------------


def test_the_bound_serves_the_shortest_remaining_first() -> None:
    # Speed 2: the first needs 4 s and is interrupted after 1 s by one that needs 1 s. Flow times 5 and 1.
    assert srpt_lower_bound([0.0, 1.0], [8.0, 2.0], [0.1, 0.1], 2.0) == pytest.approx(6.0)


def test_the_bound_lets_a_short_rest_go_first() -> None:
    # After 3 s of 4 the newcomer with 2 s waits for the rest. Flow times 4 and 3.
    assert srpt_lower_bound([0.0, 3.0], [4.0, 2.0], [0.1, 0.1], 1.0) == pytest.approx(7.0)


def test_the_bound_is_never_below_the_bound_of_each_action_alone() -> None:
    assert srpt_lower_bound([0.0, 100.0], [1.0, 1.0], [1.0, 1.0], 64.0) == 2.0


def test_the_bound_of_nothing_is_zero() -> None:
    assert srpt_lower_bound([], [], [], 8.0) == 0.0


def test_the_bound_does_not_depend_on_the_order_or_on_when_the_clock_began() -> None:
    arrivals, works = [0.0, 0.5, 0.5, 9.0], [4.0, 1.0, 2.0, 3.0]
    bound = srpt_lower_bound(arrivals, works, [0.0] * 4, 1.0)
    later = [1e9 + arrival for arrival in reversed(arrivals)]
    assert srpt_lower_bound(later, works[::-1], [0.0] * 4, 1.0) == pytest.approx(bound)


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 6)), min_size=1, max_size=5), st.permutations(range(5)))
def test_no_schedule_without_interruption_beats_the_bound(jobs: list[tuple[int, int]], order: list[int]) -> None:
    arrivals = [float(arrival) for arrival, _ in jobs]
    works = [float(work) for _, work in jobs]
    now, flow = 0.0, 0.0
    for i in [i for i in order if i < len(jobs)]:
        now = max(now, arrivals[i]) + works[i]
        flow += now - arrivals[i]
    assert srpt_lower_bound(arrivals, works, [0.0] * len(jobs), 1.0) <= flow + 1e-9
