"""Weighted max-min fair sharing of a node's cores, computed exactly and lazily.

Owns the progress of CPU work on one node. It does not decide what runs and handles no events: the engine queries the
next completion and reports changes. After every call:

    rate of an action = min(its demand, level * its weight),   sum of rates = min(capacity, sum of demands)

which is weighted max-min fairness with caps, as the kernel divides CPU among cgroups by weight and quota. `level` is
one number for the node: cores per unit of weight, infinite without contention.

How it stays cheap. Actions with the same ratio `tau` = demand / weight are slowed alike, so they form a tier. A tier
is *capped* (full speed) while level >= tau, else *floating* (its rate follows the level). Tiers are sorted by tau, so
the floating ones are the tail from a border on, and a change moves the border over the affected tiers only.
Four clocks keep all other tiers untouched:

    time                          completions of capped tiers are kept in it
    given                         core-seconds per unit of weight; runs at `level`; completions of floating tiers
    full-speed time of a tier     time minus what the tier has lost to contention; completions of its own actions
    short                         seconds in which the level was below one: weights are reservations, so a floating
                                  tier then had less than its reservation, and less than it could use

The loss of a tier that was never slowed is exactly zero, so its actions complete exactly at start + work / demand.

A change costs O(log n) comparisons, plus O(log n) for each tier that crosses the border: none while the node has cores
to spare, about one under contention, and in the order of sqrt(n) only where contention sets in and all ratios differ.
Sorted lists are shifted by memmove, which is linear but about 0.1 ns per entry.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec

from tangram.core.speedup import Speedup
from tangram.errors import InvariantError

CAPACITY_SLACK = 1e-9
"""Demand above capacity by less than this share is not contention. Sums of decimal demands miss the capacity by
rounding alone (640 times 0.1 is not 64), and running sums drift by up to RESUM_EVERY half-ulps, 5e-13."""

RESUM_EVERY = 4096
"""Changes between exact recomputations of the running sums: rare enough to cost nothing, often enough that drift
stays three orders of magnitude below CAPACITY_SLACK."""

TIME_ROUNDING = 1e-9
"""Work within this share of the current time of its completion is complete. A completion time is returned as a rounded
float, so at that time a few ulps of work may remain or be overrun."""

RESERVE_SLACK = 1e-6
"""A level this close to one counts as one: reservations that fill the node sum to its capacity up to rounding."""

HEAP_SLACK = 64
"""Outdated entries that a heap may hold beyond the number of valid ones before it is rebuilt."""

CHECK_TOLERANCE = 1e-6
"""Relative difference from the naive recomputation that `check` attributes to rounding."""


def full_speed(width: float, limit: float, speedup: Speedup) -> float:
    """Return the speed, relative to one unit, of an action launched `width` wide and limited to `limit` cores.

    This is the speed with all the CPU that it can use at this limit. Below one core the action is still one unit that
    waits for CPU; its demand contains that waiting, so it is not counted here a second time.
    """
    return speedup.at(_units(width, limit))


def core_seconds(work_s: float, speed: float, cores: float) -> float:
    """Return the CPU work of `work_s` one-unit seconds done at `speed` while keeping `cores` cores busy."""
    return work_s / speed * cores


def shape(work_s: float, busy: float, speedup: Speedup, width: float, limit: float) -> tuple[float, float]:
    """The core-seconds and the demand in cores of an action as `CpuShare.add` wants them.

    With e = max(1, min(limit, width)) units at work, it runs at speed s(e) when it gets the busy * e cores that it
    wants. A limit below that slows it in proportion and leaves its core-seconds unchanged. So, alone on a node:

        elastic, up to one core per unit:   wall = work_s / s(min(limit, width)),  cores = busy * min(limit, width)
        not elastic (width is 1):           wall = work_s * max(1, busy / limit),  cores = min(limit, busy)

    At a resize, new core-seconds / old core-seconds of the whole action is the `scale` of `CpuShare.reconfigure`.
    """
    demand = busy * _units(width, limit)
    return core_seconds(work_s, full_speed(width, limit, speedup), demand), min(limit, demand)


def _units(width: float, limit: float) -> float:
    """Units at work: at most as many as were launched and as have a core, never less than one."""
    return max(1.0, min(limit, width))


class CpuUsage(NamedTuple):
    """The CPU accounting of a removed action."""

    remaining_core_s: float
    used_core_s: float
    slowed_s: float
    """Seconds lost to contention: the integral of 1 - rate / demand."""
    starved_s: float
    """Seconds in which its rate was below both its weight (its reservation) and its demand."""


class _CpuAction:
    """One action. Its stamps are from the time it entered its tier; earlier totals are in `used`, `slowed`,
    `starved_s`."""

    __slots__ = (
        "demand", "entry", "finish", "key", "lost", "order", "since", "slowed", "starved", "starved_s", "tier", "used",
        "weight",
    )  # fmt: skip

    def __init__(self, key: str, order: int) -> None:
        self.key = key
        self.order = order
        self.used = 0.0
        self.slowed = 0.0
        self.starved_s = 0.0
        self.tier: _Tier
        self.demand: float
        self.weight: float
        self.finish: float
        """Completion in the full-speed time of the tier."""
        self.since: float
        self.lost: float
        """The tier's `lost` at `since`."""
        self.starved: float
        """The tier's `starved` at `since`."""
        self.entry: _Entry
        """The valid entry in the heap of the tier."""


