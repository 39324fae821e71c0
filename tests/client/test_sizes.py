"""Sizes as people write them."""

from __future__ import annotations

import pytest

from tangram.client.sizes import amounts, in_bytes
from tangram.core.demand import Amounts, cores, learned
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
    assert in_bytes("memory", written) == size


@pytest.mark.parametrize("written", ["", "GiB", "-1", "1 XB", "1 GiB GiB", 0, -5, True, 1.5, None])
def test_what_is_no_size_is_refused_with_the_field_and_an_example(written: object) -> None:
    with pytest.raises(InvalidAction, match='memory: expected a size such as "1GiB"'):
        in_bytes("memory", written)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cpus", "wanted"), [(2, cores(2)), (0.5, cores(0.5)), ((1, 8), cores(1, 8)), (None, learned())]
)
def test_cpus_are_a_number_a_range_or_learned(cpus: object, wanted: Amounts) -> None:
    assert amounts(cpus) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("cpus", [(1, 2, 3), (4, 2), 0, -1, "two"])
def test_wrong_cpus_are_refused(cpus: object) -> None:
    with pytest.raises(InvalidAction):
        amounts(cpus)  # type: ignore[arg-type]
