"""Residents: which model services are loaded on which devices, and what a loaded copy is worth.

Owns that map, and the statistics of each service: how long a restore takes, how many calls it takes at once, how often
it is called. Never loads or evicts anything: managers do, and report it with Resident and Evicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tangram.core.ledger import PoolState

RESTORE_PRIOR_S = 1.0
"""Assumed seconds to load a service before the first observation: between host memory (0.2) and a cold disk (22)."""
RESTORE_RATE = 0.2
"""Weight of the newest load in the running mean."""
CALLS_MEMORY_S = 60.0
"""The memory of the rate of calls: the teachers of a training step peak one after the other, each for a minute or
two."""
SERVICES_MAX = 1024
"""Services with statistics. Beyond this number the least recently called or loaded one is evicted: services may be
named after checkpoints."""

Devices = tuple[int, ...]


class _ServiceStatistics:
    __slots__ = ("batch_max", "called_at", "calls", "restore_s", "units")

    def __init__(self) -> None:
        self.restore_s: float | None = None
        self.batch_max = 1
        self.units = 0
        """The number of devices of its last call. 0 before the first."""
        self.calls = 0.0
        """The number of calls, fading since `called_at`."""
        self.called_at = 0.0

    def calls_per_s(self, now: float) -> float:
        return self.calls * math.exp((self.called_at - now) / CALLS_MEMORY_S) / CALLS_MEMORY_S


class Residents:
    """Per service, the device sets on which it is loaded, most recently used last."""

    __slots__ = ("_by_node", "_by_service", "_known", "_restore_sum", "_restored")

    def __init__(self) -> None:
        self._by_service: dict[str, dict[tuple[str, Devices], None]] = {}
        self._by_node: dict[str, dict[tuple[str, Devices], None]] = {}
        self._known: dict[str, _ServiceStatistics] = {}
        """In order of the last call or load."""
        self._restore_sum = 0.0
        self._restored = 0
        """The number of services whose restore was observed."""

    # ---- where services are loaded ----

    def add(self, service: str, node: str, devices: Devices, batch_max: int = 0) -> None:
        """Records that a service is loaded, or being loaded. `batch_max`: the number of calls that it takes at once; 0
        if unknown."""
        locations = self._by_service.setdefault(service, {})
        locations.pop((node, devices), None)
        locations[node, devices] = None
        self._by_node.setdefault(node, {})[service, devices] = None
        if batch_max:
            self._statistics_of(service).batch_max = batch_max

    def use(self, service: str, node: str, devices: Devices) -> bool:
        """Records that a call starts on these devices. Returns False if the service must be loaded there first."""
        self._statistics_of(service).units = len(devices)
        if (node, devices) not in self._by_service.get(service, {}):
            return False
        self.add(service, node, devices)
        return True

    def remove(self, service: str, node: str, devices: Devices) -> None:
        locations = self._by_service.get(service, {})
        locations.pop((node, devices), None)
        if not locations:
            self._by_service.pop(service, None)
        self._by_node.get(node, {}).pop((service, devices), None)

    def drop_node(self, node: str) -> None:
        for service, devices in list(self._by_node.pop(node, ())):
            self.remove(service, node, devices)

    def locations(self, service: str) -> Iterable[tuple[str, Devices]]:
        """The nodes and devices of a service, most recently used last."""
        return self._by_service.get(service, {})

    def devices(self, service: str, node: str) -> list[Devices]:
        """The device sets of a service on one node, most recently used first."""
        return [devices for at, devices in reversed(self._by_service.get(service, {})) if at == node]

    def chunks(self, service: str, node: str) -> list[tuple[int, int]]:
        """The same as (start, size), for an allocation that prefers them."""
        return [(devices[0], len(devices)) for devices in self.devices(service, node)]

    # ---- statistics of services ----

    def record_call(self, service: str, now: float) -> None:
        """Records that a call was submitted."""
        known = self._statistics_of(service)
        known.calls = known.calls_per_s(now) * CALLS_MEMORY_S + 1.0
        known.called_at = now

    def services(self) -> Iterable[tuple[str, int]]:
        """The services that were called, each with the number of devices of its last call."""
        return [(service, known.units) for service, known in self._known.items() if known.units]

    def calls_per_s(self, service: str, now: float) -> float:
        """The recent rate of calls."""
        known = self._known.get(service)
        return known.calls_per_s(now) if known is not None else 0.0

    def worth(self, service: str, now: float) -> float:
        """The seconds of restoring per second that a loaded copy saves the callers."""
        return self.calls_per_s(service, now) * self.restore_s(service)

    def sure_worth(self, service: str, now: float) -> float:
        """A lower bound of the worth: one standard deviation below the mean, since few calls prove little."""
        calls = self.calls_per_s(service, now) * CALLS_MEMORY_S
        return self.worth(service, now) * (1.0 - 1.0 / math.sqrt(calls)) if calls > 1.0 else 0.0

    def worth_on(self, node: str, devices: Devices, now: float) -> float:
        """The total worth of the services that would be evicted if these devices were used. The worth of a service with
        several copies is divided among them."""
        first, last = devices[0], devices[-1]
        return sum(
            self.worth(service, now) / len(self._by_service[service])
            for service, resident_devices in self._by_node.get(node, ())
            if resident_devices[0] <= last and first <= resident_devices[-1]
        )

    def least_worth(self, pool: PoolState, units: int, now: float, *, smallest: bool = False) -> tuple[Devices, float]:
        """The free device set of that size whose services are worth least, and their worth. There must be one.
        `smallest`: only sets that split no larger chunk than necessary."""
        best: Devices = ()
        least = math.inf
        for devices in pool.free_device_sets(units, smallest=smallest):
            worth = self.worth_on(pool.node, devices, now)
            if worth < least:
                best, least = devices, worth
        assert best, (pool.name, units)
        return best, least

    def batch_max(self, service: str) -> int:
        """The number of calls that the service takes at once. 1 until it has been loaded."""
        known = self._known.get(service)
        return known.batch_max if known is not None else 1

    def learn_restore(self, service: str, seconds: float) -> None:
        """Records how long a start took that had to load the service."""
        known = self._statistics_of(service)
        if known.restore_s is None:
            self._restored += 1
        else:
            self._restore_sum -= known.restore_s
            seconds = known.restore_s + RESTORE_RATE * (seconds - known.restore_s)
        known.restore_s = seconds
        self._restore_sum += seconds

    def restore_s(self, service: str) -> float:
        """The seconds to load this service: its own mean, else that of the other services, else a guess."""
        known = self._known.get(service)
        if known is not None and known.restore_s is not None:
            return known.restore_s
        return max(0.0, self._restore_sum / self._restored) if self._restored else RESTORE_PRIOR_S

    def _statistics_of(self, service: str) -> _ServiceStatistics:
        known = self._known.pop(service, None)
        if known is None:
            known = _ServiceStatistics()
            if len(self._known) >= SERVICES_MAX:
                evicted = self._known.pop(next(iter(self._known)))
                if evicted.restore_s is not None:
                    self._restored -= 1
                    self._restore_sum -= evicted.restore_s
        self._known[service] = known
        return known