_Entry = tuple[float, int, _CpuAction]
"""(completion, insertion order, action): the order is unique, so a comparison never reaches the action."""


class _Tier(msgspec.Struct, eq=False):
    """All actions with one tau. Full-speed time = time - lost."""

    tau: float
    demand: float = 0.0
    weight: float = 0.0
    count: int = 0
    heap: list[_Entry] = []
    """Entries by full-speed time; the first is always valid."""
    entry: _Entry | None = None
    """The valid entry, for the tier's first action, in a heap of the node."""
    floating: bool = False
    lost: float = 0.0
    """Seconds lost: up to now if capped, up to `since` if floating."""
    since: float = 0.0
    given_s: float = 0.0
    """The node's clock of the same name at `since`."""
    starved: float = 0.0
    """Seconds starved: up to now if capped, up to `since` if floating."""
    short: float = 0.0
    """The node's clock of the same name at `since`."""

    def start_floating(self, now: float, given_s: float, short: float) -> None:
        self.floating, self.since, self.given_s, self.short = True, now, given_s, short

    def lost_at(self, now: float, given_s: float) -> float:
        if not self.floating:
            return self.lost
        return self.lost + max(0.0, now - self.since - (given_s - self.given_s) / self.tau)

    def starved_at(self, short: float) -> float:
        return self.starved + (short - self.short) if self.floating else self.starved

    def drop_outdated(self) -> None:
        """Drop outdated entries until the first one is valid; rebuild the heap if it is too large."""
        heap = self.heap
        if len(heap) > 2 * self.count + HEAP_SLACK:
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)
        while heap[0][2].entry is not heap[0]:
            heappop(heap)


_NO_ENTRY: _Entry = (math.inf, -1, _CpuAction("", -1))
"""The entry of an action that left its tier; equal to no entry in a heap."""


