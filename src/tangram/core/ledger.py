"""The ledger: the units of each pool, free, held or spent.

Owns every count of units and their position inside a node, and the use of each run, by which fair share orders runs
(dominant resource fairness, DRF). Never decides anything. Promises
free + held + spent == total for every pool after every call. `free` is negative only after a pool shrank or an estimate
was corrected. Nothing is granted then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from tangram.core.demand import CORE, CPU, EXCLUSIVE_CORE, GPU, LEARNED, MEMORY, Need
from tangram.core.messages import NodeState, Pool
from tangram.core.topology import Cells, Chunk, Chunks, CoreSet, Parts, chunk_size
from tangram.errors import InvalidConfig, InvariantError

UNIT_ROUNDING = 1e-9
"""Tolerance for rounding: seconds times a rate may be this much below a whole unit."""


NODES_AWAY_MAX = 256
"""Names of nodes that are down or have no pools. Beyond this number the one that changed longest ago is forgotten,
because an autoscaler may give every node a new name. If it returns, it is a new node."""

SHAPES_MAX = 256
"""Different sizes of nodes that went down. An action that fits one of them waits for such a node to come back; others
are refused."""

RESIZE_THRESHOLD = CORE // 2
"""Half a core: a smaller change of free units is noise from short calls and causes no resizing."""


RECENT_S = 60.0
"""Time constant of the fading average of a run's share. Many times the duration of most actions, so that weights hold
even where few actions fit into a pool; short enough that use of an hour ago does not count."""

HELD_S = 10.0
"""What a run holds now counts as if it had held it for this long. So each start counts immediately when many units
become free at the same moment. It is short against RECENT_S, so that a run gets back most of what rounding to whole
actions takes from it. With a smaller value a run that waited a moment would be overcompensated, and runs with actions
of a minute would swing between a whole pool and nothing."""


class RunUsage:
    """What a run holds of every kind, and its weighted dominant share, by which fair share orders runs: dominant
    resource fairness (DRF)."""

    __slots__ = ("averaged_at", "recent", "share", "units_by_kind", "weight")

    def __init__(self, now: float) -> None:
        self.weight = 1.0
        self.units_by_kind: dict[str, int] = {}
        """Omits kinds without units, so that a pass over them stays short."""
        self.share = 0.0
        """The current share."""
        self.recent = 0.0
        """The fading average of the share, at `averaged_at`."""
        self.averaged_at = now

    def standing(self, now: float) -> float:
        """Returns what orders runs, smallest first: the average share plus a part of the current share."""
        return self.average(now) + HELD_S / RECENT_S * self.share

    def average_up_to(self, now: float) -> None:
        """Brings the average up to now. Called before the share changes."""
        if now > self.averaged_at:
            self.recent, self.averaged_at = self.average(now), now

    def raise_average(self, least: float, now: float) -> None:
        """Raises the average to at least this value, so that the run has nothing to catch up."""
        self.average_up_to(now)
        self.recent = max(self.recent, least)

    def average(self, now: float) -> float:
        share = self.share
        return share + (self.recent - share) * math.exp((self.averaged_at - now) / RECENT_S)


class Holding:
    """Held or charged units of one pool. The actions of a batch share one; the last of them frees it."""

    __slots__ = ("pool", "position", "riders", "run", "spent", "units", "used_at")

    def __init__(self, pool: PoolState, units: int, run: RunUsage) -> None:
        self.pool = pool
        self.units = units
        self.run = run
        self.riders = 1
        self.position: Chunk | Parts | tuple[int, ...] | None = None
        """The position in the layout of its pool. None if the pool had no layout when the units were taken."""
        self.spent = 0
        """Spent pool: the units that have not come back yet."""
        self.used_at = 0.0
        """Sliding window: the time at which the units count as used."""

    @property
    def cells(self) -> tuple[int, ...]:
        """The position of the units, as in `Share.cells`."""
        position = self.position
        if position is None:
            return ()
        if isinstance(position, Chunk):
            return position.devices
        return tuple([part if isinstance(part, int) else part[0] for part in position])


class PoolState:
    __slots__ = (
        "charges", "elastic_held", "elastic_min", "free", "free_at_last_round", "gone", "held", "kind", "layout",
        "name", "node", "pending", "spent", "total", "window", "window_at",
    )  # fmt: skip

    def __init__(self, pool: Pool, now: float) -> None:
        self.name = pool.name
        self.kind = pool.kind
        self.node = pool.node
        self.window = pool.window
        self.total = self.free = pool.total
        self.held = 0
        self.spent = 0
        self.gone = False
        """Its node went down: holdings of it no longer count."""
        self.layout: Chunks | Cells | CoreSet | None = None
        self.window_at = now
        """Fixed window: the start of the current one. Token bucket: the time up to which units have come back."""
        self.charges: deque[Holding] = deque()
        """Spent pool: the charges that come back with time, oldest first."""
        self.pending: dict[int, Holding] = {}
        """Sliding window: the charges of running actions, which come back some time after their end."""
        self.elastic_held = self.elastic_min = 0
        """CPU: the units that running elastic actions hold, and the sum of their minima."""
        self.free_at_last_round = pool.total
        """CPU: the free units at the end of the last round that looked at the pool."""
        self._lay_out(pool)

    def change(self, pool: Pool) -> None:
        """Sets another total. Held units keep their position."""
        self.window = pool.window
        self.free += pool.total - self.total
        self.total = pool.total
        self._lay_out(pool)

    def _lay_out(self, pool: Pool) -> None:
        layout, cells = self.layout, pool.numa or (pool.total,)
        if pool.kind == GPU:
            if isinstance(layout, Chunks):
                layout.resize(pool.total)
            else:
                self.layout = Chunks(pool.total)
        elif pool.kind == EXCLUSIVE_CORE:
            ids = iter(range(pool.total))
            numa = [[next(ids) for _ in range(size)] for size in cells]
            if isinstance(layout, CoreSet):
                layout.resize(numa)
            else:
                self.layout = CoreSet(numa)
        elif pool.kind == CPU:
            if isinstance(layout, Cells):
                layout.resize(cells)
            elif len(cells) > 1:
                # Units that were taken before have no cell, so the cells may have more room than the pool, never less.
                self.layout = Cells(cells)

    def is_resize_due(self) -> bool:
        """CPU: whether free units changed so much since the last look that elastic actions should be resized."""
        return self.elastic_held > 0 and abs(self.free - self.free_at_last_round) >= RESIZE_THRESHOLD

    def is_tight(self, units: int) -> bool:
        """CPU: whether few units are free while elastic actions hold more than their minima."""
        return self.elastic_held > self.elastic_min and self.free < max(CORE, 2 * units)

    def fits(self, units: int) -> bool:
        if not isinstance(self.layout, Chunks):
            return self.free >= units
        return self.free >= chunk_size(units) and self.layout.fits(units)

    def counted(self, units: int) -> int:
        """Returns the units that a grant of `units` takes: devices come in whole chunks."""
        return chunk_size(units) if self.kind == GPU else units

    def could_fit(self, units: int) -> bool:
        """Whether it would fit if all units were free."""
        return _holds(self.kind, self.total, units)

    def devices_free(self, devices: tuple[int, ...]) -> bool:
        """Whether all of these devices, a chunk, are free."""
        return isinstance(self.layout, Chunks) and self.layout.is_free((devices[0], len(devices)))

    def free_device_sets(self, units: int, *, smallest: bool = False) -> list[tuple[int, ...]]:
        """Returns the device sets that a call for `units` could get now. `smallest`: only those that split no larger
        chunk than necessary. Empty while more is held than a shrunk pool has."""
        assert isinstance(self.layout, Chunks), self.name
        chunks = self.layout.chunks_for(units, smallest=smallest) if self.fits(units) else []
        return [chunk.devices for chunk in chunks]

    def free_chunks(self) -> tuple[int, ...]:
        """Returns the number of chunks of each level that could all be granted now. A shrunk pool may have more free
        devices than free units: only the chunks for which the units are enough count."""
        assert isinstance(self.layout, Chunks), self.name
        counts = list(self.layout.free_counts())
        units = max(0, self.free)
        for level in reversed(range(len(counts))):
            chunks = min(counts[level], units >> level)
            units -= chunks << level
            if chunks < counts[level]:
                return (*[units >> lower & 1 for lower in range(level)], chunks, *counts[level + 1 :])
        return tuple(counts)

    def returned_units(self, now: float) -> int:
        """Spent pool: returns the units that have come back since the last refill."""
        window = self.window
        if window is None or not self.spent or now <= self.window_at:
            return 0
        if window.sliding:
            units = 0
            for charge in self.charges:
                if charge.used_at + window.seconds > now:
                    break
                units += charge.spent
            return units
        if not window.bucket:
            return sum(charge.spent for charge in self.charges) if now >= self.window_at + window.seconds else 0
        coming = self.spent - sum(charge.spent for charge in self.pending.values())
        return min(coming, int((now - self.window_at) * self.total / window.seconds + UNIT_ROUNDING))

    def move_window(self, now: float, units: int) -> None:
        """Moves the window after these units have come back."""
        window = self.window
        assert window is not None
        if window.bucket:
            rate = self.total / window.seconds
            coming = self.spent - sum(charge.spent for charge in self.pending.values())
            # Fractions of a unit stay due, unless everything has come back or the rate is 0.
            self.window_at = now if units == coming or not rate else self.window_at + units / rate
        elif not window.sliding and now >= self.window_at + window.seconds:
            self.window_at += max(1, math.floor((now - self.window_at) / window.seconds)) * window.seconds

    def available_at(self, units: int) -> float:
        """Returns when a spent pool will have `units` free if nothing else is granted from it."""
        window = self.window
        if window is None or units > self.total:
            return math.inf
        if window.sliding:
            return self._slides_at(units - self.free)
        if not window.bucket:
            return self.window_at + window.seconds
        return self.window_at + (units - self.free) * window.seconds / self.total

    def _slides_at(self, units: int) -> float:
        """Returns when this many more units will have come back."""
        assert self.window is not None
        for charge in self.charges:
            units -= charge.spent
            if units <= 0:
                return charge.used_at + self.window.seconds
        return math.inf

    def refilled_at(self) -> float:
        """Returns when all spent units will have come back if nothing else is granted. Costs the same for any number of
        charges."""
        if self.window is None or self.pending:
            return math.inf
        if self.window.sliding:
            return self.charges[-1].used_at + self.window.seconds if self.charges else self.window_at
        return self.available_at(self.total)

    def statistics(self) -> dict[str, int]:
        return {"total": self.total, "free": self.free, "held": self.held, "spent": self.spent}


class Ledger:
    """All pools. The only place that writes counts of units."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time of the current event."""
        self.pools: dict[str, PoolState] = {}
        self.kinds: dict[str, dict[str, PoolState]] = {}
        """Per kind, the pools by node. A pool that belongs to no node has the key ''."""
        self._largest_total: dict[str, dict[str, int]] = {}
        """Per node and kind, the largest total since it joined. '' is the key of pools that belong to no node."""
        self._shapes: dict[tuple[tuple[str, int], ...], None] = {}
        """The same for nodes that went down, without duplicates, most recent last."""
        self.total_by_kind: dict[str, int] = {}
        self.nodes: dict[str, NodeState] = {}
        self._nodes_away: dict[str, None] = {}
        """The nodes that are down or have no pools, most recently changed last."""
        self._usages: list[RunUsage] = []
        self.private_kinds: set[str] = set()
        """The kinds that do not count in the share of a run."""
        self._spending: dict[str, PoolState] = {}
        """The pools that may have spent units."""

    # ---- pools and nodes ----

    def change_pool(self, pool: Pool, now: float) -> PoolState:
        """Adds a pool or sets its total. Raises InvalidConfig if it contradicts its former self or its siblings."""
        state = self.pools.get(pool.name)
        if state is None:
            siblings = self.kinds.get(pool.kind, {})
            if siblings and (not pool.node or "" in siblings):
                raise InvalidConfig(
                    f"node of pool {pool.name}", pool.node, f"pools of kind {pool.kind} on nodes, or one without a node"
                )
            if pool.private:
                self.private_kinds.add(pool.kind)
            state = self.pools[pool.name] = siblings[pool.node] = PoolState(pool, now)
            self.kinds[pool.kind] = siblings
            if pool.node and self.nodes.setdefault(pool.node, NodeState.UP) is not NodeState.DOWN:
                self._nodes_away.pop(pool.node, None)
        else:
            if (state.window is None) != (pool.window is None):
                raise InvalidConfig(f"window of pool {pool.name}", pool.window, "units held or spent, as they were")
            self.refill(state, now)
            state.change(pool)
        once = self._largest_total.setdefault(pool.node, {})
        once[pool.kind] = max(pool.total, once.get(pool.kind, 0))
        self._recompute_total(pool.kind)
        return state

    def change_node(self, node: str, state: NodeState) -> list[PoolState]:
        """Sets the state of a node. Returns the pools that were removed, with everything that was held there."""
        removed = self._drop_pools(node) if state is NodeState.DOWN else []
        self.nodes[node] = state
        self._nodes_away.pop(node, None)
        if not any(node in pools for pools in self.kinds.values()):
            self._nodes_away[node] = None
        if len(self._nodes_away) > NODES_AWAY_MAX:
            oldest = next(iter(self._nodes_away))
            removed.extend(self._drop_pools(oldest))
            del self._nodes_away[oldest], self.nodes[oldest]
        return removed

    def _drop_pools(self, node: str) -> list[PoolState]:
        removed = [state for state in self.pools.values() if state.node == node]
        for state in removed:
            state.gone = True
            del self.pools[state.name]
            del self.kinds[state.kind][node]
            self._recompute_total(state.kind)
        if node in self._largest_total:
            shape = tuple(sorted(self._largest_total.pop(node).items()))
            self._shapes.pop(shape, None)
            self._shapes[shape] = None
            if len(self._shapes) > SHAPES_MAX:
                del self._shapes[next(iter(self._shapes))]
        return removed

    def _recompute_total(self, kind: str) -> None:
        self.total_by_kind[kind] = sum(state.total for state in self.kinds[kind].values())
        for usage in self._usages:
            usage.average_up_to(self.now)
            usage.share = self._share(usage)

    def pool_on(self, kind: str, node: str) -> PoolState:
        """The pool of that kind on the node, or the one that belongs to no node."""
        try:
            pools = self.kinds[kind]
            return pools[node] if node in pools else pools[""]
        except KeyError:
            raise InvariantError(f"there is no pool of kind {kind} on node {node!r}") from None

    def could_hold(self, needs: Sequence[Need], node: str, memory: int) -> bool:
        """Whether the pools could hold these needs together if all units were free. `node`: where they must be, if
        anywhere. `memory`: what a sandbox without a node also needs."""
        on_node: list[Need] = []
        for kind, units in needs:
            pools = self.kinds.get(kind)
            if not pools:
                return False
            quota = pools.get("")
            if quota is None:
                on_node.append((kind, units))
            elif not quota.could_fit(units):
                return False
        if not on_node or node:
            return self.node_could_hold(on_node, node)
        if memory:
            on_node.append((MEMORY, memory))
        for candidate in self.kinds[on_node[0][0]]:
            if self.nodes[candidate] is NodeState.UP and self.node_could_hold(on_node, candidate):
                return True
        return False

    def node_could_hold(self, needs: Sequence[Need], node: str) -> bool:
        for kind, units in needs:
            pool = self.kinds.get(kind, {}).get(node)
            if pool is None or not pool.could_fit(units):
                return False
        return True

    def could_once_hold(self, needs: Sequence[Need], node: str, memory: int) -> bool:
        """Whether there ever were pools that could hold these needs together. If so, they may come back."""
        quotas = self._largest_total.get("", {})
        from_quotas = [need for need in needs if need[0] in quotas]
        on_node = [need for need in needs if need[0] not in quotas]
        if memory:
            on_node.append((MEMORY, memory))
        if not all(_holds(kind, quotas[kind], units) for kind, units in from_quotas):
            return False
        if node:
            nodes = [self._largest_total.get(node, {})]
        else:
            nodes = [*(totals for name, totals in self._largest_total.items() if name), *map(dict, self._shapes)]
        return not on_node or any(
            all(kind in totals and _holds(kind, totals[kind], units) for kind, units in on_node) for totals in nodes
        )

    # ---- units ----

    def hold(
        self,
        state: PoolState,
        units: int,
        run: RunUsage,
        preferred: Sequence[tuple[int, int]] = (),
        *,
        at_once: bool = True,
    ) -> Holding:
        """Takes `units` of a pool: charges a spent pool, holds units of any other. `at_once`: see Action."""
        if state.kind == GPU:
            units = chunk_size(units)
        if not state.fits(units):
            raise InvariantError(
                f"plan oversells {state.name}: {units} units wanted, {state.free} of {state.total} free"
            )
        holding = Holding(state, units, run)
        state.free -= units
        if state.window is not None:
            state.spent += units
            holding.spent = units
            self._spending[state.name] = state
            if at_once or not state.window.sliding:
                holding.used_at = self.now + state.window.arrival_s
                state.charges.append(holding)
            else:
                state.pending[id(holding)] = holding
        else:
            state.held += units
            layout = state.layout
            if isinstance(layout, Chunks):
                holding.position = layout.take(units, preferred)
            elif layout is not None:
                holding.position = layout.take(units)
        self._use(run, state.kind, units)
        return holding

    def give_back(self, holding: Holding, *, refund: bool = False) -> bool:
        """Releases the holding for one of its actions. Returns whether units became free. Spent units do only with
        `refund`."""
        holding.riders -= 1
        if holding.riders:
            return False
        state, units = holding.pool, holding.units
        if state.window is not None:
            if state.pending.pop(id(holding), None) is not None:
                holding.used_at = self.now
                if holding.spent:
                    state.charges.append(holding)
            holding.used_at = min(holding.used_at, self.now)
            return refund and self._refund(holding, units)
        self._use(holding.run, state.kind, -units)
        if state.gone:
            return False
        state.held -= units
        state.free += units
        position = holding.position
        if position is not None and state.layout is not None:
            state.layout.give(position)  # type: ignore[arg-type]  # it came from there
        return True

    def correct(self, holding: Holding, really: int) -> bool:
        """Corrects a charge to `really` units. Returns whether units became free."""
        state, difference = holding.pool, max(0, really) - holding.units
        if state.window is None:
            return False
        if difference <= 0:
            return self._refund(holding, -difference)
        more = Holding(state, difference, holding.run)
        more.spent = difference
        more.used_at = self.now
        state.charges.append(more)
        state.spent += difference
        state.free -= difference
        self._use(holding.run, state.kind, difference)
        return False

    def _refund(self, holding: Holding, units: int) -> bool:
        """Refunds a charge, except for units that have already come back with time."""
        state = holding.pool
        units = min(units, holding.spent)
        holding.spent -= units
        state.spent -= units
        state.free += units
        self._use(holding.run, state.kind, -units)
        charges = state.charges
        while charges and not charges[-1].spent:
            charges.pop()
        return units > 0

    def resize(self, holding: Holding, units: int) -> None:
        state, difference = holding.pool, units - holding.units
        if difference > max(0, state.free):
            raise InvariantError(
                f"resize oversells {state.name}: {difference} more units wanted, {state.free} of {state.total} free"
            )
        state.held += difference
        state.free -= difference
        if isinstance(state.layout, Cells):
            parts = holding.position or ()
            holding.position = state.layout.adjust(parts, units)  # type: ignore[arg-type]  # of its own kind
        holding.units = units
        self._use(holding.run, state.kind, difference)

    def refill(self, state: PoolState, now: float) -> bool:
        """Frees the spent units that have come back with time, oldest first. Returns whether there are any."""
        if state.window is None or now <= state.window_at:
            return False
        units = state.returned_units(now)
        state.move_window(now, units)
        if not units:
            return False
        state.spent -= units
        state.free += units
        charges = state.charges
        while units:
            charge = charges[0]
            part = min(units, charge.spent)
            charge.spent -= part
            units -= part
            self._use(charge.run, state.kind, -part)
            if not charge.spent:
                charges.popleft()
        return True

    def refill_all(self) -> list[PoolState]:
        """Refills every pool, so that old charges leave the shares of runs. Returns the pools to which units came
        back."""
        refilled = []
        for state in list(self._spending.values()):
            if self.refill(state, self.now):
                refilled.append(state)
            if not state.spent or state.gone:
                del self._spending[state.name]
        return refilled

    # ---- fair share ----

    def new_usage(self) -> RunUsage:
        """Returns the account of a new run."""
        usage = RunUsage(self.now)
        self._usages.append(usage)
        return usage

    def _use(self, run: RunUsage, kind: str, units: int) -> None:
        """Adds `units`, which may be negative, to what the run has of a kind. Most changes need no look at other
        kinds."""
        if kind in self.private_kinds:
            return
        run.average_up_to(self.now)
        used = run.units_by_kind
        before = used.get(kind, 0)
        after = before + units
        if after:
            used[kind] = after
        else:
            used.pop(kind, None)
        total = self.total_by_kind[kind]
        if total <= 0:
            run.share = self._share(run)
        elif units > 0:
            share = after / total / run.weight
            if share > run.share:
                run.share = share
        elif before / total / run.weight >= run.share:
            run.share = self._share(run)

    def _share(self, run: RunUsage) -> float:
        """Returns the largest part that the run has of any kind, divided by its weight."""
        share = 0.0
        totals = self.total_by_kind
        for kind, units in run.units_by_kind.items():
            # Units of a kind whose total has shrunk to 0 count as all of it.
            total = totals[kind]
            part = units / total if total > 0 else 1.0
            if part > share:
                share = part
        return share / run.weight

    def set_weight(self, run: RunUsage, weight: float) -> None:
        run.average_up_to(self.now)
        run.recent *= run.weight / weight
        run.weight = weight
        run.share = self._share(run)

    # ---- checking ----

    def check(self, holdings: Sequence[Holding]) -> None:
        """Recomputes every sum from these holdings, each given once. Raises InvariantError on a difference."""
        by_pool: dict[str, list[Holding]] = {name: [] for name in self.pools}
        for holding in holdings:
            if self.pools.get(holding.pool.name) is not holding.pool:
                raise InvariantError(f"units of {holding.pool.name} are held, but that pool was removed")
            if holding.pool.window is None:
                by_pool[holding.pool.name].append(holding)
        for state in self.pools.values():
            _check_pool(state, by_pool[state.name])
            by_pool[state.name].extend((*state.charges, *state.pending.values()))
        for kind, total in self.total_by_kind.items():
            if total != sum(state.total for state in self.kinds[kind].values()):
                raise InvariantError(f"kind {kind}: total {total} is not the sum of its pools")
        self._check_usages([holding for some in by_pool.values() for holding in some])

    def _check_usages(self, holdings: list[Holding]) -> None:
        used: dict[tuple[int, str], int] = {}
        for holding in holdings:
            if holding.pool.kind in self.private_kinds:
                continue
            key = (id(holding.run), holding.pool.kind)
            used[key] = used.get(key, 0) + (holding.units if holding.pool.window is None else holding.spent)
        for usage in self._usages:
            for kind, units in usage.units_by_kind.items():
                if not units or units != used.pop((id(usage), kind), 0):
                    raise InvariantError(f"a run is charged {units} units of {kind} that it does not hold")
            if usage.share != self._share(usage):
                raise InvariantError(f"a run's share of {usage.share} is not {self._share(usage)}")
        if any(used.values()):
            raise InvariantError(f"no run is charged for {list(used.values())} units")


