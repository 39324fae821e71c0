"""Placement: which services are loaded on which devices, the memory each takes, and which to evict (LRU).

Owns that table and loads or evicts nothing itself. No device is ever filled beyond its memory, and a service in use is
never chosen for eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tangram.errors import InvariantError


class ServicePlacement(NamedTuple):
    """A service on a chunk of devices. The same service at another degree is a separate placement."""

    service: str
    devices: tuple[int, ...]


class PlacementTable:
    def __init__(self, memory_bytes: Sequence[int]) -> None:
        self._memory_bytes = tuple(memory_bytes)
        self._need: dict[ServicePlacement, int] = {}
        """Bytes on each of its devices, least recently used first."""
        self._in_use: dict[ServicePlacement, None] = {}

    def __contains__(self, place: ServicePlacement) -> bool:
        return place in self._need

    def residents(self) -> list[ServicePlacement]:
        """Least recently used first."""
        return list(self._need)

    def used_bytes(self, device: int) -> int:
        return sum(need for place, need in self._need.items() if device in place.devices)

    def victims(self, devices: tuple[int, ...], need: int) -> list[ServicePlacement]:
        """What to evict, in order, so that each of these devices has `need` bytes free."""
        evicted: dict[ServicePlacement, None] = {}
        for device in devices:
            left = [place for place in self._need if device in place.devices and place not in evicted]
            free = self._memory_bytes[device] - sum(self._need[place] for place in left)
            for place in left:
                if free >= need:
                    break
                if place in self._in_use:
                    raise InvariantError(f"{place} is in use, and {need} bytes on device {device} are needed")
                evicted[place] = None
                free += self._need[place]
            if free < need:
                raise InvariantError(f"device {device} has {self._memory_bytes[device]} bytes, {need} are needed")
        return [place for place in self._need if place in evicted]

    def add(self, place: ServicePlacement, need: int) -> None:
        assert place not in self._need, place
        self._need[place] = need
        self.check_invariants()

    def touch(self, place: ServicePlacement) -> None:
        """Mark it as the most recently used."""
        self._need[place] = self._need.pop(place)

    def begin_use(self, place: ServicePlacement) -> None:
        assert place in self._need and place not in self._in_use, place
        self._in_use[place] = None

    def end_use(self, place: ServicePlacement) -> None:
        """Does nothing if it was dropped meanwhile, with the process that held it."""
        self._in_use.pop(place, None)

    def remove(self, place: ServicePlacement) -> None:
        if place in self._in_use:
            raise InvariantError(f"{place} is to be evicted while it is in use")
        del self._need[place]

    def drop(self, place: ServicePlacement) -> None:
        """Remove it, in use or not: its process has ended."""
        self._in_use.pop(place, None)
        del self._need[place]

    def check_invariants(self) -> None:
        for device, memory in enumerate(self._memory_bytes):
            if self.used_bytes(device) > memory:
                raise InvariantError(
                    f"device {device} has {memory} bytes, and {self.used_bytes(device)} are used: {self._need}"
                )
