"""Grants: a policy's decisions, written into the ledger.

Owns what each live action holds, and what is kept aside while a plan is made. Checks every decision before it is
written: an amount that a demand does not admit or a pool that would be oversold raises InvariantError. Never chooses
anything and never changes the state of an action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangram.core.action import State
from tangram.core.demand import CORE, CPU, GPU, LEARNED, MEMORY, Amounts
from tangram.core.lanes import Entry, Place
from tangram.core.ledger import CORE_KIND, Holding, Ledger, PoolState
from tangram.core.messages import Share
from tangram.core.places import Places
from tangram.core.policies.base import Adjust, Begin, Hold
from tangram.core.residents import Residents
from tangram.errors import InvariantError

if TYPE_CHECKING:
    from tangram.core.snapshot import Snapshot


WIDTH_KINDS = (CPU, GPU, CORE_KIND)
"""What a program runs on side by side: of these its width is counted, if no pool of its demand is elastic."""


class Grants:
    """Who holds what."""

    def __init__(self, ledger: Ledger, places: Places, residents: Residents, snapshot: Snapshot) -> None:
        self._ledger = ledger
        self._places = places
        self._residents = residents
        self._snapshot = snapshot
        self.holding: dict[str, Entry] = {}
        """Actions that hold units."""
        self.elastic_by_pool: dict[str, dict[str, Entry]] = {}
        """Per CPU pool, the elastic actions that hold units of it, in order of their start."""
        self._aside: list[Holding] = []
        """Units kept aside for candidates of the present plan, and the places that were chosen with them."""
        self._placed: list[Place] = []

    # ---- while a plan is made ----

    def keep_aside(self, decision: Hold) -> None:
        """Keep the minimum of a candidate aside until the plan has looked at all of them."""
        entry, node = decision.entry, decision.node
        place, ledger = entry.place, self._ledger
        if place is not None and not place.node and node:
            if place.memory:
                self._aside.append(ledger.hold(ledger.kinds[MEMORY][node], place.memory, place.run.usage))
            place.node = node
            self._placed.append(place)
        for kind, minimum in entry.needs:
            pool = self._snapshot.pool(kind, node)
            units = self._snapshot.reserve(entry, pool) if minimum == LEARNED else minimum
            self._aside.append(ledger.hold(pool, units, entry.run.usage))

    def let_go(self) -> None:
        """Everything that was kept aside is free again."""
        if self._aside:
            for holding in self._aside:
                self._ledger.give_back(holding, refund=True)
            for place in self._placed:
                place.node = ""
            self._aside, self._placed = [], []

    # ---- taking ----

    def take(self, entry: Entry, decision: Begin) -> tuple[Share, ...]:
        """Hold every pool of the demand, or none: where one has too little the plan is wrong, or we are."""
        node, demand = decision.node, entry.action.demand
        key_kind = entry.elastic or _width_kind(demand.pools)
        holdings: list[Holding] = []
        shares: list[Share] = []
        try:
            for kind, amounts in demand.pools.items():
                pool = self._snapshot.pool(kind, node)
                if kind == key_kind:
                    units = self._units(entry, amounts, pool, decision.units, decision.width)
                else:
                    units = self._units(entry, amounts, pool)
                if kind == GPU:
                    holding = self._take_devices(entry, pool, units)
                else:
                    holding = self._ledger.hold(pool, units, entry.run.usage, at_once=entry.action.at_once)
                holdings.append(holding)
                limit = holding.units
                if kind == CPU:
                    limit = max(units, decision.limit)
                    entry.reserved, entry.limit = units, limit
                if kind == key_kind:
                    entry.width = decision.width or holding.units
                shares.append(Share(pool.name, holding.units, limit, holding.cells))
        except InvariantError:
            for holding in holdings:
                self._ledger.give_back(holding, refund=True)
            raise
        entry.holdings = tuple(holdings)
        if entry.elastic == CPU:
            self._count_elastic(entry, next(holding for holding in holdings if holding.pool.kind == CPU))
        else:
            entry.limit = max(entry.limit, entry.width)
        self.holding[entry.id] = entry
        return tuple(shares)

    def _count_elastic(self, entry: Entry, holding: Holding) -> None:
        pool = holding.pool
        self.elastic_by_pool.setdefault(pool.name, {})[entry.id] = entry
        pool.elastic_held += holding.units
        pool.elastic_min += entry.action.demand.pools[CPU].min
        self._snapshot.changed[pool.name] = pool

    def _units(self, entry: Entry, amounts: Amounts, pool: PoolState, units: int = 0, width: int = 0) -> int:
        """What the plan gives of one pool, or the minimum; checked against the demand. Of CPU an amount between those
        that the demand admits will do as well, as after a resize, if the width is admitted."""
        if amounts.declared:
            units = units or amounts.min
            in_between = pool.kind == CPU and width and amounts.min <= units <= amounts.max
            admitted = amounts.admits(width if in_between else units)
        else:
            units = units or self._snapshot.reserve(entry, pool)
            admitted = 0 < units <= amounts.max
        if not admitted:
            raise InvariantError(f"plan gives {entry.id} {units} units of {pool.kind}, which its demand does not admit")
        return units

    def _take_devices(self, entry: Entry, pool: PoolState, units: int) -> Holding:
        """The chunk where its service is loaded, if that is free; else the one where the least is lost."""
        service = entry.action.service
        preferred = self._residents.chunks(service, pool.node) if service else []
        if service and pool.fits(units) and not any(self._is_free(pool, chunk, units) for chunk in preferred):
            devices, _ = self._snapshot.least_worth(pool, units, smallest=True)
            preferred = [(devices[0], len(devices))]
        holding = self._ledger.hold(pool, units, entry.run.usage, preferred)
        entry.restoring = bool(service) and not self._residents.use(service, pool.node, holding.cells)
        return holding

    def _is_free(self, pool: PoolState, chunk: tuple[int, int], units: int) -> bool:
        start, size = chunk
        return size == pool.counted(units) and pool.devices_free(tuple(range(start, start + size)))

    def ride(self, rider: Entry, leader: Entry, node: str) -> tuple[Share, ...]:
        """A waiting call of the same service shares the leader's device chunk; the last one out frees it."""
        if rider.state is not State.QUEUED or rider.lane is None:
            raise InvariantError(f"plan lets {rider.id} ride with {leader.id}, but it does not wait")
        if rider.action.service != leader.action.service or rider.node not in ("", node):
            raise InvariantError(f"plan lets {rider.id} ride with {leader.id}, whose service or node is another")
        holdings, shares = [], []
        assert leader.grant is not None
        for kind, amounts in rider.action.demand.pools.items():
            pool = self._snapshot.pool(kind, node)
            if kind == GPU:
                holding = next((held for held in leader.holdings if held.pool is pool), None)
                if holding is None:
                    raise InvariantError(f"plan lets {rider.id} ride with {leader.id}, which has no devices")
                if holding.units < amounts.min:
                    raise InvariantError(
                        f"plan lets {rider.id} ride on {holding.units} devices; it needs {amounts.min}"
                    )
                holding.riders += 1
            else:
                units = self._units(rider, amounts, pool)
                holding = self._ledger.hold(pool, units, rider.run.usage, at_once=rider.action.at_once)
            holdings.append(holding)
            shares.append(Share(pool.name, holding.units, holding.units, holding.cells))
        rider.holdings = tuple(holdings)
        rider.width = rider.limit = leader.width
        self.holding[rider.id] = rider
        return tuple(shares)

    # ---- changing and giving back ----

    def adjust(self, decision: Adjust, now: float) -> PoolState:
        """Give a running CPU action another reserve and limit; its width stays."""
        entry, reserved, limit = decision.entry, decision.reserved, decision.limit
        amounts = entry.action.demand.pools.get(CPU)
        if amounts is None or (amounts.declared and entry.elastic != CPU):
            raise InvariantError(f"plan resizes {entry.id}, whose CPU is fixed")
        if entry.state not in (State.STARTING, State.RUNNING):
            raise InvariantError(f"plan resizes {entry.id}, which is {entry.state.value}")
        if reserved < max(amounts.min, 1) or limit < reserved:
            raise InvariantError(
                f"plan resizes {entry.id} to {reserved} (limit {limit}), below its minimum of {amounts.min}"
            )
        holding = next(held for held in entry.holdings if held.pool.kind == CPU)
        entry.account(now)
        self._ledger.resize(holding, reserved)
        if entry.elastic:
            holding.pool.elastic_held += reserved - entry.reserved
        entry.reserved, entry.limit = reserved, limit
        if entry.elastic:
            entry.speed = self.speed(entry)
        return holding.pool

    def speed(self, entry: Entry) -> float:
        """Believed speed of an elastic action at its present limit, in one-unit seconds per second."""
        units = min(entry.limit, entry.width) / (CORE if entry.elastic == CPU else 1)
        speedup = entry.action.demand.speedup
        if speedup is not None:
            return speedup.at(units)
        estimate = self._snapshot.estimate(entry)
        if units < 1.0:
            return min(1.0, units / max(estimate.busy, 1e-3))
        return float(units**estimate.exponent)

    def give_back(self, entry: Entry, *, refund: bool = False, spent: dict[str, int] | None = None) -> list[PoolState]:
        """The action holds nothing any more. `spent` corrects estimates. Returns the pools that have more free."""
        freed = []
        for holding in entry.holdings:
            pool = holding.pool
            corrected = spent is not None and pool.kind in spent and self._ledger.correct(holding, spent[pool.kind])
            if self._ledger.give_back(holding, refund=refund) or corrected:
                freed.append(pool)
            if entry.elastic == CPU and pool.kind == CPU:
                self.elastic_by_pool[pool.name].pop(entry.id, None)
                pool.elastic_held -= entry.reserved
                pool.elastic_min -= entry.action.demand.pools[CPU].min
        entry.holdings = ()
        del self.holding[entry.id]
        return freed

    def all_holdings(self) -> list[Holding]:
        """Each once, those of sandboxes included."""
        held = [holding for entry in self.holding.values() for holding in entry.holdings]
        held.extend(place.reserved for place in self._places.by_sandbox.values() if place.reserved is not None)
        return list({id(holding): holding for holding in held}.values())

    def check(self) -> None:
        """Recompute what elastic actions hold of every CPU pool. Raises InvariantError where that is counted wrong."""
        for pool in self._ledger.kinds.get(CPU, {}).values():
            elastic = list(self.elastic_by_pool.get(pool.name, {}).values())
            held = sum(entry.reserved for entry in elastic)
            least = sum(entry.action.demand.pools[CPU].min for entry in elastic)
            if (pool.elastic_held, pool.elastic_min) != (held, least):
                raise InvariantError(
                    f"elastic actions hold {held} of {pool.name}, at least {least}; counted are {pool.elastic_held}"
                    f" and {pool.elastic_min}"
                )
            if any(entry.id not in self.holding for entry in elastic):
                raise InvariantError(f"an elastic action of {pool.name} holds nothing")


def _width_kind(pools: dict[str, Amounts]) -> str:
    for kind in WIDTH_KINDS:
        if kind in pools:
            return kind
    return ""
