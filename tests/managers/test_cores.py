"""Which CPUs an action sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.demand import CORE
from tangram.managers.cpu.cores import Cores


def cores(count: int = 4, cells: dict[int, tuple[int, ...]] | None = None) -> Cores:
    return Cores(count * CORE, range(count), cells)


@pytest.mark.parametrize(("width", "count"), [(1, 1), (250, 1), (1000, 1), (1500, 2), (2000, 2), (9000, 4)])
def test_an_action_sees_as_many_cpus_as_its_width_needs(width: int, count: int) -> None:
    assert len(cores().place("a", width=width, reserved=width)) == count


def test_the_least_loaded_cpus_are_chosen() -> None:
    machine = cores(2)
    assert machine.place("a", width=1000, reserved=1000) == (0,)
    assert machine.place("b", width=1000, reserved=500) == (1,)
    assert machine.place("c", width=1000, reserved=100) == (1,)


def test_an_action_stays_on_the_numa_nodes_of_its_grant() -> None:
    machine = cores(4, {0: (0, 1), 1: (2, 3)})
    assert machine.place("a", width=2000, reserved=2000, cells=(1,)) == (2, 3)
    assert set(machine.place("b", width=1000, reserved=1000, cells=(0,))) <= {0, 1}


def test_an_action_wider_than_its_numa_nodes_sees_others_too() -> None:
    assert cores(4, {0: (0, 1), 1: (2, 3)}).place("a", width=3000, reserved=1000, cells=(0,)) == (0, 1, 2)


def test_when_one_ends_another_moves_to_where_it_was() -> None:
    machine = cores(2)
    for name in ("a", "b", "c", "d"):
        machine.place(name, width=1000, reserved=500)
    assert machine.leave("a") is None
    assert machine.leave("c") == ("b", (0,))


def test_a_small_difference_moves_nobody() -> None:
    machine = cores(2)
    machine.place("a", width=1000, reserved=60)
    machine.place("b", width=1000, reserved=40)
    machine.place("c", width=1000, reserved=40)
    assert machine.leave("a") is None


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), max_size=12))
def test_every_action_keeps_its_number_of_cpus_and_the_loads_add_up(actions: list[tuple[int, int]]) -> None:
    machine = cores(4)
    seen: dict[str, tuple[int, ...]] = {}
    for number, (width, reserved) in enumerate(actions):
        seen[str(number)] = machine.place(str(number), width=width, reserved=reserved)
    counts = {name: len(cpus) for name, cpus in seen.items()}
    for name in list(seen):
        moved = machine.leave(name)
        del seen[name]
        if moved is not None:
            assert moved[0] in seen
            seen[moved[0]] = moved[1]
            assert len(set(moved[1])) == counts[moved[0]]
    assert all(abs(load) < 1e-6 for load in machine._load.values())
