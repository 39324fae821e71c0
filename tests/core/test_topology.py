"""Places inside a node: nothing is given out twice, nothing leaks, and everything comes together again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tangram.core.topology import Cells, Chunk, Chunks, CoreSet, Parts, level_of
from tangram.errors import InvalidConfig, InvariantError

# ---- chunks of devices ------------------------------------------------------------------------------------------


def peek(chunks: Chunks, units: int, preferred: Sequence[tuple[int, int]] = ()) -> Chunk:
    """What would be taken."""
    chunk = chunks.take(units, preferred)
    chunks.give(chunk)
    return chunk


def test_the_places_for_a_size_are_all_free_chunks_of_it_or_those_that_split_least() -> None:
    chunks = Chunks(8)
    chunks.take(2, preferred=[(2, 2)])
    assert chunks.chunks_for(2) == [Chunk(0, 2), Chunk(4, 2), Chunk(6, 2)]
    assert chunks.chunks_for(2, smallest=True) == [Chunk(0, 2)]
    assert chunks.chunks_for(1, smallest=True) == [Chunk(0, 1), Chunk(1, 1)]
    assert chunks.chunks_for(3) == [Chunk(4, 4)]
    assert chunks.chunks_for(8) == []


def test_the_level_of_a_request_is_that_of_the_next_power_of_two() -> None:
    assert [level_of(units) for units in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    with pytest.raises(InvariantError, match="at least one device"):
        level_of(0)


@pytest.mark.parametrize(
    ("count", "counts"), [(1, (1,)), (6, (0, 1, 1)), (7, (1, 1, 1)), (8, (0, 0, 0, 1)), (12, (0, 0, 1, 1)), (0, ())]
)
def test_devices_start_as_the_aligned_chunks_that_tile_them(count: int, counts: tuple[int, ...]) -> None:
    chunks = Chunks(count)
    chunks.check()
    assert chunks.free_counts() == counts


def test_a_negative_number_of_devices_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least 0"):
        Chunks(-1)


def test_an_8_chunk_splits_for_4_devices_and_merges_on_release() -> None:
    chunks = Chunks(8)
    chunk = chunks.take(4)
    assert chunk == Chunk(0, 4)
    assert chunk.devices == (0, 1, 2, 3)
    assert chunks.free_counts() == (0, 0, 1, 0)
    chunks.give(chunk)
    assert chunks.free_counts() == (0, 0, 0, 1)


def test_three_devices_take_a_chunk_of_four() -> None:
    assert Chunks(8).take(3) == Chunk(0, 4)


def test_a_chunk_starts_at_a_multiple_of_its_size() -> None:
    chunks = Chunks(8)
    assert chunks.take(1) == Chunk(0, 1)
    assert chunks.take(2) == Chunk(2, 2)
    assert chunks.take(4) == Chunk(4, 4)
    assert chunks.take(1) == Chunk(1, 1)
    assert not chunks.fits(1)


def test_four_scattered_single_devices_hold_no_four() -> None:
    chunks = Chunks(8)
    chunks_taken = [chunks.take(1) for _ in range(8)]
    for chunk in chunks_taken[::2]:
        chunks.give(chunk)
    assert chunks.free_counts() == (4, 0, 0, 0)
    assert chunks.fits(1)
    assert not chunks.fits(2)
    with pytest.raises(InvariantError, match="no free chunk holds 4 devices"):
        chunks.take(4)


def test_two_free_neighbours_that_are_no_buddies_hold_no_two() -> None:
    chunks = Chunks(4)
    taken = [chunks.take(1) for _ in range(4)]
    chunks.give(taken[1])
    chunks.give(taken[2])
    chunks.check()
    assert not chunks.fits(2)


def test_the_smallest_sufficient_chunk_is_taken_before_a_larger_one() -> None:
    chunks = Chunks(6)
    assert chunks.take(1) == Chunk(4, 1)
    assert chunks.free_counts() == (1, 0, 1)


def test_more_devices_than_the_node_has_do_not_fit() -> None:
    assert not Chunks(6).fits(8)
    assert Chunks(6).fits(4)
    assert not Chunks(0).fits(1)


def test_giving_back_twice_or_what_was_never_taken_is_an_error() -> None:
    chunks = Chunks(8)
    chunk = chunks.take(2)
    for foreign in (Chunk(4, 2), Chunk(0, 4), Chunk(0, 1)):
        with pytest.raises(InvariantError, match="is not taken"):
            chunks.give(foreign)
    chunks.give(chunk)
    with pytest.raises(InvariantError, match="is not taken"):
        chunks.give(chunk)
    chunks.check()


def test_of_equal_chunks_a_resident_one_is_taken() -> None:
    chunks = Chunks(8)
    taken = [chunks.take(2) for _ in range(4)]
    chunks.give(taken[0])
    chunks.give(taken[2])
    assert peek(chunks, 2) == Chunk(0, 2)
    assert peek(chunks, 2, preferred=[(6, 2), (4, 2)]) == Chunk(4, 2)


def test_of_equal_chunks_one_that_contains_a_resident_chunk_is_taken() -> None:
    chunks = Chunks(8)
    taken = [chunks.take(2) for _ in range(4)]
    chunks.give(taken[0])
    chunks.give(taken[2])
    assert peek(chunks, 2, preferred=[(5, 1)]) == Chunk(4, 2)
    assert peek(chunks, 2, preferred=[(5, 1), (0, 2)]) == Chunk(0, 2), "equal goes before containing"


def test_a_split_keeps_the_half_with_the_resident_chunk() -> None:
    assert Chunks(8).take(2, preferred=[(5, 1)]) == Chunk(4, 2)
    assert Chunks(8).take(2, preferred=[(0, 8)]) == Chunk(0, 2), "a larger resident chunk tells nothing about halves"


def test_a_resident_chunk_is_taken_out_of_a_larger_one() -> None:
    chunks = Chunks(6)
    assert peek(chunks, 2) == Chunk(4, 2)
    assert peek(chunks, 2, preferred=[(2, 2)]) == Chunk(2, 2)
    assert chunks.take(2, preferred=[(2, 2)]) == Chunk(2, 2)
    assert chunks.free_counts() == (0, 2, 0)
    chunks.check()


def test_a_resident_chunk_that_is_taken_or_impossible_is_no_candidate() -> None:
    chunks = Chunks(8)
    first = chunks.take(2)
    assert peek(chunks, 2, preferred=[first, (1, 2), (16, 2), (-2, 2)]) == Chunk(2, 2)


@st.composite
def preferences(draw: st.DrawFn) -> tuple[Chunk, ...]:
    chunks = []
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([1, 2, 4, 8]))
        chunks.append(Chunk(draw(st.integers(0, 15)) // size * size, size))
    return tuple(chunks)


class ChunksMachine(RuleBasedStateMachine):
    """Take and give at random, against a model that knows only which device is free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.chunks = Chunks(0)
        self.taken: list[Chunk] = []

    @precondition(lambda self: self.count == 0)
    @rule(count=st.integers(1, 16))
    def start(self, count: int) -> None:
        self.count = count
        self.chunks = Chunks(count)
        self.counts_at_start = self.chunks.free_counts()

    @precondition(lambda self: self.count)
    @rule(count=st.integers(1, 16))
    def resize(self, count: int) -> None:
        self.count = count
        self.chunks.resize(count)
        self.counts_at_start = Chunks(count).free_counts()

    def is_free(self, start: int, size: int) -> bool:
        held = [device for chunk in self.taken for device in chunk.devices]
        return start + size <= self.count and not any(device in held for device in range(start, start + size))

    @precondition(lambda self: self.count)
    @rule(units=st.integers(1, 9), preferred=preferences())
    def take(self, units: int, preferred: tuple[Chunk, ...]) -> None:
        size = 1 << level_of(units)
        places = [start for start in range(0, self.count, size) if self.is_free(start, size)]
        assert self.chunks.fits(units) == bool(places)
        assert [start for start in range(16) if self.chunks.is_free((start, size))] == places
        if not places:
            with pytest.raises(InvariantError):
                self.chunks.take(units, preferred)
            return
        before = self.chunks.free_counts()
        assert sorted(chunk.start for chunk in self.chunks.chunks_for(units)) == places
        least = self.chunks.chunks_for(units, smallest=True)
        chunk = self.chunks.take(units, preferred)
        assert chunk.size == size
        assert chunk.start in places
        resident = [wanted for wanted in preferred if wanted.size == size and wanted.start in places]
        if resident:
            assert chunk == resident[0]
        else:
            assert chunk in least
            smallest = min(level for level in range(level_of(units), len(before)) if before[level])
            assert self.chunks.free_counts()[smallest] == before[smallest] - 1, "the smallest sufficient chunk"
            assert self.chunks.free_counts()[smallest + 1 :] == before[smallest + 1 :]
        self.taken.append(chunk)

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 100))
    def give(self, which: int) -> None:
        chunk = self.taken.pop(which % len(self.taken))
        self.chunks.give(chunk)
        with pytest.raises(InvariantError):
            self.chunks.give(chunk)

    @invariant()
    def consistent(self) -> None:
        self.chunks.check(self.taken)
        free = sum(number << level for level, number in enumerate(self.chunks.free_counts()))
        inside = [device for chunk in self.taken for device in chunk.devices if device < self.count]
        assert free + len(inside) == self.count

    def teardown(self) -> None:
        for chunk in self.taken:
            self.chunks.give(chunk)
        self.chunks.check()
        if self.count:
            assert self.chunks.free_counts() == self.counts_at_start, "all is merged once all have left"


