"""Grants: chunks of devices with their services, riding in a batch, resizing, and units kept aside for a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tangram.core.action import State
from tangram.core.demand import Amounts, between, cores, fixed, learned, one_of
from tangram.core.messages import (
    Evicted,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Reserve,
    Resident,
    Resize,
    Restore,
    Window,
    cpu_node,
)
from tangram.core.policies.base import Adjust, ArrivalOrder, Begin, Decision, Hold, Preload
from tangram.core.residents import RESTORE_PRIOR_S
from tangram.core.snapshot import Snapshot
from tangram.core.speedup import PowerLaw
from tangram.errors import InvariantError

Make = Callable[..., Any]
Plan = Callable[[Snapshot], Iterator[Decision]]

NODE = cpu_node("n0", 8)
GPU = Pool(kind="gpu", node="g0", total=8)
API = Pool(kind="api", total=2)


class Planned(ArrivalOrder):
    """Starts all candidates at their minimum, after what the test wants."""

    name = "planned"

    def __init__(self) -> None:
        self.first: Plan = lambda snapshot: iter(())
        self.begin: Callable[[Any, Snapshot], Decision | None] = lambda c, snapshot: Begin(c.entry, c.node)

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        yield from self.first(snapshot)
        for candidate in snapshot.candidates():
            decision = self.begin(candidate, snapshot)
            if decision is not None:
                yield decision


# ---- devices ----------------------------------------------------------------------------------------------------


def cells(c: Any, name: str) -> tuple[int, ...]:
    return tuple(c.start(name).grant.shares[0].cells)


def test_devices_are_granted_in_aligned_chunks_that_merge_again(cluster: Make) -> None:
    c = cluster(GPU)
    c.submit("a", {"gpu": fixed(1)})
    assert cells(c, "a") == (0,)
    c.submit("b", {"gpu": fixed(3)})
    assert cells(c, "b") == (4, 5, 6, 7)
    assert c.start("b").grant.shares[0].reserved == c.start("b").grant.width == 4
    c.submit("c", {"gpu": fixed(2)})
    assert cells(c, "c") == (2, 3)
    c.submit("d", {"gpu": fixed(8)})
    for name in "abc":
        c.run(name)
    assert cells(c, "d") == tuple(range(8))


def test_free_devices_that_do_not_form_a_chunk_start_no_action(cluster: Make) -> None:
    c = cluster(GPU)
    for number in range(8):
        c.submit(f"a{number}", {"gpu": fixed(1)})
    c.submit("b", {"gpu": fixed(2)})
    c.run("a1")
    c.run("a2")
    assert c.free("gpu@g0") == 2
    assert c.starts() == []
    c.run("a0")
    assert cells(c, "b") == (0, 1)


@pytest.mark.parametrize("policy", ["fcfs", "paper", "adaptive"])
def test_an_action_goes_where_its_service_is_loaded(cluster: Make, policy: str) -> None:
    c = cluster(GPU, Pool(kind="gpu", node="g1", total=8), policy=policy)
    c.send(Resident(service="judge", node="g1", devices=(6, 7)))
    c.submit("a", {"gpu": fixed(2)}, service="judge")
    assert c.start("a").grant.node == "g1"
    assert cells(c, "a") == (6, 7)
    c.submit("b", {"gpu": fixed(2)}, service="teacher")
    assert c.start("b").grant.node == "g0"
    c.run("a")
    c.send(Evicted(service="judge", node="g1", devices=(6, 7)))
    c.submit("c", {"gpu": fixed(2)}, service="judge")
    assert cells(c, "c") == (0, 1)


@pytest.mark.parametrize(("policy", "first"), [("fcfs", "other"), ("adaptive", "same")])
def test_a_loaded_service_continues_while_other_actions_wait_unless_order_counts(
    cluster: Make, policy: str, first: str
) -> None:
    c = cluster(Pool(kind="gpu", node="g0", total=1), policy=policy)
    c.submit("a", {"gpu": fixed(1)}, service="judge")
    c.send(Resident(service="judge", node="g0", devices=(0,)))
    c.submit("other", {"gpu": fixed(1)}, service="teacher", duration_s=0.1)
    c.submit("same", {"gpu": fixed(1)}, service="judge", duration_s=9.0)
    c.run("a")
    assert c.starts() == [first]


def test_a_call_of_another_service_waits_no_longer_than_ageing_for_the_loaded_one(cluster: Make) -> None:
    c = cluster(Pool(kind="gpu", node="g0", total=1), policy="adaptive", ageing_s=10.0)
    c.submit("a0", {"gpu": fixed(1)}, service="judge")
    c.send(Resident(service="judge", node="g0", devices=(0,)))
    c.submit("other", {"gpu": fixed(1)}, service="teacher")
    for number in range(1, 20):
        c.submit(f"a{number}", {"gpu": fixed(1)}, service="judge")
        c.now += 1.0
        c.run(f"a{number - 1}")
        if c.starts() == ["other"]:
            break
    assert number == 10


def test_the_copy_used_last_is_preferred(cluster: Make) -> None:
    c = cluster(GPU)
    c.send(Resident(service="judge", node="g0", devices=(2, 3)))
    c.send(Resident(service="judge", node="g0", devices=(6, 7)))
    c.submit("a", {"gpu": fixed(2)}, service="judge")
    c.submit("b", {"gpu": fixed(2)}, service="judge")
    assert cells(c, "b") == (2, 3)
    c.run("a")
    c.run("b")
    c.submit("c", {"gpu": fixed(2)}, service="judge")
    assert cells(c, "c") == (2, 3), "b was the last"


def test_a_start_that_had_to_load_its_service_shows_what_a_restore_costs(cluster: Make) -> None:
    c = cluster(GPU)
    restore_s = c.scheduler.snapshot.restore_s
    assert restore_s("judge") == RESTORE_PRIOR_S
    c.submit("a", {"gpu": fixed(2)}, service="judge")
    c.now = 4.0
    c.started("a")
    assert restore_s("judge") == 4.0
    c.send(Resident(service="judge", node="g0", devices=(0, 1)))
    c.finished("a")
    c.submit("b", {"gpu": fixed(2)}, service="judge")
    c.now = 5.0
    c.started("b")
    assert restore_s("judge") == 4.0, "it was loaded already"


def test_a_dead_node_has_no_services_loaded(cluster: Make) -> None:
    c = cluster(GPU)
    c.send(Resident(service="judge", node="g0", devices=(4, 5)))
    c.send(NodeChanged(node="g0", state=NodeState.DOWN))
    c.send(PoolChanged(pool=GPU))
    c.send(NodeChanged(node="g0", state=NodeState.UP))
    c.submit("a", {"gpu": fixed(2)}, service="judge")
    assert cells(c, "a") == (0, 1)


def test_a_preload_is_requested_where_the_plan_places_it_and_the_next_call_goes_there(cluster: Make) -> None:
    policy = Planned()
    c = cluster(GPU, policy=policy)
    c.submit("a", {"gpu": fixed(2)})
    policy.first = lambda snapshot: iter([Preload("judge", "g0", (6, 7))])
    c.submit("b", {"gpu": fixed(2)})
    assert Restore(service="judge", node="g0", devices=(6, 7)) in c.effects
    c.submit("c", {"gpu": fixed(2)}, service="judge")
    assert cells(c, "c") == (6, 7)


def test_a_restore_that_was_not_done_is_forgotten(cluster: Make) -> None:
    policy = Planned()
    c = cluster(GPU, policy=policy)
    policy.first = lambda snapshot: iter([Preload("judge", "g0", (6, 7))])
    c.submit("a", {"gpu": fixed(2)})
    policy.first = lambda snapshot: iter([])
    c.send(Evicted(service="judge", node="g0", devices=(6, 7)))
    c.submit("b", {"gpu": fixed(2)}, service="judge")
    assert cells(c, "b") == (2, 3)


# ---- riding in a batch ------------------------------------------------------------------------------------------


class Riding(Planned):
    """The first call of a service takes the others that wait for it along."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = self.together

    def together(self, candidate: Any, snapshot: Snapshot) -> Begin:
        entry = candidate.entry
        waiting = [other for other in entry.lane.fifo if other.lane is entry.lane and other is not entry]
        return Begin(entry, candidate.node, riders=tuple(waiting[:3]))


