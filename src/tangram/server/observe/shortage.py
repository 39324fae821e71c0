"""Shortage: which kind of pool an action waits for.

Owns the rule by which waiting is charged to a kind. All of the waiting before a grant is charged to one: that which was
found short last. Who asks for a single kind waits for that. Of several, it is looked at twice:

    when it begins to wait    the first, memory for its sandbox before all, of which no pool it may run from has enough;
                              if each has enough, as when somebody goes before it, the one of which least is free
    when it is granted        what came free in that moment is what it had lacked: units that another action gave back,
                              memory of a sandbox that ended, a quota that time filled, a pool that grew

Reads the scheduler, changes nothing. The second look costs nothing that grows; the first, of an action that may still
choose its node, a look at each pool of the kinds that it asks for.
"""

from __future__ import annotations

from tangram.core.action import Action
from tangram.core.demand import LEARNED, MEMORY
from tangram.core.lanes import Entry
from tangram.core.messages import Event, Finished, PoolChanged, Release, StartFailed, Tick
from tangram.core.scheduler import Scheduler


def short_kind(scheduler: Scheduler, entry: Entry) -> str:
    """Of an action that begins to wait."""
    needs = entry.needs
    if entry.memory:
        needs = ((MEMORY, entry.memory), *needs)
    elif len(needs) == 1:
        return needs[0][0]
    kinds, node = scheduler.ledger.kinds, entry.node
    tightest, least = needs[0][0], 2.0
    for kind, units in needs:
        pools = kinds.get(kind, {})
        here = pools.get("") or pools.get(node)
        usable = [here] if here is not None else [] if node else list(pools.values())
        asked = max(entry.wanted, 1) if units == LEARNED else units
        if not any(pool.fits(asked) for pool in usable):
            return kind
        free = max(pool.free / max(1, pool.total) for pool in usable)
        if free < least:
            tightest, least = kind, free
    return tightest


def lacked(scheduler: Scheduler, action: Action, event: Event, freed: tuple[str, ...], short: str) -> str:
    """Of an action that this event has granted: `freed` are the pools of which the event gave units back, `short` what
    was found when it began to wait."""
    wanted = action.demand.pools
    if len(wanted) == 1 and not action.sandbox:
        return short or next(iter(wanted))
    kinds: list[str] = []
    kind = type(event)
    if kind is Finished or kind is StartFailed:
        kinds = [name.partition("@")[0] for name in freed]
    elif kind is Tick:
        pools = scheduler.ledger.kinds
        kinds = [each for each in wanted if any(pool.window is not None for pool in pools.get(each, {}).values())]
    elif isinstance(event, Release):
        kinds = [MEMORY]
    elif isinstance(event, PoolChanged):
        kinds = [event.pool.kind]
    if short in kinds:
        return short
    return next((each for each in kinds if each in wanted), short or next(iter(wanted)))
