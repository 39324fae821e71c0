"""Topology: the position of units inside a node.

Owns which devices, NUMA cells and cores are free. Never decides how many units an action gets: it takes a number and
returns a position (bin packing: the smallest chunk or group of cells that suffices). Promises that no position is taken
twice and that freed chunks are merged again. Callers count first: taking more than is free raises InvariantError.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tangram.errors import InvalidConfig, InvariantError

Parts = tuple[tuple[int, int], ...]
"""Units by cell: ((cell, units), ...). Every number of units is positive, every cell occurs once."""


class Chunk(NamedTuple):
    """An aligned interval of devices: `size` is a power of two that divides `start`."""

    start: int
    size: int

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(range(self.start, self.start + self.size))


def level_of(units: int) -> int:
    """Returns the level of the smallest chunk that holds `units` devices. A chunk of level a has 2**a devices."""
    if units < 1:
        raise InvariantError(f"a chunk has at least one device, got {units}")
    return (units - 1).bit_length()


def chunk_size(units: int) -> int:
    """Returns the size of the smallest chunk that holds `units` devices: what a grant of them takes."""
    return 1 << level_of(units)


class Chunks:
    """The devices of one node as a buddy allocator.

    A number of devices that is not a power of two starts as the aligned chunks that tile it: 6 as (0, 4) and (4, 2).
    A chunk is split when a smaller one is needed, and merged with its buddy as soon as both are free.
    """

    __slots__ = ("_free", "_taken", "count")

    def __init__(self, count: int) -> None:
        if count < 0:
            raise InvalidConfig("devices of a node", count, "a whole number, at least 0")
        self.count = count
        self._free: list[list[int]] = []
        """Per level, the starts of the free chunks, increasing."""
        self._taken: dict[int, int] = {}
        """Taken chunks: size by start."""
        self._tile()

    def _tile(self) -> None:
        """Tiles the gaps between taken chunks with the largest aligned chunks that fit."""
        self._free = [[] for _ in range(self.count.bit_length())]
        start = 0
        for taken_start, size in [*sorted(self._taken.items()), (self.count, 0)]:
            end = min(taken_start, self.count)
            while start < end:
                room = (end - start).bit_length() - 1
                level = min(room, (start & -start).bit_length() - 1) if start else room
                self._free[level].append(start)
                start += 1 << level
            start = taken_start + size

    def resize(self, count: int) -> None:
        """Sets the number of devices. A taken chunk stays taken; the part beyond the last device disappears when the
        chunk is freed."""
        self.count = count
        self._tile()

    def free_counts(self) -> tuple[int, ...]:
        """Returns the number of free chunks of each level, from level 0 up."""
        return tuple(map(len, self._free))

    def fits(self, units: int) -> bool:
        return any(self._free[level_of(units) :])

    def is_free(self, chunk: tuple[int, int]) -> bool:
        """Whether all devices of this chunk are free."""
        start, size = chunk
        return start % size == 0 and self._around(start, level_of(size)) is not None

    def chunks_for(self, units: int, *, smallest: bool = False) -> list[Chunk]:
        """Returns every free chunk for that many devices. `smallest`: only those that split no larger chunk than
        necessary."""
        level = level_of(units)
        size = 1 << level
        chunks: list[Chunk] = []
        for above in range(level, len(self._free)):
            for start in self._free[above]:
                chunks.extend(Chunk(part, size) for part in range(start, start + (1 << above), size))
            if smallest and chunks:
                break
        return chunks

    def take(self, units: int, preferred: Sequence[tuple[int, int]] = ()) -> Chunk:
        """Takes the smallest sufficient free chunk, split down to the size that is needed.

        `preferred` are the chunks on which the service is loaded, best first. Among equally small sufficient chunks,
        one that equals a preferred chunk wins, then one that contains a preferred chunk, then the lowest. A split keeps
        the half with the preferred chunk.

        A free preferred chunk of exactly the needed size wins over all of these, even inside a larger chunk than
        necessary: restoring weights costs more than fragmentation. This may split a chunk that `arrange_chunks` planned
        for a larger action, so actions that were arranged together are placed from the largest to the smallest: in that
        order every choice leaves the same room for the rest.
        """
        source, target = self._choose(units, preferred)
        self._free[level_of(source.size)].remove(source.start)
        size = source.size
        while size > target.size:
            size //= 2
            # Free the half without the target: its start differs in one bit from that of the other half.
            bisect.insort(self._free[level_of(size)], (target.start & -size) ^ size)
        self._taken[target.start] = target.size
        return target

    def give(self, chunk: tuple[int, int]) -> None:
        """Frees a taken chunk and merges it with its free buddy, and the result with its own, repeatedly."""
        start, size = chunk
        if self._taken.get(start) != size:
            raise InvariantError(f"chunk {start}+{size} was given back but is not taken; taken: {self._taken}")
        del self._taken[start]
        if start + size > self.count:
            self._tile()
            return
        level = level_of(size)
        # A buddy beyond the last device is never free, so merging stops at the top.
        while (start ^ (1 << level)) in self._free[level]:
            self._free[level].remove(start ^ (1 << level))
            start &= ~(1 << level)
            level += 1
        bisect.insort(self._free[level], start)

    def check(self, taken: list[Chunk] | None = None) -> None:
        """Checks that free and taken chunks are aligned, tile all devices, and that free buddies are merged. `taken`:
        the chunks that are held, if the caller knows them. Raises InvariantError."""
        free = [Chunk(start, 1 << level) for level, starts in enumerate(self._free) for start in starts]
        end = 0
        for chunk in sorted([*free, *(Chunk(*item) for item in self._taken.items())]):
            beyond = chunk.start >= self.count and chunk.start >= end
            if (chunk.start != end and not beyond) or chunk.start % chunk.size or chunk.size & (chunk.size - 1):
                raise InvariantError(f"{chunk} is not aligned or does not start at {end}: {self!r}")
            end = chunk.start + chunk.size
        if min(end, self.count) != self.count:
            raise InvariantError(f"chunks cover {end} devices of {self.count}: {self!r}")
        if taken is not None and sorted(taken) != sorted(self._taken.items()):
            raise InvariantError(f"chunks {sorted(taken)} are held: {self!r}")
        for chunk in free:
            if chunk.start ^ chunk.size in self._free[level_of(chunk.size)]:
                raise InvariantError(f"{chunk} and its buddy are free but not merged: {self!r}")

    def __repr__(self) -> str:
        return f"Chunks(count={self.count}, free={self._free}, taken={self._taken})"

    def _choose(self, units: int, preferred: Sequence[tuple[int, int]]) -> tuple[Chunk, Chunk]:
        """Returns the free chunk to take from, and the chunk inside it to take."""
        level = level_of(units)
        for start, size in preferred:
            if size == 1 << level and start % size == 0 and (around := self._around(start, level)):
                return around, Chunk(start, size)
        for above in range(level, len(self._free)):
            if self._free[above]:
                source = _best([Chunk(start, 1 << above) for start in self._free[above]], preferred)
                target = source
                while target.size > 1 << level:
                    half = target.size // 2
                    target = _best([Chunk(target.start, half), Chunk(target.start + half, half)], preferred)
                return source, target
        raise InvariantError(f"no free chunk holds {units} devices: {self!r}")

    def _around(self, start: int, level: int) -> Chunk | None:
        """Returns the free chunk that contains the chunk of `level` at `start`, if there is one."""
        for above in range(level, len(self._free)):
            aligned = start & -(1 << above)
            if aligned in self._free[above]:
                return Chunk(aligned, 1 << above)
        return None


def _best(chunks: list[Chunk], preferred: Sequence[tuple[int, int]]) -> Chunk:
    """Returns the chunk that equals a preferred one, else one that contains one, else the first."""
    for preferred_chunk in preferred:
        if preferred_chunk in chunks:
            return Chunk(*preferred_chunk)
    for start, size in preferred:
        for chunk in chunks:
            if chunk.start <= start and start + size <= chunk.start + chunk.size:
                return chunk
    return chunks[0]


class Cells:
    """The shared cores of a node: units (milli-cores) counted per NUMA cell."""

    __slots__ = ("free", "sizes")

    def __init__(self, sizes: Sequence[int]) -> None:
        if not sizes or min(sizes) < 0:
            raise InvalidConfig("units per NUMA cell", sizes, "at least one cell, each with 0 units or more")
        self.sizes = tuple(sizes)
        self.free = list(sizes)
        """Free units per cell. Negative while more is held of a shrunk cell than it has."""

    def take(self, units: int) -> Parts:
        """Takes units from one cell if one has room, the fullest such, else from the emptiest cells together."""
        free = self.free
        if len(free) == 1 and 0 < units <= free[0]:
            free[0] -= units
            return ((0, units),)
        parts = _fill_cells(free, units)
        for cell, part in parts:
            free[cell] -= part
        return parts

    def give(self, parts: Parts) -> None:
        free, sizes = self.free, self.sizes
        for cell, part in parts:
            after = free[cell] + part
            if part < 0 or after > sizes[cell]:
                raise InvariantError(f"cell {cell} was given back {part} units that were not held: {self!r}")
            free[cell] = after

    def adjust(self, parts: Parts, units: int) -> Parts:
        """Resizes a holding to `units`. It grows in its own cells first, and shrinks in its last ones first."""
        held = sum(part for _, part in parts)
        missing = units - held
        if units < 0 or missing > sum(free for free in self.free if free > 0):
            raise InvariantError(f"a taking of {held} units cannot become one of {units}: {self!r}")
        if missing <= 0:
            return self._shrunk(parts, -missing)
        grown = []
        for cell, part in parts:
            more = max(0, min(missing, self.free[cell]))
            self.free[cell] -= more
            missing -= more
            grown.append((cell, part + more))
        # Take the rest from other cells: its own are full.
        return (*grown, *self.take(missing)) if missing else tuple(grown)

    def resize(self, sizes: Sequence[int]) -> None:
        """Sets the sizes of the cells. A cell that is missing keeps its number and has no units."""
        count = max(len(sizes), len(self.sizes))
        before, after, free = (_padded(numbers, count) for numbers in (self.sizes, sizes, self.free))
        self.free = [free[cell] + after[cell] - before[cell] for cell in range(count)]
        self.sizes = after

    def check(self, taken: Iterable[Parts]) -> None:
        """Recomputes the free units from everything that is held. Raises InvariantError on a difference."""
        free = list(self.sizes)
        for parts in taken:
            for cell, part in parts:
                if part <= 0:
                    raise InvariantError(f"{part} units of cell {cell} are held: {self!r}")
                free[cell] -= part
        if free != self.free:
            raise InvariantError(f"free units per cell should be {free}: {self!r}")

    def __repr__(self) -> str:
        return f"Cells(sizes={self.sizes}, free={self.free})"

    def _shrunk(self, parts: Parts, surplus: int) -> Parts:
        kept = []
        for cell, part in reversed(parts):
            less = min(surplus, part)
            self.free[cell] += less
            surplus -= less
            if part > less:
                kept.append((cell, part - less))
        return tuple(reversed(kept))


class CoreSet:
    """Exclusive cores by id: each is held by at most one action."""

    __slots__ = ("_cell_by_core", "_free", "_taken", "numa")

    def __init__(self, numa: Sequence[Sequence[int]]) -> None:
        self._taken: dict[int, None] = {}
        self.resize(numa)

    def resize(self, numa: Sequence[Sequence[int]]) -> None:
        """Sets the cores. A taken core stays taken; one that is missing disappears when it is freed."""
        ids = [core for cores in numa for core in cores]
        if len(ids) != len(dict.fromkeys(ids)):
            raise InvalidConfig("cores per NUMA cell", numa, "every core in one cell only")
        self.numa = tuple(tuple(sorted(cores)) for cores in numa)
        self._cell_by_core = {core: cell for cell, cores in enumerate(self.numa) for core in cores}
        self._free = [[core for core in cores if core not in self._taken] for cores in self.numa]
        """Free cores per cell, increasing."""

    def take(self, count: int) -> tuple[int, ...]:
        """Takes cores of one cell if one has room, the fullest such, else of as few cells as possible."""
        ids: list[int] = []
        for cell, part in _fill_cells([len(cores) for cores in self._free], count):
            ids.extend(self._free[cell][:part])
            del self._free[cell][:part]
        self._taken.update(dict.fromkeys(ids))
        return tuple(ids)

    def give(self, ids: Iterable[int]) -> None:
        for core in ids:
            if core not in self._taken:
                raise InvariantError(f"core {core} was given back but is not taken: {self!r}")
            del self._taken[core]
            cell = self._cell_by_core.get(core)
            if cell is not None:
                bisect.insort(self._free[cell], core)

    def check(self, taken: list[int] | None = None) -> None:
        """Checks that every core is either free or taken. `taken`: the cores that are held, if the caller knows them.
        Raises InvariantError."""
        for cell, cores in enumerate(self.numa):
            if self._free[cell] != [core for core in cores if core not in self._taken]:
                raise InvariantError(f"the free and taken cores of cell {cell} are not {cores}: {self!r}")
        if taken is not None and sorted(taken) != sorted(self._taken):
            raise InvariantError(f"cores {sorted(taken)} are held: {self!r}")

    def __repr__(self) -> str:
        return f"CoreSet(free={self._free}, taken={list(self._taken)})"


def _padded(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    return (*numbers, *[0] * (count - len(numbers)))


def _fill_cells(free: Sequence[int], units: int) -> Parts:
    """Returns the fullest cell that has enough room, else the fewest cells that have: from the most room down."""
    if units == 0:
        return ()
    if units < 0 or units > sum(room for room in free if room > 0):
        raise InvariantError(f"{units} units do not fit into {list(free)} free ones")
    sufficient = [(room, cell) for cell, room in enumerate(free) if room >= units]
    if sufficient:
        return ((min(sufficient)[1], units),)
    parts = []
    for cell in sorted(range(len(free)), key=lambda cell: -free[cell]):
        part = min(units, free[cell])
        if part > 0:
            parts.append((cell, part))
            units -= part
    return tuple(parts)