def full(c: Any, *names: str, **other_pools: Amounts) -> None:
    """Calls of one service that wait together until the devices are free."""
    c.submit("all", {"gpu": fixed(8)})
    for name in names:
        c.submit(name, {"gpu": fixed(4), **other_pools}, service="judge")
    c.run("all")


def test_riders_share_the_chunk_and_the_last_one_frees_it(cluster: Make) -> None:
    c = cluster(GPU, policy=Riding())
    full(c, "a", "b", "c")
    assert c.starts() == ["a", "b", "c"]
    grants = [c.start(name).grant for name in "abc"]
    assert [grant.batch for grant in grants] == ["a", "a", "a"]
    assert {grant.shares[0].cells for grant in grants} == {(0, 1, 2, 3)}
    assert c.free("gpu@g0") == 4
    c.run("a")
    c.run("c")
    assert c.free("gpu@g0") == 4, "one still rides"
    c.run("b")
    assert c.free("gpu@g0") == 8


def test_an_action_alone_is_no_batch(cluster: Make) -> None:
    c = cluster(GPU, policy=Riding())
    full(c, "a")
    assert c.start("a").grant.batch == ""


def test_a_rider_holds_its_other_pools_itself(cluster: Make) -> None:
    c = cluster(GPU, API, policy=Riding())
    full(c, "a", "b", api=fixed(1))
    assert c.free("api") == 0
    c.run("b")
    assert (c.free("api"), c.free("gpu@g0")) == (1, 4)


