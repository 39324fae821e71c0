"""Sizes as people write them."""

from __future__ import annotations

import pytest

from tangram.core.demand import Amounts, cores, learned
from tangram.core.sizes import amounts, parse_size
from tangram.errors import InvalidAction


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1GiB", 1 << 30),
        ("512 MB", 512_000_000),
        ("1.5Gi", 3 << 29),
        ("64k", 64_000),
        ("2TiB", 2 << 40),
        (4096, 4096),
        ("7", 7),
        ("10b", 10),
    ],
)
def test_a_size_is_read_as_it_is_written(written: int | str, size: int) -> None:
    assert parse_size("memory", written) == size


@pytest.mark.parametrize("written", ["", "GiB", "-1", "1 XB", "1 GiB GiB", 0, -5, True, 1.5, None, "9" * 400])
def test_what_is_no_size_is_refused_with_the_field_and_an_example(written: object) -> None:
    with pytest.raises(InvalidAction, match='memory: expected a size such as "1GiB"'):
        parse_size("memory", written)  # type: ignore[arg-type]


def test_a_size_out_of_range_is_reported_in_readable_units() -> None:
    with pytest.raises(InvalidAction, match=r"memory: .*, at least 4 MiB, at most 1\.5 GiB, got '1MiB'"):
        parse_size("memory", "1MiB", least=4 << 20, most=3 << 29)
    with pytest.raises(InvalidAction, match="at least 64 KiB, got 5"):
        parse_size("disk", 5, least=64 << 10)
    assert parse_size("capture", 0, least=0) == 0
    assert parse_size("memory", "1.5GiB", most=3 << 29) == 3 << 29


@pytest.mark.parametrize(
    ("cpus", "wanted"),
    [(2, cores(2)), (0.5, cores(0.5)), ((1, 8), cores(1, 8)), ([1, 8], cores(1, 8)), (None, learned())],
)
def test_cpus_are_a_number_a_range_or_learned(cpus: object, wanted: Amounts) -> None:
    assert amounts(cpus) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cpus",
    [(1, 2, 3), (1,), (), (4, 2), (0, 1), 0, 0.0004, -1, True, "two", "2", ("1", "2"), 10**400, float("inf"), {1: 2}],
)
def test_wrong_cpus_are_refused_in_cores_as_they_were_written(cpus: object) -> None:
    with pytest.raises(InvalidAction, match="cpus: expected a number of cores above 0") as caught:
        amounts(cpus)  # type: ignore[arg-type]
    assert caught.value.value is cpus
