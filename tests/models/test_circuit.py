"""Circuits: a service that keeps failing is left alone, then tried once."""

from __future__ import annotations

import pytest

from tangram.errors import AdmissionRefused
from tangram.managers.models.circuit import FAILURES_MAX, Circuit


def opened() -> Circuit:
    circuit = Circuit("judge", pause_s=30.0)
    for _ in range(FAILURES_MAX):
        circuit.admit(0.0)
        circuit.failed("it crashed", 0.0)
    return circuit


def test_failures_that_are_not_in_a_row_do_not_count() -> None:
    circuit = Circuit("judge")
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            circuit.admit(0.0)
            circuit.failed("it crashed", 0.0)
        circuit.succeeded()
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
    with pytest.raises(AdmissionRefused, match="one call is trying it"):
        circuit.admit(31.0)
    circuit.succeeded()
    circuit.admit(31.0)
    circuit.admit(31.0)


def test_a_trial_that_fails_begins_another_pause() -> None:
    circuit = opened()
    circuit.admit(30.0)
    circuit.failed("again", 32.0)
    with pytest.raises(AdmissionRefused, match="last: again"):
        circuit.admit(61.0)
    circuit.admit(62.0)


def test_a_trial_that_was_stopped_decides_nothing_and_lets_the_next_one_try() -> None:
    circuit = opened()
    circuit.admit(30.0)
    circuit.undecided()
    circuit.admit(30.0)
    with pytest.raises(AdmissionRefused):
        circuit.admit(30.0)