def test_a_rider_whose_start_fails_leaves_the_batch(cluster: Make) -> None:
    c = cluster(GPU, policy=Riding())
    full(c, "a", "b")
    c.start_failed("b", retry=False)
    assert c.free("gpu@g0") == 4
    c.run("a")
    assert c.free("gpu@g0") == 8


def test_a_batch_dies_with_its_node(cluster: Make) -> None:
    c = cluster(GPU, policy=Riding())
    full(c, "a", "b")
    c.started("a", "b")
    c.send(NodeChanged(node="g0", state=NodeState.DOWN))
    assert [outcome.action for outcome in c.outcomes()] == ["a", "b"]


def test_a_rider_of_another_service_or_with_too_few_devices_stops_everything(cluster: Make) -> None:
    def with_everybody(candidate: Any, snapshot: Snapshot) -> Begin:
        others = [e for e in c.scheduler.entries.values() if e.state is State.QUEUED and e is not candidate.entry]
        return Begin(candidate.entry, candidate.node, riders=tuple(others))

    policy = Planned()
    c = cluster(GPU, policy=policy)
    policy.begin = with_everybody
    c.submit("all", {"gpu": fixed(8)})
    c.submit("a", {"gpu": fixed(2)}, service="judge")
    c.submit("b", {"gpu": fixed(2)}, service="teacher")
    with pytest.raises(InvariantError, match="plan lets b ride with a, whose service or node is another"):
        c.run("all")
    c = cluster(GPU, policy=policy)
    c.submit("all", {"gpu": fixed(8)})
    c.submit("a", {"gpu": fixed(2)}, service="judge")
    c.submit("b", {"gpu": fixed(4)}, service="judge")
    with pytest.raises(InvariantError, match="plan lets b ride on 2 devices; it needs 4") as caught:
        c.run("all")
    assert caught.value.story


