"""The default policy: size-aware, sharing, resizing.

What it does beyond the published algorithm (docs/concepts/policies.md has the reasons, measured):

- order by expected unit-seconds, smallest first, and calls of APIs by arrival; ageing in the scheduler keeps that
  from starving anybody;
- CPU that nobody declared is reserved by learned real use, with a generous limit, because tool calls mostly wait. An
  action whose expected remaining work is large reserves, and so weighs, less: it runs on what the short ones leave;
- elastic CPU actions share by heSRPT over what runs and what waits, and are resized as that changes;
- beyond its minimum, an elastic action leaves room for the inelastic ones that come and go;
- devices are chosen by time to finish including the restore, priced by how many others want devices; calls of one
  service that wait together share them, and an idle device gets the service that is most likely to be called next.

With nothing learned yet an action counts as one core for one second, which is first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import TYPE_CHECKING

from tangram.core.arrange import hesrpt_shares
from tangram.core.demand import CORE, CPU, GPU, Amounts
from tangram.core.lanes import Entry
from tangram.core.ledger import PoolState
from tangram.core.policies import devices
from tangram.core.policies.base import Adjust, Begin, Decision

if TYPE_CHECKING:
    from tangram.core.snapshot import Candidate, Snapshot

RESERVE_MARGIN = 1.1
"""Reserve this much above the learned mean use: contention slows everybody, a little slack slows nobody."""
RESERVE_MIN = 4
"""Milli-cores reserved at least: the smallest weight that the kernel can tell from the next one."""
SMALL_CORE_S = 0.5
"""Expected core-seconds up to which an action reserves its full use. Beyond, the reserve falls with the square of
what is expected to remain: in overload the short calls then run as if alone, and long ones share the rest."""
REVIEW_FIRST_S = 4.0
"""A running call is looked at again after this time ..."""
REVIEW_GROWTH = 3.0
"""... and then whenever its age has grown by this factor."""
REVIEW_STEP_S = 0.01
"""No review is closer to the one before: rounding may put the moment that it waits for just behind it."""
REVIEW_SHARE = 0.25
"""A review that would change the reserve by less than this share leaves it."""
RESERVE_MAX = 950
"""Milli-cores at most, for what nobody declared. Whoever needs more than a core for sure says so. A little less than a
core, because those who only wait hold RESERVE_MIN each, and would keep a whole one from fitting beside them."""
IDLE_SHARE = 0.5
"""An action that was measured to use less than this share of its reserve does not need it: the reserve follows the use,
since CPU that is reserved for it was there to be used."""
REVIEWS_MAX = 16
"""Reviews per round; those left over wait for the next event."""
TIMEOUT_SHARE = 0.5
"""Past this share of its timeout an action reserves its full use again: sharing must not make it time out."""

FUTURE_EXPONENT = 0.35
"""heSRPT is optimal when nobody else comes. A part of the speed-up exponent divides more evenly, which measured best
over loads 0.3 to 0.9 for both mean and tail: wide shares use units less efficiently, and others do come."""
WIDTH_HEADROOM = 8
"""An action is launched this many times wider than its first share, so that it can grow when others leave."""
RESIZE_SHARE = 0.04
"""A resize must change the limit by this share at least; smaller ones cost more than they bring."""
RESIZES_MAX = 32
"""Resizes per round and pool that make actions narrower, and as many that make them wider: each is a file write."""
REST_S = 0.02
"""When to look again at a pool where more than that many were to become narrower."""
GROW_AGE_S = 0.05
"""An action that has just started becomes wider once it has run so long: it may be about to end."""
CROWD_MAX = 48
"""Waiting actions that take part in the division; with more, everybody is at its minimum anyway."""
EVEN_FACTOR = 0.6
"""Without resizing: an action that speeds up well takes this times p / (1 - p) even parts. p / (1 - p) is the optimum
when every unit has the same price; a little less leaves room for whoever comes next."""
EVEN_MIN = 1.2
"""Even parts that every action takes at least, since some of those present are about to leave."""
LOAD_MIN = 0.05
"""Offered load taken for granted when sizing without resizing."""


class Adaptive:
    strict = False

    def __init__(self, *, resize: bool = True) -> None:
        self.name = "adaptive" if resize else "adaptive:no-resize"
        self.resize = resize

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        """Expected unit-seconds at the minimum: what the action takes away from the others. Calls of APIs keep their
        order: what they take of a quota does not depend on how long they last."""
        pools = entry.action.demand.pools
        cpu = pools.get(CPU)
        if cpu is not None:
            estimate = snapshot.estimate(entry)
            return estimate.work_s * (cpu.min / CORE if cpu.declared else min(estimate.busy, cpu.max / CORE))
        return snapshot.estimate(entry).work_s * pools[GPU].min if GPU in pools else 0.0

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        """Learned use, less for what is expected to run long; RESERVE_MAX while nothing is known."""
        estimate = snapshot.estimate(entry)
        limit = entry.action.demand.pools[CPU].max
        if not estimate.observations:
            return min(RESERVE_MAX, limit)
        full = min(estimate.busy * RESERVE_MARGIN * CORE, RESERVE_MAX)
        ran_s = 0.0 if entry.started_at is None else snapshot.now - entry.started_at
        timeout_s = entry.action.timeout_s
        if snapshot.aged(entry) or (timeout_s is not None and ran_s >= TIMEOUT_SHARE * timeout_s):
            return min(limit, max(RESERVE_MIN, int(full)))
        remaining = estimate.remaining_s(ran_s) * estimate.busy
        if remaining > SMALL_CORE_S:
            full *= (SMALL_CORE_S / remaining) ** 2
        return min(limit, max(RESERVE_MIN, int(full)))

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        for entry in snapshot.due(REVIEWS_MAX):
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
                # The crowd has what it came for: what it leaves is divided anew.
                self._divide(snapshot, pool, targets)
            if targets:
                yield from self._grow(snapshot, pool, targets)
        for pool in list(snapshot.vacated.values()):
            yield from devices.restore_ahead(snapshot, pool)

    def _begin(self, snapshot: Snapshot, candidate: Candidate, targets: dict[str, float]) -> Decision:
        entry, node = candidate.entry, candidate.node
        pools = entry.action.demand.pools
        if GPU in pools:
            return devices.begin(snapshot, entry, node)
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

    # ---- CPU that nobody declared ----

    def _review(self, snapshot: Snapshot, entry: Entry) -> Decision:
        """It has run for a while: what is expected to remain has changed, and with it what it should reserve."""
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
            # Nothing changes before it has aged or comes near its timeout.
            review_s = max(review_s, snapshot.ages_in_s(entry))
        timeout_s = entry.action.timeout_s
        if timeout_s is not None and ran_s < TIMEOUT_SHARE * timeout_s:
            review_s = min(review_s, max(REVIEW_STEP_S, TIMEOUT_SHARE * timeout_s - ran_s))
        return Adjust(entry, reserve, entry.limit, review_s=review_s)

    # ---- elastic CPU ----

    def _begin_elastic(
        self, snapshot: Snapshot, entry: Entry, node: str, cpu: Amounts, targets: dict[str, float]
    ) -> Decision:
        pool = snapshot.pool(CPU, node)
        # Its minimum fits, and a core left idle for who may come serves nobody: only what is above it is spared.
        room = max(cpu.min, pool.free - snapshot.headroom(pool))
        if not self.resize:
            return Begin(entry, node, cpu.floor(min(self._lasting_units(snapshot, entry, pool, cpu, room), room)))
        # Cores are whole only in its width: what can be resized may as well start with a part of one.
        units = max(cpu.min, min(int(min(targets.get(entry.id, cpu.min), room)), cpu.max))
        return Begin(entry, node, units, limit=units, width=cpu.floor(min(units * WIDTH_HEADROOM, pool.total)))

    def _lasting_units(self, snapshot: Snapshot, entry: Entry, pool: PoolState, cpu: Amounts, room: float) -> float:
        """Units for an action that keeps them to its end, in milli-cores.

        The larger of an even part of the pool among those present, more for what speeds up well, and of what everybody
        could have at the present load. The latter is load ** (-1 / (1 - p)) times the minimum: on k units an action
        with speed-up k ** p takes k ** (1 - p) times its work, so that fills the pool exactly.
        """
        exponent = snapshot.estimate(entry).exponent
        waiting, _ = snapshot.waiting_counts(pool)
        present = max(1, waiting + len(snapshot.running(pool)))
        even = pool.total / present * max(EVEN_MIN, EVEN_FACTOR * exponent / (1.0 - exponent))
        load = max(LOAD_MIN, snapshot.offered(CPU) / max(pool.total, 1))
        steady = cpu.min * max(1.0, float(load ** (-1.0 / (1.0 - exponent))))
        return max(even, min(steady, room / max(1, waiting)))

    def _divide(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> bool:
        """heSRPT over the elastic actions that run and wait on this pool: milli-cores per action, into `targets`.
        True if there is a crowd instead, or nothing to divide."""
        if pool.free < CORE and pool.elastic_held == pool.elastic_min:
            return True
        elastic, rigid = snapshot.waiting_counts(pool)
        if rigid or elastic * CORE >= pool.total:
            # Everybody is at its minimum, and who is not yet, shrinks to it.
            if pool.elastic_held > pool.elastic_min:
                for entry in snapshot.running(pool).values():
                    targets[entry.id] = float(entry.action.demand.pools[CPU].min)
            return True
        if not elastic and not pool.elastic_held:
            return False
        running = list(snapshot.running(pool).values())
        units = max(float(pool.elastic_min), pool.free + pool.elastic_held - snapshot.headroom(pool))
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
        """The waiting elastic actions, smallest first, whose minima fit beside those of the running ones."""
        joining = []
        for entry in sorted(snapshot.waiting_elastic(pool, CROWD_MAX), key=lambda entry: (entry.key, entry.seq)):
            least = entry.action.demand.pools[CPU].min
            if least > room:
                break
            room -= least
            joining.append(entry)
        return joining

    def _shrink(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> Iterator[Decision]:
        """Make room. Down to its minimum by any amount: a few milli-cores too many keep a whole action waiting."""
        changes = []
        for entry in snapshot.running(pool).values():
            target = int(targets.get(entry.id, entry.reserved))
            enough = target < entry.reserved * (1.0 - RESIZE_SHARE) or target <= entry.action.demand.pools[CPU].min
            if target < entry.reserved and enough and entry.stop is None:
                changes.append((target - entry.reserved, entry, target))
        if len(changes) > RESIZES_MAX:
            changes = nsmallest(RESIZES_MAX, changes)
            snapshot.look_again(pool, REST_S)
        for _, entry, target in changes:
            yield Adjust(entry, target, target)

    def _grow(self, snapshot: Snapshot, pool: PoolState, targets: dict[str, float]) -> Iterator[Decision]:
        left, since = RESIZES_MAX, snapshot.now - GROW_AGE_S
        for entry in list(snapshot.running(pool).values()):
            if entry.stop is not None or entry.started_at is None or entry.started_at > since:
                continue
            target = min(int(targets.get(entry.id, 0)), entry.width, entry.reserved + pool.free)
            if target > entry.reserved * (1.0 + RESIZE_SHARE) and left:
                left -= 1
                yield Adjust(entry, target, target)
