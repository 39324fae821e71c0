"""How the default policy uses devices: how many for a call, who rides along, and what is restored ahead.

Every function reads the snapshot alone. A restore is what a change of service costs; a batch shares devices among
calls that wait together; an idle device is the time to bring back what is likely to be called next.
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
"""A service is restored ahead in the place of others only if it is worth this many times as much as they are: worth
changes with every call, and services of equal worth would drive each other out."""


def begin(snapshot: Snapshot, entry: Entry, node: str) -> Begin:
    amounts = entry.action.demand.pools[GPU]
    if not amounts.elastic:
        return Begin(entry, node, riders=_riders(snapshot, entry, node, amounts.min))
    units = _degree(snapshot, entry, node)
    return Begin(entry, node, units, riders=_riders(snapshot, entry, node, units))


def _degree(snapshot: Snapshot, entry: Entry, node: str) -> int:
    """The degree that ends soonest, restore included, each device priced by how many others want one."""
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
    """Calls of the same service, of whatever run, that wait: they take no devices. As many as leave an even part to
    every other chunk that could take some, by arrival."""
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
        chunks = len(pool.free_places(units)) - services
    else:
        chunks = sum(degree == units for degree in snapshot.resident_degrees(entry, node))
    most = min(most, -(-together // max(1, chunks)) - 1)
    found: list[Entry] = []
    for lane in lanes:
        waiting = (other for other in lane.fifo if other.lane is lane and other is not entry)
        admitted = (o for o in waiting if o.place is None and o.action.demand.pools[GPU].admits(units))
        found.extend(other for other, _ in zip(admitted, range(most), strict=False))
    return tuple(sorted(found)[:most])


def restore_ahead(snapshot: Snapshot, pool: PoolState) -> Iterator[Preload]:
    """The next service, onto devices that nobody wants now: of one that is waited for, but not for devices; else of the
    one that is worth most, if that is much more than what it may drive out."""
    if pool.free < 1:
        return
    wanted, wanted_units, most = "", 0, 0.0
    for lane in snapshot.waiting_lanes(pool):
        amounts = lane.first()[3].action.demand.pools[GPU]
        if not pool.fits(amounts.min):
            return  # it waits for devices, and is not to find them busy
        if lane.service and not wanted and not snapshot.has_free_copy(lane.service):
            wanted, wanted_units, most = lane.service, amounts.min, float("inf")
    calls_per_s = 0.0
    if not wanted:
        for service, units in snapshot.called_services():
            worth = snapshot.sure_worth(service)
            calls_per_s += snapshot.calls_per_s(service)
            if worth > most and pool.fits(units) and not snapshot.is_anywhere(service):
                wanted, wanted_units, most = service, units, worth
    if wanted:
        devices, lost = snapshot.least_worth(pool, wanted_units)
        lost *= AHEAD_FACTOR
        if pool.free < 2 * wanted_units:
            # Whoever comes during the restore, and finds no other devices, waits for half of it.
            lost += (calls_per_s * snapshot.restore_s(wanted)) ** 2 / 2.0
        if most > lost:
            yield Preload(wanted, pool.node, devices)
