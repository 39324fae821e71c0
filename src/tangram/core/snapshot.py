"""The snapshot: a read-only live view of queue, pools and learned estimates for a policy.

It is called a snapshot because events are handled one by one: while a policy plans, nothing changes but by its own
decisions. Reading it changes nothing: every value follows from the state of the scheduler at that moment. It is live,
so each decision that the scheduler applies shows in it at once. Only `candidates` is more than a value: to take the
next candidate is to decide not to begin the one before. Candidates and due reviews come from the scheduler; between
rounds there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from tangram.core.demand import CORE, CPU, GPU, LEARNED
from tangram.core.grants import Grants
from tangram.core.lanes import Entry, Lane
from tangram.core.ledger import Ledger, PoolState
from tangram.core.load import OfferedLoad
from tangram.core.policies.base import SchedulingPolicy
from tangram.core.profile import Estimate, ProfileStore
from tangram.core.queue import Queue
from tangram.core.residents import Residents

ESTIMATE_FRESH_S = 2.0
"""The estimate of a waiting action is renewed when it is older than this: more may have been learned."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A waiting action that fits at its minimum on this node."""

    entry: Entry
    node: str


def _no_candidates() -> Iterator[Candidate]:
    return iter(())


class Round:
    """What the scheduler offers to the policy in the current round. Empty between rounds."""

    __slots__ = ("candidates", "due_reviews")

    def __init__(self) -> None:
        self.candidates: Callable[[], Iterator[Candidate]] = _no_candidates
        self.due_reviews: tuple[Entry, ...] = ()

    def open(self, candidates: Callable[[], Iterator[Candidate]], due_reviews: tuple[Entry, ...]) -> None:
        self.candidates = candidates
        self.due_reviews = due_reviews

    def close(self) -> None:
        self.candidates = _no_candidates
        self.due_reviews = ()