class CpuShare:
    """The running actions of one node. Every call passes the current time, which never decreases."""

    def __init__(self, capacity: float) -> None:
        self._capacity = _valid_capacity(capacity)
        self._now = 0.0
        self._running: dict[str, _CpuAction] = {}
        self._order = 0
        self._tier_by_tau: dict[float, _Tier] = {}
        self._taus: list[float] = []
        self._tiers: list[_Tier] = []
        """Sorted like `_taus`; capped before the border, floating from it on."""
        self._border = 0
        self._by_time: list[_Entry] = []
        self._by_given: list[_Entry] = []
        self._demand = 0.0
        self._floating_demand = 0.0
        self._floating_weight = 0.0
        self._level = math.inf
        self._given_s = 0.0
        self._short = 0.0
        self._busy = 0.0
        self._used = 0.0
        self._used_by_removed = 0.0
        self._changes = 0

    def add(self, key: str, work: float, demand: float, weight: float, now: float) -> None:
        """Add an action that has `work` core-seconds to do, can use `demand` cores and has reserved `weight`."""
        if key in self._running:
            raise InvariantError(f"action {key!r} already runs on this node")
        _require_positive(key, work, demand, weight)
        self._advance(now)
        self._order += 1
        action = _CpuAction(key, self._order)
        self._running[key] = action
        self._enter(action, work, demand, weight)
        self._rebalance()

    def remove(self, key: str, now: float) -> CpuUsage:
        """Remove an action, complete or not."""
        action = self._find(key)
        self._advance(now)
        remaining = self._leave(action)
        del self._running[key]
        self._used_by_removed += action.used
        self._rebalance()
        return CpuUsage(remaining, action.used, action.slowed, action.starved_s)

    def reconfigure(self, key: str, now: float, *, demand: float, weight: float, scale: float = 1.0) -> None:
        """Change the demand and the weight of an action, and multiply its remaining work by `scale`."""
        action = self._find(key)
        _require_positive(key, scale, demand, weight)
        self._advance(now)
        remaining = self._leave(action)
        self._enter(action, remaining * scale, demand, weight)
        self._rebalance()

    def set_capacity(self, capacity: float, now: float) -> None:
        self._advance(now)
        self._capacity = _valid_capacity(capacity)
        self._rebalance()

    def next_completion(self) -> tuple[float, str] | None:
        """Return when and which action completes next if nothing changes; of several, the one added first.

        None if nothing runs, or if the node has no capacity.
        """
        first = self._first_of(self._by_time)
        floating = self._first_of(self._by_given)
        if floating is not None:
            left = max(0.0, floating[0] - self._given_s)
            wait_s = left / self._level if self._level else math.inf if left else 0.0
            due = (self._now + wait_s, floating[1], floating[2])
            if wait_s < math.inf and (first is None or due[:2] < first[:2]):
                first = due
        return None if first is None else (max(first[0], self._now), first[2].key)

    @property
    def busy(self) -> float:
        """Cores in use now: the sum of the rates."""
        return self._busy

    def used(self, key: str, now: float) -> float:
        """Core-seconds that a running action has consumed."""
        action = self._find(key)
        self._advance(now)
        lost = action.tier.lost_at(self._now, self._given_s) - action.lost
        return action.used + action.demand * max(0.0, now - action.since - lost)

    def used_total(self, now: float) -> float:
        """Core-seconds consumed on the node since the start."""
        self._advance(now)
        return self._used

    def slowed_s(self, key: str, now: float) -> float:
        """Seconds that a running action has lost to contention: the integral of 1 - rate / demand."""
        action = self._find(key)
        self._advance(now)
        return action.slowed + action.tier.lost_at(now, self._given_s) - action.lost

    def starved_s(self, key: str, now: float) -> float:
        """Seconds in which a running action got less than its weight and less than it could use."""
        action = self._find(key)
        self._advance(now)
        return action.starved_s + action.tier.starved_at(self._short) - action.starved

    def _find(self, key: str) -> _CpuAction:
        action = self._running.get(key)
        if action is None:
            raise InvariantError(f"no action {key!r} runs on this node")
        return action

    def _advance(self, now: float) -> None:
        elapsed = now - self._now
        if elapsed > 0.0:
            self._used += self._busy * elapsed
            if self._floating_weight:
                self._given_s += self._level * elapsed
                if self._level < 1.0 - RESERVE_SLACK:
                    self._short += elapsed
            self._now = now
        elif elapsed != 0.0:
            raise InvariantError(f"time never goes back: it is {self._now!r}, but a call passed {now!r}")

    def _enter(self, action: _CpuAction, work: float, demand: float, weight: float) -> None:
        """Put an action that is in no tier into the tier of its ratio."""
        tau = demand / weight
        tier = self._tier_by_tau.get(tau) or self._open(tau)
        now = self._now
        lost = tier.lost_at(now, self._given_s)
        action.tier, action.demand, action.weight = tier, demand, weight
        action.since, action.lost, action.starved = now, lost, tier.starved_at(self._short)
        action.finish = now - lost + work / demand
        action.entry = (action.finish, action.order, action)
        tier.count += 1
        self._count(tier, demand, weight)
        heappush(tier.heap, action.entry)
        if tier.heap[0] is action.entry:
            self._push_completion(tier)

    def _leave(self, action: _CpuAction) -> float:
        """Take an action out of its tier, settle its accounts and return the remaining core-seconds."""
        tier, now = action.tier, self._now
        lost = tier.lost_at(now, self._given_s)
        left_s = action.finish - (now - lost)
        dust = TIME_ROUNDING * (1.0 + now)
        if left_s < -dust:
            raise InvariantError(f"action {action.key!r} ran {-left_s:g} s past its completion, now is {now!r}")
        action.used += action.demand * max(0.0, now - action.since - (lost - action.lost))
        action.slowed += max(0.0, lost - action.lost)
        action.starved_s += tier.starved_at(self._short) - action.starved
        entry, action.entry = action.entry, _NO_ENTRY
        tier.count -= 1
        self._count(tier, -action.demand, -action.weight)
        if not tier.count:
            self._close(tier)
        elif tier.heap[0] is entry:
            tier.drop_outdated()
            self._push_completion(tier)
        elif len(tier.heap) > 2 * tier.count + HEAP_SLACK:
            tier.drop_outdated()
        return left_s * action.demand if left_s > dust else 0.0

    def _count(self, tier: _Tier, demand: float, weight: float) -> None:
        tier.demand += demand
        tier.weight += weight
        self._demand += demand
        if tier.floating:
            self._floating_demand += demand
            self._floating_weight += weight

    def _open(self, tau: float) -> _Tier:
        tier = _Tier(tau)
        place = bisect_left(self._taus, tau)
        self._taus.insert(place, tau)
        self._tiers.insert(place, tier)
        self._tier_by_tau[tau] = tier
        if tau <= self._level:
            self._border += 1
        else:
            tier.start_floating(self._now, self._given_s, self._short)
        return tier

    def _close(self, tier: _Tier) -> None:
        place = bisect_left(self._taus, tier.tau)
        del self._taus[place], self._tiers[place], self._tier_by_tau[tier.tau]
        tier.entry = None
        if not tier.floating:
            self._border -= 1

    def _rebalance(self) -> None:
        """After a change, move the border to its new place and set the level."""
        self._changes += 1
        if self._changes >= RESUM_EVERY:
            self._resum()
        if not self._tiers:
            self._demand = 0.0
        if self._demand <= self._capacity * (1.0 + CAPACITY_SLACK):
            if self._level != math.inf:
                self._end_contention()
            self._busy = self._demand
            return
        taus, tiers, last = self._taus, self._tiers, len(self._tiers) - 1
        if self._border > last:
            self._floating_demand = self._floating_weight = 0.0
            self._float_tier(tiers[last])
        # At the border b, total use at level tau[b] decides: a tier is capped iff the capacity suffices for it. This
        # is monotone in b, so only one of the two loops runs. The last tier floats, or there would be no contention.
        while self._border and self._remaining_capacity() < taus[self._border - 1] * self._floating_weight:
            self._float_tier(tiers[self._border - 1])
        while self._border < last and self._remaining_capacity() >= taus[self._border] * self._floating_weight:
            self._cap_tier(tiers[self._border])
        # The level is between the taus at the border; rounding could move it outside where little weight floats.
        border = self._border
        level = min(self._remaining_capacity() / self._floating_weight, taus[border])
        self._level = max(level, taus[border - 1]) if border else level
        self._busy = self._capacity

    def _end_contention(self) -> None:
        """Cap every tier and reset the clocks and sums that only floating tiers use, which also resets their rounding
        errors."""
        while self._border < len(self._tiers):
            self._cap_tier(self._tiers[self._border])
        self._floating_demand = self._floating_weight = self._given_s = 0.0
        self._level = math.inf
        self._by_given.clear()

    def _remaining_capacity(self) -> float:
        """Cores that capped tiers leave to floating ones."""
        return self._capacity - (self._demand - self._floating_demand) if self._border else self._capacity

    def _float_tier(self, tier: _Tier) -> None:
        """Let the last capped tier follow the level."""
        self._border -= 1
        tier.start_floating(self._now, self._given_s, self._short)
        self._floating_demand += tier.demand
        self._floating_weight += tier.weight
        self._push_completion(tier)

    def _cap_tier(self, tier: _Tier) -> None:
        """Give the first floating tier all that it can use."""
        self._border += 1
        tier.lost = tier.lost_at(self._now, self._given_s)
        tier.starved = tier.starved_at(self._short)
        tier.floating = False
        self._floating_demand -= tier.demand
        self._floating_weight -= tier.weight
        self._push_completion(tier)

    def _push_completion(self, tier: _Tier) -> None:
        """Push the first completion of a tier onto the heap of its clock; its earlier entry becomes outdated."""
        finish, order, action = tier.heap[0]
        if tier.floating:
            heap = self._by_given
            finish = tier.given_s + (finish - (tier.since - tier.lost)) * tier.tau
        else:
            heap = self._by_time
            finish += tier.lost
        tier.entry = (finish, order, action)
        heappush(heap, tier.entry)
        if len(heap) > 2 * len(self._tiers) + HEAP_SLACK:
            heap[:] = [entry for entry in heap if entry[2].tier.entry is entry]
            heapify(heap)

    @staticmethod
    def _first_of(heap: list[_Entry]) -> _Entry | None:
        while heap:
            entry = heap[0]
            if entry[2].tier.entry is entry:
                return entry
            heappop(heap)
        return None

    def _resum(self) -> None:
        self._changes = 0
        demands: dict[float, list[float]] = {tau: [] for tau in self._taus}
        weights: dict[float, list[float]] = {tau: [] for tau in self._taus}
        for action in self._running.values():
            demands[action.tier.tau].append(action.demand)
            weights[action.tier.tau].append(action.weight)
        for tier in self._tiers:
            tier.demand = math.fsum(demands[tier.tau])
            tier.weight = math.fsum(weights[tier.tau])
        self._demand = math.fsum(tier.demand for tier in self._tiers)
        self._floating_demand = math.fsum(tier.demand for tier in self._tiers[self._border :])
        self._floating_weight = math.fsum(tier.weight for tier in self._tiers[self._border :])

    def check(self, now: float) -> None:
        """Recompute rates, sums and the next completion from the actions alone; raise where they differ."""
        self._advance(now)
        actions = list(self._running.values())
        level = _level_of(self._capacity, [(action.demand, action.weight) for action in actions])
        rates = [min(action.demand, level * action.weight) for action in actions]
        for action, rate in zip(actions, rates, strict=True):
            tier = action.tier
            expected = min(tier.tau, self._level) * action.weight
            _require_close(f"rate of {action.key!r}", expected, rate, action.demand)
            if tier.floating != (tier.tau > self._level) and abs(tier.tau / self._level - 1.0) > CHECK_TOLERANCE:
                raise InvariantError(f"tier {tier.tau!r} floats: {tier.floating}, at level {self._level!r}")
        _require_close("cores busy", self._busy, math.fsum(rates), self._capacity)
        _require_close("demand", self._demand, math.fsum(action.demand for action in actions), self._demand)
        used = math.fsum([self._used_by_removed, *(self.used(action.key, now) for action in actions)])
        _require_close("core-seconds used", self._used, used, 1.0 + used)
        if self._taus != sorted({action.demand / action.weight for action in actions}):
            raise InvariantError(f"tiers are {self._taus!r}, which are not the ratios of the running actions")
        self._check_next(actions, rates)

    def _check_next(self, actions: list[_CpuAction], rates: list[float]) -> None:
        if not self._busy:
            return  # Nothing runs, or at rate zero, where rounding decides whether a finished action is due.
        due = math.inf
        for action, rate in zip(actions, rates, strict=True):
            left_s = action.finish - (self._now - action.tier.lost_at(self._now, self._given_s))
            due = min(due, self._now + max(0.0, left_s) * action.demand / rate)
        completion = self.next_completion()
        if completion is None:
            raise InvariantError(f"no next completion, recomputed at {due!r}")
        _require_close(f"completion of {completion[1]!r}", completion[0], due, 1.0 + due)