# ---- resizing ---------------------------------------------------------------------------------------------------


def elastic(c: Any, policy: Planned, reserved: int, limit: int | None = None, name: str = "a") -> list[Any]:
    """Have the policy give the action another size with the next event."""
    entry = c.scheduler.entries[name]
    decisions = [Adjust(entry, reserved, reserved if limit is None else limit)]
    policy.first = lambda snapshot: iter([decisions.pop()] if decisions else [])
    c.submit(f"tick{c.now}", {"api": fixed(1)})
    return [effect for effect in c.effects if isinstance(effect, Resize)]


def test_a_resize_changes_reserve_and_limit_and_never_the_width(cluster: Make) -> None:
    policy = Planned()
    policy.begin = lambda candidate, snapshot: Begin(
        candidate.entry, candidate.node, width=4000 if candidate.node else 0
    )
    c = cluster(*NODE, API, policy=policy)
    c.submit("a", {"cpu": cores(1, 8)}, speedup=PowerLaw(0.5))
    assert (c.start("a").grant.width, c.start("a").grant.shares[0].limit) == (4000, 1000)
    c.started("a")
    entry = c.scheduler.entries["a"]
    assert entry.speed == 1.0
    assert elastic(c, policy, 4000) == [Resize(action="a", pool="cpu@n0", reserved=4000, limit=4000)]
    assert (c.free("cpu@n0"), entry.speed, entry.width) == (4000, 2.0, 4000)
    c.now = 5.0
    assert elastic(c, policy, 8000) == [Resize(action="a", pool="cpu@n0", reserved=8000, limit=8000)]
    assert entry.speed == 2.0, "it was launched for four"
    assert entry.done_at(6.0) == 12.0


def test_shrinking_a_running_action_lets_waiting_actions_start(cluster: Make) -> None:
    policy = Planned()
    c = cluster(*NODE, Pool(kind="api", total=10), policy=policy)
    policy.begin = lambda candidate, snapshot: Begin(
        candidate.entry, candidate.node, 8000 if candidate.entry.elastic else 0
    )
    c.submit("a", {"cpu": cores(1, 8)})
    c.submit("b", {"cpu": cores(2)})
    elastic(c, policy, 5000)
    assert "b" in c.starts()


def test_a_resize_of_what_cannot_be_resized_stops_everything(cluster: Make) -> None:
    policy = Planned()
    for amounts, reserved, message in [
        (cores(2), 1000, "plan resizes a, whose CPU is fixed"),
        (cores(2, 4), 1000, r"plan resizes a to 1000 \(limit 1000\), below its minimum of 2000"),
        (cores(1, 4), 9000, "resize oversells cpu@n0: 8000 more units wanted, 7000 of 8000 free"),
    ]:
        c = cluster(*NODE, API, policy=policy)
        policy.first = lambda snapshot: iter(())
        c.submit("a", {"cpu": amounts})
        with pytest.raises(InvariantError, match=message) as caught:
            elastic(c, policy, reserved)
        assert caught.value.story
    c = cluster(*NODE, API, policy=policy)
    policy.first = lambda snapshot: iter(())
    c.submit("a", {"cpu": cores(1, 4)})
    c.cancel("a")
    with pytest.raises(InvariantError, match="plan resizes a, which is stopping"):
        elastic(c, policy, 2000)


def test_learned_cpu_may_be_resized_too(cluster: Make) -> None:
    policy = Planned()
    c = cluster(*NODE, API, policy=policy)
    policy.begin = lambda candidate, snapshot: Begin(
        candidate.entry, candidate.node, limit=4000 if candidate.node else 0
    )
    c.submit("a", {"cpu": learned(4)})
    assert (c.start("a").grant.shares[0].reserved, c.start("a").grant.shares[0].limit) == (1000, 4000)
    elastic(c, policy, 50, 4000)
    assert c.free("cpu@n0") == 7950


