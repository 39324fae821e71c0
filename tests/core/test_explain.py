"""Explain: one sentence that a person can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tangram.core.demand import cores, fixed, learned
from tangram.core.messages import NodeChanged, NodeState, Pool, Reserve, Window, cpu_node

Make = Callable[..., Any]

NODE = cpu_node("n0", 4, memory_gib=1.0)
GPU = Pool(kind="gpu", node="g0", total=8)
FOUR = {"cpu": cores(4)}


def test_what_runs_says_where_and_with_how_much(cluster: Make) -> None:
    c = cluster(*NODE, GPU, Pool(kind="api", total=2))
    c.submit("a", {"cpu": cores(2.5), "api": fixed(1)})
    assert c.explain("a") == "a is starting on 2.5 cores of cpu@n0, 1 units of api"
    c.started("a")
    assert c.explain("a") == "a is running on 2.5 cores of cpu@n0, 1 units of api"
    c.submit("b", {"gpu": fixed(3)})
    assert c.explain("b") == "b is starting on 4 devices of gpu@g0"


def test_what_is_stopping_says_why_and_that_it_holds_its_units(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.cancel("a")
    assert (
        c.explain("a") == "a is stopping (cancelled by the caller) and holds its units until its manager says Finished"
    )


def test_what_waits_says_what_it_lacks_and_what_is_free(cluster: Make) -> None:
    c = cluster(*NODE, GPU, Pool(kind="tokens", total=10, window=Window(seconds=60.0)))
    c.submit("a", {"cpu": cores(3), "tokens": fixed(8)})
    c.submit("b", {"cpu": cores(2), "tokens": fixed(8)})
    assert c.explain("b") == (
        "b waits for 2 cores of cpu@n0, where 1 cores of 4 cores are free"
        " and 8 units of tokens, where 2 units of 10 units are free"
    )
    c.submit("c", {"gpu": fixed(8)})
    c.submit("d", {"gpu": fixed(1)})
    assert c.explain("d") == "d waits for 1 devices of gpu@g0, where 0 devices of 8 devices are free"


def test_what_waits_for_memory_says_so(cluster: Make) -> None:
    c = cluster(*NODE)
    c.send(Reserve(sandbox="old", memory=800, node="n0"))
    c.send(Reserve(sandbox="new", memory=800))
    c.submit("a", {"cpu": learned()}, sandbox="new")
    assert c.explain("a") == "a waits for 800 MiB of memory@n0, where 224 MiB of 1024 MiB are free"


def test_who_waits_behind_others_says_behind_whom(cluster: Make) -> None:
    c = cluster(*NODE)
    c.submit("a", FOUR)
    c.submit("b", FOUR)
    c.submit("c", FOUR)
    c.submit("d", {"cpu": cores(1)})
    lacks = "4 cores of cpu@n0, where 0 cores of 4 cores are free"
    assert c.explain("b") == f"b waits for {lacks}"
    assert c.explain("c") == f"c waits behind b, which goes first and waits for {lacks}"
    assert c.explain("d") == f"d waits behind b, which goes first and waits for {lacks}"


def test_where_nobody_closes_a_pool_it_says_how_many_are_ahead(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive")
    c.submit("a", FOUR, duration_s=1.0)
    for name in "bcd":
        c.submit(name, FOUR, duration_s=1.0)
    assert c.explain("d") == (
        "d waits behind up to 2 actions of run default; the first of them waits for"
        " 4 cores of cpu@n0, where 0 cores of 4 cores are free"
    )


def test_what_could_start_but_for_the_policy_says_that(cluster: Make) -> None:
    c = cluster(*NODE, policy="fixed:4")
    c.submit("a", {"cpu": cores(1)})
    c.submit("b", {"cpu": cores(1, 4)})
    assert c.explain("b") == "b waits for its turn: the policy keeps its pools for others now"


def test_what_no_node_can_hold_now_says_what_it_asks_for(cluster: Make) -> None:
    c = cluster(*NODE, *cpu_node("n1", 2))
    c.submit("all", FOUR)
    c.submit("a", FOUR)
    c.send(NodeChanged(node="n0", state=NodeState.DRAINING))
    assert c.explain("a") == "a asks for 4 cores of cpu together; no node that is up has all of them"
    c.send(NodeChanged(node="n0", state=NodeState.DOWN))
    assert c.explain("a") == "a asks for at least 4 cores of cpu; the largest such pool has 2 cores"
    c.send(NodeChanged(node="n1", state=NodeState.DOWN))
    assert c.explain("a") == "a asks for pool kind cpu, of which there is none; kinds: none"


def test_what_is_not_live_says_so(cluster: Make) -> None:
    c = cluster(*NODE)
    assert c.explain("x") == "x is not live: it settled or never came"
