"""Devices in the simulator: which services are loaded where, when a load is done, who is evicted for it.

Owns the time that loads take. The table of the live manager, `managers.models.placement`, decides which have to go: the
least recently used go first, and weights are never written back.
"""

from __future__ import annotations

import math

from tangram.core.demand import GPU
from tangram.core.messages import Pool
from tangram.errors import InvalidConfig
from tangram.managers.models.placement import Place, Room
from tangram.sim.episode import ServiceModel

Chunk = tuple[int, ...]

GIB = 1 << 30
ROUNDING_S = 1e-6
"""By how much a moment that was added up may differ from itself."""


class Devices:
    """All devices of all nodes."""

    def __init__(self, services: tuple[ServiceModel, ...], pools: tuple[Pool, ...], memory_gib: float) -> None:
        self._services = {service.name: service for service in services}
        self._memory = int(memory_gib * GIB)
        self._totals = {pool.node: pool.total for pool in pools if pool.kind == GPU}
        self._rooms = {node: self._room(total) for node, total in self._totals.items()}
        self._ready_at: dict[tuple[str, Place], float] = {}
        """When what is loaded, or being loaded, can be called."""
        self._announced: dict[tuple[str, Place], None] = {}
        for service in services:
            if service.memory_gib / max(service.degrees) > memory_gib:
                raise InvalidConfig(
                    f"service {service.name}", service.memory_gib, f"at most {memory_gib} GiB for each of its devices"
                )

    def _room(self, total: int) -> Room:
        return Room([self._memory] * total)

    def service(self, name: str) -> ServiceModel:
        return self._services[name]

    def grow(self, pool: Pool) -> None:
        """A node that has more devices than it ever had. What is loaded on fewer ones stays."""
        if pool.kind == GPU and pool.total > self._totals.get(pool.node, 0):
            self._totals[pool.node] = pool.total
            before, self._rooms[pool.node] = self._rooms.get(pool.node), self._room(pool.total)
            for place in before.residents() if before is not None else ():
                self._rooms[pool.node].add(place, self._need(place))

    def load(self, name: str, node: str, devices: Chunk, now: float) -> tuple[float, list[Place]]:
        """Seconds until the service can be called on these devices, and what is evicted for it. What is being loaded
        there, ahead of a call that did not come first, is loaded to its end before."""
        room, place = self._rooms[node], Place(name, devices)
        if place in room:
            room.touch(place)
            return max(0.0, self._ready_at[node, place] - now), []
        overlapping = [other for other in room.residents() if any(device in devices for device in other.devices)]
        free_at = max([now, *(self._ready_at[node, other] for other in overlapping)])
        evicted = room.victims(devices, self._need(place))
        for victim in evicted:
            room.remove(victim)
            del self._ready_at[node, victim]
            self._announced.pop((node, victim), None)
        room.add(place, self._need(place))
        self._ready_at[node, place] = free_at + self._services[name].restore_s
        return self._ready_at[node, place] - now, evicted

    def is_new(self, name: str, node: str, devices: Chunk, now: float) -> bool:
        """True once after each load: the moment to report it."""
        key = (node, Place(name, devices))
        if key in self._announced or self._ready_at.get(key, math.inf) > now + ROUNDING_S:
            return False
        self._announced[key] = None
        return True

    def clear(self, node: str) -> None:
        """The node is gone with everything on it."""
        if node in self._rooms:
            self._rooms[node] = self._room(self._totals[node])
        self._ready_at = {key: at for key, at in self._ready_at.items() if key[0] != node}
        self._announced = {key: None for key in self._announced if key[0] != node}

    def _need(self, place: Place) -> int:
        """Bytes on each device."""
        return int(self._services[place.service].memory_gib * GIB / len(place.devices))
