"""Reading a snapshot changes nothing: neither what the scheduler keeps nor what it decides next.

The same random events go to two schedulers. The policy of the second reads everything that a snapshot offers, twice,
each time that it is called. Both must answer every event alike.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from tests.properties.test_scheduler import LIMITS, POOLS, SERVICES, SchedulerMachine

from tangram.core.demand import CPU, GPU
from tangram.core.lanes import Entry
from tangram.core.messages import Effect, Event
from tangram.core.policies import policy
from tangram.core.policies.base import Decision, SchedulingPolicy
from tangram.core.scheduler import Scheduler
from tangram.core.snapshot import Round, Snapshot


def read(snapshot: Snapshot, scheduler: Scheduler) -> list[Any]:
    """Every value that a snapshot offers. Candidates are left out in a round: to take one is to decide about it."""
    entries = list(scheduler.entries.values())
    pools = list(snapshot.pools.values())
    nodes = list(scheduler.ledger.nodes)
    waiting = [entry for entry in entries if entry.lane is not None and GPU in entry.action.demand.pools]
    devices = [pool for pool in pools if pool.kind == GPU]
    on_devices = [(entry, pool.node) for entry in waiting for pool in devices]
    undeclared = [entry for entry in entries if CPU in entry.action.demand.pools and not entry.elastic]
    elastic = [(entry, pool) for entry in entries for pool in pools if pool.kind in entry.action.demand.pools]
    arguments: dict[str, list[tuple[Any, ...]]] = {
        "estimate": [(entry,) for entry in entries],
        "remaining_s": [(entry,) for entry in entries],
        "ages_in_s": [(entry,) for entry in entries],
        "is_aged": [(entry,) for entry in entries],
        "is_loaded": [(entry,) for entry in waiting],
        "resident_free": on_devices,
        "resident_degrees": on_devices,
        "reserve": [(entry, pool) for entry in undeclared for pool in pools if pool.kind == CPU],
        "seconds": [(entry, pool, 2 * entry.action.demand.pools[pool.kind].max) for entry, pool in elastic],
        "running": [(pool,) for pool in pools],
        "inelastic_held": [(pool,) for pool in pools],
        "holders": [(pool,) for pool in pools],
        "waiting": [(pool,) for pool in pools],
        "waiting_counts": [(pool,) for pool in pools],
        "waiting_elastic": [(pool, 3) for pool in pools],
        "waiting_in_order": [(pool, 3) for pool in pools],
        "waiting_lanes": [(pool,) for pool in pools],
        "least_worth": [(pool, 1) for pool in devices if pool.fits(1)],
        "pool": [(pool.kind, node) for pool in pools for node in nodes if pool.node in ("", node)],
        "offered_load": [(CPU,), (GPU,), ("api",)],
        "free_chunks": [()],
        "called_services": [()],
    }
    for name in ("restore_s", "batch_max", "has_free_copy", "is_anywhere", "calls_per_s", "sure_worth"):
        arguments[name] = [(service,) for service in SERVICES]
    methods = {name for name, _ in inspect.getmembers(Snapshot, inspect.isfunction) if not name.startswith("_")}
    assert methods == {*arguments, "candidates"}, "every method is read"
    values = [_plain(getattr(snapshot, name)(*some)) for name, all in arguments.items() for some in all]
    return [*values, snapshot.now, list(snapshot.changed), list(snapshot.vacated), snapshot.due_reviews]


def _plain(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else list(value) if isinstance(value, Iterable) else value


class Reader:
    """A policy that reads everything, twice, before it decides."""

    def __init__(self, inner: SchedulingPolicy) -> None:
        self.inner = inner
        self.name = inner.name
        self.strict = inner.strict
        self.scheduler: Scheduler
        self._reading = False

    def _read(self, snapshot: Snapshot) -> None:
        if self._reading:
            return  # `Snapshot.reserve` calls the policy
        self._reading = True
        try:
            before = state_of(self.scheduler)
            first = read(snapshot, self.scheduler)
            assert read(snapshot, self.scheduler) == first
            assert state_of(self.scheduler) == before
        finally:
            self._reading = False

    def order(self, entry: Entry, snapshot: Snapshot) -> float:
        self._read(snapshot)
        return self.inner.order(entry, snapshot)

    def reserve(self, entry: Entry, snapshot: Snapshot) -> int:
        self._read(snapshot)
        return self.inner.reserve(entry, snapshot)

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        self._read(snapshot)
        return self.inner.plan(snapshot)


def state_of(scheduler: Scheduler) -> list[Any]:
    """Everything that the scheduler can reach, as plain values; objects are numbered as they are met."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []

    def dump(value: Any) -> None:
        if value is None or isinstance(value, str | bytes | int | float | type | Callable):  # type: ignore[arg-type]
            kept.append(value)
            return
        if isinstance(value, Snapshot | Round | Reader):
            return  # the reader and what it reads; a snapshot remembers the estimates that it computed
        if id(value) in numbers:
            kept.append(numbers[id(value)])
            return
        numbers[id(value)] = len(numbers)
        kept.append(type(value).__name__)
        if isinstance(value, Mapping):
            # Lanes are found by their address, which differs from one scheduler to the next but not in this one.
            for key, inside in value.items():
                dump(key)
                dump(inside)
        elif isinstance(value, list | tuple | deque | set):
            for inside in value:
                dump(inside)
        else:
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            for name in [*slots, *getattr(value, "__dict__", {})]:
                if name != "_recent_events":
                    dump(getattr(value, name, None))

    dump(scheduler)
    return kept


class ReadingMachine(SchedulerMachine):
    def __init__(self) -> None:
        super().__init__()
        reader = Reader(policy(self.policy_name))
        self.read = Scheduler(reader, POOLS, limits=LIMITS)
        reader.scheduler = self.read

    def send(self, event: Event, now: float | None = None) -> list[Effect]:
        expected = self.read.handle(event, self.now if now is None else now)
        effects = super().send(event, now)
        assert effects == expected, "reading changed a decision"
        return effects

    @invariant()
    def reading_between_events_changes_nothing(self) -> None:
        snapshot = self.read.snapshot
        before = state_of(self.read)
        assert read(snapshot, self.read) == read(snapshot, self.read)
        assert list(snapshot.candidates()) == [] and snapshot.due_reviews == ()
        for action in self.read.entries:
            self.read.explain(action)
        self.read.statistics()
        self.read.check()
        assert state_of(self.read) == before


def machine(name: str) -> Any:
    case = type(f"ReadingMachine[{name}]", (ReadingMachine,), {"policy_name": name}).TestCase
    case.settings = settings(max_examples=12, stateful_step_count=30)
    return case


TestFcfs = machine("fcfs")
TestPaper = machine("paper")
TestAdaptive = machine("adaptive")


def test_a_policy_cannot_write_what_a_snapshot_shows() -> None:
    snapshot = Scheduler(policy("adaptive"), POOLS).snapshot
    for mapping in (snapshot.pools, snapshot.changed, snapshot.vacated, snapshot.running(snapshot.pool(CPU, "n0"))):
        with pytest.raises(TypeError):
            mapping["cpu@n0"] = None  # type: ignore[index]
