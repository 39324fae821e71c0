"""Residents: which service is loaded where, as the managers reported it, and what loading costs."""

from __future__ import annotations

import math

import pytest

from tangram.core.residents import CALLS_MEMORY_S, RESTORE_PRIOR_S, SERVICES_MAX, Residents


def test_a_service_is_loaded_where_it_was_reported() -> None:
    residents = Residents()
    residents.add("judge", "g0", (0, 1))
    residents.add("judge", "g1", (4,))
    assert residents.devices("judge", "g0") == [(0, 1)]
    assert residents.chunks("judge", "g1") == [(4, 1)]
    assert residents.devices("teacher", "g0") == []


def test_the_copy_used_last_is_named_first() -> None:
    residents = Residents()
    for devices in [(0,), (1,), (2,)]:
        residents.add("judge", "g0", devices)
    assert residents.devices("judge", "g0") == [(2,), (1,), (0,)]
    assert residents.use("judge", "g0", (0,))
    assert residents.devices("judge", "g0") == [(0,), (2,), (1,)]


def test_reporting_a_copy_twice_does_not_make_two() -> None:
    residents = Residents()
    residents.add("judge", "g0", (0, 1))
    residents.add("judge", "g0", (0, 1))
    assert residents.devices("judge", "g0") == [(0, 1)]


def test_a_start_on_other_devices_has_to_load_the_service() -> None:
    residents = Residents()
    residents.add("judge", "g0", (0, 1))
    assert not residents.use("judge", "g0", (0,))
    assert not residents.use("judge", "g1", (0, 1))
    assert not residents.use("teacher", "g0", (0, 1))
    assert residents.devices("judge", "g0") == [(0, 1)]


def test_an_evicted_copy_is_gone_and_evicting_it_again_does_no_harm() -> None:
    residents = Residents()
    residents.add("judge", "g0", (0,))
    residents.add("judge", "g0", (1,))
    for _ in range(2):
        residents.remove("judge", "g0", (0,))
        assert residents.devices("judge", "g0") == [(1,)]
    residents.remove("unknown", "g0", (0,))
    assert not residents.use("judge", "g0", (0,))


def test_a_dead_node_takes_only_its_own_copies_along() -> None:
    residents = Residents()
    residents.add("judge", "g0", (0,))
    residents.add("judge", "g1", (0,))
    residents.add("teacher", "g0", (1,))
    residents.drop_node("g0")
    assert residents.devices("judge", "g0") == residents.devices("teacher", "g0") == []
    assert residents.devices("judge", "g1") == [(0,)]


def test_loading_costs_a_guess_then_the_time_of_other_services_then_its_own() -> None:
    residents = Residents()
    assert residents.restore_s("judge") == RESTORE_PRIOR_S
    residents.learn_restore("teacher", 4.0)
    residents.learn_restore("critic", 2.0)
    assert residents.restore_s("judge") == 3.0
    residents.learn_restore("judge", 0.5)
    assert residents.restore_s("judge") == 0.5


def test_one_slow_load_does_not_spoil_the_estimate_and_a_lasting_change_is_followed() -> None:
    residents = Residents()
    for _ in range(10):
        residents.learn_restore("judge", 1.0)
    residents.learn_restore("judge", 6.0)
    assert residents.restore_s("judge") == pytest.approx(2.0)
    for _ in range(30):
        residents.learn_restore("judge", 6.0)
    assert residents.restore_s("judge") == pytest.approx(6.0, rel=0.01)


def test_what_was_learned_about_loading_outlives_the_copies() -> None:
    residents = Residents()
    residents.add("judge", "g0", (0,))
    residents.learn_restore("judge", 0.5)
    residents.drop_node("g0")
    assert residents.restore_s("judge") == 0.5


def test_the_service_loaded_longest_ago_is_forgotten_by_name_and_out_of_the_mean() -> None:
    residents = Residents()
    residents.learn_restore("old", 100.0)
    residents.learn_restore("used", 7.0)
    for number in range(SERVICES_MAX - 2):
        residents.learn_restore(f"s{number}", 2.0)
    residents.learn_restore("used", 7.0)
    assert residents.restore_s("old") == 100.0
    residents.learn_restore("new", 2.0)
    assert residents.restore_s("used") == 7.0
    mean = (7.0 + 2.0 * (SERVICES_MAX - 1)) / SERVICES_MAX
    assert residents.restore_s("old") == residents.restore_s("unknown") == pytest.approx(mean)


def test_a_service_is_worth_the_restores_that_it_saves_and_less_with_every_minute() -> None:
    residents = Residents()
    assert residents.worth("judge", 0.0) == 0.0
    residents.learn_restore("judge", 2.0)
    residents.record_call("judge", 0.0)
    once = residents.worth("judge", 0.0)
    residents.record_call("judge", 0.0)
    assert residents.worth("judge", 0.0) == pytest.approx(2 * once)
    assert residents.worth("judge", CALLS_MEMORY_S) == pytest.approx(2 * once / math.e)


def test_what_one_call_proves_is_nothing_and_of_many_nearly_all() -> None:
    residents = Residents()
    residents.record_call("judge", 0.0)
    assert residents.sure_worth("judge", 0.0) == residents.sure_worth("unknown", 0.0) == 0.0
    for _ in range(99):
        residents.record_call("judge", 0.0)
    assert residents.sure_worth("judge", 0.0) == pytest.approx(0.9 * residents.worth("judge", 0.0))


def test_a_place_is_worth_what_lies_on_any_of_its_devices_and_a_second_copy_less() -> None:
    residents = Residents()
    for service in ("judge", "teacher"):
        residents.record_call(service, 0.0)
    residents.add("judge", "g0", (0, 1))
    residents.add("teacher", "g0", (2,))
    worth = residents.worth("judge", 0.0)
    assert residents.worth_on("g0", (3,), 0.0) == residents.worth_on("g1", (0,), 0.0) == 0.0
    assert residents.worth_on("g0", (1,), 0.0) == pytest.approx(worth)
    assert residents.worth_on("g0", (0, 1, 2, 3), 0.0) == pytest.approx(2 * worth)
    residents.add("judge", "g1", (0,))
    assert residents.worth_on("g0", (1,), 0.0) == pytest.approx(worth / 2)
    residents.drop_node("g0")
    assert residents.worth_on("g0", (0, 1, 2, 3), 0.0) == 0.0


def test_the_concurrency_of_a_service_is_known_once_it_was_loaded() -> None:
    residents = Residents()
    assert residents.batch_max("judge") == 1
    residents.add("judge", "g0", (0,), 8)
    residents.add("judge", "g0", (0,))
    assert residents.batch_max("judge") == 8
