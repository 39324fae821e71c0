"""Circuits: a service that keeps failing is left alone, then tried once."""

from __future__ import annotations

import pytest

from tangram.errors import AdmissionRefused
from tangram.managers.models.circuit_breaker import FAILURES_MAX, CircuitBreaker


def opened() -> CircuitBreaker:
    circuit = CircuitBreaker("judge", pause_s=30.0)
    for _ in range(FAILURES_MAX):
        circuit.admit(0.0)
        circuit.record_failure("it crashed", 0.0)
    return circuit


def test_failures_that_are_not_in_a_row_do_not_count() -> None:
    circuit = CircuitBreaker("judge")
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            circuit.admit(0.0)
            circuit.record_failure("it crashed", 0.0)
        circuit.record_success((0,))
    circuit.admit(0.0)


def test_after_three_in_a_row_it_is_refused_with_the_reason_and_when_it_is_tried_again() -> None:
    with pytest.raises(
        AdmissionRefused, match=r"judge failed 3 times in a row; .* in 20\.0 s; last: it crashed"
    ) as caught:
        opened().admit(10.0)
    assert caught.value.limit == "circuit"


def test_after_the_pause_one_call_tries_it() -> None:
    circuit = opened()
    circuit.admit(30.0)
    with pytest.raises(AdmissionRefused, match="a trial call is under way"):
        circuit.admit(31.0)
    circuit.record_success((0,))
    circuit.admit(31.0)
    circuit.admit(31.0)


def test_a_trial_that_fails_begins_another_pause() -> None:
    circuit = opened()
    circuit.admit(30.0)
    circuit.record_failure("again", 32.0)
    with pytest.raises(AdmissionRefused, match="last: again"):
        circuit.admit(61.0)
    circuit.admit(62.0)


def test_a_trial_that_was_stopped_decides_nothing_and_lets_the_next_one_try() -> None:
    circuit = opened()
    circuit.admit(30.0)
    circuit.end_trial()
    circuit.admit(30.0)
    with pytest.raises(AdmissionRefused):
        circuit.admit(30.0)


def test_the_repeats_of_an_action_and_the_actions_of_a_batch_count_once() -> None:
    circuit = CircuitBreaker("judge")
    for _ in range(9):
        circuit.record_failure("it crashed", 0.0, ["a", "b"])
        circuit.record_failure("it crashed", 0.0, ["b"])
        circuit.record_failure("it crashed", 0.0, ["c"])
        assert not circuit.is_open
    circuit.record_failure("it crashed", 0.0, ["d"])
    assert circuit.is_open


def test_calls_that_raise_count_until_one_has_succeeded() -> None:
    circuit = CircuitBreaker("judge")
    for action in ("a", "b", "c"):
        assert not circuit.is_open
        assert not circuit.record_error("KeyError", 0.0, (0,), [action])
    assert circuit.is_open
    circuit.record_success((0,))
    for number in range(20):
        circuit.record_error("KeyError", 0.0, (0,), [f"d{number}"])
    assert not circuit.is_open


def test_a_service_that_worked_is_reloaded_after_three_actions_whose_calls_raised() -> None:
    circuit = CircuitBreaker("judge")
    circuit.record_success((0,))
    broken = [circuit.record_error("KeyError", 0.0, (0,), [action]) for action in ("a", "a", "a", "b", "b", "c", "d")]
    assert broken == [False] * 5 + [True] * 2
    circuit.record_success((0,))
    assert not circuit.record_error("KeyError", 0.0, (0,), ["e"]), "they are no longer in a row"


def test_a_fresh_load_that_did_not_help_is_not_repeated() -> None:
    circuit = CircuitBreaker("judge")
    circuit.record_success((0,))
    circuit.on_loaded((0,))
    assert not any(circuit.record_error("KeyError", 0.0, (0,), [f"a{number}"]) for number in range(9))
    assert not circuit.is_open
    circuit.record_success((0,))
    assert [circuit.record_error("KeyError", 0.0, (0,), [action]) for action in "abc"] == [False, False, True]


def test_an_exception_on_some_devices_does_not_affect_other_devices() -> None:
    circuit = CircuitBreaker("judge")
    circuit.record_success((0,))
    circuit.record_success((1,))
    assert not any(circuit.record_error("KeyError", 0.0, (n % 2,), [f"a{n}"]) for n in range(4))


def test_a_payload_that_the_engine_declined_proves_only_that_it_lives() -> None:
    circuit = opened()
    circuit.admit(30.0)
    circuit.record_rejection()
    assert not circuit.is_open
    for action in ("a", "b", "c"):
        circuit.record_error("KeyError", 0.0, (0,), [action])
    assert circuit.is_open
