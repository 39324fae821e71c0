"""Learning: from the first observation on, undisturbed by outliers, following drift, in bounded memory."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.action import Action
from tangram.core.demand import Amounts, Demand, cores, fixed, learned, one_of
from tangram.core.profile import PRIOR, Estimate, ProfileStore
from tangram.core.speedup import Amdahl, PowerLaw, Speedup


def an_action(
    task: str = "t1",
    *,
    run: str = "r1",
    kind: str = "exec",
    key: str = "tests",
    cpu: Amounts | None = None,
    speedup: Speedup | None = None,
    duration_s: float | None = None,
) -> Action:
    demand = Demand({"cpu": learned() if cpu is None else cpu}, speedup)
    return Action(id="a", run=run, task=task, kind=kind, key=key, demand=demand, duration_s=duration_s)


def add_observations(profiles: ProfileStore, seconds: float, action: Action | None = None, times: int = 1) -> None:
    for _ in range(times):
        profiles.observe(action or an_action(), execution_s=seconds, units=None, cpu_s=0.5 * seconds)


# ---- durations --------------------------------------------------------------------------------------------------


def test_before_any_observation_an_action_is_a_second_of_a_core() -> None:
    estimate = ProfileStore().estimate(an_action())
    assert estimate == PRIOR
    assert (estimate.work_s, estimate.busy, estimate.observations) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("seconds", [0.02, 7.0, 900.0])
def test_the_first_observation_already_changes_the_estimate(seconds: float) -> None:
    profiles = ProfileStore()
    add_observations(profiles, seconds)
    estimate = profiles.estimate(an_action())
    assert estimate.work_s == pytest.approx(seconds)
    assert estimate.observations == 1.0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("field", ["execution_s", "units", "cpu_s"])
def test_an_impossible_measurement_teaches_nothing(field: str, number: float) -> None:
    profiles, action = ProfileStore(), an_action(cpu=cores(1, 4))
    for _ in range(3):
        measured = {"execution_s": 2.0, "units": 1.0, "cpu_s": 1.0, field: number}
        profiles.observe(action, **measured)
        for some in (action, an_action(run="other", key="other")):
            estimate = profiles.estimate(some)
            assert all(math.isfinite(value) and value < 1e6 for value in (estimate.work_s, estimate.busy))
    add_observations(profiles, 2.0, action)
    assert profiles.estimate(action).work_s == pytest.approx(2.0)


@pytest.mark.parametrize("outlier", [1e3, 1e6])
def test_one_outlier_does_not_spoil_the_estimate(outlier: float) -> None:
    rng = random.Random(1)
    profiles, undisturbed = ProfileStore(), ProfileStore()
    for i in range(60):
        seconds = 2.0 * math.exp(rng.gauss(0.0, 0.3))
        add_observations(undisturbed, seconds)
        add_observations(profiles, outlier if i == 40 else seconds)
    before, after = undisturbed.estimate(an_action()), profiles.estimate(an_action())
    assert after.work_s < 1.5 * before.work_s


def test_even_the_second_observation_may_be_an_outlier() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 1.0)
    add_observations(profiles, 1e6)
    add_observations(profiles, 1.0, times=40)
    assert profiles.estimate(an_action()).work_s < 5.0


@pytest.mark.parametrize(("before", "after"), [(1.0, 20.0), (20.0, 1.0), (0.1, 100.0)])
def test_a_lasting_change_is_followed(before: float, after: float) -> None:
    profiles = ProfileStore()
    add_observations(profiles, before, times=500)
    add_observations(profiles, after, times=200)
    assert profiles.estimate(an_action()).work_s == pytest.approx(after, rel=0.35)


def test_a_class_that_scatters_has_a_wide_estimate() -> None:
    rng, steady, scattered = random.Random(2), ProfileStore(), ProfileStore()
    for _ in range(200):
        noise = rng.gauss(0.0, 1.0)
        add_observations(steady, math.exp(0.1 * noise))
        add_observations(scattered, math.exp(1.5 * noise))
    assert scattered.estimate(an_action()).sigma > 1.1
    assert steady.estimate(an_action()).sigma < 0.7


def test_a_duration_of_zero_is_harmless() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 0.0, times=3)
    estimate = profiles.estimate(an_action())
    assert 0.0 < estimate.work_s < 0.01
    assert math.isfinite(estimate.busy)


# ---- relatives --------------------------------------------------------------------------------------------------


def test_relatives_inform_a_task_without_observations() -> None:
    profiles = ProfileStore()
    for task in ("t1", "t2", "t3"):
        add_observations(profiles, 30.0, an_action(task), times=5)
    unseen = profiles.estimate(an_action("t9"))
    assert unseen.work_s == pytest.approx(30.0)
    assert unseen.observations > 0


def test_another_run_informs_a_run_without_observations() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 12.0, an_action(run="old"), times=5)
    assert profiles.estimate(an_action(run="new", key="other")).work_s == pytest.approx(12.0)


def test_another_kind_informs_nothing() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 12.0, an_action(kind="judge"), times=5)
    assert profiles.estimate(an_action(kind="exec")) == PRIOR


def test_what_a_task_did_itself_outweighs_its_relatives() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 1.0, an_action("t1"), times=50)
    add_observations(profiles, 100.0, an_action("t2"), times=10)
    assert profiles.estimate(an_action("t2")).work_s > 50.0
    assert profiles.estimate(an_action("t1")).work_s < 3.0


def test_keys_are_distinguished() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 0.1, an_action(key="grep"), times=20)
    add_observations(profiles, 60.0, an_action(key="tests"), times=20)
    assert profiles.estimate(an_action("new", key="grep")).work_s == pytest.approx(0.1)
    assert profiles.estimate(an_action("new", key="tests")).work_s == pytest.approx(60.0)


# ---- hints ------------------------------------------------------------------------------------------------------


def test_a_hint_overrides_all_observations() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 30.0, times=50)
    estimate = profiles.estimate(an_action(duration_s=4.0))
    assert (estimate.work_s, estimate.sigma) == (4.0, 0.0)
    assert estimate.busy == pytest.approx(0.5)


def test_a_hint_counts_as_knowledge_without_observations() -> None:
    assert ProfileStore().estimate(an_action(duration_s=4.0)).observations >= 1.0


@pytest.mark.parametrize(("speedup", "exponent"), [(PowerLaw(0.25), 0.25), (Amdahl(0.0), 0.0)])
def test_a_speedup_that_was_given_is_not_learned_over(speedup: Speedup, exponent: float) -> None:
    profiles = ProfileStore()
    action = an_action(cpu=cores(1, 8), speedup=speedup)
    for units in (1.0, 2.0, 4.0, 8.0) * 10:
        profiles.observe(action, execution_s=10.0 / units**0.9, units=units, cpu_s=None)
    assert profiles.estimate(action).exponent == pytest.approx(exponent)


# ---- speed-up ---------------------------------------------------------------------------------------------------


def learned_exponent(true: float, seed: int, kind: str = "cpu") -> float:
    """Twenty unlike tasks, durations over three orders of magnitude, noise of sigma 0.5, widths by chance."""
    rng, profiles = random.Random(seed), ProfileStore()
    demand = Demand({kind: cores(1, 16) if kind == "cpu" else one_of(1, 2, 4, 8, 16)})
    tasks = {f"t{i}": math.exp(rng.uniform(-2.0, 5.0)) for i in range(20)}
    for _ in range(400):
        task, units = rng.choice(list(tasks)), rng.choice([1.0, 2.0, 4.0, 8.0, 16.0])
        seconds = tasks[task] / units**true * math.exp(rng.gauss(0.0, 0.5))
        profiles.observe(Action(id="a", task=task, demand=demand), execution_s=seconds, units=units, cpu_s=None)
    return profiles.estimate(Action(id="a", task="unseen", demand=demand)).exponent


@pytest.mark.parametrize("true", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_speedup_exponent_is_learned_from_unlike_tasks_at_different_widths(true: float, seed: int) -> None:
    assert learned_exponent(true, seed) == pytest.approx(true, abs=0.15)


def test_the_exponent_is_learned_along_devices_as_well() -> None:
    assert learned_exponent(0.9, 1, "gpu") > learned_exponent(0.3, 1, "gpu") + 0.4


def test_runs_at_one_width_do_not_determine_the_speedup() -> None:
    rng, profiles = random.Random(3), ProfileStore()
    action = an_action(cpu=cores(1, 16))
    for _ in range(200):
        profiles.observe(action, execution_s=math.exp(rng.gauss(1.0, 0.5)), units=4.0, cpu_s=None)
    assert profiles.estimate(action).exponent == pytest.approx(PRIOR.exponent, abs=0.02)


@given(st.lists(st.tuples(st.floats(1e-3, 1e4), st.sampled_from([0.25, 1.0, 2.0, 16.0])), max_size=40))
def test_the_estimate_stays_within_bounds_after_any_observations(runs: list[tuple[float, float]]) -> None:
    profiles, action = ProfileStore(), an_action(cpu=cores(0.25, 16))
    for seconds, units in runs:
        profiles.observe(action, execution_s=seconds, units=units, cpu_s=seconds * units)
    estimate = profiles.estimate(action)
    assert 0.0 <= estimate.exponent <= 0.98
    assert 0.0 < estimate.work_s < 1e7
    assert 0.0 < estimate.sigma < 30.0
    assert 0.0 <= estimate.busy <= 1.01


def test_durations_at_any_width_are_brought_to_one_unit() -> None:
    profiles = ProfileStore()
    action = an_action(cpu=cores(1, 16), speedup=PowerLaw(0.5))
    profiles.observe(action, execution_s=5.0, units=16.0, cpu_s=None)
    assert profiles.estimate(action).work_s == pytest.approx(20.0)


# ---- below one core ---------------------------------------------------------------------------------------------


def test_below_one_core_what_filled_its_share_was_slowed_by_it() -> None:
    profiles, action = ProfileStore(), an_action(cpu=cores(0.25, 1))
    profiles.observe(action, execution_s=8.0, units=0.25, cpu_s=2.0)
    assert profiles.estimate(action).work_s == pytest.approx(2.0)


def test_below_one_core_what_mostly_waited_was_not_slowed() -> None:
    profiles, action = ProfileStore(), an_action(cpu=cores(0.25, 1))
    profiles.observe(action, execution_s=8.0, units=0.25, cpu_s=0.1)
    assert profiles.estimate(action).work_s == pytest.approx(8.0)


# ---- CPU use ----------------------------------------------------------------------------------------------------


def test_cpu_use_is_weighted_by_time() -> None:
    profiles = ProfileStore()
    profiles.observe(an_action(), execution_s=99.0, units=None, cpu_s=0.99)
    profiles.observe(an_action(), execution_s=1.0, units=None, cpu_s=1.0)
    # By calls it would be half a core; by time, as a core sees it, it is 2 % of one.
    assert profiles.estimate(an_action()).busy == pytest.approx(0.02, rel=0.05)


def test_cpu_use_may_be_more_than_one_core() -> None:
    profiles = ProfileStore()
    profiles.observe(an_action(), execution_s=10.0, units=None, cpu_s=35.0)
    assert profiles.estimate(an_action()).busy == pytest.approx(3.5)


def test_cpu_use_of_an_elastic_action_counts_per_core_of_its_width() -> None:
    profiles, action = ProfileStore(), an_action(cpu=cores(1, 8), speedup=PowerLaw(0.5))
    profiles.observe(action, execution_s=10.0, units=4.0, cpu_s=20.0)
    assert profiles.estimate(action).busy == pytest.approx(0.5)


def test_cpu_use_follows_a_lasting_change() -> None:
    profiles = ProfileStore()
    for busy in [0.1] * 300 + [0.8] * 200:
        profiles.observe(an_action(), execution_s=2.0, units=None, cpu_s=2.0 * busy)
    assert profiles.estimate(an_action()).busy == pytest.approx(0.8, rel=0.05)


def test_an_action_without_cpu_leaves_the_guess_about_cpu_alone() -> None:
    profiles = ProfileStore()
    action = Action(id="a", demand=Demand({"search": fixed(1)}))
    profiles.observe(action, execution_s=3.0, units=None, cpu_s=None)
    assert profiles.estimate(action).busy == PRIOR.busy


# ---- what is left -----------------------------------------------------------------------------------------------


def an_estimate(work_s: float, sigma: float) -> Estimate:
    return Estimate(work_s=work_s, sigma=sigma, exponent=0.5, busy=1.0, observations=10.0)


@given(st.floats(0.01, 1e4), st.floats(0.0, 0.98))
def test_with_a_hint_the_remaining_time_is_work_minus_done(work_s: float, part: float) -> None:
    assert an_estimate(work_s, 0.0).remaining_s(part * work_s) == pytest.approx(work_s * (1.0 - part))


def test_what_outlasts_its_hint_is_not_over_until_it_ends() -> None:
    assert an_estimate(10.0, 0.0).remaining_s(500.0) > 0.0


@given(st.floats(0.01, 1e4), st.floats(0.0, 3.0))
def test_before_it_runs_all_of_it_is_left(work_s: float, sigma: float) -> None:
    assert an_estimate(work_s, sigma).remaining_s(0.0) == work_s


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.5])
def test_in_a_class_that_scatters_what_has_run_long_has_long_to_go(sigma: float) -> None:
    estimate = an_estimate(1.0, sigma)
    ages = [1.0, 2.0, 5.0, 10.0, 100.0, 1000.0, 1e5]
    left = [estimate.remaining_s(age) for age in ages]
    assert left == sorted(left)
    assert left[0] > 1.0
    assert left[-1] > 100.0 * left[0]


@given(st.floats(0.01, 1e3), st.floats(0.3, 3.0), st.floats(0.0, 1e6))
def test_what_is_left_is_always_a_positive_finite_time(work_s: float, sigma: float, done_s: float) -> None:
    assert 0.0 < an_estimate(work_s, sigma).remaining_s(done_s) < math.inf


@pytest.mark.parametrize("sigma", [0.5, 1.5])
@pytest.mark.parametrize("done_s", [0.5, 1.0, 3.0])
def test_what_is_left_is_the_mean_of_those_that_lasted_so_long(sigma: float, done_s: float) -> None:
    rng = random.Random(4)
    draws = (math.exp(rng.gauss(-0.5 * sigma * sigma, sigma)) for _ in range(200_000))
    left = [seconds - done_s for seconds in draws if seconds > done_s]
    assert an_estimate(1.0, sigma).remaining_s(done_s) == pytest.approx(sum(left) / len(left), rel=0.1)


# ---- bounds and determinism -------------------------------------------------------------------------------------


def test_memory_is_bounded_whatever_the_callers_invent() -> None:
    profiles = ProfileStore(classes_max=50)
    for i in range(2000):
        add_observations(profiles, 1.0, an_action(f"t{i}", run=f"r{i % 90}", kind=f"k{i % 70}", key=f"key{i}"))
        assert len(profiles) <= 3 * 50


def test_a_class_that_is_observed_often_is_not_pushed_out_by_new_ones() -> None:
    profiles = ProfileStore(classes_max=10)
    for i in range(100):
        add_observations(profiles, 50.0, an_action("t1", key="always", kind="x"))
        add_observations(profiles, 1.0, an_action("t1", key=f"once{i}", kind=f"y{i}"))
    estimate = profiles.estimate(an_action("t1", key="always", kind="x"))
    assert estimate.work_s == pytest.approx(50.0)
    assert estimate.observations == 100.0


def test_what_was_pushed_out_is_learned_again_from_its_next_observation() -> None:
    profiles = ProfileStore(classes_max=2)
    add_observations(profiles, 50.0, an_action("t1", key="a", kind="x"), times=5)
    for i in range(5):
        add_observations(profiles, 1.0, an_action("t1", key=f"b{i}", kind=f"y{i}"))
    assert profiles.estimate(an_action("t1", key="a", kind="x")) == PRIOR
    add_observations(profiles, 50.0, an_action("t1", key="a", kind="x"))
    assert profiles.estimate(an_action("t1", key="a", kind="x")).work_s == pytest.approx(50.0)


def test_the_estimate_of_a_class_is_used_after_its_relatives_were_pushed_out() -> None:
    profiles = ProfileStore(classes_max=2)
    add_observations(profiles, 50.0, an_action("t1", kind="x"))
    add_observations(profiles, 1.0, an_action("t1", kind="y"))
    add_observations(profiles, 50.0, an_action("t2", kind="x"))
    add_observations(profiles, 1.0, an_action("t1", kind="z"))
    assert profiles.estimate(an_action("t2", kind="x")).work_s == pytest.approx(50.0)


def test_the_same_observations_give_the_same_estimates() -> None:
    def taught() -> ProfileStore:
        rng, profiles = random.Random(5), ProfileStore(classes_max=20)
        for _ in range(500):
            action = an_action(f"t{rng.randrange(40)}", key=f"k{rng.randrange(8)}", cpu=cores(1, 8))
            units = rng.choice([1.0, 2.0, 8.0])
            profiles.observe(action, execution_s=rng.expovariate(0.1), units=units, cpu_s=rng.random())
        return profiles

    one, other = taught(), taught()
    for task in range(40):
        action = an_action(f"t{task}", key="k3", cpu=cores(1, 8))
        assert one.estimate(action) == other.estimate(action)


def test_asking_changes_nothing() -> None:
    profiles = ProfileStore()
    add_observations(profiles, 3.0, times=3)
    first = profiles.estimate(an_action())
    for task in range(100):
        profiles.estimate(an_action(f"t{task}"))
    assert profiles.estimate(an_action()) == first
    assert len(profiles) == 3
