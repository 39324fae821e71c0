"""Residents: which model service is loaded on which devices, as the managers reported it.

Owns that map. Never loads or evicts anything: managers do, and tell by Resident and Evicted.
"""

from __future__ import annotations

from collections.abc import Iterable

RESTORE_PRIOR_S = 1.0
"""Seconds to load a service before any was seen: between a warm copy in host memory (0.2) and a cold disk (22)."""
RESTORE_RATE = 0.2
"""Weight of the newest load in the running mean."""
SERVICES_MAX = 1024
"""Services whose loads are remembered by name; beyond, the one that was loaded longest ago is forgotten: services may
be named after checkpoints."""


class Residents:
    """Per service the device sets on which it is loaded, most recently used last."""

    __slots__ = ("_by_service", "_restore_s", "_restore_sum")

    def __init__(self) -> None:
        self._by_service: dict[str, dict[tuple[str, tuple[int, ...]], None]] = {}
        self._restore_s: dict[str, float] = {}
        """Per service, the one that was loaded last at the end."""
        self._restore_sum = 0.0
        """Over all of these."""

    def add(self, service: str, node: str, devices: tuple[int, ...]) -> None:
        places = self._by_service.setdefault(service, {})
        places.pop((node, devices), None)
        places[node, devices] = None

    def use(self, service: str, node: str, devices: tuple[int, ...]) -> bool:
        """An action of the service starts on these devices. False: it has to be loaded there first."""
        if (node, devices) not in self._by_service.get(service, {}):
            return False
        self.add(service, node, devices)
        return True

    def remove(self, service: str, node: str, devices: tuple[int, ...]) -> None:
        places = self._by_service.get(service, {})
        places.pop((node, devices), None)
        if not places:
            self._by_service.pop(service, None)

    def drop_node(self, node: str) -> None:
        for service in list(self._by_service):
            places = self._by_service[service]
            for place in [place for place in places if place[0] == node]:
                self.remove(service, *place)

    def places(self, service: str) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Nodes and devices, most recently used last."""
        return self._by_service.get(service, {})

    def devices(self, service: str, node: str) -> list[tuple[int, ...]]:
        """The device sets of one node, most recently used first."""
        return [devices for at, devices in reversed(self._by_service.get(service, {})) if at == node]

    def chunks(self, service: str, node: str) -> list[tuple[int, int]]:
        """The same as (start, size), for preferring them in an allocation."""
        return [(devices[0], len(devices)) for devices in self.devices(service, node)]

    def learn_restore(self, service: str, seconds: float) -> None:
        """A start that had to load the service took this long."""
        known = self._restore_s.pop(service, None)
        if known is not None:
            self._restore_sum -= known
            seconds = known + RESTORE_RATE * (seconds - known)
        elif len(self._restore_s) >= SERVICES_MAX:
            self._restore_sum -= self._restore_s.pop(next(iter(self._restore_s)))
        self._restore_s[service] = seconds
        self._restore_sum += seconds

    def restore_s(self, service: str) -> float:
        """Of this service; else the mean of the others; else a guess."""
        known = self._restore_s.get(service)
        if known is not None:
            return known
        return max(0.0, self._restore_sum / len(self._restore_s)) if self._restore_s else RESTORE_PRIOR_S
