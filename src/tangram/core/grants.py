"""Grants: the policy's decisions, written into the ledger.

Owns the units that each live action holds (in several pools all or none, as in gang scheduling), and the units that are
held aside during a plan. Checks every decision before it is written: raises InvariantError for an amount that a demand
does not admit and for a pool that would be oversold. Never chooses anything and never changes the state of an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tangram.core.action import State
from tangram.core.demand import CORE, CPU, EXCLUSIVE_CORE, GPU, LEARNED, MEMORY, Amounts
from tangram.core.lanes import Entry, SandboxState
from tangram.core.ledger import Holding, Ledger, PoolState
from tangram.core.messages import Share
from tangram.core.policies.base import Adjust, Begin, Hold
from tangram.core.queue import Queue
from tangram.core.residents import Residents
from tangram.core.sandbox_states import SandboxStates
from tangram.errors import InvariantError

WIDTH_KINDS = (CPU, GPU, EXCLUSIVE_CORE)
"""Kinds that define the width of a program. Counted in this order if no pool of its demand is elastic."""


class Grants:
    """The units that each action holds."""

    def __init__(self, ledger: Ledger, queue: Queue, sandboxes: SandboxStates, residents: Residents) -> None:
        self._ledger = ledger
        self._queue = queue
        self._sandboxes = sandboxes
        self._residents = residents
        self.holding: dict[str, Entry] = {}
        """Actions that hold units."""
        self._elastic_by_pool: dict[str, dict[str, Entry]] = {}
        """Per CPU pool, the elastic actions that hold units of it, in order of their start."""
        self._aside: list[Holding] = []
        """Units that are held aside for candidates of the current plan."""
        self._placed: list[SandboxState] = []
        """Sandboxes that have a node only for the current plan."""

    def elastic_on(self, pool: PoolState) -> Mapping[str, Entry]:
        """The elastic actions that hold units of a CPU pool, in order of their start."""
        return MappingProxyType(self._elastic_by_pool.get(pool.name, {}))

    def forget(self, pool: PoolState) -> None:
        """Forgets a pool that has left."""
        self._elastic_by_pool.pop(pool.name, None)

    # ---- holding aside during a plan ----

    def hold_minimum(self, decision: Hold) -> None:
        """Holds the minimum of a candidate aside until the first Begin of the plan."""
        entry, node = decision.entry, decision.node
        sandbox, ledger = entry.sandbox, self._ledger
        if sandbox is not None and not sandbox.node and node:
            if sandbox.memory:
                self._aside.append(ledger.hold(ledger.kinds[MEMORY][node], sandbox.memory, sandbox.run.usage))
            sandbox.node = node
            self._placed.append(sandbox)
        for kind, minimum in entry.needs:
            pool = self._ledger.pool_on(kind, node)
            units = entry.reserve_on(pool) if minimum == LEARNED else minimum
            self._aside.append(ledger.hold(pool, units, entry.run.usage))

    def release_minimums(self) -> None:
        """Frees everything that is held aside."""
        if self._aside:
            for holding in self._aside:
                self._ledger.give_back(holding, refund=True)
            for sandbox in self._placed:
                sandbox.node = ""
            self._aside, self._placed = [], []

    # ---- taking ----

    def take(self, entry: Entry, decision: Begin) -> tuple[Share, ...]:
        """Takes units of every pool of the demand, or of none. Raises InvariantError if a pool has too few."""
        node, demand = decision.node, entry.action.demand
        key_kind = entry.elastic or _width_kind(demand.pools)
        holdings: list[Holding] = []
        shares: list[Share] = []
        try:
            for kind, amounts in demand.pools.items():
                pool = self._ledger.pool_on(kind, node)
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
        self._elastic_by_pool.setdefault(pool.name, {})[entry.id] = entry
        pool.elastic_held += holding.units
        pool.elastic_min += entry.action.demand.pools[CPU].min
        self._queue.changed[pool.name] = pool

    def _units(self, entry: Entry, amounts: Amounts, pool: PoolState, units: int = 0, width: int = 0) -> int:
        """Returns the units that the plan grants of one pool, or else the minimum. Raises InvariantError if the demand
        does not admit them. CPU may be any amount within the range of the demand if the width is admitted."""
        if amounts.declared:
            units = units or amounts.min
            in_between = pool.kind == CPU and width and amounts.min <= units <= amounts.max
            admitted = amounts.admits(width if in_between else units)
        else:
            units = units or entry.reserve_on(pool)
            admitted = 0 < units <= amounts.max
        if not admitted:
            raise InvariantError(f"plan gives {entry.id} {units} units of {pool.kind}, which its demand does not admit")
        return units

    def _take_devices(self, entry: Entry, pool: PoolState, units: int) -> Holding:
        """Takes the chunk on which its service is loaded if that is free, else the chunk whose services are worth
        least."""
        service = entry.action.service
        preferred = self._residents.chunks(service, pool.node) if service else []
        if service and pool.fits(units) and not any(self._is_free(pool, chunk, units) for chunk in preferred):
            devices, _ = self._residents.least_worth(pool, units, self._ledger.now, smallest=True)
            preferred = [(devices[0], len(devices))]
        holding = self._ledger.hold(pool, units, entry.run.usage, preferred)
        entry.restoring = bool(service) and not self._residents.use(service, pool.node, holding.cells)
        return holding

    def _is_free(self, pool: PoolState, chunk: tuple[int, int], units: int) -> bool:
        start, size = chunk
        return size == pool.counted(units) and pool.devices_free(tuple(range(start, start + size)))

    def join_batch(self, rider: Entry, leader: Entry, node: str) -> tuple[Share, ...]:
        """Lets a waiting call of the same service share the leader's device chunk. The last to finish frees it."""
        if rider.state is not State.QUEUED or rider.lane is None:
            raise InvariantError(f"plan lets {rider.id} ride with {leader.id}, but it is not waiting")
        if rider.action.service != leader.action.service or rider.node not in ("", node):
            raise InvariantError(f"plan lets {rider.id} ride with {leader.id}, whose service or node is another")
        holdings, shares = [], []
        assert leader.grant is not None
        for kind, amounts in rider.action.demand.pools.items():
            pool = self._ledger.pool_on(kind, node)
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
        """Gives a running CPU action another reserve and limit. Its width stays."""
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
        """Estimated speed of an elastic action at its current limit, in one-unit seconds per second."""
        units = min(entry.limit, entry.width) / (CORE if entry.elastic == CPU else 1)
        speedup = entry.action.demand.speedup
        if speedup is not None:
            return speedup.at(units)
        estimate = entry.estimate
        assert estimate is not None, entry.id
        if units < 1.0:
            return min(1.0, units / max(estimate.busy, 1e-3))
        return float(units**estimate.exponent)

    def give_back(self, entry: Entry, *, refund: bool = False, spent: dict[str, int] | None = None) -> list[PoolState]:
        """Frees everything that the action holds and returns the pools that now have more free units. `spent`: what was
        really spent, per kind."""
        freed = []
        for holding in entry.holdings:
            pool = holding.pool
            corrected = spent is not None and pool.kind in spent and self._ledger.correct(holding, spent[pool.kind])
            if self._ledger.give_back(holding, refund=refund) or corrected:
                freed.append(pool)
            if entry.elastic == CPU and pool.kind == CPU:
                self._elastic_by_pool[pool.name].pop(entry.id, None)
                pool.elastic_held -= entry.reserved
                pool.elastic_min -= entry.action.demand.pools[CPU].min
        entry.holdings = ()
        del self.holding[entry.id]
        return freed

    def all_holdings(self) -> list[Holding]:
        """Every holding once, those of sandboxes included."""
        held = [holding for entry in self.holding.values() for holding in entry.holdings]
        held.extend(sandbox.reserved for sandbox in self._sandboxes.by_id.values() if sandbox.reserved is not None)
        return list({id(holding): holding for holding in held}.values())

    def check(self) -> None:
        """Recomputes what elastic actions hold of every CPU pool. Raises InvariantError on a difference."""
        for pool in self._ledger.kinds.get(CPU, {}).values():
            elastic = list(self._elastic_by_pool.get(pool.name, {}).values())
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