def test_an_action_that_aged_since_it_was_fitted_starts_with_what_was_free_for_it(cluster: Make) -> None:
    """Aged, its policy would reserve a core and more for it; but it was fitted, moments ago, with a sliver."""
    c = cluster(*cpu_node("n0", 4), policy="adaptive")
    c.submit("teach", {"cpu": learned(4)})
    c.started("teach")
    c.now = 100.0
    c.finished("teach", cpu_s=100.0)
    for name, count in (("big", 3.5), ("small", 0.5)):
        c.submit(name, {"cpu": cores(count)})
        c.started(name)
    c.submit("aged", {"cpu": learned(4)})
    c.now = 699.0
    c.send(PoolChanged(pool=cpu_node("n0", 4)[0]))
    c.now = 700.5
    c.finished("small", cpu_s=1.0)
    assert c.starts() == ["aged"]
    assert c.start("aged").grant.shares[0].reserved <= 500


# ---- units kept aside while a plan is made ----------------------------------------------------------------------


class HoldAll(ArrivalOrder):
    """Holds every candidate, then begins those that the test names."""

    name = "hold all"

    def __init__(self, *begin: str) -> None:
        self.names = begin
        self.observed: list[tuple[str, dict[str, int]]] = []

    def plan(self, snapshot: Snapshot) -> Iterator[Decision]:
        held = []
        for candidate in snapshot.candidates():
            yield Hold(candidate.entry, candidate.node)
            held.append(candidate)
            self.observed.append((candidate.entry.id, {name: pool.free for name, pool in snapshot.pools.items()}))
        for candidate in held:
            if candidate.entry.id in self.names:
                yield Begin(candidate.entry, candidate.node)


def test_what_is_held_for_one_candidate_is_not_offered_to_the_next(cluster: Make) -> None:
    policy = HoldAll("a", "b", "c", "all")
    c = cluster(*NODE, policy=policy)
    c.submit("all", {"cpu": cores(8)})
    for name in "abc":
        c.submit(name, {"cpu": cores(3)})
    policy.observed.clear()
    c.run("all")
    assert policy.observed == [("a", {"cpu@n0": 5000}), ("b", {"cpu@n0": 2000})]
    assert c.starts() == ["a", "b"]


def test_what_was_held_and_not_begun_waits_on_in_its_turn(cluster: Make) -> None:
    policy = HoldAll("all", "a")
    tokens = Pool(kind="tokens", total=8, window=Window(seconds=60.0))
    c = cluster(*cpu_node("n0", 8, 1.0), tokens, policy=policy)
    c.send(Reserve(sandbox="box", memory=512))
    c.submit("all", {"cpu": cores(8)})
    c.submit("a", {"cpu": cores(1)})
    c.submit("b", {"cpu": between(1000, 4000), "tokens": fixed(3)}, sandbox="box")
    c.run("all")
    assert c.starts() == ["a"]
    assert (c.free("cpu@n0"), c.free("tokens"), c.free("memory@n0")) == (7000, 8, 1024), "nothing is kept of it"
    policy.names = ("b",)
    c.run("a")
    assert c.starts() == ["b"]
    assert (c.free("cpu@n0"), c.free("tokens"), c.free("memory@n0")) == (7000, 5, 512)


def test_the_chunks_of_a_plan_are_divided_again_when_it_begins(cluster: Make) -> None:
    policy = HoldAll("all", "c")
    c = cluster(GPU, policy=policy)
    c.submit("all", {"gpu": fixed(8)})
    c.submit("a", {"gpu": fixed(1)})
    c.submit("b", {"gpu": one_of(2, 4)})
    c.submit("c", {"gpu": fixed(2)})
    c.run("all")
    assert c.starts() == ["c"]
    assert cells(c, "c") == (0, 1)