TestChunksNeverLeakOrOverlap = ChunksMachine.TestCase


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=8), st.data())
def test_placed_from_the_largest_down_any_affinity_leaves_room_for_the_rest(
    sizes: list[int], data: st.DataObject
) -> None:
    sizes = sorted(sizes, reverse=True)
    plain, attached = Chunks(16), Chunks(16)
    for size in sizes:
        assert plain.fits(size) == attached.fits(size)
        if not plain.fits(size):
            return
        plain.take(size)
        attached.take(size, data.draw(preferences()))


def test_check_finds_a_lost_chunk_and_buddies_apart() -> None:
    lost = Chunks(8)
    lost._taken[lost.take(4).start] = 2  # noqa: SLF001 - no public call makes it inconsistent
    with pytest.raises(InvariantError):
        lost.check()
    apart = Chunks(2)
    apart._free = [[0, 1], []]  # noqa: SLF001 - no public call makes it inconsistent
    with pytest.raises(InvariantError, match="not merged"):
        apart.check()


# ---- shared cores in NUMA cells ---------------------------------------------------------------------------------


def test_a_single_cell_counts() -> None:
    cells = Cells((4000,))
    parts = cells.take(1500)
    assert parts == ((0, 1500),)
    assert cells.free == [2500]
    cells.give(parts)
    assert cells.free == [4000]


