"""Room: which services are loaded where, what each takes, and who has to go for another one.

Owns that table. Loads and evicts nothing: it is asked, and told what was done. Promises that no device is ever filled
beyond its memory, and that nobody in use is named to go. Least recently used go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tangram.errors import InvariantError


class Place(NamedTuple):
    """A service on a chunk. Each degree is a resident of its own."""

    service: str
    devices: tuple[int, ...]


class Room:
    def __init__(self, memory_bytes: Sequence[int]) -> None:
        self._memory_bytes = tuple(memory_bytes)
        self._need: dict[Place, int] = {}
        """Bytes on each of its devices, least recently used first."""
        self._in_use: dict[Place, None] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._need

    def residents(self) -> list[Place]:
        """Least recently used first."""
        return list(self._need)

    def used(self, device: int) -> int:
        return sum(need for place, need in self._need.items() if device in place.devices)

    def victims(self, devices: tuple[int, ...], need: int) -> list[Place]:
        """Who has to go so that each of these devices has so many bytes free, in the order in which they go."""
        gone: dict[Place, None] = {}
        for device in devices:
            left = [place for place in self._need if device in place.devices and place not in gone]
            free = self._memory_bytes[device] - sum(self._need[place] for place in left)
            for place in left:
                if free >= need:
                    break
                if place in self._in_use:
                    raise InvariantError(f"{place} is in use, and {need} bytes on device {device} are asked for")
                gone[place] = None
                free += self._need[place]
            if free < need:
                raise InvariantError(f"device {device} has {self._memory_bytes[device]} bytes, {need} are asked for")
        return [place for place in self._need if place in gone]

    def add(self, place: Place, need: int) -> None:
        assert place not in self._need, place
        self._need[place] = need
        self.check()

    def touch(self, place: Place) -> None:
        """It is used now."""
        self._need[place] = self._need.pop(place)

    def begin_use(self, place: Place) -> None:
        assert place in self._need and place not in self._in_use, place
        self._in_use[place] = None

    def end_use(self, place: Place) -> None:
        """It may be gone meanwhile, with the process that held it."""
        self._in_use.pop(place, None)

    def remove(self, place: Place) -> None:
        if place in self._in_use:
            raise InvariantError(f"{place} is to be evicted while it is in use")
        del self._need[place]

    def lose(self, place: Place) -> None:
        """Its process has ended, whatever it did."""
        self._in_use.pop(place, None)
        del self._need[place]

    def check(self) -> None:
        for device, memory in enumerate(self._memory_bytes):
            if self.used(device) > memory:
                raise InvariantError(
                    f"device {device} has {memory} bytes, and {self.used(device)} are used: {self._need}"
                )
