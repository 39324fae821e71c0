"""The ledger: how many units each pool has, and who holds or has spent them.

Owns every count of units and the place of each inside its node. Never decides anything. Promises
free + held + spent == total for every pool after every call. Free is negative only when a pool shrank or an estimate
was corrected; nothing is granted from it then.
"""

from __future__ import annotations

import math
from typing import Any

from tangram.core.demand import CPU, GPU
from tangram.core.messages import NodeState, Pool
from tangram.core.topology import Cells, Chunk, Chunks, CoreSet
from tangram.errors import InvariantError

CORE_KIND = "core"
"""Exclusive cores, a static partition of a node: whole cores by id."""

GONE = "gone"
"""Place of units that lie outside a pool that has shrunk: they vanish when they are given back."""


class Holding:
    """Units of one pool in somebody's hands. Actions that ride in one batch share it; the last one gives it back."""

    __slots__ = ("place", "pool", "riders", "run", "units")

    def __init__(self, pool: PoolState, units: int, place: Any, run: RunUsage) -> None:
        self.pool = pool
        self.units = units
        self.place = place
        self.run = run
        self.riders = 1

    @property
    def cells(self) -> tuple[int, ...]:
        place = self.place
        if place is None or place is GONE:
            return ()
        if isinstance(place, Chunk):
            return place.devices
        if self.pool.kind == CPU:
            return tuple(cell for cell, _ in place)
        return tuple(place)


class RunUsage:
    """What one run has of every kind, and its weighted dominant share, by which fair share orders runs."""

    __slots__ = ("share", "units_by_kind", "weight")

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.units_by_kind: dict[str, float] = {}
        self.share = 0.0


class PoolState:
    """One pool as it is now."""

    __slots__ = ("free", "held", "kind", "name", "node", "place", "pool", "spent", "spent_by_run", "total", "window_at")

    def __init__(self, pool: Pool, now: float) -> None:
        self.pool = pool
        self.name = pool.name
        self.kind = pool.kind
        self.node = pool.node
        self.total = pool.total
        self.held = 0
        self.spent = 0
        self.free = pool.total
        self.place: Chunks | Cells | CoreSet | None = None
        self.window_at = now
        """Fixed window: when the current one began. Bucket: up to when units have come back."""
        self.spent_by_run: dict[int, tuple[RunUsage, float]] = {}
        self._lay_out()

    def _lay_out(self) -> None:
        pool = self.pool
        if pool.kind == GPU:
            self.place = Chunks(pool.total) if pool.total else None
        elif pool.kind == CORE_KIND:
            ids, cells = iter(range(pool.total)), pool.numa or (pool.total,)
            self.place = CoreSet(tuple(tuple(next(ids) for _ in range(size)) for size in cells))
        elif pool.kind == CPU and len(pool.numa) > 1:
            self.place = Cells(pool.numa)

    def fits(self, units: int) -> bool:
        if self.free < units:
            return False
        return self.kind != GPU or (self.place is not None and self.place.fits(units))

    def devices_free(self, devices: tuple[int, ...]) -> bool:
        """Are these devices, a chunk, all free?"""
        return isinstance(self.place, Chunks) and self.place.is_free((devices[0], len(devices)))

    def peek_devices(self, units: int, preferred: list[tuple[int, int]]) -> tuple[int, ...]:
        """The devices that a call for `units` would get now."""
        assert isinstance(self.place, Chunks), self.name
        return self.place.peek(units, preferred).devices

    def rounded(self, units: int) -> int:
        """What asking for `units` really takes: a device chunk is a power of two."""
        return 1 << (units - 1).bit_length() if self.kind == GPU and units > 0 else units

    def available_at(self, units: int, now: float) -> float:
        """When a spent pool will have `units` free, if nothing else is granted from it."""
        window = self.pool.window
        if window is None or units > self.total:
            return math.inf
        if self.free >= units:
            return now
        if not window.bucket:
            return self.window_at + window.seconds
        return self.window_at + (units - self.free) * window.seconds / self.total

    def statistics(self) -> dict[str, int]:
        return {"total": self.total, "free": self.free, "held": self.held, "spent": self.spent}


