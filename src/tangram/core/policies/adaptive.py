"""The default scheduling policy: shortest expected work first, shared cores, resizing of running actions.

Decides how much each action gets, and the order of actions within a run. Which run is next, and which action the policy
may start, is decided by core/offers.py.

Differences from the published algorithm, `Paper` (docs/concepts/policies.md has the measured reasons):

- The order is by expected unit-seconds, smallest first; API calls go by arrival. Ageing in the scheduler prevents
  starvation.
- Undeclared CPU is reserved by learned use, with a generous limit, because tool calls mostly wait. An action with much
  expected remaining work reserves less, and so has a smaller weight: it runs on what short actions leave.
- Elastic CPU actions share by heSRPT over running and waiting actions, and are resized as these change.
- Beyond its minimum, an elastic action leaves room for inelastic actions, which come and go.
- Devices are chosen by the time to finish, restore included, priced by the demand for devices. Waiting calls of one
  service share them, and an idle device gets the service that is most likely to be called next.

Before anything is learned an action counts as one core for one second, which gives first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import nsmallest
from typing import TYPE_CHECKING

from tangram.core.arrange import hesrpt_shares
from tangram.core.demand import CORE, CPU, GPU, Amounts
from tangram.core.lanes import Entry
from tangram.core.ledger import PoolState
from tangram.core.policies.base import Adjust, Begin, Decision, Preload, Retry

if TYPE_CHECKING:
    from tangram.core.snapshot import Candidate, Snapshot

RESERVE_MARGIN = 1.1
"""Reserve this factor of the learned mean use: contention slows all actions, a little slack slows none."""
RESERVE_MIN = 4
"""The least reserve in milli-cores: smaller weights are equal to the kernel."""
SMALL_CORE_S = 0.5
"""Expected core-seconds up to which an action reserves its full use. Beyond it the reserve falls with the square of the
expected remaining work: in overload short calls run as if alone, and long ones share the rest."""
REVIEW_FIRST_S = 4.0
"""A running call is first reviewed after this time."""
REVIEW_GROWTH = 3.0
"""After that it is reviewed whenever its age has grown by this factor."""
REVIEW_STEP_S = 0.01
"""The least time between two reviews: rounding may put a review just before the moment that it waits for."""
REVIEW_SHARE = 0.25
"""The least relative change of a reserve by a review (hysteresis)."""
RESERVE_MAX = 950
"""The largest reserve of undeclared CPU in milli-cores. An action that needs more than a core declares it. A little
less than a core, because waiting processes hold RESERVE_MIN each and a whole core would not fit beside them."""
IDLE_SHARE = 0.5
"""The reserve of an action follows its measured use when that is less than this share of the reserve."""
TIMEOUT_SHARE = 0.5
"""After this share of its timeout an action reserves its full use again, so that sharing does not make it time out."""

FUTURE_EXPONENT = 0.35
"""heSRPT is optimal without further arrivals. A part of the speed-up exponent divides more evenly, which measured best
over loads from 0.3 to 0.9 for mean and tail: wide shares use units less efficiently, and further actions arrive."""
WIDTH_HEADROOM = 8
"""An action is launched this many times wider than its first share, so that it can grow when other actions end."""
RESIZE_SHARE = 0.04
"""The least relative change of a resize (hysteresis): smaller ones cost more than they gain."""
RESIZES_MAX = 32
"""The number of shrinking resizes per round and pool, and of growing ones: each is a file write."""
REST_S = 0.02
"""The delay before the next round of a pool in which more actions than that should shrink."""
GROW_AGE_S = 0.05
"""An action grows only after it has run this long: before that it may be about to end."""
CROWD_MAX = 48
"""Waiting actions that take part in the division. With more, all are at their minimum anyway."""
EVEN_FACTOR = 0.6
"""Without resizing, an action with a high speed-up takes this times p / (1 - p) even parts. p / (1 - p) is optimal when
every unit has the same price; a little less leaves room for the next action."""
EVEN_MIN = 1.2
"""The least number of even parts per action, since some of the live actions are about to end."""
LOAD_MIN = 0.05
"""The least offered load that is assumed when sizing without resizing."""

AHEAD_FACTOR = 3.0
"""A service replaces others ahead of its call only if it is worth this many times as much: worth changes with every
call, and services of equal worth would evict each other repeatedly."""

PEAK_MEMORY_S = 60.0
"""Time constant of the fading peak of inelastic use."""


class _Peak:
    """The most units of a pool that inelastic actions held, fading exponentially."""

    __slots__ = ("_at", "_units", "pool")

    def __init__(self, pool: PoolState) -> None:
        self.pool = pool
        self._units = 0.0
        self._at = 0.0

    def update(self, units: int, now: float) -> float:
        self._units = max(float(units), self._units * math.exp((self._at - now) / PEAK_MEMORY_S))
        self._at = now
        return self._units


class Adaptive:
    """Starts small actions first, reserves the CPU that an action is expected to use, and divides the rest among the
    elastic ones. `resize`: whether it also changes the cores of running actions."""

    strict = False

    def __init__(self, *, resize: bool = True) -> None:
        self.name = "adaptive" if resize else "adaptive:no-resize"
        self.resize = resize
        self._peaks: dict[str, _Peak] = {}
        """The peaks of inelastic use, by CPU pool."""

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        """Expected unit-seconds at the minimum: what the action takes from the others. API calls keep their order,
        because what they take of a quota does not depend on their duration."""
        pools = entry.action.demand.pools
        cpu = pools.get(CPU)
        if cpu is not None:
            estimate = snapshot.estimate(entry)
            return estimate.work_s * (cpu.min / CORE if cpu.declared else min(estimate.busy, cpu.max / CORE))
        return snapshot.estimate(entry).work_s * pools[GPU].min if GPU in pools else 0.0

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        """The learned use, less for actions that are expected to run long. RESERVE_MAX before anything is learned."""
        estimate = snapshot.estimate(entry)
        limit = entry.action.demand.pools[CPU].max
        if not estimate.observations:
            return min(RESERVE_MAX, limit)
        full = min(estimate.busy * RESERVE_MARGIN * CORE, RESERVE_MAX)
        ran_s = 0.0 if entry.started_at is None else snapshot.now - entry.started_at
        timeout_s = entry.action.timeout_s
        if snapshot.is_aged(entry) or (timeout_s is not None and ran_s >= TIMEOUT_SHARE * timeout_s):
            return min(limit, max(RESERVE_MIN, int(full)))
        remaining = estimate.remaining_s(ran_s) * estimate.busy
        if remaining > SMALL_CORE_S:
            full *= (SMALL_CORE_S / remaining) ** 2
        return min(limit, max(RESERVE_MIN, int(full)))

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        for entry in snapshot.due_reviews:
            yield self._review(snapshot, entry)
        targets: dict[str, float] = {}
        pools = list(snapshot.changed.values()) if self.resize else []
        crowded = [pool for pool in pools if self._divide(snapshot, pool, targets)]
        for pool in pools:
            if targets:
                yield from self._shrink(snapshot, pool, targets)
        for candidate in snapshot.candidates():
            yield self._begin(snapshot, candidate, targets)
        for pool in pools:
            if pool in crowded:
                if pool.free < CORE or not pool.elastic_held or snapshot.waiting(pool):
                    continue
                # No action waits any more: divide what the crowd left over.
                self._divide(snapshot, pool, targets)
            if targets:
                yield from self._grow(snapshot, pool, targets)
        for pool in list(snapshot.vacated.values()):
            yield from _restore_ahead(snapshot, pool)

    def _begin(self, snapshot: Snapshot, candidate: Candidate, targets: dict[str, float]) -> Decision:
        entry, node = candidate.entry, candidate.node
        pools = entry.action.demand.pools
        if GPU in pools:
            return _begin_on_devices(snapshot, entry, node)
        cpu = pools.get(CPU)
        if cpu is None:
            return Begin(entry, node)
        if not cpu.declared:
            timeout_s = entry.action.timeout_s
            review_s = REVIEW_FIRST_S if timeout_s is None else min(REVIEW_FIRST_S, TIMEOUT_SHARE * timeout_s)
            return Begin(entry, node, limit=cpu.max, width=cpu.max, review_s=review_s)
        if not cpu.elastic:
            return Begin(entry, node)
        return self._begin_elastic(snapshot, entry, node, cpu, targets)

    # ---- undeclared CPU ----

    def _review(self, snapshot: Snapshot, entry: Entry) -> Decision:
        """Adapts the reserve of an action to its remaining work, which changes as it runs."""
        assert entry.started_at is not None and entry.grant is not None
        pool = snapshot.pool(CPU, entry.grant.node)
        reserve = min(self.reserve(entry, snapshot), entry.reserved + max(0, pool.free))
        if entry.use is not None and entry.use * CORE < IDLE_SHARE * entry.reserved:
            reserve = min(reserve, max(RESERVE_MIN, int(entry.use * RESERVE_MARGIN * CORE)))
        if abs(reserve - entry.reserved) < REVIEW_SHARE * entry.reserved:
            reserve = entry.reserved
        ran_s = snapshot.now - entry.started_at
        review_s = max(REVIEW_FIRST_S, (REVIEW_GROWTH - 1.0) * ran_s)
        if reserve == RESERVE_MIN:
            # Nothing changes before it ages or comes near its timeout.
            review_s = max(review_s, snapshot.ages_in_s(entry))
        timeout_s = entry.action.timeout_s
        if timeout_s is not None and ran_s < TIMEOUT_SHARE * timeout_s:
            review_s = min(review_s, max(REVIEW_STEP_S, TIMEOUT_SHARE * timeout_s - ran_s))
        return Adjust(entry, reserve, entry.limit, review_s=review_s)

    # ---- elastic CPU ----

    def _headroom(self, snapshot: Snapshot, pool: PoolState) -> float:
        """Milli-cores to leave for inelastic actions: the most that they held lately, at most half of the pool."""
        peak = self._peaks.get(pool.name)
        if peak is None or peak.pool is not pool:
            if len(self._peaks) > 2 * len(snapshot.pools):  # drop pools of nodes that have left
                self._peaks = {name: peak for name, peak in self._peaks.items() if name in snapshot.pools}
            peak = self._peaks[pool.name] = _Peak(pool)
        held = snapshot.inelastic_held(pool)
        return max(0.0, min(peak.update(held, snapshot.now), pool.total / 2) - held)

    def _begin_elastic(
        self, snapshot: Snapshot, entry: Entry, node: str, cpu: Amounts, targets: dict[str, float]
    ) -> Decision:
        pool = snapshot.pool(CPU, node)
        # Headroom only limits what is above the minimum: the minimum fits, and an idle core would help no action.
        room = max(cpu.min, pool.free - self._headroom(snapshot, pool))
        if not self.resize:
            return Begin(entry, node, cpu.floor(min(self._lasting_units(snapshot, entry, pool, cpu, room), room)))
        # Only the width is in whole cores: an action that can be resized may start with a fraction of a core.
        units = max(cpu.min, min(int(min(targets.get(entry.id, cpu.min), room)), cpu.max))
        return Begin(entry, node, units, limit=units, width=cpu.floor(min(units * WIDTH_HEADROOM, pool.total)))

    def _lasting_units(self, snapshot: Snapshot, entry: Entry, pool: PoolState, cpu: Amounts, room: float) -> float:
        """Returns milli-cores for an action that keeps them to its end.

        The larger of an even part of the pool among the live actions, more with a high speed-up, and of what every
        action could have at the current load. The latter is load ** (-1 / (1 - p)) times the minimum: on k units an
        action with speed-up k ** p takes k ** (1 - p) times its work, so this fills the pool exactly.
        """
        exponent = snapshot.estimate(entry).exponent
        waiting, _ = snapshot.waiting_counts(pool)
        live_count = max(1, waiting + len(snapshot.running(pool)))
        even = pool.total / live_count * max(EVEN_MIN, EVEN_FACTOR * exponent / (1.0 - exponent))
        load = max(LOAD_MIN, snapshot.offered_load(CPU) / max(pool.total, 1))
        steady = cpu.min * max(1.0, float(load ** (-1.0 / (1.0 - exponent))))
        return max(even, min(steady, room / max(1, waiting)))

    def _divide(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> bool:
        """Divides a pool by heSRPT over its running and waiting elastic actions: writes milli-cores per action to
        `targets`. Returns True if it is too crowded to divide."""
        if pool.free < CORE and pool.elastic_held == pool.elastic_min:
            return True
        elastic, rigid = snapshot.waiting_counts(pool)
        if rigid or elastic * CORE >= pool.total:
            # All actions shrink to their minimum.
            if pool.elastic_held > pool.elastic_min:
                for entry in snapshot.running(pool).values():
                    targets[entry.id] = float(entry.action.demand.pools[CPU].min)
            return True
        if not elastic and not pool.elastic_held:
            return False
        running = list(snapshot.running(pool).values())
        units = max(float(pool.elastic_min), pool.free + pool.elastic_held - self._headroom(snapshot, pool))
        waiting = self._joining(snapshot, pool, units - pool.elastic_min) if elastic else []
        minimum = [float(entry.action.demand.pools[CPU].min) for entry in (*running, *waiting)]
        sizes, exponents, maximum = [], [], []
        for entry in running:
            estimate = snapshot.estimate(entry)
            sizes.append(estimate.remaining_s(entry.done_at(snapshot.now) if entry.started_at is not None else 0.0))
            exponents.append(FUTURE_EXPONENT * estimate.exponent)
            maximum.append(float(entry.width))
        for entry in waiting:
            estimate = snapshot.estimate(entry)
            sizes.append(estimate.work_s)
            exponents.append(FUTURE_EXPONENT * estimate.exponent)
            maximum.append(float(entry.action.demand.pools[CPU].max))
        shares = hesrpt_shares(sizes, exponents, units, minimum, maximum)
        for entry, share in zip(running + waiting, shares, strict=True):
            targets[entry.id] = share
        return False

    def _joining(self, snapshot: Snapshot, pool: PoolState, room: float) -> list[Entry]:
        """Returns the waiting elastic actions, smallest first, whose minima fit beside those of the running ones."""
        joining = []
        for entry in sorted(snapshot.waiting_elastic(pool, CROWD_MAX), key=lambda entry: (entry.key, entry.seq)):
            least = entry.action.demand.pools[CPU].min
            if least > room:
                break
            room -= least
            joining.append(entry)
        return joining

    def _shrink(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> Iterator[Decision]:
        """Shrinks running actions. An action may shrink to its minimum by any amount, because a few milli-cores can
        decide whether another action fits."""
        changes = []
        for entry in snapshot.running(pool).values():
            target = int(targets.get(entry.id, entry.reserved))
            enough = target < entry.reserved * (1.0 - RESIZE_SHARE) or target <= entry.action.demand.pools[CPU].min
            if target < entry.reserved and enough and entry.stop is None:
                changes.append((target - entry.reserved, entry, target))
        if len(changes) > RESIZES_MAX:
            changes = nsmallest(RESIZES_MAX, changes)
            yield Retry(pool.name, REST_S)
        for _, entry, target in changes:
            yield Adjust(entry, target, target)

    def _grow(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> Iterator[Decision]:
        budget, since = RESIZES_MAX, snapshot.now - GROW_AGE_S
        for entry in list(snapshot.running(pool).values()):
            if entry.stop is not None or entry.started_at is None or entry.started_at > since:
                continue
            target = min(int(targets.get(entry.id, 0)), entry.width, entry.reserved + pool.free)
            if target > entry.reserved * (1.0 + RESIZE_SHARE) and budget:
                budget -= 1
                yield Adjust(entry, target, target)


# ---- devices: how many a call gets, which calls share them, what is restored ahead ----------------------------


def _begin_on_devices(snapshot: Snapshot, entry: Entry, node: str) -> Begin:
    amounts = entry.action.demand.pools[GPU]
    if not amounts.elastic:
        return Begin(entry, node, riders=_riders(snapshot, entry, node, amounts.min))
    units = _degree(snapshot, entry, node)
    return Begin(entry, node, units, riders=_riders(snapshot, entry, node, units))


def _degree(snapshot: Snapshot, entry: Entry, node: str) -> int:
    """Returns the number of devices with the earliest end, restore included, priced by the demand for devices."""
    pool = snapshot.pool(GPU, node)
    amounts = entry.action.demand.pools[GPU]
    loaded = snapshot.resident_degrees(entry, node)
    restore_s = snapshot.restore_s(entry.action.service) if entry.action.service else 0.0
    price = (snapshot.waiting(pool) * amounts.min + pool.held) / max(pool.total, 1)
    best, best_cost = amounts.min, float("inf")
    for units in amounts.all(pool.total):
        if pool.fits(units):
            seconds = snapshot.seconds(entry, pool, units) + (0.0 if units in loaded else restore_s)
            cost = seconds * (1.0 + price * units / max(pool.total, 1))
            if cost < best_cost:
                best, best_cost = units, cost
    return best


def _riders(snapshot: Snapshot, entry: Entry, node: str, units: int) -> tuple[Entry, ...]:
    """Returns waiting calls of the same service, from all runs, to share the devices of this call. Leaves an even part
    to every other chunk that could take some; by arrival."""
    service = entry.action.service
    most = snapshot.batch_max(service) - 1 if service else 0
    if most < 1:
        return ()
    pool = snapshot.pool(GPU, node)
    calls_together, services = 0, 0
    lanes = []
    for lane in snapshot.waiting_lanes(pool):
        if lane.service == service and len(lane.kinds) == 1:
            calls_together += lane.waiting
            lanes.append(lane)
        else:
            services += 1
    if calls_together < 2:
        return ()
    if snapshot.restore_s(service) < snapshot.estimate(entry).work_s:
        chunks = len(pool.free_device_sets(units)) - services
    else:
        chunks = sum(degree == units for degree in snapshot.resident_degrees(entry, node))
    most = min(most, -(-calls_together // max(1, chunks)) - 1)
    riders: list[Entry] = []
    for lane in lanes:
        waiting = (other for other in lane.fifo if other.lane is lane and other is not entry)
        admitted = (o for o in waiting if o.sandbox is None and o.action.demand.pools[GPU].admits(units))
        riders.extend(other for other, _ in zip(admitted, range(most), strict=False))
    return tuple(sorted(riders)[:most])


def _restore_ahead(snapshot: Snapshot, pool: PoolState) -> Iterator[Preload]:
    """Restores a service onto devices that no waiting call needs: a service whose calls wait for something else, or
    else the service that is worth most, if that is much more than what it may evict."""
    if pool.free < 1:
        return
    service, service_units, most = "", 0, 0.0
    for lane in snapshot.waiting_lanes(pool):
        amounts = lane.first().action.demand.pools[GPU]
        if not pool.fits(amounts.min):
            return  # a call waits for these devices
        if lane.service and not service and not snapshot.has_free_copy(lane.service):
            service, service_units, most = lane.service, amounts.min, float("inf")
    calls_per_s = 0.0
    if not service:
        for called, units in snapshot.called_services():
            worth = snapshot.sure_worth(called)
            calls_per_s += snapshot.calls_per_s(called)
            if worth > most and pool.fits(units) and not snapshot.is_anywhere(called):
                service, service_units, most = called, units, worth
    if service:
        devices, lost = snapshot.least_worth(pool, service_units)
        lost *= AHEAD_FACTOR
        if pool.free < 2 * service_units:
            # A call that arrives during the restore and finds no other devices waits for half of it on average.
            lost += (calls_per_s * snapshot.restore_s(service)) ** 2 / 2.0
        if most > lost:
            yield Preload(service, pool.node, devices)
