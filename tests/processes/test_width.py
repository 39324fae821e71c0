"""How a program learns the number of its cores."""

from __future__ import annotations

import pytest

from tangram.processes.width import COUNT_VARIABLES, substitute_width, whole_cores, with_width


@pytest.mark.parametrize(("milli_cores", "cores"), [(4, 1), (999, 1), (1000, 1), (1999, 2), (2000, 2), (16_000, 16)])
def test_a_fraction_of_a_core_counts_as_one_core(milli_cores: int, cores: int) -> None:
    assert whole_cores(milli_cores) == cores


def test_every_usual_variable_has_the_width() -> None:
    environment = with_width(3000, {})
    assert {environment[name] for name in COUNT_VARIABLES} == {"3"}
    assert environment["MAKEFLAGS"] == "-j3"
    for name in ("OMP_NUM_THREADS", "GOMAXPROCS", "PYTEST_XDIST_AUTO_NUM_WORKERS", "TANGRAM_CPUS"):
        assert environment[name] == "3"


def test_what_the_caller_has_set_stays_but_for_our_own() -> None:
    environment = with_width(3000, {"OMP_NUM_THREADS": "1", "TANGRAM_CPUS": "64", "PATH": "/bin"})
    assert (environment["OMP_NUM_THREADS"], environment["TANGRAM_CPUS"], environment["PATH"]) == ("1", "3", "/bin")


def test_a_command_may_name_the_width() -> None:
    assert substitute_width("pytest -n {cpus} {other}", 4000) == "pytest -n 4 {other}"
    assert substitute_width(("make", "-j{cpus}"), 500) == ("make", "-j1")