class Ledger:
    """All pools. The only place in which units change hands."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolState] = {}
        self.kinds: dict[str, dict[str, PoolState]] = {}
        """Per kind, the pools by node; a pool without a node has the key ''."""
        self.total_by_kind: dict[str, int] = {}
        self.nodes: dict[str, NodeState] = {}

    # ---- pools and nodes ----

    def change_pool(self, pool: Pool, now: float, holdings: list[Holding]) -> PoolState:
        """A pool joins or has a new total. `holdings` are those of this pool, which keep their units."""
        state = self.pools.get(pool.name)
        if state is None:
            state = self.pools[pool.name] = PoolState(pool, now)
            self.kinds.setdefault(pool.kind, {})[pool.node] = state
            if pool.node:
                self.nodes.setdefault(pool.node, NodeState.UP)
        else:
            state.pool = pool
            state.free += pool.total - state.total
            state.total = pool.total
            self._lay_out_again(state, holdings)
        self._total_again(pool.kind)
        return state

    def _lay_out_again(self, state: PoolState, holdings: list[Holding]) -> None:
        if isinstance(state.place, Cells) and len(state.pool.numa) == len(state.place.sizes):
            state.place.resize_total(state.pool.numa)
            return
        state.place = None
        state._lay_out()
        for holding in holdings:
            holding.place = self._take_again(state, holding)

    def _take_again(self, state: PoolState, holding: Holding) -> Any:
        """Put a holding where it was in the new layout; what lies outside of it is gone."""
        place, old = state.place, holding.place
        if isinstance(place, Chunks) and isinstance(old, Chunk):
            inside = old.start + old.size <= state.total
            return place.take(old.size, preferred=[old]) if inside else GONE
        if isinstance(place, CoreSet) and isinstance(old, tuple):
            return place.take_exactly(old) if all(core < state.total for core in old) else GONE
        if isinstance(place, Cells):
            return place.take(holding.units)
        return GONE if isinstance(state.place, Chunks | CoreSet) or state.kind in (GPU, CORE_KIND) else None

    def drop_node(self, node: str) -> list[PoolState]:
        """The pools of a dead node, with all that was held there, are gone."""
        gone = [state for state in self.pools.values() if state.node == node]
        for state in gone:
            del self.pools[state.name]
            del self.kinds[state.kind][node]
            self._total_again(state.kind)
        return gone

    def _total_again(self, kind: str) -> None:
        self.total_by_kind[kind] = sum(state.total for state in self.kinds[kind].values())

    # ---- units ----

    def hold(self, state: PoolState, units: int, run: RunUsage, preferred: Any = ()) -> Holding:
        """Give `units` of a pool to somebody. Spent units are charged, the others held."""
        units = state.rounded(units)
        if units > state.free:
            raise InvariantError(
                f"plan oversells {state.name}: {units} units wanted, {state.free} of {state.total} free"
            )
        state.free -= units
        if state.pool.window is not None:
            state.spent += units
            _, spent = state.spent_by_run.get(id(run), (run, 0.0))
            state.spent_by_run[id(run)] = (run, spent + units)
            place = None
        else:
            state.held += units
            layout = state.place
            if layout is None:
                place = None
            elif isinstance(layout, Chunks):
                place = layout.take(units, preferred=preferred)
            else:
                place = layout.take(units)
        self._use(run, state.kind, units)
        return Holding(state, units, place, run)

    def give_back(self, holding: Holding, *, refund: bool = False) -> bool:
        """One rider leaves. True when the units are free again (never for spent units, unless refunded)."""
        holding.riders -= 1
        if holding.riders:
            return False
        state, units = holding.pool, holding.units
        if self.pools.get(state.name) is not state:
            self._use(holding.run, state.kind, -units)
            return False
        if state.pool.window is not None:
            return refund and self._refund(holding, units)
        state.held -= units
        state.free += units
        if state.place is not None and holding.place is not GONE:
            state.place.give(holding.place)
        self._use(holding.run, state.kind, -units)
        return True

    def _refund(self, holding: Holding, units: int) -> bool:
        state = holding.pool
        units = min(units, state.spent)
        state.spent -= units
        state.free += units
        run, spent = state.spent_by_run.get(id(holding.run), (holding.run, 0.0))
        state.spent_by_run[id(run)] = (run, max(0.0, spent - units))
        self._use(run, state.kind, -min(units, spent))
        return units > 0

    def correct(self, holding: Holding, really: int) -> bool:
        """What was spent turned out to be `really` units. True when units came free."""
        state, difference = holding.pool, really - holding.units
        if state.pool.window is None or self.pools.get(state.name) is not state:
            return False
        if difference <= 0:
            return self._refund(holding, -difference)
        state.spent += difference
        state.free -= difference
        run, spent = state.spent_by_run.get(id(holding.run), (holding.run, 0.0))
        state.spent_by_run[id(run)] = (run, spent + difference)
        self._use(run, state.kind, difference)
        return False

    def resize(self, holding: Holding, units: int) -> None:
        """A running action holds another number of units of the same pool from now on."""
        state, difference = holding.pool, units - holding.units
        if difference > state.free:
            raise InvariantError(
                f"resize oversells {state.name}: {difference} more units wanted, {state.free} of {state.total} free"
            )
        state.held += difference
        state.free -= difference
        if isinstance(state.place, Cells):
            holding.place = state.place.adjust(holding.place, units)
        holding.units = units
        self._use(holding.run, state.kind, difference)

    def refill(self, state: PoolState, now: float) -> bool:
        """Let time give back what was spent. True when anything came back."""
        window = state.pool.window
        if window is None or now <= state.window_at:
            return False
        if window.bucket:
            rate = state.total / window.seconds
            units = min(state.spent, int((now - state.window_at) * rate + 1e-9))
            state.window_at = now if units == state.spent else state.window_at + units / rate
        else:
            periods = math.floor((now - state.window_at) / window.seconds + 1e-9)
            units = state.spent if periods else 0
            state.window_at += periods * window.seconds
        if not units:
            return False
        keep = 1.0 - units / state.spent
        state.spent -= units
        state.free += units
        for key, (run, spent) in list(state.spent_by_run.items()):
            self._use(run, state.kind, -spent * (1.0 - keep))
            if spent * keep < 0.5:
                del state.spent_by_run[key]
                self._use(run, state.kind, -spent * keep)
            else:
                state.spent_by_run[key] = (run, spent * keep)
        return True

    # ---- fair share ----

    def _use(self, run: RunUsage, kind: str, units: float) -> None:
        used = run.units_by_kind
        used[kind] = used.get(kind, 0) + units
        share = 0.0
        totals = self.total_by_kind
        for name, amount in used.items():
            total = totals[name]
            if amount and total and amount > share * total:
                share = amount / total
        run.share = share / run.weight

    def reweigh(self, run: RunUsage, weight: float) -> None:
        run.share *= run.weight / weight
        run.weight = weight

    # ---- the counts again, from scratch ----

    def check(self, holdings: list[Holding]) -> None:
        """Recompute every sum from what is held. Raises InvariantError on the first difference."""
        held: dict[str, int] = {}
        seen: dict[int, Holding] = {}
        for holding in holdings:
            if id(holding) in seen or holding.pool.pool.window is not None:
                continue
            seen[id(holding)] = holding
            held[holding.pool.name] = held.get(holding.pool.name, 0) + holding.units
        for state in self.pools.values():
            if state.free + state.held + state.spent != state.total:
                raise InvariantError(
                    f"{state.name}: free {state.free} + held {state.held} + spent {state.spent} is not {state.total}"
                )
            if state.held != held.get(state.name, 0):
                raise InvariantError(f"{state.name}: {state.held} units held, but holdings add up to {held}")
            if isinstance(state.place, Chunks | CoreSet):
                state.place.check()
        for kind, total in self.total_by_kind.items():
            if total != sum(state.total for state in self.kinds[kind].values()):
                raise InvariantError(f"kind {kind}: total {total} is not the sum of its pools")
