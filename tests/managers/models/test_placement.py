"""Placement: what is loaded where, and what is evicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import InvariantError
from tangram.managers.models.placement import PlacementTable, ServicePlacement

A, B, C = ServicePlacement("a", (0,)), ServicePlacement("b", (0,)), ServicePlacement("c", (0, 1))


def test_nothing_is_evicted_as_long_as_there_is_room() -> None:
    room = PlacementTable([100, 100])
    room.add(A, 50)
    assert room.victims((0,), 50) == []
    assert room.victims((1,), 100) == []


def test_the_least_recently_used_is_evicted_first_and_no_more_than_needed() -> None:
    room = PlacementTable([100, 100])
    room.add(A, 40)
    room.add(B, 40)
    room.touch(A)
    assert room.victims((0,), 60) == [B]
    assert room.victims((0,), 61) == [B, A]


def test_each_device_of_a_chunk_needs_room() -> None:
    room = PlacementTable([100, 100])
    room.add(A, 40)
    room.add(ServicePlacement("d", (1,)), 80)
    assert room.victims((0, 1), 60) == [ServicePlacement("d", (1,))]


def test_an_eviction_for_one_device_frees_the_other_devices_of_the_placement() -> None:
    room = PlacementTable([100, 100])
    room.add(C, 60)
    room.add(ServicePlacement("d", (1,)), 40)
    assert room.victims((0, 1), 60) == [C]


def test_what_is_in_use_is_never_evicted() -> None:
    room = PlacementTable([100])
    room.add(A, 60)
    room.begin_use(A)
    with pytest.raises(InvariantError, match="in use"):
        room.victims((0,), 50)
    with pytest.raises(InvariantError, match="in use"):
        room.remove(A)
    room.end_use(A)
    assert room.victims((0,), 50) == [A]
    room.remove(A)
    assert room.residents() == []


def test_a_copy_that_is_lost_with_its_process_is_gone_even_in_use() -> None:
    room = PlacementTable([100])
    room.add(A, 60)
    room.begin_use(A)
    room.drop(A)
    room.end_use(A)
    assert room.used_bytes(0) == 0


def test_a_device_is_never_filled_beyond_its_memory() -> None:
    room = PlacementTable([100])
    room.add(A, 60)
    with pytest.raises(InvariantError, match="100 bytes, and 101 are used"):
        room.add(B, 41)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]))))
def test_every_load_fits_after_its_victims_are_evicted(asked: list[tuple[int, tuple[int, ...]]]) -> None:
    room = PlacementTable([100, 100, 90, 90])
    for number, devices in asked:
        place = ServicePlacement(f"s{number}", devices)
        if place not in room:
            need = (10 + 8 * number) // len(devices)
            victims = room.victims(devices, need)
            assert all(set(victim.devices) & set(devices) for victim in victims)
            for victim in victims:
                room.remove(victim)
            room.add(place, need)
        room.touch(place)
        assert room.residents()[-1] == place
        room.check_invariants()
