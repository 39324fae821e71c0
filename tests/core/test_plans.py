"""Plans: what a policy decides is done, and what is no decision stops everything by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tangram.core.demand import cores, fixed, learned
from tangram.core.messages import NodeChanged, NodeState, Pool, Reserve, cpu_node
from tangram.core.policies.base import Adjust, ArrivalOrder, Begin, Hold, Preload
from tangram.core.snapshot import Snapshot
from tangram.errors import InvariantError

Make = Callable[..., Any]

NODE = cpu_node("n0", 4)
ONE = {"cpu": cores(1)}


class ScriptedPolicy(ArrivalOrder):
    """Returns the plan and the order of the test."""

    name = "scripted"

    def __init__(self, plan: Callable[[Snapshot], Any] | None = None, key: Any = 0.0) -> None:
        self.decide = plan
        self.key = key

    def order(self, entry: object, snapshot: object) -> Any:
        return self.key

    def plan(self, snapshot: Snapshot) -> Any:
        return self.decide(snapshot) if self.decide else self._begin_all(snapshot)

    def _begin_all(self, snapshot: Snapshot) -> Iterator[Begin]:
        for candidate in snapshot.candidates():
            yield Begin(candidate.entry, candidate.node)


@pytest.mark.parametrize("plan", [None, 42])
def test_a_plan_that_is_no_iterator_is_named(cluster: Make, plan: Any) -> None:
    c = cluster(*NODE, policy=ScriptedPolicy(lambda snapshot: plan))
    with pytest.raises(InvariantError, match=f"policy scripted planned {plan}, expected an iterator of decisions"):
        c.submit("a", ONE)


def test_a_plan_may_be_any_iterable(cluster: Make) -> None:
    c = cluster(
        *NODE, policy=ScriptedPolicy(lambda snapshot: [Begin(c.entry, c.node) for c in [next(snapshot.candidates())]])
    )
    c.submit("a", ONE)
    assert c.starts() == ["a"]


def test_an_error_of_the_policy_itself_stays_what_it_is(cluster: Make) -> None:
    def wrong(snapshot: Snapshot) -> Any:
        raise TypeError("a bug of the policy")

    with pytest.raises(TypeError, match="a bug of the policy"):
        cluster(*NODE, policy=ScriptedPolicy(wrong)).submit("a", ONE)


def test_what_is_no_decision_is_named(cluster: Make) -> None:
    c = cluster(*NODE, policy=ScriptedPolicy(lambda snapshot: [42]))
    with pytest.raises(
        InvariantError, match="policy scripted decided 42, expected Begin, Hold, Adjust, Preload or Retry"
    ):
        c.submit("a", ONE)


def test_a_candidate_is_not_a_decision_and_the_error_has_the_story_of_its_action(cluster: Make) -> None:
    c = cluster(*NODE, policy=ScriptedPolicy(lambda snapshot: snapshot.candidates()))
    with pytest.raises(InvariantError, match=r"policy scripted decided Candidate\(.*, expected Begin") as caught:
        c.submit("a", ONE)
    assert "Submit" in caught.value.story[0]


@pytest.mark.parametrize("key", [math.nan, None, "soon", [1.0]])
def test_an_order_that_is_no_number_is_named_with_the_story(cluster: Make, key: Any) -> None:
    c = cluster(*NODE, policy=ScriptedPolicy(key=key))
    with pytest.raises(InvariantError, match=r"policy scripted orders a by .*, not by a number") as caught:
        c.submit("a", ONE)
    assert repr(key) in caught.value.what
    assert "Submit" in caught.value.story[0]


def test_an_action_that_the_policy_could_not_order_never_came_in(cluster: Make) -> None:
    policy = ScriptedPolicy(key=math.nan)
    c = cluster(*NODE, policy=policy)
    c.send(Reserve(sandbox="box", memory=0))
    with pytest.raises(InvariantError, match="not by a number"):
        c.submit("a", ONE, sandbox="box", deadline_s=5.0)
    c.scheduler.check()
    assert c.explain("a") == "a is not live: it has settled or was never submitted"
    assert c.cancel("a") == c.pass_time(10.0) == []
    policy.key = 0.0
    c.submit("a", ONE, sandbox="box")
    assert c.starts() == ["a"]


@pytest.mark.parametrize("key", [-math.inf, math.inf, 3, True])
def test_an_order_may_be_any_number(cluster: Make, key: Any) -> None:
    c = cluster(*NODE, policy=ScriptedPolicy(key=key))
    c.submit("a", ONE)
    assert c.starts() == ["a"]


def test_a_plan_that_starts_an_action_away_from_its_sandbox_stops(cluster: Make) -> None:
    class Elsewhere(ScriptedPolicy):
        def plan(self, snapshot: Snapshot) -> Iterator[Begin]:
            for candidate in snapshot.candidates():
                yield Begin(candidate.entry, "n1")

    c = cluster(*NODE, *cpu_node("n1", 4), policy=Elsewhere())
    c.send(Reserve(sandbox="b", memory=0, node="n0"))
    with pytest.raises(
        InvariantError, match="plan starts an action of sandbox b on n1, but the sandbox is on n0"
    ) as caught:
        c.submit("a", ONE, sandbox="b")
    assert len(caught.value.story) == 1


@pytest.mark.parametrize("decide", [Begin, Hold])
@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("n9", "plan starts a on 'n9', expected a known node"),
        (None, "plan starts a on None, expected a known node"),
        (["n0"], r"plan starts a on \['n0'\], expected a known node"),
        ("", "plan starts a on '', which has no cpu"),
        ("g0", "plan starts a on 'g0', which has no cpu"),
        ("draining", "plan starts a on draining, which is draining"),
        ("down", "plan starts a on down, which is down"),
        ("bare", "plan starts a on bare, which has no memory for its sandbox"),
    ],
)
def test_a_plan_for_a_node_that_cannot_run_the_action_stops(
    cluster: Make, decide: Callable[..., Any], node: Any, message: str
) -> None:
    policy = ScriptedPolicy(lambda snapshot: (decide(c.entry, node) for c in snapshot.candidates()))
    others = [pool for name in ("draining", "down") for pool in cpu_node(name, 4, 1.0)]
    c = cluster(
        *cpu_node("n0", 4, 1.0), *others, *cpu_node("bare", 4), Pool(kind="memory", node="g0", total=512), policy=policy
    )
    c.send(NodeChanged(node="draining", state=NodeState.DRAINING))
    c.send(NodeChanged(node="down", state=NodeState.DOWN))
    c.send(Reserve(sandbox="box", memory=512))
    with pytest.raises(InvariantError, match=f"policy scripted: {message}") as caught:
        c.submit("a", ONE, sandbox="box")
    assert "Submit" in caught.value.story[0]
    assert all(pool.held == 0 for pool in c.scheduler.ledger.pools.values())


def test_what_has_its_sandbox_on_a_node_that_drains_goes_on(cluster: Make) -> None:
    c = cluster(*NODE, policy=ScriptedPolicy())
    c.send(Reserve(sandbox="box", memory=0, node="n0"))
    c.send(NodeChanged(node="n0", state=NodeState.DRAINING))
    c.submit("a", ONE, sandbox="box")
    assert c.starts() == ["a"]


@pytest.mark.parametrize("field", ["units", "limit", "width"])
@pytest.mark.parametrize("value", [1000.0, True, -1000, None, "1000", math.nan])
def test_an_amount_that_is_no_whole_number_is_not_begun(cluster: Make, field: str, value: Any) -> None:
    c = cluster(
        *NODE,
        policy=ScriptedPolicy(
            lambda snapshot: (Begin(c.entry, c.node, **{field: value}) for c in snapshot.candidates())
        ),
    )
    with pytest.raises(
        InvariantError, match=f"policy scripted: plan begins a with .*{field} {value!r}.* whole numbers"
    ) as caught:
        c.submit("a", {"cpu": learned(4)})
    assert "Submit" in caught.value.story[0]
    assert c.free("cpu@n0") == 4000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"review_s": math.nan}, "plan reviews a after nan"),
        ({"review_s": "soon"}, "plan reviews a after 'soon'"),
        ({"riders": ("b",)}, r"plan begins a with riders \('b',\), expected waiting entries"),
        ({"riders": 3}, "plan begins a with riders 3, expected waiting entries"),
    ],
)
def test_a_review_without_a_time_and_riders_that_are_none_are_named(
    cluster: Make, fields: dict[str, Any], message: str
) -> None:
    c = cluster(
        *NODE, policy=ScriptedPolicy(lambda snapshot: (Begin(c.entry, c.node, **fields) for c in snapshot.candidates()))
    )
    with pytest.raises(InvariantError, match=f"policy scripted: {message}"):
        c.submit("a", ONE)
    assert c.free("cpu@n0") == 4000


@pytest.mark.parametrize("decision", [Begin("a", "n0"), Hold("a", "n0"), Adjust("a", 1, 1)])  # type: ignore[arg-type]
def test_a_decision_about_no_entry_is_named(cluster: Make, decision: Any) -> None:
    c = cluster(*NODE, policy=ScriptedPolicy(lambda snapshot: [decision]))
    with pytest.raises(
        InvariantError, match=r"policy scripted: plan names 'a' in a .*, expected an entry of the snapshot"
    ):
        c.submit("a", ONE)


@pytest.mark.parametrize(("reserved", "limit"), [(2000.0, 4000), (2000, 4000.0), (True, True), (2000, None)])
def test_a_size_that_is_no_whole_number_is_not_given(cluster: Make, reserved: Any, limit: Any) -> None:
    policy = ScriptedPolicy()
    c = cluster(*NODE, policy=policy)
    c.submit("a", {"cpu": cores(1, 4)})
    entry = c.scheduler.entries["a"]
    policy.decide = lambda snapshot: [Adjust(entry, reserved, limit)]
    with pytest.raises(
        InvariantError, match=r"policy scripted: plan resizes a to .*, expected whole numbers"
    ) as caught:
        c.submit("b", ONE)
    assert "Submit" in caught.value.story[0]
    assert c.free("cpu@n0") == 3000


@pytest.mark.parametrize(
    ("node", "devices", "message"),
    [
        ("n0", (0,), "plan preloads judge on 'n0', which has no gpu"),
        ("n9", (0,), "plan preloads judge on 'n9', which has no gpu"),
        ("g0", (0, 1, 2), r"plan preloads judge on devices \(0, 1, 2\) of g0, expected a free chunk"),
        ("g0", (1, 2), r"plan preloads judge on devices \(1, 2\) of g0, expected a free chunk"),
        ("g0", (2, 3), r"plan preloads judge on devices \(2, 3\) of g0, expected a free chunk"),
        ("g0", (), r"plan preloads judge on devices \(\) of g0, expected a free chunk"),
        ("g0", 1, "plan preloads judge on devices 1 of g0, expected a free chunk"),
    ],
)
def test_a_preload_where_it_cannot_be_is_named(cluster: Make, node: str, devices: Any, message: str) -> None:
    gpu = Pool(kind="gpu", node="g0", total=2)
    c = cluster(*NODE, gpu, policy=ScriptedPolicy(lambda snapshot: [Preload("judge", node, devices)]))
    with pytest.raises(InvariantError, match=f"policy scripted: {message}"):
        c.submit("a", ONE)


@pytest.mark.parametrize("reserve", [None, "1000", 500.0, True, 0, -250])
def test_a_reserve_that_is_no_whole_number_of_milli_cores_is_named(cluster: Make, reserve: Any) -> None:
    class Odd(ScriptedPolicy):
        def reserve(self, entry: object, snapshot: object) -> Any:
            return reserve

    c = cluster(*NODE, policy=Odd())
    with pytest.raises(
        InvariantError, match=f"policy scripted reserves {reserve!r} for a, expected .* whole number"
    ) as caught:
        c.submit("a", {"cpu": learned(4)})
    assert "Submit" in caught.value.story[0]
    assert c.free("cpu@n0") == 4000


def test_when_a_start_oversells_one_pool_the_units_of_its_other_pools_are_returned(cluster: Make) -> None:
    policy = ScriptedPolicy()
    c = cluster(*NODE, Pool(kind="api", total=1), policy=policy)
    c.submit("all", {"cpu": cores(4)})
    c.submit("a", {"cpu": cores(1, 4), "api": fixed(1)})
    c.submit("b", {"cpu": cores(1, 4), "api": fixed(1)})
    policy.decide = lambda snapshot: [Begin(c.scheduler.entries[name], "n0") for name in "ab"]
    with pytest.raises(InvariantError, match="policy scripted: plan oversells api"):
        c.run("all")
    assert (c.free("cpu@n0"), c.free("api")) == (3000, 0)
    c.scheduler.grants.check()


def test_the_story_of_a_wrong_plan_appears_once(cluster: Make) -> None:
    c = cluster(
        *NODE, policy=ScriptedPolicy(lambda snapshot: [Begin(c.entry, c.node) for c in snapshot.candidates()] * 2)
    )
    with pytest.raises(InvariantError) as caught:
        c.submit("a", ONE)
    assert str(caught.value).count("Submit") == 1


def test_a_second_attempt_starts_from_nothing(cluster: Make) -> None:
    """What the first one did is lost; counted as done it would spoil what is learned and how much is left."""
    c = cluster(*NODE, policy="adaptive")
    c.submit("a", {"cpu": cores(1, 4)}, idempotent=True, duration_s=100.0)
    c.started("a")
    c.now = 5.0
    c.submit("b", {"cpu": cores(1, 4)}, duration_s=100.0)
    entry = c.scheduler.entries["a"]
    assert entry.done_s > 0.0 and entry.unit_s > 0.0, "it was resized, and what it did was counted"
    c.now = 10.0
    c.finished("a", lost="killed")
    assert (c.start("a").grant.attempt, entry.done_at(10.0), entry.unit_s, entry.speed) == (2, 0.0, 0.0, 1.0)


def test_after_a_round_only_half_a_core_more_or_less_is_worth_a_look(cluster: Make) -> None:
    c = cluster(*NODE, policy="adaptive")
    c.submit("a", {"cpu": cores(1, 2)}, duration_s=100.0)
    c.started("a")
    pool = c.scheduler.ledger.pools["cpu@n0"]
    assert pool.free_at_last_round == pool.free
    assert not pool.is_resize_due()
    pool.free_at_last_round = pool.free - 499
    assert not pool.is_resize_due()
    pool.free_at_last_round = pool.free - 500
    assert pool.is_resize_due()
    pool.elastic_held = 0
    assert not pool.is_resize_due(), "no action could be resized"


def test_a_pool_is_tight_while_few_units_are_free_and_elastic_actions_could_give_some(cluster: Make) -> None:
    c = cluster(*NODE)
    pool = c.scheduler.ledger.pools["cpu@n0"]
    pool.elastic_held, pool.elastic_min, pool.free = 3000, 1000, 999
    assert pool.is_tight(0)
    pool.free = 1000
    assert not pool.is_tight(500)
    assert pool.is_tight(501), "less than twice what is asked for"
    pool.elastic_min = 3000
    assert not pool.is_tight(501)
