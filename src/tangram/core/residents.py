"""Residents: which model service is loaded on which devices, as the managers reported it, and what that is worth.

Owns that map, and what is known of each service: how long a restore takes, how many calls it takes at once, how often
it is called. Never loads or evicts anything: managers do, and tell by Resident and Evicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

RESTORE_PRIOR_S = 1.0
"""Seconds to load a service before any was seen: between a warm copy in host memory (0.2) and a cold disk (22)."""
RESTORE_RATE = 0.2
"""Weight of the newest load in the running mean."""
CALLS_MEMORY_S = 60.0
"""How long a call counts when it is asked how often a service is called: the teachers of a step peak one after the
other, each for a minute or two."""
SERVICES_MAX = 1024
"""Services of which something is remembered; beyond, the one that was called or loaded longest ago is forgotten:
services may be named after checkpoints."""

Devices = tuple[int, ...]


class _Known:
    """Of one service."""

    __slots__ = ("batch_max", "called_at", "calls", "restore_s", "units")

    def __init__(self) -> None:
        self.restore_s: float | None = None
        self.batch_max = 1
        self.units = 0
        """Devices that its last call had; 0: none was started yet."""
        self.calls = 0.0
        """Fading since `called_at`."""
        self.called_at = 0.0

    def calls_per_s(self, now: float) -> float:
        return self.calls * math.exp((self.called_at - now) / CALLS_MEMORY_S) / CALLS_MEMORY_S


class Residents:
    """Per service the device sets on which it is loaded, most recently used last."""

    __slots__ = ("_by_node", "_by_service", "_known", "_restore_sum", "_restored")

    def __init__(self) -> None:
        self._by_service: dict[str, dict[tuple[str, Devices], None]] = {}
        self._by_node: dict[str, dict[tuple[str, Devices], None]] = {}
        self._known: dict[str, _Known] = {}
        """The one that was called or loaded last at the end."""
        self._restore_sum = 0.0
        self._restored = 0
        """Over all services of which a restore was seen."""

    # ---- where they are ----

    def add(self, service: str, node: str, devices: Devices, batch_max: int = 0) -> None:
        """It is there, or on its way there. `batch_max`: how many calls it takes at once, if somebody says so."""
        places = self._by_service.setdefault(service, {})
        places.pop((node, devices), None)
        places[node, devices] = None
        self._by_node.setdefault(node, {})[service, devices] = None
        if batch_max:
            self._know(service).batch_max = batch_max

    def use(self, service: str, node: str, devices: Devices) -> bool:
        """An action of the service starts on these devices. False: it has to be loaded there first."""
        self._know(service).units = len(devices)
        if (node, devices) not in self._by_service.get(service, {}):
            return False
        self.add(service, node, devices)
        return True

    def remove(self, service: str, node: str, devices: Devices) -> None:
        places = self._by_service.get(service, {})
        places.pop((node, devices), None)
        if not places:
            self._by_service.pop(service, None)
        self._by_node.get(node, {}).pop((service, devices), None)

    def drop_node(self, node: str) -> None:
        for service, devices in list(self._by_node.pop(node, ())):
            self.remove(service, node, devices)

    def places(self, service: str) -> Iterable[tuple[str, Devices]]:
        """Nodes and devices, most recently used last."""
        return self._by_service.get(service, {})

    def devices(self, service: str, node: str) -> list[Devices]:
        """The device sets of one node, most recently used first."""
        return [devices for at, devices in reversed(self._by_service.get(service, {})) if at == node]

    def chunks(self, service: str, node: str) -> list[tuple[int, int]]:
        """The same as (start, size), for preferring them in an allocation."""
        return [(devices[0], len(devices)) for devices in self.devices(service, node)]

    # ---- what is known of them ----

    def called(self, service: str, now: float) -> None:
        """A call was submitted."""
        known = self._know(service)
        known.calls = known.calls_per_s(now) * CALLS_MEMORY_S + 1.0
        known.called_at = now

    def services(self) -> Iterable[tuple[str, int]]:
        """Those that were called, with the devices that the last call of each had."""
        return [(service, known.units) for service, known in self._known.items() if known.units]

    def calls_per_s(self, service: str, now: float) -> float:
        """How often it was called lately."""
        known = self._known.get(service)
        return known.calls_per_s(now) if known is not None else 0.0

    def worth(self, service: str, now: float) -> float:
        """Seconds of restoring per second that it saves its callers to be loaded."""
        return self.calls_per_s(service, now) * self.restore_s(service)

    def sure_worth(self, service: str, now: float) -> float:
        """What it is worth at least, one standard deviation of so few calls below the mean: one call proves nothing."""
        calls = self.calls_per_s(service, now) * CALLS_MEMORY_S
        return self.worth(service, now) * (1.0 - 1.0 / math.sqrt(calls)) if calls > 1.0 else 0.0

    def worth_on(self, node: str, devices: Devices, now: float) -> float:
        """Of all that would have to go for somebody who needs all memory of these devices. What is loaded elsewhere
        too is worth a part to each."""
        first, last = devices[0], devices[-1]
        return sum(
            self.worth(service, now) / len(self._by_service[service])
            for service, there in self._by_node.get(node, ())
            if there[0] <= last and first <= there[-1]
        )

    def batch_max(self, service: str) -> int:
        """How many calls it takes at once; 1 until it was loaded for the first time."""
        known = self._known.get(service)
        return known.batch_max if known is not None else 1

    def learn_restore(self, service: str, seconds: float) -> None:
        """A start that had to load the service took this long."""
        known = self._know(service)
        if known.restore_s is None:
            self._restored += 1
        else:
            self._restore_sum -= known.restore_s
            seconds = known.restore_s + RESTORE_RATE * (seconds - known.restore_s)
        known.restore_s = seconds
        self._restore_sum += seconds

    def restore_s(self, service: str) -> float:
        """Of this service; else the mean of the others; else a guess."""
        known = self._known.get(service)
        if known is not None and known.restore_s is not None:
            return known.restore_s
        return max(0.0, self._restore_sum / self._restored) if self._restored else RESTORE_PRIOR_S

    def _know(self, service: str) -> _Known:
        known = self._known.pop(service, None)
        if known is None:
            known = _Known()
            if len(self._known) >= SERVICES_MAX:
                forgotten = self._known.pop(next(iter(self._known)))
                if forgotten.restore_s is not None:
                    self._restored -= 1
                    self._restore_sum -= forgotten.restore_s
        self._known[service] = known
        return known
