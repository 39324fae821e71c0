"""Which CPUs an action sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.core.demand import CORE
from tangram.managers.sandboxes.cpuset_allocator import CpusetAllocator


def cores(count: int = 4, cells: dict[int, tuple[int, ...]] | None = None) -> CpusetAllocator:
    return CpusetAllocator(count * CORE, range(count), cells)


@pytest.mark.parametrize(("width", "count"), [(1, 1), (250, 1), (1000, 1), (1500, 2), (2000, 2), (9000, 4)])
def test_an_action_sees_as_many_cpus_as_its_width_needs(width: int, count: int) -> None:
    assert len(cores().place("a", width=width, reserved=width)[0]) == count


def cpus_of(
    machine: CpusetAllocator, action: str, width: int, reserved: int, cells: tuple[int, ...] = ()
) -> tuple[int, ...]:
    return machine.place(action, width=width, reserved=reserved, cells=cells)[0]


def test_the_least_loaded_cpus_are_chosen() -> None:
    machine = cores(2)
    assert cpus_of(machine, "a", 1000, 1000) == (0,)
    assert cpus_of(machine, "b", 1000, 500) == (1,)
    assert cpus_of(machine, "c", 1000, 100) == (1,)


def test_an_action_stays_on_the_numa_nodes_of_its_grant() -> None:
    machine = cores(4, {0: (0, 1), 1: (2, 3)})
    assert cpus_of(machine, "a", 2000, 2000, (1,)) == (2, 3)
    assert set(cpus_of(machine, "b", 1000, 1000, (0,))) <= {0, 1}


def test_an_action_wider_than_its_numa_nodes_gets_further_nodes() -> None:
    assert cpus_of(cores(4, {0: (0, 1), 1: (2, 3)}), "a", 3000, 1000, (0,)) == (0, 1, 2)


def test_actions_move_when_a_new_one_would_overload_a_cpu() -> None:
    machine = cores(2)
    places = {"a": cpus_of(machine, "a", 1000, 250), "b": cpus_of(machine, "b", 1000, 250)}
    places["c"] = cpus_of(machine, "c", 1000, 500)
    places["d"], moves = machine.place("d", width=1000, reserved=1000)
    places |= moves
    alone = places["d"]
    assert [name for name, cpus in places.items() if cpus == alone] == ["d"]


def test_when_one_ends_another_moves_to_where_it_was() -> None:
    machine = cores(2)
    for name in ("a", "b", "c", "d"):
        machine.place(name, width=1000, reserved=500)
    assert machine.release("a") == {}
    moved = machine.release("c")
    assert list(moved.values()) == [(0,)]


def test_a_small_difference_moves_no_action() -> None:
    machine = cores(2)
    machine.place("a", width=1000, reserved=60)
    machine.place("b", width=1000, reserved=40)
    machine.place("c", width=1000, reserved=40)
    assert machine.release("a") == {}


def test_one_and_a_half_cores_are_a_whole_one_and_half_of_the_one_that_is_shared() -> None:
    machine = cores(2)
    machine.place("half", width=1000, reserved=500)
    assert cpus_of(machine, "wide", 1500, 1500) == (0, 1)
    assert (machine.weight("half"), machine.weight("wide")) == (500, 1000), "equal on the CPU that they share"


def test_what_reserves_little_on_many_cpus_weighs_as_much_as_it_reserves() -> None:
    machine = cores(4)
    machine.place("learned", width=4000, reserved=200)
    assert machine.weight("learned") == 200
    machine.resize("learned", 3500)
    assert machine.weight("learned") == 2000


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), max_size=12))
def test_every_action_keeps_its_number_of_cpus_and_the_loads_add_up(actions: list[tuple[int, int]]) -> None:
    machine = cores(4)
    places: dict[str, tuple[int, ...]] = {}
    for number, (width, reserved) in enumerate(actions):
        places[str(number)], moves = machine.place(str(number), width=width, reserved=reserved)
        places |= moves
    counts = {name: len(cpus) for name, cpus in places.items()}
    for name in list(places):
        moves = machine.release(name)
        del places[name]
        assert set(moves) <= set(places)
        assert all(len(set(cpus)) == counts[moved] for moved, cpus in moves.items())
    free = {cpus_of(machine, f"next {number}", 1000, 1)[0] for number in range(4)}
    assert free == {0, 1, 2, 3}, "a CPU that still had a load would not be chosen"
