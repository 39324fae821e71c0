"""The ledger: how many units each pool has, and who holds or has spent them.

Owns every count of units and the place of each inside its node. Never decides anything. Promises
free + held + spent == total for every pool after every call. Free is negative only when a pool shrank or an estimate
was corrected; nothing is granted from it then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from tangram.core.demand import CORE, CPU, GPU, LEARNED, MEMORY, Need
from tangram.core.messages import NodeState, Pool
from tangram.core.topology import Cells, Chunk, Chunks, CoreSet, Parts, chunk_size
from tangram.errors import InvalidConfig, InvariantError

CORE_KIND = "core"
"""Exclusive cores, a static partition of a node: whole cores by id."""

UNIT_ROUNDING = 1e-9
"""Seconds times a rate may come out this much below a whole unit."""


NODES_AWAY_MAX = 256
"""Names of nodes that are down or have no pools yet. Beyond, the one that changed longest ago is forgotten with what it
announced: an autoscaler may give every node a new name. Heard of again it is a new node."""

SHAPES_MAX = 256
"""Different sizes of nodes that went down, kept to tell what may come back from what never was."""

MOVED = CORE // 2
"""Half a core more or less is worth a look at the widths of the elastic actions; less is noise of short calls."""


RECENT_S = 60.0
"""Over which the share of a run is averaged, old times counting less and less. Many times what most actions take, so
that weights are kept where few actions fit into a pool; not so long that a run pays for an hour ago."""

HELD_S = 10.0
"""What a run holds counts as if it had had that for so long already. So of units that come free at once each start
counts, though no time has passed; and little enough, in RECENT_S, that most of what rounding to whole actions takes
from a run is given back to it. With less, a run that waited a moment would be given more than its share to make up for
it, and those whose actions take a minute would swing between all of a pool and nothing."""


class RunUsage:
    """What one run has of every kind, and its weighted dominant share, by which fair share orders runs."""

    __slots__ = ("averaged_at", "recent", "share", "units_by_kind", "weight")

    def __init__(self, now: float) -> None:
        self.weight = 1.0
        self.units_by_kind: dict[str, int] = {}
        """Only kinds of which it has any, or a walk over them would grow with all that the run ever used."""
        self.share = 0.0
        """At the moment."""
        self.recent = 0.0
        """Its average over the last RECENT_S, as of `averaged_at`."""
        self.averaged_at = now

    def standing(self, now: float) -> float:
        """What orders runs, the smallest first: its share on average, and a little of its share now."""
        return self.average(now) + HELD_S / RECENT_S * self.share

    def average_up_to(self, now: float) -> None:
        """Before the share changes: so far it was what it is."""
        if now > self.averaged_at:
            self.recent, self.averaged_at = self.average(now), now

    def forgo(self, least: float, now: float) -> None:
        """It has nothing to catch up: it counts as if it had had at least so much."""
        self.average_up_to(now)
        self.recent = max(self.recent, least)

    def average(self, now: float) -> float:
        share = self.share
        return share + (self.recent - share) * math.exp((self.averaged_at - now) / RECENT_S)


class Holding:
    """Units of one pool in somebody's hands. Actions that ride in one batch share it; the last one gives it back."""

    __slots__ = ("place", "pool", "riders", "run", "spent", "units", "used_at")

    def __init__(self, pool: PoolState, units: int, run: RunUsage) -> None:
        self.pool = pool
        self.units = units
        self.run = run
        self.riders = 1
        self.place: Chunk | Parts | tuple[int, ...] | None = None
        """Where in the layout of its pool; None if the pool had none when the units were taken."""
        self.spent = 0
        """Of a spent pool: the units that time has not given back yet."""
        self.used_at = 0.0
        """In a sliding window: from when on time gives them back."""

    @property
    def cells(self) -> tuple[int, ...]:
        """What a Grant says about the place: NUMA cells, ids of cores or of devices."""
        place = self.place
        if place is None:
            return ()
        if isinstance(place, Chunk):
            return place.devices
        return tuple([part if isinstance(part, int) else part[0] for part in place])


