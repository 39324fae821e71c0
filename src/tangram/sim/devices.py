"""Devices in the simulator: which services are loaded where, when a load completes, what it evicts.

Owns the time that loads take. The placement table of the live manager, `managers.models.placement`, chooses what to
evict: least recently used first. Weights are never written back.
"""

from __future__ import annotations

import math

from tangram.core.demand import GPU
from tangram.core.messages import Pool
from tangram.errors import InvalidConfig
from tangram.managers.models.placement import PlacementTable, ServicePlacement
from tangram.sim.episode import ServiceModel

Chunk = tuple[int, ...]

GIB = 1 << 30
ROUNDING_S = 1e-6
"""Tolerance when comparing times that were summed."""


class SimulatedDevices:
    """All devices of all nodes."""

    def __init__(self, services: tuple[ServiceModel, ...], pools: tuple[Pool, ...], memory_gib: float) -> None:
        self._services = {service.name: service for service in services}
        self._memory = int(memory_gib * GIB)
        self._totals = {pool.node: pool.total for pool in pools if pool.kind == GPU}
        self._placements = {node: self._empty_placement(total) for node, total in self._totals.items()}
        self._ready_at: dict[tuple[str, ServicePlacement], float] = {}
        """When each loaded or loading service can be called."""
        self._reported: dict[tuple[str, ServicePlacement], None] = {}
        for service in services:
            if service.memory_gib / max(service.degrees) > memory_gib:
                raise InvalidConfig(
                    f"service {service.name}", service.memory_gib, f"at most {memory_gib} GiB for each of its devices"
                )

    def _empty_placement(self, total: int) -> PlacementTable:
        return PlacementTable([self._memory] * total)

    def service(self, name: str) -> ServiceModel:
        return self._services[name]

    def grow(self, pool: Pool) -> None:
        """Add devices to a node. Services loaded on fewer ones stay."""
        if pool.kind == GPU and pool.total > self._totals.get(pool.node, 0):
            self._totals[pool.node] = pool.total
            before, self._placements[pool.node] = self._placements.get(pool.node), self._empty_placement(pool.total)
            for place in before.residents() if before is not None else ():
                self._placements[pool.node].add(place, self._bytes_per_device(place))

    def load(self, name: str, node: str, devices: Chunk, now: float) -> tuple[float, list[ServicePlacement]]:
        """Return the seconds until the service can be called on these devices, and what it evicts. A load in progress
        there, started ahead of a call, completes first."""
        room, place = self._placements[node], ServicePlacement(name, devices)
        if place in room:
            room.touch(place)
            return max(0.0, self._ready_at[node, place] - now), []
        overlapping = [other for other in room.residents() if any(device in devices for device in other.devices)]
        free_at = max([now, *(self._ready_at[node, other] for other in overlapping)])
        evicted = room.victims(devices, self._bytes_per_device(place))
        for victim in evicted:
            room.remove(victim)
            del self._ready_at[node, victim]
            self._reported.pop((node, victim), None)
        room.add(place, self._bytes_per_device(place))
        self._ready_at[node, place] = free_at + self._services[name].restore_s
        return self._ready_at[node, place] - now, evicted

    def take_loaded(self, name: str, node: str, devices: Chunk, now: float) -> bool:
        """Return True once after each load, to report it."""
        key = (node, ServicePlacement(name, devices))
        if key in self._reported or self._ready_at.get(key, math.inf) > now + ROUNDING_S:
            return False
        self._reported[key] = None
        return True

    def clear(self, node: str) -> None:
        """Remove everything from a failed node."""
        if node in self._placements:
            self._placements[node] = self._empty_placement(self._totals[node])
        self._ready_at = {key: at for key, at in self._ready_at.items() if key[0] != node}
        self._reported = {key: None for key in self._reported if key[0] != node}

    def _bytes_per_device(self, place: ServicePlacement) -> int:
        return int(self._services[place.service].memory_gib * GIB / len(place.devices))
