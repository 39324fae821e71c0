"""Explain: one sentence that a person can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tangram.core.demand import cores, fixed, learned
from tangram.core.messages import NodeChanged, NodeState, Pool, PoolChanged, Reserve, Tick, Window, cpu_node

Make = Callable[..., Any]

NODE = cpu_node("n0", 4, memory_gib=1.0)
GPU = Pool(kind="gpu", node="g0", total=8)
FOUR = {"cpu": cores(4)}


def test_a_running_action_shows_where_and_with_how_much_it_runs(cluster: Make) -> None:
    c = cluster(*NODE, GPU, Pool(kind="api", total=2))
    c.submit("a", {"cpu": cores(2.5), "api": fixed(1)})
    assert c.explain("a") == "a is starting on 2.5 cores of cpu@n0, 1 unit of api"
    c.started("a")
    assert c.explain("a") == "a is running on 2.5 cores of cpu@n0, 1 unit of api"
    c.submit("b", {"gpu": fixed(3)})
    assert c.explain("b") == "b is starting on 4 devices of gpu@g0"


def test_a_stopping_action_shows_why_and_that_it_holds_its_units(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.cancel("a")
    assert (
        c.explain("a")
        == "a is stopping (cancelled by the caller) and holds its units until its manager reports Finished"
    )


def test_a_waiting_action_shows_what_it_lacks_and_what_is_free(cluster: Make) -> None:
    c = cluster(*NODE, GPU, Pool(kind="tokens", total=10, window=Window(seconds=60.0)))
    c.submit("a", {"cpu": cores(3), "tokens": fixed(8)})
    c.submit("b", {"cpu": cores(2), "tokens": fixed(8)})
    assert c.explain("b") == (
        "b waits for 2 cores of cpu@n0, where 1 core of 4 cores are free"
        " and 8 units of tokens, where 2 units of 10 units are free"
    )
    c.submit("c", {"gpu": fixed(8)})
    c.submit("d", {"gpu": fixed(1)})
    assert c.explain("d") == "d waits for 1 device of gpu@g0, where 0 devices of 8 devices are free"


def test_an_action_that_waits_for_memory_shows_it(cluster: Make) -> None:
    c = cluster(*NODE)
    c.send(Reserve(sandbox="old", memory=800, node="n0"))
    c.send(Reserve(sandbox="new", memory=800))
    c.submit("a", {"cpu": learned()}, sandbox="new")
    assert c.explain("a") == "a waits for 800 MiB of memory@n0, where 224 MiB of 1024 MiB are free"


def test_an_action_behind_another_names_it(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    c.submit("c", FOUR)
    c.submit("d", {"cpu": cores(1)})
    lacks = "4 cores of cpu@n0, where 0 cores of 4 cores are free"
    assert c.explain("b") == f"b waits for {lacks}"
    assert c.explain("c") == f"c waits behind b, which goes first and waits for {lacks}"
    assert c.explain("d") == f"d waits behind b, which goes first and waits for {lacks}"


def test_where_no_action_closes_a_pool_the_number_ahead_is_shown(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive")
    c.submit("a", FOUR, duration_s=1.0)
    for name in "bcd":
        c.submit(name, FOUR, duration_s=1.0)
    assert c.explain("d") == (
        "d waits behind up to 2 actions of run default; the first of them waits for"
        " 4 cores of cpu@n0, where 0 cores of 4 cores are free"
    )


def test_a_chain_of_waiting_actions_names_its_head(cluster: Make) -> None:
    c = cluster(Pool(kind="api", total=4), Pool(kind="web", total=4))
    c.submit("holds", {"api": fixed(4)})
    c.submit("first", {"api": fixed(1), "web": fixed(1)})
    c.submit("second", {"api": fixed(1), "web": fixed(4)})
    c.submit("third", {"web": fixed(1)})
    first = "first, which goes first and waits for 1 unit of api, where 0 units of 4 units are free"
    assert c.explain("second") == f"second waits behind {first}"
    assert "its turn" not in c.explain("third")


def test_an_action_that_only_the_policy_holds_back_shows_it(cluster: Make) -> None:
    c = cluster(*NODE, policy="fixed:4")
    c.submit("a", {"cpu": cores(1)})
    c.submit("b", {"cpu": cores(1, 4)})
    assert c.explain("b") == "b waits for its turn: cpu@n0 would hold it, but policy fixed:4 has not started it yet"


def test_an_action_that_fits_no_node_now_shows_its_demand(cluster: Make) -> None:
    c = cluster(*NODE, *cpu_node("n1", 2))
    c.submit("all", FOUR)
    c.submit("a", FOUR)
    c.send(NodeChanged(node="n0", state=NodeState.DRAINING))
    assert c.explain("a") == "a requests 4 cores of cpu together; no node that is up has all of them"
    c.send(NodeChanged(node="n0", state=NodeState.DOWN))
    assert c.explain("a") == "a requests at least 4 cores of cpu; the largest such pool has 2 cores"
    c.send(NodeChanged(node="n1", state=NodeState.DOWN))
    assert c.explain("a") == "a requests pool kind cpu, which does not exist; kinds: none"


def test_an_action_that_fits_no_pool_shows_that_devices_come_in_chunks(cluster: Make) -> None:
    c = cluster(Pool(kind="gpu", node="g0", total=6))
    c.submit("a", {"gpu": fixed(5)})
    assert c.refusal()[1] == "a requests at least 5 devices (a chunk of 8) of gpu; the largest such pool has 6 devices"


def test_an_action_that_does_not_fit_the_node_of_its_sandbox_shows_it(cluster: Make) -> None:
    c = cluster(*NODE, *cpu_node("n1", 8))
    c.send(Reserve(sandbox="b", memory=0, node="n0"))
    c.send(PoolChanged(pool=Pool(kind="cpu", node="n0", total=2000)))
    c.submit("a", FOUR, sandbox="b")
    assert c.explain("a") == "a requests at least 4 cores of cpu; cpu@n0, where its sandbox is, has 2 cores"
    c.send(PoolChanged(pool=Pool(kind="api", total=2)))
    c.send(PoolChanged(pool=Pool(kind="api", total=1)))
    c.submit("b", {"api": fixed(2)}, sandbox="b")
    assert c.explain("b") == "b requests at least 2 units of api; the largest such pool has 1 unit"


def test_an_action_whose_node_lacks_a_kind_entirely_shows_it(cluster: Make) -> None:
    c = cluster(*NODE, GPU)
    c.send(Reserve(sandbox="b", memory=0))
    c.submit("fill", FOUR)
    c.submit("a", FOUR, sandbox="b")
    c.submit("d", {"gpu": fixed(1)}, sandbox="b")
    assert c.explain("a") == "a requests pool kind cpu, which does not exist on node g0; kinds: cpu, gpu, memory"


def test_when_every_kind_is_free_but_not_on_one_node_the_lack_of_one_node_is_shown(cluster: Make) -> None:
    c = cluster(*cpu_node("n0", 4), *cpu_node("n1", 4), *[Pool(kind="gpu", node=n, total=1) for n in ("n0", "n1")])
    for node, pools in (("n0", FOUR), ("n1", {"gpu": fixed(1)})):
        c.send(Reserve(sandbox=node, memory=0, node=node))
        c.submit(f"on {node}", pools, sandbox=node)
    c.submit("a", {"cpu": cores(1), "gpu": fixed(1)})
    assert c.explain("a") == "a waits for 1 device of gpu@n1, where 0 devices of 1 device are free"


def test_devices_that_are_free_but_not_side_by_side_are_called_apart(cluster: Make) -> None:
    c = cluster(Pool(kind="gpu", node="g0", total=4))
    for name in "wxyz":
        c.submit(name, {"gpu": fixed(1)})
    c.run("w")
    c.run("y")
    c.submit("a", {"gpu": fixed(2)})
    assert c.explain("a") == "a waits for 2 devices of gpu@g0, where 2 devices of 4 devices are free, but apart"
    c.submit("b", {"gpu": fixed(3)}, priority=1)
    assert c.explain("b") == "b waits for 3 devices (a chunk of 4) of gpu@g0, where 2 devices of 4 devices are free"


def test_of_a_pool_that_shrank_below_what_is_held_nothing_is_free(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("all", FOUR)
    c.send(PoolChanged(pool=Pool(kind="cpu", node="n0", total=1000)))
    c.submit("a", {"cpu": cores(1)})
    assert c.explain("a") == "a waits for 1 core of cpu@n0, where 0 cores of 1 core are free"


def test_an_action_that_is_kept_from_one_node_and_lacks_units_on_the_other_shows_the_lack(cluster: Make) -> None:
    c = cluster(
        *cpu_node("n0", 4), Pool(kind="gpu", node="n0", total=1), *cpu_node("n1", 4), policy="adaptive", ageing_s=10.0
    )
    c.send(Reserve(sandbox="b", memory=0, node="n1"))
    c.submit("n1 is full", FOUR, sandbox="b")
    c.submit("device", {"gpu": fixed(1)})
    c.submit("both", {"cpu": cores(1), "gpu": fixed(1)})
    c.pass_time(11.0)
    c.submit("late", {"cpu": cores(1)})
    assert c.explain("late") == (
        "late waits behind both, which goes first and waits for 1 device of gpu@n0,"
        " where 0 devices of 1 device are free"
    ), "it keeps the cores of that node, of which some are free"
    c.submit("first of a poor run", FOUR, run="poor")
    assert c.starts() == ["first of a poor run"]
    assert c.explain("late") == "late waits for 1 core of cpu@n1, where 0 cores of 4 cores are free"


def test_the_first_of_a_lane_is_its_oldest_once_that_has_aged(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive", ageing_s=10.0)
    c.submit("all", FOUR)
    c.submit("old", FOUR, duration_s=100.0)
    c.submit("short", FOUR, duration_s=1.0)
    lacks = "4 cores of cpu@n0, where 0 cores of 4 cores are free"
    assert c.explain("old") == f"old waits behind up to 1 action of run default; the first of them waits for {lacks}"
    c.pass_time(11.0)
    assert c.explain("old") == f"old waits for {lacks}"
    assert c.explain("short").startswith("short waits behind up to 1 action of run default")


def test_an_action_that_waits_for_a_node_for_its_whole_sandbox_shows_it(cluster: Make) -> None:
    c = cluster(*NODE, *cpu_node("n1", 1, memory_gib=1.0), policy="adaptive")
    c.submit("fill", FOUR)
    c.send(Reserve(sandbox="b", memory=0))
    c.submit("wide", FOUR, sandbox="b")
    c.submit("a", {"cpu": cores(1)}, sandbox="b")
    assert c.explain("a") == (
        "a waits for 1 core of cpu@n0, where 0 cores of 4 cores are free;"
        " its node must be one that could hold all actions of sandbox b"
    )


def test_once_its_sandbox_has_a_node_other_actions_of_the_sandbox_are_not_shown(cluster: Make) -> None:
    c = cluster(*NODE)
    c.send(Reserve(sandbox="b", memory=0))
    c.submit("fill", FOUR)
    c.submit("first", FOUR, sandbox="b")
    c.submit("a", {"cpu": cores(1)}, sandbox="b")
    c.run("fill")
    assert c.starts() == ["first"]
    assert c.explain("a") == "a waits for 1 core of cpu@n0, where 0 cores of 4 cores are free"


def test_of_several_nodes_the_one_that_lacks_least_is_named_and_none_that_drains(cluster: Make) -> None:
    pools = [Pool(kind="gpu", node=node, total=1) for node in ("n0", "n1", "n2")]
    c = cluster(*cpu_node("n0", 4), *cpu_node("n1", 4), *cpu_node("n2", 4), *pools)
    for node, demand in (("n0", {"gpu": fixed(1), "cpu": cores(3)}), ("n1", {"gpu": fixed(1), "cpu": cores(2)})):
        c.send(Reserve(sandbox=node, memory=0, node=node))
        c.submit(f"on {node}", demand, sandbox=node)
    c.send(NodeChanged(node="n2", state=NodeState.DRAINING))
    c.submit("a", {"gpu": fixed(1), "cpu": cores(2)})
    assert c.explain("a") == "a waits for 1 device of gpu@n1, where 0 devices of 1 device are free"


def test_of_a_pool_smaller_than_what_would_be_reserved_all_is_wanted(cluster: Make) -> None:
    c = cluster(*cpu_node("tiny", 0.5), policy="adaptive")
    c.submit("all", {"cpu": fixed(500)})
    c.submit("a", {"cpu": learned()})
    assert c.explain("a") == "a waits for 0.5 cores of cpu@tiny, where 0 cores of 0.5 cores are free"


def test_explaining_changes_nothing(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive")
    c.submit("all", FOUR)
    c.submit("a", {"cpu": learned()})
    c.scheduler.handle(Tick(), 100.0)
    entry = c.scheduler.entries["a"]
    before = (entry.estimate, entry.estimated_at, entry.learned_reserve)
    assert c.explain("a") == "a waits for 0.95 cores of cpu@n0, where 0 cores of 4 cores are free"
    assert (entry.estimate, entry.estimated_at, entry.learned_reserve) == before


def test_a_settled_action_shows_its_state(cluster: Make) -> None:
    c = cluster(*NODE)
    assert c.explain("x") == "x is not live: it has settled or was never submitted"