class PoolState:
    """One pool as it is now."""

    __slots__ = (
        "charges", "elastic_held", "elastic_min", "free", "gone", "held", "kind", "looked_at_free", "name", "node",
        "peak", "peak_at", "pending", "place", "spent", "total", "window", "window_at",
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
        """Its node went down: whoever still holds units of it holds nothing."""
        self.place: Chunks | Cells | CoreSet | None = None
        self.window_at = now
        """Fixed window: when the current one began. Bucket: up to when units have come back."""
        self.charges: deque[Holding] = deque()
        """Of a spent pool, what time gives back, oldest first."""
        self.pending: dict[int, Holding] = {}
        """Of a sliding window, what time gives back once its action has ended."""
        self.elastic_held = self.elastic_min = 0
        """CPU: what running elastic actions hold, and the sum of their minima."""
        self.looked_at_free = pool.total
        """CPU: what was free when a policy looked at the pool last."""
        self.peak = 0.0
        """For policies: the most that inelastic actions held, fading since `peak_at`."""
        self.peak_at = now
        self._lay_out(pool)

    def change(self, pool: Pool) -> None:
        """Another total. What is held stays where it is."""
        self.window = pool.window
        self.free += pool.total - self.total
        self.total = pool.total
        self._lay_out(pool)

    def _lay_out(self, pool: Pool) -> None:
        place, cells = self.place, pool.numa or (pool.total,)
        if pool.kind == GPU:
            if isinstance(place, Chunks):
                place.resize(pool.total)
            else:
                self.place = Chunks(pool.total)
        elif pool.kind == CORE_KIND:
            ids = iter(range(pool.total))
            numa = [[next(ids) for _ in range(size)] for size in cells]
            if isinstance(place, CoreSet):
                place.resize(numa)
            else:
                self.place = CoreSet(numa)
        elif pool.kind == CPU:
            if isinstance(place, Cells):
                place.resize(cells)
            elif len(cells) > 1:
                # Units that were taken before lie in no cell: the cells then have more room than the pool, never less.
                self.place = Cells(cells)

    def has_moved(self) -> bool:
        """CPU: is there so much more or less free than at the last look that elastic actions should be resized?"""
        return self.elastic_held > 0 and abs(self.free - self.looked_at_free) >= MOVED

    def is_tight(self, units: int) -> bool:
        """CPU: are few units free, while elastic actions could give some?"""
        return self.elastic_held > self.elastic_min and self.free < max(CORE, 2 * units)

    def fits(self, units: int) -> bool:
        if not isinstance(self.place, Chunks):
            return self.free >= units
        return self.free >= chunk_size(units) and self.place.fits(units)

    def counted(self, units: int) -> int:
        """What the ledger counts when `units` are granted: devices come in whole chunks."""
        return chunk_size(units) if self.kind == GPU else units

    def could_fit(self, units: int) -> bool:
        """Would it fit if nobody had anything?"""
        return _holds(self.kind, self.total, units)

    def devices_free(self, devices: tuple[int, ...]) -> bool:
        """Are these devices, a chunk, all free?"""
        return isinstance(self.place, Chunks) and self.place.is_free((devices[0], len(devices)))

    def free_places(self, units: int, *, smallest: bool = False) -> list[tuple[int, ...]]:
        """The device sets that a call for `units` could get now; `smallest`: those that split no larger chunk than
        necessary. A pool that shrank has none while more is held than it has."""
        assert isinstance(self.place, Chunks), self.name
        places = self.place.places(units, smallest=smallest) if self.fits(units) else []
        return [chunk.devices for chunk in places]

    def free_chunks(self) -> tuple[int, ...]:
        """How many chunks of each level could all be granted now. A pool that shrank has more devices free than units:
        then of the last chunks only the parts that the units are enough for."""
        assert isinstance(self.place, Chunks), self.name
        counts = list(self.place.free_counts())
        units = max(0, self.free)
        for level in reversed(range(len(counts))):
            whole = min(counts[level], units >> level)
            units -= whole << level
            if whole < counts[level]:
                return (*[units >> lower & 1 for lower in range(level)], whole, *counts[level + 1 :])
        return tuple(counts)

    def come_back(self, now: float) -> int:
        """Of a spent pool: how many units time has given back since anybody looked."""
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
        """These units have come back by now."""
        window = self.window
        assert window is not None
        if window.bucket:
            rate = self.total / window.seconds
            coming = self.spent - sum(charge.spent for charge in self.pending.values())
            # Parts of a unit stay due, but an empty bucket of spent units, or one without a rate, has nothing coming.
            self.window_at = now if units == coming or not rate else self.window_at + units / rate
        elif not window.sliding and now >= self.window_at + window.seconds:
            self.window_at += max(1, math.floor((now - self.window_at) / window.seconds)) * window.seconds

    def available_at(self, units: int) -> float:
        """When a spent pool that lacks `units` now will have them, if nothing else is granted from it."""
        window = self.window
        if window is None or units > self.total:
            return math.inf
        if window.sliding:
            return self._slides_at(units - self.free)
        if not window.bucket:
            return self.window_at + window.seconds
        return self.window_at + (units - self.free) * window.seconds / self.total

    def _slides_at(self, units: int) -> float:
        """When so many more will have come back."""
        assert self.window is not None
        for charge in self.charges:
            units -= charge.spent
            if units <= 0:
                return charge.used_at + self.window.seconds
        return math.inf

    def whole_at(self) -> float:
        """When time will have given back all that is spent, if nothing else is granted. The same for one charge as for
        thousands."""
        if self.window is None or self.pending:
            return math.inf
        if self.window.sliding:
            return self.charges[-1].used_at + self.window.seconds if self.charges else self.window_at
        return self.available_at(self.total)

    def statistics(self) -> dict[str, int]:
        return {"total": self.total, "free": self.free, "held": self.held, "spent": self.spent}


class Ledger:
    """All pools. The only place in which units change hands."""

    def __init__(self) -> None:
        self.now = 0.0
        """Of the event that is being handled."""
        self.pools: dict[str, PoolState] = {}
        self.kinds: dict[str, dict[str, PoolState]] = {}
        """Per kind, the pools by node; the one pool of a kind that belongs to no node has the key ''."""
        self._once: dict[str, dict[str, int]] = {}
        """Per node, by kind, the largest total since it joined; '' for the pools that belong to no node."""
        self._shapes: dict[tuple[tuple[str, int], ...], None] = {}
        """The same of nodes that went down, each once, the one seen last at the end."""
        self.total_by_kind: dict[str, int] = {}
        self.nodes: dict[str, NodeState] = {}
        self._away: dict[str, None] = {}
        """Those of them that are down or have no pools, the one that changed last at the end."""
        self._usages: list[RunUsage] = []
        self.private_kinds: set[str] = set()
        """Kinds that do not count in the share of a run."""
        self._spending: dict[str, PoolState] = {}
        """Pools of which something may be spent."""

    # ---- pools and nodes ----

    def change_pool(self, pool: Pool, now: float) -> PoolState:
        """A pool joins or has a new total. Raises InvalidConfig if it contradicts what it was or its siblings are."""
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
                self._away.pop(pool.node, None)
        else:
            if (state.window is None) != (pool.window is None):
                raise InvalidConfig(f"window of pool {pool.name}", pool.window, "units held or spent, as they were")
            self.refill(state, now)
            state.change(pool)
        once = self._once.setdefault(pool.node, {})
        once[pool.kind] = max(pool.total, once.get(pool.kind, 0))
        self._total_again(pool.kind)
        return state

    def change_node(self, node: str, state: NodeState) -> list[PoolState]:
        """A node is up, drains or is down. Returns the pools that are gone, with all that was held there."""
        gone = self._drop_pools(node) if state is NodeState.DOWN else []
        self.nodes[node] = state
        self._away.pop(node, None)
        if not any(node in pools for pools in self.kinds.values()):
            self._away[node] = None
        if len(self._away) > NODES_AWAY_MAX:
            oldest = next(iter(self._away))
            gone.extend(self._drop_pools(oldest))
            del self._away[oldest], self.nodes[oldest]
        return gone

    def _drop_pools(self, node: str) -> list[PoolState]:
        gone = [state for state in self.pools.values() if state.node == node]
        for state in gone:
            state.gone = True
            del self.pools[state.name]
            del self.kinds[state.kind][node]
            self._total_again(state.kind)
        if node in self._once:
            shape = tuple(sorted(self._once.pop(node).items()))
            self._shapes.pop(shape, None)
            self._shapes[shape] = None
            if len(self._shapes) > SHAPES_MAX:
                del self._shapes[next(iter(self._shapes))]
        return gone

    def _total_again(self, kind: str) -> None:
        self.total_by_kind[kind] = sum(state.total for state in self.kinds[kind].values())
        for usage in self._usages:
            usage.average_up_to(self.now)
            usage.share = self._share(usage)

    def could_hold(self, needs: Sequence[Need], node: str, memory: int) -> bool:
        """Could the pools hold these needs together if they were all free? `node` is where they must be, if anywhere;
        `memory` is what a sandbox without a node needs besides."""
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

    def once_held(self, needs: Sequence[Need], node: str, memory: int) -> bool:
        """Were there ever pools that could hold these needs together? Then they may come back."""
        quotas = self._once.get("", {})
        from_quotas = [need for need in needs if need[0] in quotas]
        on_node = [need for need in needs if need[0] not in quotas]
        if memory:
            on_node.append((MEMORY, memory))
        if not all(_holds(kind, quotas[kind], units) for kind, units in from_quotas):
            return False
        if node:
            nodes = [self._once.get(node, {})]
        else:
            nodes = [*(totals for name, totals in self._once.items() if name), *map(dict, self._shapes)]
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
        """Give `units` of a pool to somebody. Spent units are charged, the others held. `at_once` as in the Action."""
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
            layout = state.place
            if isinstance(layout, Chunks):
                holding.place = layout.take(units, preferred)
            elif layout is not None:
                holding.place = layout.take(units)
        self._use(run, state.kind, units)
        return holding

    def give_back(self, holding: Holding, *, refund: bool = False) -> bool:
        """One rider leaves. True when the units are free again (never for spent units, unless refunded)."""
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
        place = holding.place
        if place is not None and state.place is not None:
            state.place.give(place)  # type: ignore[arg-type]  # it came from there
        return True

    def correct(self, holding: Holding, really: int) -> bool:
        """What was spent turned out to be `really` units. True when units came free."""
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
        """Take back a charge as far as time has not: what an earlier window gave back is not given back twice."""
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
        """A running action holds another number of units of the same pool from now on."""
        state, difference = holding.pool, units - holding.units
        if difference > max(0, state.free):
            raise InvariantError(
                f"resize oversells {state.name}: {difference} more units wanted, {state.free} of {state.total} free"
            )
        state.held += difference
        state.free -= difference
        if isinstance(state.place, Cells):
            holding.place = state.place.adjust(holding.place or (), units)  # type: ignore[arg-type]  # of its own kind
        holding.units = units
        self._use(holding.run, state.kind, difference)

    def refill(self, state: PoolState, now: float) -> bool:
        """Let time give back what was spent, oldest first. True when anything came back."""
        if state.window is None or now <= state.window_at:
            return False
        units = state.come_back(now)
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
        """The same for every pool, or a run would go on to be judged by what it spent long ago. Returns those to which
        anything came back."""
        refilled = []
        for state in list(self._spending.values()):
            if self.refill(state, self.now):
                refilled.append(state)
            if not state.spent or state.gone:
                del self._spending[state.name]
        return refilled

    # ---- fair share ----

    def new_usage(self) -> RunUsage:
        """The account of one more run."""
        usage = RunUsage(self.now)
        self._usages.append(usage)
        return usage

    def _use(self, run: RunUsage, kind: str, units: int) -> None:
        """The run has `units` more of a kind, or fewer. Most changes are seen without a look at its other kinds."""
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
        """The largest part that the run has of any kind, over its weight."""
        share = 0.0
        totals = self.total_by_kind
        for kind, units in run.units_by_kind.items():
            # What is left of a kind that has shrunk to nothing counts as all of it.
            total = totals[kind]
            part = units / total if total > 0 else 1.0
            if part > share:
                share = part
        return share / run.weight

    def reweigh(self, run: RunUsage, weight: float) -> None:
        run.average_up_to(self.now)
        run.recent *= run.weight / weight
        run.weight = weight
        run.share = self._share(run)

    # ---- the counts again, from scratch ----

    def check(self, holdings: Sequence[Holding]) -> None:
        """Recompute every sum from what is held, each holding named once. Raises InvariantError on a difference."""
        by_pool: dict[str, list[Holding]] = {name: [] for name in self.pools}
        for holding in holdings:
            if self.pools.get(holding.pool.name) is not holding.pool:
                raise InvariantError(f"units of {holding.pool.name} are held, which is gone")
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
                    raise InvariantError(f"a run is charged {units} units of {kind}, which it has not")
            if usage.share != self._share(usage):
                raise InvariantError(f"a run's share of {usage.share} is not {self._share(usage)}")
        if any(used.values()):
            raise InvariantError(f"nobody is charged for {list(used.values())} units")


def _holds(kind: str, total: int, units: int) -> bool:
    """Can a pool of that size give as many units? Of CPU that is learned any amount will do; devices come in chunks."""
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
    places = [holding.place for holding in holdings if holding.place is not None]
    if isinstance(state.place, Chunks):
        state.place.check([place for place in places if isinstance(place, Chunk)])
    elif isinstance(state.place, CoreSet):
        state.place.check([core for place in places for core in place if isinstance(core, int)])
    elif state.place is not None:
        state.place.check(places)  # type: ignore[arg-type]  # the parts of cells