class Snapshot:
    """What a policy reads."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        queue: Queue,
        residents: Residents,
        grants: Grants,
        profiles: ProfileStore,
        load: OfferedLoad,
        policy: SchedulingPolicy,
        current_round: Round,
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._residents = residents
        self._grants = grants
        self._profiles = profiles
        self._load = load
        self._policy = policy
        self._round = current_round
        self._estimates: dict[int, Estimate] = {}
        """Estimates that were computed since `_estimates_at`, by sequence number: only a memo."""
        self._estimates_at = (0.0, 0)
        self.pools: Mapping[str, PoolState] = MappingProxyType(ledger.pools)
        """All pools, by name."""
        self.changed: Mapping[str, PoolState] = MappingProxyType(queue.changed)
        """CPU pools whose free units or elastic actions changed since the last round."""
        self.vacated: Mapping[str, PoolState] = MappingProxyType(queue.vacated)
        """Device pools in which something changed since the last round."""

    @property
    def now(self) -> float:
        return self._ledger.now

    # ---- the round ----

    def candidates(self) -> Iterator[Candidate]:
        """The waiting actions that fit at their minimum, in fair order. The scheduler offers one after the other; an
        action that the policy does not begin before it takes the next one is passed over and waits on."""
        return self._round.candidates()

    @property
    def due_reviews(self) -> tuple[Entry, ...]:
        """The running actions that are due for a review in this round."""
        return self._round.due_reviews

    # ---- reading ----

    def pool(self, kind: str, node: str) -> PoolState:
        """The pool of that kind on the node, or the one that belongs to no node."""
        return self._ledger.pool_on(kind, node)

    def estimate(self, entry: Entry) -> Estimate:
        """The current estimate of an action. A running action keeps the one that it was started with."""
        estimate = entry.estimate
        if estimate is None or (entry.lane is not None and self.now - entry.estimated_at > ESTIMATE_FRESH_S):
            at = (self.now, self._profiles.observations)
            if self._estimates_at != at:
                self._estimates_at = at
                self._estimates = {}
            estimate = self._estimates.get(entry.seq)
            if estimate is None:
                estimate = self._estimates[entry.seq] = self._profiles.estimate(entry.action)
        return estimate

    def running(self, pool: PoolState) -> Mapping[str, Entry]:
        """The elastic actions that hold units of a CPU pool, in order of their start."""
        return self._grants.elastic_on(pool)

    def ages_in_s(self, entry: Entry) -> float:
        """Seconds until the action has aged."""
        return entry.submitted_at + self._queue.ageing_s - self.now

    def is_aged(self, entry: Entry) -> bool:
        """Whether it was submitted at least `ageing_s` ago."""
        return self._queue.is_aged(entry, self.now)

    def offered_load(self, kind: str) -> float:
        """Units of this kind that the arriving elastic actions keep busy on average, each at its minimum."""
        return self._load.units(kind, self.now)

    def inelastic_held(self, pool: PoolState) -> int:
        """Units of a CPU pool that inelastic actions hold."""
        return pool.held - pool.elastic_held

    def holders(self, pool: PoolState) -> list[tuple[Entry, int]]:
        """Every action that holds units of a pool, with their number. Costs a pass over all running actions."""
        return [
            (entry, holding.units)
            for entry in self._grants.holding.values()
            for holding in entry.holdings
            if holding.pool is pool
        ]

    def free_chunks(self) -> dict[str, tuple[int, ...]]:
        """Per device pool, the number of free chunks of each size."""
        return {pool.name: pool.free_chunks() for pool in self._ledger.kinds.get(GPU, {}).values()}

    def reserve(self, entry: Entry, pool: PoolState) -> int:
        """The milli-cores to reserve on this pool for an action that declares no CPU."""
        if entry.learned_reserve and self.now - entry.estimated_at <= ESTIMATE_FRESH_S:
            return entry.reserve_on(pool)
        units = min(self._policy.reserve(entry, self), entry.action.demand.pools[CPU].max)
        return min(units, max(1, pool.total))

    def seconds(self, entry: Entry, pool: PoolState, units: int) -> float:
        """Expected duration of the action on that many units of the pool."""
        count = units / CORE if pool.kind == CPU else units
        estimate = self.estimate(entry)
        if entry.elastic != pool.kind:
            return estimate.work_s
        speedup = entry.action.demand.speedup
        if speedup is not None:
            return estimate.work_s / speedup.at(count)
        return estimate.work_s / (count**estimate.exponent if count > 1.0 else count)

    def remaining_s(self, entry: Entry) -> float:
        """Expected seconds until a running action ends at its current speed."""
        done_s = entry.done_at(self.now) if entry.started_at is not None else 0.0
        return self.estimate(entry).remaining_s(done_s) / max(entry.speed, 1e-9)

    def waiting(self, pool: PoolState) -> int:
        """The number of waiting actions that may run from this pool."""
        count = 0
        for lane in self._queue.lanes(pool):
            count += lane.waiting
        return count

    def waiting_counts(self, pool: PoolState) -> tuple[int, int]:
        """The number of waiting actions that are elastic in this pool, and the number of others that lack its units."""
        elastic = rigid = 0
        for lane in self._queue.lanes(pool):
            if lane.elastic == pool.kind:
                elastic += lane.waiting
                continue
            first = lane.first()
            # Actions without a node may wait for memory instead: only the first is sure to need units now.
            starting = 1 if first.memory else lane.waiting
            for kind, units in first.needs:
                if (
                    kind == pool.kind
                    and starting * (self.reserve(first, pool) if units == LEARNED else units) > pool.free
                ):
                    rigid += lane.waiting
        return elastic, rigid

    def waiting_elastic(self, pool: PoolState, most: int) -> list[Entry]:
        """Up to `most` of the waiting actions that are elastic in this pool, from the top of each lane's heap."""
        entries: list[Entry] = []
        for lane in self._queue.lanes(pool):
            if lane.elastic == pool.kind:
                entries.extend(item[3] for item in lane.heap[:most] if item[3].lane is lane)
        return entries[:most]

    def waiting_in_order(self, pool: PoolState, most: int) -> list[Entry]:
        """Up to `most` waiting actions that are elastic in this pool or need its devices, by arrival."""
        entries: list[Entry] = []
        for lane in self._queue.lanes(pool):
            if lane.elastic == pool.kind or (pool.kind == GPU and not lane.elastic):
                waiting = (entry for entry in lane.fifo if entry.lane is lane)
                entries.extend(entry for _, entry in zip(range(most), waiting, strict=False))
        return sorted(entries)[:most]

    def resident_free(self, entry: Entry, node: str) -> tuple[int, ...]:
        """The devices of the widest copy of the action's service that is loaded, free and admissible on the node."""
        amounts = entry.action.demand.pools.get(GPU)
        pool = self._ledger.kinds.get(GPU, {}).get(node)
        best: tuple[int, ...] = ()
        if amounts is None or pool is None:
            return best
        for devices in self._residents.devices(entry.action.service, node):
            if len(devices) > len(best) and amounts.admits(len(devices)) and pool.devices_free(devices):
                best = devices
        return best

    def is_loaded(self, entry: Entry) -> bool:
        """Whether the action's service is loaded on free devices on which the action could run."""
        pools, amounts = self._ledger.kinds.get(GPU, {}), entry.action.demand.pools.get(GPU)
        if amounts is None:
            return False
        return any(
            entry.node in ("", node) and amounts.admits(len(devices)) and pools[node].devices_free(devices)
            for node, devices in self._residents.locations(entry.action.service)
            if node in pools
        )

    def resident_degrees(self, entry: Entry, node: str) -> list[int]:
        """The numbers of devices on which the action's service is loaded and free on the node."""
        pool = self._ledger.kinds[GPU][node]
        loaded = self._residents.devices(entry.action.service, node)
        return [len(devices) for devices in loaded if pool.devices_free(devices)]

    def restore_s(self, service: str) -> float:
        """Seconds that loading the service took lately, or a guess if it was never loaded."""
        return self._residents.restore_s(service)

    def batch_max(self, service: str) -> int:
        """The number of calls that the service takes at once."""
        return self._residents.batch_max(service)

    def waiting_lanes(self, pool: PoolState) -> Iterator[Lane]:
        """The lanes with waiting actions that may run from this pool."""
        return self._queue.lanes(pool)

    def called_services(self) -> Iterable[tuple[str, int]]:
        """The services that were called, each with the number of devices of its last call."""
        return self._residents.services()

    def has_free_copy(self, service: str) -> bool:
        """Whether the service is loaded, or being loaded, on free devices."""
        pools = self._ledger.kinds.get(GPU, {})
        return any(
            node in pools and pools[node].devices_free(devices) for node, devices in self._residents.locations(service)
        )

    def is_anywhere(self, service: str) -> bool:
        """Whether the service is loaded, or being loaded, anywhere."""
        return bool(self._residents.locations(service))

    def calls_per_s(self, service: str) -> float:
        """The recent rate of calls."""
        return self._residents.calls_per_s(service, self.now)

    def sure_worth(self, service: str) -> float:
        """Lower bound on the seconds of restoring per second that a loaded copy saves the callers of the service."""
        return self._residents.sure_worth(service, self.now)

    def least_worth(self, pool: PoolState, units: int) -> tuple[tuple[int, ...], float]:
        """The free device set of that size whose loaded services are worth least, and their worth. There must be a free
        set."""
        return self._residents.least_worth(pool, units, self.now)
