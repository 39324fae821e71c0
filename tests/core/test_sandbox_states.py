"""Places: sandboxes and their memory, the choice of a node, and nodes that join, drain, die and come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.core.conftest import counted

from tangram.core.action import Action, Status
from tangram.core.demand import Amounts, Demand, cores, fixed, learned, one_of
from tangram.core.ledger import NODES_AWAY_MAX, SHAPES_MAX
from tangram.core.messages import (
    Cancel,
    Finished,
    NodeChanged,
    NodeState,
    Pool,
    PoolChanged,
    Refuse,
    Release,
    Reserve,
    Resident,
    RunChanged,
    StartFailed,
    Stop,
    Submit,
    Tick,
    cpu_node,
)
from tangram.core.recent_events import RECENT_EVENTS_MAX
from tangram.errors import InvalidConfig, InvariantError

Make = Callable[..., Any]

SMALL = cpu_node("small", 2, memory_gib=1.0)
LARGE = cpu_node("large", 8, memory_gib=4.0)
ONE, TWO, EIGHT = ({"cpu": cores(count)} for count in (1, 2, 8))
POLICIES = ("fcfs", "paper", "adaptive")


def box(name: str, memory: int = 100, **fields: Any) -> Reserve:
    return Reserve(sandbox=name, memory=memory, **fields)


# ---- memory for the life of a sandbox ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_action_picks_the_node_and_holds_the_memory_there(cluster: Make, policy: str) -> None:
    c = cluster(*SMALL, *LARGE, policy=policy)
    assert c.send(box("b", 500)) == []
    assert (c.free("memory@small"), c.free("memory@large")) == (1024, 4096), "a reservation has no place yet"
    c.submit("a", ONE, sandbox="b")
    assert c.start("a").grant.node == "large", "there more is left of everything"
    assert c.free("memory@large") == 3596
    c.run("a")
    assert c.free("memory@large") == 3596, "memory stays between actions"


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_awaited_while_the_memory_of_yielding_actions_would_be_enough(cluster: Make, policy: str) -> None:
    c = cluster(*cpu_node("n0", 2, memory_gib=1.0), policy=policy)

    def awaits() -> str:
        entry = c.scheduler.awaits_yielding()
        return entry.id if entry is not None else ""

    c.send(box("instance", 300, node="n0", yields=True))
    for name, units in (("first", 600), ("second", 400), ("small", 100)):
        c.send(box(name, units))
    c.submit("a", TWO, sandbox="first")
    c.submit("z", ONE, sandbox="small")
    assert not awaits(), "it waits for cores"
    c.submit("b", ONE, sandbox="second")
    assert awaits() == "b"
    c.run("a")
    assert c.starts() == ["z"] and not awaits(), "what is left is not enough even with that of the instance"
    c.run("z")
    c.send(Release(sandbox="small"))
    assert awaits() == "b"
    c.send(Release(sandbox="instance"))
    assert not awaits() and c.start("b")


# ---- calls that wait for the memory of an instance ---------------------------------------------------------------


def wait_for(c: Any, name: str, memory: int) -> None:
    """A call that was started has found no memory for an instance."""
    c.send(StartFailed(action=name, reason="no memory", sandbox=f"for-{name}", memory=memory))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_that_waits_for_memory_holds_nothing_and_starts_with_it_held(cluster: Make, policy: str) -> None:
    c = cluster(*cpu_node("n0", 1, memory_gib=1.0), policy=policy, attempts_max=1)
    c.send(box("full", 800, node="n0"))
    for _ in range(3):
        c.submit("call", ONE)
        wait_for(c, "call", 300)
        assert c.starts() == [] and c.free("cpu@n0") == 1000
        c.submit("exec", ONE, sandbox="full")
        assert c.starts() == ["exec"], "the sandbox with the memory can go on"
        c.run("exec")
        c.send(Release(sandbox="full"))
        assert c.start("call").grant.attempt == 1, "no attempt was used up"
        assert c.free("memory@n0") == 724
        c.run("call")
        assert c.free("memory@n0") == 724, "the instance stays when the call is over"
        c.send(Release(sandbox="for-call"))
        c.send(box("full", 800, node="n0"))


def test_a_call_that_waits_for_memory_is_settled_like_any_other(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 1, memory_gib=1.0))
    c.send(box("full", 800, node="n0"))
    c.submit("call", ONE)
    wait_for(c, "call", 300)
    c.cancel("call")
    assert c.outcome().status is Status.CANCELLED
    assert list(c.scheduler.sandboxes.by_id) == ["full"], "no action is left that would release the other"
    c.submit("hasty", ONE, deadline_s=5.0)
    wait_for(c, "hasty", 300)
    c.pass_time(5.0)
    assert c.outcome().status is Status.TIMED_OUT
    c.submit("large", ONE)
    wait_for(c, "large", 2000)
    assert (c.outcome().status, c.outcome().reason) == (
        Status.LOST,
        "sandbox for-large requests 2000 MiB; the largest node has 1024",
    )


def test_calls_keep_their_place_when_the_name_is_released(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4, memory_gib=1.0))
    c.send(box("full", 800, node="n0"))
    for _ in range(3):
        for name in ("one", "two", "three"):
            if name not in c.scheduler.entries:
                c.submit(name, ONE)
            wait_for(c, name, 300)
        for name in ("two", "one", "three"):
            c.send(Release(sandbox=f"for-{name}"))
            assert c.starts() == [name], "an instance is there for it"
    for name in ("one", "two", "three"):
        c.run(name)
        assert c.outcome().status is Status.SUCCEEDED


def test_memory_that_comes_together_for_a_sandbox_is_not_taken_by_later_calls(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 8, memory_gib=1.0), policy="adaptive")
    for name in ("i0", "i1", "i2"):
        c.send(box(name, 300, node="n0", run="calls", yields=True))
    c.send(box("large", 900, run="opens"))
    c.submit("open", ONE, sandbox="large", run="opens")
    c.submit("call", ONE, run="calls")
    wait_for(c, "call", 300)
    c.pass_time(10.0)  # in which the run of the calls has had most of the memory
    for name in ("i0", "i1"):
        c.send(Release(sandbox=name))
        assert c.starts() == []
    c.send(box("tiny", 100, run="opens"))
    c.submit("other", ONE, sandbox="tiny", run="opens")
    assert c.starts() == ["other"], "it is closed to calls alone"
    c.run("other")
    c.send(Release(sandbox="tiny"))
    c.send(Release(sandbox="i2"))
    assert c.starts() == ["open"]
    c.run("open")
    c.send(Release(sandbox="large"))
    assert c.starts() == ["call"]


def test_calls_pass_a_sandbox_that_no_instance_keeps_waiting(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 8, memory_gib=1.0), policy="adaptive")
    c.send(box("full", 500, node="n0", run="opens"))
    c.send(box("i0", 300, node="n0", run="calls", yields=True))
    c.send(box("large", 900, run="opens"))
    c.submit("open", ONE, sandbox="large", run="opens")
    c.submit("call", ONE, run="calls")
    wait_for(c, "call", 300)
    c.send(Release(sandbox="i0"))
    assert c.starts() == ["call"], "the sandbox waits for another, whose caller may wait for this call"


def test_a_call_whose_turn_it_is_precedes_later_sandboxes(cluster: Make) -> None:
    """Both age: neither a stream of calls nor one of sandboxes starves the other."""
    c = cluster(*cpu_node("n0", 8, memory_gib=1.0), policy="adaptive", ageing_s=10.0)
    c.send(box("box0", 800, node="n0", run="opens"))
    c.submit("call", ONE, run="calls")
    wait_for(c, "call", 600)
    for number in range(1, 6):
        c.now += 5.0
        c.send(box(f"box{number}", 500, run="opens"))
        c.submit(f"open{number}", ONE, sandbox=f"box{number}", run="opens")
        c.send(Release(sandbox=f"box{number - 1}"))
        if c.starts() == ["call"]:
            break
        c.run(f"open{number}")
    assert "call" in c.starts()


@pytest.mark.parametrize("policy", POLICIES)
def test_later_actions_stay_on_the_node_of_their_sandbox(cluster: Make, policy: str) -> None:
    c = cluster(*SMALL, *LARGE, policy=policy)
    c.send(box("b"))
    c.submit("first", ONE, sandbox="b")
    node = c.start("first").grant.node
    c.run("first")
    c.submit("fill", EIGHT)
    assert c.start("fill").grant.node == node == "large"
    c.submit("second", ONE, sandbox="b")
    assert c.starts() == [], "the other node has room, but its files are here"
    c.run("fill")
    assert c.start("second").grant.node == node


def test_actions_of_one_sandbox_that_wait_together_go_to_one_node(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 1, 1.0), *cpu_node("n1", 1, 1.0))
    c.send(box("b"))
    c.submit("x", ONE)
    c.submit("y", ONE)
    c.submit("first", ONE, sandbox="b")
    c.submit("second", ONE, sandbox="b")
    c.run("y")
    assert c.starts() == ["first"]
    c.run("x")
    assert c.starts() == [], "the second waits for the node that the first has chosen"
    c.run("first")
    assert c.starts() == ["second"]


def test_placement_balances_the_scarcest_resource(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4, 1.0), *cpu_node("n1", 4, 1.0))
    nodes = []
    for number in range(4):
        c.send(box(f"b{number}", 250))
        c.submit(f"a{number}", ONE, sandbox=f"b{number}")
        nodes.append(c.start(f"a{number}").grant.node)
        c.run(f"a{number}")
    assert nodes == ["n0", "n1", "n0", "n1"], "cores are all free again, memory is not"


def test_a_node_without_the_memory_is_not_chosen_however_many_cores_it_has(cluster: Make) -> None:
    c = cluster(*cpu_node("many", 64, 0.25), *cpu_node("few", 1, 1.0))
    c.send(box("b", 500))
    c.submit("a", ONE, sandbox="b")
    assert c.start("a").grant.node == "few"


def test_an_action_that_lacks_memory_waits_for_a_sandbox_to_end_and_blocks_no_placed_action(cluster: Make) -> None:
    c = cluster(*SMALL)
    c.send(box("old", 800))
    c.send(box("new", 800))
    c.submit("a", ONE, sandbox="old")
    c.run("a")
    assert c.submit("b", ONE, sandbox="new") == []
    c.submit("c", ONE, sandbox="old")
    assert c.starts() == ["c"], "cores are not what the other one lacks"
    c.run("c")
    c.send(Release(sandbox="old"))
    assert c.starts() == ["b"]


def test_memory_is_kept_until_the_last_action_has_ended(cluster: Make) -> None:
    c = cluster(*LARGE)
    c.send(box("b", 1000))
    c.submit("a", ONE, sandbox="b")
    c.submit("waits", EIGHT, sandbox="b")
    c.started("a")
    c.send(Release(sandbox="b"))
    assert Stop(action="a", reason="its sandbox b was released") in c.effects
    assert [outcome.action for outcome in c.outcomes()] == ["waits"]
    assert c.free("memory@large") == 3096
    c.submit("late", ONE, sandbox="b")
    assert c.refusal()[0] == "sandbox"
    c.finished("a")
    assert c.outcome().status is Status.CANCELLED
    assert c.free("memory@large") == 4096
    assert c.scheduler.statistics().sandboxes == 0


def test_a_sandbox_that_was_never_used_is_released_without_a_word(cluster: Make) -> None:
    c = cluster(*LARGE)
    c.send(box("b"))
    assert c.send(Release(sandbox="b")) == []
    assert c.scheduler.statistics().sandboxes == 0


def test_a_caller_may_choose_the_node_and_holds_the_memory_at_once(cluster: Make) -> None:
    c = cluster(*SMALL, *LARGE)
    c.send(box("b", 600, node="small"))
    assert c.free("memory@small") == 424
    c.submit("a", ONE, sandbox="b")
    assert c.start("a").grant.node == "small"


def test_a_sandbox_is_refused_with_the_limit_that_keeps_it_out(cluster: Make) -> None:
    c = cluster(*SMALL, sandboxes_max=2)
    c.send(box("b", 2000))
    assert c.effects == [
        Refuse(action="b", limit="capacity", reason="sandbox b requests 2000 MiB; the largest node has 1024")
    ]
    c.send(box("b", node="elsewhere"))
    assert c.refusal()[0] in ("node", "capacity")
    c.send(box("b"))
    c.send(box("b"))
    assert c.refusal() == ("id", "sandbox b is already reserved")
    c.send(box("fills", 1000, node="small"))
    c.send(box("third"))
    assert c.refusal() == ("sandboxes_max", "2 sandboxes are open; release some first")
    c.send(Release(sandbox="b"))
    c.send(box("full", 500, node="small"))
    assert c.refusal() == ("memory", "sandbox full requests 500 MiB; node small has 24 free")


def test_a_sandbox_that_is_refused_leaves_nothing_behind(cluster: Make) -> None:
    c = cluster(*SMALL, runs_max=2)
    for number, refused in enumerate([box("b", 2000), box("b", node="elsewhere"), box("b", 1025, node="small")]):
        c.send(msgspec.structs.replace(refused, run=f"r{number}"))
        assert c.refusal()
    statistics = c.scheduler.statistics()
    assert (statistics.runs, statistics.sandboxes) == ({}, 0)


def test_a_sandbox_of_one_run_too_many_is_refused(cluster: Make) -> None:
    c = cluster(*SMALL, runs_max=1)
    c.send(box("b", run="known"))
    c.send(box("c", run="another"))
    assert c.refusal() == ("runs_max", "1 runs are known; use the name of one of them")
    with pytest.raises(InvalidConfig, match="run: expected one of the 1 known runs, got 'another'"):
        c.send(RunChanged(run="another", weight=2.0))
    assert list(c.scheduler.statistics().runs) == ["known"]
    assert c.send(box("c", run="known")) == []


def test_an_action_that_needs_no_node_chooses_none(cluster: Make) -> None:
    c = cluster(*SMALL, Pool(kind="api", total=1))
    c.send(box("b"))
    c.submit("call", {"api": fixed(1)}, sandbox="b")
    assert c.start("call").grant.node == ""
    c.run("call")
    c.submit("a", ONE, sandbox="b")
    assert c.start("a").grant.node == "small"
    c.submit("call", {"api": fixed(1)}, sandbox="b")
    assert c.start("call").grant.node == "", "also when its sandbox has a place"


# ---- NUMA and exclusive cores -----------------------------------------------------------------------------------


def test_a_grant_lists_the_numa_cells_of_its_cores(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 8, numa_nodes=2))
    c.submit("a", {"cpu": cores(3)})
    assert c.start("a").grant.shares[0].cells == (0,)
    c.submit("b", {"cpu": cores(3)})
    assert c.start("b").grant.shares[0].cells == (1,)
    c.submit("c", TWO)
    assert c.start("c").grant.shares[0].cells == (0, 1)


def test_exclusive_cores_belong_to_one_action_each(cluster: Make) -> None:
    c = cluster(*SMALL, Pool(kind="core", node="small", total=4, numa=(2, 2)))
    c.submit("a", {"core": fixed(1)})
    c.submit("b", {"core": fixed(2)})
    assert c.start("b").grant.shares[0].cells == (2, 3)
    assert c.start("b").grant.width == 2
    c.submit("c", {"core": fixed(2)})
    assert c.effects == []
    c.submit("shared", ONE)
    assert c.starts() == ["shared"], "the other cores of the node are a pool of their own"
    c.run("a")
    assert c.starts() == ["c"]
    assert c.start("c").grant.shares[0].cells == (0, 1)


# ---- nodes ------------------------------------------------------------------------------------------------------


def test_a_node_that_joins_takes_what_waits(cluster: Make) -> None:
    c = cluster(*SMALL)
    c.submit("a", TWO)
    c.submit("b", TWO)
    for pool in LARGE:
        c.send(PoolChanged(pool=pool))
        if c.starts():
            break
    assert c.start("b").grant.node == "large"


def test_a_draining_node_takes_no_new_sandbox_but_goes_on_with_its_own(cluster: Make) -> None:
    c = cluster(*SMALL, *LARGE)
    c.send(box("old", node="large"))
    c.send(NodeChanged(node="large", state=NodeState.DRAINING))
    c.submit("own", EIGHT, sandbox="old")
    assert c.start("own").grant.node == "large"
    c.run("own")
    c.send(box("new"))
    c.submit("a", TWO, sandbox="new")
    assert c.start("a").grant.node == "small"
    c.submit("b", ONE)
    assert c.effects == []
    c.send(box("adopted", node="large"))
    assert c.refusal() == ("node", "node large is not up")
    c.send(NodeChanged(node="large", state=NodeState.UP))
    assert c.start("b").grant.node == "large"


def test_a_dead_node_loses_its_actions_and_sandboxes(cluster: Make) -> None:
    c = cluster(*SMALL, *LARGE)
    c.send(box("b", node="large"))
    c.submit("running", TWO, sandbox="b")
    c.submit("waiting", EIGHT, sandbox="b")
    c.started("running")
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    lost = {outcome.action: (outcome.status, outcome.reason) for outcome in c.outcomes()}
    reason = "node large went down with sandbox b"
    assert lost == {"running": (Status.LOST, reason), "waiting": (Status.LOST, reason)}
    assert c.scheduler.statistics().sandboxes == 0
    assert list(c.scheduler.ledger.pools) == ["cpu@small", "memory@small"]


def test_what_may_run_again_is_lost_all_the_same_if_its_sandbox_is(cluster: Make) -> None:
    c = cluster(*SMALL, *LARGE)
    c.send(box("b", node="large"))
    c.submit("a", TWO, sandbox="b", idempotent=True)
    c.started("a")
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    assert (c.outcome().status, c.starts()) == (Status.LOST, [])


def test_what_may_run_again_does_so_on_another_node(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 2), *cpu_node("n1", 2))
    c.submit("a", TWO, idempotent=True)
    c.submit("b", TWO)
    assert c.start("b").grant.node == "n1"
    c.started("a", "b")
    c.finished("b")
    c.send(NodeChanged(node="n0", state=NodeState.DOWN))
    assert c.outcomes() == []
    assert (c.start("a").grant.node, c.start("a").grant.attempt) == ("n1", 2)


def test_an_action_that_was_stopping_on_a_dead_node_ends_as_requested(cluster: Make) -> None:
    c = cluster(*LARGE)
    c.send(box("b", node="large"))
    c.submit("in a box", ONE, sandbox="b")
    c.submit("without", ONE, idempotent=True)
    c.started("in a box", "without")
    c.cancel("in a box")
    c.cancel("without")
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    assert [outcome.status for outcome in c.outcomes()] == [Status.CANCELLED] * 2


def test_a_released_sandbox_may_die_with_its_node_before_its_last_action_has_stopped(cluster: Make) -> None:
    c = cluster(*LARGE)
    c.send(box("b", node="large"))
    c.submit("a", ONE, sandbox="b")
    c.started("a")
    c.send(Release(sandbox="b"))
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    assert c.outcome().status is Status.CANCELLED
    assert c.send(box("b", 0)) == [], "the name is free again"


def test_a_node_comes_back_empty_when_its_pools_are_named_again(cluster: Make) -> None:
    c = cluster(*LARGE)
    c.send(box("b", 1000, node="large"))
    c.submit("a", EIGHT, sandbox="b")
    c.started("a")
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    c.submit("b", EIGHT)
    for pool in LARGE:
        c.send(PoolChanged(pool=pool))
        assert c.starts() == [], "a node that is down takes no action"
    c.send(NodeChanged(node="large", state=NodeState.UP))
    assert c.starts() == ["b"]
    assert (c.free("cpu@large"), c.free("memory@large")) == (0, 4096)
    c.finished("a")
    assert c.scheduler.statistics().late_events == 1, "the last words of what was lost"


def test_quotas_that_a_dead_node_held_are_free_again(cluster: Make) -> None:
    c = cluster(*SMALL, Pool(kind="api", total=1))
    c.submit("a", {"cpu": cores(1), "api": fixed(1)})
    c.submit("b", {"api": fixed(1)})
    c.send(NodeChanged(node="small", state=NodeState.DOWN))
    assert c.starts() == ["b"]


@pytest.mark.parametrize(("policy", "nodes"), [("adaptive", 5_000), ("fcfs", 3_000)])
def test_nodes_under_always_new_names_leave_nothing_behind(cluster: Make, policy: str, nodes: int) -> None:
    scheduler = cluster(policy=policy, ageing_s=0.5).scheduler

    def act(name: str, pools: dict[str, Amounts], **fields: Any) -> Submit:
        return Submit(action=Action(id=name, demand=Demand(pools), **fields))

    for number in range(nodes):
        name, long_ago = f"node-{number}", f"node-{max(0, number - 2 * NODES_AWAY_MAX)}"
        if number % 2:
            comes = [
                *[PoolChanged(pool=pool) for pool in cpu_node(name, 4 + number % 3, memory_gib=1.0)],
                box(name),
                act("first", {"cpu": cores(1, 4)}, sandbox=name),
                act("second", {"cpu": cores(4)}, sandbox=name),
                act("no place yet", {"cpu": cores(4)}),
            ]
            goes = [Cancel(action="no place yet"), Release(sandbox=name), Finished(action="first")]
        else:
            comes = [
                PoolChanged(pool=Pool(kind="gpu", node=name, total=8)),
                Resident(service="judge", node=name, devices=(0, 1)),
                act("first", {"gpu": one_of(1, 2)}, service="judge"),
                act("no place yet", {"gpu": fixed(8)}),
            ]
            # The last words come after the name was forgotten, or just before.
            goes = [Cancel(action="no place yet")] + [
                Resident(service="judge", node=node, devices=(0,)) for node in (name, long_ago)
            ]
        for event in comes:
            scheduler.handle(event, float(number))
        # By now the one without a place has aged and closed the pools of the node.
        for event in [Tick(), NodeChanged(node=name, state=NodeState.DOWN), *goes]:
            scheduler.handle(event, number + 0.9)
        assert not scheduler.entries
    scheduler.check()
    assert counted(scheduler, nodes + 1.0) < 1_300 + RECENT_EVENTS_MAX * 4, "less than one thing per node"
    assert len(scheduler.ledger.nodes) == NODES_AWAY_MAX
    assert not scheduler.ledger.pools


def test_the_last_removed_nodes_are_remembered_and_older_ones_are_new_again(cluster: Make) -> None:
    """A late word about its pools does not bring a dead node back, until it was dead for that many others."""
    c = cluster(*cpu_node("n0", 1))
    for number in range(NODES_AWAY_MAX):
        c.send(NodeChanged(node=f"n{number}", state=NodeState.DOWN))
    c.send(PoolChanged(pool=LARGE[0]))
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    assert "n0" not in c.scheduler.ledger.nodes
    for node in ("n1", "large"):
        c.send(PoolChanged(pool=Pool(kind="cpu", node=node, total=8000)))
        c.submit(f"a-{node}", EIGHT)
        assert c.starts() == [], "it is known to be down"
    for number in range(NODES_AWAY_MAX):
        c.send(NodeChanged(node=f"m{number}", state=NodeState.DOWN))
    assert list(c.scheduler.ledger.pools) == [], "what was said late is forgotten with it"
    c.send(PoolChanged(pool=Pool(kind="cpu", node="n1", total=8000)))
    assert c.starts() == ["a-n1"]


@pytest.mark.parametrize("states", [[NodeState.UP], [NodeState.DRAINING, NodeState.UP], [NodeState.DOWN, NodeState.UP]])
def test_a_node_that_has_pools_is_never_forgotten(cluster: Make, states: list[NodeState]) -> None:
    c = cluster()
    for state in states[:-1]:
        c.send(NodeChanged(node="small", state=state))
    if NodeState.DOWN in states:
        c.send(PoolChanged(pool=SMALL[0]))
    c.send(NodeChanged(node="small", state=states[-1]))
    c.send(PoolChanged(pool=SMALL[0]))
    for number in range(NODES_AWAY_MAX + 1):
        c.send(NodeChanged(node=f"n{number}", state=NodeState.DOWN))
    c.submit("a", ONE)
    assert c.start("a").grant.node == "small"


def test_nodes_that_are_announced_and_never_get_pools_are_forgotten(cluster: Make) -> None:
    c = cluster()
    for number in range(3 * NODES_AWAY_MAX):
        c.send(NodeChanged(node=f"n{number}", state=[NodeState.UP, NodeState.DRAINING][number % 2]))
    assert len(c.scheduler.ledger.nodes) == NODES_AWAY_MAX


def test_a_node_that_comes_back_without_its_pools_has_none(cluster: Make) -> None:
    c = cluster(*LARGE, stranded_s=60.0)
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    c.submit("a", EIGHT)
    c.send(NodeChanged(node="large", state=NodeState.UP))
    assert c.starts() == []
    c.send(box("b", 100, node="large"))
    assert c.refusal() == ("capacity", "sandbox b requests 100 MiB; the largest node has 0")
    assert c.explain("a") == "a requests pool kind cpu, which does not exist; kinds: none"
    c.send(PoolChanged(pool=LARGE[0]))
    assert c.starts() == ["a"]


def test_the_sizes_of_dead_nodes_are_remembered_up_to_a_number(cluster: Make) -> None:
    c = cluster(*LARGE)

    names = itertools.count()

    def comes_and_goes(units: int, kind: str = "disk") -> None:
        node = f"away-{next(names)}"
        c.send(PoolChanged(pool=Pool(kind=kind, node=node, total=units)))
        c.send(NodeChanged(node=node, state=NodeState.DOWN))

    for units in range(SHAPES_MAX + 1, 0, -1):
        comes_and_goes(units)
    c.submit("forgotten", {"disk": fixed(SHAPES_MAX + 1)})
    assert c.refusal()[0] == "capacity"
    c.submit("may come back", {"disk": fixed(SHAPES_MAX)})
    assert c.wakes() and "may come back" in c.scheduler.entries, "it waits for such a node"
    c.cancel("may come back")
    comes_and_goes(SHAPES_MAX)
    comes_and_goes(1, "another")
    c.submit("is known", {"disk": fixed(SHAPES_MAX)})
    assert "is known" in c.scheduler.entries, "a size seen again counts as new"
    c.submit("never was", {"disk": fixed(SHAPES_MAX), "cpu": cores(1)})
    assert c.refusal()[0] == "capacity"


# ---- pools that shrink, and actions that are stranded -----------------------------------------------------------


def test_a_pool_that_shrinks_below_what_is_held_grants_nothing_until_it_recovers(cluster: Make) -> None:
    c = cluster(*LARGE)
    c.submit("a", {"cpu": cores(6)})
    c.send(PoolChanged(pool=Pool(kind="cpu", node="large", total=4000)))
    assert c.free("cpu@large") == -2000
    c.submit("b", ONE)
    assert c.effects == []
    c.run("a")
    assert c.starts() == ["b"]
    c.send(PoolChanged(pool=LARGE[0]))
    assert c.free("cpu@large") == 7000


def test_an_action_that_no_pool_can_hold_any_more_waits_for_one_to_come_back_and_is_lost_then(cluster: Make) -> None:
    c = cluster(*SMALL, *LARGE, stranded_s=60.0)
    c.submit("all", EIGHT)
    c.submit("a", EIGHT)
    c.now = 10.0
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    assert [outcome.action for outcome in c.outcomes()] == ["all"]
    assert c.wakes() == [70.0]
    assert c.explain("a") == "a requests at least 8 cores of cpu; the largest such pool has 2 cores"
    c.now = 70.0
    c.pass_time(0.0)
    outcome = c.outcome()
    assert (outcome.action, outcome.status, outcome.waiting_s) == ("a", Status.LOST, 70.0)
    assert outcome.reason == "stranded: a requests at least 8 cores of cpu; the largest such pool has 2 cores"


def test_a_stranded_action_starts_when_its_node_is_back_and_its_time_limit_starts_over(cluster: Make) -> None:
    c = cluster(*LARGE, stranded_s=60.0)
    c.submit("all", EIGHT)
    c.submit("a", EIGHT)
    shrunk, whole = Pool(kind="cpu", node="large", total=4000), LARGE[0]
    c.send(PoolChanged(pool=shrunk))
    c.now = 50.0
    c.send(PoolChanged(pool=whole))
    c.now = 55.0
    c.send(PoolChanged(pool=shrunk))
    c.pass_time(10.0)
    assert c.outcomes() == [], "stranded for ten seconds, not for 65"
    c.send(PoolChanged(pool=whole))
    c.run("all")
    assert c.starts() == ["a"]


def test_other_changes_do_not_give_a_stranded_action_more_time(cluster: Make) -> None:
    c = cluster(*LARGE, stranded_s=60.0)
    c.submit("all", EIGHT)
    c.submit("a", EIGHT)
    c.send(PoolChanged(pool=Pool(kind="cpu", node="large", total=4000)))
    for _ in range(5):
        c.now += 10.0
        c.send(PoolChanged(pool=Pool(kind="api", total=1)))
    c.pass_time(10.0)
    assert c.outcome().action == "a"


def test_an_action_that_arrives_while_the_only_node_is_down_waits_for_it(cluster: Make) -> None:
    c = cluster(*LARGE, stranded_s=60.0)
    c.send(NodeChanged(node="large", state=NodeState.DOWN))
    assert c.send(box("b")) == []
    c.submit("a", EIGHT, sandbox="b")
    assert c.wakes() == [60.0]
    c.submit("too much", {"cpu": cores(9)})
    assert c.refusal()[0] == "capacity"
    for pool in LARGE:
        c.send(PoolChanged(pool=pool))
    c.send(NodeChanged(node="large", state=NodeState.UP))
    assert c.starts() == ["a"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sandbox_waits_for_a_node_that_could_hold_all_its_actions(cluster: Make, policy: str) -> None:
    c = cluster(*SMALL, *LARGE, policy=policy)
    c.submit("fill", EIGHT)
    c.send(box("b"))
    c.submit("wide", EIGHT, sandbox="b")
    c.submit("first", ONE, sandbox="b", priority=1)
    assert c.starts() == [], "the small node is idle, but the other action could never run there"
    if policy == "adaptive":
        c.send(box("another"))
        c.submit("free", ONE, sandbox="another", priority=1)
        assert c.start("free").grant.node == "small", "an action that waits alone is not kept from it"
    c.run("fill")
    assert c.start("first").grant.node == "large"
    c.run("first")
    assert c.start("wide").grant.node == "large"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sandbox_whose_actions_need_other_kinds_goes_where_all_of_them_are(cluster: Make, policy: str) -> None:
    c = cluster(*LARGE, *cpu_node("g0", 2, 1.0), Pool(kind="gpu", node="g0", total=4), policy=policy)
    c.submit("fill", {"cpu": cores(2), "gpu": fixed(4)})
    c.send(box("b"))
    c.submit("judge", {"gpu": fixed(1)}, sandbox="b")
    c.submit("edit", {"cpu": learned()}, sandbox="b")
    assert c.starts() == []
    c.run("fill")
    assert {c.start(name).grant.node for name in ("judge", "edit")} == {"g0"}


def test_once_the_demanding_sibling_has_ended_its_siblings_take_any_node(cluster: Make) -> None:
    c = cluster(*SMALL, *LARGE)
    c.submit("fill", EIGHT)
    c.send(box("b"))
    c.submit("wide", EIGHT, sandbox="b", priority=-1)
    c.submit("first", ONE, sandbox="b")
    c.submit("second", ONE, sandbox="b")
    c.cancel("wide")
    assert [c.start(name).grant.node for name in ("first", "second")] == ["small", "small"]


@pytest.mark.parametrize("policy", POLICIES)
def test_once_no_node_could_hold_all_siblings_they_take_any_node(cluster: Make, policy: str) -> None:
    c = cluster(*SMALL, *cpu_node("g0", 2, 1.0), Pool(kind="gpu", node="g0", total=4), policy=policy)
    c.submit("fill", {"cpu": cores(2), "gpu": fixed(4)})
    c.send(box("b"))
    c.submit("judge", {"gpu": fixed(1)}, sandbox="b")
    c.submit("edit", ONE, sandbox="b")
    assert c.starts() == []
    c.send(PoolChanged(pool=Pool(kind="gpu", node="g0", total=0)))
    assert c.start("edit").grant.node == "small"


def test_a_sibling_of_a_quota_needs_nothing_of_the_node(cluster: Make) -> None:
    c = cluster(*SMALL, Pool(kind="api", total=1))
    c.submit("fill", {"cpu": cores(2), "api": fixed(1)})
    c.send(box("b"))
    c.submit("call", {"api": fixed(1)}, sandbox="b")
    c.submit("a", ONE, sandbox="b")
    c.run("fill")
    assert c.starts() == ["call", "a"]


def test_where_no_node_could_hold_all_the_first_decides_and_the_other_is_stranded(cluster: Make) -> None:
    c = cluster(*SMALL, Pool(kind="gpu", node="g0", total=4), stranded_s=60.0)
    c.submit("fill", TWO)
    c.send(box("b", 0))
    c.submit("a", ONE, sandbox="b")
    c.submit("judge", {"gpu": fixed(8)}, sandbox="b")
    assert c.refusal()[0] == "capacity"
    c.submit("judge", {"gpu": fixed(1)}, sandbox="b")
    assert c.start("judge").grant.node == "g0"
    assert c.explain("a") == "a requests pool kind cpu, which does not exist on node g0; kinds: cpu, gpu, memory"
    c.pass_time(60.0)
    assert c.outcome().action == "a"


def test_learned_cpu_runs_on_a_node_that_is_smaller_than_what_it_would_reserve(cluster: Make) -> None:
    for policy in POLICIES:
        c = cluster(*cpu_node("tiny", 0.5), policy=policy)
        c.submit("a", {"cpu": learned()})
        assert c.start("a").grant.shares[0].reserved == 500
        c.submit("b", {"cpu": learned(0.2)})
        c.run("a", 1.0)
        assert c.start("b").grant.shares[0].reserved <= 200


def test_check_detects_a_sandbox_whose_memory_is_elsewhere(cluster: Make) -> None:
    c = cluster(*SMALL, *LARGE)
    c.send(box("b", node="small"))
    c.scheduler.sandboxes.by_id["b"].node = "large"
    with pytest.raises(InvariantError, match="holds memory on 'small'"):
        c.scheduler.check()


def test_check_finds_a_released_sandbox_that_was_left_behind(cluster: Make) -> None:
    c = cluster(*SMALL)
    c.send(box("b"))
    c.scheduler.sandboxes.by_id["b"].released = True
    with pytest.raises(InvariantError, match="sandbox b is released and empty but not removed"):
        c.scheduler.check()
