"""Residents: which model service is loaded on which devices, as the managers reported it.

Owns that map. Never loads or evicts anything: managers do, and tell by Resident and Evicted.
"""

from __future__ import annotations

from collections.abc import Iterable

RESTORE_PRIOR_S = 1.0
"""Seconds to load a service before any was seen: between a warm copy in host memory (0.2) and a cold disk (22)."""
RESTORE_RATE = 0.2
"""Weight of the newest load in the running mean."""


class Residents:
    """Per service the device sets on which it is loaded, most recently used last."""

    __slots__ = ("_by_service", "_restore_s")

    def __init__(self) -> None:
        self._by_service: dict[str, dict[tuple[str, tuple[int, ...]], None]] = {}
        self._restore_s: dict[str, float] = {}

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
        known = self._restore_s.get(service)
        self._restore_s[service] = seconds if known is None else known + RESTORE_RATE * (seconds - known)

    def restore_s(self, service: str) -> float:
        """Of this service; else the mean of the others; else a guess."""
        known = self._restore_s.get(service)
        if known is not None:
            return known
        return sum(self._restore_s.values()) / len(self._restore_s) if self._restore_s else RESTORE_PRIOR_S