def test_the_fullest_cell_with_room_is_taken() -> None:
    cells = Cells((4000, 2000, 3000))
    assert cells.take(1500) == ((1, 1500),)
    assert cells.take(1500) == ((2, 1500),)


def test_what_fits_no_cell_spreads_from_the_emptiest_down() -> None:
    cells = Cells((2000, 4000, 3000))
    assert cells.take(7500) == ((1, 4000), (2, 3000), (0, 500))
    assert cells.free == [1500, 0, 0]


def test_nothing_takes_no_cell() -> None:
    assert Cells((1000,)).take(0) == ()
    assert Cells((1000, 1000)).take(0) == ()


def test_more_than_is_free_is_an_error() -> None:
    for cells in (Cells((1000,)), Cells((500, 500))):
        for units in (1001, -1):
            with pytest.raises(InvariantError, match="do not fit"):
                cells.take(units)
        cells.check([])


def test_releasing_units_that_are_not_held_is_an_error() -> None:
    cells = Cells((1000, 1000))
    parts = cells.take(600)
    cells.give(parts)
    with pytest.raises(InvariantError, match="were not held"):
        cells.give(parts)


def test_a_shrunken_cell_is_negative_until_released_and_not_granted_meanwhile() -> None:
    cells = Cells((2000, 2000))
    parts = cells.take(1800)
    cells.resize((1000, 2000))
    assert cells.free == [-800, 2000]
    assert cells.take(500) == ((1, 500),)
    assert cells.take(1500) == ((1, 1500),)
    with pytest.raises(InvariantError, match="do not fit"):
        cells.take(1)
    cells.give(parts)
    assert cells.free == [1000, 0]


def test_cells_may_join_and_leave_while_units_are_held() -> None:
    cells = Cells((1000,))
    cells.resize((1000, 2000))
    parts = cells.take(1500)
    assert parts == ((1, 1500),)
    cells.resize((1000,))
    assert cells.free == [1000, -1500]
    cells.check([parts])
    cells.give(parts)
    assert cells.free == [1000, 0]


def test_a_taking_grows_in_its_own_cell_first() -> None:
    cells = Cells((4000, 1000))
    rest = cells.take(1000)
    parts = cells.take(1000)
    cells.give(rest)
    parts = cells.adjust(parts, 4000)
    assert parts == ((0, 4000),)
    parts = cells.adjust(parts, 4500)
    assert parts == ((0, 4000), (1, 500))
    parts = cells.adjust(parts, 4200)
    assert parts == ((0, 4000), (1, 200))
    parts = cells.adjust(parts, 1000)
    assert parts == ((0, 1000),)
    cells.check([parts])
    with pytest.raises(InvariantError, match="cannot become"):
        cells.adjust(parts, 5001)
    assert cells.adjust(parts, 0) == ()
    cells.check([])


class CellsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cells = Cells((8,))
        self.taken: list[Parts] = []

    def room(self) -> int:
        return sum(free for free in self.cells.free if free > 0)

    @rule(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4))
    def resize(self, sizes: list[int]) -> None:
        self.cells.resize(sizes)
        assert sum(self.cells.sizes) == sum(sizes)

    @rule(units=st.integers(0, 20))
    def take(self, units: int) -> None:
        if units > self.room():
            with pytest.raises(InvariantError):
                self.cells.take(units)
            return
        before = list(self.cells.free)
        parts = self.cells.take(units)
        assert sum(part for _, part in parts) == units
        assert all(part <= before[cell] for cell, part in parts)
        if units and max(before) >= units:
            assert len(parts) == 1
        self.taken.append(parts)

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 100), units=st.integers(0, 20))
    def adjust(self, which: int, units: int) -> None:
        which %= len(self.taken)
        parts = self.taken[which]
        before = list(self.cells.free)
        if units - sum(part for _, part in parts) > self.room():
            with pytest.raises(InvariantError):
                self.cells.adjust(parts, units)
            return
        after = self.cells.adjust(parts, units)
        assert sum(part for _, part in after) == units
        held = dict(parts)
        assert len(dict(after)) == len(after)
        if any(cell not in held for cell, _ in after):
            assert all(self.cells.free[cell] <= 0 for cell in held), "its own cells are used up before others"
        for cell, free in enumerate(self.cells.free):
            assert free >= min(before[cell], 0)
        self.taken[which] = after

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 100))
    def give(self, which: int) -> None:
        self.cells.give(self.taken.pop(which % len(self.taken)))

    @invariant()
    def consistent(self) -> None:
        self.cells.check(self.taken)


TestCellsNeverLeak = CellsMachine.TestCase


def test_check_finds_units_that_leaked() -> None:
    cells = Cells((1000, 1000))
    parts = cells.take(300)
    cells.check([parts])
    with pytest.raises(InvariantError, match="should be"):
        cells.check([])


# ---- exclusive cores --------------------------------------------------------------------------------------------


def test_exclusive_cores_come_from_the_fullest_cell_with_room() -> None:
    cores = CoreSet(((0, 1, 2, 3), (4, 5, 6, 7)))
    assert cores.take(3) == (0, 1, 2)
    assert cores.take(1) == (3,)
    assert cores.take(2) == (4, 5)


def test_exclusive_cores_spread_over_as_few_cells_as_possible() -> None:
    cores = CoreSet(((0,), (1, 2), (3, 4, 5)))
    assert cores.take(5) == (3, 4, 5, 1, 2)


def test_a_core_given_back_is_the_next_one_taken() -> None:
    cores = CoreSet(((8, 4, 6),))
    taken = cores.take(3)
    assert taken == (4, 6, 8)
    cores.give((8, 4))
    cores.check()
    assert cores.take(2) == (4, 8)


def test_cores_given_back_twice_or_named_twice_are_errors() -> None:
    cores = CoreSet(((0, 1),))
    cores.give(cores.take(1))
    with pytest.raises(InvariantError, match="core 0 was given back but is not taken"):
        cores.give((0,))
    with pytest.raises(InvariantError, match="do not fit"):
        cores.take(3)
    with pytest.raises(InvalidConfig, match="in one cell only"):
        CoreSet(((0, 1), (1, 2)))


def test_a_chunk_beyond_the_last_device_vanishes_when_it_is_given_back() -> None:
    chunks = Chunks(8)
    low, high = chunks.take(4), chunks.take(4)
    chunks.resize(6)
    assert chunks.free_counts() == (0, 0, 0)
    chunks.check([low, high])
    chunks.give(high)
    assert chunks.free_counts() == (0, 1, 0)
    chunks.give(low)
    assert chunks.free_counts() == (0, 1, 1)
    with pytest.raises(InvariantError, match="are held"):
        chunks.check([low])


def test_a_core_that_is_no_longer_named_vanishes_when_it_is_given_back() -> None:
    cores = CoreSet(((0, 1), (2, 3)))
    taken = cores.take(2) + cores.take(1)
    assert taken == (0, 1, 2)
    cores.resize(((0,), (2,)))
    cores.check([0, 1, 2])
    cores.give((1, 2))
    assert cores.take(1) == (2,)
    cores.resize(((0, 1, 2),))
    assert cores.take(1) == (1,), "0 and 2 are taken still"
    with pytest.raises(InvariantError, match="are held"):
        cores.check([0])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.lists(st.integers(-3, 8), max_size=20))
def test_exclusive_cores_never_leak_or_overlap(sizes: list[int], steps: list[int]) -> None:
    ids = iter(range(100))
    cores = CoreSet(tuple(tuple(next(ids) for _ in range(size)) for size in sizes))
    taken: list[tuple[int, ...]] = []
    for step in steps:
        held = sum(map(len, taken))
        if step < 0 and taken:
            cores.give(taken.pop(step % len(taken)))
        elif 0 <= step <= sum(sizes) - held:
            taken.append(cores.take(step))
            assert len(taken[-1]) == step
        cores.check()
        flat = [core for some in taken for core in some]
        assert len(flat) == len(set(flat))
    for some in taken:
        cores.give(some)
    cores.check()
    assert len(cores.take(sum(sizes))) == sum(sizes)
