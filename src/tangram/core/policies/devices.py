"""Devices in the default policy: how many a call gets, which calls share them, and what is restored ahead.

Every function only reads the snapshot. Each change of service costs a restore. A batch shares devices among calls that
wait together. An idle device is used to restore the service that is likely to be called next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tangram.core.demand import GPU
from tangram.core.lanes import Entry
from tangram.core.ledger import PoolState
from tangram.core.policies.base import Begin, Preload

if TYPE_CHECKING:
    from tangram.core.snapshot import Snapshot

AHEAD_FACTOR = 3.0
"""A service replaces others ahead of its call only if it is worth this many times as much: worth changes with every
call, and services of equal worth would evict each other repeatedly."""


def begin(snapshot: Snapshot, entry: Entry, node: str) -> Begin:
    amounts = entry.action.demand.pools[GPU]
    if not amounts.elastic:
        return Begin(entry, node, riders=_riders(snapshot, entry, node, amounts.min))
    units = _degree(snapshot, entry, node)
    return Begin(entry, node, units, riders=_riders(snapshot, entry, node, units))


def _degree(snapshot: Snapshot, entry: Entry, node: str) -> int:
    """Returns the number of devices with the earliest end, restore included, priced by the demand for devices."""
    pool = snapshot.pool(GPU, node)
    amounts = entry.action.demand.pools[GPU]
    loaded = snapshot.resident_degrees(entry, node)
    restore_s = snapshot.restore_s(entry.action.service) if entry.action.service else 0.0
    price = (snapshot.waiting(pool) * amounts.min + pool.held) / max(pool.total, 1)
    best, best_cost = amounts.min, float("inf")
    for units in amounts.all(pool.total):
        if pool.fits(units):
            seconds = snapshot.seconds(entry, pool, units) + (0.0 if units in loaded else restore_s)
            cost = seconds * (1.0 + price * units / max(pool.total, 1))
            if cost < best_cost:
                best, best_cost = units, cost
    return best


def _riders(snapshot: Snapshot, entry: Entry, node: str, units: int) -> tuple[Entry, ...]:
    """Returns waiting calls of the same service, from all runs, to share the devices of this call. Leaves an even part
    to every other chunk that could take some; by arrival."""
    service = entry.action.service
    most = snapshot.batch_max(service) - 1 if service else 0
    if most < 1:
        return ()
    pool = snapshot.pool(GPU, node)
    together, services = 0, 0
    lanes = []
    for lane in snapshot.waiting_lanes(pool):
        if lane.service == service and len(lane.kinds) == 1:
            together += lane.waiting
            lanes.append(lane)
        else:
            services += 1
    if together < 2:
        return ()
    if snapshot.restore_s(service) < snapshot.estimate(entry).work_s:
        chunks = len(pool.free_device_sets(units)) - services
    else:
        chunks = sum(degree == units for degree in snapshot.resident_degrees(entry, node))
    most = min(most, -(-together // max(1, chunks)) - 1)
    riders: list[Entry] = []
    for lane in lanes:
        waiting = (other for other in lane.fifo if other.lane is lane and other is not entry)
        admitted = (o for o in waiting if o.sandbox is None and o.action.demand.pools[GPU].admits(units))
        riders.extend(other for other, _ in zip(admitted, range(most), strict=False))
    return tuple(sorted(riders)[:most])


def restore_ahead(snapshot: Snapshot, pool: PoolState) -> Iterator[Preload]:
    """Restores a service onto devices that no waiting call needs: a service whose calls wait for something else, or
    else the service that is worth most, if that is much more than what it may evict."""
    if pool.free < 1:
        return
    service, service_units, most = "", 0, 0.0
    for lane in snapshot.waiting_lanes(pool):
        amounts = lane.first().action.demand.pools[GPU]
        if not pool.fits(amounts.min):
            return  # a call waits for these devices
        if lane.service and not service and not snapshot.has_free_copy(lane.service):
            service, service_units, most = lane.service, amounts.min, float("inf")
    calls_per_s = 0.0
    if not service:
        for called, units in snapshot.called_services():
            worth = snapshot.sure_worth(called)
            calls_per_s += snapshot.calls_per_s(called)
            if worth > most and pool.fits(units) and not snapshot.is_anywhere(called):
                service, service_units, most = called, units, worth
    if service:
        devices, lost = snapshot.least_worth(pool, service_units)
        lost *= AHEAD_FACTOR
        if pool.free < 2 * service_units:
            # A call that arrives during the restore and finds no other devices waits for half of it on average.
            lost += (calls_per_s * snapshot.restore_s(service)) ** 2 / 2.0
        if most > lost:
            yield Preload(service, pool.node, devices)
