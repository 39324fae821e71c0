"""The ledger: nothing is given out twice, nothing is given back twice, and the sums are always right."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tangram.core.demand import CPU, EXCLUSIVE_CORE, GPU, LEARNED, MEMORY
from tangram.core.ledger import HELD_S, RECENT_S, Holding, Ledger, PoolState
from tangram.core.messages import NodeState, Pool, Window
from tangram.errors import InvalidConfig, InvariantError

FIXED = Window(seconds=10.0)
BUCKET = Window(seconds=10.0, bucket=True)
SLIDING = Window(seconds=10.0, sliding=True, arrival_s=2.0)


def a_pool(kind: str, total: int, *, node: str = "", window: Window | None = None, numa: tuple[int, ...] = ()) -> Pool:
    return Pool(kind=kind, total=total, node=node, window=window, numa=numa)


def one(pool: Pool) -> tuple[Ledger, PoolState]:
    ledger = Ledger()
    return ledger, ledger.change_pool(pool, 0.0)


def counts(state: PoolState) -> tuple[int, int, int]:
    return state.free, state.held, state.spent


# ---- held units -------------------------------------------------------------------------------------------------


def test_held_units_return_when_they_are_released() -> None:
    ledger, api = one(a_pool("api", 5))
    run = ledger.new_usage()
    holding = ledger.hold(api, 3, run)
    assert counts(api) == (2, 3, 0)
    assert ledger.give_back(holding)
    assert counts(api) == (5, 0, 0)
    ledger.check([])


def test_more_than_is_free_is_an_error_and_changes_nothing() -> None:
    ledger, api = one(a_pool("api", 5))
    run = ledger.new_usage()
    holding = ledger.hold(api, 3, run)
    with pytest.raises(InvariantError, match="plan oversells api: 3 units wanted, 2 of 5 free"):
        ledger.hold(api, 3, run)
    ledger.check([holding])


def test_devices_that_are_free_but_no_chunk_are_an_error_too() -> None:
    ledger, gpu = one(a_pool(GPU, 4, node="g0"))
    run = ledger.new_usage()
    chunks = [ledger.hold(gpu, 1, run) for _ in range(4)]
    ledger.give_back(chunks[1])
    ledger.give_back(chunks[2])
    assert gpu.free == 2
    with pytest.raises(InvariantError, match="oversells"):
        ledger.hold(gpu, 2, run)
    ledger.check([chunks[0], chunks[3]])


def test_asking_for_three_devices_takes_four() -> None:
    ledger, gpu = one(a_pool(GPU, 8, node="g0"))
    holding = ledger.hold(gpu, 3, ledger.new_usage())
    assert holding.units == 4
    assert holding.cells == (0, 1, 2, 3)
    assert counts(gpu) == (4, 4, 0)


def test_the_last_rider_frees_the_chunk() -> None:
    ledger, gpu = one(a_pool(GPU, 4, node="g0"))
    holding = ledger.hold(gpu, 4, ledger.new_usage())
    holding.riders += 1
    assert not ledger.give_back(holding)
    assert gpu.free == 0
    assert ledger.give_back(holding)
    assert gpu.free == 4


def test_shared_cores_list_their_numa_cells_and_exclusive_ones_their_ids() -> None:
    ledger, cpu = one(a_pool(CPU, 8000, node="n0", numa=(4000, 4000)))
    exclusive = ledger.change_pool(a_pool(EXCLUSIVE_CORE, 4, node="n0", numa=(2, 2)), 0.0)
    run = ledger.new_usage()
    assert ledger.hold(cpu, 3000, run).cells == (0,)
    assert ledger.hold(cpu, 3000, run).cells == (1,)
    assert ledger.hold(cpu, 1500, run).cells == (0, 1)
    assert ledger.hold(exclusive, 2, run).cells == (0, 1)
    assert ledger.hold(exclusive, 1, run).cells == (2,)


def test_a_node_with_one_numa_cell_names_none() -> None:
    ledger, cpu = one(a_pool(CPU, 8000, node="n0"))
    assert ledger.hold(cpu, 3000, ledger.new_usage()).cells == ()


def test_a_resize_takes_and_gives_units_of_the_same_cell_first() -> None:
    ledger, cpu = one(a_pool(CPU, 8000, node="n0", numa=(4000, 4000)))
    holding = ledger.hold(cpu, 1000, ledger.new_usage())
    ledger.resize(holding, 5000)
    assert (holding.units, holding.cells, cpu.free) == (5000, (0, 1), 3000)
    ledger.resize(holding, 2000)
    assert (holding.units, holding.cells, cpu.free) == (2000, (0,), 6000)
    ledger.check([holding])


def test_a_resize_beyond_what_is_free_is_an_error_and_a_smaller_one_never_is() -> None:
    ledger, cpu = one(a_pool(CPU, 4000, node="n0"))
    holding = ledger.hold(cpu, 3000, ledger.new_usage())
    with pytest.raises(InvariantError, match="resize oversells cpu@n0: 2000 more units wanted, 1000 of 4000 free"):
        ledger.resize(holding, 5000)
    ledger.change_pool(a_pool(CPU, 1000, node="n0"), 0.0)
    assert cpu.free == -2000
    ledger.resize(holding, 2000)
    assert cpu.free == -1000
    ledger.check([holding])


# ---- pools that change ------------------------------------------------------------------------------------------


def test_a_pool_that_shrinks_below_what_is_held_has_less_than_nothing_free() -> None:
    ledger, api = one(a_pool("api", 5))
    holding = ledger.hold(api, 4, ledger.new_usage())
    ledger.change_pool(a_pool("api", 2), 1.0)
    assert counts(api) == (-2, 4, 0)
    assert not api.fits(1)
    ledger.give_back(holding)
    assert counts(api) == (2, 0, 0)


def test_devices_of_a_running_action_stay_taken_when_their_node_shrinks_around_them() -> None:
    ledger, gpu = one(a_pool(GPU, 8, node="g0"))
    run = ledger.new_usage()
    low, high = ledger.hold(gpu, 4, run), ledger.hold(gpu, 4, run)
    assert high.cells == (4, 5, 6, 7)
    ledger.change_pool(a_pool(GPU, 6, node="g0"), 1.0)
    ledger.give_back(low)
    assert gpu.free == 2
    assert ledger.hold(gpu, 2, run).cells == (0, 1), "4 and 5 are inside the pool, but still in use"
    ledger.give_back(high)
    ledger.change_pool(a_pool(GPU, 8, node="g0"), 2.0)
    assert gpu.free == 6
    assert ledger.hold(gpu, 4, run).cells == (4, 5, 6, 7)


def test_a_node_that_shrank_offers_chunks_for_its_free_units_only() -> None:
    ledger, gpu = one(a_pool(GPU, 12, node="g0"))
    run = ledger.new_usage()
    ledger.hold(gpu, 4, run, [(8, 4)])
    ledger.hold(gpu, 1, run, [(0, 1)])
    ledger.change_pool(a_pool(GPU, 8, node="g0"), 0.0)
    assert gpu.free == 3, "of the seven devices from 1 to 7 four wait for those beyond the last to be given back"
    assert gpu.free_chunks() == (1, 1, 0, 0)
    assert gpu.fits(2)
    assert not gpu.fits(3), "three devices are a chunk of four"


def test_all_free_chunks_can_be_taken() -> None:
    for before in range(1, 20):
        for after in range(1, 20):
            ledger, gpu = one(a_pool(GPU, before, node="g0"))
            run = ledger.new_usage()
            taken = [ledger.hold(gpu, 1, run) for _ in range(before)]
            for holding in taken[: before // 2]:
                ledger.give_back(holding)
            ledger.change_pool(a_pool(GPU, after, node="g0"), 0.0)
            counts_free = gpu.free_chunks()
            for level in reversed(range(len(counts_free))):
                for _ in range(counts_free[level]):
                    ledger.hold(gpu, 1 << level, run)
            assert not gpu.fits(1)


def test_exclusive_cores_of_a_running_action_stay_taken_when_their_node_shrinks_around_them() -> None:
    ledger, core = one(a_pool(EXCLUSIVE_CORE, 4, node="n0"))
    run = ledger.new_usage()
    first, second = ledger.hold(core, 1, run), ledger.hold(core, 2, run)
    assert second.cells == (1, 2)
    ledger.change_pool(a_pool(EXCLUSIVE_CORE, 2, node="n0"), 1.0)
    ledger.give_back(first)
    assert not core.fits(1)
    ledger.give_back(second)
    assert ledger.hold(core, 2, run).cells == (0, 1)
    ledger.change_pool(a_pool(EXCLUSIVE_CORE, 4, node="n0"), 1.0)
    assert ledger.hold(core, 2, run).cells == (2, 3)


def test_a_node_may_learn_of_its_numa_cells_while_units_are_held() -> None:
    ledger, cpu = one(a_pool(CPU, 4000, node="n0"))
    run = ledger.new_usage()
    holdings = [ledger.hold(cpu, 3000, run)]
    ledger.change_pool(a_pool(CPU, 4000, node="n0", numa=(2000, 2000)), 1.0)
    holdings.append(ledger.hold(cpu, 1000, run))
    assert not cpu.fits(1)
    ledger.check(holdings)
    ledger.resize(holdings[0], 1000)
    ledger.check(holdings)
    for holding in holdings:
        ledger.give_back(holding)
    ledger.check([])


def test_a_kind_is_on_nodes_or_is_one_pool_without_a_node() -> None:
    ledger, _ = one(a_pool("core", 4, node="n0"))
    with pytest.raises(InvalidConfig, match="pools of kind core on nodes, or one without a node"):
        ledger.change_pool(a_pool("core", 4), 0.0)
    ledger.change_pool(a_pool("api", 4), 0.0)
    with pytest.raises(InvalidConfig, match="pools of kind api on nodes, or one without a node"):
        ledger.change_pool(a_pool("api", 4, node="n0"), 0.0)
    assert list(ledger.pools) == ["core@n0", "api"]


def test_held_units_do_not_become_spent_ones() -> None:
    ledger, _ = one(a_pool("api", 4))
    with pytest.raises(InvalidConfig, match="units held or spent, as they were"):
        ledger.change_pool(a_pool("api", 4, window=FIXED), 0.0)


def test_a_dead_node_takes_its_pools_along_and_no_run_is_charged_for_them() -> None:
    ledger, cpu = one(a_pool(CPU, 4000, node="n0"))
    ledger.change_pool(a_pool(CPU, 4000, node="n1"), 0.0)
    run = ledger.new_usage()
    holding = ledger.hold(cpu, 4000, run)
    assert run.share == 0.5
    assert ledger.change_node("n0", NodeState.DOWN) == [cpu]
    assert ledger.total_by_kind == {CPU: 4000}
    with pytest.raises(InvariantError, match="units of cpu@n0 are held, but that pool was removed"):
        ledger.check([holding])
    assert not ledger.give_back(holding)
    assert run.share == 0.0
    ledger.check([])
    again = ledger.change_pool(a_pool(CPU, 4000, node="n0"), 1.0)
    assert again is not cpu
    assert again.free == 4000


# ---- what could be held -----------------------------------------------------------------------------------------


def test_whether_pools_could_hold_something_looks_at_one_node_at_a_time() -> None:
    ledger = Ledger()
    for pool in (
        a_pool(CPU, 4000, node="n0"), a_pool(MEMORY, 100, node="n0"), a_pool(CPU, 8000, node="n1"),
        a_pool(MEMORY, 50, node="n1"), a_pool(GPU, 6, node="n1"), a_pool("api", 3),
    ):  # fmt: skip
        ledger.change_pool(pool, 0.0)

    assert ledger.could_hold([(CPU, 8000)], "", 50)
    assert not ledger.could_hold([(CPU, 8000)], "", 51), "the node with the cores has not the memory"
    assert not ledger.could_hold([(CPU, 8000)], "n0", 0)
    assert ledger.could_hold([(CPU, LEARNED), ("api", 3)], "n0", 0)
    assert not ledger.could_hold([("api", 4)], "", 0)
    assert not ledger.could_hold([("tokens", 1)], "", 0)
    assert ledger.could_hold([(GPU, 4)], "", 0)
    assert not ledger.could_hold([(GPU, 5)], "", 0), "five devices are a chunk of eight"
    ledger.nodes["n1"] = NodeState.DRAINING
    assert not ledger.could_hold([(CPU, 8000)], "", 0)
    assert ledger.could_hold([(CPU, 8000)], "n1", 0), "what stands there goes on"


def test_what_was_possible_once_may_be_possible_again() -> None:
    ledger, _ = one(a_pool(CPU, 8000, node="n0"))
    ledger.change_pool(a_pool(CPU, 1000, node="n0"), 1.0)
    ledger.change_pool(a_pool(CPU, 2000, node="n1"), 1.0)
    ledger.change_pool(a_pool(GPU, 4, node="n1"), 1.0)
    ledger.change_pool(a_pool("api", 3), 1.0)
    ledger.change_node("n0", NodeState.DOWN)
    assert ledger.could_once_hold([(CPU, 8000), ("api", 3)], "", 0)
    assert not ledger.could_once_hold([(CPU, 8001)], "", 0)
    assert not ledger.could_once_hold([("api", 4)], "", 0)
    assert not ledger.could_once_hold([(CPU, 8000)], "n1", 0), "its sandbox stands on another node"
    assert not ledger.could_once_hold([(CPU, 8000), (GPU, 1)], "", 0), "never on one node"
    assert not ledger.could_once_hold([(CPU, 1000)], "", 1)


# ---- spent units ------------------------------------------------------------------------------------------------


def test_a_fixed_window_gives_everything_back_at_its_end() -> None:
    ledger, tokens = one(a_pool("tokens", 10, window=FIXED))
    run = ledger.new_usage()
    assert not ledger.give_back(ledger.hold(tokens, 7, run)), "spent units come back with time only"
    assert counts(tokens) == (3, 0, 7)
    assert tokens.available_at(5) == 10.0
    assert not ledger.refill(tokens, 9.99)
    assert ledger.refill(tokens, 10.0)
    assert counts(tokens) == (10, 0, 0)
    assert tokens.window_at == 10.0
    ledger.refill(tokens, 57.0)
    assert tokens.window_at == 50.0, "windows follow each other without gaps"


def test_a_bucket_gives_back_steadily_and_keeps_the_parts_of_a_unit() -> None:
    ledger, calls = one(a_pool("calls", 5, window=BUCKET))
    run = ledger.new_usage()
    ledger.hold(calls, 5, run)
    assert calls.available_at(1) == 2.0
    assert not ledger.refill(calls, 1.9)
    assert ledger.refill(calls, 3.0)
    assert counts(calls) == (1, 0, 4)
    assert calls.window_at == 2.0, "the second since then is not lost"
    assert ledger.refill(calls, 4.0)
    assert calls.free == 2
    assert calls.available_at(5) == 10.0
    ledger.refill(calls, 100.0)
    assert counts(calls) == (5, 0, 0)
    ledger.check([])


def test_a_bucket_that_was_full_gives_back_from_the_moment_of_spending() -> None:
    ledger, calls = one(a_pool("calls", 5, window=BUCKET))
    ledger.refill(calls, 100.0)
    ledger.hold(calls, 1, ledger.new_usage())
    assert not ledger.refill(calls, 101.0)
    assert ledger.refill(calls, 102.0)


def test_a_sliding_window_gives_each_unit_back_when_its_time_has_passed_since_it_was_used() -> None:
    ledger, calls = one(a_pool("calls", 3, window=SLIDING))
    run = ledger.new_usage()
    short = ledger.hold(calls, 1, run)
    ledger.now = 1.0
    ledger.give_back(short)
    long = ledger.hold(calls, 2, run)
    assert calls.available_at(1) == 11.0, "counted from its end"
    assert calls.available_at(2) == 13.0, "counted from when it must have arrived"
    ledger.now = 9.0
    ledger.give_back(long)
    assert not ledger.refill(calls, 10.99)
    assert ledger.refill(calls, 11.0)
    assert counts(calls) == (1, 0, 2)
    assert ledger.refill(calls, 13.0)
    assert counts(calls) == (3, 0, 0)
    ledger.check([])


def test_use_at_any_time_counts_from_its_end_and_blocks_no_other_action() -> None:
    ledger, calls = one(a_pool("calls", 5, window=SLIDING))
    run = ledger.new_usage()
    later = ledger.hold(calls, 3, run, at_once=False)
    ledger.give_back(ledger.hold(calls, 1, run))
    assert calls.available_at(2) == 10.0
    assert calls.available_at(5) == math.inf, "its end is unknown"
    ledger.now = 40.0
    assert ledger.refill(calls, 40.0)
    assert counts(calls) == (2, 0, 3)
    assert not ledger.give_back(later)
    assert calls.available_at(5) == 50.0
    assert not ledger.refill(calls, 49.9)
    ledger.check([])
    assert ledger.refill(calls, 50.0)
    assert counts(calls) == (5, 0, 0)
    ledger.check([])


def test_what_may_be_used_at_any_time_is_corrected_and_refunded_like_the_rest() -> None:
    ledger, tokens = one(a_pool("tokens", 10, window=SLIDING))
    run = ledger.new_usage()
    less, more, failed = (ledger.hold(tokens, 3, run, at_once=False) for _ in range(3))
    assert ledger.correct(less, 1)
    ledger.give_back(less)
    ledger.correct(more, 4)
    ledger.give_back(more)
    assert ledger.give_back(failed, refund=True)
    assert counts(tokens) == (5, 0, 5)
    ledger.check([])
    ledger.refill(tokens, 10.0)
    assert counts(tokens) == (10, 0, 0)
    ledger.check([])


def test_no_stretch_of_a_sliding_window_sees_more_than_the_total() -> None:
    draw = random.Random(7)
    ledger, calls = one(a_pool("calls", 5, window=Window(seconds=3.0, sliding=True, arrival_s=0.5)))
    run = ledger.new_usage()
    under_way: list[tuple[float, Holding]] = []
    arrivals: list[float] = []
    for _ in range(2000):
        ledger.now += draw.choice((0.0, 0.01, 0.3, 1.0))
        for end, holding in [each for each in under_way if each[0] <= ledger.now]:
            ledger.give_back(holding)
            under_way.remove((end, holding))
        ledger.refill(calls, ledger.now)
        if calls.fits(1):
            end = ledger.now + draw.choice((0.05, 0.4, 5.0))
            arrivals.append(draw.uniform(ledger.now, min(end, ledger.now + 0.5)))
            under_way.append((end, ledger.hold(calls, 1, run)))
        ledger.check([])
    arrivals.sort()
    assert len(arrivals) > 500
    assert all(later - first >= 3.0 for first, later in zip(arrivals, arrivals[5:], strict=False))


def test_a_refund_takes_back_only_what_time_has_not() -> None:
    ledger, tokens = one(a_pool("tokens", 10, window=FIXED))
    run = ledger.new_usage()
    failed = ledger.hold(tokens, 7, run)
    ledger.refill(tokens, 10.0)
    ledger.hold(tokens, 6, run)
    assert not ledger.give_back(failed, refund=True), "its window is over: this one belongs to others"
    assert counts(tokens) == (4, 0, 6)
    ledger.check([])


def test_a_refund_in_time_is_complete() -> None:
    ledger, tokens = one(a_pool("tokens", 10, window=FIXED))
    run = ledger.new_usage()
    ledger.hold(tokens, 2, run)
    failed = ledger.hold(tokens, 7, run)
    assert ledger.give_back(failed, refund=True)
    assert counts(tokens) == (8, 0, 2)
    assert len(tokens.charges) == 1


def test_a_bucket_refunds_what_is_left_of_a_charge() -> None:
    ledger, calls = one(a_pool("calls", 5, window=BUCKET))
    run = ledger.new_usage()
    first, second = ledger.hold(calls, 2, run), ledger.hold(calls, 3, run)
    ledger.refill(calls, 6.0)
    assert (first.spent, second.spent) == (0, 2), "the oldest charge comes back first"
    ledger.give_back(second, refund=True)
    assert counts(calls) == (5, 0, 0)


def test_an_estimate_is_corrected_in_both_directions() -> None:
    ledger, tokens = one(a_pool("tokens", 10, window=FIXED))
    run = ledger.new_usage()
    assert ledger.correct(ledger.hold(tokens, 7, run), 4)
    assert counts(tokens) == (6, 0, 4)
    assert not ledger.correct(ledger.hold(tokens, 6, run), 9)
    assert counts(tokens) == (-3, 0, 13), "what was overspent is owed"
    assert not tokens.fits(1)
    ledger.check([])
    ledger.refill(tokens, 10.0)
    assert counts(tokens) == (10, 0, 0)


def test_a_correction_after_the_window_charges_only_what_is_more() -> None:
    ledger, tokens = one(a_pool("tokens", 10, window=FIXED))
    run = ledger.new_usage()
    less, more = ledger.hold(tokens, 4, run), ledger.hold(tokens, 4, run)
    ledger.refill(tokens, 10.0)
    assert not ledger.correct(less, 1)
    assert not ledger.correct(more, 6)
    assert counts(tokens) == (8, 0, 2)
    assert run.units_by_kind == {"tokens": 2}


def test_a_run_keeps_no_account_of_kinds_of_which_it_has_nothing() -> None:
    """A walk over the kinds of a run must not grow with all that it ever used."""
    ledger = Ledger()
    run = ledger.new_usage()
    ledger.hold(ledger.change_pool(a_pool("api", 10), 0.0), 5, run)
    for number in range(20):
        held = ledger.change_pool(a_pool(f"held{number}", 4), 0.0)
        spent = ledger.change_pool(a_pool(f"spent{number}", 4, window=Window(seconds=1.0)), 0.0)
        holding = ledger.hold(held, 4, run)
        ledger.hold(spent, 4, run)
        ledger.give_back(holding)
        ledger.refill(spent, number + 2.0)
    assert (run.units_by_kind, run.share) == ({"api": 5}, 0.5)


def test_held_units_are_not_corrected() -> None:
    ledger, api = one(a_pool("api", 10))
    assert not ledger.correct(ledger.hold(api, 4, ledger.new_usage()), 1)
    assert counts(api) == (6, 4, 0)


def test_a_quota_that_was_cut_to_nothing_starts_over_when_it_is_back() -> None:
    ledger, calls = one(a_pool("calls", 5, window=BUCKET))
    ledger.hold(calls, 5, ledger.new_usage())
    ledger.change_pool(a_pool("calls", 0, window=BUCKET), 4.0)
    assert counts(calls) == (-3, 0, 3), "until then it gave back at its old rate"
    assert calls.available_at(1) == math.inf
    assert not ledger.refill(calls, 1000.0)
    ledger.change_pool(a_pool("calls", 5, window=BUCKET), 2000.0)
    assert counts(calls) == (2, 0, 3), "while it had no rate nothing came back"
    assert ledger.refill(calls, 2002.0)
    assert calls.free == 3


def test_a_failing_start_leaves_no_trace_in_the_charges() -> None:
    ledger, tokens = one(a_pool("tokens", 10, window=FIXED))
    run = ledger.new_usage()
    for _ in range(1000):
        ledger.give_back(ledger.hold(tokens, 7, run), refund=True)
    assert not tokens.charges


# ---- fair share -------------------------------------------------------------------------------------------------


def test_the_share_of_a_run_is_that_of_its_dominant_kind_over_its_weight() -> None:
    ledger, cpu = one(a_pool(CPU, 4000, node="n0"))
    other = ledger.change_pool(a_pool(CPU, 4000, node="n1"), 0.0)
    memory = ledger.change_pool(a_pool(MEMORY, 100, node="n0"), 0.0)
    run = ledger.new_usage()
    ledger.hold(cpu, 1000, run)
    ledger.hold(other, 1000, run)
    assert run.share == 0.25, "over all pools of a kind"
    ledger.hold(memory, 75, run)
    assert run.share == 0.75
    ledger.set_weight(run, 3.0)
    assert run.share == 0.25


def test_the_standing_of_a_run_is_the_average_of_its_share_and_what_it_holds_counts_a_little_more() -> None:
    ledger, cpu = one(a_pool(CPU, 4000, node="n0"))
    run = ledger.new_usage()
    holding = ledger.hold(cpu, 2000, run)
    held = 0.5 * HELD_S / RECENT_S
    assert run.standing(0.0) == pytest.approx(held), "nothing is averaged yet"
    ledger.now = RECENT_S
    assert run.standing(RECENT_S) == pytest.approx(held + 0.5 * (1 - math.exp(-1)))
    ledger.give_back(holding)
    assert run.standing(RECENT_S) == pytest.approx(0.5 * (1 - math.exp(-1)))
    ledger.set_weight(run, 2.0)
    assert run.standing(RECENT_S) == pytest.approx(0.25 * (1 - math.exp(-1))), "what it had counts by its weight too"
    assert run.standing(1000 * RECENT_S) == pytest.approx(0.0), "and is forgotten"


def test_what_is_a_runs_own_does_not_count_in_its_share() -> None:
    ledger, cap = one(Pool(kind="running/a", total=2, private=True))
    cpu = ledger.change_pool(a_pool(CPU, 4000, node="n0"), 0.0)
    run = ledger.new_usage()
    holdings = [ledger.hold(cap, 2, run), ledger.hold(cpu, 1000, run)]
    assert run.share == 0.25 and counts(cap) == (0, 2, 0)
    ledger.check(holdings)
    ledger.give_back(holdings[0])
    assert run.share == 0.25 and counts(cap) == (2, 0, 0)
    ledger.check(holdings[1:])


def test_a_share_follows_the_pools() -> None:
    ledger, cpu = one(a_pool(CPU, 4000, node="n0"))
    run = ledger.new_usage()
    holding = ledger.hold(cpu, 1000, run)
    ledger.change_pool(a_pool(CPU, 2000, node="n0"), 0.0)
    assert run.share == 0.5
    ledger.change_pool(a_pool(CPU, 0, node="n0"), 0.0)
    assert run.share == 1.0, "what is left of a kind that shrank to nothing is all of it"
    ledger.check([holding])


def test_spent_units_count_against_their_run_until_they_refill() -> None:
    ledger, calls = one(a_pool("calls", 4, window=BUCKET))
    one_run, other_run = ledger.new_usage(), ledger.new_usage()
    ledger.hold(calls, 1, one_run)
    ledger.hold(calls, 2, other_run)
    assert (one_run.share, other_run.share) == (0.25, 0.5)
    ledger.refill(calls, 5.0)
    assert (one_run.share, other_run.share) == (0.0, 0.25)


# ---- check ------------------------------------------------------------------------------------------------------


def test_check_finds_every_kind_of_wrong_count() -> None:
    def lose_a_unit(ledger: Ledger, gpu: PoolState, holding: Holding) -> None:
        gpu.free -= 1

    def forget_the_holding(ledger: Ledger, gpu: PoolState, holding: Holding) -> None:
        gpu.held, gpu.free = 0, 8

    def forget_the_chunk(ledger: Ledger, gpu: PoolState, holding: Holding) -> None:
        assert gpu.layout is not None
        gpu.layout.give(holding.position)  # type: ignore[arg-type]

    def forget_the_run(ledger: Ledger, gpu: PoolState, holding: Holding) -> None:
        holding.run.units_by_kind[GPU] = 1

    def forget_the_share(ledger: Ledger, gpu: PoolState, holding: Holding) -> None:
        holding.run.share = 0.0

    def forget_the_total(ledger: Ledger, gpu: PoolState, holding: Holding) -> None:
        ledger.total_by_kind[GPU] = 7

    for spoil, message in [
        (lose_a_unit, "is not 8"),
        (forget_the_holding, "counted as held"),
        (forget_the_chunk, "are held"),
        (forget_the_run, "is charged 1 units"),
        (forget_the_share, "share of 0.0"),
        (forget_the_total, "not the sum of its pools"),
    ]:
        ledger, gpu = one(a_pool(GPU, 8, node="g0"))
        holding = ledger.hold(gpu, 2, ledger.new_usage())
        ledger.check([holding])
        spoil(ledger, gpu, holding)
        with pytest.raises(InvariantError, match=message):
            ledger.check([holding])


# ---- everything, in any order -----------------------------------------------------------------------------------

POOLS = (
    a_pool(CPU, 6000, node="n0", numa=(4000, 2000)),
    a_pool(EXCLUSIVE_CORE, 5, node="n0", numa=(2, 3)),
    a_pool(GPU, 8, node="n0"),
    a_pool("api", 5),
    a_pool("tokens", 9, window=FIXED),
    a_pool("calls", 4, window=BUCKET),
)


class LedgerMachine(RuleBasedStateMachine):
    """Whatever is held, resized, given back, refunded, corrected, refilled and changed: the sums are right."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger()
        self.states = [self.ledger.change_pool(pool, 0.0) for pool in POOLS]
        self.runs = [self.ledger.new_usage() for _ in range(2)]
        self.holdings: list[Holding] = []
        self.now = 0.0

    @rule(pick=st.integers(0, 5), units=st.integers(1, 6), run=st.integers(0, 1))
    def hold(self, pick: int, units: int, run: int) -> None:
        state = self.states[pick]
        units = units * 700 if state.kind == CPU else units
        if state.fits(units):
            self.holdings.append(self.ledger.hold(state, units, self.runs[run]))
        else:
            with pytest.raises(InvariantError, match="oversells"):
                self.ledger.hold(state, units, self.runs[run])

    @precondition(lambda self: self.holdings)
    @rule(pick=st.integers(0, 99), refund=st.booleans())
    def give_back(self, pick: int, refund: bool) -> None:
        self.ledger.give_back(self.holdings.pop(pick % len(self.holdings)), refund=refund)

    @precondition(lambda self: self.holdings)
    @rule(pick=st.integers(0, 99), really=st.integers(0, 9))
    def correct(self, pick: int, really: int) -> None:
        holding = self.holdings.pop(pick % len(self.holdings))
        self.ledger.correct(holding, really)
        self.ledger.give_back(holding)

    @precondition(lambda self: self.holdings)
    @rule(pick=st.integers(0, 99), units=st.integers(1, 6000))
    def resize(self, pick: int, units: int) -> None:
        holding = self.holdings[pick % len(self.holdings)]
        if holding.pool.kind == CPU and units - holding.units <= max(0, holding.pool.free):
            self.ledger.resize(holding, units)

    @rule(seconds=st.sampled_from([0.0, 0.3, 2.5, 10.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for state in self.states:
            self.ledger.refill(state, self.now)

    @rule(pick=st.integers(0, 5), total=st.integers(0, 12), cells=st.integers(1, 3))
    def change(self, pick: int, total: int, cells: int) -> None:
        pool = POOLS[pick]
        unit = 1000 if pool.kind == CPU else 1
        numa = tuple((total + cell) // cells * unit for cell in range(cells)) if pool.numa else ()
        total = sum(numa) if numa else total * unit
        self.ledger.change_pool(
            a_pool(pool.kind, total, node=pool.node, window=pool.window, numa=numa if cells > 1 else ()), self.now
        )

    @invariant()
    def sums_are_right(self) -> None:
        self.ledger.check(self.holdings)
        for state in self.states:
            held = [cell for holding in self.holdings if holding.pool is state for cell in holding.cells]
            if state.kind in (GPU, EXCLUSIVE_CORE):
                assert len(held) == len(set(held)), f"{state.name}: {held} belong to two"

    def teardown(self) -> None:
        for holding in self.holdings:
            self.ledger.give_back(holding)
        for pool in POOLS:
            self.ledger.change_pool(pool, self.now)
        for _ in range(100):
            self.holdings = []
            self.pass_time(31.0)
        assert [counts(state) for state in self.states] == [(pool.total, 0, 0) for pool in POOLS]
        for state in self.states:
            assert state.fits(state.total)
        self.ledger.check([])


TestTheSumsAreAlwaysRight = LedgerMachine.TestCase
