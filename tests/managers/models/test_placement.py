"""Room: who is loaded where, and who has to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import InvariantError
from tangram.managers.models.placement import Place, Room

A, B, C = Place("a", (0,)), Place("b", (0,)), Place("c", (0, 1))


def test_nobody_goes_as_long_as_there_is_room() -> None:
    room = Room([100, 100])
    room.add(A, 50)
    assert room.victims((0,), 50) == []
    assert room.victims((1,), 100) == []


def test_the_least_recently_used_goes_first_and_no_more_than_must() -> None:
    room = Room([100, 100])
    room.add(A, 40)
    room.add(B, 40)
    room.touch(A)
    assert room.victims((0,), 60) == [B]
    assert room.victims((0,), 61) == [B, A]


def test_each_device_of_a_chunk_needs_room() -> None:
    room = Room([100, 100])
    room.add(A, 40)
    room.add(Place("d", (1,)), 80)
    assert room.victims((0, 1), 60) == [Place("d", (1,))]


def test_who_goes_for_one_device_is_gone_from_the_others() -> None:
    room = Room([100, 100])
    room.add(C, 60)
    room.add(Place("d", (1,)), 40)
    assert room.victims((0, 1), 60) == [C]


def test_what_is_in_use_never_goes() -> None:
    room = Room([100])
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


def test_what_is_lost_with_its_process_is_gone_even_in_use() -> None:
    room = Room([100])
    room.add(A, 60)
    room.begin_use(A)
    room.lose(A)
    room.end_use(A)
    assert room.used(0) == 0


def test_a_device_is_never_filled_beyond_its_memory() -> None:
    room = Room([100])
    room.add(A, 60)
    with pytest.raises(InvariantError, match="100 bytes, and 101 are used"):
        room.add(B, 41)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]))))
def test_whatever_is_asked_for_fits_after_its_victims_have_gone(asked: list[tuple[int, tuple[int, ...]]]) -> None:
    room = Room([100, 100, 90, 90])
    for number, devices in asked:
        place = Place(f"s{number}", devices)
        if place not in room:
            need = (10 + 8 * number) // len(devices)
            victims = room.victims(devices, need)
            assert all(set(victim.devices) & set(devices) for victim in victims)
            for victim in victims:
                room.remove(victim)
            room.add(place, need)
        room.touch(place)
        assert room.residents()[-1] == place
        room.check()
