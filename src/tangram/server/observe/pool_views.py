"""Views of pools: units, holders, the layout inside a node, and the shares of runs.

Reads the ledger and changes nothing: units that a quota window has returned since the last event are computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest

from tangram.core.demand import CPU, EXCLUSIVE_CORE, GPU, MEMORY
from tangram.core.ledger import Holding, Ledger, PoolState, RunUsage
from tangram.core.scheduler import Scheduler
from tangram.core.topology import Cells, Chunks, CoreSet
from tangram.runtime.views import HIDDEN_NAME, PoolHolder, PoolPart, PoolView
from tangram.server.observe.action_tracker import ActionTracker
from tangram.server.observe.time_breakdown import WAITING

HOLDERS_SHOWN_MAX = 200

UNITS = {CPU: "milli-cores", MEMORY: "MiB", GPU: "devices"}
WINDOWED_UNITS = ("requests", "tokens")
"""The last part of the name of a quota with a time window."""

LoadedServices = dict[tuple[str, tuple[int, ...]], None]
"""Services with their devices, most recently loaded last."""

HoldersByPool = dict[str, list[tuple[int, str, str, Holding]]]
"""By pool: units, holder id, run and holding."""


def pool_views(
    scheduler: Scheduler, tracker: ActionTracker, loaded: Mapping[str, LoadedServices], run: str | None, now: float
) -> tuple[PoolView, ...]:
    held = _holders_by_pool(scheduler)
    waiting_by_pool = waiting_actions(scheduler, tracker)
    views = []
    for pool in scheduler.ledger.pools.values():
        spent = pool.spent - pool.returned_units(now)
        holders = held.get(pool.name, [])
        waiting = waiting_by_pool[pool.name]
        if pool.kind in scheduler.ledger.private_kinds and not holders and not waiting:
            continue  # a function without calls: there may be many
        views.append(
            PoolView(
                name=pool.name,
                kind=pool.kind,
                node=pool.node,
                unit=_unit_name(pool),
                total=pool.total,
                held=pool.held,
                spent=spent,
                free=pool.total - pool.held - spent,
                waiting=waiting,
                window_s=pool.window.seconds if pool.window is not None else None,
                parts=_pool_parts(pool, holders, list(loaded.get(pool.node, ()))),
                holders=tuple(
                    [_holder_view(holder, run) for holder in nlargest(HOLDERS_SHOWN_MAX, holders, key=_units)]
                ),
            )
        )
    return tuple(views)


def waiting_actions(scheduler: Scheduler, tracker: ActionTracker) -> dict[str, int]:
    """By pool: actions that wait for its kind and could run on it."""
    counts: dict[tuple[str, str], int] = {}
    entries = scheduler.entries
    for id, tracked in tracker.by_id.items():
        if tracked.phase == WAITING and id in entries:
            key = tracked.short_kind, entries[id].node
            counts[key] = counts.get(key, 0) + 1
    any_node: dict[str, int] = {}
    for (kind, _), count in counts.items():
        any_node[kind] = any_node.get(kind, 0) + count
    return {
        name: counts.get((pool.kind, ""), 0) + counts.get((pool.kind, pool.node), 0)
        if pool.node
        else any_node.get(pool.kind, 0)
        for name, pool in scheduler.ledger.pools.items()
    }


def _unit_name(pool: PoolState) -> str:
    last = pool.kind.rpartition("/")[2]
    if pool.window is not None and last in WINDOWED_UNITS:
        return last
    return UNITS.get(pool.kind, "units")


def _units(holder: tuple[int, str, str, Holding]) -> int:
    return holder[0]


def _holders_by_pool(scheduler: Scheduler) -> HoldersByPool:
    """Holders by pool. Actions of one batch hold units together; they count for the first of them."""
    held: HoldersByPool = {name: [] for name in scheduler.ledger.pools}
    shared: dict[int, None] = {}
    for entry in scheduler.holding_entries(None):
        action = entry.action
        for holding in entry.holdings:
            if holding.riders > 1:
                if id(holding) in shared:
                    continue
                shared[id(holding)] = None
            holders = held.get(holding.pool.name)
            if holders is not None:
                holders.append((holding.units, action.id, action.run, holding))
    for sandbox in scheduler.sandboxes.by_id.values():
        reserved = sandbox.reserved
        if reserved is not None and reserved.pool.name in held:
            held[reserved.pool.name].append((reserved.units, sandbox.id, sandbox.run.name, reserved))
    return held


def _holder_view(holder: tuple[int, str, str, Holding], run: str | None) -> PoolHolder:
    units, id, holder_run, holding = holder
    if run is not None and holder_run != run:
        id = holder_run = HIDDEN_NAME
    return PoolHolder(id=id, run=holder_run, units=units, parts=_holding_cells(holding))


def _holding_cells(holding: Holding) -> tuple[int, ...]:
    """NUMA nodes or devices."""
    layout = holding.pool.layout
    if isinstance(layout, CoreSet):
        cells = {cell: None for cell, cores in enumerate(layout.numa) for core in holding.cells if core in cores}
        return tuple(cells)
    if layout is None and holding.pool.kind == CPU:
        return (0,)
    return holding.cells


def _pool_parts(
    pool: PoolState, holders: list[tuple[int, str, str, Holding]], loaded: list[tuple[str, tuple[int, ...]]]
) -> tuple[PoolPart, ...]:
    layout = pool.layout
    if isinstance(layout, Chunks):
        held = {device for holder in holders for device in holder[3].cells}
        service_by_device = {device: service for service, devices in loaded for device in devices}
        return tuple(
            [
                PoolPart(index=device, total=1, held=int(device in held), service=service_by_device.get(device, ""))
                for device in range(layout.count)
            ]
        )
    if isinstance(layout, Cells):
        cells = enumerate(zip(layout.sizes, layout.free, strict=True))
        return tuple([PoolPart(index=cell, total=size, held=size - free) for cell, (size, free) in cells])
    if isinstance(layout, CoreSet):
        held = {core for holder in holders for core in holder[3].cells}
        return tuple(
            [
                PoolPart(index=cell, total=len(cores), held=sum(core in held for core in cores))
                for cell, cores in enumerate(layout.numa)
            ]
        )
    return (PoolPart(index=0, total=pool.total, held=pool.held),) if pool.kind in (CPU, EXCLUSIVE_CORE) else ()


class RunShares:
    """The fraction of the pools that runs hold.

    Subtracts quota units that came back since the scheduler last looked, computed once for all runs.
    """

    def __init__(self, ledger: Ledger, now: float) -> None:
        self._totals = ledger.total_by_kind
        self._returned_units: dict[tuple[int, str], int] = {}
        """Returned units, by account of the run that spent them and kind of pool."""
        for pool in ledger.pools.values():
            units = pool.returned_units(now)
            for charge in pool.charges:
                if units <= 0:
                    break
                part = min(units, charge.spent)
                units -= part
                key = id(charge.run), pool.kind
                self._returned_units[key] = self._returned_units.get(key, 0) + part

    def dominant_share(self, usages: Iterable[RunUsage]) -> float:
        """The largest share of any kind that these runs hold together."""
        units_by_kind: dict[str, int] = {}
        for usage in usages:
            for kind, units in usage.units_by_kind.items():
                units_by_kind[kind] = (
                    units_by_kind.get(kind, 0) + units - self._returned_units.get((id(usage), kind), 0)
                )
        totals = self._totals
        parts = [units / totals[kind] if totals[kind] > 0 else 1.0 for kind, units in units_by_kind.items() if units]
        return min(1.0, max(parts, default=0.0))