def _holds(kind: str, total: int, units: int) -> bool:
    """Whether a pool of that size can grant the units. Any amount is enough for a learned reserve; devices come in
    chunks."""
    if units == LEARNED:
        return total > 0
    if kind == GPU and units:
        return chunk_size(units) <= total
    return units <= total


def _check_pool(state: PoolState, holdings: list[Holding]) -> None:
    if state.free + state.held + state.spent != state.total:
        raise InvariantError(
            f"{state.name}: free {state.free} + held {state.held} + spent {state.spent} is not {state.total}"
        )
    held = sum(holding.units for holding in holdings)
    if state.held != held:
        raise InvariantError(f"{state.name}: {state.held} units counted as held, holdings add up to {held}")
    spent = sum(charge.spent for charge in (*state.charges, *state.pending.values()))
    if state.spent != spent:
        raise InvariantError(f"{state.name}: {state.spent} units counted as spent, charges add up to {spent}")
    positions = [holding.position for holding in holdings if holding.position is not None]
    if isinstance(state.layout, Chunks):
        state.layout.check([position for position in positions if isinstance(position, Chunk)])
    elif isinstance(state.layout, CoreSet):
        state.layout.check([core for position in positions for core in position if isinstance(core, int)])
    elif state.layout is not None:
        state.layout.check(positions)  # type: ignore[arg-type]  # the parts of cells