def _level_of(capacity: float, shares: list[tuple[float, float]]) -> float:
    """Compute the level by water-filling: cap the smallest ratio of (demand, weight) while the capacity suffices."""
    if math.fsum(demand for demand, _ in shares) <= capacity * (1.0 + CAPACITY_SLACK):
        return math.inf
    shares = sorted(shares, key=lambda share: share[0] / share[1])
    weights = math.fsum(weight for _, weight in shares)
    for demand, weight in shares:
        if capacity < demand / weight * weights:
            break
        capacity -= demand
        weights -= weight
    return capacity / weights


def _valid_capacity(capacity: float) -> float:
    if not 0.0 <= capacity < math.inf:
        raise InvariantError(f"capacity: expected a finite number of cores, at least 0, got {capacity!r}")
    return capacity


def _require_positive(key: str, amount: float, demand: float, weight: float) -> None:
    if not (0.0 <= amount < math.inf and 0.0 < demand < math.inf and 0.0 < weight < math.inf):
        raise InvariantError(
            f"action {key!r}: expected work or scale >= 0, demand > 0 and weight > 0, all finite, "
            f"got {amount!r}, {demand!r} and {weight!r}"
        )


def _require_close(what: str, kept: float, recomputed: float, size: float) -> None:
    if abs(kept - recomputed) > CHECK_TOLERANCE * max(size, abs(recomputed)):
        raise InvariantError(f"{what}: kept {kept!r}, recomputed {recomputed!r}")
