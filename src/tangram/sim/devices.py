"""Devices in the simulator: which services are loaded where, how long a load takes, who is evicted for it.

Owns device memory. The least recently used services go first; weights are never written back.
"""

from __future__ import annotations

from tangram.core.demand import GPU
from tangram.core.messages import Pool
from tangram.errors import InvalidConfig
from tangram.sim.episode import ServiceModel

Chunk = tuple[int, ...]


class Devices:
    """All devices of all nodes."""

    def __init__(self, services: tuple[ServiceModel, ...], pools: tuple[Pool, ...], memory_gib: float) -> None:
        self._services = {service.name: service for service in services}
        self._memory_gib = memory_gib
        self._loaded: dict[str, dict[tuple[str, Chunk], float]] = {pool.node: {} for pool in pools if pool.kind == GPU}
        """Per node, (service, devices) with the time of its last use, least recent first."""
        self._announced: dict[tuple[str, str, Chunk], None] = {}
        for service in services:
            if service.memory_gib / max(service.degrees) > memory_gib:
                raise InvalidConfig(
                    f"service {service.name}", service.memory_gib, f"at most {memory_gib} GiB for each of its devices"
                )

    def load(self, name: str, node: str, devices: Chunk, now: float) -> tuple[float, list[tuple[str, Chunk]]]:
        """Seconds to have the service on these devices, and what is evicted for it."""
        loaded = self._loaded[node]
        key = (name, devices)
        if key in loaded:
            del loaded[key]
            loaded[key] = now
            return 0.0, []
        service = self._services[name]
        evicted: list[tuple[str, Chunk]] = []
        for device in devices:
            while self._used(node, device) + service.memory_gib / len(devices) > self._memory_gib:
                oldest = next(other for other in loaded if device in other[1])
                del loaded[oldest]
                self._announced.pop((oldest[0], node, oldest[1]), None)
                evicted.append(oldest)
        loaded[key] = now
        return service.restore_s, evicted

    def is_new(self, name: str, node: str, devices: Chunk) -> bool:
        """True once after each load: the moment to report it."""
        key = (name, node, devices)
        if key in self._announced or (name, devices) not in self._loaded.get(node, {}):
            return False
        self._announced[key] = None
        return True

    def clear(self, node: str) -> None:
        """The node is gone with everything on it."""
        if node in self._loaded:
            self._loaded[node] = {}
        for key in [key for key in self._announced if key[1] == node]:
            del self._announced[key]

    def _used(self, node: str, device: int) -> float:
        return sum(
            self._services[name].memory_gib / len(chunk) for name, chunk in self._loaded[node] if device in chunk
        )
