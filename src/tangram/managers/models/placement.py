"""Placement: which services are loaded on which devices, the memory each takes, and which to evict (LRU).

Owns that table; loads and evicts nothing. Promises that no device is filled beyond its memory, and that a service in
use is never chosen for eviction.
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

    def __contains__(self, placement: ServicePlacement) -> bool:
        return placement in self._need

    def residents(self) -> list[ServicePlacement]:
        """Loaded services, the least recently used first."""
        return list(self._need)

    def used_bytes(self, device: int) -> int:
        return sum(need for placement, need in self._need.items() if device in placement.devices)

    def victims(self, devices: tuple[int, ...], need: int) -> list[ServicePlacement]:
        """Returns the placements to evict, in order, so that each of these devices has `need` bytes free."""
        evicted: dict[ServicePlacement, None] = {}
        for device in devices:
            left = [placement for placement in self._need if device in placement.devices and placement not in evicted]
            free = self._memory_bytes[device] - sum(self._need[placement] for placement in left)
            for placement in left:
                if free >= need:
                    break
                if placement in self._in_use:
                    raise InvariantError(f"{placement} is in use, and {need} bytes on device {device} are needed")
                evicted[placement] = None
                free += self._need[placement]
            if free < need:
                raise InvariantError(f"device {device} has {self._memory_bytes[device]} bytes, {need} are needed")
        return [placement for placement in self._need if placement in evicted]

    def add(self, placement: ServicePlacement, need: int) -> None:
        assert placement not in self._need, placement
        self._need[placement] = need
        self.check_invariants()

    def touch(self, placement: ServicePlacement) -> None:
        """Mark it as the most recently used."""
        self._need[placement] = self._need.pop(placement)

    def begin_use(self, placement: ServicePlacement) -> None:
        assert placement in self._need and placement not in self._in_use, placement
        self._in_use[placement] = None

    def end_use(self, placement: ServicePlacement) -> None:
        """Does nothing if it was dropped meanwhile, with the process that held it."""
        self._in_use.pop(placement, None)

    def remove(self, placement: ServicePlacement) -> None:
        if placement in self._in_use:
            raise InvariantError(f"{placement} cannot be evicted while it is in use")
        del self._need[placement]

    def drop(self, placement: ServicePlacement) -> None:
        """Remove it, in use or not: its process has ended."""
        self._in_use.pop(placement, None)
        del self._need[placement]

    def check_invariants(self) -> None:
        for device, memory in enumerate(self._memory_bytes):
            if self.used_bytes(device) > memory:
                raise InvariantError(
                    f"device {device} has {memory} bytes, and {self.used_bytes(device)} are used: {self._need}"
                )
