"""Shortage: which kind of pool an action waits for.

Waiting time before a grant is charged to one kind: the one found short last. An action that needs a single kind waits
for that. For an action that needs several, two moments count:

    it begins to wait    the first kind, memory for its sandbox before all, that no usable pool has enough of; if each
                         has enough, as when another action is ahead, the one with the smallest free share
    it is granted        a kind that became free in that moment: units of another action, memory of a closed sandbox, a
                         refilled quota, a grown pool

Reads the scheduler and changes nothing. The second check has constant cost; the first, for an action that may still
choose its node, looks at each pool of the kinds that it needs.
"""

from __future__ import annotations

from tangram.core.action import Action
from tangram.core.demand import LEARNED, MEMORY
from tangram.core.lanes import Entry
from tangram.core.messages import Event, Finished, PoolChanged, Release, StartFailed, Tick
from tangram.core.scheduler import Scheduler


def short_kind_when_queued(scheduler: Scheduler, entry: Entry) -> str:
    """Returns the kind that an action waits for when it begins to wait."""
    needs = entry.needs
    if entry.memory:
        needs = ((MEMORY, entry.memory), *needs)
    elif len(needs) == 1:
        return needs[0][0]
    kinds, node = scheduler.ledger.kinds, entry.node
    tightest, least = needs[0][0], 2.0
    for kind, units in needs:
        pools = kinds.get(kind, {})
        pool_here = pools.get("") or pools.get(node)
        usable = [pool_here] if pool_here is not None else [] if node else list(pools.values())
        needed = max(entry.learned_reserve, 1) if units == LEARNED else units
        if not any(pool.fits(needed) for pool in usable):
            return kind
        free = max(pool.free / max(1, pool.total) for pool in usable)
        if free < least:
            tightest, least = kind, free
    return tightest


def waiting_by_kind(scheduler: Scheduler, run: str | None) -> dict[tuple[str, str], int]:
    """Counts waiting actions of a run, or of all, by the kind that they wait for now, of those that they demand, and by
    node; '' means any. What blocks the first action of a lane counts for all of it."""
    runs = scheduler.queue.runs
    counts: dict[tuple[str, str], int] = {}
    for waiting_run in runs.values() if run is None else [runs[run]] if run in runs else []:
        for lane in waiting_run.lanes.values() if waiting_run.waiting else ():
            if lane.waiting:
                kind = short_kind_when_queued(scheduler, lane.first())
                key = kind if kind in lane.kinds else lane.kinds[0], lane.node
                counts[key] = counts.get(key, 0) + lane.waiting
    return counts


def short_kind_when_granted(
    scheduler: Scheduler, action: Action, event: Event, freed: tuple[str, ...], short: str
) -> str:
    """Returns the kind that an action waited for, when `event` has granted it. `freed`: pools to which the event
    returned units; `short`: the kind found when it began to wait."""
    demand = action.demand.pools
    if len(demand) == 1 and not action.sandbox:
        return short or next(iter(demand))
    kinds: list[str] = []
    kind = type(event)
    if kind is Finished or kind is StartFailed:
        kinds = [name.partition("@")[0] for name in freed]
    elif kind is Tick:
        pools = scheduler.ledger.kinds
        kinds = [kind for kind in demand if any(pool.window is not None for pool in pools.get(kind, {}).values())]
    elif isinstance(event, Release):
        kinds = [MEMORY]
    elif isinstance(event, PoolChanged):
        kinds = [event.pool.kind]
    if short in kinds:
        return short
    return next((kind for kind in kinds if kind in demand), short or next(iter(demand)))
