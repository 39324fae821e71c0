"""Pools as they are shown: units, where inside a node they lie, and who has them.

Owns the reading of the ledger for the view. Changes nothing in it: what time has given back of a quota since anybody
looked is worked out here, not entered there.
"""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING

from tangram.core.demand import CPU, GPU, MEMORY
from tangram.core.ledger import CORE_KIND, Holding, PoolState
from tangram.core.topology import Cells, Chunks, CoreSet
from tangram.runtime.views import HIDDEN, Holder, Part, PoolView
from tangram.server.observe.time_breakdown import WAITING

if TYPE_CHECKING:
    from tangram.server.observe.observer import Picture

HOLDERS_SHOWN_MAX = 200

UNITS = {CPU: "milli-cores", MEMORY: "MiB", GPU: "devices"}
SPENT_UNITS = ("requests", "tokens")
"""The last part of the name of a quota that counts in windows of time."""

Held = dict[str, list[tuple[int, str, str, Holding]]]
"""By pool: units, the id of the holder, its run, and the holding."""


def pool_views(picture: Picture, run: str | None, now: float) -> tuple[PoolView, ...]:
    scheduler = picture.scheduler
    held = _held(picture)
    waiting_by_pool = waiting_actions(picture)
    views = []
    for pool in scheduler.ledger.pools.values():
        spent = pool.spent - pool.come_back(now)
        holders = held.get(pool.name, [])
        waiting = waiting_by_pool[pool.name]
        if pool.kind in scheduler.ledger.private_kinds and not holders and not waiting:
            continue  # of a function that nobody calls: there may be many
        views.append(
            PoolView(
                name=pool.name,
                kind=pool.kind,
                node=pool.node,
                unit=_unit(pool),
                total=pool.total,
                held=pool.held,
                spent=spent,
                free=pool.total - pool.held - spent,
                waiting=waiting,
                window_s=pool.window.seconds if pool.window is not None else None,
                parts=_parts(pool, holders, list(picture.loaded.get(pool.node, ()))),
                holders=tuple([_holder(one, run) for one in nlargest(HOLDERS_SHOWN_MAX, holders, key=_units)]),
            )
        )
    return tuple(views)


def waiting_actions(picture: Picture) -> dict[str, int]:
    """By pool: the actions that wait because its kind was found short, as far as they may run from it."""
    counts: dict[tuple[str, str], int] = {}
    entries = picture.scheduler.entries
    for id, life in picture.lives.by_id.items():
        if life.phase == WAITING and id in entries:
            key = life.short, entries[id].node
            counts[key] = counts.get(key, 0) + 1
    any_node: dict[str, int] = {}
    for (kind, _), count in counts.items():
        any_node[kind] = any_node.get(kind, 0) + count
    return {
        name: counts.get((pool.kind, ""), 0) + counts.get((pool.kind, pool.node), 0)
        if pool.node
        else any_node.get(pool.kind, 0)
        for name, pool in picture.scheduler.ledger.pools.items()
    }


def _unit(pool: PoolState) -> str:
    last = pool.kind.rpartition("/")[2]
    if pool.window is not None and last in SPENT_UNITS:
        return last
    return UNITS.get(pool.kind, "units")


def _units(holder: tuple[int, str, str, Holding]) -> int:
    return holder[0]


def _held(picture: Picture) -> Held:
    """Who holds what. Those who ride in one batch hold it together: it stands with the first of them."""
    held: Held = {name: [] for name in picture.scheduler.ledger.pools}
    shared: dict[int, None] = {}
    for entry in picture.scheduler.grants.holding.values():
        action = entry.action
        for holding in entry.holdings:
            if holding.riders > 1:
                if id(holding) in shared:
                    continue
                shared[id(holding)] = None
            holders = held.get(holding.pool.name)
            if holders is not None:
                holders.append((holding.units, action.id, action.run, holding))
    for place in picture.scheduler.places.by_sandbox.values():
        reserved = place.reserved
        if reserved is not None and reserved.pool.name in held:
            held[reserved.pool.name].append((reserved.units, place.id, place.run.name, reserved))
    return held


def _holder(holder: tuple[int, str, str, Holding], run: str | None) -> Holder:
    units, id, of, holding = holder
    if run is not None and of != run:
        id = of = HIDDEN
    return Holder(id=id, run=of, units=units, parts=_cells(holding))


def _cells(holding: Holding) -> tuple[int, ...]:
    """The NUMA nodes or devices that it lies in."""
    layout = holding.pool.place
    if isinstance(layout, CoreSet):
        found = {cell: None for cell, cores in enumerate(layout.numa) for core in holding.cells if core in cores}
        return tuple(found)
    if layout is None and holding.pool.kind == CPU:
        return (0,)
    return holding.cells


def _parts(
    pool: PoolState, holders: list[tuple[int, str, str, Holding]], loaded: list[tuple[str, tuple[int, ...]]]
) -> tuple[Part, ...]:
    layout = pool.place
    if isinstance(layout, Chunks):
        taken = {device for holder in holders for device in holder[3].cells}
        service_by_device = {device: service for service, devices in loaded for device in devices}
        return tuple(
            [
                Part(index=device, total=1, held=int(device in taken), service=service_by_device.get(device, ""))
                for device in range(layout.count)
            ]
        )
    if isinstance(layout, Cells):
        cells = enumerate(zip(layout.sizes, layout.free, strict=True))
        return tuple([Part(index=cell, total=size, held=size - free) for cell, (size, free) in cells])
    if isinstance(layout, CoreSet):
        taken = {core for holder in holders for core in holder[3].cells}
        return tuple(
            [
                Part(index=cell, total=len(cores), held=sum(core in taken for core in cores))
                for cell, cores in enumerate(layout.numa)
            ]
        )
    return (Part(index=0, total=pool.total, held=pool.held),) if pool.kind in (CPU, CORE_KIND) else ()
